//! Figure 8.

use crate::plot::{Axis, INK, MUTED, NOTE, PATH, Panel, Picture, STOCHASTIC, Words};
use crate::table::Table;
use crate::{Drawing, Error, Figure};

pub(crate) const FIGURE: Figure = Figure {
    id: "8",
    file: "08-blocks",
    title: "Think in blocks",
    alt: "Three rows of 16 squares, one row a program, numbered with the elements 0 to 36; the last 11 squares \
          of the third row are hatched.",
    caption: "How a kernel that works in blocks of 16 lanes covers an array of 37 elements, a cast from f32 (4 \
              bytes) to BF16 (2 bytes): program k takes elements 16k to 16k + 15. Hatched lanes lie past the end \
              and are masked: they read and write nothing.",
    see: "The array needs ⌈37/16⌉ programs. Which element a lane holds is known from the program and the lane \
          alone, so its random word can be too: here the word of an element depends on its index, and not on the \
          block, so any block size gives the same bits.",
    draw,
};

const ELEMENTS: usize = 37;
const BLOCK: usize = 16;

fn draw() -> Result<Drawing, Error> {
    let programs = ELEMENTS.div_ceil(BLOCK);
    let masked = programs * BLOCK - ELEMENTS;
    let (read, written) = (ELEMENTS * size_of::<f32>(), ELEMENTS * size_of::<u16>());
    let mut panel = Panel::new("", Axis::hidden(0.0..20.0), Axis::hidden(5.9..0.0));
    for program in 0..programs {
        let row = 0.55 + 1.45 * program as f64;
        panel.words((2.6, row + 0.5), format!("program {program}"), INK, Words::ending());
        for lane in 0..BLOCK {
            let (element, x) = (program * BLOCK + lane, 3.0 + lane as f64);
            let (from, to) = ((x + 0.04, row), (x + 0.96, row + 1.0));
            if element < ELEMENTS {
                panel.fill(from, to, PATH);
                panel.words((x + 0.5, row + 0.5), element.to_string(), INK, Words::centred());
            } else {
                panel.hatch(from, to, MUTED);
            }
            panel.outline(from, to, MUTED);
        }
    }
    for lane in [0, BLOCK - 1] {
        panel.words((3.5 + lane as f64, 0.25), format!("lane {lane}"), NOTE, Words::centred().sized(23));
    }
    let lanes = programs * BLOCK;
    let counts = [
        format!("{programs} programs, {lanes} lanes"),
        format!("{masked} masked"),
        format!("{read} bytes read"),
        format!("{written} bytes written"),
    ];
    for (text, x) in counts.iter().zip([3.0, 8.3, 11.4, 15.2]) {
        panel.label((x, 5.4), text.as_str(), STOCHASTIC);
    }
    let mut table = Table::new(["quantity", "value"]);
    let quantities = ["elements", "block", "programs", "lanes", "masked lanes", "bytes read", "bytes written"];
    for (quantity, value) in quantities.into_iter().zip([ELEMENTS, BLOCK, programs, lanes, masked, read, written]) {
        table.row([quantity.into(), (value as f64).into()]);
    }
    Ok((Picture::new("37 elements in blocks of 16", &[1], 580, vec![panel]), table).into())
}

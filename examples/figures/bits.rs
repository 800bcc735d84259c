//! Figure 7.

use halfulp::random::Draws;
use halfulp::round::{Mode, Overflow, RandomBits, round};
use halfulp::{Draw, Format};
use plotters::style::RGBColor;

use crate::plot::{Axis, INK, MUTED, NOTE, PAPER, PATH, Panel, Picture, STOCHASTIC, Words, mix, thousands};
use crate::table::Table;
use crate::{Drawing, Error, Figure};

pub(crate) const FIGURE: Figure = Figure {
    id: "7",
    file: "07-bits",
    title: "The probability is already in the bits",
    alt: "The 32 bits of an f32 in four coloured fields, sign, exponent, 7 kept and 16 dropped bits. Below, the \
          dropped bits and two random words are added: one sum carries into the kept field, the other does not.",
    caption: "The f32 value 1.25 + 0.3/128, which lies 0.3 of the way between two BF16 values, and the rounding \
              of it under two draws of stream 1 (seed 7, elements as given). The word of the negative value \
              differs in its sign bit alone.",
    see: "BF16 is the upper half of the word. The dropped half, read as a whole number, is the fraction times \
          65,536: added to 16 random bits it carries into the kept half for exactly that many of the 65,536 \
          draws. For either sign the carry leads away from zero.",
    draw,
};

const X: f32 = 1.25 + 0.3 / 128.0;
const SEED: u64 = 7;

/// Columns of the drawing: one a bit, after room for the name of a row.
const LEFT: f64 = 7.0;

struct Field {
    name: &'static str,
    bits: u32,
    color: RGBColor,
}

/// The fields of an f32 as a cast to BF16 sees them.
fn fields() -> [Field; 4] {
    let kept = Format::BF16.fraction_bits();
    [
        Field { name: "sign", bits: 1, color: mix(PAPER, MUTED, 0.65) },
        Field { name: "exponent", bits: Format::BF16.exponent_bits(), color: mix(PAPER, MUTED, 0.18) },
        Field { name: "kept", bits: kept, color: mix(PAPER, MUTED, 0.4) },
        Field { name: "dropped", bits: 23 - kept, color: PATH },
    ]
}

/// Bits `count..0` of a word in boxes that end at column `end`.
fn boxes(panel: &mut Panel, row: f64, end: u32, word: u32, fields: &[(u32, RGBColor)]) {
    let count: u32 = fields.iter().map(|(bits, _)| bits).sum();
    let colors = fields.iter().flat_map(|&(bits, color)| (0..bits).map(move |_| color));
    for (i, color) in (0..count).zip(colors) {
        let x = LEFT + f64::from(end - count + i);
        panel.fill((x, row), (x + 1.0, row + 1.0), color);
        panel.outline((x, row), (x + 1.0, row + 1.0), PAPER);
        let bit = word >> (count - 1 - i) & 1;
        panel.words((x + 0.5, row + 0.5), bit.to_string(), INK, Words::centred());
    }
}

fn name(panel: &mut Panel, row: f64, text: &str, color: RGBColor) {
    panel.words((LEFT - 0.4, row + 0.5), text, color, Words::ending().sized(24));
}

/// The first element whose draw carries, or does not.
fn element(carries: bool) -> u64 {
    let dropped = X.to_bits() & 0xFFFF;
    (0..).find(|&i| (u32::from(Draw::seeded(SEED).draw16(i)) + dropped > 0xFFFF) == carries).unwrap_or_default()
}

/// Dropped + random = sum, and what is stored.
fn addition(panel: &mut Panel, row: f64, element: u64, table: &mut Table) {
    let [sign, exponent, kept, dropped] = fields();
    let draw = Draw::seeded(SEED).draw16(element);
    let low = X.to_bits() & 0xFFFF;
    let sum = low + u32::from(draw);
    let carries = sum > 0xFFFF;
    let mode = Mode::Stochastic(RandomBits::of16(draw));
    let stored = round(X, Format::BF16, mode, Overflow::Ieee);
    let value = Format::BF16.value(stored);

    name(panel, row, "dropped bits", NOTE);
    boxes(panel, row, 32, low, &[(16, dropped.color)]);
    name(panel, row + 1.2, &format!("+ draw, element {element}"), NOTE);
    boxes(panel, row + 1.2, 32, draw.into(), &[(16, mix(PAPER, STOCHASTIC, 0.45))]);
    panel.guide(vec![(LEFT + 15.0, row + 2.35), (LEFT + 32.0, row + 2.35)], INK, 2);
    name(panel, row + 2.5, "= sum", NOTE);
    boxes(panel, row + 2.5, 32, sum & 0xFFFF, &[(16, dropped.color)]);
    if carries {
        boxes(panel, row + 2.5, 16, 1, &[(1, mix(PAPER, STOCHASTIC, 0.45))]);
        panel.words((LEFT + 14.7, row + 3.0), "carry", STOCHASTIC, Words::ending().bold());
    } else {
        panel.words((LEFT + 14.7, row + 3.0), "no carry", NOTE, Words::ending().bold());
    }
    name(panel, row + 3.8, "stored", INK);
    let upper = [sign, exponent, kept].map(|field| (field.bits, field.color));
    boxes(panel, row + 3.8, 16, stored.into(), &upper);
    let went = if carries { "up" } else { "down" };
    panel.label((LEFT + 16.5, row + 4.3), format!("= {value}: {went}"), INK);
    table.row([
        f64::from(X).into(),
        (element as f64).into(),
        f64::from(low).into(),
        f64::from(draw).into(),
        f64::from(sum).into(),
        f64::from(u8::from(carries)).into(),
        // All digits: it is the value that is stored.
        value.to_string().into(),
    ]);
}

fn draw() -> Result<Drawing, Error> {
    let mut table = Table::new(["x", "element", "dropped bits", "draw", "sum", "carry", "stored"]);
    let mut panel = Panel::new("", Axis::hidden(0.0..40.0), Axis::hidden(16.2..0.0));
    let fields = fields();
    let layout: Vec<_> = fields.iter().map(|field| (field.bits, field.color)).collect();
    let mut start = LEFT;
    for field in &fields {
        let middle = start + f64::from(field.bits) / 2.0;
        panel.words((middle, 0.5), format!("{} {}", field.bits, field.name), NOTE, Words::centred().sized(24));
        start += f64::from(field.bits);
    }
    for (row, x, text) in [(1.0, X, "1.25 + 0.3/128"), (2.2, -X, "its negative")] {
        name(&mut panel, row, text, INK);
        boxes(&mut panel, row, 32, x.to_bits(), &layout);
    }
    let dropped = X.to_bits() & 0xFFFF;
    let share = f64::from(dropped) / 65536.0;
    let words =
        format!("the dropped bits are {} = {share:.6} × 65,536: the probability of a carry", thousands(dropped.into()));
    panel.words((LEFT + 32.0, 3.75), words, STOCHASTIC, Words::ending());
    addition(&mut panel, 5.0, element(true), &mut table);
    addition(&mut panel, 11.2, element(false), &mut table);
    Ok((Picture::new("From f32 to BF16 by adding 16 random bits", &[1], 900, vec![panel]), table).into())
}

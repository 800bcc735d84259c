//! Tables 1 and 2.

use halfulp::Format;

use crate::table::{Cell, Table};
use crate::{Drawing, Error, Figure};

pub(crate) const FORMATS: Figure = Figure {
    id: "table-1",
    file: "table-1-formats",
    title: "Formats of optimizer states",
    alt: "Spacing and range of BF16, the FP8 and the FP4 formats",
    caption: "Fraction bits p, spacing ε = 2⁻ᵖ just above 1, the smallest relative update that nearest rounding \
              never loses (half the spacing at the lower end of a binade), smallest and largest value, and the \
              state memory saved against f32. BF16, E4M3 (FP8) and the unsigned UE2M2 without zero (FP4) are the \
              second moments of the paper; E2M1 is its FP4 first moment; UE4M4 gives the sign bit of E4M3 to the \
              fraction, UE5M3 to the exponent.",
    see: "The update of a second moment is at most a few times 1 − β₂, a thousandth, and half a spacing is four \
          thousandths even in BF16.",
    draw: formats,
};

fn formats() -> Result<Drawing, Error> {
    let head = ["format", "bits", "fraction bits", "ε", "ε/2", "smallest", "largest", "memory saved"];
    let mut table = Table::new(head);
    for format in [Format::BF16, Format::E4M3, Format::UE4M4, Format::UE5M3, Format::E2M1, Format::UE2M2NZ] {
        table.row([
            format.to_string().into(),
            f64::from(format.bits()).into(),
            f64::from(format.fraction_bits()).into(),
            format.epsilon().into(),
            (format.epsilon() / 2.0).into(),
            format.min_positive().into(),
            format.max().into(),
            format!("{} %", 100.0 * (1.0 - f64::from(format.bits()) / 32.0)).into(),
        ]);
    }
    Ok(table.into())
}

pub(crate) const LOSSES: Figure = Figure {
    id: "table-2",
    file: "table-2-losses",
    title: "Validation loss with low-precision states",
    alt: "Final validation losses of the paper for four state formats",
    caption: "Not measured here: the paper's final validation losses of LLaMA-100M on C4, with only the \
              optimizer states in low precision (K. Topollai, A. Choromanska, arXiv:2603.16731). FP8 is E4M3 for \
              both moments; FP4 is E2M1 and unsigned E2M2 without zero in blocks of 128. With BF16 weights as \
              well, stochastic rounding and resets together took it from 3.27 to 3.21 (BF16 states), 3.33 to \
              3.22 (FP8) and 3.32 to 3.26 (FP4).",
    see: "Nearest rounding costs .026 to .044 of loss. Stochastic rounding and resets each win most of it back; \
          in FP4, where rounding noise is large, resets win more.",
    draw: losses,
};

/// The paper's values, in its order: states in f32, BF16, FP8, FP4.
const LOSSES_OF_THE_PAPER: [(&str, [&str; 4]); 4] = [
    ("nearest", ["3.155", "3.181", "3.193", "3.199"]),
    ("stochastic", ["–", "3.156", "3.160", "3.182"]),
    ("resets only", ["3.161", "3.158", "3.159", "3.166"]),
    ("stochastic and resets", ["–", "3.155", "3.155", "3.160"]),
];

fn losses() -> Result<Drawing, Error> {
    let mut table = Table::new(["states", "f32", "BF16", "FP8", "FP4"]);
    for (name, losses) in LOSSES_OF_THE_PAPER {
        let [f32, bf16, fp8, fp4] = losses.map(Cell::from);
        table.row([name.into(), f32, bf16, fp8, fp4]);
    }
    table.row(["memory saved", "0 %", "50 %", "75 %", "87.5 %"].map(Cell::from));
    Ok(table.into())
}

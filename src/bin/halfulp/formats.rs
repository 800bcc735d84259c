//! `halfulp formats`: the table of named formats.

use std::io::{self, Write};

use halfulp::Format;
use halfulp::format::Specials;
use halfulp::round::Overflow;

use crate::table;

const TITLES: [&str; 9] = [
    "name",
    "bits",
    "sign+exponent+fraction",
    "bias",
    "specials",
    "smallest",
    "smallest normal",
    "largest",
    "overflow",
];

/// Prints a line a format.
pub(crate) fn print(out: &mut impl Write) -> io::Result<()> {
    table::print(out, TITLES, Format::NAMED.map(|(name, format)| row(name, format)))
}

fn row(name: &str, format: Format) -> [String; TITLES.len()] {
    let specials = match format.specials() {
        Specials::Ieee => "infinity, NaN",
        Specials::NanOnly => "NaN",
        _ => "none",
    };
    let zero = if format.has_zero() { "" } else { "; no zero" };
    let overflow = match Overflow::of(format) {
        Overflow::Ieee => "ieee",
        _ => "saturate",
    };
    [
        name.into(),
        format.bits().to_string(),
        format!("{}+{}+{}", u8::from(format.is_signed()), format.exponent_bits(), format.fraction_bits()),
        format.bias().to_string(),
        format!("{specials}{zero}"),
        number(format.min_positive()),
        number(format.min_positive_normal()),
        number(format.max()),
        overflow.into(),
    ]
}

/// Short and exact, except for the largest BF16.
fn number(x: f64) -> String {
    let exponent = (x.to_bits() >> 52) as i32 - 1023;
    let is_power_of_two = x.to_bits() << 12 == 0;
    match x {
        _ if is_power_of_two && exponent != 0 => format!("2^{exponent}"),
        ..1e6 => x.to_string(),
        _ => format!("{x:.4e}"),
    }
}

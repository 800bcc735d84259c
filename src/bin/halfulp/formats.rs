//! `halfulp formats`: the table of named formats.

use std::io::{self, Write};

use halfulp::Format;
use halfulp::format::Specials;
use halfulp::round::Overflow;

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

/// Prints a line a format, columns aligned.
pub(crate) fn print(out: &mut impl Write) -> io::Result<()> {
    let mut rows = vec![TITLES.map(String::from)];
    rows.extend(Format::NAMED.map(|(name, format)| row(name, format)));
    let widths: [usize; TITLES.len()] =
        std::array::from_fn(|column| rows.iter().map(|row| row[column].len()).max().unwrap_or(0));
    for row in rows {
        let cells: Vec<String> = row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        writeln!(out, "{}", cells.join("  ").trim_end())?;
    }
    Ok(())
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

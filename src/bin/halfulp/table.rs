//! Tables of text.

use std::io::{self, Write};

/// Prints a line a row, the titles first, columns aligned.
pub(crate) fn print<const N: usize>(
    out: &mut impl Write,
    titles: [&str; N],
    rows: impl IntoIterator<Item = [String; N]>,
) -> io::Result<()> {
    let mut lines = vec![titles.map(String::from)];
    lines.extend(rows);
    let widths: [usize; N] =
        std::array::from_fn(|column| lines.iter().map(|line| line[column].len()).max().unwrap_or(0));
    for line in lines {
        let cells: Vec<String> = line.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        writeln!(out, "{}", cells.join("  ").trim_end())?;
    }
    Ok(())
}

//! Tables: what a CSV holds, and what the page and Markdown show of those without a picture.

/// One cell.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Cell {
    Text(String),
    Number(f64),
}

impl From<&str> for Cell {
    fn from(text: &str) -> Self {
        Self::Text(text.into())
    }
}

impl From<String> for Cell {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl From<f64> for Cell {
    fn from(number: f64) -> Self {
        Self::Number(number)
    }
}

impl Cell {
    /// The text, or the number in at most six significant digits.
    pub(crate) fn text(&self) -> String {
        match self {
            Self::Text(text) => text.clone(),
            Self::Number(number) => six_digits(*number),
        }
    }
}

/// Rows under a heading.
#[derive(Debug)]
pub(crate) struct Table {
    pub(crate) head: Vec<String>,
    pub(crate) rows: Vec<Vec<Cell>>,
}

impl Table {
    pub(crate) fn new<const N: usize>(head: [&str; N]) -> Self {
        Self { head: head.map(String::from).into(), rows: vec![] }
    }

    pub(crate) fn row<const N: usize>(&mut self, row: [Cell; N]) {
        self.rows.push(row.into());
    }

    /// Markdown.
    pub(crate) fn markdown(&self) -> String {
        let line = |cells: Vec<String>| format!("| {} |\n", cells.join(" | ").replace('\n', " "));
        let rows = self.rows.iter().map(|row| line(row.iter().map(|cell| cell.text().replace('|', "\\|")).collect()));
        line(self.head.clone()) + &line(vec!["---".into(); self.head.len()]) + &rows.collect::<String>()
    }

    /// Comma-separated values.
    pub(crate) fn csv(&self) -> String {
        let line = |cells: Vec<String>| cells.iter().map(|cell| quoted(cell)).collect::<Vec<_>>().join(",") + "\n";
        let rows = self.rows.iter().map(|row| line(row.iter().map(Cell::text).collect()));
        line(self.head.clone()) + &rows.collect::<String>()
    }
}

/// A field that holds a comma or a quote stands in quotes.
fn quoted(field: &str) -> String {
    if field.contains([',', '"']) { format!("\"{}\"", field.replace('"', "\"\"")) } else { field.into() }
}

/// At most six significant digits, without trailing zeros.
pub(crate) fn six_digits(x: f64) -> String {
    let rounded = format!("{x:.5e}");
    // Reading back what was written gives the shortest form of it.
    let value: f64 = rounded.parse().unwrap_or(x);
    if value != 0.0 && (value.abs() < 1e-4 || value.abs() >= 1e9) { format!("{value:e}") } else { value.to_string() }
}

//! One style for all figures: SVG without system fonts, and the numbers beside it as CSV.

use std::fs;
use std::ops::Range;
use std::path::Path;

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

pub(crate) type Error = Box<dyn std::error::Error>;
type Points = Vec<(f64, f64)>;

pub(crate) const INK: RGBColor = RGBColor(0x1B, 0x1F, 0x24);
pub(crate) const NEAREST: RGBColor = RGBColor(0xC8, 0x45, 0x3D);
pub(crate) const STOCHASTIC: RGBColor = RGBColor(0x6D, 0x4B, 0xD6);
pub(crate) const PATH: RGBColor = RGBColor(0xD4, 0xCB, 0xEA);
pub(crate) const MUTED: RGBColor = RGBColor(0x8A, 0x94, 0x9E);
const GRID: RGBColor = RGBColor(0xEE, 0xF0, 0xF2);

/// Coordinates are whole pixels: a smaller picture would have stairs.
const SIZE: (u32, u32) = (1600, 900);

/// One pair of axes with what is drawn on them, in order.
pub(crate) struct Panel {
    title: &'static str,
    x: (&'static str, Range<f64>),
    y: (&'static str, Range<f64>),
    lines: Vec<Line>,
    labels: Vec<((f64, f64), &'static str, RGBColor)>,
}

struct Line {
    name: String,
    points: Points,
    color: RGBColor,
    width: u32,
    dotted: bool,
}

impl Panel {
    /// Axes with a name and a range each.
    pub(crate) fn new(title: &'static str, x: (&'static str, Range<f64>), y: (&'static str, Range<f64>)) -> Self {
        Self { title, x, y, lines: vec![], labels: vec![] }
    }

    /// A line, under a name in the table.
    pub(crate) fn line(&mut self, name: impl Into<String>, points: Points, color: RGBColor, width: u32) {
        self.lines.push(Line { name: name.into(), points, color, width, dotted: false });
    }

    /// A dotted line.
    pub(crate) fn dotted(&mut self, name: impl Into<String>, points: Points, color: RGBColor) {
        self.lines.push(Line { name: name.into(), points, color, width: 4, dotted: true });
    }

    /// Text that begins at a point of the axes, in the colour of what it names.
    pub(crate) fn label(&mut self, at: (f64, f64), text: &'static str, color: RGBColor) {
        self.labels.push((at, text, color));
    }

    /// Writes `NAME.svg` and `NAME.csv` into a directory.
    pub(crate) fn write(&self, directory: &Path, name: &str) -> Result<(), Error> {
        fs::create_dir_all(directory)?;
        fs::write(directory.join(name).with_extension("svg"), self.svg()?)?;
        fs::write(directory.join(name).with_extension("csv"), self.csv()?)?;
        Ok(())
    }

    fn svg(&self) -> Result<String, Error> {
        let mut svg = String::new();
        let text = |size: u32, color: &RGBColor| ("sans-serif", size).into_font().color(color);
        {
            let root = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
            root.fill(&WHITE)?;
            let mut chart = ChartBuilder::on(&root)
                .margin(30)
                .margin_right(60)
                .caption(self.title, text(40, &INK))
                .x_label_area_size(90)
                .y_label_area_size(110)
                .build_cartesian_2d(self.x.1.clone(), self.y.1.clone())?;
            chart
                .configure_mesh()
                .x_desc(self.x.0)
                .y_desc(self.y.0)
                .axis_desc_style(text(32, &INK))
                .label_style(text(28, &INK))
                .x_labels(7)
                .y_labels(7)
                .x_label_formatter(&|x| format!("{x}"))
                .y_label_formatter(&|y| format!("{y}"))
                .axis_style(MUTED.stroke_width(2))
                .bold_line_style(GRID.stroke_width(2))
                .light_line_style(TRANSPARENT)
                .draw()?;
            for line in &self.lines {
                let style = line.color.stroke_width(line.width);
                if line.dotted {
                    chart.draw_series(DashedLineSeries::new(line.points.iter().copied(), 4, 14, style))?;
                } else {
                    chart.draw_series(LineSeries::new(line.points.iter().copied(), style))?;
                }
            }
            for (at, words, color) in &self.labels {
                let style = text(32, color).pos(Pos::new(HPos::Left, VPos::Center));
                chart.draw_series([Text::new(*words, *at, style)])?;
            }
            root.present()?;
        }
        Ok(svg)
    }

    /// A column a line, all over the abscissas of the first.
    fn csv(&self) -> Result<String, Error> {
        let names: Vec<&str> = self.lines.iter().map(|line| line.name.as_str()).collect();
        let mut table = format!("x,{}\n", names.join(","));
        for (i, (x, _)) in self.lines.first().ok_or("no lines")?.points.iter().enumerate() {
            let values: Vec<String> = self.lines.iter().map(|line| six_digits(line.points[i].1)).collect();
            table += &format!("{},{}\n", six_digits(*x), values.join(","));
        }
        Ok(table)
    }
}

/// At most six significant digits, without trailing zeros.
fn six_digits(x: f64) -> String {
    format!("{x:.5e}").parse::<f64>().map_or_else(|_| x.to_string(), |rounded| rounded.to_string())
}

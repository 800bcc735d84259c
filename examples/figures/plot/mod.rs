//! One style for all figures: panels with axes, and on them lines, areas, dots, boxes and words, in the palette below.
//!
//! A figure describes its [`Panel`]s; [`Picture`] lays them out as a grid and becomes an SVG, a PNG ([`png`]) and, unless
//! the figure has a table of its own, a CSV of every line, area and dot that was drawn.

mod axis;
mod draw;
mod png;

use plotters::style::RGBColor;
use plotters::style::text_anchor::HPos;

pub(crate) use axis::{Axis, power_of_ten, thousands};
pub(crate) use draw::escape;
pub(crate) use png::png;

use crate::table::{Cell, Table};

pub(crate) const INK: RGBColor = RGBColor(0x1B, 0x1F, 0x24);
pub(crate) const NEAREST: RGBColor = RGBColor(0xC8, 0x45, 0x3D);
pub(crate) const STOCHASTIC: RGBColor = RGBColor(0x6D, 0x4B, 0xD6);
pub(crate) const PATH: RGBColor = RGBColor(0xD4, 0xCB, 0xEA);
pub(crate) const MUTED: RGBColor = RGBColor(0x8A, 0x94, 0x9E);
pub(crate) const GRID: RGBColor = RGBColor(0xEE, 0xF0, 0xF2);
pub(crate) const PAPER: RGBColor = RGBColor(0xFF, 0xFF, 0xFF);
/// Text of less weight than ink, yet dark enough to read on white.
pub(crate) const NOTE: RGBColor = RGBColor(0x5C, 0x66, 0x70);

pub(crate) type Points = Vec<(f64, f64)>;

/// A mixture of two colours: `share` of the second.
pub(crate) fn mix(a: RGBColor, b: RGBColor, share: f64) -> RGBColor {
    let part = |a: u8, b: u8| (f64::from(a) + (f64::from(b) - f64::from(a)) * share).round() as u8;
    RGBColor(part(a.0, b.0), part(a.1, b.1), part(a.2, b.2))
}

/// Panels in a grid, row by row, under a title.
pub(crate) struct Picture {
    title: String,
    /// Shares of the width.
    columns: Vec<u32>,
    height: u32,
    panels: Vec<Panel>,
}

impl Picture {
    /// A picture 1600 px wide and this high, with columns of these shares of the width.
    pub(crate) fn new(title: impl Into<String>, columns: &[u32], height: u32, panels: Vec<Panel>) -> Self {
        Self { title: title.into(), columns: columns.into(), height, panels }
    }

    /// Width and height in px.
    pub(crate) fn size(&self) -> (u32, u32) {
        (draw::WIDTH, self.height)
    }

    /// Every named mark of every panel: a row for each abscissa of a panel, a column for each name.
    pub(crate) fn table(&self) -> Table {
        let marks = |panel: &'_ Panel| -> Vec<(String, Points)> {
            panel.marks.iter().filter_map(Mark::numbers).map(|(name, points)| (name.into(), points.clone())).collect()
        };
        let mut names: Vec<String> = vec![];
        for (name, _) in self.panels.iter().flat_map(marks) {
            if !names.contains(&name) {
                names.push(name);
            }
        }
        let head = ["panel".into(), "x".into()].into_iter().chain(names.iter().cloned());
        let mut table = Table { head: head.collect(), rows: vec![] };
        for panel in &self.panels {
            let marks = marks(panel);
            let mut abscissas: Vec<f64> = marks.iter().flat_map(|(_, points)| points).map(|(x, _)| *x).collect();
            abscissas.sort_by(f64::total_cmp);
            abscissas.dedup();
            for x in abscissas {
                let found = |name: &String| {
                    let points = marks.iter().filter(|(own, _)| own == name).flat_map(|(_, points)| points);
                    points.into_iter().find(|(at, _)| *at == x).map_or("".into(), |(_, y)| Cell::from(*y))
                };
                let start = [panel.title.as_str().into(), x.into()].into_iter();
                table.rows.push(start.chain(names.iter().map(found)).collect());
            }
        }
        table
    }
}

/// One pair of axes with what is drawn on them, in order.
pub(crate) struct Panel {
    title: String,
    x: Axis,
    y: Axis,
    marks: Vec<Mark>,
}

enum Mark {
    Line {
        name: String,
        points: Points,
        color: RGBColor,
        width: u32,
        dotted: bool,
    },
    /// Between the points and the line `y = floor`.
    Area {
        name: String,
        points: Points,
        floor: f64,
        color: RGBColor,
    },
    Dots {
        name: String,
        points: Points,
        color: RGBColor,
        radius: u32,
        filled: bool,
    },
    Boxes {
        corners: [(f64, f64); 2],
        color: RGBColor,
        fill: Fill,
    },
    Words {
        at: (f64, f64),
        shift: (i32, i32),
        text: String,
        color: RGBColor,
        anchor: HPos,
        size: u32,
        bold: bool,
    },
}

#[derive(Clone, Copy)]
enum Fill {
    Full,
    Outline,
    Hatched,
}

impl Mark {
    /// The numbers behind a mark: names of marks that only guide the eye are empty.
    fn numbers(&self) -> Option<(&str, &Points)> {
        match self {
            Self::Line { name, points, .. } | Self::Area { name, points, .. } | Self::Dots { name, points, .. } => {
                (!name.is_empty()).then_some((name, points))
            }
            Self::Boxes { .. } | Self::Words { .. } => None,
        }
    }
}

impl Panel {
    pub(crate) fn new(title: impl Into<String>, x: Axis, y: Axis) -> Self {
        Self { title: title.into(), x, y, marks: vec![] }
    }

    /// A line, under its name in the table.
    pub(crate) fn line(&mut self, name: impl Into<String>, points: Points, color: RGBColor, width: u32) {
        self.marks.push(Mark::Line { name: name.into(), points, color, width, dotted: false });
    }

    /// A line of round dots.
    pub(crate) fn dotted(&mut self, name: impl Into<String>, points: Points, color: RGBColor) {
        self.marks.push(Mark::Line { name: name.into(), points, color, width: 3, dotted: true });
    }

    /// A line that only guides the eye: it is not in the table.
    pub(crate) fn guide(&mut self, points: Points, color: RGBColor, width: u32) {
        self.line("", points, color, width);
    }

    /// The area between a line and `y = floor`.
    pub(crate) fn area(&mut self, name: impl Into<String>, points: Points, floor: f64, color: RGBColor) {
        self.marks.push(Mark::Area { name: name.into(), points, floor, color });
    }

    /// Filled circles.
    pub(crate) fn dots(&mut self, name: impl Into<String>, points: Points, color: RGBColor, radius: u32) {
        self.marks.push(Mark::Dots { name: name.into(), points, color, radius, filled: true });
    }

    /// Open circles.
    pub(crate) fn rings(&mut self, name: impl Into<String>, points: Points, color: RGBColor, radius: u32) {
        self.marks.push(Mark::Dots { name: name.into(), points, color, radius, filled: false });
    }

    /// A filled rectangle.
    pub(crate) fn fill(&mut self, from: (f64, f64), to: (f64, f64), color: RGBColor) {
        self.boxes(from, to, color, Fill::Full);
    }

    /// The outline of a rectangle.
    pub(crate) fn outline(&mut self, from: (f64, f64), to: (f64, f64), color: RGBColor) {
        self.boxes(from, to, color, Fill::Outline);
    }

    /// A rectangle of diagonal lines.
    pub(crate) fn hatch(&mut self, from: (f64, f64), to: (f64, f64), color: RGBColor) {
        self.boxes(from, to, color, Fill::Hatched);
    }

    fn boxes(&mut self, from: (f64, f64), to: (f64, f64), color: RGBColor, fill: Fill) {
        self.marks.push(Mark::Boxes { corners: [from, to], color, fill });
    }

    /// Words that begin at a point, in the colour of what they name.
    pub(crate) fn label(&mut self, at: (f64, f64), text: impl Into<String>, color: RGBColor) {
        self.words(at, text, color, Words::default());
    }

    /// Words set as told.
    pub(crate) fn words(&mut self, at: (f64, f64), text: impl Into<String>, color: RGBColor, words: Words) {
        let Words { anchor, shift, size, bold } = words;
        self.marks.push(Mark::Words { at, shift, text: text.into(), color, anchor, size, bold });
    }
}

/// How words stand to their point.
#[derive(Clone, Copy)]
pub(crate) struct Words {
    pub(crate) anchor: HPos,
    /// From the point, in px, right and down.
    pub(crate) shift: (i32, i32),
    pub(crate) size: u32,
    pub(crate) bold: bool,
}

/// Size of words in a panel, in px.
pub(crate) const TEXT: u32 = 25;

impl Default for Words {
    fn default() -> Self {
        Self { anchor: HPos::Left, shift: (0, 0), size: TEXT, bold: false }
    }
}

impl Words {
    pub(crate) fn centred() -> Self {
        Self { anchor: HPos::Center, ..Self::default() }
    }

    /// Words that end at the point.
    pub(crate) fn ending() -> Self {
        Self { anchor: HPos::Right, ..Self::default() }
    }

    pub(crate) fn shifted(self, right: i32, down: i32) -> Self {
        Self { shift: (right, down), ..self }
    }

    pub(crate) fn sized(self, size: u32) -> Self {
        Self { size, ..self }
    }

    pub(crate) fn bold(self) -> Self {
        Self { bold: true, ..self }
    }
}

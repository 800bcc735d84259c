//! From panels to SVG, through plotters.

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::{Axis, Fill, GRID, INK, MUTED, Mark, NOTE, PAPER, Panel, Picture};
use crate::Error;

/// Width of a picture in px.
pub(super) const WIDTH: u32 = 1600;
/// Units of the SVG to a px. plotters draws at whole units, which at one to a px would put stairs into lines.
pub(super) const UNITS: u32 = 2;

/// The font that ships beside this example, then what resembles it.
const FONT: &str = "Inter, Helvetica, Arial, sans-serif";
/// plotters writes its sizes divided by this.
const SIZE_OF_PLOTTERS: f64 = 1.24;

// Lengths below are in px.
const MARGIN: u32 = 24;
const PICTURE_TITLE: u32 = 62;
/// Height of a panel's title, and of the name of its ordinate below, or the gap that is left without one.
const PANEL_TITLE: u32 = 38;
const PANEL_NAME: u32 = 44;
const PANEL_GAP: u32 = 12;
/// Between the axes and the next panel on the right: half of the last tick's words.
const PANEL_RIGHT: u32 = 24;
/// Below the axes: ticks, and under them the name of the abscissa.
const X_LABELS: u32 = 78;
const X_NAME: u32 = 34;
/// Between the words at ticks of an ordinate and the axis.
const TICK: u32 = 24;
const PICTURE_TEXT: u32 = 34;
const TITLE_TEXT: u32 = 27;
const TICK_TEXT: u32 = 23;
/// Dots of a dotted line, and the gaps between.
const DOTS: [u32; 2] = [4, 8];
/// Distance of hatching lines.
const HATCH: i32 = 9;

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Chart<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<Axis, Axis>>;

const fn units(px: u32) -> i32 {
    (px * UNITS) as i32
}

fn text(size: u32, color: RGBColor, bold: bool, anchor: HPos, vertical: VPos) -> TextStyle<'static> {
    let style = if bold { FontStyle::Bold } else { FontStyle::Normal };
    let font = FontDesc::new(FontFamily::Name(FONT), f64::from(size * UNITS) * SIZE_OF_PLOTTERS, style);
    font.color(&color).pos(Pos::new(anchor, vertical))
}

impl Picture {
    /// The picture as SVG, titled for readers who do not see it.
    pub(crate) fn svg(&self) -> Result<String, Error> {
        let mut svg = String::new();
        {
            let root = SVGBackend::with_string(&mut svg, (WIDTH * UNITS, self.height * UNITS)).into_drawing_area();
            root.fill(&PAPER)?;
            let title = text(PICTURE_TEXT, INK, true, HPos::Left, VPos::Top);
            root.draw(&Text::new(self.title.as_str(), (units(MARGIN), units(MARGIN)), title))?;
            let grid = root.margin(units(MARGIN + PICTURE_TITLE), units(MARGIN), units(MARGIN), units(MARGIN));
            let rows = self.panels.len().div_ceil(self.columns.len());
            let (width, height) = grid.dim_in_pixel();
            let total: u32 = self.columns.iter().sum();
            let ends = self.columns.iter().scan(0, |sum, share| {
                *sum += share;
                Some((width * *sum / total) as i32)
            });
            let lefts: Vec<i32> = ends.take(self.columns.len() - 1).collect();
            let tops: Vec<i32> = (1..rows).map(|row| (height as usize * row / rows) as i32).collect();
            for (area, panel) in grid.split_by_breakpoints(&lefts, &tops).iter().zip(&self.panels) {
                panel.draw(area)?;
            }
            root.present()?;
        }
        let open = svg.find('>').ok_or("an SVG without a tag")?;
        svg.insert_str(open + 1, &format!("\n<title>{}</title>", escape(&self.title)));
        Ok(svg)
    }
}

impl Panel {
    fn draw(&self, area: &Area<'_>) -> Result<(), Error> {
        let (x, y) = (&self.x, &self.y);
        let (width, height) = area.dim_in_pixel();
        let (right, bottom) = (width as i32 - units(PANEL_RIGHT), height as i32);
        let title = if self.title.is_empty() { 0 } else { PANEL_TITLE };
        let head = title + if y.name.is_empty() { PANEL_GAP } else { PANEL_NAME };
        let name = |anchor| text(TICK_TEXT, NOTE, false, anchor, VPos::Top);
        for (words, at, style) in [
            (&self.title, (0, 0), text(TITLE_TEXT, INK, true, HPos::Left, VPos::Top)),
            (&y.name, (0, units(title)), name(HPos::Left)),
            (&x.name, (right, bottom - units(X_NAME)), name(HPos::Right)),
        ] {
            if !words.is_empty() {
                area.draw(&Text::new(words.as_str(), at, style))?;
            }
        }

        let mut chart = ChartBuilder::on(area)
            .margin_top(units(if y.visible { head } else { 0 }))
            .margin_right(units(PANEL_RIGHT))
            .x_label_area_size(units(if x.visible { X_LABELS } else { 0 }))
            .y_label_area_size(units(if y.visible { y.room + TICK } else { 0 }))
            .build_cartesian_2d(x.clone(), y.clone())?;
        if x.visible || y.visible {
            let label = |h, v| text(TICK_TEXT, NOTE, false, h, v);
            chart
                .configure_mesh()
                .x_label_style(label(HPos::Center, VPos::Top))
                .y_label_style(label(HPos::Right, VPos::Center))
                .axis_style(MUTED.stroke_width(UNITS))
                .bold_line_style(GRID.stroke_width(UNITS))
                .light_line_style(TRANSPARENT)
                .set_all_tick_mark_size(units(6))
                .draw()?;
        }
        for mark in &self.marks {
            self.check(mark)?;
            mark.draw(&mut chart)?;
        }
        Ok(())
    }

    /// Lines may leave the axes, and are then held at their edge. A dot there would be a wrong number.
    fn check(&self, mark: &Mark) -> Result<(), Error> {
        let Mark::Dots { points, .. } = mark else { return Ok(()) };
        match points.iter().find(|(x, y)| !(self.x.holds(*x) && self.y.holds(*y))) {
            Some((x, y)) => {
                Err(format!("panel `{}`: expected dots within the axes, got one at {x}, {y}", self.title).into())
            }
            None => Ok(()),
        }
    }
}

impl Mark {
    fn draw(&self, chart: &mut Chart<'_, '_>) -> Result<(), Error> {
        match self {
            Self::Line { points, color, width, dotted, .. } => {
                let (points, style) = (points.iter().copied(), color.stroke_width(width * UNITS));
                if *dotted {
                    let [dot, gap] = DOTS.map(|px| px * UNITS);
                    chart.draw_series(DashedLineSeries::new(points, dot, gap, style)).map(drop)?;
                } else {
                    chart.draw_series(LineSeries::new(points, style)).map(drop)?;
                }
            }
            Self::Area { points, floor, color, .. } => {
                let ends = [points.last(), points.first()].into_iter().flatten().map(|&(x, _)| (x, *floor));
                let outline: Vec<_> = points.iter().copied().chain(ends).collect();
                chart.draw_series([Polygon::new(outline, color.filled())])?;
            }
            Self::Dots { points, color, radius, filled, .. } => {
                let inside = if *filled { *color } else { PAPER };
                let circles = |style: ShapeStyle| points.iter().map(move |&at| Circle::new(at, units(*radius), style));
                chart.draw_series(circles(inside.filled()))?;
                if !filled {
                    chart.draw_series(circles(color.stroke_width(3 * UNITS)))?;
                }
            }
            Self::Boxes { corners, color, fill } => {
                rectangle(chart, *corners, *color, *fill)?;
            }
            Self::Words { at, shift, text: words, color, anchor, size, bold } => {
                let style = text(*size, *color, *bold, *anchor, VPos::Center);
                let shift = (shift.0 * units(1), shift.1 * units(1));
                let words = Text::new(words.clone(), shift, style);
                chart.draw_series([EmptyElement::at(*at) + words])?;
            }
        }
        Ok(())
    }
}

fn rectangle(chart: &mut Chart<'_, '_>, corners: [(f64, f64); 2], color: RGBColor, fill: Fill) -> Result<(), Error> {
    match fill {
        Fill::Full => chart.draw_series([Rectangle::new(corners, color.filled())]).map(drop)?,
        Fill::Outline => {
            let [(x0, y0), (x1, y1)] = corners;
            let path = vec![(x0, y0), (x1, y0), (x1, y1), (x0, y1), (x0, y0)];
            chart.draw_series([PathElement::new(path, color.stroke_width(UNITS))]).map(drop)?;
        }
        Fill::Hatched => {
            let [a, b] = corners.map(|corner| chart.backend_coord(&corner));
            let area = chart.plotting_area().strip_coord_spec();
            let (left, top) = area.get_base_pixel();
            let (x0, x1) = (a.0.min(b.0) - left, a.0.max(b.0) - left);
            let (y0, y1) = (a.1.min(b.1) - top, a.1.max(b.1) - top);
            // Lines x + y = sum, cut at the sides.
            for sum in (x0 + y0..x1 + y1).step_by((HATCH * units(1)) as usize).skip(1) {
                let from = (x0.max(sum - y1), (sum - x0).min(y1));
                let to = ((sum - y0).min(x1), y0.max(sum - x1));
                area.draw(&PathElement::new(vec![from, to], color.stroke_width(UNITS)))?;
            }
        }
    }
    Ok(())
}

/// Text for HTML and SVG.
pub(crate) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

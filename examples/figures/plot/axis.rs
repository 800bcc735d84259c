//! Axes: a name, a range, where the ticks are and what they say.

use std::ops::Range;

use plotters::coord::ranged1d::{KeyPointHint, NoDefaultFormatting, Ranged, ValueFormatter};

/// One axis, which plotters asks where a value lies.
#[derive(Clone)]
pub(crate) struct Axis {
    pub(super) name: String,
    scale: Scale,
    range: Range<f64>,
    ticks: Vec<(f64, String)>,
    pub(super) visible: bool,
    /// Width of what the ticks of an ordinate say, in px.
    pub(super) room: u32,
}

#[derive(Clone, Copy)]
enum Scale {
    Linear,
    Log,
}

impl Axis {
    fn new(name: impl Into<String>, scale: Scale, range: Range<f64>) -> Self {
        Self { name: name.into(), scale, range, ticks: vec![], visible: true, room: 68 }
    }

    /// A linear axis with a tick at every multiple of `step`.
    pub(crate) fn linear(name: impl Into<String>, range: Range<f64>, step: f64) -> Self {
        let multiples = (range.start / step).ceil() as i64..=(range.end / step).floor() as i64;
        // Rounded, so that a multiple of a step that is no f64 says what was meant.
        let ticks = multiples.map(|k| (k as f64 * step * 1e9).round() / 1e9);
        let ticks: Vec<_> = ticks.map(|x| (x, thousands(x).replace('-', "−"))).collect();
        Self::new(name, Scale::Linear, range).ticks(ticks)
    }

    /// A logarithmic axis with a tick at every power of ten.
    pub(crate) fn log(name: impl Into<String>, range: Range<f64>) -> Self {
        let powers = libm::log10(range.start).ceil() as i32..=libm::log10(range.end).floor() as i32;
        let ticks: Vec<_> = powers.map(|k| (libm::exp10(k.into()), power_of_ten(k))).collect();
        Self::new(name, Scale::Log, range).ticks(ticks)
    }

    /// No line, no ticks, no name: coordinates for a drawing.
    pub(crate) fn hidden(range: Range<f64>) -> Self {
        Self { visible: false, ..Self::new("", Scale::Linear, range) }
    }

    /// Ticks of one's own.
    pub(crate) fn ticks<S: Into<String>>(mut self, ticks: impl IntoIterator<Item = (f64, S)>) -> Self {
        self.ticks = ticks.into_iter().map(|(at, text)| (at, text.into())).collect();
        self
    }

    /// Room for long words at the ticks of an ordinate, in px.
    pub(crate) fn room(self, px: u32) -> Self {
        Self { room: px, ..self }
    }

    /// Whether a value lies on the axis.
    pub(super) fn holds(&self, value: f64) -> bool {
        (self.range.start.min(self.range.end)..=self.range.start.max(self.range.end)).contains(&value)
    }

    /// A value in coordinates that are linear on paper, held within the range.
    fn linear_in(&self, value: f64) -> f64 {
        let (low, high) = (self.range.start.min(self.range.end), self.range.start.max(self.range.end));
        let value = value.clamp(low, high);
        match self.scale {
            Scale::Linear => value,
            Scale::Log => libm::log10(value),
        }
    }
}

impl Ranged for Axis {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, (first, last): (i32, i32)) -> i32 {
        let [start, end, at] = [self.range.start, self.range.end, *value].map(|value| self.linear_in(value));
        first + ((at - start) / (end - start) * f64::from(last - first)).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        if hint.weight().allow_light_points() { vec![] } else { self.ticks.iter().map(|(at, _)| *at).collect() }
    }

    fn range(&self) -> Range<f64> {
        self.range.clone()
    }
}

impl ValueFormatter<f64> for Axis {
    fn format_ext(&self, value: &f64) -> String {
        let found = self.ticks.iter().find(|(at, _)| at == value);
        found.map(|(_, text)| text.clone()).unwrap_or_default()
    }
}

/// A number with commas between thousands.
pub(crate) fn thousands(x: f64) -> String {
    let text = x.to_string();
    let (whole, fraction) = text.split_once('.').map_or((text.as_str(), None), |(w, f)| (w, Some(f)));
    let (sign, digits) = whole.strip_prefix('-').map_or(("", whole), |digits| ("-", digits));
    let mut grouped = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    format!("{sign}{grouped}{}", fraction.map(|f| format!(".{f}")).unwrap_or_default())
}

/// 1, 10, 100, 1,000 and 0.1, 0.01, 0.001 as such, others as a power.
pub(crate) fn power_of_ten(k: i32) -> String {
    match k {
        0..=4 => thousands(10f64.powi(k)),
        -3..0 => format!("0.{}1", "0".repeat(-k as usize - 1)),
        _ => format!("10{}", superscript(k)),
    }
}

/// An integer in raised digits.
fn superscript(k: i32) -> String {
    let raise = |c| match c {
        '-' => '⁻',
        '1' => '¹',
        '2' => '²',
        '3' => '³',
        c => char::from_u32('⁰' as u32 + c as u32 - '0' as u32).unwrap_or(c),
    };
    k.to_string().chars().map(raise).collect()
}

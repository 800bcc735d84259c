//! What was seen in each step. Numbers are written so that they read back the same.

use std::fmt::Write;
use std::path::Path;
use std::str::FromStr;

use halfulp::optim::StateStalls;
use halfulp::stall::StallCounts;

use crate::error::TrainError;
use crate::model;
use crate::options::{Schedule, Setup};
use crate::training::STATES;

#[derive(Default)]
pub(crate) struct Log {
    pub(crate) rows: Vec<Row>,
    /// Over the second half of the steps.
    pub(crate) stalls: Stalls,
}

/// A step.
#[derive(Default)]
pub(crate) struct Row {
    pub(crate) lr: f64,
    /// Of the batch, before the step.
    pub(crate) loss: f64,
    /// Of the test images, after it, where looked at.
    pub(crate) test: Option<f64>,
    /// Of the gradients.
    pub(crate) norm: f64,
    /// The clip coefficient; none of a step that was left out.
    pub(crate) clip: Option<f32>,
    /// Share of second moments that stalled, and what the model predicts, over all tensors.
    pub(crate) stalled: Option<[f64; 2]>,
    /// Tensors whose moments were emptied after the step.
    pub(crate) resets: Vec<&'static str>,
}

impl Row {
    pub(crate) fn take_stalls(&mut self, report: &[StateStalls]) {
        let second: Vec<_> = report.iter().filter_map(|state| Some((state.counts, state.predicted?))).collect();
        let all: StallCounts = second.iter().map(|(counts, _)| *counts).sum();
        let counted = all.counted() as f64;
        let expected: f64 = second.iter().map(|(counts, share)| counts.counted() as f64 * share).sum();
        self.stalled = (counted > 0.0).then(|| [all.share(), expected / counted]);
    }
}

const HEAD: &str = "step,learning rate,loss,test loss,gradient norm,clip,v stalled,v predicted,resets";

impl Log {
    pub(crate) fn steps(&self) -> u64 {
        self.rows.len() as u64
    }

    pub(crate) fn recent_loss(&self) -> f64 {
        let recent = &self.rows[self.rows.len().saturating_sub(50)..];
        recent.iter().map(|row| row.loss).sum::<f64>() / recent.len() as f64
    }

    pub(crate) fn clipped(&self) -> usize {
        self.rows.iter().filter(|row| row.clip.is_some_and(|clip| clip < 1.0)).count()
    }

    pub(crate) fn skipped(&self) -> u64 {
        self.rows.iter().filter(|row| row.clip.is_none()).count() as u64
    }

    pub(crate) fn skipped_on_end(&self) -> u64 {
        self.rows.iter().rev().take_while(|row| row.clip.is_none()).count() as u64
    }

    /// All resets, in words: tensors that were reset together stand together.
    pub(crate) fn resets(&self, setup: &Setup) -> String {
        let by = match setup.resets {
            Schedule::Off => return "off".into(),
            Schedule::Model => "by the model",
            Schedule::Adaptive => "adaptive",
        };
        let mut groups: Vec<(Vec<usize>, Vec<&str>)> = Vec::new();
        for name in model::names() {
            let steps = self.rows.iter().zip(1..).filter(|(row, _)| row.resets.contains(&name));
            let steps: Vec<usize> = steps.map(|(_, step)| step).collect();
            match groups.iter_mut().find(|(own, _)| *own == steps) {
                Some((_, names)) => names.push(name),
                None => groups.push((steps, vec![name])),
            }
        }
        if self.rows.iter().all(|row| row.resets.is_empty()) {
            return format!("{by}: none");
        }
        let words = groups.iter().map(|(steps, names)| {
            let names = if groups.len() == 1 { "all tensors".into() } else { names.join(", ") };
            let steps: Vec<String> = steps.iter().map(usize::to_string).collect();
            let after = if steps.is_empty() { "never".into() } else { format!("after step {}", steps.join(", ")) };
            format!("{names} {after}")
        });
        format!("{by}: {}", words.collect::<Vec<_>>().join("\n          "))
    }

    pub(crate) fn csv(&self) -> String {
        let mut text = format!("{HEAD}\n");
        for (row, step) in self.rows.iter().zip(1..) {
            let [stalled, predicted] = row.stalled.map_or([None; 2], |shares| shares.map(Some)).map(cell);
            let (test, clip, resets) = (cell(row.test), cell(row.clip), row.resets.join(" "));
            let Row { lr, loss, norm, .. } = row;
            // To a string, this cannot fail.
            let _ = writeln!(text, "{step},{lr},{loss},{test},{norm},{clip},{stalled},{predicted},{resets}");
        }
        text
    }

    /// Reads what [`csv`](Self::csv) and [`Stalls::csv`] wrote.
    pub(crate) fn read([path, csv]: [(&Path, &str); 2]) -> Result<Self, TrainError> {
        let ((path, csv), (stalls_path, stalls)) = (path, csv);
        let mut lines = csv.lines();
        if lines.next() != Some(HEAD) {
            return Err(TrainError::saved(path, format!("`{HEAD}`"), "another first line"));
        }
        let rows = lines.zip(1u64..).map(|(line, step)| {
            row(line, step).ok_or_else(|| TrainError::saved(path, format!("step {step}"), format!("`{line}`")))
        });
        Ok(Self { rows: rows.collect::<Result<_, _>>()?, stalls: Stalls::read(stalls_path, stalls)? })
    }
}

fn cell<T: ToString>(value: Option<T>) -> String {
    value.map_or(String::new(), |value| value.to_string())
}

/// `None` inside for an empty cell, outside for one that does not read.
fn optional<T: FromStr>(text: &str) -> Option<Option<T>> {
    if text.is_empty() { Some(None) } else { text.parse().ok().map(Some) }
}

fn row(line: &str, step: u64) -> Option<Row> {
    let cells: Vec<&str> = line.split(',').collect();
    let &[own, lr, loss, test, norm, clip, stalled, predicted, resets] = &cells[..] else { return None };
    let reset = |name| model::names().find(|known| *known == name);
    let row = Row {
        lr: lr.parse().ok()?,
        loss: loss.parse().ok()?,
        test: optional(test)?,
        norm: norm.parse().ok()?,
        clip: optional(clip)?,
        stalled: optional(stalled)?.zip(optional(predicted)?).map(|(stalled, predicted)| [stalled, predicted]),
        resets: resets.split_whitespace().map(reset).collect::<Option<_>>()?,
    };
    (own.parse() == Ok(step)).then_some(row)
}

/// Who stalled, by tensor and state.
pub(crate) struct Stalls(Vec<Tally>);

struct Tally {
    tensor: &'static str,
    state: &'static str,
    stalled: u64,
    counted: u64,
    /// How many were predicted to stall, if the model predicts it.
    predicted: Option<f64>,
}

impl Default for Stalls {
    fn default() -> Self {
        let tally = |tensor, state| Tally { tensor, state, stalled: 0, counted: 0, predicted: None };
        Self(model::names().flat_map(|tensor| ["m", "v"].map(|state| tally(tensor, state))).collect())
    }
}

const STALLS_HEAD: &str = "tensor,state,stalled,counted,predicted";

impl Stalls {
    pub(crate) fn take(&mut self, report: &[StateStalls]) {
        for state in report {
            let own = |tally: &&mut Tally| state.name.as_deref() == Some(tally.tensor) && state.state == tally.state;
            let Some(tally) = self.0.iter_mut().find(own) else { continue };
            tally.stalled += state.counts.stalled;
            tally.counted += state.counts.counted();
            if let Some(share) = state.predicted {
                *tally.predicted.get_or_insert(0.0) += share * state.counts.counted() as f64;
            }
        }
    }

    /// Prediction against measurement.
    pub(crate) fn table(&self) -> String {
        let mut text = format!(
            "{:<15} {:<5} {:<6} {:>8} {:>10} {:>7}\n",
            "tensor", "state", "format", "stalled", "predicted", "error"
        );
        for Tally { tensor, state, stalled, counted, predicted } in &self.0 {
            let share = *stalled as f64 / *counted as f64;
            let predicted = predicted.map(|predicted| predicted / *counted as f64);
            let error = predicted.map_or("-".into(), |predicted| format!("{:+.2}", 100.0 * (share - predicted)));
            let predicted = predicted.map_or("-".into(), |predicted| format!("{predicted:.4}"));
            let format = if *state == "m" { STATES.m } else { STATES.v };
            text += &format!("{tensor:<15} {state:<5} {format:<6} {share:>8.4} {predicted:>10} {error:>7}\n");
        }
        text + "stalled: share that a step left as it was, over the second half of the steps; error: in percentage points\n\
                predicted: of second moments, were gradients Gaussian with a variance that does not change\n"
    }

    pub(crate) fn csv(&self) -> String {
        let line = |Tally { tensor, state, stalled, counted, predicted }: &Tally| {
            format!("{tensor},{state},{stalled},{counted},{}\n", cell(*predicted))
        };
        format!("{STALLS_HEAD}\n") + &self.0.iter().map(line).collect::<String>()
    }

    fn read(path: &Path, csv: &str) -> Result<Self, TrainError> {
        let mut stalls = Self::default();
        let expected = stalls.0.len();
        let lines: Vec<&str> = csv.lines().collect();
        if lines.first() != Some(&STALLS_HEAD) || lines.len() != expected + 1 {
            let got = format!("{} lines", lines.len());
            return Err(TrainError::saved(path, format!("`{STALLS_HEAD}` and {expected} lines more"), got));
        }
        for (tally, line) in stalls.0.iter_mut().zip(&lines[1..]) {
            let wrong = || TrainError::saved(path, format!("{}, {}", tally.tensor, tally.state), format!("`{line}`"));
            let cells: Vec<&str> = line.split(',').collect();
            let read = || match cells[..] {
                [tensor, state, stalled, counted, predicted] if (tensor, state) == (tally.tensor, tally.state) => {
                    Some((stalled.parse().ok()?, counted.parse().ok()?, optional(predicted)?))
                }
                _ => None,
            };
            let (stalled, counted, predicted) = read().ok_or_else(wrong)?;
            *tally = Tally { stalled, counted, predicted, ..*tally };
        }
        Ok(stalls)
    }
}

//! Table 3: six optimizers with their meters on, beside simulations of their states and the formulas.

use std::ops::RangeInclusive;

use halfulp::Format;
use halfulp::optim::{
    AdEMAMixConfig, AdamConfig, AdamWConfig, LambConfig, LionConfig, MixStates, Optimizer, Rounding, Rule, SgdConfig,
    StateFormat, States,
};
use halfulp::random::Role;
use halfulp::stall::{
    Probability, Scaling, Share, Simulation, StallCounts, Start, Storage, Variances, average_probability_since_reset,
    momentum_probability_since_reset,
};
use rayon::prelude::*;

use crate::table::{Cell, Table};
use crate::{Drawing, Error, Figure};

pub(crate) const FIGURE: Figure = Figure {
    id: "table-3",
    file: "table-3-stalling",
    title: "How often every state of every optimizer stalls",
    alt: "Stalled shares of the states of six optimizers in seven formats, measured, simulated and by formula",
    caption: "Share of elements whose stored value after a step is what it was before, as the meters of six \
              optimizers with their defaults count it in each of their states: 16 tensors of one block of 128 \
              elements, each with seeds of its own, and Gaussian gradients whose standard deviations are spread \
              log-uniformly over three decades in the block. BF16 is unscaled, other formats have a power-of-two \
              scale for the block; states in f32 are not rounded. First the late steps, in which the mean of v and \
              the variance of first moments are within 2 % of their last in exact arithmetic; then the first ones \
              from zero, as many as the memory 1/(1 − β). Simulated: the state without its optimizer, with other \
              seeds; in even blocks: with standard deviations within a factor of 2. Formula: Gaussian gradients, \
              means over mantissas and steps, of v with v near its mean, of first moments with the Gaussian law of \
              exact arithmetic; for E2M1, whose values are hardly ever normal, there is simulation alone. Standard \
              errors are in the CSV, 0.008 at most; every measured share is within 5 of them of the simulated one, or \
              there would be no table. Beside them the variance of simulated first moments over that in exact \
              arithmetic, in even blocks after the last step, to 3 %.",
    see: "How often a state stalls is a matter of its decay and format, not of its optimizer; SGD's gain cancels. \
          First moments stall less than v in the same format, even at a longer memory, and in BF16 as the formula \
          says, up to β = 0.9999. Their shares under nearest and under stochastic rounding are at most 14 points \
          apart, and do not tell what becomes of them: at β = 0.9999 in E4M3, E5M2 and E2M1, nearest rounding leaves \
          22, 8 and 4 % of the variance, and stochastic rounding makes it 6, 17 and 780 times too large. A slow \
          moment wants BF16 (0.99 and 1.02 times). Small elements of a block are below the smallest number of E2M1, \
          and stall: 83 % of the steps at β = 0.9 over three decades, 37 % in even blocks. Nearest second moments are \
          not where the model has them: in BF16 they have climbed to where they stall in 98 % of the steps and not in \
          94 %.",
    draw,
};

/// A kind of state: what its stalling depends on.
struct Kind {
    name: &'static str,
    decay: f64,
    gain: Option<f64>,
    role: Role,
    formats: &'static [StateFormat],
    /// The first steps from zero, one memory `1/(1 - decay)` of them.
    early: RangeInclusive<u64>,
    /// Steps so late that the moment's expectation (of a first moment, its variance) is within 2 % of the last one.
    late: RangeInclusive<u64>,
}

const SIGNED: &[StateFormat] = &[StateFormat::Bf16, StateFormat::E4M3, StateFormat::E5M2, StateFormat::E2M1];
const OF_SQUARES: &[StateFormat] = &[
    StateFormat::Bf16,
    StateFormat::E4M3,
    StateFormat::E5M2,
    StateFormat::UE5M3,
    StateFormat::UE4M4,
    StateFormat::UE2M2NZ,
];
/// Columns of the table that is shown.
const FORMATS: [StateFormat; 7] = [
    StateFormat::Bf16,
    StateFormat::E4M3,
    StateFormat::E5M2,
    StateFormat::UE5M3,
    StateFormat::UE4M4,
    StateFormat::E2M1,
    StateFormat::UE2M2NZ,
];

const FIRST: Kind = Kind {
    name: "m",
    decay: 0.9,
    gain: None,
    role: Role::FirstMoment,
    formats: SIGNED,
    early: 1..=10,
    late: 501..=1000,
};
const MOMENTUM: Kind = Kind { name: "m of SGD", gain: Some(1.0), ..FIRST };
const OF_LION: Kind = Kind { name: "m of Lion", decay: 0.99, early: 1..=100, ..FIRST };
const SLOW: Kind =
    Kind { name: "slow", decay: 0.9999, role: Role::ThirdState, early: 1..=10_000, late: 20_001..=30_000, ..FIRST };
const SECOND: Kind = Kind {
    name: "v",
    decay: 0.999,
    role: Role::SecondMoment,
    formats: OF_SQUARES,
    early: 1..=1000,
    late: 4001..=5000,
    ..FIRST
};
const KINDS: [Kind; 5] = [FIRST, MOMENTUM, OF_LION, SLOW, SECOND];

/// Tensors of an optimizer, and runs of a simulation, each with seeds of its own.
const GROUPS: u64 = 16;
/// Elements of a tensor or a run: a block.
const ELEMENTS: usize = 128;
const ROUNDINGS: [&str; 2] = ["nearest", "stochastic"];

fn rounding(name: &str, seed: u64) -> Rounding {
    if name == "nearest" { Rounding::Nearest } else { Rounding::stochastic(seed) }
}

/// How the standard deviations of gradients are spread over the elements of a tensor, the same in each.
#[derive(Clone, Copy, PartialEq)]
enum Spread {
    /// Log-uniformly over a factor of 1000.
    Decades,
    /// Log-uniformly over a factor of 2 or, of second moments, the root of it.
    Binade,
}

impl Spread {
    fn variances(self, role: Role) -> Variances {
        let binades = match self {
            Self::Decades => 2.0 * libm::log2(1000.0),
            Self::Binade if role == Role::SecondMoment => 1.0,
            Self::Binade => 2.0,
        };
        // Places of a golden-ratio sequence: even over the block.
        let places = (0..ELEMENTS).map(|i| ((i as f64 + 0.5) * 0.618_033_988_749_894_9).fract());
        Variances::Listed(places.map(|place| libm::exp2(-binades * place)).collect())
    }
}

/// Counts of one state in its two windows.
#[derive(Clone, Copy, Default)]
struct Windows([StallCounts; 2]);

impl Windows {
    fn add(&mut self, kind: &Kind, step: u64, counts: StallCounts) {
        for (window, all) in [&kind.early, &kind.late].into_iter().zip(&mut self.0) {
            if window.contains(&step) {
                *all += counts;
            }
        }
    }
}

/// Shares of the two windows: of groups, each with its counts.
fn shares(groups: &[Windows]) -> [Share; 2] {
    [0, 1].map(|w| Share::of(&groups.iter().map(|group| group.0[w]).collect::<Vec<_>>()))
}

/// A state to run: where it stands among those of its optimizer, what kind it is, and its place in the kind's formats.
type Watched = (usize, &'static Kind, usize);

/// An optimizer with one tensor, and which of its states count.
struct Run<R: Rule> {
    optimizer: Optimizer<R>,
    params: Vec<f32>,
    watched: Vec<(Watched, Windows)>,
}

/// What was measured: an optimizer's name, the kind of a state, places of format and rounding, and the shares.
struct Measured {
    optimizer: &'static str,
    kind: &'static str,
    format: usize,
    rounding: usize,
    shares: [Share; 2],
}

/// Steps one tensor of an optimizer under each choice of formats and rounding by the same gradients.
fn measure_group<R: Rule>(
    config: R,
    kinds: &[&'static Kind],
    states: fn([StateFormat; 3]) -> R::States,
    seed: u64,
) -> Result<Vec<(usize, Watched, Windows)>, Error> {
    let most = kinds.iter().map(|kind| kind.formats.len()).max().unwrap_or(0);
    let mut runs = vec![];
    for (r, name) in ROUNDINGS.into_iter().enumerate() {
        for f in 0..most {
            let mut formats = [StateFormat::Bf16; 3];
            for (format, kind) in formats.iter_mut().zip(kinds) {
                *format = kind.formats[f % kind.formats.len()];
            }
            let optimizer = Optimizer::new(config, states(formats), rounding(name, seed))?.meter(true);
            // A format is measured once, though another state has more of them.
            let watched = kinds.iter().enumerate().filter(|(_, kind)| f < kind.formats.len());
            let watched = watched.map(|(s, &kind)| ((s, kind, f), Windows::default())).collect();
            runs.push((r, Run { optimizer, params: vec![0.5; ELEMENTS], watched }));
        }
    }
    let last = |run: &Run<R>| run.watched.iter().map(|((_, kind, _), _)| *kind.late.end()).max().unwrap_or(0);
    // A simulation in f32 for its gradients.
    let source = Simulation {
        storage: Storage::F32,
        variances: Spread::Decades.variances(Role::FirstMoment),
        coordinates: ELEMENTS,
        seed,
        checkpoints: vec![runs.iter().map(|(_, run)| last(run)).max().unwrap_or(0)],
        ..Simulation::default()
    };
    let mut failed = None;
    source.observe(|step| {
        for (_, run) in &mut runs {
            if failed.is_some() || step.number > last(run) {
                continue;
            }
            if let Err(error) = run.optimizer.step(&mut run.params, step.gradients) {
                failed = Some(error);
                continue;
            }
            let counts = run.optimizer.stalls(0);
            for ((s, kind, _), windows) in &mut run.watched {
                windows.add(kind, step.number, counts[*s]);
            }
        }
    })?;
    match failed {
        Some(error) => Err(error.into()),
        None => {
            let watched = |(r, run): (usize, Run<R>)| run.watched.into_iter().map(move |(state, all)| (r, state, all));
            Ok(runs.into_iter().flat_map(watched).collect())
        }
    }
}

fn measure<R: Rule>(
    name: &'static str,
    place: u64,
    config: R,
    kinds: &[&'static Kind],
    states: fn([StateFormat; 3]) -> R::States,
) -> Result<Vec<Measured>, Error> {
    let seed = |group| 1000 * (place + 1) + group;
    let groups = (0..GROUPS).into_par_iter().map(|group| measure_group(config, kinds, states, seed(group)));
    let groups = groups.collect::<Result<Vec<_>, Error>>()?;
    let measured = groups[0].iter().enumerate().map(|(i, &(rounding, (_, kind, format), _))| {
        let windows: Vec<Windows> = groups.iter().map(|group| group[i].2).collect();
        Measured { optimizer: name, kind: kind.name, format, rounding, shares: shares(&windows) }
    });
    Ok(measured.collect())
}

/// Every optimizer, with its defaults.
fn measured() -> Result<Vec<Measured>, Error> {
    let two = |[m, v, _]: [StateFormat; 3]| States { m, v };
    let three = |[m, v, slow]: [StateFormat; 3]| MixStates { m, v, slow };
    let one = |[m, ..]: [StateFormat; 3]| m;
    let all = [
        measure("AdamW", 0, AdamWConfig::default(), &[&FIRST, &SECOND], two)?,
        measure("Adam", 1, AdamConfig::default(), &[&FIRST, &SECOND], two)?,
        measure("LAMB", 2, LambConfig::default(), &[&FIRST, &SECOND], two)?,
        measure("AdEMAMix", 3, AdEMAMixConfig::default(), &[&FIRST, &SECOND, &SLOW], three)?,
        measure("SGD", 4, SgdConfig::default(), &[&MOMENTUM], one)?,
        measure("Lion", 5, LionConfig::default(), &[&OF_LION], one)?,
    ];
    Ok(all.into_iter().flatten().collect())
}

/// The element of a state format, and how it is scaled.
fn stored(format: StateFormat) -> (Format, Scaling) {
    match format {
        StateFormat::Blocks(blocks) => (blocks.element(), Scaling::PowerOfTwo { block: blocks.block() }),
        _ => (Format::BF16, Scaling::Unscaled),
    }
}

/// What came of simulations of a state without its optimizer.
struct Simulated {
    shares: [Share; 2],
    /// Of a first moment, its variance at the end over that in exact arithmetic.
    variance: Option<f64>,
}

fn simulate(kind: &Kind, format: StateFormat, name: &str, spread: Spread) -> Result<Simulated, Error> {
    let group = |group: u64| -> Result<(Windows, f64), Error> {
        let (format, scaling) = stored(format);
        let seed = 100_000 + group;
        let before_late = kind.late.start() - 1;
        let simulation = Simulation {
            role: kind.role,
            beta: kind.decay,
            gain: kind.gain,
            storage: Storage { format: Some(format), rounding: rounding(name, seed), scaling },
            variances: spread.variances(kind.role),
            start: Start::Zero,
            coordinates: ELEMENTS,
            seed,
            checkpoints: vec![*kind.early.end(), before_late, *kind.late.end()],
            ..Simulation::default()
        };
        let seen = simulation.run()?.checkpoints;
        Ok((Windows([seen[0].window, seen[2].window]), seen[2].variance))
    };
    let groups = (0..GROUPS).into_par_iter().map(group).collect::<Result<Vec<_>, Error>>()?;
    let mean = groups.iter().map(|(_, variance)| variance).sum::<f64>() / groups.len() as f64;
    let gain = kind.gain.unwrap_or(1.0 - kind.decay);
    let exact = gain * gain / (1.0 - kind.decay * kind.decay);
    Ok(Simulated {
        shares: shares(&groups.iter().map(|(windows, _)| *windows).collect::<Vec<_>>()),
        variance: (kind.role != Role::SecondMoment).then_some(mean / exact),
    })
}

/// The formula's mean over the steps of a window; none for E2M1, whose values are hardly ever normal.
fn formula(kind: &Kind, format: StateFormat, name: &str, window: &RangeInclusive<u64>) -> Result<Option<f64>, Error> {
    if format == StateFormat::E2M1 {
        return Ok(None);
    }
    let (format, _) = stored(format);
    let of_age = |age| -> Result<f64, Error> {
        let Probability { nearest, stochastic, .. } = match kind.role {
            Role::SecondMoment => average_probability_since_reset(format, kind.decay, age)?,
            _ => momentum_probability_since_reset(format, kind.decay, age)?,
        };
        Ok(if name == "nearest" { nearest } else { stochastic })
    };
    // At most 500 of the steps, evenly; a step starts from the age before it.
    let stride = (window.end() - window.start() + 1).div_ceil(500);
    let ages = window.clone().skip(stride as usize / 2).step_by(stride as usize).map(|step| step - 1);
    let of_ages = ages.map(of_age).collect::<Result<Vec<_>, _>>()?;
    Ok(Some(of_ages.iter().sum::<f64>() / of_ages.len() as f64))
}

/// One cell of the table: a state in a format under a rounding, in one window.
struct Row {
    kind: &'static Kind,
    format: StateFormat,
    rounding: &'static str,
    window: RangeInclusive<u64>,
    measured: Vec<(&'static str, Share)>,
    simulated: Share,
    /// With gradients of about the same size in all of a block.
    even: Share,
    formula: Option<f64>,
    variance: Option<f64>,
}

impl Row {
    /// How far a measured share is from the simulated one, in standard errors of the difference.
    fn deviation(&self, measured: Share) -> f64 {
        let [a, b] = [measured, self.simulated].map(|share| share.standard_error * share.standard_error);
        (measured.value - self.simulated.value) / (a + b).sqrt()
    }

    /// What there is to say of an optimizer, of simulations and of the formula.
    fn shares(&self) -> Vec<(&'static str, Option<f64>)> {
        let measured = self.measured.iter().map(|(name, share)| (*name, Some(share.value)));
        let models = [
            ("simulated", Some(self.simulated.value)),
            ("simulated, even blocks", Some(self.even.value)),
            ("formula", self.formula),
        ];
        measured.chain(models).collect()
    }
}

/// Rows of a kind of state: both windows of each format and rounding.
fn rows(kind: &'static Kind, measured: &[Measured]) -> Result<Vec<[Row; 2]>, Error> {
    let cells: Vec<_> = (0..ROUNDINGS.len()).flat_map(|r| (0..kind.formats.len()).map(move |f| (r, f))).collect();
    let row = |(r, f): (usize, usize)| {
        let (format, rounding) = (kind.formats[f], ROUNDINGS[r]);
        let simulated = simulate(kind, format, rounding, Spread::Decades)?;
        let even = simulate(kind, format, rounding, Spread::Binade)?;
        let row = |w: usize, window: &RangeInclusive<u64>| -> Result<Row, Error> {
            let measured = measured.iter().filter(|m| (m.kind, m.format, m.rounding) == (kind.name, f, r));
            Ok(Row {
                kind,
                format,
                rounding,
                window: window.clone(),
                measured: measured.map(|m| (m.optimizer, m.shares[w])).collect(),
                simulated: simulated.shares[w],
                even: even.shares[w],
                formula: formula(kind, format, rounding, window)?,
                variance: even.variance.filter(|_| w == 1),
            })
        };
        Ok([row(0, &kind.early)?, row(1, &kind.late)?])
    };
    cells.into_par_iter().map(row).collect()
}

/// All of it, a line for each optimizer.
fn numbers(rows: &[Row]) -> Result<Table, Error> {
    let mut table = Table::new([
        "state",
        "decay",
        "format",
        "rounding",
        "first step",
        "last step",
        "optimizer",
        "stalled share",
        "standard error",
        "simulated",
        "its standard error",
        "difference in standard errors",
        "simulated in even blocks",
        "standard error in even blocks",
        "formula",
        "variance over exact",
    ]);
    let optional = |number: Option<f64>| number.map_or("".into(), Cell::from);
    for row in rows {
        for &(optimizer, share) in &row.measured {
            let deviation = row.deviation(share);
            if deviation.abs() > 5.0 {
                let (state, format) = (row.kind.name, row.format);
                return Err(format!("{optimizer}, {state} in {format}: {deviation:.1} standard errors off").into());
            }
            table.row([
                row.kind.name.into(),
                row.kind.decay.into(),
                row.format.to_string().into(),
                row.rounding.into(),
                (*row.window.start() as f64).into(),
                (*row.window.end() as f64).into(),
                optimizer.into(),
                share.value.into(),
                share.standard_error.into(),
                row.simulated.value.into(),
                row.simulated.standard_error.into(),
                ((1e3 * deviation).round() / 1e3).into(),
                row.even.value.into(),
                row.even.standard_error.into(),
                optional(row.formula),
                optional(row.variance.map(|variance| (1e4 * variance).round() / 1e4)),
            ]);
        }
    }
    Ok(table)
}

/// The shares alone, with a column for each format.
fn by_format(rows: &[Row]) -> Table {
    let mut table = Table::new(["state", "rounding", "steps", "stalled share of", "", "", "", "", "", "", ""]);
    for (head, format) in table.head[4..].iter_mut().zip(FORMATS) {
        *head = format.to_string();
    }
    // Late steps first.
    for late in [true, false] {
        for kind in &KINDS {
            for rounding in ROUNDINGS {
                let window = if late { &kind.late } else { &kind.early };
                let of = |row: &&Row| {
                    row.kind.name == kind.name && row.rounding == rounding && row.window.start() == window.start()
                };
                let rows: Vec<&Row> = rows.iter().filter(of).collect();
                let names = rows.first().map_or(vec![], |row| row.shares());
                for (i, (name, _)) in names.into_iter().enumerate() {
                    let share = |format| {
                        let row = rows.iter().find(|row| row.format == format)?;
                        row.shares()[i].1
                    };
                    let [a, b, c, d, e, f, g] =
                        FORMATS.map(|format| share(format).map_or("–".into(), |share| format!("{share:.5}").into()));
                    let state = format!("{}, β = {}", kind.name, kind.decay);
                    let steps = format!("{}–{}", window.start(), window.end());
                    table.row([state.into(), rounding.into(), steps.into(), name.into(), a, b, c, d, e, f, g]);
                }
            }
        }
    }
    table
}

fn draw() -> Result<Drawing, Error> {
    let measured = measured()?;
    let rows = KINDS.iter().map(|kind| rows(kind, &measured)).collect::<Result<Vec<_>, Error>>()?;
    let rows: Vec<Row> = rows.into_iter().flatten().flatten().collect();
    Ok(Drawing { picture: None, table: numbers(&rows)?, shown: Some(by_format(&rows)) })
}

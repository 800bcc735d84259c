//! Moments fed with random gradients of a known law.

use core::ops::Range;

use super::error::{StallError, check};
use super::gradients::{Gradients, Law, Variances};
use super::meter::{Comparison, StallCounts, StateView};
use super::state::{Scaling, State, Storage};
use crate::isa::{Isa, Kernel, at_level};
use crate::optim::{AdamWConfig, Scalars, power};
use crate::random::Role;
use crate::threads::join;

/// Where a state starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Start {
    /// At zero, as an optimizer starts.
    Zero,
    /// At the moment that is to be estimated (of the law before any change), stored to nearest.
    Exact,
}

/// A simulation: what it is made of, with defaults (BF16 second moments at `beta = 0.999`, rounded stochastically, Gaussian
/// gradients of variance 1, 4096 coordinates from the exact start through 1000 steps).
///
/// Each step computes `m' = fma(1 - b1, g, b1 * m)` or `v' = fma(1 - b2, g * g, b2 * v)` in f32, as
/// [`Scalars::step`](crate::optim::Scalars::step) does, and stores it; with a [`gain`](Self::gain) of 1, the momentum of
/// [SGD](crate::optim::SgdScalars::step). Coordinate `i` draws its gradients from `ChaCha8` under
/// `seed`, stream `i`, so that neither threads nor other coordinates nor the way of storing change them; normals are
/// made by Box and Muller's method, Student's t by Bailey's (Mathematics of Computation 62, 1994), in f64 from 53-bit
/// uniforms by functions that give the same bits on every machine.
///
/// ```
/// use halfulp::{Format, stall::{Simulation, Storage}};
/// let run = |storage| Simulation { storage, ..Simulation::default() }.run();
/// let last = |report: halfulp::stall::Report| report.checkpoints[0].clone();
/// let nearest = last(run(Storage::nearest(Format::BF16))?);
/// let stochastic = last(run(Storage::stochastic(Format::BF16, 7))?);
/// // Both mostly stand still, but one of them ratchets up.
/// assert!(nearest.window.share() > 0.94 && stochastic.window.share() > 0.80);
/// assert!(nearest.bias() > 0.2 && stochastic.bias().abs() < 0.01);
/// # Ok::<(), halfulp::stall::SimulationError>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Simulation {
    /// [`Role::FirstMoment`], also for a momentum, [`Role::SecondMoment`], or [`Role::ThirdState`], a first moment that is
    /// rounded by draws of its own.
    pub role: Role,
    /// Decay of the moment, in [0, 1). Of Lion, `beta2`: its `beta1` is in no state.
    pub beta: f64,
    /// What gradients (of a second moment, their squares) enter with: `1 - beta` if `None`, as in averages; 1 in the momentum
    /// of SGD. Up to 1000.
    pub gain: Option<f64>,
    /// How the moment is stored.
    pub storage: Storage,
    /// The law of gradients.
    pub law: Law,
    /// Their variances.
    pub variances: Variances,
    /// Where states start.
    pub start: Start,
    /// Number of coordinates.
    pub coordinates: usize,
    /// Seed of the gradients.
    pub seed: u64,
    /// Steps, counted from 1, after which to look; the last ends the run.
    pub checkpoints: Vec<u64>,
}

impl Default for Simulation {
    fn default() -> Self {
        Self {
            role: Role::SecondMoment,
            beta: 0.999,
            gain: None,
            storage: Storage::stochastic(crate::Format::BF16, 0),
            law: Law::Gaussian,
            variances: Variances::Equal(1.0),
            start: Start::Exact,
            coordinates: 4096,
            seed: 0,
            checkpoints: vec![1000],
        }
    }
}

/// What a simulation or its states refuse.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SimulationError {
    /// A number out of its range.
    #[error(transparent)]
    Range(#[from] StallError),
    /// A choice that does not go with the others.
    #[error("{argument}: not supported: {reason}")]
    Unsupported {
        /// Its name.
        argument: &'static str,
        /// Why.
        reason: &'static str,
    },
    /// Not as many values as a state has.
    #[error("{argument}: expected {expected} elements, as the state has, got {got}")]
    Length {
        /// What has the wrong length.
        argument: &'static str,
        /// Elements of the state.
        expected: usize,
        /// What came.
        got: usize,
    },
    /// Nowhere to look, or not in order.
    #[error("checkpoints: expected one or more steps, each above the one before and the first above 0, got {got:?}")]
    Checkpoints {
        /// The first two that are out of order, or what there is.
        got: Vec<u64>,
    },
}

/// The updates of a window in one direction: sums over its steps, averaged over coordinates, in units of a coordinate's
/// variance (of its standard deviation for first moments).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Update {
    /// The change from the stored value to the new value before rounding.
    pub proposed: f64,
    /// What became of it: the change of the stored value.
    pub delivered: f64,
}

/// What was seen after a step. A window reaches back to the checkpoint before, or to the start.
///
/// Moments are in units of a coordinate's variance before any change (of its standard deviation for first moments).
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Checkpoint {
    /// The step, counted from 1: the age of a state that started at zero.
    pub step: u64,
    /// Coordinates that stalled in this step.
    pub stalls: StallCounts,
    /// The same over all steps of the window.
    pub window: StallCounts,
    /// Share of coordinates that never moved since the start.
    pub never_moved: f64,
    /// Mean of the stored moment over coordinates.
    pub mean: f64,
    /// Variance of the stored moment over coordinates.
    pub variance: f64,
    /// The moment that is to be estimated: of a second moment 1, or the factor of a changed variance; of a first moment 0,
    /// or 1 under a constant law; times `gain / (1 - beta)` under a gain.
    pub exact: f64,
    /// `1 - beta^step`, by which an optimizer divides a moment that started at zero.
    pub correction: f64,
    /// Updates that would raise the moment.
    pub up: Update,
    /// Updates that would lower it; negative sums.
    pub down: Update,
}

impl Checkpoint {
    /// `mean - exact`.
    #[must_use]
    pub fn bias(&self) -> f64 {
        self.mean - self.exact
    }

    /// The mean after the bias correction for a start at zero.
    #[must_use]
    pub fn corrected_mean(&self) -> f64 {
        self.mean / self.correction
    }

    /// The window's updates in both directions together.
    #[must_use]
    pub fn update(&self) -> Update {
        Update { proposed: self.up.proposed + self.down.proposed, delivered: self.up.delivered + self.down.delivered }
    }
}

/// What came of a simulation: one entry for each checkpoint.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Report {
    /// In order of steps.
    pub checkpoints: Vec<Checkpoint>,
}

/// A step that was made, for [`Simulation::observe`].
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Step<'a> {
    /// Its number, from 1.
    pub number: u64,
    /// The gradient of each coordinate.
    pub gradients: &'a [f32],
    /// The moments before they were rounded.
    pub unrounded: &'a [f32],
    /// The stored moments before the step.
    pub before: &'a State,
    /// The stored moments.
    pub state: &'a State,
}

impl Simulation {
    /// Runs, over the current rayon pool with the feature `parallel`. The report does not depend on the threads.
    ///
    /// Coordinates are run in pieces of at least 256 that hold whole blocks: with one scale for all of them there is one
    /// piece, and one thread. A piece takes about half a kilobyte a coordinate.
    ///
    /// # Errors
    /// [`SimulationError`] for the first argument that is out of its range.
    pub fn run(&self) -> Result<Report, SimulationError> {
        self.run_with_progress(|_| ())
    }

    /// [`run`](Self::run), and tells how many more element steps (coordinates times steps) are done now and then, from any
    /// thread.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn run_with_progress(&self, progress: impl Fn(u64) + Sync) -> Result<Report, SimulationError> {
        let plan = Plan::new(self)?;
        let block = self.storage.scaling.block().unwrap_or(1).min(self.coordinates);
        let piece = block * PIECE.div_ceil(block);
        let tallies = plan.run(0..self.coordinates, piece, &progress);
        let checkpoints = self.checkpoints.iter().zip(tallies).map(|(&step, tally)| plan.checkpoint(step, &tally));
        Ok(Report { checkpoints: checkpoints.collect() })
    }

    /// Runs on this thread, all coordinates together, and shows every step up to the last checkpoint.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn observe(&self, mut look: impl FnMut(Step<'_>)) -> Result<(), SimulationError> {
        let plan = Plan::new(self)?;
        let mut piece = Piece::new(&plan, 0..self.coordinates);
        for number in 1..=plan.last {
            piece.step(number);
            look(Step {
                number,
                gradients: piece.gradients.row(number),
                unrounded: &piece.unrounded,
                before: &piece.before,
                state: &piece.state,
            });
        }
        Ok(())
    }

    /// The variance of the gradients of coordinate `i`, before any change; NaN of an empty list.
    #[must_use]
    pub fn variance(&self, i: usize) -> f64 {
        self.variances.of(i)
    }

    fn check(&self) -> Result<(), SimulationError> {
        self.storage.check(self.role)?;
        check((0.0..1.0).contains(&self.beta), "beta", "0 <= beta < 1", self.beta)?;
        let gain = self.gain.unwrap_or(1.0);
        check(gain > 0.0 && gain <= 1000.0, "gain", "a number above 0, up to 1000", gain)?;
        check(self.coordinates > 0, "coordinates", "1 or more", self.coordinates as f64)?;
        self.variances.check()?;
        self.law.check()?;
        let before = [0].into_iter().chain(self.checkpoints.iter().copied());
        match before.zip(&self.checkpoints).find(|(before, step)| before >= step) {
            _ if self.checkpoints.is_empty() => Err(SimulationError::Checkpoints { got: Vec::new() }),
            Some((before, &step)) => Err(SimulationError::Checkpoints { got: vec![before, step] }),
            None => Ok(()),
        }
    }
}

/// Coordinates of a piece, or a few more to fill a block.
const PIECE: usize = 256;

/// A checked simulation.
struct Plan<'a> {
    simulation: &'a Simulation,
    scalars: Scalars,
    isa: Isa,
    /// A state of no elements, to be resized.
    empty: State,
    last: u64,
}

impl<'a> Plan<'a> {
    fn new(simulation: &'a Simulation) -> Result<Self, SimulationError> {
        simulation.check()?;
        let &Simulation { role, beta, storage, .. } = simulation;
        let config = AdamWConfig { beta1: beta, beta2: beta, ..AdamWConfig::default() };
        let mut scalars = config.scalars(1).expect("an age of 1");
        if let Some(gain) = simulation.gain {
            (scalars.one_minus_beta1, scalars.one_minus_beta2) = (gain as f32, gain as f32);
        }
        Ok(Self {
            simulation,
            scalars,
            isa: Isa::best(),
            empty: State::zeroed(storage, role, 0)?,
            last: simulation.checkpoints.last().copied().unwrap_or(0),
        })
    }

    /// Halves the coordinates until they are one piece. Tallies combine up the same tree on any number of threads.
    fn run(&self, coordinates: Range<usize>, piece: usize, progress: &(impl Fn(u64) + Sync)) -> Vec<Tally> {
        if coordinates.len() <= piece {
            return self.piece(coordinates, progress);
        }
        let middle = coordinates.start + coordinates.len().div_ceil(piece) / 2 * piece;
        let (mut tallies, more) = join(
            || self.run(coordinates.start..middle, piece, progress),
            || self.run(middle..coordinates.end, piece, progress),
        );
        tallies.iter_mut().zip(&more).for_each(|(tally, more)| tally.add(more));
        tallies
    }

    fn piece(&self, coordinates: Range<usize>, progress: &impl Fn(u64)) -> Vec<Tally> {
        let n = coordinates.len() as u64;
        let mut piece = Piece::new(self, coordinates);
        let mut tallies = Vec::with_capacity(self.simulation.checkpoints.len());
        let mut told = 0;
        for step in 1..=self.last {
            piece.step(step);
            piece.count();
            if self.simulation.checkpoints[tallies.len()] == step {
                tallies.push(piece.tally());
            }
            if step % 1024 == 0 || step == self.last {
                progress(n * (step - told));
                told = step;
            }
        }
        tallies
    }

    fn checkpoint(&self, step: u64, tally: &Tally) -> Checkpoint {
        let n = self.simulation.coordinates as f64;
        let mean = tally.sum / n;
        let update = |[proposed, delivered]: [f64; 2]| Update { proposed: proposed / n, delivered: delivered / n };
        Checkpoint {
            step,
            stalls: tally.stalls,
            window: tally.window,
            never_moved: tally.never_moved as f64 / n,
            mean,
            variance: (tally.sum_of_squares / n - mean * mean).max(0.0),
            exact: self.exact(step),
            correction: 1.0 - power(self.simulation.beta, step),
            up: update(tally.up),
            down: update(tally.down),
        }
    }

    /// The moment of a coordinate of variance 1.
    fn exact(&self, step: u64) -> f64 {
        let &Simulation { role, beta, gain, law, .. } = self.simulation;
        let whole = gain.map_or(1.0, |gain| gain / (1.0 - beta));
        match (role, law) {
            (Role::SecondMoment, Law::VarianceChange { after, factor }) if step > after => factor * whole,
            (Role::SecondMoment, _) | (_, Law::Constant) => whole,
            _ => 0.0,
        }
    }

    /// What a moment of coordinate `i` is measured in.
    fn unit_of(&self, i: usize) -> f64 {
        let variance = self.simulation.variance(i);
        if self.simulation.role == Role::SecondMoment { variance } else { variance.sqrt() }
    }
}

/// Sums over coordinates at a checkpoint.
#[derive(Clone, Debug, Default)]
struct Tally {
    stalls: StallCounts,
    window: StallCounts,
    never_moved: u64,
    sum: f64,
    sum_of_squares: f64,
    up: [f64; 2],
    down: [f64; 2],
}

impl Tally {
    fn add(&mut self, other: &Self) {
        self.stalls += other.stalls;
        self.window += other.window;
        self.never_moved += other.never_moved;
        self.sum += other.sum;
        self.sum_of_squares += other.sum_of_squares;
        for k in 0..2 {
            self.up[k] += other.up[k];
            self.down[k] += other.down[k];
        }
    }
}

/// A run of coordinates on one thread.
struct Piece<'a> {
    plan: &'a Plan<'a>,
    units: Vec<f64>,
    gradients: Gradients,
    unrounded: Vec<f32>,
    before: State,
    state: State,
    stalls: StallCounts,
    /// Since the last checkpoint.
    window: StallCounts,
    updates: Updates,
}

impl<'a> Piece<'a> {
    fn new(plan: &'a Plan<'a>, coordinates: Range<usize>) -> Self {
        let n = coordinates.len();
        let &Simulation { law, ref variances, seed, .. } = plan.simulation;
        let units: Vec<f64> = coordinates.clone().map(|i| plan.unit_of(i)).collect();
        let state = plan.empty.clone().at(coordinates.start as u64);
        let exact = plan.exact(0);
        let state = match plan.simulation.start {
            Start::Zero => state.restarted(&vec![0.0; n]),
            Start::Exact => state.restarted(&units.iter().map(|unit| (unit * exact) as f32).collect::<Vec<_>>()),
        };
        Self {
            plan,
            units,
            gradients: Gradients::new(law, variances, seed, coordinates),
            unrounded: vec![0.0; n],
            before: state.clone(),
            state,
            stalls: StallCounts::default(),
            window: StallCounts::default(),
            updates: Updates::new(n),
        }
    }

    fn step(&mut self, step: u64) {
        let Plan { isa, scalars, simulation, .. } = self.plan;
        self.gradients.draw(step);
        let gradients = self.gradients.row(step);
        let (stored, new) = (self.state.values(), &mut self.unrounded[..]);
        at_level(*isa, Accumulate { scalars, role: simulation.role, gradients, stored, new });
        core::mem::swap(&mut self.before, &mut self.state);
        self.state.store(&self.unrounded, step).expect("as many values as the state has");
    }

    fn count(&mut self) {
        let moving_grid = matches!(self.plan.simulation.storage.scaling, Scaling::Amax { .. });
        // Decoded values say it all, but for codes on a grid that moves.
        let [old, new] = [&self.before, &self.state]
            .map(|state| if moving_grid { state.view() } else { StateView::from(state.values()) });
        self.stalls = Comparison::new(old, new).count().expect("two states of one piece");
        self.window += self.stalls;
        let (old, unrounded, new) = (self.before.values(), &self.unrounded[..], self.state.values());
        at_level(self.plan.isa, Record { updates: &mut self.updates, old, unrounded, new });
    }

    /// What there is to say, and begins a new window.
    fn tally(&mut self) -> Tally {
        let mut tally = Tally { stalls: self.stalls, window: self.window, ..Tally::default() };
        for (i, (&unit, &stored)) in self.units.iter().zip(self.state.values()).enumerate() {
            let moment = f64::from(stored) / unit;
            tally.sum += moment;
            tally.sum_of_squares += moment * moment;
            tally.never_moved += u64::from(!self.updates.moved[i]);
            for k in 0..2 {
                tally.up[k] += self.updates.up[k][i] / unit;
                tally.down[k] += self.updates.down[k][i] / unit;
            }
        }
        self.window = StallCounts::default();
        self.updates.up.iter_mut().chain(&mut self.updates.down).for_each(|sums| sums.fill(0.0));
        tally
    }
}

/// New moments before rounding.
struct Accumulate<'a> {
    scalars: &'a Scalars,
    role: Role,
    gradients: &'a [f32],
    stored: &'a [f32],
    new: &'a mut [f32],
}

impl Kernel for Accumulate<'_> {
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let Self { scalars, role, gradients, stored, new } = self;
        let triples = new.iter_mut().zip(gradients.iter().zip(stored));
        if role == Role::SecondMoment {
            triples.for_each(|(new, (&g, &v))| *new = scalars.second_moment(g, v));
        } else {
            triples.for_each(|(new, (&g, &m))| *new = scalars.first_moment(g, m));
        }
    }
}

/// Updates of each coordinate: proposed and delivered.
struct Updates {
    up: [Vec<f64>; 2],
    down: [Vec<f64>; 2],
    /// Whether it ever moved.
    moved: Vec<bool>,
}

impl Updates {
    fn new(n: usize) -> Self {
        let sums = || [vec![0.0; n], vec![0.0; n]];
        Self { up: sums(), down: sums(), moved: vec![false; n] }
    }
}

/// Adds a step to the updates.
struct Record<'a> {
    updates: &'a mut Updates,
    old: &'a [f32],
    unrounded: &'a [f32],
    new: &'a [f32],
}

impl Kernel for Record<'_> {
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let Self { updates, old, unrounded, new } = self;
        let n = old.len();
        let (unrounded, new, moved) = (&unrounded[..n], &new[..n], &mut updates.moved[..n]);
        let [up, up_delivered] = &mut updates.up;
        let [down, down_delivered] = &mut updates.down;
        let (up, up_delivered) = (&mut up[..n], &mut up_delivered[..n]);
        let (down, down_delivered) = (&mut down[..n], &mut down_delivered[..n]);
        for i in 0..n {
            let proposed = f64::from(unrounded[i]) - f64::from(old[i]);
            let delivered = f64::from(new[i]) - f64::from(old[i]);
            let rises = proposed > 0.0;
            up[i] += if rises { proposed } else { 0.0 };
            up_delivered[i] += if rises { delivered } else { 0.0 };
            down[i] += if rises { 0.0 } else { proposed };
            down_delivered[i] += if rises { 0.0 } else { delivered };
            moved[i] |= new[i] != old[i];
        }
    }
}

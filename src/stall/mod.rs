//! Stalling: what becomes of the moments of an optimizer when they are stored in few bits.
//!
//! A coordinate has *stalled* in a step when its stored value reads as before. The pieces:
//!
//! - [`Simulation`]: moments fed with random gradients of a known law, stored in any format;
//! - [`State`]: a moment stored in any format with any scaling, for simulations and small trainings;
//! - [`Comparison`]: counts, in the states of a real step, who stalled and who moved.

mod gradients;
mod meter;
mod simulation;
mod state;

pub use gradients::{Law, Variances};
pub use meter::{Comparison, MeterError, StallCounts, StateView};
pub use simulation::{Checkpoint, Report, Simulation, SimulationError, Start, Step, Update};
pub use state::{Scaling, State, Storage};

//! Emptying moments again: which, when, and a record of it.

#[cfg(feature = "stall")]
pub use schedule::{ResetDue, ResetError, ResetEvent, ResetProgress, ResetSchedule, ResetScope, Resets, Stepped};

/// Which moments of a tensor a reset empties.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ResetMoments {
    /// All. The first step afterwards is that of a tensor never stepped: it moves a parameter by the learning rate at most,
    /// and the decay.
    #[default]
    All,
    /// The second, whose age restarts, and not the first, whose age goes on. The first step afterwards divides an average over
    /// many gradients by the root of one squared, and so has no bound where that one is small.
    Second,
}

#[cfg(feature = "stall")]
mod schedule {
    use alloc::collections::BTreeMap;
    use alloc::vec::Vec;

    use super::ResetMoments;
    use crate::format::Format;
    use crate::optim::{Optimizer, Rule};
    use crate::stall::{AdaptiveReset, RESET_THRESHOLD, StallCounts, StallError, reset_period_with_threshold};

    /// When moments are reset.
    #[derive(Clone, Copy, Debug, Default, PartialEq)]
    #[non_exhaustive]
    pub enum ResetSchedule {
        /// Never.
        #[default]
        Off,
        /// Whenever so many steps were taken since the start or the last reset.
        Every {
            /// 1 or more.
            steps: u64,
        },
        /// Every [`reset_period_with_threshold`] steps, from the model of stalling: never where that has no period.
        Model {
            /// What the second moment is stored in.
            format: Format,
            /// Its decay.
            beta2: f64,
            /// The threshold.
            threshold: f64,
        },
        /// When the measured share of second moments that stalled says so: [`AdaptiveReset`].
        Adaptive {
            /// Decay of the second moment.
            beta2: f64,
            /// The threshold.
            threshold: f64,
        },
    }

    impl ResetSchedule {
        /// From the model, at its default threshold.
        #[must_use]
        pub const fn model(format: Format, beta2: f64) -> Self {
            Self::Model { format, beta2, threshold: RESET_THRESHOLD }
        }

        /// From what is measured, at the default threshold.
        #[must_use]
        pub const fn adaptive(beta2: f64) -> Self {
            Self::Adaptive { beta2, threshold: RESET_THRESHOLD }
        }

        /// Steps from one reset to the next, if that is fixed beforehand.
        ///
        /// # Errors
        /// [`ResetError::Steps`] for a period of 0, [`ResetError::Stall`] for a decay or threshold out of its range.
        pub fn period(self) -> Result<Option<u64>, ResetError> {
            match self {
                Self::Off => Ok(None),
                Self::Every { steps: 0 } => Err(ResetError::Steps),
                Self::Every { steps } => Ok(Some(steps)),
                Self::Model { format, beta2, threshold } => Ok(reset_period_with_threshold(format, beta2, threshold)?),
                Self::Adaptive { beta2, threshold } => {
                    AdaptiveReset::with_threshold(beta2, threshold)?;
                    Ok(None)
                }
            }
        }
    }

    /// Whether tensors are reset one by one.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    #[non_exhaustive]
    pub enum ResetScope {
        /// Each when its own steps, or the share measured in it, say so.
        #[default]
        Tensor,
        /// All at once, by the steps of the optimizer, or by the share measured in all tensors together.
        All,
    }

    /// A tensor that took part in a step.
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub struct Stepped {
        /// Its id.
        pub tensor: u64,
        /// What the step did to its stored second moment; only an adaptive schedule reads it.
        pub stalled: Option<StallCounts>,
    }

    /// What is to be reset now.
    #[derive(Clone, Debug, PartialEq, Eq)]
    #[non_exhaustive]
    pub enum ResetDue {
        /// These tensors, of those that were stepped; often none.
        Tensors(Vec<u64>),
        /// All tensors, stepped or not.
        All,
    }

    /// A reset that was done.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct ResetEvent {
        /// Steps that the optimizer had executed.
        pub step: u64,
        /// The tensor's id.
        pub tensor: u64,
        /// Age of its second moment when that ended.
        pub age: u64,
        /// What was emptied.
        pub moments: ResetMoments,
    }

    /// How far a schedule has come since the last reset.
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub struct ResetProgress {
        /// The tensor's id; `None` for all of them under [`ResetScope::All`].
        pub tensor: Option<u64>,
        /// Steps.
        pub steps: u64,
        /// Of an adaptive schedule, its [loss so far](AdaptiveReset::sum); else 0.
        pub loss: f64,
    }

    /// What resets refuse. Nothing was changed.
    #[derive(Clone, Debug, PartialEq, thiserror::Error)]
    #[non_exhaustive]
    pub enum ResetError {
        /// A period of no steps.
        #[error("steps: expected a period of 1 step or more, got 0")]
        Steps,
        /// An adaptive schedule without what it goes by.
        #[error("stalled: expected counts of tensor {tensor}, by which an adaptive schedule goes, got none")]
        NotMeasured {
            /// The tensor's id.
            tensor: u64,
        },
        /// A tensor named twice, or progress for all tensors under a scope that has none for all, or the other way round.
        #[error("{argument}: expected each tensor once, and all of them under `ResetScope::All` alone, got {got:?}")]
        Tensor {
            /// The argument.
            argument: &'static str,
            /// The tensor.
            got: Option<u64>,
        },
        /// The model's own refusal.
        #[error(transparent)]
        Stall(#[from] StallError),
    }

    /// Decides after each step what is to be reset, and keeps a log.
    ///
    /// Decisions depend on the steps taken and the counts measured alone; [`progress`](Self::progress) is all that they
    /// remember, so that training resumed with it goes on as it would have.
    ///
    /// ```
    /// use halfulp::Format;
    /// use halfulp::optim::{AdamW, AdamWConfig, ResetMoments, ResetSchedule, ResetScope, Resets, Rounding, StateFormat, Stepped};
    /// let mut opt = AdamW::new(AdamWConfig::default(), StateFormat::Bf16, Rounding::Nearest)?;
    /// let schedule = ResetSchedule::model(Format::BF16, opt.config().beta2); // every 1116 steps
    /// let mut resets = Resets::new(schedule, ResetMoments::All, ResetScope::Tensor)?;
    /// let mut w = [1.0f32; 8];
    /// for _ in 0..2000 {
    ///     let grads = w;
    ///     opt.step(&mut w, &grads)?;
    ///     resets.after_step(&mut opt, &[Stepped { tensor: 0, stalled: None }])?;
    /// }
    /// assert_eq!((resets.log()[0].step, opt.age(0), opt.steps()), (1116, 884, 2000));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[derive(Clone, Debug, PartialEq)]
    pub struct Resets {
        schedule: ResetSchedule,
        moments: ResetMoments,
        scope: ResetScope,
        period: Option<u64>,
        /// By tensor; one under `None` if the scope is all of them.
        progress: BTreeMap<Option<u64>, Progress>,
        log: Vec<ResetEvent>,
    }

    /// Since the last reset.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Progress {
        Steps(u64),
        Adaptive(AdaptiveReset),
    }

    impl Resets {
        /// Nothing stepped yet.
        ///
        /// # Errors
        /// As [`ResetSchedule::period`].
        pub fn new(schedule: ResetSchedule, moments: ResetMoments, scope: ResetScope) -> Result<Self, ResetError> {
            let period = schedule.period()?;
            Ok(Self { schedule, moments, scope, period, progress: BTreeMap::new(), log: Vec::new() })
        }

        /// The schedule.
        #[must_use]
        pub fn schedule(&self) -> ResetSchedule {
            self.schedule
        }

        /// What is emptied.
        #[must_use]
        pub fn moments(&self) -> ResetMoments {
            self.moments
        }

        /// Whether tensors are reset one by one.
        #[must_use]
        pub fn scope(&self) -> ResetScope {
            self.scope
        }

        /// All resets done so far, the first first.
        #[must_use]
        pub fn log(&self) -> &[ResetEvent] {
            &self.log
        }

        /// What decisions remember, by tensor.
        #[must_use]
        pub fn progress(&self) -> Vec<ResetProgress> {
            let since = |progress: &Progress| match progress {
                Progress::Steps(steps) => (*steps, 0.0),
                Progress::Adaptive(rule) => (rule.age(), rule.sum()),
            };
            self.progress
                .iter()
                .map(|(&tensor, progress)| {
                    let (steps, loss) = since(progress);
                    ResetProgress { tensor, steps, loss }
                })
                .collect()
        }

        /// Goes on from there. The log is not part of it.
        ///
        /// # Errors
        /// [`ResetError::Tensor`] for progress of the other scope or twice of one tensor, [`ResetError::Stall`] for a loss that
        /// is none.
        pub fn resume(mut self, progress: &[ResetProgress]) -> Result<Self, ResetError> {
            self.progress.clear();
            for &ResetProgress { tensor, steps, loss } in progress {
                let of = match self.schedule {
                    ResetSchedule::Adaptive { beta2, threshold } => {
                        Progress::Adaptive(AdaptiveReset::restored(beta2, threshold, steps, loss)?)
                    }
                    _ => Progress::Steps(steps),
                };
                let fits = tensor.is_none() == (self.scope == ResetScope::All);
                if !fits || self.progress.insert(tensor, of).is_some() {
                    return Err(ResetError::Tensor { argument: "progress", got: tensor });
                }
            }
            Ok(self)
        }

        /// Takes in an executed step of these tensors and decides; nothing is reset yet. A tensor that is left out stood still.
        ///
        /// # Errors
        /// [`ResetError::NotMeasured`] if an adaptive schedule lacks counts, [`ResetError::Tensor`] for a tensor named twice.
        pub fn decide(&mut self, stepped: &[Stepped]) -> Result<ResetDue, ResetError> {
            self.check(stepped)?;
            if self.scope == ResetScope::All && !stepped.is_empty() {
                let stalled = stepped.iter().filter_map(|tensor| tensor.stalled).sum();
                return Ok(if self.take_in(None, stalled)? { ResetDue::All } else { ResetDue::Tensors(Vec::new()) });
            }
            let mut due = Vec::new();
            for tensor in stepped {
                if self.take_in(Some(tensor.tensor), tensor.stalled.unwrap_or_default())? {
                    due.push(tensor.tensor);
                }
            }
            Ok(ResetDue::Tensors(due))
        }

        fn check(&self, stepped: &[Stepped]) -> Result<(), ResetError> {
            let mut seen: Vec<u64> = stepped.iter().map(|tensor| tensor.tensor).collect();
            seen.sort_unstable();
            if let Some(twice) = seen.windows(2).find(|pair| pair[0] == pair[1]) {
                return Err(ResetError::Tensor { argument: "stepped", got: Some(twice[0]) });
            }
            let adaptive = matches!(self.schedule, ResetSchedule::Adaptive { .. });
            match stepped.iter().find(|tensor| adaptive && tensor.stalled.is_none()) {
                Some(tensor) => Err(ResetError::NotMeasured { tensor: tensor.tensor }),
                None => Ok(()),
            }
        }

        /// One more step of a tensor, or of all; whether it is to be reset, after which it starts anew.
        fn take_in(&mut self, tensor: Option<u64>, stalled: StallCounts) -> Result<bool, ResetError> {
            let start = match self.schedule {
                ResetSchedule::Adaptive { beta2, threshold } => {
                    Progress::Adaptive(AdaptiveReset::with_threshold(beta2, threshold)?)
                }
                _ => Progress::Steps(0),
            };
            let progress = self.progress.entry(tensor).or_insert(start);
            let due = match progress {
                Progress::Steps(steps) => {
                    *steps += 1;
                    self.period.is_some_and(|period| *steps >= period)
                }
                // Where nothing could stall, nothing did.
                Progress::Adaptive(rule) => rule.observe(if stalled.counted() == 0 { 0.0 } else { stalled.share() })?,
            };
            if due {
                *progress = start;
            }
            Ok(due)
        }

        /// Takes in an executed step of the optimizer, resets what is due, and logs it. Gives the new part of the log.
        ///
        /// # Errors
        /// As [`decide`](Self::decide).
        pub fn after_step<R: Rule>(
            &mut self,
            opt: &mut Optimizer<R>,
            stepped: &[Stepped],
        ) -> Result<&[ResetEvent], ResetError> {
            let tensors = match self.decide(stepped)? {
                ResetDue::Tensors(tensors) => tensors,
                ResetDue::All => opt.tensors().collect(),
            };
            let before = self.log.len();
            for tensor in tensors {
                let (step, age, moments) = (opt.steps(), opt.age(tensor), self.moments);
                if opt.reset(tensor, moments) {
                    self.log.push(ResetEvent { step, tensor, age, moments });
                }
            }
            Ok(&self.log[before..])
        }

        /// Takes down a reset that was made elsewhere.
        #[cfg(feature = "cuda")]
        pub(crate) fn record(&mut self, event: ResetEvent) {
            self.log.push(event);
        }
    }
}

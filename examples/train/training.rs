//! A training under way: what one step is.

use halfulp::optim::{
    AdamW, AdamWConfig, ChunkSums, Clip, GradientNorm, Moment, Parameter, ParameterGroup, ResetMoments, ResetScope,
    Resets, Rounding, StateFormat, States, StepControl, StepOutcome,
};
use halfulp::random::tensor_id;
use halfulp::{Format, bf16, decode, nearest_cast};

use crate::data::{Batches, Images};
use crate::digest::Digest;
use crate::error::TrainError;
use crate::log::{Log, Row};
use crate::model;
use crate::options::Setup;

/// Images of a batch.
pub(crate) const BATCH: usize = 32;
/// What moments are stored in.
pub(crate) const STATES: States = States { m: StateFormat::E4M3, v: StateFormat::UE4M4 };
const SECOND: Format = Format::UE4M4;
/// Parameter groups: weights, which decay, and biases, which don't.
const WEIGHTS: usize = 0;
const BIASES: usize = 1;
/// How often the test images are looked at.
const TESTS: u64 = 20;
/// So many steps on end without a finite gradient are the end.
const PATIENCE: u64 = 10;

pub(crate) struct Training<'a> {
    pub(crate) setup: Setup,
    /// By the network's order of tensors, weights and biases in turn.
    pub(crate) params: Vec<Vec<bf16>>,
    pub(crate) optimizer: AdamW,
    pub(crate) resets: Resets,
    pub(crate) log: Log,
    batches: Batches<'a>,
    clip: Clip,
    test: &'a Images,
}

impl<'a> Training<'a> {
    pub(crate) fn new(setup: Setup, [images, test]: &'a [Images; 2]) -> Result<Self, TrainError> {
        let config = AdamWConfig::default();
        let weights = ParameterGroup::new(config, STATES).remainder();
        let biases = ParameterGroup { config: AdamWConfig { weight_decay: 0.0, ..config }, ..weights };
        let mut optimizer = AdamW::with_group(weights, Rounding::stochastic(setup.seed))?.meter(true);
        let number = optimizer.add_group(biases)?;
        debug_assert_eq!(number, BIASES);
        let resets = Resets::new(setup.schedule(SECOND, config.beta2), ResetMoments::All, ResetScope::Tensor)?;
        Ok(Self {
            params: model::initial(setup.seed).iter().map(|values| nearest_cast(values)).collect(),
            optimizer,
            resets,
            log: Log::default(),
            batches: Batches::new(images, setup.seed),
            clip: setup.clip()?,
            test,
            setup,
        })
    }

    /// Goes on after the steps of a log.
    pub(crate) fn resumed(self, params: Vec<Vec<bf16>>, resets: Resets, log: Log, images: &'a Images) -> Self {
        let batches = Batches::after(images, self.setup.seed, log.steps(), BATCH);
        Self { params, resets, log, batches, ..self }
    }

    pub(crate) fn step(&mut self) -> Result<(), TrainError> {
        let step = self.log.steps() + 1;
        let lr = self.setup.learning_rate(step);
        self.optimizer.set_configs(|_, config| config.lr = lr)?;

        let (grads, loss) = model::gradients(&self.values(), &self.batches.next(BATCH));
        let sums: Vec<_> =
            model::names().zip(&grads).map(|(name, grads)| ChunkSums::of(tensor_id(name), grads)).collect();
        let norm = GradientNorm::gather(&sums)?;
        let control = StepControl::default().clipped(self.clip.coefficient(norm, 1.0)?);
        let tensors = model::names().zip(&mut self.params).zip(&grads);
        let mut tensors: Vec<_> = tensors
            .map(|((name, params), grads)| Parameter::named(name, params, grads).group(group_of(name)))
            .collect();
        let outcome = self.optimizer.step_controlled(&control, &mut tensors)?;

        let mut row = Row { lr, loss, norm: norm.value(), ..Row::default() };
        if let StepOutcome::Executed(_) = outcome {
            row.clip = Some(control.clip);
            let report = self.optimizer.stall_report();
            row.take_stalls(&report);
            if step > self.setup.steps / 2 {
                self.log.stalls.take(&report);
            }
            let stepped = self.optimizer.stepped();
            let events = self.resets.after_step(&mut self.optimizer, &stepped)?;
            row.resets =
                model::names().filter(|name| events.iter().any(|event| event.tensor == tensor_id(name))).collect();
        }
        if step.is_multiple_of((self.setup.steps / TESTS).max(1)) {
            row.test = Some(model::evaluate(&self.values(), self.test).0);
        }
        self.log.rows.push(row);
        match self.log.skipped_on_end() {
            skipped if skipped >= PATIENCE => Err(TrainError::Diverged { step, skipped }),
            _ => Ok(()),
        }
    }

    /// The parameters as the network has them.
    pub(crate) fn values(&self) -> Vec<Vec<f32>> {
        self.params.iter().map(|params| decode(params)).collect()
    }

    /// Of memory: parameters, and what the optimizer keeps.
    pub(crate) fn bytes(&self) -> usize {
        self.params.iter().map(|params| size_of_val(&params[..])).sum::<usize>() + self.optimizer.bytes()
    }

    /// Of all parameters, with their low halves, and moments.
    pub(crate) fn digest(&self) -> Result<u64, TrainError> {
        let mut digest = Digest::default();
        for (name, params) in model::names().zip(&self.params) {
            let id = tensor_id(name);
            digest.take(params);
            digest.take(self.optimizer.rest(id).unwrap_or_default());
            let moments: &[Moment] = self.optimizer.stored(id).unwrap_or_default();
            moments.iter().try_for_each(|moment| digest.take_moment(moment)).map_err(TrainError::Digest)?;
        }
        Ok(digest.value())
    }
}

fn group_of(name: &str) -> usize {
    if name.ends_with(".bias") { BIASES } else { WEIGHTS }
}

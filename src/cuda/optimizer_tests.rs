//! Whole optimizers against those of the CPU bit by bit: many tensors, every rule and option. On the host in place of a GPU, or on one
//! where `HALFULP_REQUIRE_GPU` is set.

use half::{bf16, f16};

use super::emulated::{Emulated, FORWARD, REVERSE};
use super::kernel_tests::Value;
use super::optimizer::DeviceParameters;
use super::{CudaError, DeviceGradients, DeviceNorm, DeviceParameter, DeviceVec, ElementType, Gpu, StepMemory};
use crate::cuda;
use crate::optim::{
    self, AdEMAMixConfig, AdamConfig, AdamWConfig, ChunkSums, Clip, GradientNorm, LambConfig, LionConfig, MixStates,
    NonFinite, OptimError, Parameter, ParameterGroup, ResetMoments, Rounding, Rule, SgdConfig, StateFormat, States,
    StepControl, StepOutcome, sealed,
};

fn gpu(order: u64) -> Option<Gpu> {
    match std::env::var_os("HALFULP_REQUIRE_GPU") {
        Some(_) => Some(Gpu::open(0).unwrap()),
        None => Emulated::new(order).map(Gpu::emulated),
    }
}

/// Bell-shaped values; here and there, if `wild`, zeros and what is not finite.
fn values(seed: u64, n: usize, wild: bool) -> Vec<f32> {
    let mut words = vec![0u16; 4 * n];
    crate::random::Draws::fill16(&crate::Draw::seeded(seed), 0, &mut words);
    let value = |word: &[u16]| match word[0] {
        0..4000 => 0.0,
        4000..4020 if wild => [f32::NAN, f32::INFINITY, 1e-42, -1e30][usize::from(word[1] % 4)],
        _ => (word.iter().map(|&word| f32::from(word)).sum::<f32>() - 131_070.0) * 2e-5,
    };
    words.chunks_exact(4).map(value).collect()
}

fn bits<T: bytemuck::Pod>(x: &[T]) -> &[u8] {
    bytemuck::cast_slice(x)
}

/// Tensors of one type, on both sides.
struct Both<P, G> {
    ids: Vec<u64>,
    groups: Vec<usize>,
    p: Vec<Vec<P>>,
    g: Vec<Vec<G>>,
    device_p: Vec<DeviceVec<P>>,
    device_g: Vec<DeviceVec<G>>,
}

impl<P: Value, G: Value> Both<P, G> {
    fn new(gpu: &Gpu, first_id: u64, lengths: &[usize], groups: usize) -> Self {
        let p: Vec<Vec<P>> = (0u64..)
            .zip(lengths)
            .map(|(i, &n)| values(i + first_id, n, false).into_iter().map(P::of).collect())
            .collect();
        let g: Vec<Vec<G>> = lengths.iter().map(|&n| vec![G::of(0.0); n]).collect();
        Self {
            ids: (first_id..).take(lengths.len()).collect(),
            groups: (0..lengths.len()).map(|i| i % groups).collect(),
            device_p: p.iter().map(|p| gpu.upload(p).unwrap()).collect(),
            device_g: g.iter().map(|g| gpu.upload(g).unwrap()).collect(),
            p,
            g,
        }
    }

    fn gradients(&mut self, gpu: &Gpu, step: u64, wild: bool) {
        for (i, (g, device)) in self.g.iter_mut().zip(&mut self.device_g).enumerate() {
            let new = values(1000 * step + self.ids[i], g.len(), wild);
            g.iter_mut().zip(new).for_each(|(g, x)| *g = G::of(x));
            gpu.upload_into(g, device).unwrap();
        }
    }

    /// The same, changed by place.
    fn changed_gradients(&mut self, gpu: &Gpu, step: u64, change: impl Fn(usize, f32) -> f32) {
        self.gradients(gpu, step, false);
        for (g, device) in self.g.iter_mut().zip(&mut self.device_g) {
            for (i, g) in g.iter_mut().enumerate() {
                *g = G::of(change(i, g.widen().unwrap()));
            }
            gpu.upload_into(g, device).unwrap();
        }
    }

    /// Changes parameters by tensor and place.
    fn change_parameters(&mut self, gpu: &Gpu, change: impl Fn(usize, usize, f32) -> f32) {
        for (tensor, (p, device)) in self.p.iter_mut().zip(&mut self.device_p).enumerate() {
            for (i, p) in p.iter_mut().enumerate() {
                *p = P::of(change(tensor, i, p.widen().unwrap()));
            }
            gpu.upload_into(p, device).unwrap();
        }
    }

    /// Those that have a gradient in this step.
    fn host(&mut self, step: u64) -> Vec<Parameter<'_, P, G>> {
        let all = self.p.iter_mut().zip(&self.g).zip(self.ids.iter().zip(&self.groups));
        all.filter(|(_, (id, _))| there(**id, step))
            .map(|((p, g), (&id, &group))| Parameter::numbered(id, p, g).group(group))
            .collect()
    }

    /// The same in another order.
    fn device(&mut self, step: u64) -> Vec<DeviceParameter<'_, P, G>> {
        let all = self.device_p.iter_mut().zip(&self.device_g).zip(self.ids.iter().zip(&self.groups));
        all.filter(|(_, (id, _))| there(**id, step))
            .map(|((p, g), (&id, &group))| DeviceParameter::numbered(id, p, g).group(group))
            .rev()
            .collect()
    }

    fn same(&self, gpu: &Gpu, name: &str) {
        for (i, (p, device)) in self.p.iter().zip(&self.device_p).enumerate() {
            let got = gpu.download(device).unwrap();
            let wrong = (0..p.len()).find(|&j| bits(&p[j..=j]) != bits(&got[j..=j]));
            assert!(wrong.is_none(), "tensor {i}, element {wrong:?}: {name}");
        }
    }
}

/// Tensor 3 of the first type has no gradient in step 2.
fn there(id: u64, step: u64) -> bool {
    !(id == 3 && step == 2)
}

#[derive(Clone, Debug)]
struct Case<R: Rule> {
    groups: Vec<ParameterGroup<R>>,
    rounding: Rounding,
    parameters: Rounding,
    meter: bool,
    wild: bool,
    order: u64,
    lengths: Vec<usize>,
}

/// Empty ones first, last and between, a tile and one more, and several tiles.
const LENGTHS: [usize; 9] = [0, 1, 512, 130, 0, 4097, 513, 2500, 0];

type Pair<R> = (optim::Optimizer<R>, cuda::Optimizer<R>);

/// Both with a meter, if so; which is of a feature.
#[cfg(feature = "stall")]
fn metered<R: Rule>(host: optim::Optimizer<R>, device: cuda::Optimizer<R>, meter: bool) -> Pair<R> {
    (host.meter(meter), device.meter(meter))
}
#[cfg(not(feature = "stall"))]
fn metered<R: Rule>(host: optim::Optimizer<R>, device: cuda::Optimizer<R>, _: bool) -> Pair<R> {
    (host, device)
}

/// What meters have counted in these tensors, and in all; nothing where there is no host.
#[cfg(feature = "stall")]
fn same_stalls<R: Rule>(host: Option<&optim::Optimizer<R>>, device: &cuda::Optimizer<R>, ids: &[u64], name: &str) {
    for &id in ids {
        let expected = host.map_or_else(Vec::new, |host| host.stalls(id));
        assert_eq!(device.stalls(id).unwrap(), expected, "tensor {id}: {name}");
    }
    if let Some(host) = host {
        assert_eq!(device.stall_report().unwrap(), host.stall_report(), "{name}");
    }
}
#[cfg(not(feature = "stall"))]
fn same_stalls<R: Rule>(_: Option<&optim::Optimizer<R>>, _: &cuda::Optimizer<R>, _: &[u64], _: &str) {}

/// Four steps with a schedule, a step left out, a missing gradient, factors, a reset, and a copy back and forth.
fn alike<R: Rule, P: Value, G: Value>(case: &Case<R>) {
    let Some(gpu) = gpu(case.order) else { return };
    let name = format!("{} {} {} {case:?}", R::NAME, core::any::type_name::<P>(), core::any::type_name::<G>());
    let mut host = optim::Optimizer::with_group(case.groups[0], case.rounding).unwrap();
    host = host.parameter_rounding(case.parameters).unwrap();
    let mut device = cuda::Optimizer::with_group(&gpu, case.groups[0], case.rounding).unwrap();
    device = device.parameter_rounding(case.parameters).unwrap();
    (host, device) = metered(host, device, case.meter);
    for &group in &case.groups[1..] {
        assert_eq!(host.add_group(group).unwrap(), device.add_group(group).unwrap());
    }
    let mut both = Both::<P, G>::new(&gpu, 0, &case.lengths, case.groups.len());
    let factors = StepControl { gradient_scale: 0.25, clip: 0.75, found_inf: false };
    for step in 0..5u64 {
        both.gradients(&gpu, step, case.wild);
        let control = match step {
            0 => StepControl::default(),
            3 => StepControl { found_inf: true, ..factors },
            _ => factors,
        };
        let outcome = host.step_controlled(&control, &mut both.host(step)).unwrap();
        device.step_controlled(&control, &mut both.device(step)).unwrap();
        assert_eq!(matches!(outcome, StepOutcome::Skipped), step == 3);
        both.same(&gpu, &name);
        if step == 1 {
            for (id, moments) in [(5, ResetMoments::All), (6, ResetMoments::Second), (99, ResetMoments::All)] {
                assert_eq!(host.reset(id, moments), device.reset(id, moments).unwrap());
            }
            let change = |_: usize, config: &mut R| *config = scheduled(config);
            host.set_configs(change).unwrap();
            device.set_configs(change).unwrap();
        }
        if step == 2 {
            device = cuda::Optimizer::from_host(&gpu, &device.to_host().unwrap()).unwrap();
        }
        // A step left out leaves what the last one counted.
        if step != 3 {
            // Nor does what was copied have counts.
            same_stalls((step != 2).then_some(&host), &device, &both.ids, &format!("step {step}: {name}"));
        }
    }
    for &id in &both.ids {
        assert_eq!(device.age(id).unwrap(), host.age(id), "{name}");
        assert_eq!(device.rest(id).unwrap().as_deref(), host.rest(id), "{name}");
    }
    let back = device.to_host().unwrap();
    assert_eq!((back.steps(), device.progress().unwrap().skipped), (4, 1));
    let same = back.tensors == host.tensors || both.ids.iter().all(|&id| same_states(&back, &host, id));
    assert!(same, "states: {name}");
    assert_eq!((device.bytes(), device.groups()), (host.bytes(), host.groups()), "{name}");
}

/// Bits, where a NaN is not equal to itself.
fn same_states<R: Rule>(a: &optim::Optimizer<R>, b: &optim::Optimizer<R>, id: u64) -> bool {
    // As they are stored, too: a block of zeros has a scale.
    let stored = |moment: &optim::Moment| match moment {
        optim::Moment::Blocks(blocks) => Some((blocks.codes().to_vec(), format!("{:?}", blocks.scales()))),
        _ => None,
    };
    let words = |optimizer: &optim::Optimizer<R>| {
        let states = optimizer.stored(id)?.iter();
        Some(
            states
                .map(|x| (stored(x), x.to_f32().iter().map(|x| x.to_bits()).collect::<Vec<u32>>()))
                .collect::<Vec<_>>(),
        )
    };
    let all = |optimizer: &optim::Optimizer<R>| {
        let state = &optimizer.tensors[&id];
        (state.ages, state.n, state.first, state.group, state.rest.clone(), state.name.clone())
    };
    words(a) == words(b) && all(a) == all(b)
}

/// The same hyper-parameters with a third of the learning rate.
fn scheduled<R: Rule>(config: &R) -> R {
    struct Third;
    impl sealed::Visit for Third {
        type Error = core::convert::Infallible;
        fn number(&mut self, name: &'static str, value: &mut f64) -> Result<(), Self::Error> {
            if name == "lr" {
                *value /= 3.0;
            }
            Ok(())
        }
        fn flag(&mut self, _: &'static str, _: &mut bool) -> Result<(), Self::Error> {
            Ok(())
        }
        fn integer(&mut self, _: &'static str, _: &mut u64) -> Result<(), Self::Error> {
            Ok(())
        }
        fn option(&mut self, _: &'static str, _: &mut Option<f64>) -> Result<(), Self::Error> {
            Ok(())
        }
    }
    let mut config = *config;
    let Ok(()) = sealed::Rule::fields(&mut config, &mut Third);
    config
}

/// Two groups: hyper-parameters with decay, and without and with `skip_zeros` or another option.
trait Configs: Rule {
    fn pair() -> [Self; 2];
    /// What its states can be stored as, beside one format for all.
    fn sets() -> Vec<Self::States>;
}

const PAIRS: [States; 5] = [
    States { m: StateFormat::E4M3, v: StateFormat::UE4M4 },
    States { m: StateFormat::E5M2, v: StateFormat::UE5M3 },
    States::FP4,
    States { m: StateFormat::Bf16, v: StateFormat::UE4M4 },
    States { m: StateFormat::E2M1, v: StateFormat::F32 },
];

fn amax(states: States) -> States {
    States { m: states.m.amax(), v: states.v.block(64).unwrap().amax() }
}

macro_rules! two_moments {
    ($config:ident { $($first:tt)* } { $($second:tt)* }) => {
        impl Configs for $config {
            fn pair() -> [Self; 2] {
                [Self { $($first)*, ..Self::default() }, Self { $($second)*, ..Self::default() }]
            }
            fn sets() -> Vec<States> {
                PAIRS.into_iter().chain([amax(PAIRS[0]), amax(PAIRS[2])]).collect()
            }
        }
    };
}
two_moments!(AdamWConfig { lr: 0.1, weight_decay: 0.1 } { lr: 0.01, weight_decay: 0.0, maximize: true });
two_moments!(AdamConfig { lr: 0.1, weight_decay: 0.1 } { lr: 0.01, maximize: true });
two_moments!(LambConfig { lr: 0.1, weight_decay: 0.1 } { lr: 0.01, max_unorm: Some(0.3), maximize: true });

macro_rules! one_momentum {
    ($config:ident { $($first:tt)* } { $($second:tt)* }) => {
        impl Configs for $config {
            fn pair() -> [Self; 2] {
                [Self { $($first)*, ..Self::default() }, Self { $($second)*, ..Self::default() }]
            }
            fn sets() -> Vec<StateFormat> {
                vec![
                    StateFormat::E4M3,
                    StateFormat::E5M2.block(32).unwrap(),
                    StateFormat::E2M1.block(256).unwrap(),
                    StateFormat::E4M3.amax(),
                ]
            }
        }
    };
}
one_momentum!(
    SgdConfig { lr: 0.1, momentum: 0.9, weight_decay: 0.1, nesterov: true }
    { lr: 0.01, momentum: 0.9, dampening: 0.5, weight_decay: 0.1, decoupled: true, maximize: true }
);
one_momentum!(LionConfig { lr: 0.1, weight_decay: 0.1 } { lr: 0.01, maximize: true });

impl Configs for AdEMAMixConfig {
    fn pair() -> [Self; 2] {
        let scheduled = Self { lr: 0.1, weight_decay: 0.1, alpha_steps: 3, beta3_steps: 3, ..Self::default() };
        [scheduled, Self { lr: 0.01, weight_decay: 0.0, maximize: true, ..Self::default() }]
    }
    fn sets() -> Vec<MixStates> {
        let eight = MixStates { m: StateFormat::E4M3, v: StateFormat::UE4M4, slow: StateFormat::E5M2 };
        let four =
            MixStates { m: StateFormat::E2M1, v: StateFormat::UE2M2NZ, slow: StateFormat::E2M1.block(32).unwrap() };
        let mixed = MixStates {
            m: StateFormat::Bf16,
            v: StateFormat::UE5M3.block(256).unwrap(),
            slow: StateFormat::E4M3.amax(),
        };
        vec![eight, four, mixed]
    }
}

fn stochastic(seed: u64) -> Rounding {
    Rounding::Stochastic { seed }
}

/// The kernels that have types and rounding built in, with a meter and without.
fn built_in<R: Configs>(lengths: &[usize]) {
    let mut order = (0..).map(|i| [FORWARD, REVERSE, 2 + i][i as usize % 3]);
    for (states, rounding) in [
        (StateFormat::F32, Rounding::Nearest),
        (StateFormat::Bf16, Rounding::Nearest),
        (StateFormat::Bf16, stochastic(7)),
    ] {
        for (parameters, meter) in
            [(Rounding::Nearest, false), (stochastic(3), false), (stochastic(3), true), (Rounding::Nearest, true)]
        {
            let case = Case {
                groups: R::pair().map(|config| ParameterGroup::new(config, states)).into(),
                rounding,
                parameters,
                meter,
                wild: meter,
                order: order.next().unwrap(),
                lengths: lengths.into(),
            };
            alike::<R, f32, f32>(&case);
            alike::<R, bf16, bf16>(&case);
        }
    }
}

/// The kernel that takes any types and formats.
fn any<R: Configs>(lengths: &[usize]) {
    let mut order = (0..).map(|i| [FORWARD, REVERSE, 2 + i][i as usize % 3]);
    for (i, states) in R::sets().into_iter().enumerate() {
        for (rounding, meter) in [(Rounding::Nearest, true), (stochastic(7), i % 2 == 0)] {
            // Groups of different formats are launches of their own.
            let [first, second] = R::pair();
            let case = Case {
                groups: vec![ParameterGroup::new(first, states), ParameterGroup::new(second, StateFormat::Bf16)],
                rounding,
                parameters: if i % 2 == 0 { stochastic(3) } else { Rounding::Nearest },
                meter,
                wild: i % 2 == 1,
                order: order.next().unwrap(),
                lengths: lengths.into(),
            };
            match i % 4 {
                0 => alike::<R, f32, f32>(&case),
                1 => alike::<R, bf16, f32>(&case),
                2 => alike::<R, f16, bf16>(&case),
                _ => alike::<R, bf16, f16>(&case),
            }
        }
    }
}

/// Parameters of 16 bits that keep the rest, and elements that stand still.
fn options<R: Configs>() {
    let still = |config: R| {
        struct Still;
        impl sealed::Visit for Still {
            type Error = core::convert::Infallible;
            fn number(&mut self, _: &'static str, _: &mut f64) -> Result<(), Self::Error> {
                Ok(())
            }
            fn flag(&mut self, name: &'static str, value: &mut bool) -> Result<(), Self::Error> {
                *value |= name == "skip_zeros";
                Ok(())
            }
            fn integer(&mut self, _: &'static str, _: &mut u64) -> Result<(), Self::Error> {
                Ok(())
            }
            fn option(&mut self, _: &'static str, _: &mut Option<f64>) -> Result<(), Self::Error> {
                Ok(())
            }
        }
        let mut config = config;
        let Ok(()) = sealed::Rule::fields(&mut config, &mut Still);
        config
    };
    let [first, second] = R::pair();
    for (states, order) in [(StateFormat::Bf16.into(), 5), (R::sets()[0], REVERSE)] {
        let case = Case {
            groups: vec![
                ParameterGroup::new(first, states).remainder(),
                ParameterGroup::new(still(second), states).remainder(),
            ],
            rounding: stochastic(7),
            parameters: stochastic(3),
            meter: true,
            wild: false,
            order,
            lengths: LENGTHS.into(),
        };
        alike::<R, bf16, f32>(&case);
        let groups = vec![ParameterGroup::new(still(first), states), ParameterGroup::new(second, states)];
        alike::<R, f32, bf16>(&Case { groups, wild: true, ..case });
    }
}

macro_rules! rules {
    ($($module:ident: $config:ident),* $(,)?) => {
        $(mod $module {
            use super::*;

            #[test]
            fn built_in_types_step_alike() {
                built_in::<$config>(&LENGTHS);
            }
            #[test]
            fn any_formats_step_alike() {
                any::<$config>(&LENGTHS);
            }
            #[test]
            fn options_step_alike() {
                options::<$config>();
            }
        })*
    };
}
rules!(adamw: AdamWConfig, adam: AdamConfig, sgd: SgdConfig, lion: LionConfig, ademamix: AdEMAMixConfig, lamb: LambConfig);

/// Every kernel of every rule.
pub(super) fn every_kernel() {
    fn of<R: Configs>() {
        built_in::<R>(&[600]);
        any::<R>(&[70, 5]);
    }
    of::<AdamWConfig>();
    of::<AdamConfig>();
    of::<SgdConfig>();
    of::<LionConfig>();
    of::<AdEMAMixConfig>();
    of::<LambConfig>();
    for parameters in [Rounding::Nearest, stochastic(3)] {
        let groups = AdamWConfig::pair().map(|config| ParameterGroup::new(config, StateFormat::Bf16)).into();
        let rounding = stochastic(7);
        let case = Case { groups, rounding, parameters, meter: true, wild: false, order: FORWARD, lengths: vec![600] };
        alike::<_, f32, bf16>(&case);
        alike::<_, f32, f16>(&case);
        alike::<_, bf16, f32>(&case);
        alike::<_, bf16, f16>(&case);
        alike::<_, f16, f32>(&case);
        alike::<_, f16, bf16>(&case);
        alike::<_, f16, f16>(&case);
    }
    for states in [StateFormat::F32, StateFormat::Bf16] {
        let groups = LambConfig::pair().map(|config| ParameterGroup::new(config, states)).into();
        let (rounding, parameters) = (Rounding::Nearest, Rounding::Nearest);
        let case = Case { groups, rounding, parameters, meter: true, wild: false, order: FORWARD, lengths: vec![600] };
        alike::<_, f32, f16>(&case);
    }
}

/// Several types in one step: as steps of the same number over each type.
#[test]
fn mixed_types_are_one_step() {
    let Some(gpu) = gpu(4) else { return };
    let (config, formats) = (AdamWConfig { lr: 0.1, ..AdamWConfig::default() }, PAIRS[0]);
    let mut wide = optim::AdamW::new(config, formats, stochastic(1)).unwrap();
    let mut narrow = optim::AdamW::new(config, formats, stochastic(1)).unwrap();
    let mut device = cuda::AdamW::new(&gpu, config, formats, stochastic(1)).unwrap();
    let mut a = Both::<f32, f32>::new(&gpu, 0, &[300, 0, 3000], 1);
    let mut b = Both::<bf16, f32>::new(&gpu, 50, &[5, 2048, 1], 1);
    for step in 4..7 {
        a.gradients(&gpu, step, false);
        b.gradients(&gpu, step, false);
        wide.step_tensors(&mut a.host(step)).unwrap();
        narrow.step_tensors(&mut b.host(step)).unwrap();
        let (mut first, mut second) = (a.device(step), b.device(step));
        let lists: &mut [&mut dyn DeviceParameters] = &mut [&mut first, &mut second];
        device.step_mixed(lists).unwrap();
        a.same(&gpu, "f32");
        b.same(&gpu, "BF16");
    }
    assert_eq!(device.steps().unwrap(), 3);
}

/// The norm stays on the device, and so does the decision to leave a step out.
#[test]
fn clipping_and_skipping_without_a_look() {
    let Some(gpu) = gpu(3) else { return };
    for states in [StateFormat::Bf16.into(), PAIRS[0], States::FP4] {
        let config = AdamWConfig { lr: 0.1, ..AdamWConfig::default() };
        let mut host = optim::AdamW::new(config, states, stochastic(1)).unwrap();
        let mut device = cuda::AdamW::new(&gpu, config, states, stochastic(1)).unwrap();
        let mut both = Both::<f32, f32>::new(&gpu, 0, &[5000, 700], 1);
        let clip = Clip::new(1.0).unwrap().non_finite(NonFinite::Skip);
        let mut norm = DeviceNorm::new(&gpu).unwrap();
        for step in 4..9 {
            both.gradients(&gpu, step, false);
            if step == 6 {
                both.g[1][600] = f32::INFINITY;
                gpu.upload_into(&both.g[1], &mut both.device_g[1]).unwrap();
            }
            let sums: Vec<ChunkSums> = both.ids.iter().zip(&both.g).map(|(&id, g)| ChunkSums::of(id, g)).collect();
            let clipped = clip.coefficient(GradientNorm::gather(&sums).unwrap(), 1.0).unwrap();
            let outcome = host.step_controlled(&StepControl::default().clipped(clipped), &mut both.host(step)).unwrap();
            assert_eq!(outcome == StepOutcome::Skipped, step == 6);
            let gradients: Vec<_> =
                both.ids.iter().zip(&both.device_g).map(|(&id, g)| DeviceGradients::of(id, g)).collect();
            norm.enqueue(&clip, 1.0, &gradients).unwrap();
            device.step_clipped(&norm, NonFinite::Skip, &mut both.device(step)).unwrap();
            both.same(&gpu, "clipped");
        }
        let progress = device.progress().unwrap();
        assert_eq!((progress.executed, progress.skipped, host.steps()), (4, 1, 4));
    }
}

/// Steps of one tensor, which the host prepares, between steps of several and clipped ones, which the device does.
#[test]
fn one_by_one_and_all_together() {
    let Some(gpu) = gpu(5) else { return };
    for states in [StateFormat::Bf16.into(), PAIRS[0], PAIRS[3]] {
        let config = AdamWConfig { lr: 0.1, weight_decay: 0.1, ..AdamWConfig::default() };
        let mut host = optim::AdamW::new(config, states, stochastic(1)).unwrap();
        let mut device = cuda::AdamW::new(&gpu, config, states, stochastic(1)).unwrap();
        let mut both = Both::<f32, f32>::new(&gpu, 0, &[5000, 700, 33], 1);
        let clip = Clip::new(0.5).unwrap();
        for step in 4..14u64 {
            both.gradients(&gpu, step, false);
            // One of them, or all.
            let alone = (step % 4 > 0).then_some(step as usize % 3);
            let gone = |i: usize| alone.is_some_and(|alone| alone != i);
            let mut control = StepControl { gradient_scale: 0.5, ..StepControl::default() };
            if step == 11 {
                // From here on the device decides.
                let sums: Vec<_> = (0..3).filter(|&i| !gone(i)).map(|i| ChunkSums::of(i as u64, &both.g[i])).collect();
                let norm = GradientNorm::gather(&sums).unwrap();
                control = StepControl::default().clipped(clip.coefficient(norm, 1.0).unwrap());
            }
            if step == 8 {
                assert!(host.reset(1, ResetMoments::Second) && device.reset(1, ResetMoments::Second).unwrap());
            }
            let mut list: Vec<_> =
                both.host(step).into_iter().enumerate().filter(|(i, _)| !gone(*i)).map(|(_, p)| p).collect();
            let _ = host.step_controlled(&control, &mut list).unwrap();
            let gradients: Vec<_> =
                (0..3).filter(|&i| !gone(i)).map(|i| DeviceGradients::of(i as u64, &both.device_g[i])).collect();
            let mut norm = DeviceNorm::new(&gpu).unwrap();
            norm.enqueue(&clip, 1.0, &gradients).unwrap();
            let list = both.device_p.iter_mut().zip(&both.device_g).zip(0..3u64);
            let mut list: Vec<_> = list
                .filter(|(_, id)| !gone(*id as usize))
                .map(|((p, g), id)| DeviceParameter::numbered(id, p, g))
                .collect();
            if step == 11 {
                device.set_control(&StepControl::default()).unwrap();
                device.step_clipped(&norm, NonFinite::Skip, &mut list).unwrap();
            } else {
                device.step_controlled(&control, &mut list).unwrap();
            }
            both.same(&gpu, &format!("{states}, step {step}"));
            assert_eq!(device.steps().unwrap(), host.steps());
            assert!((0..3).all(|id| device.age(id).unwrap() == host.age(id)), "step {step}");
        }
        let back = device.to_host().unwrap();
        assert!((0..3).all(|id| same_states(&back, &host, id)), "{states}");
    }
}

/// What gradients may be like: as always, of many magnitudes among zeros of both signs, too small and too large for roots and quotients
/// by seeds, nothing.
const FAMILIES: [fn(f32, usize) -> f32; 5] = [
    |x, _| x,
    |x, i| if i.is_multiple_of(7) { x * 0.1f32.powi((i / 7 % 6) as i32) } else { x.signum() * 0.0 },
    |x, i| if (i / 700).is_multiple_of(2) { x } else { x * 1e-35 },
    |x, i| if (i / 700).is_multiple_of(2) { x } else { x * 1e14 },
    |_, _| 0.0,
];

/// Moments in blocks with every built-in type and rounding, several tiles to a warp, on devices whose seeds do and on others.
#[test]
fn blocks_with_seeds_and_without() {
    fn of<T: Value>(gpu: &Gpu, states: States, rounding: Rounding) {
        let config = AdamWConfig { lr: 0.1, weight_decay: 0.1, ..AdamWConfig::default() };
        // On a GPU, too, more tiles than warps, of which some go on from one tensor to the next.
        let real = std::env::var_os("HALFULP_REQUIRE_GPU").is_some();
        let lengths: &[usize] = if real { &[700, 0, 400_000, 300_000] } else { &[700, 0, 9000] };
        for (number, family) in FAMILIES.into_iter().enumerate() {
            let mut both = Both::<T, T>::new(gpu, 0, lengths, 1);
            let mut plain = Both::<T, T>::new(gpu, 0, lengths, 1);
            let mut host = optim::AdamW::new(config, states, rounding).unwrap();
            let mut device = cuda::AdamW::new(gpu, config, states, rounding).unwrap();
            let mut device_without = cuda::AdamW::new(gpu, config, states, rounding).unwrap().without_seeds();
            for step in 4..6 {
                both.changed_gradients(gpu, step, |i, g| family(g, i));
                host.step_tensors(&mut both.host(step)).unwrap();
                device.step_tensors(&mut both.device(step)).unwrap();
                let list = plain.device_p.iter_mut().zip(&both.device_g).zip(0..);
                let mut list: Vec<_> = list.map(|((p, g), id)| DeviceParameter::numbered(id, p, g)).collect();
                device_without.step_tensors(&mut list).unwrap();
                let name = format!("{states}, {rounding:?}, family {number}, step {step}");
                both.same(gpu, &name);
                plain.p.clone_from(&both.p);
                plain.same(gpu, &format!("without seeds: {name}"));
                for device in [&device, &device_without] {
                    let back = device.to_host().unwrap();
                    assert!(both.ids.iter().all(|&id| same_states(&back, &host, id)), "{name}");
                }
            }
        }
    }
    let Some(gpu) = gpu(3) else { return };
    let config = AdamWConfig::default();
    assert!(cuda::AdamW::new(&gpu, config, PAIRS[0], Rounding::Nearest).unwrap().is_seeded());
    let of_blocks = |m: StateFormat, v: StateFormat, n| States { m: m.block(n).unwrap(), v: v.block(n).unwrap() };
    let sets = [
        PAIRS[0],
        PAIRS[1],
        PAIRS[2],
        of_blocks(StateFormat::E4M3, StateFormat::E4M3, 32),
        of_blocks(StateFormat::E4M3, StateFormat::UE4M4, 256),
        of_blocks(StateFormat::E2M1, StateFormat::UE2M2NZ, 64),
    ];
    for (i, states) in sets.into_iter().enumerate() {
        for rounding in [Rounding::Nearest, stochastic(i as u64)] {
            of::<f32>(&gpu, states, rounding);
            of::<bf16>(&gpu, states, rounding);
        }
    }
}

/// BF16 parameters that steps outweigh, so that bounds often part; that are zero, or too small for them; gradients that come and go by
/// many magnitudes, and factors; groups whose betas differ; and what bounds do not cover.
#[test]
fn parameters_between_bounds() {
    let Some(gpu) = gpu(2) else { return };
    let of = |beta1, beta2, lr, eps| AdamWConfig { lr, beta1, beta2, eps, ..AdamWConfig::default() };
    let configs = [of(0.9, 0.999, 0.1, 1e-8), of(0.5, 0.9, 1e-3, 1e-6), of(0.0, 0.5, 1e-2, 1e-11)];
    for (number, states) in PAIRS[..3].iter().copied().enumerate() {
        for (rounding, parameters) in [(stochastic(1), Rounding::Nearest), (Rounding::Nearest, stochastic(2))] {
            let groups = configs.map(|config| ParameterGroup::new(config, states));
            let mut host = optim::Optimizer::with_group(groups[0], rounding).unwrap();
            host = host.parameter_rounding(parameters).unwrap();
            let mut device = cuda::Optimizer::with_group(&gpu, groups[0], rounding).unwrap();
            device = device.parameter_rounding(parameters).unwrap();
            for group in &groups[1..] {
                assert_eq!(host.add_group(*group).unwrap(), device.add_group(*group).unwrap());
            }
            let mut both = Both::<bf16, bf16>::new(&gpu, 10, &[9 * 512, 3 * 512, 512 + 100, 0, 5 * 512, 2 * 512], 3);
            both.change_parameters(&gpu, |tensor, i, p| {
                let scale = [1e-2, 1e-5, 1.0, 1e-20][(i / 700 + tensor) % 4];
                if i.is_multiple_of(97) { 0.0 } else { p * scale }
            });
            let magnitudes = [1.0, 1.0, 1e-3, 1e6, 1.0, 1e-9, 1e-9, 1e-12, 0.0, 1e-3, 1e-3, 1e-25, 1e15, 1.0];
            for (step, magnitude) in (0..).zip(magnitudes) {
                both.changed_gradients(&gpu, step, |i, g| {
                    let wide = if i.is_multiple_of(5) { 0.1f32.powi((i / 5 % 12) as i32) } else { 1.0 };
                    g * magnitude * wide
                });
                let control = match step % 3 {
                    0 => StepControl::default(),
                    1 => StepControl { gradient_scale: 0.25, ..StepControl::default() },
                    _ => StepControl { gradient_scale: 3.0, clip: 0.3, found_inf: false },
                };
                let _ = host.step_controlled(&control, &mut both.host(step)).unwrap();
                device.step_controlled(&control, &mut both.device(step)).unwrap();
                let name = format!("{number}, {rounding:?}, step {step}");
                both.same(&gpu, &name);
                let back = device.to_host().unwrap();
                assert!(both.ids.iter().all(|&id| same_states(&back, &host, id)), "{name}");
            }
        }
    }
}

/// What bounds do not cover, beside what they do: first moments that are no normal numbers, or none in their units, of parameters that feel
/// it; blocks that become small or zero; second moments that are not, from zero; and moments all of which are small.
#[test]
fn bounds_at_their_ends() {
    let Some(gpu) = gpu(4) else { return };
    let fp8 = PAIRS[0];
    // States, beta1, a gradient from step, place and a bell-shaped value, and a parameter.
    type Ends = (States, f64, fn(u64, usize, f32) -> f32, fn(usize, f32) -> f32);
    let ends: [Ends; 7] = [
        (
            States::FP4,
            0.9,
            |_, i, x| if i.is_multiple_of(2) { x } else { x * 2f32.powi(-128) },
            |i, x| if i.is_multiple_of(2) { x } else { 0.0 },
        ),
        (
            States::FP4,
            0.9,
            // Too small for anything but the sign of a zero, once second moments are there.
            |step, i, x| match i % 2 {
                0 => x,
                _ if step < 2 => 0.0,
                _ => 2f32.powi(-133),
            },
            |i, x| if i.is_multiple_of(2) { x } else { 0.0 },
        ),
        (
            PAIRS[1],
            0.0,
            |step, i, x| match i % 4 {
                _ if step < 3 => x * 3e4,
                0 => x * 2f32.powi(-61),
                _ => x * 2f32.powi(-113),
            },
            |i, x| if i.is_multiple_of(2) { x } else { x * 1e-12 },
        ),
        (fp8, 0.0, |step, _, x| if step < 3 { x * 0.5 } else { 0.0 }, |_, x| x),
        (States::FP4, 0.0, |step, _, x| if step < 3 { x * 0.5 } else { 0.0 }, |_, x| x),
        (
            fp8,
            0.9,
            |step, i, x| match i % 5 {
                0 if step < 3 => 0.0,
                0 => x * 1e-22,
                _ => x * 1e-10,
            },
            |_, x| x,
        ),
        (fp8, 0.9, |_, i, x| x * 1e-17 * 0.1f32.powi((i % 7) as i32), |_, x| x),
    ];
    for (number, (states, beta1, gradient, parameter)) in ends.into_iter().enumerate() {
        let config = AdamWConfig { lr: 0.1, beta1, ..AdamWConfig::default() };
        for rounding in [Rounding::Nearest, stochastic(3)] {
            let mut host = optim::AdamW::new(config, states, rounding).unwrap();
            let mut device = cuda::AdamW::new(&gpu, config, states, rounding).unwrap();
            let mut both = Both::<bf16, bf16>::new(&gpu, 10, &[6 * 512, 4 * 512], 1);
            both.change_parameters(&gpu, |_, i, p| parameter(i, p));
            for step in 0..6 {
                both.changed_gradients(&gpu, step, |i, g| gradient(step, i, g));
                host.step_tensors(&mut both.host(step)).unwrap();
                device.step_tensors(&mut both.device(step)).unwrap();
                let name = format!("{number}, {rounding:?}, step {step}");
                both.same(&gpu, &name);
                let back = device.to_host().unwrap();
                assert!(both.ids.iter().all(|&id| same_states(&back, &host, id)), "{name}");
            }
        }
    }
}

/// First moments that lose bits in the units of a block whose others are large, of parameters so small that they feel them: second moments
/// have fallen until a step is 2^40 times what it is made of.
#[test]
fn small_parameters_feel_what_units_lose() {
    let Some(gpu) = gpu(6) else { return };
    let config =
        AdamWConfig { lr: 900.0, beta2: 0.25, eps: 2f64.powi(-30), weight_decay: 0.0, ..AdamWConfig::default() };
    for rounding in [Rounding::Nearest, stochastic(3)] {
        for parameters in [Rounding::Nearest, stochastic(4)] {
            let mut host = optim::AdamW::new(config, States::FP4, rounding).unwrap();
            host = host.parameter_rounding(parameters).unwrap();
            let mut device = cuda::AdamW::new(&gpu, config, States::FP4, rounding).unwrap();
            device = device.parameter_rounding(parameters).unwrap();
            let mut both = Both::<bf16, bf16>::new(&gpu, 10, &[4 * 512], 1);
            both.change_parameters(&gpu, |_, i, p| if i.is_multiple_of(2) { p } else { p * 2f32.powi(-92) });
            for step in 0..34 {
                both.changed_gradients(&gpu, step, |i, g| match (i % 2, step) {
                    (0, 0) => g,
                    (1, 30..) => g * 2f32.powi(-130),
                    _ => 0.0,
                });
                host.step_tensors(&mut both.host(step)).unwrap();
                device.step_tensors(&mut both.device(step)).unwrap();
                let name = format!("{rounding:?}, {parameters:?}, step {step}");
                both.same(&gpu, &name);
                assert!(same_states(&device.to_host().unwrap(), &host, both.ids[0]), "{name}");
            }
        }
    }
}

/// Second moments whose format has no zero, but which all but vanish under a small beta2: too small for roots of what is not placed.
#[test]
fn second_moments_that_fall_fast() {
    let Some(gpu) = gpu(5) else { return };
    let config =
        AdamWConfig { lr: 0.1, beta1: 0.0, beta2: 1e-9, eps: 1e-18, weight_decay: 0.0, ..AdamWConfig::default() };
    let n = 128 * 64;
    for magnitude in [-47, -46, -45] {
        let mut host = optim::AdamW::new(config, States::FP4, Rounding::Nearest).unwrap();
        let mut device = cuda::AdamW::new(&gpu, config, States::FP4, Rounding::Nearest).unwrap();
        let mut p = vec![0.0f32; n];
        let mut device_p = gpu.upload(&p).unwrap();
        for (step, exponent) in [(1, magnitude), (2, -62)] {
            let g: Vec<f32> = values(step, n, false).iter().map(|x| (1.0 + x.abs()) * 2f32.powi(exponent)).collect();
            let device_g = gpu.upload(&g).unwrap();
            host.step_tensors(&mut [Parameter::numbered(1, &mut p, &g)]).unwrap();
            device.step_tensors(&mut [DeviceParameter::numbered(1, &mut device_p, &device_g)]).unwrap();
            let got = gpu.download(&device_p).unwrap();
            let wrong = p.iter().zip(&got).filter(|(p, got)| p.to_bits() != got.to_bits()).count();
            assert_eq!(wrong, 0, "of {n}, 2^{magnitude}, step {step}");
        }
        assert!(same_states(&device.to_host().unwrap(), &host, 1), "2^{magnitude}");
    }
}

/// A thousand tensors, at odd offsets, by one plan; the plan made anew after a change of what it was made of.
#[test]
fn plans_of_many() {
    let Some(gpu) = gpu(2) else { return };
    let config = AdamWConfig { lr: 0.1, ..AdamWConfig::default() };
    let mut host = optim::AdamW::new(config, StateFormat::Bf16, stochastic(1)).unwrap();
    let mut device = cuda::AdamW::new(&gpu, config, StateFormat::Bf16, stochastic(1)).unwrap();
    let lengths: Vec<usize> = (0..1000).map(|i| [0, 1, 3, 17, 40, 600][i * 7 % 6]).collect();
    let total: usize = lengths.iter().sum();
    let (mut p, g) = (values(1, total, false), values(2, total, false));
    let padded = |x: &[f32]| [&[7.0], x].concat();
    let (device_p, device_g) = (gpu.upload(&padded(&p)).unwrap(), gpu.upload(&padded(&g)).unwrap());
    let (at_p, at_g) = (device_p.address() + 4, device_g.address() + 4);
    let mut start = 0;
    let memory: Vec<StepMemory> = lengths
        .iter()
        .zip(0..)
        .map(|(&n, id)| {
            let at = 4 * start as u64;
            start += n;
            let of = ElementType::F32;
            StepMemory {
                id,
                params: at_p + at,
                params_type: of,
                grads: at_g + at,
                grads_type: of,
                n: n as u64,
                group: 0,
                part: None,
            }
        })
        .collect();
    let mut plan = device.plan_raw(&memory).unwrap();
    for step in 0..3 {
        let (mut rest_p, mut rest_g, mut list) = (&mut p[..], &g[..], Vec::new());
        for (&n, id) in lengths.iter().zip(0..) {
            let (head, tail) = rest_p.split_at_mut(n);
            rest_p = tail;
            list.push(Parameter::numbered(id, head, &rest_g[..n]));
            rest_g = &rest_g[n..];
        }
        host.step_tensors(&mut list).unwrap();
        // SAFETY: memory of this device, as long as it says.
        unsafe { device.step_plan(&mut plan) }.unwrap();
        assert!(bits(&gpu.download(&device_p).unwrap()) == bits(&padded(&p)), "step {step}");
        if step == 1 {
            device.add_group(ParameterGroup::new(config, StateFormat::Bf16)).unwrap();
        }
    }
    assert_eq!(device.age(999).unwrap(), 3);
}

/// Steps of several lists in any order, so that keys made ahead are for the step that comes, or for another one; some change in between
/// what the host knows, or how long a list waits.
#[test]
fn keys_are_made_ahead() {
    fn of<T: Value>(gpu: &Gpu, states: States) {
        let config = AdamWConfig { lr: 0.1, weight_decay: 0.1, ..AdamWConfig::default() };
        let mut host = optim::AdamW::new(config, states, stochastic(9)).unwrap();
        let mut device = cuda::AdamW::new(gpu, config, states, stochastic(9)).unwrap();
        host = host.parameter_rounding(stochastic(5)).unwrap();
        device = device.parameter_rounding(stochastic(5)).unwrap();
        let lengths: [&[usize]; 3] = [&[300, 0, 1500, 40, 2049], &[128, 4000], &[5]];
        let mut lists: Vec<_> = (0..3).map(|l| Both::<T, T>::new(gpu, 100 * l, lengths[l as usize], 1)).collect();
        let memory = |list: &Both<T, T>| -> Vec<StepMemory> {
            let all = list.ids.iter().zip(&list.device_p).zip(&list.device_g);
            all.map(|((&id, p), g)| StepMemory {
                id,
                params: p.address(),
                params_type: T::TYPE,
                grads: g.address(),
                grads_type: T::TYPE,
                n: p.len() as u64,
                group: 0,
                part: None,
            })
            .collect()
        };
        let mut plans: Vec<_> = lists.iter().map(|list| device.plan_raw(&memory(list)).unwrap()).collect();
        // Every step, every other one, irregular, and at last in a fixed turn.
        for (step, l) in [0usize, 0, 0, 1, 0, 1, 0, 1, 2, 1, 0, 0, 2, 1, 0, 2, 1, 0, 2, 1, 0].into_iter().enumerate() {
            // No tensor goes without a gradient.
            let step = 4 + step as u64;
            lists[l].gradients(gpu, step, false);
            if step == 8 {
                assert!(host.reset(100, ResetMoments::All));
                assert!(device.reset(100, ResetMoments::All).unwrap());
            }
            if step == 12 {
                let new = AdamWConfig { lr: 0.01, beta1: 0.8, ..config };
                host.set_config(new).unwrap();
                device.set_config(new).unwrap();
            }
            host.step_tensors(&mut lists[l].host(step)).unwrap();
            // SAFETY: memory of this device, as long as it says.
            unsafe { device.step_plan(&mut plans[l]) }.unwrap();
            lists[l].same(gpu, &format!("{states}, step {step}"));
            if step == 19 {
                // On from a checkpoint, which knows of no keys.
                device = cuda::AdamW::from_host(gpu, &device.to_host().unwrap()).unwrap();
            }
        }
        let back = device.to_host().unwrap();
        assert!(lists.iter().flat_map(|list| &list.ids).all(|&id| same_states(&back, &host, id)), "{states}");
    }
    let Some(gpu) = gpu(4) else { return };
    of::<f32>(&gpu, StateFormat::Bf16.into());
    of::<bf16>(&gpu, States::FP4);
    of::<f32>(&gpu, States { m: StateFormat::Bf16, v: StateFormat::UE4M4 });
}

/// Shards step as the whole.
#[test]
fn shards_are_the_whole() {
    let Some(gpu) = gpu(6) else { return };
    let n = 3 * 4096 + 77;
    for states in [StateFormat::F32.into(), StateFormat::Bf16.into(), PAIRS[0], States::FP4] {
        let config = AdamWConfig { lr: 0.1, ..AdamWConfig::default() };
        let mut whole = optim::AdamW::new(config, states, stochastic(1)).unwrap();
        let (mut p, g) = (values(1, n, false), values(2, n, false));
        let cuts = [0, 4096, 3 * 4096, n];
        let mut ranks: Vec<_> = cuts
            .windows(2)
            .map(|cut| {
                let rank = cuda::AdamW::new(&gpu, config, states, stochastic(1)).unwrap();
                (rank, cut[0], gpu.upload(&p[cut[0]..cut[1]]).unwrap(), gpu.upload(&g[cut[0]..cut[1]]).unwrap())
            })
            .collect();
        for _ in 0..2 {
            whole.step_tensors(&mut [Parameter::numbered(5, &mut p, &g)]).unwrap();
            for (rank, first, p, g) in &mut ranks {
                rank.step_tensors(&mut [DeviceParameter::numbered(5, p, g).part(*first as u64, n as u64)]).unwrap();
            }
        }
        let gathered: Vec<f32> = ranks.iter().flat_map(|(_, _, p, _)| gpu.download(p).unwrap()).collect();
        assert!(bits(&gathered) == bits(&p), "{states}");
    }
}

/// A control of one step is of that step alone; what the host leaves out makes no states.
#[test]
fn control_of_one_step() {
    let Some(gpu) = gpu(FORWARD) else { return };
    let config = AdamWConfig { lr: 0.1, ..AdamWConfig::default() };
    let mut host = optim::AdamW::new(config, StateFormat::Bf16, stochastic(1)).unwrap();
    let mut device = cuda::AdamW::new(&gpu, config, StateFormat::Bf16, stochastic(1)).unwrap();
    let mut both = Both::<f32, f32>::new(&gpu, 0, &[600, 40], 1);
    let left_out = StepControl { found_inf: true, ..StepControl::default() };
    let scaled = StepControl { gradient_scale: 0.5, ..StepControl::default() };
    for (step, control) in [(4, left_out), (5, scaled), (6, StepControl::default()), (7, left_out), (8, scaled)] {
        both.gradients(&gpu, step, false);
        let _ = host.step_controlled(&control, &mut both.host(step)).unwrap();
        device.step_controlled(&control, &mut both.device(step)).unwrap();
        assert_eq!(device.tensors().count(), host.tensors().count(), "step {step}");
        both.gradients(&gpu, 100 + step, false);
        host.step_tensors(&mut both.host(step)).unwrap();
        device.step_tensors(&mut both.device(step)).unwrap();
        both.same(&gpu, &format!("step {step}"));
    }
    let progress = device.progress().unwrap();
    assert_eq!((progress.executed, progress.skipped, host.steps()), (8, 2, 8));
    assert_eq!((device.age(1).unwrap(), device.to_host().unwrap().age(1)), (8, 8));

    // A norm that was asked for nothing clips nothing.
    let norm = DeviceNorm::new(&gpu).unwrap();
    both.gradients(&gpu, 9, false);
    host.step_tensors(&mut both.host(9)).unwrap();
    device.step_clipped(&norm, NonFinite::Skip, &mut both.device(9)).unwrap();
    both.same(&gpu, "a norm of nothing");
    let refused = device.step_clipped(&norm, NonFinite::Refuse, &mut both.device(9)).unwrap_err();
    assert!(matches!(refused, CudaError::Unsupported { argument: "non_finite", .. }), "{refused}");
    assert_eq!(device.progress().unwrap(), cuda::StepProgress { executed: 9, skipped: 2 });
}

#[test]
fn refusals_change_nothing() {
    let Some(gpu) = gpu(FORWARD) else { return };
    let bf16_states = StateFormat::Bf16;
    let config = AdamWConfig::default();
    let of = |rounding| cuda::AdamW::new(&gpu, config, bf16_states, rounding);
    let unsupported = of(Rounding::SrStates { seed: 0 }).unwrap_err();
    assert!(matches!(unsupported, CudaError::Unsupported { argument: "rounding", .. }));
    let mix = AdEMAMixConfig { alpha_steps: (1 << 53) + 1, ..AdEMAMixConfig::default() };
    let unsupported = cuda::AdEMAMix::new(&gpu, mix, bf16_states, stochastic(1)).unwrap_err();
    assert!(matches!(unsupported, CudaError::Unsupported { argument: "config", .. }));

    let mut opt = of(stochastic(1)).unwrap();
    let (mut p, g) = (gpu.upload(&[1.0f32; 8]).unwrap(), gpu.upload(&[1.0f32; 8]).unwrap());
    let short = gpu.upload(&[1.0f32; 7]).unwrap();
    let wrong = opt.step(&mut p, &short).unwrap_err();
    assert!(matches!(wrong, CudaError::Optim(OptimError::Length { argument: "grads", .. })), "{wrong}");
    let wrong = opt.step_tensors(&mut [DeviceParameter::numbered(1, &mut p, &g).group(1)]).unwrap_err();
    assert!(matches!(wrong, CudaError::Optim(OptimError::Group { expected: 1, got: 1, .. })), "{wrong}");
    let wrong = opt.set_config(AdamWConfig { lr: -1.0, ..config }).unwrap_err();
    assert!(matches!(wrong, CudaError::Optim(OptimError::Config { argument: "lr", .. })), "{wrong}");
    let wrong = opt.set_control(&StepControl { clip: 2.0, ..StepControl::default() }).unwrap_err();
    assert!(matches!(wrong, CudaError::Optim(OptimError::Config { argument: "clip", .. })), "{wrong}");
    assert_eq!((gpu.download(&p).unwrap(), opt.steps().unwrap(), opt.tensors().count()), (vec![1.0; 8], 0, 0));
    let group = ParameterGroup::new(config, bf16_states).remainder();
    let mut opt = cuda::AdamW::with_group(&gpu, group, stochastic(1)).unwrap();
    let wrong = opt.step(&mut p, &g).unwrap_err();
    assert!(matches!(wrong, CudaError::Optim(OptimError::Unsupported { argument: "remainder", .. })), "{wrong}");

    let mut lamb = cuda::Lamb::new(&gpu, LambConfig::default(), bf16_states, stochastic(1)).unwrap();
    let (mut p, g) = (gpu.upload(&[1.0f32; 4096]).unwrap(), gpu.upload(&[1.0f32; 4096]).unwrap());
    let wrong = lamb.step_tensors(&mut [DeviceParameter::numbered(1, &mut p, &g).part(0, 9000)]).unwrap_err();
    assert!(matches!(wrong, CudaError::Optim(OptimError::Norm(_))), "{wrong}");
}

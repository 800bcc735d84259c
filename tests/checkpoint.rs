//! Checkpoints: resumed as straight through, whole at any moment, refused where they are not what they should be.
#![cfg(feature = "checkpoint")]

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use common::{Inputs, gradient};
use halfulp::bf16;
use halfulp::format::Scales;
use halfulp::optim::checkpoint::{CheckpointError, load, restore, save};
use halfulp::optim::{
    AdamW, AdamWConfig, Moment, OptimError, Parameter, ParameterGroup, ResetMoments, ResetSchedule, ResetScope, Resets,
    Rounding, StateFormat, States, Stepped,
};
use halfulp::random::tensor_id;
use halfulp::stall::{Comparison, StallCounts};
use proptest::prelude::*;
use safetensors::SafeTensors;
use serde_json::{Value, json};

/// A training of three tensors, two known by name and one by number; one is empty, one has no gradient in odd steps.
#[derive(Clone)]
struct Training {
    opt: AdamW,
    resets: Resets,
    a: Vec<f32>,
    b: Vec<f32>,
    none: Vec<f32>,
}

fn stalled(old: Option<Moment>, opt: &AdamW, id: u64) -> StallCounts {
    let (Some(old), Some((_, new))) = (old, opt.moments(id)) else { return StallCounts::default() };
    Comparison::new(&old, new).count().unwrap()
}

/// A moment's bits: values or codes, and scales.
fn stored(moment: &Moment) -> (Vec<u8>, Vec<u8>) {
    let bytes = |x: &[f32]| bytemuck::cast_slice(x).to_vec();
    match moment {
        Moment::Blocks(x) => match x.scales() {
            Scales::E8M0(scales) => (x.codes().to_vec(), scales.clone()),
            Scales::F32(scales) => (x.codes().to_vec(), bytes(scales)),
            other => panic!("{other:?}"),
        },
        unscaled => (bytes(&unscaled.to_f32()), vec![]),
    }
}

impl Training {
    fn new([states, others]: [States; 2], rounding: Rounding, resets: Resets) -> Self {
        let config = AdamWConfig { lr: 0.0123, eps: 1e-7, ..AdamWConfig::default() };
        let mut opt = AdamW::new(config, states, rounding).unwrap();
        let other = AdamWConfig { lr: 0.5, weight_decay: 0.0, ..config };
        opt.add_group(ParameterGroup::new(other, others)).unwrap();
        Self { opt, resets, a: vec![1.0; 5000], b: vec![-0.5; 77], none: vec![] }
    }

    fn step(&mut self) {
        let step = self.opt.steps();
        let mut inputs = Inputs(step);
        let mut grads = |n: usize| -> Vec<f32> {
            (0..n)
                .map(|_| gradient(&mut inputs))
                .map(|g| if g.is_finite() && g.abs() < 1e10 { g } else { 1.0 })
                .collect()
        };
        let (ga, gb) = (grads(self.a.len()), grads(self.b.len()));
        // A schedule of the learning rate.
        self.opt.set_configs(|group, config| config.lr = 0.01 / (1.0 + step as f64 + group as f64)).unwrap();
        let mut list =
            vec![Parameter::named("layers.0.\"a\"", &mut self.a, &ga), Parameter::named("none", &mut self.none, &[])];
        let mut ids = vec![tensor_id("layers.0.\"a\""), tensor_id("none")];
        if step.is_multiple_of(2) {
            list.push(Parameter::numbered(5, &mut self.b, &gb).group(1).part(4096, 4173));
            ids.push(5);
        }
        let old: Vec<Option<Moment>> = ids.iter().map(|&id| self.opt.moments(id).map(|(_, v)| v.clone())).collect();
        self.opt.step_tensors(&mut list).unwrap();
        let stepped: Vec<Stepped> = ids
            .into_iter()
            .zip(old)
            .map(|(tensor, old)| Stepped { tensor, stalled: Some(stalled(old, &self.opt, tensor)) })
            .collect();
        self.resets.after_step(&mut self.opt, &stepped).unwrap();
    }

    /// Everything that a later step depends on.
    fn bits(&self) -> (Vec<u32>, Vec<u32>, String) {
        let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect();
        let states: Vec<_> = self
            .opt
            .tensors()
            .map(|id| (id, self.opt.age(id), self.opt.moments(id).map(|(m, v)| (stored(m), stored(v)))))
            .collect();
        (bits(&self.a), bits(&self.b), format!("{} {:?} {states:?}", self.opt.steps(), self.resets.progress()))
    }
}

fn resets(schedule: ResetSchedule, moments: ResetMoments, scope: ResetScope) -> Resets {
    Resets::new(schedule, moments, scope).unwrap()
}

fn schedules() -> [Resets; 5] {
    [
        resets(ResetSchedule::Off, ResetMoments::All, ResetScope::Tensor),
        resets(ResetSchedule::Every { steps: 3 }, ResetMoments::All, ResetScope::Tensor),
        resets(ResetSchedule::Every { steps: 4 }, ResetMoments::Second, ResetScope::All),
        resets(ResetSchedule::Adaptive { beta2: 0.7, threshold: 0.001 }, ResetMoments::Second, ResetScope::Tensor),
        resets(ResetSchedule::model(halfulp::Format::E4M3, 0.97), ResetMoments::All, ResetScope::All),
    ]
}

const NEAREST: Rounding = Rounding::Nearest;

/// States of tensors with an even and with an odd number of elements, and their rounding.
fn trainings() -> Vec<([States; 2], Rounding)> {
    use StateFormat as S;
    let both = |format: StateFormat| [format.into(), S::F32.into()];
    let mixed = |m, v, other_m, other_v| [States { m, v }, States { m: other_m, v: other_v }];
    let block = |format: StateFormat, elements| format.block(elements).unwrap();
    vec![
        (both(S::F32), NEAREST),
        (both(S::Bf16), NEAREST),
        (both(S::Bf16), Rounding::Stochastic { seed: u64::MAX }),
        (both(S::Bf16), Rounding::Stochastic { seed: 1 << 53 | 1 }),
        (both(S::Bf16), Rounding::SrStates { seed: 7 }),
        (mixed(S::E4M3, S::UE4M4, S::E5M2, S::UE5M3), Rounding::stochastic(3)),
        (mixed(S::E5M2, S::E5M2, S::E4M3, S::E4M3), NEAREST),
        ([States::FP4; 2], Rounding::stochastic(3)),
        (mixed(S::Bf16, S::UE2M2NZ, S::E2M1, S::F32), Rounding::stochastic(3)),
        (mixed(block(S::E4M3, 32), block(S::UE2M2NZ, 64), S::Bf16, block(S::UE4M4, 256)), Rounding::stochastic(3)),
        (mixed(S::E2M1.amax(), S::E5M2.amax(), block(S::E5M2, 32).amax(), S::UE2M2NZ.amax()), Rounding::stochastic(3)),
    ]
}

/// Stopped at any step, also before the first, and resumed: the bits of straight through.
#[test]
fn resumed_is_straight_through() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("opt.safetensors");
    for (states, rounding) in trainings() {
        for resets in schedules() {
            let mut through = Training::new(states, rounding, resets);
            for stop in 0..12 {
                save(&path, &through.opt, Some(&through.resets)).unwrap();
                let loaded = load::<AdamWConfig>(&path).unwrap();
                let mut resumed = Training { opt: loaded.optimizer, resets: loaded.resets.unwrap(), ..through.clone() };
                assert!(through.bits() == resumed.bits(), "{states:?} {rounding:?} {stop}");
                assert_eq!(through.opt.groups(), resumed.opt.groups());
                let mut copy = through.clone();
                for _ in 0..4 {
                    copy.step();
                    resumed.step();
                }
                assert!(copy.bits() == resumed.bits(), "{states:?} {rounding:?} {stop} {:?}", copy.resets);
                through.step();
            }
        }
    }
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1, "nothing is left beside the file");
}

/// One step of 300 elements of `even` and 301 of `odd`.
fn blocks(states: impl Into<States>) -> AdamW {
    let mut opt = AdamW::new(AdamWConfig::default(), states, Rounding::stochastic(42)).unwrap();
    let g: Vec<f32> = (0..301).map(|i| (i as f32 * 0.37).sin()).collect();
    let (mut even, mut odd) = (vec![1f32; 300], vec![1f32; 301]);
    let list = &mut [Parameter::named("even", &mut even, &g[..300]), Parameter::named("odd", &mut odd, &g)];
    opt.step_tensors(list).unwrap();
    opt
}

/// Moments in blocks: the dtypes that safetensors has for them, else packed bytes; scales beside.
#[test]
fn version_1_of_blocks() {
    use StateFormat as S;
    use safetensors::Dtype::{self, F4, F8_E4M3, F8_E5M2, F8_E8M0, F32, U8};
    let found = |states: States| {
        let opt = blocks(states);
        let bytes = saved(&opt, None);
        let file = SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(file.len(), 8);
        let array = |name: &str, expected: &[u8]| {
            let tensor = file.tensor(name).unwrap();
            assert_eq!(tensor.data(), expected, "{name}");
            (tensor.dtype(), tensor.shape()[0])
        };
        ["even", "odd"].map(|name| {
            let (m, v) = opt.moments(tensor_id(name)).unwrap();
            [("m", m), ("v", v)].map(|(which, moment)| {
                let (codes, scales) = stored(moment);
                let name = format!("{name}::{which}");
                [array(&name, &codes), array(&format!("{name}.scale"), &scales)]
            })
        })
    };
    let array = |even: (Dtype, usize), odd: (Dtype, usize), scales: (Dtype, usize)| [[even, scales], [odd, scales]];
    let one = |dtype| array((dtype, 300), (dtype, 301), (F8_E8M0, 3));
    let expect = |m: [[(Dtype, usize); 2]; 2], v: [[(Dtype, usize); 2]; 2]| [[m[0], v[0]], [m[1], v[1]]];
    assert_eq!(found(States { m: S::E4M3, v: S::E5M2 }), expect(one(F8_E4M3), one(F8_E5M2)));
    assert_eq!(found(States { m: S::E5M2, v: S::UE4M4 }), expect(one(F8_E5M2), one(U8)));
    let packed = array((U8, 150), (U8, 151), (F8_E8M0, 3));
    assert_eq!(found(States::FP4), expect(array((F4, 300), (U8, 151), (F8_E8M0, 3)), packed));
    let fine = array((U8, 300), (U8, 301), (F32, 10));
    let v = S::UE5M3.amax().block(32).unwrap();
    assert_eq!(found(States { m: S::E4M3, v }), expect(one(F8_E4M3), fine));

    let (header, _) = parts(&saved(&blocks(States { m: S::E4M3, v }), None));
    let json = |key: &str| -> Value { serde_json::from_str(header["__metadata__"][key].as_str().unwrap()).unwrap() };
    let m = json!({ "block": "128", "element": "E4M3", "scale": "ceil" });
    let v = json!({ "block": "32", "element": "UE5M3", "scale": "amax" });
    for described in [&json("groups")[0], &json("tensor.even"), &json("tensor.odd")] {
        assert_eq!((&described["m"], &described["v"]), (&m, &v));
    }
}

#[test]
fn blocks_refused() {
    let directory = tempfile::tempdir().unwrap();
    let live = blocks(States { m: StateFormat::E4M3, v: StateFormat::UE4M4 });
    let whole = saved(&live, None);
    let (header, data) = parts(&whole);
    assert!(try_restore(directory.path(), &whole, live.clone()).is_ok());
    let with = |change: &dyn Fn(&mut Value)| {
        let mut header = header.clone();
        change(&mut header);
        try_restore(directory.path(), &file(&header, &data), live.clone()).unwrap_err()
    };
    // A field of the description of a moment of `even`.
    let field = |which: &str, name: &str, value: Value| {
        with(&|h| {
            let mut described: Value =
                serde_json::from_str(h["__metadata__"]["tensor.even"].as_str().unwrap()).unwrap();
            described[which][name] = value.clone();
            h["__metadata__"]["tensor.even"] = json!(described.to_string());
        })
    };
    for which in ["m", "v"] {
        for name in ["element", "block", "scale"] {
            for value in [json!(null), json!(5), json!("x"), json!("Floor"), json!(["1"]), json!("4294967424")] {
                let error = field(which, name, value.clone());
                let key = format!("tensor.even: {which}: {name}");
                assert!(matches!(&error, CheckpointError::Metadata { key: k, .. } if *k == key), "{value}: {error}");
            }
        }
        for element in ["F32", "BF16", "e4m3", "E3M2", "FP16"] {
            assert!(matches!(field(which, "element", json!(element)), CheckpointError::Metadata { .. }), "{element}");
        }
        for block in ["0", "16", "48", "512"] {
            assert!(matches!(field(which, "block", json!(block)), CheckpointError::Metadata { .. }), "{block}");
        }
        let name = format!("even::{which}.scale");
        let error = field(which, "block", json!("64"));
        assert!(
            matches!(&error, CheckpointError::Shape { name: n, expected, got } if *n == name && expected == &[5] && got == &[3]),
            "{error}"
        );
        let error = field(which, "scale", json!("amax"));
        assert!(matches!(&error, CheckpointError::Dtype { name: n, .. } if *n == name), "{error}");
        // Of its group alone.
        let error = with(&|h| {
            let groups = h["__metadata__"]["groups"].as_str().unwrap().replace("128", "256");
            h["__metadata__"]["groups"] = json!(groups);
        });
        assert!(matches!(&error, CheckpointError::Metadata { key, .. } if key == "tensor.even: group"), "{error}");

        // No scales; those of something else; scales of another dtype.
        let error = with(&|h| {
            let scales = h.as_object_mut().unwrap().remove(&name).unwrap();
            h["other"] = scales;
        });
        assert!(matches!(&error, CheckpointError::MissingTensor { name: n } if *n == name), "{error}");
        let error = with(&|h| h[&name]["dtype"] = json!("U8"));
        assert!(matches!(&error, CheckpointError::Dtype { name: n, .. } if *n == name), "{error}");
        let error = with(&|h| h[&name]["shape"] = json!([1, 3]));
        assert!(matches!(&error, CheckpointError::Shape { name: n, .. } if *n == name), "{error}");
        let error = with(&|h| h[&name]["shape"] = json!([2]));
        assert!(matches!(error, CheckpointError::NotSafetensors { .. }), "{error}");
    }
    let error = field("m", "element", json!("E5M2"));
    assert!(matches!(&error, CheckpointError::Dtype { name, .. } if name == "even::m"), "{error}");
    // Codes of 8 bits all the same, but not those of the group.
    let error = field("v", "element", json!("UE5M3"));
    assert!(matches!(&error, CheckpointError::Metadata { key, .. } if key == "tensor.even: group"), "{error}");
    // A first moment without signs.
    let error = with(&|h| {
        let groups = h["__metadata__"]["groups"].as_str().unwrap().replace("E4M3", "UE4M4");
        h["__metadata__"]["groups"] = json!(groups);
    });
    assert!(matches!(error, CheckpointError::Optim(OptimError::State { argument: "m", .. })), "{error}");
    let error = with(&|h| h["__metadata__"]["rounding"] = json!("sr-states"));
    assert!(matches!(error, CheckpointError::Optim(OptimError::Unsupported { argument: "rounding", .. })), "{error}");
    let other = blocks(States { m: StateFormat::E4M3, v: StateFormat::UE4M4.block(32).unwrap() });
    let error = try_restore(directory.path(), &whole, other).unwrap_err();
    assert_eq!(
        error.to_string(),
        "states of tensor `odd`: expected E4M3 and UE4M4 in blocks of 32 (Ceil scales), as in the optimizer, got E4M3 and UE4M4"
    );
}

fn small() -> AdamW {
    let config = AdamWConfig { lr: 0.1, weight_decay: 0.25, ..AdamWConfig::default() };
    let mut opt = AdamW::new(config, StateFormat::Bf16, Rounding::stochastic(42)).unwrap();
    let (mut w, mut b) = ([bf16::ONE; 3], [bf16::ONE; 2]);
    for _ in 0..2 {
        opt.step_tensors(&mut [Parameter::named("w", &mut w, &[1.0f32; 3])]).unwrap();
    }
    opt.step_tensors(&mut [Parameter::numbered(9, &mut b, &[1.0f32; 2])]).unwrap();
    opt
}

fn saved(opt: &AdamW, resets: Option<&Resets>) -> Vec<u8> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("opt");
    save(&path, opt, resets).unwrap();
    fs::read(path).unwrap()
}

/// Version 1 is frozen: these are its keys and values.
#[test]
fn version_1() {
    let resets = resets(ResetSchedule::Every { steps: 7 }, ResetMoments::All, ResetScope::Tensor);
    let bytes = saved(&small(), Some(&resets));
    assert_eq!(bytes, saved(&small(), Some(&resets)), "one state, one file");
    let (start, header) = SafeTensors::read_metadata(&bytes).unwrap();
    assert_eq!(start % 8, 0);
    let metadata: BTreeMap<_, _> = header.metadata().clone().unwrap().into_iter().collect();
    let config = r#"{"beta1":"0.9","beta2":"0.999","eps":"0.00000001","lr":"0.1","maximize":false,"skip_zeros":false,"weight_decay":"0.25"}"#;
    let tensor = |id: u64, named, age: u64, n: u64| {
        format!(
            r#"{{"ages":["{age}","{age}"],"first":"0","group":"0","id":"{id}","m":"BF16","named":{named},"remainder":false,"shape":["{n}"],"v":"BF16"}}"#
        )
    };
    let expected = [
        ("arithmetic", "1".into()),
        ("groups", format!(r#"[{{"hyper_parameters":{config},"m":"BF16","remainder":false,"v":"BF16"}}]"#)),
        ("halfulp", "optimizer".into()),
        ("offset", "0".into()),
        ("optimizer", "adamw".into()),
        ("parameter_rounding", "stochastic".into()),
        ("parameter_seed", "42".into()),
        (
            "resets",
            r#"{"moments":"all","progress":[],"schedule":{"kind":"every","steps":"7"},"scope":"tensor"}"#.into(),
        ),
        ("rounding", "stochastic".into()),
        ("seed", "42".into()),
        ("step", "3".into()),
        ("stream", "1".into()),
        ("tensor.#9", tensor(9, false, 1, 2)),
        ("tensor.w", tensor(tensor_id("w"), true, 2, 3)),
        ("version", "1".into()),
    ];
    let expected: BTreeMap<String, String> = expected.into_iter().map(|(key, value)| (key.into(), value)).collect();
    assert_eq!(metadata, expected);
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut names = file.names();
    names.sort_unstable();
    assert_eq!(names, ["#9::m", "#9::v", "w::m", "w::v"]);
    let m = file.tensor("w::m").unwrap();
    assert_eq!((m.dtype(), m.shape()), (safetensors::Dtype::BF16, &[3][..]));
    let opt = small();
    let Some((Moment::Bf16(expected), _)) = opt.moments(tensor_id("w")) else { panic!() };
    assert_eq!(m.data(), bytemuck::cast_slice::<bf16, u8>(expected));
}

/// G10: a checkpoint before the first step is one, and export changes nothing.
#[test]
fn before_the_first_step() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("opt");
    let fresh = AdamW::new(AdamWConfig::default(), StateFormat::Bf16, Rounding::stochastic(1)).unwrap();
    let before = format!("{fresh:?}");
    save(&path, &fresh, None).unwrap();
    assert_eq!(format!("{fresh:?}"), before);
    let loaded = load::<AdamWConfig>(&path).unwrap();
    assert!(loaded.resets.is_none());
    assert_eq!(format!("{:?}", loaded.optimizer), before);
}

#[test]
fn restored() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("opt");
    let saved = small();
    save(&path, &saved, None).unwrap();
    let new = |format| AdamW::new(AdamWConfig::default(), format, Rounding::Nearest).unwrap();
    let refused = |opt: &mut AdamW| {
        let before = format!("{opt:?}");
        let error = restore(&path, opt).unwrap_err();
        assert_eq!(format!("{opt:?}"), before, "{error}");
        error
    };
    let mut opt = new(StateFormat::Bf16);
    opt.step_tensors(&mut [Parameter::named("w", &mut [0f32; 3], &[1f32; 3])]).unwrap();
    assert!(restore(&path, &mut opt).unwrap().is_none());
    assert_eq!(format!("{opt:?}"), format!("{saved:?}"));

    let mut opt = new(StateFormat::Bf16);
    opt.step_tensors(&mut [Parameter::named("other", &mut [0f32; 3], &[1f32; 3])]).unwrap();
    assert!(matches!(refused(&mut opt), CheckpointError::MissingTensor { name } if name == "other"));
    let mut opt = new(StateFormat::Bf16);
    opt.step_tensors(&mut [Parameter::named("w", &mut [0f32; 4], &[1f32; 4])]).unwrap();
    assert!(
        matches!(refused(&mut opt), CheckpointError::Shape { name, expected, got } if name == "w" && expected == [4] && got == [3])
    );
    let mut opt = new(StateFormat::Bf16);
    opt.step_tensors(&mut [Parameter::named("w", &mut [0f32; 3], &[1f32; 3]).part(4096, 4099)]).unwrap();
    assert!(matches!(refused(&mut opt), CheckpointError::Part { expected: 4096, got: 0, .. }));
    // G1: states are not cast on the way.
    let mut opt = new(StateFormat::F32);
    opt.step_tensors(&mut [Parameter::named("w", &mut [0f32; 3], &[1f32; 3])]).unwrap();
    assert!(matches!(refused(&mut opt), CheckpointError::Format { .. }));
}

/// Loads bytes as a file; an optimizer to be restored from it is as before if that fails.
fn try_load(directory: &Path, bytes: &[u8]) -> Result<AdamW, CheckpointError> {
    try_restore(directory, bytes, small())
}

fn try_restore(directory: &Path, bytes: &[u8], mut live: AdamW) -> Result<AdamW, CheckpointError> {
    let path = directory.join("tried");
    fs::write(&path, bytes).unwrap();
    let before = format!("{live:?}");
    let result = restore(&path, &mut live);
    match result {
        Ok(_) => Ok(live),
        Err(error) => {
            assert_eq!(format!("{live:?}"), before);
            assert!(!error.to_string().is_empty());
            Err(error)
        }
    }
}

/// A file of this header, as JSON, and data.
fn file(header: &Value, data: &[u8]) -> Vec<u8> {
    let header = header.to_string().into_bytes();
    [&(header.len() as u64).to_le_bytes()[..], &header, data].concat()
}

fn parts(bytes: &[u8]) -> (Value, Vec<u8>) {
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    (serde_json::from_slice(&bytes[8..8 + length]).unwrap(), bytes[8 + length..].to_vec())
}

#[test]
fn refusals() {
    let directory = tempfile::tempdir().unwrap();
    let whole = saved(&small(), None);
    let (header, data) = parts(&whole);
    assert!(try_load(directory.path(), &whole).is_ok());
    let refused = |header: &Value, data: &[u8]| try_load(directory.path(), &file(header, data)).unwrap_err();
    let with = |change: &dyn Fn(&mut Value)| {
        let mut header = header.clone();
        change(&mut header);
        refused(&header, &data)
    };

    for n in [0, 7, 8, 100, whole.len() - 1] {
        let error = try_load(directory.path(), &whole[..n]).unwrap_err();
        assert!(matches!(error, CheckpointError::FileLength { got, .. } if got == n as u64), "{n}: {error}");
    }
    let longer = [&whole[..], &[0]].concat();
    assert!(matches!(try_load(directory.path(), &longer), Err(CheckpointError::FileLength { .. })));
    assert!(matches!(try_load(directory.path(), &[0xFF; 64]), Err(CheckpointError::NotSafetensors { .. })));
    let text = b"\x10\0\0\0\0\0\0\0not JSON at all ";
    assert!(matches!(try_load(directory.path(), text), Err(CheckpointError::NotSafetensors { .. })));
    assert!(matches!(
        load::<AdamWConfig>(directory.path().join("absent")),
        Err(CheckpointError::Io { action: "open", .. })
    ));

    // A file of something else.
    let model = json!({ "w": { "dtype": "F32", "shape": [1], "data_offsets": [0, 4] } });
    assert!(matches!(refused(&model, &[0; 4]), CheckpointError::OtherFormat { .. }));
    let error = with(&|h| h["__metadata__"]["halfulp"] = json!("cast"));
    assert!(matches!(error, CheckpointError::OtherFormat { got } if got == "`halfulp`: `cast`"));
    for (argument, value) in [("version", "2"), ("stream", "3"), ("arithmetic", "0"), ("optimizer", "lion")] {
        let error = with(&|h| h["__metadata__"][argument] = json!(value));
        assert!(
            matches!(&error, CheckpointError::Unknown { argument: a, got, .. } if *a == argument && got == value),
            "{error}"
        );
        let error = with(&|h| drop(h["__metadata__"].as_object_mut().unwrap().remove(argument)));
        assert!(matches!(error, CheckpointError::Unknown { .. }));
    }
    for key in ["step", "offset", "seed", "parameter_seed", "rounding", "parameter_rounding", "groups"] {
        let error = with(&|h| drop(h["__metadata__"].as_object_mut().unwrap().remove(key)));
        assert!(
            matches!(&error, CheckpointError::Metadata { key: k, got, .. } if k == key && got == "nothing"),
            "{error}"
        );
        for value in ["", "x", "-1", "01", "1.0", "18446744073709551616", "{}", "[]", "null"] {
            let error = with(&|h| h["__metadata__"][key] = json!(value));
            assert!(
                matches!(&error, CheckpointError::Metadata { key: k, .. } if k.starts_with(key)),
                "{key} {value}: {error}"
            );
        }
    }
    let field = |name: &str, field: &str, value: Value| {
        with(&|h| {
            let text = h["__metadata__"][name].as_str().unwrap();
            let mut object: Value = serde_json::from_str(text).unwrap();
            object[field] = value.clone();
            h["__metadata__"][name] = json!(object.to_string());
        })
    };
    for name in ["id", "named", "ages", "first", "shape", "remainder", "m", "v", "group"] {
        for value in [json!(null), json!(5), json!("x"), json!([]), json!(["1", "x"]), json!({})] {
            let error = field("tensor.w", name, value.clone());
            assert!(matches!(error, CheckpointError::Metadata { .. }), "{name} {value}: {error}");
        }
    }
    // Counts that no training has: the next step would overflow them.
    for step in ["9223372036854775808", "18446744073709551615"] {
        let error = with(&|h| h["__metadata__"]["step"] = json!(step));
        assert!(
            matches!(&error, CheckpointError::Metadata { key, got, .. } if key == "step" && got == step),
            "{error}"
        );
    }
    for ages in [json!(["18446744073709551615", "1"]), json!(["1", "5"])] {
        let error = field("tensor.w", "ages", ages.clone());
        assert!(matches!(&error, CheckpointError::Metadata { key, .. } if key == "tensor.w: ages"), "{ages}: {error}");
    }
    assert!(matches!(field("tensor.w", "id", json!("5")), CheckpointError::Metadata { .. }), "not the name's id");
    assert!(matches!(field("tensor.#9", "id", json!("8")), CheckpointError::Metadata { .. }), "not the number");
    assert!(matches!(field("tensor.w", "shape", json!(["4"])), CheckpointError::Shape { .. }));
    assert!(matches!(field("tensor.w", "m", json!("F32")), CheckpointError::Dtype { .. }));
    assert!(matches!(field("tensor.w", "m", json!("E4M3x")), CheckpointError::Metadata { .. }));
    for group in ["1", "18446744073709551615"] {
        assert!(matches!(field("tensor.w", "group", json!(group)), CheckpointError::Metadata { .. }));
    }
    let hyper_parameter = |name: &str, value: Value| {
        with(&|h| {
            let mut groups: Value = serde_json::from_str(h["__metadata__"]["groups"].as_str().unwrap()).unwrap();
            groups[0]["hyper_parameters"][name] = value.clone();
            h["__metadata__"]["groups"] = json!(groups.to_string());
        })
    };
    for name in ["lr", "beta1", "beta2", "eps", "weight_decay", "maximize"] {
        assert!(matches!(hyper_parameter(name, json!(0.5)), CheckpointError::Metadata { .. }), "{name}");
        assert!(matches!(hyper_parameter(name, json!("much")), CheckpointError::Metadata { .. }), "{name}");
    }
    assert!(matches!(hyper_parameter("beta2", json!("1")), CheckpointError::Optim(_)));
    assert!(matches!(hyper_parameter("lr", json!("nan")), CheckpointError::Optim(_)));
    let error = with(&|h| {
        let groups = h["__metadata__"]["groups"].as_str().unwrap().replace("BF16", "F32");
        h["__metadata__"]["groups"] = json!(groups);
    });
    assert!(matches!(error, CheckpointError::Metadata { key, .. } if key == "tensor.#9: group"), "of another format");

    // States without metadata, metadata without states.
    let error = with(&|h| drop(h["__metadata__"].as_object_mut().unwrap().remove("tensor.w")));
    assert!(matches!(error, CheckpointError::UnknownTensor { name } if name == "w::m"));
    let error = with(&|h| {
        let state = h.as_object_mut().unwrap().remove("w::v").unwrap();
        h["x::v"] = state;
    });
    assert!(matches!(error, CheckpointError::MissingTensor { name } if name == "w::v"));
    // Offsets that overlap or leave the file.
    for offsets in [json!([0, 6]), json!([6, 100]), json!([6, 4])] {
        assert!(matches!(
            with(&|h| h["w::v"]["data_offsets"] = offsets.clone()),
            CheckpointError::NotSafetensors { .. }
        ));
    }
}

#[test]
fn reset_schedules_that_are_none() {
    let directory = tempfile::tempdir().unwrap();
    let adaptive = resets(ResetSchedule::adaptive(0.999), ResetMoments::All, ResetScope::Tensor);
    let (header, data) = parts(&saved(&small(), Some(&adaptive)));
    let with = |change: &dyn Fn(&mut Value)| {
        let mut header = header.clone();
        let mut resets: Value = serde_json::from_str(header["__metadata__"]["resets"].as_str().unwrap()).unwrap();
        change(&mut resets);
        header["__metadata__"]["resets"] = json!(resets.to_string());
        try_load(directory.path(), &file(&header, &data))
    };
    assert!(with(&|_| {}).is_ok());
    for (field, value) in [
        ("schedule", json!({ "kind": "sometimes" })),
        ("schedule", json!({ "kind": "every", "steps": 3 })),
        ("schedule", json!({ "kind": "model", "format": "E99", "beta2": "0.9", "threshold": "0.6" })),
        ("schedule", json!(null)),
        ("moments", json!("first")),
        ("scope", json!("some")),
        ("progress", json!({})),
        ("progress", json!([5])),
        ("progress", json!([{ "tensor": "1", "steps": "1" }])),
    ] {
        let error = with(&|resets| resets[field] = value.clone()).unwrap_err();
        assert!(matches!(error, CheckpointError::Metadata { .. }), "{field} {value}: {error}");
    }
    for (field, value) in [
        ("schedule", json!({ "kind": "every", "steps": "0" })),
        ("schedule", json!({ "kind": "adaptive", "beta2": "1", "threshold": "0.6" })),
        ("progress", json!([{ "tensor": null, "steps": "1", "loss": "0" }])),
        ("progress", json!([{ "tensor": "1", "steps": "1", "loss": "2" }])),
    ] {
        let error = with(&|resets| resets[field] = value.clone()).unwrap_err();
        assert!(matches!(error, CheckpointError::Reset(_)), "{field} {value}: {error}");
    }
}

/// What cannot be saved leaves the old file, and nothing beside it.
#[test]
fn saves_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("opt");
    save(&path, &small(), None).unwrap();
    let before = fs::read(&path).unwrap();
    let mut clash = AdamW::new(AdamWConfig::default(), StateFormat::F32, Rounding::Nearest).unwrap();
    let (mut a, mut b) = ([0f32; 2], [0f32; 2]);
    let g = [1f32; 2];
    clash.step_tensors(&mut [Parameter::named("#5", &mut a, &g), Parameter::numbered(5, &mut b, &g)]).unwrap();
    let error = save(&path, &clash, None).unwrap_err();
    assert!(matches!(error, CheckpointError::SameName { name, .. } if name == "#5"));
    let format = halfulp::Format::builder(5, 5).build().unwrap();
    let unnamed = resets(ResetSchedule::model(format, 0.999), ResetMoments::All, ResetScope::All);
    assert!(matches!(
        save(&path, &small(), Some(&unnamed)),
        Err(CheckpointError::Unsupported { argument: "resets", .. })
    ));
    assert!(matches!(save(directory.path(), &small(), None), Err(CheckpointError::Io { .. })), "a directory");
    let nowhere = directory.path().join("absent").join("opt");
    assert!(matches!(save(nowhere, &small(), None), Err(CheckpointError::Io { .. })));
    assert_eq!(fs::read(&path).unwrap(), before);
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever bytes change, a file is refused with an error or read.
    #[test]
    fn bytes_that_changed(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        cut in prop::option::weighted(0.25, any::<prop::sample::Index>()),
    ) {
        let directory = tempfile::tempdir().unwrap();
        let mut bytes = saved(&small(), Some(&schedules()[3]));
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        bytes.truncate(cut.map_or(bytes.len(), |cut| cut.index(bytes.len())));
        let _ = try_load(directory.path(), &bytes);
    }

    /// Metadata of any text under any of their keys, and fields of any JSON.
    #[test]
    fn metadata_that_changed(
        key in any::<prop::sample::Index>(),
        field in any::<prop::sample::Index>(),
        text in "\\PC{0,12}|[0-9]{1,22}|[\\[\\]{}\",:0-9a-z]{0,20}",
        nested in any::<bool>(),
    ) {
        let directory = tempfile::tempdir().unwrap();
        let (mut header, data) = parts(&saved(&small(), Some(&schedules()[1])));
        let metadata = header["__metadata__"].as_object_mut().unwrap();
        let keys: Vec<String> = metadata.keys().cloned().collect();
        let value = &mut metadata[&keys[key.index(keys.len())]];
        let inner = serde_json::from_str::<Value>(value.as_str().unwrap()).ok();
        *value = match inner.filter(|inner| nested && inner.is_object()) {
            None => json!(text),
            Some(mut inner) => {
                let fields: Vec<String> = inner.as_object().unwrap().keys().cloned().collect();
                inner[&fields[field.index(fields.len())]] = serde_json::from_str(&text).unwrap_or(json!(text));
                json!(inner.to_string())
            }
        };
        let _ = try_load(directory.path(), &file(&header, &data));
    }

    /// Hyper-parameters, seeds and ids come back as they were, to the last bit.
    #[test]
    fn numbers_come_back(
        lr in 0.0..1e30f64, beta1 in 0.0..1.0f64, beta2 in 0.0..1.0f64, eps in 1e-30..1.0f64,
        seed: u64, id: u64, maximize: bool,
    ) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("opt");
        let weight_decay = 0.1 * beta1;
        let config = AdamWConfig { lr, beta1, beta2, eps, weight_decay, maximize, ..AdamWConfig::default() };
        let opt = AdamW::new(config, StateFormat::Bf16, Rounding::stochastic(seed)).unwrap();
        let mut opt = opt.parameter_rounding(Rounding::stochastic(!seed)).unwrap();
        opt.step_tensors(&mut [Parameter::numbered(id, &mut [0f32; 3], &[1f32; 3])]).unwrap();
        save(&path, &opt, None).unwrap();
        prop_assert_eq!(format!("{:?}", load::<AdamWConfig>(&path).unwrap().optimizer), format!("{opt:?}"));
    }
}

const CHILD: &str = "HALFULP_CHECKPOINT_CHILD";
const ELEMENTS: usize = 1 << 20;

fn one_step(opt: &mut AdamW, n: usize) {
    opt.step(&mut vec![0f32; n], &vec![1f32; n]).unwrap();
}

fn uniform() -> AdamW {
    AdamW::new(AdamWConfig::default(), StateFormat::F32, Rounding::Nearest).unwrap()
}

/// The process that is killed below: goes on from the file, step by step, and saves after each.
#[test]
fn a_child_that_saves() {
    let Some(path) = std::env::var_os(CHILD) else { return };
    let mut opt = load(&path).unwrap().optimizer;
    println!("ready");
    loop {
        one_step(&mut opt, ELEMENTS);
        save(&path, &opt, None).unwrap();
    }
}

/// And one that writes the file in place, as it must not be done.
#[test]
fn a_child_that_overwrites() {
    let Some(path) = std::env::var_os(CHILD) else { return };
    let bytes = fs::read(&path).unwrap();
    println!("ready");
    loop {
        fs::write(&path, &bytes).unwrap();
    }
}

/// Starts a child on `path` and kills it so many microseconds after it has begun.
fn kill(child: &str, path: &Path, after: u64) {
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", child, "--nocapture"]).env(CHILD, path).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().ends_with("ready")));
    std::thread::sleep(std::time::Duration::from_micros(after));
    child.kill().unwrap();
    child.wait().unwrap();
}

fn unfinished(directory: &Path) -> Vec<PathBuf> {
    let paths = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    paths.filter(|path| path.extension().is_some_and(|extension| extension == "part")).collect()
}

/// Killed at 100 random moments, a process leaves the old file or the new one, whole, and the next goes on from there.
#[test]
fn killed_at_any_moment() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("opt.safetensors");
    let mut opt = uniform();
    one_step(&mut opt, ELEMENTS);
    let begun = std::time::Instant::now();
    save(&path, &opt, None).unwrap();
    let length = begun.elapsed().as_micros() as u64;
    let mut inputs = Inputs(1);
    let (mut steps, mut caught) = (1, 0);
    // What every element is after so many steps.
    let mut element = uniform();
    one_step(&mut element, 1);
    for _ in 0..100 {
        kill("a_child_that_saves", &path, inputs.next() % (3 * length + 2000));
        let left = unfinished(directory.path());
        caught += usize::from(!left.is_empty());
        left.iter().for_each(|path| fs::remove_file(path).unwrap());
        let found = load(&path).unwrap().optimizer;
        assert!(found.steps() >= steps, "never an older file");
        steps = found.steps();
        while element.steps() < steps {
            one_step(&mut element, 1);
        }
        let values = |opt: &AdamW| opt.moments(0).map(|(m, v)| (m.to_f32(), v.to_f32())).unwrap();
        let ((m, v), (m1, v1)) = (values(&found), values(&element));
        assert!(m.len() == ELEMENTS && m.iter().all(|&m| m == m1[0]) && v.iter().all(|&v| v == v1[0]));
        assert_eq!(found.age(0), steps);
    }
    assert!(caught >= 10, "{caught} of 100 were caught while they wrote");
    assert!(steps > 10, "{steps} steps were saved");
}

/// The test above would see a file that is written in place.
#[test]
fn writing_in_place_would_be_seen() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("opt.safetensors");
    let mut opt = uniform();
    one_step(&mut opt, ELEMENTS);
    let mut inputs = Inputs(2);
    let broken = |_| {
        save(&path, &opt, None).unwrap();
        kill("a_child_that_overwrites", &path, 1000 + inputs.next() % 20_000);
        load::<AdamWConfig>(&path).is_err()
    };
    assert!((0..20).any(broken));
}

//! What can be held of the kernels without a GPU: the PTX is what the sources gave, and the element functions, compiled for
//! the host, equal Rust.
#![cfg(feature = "cuda")]

use std::process::Command;

/// `kernels/ptx` was made from these sources: their digests are recorded beside it.
#[test]
fn ptx_is_of_these_sources() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/kernels");
    let Ok(output) = Command::new("sha256sum").arg("--check").arg("ptx/sources.sha256").current_dir(root).output()
    else {
        eprintln!("no sha256sum: nothing checked");
        return;
    };
    assert!(output.status.success(), "run kernels/build.sh: {}", String::from_utf8_lossy(&output.stdout));
    let mut named: Vec<&str> = halfulp::cuda::SOURCES.lines().filter_map(|line| line.split("  ").nth(1)).collect();
    named.retain(|name| *name != "build.sh");
    let sources = std::fs::read_dir(root).unwrap().filter_map(|entry| entry.unwrap().file_name().into_string().ok());
    let mut sources: Vec<String> = sources.filter(|name| name.ends_with(".cu") || name.ends_with(".cuh")).collect();
    sources.sort();
    assert_eq!(named.iter().map(|name| name.trim_start_matches("./")).collect::<Vec<_>>(), sources);
}

/// Names and texts of the PTX, by name.
fn shipped() -> Vec<(String, String)> {
    let folder = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/kernels/ptx")).unwrap();
    let names = folder.map(|entry| entry.unwrap().path()).filter(|path| path.extension().is_some_and(|it| it == "ptx"));
    let mut all: Vec<_> = names
        .map(|path| (path.file_stem().unwrap().to_str().unwrap().to_string(), std::fs::read_to_string(path).unwrap()))
        .collect();
    all.sort();
    all
}

/// What approximates: seeds of sequences whose result does not depend on their error (kernels/exact.cuh, kernels/bounds.cuh), of normal
/// numbers.
const SEEDS: [&str; 3] = ["rsqrt.approx.ftz.f32", "rcp.approx.ftz.f32", "\tsqrt.approx.ftz.f32"];

/// What no kernel may contain: what could round otherwise than the CPU does, or slow. The assembler may fuse a multiplication
/// and an addition that do not name their rounding.
fn forbids(name: &str, ptx: &str) {
    let ptx = SEEDS.iter().fold(ptx.to_string(), |ptx, seed| ptx.replace(seed, "seed"));
    for forbidden in [".approx", ".full", ".ftz", ".local", "call", "mad.rn."] {
        assert!(!ptx.contains(forbidden), "{name}: {forbidden}");
    }
    for operation in ["mad", "mul", "add", "sub", "fma", "div", "rcp", "sqrt"] {
        for width in ["f32", "f64"] {
            let forbidden = format!("{operation}.{width}");
            assert!(!ptx.contains(&forbidden), "{name}: {forbidden}");
        }
    }
}

/// Fused operations of a root that begins with a seed, the one that places its operand included, and of such a quotient.
const OF_SEEDS: [usize; 2] = [3, 4];

/// What a rule writes for an element in kernels/rules.cuh.
struct Rule {
    name: &'static str,
    states: usize,
    /// Fused operations of a step, and those of them that make the new states.
    fused: usize,
    of_states: usize,
    /// Values that are looked at for NaN: the parameter, and each state that leaves the parameter finite when it is not.
    watched: usize,
    /// Divisions, and as many square roots.
    divisions: usize,
    /// Of its scalars, in f64: fused operations, divisions, square roots.
    scalars: [usize; 3],
}

const RULES: [Rule; 6] = [
    // m, v; denominator, decay, parameter. The learning rate's correction, and one under a root.
    Rule { name: "adamw", states: 2, fused: 5, of_states: 2, watched: 2, divisions: 1, scalars: [0, 2, 1] },
    // Gradient with decay, m, v; denominator, parameter.
    Rule { name: "adam", states: 2, fused: 5, of_states: 3, watched: 2, divisions: 1, scalars: [0, 2, 1] },
    // Gradient with decay, momentum; the momentum ahead, decay, parameter.
    Rule { name: "sgd", states: 1, fused: 5, of_states: 2, watched: 2, divisions: 0, scalars: [0, 0, 0] },
    // Momentum; direction, decay, parameter.
    Rule { name: "lion", states: 1, fused: 4, of_states: 1, watched: 2, divisions: 0, scalars: [0, 0, 0] },
    // m, v, the slow m; denominator, numerator, decay, parameter. Three exponentials, two of them within logarithms, have a division
    // and three fused operations each; logarithms one more division; two shares of time, two corrections and three inverses.
    Rule { name: "ademamix", states: 3, fused: 7, of_states: 3, watched: 3, divisions: 1, scalars: [9, 12, 1] },
    // m, v; denominator, update with decay, parameter. Two corrections, one under a root.
    Rule { name: "lamb", states: 2, fused: 5, of_states: 2, watched: 2, divisions: 1, scalars: [0, 2, 1] },
];

/// Fused operations, divisions and square roots of a kernel, in f32 and in f64.
type Counts = [[usize; 3]; 2];

fn counts(kernel: &str) -> Counts {
    ["f32", "f64"].map(|width| {
        let count = |operation: &str| kernel.matches(&format!("{operation}.rn.{width}")).count();
        [count("fma"), count("div") + count("rcp"), count("sqrt")]
    })
}

/// Square roots and inverses of a kernel that begin with an approximation.
fn seeds(kernel: &str) -> [usize; 3] {
    SEEDS.map(|seed| kernel.matches(seed).count())
}

/// How many they are in the kernel of this name: one of the first two an element that is taken with others, or three; or one, and a root
/// and an inverse between bounds, twice.
fn seeded(entry: &str) -> [usize; 3] {
    let words: Vec<&str> = entry.split('_').collect();
    match words[..] {
        ["ask", "seeds"] => [1, 1, 0],
        ["blocks", "f32", ..] => [3 * 8, 3 * 8, 0],
        ["blocks", ..] => [16, 3 * 16, 2 * 16],
        ["norms", _, "any"] => [0; 3],
        ["norms", ..] => [8, 8, 0],
        [name, ..] if words.len() > 3 && RULES.iter().any(|rule| rule.name == name && rule.divisions > 0) => [8, 8, 0],
        _ => [0; 3],
    }
}

/// What they are in the kernel of this name, which has these.
fn written(entry: &str, counts: &Counts) -> Counts {
    let words: Vec<&str> = entry.split('_').collect();
    let none = [0; 3];
    let rule = |name: &str| {
        RULES.iter().find(|rule| rule.name == name).unwrap_or_else(|| panic!("{entry}: no rule has this name"))
    };
    match words[..] {
        ["cast" | "decode" | "set", ..] => [none; 2],
        // The scale of a tensor is a quotient by a constant, which the compiler narrows.
        ["encode", _, "global"] => [[0, 1, 0], none],
        ["encode", _, "amax"] => [none; 2],
        // Two rules of scales divide, and each of eight elements.
        ["encode", ..] => [none, [0, 2 + 8, 0]],
        // Squares of four lanes: of eight rounds at once and of one alone, for three types.
        ["norm", "chunks"] => [none, [3 * (8 + 1) * 4, 0, 0]],
        ["norm", "combine"] => [none, [0, 1, 1]],
        ["prepare", name] => [none, rule(name).scalars],
        // A root and an inverse, without what is around them.
        ["ask", "seeds"] => [[4, 1, 1], none],
        // The ratio of norms, and the norms of parameters and of updates.
        ["trust", _] => [none, [0, 1, 2]],
        // All but the parameter, of four elements, twice where types are known; after the states by seeds, with what looks for NaN, and as
        // written. Squares of the parameter and of that.
        ["norms", name, ref types @ ..] => {
            let (rule, known) = (rule(name), types != ["any"]);
            let elements = if known { 8 } else { 4 };
            let by_seeds = rule.fused - rule.of_states + OF_SEEDS[0] + OF_SEEDS[1];
            let by_seeds = if known { by_seeds } else { 0 };
            let each = [rule.fused - 1 + by_seeds, rule.divisions, rule.divisions];
            [each.map(|each| each * elements), [2 * elements, 0, 0]]
        }
        // Four elements, of which the compiler may take some apart. Each state divides in f64 under a scale that is an f32: for the
        // scale, for its code, and for the code of the old value.
        ["any", name] => {
            let rule = rule(name);
            let elements = counts[0][0] / rule.fused;
            assert!((4..=8).contains(&elements), "{entry}: {elements} elements");
            let each = [rule.fused, rule.divisions, rule.divisions];
            [each.map(|each| each * elements), [0, 3 * rule.states, 0]]
        }
        // Elements at once: what they are mostly twice, with a gradient that is multiplied and one that is not, by seeds or between two
        // bounds, whose parameters are two; by seeds for anything, and as written, with what looks for NaN in parameters that are neither
        // compared as integers nor in pairs. And one by one, states first for the scales of blocks, then everything.
        ["blocks", parameters, ..] => {
            let (rule, elements) = (rule("adamw"), if parameters == "f32" { 8 } else { 16 });
            let looks = usize::from(parameters == "bf16s");
            let by_seeds = OF_SEEDS[0] + OF_SEEDS[1];
            let mostly = match parameters {
                "f32" => 2 * (rule.fused + by_seeds - 1),
                _ => 2 * (rule.fused + 1),
            };
            let fused = elements * (mostly + 2 * (rule.fused + looks) + by_seeds);
            let divisions = (elements + 1) * rule.divisions;
            [[fused + rule.of_states + rule.fused, divisions, divisions], none]
        }
        // Elements at once, each with those that look for NaN, and one by one.
        [name, _, ..] => {
            let (rule, elements) = (rule(name), 8);
            let of_seeds = rule.divisions * (OF_SEEDS[0] + OF_SEEDS[1]);
            let fused = elements * (rule.fused + rule.watched + of_seeds) + rule.fused;
            [[fused, rule.divisions, rule.divisions], none]
        }
        [] | [_] => panic!("{entry}: no kernel has this name"),
    }
}

/// What every module keeps, whatever it was compiled for: operations are those that the sources write, each rounded by itself.
fn keeps_the_contract(name: &str, ptx: &str) {
    forbids(name, ptx);
    assert!(ptx.contains(".visible .entry "), "{name}: no kernels");
    for kernel in ptx.split(".visible .entry ").skip(1) {
        let entry = kernel.split('(').next().unwrap();
        let counts = counts(kernel);
        assert_eq!(counts, written(entry, &counts), "{name}: {entry}");
        assert_eq!(seeds(kernel), seeded(entry), "{name}: {entry}");
    }
}

#[test]
fn ptx_contract() {
    let modules: Vec<_> = shipped().into_iter().filter(|(name, _)| !name.starts_with("hardware_")).collect();
    assert_eq!(modules.len(), 20);
    for (name, ptx) in modules {
        assert!(ptx.contains(".version 7.1\n") && ptx.contains(".target sm_80\n"), "{name}");
        keeps_the_contract(&name, &ptx);
    }
}

/// Each kernel rounds by the instruction of its format alone: four quads at once and one element, a quad under either half
/// of its word.
#[test]
fn ptx_of_hardware_rounding() {
    let modules: Vec<_> = shipped().into_iter().filter(|(name, _)| name.starts_with("hardware_")).collect();
    assert_eq!(modules.len(), 2);
    for (name, ptx) in modules {
        let architecture = name.trim_start_matches("hardware_");
        assert!(ptx.contains(".version 8.8\n") && ptx.contains(&format!(".target sm_{architecture}\n")), "{name}");
        forbids(&name, &ptx);
        for (format, instruction) in [
            ("bf16", "cvt.rs.bf16x2.f32"),
            ("e4m3", "cvt.rs.satfinite.e4m3x4.f32"),
            ("e5m2", "cvt.rs.satfinite.e5m2x4.f32"),
            ("e2m1", "cvt.rs.satfinite.e2m1x4.f32"),
        ] {
            let kernel =
                ptx.split(".visible .entry ").find(|kernel| kernel.starts_with(&format!("hardware_{format}(")));
            let kernel = kernel.unwrap_or_else(|| panic!("{name}: no kernel for {format}"));
            assert_eq!(
                (kernel.matches(instruction).count(), kernel.matches("cvt.rs").count()),
                (10, 10),
                "{name}: {format}"
            );
        }
    }
}

/// Compiled at run time, for several architectures, the kernels keep the same contract. Needs NVRTC and no
/// GPU; passes by where there is none, unless `HALFULP_REQUIRE_NVRTC` is set.
#[test]
#[cfg(feature = "nvrtc")]
fn compiled_ptx_keeps_the_contract() {
    use halfulp::cuda::{CudaError, nvrtc};
    if let Err(error) = nvrtc::supports((8, 0)) {
        assert!(std::env::var_os("HALFULP_REQUIRE_NVRTC").is_none(), "{error}");
        assert!(matches!(error, CudaError::NoNvrtc { .. }), "{error}");
        eprintln!("{error}: nothing compiled");
        return;
    }
    let entries = |ptx: &str| {
        let mut entries: Vec<_> =
            ptx.lines().filter(|line| line.starts_with(".visible .entry ")).map(String::from).collect();
        entries.sort();
        entries
    };
    let shipped = shipped();
    let check = |major, minor| {
        for module in nvrtc::MODULES {
            let compiled = nvrtc::compile(module, (major, minor)).unwrap();
            let name = format!("{module} for sm_{major}{minor}");
            assert!(compiled.ptx.contains(&format!(".target sm_{major}{minor}\n")), "{name}");
            assert!(compiled.cubin.starts_with(b"\x7FELF"), "{name}");
            keeps_the_contract(&name, &compiled.ptx);
            let (_, same) = shipped.iter().find(|(name, _)| name == module).unwrap();
            assert_eq!(entries(&compiled.ptx), entries(same), "{name}");
        }
    };
    std::thread::scope(|scope| {
        [(8, 0), (9, 0), (12, 0)]
            .map(|(major, minor)| scope.spawn(move || check(major, minor)))
            .map(|thread| thread.join().unwrap())
    });
    let unknown = nvrtc::compile("cast_f32", (3, 5)).unwrap_err();
    assert!(
        matches!(&unknown, CudaError::Architecture { architecture, supported, .. } if architecture == "sm_35" && supported.contains("sm_90")),
        "{unknown}"
    );
    let unknown = nvrtc::compile("cast_f64", (8, 0)).unwrap_err();
    assert!(
        matches!(&unknown, CudaError::Compile { module, log, .. } if module == "cast_f64" && log.contains("cast_f32")),
        "{unknown}"
    );
}

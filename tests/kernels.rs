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

/// Every instruction of the kernels that could round otherwise than the CPU does, or that must not be there.
#[test]
fn ptx_contract() {
    for entry in std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/kernels/ptx")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "ptx") {
            continue;
        }
        let ptx = std::fs::read_to_string(&path).unwrap();
        let name = path.display();
        assert!(ptx.contains(".version 7.1\n") && ptx.contains(".target sm_80\n"), "{name}");
        // Approximations are seeds of what is correctly rounded (`root` and `quotient` of adamw.cuh), and nothing else.
        let seeds = ["rsqrt.approx.ftz.f32", "rcp.approx.ftz.f32"];
        let but_seeds = seeds.iter().fold(ptx.clone(), |ptx, seed| ptx.replace(seed, "seed"));
        for forbidden in [".approx", ".ftz", ".local", "call", "mad.f32", "mad.rn.f32"] {
            assert!(!but_seeds.contains(forbidden), "{name}: {forbidden}");
        }
        for kernel in ptx.split(".visible .entry ").skip(1) {
            let entry = kernel.split('(').next().unwrap();
            let fused = kernel.matches("fma.rn.f32").count();
            let adamw = entry.starts_with("adamw");
            // The rule writes five fused operations an element. Of 8 elements at once each takes 5 more for its root, 7 for its
            // quotient and 2 to see whether it is in range; then there is the loop that takes elements one by one.
            let expected = if adamw { 8 * (5 + 5 + 7 + 2) + 5 } else { 0 };
            assert_eq!(fused, expected, "{name}: {entry}");
            for rounded in ["div.rn.f32", "sqrt.rn.f32"] {
                assert_eq!(kernel.matches(rounded).count(), usize::from(adamw), "{name}: {entry}: {rounded}");
            }
            for seed in seeds {
                assert_eq!(kernel.matches(seed).count(), if adamw { 8 } else { 0 }, "{name}: {entry}: {seed}");
            }
        }
    }
}

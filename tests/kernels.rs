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
        for forbidden in [".approx", ".ftz", ".local", "call", "mad.f32", "mad.rn.f32"] {
            assert!(!ptx.contains(forbidden), "{name}: {forbidden}");
        }
        for kernel in ptx.split(".visible .entry ").skip(1) {
            let entry = kernel.split('(').next().unwrap();
            let fused = kernel.matches("fma.rn.f32").count();
            // The rule writes five fused operations an element: 4 or 8 elements at once, with two more each that look for NaN,
            // and one in the loop that takes elements one by one.
            let at_once = match entry.split('_').next() {
                Some("adamw") if entry.starts_with("adamw_f32") => 4,
                Some("adamw") => 8,
                _ => 0,
            };
            let alone = usize::from(at_once > 0);
            assert_eq!(fused, 7 * at_once + 5 * alone, "{name}: {entry}");
            for rounded in ["div.rn.f32", "sqrt.rn.f32"] {
                assert_eq!(kernel.matches(rounded).count(), at_once + alone, "{name}: {entry}: {rounded}");
            }
        }
    }
}

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

fn shipped(prefix: &str) -> Vec<(String, String)> {
    let folder = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/kernels/ptx")).unwrap();
    let names = folder.map(|entry| entry.unwrap().path()).filter(|path| path.extension().is_some_and(|it| it == "ptx"));
    names
        .map(|path| (path.file_stem().unwrap().to_str().unwrap().to_string(), std::fs::read_to_string(path).unwrap()))
        .filter(|(name, _)| name.starts_with(prefix))
        .collect()
}

/// What no kernel may contain: what could round otherwise than the CPU does, or slow. The assembler may fuse a multiplication
/// and an addition that do not name their rounding.
fn forbids(name: &str, ptx: &str) {
    for forbidden in
        [".approx", ".ftz", ".local", "call", "mad.f32", "mad.rn.f32", "mul.f32", "add.f32", "sub.f32", "fma.f32"]
    {
        assert!(!ptx.contains(forbidden), "{name}: {forbidden}");
    }
}

/// What every module of casts and steps keeps, whatever it was compiled for.
fn keeps_the_contract(name: &str, ptx: &str) {
    forbids(name, ptx);
    assert!(ptx.contains(".visible .entry "), "{name}: no kernels");
    for kernel in ptx.split(".visible .entry ").skip(1) {
        let entry = kernel.split('(').next().unwrap();
        let fused = kernel.matches("fma.rn.f32").count();
        // Casts into blocks divide: in f64, which the compiler may narrow where the quotient is rounded to f32.
        if entry.starts_with("encode_") {
            assert_eq!((fused, kernel.matches("fma.rn.f64").count()), (0, 0), "{name}: {entry}");
            continue;
        }
        // The rule writes five fused operations an element. Some elements at once take one or two more each that look for NaN.
        // One is alone in the loop that takes elements one by one; of a block its moments are made twice.
        let (at_once, more, alone) = match entry.split('_').next() {
            Some("adamw") if entry.starts_with("adamw_f32") => (4, 2, 5),
            Some("adamw") => (8, 2, 5),
            Some("blocks") if matches!(entry, "blocks_any" | "blocks_mixed") => (0, 0, 7),
            Some("blocks") if entry.starts_with("blocks_f32") => (8, 1, 7),
            Some("blocks") => (16, 1, 7),
            _ => (0, 0, 0),
        };
        assert_eq!(fused, (5 + more) * at_once + alone, "{name}: {entry}");
        for rounded in ["div.rn.f32", "sqrt.rn.f32"] {
            assert_eq!(kernel.matches(rounded).count(), at_once + alone.min(1), "{name}: {entry}: {rounded}");
        }
    }
}

#[test]
fn ptx_contract() {
    let modules = ["cast_", "adamw_", "blocks_", "encode_", "decode"].map(shipped).concat();
    assert_eq!(modules.len(), 13);
    for (name, ptx) in modules {
        assert!(ptx.contains(".version 7.1\n") && ptx.contains(".target sm_80\n"), "{name}");
        keeps_the_contract(&name, &ptx);
    }
}

/// Each kernel rounds by the instruction of its format alone: four quads at once and one element, a quad under either half
/// of its word.
#[test]
fn ptx_of_hardware_rounding() {
    let modules = shipped("hardware_");
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
    let check = |major, minor| {
        for module in nvrtc::MODULES {
            let compiled = nvrtc::compile(module, (major, minor)).unwrap();
            let name = format!("{module} for sm_{major}{minor}");
            assert!(compiled.ptx.contains(&format!(".target sm_{major}{minor}\n")), "{name}");
            assert!(compiled.cubin.starts_with(b"\x7FELF"), "{name}");
            keeps_the_contract(&name, &compiled.ptx);
            let (_, same) = shipped(module).pop().unwrap();
            assert_eq!(entries(&compiled.ptx), entries(&same), "{name}");
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

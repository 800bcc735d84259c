//! What a cast writes and says when it succeeds.

use std::collections::BTreeMap;
use std::fs;
use std::process::Command;

use halfulp::cast::Cast;
use halfulp::format::power_of_two_scale;
use halfulp::measure::amax;
use halfulp::round::{Overflow, Source};
use halfulp::{Draw, Format, bf16, f16};
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::{HALFULP, Tensor, bytes, halfulp, listing, model, numbers, read, succeeds, text, workplace, write};

/// What the library makes of a tensor: bytes and scale exponent.
fn expected<S: Source>(x: &[S], name: &str, format: Format, seed: Option<u64>, scaled: bool) -> (Vec<u8>, i32) {
    let k = if scaled { power_of_two_scale(format, amax(x)) } else { 0 };
    let mut out = vec![0; format.bytes(x.len())];
    let cast = seed.map_or(Cast::nearest(), |seed| Cast::stochastic(Draw::seeded(seed).named(name)));
    cast.scale(k).into_bytes(x, format, &mut out).unwrap();
    (out, k)
}

fn scale_of(tensor: &Tensor) -> f32 {
    assert_eq!((tensor.dtype, &tensor.shape[..]), (Dtype::F32, &[][..]));
    f32::from_le_bytes(tensor.data[..].try_into().unwrap())
}

#[test]
fn every_format_holds_what_the_library_makes() {
    let directory = TempDir::new().unwrap();
    let path = directory.path();
    for (name, format) in Format::NAMED {
        // Data begin at another remainder of 8 each time.
        for (pad, seed) in [(0, Some(7)), (1, None), (2, Some(u64::MAX)), (3, Some(0))] {
            let x = model(path, pad);
            let how = seed.map_or("--round nearest".into(), |seed| format!("--seed {seed}"));
            let output = halfulp(path, &format!("cast in.safetensors out.safetensors --to {name} {how}"));
            assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
            let (before, _) = read(&path.join("in.safetensors"));
            let (tensors, metadata) = read(&path.join("out.safetensors"));
            for copied in ["flag", "ids"] {
                let (before, after) = (&before[copied], &tensors[copied]);
                assert_eq!((before.dtype, &before.shape, &before.data), (after.dtype, &after.shape, &after.data));
            }
            let scaled = format.bits() <= 8 && format != Format::E8M0;
            assert_eq!(tensors.len(), 9 + if scaled { 7 } else { 0 });
            let wide: Vec<f64> = x[1].iter().map(|&x| f64::from(x) + 1e-12).collect();
            let half: Vec<f16> = x[2].iter().map(|&x| f16::from_f32(x)).collect();
            let brain: Vec<bf16> = x[2].iter().map(|&x| bf16::from_f32(x)).collect();
            let cases = [
                ("layer.0.weight", expected(&x[0], "layer.0.weight", format, seed, scaled)),
                ("layer.0.bias", expected(&x[1], "layer.0.bias", format, seed, scaled)),
                ("wide", expected(&wide, "wide", format, seed, scaled)),
                ("half", expected(&half, "half", format, seed, scaled)),
                ("brain", expected(&brain, "brain", format, seed, scaled)),
                ("scalar", expected(&[0.7f32], "scalar", format, seed, scaled)),
                ("none", expected::<f32>(&[], "none", format, seed, scaled)),
            ];
            for (tensor, (bytes, k)) in cases {
                assert_eq!(tensors[tensor].data, bytes, "{tensor} to {name}");
                let scale = tensors.get(&format!("{tensor}_scale"));
                assert_eq!(scale.map(scale_of), scaled.then_some(2f32.powi(k)), "{tensor} to {name}");
                stored_as(format, tensor, &before[tensor].shape, &tensors[tensor], &metadata);
            }
        }
    }
}

/// The dtype and shape under which codes are stored, and what the metadata say where these do not tell.
fn stored_as(format: Format, name: &str, shape: &[usize], tensor: &Tensor, metadata: &BTreeMap<String, String>) {
    let native = match format.to_string().as_str() {
        "BF16" => Some(Dtype::BF16),
        "FP16" => Some(Dtype::F16),
        "E5M2" => Some(Dtype::F8_E5M2),
        "E4M3" => Some(Dtype::F8_E4M3),
        "E8M0" => Some(Dtype::F8_E8M0),
        "E3M2" => Some(Dtype::F6_E3M2),
        "E2M3" => Some(Dtype::F6_E2M3),
        "E2M1" => Some(Dtype::F4),
        _ => None,
    };
    let elements: usize = shape.iter().product();
    let whole_bytes = (elements * format.bits() as usize).is_multiple_of(8);
    let fact = metadata.get(&format!("halfulp.tensor.{name}"));
    match native.filter(|_| whole_bytes) {
        Some(dtype) => {
            assert_eq!((tensor.dtype, &tensor.shape[..], fact), (dtype, shape, None), "{name} to {format}");
        }
        None => {
            let stored = if format.bits() == 8 { shape.to_vec() } else { vec![tensor.data.len()] };
            assert_eq!((tensor.dtype, &tensor.shape), (Dtype::U8, &stored), "{name} to {format}");
            let shape: Vec<String> = shape.iter().map(usize::to_string).collect();
            let fact: Value = serde_json::from_str(fact.unwrap()).unwrap();
            assert_eq!(fact, json!({ "format": format.to_string(), "shape": shape }));
        }
    }
}

/// Multiplied by its scale, a nearest code is within half a spacing of its source.
#[test]
fn scales_decode() {
    let directory = workplace();
    let path = directory.path();
    let x = model(path, 0);
    for format in [Format::E4M3, Format::E5M2, Format::E2M3] {
        succeeds(path, &format!("cast in.safetensors out.safetensors --to {format} --round nearest --only weight"));
        let (tensors, _) = read(&path.join("out.safetensors"));
        let scale = f64::from(scale_of(&tensors["layer.0.weight_scale"]));
        assert_eq!(scale.log2().fract(), 0.0);
        let largest = amax(&x[0]);
        assert!(
            largest <= format.max() * scale && largest > format.max() * scale / 2.0,
            "the smallest scale that fits"
        );
        if format.bits() == 8 {
            for (&x, &code) in x[0].iter().zip(&tensors["layer.0.weight"].data) {
                let error = format.value(code.into()) * scale - f64::from(x);
                assert!(error.abs() <= format.ulp(f64::from(x) / scale) * scale / 2.0, "{format} {x}");
            }
        }
    }
}

#[test]
fn zeros_and_non_finite_values_leave_the_scale_alone() {
    let directory = TempDir::new().unwrap();
    let path = directory.path();
    let odd = [1.5f32, f32::NAN, f32::INFINITY, -0.75];
    let tensors: [(&str, &str, &[usize], Vec<u8>); 3] = [
        ("odd", "F32", &[4], bytes(&odd)),
        ("zero", "F32", &[5], bytes(&[0f32; 5])),
        ("tiny", "F64", &[1], bytes(&[1e-300f64])),
    ];
    write(&path.join("in.safetensors"), &tensors, Value::Null, 0);
    let output = halfulp(path, "cast in.safetensors out.safetensors --to e2m1 --round nearest");
    let (tensors, _) = read(&path.join("out.safetensors"));
    assert_eq!(scale_of(&tensors["odd_scale"]), 0.25); // 1.5 = 6 / 4
    assert_eq!(tensors["odd"].data, [0x77, 0xD7]); // NaN and infinity as the largest value, -3
    assert_eq!(scale_of(&tensors["zero_scale"]), 1.0);
    assert_eq!(scale_of(&tensors["tiny_scale"]), 2f32.powi(-126));
    let warnings = "halfulp: warning: elements beyond the largest value of E2M1, saturated: 1\n\
                    halfulp: warning: NaN, stored as the largest value, for E2M1 has none: 1\n";
    assert_eq!((output.status.code(), text(&output.stderr)), (Some(0), warnings));
}

#[test]
fn warnings_name_what_was_lost() {
    let directory = TempDir::new().unwrap();
    let path = directory.path();
    write(&path.join("in.safetensors"), &[("w", "F32", &[3], bytes(&[1e6f32, -1.0, 2.0]))], Value::Null, 0);
    let cases = [
        ("fp16", "elements beyond the largest value of FP16, now infinite: 1\n"),
        ("fp16 --overflow saturate", "elements beyond the largest value of FP16, saturated: 1\n"),
        ("e4m3 --scale none --overflow ieee", "elements beyond the largest value of E4M3, now NaN: 1\n"),
        ("ue4m4", "negative elements, stored as code 0, for UE4M4 has no sign: 1\n"),
        ("e8m0", "negative elements, now NaN, for E8M0 has no sign: 1\n"),
        ("bf16 --skip w", "no tensor was cast: none is of a floating-point type and selected\n"),
    ];
    for (options, expected) in cases {
        let output = halfulp(path, &format!("cast in.safetensors out.safetensors --seed 1 --to {options}"));
        assert_eq!(output.status.code(), Some(0));
        assert_eq!(text(&output.stderr), format!("halfulp: warning: {expected}"), "{options}");
    }
}

/// Bytes depend on nothing but input and options, and a subset gets the bytes of the whole. One tensor is longer than a
/// chunk.
#[test]
fn same_bytes_for_threads_runs_and_subsets() {
    let directory = TempDir::new().unwrap();
    let path = directory.path();
    let long = numbers((1 << 21) + 12_345, 9);
    let tensors: [(&str, &str, &[usize], Vec<u8>); 3] = [
        ("z.long", "F32", &[long.len()], bytes(&long)),
        ("a.weight", "F32", &[500], bytes(&numbers(500, 4))),
        ("m.ids", "U8", &[1], vec![9]),
    ];
    write(&path.join("in.safetensors"), &tensors, Value::Null, 1);
    for (to, format) in [("bf16", Format::BF16), ("e3m2", Format::E3M2)] {
        let cast = |out: &str, more: &str| {
            let line = format!("cast in.safetensors {out} --to {to} --seed 3 {more}");
            assert_eq!(halfulp(path, &line).status.code(), Some(0));
            fs::read(path.join(out)).unwrap()
        };
        let whole = cast("1", "--threads 1");
        assert!(whole == cast("2", "--threads 2") && whole == cast("3", "--threads 3") && whole == cast("4", ""));
        let (tensors, _) = read(&path.join("1"));
        let (expected, _) = expected(&long, "z.long", format, Some(3), format.bits() <= 8);
        assert!(tensors["z.long"].data == expected);
        for only in ["long", "^a"] {
            cast("5", &format!("--only {only}"));
            let (subset, _) = read(&path.join("5"));
            let name = if only == "long" { "z.long" } else { "a.weight" };
            assert!(subset[name].data == tensors[name].data && subset[name].dtype == tensors[name].dtype, "{name}");
        }
    }
}

#[test]
fn the_header_is_sorted_and_the_data_aligned() {
    let directory = workplace();
    let path = directory.path();
    succeeds(path, "cast in.safetensors out.safetensors --to e2m1 --seed 3");
    let file = fs::read(path.join("out.safetensors")).unwrap();
    let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    assert_eq!(length % 8, 0);
    let header = text(&file[8..8 + length]);
    // Maps of serde_json are sorted, so parsing and printing sorts.
    let sorted: BTreeMap<String, Value> = serde_json::from_str(header).unwrap();
    assert_eq!(serde_json::to_string(&sorted).unwrap(), header.trim_end_matches(' '));
    let (_, parsed) = SafeTensors::read_metadata(&file).unwrap();
    let order: Vec<_> = parsed.offset_keys();
    let mut expected = order.clone();
    let dtype = |name: &str| parsed.info(name).unwrap().dtype;
    expected.sort_by(|a, b| dtype(b).cmp(&dtype(a)).then(a.cmp(b)));
    // Empty tensors share their place with the next.
    assert!(
        order == expected || parsed.info("none").unwrap().data_offsets.0 == parsed.info("none").unwrap().data_offsets.1
    );
    for name in order {
        let info = parsed.info(&name).unwrap();
        assert_eq!(info.data_offsets.0 % info.dtype.bitsize().div_ceil(8), 0, "{name}");
    }
}

#[test]
fn only_and_skip_search_names() {
    let directory = workplace();
    let path = directory.path();
    let cast = |options: &str| {
        halfulp(path, &format!("cast in.safetensors out.safetensors --round nearest --to fp16 {options}"));
        let (tensors, _) = read(&path.join("out.safetensors"));
        ["layer.0.weight", "layer.0.bias", "wide", "brain"].map(|name| tensors[name].dtype == Dtype::F16)
    };
    assert_eq!(cast("--only layer"), [true, true, false, false]);
    assert_eq!(cast("--skip layer"), [false, false, true, true]);
    assert_eq!(cast("--only layer --skip bias$"), [true, false, false, false]);
    assert_eq!(cast("--only ^bias"), [false; 4]);
}

#[test]
fn recipes_add_up() {
    let directory = workplace();
    let path = directory.path();
    let recipe = |file: &str| -> Value {
        let (_, metadata) = read(&path.join(file));
        assert_eq!((&metadata["format"][..], &metadata["note"][..]), ("pt", "kept \u{2713}"));
        serde_json::from_str(&metadata["halfulp.recipe"]).unwrap()
    };
    succeeds(path, "cast in.safetensors a --to e4m3 --seed 18446744073709551615 --only weight --skip ids|flag");
    let version = env!("CARGO_PKG_VERSION");
    let first = json!({
        "version": "1", "format": "E4M3", "round": "stochastic", "stream": "1", "seed": "18446744073709551615",
        "overflow": "saturate", "scale": "tensor", "only": "weight", "skip": "ids|flag", "crate_version": version,
    });
    assert_eq!(recipe("a"), first);
    succeeds(path, "cast a b --to fp16 --round nearest --overflow saturate --only wide");
    let second = json!({
        "version": "1", "format": "FP16", "round": "nearest", "overflow": "saturate", "scale": "none", "only": "wide",
        "skip": null, "crate_version": version,
    });
    assert_eq!(recipe("b"), json!([first, second]));
    succeeds(path, "cast b c --to fp16 --round nearest --overflow saturate --only wide");
    assert_eq!(recipe("c"), json!([first, second, second]));
    // What was cast before is as it was.
    let ((a, _), (c, _)) = (read(&path.join("a")), read(&path.join("c")));
    assert_eq!(a["layer.0.weight"].data, c["layer.0.weight"].data);
    assert_eq!(c["layer.0.weight"].dtype, Dtype::F8_E4M3);
    // A key of that name that is no recipe is kept all the same, and a fact about a tensor lasts until it is cast anew.
    let metadata = json!({ "halfulp.recipe": "by hand", "halfulp.tensor.w": "stale", "halfulp.tensor.v": "kept" });
    write(&path.join("d"), &[("w", "F32", &[1], bytes(&[1f32]))], metadata, 0);
    succeeds(path, "cast d e --round nearest");
    let (_, metadata) = read(&path.join("e"));
    let recipes: Value = serde_json::from_str(&metadata["halfulp.recipe"]).unwrap();
    assert_eq!((&recipes[0], &recipes[1]["format"]), (&json!("by hand"), &json!("BF16")));
    assert_eq!((metadata.get("halfulp.tensor.w"), &metadata["halfulp.tensor.v"][..]), (None, "kept"));
}

#[test]
fn the_closing_line_counts() {
    let directory = workplace();
    let path = directory.path();
    let line = succeeds(path, "cast in.safetensors out.safetensors --seed 1");
    let [bytes_in, bytes_out] =
        ["in.safetensors", "out.safetensors"].map(|name| fs::metadata(path.join(name)).unwrap().len());
    let counts = format!("cast 7 tensors (3283 elements) to BF16, copied 2; {bytes_in} bytes in, {bytes_out} out, ");
    assert!(line.starts_with(&counts) && line.lines().count() == 1, "{line}");
    let number = |before: &str| -> f64 {
        let rest = line.split_once(before).unwrap().1;
        rest.split([' ', '\n']).next().unwrap().parse().unwrap()
    };
    let (mean, error) = (number("mean error "), number("standard error "));
    assert!(mean.abs() < 5.0 * error && error > 1e-3 && error < 1e-2, "{line}");
}

#[test]
fn a_model_is_made_where_none_is_given() {
    let directory = TempDir::new().unwrap();
    let path = directory.path();
    let lines = succeeds(path, "cast");
    let lines: Vec<&str> = lines.lines().collect();
    assert_eq!(lines[0], "made halfulp-demo.safetensors, to be cast to halfulp-demo.bf16.safetensors");
    assert!(lines[1].starts_with("cast 5 tensors (94336 elements) to BF16, copied 1; "), "{}", lines[1]);
    assert_eq!(
        listing(path).into_keys().collect::<Vec<_>>(),
        ["halfulp-demo.bf16.safetensors", "halfulp-demo.safetensors"]
    );
    let before = listing(path);
    succeeds(path, "cast --seed 0");
    assert_eq!(listing(path), before);
    let (tensors, metadata) = read(&path.join("halfulp-demo.safetensors"));
    assert_eq!(metadata["format"], "pt");
    assert_eq!((tensors["position_ids"].dtype, &tensors["position_ids"].shape[..]), (Dtype::I64, &[1, 512][..]));
    let weight: &[f32] = &bytemuck::pod_collect_to_vec(&tensors["embedding.weight"].data);
    let mean = weight.iter().sum::<f32>() / weight.len() as f32;
    let deviation = (weight.iter().map(|x| x * x).sum::<f32>() / weight.len() as f32).sqrt();
    assert!(mean.abs() < 1e-3 && (deviation - 0.05).abs() < 1e-3, "{mean} {deviation}");
    succeeds(path, "cast --to E4M3 --round nearest");
    let nearest = fs::read(path.join("halfulp-demo.e4m3.safetensors")).unwrap();
    succeeds(path, "cast --to E4M3 --round nearest --seed 1");
    assert!(nearest == fs::read(path.join("halfulp-demo.e4m3.safetensors")).unwrap(), "nearest has no use for a seed");
}

/// Where the current directory cannot be written, the model goes to the one for temporary files.
#[cfg(target_os = "linux")]
#[test]
fn a_model_is_made_elsewhere() {
    let directory = TempDir::new().unwrap();
    let path = directory.path();
    // No user may make a file here.
    let output = Command::new(HALFULP).arg("cast").current_dir("/sys").env("TMPDIR", path).output().unwrap();
    assert_eq!((output.status.code(), text(&output.stderr)), (Some(0), ""));
    assert!(text(&output.stdout).starts_with(&format!("made {}/halfulp-demo.safetensors, ", path.display())));
    assert_eq!(listing(path).len(), 2);
}

#[test]
fn the_table_of_formats() {
    let directory = TempDir::new().unwrap();
    let table = succeeds(directory.path(), "formats");
    let lines: Vec<&str> = table.lines().collect();
    assert_eq!(lines.len(), 1 + Format::NAMED.len());
    let column = lines[0].find("bias").unwrap();
    for ((name, format), line) in Format::NAMED.iter().zip(&lines[1..]) {
        assert!(line.starts_with(name));
        assert!(line[column..].starts_with(&format.bias().to_string()), "{line}");
        let overflow = if Overflow::of(*format) == Overflow::Ieee { "ieee" } else { "saturate" };
        assert!(line.ends_with(overflow), "{line}");
    }
    let row =
        |name: &str| lines.iter().find(|line| line.starts_with(name)).unwrap().split_whitespace().collect::<Vec<_>>();
    assert_eq!(row("E4M3"), ["E4M3", "8", "1+4+3", "7", "NaN", "2^-9", "2^-6", "448", "saturate"]);
    assert_eq!(row("UE2M2Nz")[4..], ["none;", "no", "zero", "2^-3", "1", "7", "saturate"]);
    let help = succeeds(directory.path(), "cast --help");
    for word in ["Examples:", "--overflow", "--threads", "halfulp cast model.safetensors"] {
        assert!(help.contains(word), "{word}");
    }
}

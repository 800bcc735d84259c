//! What a cast says when it fails, and that nothing is left behind.

use std::fs;
use std::process::{Command, Stdio};

use serde_json::Value;
use tempfile::TempDir;

use super::{HALFULP, failed, fails, halfulp, listing, read, succeeds, text, workplace, write};

#[test]
fn errors_of_options() {
    let directory = workplace();
    let path = directory.path();
    let cast = |options: &str| fails(path, &format!("cast in.safetensors out.safetensors {options}"));
    let cases = [
        ("", "--seed: expected a number, for stochastic rounding takes explicit seeds only, got none"),
        (
            "--to e5m3 --seed 1",
            "'--to <FORMAT>': unknown format `e5m3`, expected one of bf16, fp16 (f16), e5m2, e4m3, ue5m3",
        ),
        ("--seed 1 --only (", "--only: expected a regular expression, got `(`: unclosed group"),
        ("--seed 1 --skip [z-a]", "--skip: expected a regular expression, got `[z-a]`: invalid character class range"),
        (
            "--seed 1 --only (a{1000}){1000}{1000}",
            "--only: expected a regular expression, got `(a{1000}){1000}{1000}`: ",
        ),
        (
            "--seed 1 --to e2m1 --overflow ieee",
            "--overflow: expected saturate, for E2M1 has neither infinity nor NaN, got ieee",
        ),
        ("--seed 1 --to ue2m2nz --overflow ieee", "--overflow: expected saturate, for UE2M2Nz has"),
        ("--seed 1 --to e8m0 --scale tensor", "--scale: expected none, for E8M0 holds scales itself, got tensor"),
        ("--seed -1", "invalid value '-1' for '--seed <N>'"),
        ("--seed 18446744073709551616", "invalid value '18446744073709551616' for '--seed <N>'"),
        ("--round up", "invalid value 'up' for '--round <ROUND>' [possible values: nearest, stochastic]"),
        ("--seed 1 --threads 0", "invalid value '0' for '--threads <N>'"),
        ("--seed 1 --frobnicate", "unexpected argument '--frobnicate' found"),
        ("--seed 1 third", "unexpected argument 'third' found"),
    ];
    for (options, expected) in cases {
        let error = cast(options);
        assert!(error.contains(expected), "{options}: {error}");
    }
    assert!(fails(path, "cast in.safetensors").contains("<OUT.safetensors>"));
    assert!(fails(path, "frobnicate").contains("unrecognized subcommand 'frobnicate'"));
    let help = halfulp(path, "");
    assert!(help.status.code() == Some(2) && text(&help.stderr).contains("Usage: halfulp"));
}

#[test]
fn errors_of_files() {
    let directory = workplace();
    let path = directory.path();
    fs::create_dir(path.join("folder")).unwrap();
    fs::write(path.join("empty"), "").unwrap();
    fs::write(path.join("text"), "It was a dark and stormy night; the rain fell in torrents").unwrap();
    let whole = fs::read(path.join("in.safetensors")).unwrap();
    fs::write(path.join("short"), &whole[..whole.len() - 1]).unwrap();
    fs::write(path.join("header"), &whole[..100]).unwrap();
    fs::write(path.join("long"), [&whole[..], b"!"].concat()).unwrap();
    fs::write(path.join("huge"), [&u64::MAX.to_le_bytes()[..], &whole[8..]].concat()).unwrap();
    let lie = |name: &str, from: &str, to: &str| {
        let at = whole.windows(from.len()).position(|window| window == from.as_bytes()).unwrap();
        let mut file = whole.clone();
        file.splice(at..at + from.len(), to.bytes());
        fs::write(path.join(name), file).unwrap();
    };
    lie("hole", "[3,12003]", "[4,12003]");
    lie("shape", "[30,100]", "[30,101]");
    lie("newline", "\"flag\"", "\"f\\n\\tg");
    lie("dtype", "\"BOOL\"", "\"B00L\"");
    let cases = [
        ("missing", "IN: expected a file to read, got `missing`: No such file or directory"),
        ("folder", "IN: expected a file, got `folder`, which is a directory"),
        ("empty", "IN: expected a safetensors file, got `empty`: expected at least 8 bytes, got 0"),
        ("text", "got `text`: expected a header of at most 100000000 bytes, got a length of 6998720683381388361"),
        ("huge", "got a length of 18446744073709551615"),
        ("short", "bytes of data, as the header says, got "),
        ("long", "bytes of data, as the header says, got "),
        ("header", "got 92 after its length: truncated, or no safetensors file"),
        ("hole", "invalid offset for tensor `layer.0.weight`"),
        ("shape", "invalid shape, data type, or offset for tensor"),
        ("newline", "header: "),
        ("dtype", "unknown variant `B00L`"),
    ];
    for (file, expected) in cases {
        let error = fails(path, &format!("cast {file} out --seed 1"));
        assert!(error.contains(expected), "{file}: {error}");
    }
    let outs = [
        ("folder", "OUT: expected a file, got `folder`, which is a directory"),
        ("nowhere/out", "OUT: expected an existing directory to write in, got `nowhere`: No such file or directory"),
        ("empty/out", "OUT: expected an existing directory to write in, got `empty`: not a directory"),
        ("..", "OUT: expected a file, got `..`, which is a directory"),
        ("in.safetensors", "OUT: expected another file than IN, got the same one, `in.safetensors`"),
        ("./folder/../in.safetensors", "OUT: expected another file than IN"),
    ];
    for (out, expected) in outs {
        let error = fails(path, &format!("cast in.safetensors {out} --seed 1"));
        assert!(error.contains(expected), "{out}: {error}");
    }
}

#[cfg(unix)]
#[test]
fn one_file_under_two_names() {
    let directory = workplace();
    let path = directory.path();
    std::os::unix::fs::symlink("in.safetensors", path.join("symbolic")).unwrap();
    fs::hard_link(path.join("in.safetensors"), path.join("hard")).unwrap();
    for line in ["in.safetensors symbolic", "in.safetensors hard", "symbolic hard", "hard in.safetensors"] {
        let error = fails(path, &format!("cast {line} --seed 1"));
        assert!(error.contains("OUT: expected another file than IN, got the same one"), "{line}: {error}");
    }
}

/// A device or pipe is neither read nor replaced.
#[cfg(unix)]
#[test]
fn no_regular_file() {
    let directory = workplace();
    let path = directory.path();
    let _socket = std::os::unix::net::UnixListener::bind(path.join("socket")).unwrap();
    let error = fails(path, "cast in.safetensors socket --seed 1");
    assert!(error.contains("OUT: expected a file, got `socket`, which is no regular file"), "{error}");
    assert!(fails(path, "cast socket out --seed 1").contains("IN: expected a file, got `socket`"));
    assert!(fails(path, "cast /dev/null out --seed 1").contains("IN: expected a file, got `/dev/null`"));
}

#[test]
fn errors_of_tensors() {
    let directory = TempDir::new().unwrap();
    let path = directory.path();
    let fails_with = |tensors: &[(&str, &str, &[usize], Vec<u8>)], options: &str, expected: &str| {
        write(&path.join("in"), tensors, Value::Null, 0);
        let error = fails(path, &format!("cast in out --seed 1 {options}"));
        assert!(error.contains(expected), "{options}: {error}");
    };
    for (dtype, bytes) in
        [("F8_E4M3", 1), ("F8_E5M2", 1), ("F8_E8M0", 1), ("F8_E4M3FNUZ", 1), ("C64", 8), ("F4", 1), ("F6_E3M2", 3)]
    {
        let shape = match dtype {
            "F4" => 2,
            "F6_E3M2" => 4,
            _ => 1,
        };
        let tensors: [(&str, &str, &[usize], _); 2] =
            [("odd", dtype, &[shape], vec![0; bytes]), ("w", "F32", &[1], vec![0; 4])];
        let expected = format!(
            "tensor `odd`: expected F32, F64, F16 or BF16 to cast, got {dtype}; --skip leaves a tensor as it is"
        );
        fails_with(&tensors, "", &expected);
        fails_with(&tensors, "--only d", &expected);
        succeeds(path, "cast in out --seed 1 --skip odd");
        succeeds(path, "cast in out --seed 1 --only w");
        fs::remove_file(path.join("out")).unwrap();
    }
    let scale: [(&str, &str, &[usize], _); 2] = [("w", "F32", &[1], vec![0; 4]), ("w_scale", "I8", &[1], vec![0])];
    fails_with(
        &scale,
        "--to e4m3",
        "tensor `w`: expected no tensor `w_scale` beside it, for its scale takes that name, got one",
    );
    succeeds(path, "cast in out --seed 1 --to e4m3 --scale none");
    fs::remove_file(path.join("out")).unwrap();
    // Two names with one FNV-1a hash.
    let [a, b] = ["8yn0iYCKYHlIj4-BwPqk", "GReLUrM4wMqfg9yzV3KQ"];
    assert_eq!(halfulp::random::tensor_id(a), halfulp::random::tensor_id(b));
    let twins: [(&str, &str, &[usize], _); 2] = [(a, "F32", &[1], vec![0; 4]), (b, "F32", &[1], vec![0; 4])];
    fails_with(&twins, "", &format!("tensors `{a}` and `{b}`: expected names with different stream ids, got one id"));
    succeeds(path, "cast in out --round nearest");
    succeeds(path, "cast in out --seed 1 --skip ^8");
}

/// What stands at OUT stays until the cast is complete, and then gives way to a file with the usual permissions.
#[test]
fn out_is_replaced_at_the_end() {
    let directory = workplace();
    let path = directory.path();
    fs::write(path.join("out"), "precious").unwrap();
    fails(path, "cast in.safetensors out --seed 1 --to e2m1 --overflow ieee");
    fails(path, "cast missing out --seed 1");
    assert_eq!(fs::read(path.join("out")).unwrap(), b"precious");
    succeeds(path, "cast in.safetensors out --seed 1");
    read(&path.join("out"));
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        fs::write(path.join("usual"), "").unwrap();
        let [out, usual] = ["out", "usual"].map(|name| fs::metadata(path.join(name)).unwrap().permissions().mode());
        assert_eq!(out, usual);
    }
}

/// A link at OUT is replaced, not what it points to.
#[cfg(unix)]
#[test]
fn a_link_is_replaced() {
    let directory = workplace();
    let path = directory.path();
    fs::write(path.join("elsewhere"), "precious").unwrap();
    std::os::unix::fs::symlink("elsewhere", path.join("out")).unwrap();
    std::os::unix::fs::symlink("nothing", path.join("dangling")).unwrap();
    for out in ["out", "dangling"] {
        succeeds(path, &format!("cast in.safetensors {out} --seed 1"));
        assert!(fs::symlink_metadata(path.join(out)).unwrap().is_file());
    }
    assert_eq!(fs::read(path.join("elsewhere")).unwrap(), b"precious");
}

/// A size limit, which anyone can set, stands for a full disk: the write fails half-way.
#[cfg(unix)]
#[test]
fn no_room_left() {
    let directory = TempDir::new().unwrap();
    let path = directory.path();
    write(&path.join("in"), &[("w", "F32", &[100_000], vec![0; 400_000])], Value::Null, 0);
    let before = listing(path);
    let script = "ulimit -f 8; exec \"$0\" cast in out --seed 1";
    let output = Command::new("sh").args(["-c", script, HALFULP]).current_dir(path).output().unwrap();
    let error = failed(&output, script);
    assert!(error.contains("OUT: expected room for 200") && error.contains("writing `out`: File too large"), "{error}");
    assert_eq!(listing(path), before);
}

/// A disk that is full in truth, where a user may mount one of 64 kB for himself.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk() {
    let directory = TempDir::new().unwrap();
    let path = directory.path();
    write(&path.join("in"), &[("w", "F32", &[100_000], vec![0; 400_000])], Value::Null, 0);
    fs::create_dir(path.join("disk")).unwrap();
    let script = "mount -t tmpfs -o size=64k tmpfs disk || exit 77; echo precious > disk/out
        \"$0\" cast in disk/out --seed 1; code=$?; ls -A disk >&2; cat disk/out >&2; exit $code";
    let output = Command::new("unshare").args(["-r", "-m", "sh", "-c", script, HALFULP]).current_dir(path).output();
    match output {
        Ok(output) if text(&output.stderr).starts_with("halfulp: ") => {
            let lines: Vec<&str> = text(&output.stderr).lines().collect();
            assert_eq!((output.status.code(), &lines[1..]), (Some(2), &["out", "precious"][..]));
            assert!(lines[0].contains("writing `disk/out`: No space left on device"), "{}", lines[0]);
        }
        _ => eprintln!("skipped: no mount of one's own here; no_room_left stands for it"),
    }
}

/// Ctrl-C, termination and hang-up leave nothing behind; a hang-up that is to be ignored is.
#[cfg(target_os = "linux")]
#[test]
fn interrupted() {
    let directory = TempDir::new().unwrap();
    let path = directory.path();
    // Zeros that take no room: of four gigabytes, so that a signal comes before the end on a busy machine, too.
    let zeros = |elements: usize| {
        write(&path.join("in"), &[("w", "F64", &[elements], vec![])], Value::Null, 0);
        let header = text(&fs::read(path.join("in")).unwrap()[8..]).replace("[0,0]", &format!("[0,{}]", elements * 8));
        fs::write(path.join("in"), [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat()).unwrap();
        let file = fs::OpenOptions::new().write(true).open(path.join("in")).unwrap();
        file.set_len((8 + header.len() + elements * 8) as u64).unwrap();
    };
    zeros(1 << 29);
    fs::write(path.join("out"), "precious").unwrap();

    let names = || fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let signalled = |signal: &str, script: &str| {
        let mut command = Command::new("sh");
        command.args(["-c", script, HALFULP]).current_dir(path);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        while !names().any(|name| name.starts_with(".halfulp-")) {
            assert!(child.try_wait().unwrap().is_none(), "it ended before it could be interrupted");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        assert!(Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap().success());
        child.wait_with_output().unwrap()
    };
    // A shell has what it starts in the background ignore some from the start, and a program leaves it at that.
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
    let ignored = u64::from_str_radix(ignored.trim(), 16).unwrap();
    let script = "exec \"$0\" cast in out --seed 1 --to e2m1 --threads 1";
    for (signal, number) in [("-INT", 2), ("-TERM", 15), ("-HUP", 1)] {
        if ignored >> (number - 1) & 1 == 1 {
            eprintln!("skipped: {signal}, which is ignored here");
            continue;
        }
        let error = failed(&signalled(signal, script), signal);
        assert_eq!(error, "halfulp: interrupted; OUT is as it was\n");
        assert_eq!(names().count(), 2, "{signal}");
        assert_eq!(fs::read(path.join("out")).unwrap(), b"precious");
    }
    zeros(1 << 26);
    let output = signalled("-HUP", &format!("trap '' HUP; {script}"));
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert_eq!(names().count(), 2);
}

/// Whole processes on files with a byte changed: exit code 0 or 2, one line, nothing left over. The bin's own tests change
/// many more.
#[test]
fn changed_files() {
    let directory = workplace();
    let path = directory.path();
    let whole = fs::read(path.join("in.safetensors")).unwrap();
    let cases = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(64u32).min(1000);
    for case in 0..cases {
        let hash = halfulp::random::sr_states_hash(case) as usize;
        let mut file = whole.clone();
        let at = hash % file.len().min(900);
        match case % 4 {
            0 => file[at] = (hash >> 16) as u8,
            1 => file[at] ^= 1 << (hash >> 24 & 7),
            2 => drop(file.remove(at)),
            _ => file.truncate(at),
        }
        fs::write(path.join("changed"), file).unwrap();
        let output = halfulp(path, "cast changed out --to e4m3 --seed 1");
        match output.status.code() {
            Some(0) => drop(read(&path.join("out"))),
            _ => drop(failed(&output, &format!("case {case}"))),
        }
        let _ = fs::remove_file(path.join("out"));
        assert_eq!(listing(path).len(), 2);
    }
}

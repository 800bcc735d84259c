//! Signals that would otherwise leave an unfinished file behind.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag::register;

/// From here on Ctrl-C, termination and hang-up raise a flag, which work looks at between chunks, in place of ending the
/// process; and a write beyond the file size limit is an error like any other.
pub(crate) fn catch() -> io::Result<Arc<AtomicBool>> {
    let raised = Arc::new(AtomicBool::new(false));
    let mut signals = vec![SIGINT, SIGTERM];
    #[cfg(unix)]
    {
        signals.push(signal_hook::consts::SIGHUP);
        register(signal_hook::consts::SIGXFSZ, Arc::default())?;
    }
    // What `nohup` or a shell's `&` had the process ignore stays ignored.
    let ignored = ignored();
    for signal in signals.into_iter().filter(|signal| ignored >> (signal - 1) & 1 == 0) {
        register(signal, Arc::clone(&raised))?;
    }
    Ok(raised)
}

/// The set of ignored signals, where the system says so in a file; bit 0 is signal 1.
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

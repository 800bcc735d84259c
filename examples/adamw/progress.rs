//! The progress bar.

use std::io::{self, IsTerminal};

use indicatif::style::TemplateError;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Of so many steps, on stderr if that is a terminal.
pub(crate) fn progress_bar(steps: u64) -> Result<ProgressBar, TemplateError> {
    let target = if io::stderr().is_terminal() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
    let bar = ProgressBar::with_draw_target(Some(steps), target);
    bar.set_style(ProgressStyle::with_template("{msg:24} {wide_bar} {pos}/{len} steps, {eta} left")?);
    Ok(bar)
}

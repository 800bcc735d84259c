//! What can go wrong, by the argument that it hangs on.

use std::io;
use std::path::{Path, PathBuf};

use halfulp::optim::checkpoint::CheckpointError;
use halfulp::optim::{NormError, OptimError, ResetError};
use indicatif::style::TemplateError;

#[derive(Debug, thiserror::Error)]
pub(crate) enum TrainError {
    /// A word of the command line that is no argument.
    #[error("{got}: unknown; {usage}")]
    Unknown { got: String, usage: &'static str },
    /// An argument without its value, or with one that it can't have.
    #[error("{argument}: expected {expected}, got {got}")]
    Argument { argument: &'static str, expected: &'static str, got: String },
    /// An argument that shapes a training which is already under way.
    #[error("{argument}: not with --resume, which goes on as the training began")]
    Fixed { argument: &'static str },
    /// The file system refused.
    #[error("{argument}: could not {action} {}: {source}", path.display())]
    Io { argument: &'static str, action: &'static str, path: PathBuf, source: io::Error },
    /// The optimizer's part of a checkpoint.
    #[error("{argument}: {}: {source}", path.display())]
    Optimizer { argument: &'static str, path: PathBuf, source: CheckpointError },
    /// The rest of a checkpoint.
    #[error("--resume: {}: expected {expected}, got {got}", path.display())]
    Saved { path: PathBuf, expected: String, got: String },
    /// Training that leads nowhere.
    #[error("step {step}: no finite gradients in {skipped} steps on end; try a smaller --lr")]
    Diverged { step: u64, skipped: u64 },
    #[error("digits: {0}")]
    Digits(String),
    #[error("digest: {0}")]
    Digest(&'static str),
    #[error("curves: {0}")]
    Picture(crate::Error),
    #[error(transparent)]
    Bar(#[from] TemplateError),
    #[error(transparent)]
    Optim(#[from] OptimError),
    #[error(transparent)]
    Norm(#[from] NormError),
    #[error(transparent)]
    Reset(#[from] ResetError),
}

impl TrainError {
    pub(crate) fn io(argument: &'static str, path: &Path, action: &'static str, source: io::Error) -> Self {
        Self::Io { argument, action, path: path.into(), source }
    }

    pub(crate) fn saved(path: &Path, expected: impl Into<String>, got: impl Into<String>) -> Self {
        Self::Saved { path: path.into(), expected: expected.into(), got: got.into() }
    }
}

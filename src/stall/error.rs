//! What the model refuses.

/// An argument outside its range. NaN lies outside every range.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum StallError {
    /// A number that is none of those expected.
    #[error("{argument}: expected {expected}, got {got}")]
    Range {
        /// Name of the argument.
        argument: &'static str,
        /// Its range.
        expected: &'static str,
        /// What came.
        got: f64,
    },
}

/// `Ok` where `holds`, which says that `got` lies in the range that `expected` names.
pub(super) fn check(holds: bool, argument: &'static str, expected: &'static str, got: f64) -> Result<(), StallError> {
    if holds { Ok(()) } else { Err(StallError::Range { argument, expected, got }) }
}

//! Fork and join over the current rayon pool, or in turn without the feature `parallel`.

#[cfg(feature = "parallel")]
pub(crate) use rayon::join;

/// Runs both, one after the other.
#[cfg(not(feature = "parallel"))]
pub(crate) fn join<A, B>(a: impl FnOnce() -> A, b: impl FnOnce() -> B) -> (A, B) {
    (a(), b())
}

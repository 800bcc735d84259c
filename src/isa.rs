//! CPU levels: one body, compiled for each, chosen at run time. The bits do not depend on it.

use core::fmt;

/// An instruction-set level that this CPU was found to have.
///
/// A value is a proof: the constructors hand out levels of this machine alone. Casts choose the best by themselves;
/// [`Cast::isa`](crate::cast::Cast::isa) names one to test or time it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Isa(pub(crate) Level);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Level {
    Baseline,
    #[cfg(all(feature = "std", target_arch = "x86_64"))]
    Avx2,
    #[cfg(all(feature = "std", target_arch = "x86_64"))]
    Avx512,
}

impl Isa {
    /// What the crate was compiled for (SSE2 on x86-64, NEON on AArch64, unless more was asked of the compiler).
    pub const BASELINE: Self = Self(Level::Baseline);

    /// The levels that this CPU has, the best last.
    pub fn available() -> impl Iterator<Item = Self> {
        #[cfg(all(feature = "std", target_arch = "x86_64"))]
        let more = {
            let avx2 =
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("bmi2") && is_x86_feature_detected!("fma");
            let avx512 = avx2
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl");
            [avx2.then_some(Self(Level::Avx2)), avx512.then_some(Self(Level::Avx512))]
        };
        #[cfg(not(all(feature = "std", target_arch = "x86_64")))]
        let more = [None, None];
        core::iter::once(Self::BASELINE).chain(more.into_iter().flatten())
    }

    /// The best level that this CPU has.
    #[must_use]
    pub fn best() -> Self {
        Self::available().last().unwrap_or(Self::BASELINE)
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self.0 {
            Level::Baseline => "baseline",
            #[cfg(all(feature = "std", target_arch = "x86_64"))]
            Level::Avx2 => "avx2",
            #[cfg(all(feature = "std", target_arch = "x86_64"))]
            Level::Avx512 => "avx512",
        })
    }
}

/// Work that is compiled for every level. `run`, and all that it calls, must be `#[inline(always)]`.
pub(crate) trait Kernel {
    type Output;
    fn run(self) -> Self::Output;
}

/// Runs a kernel at a level.
pub(crate) fn at_level<K: Kernel>(isa: Isa, kernel: K) -> K::Output {
    #[cfg(all(feature = "std", target_arch = "x86_64"))]
    {
        #[target_feature(enable = "avx2,bmi2,fma")]
        fn avx2<K: Kernel>(kernel: K) -> K::Output {
            kernel.run()
        }
        #[target_feature(enable = "avx2,bmi2,fma,avx512f,avx512bw,avx512dq,avx512vl")]
        fn avx512<K: Kernel>(kernel: K) -> K::Output {
            kernel.run()
        }
        match isa.0 {
            Level::Baseline => {}
            // SAFETY: an `Isa` above the baseline exists only where the CPU was found to have its features.
            Level::Avx2 => return unsafe { avx2(kernel) },
            // SAFETY: as above.
            Level::Avx512 => return unsafe { avx512(kernel) },
        }
    }
    let _ = isa;
    kernel.run()
}

//! Power-of-two scales: `value = code * 2^k`.

use super::Format;

/// The scale exponent of a tensor or block whose largest magnitude is `amax`: the smallest integer `k` with
/// `amax <= max * 2^k`, clamped to [-126, 127]; 0 (scale 1) for `amax = 0`.
///
/// Such a scale is applied in the exponent, so that scaling never rounds: every stored value decodes as `code * 2^k`. Up to
/// `max * 2^127`, which is above every f32, nothing overflows; an f64 beyond does, and one far below `2^-126` becomes zero.
///
/// # Panics
/// If `amax` is negative, infinite or NaN: non-finite values don't enter a largest magnitude.
///
/// ```
/// use halfulp::{Format, format::power_of_two_scale};
/// assert_eq!(power_of_two_scale(Format::E4M3, 448.0), 0);
/// assert_eq!(power_of_two_scale(Format::E4M3, 449.0), 1);
/// assert_eq!(power_of_two_scale(Format::E4M3, 1.0), -8);
/// assert_eq!(power_of_two_scale(Format::E4M3, 0.0), 0);
/// ```
#[must_use]
pub fn power_of_two_scale(format: Format, amax: f64) -> i32 {
    assert!(amax.is_finite() && amax.is_sign_positive(), "amax: expected a finite magnitude, got {amax}");
    if amax == 0.0 { 0 } else { ceil_exponent(format, amax) }
}

/// floor(log2) of a positive normal number from its bits. Zero and subnormals come out far below every scale.
fn exponent(x: f64) -> i32 {
    (x.to_bits() >> 52) as i32 - 1023
}

/// The smallest `k` with `amax <= max * 2^k`, clamped to [-126, 127]; of zero, the smallest there is.
pub(super) fn ceil_exponent(format: Format, amax: f64) -> i32 {
    let fraction = |x: f64| x.to_bits() & ((1 << 52) - 1);
    let max = format.max();
    let k = exponent(amax) - exponent(max) + i32::from(fraction(amax) > fraction(max));
    k.clamp(-126, 127)
}

/// OCP MX's `floor(log2(amax)) - floor(log2(max))`, clamped to [-127, 127].
pub(super) fn floor_exponent(format: Format, amax: f64) -> i32 {
    (exponent(amax) - exponent(format.max())).clamp(-127, 127)
}

/// `2^k` for `k` from -127 to 127.
pub(super) fn power_of_two(k: i32) -> f32 {
    f32::from_bits(if k > -127 { ((k + 127) as u32) << 23 } else { 1 << 22 })
}

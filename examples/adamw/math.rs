//! Arithmetic of small networks in plain f32: sums in a fixed order, so that every machine computes the same bits.

/// Turns logits into the gradient of the mean cross-entropy; returns its sum, and how often the largest logit is right.
pub(crate) fn cross_entropy(logits: &mut [f32], classes: usize, labels: &[u8]) -> (f64, usize) {
    let (mut sum, mut right) = (0.0, 0);
    for (row, &label) in logits.chunks_exact_mut(classes).zip(labels) {
        let label = usize::from(label);
        let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        right += usize::from(row[label] == largest);
        let own = f64::from(row[label] - largest);
        row.iter_mut().for_each(|y| *y = libm::expf(*y - largest));
        let total: f32 = row.iter().sum();
        sum += libm::log(total.into()) - own;
        row.iter_mut().for_each(|y| *y /= total * labels.len() as f32);
        row[label] -= 1.0 / labels.len() as f32;
    }
    (sum, right)
}

/// Adds a multiple.
pub(crate) fn add_scaled(to: &mut [f32], factor: f32, from: &[f32]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to += factor * from;
    }
}

/// Eight sums side by side, then one.
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0; 8];
    for (a, b) in a.chunks(8).zip(b.chunks(8)) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += a * b;
        }
    }
    sums.iter().sum()
}

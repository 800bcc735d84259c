//! A perceptron with two hidden layers, forward and backward in plain f32: sums in a fixed order, `tanh` and `exp` from
//! `libm` in Rust, so that every machine computes the same bits.

use halfulp::Draw;
use halfulp::random::Draws;

use crate::data::{INPUTS, Images};
use crate::math::{add_scaled, cross_entropy, dot};

/// Name of the weights, name of the biases, inputs, outputs.
const LAYERS: [(&str, &str, usize, usize); 3] = [
    ("hidden1.weight", "hidden1.bias", INPUTS, 128),
    ("hidden2.weight", "hidden2.bias", 128, 64),
    ("output.weight", "output.bias", 64, CLASSES),
];
const CLASSES: usize = 10;

/// Names of the tensors, weights and biases in turn.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    LAYERS.into_iter().flat_map(|(weight, bias, ..)| [weight, bias])
}

/// Weights uniform within 1 over the root of the inputs, biases zero. A weight stands at `input * outputs + output`.
pub(crate) fn initial(seed: u64) -> Vec<Vec<f32>> {
    let layer = |(weight, _, inputs, outputs): (&str, &str, usize, usize)| {
        let mut draws = vec![0; inputs * outputs];
        Draw::seeded(seed).named(weight).fill32(0, &mut draws);
        let scale = 1.0 / (inputs as f64).sqrt();
        let weights = draws.iter().map(|&r| ((f64::from(r) / f64::from(1u32 << 31) - 1.0) * scale) as f32).collect();
        [weights, vec![0.0; outputs]]
    };
    LAYERS.into_iter().flat_map(layer).collect()
}

/// What each layer puts out, row by row of the batch; of the last one, the logits.
fn forward(tensors: &[Vec<f32>], pixels: &[f32]) -> [Vec<f32>; 3] {
    let mut outputs = [const { Vec::new() }; 3];
    for (k, (_, _, inputs, width)) in LAYERS.into_iter().enumerate() {
        let input = if k == 0 { pixels } else { &*outputs[k - 1] };
        let (weights, biases) = (&tensors[2 * k], &tensors[2 * k + 1]);
        let mut output = biases.repeat(input.len() / inputs);
        for (input, output) in input.chunks_exact(inputs).zip(output.chunks_exact_mut(width)) {
            for (x, weights) in input.iter().zip(weights.chunks_exact(width)) {
                add_scaled(output, *x, weights);
            }
        }
        if k + 1 < LAYERS.len() {
            output.iter_mut().for_each(|y| *y = libm::tanhf(*y));
        }
        outputs[k] = output;
    }
    outputs
}

/// Mean cross-entropy and share of right answers.
pub(crate) fn evaluate(tensors: &[Vec<f32>], images: &Images) -> (f64, f64) {
    let [_, _, mut logits] = forward(tensors, &images.pixels);
    let (sum, right) = cross_entropy(&mut logits, CLASSES, &images.digits);
    let n = images.digits.len() as f64;
    (sum / n, right as f64 / n)
}

/// Gradients of the mean cross-entropy of a batch, and that mean.
pub(crate) fn gradients(tensors: &[Vec<f32>], batch: &Images) -> (Vec<Vec<f32>>, f64) {
    let mut grads: Vec<Vec<f32>> = tensors.iter().map(|tensor| vec![0.0; tensor.len()]).collect();
    let [first, second, mut delta] = forward(tensors, &batch.pixels);
    let (sum, _) = cross_entropy(&mut delta, CLASSES, &batch.digits);
    let layer_inputs = [&batch.pixels, &first, &second];
    for (k, (_, _, inputs, width)) in LAYERS.into_iter().enumerate().rev() {
        let input = layer_inputs[k];
        for (input, delta) in input.chunks_exact(inputs).zip(delta.chunks_exact(width)) {
            for (x, grads) in input.iter().zip(grads[2 * k].chunks_exact_mut(width)) {
                add_scaled(grads, *x, delta);
            }
            add_scaled(&mut grads[2 * k + 1], 1.0, delta);
        }
        if k == 0 {
            break;
        }
        let mut below = Vec::with_capacity(input.len());
        for (input, delta) in input.chunks_exact(inputs).zip(delta.chunks_exact(width)) {
            let weights = tensors[2 * k].chunks_exact(width);
            below.extend(input.iter().zip(weights).map(|(h, weights)| dot(weights, delta) * (1.0 - h * h)));
        }
        delta = below;
    }
    (grads, sum / batch.digits.len() as f64)
}

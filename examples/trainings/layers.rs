//! Layers, forward and backward over a batch. Parameters are slices of a list: weights and biases in turn.

use crate::data::SIDE;
use crate::math::{add_scaled, dot};

#[derive(Clone, Copy)]
pub(crate) enum Layer {
    /// A weight stands at `input * outputs + output`.
    Dense {
        inputs: usize,
        outputs: usize,
    },
    /// 3 x 3 windows over one image of 8 x 8; a weight stands at `place * channels + channel`, an output at
    /// `(row * 6 + column) * channels + channel`.
    Convolution {
        channels: usize,
    },
    Tanh,
    Relu,
}

/// Side of a window, and of the image that windows make.
const WINDOW: usize = 3;
const WINDOWS: usize = SIDE - WINDOW + 1;

impl Layer {
    /// Values that come in, weights, biases; none of the last two for functions.
    pub(crate) fn shape(self) -> Option<[usize; 3]> {
        match self {
            Self::Dense { inputs, outputs } => Some([inputs, inputs * outputs, outputs]),
            Self::Convolution { channels } => Some([WINDOW * WINDOW, WINDOW * WINDOW * channels, channels]),
            Self::Tanh | Self::Relu => None,
        }
    }

    pub(crate) fn forward(self, parameters: &[Vec<f32>], input: &[f32]) -> Vec<f32> {
        match self {
            Self::Dense { inputs, outputs } => {
                let (weights, biases) = (&parameters[0], &parameters[1]);
                let mut output = biases.repeat(input.len() / inputs);
                for (input, output) in input.chunks_exact(inputs).zip(output.chunks_exact_mut(outputs)) {
                    for (x, weights) in input.iter().zip(weights.chunks_exact(outputs)) {
                        add_scaled(output, *x, weights);
                    }
                }
                output
            }
            Self::Convolution { channels } => {
                let (weights, biases) = (&parameters[0], &parameters[1]);
                let images = input.len() / (SIDE * SIDE);
                let mut output = biases.repeat(images * WINDOWS * WINDOWS);
                for (output, pixels) in output.chunks_exact_mut(channels).zip(windows(images)) {
                    for (pixel, weights) in pixels.zip(weights.chunks_exact(channels)) {
                        add_scaled(output, input[pixel], weights);
                    }
                }
                output
            }
            Self::Tanh => input.iter().map(|&x| libm::tanhf(x)).collect(),
            Self::Relu => input.iter().map(|&x| x.max(0.0)).collect(),
        }
    }

    /// Adds to the gradients of the parameters; gives the gradient of the input, of which a convolution, which stands first,
    /// gives none.
    pub(crate) fn backward(
        self,
        parameters: &[Vec<f32>],
        gradients: &mut [Vec<f32>],
        [input, output, delta]: [&[f32]; 3],
    ) -> Vec<f32> {
        match self {
            Self::Dense { inputs, outputs } => {
                let mut below = Vec::with_capacity(input.len());
                for (input, delta) in input.chunks_exact(inputs).zip(delta.chunks_exact(outputs)) {
                    for (x, gradients) in input.iter().zip(gradients[0].chunks_exact_mut(outputs)) {
                        add_scaled(gradients, *x, delta);
                    }
                    add_scaled(&mut gradients[1], 1.0, delta);
                    below.extend(parameters[0].chunks_exact(outputs).map(|weights| dot(weights, delta)));
                }
                below
            }
            Self::Convolution { channels } => {
                let images = input.len() / (SIDE * SIDE);
                for (delta, pixels) in delta.chunks_exact(channels).zip(windows(images)) {
                    for (pixel, gradients) in pixels.zip(gradients[0].chunks_exact_mut(channels)) {
                        add_scaled(gradients, input[pixel], delta);
                    }
                    add_scaled(&mut gradients[1], 1.0, delta);
                }
                Vec::new()
            }
            Self::Tanh => output.iter().zip(delta).map(|(y, delta)| delta * (1.0 - y * y)).collect(),
            Self::Relu => output.iter().zip(delta).map(|(y, delta)| if *y > 0.0 { *delta } else { 0.0 }).collect(),
        }
    }
}

/// The pixels of each window of each image.
fn windows(images: usize) -> impl Iterator<Item = impl Iterator<Item = usize>> {
    let corners = (0..images)
        .flat_map(|image| (0..WINDOWS * WINDOWS).map(move |k| image * SIDE * SIDE + k / WINDOWS * SIDE + k % WINDOWS));
    corners.map(|corner| (0..WINDOW * WINDOW).map(move |k| corner + k / WINDOW * SIDE + k % WINDOW))
}

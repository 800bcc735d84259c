//! Small models on real data: handwritten digits and the text of a licence.

use halfulp::Draw;
use halfulp::random::Draws;

use crate::data::{Batches, INPUTS, Images, below};
use crate::layers::Layer;
use crate::math::{add_scaled, cross_entropy, dot};

/// Something to train: parameters in tensors, and a gradient for each batch.
pub(crate) trait Model {
    fn initial(&self) -> Vec<Vec<f32>>;
    /// Gradients of the mean loss over the next batch, and that loss.
    fn next(&mut self, parameters: &[Vec<f32>]) -> (Vec<Vec<f32>>, f64);
}

/// A model by name, with the data that it sees.
#[derive(Clone, Copy)]
pub(crate) struct Named {
    pub(crate) name: &'static str,
    pub(crate) data: &'static str,
    pub(crate) make: fn(&Images) -> Box<dyn Model + '_>,
}

pub(crate) const ALL: [Named; 7] = [
    Named {
        name: "softmax regression",
        data: "digits",
        make: |digits| classifier(digits, vec![Layer::Dense { inputs: INPUTS, outputs: 10 }]),
    },
    Named {
        name: "perceptron, 128 and 64 tanh",
        data: "digits",
        make: |digits| {
            let widths = [(INPUTS, 128), (128, 64), (64, 10)];
            classifier(digits, stack(&widths, Layer::Tanh))
        },
    },
    Named {
        name: "perceptron, 256 ReLU",
        data: "digits",
        make: |digits| classifier(digits, stack(&[(INPUTS, 256), (256, 10)], Layer::Relu)),
    },
    Named {
        name: "convolution, 8 channels",
        data: "digits",
        make: |digits| {
            let output = Layer::Dense { inputs: 8 * 36, outputs: 10 };
            classifier(digits, vec![Layer::Convolution { channels: 8 }, Layer::Relu, output])
        },
    },
    Named {
        name: "autoencoder, 24 tanh",
        data: "digits",
        make: |digits| {
            let layers = stack(&[(INPUTS, 24), (24, INPUTS)], Layer::Tanh);
            Box::new(Network { layers, source: Source::Reconstruction(Batches::new(digits, SEED)) })
        },
    },
    Named {
        name: "next letter, 64 tanh",
        data: "licence text",
        make: |_| {
            let layers = stack(&[(CONTEXT * SYMBOLS, 64), (64, SYMBOLS)], Layer::Tanh);
            Box::new(Network { layers, source: Source::Letters(Letters::new()) })
        },
    },
    Named { name: "matrix factors of rank 8", data: "digits", make: |digits| Box::new(Factors { digits, served: 0 }) },
];

const SEED: u64 = 0;
/// Examples of a batch.
const BATCH: usize = 32;

/// Uniform numbers within `1 / sqrt(inputs)`.
fn uniform(name: &str, inputs: usize, n: usize) -> Vec<f32> {
    let mut draws = vec![0; n];
    Draw::seeded(SEED).named(name).fill32(0, &mut draws);
    let scale = 1.0 / (inputs as f64).sqrt();
    draws.iter().map(|&r| ((f64::from(r) / f64::from(1u32 << 31) - 1.0) * scale) as f32).collect()
}

/// Dense layers with a function between them.
fn stack(widths: &[(usize, usize)], function: Layer) -> Vec<Layer> {
    let dense = widths.iter().map(|&(inputs, outputs)| Layer::Dense { inputs, outputs });
    let mut layers: Vec<Layer> = dense.flat_map(|dense| [dense, function]).collect();
    layers.pop();
    layers
}

fn classifier(digits: &Images, layers: Vec<Layer>) -> Box<dyn Model + '_> {
    Box::new(Network { layers, source: Source::Digits(Batches::new(digits, SEED)) })
}

/// Layers with a loss.
struct Network<'a> {
    layers: Vec<Layer>,
    source: Source<'a>,
}

/// Where batches come from, and what is asked of the network.
enum Source<'a> {
    /// Images, to be told apart: cross-entropy.
    Digits(Batches<'a>),
    /// Images, to be drawn again: half the squared error of an image.
    Reconstruction(Batches<'a>),
    /// Letters, of which the next is to be told: cross-entropy.
    Letters(Letters),
}

impl Source<'_> {
    /// Inputs and labels.
    fn next(&mut self) -> (Vec<f32>, Vec<u8>) {
        match self {
            Self::Digits(batches) | Self::Reconstruction(batches) => {
                let batch = batches.next(BATCH);
                (batch.pixels, batch.digits)
            }
            Self::Letters(letters) => letters.next(),
        }
    }

    /// Turns outputs into their gradient; gives the mean loss.
    fn loss(&self, inputs: &[f32], labels: &[u8], outputs: &mut [f32]) -> f64 {
        let n = labels.len() as f64;
        if let Self::Reconstruction(_) = self {
            outputs.iter_mut().zip(inputs).for_each(|(y, x)| *y -= x);
            let sum: f64 = outputs.iter().map(|error| 0.5 * f64::from(error * error)).sum();
            outputs.iter_mut().for_each(|error| *error /= n as f32);
            return sum / n;
        }
        let classes = outputs.len() / labels.len();
        cross_entropy(outputs, classes, labels).0 / n
    }
}

impl Model for Network<'_> {
    fn initial(&self) -> Vec<Vec<f32>> {
        let mut parameters = Vec::new();
        for [inputs, weights, biases] in self.layers.iter().filter_map(|layer| layer.shape()) {
            let name = format!("weights {}", parameters.len());
            parameters.extend([uniform(&name, inputs, weights), vec![0.0; biases]]);
        }
        parameters
    }

    fn next(&mut self, parameters: &[Vec<f32>]) -> (Vec<Vec<f32>>, f64) {
        let (inputs, labels) = self.source.next();
        // Values before the first layer and after each; parameters before each layer.
        let (mut values, mut firsts) = (vec![inputs], vec![0]);
        for (layer, k) in self.layers.iter().zip(0..) {
            let first = firsts[k];
            values.push(layer.forward(&parameters[first..], &values[k]));
            firsts.push(first + if layer.shape().is_some() { 2 } else { 0 });
        }
        let mut delta = values[self.layers.len()].clone();
        let loss = self.source.loss(&values[0], &labels, &mut delta);
        let mut gradients: Vec<Vec<f32>> = parameters.iter().map(|tensor| vec![0.0; tensor.len()]).collect();
        for (k, layer) in self.layers.iter().enumerate().rev() {
            let first = firsts[k];
            let around = [&*values[k], &*values[k + 1], &*delta];
            delta = layer.backward(&parameters[first..], &mut gradients[first..], around);
        }
        (gradients, loss)
    }
}

/// Letters before the one to be told.
const CONTEXT: usize = 6;
/// A to Z, and what stands between words.
const SYMBOLS: usize = 27;

/// Places in a text, in random order.
struct Letters {
    text: Vec<u8>,
    served: u64,
}

impl Letters {
    fn new() -> Self {
        let mut text: Vec<u8> = include_str!("../../LICENSE-APACHE")
            .bytes()
            .map(|byte| if byte.is_ascii_alphabetic() { byte.to_ascii_lowercase() - b'a' } else { 26 })
            .collect();
        text.dedup_by(|next, before| *next == 26 && *before == 26);
        Self { text, served: 0 }
    }

    fn next(&mut self) -> (Vec<f32>, Vec<u8>) {
        self.served += 1;
        let draws = Draw::seeded(SEED).named("places").step(self.served);
        let places = (self.text.len() - CONTEXT) as u64;
        let (mut inputs, mut labels) = (vec![0.0; BATCH * CONTEXT * SYMBOLS], Vec::new());
        for (j, inputs) in inputs.chunks_exact_mut(CONTEXT * SYMBOLS).enumerate() {
            let place = below(draws, j as u64, places);
            for (letter, one_of) in self.text[place..].iter().zip(inputs.chunks_exact_mut(SYMBOLS)) {
                one_of[usize::from(*letter)] = 1.0;
            }
            labels.push(self.text[place + CONTEXT]);
        }
        (inputs, labels)
    }
}

/// Images by pixels as a product of two thin matrices, learned from single entries.
struct Factors<'a> {
    digits: &'a Images,
    served: u64,
}

const RANK: usize = 8;
/// Entries of a batch.
const ENTRIES: u64 = 256;

impl Model for Factors<'_> {
    fn initial(&self) -> Vec<Vec<f32>> {
        let tensor = |name, rows| uniform(name, RANK, RANK * rows);
        vec![tensor("images", self.digits.digits.len()), tensor("pixels", INPUTS)]
    }

    fn next(&mut self, parameters: &[Vec<f32>]) -> (Vec<Vec<f32>>, f64) {
        self.served += 1;
        let draws = Draw::seeded(SEED).named("entries").step(self.served);
        let mut gradients: Vec<Vec<f32>> = parameters.iter().map(|tensor| vec![0.0; tensor.len()]).collect();
        let mut sum = 0.0;
        for j in 0..ENTRIES {
            let entry = below(draws, j, self.digits.pixels.len() as u64);
            let [image, pixel] = [entry / INPUTS, entry % INPUTS].map(|row| row * RANK..(row + 1) * RANK);
            let [u, v] = [&parameters[0][image.clone()], &parameters[1][pixel.clone()]];
            let error = dot(u, v) - self.digits.pixels[entry];
            sum += 0.5 * f64::from(error * error);
            add_scaled(&mut gradients[0][image], error / ENTRIES as f32, v);
            add_scaled(&mut gradients[1][pixel], error / ENTRIES as f32, u);
        }
        (gradients, sum / ENTRIES as f64)
    }
}

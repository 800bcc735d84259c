//! The digits, and the order in which a run sees them.

use halfulp::Draw;
use halfulp::random::Draws;

const CSV: &str = include_str!("../data/digits.csv");
/// Pixels of an image.
pub(crate) const INPUTS: usize = SIDE * SIDE;
/// Images kept for testing: the last of the file.
const TEST: usize = 360;
/// Pixels on a side.
pub(crate) const SIDE: usize = 8;

/// Images, one after another, with values from 0 to 1, and their digits.
#[derive(Default)]
pub(crate) struct Images {
    pub(crate) pixels: Vec<f32>,
    pub(crate) digits: Vec<u8>,
}

impl Images {
    /// Adds an image moved right and down by so many pixels.
    fn push_shifted(&mut self, image: &[f32], [right, down]: [isize; 2], digit: u8) {
        for y in 0..SIDE as isize {
            for x in 0..SIDE as isize {
                let (x, y) = (x - right, y - down);
                let inside = |k: isize| (0..SIDE as isize).contains(&k);
                self.pixels.push(if inside(x) && inside(y) { image[y as usize * SIDE + x as usize] } else { 0.0 });
            }
        }
        self.digits.push(digit);
    }

    fn image(&self, i: usize) -> &[f32] {
        &self.pixels[INPUTS * i..][..INPUTS]
    }
}

/// Images to train on and images to test with.
pub(crate) fn digits() -> Result<[Images; 2], Box<dyn std::error::Error>> {
    let mut all = Images::default();
    for line in CSV.lines().filter(|line| !line.starts_with('#')) {
        let values = line.split(',').map(str::parse).collect::<Result<Vec<u8>, _>>()?;
        let Some((digit, pixels)) = values.split_last().filter(|(_, pixels)| pixels.len() == INPUTS) else {
            return Err(format!("digits: expected {} values, got {}", INPUTS + 1, values.len()).into());
        };
        all.pixels.extend(pixels.iter().map(|&x| f32::from(x) / 16.0));
        all.digits.push(*digit);
    }
    let train = all.digits.len() - TEST;
    let test = Images { pixels: all.pixels.split_off(INPUTS * train), digits: all.digits.split_off(train) };
    Ok([all, test])
}

/// Batches without end: each pass over the images is a new shuffle, and each image moves by up to a pixel either way, so
/// that the network never knows them by heart and its gradients go on. The seed decides both.
pub(crate) struct Batches<'a> {
    images: &'a Images,
    seed: u64,
    epoch: u64,
    left: Vec<usize>,
    served: u64,
}

impl<'a> Batches<'a> {
    pub(crate) fn new(images: &'a Images, seed: u64) -> Self {
        Self::after(images, seed, 0, 0)
    }

    /// Goes on after so many batches of this size.
    pub(crate) fn after(images: &'a Images, seed: u64, served: u64, size: usize) -> Self {
        let n = images.digits.len() as u64;
        let seen = served * size as u64;
        let mut batches = Self { images, seed, epoch: seen / n, left: Vec::new(), served };
        if !seen.is_multiple_of(n) {
            batches.shuffle();
            batches.left.truncate((n - seen % n) as usize);
        }
        batches
    }

    pub(crate) fn next(&mut self, size: usize) -> Images {
        self.served += 1;
        let draws = Draw::seeded(self.seed).named("shift").step(self.served);
        let mut batch = Images::default();
        for j in 0..size as u64 {
            let i = self.left.pop().unwrap_or_else(|| self.shuffle());
            let shift = [2 * j, 2 * j + 1].map(|k| (below(draws, k, 3)) as isize - 1);
            batch.push_shifted(self.images.image(i), shift, self.images.digits[i]);
        }
        batch
    }

    /// A new shuffle, of which the last is returned.
    fn shuffle(&mut self) -> usize {
        self.epoch += 1;
        let draws = Draw::seeded(self.seed).named("shuffle").step(self.epoch);
        let n = self.images.digits.len();
        let mut order: Vec<usize> = (0..n).collect();
        for i in (1..n).rev() {
            order.swap(i, below(draws, i as u64, i as u64 + 1));
        }
        let last = order.pop().unwrap_or(0);
        self.left = order;
        last
    }
}

/// A number below `n` from draw `i`.
pub(crate) fn below(draws: Draw, i: u64, n: u64) -> usize {
    ((u64::from(draws.draw32(i)) * n) >> 32) as usize
}

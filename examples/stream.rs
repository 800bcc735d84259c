//! Random words of a stream on standard output, little-endian, for test suites that read bytes.
//!
//! ```text
//! stream [--stream v1|philox|sr-states] [--order ORDER] [--bits 16|32] [--seed N] [--bytes N]
//! ```
//!
//! A group is eight bytes: four 16-bit or two 32-bit draws of neighbouring elements. The orders, from group 0, step 0,
//! tensor 0 and role 0 on:
//!
//! - `elements`: consecutive groups of one launch;
//! - `steps`: one group over consecutive steps;
//! - `columns`: a window of 16 groups over consecutive steps;
//! - `seeds`, `tensors`: one group over consecutive seeds or tensor ids;
//! - `roles`: each group under all five roles in turn.
//!
//! `sr-states` knows no step, tensor or role: its offset moves on by `2 n` a step (AdamW) and by `n` a tensor or role
//! (m and v), for n = 1,000,003 elements. Without `--bytes` the words do not end.

use std::error::Error;
use std::io::{self, Write};
use std::process::ExitCode;

use halfulp::Draw;
use halfulp::random::{Draws, Role, SrStates, Stream};

#[derive(Clone, Copy)]
enum Order {
    Elements,
    Steps,
    Columns,
    Seeds,
    Tensors,
    Roles,
}

/// Groups of a window.
const WINDOW: u64 = 16;
/// Elements of a tensor of `sr-states`.
const NUMEL: u64 = 1_000_003;
const ROLES: [Role; 5] = [Role::Cast, Role::Parameter, Role::FirstMoment, Role::SecondMoment, Role::ThirdState];

struct Options {
    stream: Option<Stream>,
    order: Order,
    wide: bool,
    seed: u64,
    bytes: u64,
}

impl Options {
    fn parse(mut args: impl Iterator<Item = String>) -> Result<Self, Box<dyn Error>> {
        let mut options =
            Self { stream: Some(Stream::V1), order: Order::Elements, wide: false, seed: 0, bytes: u64::MAX };
        while let Some(name) = args.next() {
            let value = args.next().ok_or_else(|| format!("{name} takes a value"))?;
            let unknown = || format!("{name} {value}: unknown");
            match &*name {
                "--stream" => {
                    options.stream = match &*value {
                        "v1" => Some(Stream::V1),
                        "philox" => Some(Stream::Philox),
                        "sr-states" => None,
                        _ => return Err(unknown().into()),
                    }
                }
                "--order" => {
                    options.order = match &*value {
                        "elements" => Order::Elements,
                        "steps" => Order::Steps,
                        "columns" => Order::Columns,
                        "seeds" => Order::Seeds,
                        "tensors" => Order::Tensors,
                        "roles" => Order::Roles,
                        _ => return Err(unknown().into()),
                    }
                }
                "--bits" => {
                    options.wide = match &*value {
                        "16" => false,
                        "32" => true,
                        _ => return Err(unknown().into()),
                    }
                }
                "--seed" => options.seed = value.parse().map_err(|e| format!("{name} {value}: {e}"))?,
                "--bytes" => options.bytes = value.parse().map_err(|e| format!("{name} {value}: {e}"))?,
                _ => return Err(unknown().into()),
            }
        }
        Ok(options)
    }

    /// The words from place `k` of the order on.
    fn fill(&self, mut k: u64, mut words: &mut [u64]) {
        let run = match self.order {
            Order::Elements => words.len(),
            Order::Columns => WINDOW as usize,
            _ => 1,
        };
        let roles = if self.stream.is_some() { ROLES.len() as u64 } else { 2 };
        while !words.is_empty() {
            // Seed, step, tensor, role; group.
            let ((seed, step, tensor, role), group) = match self.order {
                Order::Elements => ((0, 0, 0, 0), k),
                Order::Steps => ((0, k, 0, 0), 0),
                Order::Columns => ((0, k / WINDOW, 0, 0), k % WINDOW),
                Order::Seeds => ((k, 0, 0, 0), 0),
                Order::Tensors => ((0, 0, k, 0), 0),
                Order::Roles => ((0, 0, 0, k % roles), k / roles),
            };
            let seed = self.seed.wrapping_add(seed);
            let (now, later) = words.split_at_mut(run.min(words.len()));
            match self.stream {
                Some(stream) => {
                    let draw = Draw::seeded(seed).stream(stream).step(step).tensor(tensor);
                    self.groups(draw.role(ROLES[role as usize]), group, now);
                }
                None => {
                    let moves = step.wrapping_mul(2).wrapping_add(tensor).wrapping_add(role);
                    self.groups(SrStates::seeded(seed).advanced(moves.wrapping_mul(NUMEL)), group, now);
                }
            }
            k += now.len() as u64;
            words = later;
        }
    }

    fn groups(&self, draws: impl Draws, group: u64, words: &mut [u64]) {
        if self.wide {
            draws.fill32(2 * group, bytemuck::cast_slice_mut(words));
        } else {
            draws.fill16(4 * group, bytemuck::cast_slice_mut(words));
        }
    }

    fn write(&self, mut out: impl Write) -> io::Result<()> {
        let mut words = vec![0u64; 1 << 15];
        let (mut k, mut left) = (0, self.bytes);
        while left > 0 {
            self.fill(k, &mut words);
            k += words.len() as u64;
            let bytes: &[u8] = bytemuck::cast_slice(&words);
            let bytes = &bytes[..bytes.len().min(usize::try_from(left).unwrap_or(usize::MAX))];
            out.write_all(bytes)?;
            left -= bytes.len() as u64;
        }
        out.flush()
    }
}

fn main() -> ExitCode {
    let options = match Options::parse(std::env::args().skip(1)) {
        Ok(options) => options,
        Err(error) => {
            eprintln!("stream: {error}");
            return ExitCode::from(2);
        }
    };
    match options.write(io::stdout().lock()) {
        // A reader that has enough closes the pipe.
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            eprintln!("stream: {error}");
            ExitCode::FAILURE
        }
        _ => ExitCode::SUCCESS,
    }
}

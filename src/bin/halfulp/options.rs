//! The options of `halfulp cast`, as they are given and with their defaults filled in.

use std::path::PathBuf;

use halfulp::cast::Cast;
use halfulp::round::Overflow;
use halfulp::{Draw, Format};
use regex::Regex;
use serde_json::{Value, json};

use crate::error::Error;

/// Cast the tensors of a safetensors file to a low-precision format
///
/// F32, F64, F16 and BF16 tensors are rounded once each and stored as FORMAT, in safetensors' own dtype where it has one,
/// else as U8 with format and shape in the metadata. Integer and bool tensors, and those not selected, are copied. Without
/// IN and OUT a small model file, halfulp-demo.safetensors, is made and cast.
///
/// The output depends on the input and these options alone: not on threads, nor on which other tensors are cast, for random
/// bits are drawn by seed, tensor name and element. The recipe is added to the metadata. OUT appears, or is replaced, when it
/// is complete. IN must not be changed meanwhile.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// File to read
    #[arg(value_name = "IN.safetensors", requires = "output")]
    pub(crate) input: Option<PathBuf>,
    /// File to write
    #[arg(value_name = "OUT.safetensors")]
    pub(crate) output: Option<PathBuf>,
    /// Target, a name of `halfulp formats` in any case
    #[arg(long, value_name = "FORMAT", default_value = "bf16")]
    to: Format,
    /// Rounding to nearest even, or up with the probability of the fraction passed
    #[arg(long, value_enum, default_value_t = Round::Stochastic)]
    round: Round,
    /// Seed of stochastic rounding, 0 to 2^64 - 1 [required with IN and --round stochastic; else 0; nearest has no use for it]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    seed: Option<u64>,
    /// What becomes of too large values: the largest value, or infinity (NaN where there is none) [default: ieee where FORMAT
    /// has an infinity]
    #[arg(long, value_enum)]
    overflow: Option<OverflowName>,
    /// A power-of-two scale for each tensor, stored as `NAME_scale`: multiply to decode [default: tensor for 8 bits or fewer]
    #[arg(long, value_enum)]
    scale: Option<Scale>,
    /// Cast only tensors in whose name this regular expression is found
    #[arg(long, value_name = "REGEX")]
    only: Option<String>,
    /// Leave tensors in whose name this regular expression is found, also those of --only
    #[arg(long, value_name = "REGEX")]
    skip: Option<String>,
    /// Threads [default: one a core]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) threads: Option<u16>,
}

const EXAMPLES: &str = "\
Examples:
  halfulp cast model.safetensors model-bf16.safetensors --to bf16 --seed 7
  halfulp cast model.safetensors model-e4m3.safetensors --to e4m3 --seed 7 --only 'proj|mlp' --skip bias
  halfulp cast model.safetensors model-fp16.safetensors --to fp16 --round nearest --overflow saturate";

#[derive(Clone, Copy, PartialEq, clap::ValueEnum)]
pub(crate) enum Round {
    Nearest,
    Stochastic,
}

#[derive(Clone, Copy, PartialEq, clap::ValueEnum)]
enum OverflowName {
    Saturate,
    Ieee,
}

#[derive(Clone, Copy, PartialEq, clap::ValueEnum)]
enum Scale {
    None,
    Tensor,
}

/// The options with their defaults filled in.
pub(crate) struct Choices {
    pub(crate) format: Format,
    /// The seed of stochastic rounding.
    pub(crate) seed: Option<u64>,
    pub(crate) overflow: Overflow,
    pub(crate) scaled: bool,
    only: Option<Regex>,
    skip: Option<Regex>,
}

impl Choices {
    pub(crate) fn new(args: &Args) -> Result<Self, Error> {
        let format = args.to;
        let seed = match (args.round, args.seed) {
            (Round::Nearest, _) => None,
            (Round::Stochastic, None) if args.input.is_some() => return Err(Error::NoSeed),
            (Round::Stochastic, seed) => seed.or(Some(0)),
        };
        let overflow = match args.overflow {
            Some(OverflowName::Ieee) if !format.has_nan() => return Err(Error::OnlySaturates(format)),
            Some(OverflowName::Ieee) => Overflow::Ieee,
            Some(OverflowName::Saturate) => Overflow::Saturate,
            None => Overflow::of(format),
        };
        let scaled = match args.scale {
            Some(Scale::Tensor) if format == Format::E8M0 => return Err(Error::ScaleOfScales(format)),
            Some(scale) => scale == Scale::Tensor,
            None => format.bits() <= 8 && format != Format::E8M0,
        };
        let [only, skip] = [("--only", &args.only), ("--skip", &args.skip)]
            .map(|(argument, pattern)| pattern.as_ref().map(|pattern| regex(argument, pattern)).transpose());
        Ok(Self { format, seed, overflow, scaled, only: only?, skip: skip? })
    }

    pub(crate) fn selects(&self, name: &str) -> bool {
        self.only.as_ref().is_none_or(|only| only.is_match(name))
            && !self.skip.as_ref().is_some_and(|skip| skip.is_match(name))
    }

    /// What the bits of the output depend on, besides the input.
    pub(crate) fn recipe(&self) -> Value {
        let mut recipe = json!({
            "crate_version": env!("CARGO_PKG_VERSION"),
            "format": self.format.to_string(),
            "only": self.only.as_ref().map(Regex::as_str),
            "overflow": if self.overflow == Overflow::Ieee { "ieee" } else { "saturate" },
            "round": if self.seed.is_some() { "stochastic" } else { "nearest" },
            "scale": if self.scaled { "tensor" } else { "none" },
            "skip": self.skip.as_ref().map(Regex::as_str),
            "version": "1",
        });
        if let Some(seed) = self.seed {
            recipe["seed"] = seed.to_string().into();
            recipe["stream"] = "1".into();
        }
        recipe
    }

    /// The rounding of a tensor's elements from `first` on.
    pub(crate) fn cast(&self, name: &str, scale: i32, first: u64) -> Cast {
        let cast = match self.seed {
            Some(seed) => Cast::stochastic(Draw::seeded(seed).named(name).at(first)),
            None => Cast::nearest(),
        };
        cast.overflow(self.overflow).scale(scale)
    }
}

fn regex(argument: &'static str, pattern: &str) -> Result<Regex, Error> {
    Regex::new(pattern).map_err(|error| {
        // A syntax error draws the pattern over several lines; the last says what is wrong.
        let text = error.to_string();
        let reason = text.lines().last().unwrap_or_default().trim_start_matches("error: ").into();
        Error::Regex { argument, pattern: pattern.into(), reason }
    })
}

/// A pool of so many threads, or of one a core.
pub(crate) fn pool(threads: Option<u16>) -> Result<rayon::ThreadPool, Error> {
    let threads = threads.map_or(0, usize::from);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
    pool.map_err(|source| Error::Threads { threads, source })
}

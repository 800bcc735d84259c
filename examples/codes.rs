//! Raw little-endian values in, raw codes out: the casts as a filter, for oracles in other languages.
//!
//! ```text
//! codes --from f32|f64 --to FORMAT [--round nearest|stochastic|away|zero|up|down] [--seed N] [--overflow saturate|ieee]
//! codes --from f32|f64 --to FORMAT --round stochastic --bits N [--rule centred|floor|nearest] [--overflow ...]
//! ```
//!
//! Each value on standard input becomes one code on standard output, unpacked: a byte up to 8 bits, two bytes above. The
//! first form is [`Cast`], and its element index counts from the first value. In the second each value is followed by a
//! little-endian `u32` whose low `N` bits are its draw (higher bits must be 0), and [`round`] decides by the rule for few
//! bits. Anything wrong is one line on standard error and exit code 2.

use std::io::{self, ErrorKind, Read, StdinLock, StdoutLock, Write};
use std::process::ExitCode;

use halfulp::cast::Cast;
use halfulp::random::Draws;
use halfulp::round::{FewBits, Mode, Overflow, RandomBits, Source, round};
use halfulp::{Draw, Format};

/// Values read at a time.
const BUFFER: usize = 1 << 20;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn main() -> ExitCode {
    match Options::read(std::env::args().skip(1)).and_then(|options| options.run()) {
        Ok(()) => ExitCode::SUCCESS,
        // The reader has had enough.
        Err(error) if error.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == ErrorKind::BrokenPipe) => {
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("codes: {error}");
            ExitCode::from(2)
        }
    }
}

#[derive(Default)]
struct Options {
    from: Option<String>,
    to: Option<Format>,
    round: Option<String>,
    seed: Option<u64>,
    overflow: Option<Overflow>,
    bits: Option<u32>,
    rule: Option<FewBits>,
}

impl Options {
    fn read(mut args: impl Iterator<Item = String>) -> Result<Self> {
        let mut options = Self::default();
        while let Some(name) = args.next() {
            let value = args.next().ok_or_else(|| format!("{name}: expected a value, got none"))?;
            match name.as_str() {
                "--from" => options.from = Some(value),
                "--to" => options.to = Some(value.parse().map_err(|e| format!("--to: {e}"))?),
                "--round" => options.round = Some(value),
                "--seed" => options.seed = Some(value.parse().map_err(|e| format!("--seed: {e}, got `{value}`"))?),
                "--bits" => options.bits = Some(value.parse().map_err(|e| format!("--bits: {e}, got `{value}`"))?),
                "--overflow" => {
                    options.overflow = Some(match value.as_str() {
                        "saturate" => Overflow::Saturate,
                        "ieee" => Overflow::Ieee,
                        _ => return Err(format!("--overflow: expected saturate or ieee, got `{value}`").into()),
                    });
                }
                "--rule" => {
                    options.rule = Some(match value.as_str() {
                        "centred" => FewBits::Centred,
                        "floor" => FewBits::Floor,
                        "nearest" => FewBits::Nearest,
                        _ => return Err(format!("--rule: expected centred, floor or nearest, got `{value}`").into()),
                    });
                }
                _ => return Err(format!("unknown option `{name}`").into()),
            }
        }
        Ok(options)
    }

    fn run(&self) -> Result<()> {
        let format = self.to.ok_or("--to: expected a format, got none")?;
        let round = self.round.as_deref().unwrap_or("nearest");
        let explicit = self.bits.is_some() || self.rule.is_some();
        if explicit && (round != "stochastic" || self.seed.is_some()) {
            return Err("--bits and --rule: expected --round stochastic and no --seed".into());
        }
        if self.seed.is_some() && round != "stochastic" {
            return Err(format!("--seed: expected --round stochastic, got `{round}`").into());
        }
        match self.from.as_deref() {
            Some("f32") if explicit => self.explicit(format, f32::from_le_bytes),
            Some("f64") if explicit => self.explicit(format, f64::from_le_bytes),
            Some("f32") => self.cast::<f32>(round, format),
            Some("f64") => self.cast::<f64>(round, format),
            Some(other) => Err(format!("--from: expected f32 or f64, got `{other}`").into()),
            None => Err("--from: expected f32 or f64, got none".into()),
        }
    }

    fn cast<S: Source + bytemuck::Pod>(&self, round: &str, format: Format) -> Result<()> {
        let cast = match round {
            "stochastic" => {
                let draw = Draw::seeded(self.seed.unwrap_or(0));
                return self.stream::<S, _>(|first| Cast::stochastic(draw.at(first)), format);
            }
            "nearest" => Cast::nearest(),
            "away" => Cast::nearest_away(),
            "zero" => Cast::toward_zero(),
            "up" => Cast::up(),
            "down" => Cast::down(),
            _ => {
                let expected = "expected nearest, stochastic, away, zero, up or down";
                return Err(format!("--round: {expected}, got `{round}`").into());
            }
        };
        self.stream::<S, _>(|_| cast, format)
    }

    fn stream<S: Source + bytemuck::Pod, D: Draws>(&self, cast: impl Fn(u64) -> Cast<D>, format: Format) -> Result<()> {
        let (mut input, mut output) = (Input::new(size_of::<S>()), Output::new(format));
        let mut values = vec![S::zeroed(); BUFFER];
        let mut codes = vec![0u16; BUFFER];
        let mut first = 0;
        loop {
            let n = input.fill(bytemuck::cast_slice_mut(&mut values))?;
            if n == 0 {
                return output.finish();
            }
            let cast = match self.overflow {
                None => cast(first),
                Some(overflow) => cast(first).overflow(overflow),
            };
            cast.into_codes(&values[..n], format, &mut codes[..n])?;
            output.write(&codes[..n])?;
            first += n as u64;
        }
    }

    fn explicit<S: Source, const N: usize>(&self, format: Format, read: impl Fn([u8; N]) -> S) -> Result<()> {
        let count = self.bits.ok_or("--rule: expected --bits too, got none")?;
        RandomBits::new(0, count).map_err(|e| format!("--bits: {e}"))?;
        let rule = self.rule.unwrap_or_default();
        let overflow = self.overflow.unwrap_or(Overflow::of(format));
        let (mut input, mut output) = (Input::new(N + 4), Output::new(format));
        let mut records = vec![0; BUFFER * (N + 4)];
        let mut codes = Vec::with_capacity(BUFFER);
        loop {
            let n = input.fill(&mut records)?;
            if n == 0 {
                return output.finish();
            }
            codes.clear();
            for record in records[..n * (N + 4)].chunks_exact(N + 4) {
                let (value, draw) = record.split_first_chunk().expect("a record is N + 4 bytes");
                let draw = u32::from_le_bytes(draw.try_into().expect("a record is N + 4 bytes"));
                let random = RandomBits::new(draw, count).map_err(|e| format!("draw: {e}"))?.with_rule(rule);
                codes.push(round(read(*value), format, Mode::Stochastic(random), overflow));
            }
            output.write(&codes)?;
        }
    }
}

/// Whole records of standard input.
struct Input {
    stdin: StdinLock<'static>,
    record: usize,
}

impl Input {
    fn new(record: usize) -> Self {
        Self { stdin: io::stdin().lock(), record }
    }

    /// Fills `bytes` as far as the input goes; gives the number of records.
    fn fill(&mut self, bytes: &mut [u8]) -> Result<usize> {
        let mut length = 0;
        while length < bytes.len() {
            match self.stdin.read(&mut bytes[length..]) {
                Ok(0) => break,
                Ok(n) => length += n,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        match length % self.record {
            0 => Ok(length / self.record),
            rest => Err(format!("input: expected whole records of {} bytes, got {rest} more", self.record).into()),
        }
    }
}

/// Codes to standard output.
struct Output {
    stdout: StdoutLock<'static>,
    narrow: bool,
    bytes: Vec<u8>,
}

impl Output {
    fn new(format: Format) -> Self {
        Self { stdout: io::stdout().lock(), narrow: format.bits() <= 8, bytes: Vec::new() }
    }

    fn write(&mut self, codes: &[u16]) -> Result<()> {
        self.bytes.clear();
        if self.narrow {
            self.bytes.extend(codes.iter().map(|&code| code as u8));
        } else {
            self.bytes.extend_from_slice(bytemuck::cast_slice(codes));
        }
        Ok(self.stdout.write_all(&self.bytes)?)
    }

    fn finish(mut self) -> Result<()> {
        Ok(self.stdout.flush()?)
    }
}

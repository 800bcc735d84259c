//! `halfulp cast`: a safetensors file to a safetensors file, in chunks.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Seek, SeekFrom, Write};
use std::mem::swap;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use bytemuck::Pod;
use halfulp::cast::Report;
use halfulp::format::{Negative, Specials, power_of_two_scale};
use halfulp::measure::{UlpErrors, amax};
use halfulp::round::{Overflow, Source};
use halfulp::{Format, bf16, f16};
use indicatif::{ProgressBar, ProgressFinish, ProgressStyle};
use safetensors::Dtype;

use crate::error::Error;
use crate::header::{Entry, Header};
use crate::options::{Args, Choices, pool};
use crate::output::{Output, is_file, is_same};
use crate::plan::{Plan, Work};
use crate::{demo, say, signals};

/// Casts a file, or the one it makes.
pub(crate) fn run(args: &Args) -> Result<(), Error> {
    let begun = Instant::now();
    let choices = Choices::new(args)?;
    let pool = pool(args.threads)?;
    let interrupted = signals::catch().map_err(Error::Signals)?;
    let (input, output) = match (&args.input, &args.output) {
        (Some(input), Some(output)) => (input.clone(), output.clone()),
        _ => {
            let input = demo::make()?;
            let output = input.with_extension(format!("{}.safetensors", choices.format).to_lowercase());
            print(&format!("made {}, to be cast to {}", input.display(), output.display()));
            (input, output)
        }
    };

    let map = map(&input)?;
    if is_same(&input, &output) {
        return Err(Error::SameFile(output));
    }
    let header = Header::parse(&map).map_err(|source| Error::Header { path: input, source })?;
    let plan = Plan::new(&header, &choices)?;
    let mut file = Output::create(&output)?;
    let progress = progress(map.len() as u64);
    let job = Job { choices: &choices, input: &map, out: file.file(), interrupted: &interrupted, progress };
    let done = pool.install(|| job.run(&plan)).and_then(|totals| file.sync().map(|()| totals));
    if interrupted.load(Ordering::Relaxed) {
        return Err(Error::Interrupted);
    }
    let totals = done.and_then(|totals| file.publish().map(|()| totals));
    let totals = totals.map_err(|source| Error::Write { path: output, bytes: plan.bytes, source })?;

    totals.warn(&choices);
    print(&totals.line(choices.format, map.len() as u64, plan.bytes, begun.elapsed().as_secs_f64()));
    Ok(())
}

fn map(input: &Path) -> Result<memmap2::Mmap, Error> {
    let refuse = |source| Error::Read { path: input.into(), source };
    // A pipe would block when it is opened.
    is_file("IN", input, &fs::metadata(input).map_err(refuse)?)?;
    let file = File::open(input).map_err(refuse)?;
    // SAFETY: the map is read only, as bytes and numbers of which every pattern is valid. A process that changes the file
    // meanwhile changes the numbers, and one that shortens it ends this one by SIGBUS: the help asks not to.
    let map = unsafe { memmap2::Mmap::map(&file) }.map_err(refuse)?;
    #[cfg(unix)]
    let _ = map.advise(memmap2::Advice::Sequential);
    Ok(map)
}

/// A bar on stderr where that is a terminal.
fn progress(bytes: u64) -> ProgressBar {
    let style = ProgressStyle::with_template("{bar:40} {bytes}/{total_bytes} {bytes_per_sec} {eta} left");
    let bar = ProgressBar::new(bytes).with_finish(ProgressFinish::AndClear);
    if let Ok(style) = style { bar.with_style(style) } else { bar }
}

/// One line on stdout; nobody reading it is no error.
fn print(line: &str) {
    let _ = writeln!(io::stdout(), "{line}");
}

/// Elements cast, or bytes copied, at a time: a legal cut of a stream, and little memory.
const CHUNK: usize = 1 << 21;

/// The writing of a plan.
pub(crate) struct Job<'a, W> {
    pub(crate) choices: &'a Choices,
    pub(crate) input: &'a [u8],
    pub(crate) out: &'a mut W,
    pub(crate) interrupted: &'a AtomicBool,
    pub(crate) progress: ProgressBar,
}

/// What a job did.
#[derive(Default)]
pub(crate) struct Totals {
    cast: usize,
    copied: usize,
    report: Report,
    errors: UlpErrors,
}

impl<W: Write + Seek + Send> Job<'_, W> {
    pub(crate) fn run(mut self, plan: &Plan) -> io::Result<Totals> {
        let mut totals = Totals::default();
        let scales = plan.entries.iter().filter_map(|entry| match &entry.work {
            Work::Scale(name) => Some((name, entry.at)),
            _ => None,
        });
        let scales: HashMap<_, _> = scales.collect();
        self.out.write_all(&plan.start)?;
        for entry in &plan.entries {
            match &entry.work {
                Work::Scale(_) => {} // known when its tensor was read
                Work::Copy(from) => {
                    self.out.seek(SeekFrom::Start(entry.at))?;
                    for chunk in self.input[from.clone()].chunks(CHUNK) {
                        self.out.write_all(chunk)?;
                        self.advance(chunk.len())?;
                    }
                    totals.copied += 1;
                }
                Work::Cast { from, dtype } => {
                    let (from, scale) = (from.clone(), scales.get(&entry.name).copied());
                    match dtype {
                        Dtype::F64 => self.cast::<f64>(entry, from, scale, &mut totals)?,
                        Dtype::F16 => self.cast::<f16>(entry, from, scale, &mut totals)?,
                        Dtype::BF16 => self.cast::<bf16>(entry, from, scale, &mut totals)?,
                        _ => self.cast::<f32>(entry, from, scale, &mut totals)?,
                    }
                    totals.cast += 1;
                }
            }
        }
        Ok(totals)
    }

    /// Casts one tensor, and writes its scale to `scale` if it has one.
    fn cast<S: Source + Pod>(
        &mut self,
        entry: &Entry<Work>,
        from: Range<usize>,
        scale: Option<u64>,
        totals: &mut Totals,
    ) -> io::Result<()> {
        let format = self.choices.format;
        let (input, mut room) = (&self.input[from], Vec::new());
        let chunks = || input.chunks(CHUNK * size_of::<S>());
        let mut k = 0;
        if let Some(at) = scale {
            let mut largest = 0f64;
            for chunk in chunks() {
                largest = largest.max(amax::<S>(numbers(chunk, &mut room)));
                self.advance(0)?;
            }
            k = power_of_two_scale(format, largest);
            self.out.seek(SeekFrom::Start(at))?;
            self.out.write_all(&f32::from_bits(((k + 127) as u32) << 23).to_le_bytes())?;
        }
        self.out.seek(SeekFrom::Start(entry.at))?;
        // One buffer is written while the other is filled.
        let (mut full, mut empty) = (Vec::new(), Vec::new());
        for (chunk, first) in chunks().zip((0..).step_by(CHUNK)) {
            let x = numbers(chunk, &mut room);
            let cast = self.choices.cast(&entry.name, k, first);
            empty.resize(format.bytes(x.len()), 0);
            let fill = || {
                let report = cast.into_bytes(x, format, &mut empty).expect("as long as the codes");
                (report, UlpErrors::of(x, format, k, &empty).expect("as long as the codes"))
            };
            let (written, (report, errors)) = rayon::join(|| self.out.write_all(&full), fill);
            written?;
            totals.report += report;
            totals.errors += errors;
            swap(&mut full, &mut empty);
            self.advance(chunk.len())?;
        }
        self.out.write_all(&full)
    }

    fn advance(&self, bytes: usize) -> io::Result<()> {
        self.progress.inc(bytes as u64);
        // The caller looks at the flag first: this error is not shown.
        if self.interrupted.load(Ordering::Relaxed) { Err(io::ErrorKind::Other.into()) } else { Ok(()) }
    }
}

/// Bytes as numbers: in place where they are aligned, else in `room`.
fn numbers<'a, S: Pod>(bytes: &'a [u8], room: &'a mut Vec<S>) -> &'a [S] {
    bytemuck::try_cast_slice(bytes).unwrap_or_else(|_| {
        room.resize(bytes.len() / size_of::<S>(), S::zeroed());
        bytemuck::cast_slice_mut(room).copy_from_slice(bytes);
        room
    })
}

impl Totals {
    /// Says what was lost besides precision.
    fn warn(&self, choices: &Choices) {
        let (format, report) = (choices.format, self.report);
        let warn = |what: &str, count: u64| {
            if count > 0 {
                say(&format!("warning: {what}: {count}"));
            }
        };
        let now = match (choices.overflow, format.specials()) {
            (Overflow::Ieee, Specials::Ieee) => "now infinite",
            (Overflow::Ieee, Specials::NanOnly) => "now NaN",
            _ => "saturated",
        };
        warn(&format!("elements beyond the largest value of {format}, {now}"), report.overflow);
        if !format.has_nan() {
            warn(&format!("NaN, stored as the largest value, for {format} has none"), report.nan);
        }
        let now = if format.negative() == Negative::Nan { "now NaN" } else { "stored as code 0" };
        warn(&format!("negative elements, {now}, for {format} has no sign"), report.negative);
        if self.cast == 0 {
            say("warning: no tensor was cast: none is of a floating-point type and selected");
        }
    }

    /// The closing line.
    fn line(&self, format: Format, bytes_in: u64, bytes_out: u64, seconds: f64) -> String {
        let speed = (bytes_in + bytes_out) as f64 / seconds / 1e9;
        let mut line = format!(
            "cast {} tensors ({} elements) to {format}, copied {}; {bytes_in} bytes in, {bytes_out} out, {seconds:.3} s, \
             {speed:.2} GB/s",
            self.cast, self.report.elements, self.copied,
        );
        if self.errors.elements > 0 {
            line += &format!("; mean error {:.3e} ulp", self.errors.mean());
        }
        if self.errors.elements > 1 {
            line += &format!(", standard error {:.3e}", self.errors.standard_error());
        }
        line
    }
}

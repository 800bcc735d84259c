//! The command `halfulp`: casts model files, prints the formats, predicts stalling, simulates moments. Every error is one line
//! and exit code 2.

mod cast;
mod demo;
mod error;
mod formats;
mod header;
mod options;
mod output;
mod plan;
mod predict;
mod signals;
mod simulate;
mod table;
#[cfg(test)]
mod tests;

use std::io::{self, Write};
use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind;

use crate::error::Error;

/// Stochastic rounding for low-precision formats.
#[derive(Parser)]
#[command(version, arg_required_else_help = true)]
enum Command {
    Cast(options::Args),
    Simulate(simulate::Args),
    /// Print the table of named formats
    Formats,
    Predict(predict::Args),
}

fn main() -> ExitCode {
    let command = match Command::try_parse() {
        Ok(command) => command,
        Err(error) => return usage(&error),
    };
    let result = match command {
        Command::Cast(args) => cast::run(&args),
        Command::Simulate(args) => simulate::run(&args, &mut io::stdout().lock()),
        Command::Formats => formats::print(&mut io::stdout().lock()).map_err(Error::Print),
        Command::Predict(args) => predict::run(&args, &mut io::stdout().lock()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        // Nobody reads on: no reason to complain.
        Err(Error::Print(source)) if source.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => fail(&error.to_string()),
    }
}

/// Help goes out as it is, an error as its first paragraph on one line.
fn usage(error: &clap::Error) -> ExitCode {
    if !error.use_stderr() || error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        let _ = error.print();
        return if error.use_stderr() { ExitCode::from(2) } else { ExitCode::SUCCESS };
    }
    let text = error.to_string();
    let paragraph = text.split("\n\n").next().unwrap_or_default();
    let words: Vec<&str> = paragraph.trim_start_matches("error: ").split_whitespace().collect();
    fail(&format!("{}; see --help", words.join(" ")))
}

fn fail(message: &str) -> ExitCode {
    say(message);
    ExitCode::from(2)
}

/// One line on stderr, whatever the message quotes.
fn say(message: &str) {
    let line: String =
        message.chars().flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] }).collect();
    let _ = writeln!(io::stderr(), "halfulp: {line}");
}

//! Draws every figure and table into `figures/`: `cargo run --release --example figures`, or `-- 3 table-1` for some.
//!
//! Each figure is a file here: it gathers numbers from the crate and describes panels. Seeds are fixed, mathematics is in
//! Rust, what was timed or trained is read from recorded files: a second run writes the same bytes.

mod bits;
mod blocks;
mod delivered;
mod distance;
mod map;
mod models;
mod noise;
mod page;
mod plot;
mod prediction;
mod repeat;
mod second_moment;
mod small_update;
mod speed;
mod stalls;
mod table;
mod tables;

use std::fs;
use std::path::Path;
use std::process::ExitCode;

use plot::Picture;
use rayon::prelude::*;
use table::Table;

type Error = Box<dyn std::error::Error + Send + Sync>;

/// What stands on the page under one heading.
struct Figure {
    /// `3`, `table-1`: how the command line names it.
    id: &'static str,
    /// Name of its files.
    file: &'static str,
    title: &'static str,
    /// What the picture shows, for those who do not see it.
    alt: &'static str,
    /// How the numbers came about.
    caption: &'static str,
    /// What to look at.
    see: &'static str,
    draw: fn() -> Result<Drawing, Error>,
}

impl Figure {
    /// `Figure 3`, `Table 1`.
    fn heading(&self) -> String {
        match self.id.strip_prefix("table-") {
            Some(number) => format!("Table {number}"),
            None => format!("Figure {}", self.id),
        }
    }

    /// The command that makes it.
    fn command(&self) -> String {
        format!("cargo run --release --example figures -- {}", self.id)
    }
}

/// A picture, if there is one, and its numbers.
struct Drawing {
    picture: Option<Picture>,
    table: Table,
    /// What is shown of them where there is no picture, if not the numbers as they are.
    shown: Option<Table>,
}

impl Drawing {
    fn shown(&self) -> &Table {
        self.shown.as_ref().unwrap_or(&self.table)
    }
}

impl From<Picture> for Drawing {
    fn from(picture: Picture) -> Self {
        let table = picture.table();
        Self { picture: Some(picture), table, shown: None }
    }
}

impl From<(Picture, Table)> for Drawing {
    fn from((picture, table): (Picture, Table)) -> Self {
        Self { picture: Some(picture), table, shown: None }
    }
}

impl From<Table> for Drawing {
    fn from(table: Table) -> Self {
        Self { picture: None, table, shown: None }
    }
}

const FIGURES: &[Figure] = &[
    small_update::FIGURE,
    tables::FORMATS,
    second_moment::FIGURE,
    prediction::FIGURE,
    distance::FIGURE,
    delivered::FIGURE,
    models::FIGURE,
    tables::LOSSES,
    bits::FIGURE,
    blocks::FIGURE,
    speed::FIGURE,
    repeat::FIGURE,
    noise::FIGURE,
    map::FIGURE,
    stalls::FIGURE,
];

/// The root of the repository.
fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn chosen(arguments: &[String]) -> Result<Vec<&'static Figure>, Error> {
    if arguments.is_empty() {
        return Ok(FIGURES.iter().collect());
    }
    let find = |name: &String| {
        FIGURES.iter().find(|figure| figure.id == name || figure.file == name).ok_or_else(|| {
            let known: Vec<&str> = FIGURES.iter().map(|figure| figure.id).collect();
            format!("figure: expected one of {}, got `{name}`", known.join(", ")).into()
        })
    };
    arguments.iter().map(find).collect()
}

/// A table as a page of its own.
fn markdown(figure: &Figure, table: &Table) -> String {
    let (heading, Figure { title, caption, see, .. }) = (figure.heading(), figure);
    let command = figure.command();
    format!("# {heading}: {title}\n\n{caption}\n\n**What to see.** {see}\n\n{}\n`{command}`\n", table.markdown())
}

/// Writes what belongs to one figure, and gives back what the page needs of it.
fn write(figure: &'static Figure, directory: &Path) -> Result<(&'static Figure, Drawing), Error> {
    let drawing = (figure.draw)().map_err(|error| format!("{}: {error}", figure.heading()))?;
    let path = |extension| directory.join(figure.file).with_extension(extension);
    fs::write(path("csv"), drawing.table.csv())?;
    if let Some(picture) = &drawing.picture {
        let svg = picture.svg()?;
        fs::write(path("png"), plot::png(&svg)?)?;
        fs::write(path("svg"), svg)?;
    } else {
        fs::write(path("md"), markdown(figure, drawing.shown()))?;
    }
    println!("{}: figures/{}", figure.heading(), figure.file);
    Ok((figure, drawing))
}

fn run(arguments: &[String]) -> Result<(), Error> {
    let figures = chosen(arguments)?;
    let directory = root().join("figures");
    fs::create_dir_all(&directory)?;
    let drawn: Vec<_> = figures.into_par_iter().map(|figure| write(figure, &directory)).collect::<Result<_, _>>()?;
    if arguments.is_empty() {
        fs::write(directory.join("index.html"), page::html(&drawn))?;
        println!("the page: figures/index.html");
    }
    Ok(())
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

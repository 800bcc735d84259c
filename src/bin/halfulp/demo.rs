//! The small model file that `halfulp cast` makes when it is given none.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use halfulp::Draw;
use halfulp::random::{Draws, Role};
use safetensors::Dtype;

use crate::error::Error;
use crate::header::{Entry, lay_out};
use crate::output::Output;

/// F32 weights: name, shape, mean, standard deviation.
const WEIGHTS: [(&str, &[usize], f32, f32); 5] = [
    ("embedding.weight", &[1024, 64], 0.0, 0.05),
    ("layers.0.attention.weight", &[192, 64], 0.0, 0.125),
    ("layers.0.mlp.weight", &[256, 64], 0.0, 0.125),
    ("layers.0.norm.bias", &[64], 0.0, 0.0),
    ("layers.0.norm.weight", &[64], 1.0, 0.02),
];

/// Writes the file to the current directory, or to the one for temporary files where that cannot be written. Gives its path.
pub(crate) fn make() -> Result<PathBuf, Error> {
    let path = PathBuf::from("halfulp-demo.safetensors");
    match write(&path) {
        Err(Error::Directory { source, .. })
            if matches!(source.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem) =>
        {
            let path = std::env::temp_dir().join(path);
            write(&path)?;
            Ok(path)
        }
        result => result.map(|()| path),
    }
}

fn write(path: &Path) -> Result<(), Error> {
    let mut entries: Vec<Entry<Vec<u8>>> = WEIGHTS
        .iter()
        .map(|&(name, shape, mean, deviation)| {
            let data: Vec<u8> =
                bell(name, shape.iter().product()).iter().flat_map(|x| (mean + deviation * x).to_le_bytes()).collect();
            entry(name, Dtype::F32, shape, data)
        })
        .collect();
    let positions = (0..512i64).flat_map(i64::to_le_bytes).collect();
    entries.push(entry("position_ids", Dtype::I64, &[1, 512], positions));
    let (start, bytes) = lay_out(&mut entries, &BTreeMap::from([("format".into(), "pt".into())]));

    // A file of this name that this command did not make is somebody's.
    let made = std::iter::once(&start).chain(entries.iter().map(|entry| &entry.work)).flatten();
    match std::fs::read(path) {
        Ok(there) if there.iter().eq(made) => return Ok(()),
        Ok(_) => return Err(Error::DemoExists(path.into())),
        Err(_) => {}
    }
    let mut output = Output::create(path)?;
    let file = output.file();
    let mut written = file.write_all(&start);
    for entry in &entries {
        written = written.and_then(|()| file.write_all(&entry.work));
    }
    let written = written.and_then(|()| output.publish());
    written.map_err(|source| Error::Write { path: path.into(), bytes, source })
}

fn entry(name: &str, dtype: Dtype, shape: &[usize], data: Vec<u8>) -> Entry<Vec<u8>> {
    Entry::new(name.into(), dtype, shape.into(), data.len(), data)
}

/// Bell-shaped numbers of mean 0 and variance 1: sums of four uniform draws, under a role that no cast draws from.
fn bell(name: &str, n: usize) -> Vec<f32> {
    let mut draws = vec![0; 4 * n];
    Draw::seeded(0).role(Role::Parameter).named(name).fill16(0, &mut draws);
    let sum = |four: &[u16; 4]| four.iter().map(|&draw| f32::from(draw) - 32_767.5).sum::<f32>();
    draws.as_chunks().0.iter().map(|four| sum(four) / 65_536.0 * 3f32.sqrt()).collect()
}

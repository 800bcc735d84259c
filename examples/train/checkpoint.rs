//! A checkpoint of the training: a directory, in which the parameters and the log stand beside the optimizer's own file.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use halfulp::bf16;
use halfulp::optim::checkpoint::{restore, save as save_optimizer};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors, serialize};

use crate::data::Images;
use crate::error::TrainError;
use crate::log::Log;
use crate::model;
use crate::options::{Options, Setup, Start};
use crate::training::Training;

const MODEL: &str = "model.safetensors";
const OPTIMIZER: &str = "optimizer.safetensors";
const LOG: &str = "log.csv";
const STALLS: &str = "stalls.csv";
/// Key of the metadata that say what shapes the training.
const LINE: &str = "train";

/// Writes `step-N` in `out`, in place of one that was there. Under that name it is always whole: it is made as `.step-N.part`,
/// which a process that is killed leaves behind, and then renamed.
pub(crate) fn save(out: &Path, training: &Training<'_>) -> Result<(), TrainError> {
    let name = format!("step-{}", training.log.steps());
    let (path, unfinished) = (out.join(&name), out.join(format!(".{name}.part")));
    let remove = |path: &Path| match fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(TrainError::io("--out", path, "remove", error)),
        _ => Ok(()),
    };
    remove(&unfinished)?;
    fs::create_dir(&unfinished).map_err(|error| TrainError::io("--out", &unfinished, "create", error))?;
    write(&unfinished.join(MODEL), &model_file(training)?)?;
    write(&unfinished.join(LOG), training.log.csv().as_bytes())?;
    write(&unfinished.join(STALLS), training.log.stalls.csv().as_bytes())?;
    let optimizer = unfinished.join(OPTIMIZER);
    save_optimizer(&optimizer, &training.optimizer, Some(&training.resets))
        .map_err(|source| TrainError::Optimizer { argument: "--out", path: optimizer, source })?;
    remove(&path)?;
    fs::rename(&unfinished, &path).map_err(|error| TrainError::io("--out", &path, "write", error))
}

/// To the disk.
fn write(path: &Path, bytes: &[u8]) -> Result<(), TrainError> {
    let written = File::create(path).and_then(|mut file| file.write_all(bytes).and_then(|()| file.sync_all()));
    written.map_err(|error| TrainError::io("--out", path, "write", error))
}

/// Parameters in BF16, and what shapes the training.
fn model_file(training: &Training<'_>) -> Result<Vec<u8>, TrainError> {
    let path = Path::new(MODEL);
    let wrong = |error: safetensors::SafeTensorError| TrainError::io("--out", path, "lay out", io::Error::other(error));
    let mut tensors = Vec::new();
    for (name, params) in model::names().zip(&training.params) {
        let view = TensorView::new(Dtype::BF16, vec![params.len()], bytemuck::cast_slice(params)).map_err(wrong)?;
        tensors.push((name, view));
    }
    serialize(tensors, Some(HashMap::from([(LINE.into(), training.setup.line())]))).map_err(wrong)
}

/// A training that goes on after `step-N`.
pub(crate) fn load<'a>(directory: &Path, digits: &'a [Images; 2]) -> Result<Training<'a>, TrainError> {
    let (setup, params) = load_model(&directory.join(MODEL))?;
    let mut training = Training::new(setup, digits)?;

    let path = directory.join(OPTIMIZER);
    let resets = restore(&path, &mut training.optimizer).map_err(|source| TrainError::Optimizer {
        argument: "--resume",
        path: path.clone(),
        source,
    })?;
    let Some(resets) = resets else { return Err(TrainError::saved(&path, "a reset schedule", "none")) };

    let paths = [LOG, STALLS].map(|name| directory.join(name));
    let [log, stalls] = [read(&paths[0])?, read(&paths[1])?];
    let text = |path: &Path, bytes| {
        String::from_utf8(bytes).map_err(|error| TrainError::saved(path, "UTF-8", error.to_string()))
    };
    let (log, stalls) = (text(&paths[0], log)?, text(&paths[1], stalls)?);
    let log = Log::read([(&paths[0], &log), (&paths[1], &stalls)])?;

    // Files of one checkpoint.
    let (executed, by_log) = (training.optimizer.steps(), log.steps() - log.skipped());
    if executed != by_log {
        let expected = format!("{by_log} executed steps, as in {LOG}");
        return Err(TrainError::saved(&path, expected, executed.to_string()));
    }
    Ok(training.resumed(params, resets, log, &digits[0]))
}

fn read(path: &Path) -> Result<Vec<u8>, TrainError> {
    fs::read(path).map_err(|error| TrainError::io("--resume", path, "read", error))
}

fn load_model(path: &Path) -> Result<(Setup, Vec<Vec<bf16>>), TrainError> {
    let bytes = read(path)?;
    let wrong = |error: safetensors::SafeTensorError| TrainError::saved(path, "a safetensors file", error.to_string());
    let file = SafeTensors::deserialize(&bytes).map_err(wrong)?;
    let (_, metadata) = SafeTensors::read_metadata(&bytes).map_err(wrong)?;
    let line = metadata.metadata().as_ref().and_then(|metadata| metadata.get(LINE));
    let line = line.ok_or_else(|| TrainError::saved(path, format!("metadata `{LINE}`"), "none"))?;
    let setup = match Options::parse(line.split(' ').map(String::from)) {
        Ok(Options { start: Start::Fresh(setup), .. }) => setup,
        _ => return Err(TrainError::saved(path, format!("a command line as metadata `{LINE}`"), format!("`{line}`"))),
    };
    let mut params = Vec::new();
    for (name, initial) in model::names().zip(model::initial(setup.seed)) {
        let tensor = file.tensor(name).map_err(|_| TrainError::saved(path, format!("a tensor `{name}`"), "none"))?;
        if tensor.dtype() != Dtype::BF16 || tensor.shape() != [initial.len()] {
            let expected = format!("`{name}` in BF16 of shape {:?}", [initial.len()]);
            return Err(TrainError::saved(path, expected, format!("{} of {:?}", tensor.dtype(), tensor.shape())));
        }
        params.push(bytemuck::pod_collect_to_vec(tensor.data()));
    }
    Ok((setup, params))
}

//! A file that appears under its name only when it is complete.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

use crate::error::Error;

/// A file in the making beside its final name, removed when it is dropped.
pub(crate) struct Output {
    path: PathBuf,
    file: NamedTempFile,
}

impl Output {
    /// Opens a file in the directory of `path`. What stands at `path` must be a file or nothing.
    pub(crate) fn create(path: &Path) -> Result<Self, Error> {
        if let Ok(there) = fs::metadata(path) {
            is_file("OUT", path, &there)?;
        }
        let directory = match path.parent() {
            Some(parent) if parent != Path::new("") => parent,
            _ => Path::new("."),
        };
        let refuse = |source| Error::Directory { path: directory.into(), source };
        if !fs::metadata(directory).map_err(refuse)?.is_dir() {
            return Err(refuse(io::ErrorKind::NotADirectory.into()));
        }
        // `file_name` looks past a separator at the end.
        if path.file_name().is_none() || path.as_os_str().as_encoded_bytes().ends_with(b"/") {
            return Err(refuse(io::Error::new(io::ErrorKind::InvalidInput, "no file name")));
        }
        let mut builder = tempfile::Builder::new();
        builder.prefix(".halfulp-").suffix(".part");
        #[cfg(unix)]
        builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666)); // less the umask
        // The error's own text names the temporary file.
        let file = builder.tempfile_in(directory).map_err(|error| refuse(error.kind().into()))?;
        Ok(Self { path: path.into(), file })
    }

    pub(crate) fn file(&mut self) -> &mut File {
        self.file.as_file_mut()
    }

    /// Waits until what was written is on the disk.
    pub(crate) fn sync(&mut self) -> io::Result<()> {
        self.file.as_file().sync_all()
    }

    /// Gives the file its name.
    pub(crate) fn publish(self) -> io::Result<()> {
        self.file.persist(self.path).map(drop).map_err(|error| error.error)
    }
}

/// Refuses directories, devices and pipes.
pub(crate) fn is_file(argument: &'static str, path: &Path, metadata: &fs::Metadata) -> Result<(), Error> {
    let kind = if metadata.is_dir() { "a directory" } else { "no regular file" };
    if metadata.is_file() { Ok(()) } else { Err(Error::NotAFile { argument, path: path.into(), kind }) }
}

/// Whether two names stand for one file, through links too.
#[cfg(unix)]
pub(crate) fn is_same(a: &Path, b: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let identity = |path| fs::metadata(path).map(|metadata| (metadata.dev(), metadata.ino())).ok();
    identity(a).is_some_and(|a| Some(a) == identity(b))
}

/// Whether two names stand for one file.
#[cfg(not(unix))]
pub(crate) fn is_same(a: &Path, b: &Path) -> bool {
    let identity = |path| fs::canonicalize(path).ok();
    identity(a).is_some_and(|a| Some(a) == identity(b))
}

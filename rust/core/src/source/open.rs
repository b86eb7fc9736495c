//! Opens files without trusting their names: only regular files, and the files that a shard names only below its root.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{Error, Result};
use std::path::{Component, Path, PathBuf};

/// Opens a regular file to read it. A pipe, a device or a folder is an error at once: opening one never waits.
pub(super) fn regular(path: &Path) -> Result<(File, Metadata)> {
    let check = |stat: Metadata| match stat.is_file() {
        true => Ok(stat),
        false => Err(Error::other("is not a regular file")),
    };
    check(std::fs::metadata(path)?)?; // first, since merely opening some devices has effects
    let mut options = OpenOptions::new();
    options.read(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, libc::O_NONBLOCK); // in case it became a pipe since
    let file = options.open(path)?;
    let stat = check(file.metadata()?)?;
    Ok((file, stat))
}

/// The file `name` of `root`. It must lie below it after links are resolved, or before that if `links` may lead out.
pub(super) fn below(root: &Path, name: &Path, links: bool) -> Result<PathBuf> {
    let place = root.join(name);
    let is_below = match links {
        true => {
            lexical(&std::path::absolute(&place)?).starts_with(lexical(&std::path::absolute(root)?))
        }
        false => {
            let root = if root.as_os_str().is_empty() { Path::new(".") } else { root };
            place.canonicalize()?.starts_with(root.canonicalize()?)
        }
    };
    match is_below {
        true => Ok(place),
        false => Err(Error::other(format!("leads out of {}", root.display()))),
    }
}

/// An absolute path without `..`, as it reads.
fn lexical(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(plain.pop()),
            part => plain.push(part),
        }
    }
    plain
}

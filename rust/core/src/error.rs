//! Errors of the loader. Every message about data names the file, and the row if it is about one.

use std::path::{Path, PathBuf};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{path}: {source}", path = path.display())]
    Open { path: PathBuf, source: std::io::Error },

    #[error("row {row} does not exist; there are {n} rows")]
    RowRange { row: i64, n: usize },

    /// Arguments or data that cannot be used.
    #[error("{0}")]
    Invalid(String),

    /// The pipeline has ended, for this reason.
    #[error("{0}")]
    Failed(String),
}

/// The reason why a shard, or one row of it, cannot be used.
pub struct Fault {
    pub at: Option<u64>, // a byte that is invalid in the shard's format
    pub what: String,
}

impl Fault {
    pub fn at(at: u64, what: impl Into<String>) -> Self {
        Self { at: Some(at), what: what.into() }
    }

    pub fn plain(what: String) -> Self {
        Self { at: None, what }
    }

    pub fn no_column(name: &str, have: &[String]) -> Self {
        Self::plain(format!("no column {name:?}; the columns are {}", have.join(", ")))
    }

    pub fn not_audio(name: &str, found: &str) -> Self {
        let expected = "a struct of bytes (binary) and path (string), as datasets.Audio stores it";
        Self::plain(format!("column {name:?} is {found}, but audio must be {expected}"))
    }

    pub fn string_label(name: &str) -> Self {
        let remedy = format!(
            "names = sorted(set(dataset[{name:?}])); dataset.cast_column({name:?}, datasets.ClassLabel(names=names))\
             .save_to_disk(folder)"
        );
        let what = format!("column {name:?} holds strings, but labels must be a ClassLabel");
        Self::plain(format!("{what}. Cast the column and save the dataset again: {remedy}"))
    }

    pub fn not_label(name: &str, found: &str) -> Self {
        Self::plain(format!("column {name:?} is {found}, but labels must be an int64 ClassLabel"))
    }

    /// The error of this shard.
    pub fn of(self, path: &Path) -> Error {
        let place = self.at.map_or(String::new(), |at| format!(" (at byte {at})"));
        Error::Invalid(format!("{}: {}{place}", path.display(), self.what))
    }
}

impl From<String> for Fault {
    fn from(what: String) -> Self {
        Self::at(0, what)
    }
}

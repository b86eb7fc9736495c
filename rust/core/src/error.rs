//! Errors of the loader. Every message about data names the file, and the row where there is one.

use std::path::PathBuf;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{path}: {source}", path = path.display())]
    Open { path: PathBuf, source: std::io::Error },

    #[error("no shards were given")]
    NoShards,

    /// Bytes that are invalid in the shard's format.
    #[error("{path}: {what} (at byte {at})", path = path.display())]
    Shard { path: PathBuf, at: u64, what: String },

    #[error(
        "{path}: record batch {batch} is compressed with {codec}, but the loader reads audio in place from the mapped file. Write \
         the shards without compression, as datasets.save_to_disk does", path = path.display()
    )]
    Compressed { path: PathBuf, batch: usize, codec: String },

    #[error("{path}: no column {name:?}; the columns are {have}", path = path.display())]
    NoColumn { path: PathBuf, name: String, have: String },

    #[error(
        "{path}: column {name:?} is {found}, but audio must be a struct of bytes (binary) and path (string), as \
         datasets.Audio stores it", path = path.display()
    )]
    NotAudio { path: PathBuf, name: String, found: String },

    #[error(
        "{path}: column {name:?} holds strings, but labels must be a ClassLabel. Cast the column and save the dataset again: \
         names = sorted(set(dataset[{name:?}])); dataset.cast_column({name:?}, datasets.ClassLabel(names=names))\
         .save_to_disk(folder)", path = path.display()
    )]
    StringLabel { path: PathBuf, name: String },

    #[error("{path}: column {name:?} is {found}, but labels must be an int64 ClassLabel", path = path.display())]
    NotLabel { path: PathBuf, name: String, found: String },

    #[error("{path}: row {row} (row {row_in_shard} of this shard) has label {label}, but there are {n} classes",
        path = path.display())]
    LabelRange { path: PathBuf, row: usize, row_in_shard: usize, label: i64, n: usize },

    #[error("{path} and {first} differ in the classes of {name:?}: {what}. All shards must have the same names in the same order", path = path.display(), first = first.display())]
    ClassNames { path: PathBuf, first: PathBuf, name: String, what: String },

    #[error("{path}: row {row} (row {row_in_shard} of this shard): {what}", path = path.display())]
    Recording { path: PathBuf, row: usize, row_in_shard: usize, what: String },

    #[error("row {row} does not exist; there are {n} rows")]
    RowRange { row: i64, n: usize },

    #[error("{0}")]
    Config(String),

    #[error("{bad} of {n} recordings could not be used, more than the {allowed} that the budget allows:\n{list}")]
    Budget { bad: u64, n: u64, allowed: u64, list: String },

    /// The pipeline has ended, for this reason.
    #[error("{0}")]
    Failed(String),

    #[error("cannot start a worker thread: {0}")]
    Thread(std::io::Error),
}

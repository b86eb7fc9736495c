//! Rows that are parts of recordings outside the shards, as `jaxtrain index` writes them.
//!
//! A row takes 24 bytes: its recording (4), start and end (16) and class (4). Its channel takes 2 more if any row of
//! the shard has one. Names are kept once for each recording of a shard.

use std::collections::HashMap;

/// The key of a shard's metadata that says that its rows are parts; the value is the version.
pub(super) const KEY: &str = "jaxtrain.index";
pub(super) const VERSION: &str = "1";
/// The channel of a row that takes their mean.
pub(super) const MEAN: i16 = -1;

/// A part of a recording.
#[derive(Clone, Copy)]
pub struct Part {
    pub start: f64,           // seconds
    pub end: f64,             // seconds; infinite if the part ends with the recording
    pub channel: Option<u16>, // None: the mean
}

/// The parts of a shard, by row.
#[derive(Default)]
pub(super) struct Parts {
    pub names: Names,
    pub files: Vec<u32>, // of `names`
    pub starts: Vec<f64>,
    pub ends: Vec<f64>,
    pub channels: Vec<i16>, // empty if all are `MEAN`
}

impl Parts {
    pub fn len(&self) -> usize {
        self.files.len()
    }

    /// Whether every row has a recording, a start and an end, and every recording a name.
    pub fn is_valid(&self) -> bool {
        let Self { names: Names { text, ends }, files, starts, ends: stops, channels } = self;
        let n = files.len();
        starts.len() == n
            && stops.len() == n
            && (channels.is_empty()
                || channels.len() == n && channels.iter().all(|&channel| channel >= MEAN))
            && ends.is_sorted()
            && ends.last().copied().unwrap_or(0) == text.len() as u64
            && ends.iter().all(|&end| text.is_char_boundary(end as usize))
            && files.iter().all(|&file| (file as usize) < ends.len())
    }

    pub fn part(&self, row: usize) -> Part {
        let channel = self.channels.get(row).and_then(|&channel| u16::try_from(channel).ok());
        Part { start: self.starts[row], end: self.ends[row], channel }
    }

    pub fn name(&self, row: usize) -> &str {
        self.names.get(self.files[row])
    }
}

/// Texts by number, one after another in memory.
#[derive(Default)]
pub(super) struct Names {
    pub text: String,
    pub ends: Vec<u64>,
}

impl Names {
    pub fn get(&self, number: u32) -> &str {
        let number = number as usize;
        let start = number.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.text[start as usize..self.ends[number] as usize]
    }

    pub fn len(&self) -> usize {
        self.ends.len()
    }

    pub fn push(&mut self, name: &str) {
        self.text.push_str(name);
        self.ends.push(self.text.len() as u64);
    }
}

/// Gives each name a number when it first occurs.
#[derive(Default)]
pub(super) struct Numbers {
    pub names: Names,
    known: HashMap<String, u32>,
}

impl Numbers {
    /// The number of a name. None if it is not UTF-8.
    pub fn of(&mut self, name: &[u8]) -> Option<u32> {
        let name = std::str::from_utf8(name).ok()?;
        if let Some(&number) = self.known.get(name) {
            return Some(number);
        }
        let number = self.names.len() as u32;
        self.known.insert(name.into(), number);
        self.names.push(name);
        Some(number)
    }
}

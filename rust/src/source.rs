//! A row index over many shards, made without reading audio, and the bytes of one recording on demand.
//!
//! Shards are Arrow IPC streams (what Hugging Face `datasets` writes), Arrow IPC files, or Parquet (what the Hub stores),
//! told apart by their first bytes: `arrow` and `parquet` have the formats. In each, `audio` is a struct of bytes (binary
//! or large_binary) and path; where bytes are null the recording is the file at path, relative to a root.
//!
//! Class names are `info.features.<label>.names` in the JSON under the schema's metadata key `huggingface`.
//!
//! # What is kept
//!
//! Per row of an Arrow shard 28 bytes (two spans and a label), of a Parquet shard 4, and 12 more for each page's rows once
//! one of them is read; per shard its path and its mapping. A mapping needs no file descriptor, so any number of shards is
//! open at once. A shard must not change while it is mapped: one that is cut short then kills the process with SIGBUS.
//! Each thread keeps in its `Reader` one recording that lies in a file of its own, as a mapping too, and unpacked pages of
//! compressed Parquet: 64 MiB of them, or the page in use and its dictionary where they are larger.
//!
//! # The cache of an index
//!
//! With a folder for it, an index is written there and taken from there while names, sizes and times of the shards stay
//! what they were:
//!
//! ```text
//! "jaxtrain index 2\n" [key: 16 bytes] [body] [hash of all before: 8 bytes], integers little-endian; the name is the hash
//! of the shards' paths and the columns; the key, of names, sizes and times
//! ```
//!
//! A file that does not match in any of these is made again. It is written beside its place and renamed, so a reader sees
//! all of it or nothing; and one that cannot be written costs only the time that it would have saved.

mod arrow;
mod parquet;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::UNIX_EPOCH;

use memmap2::Mmap;

use crate::error::Error;
use crate::order;
use parquet::Body;

/// Where a value lies in its shard. A null is `len == NULL`.
#[derive(Clone, Copy)]
#[repr(C, packed(4))] // 12 bytes, not 16
struct Span {
    start: u64,
    len: u32,
}

const NULL: u32 = u32::MAX;

/// Linux reads no more than a device's own read-ahead for one request, 128 KiB by default, and drops the rest.
const ADVICE: usize = 128 << 10;

impl Span {
    const NULL: Self = Self { start: 0, len: NULL };

    fn of(self, bytes: &[u8]) -> &[u8] {
        // Inside: checked when the index or the page was made.
        &bytes[self.start as usize..][..self.len as usize]
    }
}

struct Shard {
    path: PathBuf,
    map: Mmap,
    first_row: usize,
    table: Table,
}

/// Where the values of a shard's rows lie.
enum Table {
    Arrow { audio: Vec<Span>, paths: Vec<Span> },
    Parquet(parquet::Pair),
}

/// What a shard's metadata say.
struct Found {
    class_names: Option<Vec<String>>,
    labels: Vec<i32>,
    table: Table,
}

/// What to index.
#[derive(Clone, Copy, Default)]
pub struct Options<'a> {
    pub audio: &'a str,          // the column of recordings
    pub label: Option<&'a str>,  // the column of class labels
    pub root: Option<&'a Path>,  // of `path` where bytes are null; None = the folder of the shard
    pub cache: Option<&'a Path>, // a folder to keep the index in
}

pub struct Index {
    shards: Vec<Shard>,
    labels: Vec<i32>,
    class_names: Option<Vec<String>>,
    fingerprint: String,
    root: Option<PathBuf>,
}

/// What one thread keeps between recordings.
#[derive(Default)]
pub struct Reader {
    pages: parquet::Pages,
    page: Option<Arc<Vec<u8>>>, // of the recording that was read last
    file: Option<Mmap>,
}

impl Reader {
    pub fn new() -> Self {
        Self::default()
    }

    /// Bytes of unpacked pages.
    pub fn bytes(&self) -> usize {
        self.pages.bytes()
    }
}

impl Index {
    /// Reads the metadata of every shard, in the order given, or the cache of what they were.
    ///
    /// # Errors
    /// A shard that cannot be opened or is not whole, a column that is missing or of another type, compressed record
    /// batches, labels outside the class names, or class names that differ between shards.
    pub fn open(shards: &[PathBuf], options: Options) -> Result<Self, Error> {
        if shards.is_empty() {
            return Err(Error::NoShards);
        }
        let mut maps = Vec::with_capacity(shards.len());
        let mut key = Hash::new();
        for path in shards {
            let open = |source| Error::Open { path: path.clone(), source };
            let file = File::open(path).map_err(open)?;
            let stat = file.metadata().map_err(open)?;
            if stat.len() == 0 {
                return Err(shard_error(path, 0, "is empty"));
            }
            let time = stat.modified().ok().and_then(|t| t.duration_since(UNIX_EPOCH).ok()).unwrap_or_default();
            key.text(&path.to_string_lossy());
            [stat.len(), time.as_secs(), time.subsec_nanos().into()].into_iter().for_each(|word| key.feed(word));
            // Safety: the map is only read. That nobody cuts the file short meanwhile is asked for in the module's docs.
            maps.push(unsafe { Mmap::map(&file) }.map_err(open)?);
        }
        let place = options.cache.map(|folder| folder.join(cache_name(shards, options)));
        let mut index = match &place {
            None => Self::read(shards, maps, options)?,
            Some(place) => match std::fs::read(place).ok().and_then(|b| cache::load(&b, key.0, shards, &mut maps)) {
                Some(index) => index,
                None => {
                    let index = Self::read(shards, maps, options)?;
                    let _ = cache::save(&index, key.0, place); // it only saves time
                    index
                }
            },
        };
        index.root = options.root.map(Path::to_path_buf);
        Ok(index)
    }

    fn read(shards: &[PathBuf], maps: Vec<Mmap>, options: Options) -> Result<Self, Error> {
        let mut index =
            Self { shards: Vec::new(), labels: Vec::new(), class_names: None, fingerprint: String::new(), root: None };
        for (path, map) in shards.iter().zip(maps) {
            index.add(path, map, options)?;
        }
        index.fingerprint = index.digest(options.label);
        Ok(index)
    }

    /// n recordings that lie outside their shard, which `open` would not allow: reading one panics.
    #[cfg(test)]
    pub(crate) fn broken(n: usize) -> Self {
        let map = memmap2::MmapMut::map_anon(1).and_then(memmap2::MmapMut::make_read_only).unwrap();
        let table = Table::Arrow { audio: vec![Span { start: 10, len: 10 }; n], paths: vec![Span::NULL; n] };
        Self {
            shards: vec![Shard { path: "broken.arrow".into(), map, first_row: 0, table }],
            labels: vec![-1; n],
            class_names: None,
            fingerprint: String::new(),
            root: None,
        }
    }

    /// Reads one shard from memory, and every row of it: what fuzzers feed. Nothing but an error may come of any bytes.
    ///
    /// # Errors
    /// As `open`, and of the first row that cannot be read.
    pub fn probe(bytes: &[u8], label: Option<&str>) -> Result<usize, Error> {
        let path = Path::new("probe");
        if bytes.is_empty() {
            return Err(shard_error(path, 0, "is empty"));
        }
        let open = |source| Error::Open { path: path.to_path_buf(), source };
        let mut map = memmap2::MmapMut::map_anon(bytes.len()).map_err(open)?;
        map.copy_from_slice(bytes);
        let map = map.make_read_only().map_err(open)?;
        // A root that holds nothing: bytes may not choose a file.
        let mut index =
            Self::read(&[path.to_path_buf()], vec![map], Options { audio: "audio", label, ..Options::default() })?;
        index.root = Some("/nonexistent".into());
        let mut reader = Reader::new();
        let mut first = Ok(index.n_rows());
        for row in 0..index.n_rows() {
            let found = index.encoded(row, &mut reader).map(drop);
            let found = found.and_then(|()| index.path(row, &mut reader).map(drop));
            if let (Err(error), true) = (found, first.is_ok()) {
                first = Err(error);
            }
        }
        first
    }

    pub fn n_rows(&self) -> usize {
        self.labels.len()
    }

    /// Class of each row; -1 where it is null, and everywhere when no label column was asked for.
    pub fn labels(&self) -> &[i32] {
        &self.labels
    }

    /// Names of the label's classes, when the schema says that it is a ClassLabel.
    pub fn class_names(&self) -> Option<&[String]> {
        self.class_names.as_deref()
    }

    /// 32 hex digits that change with the shards' names, sizes, order, row boundaries, labels or class names, and stay
    /// when the folder moves.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// The first row of each shard.
    pub fn first_rows(&self) -> impl Iterator<Item = usize> + '_ {
        self.shards.iter().map(|shard| shard.first_row)
    }

    /// The encoded recording of a row. In Arrow, in uncompressed Parquet and in a file of its own it is used as it lies
    /// there: nothing is read before the caller touches it.
    pub fn encoded<'a>(&'a self, row: usize, reader: &'a mut Reader) -> Result<&'a [u8], Error> {
        let (number, shard) = self.shard(row)?;
        let local = row - shard.first_row;
        match &shard.table {
            Table::Arrow { audio, .. } if audio[local].len != NULL => return Ok(audio[local].of(&shard.map)),
            Table::Arrow { .. } => {}
            Table::Parquet(pair) => {
                let value = pair.bytes.value(&shard.map, number, local, &mut reader.pages);
                match value.map_err(|what| self.bad_row(row, format!("its page {what}")))? {
                    parquet::Value::Null => {}
                    parquet::Value::InFile(span) => return Ok(span.of(&shard.map)),
                    parquet::Value::Owned(page, span) => return Ok(span.of(reader.page.insert(page))),
                }
            }
        }
        let Some(path) = self.path(row, reader)? else {
            return Err(self.bad_row(row, "holds no audio bytes, no path either".into()));
        };
        let folder = self.root.as_deref().or(shard.path.parent()).unwrap_or(Path::new(""));
        let place = folder.join(&path);
        let map = map_file(&place).map_err(|e| {
            let what = format!("holds no audio bytes, only the path {path:?}, and {}: {e}", place.display());
            self.bad_row(row, format!("{what}. Embed the audio in the shards, or set audio_root to the files' folder"))
        })?;
        Ok(match map {
            Some(map) => reader.file.insert(map),
            None => &[],
        })
    }

    /// The name under which the recording was stored, if there is one.
    pub fn path(&self, row: usize, reader: &mut Reader) -> Result<Option<String>, Error> {
        let (number, shard) = self.shard(row)?;
        let local = row - shard.first_row;
        let text = match &shard.table {
            Table::Arrow { paths, .. } if paths[local].len == NULL => return Ok(None),
            Table::Arrow { paths, .. } => std::str::from_utf8(paths[local].of(&shard.map)).map(str::to_owned),
            Table::Parquet(pair) => {
                let Some(column) = &pair.path else { return Ok(None) };
                let value = column.value(&shard.map, number, local, &mut reader.pages);
                match value.map_err(|what| self.bad_row(row, format!("the page of its path {what}")))? {
                    parquet::Value::Null => return Ok(None),
                    parquet::Value::InFile(span) => std::str::from_utf8(span.of(&shard.map)).map(str::to_owned),
                    parquet::Value::Owned(page, span) => std::str::from_utf8(span.of(&page)).map(str::to_owned),
                }
            }
        };
        text.map(Some).map_err(|_| self.bad_row(row, "its path is not UTF-8".into()))
    }

    /// Asks the system to have a recording's bytes in memory soon, at most `limit` of them. Returns how many: 0 for one in
    /// a file of its own.
    pub fn advise(&self, row: usize, limit: u64) -> u64 {
        let Ok((_, shard)) = self.shard(row) else { return 0 };
        let (start, len) = match &shard.table {
            Table::Arrow { audio, .. } => match audio[row - shard.first_row] {
                Span { len: NULL, .. } => return 0,
                Span { start, len } => (start, len),
            },
            Table::Parquet(pair) => match pair.bytes.page(row - shard.first_row) {
                Some(body) => (body.at, body.packed),
                None => return 0,
            },
        };
        let len = u64::from(len).min(limit).min((shard.map.len() as u64).saturating_sub(start));
        #[cfg(unix)]
        for begin in (start..start + len).step_by(ADVICE) {
            let size = ADVICE.min((start + len - begin) as usize);
            // Advice: without it the bytes are read when they are touched.
            let _ = shard.map.advise_range(memmap2::Advice::WillNeed, begin as usize, size);
        }
        len
    }

    /// An error about one recording, with the shard and the row's place in it.
    pub fn bad_row(&self, row: usize, what: String) -> Error {
        match self.shard(row) {
            Ok((_, shard)) => {
                Error::Recording { path: shard.path.clone(), row, row_in_shard: row - shard.first_row, what }
            }
            Err(error) => error,
        }
    }

    /// The number of the shard that holds a row, and the shard.
    fn shard(&self, row: usize) -> Result<(usize, &Shard), Error> {
        if row >= self.n_rows() {
            return Err(Error::RowRange { row: row as i64, n: self.n_rows() });
        }
        let number = self.shards.partition_point(|s| s.first_row <= row) - 1;
        Ok((number, &self.shards[number]))
    }

    fn add(&mut self, path: &Path, map: Mmap, options: Options) -> Result<(), Error> {
        let Options { audio, label, .. } = options;
        let found = if map.starts_with(b"PAR1") {
            parquet::read(&map, audio, label).map_err(|broken| {
                let (path, label) = (path.to_path_buf(), label.unwrap_or_default().to_owned());
                match broken {
                    parquet::Broken::Invalid(at, what) => Error::Shard { path, at, what },
                    parquet::Broken::NoColumn(name, have) => Error::NoColumn { path, name, have },
                    parquet::Broken::NotAudio(found) => Error::NotAudio { path, name: audio.into(), found },
                    parquet::Broken::StringLabel => Error::StringLabel { path, name: label },
                    parquet::Broken::NotLabel(found) => Error::NotLabel { path, name: label, found },
                }
            })?
        } else {
            arrow::read(path, &map, audio, label)?
        };
        if let Some(first) = self.shards.first() {
            if found.class_names != self.class_names {
                return Err(Error::ClassNames {
                    path: path.to_path_buf(),
                    first: first.path.clone(),
                    name: label.unwrap_or_default().to_owned(),
                    what: difference(self.class_names.as_deref(), found.class_names.as_deref()),
                });
            }
        } else {
            self.class_names = found.class_names;
        }
        let first_row = self.n_rows();
        let n = self.class_names.as_ref().map_or(i32::MAX as usize, Vec::len);
        if let Some(k) = found.labels.iter().position(|&l| l >= 0 && l as usize >= n) {
            return Err(Error::LabelRange {
                path: path.to_path_buf(),
                row: first_row + k,
                row_in_shard: k,
                label: found.labels[k].into(),
                n,
            });
        }
        self.labels.extend(found.labels);
        self.shards.push(Shard { path: path.to_path_buf(), map, first_row, table: found.table });
        Ok(())
    }

    fn digest(&self, label: Option<&str>) -> String {
        let mut hash = Hash::new();
        hash.text(label.unwrap_or_default());
        for name in self.class_names.iter().flatten() {
            hash.text(name);
        }
        for shard in &self.shards {
            hash.text(&shard.path.file_name().unwrap_or_default().to_string_lossy());
        }
        for shard in &self.shards {
            hash.feed(shard.map.len() as u64);
            hash.feed(shard.first_row as u64);
        }
        for (number, shard) in self.shards.iter().enumerate() {
            let end = self.shards.get(number + 1).map_or(self.n_rows(), |next| next.first_row);
            let labels = &self.labels[shard.first_row..end];
            match &shard.table {
                Table::Arrow { audio, .. } => {
                    for (span, label) in audio.iter().zip(labels) {
                        hash.feed(u64::from(span.len));
                        hash.feed(*label as u64);
                    }
                }
                Table::Parquet(pair) => {
                    labels.iter().for_each(|label| hash.feed(*label as u64));
                    for page in &pair.bytes.pages {
                        let Body { at, packed, n, .. } = page.body;
                        [at, packed.into(), n.into()].into_iter().for_each(|word| hash.feed(word));
                    }
                }
            }
        }
        format!("{:016x}{:016x}", hash.0[0], hash.0[1])
    }
}

/// None for an empty file, which cannot be mapped.
fn map_file(path: &Path) -> std::io::Result<Option<Mmap>> {
    // Before it is opened: opening a pipe waits for its writer.
    let stat = std::fs::metadata(path)?;
    if !stat.is_file() {
        return Err(std::io::Error::other("is no file"));
    }
    if stat.len() == 0 {
        return Ok(None);
    }
    // Safety: the map is only read. That nobody cuts the file short meanwhile is asked for in the module's docs.
    unsafe { Mmap::map(&File::open(path)?) }.map(Some)
}

/// Two lanes of 64 bits over words.
struct Hash([u64; 2]);

impl Hash {
    fn new() -> Self {
        Self([1, 2])
    }

    fn feed(&mut self, word: u64) {
        self.0 = self.0.map(|h| order::mix(h.rotate_left(5) ^ word).wrapping_add(h));
    }

    fn text(&mut self, s: &str) {
        self.bytes(s.as_bytes());
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.feed(bytes.len() as u64);
        let mut words = bytes.chunks_exact(8);
        for word in &mut words {
            self.feed(u64::from_le_bytes([word[0], word[1], word[2], word[3], word[4], word[5], word[6], word[7]]));
        }
        let rest = words.remainder();
        if !rest.is_empty() {
            let mut word = [0; 8];
            word[..rest.len()].copy_from_slice(rest);
            self.feed(u64::from_le_bytes(word));
        }
    }
}

fn cache_name(shards: &[PathBuf], options: Options) -> String {
    let mut hash = Hash::new();
    hash.text(options.audio);
    hash.feed(options.label.is_some().into());
    hash.text(options.label.unwrap_or_default());
    for path in shards {
        hash.text(&std::path::absolute(path).unwrap_or(path.clone()).to_string_lossy());
    }
    format!("{:016x}{:016x}.index", hash.0[0], hash.0[1])
}

fn shard_error(path: &Path, at: u64, what: impl Into<String>) -> Error {
    Error::Shard { path: path.to_path_buf(), at, what: what.into() }
}

fn difference(first: Option<&[String]>, here: Option<&[String]>) -> String {
    let (a, b) = match (first, here) {
        (Some(a), Some(b)) => (a, b),
        (None, _) => return "the latter does not name its classes".into(),
        (_, None) => return "the former does not name its classes".into(),
    };
    match (0..a.len().min(b.len())).find(|&i| a[i] != b[i]) {
        Some(i) => format!("class {i} is {:?} and {:?}", b[i], a[i]),
        None => format!("{} and {} classes", b.len(), a.len()),
    }
}

/// The names of a label's classes in the JSON of the key `huggingface`.
fn class_names(text: Option<&str>, label: &str) -> Result<Option<Vec<String>>, String> {
    let Some(text) = text else { return Ok(None) };
    let json: serde_json::Value = serde_json::from_str(text)
        .map_err(|e| format!("has broken JSON under its metadata key \"huggingface\": {e}"))?;
    let names = json.pointer("/info/features").and_then(|f| f.get(label)).and_then(|f| f.get("names"));
    let names = names.and_then(|n| n.as_array()).map(|n| n.iter().map(|v| v.as_str().map(str::to_owned)).collect());
    Ok(names.flatten())
}

/// The file of an index.
mod cache {
    use super::*;
    use parquet::{Column, Page, Pair};

    const MAGIC: &[u8] = b"jaxtrain index 2\n";

    pub(super) fn save(index: &Index, key: [u64; 2], place: &Path) -> std::io::Result<()> {
        let mut out = Out(MAGIC.to_vec());
        key.into_iter().for_each(|word| out.word(word));
        out.bytes(index.fingerprint.as_bytes());
        out.word(index.class_names.is_some().into());
        let names = index.class_names.as_deref().unwrap_or_default();
        out.word(names.len() as u64);
        names.iter().for_each(|name| out.bytes(name.as_bytes()));
        out.word(index.labels.len() as u64);
        index.labels.iter().for_each(|label| out.0.extend(label.to_le_bytes()));
        for shard in &index.shards {
            out.word(shard.first_row as u64);
            match &shard.table {
                Table::Arrow { audio, paths } => {
                    out.word(0);
                    out.word(audio.len() as u64);
                    audio.iter().chain(paths).for_each(|span| out.span(*span));
                }
                Table::Parquet(pair) => {
                    out.word(1 + u64::from(pair.path.is_some()));
                    [Some(&pair.bytes), pair.path.as_ref()].into_iter().flatten().for_each(|column| out.column(column));
                }
            }
        }
        let mut sum = Hash::new();
        sum.bytes(&out.0);
        out.word(sum.0[0]);
        if let Some(folder) = place.parent() {
            std::fs::create_dir_all(folder)?;
        }
        let beside = place.with_extension(format!("{}.tmp", std::process::id()));
        let written = std::fs::write(&beside, &out.0).and_then(|()| std::fs::rename(&beside, place));
        if written.is_err() {
            let _ = std::fs::remove_file(&beside);
        }
        written
    }

    /// None when anything in it is not as it should be. Takes the maps only when all is.
    pub(super) fn load(bytes: &[u8], key: [u64; 2], shards: &[PathBuf], maps: &mut Vec<Mmap>) -> Option<Index> {
        let (body, sum) = bytes.split_last_chunk::<8>()?;
        let mut hash = Hash::new();
        hash.bytes(body);
        let mut input = In(body.strip_prefix(MAGIC)?);
        if hash.0[0] != u64::from_le_bytes(*sum) || [input.word()?, input.word()?] != key {
            return None;
        }
        let fingerprint = input.text()?;
        let named = input.word()? != 0;
        let names: Option<Vec<_>> = (0..input.word()?).map(|_| input.text()).collect();
        let n_rows = input.len(4)?;
        let labels = input.take(4 * n_rows)?.chunks_exact(4).map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        let labels: Vec<i32> = labels.collect();
        let mut tables = Vec::new();
        for map in maps.iter() {
            let first_row = usize::try_from(input.word()?).ok()?;
            let table = match input.word()? {
                0 => {
                    let n = input.len(24)?;
                    let mut spans = |n| (0..n).map(|_| input.span(map.len())).collect::<Option<Vec<_>>>();
                    Table::Arrow { audio: spans(n)?, paths: spans(n)? }
                }
                kind @ (1 | 2) => Table::Parquet(Pair {
                    bytes: input.column()?,
                    path: if kind == 2 { Some(input.column()?) } else { None },
                }),
                _ => return None,
            };
            tables.push((first_row, table));
        }
        for (k, (first, table)) in tables.iter().enumerate() {
            let end = tables.get(k + 1).map_or(n_rows, |next| next.0);
            let n = end.checked_sub(*first)?;
            if (k == 0 && *first != 0) || matches!(table, Table::Arrow { audio, .. } if audio.len() != n) {
                return None;
            }
        }
        let shards = shards.iter().zip(maps.drain(..)).zip(tables);
        let shards =
            shards.map(|((path, map), (first_row, table))| Shard { path: path.clone(), map, first_row, table });
        Some(Index {
            shards: shards.collect(),
            labels,
            class_names: if named { Some(names?) } else { None },
            fingerprint,
            root: None,
        })
    }

    struct Out(Vec<u8>);

    impl Out {
        fn word(&mut self, word: u64) {
            self.0.extend(word.to_le_bytes());
        }

        fn bytes(&mut self, bytes: &[u8]) {
            self.word(bytes.len() as u64);
            self.0.extend(bytes);
        }

        fn span(&mut self, span: Span) {
            self.0.extend({ span.start }.to_le_bytes());
            self.0.extend({ span.len }.to_le_bytes());
        }

        fn column(&mut self, column: &Column) {
            self.word(column.levels.into());
            for pages in [&column.pages, &column.dictionaries] {
                self.word(pages.len() as u64);
                for page in pages {
                    let Body { at, packed, unpacked, n, levels, codec, encoding } = page.body;
                    self.word(at);
                    for small in [packed, unpacked, n, levels, codec.into(), encoding.into()] {
                        self.0.extend(small.to_le_bytes());
                    }
                    self.0.extend(page.first_row.to_le_bytes());
                    self.0.extend(page.dictionary.to_le_bytes());
                }
            }
        }
    }

    struct In<'a>(&'a [u8]);

    impl<'a> In<'a> {
        fn take(&mut self, n: usize) -> Option<&'a [u8]> {
            let (found, rest) = self.0.split_at_checked(n)?;
            self.0 = rest;
            Some(found)
        }

        fn word(&mut self) -> Option<u64> {
            Some(u64::from_le_bytes(self.take(8)?.try_into().ok()?))
        }

        fn small(&mut self) -> Option<u32> {
            Some(u32::from_le_bytes(self.take(4)?.try_into().ok()?))
        }

        /// A count of items of `size` bytes, all of which are there.
        fn len(&mut self, size: usize) -> Option<usize> {
            let n = usize::try_from(self.word()?).ok()?;
            (n.checked_mul(size)? <= self.0.len()).then_some(n)
        }

        fn text(&mut self) -> Option<String> {
            let n = self.len(1)?;
            String::from_utf8(self.take(n)?.to_vec()).ok()
        }

        fn span(&mut self, size: usize) -> Option<Span> {
            let span = Span { start: self.word()?, len: self.small()? };
            let fits = span.start.checked_add({ span.len }.into()).is_some_and(|end| end <= size as u64);
            (span.len == NULL || fits).then_some(span)
        }

        fn column(&mut self) -> Option<Column> {
            let levels = u8::try_from(self.word()?).ok()?;
            let mut pages = || {
                let n = self.len(40)?;
                (0..n)
                    .map(|_| {
                        let at = self.word()?;
                        let [packed, unpacked, n, levels] =
                            [self.small()?, self.small()?, self.small()?, self.small()?];
                        let [codec, encoding] = [self.small()? as u8, self.small()? as u8];
                        let body = Body { at, packed, unpacked, n, levels, codec, encoding };
                        Some(Page::new(body, self.small()?, self.small()?))
                    })
                    .collect::<Option<Vec<_>>>()
            };
            Some(Column { levels, pages: pages()?, dictionaries: pages()? })
        }
    }
}

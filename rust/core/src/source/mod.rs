//! A row index over many shards, built without reading audio, and the bytes of one recording on demand.
//!
//! Shards are Arrow IPC streams (as Hugging Face `datasets` writes them), Arrow IPC files, or Parquet (as the Hub
//! stores it), recognised by their first bytes. `arrow` and `parquet` describe the formats. In each, `audio` is a
//! struct of bytes (binary or large_binary) and path. If bytes are null, the recording is the file at path, relative to
//! a root, below which it must lie.
//!
//! Parquet shards that `jaxtrain index` wrote hold no audio: a row is a part \[start, end) of such a file; see `parts`.
//!
//! Class names are `info.features.<label>.names` in the JSON under the schema's metadata key `huggingface`.
//!
//! # Memory
//!
//! A row of an Arrow shard takes 28 bytes: two spans and a label. A row that is a part takes 24 to 26. Any other row of
//! a Parquet shard takes 4, and 12 more once a row of its page is read. A shard takes its path and its mapping. A
//! mapping needs no file descriptor, so any number of shards can be open at once. A shard must not change while it is
//! mapped: if it is truncated, the process is killed with SIGBUS. Each thread keeps in its `Reader` one recording that
//! is a file of its own, also as a mapping, and decompressed pages of Parquet: 64 MiB of them, or the page in use and
//! its dictionary if they are larger.
//!
//! With a folder for it, the index is cached in a file: see `cache`.

mod arrow;
mod cache;
mod copy_progress;
mod hash;
mod open;
mod parquet;
mod parts;
#[cfg(test)]
mod tests;

use jaxtrain_decode::refuse;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::UNIX_EPOCH;

use memmap2::Mmap;

use crate::error::{Error, Fault};
use copy_progress::CopyProgress;
use hash::Hash;
use parquet::Body;
pub use parts::Part;
use parts::Parts;

/// The place of a value in its shard. A null is `len == NULL`.
#[derive(Clone, Copy)]
#[repr(C, packed(4))] // 12 bytes, not 16
struct Span {
    start: u64,
    len: u32,
}

const NULL: u32 = u32::MAX;

/// Bytes of one request to read ahead. Linux ignores bytes beyond the device's read-ahead, 128 KiB by default.
const READ_AHEAD_REQUEST: usize = 128 << 10;
const LONG_FILE: usize = 32 << 20; // [bytes] of a file whose pages are released
const RELEASE_EVERY: usize = 32; // from one release to the next

impl Span {
    const NULL: Self = Self { start: 0, len: NULL };

    /// The bytes of the value, of the file or page that it lies in.
    fn slice(self, bytes: &[u8]) -> &[u8] {
        // In range: checked when the index was built or the page was opened.
        &bytes[self.start as usize..][..self.len as usize]
    }

    /// The end of the value. None for a null.
    fn end(self) -> Option<u64> {
        (self.len != NULL).then(|| self.start.saturating_add({ self.len }.into()))
    }
}

struct Shard {
    path: PathBuf,
    map: Mmap,
    progress: CopyProgress,
    first_row: usize,
    table: Table,
}

/// The places of the values of a shard's rows.
enum Table {
    Arrow { audio: Vec<Span>, paths: Vec<Span> },
    Parquet(parquet::Pair),
    Parts(Parts),
}

/// The metadata of one shard.
struct Metadata {
    class_names: Option<Vec<String>>,
    labels: Vec<i32>,
    table: Table,
}

/// The columns to index, and the folder of the files.
#[derive(Clone, Copy, Default)]
pub struct Options<'a> {
    pub audio: &'a str,          // the column of recordings
    pub label: Option<&'a str>,  // the column of class labels
    pub root: Option<&'a Path>,  // of `path` if bytes are null; None: the folder of the shard
    pub cache: Option<&'a Path>, // a folder to keep the index in
    pub links: bool,             // whether links may lead out of the root
    pub copying: bool,           // whether the shards may still be copied (`copy_progress`)
}

/// A row index over many shards.
#[derive(Default)]
pub struct Index {
    shards: Vec<Shard>,
    labels: Vec<i32>,
    class_names: Option<Vec<String>>,
    fingerprint: String,
    root: Option<PathBuf>,
    links: bool,
}

/// One thread's state between recordings.
#[derive(Default)]
pub struct Reader {
    pages: parquet::Pages,
    page: Option<Arc<Vec<u8>>>, // that holds the recording that was read last
    file: Option<Mmap>,
    part: Option<(usize, u32)>, // the shard, and the recording in it, whose file `file` is
    n_reused: usize,            // rows that found `file` open
}

impl Reader {
    /// Releases the pages of a long file that earlier rows read, now and then. They count as memory of this process,
    /// and a day of recording would fill it.
    fn release(&mut self) {
        self.n_reused += 1;
        #[cfg(unix)]
        if let Some(file) = self
            .file
            .as_ref()
            .filter(|file| file.len() > LONG_FILE && self.n_reused.is_multiple_of(RELEASE_EVERY))
        {
            // SAFETY: pages of a file that is only read are read from it again.
            let _ = unsafe { file.unchecked_advise(memmap2::UncheckedAdvice::DontNeed) };
        }
    }
}

impl Index {
    /// Reads the metadata of every shard, in the order given, or the cached index of these shards.
    /// Errors: A shard that cannot be opened or is damaged, a column that is missing or of another type, compressed
    /// record batches, labels outside the class names, or class names that differ between shards.
    pub fn open(shards: &[PathBuf], options: Options) -> Result<Self, Error> {
        refuse!(shards.is_empty(), Err(Error::Invalid("no shards were given".into())));
        let mut maps = Vec::with_capacity(shards.len());
        let mut key = Hash::new();
        for path in shards {
            let open = |source| Error::Open { path: path.clone(), source };
            let (file, stat) = open::regular(path).map_err(open)?;
            refuse!(stat.len() == 0, Err(Fault::at(0, "is empty").of(path)));
            let time = stat
                .modified()
                .ok()
                .and_then(|t| t.duration_since(UNIX_EPOCH).ok())
                .unwrap_or_default();
            key.text(&path.to_string_lossy());
            [stat.len(), time.as_secs(), time.subsec_nanos().into()]
                .into_iter()
                .for_each(|word| key.feed(word));
            // SAFETY: the map is only read, and the module requires that no process truncates the file meanwhile.
            maps.push(unsafe { Mmap::map(&file) }.map_err(open)?);
        }
        // A shard that is still copied has another time at each start.
        let place = options
            .cache
            .filter(|_| !options.copying)
            .map(|folder| folder.join(cache::name(shards, options)));
        let mut index = match &place {
            None => Self::read(shards, maps, options)?,
            Some(place) => {
                match map_file(place)
                    .ok()
                    .flatten()
                    .and_then(|b| cache::load(&b, key.words(), shards, &mut maps))
                {
                    Some(index) => index,
                    None => {
                        let index = Self::read(shards, maps, options)?;
                        let _ = cache::save(&index, key.words(), place); // without it, the next run takes longer
                        index
                    }
                }
            }
        };
        index.root = options.root.map(Path::to_path_buf);
        index.links = options.links;
        Ok(index)
    }

    fn read(shards: &[PathBuf], maps: Vec<Mmap>, options: Options) -> Result<Self, Error> {
        let mut index = Self::default();
        for (path, map) in shards.iter().zip(maps) {
            index.add(path, map, options)?;
        }
        index.fingerprint = index.digest(options.label);
        Ok(index)
    }

    /// Reads one shard from memory, and every row of it, for fuzzers: arbitrary bytes may cause nothing worse than an
    /// error.
    /// Errors: Those of `open`, and that of the first row that cannot be read.
    pub fn probe(bytes: &[u8], label: Option<&str>) -> Result<usize, Error> {
        let path = Path::new("probe");
        refuse!(bytes.is_empty(), Err(Fault::at(0, "is empty").of(path)));
        let open = |source| Error::Open { path: path.to_path_buf(), source };
        let mut map = memmap2::MmapMut::map_anon(bytes.len()).map_err(open)?;
        map.copy_from_slice(bytes);
        let map = map.make_read_only().map_err(open)?;
        // A root that does not exist, so that the bytes cannot name a file to open.
        let mut index = Self::read(
            &[path.to_path_buf()],
            vec![map],
            Options { audio: "audio", label, ..Options::default() },
        )?;
        index.root = Some("/nonexistent".into());
        let mut reader = Reader::default();
        let mut first = Ok(index.n_rows());
        for row in 0..index.n_rows() {
            let read = index.encoded(row, &mut reader).map(drop);
            let read = read.and_then(|()| index.path(row, &mut reader));
            let _ = index.part(row);
            first = first.and_then(|n| read.map(|_| n));
        }
        first
    }

    pub fn n_rows(&self) -> usize {
        self.labels.len()
    }

    /// The class of each row: -1 for a null, and for every row without a label column.
    pub fn labels(&self) -> &[i32] {
        &self.labels
    }

    /// Names of the label's classes, if the schema declares a ClassLabel.
    pub fn class_names(&self) -> Option<&[String]> {
        self.class_names.as_deref()
    }

    /// 32 hex digits that change with the shards' names, sizes, order, row boundaries, labels or class names, but not
    /// when the folder moves.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// The first row of each shard.
    pub fn first_rows(&self) -> impl Iterator<Item = usize> + '_ {
        self.shards.iter().map(|shard| shard.first_row)
    }

    /// The encoded recording of a row. In Arrow, in uncompressed Parquet and in a file of its own it stays in the
    /// mapped file: nothing is read before the caller accesses the bytes.
    /// Errors: A row that does not exist, or one without audio.
    pub fn encoded<'a>(&'a self, row: usize, reader: &'a mut Reader) -> Result<&'a [u8], Error> {
        let (number, shard) = self.shard(row)?;
        let local = row - shard.first_row;
        match &shard.table {
            Table::Arrow { audio, .. } if audio[local].len != NULL => {
                return Ok(audio[local].slice(&shard.map))
            }
            Table::Arrow { .. } => {}
            Table::Parts(parts) => {
                let known = Some((number, parts.files[local]));
                if reader.part == known {
                    reader.release();
                } else {
                    reader.part = None;
                    reader.file = self.open_file(row, shard, parts.name(local))?;
                    reader.part = known;
                }
                return Ok(reader.file.as_deref().unwrap_or(&[]));
            }
            Table::Parquet(pair) => {
                let value = pair.bytes.value(&shard.map, number, local, &mut reader.pages);
                match value.map_err(|what| self.bad_row(row, format!("its page {what}")))? {
                    parquet::Value::Null => {}
                    parquet::Value::InFile(span) => return Ok(span.slice(&shard.map)),
                    parquet::Value::Decompressed(page, span) => {
                        return Ok(span.slice(reader.page.insert(page)))
                    }
                }
            }
        }
        let Some(path) = self.path(row, reader)? else {
            return Err(self.bad_row(row, "holds no audio bytes and no path".into()));
        };
        reader.part = None;
        reader.file = self.open_file(row, shard, &path)?;
        Ok(reader.file.as_deref().unwrap_or(&[]))
    }

    /// Waits until the recording of a row is present, of a shard that is still being copied. Returns whether it is:
    /// false if `stop` asks to stop waiting.
    /// Errors: It cannot be copied.
    pub fn wait(&self, row: usize, stop: &dyn Fn() -> bool) -> Result<bool, Error> {
        let (_, shard) = self.shard(row)?;
        let Table::Arrow { audio, .. } = &shard.table else { return Ok(true) }; // complete since it was opened
        let span = audio[row - shard.first_row];
        let start = span.start;
        shard
            .progress
            .wait(start, span.end().unwrap_or(start), stop)
            .map_err(|what| Fault::at(start, what).of(&shard.path))
    }

    /// The part of its recording that a row is. None for a row that is its whole recording.
    pub fn part(&self, row: usize) -> Option<Part> {
        let (_, shard) = self.shard(row).ok()?;
        match &shard.table {
            Table::Parts(parts) => Some(parts.part(row - shard.first_row)),
            _ => None,
        }
    }

    /// The rows whose recordings have one of these names, and the number of names that are those of a recording. A name
    /// is a path, or an id: the path's file without folder and ending.
    /// Errors: A name that cannot be read.
    pub fn rows_named(
        &self, names: &std::collections::HashSet<String>,
    ) -> Result<(Vec<u32>, usize), Error> {
        let (mut rows, mut found) = (Vec::new(), std::collections::HashSet::new());
        let mut reader = Reader::default();
        let matching = |path: &str| {
            let id = || Path::new(path).file_stem().and_then(|stem| names.get(stem.to_str()?));
            names.get(path).or_else(id)
        };
        for (number, shard) in self.shards.iter().enumerate() {
            let end = self.shards.get(number + 1).map_or(self.n_rows(), |next| next.first_row);
            if let Table::Parts(parts) = &shard.table {
                let wanted: Vec<_> =
                    (0..parts.names.len()).map(|k| matching(parts.names.get(k as u32))).collect();
                found.extend(wanted.iter().flatten());
                let of_shard = parts
                    .files
                    .iter()
                    .enumerate()
                    .filter(|(_, &file)| wanted[file as usize].is_some());
                rows.extend(of_shard.map(|(local, _)| (shard.first_row + local) as u32));
                continue;
            }
            for row in shard.first_row..end {
                if let Some(name) = self.path(row, &mut reader)?.and_then(|path| matching(&path)) {
                    rows.push(row as u32);
                    found.insert(name);
                }
            }
        }
        Ok((rows, found.len()))
    }

    /// Maps the file of a recording that is not in its shard.
    fn open_file(&self, row: usize, shard: &Shard, path: &str) -> Result<Option<Mmap>, Error> {
        let folder = self.root.as_deref().or(shard.path.parent()).unwrap_or(Path::new(""));
        open::below(folder, Path::new(path), self.links).and_then(|place| map_file(&place)).map_err(|e| {
            let what =
                format!("holds no audio bytes, only the path {path:?}, and {}: {e}", folder.join(path).display());
            self.bad_row(
                row,
                format!("{what}. Embed the audio in the shards, or set audio_root to the folder of the files"),
            )
        })
    }

    /// The name that the recording was stored under. None for a null.
    /// Errors: A row that does not exist, or a name that cannot be read.
    pub fn path(&self, row: usize, reader: &mut Reader) -> Result<Option<String>, Error> {
        let (number, shard) = self.shard(row)?;
        let local = row - shard.first_row;
        let value = match &shard.table {
            Table::Parts(parts) => return Ok(Some(parts.name(local).to_owned())),
            Table::Arrow { paths, .. } if paths[local].len == NULL => parquet::Value::Null,
            Table::Arrow { paths, .. } => parquet::Value::InFile(paths[local]),
            Table::Parquet(pair) => {
                let Some(column) = &pair.path else { return Ok(None) };
                let value = column.value(&shard.map, number, local, &mut reader.pages);
                value.map_err(|what| self.bad_row(row, format!("the page of its path {what}")))?
            }
        };
        let text =
            value.slice(&shard.map).map(|bytes| std::str::from_utf8(bytes).map(str::to_owned));
        text.transpose().map_err(|_| self.bad_row(row, "its path is not UTF-8".into()))
    }

    /// Asks the system to read a recording's bytes into memory soon, at most `limit` of them. Returns how many: 0 for a
    /// recording that is a file of its own.
    pub fn advise(&self, row: usize, limit: u64) -> u64 {
        let Ok((_, shard)) = self.shard(row) else { return 0 };
        let (start, len) = match &shard.table {
            Table::Arrow { audio, .. } => match audio[row - shard.first_row] {
                Span { len: NULL, .. } => return 0,
                Span { start, len } => (start, len),
            },
            Table::Parts(_) => return 0,
            Table::Parquet(pair) => match pair.bytes.page(row - shard.first_row) {
                Some(page) => (page.body.at, page.body.packed),
                None => return 0,
            },
        };
        let len = u64::from(len).min(limit).min((shard.map.len() as u64).saturating_sub(start));
        shard.progress.want(start, start + len);
        #[cfg(unix)]
        for begin in (start..start + len).step_by(READ_AHEAD_REQUEST) {
            let size = READ_AHEAD_REQUEST.min((start + len - begin) as usize);
            // Only advice: without it, the bytes are read when they are accessed.
            let _ = shard.map.advise_range(memmap2::Advice::WillNeed, begin as usize, size);
        }
        len
    }

    /// An error about one recording, with the shard and the row's place in it.
    pub fn bad_row(&self, row: usize, what: String) -> Error {
        match self.shard(row) {
            Ok((_, shard)) => {
                let place = row - shard.first_row;
                Fault::plain(format!("row {row} (row {place} of this shard): {what}"))
                    .of(&shard.path)
            }
            Err(error) => error,
        }
    }

    /// An error of the sound of one recording, with its file, or the shard and its name there.
    pub fn bad_recording(&self, row: usize, what: &str) -> Error {
        let Ok((_, shard)) = self.shard(row) else { return self.bad_row(row, what.to_owned()) };
        match self.path(row, &mut Reader::default()) {
            Ok(Some(name)) if matches!(shard.table, Table::Parts(_)) => {
                let folder = self.root.as_deref().or(shard.path.parent()).unwrap_or(Path::new(""));
                Fault::plain(what.to_owned()).of(&folder.join(name))
            }
            Ok(Some(name)) => self.bad_row(row, format!("{name}: {what}")),
            _ => self.bad_row(row, what.to_owned()),
        }
    }

    /// The number of the shard that holds a row, and the shard.
    fn shard(&self, row: usize) -> Result<(usize, &Shard), Error> {
        refuse!(row >= self.n_rows(), Err(Error::RowRange { row: row as i64, n: self.n_rows() }));
        let number = self.shards.partition_point(|s| s.first_row <= row) - 1;
        Ok((number, &self.shards[number]))
    }

    /// Appends a shard.
    fn add(&mut self, path: &Path, map: Mmap, options: Options) -> Result<(), Error> {
        let Options { audio, label, copying, .. } = options;
        let n = map.len() as u64;
        let open = |source| Error::Open { path: path.to_path_buf(), source };
        let progress = if copying {
            CopyProgress::open(path, n).map_err(open)?
        } else {
            CopyProgress::complete()
        };
        let wait = |start, end| match progress.wait(start, end, &|| false) {
            Ok(_) => Ok(()),
            Err(what) => Err(Fault::at(start, what).of(path)),
        };
        wait(0, n.min(8))?;
        let metadata = if map.starts_with(b"PAR1") {
            wait(0, n)?; // pages lie everywhere, and each begins with its header
            parquet::read(&map, audio, label)
        } else {
            arrow::read(&map, audio, label, &progress)
        };
        let metadata = metadata.map_err(|fault| fault.of(path))?;
        if let Some(first) = self.shards.first() {
            if metadata.class_names != self.class_names {
                let (path, first, name) =
                    (path.display(), first.path.display(), label.unwrap_or_default());
                let what = difference(self.class_names.as_deref(), metadata.class_names.as_deref());
                return Err(Error::Invalid(format!(
                    "{path} and {first} differ in the classes of {name:?}: {what}. All shards must have the same names in the \
                     same order"
                )));
            }
        } else {
            self.class_names = metadata.class_names;
        }
        let first_row = self.n_rows();
        let n = self.class_names.as_ref().map_or(i32::MAX as usize, Vec::len);
        if let Some(k) = metadata.labels.iter().position(|&l| l >= 0 && l as usize >= n) {
            let (row, label) = (first_row + k, metadata.labels[k]);
            let what = format!(
                "row {row} (row {k} of this shard) has label {label}, but there are {n} classes"
            );
            return Err(Fault::plain(what).of(path));
        }
        self.labels.extend(metadata.labels);
        self.shards.push(Shard {
            path: path.to_path_buf(),
            map,
            progress,
            first_row,
            table: metadata.table,
        });
        Ok(())
    }

    /// The fingerprint.
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
                Table::Parts(parts) => {
                    hash.text(&parts.names.text);
                    for (row, label) in labels.iter().enumerate() {
                        hash.feed(*label as u64);
                        hash.feed(parts.files[row].into());
                        hash.feed(parts.starts[row].to_bits());
                        hash.feed(parts.ends[row].to_bits());
                    }
                    parts.channels.iter().for_each(|channel| hash.feed(*channel as u64));
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
        hash.hex()
    }
}

/// Maps a file. None for an empty one, which cannot be mapped.
pub fn map_file(path: &Path) -> std::io::Result<Option<Mmap>> {
    let (file, stat) = open::regular(path)?;
    if stat.len() == 0 {
        return Ok(None);
    }
    // SAFETY: the map is only read, and the module requires that no process truncates the file meanwhile.
    unsafe { Mmap::map(&file) }.map(Some)
}

/// The difference between the class names of two shards.
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

/// The names of a label's classes in the JSON of the metadata key `huggingface`.
fn class_names(text: Option<&str>, label: &str) -> Result<Option<Vec<String>>, String> {
    let Some(text) = text else { return Ok(None) };
    let json: serde_json::Value = serde_json::from_str(text)
        .map_err(|e| format!("has invalid JSON under its metadata key \"huggingface\": {e}"))?;
    let names =
        json.pointer("/info/features").and_then(|f| f.get(label)).and_then(|f| f.get("names"));
    let names = names
        .and_then(|n| n.as_array())
        .map(|n| n.iter().map(|v| v.as_str().map(str::to_owned)).collect());
    Ok(names.flatten())
}

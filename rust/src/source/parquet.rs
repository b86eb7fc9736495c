//! Parquet shards: which page holds a row, and where in it.
//!
//! ```text
//! PAR1 [column chunk: (dictionary page)? data page ...] ... [FileMetaData][u32 its size] PAR1
//! page = [PageHeader][body, compressed as the chunk says];   metadata are Thrift, compact protocol
//! ```
//!
//! A data page of a flat column is [levels][values]. A level says whether the row is there or null, in runs and bit-packed
//! groups; a value is its bytes after their length (PLAIN), or a number into the chunk's dictionary page.
//!
//! The index reads the footer, every page header of `audio.bytes` and `audio.path` (one touch of the file each), and the
//! label column. A page is opened when its first row is asked for. The values of an uncompressed page are used where they
//! lie in the mapped file, as in Arrow, and the list of their places (12 bytes a row) is kept for all threads. A compressed
//! page has to be unpacked whole: [`Pages`] keeps the last ones of a thread.
//!
//! Read are flat columns in the encodings PLAIN and dictionary, unpacked from Snappy, gzip, Zstandard, Brotli or LZ4_RAW:
//! what pyarrow, datasets and the Hub write. A page may unpack to 16 MiB and 64 times its size: audio does not shrink, so
//! what claims more is made to hurt.

use std::io::Read;
use std::sync::{Arc, OnceLock};

use super::{class_names, Found, Span, Table, NULL};

/// What reading a shard's metadata failed by.
pub(super) enum Broken {
    Invalid(u64, String),
    NoColumn(String, String),
    NotAudio(String),
    StringLabel,
    NotLabel(String),
}

type Result<T, E = String> = std::result::Result<T, E>;

impl From<String> for Broken {
    fn from(what: String) -> Self {
        Self::Invalid(0, what)
    }
}

/// Unpacked bytes that a thread keeps, beside the page that it reads now.
const KEPT: usize = 64 << 20;

/// Columns `bytes` and `path` of the audio struct.
pub(super) struct Pair {
    pub bytes: Column,
    pub path: Option<Column>,
}

/// A flat column of byte arrays: its data pages in the order of their rows, and their dictionaries.
#[derive(Default)]
pub(super) struct Column {
    pub levels: u8, // the level of a value that is there; 0 when none can be null
    pub pages: Vec<Page>,
    pub dictionaries: Vec<Page>,
}

#[derive(Default)]
pub(super) struct Page {
    pub body: Body,
    pub first_row: u32,  // of the shard
    pub dictionary: u32, // of `Column::dictionaries`, when the values are numbers into it
    places: OnceLock<Unpacked>,
}

impl Page {
    pub(super) fn new(body: Body, first_row: u32, dictionary: u32) -> Self {
        Self { body, first_row, dictionary, places: OnceLock::new() }
    }
}

/// Where a page lies and how it is packed. Its numbers are checked against the file when the page is opened.
#[derive(Clone, Copy, Default, Debug, PartialEq)]
pub(super) struct Body {
    pub at: u64,
    pub packed: u32,
    pub unpacked: u32,
    pub n: u32,      // values, nulls included
    pub levels: u32, // bytes of levels before the packed part (data page version 2), or `INSIDE`
    pub codec: u8,
    pub encoding: u8,
}

/// Levels are packed with the values, after their size (data page version 1).
const INSIDE: u32 = u32::MAX;

const UNCOMPRESSED: u8 = 0;
const PLAIN: u8 = 0;
const DICTIONARY: u8 = 8;

/// A page's values: places in `data`, or in the file when it is None.
#[derive(Clone)]
struct Unpacked {
    data: Option<Arc<Vec<u8>>>,
    places: Arc<Vec<Span>>,
}

/// Unpacked pages that one thread used last: at most `KEPT` bytes, and the page in use with its dictionary.
#[derive(Default)]
pub(super) struct Pages {
    kept: Vec<(usize, u64, Unpacked)>, // (shard, offset of the page, what it holds), the last used at the end
}

impl Pages {
    fn find(&mut self, shard: usize, at: u64) -> Option<Unpacked> {
        let i = self.kept.iter().position(|(s, a, _)| (*s, *a) == (shard, at))?;
        self.kept[i..].rotate_left(1);
        self.kept.last().map(|(_, _, page)| page.clone())
    }

    fn keep(&mut self, shard: usize, at: u64, page: &Unpacked) {
        let size = |p: &Unpacked| p.data.as_ref().map_or(0, |d| d.capacity()) + p.places.capacity() * size_of::<Span>();
        let mut total = size(page);
        // From the last used backwards; a dictionary is counted with each page that points to it, which errs to less.
        let fits = self.kept.iter().rev().take_while(|(_, _, p)| {
            total += size(p);
            total <= KEPT
        });
        let drop = self.kept.len() - fits.count();
        self.kept.drain(..drop);
        self.kept.push((shard, at, page.clone()));
    }

    pub(super) fn bytes(&self) -> usize {
        self.kept.iter().map(|(_, _, p)| p.data.as_ref().map_or(0, |d| d.capacity())).sum()
    }
}

/// A value, in memory of its own or in the file.
pub(super) enum Value {
    Null,
    Owned(Arc<Vec<u8>>, Span),
    InFile(Span),
}

impl Column {
    /// The page that holds a row of the shard.
    pub(super) fn page(&self, row: usize) -> Option<&Body> {
        let i = self.pages.partition_point(|p| p.first_row as usize <= row).checked_sub(1)?;
        Some(&self.pages[i].body)
    }

    /// The value of a row of the shard, of which `map` are the bytes and `shard` the number.
    pub(super) fn value(&self, map: &[u8], shard: usize, row: usize, pages: &mut Pages) -> Result<Value> {
        let i = self.pages.partition_point(|p| p.first_row as usize <= row).checked_sub(1);
        let page = i.and_then(|i| self.pages.get(i)).ok_or("lies in no page")?;
        let unpacked = self.open(map, shard, page, pages)?;
        match unpacked.places.get(row - page.first_row as usize) {
            None => Err("lies in no page".into()),
            Some(span) if span.len == NULL => Ok(Value::Null),
            Some(&span) => Ok(match unpacked.data {
                Some(data) => Value::Owned(data, span),
                None => Value::InFile(span),
            }),
        }
    }

    fn open(&self, map: &[u8], shard: usize, page: &Page, pages: &mut Pages) -> Result<Unpacked> {
        if let Some(found) = page.places.get() {
            return Ok(found.clone());
        }
        if let Some(found) = pages.find(shard, page.body.at) {
            return Ok(found);
        }
        let mut unpacked = page.body.unpack(map, self.levels)?;
        if page.body.encoding == DICTIONARY {
            let dictionary = self.dictionaries.get(page.dictionary as usize).ok_or("refers to no dictionary page")?;
            let words = self.open_dictionary(map, shard, dictionary, pages)?;
            let mut places = Vec::new();
            let levels = unpacked.take_levels()?;
            let numbers = unpacked.numbers(levels.iter().filter(|there| **there).count())?;
            places.try_reserve_exact(levels.len()).map_err(|e| e.to_string())?;
            let mut numbers = numbers.into_iter();
            for there in levels {
                places.push(match there.then(|| numbers.next()).flatten() {
                    None => Span::NULL,
                    Some(k) => *words.places.get(k as usize).ok_or("has a value outside its dictionary")?,
                });
            }
            let found = Unpacked { data: words.data, places: places.into() };
            return Ok(self.put(shard, page, found, pages));
        }
        let levels = unpacked.take_levels()?;
        let found = unpacked.plain(map, &levels)?;
        Ok(self.put(shard, page, found, pages))
    }

    fn open_dictionary(&self, map: &[u8], shard: usize, page: &Page, pages: &mut Pages) -> Result<Unpacked> {
        if let Some(found) = page.places.get() {
            return Ok(found.clone());
        }
        if let Some(found) = pages.find(shard, page.body.at) {
            return Ok(found);
        }
        let found = page.body.unpack(map, 0)?.plain(map, &vec![true; page.body.n as usize])?;
        Ok(self.put(shard, page, found, pages))
    }

    fn put(&self, shard: usize, page: &Page, found: Unpacked, pages: &mut Pages) -> Unpacked {
        if found.data.is_none() {
            return page.places.get_or_init(|| found).clone();
        }
        pages.keep(shard, page.body.at, &found);
        found
    }
}

/// A page's parts before its values are found.
struct Opened {
    data: Option<Vec<u8>>, // None: in the file
    range: std::ops::Range<usize>,
    levels: Vec<bool>,
    map_bytes: Vec<u8>, // of an uncompressed dictionary-coded page: its few numbers
}

impl Opened {
    fn take_levels(&mut self) -> Result<Vec<bool>> {
        Ok(std::mem::take(&mut self.levels))
    }

    fn numbers(&self, n: usize) -> Result<Vec<u32>> {
        let bytes = match &self.data {
            Some(data) => &data[self.range.clone()],
            None => &self.map_bytes,
        };
        numbers(bytes, n)
    }

    fn plain(self, map: &[u8], levels: &[bool]) -> Result<Unpacked> {
        let bytes = match &self.data {
            Some(data) => data.as_slice(),
            None => map,
        };
        let mut at = self.range.start;
        let mut places = Vec::new();
        places.try_reserve_exact(levels.len()).map_err(|e| e.to_string())?;
        for there in levels {
            if !there {
                places.push(Span::NULL);
                continue;
            }
            let start = at + 4;
            let size = bytes.get(at..start).filter(|_| start <= self.range.end).ok_or("is cut short inside a value")?;
            let len = u32::from_le_bytes([size[0], size[1], size[2], size[3]]);
            at = start.saturating_add(len as usize);
            if at > self.range.end || len == NULL {
                return Err("holds a value that reaches beyond its page".into());
            }
            places.push(Span { start: start as u64, len });
        }
        Ok(Unpacked { data: self.data.map(Arc::new), places: places.into() })
    }
}

impl Body {
    fn unpack(&self, map: &[u8], level: u8) -> Result<Opened> {
        let start = usize::try_from(self.at).unwrap_or(usize::MAX);
        let end = start.checked_add(self.packed as usize).filter(|end| *end <= map.len());
        let end = end.ok_or("lies outside the file")?;
        let v2 = if self.levels == INSIDE { 0 } else { self.levels as usize };
        if v2 > end - start {
            return Err("has levels that are longer than the page".into());
        }
        let mut opened = if self.codec == UNCOMPRESSED {
            Opened { data: None, range: start + v2..end, levels: Vec::new(), map_bytes: Vec::new() }
        } else {
            let size = (self.unpacked as usize).saturating_sub(v2);
            let data = decompress(self.codec, &map[start + v2..end], size)?;
            Opened { range: 0..data.len(), data: Some(data), levels: Vec::new(), map_bytes: Vec::new() }
        };
        let n = self.n as usize;
        if level == 0 {
            opened.levels = vec![true; n];
        } else if self.levels == INSIDE {
            let bytes = opened.data.as_deref().unwrap_or(map);
            let range = opened.range.clone();
            let size = bytes[range.clone()].first_chunk::<4>().ok_or("is cut short before its levels")?;
            let size = u32::from_le_bytes(*size) as usize;
            let levels =
                bytes[range.clone()].get(4..4usize.saturating_add(size)).ok_or("is cut short in its levels")?;
            opened.levels = there(levels, n, level)?;
            opened.range.start += 4 + size;
        } else {
            opened.levels = there(&map[start..start + v2], n, level)?;
        }
        if opened.data.is_none() && self.encoding == DICTIONARY {
            opened.map_bytes = map[opened.range.clone()].to_vec();
        }
        Ok(opened)
    }
}

fn decompress(codec: u8, packed: &[u8], size: usize) -> Result<Vec<u8>> {
    if size > (16 << 20) + packed.len().saturating_mul(64) {
        return Err(format!("claims to unpack from {} to {size} bytes", packed.len()));
    }
    let mut out = Vec::new();
    out.try_reserve_exact(size).map_err(|e| e.to_string())?;
    out.resize(size, 0);
    let broken = |codec: &str, e: &dyn std::fmt::Display| format!("cannot be unpacked as {codec}: {e}");
    let all = |codec, reader: &mut dyn Read, out: &mut [u8]| reader.read_exact(out).map_err(|e| broken(codec, &e));
    match codec {
        1 => {
            let n = snap::raw::decompress_len(packed).map_err(|e| broken("Snappy", &e))?;
            if n != size {
                return Err(format!("unpacks to {n} bytes where its header says {size}"));
            }
            snap::raw::Decoder::new().decompress(packed, &mut out).map_err(|e| broken("Snappy", &e))?;
        }
        2 => all("gzip", &mut flate2::read::GzDecoder::new(packed), &mut out)?,
        4 => all("Brotli", &mut brotli_decompressor::Decompressor::new(packed, 4096), &mut out)?,
        6 => {
            let decoder = ruzstd::decoding::StreamingDecoder::new(packed);
            all("Zstandard", &mut decoder.map_err(|e| broken("Zstandard", &e))?, &mut out)?;
        }
        7 => {
            let n = lz4_flex::block::decompress_into(packed, &mut out).map_err(|e| broken("LZ4", &e))?;
            if n != size {
                return Err(format!("unpacks to {n} bytes where its header says {size}"));
            }
        }
        other => {
            let name = match other {
                3 => "LZO",
                5 => "the old framed LZ4",
                _ => "an unknown codec",
            };
            return Err(format!("is packed with {name}, which is not read; write it with compression \"none\""));
        }
    }
    Ok(out)
}

/// Runs and bit-packed groups of `bits`-wide numbers: calls `each(value, count)` until `n` are there.
fn hybrid(bytes: &[u8], bits: u8, n: usize, mut each: impl FnMut(u32, usize)) -> Result<()> {
    let (mut at, mut left) = (0, n);
    let mut input = Thrift { bytes, at: 0 };
    while left > 0 {
        input.at = at;
        let header = input.varint()?;
        at = input.at;
        if header & 1 == 0 {
            let run = usize::try_from(header >> 1).map_err(|e| e.to_string())?.min(left);
            let width = usize::from(bits).div_ceil(8);
            let raw = at.checked_add(width).and_then(|end| bytes.get(at..end)).ok_or("is cut short inside a run")?;
            let value = raw.iter().rev().fold(0u32, |v, b| v << 8 | u32::from(*b));
            if run == 0 {
                return Err("holds an empty run".into());
            }
            each(value, run);
            (at, left) = (at + width, left - run);
        } else {
            let count = usize::try_from(header >> 1).ok().and_then(|groups| groups.checked_mul(8));
            let count = count.filter(|c| *c > 0).ok_or("holds an empty run")?;
            let size = (count / 8).checked_mul(usize::from(bits)).and_then(|s| at.checked_add(s));
            let end = size.ok_or("is cut short inside a run")?;
            let take = count.min(left);
            // A writer may leave out the padding of the last group.
            let raw = bytes.get(at..end.min(bytes.len())).filter(|raw| raw.len() * 8 >= take * usize::from(bits));
            let raw = raw.ok_or("is cut short inside a run")?;
            for i in 0..take {
                let first = i * usize::from(bits);
                let word =
                    (first / 8..raw.len().min(first / 8 + 5)).rev().fold(0u64, |w, k| w << 8 | u64::from(raw[k]));
                each((word >> (first % 8) & ((1u64 << bits) - 1)) as u32, 1);
            }
            (at, left) = (end, left - take);
        }
    }
    Ok(())
}

/// Which of `n` rows are not null.
fn there(bytes: &[u8], n: usize, level: u8) -> Result<Vec<bool>> {
    let mut out = Vec::new();
    out.try_reserve_exact(n).map_err(|e| e.to_string())?;
    let bits = (8 - level.leading_zeros()) as u8;
    hybrid(bytes, bits, n, |value, count| out.extend(std::iter::repeat_n(value == u32::from(level), count)))?;
    Ok(out)
}

/// Numbers into a dictionary: one byte that says their width, then the numbers.
fn numbers(bytes: &[u8], n: usize) -> Result<Vec<u32>> {
    let mut out = Vec::new();
    if n == 0 {
        return Ok(out);
    }
    let (&bits, rest) = bytes.split_first().ok_or("is cut short before its values")?;
    if bits > 32 {
        return Err(format!("has numbers {bits} bits wide"));
    }
    out.try_reserve_exact(n).map_err(|e| e.to_string())?;
    hybrid(rest, bits, n, |value, count| out.extend(std::iter::repeat_n(value, count)))?;
    Ok(out)
}

/// Reads a shard's metadata and labels.
pub(super) fn read(map: &[u8], audio: &str, label: Option<&str>) -> Result<Found, Broken> {
    let n = map.len();
    let end = n.checked_sub(8).filter(|_| n >= 12).ok_or("is cut short: Parquet ends with a footer".to_owned())?;
    match &map[end + 4..] {
        b"PAR1" => {}
        b"PARE" => return Err("is encrypted".to_owned().into()),
        _ => return Err("is cut short: Parquet ends with a footer, this one does not".to_owned().into()),
    }
    let size = u32::from_le_bytes([map[end], map[end + 1], map[end + 2], map[end + 3]]) as usize;
    let start = end.checked_sub(size).ok_or("has a footer that is longer than the file".to_owned())?;
    let at = |what: String| Broken::Invalid(start as u64, what);
    let footer = Footer::read(&map[start..end]).map_err(at)?;
    let chosen = Chosen::find(&footer.schema, audio, label)?;
    // Every row takes a byte somewhere; a claim beyond that would only make lists of nothing.
    if footer.n_rows > (n as u64).min(u32::MAX.into()) {
        return Err(at(format!("claims {} rows in {n} bytes", footer.n_rows)));
    }
    let mut pair = Pair {
        bytes: Column { levels: chosen.bytes.levels, ..Column::default() },
        path: chosen.path.as_ref().map(|leaf| Column { levels: leaf.levels, ..Column::default() }),
    };
    let mut labels = Vec::new();
    let mut first_row = 0u64;
    for group in &footer.groups {
        let last = first_row.saturating_add(group.n_rows);
        if last > footer.n_rows {
            return Err(at(format!("has more rows in its row groups than the {} that it claims", footer.n_rows)));
        }
        let chunk = |leaf: &Leaf| group.chunks.get(leaf.number).ok_or("has a row group without its columns".to_owned());
        pages(map, chunk(&chosen.bytes)?, first_row as u32, group.n_rows, &mut pair.bytes)?;
        if let (Some(column), Some(leaf)) = (&mut pair.path, &chosen.path) {
            pages(map, chunk(leaf)?, first_row as u32, group.n_rows, column)?;
        }
        match &chosen.label {
            Some(leaf) => read_labels(map, chunk(leaf)?, leaf.levels, first_row as u32, group.n_rows, &mut labels)?,
            None => labels.resize(last as usize, -1),
        }
        first_row = last;
    }
    if first_row != footer.n_rows {
        return Err(at(format!("holds {first_row} rows where it claims {}", footer.n_rows)));
    }
    let names = match label {
        Some(label) => class_names(footer.huggingface.as_deref(), label).map_err(at)?,
        None => None,
    };
    Ok(Found { class_names: names, labels, table: Table::Parquet(pair) })
}

/// Walks the page headers of a chunk.
fn pages(map: &[u8], chunk: &Chunk, first_row: u32, n_rows: u64, out: &mut Column) -> Result<(), Broken> {
    let dictionary = out.dictionaries.len() as u32;
    let mut at = chunk.start;
    let mut done = 0u64;
    while done < n_rows {
        let begin = usize::try_from(at).unwrap_or(usize::MAX);
        let here = at;
        let fail = |what: String| Broken::Invalid(here, what);
        let rest = map.get(begin..).filter(|rest| !rest.is_empty());
        let mut input = Thrift { bytes: rest.ok_or_else(|| fail("has a page outside the file".into()))?, at: 0 };
        let header = Header::read(&mut input).map_err(|what| fail(format!("has a broken page header: {what}")))?;
        let body = at + input.at as u64;
        at = body + u64::from(header.packed);
        if at > map.len() as u64 {
            return Err(fail("is cut short inside a page".into()));
        }
        let encoding = match (header.kind, header.encoding) {
            (Kind::Other, _) => continue,
            (Kind::Dictionary, 0 | 2) | (_, 0) => PLAIN,
            (Kind::Data, 2 | 8) => DICTIONARY,
            (_, other) => {
                let names = ["", "", "", "RLE", "BIT_PACKED", "DELTA_BINARY_PACKED", "DELTA_LENGTH_BYTE_ARRAY"];
                let name = names.get(other as usize).filter(|name| !name.is_empty()).unwrap_or(&"an unknown encoding");
                return Err(fail(format!(
                    "has a page in {name}, but only PLAIN and dictionary are read; write it again"
                )));
            }
        };
        let page = Body {
            at: body,
            packed: header.packed,
            unpacked: header.unpacked,
            n: header.n,
            levels: header.levels.unwrap_or(if header.kind == Kind::Data { INSIDE } else { 0 }),
            codec: if header.is_packed { chunk.codec } else { UNCOMPRESSED },
            encoding,
        };
        if u64::from(header.n) > map.len() as u64 {
            return Err(fail(format!("claims {} values in one page", header.n)));
        }
        if header.kind == Kind::Dictionary {
            out.dictionaries.push(Page::new(page, 0, 0));
            continue;
        }
        out.pages.push(Page::new(page, first_row + done as u32, dictionary));
        done += u64::from(header.n);
    }
    if done != n_rows {
        return Err(Broken::Invalid(at, format!("has a column of {done} values in a row group of {n_rows} rows")));
    }
    Ok(())
}

/// Appends an int64 column. Nulls and negative values become -1.
fn read_labels(
    map: &[u8],
    chunk: &Chunk,
    levels: u8,
    first_row: u32,
    n_rows: u64,
    out: &mut Vec<i32>,
) -> Result<(), Broken> {
    let mut column = Column::default();
    pages(map, chunk, first_row, n_rows, &mut column)?;
    let read = |body: &Body, level: u8| -> Result<(Vec<bool>, Vec<u8>)> {
        let mut opened = body.unpack(map, level)?;
        let there = opened.take_levels()?;
        let bytes = opened.data.as_deref().unwrap_or(map);
        Ok((there, bytes[opened.range.clone()].to_vec()))
    };
    let number = |bytes: &[u8], i: usize| {
        let word = bytes.get(i * 8..i * 8 + 8).ok_or("is cut short inside its labels")?;
        let value = i64::from_le_bytes(word.try_into().map_err(|_| "is cut short inside its labels")?);
        // Beyond any class list: reported as out of range.
        Ok::<i32, String>(if value < 0 { -1 } else { i32::try_from(value).unwrap_or(i32::MAX) })
    };
    for page in &column.pages {
        let fail = |what| Broken::Invalid(page.body.at, what);
        let (there, bytes) = read(&page.body, levels).map_err(fail)?;
        let n = there.iter().filter(|there| **there).count();
        let mut values = Vec::new();
        if page.body.encoding == DICTIONARY {
            let words = column.dictionaries.first().ok_or_else(|| fail("refers to no dictionary page".into()))?;
            let words = read(&words.body, 0).map_err(fail)?.1;
            for k in numbers(&bytes, n).map_err(fail)? {
                values.push(number(&words, k as usize).map_err(fail)?);
            }
        } else {
            for i in 0..n {
                values.push(number(&bytes, i).map_err(fail)?);
            }
        }
        let mut values = values.into_iter();
        out.extend(there.into_iter().map(|there| if there { values.next().unwrap_or(-1) } else { -1 }));
    }
    Ok(())
}

/// A column without columns inside, by its number among them.
struct Leaf {
    number: usize,
    levels: u8,
}

struct Chosen {
    bytes: Leaf,
    path: Option<Leaf>,
    label: Option<Leaf>,
}

impl Chosen {
    fn find(schema: &[Element], audio: &str, label: Option<&str>) -> Result<Self, Broken> {
        let mut walk = Walk { schema, at: 0, leaf: 0 };
        let root = schema.first().ok_or("has an empty schema".to_owned())?;
        walk.at = 1;
        let (mut found, mut label_leaf, mut names) = (None, None, Vec::new());
        for _ in 0..root.n_children {
            let element = walk.element()?;
            let before = (walk.at, walk.leaf);
            let text = walk.describe(0)?;
            names.push(format!("{} ({text})", element.name));
            let wrong = || Broken::NotAudio(text.clone());
            if element.name == audio {
                (walk.at, walk.leaf) = before;
                let levels = element.level().ok_or_else(wrong)?;
                walk.at += 1;
                let (mut bytes, mut path) = (None, None);
                for _ in 0..element.n_children {
                    let child = walk.element()?;
                    let leaf = child.level().map(|l| Leaf { number: walk.leaf, levels: levels + l });
                    if child.physical == Some(BYTE_ARRAY) {
                        match child.name.as_str() {
                            "bytes" => bytes = leaf,
                            "path" => path = leaf,
                            _ => {}
                        }
                    }
                    walk.describe(0)?;
                }
                found = Some((bytes.ok_or_else(wrong)?, path));
            } else if Some(element.name.as_str()) == label {
                label_leaf = match (element.physical, element.converted, element.level()) {
                    (Some(2), None | Some(18), Some(levels)) => Some(Leaf { number: before.1, levels }),
                    (Some(BYTE_ARRAY), _, _) => return Err(Broken::StringLabel),
                    _ => return Err(Broken::NotLabel(text)),
                };
            }
        }
        let missing = |name: &str| Broken::NoColumn(name.into(), names.join(", "));
        let (bytes, path) = found.ok_or_else(|| missing(audio))?;
        if let (Some(name), None) = (label, &label_leaf) {
            return Err(missing(name));
        }
        Ok(Self { bytes, path, label: label_leaf })
    }
}

/// Goes through the schema, which is a tree written depth first.
struct Walk<'a> {
    schema: &'a [Element],
    at: usize,
    leaf: usize,
}

impl<'a> Walk<'a> {
    fn element(&self) -> Result<&'a Element> {
        self.schema.get(self.at).ok_or("has a schema with missing columns".into())
    }

    /// A column's type, for people; steps over it.
    fn describe(&mut self, depth: usize) -> Result<String> {
        let element = self.element()?;
        self.at += 1;
        if depth > 32 {
            return Err("has a schema that is nested too deeply".into());
        }
        if element.physical.is_none() {
            let mut inner = Vec::new();
            for _ in 0..element.n_children {
                let name = &self.element()?.name;
                inner.push(format!("{name}: {}", self.describe(depth + 1)?));
            }
            return Ok(format!("struct<{}>", inner.join(", ")));
        }
        self.leaf += 1;
        let kind = match element.physical {
            Some(BYTE_ARRAY) if element.converted == Some(0) => "string",
            Some(k) => *["bool", "int32", "int64", "int96", "float", "double", "binary", "fixed_size_binary"]
                .get(k as usize)
                .unwrap_or(&"an unknown type"),
            None => "struct",
        };
        Ok(if element.repetition == 2 { format!("list of {kind}") } else { kind.into() })
    }
}

const BYTE_ARRAY: i64 = 6;

struct Element {
    name: String,
    physical: Option<i64>,
    converted: Option<i64>,
    repetition: i64,
    n_children: usize,
}

impl Element {
    /// What it adds to the level of a value that is there; None when it repeats.
    fn level(&self) -> Option<u8> {
        match self.repetition {
            0 => Some(0),
            1 => Some(1),
            _ => None,
        }
    }
}

struct Chunk {
    start: u64,
    codec: u8,
}

struct Group {
    n_rows: u64,
    chunks: Vec<Chunk>,
}

struct Footer {
    schema: Vec<Element>,
    n_rows: u64,
    groups: Vec<Group>,
    huggingface: Option<String>,
}

impl Footer {
    fn read(bytes: &[u8]) -> Result<Self> {
        let mut input = Thrift { bytes, at: 0 };
        let mut footer = Self { schema: Vec::new(), n_rows: 0, groups: Vec::new(), huggingface: None };
        input.fields(|input, id, kind| {
            match id {
                2 => footer.schema = input.list(kind, Self::element)?,
                3 => footer.n_rows = input.positive()?,
                4 => footer.groups = input.list(kind, Self::group)?,
                5 => {
                    for (key, value) in input.list(kind, Self::pair)? {
                        if key == "huggingface" {
                            footer.huggingface = Some(value);
                        }
                    }
                }
                8 => return Err("is encrypted".into()),
                _ => input.skip(kind, 0)?,
            }
            Ok(())
        })?;
        Ok(footer)
    }

    fn element(input: &mut Thrift) -> Result<Element> {
        let mut element =
            Element { name: String::new(), physical: None, converted: None, repetition: 0, n_children: 0 };
        input.fields(|input, id, kind| {
            match id {
                1 => element.physical = Some(input.int()?),
                3 => element.repetition = input.int()?,
                4 => element.name = input.text()?,
                5 => element.n_children = usize::try_from(input.int()?).map_err(|e| e.to_string())?,
                6 => element.converted = Some(input.int()?),
                _ => input.skip(kind, 0)?,
            }
            Ok(())
        })?;
        Ok(element)
    }

    fn pair(input: &mut Thrift) -> Result<(String, String)> {
        let (mut key, mut value) = (String::new(), String::new());
        input.fields(|input, id, kind| {
            match id {
                1 => key = input.text()?,
                2 => value = input.text()?,
                _ => input.skip(kind, 0)?,
            }
            Ok(())
        })?;
        Ok((key, value))
    }

    fn group(input: &mut Thrift) -> Result<Group> {
        let mut group = Group { n_rows: 0, chunks: Vec::new() };
        input.fields(|input, id, kind| {
            match id {
                1 => group.chunks = input.list(kind, Self::chunk)?,
                3 => group.n_rows = input.positive()?,
                _ => input.skip(kind, 0)?,
            }
            Ok(())
        })?;
        Ok(group)
    }

    fn chunk(input: &mut Thrift) -> Result<Chunk> {
        let (mut data, mut dictionary, mut codec) = (None, None, 0);
        input.fields(|input, id, kind| {
            match (id, kind) {
                (1, _) => return Err("keeps its columns in other files, which is not read".into()),
                (3, STRUCT) => input.fields(|input, id, kind| {
                    match id {
                        4 => codec = u8::try_from(input.int()?).map_err(|e| e.to_string())?,
                        9 => data = Some(input.positive()?),
                        11 => dictionary = Some(input.positive()?),
                        _ => input.skip(kind, 0)?,
                    }
                    Ok(())
                })?,
                _ => input.skip(kind, 0)?,
            }
            Ok(())
        })?;
        let data = data.ok_or("has a column without data")?;
        // Some writers give a dictionary's offset as 0 when there is none.
        Ok(Chunk { start: dictionary.filter(|d| (4..data).contains(d)).unwrap_or(data), codec })
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Data,
    Dictionary,
    Other,
}

struct Header {
    kind: Kind,
    packed: u32,
    unpacked: u32,
    n: u32,
    encoding: i64,
    levels: Option<u32>, // of version 2
    is_packed: bool,
}

impl Header {
    fn read(input: &mut Thrift) -> Result<Self> {
        let mut header =
            Self { kind: Kind::Other, packed: 0, unpacked: 0, n: 0, encoding: 0, levels: None, is_packed: true };
        let size = |n: u64| u32::try_from(n).map_err(|e| e.to_string());
        input.fields(|input, id, kind| {
            match (id, kind) {
                (1, _) => {
                    header.kind = match input.int()? {
                        0 | 3 => Kind::Data,
                        2 => Kind::Dictionary,
                        _ => Kind::Other,
                    }
                }
                (2, _) => header.unpacked = size(input.positive()?)?,
                (3, _) => header.packed = size(input.positive()?)?,
                (5 | 7, STRUCT) => input.fields(|input, id, kind| {
                    match id {
                        1 => header.n = size(input.positive()?)?,
                        2 => header.encoding = input.int()?,
                        _ => input.skip(kind, 0)?,
                    }
                    Ok(())
                })?,
                (8, STRUCT) => {
                    header.levels = Some(0);
                    input.fields(|input, id, kind| {
                        match id {
                            1 => header.n = size(input.positive()?)?,
                            4 => header.encoding = input.int()?,
                            5 => header.levels = Some(size(input.positive()?)?),
                            6 if input.positive()? != 0 => return Err("has repetition levels".into()),
                            6 => {}
                            7 => header.is_packed = kind == TRUE,
                            _ => input.skip(kind, 0)?,
                        }
                        Ok(())
                    })?;
                }
                _ => input.skip(kind, 0)?,
            }
            Ok(())
        })?;
        Ok(header)
    }
}

const TRUE: u8 = 1;
const STRUCT: u8 = 12;

/// Thrift's compact protocol.
struct Thrift<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Thrift<'a> {
    fn byte(&mut self) -> Result<u8> {
        let byte = self.bytes.get(self.at).ok_or("is cut short")?;
        self.at += 1;
        Ok(*byte)
    }

    fn varint(&mut self) -> Result<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            value |= u64::from(byte & 0x7F) << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err("holds a number that does not end".into())
    }

    fn int(&mut self) -> Result<i64> {
        let raw = self.varint()?;
        Ok((raw >> 1) as i64 ^ -((raw & 1) as i64))
    }

    fn positive(&mut self) -> Result<u64> {
        u64::try_from(self.int()?).map_err(|_| "holds a negative size".into())
    }

    fn take(&mut self, n: usize) -> Result<&'a [u8]> {
        let end = self.at.checked_add(n).ok_or("is cut short")?;
        let bytes = self.bytes.get(self.at..end).ok_or("is cut short")?;
        self.at = end;
        Ok(bytes)
    }

    fn binary(&mut self) -> Result<&'a [u8]> {
        let n = usize::try_from(self.varint()?).map_err(|e| e.to_string())?;
        self.take(n)
    }

    fn text(&mut self) -> Result<String> {
        Ok(String::from_utf8_lossy(self.binary()?).into_owned())
    }

    /// Calls `each(self, id, type)` for every field of a struct.
    fn fields(&mut self, mut each: impl FnMut(&mut Self, i64, u8) -> Result<()>) -> Result<()> {
        let mut id = 0i64;
        loop {
            let head = self.byte()?;
            if head == 0 {
                return Ok(());
            }
            id = if head >> 4 == 0 { self.int()? } else { id.saturating_add(i64::from(head >> 4)) };
            each(self, id, head & 15)?;
        }
    }

    fn list<T>(&mut self, kind: u8, mut item: impl FnMut(&mut Self) -> Result<T>) -> Result<Vec<T>> {
        if kind != 9 {
            return Err("holds something else than a list".into());
        }
        let (n, _) = self.list_head()?;
        (0..n).map(|_| item(self)).collect() // an item takes at least a byte, so this ends with the input
    }

    fn list_head(&mut self) -> Result<(u64, u8)> {
        let head = self.byte()?;
        let n = if head >> 4 == 15 { self.varint()? } else { u64::from(head >> 4) };
        Ok((n, head & 15))
    }

    fn skip(&mut self, kind: u8, depth: usize) -> Result<()> {
        if depth > 32 {
            return Err("is nested too deeply".into());
        }
        match kind {
            1 | 2 => {}
            3 => drop(self.byte()?),
            4..=6 => drop(self.varint()?),
            7 => drop(self.take(8)?),
            8 => drop(self.binary()?),
            9 | 10 => {
                let (n, item) = self.list_head()?;
                for _ in 0..n {
                    self.item(item, depth)?;
                }
            }
            11 => {
                let n = self.varint()?;
                let kinds = if n == 0 { 0 } else { self.byte()? };
                for _ in 0..n {
                    self.item(kinds >> 4, depth)?;
                    self.item(kinds & 15, depth)?;
                }
            }
            STRUCT => self.fields(|input, _, kind| input.skip(kind, depth + 1))?,
            13 => drop(self.take(16)?),
            other => return Err(format!("holds an unknown type {other}")),
        }
        Ok(())
    }

    /// Skips an item of a list or map, where a truth value takes a byte.
    fn item(&mut self, kind: u8, depth: usize) -> Result<()> {
        match kind {
            1 | 2 => self.byte().map(drop),
            _ => self.skip(kind, depth + 1),
        }
    }
}

//! The cache of an index: a file that holds it while names, sizes and modification times of the shards do not change.
//!
//! ```text
//! "jaxtrain index 4\n" [key: 16 bytes] [body] [hash of all before: 8 bytes]
//! ```
//!
//! The body is the values that `Stored` lists, one after the other: numbers are little-endian, and a list begins with
//! its length. The file's name is the hash of the shards' paths and of the columns. The key is that of names, sizes and
//! times. A file that does not match in any of these is made again. It is written under another name and renamed, so a
//! reader sees all of it or nothing. A file that cannot be written costs only the time that it would have saved.

use jaxtrain_decode::refuse;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use super::copy_progress::CopyProgress;
use super::hash::Hash;
use super::parquet::{Body, Column, Page, Pair};
use super::parts::{Names, Parts};
use super::{Index, Options, Shard, Span, Table};

const MAGIC: &[u8] = b"jaxtrain index 4\n";

/// The name of the file for these shards and columns.
pub(super) fn name(shards: &[PathBuf], options: Options) -> String {
    let mut hash = Hash::new();
    hash.text(options.audio);
    hash.feed(options.label.is_some().into());
    hash.text(options.label.unwrap_or_default());
    for path in shards {
        hash.text(&std::path::absolute(path).unwrap_or(path.clone()).to_string_lossy());
    }
    format!("{}.index", hash.hex())
}

/// Writes the index to `place`.
pub(super) fn save(index: &Index, key: [u64; 2], place: &Path) -> std::io::Result<()> {
    let mut out = MAGIC.to_vec();
    key.iter().for_each(|word| word.put(&mut out));
    index.fingerprint.put(&mut out);
    index.class_names.put(&mut out);
    index.labels.put(&mut out);
    for shard in &index.shards {
        (shard.first_row as u64).put(&mut out);
        shard.table.put(&mut out);
    }
    let mut sum = Hash::new();
    sum.bytes(&out);
    sum.words()[0].put(&mut out);
    if let Some(folder) = place.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let temporary = place.with_extension(format!("{}.tmp", std::process::id()));
    let written =
        std::fs::write(&temporary, &out).and_then(|()| std::fs::rename(&temporary, place));
    if written.is_err() {
        let _ = std::fs::remove_file(&temporary);
    }
    written
}

/// The index in the file's bytes. None when anything in it is invalid. Takes the maps only when everything is valid.
pub(super) fn load(
    bytes: &[u8], key: [u64; 2], shards: &[PathBuf], maps: &mut Vec<Mmap>,
) -> Option<Index> {
    let (body, sum) = bytes.split_last_chunk::<8>()?;
    let mut hash = Hash::new();
    hash.bytes(body);
    let input = &mut body.strip_prefix(MAGIC)?;
    refuse!(
        hash.words()[0] != u64::from_le_bytes(*sum) || [u64::get(input)?, u64::get(input)?] != key,
        None
    );
    let (fingerprint, class_names, labels) =
        (Stored::get(input)?, Stored::get(input)?, Vec::<i32>::get(input)?);
    let mut tables = Vec::new();
    for _ in maps.iter() {
        tables.push((u64::get(input)? as usize, Table::get(input)?));
    }
    for (k, ((first, table), map)) in tables.iter().zip(maps.iter()).enumerate() {
        let end = tables.get(k + 1).map_or(labels.len(), |next| next.0);
        let n = end.checked_sub(*first)?;
        let valid = match table {
            Table::Arrow { audio, paths } => {
                let fits = |span: &Span| span.end().is_none_or(|end| end <= map.len() as u64);
                audio.len() == n && paths.len() == n && audio.iter().chain(paths).all(fits)
            }
            Table::Parts(parts) => parts.len() == n && parts.is_valid(),
            Table::Parquet(_) => true, // a page is checked when it is opened
        };
        refuse!((k == 0 && *first != 0) || !valid, None);
    }
    let shards = shards.iter().zip(maps.drain(..)).zip(tables);
    let shards = shards.map(|((path, map), (first_row, table))| {
        let (path, progress) = (path.clone(), CopyProgress::complete());
        Shard { path, map, progress, first_row, table }
    });
    Some(Index {
        shards: shards.collect(),
        labels,
        class_names,
        fingerprint,
        root: None,
        links: false,
    })
}

/// A value of the body.
trait Stored: Sized {
    fn put(&self, out: &mut Vec<u8>);
    /// Takes the value from the beginning of `input`. None if that does not hold one.
    fn get(input: &mut &[u8]) -> Option<Self>;
}

macro_rules! numbers {
    ($($number:ty)*) => {$(
        impl Stored for $number {
            fn put(&self, out: &mut Vec<u8>) {
                out.extend(self.to_le_bytes());
            }
            fn get(input: &mut &[u8]) -> Option<Self> {
                input.split_off(..size_of::<Self>())?.try_into().ok().map(Self::from_le_bytes)
            }
        }
    )*};
}

macro_rules! structs {
    ($($name:ident { $($field:ident)* })*) => {$(
        impl Stored for $name {
            fn put(&self, out: &mut Vec<u8>) {
                $(self.$field.put(out);)*
            }
            fn get(input: &mut &[u8]) -> Option<Self> {
                let mut value = Self::default();
                $(value.$field = Stored::get(input)?;)*
                Some(value)
            }
        }
    )*};
}

numbers! { u8 i16 u32 i32 u64 f64 }
structs! {
    Pair { bytes path }
    Column { levels pages dictionaries }
    Page { body first_row dictionary }
    Body { at packed unpacked n levels codec encoding }
    Parts { names files starts ends channels }
    Names { text ends }
}

impl Stored for Span {
    fn put(&self, out: &mut Vec<u8>) {
        { self.start }.put(out);
        { self.len }.put(out);
    }
    fn get(input: &mut &[u8]) -> Option<Self> {
        Some(Self { start: Stored::get(input)?, len: Stored::get(input)? })
    }
}

impl<T: Stored> Stored for Vec<T> {
    fn put(&self, out: &mut Vec<u8>) {
        (self.len() as u64).put(out);
        self.iter().for_each(|item| item.put(out));
    }
    fn get(input: &mut &[u8]) -> Option<Self> {
        (0..u64::get(input)?).map(|_| T::get(input)).collect() // an item takes a byte, so this ends with the input
    }
}

impl Stored for String {
    fn put(&self, out: &mut Vec<u8>) {
        (self.len() as u64).put(out);
        out.extend(self.as_bytes());
    }
    fn get(input: &mut &[u8]) -> Option<Self> {
        String::from_utf8(Vec::get(input)?).ok()
    }
}

impl<T: Stored> Stored for Option<T> {
    fn put(&self, out: &mut Vec<u8>) {
        u8::from(self.is_some()).put(out);
        self.iter().for_each(|value| value.put(out));
    }
    fn get(input: &mut &[u8]) -> Option<Self> {
        Some(if u8::get(input)? == 0 { None } else { Some(T::get(input)?) })
    }
}

impl Stored for Table {
    fn put(&self, out: &mut Vec<u8>) {
        match self {
            Self::Arrow { audio, paths } => {
                out.push(0);
                audio.put(out);
                paths.put(out);
            }
            Self::Parquet(pair) => {
                out.push(1);
                pair.put(out);
            }
            Self::Parts(parts) => {
                out.push(2);
                parts.put(out);
            }
        }
    }
    fn get(input: &mut &[u8]) -> Option<Self> {
        Some(match u8::get(input)? {
            0 => Self::Arrow { audio: Stored::get(input)?, paths: Stored::get(input)? },
            1 => Self::Parquet(Stored::get(input)?),
            2 => Self::Parts(Stored::get(input)?),
            _ => return None,
        })
    }
}

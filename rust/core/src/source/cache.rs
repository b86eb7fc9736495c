//! The cache of an index: a file that holds it while names, sizes and modification times of the shards stay what they were.
//!
//! ```text
//! "jaxtrain index 3\n" [key: 16 bytes] [body] [hash of all before: 8 bytes]
//! ```
//!
//! Integers are little-endian. The file's name is the hash of the shards' paths and of the columns; the key, that of names,
//! sizes and times. A file that does not match in any of these is made again. It is written under another name and renamed, so
//! a reader sees all of it or nothing; a file that cannot be written costs only the time that it would have saved.

use jaxtrain_decode::refuse;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use super::hash::Hash;
use super::parquet::{Body, Column, Page, Pair};
use super::parts::{Names, Parts, MEAN};
use super::there::There;
use super::{Index, Options, Shard, Span, Table, NULL};

const MAGIC: &[u8] = b"jaxtrain index 3\n";

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
            Table::Parts(parts) => {
                out.word(3);
                out.bytes(parts.names.text.as_bytes());
                out.word(parts.names.ends.len() as u64);
                parts.names.ends.iter().for_each(|end| out.word(*end));
                out.word(parts.len() as u64);
                parts.files.iter().for_each(|file| out.0.extend(file.to_le_bytes()));
                parts.starts.iter().chain(&parts.ends).for_each(|time| out.0.extend(time.to_le_bytes()));
                out.word(parts.channels.len() as u64);
                parts.channels.iter().for_each(|channel| out.0.extend(channel.to_le_bytes()));
            }
        }
    }
    let mut sum = Hash::new();
    sum.bytes(&out.0);
    out.word(sum.words()[0]);
    if let Some(folder) = place.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let temporary = place.with_extension(format!("{}.tmp", std::process::id()));
    let written = std::fs::write(&temporary, &out.0).and_then(|()| std::fs::rename(&temporary, place));
    if written.is_err() {
        let _ = std::fs::remove_file(&temporary);
    }
    written
}

/// The index in the file's bytes; None when anything in it is invalid. Takes the maps only when everything is valid.
pub(super) fn load(bytes: &[u8], key: [u64; 2], shards: &[PathBuf], maps: &mut Vec<Mmap>) -> Option<Index> {
    let (body, sum) = bytes.split_last_chunk::<8>()?;
    let mut hash = Hash::new();
    hash.bytes(body);
    let mut input = In(body.strip_prefix(MAGIC)?);
    refuse!(hash.words()[0] != u64::from_le_bytes(*sum) || [input.word()?, input.word()?] != key, None);
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
            3 => Table::Parts(input.parts()?),
            _ => return None,
        };
        tables.push((first_row, table));
    }
    for (k, (first, table)) in tables.iter().enumerate() {
        let end = tables.get(k + 1).map_or(n_rows, |next| next.0);
        let n = end.checked_sub(*first)?;
        let other = match table {
            Table::Arrow { audio, .. } => audio.len() != n,
            Table::Parts(parts) => parts.len() != n,
            Table::Parquet(_) => false,
        };
        refuse!((k == 0 && *first != 0) || other, None);
    }
    let shards = shards.iter().zip(maps.drain(..)).zip(tables);
    let shards = shards.map(|((path, map), (first_row, table))| {
        let (path, there) = (path.clone(), There::all());
        Shard { path, map, there, first_row, table }
    });
    Some(Index {
        shards: shards.collect(),
        labels,
        class_names: if named { Some(names?) } else { None },
        fingerprint,
        root: None,
        links: false,
    })
}

/// Writes the body.
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

/// Reads the body.
struct In<'a>(&'a [u8]);

impl<'a> In<'a> {
    fn take(&mut self, n: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(n)?;
        self.0 = rest;
        Some(taken)
    }

    fn word(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.take(8)?.try_into().ok()?))
    }

    fn small(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.take(4)?.try_into().ok()?))
    }

    /// A count of items of `size` bytes, all of which fit in what is left.
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

    fn parts(&mut self) -> Option<Parts> {
        let text = self.text()?;
        let n = self.len(8)?;
        let ends: Vec<u64> = (0..n).map(|_| self.word()).collect::<Option<_>>()?;
        let sound = ends.windows(2).all(|pair| pair[0] <= pair[1])
            && ends.last().copied().unwrap_or(0) == text.len() as u64
            && ends.iter().all(|&end| text.is_char_boundary(end as usize));
        let n = self.len(20)?;
        let files: Vec<u32> =
            self.take(4 * n)?.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        let mut times = || -> Option<Vec<f64>> {
            let bytes = self.take(8 * n)?.chunks_exact(8);
            Some(bytes.map(|b| f64::from_le_bytes(b.try_into().unwrap_or_default())).collect())
        };
        let (starts, stops) = (times()?, times()?);
        let channels = match self.len(2)? {
            0 => Vec::new(),
            k if k == n => self.take(2 * n)?.chunks_exact(2).map(|b| i16::from_le_bytes([b[0], b[1]])).collect(),
            _ => return None,
        };
        let valid =
            sound && files.iter().all(|&file| (file as usize) < ends.len()) && channels.iter().all(|&c| c >= MEAN);
        valid.then_some(Parts { names: Names { text, ends }, files, starts, ends: stops, channels })
    }

    fn column(&mut self) -> Option<Column> {
        let levels = u8::try_from(self.word()?).ok()?;
        let mut pages = || {
            let n = self.len(40)?;
            (0..n)
                .map(|_| {
                    let at = self.word()?;
                    let [packed, unpacked, n, levels] = [self.small()?, self.small()?, self.small()?, self.small()?];
                    let [codec, encoding] = [self.small()? as u8, self.small()? as u8];
                    let body = Body { at, packed, unpacked, n, levels, codec, encoding };
                    Some(Page::new(body, self.small()?, self.small()?))
                })
                .collect::<Option<Vec<_>>>()
        };
        Some(Column { levels, pages: pages()?, dictionaries: pages()? })
    }
}

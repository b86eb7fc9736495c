//! Parquet shards: the page of each row, and its place in the page.
//!
//! ```text
//! PAR1 [column chunk: (dictionary page)? data page ...] ... [FileMetaData][u32 its size] PAR1
//! page = [PageHeader][body, compressed with the chunk's codec];   metadata: Thrift, compact protocol
//! ```
//!
//! A data page of a flat column is [levels][values]. A level says whether the row's value is present or null, in runs
//! and bit-packed groups. A value is its length and its bytes (PLAIN), or an index into the chunk's dictionary page.
//!
//! The index reads the footer, every page header of `audio.bytes` and `audio.path` (one access to the file each), and
//! the label column. A page is opened when one of its rows is first requested. The values of an uncompressed page are
//! used in place in the mapped file, as in Arrow, and the list of their positions (12 bytes a row) is kept for all
//! threads. A compressed page has to be decompressed whole. [`Pages`] keeps the pages that a thread used last.
//!
//! Supported are flat columns in the encodings PLAIN and dictionary, compressed with Snappy, gzip, Zstandard, Brotli or
//! LZ4_RAW, as pyarrow, datasets and the Hub write them. A page may decompress to 16 MiB plus 64 times its size: audio
//! hardly shrinks, so a page that claims more is hostile.

mod encoding;
mod metadata;
mod page;
mod schema;
mod thrift;

use super::parts::{Numbers, Parts, MEAN, VERSION};
use super::{class_names, Metadata, Table};
use crate::error::Fault;
use jaxtrain_decode::refuse;
use metadata::{Chunk, Footer, PageHeader};
pub(super) use page::{Body, Column, Page, Pages, Pair, Value};
use page::{DICTIONARY, INSIDE, PLAIN, UNCOMPRESSED};
use schema::{Chosen, Leaf};
use thrift::Thrift;

type Result<T, E = String> = std::result::Result<T, E>;

/// Reads a shard's metadata and labels.
pub(super) fn read(map: &[u8], audio: &str, label: Option<&str>) -> Result<Metadata, Fault> {
    let n = map.len();
    let end = n
        .checked_sub(8)
        .filter(|_| n >= 12)
        .ok_or("is cut short: Parquet ends with a footer".to_owned())?;
    match &map[end + 4..] {
        b"PAR1" => {}
        b"PARE" => return Err("is encrypted".to_owned().into()),
        _ => {
            return Err("is cut short: Parquet ends with a footer, this one does not"
                .to_owned()
                .into())
        }
    }
    let size = u32::from_le_bytes([map[end], map[end + 1], map[end + 2], map[end + 3]]) as usize;
    let start =
        end.checked_sub(size).ok_or("has a footer that is longer than the file".to_owned())?;
    let at = |what: String| Fault::at(start as u64, what);
    let footer = Footer::read(&map[start..end]).map_err(at)?;
    if let Some(version) = footer.parts.as_ref().filter(|version| *version != VERSION) {
        let what =
            format!("was written by another version of jaxtrain index ({version:?}; this one reads {VERSION:?})");
        return Err(at(format!("{what}: run jaxtrain index again")));
    }
    let chosen = Chosen::find(&footer.schema, audio, label, footer.parts.is_some())?;
    // Every row takes at least a byte, so a larger count is false; believing it would only allocate memory.
    if footer.n_rows > (n as u64).min(u32::MAX.into()) {
        return Err(at(format!("claims {} rows in {n} bytes", footer.n_rows)));
    }
    let mut pair = Pair {
        bytes: Column { levels: chosen.bytes.levels, ..Column::default() },
        path: chosen.path.as_ref().map(|leaf| Column { levels: leaf.levels, ..Column::default() }),
    };
    let mut labels = Vec::new();
    let mut parts = Parts::default();
    let mut first_row = 0u64;
    for group in &footer.groups {
        let last = first_row.saturating_add(group.n_rows);
        if last > footer.n_rows {
            return Err(at(format!(
                "has more rows in its row groups than the {} of its footer",
                footer.n_rows
            )));
        }
        let chunk = |leaf: &Leaf| {
            group.chunks.get(leaf.number).ok_or("has a row group without its columns".to_owned())
        };
        pages(map, chunk(&chosen.bytes)?, first_row as u32, group.n_rows, &mut pair.bytes)?;
        if let (Some(column), Some(leaf)) = (&mut pair.path, &chosen.path) {
            pages(map, chunk(leaf)?, first_row as u32, group.n_rows, column)?;
        }
        let rows = (first_row as u32, group.n_rows);
        match &chosen.label {
            // Nulls and negative values become -1. One that does not fit is beyond any list of classes: reported as out
            // of range.
            Some(leaf) => {
                numbers(map, chunk(leaf)?, leaf.levels, rows, &mut labels, -1, |bytes: [u8; 8]| {
                    i32::try_from(i64::from_le_bytes(bytes).max(-1)).unwrap_or(i32::MAX)
                })?
            }
            None => labels.resize(last as usize, -1),
        }
        if let Some([start, end, channel]) = &chosen.part {
            let time = |bytes: [u8; 8]| f64::from_le_bytes(bytes);
            numbers(map, chunk(start)?, start.levels, rows, &mut parts.starts, 0.0, time)?;
            numbers(map, chunk(end)?, end.levels, rows, &mut parts.ends, f64::INFINITY, time)?;
            let number = |bytes: [u8; 4]| {
                i16::try_from(i32::from_le_bytes(bytes)).unwrap_or(i16::MAX).max(MEAN)
            };
            numbers(map, chunk(channel)?, channel.levels, rows, &mut parts.channels, MEAN, number)?;
        }
        first_row = last;
    }
    if first_row != footer.n_rows {
        return Err(at(format!(
            "has {first_row} rows in its row groups; its footer claims {}",
            footer.n_rows
        )));
    }
    let names = match label {
        Some(label) => class_names(footer.huggingface.as_deref(), label).map_err(at)?,
        None => None,
    };
    if chosen.part.is_none() {
        return Ok(Metadata { class_names: names, labels, table: Table::Parquet(pair) });
    }
    let mut numbers = Numbers::default();
    let mut pages = Pages::default();
    let Some(paths) = &pair.path else {
        return Err(Fault::not_audio(audio, "without a path"));
    };
    for row in 0..labels.len() {
        let path =
            paths.value(map, 0, row, &mut pages).map_err(|what| at(format!("its path {what}")))?;
        let path = path
            .slice(map)
            .ok_or_else(|| at(format!("row {row} of this shard names no recording")))?;
        let number = numbers.of(path);
        parts.files.push(
            number.ok_or_else(|| {
                at(format!("row {row} of this shard has a path that is not UTF-8"))
            })?,
        );
    }
    if parts.channels.iter().all(|&channel| channel == MEAN) {
        parts.channels = Vec::new();
    }
    parts.names = numbers.names;
    for list in [&mut parts.starts, &mut parts.ends] {
        list.shrink_to_fit();
    }
    Ok(Metadata { class_names: names, labels, table: Table::Parts(parts) })
}

/// Appends the pages of a column chunk, found by walking their headers.
fn pages(
    map: &[u8], chunk: &Chunk, first_row: u32, n_rows: u64, out: &mut Column,
) -> Result<(), Fault> {
    let dictionary = out.dictionaries.len() as u32;
    let mut at = chunk.start;
    let mut done = 0u64;
    while done < n_rows {
        let begin = usize::try_from(at).unwrap_or(usize::MAX);
        let here = at;
        let fail = |what: String| Fault::at(here, what);
        let rest = map.get(begin..).filter(|rest| !rest.is_empty());
        let mut input =
            Thrift::new(rest.ok_or_else(|| fail("has a page outside the file".into()))?);
        let header = PageHeader::read(&mut input)
            .map_err(|what| fail(format!("has a broken page header: {what}")))?;
        let body = at + input.position() as u64;
        at = body + u64::from(header.packed);
        refuse!(at > map.len() as u64, Err(fail("is cut short inside a page".into())));
        let encoding = match (header.kind, header.encoding) {
            (metadata::DICTIONARY, 0 | 2) | (metadata::DATA, 0) => PLAIN,
            (metadata::DATA, 2 | 8) => DICTIONARY,
            (metadata::DATA | metadata::DICTIONARY, other) => {
                let names = [
                    "",
                    "",
                    "",
                    "RLE",
                    "BIT_PACKED",
                    "DELTA_BINARY_PACKED",
                    "DELTA_LENGTH_BYTE_ARRAY",
                ];
                let name = names
                    .get(other as usize)
                    .filter(|name| !name.is_empty())
                    .unwrap_or(&"an unknown encoding");
                return Err(fail(format!(
                    "has a page encoded as {name}, but only PLAIN and dictionary are supported; write it again with one of them"
                )));
            }
            _ => continue,
        };
        let page = Body {
            at: body,
            packed: header.packed,
            unpacked: header.unpacked,
            n: header.n,
            levels: header.levels.unwrap_or(if header.kind == metadata::DATA { INSIDE } else { 0 }),
            codec: if header.is_packed { chunk.codec } else { UNCOMPRESSED },
            encoding,
        };
        if u64::from(header.n) > map.len() as u64 {
            return Err(fail(format!(
                "claims {} values in one page, more than the file has bytes",
                header.n
            )));
        }
        if header.kind == metadata::DICTIONARY {
            out.dictionaries.push(Page::new(page, 0, 0));
            continue;
        }
        out.pages.push(Page::new(page, first_row + done as u32, dictionary));
        done += u64::from(header.n);
    }
    if done != n_rows {
        return Err(Fault::at(
            at,
            format!("has a column of {done} values in a row group of {n_rows} rows"),
        ));
    }
    Ok(())
}

/// Appends a column of numbers of `N` bytes each. A null becomes `null`. `rows`: the first one, and their number.
fn numbers<const N: usize, T: Copy>(
    map: &[u8], chunk: &Chunk, levels: u8, (first_row, n_rows): (u32, u64), out: &mut Vec<T>,
    null: T, value: impl Fn([u8; N]) -> T,
) -> Result<(), Fault> {
    let mut column = Column::default();
    pages(map, chunk, first_row, n_rows, &mut column)?;
    let read = |body: &Body, level: u8| -> Result<(Vec<bool>, Vec<u8>)> {
        let opened = body.open(map, level)?;
        let values = opened.data.as_deref().unwrap_or(map)[opened.range].to_vec();
        Ok((opened.present, values))
    };
    let number = |bytes: &[u8], i: usize| {
        let word = bytes.get(i * N..i * N + N).ok_or("is cut short inside its numbers")?;
        Ok::<T, String>(value(word.try_into().map_err(|_| "is cut short inside its numbers")?))
    };
    for page in &column.pages {
        let fail = |what| Fault::at(page.body.at, what);
        let (present, bytes) = read(&page.body, levels).map_err(fail)?;
        let n = present.iter().filter(|present| **present).count();
        let mut values = Vec::new();
        if page.body.encoding == DICTIONARY {
            let words = column
                .dictionaries
                .first()
                .ok_or_else(|| fail("refers to no dictionary page".into()))?;
            let words = read(&words.body, 0).map_err(fail)?.1;
            for k in encoding::indices(&bytes, n).map_err(fail)? {
                values.push(number(&words, k as usize).map_err(fail)?);
            }
        } else {
            for i in 0..n {
                values.push(number(&bytes, i).map_err(fail)?);
            }
        }
        let mut values = values.into_iter();
        out.extend(present.into_iter().map(|present| {
            if present {
                values.next().unwrap_or(null)
            } else {
                null
            }
        }));
    }
    Ok(())
}

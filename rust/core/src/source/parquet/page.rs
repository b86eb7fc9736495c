//! The values of a column: the page of each, and its place in the page.

use jaxtrain_decode::refuse;
use std::sync::{Arc, OnceLock};

use super::super::{Span, NULL};
use super::encoding::{decompress, indices, present};
use super::Result;

/// Decompressed bytes that a thread keeps, in addition to the page in use.
const CACHE_BYTES: usize = 64 << 20;

/// Columns `bytes` and `path` of the audio struct.
#[derive(Default)]
pub struct Pair {
    pub bytes: Column,
    pub path: Option<Column>,
}

/// A flat column of byte arrays: its data pages in the order of their rows, and their dictionaries.
#[derive(Default)]
pub struct Column {
    pub levels: u8, // the level of a value that is present; 0 when none can be null
    pub pages: Vec<Page>,
    pub dictionaries: Vec<Page>,
}

/// A data page or a dictionary page.
#[derive(Default)]
pub struct Page {
    pub body: Body,
    pub first_row: u32,       // of the shard
    pub dictionary: u32,      // of `Column::dictionaries`, when the values are indices into it
    values: OnceLock<Values>, // of an uncompressed page, once it was opened
}

impl Page {
    pub fn new(body: Body, first_row: u32, dictionary: u32) -> Self {
        Self { body, first_row, dictionary, values: OnceLock::new() }
    }

    /// The values, if they were found before: by any thread (an uncompressed page), or by this one (a compressed page).
    fn cached(&self, shard: usize, pages: &mut Pages) -> Option<Values> {
        self.values.get().cloned().or_else(|| pages.find(shard, self.body.at))
    }

    fn cache(&self, shard: usize, values: Values, pages: &mut Pages) -> Values {
        if values.data.is_none() {
            return self.values.get_or_init(|| values).clone();
        }
        pages.keep(shard, self.body.at, &values);
        values
    }
}

/// The place of a page, and its packing. These numbers are checked against the file when the page is opened.
#[derive(Clone, Copy, Default)]
pub struct Body {
    pub at: u64,
    pub packed: u32,
    pub unpacked: u32,
    pub n: u32,      // values, nulls included
    pub levels: u32, // bytes of levels before the compressed part (data page version 2), or `INSIDE`
    pub codec: u8,
    pub encoding: u8,
}

/// The levels are compressed together with the values and begin with their size (data page version 1).
pub const INSIDE: u32 = u32::MAX;

pub const UNCOMPRESSED: u8 = 0;
pub const PLAIN: u8 = 0;
pub const DICTIONARY: u8 = 8;

/// The values of a page: spans of `data`, or of the file when it is None.
#[derive(Clone)]
struct Values {
    data: Option<Arc<Vec<u8>>>,
    spans: Arc<Vec<Span>>,
}

/// Decompressed pages that one thread used last: at most `CACHE_BYTES` bytes, and the page in use with its dictionary.
#[derive(Default)]
pub struct Pages {
    cached: Vec<(usize, u64, Values)>, // (shard, offset of the page, its values), the last used at the end
}

impl Pages {
    fn find(&mut self, shard: usize, at: u64) -> Option<Values> {
        let i = self.cached.iter().position(|(s, a, _)| (*s, *a) == (shard, at))?;
        self.cached[i..].rotate_left(1);
        self.cached.last().map(|(_, _, page)| page.clone())
    }

    fn keep(&mut self, shard: usize, at: u64, page: &Values) {
        let size = |p: &Values| {
            p.data.as_ref().map_or(0, |d| d.capacity()) + p.spans.capacity() * size_of::<Span>()
        };
        let mut total = size(page);
        // From the last used backwards. A dictionary is counted with each page that refers to it, so fewer may be kept.
        let fits = self.cached.iter().rev().take_while(|(_, _, p)| {
            total += size(p);
            total <= CACHE_BYTES
        });
        let drop = self.cached.len() - fits.count();
        self.cached.drain(..drop);
        self.cached.push((shard, at, page.clone()));
    }
}

/// A value: in decompressed memory, or in the mapped file.
pub enum Value {
    Null,
    Decompressed(Arc<Vec<u8>>, Span),
    InFile(Span),
}

impl Value {
    /// Its bytes: `map` is the file. None for a null.
    pub fn slice<'a>(&'a self, map: &'a [u8]) -> Option<&'a [u8]> {
        match self {
            Self::Null => None,
            Self::Decompressed(page, span) => Some(span.slice(page)),
            Self::InFile(span) => Some(span.slice(map)),
        }
    }
}

impl Column {
    /// The page that holds a row of the shard.
    pub fn page(&self, row: usize) -> Option<&Page> {
        self.pages.get(self.pages.partition_point(|p| p.first_row as usize <= row).checked_sub(1)?)
    }

    /// The value of a row of shard number `shard`, whose bytes are `map`.
    pub fn value(&self, map: &[u8], shard: usize, row: usize, pages: &mut Pages) -> Result<Value> {
        let page = self.page(row).ok_or("lies in no page")?;
        let values = self.values(map, shard, page, pages)?;
        match values.spans.get(row - page.first_row as usize) {
            None => Err("lies in no page".into()),
            Some(span) if span.len == NULL => Ok(Value::Null),
            Some(&span) => Ok(match values.data {
                Some(data) => Value::Decompressed(data, span),
                None => Value::InFile(span),
            }),
        }
    }

    /// The values of a data page, from memory if they were found before.
    fn values(&self, map: &[u8], shard: usize, page: &Page, pages: &mut Pages) -> Result<Values> {
        if let Some(values) = page.cached(shard, pages) {
            return Ok(values);
        }
        let opened = page.body.open(map, self.levels)?;
        let values = if page.body.encoding == DICTIONARY {
            let dictionary = self
                .dictionaries
                .get(page.dictionary as usize)
                .ok_or("refers to no dictionary page")?;
            let entries = Self::entries(map, shard, dictionary, pages)?;
            let indices = opened.indices(map)?;
            let mut spans = Vec::new();
            spans.try_reserve_exact(opened.present.len()).map_err(|e| e.to_string())?;
            let mut indices = indices.into_iter();
            for present in opened.present {
                spans.push(match present.then(|| indices.next()).flatten() {
                    None => Span::NULL,
                    Some(k) => *entries
                        .spans
                        .get(k as usize)
                        .ok_or("has a value outside its dictionary")?,
                });
            }
            Values { data: entries.data, spans: spans.into() }
        } else {
            opened.plain(map)?
        };
        Ok(page.cache(shard, values, pages))
    }

    /// The values of a dictionary page, none of which is null.
    fn entries(map: &[u8], shard: usize, page: &Page, pages: &mut Pages) -> Result<Values> {
        if let Some(values) = page.cached(shard, pages) {
            return Ok(values);
        }
        let values = page.body.open(map, 0)?.plain(map)?;
        Ok(page.cache(shard, values, pages))
    }
}

/// A page whose levels were read, and whose values were not yet.
pub struct Opened {
    pub data: Option<Vec<u8>>, // decompressed; None: the values lie in the file
    pub range: std::ops::Range<usize>, // of the values, in `data` or in the file
    pub present: Vec<bool>,    // for each row, whether it has a value
}

impl Opened {
    /// The indices of a page in dictionary encoding, of the values that are present.
    fn indices(&self, map: &[u8]) -> Result<Vec<u32>> {
        let bytes = &self.data.as_deref().unwrap_or(map)[self.range.clone()];
        indices(bytes, self.present.iter().filter(|present| **present).count())
    }

    /// The values of a page in PLAIN encoding.
    fn plain(self, map: &[u8]) -> Result<Values> {
        let bytes = self.data.as_deref().unwrap_or(map);
        let mut at = self.range.start;
        let mut spans = Vec::new();
        spans.try_reserve_exact(self.present.len()).map_err(|e| e.to_string())?;
        for present in &self.present {
            if !present {
                spans.push(Span::NULL);
                continue;
            }
            let start = at + 4;
            let size = bytes
                .get(at..start)
                .filter(|_| start <= self.range.end)
                .ok_or("is cut short inside a value")?;
            let len = u32::from_le_bytes([size[0], size[1], size[2], size[3]]);
            at = start.saturating_add(len as usize);
            refuse!(
                at > self.range.end || len == NULL,
                Err("holds a value that extends beyond its page".into())
            );
            spans.push(Span { start: start as u64, len });
        }
        Ok(Values { data: self.data.map(Arc::new), spans: spans.into() })
    }
}

impl Body {
    /// Decompresses the page if necessary, and reads its levels. `level` is that of a value that is present.
    pub fn open(&self, map: &[u8], level: u8) -> Result<Opened> {
        let start = usize::try_from(self.at).unwrap_or(usize::MAX);
        let end = start.checked_add(self.packed as usize).filter(|end| *end <= map.len());
        let end = end.ok_or("lies outside the file")?;
        let v2 = if self.levels == INSIDE { 0 } else { self.levels as usize };
        refuse!(v2 > end - start, Err("has levels that are longer than the page".into()));
        let mut opened = if self.codec == UNCOMPRESSED {
            Opened { data: None, range: start + v2..end, present: Vec::new() }
        } else {
            let size = (self.unpacked as usize).saturating_sub(v2);
            let data = decompress(self.codec, &map[start + v2..end], size)?;
            Opened { range: 0..data.len(), data: Some(data), present: Vec::new() }
        };
        let n = self.n as usize;
        if level == 0 {
            opened.present = vec![true; n];
        } else if self.levels == INSIDE {
            let bytes = opened.data.as_deref().unwrap_or(map);
            let range = opened.range.clone();
            let size =
                bytes[range.clone()].first_chunk::<4>().ok_or("is cut short before its levels")?;
            let size = u32::from_le_bytes(*size) as usize;
            let levels = bytes[range.clone()]
                .get(4..4usize.saturating_add(size))
                .ok_or("is cut short in its levels")?;
            opened.present = present(levels, n, level)?;
            opened.range.start += 4 + size;
        } else {
            opened.present = present(&map[start..start + v2], n, level)?;
        }
        Ok(opened)
    }
}

//! Arrow IPC shards, streams and files: the places of the columns' buffers.
//!
//! Both are sequences of encapsulated messages:
//!
//! ```text
//! stream:  [FF FF FF FF][i32 size][flatbuffer Message, padded to `size`][body: Message.bodyLength bytes] ...
//!          end: [FF FF FF FF][00 00 00 00], or the end of the file. Before format version 0.15 the FF FF FF FF is absent.
//! file:    ARROW1 00 00, the same messages, [flatbuffer Footer][i32 size of the footer] ARROW1
//!          Footer.recordBatches lists (offset, metaDataLength, bodyLength) of each record batch.
//! ```
//!
//! The first message is the Schema. A RecordBatch message lists, for every column in depth-first order of the schema,
//! its field nodes (length, null count) and its buffers (offset and length inside the body). From these the index reads
//! three buffers of the `audio` struct (validity, offsets of `bytes`, offsets of `path`) and the label column. The data
//! buffer, nearly all of the file, is not read.

use jaxtrain_decode::refuse;

use arrow_ipc as ipc;

use super::copy_progress::CopyProgress;
use super::{Metadata, Span, Table, NULL};
use crate::error::Fault;

/// Reads a shard's metadata and labels.
pub(super) fn read(
    map: &[u8], audio: &str, label: Option<&str>, progress: &CopyProgress,
) -> Result<Metadata, Fault> {
    let mut reader = Reader::new(map, progress)?;
    let columns = Columns::find(&reader.schema, audio, label)?;
    let (mut spans, mut paths, mut labels) = (Vec::new(), Vec::new(), Vec::new());
    while let Some((at, body, flat)) = reader.next_batch()? {
        let fail = |what: String| Fault::at(at, what);
        let message = flat.get().map_err(fail)?;
        let header = message
            .header_as_record_batch()
            .ok_or_else(|| fail("holds an invalid record batch".into()))?;
        if let Some(compression) = header.compression() {
            let codec =
                compression.codec().variant_name().unwrap_or("an unknown codec").to_lowercase();
            let (batch, codec) = (reader.n_batches - 1, codec.replace("_frame", ""));
            let remedy = "Write the shards without compression, as datasets.save_to_disk does";
            let what = format!("record batch {batch} is compressed with {codec}, but the loader reads audio in place");
            return Err(Fault::plain(format!("{what} from the mapped file. {remedy}")));
        }
        let end = body + message.bodyLength() as usize; // `Reader::message` checked it
        let batch = Batch { map: &map[..end], progress, body, header };
        let validity = batch.validity(columns.audio).map_err(fail)?;
        batch.spans(columns.bytes, validity, &mut spans).map_err(fail)?;
        match columns.path {
            Some(column) => {
                batch.spans(column, validity, &mut paths).map_err(fail)?;
                batch.values(column).map_err(fail)?;
            }
            None => paths.resize(spans.len(), Span::NULL),
        }
        match columns.label {
            Some(column) => batch.labels(column, &mut labels).map_err(fail)?,
            None => labels.resize(spans.len(), -1),
        }
        if labels.len() != spans.len() || paths.len() != spans.len() {
            return Err(fail("holds columns of different lengths".into()));
        }
    }
    Ok(Metadata {
        class_names: columns.class_names,
        labels,
        table: Table::Arrow { audio: spans, paths },
    })
}

/// Walks the messages of one shard.
struct Reader<'a> {
    map: &'a [u8],
    progress: &'a CopyProgress,
    schema: Flat,
    blocks: Blocks,
    n_batches: usize,
}

enum Blocks {
    /// The next message begins here.
    Stream(usize),
    /// The footer's list, reversed: the next one is last.
    File(Vec<u64>),
}

/// A flatbuffer message, copied so that it has the alignment that its reader requires at any offset in the file.
struct Flat {
    words: Vec<u64>,
    len: usize,
}

impl Flat {
    fn new(bytes: &[u8]) -> Self {
        let words = bytes.chunks(8).map(|chunk| {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            u64::from_ne_bytes(word)
        });
        Self { words: words.collect(), len: bytes.len() }
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: `words` holds at least `len` initialised bytes, and u8 needs no alignment.
        unsafe { std::slice::from_raw_parts(self.words.as_ptr().cast(), self.len) }
    }

    fn get(&self) -> Result<ipc::Message<'_>, String> {
        ipc::root_as_message(self.bytes())
            .map_err(|e| format!("does not hold an Arrow message: {e}"))
    }
}

impl<'a> Reader<'a> {
    fn new(map: &'a [u8], progress: &'a CopyProgress) -> Result<Self, Fault> {
        let is_file = map.starts_with(b"ARROW1\0\0");
        let mut reader =
            Self { map, progress, schema: Flat::new(&[]), blocks: Blocks::Stream(0), n_batches: 0 };
        let (schema, end) = reader
            .message(if is_file { 8 } else { 0 })
            .map_err(|e| match e {
                Fault { at: Some(0), .. } => Fault::at(0, "is not an Arrow IPC stream or file"),
                e => e,
            })?
            .ok_or_else(|| Fault::at(0, "ends before its schema"))?;
        reader.schema = schema;
        reader.blocks = if is_file { Blocks::File(reader.footer()?) } else { Blocks::Stream(end) };
        Ok(reader)
    }

    /// Waits until bytes [start, end) are present.
    fn wait(&self, start: usize, end: usize) -> Result<(), Fault> {
        let end = end.min(self.map.len());
        self.progress
            .wait(start as u64, end as u64, &|| false)
            .map(drop)
            .map_err(|what| Fault::at(start as u64, what))
    }

    /// The message at byte `at`, and the offset of its body. None at the end of the stream.
    fn message(&self, at: usize) -> Result<Option<(Flat, usize)>, Fault> {
        let word = |at: usize| {
            self.map.get(at..at + 4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
        };
        if at == self.map.len() {
            return Ok(None);
        }
        let cut = || Fault::at(at as u64, "is cut short inside a message");
        self.wait(at, at + 8)?;
        let (size, start) = match word(at).ok_or_else(cut)? {
            0xFFFF_FFFF => (word(at + 4).ok_or_else(cut)?, at + 8),
            size => (size, at + 4),
        };
        if size == 0 {
            return Ok(None);
        }
        let bytes = start
            .checked_add(size as usize)
            .and_then(|end| self.map.get(start..end))
            .ok_or_else(cut)?;
        self.wait(start, start + bytes.len())?;
        let flat = Flat::new(bytes);
        let message = flat.get().map_err(|what| Fault::at(at as u64, what))?;
        let body = usize::try_from(message.bodyLength())
            .map_err(|_| Fault::at(at as u64, "has a negative body length"))?;
        let end = start + size as usize;
        if end.checked_add(body).is_none_or(|end| end > self.map.len()) {
            return Err(Fault::at(
                at as u64,
                format!(
                    "is cut short: a message has a body of {body} bytes, but {} are left",
                    self.map.len() - end
                ),
            ));
        }
        Ok(Some((flat, end)))
    }

    fn footer(&self) -> Result<Vec<u64>, Fault> {
        let n = self.map.len();
        self.wait(n.saturating_sub(10), n)?;
        let cut = || {
            Fault::at(
                n as u64,
                "is cut short: an Arrow IPC file ends with a footer, but this one does not",
            )
        };
        refuse!(n < 18 || &self.map[n - 6..] != b"ARROW1", Err(cut()));
        let size = u32::from_le_bytes([
            self.map[n - 10],
            self.map[n - 9],
            self.map[n - 8],
            self.map[n - 7],
        ]) as usize;
        let start = (n - 10).checked_sub(size).ok_or_else(cut)?;
        self.wait(start, n)?;
        let flat = Flat::new(&self.map[start..n - 10]);
        let footer = ipc::root_as_footer(flat.bytes());
        let footer =
            footer.map_err(|e| Fault::at(start as u64, format!("has an invalid footer: {e}")))?;
        let blocks = footer.recordBatches().into_iter().flatten();
        Ok(blocks.map(|block| block.offset() as u64).rev().collect())
    }

    /// The next record batch: its offset in the file, the offset of its body, the message.
    fn next_batch(&mut self) -> Result<Option<(u64, usize, Flat)>, Fault> {
        loop {
            let at = match &mut self.blocks {
                Blocks::Stream(at) => *at,
                Blocks::File(list) => match list.pop() {
                    Some(at) => usize::try_from(at).unwrap_or(usize::MAX),
                    None => return Ok(None),
                },
            };
            refuse!(
                at > self.map.len(),
                Err(Fault::at(at as u64, "has a footer that points outside the file"))
            );
            let Some((flat, body)) = self.message(at)? else {
                return match self.blocks {
                    Blocks::Stream(_) => Ok(None),
                    Blocks::File(_) => {
                        Err(Fault::at(at as u64, "has a footer that points to no message"))
                    }
                };
            };
            let message = flat.get().map_err(|what| Fault::at(at as u64, what))?;
            let kind = message.header_type();
            if let Blocks::Stream(next) = &mut self.blocks {
                // Writers pad bodies to 8 bytes and count the padding in bodyLength.
                *next = body + message.bodyLength() as usize;
            }
            if kind == ipc::MessageHeader::RecordBatch {
                self.n_batches += 1;
                return Ok(Some((at as u64, body, flat)));
            }
        }
    }
}

/// The first of a column's nodes and of its buffers in a record batch's lists.
#[derive(Clone, Copy, Default)]
struct Place {
    node: usize,
    buffer: usize,
    views: usize, // columns of view type before it, whose number of buffers differs from batch to batch
    large: bool,
}

/// The columns that the index reads.
struct Columns {
    audio: Place,
    bytes: Place,
    path: Option<Place>,
    label: Option<Place>,
    class_names: Option<Vec<String>>,
}

impl Columns {
    fn find(schema: &Flat, audio: &str, label: Option<&str>) -> Result<Self, Fault> {
        let message = schema.get()?;
        let schema = message.header_as_schema().ok_or("does not begin with a schema".to_owned())?;
        if !schema.endianness().equals_to_target_endianness() {
            return Err(Fault::at(0, "has the other byte order (endianness)"));
        }
        let mut cursor =
            Cursor { place: Place::default(), v4: message.version() < ipc::MetadataVersion::V5 };
        let (mut audio_places, mut label_place, mut names) = (None, None, Vec::new());
        for field in schema.fields().into_iter().flatten() {
            let name = field.name().unwrap_or_default();
            names.push(format!("{name} ({})", describe(field)));
            let place = cursor.place;
            if name == audio {
                audio_places = Some(Self::audio(field, cursor)?);
            } else if Some(name) == label {
                Self::check_label(field)?;
                label_place = Some(place);
            }
            cursor.skip(field);
        }
        let missing = |name: &str| Fault::no_column(name, &names);
        let (audio_place, bytes, audio_path) = audio_places.ok_or_else(|| missing(audio))?;
        if let (Some(name), None) = (label, label_place) {
            return Err(missing(name));
        }
        let class_names = match label {
            Some(label) => class_names(schema, label)?,
            None => None,
        };
        Ok(Self { audio: audio_place, bytes, path: audio_path, label: label_place, class_names })
    }

    fn audio(
        field: ipc::Field, mut cursor: Cursor,
    ) -> Result<(Place, Place, Option<Place>), Fault> {
        let wrong = || Fault::not_audio(field.name().unwrap_or_default(), &describe(field));
        refuse!(
            field.type_type() != ipc::Type::Struct_ || field.dictionary().is_some(),
            Err(wrong())
        );
        let audio = cursor.place;
        let (mut bytes, mut name) = (None, None);
        cursor.place.node += 1;
        cursor.place.buffer += 1;
        for child in field.children().into_iter().flatten() {
            let (kind, place) = (child.type_type(), cursor.place);
            let (plain, large) =
                (child.dictionary().is_none(), |large| Some(Place { large, ..place }));
            match (child.name().unwrap_or_default(), kind) {
                ("bytes", ipc::Type::Binary) if plain => bytes = large(false),
                ("bytes", ipc::Type::LargeBinary) if plain => bytes = large(true),
                ("path", ipc::Type::Utf8) if plain => name = large(false),
                ("path", ipc::Type::LargeUtf8) if plain => name = large(true),
                _ => {}
            }
            cursor.skip(child);
        }
        Ok((audio, bytes.ok_or_else(wrong)?, name))
    }

    fn check_label(field: ipc::Field) -> Result<(), Fault> {
        let name = field.name().unwrap_or_default();
        let int64 = field.type_as_int().is_some_and(|int| int.bitWidth() == 64 && int.is_signed());
        match field.type_type() {
            ipc::Type::Utf8 | ipc::Type::LargeUtf8 | ipc::Type::Utf8View => {
                Err(Fault::string_label(name))
            }
            ipc::Type::Int if int64 && field.dictionary().is_none() => Ok(()),
            _ => Err(Fault::not_label(name, &describe(field))),
        }
    }
}

/// A readable name of a column's type.
fn describe(field: ipc::Field) -> String {
    let kind = match field.type_type() {
        ipc::Type::Int => match field.type_as_int() {
            Some(int) => format!("{}int{}", if int.is_signed() { "" } else { "u" }, int.bitWidth()),
            None => "int".into(),
        },
        ipc::Type::Utf8 => "string".into(),
        ipc::Type::LargeUtf8 => "large_string".into(),
        ipc::Type::Struct_ => {
            let children = field.children().into_iter().flatten();
            let inner: Vec<_> = children
                .map(|c| format!("{}: {}", c.name().unwrap_or_default(), describe(c)))
                .collect();
            format!("struct<{}>", inner.join(", "))
        }
        other => other.variant_name().unwrap_or("an unknown type").to_lowercase(),
    };
    if field.dictionary().is_some() {
        format!("dictionary of {kind}")
    } else {
        kind
    }
}

fn class_names(schema: ipc::Schema, label: &str) -> Result<Option<Vec<String>>, String> {
    let pairs = schema.custom_metadata().into_iter().flatten();
    super::class_names(
        pairs.filter(|kv| kv.key() == Some("huggingface")).find_map(|kv| kv.value()),
        label,
    )
}

/// Counts nodes and buffers along the schema, following the Arrow columnar format's table of buffer layouts.
#[derive(Clone, Copy)]
struct Cursor {
    place: Place,
    v4: bool, // unions had a validity buffer until metadata version V5
}

impl Cursor {
    fn skip(&mut self, field: ipc::Field) {
        use ipc::Type;
        self.place.node += 1;
        if field.dictionary().is_some() {
            self.place.buffer += 2; // of its indices; the values lie in dictionary batches
            return;
        }
        self.place.buffer += match field.type_type() {
            Type::Null | Type::RunEndEncoded => 0,
            Type::Struct_ | Type::FixedSizeList => 1,
            Type::Utf8
            | Type::Binary
            | Type::LargeUtf8
            | Type::LargeBinary
            | Type::ListView
            | Type::LargeListView => 3,
            Type::Union => {
                let dense =
                    field.type_as_union().is_some_and(|u| u.mode() == ipc::UnionMode::Dense);
                1 + usize::from(dense) + usize::from(self.v4)
            }
            Type::Utf8View | Type::BinaryView => {
                self.place.views += 1;
                2
            }
            _ => 2,
        };
        field.children().into_iter().flatten().for_each(|child| self.skip(child));
    }
}

/// Buffers of one record batch, checked against the file before anything is read through them.
struct Batch<'a> {
    map: &'a [u8],
    progress: &'a CopyProgress,
    body: usize,
    header: ipc::RecordBatch<'a>,
}

/// Whether a value is null by a validity bitmap. An empty bitmap means that none is.
fn is_null(validity: &[u8], i: usize) -> bool {
    !validity.is_empty() && validity[i / 8] & (1 << (i % 8)) == 0
}

impl<'a> Batch<'a> {
    /// The column's length, which must be the batch's.
    fn len(&self, place: Place) -> Result<usize, String> {
        let nodes = self.header.nodes().filter(|nodes| place.node < nodes.len());
        let n = nodes.ok_or("lists fewer columns than its schema")?.get(place.node).length();
        refuse!(
            n != self.header.length(),
            Err(format!("has {} rows but a column of {n}", self.header.length()))
        );
        usize::try_from(n).map_err(|_| format!("has {n} rows"))
    }

    /// Buffer number `k` of the column, at least `needed` bytes long, which are present: its offset in the file, and
    /// its bytes.
    fn buffer(
        &self, place: Place, k: usize, needed: Option<usize>,
    ) -> Result<(usize, &'a [u8]), String> {
        let extra = self.header.variadicBufferCounts().into_iter().flatten().take(place.views);
        let extra =
            extra.fold(0, |sum: usize, n| sum.saturating_add(usize::try_from(n).unwrap_or(0)));
        let k = extra.saturating_add(place.buffer + k);
        let buffers = self.header.buffers().filter(|buffers| k < buffers.len());
        let buffer = buffers.ok_or("lists fewer buffers than its schema")?.get(k);
        let outside = || {
            format!(
                "has a buffer outside its body: {} bytes at {}",
                buffer.length(),
                buffer.offset()
            )
        };
        let start = usize::try_from(buffer.offset()).map_err(|_| outside())?;
        let len = usize::try_from(buffer.length()).map_err(|_| outside())?;
        let start = start.checked_add(self.body).ok_or_else(outside)?;
        let end =
            start.checked_add(len).filter(|&end| end <= self.map.len()).ok_or_else(outside)?;
        if let Some(needed) = needed {
            refuse!(
                len < needed,
                Err(format!("has a buffer of {len} bytes, but {needed} are needed"))
            );
            self.progress.wait(start as u64, (start + needed) as u64, &|| false)?;
        }
        Ok((start, &self.map[start..end]))
    }

    fn validity(&self, place: Place) -> Result<&'a [u8], String> {
        let n = self.len(place)?;
        let (_, bits) = self.buffer(place, 0, None)?;
        if bits.is_empty() {
            return Ok(bits);
        }
        Ok(self.buffer(place, 0, Some(n.div_ceil(8)))?.1)
    }

    /// Waits until the values of a binary or string column are present.
    fn values(&self, place: Place) -> Result<(), String> {
        let (start, bytes) = self.buffer(place, 2, None)?;
        self.progress.wait(start as u64, (start + bytes.len()) as u64, &|| false).map(drop)
    }

    /// Appends the spans of a binary or string column's values. Rows that are null in `parent` are null.
    fn spans(&self, place: Place, parent: &[u8], out: &mut Vec<Span>) -> Result<(), String> {
        let n = self.len(place)?;
        if n == 0 {
            return Ok(());
        }
        let validity = self.validity(place)?;
        let width = if place.large { 8 } else { 4 };
        let bytes = (n + 1).checked_mul(width).ok_or("has too many rows")?;
        let (_, offsets) = self.buffer(place, 1, Some(bytes))?;
        let (data, values) = self.buffer(place, 2, None)?;
        let offset = |i: usize| match offsets[i * width..][..width] {
            [a, b, c, d] => i64::from(i32::from_le_bytes([a, b, c, d])),
            [a, b, c, d, e, f, g, h] => i64::from_le_bytes([a, b, c, d, e, f, g, h]),
            _ => -1,
        };
        out.reserve(n);
        for i in 0..n {
            let (start, end) = (offset(i), offset(i + 1));
            if start < 0 || end < start || end as u64 > values.len() as u64 {
                return Err(format!(
                    "has offsets {start} to {end} in a buffer of {} bytes",
                    values.len()
                ));
            }
            let len = match u32::try_from(end - start) {
                _ if is_null(parent, i) || is_null(validity, i) => NULL,
                Ok(len) if len != NULL => len,
                _ => {
                    return Err(format!(
                        "holds a value of {} bytes; 4 GiB is the limit",
                        end - start
                    ))
                }
            };
            out.push(Span { start: (data as u64) + start as u64, len });
        }
        Ok(())
    }

    /// Appends an int64 column. Nulls and negative values become -1.
    fn labels(&self, place: Place, out: &mut Vec<i32>) -> Result<(), String> {
        let n = self.len(place)?;
        if n == 0 {
            return Ok(());
        }
        let validity = self.validity(place)?;
        let (_, values) =
            self.buffer(place, 1, Some(n.checked_mul(8).ok_or("has too many rows")?))?;
        out.extend(values.chunks_exact(8).take(n).enumerate().map(|(i, b)| {
            let value = i64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]]);
            match value {
                _ if is_null(validity, i) || value < 0 => -1,
                _ => i32::try_from(value).unwrap_or(i32::MAX), // beyond any list of classes: reported as out of range
            }
        }));
        Ok(())
    }
}

//! Parquet's metadata: the footer and the page headers, as far as the index needs them.

use super::super::parts::KEY;
use super::thrift::{fields, Thrift, STRUCT, TRUE};
use super::Result;
use jaxtrain_decode::refuse;

pub const BYTE_ARRAY: i64 = 6;

/// A node of the schema.
#[derive(Default)]
pub struct Element {
    pub name: String,
    pub physical: Option<i64>,
    pub converted: Option<i64>,
    pub repetition: i64,
    pub n_children: usize,
}

impl Element {
    /// Its contribution to the level of a value that is present: 1 if it can be null, else 0. None when it repeats.
    pub fn level(&self) -> Option<u8> {
        u8::try_from(self.repetition).ok().filter(|&level| level < 2)
    }
}

/// A column chunk: one column of one row group.
pub struct Chunk {
    pub start: u64,
    pub codec: u8,
}

/// A row group.
pub struct Group {
    pub n_rows: u64,
    pub chunks: Vec<Chunk>,
}

#[derive(Default)]
pub struct Footer {
    pub schema: Vec<Element>,
    pub n_rows: u64,
    pub groups: Vec<Group>,
    pub huggingface: Option<String>,
    pub parts: Option<String>, // under parts::KEY: the version of a shard whose rows are parts
}

impl Footer {
    pub fn read(bytes: &[u8]) -> Result<Self> {
        let mut input = Thrift::new(bytes);
        let mut footer = Self::default();
        let input = &mut input;
        fields!(input, kind,
            2 => footer.schema = input.list(kind, Self::element)?,
            3 => footer.n_rows = input.positive()?,
            4 => footer.groups = input.list(kind, Self::group)?,
            5 => for (key, value) in input.list(kind, Self::pair)? {
                match key.as_str() {
                    "huggingface" => footer.huggingface = Some(value),
                    KEY => footer.parts = Some(value),
                    _ => {}
                }
            },
            8 => return Err("is encrypted".into()),
        )?;
        Ok(footer)
    }

    fn element(input: &mut Thrift) -> Result<Element> {
        let mut element = Element::default();
        fields!(input, kind,
            1 => element.physical = Some(input.int()?),
            3 => element.repetition = input.int()?,
            4 => element.name = input.text()?,
            5 => element.n_children = usize::try_from(input.int()?).map_err(|e| e.to_string())?,
            6 => element.converted = Some(input.int()?),
        )?;
        Ok(element)
    }

    fn pair(input: &mut Thrift) -> Result<(String, String)> {
        let (mut key, mut value) = (String::new(), String::new());
        fields!(input, kind, 1 => key = input.text()?, 2 => value = input.text()?)?;
        Ok((key, value))
    }

    fn group(input: &mut Thrift) -> Result<Group> {
        let mut group = Group { n_rows: 0, chunks: Vec::new() };
        fields!(input, kind, 1 => group.chunks = input.list(kind, Self::chunk)?, 3 => group.n_rows = input.positive()?)?;
        Ok(group)
    }

    fn chunk(input: &mut Thrift) -> Result<Chunk> {
        let (mut data, mut dictionary, mut codec) = (None, None, 0);
        fields!(input, kind,
            1 => return Err("keeps its columns in other files, which is not supported".into()),
            3 if kind == STRUCT => fields!(input, kind,
                4 => codec = u8::try_from(input.int()?).map_err(|e| e.to_string())?,
                9 => data = Some(input.positive()?),
                11 => dictionary = Some(input.positive()?),
            )?,
        )?;
        let data = data.ok_or("has a column without data")?;
        // Some writers write a dictionary offset of 0 when there is none.
        Ok(Chunk { start: dictionary.filter(|d| (4..data).contains(d)).unwrap_or(data), codec })
    }
}

/// Kinds of pages. Those of an index are passed over.
pub const DATA: i64 = 0;
pub const DICTIONARY: i64 = 2;
const DATA_V2: i64 = 3;

pub struct PageHeader {
    pub kind: i64,
    pub packed: u32,
    pub unpacked: u32,
    pub n: u32,
    pub encoding: i64,
    pub levels: Option<u32>, // of version 2
    pub is_packed: bool,
}

impl PageHeader {
    pub fn read(input: &mut Thrift) -> Result<Self> {
        let mut header = Self {
            kind: i64::MAX,
            packed: 0,
            unpacked: 0,
            n: 0,
            encoding: 0,
            levels: None,
            is_packed: true,
        };
        let size = |n: u64| u32::try_from(n).map_err(|e| e.to_string());
        fields!(input, kind,
            1 => header.kind = match input.int()? {
                DATA_V2 => DATA,
                kind => kind,
            },
            2 => header.unpacked = size(input.positive()?)?,
            3 => header.packed = size(input.positive()?)?,
            5 | 7 if kind == STRUCT => fields!(input, kind,
                1 => header.n = size(input.positive()?)?,
                2 => header.encoding = input.int()?,
            )?,
            8 if kind == STRUCT => {
                header.levels = Some(0);
                fields!(input, kind,
                    1 => header.n = size(input.positive()?)?,
                    4 => header.encoding = input.int()?,
                    5 => header.levels = Some(size(input.positive()?)?),
                    6 => refuse!(input.positive()? != 0, Err("has repetition levels".into())),
                    7 => header.is_packed = kind == TRUE,
                )?;
            }
        )?;
        Ok(header)
    }
}

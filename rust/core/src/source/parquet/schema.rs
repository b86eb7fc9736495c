//! The columns that the index reads, found in a Parquet schema.

use super::metadata::{Element, BYTE_ARRAY};
use super::Result;
use crate::error::Fault;
use jaxtrain_decode::refuse;

/// A leaf column of the schema: its number among the leaves, and the level of a value that is present.
pub struct Leaf {
    pub number: usize,
    pub levels: u8,
}

/// The leaf columns that the index reads.
pub struct Chosen {
    pub bytes: Leaf,
    pub path: Option<Leaf>,
    pub label: Option<Leaf>,
    pub part: Option<[Leaf; 3]>, // start and end (doubles), channel (int32), of a shard whose rows are parts
}

/// The columns of a part, and their physical types: double and int32.
const PART: [(&str, i64); 3] = [("start", 5), ("end", 5), ("channel", 1)];

impl Chosen {
    pub fn find(
        schema: &[Element], audio: &str, label: Option<&str>, parts: bool,
    ) -> Result<Self, Fault> {
        let mut walk = Walk { schema, at: 0, leaf: 0 };
        let root = schema.first().ok_or("has an empty schema".to_owned())?;
        walk.at = 1;
        let (mut found, mut label_leaf, mut names) = (None, None, Vec::new());
        let mut times: [Option<Leaf>; 3] = [None, None, None];
        for _ in 0..root.n_children {
            let element = walk.element()?;
            let before = (walk.at, walk.leaf);
            let text = walk.describe(0)?;
            names.push(format!("{} ({text})", element.name));
            let column = PART.iter().position(|(name, _)| parts && element.name == *name);
            if let Some(k) = column.filter(|&k| element.physical == Some(PART[k].1)) {
                times[k] = element.level().map(|levels| Leaf { number: before.1, levels });
            }
            let wrong = || Fault::not_audio(audio, &text);
            if element.name == audio {
                (walk.at, walk.leaf) = before;
                let levels = element.level().ok_or_else(wrong)?;
                walk.at += 1;
                let (mut bytes, mut path) = (None, None);
                for _ in 0..element.n_children {
                    let child = walk.element()?;
                    let leaf =
                        child.level().map(|l| Leaf { number: walk.leaf, levels: levels + l });
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
                    (Some(2), None | Some(18), Some(levels)) => {
                        Some(Leaf { number: before.1, levels })
                    }
                    (Some(BYTE_ARRAY), _, _) => return Err(Fault::string_label(&element.name)),
                    _ => return Err(Fault::not_label(&element.name, &text)),
                };
            }
        }
        let missing = |name: &str| Fault::no_column(name, &names);
        let (bytes, path) = found.ok_or_else(|| missing(audio))?;
        if let (Some(name), None) = (label, &label_leaf) {
            return Err(missing(name));
        }
        let part = match (parts, times) {
            (false, _) => None,
            (true, [Some(start), Some(end), Some(channel)]) => Some([start, end, channel]),
            (true, _) => return Err(missing("start, end or channel")),
        };
        Ok(Self { bytes, path, label: label_leaf, part })
    }
}

/// A walk through the schema, which is a tree written depth first.
struct Walk<'a> {
    schema: &'a [Element],
    at: usize,
    leaf: usize,
}

impl<'a> Walk<'a> {
    fn element(&self) -> Result<&'a Element> {
        self.schema.get(self.at).ok_or("has a schema with missing columns".into())
    }

    /// A readable name of the next column's type; moves past the column.
    fn describe(&mut self, depth: usize) -> Result<String> {
        let element = self.element()?;
        self.at += 1;
        refuse!(depth > 32, Err("has a schema that is nested too deeply".into()));
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
            Some(k) => *[
                "bool",
                "int32",
                "int64",
                "int96",
                "float",
                "double",
                "binary",
                "fixed_size_binary",
            ]
            .get(k as usize)
            .unwrap_or(&"an unknown type"),
            None => "struct",
        };
        Ok(if element.repetition == 2 { format!("list of {kind}") } else { kind.into() })
    }
}

//! Thrift's compact protocol, in which Parquet's metadata are written.

use super::Result;
use jaxtrain_decode::refuse;

pub const TRUE: u8 = 1;
pub const STRUCT: u8 = 12;

/// Reads the fields of a struct, each by the action for its number and kind. All others are skipped.
macro_rules! fields {
    ($input:ident, $kind:ident, $($id:pat $(if $of:expr)? => $read:expr),+ $(,)?) => {
        $input.fields(|$input, id, $kind| {
            match id {
                $($id $(if $of)? => $read,)+
                _ => $input.skip($kind, 0)?,
            }
            Ok(())
        })
    };
}
pub(super) use fields;

/// A reader of Thrift's compact protocol.
pub struct Thrift<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Thrift<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// Bytes that were read.
    pub fn position(&self) -> usize {
        self.at
    }

    pub fn byte(&mut self) -> Result<u8> {
        let byte = self.bytes.get(self.at).ok_or("is cut short")?;
        self.at += 1;
        Ok(*byte)
    }

    pub fn varint(&mut self) -> Result<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            value |= u64::from(byte & 0x7F) << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err("holds a number of more than 64 bits".into())
    }

    pub fn int(&mut self) -> Result<i64> {
        let raw = self.varint()?;
        Ok((raw >> 1) as i64 ^ -((raw & 1) as i64))
    }

    pub fn positive(&mut self) -> Result<u64> {
        u64::try_from(self.int()?).map_err(|_| "holds a negative size".into())
    }

    pub fn take(&mut self, n: usize) -> Result<&'a [u8]> {
        let end = self.at.checked_add(n).ok_or("is cut short")?;
        let bytes = self.bytes.get(self.at..end).ok_or("is cut short")?;
        self.at = end;
        Ok(bytes)
    }

    pub fn binary(&mut self) -> Result<&'a [u8]> {
        let n = usize::try_from(self.varint()?).map_err(|e| e.to_string())?;
        self.take(n)
    }

    pub fn text(&mut self) -> Result<String> {
        Ok(String::from_utf8_lossy(self.binary()?).into_owned())
    }

    /// Calls `each(self, id, type)` for every field of a struct.
    pub fn fields(&mut self, mut each: impl FnMut(&mut Self, i64, u8) -> Result<()>) -> Result<()> {
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

    pub fn list<T>(
        &mut self, kind: u8, mut item: impl FnMut(&mut Self) -> Result<T>,
    ) -> Result<Vec<T>> {
        refuse!(kind != 9, Err("holds something other than a list".into()));
        let (n, _) = self.list_head()?;
        (0..n).map(|_| item(self)).collect() // an item takes at least a byte, so this ends with the input
    }

    pub fn list_head(&mut self) -> Result<(u64, u8)> {
        let head = self.byte()?;
        let n = if head >> 4 == 15 { self.varint()? } else { u64::from(head >> 4) };
        Ok((n, head & 15))
    }

    pub fn skip(&mut self, kind: u8, depth: usize) -> Result<()> {
        refuse!(depth > 32, Err("is nested too deeply".into()));
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
            other => return Err(format!("holds a value of the unknown Thrift type {other}")),
        }
        Ok(())
    }

    /// Skips an item of a list or map, in which a boolean takes a byte.
    fn item(&mut self, kind: u8, depth: usize) -> Result<()> {
        match kind {
            1 | 2 => self.byte().map(drop),
            _ => self.skip(kind, depth + 1),
        }
    }
}

//! The packing of a page's bytes: compression, and the hybrid of runs and bit-packed groups.

use jaxtrain_decode::refuse;
use std::io::Read;

use super::thrift::Thrift;
use super::Result;

pub fn decompress(codec: u8, packed: &[u8], size: usize) -> Result<Vec<u8>> {
    if size > (16 << 20) + packed.len().saturating_mul(64) {
        return Err(format!(
            "claims to decompress from {} to {size} bytes, more than any audio does",
            packed.len()
        ));
    }
    let mut out = Vec::new();
    out.try_reserve_exact(size).map_err(|e| e.to_string())?;
    out.resize(size, 0);
    let broken =
        |codec: &str, e: &dyn std::fmt::Display| format!("cannot be decompressed as {codec}: {e}");
    let all = |codec, reader: &mut dyn Read, out: &mut [u8]| {
        reader.read_exact(out).map_err(|e| broken(codec, &e))
    };
    match codec {
        1 => {
            let n = snap::raw::decompress_len(packed).map_err(|e| broken("Snappy", &e))?;
            refuse!(n != size, Err(format!("decompresses to {n} bytes; its header says {size}")));
            snap::raw::Decoder::new()
                .decompress(packed, &mut out)
                .map_err(|e| broken("Snappy", &e))?;
        }
        2 => all("gzip", &mut flate2::read::GzDecoder::new(packed), &mut out)?,
        4 => all("Brotli", &mut brotli_decompressor::Decompressor::new(packed, 4096), &mut out)?,
        6 => {
            let decoder = ruzstd::decoding::StreamingDecoder::new(packed);
            all("Zstandard", &mut decoder.map_err(|e| broken("Zstandard", &e))?, &mut out)?;
        }
        7 => {
            let n = lz4_flex::block::decompress_into(packed, &mut out)
                .map_err(|e| broken("LZ4", &e))?;
            refuse!(n != size, Err(format!("decompresses to {n} bytes; its header says {size}")));
        }
        other => {
            let name = match other {
                3 => "LZO",
                5 => "framed LZ4",
                _ => "an unknown codec",
            };
            return Err(format!(
                "is compressed with {name}, which is not supported; write it with compression \"none\""
            ));
        }
    }
    Ok(out)
}

/// Decodes runs and bit-packed groups of `bits`-wide numbers: calls `each(value, count)` until there are `n` values.
fn hybrid(bytes: &[u8], bits: u8, n: usize, mut each: impl FnMut(u32, usize)) -> Result<()> {
    let (mut at, mut left) = (0, n);
    while left > 0 {
        let mut input = Thrift::new(bytes.get(at..).unwrap_or_default());
        let header = input.varint()?;
        at += input.position();
        if header & 1 == 0 {
            let run = usize::try_from(header >> 1).map_err(|e| e.to_string())?.min(left);
            let width = usize::from(bits).div_ceil(8);
            let raw = at
                .checked_add(width)
                .and_then(|end| bytes.get(at..end))
                .ok_or("is cut short inside a run")?;
            let value = raw.iter().rev().fold(0u32, |v, b| v << 8 | u32::from(*b));
            refuse!(run == 0, Err("holds an empty run".into()));
            each(value, run);
            (at, left) = (at + width, left - run);
        } else {
            let count = usize::try_from(header >> 1).ok().and_then(|groups| groups.checked_mul(8));
            let count = count.filter(|c| *c > 0).ok_or("holds an empty run")?;
            let size = (count / 8).checked_mul(usize::from(bits)).and_then(|s| at.checked_add(s));
            let end = size.ok_or("is cut short inside a run")?;
            let take = count.min(left);
            // A writer may omit the padding of the last group.
            let raw = bytes
                .get(at..end.min(bytes.len()))
                .filter(|raw| raw.len() * 8 >= take * usize::from(bits));
            let raw = raw.ok_or("is cut short inside a run")?;
            for i in 0..take {
                let first = i * usize::from(bits);
                let word = (first / 8..raw.len().min(first / 8 + 5))
                    .rev()
                    .fold(0u64, |w, k| w << 8 | u64::from(raw[k]));
                each((word >> (first % 8) & ((1u64 << bits) - 1)) as u32, 1);
            }
            (at, left) = (end, left - take);
        }
    }
    Ok(())
}

/// For each of `n` values, whether it is present, not null: its level is then `level`.
pub fn present(bytes: &[u8], n: usize, level: u8) -> Result<Vec<bool>> {
    let mut out = Vec::new();
    out.try_reserve_exact(n).map_err(|e| e.to_string())?;
    let bits = (8 - level.leading_zeros()) as u8;
    hybrid(bytes, bits, n, |value, count| {
        out.extend(std::iter::repeat_n(value == u32::from(level), count))
    })?;
    Ok(out)
}

/// Indices into a dictionary: one byte with their width in bits, then the indices.
pub fn indices(bytes: &[u8], n: usize) -> Result<Vec<u32>> {
    let mut out = Vec::new();
    if n == 0 {
        return Ok(out);
    }
    let (&bits, rest) = bytes.split_first().ok_or("is cut short before its values")?;
    refuse!(bits > 32, Err(format!("has dictionary indices of {bits} bits; 32 is the limit")));
    out.try_reserve_exact(n).map_err(|e| e.to_string())?;
    hybrid(rest, bits, n, |value, count| out.extend(std::iter::repeat_n(value, count)))?;
    Ok(out)
}

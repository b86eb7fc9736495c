//! RIFF WAVE (also RF64 and BW64): integers of 8 to 32 bits and floats, read straight from the bytes.

use super::{corrupt, Error, Info};

const ADPCM: &str = "ADPCM";
const G711: &str = "G.711 (A-law, mu-law)";

#[derive(Clone, Copy)]
enum Encoding {
    U8,
    I16,
    I24,
    I32,
    F32,
    F64,
}

impl Encoding {
    fn bytes(self) -> usize {
        match self {
            Self::U8 => 1,
            Self::I16 => 2,
            Self::I24 => 3,
            Self::I32 | Self::F32 => 4,
            Self::F64 => 8,
        }
    }
}

struct Wav<'a> {
    rate: u32,
    channels: u16,
    encoding: Encoding,
    data: &'a [u8],
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// Walks the chunks up to the data. A data chunk that claims to be longer than the file ends with the file.
fn parse(bytes: &[u8]) -> Result<Wav<'_>, Error> {
    // A writer to a pipe leaves both sizes at 0 or all ones: then the data extends to the end of the file.
    let streamed = |size: u32| size == 0 || size == u32::MAX;
    let long_format = !bytes.starts_with(b"RIFF");
    let mut long_size = None;
    let mut format = None;
    let mut at = 12;
    while let Some(header) = bytes.get(at..at + 8) {
        let size = u32_at(header, 4);
        let body = &bytes[at + 8..];
        let whole = body.get(..size as usize);
        match (&header[..4], whole) {
            (b"ds64", Some(body)) if body.len() >= 16 => {
                long_size = Some(u64::from_le_bytes(body[8..16].try_into().expect("8 bytes")));
            }
            (b"fmt ", Some(body)) => format = Some(parse_format(body)?),
            (b"fmt ", None) => return corrupt("WAV", "the format chunk is cut off"),
            (b"data", _) => {
                let Some((rate, channels, encoding)) = format else {
                    return corrupt("WAV", "the data comes before the format");
                };
                let size = match long_size {
                    // RF64: the size is in the ds64 chunk, and this field is all ones.
                    Some(long) if size == u32::MAX || long_format && size == 0 => long.min(body.len() as u64) as usize,
                    // A recorder that went on after 4 GiB states what is left of the size in 32 bits.
                    _ if wraps(body.len() as u64, size) => body.len(),
                    _ if streamed(size) && streamed(u32_at(bytes, 4)) => body.len(),
                    _ => body.len().min(size as usize),
                };
                return Ok(Wav { rate, channels, encoding, data: &body[..size] });
            }
            _ => {}
        }
        // Chunks begin at even offsets.
        at = match at.checked_add(8 + size as usize + (size & 1) as usize) {
            Some(at) => at,
            None => break,
        };
    }
    corrupt("WAV", "there is no data chunk")
}

/// Whether a stated size is that of the rest of the file, but for multiples of 4 GiB that 32 bits do not hold and for what
/// little may follow the data.
fn wraps(left: u64, size: u32) -> bool {
    const FOLLOWS: u64 = 1 << 20;
    left >> 32 > 0 && left.wrapping_sub(size.into()) % (1 << 32) <= FOLLOWS
}

fn parse_format(body: &[u8]) -> Result<(u32, u16, Encoding), Error> {
    if body.len() < 16 {
        return corrupt("WAV", "the format chunk is too short");
    }
    let (mut tag, channels, rate) = (u16_at(body, 0), u16_at(body, 2), u32_at(body, 4));
    let (block, bits) = (u16_at(body, 12), u16_at(body, 14));
    if tag == 0xfffe && body.len() >= 26 {
        // WAVE_FORMAT_EXTENSIBLE: the first two bytes of the sub-format's GUID are the tag.
        tag = u16_at(body, 24);
    }
    let encoding = match (tag, bits) {
        (1, 1..=8) => Encoding::U8,
        (1, 9..=16) => Encoding::I16,
        (1, 17..=24) => Encoding::I24,
        (1, 25..=32) => Encoding::I32,
        (3, 32) => Encoding::F32,
        (3, 64) => Encoding::F64,
        (1 | 3, _) => return Err(Error::Unsupported { format: "WAV", what: format!("{bits}-bit samples") }),
        (6 | 7, _) => return Err(Error::Unsupported { format: "WAV", what: G711.into() }),
        (2 | 0x11, _) => return Err(Error::Unsupported { format: "WAV", what: ADPCM.into() }),
        _ => return Err(Error::Unsupported { format: "WAV", what: format!("encoding {tag:#06x}") }),
    };
    if channels == 0 || usize::from(block) != usize::from(channels) * encoding.bytes() {
        return corrupt("WAV", "the format chunk contradicts itself");
    }
    Ok((rate, channels, encoding))
}

pub(super) fn info(bytes: &[u8]) -> Result<Info, Error> {
    let wav = parse(bytes)?;
    let block = wav.encoding.bytes() * usize::from(wav.channels);
    Ok(Info { rate: wav.rate, channels: wav.channels, frames: (wav.data.len() / block) as u64 })
}

/// Whether the samples are of an encoding that `other` reads.
pub(super) fn is_left_to_others(bytes: &[u8]) -> bool {
    matches!(parse(bytes), Err(Error::Unsupported { what, .. }) if what == ADPCM || what == G711)
}

/// Decodes the frames from `start` on, which must lie inside the recording; only their bytes are read. With a `channel`,
/// which must be one of the recording's, that one instead of the mean.
pub(super) fn read(bytes: &[u8], start: u64, channel: Option<u16>, out: &mut [f32]) -> Result<(), Error> {
    let wav = parse(bytes)?;
    let mut channels = usize::from(wav.channels);
    let block = wav.encoding.bytes() * channels;
    let begin = (start as usize).saturating_mul(block);
    let Some(data) = wav.data.get(begin..begin.saturating_add(out.len().saturating_mul(block))) else {
        return corrupt("WAV", "the data ends before its stated length");
    };
    let chosen: Vec<u8>;
    let data = match channel {
        Some(channel) if channels > 1 => {
            let size = wav.encoding.bytes();
            let first = usize::from(channel) * size;
            chosen = data.chunks_exact(block).flat_map(|frame| &frame[first..first + size]).copied().collect();
            channels = 1;
            &chosen[..]
        }
        _ => data,
    };
    match wav.encoding {
        Encoding::U8 => mix(data, channels, out, 7, |[a]: [u8; 1]| f64::from(i32::from(a) - 128)),
        Encoding::I16 if channels <= 2 => mix_i16(data, channels, out),
        Encoding::I16 => mix(data, channels, out, 15, |x| f64::from(i16::from_le_bytes(x))),
        Encoding::I24 => mix(data, channels, out, 31, |[a, b, c]| f64::from(i32::from_le_bytes([0, a, b, c]))),
        Encoding::I32 => mix(data, channels, out, 31, |x| f64::from(i32::from_le_bytes(x))),
        Encoding::F32 => mix(data, channels, out, 0, |x| f64::from(f32::from_le_bytes(x))),
        Encoding::F64 => mix(data, channels, out, 0, f64::from_le_bytes),
    }
    Ok(())
}

/// The same result as `mix`, faster: a sum of 17 bits is exact in float32, and scaling by a power of two rounds nothing.
fn mix_i16(data: &[u8], channels: usize, out: &mut [f32]) {
    let value = |x: &[u8]| i32::from(i16::from_le_bytes([x[0], x[1]]));
    if channels == 1 {
        for (y, x) in out.iter_mut().zip(data.chunks_exact(2)) {
            *y = value(x) as f32 * (1.0 / 32768.0);
        }
    } else {
        for (y, x) in out.iter_mut().zip(data.chunks_exact(4)) {
            *y = (value(x) + value(&x[2..])) as f32 * (0.5 / 32768.0);
        }
    }
}

/// The mean of the channels, where full scale is 2^`scale`. In float64, so that it is rounded only once.
#[inline(always)]
fn mix<const N: usize>(data: &[u8], channels: usize, out: &mut [f32], scale: i32, value: impl Fn([u8; N]) -> f64) {
    let gain = 2f64.powi(-scale);
    let value = |x: &[u8]| value(x.try_into().expect("one sample"));
    match channels {
        1 => {
            for (y, x) in out.iter_mut().zip(data.chunks_exact(N)) {
                *y = (value(x) * gain) as f32;
            }
        }
        2 => {
            for (y, x) in out.iter_mut().zip(data.chunks_exact(2 * N)) {
                *y = ((value(&x[..N]) + value(&x[N..])) * (0.5 * gain)) as f32;
            }
        }
        _ => {
            for (y, x) in out.iter_mut().zip(data.chunks_exact(channels * N)) {
                *y = (x.chunks_exact(N).map(&value).sum::<f64>() * gain / channels as f64) as f32;
            }
        }
    }
}

//! Plain samples in any container: integers of 8 to 32 bits, floats and G.711, read straight from the bytes.
//! `riff` and `aiff` find them.

use super::{aiff, corrupt, riff, Error, Info};

/// The coding of one sample.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Encoding {
    U8,
    I8,
    I16,
    I24,
    I32,
    /// 24 bits at the low end of 4 bytes.
    I24In4,
    F32,
    F64,
    ALaw,
    MuLaw,
}

impl Encoding {
    /// Integers of so many bytes.
    pub fn integer(bytes: usize) -> Option<Self> {
        [Self::I8, Self::I16, Self::I24, Self::I32].get(bytes.checked_sub(1)?).copied()
    }

    pub fn bytes(self) -> usize {
        match self {
            Self::U8 | Self::I8 | Self::ALaw | Self::MuLaw => 1,
            Self::I16 => 2,
            Self::I24 => 3,
            Self::I32 | Self::I24In4 | Self::F32 => 4,
            Self::F64 => 8,
        }
    }
}

/// The place of a recording's samples, and their coding.
pub(super) struct Pcm<'a> {
    pub name: &'static str,
    pub rate: u32,
    pub channels: u16,
    pub encoding: Encoding,
    pub big_endian: bool,
    pub data: &'a [u8],
    pub stated: u64, // the bytes that the header states; 0 if it leaves them open
}

impl<'a> Pcm<'a> {
    /// The plain samples of a recording. None if the bytes are of another container, or hold another codec.
    pub fn find(bytes: &'a [u8]) -> Result<Option<Self>, Error> {
        match bytes.get(..4).unwrap_or(&[]) {
            b"RIFF" | b"RF64" | b"BW64" if bytes.get(8..12) == Some(b"WAVE") => riff::wav(bytes),
            b"riff" if bytes.starts_with(&riff::W64) => riff::w64(bytes),
            b".snd" => aiff::au(bytes),
            b"FORM" if matches!(bytes.get(8..12), Some(b"AIFF" | b"AIFC")) => aiff::aiff(bytes),
            b"caff" => aiff::caf(bytes),
            _ => Ok(None),
        }
    }

    /// Whether no sample can be infinite.
    pub fn is_finite(&self) -> bool {
        !matches!(self.encoding, Encoding::F32 | Encoding::F64)
    }

    /// The number of samples per channel of which one is NaN, infinite or beyond `limit`, and the first of them.
    pub fn beyond(&self, limit: f64) -> (u64, u64) {
        match (self.encoding, self.big_endian) {
            (Encoding::F32, false) => self.count(|x| f64::from(f32::from_le_bytes(x)), limit),
            (Encoding::F32, true) => self.count(|x| f64::from(f32::from_be_bytes(x)), limit),
            (Encoding::F64, false) => self.count(f64::from_le_bytes, limit),
            (Encoding::F64, true) => self.count(f64::from_be_bytes, limit),
            _ => (0, 0),
        }
    }

    fn count<const N: usize>(&self, value: impl Fn([u8; N]) -> f64, limit: f64) -> (u64, u64) {
        // NaN is not below the limit either.
        let is_good = |frame: &[u8]| {
            let samples = frame.as_chunks().0.iter();
            samples.fold(true, |good, x| good & (value(*x).abs() <= limit))
        };
        let mut found = (0, 0);
        for (k, frame) in self.data.chunks_exact(self.frame().max(1)).enumerate() {
            if !is_good(frame) {
                if found.0 == 0 {
                    found.1 = k as u64;
                }
                found.0 += 1;
            }
        }
        found
    }

    fn frame(&self) -> usize {
        self.encoding.bytes() * usize::from(self.channels)
    }

    pub fn info(&self) -> Info {
        let frames = |bytes: u64| bytes / self.frame().max(1) as u64;
        let (found, stated) = (frames(self.data.len() as u64), frames(self.stated));
        Info { rate: self.rate, channels: self.channels, frames: found, stated }
    }

    /// The samples from `start` on of a recording with one channel of 16 bits, as they are. None for any other.
    pub fn read_16(&self, start: u64, out: &mut [i16]) -> Option<()> {
        if (self.encoding, self.channels, self.big_endian) != (Encoding::I16, 1, false) {
            return None;
        }
        let begin = usize::try_from(start).ok()?.checked_mul(2)?;
        let data = self.data.get(begin..begin.checked_add(2 * out.len())?)?;
        for (y, x) in out.iter_mut().zip(data.chunks_exact(2)) {
            *y = i16::from_le_bytes([x[0], x[1]]);
        }
        Some(())
    }

    /// Decodes the frames from `start` on, which must lie inside the recording. Only their bytes are read. With a
    /// `channel`, which must be one of the recording's, that one instead of the mean.
    pub fn read(&self, start: u64, channel: Option<u16>, out: &mut [f32]) -> Result<(), Error> {
        let mut channels = usize::from(self.channels);
        let block = self.frame();
        let begin = (start as usize).saturating_mul(block);
        let Some(data) =
            self.data.get(begin..begin.saturating_add(out.len().saturating_mul(block)))
        else {
            return corrupt(self.name, "the data ends before its stated length");
        };
        let chosen: Vec<u8>;
        let data = match channel {
            Some(channel) if channels > 1 => {
                let size = self.encoding.bytes();
                let first = usize::from(channel) * size;
                chosen = data
                    .chunks_exact(block)
                    .flat_map(|frame| &frame[first..first + size])
                    .copied()
                    .collect();
                channels = 1;
                &chosen[..]
            }
            _ => data,
        };
        let n = channels;
        match (self.encoding, self.big_endian) {
            (Encoding::U8, _) => mix(data, n, out, 7, |[a]: [u8; 1]| f64::from(i32::from(a) - 128)),
            (Encoding::I8, _) => mix(data, n, out, 7, |x| f64::from(i8::from_le_bytes(x))),
            (Encoding::I16, false) if n <= 2 => mix_i16(data, n, out),
            (Encoding::I16, false) => mix(data, n, out, 15, |x| f64::from(i16::from_le_bytes(x))),
            (Encoding::I16, true) => mix(data, n, out, 15, |x| f64::from(i16::from_be_bytes(x))),
            (Encoding::I24, false) => {
                mix(data, n, out, 31, |[a, b, c]| f64::from(i32::from_le_bytes([0, a, b, c])))
            }
            (Encoding::I24, true) => {
                mix(data, n, out, 31, |[a, b, c]| f64::from(i32::from_be_bytes([a, b, c, 0])))
            }
            (Encoding::I32, false) => mix(data, n, out, 31, |x| f64::from(i32::from_le_bytes(x))),
            (Encoding::I32, true) => mix(data, n, out, 31, |x| f64::from(i32::from_be_bytes(x))),
            (Encoding::I24In4, _) => mix(data, n, out, 23, |x| f64::from(i32::from_le_bytes(x))),
            (Encoding::F32, false) => mix(data, n, out, 0, |x| f64::from(f32::from_le_bytes(x))),
            (Encoding::F32, true) => mix(data, n, out, 0, |x| f64::from(f32::from_be_bytes(x))),
            (Encoding::F64, false) => mix(data, n, out, 0, f64::from_le_bytes),
            (Encoding::F64, true) => mix(data, n, out, 0, f64::from_be_bytes),
            (Encoding::ALaw, _) => mix(data, n, out, 15, |[a]: [u8; 1]| a_law(a)),
            (Encoding::MuLaw, _) => mix(data, n, out, 15, |[a]: [u8; 1]| mu_law(a)),
        }
        Ok(())
    }
}

/// A sample of 16 bits that a byte of A-law stands for (G.711).
fn a_law(byte: u8) -> f64 {
    let byte = byte ^ 0x55;
    let (step, exponent) = (i32::from(byte & 15), i32::from(byte >> 4 & 7));
    let size =
        if exponent == 0 { (step << 4) + 8 } else { ((step << 4) + 0x108) << (exponent - 1) };
    f64::from(if byte & 0x80 == 0 { -size } else { size })
}

/// A sample of 16 bits that a byte of mu-law stands for (G.711).
fn mu_law(byte: u8) -> f64 {
    let byte = !byte;
    let size = (((i32::from(byte & 15) << 3) + 0x84) << (byte >> 4 & 7)) - 0x84;
    f64::from(if byte & 0x80 == 0 { size } else { -size })
}

/// The same result as `mix`, faster: a sum of 17 bits is exact in float32, and scaling by a power of two rounds
/// nothing.
fn mix_i16(data: &[u8], channels: usize, out: &mut [f32]) {
    if channels == 1 {
        for (y, x) in out.iter_mut().zip(data.as_chunks().0) {
            *y = f32::from(i16::from_le_bytes(*x)) * (1.0 / 32768.0);
        }
    } else {
        // Both halves of one word, so that loads of single samples are not shuffled.
        for (y, x) in out.iter_mut().zip(data.as_chunks().0) {
            let pair = i32::from_le_bytes(*x);
            *y = ((pair << 16 >> 16) + (pair >> 16)) as f32 * (0.5 / 32768.0);
        }
    }
}

/// The mean of the channels, for a full scale of 2^`scale`. In float64, so that it is rounded only once.
#[inline(always)]
fn mix<const N: usize>(
    data: &[u8], channels: usize, out: &mut [f32], scale: i32, value: impl Fn([u8; N]) -> f64,
) {
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

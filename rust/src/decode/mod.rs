//! Encoded bytes + \[start, length) -> mono float32: only the packets that the crop needs are read and decoded.
//!
//! WAV, FLAC, MP3 and OGG Vorbis, told apart by their content. Every format has its own index into the bytes (the
//! containers are read here, so that a seek is exact to the sample); the transforms of MP3 and Vorbis are symphonia's.
//! For each, a crop equals the same slice of the whole recording: exactly for WAV and FLAC, and within 1e-5 for MP3
//! and Vorbis, whose decoders are warmed up on what comes before the crop.
//!
//! Broken recordings. A truncated recording ends with its last whole packet. Of a chained OGG stream only the first
//! link is decoded, as libsndfile does. Damage inside the crop (a checksum that does not match, a packet that cannot
//! be decoded) is an error; only in MP3, where every archive holds a few bad frames, does a bad frame become silence,
//! as in other decoders. Samples that are not finite are an error. No bytes make the decoders panic, allocate more
//! than a small multiple of the input, or loop for ever.

mod bits;
mod flac;
mod mp3;
mod ogg;
mod vorbis;
mod wav;

use symphonia::core::audio::{Audio, AudioBuffer};

/// What a recording says about itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Info {
    /// Sample rate in Hz.
    pub rate: u32,
    /// Channels in the file; [`Decoder::read`] gives their mean.
    pub channels: u16,
    /// Length in samples per channel, without the encoder's delay and padding.
    pub frames: u64,
}

/// Why a recording cannot be decoded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("the recording is empty (0 bytes)")]
    NoBytes,
    #[error("not a WAV, FLAC, MP3 or OGG Vorbis recording (it begins with bytes {0:02x?})")]
    Unknown([u8; 4]),
    #[error("{format}: {what} is not supported; convert it to FLAC or 16-bit WAV")]
    Unsupported { format: &'static str, what: String },
    #[error("{format}: {what}; the file is damaged, fetch or convert it again")]
    Corrupt { format: &'static str, what: &'static str },
    #[error("{format}: the recording holds no audio")]
    NoAudio { format: &'static str },
    #[error("non-finite samples (NaN or infinity) at or after sample {0}")]
    NotFinite(u64),
    #[error("samples [{start}, {start} + {length}) are not inside the recording's {frames}")]
    Range { start: u64, length: usize, frames: u64 },
}

/// The mean of the channels' samples from `skip` on.
fn mix(decoded: &AudioBuffer<f32>, skip: usize, out: &mut [f32]) {
    let channels = decoded.num_planes();
    for (i, plane) in decoded.iter_planes().enumerate() {
        let plane = plane.get(skip..).unwrap_or(&[]);
        if i == 0 {
            for (y, x) in out.iter_mut().zip(plane) {
                *y = *x;
            }
        } else {
            for (y, x) in out.iter_mut().zip(plane) {
                *y += *x;
            }
        }
    }
    if channels > 1 {
        let gain = 1.0 / channels as f32;
        for y in out {
            *y *= gain;
        }
    }
}

fn corrupt<T>(format: &'static str, what: &'static str) -> Result<T, Error> {
    Err(Error::Corrupt { format, what })
}

enum Format {
    Wav,
    Flac,
    Mp3,
    Ogg,
}

/// Decoders and their scratch memory, kept between calls. One per thread.
#[derive(Default)]
pub struct Decoder {
    flac: flac::Flac,
    mp3: mp3::Mp3,
    vorbis: vorbis::Vorbis,
}

impl Decoder {
    pub fn new() -> Self {
        Self::default()
    }

    /// Rate, channels and exact length of a recording, without decoding it.
    ///
    /// # Errors
    /// When the bytes are none of the four formats, use a feature that is not supported, or hold no audio.
    pub fn info(&mut self, bytes: &[u8]) -> Result<Info, Error> {
        let (format, bytes) = format(bytes)?;
        let (name, info) = match format {
            Format::Wav => ("WAV", wav::info(bytes)?),
            Format::Flac => ("FLAC", self.flac.info(bytes)?),
            Format::Mp3 => ("MP3", self.mp3.info(bytes)?),
            Format::Ogg => ("OGG", self.vorbis.info(bytes)?),
        };
        if info.rate == 0 || info.channels == 0 {
            return corrupt(name, "a rate or channel count of 0");
        }
        if info.frames == 0 {
            return Err(Error::NoAudio { format: name });
        }
        Ok(info)
    }

    /// Decodes samples \[start, start + out.len()), the mean of all channels at the recording's own rate. `info` is
    /// what [`Decoder::info`] said of these bytes.
    ///
    /// # Errors
    /// When the range is not inside the recording, what it covers is damaged, or a sample is not finite.
    pub fn read(&mut self, bytes: &[u8], info: &Info, start: u64, out: &mut [f32]) -> Result<(), Error> {
        if start.checked_add(out.len() as u64).is_none_or(|end| end > info.frames) {
            return Err(Error::Range { start, length: out.len(), frames: info.frames });
        }
        if out.is_empty() {
            return Ok(());
        }
        let (format, bytes) = format(bytes)?;
        match format {
            Format::Wav => wav::read(bytes, start, out)?,
            // Whole numbers are always finite.
            Format::Flac => return self.flac.read(bytes, start, out),
            Format::Mp3 => self.mp3.read(bytes, start, out)?,
            Format::Ogg => self.vorbis.read(bytes, start, out)?,
        }
        // Without a branch for each sample, so that it runs in lanes.
        let exponent = f32::INFINITY.to_bits();
        if out.iter().fold(false, |bad, x| bad | (x.to_bits() & exponent == exponent)) {
            return Err(Error::NotFinite(start));
        }
        Ok(())
    }
}

/// Tells the format by its first bytes, after any ID3v2 tags (which some tools put before FLAC as well).
fn format(bytes: &[u8]) -> Result<(Format, &[u8]), Error> {
    if bytes.is_empty() {
        return Err(Error::NoBytes);
    }
    let mut rest = bytes;
    while let Some(size) = id3v2(rest) {
        rest = &rest[size.min(rest.len())..];
    }
    let magic = |at: usize| rest.get(at..at + 4).unwrap_or(&[]);
    let format = match magic(0) {
        b"RIFF" | b"RF64" | b"BW64" if magic(8) == b"WAVE" => Format::Wav,
        b"fLaC" => Format::Flac,
        b"OggS" => Format::Ogg,
        _ if mp3::first_frame(rest).is_some() => Format::Mp3,
        _ => {
            let mut begin = [0; 4];
            let n = bytes.len().min(4);
            begin[..n].copy_from_slice(&bytes[..n]);
            return Err(Error::Unknown(begin));
        }
    };
    Ok((format, rest))
}

/// Bytes of the ID3v2 tag at the beginning, if there is one.
fn id3v2(bytes: &[u8]) -> Option<usize> {
    let header: &[u8; 10] = bytes.first_chunk()?;
    if &header[..3] != b"ID3" || header[6..].iter().any(|b| b & 0x80 != 0) {
        return None;
    }
    let size = header[6..].iter().fold(0usize, |size, &b| size << 7 | usize::from(b));
    let footer = if header[5] & 0x10 != 0 { 10 } else { 0 };
    Some(10 + size + footer)
}

//! Encoded bytes + [start, length) -> mono float32: only the packets that the crop needs are decoded.

/// What a recording says about itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Info {
    /// Sample rate in Hz.
    pub rate: u32,
    /// Channels in the file; `Decoder::read` gives their mean.
    pub channels: u16,
    /// Length in samples per channel, after gapless trimming.
    pub frames: u64,
}

/// Why a recording cannot be decoded.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("not a WAV, FLAC, MP3 or OGG Vorbis recording")]
    Unknown,
}

/// Decoders and their scratch, kept between calls. One per thread.
#[derive(Default)]
pub struct Decoder {}

impl Decoder {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn info(&mut self, _bytes: &[u8]) -> Result<Info, Error> {
        Err(Error::Unknown)
    }

    /// Decodes samples [start, start + out.len()), which must lie inside `info.frames`.
    pub fn read(&mut self, _bytes: &[u8], _info: &Info, _start: u64, _out: &mut [f32]) -> Result<(), Error> {
        Err(Error::Unknown)
    }
}

//! Encoded bytes and \[start, length) to mono float32: only the packets that the crop needs are read and decoded.
//!
//! Plain samples (WAV, W64, AIFF, CAF, AU), FLAC, MP3, OGG Vorbis and OGG Opus, recognised by their content, and more
//! slowly the formats of `fallback`. Every format has its own index into the bytes: the containers are read here, so
//! that a seek is exact to the sample. opus-pure decodes Opus packets. In each format a crop equals the same slice of
//! the whole recording: exactly for plain samples and FLAC, and within 1e-5 for MP3, Vorbis and Opus, whose decoders
//! are warmed up on the audio before the crop.
//!
//! Recordings that were joined end to end are read whole: MP3 by its frames, OGG as a `chain` of links.
//!
//! Damaged recordings: a truncated recording ends with its last complete packet. Damage inside the crop (a checksum
//! that does not match, a packet that cannot be decoded) is an error. MP3 is the exception: every archive has a few bad
//! frames, so a bad frame becomes silence, as in other decoders. Samples that are not finite are an error. No bytes may
//! make the decoders panic, allocate more than a small multiple of the input, or loop forever.

/// Returns a result, mostly an error, from the function around it if a condition holds.
#[macro_export]
macro_rules! refuse {
    ($condition:expr, $result:expr) => {
        if $condition {
            return $result;
        }
    };
}

mod aac;
mod aiff;
mod bits;
mod chain;
mod fallback;
mod flac;
mod flac_write;
mod mp3;
mod mp4;
mod ogg;
mod opus;
mod pcm;
mod riff;
pub mod simd;
mod unsupported;
mod vorbis;

use std::ops::RangeInclusive;

use chain::{Chain, Link};
pub use flac_write::{Origin, Writer as FlacWriter, BLOCK as FLAC_BLOCK};
use pcm::Pcm;

/// Sample rates of recordings in Hz. A header that claims another is damaged, or would need an absurdly large filter.
pub const RATES: RangeInclusive<u32> = 1_000..=768_000;

/// The format of a recording, as its headers state it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Info {
    /// Sample rate in Hz. Always 48,000 for Opus, for any encoded rate.
    pub rate: u32,
    /// Channels in the file. [`Decoder::read`] returns their mean, or one of them.
    pub channels: u16,
    /// Length in samples per channel, without the encoder's delay and padding.
    pub frames: u64,
    /// The length that the headers state. A file that was cut short or never finished does not have it. 0 if none is
    /// stated, and `UNKNOWN_LENGTH` if a file without a stated length ends inside a page or a frame.
    pub stated: u64,
}

impl Info {
    /// Errors: Samples \[start, start + length) that are not inside the recording.
    pub fn check_range(&self, start: u64, length: u64) -> Result<(), Error> {
        let inside = start.checked_add(length).is_some_and(|end| end <= self.frames);
        inside.then_some(()).ok_or(Error::Range { start, length, frames: self.frames })
    }
}

/// The stated length of a recording of unknown length. It fits into 63 bits, since tables hold it.
const UNKNOWN_LENGTH: u64 = i64::MAX as u64;

/// The reason why a recording cannot be decoded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("the recording is empty (0 bytes)")]
    NoBytes,
    #[error(
        "not a WAV, FLAC, MP3, OGG, AIFF, CAF or M4A recording (it begins with bytes {0:02x?})"
    )]
    Unknown([u8; 4]),
    #[error("it is {0}")]
    NotAudio(&'static str),
    #[error("{format}: {what} cannot be read here; convert it: ffmpeg -i OLD NEW.flac")]
    Unsupported { format: &'static str, what: String },
    #[error(
        "{format}: several files, joined byte by byte; take them one by one, or join them with sox"
    )]
    Joined { format: &'static str },
    #[error("{format}: {what}; the file is damaged, fetch or convert it again")]
    Corrupt { format: &'static str, what: &'static str },
    #[error("has a sample rate of {0} Hz; expected one in {RATES:?}")]
    Rate(u32),
    #[error("{format}: the recording holds no audio")]
    NoAudio { format: &'static str },
    #[error("non-finite samples (NaN or infinity) at or after sample {0}")]
    NotFinite(u64),
    #[error(
        "samples [{start}, {start} + {length}) are not inside the recording's {frames} frames"
    )]
    Range { start: u64, length: u64, frames: u64 },
    #[error("channel {channel} does not exist: the recording has {channels}, counted from 0")]
    Channel { channel: u16, channels: u16 },
}

impl Error {
    /// The refusal of a container with several recordings, of which one would be read and the others lost.
    fn tracks(format: &'static str, tracks: usize) -> Self {
        let what = format!("several tracks of sound ({tracks}; -map 0:a:0 takes the first)");
        Self::Unsupported { format, what }
    }

    /// The refusal of a file whose samples are in several parts, of which one would be read.
    fn parts(format: &'static str) -> Self {
        Self::Unsupported { format, what: "its several chunks of samples".into() }
    }
}

fn corrupt<T>(format: &'static str, what: &'static str) -> Result<T, Error> {
    Err(Error::Corrupt { format, what })
}

enum Format<'a> {
    Pcm(Pcm<'a>),
    Flac,
    Mp3,
    /// With the first stream's serial number.
    Ogg(ogg::Codec, u32),
    /// Read by symphonia.
    Fallback,
}

/// Decoders of all formats and their memory, kept between calls. One per thread.
#[derive(Default)]
pub struct Decoder {
    flac: flac::Flac,
    mp3: mp3::Mp3,
    ogg: Ogg,
    chain: Chain,
    is_fallback: bool,
}

/// Decoders of the streams in OGG.
#[derive(Default)]
struct Ogg {
    opus: opus::Opus,
    vorbis: vorbis::Vorbis,
}

impl Ogg {
    fn info(&mut self, bytes: &[u8], codec: ogg::Codec, serial: u32) -> Result<Info, Error> {
        match codec {
            ogg::Codec::Vorbis => self.vorbis.info(bytes, serial),
            ogg::Codec::Opus => self.opus.info(bytes, serial),
        }
    }

    fn read(
        &mut self, bytes: &[u8], (codec, serial): (ogg::Codec, u32), start: u64,
        channel: Option<u16>, out: &mut [f32],
    ) -> Result<(), Error> {
        match codec {
            ogg::Codec::Vorbis => self.vorbis.read(bytes, serial, start, channel, out),
            ogg::Codec::Opus => self.opus.read(bytes, serial, start, channel, out),
        }
    }
}

impl Decoder {
    /// Rate, channels and exact length of a recording, without decoding it.
    /// Errors: Bytes that are none of the formats, use a feature that is not supported, hold no audio, or claim a rate
    /// that is none of `RATES`.
    pub fn info(&mut self, bytes: &[u8]) -> Result<Info, Error> {
        let (format, bytes) = format(bytes)?;
        self.is_fallback = matches!(format, Format::Fallback);
        self.flac.origin = None;
        self.chain.forget(); // other bytes may lie at the address of earlier ones
        let cut = matches!(format, Format::Ogg(..)) && ogg::is_cut(bytes);
        let (name, mut info) = match format {
            Format::Pcm(pcm) => (pcm.name, pcm.info()),
            Format::Flac => ("FLAC", self.flac.info(bytes)?),
            Format::Mp3 => ("MP3", self.mp3.info(bytes)?),
            Format::Ogg(_, serial) if self.chain.find(bytes, serial) => {
                let Self { chain, ogg, .. } = self;
                (
                    "OGG",
                    chain
                        .info(|link: &Link| ogg.info(link.bytes(bytes), link.codec, link.serial))?,
                )
            }
            Format::Ogg(codec, serial) => (codec.name(), self.ogg.info(bytes, codec, serial)?),
            Format::Fallback => (fallback::name(bytes), fallback::info(bytes)?),
        };
        if cut {
            info.stated = UNKNOWN_LENGTH;
        }
        refuse!(
            info.rate == 0 || info.channels == 0,
            corrupt(name, "the sample rate or the number of channels is 0")
        );
        refuse!(!RATES.contains(&info.rate), Err(Error::Rate(info.rate)));
        refuse!(info.frames == 0, Err(Error::NoAudio { format: name }));
        Ok(info)
    }

    /// Whether the recording will be decoded whole and right, as far as [`Decoder::info`], which every crop calls, does
    /// not say.
    /// Errors: FLAC files that were joined, and variants of the formats of `fallback` that symphonia does not read.
    pub fn check(&mut self, bytes: &[u8], info: &Info) -> Result<(), Error> {
        match format(bytes)? {
            (Format::Flac, bytes) => flac::Flac::check(bytes, info),
            (Format::Fallback, bytes) => fallback::check(bytes),
            _ => Ok(()),
        }
    }

    /// Whether symphonia reads the recording that [`Decoder::info`] was last called for. It is several times slower.
    pub fn is_slow(&self) -> bool {
        self.is_fallback
    }

    /// The origin of the recording that [`Decoder::info`] was last called for. None if it is not a prepared one.
    pub fn origin(&self) -> Option<Origin> {
        self.flac.origin
    }

    /// Decodes as [`Decoder::read`] does, a recording with one channel of 16 bits, without a loss of time or of bits.
    /// False, with nothing read, for any other.
    /// Errors: A range that is not in the recording, or damage in it.
    pub fn read_16(
        &mut self, bytes: &[u8], info: &Info, start: u64, out: &mut [i16],
    ) -> Result<bool, Error> {
        refuse!(info.channels != 1, Ok(false));
        info.check_range(start, out.len() as u64)?;
        match format(bytes)? {
            (Format::Pcm(pcm), _) => Ok(pcm.read_16(start, out).is_some()),
            (Format::Flac, bytes) => self.flac.read_16(bytes, start, out),
            _ => Ok(false),
        }
    }

    /// Whether the channels of a recording cancel each other, so that their mean is almost silence: one is the other's
    /// inverse, as a wrong cable makes it. Looks at a few places. A place that cannot be decoded does not count.
    pub fn cancels(&mut self, bytes: &[u8], info: &Info) -> bool {
        const PLACE: u64 = 4096;
        let n = info.frames.min(PLACE);
        let (mut plane, mut sum) = (vec![0.0; n as usize], vec![0.0; n as usize]);
        let energy = |plane: &[f32]| plane.iter().map(|x| x * x).sum::<f32>();
        let mut found = false;
        for quarter in if (2..=16).contains(&info.channels) { &[2, 1, 3][..] } else { &[] } {
            let start = (info.frames - n) / 4 * quarter;
            sum.fill(0.0);
            let mut each = 0.0;
            for channel in 0..info.channels {
                if self.read(bytes, info, start, Some(channel), &mut plane).is_err() {
                    return false;
                }
                each += energy(&plane) / f32::from(info.channels);
                sum.iter_mut()
                    .zip(&plane)
                    .for_each(|(sum, x)| *sum += x / f32::from(info.channels));
            }
            if each > 1e-8 * n as f32 {
                found = energy(&sum) < 0.01 * each;
                if !found {
                    return false;
                }
            }
        }
        found
    }

    /// The largest sample of a recording of floats, which lie in \[-1, 1\] but for those of a wrong writer: of a few
    /// places. 0 for any other recording. A place that cannot be decoded does not count.
    pub fn peak(&mut self, bytes: &[u8]) -> f32 {
        const PLACE: u64 = 4096;
        const PLACES: u64 = 16;
        let is_float = matches!(format(bytes), Ok((Format::Pcm(pcm), _)) if !pcm.is_finite());
        refuse!(!is_float, 0.0);
        let Ok(info) = self.info(bytes) else { return 0.0 };
        let n = info.frames.min(PLACE);
        let mut samples = vec![0.0; n as usize];
        let mut peak = 0.0f32;
        for place in 0..PLACES {
            let start = (info.frames - n) / (PLACES - 1) * place;
            if self.read(bytes, &info, start, None, &mut samples).is_ok() {
                peak = samples.iter().fold(peak, |peak, x| peak.max(x.abs()));
            }
        }
        peak
    }

    /// The number of samples per channel of which one is NaN, infinite or beyond `limit`, and the first of them. All of
    /// a recording of floats is read. Other formats have none.
    /// Errors: Bytes that are no recording.
    pub fn beyond(&self, bytes: &[u8], limit: f64) -> Result<(u64, u64), Error> {
        match format(bytes)?.0 {
            Format::Pcm(pcm) if !pcm.is_finite() => Ok(pcm.beyond(limit)),
            _ => Ok((0, 0)),
        }
    }

    /// Decodes samples \[start, start + out.len()) at the recording's own rate: the mean of all channels, or one
    /// `channel`. `info` is the result of [`Decoder::info`] for these bytes.
    /// Errors: A range or a channel that is not in the recording, damage in it, or a sample that is not finite.
    pub fn read(
        &mut self, bytes: &[u8], info: &Info, start: u64, channel: Option<u16>, out: &mut [f32],
    ) -> Result<(), Error> {
        if let Some(channel) = channel.filter(|&channel| channel >= info.channels) {
            return Err(Error::Channel { channel, channels: info.channels });
        }
        let channel = channel.filter(|_| info.channels > 1);
        info.check_range(start, out.len() as u64)?;
        if out.is_empty() {
            return Ok(());
        }
        let (format, bytes) = format(bytes)?;
        match format {
            // Integers are always finite.
            Format::Pcm(pcm) if pcm.is_finite() => return pcm.read(start, channel, out),
            Format::Pcm(pcm) => pcm.read(start, channel, out)?,
            Format::Flac => return self.flac.read(bytes, start, channel, out),
            Format::Mp3 => self.mp3.read(bytes, start, channel, out)?,
            Format::Ogg(_, serial) if self.chain.find(bytes, serial) => {
                let Self { chain, ogg, .. } = self;
                chain.read(start, out, |link, from, out| {
                    ogg.read(link.bytes(bytes), (link.codec, link.serial), from, channel, out)
                })?;
            }
            Format::Ogg(codec, serial) => {
                self.ogg.read(bytes, (codec, serial), start, channel, out)?
            }
            Format::Fallback => fallback::read(bytes, info, start, channel, out)?,
        }
        // Without a branch for each sample, so that it is vectorised.
        let exponent = f32::INFINITY.to_bits();
        if out.iter().fold(false, |bad, x| bad | (x.to_bits() & exponent == exponent)) {
            return Err(Error::NotFinite(start));
        }
        Ok(())
    }
}

/// Reads parts of a recording, for fuzzers: arbitrary bytes may cause nothing worse than an error.
/// Errors: Those of `Decoder::info`, and that of the first part that cannot be read.
/// Panics: When a decoded sample is not finite, which would be a bug here.
pub fn probe(bytes: &[u8]) -> Result<Info, Error> {
    let mut decoder = Decoder::default();
    let info = decoder.info(bytes)?;
    let length = info.frames.min(20_000);
    let mut out = vec![f32::NAN; length as usize];
    let mut first = Ok(info);
    for start in [0, (info.frames - length) / 2, info.frames - length] {
        match decoder.read(bytes, &info, start, None, &mut out) {
            Ok(()) => assert!(out.iter().all(|x| x.is_finite())),
            Err(error) => first = first.and(Err(error)),
        }
    }
    first
}

/// Recognises the format by the first bytes after any ID3v2 tags (which some tools also write before FLAC).
fn format(bytes: &[u8]) -> Result<(Format<'_>, &[u8]), Error> {
    refuse!(bytes.is_empty(), Err(Error::NoBytes));
    let mut rest = bytes;
    while let Some(size) = id3v2(rest) {
        rest = &rest[size.min(rest.len())..];
    }
    if let Some(pcm) = Pcm::find(rest)? {
        return Ok((Format::Pcm(pcm), rest));
    }
    let format = match rest.get(..4).unwrap_or(&[]) {
        _ if fallback::is_fallback(rest) => Format::Fallback,
        b"fLaC" => Format::Flac,
        b"OggS" => {
            let (codec, serial) = ogg::stream(rest)?;
            Format::Ogg(codec, serial)
        }
        _ => match mp3::start(rest) {
            Some(at) => {
                // Another container, or a stream of another layer, may hold what looks like frames of layer III.
                unsupported::before(rest, at).map_or(Ok(()), Err)?;
                Format::Mp3
            }
            None => return Err(unsupported::refusal(rest)),
        },
    };
    Ok((format, rest))
}

/// Size in bytes of an ID3v2 tag at the beginning. None if there is none.
fn id3v2(bytes: &[u8]) -> Option<usize> {
    let header: &[u8; 10] = bytes.first_chunk()?;
    refuse!(&header[..3] != b"ID3" || header[6..].iter().any(|b| b & 0x80 != 0), None);
    let size = header[6..].iter().fold(0usize, |size, &b| size << 7 | usize::from(b));
    let footer = if header[5] & 0x10 != 0 { 10 } else { 0 };
    Some(10 + size + footer)
}

//! MPEG audio layer III: where the frames are; `layer3` decodes them.
//!
//! A frame's spectrum may begin in the bytes of frames before it (the bit reservoir, up to 511 bytes), and its samples
//! overlap with the two granules before it. A crop therefore begins to decode that much earlier and throws it away.
//!
//! Gapless: a LAME tag in the first (Xing or Info) frame states the encoder's delay and padding. As in libmpg123, the
//! recording is then samples \[delay + 529, frames * samples per frame - padding + 529), where 529 is the decoder's own
//! delay; without the tag nothing is trimmed.

use super::layer3::Layer3;
use super::{corrupt, Error, Info};

/// Samples by which a decoder is late.
const DECODER_DELAY: u64 = 529;
/// Farthest that a frame reaches back into earlier bytes.
pub(super) const RESERVOIR: usize = 511;
/// Granules before the crop whose spectra must be right, for the overlap of the transform and of the filter bank.
const OVERLAP: usize = 2;
/// Bytes of anything else that may stand before the first frame.
const MAX_JUNK: usize = 1 << 16;

#[derive(Clone, Copy, PartialEq)]
pub(super) struct Header {
    rate: u32,
    /// MPEG 1, rather than 2 or 2.5.
    pub mpeg1: bool,
    pub channels: u8,
    /// Bits of middle/side (2) and of intensity (1) stereo.
    joint: u8,
    crc: bool,
    /// Bytes of the whole frame.
    size: usize,
}

impl Header {
    /// Layer III only; "free" bit rates have no size and are not taken for frames.
    fn parse(bytes: &[u8]) -> Option<Self> {
        let word = u32::from_be_bytes(*bytes.first_chunk()?);
        if word >> 21 != 0x7ff || word >> 17 & 3 != 1 {
            return None;
        }
        let version = word >> 19 & 3;
        let base = [44100, 48000, 32000].get((word >> 10 & 3) as usize)?;
        let (rate, mpeg1) = match version {
            0 => (base / 4, false),
            2 => (base / 2, false),
            3 => (*base, true),
            _ => return None,
        };
        let kilobits = match (word >> 12 & 15) as usize {
            0 | 15 => return None,
            i if mpeg1 => [32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320][i - 1],
            i => [8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160][i - 1],
        };
        let samples = if mpeg1 { 1152 } else { 576 };
        let size = samples / 8 * kilobits * 1000 / rate + (word >> 9 & 1);
        let (channels, joint) = match word >> 6 & 3 {
            1 => (2, (word >> 4 & 3) as u8),
            3 => (1, 0),
            _ => (2, 0),
        };
        Some(Self { rate, mpeg1, channels, joint, crc: word >> 16 & 1 == 0, size: size as usize })
    }

    fn samples(self) -> usize {
        if self.mpeg1 {
            1152
        } else {
            576
        }
    }

    /// Bytes of the side information.
    pub fn side(self) -> usize {
        match (self.mpeg1, self.channels) {
            (true, 1) => 17,
            (true, _) => 32,
            (false, 1) => 9,
            (false, _) => 17,
        }
    }

    /// Bytes of the header, its checksum and the side information.
    pub fn before_data(self) -> usize {
        4 + if self.crc { 2 } else { 0 } + self.side()
    }

    pub fn middle_side(self) -> bool {
        self.joint & 2 != 0
    }

    pub fn intensity(self) -> bool {
        self.joint & 1 != 0
    }

    /// The index of the sample rate in the standards' tables.
    pub fn table(self) -> usize {
        const RATES: [u32; 9] = [44100, 48000, 32000, 22050, 24000, 16000, 11025, 12000, 8000];
        RATES.iter().position(|rate| *rate == self.rate).expect("parse knows no others")
    }

    fn same_stream(self, other: Self) -> bool {
        (self.rate, self.mpeg1) == (other.rate, other.mpeg1)
    }
}

/// The first frame: a header that two others of the same stream follow, or the end of the bytes.
pub(super) fn first_frame(bytes: &[u8]) -> Option<(usize, Header)> {
    let within = &bytes[..bytes.len().min(MAX_JUNK)];
    (0..within.len()).filter(|&at| within[at] == 0xff).find_map(|at| {
        let header = Header::parse(&bytes[at..])?;
        let sure = follows(bytes, at, header)
            && Header::parse(&bytes[at + header.size..]).is_none_or(|next| follows(bytes, at + header.size, next));
        sure.then_some((at, header))
    })
}

/// Whether the frame at `at` is followed by one of the same stream, or ends what there is.
fn follows(bytes: &[u8], at: usize, header: Header) -> bool {
    let rest = &bytes[(at + header.size).min(bytes.len())..];
    match Header::parse(rest) {
        Some(next) => next.same_stream(header),
        None => at + header.size == bytes.len() || at + header.size < bytes.len() && is_tag(rest),
    }
}

/// ID3v1 and APE tags stand at the end.
fn is_tag(bytes: &[u8]) -> bool {
    bytes.starts_with(b"TAG") || bytes.starts_with(b"APETAGEX")
}

/// The decoder and an index of the frames of the recording that was asked about last.
pub(super) struct Mp3 {
    index: Index,
    decoder: Layer3,
    samples: [f32; 1152],
}

impl Default for Mp3 {
    fn default() -> Self {
        Self { index: Index::default(), decoder: Layer3::default(), samples: [0.0; 1152] }
    }
}

#[derive(Default)]
struct Index {
    /// Says which bytes this is the index of.
    key: (usize, usize, u64),
    /// Offsets of the frames that hold audio.
    frames: Vec<u32>,
    samples_per_frame: usize,
    rate: u32,
    channels: u8,
    /// The recording, in decoded samples.
    begin: u64,
    end: u64,
}

/// A number that differs, as good as surely, when other bytes stand at the same address.
fn fingerprint(bytes: &[u8]) -> u64 {
    let step = (bytes.len() / 64).max(1);
    bytes
        .iter()
        .step_by(step)
        .fold(0xcbf2_9ce4_8422_2325, |hash, &b| (hash ^ u64::from(b)).wrapping_mul(0x100_0000_01b3))
}

impl Index {
    fn of(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let key = (bytes.as_ptr() as usize, bytes.len(), fingerprint(bytes));
        if self.key == key {
            return Ok(());
        }
        self.key = Default::default();
        let Some((mut at, first)) = first_frame(bytes) else {
            return corrupt("MP3", "there is no frame");
        };
        if bytes.len() > u32::MAX as usize {
            return Err(Error::Unsupported { format: "MP3", what: "a file of more than 4 GiB".into() });
        }
        let tag = Tag::parse(&bytes[at..], first);
        if tag.is_some() {
            at += first.size;
        }
        self.frames.clear();
        while let Some(header) = bytes.get(at..).and_then(Header::parse) {
            // A frame that is cut off at the end is not decoded.
            if !header.same_stream(first) || at + header.size > bytes.len() {
                break;
            }
            self.frames.push(at as u32);
            at += header.size;
            if Header::parse(&bytes[at..]).is_some_and(|next| next.same_stream(first)) {
                continue;
            }
            // Something else between the frames: go on at the next header that another one follows.
            let Some(skip) = (!is_tag(&bytes[at..])).then(|| resynchronise(&bytes[at..], first)).flatten() else {
                break;
            };
            at += skip;
        }
        let samples = first.samples() as u64;
        (self.begin, self.end) = (0, self.frames.len() as u64 * samples);
        if let Some(Tag { frames: Some(frames), trim: Some((delay, padding)) }) = tag {
            let stated = u64::from(frames) * samples + DECODER_DELAY;
            self.begin = (delay + DECODER_DELAY).min(self.end);
            self.end = self.end.min(stated.saturating_sub(padding)).max(self.begin);
        }
        (self.samples_per_frame, self.rate, self.channels) = (first.samples(), first.rate, first.channels);
        self.key = key;
        Ok(())
    }
}

/// Bytes to the next header of the stream `first` that another one follows.
fn resynchronise(bytes: &[u8], first: Header) -> Option<usize> {
    (0..bytes.len()).filter(|&at| bytes[at] == 0xff).find(|&at| {
        Header::parse(&bytes[at..]).is_some_and(|header| header.same_stream(first) && follows(bytes, at, header))
    })
}

/// What a first frame without audio says of the others.
struct Tag {
    frames: Option<u32>,
    /// Delay and padding in samples.
    trim: Option<(u64, u64)>,
}

impl Tag {
    fn parse(bytes: &[u8], header: Header) -> Option<Self> {
        let frame = bytes.get(..header.size)?;
        let u32_at = |at: usize| Some(u32::from_be_bytes(*frame.get(at..)?.first_chunk()?));
        if frame.get(36..40) == Some(b"VBRI") {
            return Some(Self { frames: u32_at(50), trim: None });
        }
        // A checksum, where there is one, does not move the tag.
        let mut at = header.before_data() - if header.crc { 2 } else { 0 };
        if !matches!(frame.get(at..at + 4), Some(b"Xing" | b"Info")) {
            return None;
        }
        let flags = u32_at(at + 4)?;
        at += 8;
        let mut frames = None;
        for (bit, size) in [(1, 4), (2, 4), (4, 100), (8, 4)] {
            if flags & bit != 0 {
                if bit == 1 {
                    frames = u32_at(at);
                }
                at += size;
            }
        }
        let trim = frame.get(at..at + 24).filter(|lame| lame[0] != 0).map(|lame| {
            let word = u64::from(u32::from_be_bytes([0, lame[21], lame[22], lame[23]]));
            (word >> 12, word & 0xfff)
        });
        Some(Self { frames, trim })
    }
}

impl Mp3 {
    pub fn info(&mut self, bytes: &[u8]) -> Result<Info, Error> {
        self.index.of(bytes)?;
        let index = &self.index;
        Ok(Info { rate: index.rate, channels: u16::from(index.channels), frames: index.end - index.begin })
    }

    pub fn read(&mut self, bytes: &[u8], start: u64, out: &mut [f32]) -> Result<(), Error> {
        self.index.of(bytes)?;
        let per_frame = self.index.samples_per_frame;
        let first = self.index.begin + start;
        let wanted = (first / per_frame as u64) as usize;
        let frames = self.index.frames.len();
        if wanted >= frames || first + out.len() as u64 > self.index.end {
            return corrupt("MP3", "the frames end before the stated length");
        }
        let granules = per_frame / 576;
        let decoded = wanted.saturating_sub(OVERLAP.div_ceil(granules));
        // Far enough back to fill the reservoir of the first frame whose spectrum must be right.
        let mut begin = decoded;
        let mut reservoir = 0;
        while begin > 0 && reservoir < RESERVOIR {
            begin -= 1;
            reservoir += self.header(bytes, begin).map_or(0, |h| h.size.saturating_sub(h.before_data()));
        }
        self.decoder.reset();
        let mut done = 0;
        let mut skip = (first % per_frame as u64) as usize;
        for frame in begin..frames {
            let at = self.index.frames[frame] as usize;
            // The index may be of other bytes that once stood here, should their fingerprint be the same.
            let Some(header) = self.header(bytes, frame).filter(|header| header.samples() == per_frame) else { break };
            let Some(data) = bytes.get(at..at + header.size) else { break };
            if frame < decoded {
                self.decoder.skip(data, header);
                continue;
            }
            self.decoder.decode(data, header, &mut self.samples[..per_frame]);
            if frame >= wanted {
                let n = (per_frame - skip).min(out.len() - done);
                out[done..done + n].copy_from_slice(&self.samples[skip..skip + n]);
                done += n;
                skip = 0;
            }
            if done == out.len() {
                return Ok(());
            }
        }
        corrupt("MP3", "the frames end before the stated length")
    }

    fn header(&self, bytes: &[u8], frame: usize) -> Option<Header> {
        Header::parse(bytes.get(self.index.frames[frame] as usize..)?)
    }
}

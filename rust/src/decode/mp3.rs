//! MPEG audio layer III: where the frames are; `layer3` decodes them.
//!
//! A frame's spectrum may begin in the bytes of frames before it (the bit reservoir, up to 511 bytes), and its samples
//! overlap with the two granules before it. A crop therefore begins to decode that much earlier and throws it away.
//!
//! How long it is: at a constant bit rate the place of every frame follows from its number, which is looked at in a few
//! places (if the first frame's tag says so too, in one, the end). Otherwise that tag (Xing, Info or VBRI) says how many
//! frames there are, if it can be believed: its checksum (of VBRI: its table) and the length in bytes that it states must be
//! right. Then frames are only walked up to the crop. Without either, all are walked.
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
    /// Bits of a second.
    bit_rate: u32,
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
        let kilobits: u32 = match (word >> 12 & 15) as usize {
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
        Some(Self {
            rate,
            mpeg1,
            channels,
            joint,
            crc: word >> 16 & 1 == 0,
            bit_rate: kilobits * 1000,
            size: size as usize,
        })
    }

    fn samples(self) -> usize {
        if self.mpeg1 {
            1152
        } else {
            576
        }
    }

    /// The mean size of a frame in bytes, times the sample rate.
    fn bytes_by_rate(self) -> u64 {
        self.samples() as u64 / 8 * u64::from(self.bit_rate)
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
    key: Option<(usize, usize, u64)>,
    first: Option<Header>,
    /// Frames that hold audio.
    n: usize,
    constant: Option<Constant>,
    /// Without a constant bit rate: the offsets of the frames that were walked so far, and where to go on.
    walked: Vec<u32>,
    next: Option<usize>,
    /// The recording, in decoded samples.
    begin: u64,
    end: u64,
}

/// Frames of one bit rate: frame k begins within `SLACK` bytes of begin + k · mean size, whichever way the encoder spread
/// its padding.
#[derive(Clone, Copy)]
struct Constant {
    begin: usize,
    end: usize,
    first: Header,
}

/// Bytes by which the frames of a constant bit rate may be off their places.
const SLACK: usize = 2;
/// Places at which frames must lie as at a constant bit rate, for that to be believed: junk between frames or another bit
/// rate anywhere moves all that comes after it, the last one too.
const PROBES: usize = 8;
/// Of these, how many may be damaged.
const MAX_DAMAGED: usize = 2;

impl Constant {
    /// `stated` is the number of frames by a tag that says that their bit rate is constant: then only the last one is looked at.
    fn of(bytes: &[u8], begin: usize, end: usize, stated: Option<u32>) -> Option<(Self, usize)> {
        let first = bytes.get(begin..).and_then(Header::parse)?;
        let constant = Self { begin, end, first };
        let n = ((end + SLACK).checked_sub(begin)? as u64 * u64::from(first.rate) / first.bytes_by_rate()) as usize;
        // The last frame may lie a little further than the mean says, and then it is cut off.
        let n = (n.saturating_sub(1)..=n).rev().find(|&n| n > 0 && constant.frame(bytes, n - 1).is_some())?;
        let sound = || (0..PROBES).filter(|i| constant.frame(bytes, i * (n - 1) / PROBES).is_some()).count();
        let sure = stated.is_some_and(|stated| stated as usize == n) || n > PROBES && sound() >= PROBES - MAX_DAMAGED;
        sure.then_some((constant, n))
    }

    /// Where frame `k` begins; None where there is damage instead.
    fn frame(&self, bytes: &[u8], k: usize) -> Option<usize> {
        let mean = (k as u64 * self.first.bytes_by_rate() / u64::from(self.first.rate)) as usize;
        let is_one = |at: usize| {
            let same = |header: Header| header.same_stream(self.first) && header.bit_rate == self.first.bit_rate;
            let Some(header) = bytes.get(at..self.end).and_then(Header::parse).filter(|header| same(*header)) else {
                return false;
            };
            let rest = bytes.get(at + header.size..self.end);
            rest.is_some_and(|rest| rest.len() < 4 || Header::parse(rest).is_some_and(same))
        };
        let place = self.begin + mean;
        [place, place.wrapping_sub(1), place + 1, place.wrapping_sub(2), place + 2].into_iter().find(|&at| is_one(at))
    }
}

/// A number that differs, as good as surely, when another recording lies at the same address.
fn fingerprint(bytes: &[u8]) -> u64 {
    bytes.iter().take(256).fold(0xcbf2_9ce4_8422_2325, |hash, &b| (hash ^ u64::from(b)).wrapping_mul(0x100_0000_01b3))
}

fn key(bytes: &[u8]) -> (usize, usize, u64) {
    (bytes.as_ptr() as usize, bytes.len(), fingerprint(bytes))
}

impl Index {
    fn make(&mut self, bytes: &[u8]) -> Result<Header, Error> {
        self.key = None;
        let Some((mut at, first)) = first_frame(bytes) else {
            return corrupt("MP3", "there is no frame");
        };
        if bytes.len() > u32::MAX as usize {
            return Err(Error::Unsupported { format: "MP3", what: "a file of more than 4 GiB".into() });
        }
        let end = bytes.len() - tags_at_end(bytes);
        let tag = Tag::parse(&bytes[at..], first);
        let stated =
            tag.as_ref().and_then(|tag| tag.sure(first, [at, at + first.size].map(|at| end.saturating_sub(at))));
        if tag.is_some() {
            at += first.size;
        }
        self.first = Some(first);
        self.walked.clear();
        self.next = Some(at);
        let constant = Constant::of(bytes, at, end, stated.filter(|_| tag.as_ref().is_some_and(|tag| tag.constant)));
        (self.constant, self.n) = match (constant, stated) {
            (Some((constant, n)), _) => (Some(constant), n),
            (None, Some(n)) => {
                self.walked.reserve(n as usize); // as long as the bytes allow: `Tag::sure`
                (None, n as usize)
            }
            (None, None) => {
                self.walk(bytes, usize::MAX);
                (None, self.walked.len())
            }
        };
        let samples = first.samples() as u64;
        (self.begin, self.end) = (0, self.n as u64 * samples);
        if let Some(Tag { frames: Some(frames), trim: Some((delay, padding)), .. }) = tag {
            let stated = u64::from(frames) * samples + DECODER_DELAY;
            self.begin = (delay + DECODER_DELAY).min(self.end);
            self.end = self.end.min(stated.saturating_sub(padding)).max(self.begin);
        }
        self.key = Some(key(bytes));
        Ok(first)
    }

    /// Where frame `k` begins; None after the last one, and where there is damage instead.
    fn frame(&mut self, bytes: &[u8], k: usize) -> Option<usize> {
        match self.constant {
            Some(constant) => constant.frame(bytes, k),
            None => {
                self.walk(bytes, k);
                self.walked.get(k).map(|&at| at as usize)
            }
        }
    }

    /// Goes from frame to frame until frame `k` is known.
    fn walk(&mut self, bytes: &[u8], k: usize) {
        let Some(first) = self.first else { return };
        while self.walked.len() <= k {
            let Some(at) = self.next.take() else { return };
            let Some(header) = bytes.get(at..).and_then(Header::parse) else { return };
            // A frame that is cut off at the end is not decoded.
            if !header.same_stream(first) || at + header.size > bytes.len() {
                return;
            }
            self.walked.push(at as u32);
            let at = at + header.size;
            if Header::parse(&bytes[at..]).is_some_and(|next| next.same_stream(first)) {
                self.next = Some(at);
            } else if !is_tag(&bytes[at..]) {
                // Something else between the frames: go on at the next header that another one follows.
                self.next = resynchronise(&bytes[at..], first).map(|skip| at + skip);
            }
        }
    }
}

/// Bytes of the ID3v1 and APE tags at the end.
fn tags_at_end(bytes: &[u8]) -> usize {
    let mut end = bytes.len();
    loop {
        let ape = end.checked_sub(32).map(|at| &bytes[at..end]).filter(|footer| footer.starts_with(b"APETAGEX"));
        if let Some(footer) = ape {
            let u32_at = |at: usize| u32::from_le_bytes(footer[at..at + 4].try_into().expect("4 bytes"));
            // The size does not count the header.
            let size = u32_at(12) as usize + if u32_at(20) >> 31 == 1 { 32 } else { 0 };
            match end.checked_sub(size.max(32)) {
                Some(begin) => end = begin,
                None => return bytes.len() - end,
            }
        } else if end == bytes.len() && end.checked_sub(128).is_some_and(|at| bytes[at..].starts_with(b"TAG")) {
            end -= 128;
        } else {
            return bytes.len() - end;
        }
    }
}

/// Bytes to the next header of the stream `first` that another one follows.
fn resynchronise(bytes: &[u8], first: Header) -> Option<usize> {
    (0..bytes.len()).filter(|&at| bytes[at] == 0xff).find(|&at| {
        Header::parse(&bytes[at..]).is_some_and(|header| header.same_stream(first) && follows(bytes, at, header))
    })
}

/// What a first frame without audio says of the others.
#[derive(Default)]
struct Tag {
    frames: Option<u32>,
    /// Of all frames, with or without this one.
    bytes: Option<u32>,
    /// Delay and padding in samples.
    trim: Option<(u64, u64)>,
    /// Whether its own checksum, or its table of places, agrees with it.
    sound: bool,
    /// Whether it says that the bit rate is constant.
    constant: bool,
}

impl Tag {
    fn parse(bytes: &[u8], header: Header) -> Option<Self> {
        let frame = bytes.get(..header.size)?;
        let u32_at = |at: usize| Some(u32::from_be_bytes(*frame.get(at..)?.first_chunk()?));
        if frame.get(36..40) == Some(b"VBRI") {
            return Some(Self::vbri(frame).unwrap_or_default());
        }
        // A checksum, where there is one, does not move the tag.
        let mut at = header.before_data() - if header.crc { 2 } else { 0 };
        let constant = match frame.get(at..at + 4) {
            Some(b"Xing") => false,
            Some(b"Info") => true,
            _ => return None,
        };
        let flags = u32_at(at + 4)?;
        at += 8;
        let (mut frames, mut bytes) = (None, None);
        for (bit, size) in [(1, 4), (2, 4), (4, 100), (8, 4)] {
            if flags & bit != 0 {
                match bit {
                    1 => frames = u32_at(at),
                    2 => bytes = u32_at(at),
                    _ => {}
                }
                at += size;
            }
        }
        let trim = frame.get(at..at + 24).filter(|lame| lame[0] != 0).map(|lame| {
            let word = u64::from(u32::from_be_bytes([0, lame[21], lame[22], lame[23]]));
            (word >> 12, word & 0xfff)
        });
        // LAME's part ends with a checksum of all before it.
        let sum = frame.get(at + 34..at + 36).map(|sum| u16::from_be_bytes([sum[0], sum[1]]));
        let sound = sum.is_some_and(|sum| sum == crc16_reflected(&frame[..at + 34]));
        Some(Self { frames, bytes, trim, sound, constant })
    }

    /// Fraunhofer's tag: its table says how many bytes every few frames have.
    fn vbri(frame: &[u8]) -> Option<Self> {
        let u16_at = |at: usize| Some(u32::from(u16::from_be_bytes(*frame.get(at..)?.first_chunk()?)));
        let u32_at = |at: usize| Some(u32::from_be_bytes(*frame.get(at..)?.first_chunk()?));
        let (bytes, frames) = (u32_at(46)?, u32_at(50)?);
        let (entries, scale, width, each) = (u16_at(54)?, u16_at(56)?, u16_at(58)? as usize, u16_at(60)?);
        let table = frame.get(62..62 + entries as usize * width)?;
        let places = match width {
            1..=4 => table.chunks_exact(width).map(|x| x.iter().fold(0, |n, &b| n << 8 | u64::from(b))).sum(),
            _ => 0,
        };
        let rounded = u64::from(scale) * u64::from(entries);
        let sound = (places * u64::from(scale)).abs_diff(u64::from(bytes)) <= rounded + frame.len() as u64
            && (entries * each).abs_diff(frames) <= each;
        Some(Self { frames: Some(frames), bytes: Some(bytes), trim: None, sound, constant: false })
    }

    /// The number of frames, where there is reason to believe it: then nobody has to walk to the end. `bytes` is what
    /// there is, with and without the tag itself.
    fn sure(&self, header: Header, bytes: [usize; 2]) -> Option<u32> {
        let (frames, stated) = (self.frames?, self.bytes? as usize);
        let at = |bit_rate| u64::from(frames) * Header { bit_rate, ..header }.bytes_by_rate() / u64::from(header.rate);
        let possible = at(8_000) <= stated as u64 && stated as u64 <= at(320_000) + header.size as u64;
        (self.sound && possible && bytes.contains(&stated)).then_some(frames)
    }
}

/// The checksum of LAME's tag: x^16 + x^15 + x^2 + 1, least significant bit first.
fn crc16_reflected(data: &[u8]) -> u16 {
    data.iter().fold(0, |crc, &byte| {
        (0..8).fold(crc ^ u16::from(byte), |crc, _| crc >> 1 ^ if crc & 1 == 1 { 0xa001 } else { 0 })
    })
}

impl Mp3 {
    pub fn info(&mut self, bytes: &[u8]) -> Result<Info, Error> {
        let first = self.index.make(bytes)?;
        let frames = self.index.end - self.index.begin;
        Ok(Info { rate: first.rate, channels: u16::from(first.channels), frames })
    }

    pub fn read(&mut self, bytes: &[u8], start: u64, out: &mut [f32]) -> Result<(), Error> {
        if self.index.key != Some(key(bytes)) {
            self.index.make(bytes)?;
        }
        let Some(header) = self.index.first else { return corrupt("MP3", "there is no frame") };
        let per_frame = header.samples();
        let first = self.index.begin + start;
        let wanted = (first / per_frame as u64) as usize;
        let frames = self.index.n;
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
            reservoir += self.frame(bytes, begin).map_or(0, |(data, h)| data.len().saturating_sub(h.before_data()));
        }
        self.decoder.reset();
        let mut done = 0;
        let mut skip = (first % per_frame as u64) as usize;
        for frame in begin..frames {
            let found = self.frame(bytes, frame);
            // Damage in the place of a frame is silent, and so are the last frames of a recording that lost a few.
            if found.is_none() && self.index.constant.is_none() && frames > self.index.walked.len() * 101 / 100 + 1 {
                break;
            }
            let (data, header) = found.unwrap_or((&[], header));
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

    fn frame<'a>(&mut self, bytes: &'a [u8], frame: usize) -> Option<(&'a [u8], Header)> {
        let at = self.index.frame(bytes, frame)?;
        // Should the index be of other bytes that once stood here, this need not be a frame of the kind.
        let header =
            Header::parse(bytes.get(at..)?).filter(|h| Some(h.samples()) == self.index.first.map(Header::samples))?;
        Some((bytes.get(at..at + header.size)?, header))
    }
}

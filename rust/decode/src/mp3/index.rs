//! The places of the frames.
//!
//! At a constant bit rate the offset of every frame follows from its number; a few frames are checked (only the last
//! one, if the first frame's tag states a constant bit rate too). Otherwise the tag gives the number of frames, if it
//! can be trusted: its checksum (for VBRI: its table) and the size in bytes that it states must be right. Then frames
//! are walked only up to the crop. Without a constant bit rate or a tag, all are walked. Then the places of the frames
//! are kept for all threads: see `seek_table`.

use std::sync::Arc;

use super::super::{corrupt, Error, UNKNOWN_LENGTH};
use super::header::Header;
use super::seek_table::{self, SeekTable};
use super::tag::Tag;

/// Samples by which a decoder is late.
const DECODER_DELAY: u64 = 529;
/// Bytes of anything else that may precede the first frame.
const MAX_JUNK: usize = 1 << 16;

/// The start and the header of the first frame. Two other frames of the same stream follow it, or the end of the bytes.
pub fn first_frame(bytes: &[u8]) -> Option<(usize, Header)> {
    let within = &bytes[..bytes.len().min(MAX_JUNK)];
    (0..within.len()).filter(|&at| within[at] == 0xff).find_map(|at| {
        let header = Header::parse(&bytes[at..])?;
        let sure = follows(bytes, at, header)
            && Header::parse(&bytes[at + header.size..])
                .is_none_or(|next| follows(bytes, at + header.size, next));
        sure.then_some((at, header))
    })
}

/// Whether the frame at `at` is followed by one of the same stream, or by the end of the recording.
fn follows(bytes: &[u8], at: usize, header: Header) -> bool {
    let rest = &bytes[(at + header.size).min(bytes.len())..];
    match Header::parse(rest) {
        Some(next) => next.same_stream(header),
        None => at + header.size == bytes.len() || at + header.size < bytes.len() && is_tag(rest),
    }
}

/// Whether an ID3v1 or APE tag begins here. They lie at the end.
fn is_tag(bytes: &[u8]) -> bool {
    bytes.starts_with(b"TAG") || bytes.starts_with(b"APETAGEX")
}

/// The frames of one recording.
#[derive(Default)]
pub(super) struct Index {
    key: Option<(usize, usize, u64)>, // identifies the bytes that this is the index of
    pub first: Option<Header>,        // the header of the first frame
    pub n: usize,                     // frames that hold audio
    constant: Option<Constant>,
    /// Without a constant bit rate: the offsets of frames from number `base` on, as far as they were walked, and where
    /// to continue.
    walked: Vec<u32>,
    base: usize,
    next: Option<usize>,
    table: Option<Arc<SeekTable>>, // where to walk from; None until the recording was walked whole
    /// The frames before one of another sample rate, and that rate in Hz: files of two kinds were joined.
    pub changed: Option<(usize, u32)>,
    /// Whether there may be tags between the frames, since the first one's is not to be trusted: files were joined.
    skips_tags: bool,
    /// The length that the tag of a file states that was cut short, `UNKNOWN_LENGTH` if it has no tag, and else 0.
    pub stated: u64,
    pub begin: u64, // the recording without delay and padding, in decoded samples
    pub end: u64,
}

/// Frames of a constant bit rate: frame k begins within `SLACK` bytes of begin + k · mean size, however the encoder
/// distributed the padding.
#[derive(Clone, Copy)]
struct Constant {
    begin: usize,
    end: usize,
    first: Header,
}

/// Bytes by which a frame may be away from its expected offset.
const SLACK: usize = 2;
/// Frames whose offsets are checked before a constant bit rate is assumed: other bytes between frames, or another bit
/// rate anywhere, shift everything that follows, the last frame included.
const PROBES: usize = 8;
/// The number of these that may be damaged.
const MAX_DAMAGED: usize = 2;

impl Constant {
    /// The frames in [begin, end), and their number, if the bit rate is constant. `stated`: their number according to a
    /// tag that also states a constant bit rate. Then only the last frame is checked.
    fn detect(
        bytes: &[u8], begin: usize, end: usize, stated: Option<u32>,
    ) -> Option<(Self, usize)> {
        let first = bytes.get(begin..).and_then(Header::parse)?;
        let constant = Self { begin, end, first };
        let n = ((end + SLACK).checked_sub(begin)? as u64 * u64::from(first.rate)
            / first.bytes_by_rate()) as usize;
        // The last frame may lie a little further than its mean offset; then it is truncated and does not count.
        let n = (n.saturating_sub(1)..=n)
            .rev()
            .find(|&n| n > 0 && constant.frame(bytes, n - 1).is_some())?;
        let n_valid = || {
            (0..PROBES).filter(|i| constant.frame(bytes, i * (n - 1) / PROBES).is_some()).count()
        };
        let sure = stated.is_some_and(|stated| stated as usize == n)
            || n > PROBES && n_valid() >= PROBES - MAX_DAMAGED;
        sure.then_some((constant, n))
    }

    /// The start of frame `k`. None if it is damaged.
    fn frame(&self, bytes: &[u8], k: usize) -> Option<usize> {
        let mean = (k as u64 * self.first.bytes_by_rate() / u64::from(self.first.rate)) as usize;
        let begins = |at: usize| {
            let same = |header: Header| {
                header.same_stream(self.first) && header.bit_rate == self.first.bit_rate
            };
            let Some(header) =
                bytes.get(at..self.end).and_then(Header::parse).filter(|header| same(*header))
            else {
                return false;
            };
            let rest = bytes.get(at + header.size..self.end);
            rest.is_some_and(|rest| rest.len() < 4 || Header::parse(rest).is_some_and(same))
        };
        let expected = self.begin + mean;
        let nearest = [
            expected,
            expected.wrapping_sub(1),
            expected + 1,
            expected.wrapping_sub(2),
            expected + 2,
        ];
        nearest.into_iter().find(|&at| begins(at))
    }
}

/// Bytes at the end in which frames are looked for that follow each other, and how many are sure to be frames.
const TAIL: usize = 8192;
const SURE: usize = 2;

/// Frames to walk, about a minute, beyond which the recording is walked whole and its seek table kept.
const FAR: usize = 2048;

/// A hash of the beginning, which almost certainly differs when another recording lies at the same address.
fn fingerprint(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .take(256)
        .fold(0xcbf2_9ce4_8422_2325, |hash, &b| (hash ^ u64::from(b)).wrapping_mul(0x100_0000_01b3))
}

/// Identifies the bytes that were read last.
pub(in super::super) fn key(bytes: &[u8]) -> (usize, usize, u64) {
    (bytes.as_ptr() as usize, bytes.len(), fingerprint(bytes))
}

impl Index {
    /// Whether this is the index of `bytes`.
    pub fn is_of(&self, bytes: &[u8]) -> bool {
        self.key == Some(key(bytes))
    }

    /// Whether clearly fewer frames were found than the tag stated. A missing frame is then past the end, not damaged.
    pub fn lacks_frames(&self) -> bool {
        let found = self.table.as_ref().map_or(self.base + self.walked.len(), |table| table.n);
        self.constant.is_none() && self.n > found * 101 / 100 + 1
    }

    /// Indexes `bytes`, and returns the header of the first frame.
    pub fn build(&mut self, bytes: &[u8]) -> Result<Header, Error> {
        self.key = None;
        let Some((mut at, first)) = first_frame(bytes) else {
            return corrupt("MP3", "there is no frame");
        };
        if bytes.len() > u32::MAX as usize {
            return Err(Error::Unsupported {
                format: "MP3",
                what: "a file of more than 4 GiB".into(),
            });
        }
        let end = bytes.len() - tags_at_end(bytes);
        let tag = Tag::parse(&bytes[at..], first);
        let stated = tag.as_ref().and_then(|tag| {
            tag.trusted_frames(first, [at, at + first.size].map(|at| end.saturating_sub(at)))
        });
        if tag.is_some() {
            at += first.size;
        }
        self.first = Some(first);
        self.walked.clear();
        (self.base, self.table, self.changed) = (0, None, None);
        self.next = Some(at);
        self.skips_tags = tag.is_some() && stated.is_none();
        let constant = Constant::detect(
            bytes,
            at,
            end,
            stated.filter(|_| tag.as_ref().is_some_and(|tag| tag.constant)),
        );
        // Of joined files the tag of the first one states its own part alone, and the others have tags between the
        // frames.
        let joined = |n: usize| {
            tag.as_ref().and_then(|tag| tag.frames).is_some_and(|frames| n > frames as usize + 1)
        };
        let constant = constant.filter(|&(_, n)| !joined(n));
        if constant.is_none() {
            self.table = seek_table::find(bytes);
        }
        (self.constant, self.n) = match (constant, stated) {
            (Some((constant, n)), _) => (Some(constant), n),
            (None, Some(n)) => {
                self.walked.reserve(n as usize); // `Tag::trusted_frames` checked that the bytes can hold so many
                (None, n as usize)
            }
            (None, None) => {
                self.walk_all(bytes);
                (None, self.table.as_ref().map_or(self.walked.len(), |table| table.n))
            }
        };
        let samples = first.samples() as u64;
        let frames = tag.as_ref().and_then(|tag| tag.frames).map_or(0, |frames| frames as usize);
        let cut = stated.is_none() && is_cut(bytes, end, first);
        self.stated = match frames > self.n * 101 / 100 + 1 || cut && frames > self.n {
            true => frames as u64 * samples,
            false if cut => UNKNOWN_LENGTH,
            false => 0,
        };
        (self.begin, self.end) = (0, self.n as u64 * samples);
        if let Some(&Tag { frames: Some(frames), trim: Some((delay, padding)), .. }) = tag.as_ref()
        {
            let stated = u64::from(frames) * samples + DECODER_DELAY;
            self.begin = (delay + DECODER_DELAY).min(self.end);
            if (1..UNKNOWN_LENGTH).contains(&self.stated) {
                self.stated =
                    self.stated.min(stated.saturating_sub(padding)).saturating_sub(self.begin);
            }
            if !joined(self.n) {
                self.end = self.end.min(stated.saturating_sub(padding)).max(self.begin);
            }
        }
        self.key = Some(key(bytes));
        Ok(first)
    }

    /// The start of frame `k`. None after the last one, and if it is damaged.
    pub fn frame(&mut self, bytes: &[u8], k: usize) -> Option<usize> {
        match self.constant {
            Some(constant) => constant.frame(bytes, k),
            None => {
                if k.saturating_sub(self.base + self.walked.len()) > FAR {
                    self.walk_all(bytes);
                }
                if let Some(table) = &self.table {
                    let (number, at) = table.before(k)?;
                    if k < self.base || number > self.base + self.walked.len() {
                        self.walked.clear();
                        (self.base, self.next) = (number, Some(at));
                    }
                }
                self.walk(bytes, k);
                self.walked.get(k.checked_sub(self.base)?).map(|&at| at as usize)
            }
        }
    }

    /// Walks all frames, unless that was done before, and keeps a long recording's seek table.
    fn walk_all(&mut self, bytes: &[u8]) {
        if self.table.is_some() {
            return;
        }
        self.walk(bytes, usize::MAX);
        if self.walked.len() > FAR && self.changed.is_none() {
            self.table = Some(seek_table::keep(bytes, &self.walked));
        }
    }

    /// Walks from frame to frame until frame `k` is known.
    fn walk(&mut self, bytes: &[u8], k: usize) {
        let Some(first) = self.first else { return };
        while self.base + self.walked.len() <= k {
            let Some(at) = self.next.take() else { return };
            let Some(header) = bytes.get(at..).and_then(Header::parse) else { return };
            // A frame that is truncated at the end is not decoded.
            if !header.same_stream(first) || at + header.size > bytes.len() {
                return;
            }
            if !self.skips_tags || Tag::parse(&bytes[at..], header).is_none() {
                self.walked.push(at as u32);
            }
            let at = at + header.size;
            if Header::parse(&bytes[at..]).is_some_and(|next| next.same_stream(first)) {
                self.next = Some(at);
            } else if !is_tag(&bytes[at..]) {
                // Other bytes between the frames: continue at the next header that another one follows.
                let found =
                    resynchronise(&bytes[at..], first).map(|(skip, header)| (at + skip, header));
                self.next = found.filter(|(_, header)| header.same_stream(first)).map(|(at, _)| at);
                if self.next.is_none() {
                    self.changed =
                        found.map(|(_, header)| (self.base + self.walked.len(), header.rate));
                }
            }
        }
    }
}

/// Whether the last frame, which follows others of the same stream, goes on beyond `end`.
fn is_cut(bytes: &[u8], end: usize, first: Header) -> bool {
    let frames = |mut at: usize| {
        std::iter::from_fn(move || {
            let header = bytes
                .get(at..end)
                .and_then(Header::parse)
                .filter(|header| header.same_stream(first))?;
            at += header.size;
            Some(at)
        })
    };
    (end.saturating_sub(TAIL)..end)
        .filter(|&at| bytes[at] == 0xff)
        .any(|at| frames(at).skip(SURE).any(|at| at > end))
}

/// Bytes of the ID3v1 and APE tags at the end.
fn tags_at_end(bytes: &[u8]) -> usize {
    let mut end = bytes.len();
    loop {
        let ape = end
            .checked_sub(32)
            .map(|at| &bytes[at..end])
            .filter(|footer| footer.starts_with(b"APETAGEX"));
        if let Some(footer) = ape {
            let u32_at =
                |at: usize| u32::from_le_bytes(footer[at..at + 4].try_into().expect("4 bytes"));
            // The size does not include the header.
            let size = u32_at(12) as usize + if u32_at(20) >> 31 == 1 { 32 } else { 0 };
            match end.checked_sub(size.max(32)) {
                Some(begin) => end = begin,
                None => return bytes.len() - end,
            }
        } else if end == bytes.len()
            && end.checked_sub(128).is_some_and(|at| bytes[at..].starts_with(b"TAG"))
        {
            end -= 128;
        } else {
            return bytes.len() - end;
        }
    }
}

/// The next frame of the same stream as `first` that another one follows, or of another stream that two follow.
fn resynchronise(bytes: &[u8], first: Header) -> Option<(usize, Header)> {
    (0..bytes.len()).filter(|&at| bytes[at] == 0xff).find_map(|at| {
        let header = Header::parse(&bytes[at..])?;
        let next = at + header.size;
        let sure = header.same_stream(first)
            || next < bytes.len()
                && Header::parse(&bytes[next..]).is_some_and(|second| follows(bytes, next, second));
        (sure && follows(bytes, at, header)).then_some((at, header))
    })
}

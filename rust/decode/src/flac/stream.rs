//! The container: metadata, frame headers, and the way to the frame of a sample.

use super::super::bits::{crc16, crc8};
use super::super::flac_write::Origin;
use super::super::{corrupt, Error};

/// Bytes before the place where a frame is expected: the headers of later frames are longer by some bytes.
const MARGIN: usize = 64;
/// The header of a subframe that holds its samples as they are.
const PLAIN: u8 = 1 << 1;

pub(super) struct Stream<'a> {
    pub frames: &'a [u8], // from the first frame to the end of the file
    max_block: u32,
    pub rate: u32,
    pub channels: u8,
    pub bits: u32,
    pub total: u64, // samples in the whole stream; 0 when the encoder did not know
    pub origin: Option<Origin>,
}

#[derive(Clone, Copy, PartialEq)]
pub(super) enum Stereo {
    Independent,
    LeftSide,
    SideRight,
    MidSide,
}

#[derive(Clone, Copy)]
pub(super) struct Header {
    pub size: usize,   // bytes of the header itself
    pub position: u64, // first sample
    pub block: u32,    // samples in this frame
    pub stereo: Stereo,
}

pub(super) fn parse(bytes: &[u8]) -> Result<Stream<'_>, Error> {
    let (mut stream, mut origin) = (None, None);
    let mut at = 4;
    loop {
        let Some(&[kind, a, b, c]) = bytes.get(at..).and_then(|rest| rest.first_chunk::<4>())
        else {
            return corrupt("FLAC", "the metadata are cut off");
        };
        let size = u32::from_be_bytes([0, a, b, c]) as usize;
        at += 4;
        if kind & 0x7f == 0 {
            let Some(block) = bytes.get(at..at + 34) else {
                return corrupt("FLAC", "the stream information is cut off");
            };
            let word = u64::from_be_bytes(block[10..18].try_into().expect("8 bytes"));
            stream = Some(Stream {
                frames: &[],
                max_block: u32::from(u16::from_be_bytes([block[2], block[3]])),
                rate: (word >> 44) as u32,
                channels: (word >> 41 & 7) as u8 + 1,
                bits: (word >> 36 & 31) as u32 + 1,
                total: word & ((1 << 36) - 1),
                origin: None,
            });
        }
        if let (2, Some(block)) = (kind & 0x7f, bytes.get(at..at + size)) {
            origin = origin.or(Origin::read(block));
        }
        at += size;
        if kind & 0x80 != 0 {
            break;
        }
    }
    let Some(mut stream) = stream else { return corrupt("FLAC", "there is no stream information") };
    stream.frames = bytes.get(at..).unwrap_or(&[]);
    stream.origin = origin;
    refuse!(
        stream.max_block < 16 || stream.rate == 0,
        corrupt("FLAC", "the stream information is not valid")
    );
    Ok(stream)
}

impl Stream<'_> {
    /// The frame header at `at`, if there is one.
    pub(super) fn header(&self, at: usize) -> Option<Header> {
        let b = self.frames.get(at..)?;
        let &[0xff, sync, sizes, form, first, ..] = b else { return None };
        refuse!(sync & 0xfe != 0xf8 || form & 1 != 0, None);
        // A number of up to 36 bits in the coding of UTF-8.
        let more = match first.leading_ones() {
            0 => 0,
            n @ 2..=7 => n as usize - 1,
            _ => return None,
        };
        let mut number = u64::from(first) & (0x7f >> more.min(7)) >> usize::from(more > 0);
        for byte in b.get(5..5 + more)? {
            refuse!(byte & 0xc0 != 0x80, None);
            number = number << 6 | u64::from(byte & 0x3f);
        }
        let mut size = 5 + more;
        let mut bytes = |n: usize| {
            size += n;
            Some(
                b.get(size - n..size)?
                    .iter()
                    .fold(0, |number, &byte| number << 8 | u32::from(byte)),
            )
        };
        let block = match sizes >> 4 {
            0 => return None,
            1 => 192,
            code @ 2..=5 => 144 << code,
            code @ 6..=7 => bytes(usize::from(code) - 5)? + 1,
            code => 1 << code,
        };
        let rate = match sizes & 15 {
            0 => self.rate,
            code @ 1..=11 => {
                [88200, 176400, 192000, 8000, 16000, 22050, 24000, 32000, 44100, 48000, 96000]
                    [code as usize - 1]
            }
            12 => bytes(1)? * 1000,
            13 => bytes(2)?,
            14 => bytes(2)? * 10,
            _ => return None,
        };
        let (stereo, channels) = match form >> 4 {
            n @ 0..=7 => (Stereo::Independent, n + 1),
            8 => (Stereo::LeftSide, 2),
            9 => (Stereo::SideRight, 2),
            10 => (Stereo::MidSide, 2),
            _ => return None,
        };
        let bits = match form >> 1 & 7 {
            0 => self.bits,
            code @ (1 | 2 | 4 | 5 | 6 | 7) => [8, 12, 0, 16, 20, 24, 32][code as usize - 1],
            _ => return None,
        };
        let same = (rate, channels, bits) == (self.rate, self.channels, self.bits)
            && block <= self.max_block;
        refuse!(!same || crc8(b.get(..size)?) != *b.get(size)?, None);
        let position = if sync & 1 == 1 { number } else { number * u64::from(self.max_block) };
        Some(Header { size: size + 1, position, block, stereo })
    }

    /// The first frame header in [from, to).
    fn next(&self, mut from: usize, to: usize) -> Option<(usize, Header)> {
        while from < to {
            from += self.frames[from..to].iter().position(|&b| b == 0xff)?;
            if let Some(header) = self.header(from) {
                return Some((from, header));
            }
            from += 1;
        }
        None
    }

    /// The last frame header before `to`.
    pub(super) fn previous(&self, mut to: usize) -> Option<(usize, Header)> {
        loop {
            to = self.frames[..to].iter().rposition(|&b| b == 0xff)?;
            if let Some(header) = self.header(to) {
                return Some((to, header));
            }
        }
    }

    /// Whether another FLAC file follows in the same bytes, whose last frame ends with `end`. They are searched only if
    /// the length, the rest or the order of a few frames speaks for it.
    pub(super) fn is_joined(&self, bytes: &[u8], end: u64) -> bool {
        let largest = self.max_block as usize * usize::from(self.channels) * 5;
        let at = self.previous(self.frames.len()).map_or(0, |(at, _)| at);
        let mut before = 0;
        let mut fine = (end == self.total || self.total == 0) && self.frames.len() - at <= largest;
        // Places that are no multiples of each other, since files of one size may follow each other.
        for share in [23, 41, 59, 83] {
            let place = self.frames.len() / 100 * share;
            let position = self
                .next(place, (place + largest).min(at))
                .map_or(before, |(_, header)| header.position);
            fine &= std::mem::replace(&mut before, position) <= position;
        }
        !fine
            && bytes[4..]
                .windows(8)
                .any(|at| at[..4] == *b"fLaC" && at[4] & 0x7f == 0 && at[5..] == [0, 0, 34])
    }

    /// The probable start of the frame that holds sample `target`.
    pub(super) fn seek(&self, target: u64) -> usize {
        // The frame at `low` begins at or before `target`; every frame in [high, ..) begins after it.
        let (mut low, mut high) = (0, self.frames.len());
        // First the frame whose first sample divides the bytes as it divides the samples: of frames of one size, the
        // right one.
        let first = u128::from(target - target % u64::from(self.max_block)) * high as u128;
        let first = first.checked_div(self.total.into()).map_or(high / 2, |at| at as usize);
        let mut middle = first.saturating_sub(MARGIN).min(high.saturating_sub(1));
        while high - low > 1 {
            match self.next(middle, high) {
                Some((at, header)) if header.position <= target => {
                    low = at;
                    if target - header.position < u64::from(header.block) {
                        break;
                    }
                }
                _ => high = middle,
            }
            middle = low + (high - low) / 2;
        }
        low
    }

    /// The samples of the frame at `at`, big-endian, and its size, if it holds one channel of 16 bits as it is.
    /// Errors: A checksum that does not match.
    pub(super) fn plain(
        &self, at: usize, header: &Header,
    ) -> Option<Result<(&[u8], usize), Error>> {
        let begin = header.size + 1;
        let end = begin + 2 * header.block as usize;
        let frame = self.frames.get(at..)?.get(..end + 2)?;
        if (self.channels, self.bits, frame[header.size]) != (1, 16, PLAIN) {
            return None;
        }
        Some(match crc16(&frame[..end]).to_be_bytes() == frame[end..] {
            true => Ok((&frame[begin..end], end + 2)),
            false => corrupt("FLAC", "a frame's checksum does not match"),
        })
    }
}

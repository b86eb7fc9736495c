//! The tag in the first frame (Xing, Info or VBRI): the number of frames, the encoder's delay and padding.

use super::header::Header;
use crate::bits;

/// The statements of a first frame without audio about the others.
#[derive(Default)]
pub(super) struct Tag {
    pub frames: Option<u32>,
    bytes: Option<u32>, // of all frames, this one included or not: encoders differ
    pub trim: Option<(u64, u64)>, // the encoder's delay and padding in samples
    consistent: bool, // whether its checksum, or its table of offsets, agrees with its other values
    pub constant: bool, // whether it states a constant bit rate
}

impl Tag {
    /// The tag in the first frame, whose header is `header`.
    pub fn parse(bytes: &[u8], header: Header) -> Option<Self> {
        let frame = bytes.get(..header.size)?;
        let u32_at = |at: usize| bits::u32_at(frame, at);
        if frame.get(36..40) == Some(b"VBRI") {
            return Some(Self::vbri(frame).unwrap_or_default());
        }
        // The frame's own checksum, if there is one, does not move the tag.
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
        // LAME's part ends with a checksum of everything before it.
        let sum = frame.get(at + 34..at + 36).map(|sum| u16::from_be_bytes([sum[0], sum[1]]));
        let consistent = sum.is_some_and(|sum| sum == crc16_reflected(&frame[..at + 34]));
        Some(Self { frames, bytes, trim, consistent, constant })
    }

    /// Fraunhofer's tag: its table gives the size of every few frames.
    fn vbri(frame: &[u8]) -> Option<Self> {
        let u16_at = |at: usize| bits::u16_at(frame, at).map(u32::from);
        let u32_at = |at: usize| bits::u32_at(frame, at);
        let (bytes, frames) = (u32_at(46)?, u32_at(50)?);
        let (entries, scale, width, each) =
            (u16_at(54)?, u16_at(56)?, u16_at(58)? as usize, u16_at(60)?);
        let table = frame.get(62..62 + entries as usize * width)?;
        let total = match width {
            1..=4 => table
                .chunks_exact(width)
                .map(|x| x.iter().fold(0, |n, &b| n << 8 | u64::from(b)))
                .sum(),
            _ => 0,
        };
        let rounded = u64::from(scale) * u64::from(entries);
        let consistent = (total * u64::from(scale)).abs_diff(u64::from(bytes))
            <= rounded + frame.len() as u64
            && (entries * each).abs_diff(frames) <= each;
        Some(Self {
            frames: Some(frames),
            bytes: Some(bytes),
            trim: None,
            consistent,
            constant: false,
        })
    }

    /// The number of frames, if it can be trusted, so that the frames need not be walked to the end. `bytes`: the
    /// actual size of the recording, with and without the frame of the tag.
    pub fn trusted_frames(&self, header: Header, bytes: [usize; 2]) -> Option<u32> {
        let (frames, stated) = (self.frames?, self.bytes? as usize);
        let at = |bit_rate| {
            u64::from(frames) * Header { bit_rate, ..header }.bytes_by_rate()
                / u64::from(header.rate)
        };
        let possible =
            at(8_000) <= stated as u64 && stated as u64 <= at(320_000) + header.size as u64;
        (self.consistent && possible && bytes.contains(&stated)).then_some(frames)
    }
}

/// The checksum of LAME's tag: x^16 + x^15 + x^2 + 1, least significant bit first.
fn crc16_reflected(data: &[u8]) -> u16 {
    data.iter().fold(0, |crc, &byte| {
        (0..8)
            .fold(crc ^ u16::from(byte), |crc, _| crc >> 1 ^ if crc & 1 == 1 { 0xa001 } else { 0 })
    })
}

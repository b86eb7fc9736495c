//! FLAC, container and codec (RFC 9639).
//!
//! A frame is found by bisection over the bytes: frame headers carry their position and a checksum. The result is
//! accepted only if the whole frame's checksum matches and the frames follow each other without a gap. If not, the
//! frames are walked from the first one on.

mod stream;
mod subframe;

use super::bits::{crc16, Msb};
use super::flac_write::Origin;
use super::{corrupt, Error, Info};
use stream::{parse, Stereo, Stream};
use subframe::{subframe, subframe_any};

/// Frame headers that are tried, from the end backwards, before a recording counts as damaged.
const LAST_FRAMES: usize = 8;
const CUT: &str = "a frame is cut off";

/// The samples of a frame.
enum Frame<'a> {
    Decoded(Stereo),
    Plain(&'a [u8]), // of one channel, 16 bits, big-endian
}

/// The decoder's memory: the samples of one frame.
#[derive(Default)]
pub(super) struct Flac {
    pub origin: Option<Origin>, // of the recording that `info` was last called for
    channels: [Vec<i32>; 8],
    wide: Vec<i64>, // the difference of two 32-bit channels has 33 bits
}

impl Flac {
    pub fn info(&mut self, bytes: &[u8]) -> Result<Info, Error> {
        let stream = parse(bytes)?;
        self.origin = stream.origin;
        // The last frame shows where a recording really ends: it may be truncated, or its length not stated.
        let mut before = stream.frames.len();
        for _ in 0..LAST_FRAMES {
            let Some((at, header)) = stream.previous(before) else {
                return Err(Error::NoAudio { format: "FLAC" });
            };
            let frames = header.position + u64::from(header.block);
            let found = self.frame(&stream, at);
            // A last frame that is present, and damaged, is an error of the crops that need it.
            if found.is_ok() || frames == stream.total && found != corrupt("FLAC", CUT) {
                let channels = u16::from(stream.channels);
                return Ok(Info { rate: stream.rate, channels, frames, stated: stream.total });
            }
            before = at;
        }
        corrupt("FLAC", "no frame near the end can be decoded")
    }

    /// Decodes samples from `start` on: one channel, or the mean.
    pub fn read(
        &mut self, bytes: &[u8], start: u64, channel: Option<u16>, out: &mut [f32],
    ) -> Result<(), Error> {
        let stream = &parse(bytes)?;
        let gain = last_bit(stream) as f32; // once: powi of each sample takes longer than all else
        self.each(stream, start, out.len(), |flac, frame, from, done, n| match frame {
            Frame::Plain(samples) => {
                plain(samples, from, out[done..done + n].iter_mut(), |x| f32::from(x) * gain)
            }
            Frame::Decoded(stereo) => {
                flac.mix(stream, stereo, channel, from, &mut out[done..done + n])
            }
        })
    }

    /// The same of a recording with one channel of 16 bits, as it is. False for any other.
    pub fn read_16(&mut self, bytes: &[u8], start: u64, out: &mut [i16]) -> Result<bool, Error> {
        let stream = parse(bytes)?;
        if (stream.channels, stream.bits) != (1, 16) {
            return Ok(false);
        }
        self.each(&stream, start, out.len(), |flac, frame, from, done, n| {
            let out = out[done..done + n].iter_mut();
            match frame {
                Frame::Plain(samples) => plain(samples, from, out, |x| x),
                Frame::Decoded(_) => {
                    out.zip(&flac.channels[0][from..]).for_each(|(y, x)| *y = *x as i16)
                }
            }
        })?;
        Ok(true)
    }

    /// Whether the bytes are one FLAC file.
    pub fn check(bytes: &[u8], info: &Info) -> Result<(), Error> {
        match parse(bytes)?.is_joined(bytes, info.frames) {
            true => Err(Error::Joined { format: "FLAC" }),
            false => Ok(()),
        }
    }

    /// Decodes the frames that hold samples \[start, start + length). `take` is given each frame, its first sample that
    /// counts, the number of samples before it, and the number that it has.
    fn each(
        &mut self, stream: &Stream, start: u64, length: usize,
        mut take: impl FnMut(&Self, Frame, usize, usize, usize),
    ) -> Result<(), Error> {
        let at = stream.seek(start);
        match self.walk(stream, at, start, length, &mut take) {
            Err(_) if at > 0 => self.walk(stream, 0, start, length, &mut take),
            result => result,
        }
    }

    /// The same from the frame at `at` on.
    fn walk(
        &mut self, stream: &Stream, mut at: usize, start: u64, length: usize,
        take: &mut impl FnMut(&Self, Frame, usize, usize, usize),
    ) -> Result<(), Error> {
        let Some(first) = stream.header(at) else {
            return corrupt("FLAC", "a frame header is missing");
        };
        let mut position = if at == 0 { 0 } else { first.position };
        refuse!(position > start, corrupt("FLAC", "a frame is missing"));
        let mut done = 0;
        while done < length {
            let Some(header) = stream.header(at) else {
                return corrupt("FLAC", "a frame header is missing");
            };
            refuse!(header.position != position, corrupt("FLAC", "a frame is missing"));
            let (frame, size) = match stream.plain(at, &header) {
                Some(found) => found.map(|(samples, size)| (Frame::Plain(samples), size))?,
                None => (Frame::Decoded(header.stereo), self.frame(stream, at)?),
            };
            at += size;
            let end = position + u64::from(header.block);
            if end > start {
                let from = (start + done as u64 - position) as usize;
                let n = (header.block as usize - from).min(length - done);
                take(self, frame, from, done, n);
                done += n;
            }
            position = end;
        }
        Ok(())
    }

    /// One channel of the current frame from sample `from` on, or the mean. That needs no decorrelation: with
    /// side = left - right and mid = (left + right) >> 1, whose lost bit is side's last.
    fn mix(
        &self, stream: &Stream, stereo: Stereo, channel: Option<u16>, from: usize, out: &mut [f32],
    ) {
        let channels = &self.channels[..usize::from(stream.channels)];
        let samples = |channel: usize| &self.channels[channel][from..];
        let summed = if channel.is_some() { 1 } else { channels.len() };
        let gain = last_bit(stream) / summed as f64;
        // Sums of at most 24 bits are exact in float32, and scaling by a power of two rounds nothing: as precise as
        // float64.
        let exact = stream.bits <= 23 && channel.is_none();
        let side_is_wide = stream.bits == 32 && stereo != Stereo::Independent;
        match (stereo, channels.len()) {
            (Stereo::Independent, 1) if exact => {
                for (y, x) in out.iter_mut().zip(samples(0)) {
                    *y = *x as f32 * gain as f32;
                }
            }
            (Stereo::Independent, 1) => {
                for (y, &x) in out.iter_mut().zip(samples(0)) {
                    *y = (f64::from(x) * gain) as f32;
                }
            }
            (_, 2) if exact => {
                let pairs = out.iter_mut().zip(samples(0)).zip(samples(1));
                // Only damaged frames hold more bits than they state.
                match stereo {
                    Stereo::Independent => {
                        pairs.for_each(|((y, a), b)| *y = a.wrapping_add(*b) as f32 * gain as f32)
                    }
                    Stereo::LeftSide => {
                        pairs.for_each(|((y, a), b)| {
                            *y = a.wrapping_mul(2).wrapping_sub(*b) as f32 * gain as f32
                        });
                    }
                    Stereo::SideRight => {
                        pairs.for_each(|((y, a), b)| {
                            *y = b.wrapping_mul(2).wrapping_add(*a) as f32 * gain as f32
                        });
                    }
                    Stereo::MidSide => {
                        pairs.for_each(|((y, a), b)| {
                            *y = a.wrapping_mul(2).wrapping_add(b & 1) as f32 * gain as f32
                        });
                    }
                }
            }
            _ => {
                let sample = |channel: usize, i: usize| i64::from(self.channels[channel][from + i]);
                let side = |channel: usize, i: usize| {
                    if side_is_wide {
                        self.wide[from + i]
                    } else {
                        sample(channel, i)
                    }
                };
                for (i, y) in out.iter_mut().enumerate() {
                    let value = match (stereo, channel) {
                        (Stereo::Independent, None) => {
                            channels.iter().map(|c| i64::from(c[from + i])).sum()
                        }
                        (Stereo::LeftSide, None) => 2 * sample(0, i) - side(1, i),
                        (Stereo::SideRight, None) => 2 * sample(1, i) + side(0, i),
                        (Stereo::MidSide, None) => 2 * sample(0, i) + (side(1, i) & 1),
                        (Stereo::LeftSide, Some(1)) => sample(0, i) - side(1, i),
                        (Stereo::SideRight, Some(0)) => sample(1, i) + side(0, i),
                        (Stereo::MidSide, Some(channel)) => {
                            let (twice, side) = (2 * sample(0, i) + (side(1, i) & 1), side(1, i));
                            (if channel == 0 { twice + side } else { twice - side }) >> 1
                        }
                        (_, Some(channel)) => sample(usize::from(channel), i),
                    };
                    *y = (value as f64 * gain) as f32;
                }
            }
        }
    }

    /// Decodes the frame at `at` into `channels`, and returns its size in bytes.
    fn frame(&mut self, stream: &Stream, at: usize) -> Result<usize, Error> {
        let Some(header) = stream.header(at) else {
            return corrupt("FLAC", "a frame header is missing");
        };
        let frame = &stream.frames[at..];
        let n = header.block as usize;
        let mut bits = Msb::new(&frame[header.size..]);
        for channel in 0..usize::from(stream.channels) {
            let side = match header.stereo {
                Stereo::Independent => false,
                Stereo::SideRight => channel == 0,
                Stereo::LeftSide | Stereo::MidSide => channel == 1,
            };
            let done = if side && stream.bits == 32 {
                self.wide.resize(n.max(self.wide.len()), 0);
                subframe_any(&mut bits, 33, &mut self.wide[..n])
            } else {
                let samples = &mut self.channels[channel];
                samples.resize(n.max(samples.len()), 0);
                subframe(&mut bits, stream.bits + u32::from(side), &mut samples[..n])
            };
            refuse!(bits.overrun(), corrupt("FLAC", CUT));
            refuse!(done.is_none(), corrupt("FLAC", "a frame cannot be decoded"));
        }
        let size = header.size + bits.bytes();
        match frame.get(size..size + 2) {
            Some(check) if crc16(&frame[..size]).to_be_bytes() == check => Ok(size + 2),
            None => corrupt("FLAC", CUT),
            _ => corrupt("FLAC", "a frame's checksum does not match"),
        }
    }
}

/// The value of the last bit of a sample.
fn last_bit(stream: &Stream) -> f64 {
    0.5f64.powi(stream.bits as i32 - 1)
}

/// Big-endian samples of 16 bits from number `from` on.
#[inline(always)]
fn plain<'a, T: 'a>(
    samples: &[u8], from: usize, out: impl Iterator<Item = &'a mut T>, value: impl Fn(i16) -> T,
) {
    for (y, x) in out.zip(samples[2 * from..].chunks_exact(2)) {
        *y = value(i16::from_be_bytes([x[0], x[1]]));
    }
}

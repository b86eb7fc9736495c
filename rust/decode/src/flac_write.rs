//! Prepared recordings: FLAC (RFC 9639) of one channel and 16 bits, whose blocks can be decoded without counting zeros.
//!
//! A block of `BLOCK` samples is a frame with its own checksum. A raw one holds its samples as they are. A packed one
//! holds the differences from a fixed predictor of order 1 or 2, `PART` at a time in as many bits as the largest of
//! them takes (FLAC's escape code). If the samples as they are take fewer bytes, it is a raw one. Any player of FLAC
//! plays either.
//!
//! The recording that it was prepared from is in a block of metadata of type APPLICATION: `ID`, its stated rate and its
//! real rate (u32), its samples (u64), big-endian.

use std::io::{self, Write};

use super::bits::{crc16, crc8};

/// Samples of a block of a prepared recording.
pub const BLOCK: usize = 4096; // 1 << 12, as the code of frame headers has it
const PART: usize = 64;
const ID: &[u8; 4] = b"jxtr";

/// The recording that a prepared one was made from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    pub stated: u32, // Hz, by its headers
    pub rate: u32,   // Hz, which differs for a recording that is slower than life
    pub frames: u64, // samples at that rate
}

impl Origin {
    /// The origin in a block of metadata. None for a block of another application.
    pub(super) fn read(block: &[u8]) -> Option<Self> {
        let values: &[u8; 16] = block.strip_prefix(ID)?.try_into().ok()?;
        let word = |at: usize| u32::from_be_bytes(values[at..at + 4].try_into().expect("4 bytes"));
        let frames = u64::from(word(8)) << 32 | u64::from(word(12));
        Some(Self { stated: word(0), rate: word(4), frames })
    }
}

/// Writes one recording, block after block.
pub struct Writer<W> {
    out: W,
    packed: bool,
    number: u32,
    samples: Vec<i16>, // of a block that is not full
    frame: Vec<u8>,
}

impl<W: Write> Writer<W> {
    /// A recording of `frames` samples at `rate` Hz.
    /// Errors: Those of `out`.
    pub fn new(
        mut out: W, rate: u32, frames: u64, origin: Origin, packed: bool,
    ) -> io::Result<Self> {
        let mut head = b"fLaC\0\0\0\x22".to_vec();
        head.extend([(BLOCK as u16).to_be_bytes(); 2].concat());
        head.extend([0; 6]); // the sizes of frames are not stated
        head.extend((u64::from(rate) << 44 | 15 << 36 | frames & ((1 << 36) - 1)).to_be_bytes());
        head.extend([0; 16]); // nor a digest of all samples
        head.extend([0x82, 0, 0, 20]);
        head.extend(ID);
        head.extend(origin.stated.to_be_bytes());
        head.extend(origin.rate.to_be_bytes());
        head.extend(origin.frames.to_be_bytes());
        out.write_all(&head)?;
        Ok(Self { out, packed, number: 0, samples: Vec::with_capacity(BLOCK), frame: Vec::new() })
    }

    /// Appends samples.
    /// Errors: Those of `out`.
    pub fn write(&mut self, mut samples: &[i16]) -> io::Result<()> {
        while !samples.is_empty() {
            let (some, rest) = samples.split_at(samples.len().min(BLOCK - self.samples.len()));
            self.samples.extend(some);
            samples = rest;
            if self.samples.len() == BLOCK {
                self.block()?;
            }
        }
        Ok(())
    }

    /// Writes the last block. Returns `out`.
    /// Errors: Those of `out`.
    pub fn finish(mut self) -> io::Result<W> {
        if !self.samples.is_empty() {
            self.block()?;
        }
        self.out.flush()?;
        Ok(self.out)
    }

    fn block(&mut self) -> io::Result<()> {
        let Self { samples, frame, .. } = self;
        frame.clear();
        let full = samples.len() == BLOCK;
        frame.extend([0xff, 0xf8, if full { 0xc0 } else { 0x70 }, 0x08]);
        number(self.number, frame);
        if !full {
            frame.extend((samples.len() as u16 - 1).to_be_bytes());
        }
        frame.push(crc8(frame));
        let order = if self.packed {
            (1..=2).min_by_key(|&order| packed_bits(samples, order))
        } else {
            None
        };
        match order.filter(|&order| packed_bits(samples, order) < 16 * samples.len() as u64) {
            Some(order) => pack(samples, order, frame),
            None => {
                frame.push(1 << 1); // as they are
                frame.extend(samples.iter().flat_map(|x| x.to_be_bytes()));
            }
        }
        frame.extend(crc16(frame).to_be_bytes());
        self.out.write_all(frame)?;
        self.number += 1;
        samples.clear();
        Ok(())
    }
}

/// The coding of UTF-8, extended to 31 bits.
fn number(n: u32, out: &mut Vec<u8>) {
    if n < 0x80 {
        return out.push(n as u8);
    }
    // The first byte of `more` others holds 6 - more bits.
    let more = (1..=5).find(|more| n >> (6 * more + 6 - more) == 0).unwrap_or(5);
    out.push((0xff00u32 >> (more + 1)) as u8 | (n >> (6 * more)) as u8);
    out.extend((0..more).rev().map(|k| 0x80 | (n >> (6 * k)) as u8 & 0x3f));
}

/// The difference of sample `i` from the prediction of the `order` samples before it.
fn residual(samples: &[i16], order: usize, i: usize) -> i32 {
    let x = |back: usize| i32::from(samples[i - back]);
    if order == 1 {
        x(0) - x(1)
    } else {
        x(0) - 2 * x(1) + x(2)
    }
}

/// Partitions of a block, as a power of 2: those of `PART` samples, or one if they do not divide it evenly.
fn partition_order(n: usize) -> u32 {
    if n == BLOCK {
        (BLOCK / PART).ilog2()
    } else {
        0
    }
}

/// The bits that the largest residual of a partition takes.
fn depth(samples: &[i16], order: usize, from: usize, to: usize) -> u32 {
    let all = (from..to).fold(0, |all, i| {
        let x = residual(samples, order, i);
        all | x ^ x >> 31
    });
    if all == 0 && (from..to).all(|i| residual(samples, order, i) == 0) {
        0
    } else {
        33 - all.leading_zeros()
    }
}

fn partitions(samples: &[i16], order: usize) -> impl Iterator<Item = (usize, usize)> {
    let size = samples.len() >> partition_order(samples.len());
    (0..samples.len()).step_by(size).map(move |from| (from.max(order), from + size))
}

fn packed_bits(samples: &[i16], order: usize) -> u64 {
    if samples.len() <= order {
        return u64::MAX;
    }
    let each = |(from, to)| 9 + (to - from) as u64 * u64::from(depth(samples, order, from, to));
    6 + 16 * order as u64 + partitions(samples, order).map(each).sum::<u64>()
}

/// The subframe of a fixed predictor, padded to whole bytes.
fn pack(samples: &[i16], order: usize, out: &mut Vec<u8>) {
    let (mut word, mut filled) = (0u64, 0);
    let mut put = |value: u32, n: u32| {
        word = word << n | u64::from(value) & ((1 << n) - 1);
        filled += n;
        while filled >= 8 {
            filled -= 8;
            out.push((word >> filled) as u8);
        }
    };
    put((8 + order as u32) << 1, 8);
    samples[..order].iter().for_each(|&x| put(x as u16 as u32, 16));
    put(partition_order(samples.len()), 6);
    for (from, to) in partitions(samples, order) {
        let depth = depth(samples, order, from, to);
        put(15 << 5 | depth, 9);
        (from..to).for_each(|i| put(residual(samples, order, i) as u32, depth));
    }
    put(0, 7); // the rest of a byte
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Decoder;

    #[test]
    fn recordings_of_any_length_and_sound_come_back_as_they_were() {
        let noise = |i: usize| (i as u32).wrapping_mul(2_654_435_761) >> 16;
        let sounds: [&dyn Fn(usize) -> i16; 5] = [
            &|_| 0,
            &|i| (((i as f64) * 0.01).sin() * 3000.0) as i16 + (noise(i) % 5) as i16,
            &|i| noise(i) as i16,
            &|i| if i % 2 == 0 { i16::MIN } else { i16::MAX },
            &|i| -1 - (i / 300) as i16,
        ];
        let origin = Origin { stated: 4410, rate: 44_100, frames: 77_777_777_777 };
        for n in [1, 2, 3, 64, 65, 4095, 4096, 4097, 600_001] {
            for (which, sound) in sounds.iter().enumerate() {
                let samples: Vec<i16> = (0..n).map(sound).collect();
                for packed in [false, true] {
                    let mut writer =
                        Writer::new(Vec::new(), 32_000, n as u64, origin, packed).unwrap();
                    samples.chunks(1000).for_each(|some| writer.write(some).unwrap());
                    let bytes = writer.finish().unwrap();
                    let mut decoder = Decoder::default();
                    let info = decoder.info(&bytes).unwrap();
                    assert_eq!(
                        (info.rate, info.channels, info.frames),
                        (32_000, 1, n as u64),
                        "{which} {packed}"
                    );
                    assert_eq!(decoder.origin(), Some(origin));
                    let start = n / 3;
                    let mut out = vec![0; n - start];
                    assert!(decoder.read_16(&bytes, &info, start as u64, &mut out).unwrap());
                    assert_eq!(out, samples[start..], "{n} {which} {packed}");
                    let mut wide = vec![0.0; n];
                    decoder.read(&bytes, &info, 0, None, &mut wide).unwrap();
                    assert!(wide.iter().zip(&samples).all(|(x, y)| x * 32_768.0 == f32::from(*y)));
                    if which == 1 && packed && n > 4096 {
                        assert!(bytes.len() < n, "{} bytes for {n} samples", bytes.len());
                    }
                }
            }
        }
    }
}

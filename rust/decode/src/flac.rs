//! FLAC, container and codec (RFC 9639).
//!
//! A frame is found by bisection over the bytes: frame headers carry their position and a checksum. The result is
//! accepted only if the whole frame's checksum matches and the frames follow each other without a gap; if not, the
//! frames are walked from the first one on.

use super::bits::{crc16, crc8, unfold, Msb};
use super::flac_write::Origin;
use super::{corrupt, Error, Info};
use crate::simd;

/// Frame headers that are tried, from the end backwards, before a recording counts as damaged.
const LAST_FRAMES: usize = 8;
const CUT: &str = "a frame is cut off";

/// Bytes before the place where a frame is expected: the headers of later frames are longer by some bytes.
const MARGIN: usize = 64;
/// The header of a subframe that holds its samples as they are.
const PLAIN: u8 = 1 << 1;

/// The samples of a frame.
enum Frame<'a> {
    Decoded(Stereo),
    Plain(&'a [u8]), // of one channel, 16 bits, big-endian
}

/// The decoder's memory: the samples of one frame.
#[derive(Default)]
pub(super) struct Flac {
    /// Of the recording that `info` was last called for.
    pub origin: Option<Origin>,
    channels: [Vec<i32>; 8],
    /// The difference of two 32-bit channels has 33 bits.
    wide: Vec<i64>,
}

struct Stream<'a> {
    /// From the first frame to the end of the file.
    frames: &'a [u8],
    max_block: u32,
    rate: u32,
    channels: u8,
    bits: u32,
    /// Samples in the whole stream; 0 when the encoder did not know.
    total: u64,
    origin: Option<Origin>,
}

#[derive(Clone, Copy, PartialEq)]
enum Stereo {
    Independent,
    LeftSide,
    SideRight,
    MidSide,
}

#[derive(Clone, Copy)]
struct Header {
    /// Bytes of the header itself.
    size: usize,
    /// First sample.
    position: u64,
    /// Samples in this frame.
    block: u32,
    stereo: Stereo,
}

fn parse(bytes: &[u8]) -> Result<Stream<'_>, Error> {
    let (mut stream, mut origin) = (None, None);
    let mut at = 4;
    loop {
        let Some(&[kind, a, b, c]) = bytes.get(at..).and_then(|rest| rest.first_chunk::<4>()) else {
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
    let Some(mut stream) = stream else {
        return corrupt("FLAC", "there is no stream information");
    };
    stream.frames = bytes.get(at..).unwrap_or(&[]);
    stream.origin = origin;
    if stream.max_block < 16 || stream.rate == 0 {
        return corrupt("FLAC", "the stream information is not valid");
    }
    Ok(stream)
}

impl Stream<'_> {
    /// The frame header at `at`, if there is one.
    fn header(&self, at: usize) -> Option<Header> {
        let b = self.frames.get(at..)?;
        let &[0xff, sync, sizes, form, first, ..] = b else { return None };
        if sync & 0xfe != 0xf8 || form & 1 != 0 {
            return None;
        }
        // A number of up to 36 bits in the coding of UTF-8.
        let more = match first.leading_ones() {
            0 => 0,
            n @ 2..=7 => n as usize - 1,
            _ => return None,
        };
        let mut number = u64::from(first) & (0x7f >> more.min(7)) >> usize::from(more > 0);
        for byte in b.get(5..5 + more)? {
            if byte & 0xc0 != 0x80 {
                return None;
            }
            number = number << 6 | u64::from(byte & 0x3f);
        }
        let mut size = 5 + more;
        let block = match sizes >> 4 {
            0 => return None,
            1 => 192,
            code @ 2..=5 => 144 << code,
            6 => {
                size += 1;
                u32::from(*b.get(size - 1)?) + 1
            }
            7 => {
                size += 2;
                u32::from(u16::from_be_bytes([*b.get(size - 2)?, *b.get(size - 1)?])) + 1
            }
            code => 1 << code,
        };
        let rate = match sizes & 15 {
            0 => self.rate,
            code @ 1..=11 => {
                [88200, 176400, 192000, 8000, 16000, 22050, 24000, 32000, 44100, 48000, 96000][code as usize - 1]
            }
            12 => {
                size += 1;
                u32::from(*b.get(size - 1)?) * 1000
            }
            code @ 13..=14 => {
                size += 2;
                let rate = u32::from(u16::from_be_bytes([*b.get(size - 2)?, *b.get(size - 1)?]));
                if code == 13 {
                    rate
                } else {
                    rate * 10
                }
            }
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
        let same = (rate, channels, bits) == (self.rate, self.channels, self.bits) && block <= self.max_block;
        if !same || crc8(b.get(..size)?) != *b.get(size)? {
            return None;
        }
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
    fn previous(&self, mut to: usize) -> Option<(usize, Header)> {
        loop {
            to = self.frames[..to].iter().rposition(|&b| b == 0xff)?;
            if let Some(header) = self.header(to) {
                return Some((to, header));
            }
        }
    }

    /// Whether another FLAC file follows in the same bytes, whose last frame ends with `end`. They are searched only if the
    /// length, the rest or the order of a few frames speaks for it.
    fn is_joined(&self, bytes: &[u8], end: u64) -> bool {
        let largest = self.max_block as usize * usize::from(self.channels) * 5;
        let at = self.previous(self.frames.len()).map_or(0, |(at, _)| at);
        let mut before = 0;
        let mut fine = (end == self.total || self.total == 0) && self.frames.len() - at <= largest;
        // Places that are no multiples of each other, since files of one size may follow each other.
        for share in [23, 41, 59, 83] {
            let place = self.frames.len() / 100 * share;
            let position = self.next(place, (place + largest).min(at)).map_or(before, |(_, header)| header.position);
            fine &= std::mem::replace(&mut before, position) <= position;
        }
        !fine && bytes[4..].windows(8).any(|at| at[..4] == *b"fLaC" && at[4] & 0x7f == 0 && at[5..] == [0, 0, 34])
    }

    /// Where the frame that holds sample `target` seems to begin.
    fn seek(&self, target: u64) -> usize {
        // The frame at `low` begins at or before `target`; every frame in [high, ..) begins after it.
        let (mut low, mut high) = (0, self.frames.len());
        // First the frame whose first sample divides the bytes as it divides the samples: of frames of one size, the right one.
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
    ///
    /// # Errors
    /// A checksum that does not match.
    fn plain(&self, at: usize, header: &Header) -> Option<Result<(&[u8], usize), Error>> {
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
            // A last frame that is there, and damaged, is an error of the crops that need it.
            if found.is_ok() || frames == stream.total && found != corrupt("FLAC", CUT) {
                let channels = u16::from(stream.channels);
                return Ok(Info { rate: stream.rate, channels, frames, stated: stream.total });
            }
            before = at;
        }
        corrupt("FLAC", "no frame near the end can be decoded")
    }

    pub fn read(&mut self, bytes: &[u8], start: u64, channel: Option<u16>, out: &mut [f32]) -> Result<(), Error> {
        let stream = parse(bytes)?;
        let at = stream.seek(start);
        match self.run(&stream, at, start, channel, out) {
            Err(_) if at > 0 => self.run(&stream, 0, start, channel, out),
            result => result,
        }
    }

    /// The same of a recording with one channel of 16 bits, as it is; false for any other.
    pub fn read_16(&mut self, bytes: &[u8], start: u64, out: &mut [i16]) -> Result<bool, Error> {
        let stream = parse(bytes)?;
        if (stream.channels, stream.bits) != (1, 16) {
            return Ok(false);
        }
        let at = stream.seek(start);
        let mut run = |at| {
            self.each(&stream, at, start, out.len(), |flac, frame, from, done, n| {
                let out = out[done..done + n].iter_mut();
                match frame {
                    Frame::Plain(samples) => plain(samples, from, out, |x| x),
                    Frame::Decoded(_) => out.zip(&flac.channels[0][from..]).for_each(|(y, x)| *y = *x as i16),
                }
            })
        };
        match run(at) {
            Err(_) if at > 0 => run(0).map(|()| true),
            result => result.map(|()| true),
        }
    }

    /// Whether the bytes are one FLAC file.
    pub fn check(bytes: &[u8], info: &Info) -> Result<(), Error> {
        match parse(bytes)?.is_joined(bytes, info.frames) {
            true => Err(Error::Joined { format: "FLAC" }),
            false => Ok(()),
        }
    }

    /// Decodes from the frame at `at` on until `out` is full.
    fn run(
        &mut self,
        stream: &Stream,
        at: usize,
        start: u64,
        channel: Option<u16>,
        out: &mut [f32],
    ) -> Result<(), Error> {
        let gain = 0.5f64.powi(stream.bits as i32 - 1) / f64::from(stream.channels);
        self.each(stream, at, start, out.len(), |flac, frame, from, done, n| match (frame, channel) {
            (Frame::Plain(samples), _) => {
                plain(samples, from, out[done..done + n].iter_mut(), |x| f32::from(x) * gain as f32);
            }
            (Frame::Decoded(stereo), None) => flac.mix(stream, stereo, from, gain, &mut out[done..done + n]),
            (Frame::Decoded(stereo), Some(channel)) => {
                flac.pick(stream, stereo, channel, from, &mut out[done..done + n]);
            }
        })
    }

    /// Decodes the frames from the one at `at` on that hold samples \[start, start + length), and gives `take` of each: its
    /// first sample that counts, how many came before, and how many it has.
    fn each(
        &mut self,
        stream: &Stream,
        mut at: usize,
        start: u64,
        length: usize,
        mut take: impl FnMut(&Self, Frame, usize, usize, usize),
    ) -> Result<(), Error> {
        let Some(first) = stream.header(at) else {
            return corrupt("FLAC", "a frame header is missing");
        };
        let mut position = if at == 0 { 0 } else { first.position };
        if position > start {
            return corrupt("FLAC", "a frame is missing");
        }
        let mut done = 0;
        while done < length {
            let Some(header) = stream.header(at) else {
                return corrupt("FLAC", "a frame header is missing");
            };
            if header.position != position {
                return corrupt("FLAC", "a frame is missing");
            }
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

    /// One channel of the current frame from sample `from` on.
    fn pick(&self, stream: &Stream, stereo: Stereo, channel: u16, from: usize, out: &mut [f32]) {
        let gain = 0.5f64.powi(stream.bits as i32 - 1);
        let side_is_wide = stream.bits == 32 && stereo != Stereo::Independent;
        let sample = |channel: usize, i: usize| i64::from(self.channels[channel][from + i]);
        let side = |channel: usize, i: usize| if side_is_wide { self.wide[from + i] } else { sample(channel, i) };
        for (i, y) in out.iter_mut().enumerate() {
            let value = match (stereo, channel) {
                (Stereo::LeftSide, 1) => sample(0, i) - side(1, i),
                (Stereo::SideRight, 0) => sample(1, i) + side(0, i),
                (Stereo::MidSide, _) => {
                    let (twice, side) = (2 * sample(0, i) + (side(1, i) & 1), side(1, i));
                    (if channel == 0 { twice + side } else { twice - side }) >> 1
                }
                _ => sample(usize::from(channel), i),
            };
            *y = (value as f64 * gain) as f32;
        }
    }

    /// Mean of the channels of the current frame from sample `from` on. It needs no decorrelation: with
    /// side = left - right and mid = (left + right) >> 1, whose lost bit is side's last.
    fn mix(&self, stream: &Stream, stereo: Stereo, from: usize, gain: f64, out: &mut [f32]) {
        let channels = &self.channels[..usize::from(stream.channels)];
        let samples = |channel: usize| &self.channels[channel][from..];
        // Sums of at most 24 bits are exact in float32, and scaling by a power of two rounds nothing: nothing is lost compared with float64.
        let exact = stream.bits <= 23;
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
                    Stereo::Independent => pairs.for_each(|((y, a), b)| *y = a.wrapping_add(*b) as f32 * gain as f32),
                    Stereo::LeftSide => {
                        pairs.for_each(|((y, a), b)| *y = a.wrapping_mul(2).wrapping_sub(*b) as f32 * gain as f32);
                    }
                    Stereo::SideRight => {
                        pairs.for_each(|((y, a), b)| *y = b.wrapping_mul(2).wrapping_add(*a) as f32 * gain as f32);
                    }
                    Stereo::MidSide => {
                        pairs.for_each(|((y, a), b)| *y = a.wrapping_mul(2).wrapping_add(b & 1) as f32 * gain as f32);
                    }
                }
            }
            _ => {
                let side = |channel: usize, i: usize| {
                    if side_is_wide {
                        self.wide[from + i]
                    } else {
                        i64::from(samples(channel)[i])
                    }
                };
                for (i, y) in out.iter_mut().enumerate() {
                    let sum = match stereo {
                        Stereo::Independent => channels.iter().map(|c| i64::from(c[from + i])).sum(),
                        Stereo::LeftSide => 2 * i64::from(samples(0)[i]) - side(1, i),
                        Stereo::SideRight => 2 * i64::from(samples(1)[i]) + side(0, i),
                        Stereo::MidSide => 2 * i64::from(samples(0)[i]) + (side(1, i) & 1),
                    };
                    *y = (sum as f64 * gain) as f32;
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
                subframe(&mut bits, 33, &mut self.wide[..n])
            } else {
                let samples = &mut self.channels[channel];
                samples.resize(n.max(samples.len()), 0);
                subframe(&mut bits, stream.bits + u32::from(side), &mut samples[..n])
            };
            if bits.overrun() {
                return corrupt("FLAC", CUT);
            }
            if done.is_none() {
                return corrupt("FLAC", "a frame cannot be decoded");
            }
        }
        let size = header.size + bits.bytes();
        match frame.get(size..size + 2) {
            Some(check) if crc16(&frame[..size]).to_be_bytes() == check => Ok(size + 2),
            None => corrupt("FLAC", CUT),
            _ => corrupt("FLAC", "a frame's checksum does not match"),
        }
    }
}

/// Big-endian samples of 16 bits from number `from` on.
#[inline(always)]
fn plain<'a, T: 'a>(samples: &[u8], from: usize, out: impl Iterator<Item = &'a mut T>, value: impl Fn(i16) -> T) {
    for (y, x) in out.zip(samples[2 * from..].chunks_exact(2)) {
        *y = value(i16::from_be_bytes([x[0], x[1]]));
    }
}

/// The integers that samples are decoded in; arithmetic wraps, since only damaged frames overflow.
trait Int: Copy + Default {
    fn wrap(x: i64) -> Self;
    fn wide(self) -> i64;
    fn shl(self, n: u32) -> Self;
    /// The samples after the first `weights.len()` ones, which have `depth` bits: each is its residual + (sum of
    /// weights\[j\] x\[i - 1 - j\]) >> shift.
    fn predicted(bits: &mut Msb, weights: &[i32], shift: u32, depth: u32, out: &mut [Self]) -> Option<()>;
}

impl Int for i64 {
    #[inline(always)]
    fn wrap(x: i64) -> Self {
        x
    }
    #[inline(always)]
    fn wide(self) -> i64 {
        self
    }
    fn shl(self, n: u32) -> Self {
        self << n
    }
    // Only for the side channel of 32-bit stereo, which is not worth specialised loops.
    fn predicted(bits: &mut Msb, weights: &[i32], shift: u32, _depth: u32, out: &mut [Self]) -> Option<()> {
        residual(bits, out, &Any { weights, shift })
    }
}

impl Int for i32 {
    #[inline(always)]
    fn wrap(x: i64) -> Self {
        x as i32
    }
    #[inline(always)]
    fn wide(self) -> i64 {
        i64::from(self)
    }
    fn shl(self, n: u32) -> Self {
        self << n
    }
    #[inline(always)]
    fn predicted(bits: &mut Msb, weights: &[i32], shift: u32, depth: u32, out: &mut [Self]) -> Option<()> {
        let largest = weights.iter().map(|w| u64::from(w.unsigned_abs())).sum::<u64>() << (depth - 1);
        // Whether no sum can overflow i32.
        let narrow = largest <= i32::MAX as u64;
        if let (1..=2, true, 0) = (weights.len(), narrow, shift) {
            match weights {
                [1] => return residual(bits, out, &First),
                [2, -1] => return residual(bits, out, &Second),
                _ => {}
            }
        }
        // With the number of weights as a constant, sums are unrolled and kept in registers.
        macro_rules! of_order {
            ($($n:literal)*) => {
                match weights.len() {
                    $($n if narrow => residual(bits, out, &Linear::<$n, true>::new(weights, shift)),
                    $n => residual(bits, out, &Linear::<$n, false>::new(weights, shift)),)*
                    _ => residual(bits, out, &Any { weights, shift }),
                }
            };
        }
        of_order!(0 1 2 3 4 5 6 7 8 9 10 11 12)
    }
}

/// Decodes one channel of one frame; None when it is invalid.
fn subframe<T: Int>(bits: &mut Msb, depth: u32, out: &mut [T]) -> Option<()> {
    #[cfg(target_arch = "x86_64")]
    if simd::bit_counts() {
        // SAFETY: the instruction set was just checked.
        return unsafe { subframe_bmi(bits, depth, out) };
    }
    let _ = simd::bit_counts;
    subframe_any(bits, depth, out)
}

/// Decoding codes is counting zeros and shifting by variable amounts, for which these sets have instructions.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "bmi1,bmi2,lzcnt")]
unsafe fn subframe_bmi<T: Int>(bits: &mut Msb, depth: u32, out: &mut [T]) -> Option<()> {
    subframe_any(bits, depth, out)
}

#[inline(always)]
fn subframe_any<T: Int>(bits: &mut Msb, depth: u32, out: &mut [T]) -> Option<()> {
    if bits.read(1) != 0 {
        return None;
    }
    let kind = bits.read(6);
    let wasted = if bits.read(1) == 1 { bits.unary()?.checked_add(1)? } else { 0 };
    let depth = depth.checked_sub(wasted).filter(|&depth| depth > 0)?;
    match kind {
        0 => out.fill(T::wrap(bits.signed(depth))),
        1 => {
            for x in out.iter_mut() {
                *x = T::wrap(bits.signed(depth));
            }
        }
        8..=12 => {
            let order = kind as usize - 8;
            let weights: &[i32] = [&[][..], &[1], &[2, -1], &[3, -3, 1], &[4, -6, 4, -1]][order];
            warm_up(bits, depth, order, out)?;
            T::predicted(bits, weights, 0, depth, out)?;
        }
        32.. => {
            let order = kind as usize - 31;
            warm_up(bits, depth, order, out)?;
            let precision = bits.read(4) + 1;
            let shift = bits.signed(5);
            if precision == 16 || shift < 0 {
                return None;
            }
            let mut weights = [0i32; 32];
            for w in &mut weights[..order] {
                *w = bits.signed(precision) as i32;
            }
            T::predicted(bits, &weights[..order], shift as u32, depth, out)?;
        }
        _ => return None,
    }
    if wasted > 0 {
        for x in out.iter_mut() {
            *x = x.shl(wasted);
        }
    }
    Some(())
}

#[inline(always)]
fn warm_up<T: Int>(bits: &mut Msb, depth: u32, order: usize, out: &mut [T]) -> Option<()> {
    for x in out.get_mut(..order)? {
        *x = T::wrap(bits.signed(depth));
    }
    Some(())
}

/// A linear predictor.
trait Predictor<T> {
    /// The weights of the preceding samples, the newest first, and the shift.
    fn weights(&self) -> (&[i32], u32);
    /// Restores samples \[at, at + residuals.len()) from those before.
    fn restore<const M: usize>(&self, residuals: &[i32; M], x: &mut [T], at: usize);
}

struct Linear<const N: usize, const NARROW: bool> {
    weights: [i32; N],
    shift: u32,
}

impl<const N: usize, const NARROW: bool> Linear<N, NARROW> {
    #[inline(always)]
    fn new(weights: &[i32], shift: u32) -> Self {
        Self { weights: weights.try_into().expect("N weights"), shift }
    }
}

impl<T: Int, const N: usize, const NARROW: bool> Predictor<T> for Linear<N, NARROW> {
    #[inline(always)]
    fn weights(&self) -> (&[i32], u32) {
        (&self.weights, self.shift)
    }

    #[inline(always)]
    fn restore<const M: usize>(&self, residuals: &[i32; M], x: &mut [T], at: usize) {
        let x = &mut x[at - N..at + M];
        for m in 0..M {
            // The newest sample last: the rest of the sum does not wait for it.
            let mut narrow = 0i32;
            let mut wide = 0i64;
            for j in (0..N).rev() {
                let (w, x) = (self.weights[j], x[m + N - 1 - j].wide());
                if NARROW {
                    narrow = narrow.wrapping_add(w.wrapping_mul(x as i32));
                } else {
                    wide = wide.wrapping_add(i64::from(w).wrapping_mul(x));
                }
            }
            let sum = if NARROW { i64::from(narrow >> self.shift) } else { wide >> self.shift };
            x[m + N] = T::wrap(sum.wrapping_add(i64::from(residuals[m])));
        }
    }
}

/// The predictor 1: each sample is like the one before.
struct First;

/// The predictor 2, -1: each sample lies on the line through the two before.
struct Second;

// Without products the sums of a sample take a third of the time, in a chain in which each waits for the one before.
impl<T: Int> Predictor<T> for First {
    #[inline(always)]
    fn weights(&self) -> (&[i32], u32) {
        (&[1], 0)
    }

    #[inline(always)]
    fn restore<const M: usize>(&self, residuals: &[i32; M], x: &mut [T], at: usize) {
        let x = &mut x[at - 1..at + M];
        let mut last = x[0].wide() as i32;
        for m in 0..M {
            last = last.wrapping_add(residuals[m]);
            x[m + 1] = T::wrap(i64::from(last));
        }
    }
}

impl<T: Int> Predictor<T> for Second {
    #[inline(always)]
    fn weights(&self) -> (&[i32], u32) {
        (&[2, -1], 0)
    }

    #[inline(always)]
    fn restore<const M: usize>(&self, residuals: &[i32; M], x: &mut [T], at: usize) {
        let x = &mut x[at - 2..at + M];
        let mut last = x[1].wide() as i32;
        let mut step = last.wrapping_sub(x[0].wide() as i32);
        for m in 0..M {
            step = step.wrapping_add(residuals[m]);
            last = last.wrapping_add(step);
            x[m + 2] = T::wrap(i64::from(last));
        }
    }
}

struct Any<'a> {
    weights: &'a [i32],
    shift: u32,
}

impl<T: Int> Predictor<T> for Any<'_> {
    fn weights(&self) -> (&[i32], u32) {
        (self.weights, self.shift)
    }

    #[inline(always)]
    fn restore<const M: usize>(&self, residuals: &[i32; M], x: &mut [T], at: usize) {
        for (i, &residual) in (at..).zip(residuals) {
            restore_one(self.weights, self.shift, residual, x, i);
        }
    }
}

/// Restores one sample. The loops leave only a few samples to it, and stay smaller because it is not inlined.
#[inline(never)]
fn restore_one<T: Int>(weights: &[i32], shift: u32, residual: i32, x: &mut [T], at: usize) {
    let before = x[at - weights.len()..at].iter().rev();
    let sum =
        weights.iter().zip(before).fold(0i64, |sum, (&w, &x)| sum.wrapping_add(i64::from(w).wrapping_mul(x.wide())));
    x[at] = T::wrap((sum >> shift).wrapping_add(i64::from(residual)));
}

/// Decodes the Rice-coded residuals of the samples after the warm-up, and restores those samples. Both happen in one loop:
/// finding the next code and predicting the next sample are each a chain of dependent steps, and the two overlap.
#[inline(always)]
fn residual<T: Int>(bits: &mut Msb, out: &mut [T], predictor: &impl Predictor<T>) -> Option<()> {
    let width = match bits.read(2) {
        0 => 4,
        1 => 5,
        _ => return None,
    };
    let partitions = 1usize << bits.read(4);
    if !out.len().is_multiple_of(partitions) {
        return None;
    }
    let size = out.len() / partitions;
    let (weights, shift) = predictor.weights();
    let mut first = weights.len();
    for partition in 0..partitions {
        let end = (partition + 1) * size;
        if first > end {
            return None;
        }
        let k = bits.read(width);
        if k == (1 << width) - 1 {
            let depth = bits.read(5);
            let mut at = first;
            // Four residuals of a fixed size lie in one window: none waits for the one before.
            while (1..=14).contains(&depth) && at + 4 <= end {
                let window = bits.window();
                let mut residuals = [0; 4];
                for (m, residual) in residuals.iter_mut().enumerate() {
                    *residual = ((window << (m as u32 * depth)) as i64 >> (64 - depth)) as i32;
                }
                bits.skip(4 * depth);
                predictor.restore(&residuals, out, at);
                at += 4;
            }
            for i in at..end {
                restore_one(weights, shift, bits.signed(depth) as i32, out, i);
            }
        } else {
            let mut at = first;
            // As many codes from one window as usually fit.
            if k < 11 {
                while at + 4 <= end {
                    at += restore_some::<T, 4>(bits, k, out, at, predictor)?;
                }
            }
            while at + 2 <= end {
                at += restore_some::<T, 2>(bits, k, out, at, predictor)?;
            }
            if at < end {
                restore_one(weights, shift, bits.rice(k)?, out, at);
            }
        }
        // Past the end all bits are zeros: a partition without Rice codes would never notice.
        if bits.overrun() {
            return None;
        }
        first = end;
    }
    Some(())
}

/// Restores the samples from `at` on: `M` if their codes fit in one window, otherwise one. Returns how many.
#[inline(always)]
fn restore_some<T: Int, const M: usize>(
    bits: &mut Msb,
    k: u32,
    out: &mut [T],
    at: usize,
    predictor: &impl Predictor<T>,
) -> Option<usize> {
    let mut window = bits.window();
    let mut residuals = [0; M];
    let mut used = 0;
    for residual in &mut residuals {
        // Where the codes do not fit in the window, these values are invalid and are not used.
        let zeros = window.leading_zeros();
        let n = zeros + 1 + k;
        // The code's last k + 1 bits: a one, which contributes 2^k, and the remainder.
        let low = window.wrapping_shr(n.wrapping_neg()) as u32;
        *residual = unfold(low.wrapping_add(zeros.wrapping_sub(1).wrapping_shl(k)));
        window = window.wrapping_shl(n);
        used += n;
    }
    if used <= Msb::WINDOW {
        bits.skip(used);
        predictor.restore(&residuals, out, at);
        Some(M)
    } else {
        let (weights, shift) = predictor.weights();
        restore_one(weights, shift, bits.rice(k)?, out, at);
        Some(1)
    }
}

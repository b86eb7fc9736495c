//! Bit readers and checksums.

#[cfg(target_arch = "x86_64")]
use crate::simd;

/// Numbers in the headers of files, big-endian. None past the end.
pub(super) fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// Reads bits, most significant first (FLAC, MP3). Past the end it reads zeros, and `overrun` reports it.
#[derive(Clone, Copy)]
pub(super) struct Msb<'a> {
    data: &'a [u8],
    bit: usize, // the next bit, which may be past the end
}

impl<'a> Msb<'a> {
    /// Bits of a [`window`](Self::window) that are valid.
    pub const WINDOW: u32 = 57;

    pub fn new(data: &'a [u8]) -> Self {
        Self { data, bit: 0 }
    }

    pub fn at(data: &'a [u8], bit: usize) -> Self {
        Self { data, bit }
    }

    /// The next bits, left-aligned. Of its 64 bits only the first `WINDOW` are valid.
    #[inline(always)]
    pub fn window(&self) -> u64 {
        let at = self.bit >> 3;
        eight_bytes(self.data, at) << (self.bit & 7)
    }

    #[inline(always)]
    pub fn skip(&mut self, n: u32) {
        self.bit += n as usize;
    }

    /// The next `n` <= 32 bits.
    #[inline(always)]
    pub fn read(&mut self, n: u32) -> u32 {
        let value = ((self.window() >> 1) >> (63 - n)) as u32;
        self.skip(n);
        value
    }

    /// The next `n` <= 33 bits as a two's complement number.
    #[inline(always)]
    pub fn signed(&mut self, n: u32) -> i64 {
        if n == 0 {
            return 0;
        }
        let value = self.window() as i64 >> (64 - n);
        self.skip(n);
        value
    }

    /// Counts the zeros before the next one bit, and consumes both. None past the end.
    #[inline(always)]
    pub fn unary(&mut self) -> Option<u32> {
        let mut zeros = 0u32;
        loop {
            let here = self.window().leading_zeros();
            if here < Self::WINDOW {
                self.skip(here + 1);
                return Some(zeros + here);
            }
            zeros += Self::WINDOW;
            self.skip(Self::WINDOW);
            refuse!(self.overrun(), None);
        }
    }

    /// A Rice code with parameter `k`, as a signed number. None past the end.
    #[inline(always)]
    pub fn rice(&mut self, k: u32) -> Option<i32> {
        let zeros = self.unary()?;
        Some(unfold((u64::from(zeros) << k) as u32 | self.read(k)))
    }

    /// Bits read so far.
    pub fn position(&self) -> usize {
        self.bit
    }

    /// Bytes consumed so far, a partly read one included.
    pub fn bytes(&self) -> usize {
        self.bit.div_ceil(8)
    }

    /// Whether bits past the end were read.
    pub fn overrun(&self) -> bool {
        self.bytes() > self.data.len()
    }
}

/// Bits from a register that is filled before it is empty, most significant first: quicker than [`Msb`] for many short
/// codes, since a load does not wait for the length of the code before. Past the end it reads zeros.
#[derive(Clone, Copy)]
pub(super) struct Register<'a> {
    data: &'a [u8],
    at: usize,     // the next byte to load
    pub bits: u64, // the next bits, left-aligned
    valid: u32,    // how many of them are valid
}

impl<'a> Register<'a> {
    /// Valid bits after `fill`.
    pub const FULL: u32 = 56;

    pub fn at(data: &'a [u8], bit: usize) -> Self {
        let mut register = Self { data, at: bit >> 3, bits: 0, valid: 0 };
        register.fill();
        register.skip((bit & 7) as u32);
        register
    }

    #[inline(always)]
    pub fn fill(&mut self) {
        let word = eight_bytes(self.data, self.at);
        // The bits beyond the valid ones equal the bits that are added here.
        self.bits |= word >> self.valid;
        self.at += ((63 - self.valid) >> 3) as usize;
        self.valid |= Self::FULL;
    }

    /// At most as many bits as are valid, and fewer than 64.
    #[inline(always)]
    pub fn skip(&mut self, n: u32) {
        self.bits <<= n & 63;
        self.valid = self.valid.wrapping_sub(n);
    }

    /// Bits read so far.
    pub fn position(&self) -> usize {
        8 * self.at - self.valid as usize
    }
}

/// The bytes from `at` on, the first one highest, and zeros past the end.
#[inline(always)]
fn eight_bytes(data: &[u8], at: usize) -> u64 {
    match data.get(at..).and_then(<[u8]>::first_chunk) {
        Some(word) => u64::from_be_bytes(*word),
        None => last_bytes(data, at),
    }
}

#[cold]
fn last_bytes(data: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    if let Some(rest) = data.get(at..) {
        word[..rest.len()].copy_from_slice(rest);
    }
    u64::from_be_bytes(word)
}

/// The zigzag code: 0, 1, 2, 3, 4 .. to 0, -1, 1, -2, 2 ..
#[inline(always)]
pub(super) fn unfold(folded: u32) -> i32 {
    (folded >> 1) as i32 ^ -((folded & 1) as i32)
}

/// Reads bits, least significant first (Vorbis). Past its end there are zeros, and `left` is negative.
#[derive(Clone, Copy)]
pub(super) struct Lsb<'a> {
    data: &'a [u8],
    at: usize, // the byte behind those that are in `word` completely
    pub word: u64,
    count: u32, // bits of `word` that `at` counts as read; those above are the same as in the bytes from `at` on
    left: i64,
}

impl<'a> Lsb<'a> {
    pub fn new(data: &'a [u8]) -> Self {
        Self { data, at: 0, word: 0, count: 0, left: 8 * data.len() as i64 }
    }

    /// Makes at least 56 bits of `word` valid.
    #[inline(always)]
    pub fn fill(&mut self) {
        self.word |= eight_bytes(self.data, self.at).swap_bytes() << self.count;
        self.at += ((63 - self.count) >> 3) as usize;
        self.count |= 56;
    }

    /// Moves past `n` bits. None if the packet has ended before.
    #[inline(always)]
    pub fn skip(&mut self, n: u32) -> Option<()> {
        self.word >>= n;
        self.count -= n;
        self.left -= i64::from(n);
        (self.left >= 0).then_some(())
    }

    /// The next `n` <= 32 bits.
    #[inline(always)]
    pub fn read(&mut self, n: u32) -> Option<u32> {
        self.fill();
        let value = (self.word & ((1 << n) - 1)) as u32;
        self.skip(n)?;
        Some(value)
    }

    pub fn flag(&mut self) -> Option<bool> {
        Some(self.read(1)? == 1)
    }
}

/// Tables for a cyclic redundancy check, most significant bit first, eight bytes at a time: table i holds the remainder
/// of a byte that is followed by i zero bytes. The polynomial and the remainders lie in the highest bits.
const fn crc_tables(polynomial: u32) -> [[u32; 256]; 8] {
    let mut tables = [[0u32; 256]; 8];
    let mut i = 0;
    while i < 8 * 256 {
        let (table, byte) = (i / 256, i % 256);
        let mut crc = if table == 0 { (byte as u32) << 24 } else { tables[table - 1][byte] };
        let mut bit = 0;
        while bit < 8 {
            crc = crc << 1 ^ if crc >> 31 == 1 { polynomial } else { 0 };
            bit += 1;
        }
        tables[table][byte] = crc;
        i += 1;
    }
    tables
}

#[inline(always)]
fn crc(tables: &[[u32; 256]; 8], mut crc: u32, data: &[u8]) -> u32 {
    let (eights, rest) = data.as_chunks();
    for eight in eights {
        let word = u64::from_be_bytes(*eight) ^ u64::from(crc) << 32;
        crc = (0..8).fold(0, |crc, i| crc ^ tables[i][(word >> (8 * i) & 255) as usize]);
    }
    for byte in rest {
        crc = crc << 8 ^ tables[0][usize::from((crc >> 24) as u8 ^ byte)];
    }
    crc
}

/// FLAC's frame header checksum: x^8 + x^2 + x + 1.
pub(super) fn crc8(data: &[u8]) -> u8 {
    static TABLES: [[u32; 256]; 8] = crc_tables(0x07 << 24);
    (crc(&TABLES, 0, data) >> 24) as u8
}

/// FLAC's frame checksum: x^16 + x^15 + x^2 + 1.
pub(super) fn crc16(data: &[u8]) -> u16 {
    static TABLES: [[u32; 256]; 8] = crc_tables(CRC16 << 16);
    #[cfg(target_arch = "x86_64")]
    if data.len() >= 256 && simd::polynomials() {
        // SAFETY: the instruction set was just checked, and there are 64 bytes.
        let (folded, rest) = unsafe { fold_16(data) };
        return (crc(&TABLES, crc(&TABLES, 0, &folded), rest) >> 16) as u16;
    }
    (crc(&TABLES, 0, data) >> 16) as u16
}

const CRC16: u32 = 0x8005;

/// x^n modulo FLAC's polynomial of 16 bits.
#[cfg(target_arch = "x86_64")]
const fn power_16(n: u32) -> i64 {
    let (mut value, mut i) = (1u32, 0);
    while i < n {
        value <<= 1;
        if value >> 16 == 1 {
            value ^= 1 << 16 | CRC16;
        }
        i += 1;
    }
    value as i64
}

/// Folds all 64-byte blocks of `data` to 64 bytes with the same checksum. Returns these and the rest after the blocks.
/// Each step moves four times 128 bits over 512 bits, by two products of polynomials (V. Gopal et al., "Fast CRC
/// computation for generic polynomials using PCLMULQDQ instruction", 2009).
///
/// `data` must have at least 64 bytes.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "pclmulqdq,ssse3")]
unsafe fn fold_16(data: &[u8]) -> ([u8; 64], &[u8]) {
    use std::arch::x86_64::*;

    let reverse = _mm_set_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    let keys = _mm_set_epi64x(const { power_16(512 + 64) }, const { power_16(512) });
    let (blocks, rest) = data.split_at(data.len() / 64 * 64);
    let mut lanes = [_mm_setzero_si128(); 4];
    for block in blocks.chunks_exact(64) {
        for (i, lane) in lanes.iter_mut().enumerate() {
            let next =
                _mm_shuffle_epi8(_mm_loadu_si128(block.as_ptr().add(16 * i).cast()), reverse);
            let high = _mm_clmulepi64_si128::<0x11>(*lane, keys);
            let low = _mm_clmulepi64_si128::<0x00>(*lane, keys);
            *lane = _mm_xor_si128(next, _mm_xor_si128(high, low));
        }
    }
    let mut folded = [0; 64];
    for (i, lane) in lanes.into_iter().enumerate() {
        _mm_storeu_si128(folded.as_mut_ptr().add(16 * i).cast(), _mm_shuffle_epi8(lane, reverse));
    }
    (folded, rest)
}

/// OGG's page checksum. `so_far` is that of the part before.
pub(super) fn crc32(so_far: u32, data: &[u8]) -> u32 {
    static TABLES: [[u32; 256]; 8] = crc_tables(0x04c1_1db7);
    crc(&TABLES, so_far, data)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The remainder of a polynomial division, bit by bit.
    fn slow(bits: u32, polynomial: u64, data: &[u8]) -> u64 {
        let mut crc = 0u64;
        for byte in data {
            crc ^= u64::from(*byte) << (bits - 8);
            for _ in 0..8 {
                crc <<= 1;
                if crc >> bits & 1 == 1 {
                    crc ^= 1 << bits | polynomial;
                }
            }
        }
        crc
    }

    #[test]
    fn checksums_are_polynomial_remainders() {
        let data: Vec<u8> = (0..100u32).map(|i| (i * 37 + 11) as u8).collect();
        for n in [0, 1, 7, 8, 9, 16, 63, 100] {
            assert_eq!(u64::from(crc8(&data[..n])), slow(8, 0x07, &data[..n]));
            assert_eq!(u64::from(crc16(&data[..n])), slow(16, 0x8005, &data[..n]));
            assert_eq!(
                u64::from(crc32(crc32(0, &data[..n / 2]), &data[n / 2..n])),
                slow(32, 0x04c1_1db7, &data[..n])
            );
        }
        let long: Vec<u8> = (0..9000u32).map(|i| ((i * i) >> 3) as u8).collect();
        for n in [255, 256, 257, 319, 320, 8197] {
            assert_eq!(u64::from(crc16(&long[..n])), slow(16, 0x8005, &long[..n]), "{n}");
        }
    }

    #[test]
    fn msb_reads_across_words_and_notices_the_end() {
        let data = [0b1010_0000, 0, 0, 0, 0, 0, 0, 0, 0, 0b0000_0001, 0xff];
        let mut bits = Msb::new(&data);
        assert_eq!((bits.read(3), bits.unary(), bits.signed(4)), (0b101, Some(76), -1));
        assert_eq!((bits.bytes(), bits.overrun()), (11, false));
        assert_eq!(bits.signed(4), -1);
        assert!(!bits.overrun());
        assert_eq!(bits.unary(), None);
        assert_eq!(Msb::new(&[]).rice(3), None);
    }

    #[test]
    fn a_register_reads_what_single_reads_do() {
        let data: Vec<u8> = (0..40u32).map(|i| (i * 37 + 11) as u8).collect();
        for first in [0, 3, 8, 21] {
            let (mut register, mut single) = (Register::at(&data, first), Msb::at(&data, first));
            // Up to beyond the end, where both read zeros.
            for n in [1, 7, 19, 28, 3, 0, 13].into_iter().cycle().take(40) {
                register.fill();
                assert_eq!((register.bits >> 1 >> (63 - n)) as u32, single.read(n), "{n}");
                register.skip(n);
                assert_eq!(register.position(), single.position());
            }
        }
    }

    #[test]
    fn lsb_reads_across_bytes_and_ends() {
        let mut bits = Lsb::new(&[0b1100_0101, 0b0000_1111]);
        assert_eq!(
            (bits.read(3), bits.read(7), bits.read(6), bits.read(1)),
            (Some(5), Some(0b1111000), Some(3), None)
        );
    }
}

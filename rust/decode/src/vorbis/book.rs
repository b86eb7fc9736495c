//! Codebooks (Vorbis I specification, 3): bits to entries, and entries to vectors.

use crate::bits::Lsb;

/// Bits that one look into a table decodes. Longer codes are searched for.
const QUICK: u32 = 10;
/// Bits of a word that hold the length of a code; the others hold its entry.
const LENGTH: u32 = 6;

/// Long codes, their first bit the most significant one, in ascending order.
type Long = Vec<(u32, u32)>;

pub(super) struct Book {
    pub dimensions: usize,
    quick: Vec<u32>, // by the next bits: the entry and the length of the code; 0 if the code is longer
    long: Long,      // longer codes, with the same
    pub values: Vec<f32>, // the vectors of all entries; empty without a lookup table
}

impl Book {
    /// Reads a codebook, whose vectors are at most `budget` values, and subtracts them. None if it is not valid.
    pub fn parse(bits: &mut Lsb, budget: &mut u64) -> Option<Self> {
        refuse!(bits.read(24)? != 0x56_4342, None);
        let (dimensions, entries) = (bits.read(16)?, bits.read(24)?);
        refuse!(u64::from(entries) > *budget, None);
        let lengths = lengths(bits, entries as usize)?;
        let (quick, long) = codes(&lengths)?;
        let all = u64::from(entries) * u64::from(dimensions);
        let kind = bits.read(4)?;
        let n_values = match kind {
            0 => 0,
            1 => lattice(entries, dimensions)?,
            2 => all,
            _ => return None,
        };
        *budget = budget.checked_sub(if kind == 0 {
            u64::from(entries)
        } else {
            all.max(u64::from(entries))
        })?;
        let values = if kind == 0 {
            Vec::new()
        } else {
            vectors(bits, kind, n_values, entries, dimensions)?
        };
        Some(Self { dimensions: dimensions as usize, quick, long, values })
    }

    /// The entry of the next code. None at the end of the packet.
    #[inline(always)]
    pub fn entry(&self, bits: &mut Lsb) -> Option<usize> {
        bits.fill();
        let mut word = self.quick[bits.word as usize & (self.quick.len() - 1)];
        if word == 0 {
            word = self.search(bits.word as u32)?;
        }
        bits.skip(word & ((1 << LENGTH) - 1))?;
        Some((word >> LENGTH) as usize)
    }

    #[cold]
    fn search(&self, next: u32) -> Option<u32> {
        let behind = self.long.partition_point(|(code, _)| *code <= next.reverse_bits());
        Some(self.long[behind.checked_sub(1)?].1)
    }
}

/// Bits needed for numbers up to `x`.
pub(super) fn ilog(x: u32) -> u32 {
    32 - x.leading_zeros()
}

/// The lengths of the codes of all entries, 0 for an unused entry.
fn lengths(bits: &mut Lsb, entries: usize) -> Option<Vec<u8>> {
    let mut lengths = Vec::new();
    if bits.flag()? {
        // In ascending order: how many entries have each.
        let mut length = bits.read(5)? as u8 + 1;
        while lengths.len() < entries {
            let n = bits.read(ilog((entries - lengths.len()) as u32))? as usize;
            refuse!(n > entries - lengths.len() || length > 32, None);
            lengths.resize(lengths.len() + n, length);
            length += 1;
        }
        return Some(lengths);
    }
    let sparse = bits.flag()?;
    for _ in 0..entries {
        let used = !sparse || bits.flag()?;
        lengths.push(if used { bits.read(5)? as u8 + 1 } else { 0 });
    }
    Some(lengths)
}

/// The table of short codes and the list of long ones: each entry takes the first code of its length that is still free
/// (3.2.1). None if there are too many codes, or too few.
fn codes(lengths: &[u8]) -> Option<(Vec<u32>, Long)> {
    let longest = lengths.iter().copied().max().unwrap_or(0).into();
    let bits = QUICK.min(longest);
    let mut quick = vec![0u32; 1 << bits];
    let mut long =
        Vec::with_capacity(lengths.iter().filter(|&&length| u32::from(length) > bits).count());
    // The first code in the free subtree whose root lies at each depth. Codes are taken from the left, so the free
    // subtrees are deeper the further left they lie, and there is one at most at each depth.
    let mut free = [None; 33];
    free[0] = Some(0u32);
    for (entry, &length) in lengths.iter().enumerate().filter(|(_, &length)| length > 0) {
        let depth = (0..=usize::from(length)).rev().find(|&depth| free[depth].is_some())?;
        let code = free[depth].take()?;
        for (depth, free) in
            free.iter_mut().enumerate().take(usize::from(length) + 1).skip(depth + 1)
        {
            *free = Some(code | 1 << (32 - depth));
        }
        let word = (entry as u32) << LENGTH | u32::from(length);
        if u32::from(length) <= bits {
            for place in quick.iter_mut().skip(code.reverse_bits() as usize).step_by(1 << length) {
                *place = word;
            }
        } else {
            long.push((code, word));
        }
    }
    match lengths.iter().filter(|&&length| length > 0).count() {
        0 => {}
        // The only code is a bit of either value.
        1 if longest == 1 => quick = vec![quick[0]; 2],
        _ if free.iter().any(Option::is_some) => return None,
        _ => long.sort_unstable(),
    }
    Some((quick, long))
}

/// The vectors of all entries (3.2.1 and 3.3).
fn vectors(bits: &mut Lsb, kind: u32, n: u64, entries: u32, dimensions: u32) -> Option<Vec<f32>> {
    let (low, step) = (float(bits.read(32)?), float(bits.read(32)?));
    let width = bits.read(4)? + 1;
    let sums = bits.flag()?;
    let mut multiplicands = Vec::new();
    for _ in 0..n {
        multiplicands.push(bits.read(width)? as f32);
    }
    let mut values = Vec::with_capacity(entries as usize * dimensions as usize);
    for entry in 0..u64::from(entries) {
        let (mut last, mut divisor) = (0.0, 1);
        for i in 0..u64::from(dimensions) {
            let at =
                if kind == 1 { entry / divisor % n } else { entry * u64::from(dimensions) + i };
            let value = multiplicands[at as usize] * step + low + last;
            if sums {
                last = value;
            }
            if kind == 1 {
                divisor *= n;
            }
            values.push(value);
        }
    }
    Some(values)
}

/// A number in the format of 9.2.2.
fn float(x: u32) -> f32 {
    let mantissa = f64::from(x & 0x1f_ffff) * if x >> 31 == 1 { -1.0 } else { 1.0 };
    (mantissa * f64::from((x >> 21 & 0x3ff) as i32 - 788).exp2()) as f32
}

/// The largest n with n^dimensions <= entries.
fn lattice(entries: u32, dimensions: u32) -> Option<u64> {
    refuse!(dimensions == 0, None);
    let fits = |n: u64| {
        let mut power = 1u64;
        for _ in 0..dimensions {
            power *= n;
            if power > u64::from(entries) {
                return false;
            }
            if n < 2 {
                break;
            }
        }
        true
    };
    let mut n = f64::from(entries).powf(1.0 / f64::from(dimensions)) as u64;
    while fits(n + 1) {
        n += 1;
    }
    while n > 0 && !fits(n) {
        n -= 1;
    }
    Some(n)
}

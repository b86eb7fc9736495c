//! The codec: one channel of a frame, from its residuals and its predictor.

use super::super::bits::{unfold, Msb};
use crate::simd;

/// The integers that samples are decoded in. Arithmetic wraps, since only damaged frames overflow.
pub(super) trait Int: Copy + Into<i64> {
    fn wrap(x: i64) -> Self;
    /// The samples after the first `weights.len()` ones, which have `depth` bits: each is its residual + (sum of
    /// weights\[j\] x\[i - 1 - j\]) >> shift.
    fn predicted(
        bits: &mut Msb, weights: &[i32], shift: u32, depth: u32, out: &mut [Self],
    ) -> Option<()>;
}

impl Int for i64 {
    #[inline(always)]
    fn wrap(x: i64) -> Self {
        x
    }
    // Only for the side channel of 32-bit stereo, which is not worth specialised loops.
    fn predicted(
        bits: &mut Msb, weights: &[i32], shift: u32, _depth: u32, out: &mut [Self],
    ) -> Option<()> {
        residual(bits, out, weights, shift, &Any { weights, shift })
    }
}

impl Int for i32 {
    #[inline(always)]
    fn wrap(x: i64) -> Self {
        x as i32
    }
    #[inline(always)]
    fn predicted(
        bits: &mut Msb, weights: &[i32], shift: u32, depth: u32, out: &mut [Self],
    ) -> Option<()> {
        let largest =
            weights.iter().map(|w| u64::from(w.unsigned_abs())).sum::<u64>() << (depth - 1);
        // Whether no sum can overflow i32.
        let narrow = largest <= i32::MAX as u64;
        if let (1..=2, true, 0) = (weights.len(), narrow, shift) {
            match weights {
                [1] => return residual(bits, out, weights, shift, &First),
                [2, -1] => return residual(bits, out, weights, shift, &Second),
                _ => {}
            }
        }
        // With the number of weights as a constant, sums are unrolled and kept in registers.
        macro_rules! of_order {
            ($($n:literal)*) => {
                match weights.len() {
                    $($n if narrow => residual(bits, out, weights, shift, &Linear::<$n, true>::new(weights, shift)),
                    $n => residual(bits, out, weights, shift, &Linear::<$n, false>::new(weights, shift)),)*
                    _ => residual(bits, out, weights, shift, &Any { weights, shift }),
                }
            };
        }
        of_order!(0 1 2 3 4 5 6 7 8 9 10 11 12)
    }
}

simd::kernel! {
    /// Decodes one channel of one frame. None when it is invalid. Decoding codes is counting zeros and shifting by
    /// variable amounts, for which some sets have instructions.
    pub(super) fn subframe(bits: &mut Msb, depth: u32, out: &mut [i32]) -> Option<()>:
        bits subframe_any::<i32>; else subframe_any::<i32>
}

/// The same, compiled for any machine. The side channel of 32-bit stereo takes 64 bits.
#[inline(always)]
pub(super) fn subframe_any<T: Int>(bits: &mut Msb, depth: u32, out: &mut [T]) -> Option<()> {
    refuse!(bits.read(1) != 0, None);
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
            refuse!(precision == 16 || shift < 0, None);
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
            *x = T::wrap((*x).into() << wasted);
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
    fn restore<const M: usize>(&self, residuals: &[i32; M], x: &mut [T], at: usize) {
        let x = &mut x[at - N..at + M];
        for m in 0..M {
            // The newest sample last: the rest of the sum does not wait for it.
            let mut narrow = 0i32;
            let mut wide = 0i64;
            for j in (0..N).rev() {
                let (w, x): (_, i64) = (self.weights[j], x[m + N - 1 - j].into());
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
    fn restore<const M: usize>(&self, residuals: &[i32; M], x: &mut [T], at: usize) {
        let x = &mut x[at - 1..at + M];
        let mut last = x[0].into() as i32;
        for m in 0..M {
            last = last.wrapping_add(residuals[m]);
            x[m + 1] = T::wrap(i64::from(last));
        }
    }
}

impl<T: Int> Predictor<T> for Second {
    #[inline(always)]
    fn restore<const M: usize>(&self, residuals: &[i32; M], x: &mut [T], at: usize) {
        let x = &mut x[at - 2..at + M];
        let mut last = x[1].into() as i32;
        let mut step = last.wrapping_sub(x[0].into() as i32);
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
    let sum = weights
        .iter()
        .zip(before)
        .fold(0i64, |sum, (&w, &x)| sum.wrapping_add(i64::from(w).wrapping_mul(x.into())));
    x[at] = T::wrap((sum >> shift).wrapping_add(i64::from(residual)));
}

/// Decodes the Rice-coded residuals of the samples after the warm-up, and restores those samples. Both happen in one
/// loop: finding the next code and predicting the next sample are each a chain of dependent steps, and the two overlap.
/// `weights`: those of the preceding samples, the newest first.
#[inline(always)]
fn residual<T: Int>(
    bits: &mut Msb, out: &mut [T], weights: &[i32], shift: u32, predictor: &impl Predictor<T>,
) -> Option<()> {
    let width = match bits.read(2) {
        0 => 4,
        1 => 5,
        _ => return None,
    };
    let partitions = 1usize << bits.read(4);
    refuse!(!out.len().is_multiple_of(partitions), None);
    let size = out.len() / partitions;
    let mut first = weights.len();
    for partition in 0..partitions {
        let end = (partition + 1) * size;
        refuse!(first > end, None);
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
                    at += restore_some::<T, 4>(bits, k, out, at, weights, shift, predictor)?;
                }
            }
            while at + 2 <= end {
                at += restore_some::<T, 2>(bits, k, out, at, weights, shift, predictor)?;
            }
            if at < end {
                restore_one(weights, shift, bits.rice(k)?, out, at);
            }
        }
        // Past the end all bits are zeros: a partition without Rice codes would never notice.
        refuse!(bits.overrun(), None);
        first = end;
    }
    Some(())
}

/// Restores the samples from `at` on: `M` if their codes fit in one window, otherwise one. Returns their number.
#[inline(always)]
fn restore_some<T: Int, const M: usize>(
    bits: &mut Msb, k: u32, out: &mut [T], at: usize, weights: &[i32], shift: u32,
    predictor: &impl Predictor<T>,
) -> Option<usize> {
    let mut window = bits.window();
    let mut residuals = [0; M];
    let mut used = 0;
    for residual in &mut residuals {
        // If the codes do not fit in the window, these values are invalid and are not used.
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
        restore_one(weights, shift, bits.rice(k)?, out, at);
        Some(1)
    }
}

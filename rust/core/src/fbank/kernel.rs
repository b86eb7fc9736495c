//! Several frames at once, one in each lane, from samples to normalised log-mel energies.

use super::fft::{line, power, transform};
use super::{FilterBank, FrontEnd, Scratch, EMPHASIS, FLOOR, MAX_LANES};
use jaxtrain_decode::simd::{self, Lanes, Portable};

simd::kernel! {
    pub(super) fn group(s: &mut Scratch, t: &FilterBank, wave: &[f32], norm: (f32, f32), rows: &mut [f32]) -> f32:
        avx512 group_lanes::<simd::Avx512, simd::Avx2>,
        avx2 group_lanes::<simd::Avx2, simd::Avx2>;
        else group_lanes::<Portable, Portable>
}

/// As many frames as `V` has lanes. Sums over a frame's samples are those of `W`, so that a frame's values are the same
/// in 8 lanes and in 16. Returns the smallest value.
#[inline(always)]
pub(super) unsafe fn group_lanes<V: Lanes, W: Lanes>(
    s: &mut Scratch, t: &FilterBank, wave: &[f32], norm: (f32, f32), rows: &mut [f32],
) -> f32 {
    let FrontEnd { window: length, hop, n_mels, .. } = t.front_end;
    let n = rows.len() / n_mels;
    let inverse = 1.0 / f64::from(norm.1);
    let (mut frames, mut stride) = (wave, hop);
    if n < V::N {
        for (f, frame) in s.frames.chunks_exact_mut(length).enumerate().take(V::N) {
            if f < n {
                frame.copy_from_slice(&wave[f * hop..][..length]);
            } else {
                frame.fill(0.0);
            }
        }
        (frames, stride) = (&s.frames, length);
    }
    let (re, im) = (s.re.as_mut_ptr().cast::<f32>(), s.im.as_mut_ptr().cast::<f32>());
    let mels = s.mels.as_mut_ptr().cast::<f32>();
    windows::<V, W>(frames, stride, t, re, im);
    transform::<V>([re, im], t);
    power::<V>([re, im], t);
    bands::<V>(re, t, mels);
    for x in std::slice::from_raw_parts_mut(mels, n_mels * V::N) {
        let y = if V::FUSED { ln::<true>(x.max(FLOOR)) } else { ln::<false>(x.max(FLOOR)) };
        // This rounds as y / norm.1 does: no quotient of two float32 is so near to the middle of two others.
        *x = (f64::from(y - norm.0) * inverse) as f32;
    }
    simd::transpose(mels, V::N, [n_mels, n], rows.as_mut_ptr(), n_mels);
    least(rows)
}

/// Energies of all bands into `mels`, from the power of each bin in `power`.
#[inline(always)]
unsafe fn bands<V: Lanes>(power: *const f32, t: &FilterBank, mels: *mut f32) {
    for (b, band) in t.bands.iter().enumerate() {
        let places = &t.place[band.first..][..band.weights.len()];
        let mut sum = V::splat(0.0);
        for (&place, &w) in places.iter().zip(&band.weights) {
            sum = V::load(power.add(place as usize * V::N)).mul_add(V::splat(w), sum);
        }
        sum.store(mels.add(b * V::N));
    }
}

/// The smallest of some values, none of which is NaN. Many minima are taken at once, since in a single chain each
/// comparison waits for the one before.
#[inline(always)]
fn least(values: &[f32]) -> f32 {
    let mut least = [f32::INFINITY; 64];
    let chunks = values.chunks_exact(64);
    for (least, x) in least.iter_mut().zip(chunks.remainder()) {
        *least = *x;
    }
    for chunk in chunks {
        for (least, x) in least.iter_mut().zip(chunk) {
            *least = if *x < *least { *x } else { *least };
        }
    }
    let mut smallest = f32::INFINITY;
    for x in least {
        smallest = smallest.min(x);
    }
    smallest
}

/// DC removal, pre-emphasis and window of `V::N` frames, `stride` samples apart: even samples to `re`, odd ones to
/// `im`, one frame in each lane, and zeros after them.
#[inline(always)]
unsafe fn windows<V: Lanes, W: Lanes>(
    frames: &[f32], stride: usize, t: &FilterBank, re: *mut f32, im: *mut f32,
) {
    let length = t.front_end.window;
    assert!(
        length >= W::N && frames.len() >= (V::N - 1) * stride + length && t.window.len() == length
    );
    // The first and the last samples were always rounded twice here: the stream's bytes are a promise.
    let (fused, last) = (W::N, length - length % W::N);
    let mut means = [0.0; MAX_LANES];
    for (f, mean) in means.iter_mut().enumerate().take(V::N) {
        *mean = mean_of::<W>(&frames[f * stride..][..length]);
    }
    let mean = V::load(means.as_ptr());
    let mut before = V::splat(0.0);
    for i in (0..length / 4 * 4).step_by(4) {
        let x = V::fours(frames.as_ptr().add(i), stride);
        let to = line(i / 2, t.half) * V::N;
        let weights = t.window.as_ptr().add(i);
        if (fused..last).contains(&i) {
            four_samples::<V, true>(x, mean, &mut before, weights, re.add(to), im.add(to));
        } else {
            four_samples::<V, false>(x, mean, &mut before, weights, re.add(to), im.add(to));
        }
    }
    for j in length / 4 * 2..t.half {
        for (part, i) in [(re, 2 * j), (im, 2 * j + 1)] {
            let mut y = V::splat(0.0);
            if i < length {
                let now = one_sample::<V>(&frames[i..], stride).sub(mean);
                y = now.sub(before.mul(V::splat(EMPHASIS))).mul(V::splat(t.window[i]));
                before = now;
            }
            y.store(part.add(line(j, t.half) * V::N));
        }
    }
}

/// Pre-emphasis and window of four samples of each frame. `before` is the one before them, without its mean.
#[inline(always)]
unsafe fn four_samples<V: Lanes, const FUSED: bool>(
    x: [V; 4], mean: V, before: &mut V, weights: *const f32, re: *mut f32, im: *mut f32,
) {
    let emphasis = V::splat(EMPHASIS);
    for (k, x) in x.into_iter().enumerate() {
        let now = x.sub(mean);
        let y =
            if FUSED { before.neg_mul_add(emphasis, now) } else { now.sub(before.mul(emphasis)) };
        *before = now;
        let to = if k % 2 == 0 { re } else { im };
        y.mul(V::splat(*weights.add(k))).store(to.add(k / 2 * V::N));
    }
}

/// The first of the samples of `V::N` frames, `stride` samples apart.
#[inline(always)]
unsafe fn one_sample<V: Lanes>(frames: &[f32], stride: usize) -> V {
    let mut samples = [0.0; MAX_LANES];
    for (f, x) in samples.iter_mut().enumerate().take(V::N) {
        *x = frames[f * stride];
    }
    V::load(samples.as_ptr())
}

/// The mean of a frame. Its order is that of the lanes of `W`.
#[inline(always)]
unsafe fn mean_of<W: Lanes>(x: &[f32]) -> f32 {
    let n = x.len();
    let mut sums = [W::splat(0.0); 4];
    let fours = n - n % (4 * W::N);
    for i in (0..fours).step_by(4 * W::N) {
        for (j, sum) in sums.iter_mut().enumerate() {
            *sum = sum.add(W::load(x.as_ptr().add(i + j * W::N)));
        }
    }
    let mut sum = sums[0].add(sums[1]).add(sums[2].add(sums[3])).sum();
    for x in &x[fours..] {
        sum += x;
    }
    sum / n as f32
}

/// The natural logarithm of a positive normal number, within 2 units in the last place. Unlike `f32::ln`, the compiler
/// can vectorise it. `FUSED`: the machine multiplies and adds in one instruction; the result is the same.
///
/// x = 2^e m with m in \[sqrt 1/2, sqrt 2), s = (m - 1) / (m + 1): ln m = 2 atanh s = 2 (s + s^3 / 3 + ...), of which
/// the first omitted term is below 2e-9 of the first.
#[inline(always)]
pub(super) fn ln<const FUSED: bool>(x: f32) -> f32 {
    const SQRT_HALF: u32 = std::f32::consts::FRAC_1_SQRT_2.to_bits();
    // ln 2 in two parts, the first with few enough bits that e times it is exact.
    const LN_2_HIGH: f32 = 355.0 / 512.0;
    const LN_2_LOW: f32 = (std::f64::consts::LN_2 - LN_2_HIGH as f64) as f32;
    let bits = x.to_bits().wrapping_sub(SQRT_HALF);
    let e = (bits as i32 >> 23) as f32;
    let m = f32::from_bits((bits & 0x007f_ffff).wrapping_add(SQRT_HALF));
    let s = (m - 1.0) / (m + 1.0);
    let t = s * s;
    let ninth = if FUSED { ninth(t) } else { t / 9.0 };
    let tail = t * (1.0 / 3.0 + t * (0.2 + t * (1.0 / 7.0 + ninth)));
    2.0 * s + (2.0 * s * tail + e * LN_2_LOW) + e * LN_2_HIGH
}

/// x / 9, correctly rounded: the product with 1 / 9, and its remainder. A division takes ten times as long.
#[inline(always)]
pub(super) fn ninth(x: f32) -> f32 {
    let q = x * (1.0 / 9.0);
    (-q).mul_add(9.0, x).mul_add(1.0 / 9.0, q)
}

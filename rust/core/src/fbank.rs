//! Kaldi-compatible log-mel spectrograms of 32 kHz audio.
//!
//! 25 ms windows every 10 ms, 128 bands from 20 Hz to 16 kHz, natural log of the power. For each frame of 800
//! samples (only whole frames, Kaldi's `snip_edges`):
//!
//! 1. subtract the frame's mean (`remove_dc_offset`). Kaldi recipes also subtract the clip's mean first, which
//!    this makes a no-op;
//! 2. y\[i\] = x\[i\] - 0.97 x\[i - 1\] inside the frame. The rule for the first sample does not matter, since
//! 3. the symmetric Hann window 0.5 - 0.5 cos(2 pi i / 799) is 0 there;
//! 4. zero-pad to 1024, |FFT|²;
//! 5. triangles in the mel domain, mel(f) = 1127 ln(1 + f / 700): edges l + b d, l + (b + 1) d, l + (b + 2) d with
//!    l = mel(20), d = (mel(16000) - mel(20)) / 129, evaluated at mel(31.25 k) for k < 512, no area normalisation;
//! 6. ln(max(energy, 2⁻²³)).
//!
//! Formulas: Kaldi's feat/feature-window.cc and feat/mel-computations.cc. Tables are computed in float64, frames in
//! float32, several at a time with one frame in each SIMD lane: the transform then needs no shuffles, and the result of a
//! frame does not depend on its neighbours.

use std::f64::consts::TAU;
use std::sync::OnceLock;

use crate::simd::{self, Lanes, Portable};

/// Mel bands.
pub const N_MELS: usize = 128;
/// Samples in one frame: 25 ms at 32 kHz.
pub const WINDOW: usize = 800;
/// Samples from one frame to the next: 10 ms at 32 kHz.
pub const HOP: usize = 320;
/// Smallest band energy, float32's epsilon; its logarithm is the floor of every spectrogram.
pub const FLOOR: f32 = f32::EPSILON;
/// Mean and twice the standard deviation of log-mel energies over bird recordings (Bird-MAE): (x - MEAN) / SCALE.
pub const MEAN: f32 = -7.2;
pub const SCALE: f32 = 8.86;

/// Sample rate of the input in Hz.
pub const RATE: u32 = 32_000;

const SAMPLE_RATE: f64 = RATE as f64;
const N_FFT: usize = 1024;
/// A real transform of 1024 is a complex one of 512 over (even, odd) samples, and a little more.
const HALF: usize = N_FFT / 2;
const EMPHASIS: f32 = 0.97;
/// Frames computed together: a multiple of every `Lanes::N`.
const GROUP: usize = 8;

struct Band {
    first: usize,
    weights: Vec<f32>,
}

struct Tables {
    /// Half the Hann window: `power` needs the factor 1/2.
    window: [f32; WINDOW],
    /// exp(-i tau k / 512), re and im: the twiddles of the complex transform.
    re: [f32; HALF],
    im: [f32; HALF],
    /// exp(-i tau k / 1024) for k <= 256: they turn the complex transform into the real one.
    split_re: [f32; HALF / 2 + 1],
    split_im: [f32; HALF / 2 + 1],
    bands: Vec<Band>,
}

fn mel(hz: f64) -> f64 {
    1127.0 * (1.0 + hz / 700.0).ln()
}

fn tables() -> &'static Tables {
    static TABLES: OnceLock<Tables> = OnceLock::new();
    TABLES.get_or_init(|| {
        let angle = |k: usize, n: usize| -TAU * k as f64 / n as f64;
        let low = mel(20.0);
        let step = (mel(SAMPLE_RATE / 2.0) - low) / (N_MELS + 1) as f64;
        let weight = |b: usize, k: usize| {
            let m = (mel(k as f64 * SAMPLE_RATE / N_FFT as f64) - low) / step - b as f64;
            m.min(2.0 - m).max(0.0)
        };
        let bands = (0..N_MELS)
            .map(|b| {
                let inside = |k: &usize| weight(b, *k) > 0.0;
                // Low bands are narrower than a bin, so a band may have no bin at all.
                let first = (0..HALF).find(inside).unwrap_or(0);
                let weights = (first..HALF).take_while(inside).map(|k| weight(b, k) as f32).collect();
                Band { first, weights }
            })
            .collect();
        Tables {
            window: std::array::from_fn(|i| (0.25 - 0.25 * (TAU * i as f64 / (WINDOW - 1) as f64).cos()) as f32),
            re: std::array::from_fn(|k| angle(k, HALF).cos() as f32),
            im: std::array::from_fn(|k| angle(k, HALF).sin() as f32),
            split_re: std::array::from_fn(|k| angle(k, N_FFT).cos() as f32),
            split_im: std::array::from_fn(|k| angle(k, N_FFT).sin() as f32),
            bands,
        }
    })
}

#[repr(C, align(64))]
struct Scratch {
    /// One windowed frame in each row.
    frames: [[f32; WINDOW]; GROUP],
    /// The transform in place, one frame in each lane; `re` holds the power spectrum at the end.
    re: [[f32; GROUP]; HALF],
    im: [[f32; GROUP]; HALF],
    mels: [[f32; GROUP]; N_MELS],
}

/// The filter bank and its memory; nothing is allocated after `new`. One per thread.
pub struct Fbank {
    scratch: Box<Scratch>,
}

impl Default for Fbank {
    fn default() -> Self {
        Self::new()
    }
}

impl Fbank {
    pub fn new() -> Self {
        let scratch = Box::new(Scratch {
            frames: [[0.0; WINDOW]; GROUP],
            re: [[0.0; GROUP]; HALF],
            im: [[0.0; GROUP]; HALF],
            mels: [[0.0; GROUP]; N_MELS],
        });
        Self { scratch }
    }

    /// Complete frames in `n_samples`.
    pub fn n_frames(n_samples: usize) -> usize {
        if n_samples < WINDOW {
            0
        } else {
            1 + (n_samples - WINDOW) / HOP
        }
    }

    /// Natural-log mel energies of `wave` (32 kHz) into `out` \[n_frames(wave.len()), 128\].
    ///
    /// # Panics
    /// When `out` has another length.
    pub fn log_mel(&mut self, wave: &[f32], out: &mut [f32]) {
        assert_eq!(out.len(), Self::n_frames(wave.len()) * N_MELS, "out must hold n_frames * 128 values");
        let tables = tables();
        for (g, rows) in out.chunks_mut(GROUP * N_MELS).enumerate() {
            self.group(tables, &wave[g * GROUP * HOP..], rows);
        }
    }

    /// The spectrogram as a model reads it: the first `n_frames` frames of the log-mel spectrogram, missing ones filled with
    /// the minimum of the others (the floor where there are none), then (x + 7.2) / 8.86, into `out`
    /// \[n_frames, 128\].
    ///
    /// # Panics
    /// When `out` has another length.
    pub fn normalised(&mut self, wave: &[f32], n_frames: usize, out: &mut [f32]) {
        assert_eq!(out.len(), n_frames * N_MELS, "out must hold n_frames * 128 values");
        let n = Self::n_frames(wave.len()).min(n_frames);
        let (real, padding) = out.split_at_mut(n * N_MELS);
        let used = if n == 0 { 0 } else { WINDOW + (n - 1) * HOP };
        self.log_mel(&wave[..used], real);
        // Eight minima at once, since in a single chain each comparison waits for the one before; no value here is NaN.
        let mut least = [f32::INFINITY; 8];
        for eight in real.chunks_exact(8) {
            for (least, x) in least.iter_mut().zip(eight) {
                *least = least.min(*x);
            }
        }
        let least = least.into_iter().fold(f32::INFINITY, f32::min);
        padding.fill(if n == 0 { FLOOR.ln() } else { least });
        for x in out.iter_mut() {
            *x = (*x - MEAN) / SCALE;
        }
    }

    /// `rows.len() / 128 <= GROUP` frames, of which the first begins at wave\[0\].
    fn group(&mut self, tables: &Tables, wave: &[f32], rows: &mut [f32]) {
        #[cfg(target_arch = "x86_64")]
        if simd::avx2() {
            // SAFETY: the instruction set was just checked.
            unsafe { group_avx2(&mut self.scratch, tables, wave, rows) };
            return;
        }
        let _ = simd::avx2;
        // SAFETY: portable lanes need nothing of the machine.
        unsafe { group::<Portable>(&mut self.scratch, tables, wave, rows) };
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn group_avx2(s: &mut Scratch, t: &Tables, wave: &[f32], rows: &mut [f32]) {
    unsafe { group::<simd::Avx2>(s, t, wave, rows) }
}

/// # Safety
/// The machine must have the instruction set of `V`.
#[inline(always)]
unsafe fn group<V: Lanes>(s: &mut Scratch, t: &Tables, wave: &[f32], rows: &mut [f32]) {
    let n = rows.len() / N_MELS;
    for (f, frame) in s.frames.iter_mut().enumerate() {
        if f < n {
            unsafe { window::<V>(&wave[f * HOP..f * HOP + WINDOW], &t.window, frame) };
        } else {
            frame.fill(0.0);
        }
    }
    for j in 0..WINDOW / 2 {
        for f in 0..GROUP {
            s.re[j][f] = s.frames[f][2 * j];
            s.im[j][f] = s.frames[f][2 * j + 1];
        }
    }
    s.re[WINDOW / 2..].fill([0.0; GROUP]);
    s.im[WINDOW / 2..].fill([0.0; GROUP]);
    unsafe {
        let (re, im) = (s.re.as_mut_ptr().cast::<f32>(), s.im.as_mut_ptr().cast::<f32>());
        for lane in (0..GROUP).step_by(V::N) {
            transform::<V>(re.add(lane), im.add(lane), t);
            power::<V>(re.add(lane), im.add(lane), t);
            let mels = s.mels.as_mut_ptr().cast::<f32>().add(lane);
            for (b, band) in t.bands.iter().enumerate() {
                let mut sum = V::splat(0.0);
                for (k, &w) in band.weights.iter().enumerate() {
                    let at = re.add(lane + place(band.first + k) * GROUP);
                    sum = V::load(at).mul_add(V::splat(w), sum);
                }
                sum.store(mels.add(b * GROUP));
            }
        }
    }
    for x in s.mels.as_flattened_mut() {
        *x = ln(x.max(FLOOR));
    }
    for (f, row) in rows.chunks_exact_mut(N_MELS).enumerate() {
        for (x, mels) in row.iter_mut().zip(&s.mels) {
            *x = mels[f];
        }
    }
}

/// DC removal, pre-emphasis and window of one frame.
#[inline(always)]
unsafe fn window<V: Lanes>(x: &[f32], window: &[f32; WINDOW], out: &mut [f32; WINDOW]) {
    assert_eq!(x.len(), WINDOW);
    const { assert!(WINDOW.is_multiple_of(32) && 32usize.is_multiple_of(V::N)) };
    let mean = unsafe {
        let mut sums = [V::splat(0.0); 4];
        for i in (0..WINDOW).step_by(4 * V::N) {
            for (j, sum) in sums.iter_mut().enumerate() {
                *sum = sum.add(V::load(x.as_ptr().add(i + j * V::N)));
            }
        }
        sums[0].add(sums[1]).add(sums[2].add(sums[3])).sum() / WINDOW as f32
    };
    // The first samples one by one: the vector loop needs a sample before each (the very first has weight 0).
    out[0] = 0.0;
    for i in 1..V::N {
        out[i] = ((x[i] - mean) - EMPHASIS * (x[i - 1] - mean)) * window[i];
    }
    unsafe {
        let (mean, emphasis) = (V::splat(mean), V::splat(EMPHASIS));
        for i in (V::N..WINDOW).step_by(V::N) {
            let now = V::load(x.as_ptr().add(i)).sub(mean);
            let before = V::load(x.as_ptr().add(i - 1)).sub(mean);
            let y = before.neg_mul_add(emphasis, now).mul(V::load(window.as_ptr().add(i)));
            y.store(out.as_mut_ptr().add(i));
        }
    }
}

/// Where the transform leaves bin `k`: its three octal digits, reversed.
#[inline(always)]
fn place(k: usize) -> usize {
    (k & 7) << 6 | (k & 0o70) | k >> 6
}

/// Complex FFT of 512, decimation in frequency, three passes of radix 8, in place; bin k ends at `place(k)`.
/// Element p of lane l is at `re[p * GROUP + l]`.
#[inline(always)]
unsafe fn transform<V: Lanes>(re: *mut f32, im: *mut f32, t: &Tables) {
    unsafe {
        for span in [512, 64] {
            let stride = span / 8;
            for j in 0..stride {
                let mut twiddles = [(0.0, 0.0); 8];
                for (q, twiddle) in twiddles.iter_mut().enumerate() {
                    let k = j * q * (HALF / span);
                    *twiddle = (t.re[k], t.im[k]);
                }
                for block in (0..HALF).step_by(span) {
                    let x = butterfly::<V>(re, im, block + j, stride);
                    for q in 0..8 {
                        let (mut a, mut b) = x[q];
                        if q > 0 {
                            let (c, d) = (V::splat(twiddles[q].0), V::splat(twiddles[q].1));
                            (a, b) = (b.neg_mul_add(d, a.mul(c)), a.mul_add(d, b.mul(c)));
                        }
                        a.store(re.add((block + j + q * stride) * GROUP));
                        b.store(im.add((block + j + q * stride) * GROUP));
                    }
                }
            }
        }
        for block in (0..HALF).step_by(8) {
            for (q, (a, b)) in butterfly::<V>(re, im, block, 1).into_iter().enumerate() {
                a.store(re.add((block + q) * GROUP));
                b.store(im.add((block + q) * GROUP));
            }
        }
    }
}

/// The DFT of the 8 elements from `first` on, `stride` apart.
#[inline(always)]
unsafe fn butterfly<V: Lanes>(re: *const f32, im: *const f32, first: usize, stride: usize) -> [(V, V); 8] {
    unsafe {
        let mut x = [(V::splat(0.0), V::splat(0.0)); 8];
        for (m, x) in x.iter_mut().enumerate() {
            let at = (first + m * stride) * GROUP;
            *x = (V::load(re.add(at)), V::load(im.add(at)));
        }
        let mut sums = [x[0]; 4];
        let mut differences = [x[0]; 4];
        for m in 0..4 {
            sums[m] = (x[m].0.add(x[m + 4].0), x[m].1.add(x[m + 4].1));
            differences[m] = (x[m].0.sub(x[m + 4].0), x[m].1.sub(x[m + 4].1));
        }
        let r = V::splat(std::f32::consts::FRAC_1_SQRT_2);
        // Times exp(-i tau m / 8).
        let [o0, (a1, b1), (a2, b2), (a3, b3)] = differences;
        let minus = V::splat(0.0);
        let o1 = (a1.add(b1).mul(r), b1.sub(a1).mul(r));
        let o2 = (b2, minus.sub(a2));
        let o3 = (b3.sub(a3).mul(r), minus.sub(a3.add(b3)).mul(r));
        let [x0, x2, x4, x6] = four(sums[0], sums[1], sums[2], sums[3]);
        let [x1, x3, x5, x7] = four(o0, o1, o2, o3);
        [x0, x1, x2, x3, x4, x5, x6, x7]
    }
}

/// The DFT of 4 elements.
#[inline(always)]
unsafe fn four<V: Lanes>(x0: (V, V), x1: (V, V), x2: (V, V), x3: (V, V)) -> [(V, V); 4] {
    unsafe {
        let (s0, d0) = ((x0.0.add(x2.0), x0.1.add(x2.1)), (x0.0.sub(x2.0), x0.1.sub(x2.1)));
        let (s1, d1) = ((x1.0.add(x3.0), x1.1.add(x3.1)), (x1.0.sub(x3.0), x1.1.sub(x3.1)));
        [
            (s0.0.add(s1.0), s0.1.add(s1.1)),
            (d0.0.add(d1.1), d0.1.sub(d1.0)),
            (s0.0.sub(s1.0), s0.1.sub(s1.1)),
            (d0.0.sub(d1.1), d0.1.add(d1.0)),
        ]
    }
}

/// Power of bins 1..512 of the real transform, from the complex transform of (even, odd) samples, into `re` at
/// `place(k)`. With Z the complex one, E = Z\[k\] + conj Z\[512 - k\], T = -i exp(-i tau k / 1024) (Z\[k\] - conj
/// Z\[512 - k\]): 2 X\[k\] = E + T, 2 X\[512 - k\] = conj(E - T). The window already holds the factor 1/2.
#[inline(always)]
unsafe fn power<V: Lanes>(re: *mut f32, im: *const f32, t: &Tables) {
    unsafe {
        for k in 1..HALF / 2 {
            let (p, m) = (place(k) * GROUP, place(HALF - k) * GROUP);
            let (a, b) = (V::load(re.add(p)), V::load(im.add(p)));
            let (c, d) = (V::load(re.add(m)), V::load(im.add(m)));
            let (e_re, e_im) = (a.add(c), b.sub(d));
            let (o_re, o_im) = (b.add(d), c.sub(a));
            let (w_re, w_im) = (V::splat(t.split_re[k]), V::splat(t.split_im[k]));
            let t_re = o_im.neg_mul_add(w_im, o_re.mul(w_re));
            let t_im = o_im.mul_add(w_re, o_re.mul(w_im));
            let (x, y) = (e_re.add(t_re), e_im.add(t_im));
            x.mul_add(x, y.mul(y)).store(re.add(p));
            let (x, y) = (e_re.sub(t_re), e_im.sub(t_im));
            x.mul_add(x, y.mul(y)).store(re.add(m));
        }
        let middle = place(HALF / 2) * GROUP;
        let (x, y) = (V::load(re.add(middle)), V::load(im.add(middle)));
        x.mul_add(x, y.mul(y)).mul(V::splat(4.0)).store(re.add(middle));
    }
}

/// The natural logarithm of a positive normal number, within 2 units in the last place. Unlike `f32::ln`, the compiler can
/// vectorise it.
///
/// x = 2^e m with m in \[sqrt 1/2, sqrt 2), s = (m - 1) / (m + 1): ln m = 2 atanh s = 2 (s + s^3 / 3 + ...), of which
/// the first omitted term is below 2e-9 of the first.
#[inline(always)]
fn ln(x: f32) -> f32 {
    const SQRT_HALF: u32 = std::f32::consts::FRAC_1_SQRT_2.to_bits();
    // ln 2 in two parts, the first with few enough bits that e times it is exact.
    const LN_2_HIGH: f32 = 355.0 / 512.0;
    const LN_2_LOW: f32 = (std::f64::consts::LN_2 - LN_2_HIGH as f64) as f32;
    let bits = x.to_bits().wrapping_sub(SQRT_HALF);
    let e = (bits as i32 >> 23) as f32;
    let m = f32::from_bits((bits & 0x007f_ffff).wrapping_add(SQRT_HALF));
    let s = (m - 1.0) / (m + 1.0);
    let t = s * s;
    let tail = t * (1.0 / 3.0 + t * (0.2 + t * (1.0 / 7.0 + t / 9.0)));
    2.0 * s + (2.0 * s * tail + e * LN_2_LOW) + e * LN_2_HIGH
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ln_is_the_logarithm() {
        let mut worst = 0.0f64;
        for i in 0..2_000_000u32 {
            let x = f32::from_bits(f32::EPSILON.to_bits() + i * 300);
            let exact = f64::from(x).ln();
            worst = worst.max((f64::from(ln(x)) - exact).abs() / exact.abs().max(0.1));
        }
        assert!(worst < 2.5e-7, "{worst:e}");
        assert_eq!(ln(FLOOR), FLOOR.ln());
    }

    /// The formula of the module's documentation, slowly and in float64.
    fn reference(wave: &[f32]) -> Vec<f64> {
        let window: Vec<f64> = (0..WINDOW).map(|i| 0.5 - 0.5 * (TAU * i as f64 / 799.0).cos()).collect();
        let mut out = Vec::new();
        for frame in 0..Fbank::n_frames(wave.len()) {
            let x: Vec<f64> = wave[frame * HOP..][..WINDOW].iter().map(|&x| f64::from(x)).collect();
            let mean = x.iter().sum::<f64>() / WINDOW as f64;
            let y: Vec<f64> =
                (0..WINDOW).map(|i| ((x[i] - mean) - 0.97 * (x[i.max(1) - 1] - mean)) * window[i]).collect();
            let power: Vec<f64> = (0..HALF)
                .map(|k| {
                    let angle = |i: usize| TAU * ((i * k) % N_FFT) as f64 / N_FFT as f64;
                    let re: f64 = y.iter().enumerate().map(|(i, y)| y * angle(i).cos()).sum();
                    let im: f64 = y.iter().enumerate().map(|(i, y)| y * angle(i).sin()).sum();
                    re * re + im * im
                })
                .collect();
            let low = mel(20.0);
            let step = (mel(16000.0) - low) / 129.0;
            for b in 0..N_MELS {
                let energy: f64 = (0..HALF)
                    .map(|k| {
                        let at = (mel(k as f64 * 31.25) - low) / step - b as f64;
                        at.min(2.0 - at).max(0.0) * power[k]
                    })
                    .sum();
                out.push(energy.max(f64::from(FLOOR)).ln());
            }
        }
        out
    }

    fn noise(n: usize) -> Vec<f32> {
        let mut state = 1u32;
        (0..n)
            .map(|_| {
                state = state.wrapping_mul(1664525).wrapping_add(1013904223);
                (state >> 8) as f32 / (1 << 23) as f32 - 1.0
            })
            .collect()
    }

    #[test]
    fn equals_the_formula_in_float64_with_every_instruction_set() {
        // More frames than one group, and not a multiple of it.
        let wave = noise(WINDOW + 10 * HOP + 17);
        let expected = reference(&wave);
        let mut out = vec![0.0; expected.len()];
        Fbank::new().log_mel(&wave, &mut out);
        let mut portable = vec![0.0; expected.len()];
        let mut scratch = Fbank::new().scratch;
        for (g, rows) in portable.chunks_mut(GROUP * N_MELS).enumerate() {
            // SAFETY: portable lanes need nothing of the machine.
            unsafe { group::<Portable>(&mut scratch, tables(), &wave[g * GROUP * HOP..], rows) };
        }
        for got in [out, portable] {
            let worst = got.iter().zip(&expected).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max);
            assert!(worst < 1e-3, "{worst}");
        }
    }

    #[test]
    fn a_frame_does_not_depend_on_its_place() {
        let wave = noise(WINDOW + 20 * HOP);
        let mut whole = vec![0.0; 21 * N_MELS];
        let mut fbank = Fbank::new();
        fbank.log_mel(&wave, &mut whole);
        for f in [0, 7, 8, 13, 20] {
            let mut one = vec![0.0; N_MELS];
            fbank.log_mel(&wave[f * HOP..f * HOP + WINDOW], &mut one);
            assert_eq!(one, whole[f * N_MELS..(f + 1) * N_MELS]);
        }
    }

    #[test]
    fn missing_frames_hold_the_minimum_and_no_frame_is_the_floor() {
        let mut fbank = Fbank::new();
        let wave = noise(WINDOW + HOP);
        let mut rows = vec![0.0; 2 * N_MELS];
        fbank.log_mel(&wave, &mut rows);
        let least = rows.iter().copied().fold(f32::INFINITY, f32::min);
        let mut out = vec![f32::NAN; 4 * N_MELS];
        fbank.normalised(&wave, 4, &mut out);
        assert_eq!(out[..2 * N_MELS], rows.iter().map(|x| (x + 7.2) / 8.86).collect::<Vec<_>>());
        assert!(out[2 * N_MELS..].iter().all(|x| *x == (least + 7.2) / 8.86));
        fbank.normalised(&wave, 1, &mut out[..N_MELS]);
        assert_eq!(out[..N_MELS], rows[..N_MELS].iter().map(|x| (x + 7.2) / 8.86).collect::<Vec<_>>());
        fbank.normalised(&wave[..WINDOW - 1], 1, &mut out[..N_MELS]);
        assert!(out[..N_MELS].iter().all(|x| *x == (FLOOR.ln() + 7.2) / 8.86));
    }

    #[test]
    fn any_finite_input_gives_finite_rows() {
        let mut fbank = Fbank::new();
        let mut out = vec![0.0; N_MELS];
        for scale in [0.0, 1e-45, 1e-20, 1e10, f32::MAX] {
            let wave: Vec<f32> = noise(WINDOW).iter().map(|x| x * scale).collect();
            fbank.log_mel(&wave, &mut out);
            assert!(out.iter().all(|x| x.is_finite()), "{scale}");
        }
    }
}

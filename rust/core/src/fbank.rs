//! Kaldi-compatible log-mel spectrograms, by a front end of one's choice.
//!
//! A front end has a sample rate, windows of W samples every H, B bands from one frequency to another. For each frame of W
//! samples (only whole frames, Kaldi's `snip_edges`):
//!
//! 1. subtract the frame's mean (`remove_dc_offset`). Kaldi recipes also subtract the clip's mean first, which
//!    this makes a no-op;
//! 2. y\[i\] = x\[i\] - 0.97 x\[i - 1\] inside the frame. The rule for the first sample does not matter, since
//! 3. the symmetric Hann window 0.5 - 0.5 cos(2 pi i / (W - 1)) is 0 there;
//! 4. zero-pad to N, the next power of two, |FFT|²;
//! 5. triangles in the mel domain, mel(f) = 1127 ln(1 + f / 700): edges l + b d, l + (b + 1) d, l + (b + 2) d with
//!    l = mel(f_min), d = (mel(f_max) - l) / (B + 1), evaluated at mel(k rate / N) for k < N / 2, no area normalisation;
//! 6. ln(max(energy, 2⁻²³)).
//!
//! Formulas: Kaldi's feat/feature-window.cc and feat/mel-computations.cc. Tables are computed in float64, frames in
//! float32, several at a time with one frame in each SIMD lane: the transform then needs no shuffles, and the result of a
//! frame does not depend on its neighbours.

use std::f64::consts::TAU;
use std::sync::Arc;

use crate::error::Error;
use jaxtrain_decode::simd::{self, Lanes, Portable};
use jaxtrain_decode::RATES;

/// Smallest band energy, float32's epsilon; its logarithm is the floor of every spectrogram.
pub const FLOOR: f32 = f32::EPSILON;

const EMPHASIS: f32 = 0.97;
/// Frames that are computed together at most, one in each lane.
const MOST_LANES: usize = 16;
/// Samples of a window.
const WINDOWS: std::ops::RangeInclusive<usize> = 16..=32_768;
const MOST_HOP: usize = 1 << 20;
const MOST_MELS: usize = 4096;

/// What a spectrogram is made of.
#[derive(Clone, Debug, PartialEq)]
pub struct FrontEnd {
    pub sample_rate: u32, // Hz of the waveform
    pub window: usize,    // samples of a frame
    pub hop: usize,       // samples from one frame to the next
    pub n_mels: usize,    // bands
    pub f_min: f64,       // Hz, where the first band begins
    pub f_max: f64,       // Hz, where the last band ends
    pub mean: f64,        // of log-mel energies: a model reads (x - mean) / (2 std)
    pub std: f64,         // their standard deviation
}

impl Default for FrontEnd {
    /// 25 ms every 10 ms at 32 kHz, 128 bands from 20 Hz on, and the mean and deviation over bird recordings of Bird-MAE.
    fn default() -> Self {
        Self {
            sample_rate: 32_000,
            window: 800,
            hop: 320,
            n_mels: 128,
            f_min: 20.0,
            f_max: 16_000.0,
            mean: -7.2,
            std: 4.43,
        }
    }
}

impl FrontEnd {
    /// Complete frames in `n_samples`.
    pub fn n_frames(&self, n_samples: usize) -> usize {
        if n_samples < self.window {
            0
        } else {
            1 + (n_samples - self.window) / self.hop
        }
    }

    fn check(&self) -> Result<(), Error> {
        let fail = |what: String| Err(Error::Config(what));
        let Self { sample_rate, window, hop, n_mels, f_min, f_max, mean, std } = *self;
        let half = f64::from(sample_rate) / 2.0;
        if !RATES.contains(&sample_rate) {
            return fail(format!("sample_rate = {sample_rate} Hz must lie in {RATES:?}"));
        }
        if !WINDOWS.contains(&window) {
            return fail(format!("window = {window} samples must lie in {WINDOWS:?}"));
        }
        if !(1..=MOST_HOP).contains(&hop) || !(1..=MOST_MELS).contains(&n_mels) {
            return fail(format!("hop = {hop} must lie in 1..={MOST_HOP}, and n_mels = {n_mels} in 1..={MOST_MELS}"));
        }
        if !(0.0 <= f_min && f_min < f_max && f_max <= half) {
            return fail(format!("f_min = {f_min} and f_max = {f_max} Hz must increase from 0 to {half} Hz"));
        }
        if !(mean.is_finite() && std.is_finite() && std > 0.0) {
            return fail(format!("mean = {mean} and std = {std} must be finite, and std above 0"));
        }
        Ok(())
    }
}

struct Band {
    first: usize,
    weights: Vec<f32>,
}

/// The tables of a front end, which threads share.
pub struct FilterBank {
    front_end: FrontEnd,
    half: usize, // a real transform of N is a complex one of N / 2 over (even, odd) samples, and a little more
    mean: f32,
    scale: f32,
    /// Half the Hann window: `power` needs the factor 1/2.
    window: Vec<f32>,
    /// exp(-i tau k / half), re and im: the twiddles of the complex transform.
    re: Vec<f32>,
    im: Vec<f32>,
    /// exp(-i tau k / N) for k <= half / 2: they turn the complex transform into the real one.
    split_re: Vec<f32>,
    split_im: Vec<f32>,
    /// Where the transform leaves each bin.
    place: Vec<u32>,
    bands: Vec<Band>,
}

fn mel(hz: f64) -> f64 {
    1127.0 * (1.0 + hz / 700.0).ln()
}

impl FilterBank {
    /// # Errors
    /// A front end whose values are out of range.
    pub fn new(front_end: FrontEnd) -> Result<Self, Error> {
        front_end.check()?;
        let FrontEnd { window, n_mels, .. } = front_end;
        let n_fft = window.next_power_of_two();
        let half = n_fft / 2;
        let rate = f64::from(front_end.sample_rate);
        let angle = |k: usize, n: usize| -TAU * k as f64 / n as f64;
        let low = mel(front_end.f_min);
        let step = (mel(front_end.f_max) - low) / (n_mels + 1) as f64;
        let weight = |b: usize, k: usize| {
            let m = (mel(k as f64 * rate / n_fft as f64) - low) / step - b as f64;
            m.min(2.0 - m).max(0.0)
        };
        // Edges of bands as bins, so that each band is looked for where it is.
        let bin = |m: f64| (700.0 * ((m / 1127.0).exp() - 1.0) * n_fft as f64 / rate) as usize;
        let bands = (0..n_mels)
            .map(|b| {
                let inside = |k: &usize| weight(b, *k) > 0.0;
                let from = bin(low + b as f64 * step).saturating_sub(1);
                let to = (bin(low + (b + 2) as f64 * step) + 2).min(half);
                // Low bands are narrower than a bin, so a band may have no bin at all.
                let first = (from..to).find(inside).unwrap_or(0);
                let weights = (first..to).take_while(inside).map(|k| weight(b, k) as f32).collect();
                Band { first, weights }
            })
            .collect();
        Ok(Self {
            half,
            mean: front_end.mean as f32,
            scale: (2.0 * front_end.std) as f32,
            window: (0..window).map(|i| (0.25 - 0.25 * (TAU * i as f64 / (window - 1) as f64).cos()) as f32).collect(),
            re: (0..half).map(|k| angle(k, half).cos() as f32).collect(),
            im: (0..half).map(|k| angle(k, half).sin() as f32).collect(),
            split_re: (0..=half / 2).map(|k| angle(k, n_fft).cos() as f32).collect(),
            split_im: (0..=half / 2).map(|k| angle(k, n_fft).sin() as f32).collect(),
            place: (0..half).map(|k| place(k, half) as u32).collect(),
            bands,
            front_end,
        })
    }

    pub fn front_end(&self) -> &FrontEnd {
        &self.front_end
    }
}

impl Default for FilterBank {
    fn default() -> Self {
        Self::new(FrontEnd::default()).expect("the default front end is in range")
    }
}

/// Values side by side, of one element of a transform in each lane or of two.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Line([f32; MOST_LANES]);

struct Scratch {
    /// Windowed frames, one after the other, each of an even number of samples.
    frames: Vec<f32>,
    /// The transform in place, one frame in each lane; `re` holds the power spectrum at the end.
    re: Vec<Line>,
    im: Vec<Line>,
    mels: Vec<Line>,
}

/// A filter bank and its memory; nothing is allocated after `new`. One per thread.
pub struct Fbank {
    bank: Arc<FilterBank>,
    scratch: Scratch,
    lanes: usize, // frames that are computed together
}

impl Default for Fbank {
    fn default() -> Self {
        Self::new(Arc::default())
    }
}

impl Fbank {
    pub fn new(bank: Arc<FilterBank>) -> Self {
        let lanes = if simd::avx512() { MOST_LANES } else { 8 };
        let lines = |n: usize| vec![Line([0.0; MOST_LANES]); (n * lanes).div_ceil(MOST_LANES)];
        let scratch = Scratch {
            frames: vec![0.0; lanes * bank.window.len().next_multiple_of(2)],
            re: lines(bank.half),
            im: lines(bank.half),
            mels: lines(bank.front_end.n_mels),
        };
        Self { bank, scratch, lanes }
    }

    pub fn front_end(&self) -> &FrontEnd {
        &self.bank.front_end
    }

    /// Natural-log mel energies of `wave`, at the front end's rate, into `out` \[n_frames(wave.len()), n_mels\].
    ///
    /// # Panics
    /// When `out` has another length.
    pub fn log_mel(&mut self, wave: &[f32], out: &mut [f32]) {
        self.groups(wave, (0.0, 1.0), out);
    }

    /// The spectrogram as a model reads it: the first `n_frames` frames of the log-mel spectrogram, missing ones filled with
    /// the minimum of the others (the floor where there are none), then (x - mean) / (2 std), into `out`
    /// \[n_frames, n_mels\].
    ///
    /// # Panics
    /// When `out` has another length.
    pub fn normalised(&mut self, wave: &[f32], n_frames: usize, out: &mut [f32]) {
        let FrontEnd { window, hop, n_mels, .. } = self.bank.front_end;
        assert_eq!(out.len(), n_frames * n_mels, "out must hold n_frames * n_mels values");
        let n = self.bank.front_end.n_frames(wave.len()).min(n_frames);
        let (real, padding) = out.split_at_mut(n * n_mels);
        let used = if n == 0 { 0 } else { window + (n - 1) * hop };
        self.groups(&wave[..used], (self.bank.mean, self.bank.scale), real);
        // Eight minima at once, since in a single chain each comparison waits for the one before; no value here is NaN.
        let mut least = [f32::INFINITY; 8];
        let eights = real.chunks_exact(8);
        for (least, x) in least.iter_mut().zip(eights.remainder()) {
            *least = *x;
        }
        for eight in eights {
            for (least, x) in least.iter_mut().zip(eight) {
                *least = least.min(*x);
            }
        }
        let least = least.into_iter().fold(f32::INFINITY, f32::min);
        padding.fill(if n == 0 { (FLOOR.ln() - self.bank.mean) / self.bank.scale } else { least });
    }

    /// (log-mel energy - mean) / scale of all frames of `wave`.
    fn groups(&mut self, wave: &[f32], norm: (f32, f32), out: &mut [f32]) {
        let FrontEnd { hop, n_mels, .. } = self.bank.front_end;
        let n_frames = self.bank.front_end.n_frames(wave.len());
        assert_eq!(out.len(), n_frames * n_mels, "out must hold n_frames * n_mels values");
        for (g, rows) in out.chunks_mut(self.lanes * n_mels).enumerate() {
            self.group(&wave[g * self.lanes * hop..], norm, rows);
        }
    }

    /// `rows.len() / n_mels <= self.lanes` frames, of which the first begins at wave\[0\].
    fn group(&mut self, wave: &[f32], norm: (f32, f32), rows: &mut [f32]) {
        #[cfg(target_arch = "x86_64")]
        if self.lanes == MOST_LANES {
            // SAFETY: `new` checked the instruction set.
            unsafe { group_avx512(&mut self.scratch, &self.bank, wave, norm, rows) };
            return;
        } else if simd::avx2() {
            // SAFETY: the instruction set was just checked.
            unsafe { group_avx2(&mut self.scratch, &self.bank, wave, norm, rows) };
            return;
        }
        let _ = simd::avx2;
        // SAFETY: portable lanes need nothing of the machine.
        unsafe { group::<Portable, Portable>(&mut self.scratch, &self.bank, wave, norm, rows) };
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn group_avx2(s: &mut Scratch, t: &FilterBank, wave: &[f32], norm: (f32, f32), rows: &mut [f32]) {
    unsafe { group::<simd::Avx2, simd::Avx2>(s, t, wave, norm, rows) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,avx512f")]
unsafe fn group_avx512(s: &mut Scratch, t: &FilterBank, wave: &[f32], norm: (f32, f32), rows: &mut [f32]) {
    unsafe { group::<simd::Avx512, simd::Avx2>(s, t, wave, norm, rows) }
}

/// As many frames as `V` has lanes. Sums over a frame's samples are those of `W`, so that a frame's values are the same in
/// 8 lanes and in 16.
///
/// # Safety
/// The machine must have the instruction sets of `V` and `W`.
#[inline(always)]
unsafe fn group<V: Lanes, W: Lanes>(s: &mut Scratch, t: &FilterBank, wave: &[f32], norm: (f32, f32), rows: &mut [f32]) {
    let FrontEnd { window: length, hop, n_mels, .. } = t.front_end;
    let (n, padded) = (rows.len() / n_mels, length.next_multiple_of(2));
    for (f, frame) in s.frames.chunks_exact_mut(padded).enumerate().take(V::N) {
        if f < n {
            unsafe { window::<V, W>(&wave[f * hop..f * hop + length], &t.window, &mut frame[..length]) };
        } else {
            frame.fill(0.0);
        }
    }
    let frames = &s.frames[..V::N * padded];
    unsafe {
        let (re, im) = (s.re.as_mut_ptr().cast::<f32>(), s.im.as_mut_ptr().cast::<f32>());
        let mels = s.mels.as_mut_ptr().cast::<f32>();
        interleave(frames, padded, V::N, re, im);
        for j in padded / 2..t.half {
            V::splat(0.0).store(re.add(j * V::N));
            V::splat(0.0).store(im.add(j * V::N));
        }
        transform::<V>(re, im, t);
        power::<V>(re, im, t);
        for (b, band) in t.bands.iter().enumerate() {
            let mut sum = V::splat(0.0);
            let places = &t.place[band.first..][..band.weights.len()];
            for (&place, &w) in places.iter().zip(&band.weights) {
                sum = V::load(re.add(place as usize * V::N)).mul_add(V::splat(w), sum);
            }
            sum.store(mels.add(b * V::N));
        }
        for x in std::slice::from_raw_parts_mut(mels, n_mels * V::N) {
            *x = (ln(x.max(FLOOR)) - norm.0) / norm.1;
        }
        simd::transpose(mels, V::N, [n_mels, n], rows.as_mut_ptr(), n_mels);
    }
}

/// Even and odd samples of frames of `padded` samples, one frame in each lane. Not inlined: with AVX-512 the
/// compiler would scatter single values, which took a third of the whole time.
///
/// # Safety
/// `frames` holds `lanes` frames, a multiple of 8, and `re` and `im` have `lanes` values for each pair of samples.
#[inline(never)]
unsafe fn interleave(frames: &[f32], padded: usize, lanes: usize, re: *mut f32, im: *mut f32) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the instruction set was just checked, and the caller's promises are the same.
    let done = if simd::avx2() { unsafe { interleave_avx2(frames, padded, lanes, re, im) } } else { 0 };
    #[cfg(not(target_arch = "x86_64"))]
    let done = 0;
    for j in done..padded / 2 {
        for f in 0..lanes {
            unsafe {
                *re.add(j * lanes + f) = *frames.get_unchecked(f * padded + 2 * j);
                *im.add(j * lanes + f) = *frames.get_unchecked(f * padded + 2 * j + 1);
            }
        }
    }
}

/// The same for all pairs of samples, two at a time, and returns how many: 8 frames of them are 8 loads and 8 shuffles.
///
/// # Safety
/// As `interleave`, and the machine must have AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn interleave_avx2(frames: &[f32], padded: usize, lanes: usize, re: *mut f32, im: *mut f32) -> usize {
    use std::arch::x86_64::*;

    let pairs = padded / 4 * 2;
    for first in (0..lanes).step_by(8) {
        for j in (0..pairs).step_by(2) {
            unsafe {
                let at = frames.as_ptr().add(first * padded + 2 * j);
                // The samples of frames f and f + 4.
                let mut rows = [_mm256_setzero_ps(); 4];
                for (f, row) in rows.iter_mut().enumerate() {
                    let low = _mm256_castps128_ps256(_mm_loadu_ps(at.add(f * padded)));
                    *row = _mm256_insertf128_ps::<1>(low, _mm_loadu_ps(at.add((f + 4) * padded)));
                }
                let [a, b, c, d] = [rows[0], rows[1], rows[2], rows[3]];
                let (a, b) = (_mm256_castps_pd(a), _mm256_castps_pd(b));
                let (c, d) = (_mm256_castps_pd(c), _mm256_castps_pd(d));
                for (k, (x, y)) in [
                    (_mm256_unpacklo_pd(a, b), _mm256_unpacklo_pd(c, d)),
                    (_mm256_unpackhi_pd(a, b), _mm256_unpackhi_pd(c, d)),
                ]
                .into_iter()
                .enumerate()
                {
                    let (x, y) = (_mm256_castpd_ps(x), _mm256_castpd_ps(y));
                    let to = (j + k) * lanes + first;
                    _mm256_storeu_ps(re.add(to), _mm256_shuffle_ps::<0x88>(x, y));
                    _mm256_storeu_ps(im.add(to), _mm256_shuffle_ps::<0xdd>(x, y));
                }
            }
        }
    }
    pairs
}

/// DC removal, pre-emphasis and window of one frame. Its sum and its edges are those of the lanes of `W`.
#[inline(always)]
unsafe fn window<V: Lanes, W: Lanes>(x: &[f32], window: &[f32], out: &mut [f32]) {
    let n = x.len();
    assert!(n >= W::N && window.len() == n && out.len() == n);
    let mean = unsafe {
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
    };
    // The first samples one by one: the vector loop needs a sample before each (the very first has weight 0). And the last.
    out[0] = 0.0;
    let lanes = n - n % W::N;
    for part in [1..W::N, lanes..n] {
        for i in part {
            out[i] = ((x[i] - mean) - EMPHASIS * (x[i - 1] - mean)) * window[i];
        }
    }
    unsafe {
        let mut i = W::N;
        // Of a window of `V::N` samples or more, until `V`'s lanes take over; they leave less than one of their vectors.
        while i < lanes {
            if i >= V::N && i + V::N <= lanes {
                emphasise::<V>(x, mean, window, out, i);
                i += V::N;
            } else {
                emphasise::<W>(x, mean, window, out, i);
                i += W::N;
            }
        }
    }
}

/// `V::N` samples of a windowed frame from number `i` on.
#[inline(always)]
unsafe fn emphasise<V: Lanes>(x: &[f32], mean: f32, window: &[f32], out: &mut [f32], i: usize) {
    unsafe {
        let mean = V::splat(mean);
        let now = V::load(x.as_ptr().add(i)).sub(mean);
        let before = V::load(x.as_ptr().add(i - 1)).sub(mean);
        let y = before.neg_mul_add(V::splat(EMPHASIS), now).mul(V::load(window.as_ptr().add(i)));
        y.store(out.as_mut_ptr().add(i));
    }
}

/// The radix of the pass over spans of `span` elements: 8, or in the last one what is left.
#[inline(always)]
fn radix(span: usize) -> usize {
    if span.is_multiple_of(8) {
        8
    } else {
        span
    }
}

/// Where a transform of `half` elements leaves bin `k`: its digits, one of each pass, reversed.
fn place(mut k: usize, half: usize) -> usize {
    let (mut place, mut span) = (0, half);
    while span > 1 {
        let r = radix(span);
        span /= r;
        place += k % r * span;
        k /= r;
    }
    place
}

/// Complex FFT of t.half, decimation in frequency, passes of radix 8 and a last one of what is left, in place; bin k ends at
/// `t.place[k]`. Element p of lane l is at `re[p * V::N + l]`. After the first pass its parts are independent: one part
/// after the other stays in the nearest cache.
#[inline(always)]
unsafe fn transform<V: Lanes>(re: *mut f32, im: *mut f32, t: &FilterBank) {
    let whole = t.half;
    let part = if radix(whole) < whole { whole / 8 } else { whole };
    unsafe {
        if part < whole {
            pass::<V>(re, im, t, 0..whole, whole);
        }
        for first in (0..whole).step_by(part) {
            let mut span = part;
            while radix(span) < span {
                pass::<V>(re, im, t, first..first + part, span);
                span /= 8;
            }
            for block in (first..first + part).step_by(span) {
                match span {
                    8 => put(re, im, block, butterfly::<V>(re, im, block, 1)),
                    4 => {
                        let [x0, x1, x2, x3] = take::<V, 4>(re, im, block, 1);
                        put(re, im, block, four(x0, x1, x2, x3));
                    }
                    _ => {
                        let [x, y] = take::<V, 2>(re, im, block, 1);
                        put(re, im, block, [(x.0.add(y.0), x.1.add(y.1)), (x.0.sub(y.0), x.1.sub(y.1))]);
                    }
                }
            }
        }
    }
}

/// A pass of radix 8 over the spans of `places`.
#[inline(always)]
unsafe fn pass<V: Lanes>(re: *mut f32, im: *mut f32, t: &FilterBank, places: std::ops::Range<usize>, span: usize) {
    let stride = span / 8;
    for j in 0..stride {
        let mut twiddles = [(0.0, 0.0); 8];
        for (q, twiddle) in twiddles.iter_mut().enumerate() {
            let k = j * q * (t.half / span);
            *twiddle = (t.re[k], t.im[k]);
        }
        for block in places.clone().step_by(span) {
            unsafe {
                let x = butterfly::<V>(re, im, block + j, stride);
                for q in 0..8 {
                    let (mut a, mut b) = x[q];
                    if q > 0 {
                        let (c, d) = (V::splat(twiddles[q].0), V::splat(twiddles[q].1));
                        (a, b) = (b.neg_mul_add(d, a.mul(c)), a.mul_add(d, b.mul(c)));
                    }
                    a.store(re.add((block + j + q * stride) * V::N));
                    b.store(im.add((block + j + q * stride) * V::N));
                }
            }
        }
    }
}

/// The R elements from `first` on, `stride` apart.
#[inline(always)]
unsafe fn take<V: Lanes, const R: usize>(re: *const f32, im: *const f32, first: usize, stride: usize) -> [(V, V); R] {
    unsafe {
        let mut x = [(V::splat(0.0), V::splat(0.0)); R];
        for (m, x) in x.iter_mut().enumerate() {
            let at = (first + m * stride) * V::N;
            *x = (V::load(re.add(at)), V::load(im.add(at)));
        }
        x
    }
}

/// Leaves R elements from `first` on, side by side.
#[inline(always)]
unsafe fn put<V: Lanes, const R: usize>(re: *mut f32, im: *mut f32, first: usize, x: [(V, V); R]) {
    for (q, (a, b)) in x.into_iter().enumerate() {
        unsafe {
            a.store(re.add((first + q) * V::N));
            b.store(im.add((first + q) * V::N));
        }
    }
}

/// The DFT of the 8 elements from `first` on, `stride` apart.
#[inline(always)]
unsafe fn butterfly<V: Lanes>(re: *const f32, im: *const f32, first: usize, stride: usize) -> [(V, V); 8] {
    unsafe {
        let x = take::<V, 8>(re, im, first, stride);
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

/// Power of bins 1..half of the real transform, from the complex transform of (even, odd) samples, into `re` at
/// `t.place[k]`. With Z the complex one, E = Z\[k\] + conj Z\[half - k\], T = -i exp(-i tau k / N) (Z\[k\] - conj
/// Z\[half - k\]): 2 X\[k\] = E + T, 2 X\[half - k\] = conj(E - T). The window already holds the factor 1/2.
#[inline(always)]
unsafe fn power<V: Lanes>(re: *mut f32, im: *const f32, t: &FilterBank) {
    unsafe {
        // Bins k and half - k.
        let pairs = t.place[1..t.half / 2].iter().zip(t.place[t.half / 2 + 1..].iter().rev());
        for ((&p, &m), (&w_re, &w_im)) in pairs.zip(t.split_re[1..].iter().zip(&t.split_im[1..])) {
            let (p, m) = (p as usize * V::N, m as usize * V::N);
            let (a, b) = (V::load(re.add(p)), V::load(im.add(p)));
            let (c, d) = (V::load(re.add(m)), V::load(im.add(m)));
            let (e_re, e_im) = (a.add(c), b.sub(d));
            let (o_re, o_im) = (b.add(d), c.sub(a));
            let (w_re, w_im) = (V::splat(w_re), V::splat(w_im));
            let t_re = o_im.neg_mul_add(w_im, o_re.mul(w_re));
            let t_im = o_im.mul_add(w_re, o_re.mul(w_im));
            let (x, y) = (e_re.add(t_re), e_im.add(t_im));
            x.mul_add(x, y.mul(y)).store(re.add(p));
            let (x, y) = (e_re.sub(t_re), e_im.sub(t_im));
            x.mul_add(x, y.mul(y)).store(re.add(m));
        }
        let middle = t.place[t.half / 2] as usize * V::N;
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
    fn reference(front_end: &FrontEnd, wave: &[f32]) -> Vec<f64> {
        let FrontEnd { window: n, hop, n_mels, f_min, f_max, .. } = *front_end;
        let n_fft = n.next_power_of_two();
        let window: Vec<f64> = (0..n).map(|i| 0.5 - 0.5 * (TAU * i as f64 / (n - 1) as f64).cos()).collect();
        let mut out = Vec::new();
        for frame in 0..front_end.n_frames(wave.len()) {
            let x: Vec<f64> = wave[frame * hop..][..n].iter().map(|&x| f64::from(x)).collect();
            let mean = x.iter().sum::<f64>() / n as f64;
            let y: Vec<f64> = (0..n).map(|i| ((x[i] - mean) - 0.97 * (x[i.max(1) - 1] - mean)) * window[i]).collect();
            let power: Vec<f64> = (0..n_fft / 2)
                .map(|k| {
                    let angle = |i: usize| TAU * ((i * k) % n_fft) as f64 / n_fft as f64;
                    let re: f64 = y.iter().enumerate().map(|(i, y)| y * angle(i).cos()).sum();
                    let im: f64 = y.iter().enumerate().map(|(i, y)| y * angle(i).sin()).sum();
                    re * re + im * im
                })
                .collect();
            let low = mel(f_min);
            let step = (mel(f_max) - low) / (n_mels + 1) as f64;
            let hz = f64::from(front_end.sample_rate) / n_fft as f64;
            for b in 0..n_mels {
                let energy: f64 = power
                    .iter()
                    .enumerate()
                    .map(|(k, power)| {
                        let at = (mel(k as f64 * hz) - low) / step - b as f64;
                        at.min(2.0 - at).max(0.0) * power
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

    const N_MELS: usize = 128;
    const WINDOW: usize = 800;
    const HOP: usize = 320;

    /// Every remainder of a window by the lanes, and every last pass of the transform: 2, 4 and 8.
    #[test]
    fn equals_the_formula_in_float64_with_every_instruction_set() {
        let front_ends = [
            FrontEnd::default(),
            FrontEnd { sample_rate: 22_050, window: 551, hop: 220, n_mels: 64, f_max: 11_025.0, ..FrontEnd::default() },
            FrontEnd {
                sample_rate: 8_000,
                window: 200,
                hop: 80,
                n_mels: 23,
                f_min: 0.0,
                f_max: 3_700.0,
                ..FrontEnd::default()
            },
            FrontEnd {
                sample_rate: 256_000,
                window: 1_023,
                hop: 256,
                n_mels: 5,
                f_max: 128_000.0,
                ..FrontEnd::default()
            },
            FrontEnd { window: 1_025, hop: 2_000, n_mels: 17, ..FrontEnd::default() },
            FrontEnd { window: 16, hop: 5, n_mels: 3, ..FrontEnd::default() },
        ];
        for front_end in front_ends {
            // More frames than one group, and not a multiple of it.
            let FrontEnd { window, hop, n_mels, .. } = front_end;
            let wave = noise(window + 10 * hop + hop / 2);
            let expected = reference(&front_end, &wave);
            let mut out = vec![0.0; expected.len()];
            let mut fbank = Fbank::new(Arc::new(FilterBank::new(front_end.clone()).unwrap()));
            fbank.log_mel(&wave, &mut out);
            let mut portable = vec![0.0; expected.len()];
            for (g, rows) in portable.chunks_mut(Portable::N * n_mels).enumerate() {
                // SAFETY: portable lanes need nothing of the machine.
                unsafe {
                    group::<Portable, Portable>(
                        &mut fbank.scratch,
                        &fbank.bank,
                        &wave[g * Portable::N * hop..],
                        (0.0, 1.0),
                        rows,
                    )
                };
            }
            #[cfg(target_arch = "x86_64")]
            if fbank.lanes == MOST_LANES {
                fbank.lanes = 8;
                let mut narrow = vec![0.0; expected.len()];
                for (g, rows) in narrow.chunks_mut(8 * n_mels).enumerate() {
                    // SAFETY: a machine with AVX-512 has AVX2.
                    unsafe { group_avx2(&mut fbank.scratch, &fbank.bank, &wave[g * 8 * hop..], (0.0, 1.0), rows) };
                }
                assert!(narrow == out, "8 and 16 lanes differ for {front_end:?}");
            }
            for got in [out, portable] {
                let worst = got.iter().zip(&expected).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max);
                assert!(worst < 1e-3, "{worst} of {front_end:?}");
            }
        }
    }

    #[test]
    fn a_frame_does_not_depend_on_its_place() {
        let wave = noise(WINDOW + 20 * HOP);
        let mut whole = vec![0.0; 21 * N_MELS];
        let mut fbank = Fbank::default();
        fbank.log_mel(&wave, &mut whole);
        for f in [0, 7, 8, 13, 20] {
            let mut one = vec![0.0; N_MELS];
            fbank.log_mel(&wave[f * HOP..f * HOP + WINDOW], &mut one);
            assert_eq!(one, whole[f * N_MELS..(f + 1) * N_MELS]);
        }
    }

    #[test]
    fn any_finite_input_gives_finite_rows() {
        let mut fbank = Fbank::default();
        let mut out = vec![0.0; N_MELS];
        for scale in [0.0, 1e-45, 1e-20, 1e10, f32::MAX] {
            let wave: Vec<f32> = noise(WINDOW).iter().map(|x| x * scale).collect();
            fbank.log_mel(&wave, &mut out);
            assert!(out.iter().all(|x| x.is_finite()), "{scale}");
        }
    }
}

//! Kaldi-compatible log-mel spectrograms, by a configurable front end.
//!
//! A front end has a sample rate, windows of W samples every H, B bands from one frequency to another. For each frame
//! of W samples (only whole frames, Kaldi's `snip_edges`):
//!
//! 1. Subtract the frame's mean (`remove_dc_offset`). Kaldi recipes also subtract the clip's mean first, which
//!    this makes a no-op.
//! 2. Pre-emphasise inside the frame: y\[i\] = x\[i\] - 0.97 x\[i - 1\].
//! 3. Multiply by the symmetric Hann window 0.5 - 0.5 cos(2 pi i / (W - 1)). It is 0 at the first sample, so the rule for
//!    that one in step 2 does not matter.
//! 4. Zero-pad to N, the next power of two. Take |FFT|².
//! 5. Weight the bins k < N / 2 by triangles in the mel domain, mel(f) = 1127 ln(1 + f / 700), without area normalisation.
//!    The edges of band b are l + b d, l + (b + 1) d, l + (b + 2) d. They are evaluated at mel(k rate / N), with
//!    `l = mel(f_min)` and `d = (mel(f_max) - l) / (B + 1)`.
//! 6. Take ln(max(energy, 2⁻²³)).
//!
//! Formulas: Kaldi's feat/feature-window.cc and feat/mel-computations.cc. Tables are computed in float64, frames in
//! float32, several at a time with one frame in each SIMD lane: the transform then needs no shuffles, and the result of
//! a frame does not depend on its neighbours.

mod fft;
mod kernel;
#[cfg(test)]
mod tests;

use jaxtrain_decode::refuse;
use std::f64::consts::TAU;
use std::sync::Arc;

use crate::error::Error;
use jaxtrain_decode::simd;
use jaxtrain_decode::RATES;

/// Smallest band energy, float32's epsilon; its logarithm is the floor of every spectrogram.
const FLOOR: f32 = f32::EPSILON;

const EMPHASIS: f32 = 0.97;
/// Frames that are computed together at most, one in each lane.
const MAX_LANES: usize = 16;
/// Samples of a window.
const WINDOWS: std::ops::RangeInclusive<usize> = 16..=32_768;
const MAX_HOP: usize = 1 << 20;
const MAX_MELS: usize = 4096;

/// The settings of a spectrogram.
#[derive(Clone, Debug)]
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
    /// 25 ms every 10 ms at 32 kHz, 128 bands from 20 Hz on, and the mean and deviation over bird recordings of
    /// Bird-MAE.
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
        n_samples.checked_sub(self.window).map_or(0, |rest| 1 + rest / self.hop)
    }

    fn check(&self) -> Result<(), Error> {
        let fail = |what: String| Err(Error::Invalid(what));
        let Self { sample_rate, window, hop, n_mels, f_min, f_max, mean, std } = *self;
        let half = f64::from(sample_rate) / 2.0;
        refuse!(
            !RATES.contains(&sample_rate),
            fail(format!("sample_rate = {sample_rate} Hz must lie in {RATES:?}"))
        );
        refuse!(
            !WINDOWS.contains(&window),
            fail(format!("window = {window} samples must lie in {WINDOWS:?}"))
        );
        if !(1..=MAX_HOP).contains(&hop) || !(1..=MAX_MELS).contains(&n_mels) {
            return fail(format!(
                "hop = {hop} must lie in 1..={MAX_HOP}, and n_mels = {n_mels} in 1..={MAX_MELS}"
            ));
        }
        if !(0.0 <= f_min && f_min < f_max && f_max <= half) {
            return fail(format!(
                "f_min = {f_min} and f_max = {f_max} Hz must increase from 0 to {half} Hz"
            ));
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
    window: Vec<f32>, // half the Hann window: `power` needs the factor 1/2
    re: Vec<f32>,     // exp(-i tau k / half), re and im: the twiddles of the complex transform
    im: Vec<f32>,
    split_re: Vec<f32>, // exp(-i tau k / N) for k <= half / 2: they turn the complex transform into the real one
    split_im: Vec<f32>,
    place: Vec<u32>, // the line in which the transform leaves each bin
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
        // Edges of bands as bins, so that each band is searched for only near it.
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
            window: (0..window)
                .map(|i| (0.25 - 0.25 * (TAU * i as f64 / (window - 1) as f64).cos()) as f32)
                .collect(),
            re: (0..half).map(|k| angle(k, half).cos() as f32).collect(),
            im: (0..half).map(|k| angle(k, half).sin() as f32).collect(),
            split_re: (0..=half / 2).map(|k| angle(k, n_fft).cos() as f32).collect(),
            split_im: (0..=half / 2).map(|k| angle(k, n_fft).sin() as f32).collect(),
            place: (0..half).map(|k| fft::place(k, half) as u32).collect(),
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

/// Adjacent values, of one element of a transform in each lane or of two.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Line([f32; MAX_LANES]);

struct Scratch {
    frames: Vec<f32>, // frames of a group with fewer than there are lanes, one after the other
    re: Vec<Line>, // the transform in place, one frame in each lane; `re` holds the power spectrum at the end
    im: Vec<Line>,
    mels: Vec<Line>,
}

/// A filter bank and its memory; nothing is allocated after `new`. One per thread.
pub struct Fbank {
    bank: Arc<FilterBank>,
    scratch: Scratch,
    lanes: usize, // frames that are computed together
}

impl Fbank {
    pub fn new(bank: Arc<FilterBank>) -> Self {
        let lanes = if simd::avx512() { MAX_LANES } else { 8 };
        let lines = |n: usize| vec![Line([0.0; MAX_LANES]); (n * lanes).div_ceil(MAX_LANES)];
        let scratch = Scratch {
            frames: vec![0.0; lanes * bank.window.len()],
            re: lines(fft::line(bank.half, bank.half)),
            im: lines(fft::line(bank.half, bank.half)),
            mels: lines(bank.front_end.n_mels),
        };
        Self { bank, scratch, lanes }
    }

    pub fn front_end(&self) -> &FrontEnd {
        &self.bank.front_end
    }

    /// Natural-log mel energies of `wave`, at the front end's rate, into `out` \[n_frames(wave.len()), n_mels\].
    /// Panics: When `out` has another length.
    pub fn log_mel(&mut self, wave: &[f32], out: &mut [f32]) {
        self.groups(wave, (0.0, 1.0), out);
    }

    /// The spectrogram as a model reads it, into `out` \[n_frames, n_mels\]: (x - mean) / (2 std) of the first
    /// `n_frames` frames. Missing frames are filled with the minimum of the others, or with the floor if there are
    /// none.
    /// Panics: When `out` has another length.
    pub fn normalised(&mut self, wave: &[f32], n_frames: usize, out: &mut [f32]) {
        let FrontEnd { window, hop, n_mels, .. } = self.bank.front_end;
        assert_eq!(out.len(), n_frames * n_mels, "out must hold n_frames * n_mels values");
        let n = self.bank.front_end.n_frames(wave.len()).min(n_frames);
        let (real, padding) = out.split_at_mut(n * n_mels);
        let used = if n == 0 { 0 } else { window + (n - 1) * hop };
        let least = self.groups(&wave[..used], (self.bank.mean, self.bank.scale), real);
        padding.fill(if n == 0 { (FLOOR.ln() - self.bank.mean) / self.bank.scale } else { least });
    }

    /// (log-mel energy - mean) / scale of all frames of `wave`. Returns the smallest value.
    fn groups(&mut self, wave: &[f32], norm: (f32, f32), out: &mut [f32]) -> f32 {
        let FrontEnd { hop, n_mels, .. } = self.bank.front_end;
        let n_frames = self.bank.front_end.n_frames(wave.len());
        assert_eq!(out.len(), n_frames * n_mels, "out must hold n_frames * n_mels values");
        let mut least = f32::INFINITY;
        for (g, rows) in out.chunks_mut(self.lanes * n_mels).enumerate() {
            let wave = &wave[g * self.lanes * hop..];
            least = least.min(kernel::group(&mut self.scratch, &self.bank, wave, norm, rows));
        }
        least
    }
}

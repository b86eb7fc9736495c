//! Sample-rate conversion by a windowed-sinc polyphase filter: exact ratio, no delay.
//!
//! Output k is at time k / target. It is the sum of input samples around that time, weighted by a low-pass filter with
//! a cut-off a little below the lower of the two Nyquist frequencies. With target / source = up / down in lowest terms
//! there are `up` distinct filters (phases), computed once in float64. When that table would be large (31,999 Hz to
//! 32,000 Hz has 32,000 phases), 512 phases are tabulated and interpolated linearly, which takes twice the time and
//! adds an error of -110 dB.
//!
//! The filter is a sinc with a Kaiser window (J. F. Kaiser, R. W. Schafer, "On the use of the I0-sinh window for
//! spectrum analysis", 1980) of beta 8 and 46 periods of the lower rate to each side. Aliases are below -80 dB. The
//! band up to 0.9 of the lower Nyquist frequency is flat within 0.1 dB.
//!
//! `cargo test --release response -- --nocapture` measures both with sines.

use std::f64::consts::PI;

use jaxtrain_decode::simd::{self, Lanes, Portable};

/// Reach of the filter to each side, in periods of the lower rate.
const REACH: f64 = 46.0;
/// Kaiser's beta: the stop band is 80.5 dB down.
const BETA: f64 = 8.0;
/// Half the width of the transition band is this over the reach, in units of the lower rate: found by bisection on
/// the response, such that the stop band begins at the lower Nyquist frequency.
const TRANSITION: f64 = 1.2735;
/// Tables up to this many weights (2 MiB) are exact; larger ones are interpolated.
const MAX_WEIGHTS: usize = 1 << 19;
/// Phases of an interpolated table in one period of the lower rate.
const PHASES: f64 = 512.0;
/// Weights of one phase are a multiple of this many.
const BLOCK: usize = 16;
/// An output is the sum of this many sums. Number i of them is over every 8th weight from i on, and `Lanes::sum` adds
/// them.
const SUMS: usize = 8;
/// Their order in that sum's tree: neighbours are added, then neighbours of those.
const ORDER: [usize; SUMS] = [0, 4, 2, 6, 1, 5, 3, 7];
/// Outputs that one lane computes in a row, at least.
const SPAN: usize = 320;
/// Vectors of lanes that share the loads of weights.
const VECTORS: usize = 4;
/// Values of such vectors, at most.
const MAX_LANES: usize = 16 * VECTORS;
/// Outputs of each lane before they are put in their places.
const TILE: usize = 8;
/// Filters that one cache keeps, so that no set of recordings makes it grow without bound.
const MAX_CACHED: usize = 16;

/// A filter for one pair of rates.
pub struct Resampler {
    up: u64,
    down: u64,
    taps: usize, // weights of one phase
    /// \[phases, taps\]; weight j of a phase belongs to input `floor(position) - taps / 2 + 1 + j`. An interpolated
    /// table has one phase more, which is phase 0 of the next input sample.
    table: Vec<f32>,
    interpolated: Option<u64>, // phases of an interpolated table; None when every phase is in the table
    /// Outputs that one lane computes in a row: a multiple of `up`, so that all lanes use the same phases.
    span: usize,
    rows: Vec<Line>, // the inputs of all lanes side by side
}

/// Adjacent values.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Line([f32; MAX_LANES]);

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 {
        a
    } else {
        gcd(b, a % b)
    }
}

/// The modified Bessel function of the first kind and order 0, by its power series.
fn bessel_i0(x: f64) -> f64 {
    let (mut sum, mut term, mut n) = (1.0, 1.0, 1.0);
    while term > 1e-18 * sum {
        term *= (x / (2.0 * n)).powi(2);
        sum += term;
        n += 1.0;
    }
    sum
}

impl Resampler {
    /// Computes the filter from `source` Hz to `target` Hz. It takes milliseconds: see [`Resamplers`].
    /// Panics: When a rate is 0.
    pub fn new(source: u32, target: u32) -> Self {
        assert!(
            source > 0 && target > 0,
            "sample rates must be positive: {source} Hz to {target} Hz"
        );
        let common = gcd(source, target);
        let (up, down) = ((target / common) as u64, (source / common) as u64);
        if up == down {
            return Self {
                up,
                down,
                taps: 0,
                table: Vec::new(),
                interpolated: None,
                span: 1,
                rows: Vec::new(),
            };
        }
        // Input samples in one period of the lower rate.
        let scale = f64::max(1.0, source as f64 / target as f64);
        let taps = (2.0 * REACH * scale).ceil() as usize;
        let taps = taps.next_multiple_of(BLOCK);
        // Rounded up, the filter reaches further, so its transition may be narrower.
        let reach = taps as f64 / 2.0;
        let cutoff = (0.5 - TRANSITION * scale / reach) / scale;
        // A filter that is longer in input samples is as much smoother between them.
        let enough = (PHASES / scale).ceil() as u64;
        let interpolated = (up > enough && up > (MAX_WEIGHTS / taps) as u64).then_some(enough);
        let phases = interpolated.unwrap_or(up) as usize;
        let mut table = Vec::with_capacity((phases + 1) * taps);
        let mut row = vec![0.0f64; taps];
        let norm = bessel_i0(BETA);
        for phase in 0..phases + usize::from(interpolated.is_some()) {
            let offset = phase as f64 / phases as f64 + (taps / 2) as f64 - 1.0;
            for (j, h) in row.iter_mut().enumerate() {
                let t = j as f64 - offset;
                let x = 2.0 * PI * cutoff * t;
                let sinc = if x == 0.0 { 1.0 } else { x.sin() / x };
                *h = sinc * bessel_i0(BETA * (1.0 - (t / reach).powi(2)).max(0.0).sqrt()) / norm;
            }
            // Every phase passes a constant unchanged.
            let sum: f64 = row.iter().sum();
            table.extend(row.iter().map(|h| (h / sum) as f32));
        }
        let repeats = if interpolated.is_some() { 0 } else { SPAN.div_ceil(up as usize) };
        let n_rows = if interpolated.is_some() { 0 } else { repeats * down as usize + taps };
        let rows = vec![Line([0.0; MAX_LANES]); n_rows];
        Self { up, down, taps, table, interpolated, span: repeats * up as usize, rows }
    }

    /// Input samples needed before the first and after the last output's time. Missing ones count as silence.
    pub fn context(&self) -> usize {
        self.taps / 2
    }

    /// Target over source rate, in lowest terms.
    pub fn ratio(&self) -> (u64, u64) {
        (self.up, self.down)
    }

    /// Output samples for `n` input samples: round(n * target / source), halves up.
    pub fn output_len(&self, n: usize) -> usize {
        ((2 * n as u128 * self.up as u128 + self.down as u128) / (2 * self.down as u128)) as usize
    }

    /// out\[k\] is the signal at time k / target after x\[lead\]; samples outside `x` count as 0.
    pub fn process(&mut self, x: &[f32], lead: usize, out: &mut [f32]) {
        if self.taps == 0 {
            for (k, y) in out.iter_mut().enumerate() {
                *y = x.get(lead + k).copied().unwrap_or(0.0);
            }
            return;
        }
        process(self, x, lead, out);
    }

    /// The input sample (relative to `lead`) at or before output k, and the distance to output k in 1 / up.
    #[inline(always)]
    fn position(&self, k: usize) -> (usize, u64) {
        let at = k as u64 * self.down;
        ((at / self.up) as usize, at % self.up)
    }
}

simd::kernel! {
    fn process(r: &mut Resampler, x: &[f32], lead: usize, out: &mut [f32]) -> ():
        avx512 process_lanes::<simd::Avx512, simd::Avx2>,
        avx2 process_lanes::<simd::Avx2, simd::Avx2>;
        else process_lanes::<Portable, Portable>
}

/// Many outputs in the lanes of `V`, the others one by one in those of `W`. Both use the same sums, so that an output
/// does not depend on its neighbours.
#[inline(always)]
unsafe fn process_lanes<V: Lanes, W: Lanes>(
    r: &mut Resampler, x: &[f32], lead: usize, out: &mut [f32],
) {
    const { assert!(W::N == SUMS && V::N * VECTORS <= MAX_LANES) };
    let before = r.taps / 2 - 1;
    // For outputs [first, last) the whole filter lies inside x.
    let inside = |k: usize| {
        let at = lead + r.position(k).0;
        (at >= before, at - at.min(before) + r.taps <= x.len())
    };
    let first = partition(out.len(), |k| !inside(k).0);
    let last = partition(out.len(), |k| inside(k).1).max(first);
    for k in (0..first).chain(last..out.len()) {
        out[k] = edge::<W>(r, x, lead, k);
    }
    // First and last keep the offsets below in range.
    if let Some(phases) = r.interpolated {
        for (k, y) in out.iter_mut().enumerate().take(last).skip(first) {
            let (at, part) = r.position(k);
            *y = between::<W>(r, phases, x.as_ptr().add(lead + at - before), part);
        }
        return;
    }
    let (wide, narrow) = (VECTORS * V::N * r.span, V::N * r.span);
    let mut k = first;
    while k < last {
        // A block that is mostly needed is computed whole, from earlier on: its first outputs do not change.
        if last - k >= wide / 2 && last - first >= wide {
            k = k.min(last - wide);
            block::<V, VECTORS, 2>(r, x, lead, k, out);
            k += wide;
        } else if last - k >= narrow / 3 && last - first >= narrow {
            k = k.min(last - narrow);
            block::<V, 1, SUMS>(r, x, lead, k, out);
            k += narrow;
        } else {
            let (at, phase) = r.position(k);
            let h = r.table.as_ptr().add(phase as usize * r.taps);
            out[k] = dot::<W>(h, x.as_ptr().add(lead + at - before), r.taps);
            k += 1;
        }
    }
}

/// Outputs [k, k + lanes * span): each lane has a run of `span` outputs. In all lanes output q of the run uses the same
/// phase, so that its weights are loaded once. `AT_ONCE` of the sums of an output are computed together.
/// The filters of these outputs lie inside `x`.
#[inline(always)]
#[allow(clippy::needless_range_loop)] // several arrays share one index
unsafe fn block<V: Lanes, const VECTORS: usize, const AT_ONCE: usize>(
    r: &mut Resampler, x: &[f32], lead: usize, k: usize, out: &mut [f32],
) {
    let (lanes, span, taps) = (VECTORS * V::N, r.span, r.taps);
    let (begin, stride) = (r.position(k).0, span / r.up as usize * r.down as usize);
    let n_rows = r.position(k + span - 1).0 - begin + taps;
    let first = lead + begin + 1 - taps / 2;
    assert!(
        n_rows <= r.rows.len()
            && first + (lanes - 1) * stride + n_rows <= x.len()
            && k + lanes * span <= out.len()
    );
    let rows = r.rows.as_mut_ptr().cast::<f32>();
    let mut tile = [Line([0.0; MAX_LANES]); TILE];
    let tile = tile.as_mut_ptr().cast::<f32>();
    simd::transpose(x.as_ptr().add(first), stride, [lanes, n_rows], rows, lanes);
    for q in 0..span {
        let (at, phase) = r.position(k + q);
        let h = r.table.as_ptr().add(phase as usize * taps);
        let x = rows.add((at - begin) * lanes);
        let mut pairs = [[V::splat(0.0); VECTORS]; SUMS / 2];
        for s in (0..SUMS).step_by(AT_ONCE) {
            let mut sums = [[V::splat(0.0); VECTORS]; AT_ONCE];
            for j in (0..taps).step_by(SUMS) {
                for c in 0..AT_ONCE {
                    let j = j + ORDER[s + c];
                    let h = V::splat(*h.add(j));
                    for v in 0..VECTORS {
                        sums[c][v] = V::load(x.add(j * lanes + v * V::N)).mul_add(h, sums[c][v]);
                    }
                }
            }
            for c in (0..AT_ONCE).step_by(2) {
                for v in 0..VECTORS {
                    pairs[(s + c) / 2][v] = sums[c][v].add(sums[c + 1][v]);
                }
            }
        }
        let row = tile.add(q % TILE * lanes);
        for v in 0..VECTORS {
            let sum = pairs[0][v].add(pairs[1][v]).add(pairs[2][v].add(pairs[3][v]));
            sum.store(row.add(v * V::N));
        }
        let done = q % TILE + 1;
        if done == TILE || q + 1 == span {
            simd::transpose(
                tile,
                lanes,
                [done, lanes],
                out.as_mut_ptr().add(k + q + 1 - done),
                span,
            );
        }
    }
}

/// The first k in 0..n for which `holds` is false; it must be true up to there and false after it.
fn partition(n: usize, holds: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut high) = (0, n);
    while low < high {
        let middle = low + (high - low) / 2;
        if holds(middle) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    low
}

#[inline(always)]
unsafe fn dot<V: Lanes>(h: *const f32, x: *const f32, n: usize) -> f32 {
    let mut sum = V::splat(0.0);
    for j in (0..n).step_by(V::N) {
        sum = V::load(x.add(j)).mul_add(V::load(h.add(j)), sum);
    }
    sum.sum()
}

/// One output with an interpolated table; the filter begins at `x`.
#[inline(always)]
unsafe fn between<V: Lanes>(r: &Resampler, phases: u64, x: *const f32, part: u64) -> f32 {
    let at = part * phases;
    let (phase, rest) = ((at / r.up) as usize, at % r.up);
    let h = r.table.as_ptr().add(phase * r.taps);
    let (low, high) = (dot::<V>(h, x, r.taps), dot::<V>(h.add(r.taps), x, r.taps));
    low + (high - low) * (rest as f32 / r.up as f32)
}

/// One output whose filter extends beyond `x`: the same sums over a copy with silence around it.
unsafe fn edge<V: Lanes>(r: &Resampler, x: &[f32], lead: usize, k: usize) -> f32 {
    let (at, part) = r.position(k);
    // Input index of weight 0, which may be negative.
    let begin = (lead + at) as i64 - (r.taps / 2 - 1) as i64;
    let weight = |j: usize| -> f32 {
        if let Some(phases) = r.interpolated {
            let at = part * phases;
            let (phase, rest) = ((at / r.up) as usize, at % r.up);
            let h = |phase: usize| r.table[phase * r.taps + j];
            h(phase) + (h(phase + 1) - h(phase)) * (rest as f32 / r.up as f32)
        } else {
            r.table[part as usize * r.taps + j]
        }
    };
    let mut sum = V::splat(0.0);
    for j in (0..r.taps).step_by(V::N) {
        let mut xs = [0.0f32; BLOCK];
        let mut hs = [0.0f32; BLOCK];
        for i in 0..V::N {
            let index = begin + (j + i) as i64;
            if index >= 0 && (index as usize) < x.len() {
                xs[i] = x[index as usize];
                hs[i] = weight(j + i);
            }
        }
        sum = V::load(xs.as_ptr()).mul_add(V::load(hs.as_ptr()), sum);
    }
    sum.sum()
}

/// Filters by (source, target) rate, one cache per thread. It keeps only the most recently used ones, the last one at
/// the end.
#[derive(Default)]
pub struct Resamplers(Vec<((u32, u32), Resampler)>);

impl Resamplers {
    /// The filter from `source` Hz to `target` Hz, computed at its first use. Panics when a rate is 0.
    pub fn get(&mut self, source: u32, target: u32) -> &mut Resampler {
        match self.0.iter().position(|(rates, _)| *rates == (source, target)) {
            Some(i) => self.0[i..].rotate_left(1),
            None => {
                self.0.drain(..(self.0.len() + 1).saturating_sub(MAX_CACHED));
                self.0.push(((source, target), Resampler::new(source, target)));
            }
        }
        &mut self.0.last_mut().expect("just put there").1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The output for a sine of amplitude 1: (amplitude at its own frequency, RMS * sqrt 2 of everything else).
    fn tone(resampler: &mut Resampler, source: u32, target: u32, hz: f64) -> (f64, f64) {
        let n = 4096;
        let lead = resampler.context();
        let length = lead + n * source as usize / target as usize + lead + 2;
        let x: Vec<f32> = (0..length)
            .map(|i| {
                (2.0 * PI * hz * (i as f64 - lead as f64) / f64::from(source) + 0.3).sin() as f32
            })
            .collect();
        let mut y = vec![0.0f32; n];
        resampler.process(&x, lead, &mut y);
        let (mut cc, mut cs, mut ss, mut yc, mut ys, mut yy) = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0);
        for (k, &y) in y.iter().enumerate() {
            let (s, c) = (2.0 * PI * hz * k as f64 / f64::from(target) + 0.3).sin_cos();
            let y = f64::from(y);
            (cc, cs, ss, yc, ys, yy) =
                (cc + c * c, cs + c * s, ss + s * s, yc + y * c, ys + y * s, yy + y * y);
        }
        if hz >= f64::from(source.min(target)) / 2.0 {
            return (0.0, (2.0 * yy / n as f64).sqrt());
        }
        let determinant = cc * ss - cs * cs;
        let (a, b) = ((yc * ss - ys * cs) / determinant, (ys * cc - yc * cs) / determinant);
        (a.hypot(b), (2.0 * (yy - a * yc - b * ys).max(0.0) / n as f64).sqrt())
    }

    fn decibels(x: f64) -> f64 {
        20.0 * x.max(1e-12).log10()
    }

    /// Prints a table of ripple, band and aliases by the source rate.
    #[test]
    fn response() {
        let target = 32000;
        for source in [8000, 16000, 22050, 24000, 31999, 44100, 48000, 96000, 192000] {
            let mut resampler = Resampler::new(source, target);
            let nyquist = f64::from(source.min(target)) / 2.0;
            let mut gain = |hz| tone(&mut resampler, source, target, hz);
            let mut ripple = 0.0f64;
            let mut alias = 0.0f64;
            for i in 1..=60 {
                let (amplitude, rest) = gain(0.9 * nyquist * f64::from(i) / 60.0 - 0.37);
                ripple = ripple.max(decibels(amplitude).abs());
                alias = alias.max(rest);
            }
            // Everything above the lower Nyquist frequency, or mirrored at it.
            for i in 0..120 {
                let hz = nyquist * 0.9
                    + (f64::from(source) / 2.0 - nyquist * 0.9) * f64::from(i) / 120.0;
                alias = alias.max(if hz < nyquist && source > target { 0.0 } else { gain(hz).1 });
            }
            let (mut low, mut high) = (0.9 * nyquist, nyquist);
            for _ in 0..20 {
                let middle = (low + high) / 2.0;
                if decibels(gain(middle).0) > -3.0103 {
                    low = middle;
                } else {
                    high = middle;
                }
            }
            let (ripple, alias, half) = (ripple, decibels(alias), low / nyquist);
            println!(
                "| {source} | {} | {ripple:.3} | {half:.3} | {alias:.1} |",
                2 * resampler.context()
            );
            assert!(ripple < 0.1, "{source} Hz: {ripple} dB up to 0.9 of Nyquist");
            assert!(alias < -80.0, "{source} Hz: aliases at {alias} dB");
        }
    }

    #[test]
    fn a_crop_with_context_is_a_slice_of_the_whole() {
        let x: Vec<f32> = (0..30000u32)
            .map(|i| (i.wrapping_mul(2654435761) >> 8) as f32 / 8388608.0 - 1.0)
            .collect();
        for source in [8000, 22050, 44100, 48000, 31999] {
            let mut resampler = Resampler::new(source, 32000);
            let mut all = vec![0.0; resampler.output_len(x.len())];
            resampler.process(&x, 0, &mut all);
            // Outputs up apart fall on inputs down apart: there, a crop's outputs are outputs of the whole.
            let (up, down) = (resampler.up as usize, resampler.down as usize);
            if down > 10000 {
                continue;
            }
            let (start, context) = (10000 / down * down, resampler.context());
            let mut crop = vec![0.0; 3000];
            let end = start + 3000 * source as usize / 32000 + 2;
            resampler.process(&x[start - context..end + context], context, &mut crop);
            let expected = &all[start / down * up..][..3000];
            let worst = crop.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(worst < 1e-6, "{source}: {worst}");
        }
    }

    #[test]
    fn tables_are_bounded_and_short_inputs_are_padded_with_silence() {
        for (source, target) in
            [(31999, 32000), (1, 32000), (1_000_003, 32000), (32000, 1), (655_350, 44100)]
        {
            let mut resampler = Resampler::new(source, target);
            assert!(
                resampler.table.len() <= 4 << 20,
                "{source} to {target}: {} weights",
                resampler.table.len()
            );
            for n in [0, 1, 7] {
                let mut out = vec![f32::NAN; 50];
                resampler.process(&vec![0.5; n], 0, &mut out);
                assert!(out.iter().all(|y| y.abs() < 1.0));
                assert!(n > 0 || out.iter().all(|y| *y == 0.0));
            }
        }
        let mut out = [9.0; 4];
        Resampler::new(32000, 32000).process(&[1.0, 2.0, 3.0], 1, &mut out);
        assert_eq!(out, [2.0, 3.0, 0.0, 0.0]);
    }

    /// Enough of each rate for both kinds of blocks, and for the rest.
    #[test]
    fn an_output_is_the_same_alone_in_a_block_and_with_every_instruction_set() {
        let x: Vec<f32> = (0..60000u32)
            .map(|i| (i.wrapping_mul(2654435761) >> 8) as f32 / 8388608.0 - 1.0)
            .collect();
        for (source, target) in [
            (16000, 32000),
            (22050, 32000),
            (44100, 32000),
            (48000, 22050),
            (48000, 32000),
            (31999, 32000),
        ] {
            let mut resampler = Resampler::new(source, target);
            let mut fast = vec![0.0; resampler.output_len(x.len())];
            resampler.process(&x, 0, &mut fast);
            let mut portable = fast.clone();
            // SAFETY: portable lanes need nothing of the machine.
            unsafe { process_lanes::<Portable, Portable>(&mut resampler, &x, 0, &mut portable) };
            let worst = fast.iter().zip(&portable).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(worst < 2e-6, "{source}: {worst}");
            #[cfg(target_arch = "x86_64")]
            if simd::avx512() {
                let mut narrow = vec![0.0; fast.len()];
                // SAFETY: a machine with AVX-512 has AVX2.
                unsafe {
                    process_lanes::<simd::Avx2, simd::Avx2>(&mut resampler, &x, 0, &mut narrow)
                };
                assert!(narrow == fast, "8 and 16 lanes differ from {source} to {target} Hz");
            }
            // Outputs `up` apart are `down` inputs apart, so that one block of them can be computed alone.
            let (up, down) = (resampler.up as usize, resampler.down as usize);
            if resampler.interpolated.is_none() {
                for first in [0, 3 * up, fast.len() / 2 / up * up, (fast.len() - 1) / up * up] {
                    let mut one = vec![0.0; up.min(fast.len() - first)];
                    resampler.process(&x, first / up * down, &mut one);
                    assert!(
                        one == fast[first..][..one.len()],
                        "from {source} to {target} Hz, output {first}"
                    );
                }
            }
        }
    }

    #[test]
    fn the_cache_is_bounded_and_keeps_what_is_used() {
        let mut cache = Resamplers::default();
        for source in 1..40 {
            cache.get(source * 1000, 32000);
            cache.get(48000, 32000);
        }
        assert!(cache.0.len() <= MAX_CACHED);
        assert!(cache.0.iter().any(|(rates, _)| *rates == (48000, 32000)));
    }
}

//! From the lines of a block to samples: the inverse transform, the window, and the overlap.
//!
//! The inverse MDCT of M lines has only M different values, those of the DCT-IV
//!
//! u\[j\] = sum over k of x\[k\] cos(pi / M (j + 1/2) (k + 1/2)).
//!
//! Its first half is the part of the block that falls, mirrored and negated, and its second half the part that rises.
//! So each block leaves M / 2 values to the next one. The DCT-IV is a complex Fourier transform of M / 2 points between
//! two rotations: the points are x\[2 n\] + i x\[M - 1 - 2 n\], and the results u\[2 n\] - i u\[M - 1 - 2 n\].

// In the kernels several arrays share one index.
#![allow(clippy::needless_range_loop)]

use std::f64::consts::PI;
use std::sync::OnceLock;

use crate::simd::{self, four, Complex, Portable, Shuffle};

/// Lines of the longest block.
pub(super) const MAX_LINES: usize = 4096;
/// Lines up to which the transform is a product with a matrix.
const SMALL: usize = 64;

/// The tables of blocks with so many lines.
pub(super) struct Table {
    lines: usize,
    /// For small blocks the matrix, in the order of `Work`: of each line its share in `low`, then in `high`.
    matrix: Vec<f32>,
    twist: [Vec<f32>; 2], // exp(-i pi (8 n + 1) / (8 M)), re and im
    /// exp(-2 pi i p k / (M / 2)) of the first pass, for k in 1..8 and its columns p: re and im.
    first: Vec<[Vec<f32>; 2]>,
    later: Vec<[f32; 6]>,  // those of the later passes, for k in 1..4: re and im
    window: [Vec<f32>; 2], // the rising half of the window: from its middle up, and from its middle down
}

/// The table of blocks with so many lines, a power of two from 32 to `MAX_LINES`.
pub(super) fn table(lines: usize) -> &'static Table {
    static TABLES: [OnceLock<Table>; 8] = [const { OnceLock::new() }; 8];
    TABLES[lines.ilog2() as usize - 5].get_or_init(|| Table::new(lines))
}

impl Table {
    fn new(lines: usize) -> Self {
        let turn = |x: f64| [x.cos() as f32, -x.sin() as f32];
        let planes = |x: Vec<[f32; 2]>| [0, 1].map(|i| x.iter().map(|x| x[i]).collect());
        let points = lines / 2;
        let twist = planes(
            (0..points).map(|n| turn(PI * (8 * n + 1) as f64 / (8 * lines) as f64)).collect(),
        );
        let angle = |p: usize, k: usize, n: usize| turn(2.0 * PI * (p * k) as f64 / n as f64);
        let first = (1..8)
            .map(|k| planes((0..points / 8).map(|p| angle(p, k, points)).collect()))
            .collect();
        let mut later = Vec::new();
        let mut n = points / 8;
        while n >= 4 {
            for p in 0..n / 4 {
                let [a, b, c] = [1, 2, 3].map(|k| angle(p, k, n));
                later.push([a[0], a[1], b[0], b[1], c[0], c[1]]);
            }
            n /= 4;
        }
        let rise = |i: usize| {
            let sine = (PI * (i as f64 + 0.5) / (2 * lines) as f64).sin();
            (PI / 2.0 * sine * sine).sin() as f32
        };
        let window = [(points..lines).map(rise).collect(), (0..points).rev().map(rise).collect()];
        let cosine = |k: usize, j: usize| {
            (PI / lines as f64 * (j as f64 + 0.5) * (k as f64 + 0.5)).cos() as f32
        };
        let row = |k: usize| (0..points).chain((points..lines).rev()).map(move |j| cosine(k, j));
        let matrix = (0..if lines <= SMALL { lines } else { 0 }).flat_map(row).collect();
        Self { lines, matrix, twist, first, later, window }
    }
}

/// The memory of the transform, and the state between blocks.
#[repr(C, align(64))]
pub(super) struct Work {
    pub lines: [f32; MAX_LINES + 8], // the lines of a block, negated
    planes: [[[f32; MAX_LINES / 2]; 2]; 2],
    /// The parts that fall of the last two blocks, from the middle on; which is the last one's.
    low: [[f32; MAX_LINES / 2]; 2],
    last: usize,
    high: [f32; MAX_LINES / 2], // the part of the last block that rises, from its middle backwards
    pub samples: [f32; MAX_LINES], // the samples of a block
}

impl Default for Work {
    fn default() -> Self {
        let half = [0.0; MAX_LINES / 2];
        Self {
            lines: [0.0; MAX_LINES + 8],
            planes: [[half; 2]; 2],
            low: [half; 2],
            last: 0,
            high: half,
            samples: [0.0; MAX_LINES],
        }
    }
}

impl Work {
    /// Transforms `lines` of a block.
    pub fn transform(&mut self, table: &Table) {
        self.last ^= 1;
        transform_block(self, table);
    }
}

simd::kernel! {
    /// The transform of `lines` into `low` and `high`.
    fn transform_block(work: &mut Work, table: &Table) -> (): avx2 transform::<simd::Avx2>; else transform::<Portable>
}

simd::kernel! {
    /// Makes the samples between the middles of two blocks that were transformed one after the other, and returns their
    /// number.
    pub(super) fn overlap(work: &mut Work, before: &Table, this: &Table) -> usize:
        avx2 add_halves::<simd::Avx2>; else add_halves::<Portable>
}

#[inline(always)]
unsafe fn transform<V: Shuffle>(work: &mut Work, table: &Table) {
    const { assert!(V::N == 8) };
    if !table.matrix.is_empty() {
        multiply::<V>(work, table);
        return;
    }
    let points = table.lines / 2;
    let twist = [table.twist[0].as_ptr(), table.twist[1].as_ptr()];
    let [from, to] = &mut work.planes;
    let mut from = [from[0].as_mut_ptr(), from[1].as_mut_ptr()];
    let mut to = [to[0].as_mut_ptr(), to[1].as_mut_ptr()];
    let lines = work.lines.as_ptr();
    for n in (0..points / 2).step_by(V::N) {
        let mirrored = points - V::N - n;
        let left = V::load(lines.add(2 * n)).deinterleave(V::load(lines.add(2 * n + V::N)));
        let right =
            V::load(lines.add(2 * mirrored)).deinterleave(V::load(lines.add(2 * mirrored + V::N)));
        let points = Complex { re: left[0], im: right[1].reverse() };
        points.mul(Complex::load(twist, n)).store(from, n);
        let points = Complex { re: right[0], im: left[1].reverse() };
        points.mul(Complex::load(twist, mirrored)).store(from, mirrored);
    }
    first_pass::<V>(from, table);
    for (from, to) in from.iter().zip(to) {
        simd::transpose(*from, points / 8, [8, points / 8], to, 8);
    }
    let mut later = table.later.as_ptr();
    let (mut n, mut stride) = (points / 8, 8);
    while n > 1 {
        std::mem::swap(&mut from, &mut to);
        if n == 2 {
            for q in (0..stride).step_by(V::N) {
                let (a, b) = (
                    Complex::<V>::load(from.map(|p| p.cast_const()), q),
                    Complex::<V>::load(from.map(|p| p.cast_const()), q + stride),
                );
                a.add(b).store(to, q);
                a.sub(b).store(to, q + stride);
            }
            break;
        }
        later = later_pass::<V>(from, to, n / 4, stride, later);
        n /= 4;
        stride *= 4;
    }
    let from = [to[0].cast_const(), to[1].cast_const()];
    let (low, high, zero) =
        (work.low[work.last].as_mut_ptr(), work.high.as_mut_ptr(), V::splat(0.0));
    for n in (0..points / 2).step_by(V::N) {
        let mirrored = points - V::N - n;
        let left = Complex::<V>::load(from, n).mul(Complex::load(twist, n));
        let right = Complex::<V>::load(from, mirrored).mul(Complex::load(twist, mirrored));
        let [a, b] = left.re.interleave(zero.sub(right.im).reverse());
        a.store(low.add(2 * n));
        b.store(low.add(2 * n + V::N));
        let [a, b] = zero.sub(left.im).interleave(right.re.reverse());
        a.store(high.add(2 * n));
        b.store(high.add(2 * n + V::N));
    }
}

#[inline(always)]
unsafe fn multiply<V: Shuffle>(work: &mut Work, table: &Table) {
    let half = table.lines / 2;
    for to in (0..table.lines).step_by(V::N) {
        let mut sum = V::splat(0.0);
        for (x, row) in work.lines.iter().zip(table.matrix.chunks_exact(table.lines)) {
            sum = V::splat(*x).mul_add(V::load(row.as_ptr().add(to)), sum);
        }
        sum.store(
            if to < half { &mut work.low[work.last][to..] } else { &mut work.high[to - half..] }
                .as_mut_ptr(),
        );
    }
}

/// Transforms of eight points, a column of them each, in place.
#[inline(always)]
unsafe fn first_pass<V: Shuffle>(planes: [*mut f32; 2], table: &Table) {
    let columns = table.lines / 16;
    let from = [planes[0].cast_const(), planes[1].cast_const()];
    let root = V::splat(std::f32::consts::FRAC_1_SQRT_2);
    for p in (0..columns).step_by(V::N) {
        let mut x = [Complex::<V>::load(from, p); 8];
        for r in 1..8 {
            x[r] = Complex::load(from, r * columns + p);
        }
        let even = four([x[0], x[2], x[4], x[6]]);
        let [a, b, c, d] = four([x[1], x[3], x[5], x[7]]);
        // b (1 - i) / sqrt 2, c / i, and d (-1 - i) / sqrt 2
        let b = Complex { re: b.re.add(b.im).mul(root), im: b.im.sub(b.re).mul(root) };
        let d = Complex {
            re: d.im.sub(d.re).mul(root),
            im: V::splat(0.0).sub(d.re.add(d.im)).mul(root),
        };
        let y = [
            even[0].add(a),
            even[1].add(b),
            even[2].sub_turned(c),
            even[3].add(d),
            even[0].sub(a),
            even[1].sub(b),
            even[2].add_turned(c),
            even[3].sub(d),
        ];
        y[0].store(planes, p);
        for k in 1..8 {
            let turns = &table.first[k - 1];
            y[k].mul(Complex::load([turns[0].as_ptr(), turns[1].as_ptr()], p))
                .store(planes, k * columns + p);
        }
    }
}

/// Transforms of four points for each of `m` groups. Returns the start of the turns of the next pass.
#[inline(always)]
unsafe fn later_pass<V: Shuffle>(
    from: [*mut f32; 2], to: [*mut f32; 2], m: usize, stride: usize, turns: *const [f32; 6],
) -> *const [f32; 6] {
    let from = [from[0].cast_const(), from[1].cast_const()];
    for p in 0..m {
        let turn = &*turns.add(p);
        let mut w = [Complex { re: V::splat(turn[0]), im: V::splat(turn[1]) }; 3];
        for k in 1..3 {
            w[k] = Complex { re: V::splat(turn[2 * k]), im: V::splat(turn[2 * k + 1]) };
        }
        for q in (0..stride).step_by(V::N) {
            let mut x = [Complex::<V>::load(from, p * stride + q); 4];
            for r in 1..4 {
                x[r] = Complex::load(from, (p + r * m) * stride + q);
            }
            let y = four(x);
            y[0].store(to, 4 * p * stride + q);
            for k in 1..4 {
                y[k].mul(w[k - 1]).store(to, (4 * p + k) * stride + q);
            }
        }
    }
    turns.add(m)
}

#[inline(always)]
unsafe fn add_halves<V: Shuffle>(work: &mut Work, before: &Table, this: &Table) -> usize {
    let middle = before.lines / 2;
    let slope = before.lines.min(this.lines) / 2;
    let [up, down] = if before.lines < this.lines { &before.window } else { &this.window };
    let (a, b, samples) =
        (work.low[work.last ^ 1].as_ptr(), work.high.as_ptr(), work.samples.as_mut_ptr());
    for j in (0..slope).step_by(V::N) {
        let (up, down) = (V::load(up.as_ptr().add(j)), V::load(down.as_ptr().add(j)));
        let (a, b) = (V::load(a.add(j)), V::load(b.add(j)));
        b.neg_mul_add(down, a.mul(up)).reverse().store(samples.add(middle - V::N - j));
        b.mul_add(up, a.mul(down)).store(samples.add(middle + j));
    }
    for j in (slope..middle).step_by(V::N) {
        V::load(a.add(j)).reverse().store(samples.add(middle - V::N - j));
    }
    for j in (slope..this.lines / 2).step_by(V::N) {
        V::load(b.add(j)).store(samples.add(middle + j));
    }
    middle + this.lines / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The windowed inverse MDCT by its definition (1.3.2 and 4.3.1), for blocks of the lines before and after: the
    /// part between the middles.
    fn slow(spectra: [&[f32]; 2]) -> Vec<f32> {
        let slope = spectra[0].len().min(spectra[1].len()) as f64;
        let rise = |t: f64| match t + 0.5 + slope / 2.0 {
            t if t <= 0.0 => 0.0,
            t if t >= slope => 1.0,
            t => (PI / 2.0 * (PI / 2.0 * t / slope).sin().powi(2)).sin(),
        };
        let inverse = |x: &[f32], i: usize| {
            let m = x.len() as f64;
            let angle = PI / m * (i as f64 + 0.5 + m / 2.0);
            x.iter()
                .enumerate()
                .map(|(k, x)| f64::from(*x) * (angle * (k as f64 + 0.5)).cos())
                .sum::<f64>()
        };
        let (first, second) = (spectra[0].len(), spectra[1].len());
        (0..(first + second) / 2)
            .map(|i| {
                let t = i as f64 - first as f64 / 2.0;
                let falling = if i < first { inverse(spectra[0], first + i) } else { 0.0 };
                let rising =
                    (i + second / 2).checked_sub(first / 2).map_or(0.0, |i| inverse(spectra[1], i));
                (falling * rise(-1.0 - t) + rising * rise(t)) as f32
            })
            .collect()
    }

    #[test]
    fn blocks_of_all_sizes_overlap_as_defined() {
        let mut work = Box::<Work>::default();
        let mut state = 1u32;
        for pair in [
            [32, 32],
            [32, 64],
            [64, 128],
            [128, 256],
            [1024, 128],
            [512, 1024],
            [2048, 4096],
            [4096, 32],
        ] {
            let spectra = pair.map(|lines| {
                let mut x = vec![0.0f32; lines];
                for x in &mut x {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    *x = (state >> 8) as f32 / 16_777_216.0 - 0.5;
                }
                x
            });
            for x in &spectra {
                for (to, x) in work.lines.iter_mut().zip(x) {
                    *to = -x;
                }
                work.transform(table(x.len()));
            }
            let n = overlap(&mut work, table(pair[0]), table(pair[1]));
            let slow = slow([&spectra[0], &spectra[1]]);
            assert_eq!(n, slow.len());
            for (i, (x, y)) in work.samples.iter().zip(&slow).enumerate() {
                assert!((x - y).abs() < 1e-4, "{pair:?}, sample {i}: {x}, expected {y}");
            }
        }
    }
}

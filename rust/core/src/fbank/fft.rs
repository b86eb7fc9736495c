//! The Fourier transform of several frames at once, one in each lane, and its power spectrum.

use super::FilterBank;
use jaxtrain_decode::simd::{four, Complex, Lanes};

/// The radix of the pass over spans of `span` elements: 8, or in the last pass the rest.
#[inline(always)]
fn radix(span: usize) -> usize {
    if span.is_multiple_of(8) {
        8
    } else {
        span
    }
}

/// Elements of the independent parts that the first pass leaves of a transform of `half` elements.
#[inline(always)]
fn part(half: usize) -> usize {
    if radix(half) < half {
        half / 8
    } else {
        half
    }
}

/// The line of an element of a transform of `half` elements. After each part a line is free: the eight elements of a
/// butterfly of the first pass would else be 4 KB apart, and evict each other from the nearest cache.
#[inline(always)]
pub(super) fn line(element: usize, half: usize) -> usize {
    element + (element >> part(half).trailing_zeros())
}

/// The line in which a transform of `half` elements leaves bin `k`: its digits, one of each pass, reversed.
pub(super) fn place(mut k: usize, half: usize) -> usize {
    let (mut place, mut span) = (0, half);
    while span > 1 {
        let r = radix(span);
        span /= r;
        place += k % r * span;
        k /= r;
    }
    line(place, half)
}

/// Complex FFT of t.half in place: decimation in frequency, passes of radix 8, and a last pass of the rest. Bin k ends
/// at `t.place[k]`. Element p of lane l is at p * `V::N` + l of both planes. After the first pass its parts are
/// independent: one part after the other stays in the nearest cache.
#[inline(always)]
pub(super) unsafe fn transform<V: Lanes>(planes: [*mut f32; 2], t: &FilterBank) {
    let (whole, part) = (t.half, part(t.half));
    if part < whole {
        pass::<V>(planes, t, 0..whole, whole, part + 1);
    }
    for first in (0..whole).step_by(part) {
        let first = line(first, whole);
        let mut span = part;
        while radix(span) < span {
            pass::<V>(planes, t, first..first + part, span, span / 8);
            span /= 8;
        }
        for block in (first..first + part).step_by(span) {
            match span {
                8 => put(planes, block, butterfly::<V>(planes, block, 1)),
                4 => put(planes, block, four(take::<V, 4>(planes, block, 1))),
                _ => {
                    let [x, y] = take::<V, 2>(planes, block, 1);
                    put(planes, block, [x.add(y), x.sub(y)]);
                }
            }
        }
    }
}

/// A pass of radix 8 over the spans of `places`. A butterfly's elements are `stride` lines apart.
#[inline(always)]
unsafe fn pass<V: Lanes>(
    planes: [*mut f32; 2], t: &FilterBank, places: std::ops::Range<usize>, span: usize,
    stride: usize,
) {
    for j in 0..span / 8 {
        let mut twiddles = [(0.0, 0.0); 8];
        for (q, twiddle) in twiddles.iter_mut().enumerate() {
            let k = j * q * (t.half / span);
            *twiddle = (t.re[k], t.im[k]);
        }
        for block in places.clone().step_by(span) {
            let x = butterfly::<V>(planes, block + j, stride);
            x[0].store(planes, (block + j) * V::N);
            for q in 1..8 {
                let twiddle = Complex { re: V::splat(twiddles[q].0), im: V::splat(twiddles[q].1) };
                x[q].mul(twiddle).store(planes, (block + j + q * stride) * V::N);
            }
        }
    }
}

/// The R elements from `first` on, `stride` apart.
#[inline(always)]
unsafe fn take<V: Lanes, const R: usize>(
    planes: [*mut f32; 2], first: usize, stride: usize,
) -> [Complex<V>; R] {
    let mut x = [Complex { re: V::splat(0.0), im: V::splat(0.0) }; R];
    for (m, x) in x.iter_mut().enumerate() {
        *x = Complex::load(
            [planes[0].cast_const(), planes[1].cast_const()],
            (first + m * stride) * V::N,
        );
    }
    x
}

/// Leaves R elements from `first` on, side by side.
#[inline(always)]
unsafe fn put<V: Lanes, const R: usize>(planes: [*mut f32; 2], first: usize, x: [Complex<V>; R]) {
    for (q, x) in x.into_iter().enumerate() {
        x.store(planes, (first + q) * V::N);
    }
}

/// The DFT of the 8 elements from `first` on, `stride` apart.
#[inline(always)]
unsafe fn butterfly<V: Lanes>(
    planes: [*mut f32; 2], first: usize, stride: usize,
) -> [Complex<V>; 8] {
    let x = take::<V, 8>(planes, first, stride);
    let mut sums = [x[0]; 4];
    let mut differences = [x[0]; 4];
    for m in 0..4 {
        sums[m] = x[m].add(x[m + 4]);
        differences[m] = x[m].sub(x[m + 4]);
    }
    let (r, zero) = (V::splat(std::f32::consts::FRAC_1_SQRT_2), V::splat(0.0));
    // Times exp(-i tau m / 8).
    let [a, b, c, d] = differences;
    let b = Complex { re: b.re.add(b.im).mul(r), im: b.im.sub(b.re).mul(r) };
    let c = Complex { re: c.im, im: zero.sub(c.re) };
    let d = Complex { re: d.im.sub(d.re).mul(r), im: zero.sub(d.re.add(d.im)).mul(r) };
    let [x0, x2, x4, x6] = four(sums);
    let [x1, x3, x5, x7] = four([a, b, c, d]);
    [x0, x1, x2, x3, x4, x5, x6, x7]
}

/// Power of bins 1..half of the real transform, from the complex transform of (even, odd) samples, into `re` at
/// `t.place[k]`. With Z the complex one, E = Z\[k\] + conj Z\[half - k\], T = -i exp(-i tau k / N) (Z\[k\] - conj
/// Z\[half - k\]): 2 X\[k\] = E + T, 2 X\[half - k\] = conj(E - T). The window already holds the factor 1/2.
#[inline(always)]
pub(super) unsafe fn power<V: Lanes>(planes: [*mut f32; 2], t: &FilterBank) {
    let from = [planes[0].cast_const(), planes[1].cast_const()];
    // Bins k and half - k.
    let pairs = t.place[1..t.half / 2].iter().zip(t.place[t.half / 2 + 1..].iter().rev());
    for ((&p, &m), (&w_re, &w_im)) in pairs.zip(t.split_re[1..].iter().zip(&t.split_im[1..])) {
        let (p, m) = (p as usize * V::N, m as usize * V::N);
        let (a, b) = (Complex::<V>::load(from, p), Complex::load(from, m));
        let sum = Complex { re: a.re.add(b.re), im: a.im.sub(b.im) };
        let rest = Complex { re: a.im.add(b.im), im: b.re.sub(a.re) };
        let turned = Complex { re: V::splat(w_re), im: V::splat(w_im) }.mul(rest);
        sum.add(turned).power().store(planes[0].add(p));
        sum.sub(turned).power().store(planes[0].add(m));
    }
    let middle = t.place[t.half / 2] as usize * V::N;
    Complex::<V>::load(from, middle).power().mul(V::splat(4.0)).store(planes[0].add(middle));
}

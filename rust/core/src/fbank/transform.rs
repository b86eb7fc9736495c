//! The transform of several frames at once, one in each lane, and its power spectrum.

use super::FilterBank;
use jaxtrain_decode::simd::Lanes;

/// The radix of the pass over spans of `span` elements: 8, or in the last one what is left.
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

/// Complex FFT of t.half, decimation in frequency, passes of radix 8 and a last one of what is left, in place; bin k ends at
/// `t.place[k]`. Element p of lane l is at `re[p * V::N + l]`. After the first pass its parts are independent: one part
/// after the other stays in the nearest cache.
#[inline(always)]
pub(super) unsafe fn transform<V: Lanes>(re: *mut f32, im: *mut f32, t: &FilterBank) {
    let (whole, part) = (t.half, part(t.half));
    if part < whole {
        pass::<V>(re, im, t, 0..whole, whole, part + 1);
    }
    for first in (0..whole).step_by(part) {
        let first = line(first, whole);
        let mut span = part;
        while radix(span) < span {
            pass::<V>(re, im, t, first..first + part, span, span / 8);
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

/// A pass of radix 8 over the spans of `places`. A butterfly's elements are `stride` lines apart.
#[inline(always)]
unsafe fn pass<V: Lanes>(
    re: *mut f32, im: *mut f32, t: &FilterBank, places: std::ops::Range<usize>, span: usize, stride: usize,
) {
    for j in 0..span / 8 {
        let mut twiddles = [(0.0, 0.0); 8];
        for (q, twiddle) in twiddles.iter_mut().enumerate() {
            let k = j * q * (t.half / span);
            *twiddle = (t.re[k], t.im[k]);
        }
        for block in places.clone().step_by(span) {
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

/// The R elements from `first` on, `stride` apart.
#[inline(always)]
unsafe fn take<V: Lanes, const R: usize>(re: *const f32, im: *const f32, first: usize, stride: usize) -> [(V, V); R] {
    let mut x = [(V::splat(0.0), V::splat(0.0)); R];
    for (m, x) in x.iter_mut().enumerate() {
        let at = (first + m * stride) * V::N;
        *x = (V::load(re.add(at)), V::load(im.add(at)));
    }
    x
}

/// Leaves R elements from `first` on, side by side.
#[inline(always)]
unsafe fn put<V: Lanes, const R: usize>(re: *mut f32, im: *mut f32, first: usize, x: [(V, V); R]) {
    for (q, (a, b)) in x.into_iter().enumerate() {
        a.store(re.add((first + q) * V::N));
        b.store(im.add((first + q) * V::N));
    }
}

/// The DFT of the 8 elements from `first` on, `stride` apart.
#[inline(always)]
unsafe fn butterfly<V: Lanes>(re: *const f32, im: *const f32, first: usize, stride: usize) -> [(V, V); 8] {
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

/// The DFT of 4 elements.
#[inline(always)]
unsafe fn four<V: Lanes>(x0: (V, V), x1: (V, V), x2: (V, V), x3: (V, V)) -> [(V, V); 4] {
    let (s0, d0) = ((x0.0.add(x2.0), x0.1.add(x2.1)), (x0.0.sub(x2.0), x0.1.sub(x2.1)));
    let (s1, d1) = ((x1.0.add(x3.0), x1.1.add(x3.1)), (x1.0.sub(x3.0), x1.1.sub(x3.1)));
    [
        (s0.0.add(s1.0), s0.1.add(s1.1)),
        (d0.0.add(d1.1), d0.1.sub(d1.0)),
        (s0.0.sub(s1.0), s0.1.sub(s1.1)),
        (d0.0.sub(d1.1), d0.1.add(d1.0)),
    ]
}

/// Power of bins 1..half of the real transform, from the complex transform of (even, odd) samples, into `re` at
/// `t.place[k]`. With Z the complex one, E = Z\[k\] + conj Z\[half - k\], T = -i exp(-i tau k / N) (Z\[k\] - conj
/// Z\[half - k\]): 2 X\[k\] = E + T, 2 X\[half - k\] = conj(E - T). The window already holds the factor 1/2.
#[inline(always)]
pub(super) unsafe fn power<V: Lanes>(re: *mut f32, im: *const f32, t: &FilterBank) {
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

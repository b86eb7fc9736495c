//! A few float32 lanes, so that one generic kernel compiles to machine code for each instruction set.
//!
//! A kernel is written once over [`Lanes`] and marked `#[inline(always)]`. [`kernel!`](crate::kernel) compiles it
//! inside a `#[target_feature]` function for each instruction set, and calls the best one of the machine. The wheel
//! therefore runs on every x86-64 and arm64 machine. Results may differ in the last bits between machines (a fused
//! multiply-add rounds once), never between runs or thread counts on one.
//!
//! Inside a kernel there are no closures (and so no `array::from_fn`): a closure does not inherit the instruction set
//! of the function around it, and each of its intrinsics would become a call.

/// Writes a function that calls the first of some kernels whose instruction set this machine has. The sets are
/// `avx512`, `avx2` and `bits` (counting zeros and shifting by a register). The last kernel runs on any machine.
#[macro_export]
macro_rules! kernel {
    ($(#[$meta:meta])* $vis:vis fn $name:ident $arguments:tt -> $out:ty: $($set:ident $fast:path),+; else $any:path) => {
        $(#[$meta])*
        $vis fn $name $arguments -> $out {
            #[cfg(target_arch = "x86_64")]
            {
                $($crate::kernel!(@$set $fast, $arguments $out);)+
            }
            $crate::kernel!(@call $any, $arguments)
        }
    };
    (@avx512 $($rest:tt)*) => { $crate::kernel!(@if avx512, "avx2,fma,bmi1,bmi2,lzcnt,avx512f", $($rest)*) };
    (@avx2 $($rest:tt)*) => { $crate::kernel!(@if avx2, "avx2,fma,bmi1,bmi2,lzcnt", $($rest)*) };
    (@bits $($rest:tt)*) => { $crate::kernel!(@if avx2, "bmi1,bmi2,lzcnt", $($rest)*) };
    (@if $has:ident, $features:tt, $fast:path, ($($argument:ident: $type:ty),*) $out:ty) => {
        if $crate::simd::$has() {
            #[target_feature(enable = $features)]
            unsafe fn with($($argument: $type),*) -> $out {
                $fast($($argument),*)
            }
            // SAFETY: the instruction set was just checked.
            return unsafe { with($($argument),*) };
        }
    };
    (@call $any:path, ($($argument:ident: $type:ty),*)) => {
        // SAFETY: portable lanes need nothing of the machine.
        #[allow(unused_unsafe)]
        unsafe { $any($($argument),*) }
    };
}

/// Unsafe methods that are inlined into the kernel around them, and so compiled for its instruction set.
macro_rules! inlined {
    ($($(#[$meta:meta])* $vis:vis fn $name:ident $arguments:tt $(-> $out:ty)? $body:block)*) => {
        $($(#[$meta])* #[inline(always)] $vis unsafe fn $name $arguments $(-> $out)? $body)*
    };
}
pub use kernel;

/// `N` float32 values that are processed together.
///
/// # Safety
/// The methods of an implementation may only run on a machine that has its instruction set, and pointers must
/// be valid for `N` values (no alignment is needed).
#[allow(clippy::missing_safety_doc)] // the trait's section holds for each method
pub trait Lanes: Copy {
    const N: usize;
    /// Whether `mul_add` rounds once.
    const FUSED: bool;
    unsafe fn splat(x: f32) -> Self;
    unsafe fn load(p: *const f32) -> Self;
    unsafe fn store(self, p: *mut f32);
    /// The four values from `p` + i `stride` on in lane i of each: every lane's pointer must be valid for 4 values.
    unsafe fn fours(p: *const f32, stride: usize) -> [Self; 4];
    unsafe fn add(self, b: Self) -> Self;
    unsafe fn sub(self, b: Self) -> Self;
    unsafe fn mul(self, b: Self) -> Self;
    /// self * b + c
    unsafe fn mul_add(self, b: Self, c: Self) -> Self;
    /// c - self * b
    unsafe fn neg_mul_add(self, b: Self, c: Self) -> Self;
    /// The sum of all lanes, in a fixed order.
    unsafe fn sum(self) -> f32;
}

/// Lanes that also change places.
///
/// # Safety
/// As for [`Lanes`].
#[allow(clippy::missing_safety_doc)] // the trait's section holds for each method
pub trait Shuffle: Lanes {
    /// The lanes in the opposite order.
    unsafe fn reverse(self) -> Self;
    /// Alternately a lane of self and of b.
    unsafe fn interleave(self, b: Self) -> [Self; 2];
    /// The even and the odd lanes of self and b, in this order.
    unsafe fn deinterleave(self, b: Self) -> [Self; 2];
    /// The entries of a table at the lanes' integer parts, and its first or last entry for those beyond its ends.
    unsafe fn look_up(self, table: &[f32; 256]) -> Self;
}

/// Complex values.
#[derive(Clone, Copy)]
pub struct Complex<V> {
    pub re: V,
    pub im: V,
}

#[allow(clippy::missing_safety_doc)] // the section of `Lanes` holds for each method
impl<V: Lanes> Complex<V> {
    inlined! {
        pub fn load(planes: [*const f32; 2], at: usize) -> Self {
            Self { re: V::load(planes[0].add(at)), im: V::load(planes[1].add(at)) }
        }
        pub fn store(self, planes: [*mut f32; 2], at: usize) {
            self.re.store(planes[0].add(at));
            self.im.store(planes[1].add(at));
        }
        pub fn add(self, b: Self) -> Self { Self { re: self.re.add(b.re), im: self.im.add(b.im) } }
        pub fn sub(self, b: Self) -> Self { Self { re: self.re.sub(b.re), im: self.im.sub(b.im) } }
        pub fn mul(self, b: Self) -> Self {
            Self { re: self.im.neg_mul_add(b.im, self.re.mul(b.re)), im: self.re.mul_add(b.im, self.im.mul(b.re)) }
        }
        /// self + i b
        pub fn add_turned(self, b: Self) -> Self { Self { re: self.re.sub(b.im), im: self.im.add(b.re) } }
        /// self - i b
        pub fn sub_turned(self, b: Self) -> Self { Self { re: self.re.add(b.im), im: self.im.sub(b.re) } }
        /// The square of its length.
        pub fn power(self) -> V { self.re.mul_add(self.re, self.im.mul(self.im)) }
    }
}

/// The Fourier transform of four points.
///
/// # Safety
/// As for [`Lanes`].
#[inline(always)]
pub unsafe fn four<V: Lanes>([a, b, c, d]: [Complex<V>; 4]) -> [Complex<V>; 4] {
    let (sum, difference, sum_2, difference_2) = (a.add(c), a.sub(c), b.add(d), b.sub(d));
    [
        sum.add(sum_2),
        difference.sub_turned(difference_2),
        sum.sub(sum_2),
        difference.add_turned(difference_2),
    ]
}

/// Lanes for any machine: the compiler uses the baseline instruction set.
#[derive(Clone, Copy)]
pub struct Portable([f32; 8]);

// A loop, since a closure may be compiled as a function of its own, for the baseline.
macro_rules! lanes {
    ($i:ident => $value:expr) => {{
        let mut lanes = [0.0; 8];
        for $i in 0..8 {
            lanes[$i] = $value;
        }
        Self(lanes)
    }};
}

// SAFETY, all methods below: the trait's contract (the instruction set is present, pointers are valid for `N` values).
impl Lanes for Portable {
    const N: usize = 8;
    const FUSED: bool = false;

    inlined! {
        fn splat(x: f32) -> Self { Self([x; 8]) }
        fn load(p: *const f32) -> Self { Self(p.cast::<[f32; 8]>().read_unaligned()) }
        fn store(self, p: *mut f32) { p.cast::<[f32; 8]>().write_unaligned(self.0) }
        fn fours(p: *const f32, stride: usize) -> [Self; 4] {
            let mut fours = [Self([0.0; 8]); 4];
            for i in 0..8 {
                for (k, four) in fours.iter_mut().enumerate() {
                    four.0[i] = *p.add(i * stride + k);
                }
            }
            fours
        }
        fn add(self, b: Self) -> Self { lanes!(i => self.0[i] + b.0[i]) }
        fn sub(self, b: Self) -> Self { lanes!(i => self.0[i] - b.0[i]) }
        fn mul(self, b: Self) -> Self { lanes!(i => self.0[i] * b.0[i]) }
        fn mul_add(self, b: Self, c: Self) -> Self { lanes!(i => self.0[i] * b.0[i] + c.0[i]) }
        fn neg_mul_add(self, b: Self, c: Self) -> Self { lanes!(i => c.0[i] - self.0[i] * b.0[i]) }
        fn sum(self) -> f32 {
            let [a, b, c, d, e, f, g, h] = self.0;
            ((a + e) + (c + g)) + ((b + f) + (d + h))
        }
    }
}

impl Shuffle for Portable {
    inlined! {
        fn reverse(self) -> Self { lanes!(i => self.0[7 - i]) }
        fn interleave(self, b: Self) -> [Self; 2] {
            [lanes!(i => [self.0, b.0][i % 2][i / 2]), lanes!(i => [self.0, b.0][i % 2][4 + i / 2])]
        }
        fn deinterleave(self, b: Self) -> [Self; 2] {
            [lanes!(i => [self.0, b.0][i / 4][2 * i % 8]), lanes!(i => [self.0, b.0][i / 4][2 * i % 8 + 1])]
        }
        fn look_up(self, table: &[f32; 256]) -> Self { lanes!(i => table[(self.0[i] as i32).clamp(0, 255) as usize]) }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{Lanes, Shuffle};

    /// Eight lanes of AVX2 with fused multiply-add.
    #[derive(Clone, Copy)]
    pub struct Avx2(__m256);

    /// Sixteen lanes of AVX-512. Each lane rounds as one of [`Avx2`] does.
    #[derive(Clone, Copy)]
    pub struct Avx512(__m512);

    impl Lanes for Avx2 {
        const N: usize = 8;
        const FUSED: bool = true;

        inlined! {
            fn splat(x: f32) -> Self { Self(_mm256_set1_ps(x)) }
            fn load(p: *const f32) -> Self { Self(_mm256_loadu_ps(p)) }
            fn store(self, p: *mut f32) { _mm256_storeu_ps(p, self.0) }
            fn fours(p: *const f32, stride: usize) -> [Self; 4] {
                // Of lanes i and i + 4.
                let mut rows = [_mm256_setzero_ps(); 4];
                for (i, row) in rows.iter_mut().enumerate() {
                    *row = two(p.add(i * stride), 4 * stride);
                }
                let [a, b, c, d] = turn(rows);
                [Self(a), Self(b), Self(c), Self(d)]
            }
            fn add(self, b: Self) -> Self { Self(_mm256_add_ps(self.0, b.0)) }
            fn sub(self, b: Self) -> Self { Self(_mm256_sub_ps(self.0, b.0)) }
            fn mul(self, b: Self) -> Self { Self(_mm256_mul_ps(self.0, b.0)) }
            fn mul_add(self, b: Self, c: Self) -> Self { Self(_mm256_fmadd_ps(self.0, b.0, c.0)) }
            fn neg_mul_add(self, b: Self, c: Self) -> Self { Self(_mm256_fnmadd_ps(self.0, b.0, c.0)) }
            fn sum(self) -> f32 {
                let half = _mm_add_ps(_mm256_castps256_ps128(self.0), _mm256_extractf128_ps::<1>(self.0));
                let pair = _mm_add_ps(half, _mm_movehl_ps(half, half));
                _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)))
            }
        }
    }

    impl Shuffle for Avx2 {
        inlined! {
            fn reverse(self) -> Self { Self(_mm256_permutevar8x32_ps(self.0, _mm256_setr_epi32(7, 6, 5, 4, 3, 2, 1, 0))) }
            fn interleave(self, b: Self) -> [Self; 2] {
                let (low, high) = (_mm256_unpacklo_ps(self.0, b.0), _mm256_unpackhi_ps(self.0, b.0));
                [Self(_mm256_permute2f128_ps::<0x20>(low, high)), Self(_mm256_permute2f128_ps::<0x31>(low, high))]
            }
            fn deinterleave(self, b: Self) -> [Self; 2] {
                let even = _mm256_castps_pd(_mm256_shuffle_ps::<0x88>(self.0, b.0));
                let odd = _mm256_castps_pd(_mm256_shuffle_ps::<0xdd>(self.0, b.0));
                [
                    Self(_mm256_castpd_ps(_mm256_permute4x64_pd::<0xd8>(even))),
                    Self(_mm256_castpd_ps(_mm256_permute4x64_pd::<0xd8>(odd))),
                ]
            }
            fn look_up(self, table: &[f32; 256]) -> Self {
                let index = _mm256_max_epi32(_mm256_cvttps_epi32(self.0), _mm256_setzero_si256());
                Self(_mm256_i32gather_ps::<4>(table.as_ptr(), _mm256_min_epi32(index, _mm256_set1_epi32(255))))
            }
        }
    }

    impl Lanes for Avx512 {
        const N: usize = 16;
        const FUSED: bool = true;

        inlined! {
            fn splat(x: f32) -> Self { Self(_mm512_set1_ps(x)) }
            fn load(p: *const f32) -> Self { Self(_mm512_loadu_ps(p)) }
            fn store(self, p: *mut f32) { _mm512_storeu_ps(p, self.0) }
            fn fours(p: *const f32, stride: usize) -> [Self; 4] {
                // Of lanes i, i + 4, i + 8 and i + 12.
                let mut rows = [_mm512_setzero_ps(); 4];
                for (i, row) in rows.iter_mut().enumerate() {
                    let at = p.add(i * stride);
                    let lanes = _mm512_castps128_ps512(_mm_loadu_ps(at));
                    let lanes = _mm512_insertf32x4::<1>(lanes, _mm_loadu_ps(at.add(4 * stride)));
                    let lanes = _mm512_insertf32x4::<2>(lanes, _mm_loadu_ps(at.add(8 * stride)));
                    *row = _mm512_insertf32x4::<3>(lanes, _mm_loadu_ps(at.add(12 * stride)));
                }
                let (ab, ab_high) = (_mm512_unpacklo_ps(rows[0], rows[1]), _mm512_unpackhi_ps(rows[0], rows[1]));
                let (cd, cd_high) = (_mm512_unpacklo_ps(rows[2], rows[3]), _mm512_unpackhi_ps(rows[2], rows[3]));
                [
                    Self(_mm512_shuffle_ps::<0x44>(ab, cd)),
                    Self(_mm512_shuffle_ps::<0xee>(ab, cd)),
                    Self(_mm512_shuffle_ps::<0x44>(ab_high, cd_high)),
                    Self(_mm512_shuffle_ps::<0xee>(ab_high, cd_high)),
                ]
            }
            fn add(self, b: Self) -> Self { Self(_mm512_add_ps(self.0, b.0)) }
            fn sub(self, b: Self) -> Self { Self(_mm512_sub_ps(self.0, b.0)) }
            fn mul(self, b: Self) -> Self { Self(_mm512_mul_ps(self.0, b.0)) }
            fn mul_add(self, b: Self, c: Self) -> Self { Self(_mm512_fmadd_ps(self.0, b.0, c.0)) }
            fn neg_mul_add(self, b: Self, c: Self) -> Self { Self(_mm512_fnmadd_ps(self.0, b.0, c.0)) }
            fn sum(self) -> f32 { _mm512_reduce_add_ps(self.0) }
        }
    }

    inlined! {
        /// Four values from `p` on, and four from `apart` values later on.
        fn two(p: *const f32, apart: usize) -> __m256 {
            _mm256_insertf128_ps::<1>(_mm256_castps128_ps256(_mm_loadu_ps(p)), _mm_loadu_ps(p.add(apart)))
        }
        /// Transposes the squares of 4 by 4 values in both halves.
        fn turn(rows: [__m256; 4]) -> [__m256; 4] {
            let (ab, ab_high) = (_mm256_unpacklo_ps(rows[0], rows[1]), _mm256_unpackhi_ps(rows[0], rows[1]));
            let (cd, cd_high) = (_mm256_unpacklo_ps(rows[2], rows[3]), _mm256_unpackhi_ps(rows[2], rows[3]));
            [
                _mm256_shuffle_ps::<0x44>(ab, cd),
                _mm256_shuffle_ps::<0xee>(ab, cd),
                _mm256_shuffle_ps::<0x44>(ab_high, cd_high),
                _mm256_shuffle_ps::<0xee>(ab_high, cd_high),
            ]
        }
    }

    /// Transposes all squares of 8 by 8 values, and returns how far they reach. The machine must have AVX2.
    #[target_feature(enable = "avx2")]
    pub unsafe fn transpose(
        from: *const f32, from_stride: usize, sizes: [usize; 2], to: *mut f32, to_stride: usize,
    ) -> [usize; 2] {
        let done = sizes.map(|n| n / 8 * 8);
        for j in (0..done[1]).step_by(8) {
            for i in (0..done[0]).step_by(8) {
                let from = from.add(i * from_stride + j);
                // Row r has values 0..4 of row r and of row r + 4, or values 4..8 of both.
                let mut rows = [[_mm256_setzero_ps(); 4]; 2];
                for (half, rows) in rows.iter_mut().enumerate() {
                    for (r, row) in rows.iter_mut().enumerate() {
                        *row = two(from.add(r * from_stride + 4 * half), 4 * from_stride);
                    }
                }
                for (half, rows) in rows.into_iter().enumerate() {
                    for (r, row) in turn(rows).into_iter().enumerate() {
                        _mm256_storeu_ps(to.add((j + 4 * half + r) * to_stride + i), row);
                    }
                }
            }
        }
        done
    }
}

#[cfg(target_arch = "x86_64")]
pub use x86::{Avx2, Avx512};

/// to\[j * to_stride + i\] = from\[i * from_stride + j\], for i below the first of `sizes` and j below the second.
///
/// # Safety
/// `from` and `to` must be valid for these places.
pub unsafe fn transpose(
    from: *const f32, from_stride: usize, sizes: [usize; 2], to: *mut f32, to_stride: usize,
) {
    #[cfg(target_arch = "x86_64")]
    let done =
        if avx2() { x86::transpose(from, from_stride, sizes, to, to_stride) } else { [0, 0] };
    #[cfg(not(target_arch = "x86_64"))]
    let done = [0, 0];
    for i in 0..sizes[0] {
        for j in if i < done[0] { done[1] } else { 0 }..sizes[1] {
            *to.add(j * to_stride + i) = *from.add(i * from_stride + j);
        }
    }
}

/// Writes a function that says whether this machine has some features (std caches the answer).
macro_rules! has {
    ($($(#[$doc:meta])* $name:ident[$($feature:tt)*])*) => {$(
        $(#[$doc])*
        #[inline]
        pub fn $name() -> bool {
            #[cfg(target_arch = "x86_64")]
            return true $(&& std::arch::is_x86_feature_detected!($feature))*;
            #[cfg(not(target_arch = "x86_64"))]
            false
        }
    )*};
}

has! {
    /// AVX2 and the sets that came with it: fused multiply-add, counting zeros, and shifting by a register.
    avx2["avx2" "fma" "bmi1" "bmi2" "lzcnt"]
    /// The same, and AVX-512's foundation.
    avx512["avx512f" "avx2" "fma" "bmi1" "bmi2" "lzcnt"]
    /// Products of polynomials over bits, and shuffles of bytes.
    polynomials["pclmulqdq" "ssse3"]
}

//! A few float32 lanes, so that one generic kernel compiles to machine code for each instruction set.
//!
//! A kernel is written once over [`Lanes`], marked `#[inline(always)]`, and instantiated inside a
//! `#[target_feature]` function for each instruction set; [`avx2`] decides at run time which one to call. The
//! wheel therefore runs on every x86-64 and arm64 machine. Results may differ in the last bits between
//! machines (a fused multiply-add rounds once), never between runs or thread counts on one.
//!
//! Inside a kernel there are no closures (and so no `array::from_fn`): a closure does not inherit the instruction set
//! of the function around it, and each of its intrinsics would become a call.

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

/// Lanes for any machine: the compiler uses what the baseline instruction set offers.
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

impl Lanes for Portable {
    const N: usize = 8;
    const FUSED: bool = false;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Self([x; 8])
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: the caller's pointer is valid for 8 values.
        Self(unsafe { p.cast::<[f32; 8]>().read_unaligned() })
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: as for load.
        unsafe { p.cast::<[f32; 8]>().write_unaligned(self.0) }
    }

    #[inline(always)]
    unsafe fn fours(p: *const f32, stride: usize) -> [Self; 4] {
        let mut fours = [Self([0.0; 8]); 4];
        for i in 0..8 {
            for (k, four) in fours.iter_mut().enumerate() {
                // SAFETY: the caller's pointers are valid for 4 values.
                four.0[i] = unsafe { *p.add(i * stride + k) };
            }
        }
        fours
    }

    #[inline(always)]
    unsafe fn add(self, b: Self) -> Self {
        lanes!(i => self.0[i] + b.0[i])
    }

    #[inline(always)]
    unsafe fn sub(self, b: Self) -> Self {
        lanes!(i => self.0[i] - b.0[i])
    }

    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        lanes!(i => self.0[i] * b.0[i])
    }

    #[inline(always)]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        lanes!(i => self.0[i] * b.0[i] + c.0[i])
    }

    #[inline(always)]
    unsafe fn neg_mul_add(self, b: Self, c: Self) -> Self {
        lanes!(i => c.0[i] - self.0[i] * b.0[i])
    }

    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        let [a, b, c, d, e, f, g, h] = self.0;
        ((a + e) + (c + g)) + ((b + f) + (d + h))
    }
}

impl Shuffle for Portable {
    #[inline(always)]
    unsafe fn reverse(self) -> Self {
        lanes!(i => self.0[7 - i])
    }

    #[inline(always)]
    unsafe fn interleave(self, b: Self) -> [Self; 2] {
        [lanes!(i => [self.0, b.0][i % 2][i / 2]), lanes!(i => [self.0, b.0][i % 2][4 + i / 2])]
    }

    #[inline(always)]
    unsafe fn deinterleave(self, b: Self) -> [Self; 2] {
        [lanes!(i => [self.0, b.0][i / 4][2 * i % 8]), lanes!(i => [self.0, b.0][i / 4][2 * i % 8 + 1])]
    }

    #[inline(always)]
    unsafe fn look_up(self, table: &[f32; 256]) -> Self {
        lanes!(i => table[(self.0[i] as i32).clamp(0, 255) as usize])
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{Lanes, Shuffle};

    /// Eight lanes of AVX2 with fused multiply-add.
    #[derive(Clone, Copy)]
    pub struct Avx2(__m256);

    // SAFETY, all methods: the trait's contract (AVX2 and FMA present, pointers valid for 8 values).
    impl Lanes for Avx2 {
        const N: usize = 8;
        const FUSED: bool = true;

        #[inline(always)]
        unsafe fn splat(x: f32) -> Self {
            Self(unsafe { _mm256_set1_ps(x) })
        }

        #[inline(always)]
        unsafe fn load(p: *const f32) -> Self {
            Self(unsafe { _mm256_loadu_ps(p) })
        }

        #[inline(always)]
        unsafe fn store(self, p: *mut f32) {
            unsafe { _mm256_storeu_ps(p, self.0) }
        }

        #[inline(always)]
        unsafe fn fours(p: *const f32, stride: usize) -> [Self; 4] {
            unsafe {
                // Of lanes i and i + 4.
                let mut rows = [_mm256_setzero_ps(); 4];
                for (i, row) in rows.iter_mut().enumerate() {
                    let at = p.add(i * stride);
                    let low = _mm256_castps128_ps256(_mm_loadu_ps(at));
                    *row = _mm256_insertf128_ps::<1>(low, _mm_loadu_ps(at.add(4 * stride)));
                }
                let (ab, ab_high) = (_mm256_unpacklo_ps(rows[0], rows[1]), _mm256_unpackhi_ps(rows[0], rows[1]));
                let (cd, cd_high) = (_mm256_unpacklo_ps(rows[2], rows[3]), _mm256_unpackhi_ps(rows[2], rows[3]));
                [
                    Self(_mm256_shuffle_ps::<0x44>(ab, cd)),
                    Self(_mm256_shuffle_ps::<0xee>(ab, cd)),
                    Self(_mm256_shuffle_ps::<0x44>(ab_high, cd_high)),
                    Self(_mm256_shuffle_ps::<0xee>(ab_high, cd_high)),
                ]
            }
        }

        #[inline(always)]
        unsafe fn add(self, b: Self) -> Self {
            Self(unsafe { _mm256_add_ps(self.0, b.0) })
        }

        #[inline(always)]
        unsafe fn sub(self, b: Self) -> Self {
            Self(unsafe { _mm256_sub_ps(self.0, b.0) })
        }

        #[inline(always)]
        unsafe fn mul(self, b: Self) -> Self {
            Self(unsafe { _mm256_mul_ps(self.0, b.0) })
        }

        #[inline(always)]
        unsafe fn mul_add(self, b: Self, c: Self) -> Self {
            Self(unsafe { _mm256_fmadd_ps(self.0, b.0, c.0) })
        }

        #[inline(always)]
        unsafe fn neg_mul_add(self, b: Self, c: Self) -> Self {
            Self(unsafe { _mm256_fnmadd_ps(self.0, b.0, c.0) })
        }

        #[inline(always)]
        unsafe fn sum(self) -> f32 {
            unsafe {
                let half = _mm_add_ps(_mm256_castps256_ps128(self.0), _mm256_extractf128_ps::<1>(self.0));
                let pair = _mm_add_ps(half, _mm_movehl_ps(half, half));
                _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)))
            }
        }
    }

    // SAFETY, all methods: the contract of `Lanes`; indices are clamped to the table.
    impl Shuffle for Avx2 {
        #[inline(always)]
        unsafe fn reverse(self) -> Self {
            Self(unsafe { _mm256_permutevar8x32_ps(self.0, _mm256_setr_epi32(7, 6, 5, 4, 3, 2, 1, 0)) })
        }

        #[inline(always)]
        unsafe fn interleave(self, b: Self) -> [Self; 2] {
            unsafe {
                let (low, high) = (_mm256_unpacklo_ps(self.0, b.0), _mm256_unpackhi_ps(self.0, b.0));
                [Self(_mm256_permute2f128_ps::<0x20>(low, high)), Self(_mm256_permute2f128_ps::<0x31>(low, high))]
            }
        }

        #[inline(always)]
        unsafe fn deinterleave(self, b: Self) -> [Self; 2] {
            unsafe {
                let even = _mm256_castps_pd(_mm256_shuffle_ps::<0x88>(self.0, b.0));
                let odd = _mm256_castps_pd(_mm256_shuffle_ps::<0xdd>(self.0, b.0));
                [
                    Self(_mm256_castpd_ps(_mm256_permute4x64_pd::<0xd8>(even))),
                    Self(_mm256_castpd_ps(_mm256_permute4x64_pd::<0xd8>(odd))),
                ]
            }
        }

        #[inline(always)]
        unsafe fn look_up(self, table: &[f32; 256]) -> Self {
            unsafe {
                let index = _mm256_max_epi32(_mm256_cvttps_epi32(self.0), _mm256_setzero_si256());
                let index = _mm256_min_epi32(index, _mm256_set1_epi32(255));
                Self(_mm256_i32gather_ps::<4>(table.as_ptr(), index))
            }
        }
    }

    /// Sixteen lanes of AVX-512. Each lane rounds as one of [`Avx2`] does.
    #[derive(Clone, Copy)]
    pub struct Avx512(__m512);

    // SAFETY, all methods: the trait's contract (AVX-512F present, pointers valid for 16 values).
    impl Lanes for Avx512 {
        const N: usize = 16;
        const FUSED: bool = true;

        #[inline(always)]
        unsafe fn splat(x: f32) -> Self {
            Self(unsafe { _mm512_set1_ps(x) })
        }

        #[inline(always)]
        unsafe fn load(p: *const f32) -> Self {
            Self(unsafe { _mm512_loadu_ps(p) })
        }

        #[inline(always)]
        unsafe fn store(self, p: *mut f32) {
            unsafe { _mm512_storeu_ps(p, self.0) }
        }

        #[inline(always)]
        unsafe fn fours(p: *const f32, stride: usize) -> [Self; 4] {
            unsafe {
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
        }

        #[inline(always)]
        unsafe fn add(self, b: Self) -> Self {
            Self(unsafe { _mm512_add_ps(self.0, b.0) })
        }

        #[inline(always)]
        unsafe fn sub(self, b: Self) -> Self {
            Self(unsafe { _mm512_sub_ps(self.0, b.0) })
        }

        #[inline(always)]
        unsafe fn mul(self, b: Self) -> Self {
            Self(unsafe { _mm512_mul_ps(self.0, b.0) })
        }

        #[inline(always)]
        unsafe fn mul_add(self, b: Self, c: Self) -> Self {
            Self(unsafe { _mm512_fmadd_ps(self.0, b.0, c.0) })
        }

        #[inline(always)]
        unsafe fn neg_mul_add(self, b: Self, c: Self) -> Self {
            Self(unsafe { _mm512_fnmadd_ps(self.0, b.0, c.0) })
        }

        #[inline(always)]
        unsafe fn sum(self) -> f32 {
            unsafe { _mm512_reduce_add_ps(self.0) }
        }
    }

    /// Transposes all squares of 8 by 8 values, and returns how far they reach.
    ///
    /// # Safety
    /// As [`super::transpose`], and the machine must have AVX2.
    #[target_feature(enable = "avx2")]
    pub unsafe fn transpose(
        from: *const f32,
        from_stride: usize,
        sizes: [usize; 2],
        to: *mut f32,
        to_stride: usize,
    ) -> [usize; 2] {
        let done = sizes.map(|n| n / 8 * 8);
        for j in (0..done[1]).step_by(8) {
            for i in (0..done[0]).step_by(8) {
                unsafe {
                    let from = from.add(i * from_stride + j);
                    // Row r has values 0..4 of row r and of row r + 4, or values 4..8 of both.
                    let mut rows = [_mm256_setzero_ps(); 8];
                    for half in 0..2 {
                        for r in 0..4 {
                            let from = from.add(r * from_stride + 4 * half);
                            let low = _mm256_castps128_ps256(_mm_loadu_ps(from));
                            rows[4 * half + r] =
                                _mm256_insertf128_ps::<1>(low, _mm_loadu_ps(from.add(4 * from_stride)));
                        }
                    }
                    for half in 0..2 {
                        let [a, b, c, d] = [rows[4 * half], rows[4 * half + 1], rows[4 * half + 2], rows[4 * half + 3]];
                        let (ab, cd) = (_mm256_unpacklo_ps(a, b), _mm256_unpacklo_ps(c, d));
                        let (ab_high, cd_high) = (_mm256_unpackhi_ps(a, b), _mm256_unpackhi_ps(c, d));
                        let to = to.add((j + 4 * half) * to_stride + i);
                        _mm256_storeu_ps(to, _mm256_shuffle_ps::<0x44>(ab, cd));
                        _mm256_storeu_ps(to.add(to_stride), _mm256_shuffle_ps::<0xee>(ab, cd));
                        _mm256_storeu_ps(to.add(2 * to_stride), _mm256_shuffle_ps::<0x44>(ab_high, cd_high));
                        _mm256_storeu_ps(to.add(3 * to_stride), _mm256_shuffle_ps::<0xee>(ab_high, cd_high));
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
pub unsafe fn transpose(from: *const f32, from_stride: usize, sizes: [usize; 2], to: *mut f32, to_stride: usize) {
    #[cfg(target_arch = "x86_64")]
    let done = if avx2() {
        // SAFETY: the instruction set was just checked, and the caller's promises are the same.
        unsafe { x86::transpose(from, from_stride, sizes, to, to_stride) }
    } else {
        [0, 0]
    };
    #[cfg(not(target_arch = "x86_64"))]
    let done = [0, 0];
    for i in 0..sizes[0] {
        for j in if i < done[0] { done[1] } else { 0 }..sizes[1] {
            unsafe { *to.add(j * to_stride + i) = *from.add(i * from_stride + j) };
        }
    }
}

/// Whether this machine has AVX2 and fused multiply-add (std caches the answer).
#[inline]
pub fn avx2() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma")
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        false
    }
}

/// Whether this machine has AVX-512's foundation besides.
#[inline]
pub fn avx512() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        avx2() && std::arch::is_x86_feature_detected!("avx512f")
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        false
    }
}

/// Whether this machine multiplies polynomials over bits, and shuffles bytes.
#[inline]
pub fn polynomials() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        std::arch::is_x86_feature_detected!("pclmulqdq") && std::arch::is_x86_feature_detected!("ssse3")
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        false
    }
}

/// Whether this machine has instructions for counting zeros and for shifting by a register (BMI, LZCNT).
#[inline]
pub fn bit_counts() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        std::arch::is_x86_feature_detected!("bmi1")
            && std::arch::is_x86_feature_detected!("bmi2")
            && std::arch::is_x86_feature_detected!("lzcnt")
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        false
    }
}

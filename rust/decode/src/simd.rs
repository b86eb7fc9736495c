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
    unsafe fn splat(x: f32) -> Self;
    unsafe fn load(p: *const f32) -> Self;
    unsafe fn store(self, p: *mut f32);
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

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::Lanes;

    /// Eight lanes of AVX2 with fused multiply-add.
    #[derive(Clone, Copy)]
    pub struct Avx2(__m256);

    // SAFETY, all methods: the trait's contract (AVX2 and FMA present, pointers valid for 8 values).
    impl Lanes for Avx2 {
        const N: usize = 8;

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

    /// Sixteen lanes of AVX-512. Each lane rounds as one of [`Avx2`] does.
    #[derive(Clone, Copy)]
    pub struct Avx512(__m512);

    // SAFETY, all methods: the trait's contract (AVX-512F present, pointers valid for 16 values).
    impl Lanes for Avx512 {
        const N: usize = 16;

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
}

#[cfg(target_arch = "x86_64")]
pub use x86::{Avx2, Avx512};

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

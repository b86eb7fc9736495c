//! Values of 16 bits.

/// The nearest bfloat16, ties to even. Not for NaN, which no row holds.
pub(super) fn bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16) as u16
}

/// The nearest 16-bit sample, ties to even: 32768 x, clipped to the range of i16. Not for NaN.
pub(crate) fn int16(x: f32) -> i16 {
    // Adding 1.5 · 2^23 leaves float32 no bits below 1: it rounds, and the lowest bits are the integer's.
    const ROUND: f32 = 12_582_912.0;
    ((x * 32_768.0).clamp(-32_768.0, 32_767.0) + ROUND).to_bits() as i16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_rounded_to_nearest_even_and_clipped() {
        for n in i16::MIN..=i16::MAX {
            assert_eq!(int16(f32::from(n) / 32_768.0), n);
        }
        for (x, n) in
            [(0.5, 0), (1.5, 2), (-0.5, 0), (-2.5, -2), (2.51, 3), (-7.49, -7), (40_000.0, 32_767)]
        {
            assert_eq!(int16(x / 32_768.0), n, "{x}");
        }
        assert_eq!(
            [int16(1.0), int16(-1.0), int16(-1e12), int16(1e12)],
            [32_767, -32_768, -32_768, 32_767]
        );
    }
}

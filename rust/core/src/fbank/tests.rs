use jaxtrain_decode::simd::{Lanes, Portable};

use super::kernel::*;
use super::*;

#[test]
fn ln_is_the_logarithm() {
    let mut worst = 0.0f64;
    for i in 0..2_000_000u32 {
        let x = f32::from_bits(f32::EPSILON.to_bits() + i * 300);
        let exact = f64::from(x).ln();
        worst = worst.max((f64::from(ln::<false>(x)) - exact).abs() / exact.abs().max(0.1));
    }
    assert!(worst < 2.5e-7, "{worst:e}");
    assert_eq!(ln::<false>(FLOOR), FLOOR.ln());
}

/// Divisions that were replaced round as before: the numbers of a stream stay.
#[test]
fn quotients_are_rounded_as_divisions() {
    for mantissa in 0..1 << 23 {
        let x = f32::from_bits(0.01f32.to_bits() & !0x7f_ffff | mantissa);
        assert_eq!(ninth(x), x / 9.0, "{x:e}");
        for std in [4.43, 1.0, 3.3, f32::MIN_POSITIVE, 9.999_999] {
            let scale = 2.0 * std;
            assert_eq!(
                (f64::from(x) * (1.0 / f64::from(scale))) as f32,
                x / scale,
                "{x:e} / {scale:e}"
            );
        }
    }
}

/// The formula of the module's documentation, slowly and in float64.
fn reference(front_end: &FrontEnd, wave: &[f32]) -> Vec<f64> {
    let FrontEnd { window: n, hop, n_mels, f_min, f_max, .. } = *front_end;
    let n_fft = n.next_power_of_two();
    let window: Vec<f64> =
        (0..n).map(|i| 0.5 - 0.5 * (TAU * i as f64 / (n - 1) as f64).cos()).collect();
    let mut out = Vec::new();
    for frame in 0..front_end.n_frames(wave.len()) {
        let x: Vec<f64> = wave[frame * hop..][..n].iter().map(|&x| f64::from(x)).collect();
        let mean = x.iter().sum::<f64>() / n as f64;
        let y: Vec<f64> =
            (0..n).map(|i| ((x[i] - mean) - 0.97 * (x[i.max(1) - 1] - mean)) * window[i]).collect();
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
        FrontEnd {
            sample_rate: 22_050,
            window: 551,
            hop: 220,
            n_mels: 64,
            f_max: 11_025.0,
            ..FrontEnd::default()
        },
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
                group_lanes::<Portable, Portable>(
                    &mut fbank.scratch,
                    &fbank.bank,
                    &wave[g * Portable::N * hop..],
                    (0.0, 1.0),
                    rows,
                )
            };
        }
        #[cfg(target_arch = "x86_64")]
        if fbank.lanes == MAX_LANES {
            fbank.lanes = 8;
            let mut narrow = vec![0.0; expected.len()];
            for (g, rows) in narrow.chunks_mut(8 * n_mels).enumerate() {
                // SAFETY: a machine with AVX-512 has AVX2.
                unsafe {
                    group_lanes::<simd::Avx2, simd::Avx2>(
                        &mut fbank.scratch,
                        &fbank.bank,
                        &wave[g * 8 * hop..],
                        (0.0, 1.0),
                        rows,
                    )
                };
            }
            assert!(narrow == out, "8 and 16 lanes differ for {front_end:?}");
        }
        for got in [out, portable] {
            let worst = got
                .iter()
                .zip(&expected)
                .map(|(a, b)| (f64::from(*a) - b).abs())
                .fold(0.0, f64::max);
            assert!(worst < 1e-3, "{worst} of {front_end:?}");
        }
    }
}

#[test]
fn a_frame_does_not_depend_on_its_place() {
    let wave = noise(WINDOW + 20 * HOP);
    let mut whole = vec![0.0; 21 * N_MELS];
    let mut fbank = Fbank::new(Arc::default());
    fbank.log_mel(&wave, &mut whole);
    for f in [0, 7, 8, 13, 20] {
        let mut one = vec![0.0; N_MELS];
        fbank.log_mel(&wave[f * HOP..f * HOP + WINDOW], &mut one);
        assert_eq!(one, whole[f * N_MELS..(f + 1) * N_MELS]);
    }
}

#[test]
fn any_finite_input_gives_finite_rows() {
    let mut fbank = Fbank::new(Arc::default());
    let mut out = vec![0.0; N_MELS];
    for scale in [0.0, 1e-45, 1e-20, 1e10, f32::MAX] {
        let wave: Vec<f32> = noise(WINDOW).iter().map(|x| x * scale).collect();
        fbank.log_mel(&wave, &mut out);
        assert!(out.iter().all(|x| x.is_finite()), "{scale}");
    }
}

//! From a spectrum to samples: inverse transform, overlap, and the polyphase filter bank.
//!
//! A spectrum of 576 lines is kept as [18][32]: line i of subband s in row i, column s. The transforms of all subbands
//! then run in parallel in SIMD lanes, as plain products with small matrices: at 18 lines that costs less than the
//! shuffles of a fast algorithm, and one kernel serves all four window shapes.

// In the kernels several arrays share one index.
#![allow(clippy::needless_range_loop)]

use std::f64::consts::PI;
use std::sync::OnceLock;

use super::side::{Granule, LINES, SHORT};
use super::standard;
use crate::simd::{self, Lanes, Portable};

const SUBBANDS: usize = 32;
/// Lines of a subband, and its samples in a granule.
const SLOTS: usize = 18;
/// Slots before the current one that a sample depends on.
const BEFORE: usize = 15;

type Rows = [[f32; SUBBANDS]; SLOTS];
type Matrix = [[f32; SLOTS]; 2 * SLOTS];

#[repr(C, align(64))]
struct Tables {
    transform: [Matrix; 4], // by block type, the windowed inverse transform: 18 lines to 36 samples
    /// The matrix of the polyphase synthesis, folded: sums (then differences) of mirrored subbands to the even (odd)
    /// ones of V\[0..32\], then of V\[32..64\].
    matrix: [[[f32; 32]; 16]; 2],
    window: [[f32; 32]; 16], // the synthesis window, in the order of V that `matrix` makes
    alias: [(f32, f32); 8],
    order: [[(u8, u8); LINES]; 9], // where each line goes in short blocks, by sample rate: (slot, subband)
}

fn tables() -> &'static Tables {
    static TABLES: OnceLock<Box<Tables>> = OnceLock::new();
    TABLES.get_or_init(|| {
        let window = |i: usize| match i {
            0..=256 => standard::WINDOW[i],
            _ if i.is_multiple_of(64) => standard::WINDOW[512 - i],
            _ => -standard::WINDOW[512 - i],
        };
        // Even positions first, then odd ones.
        let position = |q: usize| 2 * (q % 16) + q / 16;
        Box::new(Tables {
            transform: std::array::from_fn(transform_matrix),
            matrix: std::array::from_fn(|odd| {
                std::array::from_fn(|n| {
                    std::array::from_fn(|q| {
                        let j = 2 * (q % 16) + odd + 32 * (q / 16);
                        (((16 + j) * (2 * n + 1)) as f64 * PI / 64.0).cos() as f32
                    })
                })
            }),
            window: std::array::from_fn(|i| {
                std::array::from_fn(|q| window(32 * i + position(q)) as f32 / 65536.0)
            }),
            alias: standard::ALIAS
                .map(|c| (1.0 / (1.0 + c * c).sqrt(), c / (1.0 + c * c).sqrt()))
                .map(|(a, b)| (a as f32, b as f32)),
            order: std::array::from_fn(|rate| {
                let mut order = [(0, 0); LINES];
                let mut line = 0;
                for band in standard::SHORT[rate].windows(2) {
                    for window in 0..3 {
                        for i in band[0]..band[1] {
                            let to = 3 * i + window;
                            order[line] = ((to % 18) as u8, (to / 18) as u8);
                            line += 1;
                        }
                    }
                }
                order
            }),
        })
    })
}

/// Window and inverse transform in one (11172-3, 2.4.3.4.10.2 and .3).
fn transform_matrix(kind: usize) -> Matrix {
    let mut matrix = [[0.0; SLOTS]; 2 * SLOTS];
    let sine = |i: usize, n: usize| (PI / n as f64 * (i as f64 + 0.5)).sin();
    let cosine = |i: usize, k: usize, n: usize| {
        (PI / (2 * n) as f64 * ((2 * i + 1 + n / 2) * (2 * k + 1)) as f64).cos()
    };
    if kind == SHORT {
        for window in 0..3 {
            for i in 0..12 {
                for k in 0..6 {
                    matrix[6 + 6 * window + i][3 * k + window] =
                        (sine(i, 12) * cosine(i, k, 12)) as f32;
                }
            }
        }
        return matrix;
    }
    for (i, row) in matrix.iter_mut().enumerate() {
        let window = match (kind, i) {
            (1, 18..=23) | (3, 12..=17) => 1.0,
            (1, 24..=29) => sine(i - 18, 12),
            (3, 6..=11) => sine(i - 6, 12),
            (1, 30..) | (3, ..=5) => 0.0,
            _ => sine(i, 36),
        };
        for (k, x) in row.iter_mut().enumerate() {
            *x = (window * cosine(i, k, 36)) as f32;
        }
    }
    matrix
}

/// The hybrid filter bank: its state between granules, and its memory.
#[repr(C, align(64))]
pub(super) struct Hybrid {
    spectrum: Rows,
    slots: Rows,
    overlap: Rows,                   // added to the slots of the next granule
    folded: [[[f32; 16]; SLOTS]; 2], // sums and differences of mirrored subbands
    v: [[f32; 64]; BEFORE + SLOTS],  // V of the slots before, and of these
    pub samples: [[f32; 32]; SLOTS], // the samples of the granule: even ones of each slot first, then odd ones
}

impl Default for Hybrid {
    fn default() -> Self {
        Self {
            spectrum: [[0.0; SUBBANDS]; SLOTS],
            slots: [[0.0; SUBBANDS]; SLOTS],
            overlap: [[0.0; SUBBANDS]; SLOTS],
            folded: [[[0.0; 16]; SLOTS]; 2],
            v: [[0.0; 64]; BEFORE + SLOTS],
            samples: [[0.0; 32]; SLOTS],
        }
    }
}

impl Hybrid {
    /// Returns to the initial state.
    pub fn reset(&mut self) {
        self.overlap = [[0.0; SUBBANDS]; SLOTS];
        self.v = [[0.0; 64]; BEFORE + SLOTS];
    }

    /// Begins a granule.
    pub fn begin(&mut self) {
        self.slots = self.overlap;
        self.overlap = [[0.0; SUBBANDS]; SLOTS];
    }

    /// Adds a channel's lines, of which `used` may differ from 0. `rate`: the index of the sample rate.
    pub fn transform(&mut self, lines: &[f32; LINES], used: usize, granule: &Granule, rate: usize) {
        let tables = tables();
        // Of a mixed block, the two lowest subbands are long.
        let long = match (granule.block, granule.mixed) {
            (SHORT, false) => 0,
            (SHORT, true) => 36,
            _ => LINES,
        };
        if long > 0 {
            self.spectrum = [[0.0; SUBBANDS]; SLOTS];
            for (s, lines) in lines[..used.min(long)].chunks(SLOTS).enumerate() {
                for (row, x) in self.spectrum.iter_mut().zip(lines) {
                    row[s] = *x;
                }
            }
            for (i, (cs, ca)) in tables.alias.iter().enumerate() {
                let (below, above) = self.spectrum.split_at_mut(SLOTS / 2);
                let (down, up) = (&mut below[i], &mut above[SLOTS - 1 - i - SLOTS / 2]);
                for (u, d) in up[..long / SLOTS - 1].iter_mut().zip(&mut down[1..long / SLOTS]) {
                    (*u, *d) = (*u * cs - *d * ca, *d * cs + *u * ca);
                }
            }
            let kind = if granule.block == SHORT { 0 } else { granule.block };
            // One subband further than its lines: the alias reduction reaches there.
            let subbands = (used.min(long).div_ceil(SLOTS) + 1).min(long / SLOTS);
            transform_rows(self, &tables.transform[kind], subbands);
        }
        if long < LINES {
            self.spectrum = [[0.0; SUBBANDS]; SLOTS];
            let order = &tables.order[rate];
            for (x, (row, s)) in lines[..used].iter().zip(order).skip(long) {
                self.spectrum[usize::from(*row)][usize::from(*s)] = *x;
            }
            transform_rows(self, &tables.transform[SHORT], SUBBANDS);
        }
    }

    /// Ends a granule: its samples are then in `samples`.
    pub fn synthesise(&mut self) {
        synthesise(self, tables());
    }
}

simd::kernel! {
    /// Adds the inverse transform of the spectrum's first subbands to the slots and to the overlap. Each lane rounds
    /// the same in 8 and in 16.
    fn transform_rows(work: &mut Hybrid, matrix: &Matrix, subbands: usize) -> ():
        avx512 transform_lanes::<simd::Avx512>, avx2 transform_lanes::<simd::Avx2>; else transform_lanes::<Portable>
}

#[inline(always)]
unsafe fn transform_lanes<V: Lanes>(work: &mut Hybrid, matrix: &Matrix, subbands: usize) {
    const { assert!(SUBBANDS.is_multiple_of(V::N)) };
    // Output rows that are summed together.
    const ROWS: usize = 6;
    for s in (0..subbands).step_by(V::N) {
        for first in (0..2 * SLOTS).step_by(ROWS) {
            let to = if first < SLOTS {
                &mut work.slots[first..]
            } else {
                &mut work.overlap[first - SLOTS..]
            };
            let mut sums = [V::splat(0.0); ROWS];
            for i in 0..ROWS {
                sums[i] = V::load(to[i].as_ptr().add(s));
            }
            for k in 0..SLOTS {
                let x = V::load(work.spectrum[k].as_ptr().add(s));
                for i in 0..ROWS {
                    sums[i] = x.mul_add(V::splat(matrix[first + i][k]), sums[i]);
                }
            }
            for i in 0..ROWS {
                sums[i].store(to[i].as_mut_ptr().add(s));
            }
        }
    }
}

simd::kernel! {
    /// The polyphase synthesis of 18 slots (11172-3, 2.4.3.2.2), after the frequency inversion of odd subbands.
    fn synthesise(work: &mut Hybrid, tables: &Tables) -> ():
        avx512 synthesise_lanes::<simd::Avx512>, avx2 synthesise_lanes::<simd::Avx2>; else synthesise_lanes::<Portable>
}

#[inline(always)]
unsafe fn synthesise_lanes<V: Lanes>(work: &mut Hybrid, tables: &Tables) {
    // Slots that share the loads of the matrix.
    const TOGETHER: usize = 3;
    const { assert!(32usize.is_multiple_of(2 * V::N) && SLOTS.is_multiple_of(TOGETHER)) };
    // cos(m (2 (31 - n) + 1) pi / 64) = (-1)^m cos(m (2 n + 1) pi / 64): even and odd rows of the matrix see only the
    // sums and the differences of mirrored subbands. In odd slots, odd subbands are negated first, which makes sums
    // of differences.
    for (t, slot) in work.slots.iter().enumerate() {
        for n in 0..16 {
            let (low, high) = (slot[n], slot[31 - n]);
            let (sum, difference) = (low + high, low - high);
            let odd = t % 2 == 1;
            let sign = if odd && n % 2 == 1 { -1.0 } else { 1.0 };
            work.folded[0][t][n] = sign * if odd { difference } else { sum };
            work.folded[1][t][n] = sign * if odd { sum } else { difference };
        }
    }
    work.v.copy_within(SLOTS.., 0);
    for (odd, (folded, matrix)) in work.folded.iter().zip(&tables.matrix).enumerate() {
        for t in (0..SLOTS).step_by(TOGETHER) {
            for q in (0..32).step_by(2 * V::N) {
                let mut sums = [[V::splat(0.0); 2]; TOGETHER];
                for n in 0..16 {
                    let m = [
                        V::load(matrix[n].as_ptr().add(q)),
                        V::load(matrix[n].as_ptr().add(q + V::N)),
                    ];
                    for i in 0..TOGETHER {
                        let x = V::splat(folded[t + i][n]);
                        sums[i] = [x.mul_add(m[0], sums[i][0]), x.mul_add(m[1], sums[i][1])];
                    }
                }
                for i in 0..TOGETHER {
                    let to = work.v[BEFORE + t + i].as_mut_ptr();
                    for j in 0..2 {
                        // Lanes do not straddle the two halves.
                        let q = q + j * V::N;
                        sums[i][j].store(to.add(16 * odd + q % 16 + 32 * (q / 16)));
                    }
                }
            }
        }
    }
    for t in 0..SLOTS {
        for q in (0..32).step_by(V::N) {
            let mut sums = [V::splat(0.0); 2];
            for i in 0..8 {
                for j in 0..2 {
                    let v = V::load(work.v[BEFORE + t - 2 * i - j].as_ptr().add(32 * j + q));
                    sums[j] = v.mul_add(V::load(tables.window[2 * i + j].as_ptr().add(q)), sums[j]);
                }
            }
            sums[0].add(sums[1]).store(work.samples[t].as_mut_ptr().add(q));
        }
    }
}

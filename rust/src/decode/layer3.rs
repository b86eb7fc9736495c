//! The layer III decoder (ISO/IEC 11172-3, 2.4.3.4; lower rates: 13818-3, 2.4.3.2), straight to mono.
//!
//! Everything after the stereo processing is linear, so the mean of the channels is taken there, and one hybrid filter
//! bank runs instead of two. Where the channels' block types differ, each goes through its own transform, into the
//! same overlap. Of a middle/side pair with one block type the mean is middle / sqrt 2: side is not even decoded.
//!
//! A spectrum of 576 lines is kept as [18][32]: line i of subband s in row i, column s. The transforms of all
//! subbands then run beside each other in SIMD lanes, as plain products with small matrices: at 18 lines that costs
//! less than the shuffles of a fast algorithm, and one kernel serves all four window shapes.

// Several arrays are indexed alike in the kernels.
#![allow(clippy::needless_range_loop)]

use std::f64::consts::PI;
use std::sync::OnceLock;

use super::bits::Msb;
use super::layer3_tables as facts;
use super::mp3::{Header, RESERVOIR};
use crate::simd::{self, Lanes, Portable};

/// Lines of a granule, and its samples.
const LINES: usize = 576;
const SUBBANDS: usize = 32;
/// Lines of a subband, and its samples in a granule.
const SLOTS: usize = 18;
/// Slots before the current one that a sample depends on.
const BEFORE: usize = 15;
/// Bits that the first look-up of a Huffman code covers.
const FIRST: u32 = 8;
/// Largest quantised value: 15 and 13 further bits.
const LARGEST: usize = 15 + (1 << 13) - 1;
/// The index of a short block among the block types.
const SHORT: usize = 2;

type Rows = [[f32; SUBBANDS]; SLOTS];

#[repr(C, align(64))]
struct Tables {
    /// By block type, the windowed inverse transform: 18 lines to 36 samples.
    transform: [[[f32; SLOTS]; 2 * SLOTS]; 4],
    /// The matrix of the polyphase synthesis, folded: sums (then differences) of mirrored subbands to the even (odd)
    /// ones of V\[0..32\], then of V\[32..64\].
    matrix: [[[f32; 32]; 16]; 2],
    /// The synthesis window, in the order of V that `matrix` makes.
    window: [[f32; 32]; 16],
    alias: [(f32, f32); 8],
    /// x^(4/3)
    powers: [f32; LARGEST + 1],
    /// Look-up tables of all Huffman codes: a leaf's code length << 8 | its values, or `LINK` | bits of a further
    /// look-up << 16 | where its table begins.
    nodes: Vec<u32>,
    /// Where a table of pairs begins in `nodes`; None where every value is 0.
    pairs: [Option<u32>; 32],
    quads: [[u16; 64]; 2],
    /// Where each line goes to in short blocks, by sample rate: (slot, subband).
    order: [[(u8, u8); LINES]; 9],
}

const LINK: u32 = 1 << 31;

fn tables() -> &'static Tables {
    static TABLES: OnceLock<Box<Tables>> = OnceLock::new();
    TABLES.get_or_init(|| {
        let mut nodes = Vec::new();
        let mut pairs = [None; 32];
        let trees: [(usize, &[u16]); 15] = [
            (1, &facts::PAIRS_1),
            (2, &facts::PAIRS_2),
            (3, &facts::PAIRS_3),
            (5, &facts::PAIRS_5),
            (6, &facts::PAIRS_6),
            (7, &facts::PAIRS_7),
            (8, &facts::PAIRS_8),
            (9, &facts::PAIRS_9),
            (10, &facts::PAIRS_10),
            (11, &facts::PAIRS_11),
            (12, &facts::PAIRS_12),
            (13, &facts::PAIRS_13),
            (15, &facts::PAIRS_15),
            (16, &facts::PAIRS_16),
            (24, &facts::PAIRS_24),
        ];
        for (table, leaves) in trees {
            pairs[table] = Some(grow(&mut nodes, leaves));
        }
        for table in 17..32 {
            pairs[table] = pairs[if table < 24 { 16 } else { 24 }];
        }
        let quads = [&facts::QUADS_A, &facts::QUADS_B].map(|leaves| {
            let mut table = [0; 64];
            let mut at = 0;
            for leaf in leaves {
                let span = 64 >> (leaf >> 8);
                table[at..at + span].fill(*leaf);
                at += span;
            }
            table
        });
        let window = |i: usize| match i {
            0..=256 => facts::WINDOW[i],
            _ if i % 64 == 0 => facts::WINDOW[512 - i],
            _ => -facts::WINDOW[512 - i],
        };
        // Even places first, then odd ones.
        let place = |q: usize| 2 * (q % 16) + q / 16;
        Box::new(Tables {
            transform: std::array::from_fn(transform),
            matrix: std::array::from_fn(|odd| {
                std::array::from_fn(|n| {
                    std::array::from_fn(|q| {
                        let j = 2 * (q % 16) + odd + 32 * (q / 16);
                        (((16 + j) * (2 * n + 1)) as f64 * PI / 64.0).cos() as f32
                    })
                })
            }),
            window: std::array::from_fn(|i| std::array::from_fn(|q| window(32 * i + place(q)) as f32 / 65536.0)),
            alias: facts::ALIAS
                .map(|c| (1.0 / (1.0 + c * c).sqrt(), c / (1.0 + c * c).sqrt()))
                .map(|(a, b)| (a as f32, b as f32)),
            powers: std::array::from_fn(|x| (x as f64).powf(4.0 / 3.0) as f32),
            nodes,
            pairs,
            quads,
            order: std::array::from_fn(|rate| {
                let mut order = [(0, 0); LINES];
                let mut line = 0;
                for band in facts::SHORT[rate].windows(2) {
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

/// Appends the look-up tables of a code to `nodes` and says where they begin.
fn grow(nodes: &mut Vec<u32>, leaves: &[u16]) -> u32 {
    let root = nodes.len();
    nodes.resize(root + (1 << FIRST), 0);
    // The next leaf's code, left-aligned in 32 bits.
    let mut code = 0u64;
    let mut i = 0;
    while i < leaves.len() {
        let length = u32::from(leaves[i] >> 8);
        let at = root + (code >> (32 - FIRST)) as usize;
        if length <= FIRST {
            nodes[at..at + (1 << (FIRST - length))].fill(u32::from(leaves[i]));
            code += 1 << (32 - length);
            i += 1;
            continue;
        }
        // All leaves under this prefix.
        let end = code + (1 << (32 - FIRST));
        let (mut n, mut reach, mut longest) = (i, code, 0);
        while reach < end {
            let length = u32::from(leaves[n] >> 8);
            longest = longest.max(length);
            reach += 1 << (32 - length);
            n += 1;
        }
        nodes[at] = LINK | (longest - FIRST) << 16 | nodes.len() as u32;
        for leaf in &leaves[i..n] {
            let span = 1 << (longest - u32::from(leaf >> 8));
            nodes.resize(nodes.len() + span, u32::from(*leaf));
        }
        (i, code) = (n, end);
    }
    root as u32
}

/// Window and inverse transform in one (11172-3, 2.4.3.4.10.2 and .3).
fn transform(kind: usize) -> [[f32; SLOTS]; 2 * SLOTS] {
    let mut matrix = [[0.0; SLOTS]; 2 * SLOTS];
    let sine = |i: usize, n: usize| (PI / n as f64 * (i as f64 + 0.5)).sin();
    let cosine =
        |i: usize, k: usize, n: usize| (PI / (2 * n) as f64 * ((2 * i + 1 + n / 2) * (2 * k + 1)) as f64).cos();
    if kind == SHORT {
        for window in 0..3 {
            for i in 0..12 {
                for k in 0..6 {
                    matrix[6 + 6 * window + i][3 * k + window] = (sine(i, 12) * cosine(i, k, 12)) as f32;
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

/// What the side information says of one channel of one granule.
#[derive(Clone, Copy, Default)]
struct Granule {
    bits: usize,
    /// Lines that are coded in pairs.
    paired: usize,
    gain: i32,
    compress: u32,
    block: usize,
    mixed: bool,
    tables: [u8; 3],
    /// Where the second and the third table's lines begin.
    regions: [usize; 2],
    /// Gain of each window of a short block.
    window_gain: [i32; 3],
    emphasis: bool,
    coarse: bool,
    quads: usize,
    /// Groups of scale factors that are the previous granule's.
    shared: u32,
}

/// Position in an intensity band that means none.
const NO_INTENSITY: u8 = u8::MAX;

pub(super) struct Layer3 {
    /// The last bytes of main data.
    main: Vec<u8>,
    lines: [[f32; LINES]; 2],
    /// Lines of each channel that may differ from 0.
    used: [usize; 2],
    /// Scale factors in the order of bands; for an intensity band's right channel its position.
    scale: [[u8; 39]; 2],
    work: Box<Work>,
}

#[repr(C, align(64))]
struct Work {
    spectrum: Rows,
    slots: Rows,
    /// What the next granule adds to its slots.
    overlap: Rows,
    /// Sums and differences of mirrored subbands.
    folded: [[[f32; 16]; SLOTS]; 2],
    /// V of the slots before and of these.
    v: [[f32; 64]; BEFORE + SLOTS],
    samples: [[f32; 32]; SLOTS],
}

impl Default for Layer3 {
    fn default() -> Self {
        let work = Work {
            spectrum: [[0.0; SUBBANDS]; SLOTS],
            slots: [[0.0; SUBBANDS]; SLOTS],
            overlap: [[0.0; SUBBANDS]; SLOTS],
            folded: [[[0.0; 16]; SLOTS]; 2],
            v: [[0.0; 64]; BEFORE + SLOTS],
            samples: [[0.0; 32]; SLOTS],
        };
        Self {
            main: Vec::with_capacity(1 << 12),
            lines: [[0.0; LINES]; 2],
            used: [0; 2],
            scale: [[0; 39]; 2],
            work: Box::new(work),
        }
    }
}

impl Layer3 {
    /// Forgets everything that was decoded before.
    pub fn reset(&mut self) {
        self.main.clear();
        self.work.overlap = [[0.0; SUBBANDS]; SLOTS];
        self.work.v = [[0.0; 64]; BEFORE + SLOTS];
    }

    /// Keeps a frame's main data for those that follow, and says where its own begins.
    pub fn skip(&mut self, frame: &[u8], header: Header) -> Option<usize> {
        if let Some(old) = self.main.len().checked_sub(RESERVOIR) {
            self.main.copy_within(old.., 0);
            self.main.truncate(RESERVOIR);
        }
        let side = frame.get(header.before_data() - header.side()..header.before_data());
        let back = side.map_or(0, |side| Msb::new(side).read(if header.mpeg1 { 9 } else { 8 }) as usize);
        let begin = self.main.len().checked_sub(back);
        self.main.extend_from_slice(frame.get(header.before_data()..).unwrap_or(&[]));
        side.and(begin)
    }

    /// Decodes a frame to the mean of its channels: `header.samples()` samples. What cannot be decoded is silent.
    pub fn decode(&mut self, frame: &[u8], header: Header, out: &mut [f32]) {
        let granules = if header.mpeg1 { 2 } else { 1 };
        let mut side = [[Granule::default(); 2]; 2];
        let begin = self.skip(frame, header);
        let sound = begin.is_some() && side_information(frame, header, &mut side).is_some();
        let mut bit = 8 * begin.unwrap_or(0);
        for (i, granule) in side.iter().take(granules).enumerate() {
            let end =
                bit + granule.iter().take(usize::from(header.channels)).map(|channel| channel.bits).sum::<usize>();
            if !sound || end > 8 * self.main.len() {
                self.used = [0; 2];
                self.lines[0] = [0.0; LINES];
                self.hybrid(&[(0, Granule::default())], header);
            } else {
                self.granule(granule, header, i, bit);
            }
            bit = end;
            for (out, slot) in out[i * LINES..][..LINES].chunks_exact_mut(32).zip(&self.work.samples) {
                for (i, pair) in out.chunks_exact_mut(2).enumerate() {
                    pair.copy_from_slice(&[slot[i], slot[16 + i]]);
                }
            }
        }
    }

    fn granule(&mut self, granule: &[Granule; 2], header: Header, index: usize, mut bit: usize) {
        let channels = usize::from(header.channels);
        let alike = (granule[0].block, granule[0].mixed) == (granule[1].block, granule[1].mixed);
        let middle_side = channels == 2 && header.middle_side();
        let intensity = channels == 2 && header.intensity();
        let only_middle = middle_side && !intensity && alike;
        for (c, channel) in granule.iter().enumerate().take(channels) {
            let end = bit + channel.bits;
            let mut bits = Msb::at(&self.main, bit);
            let positions = intensity && c == 1;
            let emphasis = scale_factors(&mut bits, channel, header, index, positions, &mut self.scale[c]);
            if !(only_middle && c == 1) {
                let gain = if only_middle { -2 } else { 0 };
                let scale = &self.scale[c];
                self.used[c] = spectrum(&mut bits, end, channel, header, gain, emphasis, scale, &mut self.lines[c]);
            }
            bit = end;
        }
        if channels == 1 || only_middle {
            self.hybrid(&[(0, granule[0])], header);
            return;
        }
        let both = self.used[0].max(self.used[1]);
        if intensity {
            self.intensity(granule, header, middle_side);
        } else if middle_side {
            self.unmix(0, both);
        }
        let [left, right] = &mut self.lines;
        let n = self.used[0].max(self.used[1]).max(both);
        if alike {
            for (l, r) in left[..n].iter_mut().zip(&right[..n]) {
                *l = 0.5 * (*l + *r);
            }
            self.used[0] = n;
            self.hybrid(&[(0, granule[0])], header);
        } else {
            for x in left.iter_mut().chain(right) {
                *x *= 0.5;
            }
            self.used = [n; 2];
            self.hybrid(&[(0, granule[0]), (1, granule[1])], header);
        }
    }

    /// Middle and side of lines \[from, to) to left and right.
    fn unmix(&mut self, from: usize, to: usize) {
        let [left, right] = &mut self.lines;
        for (l, r) in left[from..to].iter_mut().zip(&mut right[from..to]) {
            let (middle, side) = (*l * std::f32::consts::FRAC_1_SQRT_2, *r * std::f32::consts::FRAC_1_SQRT_2);
            (*l, *r) = (middle + side, middle - side);
        }
    }

    /// Intensity stereo (11172-3, 2.4.3.4.9.3; 13818-3, 2.4.3.2): bands of which the right channel holds nothing are
    /// the left channel's, at the position that the right one's scale factor says.
    fn intensity(&mut self, granule: &[Granule; 2], header: Header, middle_side: bool) {
        let right = &granule[1];
        let bands = Bands::of(right, header.table());
        let n = bands.n;
        // The first band in which nothing follows, for long lines and for each window.
        let mut first = [0; 4];
        for (b, range) in bands.ranges().enumerate() {
            if self.lines[1][range].iter().any(|x| *x != 0.0) {
                first[bands.window[b].map_or(3, usize::from)] = b + 1;
                // Short windows above have been coded, so all long lines are.
                if bands.window[b].is_some() {
                    first[3] = first[3].max(bands.n_long);
                }
            }
        }
        for b in 0..n {
            let range = bands.ends[b].0..bands.ends[b].1;
            let window = bands.window[b].map_or(3, usize::from);
            // The last band has no scale factor: it takes the one of the band before.
            let from = if b + if window < 3 { 3 } else { 1 } >= n { b - if window < 3 { 3 } else { 1 } } else { b };
            let position = if b >= first[window] { self.scale[1][from] } else { NO_INTENSITY };
            if position == NO_INTENSITY || header.mpeg1 && position == 7 {
                if middle_side {
                    self.unmix(range.start, range.end);
                }
                continue;
            }
            let (l, r) = if header.mpeg1 {
                let ratio = (f64::from(position) * PI / 12.0).tan();
                (ratio / (1.0 + ratio), 1.0 / (1.0 + ratio))
            } else {
                let step = if right.compress & 1 == 1 { 0.5f64 } else { 0.25 };
                let down = (-step * f64::from(position.div_ceil(2))).exp2();
                if position % 2 == 1 {
                    (down, 1.0)
                } else {
                    (1.0, down)
                }
            };
            // tan(pi / 2) is infinite: all of it is on the left.
            let (l, r) = if l.is_finite() { (l as f32, r as f32) } else { (1.0, 0.0) };
            for i in range {
                let x = self.lines[0][i];
                (self.lines[0][i], self.lines[1][i]) = (x * l, x * r);
            }
        }
        self.used[1] = self.used[0].max(self.used[1]);
    }

    /// From lines to samples: the sum of what each given channel's lines give.
    fn hybrid(&mut self, parts: &[(usize, Granule)], header: Header) {
        let tables = tables();
        let work = &mut *self.work;
        work.slots = work.overlap;
        work.overlap = [[0.0; SUBBANDS]; SLOTS];
        for &(channel, granule) in parts {
            let (lines, used) = (&self.lines[channel], self.used[channel]);
            // Of a mixed block, the two lowest subbands are long.
            let long = match (granule.block, granule.mixed) {
                (SHORT, false) => 0,
                (SHORT, true) => 36,
                _ => LINES,
            };
            if long > 0 {
                work.spectrum = [[0.0; SUBBANDS]; SLOTS];
                for (s, lines) in lines[..used.min(long)].chunks(SLOTS).enumerate() {
                    for (row, x) in work.spectrum.iter_mut().zip(lines) {
                        row[s] = *x;
                    }
                }
                for (i, (cs, ca)) in tables.alias.iter().enumerate() {
                    let (below, above) = work.spectrum.split_at_mut(SLOTS / 2);
                    let (down, up) = (&mut below[i], &mut above[SLOTS - 1 - i - SLOTS / 2]);
                    for (u, d) in up[..long / SLOTS - 1].iter_mut().zip(&mut down[1..long / SLOTS]) {
                        (*u, *d) = (*u * cs - *d * ca, *d * cs + *u * ca);
                    }
                }
                let kind = if granule.block == SHORT { 0 } else { granule.block };
                // One subband further than its lines: the alias reduction reaches there.
                let subbands = (used.min(long).div_ceil(SLOTS) + 1).min(long / SLOTS);
                transform_rows(work, &tables.transform[kind], subbands);
            }
            if long < LINES {
                work.spectrum = [[0.0; SUBBANDS]; SLOTS];
                let order = &tables.order[header.table()];
                for (x, (row, s)) in lines[..used].iter().zip(order).skip(long) {
                    work.spectrum[usize::from(*row)][usize::from(*s)] = *x;
                }
                transform_rows(work, &tables.transform[SHORT], SUBBANDS);
            }
        }
        synthesise(work, tables);
    }
}

fn side_information(frame: &[u8], header: Header, side: &mut [[Granule; 2]; 2]) -> Option<()> {
    let bytes = frame.get(header.before_data() - header.side()..header.before_data())?;
    let mut bits = Msb::new(bytes);
    let channels = usize::from(header.channels);
    let mut shared = [0; 2];
    if header.mpeg1 {
        bits.skip(9 + if channels == 1 { 5 } else { 3 });
        for shared in &mut shared[..channels] {
            *shared = bits.read(4);
        }
    } else {
        bits.skip(8 + channels as u32);
    }
    let (long, short) = (&facts::LONG[header.table()], &facts::SHORT[header.table()]);
    for (i, granule) in side.iter_mut().enumerate().take(if header.mpeg1 { 2 } else { 1 }) {
        for (c, to) in granule.iter_mut().enumerate().take(channels) {
            to.bits = bits.read(12) as usize;
            to.paired = 2 * bits.read(9) as usize;
            to.gain = bits.read(8) as i32;
            to.compress = bits.read(if header.mpeg1 { 4 } else { 9 });
            if bits.read(1) == 1 {
                to.block = bits.read(2) as usize;
                to.mixed = bits.read(1) == 1;
                to.tables = [bits.read(5) as u8, bits.read(5) as u8, 0];
                for gain in &mut to.window_gain {
                    *gain = bits.read(3) as i32;
                }
                // A fixed first region (11172-3, 2.4.2.7): three bands of all short windows, or eight long bands.
                let first = if to.block == SHORT && !(header.mpeg1 && to.mixed) { 3 * short[3] } else { long[8] };
                to.regions = [usize::from(first), LINES];
                if to.block == 0 {
                    return None;
                }
            } else {
                for table in &mut to.tables {
                    *table = bits.read(5) as u8;
                }
                let first = bits.read(4) as usize + 1;
                let second = first + bits.read(3) as usize + 1;
                let line = |band: usize| long.get(band).map_or(LINES, |&line| usize::from(line));
                to.regions = [line(first), line(second)];
            }
            to.emphasis = header.mpeg1 && bits.read(1) == 1;
            to.coarse = bits.read(1) == 1;
            to.quads = bits.read(1) as usize;
            // Short blocks share nothing.
            to.shared = if i == 1 && to.block != SHORT { shared[c] } else { 0 };
            if to.paired > LINES {
                return None;
            }
        }
    }
    Some(())
}

/// Reads the scale factors and says whether `EMPHASIS` is added to them.
fn scale_factors(
    bits: &mut Msb,
    granule: &Granule,
    header: Header,
    index: usize,
    positions: bool,
    scale: &mut [u8; 39],
) -> bool {
    let short = granule.block == SHORT;
    let shape = if !short { 0 } else { 1 + usize::from(granule.mixed) };
    if header.mpeg1 {
        let widths = facts::SCALE_BITS.map(|widths| u32::from(widths[granule.compress as usize & 15]));
        let counts = [[11, 10], [18, 18], [17, 18]][shape];
        let mut b = 0;
        for (count, width) in counts.into_iter().zip(widths) {
            for _ in 0..count {
                let group = [6, 11, 16].iter().filter(|&&first| b >= first).count();
                let shared = index == 1 && granule.shared << group & 8 != 0;
                if !shared {
                    scale[b] = bits.read(width) as u8;
                }
                b += 1;
            }
        }
        scale[b..].fill(0);
        return granule.emphasis;
    }
    let c = granule.compress;
    let (widths, layout) = if positions {
        match c >> 1 {
            c @ 0..=179 => ([c / 36, c % 36 / 6, c % 6, 0], 3),
            c @ 180..=243 => ([(c - 180) >> 4 & 3, (c - 180) >> 2 & 3, (c - 180) & 3, 0], 4),
            c => ([(c - 244) / 3, (c - 244) % 3, 0, 0], 5),
        }
    } else {
        match c {
            0..=399 => ([(c >> 4) / 5, (c >> 4) % 5, c >> 2 & 3, c & 3], 0),
            400..=499 => ([((c - 400) >> 2) / 5, ((c - 400) >> 2) % 5, c & 3, 0], 1),
            _ => ([(c - 500) / 3, (c - 500) % 3, 0, 0], 2),
        }
    };
    let mut b = 0;
    for (count, width) in facts::SCALE_COUNTS[layout][shape].into_iter().zip(widths) {
        for _ in 0..count {
            scale[b] = bits.read(width) as u8;
            // The largest position means none.
            if positions && width > 0 && scale[b] == (1 << width) - 1 {
                scale[b] = NO_INTENSITY;
            }
            b += 1;
        }
    }
    scale[b..].fill(0);
    layout == 2
}

/// The scale factor bands of a granule, in the order in which their lines are coded.
struct Bands {
    n: usize,
    n_long: usize,
    /// First line of each and of the next.
    ends: [(usize, usize); 39],
    /// Of short bands, the window.
    window: [Option<u8>; 39],
}

impl Bands {
    fn of(granule: &Granule, table: usize) -> Self {
        let mut bands = Self { n: 0, n_long: 0, ends: [(0, 0); 39], window: [None; 39] };
        let mut line = 0;
        let mut push = |line: &mut usize, width: usize, window: Option<u8>| {
            bands.ends[bands.n] = (*line, *line + width);
            bands.window[bands.n] = window;
            *line += width;
            bands.n += 1;
            bands.n_long += usize::from(window.is_none());
        };
        let long = match (granule.block, granule.mixed) {
            (SHORT, false) => 0,
            (SHORT, true) => 36,
            _ => LINES,
        };
        for band in facts::LONG[table].windows(2).filter(|band| usize::from(band[1]) <= long) {
            push(&mut line, usize::from(band[1] - band[0]), None);
        }
        for band in facts::SHORT[table].windows(2) {
            for window in 0..3 {
                // Where long bands end inside of a short one (8 kHz), what is left of it is short.
                let begin = usize::from(band[0]).max(line.min(long) / 3);
                if long < LINES && 3 * usize::from(band[1]) > long {
                    push(&mut line, usize::from(band[1]) - begin.min(usize::from(band[1])), Some(window));
                }
            }
        }
        bands
    }

    fn ranges(&self) -> impl Iterator<Item = std::ops::Range<usize>> + '_ {
        self.ends[..self.n].iter().map(|&(from, to)| from..to.min(LINES))
    }
}

/// 2^(x / 4)
fn quarter_power(x: i32) -> f32 {
    const ROOTS: [f32; 4] = [1.0, 1.189_207_1, std::f32::consts::SQRT_2, 1.681_792_8];
    // Side information and scale factors cannot take x out of -400..60.
    f32::from_bits(((127 + (x >> 2)).clamp(1, 254) as u32) << 23) * ROOTS[(x & 3) as usize]
}

/// Huffman decoding and requantisation (11172-3, 2.4.3.4.6 and .7), in one; says after which line all is 0. `end` is
/// the bit after the channel's last.
#[allow(clippy::too_many_arguments)]
fn spectrum(
    bits: &mut Msb,
    end: usize,
    granule: &Granule,
    header: Header,
    gain: i32,
    emphasis: bool,
    scale: &[u8; 39],
    lines: &mut [f32; LINES],
) -> usize {
    let tables = tables();
    let bands = Bands::of(granule, header.table());
    let step = if granule.coarse { 4 } else { 2 };
    let factor = |b: usize| {
        let window = bands.window[b].map_or(0, |w| 8 * granule.window_gain[usize::from(w)]);
        let more = if emphasis && bands.window[b].is_none() { facts::EMPHASIS[b.min(21)] } else { 0 };
        let exponent = granule.gain + gain - 210 - window - step * i32::from(scale[b] + more);
        quarter_power(exponent)
    };
    let mut line = 0;
    let mut b = 0;
    let mut of_band = 0.0;
    // Ends of runs with one table and one factor.
    let mut band_end = 0;
    let mut region = 0;
    while line < granule.paired {
        while line >= band_end && b < bands.n {
            band_end = bands.ends[b].1.min(LINES);
            of_band = factor(b);
            b += 1;
        }
        while region < 2 && line >= granule.regions[region] {
            region += 1;
        }
        let region_end = granule.regions.get(region).copied().unwrap_or(LINES);
        let run_end = granule.paired.min(region_end).min(if b < bands.n { band_end } else { LINES }).max(line + 2);
        let table = usize::from(granule.tables[region]);
        let run = &mut lines[line..run_end];
        match tables.pairs[table] {
            None => run.fill(0.0),
            Some(root) => pairs(bits, tables, root as usize, facts::LINBITS[table], of_band, run),
        }
        line = run_end;
        // Damaged.
        if bits.position() > end {
            break;
        }
    }
    let quads = &tables.quads[granule.quads];
    while line + 4 <= LINES && bits.position() < end {
        let mut window = bits.window();
        let leaf = quads[(window >> 58) as usize];
        let length = u32::from(leaf >> 8);
        let n = length + (leaf & 15).count_ones();
        if bits.position() + n as usize > end {
            break;
        }
        bits.skip(n);
        window <<= length;
        for i in 0..4 {
            while line + i >= band_end && b < bands.n {
                band_end = bands.ends[b].1.min(LINES);
                of_band = factor(b);
                b += 1;
            }
            let set = u32::from(leaf >> (3 - i) & 1);
            let sign = ((window >> 63) as u32 & set) << 31;
            lines[line + i] = f32::from_bits((of_band.to_bits() * set) | sign);
            window <<= set;
        }
        line += 4;
    }
    lines[line..].fill(0.0);
    line
}

/// Pairs of values times `factor` into `run`.
#[inline(always)]
fn pairs(bits: &mut Msb, tables: &Tables, root: usize, linbits: u8, factor: f32, run: &mut [f32]) {
    let nodes = &tables.nodes[..];
    let lookup = |window: u64| {
        let node = nodes[root + (window >> (64 - FIRST)) as usize];
        if node & LINK == 0 {
            return node;
        }
        nodes[(node & 0xffff) as usize + (window << FIRST >> (64 - (node >> 16 & 0xff))) as usize]
    };
    if linbits == 0 {
        // Two pairs are in one window: codes of up to 19 bits and two signs.
        let mut fours = run.chunks_mut(4);
        for four in &mut fours {
            let mut window = bits.window();
            let mut used = 0;
            for pair in four.chunks_exact_mut(2) {
                let leaf = lookup(window);
                let (length, x, y) = (leaf >> 8, leaf >> 4 & 15, leaf & 15);
                window <<= length;
                let x_set = u32::from(x != 0);
                let x_sign = ((window >> 63) as u32 & x_set) << 31;
                window <<= x_set;
                let y_set = u32::from(y != 0);
                let y_sign = ((window >> 63) as u32 & y_set) << 31;
                window <<= y_set;
                used += length + x_set + y_set;
                pair[0] = f32::from_bits((tables.powers[x as usize] * factor).to_bits() | x_sign);
                pair[1] = f32::from_bits((tables.powers[y as usize] * factor).to_bits() | y_sign);
            }
            bits.skip(used);
        }
        return;
    }
    for pair in run.chunks_exact_mut(2) {
        let mut window = bits.window();
        let leaf = lookup(window);
        let mut used = leaf >> 8;
        window <<= used;
        for (to, value) in pair.iter_mut().zip([leaf >> 4 & 15, leaf & 15]) {
            let mut value = value;
            if value == 15 {
                value += (window >> (64 - linbits)) as u32;
                window <<= linbits;
                used += u32::from(linbits);
            }
            let set = u32::from(value != 0);
            let sign = ((window >> 63) as u32 & set) << 31;
            window <<= set;
            used += set;
            *to = f32::from_bits((tables.powers[value as usize] * factor).to_bits() | sign);
        }
        bits.skip(used);
    }
}

/// Adds the inverse transform of the spectrum's first subbands to the slots and the overlap.
fn transform_rows(work: &mut Work, matrix: &[[f32; SLOTS]; 2 * SLOTS], subbands: usize) {
    #[cfg(target_arch = "x86_64")]
    if simd::avx2() {
        // SAFETY: the instruction set was just asked for.
        unsafe { transform_avx2(work, matrix, subbands) };
        return;
    }
    let _ = simd::avx2;
    // SAFETY: portable lanes need nothing of the machine.
    unsafe { transform_lanes::<Portable>(work, matrix, subbands) };
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn transform_avx2(work: &mut Work, matrix: &[[f32; SLOTS]; 2 * SLOTS], subbands: usize) {
    unsafe { transform_lanes::<simd::Avx2>(work, matrix, subbands) }
}

/// # Safety
/// The machine must have the instruction set of `V`.
#[inline(always)]
unsafe fn transform_lanes<V: Lanes>(work: &mut Work, matrix: &[[f32; SLOTS]; 2 * SLOTS], subbands: usize) {
    const { assert!(SUBBANDS % V::N == 0) };
    // Output rows that are summed together.
    const ROWS: usize = 6;
    for s in (0..subbands).step_by(V::N) {
        for first in (0..2 * SLOTS).step_by(ROWS) {
            let to = if first < SLOTS { &mut work.slots[first..] } else { &mut work.overlap[first - SLOTS..] };
            unsafe {
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
}

/// The polyphase synthesis of 18 slots (11172-3, 2.4.3.2.2), after the frequency inversion of odd subbands.
fn synthesise(work: &mut Work, tables: &Tables) {
    #[cfg(target_arch = "x86_64")]
    if simd::avx2() {
        // SAFETY: the instruction set was just asked for.
        unsafe { synthesise_avx2(work, tables) };
        return;
    }
    let _ = simd::avx2;
    // SAFETY: portable lanes need nothing of the machine.
    unsafe { synthesise_lanes::<Portable>(work, tables) };
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn synthesise_avx2(work: &mut Work, tables: &Tables) {
    unsafe { synthesise_lanes::<simd::Avx2>(work, tables) }
}

/// # Safety
/// The machine must have the instruction set of `V`.
#[inline(always)]
unsafe fn synthesise_lanes<V: Lanes>(work: &mut Work, tables: &Tables) {
    // Slots that share the loads of the matrix.
    const TOGETHER: usize = 3;
    const { assert!(32 % (2 * V::N) == 0 && SLOTS % TOGETHER == 0) };
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
                unsafe {
                    let mut sums = [[V::splat(0.0); 2]; TOGETHER];
                    for n in 0..16 {
                        let m = [V::load(matrix[n].as_ptr().add(q)), V::load(matrix[n].as_ptr().add(q + V::N))];
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
    }
    for t in 0..SLOTS {
        for q in (0..32).step_by(V::N) {
            unsafe {
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
}

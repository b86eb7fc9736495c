//! The quantised spectrum: Huffman codes, and the scaling of their values.

use std::sync::OnceLock;

use super::super::bits::Msb;
use super::header::Header;
use super::side::{Bands, Granule, LINES};
use super::tables as facts;

/// Bits that the first look-up of a Huffman code covers.
const FIRST: u32 = 8;
/// The largest quantised value: 15 and 13 further bits.
const LARGEST: usize = 15 + (1 << 13) - 1;

#[repr(C, align(64))]
struct Tables {
    /// x^(4/3)
    powers: [f32; LARGEST + 1],
    /// Look-up tables of all Huffman codes: a leaf's code length << 8 | its values, or `LINK` | bits of a further
    /// look-up << 16 | where its table begins.
    nodes: Vec<u32>,
    /// Where a table of pairs begins in `nodes`; None where every value is 0.
    pairs: [Option<u32>; 32],
    quads: [[u16; 64]; 2],
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
        Box::new(Tables { powers: std::array::from_fn(|x| (x as f64).powf(4.0 / 3.0) as f32), nodes, pairs, quads })
    })
}

/// Appends the look-up tables of a code to `nodes`, and returns where they begin.
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

/// 2^(x / 4)
fn quarter_power(x: i32) -> f32 {
    const ROOTS: [f32; 4] = [1.0, 1.189_207_1, std::f32::consts::SQRT_2, 1.681_792_8];
    // Side information and scale factors cannot take x out of -400..60.
    f32::from_bits(((127 + (x >> 2)).clamp(1, 254) as u32) << 23) * ROOTS[(x & 3) as usize]
}

/// Huffman decoding and requantisation (11172-3, 2.4.3.4.6 and .7) in one. Returns the line from which on all are 0. `end`
/// is the bit after the channel's last. Always inlined, for the caller's instruction set.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
pub(super) fn spectrum(
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
    let bands = Bands::new(granule, header.table());
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
        // Damaged: the codes reach beyond the channel.
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

/// Decodes pairs of values, times `factor`, into `run`.
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
        // Two pairs fit in one window: codes of up to 19 bits and two signs each.
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

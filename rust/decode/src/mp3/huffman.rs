//! The quantised spectrum: Huffman codes, and the scaling of their values.

use std::sync::OnceLock;

use super::super::bits::Register;
use super::header::Header;
use super::side::{Bands, Granule, LINES};
use super::standard;

/// Bits that the first look-up of a Huffman code covers.
const FIRST: u32 = 9;
/// The largest quantised value: 15 and 13 further bits.
const MAX_QUANTISED: usize = 15 + (1 << 13) - 1;

#[repr(C, align(64))]
struct Tables {
    powers: [f32; MAX_QUANTISED + 1], // x^(4/3)
    /// Look-up tables of all Huffman codes. A leaf: whether x is not 0 << 24 | bits of code and signs << 16 | of the
    /// code << 8 | x << 4 | y, and `ESCAPE` if more bits follow. Or `LINK` | bits of a further look-up << 16 | the
    /// start of its table.
    nodes: Vec<u32>,
    pairs: [Option<u32>; 32], // where a table of pairs begins in `nodes`; None if every value is 0
    quads: [[u16; 64]; 2], // bits of code and signs << 8 | of the code << 4 | which of the four values are not 0
    fours: [[f32; 4]; 256], // the four values by which of them are not 0 << 4 | the next four bits
}

const LINK: u32 = 1 << 31;
/// A value of 15 in a table of which it stands for larger ones.
const ESCAPE: u32 = 1 << 30;

fn tables() -> &'static Tables {
    static TABLES: OnceLock<Box<Tables>> = OnceLock::new();
    TABLES.get_or_init(|| {
        let mut nodes = Vec::new();
        let mut pairs = [None; 32];
        let mut leaves = &standard::PAIRS[..];
        for table in [1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 12, 13, 15, 16, 24] {
            pairs[table] = Some(grow(&mut nodes, &mut leaves, standard::LINBITS[table] > 0));
        }
        for table in 17..32 {
            pairs[table] = pairs[if table < 24 { 16 } else { 24 }];
        }
        let quads = [&standard::QUADS_A, &standard::QUADS_B].map(|leaves| {
            let mut table = [0; 64];
            let mut at = 0;
            for leaf in leaves {
                let (length, set) = (leaf >> 8, leaf & 15);
                let span = 64 >> length;
                table[at..at + span]
                    .fill((length + set.count_ones() as u16) << 8 | length << 4 | set);
                at += span;
            }
            table
        });
        let fours = std::array::from_fn(|i| {
            let mut next = 3;
            std::array::from_fn(|k| {
                if i >> 4 >> (3 - k) & 1 == 0 {
                    return 0.0;
                }
                next -= 1;
                [1.0, -1.0][i >> (next + 1) & 1]
            })
        });
        let powers = std::array::from_fn(|x| (x as f64).powf(4.0 / 3.0) as f32);
        Box::new(Tables { powers, nodes, pairs, quads, fours })
    })
}

/// A leaf of `nodes`, from a length << 8 | x << 4 | y.
fn leaf(code: u16, larger: bool) -> u32 {
    let (length, x, y) = (u32::from(code >> 8), code >> 4 & 15, code & 15);
    let escape = if larger && (x == 15 || y == 15) { ESCAPE } else { 0 };
    let set = [x, y].map(|value| u32::from(value != 0));
    escape | set[0] << 24 | (length + set[0] + set[1]) << 16 | u32::from(code)
}

/// Appends the look-up tables of the code that comes first in `leaves` to `nodes`, and returns their start. `larger`:
/// 15 stands for larger values.
fn grow(nodes: &mut Vec<u32>, leaves: &mut &[u16], larger: bool) -> u32 {
    let root = nodes.len();
    nodes.resize(root + (1 << FIRST), 0);
    // The next leaf's code, left-aligned in 32 bits.
    let mut code = 0u64;
    while code < 1 << 32 {
        let length = u32::from(leaves[0] >> 8);
        let at = root + (code >> (32 - FIRST)) as usize;
        if length <= FIRST {
            nodes[at..at + (1 << (FIRST - length))].fill(leaf(leaves[0], larger));
            code += 1 << (32 - length);
            *leaves = &leaves[1..];
            continue;
        }
        // All leaves under this prefix.
        let end = code + (1 << (32 - FIRST));
        let (mut n, mut longest) = (0, 0);
        while code < end {
            let length = u32::from(leaves[n] >> 8);
            longest = longest.max(length);
            code += 1 << (32 - length);
            n += 1;
        }
        nodes[at] = LINK | (longest - FIRST) << 16 | nodes.len() as u32;
        for code in &leaves[..n] {
            let span = 1 << (longest - u32::from(code >> 8));
            nodes.resize(nodes.len() + span, leaf(*code, larger));
        }
        *leaves = &leaves[n..];
    }
    root as u32
}

/// 2^(x / 4)
fn quarter_power(x: i32) -> f32 {
    const ROOTS: [f32; 4] = [1.0, 1.189_207_1, std::f32::consts::SQRT_2, 1.681_792_8];
    // Side information and scale factors cannot take x out of -400..60.
    f32::from_bits(((127 + (x >> 2)).clamp(1, 254) as u32) << 23) * ROOTS[(x & 3) as usize]
}

/// Huffman decoding and requantisation (11172-3, 2.4.3.4.6 and .7) in one. Returns the line from which on all are 0.
/// `end` is the bit after the channel's last. Always inlined, for the caller's instruction set.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
pub(super) fn spectrum(
    bits: &mut Register, end: usize, granule: &Granule, header: Header, gain: i32, emphasis: bool,
    scale: &[u8; 39], lines: &mut [f32; LINES],
) -> usize {
    let tables = tables();
    let bands = Bands::new(granule, header.rate_index());
    let step = if granule.coarse { 4 } else { 2 };
    let factor = |b: usize| {
        let window = bands.window[b].map_or(0, |w| 8 * granule.window_gain[usize::from(w)]);
        let more =
            if emphasis && bands.window[b].is_none() { standard::EMPHASIS[b.min(21)] } else { 0 };
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
        let run_end = granule
            .paired
            .min(region_end)
            .min(if b < bands.n { band_end } else { LINES })
            .max(line + 2);
        let table = usize::from(granule.tables[region]);
        let run = &mut lines[line..run_end];
        match tables.pairs[table] {
            None => run.fill(0.0),
            Some(root) => {
                *bits = pairs(*bits, tables, root as usize, standard::LINBITS[table], of_band, run)
            }
        }
        line = run_end;
        // Damaged: the codes reach beyond the channel.
        if bits.position() > end {
            break;
        }
    }
    let quads = &tables.quads[granule.quads];
    while line + 4 <= LINES && bits.position() < end {
        bits.fill();
        let leaf = quads[(bits.bits >> 58) as usize];
        let total = u32::from(leaf >> 8);
        if bits.position() + total as usize > end {
            break;
        }
        let signs = bits.bits << (leaf >> 4 & 15) >> 60;
        bits.skip(total);
        let four = &tables.fours[(usize::from(leaf & 15) << 4 | signs as usize) & 255];
        if line + 4 <= band_end || b == bands.n {
            for (to, x) in lines[line..line + 4].iter_mut().zip(four) {
                *to = of_band * x;
            }
        } else {
            for (i, x) in four.iter().enumerate() {
                while line + i >= band_end && b < bands.n {
                    band_end = bands.ends[b].1.min(LINES);
                    of_band = factor(b);
                    b += 1;
                }
                lines[line + i] = of_band * x;
            }
        }
        line += 4;
    }
    lines[line..].fill(0.0);
    line
}

/// Decodes pairs of values, times `factor`, into `run`.
#[inline(always)]
fn pairs<'a>(
    mut bits: Register<'a>, tables: &Tables, root: usize, linbits: u8, factor: f32, run: &mut [f32],
) -> Register<'a> {
    const { assert!(2 * (19 + 2) <= Register::FULL && 17 + 2 * (13 + 1) <= Register::FULL) };
    let first: &[u32; 1 << FIRST] =
        tables.nodes[root..].first_chunk().expect("grow appends as many");
    let mut values = [0.0; 16];
    for (value, power) in values.iter_mut().zip(&tables.powers) {
        *value = power * factor;
    }
    for four in run.chunks_mut(4) {
        bits.fill();
        for pair in four.chunks_exact_mut(2) {
            let mut node = first[(bits.bits >> (64 - FIRST)) as usize];
            if node & LINK != 0 {
                let further = bits.bits << FIRST >> (64 - (node >> 16 & 0xff));
                node = tables.nodes[(node & 0xffff) as usize + further as usize];
            }
            if node & ESCAPE != 0 {
                bits = large(bits, tables, node, linbits, factor, pair);
                continue;
            }
            let x_sign = bits.bits << (node >> 8 & 31);
            let y_sign = x_sign << (node >> 24 & 1);
            bits.skip(node >> 16 & 63);
            pair[0] = signed(values[(node >> 4 & 15) as usize], x_sign);
            pair[1] = signed(values[(node & 15) as usize], y_sign);
        }
    }
    bits
}

/// `value` with the first bit of `bits` as its sign. A 0 has no such bit, and may become -0, as which it adds nothing.
#[inline(always)]
fn signed(value: f32, bits: u64) -> f32 {
    f32::from_bits(value.to_bits() ^ ((bits >> 32) as u32 & 1 << 31))
}

/// A pair of which one value at least is 15 and `linbits` further bits.
#[inline(always)]
fn large<'a>(
    mut bits: Register<'a>, tables: &Tables, node: u32, linbits: u8, factor: f32, pair: &mut [f32],
) -> Register<'a> {
    bits.fill();
    bits.skip(node >> 8 & 31);
    for (to, value) in pair.iter_mut().zip([node >> 4 & 15, node & 15]) {
        let mut value = value;
        if value == 15 {
            value += (bits.bits >> (64 - linbits)) as u32;
            bits.skip(u32::from(linbits));
        }
        *to = 0.0;
        if value != 0 {
            *to = signed(tables.powers[value as usize] * factor, bits.bits);
            bits.skip(1);
        }
    }
    bits.fill();
    bits
}

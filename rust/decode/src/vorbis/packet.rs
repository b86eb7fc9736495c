//! A packet to the lines of its block: floor, residue and coupling of its channels (Vorbis I specification, 4.3, 7.2
//! and 8.6).
//!
//! All that follows is linear, and the channels of a packet have the same block, so the mean of the channels is taken
//! here.

// In the kernels several arrays share one index.
#![allow(clippy::needless_range_loop)]

use std::sync::OnceLock;

use super::book::{ilog, Book};
use super::mdct::MAX_LINES;
use super::setup::{Floor, Residue, Setup, MAX_POINTS};
use crate::bits::Lsb;
use crate::simd::{self, Portable, Shuffle};

/// Values between the planes of two channels: a vector may reach beyond the last line.
const STRIDE: usize = MAX_LINES + 8;

/// The memory of the decoder.
#[derive(Default)]
pub(super) struct Work {
    residues: Vec<f32>, // for each channel, its residue; then the residues of interleaved channels
    curves: Vec<f32>,   // for each channel, its floor
    classes: Vec<u8>,   // the classes of each channel's partitions
    used: Vec<bool>,    // whether a channel has a floor, and whether it has a residue
    coded: Vec<bool>,
    members: Vec<usize>, // the channels of a submap
}

simd::kernel! {
    /// Decodes the lines of an audio packet: minus one of the channels, or minus their mean. None if the packet ends in
    /// its header.
    pub(super) fn decode(setup: &Setup, work: &mut Work, data: &[u8], channel: Option<u16>, lines: &mut [f32]) -> Option<()>:
        avx2 decode_any::<simd::Avx2>; else decode_any::<Portable>
}

#[inline(always)]
unsafe fn decode_any<V: Shuffle>(
    setup: &Setup, work: &mut Work, data: &[u8], channel: Option<u16>, lines: &mut [f32],
) -> Option<()> {
    let mut bits = Lsb::new(data);
    let mode = bits.read(1 + ilog(setup.modes.len() as u32 - 1))? >> 1;
    let mode = setup.modes.get(mode as usize)?;
    if mode.long {
        bits.read(2)?;
    }
    let n = setup.blocks[usize::from(mode.long)] as usize / 2;
    let mapping = &setup.mappings[mode.mapping];
    let channels = usize::from(setup.channels);
    let wanted = channel.map_or(0..channels, |channel| channel.into()..usize::from(channel) + 1);
    work.residues.resize(2 * channels * STRIDE, 0.0);
    work.curves.resize(channels * STRIDE, 0.0);
    work.used.clear();
    for (c, curve) in work.curves.chunks_exact_mut(STRIDE).enumerate() {
        let floor = &setup.floors[mapping.floors[mapping.submaps[c]]];
        let curve = wanted.contains(&c).then_some(&mut curve[..n + V::N]);
        work.used.push(draw::<V>(floor, &setup.books, &mut bits, curve).is_some());
    }
    work.coded.clone_from(&work.used);
    for &[magnitude, angle] in &mapping.couplings {
        if work.used[magnitude] || work.used[angle] {
            work.coded[magnitude] = true;
            work.coded[angle] = true;
        }
    }
    for plane in work.residues.chunks_exact_mut(STRIDE).take(channels) {
        plane[..n].fill(0.0);
    }
    for (submap, &residue) in mapping.residues.iter().enumerate() {
        work.members.clear();
        work.members.extend((0..channels).filter(|&c| mapping.submaps[c] == submap));
        submap_residue::<V>(&setup.residues[residue], &setup.books, &mut bits, work, channels, n);
    }
    for &[magnitude, angle] in mapping.couplings.iter().rev() {
        if work.coded[magnitude] {
            let [m, a] = work
                .residues
                .get_disjoint_mut([magnitude, angle].map(|c| c * STRIDE..c * STRIDE + n))
                .ok()?;
            uncouple(m, a);
        }
    }
    let gain = -1.0 / wanted.len() as f32;
    lines[..n].fill(0.0);
    for c in wanted.filter(|&c| work.used[c]) {
        let (curve, residue) = (&work.curves[c * STRIDE..][..n], &work.residues[c * STRIDE..][..n]);
        for ((line, curve), residue) in lines.iter_mut().zip(curve).zip(residue) {
            *line += gain * curve * residue;
        }
    }
    Some(())
}

/// Undoes the coupling of two channels (4.3.5).
#[inline(always)]
fn uncouple(magnitude: &mut [f32], angle: &mut [f32]) {
    for (m, a) in magnitude.iter_mut().zip(angle) {
        let other = if *m > 0.0 { *m - a.abs() } else { *m + a.abs() };
        (*m, *a) = if *a > 0.0 { (*m, other) } else { (other, *m) };
    }
}

/// Reads a floor, and draws its curve if one is given. None if the channel is silent, or the packet ends.
/// The curve must have `V::N` values more than lines.
#[inline(always)]
unsafe fn draw<V: Shuffle>(
    floor: &Floor, books: &[Book], bits: &mut Lsb, curve: Option<&mut [f32]>,
) -> Option<()> {
    if bits.read(1)? == 0 {
        return None;
    }
    let range = [256, 128, 86, 64][floor.multiplier as usize - 1];
    let mut y = [0i32; MAX_POINTS];
    for y in &mut y[..2] {
        *y = (bits.read(ilog(range as u32 - 1))? as i32).min(range - 1);
    }
    let mut i = 2;
    for &class in &floor.partitions {
        let class = &floor.classes[class];
        let mut which = if class.bits > 0 { books[class.master].entry(bits)? } else { 0 };
        for _ in 0..class.dimensions {
            if let Some(book) = class.books[which & ((1 << class.bits) - 1)] {
                y[i] = books[book].entry(bits)? as i32;
            }
            which >>= class.bits;
            i += 1;
        }
    }
    let Some(curve) = curve else { return Some(()) };
    // The points of the curve, by prediction from their neighbours (7.2.4, step 1).
    let mut on_curve = [false; MAX_POINTS];
    on_curve[..2].fill(true);
    for (i, &[left, right]) in floor.neighbours.iter().enumerate().skip(2) {
        let [x, from, to] = [i, left, right].map(|i| floor.places[i] as i32);
        let step = (y[right] - y[left]).abs() * (x - from) / (to - from);
        let predicted = if y[right] < y[left] { y[left] - step } else { y[left] + step };
        let (above, below) = (range - predicted, predicted);
        let coded = y[i];
        if coded != 0 {
            for i in [left, right, i] {
                on_curve[i] = true;
            }
        }
        let difference = match coded {
            _ if coded >= 2 * above.min(below) && above > below => coded - below,
            _ if coded >= 2 * above.min(below) => above - 1 - coded,
            _ if coded % 2 == 1 => -(coded + 1) / 2,
            _ => coded / 2,
        };
        y[i] = (predicted + difference).clamp(0, range - 1);
    }
    // Lines between them, in whole steps of a logarithmic scale (step 2): y + floor(rise x / run) to the right of a
    // point. The quotient is taken half a step of x above each of these: no rounding reaches the next one.
    let n = curve.len() - V::N;
    let level = |i: usize| (y[i] * floor.multiplier as i32) as f32;
    let mut from = (0, level(0));
    let points = floor
        .order
        .iter()
        .filter(|&&i| i != 0 && on_curve[i])
        .map(|&i| (floor.places[i] as usize, level(i)));
    for (x, y) in points {
        if from.0 >= n {
            break;
        }
        line::<V>(curve, from, (x, y), n);
        from = (x, y);
    }
    if from.0 < n {
        line::<V>(curve, from, (n, from.1), n);
    }
    Some(())
}

/// Draws a line up to a point, which does not belong to it, or to the end of the curve.
#[inline(always)]
unsafe fn line<V: Shuffle>(curve: &mut [f32], from: (usize, f32), to: (usize, f32), n: usize) {
    let run = (to.0 - from.0) as f32;
    let slope = (to.1 - from.1) / run;
    let base = if slope < 0.0 { from.1 + 1.0 - 0.5 / run } else { from.1 + 0.5 / run };
    let table = decibels();
    let mut right = V::load([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0].as_ptr());
    for x in (from.0..to.0.min(n)).step_by(V::N) {
        right
            .mul_add(V::splat(slope), V::splat(base))
            .look_up(table)
            .store(curve.as_mut_ptr().add(x));
        right = right.add(V::splat(V::N as f32));
    }
}

/// The levels of a floor (10.1): 256 of them over 140 dB.
fn decibels() -> &'static [f32; 256] {
    static TABLE: OnceLock<[f32; 256]> = OnceLock::new();
    TABLE.get_or_init(|| {
        std::array::from_fn(|i| 10f64.powf(7.0 * (i as f64 - 255.0) / 256.0) as f32)
    })
}

/// Reads the residues of a submap's channels.
#[inline(always)]
unsafe fn submap_residue<V: Shuffle>(
    residue: &Residue, books: &[Book], bits: &mut Lsb, work: &mut Work, channels: usize, n: usize,
) {
    let Work { residues, classes, coded, members, .. } = work;
    if residue.kind < 2 || members.len() == 1 {
        members.retain(|&c| coded[c]);
        read(residue, books, bits, classes, residues, members, n);
        return;
    }
    if !members.iter().any(|&c| coded[c]) {
        return;
    }
    let (planes, all) = residues.split_at_mut(channels * STRIDE);
    let together = members.len();
    all[..n * together].fill(0.0);
    read(residue, books, bits, classes, all, &[0], n * together);
    if let [a, b] = members[..] {
        for i in (0..n).step_by(V::N) {
            let from = all.as_ptr().add(2 * i);
            let [even, odd] = V::load(from).deinterleave(V::load(from.add(V::N)));
            even.store(planes[a * STRIDE + i..].as_mut_ptr());
            odd.store(planes[b * STRIDE + i..].as_mut_ptr());
        }
        return;
    }
    for (place, &c) in members.iter().enumerate() {
        for (to, from) in
            planes[c * STRIDE..][..n].iter_mut().zip(all[place..].iter().step_by(together))
        {
            *to = *from;
        }
    }
}

/// Adds the vectors of a residue to some planes of `n` lines (8.6.2). None if the packet ends, which is allowed.
#[inline(always)]
fn read(
    residue: &Residue, books: &[Book], bits: &mut Lsb, classes: &mut Vec<u8>, lines: &mut [f32],
    planes: &[usize], n: usize,
) -> Option<()> {
    let (begin, end) = (residue.begin.min(n), residue.end.min(n));
    let partitions = end.saturating_sub(begin) / residue.size;
    let class_book = &books[residue.book];
    classes.clear();
    classes.resize(partitions * planes.len(), 0);
    for pass in 0..residue.passes {
        for first in (0..partitions).step_by(class_book.dimensions) {
            let group = first..partitions.min(first + class_book.dimensions);
            if pass == 0 {
                for plane in 0..planes.len() {
                    let mut word = class_book.entry(bits)?;
                    let mut i = first + class_book.dimensions;
                    while word > 0 && i > first && residue.classes > 1 {
                        i -= 1;
                        if i < group.end {
                            classes[plane * partitions + i] = (word % residue.classes) as u8;
                        }
                        word /= residue.classes;
                    }
                }
            }
            for i in group {
                for (plane, c) in planes.iter().enumerate() {
                    let class = usize::from(classes[plane * partitions + i]);
                    if let Some(book) = residue.books[class][pass] {
                        let to =
                            &mut lines[c * STRIDE + begin + i * residue.size..][..residue.size];
                        add(residue.kind, &books[book], bits, to)?;
                    }
                }
            }
        }
    }
    Some(())
}

/// Adds the vectors of a partition.
#[inline(always)]
fn add(kind: u32, book: &Book, bits: &mut Lsb, lines: &mut [f32]) -> Option<()> {
    match book.dimensions {
        _ if kind == 0 => {
            let apart = lines.len() / book.dimensions;
            for i in 0..apart {
                let entry = book.entry(bits)?;
                let vector = &book.values[entry * book.dimensions..][..book.dimensions];
                for (j, x) in vector.iter().enumerate() {
                    lines[i + j * apart] += x;
                }
            }
            Some(())
        }
        1 => add_vectors::<1>(book, bits, lines),
        2 => add_vectors::<2>(book, bits, lines),
        4 => add_vectors::<4>(book, bits, lines),
        8 => add_vectors::<8>(book, bits, lines),
        n => {
            for lines in lines.chunks_mut(n) {
                let entry = book.entry(bits)?;
                lines.iter_mut().zip(&book.values[entry * n..]).for_each(|(line, x)| *line += x);
            }
            Some(())
        }
    }
}

#[inline(always)]
fn add_vectors<const N: usize>(book: &Book, bits: &mut Lsb, lines: &mut [f32]) -> Option<()> {
    let (vectors, rest) = lines.as_chunks_mut::<N>();
    for lines in vectors {
        let entry = book.entry(bits)?;
        let vector = &book.values[entry * N..][..N];
        for i in 0..N {
            lines[i] += vector[i];
        }
    }
    if !rest.is_empty() {
        let entry = book.entry(bits)?;
        rest.iter_mut().zip(&book.values[entry * N..]).for_each(|(line, x)| *line += x);
    }
    Some(())
}

//! The layer III decoder (ISO/IEC 11172-3, 2.4.3.4; lower rates: 13818-3, 2.4.3.2), straight to mono: the mean, or one
//! channel.
//!
//! Everything after the stereo processing is linear, so the mean of the channels is taken there, and one hybrid filter
//! bank runs instead of two. If the channels' block types differ, each goes through its own transform, into the
//! same overlap. Of a middle/side pair with one block type the mean is middle / sqrt 2: side is not even decoded.

use std::f64::consts::PI;

use super::super::bits::{Msb, Register};
use super::header::Header;
use super::huffman;
use super::hybrid::Hybrid;
use super::side::{self, Bands, Granule, LINES, NO_INTENSITY};
use crate::simd;

/// The farthest that a frame reaches back into earlier bytes.
pub(super) const RESERVOIR: usize = 511;

simd::kernel! {
    /// Most of the time goes into Huffman codes, whose shifts by variable amounts are one instruction each of some
    /// sets.
    fn decode_granule(layer: &mut Layer3, granule: &[Granule; 2], header: Header, index: usize, bit: usize) -> ():
        bits Layer3::granule; else Layer3::granule
}

/// The state of a decoder between frames, and its memory.
pub(super) struct Layer3 {
    main: Vec<u8>, // the last bytes of main data: the bit reservoir
    lines: [[f32; LINES]; 2],
    used: [usize; 2], // lines of each channel that may differ from 0
    /// Scale factors in the order of bands; of an intensity band's right channel, the positions.
    scale: [[u8; 39]; 2],
    hybrid: Box<Hybrid>,
    channel: Option<u16>, // the channel that is decoded; None for the mean
}

impl Default for Layer3 {
    fn default() -> Self {
        Self {
            main: Vec::with_capacity(1 << 12),
            lines: [[0.0; LINES]; 2],
            used: [0; 2],
            scale: [[0; 39]; 2],
            hybrid: Box::default(),
            channel: None,
        }
    }
}

impl Layer3 {
    /// Forgets everything that was decoded before. From here on `channel` is decoded, or the mean.
    pub fn reset(&mut self, channel: Option<u16>) {
        self.channel = channel;
        self.main.clear();
        self.hybrid.reset();
    }

    /// Keeps a frame's main data for later frames, and returns the start of its own in `main`.
    pub fn skip(&mut self, frame: &[u8], header: Header) -> Option<usize> {
        if let Some(old) = self.main.len().checked_sub(RESERVOIR) {
            self.main.copy_within(old.., 0);
            self.main.truncate(RESERVOIR);
        }
        let side = frame.get(header.before_data() - header.side()..header.before_data());
        let back =
            side.map_or(0, |side| Msb::new(side).read(if header.mpeg1 { 9 } else { 8 }) as usize);
        let begin = self.main.len().checked_sub(back);
        self.main.extend_from_slice(frame.get(header.before_data()..).unwrap_or(&[]));
        side.and(begin)
    }

    /// Decodes a frame to the mean of its channels: `header.samples()` samples. A granule that cannot be decoded is
    /// silent.
    pub fn decode(&mut self, frame: &[u8], header: Header, out: &mut [f32]) {
        let granules = if header.mpeg1 { 2 } else { 1 };
        let mut side = [[Granule::default(); 2]; 2];
        let begin = self.skip(frame, header);
        let valid = begin.is_some() && side::side_information(frame, header, &mut side).is_some();
        let mut bit = 8 * begin.unwrap_or(0);
        for (i, granule) in side.iter().take(granules).enumerate() {
            let end = bit
                + granule
                    .iter()
                    .take(usize::from(header.channels))
                    .map(|channel| channel.bits)
                    .sum::<usize>();
            if !valid || end > 8 * self.main.len() {
                self.used = [0; 2];
                self.lines[0] = [0.0; LINES];
                self.synthesise(&[(0, Granule::default())], header);
            } else {
                decode_granule(self, granule, header, i, bit);
            }
            bit = end;
            for (out, slot) in
                out[i * LINES..][..LINES].chunks_exact_mut(32).zip(&self.hybrid.samples)
            {
                for (i, pair) in out.chunks_exact_mut(2).enumerate() {
                    pair.copy_from_slice(&[slot[i], slot[16 + i]]);
                }
            }
        }
    }

    #[inline(always)]
    fn granule(&mut self, granule: &[Granule; 2], header: Header, index: usize, mut bit: usize) {
        let channels = usize::from(header.channels);
        let same_block =
            (granule[0].block, granule[0].mixed) == (granule[1].block, granule[1].mixed);
        let middle_side = channels == 2 && header.middle_side();
        let intensity = channels == 2 && header.intensity();
        let only_middle = middle_side && !intensity && same_block && self.channel.is_none();
        for (c, channel) in granule.iter().enumerate().take(channels) {
            let end = bit + channel.bits;
            let mut bits = Msb::at(&self.main, bit);
            let positions = intensity && c == 1;
            let emphasis = side::scale_factors(
                &mut bits,
                channel,
                header,
                index,
                positions,
                &mut self.scale[c],
            );
            if !(only_middle && c == 1) {
                let gain = if only_middle { -2 } else { 0 };
                let scale = &self.scale[c];
                let mut bits = Register::at(&self.main, bits.position());
                self.used[c] = huffman::spectrum(
                    &mut bits,
                    end,
                    channel,
                    header,
                    gain,
                    emphasis,
                    scale,
                    &mut self.lines[c],
                );
            }
            bit = end;
        }
        if channels == 1 || only_middle {
            self.synthesise(&[(0, granule[0])], header);
            return;
        }
        let both = self.used[0].max(self.used[1]);
        if intensity {
            self.intensity(granule, header, middle_side);
        } else if middle_side {
            self.unmix(0, both);
        }
        let n = self.used[0].max(self.used[1]).max(both);
        if let Some(channel) = self.channel {
            let channel = usize::from(channel).min(1);
            self.used[channel] = n;
            self.synthesise(&[(channel, granule[channel])], header);
            return;
        }
        let [left, right] = &mut self.lines;
        if same_block {
            for (l, r) in left[..n].iter_mut().zip(&right[..n]) {
                *l = 0.5 * (*l + *r);
            }
            self.used[0] = n;
            self.synthesise(&[(0, granule[0])], header);
        } else {
            for x in left.iter_mut().chain(right) {
                *x *= 0.5;
            }
            self.used = [n; 2];
            self.synthesise(&[(0, granule[0]), (1, granule[1])], header);
        }
    }

    /// Turns middle and side of lines \[from, to) into left and right.
    fn unmix(&mut self, from: usize, to: usize) {
        let [left, right] = &mut self.lines;
        for (l, r) in left[from..to].iter_mut().zip(&mut right[from..to]) {
            let (middle, side) =
                (*l * std::f32::consts::FRAC_1_SQRT_2, *r * std::f32::consts::FRAC_1_SQRT_2);
            (*l, *r) = (middle + side, middle - side);
        }
    }

    /// Intensity stereo (11172-3, 2.4.3.4.9.3; 13818-3, 2.4.3.2): bands in which the right channel is empty are taken
    /// from the left channel, at the position that the right one's scale factor gives.
    fn intensity(&mut self, granule: &[Granule; 2], header: Header, middle_side: bool) {
        let right = &granule[1];
        let bands = Bands::new(right, header.rate_index());
        let n = bands.n;
        // The first band from which on all are empty, for each window and for long lines.
        let mut first = [0; 4];
        for (b, range) in bands.ranges().enumerate() {
            if self.lines[1][range].iter().any(|x| *x != 0.0) {
                first[bands.window[b].map_or(3, usize::from)] = b + 1;
                // Short windows above are not empty, so all long bands count as coded.
                if bands.window[b].is_some() {
                    first[3] = first[3].max(bands.n_long);
                }
            }
        }
        for b in 0..n {
            let range = bands.ends[b].0..bands.ends[b].1;
            let window = bands.window[b].map_or(3, usize::from);
            // The last band has no scale factor: it takes the one of the band before.
            let from = if b + if window < 3 { 3 } else { 1 } >= n {
                b - if window < 3 { 3 } else { 1 }
            } else {
                b
            };
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
            // tan(pi / 2) is infinite: everything is on the left.
            let (l, r) = if l.is_finite() { (l as f32, r as f32) } else { (1.0, 0.0) };
            for i in range {
                let x = self.lines[0][i];
                (self.lines[0][i], self.lines[1][i]) = (x * l, x * r);
            }
        }
        self.used[1] = self.used[0].max(self.used[1]);
    }

    /// From lines to samples: the sum over the given channels.
    fn synthesise(&mut self, channels: &[(usize, Granule)], header: Header) {
        self.hybrid.begin();
        for (channel, granule) in channels {
            self.hybrid.transform(
                &self.lines[*channel],
                self.used[*channel],
                granule,
                header.rate_index(),
            );
        }
        self.hybrid.synthesise();
    }
}

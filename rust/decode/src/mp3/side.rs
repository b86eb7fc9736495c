//! Side information, scale factors, and the bands that they belong to.

use super::super::bits::Msb;
use super::header::Header;
use super::standard;

/// Lines of a granule, and its samples.
pub(super) const LINES: usize = 576;
/// The index of a short block among the block types.
pub(super) const SHORT: usize = 2;

/// The side information of one channel of one granule.
#[derive(Clone, Copy, Default)]
pub(super) struct Granule {
    pub bits: usize,
    pub paired: usize, // lines that are coded in pairs
    pub gain: i32,
    pub compress: u32,
    pub block: usize,
    pub mixed: bool,
    pub tables: [u8; 3],
    pub regions: [usize; 2], // where the second and the third table's lines begin
    pub window_gain: [i32; 3], // gain of each window of a short block
    pub emphasis: bool,
    pub coarse: bool,
    pub quads: usize,
    pub shared: u32, // flags of the groups of scale factors that are the previous granule's
}

/// The position that marks a band without intensity stereo.
pub(super) const NO_INTENSITY: u8 = u8::MAX;

/// Reads the side information of a frame. None when it is invalid.
pub(super) fn side_information(
    frame: &[u8], header: Header, side: &mut [[Granule; 2]; 2],
) -> Option<()> {
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
    let (long, short) =
        (&standard::LONG[header.rate_index()], &standard::SHORT[header.rate_index()]);
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
                let first = if to.block == SHORT && !(header.mpeg1 && to.mixed) {
                    3 * short[3]
                } else {
                    long[8]
                };
                to.regions = [usize::from(first), LINES];
                refuse!(to.block == 0, None);
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
            // Short blocks share no scale factors.
            to.shared = if i == 1 && to.block != SHORT { shared[c] } else { 0 };
            refuse!(to.paired > LINES, None);
        }
    }
    Some(())
}

/// Reads the scale factors, and returns whether `EMPHASIS` is added to them. `positions`: they are an intensity band's.
pub(super) fn scale_factors(
    bits: &mut Msb, granule: &Granule, header: Header, index: usize, positions: bool,
    scale: &mut [u8; 39],
) -> bool {
    let short = granule.block == SHORT;
    let shape = if !short { 0 } else { 1 + usize::from(granule.mixed) };
    if header.mpeg1 {
        let widths =
            standard::SCALE_BITS.map(|widths| u32::from(widths[granule.compress as usize & 15]));
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
    for (count, width) in standard::SCALE_COUNTS[layout][shape].into_iter().zip(widths) {
        for _ in 0..count {
            scale[b] = bits.read(width) as u8;
            // The largest position marks a band without intensity stereo.
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
pub(super) struct Bands {
    pub n: usize,
    pub n_long: usize,
    pub ends: [(usize, usize); 39], // first line of each, and of the next
    pub window: [Option<u8>; 39],   // of short bands, the window
}

impl Bands {
    pub fn new(granule: &Granule, table: usize) -> Self {
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
        for band in standard::LONG[table].windows(2).filter(|band| usize::from(band[1]) <= long) {
            push(&mut line, usize::from(band[1] - band[0]), None);
        }
        for band in standard::SHORT[table].windows(2) {
            for window in 0..3 {
                // If the long bands end inside a short one (8 kHz), the rest of it is short.
                let begin = usize::from(band[0]).max(line.min(long) / 3);
                if long < LINES && 3 * usize::from(band[1]) > long {
                    push(
                        &mut line,
                        usize::from(band[1]) - begin.min(usize::from(band[1])),
                        Some(window),
                    );
                }
            }
        }
        bands
    }

    /// The lines of each band.
    pub fn ranges(&self) -> impl Iterator<Item = std::ops::Range<usize>> + '_ {
        self.ends[..self.n].iter().map(|&(from, to)| from..to.min(LINES))
    }
}

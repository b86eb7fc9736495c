//! The identification and the setup header (Vorbis I specification, 4.2.2 and 4.2.4).

use super::book::{ilog, Book};
use super::NAME;
use crate::bits::Lsb;
use crate::{corrupt, Error};

/// Bytes of the identification header.
pub(super) const IDENTIFICATION: usize = 30;
/// The most weights that the codebooks of one stream may expand to (a real encoder needs a hundredth).
const MAX_WEIGHTS: u64 = 1 << 22;
/// Points of a floor, at most.
pub(super) const MAX_POINTS: usize = 65;
/// Passes over a residue.
const PASSES: usize = 8;

pub(super) struct Setup {
    pub rate: u32,
    pub channels: u8,
    pub blocks: [u32; 2], // sizes of the short and the long block
    pub books: Vec<Book>,
    pub floors: Vec<Floor>,
    pub residues: Vec<Residue>,
    pub mappings: Vec<Mapping>,
    pub modes: Vec<Mode>,
}

pub(super) struct Mode {
    pub long: bool,
    pub mapping: usize,
}

/// A floor of type 1 (7.2.2): a curve through points.
pub(super) struct Floor {
    pub partitions: Vec<usize>,
    pub classes: Vec<Class>,
    pub multiplier: u32,
    pub places: Vec<u32>, // where the points lie, in the order of the packets
    /// For each point, the nearest ones before it in the packet: to the left and to the right.
    pub neighbours: Vec<[usize; 2]>,
    pub order: Vec<usize>, // the points from left to right
}

/// The coding of a partition's points.
pub(super) struct Class {
    pub dimensions: usize,
    pub bits: u32,
    pub master: usize,
    pub books: [Option<usize>; 8],
}

/// A residue (8.6.1).
pub(super) struct Residue {
    pub kind: u32,
    pub begin: usize,
    pub end: usize,
    pub size: usize,
    pub classes: usize,
    pub book: usize,
    pub passes: usize, // passes that have a book
    pub books: Vec<[Option<usize>; PASSES]>,
}

/// The coding of a packet's channels (4.2.4).
pub(super) struct Mapping {
    pub couplings: Vec<[usize; 2]>, // channels of a magnitude and an angle
    pub submaps: Vec<usize>,        // for each channel, its submap
    pub floors: Vec<usize>,
    pub residues: Vec<usize>,
}

impl Setup {
    /// # Errors
    /// Headers that are not valid, that expand to more than `MAX_WEIGHTS`, or that have a floor of type 0.
    pub fn parse(headers: &[u8]) -> Result<Self, Error> {
        let mut floor_0 = false;
        match Self::try_parse(headers, &mut floor_0) {
            Some(setup) => Ok(setup),
            None if floor_0 => Err(Error::Unsupported {
                format: NAME,
                what: "the floor 0 of encoders before 2002".into(),
            }),
            None => corrupt(NAME, "the headers are not valid"),
        }
    }

    fn try_parse(headers: &[u8], floor_0: &mut bool) -> Option<Self> {
        let (ident, setup) = headers.split_at_checked(IDENTIFICATION)?;
        let channels = ident[11];
        let rate = u32::from_le_bytes(ident[12..16].try_into().ok()?);
        let (short, long) = (ident[28] & 15, ident[28] >> 4);
        if ident[7..11] != [0; 4]
            || channels == 0
            || !(6..=13).contains(&short)
            || !(short..=13).contains(&long)
        {
            return None;
        }
        let mut bits = Lsb::new(setup.get(7..)?);
        let mut budget = MAX_WEIGHTS;
        let mut books = Vec::new();
        for _ in 0..=bits.read(8)? {
            books.push(Book::parse(&mut bits, &mut budget)?);
        }
        for _ in 0..=bits.read(6)? {
            bits.read(16)?;
        }
        let mut floors = Vec::new();
        for _ in 0..=bits.read(6)? {
            let kind = bits.read(16)?;
            *floor_0 = kind == 0;
            floors.push(if kind == 1 {
                Floor::parse(&mut bits, books.len())?
            } else {
                return None;
            });
        }
        let mut residues = Vec::new();
        for _ in 0..=bits.read(6)? {
            residues.push(Residue::parse(&mut bits, &books)?);
        }
        let mut mappings = Vec::new();
        for _ in 0..=bits.read(6)? {
            mappings.push(Mapping::parse(&mut bits, channels, floors.len(), residues.len())?);
        }
        let mut modes = Vec::new();
        for _ in 0..=bits.read(6)? {
            let long = bits.flag()?;
            bits.read(16 + 16)?;
            let mapping = index(&mut bits, 8, mappings.len())?;
            modes.push(Mode { long, mapping });
        }
        let blocks = [1 << short, 1 << long];
        bits.flag()?.then_some(Self {
            rate,
            channels,
            blocks,
            books,
            floors,
            residues,
            mappings,
            modes,
        })
    }

    /// The block size of an audio packet; None for any other packet.
    pub fn block(&self, packet: &[u8]) -> Option<u32> {
        let mut bits = Lsb::new(packet);
        if bits.flag()? {
            return None;
        }
        let mode = bits.read(ilog(self.modes.len() as u32 - 1))?;
        Some(self.blocks[usize::from(self.modes.get(mode as usize)?.long)])
    }
}

/// A number below `n`, coded in `width` bits.
fn index(bits: &mut Lsb, width: u32, n: usize) -> Option<usize> {
    let i = bits.read(width)? as usize;
    (i < n).then_some(i)
}

impl Floor {
    fn parse(bits: &mut Lsb, n_books: usize) -> Option<Self> {
        let mut partitions = Vec::new();
        for _ in 0..bits.read(5)? {
            partitions.push(bits.read(4)? as usize);
        }
        let mut classes = Vec::new();
        for _ in 0..partitions.iter().max().map_or(0, |most| most + 1) {
            let dimensions = bits.read(3)? as usize + 1;
            let n_bits = bits.read(2)?;
            let master = if n_bits > 0 { index(bits, 8, n_books)? } else { 0 };
            let mut books = [None; 8];
            for book in &mut books[..1 << n_bits] {
                *book = index(bits, 8, n_books + 1)?.checked_sub(1);
            }
            classes.push(Class { dimensions, bits: n_bits, master, books });
        }
        let multiplier = bits.read(2)? + 1;
        let width = bits.read(4)?;
        let mut places = vec![0, 1 << width];
        for &class in &partitions {
            for _ in 0..classes[class].dimensions {
                places.push(bits.read(width)?);
            }
        }
        let mut order: Vec<usize> = (0..places.len()).collect();
        order.sort_by_key(|&i| places[i]);
        refuse!(
            places.len() > MAX_POINTS
                || order.windows(2).any(|pair| places[pair[0]] == places[pair[1]]),
            None
        );
        let nearest = |i: usize| {
            let mut before = order.iter().copied().filter(|&j| j < i);
            let left = before.clone().rfind(|&j| places[j] < places[i]);
            Some([left?, before.find(|&j| places[j] > places[i])?])
        };
        let neighbours = (0..places.len())
            .map(|i| if i < 2 { Some([0; 2]) } else { nearest(i) })
            .collect::<Option<_>>()?;
        Some(Self { partitions, classes, multiplier, places, neighbours, order })
    }
}

impl Residue {
    fn parse(bits: &mut Lsb, books: &[Book]) -> Option<Self> {
        let kind = index(bits, 16, 3)? as u32;
        let (begin, end) = (bits.read(24)? as usize, bits.read(24)? as usize);
        let size = bits.read(24)? as usize + 1;
        let classes = bits.read(6)? as usize + 1;
        let book = index(bits, 8, books.len())?;
        let mut cascades = Vec::new();
        for _ in 0..classes {
            let low = bits.read(3)?;
            cascades.push(low | if bits.flag()? { bits.read(5)? << 3 } else { 0 });
        }
        let mut of_class = Vec::new();
        for cascade in &cascades {
            let mut of_pass = [None; PASSES];
            for (pass, of_pass) in of_pass.iter_mut().enumerate() {
                if cascade >> pass & 1 == 1 {
                    let book = index(bits, 8, books.len())?;
                    refuse!(books[book].values.is_empty(), None);
                    *of_pass = Some(book);
                }
            }
            of_class.push(of_pass);
        }
        let passes = ilog(cascades.into_iter().fold(0, |all, cascade| all | cascade)) as usize;
        let has_words = books[book].dimensions > 0;
        has_words.then_some(Self { kind, begin, end, size, classes, book, passes, books: of_class })
    }
}

impl Mapping {
    fn parse(bits: &mut Lsb, channels: u8, n_floors: usize, n_residues: usize) -> Option<Self> {
        refuse!(bits.read(16)? != 0, None);
        let channels = usize::from(channels);
        let n_submaps = if bits.flag()? { bits.read(4)? as usize + 1 } else { 1 };
        let mut couplings = Vec::new();
        if bits.flag()? {
            let width = ilog(channels as u32 - 1);
            for _ in 0..=bits.read(8)? {
                let pair = [index(bits, width, channels)?, index(bits, width, channels)?];
                refuse!(pair[0] == pair[1], None);
                couplings.push(pair);
            }
        }
        refuse!(bits.read(2)? != 0, None);
        let mut submaps = vec![0; channels];
        if n_submaps > 1 {
            for submap in &mut submaps {
                *submap = index(bits, 4, n_submaps)?;
            }
        }
        let (mut floors, mut residues) = (Vec::new(), Vec::new());
        for _ in 0..n_submaps {
            bits.read(8)?;
            floors.push(index(bits, 8, n_floors)?);
            residues.push(index(bits, 8, n_residues)?);
        }
        Some(Self { couplings, submaps, floors, residues })
    }
}

//! Vorbis I in OGG: pages and positions are read here, symphonia decodes the packets.
//!
//! A page's granule position is the sample after its last packet. A packet overlaps the one before, so decoding a crop
//! begins with the last packet of a page that ends at or before it: that packet only fills the overlap, and the samples of
//! the following packets begin exactly at the page's position. On every further page the count must agree with its position.
//!
//! The first audio page may hold more samples than its position: the surplus is dropped at the beginning (or at the end,
//! if that page is also the last). It may hold fewer where a stream was cut out of a longer one: positions then do not
//! begin at 0. libvorbis does the same in both cases.

use symphonia::core::audio::{Audio, AudioBuffer, GenericAudioBufferRef};
use symphonia::core::codecs::audio::well_known::CODEC_ID_VORBIS;
use symphonia::core::codecs::audio::{AudioCodecParameters, AudioDecoder, AudioDecoderOptions};
use symphonia::core::packet::PacketRef;
use symphonia::core::units::{Duration, Timestamp};
use symphonia::default::codecs::VorbisDecoder;

use super::bits::Lsb;
use super::ogg::{self, Packets};
use super::{corrupt, Error, Info};

/// Decoders that are kept: the recordings of one corpus share a few different headers.
const MAX_KEPT: usize = 4;
/// The most weights that the codebooks of one stream may expand to (a real encoder needs a hundredth).
const MAX_WEIGHTS: u64 = 1 << 22;

/// Packets that are decoded before the crop: a page, which has a position, holds up to 255.
const MAX_AHEAD: usize = 1024;

/// Samples that a packet holds, at most: half of the longest block.
const LONGEST: u64 = 4096;

/// Bytes of the identification header.
const IDENTIFICATION: usize = 30;

/// Decoders by their headers, the last used one at the end.
#[derive(Default)]
pub(super) struct Vorbis {
    kept: Vec<Prepared>,
    headers: Vec<u8>,
    pieces: Vec<u8>,
}

struct Prepared {
    /// Identification and setup header, which determine the rest.
    headers: Vec<u8>,
    setup: Setup,
    decoder: VorbisDecoder,
}

/// The part of the headers that positions depend on.
struct Setup {
    rate: u32,
    channels: u8,
    /// Sizes of the short and the long block.
    blocks: [u32; 2],
    /// For each mode, whether its block is long.
    long: Vec<bool>,
}

/// Where a stream's audio is.
struct Stream {
    serial: u32,
    /// First audio page.
    audio: usize,
    /// Position of the first decoded sample.
    origin: i64,
    /// Positions of the recording.
    begin: i64,
    end: i64,
}

impl Vorbis {
    pub fn info(&mut self, bytes: &[u8], serial: u32) -> Result<Info, Error> {
        let stream = self.open(bytes, serial)?;
        let setup = &self.prepared().setup;
        let frames = stream.end.saturating_sub(stream.begin).max(0) as u64;
        if !ogg::can_hold(bytes, stream.audio, serial, frames, LONGEST) {
            return corrupt("OGG Vorbis", "its last position lies beyond what its packets can hold");
        }
        Ok(Info { rate: setup.rate, channels: u16::from(setup.channels), frames, stated: 0 })
    }

    fn prepared(&mut self) -> &mut Prepared {
        self.kept.last_mut().expect("open succeeded")
    }

    /// Reads the headers, moves the decoder for them to the end of `kept`, and finds where the audio begins and ends.
    fn open(&mut self, bytes: &[u8], serial: u32) -> Result<Stream, Error> {
        self.headers.clear();
        let mut packets = Packets::new(bytes, 0, serial, &mut self.pieces);
        for kind in [1, 3, 5] {
            match packets.next()? {
                Some(packet) if packet.data.first() == Some(&kind) && packet.data.get(1..7) == Some(b"vorbis") => {
                    match kind {
                        1 => self.headers.extend(packet.data.iter().take(IDENTIFICATION)),
                        // The comments do not concern the audio.
                        3 => {}
                        _ => self.headers.extend_from_slice(packet.data),
                    }
                }
                _ => return corrupt("OGG Vorbis", "the headers are cut off or out of order"),
            }
        }
        if self.headers.get(IDENTIFICATION) != Some(&5) {
            return corrupt("OGG Vorbis", "the identification header is cut off");
        }
        let audio = packets.at();
        match self.kept.iter().position(|kept| kept.headers == self.headers) {
            Some(i) => self.kept[i..].rotate_left(1),
            None => {
                let prepared = prepare(&self.headers)?;
                if self.kept.len() == MAX_KEPT {
                    self.kept.remove(0);
                }
                self.kept.push(prepared);
            }
        }
        let setup = &self.kept.last().expect("just put there").setup;

        let Some(last) = ogg::last_page(bytes, audio, serial) else {
            return Err(Error::NoAudio { format: "OGG Vorbis" });
        };
        let end = last.granule.expect("last_page returns one with a position");
        // Count the samples up to the first page that has a position; the very first packet gives none.
        let mut packets = Packets::new(bytes, audio, serial, &mut self.pieces);
        let (mut samples, mut before) = (0i64, None);
        let (first, only) = loop {
            let Some(packet) = packets.next()? else {
                return Err(Error::NoAudio { format: "OGG Vorbis" });
            };
            if let Some(block) = setup.block(packet.data) {
                samples += before.map_or(0, |before| i64::from((before + block) / 4));
                before = Some(block);
            }
            if let Some(granule) = packet.granule {
                break (granule, packet.last_page);
            }
        };
        let origin = if only && samples > first { 0 } else { first.saturating_sub(samples) };
        Ok(Stream { serial, audio, origin, begin: origin.max(0), end })
    }

    pub fn read(
        &mut self,
        bytes: &[u8],
        serial: u32,
        start: u64,
        channel: Option<u16>,
        out: &mut [f32],
    ) -> Result<(), Error> {
        let stream = self.open(bytes, serial)?;
        let Prepared { setup, decoder, .. } = self.kept.last_mut().expect("open succeeded");
        let begin = stream.begin.saturating_add_unsigned(start);
        let end = begin.saturating_add_unsigned(out.len() as u64);
        if end > stream.end {
            return corrupt("OGG Vorbis", "the pages end before the stated length");
        }
        let (at, seek) = match ogg::seek(bytes, stream.audio, stream.serial, begin) {
            Some(page) => (page.at, page.granule),
            None => (stream.audio, None),
        };
        let mut packets = Packets::new(bytes, at, stream.serial, &mut self.pieces);
        decoder.reset();
        // Position of the next sample; None until the first packet, which only fills the overlap, is decoded.
        let mut position = None;
        let mut seeking = seek.is_some();
        let (mut done, mut ahead) = (0, 0);
        while done < out.len() {
            if done == 0 && ahead > MAX_AHEAD {
                return corrupt("OGG Vorbis", "there is no position near the crop");
            }
            ahead += 1;
            let Some(packet) = packets.next()? else {
                return corrupt("OGG Vorbis", "the pages end before the stated length");
            };
            if seeking && packet.granule.is_none() {
                continue;
            }
            seeking = false;
            // Like libvorbis, ignore packets that are not audio.
            if setup.block(packet.data).is_some() {
                let samples = decode(decoder, packet.data)?;
                position = match position {
                    None => Some(seek.unwrap_or(stream.origin)),
                    Some(position) => {
                        let n = samples.frames() as i64;
                        let skip = (begin + done as i64 - position).max(0);
                        if skip < n {
                            let n = (n - skip).min((out.len() - done) as i64) as usize;
                            super::mix(samples, skip as usize, channel, &mut out[done..done + n]);
                            done += n;
                        }
                        Some(position + n)
                    }
                };
            }
            if let (Some(granule), Some(position)) = (packet.granule, position) {
                // Only the last page may end before its last packet does.
                let cut = position > granule && granule == stream.end;
                if position != granule && !cut {
                    return corrupt("OGG Vorbis", "a page's position does not agree with its packets");
                }
            }
        }
        Ok(())
    }
}

fn decode<'a>(decoder: &'a mut VorbisDecoder, data: &[u8]) -> Result<&'a AudioBuffer<f32>, Error> {
    let packet = PacketRef::new(0, Timestamp::ZERO, Duration::ZERO, data);
    // A panic would be a bug of symphonia, met on damaged bytes.
    let decoded = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| decoder.decode_ref(&packet).is_ok()));
    match (decoded, decoder.last_decoded()) {
        (Ok(true), GenericAudioBufferRef::F32(buffer)) => Ok(buffer),
        _ => corrupt("OGG Vorbis", "a packet cannot be decoded"),
    }
}

fn prepare(headers: &[u8]) -> Result<Prepared, Error> {
    let mut couplings = Vec::new();
    let Some(setup) = Setup::parse(headers, &mut couplings) else {
        return corrupt("OGG Vorbis", "the headers are not valid");
    };
    // symphonia 0.6.1 undoes the channel couplings from the first to the last, but the specification (4.3.5) requires the
    // opposite order. Where there are several, as in 5.1, symphonia therefore gets them reversed.
    let mut reversed: Box<[u8]> = headers.into();
    for coupling in &couplings {
        coupling.reverse(headers, &mut reversed);
    }
    let mut parameters = AudioCodecParameters::new();
    parameters.for_codec(CODEC_ID_VORBIS).with_extra_data(reversed);
    let options = AudioDecoderOptions::default().gapless(false);
    let make = || VorbisDecoder::try_new(&parameters, &options);
    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(make)) {
        Ok(Ok(decoder)) => Ok(Prepared { headers: headers.to_vec(), setup, decoder }),
        _ => corrupt("OGG Vorbis", "the headers are not valid"),
    }
}

/// Bits needed for numbers up to `x`.
fn ilog(x: u32) -> u32 {
    32 - x.leading_zeros()
}

/// Where the coupling steps of one mapping lie in the setup header, counted from its 8th byte.
struct Coupling {
    /// First bit.
    at: usize,
    steps: usize,
    /// Bits of one step.
    width: usize,
}

impl Coupling {
    fn reverse(&self, from: &[u8], to: &mut [u8]) {
        let first = (IDENTIFICATION + 7) * 8 + self.at;
        for step in 0..self.steps {
            for bit in 0..self.width {
                let source = first + step * self.width + bit;
                let target = first + (self.steps - 1 - step) * self.width + bit;
                let value = from[source / 8] >> (source % 8) & 1;
                to[target / 8] = to[target / 8] & !(1 << (target % 8)) | value << (target % 8);
            }
        }
    }
}

impl Setup {
    /// Reads the identification and the setup header (Vorbis I specification, 4.2.2 and 4.2.4) up to the modes,
    /// without building any table. None when they are invalid, or would expand to more than `MAX_WEIGHTS`.
    fn parse(headers: &[u8], couplings: &mut Vec<Coupling>) -> Option<Self> {
        let (ident, setup) = headers.split_at_checked(IDENTIFICATION)?;
        let channels = ident[11];
        let rate = u32::from_le_bytes(ident[12..16].try_into().ok()?);
        let (short, long) = (ident[28] & 15, ident[28] >> 4);
        if channels == 0 || !(6..=13).contains(&short) || !(short..=13).contains(&long) {
            return None;
        }
        let mut bits = Lsb::new(setup.get(7..)?);
        let mut weights = 0;
        for _ in 0..=bits.read(8)? {
            weights += codebook(&mut bits)?;
            if weights > MAX_WEIGHTS {
                return None;
            }
        }
        for _ in 0..=bits.read(6)? {
            bits.read(16)?;
        }
        for _ in 0..=bits.read(6)? {
            floor(&mut bits)?;
        }
        for _ in 0..=bits.read(6)? {
            residue(&mut bits)?;
        }
        for _ in 0..=bits.read(6)? {
            couplings.extend(mapping(&mut bits, u32::from(channels))?);
        }
        let mut modes = Vec::new();
        for _ in 0..=bits.read(6)? {
            modes.push(bits.flag()?);
            bits.skip(16 + 16 + 8)?;
        }
        bits.flag()?.then_some(Self { rate, channels, blocks: [1 << short, 1 << long], long: modes })
    }

    /// The block size of an audio packet; None for any other packet.
    fn block(&self, packet: &[u8]) -> Option<u32> {
        let mut bits = Lsb::new(packet);
        if bits.flag()? {
            return None;
        }
        let mode = bits.read(ilog(self.long.len() as u32 - 1))?;
        Some(self.blocks[usize::from(*self.long.get(mode as usize)?)])
    }
}

/// Reads a codebook, and returns the number of weights that it expands to.
fn codebook(bits: &mut Lsb) -> Option<u64> {
    if bits.read(24)? != 0x56_4342 {
        return None;
    }
    let (dimensions, entries) = (bits.read(16)?, bits.read(24)?);
    if bits.flag()? {
        // Lengths in ascending order: how many entries have each.
        bits.read(5)?;
        let mut entry = 0;
        while entry < entries {
            entry += bits.read(ilog(entries - entry))?;
        }
        if entry > entries {
            return None;
        }
    } else if bits.flag()? {
        for _ in 0..entries {
            if bits.flag()? {
                bits.read(5)?;
            }
        }
    } else {
        bits.skip(5 * u64::from(entries))?;
    }
    let all = u64::from(entries) * u64::from(dimensions);
    let values = match bits.read(4)? {
        0 => return Some(u64::from(entries)),
        1 => lattice(entries, dimensions)?,
        2 => all,
        _ => return None,
    };
    bits.skip(64)?;
    let width = bits.read(4)? + 1;
    bits.flag()?;
    bits.skip(values.checked_mul(u64::from(width))?)?;
    Some(all)
}

/// The largest n with n^dimensions <= entries.
fn lattice(entries: u32, dimensions: u32) -> Option<u64> {
    if dimensions == 0 {
        return None;
    }
    let fits = |n: u64| {
        let mut power = 1u64;
        for _ in 0..dimensions {
            power *= n;
            if power > u64::from(entries) {
                return false;
            }
            if n < 2 {
                break;
            }
        }
        true
    };
    let mut n = f64::from(entries).powf(1.0 / f64::from(dimensions)) as u64;
    while fits(n + 1) {
        n += 1;
    }
    while n > 0 && !fits(n) {
        n -= 1;
    }
    Some(n)
}

fn floor(bits: &mut Lsb) -> Option<()> {
    match bits.read(16)? {
        0 => {
            bits.skip(8 + 16 + 16 + 6 + 8)?;
            let books = bits.read(4)? + 1;
            bits.skip(u64::from(books) * 8)
        }
        1 => {
            let partitions = bits.read(5)?;
            let mut classes = [0usize; 31];
            for class in &mut classes[..partitions as usize] {
                *class = bits.read(4)? as usize;
            }
            let classes = &classes[..partitions as usize];
            let mut dimensions = [0u64; 16];
            let n_classes = classes.iter().max().map_or(0, |most| most + 1);
            for dimensions in &mut dimensions[..n_classes] {
                *dimensions = u64::from(bits.read(3)?) + 1;
                let subclasses = bits.read(2)?;
                if subclasses > 0 {
                    bits.read(8)?;
                }
                bits.skip(8 << subclasses)?;
            }
            bits.read(2)?;
            let width = u64::from(bits.read(4)?);
            bits.skip(width * classes.iter().map(|&class| dimensions[class]).sum::<u64>())
        }
        _ => None,
    }
}

fn residue(bits: &mut Lsb) -> Option<()> {
    if bits.read(16)? > 2 {
        return None;
    }
    bits.skip(24 + 24 + 24)?;
    let classes = bits.read(6)? + 1;
    bits.read(8)?;
    let mut books = 0;
    for _ in 0..classes {
        let low = bits.read(3)?;
        let high = if bits.flag()? { bits.read(5)? } else { 0 };
        books += u64::from(low.count_ones() + high.count_ones());
    }
    bits.skip(8 * books)
}

fn mapping(bits: &mut Lsb, channels: u32) -> Option<Option<Coupling>> {
    if bits.read(16)? != 0 {
        return None;
    }
    let submaps = if bits.flag()? { bits.read(4)? + 1 } else { 1 };
    let mut coupling = None;
    if bits.flag()? {
        let (steps, width) = (bits.read(8)? as usize + 1, 2 * ilog(channels - 1) as usize);
        coupling = Some(Coupling { at: bits.position(), steps, width });
        bits.skip((steps * width) as u64)?;
    }
    if bits.read(2)? != 0 {
        return None;
    }
    if submaps > 1 {
        bits.skip(4 * u64::from(channels))?;
    }
    bits.skip(24 * u64::from(submaps))?;
    Some(coupling)
}

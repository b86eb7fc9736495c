//! Vorbis I in OGG: its pages and positions. `setup` reads the headers, `packet` the lines of a block, and `mdct` turns
//! them into samples.
//!
//! A page's granule position is the sample after its last packet. A packet overlaps the one before, so decoding a crop
//! begins with the last packet of a page that ends at or before it. That packet only fills the overlap. The samples of
//! the following packets begin exactly at the page's position. On every further page the count must agree with its
//! position.
//!
//! The first audio page may hold more samples than its position: the surplus is dropped at the beginning (or at the
//! end, if that page is also the last). It may hold fewer if a stream was cut out of a longer one: positions then do
//! not begin at 0. libvorbis does the same in both cases.

mod book;
mod mdct;
mod packet;
mod setup;

use setup::{Setup, IDENTIFICATION};

use super::ogg::{self, Packets};
use super::{corrupt, Error, Info};

const NAME: &str = "OGG Vorbis";
/// Headers that are cached: the recordings of one corpus share a few different headers.
const MAX_CACHED: usize = 4;
/// Packets that are decoded before the crop: a page, which has a position, holds up to 255.
const MAX_PRE_ROLL: usize = 1024;

/// Samples that a packet holds, at most: half of the longest block.
const MAX_PACKET_SAMPLES: u64 = 4096;

/// Headers, the last used ones at the end, and the decoder's memory.
#[derive(Default)]
pub(super) struct Vorbis {
    cached: Vec<Prepared>,
    headers: Vec<u8>,
    pieces: Vec<u8>,
    packet: packet::Work,
    mdct: Box<mdct::Work>,
}

struct Prepared {
    headers: Vec<u8>, // identification and setup header, which determine the rest
    setup: Setup,
}

/// The place of a stream's audio.
struct Stream {
    serial: u32,
    audio: usize, // first audio page
    origin: i64,  // position of the first decoded sample
    begin: i64,   // positions of the recording
    end: i64,
}

impl Vorbis {
    pub fn info(&mut self, bytes: &[u8], serial: u32) -> Result<Info, Error> {
        let stream = self.open(bytes, serial)?;
        let setup = &self.cached.last().expect("open succeeded").setup;
        let frames = stream.end.saturating_sub(stream.begin).max(0) as u64;
        if !ogg::can_hold(bytes, stream.audio, serial, frames, MAX_PACKET_SAMPLES) {
            return corrupt(NAME, "its last position lies beyond the samples of its packets");
        }
        Ok(Info { rate: setup.rate, channels: u16::from(setup.channels), frames, stated: 0 })
    }

    /// Reads the headers, moves their setup to the end of `cached`, and finds the start and the end of the audio.
    fn open(&mut self, bytes: &[u8], serial: u32) -> Result<Stream, Error> {
        self.headers.clear();
        let mut packets = Packets::new(bytes, 0, serial, &mut self.pieces);
        for kind in [1, 3, 5] {
            match packets.next()? {
                Some(packet)
                    if packet.data.first() == Some(&kind)
                        && packet.data.get(1..7) == Some(b"vorbis") =>
                {
                    match kind {
                        1 => self.headers.extend(packet.data.iter().take(IDENTIFICATION)),
                        // The comments do not concern the audio.
                        3 => {}
                        _ => self.headers.extend_from_slice(packet.data),
                    }
                }
                _ => return corrupt(NAME, "the headers are cut off or out of order"),
            }
        }
        refuse!(
            self.headers.get(IDENTIFICATION) != Some(&5),
            corrupt(NAME, "the identification header is cut off")
        );
        let audio = packets.at();
        match self.cached.iter().position(|cached| cached.headers == self.headers) {
            Some(i) => self.cached[i..].rotate_left(1),
            None => {
                let setup = Setup::parse(&self.headers)?;
                if self.cached.len() == MAX_CACHED {
                    self.cached.remove(0);
                }
                self.cached.push(Prepared { headers: self.headers.clone(), setup });
            }
        }
        let setup = &self.cached.last().expect("just put there").setup;

        let Some(last) = ogg::last_page(bytes, audio, serial) else {
            return Err(Error::NoAudio { format: NAME });
        };
        let end = last.granule.expect("last_page returns one with a position");
        // Count the samples up to the first page that has a position; the very first packet gives none.
        let mut packets = Packets::new(bytes, audio, serial, &mut self.pieces);
        let (mut samples, mut before) = (0i64, None);
        let (first, only) = loop {
            let Some(packet) = packets.next()? else { return Err(Error::NoAudio { format: NAME }) };
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
        &mut self, bytes: &[u8], serial: u32, start: u64, channel: Option<u16>, out: &mut [f32],
    ) -> Result<(), Error> {
        let stream = self.open(bytes, serial)?;
        let Self { cached, pieces, packet: work, mdct, .. } = self;
        let setup = &cached.last().expect("open succeeded").setup;
        let begin = stream.begin.saturating_add_unsigned(start);
        let end = begin.saturating_add_unsigned(out.len() as u64);
        refuse!(end > stream.end, corrupt(NAME, "the pages end before the stated length"));
        let (at, seek) = match ogg::seek(bytes, stream.audio, stream.serial, begin) {
            Some(page) => (page.at, page.granule),
            None => (stream.audio, None),
        };
        let mut packets = Packets::new(bytes, at, stream.serial, pieces);
        // Position of the next sample and size of the last block; None until the first packet, which only fills the
        // overlap.
        let mut position: Option<(i64, u32)> = None;
        let mut seeking = seek.is_some();
        let (mut done, mut pre_roll) = (0, 0);
        while done < out.len() {
            refuse!(
                done == 0 && pre_roll > MAX_PRE_ROLL,
                corrupt(NAME, "there is no position near the crop")
            );
            pre_roll += 1;
            let Some(packet) = packets.next()? else {
                return corrupt(NAME, "the pages end before the stated length");
            };
            if seeking && packet.granule.is_none() {
                continue;
            }
            seeking = false;
            // Like libvorbis, ignore packets that are not audio.
            if let Some(block) = setup.block(packet.data) {
                let (from, to) = match position {
                    None => (seek.unwrap_or(stream.origin), seek.unwrap_or(stream.origin)),
                    Some((from, before)) => {
                        (from, from.saturating_add(i64::from((before + block) / 4)))
                    }
                };
                // A packet needs no other than the one before: those that end too early are not decoded.
                if to.saturating_add(i64::from((block + setup.blocks[1]) / 4)) > begin {
                    let table = mdct::table(block as usize / 2);
                    if packet::decode(setup, work, packet.data, channel, &mut mdct.lines).is_none()
                    {
                        return corrupt(NAME, "a packet cannot be decoded");
                    }
                    mdct.transform(table);
                    let skip = (begin + done as i64).saturating_sub(from).max(0);
                    if let Some((_, before)) = position.filter(|_| skip < to.saturating_sub(from)) {
                        let n = mdct::overlap(mdct, mdct::table(before as usize / 2), table);
                        let n = (n - skip as usize).min(out.len() - done);
                        out[done..done + n].copy_from_slice(&mdct.samples[skip as usize..][..n]);
                        done += n;
                    }
                }
                position = Some((to, block));
            }
            if let (Some(granule), Some((position, _))) = (packet.granule, position) {
                // Only the last page may end before its last packet does.
                let cut = position > granule && granule == stream.end;
                if position != granule && !cut {
                    return corrupt(NAME, "a page's position does not agree with its packets");
                }
            }
        }
        Ok(())
    }
}

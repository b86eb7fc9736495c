//! MPEG audio layer III: the frames that a crop needs. `layer3` decodes them, `index` finds them.
//!
//! A frame's spectrum may begin in the bytes of frames before it (the bit reservoir, up to 511 bytes), and its samples
//! overlap with those of the two granules before it. Decoding a crop therefore begins that much earlier, and these
//! samples are discarded.
//!
//! Gapless: a LAME tag in the first (Xing or Info) frame states the encoder's delay and padding. As in libmpg123, the
//! recording is then samples \[delay + 529, frames * samples per frame - padding + 529): the decoder's own delay is
//! 529. Without the tag nothing is trimmed.

mod header;
mod huffman;
mod hybrid;
mod index;
mod layer3;
pub(super) mod layers;
mod seek_table;
mod side;
mod standard;
mod tag;

use super::{corrupt, Error, Info};
use header::Header;
pub(super) use index::key;
use index::Index;
use layer3::{Layer3, RESERVOIR};

/// Granules before the crop whose spectra must be right, for the overlap of the transform and of the filter bank.
const OVERLAP: usize = 2;

/// The start of the first frame, if the bytes are a stream of layer III.
pub(super) fn start(bytes: &[u8]) -> Option<usize> {
    index::first_frame(bytes).map(|(at, _)| at)
}

/// The decoder, and an index of the recording that was read last.
#[derive(Default)]
pub(super) struct Mp3 {
    index: Index,
    decoder: Layer3,
    samples: Vec<f32>,
}

impl Mp3 {
    pub fn info(&mut self, bytes: &[u8]) -> Result<Info, Error> {
        let first = self.index.build(bytes)?;
        if let Some((frames, rate)) = self.index.changed {
            let seconds = (frames * first.samples()) as f64 / f64::from(first.rate);
            let what =
                super::chain::changes((first.rate, 0), (rate, 0), seconds).unwrap_or_default();
            return Err(Error::Unsupported { format: "MP3", what });
        }
        let frames = self.index.end - self.index.begin;
        Ok(Info {
            rate: first.rate,
            channels: u16::from(first.channels),
            frames,
            stated: self.index.stated,
        })
    }

    pub fn read(
        &mut self, bytes: &[u8], start: u64, channel: Option<u16>, out: &mut [f32],
    ) -> Result<(), Error> {
        if !self.index.is_of(bytes) {
            self.index.build(bytes)?;
        }
        let Some(header) = self.index.first else { return corrupt("MP3", "there is no frame") };
        let per_frame = header.samples();
        let first = self.index.begin + start;
        let target = (first / per_frame as u64) as usize;
        let frames = self.index.n;
        if target >= frames || first + out.len() as u64 > self.index.end {
            return corrupt("MP3", "the frames end before the stated length");
        }
        let granules = per_frame / 576;
        let decoded = target.saturating_sub(OVERLAP.div_ceil(granules));
        // Begin early enough to fill the reservoir of the first frame whose spectrum must be right.
        let mut begin = decoded;
        let mut reservoir = 0;
        while begin > 0 && reservoir < RESERVOIR {
            begin -= 1;
            reservoir += self
                .frame(bytes, begin)
                .map_or(0, |(data, h)| data.len().saturating_sub(h.before_data()));
        }
        self.decoder.reset(channel);
        self.samples.resize(per_frame, 0.0);
        let mut done = 0;
        let mut skip = (first % per_frame as u64) as usize;
        for frame in begin..frames {
            let data = self.frame(bytes, frame);
            // A damaged frame is silent, and so are the last frames of a recording that lost a few.
            if data.is_none() && self.index.lacks_frames() {
                break;
            }
            let (data, header) = data.unwrap_or((&[], header));
            if frame < decoded {
                self.decoder.skip(data, header);
                continue;
            }
            self.decoder.decode(data, header, &mut self.samples);
            if frame >= target {
                let n = (per_frame - skip).min(out.len() - done);
                out[done..done + n].copy_from_slice(&self.samples[skip..skip + n]);
                done += n;
                skip = 0;
            }
            if done == out.len() {
                return Ok(());
            }
        }
        corrupt("MP3", "the frames end before the stated length")
    }

    /// The bytes of frame number `frame`, and its header.
    fn frame<'a>(&mut self, bytes: &'a [u8], frame: usize) -> Option<(&'a [u8], Header)> {
        let at = self.index.frame(bytes, frame)?;
        // If the index is of other bytes that were at this address before, this may not be a frame of the same stream.
        let header = Header::parse(bytes.get(at..)?)
            .filter(|h| Some(h.samples()) == self.index.first.map(Header::samples))?;
        Some((bytes.get(at..at + header.size)?, header))
    }
}

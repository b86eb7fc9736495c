//! A recording to a prepared one: mono, at the front end's rate, 16 bits, in blocks that are decoded quickly
//! (`jaxtrain_decode::FlacWriter`).
//!
//! Chunks begin at samples at which the recording and the prepared recording coincide. The result is therefore that of
//! a resampler that is given the whole recording.

use jaxtrain_decode::refuse;
use std::io::{self, Write};

use jaxtrain_decode::{Decoder, FlacWriter, Origin, RATES};

use crate::pipeline::int16;
use crate::resample::Resampler;

/// Samples of a chunk, about.
const CHUNK: u64 = 1 << 18;
/// The same of a recording whose parts symphonia finds only from its start.
const SLOW_CHUNK: u64 = 1 << 26;

/// The settings of prepared recordings.
#[derive(Clone, Copy)]
pub struct Options {
    pub rate: u32,            // Hz
    pub time_expansion: f64,  // times slower than life that recordings are
    pub channel: Option<u16>, // None: the mean of all
    pub packed: bool,         // losslessly, instead of samples as they are
}

/// The reason why a recording was not prepared.
#[derive(Debug)]
pub enum Failed {
    Unusable(String), // the recording
    Io(io::Error),    // of the output
    Stopped,
}

impl From<io::Error> for Failed {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl From<jaxtrain_decode::Error> for Failed {
    fn from(error: jaxtrain_decode::Error) -> Self {
        Self::Unusable(error.to_string())
    }
}

/// Writes a recording as a prepared one. Returns `out`, and how many samples were clipped.
/// Errors: See `Failed`. `out` may then hold a part.
pub fn prepare<W: Write>(
    bytes: &[u8], options: Options, out: W, stop: &mut dyn FnMut() -> bool,
) -> Result<(W, u64), Failed> {
    let mut decoder = Decoder::default();
    let info = decoder.info(bytes)?;
    decoder.check(bytes, &info)?;
    if decoder.origin().is_some() {
        return Err(Failed::Unusable(
            "it is a prepared recording; prepare the one that it was made from".into(),
        ));
    }
    let rate = (f64::from(info.rate) * options.time_expansion).round() as u32;
    refuse!(!RATES.contains(&rate), Err(jaxtrain_decode::Error::Rate(rate).into()));
    let mut resampler = Resampler::new(rate, options.rate);
    let (up, down) = resampler.ratio();
    let frames = resampler.output_len(info.frames as usize) as u64;
    let origin = Origin { stated: info.rate, rate, frames: info.frames };
    let mut writer = FlacWriter::new(out, options.rate, frames, origin, options.packed)?;
    let chunk = up * (if decoder.is_slow() { SLOW_CHUNK } else { CHUNK }).div_ceil(up);
    let context = resampler.context() as u64;
    let (mut samples, mut wave, mut narrow) = (Vec::new(), Vec::new(), Vec::new());
    let mut clipped = 0;
    for from in (0..frames).step_by(chunk as usize) {
        refuse!(stop(), Err(Failed::Stopped));
        let n = chunk.min(frames - from);
        let start = from / up * down;
        let end = (start + (n * down).div_ceil(up) + context + 1).min(info.frames);
        let first = start.saturating_sub(context);
        samples.resize((end - first) as usize, 0.0);
        decoder.read(bytes, &info, first, options.channel, &mut samples)?;
        wave.resize(n as usize, 0.0);
        resampler.process(&samples, (start - first) as usize, &mut wave);
        clipped += wave.iter().filter(|x| x.abs() > 1.0).count() as u64;
        narrow.clear();
        narrow.extend(wave.iter().map(|x| int16(*x)));
        writer.write(&narrow)?;
    }
    Ok((writer.finish()?, clipped))
}

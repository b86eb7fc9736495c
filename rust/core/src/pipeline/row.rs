//! One recording to the crops of a row, as spectrograms or samples.

use jaxtrain_decode::refuse;
use std::ops::Range;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::Instant;

use super::crop::{Bounds, Clip, Crop, Short};
use super::diagnostics::{DECODE, FBANK, READ, RESAMPLE, SEEK};
use super::queue::Slot;
use super::{panics, Form, Shared};
use crate::fbank::{Fbank, FilterBank};
use crate::order::crop_start;
use crate::resample::{Resampler, Resamplers};
use crate::source::{Part, Reader};
use jaxtrain_decode::{Decoder, Error, Info, Origin, FLAC_BLOCK};

/// Samples beyond this would overflow the power spectrum's float32.
pub const PEAK: f32 = 1e12;

/// One worker's decoders and buffers. No two workers share any of it, so nothing is locked while a row is written.
pub(super) struct Scratch {
    decoder: Decoder,
    resamplers: Resamplers,
    fbank: Fbank,
    reader: Reader,
    crops: Vec<Crop>,
    samples: Vec<f32>, // at the recording's rate
    wave: Vec<f32>,    // at the pipeline's rate
}

impl Scratch {
    pub fn new(bank: &Arc<FilterBank>) -> Self {
        Self {
            decoder: Decoder::default(),
            resamplers: Resamplers::default(),
            fbank: Fbank::new(bank.clone()),
            reader: Reader::default(),
            crops: Vec::new(),
            samples: Vec::new(),
            wave: Vec::new(),
        }
    }
}

/// The reason why a row was not written.
pub(super) enum Miss {
    Cancelled,
    Unusable(String),
    Lost(String), // by a copy that failed: not the recording's fault
}

/// The place of one recording's crops.
pub(super) struct Out<'a> {
    pub wide: &'a mut [f32],
    pub narrow: &'a mut [i16], // of rows that hold samples, otherwise empty
    pub is_narrow: bool,       // whether they were written there directly, not to `wide`
}

/// Writes the crops of one recording. A panic makes the recording unusable.
pub(super) fn load(
    shared: &Shared, scratch: &mut Scratch, slot: &Slot, row: u32, epoch: u64, out: &mut Out,
) -> Result<(), Miss> {
    let loaded = catch_unwind(AssertUnwindSafe(|| {
        try_load(shared, scratch, slot, row as usize, epoch, out)
    }));
    loaded.unwrap_or_else(|panic| {
        *scratch = Scratch::new(&shared.config.bank); // its contents may be in any state
        let reason = format!("panic: {}", panics::message(panic.as_ref()));
        Err(Miss::Unusable(shared.index.bad_recording(row as usize, &reason).to_string()))
    })
}

fn try_load(
    shared: &Shared, scratch: &mut Scratch, slot: &Slot, row: usize, epoch: u64, out: &mut Out,
) -> Result<(), Miss> {
    let Shared { config, counters, index, .. } = shared;
    let Scratch { decoder, resamplers, fbank, reader, crops, samples, wave } = scratch;
    let unusable = |reason: String| Miss::Unusable(index.bad_recording(row, &reason).to_string());
    let check_cancelled = || if slot.is_cancelled() { Err(Miss::Cancelled) } else { Ok(()) };
    check_cancelled()?;

    // 1. Find the recording.
    let begin = Instant::now();
    match index.wait(row, &|| slot.is_cancelled()) {
        Ok(true) => {}
        Ok(false) => return Err(Miss::Cancelled),
        Err(error) => return Err(Miss::Lost(error.to_string())),
    }
    let bytes = index.encoded(row, reader).map_err(|e| Miss::Unusable(e.to_string()))?;
    counters.time(READ, begin);

    // 2. Its headers give rate and length, and so the crops.
    let begin = Instant::now();
    let info = decoder.info(bytes).map_err(|e| unusable(e.to_string()))?;
    refuse!(info.frames == 0 || info.channels == 0, Err(unusable("holds no samples".into())));
    if decoder.is_slow() {
        counters.slow_rows.fetch_add(1, Ordering::Relaxed);
    }
    let target = config.sample_rate();
    let origin = decoder.origin();
    // A prepared recording's crops are those that would be drawn of the recording that it was made from.
    let drawn =
        origin.map_or(info, |origin| Info { rate: origin.stated, frames: origin.frames, ..info });
    let (bounds, channel) = match index.part(row) {
        None => (Bounds::whole(drawn.frames), config.channel),
        Some(part) => (within(part, &drawn).map_err(unusable)?, part.channel.or(config.channel)),
    };
    let mut rate = config.real_rate(drawn.rate).map_err(unusable)?;
    draw_crops(shared, rate, bounds, row, epoch, crops);
    let channel = channel.filter(|_| origin.is_none());
    if let Some(origin) = origin {
        check_prepared(&origin, &info, rate, target).map_err(unusable)?;
        crops.iter_mut().for_each(|crop| *crop = crop.prepared(rate, target, info.frames));
        rate = target;
    }
    counters.time(SEEK, begin);

    // 3. Views that overlap are decoded once, together with the samples between them.
    let begin = Instant::now();
    let same_rate = rate == target;
    let context = if same_rate { 0 } else { resamplers.get(rate, target).context() as u64 };
    let span = |crop: &Crop| crop.span(context);
    let fault = |decoder: &mut Decoder, error: Error, (from, to): (u64, u64)| match error {
        Error::Corrupt { what, .. } if origin.is_some() => {
            unusable(damage(decoder, bytes, &info, from..to, what))
        }
        _ => unusable(error.to_string()),
    };
    let read = |decoder: &mut Decoder, span: (u64, u64), out: &mut [f32]| {
        decoder
            .read(bytes, &info, span.0, channel, out)
            .map_err(|error| fault(decoder, error, span))
    };
    let low = crops.iter().map(|crop| span(crop).0).min().unwrap_or(0);
    let high = crops.iter().map(|crop| span(crop).1).max().unwrap_or(0);
    let apart: u64 = crops.iter().map(|crop| span(crop).1 - span(crop).0).sum();
    let together = config.views > 1 && high - low <= apart;
    if together {
        samples.resize((high - low) as usize, 0.0);
        read(decoder, (low, high), samples)?;
    }
    counters.time(DECODE, begin);

    if same_rate && config.form == Form::Waveform && !together {
        let begin = Instant::now();
        out.is_narrow = true;
        for (crop, view) in crops.iter().zip(out.narrow.chunks_exact_mut(shared.view_values)) {
            let clip = &mut view[crop.offset..][..crop.out];
            let read = decoder.read_16(bytes, &info, crop.start, clip);
            out.is_narrow &= read.map_err(|error| fault(decoder, error, span(crop)))?;
            crop.surround(config.clip.repeat, view);
            check_cancelled()?;
        }
        counters.time(DECODE, begin);
        if out.is_narrow {
            return Ok(());
        }
    }

    wave.resize(config.clip_samples, 0.0);
    for (crop, out) in crops.iter().zip(out.wide.chunks_exact_mut(shared.view_values)) {
        check_cancelled()?;

        // 4. Decode the view, straight into its place if the rate already matches.
        let begin = Instant::now();
        let (first, last) = span(crop);
        let clip = &mut wave[crop.offset..][..crop.out];
        if !together && same_rate {
            read(decoder, (first, last), clip)?;
        } else if !together {
            samples.resize((last - first) as usize, 0.0);
            read(decoder, (first, last), samples)?;
        }
        counters.time(DECODE, begin);
        check_cancelled()?;

        // 5. Resample it.
        let begin = Instant::now();
        let part = if together {
            &samples[(first - low) as usize..(last - low) as usize]
        } else {
            samples.as_slice()
        };
        if !same_rate {
            let lead = (crop.start - first) as usize;
            resamplers.get(rate, target).process(part, lead, clip);
        } else if together {
            clip.copy_from_slice(part);
        }
        // The filter bank's logarithm would turn a NaN into silence.
        if !clip.iter().fold(true, |fine, x| fine & (x.abs() <= PEAK)) {
            return Err(unusable("has samples that are NaN or too large".into()));
        }
        crop.surround(config.clip.repeat, wave);
        counters.time(RESAMPLE, begin);
        check_cancelled()?;

        // 6. Its spectrogram, unless the row holds samples.
        if config.form == Form::Waveform {
            out.copy_from_slice(wave);
            continue;
        }
        let begin = Instant::now();
        fbank.normalised(wave, config.n_frames, out);
        counters.time(FBANK, begin);
    }
    Ok(())
}

/// Checks that a recording was prepared for this front end.
fn check_prepared(origin: &Origin, info: &Info, rate: u32, target: u32) -> Result<(), String> {
    if info.rate != target || origin.rate != rate {
        return Err(format!(
            "was prepared at {} Hz from one of {} Hz, and the front end takes {target} Hz of one of {rate} Hz; run jaxtrain \
             prepare again",
            info.rate, origin.rate
        ));
    }
    let expected = (2 * u128::from(origin.frames) * u128::from(target) + u128::from(rate))
        / (2 * u128::from(rate));
    if u128::from(info.frames) != expected {
        return Err(format!(
            "was prepared, and holds {} of {expected} samples; run jaxtrain prepare again",
            info.frames
        ));
    }
    Ok(())
}

/// The reason why a range of a prepared recording cannot be read, with its first damaged block.
fn damage(
    decoder: &mut Decoder, bytes: &[u8], info: &Info, range: Range<u64>, what: &str,
) -> String {
    let mut samples = [0.0; FLAC_BLOCK];
    let block = FLAC_BLOCK as u64;
    let mut damaged = (range.start / block..range.end.div_ceil(block)).filter(|k| {
        let n = block.min(info.frames.saturating_sub(k * block)) as usize;
        decoder.read(bytes, info, k * block, None, &mut samples[..n]).is_err()
    });
    let place = damaged.next().map_or(String::new(), |k| {
        format!(
            " in block {k}, which is samples {} to {}",
            k * block,
            (k * block + block).min(info.frames) - 1
        )
    });
    format!(
        "was prepared, and {what}{place}; delete the file, and run the same jaxtrain prepare again"
    )
}

/// The samples of a part. Its times are those of the file, and may end a little after it, since its length was rounded.
fn within(part: Part, info: &Info) -> Result<Bounds, String> {
    let (rate, frames) = (f64::from(info.rate), info.frames);
    let sample = |time: f64| (time * rate).round().clamp(0.0, frames as f64) as u64;
    let (from, to) = (sample(part.start), sample(part.end));
    if from >= to || part.start.is_nan() || part.end.is_nan() {
        let seconds = frames as f64 / rate;
        return Err(format!(
            "is the part [{}, {}) s of a recording of {seconds:.3} s, which holds no sample",
            part.start, part.end
        ));
    }
    Ok(Bounds { from, to, frames })
}

/// The crops of the views of a recording at `rate` Hz: each drawn independently in training, otherwise spread evenly.
fn draw_crops(
    shared: &Shared, rate: u32, bounds: Bounds, row: usize, epoch: u64, crops: &mut Vec<Crop>,
) {
    let config = &shared.config;
    let views = config.views as u64;
    let pick = |view: u64, surplus: u64| match config.train {
        true => crop_start(config.seed, epoch, row as u64, view, surplus + 1),
        false => (u128::from(surplus) * u128::from(2 * view + 1) / u128::from(2 * views)) as u64,
    };
    let crop = |view| {
        let (target, clip) = (config.sample_rate(), config.clip_samples);
        Crop::new(bounds, rate, target, clip, config.clip, config.train, |n| pick(view, n))
    };
    crops.clear();
    crops.extend((0..views).map(crop));
}

/// Writes the row that a test split of one view would hold of this mono recording into `out` \[n_frames, n_mels\]: its
/// centre at the filter bank's rate, or all of it between zeros. None if samples are NaN or too large.
pub fn front_end(
    bank: &Arc<FilterBank>, wave: &[f32], rate: u32, clip_samples: usize, n_frames: usize,
    out: &mut [f32],
) -> Option<()> {
    let target = bank.front_end().sample_rate;
    let how = Clip { short: Short::Centre, ..Clip::default() };
    let bounds = Bounds::whole(wave.len() as u64);
    let crop = Crop::new(bounds, rate, target, clip_samples, how, false, |surplus| surplus / 2);
    let mut resampler = Resampler::new(rate, target);
    let (first, last) = crop.span(resampler.context() as u64);
    let mut clip = vec![0.0; clip_samples];
    let part = &wave[first as usize..last as usize];
    resampler.process(part, (crop.start - first) as usize, &mut clip[crop.offset..][..crop.out]);
    refuse!(!clip.iter().all(|x| x.abs() <= PEAK), None);
    Fbank::new(bank.clone()).normalised(&clip, n_frames, out);
    Some(())
}

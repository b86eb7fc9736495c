//! Formats that have no decoder here: AIFF, CAF, M4A (AAC, ALAC), and WAV with ADPCM or G.711. symphonia reads container and
//! packets: several times slower, since a container is opened for every crop, but exact to the sample where the codec is.
//!
//! AAC overlaps its packets, so decoding begins `AHEAD` samples before the crop; it also fills bands with noise that is drawn
//! anew, so that two decodes differ by as much.

use std::io::Cursor;
use std::panic::{catch_unwind, AssertUnwindSafe};

use symphonia::core::codecs::audio::well_known::CODEC_ID_ADPCM_MS;
use symphonia::core::codecs::audio::{AudioCodecParameters, AudioDecoderOptions};
use symphonia::core::codecs::CodecParameters;
use symphonia::core::formats::probe::Hint;
use symphonia::core::formats::{FormatOptions, FormatReader, SeekMode, SeekTo, TrackType};
use symphonia::core::io::MediaSourceStream;
use symphonia::core::meta::MetadataOptions;
use symphonia::core::units::{TimeBase, Timestamp};

use super::{corrupt, Error, Info};

/// Samples that are decoded before the crop.
const AHEAD: u64 = 4096;
/// Samples at the end that a container may promise and not hold: its length is rounded to packets.
const MISSING: usize = 4096;

/// Whether the bytes are one of these formats.
pub(super) fn is_other(bytes: &[u8]) -> bool {
    let magic = |at: usize| bytes.get(at..at + 4).unwrap_or(&[]);
    match magic(0) {
        b"FORM" => matches!(magic(8), b"AIFF" | b"AIFC"),
        b"caff" => true,
        b"RIFF" | b"RF64" | b"BW64" => magic(8) == b"WAVE",
        _ => magic(4) == b"ftyp",
    }
}

/// The format's name, for messages.
pub(super) fn name(bytes: &[u8]) -> &'static str {
    match bytes.get(..4) {
        Some(b"FORM") => "AIFF",
        Some(b"caff") => "CAF",
        Some(b"RIFF" | b"RF64" | b"BW64") => "WAV",
        _ => "M4A",
    }
}

/// What an edit list leaves out: samples before the recording, and all that follow `frames` of it.
#[derive(Clone, Copy, Default)]
struct Edit {
    skip: u64,
    frames: Option<u64>,
}

/// The boxes of an MP4 directly in `bytes`: name and content.
fn boxes(mut bytes: &[u8]) -> impl Iterator<Item = (&[u8], &[u8])> {
    std::iter::from_fn(move || {
        let head: &[u8; 8] = bytes.first_chunk()?;
        let (size, begin) = match u32::from_be_bytes([head[0], head[1], head[2], head[3]]) {
            0 => (bytes.len() as u64, 8),
            1 => (u64::from_be_bytes(bytes.get(8..16)?.try_into().ok()?), 16),
            size => (size.into(), 8),
        };
        let size = usize::try_from(size).ok().filter(|size| (begin..=bytes.len()).contains(size))?;
        let (this, rest) = bytes.split_at(size);
        bytes = rest;
        Some((&this[4..8], &this[begin..]))
    })
}

/// The content of the first box with this name directly in `bytes`.
fn inside<'a>(bytes: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    boxes(bytes).find(|(found, _)| *found == name).map(|(_, content)| content)
}

/// The edit list of the first track of sound, with which encoders say what delay and padding they added.
fn edit(bytes: &[u8], rate: u32) -> Option<Edit> {
    let word = |bytes: &[u8], at: usize| Some(u32::from_be_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
    let movie = inside(bytes, b"moov")?;
    let scale =
        inside(movie, b"mvhd").and_then(|header| word(header, if header.first() == Some(&1) { 20 } else { 12 }))?;
    let is_sound = |track: &[u8]| {
        let handler = inside(track, b"mdia").and_then(|media| inside(media, b"hdlr"));
        handler.is_some_and(|handler| handler.get(8..12) == Some(b"soun"))
    };
    let track = boxes(movie).find(|(name, content)| *name == b"trak" && is_sound(content))?.1;
    let media = inside(inside(track, b"mdia")?, b"mdhd")?;
    let media_scale = word(media, if media.first() == Some(&1) { 20 } else { 12 })?;
    let list = inside(inside(track, b"edts")?, b"elst")?;
    // One edit, of version 0 or 1; several would put pieces together.
    let (duration, time) = match (list.first()?, word(list, 4)?) {
        (0, 1) => (u64::from(word(list, 8)?), u64::from(word(list, 12)?)),
        (1, 1) => {
            let long = |at: usize| Some(u64::from_be_bytes(list.get(at..at + 8)?.try_into().ok()?));
            (long(8)?, long(16)?)
        }
        _ => return None,
    };
    let samples = |ticks: u64, scale: u32| {
        let found = (u128::from(ticks) * u128::from(rate)).div_ceil(u128::from(scale.max(1)));
        u64::try_from(found).unwrap_or(u64::MAX)
    };
    // In ticks of the movie, often of a millisecond, of which a part may be missing.
    let frames = (duration > 0 && scale > 0).then(|| samples(duration.saturating_add(u64::from(scale < rate)), scale));
    (time < u64::from(u32::MAX)).then(|| Edit { skip: samples(time, media_scale), frames })
}

/// A WAV of ADPCM: where its blocks lie, and the samples of each.
struct Blocks {
    data: std::ops::Range<usize>,
    bytes: usize,
    samples: u64,
}

/// The blocks of a WAV with ADPCM (Microsoft's or IMA); None for any other.
fn blocks(bytes: &[u8]) -> Option<Blocks> {
    let word = |at: usize| Some(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?));
    let (mut at, mut found) = (12, None);
    loop {
        let size = u32::from_le_bytes(bytes.get(at + 4..at + 8)?.try_into().ok()?) as usize;
        match &bytes[at..at + 4] {
            b"fmt " if matches!(word(at + 8)?, 2 | 0x11) => {
                found = Some((usize::from(word(at + 20)?), u64::from(word(at + 26)?)));
            }
            b"data" => {
                let (bytes_of_block, samples) = found.filter(|&(bytes, samples)| bytes > 0 && samples > 0)?;
                let end = (at + 8).saturating_add(size).min(bytes.len());
                return Some(Blocks { data: at + 8..end, bytes: bytes_of_block, samples });
            }
            _ => {}
        }
        at = at.checked_add(8 + size + (size & 1))?;
    }
}

/// An opened container, and its first track of audio.
struct Opened<'a> {
    reader: Box<dyn FormatReader + 'a>,
    track: u32,
    base: Option<TimeBase>,
    parameters: AudioCodecParameters,
    info: Info,
    skip: u64,
}

fn open<'a>(bytes: &'a [u8]) -> Result<Opened<'a>, Error> {
    let format = name(bytes);
    let stream = MediaSourceStream::new(Box::new(Cursor::new(bytes)), Default::default());
    let probe = symphonia::default::get_probe();
    let reader = probe.probe(&Hint::new(), stream, FormatOptions::default(), MetadataOptions::default());
    let reader = reader.map_err(|error| match error {
        symphonia::core::errors::Error::Unsupported(what) => Error::Unsupported { format, what: what.into() },
        _ => Error::Corrupt { format, what: "its headers cannot be read" },
    })?;
    let Some(track) = reader.default_track(TrackType::Audio) else {
        return Err(Error::NoAudio { format });
    };
    let Some(CodecParameters::Audio(parameters)) = track.codec_params.clone() else {
        return Err(Error::NoAudio { format });
    };
    let (rate, channels) = (parameters.sample_rate.unwrap_or(0), parameters.channels.as_ref().map_or(0, |c| c.count()));
    let (id, base) = (track.id, track.time_base);
    let ticks = |ticks: u64| scaled(ticks, base, rate);
    let frames = track.num_frames.or_else(|| track.duration.map(|duration| ticks(duration.get()))).unwrap_or(0);
    // Every packet of a codec here holds at least a bit for each sample but for silence: a larger length is false.
    let frames = frames.min((bytes.len() as u64).saturating_mul(4096));
    let edit = edit(bytes, rate).filter(|edit| edit.skip < frames).unwrap_or_default();
    let frames = (frames - edit.skip).min(edit.frames.unwrap_or(u64::MAX));
    let info = Info { rate, channels: channels.try_into().unwrap_or(u16::MAX), frames };
    Ok(Opened { reader, track: id, base, parameters, info, skip: edit.skip })
}

/// Ticks of a time base in samples.
fn scaled(ticks: u64, base: Option<TimeBase>, rate: u32) -> u64 {
    match base {
        None => ticks,
        Some(base) => {
            let (numer, denom) = (u128::from(base.numer.get()), u128::from(base.denom.get()));
            (u128::from(ticks) * numer * u128::from(rate) / denom) as u64
        }
    }
}

/// A panic would be a bug of symphonia, met on damaged bytes.
fn guarded<T>(bytes: &[u8], run: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| corrupt(name(bytes), "a packet cannot be decoded"))
}

pub(super) fn info(bytes: &[u8]) -> Result<Info, Error> {
    guarded(bytes, || Ok(open(bytes)?.info))
}

/// Whether the quantiser of a packet of Microsoft's ADPCM, which is blocks of `frames`, grows beyond what 32 bits hold: to
/// hundreds of times the range of a sample, so no encoder wrote it. symphonia would return noise for the rest of that block.
fn runs_away(packet: &[u8], channels: usize, frames: u64) -> bool {
    const GROWTH: [i32; 16] = [230, 230, 230, 230, 307, 409, 512, 614, 768, 614, 512, 409, 307, 230, 230, 230]; // / 256
    let head = 7 * channels;
    let block = frames.saturating_sub(2).saturating_mul(channels as u64) / 2 + head as u64;
    packet.chunks(block.clamp(1, 1 << 20) as usize).filter(|block| block.len() >= head).any(|block| {
        (0..channels).any(|channel| {
            let at = channels + 2 * channel;
            let mut step = i32::from(i16::from_le_bytes([block[at], block[at + 1]]));
            let nibbles = block[head..].iter().flat_map(|byte| [byte >> 4, byte & 15]);
            nibbles.skip(channel).step_by(channels).any(|nibble| {
                let too_large = step > i32::MAX / 768;
                step = (GROWTH[usize::from(nibble)].saturating_mul(step) / 256).max(16);
                too_large
            })
        })
    })
}

/// Decodes the frames from `start` on, which must lie inside the recording.
pub(super) fn read(bytes: &[u8], info: &Info, start: u64, channel: Option<u16>, out: &mut [f32]) -> Result<(), Error> {
    let Some(blocks) = blocks(bytes) else {
        return guarded(bytes, || try_read(bytes, info, start, channel, out));
    };
    // symphonia does not find a block: it is given a file of those that are needed.
    let first = start / blocks.samples;
    let last = (start + out.len() as u64).div_ceil(blocks.samples);
    let place =
        |block: u64| (blocks.data.start as u64).saturating_add(block * blocks.bytes as u64).min(blocks.data.end as u64);
    let data = &bytes[place(first) as usize..place(last) as usize];
    let mut part = bytes[..blocks.data.start].to_vec();
    part[blocks.data.start - 4..].copy_from_slice(&(data.len() as u32).to_le_bytes());
    part.extend_from_slice(data);
    let size = (part.len() - 8) as u32;
    part[4..8].copy_from_slice(&size.to_le_bytes());
    guarded(&part, || try_read(&part, info, start - first * blocks.samples, channel, out))
}

fn try_read(bytes: &[u8], info: &Info, start: u64, channel: Option<u16>, out: &mut [f32]) -> Result<(), Error> {
    let format = name(bytes);
    let Opened { mut reader, track, base, parameters, skip, .. } = open(bytes)?;
    let start = start + skip;
    let options = AudioDecoderOptions::default();
    let mut decoder = symphonia::default::get_codecs()
        .make_audio_decoder(&parameters, &options)
        .map_err(|_| Error::Unsupported { format, what: format!("the codec {:?}", parameters.codec) })?;
    let from = start.saturating_sub(AHEAD);
    if from > 0 && blocks(bytes).is_none() {
        let ticks = match base {
            None => from,
            Some(base) => {
                let (numer, denom) = (u128::from(base.numer.get()), u128::from(base.denom.get()));
                (u128::from(from) * denom / (numer * u128::from(info.rate)).max(1)) as u64
            }
        };
        let to = SeekTo::Timestamp { ts: Timestamp::new(ticks as i64), track_id: track };
        if reader.seek(SeekMode::Accurate, to).is_err() {
            return corrupt(format, "a position cannot be found");
        }
    }
    let of_microsoft = parameters.codec == CODEC_ID_ADPCM_MS;
    let mut done = 0;
    let mut mono = Vec::new();
    while done < out.len() {
        let packet = match reader.next_packet() {
            Ok(Some(packet)) if packet.track_id == track => packet,
            Ok(Some(_)) => continue,
            Ok(None) => break,
            // A file that was cut short ends here.
            Err(symphonia::core::errors::Error::IoError(_)) => break,
            Err(_) => return corrupt(format, "a packet cannot be read"),
        };
        if of_microsoft && runs_away(&packet.data, info.channels.into(), parameters.frames_per_block.unwrap_or(2)) {
            return corrupt(format, "a packet cannot be decoded");
        }
        let Ok(decoded) = decoder.decode(&packet) else {
            return corrupt(format, "a packet cannot be decoded");
        };
        let n = decoded.frames();
        let channels = decoded.num_planes();
        // The presentation time is that of the packet's first sample, those of the encoder's delay included: they are cut.
        let first = packet.pts.get().saturating_add_unsigned(packet.trim_start.get()).max(0) as u64;
        let position = scaled(first, base, info.rate);
        let wanted = start + done as u64;
        if position.saturating_add(n as u64) <= wanted {
            continue;
        }
        if position > wanted {
            return corrupt(format, "a packet is missing");
        }
        let planes: Vec<Vec<f32>> = {
            let mut planes: Vec<Vec<f32>> = Vec::new();
            decoded.copy_to_vecs_planar(&mut planes);
            planes
        };
        mono.clear();
        mono.resize(n, 0.0f32);
        match channel.and_then(|channel| planes.get(usize::from(channel))) {
            Some(plane) => mono.copy_from_slice(&plane[..n]),
            None => {
                for plane in &planes {
                    mono.iter_mut().zip(plane).for_each(|(y, x)| *y += x);
                }
                let gain = 1.0 / channels.max(1) as f32;
                mono.iter_mut().for_each(|y| *y *= gain);
            }
        }
        let skip = (wanted - position) as usize;
        let take = (n - skip).min(out.len() - done);
        out[done..done + take].copy_from_slice(&mono[skip..skip + take]);
        done += take;
    }
    if out.len() - done > MISSING {
        return corrupt(format, "it ends before its stated length");
    }
    out[done..].fill(0.0);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn boxed(name: &[u8; 4], content: &[&[u8]]) -> Vec<u8> {
        let content = content.concat();
        [&(content.len() as u32 + 8).to_be_bytes(), &name[..], &content].concat()
    }

    /// A movie in ticks of a millisecond, and its track of sound in samples of `rate`, with one edit of version 1.
    fn movie(rate: u32, duration: u64, time: u64) -> Vec<u8> {
        let header = boxed(b"mvhd", &[&[0; 12], &1000u32.to_be_bytes()]);
        let media = boxed(b"mdhd", &[&[0; 12], &rate.to_be_bytes()]);
        let handler = boxed(b"hdlr", &[&[0; 8], b"soun"]);
        let list = [&[1, 0, 0, 0, 0, 0, 0, 1][..], &duration.to_be_bytes(), &time.to_be_bytes()].concat();
        let edits = boxed(b"edts", &[&boxed(b"elst", &[&list])]);
        boxed(b"moov", &[&header, &boxed(b"trak", &[&edits, &boxed(b"mdia", &[&media, &handler])])])
    }

    #[test]
    fn an_edit_leaves_out_what_the_encoder_added() {
        let edit = edit(&movie(44_100, 1000, 1024), 44_100).unwrap();
        assert_eq!(
            (edit.skip, edit.frames),
            (1024, Some(44_145)),
            "a second, and the part of a tick that may be missing"
        );
    }

    #[test]
    fn an_edit_of_any_length_is_a_length() {
        for duration in [u64::MAX, u64::MAX - 1, 1 << 63, u64::MAX / 441 * 10 + 10] {
            let edit = edit(&movie(44_100, duration, 0), 44_100).unwrap();
            assert!(
                edit.frames.is_some_and(|frames| frames > 1 << 40),
                "{duration} ticks are {:?} samples",
                edit.frames
            );
        }
    }
}

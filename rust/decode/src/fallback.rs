//! Formats that have no decoder here: M4A (AAC, ALAC), CAF with ALAC, and WAV with ADPCM. The crate symphonia reads
//! container and packets. It is several times slower, since a container is opened for every crop, but exact to the
//! sample if the codec is. It reads some variants in part, or wrongly: those are refused by name.
//!
//! AAC overlaps its packets, so decoding begins `PRE_ROLL` samples before the crop. It also fills bands with random
//! noise, so that two decodes differ by as much.

use std::io::Cursor;
use std::panic::{catch_unwind, AssertUnwindSafe};

use symphonia::core::codecs::audio::well_known::{CODEC_ID_AAC, CODEC_ID_ADPCM_MS};
use symphonia::core::codecs::audio::{AudioCodecParameters, AudioDecoder, AudioDecoderOptions};
use symphonia::core::codecs::CodecParameters;
use symphonia::core::formats::probe::Hint;
use symphonia::core::formats::{FormatOptions, FormatReader, SeekMode, SeekTo, TrackType};
use symphonia::core::io::MediaSourceStream;
use symphonia::core::meta::MetadataOptions;
use symphonia::core::units::{TimeBase, Timestamp};

use super::mp4::{self, Edit};
use super::{aac, aiff, corrupt, riff, Error, Info};

/// Samples that are decoded before the crop.
const PRE_ROLL: u64 = 4096;
/// Samples at the end that a container may promise and not hold: its length is rounded to packets.
const MAX_MISSING: usize = 4096;

/// Whether the bytes are one of these formats.
pub(super) fn is_fallback(bytes: &[u8]) -> bool {
    let magic = |at: usize| bytes.get(at..at + 4).unwrap_or(&[]);
    match magic(0) {
        b"caff" => true,
        b"RIFF" | b"RF64" | b"BW64" => magic(8) == b"WAVE",
        _ => magic(4) == b"ftyp",
    }
}

/// The format's name, for messages.
pub(super) fn name(bytes: &[u8]) -> &'static str {
    match bytes.get(..4) {
        Some(b"caff") => "CAF",
        Some(b"RIFF" | b"RF64" | b"BW64") => "WAV",
        _ => "M4A",
    }
}

/// A WAV of ADPCM: the place of its blocks, and the samples of each.
struct Blocks {
    data: std::ops::Range<usize>,
    bytes: usize,
    samples: u64,
    stated: u64, // the samples that the header states
}

/// The blocks of a WAV with ADPCM (Microsoft's or IMA). None for any other.
fn blocks(bytes: &[u8]) -> Option<Blocks> {
    let word = |at: usize| Some(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?));
    let mut found = None;
    for (head, size, at) in riff::riff_chunks(bytes) {
        match &head[..4] {
            b"fmt " if matches!(word(at)?, 2 | 0x11) => {
                found = Some((usize::from(word(at + 12)?), u64::from(word(at + 18)?)));
            }
            b"data" => {
                let (bytes_of_block, samples) =
                    found.filter(|&(bytes, samples)| bytes > 0 && samples > 0)?;
                let data = riff::whole(&bytes[at..], size as usize, riff::chunk).len();
                let stated = if size == u32::MAX.into() {
                    0
                } else {
                    size / bytes_of_block as u64 * samples
                };
                return Some(Blocks {
                    data: at..at + data,
                    bytes: bytes_of_block,
                    samples,
                    stated,
                });
            }
            _ => {}
        }
    }
    None
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
    if format == "M4A" {
        mp4::refusal(bytes).map_or(Ok(()), Err)?;
    }
    let stream = MediaSourceStream::new(Box::new(Cursor::new(bytes)), Default::default());
    let probe = symphonia::default::get_probe();
    let reader =
        probe.probe(&Hint::new(), stream, FormatOptions::default(), MetadataOptions::default());
    let reader = reader.map_err(|error| match error {
        _ if format == "CAF" && ends_early(bytes) => {
            Error::Corrupt { format, what: "it ends before its stated length" }
        }
        symphonia::core::errors::Error::Unsupported(what) => {
            Error::Unsupported { format, what: what.into() }
        }
        _ => Error::Unsupported { format, what: "this variant of its headers".into() },
    })?;
    let Some(track) = reader.default_track(TrackType::Audio) else {
        return Err(Error::NoAudio { format });
    };
    let Some(CodecParameters::Audio(parameters)) = track.codec_params.clone() else {
        return Err(Error::NoAudio { format });
    };
    // Above 65,535 Hz the description of MP4 has no place for it, and the time base has.
    let of_base = || track.time_base.map_or(0, |base| base.denom.get());
    let rate = parameters.sample_rate.filter(|&rate| rate > 0).unwrap_or_else(of_base);
    let channels = parameters.channels.as_ref().map_or(0, |c| c.count());
    let (id, base) = (track.id, track.time_base);
    let ticks = |ticks: u64| scaled(ticks, base, rate);
    let frames = track
        .num_frames
        .or_else(|| track.duration.map(|duration| ticks(duration.get())))
        .unwrap_or(0);
    // Every packet of a codec here holds at least a bit for each sample but for silence: a larger length is false.
    let frames = frames.min((bytes.len() as u64).saturating_mul(4096));
    let edit = match format {
        "M4A" => mp4::edit(bytes, rate),
        "CAF" => trimmed(bytes),
        _ => None,
    };
    let edit = edit.filter(|edit| edit.skip < frames).unwrap_or_default();
    let frames = (frames - edit.skip).min(edit.frames.unwrap_or(u64::MAX));
    let info = Info { rate, channels: channels.try_into().unwrap_or(u16::MAX), frames, stated: 0 };
    Ok(Opened { reader, track: id, base, parameters, info, skip: edit.skip })
}

/// Whether a chunk of a CAF states more bytes than there are, as in a file that was cut short.
fn ends_early(bytes: &[u8]) -> bool {
    aiff::caf_chunks(bytes)
        .any(|(_, size, at)| size <= i64::MAX as u64 && at as u64 + size > bytes.len() as u64)
}

/// The samples in the packets of a CAF that are the recording, by its packet table.
fn trimmed(bytes: &[u8]) -> Option<Edit> {
    let (.., at) = aiff::caf_chunks(bytes).find(|(head, ..)| head.starts_with(b"pakt"))?;
    let frames = i64::from_be_bytes(*bytes.get(at + 8..)?.first_chunk()?);
    let skip = i32::from_be_bytes(*bytes.get(at + 16..)?.first_chunk()?);
    Some(Edit { skip: skip.try_into().ok()?, frames: Some(frames.try_into().ok()?) })
}

fn decoder(parameters: &AudioCodecParameters) -> Option<Box<dyn AudioDecoder>> {
    symphonia::default::get_codecs()
        .make_audio_decoder(parameters, &AudioDecoderOptions::default())
        .ok()
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

/// Catches a panic, which would be a bug of symphonia on damaged bytes.
fn guarded<T>(bytes: &[u8], run: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    catch_unwind(AssertUnwindSafe(run))
        .unwrap_or_else(|_| corrupt(name(bytes), "a packet cannot be decoded"))
}

pub(super) fn info(bytes: &[u8]) -> Result<Info, Error> {
    guarded(bytes, || {
        let format = name(bytes);
        let mut opened = open(bytes)?;
        if opened.parameters.codec == CODEC_ID_AAC {
            if let Some(what) = refused_aac(&mut opened) {
                return Err(Error::Unsupported { format, what: what.into() });
            }
        }
        if format == "CAF" {
            // ALAC's last packet says how long it is.
            opened.info.stated = if ends_early(bytes) { opened.info.frames } else { 0 };
            opened.info.frames = opened.info.frames.min(end(format, &mut opened)?);
        }
        let mut info = opened.info;
        if let Some(blocks) = blocks(bytes) {
            // symphonia believes the header. A block that was cut is not decoded.
            info.frames = (blocks.data.len() / blocks.bytes) as u64 * blocks.samples;
            info.stated = blocks.stated;
        }
        Ok(info)
    })
}

/// Whether symphonia decodes the recording: its first packet, and a file that was not cut short.
pub(super) fn check(bytes: &[u8]) -> Result<(), Error> {
    guarded(bytes, || {
        let format = name(bytes);
        let mut opened = open(bytes)?;
        let unsupported =
            || Error::Unsupported { format, what: "this variant of its codec".into() };
        let mut decoder = decoder(&opened.parameters).ok_or_else(unsupported)?;
        let mut packets = std::iter::from_fn(|| opened.reader.next_packet().ok().flatten());
        let Some(first) = packets.find(|packet| packet.track_id == opened.track) else {
            return corrupt(format, "it ends before its stated length");
        };
        decoder.decode(&first).map_err(|_| unsupported())?;
        match format {
            "M4A" => end(format, &mut opened).map(|_| ()),
            _ => Ok(()),
        }
    })
}

/// The reason why AAC is not decoded. None if it is.
fn refused_aac(opened: &mut Opened<'_>) -> Option<&'static str> {
    if let Some(what) = opened.parameters.extra_data.as_deref().and_then(aac::refusal) {
        return Some(what);
    }
    let (mut packets, mut with_sbr) = (0, 0);
    while packets < aac::MAX_PACKETS {
        let Ok(Some(packet)) = opened.reader.next_packet() else { break };
        if packet.track_id == opened.track {
            packets += 1;
            with_sbr += usize::from(aac::has_sbr(&packet.data));
        }
    }
    (2 * with_sbr > packets).then_some("HE-AAC")
}

/// The end of the last packet, in samples of the recording. For AAC it is somewhere after that.
fn end(format: &'static str, opened: &mut Opened<'_>) -> Result<u64, Error> {
    let Opened { reader, track, base, parameters, info, skip } = opened;
    let last = (info.frames + *skip).saturating_sub(MAX_MISSING as u64);
    if last > 0 && !seek(reader.as_mut(), *track, *base, info.rate, last) {
        return Err(Error::Unsupported { format, what: "its tracks of several lengths".into() });
    }
    let mut decoder = decoder(parameters).filter(|_| parameters.codec != CODEC_ID_AAC);
    let mut end = None;
    while let Ok(Some(packet)) = reader.next_packet() {
        if packet.track_id == *track {
            let frames = decoder
                .as_mut()
                .map(|decoder| decoder.decode(&packet).map_or(0, |decoded| decoded.frames()));
            let begin = scaled(packet.pts.get().max(0) as u64, *base, info.rate);
            end = Some(begin.saturating_add(frames.map_or(u64::MAX, |frames| frames as u64)));
        }
    }
    match end {
        None if last > 0 => corrupt(format, "it ends before its stated length"),
        end => Ok(end.unwrap_or(u64::MAX).saturating_sub(*skip)),
    }
}

/// Moves to the packet with this sample.
fn seek(
    reader: &mut (dyn FormatReader + '_), track: u32, base: Option<TimeBase>, rate: u32,
    sample: u64,
) -> bool {
    let ticks = match base {
        None => sample,
        Some(base) => {
            let (numer, denom) = (u128::from(base.numer.get()), u128::from(base.denom.get()));
            (u128::from(sample) * denom / (numer * u128::from(rate)).max(1)) as u64
        }
    };
    let to = SeekTo::Timestamp { ts: Timestamp::new(ticks as i64), track_id: track };
    reader.seek(SeekMode::Accurate, to).is_ok()
}

/// Whether the quantiser of a packet of Microsoft's ADPCM, which is blocks of `frames`, grows beyond 32 bits: to
/// hundreds of times the range of a sample. No encoder wrote such a packet. Symphonia would return noise for the rest
/// of that block.
fn runs_away(packet: &[u8], channels: usize, frames: u64) -> bool {
    const GROWTH: [i32; 16] =
        [230, 230, 230, 230, 307, 409, 512, 614, 768, 614, 512, 409, 307, 230, 230, 230]; // / 256
    let head = 7 * channels;
    let block = frames.saturating_sub(2).saturating_mul(channels as u64) / 2 + head as u64;
    packet.chunks(block.clamp(1, 1 << 20) as usize).filter(|block| block.len() >= head).any(
        |block| {
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
        },
    )
}

/// Decodes the frames from `start` on, which must lie inside the recording.
pub(super) fn read(
    bytes: &[u8], info: &Info, start: u64, channel: Option<u16>, out: &mut [f32],
) -> Result<(), Error> {
    let Some(blocks) = blocks(bytes) else {
        return guarded(bytes, || try_read(bytes, info, start, channel, out));
    };
    // symphonia does not find a block: it is given a file of those that are needed.
    let first = start / blocks.samples;
    let last = (start + out.len() as u64).div_ceil(blocks.samples);
    let place = |block: u64| {
        (blocks.data.start as u64)
            .saturating_add(block * blocks.bytes as u64)
            .min(blocks.data.end as u64)
    };
    let data = &bytes[place(first) as usize..place(last) as usize];
    let mut part = bytes[..blocks.data.start].to_vec();
    part[blocks.data.start - 4..].copy_from_slice(&(data.len() as u32).to_le_bytes());
    part.extend_from_slice(data);
    let size = (part.len() - 8) as u32;
    part[4..8].copy_from_slice(&size.to_le_bytes());
    guarded(&part, || try_read(&part, info, start - first * blocks.samples, channel, out))
}

fn try_read(
    bytes: &[u8], info: &Info, start: u64, channel: Option<u16>, out: &mut [f32],
) -> Result<(), Error> {
    let format = name(bytes);
    let Opened { mut reader, track, base, parameters, skip, .. } = open(bytes)?;
    let start = start + skip;
    let Some(mut decoder) = decoder(&parameters) else {
        return corrupt(format, "it has no decoder");
    };
    let from = start.saturating_sub(PRE_ROLL);
    if from > 0 && blocks(bytes).is_none() && !seek(reader.as_mut(), track, base, info.rate, from) {
        return corrupt(format, "a position cannot be found");
    }
    let of_microsoft = parameters.codec == CODEC_ID_ADPCM_MS;
    let mut done = 0;
    while done < out.len() {
        let packet = match reader.next_packet() {
            Ok(Some(packet)) if packet.track_id == track => packet,
            Ok(Some(_)) => continue,
            Ok(None) => break,
            // A file that was cut short ends here.
            Err(symphonia::core::errors::Error::IoError(_)) => break,
            Err(_) => return corrupt(format, "a packet cannot be read"),
        };
        if of_microsoft
            && runs_away(
                &packet.data,
                info.channels.into(),
                parameters.frames_per_block.unwrap_or(2),
            )
        {
            return corrupt(format, "a packet cannot be decoded");
        }
        let Ok(decoded) = decoder.decode(&packet) else {
            return corrupt(format, "a packet cannot be decoded");
        };
        let n = decoded.frames();
        // The presentation time is that of the packet's first sample, those of the encoder's delay included: they are
        // cut.
        let first = packet.pts.get().saturating_add_unsigned(packet.trim_start.get()).max(0) as u64;
        let position = scaled(first, base, info.rate);
        let wanted = start + done as u64;
        if position.saturating_add(n as u64) <= wanted {
            continue;
        }
        refuse!(position > wanted, corrupt(format, "a packet is missing"));
        let mut planes = Vec::<Vec<f32>>::new();
        decoded.copy_to_vecs_planar(&mut planes);
        let skip = (wanted - position) as usize;
        let take = (n - skip).min(out.len() - done);
        let mono = &mut out[done..done + take];
        match channel.and_then(|channel| planes.get(usize::from(channel))) {
            Some(plane) => mono.copy_from_slice(&plane[skip..skip + take]),
            None => {
                mono.fill(0.0);
                for plane in &planes {
                    mono.iter_mut().zip(&plane[skip..]).for_each(|(y, x)| *y += x);
                }
                let gain = 1.0 / planes.len().max(1) as f32;
                mono.iter_mut().for_each(|y| *y *= gain);
            }
        }
        done += take;
    }
    refuse!(out.len() - done > MAX_MISSING, corrupt(format, "it ends before its stated length"));
    out[done..].fill(0.0);
    Ok(())
}

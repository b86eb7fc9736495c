//! MP4 (M4A, MOV, 3GP): its boxes, and whether symphonia reads the recording in them right.

use super::bits::u32_at as word;
use super::Error;

const FORMAT: &str = "M4A";

/// The part of the decoded samples that is the recording: `frames` of them, or all, after the first `skip`.
#[derive(Clone, Copy, Default)]
pub(super) struct Edit {
    pub skip: u64,
    pub frames: Option<u64>,
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
        let size =
            usize::try_from(size).ok().filter(|size| (begin..=bytes.len()).contains(size))?;
        let (this, rest) = bytes.split_at(size);
        bytes = rest;
        Some((&this[4..8], &this[begin..]))
    })
}

/// The content of the first box with this name directly in `bytes`.
fn inside<'a>(bytes: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    boxes(bytes).find(|(found, _)| *found == name).map(|(_, content)| content)
}

/// The tracks of audio.
fn audio_tracks(movie: &[u8]) -> impl Iterator<Item = &[u8]> {
    let is_audio = |track: &[u8]| {
        let handler = inside(track, b"mdia").and_then(|media| inside(media, b"hdlr"));
        handler.is_some_and(|handler| handler.get(8..12) == Some(b"soun"))
    };
    boxes(movie)
        .filter(move |(name, content)| *name == b"trak" && is_audio(content))
        .map(|(_, track)| track)
}

/// The reason why a recording is refused that symphonia would read in part, or wrongly.
pub(super) fn refusal(bytes: &[u8]) -> Option<Error> {
    let unsupported = |what: &str| Some(Error::Unsupported { format: FORMAT, what: what.into() });
    let Some(movie) = inside(bytes, b"moov") else {
        return Some(Error::Corrupt {
            format: FORMAT,
            what: "its index (moov) is missing, so it was never finished",
        });
    };
    if boxes(bytes).any(|(name, _)| name == b"moof") {
        return unsupported("a fragmented file (as streams and some phones write)");
    }
    let tracks = audio_tracks(movie).count();
    refuse!(tracks > 1, Some(Error::tracks(FORMAT, tracks)));
    let Some(track) = audio_tracks(movie).next() else {
        return Some(Error::NoAudio { format: FORMAT });
    };
    let path: [&[u8]; 3] = [b"mdia", b"minf", b"stbl"];
    let table =
        path.into_iter().try_fold(track, |content, name| inside(content, name)).unwrap_or(&[]);
    let entry = inside(table, b"stsd").unwrap_or(&[]);
    let last = |list: &[u8], size: usize| {
        Some(
            list.get(list.len().checked_sub(size)?..)?
                .iter()
                .fold(0u64, |n, &b| n << 8 | u64::from(b)),
        )
    };
    let place = inside(table, b"stco")
        .and_then(|list| last(list, 4))
        .or(inside(table, b"co64").and_then(|list| last(list, 8)));
    if place.is_some_and(|place| place >= bytes.len() as u64) {
        return Some(Error::Corrupt { format: FORMAT, what: "it ends before its stated length" });
    }
    let little = entry.windows(6).any(|bytes| bytes == b"enda\0\x01");
    match entry.get(12..16).unwrap_or(&[]) {
        b"mp4a" => {
            if let Some(codec) = object_type(entry).and_then(other_than_aac) {
                return unsupported(codec);
            }
        }
        b"alac" | b"sowt" | b"twos" | b"lpcm" => {}
        b"in24" | b"in32" | b"fl32" | b"fl64" if little => {}
        codec => return unsupported(&codec_name(codec)),
    }
    matches!(edits(track), Edits::Several).then(|| unsupported("an edit list of several pieces"))?
}

/// The codec of an entry "mp4a": the object type of its decoder (ISO/IEC 14496-1, 7.2.6.6).
fn object_type(entry: &[u8]) -> Option<u8> {
    let at = entry.windows(4).position(|name| name == b"esds")?;
    let stream = descriptor(entry.get(at + 8..)?, 3)?;
    let flags = *stream.get(2)?;
    let mut decoder = stream.get(3..)?;
    if flags & 0x80 != 0 {
        decoder = decoder.get(2..)?; // the stream that it depends on
    }
    if flags & 0x40 != 0 {
        decoder = decoder.get(1 + usize::from(*decoder.first()?)..)?; // an address
    }
    if flags & 0x20 != 0 {
        decoder = decoder.get(2..)?; // the stream of its clock
    }
    descriptor(decoder, 4)?.first().copied()
}

/// The content of a descriptor that must have this tag. Its length has 7 bits in each of up to 4 bytes.
fn descriptor(bytes: &[u8], tag: u8) -> Option<&[u8]> {
    refuse!(bytes.first() != Some(&tag), None);
    let last = bytes.get(1..5)?.iter().position(|byte| byte & 0x80 == 0)?;
    bytes.get(last + 2..)
}

const MP3: &str = "MP3 inside MP4 (-c copy NEW.mp3 takes it out as it is)";

/// The name of a codec of "mp4a" that is not AAC. None: it is, or of an unknown type, which the decoder decides.
fn other_than_aac(object_type: u8) -> Option<&'static str> {
    match object_type {
        0x69 | 0x6b => Some(MP3),
        0xa5 => Some("AC-3 inside MP4"),
        0xa6 => Some("E-AC-3 inside MP4"),
        0xa9..=0xac => Some("DTS inside MP4"),
        0xad => Some("Opus inside MP4"),
        0xdd => Some("Vorbis inside MP4"),
        0xe1 => Some("QCELP inside MP4"),
        _ => None,
    }
}

/// The name of a codec by its entry.
fn codec_name(entry: &[u8]) -> String {
    match entry {
        b".mp3" | b"ms\0\x55" | b"mp3 " => MP3.into(),
        b"ac-3" => "AC-3 inside MP4".into(),
        b"ec-3" => "E-AC-3 inside MP4".into(),
        b"Opus" => "Opus inside MP4".into(),
        b"fLaC" => "FLAC inside MP4 (-c copy NEW.flac takes it out as it is)".into(),
        b"samr" | b"sawb" => "AMR inside MP4".into(),
        b"ulaw" | b"alaw" => "the codec of telephones (\u{b5}-law or A-law) inside MP4".into(),
        other => format!("its codec {:?}", String::from_utf8_lossy(other)),
    }
}

/// An edit list, of which leading empty edits only delay the audio: by length and start, in ticks of movie and media.
enum Edits {
    None,
    One(u64, u64),
    Several,
}

fn edits(track: &[u8]) -> Edits {
    let Some(list) = inside(track, b"edts").and_then(|edits| inside(edits, b"elst")) else {
        return Edits::None;
    };
    let long = list.first() == Some(&1);
    let number = |at: usize| match long {
        true => Some(u64::from_be_bytes(*list.get(at..)?.first_chunk()?)),
        false => word(list, at).map(u64::from),
    };
    let (size, width) = if long { (20, 8) } else { (12, 4) };
    let empty = if long { u64::MAX } else { u32::MAX.into() };
    let n = word(list, 4).unwrap_or(0) as usize;
    let all = (0..n.min(list.len() / size))
        .map_while(|i| Some((number(8 + i * size)?, number(8 + i * size + width)?)));
    let mut found = all.skip_while(|&(_, time)| time == empty);
    match (found.next(), found.next()) {
        (None, _) => Edits::None,
        (Some((duration, time)), None) => Edits::One(duration, time),
        _ => Edits::Several,
    }
}

/// The part that the edit list keeps. With it encoders state the delay and padding that they added.
pub(super) fn edit(bytes: &[u8], rate: u32) -> Option<Edit> {
    let movie = inside(bytes, b"moov")?;
    let scale = inside(movie, b"mvhd")
        .and_then(|header| word(header, if header.first() == Some(&1) { 20 } else { 12 }))?;
    let track = audio_tracks(movie).next()?;
    let media = inside(inside(track, b"mdia")?, b"mdhd")?;
    let media_scale = word(media, if media.first() == Some(&1) { 20 } else { 12 })?;
    let Edits::One(duration, time) = edits(track) else { return None };
    let samples = |ticks: u64, scale: u32| {
        let found = (u128::from(ticks) * u128::from(rate)).div_ceil(u128::from(scale.max(1)));
        u64::try_from(found).unwrap_or(u64::MAX)
    };
    // In ticks of the movie, often of a millisecond, of which a part may be missing.
    let frames = (duration > 0 && scale > 0)
        .then(|| samples(duration.saturating_add(u64::from(scale < rate)), scale));
    (time < u64::from(u32::MAX)).then(|| Edit { skip: samples(time, media_scale), frames })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn boxed(name: &[u8; 4], content: &[&[u8]]) -> Vec<u8> {
        let content = content.concat();
        [&(content.len() as u32 + 8).to_be_bytes(), &name[..], &content].concat()
    }

    /// A movie in ticks of a millisecond, and its track of audio in samples of `rate`, with one edit of version 1.
    fn movie(rate: u32, duration: u64, time: u64) -> Vec<u8> {
        let header = boxed(b"mvhd", &[&[0; 12], &1000u32.to_be_bytes()]);
        let media = boxed(b"mdhd", &[&[0; 12], &rate.to_be_bytes()]);
        let handler = boxed(b"hdlr", &[&[0; 8], b"soun"]);
        let list =
            [&[1, 0, 0, 0, 0, 0, 0, 1][..], &duration.to_be_bytes(), &time.to_be_bytes()].concat();
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

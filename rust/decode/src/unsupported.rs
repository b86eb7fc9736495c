//! Files that have the name of a recording, but hold an unsupported format or no audio, recognised by their first
//! bytes.

use super::{mp3, Error};

const WMA: [u8; 8] = *b"\x30\x26\xb2\x75\x8e\x66\xcf\x11";

/// The place of the bytes, the bytes, and the format's name.
const FORMATS: [(usize, &[u8], &str); 27] = [
    (0, &WMA, "Windows Media (WMA)"),
    (0, b"\x1a\x45\xdf\xa3", "Matroska or WebM"),
    (8, b"AVI ", "AVI"),
    (0, b"RIFX", "RIFX (WAV, big-endian)"),
    (0, b"wvpk", "WavPack"),
    (0, b"TTA1", "True Audio"),
    (0, b"MAC ", "Monkey's Audio"),
    (0, b"MPCK", "Musepack"),
    (0, b"MP+", "Musepack"),
    (0, b"#!AMR", "AMR"),
    (0, b"\x0b\x77", "AC-3"),
    (0, b"\x7f\xfe\x80\x01", "DTS"),
    (0, b"NIST_1A", "NIST SPHERE"),
    (0, b"Creative Voice File", "VOC"),
    (8, b"8SVX", "8SVX"),
    (8, b"16SV", "16SV"),
    (0, b" paf", "PARIS"),
    (0, b"2BIT", "AVR"),
    (0, b"\x64\xa3", "IRCAM"),
    (0, b"DSD ", "DSD"),
    (0, b".RMF", "RealAudio"),
    (0, b"\0\0\x01\xba", "MPEG program stream"),
    (0, b"\0\0\x01\xb3", "MPEG video"),
    (0, b"FLV\x01", "Flash video"),
    (4, b"moov", "QuickTime"),
    (4, b"mdat", "QuickTime"),
    (4, b"styp", "a segment of MP4"),
];

/// First bytes of files without audio, a name for the file, and a way to get the recording.
const NOT_AUDIO: [(usize, &[u8], &str); 8] = [
    (
        0,
        b"version https://git-lfs",
        "a Git LFS pointer instead of the recording; fetch it: git lfs pull",
    ),
    (0, b"<!", "a web page instead of the recording; fetch it again"),
    (0, b"<ht", "a web page instead of the recording; fetch it again"),
    (0, b"PK\x03\x04", "a ZIP archive; unpack it"),
    (257, b"ustar", "a tar archive; unpack it"),
    (0, b"Rar!", "a RAR archive; unpack it"),
    (0, b"\x1f\x8b", "a gzip archive; unpack it"),
    (0, b"WAac", "a WAC recording of a Song Meter; convert it with Kaleidoscope"),
];

/// Bytes in which a stream of another layer is looked for.
const MAX_JUNK: usize = 1 << 16;

/// The entry of a table whose first bytes these are.
fn entry(table: &[(usize, &[u8], &'static str)], bytes: &[u8]) -> Option<&'static str> {
    let is_here = |at: usize, magic: &[u8]| bytes.get(at..).is_some_and(|x| x.starts_with(magic));
    table.iter().find(|(at, magic, _)| is_here(*at, magic)).map(|(.., name)| *name)
}

fn of_format(format: &'static str) -> Error {
    Error::Unsupported { format, what: "this format".into() }
}

/// The reason why bytes are not read although what looks like a frame of layer III begins at `at`.
pub(super) fn before(bytes: &[u8], at: usize) -> Option<Error> {
    refuse!(at == 0, None);
    let format = entry(&FORMATS, bytes).or_else(|| sure_frames(bytes));
    let format = format.or_else(|| mp3::layers::find(bytes, at)).map(of_format);
    format.or_else(|| entry(&NOT_AUDIO, bytes).map(Error::NotAudio))
}

/// The reason why the bytes are not read.
pub(super) fn refusal(bytes: &[u8]) -> Error {
    let streams = || mp3::layers::find(bytes, MAX_JUNK).or_else(|| frames(bytes));
    if let Some(name) = entry(&FORMATS, bytes).or_else(streams) {
        return of_format(name);
    }
    if let Some(what) = entry(&NOT_AUDIO, bytes) {
        return Error::NotAudio(what);
    }
    if bytes.iter().all(|&byte| byte == 0) {
        return Error::NotAudio(
            "a file of zeros, as copies that failed leave them; fetch it again",
        );
    }
    let mut begin = [0; 4];
    let n = bytes.len().min(4);
    begin[..n].copy_from_slice(&bytes[..n]);
    Error::Unknown(begin)
}

/// The name of a format of frames that each begin with a sync word, of which two or more are there: AAC in ADTS, packets
/// of MPEG transport streams.
fn sure_frames(bytes: &[u8]) -> Option<&'static str> {
    let word = u32::from_be_bytes(*bytes.first_chunk()?);
    match word >> 17 & 3 {
        _ if bytes[0] == b'G' && bytes.get(188) == Some(&b'G') => Some("MPEG transport stream"),
        // Frames of FLAC without their file's header begin in the same way: the second frame of ADTS decides.
        0 if word >> 20 == 0xfff => {
            let head = bytes.get(..6)?;
            let size = usize::from(head[3] & 3) << 11
                | usize::from(head[4]) << 3
                | usize::from(head[5]) >> 5;
            let next = bytes.get(size..).unwrap_or(&[]);
            let is_one = next.len() < 7 || next[0] == 0xff && next[1] & 0xfe == head[1] & 0xfe;
            (size > 0 && is_one).then_some("AAC in ADTS")
        }
        _ => None,
    }
}

/// The name of a format by the first frame: one of `sure_frames`, or MPEG layers I and II.
fn frames(bytes: &[u8]) -> Option<&'static str> {
    let word = u32::from_be_bytes(*bytes.first_chunk()?);
    match word >> 17 & 3 {
        2 if word >> 21 == 0x7ff => Some("MPEG layer II"),
        3 if word >> 21 == 0x7ff && word >> 12 & 15 < 15 && word >> 10 & 3 < 3 => {
            Some("MPEG layer I")
        }
        _ => sure_frames(bytes),
    }
}

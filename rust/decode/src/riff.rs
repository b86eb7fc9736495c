//! WAV (RIFF, RF64 and BW64) and Sony's Wave64: the places of the samples.
//!
//! Recorders that stop without warning leave headers that were never brought up to date. The data chunk then states no
//! samples, or few. The others follow it, without a chunk's header: they are read (`whole`).

use super::pcm::{Encoding, Pcm};
use super::{corrupt, Error};

/// The first chunk's name of a Wave64 file.
pub(super) const W64: [u8; 16] = *b"riff\x2e\x91\xcf\x11\xa5\xd6\x28\xdb\x04\xc1\0\0";
/// The end of the other chunks' names in it.
const W64_END: [u8; 12] = *b"\xf3\xac\xd3\x11\x8c\xd1\0\xc0\x4f\x8e\xdb\x8a";

/// Bytes behind the data that may be anything, such as padding, if the header states some data.
const SLACK: usize = 4096;

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// The bytes of a data chunk at the beginning of `rest` that states `size`: all up to the end of the file, if that is
/// cut short, or if neither chunks nor a tag follow the stated ones. `is_chunk` returns the length of a chunk at the
/// beginning of bytes.
pub(super) fn whole(rest: &[u8], size: usize, is_chunk: impl Fn(&[u8]) -> Option<usize>) -> &[u8] {
    let next = size.checked_add(size & 1);
    let Some(mut after) = next.and_then(|next| rest.get(next..)) else {
        return rest.get(..size).unwrap_or(rest);
    };
    let slack = if size == 0 { 0 } else { SLACK };
    while after.len() > slack {
        match is_chunk(after) {
            Some(length) => after = after.get(length..).unwrap_or(&[]),
            None => return rest,
        }
    }
    &rest[..size]
}

/// Whether bytes can be the name of a chunk.
pub(super) fn is_name(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| matches!(byte, b' '..=b'~'))
}

/// Bytes of the RIFF chunk, or of a tag, that begins here. None if neither does. Zeros count as padding.
pub(super) fn chunk(bytes: &[u8]) -> Option<usize> {
    let head = bytes.get(..8)?;
    if matches!(&head[..3], b"ID3" | b"TAG" | b"APE") || head.iter().all(|&byte| byte == 0) {
        return Some(bytes.len());
    }
    let size = u32_at(head, 4) as usize;
    (is_name(&head[..4]) && size <= bytes.len()).then_some(8 + size + (size & 1))
}

/// The chunks from `at` on. Their first bytes are a name and, by `size`, the size of the content, which is padded to a
/// multiple of `align`. Returns these first bytes, the size, and the start of the content.
pub(super) fn chunks<const HEAD: usize>(
    bytes: &[u8], mut at: usize, align: usize, size: impl Fn(&[u8; HEAD]) -> Option<u64>,
) -> impl Iterator<Item = (&[u8; HEAD], u64, usize)> {
    std::iter::from_fn(move || {
        let head = bytes.get(at..)?.first_chunk()?;
        let (size, body) = (size(head)?, at + HEAD);
        let length =
            usize::try_from(size).ok().and_then(|size| size.checked_next_multiple_of(align));
        at = body.saturating_add(length.unwrap_or(usize::MAX));
        Some((head, size, body))
    })
}

/// The chunks of a RIFF file.
pub(super) fn riff_chunks(bytes: &[u8]) -> impl Iterator<Item = (&[u8; 8], u64, usize)> {
    chunks(bytes, 12, 2, |head| Some(u32_at(head, 4).into()))
}

pub(super) fn wav(bytes: &[u8]) -> Result<Option<Pcm<'_>>, Error> {
    let long_format = !bytes.starts_with(b"RIFF");
    let mut long_size = None;
    let mut format = None;
    for (head, size, at) in riff_chunks(bytes) {
        let (size, body) = (size as u32, &bytes[at..]);
        match (&head[..4], body.get(..size as usize)) {
            (b"ds64", Some(body)) if body.len() >= 16 => {
                long_size = Some(u64::from_le_bytes(body[8..16].try_into().expect("8 bytes")));
            }
            (b"fmt ", Some(body)) => format = Some(body),
            (b"fmt ", None) => return corrupt("WAV", "the format chunk is cut off"),
            (b"data", _) => {
                let next =
                    body.get((size as usize).saturating_add((size & 1) as usize)..).unwrap_or(&[]);
                if next.starts_with(b"RIFF") && next.get(8..12) == Some(b"WAVE") {
                    return Err(Error::Joined { format: "WAV" });
                }
                // The second chunk would be passed over.
                refuse!(
                    size > 0 && next.starts_with(b"data") && chunk(next).is_some(),
                    Err(Error::parts("WAV"))
                );
                let (data, stated) = match long_size {
                    // RF64: the size is in the ds64 chunk, and this field is all ones.
                    Some(long) if size == u32::MAX || long_format && size == 0 => {
                        (whole(body, usize::try_from(long).unwrap_or(usize::MAX), chunk), long)
                    }
                    // A recorder that went on after 4 GiB states the lowest 32 bits of the size.
                    _ if wraps(body.len() as u64, size) => (body, 0),
                    // A writer to a pipe leaves it open.
                    _ if size == u32::MAX => (whole(body, size as usize, chunk), 0),
                    _ => (whole(body, size as usize, chunk), size.into()),
                };
                return with_format("WAV", format, data, stated);
            }
            _ => {}
        }
    }
    corrupt("WAV", "there is no data chunk")
}

/// Whether a stated size is that of the rest of the file, except for multiples of 4 GiB, which 32 bits do not hold, and
/// for a few bytes that may follow the data.
fn wraps(left: u64, size: u32) -> bool {
    const FOLLOWS: u64 = 1 << 20;
    left >> 32 > 0 && left.wrapping_sub(size.into()) % (1 << 32) <= FOLLOWS
}

/// Bytes of the chunk of a Wave64 file that begins here.
fn long_chunk(bytes: &[u8]) -> Option<usize> {
    let size = u64::from_le_bytes(*bytes.get(16..)?.first_chunk()?);
    let valid = is_name(&bytes[..4]) && (24..=bytes.len() as u64).contains(&size);
    valid.then_some((size as usize).next_multiple_of(8))
}

pub(super) fn w64(bytes: &[u8]) -> Result<Option<Pcm<'_>>, Error> {
    let mut format = None;
    let size = |head: &[u8; 24]| u64::from_le_bytes(*head.last_chunk()?).checked_sub(24);
    for (head, size, at) in chunks(bytes, 40, 8, size) {
        let (body, length) = (&bytes[at..], size as usize);
        match (&head[..4], head[4..16] == W64_END) {
            (b"fmt ", true) => format = body.get(..length),
            (b"data", true) => {
                return with_format("W64", format, whole(body, length, long_chunk), size)
            }
            _ => {}
        }
    }
    corrupt("W64", "there is no data chunk")
}

/// The samples in `data`, as a format chunk describes them. None if they are of ADPCM, which `fallback` reads.
fn with_format<'a>(
    name: &'static str, format: Option<&[u8]>, data: &'a [u8], stated: u64,
) -> Result<Option<Pcm<'a>>, Error> {
    let Some(format) = format else { return corrupt(name, "the data comes before the format") };
    refuse!(format.len() < 16, corrupt(name, "the format chunk is too short"));
    let (mut tag, channels, rate) = (u16_at(format, 0), u16_at(format, 2), u32_at(format, 4));
    let (block, bits) = (usize::from(u16_at(format, 12)), usize::from(u16_at(format, 14)));
    if tag == 0xfffe && format.len() >= 26 {
        // WAVE_FORMAT_EXTENSIBLE: the first two bytes of the sub-format's GUID are the tag.
        tag = u16_at(format, 24);
    }
    let unsupported = |what: String| Err(Error::Unsupported { format: name, what });
    let encoding = match (tag, bits) {
        (1, 1..=8) => Encoding::U8,
        (1, 9..=32) => Encoding::integer(bits.div_ceil(8)).expect("of 2 to 4 bytes"),
        (3, 32) => Encoding::F32,
        (3, 64) => Encoding::F64,
        (6, _) => Encoding::ALaw,
        (7, _) => Encoding::MuLaw,
        (1 | 3, _) => return unsupported(format!("samples of {bits} bits")),
        (2 | 0x11, _) if name == "WAV" => return Ok(None),
        _ => return unsupported(format!("{} (encoding {tag:#06x})", codec(tag))),
    };
    refuse!(channels == 0, corrupt(name, "it states 0 channels"));
    // Of a block that is too small for its samples other readers take no notice either.
    let encoding = match block {
        _ if block <= usize::from(channels) * encoding.bytes() => encoding,
        _ if encoding == Encoding::I24 && block == 4 * usize::from(channels) => {
            match padded(data) {
                Some(encoding) => encoding,
                None => return unsupported("floats of 24 bits (Audition's)".into()),
            }
        }
        _ => {
            return unsupported(format!(
                "{channels} samples of {bits} bits in blocks of {block} bytes"
            ))
        }
    };
    Ok(Some(Pcm { name, rate, channels, encoding, big_endian: false, data, stated }))
}

/// The coding of 24 bits in 4 bytes, of which writers choose either end. Places all over the data say which.
fn padded(data: &[u8]) -> Option<Encoding> {
    let mut fits = [true; 2];
    for word in data.chunks_exact(4).step_by((data.len() / 4 / 256).max(1)) {
        fits[0] &= word[0] == 0;
        fits[1] &= word[3] == if word[2] & 0x80 == 0 { 0 } else { 0xff };
    }
    [Encoding::I32, Encoding::I24In4]
        .into_iter()
        .zip(fits)
        .find(|(_, fits)| *fits)
        .map(|(encoding, _)| encoding)
}

/// The name of a codec that is not read here.
fn codec(tag: u16) -> &'static str {
    match tag {
        2 | 0x11 => "ADPCM",
        0x31 => "GSM 6.10",
        0x40 | 0x64 | 0x65 | 0x14 | 0x20 | 0x38 | 0x200 => "an ADPCM of telephones",
        0x50 => "MPEG layer I or II",
        0x55 => "MP3",
        0xff | 0x1600 | 0x1602 | 0x706d => "AAC",
        0x160..=0x163 => "Windows Media Audio",
        0x2000 => "AC-3",
        0xf1ac => "FLAC",
        _ => "this codec",
    }
}

//! AIFF and AIFF-C, CAF and AU: the places of plain samples.

use super::bits::{u16_at, u32_at};
use super::pcm::{Encoding, Pcm};
use super::{corrupt, riff, Error};

/// Bytes of the AIFF chunk that begins here.
fn chunk(bytes: &[u8]) -> Option<usize> {
    let size = u32_at(bytes, 4)? as usize;
    (riff::is_name(&bytes[..4]) && size <= bytes.len()).then_some(8 + size + (size & 1))
}

pub(super) fn aiff(bytes: &[u8]) -> Result<Option<Pcm<'_>>, Error> {
    let (mut common, mut data) = (None, None);
    for (head, size, at) in
        riff::chunks(bytes, 12, 2, |head: &[u8; 8]| Some(u32_at(head, 4)?.into()))
    {
        let body = &bytes[at..];
        match &head[..4] {
            b"COMM" => common = body.get(..size as usize),
            b"SSND" if data.is_some() => return Err(Error::parts("AIFF")),
            b"SSND" => {
                let Some(offset) = u32_at(body, 0) else { break };
                let whole = riff::whole(body, size as usize, chunk);
                let before = 8usize.saturating_add(offset as usize);
                data =
                    Some((whole.get(before..).unwrap_or(&[]), size.saturating_sub(before as u64)));
            }
            _ => {}
        }
    }
    let (Some(common), Some((data, stated))) = (common.filter(|common| common.len() >= 18), data)
    else {
        return corrupt("AIFF", "there is no chunk of samples, or none that describes them");
    };
    let bits = usize::from(u16_at(common, 6).unwrap_or(0));
    let codec: &[u8; 4] = match &bytes[8..12] {
        b"AIFC" => common.get(18..22).and_then(|codec| codec.try_into().ok()).unwrap_or(b"????"),
        _ => b"NONE",
    };
    let little = codec == b"sowt";
    let encoding = match codec {
        b"NONE" | b"twos" | b"sowt" | b"in24" | b"in32" => Encoding::integer(bits.div_ceil(8)),
        b"raw " => Some(Encoding::U8),
        b"fl32" | b"FL32" => Some(Encoding::F32),
        b"fl64" | b"FL64" => Some(Encoding::F64),
        b"alaw" | b"ALAW" => Some(Encoding::ALaw),
        b"ulaw" | b"ULAW" => Some(Encoding::MuLaw),
        _ => None,
    };
    let Some(encoding) = encoding else {
        let what = format!("{bits} bits of the codec {:?}", String::from_utf8_lossy(codec));
        return Err(Error::Unsupported { format: "AIFF", what });
    };
    let rate = extended(&common[8..18]) as u32;
    let channels = u16_at(common, 0).unwrap_or(0);
    Ok(Some(Pcm { name: "AIFF", rate, channels, encoding, big_endian: !little, data, stated }))
}

/// A float of 80 bits.
fn extended(bytes: &[u8]) -> f64 {
    let exponent = i32::from(u16_at(bytes, 0).unwrap_or(0) & 0x7fff) - 16383 - 63;
    let mantissa = u64::from_be_bytes(bytes[2..10].try_into().expect("8 bytes"));
    (mantissa as f64 * f64::from(exponent).exp2()).round()
}

/// The chunks of a CAF. The last one may state -1, up to the end of the file, which is more than any other does.
pub(super) fn caf_chunks(bytes: &[u8]) -> impl Iterator<Item = (&[u8; 12], u64, usize)> {
    riff::chunks(bytes, 8, 1, |head| Some(u64::from_be_bytes(*head.last_chunk()?)))
}

/// The samples of a CAF. None if they are of a codec.
pub(super) fn caf(bytes: &[u8]) -> Result<Option<Pcm<'_>>, Error> {
    let mut format: Option<&[u8]> = None;
    for (head, size, at) in caf_chunks(bytes) {
        let body = &bytes[at..];
        match &head[..4] {
            b"desc" => format = body.get(..32),
            b"data" => {
                let Some(format) = format else { break };
                let data = body.get(4..size.min(body.len() as u64) as usize).unwrap_or(&[]);
                let stated = if size > i64::MAX as u64 { 0 } else { size };
                return Ok(described(format, data, stated.saturating_sub(4)));
            }
            _ => {}
        }
    }
    corrupt("CAF", "there is no chunk of samples, or none that describes them")
}

fn described<'a>(format: &[u8], data: &'a [u8], stated: u64) -> Option<Pcm<'a>> {
    let rate = f64::from_be_bytes(format[..8].try_into().expect("8 bytes")).round() as u32;
    let (flags, bytes) = (u32_at(format, 12)?, u32_at(format, 16)?);
    let (channels, bits) = (u32_at(format, 24)?, u32_at(format, 28)?);
    let size = bytes.checked_div(channels)? as usize;
    let encoding = match (&format[8..12], flags & 1, size) {
        (b"lpcm", 1, 4) => Encoding::F32,
        (b"lpcm", 1, 8) => Encoding::F64,
        (b"lpcm", 0, _) if bits.div_ceil(8) as usize == size => Encoding::integer(size)?,
        (b"alaw", ..) => Encoding::ALaw,
        (b"ulaw", ..) => Encoding::MuLaw,
        _ => return None,
    };
    let channels = u16::try_from(channels).ok()?;
    Some(Pcm { name: "CAF", rate, channels, encoding, big_endian: flags & 2 == 0, data, stated })
}

pub(super) fn au(bytes: &[u8]) -> Result<Option<Pcm<'_>>, Error> {
    let head: [Option<u32>; 5] = std::array::from_fn(|i| u32_at(bytes, 4 + 4 * i));
    let [Some(offset), Some(size), Some(codec), Some(rate), Some(channels)] = head else {
        return corrupt("AU", "its header is cut off");
    };
    let encoding = match codec {
        1 => Encoding::MuLaw,
        2..=5 => Encoding::integer(codec as usize - 1).expect("of 1 to 4 bytes"),
        6 => Encoding::F32,
        7 => Encoding::F64,
        27 => Encoding::ALaw,
        _ => {
            return Err(Error::Unsupported { format: "AU", what: format!("the encoding {codec}") })
        }
    };
    let rest = bytes.get(offset as usize..).unwrap_or(&[]);
    // A size of 0 or all ones was never brought up to date.
    let stated = if size == u32::MAX { 0 } else { u64::from(size) };
    let data = if stated == 0 { rest } else { &rest[..rest.len().min(size as usize)] };
    let channels = u16::try_from(channels).unwrap_or(0);
    Ok(Some(Pcm { name: "AU", rate, channels, encoding, big_endian: true, data, stated }))
}

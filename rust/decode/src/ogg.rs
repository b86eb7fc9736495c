//! The OGG container (RFC 3533): pages, packets, and the search for both. The search is bounded: bytes that only look
//! like pages are counted, and only a few pages on which no packet both begins and ends are skipped.

use super::bits::crc32;
use super::{corrupt, Error};

const CONTINUED: u8 = 1;
const FIRST: u8 = 2;
const LAST: u8 = 4;
const HEADER: usize = 27;
/// False pages (bytes that look like a page) before a search is abandoned: each costs a checksum.
const MAX_FALSE: usize = 256;
/// Pages without a complete packet that a seek skips before it falls back to the first page.
const MAX_PASSED: usize = 16;

/// Bytes of the largest page.
const MAX_PAGE: usize = HEADER + 255 + 255 * 255;

/// Samples for each byte of audible audio, at most: 4 kbit/s at 32 kHz.
const SAMPLES_PER_BYTE: u64 = 64;

/// A page's header. Its bytes are `bytes[at..at + size]`.
#[derive(Clone, Copy)]
pub(super) struct Page {
    pub at: usize,
    pub size: usize,
    flags: u8,
    pub granule: Option<i64>, // position after the last packet that ends here; None if no packet ends
    pub serial: u32,
    pub sequence: u32, // the number of the page in its stream
    segments: u8,
}

impl Page {
    /// The page at `at`, if it is complete. Its checksum is not verified.
    pub fn parse(bytes: &[u8], at: usize) -> Option<Self> {
        let header: &[u8; HEADER] = bytes.get(at..)?.first_chunk()?;
        refuse!(&header[..5] != b"OggS\0", None);
        let segments = header[26];
        let lacing = bytes.get(at + HEADER..at + HEADER + usize::from(segments))?;
        let size = HEADER + lacing.len() + lacing.iter().map(|&n| usize::from(n)).sum::<usize>();
        bytes.get(at..at + size)?;
        let granule = i64::from_le_bytes(header[6..14].try_into().expect("8 bytes"));
        let serial = u32::from_le_bytes(header[14..18].try_into().expect("4 bytes"));
        let sequence = u32::from_le_bytes(header[18..22].try_into().expect("4 bytes"));
        let granule = (granule != -1).then_some(granule);
        Some(Self { at, size, flags: header[5], granule, serial, sequence, segments })
    }

    /// Whether the checksum matches.
    fn has_valid_checksum(&self, bytes: &[u8]) -> bool {
        let page = &bytes[self.at..self.at + self.size];
        let sum = crc32(crc32(crc32(0, &page[..22]), &[0; 4]), &page[26..]);
        sum.to_le_bytes() == page[22..26]
    }

    pub fn is_first(&self) -> bool {
        self.flags & FIRST != 0
    }

    fn is_last(&self) -> bool {
        self.flags & LAST != 0
    }

    fn lacing<'a>(&self, bytes: &'a [u8]) -> &'a [u8] {
        &bytes[self.at + HEADER..self.at + HEADER + usize::from(self.segments)]
    }

    /// Packets that both begin and end here.
    fn complete_packets(&self, bytes: &[u8]) -> usize {
        let ends = self.lacing(bytes).iter().filter(|&&n| n < 255).count();
        ends.saturating_sub(usize::from(self.flags & CONTINUED != 0))
    }
}

/// The first valid page of `serial` (of any stream, if None) that begins in [from, to). `wrong` counts false pages.
pub(super) fn find(
    bytes: &[u8], mut from: usize, to: usize, serial: Option<u32>, wrong: &mut usize,
) -> Option<Page> {
    while from < to && *wrong < MAX_FALSE {
        let end = (to + 3).min(bytes.len());
        from += bytes.get(from..end)?.windows(4).position(|w| w == b"OggS")?;
        match Page::parse(bytes, from).filter(|page| page.has_valid_checksum(bytes)) {
            Some(page) if serial.is_none_or(|serial| serial == page.serial) => return Some(page),
            Some(page) => from += page.size,
            None => {
                from += 1;
                *wrong += 1;
            }
        }
    }
    None
}

/// The last valid page that begins before `to`.
pub(super) fn find_last(bytes: &[u8], mut to: usize, wrong: &mut usize) -> Option<Page> {
    while *wrong < MAX_FALSE {
        let end = (to + 3).min(bytes.len());
        to = bytes[..end].windows(4).rposition(|w| w == b"OggS")?;
        if let Some(page) = Page::parse(bytes, to).filter(|page| page.has_valid_checksum(bytes)) {
            return Some(page);
        }
        *wrong += 1;
    }
    None
}

/// The codec of a stream.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Codec {
    Vorbis,
    Opus,
}

impl Codec {
    pub fn name(self) -> &'static str {
        match self {
            Self::Vorbis => "OGG Vorbis",
            Self::Opus => "OGG Opus",
        }
    }
}

/// First bytes of streams of sound that are not read, and their names.
const OTHERS: [(&[u8], &str); 4] = [
    (b"\x7fFLAC", "FLAC in OGG"),
    (b"Speex   ", "Speex"),
    (b"CELT    ", "CELT"),
    (b"PCM     ", "plain samples in OGG"),
];

/// The one stream of sound, and its serial number. Streams may be multiplexed, for example with pictures: the first
/// pages of all of them come at the beginning.
/// Errors: Several streams of sound, or one that is not read.
pub(super) fn stream(bytes: &[u8]) -> Result<(Codec, u32), Error> {
    let (mut at, mut tracks, mut found) = (0, 0, None);
    let mut other = "a stream of another codec than Vorbis and Opus";
    while let Some(page) = Page::parse(bytes, at).filter(Page::is_first) {
        at += page.size;
        let body = &bytes[page.at + HEADER + usize::from(page.segments)..at];
        let of_other = OTHERS.iter().find(|(magic, _)| body.starts_with(magic));
        let codec = match body {
            _ if body.starts_with(b"\x01vorbis") => Some(Codec::Vorbis),
            _ if body.starts_with(b"OpusHead") => Some(Codec::Opus),
            _ => None,
        };
        tracks += usize::from(codec.is_some() || of_other.is_some());
        found = found.or(codec.map(|codec| (codec, page.serial)));
        other = of_other.map_or(other, |(_, name)| name);
    }
    refuse!(at == 0, corrupt("OGG", "the first page is cut off"));
    refuse!(tracks > 1, Err(Error::tracks("OGG", tracks)));
    found.ok_or_else(|| Error::Unsupported { format: "OGG", what: other.into() })
}

/// The last page of a stream that has a position. `audio` is the start of its first audio page.
pub(super) fn last_page(bytes: &[u8], audio: usize, serial: u32) -> Option<Page> {
    let mut wrong = 0;
    let mut to = bytes.len();
    while to > audio {
        let page = find_last(bytes, to, &mut wrong)?;
        if page.at < audio {
            return None;
        }
        if page.serial != serial {
            break;
        }
        if page.granule.is_some() {
            return Some(page);
        }
        to = page.at;
    }
    // Another stream comes last (multiplexed or chained): walk the pages until this one ends.
    let mut last = None;
    let mut at = audio;
    while let Some(page) = find(bytes, at, bytes.len(), Some(serial), &mut wrong) {
        if page.granule.is_some() {
            last = Some(page);
        }
        if page.is_last() {
            break;
        }
        at = page.at + page.size;
    }
    last
}

/// Whether the bytes end inside a page, as those of a file that was cut short do.
pub(super) fn is_cut(bytes: &[u8]) -> bool {
    let tail = bytes.len().saturating_sub(MAX_PAGE);
    let last = bytes[tail..].windows(5).rposition(|w| w == b"OggS\0");
    last.is_some_and(|at| Page::parse(bytes, tail + at).is_none())
}

/// Whether the packets from `audio` on can hold so many samples, of which each has `longest` at most. A page may state
/// any position. Packets are counted only if the samples are many for the bytes: silence, or a false position.
pub(super) fn can_hold(
    bytes: &[u8], audio: usize, serial: u32, samples: u64, longest: u64,
) -> bool {
    if samples / SAMPLES_PER_BYTE <= bytes.len().saturating_sub(audio) as u64 {
        return true;
    }
    let (mut packets, mut at, mut wrong) = (0u64, audio, 0);
    while let Some(page) = find(bytes, at, bytes.len(), Some(serial), &mut wrong) {
        packets += page.lacing(bytes).iter().filter(|&&n| n < 255).count() as u64;
        at = page.at + page.size;
    }
    samples <= packets.saturating_mul(longest)
}

/// The last page at or before position `target` from whose last packet decoding can begin. None for the first page.
pub(super) fn seek(bytes: &[u8], audio: usize, serial: u32, mut target: i64) -> Option<Page> {
    let mut wrong = 0;
    for _ in 0..MAX_PASSED {
        let mut best: Option<Page> = None;
        // Pages that begin before `low` are no better than `best`; those from `high` on are beyond `target`.
        let (mut low, mut high) = (audio, bytes.len());
        while low < high {
            let middle = low + (high - low) / 2;
            // Pages without a position are skipped.
            let mut from = middle;
            let page = loop {
                match find(bytes, from, high, Some(serial), &mut wrong) {
                    Some(page) if page.granule.is_none() => from = page.at + page.size,
                    page => break page,
                }
            };
            match page {
                Some(page) if page.granule.is_some_and(|granule| granule <= target) => {
                    best = Some(page);
                    low = page.at + page.size;
                }
                _ => high = middle,
            }
        }
        let page = best?;
        if page.complete_packets(bytes) > 0 {
            return Some(page);
        }
        // Its last packet began on an earlier page.
        target = page.granule?.checked_sub(1)?;
    }
    None
}

/// A packet, and its page's statements about it.
pub(super) struct Packet<'a> {
    pub data: &'a [u8],
    pub granule: Option<i64>, // the page's position, when this is the last packet that ends there
    pub last_page: bool,      // whether the stream ends with that page
}

/// The packets of one logical stream, from a page on. The rest of a packet that began on an earlier page is dropped.
pub(super) struct Packets<'a, 's> {
    bytes: &'a [u8],
    serial: u32,
    page: Option<Page>,
    segment: usize, // the next lacing value of the page, and where its bytes begin
    body: usize,
    next: usize,             // where the next page is expected
    pieces: &'s mut Vec<u8>, // the packet that spans pages, as far as it was read
    started: bool,           // whether `pieces` holds the beginning of a packet
    wrong: usize,            // false pages seen so far
}

impl<'a, 's> Packets<'a, 's> {
    pub fn new(bytes: &'a [u8], at: usize, serial: u32, pieces: &'s mut Vec<u8>) -> Self {
        Self {
            bytes,
            serial,
            page: None,
            segment: 0,
            body: 0,
            next: at,
            pieces,
            started: false,
            wrong: 0,
        }
    }

    /// The expected start of the next page: after a packet that ends its page, the end of that page.
    pub fn at(&self) -> usize {
        self.next
    }

    /// The next packet. None at the end of the stream.
    pub fn next(&mut self) -> Result<Option<Packet<'_>>, Error> {
        loop {
            let Some(page) = self.page else {
                if !self.turn()? {
                    return Ok(None);
                }
                continue;
            };
            let lacing = page.lacing(self.bytes);
            let rest = &lacing[self.segment..];
            let Some(n) = rest.iter().position(|&n| n < 255) else {
                // The packet continues on the next page.
                let body = &self.bytes[self.body..page.at + page.size];
                if self.segment > 0 || page.flags & CONTINUED == 0 {
                    self.pieces.clear();
                    self.started = !rest.is_empty();
                }
                if self.started {
                    self.pieces.extend_from_slice(body);
                }
                self.page = None;
                continue;
            };
            let size = rest[..=n].iter().map(|&n| usize::from(n)).sum::<usize>();
            let continued = self.segment == 0 && page.flags & CONTINUED != 0;
            let begin = self.body;
            self.segment += n + 1;
            self.body += size;
            if continued && !self.started {
                continue;
            }
            let more = lacing[self.segment..].iter().any(|&n| n < 255);
            let granule = if more { None } else { page.granule };
            let body = &self.bytes[begin..begin + size];
            let data = if continued {
                self.pieces.extend_from_slice(body);
                self.started = false;
                &self.pieces[..]
            } else {
                body
            };
            return Ok(Some(Packet { data, granule, last_page: page.is_last() }));
        }
    }

    /// Moves to the next page of the stream. False at its end.
    fn turn(&mut self) -> Result<bool, Error> {
        loop {
            let Some(page) = Page::parse(self.bytes, self.next) else {
                // Truncated here, or other bytes between the pages.
                match find(
                    self.bytes,
                    self.next,
                    self.bytes.len(),
                    Some(self.serial),
                    &mut self.wrong,
                ) {
                    Some(page) => self.next = page.at,
                    None => return Ok(false),
                }
                continue;
            };
            self.next += page.size;
            if page.serial != self.serial {
                continue;
            }
            refuse!(
                !page.has_valid_checksum(self.bytes),
                corrupt("OGG", "a page's checksum does not match")
            );
            self.started &= page.flags & CONTINUED != 0;
            self.page = Some(page);
            self.segment = 0;
            self.body = page.at + HEADER + usize::from(page.segments);
            return Ok(true);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    fn page(flags: u8, granule: i64, serial: u32, lacing: &[u8]) -> Vec<u8> {
        let mut page = b"OggS\0".to_vec();
        page.push(flags);
        page.extend(granule.to_le_bytes());
        page.extend(serial.to_le_bytes());
        page.extend([0; 8]);
        page.push(lacing.len() as u8);
        page.extend(lacing);
        page.resize(page.len() + lacing.iter().map(|&n| usize::from(n)).sum::<usize>(), 0);
        let sum = crc32(0, &page).to_le_bytes();
        page[22..26].copy_from_slice(&sum);
        page
    }

    #[test]
    fn a_position_beyond_the_packets_is_refused() {
        let data = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/decode");
        for name in ["vorbis_32k_mono.ogg", "opus_48k_stereo.opus"] {
            let whole = std::fs::read(data.join(name)).expect("the tests' recordings");
            let serial = Page::parse(&whole, 0).unwrap().serial;
            let lie = [&whole[..], &page(LAST, 1 << 50, serial, &[1])].concat();
            assert!(crate::Decoder::default().info(&whole).is_ok());
            assert!(
                matches!(crate::Decoder::default().info(&lie), Err(Error::Corrupt { .. })),
                "{name}"
            );
        }
        let silence = page(0, 0, 7, &[1; 255]);
        assert!(
            can_hold(&silence, 0, 7, 255 * 4096, 4096)
                && !can_hold(&silence, 0, 7, 255 * 4096 + 1, 4096)
        );
    }

    /// Streams that begin well and then only cost time: more than a megabyte of each is read, or refused, quickly.
    #[test]
    fn no_endless_pages_hang() {
        let data = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/decode");
        for name in ["vorbis_32k_mono.ogg", "opus_48k_stereo.opus"] {
            let whole = std::fs::read(data.join(name)).expect("the tests' recordings");
            let serial = Page::parse(&whole, 0).unwrap().serial;
            let mut headers = 0;
            for _ in 0..2 {
                headers += Page::parse(&whole, headers).unwrap().size;
            }
            let false_page = [b"OggS\0\0".as_slice(), &[0; 20], &[255; 9]].concat();
            type Pages<'a> = (&'a str, &'a dyn Fn(i64) -> Vec<u8>);
            let pages: [Pages; 8] = [
                ("empty", &|_| page(0, -1, serial, &[])),
                ("empty, with positions", &|i| page(0, i, serial, &[])),
                ("of another stream", &|i| page(0, i, serial ^ 1, &[1])),
                ("without positions", &|_| page(0, -1, serial, &[1; 255])),
                ("of a packet that never ends", &|_| page(CONTINUED, -1, serial, &[255; 4])),
                ("that only end and begin packets", &|i| page(CONTINUED, i, serial, &[1, 255])),
                ("after many false ones", &|i| {
                    [false_page.repeat(MAX_FALSE - 1), page(0, i, serial, &[1])].concat()
                }),
                ("false", &|_| false_page.clone()),
            ];
            for (kind, make) in pages {
                let mut bytes = whole[..headers].to_vec();
                for i in 0.. {
                    bytes.extend(make(i));
                    if bytes.len() > 3 << 20 {
                        break;
                    }
                }
                for end in [
                    vec![],
                    page(LAST, i64::MAX, serial, &[1]),
                    page(LAST, 100_000_000, serial, &[1; 255]),
                ] {
                    let begin = Instant::now();
                    let _ = crate::probe(&[&bytes[..], &end].concat());
                    let limit = Duration::from_secs(if cfg!(debug_assertions) { 60 } else { 10 });
                    assert!(begin.elapsed() < limit, "{name}, pages {kind}: {:?}", begin.elapsed());
                }
            }
        }
    }
}

//! The OGG container (RFC 3533): pages and packets.

use super::bits::crc32;
use super::{corrupt, Error};

const CONTINUED: u8 = 1;
const FIRST: u8 = 2;
const LAST: u8 = 4;
const HEADER: usize = 27;
/// Places that look like pages but are not, before a search is given up: each costs a checksum.
const MAX_FALSE: usize = 256;

/// A page's header; its bytes are `bytes[at..at + size]`.
#[derive(Clone, Copy)]
pub(super) struct Page {
    pub at: usize,
    pub size: usize,
    flags: u8,
    /// Position after the last packet that ends here; None where none does.
    pub granule: Option<i64>,
    pub serial: u32,
    segments: u8,
}

impl Page {
    /// The page at `at`, when it is whole. Its checksum is another matter.
    pub fn parse(bytes: &[u8], at: usize) -> Option<Self> {
        let header: &[u8; HEADER] = bytes.get(at..)?.first_chunk()?;
        if &header[..5] != b"OggS\0" {
            return None;
        }
        let segments = header[26];
        let lacing = bytes.get(at + HEADER..at + HEADER + usize::from(segments))?;
        let size = HEADER + lacing.len() + lacing.iter().map(|&n| usize::from(n)).sum::<usize>();
        bytes.get(at..at + size)?;
        let granule = i64::from_le_bytes(header[6..14].try_into().expect("8 bytes"));
        let serial = u32::from_le_bytes(header[14..18].try_into().expect("4 bytes"));
        Some(Self { at, size, flags: header[5], granule: (granule != -1).then_some(granule), serial, segments })
    }

    pub fn is_sound(&self, bytes: &[u8]) -> bool {
        let page = &bytes[self.at..self.at + self.size];
        let sum = crc32(crc32(crc32(0, &page[..22]), &[0; 4]), &page[26..]);
        sum.to_le_bytes() == page[22..26]
    }

    pub fn is_first(&self) -> bool {
        self.flags & FIRST != 0
    }

    pub fn is_last(&self) -> bool {
        self.flags & LAST != 0
    }

    fn lacing<'a>(&self, bytes: &'a [u8]) -> &'a [u8] {
        &bytes[self.at + HEADER..self.at + HEADER + usize::from(self.segments)]
    }

    /// Packets that end here and begin here as well.
    pub fn whole_packets(&self, bytes: &[u8]) -> usize {
        let ends = self.lacing(bytes).iter().filter(|&&n| n < 255).count();
        ends.saturating_sub(usize::from(self.flags & CONTINUED != 0))
    }
}

/// The first sound page of `serial` (of any stream, if None) that begins in [from, to).
pub(super) fn find(bytes: &[u8], mut from: usize, to: usize, serial: Option<u32>) -> Option<Page> {
    let mut wrong = 0;
    while from < to && wrong < MAX_FALSE {
        let end = (to + 3).min(bytes.len());
        from += bytes.get(from..end)?.windows(4).position(|w| w == b"OggS")?;
        match Page::parse(bytes, from).filter(|page| page.is_sound(bytes)) {
            Some(page) if serial.is_none_or(|serial| serial == page.serial) => return Some(page),
            Some(page) => from += page.size,
            None => {
                from += 1;
                wrong += 1;
            }
        }
    }
    None
}

/// The last sound page that begins before `to`.
pub(super) fn find_last(bytes: &[u8], mut to: usize) -> Option<Page> {
    for _ in 0..MAX_FALSE {
        let end = (to + 3).min(bytes.len());
        to = bytes[..end].windows(4).rposition(|w| w == b"OggS")?;
        if let Some(page) = Page::parse(bytes, to).filter(|page| page.is_sound(bytes)) {
            return Some(page);
        }
    }
    None
}

/// A packet, and what its page says of it.
pub(super) struct Packet<'a> {
    pub data: &'a [u8],
    /// The page's position, when this is the last packet that ends there.
    pub granule: Option<i64>,
    /// Whether the stream ends with that page.
    pub last_page: bool,
}

/// The packets of one logical stream, from a page on. What is left of a packet that began earlier is dropped.
pub(super) struct Packets<'a, 's> {
    bytes: &'a [u8],
    serial: u32,
    page: Option<Page>,
    /// Next lacing value of the page, and where its bytes begin.
    segment: usize,
    body: usize,
    /// Where the next page is sought.
    next: usize,
    /// Holds a packet that spans pages.
    pieces: &'s mut Vec<u8>,
    /// Whether `pieces` holds the beginning of a packet.
    begun: bool,
}

impl<'a, 's> Packets<'a, 's> {
    pub fn new(bytes: &'a [u8], at: usize, serial: u32, pieces: &'s mut Vec<u8>) -> Self {
        Self { bytes, serial, page: None, segment: 0, body: 0, next: at, pieces, begun: false }
    }

    /// Where the next page would begin: after a packet that ends its page, the end of that page.
    pub fn at(&self) -> usize {
        self.next
    }

    /// The next packet; None at the end of the stream.
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
                // The packet goes on in the next page.
                let body = &self.bytes[self.body..page.at + page.size];
                if self.segment > 0 || page.flags & CONTINUED == 0 {
                    self.pieces.clear();
                    self.begun = !rest.is_empty();
                }
                if self.begun {
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
            if continued && !self.begun {
                continue;
            }
            let more = lacing[self.segment..].iter().any(|&n| n < 255);
            let granule = if more { None } else { page.granule };
            let body = &self.bytes[begin..begin + size];
            let data = if continued {
                self.pieces.extend_from_slice(body);
                self.begun = false;
                &self.pieces[..]
            } else {
                body
            };
            return Ok(Some(Packet { data, granule, last_page: page.is_last() }));
        }
    }

    /// Goes to the next page of the stream; false at its end.
    fn turn(&mut self) -> Result<bool, Error> {
        loop {
            let Some(page) = Page::parse(self.bytes, self.next) else {
                // Cut off here, or bytes of something else between the pages.
                match find(self.bytes, self.next, self.bytes.len(), Some(self.serial)) {
                    Some(page) => self.next = page.at,
                    None => return Ok(false),
                }
                continue;
            };
            self.next += page.size;
            if page.serial != self.serial {
                continue;
            }
            if !page.is_sound(self.bytes) {
                return corrupt("OGG", "a page's checksum does not match");
            }
            self.begun &= page.flags & CONTINUED != 0;
            self.page = Some(page);
            self.segment = 0;
            self.body = page.at + HEADER + usize::from(page.segments);
            return Ok(true);
        }
    }
}

//! OGG files that hold one recording after the other ("chained", as joining files makes them): each link is read by
//! itself.

use super::ogg::{self, Codec, Page};
use super::{Error, Info};

/// A file up to this size is walked page by page: links may have the same serial number.
const SMALL: usize = 1 << 20;
/// Places of a larger file at which the number of the page must be larger than at the place before.
const PROBES: usize = 16;
const FORMAT: &str = "OGG";

/// One link of a chain.
#[derive(Clone, Copy)]
pub(super) struct Link {
    pub codec: Codec,
    pub serial: u32,
    begin: usize,
    end: usize,
    first: u64, // the number of its first sample in the whole recording, and of its samples
    frames: u64,
}

impl Link {
    pub fn bytes<'a>(&self, bytes: &'a [u8]) -> &'a [u8] {
        &bytes[self.begin..self.end]
    }
}

/// The links of the recording that was opened last. Empty if it is of one piece.
#[derive(Default)]
pub(super) struct Chain {
    key: Option<(usize, usize, u64)>,
    links: Vec<Link>,
    refused: Option<Error>, // the first link that is not read
}

impl Chain {
    pub fn forget(&mut self) {
        self.key = None;
    }

    /// Finds the links. Returns whether there are several. Then [`Chain::info`] must follow.
    pub fn find(&mut self, bytes: &[u8], serial: u32) -> bool {
        let key = Some(super::mp3::key(bytes));
        if self.key == key {
            return !self.links.is_empty();
        }
        self.key = key;
        self.links.clear();
        self.refused = None;
        if bytes.len() > SMALL && !is_chained(bytes, serial) {
            return false;
        }
        // A link begins with the first page of a stream, after pages that are none.
        let (mut at, mut wrong, mut heads) = (0, 0, true);
        let mut begin = 0;
        while let Some(page) =
            Page::parse(bytes, at).or_else(|| ogg::find(bytes, at, bytes.len(), None, &mut wrong))
        {
            if page.is_first() && !heads {
                self.push(bytes, begin, page.at);
                begin = page.at;
            }
            heads = page.is_first();
            at = page.at + page.size;
        }
        if begin > 0 {
            self.push(bytes, begin, bytes.len());
        }
        begin > 0
    }

    fn push(&mut self, bytes: &[u8], begin: usize, end: usize) {
        match ogg::stream(&bytes[begin..end]) {
            Ok((codec, serial)) => {
                self.links.push(Link { codec, serial, begin, end, first: 0, frames: 0 });
            }
            // One that is cut off holds nothing.
            Err(error @ Error::Unsupported { .. }) => {
                self.refused.get_or_insert(error);
            }
            Err(_) => {}
        }
    }

    /// Rate, channels and length of the whole, with `of` a link.
    /// Errors: Those of `of`, links of several rates or numbers of channels, and one that is not read.
    pub fn info(
        &mut self, mut of: impl FnMut(&Link) -> Result<Info, Error>,
    ) -> Result<Info, Error> {
        if let Some(error) = &self.refused {
            return Err(error.clone());
        }
        let mut whole: Option<Info> = None;
        for link in &mut self.links {
            let info = match of(link) {
                Err(Error::NoAudio { .. }) => continue,
                info => info?,
            };
            let before = whole.get_or_insert(Info { frames: 0, ..info });
            let seconds = before.frames as f64 / f64::from(before.rate.max(1));
            if let Some(what) =
                changes((before.rate, before.channels), (info.rate, info.channels), seconds)
            {
                return Err(Error::Unsupported { format: FORMAT, what });
            }
            (link.first, link.frames) = (before.frames, info.frames);
            before.frames = before.frames.saturating_add(info.frames);
        }
        whole.ok_or(Error::NoAudio { format: FORMAT })
    }

    /// Reads `out` from `start` on, a link at a time: `read` is given the link, its first sample and its part of `out`.
    pub fn read(
        &self, start: u64, out: &mut [f32],
        mut read: impl FnMut(&Link, u64, &mut [f32]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut done = 0;
        for link in &self.links {
            let from = start + done as u64;
            if done == out.len() || from < link.first || from - link.first >= link.frames {
                continue;
            }
            let n = (link.frames - (from - link.first)).min((out.len() - done) as u64) as usize;
            read(link, from - link.first, &mut out[done..done + n])?;
            done += n;
        }
        if done < out.len() {
            return super::corrupt(FORMAT, "the links end before the stated length");
        }
        Ok(())
    }
}

/// The change from one part of a joined recording (rate, channels) to the next one, in words.
pub(super) fn changes(before: (u32, u16), after: (u32, u16), seconds: f64) -> Option<String> {
    let what = match (before.0 == after.0, before.1 == after.1) {
        (false, _) => format!("rate changes from {} to {} Hz", before.0, after.0),
        (true, false) => format!("number of channels changes from {} to {}", before.1, after.1),
        (true, true) => return None,
    };
    Some(format!("a recording whose {what} after {seconds:.3} s (joined files)"))
}

/// Whether a large file may have several links: it ends with another stream, or its pages' numbers begin again.
fn is_chained(bytes: &[u8], serial: u32) -> bool {
    let mut wrong = 0;
    if ogg::find_last(bytes, bytes.len(), &mut wrong).is_none_or(|page| page.serial != serial) {
        return true;
    }
    let mut before = 0;
    (1..=PROBES).any(|i| {
        let at = bytes.len() / (PROBES + 1) * i;
        let page = ogg::find(bytes, at, at + SMALL / 8, Some(serial), &mut wrong);
        let number = page.map_or(before, |page| page.sequence);
        std::mem::replace(&mut before, number) > number
    })
}

//! Shards that are still being copied: which parts of a file are there.
//!
//! `loaders/audio/remote.py` copies a shard of a store into a file that has its full size from the start. Beside it, until all of it is
//! there, lies `.NAME.parts`: eight bytes with the size of a part, and a byte for each part. Who needs a part that is not there
//! marks it as wanted, so that it comes next, and waits.

use jaxtrain_decode::refuse;
use std::fs::OpenOptions;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use memmap2::{MmapOptions, MmapRaw};

const ABSENT: u8 = 0;
const THERE: u8 = 1;
const WANTED: u8 = 2;
const FAILED: u8 = 3;
const HEAD: usize = 8; // [bytes] before the parts
const POLL: Duration = Duration::from_millis(2);

/// Which bytes of a shard can be read.
pub(super) struct There(Option<(MmapRaw, u64)>); // None: all of them

impl There {
    pub fn all() -> Self {
        Self(None)
    }

    /// Of a shard of `len` bytes that may still be copied.
    pub fn open(shard: &Path, len: u64) -> io::Result<Self> {
        let name = format!(".{}.parts", shard.file_name().unwrap_or_default().to_string_lossy());
        let file = match OpenOptions::new().read(true).write(true).open(shard.with_file_name(name)) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Self::all()), // it became whole
            Err(error) => return Err(error),
        };
        let damaged = || io::Error::other("its list of parts is damaged; remove the copy");
        let found = usize::try_from(file.metadata()?.len()).ok().filter(|&found| found > HEAD).ok_or_else(damaged)?;
        let map = MmapOptions::new().len(found).map_raw(&file)?;
        // SAFETY: the map has more than HEAD bytes, which nobody writes any more.
        let size = u64::from_le_bytes(unsafe { map.as_ptr().cast::<[u8; HEAD]>().read_unaligned() });
        refuse!(size == 0 || len.div_ceil(size) != (found - HEAD) as u64, Err(damaged()));
        Ok(Self(Some((map, size))))
    }

    /// Asks for bytes [start, end) without waiting for them.
    pub fn want(&self, start: u64, end: u64) {
        self.parts(start, end).for_each(|part| {
            let _ = part.compare_exchange(ABSENT, WANTED, Ordering::AcqRel, Ordering::Relaxed);
        });
    }

    /// Waits until bytes [start, end) are there. Returns whether they are: not where `stop` says so meanwhile.
    /// Errors: They cannot be had.
    pub fn wait(&self, start: u64, end: u64, stop: &dyn Fn() -> bool) -> Result<bool, String> {
        self.want(start, end);
        for part in self.parts(start, end) {
            loop {
                match part.load(Ordering::Acquire) {
                    THERE => break,
                    FAILED => return Err("is not all there, and the rest cannot be had".into()),
                    _ if stop() => return Ok(false),
                    ABSENT => self.want(start, end), // whoever copied was replaced
                    _ => {}
                }
                std::thread::sleep(POLL);
            }
        }
        Ok(true)
    }

    /// The parts that hold bytes [start, end).
    fn parts(&self, start: u64, end: u64) -> impl Iterator<Item = &AtomicU8> + '_ {
        self.0.iter().flat_map(move |(map, size)| {
            let n = map.len() - HEAD;
            let last = usize::try_from(end.div_ceil(*size)).unwrap_or(n).min(n);
            let first = usize::try_from(start / size).unwrap_or(n).min(last);
            // SAFETY: in the map, which lives as long as the reference; it is only accessed as atomic bytes.
            (first..last).map(move |k| unsafe { &*map.as_ptr().add(HEAD + k).cast::<AtomicU8>() })
        })
    }
}

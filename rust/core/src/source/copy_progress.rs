//! The progress of shards that are still being copied: which parts of a file are present.
//!
//! `loaders/audio/remote.py` copies a shard of a store into a file that has its full size from the start. Until the
//! file is complete, `.NAME.parts` lies next to it: eight bytes with the size of a part, and a byte for each part. A
//! reader that needs an absent part marks it as wanted, so that it is copied next, and waits.

use jaxtrain_decode::refuse;
use std::fs::OpenOptions;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use memmap2::{MmapOptions, MmapRaw};

const ABSENT: u8 = 0;
const PRESENT: u8 = 1;
const WANTED: u8 = 2;
const FAILED: u8 = 3;
const HEAD: usize = 8; // [bytes] before the parts
const POLL: Duration = Duration::from_millis(2);

/// The bytes of a shard that can be read.
pub(super) struct CopyProgress(Option<(MmapRaw, u64)>); // None: all of them

impl CopyProgress {
    pub fn complete() -> Self {
        Self(None)
    }

    /// The progress of a shard of `len` bytes that may still be copied.
    pub fn open(shard: &Path, len: u64) -> io::Result<Self> {
        let name = format!(".{}.parts", shard.file_name().unwrap_or_default().to_string_lossy());
        let file = match OpenOptions::new().read(true).write(true).open(shard.with_file_name(name))
        {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Self::complete()), // it became complete
            Err(error) => return Err(error),
        };
        let damaged = || io::Error::other("its list of parts is damaged; remove the copy");
        let found = usize::try_from(file.metadata()?.len())
            .ok()
            .filter(|&found| found > HEAD)
            .ok_or_else(damaged)?;
        let map = MmapOptions::new().len(found).map_raw(&file)?;
        // SAFETY: the map has more than HEAD bytes, which are not written any more.
        let size =
            u64::from_le_bytes(unsafe { map.as_ptr().cast::<[u8; HEAD]>().read_unaligned() });
        refuse!(size == 0 || len.div_ceil(size) != (found - HEAD) as u64, Err(damaged()));
        Ok(Self(Some((map, size))))
    }

    /// Asks for bytes [start, end) without waiting for them.
    pub fn want(&self, start: u64, end: u64) {
        self.parts(start, end).for_each(|part| {
            let _ = part.compare_exchange(ABSENT, WANTED, Ordering::AcqRel, Ordering::Relaxed);
        });
    }

    /// Waits until bytes [start, end) are present. Returns whether they are: false if `stop` asks to stop waiting.
    /// Errors: They cannot be copied.
    pub fn wait(&self, start: u64, end: u64, stop: &dyn Fn() -> bool) -> Result<bool, String> {
        self.want(start, end);
        for part in self.parts(start, end) {
            loop {
                match part.load(Ordering::Acquire) {
                    PRESENT => break,
                    FAILED => return Err("is incomplete, and the rest cannot be copied".into()),
                    _ if stop() => return Ok(false),
                    ABSENT => self.want(start, end), // another process copies now
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

//! Counters that show where time and memory go.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Stages of `Diagnostics::seconds`, summed over the workers, except "wait", which is the consumer's wait for a batch.
///
/// - "read" finds the recording: it opens its file or decompresses its page.
/// - "seek" reads its headers and finds its length.
/// - "idle" is waiting for a consumer that is slower than the workers.
///
/// The bytes of mapped files are read when they are
/// first accessed, in "seek" and "decode".
pub const STAGES: [&str; 7] = ["read", "seek", "decode", "resample", "fbank", "idle", "wait"];
pub(super) const READ: usize = 0;
pub(super) const SEEK: usize = 1;
pub(super) const DECODE: usize = 2;
pub(super) const RESAMPLE: usize = 3;
pub(super) const FBANK: usize = 4;
pub(super) const IDLE: usize = 5;
pub(super) const WAIT: usize = 6;

/// A snapshot of a pipeline's counters.
pub struct Diagnostics {
    pub queued: usize, // complete batches that wait for the consumer
    pub threads: usize,
    pub slabs: usize,
    pub rows: u64,        // written, padding included
    pub bad: u64,         // distinct recordings
    pub bad_allowed: u64, // more than this is an error
    pub bad_list: Vec<(u32, String)>,
    pub seconds: [f64; STAGES.len()],  // by stage
    pub slowest: Option<&'static str>, // of the workers' stages, by seconds
    pub bytes_ahead: u64,              // requested from the system in advance (block order)
    pub slow_rows: u64,                // of formats that have no decoder here; see decode::fallback
}

/// Counters that the workers add to.
#[derive(Default)]
pub(super) struct Counters {
    pub rows: AtomicU64,
    pub bytes_ahead: AtomicU64,
    pub slow_rows: AtomicU64,
    nanos: [AtomicU64; STAGES.len()],
}

impl Counters {
    /// Adds the time since `begin` to a stage.
    pub fn time(&self, stage: usize, begin: Instant) {
        self.nanos[stage].fetch_add(begin.elapsed().as_nanos() as u64, Ordering::Relaxed);
    }

    /// Seconds of each stage.
    pub fn seconds(&self) -> [f64; STAGES.len()] {
        std::array::from_fn(|stage| self.nanos[stage].load(Ordering::Relaxed) as f64 * 1e-9)
    }
}

/// The workers' stage with the most seconds; None before any work.
pub(super) fn slowest(seconds: &[f64; STAGES.len()]) -> Option<&'static str> {
    let worked = (READ..=FBANK).filter(|&stage| seconds[stage] > 0.0);
    worked.max_by(|&a, &b| seconds[a].total_cmp(&seconds[b])).map(|stage| STAGES[stage])
}

//! Reading ahead in the block order, for file systems where a request takes long.

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::Shared;
use crate::order::Order;

/// Bytes of one window that are requested ahead; the rest is read when it is needed.
const AHEAD: u64 = 4 << 30;
/// How often the workers' progress is checked.
const POLL: Duration = Duration::from_millis(50);

/// Asks the system for the bytes of the block order's current window and of the next one, in the order in which they lie
/// in the shards, while the workers are in the current one: never more than two windows ahead, nor `AHEAD` bytes in
/// each. Returns when the pipeline is closed.
pub(super) fn run(shared: &Shared) {
    let Order::Block(blocks) = &shared.order else { return };
    let (n, batch) = (blocks.n(), shared.config.batch as u64);
    let (mut from, mut to) = (0u64, 0u64); // samples that were requested
    let mut rows = Vec::new();
    loop {
        if shared.queue.is_closed() {
            return;
        }
        let Some(now) = shared.queue.upcoming().and_then(|position| position.checked_mul(batch)) else {
            shared.queue.wait_for_work(POLL);
            continue;
        };
        if !(from..=to).contains(&now) {
            // A seek moved the workers outside what was requested.
            (from, to) = (now, now);
        }
        let end = |sample: u64| sample - sample % n + blocks.window(sample / n, sample % n).1;
        if to >= end(end(now)) {
            shared.queue.wait_for_work(POLL);
            continue;
        }
        let stop = end(to);
        let order = shared.order.epoch(to / n);
        rows.clear();
        for sample in to..stop {
            // Other processes request theirs.
            if shared.config.ranges.iter().any(|&(a, b)| (a as u64..b as u64).contains(&(sample % batch))) {
                rows.push(shared.config.rows[order.at(sample % n) as usize]);
            }
        }
        rows.sort_unstable();
        let mut left = AHEAD;
        for row in &rows {
            let bytes = shared.index.advise(*row as usize, left);
            left -= bytes;
            shared.counters.bytes_ahead.fetch_add(bytes, Ordering::Relaxed);
            if shared.queue.is_closed() {
                return;
            }
        }
        to = stop;
    }
}

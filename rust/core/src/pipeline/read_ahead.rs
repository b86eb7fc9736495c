//! Reading ahead in the block order, for file systems with slow requests.

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::Shared;
use crate::order::Order;

/// Bytes of one window that are requested ahead, at most. The rest is read when it is needed.
const MAX_AHEAD: u64 = 4 << 30;
/// The time between two checks of the workers' progress.
const POLL: Duration = Duration::from_millis(50);

/// Asks the system for the bytes of the block order's current window and of the next one, while the workers are in the
/// current one. It asks in the order of the shards, for at most `MAX_AHEAD` bytes of each window. Returns when the
/// pipeline is closed.
pub(super) fn run(shared: &Shared) {
    let Order::Block(blocks) = &shared.order else { return };
    let (n, batch) = (blocks.n(), shared.config.batch as u64);
    let (mut from, mut to) = (0u64, 0u64); // examples that were requested
    let mut rows = Vec::new();
    loop {
        if shared.queue.is_closed() {
            return;
        }
        let Some(now) = shared.queue.upcoming().and_then(|position| position.checked_mul(batch))
        else {
            shared.queue.wait_for_work(POLL);
            continue;
        };
        if !(from..=to).contains(&now) {
            // A seek moved the workers outside the requested examples.
            (from, to) = (now, now);
        }
        let end = |example: u64| example - example % n + blocks.window(example / n, example % n).1;
        if to >= end(end(now)) {
            shared.queue.wait_for_work(POLL);
            continue;
        }
        let stop = end(to);
        let order = shared.order.epoch(to / n);
        rows.clear();
        for example in to..stop {
            // Other processes request theirs.
            if shared
                .config
                .ranges
                .iter()
                .any(|&(a, b)| (a as u64..b as u64).contains(&(example % batch)))
            {
                rows.push(shared.config.rows[order.at(example % n) as usize]);
            }
        }
        rows.sort_unstable();
        let mut left = MAX_AHEAD;
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

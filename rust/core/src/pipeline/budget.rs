//! Recordings that could not be used: counted once each, listed with their reason, and limited by a budget.

use std::fmt::Write;
use std::sync::Mutex;

use super::lock;

/// Unusable recordings that are kept with their reason. All are counted.
const MAX_LISTED: usize = 100;

/// Entries of the list that an error message shows.
const MAX_SHOWN: usize = 10;

pub(super) struct Budget {
    allowed: u64,
    n: u64,
    bad: Mutex<Bad>,
}

struct Bad {
    seen: Vec<u64>, // one bit for each row of the index
    total: u64,
    list: Vec<(u32, String)>,
}

impl Budget {
    /// For the `n` recordings of a split, of which `allowed` may be unusable, in an index of `n_rows`.
    pub fn new(n: u64, allowed: u64, n_rows: usize) -> Self {
        Self {
            allowed,
            n,
            bad: Mutex::new(Bad { seen: vec![0; n_rows.div_ceil(64)], total: 0, list: Vec::new() }),
        }
    }

    /// Counts an unusable recording, unless it was counted before.
    /// Errors: More unusable recordings than the budget allows.
    pub fn record(&self, row: u32, reason: String) -> Result<(), String> {
        let (word, bit) = (row as usize / 64, 1 << (row % 64));
        let mut bad = lock(&self.bad);
        if bad.seen[word] & bit != 0 {
            return Ok(());
        }
        bad.seen[word] |= bit;
        bad.total += 1;
        if bad.list.len() < MAX_LISTED {
            bad.list.push((row, reason));
        }
        if bad.total > self.allowed {
            return Err(format!(
                "{} of {} recordings could not be used, more than the {} that the budget allows:\n{}",
                bad.total,
                self.n,
                self.allowed,
                bad.text()
            ));
        }
        Ok(())
    }

    /// Recordings counted so far, and the first `MAX_LISTED` of them with their reasons.
    pub fn counted(&self) -> (u64, Vec<(u32, String)>) {
        let bad = lock(&self.bad);
        (bad.total, bad.list.clone())
    }

    /// The first reasons, one on each line.
    pub fn text(&self) -> String {
        lock(&self.bad).text()
    }
}

impl Bad {
    fn text(&self) -> String {
        let mut text = String::new();
        for (_, reason) in self.list.iter().take(MAX_SHOWN) {
            let _ = writeln!(text, "  {reason}");
        }
        if self.total > MAX_SHOWN as u64 {
            let _ = writeln!(text, "  and {} more", self.total - MAX_SHOWN as u64);
        }
        text
    }
}

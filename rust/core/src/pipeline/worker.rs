//! A worker: the recording of a row, its replacement if it cannot be used, and the row's fields.

use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::diagnostics::{FBANK, IDLE, RESAMPLE};
use super::narrow::{bf16, int16};
use super::queue::Slot;
use super::row::{self, Miss, Out, Scratch};
use super::{panics, Form, Shared, CLIP, EPOCH, INDEX, LABEL, WEIGHT};

/// Writes rows until the pipeline is closed.
pub(super) fn run(shared: &Shared) {
    panics::mark_worker();
    let mut worker =
        Worker { shared, scratch: Scratch::new(&shared.config.bank), wide: Vec::new() };
    loop {
        let begin = Instant::now();
        let Some((slot, row)) = shared.queue.claim() else { return };
        shared.counters.time(IDLE, begin);
        // Panics while decoding are caught in `row::load`; catching any other ensures that a bug is not a hang.
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| worker.fill(&slot, row))) {
            shared.queue.fail(format!("a worker panicked: {}", panics::message(panic.as_ref())));
        }
        shared.queue.finish_row(&slot);
    }
}

struct Worker<'a> {
    shared: &'a Shared,
    scratch: Scratch,
    wide: Vec<f32>, // a row before its values are narrowed to 16 bits
}

impl Worker<'_> {
    /// Writes every field of row number `local` of the slot, even if it fails, unless the slot is cancelled.
    fn fill(&mut self, slot: &Slot, local: usize) {
        let config = &self.shared.config;
        let (mut range, mut row) = (0, local);
        for n in config.range_rows() {
            if row < n {
                break;
            }
            row -= n;
            range += 1;
        }
        let n = config.rows.len() as u64;
        let example = slot.position * config.batch as u64 + (config.ranges[range].0 + row) as u64;
        let (epoch, place) = (example / n, example % n);

        // SAFETY, of every `row` here: this worker alone was given the row, and the consumer sees it only when all rows
        // of the slot are finished.
        let mut wide = std::mem::take(&mut self.wide);
        let out: &mut [f32] = if config.form == Form::Float32 {
            unsafe { slot.slab.row(range, CLIP, row) }
        } else {
            wide.resize(config.views * self.shared.view_values, 0.0);
            &mut wide
        };
        let narrow: &mut [i16] = if config.form == Form::Waveform {
            unsafe { slot.slab.row(range, CLIP, row) }
        } else {
            &mut []
        };
        let mut out = Out { wide: out, narrow, is_narrow: false };
        let Some((chosen, valid)) = self.choose(slot, epoch, place, &mut out) else { return };
        if !valid {
            out.wide.fill(0.0);
            out.is_narrow = false;
        }
        let Out { wide: out, narrow, is_narrow } = out;
        let begin = Instant::now();
        match config.form {
            Form::Float32 => {}
            Form::Bfloat16 => {
                let narrow: &mut [u16] = unsafe { slot.slab.row(range, CLIP, row) };
                narrow.iter_mut().zip(&*out).for_each(|(y, x)| *y = bf16(*x));
                self.shared.counters.time(FBANK, begin);
            }
            Form::Waveform if is_narrow => {}
            Form::Waveform => {
                narrow.iter_mut().zip(&*out).for_each(|(y, x)| *y = int16(*x));
                self.shared.counters.time(RESAMPLE, begin);
            }
        }
        self.wide = wide;
        let epoch = if config.train { epoch } else { 0 };
        let put = |field, value: i32| unsafe { slot.slab.row(range, field, row)[0] = value };
        put(LABEL, chosen.map_or(0, |row| self.shared.index.labels()[row as usize]));
        put(INDEX, chosen.map_or(-1, |row| i32::try_from(row).unwrap_or(i32::MAX)));
        put(EPOCH, i32::try_from(epoch).unwrap_or(i32::MAX));
        unsafe { slot.slab.row(range, WEIGHT, row)[0] = if valid { 1.0f32 } else { 0.0 } };
        self.shared.counters.rows.fetch_add(1, Ordering::Relaxed);
    }

    /// Writes the recording at `place`, or in training the first usable one after it. Returns its row of the index
    /// (None for the padding of a ragged last batch), and whether it was written. None when the slot is cancelled.
    fn choose(
        &mut self, slot: &Slot, epoch: u64, place: u64, out: &mut Out,
    ) -> Option<(Option<u32>, bool)> {
        let Shared { config, queue, budget, order, .. } = self.shared;
        let n = config.rows.len() as u64;
        if !config.train {
            if epoch > 0 {
                return Some((None, false));
            }
            let row = config.rows[place as usize];
            let valid = self.load(slot, row, 0, out)?;
            return Some((Some(row), valid));
        }
        let order = order.epoch(epoch);
        for attempt in 0..n {
            let row = config.rows[order.at((place + attempt) % n) as usize];
            if self.load(slot, row, epoch, out)? {
                return Some((Some(row), true));
            }
            if queue.has_failed() {
                break;
            }
        }
        queue.fail(format!("none of the {n} recordings can be used:\n{}", budget.text()));
        Some((None, false))
    }

    /// Whether the recording was written. One that cannot be used is counted. None when the slot is cancelled.
    fn load(&mut self, slot: &Slot, row: u32, epoch: u64, out: &mut Out) -> Option<bool> {
        match row::load(self.shared, &mut self.scratch, slot, row, epoch, out) {
            Ok(()) => Some(true),
            Err(Miss::Cancelled) => None,
            Err(Miss::Lost(reason)) => {
                self.shared.queue.fail(reason);
                Some(false)
            }
            Err(Miss::Unusable(reason)) => {
                if let Err(error) = self.shared.budget.record(row, reason) {
                    self.shared.queue.fail(error);
                }
                Some(false)
            }
        }
    }
}

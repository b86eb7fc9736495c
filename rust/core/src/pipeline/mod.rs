//! Workers that turn recordings into rows, in place, and a queue that hands over complete batches in order.
//!
//! The unit of work is one row. A worker takes the next row of the batch that is being filled, or begins the next
//! batch. It writes the row to the place that the order assigns. Neither the number of workers nor the order in which
//! they finish can change a byte. A batch stays in the queue until all of its rows are written and the batches before
//! it are delivered.
//!
//! ```text
//! config   the settings of a pipeline, and their checks
//! queue    the batches that are being filled or wait for the consumer
//! worker   the recording of a row, and its replacement if it cannot be used
//! row      one recording to the crops of a row; crop, their samples; narrow, values of 16 bits
//! budget   recordings that could not be used; panics, the caught ones
//! read_ahead, diagnostics
//! ```
//!
//! # A recording that cannot be used
//!
//! In training the row takes the next recording in the permuted order: attempt a of place i is place (i + a) mod n of
//! the same epoch, again a pure function. In testing the row is zeros with weight 0. Either way the recording is
//! counted once, and the first `MAX_LISTED` are listed by their row in the index with their reason. The run ends with
//! an error when more than max(1, budget · n) of the n distinct recordings are unusable, or more than 0 if the budget
//! is 0. This bound depends neither on timing nor on progress, so a run does not die of its first bad file, and one
//! that reads garbage ends after a known number of attempts. A panic while decoding makes the recording unusable.

mod budget;
mod config;
mod crop;
mod diagnostics;
mod narrow;
mod panics;
mod queue;
mod read_ahead;
mod row;
mod worker;

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::order::{Blocks, Order};
use crate::slab::{Layout, Pool};
use crate::source::Index;
pub use config::{Block, Config, Form};
pub use crop::{Clip, Short};
pub use diagnostics::{Diagnostics, STAGES};
pub(crate) use narrow::int16;
pub use queue::Next;
pub use row::{front_end, PEAK};

/// Fields of a batch, by their number in the slab.
pub const CLIP: usize = 0; // f32 or bf16 (views, n_frames, n_mels), or i16 (views, clip_samples): see Form
pub const LABEL: usize = 1; // i32: the class, -1 for a null
pub const INDEX: usize = 2; // i32: the recording's row in the index, -1 in the padding of a ragged last batch
pub const EPOCH: usize = 3; // i32
pub const WEIGHT: usize = 4; // f32: 1 for a valid row, otherwise 0

pub struct Pipeline {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// The state that the threads of a pipeline share.
struct Shared {
    config: Config,
    view_values: usize, // of one view in a row
    order: Order,
    index: Arc<Index>,
    pool: Arc<Pool>,
    queue: queue::Queue,
    budget: budget::Budget,
    counters: diagnostics::Counters,
}

impl Pipeline {
    /// Starts the workers, which wait for the first `seek` or `next`.
    /// Errors: A config whose values are out of range or contradict each other, or threads that cannot be started.
    pub fn new(index: Arc<Index>, config: Config) -> Result<Self, Error> {
        config.check(&index)?;
        panics::hush_workers();
        let rows: Vec<usize> = config.range_rows().collect();
        let n_rows: usize = rows.iter().sum();
        let too_large = || Error::Invalid("a batch does not fit in the address space".into());
        let view_values = config.view_values().ok_or_else(too_large)?;
        let bytes = view_values
            .checked_mul(config.views)
            .and_then(|n| n.checked_mul(config.form.value_bytes()));
        let layout = bytes
            .and_then(|bytes| Layout::new(vec![bytes, 4, 4, 4, 4], rows))
            .ok_or_else(too_large)?;
        // One batch is being filled in addition to those in the queue. Small batches need more to keep every worker
        // busy.
        let max_slots = config.depth.max((2 * config.threads).div_ceil(n_rows)) + 1;
        let pool = Pool::new(layout, max_slots + 1);
        let n = config.rows.len() as u64;
        let shared = Arc::new(Shared {
            view_values,
            order: match config.block {
                Some(Block { rows, window }) => Order::Block(Blocks::of_rows(
                    config.seed,
                    window,
                    rows,
                    &config.rows,
                    index.first_rows(),
                )),
                None => Order::Global { seed: config.seed, n },
            },
            queue: queue::Queue::new(
                pool.clone(),
                n_rows,
                if config.train { None } else { Some(config.n_batches()) },
                max_slots,
            ),
            pool,
            budget: budget::Budget::new(n, config.allowed(), index.n_rows()),
            counters: diagnostics::Counters::default(),
            index,
            config,
        });
        let pipeline = Self { shared, threads: Mutex::new(Vec::new()) };
        for k in 0..pipeline.shared.config.threads {
            pipeline.start(format!("loader-{k}"), worker::run)?;
        }
        if pipeline.shared.config.train && matches!(pipeline.shared.order, Order::Block(_)) {
            pipeline.start("loader-ahead".into(), read_ahead::run)?;
        }
        Ok(pipeline)
    }

    fn start(&self, name: String, run: fn(&Shared)) -> Result<(), Error> {
        let shared = self.shared.clone();
        let thread = std::thread::Builder::new().name(name).spawn(move || run(&shared));
        let failed = |error| Error::Failed(format!("cannot start a worker thread: {error}"));
        lock(&self.threads).push(thread.map_err(failed)?);
        Ok(())
    }

    pub fn config(&self) -> &Config {
        &self.shared.config
    }

    /// Continues with batch `position`. Prepared batches are discarded. A wait in `next` waits for the new batch.
    /// Errors: A position whose examples cannot be numbered in 64 bits.
    pub fn seek(&self, position: u64) -> Result<(), Error> {
        if position
            .checked_add(1)
            .and_then(|p| p.checked_mul(self.shared.config.batch as u64))
            .is_none()
        {
            return Err(Error::Invalid(format!("position {position} is out of range")));
        }
        self.shared.queue.seek(position);
        Ok(())
    }

    /// Waits for the next batch, at most `timeout`.
    /// Errors: More unusable recordings than the budget allows, and the same error from then on.
    pub fn next(&self, timeout: Duration) -> Result<Next, Error> {
        let begin = Instant::now();
        let next = self.shared.queue.next(begin + timeout);
        self.shared.counters.time(diagnostics::WAIT, begin);
        next
    }

    pub fn diagnostics(&self) -> Diagnostics {
        let Shared { config, queue, pool, budget, counters, .. } = &*self.shared;
        let (bad, bad_list) = budget.counted();
        let seconds = counters.seconds();
        Diagnostics {
            queued: queue.complete(),
            threads: config.threads,
            slabs: pool.alive(),
            rows: counters.rows.load(Relaxed),
            bad,
            bad_allowed: config.allowed(),
            bad_list,
            seconds,
            slowest: diagnostics::slowest(&seconds),
            bytes_ahead: counters.bytes_ahead.load(Relaxed),
            slow_rows: counters.slow_rows.load(Relaxed),
        }
    }

    /// Stops the workers, and waits for the rows that they are writing. A wait in `next` ends.
    pub fn close(&self) {
        self.shared.queue.close();
        for thread in std::mem::take(&mut *lock(&self.threads)) {
            let _ = thread.join(); // a worker catches its own panics
        }
    }
}

impl Drop for Pipeline {
    fn drop(&mut self) {
        self.close();
    }
}

/// A mutex whose holder panicked is still in order: nothing here is left half done.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(train: bool) -> Config {
        Config {
            rows: (0..5).collect(),
            batch: 2,
            ranges: vec![(0, 2)],
            seed: 0,
            train,
            bank: Arc::default(),
            time_expansion: 1.0,
            clip_samples: 800,
            n_frames: 1,
            channel: None,
            clip: Clip::default(),
            views: 1,
            form: Form::Float32,
            block: None,
            threads: 2,
            depth: 1,
            bad_budget: 1.0,
        }
    }

    #[test]
    fn a_panic_is_a_bad_recording_and_never_a_hang() {
        let wait = Duration::from_secs(20);
        let test = Pipeline::new(Arc::new(Index::broken(5)), config(false)).unwrap();
        for _ in 0..3 {
            let Ok(Next::Batch(_, slab)) = test.next(wait) else { panic!("a batch is due") };
            // SAFETY: the batch is complete, so its workers have finished with it.
            assert_eq!(unsafe { slab.row::<f32>(0, WEIGHT, 1) }, [0.0]);
        }
        assert!(matches!(test.next(wait), Ok(Next::End)));
        let counters = test.diagnostics();
        assert_eq!(counters.bad, 5);
        assert!(
            counters.bad_list.iter().all(|(_, reason)| reason.contains("panic: ")),
            "{:?}",
            counters.bad_list
        );

        let train = Pipeline::new(Arc::new(Index::broken(5)), config(true)).unwrap();
        assert!(train
            .next(wait)
            .is_err_and(|e| e.to_string().contains("none of the 5 recordings")));
    }
}

//! The batches that are being filled or wait for the consumer, in order.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::lock;
use crate::error::Error;
use crate::slab::{Pool, Slab};

/// The consumer's result of waiting for a batch.
pub enum Next {
    /// The position after this batch, and the batch.
    Batch(u64, Arc<Slab>),
    /// The split is over, or the pipeline was closed.
    End,
    /// No batch was complete before the deadline.
    Pending,
}

pub(super) struct Queue {
    pool: Arc<Pool>,
    n_rows: usize,          // of a batch, in this process
    n_batches: Option<u64>, // in a test split; None in training, which does not end
    max_slots: usize,
    state: Mutex<State>,
    work: Condvar, // for the workers: a row can be written, or the pipeline was closed
    done: Condvar, // for the consumer: the first batch is complete, or the pipeline failed or was closed
}

#[derive(Default)]
struct State {
    active: bool, // from the first seek or next on: before that, a seek might discard work
    closed: bool,
    failure: Option<String>,
    position: u64,                       // of the next batch to deliver
    open: u64,                           // of the next batch to begin
    slots: VecDeque<Arc<Slot>>,          // started and not yet delivered, in order
    filling: Option<(Arc<Slot>, usize)>, // the last of them, and its next row
}

/// A batch that has been started.
pub(super) struct Slot {
    pub position: u64,
    pub slab: Arc<Slab>,
    left: AtomicUsize, // rows not yet written
    cancelled: AtomicBool,
}

impl Slot {
    /// Whether a seek or close made the rest of the batch useless.
    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }
}

impl Queue {
    pub fn new(pool: Arc<Pool>, n_rows: usize, n_batches: Option<u64>, max_slots: usize) -> Self {
        let state = Mutex::new(State::default());
        Self {
            pool,
            n_rows,
            n_batches,
            max_slots,
            state,
            work: Condvar::new(),
            done: Condvar::new(),
        }
    }

    /// Continues with batch `position`. Prepared batches are discarded.
    pub fn seek(&self, position: u64) {
        let mut state = lock(&self.state);
        state.cancel();
        state.position = position;
        state.open = position;
        state.active = true;
        self.work.notify_all();
        self.done.notify_all();
    }

    /// Waits for the next batch until `deadline`.
    /// Errors: The failure that ended the pipeline, every time.
    pub fn next(&self, deadline: Instant) -> Result<Next, Error> {
        let mut state = lock(&self.state);
        if !state.active {
            state.active = true;
            self.work.notify_all();
        }
        loop {
            if let Some(failure) = &state.failure {
                return Err(Error::Failed(failure.clone()));
            }
            if state.closed || self.is_past_the_end(state.position) {
                return Ok(Next::End);
            }
            // Acquire: makes the rows visible here that the workers wrote before they counted them down.
            if state.slots.front().is_some_and(|slot| slot.left.load(Ordering::Acquire) == 0) {
                if let Some(slot) = state.slots.pop_front() {
                    state.position = slot.position + 1;
                    self.work.notify_all();
                    return Ok(Next::Batch(state.position, slot.slab.clone()));
                }
            }
            let now = Instant::now();
            if now >= deadline {
                return Ok(Next::Pending);
            }
            state = self
                .done
                .wait_timeout(state, deadline - now)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Waits for a row to write: its slot, and its number in the slot. None when the pipeline is closed.
    pub fn claim(&self) -> Option<(Arc<Slot>, usize)> {
        let mut state = lock(&self.state);
        loop {
            if state.closed {
                return None;
            }
            if let Some(job) = self.claim_now(&mut state) {
                return Some(job);
            }
            state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn claim_now(&self, state: &mut State) -> Option<(Arc<Slot>, usize)> {
        if !state.active || state.failure.is_some() {
            return None;
        }
        if state.filling.is_none() {
            if self.is_past_the_end(state.open) || state.slots.len() >= self.max_slots {
                return None;
            }
            let Some(slab) = self.pool.take() else {
                state.failure =
                    Some(format!("no memory for a batch of {} bytes", self.pool.slab_bytes()));
                self.done.notify_all();
                return None;
            };
            let slot = Arc::new(Slot {
                position: state.open,
                slab: Arc::new(slab),
                left: AtomicUsize::new(self.n_rows),
                cancelled: AtomicBool::new(false),
            });
            state.open += 1;
            state.slots.push_back(slot.clone());
            state.filling = Some((slot, 0));
        }
        let (slot, next) = state.filling.as_mut()?;
        let job = (slot.clone(), *next);
        *next += 1;
        if *next == self.n_rows {
            state.filling = None;
        }
        Some(job)
    }

    /// A claimed row is written.
    pub fn finish_row(&self, slot: &Slot) {
        if slot.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            // Without the lock, the consumer could check just before this and sleep just after it.
            let _state = lock(&self.state);
            self.done.notify_all();
        }
    }

    /// Ends the pipeline with an error, unless it already has one.
    pub fn fail(&self, reason: String) {
        let mut state = lock(&self.state);
        state.failure.get_or_insert(reason);
        self.done.notify_all();
    }

    pub fn has_failed(&self) -> bool {
        lock(&self.state).failure.is_some()
    }

    pub fn is_closed(&self) -> bool {
        lock(&self.state).closed
    }

    /// Ends every wait; no more rows are claimed.
    pub fn close(&self) {
        let mut state = lock(&self.state);
        state.cancel();
        state.closed = true;
        self.work.notify_all();
        self.done.notify_all();
    }

    /// The batch that the workers will begin next; None before the first seek and after a failure.
    pub fn upcoming(&self) -> Option<u64> {
        let state = lock(&self.state);
        (state.active && state.failure.is_none()).then_some(state.open)
    }

    /// Waits until a batch can be started or the pipeline is closed, at most `timeout`.
    pub fn wait_for_work(&self, timeout: Duration) {
        drop(self.work.wait_timeout(lock(&self.state), timeout));
    }

    /// Batches that wait for the consumer.
    pub fn complete(&self) -> usize {
        lock(&self.state).slots.iter().filter(|slot| slot.left.load(Ordering::Relaxed) == 0).count()
    }

    fn is_past_the_end(&self, position: u64) -> bool {
        self.n_batches.is_some_and(|n| position >= n)
    }
}

impl State {
    fn cancel(&mut self) {
        for slot in self.slots.drain(..) {
            slot.cancelled.store(true, Ordering::Relaxed);
        }
        self.filling = None;
    }
}

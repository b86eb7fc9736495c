//! Workers that turn recordings into rows, in place, and a queue that hands over whole batches in order.
//!
//! The unit of work is one row. A worker takes the next row of the batch being filled (or opens the next batch), and
//! writes it where the order says that it belongs; so neither the number of workers nor who finishes first can change a
//! byte. A batch waits in the queue until every row before it is written and the batches before it are delivered.
//!
//! # A recording that cannot be used
//!
//! In training the row takes the next recording in the permuted order: attempt a of place i is place (i + a) mod n of the
//! same epoch, a pure function again. In testing the row is zeros with weight 0. Either way the recording is counted once,
//! listed by its row in the index (the first `LISTED` with their reason), and the run ends with an error when more than
//! max(1, budget · n) of the n distinct recordings failed (0 when the budget is 0). This bound depends neither on timing
//! nor on how far the run is, so a run that starts does not die of its first bad file, and one that reads rubbish ends
//! after a known number of attempts. A panic while decoding counts as a bad recording.

use std::any::Any;
use std::cell::Cell;
use std::collections::VecDeque;
use std::fmt::Write;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Once, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::decode::Decoder;
use crate::error::Error;
use crate::fbank::{Fbank, N_MELS};
use crate::order::{crop_start, Blocks, Order};
use crate::resample::{Resampler, Resamplers};
use crate::slab::{Layout, Pool, Slab};
use crate::source::{Index, Reader};

/// Fields of a batch, by their number in the slab.
pub const CLIP: usize = 0; // f32 or bf16 (views, n_frames, N_MELS), or i16 (views, clip_samples): see Form
pub const LABEL: usize = 1; // i32: the class, -1 where it is null
pub const INDEX: usize = 2; // i32: the recording's row in the index, -1 in the padding of a ragged last batch
pub const EPOCH: usize = 3; // i32
pub const WEIGHT: usize = 4; // f32: 1, or 0 for a row that does not count

/// Bad recordings that are kept with their reason. All are counted.
pub const LISTED: usize = 100;

/// A header that claims anything else is broken, or would make an absurd filter and buffer.
const RATES: std::ops::RangeInclusive<u32> = 1_000..=768_000;

/// Samples beyond this would overflow the power spectrum's float32.
const PEAK: f32 = 1e12;

/// \[Hz\] that the filter bank is defined at.
const FBANK_RATE: u32 = 32_000;

/// What to deliver.
pub struct Plan {
    pub rows: Vec<u32>,              // rows of the index that this split uses, before permutation
    pub batch: usize,                // rows of the global batch
    pub ranges: Vec<(usize, usize)>, // [start, stop) of the global batch that this process reads
    pub seed: u64,
    pub train: bool,          // permuted, endless, random crops; or in order, once, centre crops
    pub sample_rate: u32,     // Hz of the waveform before the filter bank
    pub clip_samples: usize,  // at sample_rate
    pub n_frames: usize,      // of a row's spectrogram
    pub views: usize,         // crops of one recording in a row
    pub form: Form,           // what a row holds of each crop
    pub block: Option<Block>, // training in the block order instead of a global permutation
    pub threads: usize,
    pub depth: usize,    // finished batches that may wait
    pub bad_budget: f64, // share of `rows` that may fail
}

/// What a row holds of a crop.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Form {
    Float32,  // its spectrogram
    Bfloat16, // the same, rounded to nearest even
    Waveform, // its samples as 16-bit integers, 32768 for 1.0, rounded to nearest even and clipped: see `int16`
}

impl Form {
    fn value_bytes(self) -> usize {
        match self {
            Form::Float32 => 4,
            Form::Bfloat16 | Form::Waveform => 2,
        }
    }
}

/// See `order::Blocks`.
#[derive(Clone, Copy)]
pub struct Block {
    pub rows: u64,   // at most, of a block
    pub window: u64, // blocks whose rows are permuted among themselves
}

impl Plan {
    fn check(&self, index: &Index) -> Result<(), Error> {
        let fail = |what: String| Err(Error::Plan(what));
        let n_rows = index.n_rows();
        if self.rows.is_empty() {
            return fail("rows is empty: this split holds no recordings".into());
        }
        if let Some(row) = self.rows.iter().find(|&&row| row as usize >= n_rows) {
            return Err(Error::RowRange { row: i64::from(*row), n: n_rows });
        }
        if self.ranges.is_empty() {
            return fail("ranges is empty: this process would read nothing".into());
        }
        if let Some((start, stop)) = self.ranges.iter().find(|(a, b)| a >= b || *b > self.batch) {
            return fail(format!("range [{start}, {stop}) is not a part of a batch of {} rows", self.batch));
        }
        if self.threads == 0 || self.depth == 0 {
            return fail(format!("threads = {} and depth = {} must be at least 1", self.threads, self.depth));
        }
        if self.views == 0 {
            return fail("views = 0 must be at least 1".into());
        }
        if let Some(Block { rows, window }) = self.block {
            if rows == 0 || window == 0 {
                return fail(format!("blocks of {rows} rows and windows of {window} blocks must be at least 1"));
            }
            if self.rows.windows(2).any(|pair| pair[0] >= pair[1]) {
                return fail("rows must increase, for the block order reads them side by side".into());
            }
        }
        if !(0.0..=1.0).contains(&self.bad_budget) {
            return fail(format!("bad_budget = {} must lie in [0, 1]", self.bad_budget));
        }
        if !RATES.contains(&self.sample_rate) {
            return fail(format!("sample_rate = {} Hz must lie in {RATES:?}", self.sample_rate));
        }
        let frames = Fbank::n_frames(self.clip_samples);
        if frames == 0 || frames > self.n_frames {
            return fail(format!(
                "a clip of {} samples has {frames} frames, but a row holds 1 to {}",
                self.clip_samples, self.n_frames
            ));
        }
        Ok(())
    }

    /// Values of one view; None when they cannot be counted.
    fn view_values(&self) -> Option<usize> {
        match self.form {
            Form::Waveform => Some(self.clip_samples),
            _ => self.n_frames.checked_mul(N_MELS),
        }
    }

    /// Batches in one pass.
    pub fn n_batches(&self) -> u64 {
        (self.rows.len() as u64).div_ceil(self.batch as u64)
    }

    /// Distinct recordings that may fail.
    fn allowed(&self) -> u64 {
        if self.bad_budget == 0.0 {
            0
        } else {
            ((self.rows.len() as f64 * self.bad_budget) as u64).max(1)
        }
    }
}

/// What `Pipeline::next` found.
pub enum Next {
    /// The position after this batch, and the batch.
    Batch(u64, Arc<Slab>),
    /// The split is over, or the pipeline was closed.
    End,
    /// Nothing within the time given.
    Pending,
}

/// Counters for people.
pub struct Diagnostics {
    pub queued: usize,  // whole batches that wait
    pub filling: usize, // batches begun
    pub depth: usize,
    pub threads: usize,
    pub slabs: usize,
    pub slab_bytes: usize,
    pub rows: u64,        // written, padding included
    pub bad: u64,         // distinct recordings
    pub bad_allowed: u64, // more than this is an error
    pub bad_list: Vec<(u32, String)>,
    pub seconds: [f64; STAGES.len()],  // by stage
    pub slowest: Option<&'static str>, // of the workers' stages, by seconds
    pub bytes_recordings: u64,         // of the recordings that were opened: what reading them whole would read
    pub bytes_used: u64,               // the share of them that lies in the crops
    pub bytes_ahead: u64,              // asked of the system before they were needed (block order)
    pub faults: u64,                   // of the workers, that waited for the disk or the network; 0 where not counted
}

/// Stages of `Diagnostics::seconds`: of all workers together, except "wait", the consumer's wait for a batch. "read" is
/// finding the recording (unpacking its page, opening its file), "seek" its headers and length, "idle" waiting for a
/// consumer that is slower than the workers. Mapped bytes are read where they are first touched: in "seek" and "decode".
pub const STAGES: [&str; 7] = ["read", "seek", "decode", "resample", "fbank", "idle", "wait"];
const READ: usize = 0;
const SEEK: usize = 1;
const DECODE: usize = 2;
const RESAMPLE: usize = 3;
const FBANK: usize = 4;
const IDLE: usize = 5;
const WAIT: usize = 6;

/// Bytes of one window of the block order that are asked for ahead; the rest is read when it is needed.
const AHEAD: u64 = 4 << 30;
const AHEAD_POLL: Duration = Duration::from_millis(50);

pub struct Pipeline {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

struct Shared {
    plan: Plan,
    view_values: usize,
    order: Order,
    index: Arc<Index>,
    pool: Arc<Pool>,
    max_slots: usize,
    state: Mutex<State>,
    work: Condvar, // workers: there is a row to write, or it is over
    done: Condvar, // the consumer: the first batch is whole, or it is over
    bad: Mutex<Bad>,
    rows: AtomicU64,
    nanos: [AtomicU64; STAGES.len()],
    bytes_recordings: AtomicU64,
    bytes_used: AtomicU64,
    bytes_ahead: AtomicU64,
    faults: AtomicU64,
}

struct State {
    active: bool, // from the first seek or next: no work is done that a seek would throw away
    closed: bool,
    failure: Option<String>,
    position: u64,                       // of the next batch to deliver
    open: u64,                           // of the next batch to begin
    slots: VecDeque<Arc<Slot>>,          // begun and not yet delivered, in order
    filling: Option<(Arc<Slot>, usize)>, // the last of them, and its next row
}

struct Slot {
    position: u64,
    slab: Arc<Slab>,
    left: AtomicUsize, // rows not yet written
    cancelled: AtomicBool,
}

struct Bad {
    seen: Vec<u64>, // one bit for each row of the index
    total: u64,
    list: Vec<(u32, String)>,
}

/// A worker's own tools: nothing in them is shared, so nothing is locked between rows.
struct Scratch {
    decoder: Decoder,
    resamplers: Resamplers,
    fbank: Fbank,
    reader: Reader,
    crops: Vec<Crop>,
    samples: Vec<f32>, // at the recording's rate
    wave: Vec<f32>,    // at the plan's rate
    wide: Vec<f32>,    // a row before its values are made 16 bits wide
}

/// Why a row was not written.
enum Miss {
    Cancelled,
    Bad(String),
}

impl Pipeline {
    /// Starts the workers, which wait for the first `seek` or `next`.
    ///
    /// # Errors
    /// A plan that makes no sense, or threads that cannot be started.
    pub fn new(index: Arc<Index>, plan: Plan) -> Result<Self, Error> {
        plan.check(&index)?;
        hush_workers();
        let rows: Vec<usize> = plan.ranges.iter().map(|(start, stop)| stop - start).collect();
        let n_rows: usize = rows.iter().sum();
        let too_large = || Error::Plan("a batch does not fit in the address space".into());
        let view_values = plan.view_values().ok_or_else(too_large)?;
        let bytes = view_values.checked_mul(plan.views).and_then(|n| n.checked_mul(plan.form.value_bytes()));
        let layout = bytes.and_then(|bytes| Layout::new(vec![bytes, 4, 4, 4, 4], rows)).ok_or_else(too_large)?;
        // One batch more than may wait is being filled; small batches need more to keep every worker busy.
        let max_slots = plan.depth.max((2 * plan.threads).div_ceil(n_rows)) + 1;
        let n_threads = plan.threads;
        let order = match plan.block {
            Some(Block { rows, window }) => {
                Order::Block(Blocks::of(plan.seed, window, rows, &plan.rows, index.first_rows()))
            }
            None => Order::Global { seed: plan.seed, n: plan.rows.len() as u64 },
        };
        let shared = Arc::new(Shared {
            pool: Pool::new(layout, max_slots + 1),
            max_slots,
            state: Mutex::new(State {
                active: false,
                closed: false,
                failure: None,
                position: 0,
                open: 0,
                slots: VecDeque::new(),
                filling: None,
            }),
            work: Condvar::new(),
            done: Condvar::new(),
            bad: Mutex::new(Bad { seen: vec![0; index.n_rows().div_ceil(64)], total: 0, list: Vec::new() }),
            rows: AtomicU64::new(0),
            nanos: Default::default(),
            bytes_recordings: AtomicU64::new(0),
            bytes_used: AtomicU64::new(0),
            bytes_ahead: AtomicU64::new(0),
            faults: AtomicU64::new(0),
            order,
            index,
            view_values,
            plan,
        });
        let pipeline = Self { shared, threads: Mutex::new(Vec::new()) };
        for k in 0..n_threads {
            let shared = pipeline.shared.clone();
            let thread = std::thread::Builder::new().name(format!("loader-{k}")).spawn(move || shared.work());
            lock(&pipeline.threads).push(thread.map_err(Error::Thread)?);
        }
        if pipeline.shared.plan.train && matches!(pipeline.shared.order, Order::Block(_)) {
            let shared = pipeline.shared.clone();
            let thread = std::thread::Builder::new().name("loader-ahead".into()).spawn(move || shared.read_ahead());
            lock(&pipeline.threads).push(thread.map_err(Error::Thread)?);
        }
        Ok(pipeline)
    }

    pub fn plan(&self) -> &Plan {
        &self.shared.plan
    }

    /// Goes on with batch `position`. What was prepared is thrown away; a wait in `next` goes on with the new batch.
    pub fn seek(&self, position: u64) -> Result<(), Error> {
        if position.checked_add(1).and_then(|p| p.checked_mul(self.shared.plan.batch as u64)).is_none() {
            return Err(Error::Plan(format!("position {position} is out of range")));
        }
        let mut state = lock(&self.shared.state);
        state.cancel();
        state.position = position;
        state.open = position;
        state.active = true;
        self.shared.work.notify_all();
        self.shared.done.notify_all();
        Ok(())
    }

    /// Waits for the next batch, at most `timeout`.
    ///
    /// # Errors
    /// More bad recordings than the budget allows. The error stays.
    pub fn next(&self, timeout: Duration) -> Result<Next, Error> {
        let begin = Instant::now();
        let found = self.shared.next(begin + timeout);
        self.shared.count(WAIT, begin);
        found
    }

    pub fn diagnostics(&self) -> Diagnostics {
        let shared = &self.shared;
        let (queued, filling) = {
            let state = lock(&shared.state);
            let whole = state.slots.iter().filter(|slot| slot.left.load(Ordering::Relaxed) == 0).count();
            (whole, state.slots.len() - whole)
        };
        let seconds: [f64; STAGES.len()] =
            std::array::from_fn(|stage| shared.nanos[stage].load(Ordering::Relaxed) as f64 * 1e-9);
        let slowest = (READ..=FBANK).filter(|&s| seconds[s] > 0.0).max_by(|&a, &b| seconds[a].total_cmp(&seconds[b]));
        let bad = lock(&shared.bad);
        Diagnostics {
            queued,
            filling,
            depth: shared.plan.depth,
            threads: shared.plan.threads,
            slabs: shared.pool.alive(),
            slab_bytes: shared.pool.slab_bytes(),
            rows: shared.rows.load(Ordering::Relaxed),
            bad: bad.total,
            bad_allowed: shared.plan.allowed(),
            bad_list: bad.list.clone(),
            seconds,
            slowest: slowest.map(|stage| STAGES[stage]),
            bytes_recordings: shared.bytes_recordings.load(Ordering::Relaxed),
            bytes_used: shared.bytes_used.load(Ordering::Relaxed),
            bytes_ahead: shared.bytes_ahead.load(Ordering::Relaxed),
            faults: shared.faults.load(Ordering::Relaxed),
        }
    }

    /// Stops the workers and waits for the rows that they are at. A wait in `next` ends.
    pub fn close(&self) {
        {
            let mut state = lock(&self.shared.state);
            state.cancel();
            state.closed = true;
            self.shared.work.notify_all();
            self.shared.done.notify_all();
        }
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

impl State {
    fn cancel(&mut self) {
        for slot in self.slots.drain(..) {
            slot.cancelled.store(true, Ordering::Relaxed);
        }
        self.filling = None;
    }
}

impl Shared {
    fn next(&self, deadline: Instant) -> Result<Next, Error> {
        let mut state = lock(&self.state);
        if !state.active {
            state.active = true;
            self.work.notify_all();
        }
        loop {
            if let Some(failure) = &state.failure {
                return Err(Error::Failed(failure.clone()));
            }
            if state.closed || (!self.plan.train && state.position >= self.plan.n_batches()) {
                return Ok(Next::End);
            }
            // Acquire: what the workers wrote before they counted their rows down is seen from here on.
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
            state = self.done.wait_timeout(state, deadline - now).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn work(&self) {
        WORKER.set(true);
        let mut scratch = Scratch::new();
        let mut faults = thread_faults();
        while let Some((slot, row)) = self.claim() {
            // Decoding catches its own panics; this one only makes sure that a mistake elsewhere is no hang.
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.fill(&mut scratch, &slot, row))) {
                self.fail(format!("a worker panicked: {}", message(panic.as_ref())));
            }
            let before = std::mem::replace(&mut faults, thread_faults());
            self.faults.fetch_add(faults.saturating_sub(before), Ordering::Relaxed);
            if slot.left.fetch_sub(1, Ordering::AcqRel) == 1 {
                let _state = lock(&self.state); // or the consumer could look just before and sleep just after
                self.done.notify_all();
            }
        }
    }

    /// Waits for a row to write. None when the pipeline is closed.
    fn claim(&self) -> Option<(Arc<Slot>, usize)> {
        let begin = Instant::now();
        let mut state = lock(&self.state);
        loop {
            if state.closed {
                return None;
            }
            if let Some(job) = self.claim_now(&mut state) {
                self.count(IDLE, begin);
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
            let over = !self.plan.train && state.open >= self.plan.n_batches();
            if over || state.slots.len() >= self.max_slots {
                return None;
            }
            let Some(slab) = self.pool.take() else {
                state.failure = Some(format!("no memory for a batch of {} bytes", self.pool.slab_bytes()));
                self.done.notify_all();
                return None;
            };
            let slot = Arc::new(Slot {
                position: state.open,
                slab: Arc::new(slab),
                left: AtomicUsize::new(self.n_rows()),
                cancelled: AtomicBool::new(false),
            });
            state.open += 1;
            state.slots.push_back(slot.clone());
            state.filling = Some((slot, 0));
        }
        let (slot, next) = state.filling.as_mut()?;
        let job = (slot.clone(), *next);
        *next += 1;
        if *next == self.n_rows() {
            state.filling = None;
        }
        Some(job)
    }

    fn n_rows(&self) -> usize {
        self.plan.ranges.iter().map(|(start, stop)| stop - start).sum()
    }

    fn count(&self, stage: usize, begin: Instant) {
        self.nanos[stage].fetch_add(begin.elapsed().as_nanos() as u64, Ordering::Relaxed);
    }

    fn fail(&self, what: String) {
        let mut state = lock(&self.state);
        state.failure.get_or_insert(what);
        self.done.notify_all();
    }

    /// Writes row number `local` of the slot: every field, whatever happens.
    fn fill(&self, scratch: &mut Scratch, slot: &Slot, local: usize) {
        let plan = &self.plan;
        let (mut range, mut row) = (0, local);
        while row >= plan.ranges[range].1 - plan.ranges[range].0 {
            row -= plan.ranges[range].1 - plan.ranges[range].0;
            range += 1;
        }
        // Safety: this worker alone was given this row, and the consumer sees it only after `left` is 0.
        let mut wide = std::mem::take(&mut scratch.wide);
        let out: &mut [f32] = if plan.form == Form::Float32 {
            unsafe { slot.slab.row(range, CLIP, row) }
        } else {
            wide.resize(plan.views * self.view_values, 0.0);
            &mut wide
        };
        let put = |field, value: i32| unsafe { slot.slab.row(range, field, row)[0] = value };

        let n = plan.rows.len() as u64;
        let sample = slot.position * plan.batch as u64 + (plan.ranges[range].0 + row) as u64;
        let (epoch, place) = (sample / n, sample % n);
        let mut found = None;
        let mut index = None;
        if plan.train {
            let order = self.order.epoch(epoch);
            for attempt in 0..n {
                let row = plan.rows[order.at((place + attempt) % n) as usize];
                match self.load(scratch, slot, row, epoch, out) {
                    Ok(()) => found = Some(row),
                    Err(Miss::Cancelled) => return,
                    Err(Miss::Bad(what)) => self.bad(row, what),
                }
                if found.is_some() || lock(&self.state).failure.is_some() {
                    break;
                }
            }
            if found.is_none() {
                self.fail(format!("none of the {n} recordings can be used:\n{}", lock(&self.bad).list_text()));
            }
            index = found;
        } else if epoch == 0 {
            let row = plan.rows[place as usize];
            index = Some(row);
            match self.load(scratch, slot, row, 0, out) {
                Ok(()) => found = Some(row),
                Err(Miss::Cancelled) => return,
                Err(Miss::Bad(what)) => self.bad(row, what),
            }
        }
        if found.is_none() {
            out.fill(0.0);
        }
        let begin = Instant::now();
        match plan.form {
            Form::Float32 => {}
            Form::Bfloat16 => {
                // Safety: as above.
                let narrow: &mut [u16] = unsafe { slot.slab.row(range, CLIP, row) };
                narrow.iter_mut().zip(&*out).for_each(|(y, x)| *y = bf16(*x));
                self.count(FBANK, begin);
            }
            Form::Waveform => {
                // Safety: as above.
                let narrow: &mut [i16] = unsafe { slot.slab.row(range, CLIP, row) };
                narrow.iter_mut().zip(&*out).for_each(|(y, x)| *y = int16(*x));
                self.count(RESAMPLE, begin);
            }
        }
        scratch.wide = wide;
        let epoch = if plan.train { epoch } else { 0 };
        put(LABEL, index.map_or(0, |row| self.index.labels()[row as usize]));
        put(INDEX, index.map_or(-1, |row| i32::try_from(row).unwrap_or(i32::MAX)));
        put(EPOCH, i32::try_from(epoch).unwrap_or(i32::MAX));
        unsafe { slot.slab.row(range, WEIGHT, row)[0] = if found.is_some() { 1.0f32 } else { 0.0 } };
        self.rows.fetch_add(1, Ordering::Relaxed);
    }

    /// Writes the crops of one recording, as spectrograms or samples. A panic on the way is a bad recording.
    fn load(&self, scratch: &mut Scratch, slot: &Slot, row: u32, epoch: u64, out: &mut [f32]) -> Result<(), Miss> {
        let loaded = catch_unwind(AssertUnwindSafe(|| self.try_load(scratch, slot, row as usize, epoch, out)));
        loaded.unwrap_or_else(|panic| {
            *scratch = Scratch::new(); // its tools may be in any state
            Err(Miss::Bad(self.reason(row as usize, format!("panic: {}", message(panic.as_ref())))))
        })
    }

    fn reason(&self, row: usize, what: impl ToString) -> String {
        self.index.bad_row(row, what.to_string()).to_string()
    }

    fn try_load(
        &self,
        scratch: &mut Scratch,
        slot: &Slot,
        row: usize,
        epoch: u64,
        out: &mut [f32],
    ) -> Result<(), Miss> {
        let plan = &self.plan;
        let bad = |what: String| Miss::Bad(self.reason(row, what));
        let go_on = || if slot.cancelled.load(Ordering::Relaxed) { Err(Miss::Cancelled) } else { Ok(()) };
        let Scratch { decoder, resamplers, fbank, reader, crops, samples, wave, .. } = scratch;
        go_on()?;

        let begin = Instant::now();
        let bytes = self.index.encoded(row, reader).map_err(|e| Miss::Bad(e.to_string()))?;
        self.count(READ, begin);

        let begin = Instant::now();
        let info = decoder.info(bytes).map_err(|e| bad(e.to_string()))?;
        if info.frames == 0 || info.channels == 0 {
            return Err(bad("holds no samples".into()));
        }
        if !RATES.contains(&info.rate) {
            return Err(bad(format!("a sample rate of {} Hz is not in {RATES:?}", info.rate)));
        }
        let views = plan.views as u64;
        let pick = |view: u64, surplus: u64| match plan.train {
            true => crop_start(plan.seed, epoch, row as u64, view, surplus + 1),
            false => (u128::from(surplus) * u128::from(2 * view + 1) / u128::from(2 * views)) as u64,
        };
        let crop = |view| {
            Crop::new(info.frames, info.rate, plan.sample_rate, plan.clip_samples, !plan.train, |n| pick(view, n))
        };
        crops.clear();
        crops.extend((0..views).map(crop));
        self.count(SEEK, begin);

        let begin = Instant::now();
        let same_rate = info.rate == plan.sample_rate;
        let context = if same_rate { 0 } else { resamplers.get(info.rate, plan.sample_rate).context() as u64 };
        // What the filter needs of the recording: the crop and as much on both sides as it looks.
        let span =
            |crop: &Crop| (crop.start.saturating_sub(context), (crop.start + crop.len + context).min(info.frames));
        let low = crops.iter().map(|crop| span(crop).0).min().unwrap_or(0);
        let high = crops.iter().map(|crop| span(crop).1).max().unwrap_or(0);
        let each: u64 = crops.iter().map(|crop| span(crop).1 - span(crop).0).sum();
        // Views that overlap are decoded once, with what lies between them.
        let once = plan.views > 1 && high - low <= each;
        let used = u128::from(each.min(high - low)) * bytes.len() as u128 / u128::from(info.frames);
        self.bytes_recordings.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        self.bytes_used.fetch_add(used as u64, Ordering::Relaxed);
        if once {
            samples.resize((high - low) as usize, 0.0);
            decoder.read(bytes, &info, low, samples).map_err(|e| bad(e.to_string()))?;
        }
        self.count(DECODE, begin);
        wave.resize(plan.clip_samples, 0.0);
        for (crop, out) in crops.iter().zip(out.chunks_exact_mut(self.view_values)) {
            go_on()?;

            let begin = Instant::now();
            let (first, last) = span(crop);
            wave[..crop.offset].fill(0.0);
            wave[crop.offset + crop.out..].fill(0.0);
            let clip = &mut wave[crop.offset..][..crop.out];
            if !once && same_rate {
                decoder.read(bytes, &info, first, clip).map_err(|e| bad(e.to_string()))?;
            } else if !once {
                samples.resize((last - first) as usize, 0.0);
                decoder.read(bytes, &info, first, samples).map_err(|e| bad(e.to_string()))?;
            }
            self.count(DECODE, begin);
            go_on()?;

            let begin = Instant::now();
            let part = if once { &samples[(first - low) as usize..(last - low) as usize] } else { samples.as_slice() };
            if !same_rate {
                let lead = (crop.start - first) as usize;
                resamplers.get(info.rate, plan.sample_rate).process(part, lead, clip);
            } else if once {
                clip.copy_from_slice(part);
            }
            // The filter bank's logarithm would turn a NaN into silence.
            if !clip.iter().fold(true, |fine, x| fine & (x.abs() <= PEAK)) {
                return Err(bad("holds samples that are not numbers, or far too large".into()));
            }
            self.count(RESAMPLE, begin);
            go_on()?;

            if plan.form == Form::Waveform {
                out.copy_from_slice(wave);
                continue;
            }
            let begin = Instant::now();
            fbank.normalised(wave, plan.n_frames, out);
            self.count(FBANK, begin);
        }
        Ok(())
    }

    /// Asks the system for the bytes of this window of the block order and of the next, in the order in which they lie in
    /// the shards, while the workers are at this one. Never more than two windows ahead, nor `AHEAD` bytes in each.
    fn read_ahead(&self) {
        let Order::Block(blocks) = &self.order else { return };
        let (n, batch) = (blocks.n(), self.plan.batch as u64);
        let (mut from, mut to) = (0u64, 0u64); // samples that were asked for
        let mut rows = Vec::new();
        loop {
            let now = {
                let state = lock(&self.state);
                if state.closed {
                    return;
                }
                let open = if state.active && state.failure.is_none() { state.open.checked_mul(batch) } else { None };
                match open {
                    // After a seek the workers stand outside what was asked for.
                    Some(open) if !(from..=to).contains(&open) => {
                        (from, to) = (open, open);
                        open
                    }
                    Some(open) => open,
                    None => {
                        drop(self.work.wait_timeout(state, AHEAD_POLL));
                        continue;
                    }
                }
            };
            let end = |sample: u64| sample - sample % n + blocks.window(sample / n, sample % n).1;
            let next = end(end(now));
            if to >= next {
                drop(self.work.wait_timeout(lock(&self.state), AHEAD_POLL));
                continue;
            }
            let stop = end(to);
            let order = self.order.epoch(to / n);
            rows.clear();
            for sample in to..stop {
                // Other processes ask for theirs.
                if self.plan.ranges.iter().any(|&(a, b)| (a as u64..b as u64).contains(&(sample % batch))) {
                    rows.push(self.plan.rows[order.at(sample % n) as usize]);
                }
            }
            rows.sort_unstable();
            let mut left = AHEAD;
            for row in &rows {
                let bytes = self.index.advise(*row as usize, left);
                left -= bytes;
                self.bytes_ahead.fetch_add(bytes, Ordering::Relaxed);
                if lock(&self.state).closed {
                    return;
                }
            }
            to = stop;
        }
    }

    fn bad(&self, row: u32, what: String) {
        let (word, bit) = (row as usize / 64, 1 << (row % 64));
        let mut bad = lock(&self.bad);
        if bad.seen[word] & bit != 0 {
            return;
        }
        bad.seen[word] |= bit;
        bad.total += 1;
        if bad.list.len() < LISTED {
            bad.list.push((row, what));
        }
        let (allowed, n) = (self.plan.allowed(), self.plan.rows.len() as u64);
        if bad.total > allowed {
            let failure = Error::Budget { bad: bad.total, n, allowed, list: bad.list_text() };
            drop(bad);
            self.fail(failure.to_string());
        }
    }
}

impl Bad {
    fn list_text(&self) -> String {
        let mut text = String::new();
        for (_, what) in self.list.iter().take(10) {
            let _ = writeln!(text, "  {what}");
        }
        if self.total > 10 {
            let _ = writeln!(text, "  and {} more", self.total - 10);
        }
        text
    }
}

impl Scratch {
    fn new() -> Self {
        Self {
            decoder: Decoder::new(),
            resamplers: Resamplers::new(),
            fbank: Fbank::new(),
            reader: Reader::new(),
            crops: Vec::new(),
            samples: Vec::new(),
            wave: Vec::new(),
            wide: Vec::new(),
        }
    }
}

/// The row that a test split of one view would hold of this mono recording, into `out` \[n_frames, 128\]: its centre, or all of it
/// between zeros, at 32 kHz. `None` for samples that are not numbers, or far too large.
pub fn front_end(wave: &[f32], rate: u32, clip_samples: usize, n_frames: usize, out: &mut [f32]) -> Option<()> {
    let crop = Crop::new(wave.len() as u64, rate, FBANK_RATE, clip_samples, true, |surplus| surplus / 2);
    let resampler = Resampler::new(rate, FBANK_RATE);
    let context = resampler.context() as u64;
    let (first, last) = (crop.start.saturating_sub(context), (crop.start + crop.len + context).min(wave.len() as u64));
    let mut clip = vec![0.0; clip_samples];
    let part = &wave[first as usize..last as usize];
    resampler.process(part, (crop.start - first) as usize, &mut clip[crop.offset..][..crop.out]);
    if !clip.iter().all(|x| x.abs() <= PEAK) {
        return None;
    }
    Fbank::new().normalised(&clip, n_frames, out);
    Some(())
}

/// Which samples of a recording make a row, and where they come to lie in the clip.
#[derive(Debug, PartialEq)]
struct Crop {
    start: u64,    // first sample, at the recording's rate
    len: u64,      // samples, at the recording's rate
    offset: usize, // zeros before them in the clip, at the target rate
    out: usize,    // samples that they become, at the target rate
}

impl Crop {
    /// `pick` chooses the start, from 0 to the surplus that it is given. A short recording is padded at its end, or on both
    /// sides when it is `centred`.
    fn new(frames: u64, rate: u32, target: u32, clip: usize, centred: bool, pick: impl FnOnce(u64) -> u64) -> Self {
        let (rate, to) = (u128::from(rate), u128::from(target));
        let want = (clip as u128 * rate).div_ceil(to) as u64; // never too few for the last output sample
        if frames >= want {
            return Self { start: pick(frames - want), len: want, offset: 0, out: clip };
        }
        let out = ((u128::from(frames) * to + rate / 2) / rate).min(clip as u128) as usize;
        Self { start: 0, len: frames, offset: if centred { (clip - out) / 2 } else { 0 }, out }
    }
}

/// The nearest bfloat16, and of two the even one. Not for NaN, which no row holds.
fn bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16) as u16
}

/// The nearest 16-bit sample, and of two the even one: 32768 x, clipped to what there is. Not for NaN.
fn int16(x: f32) -> i16 {
    // Adding 1.5 · 2^23 leaves float32 no bits below 1: it rounds, and the lowest bits are the integer's.
    const ROUND: f32 = 12_582_912.0;
    ((x * 32_768.0).clamp(-32_768.0, 32_767.0) + ROUND).to_bits() as i16
}

/// Page faults of this thread that waited for a disk or a network.
fn thread_faults() -> u64 {
    #[cfg(target_os = "linux")]
    {
        // Safety: the kernel fills the struct, of which every bit pattern is valid.
        let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
        if unsafe { libc::getrusage(libc::RUSAGE_THREAD, &mut usage) } == 0 {
            return usage.ru_majflt as u64;
        }
    }
    0
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("no message")
}

thread_local! {
    static WORKER: Cell<bool> = const { Cell::new(false) };
}

/// A worker's panic is reported as a bad recording, not printed through the progress line.
fn hush_workers() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !WORKER.get() {
                before(info);
            }
        }));
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decode::Info;

    fn info(rate: u32, frames: u64) -> Info {
        Info { rate, channels: 1, frames }
    }

    fn centre(info: &Info) -> Crop {
        Crop::new(info.frames, info.rate, 32_000, 160_000, true, |surplus| surplus / 2)
    }

    #[test]
    fn a_crop_lies_inside_and_suffices() {
        for rate in [8_000, 22_050, 32_000, 44_100, 48_000, 192_000] {
            let frames = u64::from(rate) * 7 + 3;
            for pick in [0, u64::MAX] {
                let crop = Crop::new(frames, rate, 32_000, 160_000, false, |surplus| pick.min(surplus));
                assert_eq!((crop.offset, crop.out), (0, 160_000));
                assert!(crop.start + crop.len <= frames);
                assert!(crop.len * 32_000 >= 160_000 * u64::from(rate));
                if pick > 0 {
                    assert_eq!(crop.start + crop.len, frames);
                }
            }
        }
    }

    #[test]
    fn short_recordings_are_padded() {
        let short = info(16_000, 16_000);
        assert_eq!(centre(&short), Crop { start: 0, len: 16_000, offset: 64_000, out: 32_000 });
        let train = Crop::new(short.frames, short.rate, 32_000, 160_000, false, |_| unreachable!());
        assert_eq!(train, Crop { start: 0, len: 16_000, offset: 0, out: 32_000 });
        assert_eq!(centre(&info(32_000, 160_000)), Crop { start: 0, len: 160_000, offset: 0, out: 160_000 });
        assert_eq!(centre(&info(32_000, 160_011)).start, 5);
    }

    #[test]
    fn bf16_rounds_to_nearest_even() {
        for (x, y) in [(1.0, 0x3F80), (-1.0, 0xBF80), (1.0 + 1.0 / 256.0, 0x3F80), (1.0 + 3.0 / 256.0, 0x3F82)] {
            assert_eq!(bf16(x), y, "{x}");
        }
        assert_eq!(bf16(1.0 + 1.0 / 256.0 + 1e-6), 0x3F81);
    }

    #[test]
    fn samples_are_rounded_to_nearest_even_and_clipped() {
        for n in i16::MIN..=i16::MAX {
            assert_eq!(int16(f32::from(n) / 32_768.0), n);
        }
        for (x, n) in [(0.5, 0), (1.5, 2), (-0.5, 0), (-2.5, -2), (2.51, 3), (-7.49, -7), (40_000.0, 32_767)] {
            assert_eq!(int16(x / 32_768.0), n, "{x}");
        }
        assert_eq!([int16(1.0), int16(-1.0), int16(-1e12), int16(1e12)], [32_767, -32_768, -32_768, 32_767]);
    }

    fn plan(train: bool) -> Plan {
        Plan {
            rows: (0..5).collect(),
            batch: 2,
            ranges: vec![(0, 2)],
            seed: 0,
            train,
            sample_rate: 32_000,
            clip_samples: 800,
            n_frames: 1,
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
        let test = Pipeline::new(Arc::new(Index::broken(5)), plan(false)).unwrap();
        for _ in 0..3 {
            let Ok(Next::Batch(_, slab)) = test.next(wait) else { panic!("a batch is due") };
            // Safety: the batch is whole, so its workers are done with it.
            assert_eq!(unsafe { slab.row::<f32>(0, WEIGHT, 1) }, [0.0]);
        }
        assert!(matches!(test.next(wait), Ok(Next::End)));
        let found = test.diagnostics();
        assert_eq!(found.bad, 5);
        assert!(found.bad_list.iter().all(|(_, what)| what.contains("panic: ")), "{:?}", found.bad_list);

        let train = Pipeline::new(Arc::new(Index::broken(5)), plan(true)).unwrap();
        assert!(train.next(wait).is_err_and(|e| e.to_string().contains("none of the 5 recordings")));
    }
}

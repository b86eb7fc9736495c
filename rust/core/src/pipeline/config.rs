//! The settings of a pipeline, and their checks.

use jaxtrain_decode::refuse;
use std::sync::Arc;

use super::crop::Clip;
use crate::error::Error;
use crate::fbank::FilterBank;
use crate::source::Index;
use jaxtrain_decode::RATES;

/// Worker threads of a pipeline, at most.
const MAX_THREADS: usize = 1024;

/// The settings of a pipeline.
pub struct Config {
    pub rows: Vec<u32>, // rows of the index that this split uses, before permutation
    pub batch: usize,   // rows of the global batch
    pub ranges: Vec<(usize, usize)>, // [start, stop) of the global batch that this process reads
    pub seed: u64,
    pub train: bool, // permuted, endless, random crops; otherwise one pass in order over centre crops
    pub bank: Arc<FilterBank>, // of the front end, whose sample rate crops are taken at
    pub time_expansion: f64, // times slower than life that recordings are: their rate is this times the stated one
    pub clip_samples: usize, // at the front end's rate
    pub n_frames: usize,     // of a row's spectrogram
    pub channel: Option<u16>, // of a recording; None: the mean of all
    pub clip: Clip,          // how a clip is taken from a recording
    pub views: usize,        // crops of one recording in a row
    pub form: Form,          // the form of each crop in a row
    pub block: Option<Block>, // training in the block order instead of a global permutation
    pub threads: usize,
    pub depth: usize,    // finished batches that may be queued
    pub bad_budget: f64, // share of `rows` that may be unusable
}

/// The form in which a row holds a crop.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Form {
    Float32,  // its spectrogram
    Bfloat16, // its spectrogram, rounded to nearest even
    Waveform, // its samples as 16-bit integers: times 32768, rounded to nearest even and clipped
}

impl Form {
    pub(super) fn value_bytes(self) -> usize {
        match self {
            Form::Float32 => 4,
            Form::Bfloat16 | Form::Waveform => 2,
        }
    }
}

/// The block order; see `order::Blocks`.
#[derive(Clone, Copy)]
pub struct Block {
    pub rows: u64,   // at most, of a block
    pub window: u64, // blocks whose rows are permuted together
}

impl Config {
    /// # Errors
    /// A value that is out of range or contradicts another, or a row that is not in the index.
    pub(super) fn check(&self, index: &Index) -> Result<(), Error> {
        let fail = |what: String| Err(Error::Invalid(what));
        let n_rows = index.n_rows();
        refuse!(self.rows.is_empty(), fail("rows is empty: this split has no recordings".into()));
        if let Some(row) = self.rows.iter().find(|&&row| row as usize >= n_rows) {
            return Err(Error::RowRange { row: i64::from(*row), n: n_rows });
        }
        refuse!(
            self.ranges.is_empty(),
            fail("ranges is empty: this process would read no rows".into())
        );
        if let Some((start, stop)) = self.ranges.iter().find(|(a, b)| a >= b || *b > self.batch) {
            return fail(format!(
                "range [{start}, {stop}) is not a part of a batch of {} rows",
                self.batch
            ));
        }
        if self.threads == 0 || self.depth == 0 {
            return fail(format!(
                "threads = {} and depth = {} must be at least 1",
                self.threads, self.depth
            ));
        }
        refuse!(
            self.threads > MAX_THREADS,
            fail(format!("threads = {} must be at most {MAX_THREADS}", self.threads))
        );
        refuse!(self.views == 0, fail("views = 0 must be at least 1".into()));
        if let Some(Block { rows, window }) = self.block {
            if rows == 0 || window == 0 {
                return fail(format!(
                    "blocks of {rows} rows and windows of {window} blocks must be at least 1"
                ));
            }
            if self.rows.windows(2).any(|pair| pair[0] >= pair[1]) {
                return fail(
                    "rows must increase: the block order reads neighbouring rows together".into(),
                );
            }
        }
        if !(0.0..=1.0).contains(&self.bad_budget) {
            return fail(format!("bad_budget = {} must lie in [0, 1]", self.bad_budget));
        }
        if !(self.time_expansion > 0.0 && self.time_expansion.is_finite()) {
            return fail(format!("time_expansion = {} must be above 0", self.time_expansion));
        }
        let frames = self.bank.front_end().n_frames(self.clip_samples);
        if frames == 0 || frames > self.n_frames {
            return fail(format!(
                "a clip of {} samples has {frames} frames, but a row holds 1 to {}",
                self.clip_samples, self.n_frames
            ));
        }
        Ok(())
    }

    /// Values of one view; None when they overflow.
    pub(super) fn view_values(&self) -> Option<usize> {
        match self.form {
            Form::Waveform => Some(self.clip_samples),
            _ => self.n_frames.checked_mul(self.bank.front_end().n_mels),
        }
    }

    /// Hz that crops are taken at.
    pub(super) fn sample_rate(&self) -> u32 {
        self.bank.front_end().sample_rate
    }

    /// The real rate of a recording whose headers state `rate`. An error if it is none of `RATES`.
    pub(super) fn real_rate(&self, rate: u32) -> Result<u32, String> {
        if self.time_expansion == 1.0 {
            return Ok(rate);
        }
        let real = (f64::from(rate) * self.time_expansion).round() as u32;
        if RATES.contains(&real) {
            return Ok(real);
        }
        Err(format!(
            "has {rate} Hz, of which time_expansion = {} makes {real}; expected {RATES:?}",
            self.time_expansion
        ))
    }

    /// Rows of each range.
    pub(super) fn range_rows(&self) -> impl Iterator<Item = usize> + '_ {
        self.ranges.iter().map(|(start, stop)| stop - start)
    }

    /// Batches in one pass.
    pub fn n_batches(&self) -> u64 {
        (self.rows.len() as u64).div_ceil(self.batch as u64)
    }

    /// Distinct recordings that may be unusable.
    pub(super) fn allowed(&self) -> u64 {
        if self.bad_budget == 0.0 {
            0
        } else {
            ((self.rows.len() as f64 * self.bad_budget) as u64).max(1)
        }
    }
}

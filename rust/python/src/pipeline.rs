//! The pipeline of batches.

use std::time::Duration;

use jaxtrain_loader::error::Error;
use jaxtrain_loader::pipeline::{self, Block, Clip, Config, Form, Next, Short, STAGES};
use numpy::PyReadonlyArray1;
use pyo3::exceptions::{PyStopIteration, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::audio::{FilterBank, N_FRAMES};
use crate::index::Index;
use crate::{batch, exception};

/// The longest wait between two checks for signals such as Ctrl-C.
const SIGNALS: Duration = Duration::from_millis(50);

/// Batches of spectrograms or waveforms, prepared by worker threads; the order depends on the position alone.
///
/// index: where the recordings are. rows: int64 [n], the rows of the index that this split uses. batch: rows in the
/// global batch. ranges: [start, stop) pairs of the global batch that this process reads. seed: in [0, 2^64).
/// train: True for permuted, endless batches of random crops; False for one pass in order over centre crops.
///
/// bank: the front end, at whose rate crops are taken; None for FilterBank(). time_expansion: how many times slower than
/// life recordings are: their rate is this times that which their headers state. clip_samples: samples of a crop.
/// n_frames: frames of a spectrogram, at least those of a crop. views: crops of one recording in each row.
/// form: what a row holds of a crop: "float32", its spectrogram; "bfloat16", the same, given as uint16; "waveform", its
/// samples. channel: of recordings whose row names none; None for the mean of all. short: where samples that are fewer
/// than a crop lie in it: "origin" (at the start in training, in the centre in testing), "start", "centre", or "random"
/// (anywhere in training, in the centre in testing). repeat: they are surrounded by themselves, not by silence. silence:
/// what surrounds a part that is shorter than a crop is silence, not what the recording holds there.
///
/// block: (rows of a block, blocks of a window) for the block order in training; None for a global permutation.
///
/// threads: worker threads. depth: finished batches that may be queued. bad_budget: the share of the recordings that
/// may be unusable: max(1, bad_budget * n) of them, or none for 0.
///
/// The threads start at once and wait for the first seek or next.
/// Raises ValueError for arguments that contradict each other, and IndexError for rows that are not in the index.
#[pyclass(frozen)]
pub struct Pipeline(pipeline::Pipeline);

#[pymethods]
impl Pipeline {
    #[new]
    #[pyo3(signature = (index, *, rows, batch, ranges, seed, train, bank = None, time_expansion = 1.0,
                        clip_samples = 160_000, n_frames = N_FRAMES, views = 1, form = "float32", channel = None, short = "origin", repeat = false,
                        silence = false, block = None, threads = 1, depth = 2, bad_budget = 0.01))]
    #[allow(clippy::too_many_arguments)] // keywords in Python; one struct from here on
    fn new(
        index: &Index,
        rows: PyReadonlyArray1<'_, i64>,
        batch: usize,
        ranges: Vec<(usize, usize)>,
        seed: u64,
        train: bool,
        bank: Option<&FilterBank>,
        time_expansion: f64,
        clip_samples: usize,
        n_frames: usize,
        views: usize,
        form: &str,
        channel: Option<u16>,
        short: &str,
        repeat: bool,
        silence: bool,
        block: Option<(u64, u64)>,
        threads: usize,
        depth: usize,
        bad_budget: f64,
    ) -> PyResult<Self> {
        let n = index.0.n_rows();
        let narrow = |&row: &i64| u32::try_from(row).map_err(|_| exception(Error::RowRange { row, n }));
        let rows = rows.as_array().iter().map(narrow).collect::<PyResult<_>>()?;
        let form = match form {
            "float32" => Form::Float32,
            "bfloat16" => Form::Bfloat16,
            "waveform" => Form::Waveform,
            _ => return Err(PyValueError::new_err(format!("form = {form:?} must be float32, bfloat16 or waveform"))),
        };
        let short = match short {
            "origin" => Short::Origin,
            "start" => Short::Start,
            "centre" => Short::Centre,
            "random" => Short::Random,
            _ => {
                return Err(PyValueError::new_err(format!("short = {short:?} must be origin, start, centre or random")))
            }
        };
        let config = Config {
            rows,
            batch,
            ranges,
            seed,
            train,
            bank: FilterBank::or_default(bank),
            time_expansion,
            clip_samples,
            n_frames,
            views,
            channel,
            clip: Clip { short, repeat, silence },
            form,
            block: block.map(|(rows, window)| Block { rows, window }),
            threads,
            depth,
            bad_budget,
        };
        Ok(Self(pipeline::Pipeline::new(index.0.clone(), config).map_err(exception)?))
    }

    /// Continue with global batch number position, also after the end of a test split.
    ///
    /// Raises ValueError for a position whose samples cannot be numbered in 64 bits.
    fn seek(&self, py: Python<'_>, position: u64) -> PyResult<()> {
        py.detach(|| self.0.seek(position)).map_err(exception)
    }

    /// Wait for the next batch.
    ///
    /// Returns (position, fields). position: the number of the batch after this one. fields: for each field a list of
    /// arrays, one for each range, of r rows:
    ///
    /// spectrogram  float32 (uint16 for form="bfloat16") [r, n_frames, mels], or [r, views, n_frames, mels] when views > 1
    /// waveform     int16 [r, clip_samples], or [r, views, clip_samples], instead of spectrogram for form="waveform":
    ///              the samples times 32768, rounded to nearest even and clipped
    /// label        int32 [r], the class, -1 where it is null
    /// index        int32 [r], the recording's row in the index, -1 where the last batch of a test split is padded
    /// epoch        int32 [r]
    /// weight       float32 [r], 1 for a valid row and 0 for padding or an unusable recording
    ///
    /// The arrays are read-only, contiguous, aligned to 64 bytes, and own their memory.
    /// Raises StopIteration after the end of a test split and after close. Raises RuntimeError, from then on, when more
    /// recordings are unusable than bad_budget allows. KeyboardInterrupt is raised within a tenth of a second.
    fn next<'py>(&self, py: Python<'py>) -> PyResult<(u64, Bound<'py, PyDict>)> {
        loop {
            py.check_signals()?;
            match py.detach(|| self.0.next(SIGNALS)).map_err(exception)? {
                Next::Batch(position, slab) => return Ok((position, batch::fields(py, self.0.config(), slab)?)),
                Next::End => return Err(PyStopIteration::new_err(())),
                Next::Pending => {}
            }
        }
    }

    /// Return counters that show where time and memory go.
    ///
    /// queued, filling, depth: batches that are complete, batches that are being filled, and how many may be queued.
    /// threads: worker threads. slabs, slab_bytes: batch buffers that exist, and the size of each. rows: rows written.
    /// bad, bad_allowed: distinct recordings that were unusable, and how many may be. bad_list: (row of the index,
    /// reason) of the first hundred. seconds: by stage, summed over the workers; "wait" is the consumer's. slowest:
    /// the workers' stage with the most seconds; None before any work. bytes_recordings: size of the recordings that
    /// were opened. bytes_used: the share of it that the crops needed. bytes_ahead: bytes requested from the system in
    /// advance (block order). faults: major page faults of the workers (0 where the system does not count them).
    /// slow_rows: rows of formats that symphonia reads (AIFF, CAF, M4A, ADPCM), several times slower.
    fn diagnostics<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let counters = self.0.diagnostics();
        let seconds = PyDict::new(py);
        for (stage, value) in STAGES.iter().zip(counters.seconds) {
            seconds.set_item(stage, value)?;
        }
        let out = PyDict::new(py);
        out.set_item("queued", counters.queued)?;
        out.set_item("filling", counters.filling)?;
        out.set_item("depth", counters.depth)?;
        out.set_item("threads", counters.threads)?;
        out.set_item("slabs", counters.slabs)?;
        out.set_item("slab_bytes", counters.slab_bytes)?;
        out.set_item("rows", counters.rows)?;
        out.set_item("bad", counters.bad)?;
        out.set_item("bad_allowed", counters.bad_allowed)?;
        out.set_item("bad_list", counters.bad_list)?;
        out.set_item("seconds", seconds)?;
        out.set_item("slowest", counters.slowest)?;
        out.set_item("bytes_recordings", counters.bytes_recordings)?;
        out.set_item("bytes_used", counters.bytes_used)?;
        out.set_item("bytes_ahead", counters.bytes_ahead)?;
        out.set_item("faults", counters.faults)?;
        out.set_item("slow_rows", counters.slow_rows)?;
        Ok(out)
    }

    /// Stop the workers. A next that waits in another thread raises StopIteration.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.0.close());
    }
}

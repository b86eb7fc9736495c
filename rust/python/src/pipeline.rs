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

/// Batches of spectrograms or waveforms by worker threads; the position decides the order.
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
        index: &Index, rows: PyReadonlyArray1<'_, i64>, batch: usize, ranges: Vec<(usize, usize)>,
        seed: u64, train: bool, bank: Option<&FilterBank>, time_expansion: f64,
        clip_samples: usize, n_frames: usize, views: usize, form: &str, channel: Option<u16>,
        short: &str, repeat: bool, silence: bool, block: Option<(u64, u64)>, threads: usize,
        depth: usize, bad_budget: f64,
    ) -> PyResult<Self> {
        let n = index.0.n_rows();
        let narrow =
            |&row: &i64| u32::try_from(row).map_err(|_| exception(Error::RowRange { row, n }));
        let rows = rows.as_array().iter().map(narrow).collect::<PyResult<_>>()?;
        let named = |of: &str, name: &str, names: &str| {
            PyValueError::new_err(format!("{of} = {name:?} must be {names}"))
        };
        let form = match form {
            "float32" => Form::Float32,
            "bfloat16" => Form::Bfloat16,
            "waveform" => Form::Waveform,
            _ => return Err(named("form", form, "float32, bfloat16 or waveform")),
        };
        let short = match short {
            "origin" => Short::Origin,
            "start" => Short::Start,
            "centre" => Short::Centre,
            "random" => Short::Random,
            _ => return Err(named("short", short, "origin, start, centre or random")),
        };
        let bank = FilterBank::or_default(bank);
        let clip = Clip { short, repeat, silence };
        let block = block.map(|(rows, window)| Block { rows, window });
        #[rustfmt::skip] // as the signature
        let config = Config {
            rows, batch, ranges, seed, train, bank, time_expansion, clip_samples, n_frames, views, form, channel, clip,
            block, threads, depth, bad_budget,
        };
        Ok(Self(pipeline::Pipeline::new(index.0.clone(), config).map_err(exception)?))
    }

    /// Continue with global batch number position, also after the end of a test split.
    fn seek(&self, py: Python<'_>, position: u64) -> PyResult<()> {
        py.detach(|| self.0.seek(position)).map_err(exception)
    }

    /// Wait for the next batch.
    fn next<'py>(&self, py: Python<'py>) -> PyResult<(u64, Bound<'py, PyDict>)> {
        loop {
            py.check_signals()?;
            match py.detach(|| self.0.next(SIGNALS)).map_err(exception)? {
                Next::Batch(position, slab) => {
                    return Ok((position, batch::fields(py, self.0.config(), slab)?))
                }
                Next::End => return Err(PyStopIteration::new_err(())),
                Next::Pending => {}
            }
        }
    }

    /// Return counters that show where time and memory go.
    fn diagnostics<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let counters = self.0.diagnostics();
        let seconds = PyDict::new(py);
        for (stage, value) in STAGES.iter().zip(counters.seconds) {
            seconds.set_item(stage, value)?;
        }
        let out = PyDict::new(py);
        out.set_item("seconds", seconds)?;
        macro_rules! items {
            ($($name:ident)*) => { $(out.set_item(stringify!($name), counters.$name)?;)* };
        }
        items! { queued threads slabs rows bad bad_allowed bad_list slowest bytes_ahead slow_rows }
        Ok(out)
    }

    /// Stop the workers. A next that waits in another thread raises StopIteration.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.0.close());
    }
}

//! The pipeline of batches.

use std::time::Duration;

use jaxtrain_loader::error::Error;
use jaxtrain_loader::pipeline::{self, Block, Clip, Config, Form, Next, Short, STAGES};
use numpy::PyReadonlyArray1;
use pyo3::exceptions::{PyStopIteration, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::audio::FilterBank;
use crate::index::Index;
use crate::{batch, exception};

/// The longest wait between two checks for signals such as Ctrl-C.
const SIGNALS: Duration = Duration::from_millis(50);

/// The settings of a pipeline: the attributes of a PipelineSettings of loaders/audio/pipeline_settings.py, which explains them.
#[derive(FromPyObject)]
struct Settings<'py> {
    rows: PyReadonlyArray1<'py, i64>,
    batch: usize,
    ranges: Vec<(usize, usize)>,
    seed: u64,
    train: bool,
    bank: Py<FilterBank>,
    time_expansion: f64,
    clip_samples: usize,
    n_frames: usize,
    views: usize,
    form: String,
    channel: Option<u16>,
    short: String,
    repeat: bool,
    silence: bool,
    block: Option<(u64, u64)>,
    threads: usize,
    depth: usize,
    bad_budget: f64,
}

impl Settings<'_> {
    /// The same in the types of the core, for an index of `n_rows` rows.
    fn into_config(self, n_rows: usize) -> PyResult<Config> {
        let narrow = |&row: &i64| {
            u32::try_from(row).map_err(|_| exception(Error::RowRange { row, n: n_rows }))
        };
        let named = |of: &str, name: &str, names: &str| {
            PyValueError::new_err(format!("{of} = {name:?} must be {names}"))
        };
        let form = match self.form.as_str() {
            "float32" => Form::Float32,
            "bfloat16" => Form::Bfloat16,
            "waveform" => Form::Waveform,
            name => return Err(named("form", name, "float32, bfloat16 or waveform")),
        };
        let short = match self.short.as_str() {
            "origin" => Short::Origin,
            "start" => Short::Start,
            "centre" => Short::Centre,
            "random" => Short::Random,
            name => return Err(named("short", name, "origin, start, centre or random")),
        };
        Ok(Config {
            rows: self.rows.as_array().iter().map(narrow).collect::<PyResult<_>>()?,
            batch: self.batch,
            ranges: self.ranges,
            seed: self.seed,
            train: self.train,
            bank: self.bank.get().0.clone(),
            time_expansion: self.time_expansion,
            clip_samples: self.clip_samples,
            n_frames: self.n_frames,
            channel: self.channel,
            clip: Clip { short, repeat: self.repeat, silence: self.silence },
            views: self.views,
            form,
            block: self.block.map(|(rows, window)| Block { rows, window }),
            threads: self.threads,
            depth: self.depth,
            bad_budget: self.bad_budget,
        })
    }
}

/// Batches of spectrograms or waveforms by worker threads; the position decides the order.
#[pyclass(frozen)]
pub struct Pipeline(pipeline::Pipeline);

#[pymethods]
impl Pipeline {
    #[new]
    fn new(index: &Index, settings: Settings<'_>) -> PyResult<Self> {
        let config = settings.into_config(index.0.n_rows())?;
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

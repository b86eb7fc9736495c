//! The Python face: arguments in, numpy arrays out. Every wait releases the GIL; waits for data also answer signals.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use numpy::ndarray::{ArrayView, IntoDimension};
use numpy::{Element, IntoPyArray, PyArray, PyArray1, PyArray2, PyArrayMethods, PyReadonlyArray1, PyReadonlyArray2};
use pyo3::exceptions::{PyIndexError, PyOSError, PyRuntimeError, PyStopIteration, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};

use crate::decode::Decoder;
use crate::error::Error;
use crate::fbank::{Fbank, N_MELS};
use crate::order::{Blocks, Order, Permutation};
use crate::pipeline::{self, Block, Form, Next, Plan, CLIP, EPOCH, INDEX, LABEL, STAGES, WEIGHT};
use crate::resample::Resampler;
use crate::slab::Slab;
use crate::source;
use crate::sudoku::{parallel, Rules};

/// How long a wait may keep Ctrl-C waiting.
const SIGNALS: Duration = Duration::from_millis(50);

/// Frames of a spectrogram as the model sees it.
const N_FRAMES: usize = 512;

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(build_profile, module)?)?;
    module.add_function(wrap_pyfunction!(decode, module)?)?;
    module.add_function(wrap_pyfunction!(resample, module)?)?;
    module.add_function(wrap_pyfunction!(fbank, module)?)?;
    module.add_function(wrap_pyfunction!(front_end, module)?)?;
    module.add_function(wrap_pyfunction!(permutation, module)?)?;
    module.add_function(wrap_pyfunction!(block_order, module)?)?;
    module.add_function(wrap_pyfunction!(sudoku_solve, module)?)?;
    module.add_function(wrap_pyfunction!(sudoku_generate, module)?)?;
    module.add("ORDER_VERSION", crate::order::VERSION)?;
    module.add("STAGES", STAGES)?;
    module.add_class::<Index>()?;
    module.add_class::<Pipeline>()
}

impl From<Error> for PyErr {
    fn from(error: Error) -> Self {
        let text = error.to_string();
        match error {
            Error::Open { .. } => PyOSError::new_err(text),
            Error::RowRange { .. } => PyIndexError::new_err(text),
            Error::Failed(_) | Error::Thread(_) => PyRuntimeError::new_err(text),
            _ => PyValueError::new_err(text),
        }
    }
}

#[pyfunction]
fn build_profile() -> &'static str {
    if cfg!(debug_assertions) {
        "debug"
    } else {
        "release"
    }
}

#[pyfunction]
#[pyo3(signature = (data, start = 0, length = None))]
fn decode<'py>(
    py: Python<'py>,
    data: &[u8],
    start: u64,
    length: Option<u64>,
) -> PyResult<(Bound<'py, PyArray1<f32>>, u32, u64)> {
    let decoded = py.detach(|| {
        let mut decoder = Decoder::new();
        let info = decoder.info(data).map_err(|e| e.to_string())?;
        let length = length.unwrap_or(info.frames.saturating_sub(start));
        if start.checked_add(length).is_none_or(|end| end > info.frames) {
            return Err(format!("[{start}, {start} + {length}) is not inside the recording's {} frames", info.frames));
        }
        let mut wave = Vec::new();
        let n = usize::try_from(length).map_err(|e| e.to_string())?;
        wave.try_reserve_exact(n).map_err(|e| e.to_string())?; // the length is only the header's word
        wave.resize(n, 0.0);
        decoder.read(data, &info, start, &mut wave).map_err(|e| e.to_string())?;
        Ok((wave, info))
    });
    let (wave, info) = decoded.map_err(PyValueError::new_err)?;
    Ok((wave.into_pyarray(py), info.rate, info.frames))
}

#[pyfunction]
fn resample<'py>(
    py: Python<'py>,
    wave: PyReadonlyArray1<'py, f32>,
    source_rate: u32,
    target_rate: u32,
) -> PyResult<Bound<'py, PyArray1<f32>>> {
    if source_rate == 0 || target_rate == 0 {
        return Err(PyValueError::new_err(format!("rates {source_rate} and {target_rate} must be at least 1 Hz")));
    }
    let wave = wave.as_slice()?;
    let out = py.detach(|| {
        let (n, from, to) = (wave.len() as u128, u128::from(source_rate), u128::from(target_rate));
        let mut out = vec![0.0; ((n * to + from / 2) / from) as usize];
        Resampler::new(source_rate, target_rate).process(wave, 0, &mut out);
        out
    });
    Ok(out.into_pyarray(py))
}

#[pyfunction]
#[pyo3(signature = (wave, *, normalise = false))]
fn fbank<'py>(
    py: Python<'py>,
    wave: PyReadonlyArray1<'py, f32>,
    normalise: bool,
) -> PyResult<Bound<'py, PyArray2<f32>>> {
    let wave = wave.as_slice()?;
    let n = Fbank::n_frames(wave.len());
    let frames = if normalise { N_FRAMES } else { n };
    if n == 0 || n > frames {
        return Err(PyValueError::new_err(format!("{} samples make {n} frames, not 1 to {frames}", wave.len())));
    }
    let out = py.detach(|| {
        let mut out = vec![0.0; frames * N_MELS];
        let mut bank = Fbank::new();
        if normalise {
            bank.normalised(wave, frames, &mut out);
        } else {
            bank.log_mel(wave, &mut out);
        }
        out
    });
    out.into_pyarray(py).reshape([frames, N_MELS])
}

#[pyfunction]
fn front_end<'py>(
    py: Python<'py>,
    wave: PyReadonlyArray1<'py, f32>,
    rate: u32,
    clip_samples: usize,
    n_frames: usize,
) -> PyResult<Bound<'py, PyArray2<f32>>> {
    if rate == 0 || !(1..=n_frames).contains(&Fbank::n_frames(clip_samples)) {
        let frames = Fbank::n_frames(clip_samples);
        return Err(PyValueError::new_err(format!(
            "{rate} Hz must be at least 1, and a clip of {clip_samples} samples makes {frames} frames, not 1 to {n_frames}"
        )));
    }
    let wave = wave.as_slice()?;
    let mut out = vec![0.0; n_frames * N_MELS];
    py.detach(|| pipeline::front_end(wave, rate, clip_samples, n_frames, &mut out))
        .ok_or_else(|| PyValueError::new_err("the waveform holds samples that are not numbers, or far too large"))?;
    out.into_pyarray(py).reshape([n_frames, N_MELS])
}

#[pyfunction]
fn permutation<'py>(
    py: Python<'py>,
    seed: u64,
    epoch: u64,
    n: u64,
    i: PyReadonlyArray1<'py, i64>,
) -> PyResult<Bound<'py, PyArray1<i64>>> {
    if n == 0 || n >= 1 << 62 {
        return Err(PyValueError::new_err(format!("n = {n} must lie in [1, 2^62)")));
    }
    let order = Permutation::new(seed, epoch, n);
    places(py, n, i, |i| order.at(i))
}

#[pyfunction]
fn block_order<'py>(
    py: Python<'py>,
    seed: u64,
    epoch: u64,
    stops: PyReadonlyArray1<'py, i64>,
    window: u64,
    i: PyReadonlyArray1<'py, i64>,
) -> PyResult<Bound<'py, PyArray1<i64>>> {
    let stops = stops.as_slice()?;
    let increasing = stops.windows(2).all(|pair| pair[0] <= pair[1]);
    if !increasing || stops.first().is_none_or(|&first| first < 0) || window == 0 {
        return Err(PyValueError::new_err("stops must increase from 0, and window must be at least 1"));
    }
    let blocks = Blocks::new(seed, window, stops.iter().map(|&stop| stop as u64).collect());
    let order = Order::Block(blocks);
    let at = order.epoch(epoch);
    places(py, order.n(), i, |i| at.at(i))
}

fn places<'py>(
    py: Python<'py>,
    n: u64,
    i: PyReadonlyArray1<'py, i64>,
    at: impl Fn(u64) -> u64 + Sync,
) -> PyResult<Bound<'py, PyArray1<i64>>> {
    let place = |&i: &i64| match u64::try_from(i) {
        Ok(i) if i < n => Ok(at(i) as i64),
        _ => Err(i),
    };
    let i = i.as_slice()?;
    let recordings: Result<Vec<i64>, i64> = py.detach(|| i.iter().map(place).collect());
    let recordings = recordings.map_err(|i| PyIndexError::new_err(format!("place {i} is not in [0, {n})")))?;
    Ok(recordings.into_pyarray(py))
}

fn sudoku_rules(side: usize) -> PyResult<Rules> {
    Rules::new(side).ok_or_else(|| PyValueError::new_err(format!("side {side} must be 4 or 9")))
}

type Boards<'py> = Bound<'py, PyArray2<u8>>;

#[pyfunction]
#[pyo3(signature = (boards, *, limit = 2, threads = 1))]
fn sudoku_solve<'py>(
    py: Python<'py>,
    boards: PyReadonlyArray2<'py, u8>,
    limit: u32,
    threads: usize,
) -> PyResult<(Bound<'py, PyArray1<i64>>, Bound<'py, PyArray1<i64>>, Boards<'py>)> {
    let [n, cells] = [boards.as_array().nrows(), boards.as_array().ncols()];
    let rules = sudoku_rules(cells.isqrt()).ok().filter(|rules| rules.n_cells() == cells);
    let rules = rules.ok_or_else(|| PyValueError::new_err(format!("boards of {cells} cells; 16 or 81 are known")))?;
    let boards = boards.as_slice()?;
    let found = py.detach(|| parallel(n, threads, |i| rules.solve(&boards[i * cells..(i + 1) * cells], limit)));
    let count: Vec<i64> = found.iter().map(|f| f.solutions.into()).collect();
    let guesses: Vec<i64> = found.iter().map(|f| f.guesses.into()).collect();
    let first: Vec<u8> = found.into_iter().flat_map(|f| f.first.unwrap_or_else(|| vec![0; cells])).collect();
    Ok((count.into_pyarray(py), guesses.into_pyarray(py), first.into_pyarray(py).reshape([n, cells])?))
}

#[pyfunction]
#[pyo3(signature = (n, *, side = 9, seed = 0, start = 0, blanks = (0, 81), threads = 1))]
fn sudoku_generate(
    py: Python<'_>,
    n: usize,
    side: usize,
    seed: u64,
    start: u64,
    blanks: (usize, usize),
    threads: usize,
) -> PyResult<(Boards<'_>, Boards<'_>, Bound<'_, PyArray1<i64>>)> {
    let rules = sudoku_rules(side)?;
    let found = py.detach(|| parallel(n, threads, |i| rules.generate(seed, start + i as u64, blanks.0, blanks.1)));
    let guesses: Vec<i64> = found.iter().map(|p| p.guesses.into()).collect();
    let (mut boards, mut solutions) = (Vec::new(), Vec::new());
    for puzzle in found {
        boards.extend(puzzle.board);
        solutions.extend(puzzle.solution);
    }
    let shape = [n, side * side];
    Ok((boards.into_pyarray(py).reshape(shape)?, solutions.into_pyarray(py).reshape(shape)?, guesses.into_pyarray(py)))
}

#[pyclass(frozen)]
struct Index(Arc<source::Index>);

impl Index {
    fn row(&self, row: i64) -> PyResult<usize> {
        usize::try_from(row).map_err(|_| Error::RowRange { row, n: self.0.n_rows() }.into())
    }
}

#[pymethods]
impl Index {
    #[new]
    #[pyo3(signature = (shards, *, audio = "audio", label = None, root = None, cache = None))]
    fn new(
        py: Python<'_>,
        shards: Vec<PathBuf>,
        audio: &str,
        label: Option<&str>,
        root: Option<PathBuf>,
        cache: Option<PathBuf>,
    ) -> PyResult<Self> {
        let options = source::Options { audio, label, root: root.as_deref(), cache: cache.as_deref() };
        Ok(Self(Arc::new(py.detach(|| source::Index::open(&shards, options))?)))
    }

    #[getter]
    fn n_rows(&self) -> usize {
        self.0.n_rows()
    }

    #[getter]
    fn class_names(&self) -> Option<Vec<String>> {
        self.0.class_names().map(<[String]>::to_vec)
    }

    #[getter]
    fn labels<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i64>> {
        let labels: Vec<i64> = self.0.labels().iter().map(|&label| label.into()).collect();
        labels.into_pyarray(py)
    }

    #[getter]
    fn fingerprint(&self) -> &str {
        self.0.fingerprint()
    }

    #[getter]
    fn first_rows<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i64>> {
        let rows: Vec<i64> = self.0.first_rows().map(|row| row as i64).collect();
        rows.into_pyarray(py)
    }

    fn encoded<'py>(&self, py: Python<'py>, row: i64) -> PyResult<Bound<'py, PyBytes>> {
        let (row, mut reader) = (self.row(row)?, source::Reader::new());
        Ok(PyBytes::new(py, py.detach(|| self.0.encoded(row, &mut reader))?))
    }

    fn path(&self, py: Python<'_>, row: i64) -> PyResult<Option<String>> {
        let row = self.row(row)?;
        Ok(py.detach(|| self.0.path(row, &mut source::Reader::new()))?)
    }

    fn paths(&self, py: Python<'_>) -> PyResult<Vec<Option<String>>> {
        let all = || {
            let mut reader = source::Reader::new();
            (0..self.0.n_rows()).map(|row| self.0.path(row, &mut reader)).collect::<Result<_, _>>()
        };
        Ok(py.detach(all)?)
    }

    fn __len__(&self) -> usize {
        self.0.n_rows()
    }
}

/// The base object of a batch's arrays: the slab lives as long as any of them.
#[pyclass(frozen)]
struct SlabOwner(Arc<Slab>);

impl SlabOwner {
    /// A read-only array over a field of a range; `shape` without the rows.
    fn array<'py, T: Element>(
        this: &Bound<'py, Self>,
        range: usize,
        field: usize,
        shape: impl IntoDimension,
    ) -> Bound<'py, PyAny> {
        let (start, bytes) = this.get().0.array(range, field);
        let mut dims = vec![0];
        dims.extend(numpy::ndarray::Dimension::slice(&shape.into_dimension()));
        let row: usize = dims[1..].iter().product::<usize>() * size_of::<T>();
        dims[0] = bytes / row;
        // Safety: the slab holds `bytes` initialised bytes of plain numbers here, and its workers are done with them.
        let view = unsafe { ArrayView::from_shape_ptr(dims, start.cast::<T>().cast_const()) };
        // Safety: `this` keeps the slab alive, and so does the array by its base object.
        let array = unsafe { PyArray::borrow_from_array(&view, this.clone().into_any()) };
        array.readwrite().make_nonwriteable();
        array.into_any()
    }
}

#[pyclass(frozen)]
struct Pipeline(pipeline::Pipeline);

#[pymethods]
impl Pipeline {
    #[new]
    #[pyo3(signature = (index, *, rows, batch, ranges, seed, train, sample_rate = 32_000, clip_samples = 160_000,
                        n_frames = N_FRAMES, views = 1, form = "float32", block = None, threads = 1, depth = 2,
                        bad_budget = 0.01))]
    #[allow(clippy::too_many_arguments)] // keywords in Python; one struct from here on
    fn new(
        index: &Index,
        rows: PyReadonlyArray1<'_, i64>,
        batch: usize,
        ranges: Vec<(usize, usize)>,
        seed: u64,
        train: bool,
        sample_rate: u32,
        clip_samples: usize,
        n_frames: usize,
        views: usize,
        form: &str,
        block: Option<(u64, u64)>,
        threads: usize,
        depth: usize,
        bad_budget: f64,
    ) -> PyResult<Self> {
        let n = index.0.n_rows();
        let narrow = |&row: &i64| u32::try_from(row).map_err(|_| Error::RowRange { row, n });
        let rows = rows.as_array().iter().map(narrow).collect::<Result<_, _>>()?;
        let form = match form {
            "float32" => Form::Float32,
            "bfloat16" => Form::Bfloat16,
            "waveform" => Form::Waveform,
            _ => return Err(PyValueError::new_err(format!("form = {form:?} must be float32, bfloat16 or waveform"))),
        };
        let plan = Plan {
            rows,
            batch,
            ranges,
            seed,
            train,
            sample_rate,
            clip_samples,
            n_frames,
            views,
            form,
            block: block.map(|(rows, window)| Block { rows, window }),
            threads,
            depth,
            bad_budget,
        };
        Ok(Self(pipeline::Pipeline::new(index.0.clone(), plan)?))
    }

    fn seek(&self, py: Python<'_>, position: u64) -> PyResult<()> {
        Ok(py.detach(|| self.0.seek(position))?)
    }

    fn next<'py>(&self, py: Python<'py>) -> PyResult<(u64, Bound<'py, PyDict>)> {
        loop {
            py.check_signals()?;
            match py.detach(|| self.0.next(SIGNALS))? {
                Next::Batch(position, slab) => return Ok((position, self.arrays(py, slab)?)),
                Next::End => return Err(PyStopIteration::new_err(())),
                Next::Pending => {}
            }
        }
    }

    fn diagnostics<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let found = self.0.diagnostics();
        let seconds = PyDict::new(py);
        for (stage, value) in STAGES.iter().zip(found.seconds) {
            seconds.set_item(stage, value)?;
        }
        let out = PyDict::new(py);
        out.set_item("queued", found.queued)?;
        out.set_item("filling", found.filling)?;
        out.set_item("depth", found.depth)?;
        out.set_item("threads", found.threads)?;
        out.set_item("slabs", found.slabs)?;
        out.set_item("slab_bytes", found.slab_bytes)?;
        out.set_item("rows", found.rows)?;
        out.set_item("bad", found.bad)?;
        out.set_item("bad_allowed", found.bad_allowed)?;
        out.set_item("bad_list", found.bad_list)?;
        out.set_item("seconds", seconds)?;
        out.set_item("slowest", found.slowest)?;
        out.set_item("bytes_recordings", found.bytes_recordings)?;
        out.set_item("bytes_used", found.bytes_used)?;
        out.set_item("bytes_ahead", found.bytes_ahead)?;
        out.set_item("faults", found.faults)?;
        Ok(out)
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.0.close());
    }
}

impl Pipeline {
    fn arrays<'py>(&self, py: Python<'py>, slab: Arc<Slab>) -> PyResult<Bound<'py, PyDict>> {
        let plan = self.0.plan();
        let owner = Bound::new(py, SlabOwner(slab))?;
        let ranges = 0..plan.ranges.len();
        let scalars = |field| PyList::new(py, ranges.clone().map(|r| SlabOwner::array::<i32>(&owner, r, field, ())));
        let shape = match plan.form {
            Form::Waveform => vec![plan.views, plan.clip_samples],
            _ => vec![plan.views, plan.n_frames, N_MELS],
        };
        let shape = if plan.views == 1 { &shape[1..] } else { &shape[..] };
        let clips = ranges.clone().map(|r| match plan.form {
            Form::Float32 => SlabOwner::array::<f32>(&owner, r, CLIP, shape),
            Form::Bfloat16 => SlabOwner::array::<u16>(&owner, r, CLIP, shape),
            Form::Waveform => SlabOwner::array::<i16>(&owner, r, CLIP, shape),
        });
        let name = if plan.form == Form::Waveform { "waveform" } else { "spectrogram" };
        let weights = ranges.clone().map(|r| SlabOwner::array::<f32>(&owner, r, WEIGHT, ()));
        let out = PyDict::new(py);
        out.set_item(name, PyList::new(py, clips)?)?;
        out.set_item("label", scalars(LABEL)?)?;
        out.set_item("index", scalars(INDEX)?)?;
        out.set_item("epoch", scalars(EPOCH)?)?;
        out.set_item("weight", PyList::new(py, weights)?)?;
        Ok(out)
    }
}

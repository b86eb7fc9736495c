//! The row index.

use std::path::PathBuf;
use std::sync::Arc;

use jaxtrain_loader::error::Error;
use jaxtrain_loader::prepare::{self, Failed};
use jaxtrain_loader::source::{self, Reader};
use numpy::{IntoPyArray, PyArray1};
use pyo3::exceptions::{PyInterruptedError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::audio::check_rate;
use crate::exception;

/// A row index over Arrow IPC and Parquet shards, built without reading audio.
#[pyclass(frozen)]
pub struct Index(pub Arc<source::Index>);

impl Index {
    fn row(&self, row: i64) -> PyResult<usize> {
        usize::try_from(row).map_err(|_| exception(Error::RowRange { row, n: self.0.n_rows() }))
    }
}

#[pymethods]
impl Index {
    #[new]
    #[allow(clippy::too_many_arguments)] // named in Python
    #[pyo3(signature = (shards, *, audio = "audio", label = None, root = None, cache = None, links = false, copying = false))]
    fn new(
        py: Python<'_>, shards: Vec<PathBuf>, audio: &str, label: Option<&str>,
        root: Option<PathBuf>, cache: Option<PathBuf>, links: bool, copying: bool,
    ) -> PyResult<Self> {
        let options = source::Options {
            audio,
            label,
            root: root.as_deref(),
            cache: cache.as_deref(),
            links,
            copying,
        };
        let index = py.detach(|| source::Index::open(&shards, options)).map_err(exception)?;
        Ok(Self(Arc::new(index)))
    }

    /// The number of rows in all shards.
    #[getter]
    fn n_rows(&self) -> usize {
        self.0.n_rows()
    }

    /// The names of the ClassLabel in the schema's metadata; None where it names none.
    #[getter]
    fn class_names(&self) -> Option<Vec<String>> {
        self.0.class_names().map(<[String]>::to_vec)
    }

    /// The class of each row, int64 [n_rows]; -1 where it is null, or without a label column.
    #[getter]
    fn labels<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i64>> {
        let labels: Vec<i64> = self.0.labels().iter().map(|&label| label.into()).collect();
        labels.into_pyarray(py)
    }

    /// A hash that changes with the data or their order, but not when their folder moves.
    #[getter]
    fn fingerprint(&self) -> &str {
        self.0.fingerprint()
    }

    /// The first row of each shard, int64 [n_shards].
    #[getter]
    fn first_rows<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i64>> {
        let rows: Vec<i64> = self.0.first_rows().map(|row| row as i64).collect();
        rows.into_pyarray(py)
    }

    /// Return a row's encoded recording: the shard's bytes, or the file at its path if null.
    fn encoded<'py>(&self, py: Python<'py>, row: i64) -> PyResult<Bound<'py, PyBytes>> {
        let (row, mut reader) = (self.row(row)?, Reader::default());
        Ok(PyBytes::new(py, py.detach(|| self.0.encoded(row, &mut reader)).map_err(exception)?))
    }

    /// Return the name that the recording of a row was stored under; None where it is null.
    fn path(&self, py: Python<'_>, row: i64) -> PyResult<Option<String>> {
        let row = self.row(row)?;
        py.detach(|| self.0.path(row, &mut Reader::default())).map_err(exception)
    }

    /// Return path(row) of every row.
    fn paths(&self, py: Python<'_>) -> PyResult<Vec<Option<String>>> {
        let all = || {
            let mut reader = Reader::default();
            (0..self.0.n_rows()).map(|row| self.0.path(row, &mut reader)).collect::<Result<_, _>>()
        };
        py.detach(all).map_err(exception)
    }

    /// Return the rows of the recordings that were stored under one of the names.
    fn rows_named<'py>(
        &self, py: Python<'py>, names: std::collections::HashSet<String>,
    ) -> PyResult<(Bound<'py, PyArray1<i64>>, usize)> {
        let (rows, found) = py.detach(|| self.0.rows_named(&names)).map_err(exception)?;
        let rows: Vec<i64> = rows.into_iter().map(i64::from).collect();
        Ok((rows.into_pyarray(py), found))
    }

    /// Return where in its recording a row lies.
    fn part(&self, row: i64) -> PyResult<Option<(f64, f64, i32)>> {
        let part = self.0.part(self.row(row)?);
        Ok(part.map(|part| (part.start, part.end, part.channel.map_or(-1, i32::from))))
    }

    /// Prepare the recording of a row: mono at `rate` Hz, 16 bits, in quickly decoded blocks.
    #[pyo3(signature = (row, *, rate, time_expansion = 1.0, channel = None, packed = false, out = None, stop = None))]
    #[allow(clippy::too_many_arguments)] // named in Python
    fn prepare<'py>(
        &self, py: Python<'py>, row: i64, rate: u32, time_expansion: f64, channel: Option<u16>,
        packed: bool, out: Option<PathBuf>, stop: Option<Py<PyAny>>,
    ) -> PyResult<(Bound<'py, PyBytes>, u64)> {
        check_rate("rate", rate)?;
        let row = self.row(row)?;
        let options = prepare::Options { rate, time_expansion, channel, packed };
        let mut stop = || {
            let asked = |stop: &Py<PyAny>| {
                Python::attach(|py| stop.call0(py).and_then(|x| x.is_truthy(py)))
            };
            stop.as_ref().is_some_and(|stop| asked(stop).unwrap_or(true))
        };
        let mut reader = Reader::default();
        let unusable = |error: Error| Failed::Unusable(error.to_string());
        let mut work = || {
            let bytes = self.0.encoded(row, &mut reader).map_err(unusable)?;
            match &out {
                None => prepare::prepare(bytes, options, Vec::new(), &mut stop),
                Some(path) => {
                    let file = std::fs::OpenOptions::new().write(true).open(path)?;
                    let file = std::io::BufWriter::with_capacity(1 << 20, file);
                    prepare::prepare(bytes, options, file, &mut stop)
                        .map(|(_, clipped)| (Vec::new(), clipped))
                }
            }
        };
        match py.detach(&mut work) {
            Ok((bytes, clipped)) => Ok((PyBytes::new(py, &bytes), clipped)),
            Err(Failed::Unusable(what)) => Err(PyValueError::new_err(what)),
            Err(Failed::Io(error)) => Err(error.into()),
            Err(Failed::Stopped) => Err(PyInterruptedError::new_err("stopped")),
        }
    }

    fn __len__(&self) -> usize {
        self.0.n_rows()
    }
}

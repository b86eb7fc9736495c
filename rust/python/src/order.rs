//! The order of the data for arrays of places.

use jaxtrain_loader::decode::refuse;
use jaxtrain_loader::order::{Blocks, Order, Permutation};
use numpy::{IntoPyArray, PyArray1, PyReadonlyArray1};
use pyo3::exceptions::{PyIndexError, PyValueError};
use pyo3::prelude::*;

/// Map places of an epoch to recordings: a bijection of [0, n).
#[pyfunction]
pub fn permutation<'py>(
    py: Python<'py>, seed: u64, epoch: u64, n: u64, i: PyReadonlyArray1<'py, i64>,
) -> PyResult<Bound<'py, PyArray1<i64>>> {
    refuse!(
        n == 0 || n >= 1 << 62,
        Err(PyValueError::new_err(format!("n = {n} must lie in [1, 2^62)")))
    );
    let permutation = Permutation::new(seed, epoch, n);
    recordings(py, n, i, |place| permutation.at(place))
}

/// Map places of an epoch to recordings in the block order; see loaders.order.block_order.
#[pyfunction]
pub fn block_order<'py>(
    py: Python<'py>, seed: u64, epoch: u64, stops: PyReadonlyArray1<'py, i64>, window: u64,
    i: PyReadonlyArray1<'py, i64>,
) -> PyResult<Bound<'py, PyArray1<i64>>> {
    let stops = stops.as_slice()?;
    let increasing = stops.windows(2).all(|pair| pair[0] <= pair[1]);
    if !increasing || stops.first().is_none_or(|&first| first < 0) || window == 0 {
        return Err(PyValueError::new_err(
            "stops must increase from 0, and window must be at least 1",
        ));
    }
    let order =
        Order::Block(Blocks::new(seed, window, stops.iter().map(|&stop| stop as u64).collect()));
    let epoch = order.epoch(epoch);
    recordings(py, order.n(), i, |place| epoch.at(place))
}

/// The recordings at `places`, each of which must lie in [0, n).
fn recordings<'py>(
    py: Python<'py>, n: u64, places: PyReadonlyArray1<'py, i64>,
    recording: impl Fn(u64) -> u64 + Sync,
) -> PyResult<Bound<'py, PyArray1<i64>>> {
    let checked = |&place: &i64| match u64::try_from(place) {
        Ok(i) if i < n => Ok(recording(i) as i64),
        _ => Err(place),
    };
    let places = places.as_slice()?;
    let recordings: Result<Vec<i64>, i64> = py.detach(|| places.iter().map(checked).collect());
    let recordings = recordings
        .map_err(|place| PyIndexError::new_err(format!("place {place} is not in [0, {n})")))?;
    Ok(recordings.into_pyarray(py))
}

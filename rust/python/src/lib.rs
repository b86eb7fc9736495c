//! The extension module `loaders._rust`: arguments in, numpy arrays out. The work is in the crate `jaxtrain_loader`.
//!
//! Every function releases the GIL while it works. Waits for data also check for signals. The doc comments of functions
//! and classes are their docstrings in Python, and loaders/_rust.pyi repeats them: tests/loaders/test_stub.py compares
//! the two.

mod abort;
mod audio;
mod batch;
mod index;
mod order;
mod pipeline;
mod sudoku;

use jaxtrain_loader::error::Error;
use pyo3::exceptions::{PyIndexError, PyOSError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;

/// The loader's compiled core (rust/).
#[pymodule]
fn _rust(module: &Bound<'_, PyModule>) -> PyResult<()> {
    macro_rules! functions {
        ($($name:path),*) => { $(module.add_function(wrap_pyfunction!($name, module)?)?;)* };
    }
    functions!(build_profile, abort::delay_abort);
    functions!(audio::decode, audio::resample, audio::fbank, audio::front_end);
    functions!(audio::recording_info, audio::recording_doubts, audio::recording_beyond);
    functions!(audio::recording_peak, audio::recording_fault, audio::recording_sound);
    functions!(order::permutation, order::block_order);
    functions!(
        sudoku::sudoku_solve,
        sudoku::sudoku_generate,
        sudoku::sudoku_grade,
        sudoku::sudoku_invariant
    );
    module.add("ORDER_VERSION", jaxtrain_loader::order::VERSION)?;
    module.add("STAGES", jaxtrain_loader::pipeline::STAGES)?;
    module.add_class::<audio::FilterBank>()?;
    module.add_class::<index::Index>()?;
    module.add_class::<pipeline::Pipeline>()
}

/// Return how the extension was compiled: "release", or "debug", which is many times slower.
#[pyfunction]
fn build_profile() -> &'static str {
    if cfg!(debug_assertions) {
        "debug"
    } else {
        "release"
    }
}

/// The Python exception for an error of the loader.
fn exception(error: Error) -> PyErr {
    let text = error.to_string();
    match error {
        Error::Open { .. } => PyOSError::new_err(text),
        Error::RowRange { .. } => PyIndexError::new_err(text),
        Error::Failed(_) => PyRuntimeError::new_err(text),
        _ => PyValueError::new_err(text),
    }
}

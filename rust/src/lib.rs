//! Recordings in Arrow shards -> batches of log-mel spectrograms, in an order that is a pure function of the position.
//!
//! ```text
//!             order: (seed, position, row) -> (epoch, recording)
//!               │
//!   shards ─▶ source ─▶ decode ─▶ resample ─▶ fbank ─▶ slab ─▶ py: numpy arrays that own their slab
//!   (mmap)    └──────────────── pipeline: N workers ─────────┘          │
//!               ▲                                            ▲          │
//!               bytes are touched here first                 └──────────┘ back when the last array is dropped
//! ```
//!
//! Only `py` and this file name pyo3: everything else is plain Rust, tested with `cargo test`.

pub mod decode;
pub mod error;
pub mod fbank;
pub mod order;
pub mod pipeline;
pub mod resample;
mod simd;
pub mod slab;
pub mod source;
pub mod sudoku;

mod py;

#[pyo3::pymodule]
fn _rust(module: &pyo3::Bound<'_, pyo3::types::PyModule>) -> pyo3::PyResult<()> {
    py::register(module)
}

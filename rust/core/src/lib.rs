//! Recordings in Arrow and Parquet shards to batches of log-mel spectrograms, in an order that is a pure function of
//! the position.
//!
//! ```text
//!             order: (seed, position, row) -> (epoch, recording)
//!               │
//!   shards ─▶ source ─▶ decode ─▶ resample ─▶ fbank ─▶ slab ─▶ the consumer: arrays that own their slab
//!   (mmap)    └──────────────── pipeline: N workers ─────────┘          │
//!               ▲                                            ▲          │
//!               audio is first read here                     └──────────┘ returned when the last array is dropped
//! ```
//!
//! Plain Rust, without Python: `../python` is the binding.

pub use jaxtrain_decode as decode;
pub mod error;
pub mod fbank;
pub mod order;
pub mod pipeline;
pub mod prepare;
pub mod resample;
pub mod slab;
pub mod source;
pub mod sudoku;
pub mod sudoku_grades;

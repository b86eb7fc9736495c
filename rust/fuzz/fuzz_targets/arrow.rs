//! Arbitrary bytes as a shard: Arrow IPC stream or file, or Parquet, as their first bytes decide.
#![no_main]

mod bounds;

use bounds::{within, Bounds};
use jaxtrain_loader::source::Index;

const SHARD: Bounds = Bounds { memory: 4 << 20, memory_per_byte: 256, seconds: 1.0, seconds_per_byte: 1e-4 };

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    if !data.starts_with(b"PAR1") {
        within(&SHARD, data.len(), || drop(Index::probe(data, Some("label"))));
    }
});

//! Arbitrary bytes as a Parquet shard, between its magic numbers, so that no run is spent on finding those. Its pages
//! may be compressed, so their decompressors are run, too.
#![no_main]

mod bounds;

use bounds::{within, Bounds};
use jaxtrain_loader::source::Index;

/// A compressed page may claim 16 MiB plus 64 times its size. Reading a row of it also needs its dictionary.
const SHARD: Bounds = Bounds { memory: 40 << 20, memory_per_byte: 256, seconds: 5.0, seconds_per_byte: 1e-4 };

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let inner = data.strip_prefix(b"PAR1").unwrap_or(data);
    let inner = inner.strip_suffix(b"PAR1").unwrap_or(inner);
    let shard = [b"PAR1", inner, b"PAR1"].concat();
    within(&SHARD, shard.len(), || drop(Index::probe(&shard, Some("label"))));
});

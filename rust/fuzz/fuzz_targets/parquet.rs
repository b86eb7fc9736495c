//! Arbitrary bytes as a Parquet shard, between its magic numbers, so that no run is spent on finding those.
#![no_main]

use jaxtrain_loader::source::Index;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = Index::probe(&[b"PAR1", data, b"PAR1"].concat(), Some("label"));
});

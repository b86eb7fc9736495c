//! Arbitrary bytes as a shard: Arrow IPC stream or file, or Parquet, as their first bytes decide.
#![no_main]

use jaxtrain_loader::source::Index;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = Index::probe(data, Some("label"));
});

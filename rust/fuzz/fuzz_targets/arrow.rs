//! A shard of any bytes: Arrow IPC stream or file, or Parquet where they begin so.
#![no_main]

use _rust::source::Index;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = Index::probe(data, Some("label"));
});

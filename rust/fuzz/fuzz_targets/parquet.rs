//! A Parquet shard of any bytes between its magics, so that no run is spent on finding those.
#![no_main]

use _rust::source::Index;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = Index::probe(&[b"PAR1", data, b"PAR1"].concat(), Some("label"));
});

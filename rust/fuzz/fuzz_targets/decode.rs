//! A recording of any bytes: WAV, FLAC, MP3 or OGG by how they begin. What is decoded is finite.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = _rust::decode::probe(data);
});

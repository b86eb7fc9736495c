//! Arbitrary bytes as a recording: WAV, FLAC, MP3 or OGG, as their first bytes decide. Decoded samples must be finite.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = jaxtrain_loader::decode::probe(data);
});

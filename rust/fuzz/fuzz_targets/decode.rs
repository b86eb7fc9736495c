//! A recording of any bytes: WAV, FLAC, MP3 or OGG by how they begin. What is decoded is finite, and never more than was
//! asked for.
#![no_main]

use _rust::decode::Decoder;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let mut decoder = Decoder::new();
    let Ok(info) = decoder.info(data) else { return };
    let length = info.frames.min(20_000);
    let mut out = vec![f32::NAN; length as usize];
    for start in [0, (info.frames - length) / 2, info.frames - length] {
        if decoder.read(data, &info, start, &mut out).is_ok() {
            assert!(out.iter().all(|x| x.is_finite()));
        }
    }
});

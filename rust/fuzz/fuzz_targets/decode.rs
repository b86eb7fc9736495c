//! Arbitrary bytes as a recording, as their first bytes decide: WAV, FLAC, MP3, OGG Vorbis or Opus, and the formats of
//! symphonia (M4A, CAF, ADPCM). Decoded samples must be finite. Each format has a corpus of its own (tests/proofs/fuzz.py).
#![no_main]

mod bounds;

use std::collections::HashSet;
use std::sync::Mutex;

use bounds::{within, Bounds};

/// Three parts of 20,000 samples are decoded, of at most 255 channels. Tables of Vorbis may be large for few bytes.
const RECORDING: Bounds = Bounds { memory: 64 << 20, memory_per_byte: 256, seconds: 4.0, seconds_per_byte: 1e-4 };

/// Lets panics of symphonia unwind, which the loader catches and turns into errors. Each place is reported once. Any
/// other panic ends the process, as does an uncaught one.
fn forgive_symphonia() {
    let strict = std::panic::take_hook();
    let reported = Mutex::new(HashSet::new());
    std::panic::set_hook(Box::new(move |panic| match panic.location() {
        Some(place) if place.file().contains("/symphonia-") => {
            if reported.lock().is_ok_and(|mut reported| reported.insert(place.to_string())) {
                eprintln!("caught: {place}");
            }
        }
        _ => strict(panic),
    }));
}

libfuzzer_sys::fuzz_target!(
    init: forgive_symphonia(),
    |data: &[u8]| {
        within(&RECORDING, data.len(), || drop(jaxtrain_loader::decode::probe(data)));
    }
);

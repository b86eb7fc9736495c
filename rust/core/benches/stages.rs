//! Milliseconds of each stage for one 5 s clip at 32 kHz: `cargo bench` in rust/.
//!
//! The recordings are those of the tests (tests/data/decode), 7 s each, and a WAV file of noise; a crop begins at a
//! different sample every time. Decoding includes finding the recording's length and the crop's packets.

use std::hint::black_box;
use std::path::Path;

use criterion::{criterion_group, criterion_main, Criterion};
use jaxtrain_loader::decode::Decoder;
use jaxtrain_loader::fbank::Fbank;
use jaxtrain_loader::resample::Resampler;

const SECONDS: usize = 5;

/// Noise with some colour, so that no stage meets zeros or denormals.
fn noise(n: usize) -> Vec<f32> {
    let (mut state, mut y) = (1u32, 0.0f32);
    (0..n)
        .map(|_| {
            state = state.wrapping_mul(1664525).wrapping_add(1013904223);
            y = 0.7 * y + 0.1 * ((state >> 8) as f32 / (1 << 23) as f32 - 1.0);
            y
        })
        .collect()
}

/// A stereo 16-bit recording at 44.1 kHz.
fn wav(frames: usize) -> Vec<u8> {
    let mut bytes = b"RIFF\0\0\0\0WAVEfmt \x10\0\0\0\x01\0\x02\0".to_vec();
    for word in [44100u32, 4 * 44100, 16 << 16 | 4] {
        bytes.extend(word.to_le_bytes());
    }
    bytes.extend(b"data");
    bytes.extend((4 * frames as u32).to_le_bytes());
    bytes.extend(noise(2 * frames).iter().flat_map(|x| ((x * 32767.0) as i16).to_le_bytes()));
    bytes
}

fn decode(c: &mut Criterion) {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/decode");
    let read = |name| (name, std::fs::read(data.join(name)).expect("the tests' recordings"));
    let recordings = [
        read("vorbis_32k_mono.ogg"),
        read("mp3_44k_stereo.mp3"),
        read("flac_48k_stereo.flac"),
        ("pcm16_44k_stereo.wav", wav(7 * 44100)),
    ];
    for (name, bytes) in recordings {
        let mut decoder = Decoder::new();
        let info = decoder.info(&bytes).expect("a whole recording");
        let mut out = vec![0.0; SECONDS * info.rate as usize];
        let mut start = 0;
        c.bench_function(&format!("decode/{name}"), |b| {
            b.iter(|| {
                start = (start + 7919) % (info.frames - out.len() as u64 + 1);
                let info = decoder.info(black_box(&bytes)).expect("a whole recording");
                decoder.read(&bytes, &info, start, None, &mut out).expect("a whole recording");
            });
        });
    }
}

fn resample(c: &mut Criterion) {
    for source in [22050, 44100, 48000, 96000] {
        let resampler = Resampler::new(source, 32000);
        let context = resampler.context();
        let x = noise(SECONDS * source as usize + 2 * context);
        let mut out = vec![0.0; SECONDS * 32000];
        c.bench_function(&format!("resample/{source}"), |b| {
            b.iter(|| resampler.process(black_box(&x), context, &mut out));
        });
    }
    c.bench_function("resample/new 44100", |b| b.iter(|| Resampler::new(black_box(44100), 32000)));
}

fn fbank(c: &mut Criterion) {
    let wave = noise(SECONDS * 32000);
    let mut out = vec![0.0; 512 * 128];
    let mut fbank = Fbank::default();
    c.bench_function("fbank/normalised", |b| b.iter(|| fbank.normalised(black_box(&wave), 512, &mut out)));
}

criterion_group!(stages, decode, resample, fbank);
criterion_main!(stages);

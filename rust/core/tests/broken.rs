//! The fuzz targets' loops with a fixed seed, on any toolchain: damaged shards and recordings, read from beginning to
//! end. Nothing may panic, take more memory than a small multiple of the formats' limits, or take long. FUZZ_ROUNDS
//! sets the number of damaged copies of each shard. Each recording, which takes longer, gets a twentieth.

use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use jaxtrain_loader::decode;
use jaxtrain_loader::source::Index;

mod counting;

use counting::{NOW, PEAK};

/// A compressed page may claim 16 MiB plus 64 times its size. Reading a row of it also needs its dictionary.
const MEMORY: usize = 128 << 20;
const TIME: Duration = Duration::from_secs(5);

fn random(state: &mut u64, below: usize) -> usize {
    *state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
    (*state >> 33) as usize % below
}

fn damage(whole: &[u8], state: &mut u64) -> Vec<u8> {
    let mut bytes = whole.to_vec();
    for _ in 0..1 + random(state, 4) {
        let at = random(state, bytes.len());
        match random(state, 6) {
            0 => bytes[at] ^= 1 << random(state, 8),
            1 => bytes[at] = [0, 1, 0x7F, 0x80, 0xFF][random(state, 5)],
            2 => bytes.truncate(at + 1),
            3 => drop(bytes.drain(at..(at + 1 + random(state, 40)).min(bytes.len() - 1).max(at))),
            4 => {
                let from = random(state, bytes.len());
                let n = (1 + random(state, 16)).min(bytes.len() - at.max(from));
                bytes.copy_within(from..from + n, at);
            }
            _ => {
                let n = 4.min(bytes.len() - at);
                let word = [u32::MAX, i32::MAX as u32, 1 << 31, 0][random(state, 4)].to_le_bytes();
                bytes[at..at + n].copy_from_slice(&word[..n]);
            }
        }
    }
    bytes
}

/// Reads `rounds` damaged copies of `whole`, and counts the copies with detected damage.
fn attack(
    name: &Path, whole: &[u8], rounds: usize, state: &mut u64, fails: impl Fn(&[u8]) -> bool,
) -> usize {
    // Memory is counted over all threads, so only one test may run at a time.
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock();
    let mut wrong = 0;
    for round in 0..rounds {
        let bytes = damage(whole, state);
        let (begin, before) = (Instant::now(), NOW.load(Relaxed));
        PEAK.store(before, Relaxed);
        wrong += usize::from(fails(&bytes));
        let (peak, time) = (PEAK.load(Relaxed) - before, begin.elapsed());
        assert!(
            peak < MEMORY && time < TIME,
            "{}, round {round}: {peak} bytes, {time:?}",
            name.display()
        );
    }
    wrong
}

/// The files of a folder of the tests' data, with one of these endings.
fn files(folder: &str, endings: &[&str]) -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data").join(folder);
    let mut paths: Vec<_> =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths
        .retain(|path| path.extension().is_some_and(|e| endings.iter().any(|ending| e == *ending)));
    paths.sort();
    paths
}

fn rounds() -> usize {
    std::env::var("FUZZ_ROUNDS").map_or(5_000, |n| n.parse().expect("FUZZ_ROUNDS is a number"))
}

#[test]
fn no_bytes_make_a_shard_panic_hang_or_fill_the_memory() {
    let paths = files("shards", &["arrow", "parquet"]);
    assert_eq!(paths.len(), 14);
    let mut state = 1;
    for path in paths {
        let whole = std::fs::read(&path).unwrap();
        let undamaged = Index::probe(&whole, Some("label"));
        // The undamaged shard fails only at its row without bytes.
        assert!(undamaged.is_err_and(|e| e
            .to_string()
            .contains("row 3 (row 3 of this shard): holds no audio bytes, only")));
        let wrong = attack(&path, &whole, rounds(), &mut state, |bytes| {
            Index::probe(bytes, Some("label")).is_err()
        });
        assert!(
            wrong > rounds() / 2,
            "{}: {wrong} of {} damaged copies were detected",
            path.display(),
            rounds()
        );
    }
}

#[test]
fn no_bytes_make_a_recording_panic_hang_or_fill_the_memory() {
    let paths = files("decode", &["ogg", "opus", "mp3", "flac", "wav"]);
    assert_eq!(paths.len(), 5);
    let mut state = 7;
    for path in paths {
        let whole = std::fs::read(&path).unwrap();
        decode::probe(&whole).unwrap();
        // Damage the headers as often as the audio.
        for size in [whole.len(), 6000.min(whole.len())] {
            attack(&path, &whole[..size], rounds() / 40, &mut state, |bytes| {
                decode::probe(bytes).is_err()
            });
        }
        for size in (0..200).chain((200..20_000.min(whole.len())).step_by(97)) {
            let _ = decode::probe(&whole[..size]);
        }
    }
}

//! What every target asserts of what it runs: bytes of memory and seconds of CPU time, by the size of its input.

use std::sync::atomic::Ordering::Relaxed;

#[path = "../../core/tests/counting/mod.rs"]
mod counting;

use counting::{NOW, PEAK};

/// What an input may take: so much, and so much more for each of its bytes.
pub struct Bounds {
    pub memory: usize,          // [bytes]
    pub memory_per_byte: usize, // [bytes]
    pub seconds: f64,
    pub seconds_per_byte: f64,
}

/// Runs `f` on an input of `size` bytes.
/// Panics: When it took more than the bounds say.
pub fn within(bounds: &Bounds, size: usize, f: impl FnOnce()) {
    let (before, began) = (NOW.load(Relaxed), cpu_seconds());
    PEAK.store(before, Relaxed);
    f();
    let (peak, seconds) = (PEAK.load(Relaxed).saturating_sub(before), cpu_seconds() - began);
    let most = bounds.memory + bounds.memory_per_byte * size;
    assert!(peak <= most, "{peak} bytes of memory for {size} bytes, and {most} are allowed");
    let most = bounds.seconds + bounds.seconds_per_byte * size as f64;
    assert!(seconds <= most, "{seconds:.2} s for {size} bytes, and {most:.2} s are allowed");
}

/// Of this process: the clock on the wall also counts what other programs take.
fn cpu_seconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is one, and lives.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    time.tv_sec as f64 + 1e-9 * time.tv_nsec as f64
}

//! The bounds that every target asserts: bytes of memory and seconds of CPU time, by the size of its input.

use std::sync::atomic::Ordering::Relaxed;

#[path = "../../core/tests/counting/mod.rs"]
mod counting;

use counting::{NOW, PEAK};

/// The bounds of an input: a constant, and a part for each of its bytes.
pub struct Bounds {
    pub memory: usize,          // [bytes]
    pub memory_per_byte: usize, // [bytes]
    pub seconds: f64,
    pub seconds_per_byte: f64,
}

/// Runs `f` on an input of `size` bytes.
/// Panics: When it took more than the bounds say.
pub fn within(bounds: &Bounds, size: usize, f: impl FnOnce()) {
    let (before, start) = (NOW.load(Relaxed), cpu_seconds());
    PEAK.store(before, Relaxed);
    f();
    let (peak, seconds) = (PEAK.load(Relaxed).saturating_sub(before), cpu_seconds() - start);
    let limit = bounds.memory + bounds.memory_per_byte * size;
    assert!(peak <= limit, "{peak} bytes of memory for {size} bytes, and {limit} are allowed");
    let limit = bounds.seconds + bounds.seconds_per_byte * size as f64;
    assert!(seconds <= limit, "{seconds:.2} s for {size} bytes, and {limit:.2} s are allowed");
}

/// The CPU time of this process. Wall-clock time would also count other programs.
fn cpu_seconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid timespec.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    time.tv_sec as f64 + 1e-9 * time.tv_nsec as f64
}

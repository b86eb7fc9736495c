//! A pause before an abort, in which another thread may end the process with a reason.

use std::mem::MaybeUninit;
use std::ptr::null_mut;
use std::sync::OnceLock;

use libc::{c_int, nanosleep, raise, sigaction, sigemptyset, timespec, SIGABRT};
use pyo3::prelude::*;

const PAUSE: timespec = timespec { tv_sec: 1, tv_nsec: 0 };
static PREVIOUS: OnceLock<sigaction> = OnceLock::new();

/// Let a thread that aborts wait for 1 s before the process ends.
#[pyfunction]
pub fn delay_abort() -> PyResult<()> {
    if PREVIOUS.get().is_some() {
        return Ok(());
    }
    // SAFETY: all point to a sigaction, for which zeros are valid. The handler calls only functions
    // that POSIX allows there.
    unsafe {
        let mut previous: sigaction = MaybeUninit::zeroed().assume_init();
        let mut action = previous;
        action.sa_sigaction = pause as extern "C" fn(c_int) as usize;
        sigemptyset(&mut action.sa_mask);
        if sigaction(SIGABRT, null_mut(), &mut previous) != 0 {
            return Err(std::io::Error::last_os_error().into());
        }
        PREVIOUS.get_or_init(|| previous);
        if sigaction(SIGABRT, &action, null_mut()) != 0 {
            return Err(std::io::Error::last_os_error().into());
        }
    }
    Ok(())
}

extern "C" fn pause(signal: c_int) {
    // SAFETY: POSIX allows these three in a handler, and PREVIOUS was set before this became one.
    unsafe {
        nanosleep(&PAUSE, null_mut());
        if let Some(previous) = PREVIOUS.get() {
            sigaction(signal, previous, null_mut());
        }
        raise(signal);
    }
}

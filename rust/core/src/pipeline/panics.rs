//! Panics of the workers: reported as unusable recordings instead of on the terminal.

use std::any::Any;
use std::cell::Cell;
use std::sync::Once;

thread_local! {
    static WORKER: Cell<bool> = const { Cell::new(false) };
}

/// Marks this thread as a worker, whose panics are not printed.
pub(super) fn mark_worker() {
    WORKER.set(true);
}

/// Keeps the panics of workers off the terminal, since they would break the progress line.
pub(super) fn hush_workers() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !WORKER.get() {
                before(info);
            }
        }));
    });
}

/// The text of a caught panic.
pub(super) fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("no message")
}

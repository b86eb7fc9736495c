//! A pool of batch buffers. One slab holds one batch of this process, laid out shard by shard:
//!
//! ```text
//! range 0: field 0 [rows × row], field 1 [rows × row], ...   range 1: field 0, field 1, ...
//!          ^ every array begins on a multiple of 64 bytes, and is contiguous
//! ```
//!
//! JAX on CPU does not copy a numpy array that is aligned to 64 bytes: the device array *is* the slab. So a slab may
//! not be reused before the last array over it is gone. It is reference counted, each numpy array owns a reference, and
//! the last drop returns the memory to the pool. If a consumer holds many batches, the pool allocates more rather than
//! wait forever. Returned slabs beyond `keep` are freed.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use memmap2::{MmapMut, MmapOptions};

/// The alignment in bytes that XLA's CPU client needs to use a buffer in place.
const ALIGN: usize = 64;

/// The place of each array inside a slab.
pub struct Layout {
    row_bytes: Vec<usize>,
    rows: Vec<usize>,
    offsets: Vec<usize>, // [range × field]
    size: usize,
}

impl Layout {
    /// `row_bytes`: bytes of one row of each field. `rows`: rows of each range. None when the size overflows.
    pub fn new(row_bytes: Vec<usize>, rows: Vec<usize>) -> Option<Self> {
        let (mut offsets, mut size) = (Vec::new(), 0usize);
        for n in &rows {
            for bytes in &row_bytes {
                offsets.push(size);
                size = size.checked_add(n.checked_mul(*bytes)?)?.checked_next_multiple_of(ALIGN)?;
            }
        }
        isize::try_from(size).ok()?;
        Some(Self { row_bytes, rows, offsets, size: size.max(ALIGN) })
    }
}

/// Buffers of one layout.
pub struct Pool {
    layout: Layout,
    keep: usize,
    free: Mutex<Vec<MmapMut>>,
    alive: AtomicUsize,
}

impl Pool {
    /// At most `keep` unused slabs stay in the pool. Any number may be in use.
    pub fn new(layout: Layout, keep: usize) -> Arc<Self> {
        Arc::new(Self { layout, keep, free: Mutex::new(Vec::new()), alive: AtomicUsize::new(0) })
    }

    /// A slab with arbitrary (but initialised) content. None when there is no memory.
    pub fn take(self: &Arc<Self>) -> Option<Slab> {
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut buffer = match free {
            Some(buffer) => buffer,
            None => {
                // Anonymous pages: aligned, zero without being written, and returned to the system when freed.
                let buffer = MmapOptions::new().len(self.layout.size).map_anon().ok()?;
                self.alive.fetch_add(1, Ordering::Relaxed);
                buffer
            }
        };
        Some(Slab { pool: self.clone(), start: buffer.as_mut_ptr(), buffer: Some(buffer) })
    }

    /// Slabs that exist: unused, being filled, or with a consumer.
    pub fn alive(&self) -> usize {
        self.alive.load(Ordering::Relaxed)
    }

    pub fn slab_bytes(&self) -> usize {
        self.layout.size
    }
}

/// One buffer, which returns to its pool when it is dropped.
pub struct Slab {
    pool: Arc<Pool>,
    start: *mut u8,
    buffer: Option<MmapMut>, // None only while it is dropped
}

// SAFETY: `start` points into the slab's own buffer. Shared access is through `array` and `row`, whose callers keep the
// rows that are written separate from all others.
unsafe impl Send for Slab {}
unsafe impl Sync for Slab {}

impl Slab {
    /// First byte, and the number of bytes, of a field's array in a range.
    pub fn array(&self, range: usize, field: usize) -> (*mut u8, usize) {
        let layout = &self.pool.layout;
        let offset = layout.offsets[range * layout.row_bytes.len() + field];
        // SAFETY: offsets lie inside the buffer.
        (unsafe { self.start.add(offset) }, layout.rows[range] * layout.row_bytes[field])
    }

    /// One row of a field, as `row_bytes / size_of::<T>()` values.
    ///
    /// # Safety
    /// T is a plain number type that fills the row, and nothing else reads or writes this row while the slice lives.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn row<T: Copy>(&self, range: usize, field: usize, row: usize) -> &mut [T] {
        let layout = &self.pool.layout;
        assert!(row < layout.rows[range]);
        let bytes = layout.row_bytes[field];
        let start = self.array(range, field).0.add(row * bytes);
        debug_assert!(start.cast::<T>().is_aligned());
        std::slice::from_raw_parts_mut(start.cast(), bytes / size_of::<T>())
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        let Some(buffer) = self.buffer.take() else { return };
        let mut free = self.pool.free.lock().unwrap_or_else(PoisonError::into_inner);
        if free.len() < self.pool.keep {
            free.push(buffer);
        } else {
            self.pool.alive.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

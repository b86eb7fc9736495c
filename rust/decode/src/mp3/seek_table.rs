//! Seek tables of long recordings whose frames were walked, kept for all threads of the process.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// One frame of so many has its offset in the table: the others are walked from it.
const STRIDE: usize = 32;
/// Bytes of all tables: 2,000 recordings of two hours.
const MAX_BYTES: usize = 64 << 20;
/// Bytes at each place of a recording that identify it.
const PROBE: usize = 256;

/// The starts of every `STRIDE`th frame of a recording.
pub struct SeekTable {
    pub n: usize, // frames
    offsets: Vec<u32>,
}

impl SeekTable {
    /// The last frame in the table that is not after frame `k`, and its start. None for one that does not exist.
    pub fn before(&self, k: usize) -> Option<(usize, usize)> {
        let i = k / STRIDE;
        (k < self.n).then(|| self.offsets.get(i).map(|&at| (i * STRIDE, at as usize)))?
    }
}

/// The tables by recording, and their bytes. There may be 200,000 of the shortest recordings that get one: a list would
/// be searched for each crop, under the lock.
type Tables = (HashMap<u128, Arc<SeekTable>>, usize);

static TABLES: Mutex<Option<Tables>> = Mutex::new(None);

/// The table of a recording that was walked before.
pub fn find(bytes: &[u8]) -> Option<Arc<SeekTable>> {
    let key = key(bytes); // before the lock: the file may have to be read for it
    TABLES.lock().unwrap_or_else(PoisonError::into_inner).as_ref()?.0.get(&key).cloned()
}

/// Keeps the table of a recording with these frames. If the tables take too much, all others are removed.
pub fn keep(bytes: &[u8], frames: &[u32]) -> Arc<SeekTable> {
    let offsets = frames.iter().step_by(STRIDE).copied().collect();
    let table = Arc::new(SeekTable { n: frames.len(), offsets });
    let key = key(bytes);
    let mut tables = TABLES.lock().unwrap_or_else(PoisonError::into_inner);
    let (by_key, size) = tables.get_or_insert_default();
    let more = 64 + 4 * table.offsets.len();
    if *size + more > MAX_BYTES {
        by_key.clear();
        *size = 0;
    }
    *size += more;
    by_key.insert(key, table.clone());
    table
}

/// Identifies a recording by its size and by the bytes at its beginning, middle and end.
fn key(bytes: &[u8]) -> u128 {
    let mut hash: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    let mut feed = |byte: u8| {
        hash = (hash ^ u128::from(byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b)
    };
    bytes.len().to_le_bytes().into_iter().for_each(&mut feed);
    for start in [0, bytes.len() / 2, bytes.len().saturating_sub(PROBE)] {
        bytes[start..].iter().take(PROBE).copied().for_each(&mut feed);
    }
    hash
}

//! The order of the data, as pure functions: (seed, epoch, place) -> recording, and (seed, epoch, recording) -> crop.
//!
//! `loaders/order.py` is the readable reference; a test checks that the two are equal. Nothing here has state, so
//! resuming, changing the world size and reading from any number of threads are the same operation.
//!
//! The permutation is a Feistel network over the mixed-radix digits of the place, for any n, not only powers of two
//! (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). With a = ceil(sqrt n) and b = ceil(n / a), a
//! place is (l, r) = (place / b, place mod b). The rounds alternate l += F(r) mod a and r += F(l) mod b. The product
//! a·b exceeds n by less than a. Walking the cycle until it lands below n takes one extra step for about one place in
//! sqrt(n).

use std::sync::{Arc, Mutex, PoisonError};

/// Changes whenever the same (seed, epoch, place) would give another recording or another crop. Checkpoints record it.
pub const VERSION: u32 = 1;

const ROUNDS: usize = 8;
pub(crate) const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15; // 2^64 / golden ratio, the increment of splitmix64

/// Domain separation: the first part of every hash, so that two uses of the same numbers draw independently.
const ORDER: u64 = 1;
const CROP: u64 = 2;
const BLOCK: u64 = 4;
const WINDOW: u64 = 5;

/// The output function of splitmix64 (Steele, Lea and Flood, 2014): a bijection of u64 with full avalanche.
pub fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

/// The hash of a tuple of integers.
pub fn hash(parts: &[u64]) -> u64 {
    parts.iter().fold(0, |h, &part| mix((h ^ part).wrapping_add(GOLDEN)))
}

/// A bijection of [0, n) for each (seed, epoch).
pub struct Permutation {
    n: u64,
    a: u64,
    b: u64,
    keys: [u64; ROUNDS],
}

impl Permutation {
    /// `n` is at least 1 and below 2^62.
    pub fn new(seed: u64, epoch: u64, n: u64) -> Self {
        Self::keyed(hash(&[ORDER, seed, epoch]), n)
    }

    fn keyed(key: u64, n: u64) -> Self {
        debug_assert!((1..1 << 62).contains(&n));
        let a = (n - 1).isqrt() + 1;
        Self {
            n,
            a,
            b: n.div_ceil(a),
            keys: std::array::from_fn(|round| {
                mix(key.wrapping_add(GOLDEN.wrapping_mul(round as u64 + 1)))
            }),
        }
    }

    /// The recording at place `i` < n.
    pub fn at(&self, i: u64) -> u64 {
        debug_assert!(i < self.n);
        let (mut l, mut r) = (i / self.b, i % self.b);
        loop {
            for (round, key) in self.keys.iter().enumerate() {
                if round % 2 == 0 {
                    l = (l + below(key.wrapping_add(r), self.a)) % self.a;
                } else {
                    r = (r + below(key.wrapping_add(l), self.b)) % self.b;
                }
            }
            let place = l * self.b + r;
            if place < self.n {
                return place;
            }
        }
    }
}

/// The recording at each place of an epoch.
pub enum Order {
    Global { seed: u64, n: u64 },
    Block(Blocks),
}

impl Order {
    pub fn n(&self) -> u64 {
        match self {
            Self::Global { n, .. } => *n,
            Self::Block(blocks) => blocks.n(),
        }
    }

    /// The order of one epoch. For the block order this builds a list with an entry for each block, in milliseconds.
    pub fn epoch(&self, epoch: u64) -> Epoch<'_> {
        match self {
            Self::Global { seed, n } => Epoch::Global(Permutation::new(*seed, epoch, *n)),
            Self::Block(blocks) => Epoch::Block(blocks, blocks.starts(epoch)),
        }
    }
}

/// The order of one epoch.
pub enum Epoch<'a> {
    Global(Permutation),
    Block(&'a Blocks, Arc<Starts>),
}

impl Epoch<'_> {
    /// The recording at place `i` < n.
    pub fn at(&self, i: u64) -> u64 {
        match self {
            Self::Global(permutation) => permutation.at(i),
            Self::Block(blocks, starts) => blocks.at(starts, i),
        }
    }
}

/// The block order: runs of neighbouring recordings (blocks) are permuted as units, then the recordings of each
/// `window` consecutive blocks are permuted together. Reading ahead therefore reads runs, one window at a time.
pub struct Blocks {
    seed: u64,
    window: u64,                   // blocks
    stops: Vec<u64>,               // the end (exclusive) of each block
    last: Mutex<Vec<Arc<Starts>>>, // a cache of the epochs used last
}

/// The starts of an epoch's blocks in the permuted order, and the end of the last one.
pub struct Starts {
    epoch: u64,
    blocks: Permutation,
    starts: Vec<u64>,
}

impl Blocks {
    /// `stops`: the end (exclusive) of each block, in order; the first block begins at 0. Empty blocks are omitted.
    pub fn new(seed: u64, window: u64, mut stops: Vec<u64>) -> Self {
        stops.dedup();
        if stops.first() == Some(&0) {
            stops.remove(0);
        }
        Self { seed, window: window.max(1), stops, last: Mutex::default() }
    }

    /// Blocks of at most `size` of the recordings `rows` (increasing). No block spans two shards.
    pub fn of_rows(
        seed: u64, window: u64, size: u64, rows: &[u32], first_rows: impl Iterator<Item = usize>,
    ) -> Self {
        let mut stops = Vec::new();
        let mut begin = 0;
        let ends =
            first_rows.skip(1).map(|first| rows.partition_point(|&row| (row as usize) < first));
        for end in ends.chain([rows.len()]) {
            while begin < end {
                begin = end.min(begin + size.max(1) as usize);
                stops.push(begin as u64);
            }
        }
        Self::new(seed, window, stops)
    }

    pub fn n(&self) -> u64 {
        self.stops.last().copied().unwrap_or(0)
    }

    fn starts(&self, epoch: u64) -> Arc<Starts> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(starts) = last.iter().find(|starts| starts.epoch == epoch) {
            return starts.clone();
        }
        let blocks =
            Permutation::keyed(hash(&[BLOCK, self.seed, epoch]), (self.stops.len() as u64).max(1));
        let mut starts = Vec::with_capacity(self.stops.len() + 1);
        starts.push(0);
        for k in 0..self.stops.len() as u64 {
            let (begin, end) = self.block(blocks.at(k));
            starts.push(starts[k as usize] + end - begin);
        }
        let starts = Arc::new(Starts { epoch, blocks, starts });
        // Around an epoch's end, workers need it and the next.
        if last.len() > 2 {
            last.remove(0);
        }
        last.push(starts.clone());
        starts
    }

    fn block(&self, k: u64) -> (u64, u64) {
        let k = k as usize;
        (if k == 0 { 0 } else { self.stops[k - 1] }, self.stops[k])
    }

    /// The window of place `i`: the places [start, stop) of an epoch whose recordings are permuted together with its
    /// own.
    pub fn window(&self, epoch: u64, i: u64) -> (u64, u64) {
        self.span(&self.starts(epoch), i).1
    }

    fn span(&self, at: &Starts, i: u64) -> (u64, (u64, u64)) {
        let number = (at.starts.partition_point(|&start| start <= i) as u64 - 1) / self.window;
        let end = ((number + 1) * self.window).min(self.stops.len() as u64);
        (number, (at.starts[(number * self.window) as usize], at.starts[end as usize]))
    }

    fn at(&self, at: &Starts, i: u64) -> u64 {
        let (number, (start, stop)) = self.span(at, i);
        let inside = Permutation::keyed(hash(&[WINDOW, self.seed, at.epoch, number]), stop - start);
        let place = start + inside.at(i - start);
        let k = at.starts.partition_point(|&start| start <= place) - 1;
        self.block(at.blocks.at(k as u64)).0 + place - at.starts[k]
    }
}

/// A number in [0, m) from a hash of x; m < 2^32.
fn below(x: u64, m: u64) -> u64 {
    ((mix(x) >> 32) * m) >> 32
}

/// The first sample of a training crop, out of `n_starts` possible ones. `view` numbers the crops of one recording.
pub fn crop_start(seed: u64, epoch: u64, recording: u64, view: u64, n_starts: u64) -> u64 {
    hash(&[CROP, seed, epoch, recording, view]) % n_starts
}

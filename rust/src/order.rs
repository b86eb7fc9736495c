//! The order of the data, as pure functions: (seed, epoch, place) -> recording, and (seed, epoch, recording) -> crop.
//!
//! `loaders/order.py` is the readable reference; a test holds the two equal. Nothing here remembers anything, so
//! resuming, changing the world size and reading from any number of threads are the same operation.
//!
//! The permutation is a Feistel network over the mixed-radix digits of the place, for any n, not only powers of two
//! (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002): with a = ceil(sqrt n) and b = ceil(n / a), a place
//! is (l, r) = (place / b, place mod b), and the rounds are l += F(r) mod a and r += F(l) mod b by turns. a·b exceeds n by
//! less than a, so walking the cycle until it lands below n takes one extra turn in about sqrt(n).

/// Changes whenever the same (seed, epoch, place) would give another recording or another crop. Checkpoints hold it.
pub const VERSION: u32 = 1;

const ROUNDS: usize = 8;
const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15; // 2^64 / golden ratio, the increment of splitmix64

/// What a hash is for. Two uses of the same numbers draw independently.
const ORDER: u64 = 1;
const CROP: u64 = 2;

/// The output function of splitmix64 (Steele, Lea and Flood, 2014): a bijection of u64 with full avalanche.
pub fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

/// Hash of a tuple of integers.
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
        debug_assert!((1..1 << 62).contains(&n));
        let key = hash(&[ORDER, seed, epoch]);
        let a = (n - 1).isqrt() + 1;
        Self {
            n,
            a,
            b: n.div_ceil(a),
            keys: std::array::from_fn(|round| mix(key.wrapping_add(GOLDEN.wrapping_mul(round as u64 + 1)))),
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

/// A number in [0, m) from a hash of x; m < 2^32.
fn below(x: u64, m: u64) -> u64 {
    ((mix(x) >> 32) * m) >> 32
}

/// First sample of a training crop among `n_starts` possible ones. `view` numbers the crops of one recording.
pub fn crop_start(seed: u64, epoch: u64, recording: u64, view: u64, n_starts: u64) -> u64 {
    hash(&[CROP, seed, epoch, recording, view]) % n_starts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_n_is_permuted() {
        for n in (1..300).chain([1023, 1024, 1025, 65_537]) {
            let order = Permutation::new(3, 1, n);
            let mut seen = vec![false; n as usize];
            for i in 0..n {
                let j = order.at(i) as usize;
                assert!(!seen[j], "n = {n}: {j} comes twice");
                seen[j] = true;
            }
        }
    }

    #[test]
    fn largest_n_does_not_overflow() {
        let n = (1 << 62) - 1;
        let order = Permutation::new(0, 0, n);
        assert!([0, 1, n / 2, n - 1].iter().all(|&i| order.at(i) < n));
    }
}

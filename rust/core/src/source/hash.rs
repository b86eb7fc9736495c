//! A hash for fingerprints and for the cache of an index.

use crate::order;

/// A hash of 128 bits over words, in two lanes. It detects changes, not attacks.
pub(super) struct Hash([u64; 2]);

impl Hash {
    pub fn new() -> Self {
        Self([1, 2])
    }

    pub fn feed(&mut self, word: u64) {
        self.0 = self.0.map(|h| order::mix(h.rotate_left(5) ^ word).wrapping_add(h));
    }

    pub fn text(&mut self, s: &str) {
        self.bytes(s.as_bytes());
    }

    pub fn bytes(&mut self, bytes: &[u8]) {
        self.feed(bytes.len() as u64);
        let mut words = bytes.chunks_exact(8);
        for word in &mut words {
            self.feed(u64::from_le_bytes([
                word[0], word[1], word[2], word[3], word[4], word[5], word[6], word[7],
            ]));
        }
        let rest = words.remainder();
        if !rest.is_empty() {
            let mut word = [0; 8];
            word[..rest.len()].copy_from_slice(rest);
            self.feed(u64::from_le_bytes(word));
        }
    }

    pub fn words(&self) -> [u64; 2] {
        self.0
    }

    /// 32 hex digits.
    pub fn hex(&self) -> String {
        format!("{:016x}{:016x}", self.0[0], self.0[1])
    }
}

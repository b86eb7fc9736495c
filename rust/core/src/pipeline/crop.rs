//! Which samples of a recording make a clip.

/// Which samples of a recording make a clip, and where they lie in it.
#[derive(Debug, PartialEq)]
pub(super) struct Crop {
    pub start: u64,    // first sample, at the recording's rate
    pub len: u64,      // samples, at the recording's rate
    pub offset: usize, // zeros before them in the clip, at the target rate
    pub out: usize,    // samples that they become, at the target rate
}

impl Crop {
    /// A clip of `clip` samples at `target` Hz from a recording of `frames` samples at `rate` Hz.
    ///
    /// `pick` chooses the start between 0 and the surplus that it is given. A short recording is padded at its end, or on
    /// both sides when it is `centred`.
    pub fn new(frames: u64, rate: u32, target: u32, clip: usize, centred: bool, pick: impl FnOnce(u64) -> u64) -> Self {
        let (rate, target) = (u128::from(rate), u128::from(target));
        let needed = (clip as u128 * rate).div_ceil(target) as u64; // enough for the last output sample
        if frames >= needed {
            return Self { start: pick(frames - needed), len: needed, offset: 0, out: clip };
        }
        let out = ((u128::from(frames) * target + rate / 2) / rate).min(clip as u128) as usize;
        Self { start: 0, len: frames, offset: if centred { (clip - out) / 2 } else { 0 }, out }
    }

    /// The samples of the recording that the resampler needs: the crop and up to `context` more on both sides.
    pub fn span(&self, context: u64, frames: u64) -> (u64, u64) {
        (self.start.saturating_sub(context), (self.start + self.len + context).min(frames))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn centre(rate: u32, frames: u64) -> Crop {
        Crop::new(frames, rate, 32_000, 160_000, true, |surplus| surplus / 2)
    }

    #[test]
    fn a_crop_lies_inside_and_suffices() {
        for rate in [8_000, 22_050, 32_000, 44_100, 48_000, 192_000] {
            let frames = u64::from(rate) * 7 + 3;
            for pick in [0, u64::MAX] {
                let crop = Crop::new(frames, rate, 32_000, 160_000, false, |surplus| pick.min(surplus));
                assert_eq!((crop.offset, crop.out), (0, 160_000));
                assert!(crop.start + crop.len <= frames);
                assert!(crop.len * 32_000 >= 160_000 * u64::from(rate));
                if pick > 0 {
                    assert_eq!(crop.start + crop.len, frames);
                }
            }
        }
    }

    #[test]
    fn short_recordings_are_padded() {
        assert_eq!(centre(16_000, 16_000), Crop { start: 0, len: 16_000, offset: 64_000, out: 32_000 });
        let train = Crop::new(16_000, 16_000, 32_000, 160_000, false, |_| unreachable!());
        assert_eq!(train, Crop { start: 0, len: 16_000, offset: 0, out: 32_000 });
        assert_eq!(centre(32_000, 160_000), Crop { start: 0, len: 160_000, offset: 0, out: 160_000 });
        assert_eq!(centre(32_000, 160_011).start, 5);
    }
}

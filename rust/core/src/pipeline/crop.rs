//! The samples of a recording that make a clip.

/// The place in a clip of samples that do not fill it.
#[derive(Clone, Copy, Default)]
pub enum Short {
    #[default]
    Origin, // at the start in training, in the centre in testing
    Start,  // at the start
    Centre, // in the centre
    Random, // anywhere in training, drawn again each time; in the centre in testing
}

/// The way in which a clip is taken from a recording.
#[derive(Clone, Copy, Default)]
pub struct Clip {
    pub short: Short,
    pub repeat: bool, // a short recording is surrounded by itself again, not by silence
    pub silence: bool, // a part that is shorter than the clip is surrounded by silence, not by the recording
}

/// The samples of a recording that make a clip, and their place in it.
pub(super) struct Crop {
    pub start: u64,    // first sample, at the recording's rate
    pub len: u64,      // samples, at the recording's rate
    pub offset: usize, // zeros before them in the clip, at the target rate
    pub out: usize,    // samples that they become, at the target rate
    from: u64,         // samples before this one, and from `to` on, do not exist for this row
    to: u64,
}

/// The samples \[from, to) of a recording of `frames` that a row is.
#[derive(Clone, Copy)]
pub(super) struct Bounds {
    pub from: u64,
    pub to: u64,
    pub frames: u64,
}

impl Bounds {
    pub fn whole(frames: u64) -> Self {
        Self { from: 0, to: frames, frames }
    }
}

impl Crop {
    /// A clip of `clip` samples at `target` Hz from a recording at `rate` Hz, in training or in testing.
    ///
    /// `pick` chooses the start between 0 and the surplus that it is given. A part that is shorter than the clip is
    /// surrounded by the recording around it, anywhere in training and centred in testing, or by silence. A recording
    /// that is shorter is surrounded by silence or by itself.
    pub fn new(
        bounds: Bounds, rate: u32, target: u32, clip: usize, how: Clip, train: bool,
        pick: impl FnOnce(u64) -> u64,
    ) -> Self {
        let (rate, target) = (u128::from(rate), u128::from(target));
        let needed = (clip as u128 * rate).div_ceil(target) as u64; // enough for the last output sample
        let Bounds { mut from, mut to, frames } = bounds;
        if to - from >= needed {
            return Self {
                start: from + pick(to - from - needed),
                len: needed,
                offset: 0,
                out: clip,
                from,
                to,
            };
        }
        if !how.silence {
            if frames >= needed {
                // The clip begins where it still holds the end of the part, at the latest where the part begins.
                let first = to.saturating_sub(needed);
                let last = from.min(frames - needed);
                let first = first.min(last);
                let start =
                    if train { first + pick(last - first) } else { first + (last - first) / 2 };
                return Self { start, len: needed, offset: 0, out: clip, from: 0, to: frames };
            }
            (from, to) = (0, frames);
        }
        let out = ((u128::from(to - from) * target + rate / 2) / rate).min(clip as u128) as usize;
        let room = (clip - out) as u64;
        let offset = match (how.short, train) {
            (Short::Start, _) | (Short::Origin, true) => 0,
            (Short::Centre, _) | (Short::Origin | Short::Random, false) => room / 2,
            (Short::Random, true) => pick(room),
        };
        Self { start: from, len: to - from, offset: offset as usize, out, from, to }
    }

    /// The same crop of a prepared recording of `frames` samples at `target` Hz: it begins at the sample that is
    /// nearest to the one that was drawn at `rate` Hz.
    pub fn prepared(&self, rate: u32, target: u32, frames: u64) -> Self {
        let (rate, target) = (u128::from(rate), u128::from(target));
        let nearest = ((2 * u128::from(self.start) * target + rate) / (2 * rate)) as u64;
        let len = self.out as u64;
        Self { start: nearest.min(frames.saturating_sub(len)), len, from: 0, to: frames, ..*self }
    }

    /// The samples of the recording that the resampler needs: the crop and up to `context` more on both sides.
    pub fn span(&self, context: u64) -> (u64, u64) {
        (
            self.start.saturating_sub(context).max(self.from),
            (self.start + self.len + context).min(self.to),
        )
    }

    /// Fills the clip around its samples: with silence, or with themselves again and again.
    pub fn surround<T: Copy + Default>(&self, repeat: bool, wave: &mut [T]) {
        let (offset, out) = (self.offset, self.out);
        if !repeat || out == 0 {
            wave[..offset].fill(T::default());
            wave[offset + out..].fill(T::default());
            return;
        }
        for i in (0..offset).rev() {
            wave[i] = wave[i + out];
        }
        for i in offset + out..wave.len() {
            wave[i] = wave[i - out];
        }
    }
}

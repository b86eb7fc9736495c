//! Streams of MPEG audio that are none of layer III, which is read: layers I and II, and free bit rates. Bytes in them may
//! look like frames of layer III, so the whole stream is recognised before these are.

/// Frames of one stream, one after the other, that are no accident.
const SURE: usize = 3;
/// Bytes of a frame, at most: layer II at 384 kbit/s and 8 kHz.
const MAX_FRAME: usize = 6912;

/// Places at which a stream of a free bit rate is looked for, at most: each costs a search for its next frame.
const MAX_FREE: usize = 64;

/// The name of the stream that begins first in the bytes before `end`, if it is none that is read.
pub(in super::super) fn find(bytes: &[u8], end: usize) -> Option<&'static str> {
    let end = end.min(bytes.len());
    let mut n_free = 0;
    (0..end).filter(|&at| bytes[at] == 0xff).find_map(|at| {
        let frame = Frame::parse(&bytes[at..])?;
        n_free += usize::from(frame.size == 0);
        refuse!(frame.size == 0 && n_free > MAX_FREE, None);
        frame.begins_stream(&bytes[at..]).then_some(frame.name)
    })
}

/// The header of a frame of a stream that is not read.
#[derive(Clone, Copy)]
struct Frame {
    name: &'static str,
    stream: u32, // the bits of the header that are those of all frames: version, layer, rate
    size: usize, // bytes of the whole frame; 0 for a free bit rate, whose frames have one size but for padding
}

impl Frame {
    fn parse(bytes: &[u8]) -> Option<Self> {
        let word = u32::from_be_bytes(*bytes.first_chunk()?);
        let (version, layer, index) = (word >> 19 & 3, word >> 17 & 3, (word >> 12 & 15) as usize);
        refuse!(word >> 21 != 0x7ff || version == 1 || layer == 0 || index == 15, None);
        let base = [44_100, 48_000, 32_000].get((word >> 10 & 3) as usize)?;
        let rate = base >> [2, 0, 1, 0][version as usize];
        let kilobits = match (version, layer) {
            _ if index == 0 => 0,
            (3, 3) => 32 * index as u32,
            (3, 2) => [32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384][index - 1],
            (_, 3) => [32, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256][index - 1],
            (_, 2) => [8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160][index - 1],
            _ => return None,
        };
        let padding = word >> 9 & 1;
        let size = match layer {
            _ if kilobits == 0 => 0,
            3 => 4 * (12_000 * kilobits / rate + padding),
            _ => 144_000 * kilobits / rate + padding,
        };
        let name = match layer {
            3 => "MPEG layer I",
            2 => "MPEG layer II",
            _ => "MPEG layer III of a free bit rate",
        };
        Some(Self { name, stream: word & 0xfffe_0c00, size: size as usize })
    }

    /// Whether the frame at the beginning of `bytes` is followed by others of its stream, or is the last of their end.
    fn begins_stream(self, bytes: &[u8]) -> bool {
        if self.size == 0 {
            return self.free_size(bytes).is_some();
        }
        let (mut at, mut n) = (self.size, 1);
        while n < SURE {
            match bytes.get(at..).and_then(Self::parse) {
                Some(next) if next.stream == self.stream && next.size > 0 => at += next.size,
                _ => return n > 1 && at >= bytes.len(),
            }
            n += 1;
        }
        true
    }

    /// The size of the frames of a free bit rate, at which the header comes again and again.
    fn free_size(self, bytes: &[u8]) -> Option<usize> {
        let is_next = |at: usize| {
            let next = bytes.get(at..).and_then(Self::parse);
            next.is_some_and(|next| next.size == 0 && next.stream == self.stream)
        };
        let padded = |at: usize| is_next(at) || is_next(at + 1) || is_next(at + 4);
        (24..MAX_FRAME).find(|&size| is_next(size) && padded(2 * size) && padded(3 * size))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Silent frames of a header, whose sizes are those that the standard's formula gives.
    fn frames(header: [u8; 4], sizes: &[usize]) -> Vec<u8> {
        let frame = |&size: &usize| [&header[..], &vec![0; size - 4]].concat();
        sizes.iter().flat_map(frame).collect()
    }

    #[test]
    fn streams_that_are_not_read_have_a_name() {
        for (header, size, name) in [
            ([0xff, 0xfd, 0xa4, 0x00], 576, "MPEG layer II"), // 192 kbit/s at 48 kHz
            ([0xff, 0xfd, 0xa0, 0x00], 626, "MPEG layer II"), // at 44.1 kHz
            ([0xff, 0xf5, 0x84, 0xc0], 384, "MPEG layer II"), // 64 kbit/s at 24 kHz
            ([0xff, 0xe5, 0x48, 0xc0], 576, "MPEG layer II"), // 32 kbit/s at 8 kHz
            ([0xff, 0xff, 0xc4, 0x00], 384, "MPEG layer I"),  // 384 kbit/s at 48 kHz
            ([0xff, 0xf7, 0x84, 0x00], 256, "MPEG layer I"),  // 128 kbit/s at 24 kHz
            ([0xff, 0xfd, 0x04, 0x00], 500, "MPEG layer II"), // of a free bit rate
            ([0xff, 0xfb, 0x04, 0x00], 500, "MPEG layer III of a free bit rate"),
        ] {
            let stream = frames(header, &[size; 5]);
            assert_eq!(find(&stream, stream.len()), Some(name), "{header:02x?}");
            let junk = [&[7; 300], &stream[..]].concat();
            assert_eq!(find(&junk, junk.len()), Some(name), "after junk");
            assert_eq!(find(&junk, 300), None, "that begins later than is asked for");
            assert_eq!(find(&stream[..size], size), None, "one frame may be an accident");
        }
        let layer_iii = frames([0xff, 0xfb, 0x94, 0x00], &[384; 5]);
        assert_eq!(find(&layer_iii, layer_iii.len()), None);
    }
}

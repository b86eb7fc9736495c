//! The header of an MPEG audio frame (ISO/IEC 11172-3, 2.4.1.3; lower rates: 13818-3).

/// The header of a frame.
#[derive(Clone, Copy, PartialEq)]
pub(super) struct Header {
    pub rate: u32,   // sample rate in Hz
    pub mpeg1: bool, // MPEG 1, rather than 2 or 2.5
    pub channels: u8,
    pub joint: u8, // flags of middle/side (2) and intensity (1) stereo
    pub crc: bool,
    pub bit_rate: u32, // bits per second
    pub size: usize,   // bytes of the whole frame
}

impl Header {
    /// The header at the beginning of `bytes`. Layer III only; "free" bit rates, which give no size, are not supported.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let word = u32::from_be_bytes(*bytes.first_chunk()?);
        refuse!(word >> 21 != 0x7ff || word >> 17 & 3 != 1, None);
        let version = word >> 19 & 3;
        let base = [44100, 48000, 32000].get((word >> 10 & 3) as usize)?;
        let (rate, mpeg1) = match version {
            0 => (base / 4, false),
            2 => (base / 2, false),
            3 => (*base, true),
            _ => return None,
        };
        let kilobits: u32 = match (word >> 12 & 15) as usize {
            0 | 15 => return None,
            i if mpeg1 => [32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320][i - 1],
            i => [8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160][i - 1],
        };
        let samples = if mpeg1 { 1152 } else { 576 };
        let size = samples / 8 * kilobits * 1000 / rate + (word >> 9 & 1);
        let (channels, joint) = match word >> 6 & 3 {
            1 => (2, (word >> 4 & 3) as u8),
            3 => (1, 0),
            _ => (2, 0),
        };
        Some(Self {
            rate,
            mpeg1,
            channels,
            joint,
            crc: word >> 16 & 1 == 0,
            bit_rate: kilobits * 1000,
            size: size as usize,
        })
    }

    /// Samples per channel.
    pub fn samples(self) -> usize {
        576 << u32::from(self.mpeg1)
    }

    /// The mean size of a frame in bytes, times the sample rate.
    pub fn bytes_by_rate(self) -> u64 {
        self.samples() as u64 / 8 * u64::from(self.bit_rate)
    }

    /// Bytes of the side information.
    pub fn side(self) -> usize {
        match (self.mpeg1, self.channels) {
            (true, 1) => 17,
            (true, _) => 32,
            (false, 1) => 9,
            (false, _) => 17,
        }
    }

    /// Bytes of the header, its checksum and the side information.
    pub fn before_data(self) -> usize {
        4 + if self.crc { 2 } else { 0 } + self.side()
    }

    pub fn middle_side(self) -> bool {
        self.joint & 2 != 0
    }

    pub fn intensity(self) -> bool {
        self.joint & 1 != 0
    }

    /// The index of the sample rate in the standards' tables.
    pub fn rate_index(self) -> usize {
        const RATES: [u32; 9] = [44100, 48000, 32000, 22050, 24000, 16000, 11025, 12000, 8000];
        RATES.iter().position(|rate| *rate == self.rate).expect("parse knows no others")
    }

    /// Whether two frames can belong to one recording.
    pub fn same_stream(self, other: Self) -> bool {
        (self.rate, self.mpeg1) == (other.rate, other.mpeg1)
    }
}

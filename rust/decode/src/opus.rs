//! Opus in OGG (RFC 7845): pages and positions are read here, opus-pure decodes the packets (RFC 6716), always to 48
//! kHz.
//!
//! A page's granule position is the number of samples up to the end of its last packet, including the encoder's delay
//! (`pre-skip`), after which the recording begins. A packet states how many samples it holds, so the packets between a
//! page and the crop are skipped without decoding, except for the last `PRE_ROLL` samples, within which the state of
//! CELT (the coder of music) fades away. RFC 7845 recommends 80 ms, after which a difference is hard to hear but far
//! above 1e-5. The state of SILK (the coder of speech) keeps a sustained tone for many seconds: if it was used,
//! `PRE_ROLL_SPEECH` samples are decoded. (With several coded streams, the first one decides.)
//!
//! One or two channels (mapping family 0) and up to eight in the orders of Vorbis (family 1).

use std::panic::{catch_unwind, AssertUnwindSafe};

use opus_pure::packet::{mode, samples_48k};
use opus_pure::{ChannelLayout, OpusMSDecoder, OpusMode};

use super::ogg::{self, Packets};
use super::{corrupt, Error, Info};

const RATE: u32 = 48_000;
/// Samples that are decoded before the crop.
const PRE_ROLL: i64 = 48_000;
/// Samples that are decoded before the crop if SILK was used.
const PRE_ROLL_SPEECH: i64 = 30 * 48_000;
/// Samples of the longest packet: 120 ms.
const MAX_PACKET_SAMPLES: usize = 5760;
/// Bytes of the largest packet of two channels: six frames.
const MAX_PACKET_BYTES: usize = 6 * 1275 + 2 * 6 + 2;
const NAME: &str = "OGG Opus";

/// Decoders by their number of channels, and their memory.
#[derive(Default)]
pub(super) struct Opus {
    decoders: [Option<OpusMSDecoder>; 8],
    samples: Vec<f32>,
    pieces: Vec<u8>,
}

/// The identification header.
struct Head {
    channels: usize,
    skip: i64,
    gain: f32,
}

/// The place of a stream's audio.
struct Stream {
    head: Head,
    audio: usize, // first audio page
    origin: i64,  // positions of the first decoded sample, and of the recording
    begin: i64,
    end: i64,
}

impl Head {
    fn parse(packet: &[u8]) -> Result<Self, Error> {
        let unsupported = |what: &str| Err(Error::Unsupported { format: NAME, what: what.into() });
        refuse!(packet.len() < 19, corrupt(NAME, "the identification header is cut off"));
        refuse!(packet[8] >> 4 != 0, unsupported("a later version of the format"));
        let channels = usize::from(packet[9]);
        match (packet[18], channels) {
            (0, 1..=2) => {}
            (1, 1..=8) => {
                // Streams, pairs among them, and where each channel comes from (RFC 7845, 5.1.1.2).
                let usual = ChannelLayout::surround(channels, 1).map(|usual| {
                    [&[usual.nb_streams as u8, usual.nb_coupled_streams as u8], &usual.mapping[..]]
                        .concat()
                });
                let stated = packet.get(19..21 + channels);
                refuse!(
                    stated != usual.ok().as_deref(),
                    unsupported("an unusual order of channels")
                );
            }
            (0 | 1, _) => return corrupt(NAME, "the identification header is not valid"),
            _ => return unsupported("a channel mapping other than 0 and 1"),
        }
        let gain = i16::from_le_bytes([packet[16], packet[17]]);
        Ok(Self {
            channels,
            skip: u16::from_le_bytes([packet[10], packet[11]]).into(),
            // In dB, with eight fractional bits.
            gain: 10f32.powf(f32::from(gain) / (20.0 * 256.0)),
        })
    }
}

impl Opus {
    pub fn info(&mut self, bytes: &[u8], serial: u32) -> Result<Info, Error> {
        let stream = self.open(bytes, serial)?;
        let frames = stream.end.saturating_sub(stream.begin).max(0) as u64;
        if !ogg::can_hold(bytes, stream.audio, serial, frames, MAX_PACKET_SAMPLES as u64) {
            return corrupt(NAME, "its last position lies beyond the samples of its packets");
        }
        Ok(Info { rate: RATE, channels: stream.head.channels as u16, frames, stated: 0 })
    }

    /// Reads the headers, and finds the start and the end of the audio.
    fn open(&mut self, bytes: &[u8], serial: u32) -> Result<Stream, Error> {
        // Enough for any packet that spans pages, so that it is allocated once.
        self.pieces.clear();
        self.pieces.reserve(MAX_PACKET_BYTES);
        let mut packets = Packets::new(bytes, 0, serial, &mut self.pieces);
        let head = match packets.next()? {
            Some(packet) => Head::parse(packet.data)?,
            None => return corrupt(NAME, "the headers are cut off"),
        };
        if !packets.next()?.is_some_and(|packet| packet.data.starts_with(b"OpusTags")) {
            return corrupt(NAME, "the headers are cut off or out of order");
        }
        let audio = packets.at();
        let Some(last) = ogg::last_page(bytes, audio, serial) else {
            return Err(Error::NoAudio { format: NAME });
        };
        let end = last.granule.expect("last_page returns one with a position");
        // Count the samples up to the first page that has a position: they may be more than the position if that page
        // is also the last, and fewer if the stream was cut out of a longer one.
        let mut packets = Packets::new(bytes, audio, serial, &mut self.pieces);
        let mut n = 0;
        let first = loop {
            let Some(packet) = packets.next()? else { return Err(Error::NoAudio { format: NAME }) };
            n += samples_48k(packet.data).unwrap_or(0) as i64;
            if let Some(granule) = packet.granule {
                break granule;
            }
        };
        let origin = first.saturating_sub(n).max(0);
        Ok(Stream { begin: origin.saturating_add(head.skip), head, audio, origin, end })
    }

    pub fn read(
        &mut self, bytes: &[u8], serial: u32, start: u64, channel: Option<u16>, out: &mut [f32],
    ) -> Result<(), Error> {
        let Stream { head, audio, origin, begin, end } = self.open(bytes, serial)?;
        let begin = begin.saturating_add_unsigned(start);
        if begin.saturating_add_unsigned(out.len() as u64) > end {
            return corrupt(NAME, "the pages end before the stated length");
        }
        // Put back if all goes well: damaged bytes may leave it in any state.
        let cached = self.decoders[head.channels - 1].take();
        let cached = cached.and_then(|mut decoder| decoder.reset_state().ok().map(|()| decoder));
        let Some(mut decoder) =
            cached.or_else(|| OpusMSDecoder::new(RATE as i32, head.channels, 1).ok())
        else {
            return corrupt(NAME, "there is no decoder for its channels");
        };
        self.samples.resize(MAX_PACKET_SAMPLES * head.channels, 0.0);
        let mut first = begin.saturating_sub(PRE_ROLL);
        let seek = |first| match ogg::seek(bytes, audio, serial, first) {
            Some(page) => (page.at, page.granule.unwrap_or(origin), true),
            None => (audio, origin, false),
        };
        let (at, mut position, mut seeking) = seek(first);
        let mut packets = Packets::new(bytes, at, serial, &mut self.pieces);
        let (mut done, mut started) = (0, false);
        while done < out.len() {
            let Some(packet) = packets.next()? else {
                return corrupt(NAME, "the pages end before the stated length");
            };
            // Decoding begins at the end of the page that the seek returned.
            if seeking {
                seeking = packet.granule.is_none();
                continue;
            }
            let Some(n) = samples_48k(packet.data).ok().filter(|&n| n > 0) else {
                return corrupt(NAME, "a packet is not valid");
            };
            let after = position.saturating_add(n as i64);
            let is_speech = mode(packet.data).is_ok_and(|mode| mode != OpusMode::CeltOnly);
            if after > first
                && !started
                && is_speech
                && first > begin.saturating_sub(PRE_ROLL_SPEECH)
            {
                first = begin.saturating_sub(PRE_ROLL_SPEECH);
                let at;
                (at, position, seeking) = seek(first);
                packets = Packets::new(bytes, at, serial, &mut self.pieces);
                continue;
            }
            if after > first {
                started = true;
                // A panic would be a bug of the decoder on damaged bytes. One stream is decoded without another buffer.
                let decoded = catch_unwind(AssertUnwindSafe(|| match decoder.streams_mut() {
                    [only] => only.decode(packet.data, n, &mut self.samples),
                    _ => decoder.decode(packet.data, n, &mut self.samples),
                }));
                if !matches!(decoded, Ok(Ok(decoded)) if decoded == n) {
                    return corrupt(NAME, "a packet cannot be decoded");
                }
                let skip = (begin + done as i64 - position).clamp(0, n as i64) as usize;
                let take = (n - skip).min(out.len() - done);
                let gain = head.gain / head.channels as f32;
                let frames = self.samples[skip * head.channels..].chunks_exact(head.channels);
                for (y, x) in out[done..done + take].iter_mut().zip(frames) {
                    *y = match channel.and_then(|channel| x.get(usize::from(channel))) {
                        None => x.iter().sum::<f32>() * gain,
                        Some(x) => *x * head.gain,
                    };
                }
                done += take;
            }
            position = after;
            if let Some(granule) = packet.granule {
                // Only the last page may end before its last packet does.
                let cut = position > granule && granule == end;
                if position != granule && !cut {
                    return corrupt(NAME, "a page's position does not agree with its packets");
                }
            }
        }
        self.decoders[head.channels - 1] = Some(decoder);
        Ok(())
    }
}

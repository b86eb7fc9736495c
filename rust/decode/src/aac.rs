//! Whether AAC is of a kind that symphonia decodes: low complexity, of one or two channels, without the extensions of
//! HE-AAC, whose upper half of the band (SBR) or second channel (PS) it would leave out.

use super::bits::Msb;

/// Packets that are searched for data of SBR. More than half of them must have some.
pub(super) const MAX_PACKETS: usize = 12;

const LOW_COMPLEXITY: u32 = 2;
const SBR: u32 = 5;
const PS: u32 = 29;

/// The reason why AAC with this AudioSpecificConfig (ISO/IEC 14496-3, 1.6.2.1) is not decoded. None if it is.
pub(super) fn refusal(config: &[u8]) -> Option<&'static str> {
    let mut padded = [0; 32];
    let n = config.len().min(24);
    padded[..n].copy_from_slice(&config[..n]);
    let mut bits = Msb::new(&padded);
    let mut object = || match bits.read(5) {
        31 => 32 + bits.read(6),
        object => object,
    };
    match object() {
        LOW_COMPLEXITY => {}
        SBR | PS => return Some("HE-AAC"),
        _ => return Some("AAC of another profile than low complexity"),
    }
    if bits.read(4) == 15 {
        bits.read(24);
    }
    match bits.read(4) {
        1 | 2 => {}
        _ => return Some("AAC of more than 2 channels"),
    }
    if bits.read(1) == 1 {
        return Some("AAC in frames of 960 samples");
    }
    if bits.read(1) == 1 {
        bits.read(14);
    }
    bits.read(1);
    // The extension that older decoders skip.
    (bits.read(11) == 0x2b7 && bits.read(5) == SBR && bits.read(1) == 1).then_some("HE-AAC")
}

/// Whether a packet ends with data of SBR, which headers need not announce. Its last elements are fill elements
/// (ISO/IEC 14496-3, 4.4.2.7): the channels before them would have to be decoded to know where those begin, so they are
/// looked for from the end. Other data may look like one, about once in 50 packets.
pub(super) fn has_sbr(packet: &[u8]) -> bool {
    let Some(last) = packet.iter().rposition(|&byte| byte != 0) else { return false };
    // The end is three ones, and zeros up to the next byte.
    let bits = 8 * last + 8 - packet[last].trailing_zeros() as usize;
    bits.checked_sub(3).is_some_and(|end| fill_before(packet, end, 2))
}

/// Whether a fill element ends at bit `end` that holds SBR, or `more` others lie between.
fn fill_before(packet: &[u8], end: usize, more: usize) -> bool {
    let value = |at: usize, n: u32| Msb::at(packet, at).read(n) as usize;
    (1..=269usize).any(|count| {
        let (head, escape) = if count < 15 { (7, None) } else { (15, Some(count - 14)) };
        let Some(begin) = end.checked_sub(8 * count + head) else { return false };
        if value(begin, 3) != 6 || value(begin + 3, 4) != count.min(15) {
            return false;
        }
        if escape.is_some_and(|escape| value(begin + 7, 8) != escape) {
            return false;
        }
        match value(begin + head, 4) {
            13 | 14 => true,
            0..=2 => more > 0 && fill_before(packet, begin, more - 1),
            _ => false,
        }
    })
}

//! A record: fixed little-endian header, then the body or a fragment of it.

use super::{BodyFlags, Fragment, MAX_BODY_BYTES};
use crate::ids::{Epoch, NotifySeq, XferSeq};
use crate::peer::RingId;

/// Length of the header.
pub const RECORD_HEADER_BYTES: usize = 48;

const MAGIC: u32 = u32::from_le_bytes(*b"BtnR");
const VERSION: u8 = 1;
const CRC_AT: usize = 12;

/// What a record belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordScope {
    /// A notified transfer.
    Transfer {
        /// Its number.
        seq: XferSeq,
        /// Its lanes.
        lanes: u8,
    },
    /// A standalone notification.
    Standalone {
        /// Its number.
        seq: NotifySeq,
    },
    /// A message of a transfer, of which the last fragment says which.
    Part,
}

/// What a record says about what it brings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// Epoch it was written in.
    pub epoch: Epoch,
    /// What it belongs to.
    pub scope: RecordScope,
    /// Where it stands in a message that is longer than a record.
    pub fragment: Option<Fragment>,
    /// What the whole body consists of.
    pub flags: BodyFlags,
}

/// Header of a record, without what is constant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordHeader {
    /// What it says.
    pub record: Record,
    /// Length of what it brings.
    pub len: u32,
    crc32c: u32,
}

/// Why a record cannot be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// Something else lies there.
    #[error("magic is {0:#010x}")]
    Magic(u32),
    /// A version that was not negotiated.
    #[error("version {0} is not spoken")]
    Version(u8),
    /// Of another epoch.
    #[error("epoch is {got}, ours is {expected}")]
    Epoch {
        /// Told.
        got: u32,
        /// Ours.
        expected: u32,
    },
    /// Longer than a record may be.
    #[error("message of {len} bytes, the limit is {limit}")]
    Length {
        /// Told.
        len: u32,
        /// Limit.
        limit: u32,
    },
    /// A fragment that cannot be.
    #[error("fragment {index} of {count} with {len} of {total_len} bytes (the limit is {limit})")]
    Fragment {
        /// Position.
        index: u32,
        /// Of how many.
        count: u32,
        /// Its length.
        len: u32,
        /// Length of the whole.
        total_len: u32,
        /// Longest whole.
        limit: u32,
    },
    /// The checksum does not match the bytes.
    #[error("checksum is {got:#010x}, the bytes give {expected:#010x}")]
    Crc {
        /// Told.
        got: u32,
        /// Computed.
        expected: u32,
    },
    /// Flags that do not exist or do not go together, or a body that cannot hold what they promise.
    #[error("flags {flags:#06x} with a body of {len} bytes")]
    Flags {
        /// Told.
        flags: u16,
        /// Length of the body.
        len: u32,
    },
    /// Lanes 0 or above 64, a number where none belongs, none where one does, or not what the immediate said.
    #[error("it does not belong where it arrived: lanes {lanes}, transfer {seq}, notification {notify_seq}")]
    Scope {
        /// Told.
        lanes: u8,
        /// Told.
        seq: u64,
        /// Told.
        notify_seq: u64,
    },
}

impl Record {
    /// Appends header and body, or the fragment of it, to `out`.
    pub fn encode(&self, part: &[u8], out: &mut Vec<u8>) {
        let len = u32::try_from(part.len()).expect("a record is shorter than 4 GiB");
        let Fragment { key, index, count, total_len } =
            self.fragment.unwrap_or(Fragment { key: 0, index: 0, count: 1, total_len: len });
        let (lanes, seq, notify_seq) = match self.scope {
            RecordScope::Transfer { seq, lanes } => (lanes, seq.0, key),
            RecordScope::Standalone { seq } => (1, 0, seq.0),
            RecordScope::Part => (1, 0, key),
        };
        let begin = out.len();
        out.extend_from_slice(&MAGIC.to_le_bytes());
        out.extend_from_slice(&[VERSION, lanes]);
        out.extend_from_slice(&self.flags.bits().to_le_bytes());
        out.extend_from_slice(&self.epoch.0.to_le_bytes());
        out.extend_from_slice(&0u32.to_le_bytes());
        out.extend_from_slice(&seq.to_le_bytes());
        out.extend_from_slice(&notify_seq.to_le_bytes());
        for field in [index, count, total_len, len] {
            out.extend_from_slice(&field.to_le_bytes());
        }
        debug_assert_eq!(out.len() - begin, RECORD_HEADER_BYTES);
        out.extend_from_slice(part);
        let crc = crc32c::crc32c(&out[begin..]);
        out[begin + CRC_AT..begin + CRC_AT + 4].copy_from_slice(&crc.to_le_bytes());
    }
}

impl RecordHeader {
    /// Reads the header of a record that came to `ring`; `limit` is the most that fits a record. The checksum is
    /// [`RecordHeader::check`]'s.
    pub fn decode(
        bytes: &[u8; RECORD_HEADER_BYTES],
        epoch: Epoch,
        ring: RingId,
        limit: u32,
    ) -> Result<Self, RecordError> {
        let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        if u32_at(0) != MAGIC {
            return Err(RecordError::Magic(u32_at(0)));
        }
        if bytes[4] != VERSION {
            return Err(RecordError::Version(bytes[4]));
        }
        if u32_at(8) != epoch.0 {
            return Err(RecordError::Epoch { got: u32_at(8), expected: epoch.0 });
        }
        let (lanes, seq, notify_seq) = (bytes[5], u64_at(16), u64_at(24));
        let (index, count, total_len, len) = (u32_at(32), u32_at(36), u32_at(40), u32_at(44));
        if len > limit {
            return Err(RecordError::Length { len, limit });
        }
        let fragment = match (index, count, total_len) == (0, 1, len) {
            true => None,
            // Every fragment has a byte.
            false
                if (2..=total_len).contains(&count)
                    && index < count
                    && len > 0
                    && total_len <= MAX_BODY_BYTES =>
            {
                Some(Fragment { key: notify_seq, index, count, total_len })
            }
            false => {
                return Err(RecordError::Fragment { index, count, len, total_len, limit: MAX_BODY_BYTES });
            }
        };
        let bits = u16::from_le_bytes([bytes[6], bytes[7]]);
        let flags = BodyFlags::of_bits(bits, total_len);
        let flags = flags.ok_or(RecordError::Flags { flags: bits, len: total_len })?;
        let on_control = ring == RingId::Control;
        let last = fragment.is_none_or(|fragment| fragment.is_last());
        let scope = match (on_control, lanes, seq, notify_seq) {
            (true, 1, 0, 1..) => RecordScope::Standalone { seq: NotifySeq(notify_seq) },
            (false, 1..=64, _, _) if last && fragment.is_some() == (notify_seq > 0) => {
                RecordScope::Transfer { seq: XferSeq(seq), lanes }
            }
            (false, 1, 0, 1..) if !last => RecordScope::Part,
            _ => return Err(RecordError::Scope { lanes, seq, notify_seq }),
        };
        let record = Record { epoch, scope, fragment, flags };
        Ok(RecordHeader { record, len, crc32c: u32_at(CRC_AT) })
    }

    /// Compares the checksum with the bytes that were copied out.
    pub fn check(&self, header: &[u8; RECORD_HEADER_BYTES], body: &[u8]) -> Result<(), RecordError> {
        let mut zeroed = *header;
        zeroed[CRC_AT..CRC_AT + 4].fill(0);
        let expected = crc32c::crc32c_append(crc32c::crc32c(&zeroed), body);
        if expected == self.crc32c { Ok(()) } else { Err(RecordError::Crc { got: self.crc32c, expected }) }
    }
}

/// A copy of what lies at a reader's cursor, for the record that nearly all are: a short message of a transfer, without fragments or an
/// id. Aligned for the checksum, which goes by words.
#[derive(Debug)]
#[repr(align(16))]
pub struct PlainRecord([u8; PlainRecord::BYTES]);

impl Default for PlainRecord {
    fn default() -> PlainRecord {
        PlainRecord([0; PlainRecord::BYTES])
    }
}

impl PlainRecord {
    /// Longest such record with its header. What lies behind a shorter one is copied along.
    pub const BYTES: usize = 128;

    /// Longest message of such a record.
    pub const MESSAGE_BYTES: usize = PlainRecord::BYTES - RECORD_HEADER_BYTES;

    /// To be filled.
    pub fn bytes(&mut self) -> &mut [u8] {
        &mut self.0
    }

    /// The message, if this is such a record of that transfer and its checksum is right. Takes nothing that
    /// [`RecordHeader::decode`] and [`RecordHeader::check`] would not take.
    pub fn message(&mut self, epoch: Epoch, seq: XferSeq, lanes: u8) -> Option<&[u8]> {
        const ONE_OF_ONE: u64 = 1 << 32;
        let u64_at = |at: usize| u64::from_le_bytes(self.0[at..at + 8].try_into().expect("eight bytes"));
        let begin = u64::from(MAGIC) | u64::from(VERSION) << 32 | u64::from(lanes) << 40;
        let (told, len) = (u64_at(8), u64_at(40) & 0xFFFF_FFFF);
        let is_plain = (u64_at(0), told & 0xFFFF_FFFF) == (begin, u64::from(epoch.0))
            && (u64_at(16), u64_at(24)) == (seq.0, 0)
            && (u64_at(32), u64_at(40)) == (ONE_OF_ONE, len << 32 | len)
            && (1..=64).contains(&lanes);
        let end = RECORD_HEADER_BYTES + len as usize;
        if !is_plain || end > self.0.len() {
            return None;
        }
        // The whole word: the checksum reads words, and one that was written in parts is late.
        self.0[8..16].copy_from_slice(&u64::from(epoch.0).to_le_bytes());
        (u64::from(crc32c::crc32c(&self.0[..end])) == told >> 32).then(|| &self.0[RECORD_HEADER_BYTES..end])
    }
}

//! Send mode: what an immediate would say, and the record if there is one, in the payload of a SEND.
//!
//! ```text
//!   0  imm u32   4  epoch u32   8  record, when the word announces one        (little-endian)
//! ```

use serde::Serialize;

use crate::ids::Epoch;

/// Length of the header.
pub const SEND_HEADER_BYTES: usize = 8;

/// How a session tells the peer that something is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum NotifyMode {
    /// By the immediate of a WRITE; records lie in rings.
    #[serde(rename = "imm")]
    Immediate,
    /// By a SEND behind the data; records lie in the RECV slots.
    #[serde(rename = "send")]
    Send,
}

/// Why the payload of a SEND cannot be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// Shorter than header and, where one is announced, record header; or longer than a slot.
    #[error("{len} bytes, outside {least}..={most}")]
    Size {
        /// Received.
        len: u32,
        /// Needed.
        least: u32,
        /// Length of a slot.
        most: u32,
    },
    /// Not as long as what it announces.
    #[error("{len} bytes where it announces {announced}")]
    Length {
        /// Received.
        len: u32,
        /// As the word and the record's header say.
        announced: u32,
    },
    /// Of another epoch.
    #[error("epoch is {got}, ours is {expected}")]
    Epoch {
        /// Told.
        got: u32,
        /// Ours.
        expected: u32,
    },
}

/// What every payload begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SendHeader {
    /// The word that the immediate would carry.
    pub imm: u32,
    /// Epoch it was sent in.
    pub epoch: Epoch,
}

impl SendHeader {
    /// Appends it to `out`.
    pub fn encode(self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.imm.to_le_bytes());
        out.extend_from_slice(&self.epoch.0.to_le_bytes());
    }

    /// From the wire.
    pub fn decode(bytes: [u8; SEND_HEADER_BYTES]) -> SendHeader {
        let word = u64::from_le_bytes(bytes);
        SendHeader { imm: word as u32, epoch: Epoch((word >> 32) as u32) }
    }
}

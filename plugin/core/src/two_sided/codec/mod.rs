//! Bytes of the two-sided backend: control frames and data messages.
//!
//! A decoder checks lengths before it allocates, caps every count, yields a whole value or one distinct error and never
//! panics; encoders enforce the same limits, so what they make always decodes.

mod frame;
mod message;
#[cfg(test)]
mod mutated;
mod payload;
#[cfg(test)]
mod tests;

pub use frame::{CONTROL_HEADER_BYTES, Frame, FrameError, FrameHeader, Kind, decode_frame, encode_frame};
pub use message::{
    Block, DATA_HEADER_BYTES, DataHeader, DataKind, MessageError, PACK_BLOCK_BYTES, append_data_crc,
    check_crc, decode_blocks, encode_message, extend_crc, pack_prefix_bytes,
};
pub use payload::{
    Ack, Direction, Lists, MAX_ACKS, MAX_READ_PIECES, PayloadError, ReadPiece, Status, notify_bytes,
};

/// Bytes of a control RECV, hence of the longest control frame.
pub const CONTROL_SLOT_BYTES: usize = 1024;

/// Most chunks of a transfer.
pub const MAX_CHUNKS: u32 = 1 << 24;

/// Most pieces of a READ.
pub const MAX_PIECES: u32 = 1 << 17;

/// Longest message of a notification: one of 8 MiB with flags and an id in front of it.
pub const MAX_MESSAGE_BYTES: u32 = (8 << 20) + 16;

/// Most lanes of a session.
pub const MAX_LANES: u8 = 64;

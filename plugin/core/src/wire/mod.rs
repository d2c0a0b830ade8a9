//! Bytes that leave the engine: connection information, exported regions, handshake messages, lifeline frames.
//!
//! Every decoder checks a length before it allocates, yields a whole value or one distinct error, and never panics,
//! whatever the bytes. Encoders enforce the limits that decoders check.

mod backends;
mod conn_info;
mod cursor;
mod field;
mod frame;
mod lifeline_frame;
mod messages;
mod negotiate;
mod offer;
#[cfg(test)]
mod offer_tests;
mod region_blob;
#[cfg(test)]
pub(crate) mod samples;
mod secret;
#[cfg(test)]
mod tests;
mod two_sided_offer;

pub use backends::{Backends, NoCommonBackend, ONE_SIDED, TWO_SIDED};
pub use conn_info::{Candidate, ConnInfo, ConnInfoError, HostId, parse_candidate};
pub(crate) use cursor::Cursor;
pub use field::FieldError;
pub use frame::{FrameError, FrameReader, encode_frame};
pub use lifeline_frame::{LifelineFrame, LifelineFrameError};
pub use messages::{
    Accept, ErrorCode, Hello, Message, MessageError, Progress, ProtocolRange, Ready, Refusal, Reply,
};
pub use negotiate::{
    Agreed, AgreedOneSided, AgreedTwoSided, Depths, NegotiateError, SEND_RQ_DEPTH, negotiate,
};
pub use offer::{EndpointOffer, FabricOffer, MemoryOffer, OneSidedOffer};
pub use region_blob::{Access, FabricKeys, RegionBlob, RegionBlobError};
pub(crate) use secret::verify;
pub use secret::{Mac, ResumeToken, SessionKey, mac};
pub use two_sided_offer::{TwoSidedLane, TwoSidedOffer};

/// The protocol version that this engine speaks.
pub const PROTOCOL_VERSION: u32 = 1;

/// Longest agent name in bytes.
pub const MAX_NAME_BYTES: usize = 255;
/// Longest body of a frame in bytes, authenticator included.
pub const MAX_FRAME_BYTES: usize = 64 * 1024;
/// Bytes of an authenticator in front of each frame's JSON.
pub const MAC_BYTES: usize = 32;
/// Longest encoded connection information in bytes.
pub const MAX_CONN_INFO_BYTES: usize = 16 * 1024;
/// Longest address of a fabric in connection information, as JSON.
pub const MAX_FABRIC_ADDRESS_BYTES: usize = 4096;
/// Most addresses in connection information.
pub const MAX_CANDIDATES: usize = 32;
/// Longest name of a fabric, backend or feature in bytes.
pub const MAX_WORD_BYTES: usize = 32;
/// Most fabrics, backends or features in one list.
pub const MAX_WORDS: usize = 64;
/// Most fabrics in one HELLO, and most that one region has keys on.
pub const MAX_FABRICS: usize = 8;
/// Most keys of a region on one fabric: rails × segments.
pub const MAX_REGION_KEYS: usize = 4096;
/// Most data lanes of a session.
pub const MAX_LANES: usize = 64;
/// Deepest queue of an endpoint.
pub const MAX_DEPTH: u64 = 65_535;
/// Most RECVs of all queues of a session together.
pub const MAX_SESSION_RECVS: u64 = 1 << 20;
/// Longest text of a refusal, a reason or a violation in bytes; longer ones are cut.
pub const MAX_TEXT_BYTES: usize = 1024;
/// Most regions in one REVOKE.
pub const MAX_REVOKE_REGIONS: usize = 2048;

/// Why a string is not an agent name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// No bytes.
    #[error("the agent name is empty; it must have 1 to {MAX_NAME_BYTES} bytes")]
    Empty,
    /// Too many bytes.
    #[error("the agent name has {0} bytes; it must have 1 to {MAX_NAME_BYTES}")]
    TooLong(usize),
    /// A zero byte.
    #[error("the agent name has a NUL at byte {0}; names are UTF-8 without NUL")]
    Nul(usize),
    /// Not UTF-8.
    #[error("the agent name is not UTF-8 from byte {0} on")]
    NotUtf8(usize),
}

/// Checks an agent name: UTF-8, 1 to [`MAX_NAME_BYTES`] bytes, no NUL.
pub fn check_name(name: &[u8]) -> Result<&str, NameError> {
    if name.is_empty() {
        return Err(NameError::Empty);
    }
    if name.len() > MAX_NAME_BYTES {
        return Err(NameError::TooLong(name.len()));
    }
    if let Some(at) = name.iter().position(|b| *b == 0) {
        return Err(NameError::Nul(at));
    }
    std::str::from_utf8(name).map_err(|e| NameError::NotUtf8(e.valid_up_to()))
}

/// `text` cut to `max` bytes at a character's border.
pub(crate) fn clip(text: &str, max: usize) -> &str {
    if text.len() <= max {
        return text;
    }
    let mut end = max;
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

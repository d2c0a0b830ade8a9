//! The handshake HELLO → REPLY → READY → ACCEPT, without I/O.
//!
//! Each step is a type whose methods consume it, so a step out of order does not compile. A step takes the body of a
//! frame ([`crate::wire::FrameReader`]) and gives frames to send. Every body is
//! `HMAC-SHA256(K, role ‖ H(all earlier messages) ‖ JSON) ‖ JSON`, where K is the *listener's* session key and the
//! roles c1, s2, c3, s4 keep a message from being reflected or moved to another place.
//!
//! ```text
//! initiator                                  listener
//! Initiator::start ──HELLO──▶                Listener::on_hello → HelloReceived (decide) → reply | refuse
//! AwaitReply::on_reply ◀──REPLY──
//!   … connect the endpoints …                  … connect the endpoints …
//! ReplyReceived::ready ──READY──▶            AwaitReady::on_ready → ReadyReceived (decide) → accept | refuse
//! AwaitAccept::on_accept ◀──ACCEPT──
//! ```

mod decide;
mod initiator;
mod lifeline_codec;
mod link;
mod listener;
mod names;
mod transcript;

#[cfg(test)]
mod glare_tests;
#[cfg(test)]
mod tests;

pub use decide::{Decision, LocalState, Proof, decide_hello, decide_ready};
pub use initiator::{AwaitAccept, AwaitReply, Initiator, ReplyReceived};
pub use lifeline_codec::{LifelineCodec, LifelineError};
pub use link::{Answer, Begin, Link, LinkState, backoff_ms};
pub use listener::{AwaitReady, HelloReceived, Listener, ReadyReceived};
pub use names::{NameClaim, NameDecision, decide_name};
pub use transcript::IdentityProof;

use crate::ids::{Epoch, Instance, SessionId};
use crate::wire::{FrameError, MessageError, Refusal, ResumeToken};

/// How an attempt failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HandshakeError {
    /// The peer said no; its words.
    #[error("peer refused: {0}")]
    Refused(Refusal),
    /// Something said no without knowing the key: a stranger, or an engine with another key.
    #[error("refused, unauthenticated: {0}")]
    RefusedUnverified(Refusal),
    /// The authenticator of a message is wrong: the other end does not hold the session key.
    #[error("{0}: wrong authenticator, the other end does not hold the session key")]
    BadAuthenticator(&'static str),
    /// No frame.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// No message, or a field of it.
    #[error(transparent)]
    Message(#[from] MessageError),
    /// Another message than this step takes.
    #[error("{got} instead of {expected}")]
    Unexpected {
        /// Expected name.
        expected: &'static str,
        /// Name received.
        got: &'static str,
    },
    /// Another engine listens at that address.
    #[error("the engine at this address is instance {got}, not {expected}")]
    WrongInstance {
        /// Meant.
        expected: Instance,
        /// Found.
        got: Instance,
    },
    /// An answer that contradicts the question.
    #[error("{message}.{field}: {got} instead of {expected}")]
    Mismatch {
        /// Message.
        message: &'static str,
        /// Its field.
        field: &'static str,
        /// Expected.
        expected: String,
        /// Received.
        got: String,
    },
    /// No epochs are left between the two; one engine must be created anew.
    #[error("epochs are used up after {0}; create the engine anew")]
    EpochsUsedUp(u32),
}

/// A failed step.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{cause}")]
pub struct Failure {
    /// Why.
    pub cause: HandshakeError,
    /// A frame to send before the connection is closed: it tells the peer.
    pub send: Option<Vec<u8>>,
}

/// A session that both sides hold.
#[derive(Debug)]
pub struct Established {
    /// The peer.
    pub peer: Instance,
    /// The peer's agent name as it calls itself.
    pub peer_name: String,
    /// The session.
    pub session: SessionId,
    /// Its generation.
    pub epoch: Epoch,
    /// Both remembered the session: message numbers run on. Otherwise both start anew.
    pub resumed: bool,
    /// Proof for replacing this epoch.
    pub resume_token: ResumeToken,
    /// Authenticator of the lifeline, which is the rest of this connection.
    pub lifeline: LifelineCodec,
}

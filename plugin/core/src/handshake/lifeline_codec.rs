//! Authenticated lifeline messages: each side numbers its own, so none can be dropped, repeated, moved or reflected.

use crate::wire::{FrameError, LifelineFrame, LifelineFrameError, Mac, encode_frame, mac, verify};

use super::transcript::split;

/// Why a lifeline is unusable; the session ends.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LifelineError {
    /// No frame.
    #[error("lifeline: {0}")]
    Frame(#[from] FrameError),
    /// Not from the peer of the handshake, or out of order.
    #[error("lifeline: message {0} has a wrong authenticator")]
    BadAuthenticator(u64),
    /// No message.
    #[error("lifeline: {0}")]
    Message(#[from] LifelineFrameError),
}

/// Makes and checks the frames of one session's lifeline.
#[derive(Clone)]
pub struct LifelineCodec {
    key: Mac,
    initiator: bool,
    sent: u64,
    received: u64,
}

impl std::fmt::Debug for LifelineCodec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LifelineCodec").field("sent", &self.sent).field("received", &self.received).finish()
    }
}

impl LifelineCodec {
    pub(super) fn new(key: Mac, initiator: bool) -> Self {
        Self { key, initiator, sent: 0, received: 0 }
    }

    /// The frame of the next message. Frames must be sent in the order in which they are made.
    ///
    /// # Errors
    /// The message is over a limit; the codec is unchanged.
    pub fn seal(&mut self, message: &LifelineFrame) -> Result<Vec<u8>, LifelineError> {
        let json = message.encode()?;
        let mut body = self.tag(self.initiator, self.sent, &json).to_vec();
        body.extend_from_slice(&json);
        let frame = encode_frame(&body)?;
        self.sent += 1;
        Ok(frame)
    }

    /// Reads the body of the next message.
    ///
    /// # Errors
    /// Not the peer's next message.
    pub fn open(&mut self, body: &[u8]) -> Result<LifelineFrame, LifelineError> {
        let (tag, json) = split(body)?;
        let side = side(!self.initiator);
        if !verify(&self.key, &[side, &self.received.to_le_bytes(), json], tag) {
            return Err(LifelineError::BadAuthenticator(self.received));
        }
        self.received += 1;
        Ok(LifelineFrame::decode(json)?)
    }

    fn tag(&self, initiator: bool, number: u64, json: &[u8]) -> Mac {
        mac(&self.key, &[side(initiator), &number.to_le_bytes(), json])
    }
}

fn side(initiator: bool) -> &'static [u8] {
    if initiator { b"c" } else { b"s" }
}

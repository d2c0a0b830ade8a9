//! The hash of what was said so far, and the authenticators over it.

use sha2::{Digest, Sha256};

use super::{Failure, HandshakeError, LifelineCodec};
use crate::wire::{
    ErrorCode, FrameError, MAC_BYTES, Mac, Message, Refusal, ResumeToken, SessionKey, encode_frame, mac,
};

/// Position of a message and its sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Hello,
    Reply,
    Ready,
    Accept,
}

impl Role {
    fn bytes(self) -> &'static [u8; 2] {
        match self {
            Self::Hello => b"c1",
            Self::Reply => b"s2",
            Self::Ready => b"c3",
            Self::Accept => b"s4",
        }
    }

    fn message(self) -> &'static str {
        match self {
            Self::Hello => "HELLO",
            Self::Reply => "REPLY",
            Self::Ready => "READY",
            Self::Accept => "ACCEPT",
        }
    }
}

/// What both sides have seen, under the listener's key.
#[derive(Clone)]
pub(super) struct Transcript {
    key: SessionKey,
    hash: Sha256,
}

impl std::fmt::Debug for Transcript {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Transcript(..)")
    }
}

impl Transcript {
    pub(super) fn new(key: SessionKey) -> Self {
        Self { key, hash: Sha256::new() }
    }

    /// H(all messages so far).
    pub(super) fn hash(&self) -> [u8; 32] {
        self.hash.clone().finalize().into()
    }

    /// Each message goes in behind its length, so that no two sequences of messages hash alike.
    fn absorb(&mut self, json: &[u8]) {
        self.hash.update((json.len() as u32).to_le_bytes());
        self.hash.update(json);
    }

    /// The frame of a message of this side; takes it into the transcript.
    pub(super) fn seal(&mut self, role: Role, message: &Message) -> Result<Vec<u8>, FrameError> {
        let json = message.encode();
        let mut body = mac(self.key.expose(), &[role.bytes(), &self.hash(), &json]).to_vec();
        body.extend_from_slice(&json);
        let frame = encode_frame(&body)?;
        self.absorb(&json);
        Ok(frame)
    }

    /// Checks the body of a message of the other side and takes it into the transcript.
    ///
    /// An ERROR is an `Err` too, whoever it is from; one with a wrong authenticator says so.
    pub(super) fn open(&mut self, role: Role, body: &[u8]) -> Result<Message, HandshakeError> {
        let (tag, json) = split(body)?;
        let genuine = crate::wire::verify(self.key.expose(), &[role.bytes(), &self.hash(), json], tag);
        if !genuine {
            // Only an ERROR is worth reading: "that instance is gone" comes from an engine with another key.
            return Err(match Message::decode(json) {
                Ok(Message::Error(refusal)) => HandshakeError::RefusedUnverified(refusal),
                _ => HandshakeError::BadAuthenticator(role.message()),
            });
        }
        let message = Message::decode(json);
        self.absorb(json);
        match message? {
            Message::Error(refusal) => Err(HandshakeError::Refused(refusal)),
            message => Ok(message),
        }
    }

    /// A failed step; the peer is told in the next message's place.
    pub(super) fn fail(mut self, role: Role, cause: HandshakeError) -> Failure {
        let refusal = match &cause {
            // Never answer an ERROR with an ERROR.
            HandshakeError::Refused(_) | HandshakeError::RefusedUnverified(_) => {
                return Failure { cause, send: None };
            }
            HandshakeError::BadAuthenticator(_) => {
                Refusal::new(ErrorCode::BadAuthenticator, cause.to_string())
            }
            HandshakeError::EpochsUsedUp(_) => Refusal::new(ErrorCode::Limit, cause.to_string()),
            _ => Refusal::new(ErrorCode::Malformed, cause.to_string()),
        };
        let send = self.refuse(role, refusal);
        Failure { cause, send }
    }

    pub(super) fn refuse(&mut self, role: Role, refusal: Refusal) -> Option<Vec<u8>> {
        self.seal(role, &Message::Error(refusal)).ok()
    }

    /// The lifeline's codec; its key depends on every message.
    pub(super) fn lifeline(&self, initiator: bool) -> LifelineCodec {
        LifelineCodec::new(mac(self.key.expose(), &[b"baton lifeline", &self.hash()]), initiator)
    }
}

pub(super) fn split(body: &[u8]) -> Result<(&[u8], &[u8]), FrameError> {
    body.split_at_checked(MAC_BYTES).ok_or(FrameError::TooShort(body.len() as u32))
}

/// READY's proof of being a certain instance: kept until that instance's connection information is loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdentityProof {
    hash: [u8; 32],
    tag: Mac,
}

impl IdentityProof {
    pub(super) fn new(hash: [u8; 32], tag: Mac) -> Self {
        Self { hash, tag }
    }

    /// Whether it was made with this session key, the one in the connection information of the instance in question.
    #[must_use]
    pub fn verify(&self, key: &SessionKey) -> bool {
        crate::wire::verify(key.expose(), &[IDENTITY, &self.hash], &self.tag)
    }
}

const IDENTITY: &[u8] = b"baton identity";
const RESUME: &[u8] = b"baton resume";

pub(super) fn identity_tag(own_key: &SessionKey, hash: &[u8; 32]) -> Mac {
    mac(own_key.expose(), &[IDENTITY, hash])
}

pub(super) fn resume_tag(token: &ResumeToken, hash: &[u8; 32]) -> Mac {
    mac(token.expose(), &[RESUME, hash])
}

pub(super) fn resume_proves(token: &ResumeToken, hash: &[u8; 32], tag: &Mac) -> bool {
    crate::wire::verify(token.expose(), &[RESUME, hash], tag)
}

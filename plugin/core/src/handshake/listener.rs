//! The side that is connected to. Until READY is verified it changes nothing but the endpoints it made for REPLY.

use super::initiator::{choice, same};
use super::transcript::{IdentityProof, Role, Transcript, resume_proves, split};
use super::{Established, Failure, HandshakeError};
use crate::ids::{Epoch, Instance, SessionId};
use crate::wire::{
    Accept, Agreed, ErrorCode, FrameError, Hello, Message, Ready, Refusal, Reply, ResumeToken, SessionKey,
};

/// Waits for HELLO on a new connection.
#[derive(Debug)]
pub struct Listener {
    transcript: Transcript,
    own: Instance,
}

/// HELLO came from a holder of the key; decide what to answer.
#[derive(Debug)]
pub struct HelloReceived {
    transcript: Transcript,
    /// The message.
    pub hello: Hello,
}

/// REPLY is on its way.
#[derive(Debug)]
pub struct AwaitReady {
    transcript: Transcript,
    hello: Hello,
    session: SessionId,
    epoch: Epoch,
    /// What both offers agree on: what to connect the endpoints with.
    pub agreed: Agreed,
    /// Index of the chosen fabric in HELLO's offers.
    pub chosen: usize,
}

/// READY came and is genuine; decide what to answer.
#[derive(Debug)]
pub struct ReadyReceived {
    transcript: Transcript,
    /// What the initiator offered and said.
    pub hello: Hello,
    /// The message.
    pub ready: Ready,
    /// Proof of the initiator's identity, for now or for later.
    pub identity: IdentityProof,
    /// What both offers agree on.
    pub agreed: Agreed,
    hash: [u8; 32],
}

impl Listener {
    /// `own_key` is this engine's session key, as in its connection information.
    pub fn new(own_key: SessionKey, own: Instance) -> Self {
        Self { transcript: Transcript::new(own_key), own }
    }

    /// Takes the first message of a connection.
    ///
    /// # Errors
    /// Also a wrong authenticator; someone who means an earlier instance is told so.
    pub fn on_hello(mut self, body: &[u8]) -> Result<HelloReceived, Failure> {
        let cause = match self.transcript.open(Role::Hello, body) {
            Ok(Message::Hello(hello)) => {
                return Ok(HelloReceived { transcript: self.transcript, hello: *hello });
            }
            Ok(other) => HandshakeError::Unexpected { expected: "HELLO", got: other.name() },
            Err(e @ HandshakeError::BadAuthenticator(_)) => match self.meant(body) {
                Some(meant) if meant != self.own => {
                    let send = self.transcript.refuse(Role::Reply, restarted(self.own, meant));
                    return Err(Failure {
                        cause: HandshakeError::WrongInstance { expected: self.own, got: meant },
                        send,
                    });
                }
                _ => e,
            },
            Err(e) => e,
        };
        Err(self.transcript.fail(Role::Reply, cause))
    }

    /// Whom an unauthenticated HELLO means: whoever has an earlier instance's connection information has its key, not ours.
    fn meant(&self, body: &[u8]) -> Option<Instance> {
        match Message::decode(split(body).ok()?.1) {
            Ok(Message::Hello(hello)) => Some(hello.to_instance),
            _ => None,
        }
    }
}

/// The refusal for somebody who means an instance that is not here.
pub(super) fn restarted(own: Instance, meant: Instance) -> Refusal {
    let text = format!(
        "instance {meant} is not here any more, {own} is; load the connection information of this agent again"
    );
    Refusal::new(ErrorCode::PeerRestarted, text)
}

impl HelloReceived {
    /// Makes the REPLY frame. `reply.session` and `reply.epoch` are what [`crate::handshake::Link::answer`] says.
    ///
    /// # Errors
    /// REPLY does not answer this HELLO, which is a mistake of the caller.
    pub fn reply(mut self, reply: Reply) -> Result<(AwaitReady, Vec<u8>), Failure> {
        let answers = same("REPLY", "attempt", self.hello.attempt, reply.attempt);
        let (agreed, chosen) = match answers.and_then(|()| choice(&self.hello, &reply.offer)) {
            Ok(choice) => choice,
            Err(cause) => return Err(self.transcript.fail(Role::Reply, cause)),
        };
        let (session, epoch) = (reply.session, reply.epoch);
        match self.transcript.seal(Role::Reply, &Message::Reply(Box::new(reply))) {
            Ok(frame) => {
                let Self { transcript, hello } = self;
                Ok((AwaitReady { transcript, hello, session, epoch, agreed, chosen }, frame))
            }
            Err(e) => Err(self.transcript.fail(Role::Reply, e.into())),
        }
    }

    /// Says no; the frame tells the initiator why.
    pub fn refuse(mut self, refusal: Refusal) -> Option<Vec<u8>> {
        self.transcript.refuse(Role::Reply, refusal)
    }
}

impl AwaitReady {
    /// The initiator's HELLO.
    pub fn hello(&self) -> &Hello {
        &self.hello
    }

    /// Takes READY.
    ///
    /// # Errors
    /// Also the initiator's ERROR in its place.
    pub fn on_ready(mut self, body: &[u8]) -> Result<ReadyReceived, Failure> {
        let hash = self.transcript.hash();
        let checked = match self.transcript.open(Role::Ready, body) {
            Ok(Message::Ready(ready)) => self.check(&ready).map(|()| ready),
            Ok(other) => Err(HandshakeError::Unexpected { expected: "READY", got: other.name() }),
            Err(e) => Err(e),
        };
        match checked {
            Ok(ready) => {
                let identity = IdentityProof::new(hash, ready.identity);
                let Self { transcript, hello, agreed, .. } = self;
                Ok(ReadyReceived { transcript, hello, ready, identity, agreed, hash })
            }
            Err(cause) => Err(self.transcript.fail(Role::Accept, cause)),
        }
    }

    fn check(&self, ready: &Ready) -> Result<(), HandshakeError> {
        same("READY", "attempt", self.hello.attempt, ready.attempt)?;
        same("READY", "session", self.session.0, ready.session.0)?;
        same("READY", "epoch", self.epoch.0, ready.epoch.0)
    }
}

impl ReadyReceived {
    /// Whether READY proves that the initiator was in the epoch that gave this token.
    #[must_use]
    pub fn proves_resume(&self, token: &ResumeToken) -> bool {
        self.ready.resume.is_some_and(|tag| resume_proves(token, &self.hash, &tag))
    }

    /// Makes the ACCEPT frame, once the endpoints are connected; `resume_token` is fresh and random.
    ///
    /// # Errors
    /// Never in practice: ACCEPT has a fixed size.
    pub fn accept(mut self, resume_token: ResumeToken) -> Result<(Established, Vec<u8>), FrameError> {
        let accept = Accept {
            attempt: self.ready.attempt,
            session: self.ready.session,
            epoch: self.ready.epoch,
            resume_token: resume_token.clone(),
        };
        let frame = self.transcript.seal(Role::Accept, &Message::Accept(accept))?;
        let established = Established {
            peer: self.hello.instance,
            peer_name: self.hello.name,
            session: self.ready.session,
            epoch: self.ready.epoch,
            resumed: self.hello.session == Some(self.ready.session),
            resume_token,
            lifeline: self.transcript.lifeline(false),
        };
        Ok((established, frame))
    }

    /// Says no; the frame tells the initiator why.
    pub fn refuse(mut self, refusal: Refusal) -> Option<Vec<u8>> {
        self.transcript.refuse(Role::Accept, refusal)
    }
}

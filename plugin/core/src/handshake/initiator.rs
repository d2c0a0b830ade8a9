//! The side that connects.

use super::transcript::{Role, Transcript, identity_tag, resume_tag};
use super::{Established, Failure, HandshakeError};
use crate::epoch::next_epoch;
use crate::wire::{
    Agreed, ErrorCode, FabricOffer, FrameError, Hello, Message, Ready, Refusal, Reply, ResumeToken,
    SessionKey, negotiate,
};

/// Start of an attempt.
#[derive(Debug)]
pub struct Initiator;

/// HELLO is on its way.
#[derive(Debug)]
pub struct AwaitReply {
    transcript: Transcript,
    hello: Hello,
}

/// The listener answered; the endpoints can be connected.
#[derive(Debug)]
pub struct ReplyReceived {
    transcript: Transcript,
    hello: Hello,
    /// The answer.
    pub reply: Reply,
    /// What both offers agree on.
    pub agreed: Agreed,
    /// Index of the chosen fabric in HELLO's offers.
    pub chosen: usize,
}

/// READY is on its way.
#[derive(Debug)]
pub struct AwaitAccept {
    transcript: Transcript,
    hello: Hello,
    reply: Reply,
}

impl Initiator {
    /// Makes the HELLO frame; `listener_key` is from the peer's connection information.
    ///
    /// # Errors
    /// HELLO is longer than a frame may be.
    pub fn start(listener_key: SessionKey, hello: Hello) -> Result<(AwaitReply, Vec<u8>), FrameError> {
        let mut transcript = Transcript::new(listener_key);
        let frame = transcript.seal(Role::Hello, &Message::Hello(Box::new(hello.clone())))?;
        Ok((AwaitReply { transcript, hello }, frame))
    }
}

impl AwaitReply {
    /// Takes the answer to HELLO.
    ///
    /// # Errors
    /// Also the peer's refusal.
    pub fn on_reply(mut self, body: &[u8]) -> Result<ReplyReceived, Failure> {
        let checked = match self.transcript.open(Role::Reply, body) {
            Ok(Message::Reply(reply)) => {
                check_reply(&self.hello, &reply).map(|(agreed, chosen)| (*reply, agreed, chosen))
            }
            Ok(other) => Err(HandshakeError::Unexpected { expected: "REPLY", got: other.name() }),
            Err(e) => Err(e),
        };
        match checked {
            Ok((reply, agreed, chosen)) => {
                Ok(ReplyReceived { transcript: self.transcript, hello: self.hello, reply, agreed, chosen })
            }
            Err(cause) => Err(self.transcript.fail(Role::Ready, cause)),
        }
    }
}

impl ReplyReceived {
    /// Makes the READY frame, once the endpoints are connected. `own_key` proves who this is; `resume` is the token of
    /// the last epoch with that peer, if there was one.
    ///
    /// # Errors
    /// Never in practice: READY has a fixed size.
    pub fn ready(
        mut self,
        own_key: &SessionKey,
        resume: Option<&ResumeToken>,
    ) -> Result<(AwaitAccept, Vec<u8>), FrameError> {
        let hash = self.transcript.hash();
        let ready = Ready {
            attempt: self.hello.attempt,
            session: self.reply.session,
            epoch: self.reply.epoch,
            identity: identity_tag(own_key, &hash),
            resume: resume.map(|token| resume_tag(token, &hash)),
        };
        let frame = self.transcript.seal(Role::Ready, &Message::Ready(ready))?;
        Ok((AwaitAccept { transcript: self.transcript, hello: self.hello, reply: self.reply }, frame))
    }

    /// Gives up instead; the frame tells the listener why.
    pub fn refuse(mut self, code: ErrorCode, text: impl Into<String>) -> Option<Vec<u8>> {
        self.transcript.refuse(Role::Ready, Refusal::new(code, text))
    }
}

impl AwaitAccept {
    /// Takes the answer to READY.
    ///
    /// # Errors
    /// Also the peer's refusal.
    pub fn on_accept(mut self, body: &[u8]) -> Result<Established, HandshakeError> {
        let accept = match self.transcript.open(Role::Accept, body)? {
            Message::Accept(accept) => accept,
            other => return Err(HandshakeError::Unexpected { expected: "ACCEPT", got: other.name() }),
        };
        same("ACCEPT", "attempt", self.hello.attempt, accept.attempt)?;
        same("ACCEPT", "session", self.reply.session.0, accept.session.0)?;
        same("ACCEPT", "epoch", self.reply.epoch.0, accept.epoch.0)?;
        Ok(Established {
            peer: self.reply.instance,
            peer_name: self.reply.name,
            session: accept.session,
            epoch: accept.epoch,
            resumed: self.hello.session == Some(accept.session),
            resume_token: accept.resume_token,
            lifeline: self.transcript.lifeline(true),
        })
    }
}

fn check_reply(hello: &Hello, reply: &Reply) -> Result<(Agreed, usize), HandshakeError> {
    if reply.instance != hello.to_instance {
        return Err(HandshakeError::WrongInstance { expected: hello.to_instance, got: reply.instance });
    }
    same("REPLY", "attempt", hello.attempt, reply.attempt)?;
    if !(hello.protocol.min..=hello.protocol.max).contains(&reply.protocol) {
        let expected = format!("{}..={}", hello.protocol.min, hello.protocol.max);
        return Err(mismatch("REPLY", "protocol", expected, reply.protocol));
    }
    let last = hello.last_epoch.max(reply.last_epoch);
    let epoch = next_epoch(hello.last_epoch, reply.last_epoch).ok_or(HandshakeError::EpochsUsedUp(last))?;
    same("REPLY", "epoch", epoch.0, reply.epoch.0)?;
    choice(hello, &reply.offer)
}

/// What the listener chose of HELLO: an offered fabric with offered backends only. Both sides look at it alike.
pub(super) fn choice(hello: &Hello, answer: &FabricOffer) -> Result<(Agreed, usize), HandshakeError> {
    let offered = hello.offers.iter().enumerate().find(|(_, offer)| offer.fabric == answer.fabric);
    let Some((chosen, offer)) = offered else {
        let names: Vec<_> = hello.offers.iter().map(|offer| offer.fabric.as_str()).collect();
        return Err(mismatch("REPLY", "offer.fabric", names.join(" or "), &answer.fabric));
    };
    let (asked, got) = (offer.backends(), answer.backends());
    let unasked = [
        (got.one_sided && !asked.one_sided, "offer.one_sided"),
        (got.two_sided && !asked.two_sided, "offer.two_sided"),
    ];
    if let Some((_, field)) = unasked.into_iter().find(|(unasked, _)| *unasked) {
        return Err(mismatch("REPLY", field, "nothing, as in HELLO", "an offer"));
    }
    let agreed = negotiate(offer, answer).map_err(|e| mismatch("REPLY", "offer", asked, e))?;
    Ok((agreed, chosen))
}

pub(super) fn same<T: PartialEq + ToString>(
    message: &'static str,
    field: &'static str,
    expected: T,
    got: T,
) -> Result<(), HandshakeError> {
    if expected == got { Ok(()) } else { Err(mismatch(message, field, expected, got)) }
}

fn mismatch(
    message: &'static str,
    field: &'static str,
    expected: impl ToString,
    got: impl ToString,
) -> HandshakeError {
    HandshakeError::Mismatch { message, field, expected: expected.to_string(), got: got.to_string() }
}

//! The two-sided path of a peer's channel, and what is left of it between two epochs.

use baton_core::Nanos;
use baton_core::notify::{Body, BodyFlags, Carry, ID_BYTES, MAX_MESSAGE_BYTES, Tell};
use baton_core::two_sided::channel::{Abandoned, Durable, TwoClosed};
use baton_core::two_sided::chunks::CutError;
use baton_core::two_sided::codec::{Direction, Status};
use baton_core::two_sided::notes::Resolve;
use baton_core::two_sided::pool::{PeerKey, SlotId};
use baton_core::two_sided::report::{TwoCancel, TwoEnd, TwoSubmitError, XferFailure};
use baton_fabric::Op;

use super::Executor;
use crate::error::{Code, Error, Result};
use crate::peer::check_message;
use crate::transfer::Xfer;

/// Longest message of a notification on the wire: flags and an id in front of the host's.
pub(crate) const MAX_BODY_BYTES: u32 = MAX_MESSAGE_BYTES + 1 + ID_BYTES as u32;

/// Bulk data by SEND and RECV.
pub(crate) struct TwoSided {
    pub exec: Executor,
    /// As which the engine's pool knows it.
    pub borrower: PeerKey,
    /// Rails of each lane, here and at the peer; for the statistics.
    pub rails: Vec<[u8; 2]>,
    /// Slots of lanes that the peer does not have; they come back with the endpoints.
    unused: Vec<SlotId>,
    /// Notifications handed over so far.
    notes: u64,
}

impl TwoSided {
    /// A path that begins. What was cancelled between two epochs is cancelled now.
    pub fn new(exec: Executor, borrower: PeerKey, unused: Vec<SlotId>, rest: &mut Rest) -> TwoSided {
        let mut path = TwoSided { exec, borrower, rails: Vec::new(), unused, notes: 0 };
        for token in std::mem::take(&mut rest.cancelled) {
            path.cancel(token);
        }
        path
    }

    /// Takes over the notifications that waited for a session; how many it could not take, which are lost.
    pub fn take_over(&mut self, carry: &mut Carry) -> u64 {
        let mut lost = 0;
        for waiting in carry.drain() {
            let body = seal(Tell::message(Some(&waiting.message)));
            self.notes += 1;
            if let Err(e) = self.exec.channel.adopt(self.notes, &body, Resolve::Taken, Nanos(u64::MAX)) {
                tracing::error!("a notification of {} bytes is lost: {e}", waiting.message.len());
                lost += 1;
            }
        }
        lost
    }

    /// Takes a begun transfer over.
    pub fn submit(&mut self, now: Nanos, token: u64, xfer: &Xfer, tell: Tell<'_>) -> Result<()> {
        let direction = match xfer.op {
            Op::Write => Direction::Write,
            Op::Read => Direction::Read,
        };
        check_message(tell.message_len())?;
        xfer.refuse_vram()?;
        let body = (!tell.is_nothing()).then(|| seal(tell));
        let pieces = xfer.pieces()?;
        let taken = self.exec.channel.submit(now, token, direction, pieces, body.as_deref());
        taken.map_err(submit_error)
    }

    /// Takes a standalone notification over.
    pub fn notify(&mut self, message: &[u8], deadline: Nanos) -> Result<()> {
        check_message(message.len())?;
        let body = seal(Tell::message(Some(message)));
        self.notes += 1;
        self.exec.channel.notify(self.notes, &body, Resolve::Taken, deadline).map_err(submit_error)
    }

    /// Ends it, after its endpoints were destroyed and its events taken.
    pub fn close(self, now: Nanos) -> ClosedPath {
        let bounce = self.exec.bounce();
        let TwoClosed { durable, done, .. } = self.exec.close(now);
        let mut bounce = bounce.lock();
        self.unused.into_iter().for_each(|slot| bounce.pool.flushed(slot));
        ClosedPath { borrower: self.borrower, durable, done }
    }

    /// `false`: it has no such transfer.
    pub fn cancel(&mut self, token: u64) -> bool {
        self.exec.channel.cancel(token) != TwoCancel::NotFound
    }
}

/// What is left of a path.
pub(crate) struct ClosedPath {
    pub borrower: PeerKey,
    pub durable: Durable,
    /// Transfers that had only waited for their completions.
    pub done: Vec<(u64, std::result::Result<(), XferFailure>)>,
}

/// What outlives an epoch.
#[derive(Default)]
pub(crate) struct Rest {
    durable: Option<Durable>,
    /// Tokens of transfers that were given up since.
    pub cancelled: Vec<u64>,
}

impl Rest {
    /// Keeps what an epoch left.
    pub fn keep(&mut self, durable: Durable) {
        self.durable = Some(durable);
    }

    /// Something of it has to go to the peer.
    pub fn waits(&self) -> bool {
        self.durable.as_ref().is_some_and(|durable| !durable.is_idle())
    }

    /// Transfers wait for the session to be resumed.
    pub fn has_transfers(&self) -> bool {
        self.durable.as_ref().is_some_and(|durable| durable.transfers() > 0)
    }

    /// Fails them; the session may still be resumed.
    pub fn fail_transfers(&mut self, why: &TwoEnd) -> Vec<(u64, XferFailure)> {
        self.cancelled.clear();
        self.durable.as_mut().map(|durable| durable.fail_transfers(why)).unwrap_or_default()
    }

    /// What there is to go on with, if it fits.
    pub fn take_if(&mut self, fits: impl FnOnce(&Durable) -> bool) -> Option<Durable> {
        self.durable.take_if(|durable| fits(durable))
    }

    /// The session is not resumed.
    pub fn abandon(&mut self, reason: &TwoEnd) -> Option<Abandoned> {
        self.cancelled.clear();
        self.durable.take().map(|durable| durable.abandon(reason))
    }

    /// The host took messages of an earlier epoch.
    pub fn on_popped(&mut self, count: u64, bytes: u64) {
        if let Some(durable) = &mut self.durable {
            durable.on_popped(count, bytes);
        }
    }
}

/// `flags u8 | body` as in a record ([`baton_core::notify::Body`]).
fn seal(tell: Tell<'_>) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(1 + tell.body_len());
    bytes.push(tell.flags().bits() as u8);
    tell.encode(&mut bytes);
    bytes
}

/// What lay in a notification; `None`: it cannot be.
pub(crate) fn unseal(mut bytes: Vec<u8>) -> Option<Body> {
    let bits = u16::from(*bytes.first()?);
    bytes.remove(0);
    let flags = BodyFlags::of_bits(bits, bytes.len() as u32)?;
    Some(Body { flags, bytes })
}

/// The host's message in one that the peer has not acknowledged.
pub(crate) fn message_of(bytes: Vec<u8>) -> Option<Vec<u8>> {
    unseal(bytes).and_then(|body| body.open().1)
}

fn submit_error(e: TwoSubmitError) -> Error {
    let code = match &e {
        TwoSubmitError::Ended => Code::RemoteDisconnect,
        TwoSubmitError::TooMany { .. }
        | TwoSubmitError::TooManyBytes { .. }
        | TwoSubmitError::MessageTooLong { .. } => Code::Limit,
        TwoSubmitError::Token(_) => Code::Local,
        TwoSubmitError::Cut(CutError::Span { .. }) => Code::InvalidParam,
        TwoSubmitError::Cut(_) => Code::Limit,
    };
    Error::new(code, e.to_string())
}

/// What the host hears of a transfer that failed.
pub(crate) fn failure_code(failure: &XferFailure) -> Code {
    match failure {
        XferFailure::Canceled => Code::Canceled,
        XferFailure::Waited { .. } => Code::Timeout,
        XferFailure::CopyFailed { .. } => Code::Local,
        XferFailure::Ended(_) => Code::RemoteDisconnect,
        XferFailure::Refused { status, .. } => match status {
            Status::NoRegion | Status::StaleRegion => Code::NotFound,
            Status::Range | Status::Permission => Code::InvalidParam,
            Status::TooMany => Code::Limit,
            Status::Timeout => Code::Timeout,
            _ => Code::RemoteDisconnect,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told_survives_the_way_and_a_forged_body_is_none() {
        for tell in [
            Tell::message(Some(b"m")),
            Tell::message(Some(b"")),
            Tell { message: Some(b"m"), id: Some(7) },
            Tell { message: None, id: Some(8) },
        ] {
            let (id, message) = unseal(seal(tell)).expect("it was made here").open();
            assert_eq!((id, message.as_deref()), (tell.id, tell.message));
        }
        for forged in [&b""[..], b"\x01short", b"\x02", b"\x03 longer than an id", b"\x04", b"\xff"] {
            assert!(unseal(forged.to_vec()).is_none(), "{forged:?}");
        }
    }
}

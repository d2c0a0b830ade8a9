//! What a listener answers: the rules about restarts, open sessions and both sides connecting at once, as pure functions.

use super::listener::restarted;
use crate::ids::{Epoch, Instance, SessionId};
use crate::wire::{ErrorCode, Hello, ProtocolRange, Refusal};

/// What a listener has with the instance that connects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LocalState {
    /// Nothing under way (also while backing off).
    Idle,
    /// An attempt of our own.
    Connecting,
    /// A session in use.
    Open {
        /// Which.
        session: SessionId,
        /// Its generation.
        epoch: Epoch,
        /// Its lifeline has not ended.
        lifeline_up: bool,
    },
    /// A session whose epoch is being ended.
    Draining {
        /// Which.
        session: SessionId,
        /// Its generation.
        epoch: Epoch,
    },
}

/// What is known of the initiator's identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Proof {
    /// Its connection information is not loaded: accepted, for inbound work only.
    Unknown,
    /// READY's proof fits its connection information.
    Verified,
    /// It does not.
    Wrong,
}

/// What to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// To HELLO: make endpoints and send REPLY. Nothing else changes.
    Proceed,
    /// To READY: send ACCEPT.
    Accept,
    /// To READY: drop our own attempt, whatever becomes of it, and send ACCEPT.
    AcceptAndYield,
    /// To READY: the peer lost this epoch; end it here in the proper order, then decide anew.
    DrainThenAccept(Epoch),
    /// Send ERROR.
    Refuse(Refusal),
}

/// The answer to HELLO of `hello.instance`, with which there is `state`.
pub fn decide_hello(own: Instance, state: LocalState, hello: &Hello) -> Decision {
    if hello.to_instance != own {
        return Decision::Refuse(restarted(own, hello.to_instance));
    }
    if hello.instance == own {
        let text = "an engine needs no session with itself";
        return Decision::Refuse(Refusal::new(ErrorCode::Malformed, text));
    }
    if hello.protocol.newest_common(ProtocolRange::OURS).is_none() {
        let (ours, theirs) = (ProtocolRange::OURS, hello.protocol);
        let text = format!(
            "no common protocol version: {}..={} here, {}..={} there",
            ours.min, ours.max, theirs.min, theirs.max
        );
        return Decision::Refuse(Refusal::new(ErrorCode::Protocol, text));
    }
    match state {
        LocalState::Connecting if own < hello.instance => Decision::Refuse(glare(own)),
        LocalState::Open { session, epoch, .. } if hello.last_epoch < epoch.0 => {
            Decision::Refuse(already_open(session, epoch, "the attempt does not know this epoch"))
        }
        _ => Decision::Proceed,
    }
}

/// The answer to a genuine READY for `agreed`, the epoch that REPLY named. The state may have changed since HELLO.
///
/// `last_epoch` is the highest epoch ever opened with that instance; `resume_proven`: READY proves to come from a party
/// of the epoch that is open.
pub fn decide_ready(
    own: Instance,
    state: LocalState,
    last_epoch: u32,
    hello: &Hello,
    agreed: Epoch,
    proof: Proof,
    resume_proven: bool,
) -> Decision {
    if proof == Proof::Wrong {
        let text = format!(
            "READY does not prove to be instance {}: its session key differs from the one loaded here",
            hello.instance
        );
        return Decision::Refuse(Refusal::new(ErrorCode::BadIdentity, text));
    }
    if let refusal @ Decision::Refuse(_) = decide_hello(own, state, hello) {
        return refusal;
    }
    match state {
        LocalState::Open { session, epoch, lifeline_up: true } if !resume_proven => {
            let why = "replacing it needs proof of having been in it, or the end of its lifeline";
            Decision::Refuse(already_open(session, epoch, why))
        }
        _ if agreed.0 <= last_epoch => Decision::Refuse(Refusal {
            epoch: (last_epoch > 0).then_some(Epoch(last_epoch)),
            ..Refusal::new(ErrorCode::Busy, format!("epoch {last_epoch} came in between; try again"))
        }),
        LocalState::Idle => Decision::Accept,
        LocalState::Connecting => Decision::AcceptAndYield,
        LocalState::Open { epoch, .. } | LocalState::Draining { epoch, .. } => {
            Decision::DrainThenAccept(epoch)
        }
    }
}

fn glare(own: Instance) -> Refusal {
    let text = format!("instance {own} is connecting to you at this moment; that attempt goes first");
    Refusal::new(ErrorCode::GlareWait, text)
}

fn already_open(session: SessionId, epoch: Epoch, why: &str) -> Refusal {
    let text = format!("the session is open in epoch {}: {why}", epoch.0);
    Refusal { code: ErrorCode::AlreadyOpen, text, session: Some(session), epoch: Some(epoch) }
}

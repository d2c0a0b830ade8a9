//! The channel of a peer: everything of one epoch. It has a one-sided path, a two-sided one, or both.

use crate::err;
use crate::error::{Code, Result};
use crate::lane_map::LaneMap;
use crate::lifeline::LifelineHandle;
use crate::memory::EpochMemory;
use crate::names::HeldName;
use crate::peer::submit_error;
use crate::transfer::Xfer;
use crate::two_sided::TwoSided;
use baton_core::handshake::IdentityProof;
use baton_core::notify::Tell;
use baton_core::peer::{CancelOutcome, EndReason, Session};
use baton_core::{Epoch, Nanos, SessionId};
use baton_fabric::{Completion, EndpointId, Fabric};
use std::sync::Arc;

/// Everything of one epoch.
pub(crate) struct Channel {
    pub fabric: Arc<dyn Fabric>,
    pub fabric_index: usize,
    /// At least one of the paths is there.
    pub one_sided: Option<OneSided>,
    pub two_sided: Option<TwoSided>,
    /// Its fabric takes no transfers.
    pub notify_only: bool,
    /// Of all paths.
    pub endpoints: Vec<EndpointId>,
    pub lifeline: Option<LifelineHandle>,
    pub epoch: Epoch,
    pub session_id: SessionId,
    /// We know that the peer is who its connection information says.
    pub verified: bool,
    /// What the listener kept to verify the initiator once its connection information arrives.
    pub identity: Option<IdentityProof>,
    /// The peer's name, until the end begins.
    pub held_name: Option<HeldName>,
    /// When its end began.
    pub ending_since: Nanos,
    /// Ending, and a thread is at it.
    pub has_janitor: bool,
    /// Why it is ending.
    pub reason: Option<EndReason>,
}

/// The path that reads and writes the peer's memory.
pub(crate) struct OneSided {
    pub session: Session,
    pub memory: Arc<EpochMemory>,
    pub lanes: Arc<LaneMap>,
    /// The fabric's ([`baton_fabric::Caps::pack_below_bytes`]).
    pub pack_below_bytes: u32,
    /// Control, then the lanes.
    pub endpoints: Vec<EndpointId>,
}

/// Blocks from which packing pays: with 16 it is slower on soft-RoCE, with 32 as fast, with 64 faster.
const PACK_FROM: usize = 32;

/// Which path something went or came by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Path {
    OneSided,
    TwoSided,
}

impl Channel {
    /// Whether what comes over it is said under that name.
    pub fn speaks_as(&self, name: &str) -> bool {
        self.held_name.as_ref().is_some_and(|held| held.name() == name)
    }

    /// Takes completions of one endpoint, most likely its `nth`, to the path that it belongs to. `false`: it has no such endpoint.
    pub fn on_completions(
        &mut self,
        now: Nanos,
        nth: usize,
        endpoint: EndpointId,
        completions: &[Completion],
    ) -> bool {
        let place = |among: &[EndpointId]| match among.get(nth) {
            Some(at) if *at == endpoint => Some(nth),
            _ => among.iter().position(|other| *other == endpoint),
        };
        if let Some(one) = &mut self.one_sided
            && let Some(nth) = place(&one.endpoints)
        {
            let OneSided { session, memory, .. } = one;
            completions.iter().for_each(|done| session.on_completion_of(now, nth, done, &**memory));
            return true;
        }
        if !self.endpoints.contains(&endpoint) {
            return false;
        }
        if let Some(two) = &mut self.two_sided {
            two.exec.on_completions(now, completions);
        }
        true
    }

    /// Takes a begun transfer over. Where both paths are there the one-sided one has it, which copies least, unless memory of the
    /// transfer has no key on this fabric, or it is many small blocks on one where packing pays.
    pub fn submit(&mut self, now: Nanos, token: u64, xfer: &Xfer, tell: Tell<'_>) -> Result<()> {
        if self.refuses(xfer) {
            return Err(err!(
                RemoteDisconnect,
                "the session is over fabric {}, which takes nothing but notifications (BATON_OOB_FALLBACK), because no other reaches \
                 the peer",
                self.fabric.name()
            ));
        }
        if self.packs(xfer)
            && let Some(two) = &mut self.two_sided
        {
            return two.submit(now, token, xfer, tell);
        }
        let prepared = self.one_sided.as_ref().map(|one| one.lanes.prepare(xfer));
        match (prepared, &mut self.one_sided, &mut self.two_sided) {
            (Some(Ok(work)), Some(one), _) => {
                one.session.submit_telling(now, token, work, tell).map_err(submit_error)
            }
            (Some(Err(why)), _, Some(two)) if why.code == Code::Unsupported => {
                two.submit(now, token, xfer, tell).map_err(|e| match e.code {
                    // Neither path takes it: what the first one lacks is what helps.
                    Code::Unsupported => why,
                    _ => e,
                })
            }
            (Some(Err(why)), _, _) => Err(why),
            (_, _, Some(two)) => two.submit(now, token, xfer, tell),
            _ => unreachable!("a channel has a path"),
        }
    }

    /// Whether it has bytes to move, and the fabric is only there for notifications.
    pub fn refuses(&self, xfer: &Xfer) -> bool {
        self.notify_only && xfer.plan.piece_count() > 0
    }

    fn packs(&self, xfer: &Xfer) -> bool {
        let Some(one) = &self.one_sided else { return false };
        let (count, longest) = (xfer.plan.piece_count(), xfer.plan.longest_bytes());
        let worth = count >= PACK_FROM && longest <= u64::from(one.pack_below_bytes);
        worth && self.two_sided.is_some() && xfer.refuse_vram().is_ok()
    }

    /// Gives a transfer up on whichever path it is.
    pub fn cancel(&mut self, token: u64) {
        let mut known = false;
        if let Some(one) = &mut self.one_sided {
            known = !matches!(one.session.cancel(token), CancelOutcome::NotFound);
        }
        if let Some(two) = &mut self.two_sided
            && !known
        {
            known = two.cancel(token);
        }
        debug_assert!(known, "a token in flight is known to a path of its channel");
    }

    /// Takes a standalone notification over.
    pub fn notify(&mut self, now: Nanos, message: &[u8]) -> Result<()> {
        // A peer that does not pop holds its notifications back, it does not lose them: deadlines are for the time without a session.
        let none = Nanos(u64::MAX);
        match (&mut self.one_sided, &mut self.two_sided) {
            (Some(one), _) => one.session.notify(now, message, none).map(drop).map_err(submit_error),
            (None, Some(two)) => two.notify(message, none),
            (None, None) => unreachable!("a channel has a path"),
        }
    }

    /// Before the engine sleeps the two-sided path tells what the peer may wait for. The one-sided path has told it.
    pub fn flush_credit(&mut self) {
        if let Some(two) = &mut self.two_sided {
            two.exec.channel.flush();
        }
    }

    /// Looks at the credit that the peer may have written.
    pub fn poll_credit(&mut self, now: Nanos) {
        if let Some(one) = &mut self.one_sided {
            one.session.poll_credit(now, &*one.memory);
        }
        if let Some(two) = &mut self.two_sided {
            two.exec.poll_credit();
        }
    }

    /// Whether it waits for credit, of which no completion tells.
    pub fn waits_for_credit(&self) -> bool {
        self.one_sided.as_ref().is_some_and(|one| one.session.waits_for_credit())
            || self.two_sided.as_ref().is_some_and(|two| two.exec.channel.waits_for_credit())
    }

    /// When [`Channel::on_timeout`] is due.
    pub fn next_timeout(&self) -> Option<Nanos> {
        let one = self.one_sided.as_ref().and_then(|one| one.session.next_timeout());
        let two = self.two_sided.as_ref().and_then(|two| two.exec.channel.next_timeout());
        one.into_iter().chain(two).min()
    }

    /// Deadlines, as far as they have come.
    pub fn on_timeout(&mut self, now: Nanos) {
        let due = |at: Option<Nanos>| at.is_some_and(|at| at <= now);
        if let Some(one) = &mut self.one_sided
            && due(one.session.next_timeout())
        {
            one.session.on_timeout(now);
        }
        if let Some(two) = &mut self.two_sided
            && due(two.exec.channel.next_timeout())
        {
            two.exec.on_timeout(now);
        }
    }
}

//! What `stats` tells about a channel.

use serde::Serialize;

use super::{Channel, GATHERS};
use crate::two_sided::report::TwoCounters;

/// Waiters told at most.
const WAITERS: usize = 64;

/// A lane in numbers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[allow(missing_docs)]
pub struct LaneStats {
    pub known: u64,
    pub consumed: u64,
    pub granted: u64,
    pub announced: u64,
    pub received: u64,
    pub posted_recvs: u32,
    pub target: u32,
    pub in_flight: u32,
}

/// A channel in numbers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[allow(missing_docs)]
pub struct TwoStats {
    pub epoch: u32,
    pub ended: Option<String>,
    pub counters: TwoCounters,
    pub lanes: Vec<LaneStats>,
    pub control_known: u64,
    pub control_consumed: u64,
    pub control_granted: u64,
    pub control_received: u64,
    pub request_known: u64,
    pub request_consumed: u64,
    pub request_granted: u64,
    pub request_floor: u64,
    pub transfers: u32,
    pub peer_transfers: u32,
    pub inbox_bytes: u64,
    pub notes_waiting: u32,
    pub note_duplicates: u64,
    pub note_orphans: u64,
    pub withholding: bool,
    pub send_slots: u32,
    pub gathers: u32,
    pub copies: u32,
    /// Token, what it waits for, since when.
    pub waiters: Vec<(u64, String, u64)>,
}

impl Channel {
    /// Where it stands, and what everything that waits waits for.
    pub fn stats(&self) -> TwoStats {
        let (inbox, outbox) = (&self.durable.inbox, &self.durable.outbox);
        let lane = |lane: &super::LanePort| LaneStats {
            known: lane.credit.known(),
            consumed: lane.credit.consumed(),
            granted: lane.recv.granted(),
            announced: lane.recv.announced(),
            received: lane.recv.received(),
            posted_recvs: lane.outstanding(),
            target: lane.target,
            in_flight: lane.ledger.in_flight(),
        };
        let waiters = outbox.live().take(WAITERS);
        TwoStats {
            epoch: self.setup.epoch.0,
            ended: self.ended.as_ref().map(ToString::to_string),
            counters: self.counters,
            lanes: self.lanes.iter().map(lane).collect(),
            control_known: self.control.credit.known(),
            control_consumed: self.control.credit.consumed(),
            control_granted: self.control.recv.granted(),
            control_received: self.control.recv.received(),
            request_known: self.request.known(),
            request_consumed: self.request.consumed(),
            request_granted: inbox.granted(),
            request_floor: inbox.floor(),
            transfers: outbox.len() as u32,
            peer_transfers: inbox.len() as u32,
            inbox_bytes: inbox.state_bytes() as u64,
            notes_waiting: self.durable.notes_out.waiting() as u32,
            note_duplicates: self.durable.notes_in.duplicates,
            note_orphans: self.durable.notes_in.orphans,
            withholding: self.durable.notes_in.withholds(),
            send_slots: self.sending,
            gathers: GATHERS - self.prefixes.len() as u32,
            copies: self.copies,
            waiters: waiters.map(|(at, out)| (out.token, self.why_it_waits(at), out.since.0)).collect(),
        }
    }
}

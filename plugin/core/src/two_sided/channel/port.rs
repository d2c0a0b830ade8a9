//! Endpoints of a channel.

use std::collections::VecDeque;

use baton_fabric::EndpointId;

use crate::credit::{RecvCredit, SendCredit};
use crate::ids::{LaneId, Nanos};
use crate::ledger::Ledger;
use crate::two_sided::outbox::Flow;
use crate::two_sided::pool::SlotId;
use crate::two_sided::setup::{Source, TwoLane, TwoLimits, TwoSetup};

/// Entries of the control send queue that are credit's alone.
pub(super) const CREDIT_ENTRIES: u32 = 8;

/// What a work request in flight is. All are signaled.
#[derive(Debug)]
pub(super) enum Cargo {
    Credit,
    Frame,
    /// The last frame of a notification.
    Note {
        seq: u64,
    },
    Nop,
    Data {
        flows: Flows,
        source: Source,
        len_bytes: u32,
    },
}

/// What a data message belongs to: nearly always one transfer, and then nothing is allocated for it.
#[derive(Debug)]
pub(super) enum Flows {
    One(Flow),
    Many(Vec<Flow>),
}

impl Flows {
    pub(super) fn push(flows: Option<Flows>, flow: Flow) -> Flows {
        match flows {
            None => Flows::One(flow),
            Some(Flows::One(first)) => Flows::Many(vec![first, flow]),
            Some(Flows::Many(mut all)) => {
                all.push(flow);
                Flows::Many(all)
            }
        }
    }

    pub(super) fn as_slice(&self) -> &[Flow] {
        match self {
            Flows::One(flow) => std::slice::from_ref(flow),
            Flows::Many(all) => all,
        }
    }
}

#[derive(Debug)]
pub(super) struct ControlPort {
    pub(super) endpoint: EndpointId,
    pub(super) ledger: Ledger,
    pub(super) flights: VecDeque<Cargo>,
    pub(super) credit_in_flight: u32,
    pub(super) credit: SendCredit,
    pub(super) recv: RecvCredit,
    pub(super) depth: u32,
    /// Last frame sent, last received, last of ours that the peer has.
    pub(super) sent: u64,
    pub(super) received: u64,
    pub(super) acked: u64,
}

impl ControlPort {
    pub(super) fn new(setup: &TwoSetup) -> ControlPort {
        let depth = setup.control_rq_depth;
        ControlPort {
            endpoint: setup.control,
            ledger: Ledger::new(setup.control_sq_depth),
            flights: VecDeque::with_capacity(setup.control_sq_depth as usize),
            credit_in_flight: 0,
            credit: SendCredit::new(depth.into()),
            recv: RecvCredit::new(depth.into()),
            depth,
            sent: 0,
            received: 0,
            acked: 0,
        }
    }

    fn credit_entries(&self) -> u32 {
        CREDIT_ENTRIES.min(self.ledger.depth() / 2)
    }

    /// Whether a frame fits and leaves credit its entries.
    pub(super) fn has_room(&self) -> bool {
        self.ledger.free() > self.credit_entries().saturating_sub(self.credit_in_flight)
    }

    pub(super) fn has_room_for_credit(&self) -> bool {
        self.credit_in_flight < self.credit_entries() && self.ledger.free() > 0
    }

    pub(super) fn post(&mut self, cargo: Cargo, bytes: usize) -> u64 {
        let reservation = self.ledger.reserve(1).expect("room was checked");
        self.flights.push_back(cargo);
        reservation.commit(bytes as u64, true)
    }
}

#[derive(Debug)]
pub(super) struct LanePort {
    pub(super) id: LaneId,
    pub(super) endpoint: EndpointId,
    pub(super) ledger: Ledger,
    pub(super) flights: VecDeque<Cargo>,
    /// Bytes of data in them.
    pub(super) flight_bytes: u64,
    pub(super) credit: SendCredit,
    /// Messages sent; the number of the next.
    pub(super) sent: u64,
    /// NOPs that the peer asked for.
    pub(super) burn: u32,
    pub(super) recv: RecvCredit,
    /// RECVs in order; the oldest is used next.
    pub(super) posted: VecDeque<SlotId>,
    /// Messages of this epoch received; the number of the next.
    pub(super) received: u64,
    pub(super) depth: u32,
    /// RECVs that should be posted.
    pub(super) target: u32,
    /// Received since the target was raised.
    pub(super) since_raise: u32,
    pub(super) last_data: Nanos,
    /// The pool had nothing; it is not asked again before something came back.
    pub(super) starved: bool,
    /// To be asked back, and when it was.
    pub(super) reclaim: u32,
    pub(super) reclaim_asked: Option<Nanos>,
    /// The pool has changed since it was looked whether RECVs should be asked back.
    pub(super) pool_changed: bool,
}

impl LanePort {
    pub(super) fn new(id: LaneId, lane: &TwoLane, limits: &TwoLimits, now: Nanos) -> LanePort {
        let depth = u64::from(lane.rq_depth);
        LanePort {
            id,
            endpoint: lane.endpoint,
            ledger: Ledger::new(lane.sq_depth),
            flights: VecDeque::with_capacity(lane.sq_depth as usize),
            flight_bytes: 0,
            credit: SendCredit::resumed(depth, lane.peer_posted.into(), 0),
            sent: 0,
            burn: 0,
            recv: RecvCredit::with_grant(depth, lane.posted.len() as u64),
            posted: lane.posted.iter().copied().collect(),
            received: 0,
            depth: lane.rq_depth,
            target: limits.idle_slots.clamp(1, lane.rq_depth).max(lane.posted.len() as u32),
            since_raise: 0,
            last_data: now,
            starved: false,
            reclaim: 0,
            reclaim_asked: None,
            pool_changed: false,
        }
    }

    /// RECVs posted and unused.
    pub(super) fn outstanding(&self) -> u32 {
        self.posted.len() as u32
    }

    pub(super) fn raise_target(&mut self, to: u32) {
        self.target = self.target.max(to).min(self.depth);
        self.since_raise = 0;
    }

    /// Worth posting again, or telling.
    pub(super) fn batch(&self) -> u32 {
        (self.target / 4).max(1)
    }

    pub(super) fn post(&mut self, cargo: Cargo, bytes: u64) -> u64 {
        self.credit.try_reserve(1).expect("credit was checked").commit();
        self.burn = self.burn.saturating_sub(1);
        self.sent += 1;
        let reservation = self.ledger.reserve(1).expect("room was checked");
        self.flights.push_back(cargo);
        self.flight_bytes += bytes;
        reservation.commit(bytes, true)
    }
}

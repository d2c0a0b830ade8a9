//! One endpoint of a session: its send queue, its credit in both directions and its rings.

use std::collections::VecDeque;

use baton_fabric::EndpointId;

use super::{LaneSetup, MIN_SQ_DEPTH, RingId};
use crate::credit::{CreditPage, CreditViolation, RecvCredit, SendCredit, WordOutcome};
use crate::ids::Epoch;
use crate::ledger::Ledger;
use crate::notify::{NotifyMode, Ring, SEND_HEADER_BYTES, Stage};
use crate::peer::SessionMemory;

/// Send-queue entries that data leaves to tails, so that a stream of data never starves them.
pub(crate) const TAIL_HEADROOM: u32 = 2;

/// A batch in flight.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Flight {
    pub(crate) first_seq: u64,
    pub(crate) last_seq: u64,
    pub(crate) bytes: u64,
    pub(crate) signaled: bool,
    /// Its last work request waits for the READs in front of it.
    pub(crate) fenced: bool,
    /// How far its completion frees the staging ring.
    pub(crate) stage_end: Option<u64>,
    pub(crate) what: Cargo,
}

/// What a batch carries.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Cargo {
    /// Work requests (and perhaps a tail) of a transfer.
    Transfer { xfer: u32, first_template: u32, templates: u32 },
    /// A standalone notification; they are acknowledged in order. `awaited`: it is a transfer that somebody waits for.
    Note { awaited: bool },
    /// A fragment of a standalone notification, not the last.
    NotePart,
    /// Credit words.
    Credit,
    /// The zero-length WRITE that retires leftovers.
    Leftover,
}

/// An endpoint.
#[derive(Debug)]
pub(crate) struct Port {
    pub(crate) ring_id: RingId,
    pub(crate) endpoint: EndpointId,
    pub(crate) ledger: Ledger,
    pub(crate) flights: VecDeque<Flight>,
    /// Transfers with data to post here, in turn.
    pub(crate) turns: VecDeque<u32>,
    pub(crate) recv_out: SendCredit,
    pub(crate) bytes_out: SendCredit,
    pub(crate) ring_out: Ring,
    pub(crate) peer_ring_addr: u64,
    pub(crate) peer_ring_key: u64,
    pub(crate) recv_in: RecvCredit,
    pub(crate) bytes_in: RecvCredit,
    pub(crate) ring_in: Ring,
    /// What is not inlined.
    pub(crate) stage: Stage,
    pub(crate) rq_depth: u32,
    notify: NotifyMode,
    inline_bytes: u32,
}

impl Port {
    pub(crate) fn new(ring_id: RingId, setup: &LaneSetup, notify: NotifyMode, inline_bytes: u32) -> Port {
        let LaneSetup { sq_depth, rq_depth, ring_bytes, .. } = *setup;
        assert!(sq_depth >= MIN_SQ_DEPTH, "a send queue of {sq_depth} on {ring_id:?}");
        assert!(rq_depth >= 1, "no RECV on {ring_id:?}");
        let ring = Ring::new(ring_bytes);
        Port {
            ring_id,
            endpoint: setup.endpoint,
            ledger: Ledger::new(sq_depth),
            // A flight holds at least one entry of the send queue, so this never grows.
            flights: VecDeque::with_capacity(sq_depth as usize),
            turns: VecDeque::with_capacity(64),
            recv_out: SendCredit::new(u64::from(rq_depth)),
            bytes_out: SendCredit::new(u64::from(ring_bytes)),
            ring_out: ring,
            peer_ring_addr: setup.peer_ring_addr,
            peer_ring_key: setup.peer_ring_key,
            recv_in: RecvCredit::new(u64::from(rq_depth)),
            bytes_in: RecvCredit::new(u64::from(ring_bytes)),
            ring_in: ring,
            stage: Stage::new(ring_bytes),
            rq_depth,
            notify,
            inline_bytes,
        }
    }

    /// Takes out the oldest batch that a completion of `seq` retires, and frees its staging room.
    pub(crate) fn take_flight(&mut self, seq: u64) -> Option<Flight> {
        if self.flights.front()?.last_seq > seq {
            return None;
        }
        let flight = self.flights.pop_front()?;
        if let Some(end) = flight.stage_end {
            self.stage.complete(end);
        }
        Some(flight)
    }

    /// Work requests of a slice at most.
    pub(crate) fn slice_wrs(&self, limit: u32) -> u32 {
        limit.min(self.ledger.depth() / 4).max(1)
    }

    /// Whether `n` work requests of data fit and leave room for tails.
    pub(crate) fn has_room_for_data(&self, n: u32) -> bool {
        self.ledger.free() >= n.saturating_add(TAIL_HEADROOM)
    }

    /// Whether a fenced work request is in flight.
    pub(crate) fn fence_in_flight(&self) -> bool {
        self.flights.iter().any(|flight| flight.fenced)
    }

    /// Whether a record of that length could go now, as far as credit is concerned.
    pub(crate) fn has_credit_for_record(&self, record_bytes: u32) -> bool {
        self.recv_out.available() >= 1
            // A SEND brings its record along: no ring bytes.
            && (self.notify == NotifyMode::Send
                || self.bytes_out.available() >= self.ring_out.place(record_bytes).charge)
    }

    /// Whether a record of that length (0: none, a tail) is inlined, or can be staged without harm to what has not completed.
    pub(crate) fn can_stage(&self, record_bytes: u32) -> bool {
        match self.notify {
            NotifyMode::Immediate => {
                let end = || self.ring_out.cursor() + self.ring_out.place(record_bytes).charge;
                record_bytes <= self.inline_bytes || self.stage.is_free_up_to(end())
            }
            NotifyMode::Send => {
                let payload_bytes = SEND_HEADER_BYTES as u32 + record_bytes;
                payload_bytes <= self.inline_bytes || self.stage.place(payload_bytes).is_some()
            }
        }
    }

    /// The RECV slot that the next receive completes: slots are used in the order in which they were posted.
    pub(crate) fn next_slot(&self) -> u64 {
        self.recv_in.received() % u64::from(self.rq_depth)
    }

    /// RECVs to post before it is worth telling. A peer that has none left and waits is owed all of them, so one half or the other
    /// of what it is owed (to be posted, to be told of) is worth it: it never waits for a sleeper.
    pub(crate) fn recv_threshold(&self) -> u64 {
        u64::from((self.rq_depth / 2).max(1))
    }

    /// Ring bytes to free before it is worth telling. A peer needs half a ring at most, a record of a quarter and as much skipped
    /// in front of it: it never waits for these.
    pub(crate) fn bytes_threshold(&self) -> u64 {
        u64::from(self.ring_in.size_bytes() / 4)
    }

    /// Whether the peer is owed so much of this endpoint's credit that telling it is worth a WRITE.
    pub(crate) fn owes_credit(&self) -> bool {
        self.recv_in.owed() >= self.recv_threshold() || self.bytes_in.unannounced() >= self.bytes_threshold()
    }

    /// Looks at both credit words of this endpoint.
    pub(crate) fn refresh_credit(
        &mut self,
        page: CreditPage,
        epoch: Epoch,
        mem: &dyn SessionMemory,
    ) -> Result<Refreshed, CreditViolation> {
        let recv = self.recv_out.on_word(mem.load_credit(page.recv_word(self.ring_id)), epoch)?;
        let bytes = self.bytes_out.on_word(mem.load_credit(page.ring_word(self.ring_id)), epoch)?;
        let count = |outcome| u64::from(recv == outcome) + u64::from(bytes == outcome);
        Ok(Refreshed { raised: count(WordOutcome::Raised) > 0, stale: count(WordOutcome::Stale) })
    }
}

/// What the credit words told.
pub(crate) struct Refreshed {
    pub(crate) raised: bool,
    pub(crate) stale: u64,
}

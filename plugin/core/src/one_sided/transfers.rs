//! The table of submitted transfers.

use std::ops::{Index, IndexMut};
use std::sync::Arc;

use crate::ids::{LaneId, Nanos};
use crate::notify::{BodyFlags, Tell};
use crate::peer::{EndReason, RingId, SubmitError, XferFailure};
use crate::prepared::Prepared;
use crate::sequence::MAX_INCOMPLETE;

/// Room made for the message of a transfer when its table entry is first used.
const MESSAGE_CAPACITY: usize = 512;

/// Longer buffers are not kept for the next transfer of the entry.
const MESSAGE_CAPACITY_KEPT: usize = 64 * 1024;

/// Where a transfer is. Everything else about it follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// The entry is unused.
    Free,
    /// Queued on the record's lane only, to be posted whole.
    Fresh,
    /// Data is left to be posted.
    Data,
    /// READ data is posted; the tail waits for all of it to arrive.
    Arriving,
    /// In the tail queue.
    Tail,
    /// Everything is posted.
    Posted,
    /// Canceled with batches in flight.
    Draining,
    /// A message without data, in the outbox.
    MessageOnly,
}

/// The part of a transfer on one lane: `next .. stop` is data to post, `stop .. end` is held back for the tail.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    pub(super) lane: LaneId,
    pub(super) next: u32,
    pub(super) stop: u32,
    pub(super) end: u32,
}

impl Part {
    pub(super) fn ring(&self) -> RingId {
        RingId::Lane(self.lane)
    }
}

/// A submitted transfer.
#[derive(Debug)]
pub(crate) struct Transfer {
    pub(crate) token: u64,
    pub(super) work: Option<Arc<Prepared>>,
    /// What its record brings.
    pub(super) body: Vec<u8>,
    pub(super) flags: BodyFlags,
    /// Bytes of the body that are posted as fragments.
    pub(super) sent: usize,
    /// Number of a message that needs fragments, once the first is posted.
    pub(super) fragment_key: u64,
    pub(super) notified: bool,
    pub(super) numbered: bool,
    /// An immediate alone tells it, on the only lane it has.
    pub(super) alone: bool,
    pub(crate) state: State,
    pub(super) parts: Vec<Part>,
    /// Parts with data left to post.
    pub(super) parts_left: u8,
    /// Batches in flight.
    pub(super) in_flight: u32,
    pub(crate) failure: Option<XferFailure>,
    pub(crate) since: Nanos,
}

impl Transfer {
    /// An immediate alone tells it, without a record.
    pub(super) fn tells_empty_message(&self) -> bool {
        self.notified && self.body.is_empty()
    }

    pub(super) fn work(&self) -> &Prepared {
        self.work.as_deref().expect("a transfer with data has work")
    }
}

/// Table of transfers; entries and their buffers are reused, so a repost allocates nothing.
#[derive(Debug)]
pub(crate) struct Transfers {
    slab: Vec<Transfer>,
    free: Vec<u32>,
    limit: u32,
    /// Of the messages of all in the table.
    body_bytes: u64,
}

impl Index<u32> for Transfers {
    type Output = Transfer;
    fn index(&self, xfer: u32) -> &Transfer {
        &self.slab[xfer as usize]
    }
}

impl IndexMut<u32> for Transfers {
    fn index_mut(&mut self, xfer: u32) -> &mut Transfer {
        &mut self.slab[xfer as usize]
    }
}

impl Transfers {
    pub(crate) fn new(limit: u32) -> Transfers {
        // A number is drawn per notified transfer in the table: more could not be told apart by the peer.
        let limit = limit.min(MAX_INCOMPLETE as u32);
        Transfers { slab: Vec::with_capacity(64), free: Vec::with_capacity(64), limit, body_bytes: 0 }
    }

    pub(crate) fn live(&self) -> usize {
        self.slab.len() - self.free.len()
    }

    pub(crate) fn work(&self, xfer: u32) -> &Prepared {
        self[xfer].work()
    }

    pub(crate) fn iter_live(&self) -> impl Iterator<Item = &Transfer> + '_ {
        self.slab.iter().filter(|transfer| transfer.state != State::Free)
    }

    pub(super) fn take(&mut self, token: u64, now: Nanos, state: State) -> Result<u32, SubmitError> {
        let xfer = match self.free.pop() {
            Some(xfer) => xfer,
            None if self.slab.len() >= self.limit as usize => {
                return Err(SubmitError::TooManyTransfers { limit: self.limit });
            }
            None => {
                self.slab.push(Transfer {
                    token,
                    work: None,
                    body: Vec::with_capacity(MESSAGE_CAPACITY),
                    flags: BodyFlags::MESSAGE,
                    sent: 0,
                    fragment_key: 0,
                    notified: false,
                    numbered: false,
                    alone: false,
                    state: State::Free,
                    parts: Vec::with_capacity(8),
                    parts_left: 0,
                    in_flight: 0,
                    failure: None,
                    since: now,
                });
                // So that release never allocates.
                self.free.reserve(self.slab.len());
                (self.slab.len() - 1) as u32
            }
        };
        let transfer = &mut self[xfer];
        transfer.token = token;
        transfer.state = state;
        transfer.since = now;
        Ok(xfer)
    }

    /// Keeps what the transfer tells.
    pub(super) fn tell(&mut self, xfer: u32, tell: Tell<'_>) {
        let transfer = &mut self.slab[xfer as usize];
        transfer.notified = !tell.is_nothing();
        transfer.flags = tell.flags();
        tell.encode(&mut transfer.body);
        self.body_bytes += transfer.body.len() as u64;
    }

    pub(crate) fn body_bytes(&self) -> u64 {
        self.body_bytes
    }

    pub(crate) fn take_message_only(&mut self, token: u64, now: Nanos) -> Result<u32, SubmitError> {
        self.take(token, now, State::MessageOnly)
    }

    pub(crate) fn release(&mut self, xfer: u32) {
        let transfer = &mut self[xfer];
        assert_ne!(transfer.state, State::Free, "released twice");
        assert_eq!(transfer.in_flight, 0, "released with batches in flight");
        transfer.state = State::Free;
        transfer.work = None;
        transfer.failure = None;
        transfer.notified = false;
        transfer.numbered = false;
        transfer.sent = 0;
        let len = transfer.body.len() as u64;
        match transfer.body.capacity() > MESSAGE_CAPACITY_KEPT {
            true => transfer.body = Vec::with_capacity(MESSAGE_CAPACITY),
            false => transfer.body.clear(),
        }
        transfer.parts.clear();
        self.free.push(xfer);
        self.body_bytes -= len;
    }

    pub(super) fn find(&self, token: u64) -> Option<u32> {
        let live = |transfer: &Transfer| transfer.state != State::Free && transfer.token == token;
        self.slab.iter().position(live).map(|at| at as u32)
    }

    /// At the end of the epoch: everything unfinished fails.
    pub(crate) fn fail_all(&mut self, reason: &EndReason) -> Vec<(u64, XferFailure)> {
        let mut failed = Vec::with_capacity(self.live());
        for xfer in 0..self.slab.len() as u32 {
            let transfer = &mut self[xfer];
            let failure = match transfer.state {
                State::Free => continue,
                State::Draining => XferFailure::Canceled,
                _ => transfer.failure.take().unwrap_or_else(|| XferFailure::EpochEnded(reason.clone())),
            };
            failed.push((transfer.token, failure));
            transfer.in_flight = 0;
            self.release(xfer);
        }
        failed
    }
}

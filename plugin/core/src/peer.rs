//! The machine of one session and epoch, one-sided path.

mod setup;

pub use setup::*;

use std::collections::VecDeque;
use std::sync::Arc;

use baton_fabric::{Completion, EndpointId};

use crate::ids::{Nanos, NotifySeq};
use crate::notify::RECORD_HEADER_BYTES;
use crate::prepared::Prepared;

/// Longest message that one record of a ring of that length carries.
pub fn message_limit(ring_bytes: u32) -> usize {
    ring_bytes as usize / 4 - RECORD_HEADER_BYTES
}

/// One session and epoch.
#[derive(Debug)]
pub struct Session {
    setup: SessionSetup,
    events: VecDeque<Event>,
}

#[allow(unused_variables)]
impl Session {
    /// Starts an epoch. The driver has already posted `rq_depth` RECVs on every endpoint.
    pub fn new(setup: SessionSetup, now: Nanos) -> Session {
        Session { setup, events: VecDeque::new() }
    }
    /// Takes a transfer over; its message is copied.
    pub fn submit(
        &mut self,
        now: Nanos,
        token: u64,
        work: Arc<Prepared>,
        message: Option<&[u8]>,
    ) -> Result<(), SubmitError> {
        Err(SubmitError::Ended)
    }
    /// Stops a transfer where that is still possible.
    pub fn cancel(&mut self, now: Nanos, token: u64) -> CancelOutcome {
        CancelOutcome::NotFound
    }
    /// Queues a standalone notification.
    pub fn notify(&mut self, now: Nanos, message: &[u8], deadline: Nanos) -> Result<NotifySeq, SubmitError> {
        Err(SubmitError::Ended)
    }
    /// The next thing to do; call until `None` after every other call that takes `&mut self`.
    #[must_use]
    pub fn next_action<'a>(&'a mut self, now: Nanos, mem: &dyn SessionMemory) -> Option<Action<'a>> {
        None
    }
    /// The fabric took only a prefix of the batch just handed out. The epoch ends.
    pub fn on_post_failed(&mut self, endpoint: EndpointId, taken: usize) {}
    /// A completion of one of the session's endpoints.
    pub fn on_completion(&mut self, now: Nanos, completion: &Completion, mem: &dyn SessionMemory) {}
    /// Re-reads the credit page; `true`: there is more credit.
    pub fn poll_credit(&mut self, now: Nanos, mem: &dyn SessionMemory) -> bool {
        false
    }
    /// Announces everything, before the receiver idles.
    pub fn flush_credit(&mut self) {}
    /// The host took messages.
    pub fn on_popped(&mut self, messages: u64, bytes: u64) {}
    /// The next thing to tell.
    #[must_use]
    pub fn next_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }
    /// Nothing is queued, posted or untold.
    pub fn is_idle(&self) -> bool {
        true
    }
    /// A completion is on its way.
    pub fn has_outstanding(&self) -> bool {
        false
    }
    /// Something waits for credit: poll the credit page.
    pub fn waits_for_credit(&self) -> bool {
        false
    }
    /// When [`Session::on_timeout`] is due.
    #[must_use]
    pub fn next_timeout(&self) -> Option<Nanos> {
        None
    }
    /// Deadlines.
    pub fn on_timeout(&mut self, now: Nanos) {}
    /// Ends it, after the endpoints were fenced and drained.
    pub fn close(&mut self, reason: EndReason) -> Closed {
        let carry = std::mem::take(&mut self.setup.carry);
        Closed { failed: Vec::new(), partial_seqs: Vec::new(), carry, counters: Counters::default() }
    }
    /// For `stats`.
    pub fn stats(&self) -> SessionStats {
        SessionStats {
            epoch: self.setup.epoch.0,
            ended: None,
            counters: Counters::default(),
            transfers: 0,
            outstanding_bytes: 0,
            tails_waiting: 0,
            notifications_waiting: 0,
            unpopped_messages: 0,
            unpopped_bytes: 0,
            withholding_credit: false,
            endpoints: Vec::new(),
            waiters: Vec::new(),
        }
    }
    /// Longest message of a transfer or a standalone notification.
    pub fn message_limit(&self) -> usize {
        self.setup
            .lanes
            .iter()
            .chain([&self.setup.control])
            .map(|l| message_limit(l.ring_bytes))
            .min()
            .unwrap_or(0)
    }
}

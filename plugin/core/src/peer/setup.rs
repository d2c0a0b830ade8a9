//! What a session is made from, what it asks for and what it reports.

use baton_fabric::{Batch, Caps, EndpointId, WcStatus};
use serde::Serialize;

use super::Violation;
use crate::ids::{Epoch, Instance, LaneId, NotifySeq, SessionId};
use crate::ledger::NotInFlight;
use crate::notify::{Carry, MAX_MESSAGE_BYTES, NotifyMode, NotifyWindow, RECORD_ALIGN};
use crate::two_sided::report::TwoEnd;

/// One endpoint of a session with the depths both sides agreed on, and the peer's record ring behind it.
#[derive(Clone, Copy, Debug)]
pub struct LaneSetup {
    /// Endpoint.
    pub endpoint: EndpointId,
    /// Work requests outstanding at most, at least [`MIN_SQ_DEPTH`].
    pub sq_depth: u32,
    /// RECVs posted on each side when the epoch starts, at least 1.
    pub rq_depth: u32,
    /// Where the peer's record ring for this endpoint begins.
    pub peer_ring_addr: u64,
    /// Its key.
    pub peer_ring_key: u64,
    /// Length of the ring on both sides: a multiple of 256, at least 512.
    pub ring_bytes: u32,
}

/// Smallest send queue: a data work request, a tail and its record, and one to spare.
pub const MIN_SQ_DEPTH: u32 = 4;

/// Everything that HELLO and its answers settled for one epoch.
#[derive(Debug)]
pub struct SessionSetup {
    /// This engine.
    pub own: Instance,
    /// The other one.
    pub peer: Instance,
    /// Session.
    pub session: SessionId,
    /// Generation of the queue pairs.
    pub epoch: Epoch,
    /// Control endpoint.
    pub control: LaneSetup,
    /// Data lanes, at most 64; index = lane.
    pub lanes: Vec<LaneSetup>,
    /// The peer's credit page, [`crate::credit::CreditPage::bytes`] long.
    pub peer_credit_addr: u64,
    /// Its key.
    pub peer_credit_key: u64,
    /// The fabric's.
    pub caps: Caps,
    /// How completion is told; both sides agreed on it.
    pub notify: NotifyMode,
    /// Limits.
    pub limits: SessionLimits,
    /// What the epoch before left behind; `Carry::default()` for the first.
    pub carry: Carry,
}

/// What was agreed cannot carry a session.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} is {value}, the session machine needs {need}")]
pub struct SetupError {
    /// Which number.
    pub what: String,
    /// Its value.
    pub value: u64,
    /// What it has to be.
    pub need: &'static str,
}

impl SessionSetup {
    /// Checks what a peer had a say in. [`super::Session::new`] panics where this fails.
    pub fn check(&self) -> Result<(), SetupError> {
        let refuse = |what: String, value, need| Err(SetupError { what, value, need });
        if !(1..=64).contains(&self.lanes.len()) {
            return refuse("the number of lanes".into(), self.lanes.len() as u64, "1 to 64");
        }
        if self.notify == NotifyMode::Immediate && !self.caps.immediate {
            return refuse("the number of immediates of the fabric".into(), 0, "one, or send mode");
        }
        // A record is one work request.
        let rings = self.lanes.iter().chain([&self.control]).map(|lane| lane.ring_bytes);
        if self.caps.max_message_bytes < super::slot_bytes(rings.max().unwrap_or(0)) {
            let value = u64::from(self.caps.max_message_bytes);
            return refuse(
                "the longest work request".into(),
                value,
                "at least a quarter of a record ring and the header of a SEND",
            );
        }
        let lanes = self.lanes.iter().enumerate().map(|(n, lane)| (format!("lane {n}"), lane));
        for (name, lane) in lanes.chain([("control".to_owned(), &self.control)]) {
            if lane.sq_depth < MIN_SQ_DEPTH {
                return refuse(format!("{name} sq_depth"), u64::from(lane.sq_depth), "at least 4");
            }
            if lane.rq_depth == 0 {
                return refuse(format!("{name} rq_depth"), 0, "at least 1");
            }
            if lane.ring_bytes < 512 || !lane.ring_bytes.is_multiple_of(256) {
                let value = u64::from(lane.ring_bytes);
                return refuse(format!("{name} ring_bytes"), value, "a multiple of 256, at least 512");
            }
        }
        // Every record on its way must fit the receiver's window of numbers, or a resent one could pass for new.
        if self.notify == NotifyMode::Send && u64::from(self.control.rq_depth) > NotifyWindow::SPAN {
            let value = u64::from(self.control.rq_depth);
            return refuse("control rq_depth".into(), value, "at most 1024 in send mode");
        }
        if u64::from(self.control.ring_bytes) > NotifyWindow::SPAN * RECORD_ALIGN {
            let value = u64::from(self.control.ring_bytes);
            return refuse(
                "control ring_bytes".into(),
                value,
                "no more records than the window of numbers, 65536 bytes",
            );
        }
        Ok(())
    }
}

/// Limits of a session. The defaults are the protocol's starting values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionLimits {
    /// Transfers submitted and not finished.
    pub max_transfers: u32,
    /// Standalone notifications not yet acknowledged.
    pub max_notifications: u32,
    /// Bytes of those; a message is taken while fewer wait, however long it is itself.
    pub max_notification_bytes: u64,
    /// Longest message, on both sides. What is longer than a record goes in fragments.
    pub max_message_bytes: u32,
    /// Bytes of the messages of unfinished transfers.
    pub max_waiting_message_bytes: u64,
    /// Work requests of one slice (and at most a quarter of the send queue).
    pub slice_wrs: u32,
    /// Bytes of one slice.
    pub slice_bytes: u64,
    /// Bytes posted and not completed.
    pub outstanding_bytes: u64,
    /// Credit is withheld above this many messages that the host has not popped …
    pub unpopped_messages: u64,
    /// … or this many bytes of them.
    pub unpopped_bytes: u64,
    /// Work outstanding and no completion for this long ends the epoch …
    pub stall_ms: u64,
    /// … or for as long as the outstanding bytes take at this rate, whichever is more.
    pub stall_bytes_per_second: u64,
    /// First number of a notified transfer, both directions; 0 but in tests of the wrap.
    pub first_xfer_seq: u64,
}

impl Default for SessionLimits {
    fn default() -> Self {
        SessionLimits {
            max_transfers: 1 << 16,
            max_notifications: 16_384,
            max_notification_bytes: 8 << 20,
            max_message_bytes: MAX_MESSAGE_BYTES,
            max_waiting_message_bytes: 64 << 20,
            slice_wrs: 256,
            slice_bytes: 8 << 20,
            outstanding_bytes: 16 << 20,
            unpopped_messages: 16_384,
            unpopped_bytes: 8 << 20,
            stall_ms: 5_000,
            stall_bytes_per_second: 2_000_000,
            first_xfer_seq: 0,
        }
    }
}

/// A record ring: the control endpoint's or a lane's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RingId {
    /// Standalone notifications.
    Control,
    /// Messages of transfers whose record went over this lane.
    Lane(LaneId),
}

/// The memory of one session and epoch, owned by the driver.
pub trait SessionMemory {
    /// Copies bytes out of the ring that the *peer* writes. `offset + out.len()` is inside the ring.
    fn read_record(&self, ring: RingId, offset: u32, out: &mut [u8]);

    /// Copies bytes into the registered staging ring of an endpoint, which is as long as the peer's record ring, and says where
    /// they lie: (address, local key). They are overwritten only after the work request that reads them has completed. With
    /// immediates this ring mirrors the peer's, offset by offset.
    fn stage_record(&self, ring: RingId, offset: u32, bytes: &[u8]) -> (u64, u64);

    /// Send mode: copies bytes out of a RECV slot, `offset + out.len()` inside of it. The slot's RECV is posted again only later.
    fn read_slot(&self, ring: RingId, slot: u32, offset: u32, out: &mut [u8]);

    /// Fabrics that cannot inline a credit word: copies words into one of [`super::CREDIT_SLOTS`] registered slots of
    /// [`super::CREDIT_SLOT_BYTES`] and says where they lie: (address, local key). Overwritten only after the write has completed.
    fn stage_credit(&self, slot: u32, words: &[u8]) -> (u64, u64);

    /// Loads a word of the *own* credit page (which the peer writes), with Acquire ordering.
    fn load_credit(&self, word: usize) -> u64;
}

/// What the driver has to do, in order.
#[derive(Debug)]
pub enum Action<'a> {
    /// Post this chain; it counts as posted unless [`super::Session::on_post_failed`] follows.
    Post {
        /// Where.
        endpoint: EndpointId,
        /// What.
        batch: Batch<'a>,
    },
    /// Post this many RECVs, empty ones or, in send mode, with the slots that come next: the n-th RECV of an endpoint, counted
    /// from 0 and with those posted before the session began, has slot n mod `rq_depth`, whose number is the RECV's id. They must be posted
    /// before the next action is carried out: it may announce them.
    Recv {
        /// Where.
        endpoint: EndpointId,
        /// RECVs posted there before.
        first: u64,
        /// How many.
        count: u32,
    },
}

/// What the session has to tell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A submitted transfer came to its end. Every token gets exactly one of these or stands in [`Closed::failed`].
    XferDone {
        /// The token given to submit.
        token: u64,
        /// How.
        result: Result<(), XferFailure>,
    },
    /// A message of the peer for the host; report it as popped with [`super::Session::on_popped`] when the host took it.
    Delivered {
        /// The bytes.
        message: Vec<u8>,
    },
    /// A transfer to which the peer's host gave this id has landed. Comes before its message, if it has one; report it like a
    /// message of [`crate::notify::ID_BYTES`] when the host has asked for it.
    Landed {
        /// The id.
        id: u64,
    },
    /// A standalone notification was dropped at its deadline.
    NotifyExpired {
        /// Which.
        seq: NotifySeq,
    },
    /// The epoch is over: fence, drain (completions still count), then [`super::Session::close`]. Comes once.
    EndEpoch {
        /// Why.
        reason: EndReason,
    },
}

/// Why a transfer failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum XferFailure {
    /// Canceled by the host before its tail; the peer has heard nothing of it.
    #[error("canceled")]
    Canceled,
    /// This side's fault: local key, bounds or memory.
    #[error(
        "the fabric refused local memory of descriptor local {local_addr:#x}, remote {remote_addr:#x}, {len_bytes} bytes"
    )]
    LocalAccess {
        /// Local address of the work request.
        local_addr: u64,
        /// Remote address.
        remote_addr: u64,
        /// Length.
        len_bytes: u32,
    },
    /// The peer's memory refused: key, bounds or permission.
    #[error(
        "the peer refused descriptor local {local_addr:#x}, remote {remote_addr:#x}, {len_bytes} bytes (key, bounds or permission)"
    )]
    RemoteAccess {
        /// Local address of the work request.
        local_addr: u64,
        /// Remote address.
        remote_addr: u64,
        /// Length.
        len_bytes: u32,
    },
    /// A message without data was not posted by its deadline.
    #[error("the notification expired before it could be posted")]
    Expired,
    /// The epoch ended before it was known to be complete. It may or may not have notified.
    #[error("the connection ended: {0}")]
    EpochEnded(EndReason),
}

/// Why an epoch ended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EndReason {
    /// The peer broke the protocol.
    #[error("protocol violation by the peer: {0}")]
    Violation(#[from] Violation),
    /// A work request failed.
    #[error("a work request on {endpoint:?} ended with {status:?}")]
    WorkFailed {
        /// Where.
        endpoint: EndpointId,
        /// How.
        status: WcStatus,
    },
    /// The fabric did not take a batch.
    #[error("the fabric took only {taken} of {offered} work requests on {endpoint:?}")]
    PostFailed {
        /// Where.
        endpoint: EndpointId,
        /// Taken.
        taken: usize,
        /// Offered.
        offered: usize,
    },
    /// The fabric reports a completion of something that is not in flight.
    #[error("{endpoint:?}: {error}")]
    BadCompletion {
        /// Where.
        endpoint: EndpointId,
        /// What.
        error: NotInFlight,
    },
    /// The fabric reports another RECV slot than the oldest one posted.
    #[error("{endpoint:?} reports RECV slot {slot}, the oldest is {expected}")]
    WrongSlot {
        /// Where.
        endpoint: EndpointId,
        /// Told.
        slot: u64,
        /// The one whose turn it is.
        expected: u64,
    },
    /// Work outstanding and no completion.
    #[error("no completion for {waited_ms} ms with {outstanding_bytes} bytes outstanding")]
    Stalled {
        /// How long.
        waited_ms: u64,
        /// How much.
        outstanding_bytes: u64,
    },
    /// The two-sided path cannot go on.
    #[error("two-sided: {0}")]
    TwoSided(TwoEnd),
    /// The peer fenced the session.
    #[error("the peer ended the session: {0}")]
    PeerFenced(String),
    /// The peer closed the session in order: it will not be resumed.
    #[error("the peer closed the session: {0}")]
    PeerClosed(String),
    /// Its lifeline ended, or it does not answer.
    #[error("the peer is gone: {0}")]
    PeerGone(String),
    /// Another instance answers at its address.
    #[error("the peer was restarted")]
    PeerRestarted,
    /// The host has bound its name to another instance, which is connecting.
    #[error("by this name the host means instance {0}, which connects now")]
    NameOfAnother(Instance),
    /// The host disconnected.
    #[error("disconnected by the host")]
    Disconnected,
    /// The engine shuts down.
    #[error("the engine shuts down")]
    Shutdown,
}

impl From<TwoEnd> for EndReason {
    fn from(end: TwoEnd) -> EndReason {
        match end {
            TwoEnd::Violation(violation) => EndReason::Violation(violation.into()),
            TwoEnd::WorkFailed { endpoint, status } => EndReason::WorkFailed { endpoint, status },
            TwoEnd::BadCompletion { endpoint, error } => EndReason::BadCompletion { endpoint, error },
            other => EndReason::TwoSided(other),
        }
    }
}

impl EndReason {
    /// That something was flushed follows from a cause which may be heard of later.
    pub fn is_consequence(&self) -> bool {
        matches!(self, EndReason::WorkFailed { status: WcStatus::Flushed, .. })
    }
}

/// Why something was not accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// Longer than a message may be.
    #[error("message of {len} bytes: the limit is {limit} bytes")]
    MessageTooLong {
        /// Length.
        len: usize,
        /// Limit.
        limit: usize,
    },
    /// The session's table is full.
    #[error("{limit} transfers to this peer are unfinished: poll them before posting more")]
    TooManyTransfers {
        /// Limit.
        limit: u32,
    },
    /// The messages of unfinished transfers need too much memory.
    #[error(
        "messages of unfinished transfers to this peer have {waiting} bytes, with another of {len} they would be over the limit of {limit}: poll them before posting more"
    )]
    TooManyMessageBytes {
        /// Bytes of them.
        waiting: u64,
        /// Of the one refused.
        len: usize,
        /// Limit.
        limit: u64,
    },
    /// The queue of standalone notifications is full.
    #[error(
        "{count} notifications ({bytes} bytes) to this peer wait for their acknowledgement; limits: {max_count}, {max_bytes} bytes"
    )]
    TooManyNotifications {
        /// Waiting.
        count: u32,
        /// Bytes of them.
        bytes: u64,
        /// Limit.
        max_count: u32,
        /// Limit in bytes.
        max_bytes: u64,
    },
    /// The request was split for other lanes.
    #[error("the request uses lane {lane}, the session has {lanes}: split it anew")]
    LaneMap {
        /// Highest lane used.
        lane: u8,
        /// Lanes there are.
        lanes: u8,
    },
    /// The epoch is over.
    #[error("the epoch has ended")]
    Ended,
}

/// What a cancel achieved. In every case but `NotFound` exactly one [`Event::XferDone`] follows (or [`Closed::failed`] names it).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CancelOutcome {
    /// No such token (any more).
    NotFound,
    /// Nothing of it is posted: its event is there already.
    Canceled,
    /// No more is posted; its event comes when what is posted has completed.
    Draining,
    /// Everything is posted; it ends as if it had not been canceled.
    TooLate,
}

/// What remains of an epoch.
#[derive(Debug)]
pub struct Closed {
    /// Unfinished transfers.
    pub failed: Vec<(u64, XferFailure)>,
    /// Numbers of inbound transfers of which some lanes had reported.
    pub partial_seqs: Vec<u64>,
    /// For the next epoch.
    pub carry: Carry,
    /// Totals of this epoch.
    pub counters: Counters,
}

/// Totals since the epoch began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[allow(missing_docs)]
pub struct Counters {
    pub transfers_submitted: u64,
    pub transfers_done: u64,
    pub transfers_failed: u64,
    pub transfers_canceled: u64,
    pub bytes_done: u64,
    pub batches_posted: u64,
    pub work_requests_posted: u64,
    pub whole_posts: u64,
    pub sliced_posts: u64,
    pub tails_waited: u64,
    pub notifications_sent: u64,
    pub notifications_resent: u64,
    pub notifications_expired: u64,
    pub messages_received: u64,
    pub ids_received: u64,
    pub fragments_sent: u64,
    pub fragments_received: u64,
    pub partial_messages_dropped: u64,
    pub duplicates_dropped: u64,
    pub credit_writes: u64,
    pub credit_words_stale: u64,
    pub receives_reposted: u64,
    pub flushed: u64,
    pub late_ignored: u64,
    pub leftover_flushes: u64,
}

/// For `stats`: where a session stands and what everything that waits is waiting for.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs)]
pub struct SessionStats {
    pub epoch: u32,
    pub notify: NotifyMode,
    pub ended: Option<String>,
    pub counters: Counters,
    pub transfers: u32,
    pub outstanding_bytes: u64,
    pub tails_waiting: u32,
    pub notifications_waiting: u32,
    pub unpopped_messages: u64,
    pub unpopped_bytes: u64,
    pub reassembly_bytes: u64,
    pub withholding_credit: bool,
    pub endpoints: Vec<EndpointStats>,
    pub waiters: Vec<Waiter>,
}

/// One endpoint's numbers.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs)]
pub struct EndpointStats {
    pub name: String,
    pub sq_depth: u32,
    pub posted: u64,
    pub retired: u64,
    pub recv_known: u64,
    pub recv_consumed: u64,
    pub ring_known: u64,
    pub ring_consumed: u64,
    pub recv_granted: u64,
    pub recv_received: u64,
    pub recv_announced: u64,
    pub ring_freed: u64,
    pub ring_announced: u64,
}

/// Something that waits.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs)]
pub struct Waiter {
    pub what: String,
    pub waits_for: String,
    pub since_ns: u64,
}

//! What a channel reports: events, ends, violations, refusals, counters.

use baton_fabric::{EndpointId, WcStatus};
use serde::Serialize;

use super::codec::{Direction, FrameError, Kind, MessageError, Status};
use super::inbox::TransferViolation;
use super::notes::NoteViolation;
use crate::credit::CreditViolation;
use crate::ids::LaneId;
use crate::ledger::NotInFlight;

/// What the channel has to tell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TwoEvent {
    /// A transfer came to its end: nothing of it touches memory here any more, and no byte of it will land at the peer. (What the peer
    /// still sends of a READ that is complete reads its own memory, which it holds for that.)
    XferDone {
        /// Token.
        token: u64,
        /// How.
        result: Result<(), XferFailure>,
    },
    /// A notification came to its end.
    NoteDone {
        /// Token.
        token: u64,
        /// `false`: its deadline came first, and nothing of it was sent.
        sent: bool,
    },
    /// A message of the peer; tell [`super::channel::Channel::on_popped`] when the host took it.
    Delivered {
        /// The bytes.
        message: Vec<u8>,
    },
    /// The epoch is over: fence, drain, end all copies, then [`super::channel::Channel::close`]. Comes once.
    EndEpoch {
        /// Why.
        reason: TwoEnd,
    },
}

/// Why a transfer failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum XferFailure {
    /// By the host. The peer has heard nothing of its notification.
    #[error("canceled")]
    Canceled,
    /// By the peer.
    #[error("the peer refused it with {status:?}{}", at(*chunk))]
    Refused {
        /// Why.
        status: Status,
        /// Chunk (WRITE) or piece (READ); `u32::MAX`: no particular one.
        chunk: u32,
    },
    /// The copy into own memory failed.
    #[error("copying from or into own memory failed with {status:?}{}: it is not mapped, or not as it is used", at(*chunk))]
    CopyFailed {
        /// Why.
        status: Status,
        /// Which.
        chunk: u32,
    },
    /// Nothing happened for too long.
    #[error("nothing moved for {waited_ms} ms: {why}")]
    Waited {
        /// How long.
        waited_ms: u64,
        /// What it waited for, with both counters.
        why: String,
    },
    /// The session ended and was not resumed.
    #[error("the connection ended: {0}")]
    Ended(TwoEnd),
}

fn at(chunk: u32) -> String {
    if chunk == u32::MAX { String::new() } else { format!(" at {chunk}") }
}

/// Why an epoch ended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TwoEnd {
    /// The peer broke the protocol.
    #[error("protocol violation by the peer: {0}")]
    Violation(#[from] TwoViolation),
    /// A work request failed.
    #[error("a work request on {endpoint:?} ended with {status:?}")]
    WorkFailed {
        /// Where.
        endpoint: EndpointId,
        /// How.
        status: WcStatus,
    },
    /// The fabric did not take a work request.
    #[error("the fabric did not take a work request on {endpoint:?}")]
    PostFailed {
        /// Where.
        endpoint: EndpointId,
    },
    /// The fabric completes something that is not in flight.
    #[error("{endpoint:?}: {error}")]
    BadCompletion {
        /// Where.
        endpoint: EndpointId,
        /// What.
        error: NotInFlight,
    },
    /// The fabric completes another RECV than the oldest one.
    #[error("{endpoint:?} reports RECV {got}, the oldest is {expected}")]
    WrongRecv {
        /// Where.
        endpoint: EndpointId,
        /// Told.
        got: u64,
        /// The one whose turn it is.
        expected: u64,
    },
    /// Work outstanding and no completion.
    #[error("no completion for {waited_ms} ms")]
    Stalled {
        /// How long.
        waited_ms: u64,
    },
    /// The peer does not answer an ABORT.
    #[error("the peer has not answered the ABORT of transfer {transfer} for {waited_ms} ms")]
    AbortUnanswered {
        /// Which.
        transfer: u64,
        /// How long.
        waited_ms: u64,
    },
    /// Told from outside.
    #[error("{0}")]
    Closed(String),
}

/// What only a faulty or hostile peer can cause. Never a panic.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TwoViolation {
    /// A control frame that is none.
    #[error("control frame: {0}")]
    Frame(FrameError),
    /// A data message that is none.
    #[error("data message on {lane:?}: {error}")]
    Message {
        /// Where.
        lane: LaneId,
        /// What is wrong.
        error: MessageError,
    },
    /// A frame out of order.
    #[error("control frame {got} where {expected} follows")]
    FrameSeq {
        /// Told.
        got: u64,
        /// Next.
        expected: u64,
    },
    /// It acknowledges frames that were not sent, or fewer than before.
    #[error("frame {got} is acknowledged, {before} was before and {sent} were sent")]
    FrameAck {
        /// Told.
        got: u64,
        /// Before.
        before: u64,
        /// Sent.
        sent: u64,
    },
    /// A data message out of order.
    #[error("message {got} on {lane:?} where {expected} follows")]
    LaneSeq {
        /// Where.
        lane: LaneId,
        /// Told.
        got: u32,
        /// Next.
        expected: u32,
    },
    /// The first frame must be SESSION_OPEN, and no other.
    #[error("{kind:?} as frame {seq}")]
    Opening {
        /// Told.
        kind: Kind,
        /// Its number.
        seq: u64,
    },
    /// SESSION_OPEN tells other parameters than were agreed.
    #[error("SESSION_OPEN tells {what} {got}, agreed was {agreed}")]
    Parameters {
        /// Which.
        what: &'static str,
        /// Told.
        got: u64,
        /// Agreed.
        agreed: u64,
    },
    /// Something for a lane that does not exist.
    #[error("{lane:?} of {lanes}")]
    Lane {
        /// Told.
        lane: LaneId,
        /// There are.
        lanes: u8,
    },
    /// Credit that cannot be.
    #[error("credit word {word}: {error}")]
    Credit {
        /// Which.
        word: usize,
        /// What is wrong.
        error: CreditViolation,
    },
    /// More messages than it was told it may send.
    #[error("message {received} on {}, announced were {announced}", lane.map_or("the control endpoint".to_owned(), |lane| format!("{lane:?}")))]
    TooManyReceives {
        /// Where; `None`: control.
        lane: Option<LaneId>,
        /// Received.
        received: u64,
        /// Announced.
        announced: u64,
    },
    /// A transfer of the peer.
    #[error(transparent)]
    Transfer(#[from] TransferViolation),
    /// A notification.
    #[error(transparent)]
    Note(#[from] NoteViolation),
    /// It acknowledges notifications that were not sent.
    #[error("notifications are acknowledged up to {got}, sent were those up to {sent}")]
    NoteAck {
        /// Told.
        got: u64,
        /// Sent.
        sent: u64,
    },
    /// It names a transfer of ours that we have not begun, or in the wrong direction.
    #[error("{kind:?} of transfer {transfer} ({direction:?}), which is none of ours")]
    NotOurs {
        /// Frame.
        kind: Kind,
        /// Told.
        transfer: u64,
        /// Told.
        direction: Direction,
    },
    /// It has more of a transfer than there is.
    #[error("{got} chunks of transfer {transfer} are done, it has {total}")]
    Chunks {
        /// Which.
        transfer: u64,
        /// Told.
        got: u32,
        /// There are.
        total: u32,
    },
    /// A chunk of a READ that is not the one asked for.
    #[error("chunk {chunk} of READ {transfer} is not what was asked for")]
    WrongChunk {
        /// Which.
        transfer: u64,
        /// Told.
        chunk: u32,
    },
    /// An immediate where there are none.
    #[error("an immediate on {endpoint:?}")]
    Immediate {
        /// Where.
        endpoint: EndpointId,
    },
}

/// Why nothing was taken over.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TwoSubmitError {
    /// The epoch is over.
    #[error("the channel has ended")]
    Ended,
    /// Would block.
    #[error("{count} {what} are unfinished, the limit is {limit}: wait for some")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// There are.
        count: u64,
        /// Limit.
        limit: u64,
    },
    /// Would block.
    #[error("{what}: {bytes} bytes are unfinished, the limit is {limit}: wait for some")]
    TooManyBytes {
        /// Of what.
        what: &'static str,
        /// There are.
        bytes: u64,
        /// Limit.
        limit: u64,
    },
    /// Would block.
    #[error("token {0} is in use")]
    Token(u64),
    /// Too long.
    #[error("a message of {len} bytes, the limit of the two-sided backend is {limit}")]
    MessageTooLong {
        /// Its length.
        len: usize,
        /// Limit.
        limit: u32,
    },
    /// Cannot be cut.
    #[error(transparent)]
    Cut(#[from] super::chunks::CutError),
}

/// What cancelling did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TwoCancel {
    /// No such transfer.
    NotFound,
    /// It had not begun: its event is there.
    Canceled,
    /// It ends when the peer says that no byte of it will land any more.
    Draining,
    /// Everything was there already.
    TooLate,
}

/// Counters. Everything dropped, refused or repeated has one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[allow(missing_docs)]
pub struct TwoCounters {
    pub transfers_submitted: u64,
    pub transfers_done: u64,
    pub transfers_failed: u64,
    pub messages_sent: u64,
    pub messages_gathered: u64,
    pub blocks_packed: u64,
    pub packs_sent: u64,
    pub bytes_sent: u64,
    pub messages_received: u64,
    pub bytes_placed: u64,
    pub frames_sent: u64,
    pub frames_received: u64,
    pub nops_sent: u64,
    pub nops_received: u64,
    pub credit_writes: u64,
    pub credit_words_stale: u64,
    pub credit_words_lower: u64,
    pub stale_session: u64,
    pub stale_epoch: u64,
    pub duplicate_chunks: u64,
    pub ended_chunks: u64,
    pub released_chunks: u64,
    pub late_read_chunks: u64,
    pub heads_received: u64,
    pub rests_lost: u64,
    pub late_answers: u64,
    pub late_completions: u64,
    pub refused_chunks: u64,
    pub crc_errors: u64,
    pub nacks_sent: u64,
    pub nacks_received: u64,
    pub aborts_sent: u64,
    pub aborts_received: u64,
    pub waits_timed_out: u64,
    pub reads_timed_out: u64,
    pub credit_requests_sent: u64,
    pub credit_requests_received: u64,
    pub credit_requests_ignored: u64,
    pub reclaims_sent: u64,
    pub reclaims_received: u64,
    pub reclaim_timeouts: u64,
    pub notes_sent: u64,
    pub notes_delivered: u64,
    pub notes_expired: u64,
    pub violations: u64,
}

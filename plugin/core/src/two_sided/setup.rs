//! What a channel is made from and what it asks for.

use std::ops::RangeInclusive;

use baton_fabric::EndpointId;

use super::codec::{DATA_HEADER_BYTES, Direction, Status};
use super::inbox::InboxLimits;
use super::notes::NoteLimits;
use super::pool::{PeerKey, SlotId};
use crate::ids::{Epoch, RegionId, SessionId};

/// Shortest send queue of the control endpoint: what is set aside for credit words.
pub const LEAST_CONTROL_SQ: u32 = 8;
/// Fewest RECVs of the control endpoint.
pub const LEAST_CONTROL_RQ: u32 = 2;
/// Shortest send queue of a lane.
pub const LEAST_LANE_SQ: u32 = 2;
/// Fewest RECVs of a lane.
pub const LEAST_LANE_RQ: u32 = 1;
/// Lengths of a data slot.
pub const SLOT_BYTES: RangeInclusive<u32> = DATA_HEADER_BYTES as u32 + 64..=1 << 24;
/// Most transfers that a side takes at once.
pub const MAX_REQUEST_DEPTH: u32 = 1 << 20;
/// Most bytes of notifications unacknowledged.
pub const MAX_NOTIFY_WINDOW: u32 = 1 << 30;
const MAX_DEPTH: u32 = crate::wire::MAX_DEPTH as u32;

/// One data lane.
#[derive(Clone, Debug)]
pub struct TwoLane {
    /// Endpoint.
    pub endpoint: EndpointId,
    /// Work requests outstanding at most.
    pub sq_depth: u32,
    /// RECVs posted at most, on either side.
    pub rq_depth: u32,
    /// Slots of the RECVs that the driver posted before the endpoint was connected, in order. They were lent by the pool.
    pub posted: Vec<SlotId>,
    /// How many the peer told that it had posted.
    pub peer_posted: u32,
}

/// What the handshake settled for one epoch. Both sides have the same values but for what is said to be a side's own.
#[derive(Clone, Debug)]
pub struct TwoSetup {
    /// The peer, as the pool knows it.
    pub peer: PeerKey,
    /// Session.
    pub session: SessionId,
    /// Generation of the queue pairs.
    pub epoch: Epoch,
    /// Control endpoint.
    pub control: EndpointId,
    /// Work requests outstanding there at most.
    pub control_sq_depth: u32,
    /// Control RECVs: slots of [`super::codec::CONTROL_SLOT_BYTES`], all posted before the epoch; the n-th RECV has slot n mod this.
    pub control_rq_depth: u32,
    /// Data lanes, 1 to 64; index = lane.
    pub lanes: Vec<TwoLane>,
    /// Length of a data slot, the smaller of both sides'.
    pub slot_bytes: u32,
    /// Where the peer's credit page begins.
    pub peer_credit_addr: u64,
    /// Its key.
    pub peer_credit_key: u64,
    /// Own: slots of the pool that it holds at most for messages that are copied before they are sent.
    pub send_slots: u32,
    /// Own: entries of a gather list at most.
    pub max_sge: u32,
    /// Own: messages carry a checksum of their data.
    pub data_crc: bool,
    /// Limits.
    pub limits: TwoLimits,
}

/// Limits of a channel; the first three are agreed, the others are a side's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TwoLimits {
    /// Transfers that each side takes at once.
    pub request_depth: u32,
    /// Bytes of notifications unacknowledged.
    pub notify_window: u32,
    /// Longest message of a notification.
    pub message_bytes: u32,
    /// Bytes of bookkeeping for the peer's transfers.
    pub inbox_bytes: usize,
    /// Own transfers not finished.
    pub max_transfers: u32,
    /// Notifications queued.
    pub max_notifications: u32,
    /// Their bytes: the one that comes beyond them is still taken, the next is not.
    pub max_notification_bytes: u64,
    /// Bytes of the messages of own transfers that are not finished, where there is more than one.
    pub max_message_bytes: u64,
    /// Acknowledgements of notifications are withheld above this.
    pub unpopped_bytes: u64,
    /// A transfer that nothing happened to for so long fails.
    pub wait_ms: u64,
    /// A transfer of at most so many bytes is a small one.
    pub small_bytes: u64,
    /// Chunks of at most so many bytes are packed together.
    pub pack_bytes: u32,
    /// A lane with so many bytes of data under way takes no more, so that what comes later does not wait behind them all.
    pub flight_bytes: u64,
    /// RECVs of a lane that is idle.
    pub idle_slots: u32,
    /// A lane without data for so long is idle.
    pub lane_idle_ms: u64,
    /// Between two attempts to reclaim RECVs of an idle lane.
    pub reclaim_ms: u64,
    /// Transfers of the round at once.
    pub ring: usize,
    /// Work outstanding and no completion for so long ends the epoch.
    pub stall_ms: u64,
}

impl Default for TwoLimits {
    fn default() -> TwoLimits {
        TwoLimits {
            request_depth: 256,
            notify_window: 1 << 20,
            message_bytes: 512 << 10,
            inbox_bytes: 16 << 20,
            max_transfers: 1 << 16,
            max_notifications: 16_384,
            max_notification_bytes: 8 << 20,
            max_message_bytes: 64 << 20,
            unpopped_bytes: 8 << 20,
            wait_ms: 30_000,
            small_bytes: 1 << 20,
            pack_bytes: 8 << 10,
            flight_bytes: 4 << 20,
            idle_slots: 1,
            lane_idle_ms: 2_000,
            reclaim_ms: 500,
            ring: 16,
            stall_ms: 5_000,
        }
    }
}

impl TwoLimits {
    /// For the inbox.
    pub fn inbox(&self) -> InboxLimits {
        InboxLimits { depth: self.request_depth, state_bytes: self.inbox_bytes }
    }

    /// For notifications.
    pub fn notes(&self) -> NoteLimits {
        NoteLimits {
            message_bytes: self.message_bytes,
            window_bytes: self.notify_window,
            unpopped_bytes: self.unpopped_bytes,
        }
    }
}

/// What was agreed cannot carry a channel.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} is {value}, a two-sided channel needs {need}")]
pub struct TwoSetupError {
    /// Which number.
    pub what: &'static str,
    /// Its value.
    pub value: u64,
    /// What it has to be.
    pub need: &'static str,
}

impl TwoSetup {
    /// Checks what a peer had a say in.
    ///
    /// # Errors
    /// The first number that is out of range.
    pub fn check(&self) -> Result<(), TwoSetupError> {
        let within = |what, value: u32, range: RangeInclusive<u32>, need| {
            let refuse = Err(TwoSetupError { what, value: value.into(), need });
            if range.contains(&value) { Ok(()) } else { refuse }
        };
        let limits = &self.limits;
        let lanes = u32::try_from(self.lanes.len()).unwrap_or(u32::MAX);
        within("the number of lanes", lanes, 1..=crate::wire::MAX_LANES as u32, "1 to 64")?;
        let (sq, rq) = (self.control_sq_depth, self.control_rq_depth);
        within("the control send queue", sq, LEAST_CONTROL_SQ..=MAX_DEPTH, "8 to 65535")?;
        within("the control receive queue", rq, LEAST_CONTROL_RQ..=MAX_DEPTH, "2 to 65535")?;
        within("the length of a slot", self.slot_bytes, SLOT_BYTES, "128 bytes to 16 MiB")?;
        within("the request depth", limits.request_depth, 1..=MAX_REQUEST_DEPTH, "1 to 2^20")?;
        let least = limits.message_bytes.saturating_add(super::notes::NOTE_OVERHEAD as u32);
        let window = limits.notify_window;
        within("the notification window", window, least..=MAX_NOTIFY_WINDOW, "one longest message")?;
        for lane in &self.lanes {
            within("a lane's send queue", lane.sq_depth, LEAST_LANE_SQ..=MAX_DEPTH, "2 to 65535")?;
            within("a lane's receive queue", lane.rq_depth, LEAST_LANE_RQ..=MAX_DEPTH, "1 to 65535")?;
            let posted = u32::try_from(lane.posted.len()).unwrap_or(u32::MAX);
            within("RECVs posted on a lane", posted, 0..=lane.rq_depth, "at most its depth")?;
            let told = lane.peer_posted;
            within("RECVs posted by the peer", told, 0..=lane.rq_depth, "at most the lane's depth")?;
        }
        Ok(())
    }
}

/// Where bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// As the driver said in [`super::chunks::Piece::local`], plus a distance.
    Local(u64),
    /// In an own region that the peer named.
    Region(RegionId, u64),
}

/// Bytes to be gathered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Where.
    pub from: Place,
    /// How many.
    pub len: u32,
}

/// What the channel asks of the driver's memory.
pub trait TwoMemory {
    /// Whether the peer may write to (WRITE) or read from (READ) that part of an own region, now.
    ///
    /// # Errors
    /// Why not.
    fn check(&self, region: RegionId, offset: u64, len: u64, direction: Direction) -> Result<(), Status>;
    /// Whether the bytes are registered for local use, so that a NIC can gather them.
    fn can_gather(&self, span: &Span) -> bool;
    /// Copies bytes out of a data slot.
    fn read_slot(&self, slot: SlotId, at: u32, out: &mut [u8]);
    /// CRC-32C of bytes of a data slot, continued from `crc`.
    fn crc_slot(&self, slot: SlotId, at: u32, len: u32, crc: u32) -> u32;
    /// Copies bytes out of a control slot.
    fn read_control(&self, slot: u32, out: &mut [u8]);
    /// Loads a word of the own credit page, with Acquire ordering.
    fn load_credit(&self, word: usize) -> u64;
}

/// What a data message is sent from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Copy everything into this slot of the pool and send that.
    Slot(SlotId),
    /// Gather the spans from where they are, behind the prefix in this one of the channel's [`super::channel::GATHERS`] small
    /// buffers of [`super::channel::GATHER_PREFIX_BYTES`]. It is not used again before this SEND has completed.
    Gather(u32),
    /// There is nothing but a header: a NOP.
    Bare,
}

/// A data message to be posted.
#[derive(Debug)]
pub struct DataSend<'a> {
    /// Where.
    pub endpoint: EndpointId,
    /// Sequence in the send queue; comes back in the completion.
    pub seq: u64,
    /// Header and table.
    pub prefix: &'a [u8],
    /// The data, in order.
    pub spans: &'a [Span],
    /// What it is sent from.
    pub source: Source,
    /// Finish the checksum with [`super::codec::append_data_crc`].
    pub data_crc: bool,
}

/// What the driver has to do, in order.
#[derive(Debug)]
pub enum TwoAction<'a> {
    /// Post these RECVs before the next action is carried out: it may announce them. The n-th RECV of a lane, those before the
    /// epoch included, has id n (low 32 bits).
    RecvData {
        /// Where.
        endpoint: EndpointId,
        /// Number of the first.
        first: u64,
        /// Slots, in order.
        slots: &'a [SlotId],
    },
    /// Post control RECVs again: slot and id of the n-th are n mod depth.
    RecvControl {
        /// Where.
        endpoint: EndpointId,
        /// Number of the first.
        first: u64,
        /// How many.
        count: u32,
    },
    /// WRITE these words into the peer's credit page.
    Credit {
        /// Where.
        endpoint: EndpointId,
        /// Sequence in the send queue.
        seq: u64,
        /// First word.
        word: usize,
        /// Little-endian words.
        bytes: &'a [u8],
    },
    /// SEND a control frame.
    SendControl {
        /// Where.
        endpoint: EndpointId,
        /// Sequence in the send queue.
        seq: u64,
        /// The frame.
        bytes: &'a [u8],
    },
    /// SEND a data message.
    SendData(DataSend<'a>),
    /// Copy out of a data slot, now or later and on any thread; then [`super::channel::Channel::on_placed`]. Or take the rest of a message
    /// ([`PlaceJob::rest`]).
    Place(PlaceJob),
}

/// A copy out of a data slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlaceJob {
    /// Comes back.
    pub ticket: Ticket,
    /// From.
    pub slot: SlotId,
    /// From its byte.
    pub at: u32,
    /// To.
    pub to: Place,
    /// Bytes.
    pub len: u32,
    /// The bytes are not in the slot: they are the rest of a message of which only the head was received.
    pub rest: Option<RestOf>,
}

/// The rest of a message. Rests of an endpoint are taken in the order in which they were handed out; each ends with
/// [`super::channel::Channel::on_placed`] or [`super::channel::Channel::on_lost`]. While one is awaited it may cease to be wanted
/// ([`super::channel::Channel::wants`]): it is lost then, and goes nowhere when it comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RestOf {
    /// Whose oldest message it is.
    pub endpoint: EndpointId,
    /// `false`: it goes nowhere, whatever the job says, and is lost.
    pub wanted: bool,
}

/// What a copy belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket {
    pub(super) direction: Direction,
    pub(super) transfer: u64,
    pub(super) chunk: u32,
    pub(super) slot: SlotId,
}

impl Ticket {
    /// Of what belongs to no transfer: they count from 1.
    pub(super) fn of_none(slot: SlotId) -> Ticket {
        Ticket { direction: Direction::Write, transfer: 0, chunk: 0, slot }
    }
}

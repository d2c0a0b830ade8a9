//! What one side offers for the two-sided backend. No region and no key but the credit page's.

use serde::Serialize;
use serde_json::Value;

use super::MAX_LANES;
use super::field::{FieldError, Fields};
use super::negotiate::AgreedTwoSided;
use super::offer::{EndpointOffer, MemoryOffer, recvs};
use crate::two_sided::channel::Channel;
use crate::two_sided::codec::MAX_MESSAGE_BYTES;
use crate::two_sided::notes::NOTE_OVERHEAD;
use crate::two_sided::setup::{
    LEAST_CONTROL_RQ, LEAST_CONTROL_SQ, LEAST_LANE_RQ, LEAST_LANE_SQ, MAX_NOTIFY_WINDOW, MAX_REQUEST_DEPTH,
    SLOT_BYTES,
};

/// A data lane.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TwoSidedLane {
    /// Its endpoint; rq_depth: RECVs that it may ever have posted at once.
    #[serde(flatten)]
    pub endpoint: EndpointOffer,
    /// RECVs that its owner posts before the first message, at most rq_depth: the credit that the peer starts with.
    pub posted: u32,
}

/// What the two-sided backend needs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TwoSidedOffer {
    /// The control endpoint; all its RECVs are posted before the first message.
    pub control: EndpointOffer,
    /// The data lanes, 1..=64.
    pub lanes: Vec<TwoSidedLane>,
    /// Longest data message, header included: what a RECV of a lane takes.
    pub slot_bytes: u32,
    /// Transfers that the sender takes at once.
    pub request_depth: u32,
    /// Bytes of notifications unacknowledged; at least one longest message.
    pub notify_window: u32,
    /// Longest message of a notification.
    pub message_bytes: u32,
    /// Page into which the peer writes its credit words.
    pub credit_page: MemoryOffer,
}

impl TwoSidedLane {
    fn decode(value: &Value, path: String) -> Result<Self, FieldError> {
        let fields = Fields::new(value, path)?;
        let endpoint = EndpointOffer::decode_deep(&fields, LEAST_LANE_SQ, LEAST_LANE_RQ)?;
        Ok(Self { posted: fields.number_u32("posted", 0..=endpoint.rq_depth)?, endpoint })
    }
}

impl TwoSidedOffer {
    /// RECVs of all its queues together.
    pub fn recvs(&self) -> u64 {
        recvs(self.lanes.iter().map(|lane| &lane.endpoint).chain([&self.control]))
    }

    /// RECVs that the owner of this offer posts on a lane before the first message: no more than the depth agreed on,
    /// whatever it offered. Both sides compute it alike.
    pub fn posted(&self, lane: usize, agreed: &AgreedTwoSided) -> u32 {
        self.lanes[lane].posted.min(agreed.lanes[lane].rq_depth)
    }

    pub(super) fn decode(value: &Value, path: String) -> Result<Self, FieldError> {
        let fields = Fields::new(value, path)?;
        let control =
            EndpointOffer::decode_deep(&fields.object("control")?, LEAST_CONTROL_SQ, LEAST_CONTROL_RQ)?;
        let lanes = fields.each("lanes", 1..=MAX_LANES, TwoSidedLane::decode)?;
        let page = Channel::credit_page_bytes(lanes.len());
        let message_bytes = fields.number_u32("message_bytes", 1..=MAX_MESSAGE_BYTES)?;
        let one_message = message_bytes + NOTE_OVERHEAD as u32;
        Ok(Self {
            control,
            lanes,
            slot_bytes: fields.number_u32("slot_bytes", SLOT_BYTES)?,
            request_depth: fields.number_u32("request_depth", 1..=MAX_REQUEST_DEPTH)?,
            notify_window: fields.number_u32("notify_window", one_message..=MAX_NOTIFY_WINDOW)?,
            message_bytes,
            credit_page: MemoryOffer::decode_long(
                fields.raw("credit_page")?,
                fields.path("credit_page"),
                page,
            )?,
        })
    }
}

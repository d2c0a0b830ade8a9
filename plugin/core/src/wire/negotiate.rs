//! What two offers of one fabric agree on: the minima.

use crate::notify::NotifyMode;

use super::offer::{EndpointOffer, FabricOffer};

/// RECVs of an endpoint in send mode at most: each has a slot with memory.
pub const SEND_RQ_DEPTH: u32 = 64;

/// Depths of one connected endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Depths {
    /// Own send queue: the smaller of both sides'.
    pub sq_depth: u32,
    /// RECVs that each side posts before the first message, and so the credit that each starts with.
    pub rq_depth: u32,
}

/// What both sides compute alike from the two offers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Agreed {
    /// The fabric.
    pub fabric: String,
    /// The control endpoint.
    pub control: Depths,
    /// The lanes in use: the first ones of each side's list.
    pub lanes: Vec<Depths>,
    /// Record ring of the control endpoint in bytes.
    pub control_ring_bytes: u64,
    /// Record ring of each lane in bytes.
    pub ring_bytes: Vec<u64>,
    /// Longest work request in bytes.
    pub max_message_bytes: u64,
    /// How completion is told.
    pub notify: NotifyMode,
}

/// Two offers that cannot meet.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NegotiateError {
    /// Different fabrics.
    #[error("the answer is for fabric {theirs:?}, not for {ours:?}")]
    Fabric {
        /// Own offer's.
        ours: String,
        /// The peer's.
        theirs: String,
    },
}

/// The minima of two offers; symmetric.
pub fn negotiate(ours: &FabricOffer, theirs: &FabricOffer) -> Result<Agreed, NegotiateError> {
    if ours.fabric != theirs.fabric {
        return Err(NegotiateError::Fabric { ours: ours.fabric.clone(), theirs: theirs.fabric.clone() });
    }
    let notify = if ours.immediate && theirs.immediate { NotifyMode::Immediate } else { NotifyMode::Send };
    let most_recvs = if notify == NotifyMode::Send { SEND_RQ_DEPTH } else { u32::MAX };
    let lanes = ours.lanes.iter().zip(&theirs.lanes).map(|(a, b)| depths(a, b, most_recvs)).collect();
    let ring_bytes = ours.rings.iter().zip(&theirs.rings).map(|(a, b)| a.bytes.min(b.bytes)).collect();
    Ok(Agreed {
        fabric: ours.fabric.clone(),
        control: depths(&ours.control, &theirs.control, most_recvs),
        lanes,
        control_ring_bytes: ours.control_ring.bytes.min(theirs.control_ring.bytes),
        ring_bytes,
        max_message_bytes: ours.max_message_bytes.min(theirs.max_message_bytes),
        notify,
    })
}

fn depths(a: &EndpointOffer, b: &EndpointOffer, most_recvs: u32) -> Depths {
    Depths { sq_depth: a.sq_depth.min(b.sq_depth), rq_depth: a.rq_depth.min(b.rq_depth).min(most_recvs) }
}

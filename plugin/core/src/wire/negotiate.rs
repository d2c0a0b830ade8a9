//! What two offers of one fabric agree on: the backends that both have, and the minima.

use crate::notify::NotifyMode;

use super::backends::{Backends, NoCommonBackend};
use super::offer::{EndpointOffer, FabricOffer, OneSidedOffer};
use super::two_sided_offer::TwoSidedOffer;

/// RECVs of an endpoint in send mode at most: each has a slot with memory.
pub const SEND_RQ_DEPTH: u32 = 64;

/// Depths of one connected endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Depths {
    /// Own send queue: the smaller of both sides'.
    pub sq_depth: u32,
    /// RECVs posted at once. Each side posts so many before the first message and starts with so much credit; but for the lanes
    /// of the two-sided backend, which begin with what [`TwoSidedOffer::posted`] says.
    pub rq_depth: u32,
}

/// What both sides compute alike from the two offers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Agreed {
    /// The fabric.
    pub fabric: String,
    /// Longest work request in bytes.
    pub max_message_bytes: u64,
    /// Where both offer the one-sided backend. At least one of the two is there.
    pub one_sided: Option<AgreedOneSided>,
    /// Where both offer the two-sided backend.
    pub two_sided: Option<AgreedTwoSided>,
}

/// For the one-sided backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgreedOneSided {
    /// The control endpoint.
    pub control: Depths,
    /// The lanes in use: the first ones of each side's list.
    pub lanes: Vec<Depths>,
    /// Record ring of the control endpoint in bytes.
    pub control_ring_bytes: u64,
    /// Record ring of each lane in bytes.
    pub ring_bytes: Vec<u64>,
    /// How completion is told.
    pub notify: NotifyMode,
}

/// For the two-sided backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgreedTwoSided {
    /// The control endpoint.
    pub control: Depths,
    /// The lanes in use: the first ones of each side's list.
    pub lanes: Vec<Depths>,
    /// Longest data message: never longer than a work request may be.
    pub slot_bytes: u32,
    /// Transfers that each side takes at once.
    pub request_depth: u32,
    /// Bytes of notifications unacknowledged.
    pub notify_window: u32,
    /// Longest message of a notification.
    pub message_bytes: u32,
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
    /// No part that both have.
    #[error(transparent)]
    NoCommonBackend(#[from] NoCommonBackend),
}

impl Agreed {
    /// Backends that both have.
    pub fn backends(&self) -> Backends {
        Backends { one_sided: self.one_sided.is_some(), two_sided: self.two_sided.is_some() }
    }
}

/// The minima of two offers; symmetric.
///
/// # Errors
/// They are for two fabrics, or have no backend in common.
pub fn negotiate(ours: &FabricOffer, theirs: &FabricOffer) -> Result<Agreed, NegotiateError> {
    if ours.fabric != theirs.fabric {
        return Err(NegotiateError::Fabric { ours: ours.fabric.clone(), theirs: theirs.fabric.clone() });
    }
    ours.backends().common(theirs.backends())?;
    let max_message_bytes = ours.max_message_bytes.min(theirs.max_message_bytes);
    let two_sided = ours.two_sided.as_ref().zip(theirs.two_sided.as_ref());
    Ok(Agreed {
        fabric: ours.fabric.clone(),
        max_message_bytes,
        one_sided: ours.one_sided.as_ref().zip(theirs.one_sided.as_ref()).map(|(a, b)| one_sided(a, b)),
        two_sided: two_sided.map(|(a, b)| two_sided_minima(a, b, max_message_bytes)),
    })
}

fn one_sided(a: &OneSidedOffer, b: &OneSidedOffer) -> AgreedOneSided {
    let notify = if a.immediate && b.immediate { NotifyMode::Immediate } else { NotifyMode::Send };
    let most_recvs = if notify == NotifyMode::Send { SEND_RQ_DEPTH } else { u32::MAX };
    AgreedOneSided {
        control: depths(&a.control, &b.control, most_recvs),
        lanes: a.lanes.iter().zip(&b.lanes).map(|(a, b)| depths(a, b, most_recvs)).collect(),
        control_ring_bytes: a.control_ring.bytes.min(b.control_ring.bytes),
        ring_bytes: a.rings.iter().zip(&b.rings).map(|(a, b)| a.bytes.min(b.bytes)).collect(),
        notify,
    }
}

// The smaller window takes the smaller longest message, since each takes its own.
fn two_sided_minima(a: &TwoSidedOffer, b: &TwoSidedOffer, max_message_bytes: u64) -> AgreedTwoSided {
    let longest = u32::try_from(max_message_bytes).unwrap_or(u32::MAX);
    let lanes = a.lanes.iter().zip(&b.lanes).map(|(a, b)| depths(&a.endpoint, &b.endpoint, u32::MAX));
    AgreedTwoSided {
        control: depths(&a.control, &b.control, u32::MAX),
        lanes: lanes.collect(),
        slot_bytes: a.slot_bytes.min(b.slot_bytes).min(longest),
        request_depth: a.request_depth.min(b.request_depth),
        notify_window: a.notify_window.min(b.notify_window),
        message_bytes: a.message_bytes.min(b.message_bytes),
    }
}

fn depths(a: &EndpointOffer, b: &EndpointOffer, most_recvs: u32) -> Depths {
    Depths { sq_depth: a.sq_depth.min(b.sq_depth), rq_depth: a.rq_depth.min(b.rq_depth).min(most_recvs) }
}

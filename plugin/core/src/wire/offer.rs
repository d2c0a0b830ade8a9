//! What one side offers of a fabric: for each backend its endpoints and the memory that the peer will write into.

use baton_fabric::MAX_RAILS;
use serde::Serialize;
use serde_json::Value;

use super::backends::Backends;
use super::field::{FieldError, Fields};
use super::two_sided_offer::TwoSidedOffer;
use super::{MAX_DEPTH, MAX_FABRICS, MAX_LANES, MAX_SESSION_RECVS, MAX_WORD_BYTES};
use crate::credit::CreditPage;

/// An endpoint of the sender of the message.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EndpointOffer {
    /// What the fabric needs to connect to it, as its `create_endpoint` gave it.
    pub address: Value,
    /// Send-queue depth, 1..=65535.
    pub sq_depth: u32,
    /// Receive-queue depth, 1..=65535.
    pub rq_depth: u32,
    /// The owner's rail that it is on: which keys of the owner's memory serve work requests of the peer endpoint.
    #[serde(skip_serializing_if = "is_first")]
    pub rail: u8,
}

fn is_first(rail: &u8) -> bool {
    *rail == 0
}

/// Registered memory of the sender of the message, into which the peer writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryOffer {
    /// First byte.
    pub addr: u64,
    /// Remote key.
    pub key: u64,
    /// Length, at least 64.
    pub bytes: u64,
}

/// One fabric with sets of endpoints that are ready to be connected, one per backend.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FabricOffer {
    /// The fabric's name.
    pub fabric: String,
    /// The fabric's own address, for the probe.
    pub address: Value,
    /// Longest work request in bytes.
    pub max_message_bytes: u64,
    /// For the one-sided backend; at least one of the two parts is there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub one_sided: Option<OneSidedOffer>,
    /// For the two-sided backend.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub two_sided: Option<TwoSidedOffer>,
}

/// What the one-sided backend needs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OneSidedOffer {
    /// Completion may be told by immediates; absent = true. Unless both sides offer it, SENDs tell.
    pub immediate: bool,
    /// The control endpoint.
    pub control: EndpointOffer,
    /// The data lanes, 1..=64.
    pub lanes: Vec<EndpointOffer>,
    /// Record ring of the control endpoint.
    pub control_ring: MemoryOffer,
    /// Record ring of each lane.
    pub rings: Vec<MemoryOffer>,
    /// Page into which the peer writes its credit words.
    pub credit_page: MemoryOffer,
}

impl EndpointOffer {
    fn decode(value: &Value, path: String) -> Result<Self, FieldError> {
        Self::decode_deep(&Fields::new(value, path)?, 1, 1)
    }

    /// One with queues of at least these depths.
    pub(super) fn decode_deep(fields: &Fields<'_>, least_sq: u32, least_rq: u32) -> Result<Self, FieldError> {
        Ok(Self {
            address: fields.raw("address")?.clone(),
            sq_depth: fields.number_u32("sq_depth", least_sq..=MAX_DEPTH as u32)?,
            rq_depth: fields.number_u32("rq_depth", least_rq..=MAX_DEPTH as u32)?,
            rail: fields.optional_number("rail", 0..=u64::from(MAX_RAILS - 1))?.unwrap_or(0) as u8,
        })
    }
}

impl MemoryOffer {
    fn decode(value: &Value, path: String) -> Result<Self, FieldError> {
        Self::decode_long(value, path, 0)
    }

    /// One of at least so many bytes.
    pub(super) fn decode_long(value: &Value, path: String, least: usize) -> Result<Self, FieldError> {
        let fields = Fields::new(value, path)?;
        let offer = Self {
            addr: fields.number("addr", 0..=u64::MAX)?,
            key: fields.number("key", 0..=u64::MAX)?,
            bytes: fields.number("bytes", (least as u64).max(64)..=1 << 30)?,
        };
        match offer.addr.checked_add(offer.bytes) {
            Some(_) => Ok(offer),
            None => Err(fields.invalid("addr", format!("{} + {} bytes overflows", offer.addr, offer.bytes))),
        }
    }
}

/// RECVs of queues together.
pub(super) fn recvs<'a>(endpoints: impl Iterator<Item = &'a EndpointOffer>) -> u64 {
    endpoints.map(|endpoint| u64::from(endpoint.rq_depth)).sum()
}

impl OneSidedOffer {
    /// RECVs of all its queues together.
    pub fn recvs(&self) -> u64 {
        recvs(self.lanes.iter().chain([&self.control]))
    }

    fn decode(value: &Value, path: String) -> Result<Self, FieldError> {
        let fields = Fields::new(value, path)?;
        let lanes = fields.each("lanes", 1..=MAX_LANES, EndpointOffer::decode)?;
        let page = CreditPage::new(lanes.len() as u8).bytes();
        let offer = Self {
            immediate: fields.flag_or("immediate", true)?,
            control: EndpointOffer::decode(fields.raw("control")?, fields.path("control"))?,
            control_ring: MemoryOffer::decode(fields.raw("control_ring")?, fields.path("control_ring"))?,
            rings: fields.each("rings", 1..=MAX_LANES, MemoryOffer::decode)?,
            credit_page: MemoryOffer::decode_long(
                fields.raw("credit_page")?,
                fields.path("credit_page"),
                page,
            )?,
            lanes,
        };
        if offer.rings.len() == offer.lanes.len() {
            return Ok(offer);
        }
        let (rings, lanes) = (offer.rings.len(), offer.lanes.len());
        Err(fields.invalid("rings", format!("{rings} rings for {lanes} lanes; each lane has one")))
    }
}

impl FabricOffer {
    /// Backends that it has a part for.
    pub fn backends(&self) -> Backends {
        Backends { one_sided: self.one_sided.is_some(), two_sided: self.two_sided.is_some() }
    }

    /// RECVs of all queues together, of both parts.
    pub fn recvs(&self) -> u64 {
        let one_sided = self.one_sided.as_ref().map_or(0, OneSidedOffer::recvs);
        one_sided + self.two_sided.as_ref().map_or(0, TwoSidedOffer::recvs)
    }

    pub(crate) fn decode(value: &Value, path: String) -> Result<Self, FieldError> {
        let fields = Fields::new(value, path.clone())?;
        let part = |key| fields.optional(key).map(|value| (value, fields.path(key)));
        let offer = Self {
            fabric: fields.text("fabric", 1..=MAX_WORD_BYTES)?.to_owned(),
            address: fields.raw("address")?.clone(),
            max_message_bytes: fields.number("max_message_bytes", 4096..=1 << 32)?,
            one_sided: part("one_sided")
                .map(|(value, path)| OneSidedOffer::decode(value, path))
                .transpose()?,
            two_sided: part("two_sided")
                .map(|(value, path)| TwoSidedOffer::decode(value, path))
                .transpose()?,
        };
        if offer.backends() == Backends::default() {
            let reason = "neither one_sided nor two_sided is there; an offer has at least one of them".into();
            return Err(FieldError::Invalid { path, reason });
        }
        match offer.recvs() {
            recvs if recvs > MAX_SESSION_RECVS => Err(FieldError::Range {
                path,
                found: format!("a sum of rq_depth of {recvs}"),
                min: 1,
                max: MAX_SESSION_RECVS,
            }),
            _ => Ok(offer),
        }
    }

    pub(crate) fn decode_list(fields: &Fields<'_>, key: &str) -> Result<Vec<Self>, FieldError> {
        let offers = fields.each(key, 1..=MAX_FABRICS, Self::decode)?;
        for (i, offer) in offers.iter().enumerate() {
            if offers[..i].iter().any(|earlier| earlier.fabric == offer.fabric) {
                return Err(fields.invalid(key, format!("fabric {:?} is offered twice", offer.fabric)));
            }
        }
        Ok(offers)
    }
}

//! What one side offers of a fabric: its endpoints and the memory that the peer will write into.

use baton_fabric::MAX_RAILS;
use serde::Serialize;
use serde_json::Value;

use super::field::{FieldError, Fields};
use super::{MAX_DEPTH, MAX_FABRICS, MAX_LANES, MAX_SESSION_RECVS, MAX_WORD_BYTES};

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

/// One fabric with a set of endpoints that are ready to be connected.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FabricOffer {
    /// The fabric's name.
    pub fabric: String,
    /// The fabric's own address, for the probe.
    pub address: Value,
    /// Longest work request in bytes.
    pub max_message_bytes: u64,
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
        let fields = Fields::new(value, path)?;
        let depth = |key| fields.number_u32(key, 1..=MAX_DEPTH as u32);
        Ok(Self {
            address: fields.raw("address")?.clone(),
            sq_depth: depth("sq_depth")?,
            rq_depth: depth("rq_depth")?,
            rail: fields.optional_number("rail", 0..=u64::from(MAX_RAILS - 1))?.unwrap_or(0) as u8,
        })
    }
}

impl MemoryOffer {
    fn decode(value: &Value, path: String) -> Result<Self, FieldError> {
        let fields = Fields::new(value, path)?;
        let offer = Self {
            addr: fields.number("addr", 0..=u64::MAX)?,
            key: fields.number("key", 0..=u64::MAX)?,
            bytes: fields.number("bytes", 64..=1 << 30)?,
        };
        match offer.addr.checked_add(offer.bytes) {
            Some(_) => Ok(offer),
            None => Err(fields.invalid("addr", format!("{} + {} bytes overflows", offer.addr, offer.bytes))),
        }
    }
}

impl FabricOffer {
    /// RECVs of all queues together.
    pub fn recvs(&self) -> u64 {
        self.lanes.iter().map(|lane| u64::from(lane.rq_depth)).sum::<u64>() + u64::from(self.control.rq_depth)
    }

    pub(crate) fn decode(value: &Value, path: String) -> Result<Self, FieldError> {
        let fields = Fields::new(value, path)?;
        let offer = Self {
            fabric: fields.text("fabric", 1..=MAX_WORD_BYTES)?.to_owned(),
            address: fields.raw("address")?.clone(),
            max_message_bytes: fields.number("max_message_bytes", 4096..=1 << 32)?,
            immediate: fields.flag_or("immediate", true)?,
            control: EndpointOffer::decode(fields.raw("control")?, fields.path("control"))?,
            lanes: fields.each("lanes", 1..=MAX_LANES, EndpointOffer::decode)?,
            control_ring: MemoryOffer::decode(fields.raw("control_ring")?, fields.path("control_ring"))?,
            rings: fields.each("rings", 1..=MAX_LANES, MemoryOffer::decode)?,
            credit_page: MemoryOffer::decode(fields.raw("credit_page")?, fields.path("credit_page"))?,
        };
        if offer.rings.len() != offer.lanes.len() {
            let (rings, lanes) = (offer.rings.len(), offer.lanes.len());
            return Err(
                fields.invalid("rings", format!("{rings} rings for {lanes} lanes; each lane has one"))
            );
        }
        match offer.recvs() {
            recvs if recvs > MAX_SESSION_RECVS => Err(FieldError::Range {
                path: fields.path("lanes"),
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

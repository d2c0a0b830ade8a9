//! Messages on the lifeline: the handshake's connection, kept open for the session.

use serde_json::{Value, json};

use super::field::{FieldError, Fields, number};
use super::{MAX_REVOKE_REGIONS, MAX_TEXT_BYTES, clip};
use crate::ids::{Epoch, RegionId};

/// One lifeline message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LifelineFrame {
    /// The sender ends this epoch: it posts nothing more.
    Fence {
        /// Which.
        epoch: Epoch,
        /// Why, for the log.
        reason: String,
    },
    /// The sender has drained that epoch: nothing of it touches memory any more.
    DrainAck {
        /// Which.
        epoch: Epoch,
    },
    /// The sender closes the session in good order.
    SessionClose {
        /// Why, for the log.
        reason: String,
    },
    /// The sender withdraws regions: post nothing new to them, drain, acknowledge.
    Revoke {
        /// Comes back in the acknowledgement.
        id: u64,
        /// At most [`MAX_REVOKE_REGIONS`].
        regions: Vec<RegionId>,
    },
    /// Nothing of the sender uses the regions of that REVOKE any more.
    RevokeAck {
        /// From REVOKE.
        id: u64,
    },
    /// The receiver broke the protocol; the sender ends the session.
    Violation {
        /// Which rule, which value.
        text: String,
    },
    /// Are you there?
    Ping {
        /// Comes back.
        n: u64,
    },
    /// Yes.
    Pong {
        /// From PING.
        n: u64,
    },
}

/// Why bytes are no lifeline message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LifelineFrameError {
    /// Not JSON.
    #[error("not a JSON object: {0}")]
    Json(String),
    /// A field.
    #[error(transparent)]
    Field(#[from] FieldError),
    /// No such message; within one protocol version there is none.
    #[error("lifeline message {0:?} is unknown")]
    Kind(String),
    /// More regions in one REVOKE than allowed; the sender must split.
    #[error("REVOKE of {0} regions; at most {MAX_REVOKE_REGIONS} fit one message")]
    TooManyRegions(usize),
}

impl LifelineFrame {
    /// Its name on the wire.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Fence { .. } => "FENCE",
            Self::DrainAck { .. } => "DRAIN_ACK",
            Self::SessionClose { .. } => "SESSION_CLOSE",
            Self::Revoke { .. } => "REVOKE",
            Self::RevokeAck { .. } => "REVOKE_ACK",
            Self::Violation { .. } => "VIOLATION",
            Self::Ping { .. } => "PING",
            Self::Pong { .. } => "PONG",
        }
    }

    /// The JSON object; texts are cut to [`MAX_TEXT_BYTES`].
    ///
    /// # Errors
    /// [`LifelineFrameError::TooManyRegions`].
    pub fn encode(&self) -> Result<Vec<u8>, LifelineFrameError> {
        let mut value = match self {
            Self::Fence { epoch, reason } => {
                json!({ "epoch": epoch.0, "reason": clip(reason, MAX_TEXT_BYTES) })
            }
            Self::DrainAck { epoch } => json!({ "epoch": epoch.0 }),
            Self::SessionClose { reason } => json!({ "reason": clip(reason, MAX_TEXT_BYTES) }),
            Self::Revoke { regions, .. } if regions.len() > MAX_REVOKE_REGIONS => {
                return Err(LifelineFrameError::TooManyRegions(regions.len()));
            }
            Self::Revoke { id, regions } => {
                json!({ "id": id, "regions": regions.iter().map(|r| r.0).collect::<Vec<_>>() })
            }
            Self::RevokeAck { id } => json!({ "id": id }),
            Self::Violation { text } => json!({ "text": clip(text, MAX_TEXT_BYTES) }),
            Self::Ping { n } | Self::Pong { n } => json!({ "n": n }),
        };
        value["type"] = self.name().into();
        Ok(value.to_string().into_bytes())
    }

    /// Reads one message.
    ///
    /// # Errors
    /// Whatever is wrong first, by the field's path.
    pub fn decode(json: &[u8]) -> Result<Self, LifelineFrameError> {
        let value: Value =
            serde_json::from_slice(json).map_err(|e| LifelineFrameError::Json(e.to_string()))?;
        let kind = Fields::new(&value, "lifeline")?.text("type", 1..=32)?;
        let fields = Fields::new(&value, kind)?;
        let any = 0..=u64::MAX;
        let epoch = || fields.number_u32("epoch", 1..=u32::MAX).map(Epoch);
        let text = |key| fields.text(key, 0..=MAX_TEXT_BYTES).map(str::to_owned);
        Ok(match kind {
            "FENCE" => Self::Fence { epoch: epoch()?, reason: text("reason")? },
            "DRAIN_ACK" => Self::DrainAck { epoch: epoch()? },
            "SESSION_CLOSE" => Self::SessionClose { reason: text("reason")? },
            "REVOKE" => Self::Revoke {
                id: fields.number("id", any)?,
                regions: fields.each("regions", 1..=MAX_REVOKE_REGIONS, |item, path| {
                    number(item, || path.clone(), 0..=u64::MAX).map(RegionId)
                })?,
            },
            "REVOKE_ACK" => Self::RevokeAck { id: fields.number("id", any)? },
            "VIOLATION" => Self::Violation { text: text("text")? },
            "PING" => Self::Ping { n: fields.number("n", any)? },
            "PONG" => Self::Pong { n: fields.number("n", any)? },
            other => return Err(LifelineFrameError::Kind(other.to_owned())),
        })
    }
}

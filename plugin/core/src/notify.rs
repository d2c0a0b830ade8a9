//! Notifications: records in rings, tails collected into one delivery, exactly once.

mod body;
mod carry;
mod fragments;
mod inbound;
mod record;
mod ring;
mod send;
mod stage;
mod window;

pub use body::{Body, BodyFlags, ID_BYTES, Tell};
pub use carry::{Carry, Standalone, UNCONNECTED_BYTES, UNCONNECTED_MESSAGES};
pub use fragments::{Fragment, FragmentError, MAX_BODY_BYTES, MAX_MESSAGE_BYTES, Reassembly};
pub use inbound::{Arrival, Inbound};
pub use record::{PlainRecord, RECORD_HEADER_BYTES, Record, RecordError, RecordHeader, RecordScope};
pub use ring::{Placement, RECORD_ALIGN, Ring};
pub use send::{NotifyMode, SEND_HEADER_BYTES, SendError, SendHeader};
pub use stage::{Stage, StagePlace};
pub use window::NotifyWindow;

#[cfg(test)]
mod tests;

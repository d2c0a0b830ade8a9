//! The two-sided backend: bulk data by SEND and RECV through bounce slots, no application address or key on the wire.
//!
//! The parts, each a pure state machine or a codec:
//!
//! ```text
//!   codec     control frames, data messages: strict, whole or nothing
//!   pool      bounce slots of an engine, lent to (peer, lane)
//!   channel   one session and epoch: actions for the driver, events for the host; on top of what outlives an epoch:
//!     outbox    own transfers, and whose turn it is          inbox   the peer's transfers, and what became of them
//!     notes     notifications, both ways                     chunks  how a transfer is cut, and which chunks are in
//! ```

pub mod channel;
pub mod chunks;
pub mod codec;
pub mod inbox;
pub mod notes;
mod outbox;
pub mod pool;
pub mod report;
pub mod setup;

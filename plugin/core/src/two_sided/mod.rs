//! The two-sided backend: bulk data by SEND and RECV through bounce slots, no application address or key on the wire.
//!
//! Not yet wired: no engine offers it. The parts, each a pure state machine or a codec:
//!
//! ```text
//!   codec     control frames, data messages: strict, whole or nothing
//!   pool      bounce slots of an engine, lent to (peer, lane)
//! ```

pub mod codec;
pub mod pool;

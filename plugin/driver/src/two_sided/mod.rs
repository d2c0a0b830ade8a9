//! The two-sided backend on a fabric: channels ([`baton_core::two_sided`]) with their slots, bounce slabs and copies.
//!
//! ```text
//!   path     of a peer's channel, for the host's calls      life       its events, its epoch's end
//!   exec     carries out what a channel wants               area       registered memory of the engine's own
//!   bounce   a fabric's pool with its slabs                 bounces    all pools, and the thread that tends them
//!   served   regions that peers may name
//! ```
//! Lock order: whoever holds an [`Executor`] (a peer's lock) may lock [`Bounce`]; never the other way.

mod area;
mod bounce;
#[allow(dead_code, reason = "no handshake makes a path yet")]
mod bounces;

mod exec;
#[allow(dead_code, reason = "no handshake makes a path yet")]
mod life;
#[allow(dead_code, reason = "no handshake makes a path yet")]
mod path;
#[allow(dead_code, reason = "no handshake makes a path yet")]
mod served;

pub use area::Area;
pub use bounce::{Bounce, SharedBounce};
pub use exec::{ChannelArea, Executor, Regions};

pub(crate) use bounces::Bounces;

pub(crate) use path::{Rest, TwoSided};

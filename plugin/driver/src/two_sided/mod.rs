//! The two-sided backend on a fabric: channels ([`baton_core::two_sided`]) with their slots, bounce slabs and copies.
//!
//! ```text
//!   path     of a peer's channel, for the host's calls      life          its events, its epoch's end
//!   exec     decides with the channel                       post          carries out: posts, copies
//!   view     what a channel may look at                     channel_area  memory of one channel
//!   bounce   a fabric's pool with its slabs                 bounces       all pools, and the thread that tends them
//!   served   regions that peers may name                    area          registered memory of the engine's own
//!   rests    of messages, which need no slot                copiers       threads that copy out of slots
//! ```
//! What is registered is gathered where it lies, anything else is copied into a slot of the pool that is lent for that SEND.
//! Lock order: whoever holds an [`Executor`] (a peer's lock) may lock [`Bounce`], which may look up a slab; never the other way.

mod area;
mod bounce;
mod bounces;
mod channel_area;
mod copiers;
mod exec;
mod life;
mod path;
mod post;
mod rests;
mod served;
mod view;

pub use area::Area;
pub use bounce::{Bounce, SharedBounce};
pub use channel_area::ChannelArea;
pub use copiers::{Copiers, copy_threads};
pub use exec::Executor;
pub use view::{Held, Keep, Regions};

pub(crate) use bounces::Bounces;
pub(crate) use life::{Outcome, may_resume};
pub(crate) use path::{MAX_BODY_BYTES, Rest, TwoSided};
pub(crate) use served::{Served, ServedOn};

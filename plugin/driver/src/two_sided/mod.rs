//! Executes two-sided channels ([`baton_core::two_sided`]) on a fabric: bounce slabs, control slots, send slots, copies.
//!
//! Not yet wired: no engine makes one, no handshake negotiates one. Messages are copied into send slots; nothing is gathered yet.
//! Lock order: whoever holds an [`Executor`] may lock [`Bounce`]; never the other way.

mod area;
mod bounce;
mod exec;

pub use area::Area;
pub use bounce::{Bounce, SharedBounce};
pub use exec::{ChannelArea, Executor, Regions};

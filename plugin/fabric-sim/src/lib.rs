//! A seeded simulator of NICs: several nodes with memory of their own, a network that delays, reorders, stalls, partitions and
//! kills, and a clock that only moves when told to.
//!
//! Everything that happens is an event with a virtual time; every choice comes from one generator. So the same seed and the same
//! calls give the same run, bit by bit ([`SimWorld::digest`]). No real time, no thread.
//!
//! What it does to a protocol on purpose, all of it allowed by reliable connections:
//! * A work request reads its source when it starts, a moment after `post`, and may read it again until it completes: whoever
//!   changes it before stops the run; a WRITE lands in pieces at several instants.
//! * A READ samples the target piece by piece, possibly after later WRITEs, SENDs and immediates of the same endpoint; only a
//!   fenced extra waits for it.
//! * Endpoints run at their own pace, so what was posted first on one may arrive last.
//! * Completions of different endpoints come out of `poll` in an order of their own.
//! * A send-queue slot is free only once a completion that covers it was *polled*; one post too many is refused.
//! * Without a RECV an immediate fails at once (by default): with correct credits that never happens.
//! * Where heads are received ([`SimConfig::headed_bytes`]), the rest of a message is sometimes all there when it is asked for, or gone with
//!   its sender, and sometimes comes in pieces, some of which are placed before the others are there.
//! * When an endpoint dies, acknowledgements on their way back may be lost: what failed here may have arrived there.
//! * A fenced endpoint goes on for a moment, here and at its peer, before it is quiet.

mod config;
mod endpoint;
mod fabric;
mod heads;
mod memory;
mod nic;
mod receive;
mod rng;
mod source;
mod world;

pub use config::{Sabotage, SimConfig};
pub use fabric::SimFabric;
pub use rng::Rng;
pub use world::SimWorld;

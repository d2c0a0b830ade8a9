//! The RDMA fabric: reliable connections over libibverbs.
//!
//! * [`config`]: its settings.
//! * [`choose`]: what it decides from facts about devices and peers, without touching any: GID, port, rail, MTU, depth.

pub mod choose;
pub mod config;

pub use config::VerbsConfig;

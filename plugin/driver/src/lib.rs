//! The shell around the protocol: threads, clock, handshake listener and registration.
//!
//! A newcomer's map: [`Driver`] (`engine.rs`, `register.rs`, `work.rs`, `stats.rs`) is what plugin/engine exports, over what all threads share
//! (`shared.rs`); a peer instance is `peer.rs`;
//! its session is made by `connect.rs` or `listen.rs`, opened by `open.rs` and ended by `epoch.rs`; `progress.rs` moves completions to sessions and
//! sessions to fabrics, `hand_over.rs` notifications to the host; `service.rs` is the thread that sleeps on events. `blocks.rs` keeps lists of blocks, `managed/` the engine's own buffers, `landed.rs` ids of transfers
//! that have landed. [`two_sided`] carries out two-sided channels (PROTOCOL §6).

mod blocks;
mod channel;
mod clock;
mod config;
mod connect;
mod dial;
mod endpoints;
mod engine;
mod epoch;
mod error;
mod halt;
mod hand_over;
mod host_calls;
mod host_copy;
mod inbox;
mod landed;
mod lane_map;
mod lifeline;
mod linger;
mod listen;
mod managed;
mod memory;
mod names;
mod open;
mod peer;
mod progress;
mod region;
mod register;
mod revoke;
mod selfcopy;
mod service;
mod shared;
mod slots;
mod spin;
mod stats;
mod threads;
mod transfer;
pub mod two_sided;
mod work;

pub use baton_core::notify::{NotifyMode, Tell};
pub use baton_core::wire::Backends;
pub use config::{Candidate, Config};
pub use engine::Driver;
pub use error::{Code, Error, Result};
pub use hand_over::Taker;
pub use inbox::{HookFn, HostEvent, Inbox, Notification};
pub use listen::ListenSpec;
pub use managed::{MAX_MANAGED_BUFFERS, MAX_MANAGED_BYTES};
pub use threads::ThreadStart;
pub use transfer::{Status, Xfer};
pub use work::{Desc, NO_REGION};

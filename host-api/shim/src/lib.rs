//! What a Rust host links: choose, load and use a Baton engine.
//!
//! ```no_run
//! use baton_host::{Engine, EngineOptions, Op};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let engine = Engine::open(EngineOptions::new("decode-0"))?;
//! let info: Vec<u8> = engine.conn_info()?; // to the peer, secretly
//! # let (peer_info, peer_region) = (Vec::new(), Vec::new());
//! engine.load_remote("prefill-0", &peer_info)?;
//! let mut blocks = vec![0u8; 1 << 20];
//! // SAFETY: `blocks` outlives the region and is not touched while a transfer runs.
//! let region = unsafe { engine.register(blocks.as_mut_ptr(), blocks.len(), Default::default())? };
//! let remote = engine.import_region("prefill-0", &peer_region)?;
//! let read = engine.create_xfer(Op::Read, "prefill-0", &[region.desc(0, 4096)], &[remote.desc(0x1000, 4096)])?;
//! read.post(Some(b"request 7 is read"))?;
//! # Ok(())
//! # }
//! ```
//!
//! Which engine is loaded and how it works is decided at run time: see [`settings`].

mod aliases;
mod compare;
mod elf;
mod engine;
mod error;
mod inner;
mod load;
mod log;
mod managed;
mod notify;
mod region;
#[cfg(feature = "rust-door")]
mod rust_door;
mod select;
pub mod settings;
mod transfer;

pub use aliases::{ALIASES, Alias, Note};
pub use baton_abi as abi;
pub use baton_abi::{BatonDesc as Desc, BatonMemory};
pub use compare::{AbiVersion, Mismatch};
pub use elf::ElfError;
pub use engine::{Engine, EngineOptions, Environment, Op, probe};
pub use error::{Error, ErrorCode, OpenError, Status};
pub use load::{Door, ENGINE_FILE, LoadError, Place, Plugin, find, load};
pub use log::{Level, LogFn, LogTo};
pub use managed::ManagedBuffer;
pub use notify::{Event, Notification};
pub use region::{Access, BlockList, Memory, MemoryKind, Region, RemoteRegion};
pub use select::{Choice, Chosen, SelectError, Source, config_path, select};
pub use transfer::Transfer;

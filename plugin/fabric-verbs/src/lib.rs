//! The RDMA fabric: reliable connections over libibverbs.
//!
//! * [`config`]: its settings.
//! * [`choose`]: what it decides from facts about devices and peers, without touching any: GID, port, rail, MTU, depth.
//! * [`VerbsFabric`]: devices, queue pairs, completion queues and memory regions behind the fabric seam.

pub mod choose;
pub mod config;

mod create;
mod cuda;
mod endpoint;
mod fabric;
mod flush;
mod interfaces;
mod memory;
mod probe;
mod queue;
mod rail;
mod table;
mod vram;
mod wake;

pub use config::VerbsConfig;
pub use cuda::{Cuda, CudaApi, CudaError};
pub use fabric::VerbsFabric;
pub use vram::Accelerators;

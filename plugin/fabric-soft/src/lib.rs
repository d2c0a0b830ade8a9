//! A software NIC for hosts without one, with the semantics of reliable connections.
//!
//! * [`local`]: both processes on one host. Only the owner of the memory being written copies into it, with
//!   `process_vm_readv`.
//! * [`tcp`]: any two hosts; gathered sends from registered memory, received straight into registered memory.
//!
//! Both keep their registrations in the same kind of table: keys and bounds are checked by the owner of the memory,
//! and after `deregister` nothing lands in it any more, whatever a peer has in flight.

mod lists;
pub mod local;
mod regions;
mod store;
pub mod tcp;

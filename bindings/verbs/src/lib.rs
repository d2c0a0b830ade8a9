//! The verbs of RDMA, opened at run time.
//!
//! The only crate that names `ibv_*`. Types and the inline verbs come from rdma-sys; what libibverbs *exports* is looked up in
//! the library when it is opened ([`Library`]), so a program that links this crate starts on machines that have no libibverbs. On
//! top stand owning types whose lifetimes follow the hardware's rules: a device's [`Context`] outlives its [`Pd`], which outlives
//! [`Mr`], [`Cq`] and [`Qp`].
//!
//! rdma-sys 0.3.0 has traps that this crate steps around: its `ibv_query_port` is the library's *old* symbol, which fills a
//! shorter structure than the type it is declared with; its check for an extended context compares with 32 bits, so on 64-bit
//! machines no extended verb is ever found; its `ibv_event_type` is a Rust enum, so an event it does not know would be undefined
//! behaviour; optional access flags need `ibv_reg_mr_iova2`; and `ibv_post_send` *returns* its errno.

#![cfg(feature = "verbs")]

mod api;
mod cq;
mod device;
mod error;
#[cfg(feature = "fake")]
pub mod fake;
mod library;
mod memory;
mod post;
mod qp;

pub use api::Api;
pub use cq::{Channel, Cq, Status, Wc, WcBuffer, WcOpcode};
pub use device::{
    AsyncEvent, Context, DeviceAttr, DeviceInfo, GidEntry, GidType, LinkLayer, PortAttr, PortState,
    SOFT_ROCE_VENDOR,
};
pub use error::VerbsError;
pub use library::{Library, LibraryError};
pub use memory::{Access, Mr, Pd};
pub use post::{Opcode, PostFailed, RecvChain, SendChain, SendFlags};
pub use qp::{Connection, PathMtu, Qp, QpCap, QpConfig, QpState};

/// The types of rdma-sys, for whoever implements a provider.
pub mod sys {
    pub use rdma_sys::*;
}

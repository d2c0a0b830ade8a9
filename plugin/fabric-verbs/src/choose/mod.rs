//! What the fabric decides from facts about devices and peers. Pure: values in, a value with its reasons or a
//! named error out.
#![forbid(unsafe_code)]

pub mod address;
pub mod gid;
pub mod limits;
pub mod ports;
pub mod rails;
mod types;

pub use address::{AddressError, EndpointAddress, FabricAddress, PeerRail};
pub use gid::{GidChoice, GidError, GidQuery};
pub use limits::{AckTime, mtu, read_depth};
pub use ports::{DeviceFacts, PortFacts, Ports, PortsError, Rail, Skipped};
pub use rails::{PairError, Pairing, Reach};
pub use types::{Gid, GidEntry, GidType, LinkLayer, Mtu, PortState, Scope, Subnet, Transport};

// A rail past the seam's limit could not be named in an offer.
const _: () = assert!(ports::MAX_RAILS == baton_fabric::MAX_RAILS as usize);

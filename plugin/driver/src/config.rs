//! What an engine is made from, and what peers are told of where it is.

use crate::err;
use crate::error::Result;
use crate::listen::ListenSpec;
use crate::threads::ThreadStart;
use baton_core::notify::NotifyMode;
use baton_core::wire::{Backends, ConnInfo, ConnInfoError, HostId, MAX_CANDIDATES, MAX_FABRIC_ADDRESS_BYTES};
use baton_fabric::Fabric;
use serde_json::Value;
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

/// What an engine is made from.
#[derive(Clone, Debug)]
pub struct Config {
    /// The agent's name.
    pub agent_name: String,
    /// The backends in use; with both, the engine chooses for each transfer.
    pub backends: Backends,
    /// What the host asked for, for `stats`.
    pub requested: String,
    /// Why fabrics that were asked for or could have been are not there.
    pub notes: Vec<String>,
    /// Where to listen; any address and port by default.
    pub listen: Option<ListenSpec>,
    /// Addresses to tell to peers, the preferred first.
    pub candidates: Vec<Candidate>,
    /// A spinning progress thread is permitted.
    pub progress_thread: bool,
    /// How long it spins after the last work, 0 for never.
    pub spin_us: u32,
    /// How completion is to be told; SENDs also where a fabric or a peer has no immediates.
    pub notify: NotifyMode,
    /// The fabric, by its place, that takes notifications and no transfers: where all others fail.
    pub notify_only: Option<usize>,
    /// Multiplies all protocol deadlines.
    pub timeout_scale: u32,
    /// Threads that copy out of bounce memory what is much at once; 0 for none.
    pub copy_threads: usize,
    /// Longest work request, 1 to 4 MiB; sessions may ask for shorter ones.
    pub chunk_bytes: u32,
    /// What every thread of the engine does first.
    pub thread_start: Option<ThreadStart>,
}

/// An address that peers are told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Address.
    pub ip: IpAddr,
    /// Scope of a link-local v6 address.
    pub scope: Option<String>,
    /// Port, if another than the listener's (a mapped one).
    pub port: Option<u16>,
}

impl Candidate {
    fn text(&self, listener_port: u16) -> String {
        let port = self.port.filter(|port| *port != 0).unwrap_or(listener_port);
        match (&self.ip, &self.scope) {
            (IpAddr::V4(ip), _) => format!("{ip}:{port}"),
            (IpAddr::V6(ip), None) => format!("[{ip}]:{port}"),
            (IpAddr::V6(ip), Some(scope)) => format!("[{ip}%{scope}]:{port}"),
        }
    }
}

/// What peers are told. The port of an address is the listener's unless a mapped one is given.
pub(crate) fn candidates(config: &Config, spec: &ListenSpec, port: u16) -> Vec<String> {
    let mut told = config.candidates.clone();
    if !spec.addr.is_unspecified() {
        told.retain(|candidate| candidate.port.is_some() || candidate.ip == spec.addr);
        if told.is_empty() {
            told.push(Candidate { ip: spec.addr, scope: None, port: None });
        }
    } else if spec.addr.is_ipv4() {
        told.retain(|candidate| candidate.port.is_some() || candidate.ip.is_ipv4());
    }
    if told.is_empty() {
        told.push(Candidate { ip: Ipv4Addr::LOCALHOST.into(), scope: None, port: None });
    }
    told.iter().take(MAX_CANDIDATES).map(|candidate| candidate.text(port)).collect()
}

/// Where the fabrics are, for peers that choose endpoints before they have heard of ours. A long one is left out: it is a hint.
pub(crate) fn fabric_addresses(fabrics: &[Arc<dyn Fabric>]) -> BTreeMap<String, Value> {
    let told = fabrics.iter().map(|fabric| (fabric.name().to_owned(), fabric.address()));
    told.filter(|(name, address)| {
        let bytes = address.to_string().len();
        if bytes > MAX_FABRIC_ADDRESS_BYTES {
            tracing::warn!(
                "fabric {name}: its address of {bytes} bytes is not in the connection information, which takes \
                 {MAX_FABRIC_ADDRESS_BYTES}; peers choose their devices without it"
            );
        }
        bytes <= MAX_FABRIC_ADDRESS_BYTES
    })
    .collect()
}

/// With all addresses of fabrics if there is room for them, else with none.
pub(crate) fn encode_conn_info(info: ConnInfo) -> Result<Vec<u8>> {
    let encoded = match info.encode() {
        Err(e @ ConnInfoError::TooLong(_)) if !info.addresses.is_empty() => {
            tracing::warn!(
                "{e}; it goes out without the addresses of fabrics, peers choose their devices without them"
            );
            ConnInfo { addresses: BTreeMap::new(), ..info }.encode()
        }
        encoded => encoded,
    };
    encoded.map_err(|e| err!(InvalidParam, "{e}"))
}

/// Kernel and process name space.
pub(crate) fn host_id() -> HostId {
    use std::os::unix::fs::MetadataExt;
    let boot_id =
        std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned();
    let pid_ns = std::fs::metadata("/proc/self/ns/pid").map(|meta| meta.ino()).unwrap_or(0);
    HostId { boot_id, pid_ns }
}

//! Which ports of which devices become rails.

use std::fmt;
use std::net::IpAddr;

use super::gid::{GidQuery, gid};
use super::types::{Gid, GidEntry, LinkLayer, Mtu, PortState, Subnet, Transport};
use crate::config::{DeviceFilter, DevicePort, VerbsConfig};

/// Rails of one fabric at most.
pub const MAX_RAILS: usize = 16;

/// What is known of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceFacts {
    /// Its name.
    pub name: String,
    /// Its protocol.
    pub transport: Transport,
    /// Why it cannot be used at all, such as the system's answer to opening it.
    pub failure: Option<String>,
    /// Its ports.
    pub ports: Vec<PortFacts>,
}

/// What is known of a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortFacts {
    /// Its number, from 1.
    pub number: u8,
    /// Its state.
    pub state: PortState,
    /// What carries its packets.
    pub link: LinkLayer,
    /// Its address on InfiniBand; 0 on Ethernet.
    pub lid: u16,
    /// Its active MTU.
    pub mtu: Mtu,
    /// Its speed; 0 if unknown.
    pub speed_mbps: u64,
    /// The NUMA node it is near to.
    pub numa_node: Option<u16>,
    /// Size of its GID table.
    pub gid_table_len: u32,
    /// What is in that table; zero entries may be left out.
    pub gids: Vec<GidEntry>,
}

/// A port that is used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rail {
    /// Name of the device.
    pub device: String,
    /// The port.
    pub port: u8,
    /// Its GID and where that stands.
    pub gid: GidEntry,
    /// Length of the prefix of the GID's network, where an interface's address tells it.
    pub prefix_len: Option<u8>,
    /// What carries its packets.
    pub link: LinkLayer,
    /// Its address on InfiniBand; 0 on Ethernet.
    pub lid: u16,
    /// Its active MTU.
    pub mtu: Mtu,
    /// Its speed; 0 if unknown.
    pub speed_mbps: u64,
    /// The NUMA node it is near to.
    pub numa_node: Option<u16>,
    /// `BATON_DEVICES` names it.
    pub named: bool,
}

impl fmt::Display for Rail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} port {} ({})", self.device, self.port, place(self.gid.gid, self.link, self.prefix_len))
    }
}

/// A GID and its network, for people.
pub(super) fn place(gid: Gid, link: LinkLayer, prefix_len: Option<u8>) -> String {
    match (link, prefix_len) {
        (LinkLayer::Ethernet, Some(bits)) => format!("{}/{bits}", gid.ip()),
        (LinkLayer::Ethernet, None) => gid.ip().to_string(),
        _ => format!("{gid}, subnet {:016x}", gid.subnet_prefix()),
    }
}

/// A port or device that is not used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Skipped {
    /// The device.
    pub device: String,
    /// The port; `None`: the whole device.
    pub port: Option<u8>,
    /// Why.
    pub reason: String,
    /// A change of the port or of its GID table may make it usable.
    pub transient: bool,
}

impl fmt::Display for Skipped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reason)
    }
}

/// The rails, and why there are not more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ports {
    /// In order of devices and ports; the place in here is the rail's index.
    pub rails: Vec<Rail>,
    /// What is not used.
    pub skipped: Vec<Skipped>,
    /// How each GID was chosen, and other lines for the log.
    pub notes: Vec<String>,
}

/// Why there are no rails, or not those that were asked for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PortsError {
    /// The machine has no RDMA device.
    #[error("no RDMA device on this host")]
    NoDevices,
    /// `BATON_DEVICES` names one that does not exist.
    #[error("BATON_DEVICES names {wanted}, which is not there; there are {known}")]
    NoSuchDevice {
        /// What was asked for.
        wanted: String,
        /// Those that exist.
        known: String,
    },
    /// `BATON_DEVICES` names one that cannot be used.
    #[error("BATON_DEVICES names {wanted}, which cannot be used: {reason}")]
    Unusable {
        /// What was asked for.
        wanted: String,
        /// Why not.
        reason: String,
        /// A change of the port or of its GID table may help.
        transient: bool,
    },
    /// None can be used.
    #[error("no usable RDMA device: {reasons}")]
    NoneUsable {
        /// Why not, one by one.
        reasons: String,
    },
}

/// Chooses. `addresses` are those of this host's interfaces, `wanted` what it shall be reached at besides the configured.
pub fn ports(
    config: &VerbsConfig,
    devices: &[DeviceFacts],
    addresses: &[Subnet],
    wanted: &[Subnet],
) -> Result<Ports, PortsError> {
    let mut notes = Vec::new();
    check_names(&config.devices, devices, &mut notes)?;
    if devices.is_empty() {
        return Err(PortsError::NoDevices);
    }
    let wanted: Vec<Subnet> =
        wanted.iter().copied().chain(config.wanted.iter().map(|ip| network_of(*ip, addresses))).collect();
    let mut rails: Vec<Rail> = Vec::new();
    let mut skipped = Vec::new();
    for device in devices {
        if let Some(reason) = unusable_device(device) {
            let transient = false;
            let reason = format!("device {}: {reason}", device.name);
            skipped.push(Skipped { device: device.name.clone(), port: None, reason, transient });
            continue;
        }
        for port in &device.ports {
            let judged = if rails.len() < MAX_RAILS {
                judge(config, device, port, addresses, &wanted)
            } else {
                Err((format!("there are {MAX_RAILS} rails already, the limit"), false))
            };
            match judged {
                Ok((rail, note)) => {
                    rails.push(rail);
                    notes.push(note);
                }
                Err((reason, transient)) => skipped.push(Skipped {
                    device: device.name.clone(),
                    port: Some(port.number),
                    reason: named_reason(device, port, &reason),
                    transient,
                }),
            }
        }
    }
    check_result(&config.devices, &rails, &skipped)?;
    Ok(Ports { rails, skipped, notes })
}

/// The network of an address of this host; of another's, nothing but the address is known.
fn network_of(ip: IpAddr, addresses: &[Subnet]) -> Subnet {
    let own = addresses.iter().copied().find(|address| address.ip == ip);
    own.unwrap_or(Subnet { ip, prefix_len: if ip.is_ipv4() { 32 } else { 128 } })
}

fn named_reason(device: &DeviceFacts, port: &PortFacts, reason: &str) -> String {
    let whose = format!("device {} port {}", device.name, port.number);
    if reason.starts_with(&whose) { reason.to_owned() } else { format!("{whose}: {reason}") }
}

fn unusable_device(device: &DeviceFacts) -> Option<String> {
    match (&device.failure, device.transport) {
        (_, Transport::Iwarp) => Some(
            "iWARP is not supported: its connections are set up by another way and lack immediates"
                .to_owned(),
        ),
        (_, Transport::Other(n)) => Some(format!("transport {n} has no reliable connections of InfiniBand")),
        (Some(why), _) => Some(why.clone()),
        (None, _) if device.ports.is_empty() => Some("it has no port".to_owned()),
        _ => None,
    }
}

/// Whether the port becomes a rail; else why not, and whether that may change.
fn judge(
    config: &VerbsConfig,
    device: &DeviceFacts,
    port: &PortFacts,
    addresses: &[Subnet],
    wanted: &[Subnet],
) -> Result<(Rail, String), (String, bool)> {
    let covers = |list: &[DevicePort]| list.iter().any(|named| named.covers(&device.name, port.number));
    match &config.devices {
        DeviceFilter::Only(list) if !covers(list) => return Err(("not in BATON_DEVICES".to_owned(), false)),
        DeviceFilter::Except(list) if covers(list) => {
            return Err(("left out by BATON_DEVICES".to_owned(), false));
        }
        _ => {}
    }
    match port.state {
        PortState::Active | PortState::ActiveDefer => {}
        state => return Err((format!("its state is {state}, not ACTIVE"), true)),
    }
    if let LinkLayer::Other(_) = port.link {
        return Err((format!("{} is neither InfiniBand nor Ethernet", port.link), false));
    }
    if port.link == LinkLayer::InfiniBand && port.lid == 0 {
        return Err(("no subnet manager has given it an address (LID 0)".to_owned(), true));
    }
    let choice = gid(&GidQuery {
        device: &device.name,
        port: port.number,
        link: port.link,
        table_len: port.gid_table_len,
        entries: &port.gids,
        wanted,
        explicit: config.gid_index,
    })
    .map_err(|error| (error.to_string(), error.is_transient()))?;
    let ip = choice.entry.gid.ip();
    let prefix_len = addresses
        .iter()
        .find(|address| port.link == LinkLayer::Ethernet && address.ip == ip)
        .map(|address| address.prefix_len);
    let rail = Rail {
        device: device.name.clone(),
        port: port.number,
        gid: choice.entry,
        prefix_len,
        link: port.link,
        lid: port.lid,
        // Peers are told what is used, so that both ends of a path come to the same.
        mtu: config.mtu.map_or(port.mtu, |limit| port.mtu.min(limit)),
        speed_mbps: port.speed_mbps,
        numa_node: port.numa_node,
        named: matches!(config.devices, DeviceFilter::Only(_)),
    };
    Ok((rail, choice.log))
}

fn check_names(
    filter: &DeviceFilter,
    devices: &[DeviceFacts],
    notes: &mut Vec<String>,
) -> Result<(), PortsError> {
    let there = |named: &DevicePort| {
        let device = devices.iter().find(|device| device.name == named.device);
        device.is_some_and(|device| {
            // The ports of one that could not be opened are unknown; it has an error of its own.
            device.failure.is_some()
                || named.port.is_none_or(|number| device.ports.iter().any(|port| port.number == number))
        })
    };
    let known = || {
        let list: Vec<String> = devices
            .iter()
            .flat_map(|device| match device.ports.as_slice() {
                [] => vec![device.name.clone()],
                ports => ports.iter().map(|port| format!("{}:{}", device.name, port.number)).collect(),
            })
            .collect();
        if list.is_empty() { "none".to_owned() } else { list.join(", ") }
    };
    match filter {
        DeviceFilter::All => Ok(()),
        DeviceFilter::Only(list) => match list.iter().find(|named| !there(named)) {
            Some(named) => Err(PortsError::NoSuchDevice { wanted: named.to_string(), known: known() }),
            None => Ok(()),
        },
        // One list may serve many hosts, of which not all have what it leaves out.
        DeviceFilter::Except(list) => {
            for named in list.iter().filter(|named| !there(named)) {
                notes.push(format!(
                    "BATON_DEVICES leaves out {named}, which is not there; there are {}",
                    known()
                ));
            }
            Ok(())
        }
    }
}

fn check_result(filter: &DeviceFilter, rails: &[Rail], skipped: &[Skipped]) -> Result<(), PortsError> {
    if let DeviceFilter::Only(list) = filter {
        for named in list {
            if rails.iter().any(|rail| named.covers(&rail.device, rail.port)) {
                continue;
            }
            let why: Vec<&Skipped> = skipped
                .iter()
                .filter(|skipped| {
                    skipped
                        .port
                        .map_or(skipped.device == named.device, |port| named.covers(&skipped.device, port))
                })
                .collect();
            return Err(PortsError::Unusable {
                wanted: named.to_string(),
                reason: joined(&why),
                transient: why.iter().any(|skipped| skipped.transient),
            });
        }
    }
    if rails.is_empty() {
        return Err(PortsError::NoneUsable { reasons: joined(&skipped.iter().collect::<Vec<_>>()) });
    }
    Ok(())
}

fn joined(list: &[&Skipped]) -> String {
    list.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
#[path = "ports_tests.rs"]
mod tests;

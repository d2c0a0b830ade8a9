//! Which entry of a port's GID table to use.
//!
//! Tables list a link-local address first and shift when addresses come and go, so neither the first entry nor a
//! fixed index is a choice: the entries are ranked by what they can reach.

use super::types::{Gid, GidEntry, GidType, LinkLayer, Scope, Subnet};

/// What the choice is made from.
#[derive(Clone, Copy, Debug)]
pub struct GidQuery<'a> {
    /// Name of the device.
    pub device: &'a str,
    /// The port.
    pub port: u8,
    /// What carries its packets.
    pub link: LinkLayer,
    /// Size of its table, empty places included.
    pub table_len: u32,
    /// What is in the table; zero entries may be left out.
    pub entries: &'a [GidEntry],
    /// Addresses or networks that this host shall be reached at, such as those of `BATON_LISTEN`; may be empty.
    pub wanted: &'a [Subnet],
    /// `BATON_GID_INDEX`.
    pub explicit: Option<u8>,
}

/// The entry to use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GidChoice {
    /// The entry.
    pub entry: GidEntry,
    /// Every candidate and why this one: a line for the log.
    pub log: String,
}

/// Why there is none.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GidError {
    /// The configured index is past the table.
    #[error(
        "device {device} port {port}: GID index {index} is not there, its table has {table_len} entries; \
         usable are {usable} (BATON_GID_INDEX)"
    )]
    NoSuchIndex {
        /// The device.
        device: String,
        /// The port.
        port: u8,
        /// The configured index.
        index: u8,
        /// Entries of the table.
        table_len: u32,
        /// Those that could be used.
        usable: String,
    },
    /// The configured index holds no GID.
    #[error(
        "device {device} port {port}: GID index {index} of {table_len} is {found}; usable are {usable} (BATON_GID_INDEX)"
    )]
    Unusable {
        /// The device.
        device: String,
        /// The port.
        port: u8,
        /// The configured index.
        index: u8,
        /// Entries of the table.
        table_len: u32,
        /// What is there.
        found: String,
        /// Those that could be used.
        usable: String,
    },
    /// No entry can be used yet: the port's network interface has no address. It may get one.
    #[error(
        "device {device} port {port}: none of the {table_len} entries of its GID table can be used ({why}); \
         give its network interface an address"
    )]
    NoGid {
        /// The device.
        device: String,
        /// The port.
        port: u8,
        /// Entries of the table.
        table_len: u32,
        /// What is there.
        why: String,
    },
}

impl GidError {
    /// Whether a change of the GID table may help: ask again then.
    pub fn is_transient(&self) -> bool {
        match self {
            GidError::Unusable { .. } | GidError::NoGid { .. } => true,
            GidError::NoSuchIndex { .. } => false,
        }
    }
}

/// Rank of an entry; the smallest is the best.
///
/// On Ethernet: RoCE v2 before v1; what one of the wanted addresses names before what only shares its network; then by
/// [`Scope`]; one whose interface is in sight before one that may belong to another network namespace; then the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    old: bool,
    link_local: bool,
    wanted: Wanted,
    scope: Scope,
    no_interface: bool,
    index: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Wanted {
    Address,
    Network,
    No,
}

/// Chooses.
pub fn gid(query: &GidQuery<'_>) -> Result<GidChoice, GidError> {
    match query.explicit {
        Some(index) => explicit(query, index),
        None if query.link == LinkLayer::Ethernet => ranked(query),
        None => first(query),
    }
}

fn explicit(query: &GidQuery<'_>, index: u8) -> Result<GidChoice, GidError> {
    let device = query.device.to_owned();
    let (port, table_len) = (query.port, query.table_len);
    if u32::from(index) >= table_len {
        return Err(GidError::NoSuchIndex { device, port, index, table_len, usable: usable(query) });
    }
    let entry = query.entries.iter().find(|entry| entry.index == index);
    match entry {
        Some(entry) if is_usable(query.link, entry) => {
            let note = match rank(query, entry) {
                Rank { old: true, .. } => ", RoCE v1 is not routed",
                Rank { link_local: true, .. } => ", link-local: it reaches one link only",
                _ => "",
            };
            Ok(GidChoice { entry: entry.clone(), log: told(query, &format!("{entry} as configured{note}")) })
        }
        other => {
            let found = match other {
                Some(entry) if !entry.gid.is_zero() => format!("{}, which names nobody", entry.gid),
                _ => "empty".to_owned(),
            };
            Err(GidError::Unusable { device, port, index, table_len, found, usable: usable(query) })
        }
    }
}

fn ranked(query: &GidQuery<'_>) -> Result<GidChoice, GidError> {
    let candidates = query.entries.iter().filter(|entry| is_usable(query.link, entry));
    let Some(best) = candidates.min_by_key(|entry| rank(query, entry)) else {
        return Err(no_gid(query));
    };
    let Rank { old, link_local, wanted, scope, .. } = rank(query, best);
    let why = match (old, link_local, wanted, scope) {
        (true, ..) => "RoCE v1, as there is no RoCE v2",
        (_, true, ..) => "link-local, as there is no routable one",
        (_, _, Wanted::Address, _) => "RoCE v2 at a wanted address",
        (_, _, Wanted::Network, _) => "RoCE v2 in a wanted network",
        (_, _, _, Scope::V4) => "RoCE v2 at an IPv4 address",
        (_, _, _, Scope::UniqueLocal) => "RoCE v2 at a unique local IPv6 address",
        _ => "RoCE v2 at a global IPv6 address",
    };
    Ok(GidChoice { entry: best.clone(), log: told(query, &format!("{best}: {why}")) })
}

/// InfiniBand: the first entry is made of the subnet manager's prefix and the port's identity.
fn first(query: &GidQuery<'_>) -> Result<GidChoice, GidError> {
    let entry = query.entries.iter().find(|entry| entry.index == 0 && is_usable(query.link, entry));
    let entry = entry.ok_or_else(|| no_gid(query))?;
    Ok(GidChoice { entry: entry.clone(), log: told(query, &format!("{entry}: the port's own")) })
}

fn is_usable(link: LinkLayer, entry: &GidEntry) -> bool {
    match link {
        LinkLayer::Ethernet => entry.kind != GidType::InfiniBand && entry.gid.scope() != Scope::Nobody,
        _ => !entry.gid.is_zero(),
    }
}

fn rank(query: &GidQuery<'_>, entry: &GidEntry) -> Rank {
    let scope = entry.gid.scope();
    let ethernet = query.link == LinkLayer::Ethernet;
    Rank {
        old: ethernet && entry.kind == GidType::RoceV1,
        link_local: ethernet && scope == Scope::LinkLocal,
        wanted: wanted(query.wanted, entry.gid),
        scope,
        no_interface: entry.netdev.is_none(),
        index: entry.index,
    }
}

fn wanted(list: &[Subnet], gid: Gid) -> Wanted {
    let ip = gid.ip();
    if list.iter().any(|subnet| subnet.ip == ip) {
        Wanted::Address
    } else if list.iter().any(|subnet| subnet.prefix_len > 0 && subnet.contains(ip)) {
        Wanted::Network
    } else {
        Wanted::No
    }
}

fn no_gid(query: &GidQuery<'_>) -> GidError {
    let found: Vec<String> =
        query.entries.iter().filter(|entry| !entry.gid.is_zero()).map(ToString::to_string).collect();
    let why = if found.is_empty() { "all are zero".to_owned() } else { found.join(", ") };
    GidError::NoGid { device: query.device.to_owned(), port: query.port, table_len: query.table_len, why }
}

fn usable(query: &GidQuery<'_>) -> String {
    let list: Vec<String> =
        query.entries.iter().filter(|entry| is_usable(query.link, entry)).map(ToString::to_string).collect();
    if list.is_empty() { "none".to_owned() } else { list.join(", ") }
}

fn told(query: &GidQuery<'_>, what: &str) -> String {
    format!("device {} port {}: GID {what}; candidates: {}", query.device, query.port, usable(query))
}

#[cfg(test)]
#[path = "gid_tests.rs"]
mod tests;

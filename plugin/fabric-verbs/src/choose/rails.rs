//! Which own rail talks to which rail of a peer.
//!
//! Rails are paired by what their GIDs can reach, never by name or number: two hosts may count their devices differently.
//! The side that sent HELLO chooses its own rail for every endpoint that it offers ([`active`]); the other side answers each
//! with the rail of its own that reaches the offered one best ([`passive`]).

use super::address::PeerRail;
use super::ports::{Rail, place};
use super::types::{GidType, LinkLayer, Scope};
use crate::config::{DEFAULT_LANES_PER_RAIL, MAX_LANES};

/// How one rail reaches another, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reach {
    /// Both are in one network.
    SameSubnet,
    /// Both have addresses that may be routed; the kernel knows.
    Routed,
    /// Both are link-local, and each is its side's only one: they can only be on one link.
    LinkLocal,
}

/// An own rail in use for a peer, and what it is meant for there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pair {
    /// Index of the own rail.
    pub own: u8,
    /// Index of the peer's rail; `None` while the peer is unknown.
    pub peer: Option<u8>,
    /// How.
    pub reach: Option<Reach>,
}

/// The own rails in use for a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pairing {
    /// At least one, fastest first.
    pub pairs: Vec<Pair>,
    /// Why other rails are not in use.
    pub left_out: Vec<String>,
    /// A line for the log.
    pub log: String,
}

/// No rail reaches any of the peer's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no RDMA path to the peer: own rails are {own}; the peer's are {peer}; {why}")]
pub struct PairError {
    /// Own rails with their networks.
    pub own: String,
    /// The peer's.
    pub peer: String,
    /// What does not fit.
    pub why: String,
}

impl Pairing {
    /// How many data lanes to offer; `wanted` is `BATON_LANES`.
    pub fn lanes(&self, wanted: Option<u8>) -> u8 {
        let rails = self.pairs.len().min(usize::from(MAX_LANES)) as u8;
        wanted.unwrap_or_else(|| rails.saturating_mul(DEFAULT_LANES_PER_RAIL)).clamp(1, MAX_LANES)
    }

    /// Own rail of a data lane: they take turns.
    pub fn lane_rail(&self, lane: u8) -> u8 {
        self.pairs[usize::from(lane) % self.pairs.len()].own
    }

    /// Own rail of the control endpoint.
    pub fn control_rail(&self) -> u8 {
        self.pairs[0].own
    }
}

/// How `own` reaches `peer`; the error says why not. `only` tells whether each is its side's only link-local rail.
pub fn reach(own: &Rail, peer: &PeerRail, only: bool) -> Result<Reach, String> {
    let kind = own.gid.kind;
    if kind != peer.kind {
        return Err(format!("{kind} and {} do not speak to each other", peer.kind));
    }
    if kind == GidType::InfiniBand {
        let (a, b) = (own.gid.gid.subnet_prefix(), peer.gid.subnet_prefix());
        return match a == b {
            true => Ok(Reach::SameSubnet),
            false => Err(format!("InfiniBand subnets {a:016x} and {b:016x} differ")),
        };
    }
    let (own_ip, peer_ip) = (own.gid.gid.ip(), peer.gid.ip());
    let scopes = (own.gid.gid.scope(), peer.gid.scope());
    match scopes {
        (Scope::Nobody, _) | (_, Scope::Nobody) => Err("one of the GIDs names nobody".to_owned()),
        _ if own_ip.is_ipv4() != peer_ip.is_ipv4() => {
            Err(format!("{own_ip} and {peer_ip} are of two families"))
        }
        (Scope::LinkLocal, Scope::LinkLocal) if only => Ok(Reach::LinkLocal),
        (Scope::LinkLocal, Scope::LinkLocal) => {
            Err("there are several link-local rails, and nothing tells which share a link".to_owned())
        }
        (Scope::LinkLocal, _) | (_, Scope::LinkLocal) => {
            Err(format!("of {own_ip} and {peer_ip} one is link-local"))
        }
        _ if same_network(own, peer) => Ok(Reach::SameSubnet),
        _ if kind == GidType::RoceV1 => {
            Err(format!("{own_ip} and {peer_ip} are of two networks and RoCE v1 is not routed"))
        }
        _ => Ok(Reach::Routed),
    }
}

fn same_network(own: &Rail, peer: &PeerRail) -> bool {
    let (a, b) = (own.gid.gid, peer.gid);
    // Each side's own interface knows best; without it IPv6 networks are /64 by convention and those of IPv4 unknown.
    let (width, usual) = if a.ip().is_ipv4() { (32, 32) } else { (128, 64) };
    let bits = own.prefix_len.or(peer.prefix_len).unwrap_or(usual).min(width);
    super::types::Subnet { ip: a.ip(), prefix_len: bits }.contains(b.ip())
}

/// Whether both sides have exactly one link-local rail.
fn only_link_local(own: &[Rail], peer: &[PeerRail]) -> bool {
    let own = own
        .iter()
        .filter(|rail| rail.link == LinkLayer::Ethernet && rail.gid.gid.scope() == Scope::LinkLocal);
    // The peer's lanes name the same rail again and again.
    let mut theirs: Vec<_> = peer
        .iter()
        .filter(|rail| rail.kind != GidType::InfiniBand && rail.gid.scope() == Scope::LinkLocal)
        .map(|rail| rail.index)
        .collect();
    theirs.sort_unstable();
    theirs.dedup();
    own.count() == 1 && theirs.len() == 1
}

/// The rails in use while nothing is known of the peer: all that are fast enough.
pub fn unpaired(own: &[Rail]) -> Pairing {
    let pairs = (0..own.len()).map(|i| Pair { own: i as u8, peer: None, reach: None }).collect();
    in_use(own, &[], pairs, Vec::new())
}

/// For the side that sends HELLO: the own rails to offer, given all of the peer's.
///
/// Only rails of the best [`Reach`] are used: where some share a network with the peer's, a detour by a router is no gain.
pub fn active(own: &[Rail], peer: &[PeerRail]) -> Result<Pairing, PairError> {
    let only = only_link_local(own, peer);
    let mut used = vec![0u32; peer.len()];
    let mut pairs = Vec::new();
    let mut left_out = Vec::new();
    let mut reasons = Vec::new();
    for (i, rail) in own.iter().enumerate() {
        let reached = peer.iter().enumerate().filter_map(|(k, other)| match reach(rail, other, only) {
            Ok(reach) => Some((reach, used[k], k)),
            Err(why) => {
                if !reasons.contains(&why) {
                    reasons.push(why);
                }
                None
            }
        });
        match reached.min() {
            Some((reach, _, k)) => {
                used[k] += 1;
                pairs.push(Pair { own: i as u8, peer: Some(peer[k].index), reach: Some(reach) });
            }
            None => left_out.push(format!("{rail} reaches none of the peer's")),
        }
    }
    let Some(best) = pairs.iter().filter_map(|pair| pair.reach).min() else {
        return Err(no_pair(own, peer, reasons));
    };
    pairs.retain(|pair| {
        let keep = pair.reach == Some(best);
        if !keep {
            let rail = &own[usize::from(pair.own)];
            left_out.push(format!("{rail} shares no network with the peer's, others do"));
        }
        keep
    });
    Ok(in_use(own, peer, pairs, left_out))
}

/// Lanes carry equal shares, so one far slower rail would hold up the others: it is used only if named.
fn in_use(own: &[Rail], peer: &[PeerRail], mut pairs: Vec<Pair>, mut left_out: Vec<String>) -> Pairing {
    let speed = |pair: &Pair| own[usize::from(pair.own)].speed_mbps;
    let fastest = pairs.iter().map(speed).max().unwrap_or(0);
    pairs.retain(|pair| {
        let rail = &own[usize::from(pair.own)];
        let keep = rail.named || rail.speed_mbps == 0 || rail.speed_mbps >= fastest / 2;
        if !keep {
            left_out.push(format!(
                "{rail} has {} of {fastest} Mbit/s; BATON_DEVICES can name it",
                rail.speed_mbps
            ));
        }
        keep
    });
    pairs.sort_by_key(|pair| (std::cmp::Reverse(speed(pair)), pair.own));
    let told: Vec<String> = pairs.iter().map(|pair| describe(own, peer, pair)).collect();
    let mut log = format!("rails in use: {}", told.join(", "));
    if !left_out.is_empty() {
        log = format!("{log}; left out: {}", left_out.join(", "));
    }
    Pairing { pairs, left_out, log }
}

fn describe(own: &[Rail], peer: &[PeerRail], pair: &Pair) -> String {
    let rail = &own[usize::from(pair.own)];
    let other = peer.iter().find(|other| Some(other.index) == pair.peer);
    match (other, pair.reach) {
        (Some(other), Some(reach)) => {
            let how = match reach {
                Reach::SameSubnet => "same network",
                Reach::Routed => "routed",
                Reach::LinkLocal => "link-local",
            };
            format!("{rail} to {} ({how})", theirs(other))
        }
        _ => rail.to_string(),
    }
}

/// For the side that received HELLO: the own rail of each offered endpoint, in order; several of one rail are spread over all
/// own rails that reach it equally well.
pub fn passive(own: &[Rail], offered: &[PeerRail]) -> Result<Vec<u8>, PairError> {
    let only = only_link_local(own, offered);
    let fastest = own.iter().map(|rail| rail.speed_mbps).max().unwrap_or(0);
    let mut used = vec![0u32; own.len()];
    let mut chosen = Vec::with_capacity(offered.len());
    for (n, endpoint) in offered.iter().enumerate() {
        let mut reasons = Vec::new();
        let reached = own.iter().enumerate().filter_map(|(i, rail)| match reach(rail, endpoint, only) {
            Ok(reach) => {
                let slow = !rail.named && rail.speed_mbps != 0 && rail.speed_mbps < fastest / 2;
                Some((reach, slow, used[i], i))
            }
            Err(why) => {
                reasons.push(why);
                None
            }
        });
        let best = reached.min();
        reasons.dedup();
        let Some((.., i)) = best else { return Err(no_pair(own, std::slice::from_ref(endpoint), reasons)) };
        // The first one is the control endpoint's, which carries no bulk.
        used[i] += u32::from(n > 0);
        chosen.push(i as u8);
    }
    Ok(chosen)
}

fn theirs(rail: &PeerRail) -> String {
    let link = if rail.kind == GidType::InfiniBand { LinkLayer::InfiniBand } else { LinkLayer::Ethernet };
    format!("rail {} ({})", rail.index, place(rail.gid, link, rail.prefix_len))
}

fn no_pair(own: &[Rail], peer: &[PeerRail], reasons: Vec<String>) -> PairError {
    let list = |texts: Vec<String>| if texts.is_empty() { "none".to_owned() } else { texts.join(", ") };
    PairError {
        own: list(own.iter().map(ToString::to_string).collect()),
        peer: list(peer.iter().map(theirs).collect()),
        why: if reasons.is_empty() { "one side has none".to_owned() } else { reasons.join("; ") },
    }
}

#[cfg(test)]
#[path = "rails_tests.rs"]
mod tests;

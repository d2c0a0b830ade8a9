//! Words of the choices.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// A port's address on the fabric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Gid(pub [u8; 16]);

/// How far an IP GID reaches, farthest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scope {
    /// An IPv4 address in IPv6 form.
    V4,
    /// A global IPv6 address.
    Global,
    /// A unique local IPv6 address, fc00::/7.
    UniqueLocal,
    /// fe80::/10 or 169.254.0.0/16: means something on one link only.
    LinkLocal,
    /// Zero, loopback or multicast: names nobody.
    Nobody,
}

impl Gid {
    /// From the 32 digits of [`Gid::hex`].
    pub fn from_hex(text: &str) -> Option<Gid> {
        if text.len() != 32 || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
            return None;
        }
        u128::from_str_radix(text, 16).ok().map(|n| Gid(n.to_be_bytes()))
    }

    /// As 32 digits.
    pub fn hex(&self) -> String {
        format!("{:032x}", u128::from_be_bytes(self.0))
    }

    /// Whether all bytes are zero.
    pub fn is_zero(&self) -> bool {
        self.0 == [0; 16]
    }

    /// As the IP address it is on Ethernet.
    pub fn ip(&self) -> IpAddr {
        let v6 = Ipv6Addr::from(self.0);
        v6.to_ipv4_mapped().map_or(IpAddr::V6(v6), IpAddr::V4)
    }

    /// How far it reaches on Ethernet.
    pub fn scope(&self) -> Scope {
        match self.ip() {
            IpAddr::V4(ip) if ip.is_unspecified() || ip.is_loopback() || ip.is_multicast() => Scope::Nobody,
            IpAddr::V4(ip) if ip == Ipv4Addr::BROADCAST => Scope::Nobody,
            IpAddr::V4(ip) if ip.is_link_local() => Scope::LinkLocal,
            IpAddr::V4(_) => Scope::V4,
            IpAddr::V6(ip) if ip.is_unspecified() || ip.is_loopback() || ip.is_multicast() => Scope::Nobody,
            IpAddr::V6(ip) if ip.is_unicast_link_local() => Scope::LinkLocal,
            IpAddr::V6(ip) if ip.is_unique_local() => Scope::UniqueLocal,
            IpAddr::V6(_) => Scope::Global,
        }
    }

    /// The first half: on InfiniBand the subnet.
    pub fn subnet_prefix(&self) -> u64 {
        (u128::from_be_bytes(self.0) >> 64) as u64
    }
}

impl From<IpAddr> for Gid {
    fn from(ip: IpAddr) -> Gid {
        match ip {
            IpAddr::V4(ip) => Gid(ip.to_ipv6_mapped().octets()),
            IpAddr::V6(ip) => Gid(ip.octets()),
        }
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Ipv6Addr::from(self.0).fmt(f)
    }
}

/// What the packets of a GID look like.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GidType {
    /// InfiniBand's own.
    InfiniBand,
    /// Ethernet frames, never routed.
    RoceV1,
    /// UDP, routed by IP address.
    RoceV2,
}

impl GidType {
    /// Its word on the wire.
    pub fn word(self) -> &'static str {
        match self {
            GidType::InfiniBand => "ib",
            GidType::RoceV1 => "roce_v1",
            GidType::RoceV2 => "roce_v2",
        }
    }

    /// From its word.
    pub fn from_word(word: &str) -> Option<GidType> {
        [GidType::InfiniBand, GidType::RoceV1, GidType::RoceV2].into_iter().find(|t| t.word() == word)
    }
}

impl fmt::Display for GidType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            GidType::InfiniBand => "InfiniBand",
            GidType::RoceV1 => "RoCE v1",
            GidType::RoceV2 => "RoCE v2",
        })
    }
}

/// One entry of a port's GID table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GidEntry {
    /// Where it stands. (A queue pair cannot name one past 255.)
    pub index: u8,
    /// The GID.
    pub gid: Gid,
    /// Its type.
    pub kind: GidType,
    /// The network interface behind it, on Ethernet, where this process can see it.
    pub netdev: Option<String>,
}

impl fmt::Display for GidEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.index, self.gid, self.kind)?;
        match &self.netdev {
            Some(netdev) => write!(f, " on {netdev}"),
            None => Ok(()),
        }
    }
}

/// What carries a port's packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkLayer {
    /// InfiniBand.
    InfiniBand,
    /// Ethernet.
    Ethernet,
    /// Something else, by its number.
    Other(u8),
}

impl fmt::Display for LinkLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LinkLayer::InfiniBand => f.write_str("InfiniBand"),
            LinkLayer::Ethernet => f.write_str("Ethernet"),
            LinkLayer::Other(n) => write!(f, "link layer {n}"),
        }
    }
}

/// The protocol of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// InfiniBand's, also over Ethernet.
    InfiniBand,
    /// iWARP.
    Iwarp,
    /// Something else, by its number.
    Other(i32),
}

/// State of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortState {
    /// No link.
    Down,
    /// Link, but not configured.
    Initializing,
    /// Configured, not yet in use.
    Armed,
    /// In use.
    Active,
    /// In use, link lost for a moment.
    ActiveDefer,
    /// Something else, by its number.
    Other(u32),
}

impl fmt::Display for PortState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PortState::Down => f.write_str("DOWN"),
            PortState::Initializing => f.write_str("INIT"),
            PortState::Armed => f.write_str("ARMED"),
            PortState::Active => f.write_str("ACTIVE"),
            PortState::ActiveDefer => f.write_str("ACTIVE_DEFER"),
            PortState::Other(n) => write!(f, "state {n}"),
        }
    }
}

/// Largest payload of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Mtu {
    /// 256 bytes.
    B256 = 1,
    /// 512 bytes.
    B512 = 2,
    /// 1024 bytes.
    B1024 = 3,
    /// 2048 bytes.
    B2048 = 4,
    /// 4096 bytes.
    B4096 = 5,
}

impl Mtu {
    /// All of them, smallest first.
    pub const ALL: [Mtu; 5] = [Mtu::B256, Mtu::B512, Mtu::B1024, Mtu::B2048, Mtu::B4096];
    /// All of them, for errors.
    pub const LIST: &'static str = "256, 512, 1024, 2048, 4096";

    /// In bytes.
    pub fn bytes(self) -> u32 {
        128 << self.code()
    }

    /// The verbs' number for it.
    pub fn code(self) -> u8 {
        self as u8
    }

    /// From bytes.
    pub fn from_bytes(bytes: u64) -> Option<Mtu> {
        Mtu::ALL.into_iter().find(|mtu| u64::from(mtu.bytes()) == bytes)
    }

    /// From the verbs' number.
    pub fn from_code(code: u32) -> Option<Mtu> {
        Mtu::ALL.into_iter().find(|mtu| u32::from(mtu.code()) == code)
    }
}

impl fmt::Display for Mtu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.bytes().fmt(f)
    }
}

/// An address of this host, or one that somebody wants, with the length of its network's prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Subnet {
    /// The address.
    pub ip: IpAddr,
    /// Bits of the prefix.
    pub prefix_len: u8,
}

impl Subnet {
    /// Whether `ip` is in it.
    pub fn contains(&self, ip: IpAddr) -> bool {
        let (a, b, width) = match (self.ip, ip) {
            (IpAddr::V4(a), IpAddr::V4(b)) => (u128::from(a.to_bits()), u128::from(b.to_bits()), 32),
            (IpAddr::V6(a), IpAddr::V6(b)) => (a.to_bits(), b.to_bits(), 128),
            _ => return false,
        };
        let host_bits = width - u32::from(self.prefix_len).min(width);
        // A shift by the whole width would overflow: no bits are left to differ.
        (a ^ b).checked_shr(host_bits).unwrap_or(0) == 0
    }
}

impl fmt::Display for Subnet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.ip, self.prefix_len)
    }
}

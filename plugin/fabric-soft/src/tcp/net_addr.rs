//! Addresses as people write them: `addr`, `addr:port`, `addr:first-last`, `[v6%scope]:port`; and those of this host.

use std::ffi::{CStr, CString};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::str::FromStr;

/// Ports from the first to the last, both included; `0-0` lets the kernel choose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortRange {
    /// First.
    pub first: u16,
    /// Last.
    pub last: u16,
}

impl PortRange {
    /// The kernel chooses.
    pub const ANY: PortRange = PortRange { first: 0, last: 0 };

    /// Exactly this port.
    pub fn one(port: u16) -> PortRange {
        PortRange { first: port, last: port }
    }
}

/// An address with an optional scope (interface of a link-local v6 address) and optional ports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetAddr {
    /// The address.
    pub ip: IpAddr,
    /// Interface name or index.
    pub scope: Option<String>,
    /// Ports.
    pub ports: Option<PortRange>,
}

/// Why a text is no address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not an address: {why}; write addr, addr:port, addr:first-last or [v6%scope]:port")]
pub struct AddrError {
    text: String,
    why: String,
}

impl NetAddr {
    /// An address alone.
    pub fn new(ip: IpAddr) -> NetAddr {
        NetAddr { ip, scope: None, ports: None }
    }

    /// The same address with this port.
    pub fn with_port(&self, port: u16) -> NetAddr {
        NetAddr { ports: Some(PortRange::one(port)), ..self.clone() }
    }

    /// For `bind` and `connect`; the scope must name an interface of this host.
    pub fn socket_addr(&self, port: u16) -> Result<SocketAddr, AddrError> {
        match self.ip {
            IpAddr::V4(ip) => Ok(SocketAddr::from((ip, port))),
            IpAddr::V6(ip) => Ok(SocketAddrV6::new(ip, port, 0, self.scope_id()?).into()),
        }
    }

    fn scope_id(&self) -> Result<u32, AddrError> {
        let Some(scope) = &self.scope else { return Ok(0) };
        if let Ok(index) = scope.parse::<u32>() {
            return Ok(index);
        }
        let name = CString::new(scope.as_str()).map_err(|_| error(scope, "a scope has no NUL"))?;
        // SAFETY: a NUL-terminated string that outlives the call.
        match unsafe { libc::if_nametoindex(name.as_ptr()) } {
            0 => Err(error(&self.to_string(), &format!("this host has no interface `{scope}`"))),
            index => Ok(index),
        }
    }
}

impl fmt::Display for NetAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scope = self.scope.as_ref().map(|s| format!("%{s}")).unwrap_or_default();
        match (self.ip, self.ports) {
            (IpAddr::V6(ip), Some(_)) => write!(f, "[{ip}{scope}]")?,
            (ip, _) => write!(f, "{ip}{scope}")?,
        }
        match self.ports {
            Some(p) if p.first == p.last => write!(f, ":{}", p.first),
            Some(p) => write!(f, ":{}-{}", p.first, p.last),
            None => Ok(()),
        }
    }
}

impl FromStr for NetAddr {
    type Err = AddrError;

    fn from_str(text: &str) -> Result<NetAddr, AddrError> {
        let (host, ports) = split(text)?;
        let (ip, scope) = match host.split_once('%') {
            Some((ip, scope)) => (ip, Some(scope)),
            None => (host, None),
        };
        let ip: IpAddr = ip.parse().map_err(|_| error(text, &format!("`{ip}` is neither IPv4 nor IPv6")))?;
        if let Some(scope) = scope {
            if ip.is_ipv4() {
                return Err(error(text, "an IPv4 address has no scope"));
            }
            if scope.is_empty()
                || scope.len() > 15
                || !scope.bytes().all(|b| b.is_ascii_graphic() && b != b'/')
            {
                return Err(error(text, "a scope is an interface name or index"));
            }
        }
        let ports = ports.map(|p| parse_ports(text, p)).transpose()?;
        Ok(NetAddr { ip, scope: scope.map(str::to_owned), ports })
    }
}

/// Host and ports: brackets decide, else a single colon does; several without brackets are a v6 address alone.
fn split(text: &str) -> Result<(&str, Option<&str>), AddrError> {
    if let Some(rest) = text.strip_prefix('[') {
        let (host, after) = rest.split_once(']').ok_or_else(|| error(text, "`[` without `]`"))?;
        if !host.contains(':') {
            return Err(error(text, "brackets are for IPv6"));
        }
        return match after.strip_prefix(':') {
            Some(ports) => Ok((host, Some(ports))),
            None if after.is_empty() => Ok((host, None)),
            None => Err(error(text, "after `]` comes `:port` or nothing")),
        };
    }
    match text.split_once(':') {
        Some((host, ports)) if !ports.contains(':') => Ok((host, Some(ports))),
        _ => Ok((text, None)),
    }
}

fn parse_ports(text: &str, ports: &str) -> Result<PortRange, AddrError> {
    let port = |s: &str| {
        let digits = !s.is_empty() && s.bytes().all(|b| b.is_ascii_digit());
        let value = digits.then(|| s.parse::<u16>().ok()).flatten();
        value.ok_or_else(|| error(text, &format!("`{s}` is no port (0 to 65535)")))
    };
    match ports.split_once('-') {
        None => port(ports).map(PortRange::one),
        Some((first, last)) => {
            let range = PortRange { first: port(first)?, last: port(last)? };
            if range.first == 0 || range.first > range.last {
                return Err(error(text, "a port range goes upwards from at least 1"));
            }
            Ok(range)
        }
    }
}

fn error(text: &str, why: &str) -> AddrError {
    AddrError { text: text.to_owned(), why: why.to_owned() }
}

/// Addresses of this host's interfaces that are up, those that peers reach most likely first: routable ones of real
/// interfaces, those of bridges for containers (the same on every host), link-local ones with scope, loopback.
pub fn local_candidates() -> Vec<NetAddr> {
    let mut found: Vec<(u8, NetAddr)> = Vec::new();
    for (name, ip) in interfaces() {
        let link_local = match ip {
            IpAddr::V4(v4) => v4.is_link_local(),
            IpAddr::V6(v6) => v6.is_unicast_link_local(),
        };
        let scope = (link_local && ip.is_ipv6()).then(|| name.clone());
        let addr = NetAddr { ip, scope, ports: None };
        let rank = rank(&name, ip, link_local);
        if !found.iter().any(|(_, known)| *known == addr) {
            found.push((rank, addr));
        }
    }
    found.sort_by_key(|(rank, _)| *rank);
    found.into_iter().map(|(_, addr)| addr).collect()
}

fn rank(interface: &str, ip: IpAddr, link_local: bool) -> u8 {
    let bridge = ["docker", "br-", "veth", "virbr", "cni", "flannel", "cali", "podman", "lxc"];
    let base = match () {
        () if ip.is_loopback() => 6,
        () if link_local => 4,
        () if bridge.iter().any(|prefix| interface.starts_with(prefix)) => 2,
        () => 0,
    };
    base + u8::from(ip.is_ipv6())
}

fn interfaces() -> Vec<(String, IpAddr)> {
    let mut list: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: the call stores a list in `list` or fails.
    if unsafe { libc::getifaddrs(&mut list) } != 0 {
        return Vec::new();
    }
    let mut out = Vec::new();
    let mut at = list;
    while !at.is_null() {
        // SAFETY: an element of the list that getifaddrs made and nobody changes.
        let entry = unsafe { &*at };
        at = entry.ifa_next;
        if entry.ifa_flags & libc::IFF_UP as u32 == 0 || entry.ifa_addr.is_null() {
            continue;
        }
        // SAFETY: a socket address; its family tells how to read it.
        let family = i32::from(unsafe { (*entry.ifa_addr).sa_family });
        let ip = match family {
            libc::AF_INET => {
                // SAFETY: an address of this family is a sockaddr_in.
                let v4 = unsafe { entry.ifa_addr.cast::<libc::sockaddr_in>().read_unaligned() };
                IpAddr::V4(Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr)))
            }
            libc::AF_INET6 => {
                // SAFETY: an address of this family is a sockaddr_in6.
                let v6 = unsafe { entry.ifa_addr.cast::<libc::sockaddr_in6>().read_unaligned() };
                IpAddr::V6(Ipv6Addr::from(v6.sin6_addr.s6_addr))
            }
            _ => continue,
        };
        // SAFETY: every entry has a NUL-terminated name.
        let name = unsafe { CStr::from_ptr(entry.ifa_name) }.to_string_lossy().into_owned();
        out.push((name, ip));
    }
    // SAFETY: the list from getifaddrs, freed once; nothing refers to it any more.
    unsafe { libc::freeifaddrs(list) };
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> NetAddr {
        text.parse().unwrap_or_else(|e| panic!("{e}"))
    }

    #[test]
    fn an_address_alone_has_no_ports() {
        assert_eq!(parsed("10.1.2.3"), NetAddr::new("10.1.2.3".parse().unwrap()));
        assert_eq!(parsed("::1"), NetAddr::new("::1".parse().unwrap()));
        assert_eq!(parsed("[2001:db8::7]"), NetAddr::new("2001:db8::7".parse().unwrap()));
    }

    #[test]
    fn a_port_follows_a_colon() {
        assert_eq!(parsed("10.1.2.3:80").ports, Some(PortRange::one(80)));
        assert_eq!(parsed("[2001:db8::7]:65535").ports, Some(PortRange::one(65535)));
        assert_eq!(parsed("0.0.0.0:0").ports, Some(PortRange::ANY));
    }

    #[test]
    fn a_range_of_ports_has_a_dash() {
        assert_eq!(parsed("10.1.2.3:4000-4010").ports, Some(PortRange { first: 4000, last: 4010 }));
        assert_eq!(parsed("[::]:1-65535").ports, Some(PortRange { first: 1, last: 65535 }));
    }

    #[test]
    fn a_scope_follows_a_percent_sign() {
        let addr = parsed("[fe80::1%eth0]:4711");
        assert_eq!((addr.scope.as_deref(), addr.ports), (Some("eth0"), Some(PortRange::one(4711))));
        assert_eq!(parsed("fe80::1%3").scope.as_deref(), Some("3"));
        assert_eq!(
            parsed("fe80::1%3").socket_addr(9).unwrap(),
            SocketAddrV6::new("fe80::1".parse().unwrap(), 9, 0, 3).into()
        );
    }

    #[test]
    fn a_scope_that_is_no_interface_here_is_named() {
        let error = parsed("fe80::1%nosuch0").socket_addr(1).unwrap_err().to_string();
        assert!(error.contains("nosuch0"), "{error}");
        assert!(parsed("fe80::1%lo").socket_addr(1).is_ok());
    }

    #[test]
    fn what_is_printed_is_parsed_again() {
        for text in [
            "10.1.2.3",
            "10.1.2.3:80",
            "10.1.2.3:80-90",
            "::1",
            "[::1]:80",
            "[fe80::1%eth0]:80-90",
            "fe80::1%eth0",
        ] {
            assert_eq!(parsed(text).to_string(), text);
        }
    }

    #[test]
    fn nonsense_is_refused_with_the_text_and_the_forms() {
        let wrong = [
            "",
            "host",
            "10.1.2",
            "10.1.2.3:",
            "10.1.2.3:x",
            "10.1.2.3:65536",
            "10.1.2.3:-1",
            "10.1.2.3:9-8",
            "10.1.2.3:0-8",
            "10.1.2.3:+8",
            "10.1.2.3%eth0",
            "[10.1.2.3]:80",
            "[::1",
            "[::1]80",
            "[::1]:",
            "::1%",
            "fe80::1%a/b",
            "10.1.2.3:80 ",
            " 10.1.2.3",
            "10.1.2.3:80-90-100",
            "\0",
        ];
        for text in wrong {
            let error = text.parse::<NetAddr>().expect_err(text).to_string();
            assert!(error.contains(&format!("`{text}`")) && error.contains("addr:port"), "{error}");
        }
    }

    #[test]
    fn loopback_is_the_last_candidate() {
        let all = local_candidates();
        assert!(all.iter().any(|a| a.ip.is_loopback()));
        let first = all.iter().position(|a| a.ip.is_loopback()).unwrap();
        assert!(all[first..].iter().all(|a| a.ip.is_loopback()));
        for addr in &all {
            let link_local = matches!(addr.ip, IpAddr::V6(v6) if v6.is_unicast_link_local());
            assert_eq!(addr.scope.is_some(), link_local, "{addr}");
        }
    }

    #[test]
    fn bridges_of_containers_come_after_real_interfaces() {
        let ip: IpAddr = "172.17.0.1".parse().unwrap();
        assert!(rank("eth0", ip, false) < rank("docker0", ip, false));
        assert!(rank("docker0", ip, false) < rank("lo", "127.0.0.1".parse().unwrap(), false));
    }
}

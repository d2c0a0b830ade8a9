//! Addresses of this host's network interfaces, with the length of their networks' prefixes.

use crate::choose::Subnet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// All of them; empty where the system does not tell.
pub(crate) fn addresses() -> Vec<Subnet> {
    let mut first = std::ptr::null_mut::<libc::ifaddrs>();
    // SAFETY: room for the list's head; the list is freed below.
    if unsafe { libc::getifaddrs(&mut first) } != 0 {
        tracing::warn!("getifaddrs: {}", std::io::Error::last_os_error());
        return Vec::new();
    }
    let mut found = Vec::new();
    let mut at = first;
    while !at.is_null() {
        // SAFETY: an element of the list, which is alive.
        let one = unsafe { &*at };
        // SAFETY: address and mask are null or of the family that the address says.
        if let Some(subnet) = unsafe { subnet(one.ifa_addr, one.ifa_netmask) } {
            found.push(subnet);
        }
        at = one.ifa_next;
    }
    // SAFETY: made by getifaddrs, freed once.
    unsafe { libc::freeifaddrs(first) };
    found
}

/// # Safety
/// Both must be null or point to socket addresses as long as their family says.
unsafe fn subnet(addr: *const libc::sockaddr, mask: *const libc::sockaddr) -> Option<Subnet> {
    if addr.is_null() || mask.is_null() {
        return None;
    }
    // SAFETY: the caller's promise.
    unsafe {
        match i32::from((*addr).sa_family) {
            libc::AF_INET => {
                let of = |at: *const libc::sockaddr| {
                    u32::from_be((*at.cast::<libc::sockaddr_in>()).sin_addr.s_addr)
                };
                Some(Subnet {
                    ip: IpAddr::V4(Ipv4Addr::from(of(addr))),
                    prefix_len: of(mask).leading_ones() as u8,
                })
            }
            libc::AF_INET6 => {
                let of = |at: *const libc::sockaddr| (*at.cast::<libc::sockaddr_in6>()).sin6_addr.s6_addr;
                Some(Subnet {
                    ip: IpAddr::V6(Ipv6Addr::from(of(addr))),
                    prefix_len: u128::from_be_bytes(of(mask)).leading_ones() as u8,
                })
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn loopback_is_among_them_with_its_prefix() {
        let found = super::addresses();
        let loopback = found.iter().find(|subnet| subnet.ip.is_loopback() && subnet.ip.is_ipv4());
        assert!(loopback.is_none_or(|subnet| subnet.prefix_len == 8), "{found:?}");
    }
}

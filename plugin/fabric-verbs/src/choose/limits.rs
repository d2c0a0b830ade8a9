//! MTU, READ depth and the time that retries take.

use std::fmt;
use std::time::Duration;

use super::types::Mtu;

/// The path's MTU: the smallest of both ports' active ones and the configured one.
pub fn mtu(own: Mtu, peer: Mtu, configured: Option<Mtu>) -> Mtu {
    let path = own.min(peer);
    configured.map_or(path, |limit| path.min(limit))
}

/// How many READs this side keeps in flight: what it can have as initiator, and what the peer serves as responder.
/// A responder that serves none fails every READ, an initiator that sends none never completes one.
pub fn read_depth(own_initiator: u8, peer_responder: u8) -> Result<u8, String> {
    match (own_initiator, peer_responder) {
        (0, _) => Err("this device starts no READs (initiator depth 0; at least 1 is needed)".to_owned()),
        (_, 0) => {
            Err("the peer's device serves no READs (responder depth 0; at least 1 is needed)".to_owned())
        }
        (own, peer) => Ok(own.min(peer)),
    }
}

/// How long it takes until an unanswered work request becomes an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AckTime {
    /// Wait for one acknowledgement, as configured: 4.096 µs · 2^timeout.
    pub one: Duration,
    /// Until the error, if the device keeps exactly to that.
    pub nominal: Duration,
    /// Until the error at most: a device may wait up to four times as long.
    pub worst: Duration,
}

impl AckTime {
    /// With this timeout (1 to 31) and this count of retries. A timeout of 0 is none: the times are then unbounded.
    pub fn new(timeout: u8, retry: u8) -> AckTime {
        if timeout == 0 {
            return AckTime { one: Duration::MAX, nominal: Duration::MAX, worst: Duration::MAX };
        }
        let one = Duration::from_nanos(4096 << timeout.min(31));
        let tries = u32::from(retry) + 1;
        AckTime { one, nominal: one * tries, worst: one * tries * 4 }
    }
}

impl fmt::Display for AckTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.one == Duration::MAX {
            return f.write_str("an unanswered work request never becomes an error");
        }
        write!(
            f,
            "an unanswered work request becomes an error after {:.1?}, at most {:.1?}",
            self.nominal, self.worst
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_mtu_of_both_ports_and_the_setting_is_used() {
        assert_eq!(mtu(Mtu::B4096, Mtu::B1024, None), Mtu::B1024);
        assert_eq!(mtu(Mtu::B1024, Mtu::B4096, None), Mtu::B1024);
        assert_eq!(mtu(Mtu::B4096, Mtu::B4096, Some(Mtu::B256)), Mtu::B256);
        assert_eq!(mtu(Mtu::B1024, Mtu::B2048, Some(Mtu::B4096)), Mtu::B1024);
    }

    #[test]
    fn the_read_depth_is_the_smaller_of_what_is_started_and_what_is_served_and_never_zero() {
        assert_eq!(read_depth(16, 4), Ok(4));
        assert_eq!(read_depth(1, 128), Ok(1));
        assert!(read_depth(0, 16).expect_err("refused").contains("initiator depth 0"));
        assert!(read_depth(16, 0).expect_err("refused").contains("responder depth 0"));
    }

    #[test]
    fn the_time_to_an_error_grows_with_timeout_and_retries_and_is_unbounded_only_without_a_timeout() {
        let usual = AckTime::new(14, 6);
        assert_eq!(usual.one, Duration::from_nanos(67_108_864));
        assert_eq!(usual.nominal, Duration::from_nanos(67_108_864 * 7));
        assert_eq!(usual.worst, usual.nominal * 4);
        assert_eq!(AckTime::new(31, 0).one.as_secs(), 8796);
        assert_eq!(
            AckTime::new(12, 3).to_string(),
            "an unanswered work request becomes an error after 67.1ms, at most 268.4ms"
        );
        assert!(AckTime::new(0, 6).to_string().contains("never"));
    }

    #[test]
    fn an_mtu_has_five_values_in_bytes_and_in_code() {
        let bytes = Mtu::ALL.map(Mtu::bytes);
        assert_eq!(bytes, [256, 512, 1024, 2048, 4096]);
        for (code, mtu) in (1..).zip(Mtu::ALL) {
            assert_eq!((Mtu::from_code(code), Mtu::from_bytes(mtu.bytes().into())), (Some(mtu), Some(mtu)));
        }
        assert_eq!((Mtu::from_code(0), Mtu::from_code(6), Mtu::from_bytes(1500)), (None, None, None));
    }
}

//! The first bytes of a connection, and what one fabric tells another so that it can be found.

use serde::{Deserialize, Serialize};

use super::net_addr::NetAddr;

/// Version of everything on the wire of this fabric.
pub(super) const VERSION: u16 = 1;
/// Size of a hello.
pub(super) const HELLO: usize = 64;
/// Size of a reply.
pub(super) const REPLY: usize = 32;
/// Addresses in one message at most.
const MAX_CANDIDATES: usize = 64;

const MAGIC: [u8; 8] = *b"BATONTCP";

/// What the dialling side wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hello {
    /// To be connected with the endpoint that has the token `to`.
    Connect { to: [u8; 16], from: [u8; 16], epoch: u32 },
    /// To know that somebody is there.
    Probe,
}

/// Why a hello leads nowhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoHello {
    Garbage,
    Version(u16),
}

/// What the listening side answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub(super) enum Answer {
    Welcome = 0,
    NoSuchEndpoint = 1,
    OtherVersion = 2,
}

impl Hello {
    pub fn encode(&self) -> [u8; HELLO] {
        let mut b = [0; HELLO];
        b[0..8].copy_from_slice(&MAGIC);
        b[8..10].copy_from_slice(&VERSION.to_le_bytes());
        match self {
            Hello::Connect { to, from, epoch } => {
                b[10..12].copy_from_slice(&1u16.to_le_bytes());
                b[12..16].copy_from_slice(&epoch.to_le_bytes());
                b[16..32].copy_from_slice(to);
                b[32..48].copy_from_slice(from);
            }
            Hello::Probe => b[10..12].copy_from_slice(&2u16.to_le_bytes()),
        }
        b
    }

    pub fn decode(b: &[u8; HELLO]) -> Result<Hello, NoHello> {
        if b[0..8] != MAGIC {
            return Err(NoHello::Garbage);
        }
        let version = u16::from_le_bytes([b[8], b[9]]);
        if version != VERSION {
            return Err(NoHello::Version(version));
        }
        let token = |at: usize| -> [u8; 16] { b[at..at + 16].try_into().expect("sixteen bytes") };
        let epoch = u32::from_le_bytes(b[12..16].try_into().expect("four bytes"));
        match u16::from_le_bytes([b[10], b[11]]) {
            1 if token(48) == [0; 16] => Ok(Hello::Connect { to: token(16), from: token(32), epoch }),
            2 if b[12..] == [0; HELLO - 12] => Ok(Hello::Probe),
            _ => Err(NoHello::Garbage),
        }
    }

    /// Whether the first bytes of a hello may still become one.
    pub fn may_become(b: &[u8]) -> bool {
        let n = b.len().min(MAGIC.len());
        b[..n] == MAGIC[..n]
    }
}

impl Answer {
    pub fn encode(self, token: &[u8; 16]) -> [u8; REPLY] {
        let mut b = [0; REPLY];
        b[0..8].copy_from_slice(&MAGIC);
        b[8..10].copy_from_slice(&VERSION.to_le_bytes());
        b[10..12].copy_from_slice(&(self as u16).to_le_bytes());
        b[16..32].copy_from_slice(token);
        b
    }

    /// `None` when the reply is not one or comes from somebody else.
    pub fn decode(b: &[u8; REPLY], token: &[u8; 16]) -> Option<Answer> {
        let answer = match u16::from_le_bytes([b[10], b[11]]) {
            0 => Answer::Welcome,
            1 => Answer::NoSuchEndpoint,
            2 => Answer::OtherVersion,
            _ => return None,
        };
        let known = b[0..8] == MAGIC && (answer == Answer::OtherVersion || b[8..10] == VERSION.to_le_bytes());
        (known && b[12..16] == [0; 4] && b[16..32] == *token).then_some(answer)
    }
}

/// Address of a fabric, and with a token that of an endpoint.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Address {
    version: u16,
    candidates: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    token: Option<String>,
}

impl Address {
    pub fn new(candidates: &[NetAddr], token: Option<&[u8; 16]>) -> Address {
        Address {
            version: VERSION,
            candidates: candidates.iter().map(NetAddr::to_string).collect(),
            token: token.map(|t| t.iter().map(|b| format!("{b:02x}")).collect()),
        }
    }

    /// Parses and checks what a peer sent.
    pub fn parse(value: &serde_json::Value) -> Result<Address, String> {
        let address = Address::deserialize(value).map_err(|e| format!("tcp address: {e}"))?;
        if address.version != VERSION {
            return Err(format!(
                "tcp address: the peer speaks version {}, this side {VERSION}",
                address.version
            ));
        }
        let n = address.candidates.len();
        if n == 0 || n > MAX_CANDIDATES {
            return Err(format!("tcp address: {n} candidates, 1 to {MAX_CANDIDATES} are allowed"));
        }
        Ok(address)
    }

    pub fn candidates(&self) -> &[String] {
        &self.candidates
    }

    pub fn token(&self) -> Result<[u8; 16], String> {
        let text = self.token.as_deref().ok_or("tcp address: no token")?;
        let wrong =
            || format!("tcp address: the token has {} characters, or others than 32 hex digits", text.len());
        if text.len() != 32 || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(wrong());
        }
        let mut token = [0; 16];
        for (i, byte) in token.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&text[2 * i..2 * i + 2], 16).map_err(|_| wrong())?;
        }
        Ok(token)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn hellos_and_replies_are_decoded_as_they_were_encoded() {
        for hello in [Hello::Connect { to: [1; 16], from: [2; 16], epoch: 7 }, Hello::Probe] {
            assert_eq!(Hello::decode(&hello.encode()), Ok(hello));
        }
        for answer in [Answer::Welcome, Answer::NoSuchEndpoint, Answer::OtherVersion] {
            assert_eq!(Answer::decode(&answer.encode(&[3; 16]), &[3; 16]), Some(answer));
            assert_eq!(Answer::decode(&answer.encode(&[3; 16]), &[4; 16]), None);
        }
    }

    #[test]
    fn garbage_and_other_versions_are_told_apart() {
        let good = Hello::Probe.encode();
        let with = |at: usize, value: u8| {
            let mut b = good;
            b[at] = value;
            Hello::decode(&b)
        };
        assert_eq!(with(0, b'X'), Err(NoHello::Garbage));
        assert_eq!(with(8, 2), Err(NoHello::Version(2)));
        assert_eq!(with(10, 3), Err(NoHello::Garbage));
        assert_eq!(with(63, 1), Err(NoHello::Garbage));
        assert!(Hello::may_become(&good[..3]) && !Hello::may_become(b"GET "));
    }

    #[test]
    fn addresses_survive_json_and_nonsense_does_not() {
        let here = [NetAddr::new("10.0.0.1".parse().unwrap()).with_port(80)];
        let value = serde_json::to_value(Address::new(&here, Some(&[0xab; 16]))).unwrap();
        let parsed = Address::parse(&value).unwrap();
        assert_eq!((parsed.candidates(), parsed.token()), (&["10.0.0.1:80".to_owned()][..], Ok([0xab; 16])));
        let many: Vec<String> = vec!["10.0.0.1:80".into(); MAX_CANDIDATES + 1];
        let wrong = [
            json!(null),
            json!({}),
            json!({"version": 2, "candidates": ["10.0.0.1:80"]}),
            json!({"version": -1, "candidates": ["10.0.0.1:80"]}),
            json!({"version": 1, "candidates": []}),
            json!({"version": 1, "candidates": many}),
            json!({"version": 1, "candidates": "10.0.0.1:80"}),
        ];
        for value in wrong {
            assert!(Address::parse(&value).is_err(), "{value}");
        }
        for token in ["", "ab", "zz000000000000000000000000000000", "é00000000000000000000000000000"] {
            let value = json!({"version": 1, "candidates": ["10.0.0.1:80"], "token": token});
            assert!(Address::parse(&value).unwrap().token().is_err(), "{token}");
        }
    }
}

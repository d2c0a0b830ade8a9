//! Connection information: what a host carries from one agent to another so that they can connect.
//!
//! `"BATONCI\0" | version u16 | payload length u32 | crc32c u32 | payload (JSON)`, little-endian. It holds the session
//! key, so no `Debug` or error of this module shows a payload.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use serde_json::{Value, json};

use super::cursor::Cursor;
use super::field::{FieldError, Fields, hex};
use super::messages::ProtocolRange;
use super::{
    MAX_CANDIDATES, MAX_CONN_INFO_BYTES, MAX_FABRIC_ADDRESS_BYTES, MAX_FABRICS, MAX_NAME_BYTES, NameError,
    SessionKey, check_name,
};
use crate::ids::Instance;

const MAGIC: [u8; 8] = *b"BATONCI\0";
const VERSION: u16 = 1;

/// Which kernel and process name space an engine runs in: the same boot id means the same host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostId {
    /// The kernel's random boot id.
    pub boot_id: String,
    /// Inode of the process-id name space.
    pub pid_ns: u64,
}

/// Everything needed to connect to an engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnInfo {
    /// The engine.
    pub instance: Instance,
    /// Its agent name.
    pub name: String,
    /// Addresses of its listener in the order it prefers, `a.b.c.d:port` or `[v6%scope]:port`; at least one.
    pub candidates: Vec<String>,
    /// Its session key.
    pub key: SessionKey,
    /// Where it runs.
    pub host: HostId,
    /// Fabrics it has.
    pub fabrics: Vec<String>,
    /// Addresses of its fabrics by name, so that a peer can choose endpoints that reach them. A hint: absent where too long.
    pub addresses: BTreeMap<String, Value>,
    /// Backends it has.
    pub backends: Vec<String>,
    /// Versions it speaks.
    pub protocol: ProtocolRange,
    /// Optional parts of the protocol that it has.
    pub features: Vec<String>,
}

/// Why bytes are no connection information, or a value cannot be encoded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConnInfoError {
    /// Ends early.
    #[error("connection information is truncated: {have} bytes of {need}")]
    Truncated {
        /// Bytes there.
        have: usize,
        /// Bytes that must be there.
        need: usize,
    },
    /// Something else.
    #[error("this is no connection information of a Baton engine (wrong magic)")]
    Magic,
    /// Another format.
    #[error("connection information has version {0}; this engine reads version {VERSION}")]
    Version(u16),
    /// Too long.
    #[error("connection information of {0} bytes is longer than the limit of {MAX_CONN_INFO_BYTES}")]
    TooLong(usize),
    /// Bytes behind the end.
    #[error("connection information has {0} bytes too many at its end")]
    Trailing(usize),
    /// Damaged.
    #[error("connection information is damaged (checksum)")]
    Checksum,
    /// Not JSON.
    #[error("connection information is not JSON: {0}")]
    Json(String),
    /// A field.
    #[error(transparent)]
    Field(#[from] FieldError),
    /// The agent name.
    #[error("connection information: {0}")]
    Name(#[from] NameError),
    /// An address.
    #[error(
        "connection information: candidate {0:?} is not `address:port` with a numeric address and a port from 1"
    )]
    Candidate(String),
}

const HEAD_BYTES: usize = MAGIC.len() + 2 + 4 + 4;

impl ConnInfo {
    /// The bytes; secret.
    ///
    /// # Errors
    /// A value that [`Self::decode`] would refuse.
    pub fn encode(&self) -> Result<Vec<u8>, ConnInfoError> {
        let payload = self.to_json().to_string().into_bytes();
        let total = HEAD_BYTES + payload.len();
        if total > MAX_CONN_INFO_BYTES {
            return Err(ConnInfoError::TooLong(total));
        }
        let mut bytes = Vec::with_capacity(total);
        bytes.extend_from_slice(&MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&(payload.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&crc32c::crc32c(&payload).to_le_bytes());
        bytes.extend_from_slice(&payload);
        Self::decode(&bytes).map(|_| bytes)
    }

    /// Reads the bytes.
    ///
    /// # Errors
    /// One per cause; none shows the payload's secret.
    pub fn decode(bytes: &[u8]) -> Result<Self, ConnInfoError> {
        if bytes.len() > MAX_CONN_INFO_BYTES {
            return Err(ConnInfoError::TooLong(bytes.len()));
        }
        let short = |need| ConnInfoError::Truncated { have: bytes.len(), need };
        let mut cursor = Cursor::new(bytes);
        let magic: [u8; 8] = match cursor.array() {
            Some(magic) => magic,
            None if MAGIC.starts_with(bytes) => return Err(short(HEAD_BYTES)),
            None => return Err(ConnInfoError::Magic),
        };
        if magic != MAGIC {
            return Err(ConnInfoError::Magic);
        }
        let version = cursor.u16().ok_or(short(HEAD_BYTES))?;
        if version != VERSION {
            return Err(ConnInfoError::Version(version));
        }
        let len = cursor.u32().ok_or(short(HEAD_BYTES))? as usize;
        let crc = cursor.u32().ok_or(short(HEAD_BYTES))?;
        let payload = cursor.take(len).ok_or(short(HEAD_BYTES.saturating_add(len)))?;
        if !cursor.rest().is_empty() {
            return Err(ConnInfoError::Trailing(cursor.rest().len()));
        }
        if crc32c::crc32c(payload) != crc {
            return Err(ConnInfoError::Checksum);
        }
        // serde_json's text tells line and column, never the content.
        let value: Value = serde_json::from_slice(payload).map_err(|e| ConnInfoError::Json(e.to_string()))?;
        Self::from_json(&Fields::new(&value, "connection information")?)
    }

    fn to_json(&self) -> Value {
        json!({
            "instance": hex(&self.instance.0),
            "name": self.name,
            "candidates": self.candidates,
            "key": hex(self.key.expose()),
            "boot_id": self.host.boot_id,
            "pid_ns": self.host.pid_ns,
            "fabrics": self.fabrics,
            "addresses": self.addresses,
            "backends": self.backends,
            "protocol": { "min": self.protocol.min, "max": self.protocol.max },
            "features": self.features,
        })
    }

    fn from_json(fields: &Fields<'_>) -> Result<Self, ConnInfoError> {
        let name = fields.text("name", 1..=MAX_NAME_BYTES)?;
        // A malformed key must not be shown, whatever it is.
        let key = fields.hex("key").map_err(|_| fields.invalid("key", "not 64 lower-case hex digits"))?;
        let candidates = fields.each("candidates", 1..=MAX_CANDIDATES, |item, path| match item.as_str() {
            Some(text) if text.len() <= 80 => Ok(text.to_owned()),
            _ => Err(FieldError::Invalid { path, reason: "not a string of at most 80 bytes".into() }),
        })?;
        if let Some(bad) = candidates.iter().find(|c| parse_candidate(c).is_none()) {
            return Err(ConnInfoError::Candidate(bad.clone()));
        }
        Ok(Self {
            instance: Instance(fields.hex("instance")?),
            name: check_name(name.as_bytes())?.to_owned(),
            candidates,
            key: SessionKey::new(key),
            host: HostId {
                boot_id: fields.text("boot_id", 0..=64)?.to_owned(),
                pid_ns: fields.number("pid_ns", 0..=u64::MAX)?,
            },
            fabrics: fields.words("fabrics")?,
            addresses: addresses(fields)?,
            backends: fields.words("backends")?,
            protocol: ProtocolRange::decode(&fields.object("protocol")?)?,
            features: fields.words("features")?,
        })
    }
}

/// Absent in the connection information of engines before there were any.
fn addresses(fields: &Fields<'_>) -> Result<BTreeMap<String, Value>, FieldError> {
    let mut read = BTreeMap::new();
    for (name, value) in fields.entries("addresses", MAX_FABRICS)? {
        let bytes = value.to_string().len();
        if bytes > MAX_FABRIC_ADDRESS_BYTES {
            return Err(FieldError::Range {
                path: format!("{}[{name:?}]", fields.path("addresses")),
                found: format!("an address of {bytes} bytes"),
                min: 1,
                max: MAX_FABRIC_ADDRESS_BYTES as u64,
            });
        }
        read.insert(name.clone(), value.clone());
    }
    Ok(read)
}

/// A numeric address with a port; a link-local one names its interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Address and port, scope 0.
    pub addr: SocketAddr,
    /// Scope as written (an interface's name or index), meaningful at the host that reads it.
    pub scope: Option<String>,
}

/// Reads `a.b.c.d:port`, `[v6]:port` or `[v6%scope]:port`; the port is not 0.
pub fn parse_candidate(text: &str) -> Option<Candidate> {
    let candidate = match text.strip_prefix('[') {
        None => Candidate { addr: text.parse().ok().filter(SocketAddr::is_ipv4)?, scope: None },
        Some(rest) => {
            let (inside, port) = rest.rsplit_once("]:")?;
            let (ip, scope) = match inside.split_once('%') {
                Some((ip, scope)) => (ip, Some(scope)),
                None => (inside, None),
            };
            let usable = |s: &str| !s.is_empty() && s.len() <= 32 && s.bytes().all(|b| b.is_ascii_graphic());
            if !scope.is_none_or(usable) || !port.bytes().all(|b| b.is_ascii_digit()) {
                return None;
            }
            let ip: Ipv6Addr = ip.parse().ok()?;
            let addr = SocketAddr::new(IpAddr::V6(ip), port.parse().ok()?);
            Candidate { addr, scope: scope.map(str::to_owned) }
        }
    };
    (candidate.addr.port() != 0).then_some(candidate)
}

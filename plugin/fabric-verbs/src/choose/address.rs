//! What peers tell each other, as JSON: each known field typed and checked against its limits, none cast. Unknown fields
//! are ignored.

use serde::{Serialize, Serializer};
use serde_json::{Map, Value};

use super::ports::{MAX_RAILS, Rail};
use super::types::{Gid, GidType, Mtu, Scope};

/// A queue pair's number and a packet's sequence have 24 bits.
const MAX_24_BITS: u64 = (1 << 24) - 1;
/// Unicast addresses of InfiniBand end here.
const MAX_LID: u64 = 0xbfff;
/// Longest message of the protocol.
const MAX_MESSAGE_BYTES: u64 = 1 << 31;
/// Longest piece of a wrong value that an error shows.
const SHOWN_BYTES: usize = 64;

/// A field that is missing or wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}: {field} is {found}; {wanted} is wanted")]
pub struct AddressError {
    /// Of which object.
    pub what: &'static str,
    /// The field.
    pub field: String,
    /// Its value.
    pub found: String,
    /// What would be right.
    pub wanted: String,
}

/// One queue pair, for the peer's to connect to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct EndpointAddress {
    /// Number of the queue pair, 1 to 2^24 − 1.
    pub qpn: u32,
    /// First packet sequence number it sends, up to 2^24 − 1.
    pub psn: u32,
    /// The rail it is on.
    #[serde(flatten)]
    pub rail: PeerRail,
    /// Longest message its port takes.
    pub max_message_bytes: u32,
    /// READs of the peer that it serves at once; 0: none.
    pub read_responder: u8,
    /// READs that it keeps in flight; 0: none.
    pub read_initiator: u8,
}

/// A rail of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct PeerRail {
    /// Its index at the peer.
    #[serde(rename = "rail")]
    pub index: u8,
    /// Its GID.
    #[serde(serialize_with = "hex")]
    pub gid: Gid,
    /// What its packets look like.
    #[serde(rename = "type", serialize_with = "word")]
    pub kind: GidType,
    /// Its address on InfiniBand; 0 on Ethernet.
    pub lid: u16,
    /// Its active MTU.
    #[serde(serialize_with = "bytes")]
    pub mtu: Mtu,
    /// Length of the prefix of the GID's network, where known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefix_len: Option<u8>,
}

/// A fabric: all rails that it has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FabricAddress {
    /// Its rails, at least one.
    pub rails: Vec<PeerRail>,
}

fn hex<S: Serializer>(gid: &Gid, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&gid.hex())
}

fn word<S: Serializer>(kind: &GidType, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(kind.word())
}

fn bytes<S: Serializer>(mtu: &Mtu, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u32(mtu.bytes())
}

impl PeerRail {
    /// An own rail as peers see it.
    pub fn of(index: u8, rail: &Rail) -> PeerRail {
        PeerRail {
            index,
            gid: rail.gid.gid,
            kind: rail.gid.kind,
            lid: rail.lid,
            mtu: rail.mtu,
            prefix_len: rail.prefix_len,
        }
    }

    fn read(fields: &Fields<'_>) -> Result<PeerRail, AddressError> {
        let kind_word = fields.text("type", "ib, roce_v1 or roce_v2")?;
        let kind = GidType::from_word(kind_word)
            .ok_or_else(|| fields.bad("type", "ib, roce_v1 or roce_v2".to_owned()))?;
        let digits = "a GID as 32 hexadecimal digits, not one that names nobody,";
        let gid = Gid::from_hex(fields.text("gid", digits)?);
        let names_somebody =
            |gid: &Gid| !gid.is_zero() && (kind == GidType::InfiniBand || gid.scope() != Scope::Nobody);
        let gid = gid.filter(names_somebody).ok_or_else(|| fields.bad("gid", digits.to_owned()))?;
        let (low, high) = if kind == GidType::InfiniBand { (1, MAX_LID) } else { (0, MAX_LID) };
        let width = if kind != GidType::InfiniBand && gid.ip().is_ipv4() { 32 } else { 128 };
        let mtu = fields.value("mtu").and_then(Value::as_u64).and_then(Mtu::from_bytes);
        Ok(PeerRail {
            index: fields.number("rail", 0, MAX_RAILS as u64 - 1)?,
            gid,
            kind,
            lid: fields.number("lid", low, high)?,
            mtu: mtu.ok_or_else(|| fields.bad("mtu", format!("one of {}", Mtu::LIST)))?,
            prefix_len: match fields.value("prefix_len") {
                None => None,
                Some(_) => Some(fields.number("prefix_len", 0, width)?),
            },
        })
    }
}

impl EndpointAddress {
    const WHAT: &'static str = "endpoint address";

    /// Reads the peer's.
    pub fn parse(value: &Value) -> Result<EndpointAddress, AddressError> {
        let fields = Fields::new(Self::WHAT, String::new(), value)?;
        Ok(EndpointAddress {
            qpn: fields.number("qpn", 1, MAX_24_BITS)?,
            psn: fields.number("psn", 0, MAX_24_BITS)?,
            rail: PeerRail::read(&fields)?,
            max_message_bytes: fields.number("max_message_bytes", 1, MAX_MESSAGE_BYTES)?,
            read_responder: fields.number("read_responder", 0, u8::MAX.into())?,
            read_initiator: fields.number("read_initiator", 0, u8::MAX.into())?,
        })
    }

    /// As JSON.
    pub fn to_value(&self) -> Value {
        serde_json::to_value(self).expect("numbers and short texts")
    }
}

impl FabricAddress {
    const WHAT: &'static str = "fabric address";

    /// Of these rails.
    pub fn of(rails: &[Rail]) -> FabricAddress {
        let rails = rails.iter().take(MAX_RAILS).enumerate();
        FabricAddress { rails: rails.map(|(i, rail)| PeerRail::of(i as u8, rail)).collect() }
    }

    /// Reads the peer's.
    pub fn parse(value: &Value) -> Result<FabricAddress, AddressError> {
        let fields = Fields::new(Self::WHAT, String::new(), value)?;
        let wanted = || format!("a list of 1 to {MAX_RAILS} rails with different indexes");
        let list = fields.value("rails").and_then(Value::as_array);
        let list = list.filter(|list| (1..=MAX_RAILS).contains(&list.len()));
        let list = list.ok_or_else(|| fields.bad("rails", wanted()))?;
        let mut rails = Vec::with_capacity(list.len());
        for (i, entry) in list.iter().enumerate() {
            let rail = PeerRail::read(&Fields::new(Self::WHAT, format!("rails[{i}]"), entry)?)?;
            if rails.iter().any(|other: &PeerRail| other.index == rail.index) {
                return Err(fields.bad("rails", wanted()));
            }
            rails.push(rail);
        }
        Ok(FabricAddress { rails })
    }

    /// As JSON.
    pub fn to_value(&self) -> Value {
        serde_json::to_value(self).expect("numbers and short texts")
    }
}

/// A JSON object that is being read, and where it stands.
struct Fields<'a> {
    what: &'static str,
    path: String,
    map: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    fn new(what: &'static str, path: String, value: &'a Value) -> Result<Self, AddressError> {
        match value.as_object() {
            Some(map) => Ok(Fields { what, path, map }),
            None => {
                let field = if path.is_empty() { "it".to_owned() } else { path };
                Err(AddressError { what, field, found: shown(Some(value)), wanted: "an object".to_owned() })
            }
        }
    }

    fn value(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name)
    }

    fn text(&self, name: &str, wanted: &str) -> Result<&'a str, AddressError> {
        self.value(name).and_then(Value::as_str).ok_or_else(|| self.bad(name, wanted.to_owned()))
    }

    /// A whole number of any width that holds `high`.
    fn number<N: TryFrom<u64>>(&self, name: &str, low: u64, high: u64) -> Result<N, AddressError> {
        let number = self.value(name).and_then(Value::as_u64).filter(|n| (low..=high).contains(n));
        let number = number.and_then(|n| N::try_from(n).ok());
        number.ok_or_else(|| self.bad(name, format!("a whole number from {low} to {high}")))
    }

    fn bad(&self, name: &str, wanted: String) -> AddressError {
        let dot = if self.path.is_empty() { "" } else { "." };
        let field = format!("{}{dot}{name}", self.path);
        AddressError { what: self.what, field, found: shown(self.map.get(name)), wanted }
    }
}

fn shown(value: Option<&Value>) -> String {
    let Some(value) = value else { return "missing".to_owned() };
    let mut text = value.to_string();
    if text.len() > SHOWN_BYTES {
        let mut end = SHOWN_BYTES;
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text.truncate(end);
        text.push('…');
    }
    text
}

#[cfg(test)]
#[path = "address_tests.rs"]
mod tests;

//! The handshake's messages: HELLO, REPLY, READY, ACCEPT and, in place of any of them, ERROR.
//!
//! Unknown keys are ignored, known ones are typed and range-checked; nothing is ever cast.

use serde::{Serialize, Serializer};
use serde_json::Value;

use super::field::{FieldError, Fields, hex};
use super::offer::FabricOffer;
use super::secret::{Mac, ResumeToken};
use super::{MAX_NAME_BYTES, MAX_TEXT_BYTES, NameError, check_name, clip};
use crate::ids::{Epoch, Instance, SessionId};

/// Versions of the protocol that an engine speaks, `min..=max`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ProtocolRange {
    /// Oldest.
    pub min: u32,
    /// Newest.
    pub max: u32,
}

impl ProtocolRange {
    /// What this engine speaks.
    pub const OURS: Self = Self { min: super::PROTOCOL_VERSION, max: super::PROTOCOL_VERSION };

    /// The newest version that both speak.
    pub fn newest_common(self, other: Self) -> Option<u32> {
        let newest = self.max.min(other.max);
        (newest >= self.min.max(other.min)).then_some(newest)
    }

    pub(crate) fn decode(fields: &Fields<'_>) -> Result<Self, FieldError> {
        let min = fields.number_u32("min", 1..=u32::MAX)?;
        let max = fields.number_u32("max", 1..=u32::MAX)?;
        match min <= max {
            true => Ok(Self { min, max }),
            false => Err(fields.invalid("min", format!("{min} is larger than max {max}"))),
        }
    }
}

/// Who moves an engine's work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Progress {
    /// A thread of its own.
    Thread,
    /// Only calls of the host.
    Caller,
}

impl Progress {
    fn decode(fields: &Fields<'_>) -> Result<Self, FieldError> {
        match fields.text("progress", 1..=16)? {
            "thread" => Ok(Self::Thread),
            "caller" => Ok(Self::Caller),
            other => {
                Err(fields.invalid("progress", format!("{other:?} is neither \"thread\" nor \"caller\"")))
            }
        }
    }
}

/// First message: who wants to connect to whom, and with what.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Hello {
    /// Versions spoken.
    pub protocol: ProtocolRange,
    /// Sender.
    #[serde(serialize_with = "as_hex")]
    pub instance: Instance,
    /// Whom the sender means.
    #[serde(serialize_with = "as_hex")]
    pub to_instance: Instance,
    /// The sender's agent name.
    pub name: String,
    /// Names this attempt; comes back in every answer.
    pub attempt: u64,
    /// The session that the sender remembers with that instance.
    #[serde(serialize_with = "session_or_null")]
    pub session: Option<SessionId>,
    /// Highest epoch that the sender knows of with that instance, 0 for none.
    pub last_epoch: u32,
    /// Who moves the sender's work.
    pub progress: Progress,
    /// Fresh random bytes.
    #[serde(serialize_with = "as_hex")]
    pub nonce: [u8; 16],
    /// Fabrics in the order of the sender's preference.
    pub offers: Vec<FabricOffer>,
    /// Optional parts of the protocol that the sender has.
    pub features: Vec<String>,
}

/// Second message: the listener's choice and its half.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Reply {
    /// Version chosen.
    pub protocol: u32,
    /// Sender.
    #[serde(serialize_with = "as_hex")]
    pub instance: Instance,
    /// The sender's agent name.
    pub name: String,
    /// From HELLO.
    pub attempt: u64,
    /// The session: HELLO's if the listener remembers the same, else a new one.
    #[serde(serialize_with = "session")]
    pub session: SessionId,
    /// Highest epoch that the listener knows of with the initiator.
    pub last_epoch: u32,
    /// The epoch that this attempt would open: the larger last epoch + 1.
    #[serde(serialize_with = "epoch")]
    pub epoch: Epoch,
    /// Who moves the sender's work.
    pub progress: Progress,
    /// Fresh random bytes.
    #[serde(serialize_with = "as_hex")]
    pub nonce: [u8; 16],
    /// The fabric chosen from HELLO, with the listener's endpoints.
    pub offer: FabricOffer,
    /// Features of HELLO that the listener has as well.
    pub features: Vec<String>,
}

/// Third message: the initiator's endpoints are connected.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Ready {
    /// From HELLO.
    pub attempt: u64,
    /// From REPLY.
    #[serde(serialize_with = "session")]
    pub session: SessionId,
    /// From REPLY.
    #[serde(serialize_with = "epoch")]
    pub epoch: Epoch,
    /// Proof of being the instance that HELLO names; checkable by whoever has its connection information.
    #[serde(serialize_with = "as_hex")]
    pub identity: Mac,
    /// Proof of having been in the session's last epoch, needed to replace one that is still open.
    #[serde(serialize_with = "hex_or_null")]
    pub resume: Option<Mac>,
}

/// Fourth message: the session is open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Accept {
    /// From HELLO.
    pub attempt: u64,
    /// From REPLY.
    pub session: SessionId,
    /// From REPLY.
    pub epoch: Epoch,
    /// With it the initiator (and the listener, should it be the one to connect next) may replace this epoch.
    pub resume_token: ResumeToken,
}

/// Why a side says no; stable words on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorCode {
    /// The instance that was meant no longer exists here.
    PeerRestarted,
    /// The session is open with a newer epoch than the initiator knows of, or the proof to replace it is missing.
    AlreadyOpen,
    /// Both connect at once and the other side's attempt goes first.
    GlareWait,
    /// The authenticator does not fit: another session key.
    BadAuthenticator,
    /// The proof of identity, or the name, does not fit the connection information that is loaded here; or the name is the
    /// listener's own.
    BadIdentity,
    /// Another instance is connected under the initiator's name; try again later.
    NameInUse,
    /// A message that is not what the protocol says.
    Malformed,
    /// No common version.
    Protocol,
    /// No common fabric that works.
    NoFabric,
    /// A limit of the listener.
    Limit,
    /// Something else; try again later.
    Busy,
    /// The engine is being destroyed.
    Shutdown,
    /// The listener failed.
    Internal,
    /// A word that this version does not know.
    Unknown,
}

const CODES: [(ErrorCode, &str); 13] = [
    (ErrorCode::PeerRestarted, "PEER_RESTARTED"),
    (ErrorCode::AlreadyOpen, "ALREADY_OPEN"),
    (ErrorCode::GlareWait, "GLARE_WAIT"),
    (ErrorCode::BadAuthenticator, "BAD_AUTHENTICATOR"),
    (ErrorCode::BadIdentity, "BAD_IDENTITY"),
    (ErrorCode::NameInUse, "NAME_IN_USE"),
    (ErrorCode::Malformed, "MALFORMED"),
    (ErrorCode::Protocol, "PROTOCOL"),
    (ErrorCode::NoFabric, "NO_FABRIC"),
    (ErrorCode::Limit, "LIMIT"),
    (ErrorCode::Busy, "BUSY"),
    (ErrorCode::Shutdown, "SHUTDOWN"),
    (ErrorCode::Internal, "INTERNAL"),
];

impl ErrorCode {
    /// The word on the wire.
    pub fn as_str(self) -> &'static str {
        CODES.iter().find(|(code, _)| *code == self).map_or("UNKNOWN", |(_, word)| word)
    }

    fn from_word(word: &str) -> Self {
        CODES.iter().find(|(_, known)| *known == word).map_or(Self::Unknown, |(code, _)| *code)
    }
}

impl std::fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// ERROR: the sender refuses; its text is what the other side's user gets to see.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{code}: {text}")]
pub struct Refusal {
    /// Which rule.
    pub code: ErrorCode,
    /// Who, which value, which limit, what to do.
    pub text: String,
    /// With [`ErrorCode::AlreadyOpen`]: the session that is open.
    pub session: Option<SessionId>,
    /// With [`ErrorCode::AlreadyOpen`]: its epoch, to be told as `last_epoch` in the next attempt.
    pub epoch: Option<Epoch>,
}

impl Refusal {
    /// A refusal without a session.
    pub fn new(code: ErrorCode, text: impl Into<String>) -> Self {
        Self { code, text: text.into(), session: None, epoch: None }
    }
}

/// One message of the handshake.
#[derive(Clone, Debug, PartialEq)]
pub enum Message {
    /// Initiator: I want to connect.
    Hello(Box<Hello>),
    /// Listener: with these.
    Reply(Box<Reply>),
    /// Initiator: connected.
    Ready(Ready),
    /// Listener: open.
    Accept(Accept),
    /// Either: no.
    Error(Refusal),
}

/// Why bytes are no message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MessageError {
    /// Not JSON.
    #[error("not a JSON object: {0}")]
    Json(String),
    /// A field.
    #[error(transparent)]
    Field(#[from] FieldError),
    /// The agent name.
    #[error("{message}.name: {error}")]
    Name {
        /// HELLO or REPLY.
        message: &'static str,
        /// What is wrong with it.
        error: NameError,
    },
    /// No such message.
    #[error("message {0:?} is unknown")]
    Kind(String),
}

impl Message {
    /// Its name on the wire.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Hello(_) => "HELLO",
            Self::Reply(_) => "REPLY",
            Self::Ready(_) => "READY",
            Self::Accept(_) => "ACCEPT",
            Self::Error(_) => "ERROR",
        }
    }

    /// The JSON object.
    pub fn encode(&self) -> Vec<u8> {
        let mut value = match self {
            Self::Hello(hello) => to_value(hello),
            Self::Reply(reply) => to_value(reply),
            Self::Ready(ready) => to_value(ready),
            Self::Accept(accept) => accept.to_value(),
            Self::Error(refusal) => refusal.to_value(),
        };
        value["type"] = self.name().into();
        value.to_string().into_bytes()
    }

    /// Reads one message.
    ///
    /// # Errors
    /// Whatever is wrong first, by the field's path.
    pub fn decode(json: &[u8]) -> Result<Self, MessageError> {
        let value: Value = serde_json::from_slice(json).map_err(|e| MessageError::Json(e.to_string()))?;
        let kind = Fields::new(&value, "message")?.text("type", 1..=32)?;
        match kind {
            "HELLO" => Ok(Self::Hello(Box::new(Hello::decode(&Fields::new(&value, "HELLO")?)?))),
            "REPLY" => Ok(Self::Reply(Box::new(Reply::decode(&Fields::new(&value, "REPLY")?)?))),
            "READY" => Ok(Self::Ready(Ready::decode(&Fields::new(&value, "READY")?)?)),
            "ACCEPT" => Ok(Self::Accept(Accept::decode(&Fields::new(&value, "ACCEPT")?)?)),
            "ERROR" => Ok(Self::Error(Refusal::decode(&Fields::new(&value, "ERROR")?)?)),
            other => Err(MessageError::Kind(other.to_owned())),
        }
    }
}

impl Hello {
    fn decode(fields: &Fields<'_>) -> Result<Self, MessageError> {
        Ok(Self {
            protocol: ProtocolRange::decode(&fields.object("protocol")?)?,
            instance: Instance(fields.hex("instance")?),
            to_instance: Instance(fields.hex("to_instance")?),
            name: agent_name(fields, "HELLO")?,
            attempt: fields.number("attempt", 0..=u64::MAX)?,
            session: fields.optional_number("session", 1..=u64::MAX)?.map(SessionId),
            last_epoch: fields.number_u32("last_epoch", 0..=u32::MAX - 1)?,
            progress: Progress::decode(fields)?,
            nonce: fields.hex("nonce")?,
            offers: FabricOffer::decode_list(fields, "offers")?,
            features: fields.words("features")?,
        })
    }
}

impl Reply {
    fn decode(fields: &Fields<'_>) -> Result<Self, MessageError> {
        Ok(Self {
            protocol: fields.number_u32("protocol", 1..=u32::MAX)?,
            instance: Instance(fields.hex("instance")?),
            name: agent_name(fields, "REPLY")?,
            attempt: fields.number("attempt", 0..=u64::MAX)?,
            session: read_session(fields)?,
            last_epoch: fields.number_u32("last_epoch", 0..=u32::MAX - 1)?,
            epoch: read_epoch(fields)?,
            progress: Progress::decode(fields)?,
            nonce: fields.hex("nonce")?,
            offer: FabricOffer::decode(fields.raw("offer")?, fields.path("offer"))?,
            features: fields.words("features")?,
        })
    }
}

impl Ready {
    fn decode(fields: &Fields<'_>) -> Result<Self, FieldError> {
        Ok(Self {
            attempt: fields.number("attempt", 0..=u64::MAX)?,
            session: read_session(fields)?,
            epoch: read_epoch(fields)?,
            identity: fields.hex("identity")?,
            resume: fields.optional_hex("resume")?,
        })
    }
}

impl Accept {
    fn to_value(&self) -> Value {
        serde_json::json!({
            "attempt": self.attempt,
            "session": self.session.0,
            "epoch": self.epoch.0,
            "resume_token": hex(self.resume_token.expose()),
        })
    }

    fn decode(fields: &Fields<'_>) -> Result<Self, FieldError> {
        Ok(Self {
            attempt: fields.number("attempt", 0..=u64::MAX)?,
            session: read_session(fields)?,
            epoch: read_epoch(fields)?,
            resume_token: ResumeToken::new(fields.hex("resume_token")?),
        })
    }
}

impl Refusal {
    fn to_value(&self) -> Value {
        serde_json::json!({
            "code": self.code.as_str(),
            "text": clip(&self.text, MAX_TEXT_BYTES),
            "session": self.session.map(|s| s.0),
            "epoch": self.epoch.map(|e| e.0),
        })
    }

    fn decode(fields: &Fields<'_>) -> Result<Self, FieldError> {
        Ok(Self {
            code: ErrorCode::from_word(fields.text("code", 1..=32)?),
            text: fields.text("text", 0..=MAX_TEXT_BYTES)?.to_owned(),
            session: fields.optional_number("session", 1..=u64::MAX)?.map(SessionId),
            epoch: fields.optional_number("epoch", 1..=u64::from(u32::MAX))?.map(|e| Epoch(e as u32)),
        })
    }
}

fn read_session(fields: &Fields<'_>) -> Result<SessionId, FieldError> {
    fields.number("session", 1..=u64::MAX).map(SessionId)
}

fn read_epoch(fields: &Fields<'_>) -> Result<Epoch, FieldError> {
    fields.number_u32("epoch", 1..=u32::MAX).map(Epoch)
}

fn agent_name(fields: &Fields<'_>, message: &'static str) -> Result<String, MessageError> {
    let name = fields.text("name", 1..=MAX_NAME_BYTES)?;
    check_name(name.as_bytes()).map(str::to_owned).map_err(|error| MessageError::Name { message, error })
}

fn to_value(message: &impl Serialize) -> Value {
    serde_json::to_value(message).expect("messages hold nothing that JSON cannot")
}

fn as_hex<S: Serializer>(bytes: &impl AsBytes, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&hex(bytes.as_bytes()))
}

fn hex_or_null<S: Serializer>(mac: &Option<Mac>, to: S) -> Result<S::Ok, S::Error> {
    mac.map(|m| hex(&m)).serialize(to)
}

fn session<S: Serializer>(id: &SessionId, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_u64(id.0)
}

fn epoch<S: Serializer>(epoch: &Epoch, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_u32(epoch.0)
}

fn session_or_null<S: Serializer>(id: &Option<SessionId>, to: S) -> Result<S::Ok, S::Error> {
    id.map(|s| s.0).serialize(to)
}

trait AsBytes {
    fn as_bytes(&self) -> &[u8];
}

impl AsBytes for Instance {
    fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl<const N: usize> AsBytes for [u8; N] {
    fn as_bytes(&self) -> &[u8] {
        self
    }
}

//! Errors that reach the host, and the few words that classify them.

/// What kind of error it is; plugin/engine maps each to one code of the ABI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// An argument is outside its domain.
    InvalidParam,
    /// No such peer, region or request, or withdrawn by its owner.
    NotFound,
    /// Of another instance of the peer.
    Stale,
    /// The peer is gone, unreachable or was restarted.
    RemoteDisconnect,
    /// Still in progress.
    RepostActive,
    /// Memory may still be touched.
    Busy,
    /// Not offered.
    Unsupported,
    /// A named limit.
    Limit,
    /// A deadline passed.
    Timeout,
    /// Cancelled by the host.
    Canceled,
    /// This side failed.
    Local,
    /// The caller's buffer is too small.
    TooSmall,
    /// Proof of identity is wrong.
    Auth,
    /// The peer broke the protocol.
    Protocol,
    /// The engine is going away.
    Shutdown,
    /// The engine panicked earlier.
    Panic,
    /// Interface versions do not fit.
    Version,
}

/// An error with its text: what happened, to whom, the value, the limit, what to do.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{text}")]
pub struct Error {
    /// Class.
    pub code: Code,
    /// Text for the host.
    pub text: String,
}

impl Error {
    /// An error of class `code`.
    pub fn new(code: Code, text: impl Into<String>) -> Error {
        Error { code, text: text.into() }
    }
}

/// Result of an engine operation.
pub type Result<T> = std::result::Result<T, Error>;

/// An [`Error`] of a class with a formatted text.
#[macro_export]
macro_rules! err {
    ($code:ident, $($arg:tt)*) => { $crate::Error::new($crate::Code::$code, format!($($arg)*)) };
}

impl From<baton_fabric::FabricError> for Error {
    fn from(e: baton_fabric::FabricError) -> Error {
        use baton_fabric::FabricError as F;
        let code = match &e {
            F::NotFound(_) => Code::NotFound,
            F::Limit(_) => Code::Limit,
            F::Invalid(_) => Code::InvalidParam,
            F::Unsupported(_) => Code::Unsupported,
            F::Timeout(_) => Code::Timeout,
            F::Peer(_) => Code::RemoteDisconnect,
            F::System(_) => Code::Local,
        };
        Error::new(code, e.to_string())
    }
}

//! What an operation answers when it does not succeed.

use std::fmt;

use baton_abi::*;

use crate::load::LoadError;
use crate::select::SelectError;

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $code:ident, $words:literal;)*) => {
        /// The codes of the interface.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum ErrorCode {
            $($(#[$doc])* $name,)*
            /// A code this host does not know; a newer engine may have one.
            Unknown(i32),
        }

        impl ErrorCode {
            /// From a negative status.
            pub fn from_raw(code: BatonStatus) -> ErrorCode {
                match code {
                    $($code => ErrorCode::$name,)*
                    other => ErrorCode::Unknown(other),
                }
            }

            /// The integer of the interface.
            pub fn raw(self) -> BatonStatus {
                match self {
                    $(ErrorCode::$name => $code,)*
                    ErrorCode::Unknown(code) => code,
                }
            }
        }

        impl fmt::Display for ErrorCode {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self {
                    $(ErrorCode::$name => f.write_str($words),)*
                    ErrorCode::Unknown(code) => write!(f, "unknown code {code}"),
                }
            }
        }
    };
}

codes! {
    /// An argument is outside its documented domain.
    InvalidParam = BATON_ERR_INVALID_PARAM, "invalid argument";
    /// No such peer, region or request.
    NotFound = BATON_ERR_NOT_FOUND, "not found";
    /// From another instance of the peer.
    Stale = BATON_ERR_STALE, "stale";
    /// The peer is gone.
    RemoteDisconnect = BATON_ERR_REMOTE_DISCONNECT, "peer disconnected";
    /// Still in progress, not to be posted again yet.
    RepostActive = BATON_ERR_REPOST_ACTIVE, "still in progress";
    /// Memory may still be touched.
    Busy = BATON_ERR_BUSY, "busy";
    /// Not offered by this engine.
    Unsupported = BATON_ERR_UNSUPPORTED, "unsupported";
    /// A named limit was reached.
    Limit = BATON_ERR_LIMIT, "limit reached";
    /// A deadline passed.
    Timeout = BATON_ERR_TIMEOUT, "timed out";
    /// The request was cancelled.
    Canceled = BATON_ERR_CANCELED, "cancelled";
    /// The local side failed.
    Local = BATON_ERR_LOCAL, "local failure";
    /// The buffer is too small.
    TooSmall = BATON_ERR_TOO_SMALL, "buffer too small";
    /// A proof of identity is wrong.
    Auth = BATON_ERR_AUTH, "not authenticated";
    /// The peer broke the protocol.
    Protocol = BATON_ERR_PROTOCOL, "protocol violation";
    /// The engine is being destroyed.
    Shutdown = BATON_ERR_SHUTDOWN, "shutting down";
    /// The engine panicked.
    Panic = BATON_ERR_PANIC, "engine panicked";
    /// The caller is a forked child.
    Forked = BATON_ERR_FORKED, "called in a forked child";
    /// The interface versions do not fit.
    Version = BATON_ERR_VERSION, "interface versions differ";
}

/// Why an operation failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// The code.
    pub code: ErrorCode,
    /// The engine's words: who, what value, what limit, what to do.
    pub text: String,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.text.is_empty() { self.code.fmt(f) } else { write!(f, "{}: {}", self.code, self.text) }
    }
}

impl std::error::Error for Error {}

/// Why an engine could not be opened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// The settings are wrong.
    #[error(transparent)]
    Select(#[from] SelectError),
    /// The library is missing or does not fit.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The engine itself refused.
    #[error("engine {path}: {error}", path = .path.display())]
    Create {
        /// Which library.
        path: std::path::PathBuf,
        /// Its answer.
        error: Error,
    },
}

impl OpenError {
    /// The code of the interface that says this best.
    pub fn code(&self) -> ErrorCode {
        match self {
            OpenError::Select(_) => ErrorCode::InvalidParam,
            OpenError::Load(
                LoadError::NoSuchFile { .. } | LoadError::NotAFile { .. } | LoadError::NoOwnPlace(_),
            ) => ErrorCode::NotFound,
            OpenError::Load(LoadError::Interface { .. } | LoadError::Layout { .. }) => ErrorCode::Version,
            OpenError::Load(_) => ErrorCode::Local,
            OpenError::Create { error, .. } => error.code,
        }
    }
}

/// State of a transfer, or of something else that takes time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Done.
    Done,
    /// Under way.
    InProgress,
    /// Never posted.
    NotPosted,
}

impl Status {
    /// From a status that is not negative; numbers this host does not know count as under way.
    pub(crate) fn from_raw(code: BatonStatus) -> Status {
        match code {
            BATON_OK => Status::Done,
            BATON_NOT_POSTED => Status::NotPosted,
            _ => Status::InProgress,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_goes_there_and_back_and_unknown_ones_survive() {
        for code in -40..0 {
            assert_eq!(ErrorCode::from_raw(code).raw(), code);
        }
        for code in BATON_ERR_VERSION..0 {
            assert!(!matches!(ErrorCode::from_raw(code), ErrorCode::Unknown(_)), "{code}");
        }
    }
}

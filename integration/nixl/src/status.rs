//! NIXL's statuses, and which of them each of Baton's codes becomes.

use baton_host::ErrorCode;

/// A status as NIXL spells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum Status {
    InProgress = 1,
    Success = 0,
    NotPosted = -1,
    InvalidParam = -2,
    Backend = -3,
    NotFound = -4,
    NotAllowed = -6,
    RepostActive = -7,
    NotSupported = -9,
    RemoteDisconnect = -10,
    Canceled = -11,
}

impl From<baton_host::Status> for Status {
    fn from(status: baton_host::Status) -> Status {
        match status {
            baton_host::Status::Done => Status::Success,
            baton_host::Status::InProgress => Status::InProgress,
            baton_host::Status::NotPosted => Status::NotPosted,
        }
    }
}

impl From<ErrorCode> for Status {
    /// Every code has its line: a new one must be thought about here.
    fn from(code: ErrorCode) -> Status {
        match code {
            ErrorCode::InvalidParam => Status::InvalidParam,
            ErrorCode::NotFound => Status::NotFound,
            // All that helps is new metadata of the peer, and that is what this status makes hosts fetch.
            ErrorCode::RemoteDisconnect | ErrorCode::Stale | ErrorCode::Protocol => Status::RemoteDisconnect,
            // Any refusal of a release reads as "not yet" to the agent; this is its own word for it.
            ErrorCode::RepostActive | ErrorCode::Busy => Status::RepostActive,
            ErrorCode::Unsupported | ErrorCode::Version => Status::NotSupported,
            ErrorCode::Limit | ErrorCode::Auth | ErrorCode::Forked => Status::NotAllowed,
            ErrorCode::Canceled | ErrorCode::Shutdown => Status::Canceled,
            ErrorCode::Timeout | ErrorCode::Local | ErrorCode::TooSmall | ErrorCode::Panic => Status::Backend,
            ErrorCode::Unknown(_) => Status::Backend,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_peer_is_told_from_a_local_failure() {
        assert_eq!(Status::from(ErrorCode::RemoteDisconnect), Status::RemoteDisconnect);
        assert_eq!(Status::from(ErrorCode::Stale), Status::RemoteDisconnect);
        assert_eq!(Status::from(ErrorCode::Local), Status::Backend);
    }

    #[test]
    fn no_code_reads_as_success_or_progress() {
        for raw in -100..0 {
            assert!((Status::from(ErrorCode::from_raw(raw)) as i32) < 0, "code {raw}");
        }
    }
}

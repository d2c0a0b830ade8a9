//! A verb that failed.

use std::io;

/// Which verb failed, and the system's reason.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call}: {}", io::Error::from_raw_os_error(*.errno))]
pub struct VerbsError {
    /// Name of the verb.
    pub call: &'static str,
    /// The errno it gave.
    pub errno: i32,
}

impl VerbsError {
    /// From `errno`, where a verb answers null or −1.
    pub(crate) fn last(call: &'static str) -> VerbsError {
        let errno = io::Error::last_os_error().raw_os_error().filter(|&errno| errno != 0);
        VerbsError { call, errno: errno.unwrap_or(libc::EIO) }
    }

    /// From the return value, where a verb answers its errno (some answer −1 or −errno instead).
    pub(crate) fn check(call: &'static str, answer: i32) -> Result<(), VerbsError> {
        match answer {
            0 => Ok(()),
            -1 => Err(VerbsError::last(call)),
            errno => Err(VerbsError { call, errno: errno.abs() }),
        }
    }
}

//! The regions that one system call touches, held for as long as it runs.

use baton_fabric::WcStatus;

use crate::regions::{Guard, Regions};

/// Regions of one call at most; a call that needs more is cut short and goes on with the next one.
const HELD: usize = 16;

/// Answer of [`Guards::local`] and [`Guards::remote`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Entry {
    /// The bytes may be touched until the guards are dropped.
    Yes,
    /// Enough for this call.
    Full,
    /// Key, bounds or permission.
    No(WcStatus),
}

pub(super) struct Guards<'a> {
    regions: &'a Regions,
    held: [Option<(u64, bool, Guard<'a>)>; HELD],
    len: usize,
}

impl<'a> Guards<'a> {
    pub fn new(regions: &'a Regions) -> Guards<'a> {
        Guards { regions, held: [const { None }; HELD], len: 0 }
    }

    /// Memory that a work request or RECV of this side names.
    pub fn local(&mut self, key: u64, addr: u64, len: u32, write: bool) -> Entry {
        self.enter(
            key,
            false,
            WcStatus::LocalAccess,
            |g| g.covers(addr, u64::from(len)),
            |r| r.access_local(key, addr, u64::from(len), write),
        )
    }

    /// Memory that a peer names.
    pub fn remote(&mut self, key: u64, addr: u64, len: u32, write: bool) -> Entry {
        self.enter(
            key,
            true,
            WcStatus::RemoteAccess,
            |g| g.permits(addr, u64::from(len), write),
            |r| r.access_remote(key, addr, u64::from(len), write),
        )
    }

    /// Whether plain stores to all memory that was entered are safe as long as the guards live.
    pub fn are_mapped(&self) -> bool {
        self.held[..self.len].iter().flatten().all(|(_, _, guard)| guard.is_mapped())
    }

    fn enter(
        &mut self,
        key: u64,
        remote: bool,
        refusal: WcStatus,
        covers: impl Fn(&Guard<'a>) -> bool,
        access: impl Fn(&'a Regions) -> Result<Guard<'a>, WcStatus>,
    ) -> Entry {
        // Pieces of one region mostly come one after the other.
        let known = self.held[..self.len].iter().rev().flatten().find(|(k, r, _)| (*k, *r) == (key, remote));
        if let Some((_, _, guard)) = known {
            return if covers(guard) { Entry::Yes } else { Entry::No(refusal) };
        }
        if self.len == HELD {
            return Entry::Full;
        }
        match access(self.regions) {
            Ok(guard) => {
                self.held[self.len] = Some((key, remote, guard));
                self.len += 1;
                Entry::Yes
            }
            Err(status) => Entry::No(status),
        }
    }
}

//! Notifications on their way to the host: those that wait, and those that arrive just when it asks, which take the shortest way.
//!
//! ```text
//!   session → event ─┬─ the host asks, nothing waits ──→ host          the peer's lock and no other
//!                    `─ else ──→ inbox ──→ account ──→ host
//! ```
//! A peer's notifications reach the inbox under that peer's lock, and the look at the inbox happens under it as well: one that is
//! handed over at once has none of the same peer before it.

use crate::engine::Driver;
use crate::error::Result;
use crate::inbox::Notification;
use crate::shared::Shared;
use std::sync::Arc;

/// Longer messages are not copied under a peer's lock.
const AT_ONCE_BYTES: usize = 8192;

/// The host, as one who takes notifications. Both calls come under locks of the engine: they are to be brief, and must not call it.
pub trait Taker {
    /// Whether it has room for this one as well. After a "yes" it is counted in, and [`Taker::take`] follows in the same order.
    fn admits(&mut self, name: &str, message: &[u8]) -> bool;
    /// Copies it.
    fn take(&mut self, name: &str, message: &[u8]);
}

/// The host while it asks.
pub(crate) struct HandOver<'a> {
    taker: &'a mut dyn Taker,
    /// It has no room for more.
    full: bool,
    taken: u64,
    /// What it took made credit due that was held back.
    pub owes_credit: bool,
}

impl Driver {
    /// Moves work on and gives the host the notifications that wait, oldest first, as long as it has room. How many it took.
    pub fn hand_over(&self, taker: &mut dyn Taker) -> Result<u64> {
        let shared = &self.shared;
        shared.usable()?;
        let mut host = Some(HandOver { taker, full: false, taken: 0, owes_credit: false });
        shared.caller_polls_for(&mut host);
        let Some(HandOver { taker, full, taken, .. }) = host else { return Ok(0) };
        if full || shared.inbox.is_empty() {
            return Ok(taken);
        }
        let waiting = shared.inbox.take_while(|n| taker.admits(&n.name, &n.message));
        waiting.iter().for_each(|n| taker.take(&n.name, &n.message));
        shared.account_popped(&waiting);
        Ok(taken + waiting.len() as u64)
    }

    /// [`Driver::hand_over`] to a list, of `most` at most.
    pub fn take_notifications(&self, most: usize) -> Result<Vec<Notification>> {
        let mut list = List { taken: Vec::new(), most, admitted: 0 };
        self.hand_over(&mut list)?;
        Ok(list.taken)
    }
}

impl Shared {
    /// Whether the host took it.
    pub(crate) fn hands_over(&self, host: &mut Option<HandOver<'_>>, name: &str, message: &[u8]) -> bool {
        let Some(host) = host else { return false };
        // A hook is told of what waits, so there it waits.
        if host.full
            || message.len() > AT_ONCE_BYTES
            || !self.inbox.is_empty()
            || self.hook.wants_notifications()
        {
            return false;
        }
        host.full = !host.taker.admits(name, message);
        if !host.full {
            host.taker.take(name, message);
            host.taken += 1;
        }
        !host.full
    }
}

struct List {
    taken: Vec<Notification>,
    most: usize,
    admitted: usize,
}

impl Taker for List {
    fn admits(&mut self, _: &str, _: &[u8]) -> bool {
        let room = self.admitted < self.most;
        self.admitted += usize::from(room);
        room
    }

    fn take(&mut self, name: &str, message: &[u8]) {
        self.taken.push(Notification::own(Arc::from(name), message.to_vec()));
    }
}

//! What a driver will do later, in virtual time.

use std::collections::BTreeMap;

/// By time, and among those of one time in the order in which they were asked for.
pub(crate) struct Agenda<T> {
    entries: BTreeMap<(u64, u64), T>,
    asked: u64,
}

impl<T> Default for Agenda<T> {
    fn default() -> Self {
        Agenda { entries: BTreeMap::new(), asked: 0 }
    }
}

impl<T> Agenda<T> {
    pub fn add(&mut self, at_ns: u64, what: T) {
        self.asked += 1;
        self.entries.insert((at_ns, self.asked), what);
    }

    /// The first that is due at `now_ns`.
    pub fn due(&mut self, now_ns: u64) -> Option<T> {
        let first = self.entries.first_entry().filter(|first| first.key().0 <= now_ns)?;
        Some(first.remove())
    }

    /// When the next is due.
    pub fn next_at(&self) -> Option<u64> {
        self.entries.keys().next().map(|(at, _)| *at)
    }
}

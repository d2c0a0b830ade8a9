//! Generations of sessions, and what is remembered of them after their end.

use std::collections::{HashMap, VecDeque};

use crate::ids::{Epoch, Instance, SessionId};
use crate::wire::ResumeToken;

/// Instances remembered at most; beyond, the one touched longest ago is forgotten.
pub const MAX_TOMBSTONES: usize = 4096;

/// The epoch that follows what both sides know of, or `None` when the numbers are used up.
#[must_use]
pub fn next_epoch(ours: u32, theirs: u32) -> Option<Epoch> {
    ours.max(theirs).checked_add(1).map(Epoch)
}

/// What a link remembers of its peer instance between sessions.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Tombstone {
    /// Highest epoch ever opened, 0 for none.
    pub last_epoch: u32,
    /// The session, to be resumed if the peer remembers the same.
    pub session: Option<SessionId>,
    /// Proof of having been in the last epoch.
    pub resume_token: Option<ResumeToken>,
}

/// The tombstones of an engine.
#[derive(Debug)]
pub struct EpochBook {
    limit: usize,
    stones: HashMap<Instance, (u64, Tombstone)>,
    /// Touches in order; one whose number is not the instance's newest is void.
    order: VecDeque<(u64, Instance)>,
    touches: u64,
    forgotten: u64,
}

impl Default for EpochBook {
    fn default() -> Self {
        Self::with_limit(MAX_TOMBSTONES)
    }
}

impl EpochBook {
    /// A book of at most `limit` instances.
    pub fn with_limit(limit: usize) -> Self {
        Self { limit: limit.max(1), stones: HashMap::new(), order: VecDeque::new(), touches: 0, forgotten: 0 }
    }

    /// What is remembered of an instance; nothing known reads as the default.
    pub fn recall(&self, instance: &Instance) -> Tombstone {
        self.stones.get(instance).map(|(_, stone)| stone.clone()).unwrap_or_default()
    }

    /// Remembers an instance whose link is given up. An epoch is never lowered. The session's number is left out: the
    /// message numbers that belong to it are gone with the link, so it must not be resumed.
    pub fn record(&mut self, instance: Instance, stone: Tombstone) {
        let stone = Tombstone { session: None, ..stone };
        self.touches += 1;
        let last_epoch = self.recall(&instance).last_epoch.max(stone.last_epoch);
        self.stones.insert(instance, (self.touches, Tombstone { last_epoch, ..stone }));
        self.order.push_back((self.touches, instance));
        while self.stones.len() > self.limit || self.order.len() > 2 * self.limit {
            self.forget_oldest();
        }
    }

    /// Takes the oldest touch out of the order; forgets its instance unless it was touched again since.
    fn forget_oldest(&mut self) {
        let Some((touch, instance)) = self.order.pop_front() else { return };
        if self.stones.get(&instance).is_some_and(|(newest, _)| *newest == touch) {
            if self.stones.len() > self.limit {
                self.stones.remove(&instance);
                self.forgotten += 1;
            } else {
                self.order.push_back((touch, instance));
            }
        }
    }

    /// Instances remembered.
    pub fn len(&self) -> usize {
        self.stones.len()
    }

    /// Whether nothing is remembered.
    pub fn is_empty(&self) -> bool {
        self.stones.is_empty()
    }

    /// Instances forgotten because of the limit.
    pub fn forgotten(&self) -> u64 {
        self.forgotten
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn stone(last_epoch: u32) -> Tombstone {
        Tombstone { last_epoch, ..Default::default() }
    }

    #[test]
    fn the_next_epoch_is_above_what_either_side_knows() {
        assert_eq!(next_epoch(0, 0), Some(Epoch(1)));
        assert_eq!(next_epoch(3, 7), Some(Epoch(8)));
        assert_eq!(next_epoch(7, 3), Some(Epoch(8)));
        assert_eq!(next_epoch(u32::MAX - 1, 0), Some(Epoch(u32::MAX)));
        assert_eq!(next_epoch(u32::MAX, 0), None);
    }

    #[test]
    fn beyond_the_limit_the_instance_touched_longest_ago_is_forgotten() {
        let mut book = EpochBook::with_limit(2);
        let [a, b, c] = [1, 2, 3].map(|n| Instance([n; 16]));
        book.record(a, stone(1));
        book.record(b, stone(2));
        book.record(a, stone(3));
        book.record(c, stone(4));
        assert_eq!([a, b, c].map(|i| book.recall(&i).last_epoch), [3, 0, 4]);
        assert_eq!((book.len(), book.forgotten()), (2, 1));
    }

    #[test]
    fn a_forgotten_session_is_never_resumed() {
        let mut book = EpochBook::default();
        let token = Some(ResumeToken::new([1; 16]));
        let stone = Tombstone { last_epoch: 3, session: Some(SessionId(9)), resume_token: token.clone() };
        book.record(Instance([1; 16]), stone);
        let expected = Tombstone { last_epoch: 3, session: None, resume_token: token };
        assert_eq!(book.recall(&Instance([1; 16])), expected);
    }

    proptest! {
        #[test]
        fn a_book_stays_bounded_and_never_lowers_an_epoch(
            records in prop::collection::vec((0..9u8, 1..1000u32), 0..200),
            limit in 1..6usize,
        ) {
            let mut book = EpochBook::with_limit(limit);
            for (who, epoch) in records {
                let who = Instance([who; 16]);
                let before = book.recall(&who).last_epoch;
                book.record(who, stone(epoch));
                prop_assert_eq!(book.recall(&who).last_epoch, before.max(epoch), "the newest is never the one forgotten");
                prop_assert!(book.len() <= limit && book.order.len() <= 2 * limit);
            }
        }
    }
}

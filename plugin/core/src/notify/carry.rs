//! What outlives an epoch: standalone notifications not yet acknowledged, their numbers, and the peer's numbers seen.

use std::collections::VecDeque;

use super::NotifyWindow;
use crate::ids::{Nanos, NotifySeq};
use crate::peer::SubmitError;

/// Messages that are queued for a peer without a session at most.
pub const UNCONNECTED_MESSAGES: u32 = 1024;

/// Bytes of those; a message is taken while fewer wait, however long it is itself.
pub const UNCONNECTED_BYTES: u64 = 1 << 20;

/// A standalone notification on its way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Standalone {
    /// Number.
    pub seq: NotifySeq,
    /// Bytes.
    pub message: Vec<u8>,
    /// When it is given up.
    pub deadline: Nanos,
}

/// Moves from epoch to epoch of a session, and collects notifications while there is none. Also counts what the host has not popped.
#[derive(Clone, Debug)]
pub struct Carry {
    pub(crate) next_notify_seq: u64,
    pub(crate) unacknowledged: VecDeque<Standalone>,
    pub(crate) seen: NotifyWindow,
    pub(crate) unpopped_messages: u64,
    pub(crate) unpopped_bytes: u64,
}

impl Default for Carry {
    fn default() -> Self {
        Carry {
            next_notify_seq: 1,
            unacknowledged: VecDeque::new(),
            seen: NotifyWindow::default(),
            unpopped_messages: 0,
            unpopped_bytes: 0,
        }
    }
}

impl Carry {
    /// Queues a notification for the next epoch; `message_limit` is the longest that the session will take.
    pub fn queue(
        &mut self,
        message: &[u8],
        deadline: Nanos,
        message_limit: usize,
    ) -> Result<NotifySeq, SubmitError> {
        if message.len() > message_limit {
            return Err(SubmitError::MessageTooLong { len: message.len(), limit: message_limit });
        }
        let bytes = self.bytes();
        let count = self.unacknowledged.len() as u32;
        if count >= UNCONNECTED_MESSAGES || bytes >= UNCONNECTED_BYTES {
            return Err(SubmitError::TooManyNotifications {
                count,
                bytes,
                max_count: UNCONNECTED_MESSAGES,
                max_bytes: UNCONNECTED_BYTES,
            });
        }
        let seq = NotifySeq(self.next_notify_seq);
        self.next_notify_seq += 1;
        self.unacknowledged.push_back(Standalone { seq, message: message.to_vec(), deadline });
        Ok(seq)
    }

    /// Puts notifications that another path did not get rid of in front of those that wait, however many wait; its session is not
    /// resumed, so numbers start anew.
    pub fn put_back(&mut self, messages: Vec<Vec<u8>>, deadline: Nanos) {
        if messages.is_empty() {
            return;
        }
        for message in messages.into_iter().rev() {
            self.unacknowledged.push_front(Standalone { seq: NotifySeq(0), message, deadline });
        }
        *self = std::mem::take(self).restart();
    }

    /// Puts what was queued while the epoch before was ending behind what that epoch did not get rid of.
    pub fn append(&mut self, queued: Carry) {
        for one in queued.unacknowledged {
            let seq = NotifySeq(self.next_notify_seq);
            self.next_notify_seq += 1;
            self.unacknowledged.push_back(Standalone { seq, ..one });
        }
        self.unpopped_messages += queued.unpopped_messages;
        self.unpopped_bytes += queued.unpopped_bytes;
    }

    /// Takes out what waits, for a path that numbers it itself.
    pub fn drain(&mut self) -> VecDeque<Standalone> {
        std::mem::take(&mut self.unacknowledged)
    }

    /// For another session with the same peer instance: its numbers start anew on both sides, what waits and what the host has not popped stays.
    pub fn restart(mut self) -> Carry {
        self.next_notify_seq = 1;
        self.seen = NotifyWindow::default();
        for one in &mut self.unacknowledged {
            one.seq = NotifySeq(self.next_notify_seq);
            self.next_notify_seq += 1;
        }
        self
    }

    /// Drops what is past its deadline; the numbers dropped.
    pub fn expire(&mut self, now: Nanos) -> Vec<NotifySeq> {
        let mut expired = Vec::new();
        self.unacknowledged.retain(|one| {
            let keep = one.deadline > now;
            if !keep {
                expired.push(one.seq);
            }
            keep
        });
        expired
    }

    /// Gives everything that waits a new deadline: none while there is a session (the peer may be slow, it is not gone),
    /// one that counts from its end when there is none any more.
    pub fn set_deadlines(&mut self, deadline: Nanos) {
        self.unacknowledged.iter_mut().for_each(|one| one.deadline = deadline);
    }

    /// Earliest deadline.
    pub fn next_deadline(&self) -> Option<Nanos> {
        self.unacknowledged.iter().map(|one| one.deadline).min()
    }

    /// The host took messages that an earlier epoch delivered.
    pub fn on_popped(&mut self, messages: u64, bytes: u64) {
        self.unpopped_messages = self.unpopped_messages.saturating_sub(messages);
        self.unpopped_bytes = self.unpopped_bytes.saturating_sub(bytes);
    }

    /// Waiting notifications.
    pub fn waiting(&self) -> &VecDeque<Standalone> {
        &self.unacknowledged
    }

    fn bytes(&self) -> u64 {
        self.unacknowledged.iter().map(|one| one.message.len() as u64).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_queued_at_an_end_comes_behind_what_the_epoch_left_under_numbers_of_its_own() {
        let mut left =
            Carry { next_notify_seq: 8, unpopped_messages: 2, unpopped_bytes: 20, ..Carry::default() };
        left.unacknowledged.push_back(Standalone {
            seq: NotifySeq(7),
            message: b"left".to_vec(),
            deadline: Nanos(1),
        });
        let mut queued = Carry { unpopped_messages: 1, unpopped_bytes: 5, ..Carry::default() };
        queued.queue(b"first", Nanos(3), 100).expect("queue");
        queued.queue(b"second", Nanos(4), 100).expect("queue");
        left.append(queued);
        let waiting: Vec<_> =
            left.waiting().iter().map(|one| (one.seq.0, one.message.as_slice(), one.deadline.0)).collect();
        assert_eq!(waiting, [(7, &b"left"[..], 1), (8, b"first", 3), (9, b"second", 4)]);
        assert_eq!(left.queue(b"third", Nanos(5), 100).expect("queue"), NotifySeq(10));
        assert_eq!((left.unpopped_messages, left.unpopped_bytes), (3, 25));
    }

    #[test]
    fn what_waits_expires_only_by_the_deadline_that_it_was_given_last() {
        let mut carry = Carry::default();
        let first = carry.queue(b"one", Nanos(10), 100).expect("queue");
        let second = carry.queue(b"two", Nanos(20), 100).expect("queue");
        carry.set_deadlines(Nanos(u64::MAX));
        assert!(carry.expire(Nanos(u64::MAX - 1)).is_empty(), "a session is there: nothing expires");
        carry.set_deadlines(Nanos(50));
        assert_eq!(carry.next_deadline(), Some(Nanos(50)));
        assert!(carry.expire(Nanos(49)).is_empty());
        assert_eq!(carry.expire(Nanos(50)), [first, second]);
        assert!(carry.waiting().is_empty());
    }
}

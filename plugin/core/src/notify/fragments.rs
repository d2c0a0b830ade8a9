//! Messages that do not fit one record: cut into fragments, put together again.
//!
//! ```text
//!   fragment 0   fragment 1   …   fragment count − 1
//!   | full record | full record |   | what is left |      one after the other over one endpoint
//!   `- not looked up: only the last one says what the message belongs to
//! ```
//! Of each class of endpoints (control; all lanes together) a sender has one message under way at a time, so a receiver
//! keeps at most one unfinished message of each.

use super::{BodyFlags, ID_BYTES};

/// Longest message, and so the most that a receiver keeps of an unfinished one (an id comes on top).
pub const MAX_MESSAGE_BYTES: u32 = 8 << 20;

/// Longest body.
pub const MAX_BODY_BYTES: u32 = MAX_MESSAGE_BYTES + ID_BYTES as u32;

/// Room made for a body whose first fragment came: the rest grows with what really arrives.
const FIRST_ROOM: usize = 64 * 1024;

/// Where a record stands in a longer message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fragment {
    /// Number of the message; unique in the session.
    pub key: u64,
    /// Position, from 0.
    pub index: u32,
    /// Of how many, at least 2.
    pub count: u32,
    /// Length of the whole body.
    pub total_len: u32,
}

impl Fragment {
    /// The fragment that begins at byte `sent` of a body cut at `limit`; `None` when one record takes it all.
    pub fn of(key: u64, sent: usize, total_len: usize, limit: usize) -> Option<Fragment> {
        (total_len > limit).then(|| Fragment {
            key,
            index: (sent / limit) as u32,
            count: total_len.div_ceil(limit) as u32,
            total_len: total_len as u32,
        })
    }

    /// Whether the message is complete with it.
    pub fn is_last(&self) -> bool {
        self.index + 1 == self.count
    }
}

/// Why a fragment cannot be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FragmentError {
    /// None of its message has come before it.
    #[error("fragment {index} of message {key}, of which there is no beginning")]
    NoBeginning {
        /// Message.
        key: u64,
        /// Position.
        index: u32,
    },
    /// Another one is due: this one is repeated, or one is missing.
    #[error("fragment {got} of message {key}, where {expected} is due")]
    Order {
        /// Message.
        key: u64,
        /// The one that is due.
        expected: u32,
        /// The one that came.
        got: u32,
    },
    /// The fragments of one message disagree about it.
    #[error("fragment {index} of message {key} tells another count, length or kind than those before it")]
    Changed {
        /// Message.
        key: u64,
        /// Position.
        index: u32,
    },
    /// The bytes of the fragments do not add up.
    #[error("message {key} of {total_len} bytes has {received} with fragment {index}")]
    Length {
        /// Message.
        key: u64,
        /// Position.
        index: u32,
        /// With this one.
        received: u64,
        /// As told.
        total_len: u32,
    },
}

/// Puts the messages of one class together, one at a time.
#[derive(Debug, Default)]
pub struct Reassembly {
    partial: Option<Partial>,
}

#[derive(Debug)]
struct Partial {
    key: u64,
    next: u32,
    count: u32,
    total_len: u32,
    flags: BodyFlags,
    bytes: Vec<u8>,
}

impl Reassembly {
    /// Bytes of the unfinished message.
    pub fn held_bytes(&self) -> u64 {
        self.partial.as_ref().map_or(0, |partial| partial.bytes.len() as u64)
    }

    /// Gives an unfinished message up, if there is one that does not go on with `next`: its sender has.
    #[must_use]
    pub fn give_up(&mut self, next: Option<&Fragment>) -> bool {
        let other = |partial: &Partial| next.is_none_or(|next| next.index == 0 && next.key != partial.key);
        self.partial.take_if(|partial| other(partial)).is_some()
    }

    /// Takes the next fragment; the body when it is complete.
    pub fn add(
        &mut self,
        fragment: Fragment,
        flags: BodyFlags,
        part: &[u8],
    ) -> Result<Option<Vec<u8>>, FragmentError> {
        let Fragment { key, index, count, total_len } = fragment;
        if self.partial.is_none() && index == 0 {
            let bytes = Vec::with_capacity(FIRST_ROOM.min(total_len as usize));
            self.partial = Some(Partial { key, next: 0, count, total_len, flags, bytes });
        }
        let partial = self.partial.as_mut().filter(|partial| partial.key == key);
        let partial = partial.ok_or(FragmentError::NoBeginning { key, index })?;
        if index != partial.next {
            return Err(FragmentError::Order { key, expected: partial.next, got: index });
        }
        if (partial.count, partial.total_len, partial.flags) != (count, total_len, flags) {
            return Err(FragmentError::Changed { key, index });
        }
        let received = (partial.bytes.len() + part.len()) as u64;
        // Each of those that are left has a byte at least.
        let (left, total) = (u64::from(count - index - 1), u64::from(total_len));
        let fits = if left == 0 { received == total } else { received + left <= total };
        if !fits {
            return Err(FragmentError::Length { key, index, received, total_len });
        }
        partial.bytes.extend_from_slice(part);
        partial.next += 1;
        Ok(if left == 0 { self.partial.take().map(|partial| partial.bytes) } else { None })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(key: u64, body: &[u8], limit: usize) -> Vec<(Fragment, Vec<u8>)> {
        let parts = body.chunks(limit).enumerate();
        parts
            .map(|(nth, part)| {
                (Fragment::of(key, nth * limit, body.len(), limit).expect("longer than one"), part.to_vec())
            })
            .collect()
    }

    fn put(
        reassembly: &mut Reassembly,
        parts: &[(Fragment, Vec<u8>)],
    ) -> Result<Option<Vec<u8>>, FragmentError> {
        parts.iter().try_fold(None, |done, (fragment, part)| {
            assert_eq!(done, None, "complete with the last one only");
            reassembly.add(*fragment, BodyFlags::MESSAGE, part)
        })
    }

    #[test]
    fn what_was_cut_is_put_together_and_nothing_is_kept() {
        for len in [11, 19, 20, 21, 100] {
            let body: Vec<u8> = (0..len).collect();
            let parts = cut(3, &body, 10);
            assert_eq!(parts.len(), usize::from(len).div_ceil(10));
            assert!(parts.last().is_some_and(|(fragment, _)| fragment.is_last()));
            let mut reassembly = Reassembly::default();
            assert_eq!(put(&mut reassembly, &parts), Ok(Some(body)));
            assert_eq!(reassembly.held_bytes(), 0);
        }
        assert_eq!(Fragment::of(3, 0, 10, 10), None, "one record takes it");
    }

    #[test]
    fn another_message_replaces_an_unfinished_one() {
        let (first, second) = (cut(1, &[1; 30], 10), cut(2, &[2; 20], 10));
        let mut reassembly = Reassembly::default();
        assert_eq!(put(&mut reassembly, &first[..2]), Ok(None));
        assert!(!reassembly.give_up(Some(&first[2].0)), "that goes on with it");
        assert!(reassembly.give_up(Some(&second[0].0)));
        assert_eq!(put(&mut reassembly, &second), Ok(Some(vec![2; 20])));
        assert_eq!(put(&mut reassembly, &first[..1]), Ok(None));
        assert!(reassembly.give_up(None));
        assert_eq!(reassembly.held_bytes(), 0);
    }

    #[test]
    fn fragments_out_of_place_are_refused_with_their_cause() {
        let parts = cut(7, &[5; 35], 10);
        let after = |before: usize, fragment: Fragment, part: &[u8]| {
            let mut reassembly = Reassembly::default();
            assert_eq!(put(&mut reassembly, &parts[..before]), Ok(None));
            reassembly.add(fragment, BodyFlags::MESSAGE, part).expect_err("refused")
        };
        let of = |index| parts[index as usize].0;
        let part = &[5; 10];
        assert_eq!(after(0, of(1), part), FragmentError::NoBeginning { key: 7, index: 1 });
        assert_eq!(after(1, of(0), part), FragmentError::Order { key: 7, expected: 1, got: 0 }, "a repeat");
        assert_eq!(after(1, of(2), part), FragmentError::Order { key: 7, expected: 1, got: 2 }, "a gap");
        let other = Fragment { key: 8, ..of(1) };
        assert_eq!(after(1, other, part), FragmentError::NoBeginning { key: 8, index: 1 });
        for changed in [Fragment { count: 5, ..of(1) }, Fragment { total_len: 36, ..of(1) }] {
            assert_eq!(after(1, changed, part), FragmentError::Changed { key: 7, index: 1 });
        }
        assert!(matches!(after(3, of(3), &[5; 4]), FragmentError::Length { received: 34, .. }));
        assert!(matches!(after(3, of(3), &[5; 6]), FragmentError::Length { received: 36, .. }));
        assert!(
            matches!(after(1, of(1), &[5; 24]), FragmentError::Length { received: 34, .. }),
            "no room for the rest"
        );
    }
}

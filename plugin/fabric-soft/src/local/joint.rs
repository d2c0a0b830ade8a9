//! One pull done by several threads: what a receiver takes of messages at once, on one connection.
//!
//! ```text
//! bytes of the pull, in order:  | group | group | group | …
//! taker:    fills groups ─ runs them from the front ─┐
//! threads:            run them from the back         ├─ waits for those that a thread is at ─ result
//! ```
//! A group is a call of its own with a stamp of its own, so each tells for itself what was copied from a peer in order. The memory of
//! all groups stays lent until the taker has the result of each; a thread that is late finds nothing ready.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::{Mutex, MutexGuard};

use super::peer::Peer;
use super::pull::{Batch, Fault, Stamp};

/// Groups of one pull at most.
const GROUPS: usize = 16;
/// Bytes of a group: about ten microseconds, worth a call, and no long wait for the last one.
const MIN_GROUP_BYTES: usize = 64 << 10;
const MAX_GROUP_BYTES: usize = 256 << 10;
/// Pieces in a group at most.
const GROUP_PARTS: usize = 128;

/// A call that some thread will make.
struct Group {
    batch: Batch,
    state: State,
}

enum State {
    Empty,
    Ready(Arc<Peer>, Stamp),
    /// Parts copied from the first on, and what is wrong with the next.
    Ended(usize, Option<Fault>),
}

/// The pull of a fabric that its copy threads can join; there is one at a time.
pub struct Joint {
    groups: Box<[Mutex<Group>]>,
    /// The taker's: where its messages end, in bytes of the pull.
    ends: Mutex<Vec<usize>>,
    ready: AtomicUsize,
}

impl Joint {
    /// `threads`: whether there are any to join.
    pub fn new(threads: bool) -> Joint {
        let group = |_| Mutex::new(Group { batch: Batch::new(GROUP_PARTS), state: State::Empty });
        let groups = (0..if threads { GROUPS } else { 0 }).map(group).collect();
        Joint { groups, ends: Mutex::default(), ready: AtomicUsize::new(0) }
    }

    /// Whether a group waits for a thread.
    pub fn is_ready(&self) -> bool {
        self.ready.load(Ordering::SeqCst) != 0
    }

    /// Begins a pull of about so many bytes; `None`: it is not worth it, nobody could join, or another one is under way.
    pub fn begin<'a>(&'a self, bytes: usize, peer: &'a Arc<Peer>, stamp: &'a Stamp) -> Option<Pull<'a>> {
        if self.groups.is_empty() || bytes < 2 * MIN_GROUP_BYTES {
            return None;
        }
        let mut ends = self.ends.try_lock()?;
        ends.clear();
        let group_bytes =
            (bytes / (GROUPS / 2)).clamp(MIN_GROUP_BYTES, MAX_GROUP_BYTES).next_multiple_of(4096);
        Some(Pull { joint: self, peer, stamp, ends, group_bytes, open: None, filled: 0, bytes: 0 })
    }

    /// Copies the group at hand that is last; `false`: there is none.
    pub fn help(&self) -> bool {
        self.groups.iter().rev().any(|group| group.try_lock().is_some_and(|mut group| self.run(&mut group)))
    }

    fn run(&self, group: &mut Group) -> bool {
        let State::Ready(peer, stamp) = &group.state else { return false };
        self.ready.fetch_sub(1, Ordering::SeqCst);
        // SAFETY: the caller of `Pull::add` lends the places until the group has ended and its lock is free.
        let (done, fault) = unsafe { group.batch.run(peer, stamp) };
        group.state = State::Ended(done, fault);
        true
    }
}

/// A pull while it is put together and done.
pub struct Pull<'a> {
    joint: &'a Joint,
    peer: &'a Arc<Peer>,
    stamp: &'a Stamp,
    ends: MutexGuard<'a, Vec<usize>>,
    group_bytes: usize,
    /// The group that is being filled.
    open: Option<MutexGuard<'a, Group>>,
    filled: usize,
    bytes: usize,
}

/// What came of a pull.
#[derive(Debug)]
pub struct Pulled {
    /// Messages that are all there, from the first on, and what is wrong with the next.
    pub messages: usize,
    pub fault: Option<Fault>,
    pub calls: usize,
    pub pieces: usize,
}

impl<'a> Pull<'a> {
    /// Adds a piece of the message at hand; `false`: there is no room for all of it, and the message is not pulled by this.
    ///
    /// # Safety
    /// `to` is memory whose owner lets it be overwritten until [`Pull::finish`] returns.
    pub unsafe fn add(&mut self, mut to: u64, mut from: u64, key: u64, mut len: usize) -> bool {
        while len != 0 {
            let group_bytes = self.group_bytes;
            let Some(batch) = self.batch() else { return false };
            let take = len.min(group_bytes - batch.bytes());
            if take == 0 || !batch.add(to, from, key, take, None) {
                self.close();
                continue;
            }
            (to, from, len) = (to.wrapping_add(take as u64), from.wrapping_add(take as u64), len - take);
            self.bytes += take;
        }
        true
    }

    /// The message at hand has been added.
    pub fn end_message(&mut self) {
        self.ends.push(self.bytes);
    }

    /// Where the next piece goes; `None`: all groups are full.
    fn batch(&mut self) -> Option<&mut Batch> {
        if self.open.is_none() {
            let mut group = self.joint.groups.get(self.filled)?.lock();
            group.batch.clear();
            self.open = Some(group);
            self.filled += 1;
        }
        self.open.as_mut().map(|group| &mut group.batch)
    }

    /// Leaves the group at hand to whoever comes first.
    fn close(&mut self) {
        if let Some(mut group) = self.open.take() {
            group.state = State::Ready(Arc::clone(self.peer), *self.stamp);
            self.joint.ready.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Copies what no thread has begun, and waits for the others. `offer` is called when all is ready.
    pub fn finish(mut self, offer: impl FnOnce()) -> Pulled {
        self.close();
        offer();
        let groups = &self.joint.groups[..self.filled];
        for group in groups {
            if let Some(mut group) = group.try_lock() {
                self.joint.run(&mut group);
            }
        }
        let mut pulled = Pulled { messages: 0, fault: None, calls: groups.len(), pieces: 0 };
        let (mut bytes, mut whole) = (0, true);
        for group in groups {
            // A thread is at it, or was before it began: at most a group's bytes.
            let mut group = group.lock();
            self.joint.run(&mut group);
            let State::Ended(done, fault) = std::mem::replace(&mut group.state, State::Empty) else {
                unreachable!("a group that was ready has been run")
            };
            pulled.pieces += group.batch.pieces();
            if whole {
                // What comes behind one that is not whole does not count, and is asked for again.
                bytes += group.batch.bytes_of_first(done);
                whole = done == group.batch.len();
                pulled.fault = fault;
            }
        }
        pulled.messages = self.ends.partition_point(|&end| end <= bytes);
        pulled
    }
}

impl Drop for Pull<'_> {
    /// Whoever did not come to [`Pull::finish`] lends nothing any more.
    fn drop(&mut self) {
        self.open = None;
        for group in &self.joint.groups[..self.filled] {
            let mut group = group.lock();
            if matches!(std::mem::replace(&mut group.state, State::Empty), State::Ready(..)) {
                self.joint.ready.fetch_sub(1, Ordering::SeqCst);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;
    use crate::local::{LocalConfig, LocalFabric};

    /// This process as its own peer, with a stamp that is right.
    fn ourselves(fabric: &LocalFabric, words: &[u64; 3]) -> (Arc<Peer>, Stamp) {
        let address = fabric.inner.address.clone();
        let peer = Arc::new(Peer::open(&address, &address, 9).expect("own memory can be read"));
        (peer, Stamp { addr: words.as_ptr().expose_provenance() as u64, words: *words })
    }

    fn addr(bytes: &[u8]) -> u64 {
        bytes.as_ptr().expose_provenance() as u64
    }

    struct Stops<'a>(&'a AtomicBool);

    impl Drop for Stops<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    fn open() -> Arc<LocalFabric> {
        LocalFabric::new(LocalConfig { copy_threads: 0, ..LocalConfig::default() }).unwrap()
    }

    #[test]
    fn every_byte_of_a_joint_pull_is_there_when_it_ends_and_late_helpers_find_nothing() {
        let (fabric, words) = (open(), [1, 2, 3]);
        let (peer, stamp) = ourselves(&fabric, &words);
        let joint = Joint::new(true);
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            // Also when something is wrong: the helpers end, and the test with them.
            let _stops = Stops(&stop);
            for _ in 0..2 {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        joint.help();
                        std::thread::yield_now();
                    }
                });
            }
            for round in 0..200usize {
                let lens = [70_000 + round, 1, 0, 300_001, 64 << 10, 5];
                let total: usize = lens.iter().sum();
                let from: Vec<u8> = (0..total).map(|at| (at * 7 + round) as u8).collect();
                let mut to = vec![0xEEu8; total + 2];
                let mut pull = joint.begin(total, &peer, &stamp).expect("it is long enough");
                assert!(joint.begin(total, &peer, &stamp).is_none(), "there is one at a time");
                let place = to[1..].as_mut_ptr().expose_provenance() as u64;
                let mut at = 0;
                for len in lens {
                    // SAFETY: `to` outlives the pull and is not looked at before its end.
                    assert!(unsafe { pull.add(place + at as u64, addr(&from[at..]), 0, len) });
                    pull.end_message();
                    at += len;
                }
                let pulled = pull.finish(|| {});
                assert_eq!((pulled.messages, pulled.fault), (lens.len(), None), "round {round}");
                assert!(to[1..][..total] == from[..], "round {round}");
                assert_eq!((to[0], to[total + 1]), (0xEE, 0xEE), "sentinels of round {round}");
                assert!(!joint.is_ready() && !joint.help());
            }
        });
    }

    #[test]
    fn helpers_do_groups_from_the_back_and_the_taker_the_others() {
        let (fabric, words) = (open(), [1, 2, 3]);
        let (peer, stamp) = ourselves(&fabric, &words);
        let joint = Joint::new(true);
        let from = vec![7; 3 << 16];
        for helps in 0..=3 {
            let mut to = vec![0u8; 3 << 16];
            let place = to.as_mut_ptr().expose_provenance() as u64;
            let mut pull = joint.begin(from.len(), &peer, &stamp).expect("it is long enough");
            // SAFETY: `to` outlives the pull.
            assert!(unsafe { pull.add(place, addr(&from), 0, from.len()) });
            pull.end_message();
            let mut left = usize::MAX;
            let pulled = pull.finish(|| {
                for _ in 0..helps {
                    assert!(joint.help());
                }
                left = joint.ready.load(Ordering::SeqCst);
            });
            assert_eq!((pulled.messages, pulled.fault, pulled.calls, left), (1, None, 3, 3 - helps));
            assert!(to == from, "{helps} groups by a helper");
        }
    }

    #[test]
    fn what_comes_behind_a_message_that_cannot_be_placed_does_not_count() {
        let (fabric, words) = (open(), [1, 2, 3]);
        let (peer, stamp) = ourselves(&fabric, &words);
        let joint = Joint::new(true);
        let from = vec![7; 4 << 16];
        let mut to = vec![0u8; 4 << 16];
        let mut pull = joint.begin(from.len(), &peer, &stamp).expect("it is long enough");
        let place = to.as_mut_ptr().expose_provenance() as u64;
        for nth in 0..4 {
            let offset = nth << 16;
            // Nothing is mapped at the first page.
            let place = if nth == 2 { 4096 } else { place + offset };
            // SAFETY: `to` outlives the pull; the kernel refuses what is not mapped.
            assert!(unsafe { pull.add(place, addr(&from) + offset, 0, 1 << 16) });
            pull.end_message();
        }
        let pulled = pull.finish(|| {});
        assert_eq!((pulled.messages, pulled.fault), (2, Some(Fault::OwnMemory)));
        assert!(to[..2 << 16].iter().all(|&byte| byte == 7));
        assert!(to[2 << 16..3 << 16].iter().all(|&byte| byte == 0));
    }

    #[test]
    fn a_pull_under_a_wrong_stamp_counts_for_nothing() {
        let (fabric, words) = (open(), [1, 2, 3]);
        let (peer, mut stamp) = ourselves(&fabric, &words);
        stamp.words[2] = 4;
        let joint = Joint::new(true);
        let from = vec![7; 3 << 16];
        let mut to = vec![0u8; 3 << 16];
        let mut pull = joint.begin(from.len(), &peer, &stamp).expect("it is long enough");
        // SAFETY: `to` outlives the pull.
        assert!(unsafe { pull.add(to.as_mut_ptr().expose_provenance() as u64, addr(&from), 0, from.len()) });
        pull.end_message();
        let pulled = pull.finish(|| {});
        assert_eq!((pulled.messages, pulled.fault), (0, Some(Fault::Gone)));
    }

    #[test]
    fn a_pull_that_is_given_up_leaves_nothing_to_a_helper() {
        let (fabric, words) = (open(), [1, 2, 3]);
        let (peer, stamp) = ourselves(&fabric, &words);
        let joint = Joint::new(true);
        let from = vec![7; 3 << 16];
        let mut to = vec![0u8; 3 << 16];
        let place = to.as_mut_ptr().expose_provenance() as u64;
        let mut pull = joint.begin(from.len(), &peer, &stamp).expect("it is long enough");
        // SAFETY: `to` outlives the pull.
        assert!(unsafe { pull.add(place, addr(&from), 0, from.len()) });
        assert!(joint.is_ready());
        drop(pull);
        assert!(!joint.is_ready() && !joint.help());
        assert!(to.iter().all(|&byte| byte == 0));
        assert!(joint.begin(from.len(), &peer, &stamp).is_some(), "the next one can begin");
    }

    #[test]
    fn what_is_short_or_has_no_thread_is_pulled_alone() {
        let (fabric, words) = (open(), [1, 2, 3]);
        let (peer, stamp) = ourselves(&fabric, &words);
        assert!(Joint::new(true).begin(2 * MIN_GROUP_BYTES - 1, &peer, &stamp).is_none());
        assert!(Joint::new(false).begin(1 << 30, &peer, &stamp).is_none());
    }

    #[test]
    fn more_than_all_groups_hold_is_left_for_the_next_pull() {
        let (fabric, words) = (open(), [1, 2, 3]);
        let (peer, stamp) = ourselves(&fabric, &words);
        let joint = Joint::new(true);
        let from = vec![7; 1 << 16];
        let mut to = vec![0u8; 1 << 16];
        let mut pull = joint.begin(GROUPS * MAX_GROUP_BYTES * 2, &peer, &stamp).expect("it is long enough");
        let place = to.as_mut_ptr().expose_provenance() as u64;
        let mut messages = 0;
        // SAFETY: `to` outlives the pull.
        while unsafe { pull.add(place, addr(&from), 0, from.len()) } {
            pull.end_message();
            messages += 1;
        }
        assert_eq!(messages, (GROUPS * MAX_GROUP_BYTES) >> 16);
        let pulled = pull.finish(|| {});
        assert_eq!((pulled.messages, pulled.fault, pulled.calls), (messages, None, GROUPS));
    }
}

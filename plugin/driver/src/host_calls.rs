//! Whether the host itself moves work on, so that the engine's own threads leave it to do so.

use baton_core::Nanos;
use std::sync::atomic::{AtomicU64, Ordering};

/// A host that looked in vain this recently is about to look again.
const RECENT_NS: u64 = 300_000;
/// Shortest time over which calls are counted.
const WINDOW_NS: u64 = 1_000_000;
/// A host that calls so often within a window's time is at it, however long each call takes: over a soft device a post
/// may take as long as its transfer, so posts count as well...
const CALLS_PER_WINDOW: u64 = 2;
/// ...but a post moves on nothing else: of the calls so many must have looked for completions.
const LOOKS_PER_WINDOW: u64 = 1;
/// For how long a host that is at it is left alone before the next look: a quarter of the time for which it has been, within
/// these. Each look takes a processor from somebody, and a host that stops is missed for two of them at most.
const LEAVE_NS: std::ops::RangeInclusive<u64> = 1_000_000..=4_000_000;

/// Calls of the host that move work on.
#[derive(Default)]
pub(crate) struct HostCalls {
    /// Some are lost when two threads call at once: only whether there are many is of interest.
    looks: AtomicU64,
    posts: AtomicU64,
    looked_ns: AtomicU64,
}

fn one_more(counter: &AtomicU64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
}

impl HostCalls {
    /// It posted something.
    pub fn post(&self) {
        one_more(&self.posts);
    }

    /// It looks for completions, and moves on what it finds.
    pub fn look(&self) {
        one_more(&self.looks);
    }

    /// It has looked, and the time is known.
    pub fn looked(&self, now: Nanos) {
        self.looked_ns.store(now.0, Ordering::Relaxed);
    }
}

/// What one of the engine's threads has seen of the host.
#[derive(Default)]
pub(crate) struct HostWatch {
    looks: u64,
    posts: u64,
    since: Nanos,
    busy: bool,
    /// Since when it has been at it, look after look.
    at_it_since: Option<Nanos>,
}

impl HostWatch {
    /// Whether the host moves work on by itself.
    pub fn host_is_at_it(&mut self, calls: &HostCalls, now: Nanos) -> bool {
        let past_ns = now.since(self.since);
        if past_ns >= WINDOW_NS {
            let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
            let (looks, posts, windows) = (read(&calls.looks), read(&calls.posts), past_ns / WINDOW_NS);
            let looked = looks.wrapping_sub(self.looks);
            let called = looked.saturating_add(posts.wrapping_sub(self.posts));
            self.busy = looked >= LOOKS_PER_WINDOW * windows && called >= CALLS_PER_WINDOW * windows;
            (self.looks, self.posts, self.since) = (looks, posts, now);
        }
        let looked = calls.looked_ns.load(Ordering::Relaxed);
        let at_it = self.busy || (looked != 0 && now.0.saturating_sub(looked) < RECENT_NS);
        self.at_it_since = at_it.then_some(self.at_it_since.unwrap_or(now));
        at_it
    }

    /// How long to leave it alone before the next look.
    pub fn leave_for_ns(&self, now: Nanos) -> u64 {
        let past_ns = self.at_it_since.map_or(0, |since| now.since(since));
        (past_ns / 4).clamp(*LEAVE_NS.start(), *LEAVE_NS.end())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn a_host_that_looked_in_vain_a_moment_ago_is_left_alone() {
        let (calls, mut watch) = (HostCalls::default(), HostWatch::default());
        assert!(!watch.host_is_at_it(&calls, Nanos(5 * MS)));
        calls.looked(Nanos(6 * MS));
        assert!(watch.host_is_at_it(&calls, Nanos(6 * MS + RECENT_NS - 1)));
        assert!(!watch.host_is_at_it(&calls, Nanos(6 * MS + RECENT_NS)));
    }

    #[test]
    fn a_host_that_goes_on_calling_is_left_alone_even_if_each_call_is_long_and_finds_something() {
        let (calls, mut watch) = (HostCalls::default(), HostWatch::default());
        assert!(!watch.host_is_at_it(&calls, Nanos(100 * MS)));
        for window in 1..10 {
            calls.post();
            calls.look();
            let now = Nanos((100 + window) * MS);
            assert!(watch.host_is_at_it(&calls, now), "{window}");
            assert!(
                watch.host_is_at_it(&calls, Nanos(now.0 + WINDOW_NS - 1)),
                "what was seen lasts a window"
            );
        }
        // It calls no more.
        assert!(!watch.host_is_at_it(&calls, Nanos(110 * MS)));
    }

    #[test]
    fn the_longer_a_host_is_at_it_the_longer_it_is_left_alone_until_it_stops() {
        let (calls, mut watch) = (HostCalls::default(), HostWatch::default());
        let (mut now, mut left) = (Nanos(100 * MS), Vec::new());
        for _ in 0..20 {
            calls.looked(now);
            assert!(watch.host_is_at_it(&calls, now));
            left.push(watch.leave_for_ns(now));
            now = Nanos(now.0 + left[left.len() - 1]);
        }
        assert_eq!((left[0], left[19]), (MS, 4 * MS));
        assert!(left.is_sorted(), "{left:?}");
        let stopped = Nanos(now.0 + RECENT_NS);
        assert!(!watch.host_is_at_it(&calls, stopped));
        calls.looked(stopped);
        assert!(watch.host_is_at_it(&calls, stopped));
        assert_eq!(watch.leave_for_ns(stopped), MS, "it begins anew");
    }

    #[test]
    fn a_host_that_only_posts_moves_nothing_on() {
        let (calls, mut watch) = (HostCalls::default(), HostWatch::default());
        assert!(!watch.host_is_at_it(&calls, Nanos(MS)));
        for window in 2..100 {
            (0..10).for_each(|_| calls.post());
            // Now and then it looks for one of them.
            if window % 10 == 0 {
                calls.look();
            }
            let at_it = watch.host_is_at_it(&calls, Nanos(window * MS));
            assert_eq!(at_it, window % 10 == 0, "{window}");
        }
    }

    #[test]
    fn some_calls_in_a_long_time_are_not_many() {
        let (calls, mut watch) = (HostCalls::default(), HostWatch::default());
        assert!(!watch.host_is_at_it(&calls, Nanos(MS)));
        (0..100).for_each(|_| calls.look());
        assert!(!watch.host_is_at_it(&calls, Nanos(1001 * MS)), "100 in a second");
        (0..100).for_each(|_| calls.look());
        assert!(watch.host_is_at_it(&calls, Nanos(1011 * MS)), "100 in ten milliseconds");
    }
}

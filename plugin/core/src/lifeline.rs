//! When a silent peer is asked, and when it counts as gone.
//!
//! Any byte on the lifeline and anything received from the peer is a sign of life; that own work completes is none, because a NIC or the
//! kernel does it also while the peer's process is stopped. Only after an interval without one is a PING due; after [`SILENT_INTERVALS`] of them the peer is gone.

use crate::ids::Nanos;

/// Length of an interval before scaling.
pub const INTERVAL_MS: u64 = 1000;
/// Intervals of silence after which a peer is gone.
pub const SILENT_INTERVALS: u32 = 5;

/// What to do when time has passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LifelineAction {
    /// Send PING with this number.
    SendPing(u64),
    /// The peer has been silent for too long; end its epoch. Said once.
    PeerSilent,
}

/// One session's watch.
#[derive(Debug)]
pub struct Lifeline {
    interval_ms: u64,
    last_sign: Nanos,
    /// Intervals since `last_sign` for which a PING was sent.
    pings: u32,
    next_number: u64,
    gone: bool,
}

impl Lifeline {
    /// Starts watching; `scale` multiplies the interval (`BATON_TIMEOUT_SCALE`, at least 1).
    pub fn new(now: Nanos, scale: u32) -> Self {
        let interval_ms = INTERVAL_MS * u64::from(scale.max(1));
        Self { interval_ms, last_sign: now, pings: 0, next_number: 1, gone: false }
    }

    /// A completion of work that the peer took part in, or data from it.
    pub fn on_traffic(&mut self, now: Nanos) {
        if now > self.last_sign {
            self.last_sign = now;
            self.pings = 0;
        }
    }

    /// Any lifeline message.
    pub fn on_frame(&mut self, now: Nanos) {
        self.on_traffic(now);
    }

    /// What is due; call when [`Self::next_timeout`] has come, until `None`.
    #[must_use]
    pub fn on_timeout(&mut self, now: Nanos) -> Option<LifelineAction> {
        if self.gone || now < self.due() {
            return None;
        }
        if self.pings + 1 >= SILENT_INTERVALS {
            self.gone = true;
            return Some(LifelineAction::PeerSilent);
        }
        // A thread that slept through several intervals asks once and gives the peer the rest of the time to answer.
        let number = self.next_number;
        self.next_number += 1;
        self.pings += 1;
        self.last_ask(now);
        Some(LifelineAction::SendPing(number))
    }

    /// When [`Self::on_timeout`] has something to do; `None` once the peer is gone. Ask again after each call.
    #[must_use]
    pub fn next_timeout(&self) -> Option<Nanos> {
        (!self.gone).then(|| self.due())
    }

    fn due(&self) -> Nanos {
        self.last_sign.plus_ms(self.interval_ms * u64::from(self.pings + 1))
    }

    /// Keeps at least one interval between a late question and the next, by moving the start of the silence.
    fn last_ask(&mut self, now: Nanos) {
        let asked_for = self.last_sign.plus_ms(self.interval_ms * u64::from(self.pings));
        let late = now.since(asked_for);
        self.last_sign = Nanos(self.last_sign.0.saturating_add(late));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn at(ms: u64) -> Nanos {
        Nanos(0).plus_ms(ms)
    }

    /// Runs the watch up to `end` as a punctual thread would; what it did and when.
    fn run(watch: &mut Lifeline, end: Nanos) -> Vec<(u64, LifelineAction)> {
        let mut done = vec![];
        while let Some(due) = watch.next_timeout().filter(|due| *due <= end) {
            let action = watch.on_timeout(due).expect("something is due at next_timeout");
            done.push((due.0 / 1_000_000, action));
        }
        done
    }

    #[test]
    fn a_silent_peer_is_asked_every_second_and_gone_after_five() {
        use LifelineAction::*;
        let mut watch = Lifeline::new(at(0), 1);
        let done = run(&mut watch, at(60_000));
        let expected = [
            (1000, SendPing(1)),
            (2000, SendPing(2)),
            (3000, SendPing(3)),
            (4000, SendPing(4)),
            (5000, PeerSilent),
        ];
        assert_eq!(done, expected);
        assert_eq!((watch.next_timeout(), watch.on_timeout(at(99_000))), (None, None), "said once");
    }

    #[test]
    fn any_sign_of_life_starts_the_silence_anew() {
        let mut watch = Lifeline::new(at(0), 1);
        run(&mut watch, at(4500));
        watch.on_frame(at(4600));
        assert_eq!(watch.next_timeout(), Some(at(5600)));
        assert_eq!(run(&mut watch, at(9000)).len(), 4);
        watch.on_traffic(at(9100));
        assert_eq!(run(&mut watch, at(14_100)).last(), Some(&(14_100, LifelineAction::PeerSilent)));
    }

    #[test]
    fn a_busy_session_is_never_asked() {
        let mut watch = Lifeline::new(at(0), 1);
        for ms in (0..30_000).step_by(999) {
            watch.on_traffic(at(ms));
            assert_eq!(watch.on_timeout(at(ms)), None);
        }
    }

    #[test]
    fn the_scale_stretches_everything() {
        let mut watch = Lifeline::new(at(0), 10);
        assert_eq!(run(&mut watch, at(49_999)).len(), 4);
        assert_eq!(run(&mut watch, at(50_000)), [(50_000, LifelineAction::PeerSilent)]);
    }

    #[test]
    fn a_thread_that_slept_gives_the_peer_time_to_answer() {
        let mut watch = Lifeline::new(at(0), 1);
        assert_eq!(watch.on_timeout(at(20_000)), Some(LifelineAction::SendPing(1)));
        assert_eq!(watch.on_timeout(at(20_000)), None);
        assert_eq!(watch.next_timeout(), Some(at(21_000)));
        watch.on_frame(at(20_001));
        assert_eq!(watch.next_timeout(), Some(at(21_001)));
    }

    proptest! {
        #[test]
        fn a_peer_is_never_given_up_within_four_seconds_of_a_sign(
            steps in prop::collection::vec((0..3000u64, any::<bool>()), 1..100),
        ) {
            let (mut watch, mut now, mut sign) = (Lifeline::new(at(0), 1), 0, 0);
            for (step, life) in steps {
                now += step;
                if life {
                    watch.on_traffic(at(now));
                    sign = now;
                }
                while let Some(action) = watch.on_timeout(at(now)) {
                    if action == LifelineAction::PeerSilent {
                        prop_assert!(now - sign >= 5000);
                        return Ok(());
                    }
                }
                prop_assert!(watch.next_timeout().is_some_and(|due| due > at(now)));
            }
        }
    }
}

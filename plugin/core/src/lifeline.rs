//! When a silent peer is asked, and when it counts as gone.
//!
//! Any byte on the lifeline and any completion or message from the peer is a sign of life. Only after an interval
//! without one is a PING due; after [`SILENT_INTERVALS`] of them the peer is gone.

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

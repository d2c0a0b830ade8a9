//! RECVs, the words that announce them, and taking back what idle lanes do not need.
//!
//! Words of a page: RECVs of control, REQUEST, then RECVs of lane 0, lane 1, ….

use super::port::{Cargo, LanePort};
use super::{Channel, Step};
use crate::credit::{CreditWord, WordOutcome};
use crate::ids::{LaneId, Nanos};
use crate::two_sided::pool::{Holder, Pool};
use crate::two_sided::report::TwoViolation;
use crate::two_sided::setup::TwoMemory;

/// RECVs of one action at most.
const RECV_BATCH: u32 = 32;
const REQUEST_WORD: usize = 1;
const FIRST_LANE_WORD: usize = 2;

/// Bytes of a channel's credit page.
pub(super) fn page_bytes(lanes: usize) -> usize {
    (FIRST_LANE_WORD + lanes) * 8
}

impl Channel {
    /// Bytes of the credit page of a channel with that many lanes.
    pub fn credit_page_bytes(lanes: usize) -> usize {
        page_bytes(lanes)
    }

    /// RECVs first: they are announced only after they were posted.
    pub(super) fn decide_recv(&mut self, pool: &mut Pool) -> Option<Step> {
        let again = self.control.recv.to_grant();
        if again > 0 && (self.flush || again * 4 >= u64::from(self.control.depth)) {
            let first = self.control.recv.granted();
            self.control.recv.grant(again);
            return Some(Step::RecvControl { first, count: again as u32 });
        }
        let peer = self.setup.peer;
        for (nth, lane) in self.lanes.iter_mut().enumerate() {
            let missing = lane.target.saturating_sub(lane.outstanding());
            let due = missing >= lane.batch() || self.flush && missing > 0;
            if lane.starved || !due {
                continue;
            }
            self.work.slots.clear();
            for _ in 0..missing.min(RECV_BATCH) {
                match pool.lend(Holder { peer, lane: lane.id }) {
                    Some(slot) => self.work.slots.push(slot),
                    None => {
                        lane.starved = true;
                        break;
                    }
                }
            }
            if self.work.slots.is_empty() {
                continue;
            }
            let first = lane.recv.granted();
            lane.recv.grant(self.work.slots.len() as u64);
            lane.posted.extend(&self.work.slots);
            return Some(Step::RecvData { lane: nth, first });
        }
        None
    }

    /// Whether somebody may wait for what only [`Channel::flush`] tells: credit of lanes, released transfers. Nobody waits for the
    /// acknowledgement of a few notifications, nor for the RECVs that they used; both are told in time before a sender runs out.
    pub fn owes_answers(&self) -> bool {
        let lacks = |lane: &LanePort| {
            lane.recv.unannounced() > 0 || !lane.starved && lane.outstanding() < lane.target
        };
        self.durable.inbox.untold() > 0
            || self.durable.outbox.untold_releases() > 0
            || self.lanes.iter().any(lacks)
    }

    fn words(&self) -> usize {
        FIRST_LANE_WORD + self.lanes.len()
    }

    fn word_due(&self, word: usize) -> bool {
        let (untold, enough) = match word {
            0 => (self.control.recv.unannounced(), u64::from(self.control.depth / 4).max(1)),
            REQUEST_WORD => {
                let depth = u64::from(self.setup.limits.request_depth);
                (self.durable.inbox.untold(), (depth / 4).max(1))
            }
            _ => {
                let lane = &self.lanes[word - FIRST_LANE_WORD];
                let left = lane.recv.announced() - lane.recv.received();
                // Who has nearly nothing left is told at once.
                let enough = if left <= u64::from(lane.target / 4) { 1 } else { u64::from(lane.batch()) };
                (lane.recv.unannounced(), enough)
            }
        };
        untold > 0 && (self.flush || untold >= enough)
    }

    pub(super) fn decide_credit_words(&mut self, _now: Nanos) -> Option<Step> {
        let first = (0..self.words()).find(|&word| self.word_due(word))?;
        if !self.control.has_room_for_credit() {
            return None;
        }
        let last = (first..self.words()).rev().find(|&word| self.word_due(word)).unwrap_or(first);
        self.work.bytes.clear();
        for word in first..=last {
            let count = match word {
                0 => self.control.recv.announce(),
                REQUEST_WORD => self.durable.inbox.announce(),
                _ => self.lanes[word - FIRST_LANE_WORD].recv.announce(),
            };
            let word = CreditWord::encode(self.setup.epoch, count);
            self.work.bytes.extend_from_slice(&word.to_le_bytes());
        }
        self.control.credit_in_flight += 1;
        self.counters.credit_writes += 1;
        let seq = self.control.post(Cargo::Credit, self.work.bytes.len());
        Some(Step::Credit { seq, word: first })
    }

    /// Re-reads the whole page; `true`: there is more credit. For a driver that polls while something waits.
    pub fn poll_credit(&mut self, mem: &dyn TwoMemory) -> bool {
        let raised = (0..self.words()).filter(|&word| self.refresh(word, mem)).count();
        raised > 0
    }

    /// Whether something waits for credit, so that [`Channel::poll_credit`] is worth it.
    pub fn waits_for_credit(&self) -> bool {
        self.ended.is_none()
            && (self.durable.outbox.has_data()
                || !self.durable.outbox.reads.is_empty()
                || self.control.credit.available() == 0
                || self.lanes.iter().any(|lane| lane.burn > 0))
    }

    fn refresh(&mut self, word: usize, mem: &dyn TwoMemory) -> bool {
        if self.ended.is_some() {
            return false;
        }
        let credit = match word {
            0 => &mut self.control.credit,
            REQUEST_WORD => &mut self.request,
            _ => &mut self.lanes[word - FIRST_LANE_WORD].credit,
        };
        match credit.on_word(mem.load_credit(word), self.setup.epoch) {
            Ok(WordOutcome::Raised) => true,
            Ok(WordOutcome::Unchanged) => false,
            Ok(WordOutcome::Stale) => {
                self.counters.credit_words_stale += 1;
                false
            }
            Ok(WordOutcome::Lower) => {
                self.counters.credit_words_lower += 1;
                false
            }
            Err(error) => {
                self.violate(TwoViolation::Credit { word, error });
                false
            }
        }
    }

    pub(super) fn has_control_credit(&mut self, mem: &dyn TwoMemory) -> bool {
        self.control.credit.available() > 0 || self.refresh(0, mem)
    }

    pub(super) fn has_request_credit(&mut self, mem: &dyn TwoMemory) -> bool {
        self.request.available() > 0 || self.refresh(REQUEST_WORD, mem)
    }

    /// A lane with room and credit, the next in turn.
    pub(super) fn pick_lane(&mut self, mem: &dyn TwoMemory) -> Option<usize> {
        let count = self.lanes.len();
        for step in 0..count {
            let nth = (self.next_lane + step) % count;
            let lane = &self.lanes[nth];
            if lane.ledger.free() == 0 || lane.flight_bytes >= self.setup.limits.flight_bytes {
                continue;
            }
            if self.lanes[nth].credit.available() > 0 || self.refresh(FIRST_LANE_WORD + nth, mem) {
                self.next_lane = (nth + 1) % count;
                return Some(nth);
            }
        }
        None
    }

    /// The peer says that it waits. More RECVs are posted if the pool has them; a greedy peer gets no more than its share.
    pub(super) fn on_credit_request(&mut self, now: Nanos, lane: LaneId, want: u32) {
        self.counters.credit_requests_received += 1;
        let early = self.last_credit_request_in.is_some_and(|last| now.since(last) < 1_000_000);
        if early {
            self.counters.credit_requests_ignored += 1;
            return;
        }
        self.last_credit_request_in = Some(now);
        let lane = &mut self.lanes[usize::from(lane.0)];
        (lane.last_data, lane.reclaim_asked) = (now, None);
        lane.raise_target(lane.target.saturating_add(want));
    }

    /// The peer wants RECVs back: NOPs burn what nothing else uses, also credit that we have not heard of yet.
    pub(super) fn on_reclaim(&mut self, lane: LaneId, count: u32) {
        self.counters.reclaims_received += 1;
        let lane = &mut self.lanes[usize::from(lane.0)];
        lane.burn = lane.burn.max(count).min(lane.depth);
    }

    /// A lane with NOPs to send, room and credit.
    pub(super) fn pick_burner(&mut self, mem: &dyn TwoMemory) -> Option<usize> {
        (0..self.lanes.len()).find(|&nth| {
            let lane = &self.lanes[nth];
            let ready = lane.burn > 0 && lane.ledger.free() > 0;
            ready && (lane.credit.available() > 0 || self.refresh(FIRST_LANE_WORD + nth, mem))
        })
    }

    pub(super) fn next_lane_timeout(&self) -> Option<Nanos> {
        let limits = &self.setup.limits;
        let lanes = self.lanes.iter().map(|lane| match lane.reclaim_asked {
            Some(asked) => asked.plus_ms(limits.reclaim_ms),
            None => lane.last_data.plus_ms(limits.lane_idle_ms),
        });
        let busy = |lane: &super::LanePort| {
            lane.outstanding() > limits.idle_slots || lane.reclaim_asked.is_some() || lane.pool_changed
        };
        lanes.zip(&self.lanes).filter(|(_, lane)| busy(lane)).map(|(at, _)| at).min()
    }

    /// Idle lanes want less, and nothing where others have nothing; what they have beyond that, and what lies in draining slabs, is
    /// asked back where the pool needs it.
    pub(super) fn check_lanes(&mut self, now: Nanos, pool: &Pool) {
        let limits = self.setup.limits;
        let is_short = pool.is_short();
        for lane in &mut self.lanes {
            if now < lane.last_data.plus_ms(limits.lane_idle_ms) {
                continue;
            }
            // A peer that wants to send on it asks, and is not idle then.
            lane.target = if is_short { 0 } else { limits.idle_slots.clamp(1, lane.depth) };
            (lane.since_raise, lane.pool_changed) = (0, false);
            let due = lane.reclaim_asked.is_none_or(|asked| now >= asked.plus_ms(limits.reclaim_ms));
            if !due {
                continue;
            }
            let surplus = lane.outstanding().saturating_sub(lane.target);
            // NOPs use up the oldest RECVs: all up to the last one in a draining slab must go.
            let last = lane.posted.iter().rposition(|&slot| pool.is_draining(slot));
            let count = surplus.max(last.map_or(0, |at| at as u32 + 1));
            if count == 0 || !pool.wants_back() {
                lane.reclaim_asked = None;
                // Looked at again only after the next idle time.
                lane.last_data = now;
                continue;
            }
            if lane.reclaim_asked.is_some() {
                self.counters.reclaim_timeouts += 1;
            }
            (lane.reclaim, lane.reclaim_asked) = (count, Some(now));
        }
    }
}

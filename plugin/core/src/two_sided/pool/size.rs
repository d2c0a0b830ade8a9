//! How the pool grows and shrinks.

use super::{Nanos, Pool, PoolAction, Slab, SlabId, SlabState, SlotState};

impl Pool {
    /// The next thing to do; ask until `None` after every other call and at [`Pool::next_timeout`].
    #[must_use]
    pub fn next_action(&mut self, now: Nanos) -> Option<PoolAction> {
        self.resize(now);
        for (nth, slab) in (0..).zip(&mut self.slabs) {
            match &mut slab.state {
                SlabState::Allocating { told: told @ false } => {
                    *told = true;
                    return Some(PoolAction::Allocate(SlabId(nth)));
                }
                SlabState::Releasing { told: told @ false } => {
                    *told = true;
                    return Some(PoolAction::Release(SlabId(nth)));
                }
                _ => {}
            }
        }
        None
    }

    /// Whether [`Pool::next_action`] or [`Pool::next_hungry`] has something: cheap enough to ask after every step.
    #[must_use]
    pub fn wants_service(&self, now: Nanos) -> bool {
        let untold = |slab: &Slab| {
            matches!(slab.state, SlabState::Allocating { told: false } | SlabState::Releasing { told: false })
        };
        let grows = || self.wants_more() && now >= self.retry_at && self.can_grow();
        self.can_feed() || self.lent > 0 && grows() || self.slabs.iter().any(untold)
    }

    /// When it is time to look again although nothing happened.
    #[must_use]
    pub fn next_timeout(&self, now: Nanos) -> Option<Nanos> {
        let shrink = (self.active_count() > self.config.base_slabs)
            .then(|| self.last_busy.plus_ms(self.config.idle_ms))
            .map(|at| if at > now { at } else { now.plus_ms((self.config.idle_ms / 10).max(1)) });
        let retry = (self.wants_more() && now < self.retry_at).then_some(self.retry_at);
        [shrink, retry].into_iter().flatten().min()
    }

    /// The driver has made a slab, or could not.
    pub fn on_allocated(&mut self, now: Nanos, id: SlabId, made: bool) {
        let slots = self.config.slab_slots;
        let slab = &mut self.slabs[id.0 as usize];
        assert_eq!(slab.state, SlabState::Allocating { told: true }, "{id:?} was to be made");
        if !made {
            slab.state = SlabState::Gone;
            self.counters.allocation_failed += 1;
            self.retry_at = now.plus_ms(self.config.retry_ms);
            if self.is_short() {
                self.ask_all();
            }
            return;
        }
        slab.slots = vec![SlotState::Free; slots as usize];
        slab.free = (0..slots).rev().collect();
        slab.retired = 0;
        slab.state = SlabState::Active;
        self.active += 1;
        self.free += slots;
        self.usable.insert(id.0);
        self.last_busy = now;
        self.counters.expanded += 1;
    }

    /// The driver has given a slab's memory back.
    pub fn on_released(&mut self, id: SlabId) {
        let slab = &mut self.slabs[id.0 as usize];
        assert_eq!(slab.state, SlabState::Releasing { told: true }, "{id:?} was to be given back");
        slab.state = SlabState::Gone;
        slab.slots.clear();
        slab.free.clear();
        self.counters.shrunk += 1;
    }

    fn resize(&mut self, now: Nanos) {
        let total = self.active_count() * self.config.slab_slots;
        if self.peak * 2 > total {
            self.last_busy = now;
        }
        self.peak = self.lent;
        if self.wants_more() {
            if !self.revive() && now >= self.retry_at && self.slab_count() < self.config.max_slabs {
                self.add_slab();
            }
        } else if now >= self.last_busy.plus_ms(self.config.idle_ms) {
            self.drain();
        }
    }

    /// Somebody waits, or at most a quarter is free; and nothing is on its way already.
    fn wants_more(&self) -> bool {
        let coming = self.slabs.iter().any(|slab| matches!(slab.state, SlabState::Allocating { .. }));
        let total = self.active_count() * self.config.slab_slots;
        let missing = self.active_count() < self.config.base_slabs;
        !coming
            && (missing
                || !self.has_recv_slot() && !self.hungry.is_empty()
                || self.free == 0 && !self.send_hungry.is_empty()
                || self.lent > 0 && self.free * 4 <= total)
    }

    /// Whether there can be more slots than there are.
    pub(super) fn can_grow(&self) -> bool {
        self.slab_count() < self.config.max_slabs
            || self
                .slabs
                .iter()
                .any(|slab| matches!(slab.state, SlabState::Draining | SlabState::Allocating { .. }))
    }

    /// Slabs whose memory is there, comes or goes.
    pub(super) fn slab_count(&self) -> u32 {
        self.slabs.iter().filter(|slab| slab.state != SlabState::Gone).count() as u32
    }

    pub(super) fn active_count(&self) -> u32 {
        self.active
    }

    pub(super) fn add_slab(&mut self) {
        let state = SlabState::Allocating { told: false };
        let fresh = || Slab { state, slots: Vec::new(), free: Vec::new(), retired: 0 };
        match self.slabs.iter_mut().find(|slab| slab.state == SlabState::Gone) {
            Some(gone) => gone.state = state,
            None => self.slabs.push(fresh()),
        }
    }

    /// The oldest draining slab lends again; its retired slots become FREE, and only then can be posted and granted.
    fn revive(&mut self) -> bool {
        let draining = self.slabs.iter().position(|slab| slab.state == SlabState::Draining);
        let Some(nth) = draining else { return false };
        let slab = &mut self.slabs[nth];
        slab.state = SlabState::Active;
        self.active += 1;
        for (index, slot) in (0..).zip(&mut slab.slots) {
            if *slot == SlotState::Retired {
                *slot = SlotState::Free;
                slab.free.push(index);
                self.free += 1;
            }
        }
        slab.retired = 0;
        if !slab.free.is_empty() {
            self.usable.insert(nth as u32);
        }
        self.counters.revived += 1;
        true
    }

    /// The newest slabs go, as long as what is lent stays at most half of the rest.
    fn drain(&mut self) {
        let slots = self.config.slab_slots;
        let keep = (self.lent * 2).div_ceil(slots).max(self.config.base_slabs);
        while self.active_count() > keep {
            let newest = self.slabs.iter().rposition(|slab| slab.state == SlabState::Active);
            let nth = newest.expect("there are more active slabs than are kept");
            let slab = &mut self.slabs[nth];
            slab.state = SlabState::Draining;
            self.active -= 1;
            for index in slab.free.drain(..) {
                slab.slots[index as usize] = SlotState::Retired;
                slab.retired += 1;
                self.free -= 1;
            }
            // Who is idle does not look by itself.
            for slot in &slab.slots {
                if let SlotState::Posted(holder) = slot {
                    self.asked.join(holder.peer);
                }
            }
            self.usable.remove(&(nth as u32));
            self.note_drained(SlabId(nth as u32));
        }
    }

    pub(super) fn note_drained(&mut self, id: SlabId) {
        let slab = &mut self.slabs[id.0 as usize];
        if slab.state == SlabState::Draining && slab.retired == self.config.slab_slots {
            slab.state = SlabState::Releasing { told: false };
        }
    }

    /// Counts everything anew and compares; for tests and audits.
    pub fn audit(&self) {
        let (mut free, mut lent) = (0, 0);
        for (nth, slab) in (0u32..).zip(&self.slabs) {
            let count =
                |which: fn(&SlotState) -> bool| slab.slots.iter().filter(|slot| which(slot)).count() as u32;
            let slab_free = count(|slot| *slot == SlotState::Free);
            let retired = count(|slot| *slot == SlotState::Retired);
            assert_eq!(slab_free, slab.free.len() as u32, "slab {nth}: FREE slots are in its list");
            match slab.state {
                SlabState::Active => assert_eq!(retired, 0, "slab {nth}: active, nothing retired"),
                SlabState::Draining | SlabState::Releasing { .. } => {
                    assert_eq!((slab_free, slab.retired), (0, retired), "slab {nth}: draining lends nothing");
                }
                SlabState::Gone | SlabState::Allocating { .. } => {
                    assert!(
                        slab.slots.is_empty() || retired == slab.slots.len() as u32,
                        "slab {nth} has no slots"
                    );
                }
            }
            let lends = slab.state == SlabState::Active && slab_free > 0;
            assert_eq!(self.usable.contains(&nth), lends, "slab {nth}: usable ⇔ active with a free slot");
            free += slab_free;
            lent += slab.slots.len() as u32 - slab_free - retired;
        }
        let active = self.slabs.iter().filter(|slab| slab.state == SlabState::Active).count() as u32;
        assert_eq!((free, lent, active), (self.free, self.lent, self.active), "counted anew");
        let sum = |of: fn(&super::Lent) -> u32| self.peers.values().map(of).sum::<u32>();
        assert_eq!(self.lent, sum(|lent| lent.recvs + lent.sends), "every lent slot has a holder");
        assert_eq!(self.sending, sum(|lent| lent.sends), "every SENDING slot has a holder");
    }
}

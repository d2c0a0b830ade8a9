//! Bounce slots of an engine, lent to (peer, lane) as RECVs and, from the post of a SEND to its completion, to peers. Bookkeeping
//! only: the driver owns the bytes.
//!
//! ```text
//!   slot   FREE → POSTED → FILLED → PLACING → FREE | RETIRED        slab   ALLOCATING → ACTIVE ⇄ DRAINING → GONE
//!          FREE → SENDING → FREE | RETIRED
//! ```
//! RECVs may be posted for as long as a peer likes, SENDs end by themselves. So some slots are never lent as RECVs: whoever waits for
//! one to send from waits for SENDs only, and two engines full of RECVs cannot wait for each other.
//!
//! Only a FREE slot of an ACTIVE slab can be lent, and credit is granted only for what was lent and posted, so no credit is ever
//! without a RECV. A slab drains by waiting: its free slots retire at once, the others when they come back; nothing that was
//! granted is taken away. A draining slab that is needed again becomes ACTIVE, and its retired slots FREE, *before* they are lent.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap};

use serde::Serialize;

use super::codec::DATA_HEADER_BYTES;
use crate::ids::{LaneId, Nanos};

mod size;
#[cfg(test)]
mod tests;

/// Sizes and limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolConfig {
    /// Length of a slot.
    pub slot_bytes: u32,
    /// Slots of a slab: one allocation, one registration.
    pub slab_slots: u32,
    /// Slabs that are always there.
    pub base_slabs: u32,
    /// Slabs at most.
    pub max_slabs: u32,
    /// RECVs that one peer holds at most.
    pub peer_slots: u32,
    /// Slots that are kept for SENDs; of a small pool a quarter.
    pub send_reserve: u32,
    /// At most half in use for so long: the pool shrinks.
    pub idle_ms: u64,
    /// After an allocation that failed, the next is tried so much later.
    pub retry_ms: u64,
}

impl Default for PoolConfig {
    fn default() -> PoolConfig {
        PoolConfig {
            // A block of 64 KiB, which is common, is one message.
            slot_bytes: 64 * 1024 + DATA_HEADER_BYTES as u32,
            slab_slots: 16,
            base_slabs: 1,
            max_slabs: 256,
            peer_slots: 512,
            send_reserve: 4,
            idle_ms: 5_000,
            retry_ms: 1_000,
        }
    }
}

impl PoolConfig {
    /// Where messages are received in two steps ([`baton_fabric::Caps::headed_bytes`]): a slot holds the header of a long one and no more,
    /// so its length costs addresses and hardly any memory; it bounds how much one message moves.
    pub fn for_heads(headed_bytes: u32) -> PoolConfig {
        PoolConfig { slot_bytes: headed_bytes + DATA_HEADER_BYTES as u32, ..PoolConfig::default() }
    }
}

/// A peer as the engine numbers its sessions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct PeerKey(pub u32);

/// A slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SlabId(pub u32);

/// A slot. A number comes back only when its slab was given back and made again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SlotId {
    /// Its slab.
    pub slab: SlabId,
    /// Its place there.
    pub index: u32,
}

/// Whose RECV a slot is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Holder {
    /// Peer.
    pub peer: PeerKey,
    /// Lane of its session.
    pub lane: LaneId,
}

/// What a slot is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotState {
    /// To be lent.
    Free,
    /// A RECV.
    Posted(Holder),
    /// A message lies in it.
    Filled(Holder),
    /// So many copies out of it are under way.
    Placing(Holder, u32),
    /// A SEND of this peer's is made of it.
    Sending(PeerKey),
    /// Its slab goes.
    Retired,
}

/// What the driver has to do, off the progress thread, and to report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolAction {
    /// Allocate and register; then [`Pool::on_allocated`].
    Allocate(SlabId),
    /// Nothing is in it: deregister and free; then [`Pool::on_released`].
    Release(SlabId),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SlabState {
    /// The number is unused.
    Gone,
    /// Memory is being made (`told`: the driver knows).
    Allocating {
        told: bool,
    },
    Active,
    Draining,
    /// All slots retired; memory is being given back (`told`: the driver knows).
    Releasing {
        told: bool,
    },
}

#[derive(Debug)]
struct Slab {
    state: SlabState,
    slots: Vec<SlotState>,
    /// Indices of FREE slots.
    free: Vec<u32>,
    retired: u32,
}

/// Counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PoolCounters {
    /// Slabs made.
    pub expanded: u64,
    /// Slabs given back.
    pub shrunk: u64,
    /// Draining slabs taken into use again.
    pub revived: u64,
    /// Allocations that failed.
    pub allocation_failed: u64,
    /// Times that a peer got no slot because it has its share.
    pub share_reached: u64,
    /// Times that a peer got no slot because there was none.
    pub starved: u64,
    /// Slots lent for SENDs.
    pub sends: u64,
    /// Times that a peer got none to send from.
    pub send_starved: u64,
}

/// Where the pool stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PoolStats {
    /// Slabs with memory.
    pub slabs: u32,
    /// Of those, on their way out.
    pub draining: u32,
    /// Slots that can be lent.
    pub free: u32,
    /// Slots lent.
    pub lent: u32,
    /// Of those, for SENDs.
    pub sending: u32,
    /// Peers that wait for a slot for a RECV.
    pub hungry: u32,
    /// Peers that wait for one to send from.
    pub send_hungry: u32,
    /// Counters.
    pub counters: PoolCounters,
}

/// Slots that a peer has.
#[derive(Clone, Copy, Debug, Default)]
struct Lent {
    recvs: u32,
    sends: u32,
    /// It was told that it is its turn to borrow for a RECV.
    invited: bool,
}

/// Peers that wait, each once, in the order in which they began to.
#[derive(Debug, Default)]
struct Waiters {
    line: BTreeMap<u64, PeerKey>,
    place: HashMap<PeerKey, u64>,
    next: u64,
}

impl Waiters {
    /// Whether it did not wait already.
    fn join(&mut self, peer: PeerKey) -> bool {
        let Entry::Vacant(place) = self.place.entry(peer) else { return false };
        place.insert(self.next);
        self.line.insert(self.next, peer);
        self.next += 1;
        true
    }

    fn leave(&mut self, peer: PeerKey) {
        if let Some(place) = self.place.remove(&peer) {
            self.line.remove(&place);
        }
    }

    fn pop(&mut self) -> Option<PeerKey> {
        let (_, peer) = self.line.pop_first()?;
        self.place.remove(&peer);
        Some(peer)
    }

    fn len(&self) -> u32 {
        self.line.len() as u32
    }

    fn is_empty(&self) -> bool {
        self.line.is_empty()
    }

    /// How many others wait.
    fn others(&self, peer: PeerKey) -> u32 {
        self.len() - u32::from(self.place.contains_key(&peer))
    }
}

/// The pool.
#[derive(Debug)]
pub struct Pool {
    config: PoolConfig,
    slabs: Vec<Slab>,
    /// Active slabs with a free slot; the oldest is used first, so that the newest can go.
    usable: BTreeSet<u32>,
    /// Slots lent, by peer.
    peers: HashMap<PeerKey, Lent>,
    hungry: Waiters,
    send_hungry: Waiters,
    /// Peers that should look which of their RECVs they can spare.
    asked: Waiters,
    /// Slabs that are ACTIVE.
    active: u32,
    free: u32,
    lent: u32,
    sending: u32,
    /// Most slots lent since the last look.
    peak: u32,
    /// When more than half was in use, last.
    last_busy: Nanos,
    retry_at: Nanos,
    counters: PoolCounters,
}

impl Pool {
    /// An empty pool: its first slabs are its first actions.
    pub fn new(config: PoolConfig, now: Nanos) -> Pool {
        assert!(config.slab_slots > 0 && config.base_slabs > 0, "a pool has slabs, a slab has slots");
        assert!(config.base_slabs <= config.max_slabs, "base ≤ max");
        let mut pool = Pool {
            config,
            slabs: Vec::new(),
            usable: BTreeSet::new(),
            peers: HashMap::new(),
            hungry: Waiters::default(),
            send_hungry: Waiters::default(),
            asked: Waiters::default(),
            active: 0,
            free: 0,
            lent: 0,
            sending: 0,
            peak: 0,
            last_busy: now,
            retry_at: Nanos(0),
            counters: PoolCounters::default(),
        };
        (0..config.base_slabs).for_each(|_| pool.add_slab());
        pool
    }

    /// Sizes and limits.
    pub fn config(&self) -> &PoolConfig {
        &self.config
    }

    /// A peer begins to borrow.
    pub fn join(&mut self, peer: PeerKey) {
        let before = self.peers.insert(peer, Lent::default());
        assert!(before.is_none(), "{peer:?} joined twice");
    }

    /// A peer is gone; all it had must have come back.
    pub fn leave(&mut self, peer: PeerKey) {
        let lent = self.peers.remove(&peer).expect("a peer that leaves has joined");
        assert_eq!((lent.recvs, lent.sends), (0, 0), "{peer:?} leaves with slots");
        self.hungry.leave(peer);
        self.send_hungry.leave(peer);
        self.asked.leave(peer);
    }

    /// A FREE slot becomes a RECV of that lane; `None`: there is none, or the peer has its share. A peer that got none because
    /// there is none is told by [`Pool::next_hungry`] when it is worth asking again.
    pub fn lend(&mut self, holder: Holder) -> Option<SlotId> {
        let Lent { recvs: has, invited, .. } = self.peers[&holder.peer];
        if has >= self.share_of(holder.peer) {
            self.counters.share_reached += 1;
            return None;
        }
        // Nobody passes those who wait: what one that gives a slot back took again at once would never come to them.
        let its_turn = invited || self.recv_slots() > self.hungry.others(holder.peer);
        let slot =
            if its_turn && self.recv_slots() > 0 { self.take(SlotState::Posted(holder)) } else { None };
        let Some(slot) = slot else {
            self.counters.starved += 1;
            let new = self.hungry.join(holder.peer);
            if new && has == 0 && !self.can_grow() {
                self.ask_all();
            }
            return None;
        };
        let lent = self.peers.get_mut(&holder.peer).expect("just looked up");
        (lent.recvs, lent.invited) = (lent.recvs + 1, false);
        self.hungry.leave(holder.peer);
        if !self.hungry.is_empty() && self.is_short() {
            self.asked.join(holder.peer);
        }
        Some(slot)
    }

    /// A FREE slot for a SEND, until [`Pool::sent`]. `None`: there is none, or others wait and the peer has its part; it is told by
    /// [`Pool::next_hungry`] when it is worth asking again.
    pub fn lend_send(&mut self, peer: PeerKey) -> Option<SlotId> {
        let has = self.peers.get(&peer).expect("a borrower has joined").sends;
        let others = self.send_hungry.others(peer);
        let part = (self.free + self.sending) / (others + 1);
        // Of all that wait one at least has no more than its part, so asking them in turn comes to an end.
        let slot = if others > 0 && has > part { None } else { self.take(SlotState::Sending(peer)) };
        let Some(slot) = slot else {
            self.counters.send_starved += 1;
            self.send_hungry.join(peer);
            return None;
        };
        self.counters.sends += 1;
        self.sending += 1;
        self.peers.get_mut(&peer).expect("just looked up").sends += 1;
        self.send_hungry.leave(peer);
        Some(slot)
    }

    /// The SEND has completed, or its endpoint is gone.
    pub fn sent(&mut self, slot: SlotId) {
        let state = self.state(slot);
        let SlotState::Sending(peer) = state else { panic!("{slot:?} was sent while {state:?}") };
        self.sending -= 1;
        self.peers.get_mut(&peer).expect("a sender has joined").sends -= 1;
        self.put_back(slot);
    }

    fn take(&mut self, state: SlotState) -> Option<SlotId> {
        let slab = self.usable.first().copied()?;
        let of = &mut self.slabs[slab as usize];
        assert_eq!(of.state, SlabState::Active, "only active slabs lend");
        let index = of.free.pop().expect("a usable slab has a free slot");
        assert_eq!(of.slots[index as usize], SlotState::Free, "free ⇒ FREE");
        of.slots[index as usize] = state;
        if of.free.is_empty() {
            self.usable.remove(&slab);
        }
        self.free -= 1;
        self.lent += 1;
        self.peak = self.peak.max(self.lent);
        Some(SlotId { slab: SlabId(slab), index })
    }

    /// Free slots that are not kept for SENDs.
    fn recv_slots(&self) -> u32 {
        let total = self.active_count() * self.config.slab_slots;
        let reserve = self.config.send_reserve.min((total / 4).max(1));
        self.free.min((self.free + self.sending).saturating_sub(reserve))
    }

    fn has_recv_slot(&self) -> bool {
        self.recv_slots() > 0
    }

    /// What a peer may hold: its share; less while others wait and there can be no more slots.
    fn share_of(&self, peer: PeerKey) -> u32 {
        if self.hungry.others(peer) == 0 || self.can_grow() {
            return self.config.peer_slots;
        }
        let fair = self.config.max_slabs * self.config.slab_slots / (self.peers.len() as u32).max(1);
        self.config.peer_slots.min(fair.max(1))
    }

    /// The RECV was used.
    pub fn fill(&mut self, slot: SlotId) {
        let state = self.state_mut(slot);
        let SlotState::Posted(holder) = *state else { panic!("{slot:?} is filled while {state:?}") };
        *state = SlotState::Filled(holder);
    }

    /// So many copies out of it begin.
    pub fn place(&mut self, slot: SlotId, copies: u32) {
        assert!(copies > 0, "no copy, nothing to place");
        let state = self.state_mut(slot);
        let SlotState::Filled(holder) = *state else { panic!("{slot:?} is placed while {state:?}") };
        *state = SlotState::Placing(holder, copies);
    }

    /// One copy has ended; `true`: it was the last, and the slot is free.
    pub fn placed(&mut self, slot: SlotId) -> bool {
        let state = self.state_mut(slot);
        match *state {
            SlotState::Placing(holder, copies) if copies > 1 => {
                *state = SlotState::Placing(holder, copies - 1);
                false
            }
            SlotState::Placing(holder, _) => {
                self.take_back(slot, holder);
                true
            }
            other => panic!("{slot:?}: a copy ends while {other:?}"),
        }
    }

    /// There is nothing to place in it.
    pub fn discard(&mut self, slot: SlotId) {
        let state = self.state(slot);
        let SlotState::Filled(holder) = state else { panic!("{slot:?} is discarded while {state:?}") };
        self.take_back(slot, holder);
    }

    /// The RECV was flushed unused: the endpoint is gone.
    pub fn flushed(&mut self, slot: SlotId) {
        let state = self.state(slot);
        let SlotState::Posted(holder) = state else { panic!("{slot:?} is flushed while {state:?}") };
        self.take_back(slot, holder);
    }

    fn take_back(&mut self, slot: SlotId, holder: Holder) {
        self.peers.get_mut(&holder.peer).expect("a holder has joined").recvs -= 1;
        self.put_back(slot);
    }

    fn put_back(&mut self, slot: SlotId) {
        let of = &mut self.slabs[slot.slab.0 as usize];
        match of.state {
            SlabState::Active => {
                of.slots[slot.index as usize] = SlotState::Free;
                of.free.push(slot.index);
                self.free += 1;
                self.usable.insert(slot.slab.0);
            }
            SlabState::Draining => {
                of.slots[slot.index as usize] = SlotState::Retired;
                of.retired += 1;
                self.note_drained(slot.slab);
            }
            other => panic!("{slot:?} comes back while its slab is {other:?}"),
        }
        self.lent -= 1;
    }

    /// What it is doing.
    pub fn state(&self, slot: SlotId) -> SlotState {
        self.slabs[slot.slab.0 as usize].slots[slot.index as usize]
    }

    fn state_mut(&mut self, slot: SlotId) -> &mut SlotState {
        &mut self.slabs[slot.slab.0 as usize].slots[slot.index as usize]
    }

    /// Its slab is on the way out: the sooner its RECV is used up, the better.
    pub fn is_draining(&self, slot: SlotId) -> bool {
        self.slabs[slot.slab.0 as usize].state == SlabState::Draining
    }

    /// Idle lanes should give back what they do not need: there are more slabs than the base, or somebody waits.
    pub fn wants_back(&self) -> bool {
        !self.hungry.is_empty() || self.slab_count() > self.config.base_slabs
    }

    /// Somebody waits who has not a single RECV. Then idle lanes should give back their last as well: where there are fewer slots
    /// than peers, those that are idle would keep the others from ever sending.
    pub fn is_short(&self) -> bool {
        self.hungry.line.values().any(|peer| self.peers[peer].recvs == 0)
    }

    /// All that have RECVs are to look whether they can spare them.
    pub(super) fn ask_all(&mut self) {
        let holders = self.peers.iter().filter(|(_, lent)| lent.recvs > 0).map(|(peer, _)| *peer);
        // In an order that does not depend on the table's.
        for peer in holders.collect::<BTreeSet<_>>() {
            self.asked.join(peer);
        }
    }

    /// A peer that got no slot and may get one now, or whose RECVs are missed (their slab drains, or somebody has none): its channel is told by
    /// `on_pool_changed`. Ask until `None` whenever slots came back, a slab was made, or the pool was asked for actions.
    #[must_use]
    pub fn next_hungry(&mut self) -> Option<PeerKey> {
        // Those first whose slots come back soon.
        let sender = if self.free > 0 { self.send_hungry.pop() } else { None };
        let fed = sender.or_else(|| {
            let peer = if self.has_recv_slot() { self.hungry.pop() } else { None }?;
            self.peers.get_mut(&peer).expect("who waits has joined").invited = true;
            Some(peer)
        });
        fed.or_else(|| self.asked.pop())
    }

    /// Whether [`Pool::next_hungry`] has somebody.
    pub(super) fn can_feed(&self) -> bool {
        !self.send_hungry.is_empty() && self.free > 0
            || !self.hungry.is_empty() && self.has_recv_slot()
            || !self.asked.is_empty()
    }

    /// Where it stands.
    pub fn stats(&self) -> PoolStats {
        let count =
            |which: fn(&SlabState) -> bool| self.slabs.iter().filter(|s| which(&s.state)).count() as u32;
        PoolStats {
            slabs: count(|state| !matches!(state, SlabState::Gone | SlabState::Allocating { .. })),
            draining: count(|state| matches!(state, SlabState::Draining | SlabState::Releasing { .. })),
            free: self.free,
            lent: self.lent,
            sending: self.sending,
            hungry: self.hungry.len(),
            send_hungry: self.send_hungry.len(),
            counters: self.counters,
        }
    }
}

use std::collections::{HashMap, VecDeque};

use proptest::prelude::*;

use super::*;

const PEER: PeerKey = PeerKey(1);

fn config(base_slabs: u32, max_slabs: u32) -> PoolConfig {
    PoolConfig {
        slab_slots: 4,
        base_slabs,
        max_slabs,
        peer_slots: 1000,
        send_reserve: 0,
        ..PoolConfig::default()
    }
}

fn holder(peer: u32) -> Holder {
    Holder { peer: PeerKey(peer), lane: LaneId(0) }
}

/// Does what the pool asks for, at once.
fn serve(pool: &mut Pool, now: Nanos) {
    while let Some(action) = pool.next_action(now) {
        match action {
            PoolAction::Allocate(slab) => pool.on_allocated(now, slab, true),
            PoolAction::Release(slab) => pool.on_released(slab),
        }
        pool.audit();
    }
}

fn pool(base_slabs: u32, max_slabs: u32) -> Pool {
    let mut pool = Pool::new(config(base_slabs, max_slabs), Nanos(0));
    serve(&mut pool, Nanos(0));
    pool.join(PEER);
    pool
}

fn lend(pool: &mut Pool, n: usize) -> Vec<SlotId> {
    (0..n).map(|_| pool.lend(holder(1)).expect("there is a slot")).collect()
}

#[test]
fn a_slot_goes_its_way_and_comes_back() {
    let mut pool = pool(1, 4);
    let slot = pool.lend(holder(1)).unwrap();
    assert_eq!(pool.state(slot), SlotState::Posted(holder(1)));
    pool.fill(slot);
    pool.place(slot, 2);
    assert!(!pool.placed(slot));
    assert!(pool.placed(slot));
    assert_eq!(pool.state(slot), SlotState::Free);
    let slot = pool.lend(holder(1)).unwrap();
    pool.fill(slot);
    pool.discard(slot);
    let slot = pool.lend(holder(1)).unwrap();
    pool.flushed(slot);
    pool.audit();
    pool.leave(PEER);
}

#[test]
fn a_pool_that_is_nearly_used_up_grows_by_slabs_up_to_its_limit() {
    let mut pool = pool(1, 3);
    lend(&mut pool, 3);
    serve(&mut pool, Nanos(1));
    assert_eq!(pool.stats().slabs, 2, "at most a quarter was free");
    lend(&mut pool, 5);
    assert_eq!(pool.lend(holder(1)), None);
    serve(&mut pool, Nanos(2));
    assert_eq!(pool.next_hungry(), Some(PEER));
    lend(&mut pool, 4);
    assert_eq!(pool.lend(holder(1)), None);
    serve(&mut pool, Nanos(3));
    assert_eq!(pool.stats().slabs, 3, "the limit");
    assert_eq!(pool.next_hungry(), None, "nothing is free");
}

#[test]
fn an_allocation_that_fails_is_tried_again_later_and_lends_nothing_meanwhile() {
    let mut pool = pool(1, 3);
    lend(&mut pool, 4);
    let Some(PoolAction::Allocate(slab)) = pool.next_action(Nanos(5)) else { panic!("it grows") };
    pool.on_allocated(Nanos(5), slab, false);
    assert_eq!(pool.next_action(Nanos(6)), None);
    assert_eq!(pool.lend(holder(1)), None);
    let at = Nanos(5).plus_ms(1000);
    assert_eq!(pool.next_timeout(Nanos(6)), Some(at));
    assert!(matches!(pool.next_action(at), Some(PoolAction::Allocate(_))));
    assert_eq!(pool.stats().counters.allocation_failed, 1);
}

/// What the pool tells to shrink: a slab goes only when each of its slots has come back by itself; nothing posted is taken away.
#[test]
fn shrinking_never_takes_back_a_posted_slot_and_frees_the_newest_slabs_down_to_the_base() {
    let mut pool = pool(1, 8);
    let mut slots = lend(&mut pool, 4);
    serve(&mut pool, Nanos(1));
    for n in 2..8 {
        slots.extend(lend(&mut pool, 4));
        serve(&mut pool, Nanos(n));
    }
    assert_eq!(pool.stats().slabs, 8);
    // Slots of the newest slab in use stay posted; all others come back.
    let late: Vec<SlotId> = slots.split_off(26);
    slots.drain(..).for_each(|slot| pool.flushed(slot));
    serve(&mut pool, Nanos(9));
    let idle = Nanos(9).plus_ms(5_000);
    serve(&mut pool, Nanos(idle.0 - 1_000_000));
    assert_eq!(pool.stats().slabs, 8, "not yet");
    serve(&mut pool, idle);
    assert!(late.iter().all(|&slot| matches!(pool.state(slot), SlotState::Posted(_))));
    assert_eq!(pool.stats().slabs, 2, "the base, and the one that still has RECVs out");
    assert!(late.iter().all(|&slot| pool.is_draining(slot)));
    for slot in late {
        pool.fill(slot);
        pool.discard(slot);
        assert_eq!(pool.state(slot), SlotState::Retired);
    }
    serve(&mut pool, idle);
    assert_eq!((pool.stats().slabs, pool.stats().free), (1, 4), "back at the base");
    assert_eq!(pool.stats().counters.shrunk, 7);
}

#[test]
fn a_draining_slab_that_is_needed_again_lends_its_retired_slots_as_free_ones() {
    let mut pool = pool(1, 2);
    let mut slots = lend(&mut pool, 4);
    serve(&mut pool, Nanos(1));
    slots.extend(lend(&mut pool, 1));
    let kept = slots.pop().unwrap();
    slots.drain(..).for_each(|slot| pool.flushed(slot));
    serve(&mut pool, Nanos(2));
    serve(&mut pool, Nanos(2).plus_ms(5_000));
    assert!(pool.is_draining(kept));
    assert_eq!(pool.stats().free, 4);
    lend(&mut pool, 4);
    assert_eq!(pool.lend(holder(1)), None, "retired slots are not lent");
    serve(&mut pool, Nanos(3).plus_ms(5_000));
    assert!(!pool.is_draining(kept));
    assert_eq!((pool.stats().free, pool.stats().counters.revived), (3, 1));
    lend(&mut pool, 3);
}

#[test]
fn one_peer_gets_its_share_and_no_more_whatever_it_asks_for() {
    let mut pool = Pool::new(PoolConfig { peer_slots: 3, ..config(2, 4) }, Nanos(0));
    serve(&mut pool, Nanos(0));
    pool.join(PEER);
    lend(&mut pool, 3);
    for _ in 0..1000 {
        assert_eq!(pool.lend(holder(1)), None);
        serve(&mut pool, Nanos(1));
    }
    assert_eq!((pool.stats().slabs, pool.stats().hungry), (2, 0), "greed makes nothing grow");
    assert_eq!(pool.stats().counters.share_reached, 1000);
}

#[test]
fn a_peer_that_waits_gets_what_a_greedy_one_uses_up() {
    let mut pool = pool(2, 2);
    pool.join(PeerKey(2));
    let mut slots = lend(&mut pool, 8);
    assert_eq!(pool.lend(holder(2)), None);
    for _ in 0..4 {
        let slot = slots.pop().unwrap();
        pool.fill(slot);
        pool.discard(slot);
        assert_eq!(pool.lend(holder(1)), None, "above the fair share while another waits");
        assert_eq!(pool.next_hungry(), Some(PeerKey(2)));
        pool.lend(holder(2)).unwrap();
        assert_eq!(pool.lend(holder(2)), None);
    }
    pool.audit();
}

proptest! {
    /// Any order of lending, using, giving back, time, failures: counts stay right, and no slot is ever in two hands.
    #[test]
    fn the_books_balance(
        ops in prop::collection::vec((0u8..8, 0u32..3, any::<prop::sample::Index>()), 1..400),
        base in 1u32..3, more in 0u32..5, share in 1u32..20,
    ) {
        let mut pool = Pool::new(PoolConfig { peer_slots: share, ..config(base, base + more) }, Nanos(0));
        (0..3).for_each(|peer| pool.join(PeerKey(peer)));
        let mut now = Nanos(0);
        let (mut posted, mut filled, mut placing) = (VecDeque::new(), Vec::new(), Vec::new());
        let mut jobs = VecDeque::new();
        let mut held: HashMap<SlotId, u32> = HashMap::new();
        for (op, peer, which) in ops {
            match op {
                0 | 1 => if let Some(slot) = pool.lend(holder(peer)) {
                    prop_assert!(held.insert(slot, peer).is_none(), "lent twice");
                    posted.push_back(slot);
                },
                2 if !posted.is_empty() => {
                    let slot = posted.remove(which.index(posted.len())).unwrap();
                    pool.fill(slot);
                    filled.push(slot);
                }
                3 if !filled.is_empty() => {
                    let slot = filled.swap_remove(which.index(filled.len()));
                    pool.place(slot, 1);
                    placing.push(slot);
                }
                4 if !placing.is_empty() => {
                    let slot = placing.swap_remove(which.index(placing.len()));
                    prop_assert!(pool.placed(slot));
                    held.remove(&slot);
                }
                5 if !posted.is_empty() => {
                    let slot = posted.pop_front().unwrap();
                    pool.flushed(slot);
                    held.remove(&slot);
                }
                6 => now = now.plus_ms(1 + which.index(6_000) as u64),
                _ => if let Some(job) = jobs.pop_front() {
                    match job {
                        PoolAction::Allocate(slab) => pool.on_allocated(now, slab, peer > 0),
                        PoolAction::Release(slab) => pool.on_released(slab),
                    }
                },
            }
            while let Some(action) = pool.next_action(now) {
                if let PoolAction::Release(slab) = action {
                    prop_assert!(held.keys().all(|slot| slot.slab != slab), "memory goes only when nobody holds it");
                }
                jobs.push_back(action);
            }
            pool.audit();
            for peer in 0..3 {
                prop_assert!(held.values().filter(|&&of| of == peer).count() as u32 <= share);
            }
            prop_assert!(pool.stats().slabs <= base + more);
        }
    }
}

fn small_pool(peers: u32) -> Pool {
    let mut pool = Pool::new(PoolConfig { send_reserve: 4, ..config(2, 2) }, Nanos(0));
    serve(&mut pool, Nanos(0));
    (1..=peers).for_each(|peer| pool.join(PeerKey(peer)));
    pool
}

#[test]
fn a_quarter_of_a_small_pool_is_never_lent_for_recvs_so_a_send_always_finds_its_turn() {
    let mut pool = small_pool(2);
    lend(&mut pool, 6);
    assert_eq!(pool.lend(holder(1)), None, "two of eight are kept for SENDs");
    assert_eq!(pool.next_hungry(), None, "and stay so");
    let first = pool.lend_send(PEER).unwrap();
    assert_eq!(pool.state(first), SlotState::Sending(PEER));
    let second = pool.lend_send(PeerKey(2)).unwrap();
    assert_eq!(pool.lend_send(PEER), None);
    assert_eq!((pool.stats().sending, pool.stats().send_hungry), (2, 1));
    pool.audit();
    pool.sent(second);
    assert_eq!(pool.next_hungry(), Some(PEER), "who waits to send is told");
    assert_eq!(pool.lend(holder(2)), None, "it is no slot for a RECV");
    pool.sent(first);
    pool.audit();
    assert_eq!((pool.stats().sending, pool.stats().lent), (0, 6));
}

#[test]
fn slots_to_send_from_are_shared_among_those_who_wait_and_asking_them_in_turn_ends() {
    let mut pool = small_pool(3);
    lend(&mut pool, 6);
    // The first has both, the others wait.
    let mut held = VecDeque::from([PEER, PEER].map(|peer| (peer, pool.lend_send(peer).unwrap())));
    for peer in [2, 3, 1] {
        assert_eq!(pool.lend_send(PeerKey(peer)), None);
    }
    let mut served = [0; 3];
    for _ in 0..300 {
        pool.sent(held.pop_front().expect("somebody sends").1);
        // All that are told ask at once, and all want another one.
        let mut asked = 0;
        while let Some(peer) = pool.next_hungry() {
            if let Some(slot) = pool.lend_send(peer) {
                served[peer.0 as usize - 1] += 1;
                held.push_back((peer, slot));
                assert_eq!(pool.lend_send(peer), None, "it waits for the next");
            }
            asked += 1;
            assert!(asked < 10, "this ends");
        }
        pool.audit();
    }
    assert!(served.iter().all(|&n| n >= 90), "{served:?}");
}

#[test]
fn nobody_passes_those_who_wait() {
    let mut pool = small_pool(4);
    (0..5).for_each(|_| assert!(pool.lend(holder(4)).is_some()));
    let mine = pool.lend(holder(1)).expect("the last");
    assert!(!pool.is_short());
    assert_eq!((pool.lend(holder(2)), pool.lend(holder(3))), (None, None));
    assert!(pool.is_short(), "two have none at all");
    let asked = [pool.next_hungry(), pool.next_hungry(), pool.next_hungry()];
    assert_eq!(asked, [Some(PEER), Some(PeerKey(4)), None], "who has some looks what it can spare");
    pool.flushed(mine);
    assert_eq!(pool.lend(holder(1)), None, "what it gives back is not its own again");
    assert_eq!(pool.next_hungry(), Some(PeerKey(2)), "they come in the order in which they began to wait");
    // One that is told and does not want any more keeps nobody from it.
    assert_eq!(pool.next_hungry(), Some(PeerKey(3)));
    let slot = pool.lend(holder(3)).expect("its turn");
    let asked = [pool.next_hungry(), pool.next_hungry(), pool.next_hungry()];
    assert_eq!(asked, [Some(PeerKey(4)), Some(PeerKey(3)), None], "and may have to give it up for the first");
    pool.flushed(slot);
    assert_eq!(pool.next_hungry(), Some(PEER));
    assert!(pool.lend(holder(1)).is_some());
    assert!(!pool.is_short());
    pool.audit();
}

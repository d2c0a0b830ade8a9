//! One engine with a thousand peers, sixteen of them active: what an idle one costs in memory, and that the active ones do not notice.

mod two_toy;

use baton_core::two_sided::channel::{Channel, Durable};
use baton_core::two_sided::codec::Direction;
use baton_core::two_sided::pool::*;
use baton_core::two_sided::setup::*;
use baton_core::{Epoch, LaneId, SessionId};
use baton_counting_alloc::of_this_thread;
use two_toy::*;

/// As an engine makes them: four lanes of 128 SENDs and 64 RECVs.
fn channel(pool: &mut Pool, n: u32) -> Channel {
    let peer = PeerKey(n);
    pool.join(peer);
    let lane = |nth: u8| TwoLane {
        endpoint: endpoint(usize::from(nth) + 1),
        sq_depth: 128,
        rq_depth: 64,
        posted: Vec::new(),
        peer_posted: 1,
    };
    let mut lanes: Vec<TwoLane> = (0..4).map(lane).collect();
    for (nth, lane) in (0..).zip(&mut lanes) {
        lane.posted.extend(pool.lend(Holder { peer, lane: LaneId(nth) }));
    }
    let limits = TwoLimits::default();
    let setup = TwoSetup {
        peer,
        session: SessionId(u64::from(n) + 1),
        epoch: Epoch(1),
        control: endpoint(0),
        control_sq_depth: 64,
        control_rq_depth: 64,
        lanes,
        slot_bytes: pool.config().slot_bytes,
        peer_credit_addr: 0,
        peer_credit_key: 0,
        send_slots: 8,
        max_sge: 16,
        data_crc: false,
        limits,
    };
    Channel::new(setup, Durable::new(limits), START)
}

#[test]
fn an_idle_peer_costs_the_books_of_its_engine_little() {
    let mut pool = Pool::new(PoolConfig { max_slabs: 400, base_slabs: 300, ..PoolConfig::default() }, START);
    while let Some(action) = pool.next_action(START) {
        if let PoolAction::Allocate(slab) = action {
            pool.on_allocated(START, slab, true);
        }
    }
    let before = of_this_thread();
    let channels: Vec<Channel> = (0..1000).map(|n| channel(&mut pool, n)).collect();
    let each = (of_this_thread() - before).live_bytes / channels.len() as i64;
    // The slots for frames and prefixes, which the driver makes, come on top: less than 192 KiB.
    assert!(each < 64 << 10, "{each} bytes");
    assert_eq!(pool.stats().lent, 4000, "one slot per lane");
}

const LEN: usize = 20_000;
const ACTIVE: usize = 16;

fn engine(peers: u32) -> Engine {
    let defaults = Config::default();
    let pool = PoolConfig { max_slabs: 400, slab_slots: 16, peer_slots: 24, ..defaults.pool };
    Engine::with_config(peers, Config { pool, data_bytes: 24 << 10, ..defaults })
}

/// Turns of each active peer for three transfers one after the other, all of them at once.
fn turns(engine: &mut Engine) -> Vec<u64> {
    for token in 1..=3 {
        for n in 0..ACTIVE {
            engine.with(n, |world| {
                world.nodes[0].mem.set_data(1000, &pattern(token, LEN));
                world.submit(0, token, Direction::Write, &[(1000, 1000, LEN)], Some(&[n as u8]));
            });
        }
        let mut left = ACTIVE;
        while left > 0 {
            left = 0;
            for n in 0..ACTIVE {
                if engine.worlds[n].result_of(0, token).is_none() {
                    left += 1;
                    engine.turn(n);
                }
            }
        }
        for world in &engine.worlds[..ACTIVE] {
            assert_eq!(world.result_of(0, token), Some(&Ok(())));
            assert_eq!(world.nodes[1].mem.data(1000, LEN), pattern(token, LEN));
        }
    }
    engine.steps[..ACTIVE].to_vec()
}

fn beside_idle_peers(peers: u32) {
    let alone = turns(&mut engine(ACTIVE as u32));
    let mut engine = engine(peers);
    // The idle ones have connected and told each other so.
    for n in 0..peers as usize {
        engine.with(n, |world| world.settle());
    }
    assert_eq!(engine.pool.stats().lent, 2 * peers, "one slot per lane of each");
    let before = of_this_thread();
    let beside = turns(&mut engine);
    let (alone, beside): (u64, u64) = (alone.iter().sum(), beside.iter().sum());
    assert!(beside <= alone + alone / 10, "{beside} turns beside {peers} peers, {alone} alone");
    let grown = (of_this_thread() - before).live_bytes;
    assert!(grown < 16 << 20, "{grown} bytes more: idle peers grow with the others' work");
    for world in &engine.worlds[ACTIVE..] {
        assert_eq!(world.nodes[1].channel.next_timeout(), None, "an idle peer wants no attention");
    }
    engine.pool.audit();
}

#[test]
fn sixteen_active_peers_of_a_thousand_take_no_step_more() {
    beside_idle_peers(1000);
}

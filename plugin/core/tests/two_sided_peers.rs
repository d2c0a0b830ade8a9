//! Several peers of one engine share its bounce pool: what one of them does costs the others no step.

mod two_toy;

use baton_core::two_sided::codec::{Direction, Frame, FrameHeader, encode_frame};
use baton_core::two_sided::notes::Resolve;
use baton_core::two_sided::pool::PoolConfig;
use baton_core::{Epoch, LaneId};
use two_toy::*;

const LEN: usize = 150_000;

fn begin(engine: &mut Engine, n: usize, token: u64) {
    engine.with(n, |world| {
        world.nodes[0].mem.set_data(1000, &pattern(token, LEN));
        world.submit(0, token, Direction::Write, &[(1000, 1000, LEN)], None);
    });
}

fn is_done(engine: &Engine, n: usize, token: u64) -> bool {
    engine.worlds[n].result_of(0, token).is_some()
}

/// Turns that peer 0 needs for one transfer while the others do `others`.
fn turns_beside(mut engine: Engine, mut others: impl FnMut(&mut Engine)) -> u64 {
    begin(&mut engine, 0, 1);
    while !is_done(&engine, 0, 1) {
        engine.turn(0);
        others(&mut engine);
        assert!(engine.steps[0] < 100_000, "{:#?}", engine.worlds[0].nodes[0].channel.stats());
    }
    assert_eq!(engine.worlds[0].result_of(0, 1), Some(&Ok(())));
    assert_eq!(engine.worlds[0].nodes[1].mem.data(1000, LEN), pattern(1, LEN));
    engine.pool.audit();
    engine.steps[0]
}

fn pool() -> PoolConfig {
    let limits = Config::default();
    PoolConfig { max_slabs: 16, peer_slots: 24, ..limits.pool }
}

#[test]
fn a_dead_peer_costs_a_live_one_no_step() {
    let alone = turns_beside(Engine::new(1, pool()), |_| ());
    let mut engine = Engine::new(2, pool());
    // In the middle of its transfer it stops for good.
    begin(&mut engine, 1, 1);
    (0..300).for_each(|_| engine.turn(1));
    assert!(!is_done(&engine, 1, 1));
    let beside = turns_beside(engine, |_| ());
    assert!(beside <= alone + alone / 4, "{beside} turns beside a dead peer, {alone} alone");
}

#[test]
fn a_peer_that_floods_with_credit_requests_and_data_costs_a_well_behaved_one_no_step() {
    let alone = turns_beside(Engine::new(1, pool()), |_| ());
    let mut engine = Engine::new(2, pool());
    engine.worlds[1].hostile = true;
    let (mut token, mut seq) = (0, 0);
    let beside = turns_beside(engine, |engine| {
        if engine.worlds[1].nodes[0].channel.stats().transfers < 4 {
            token += 1;
            begin(engine, 1, token);
        }
        engine.turn(1);
        // And frames of its own making, until it has broken the numbering.
        let greedy = engine.worlds[1].nodes[1].ended.is_none() && engine.steps[1].is_multiple_of(50);
        if greedy {
            let counters = *engine.worlds[1].nodes[0].channel.counters();
            seq = counters.frames_sent.max(seq) + 1;
            let header =
                FrameHeader { session: SESSION, epoch: Epoch(1), seq, ack: counters.frames_received };
            let frame = Frame::CreditRequest {
                lane: LaneId(0),
                want: u32::MAX,
                waiting_bytes: u64::MAX,
                oldest_wait_us: 0,
            };
            let mut bytes = Vec::new();
            encode_frame(header, &frame, &mut bytes).unwrap();
            engine.with(1, |world| world.inject(0, 0, &bytes));
        }
        assert!(engine.pool.stats().lent <= 48);
    });
    assert!(beside <= alone + alone / 2, "{beside} turns beside a greedy peer, {alone} alone");
}

#[test]
fn many_idle_peers_hold_one_slot_per_lane_and_the_active_ones_are_not_slowed_down() {
    let pool = PoolConfig { max_slabs: 400, slab_slots: 16, ..pool() };
    let alone = turns_beside(Engine::new(1, pool), |_| ());
    let engine = Engine::new(100, pool);
    assert_eq!(engine.pool.stats().lent, 200, "two lanes each");
    let beside = turns_beside(engine, |_| ());
    assert!(beside <= alone + alone / 4, "{beside} turns beside 99 idle peers, {alone} alone");
}

/// Gives the first `peers` turns, and time, until all have done transfer `token`. Those that are done look after their RECVs.
fn all_finish(engine: &mut Engine, peers: usize, token: u64) {
    for round in 0..400_000 {
        let n = round % peers;
        engine.turn(n);
        // Time passes for a driver that sleeps in between.
        if engine.steps[n].is_multiple_of(20) {
            engine.with(n, |world| {
                world.now = world.now.plus_ms(5);
                for node in &mut world.nodes {
                    node.channel.on_timeout(world.now, &node.pool);
                }
            });
        }
        if (0..peers).all(|n| is_done(engine, n, token)) {
            break;
        }
    }
    for n in 0..peers {
        let node = &engine.worlds[n].nodes[0];
        assert_eq!(engine.worlds[n].result_of(0, token), Some(&Ok(())), "{:#?}", node.channel.stats());
        assert_eq!(engine.worlds[n].nodes[1].mem.data(1000, LEN), pattern(token, LEN));
    }
    engine.pool.audit();
}

#[test]
fn peers_that_need_more_than_there_is_share_it_and_all_finish() {
    let mut engine = Engine::new(6, PoolConfig { max_slabs: 4, ..pool() });
    for n in 0..6 {
        begin(&mut engine, n, 1);
    }
    all_finish(&mut engine, 6, 1);
}

#[test]
fn idle_peers_give_their_last_recv_to_those_that_have_none() {
    // Three RECVs for six peers, of which any three could keep the rest out for ever.
    let mut engine = Engine::new(6, PoolConfig { max_slabs: 1, ..pool() });
    assert_eq!((engine.pool.stats().lent, engine.pool.stats().free), (3, 1));
    for token in 1..4 {
        for n in 0..6 {
            begin(&mut engine, n, token);
        }
        all_finish(&mut engine, 6, token);
    }
}

#[test]
fn peers_of_an_engine_that_has_few_slots_to_send_from_take_turns_and_hold_none_when_idle() {
    // Six RECVs of three peers leave two slots, for which all three wait.
    let pool = PoolConfig { base_slabs: 2, max_slabs: 2, ..pool() };
    let mut engine = Engine::with_config(3, Config { gather: false, pool, ..Config::default() });
    for n in 0..3 {
        engine.with(n, |world| {
            world.nodes[1].mem.set_data(1000, &pattern(9, LEN));
            world.submit(1, 1, Direction::Write, &[(1000, 1000, LEN)], None);
        });
    }
    let done = |engine: &Engine, n: usize| engine.worlds[n].result_of(1, 1).is_some();
    for round in 0..400_000 {
        if !done(&engine, round % 3) {
            engine.turn(round % 3);
            assert!(engine.pool.stats().sending <= 2);
        }
    }
    for n in 0..3 {
        let node = &engine.worlds[n].nodes[1];
        assert_eq!(engine.worlds[n].result_of(1, 1), Some(&Ok(())), "{:#?}", node.channel.stats());
        assert_eq!(engine.worlds[n].nodes[0].mem.data(1000, LEN), pattern(9, LEN));
        assert_eq!(engine.worlds[n].nodes[1].channel.stats().send_slots, 0);
    }
    let (least, most) = (engine.steps.iter().min().unwrap(), engine.steps.iter().max().unwrap());
    assert!(*most < 2 * least, "nobody waited for all the others: {:?}", engine.steps);
    assert!(engine.pool.stats().counters.send_starved > 10, "they did wait");
    assert_eq!(engine.pool.stats().sending, 0);
    engine.pool.audit();
}

#[test]
fn a_thousand_notifications_to_a_live_peer_cost_no_step_more_beside_a_dead_one() {
    let steps = |mut engine: Engine| {
        let mut sent = 0u64;
        while engine.worlds[0].nodes[0].delivered.len() < 1000 {
            if sent < 1000 {
                engine.with(0, |world| {
                    world.notify(1, sent, &pattern(sent, (sent % 300) as usize), Resolve::Taken);
                });
                sent += 1;
            }
            engine.turn(0);
            assert!(engine.steps[0] < 100_000, "{:#?}", engine.worlds[0].nodes[1].channel.stats());
        }
        let expected: Vec<_> = (0..1000).map(|n| pattern(n, (n % 300) as usize)).collect();
        assert_eq!(engine.worlds[0].nodes[0].delivered, expected);
        engine.steps[0]
    };
    let alone = steps(Engine::new(1, pool()));
    let mut engine = Engine::new(2, pool());
    // It stops in the middle of what both send.
    begin(&mut engine, 1, 1);
    engine.with(1, |world| world.notify(1, 1, &[1; 3000], Resolve::Taken));
    (0..200).for_each(|_| engine.turn(1));
    let beside = steps(engine);
    assert!(beside <= alone + alone / 10, "{beside} turns beside a dead peer, {alone} alone");
}

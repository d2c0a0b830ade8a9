//! What a transfer tells besides its data: ids that the host chose.

mod toy;

use baton_core::LaneId;
use baton_core::notify::{BodyFlags, NotifyMode, Record, RecordScope, Tell};
use baton_core::peer::*;
use baton_core::sequence::{Imm, ImmKind};
use baton_core::{Epoch, XferSeq};
use baton_fabric::Op;
use toy::{Config, World, pattern};

fn both_modes(run: impl Fn(NotifyMode)) {
    [NotifyMode::Immediate, NotifyMode::Send].into_iter().for_each(run);
}

#[test]
fn a_transfer_lands_with_its_id_once_with_and_without_a_message() {
    both_modes(|notify| {
        for op in [Op::Write, Op::Read] {
            let mut world = World::new(Config { notify, lanes: 3, ..Config::default() }, 1);
            let (source, target) = if op == Op::Write { (0, 1) } else { (1, 0) };
            let tells = [
                Tell { message: None, id: Some(7) },
                Tell { message: Some(b"with it"), id: Some(u64::MAX) },
                Tell { message: Some(b""), id: Some(0) },
                Tell { message: None, id: Some(7) },
                Tell { message: None, id: None },
            ];
            for (token, tell) in (0..).zip(tells) {
                let at = token as usize * 10_000;
                world.nodes[source].mem.set_data(at, &pattern(token, 5000));
                let work = world.prepare(op, &[(at, at, 5000)]);
                world.submit_telling(0, token, work, tell);
                world.settle();
                assert_eq!(world.result_of(0, token), Some(&Ok(())));
                assert_eq!(world.nodes[target].mem.data(at, 5000), pattern(token, 5000));
            }
            assert_eq!(world.nodes[1].landed, [7, u64::MAX, 0, 7], "{notify:?} {op:?}");
            assert_eq!(world.nodes[1].delivered, [b"with it".to_vec(), vec![]]);
            assert!(world.nodes[0].landed.is_empty());
            world.audit();
        }
    });
}

#[test]
fn the_id_is_known_when_its_message_is_delivered() {
    let mut world = World::new(Config::default(), 2);
    let work = world.prepare(Op::Write, &[(0, 0, 100)]);
    world.submit_telling(0, 1, work, Tell { message: Some(b"m"), id: Some(3) });
    while world.nodes[1].delivered.is_empty() {
        assert!(world.step());
    }
    assert_eq!(world.nodes[1].landed, [3]);
}

#[test]
fn a_transfer_without_bytes_lands_too() {
    both_modes(|notify| {
        let mut world = World::new(Config { notify, ..Config::default() }, 3);
        let empty = world.prepare(Op::Write, &[]);
        world.submit_telling(0, 1, empty.clone(), Tell { message: None, id: Some(11) });
        world.submit_telling(0, 2, empty, Tell { message: Some(b"m"), id: Some(12) });
        world.settle();
        assert_eq!(world.nodes[1].landed, [11, 12]);
        assert_eq!(world.nodes[1].delivered, [b"m".to_vec()]);
        world.audit();
    });
}

#[test]
fn ids_that_nobody_reads_hold_the_sender_back_and_reading_resumes_it() {
    both_modes(|notify| {
        let mut config = Config { notify, rq: 4, ring: 1024, ..Config::default() };
        config.limits.unpopped_messages = 10;
        let mut world = World::new(config, 4);
        world.nodes[1].popped_by_itself = false;
        for token in 0..100u64 {
            let work = world.prepare(Op::Write, &[(token as usize * 100, token as usize * 100, 90)]);
            world.submit_telling(0, token, work, Tell { message: None, id: Some(token) });
        }
        world.settle();
        world.flush();
        let held = world.nodes[1].landed.len();
        assert!(held > 10 && held < 60, "{held} ids are held, more than credit allows");
        assert!(world.nodes[0].session.waits_for_credit());
        world.nodes[1].popped_by_itself = true;
        world.nodes[1].session.on_popped(held as u64, held as u64 * 8);
        world.pump(1);
        world.settle();
        let mut landed = world.nodes[1].landed.clone();
        landed.sort_unstable();
        assert_eq!(landed, (0..100).collect::<Vec<_>>());
        world.audit();
    });
}

#[test]
fn a_record_that_promises_an_id_and_has_none_ends_the_epoch() {
    for (bits, body) in [(1u16, &b"short"[..]), (3, b"too long for an id"), (2, b"12345678"), (0x8000, b"")] {
        let mut world = World::new(Config { lanes: 1, ..Config::default() }, 1);
        let mut record = Vec::new();
        let scope = RecordScope::Transfer { seq: XferSeq(0), lanes: 1 };
        let whole = Record { epoch: Epoch(1), scope, fragment: None, flags: BodyFlags::MESSAGE };
        whole.encode(body, &mut record);
        record[6..8].copy_from_slice(&bits.to_le_bytes());
        let ring = RingId::Lane(LaneId(0));
        world.nodes[1].mem.poke_ring(ring, 0, &record);
        world.forge(1, 1, Imm::of(ImmKind::Record, 1, XferSeq(0)).encode());
        let reason = world.nodes[1].ended.clone();
        assert!(matches!(reason, Some(EndReason::Violation(Violation::Record { .. }))), "{bits}: {reason:?}");
        assert!(world.nodes[1].landed.is_empty() && world.nodes[1].delivered.is_empty());
    }
}

#[test]
fn an_empty_message_costs_no_work_request_of_a_write_and_no_ring_bytes() {
    for (lanes, len) in [(1, 200), (3, 3000)] {
        let mut world = World::new(Config { lanes, ..Config::default() }, 3);
        world.nodes[0].mem.set_data(0, &pattern(7, len));
        let work = world.prepare(Op::Write, &[(0, 0, len)]);
        let work_requests = work.templates().len();
        world.submit(0, 7, work, Some(b""));
        let posted: usize = world.nodes[0].batches.iter().map(|(_, n, _)| n).sum();
        assert_eq!(posted, work_requests, "the immediates ride on the last WRITE of each lane");
        world.settle();
        assert_eq!(world.result_of(0, 7), Some(&Ok(())));
        assert_eq!(world.nodes[1].mem.data(0, len + 8), [pattern(7, len), vec![0; 8]].concat());
        assert_eq!(world.nodes[1].delivered, [Vec::<u8>::new()]);
        let stats = world.nodes[0].session.stats();
        assert!(stats.endpoints.iter().all(|end| end.ring_consumed == 0), "{stats:#?}");
        world.audit();
    }
}

#[test]
fn empty_messages_wait_for_receives_with_their_last_write() {
    both_modes(|notify| {
        for op in [Op::Write, Op::Read] {
            // Single WRITEs too, of which then nothing goes ahead.
            let config = Config { notify, lanes: 2, rq: 1, sq: 8, ..Config::default() };
            let mut world = World::new(config, 4);
            let (source, target) = if op == Op::Write { (0, 1) } else { (1, 0) };
            let len_of = |token: u64| if token.is_multiple_of(3) { 900 } else { 90 };
            for token in 0..40 {
                let at = token as usize * 1000;
                world.nodes[source].mem.set_data(at, &pattern(token, len_of(token)));
                let work = world.prepare(op, &[(at, at, len_of(token))]);
                world.submit(0, token, work, (token % 4 != 3).then_some(b"".as_slice()));
            }
            world.settle();
            for token in 0..40 {
                let (at, len) = (token as usize * 1000, len_of(token));
                assert_eq!(world.result_of(0, token), Some(&Ok(())), "{notify:?} {op:?} {token}");
                let expected = [pattern(token, len), vec![0; 8]].concat();
                assert_eq!(world.nodes[target].mem.data(at, len + 8), expected);
            }
            assert_eq!(world.nodes[1].delivered, vec![Vec::<u8>::new(); 30]);
            world.audit();
        }
    });
}

#[test]
fn a_lane_that_tells_of_nothing_and_a_record_beside_it_end_the_epoch() {
    let mut world = World::new(Config::default(), 5);
    let empty = |lanes, seq| Imm::of(ImmKind::Empty, lanes, XferSeq(seq)).encode();
    world.forge(1, 1, empty(2, 0));
    assert_eq!(world.nodes[1].ended, None);
    world.forge(1, 2, empty(2, 0));
    let expected = Violation::RecordCount { seq: 0, records: 2 };
    assert_eq!(world.nodes[1].ended, Some(EndReason::Violation(expected)));
    assert!(world.nodes[1].delivered.is_empty());
}

#[test]
fn an_idle_receiver_tells_of_credit_only_when_the_peer_may_need_it() {
    both_modes(|notify| {
        let mut world = World::new(Config { notify, rq: 16, ..Config::default() }, 6);
        for token in 0..100 {
            let work = world.prepare(Op::Write, &[(0, 0, 200)]);
            world.submit(0, token, work, Some(&[1; 20]));
            world.settle();
        }
        assert_eq!(world.nodes[1].delivered.len(), 100);
        let writes = world.nodes[1].session.stats().counters.credit_writes;
        assert!((10..=40).contains(&writes), "{writes} credit writes for 100 notifications, {notify:?}");
        world.audit();
    });
}

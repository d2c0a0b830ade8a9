//! What arrives, where, and in which order.

use super::ends::*;
use crate::fake::{Fake, FakeConfig, ReadTiming};
use crate::*;

#[test]
fn writes_and_reads_of_any_size_move_exactly_their_bytes() {
    let fake = Fake::new(FakeConfig { piece_bytes: 1000, ..FakeConfig::default() });
    let (mut a, mut b) = pair(&fake, Options::default());
    for (round, len) in [0, 1, 7, 8, 999, 1000, 1001, 20_000].into_iter().enumerate() {
        for (write, op) in [(true, Opcode::Write), (false, Opcode::Read)] {
            a.fill(round as u8);
            b.fill(100 + round as u8);
            let (before_a, before_b) = (a.bytes(0..30_000), b.bytes(0..30_000));
            a.send(|chain| chain.push(5, op, SIGNALED, a.local(64, len), b.remote(128))).unwrap();
            assert_eq!(ids(&a.completions(1)), [(5, Status::Success)]);
            let (mut after_a, mut after_b) = (before_a.clone(), before_b.clone());
            if write {
                after_b[128..128 + len].copy_from_slice(&before_a[64..64 + len]);
            } else {
                after_a[64..64 + len].copy_from_slice(&before_b[128..128 + len]);
            }
            assert!(a.bytes(0..30_000) == after_a, "initiator, {len} bytes, {op:?}");
            assert!(b.bytes(0..30_000) == after_b, "target, {len} bytes, {op:?}");
        }
    }
}

#[test]
fn an_immediate_arrives_behind_its_bytes_and_consumes_a_recv() {
    let fake = fake();
    let (mut a, b) = pair(&fake, Options::default());
    a.fill(3);
    b.recv(40, 0, 0);
    b.recv(41, 0, 0);
    let op = Opcode::WriteWithImm(0xabcd_1234);
    a.send(|chain| {
        chain.push(1, op, SIGNALED, a.local(0, 5000), b.remote(64));
        chain.push(2, Opcode::WriteWithImm(7), SIGNALED, (0, 0, 0), (0, 0));
    })
    .unwrap();
    let arrived = b.completions(2);
    assert_eq!(
        (arrived[0].wr_id, arrived[0].opcode, arrived[0].imm, arrived[0].byte_len),
        (40, WcOpcode::RecvWriteWithImm, Some(0xabcd_1234), 5000)
    );
    assert_eq!((arrived[1].wr_id, arrived[1].imm, arrived[1].byte_len), (41, Some(7), 0));
    assert!(b.bytes(64..5064) == a.bytes(0..5000));
    assert_eq!(ids(&a.completions(2)), [(1, Status::Success), (2, Status::Success)]);
}

#[test]
fn sends_fill_recvs_in_order() {
    let fake = fake();
    let (mut a, b) = pair(&fake, Options::default());
    a.fill(9);
    b.recv(1, 0, 100);
    b.recv(2, 200, 100);
    a.send(|chain| {
        chain.push(1, Opcode::Send, SILENT, a.local(0, 100), (0, 0));
        chain.push(2, Opcode::Send, SIGNALED, a.local(500, 30), (0, 0));
    })
    .unwrap();
    let got = b.completions(2);
    assert_eq!(
        got.iter().map(|got| (got.wr_id, got.opcode, got.byte_len, got.imm)).collect::<Vec<_>>(),
        [(1, WcOpcode::Recv, 100, None), (2, WcOpcode::Recv, 30, None)]
    );
    assert!(b.bytes(0..100) == a.bytes(0..100) && b.bytes(200..230) == a.bytes(500..530));
    assert!(b.bytes(230..300).iter().all(|byte| *byte == 0));
    assert_eq!(ids(&a.completions(1)), [(2, Status::Success)]);
    assert!(a.nothing_completes());
}

#[test]
fn inline_bytes_may_change_after_the_post() {
    let fake = fake();
    let (a, b) = pair(&fake, Options::default());
    let mut bytes = [5u8; 64];
    // SAFETY: the bytes are valid until the post, and the queue pair got 64.
    a.send(|chain| unsafe { chain.push_inline(1, Opcode::Write, SIGNALED, &bytes, b.remote(10)) }).unwrap();
    bytes.fill(6);
    assert_eq!(ids(&a.completions(1)), [(1, Status::Success)]);
    assert!(b.bytes(10..74).iter().all(|byte| *byte == 5));
}

#[test]
fn only_signaled_work_requests_complete_and_in_order() {
    let fake = fake();
    let (a, b) = pair(&fake, Options::default());
    a.send(|chain| {
        for id in 0..30 {
            let op = if id % 3 == 0 { Opcode::Read } else { Opcode::Write };
            let flags = if id % 4 == 1 { SIGNALED } else { SILENT };
            chain.push(id, op, flags, a.local(id as usize * 64, 64), b.remote(id as usize * 64));
        }
    })
    .unwrap();
    let expected: Vec<_> = (0..30).filter(|id| id % 4 == 1).map(|id| (id, Status::Success)).collect();
    assert_eq!(ids(&a.completions(expected.len())), expected);
}

#[test]
fn a_write_behind_a_read_may_overtake_it_and_a_fenced_one_never_does() {
    // The WRITE sends the bytes that the READ is about to replace: unfenced, both are possible, and the late fake shows the surprising one.
    for (flags, surprising) in [(SIGNALED, true), (FENCED, false)] {
        let fake = Fake::new(FakeConfig { read_timing: ReadTiming::Late, ..FakeConfig::default() });
        let (mut a, mut b) = pair(&fake, Options::default());
        (a.memory[0], b.memory[0], b.memory[1]) = (1, 2, 0);
        a.send(|chain| {
            chain.push(1, Opcode::Read, SILENT, a.local(0, 1), b.remote(0));
            chain.push(2, Opcode::Write, flags, a.local(0, 1), b.remote(1));
        })
        .unwrap();
        assert_eq!(ids(&a.completions(1)), [(2, Status::Success)]);
        assert_eq!(a.bytes(0..1), [2]);
        assert_eq!(b.bytes(1..2), [if surprising { 1 } else { 2 }]);
    }
}

#[test]
fn the_tail_of_a_held_read_arrives_early_unless_it_is_fenced() {
    let fake = fake();
    let (a, mut b) = pair(&fake, Options::default());
    fake.hold_reads(true);
    b.memory[0] = 1;
    b.recv(9, 0, 0);
    a.send(|chain| {
        chain.push(1, Opcode::Read, SIGNALED, a.local(0, 1), b.remote(0));
        chain.push(2, Opcode::WriteWithImm(1), SIGNALED, (0, 0, 0), (0, 0));
    })
    .unwrap();
    assert_eq!(b.completions(1)[0].wr_id, 9);
    // The target believes that its memory has been read, and uses it again.
    b.memory[0] = 99;
    assert!(a.nothing_completes());
    fake.hold_reads(false);
    assert_eq!(ids(&a.completions(2)), [(1, Status::Success), (2, Status::Success)]);
    assert_eq!(a.bytes(0..1), [99]);

    fake.hold_reads(true);
    b.recv(10, 0, 0);
    a.send(|chain| {
        chain.push(3, Opcode::Read, SIGNALED, a.local(0, 1), b.remote(0));
        chain.push(4, Opcode::WriteWithImm(1), FENCED, (0, 0, 0), (0, 0));
    })
    .unwrap();
    // Another connection's traffic goes on meanwhile, so the worker had its turns.
    let (c, d) = pair(&fake, Options::default());
    c.send(|chain| chain.push(1, Opcode::Write, SIGNALED, c.local(0, 8), d.remote(0))).unwrap();
    c.completions(1);
    assert!(b.nothing_completes());
    fake.hold_reads(false);
    assert_eq!(b.completions(1)[0].wr_id, 10);
    assert_eq!(ids(&a.completions(2)), [(3, Status::Success), (4, Status::Success)]);
}

#[test]
fn the_seed_chooses_among_permitted_orders() {
    let outcome = |seed| {
        let fake = Fake::new(FakeConfig { seed, ..FakeConfig::default() });
        let (mut a, mut b) = pair(&fake, Options::default());
        let mut seen = Vec::new();
        for round in 0..16 {
            (a.memory[0], b.memory[0]) = (1, 2);
            a.send(|chain| {
                chain.push(1, Opcode::Read, SILENT, a.local(0, 1), b.remote(0));
                chain.push(2, Opcode::Write, SIGNALED, a.local(0, 1), b.remote(1 + round));
            })
            .unwrap();
            a.completions(1);
            seen.extend(b.bytes(1 + round..2 + round));
        }
        seen
    };
    let seen = outcome(1);
    assert!(seen.contains(&1) && seen.contains(&2), "one order only: {seen:?}");
}

#[test]
fn devices_hand_out_equal_numbers_and_keys() {
    let fake = fake();
    let (a, b) = pair(&fake, Options::default());
    assert_eq!((a.qp.number(), a.mr.rkey()), (b.qp.number(), b.mr.rkey()));
}

#[test]
fn a_device_reaches_itself() {
    let fake = fake();
    let library = fake.library_of(&["fake0"]);
    let options = Options::default();
    let (mut a, b) = (End::new(&library, "fake0", options), End::new(&library, "fake0", options));
    for end in [&a, &b] {
        end.qp.to_init(1, 0, true, true).unwrap();
    }
    a.qp.connect(&a.connection(&b, options)).unwrap();
    b.qp.connect(&b.connection(&a, options)).unwrap();
    a.fill(1);
    a.send(|chain| chain.push(1, Opcode::Write, SIGNALED, a.local(0, 999), b.remote(3))).unwrap();
    assert_eq!(ids(&a.completions(1)), [(1, Status::Success)]);
    assert!(b.bytes(3..1002) == a.bytes(0..999));
}

#[test]
fn fakes_and_their_libraries_do_not_see_each_other() {
    let (one, other) = (fake(), fake());
    let names = |library: &Library| -> Vec<String> {
        library.devices().unwrap().into_iter().map(|device| device.name).collect()
    };
    assert_eq!(names(&one.library()), ["fake0", "fake1"]);
    assert_eq!(names(&one.library_of(&["fake1"])), ["fake1"]);
    let (a, _b) = pair(&one, Options::default());
    assert_eq!(one.device("fake0").live().qps, 1);
    assert_eq!(other.device("fake0").live().contexts, 0);
    drop(a);
    assert_eq!(one.device("fake0").live(), Default::default());
    let library = other.library();
    drop(other);
    assert!(names(&library).is_empty());
}

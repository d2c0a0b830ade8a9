//! Bytes: exactly those, exactly there.

use super::rig::*;
use crate::*;
use std::time::Instant;

pub fn each_fabric_reaches_the_other(rig: &Rig) {
    let deadline = Instant::now() + PATIENCE;
    for side in [0, 1] {
        let peer = rig.fabric(1 - side).address();
        rig.fabric(side).reach(&peer, deadline).expect("reach");
    }
}

fn sizes() -> impl Iterator<Item = usize> {
    let powers = (0..=16).map(|bit| 1usize << bit);
    powers.flat_map(|n| [n.saturating_sub(1).max(1), n, n + 1])
}

fn every_size(rig: &Rig, op: Op) {
    let [a, _] = rig.pair();
    let local = rig.block(0, 70_000);
    let remote = rig.block(1, 70_000);
    let (source, target) = if op == Op::Write { (local, remote) } else { (remote, local) };
    rig.fill(&source, 1);
    let bytes = rig.bytes(&source);
    let mut expected = Rig::untouched(target.len);
    let mut sender = Sender::new(rig, 0, a);
    for (i, size) in sizes().enumerate() {
        let (from, to) = (3 + i, 5 + 7 * i);
        let (local_offset, remote_offset) = if op == Op::Write { (from, to) } else { (to, from) };
        sender.run(&[template(op, &local, local_offset, &remote, remote_offset, size)]);
        expected[to..to + size].copy_from_slice(&bytes[from..from + size]);
        rig.expect(&target, &expected);
        rig.store(&target, 0, &Rig::untouched(target.len));
        expected.fill(Rig::untouched(1)[0]);
    }
    rig.expect(&source, &bytes);
}

pub fn a_write_places_exactly_its_bytes_at_every_odd_size(rig: &Rig) {
    every_size(rig, Op::Write);
}

pub fn a_read_places_exactly_its_bytes_at_every_odd_size(rig: &Rig) {
    every_size(rig, Op::Read);
}

pub fn many_unaligned_pieces_land_each_in_its_place(rig: &Rig) {
    for op in [Op::Write, Op::Read] {
        let [a, _] = rig.pair();
        let local = rig.block(0, 300_000);
        let remote = rig.block(1, 300_000);
        let (source, target) = if op == Op::Write { (local, remote) } else { (remote, local) };
        rig.fill(&source, 2);
        let bytes = rig.bytes(&source);
        let mut expected = Rig::untouched(target.len);
        // Piece i goes from slot i to slot 59 - i, each at an odd place and of its own size.
        let work: Vec<Template> = (0..60)
            .map(|i| {
                let (from, to, len) = (5000 * i + i, 5000 * (59 - i) + 1, 1 + (i * 977) % 4900);
                expected[to..to + len].copy_from_slice(&bytes[from..from + len]);
                let (local_offset, remote_offset) = if op == Op::Write { (from, to) } else { (to, from) };
                template(op, &local, local_offset, &remote, remote_offset, len)
            })
            .collect();
        Sender::new(rig, 0, a).run(&work);
        rig.expect(&target, &expected);
        rig.expect(&source, &bytes);
    }
}

fn large(rig: &Rig, op: Op) {
    const LEN: usize = 64 << 20;
    let [a, _] = rig.pair();
    let local = rig.block(0, LEN);
    let remote = rig.block(1, LEN);
    let (source, target) = if op == Op::Write { (local, remote) } else { (remote, local) };
    rig.fill(&source, 3);
    let chunk = (rig.fabric(0).caps().max_message_bytes as usize).min(4 << 20);
    let work: Vec<Template> = (0..LEN)
        .step_by(chunk)
        .map(|at| template(op, &local, at, &remote, at, chunk.min(LEN - at)))
        .collect();
    let mut sender = Sender::new(rig, 0, a);
    work.chunks(DEPTH as usize).for_each(|chain| sender.run(chain));
    rig.expect(&target, &pattern(3, LEN));
}

pub fn sixty_four_mebibytes_arrive_whole(rig: &Rig) {
    large(rig, Op::Write);
}

pub fn sixty_four_mebibytes_are_read_whole(rig: &Rig) {
    large(rig, Op::Read);
}

pub fn both_directions_at_once_do_not_disturb_each_other(rig: &Rig) {
    const LEN: usize = 1 << 20;
    let endpoints = rig.pair();
    let sources = [0, 1].map(|side| rig.block(side, LEN));
    let written = [0, 1].map(|side| rig.block(side, LEN));
    let read = [0, 1].map(|side| rig.block(side, LEN));
    sources.iter().for_each(|source| rig.fill(source, 10 + source.side as u64));
    let mut senders = [0, 1].map(|side| Sender::new(rig, side, endpoints[side]));
    for sender in &mut senders {
        let (me, you) = (sender.side, 1 - sender.side);
        for at in (0..LEN).step_by(LEN / 16) {
            sender.post(
                &[template(Op::Write, &sources[me], at, &written[you], at, LEN / 16)],
                None,
                None,
                false,
            );
            sender.post(&[template(Op::Read, &read[me], at, &sources[you], at, LEN / 16)], None, None, true);
        }
    }
    for sender in &senders {
        sender.wait_done(sender.next_seq - 1);
    }
    for side in [0, 1] {
        rig.expect(&written[side], &pattern(10 + (1 - side) as u64, LEN));
        rig.expect(&read[side], &pattern(10 + (1 - side) as u64, LEN));
        rig.expect(&sources[side], &pattern(10 + side as u64, LEN));
    }
}

pub fn the_target_application_need_not_call_anything(rig: &Rig) {
    let [a, b] = rig.pair();
    rig.recvs(1, b, 0..8);
    let source = rig.block(0, 100_000);
    let target = rig.block(1, 100_000);
    let back = rig.block(0, 100_000);
    rig.fill(&source, 4);
    let mut sender = Sender::new(rig, 0, a);
    sender.post(&[template(Op::Write, &source, 0, &target, 0, 100_000)], Some(7), None, false);
    let seq = sender.post(&[template(Op::Read, &back, 0, &target, 0, 100_000)], None, None, true);
    rig.wait_polling(&[0], "completion without the target polling", |inbox| {
        inbox.sends(0, a).last().is_some_and(|c| c.seq == seq && c.status == WcStatus::Success).then_some(())
    });
    rig.expect(&target, &pattern(4, 100_000));
    rig.expect(&back, &pattern(4, 100_000));
    assert_eq!(rig.wait_receives(1, b, 1)[0].kind, CompletionKind::RecvImm(7));
}

pub fn the_control_endpoint_carries_data_like_any_other(rig: &Rig) {
    let [a, b] = rig.pair_with(DEPTH, true, |_, _| {});
    rig.recvs(1, b, 0..8);
    let target = rig.block(1, 64);
    let word = 0x0102_0304_0506_0708u64.to_le_bytes();
    let mut sender = Sender::new(rig, 0, a);
    sender.post(&[], None, Some(extra(ExtraOp::Write, &word, &target, 8)), false);
    let seq = sender.post(&[], None, Some(send(&[])), true);
    sender.wait_done(seq);
    assert_eq!(rig.wait_receives(1, b, 1)[0].kind, CompletionKind::RecvSend);
    let mut expected = Rig::untouched(64);
    expected[8..16].copy_from_slice(&word);
    rig.expect(&target, &expected);
}

pub fn inline_bytes_may_be_overwritten_right_after_post(rig: &Rig) {
    let [a, _] = rig.pair();
    let inline = (rig.fabric(0).caps().inline_bytes as usize).min(512);
    let target = rig.block(1, inline * 32);
    let mut sender = Sender::new(rig, 0, a);
    let mut bytes = vec![0; inline];
    for i in 0..32 {
        bytes.copy_from_slice(&pattern(100 + i as u64, inline));
        sender.post(&[], None, Some(extra(ExtraOp::Write, &bytes, &target, i * inline)), i == 31);
        bytes.fill(0xEE);
    }
    sender.wait_done(31);
    let expected: Vec<u8> = (0..32).flat_map(|i| pattern(100 + i, inline)).collect();
    rig.expect(&target, &expected);
}

pub fn memory_of_the_engines_own_is_written_like_any_other(rig: &Rig) {
    let [a, _] = rig.pair();
    let source = rig.block(0, 70_000);
    let target = rig.own_block(1, 70_000);
    rig.fill(&source, 7);
    let bytes = rig.bytes(&source);
    let inline = rig.fabric(0).caps().inline_bytes as usize;
    let mut sender = Sender::new(rig, 0, a);
    for (i, size) in sizes().enumerate() {
        let mut expected = Rig::untouched(target.len);
        rig.store(&target, 0, &expected);
        let (from, to) = (3 + i, 5 + 7 * i);
        expected[to..to + size].copy_from_slice(&bytes[from..from + size]);
        if size <= inline {
            let short = extra(ExtraOp::Write, &bytes[from..from + size], &target, to);
            let seq = sender.post(&[], None, Some(short), true);
            sender.wait_done(seq);
            rig.expect(&target, &expected);
        }
        rig.store(&target, 0, &Rig::untouched(target.len));
        sender.run(&[template(Op::Write, &source, from, &target, to, size)]);
        rig.expect(&target, &expected);
    }
}

pub fn staged_bytes_are_written_from_registered_memory(rig: &Rig) {
    const LEN: usize = 8192;
    let [a, _] = rig.pair();
    let staging = rig.block_for(0, LEN, Access::None);
    let target = rig.block(1, LEN + 2);
    rig.fill(&staging, 5);
    let bytes = rig.bytes(&staging);
    let mut sender = Sender::new(rig, 0, a);
    let staged = Extra {
        staged: Some((staging.addr, staging.keys.local)),
        ..extra(ExtraOp::Write, &bytes, &target, 1)
    };
    let seq = sender.post(&[], None, Some(staged), true);
    sender.wait_done(seq);
    let mut expected = Rig::untouched(LEN + 2);
    expected[1..=LEN].copy_from_slice(&bytes);
    rig.expect(&target, &expected);
}

pub fn registrations_that_overlap_or_repeat_are_independent(rig: &Rig) {
    let [a, _] = rig.pair();
    let source = rig.block(0, 4096);
    let target = rig.block(1, 4096);
    rig.fill(&source, 6);
    let again = Block { keys: rig.register(1, target.addr, 4096, Access::Both), ..target };
    let upper = Block {
        addr: target.addr + 2048,
        len: 2048,
        keys: rig.register(1, target.addr + 2048, 2048, Access::Both),
        ..target
    };
    let keys = [target.keys.remote, again.keys.remote, upper.keys.remote];
    assert!(
        keys[0] != keys[1] && keys[1] != keys[2] && keys[0] != keys[2],
        "each registration has its own key"
    );
    rig.deregister(&target);
    let mut sender = Sender::new(rig, 0, a);
    sender.run(&[template(Op::Write, &source, 0, &again, 0, 2048)]);
    rig.deregister(&again);
    sender.run(&[template(Op::Write, &source, 2048, &upper, 0, 2048)]);
    rig.expect(&target, &pattern(6, 4096));
}

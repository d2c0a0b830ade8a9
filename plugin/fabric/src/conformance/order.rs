//! Order and number of completions.

use super::rig::*;
use crate::*;
use std::sync::Mutex;
use std::time::Instant;

pub fn completions_come_in_order_and_only_for_signaled_batches(rig: &Rig) {
    let [a, _] = rig.pair();
    let source = rig.block(0, 4096);
    let target = rig.block(1, 4096);
    rig.fill(&source, 1);
    let mut sender = Sender::new(rig, 0, a);
    let mut expected = Vec::new();
    for i in 0..20usize {
        // Large and small, reads and writes: the small ones may not overtake.
        let len = if i % 3 == 0 { 4096 } else { 1 + i };
        let op = if i % 4 == 1 { Op::Read } else { Op::Write };
        let (local, remote) = if op == Op::Read { (&source, &source) } else { (&source, &target) };
        let chain = match op {
            Op::Write => vec![template(op, local, 0, remote, 0, len); 2],
            // Reads what it wrote before, so that no byte changes.
            Op::Read => vec![
                template(Op::Write, &source, 0, &target, 0, 4096),
                template(op, &source, 0, &target, 0, len),
            ],
        };
        let signaled = i % 2 == 1 || i == 19;
        let seq = sender.post(&chain, None, None, signaled);
        if signaled {
            expected.push(seq);
        }
    }
    sender.wait_done(sender.next_seq - 1);
    rig.settle();
    let sends = rig.inbox().sends(0, a);
    assert_eq!(sends.iter().map(|c| c.seq).collect::<Vec<_>>(), expected);
    assert!(sends.iter().all(|c| c.status == WcStatus::Success), "{sends:?}");
    rig.expect(&target, &pattern(1, 4096));
}

pub fn a_full_send_queue_drains_and_fills_again(rig: &Rig) {
    let depth = rig.fabric(0).caps().max_sq_depth.min(512) as usize;
    let [a, _] = rig.pair_with(depth as u32, false, |_, _| {});
    let source = rig.block(0, depth * 16);
    let target = rig.block(1, depth * 16);
    let mut sender = Sender::new(rig, 0, a);
    for round in 0..3 {
        rig.fill(&source, 20 + round);
        for i in 0..depth {
            let work = [template(Op::Write, &source, i * 16, &target, i * 16, 16)];
            sender.post(&work, None, None, i % 8 == 7 || i == depth - 1);
        }
        sender.wait_done(sender.next_seq - 1);
        rig.expect(&target, &pattern(20 + round, depth * 16));
    }
}

pub fn a_fenced_extra_waits_for_the_reads_before_it(rig: &Rig) {
    const LEN: usize = 256 * 1024;
    let [a, b] = rig.pair();
    rig.recvs(1, b, 0..32);
    let source = rig.block(1, LEN);
    let local = rig.block(0, LEN);
    let mut sender = Sender::new(rig, 0, a);
    for round in 0..24u64 {
        rig.fill(&source, round);
        let reads: Vec<Template> =
            (0..8).map(|i| template(Op::Read, &local, i * LEN / 8, &source, i * LEN / 8, LEN / 8)).collect();
        let tail = Extra { fenced: true, ..extra(ExtraOp::WriteImm(round as u32), &[], &source, 0) };
        let seq = sender.post(&reads, None, Some(tail), true);
        // "Your memory has been read": the target gives it away at once.
        rig.wait_receives(1, b, round as usize + 1);
        rig.store(&source, 0, &vec![0x11; LEN]);
        sender.wait_done(seq);
        rig.expect(&local, &pattern(round, LEN));
    }
}

pub fn a_later_write_overwrites_an_earlier_one(rig: &Rig) {
    let [a, _] = rig.pair();
    let source = rig.block(0, 32 * 1024);
    let target = rig.block(1, 1024);
    rig.fill(&source, 3);
    let work: Vec<Template> =
        (0..32).map(|i| template(Op::Write, &source, i * 1024, &target, 0, 1024)).collect();
    Sender::new(rig, 0, a).run(&work);
    rig.expect(&target, &pattern(3, 32 * 1024)[31 * 1024..]);
}

pub fn short_extras_and_writes_to_the_same_place_keep_their_order(rig: &Rig) {
    const LEN: usize = 4096;
    // The engine's own memory and an application's: a fabric may place short payloads in different ways.
    for target in [rig.own_block(1, LEN), rig.block(1, LEN)] {
        let [a, b] = rig.pair();
        let source = rig.block(0, LEN);
        let mut sender = Sender::new(rig, 0, a);
        for round in 0..64u64 {
            rig.recvs(1, b, 0..2);
            rig.fill(&source, round);
            let (before, behind) = (pattern(1000 + round, 64), pattern(2000 + round, 32));
            let write = template(Op::Write, &source, 0, &target, 0, LEN);
            sender.post(&[], None, Some(extra(ExtraOp::Write, &before, &target, 8)), false);
            let over = extra(ExtraOp::WriteImm(round as u32), &behind, &target, 1000);
            sender.post(&[write], None, Some(over), false);
            // And the other way around: a long one on top of a short one.
            sender.post(&[], None, Some(extra(ExtraOp::Write, &before, &target, 2000)), false);
            let seq =
                sender.post(&[template(Op::Write, &source, 1990, &target, 1990, 100)], Some(1), None, true);
            let received = rig.wait_receives(1, b, 2 * round as usize + 2);
            assert!(received.iter().all(|c| c.status == WcStatus::Success), "{received:?}");
            let mut expected = pattern(round, LEN);
            expected[1000..1032].copy_from_slice(&behind);
            rig.expect(&target, &expected);
            sender.wait_done(seq);
        }
    }
}

pub fn an_immediate_with_a_short_payload_never_comes_before_the_data_in_front_of_it(rig: &Rig) {
    const LEN: usize = 512 * 1024;
    let [a, b] = rig.pair();
    let source = rig.block(0, LEN);
    let (target, records) = (rig.block(1, LEN), rig.own_block(1, 4096));
    let mut sender = Sender::new(rig, 0, a);
    for round in 0..32u64 {
        rig.recvs(1, b, 0..1);
        // From a few bytes, which go along with the record, to what takes several calls.
        let len = LEN >> (round % 16);
        rig.fill(&source, round);
        let record = pattern(100 + round, 40);
        let tail = extra(ExtraOp::WriteImm(round as u32), &record, &records, 48 * (round as usize % 80));
        let seq = sender.post(&[template(Op::Write, &source, 0, &target, 0, len)], None, Some(tail), true);
        let received = rig.wait_receives(1, b, round as usize + 1);
        assert_eq!(received[round as usize].kind, CompletionKind::RecvImm(round as u32));
        let (data, told) = (rig.bytes(&target), rig.bytes(&records));
        assert!(data[..len] == pattern(round, LEN)[..len], "{len} bytes in front of record {round}");
        assert_eq!(told[48 * (round as usize % 80)..][..40], record[..]);
        sender.wait_done(seq);
    }
}

pub fn every_completion_is_handed_out_once_to_several_polling_threads(rig: &Rig) {
    const ROUNDS: u64 = 8;
    let [a, _] = rig.pair();
    let source = rig.block(0, 64);
    let target = rig.block(1, 64);
    let seen: Mutex<Vec<u64>> = Mutex::default();
    let mut sender = Sender::new(rig, 0, a);
    for round in 1..=ROUNDS {
        for _ in 0..DEPTH {
            sender.post(&[template(Op::Write, &source, 0, &target, 0, 64)], None, None, true);
        }
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| poll_until(rig, &seen, (round * u64::from(DEPTH)) as usize));
            }
        });
    }
    let mut seen = seen.into_inner().expect("no panic");
    seen.sort_unstable();
    assert_eq!(seen, (0..ROUNDS * u64::from(DEPTH)).collect::<Vec<_>>());
}

fn poll_until(rig: &Rig, seen: &Mutex<Vec<u64>>, total: usize) {
    let give_up = Instant::now() + PATIENCE;
    let mut out = [Completion::EMPTY; 5];
    loop {
        let n = rig.fabric(0).poll(&mut out);
        let mut seen = seen.lock().expect("no panic");
        assert!(out[..n].iter().all(|c| c.status == WcStatus::Success), "{:?}", &out[..n]);
        seen.extend(out[..n].iter().map(|c| c.seq));
        if seen.len() >= total {
            return;
        }
        assert!(Instant::now() < give_up, "{} of {total} completions", seen.len());
        drop(seen);
        rig.step();
    }
}

pub fn endpoints_may_be_posted_to_from_several_threads(rig: &Rig) {
    const LEN: usize = 64 * 1024;
    let endpoints = [(); 4].map(|()| rig.pair()[0]);
    let source = rig.block(0, LEN);
    let targets = [(); 4].map(|()| rig.block(1, LEN));
    rig.fill(&source, 9);
    std::thread::scope(|scope| {
        for (endpoint, target) in endpoints.iter().zip(&targets) {
            scope.spawn(move || {
                let mut sender = Sender::new(rig, 0, *endpoint);
                for _ in 0..10 {
                    let work: Vec<Template> = (0..16)
                        .map(|i| template(Op::Write, &source, i * 4096, target, i * 4096, 4096))
                        .collect();
                    sender.run(&work);
                }
            });
        }
    });
    for target in &targets {
        rig.expect(target, &pattern(9, LEN));
    }
}

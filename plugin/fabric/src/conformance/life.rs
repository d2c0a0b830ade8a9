//! The end of an endpoint, and what comes after it.

use super::rig::*;
use crate::*;

fn end(rig: &Rig, side: usize, endpoint: EndpointId) {
    rig.fabric(side).fence(endpoint);
    rig.wait("quiet", |_| rig.fabric(side).is_quiet(endpoint).then_some(()));
}

pub fn a_fenced_endpoint_flushes_everything_in_order(rig: &Rig) {
    let [a, b] = rig.pair();
    rig.recvs(0, a, 0..16);
    rig.recvs(1, b, 0..16);
    let source = rig.block(0, 1 << 20);
    let target = rig.block(1, 1 << 20);
    let mut sender = Sender::new(rig, 0, a);
    for _ in 0..DEPTH / 2 {
        sender.post(&[template(Op::Write, &source, 0, &target, 0, 1 << 20)], None, None, true);
    }
    rig.fabric(0).fence(a);
    let sends = rig.wait_sends(0, a, DEPTH as usize / 2);
    let done = sends.iter().take_while(|c| c.status == WcStatus::Success).count();
    assert!(sends[done..].iter().all(|c| c.status == WcStatus::Flushed), "{sends:?}");
    assert!(sends.iter().enumerate().all(|(i, c)| c.seq == i as u64), "{sends:?}");
    rig.fabric(1).fence(b);
    for (side, endpoint) in [(0, a), (1, b)] {
        let receives = rig.wait_receives(side, endpoint, 16);
        for (i, c) in receives.iter().enumerate() {
            let expected = (CompletionKind::RecvFlushed, WcStatus::Flushed, i as u64);
            assert_eq!((c.kind, c.status, c.seq), expected, "side {side}: {receives:?}");
        }
        end(rig, side, endpoint);
        rig.fabric(side).destroy_endpoint(endpoint);
    }
}

pub fn a_fenced_and_quiet_endpoint_touches_no_memory(rig: &Rig) {
    const LEN: usize = 1 << 20;
    for head_start in 0..24 {
        let [a, b] = rig.pair();
        let source = rig.block(0, LEN);
        let written = rig.block(1, LEN);
        let read = rig.block(0, LEN);
        rig.store(&source, 0, &vec![0x11; LEN]);
        rig.store(&written, 0, &vec![0x11; LEN]);
        let mut sender = Sender::new(rig, 0, a);
        for i in 0..16 {
            let at = i * LEN / 16;
            sender.post(&[template(Op::Write, &source, at, &written, at, LEN / 16)], None, None, false);
            sender.post(&[template(Op::Read, &read, at, &written, at, LEN / 16)], None, None, true);
        }
        for _ in 0..head_start * 3 {
            rig.poll_once(&[0, 1]);
            rig.step();
        }
        end(rig, 0, a);
        // From here the initiator's memory is its own again.
        rig.store(&source, 0, &vec![0x22; LEN]);
        rig.store(&read, 0, &vec![0x33; LEN]);
        rig.settle();
        rig.expect(&read, &vec![0x33; LEN]);
        rig.expect(&written, &vec![0x11; LEN]);
        end(rig, 1, b);
        rig.store(&written, 0, &vec![0x44; LEN]);
        rig.settle();
        rig.expect(&written, &vec![0x44; LEN]);
    }
}

pub fn a_posts_to_a_fenced_endpoint_never_succeeds(rig: &Rig) {
    let [a, _] = rig.pair();
    let source = rig.block(0, 64);
    let target = rig.block(1, 64);
    rig.fabric(0).fence(a);
    let mut sender = Sender::new(rig, 0, a);
    let write = template(Op::Write, &source, 0, &target, 0, 64);
    if sender.try_post(&[write], None, None, true).is_ok() {
        assert_eq!(rig.wait_sends(0, a, 1)[0].status, WcStatus::Flushed);
    }
    rig.settle();
    rig.expect(&target, &Rig::untouched(64));
}

pub fn a_destroyed_endpoint_is_never_heard_of_again(rig: &Rig) {
    let mut seen = Vec::new();
    for round in 0..8 {
        let [a, b] = rig.pair();
        for (side, endpoint) in [(0, a), (1, b)] {
            assert!(!seen.contains(&(side, endpoint)), "{endpoint:?} was given out twice");
            seen.push((side, endpoint));
        }
        rig.recvs(1, b, 0..8);
        let source = rig.block(0, 4096);
        let target = rig.block(1, 4096);
        rig.fill(&source, round);
        let mut sender = Sender::new(rig, 0, a);
        let write = template(Op::Write, &source, 0, &target, 0, 4096);
        sender.run(&[write]);
        // Completions that nobody has polled when the endpoint goes.
        for _ in 0..4 {
            sender.post(&[write], Some(1), None, true);
        }
        for (side, endpoint) in [(0, a), (1, b)] {
            rig.fabric(side).fence(endpoint);
        }
        // Without polling: their completions must go with them.
        wait_unpolled(rig, || rig.fabric(0).is_quiet(a) && rig.fabric(1).is_quiet(b));
        rig.fabric(0).destroy_endpoint(a);
        rig.fabric(1).destroy_endpoint(b);
        let polled = || rig.inbox().sides.iter().map(Vec::len).sum::<usize>();
        let before = polled();
        rig.settle();
        assert_eq!(before, polled(), "a completion of a destroyed endpoint");
        let stale = rig.fabric(0).post_recv(a, &[RecvSlot::default()]);
        assert!(stale.is_err(), "a destroyed endpoint took a RECV");
        let batch =
            Batch { work: &[write], imm: None, extra: None, first_seq: 99, signaled: true, patient: false };
        assert!(rig.fabric(0).post(a, &batch).is_err(), "a destroyed endpoint took a post");
        // Harmless, as for an epoch that ends twice.
        rig.fabric(0).fence(a);
        rig.fabric(0).destroy_endpoint(a);
    }
}

fn wait_unpolled(rig: &Rig, condition: impl Fn() -> bool) {
    let give_up = std::time::Instant::now() + PATIENCE;
    while !condition() {
        assert!(std::time::Instant::now() < give_up, "fenced endpoints do not become quiet");
        rig.step();
    }
}

pub fn a_new_epoch_works_after_the_old_one_was_destroyed(rig: &Rig) {
    let source = rig.block(0, 100_000);
    let target = rig.block(1, 100_000);
    for epoch in 0..4u32 {
        let [a, b] = rig.pair();
        rig.recvs(1, b, 0..4);
        rig.fill(&source, u64::from(epoch));
        let mut sender = Sender::new(rig, 0, a);
        let seq =
            sender.post(&[template(Op::Write, &source, 0, &target, 0, 100_000)], Some(epoch), None, true);
        sender.wait_done(seq);
        let receives = rig.wait_receives(1, b, 1);
        assert_eq!(receives[0].kind, CompletionKind::RecvImm(epoch));
        rig.expect(&target, &pattern(u64::from(epoch), 100_000));
        for (side, endpoint) in [(0, a), (1, b)] {
            end(rig, side, endpoint);
            rig.fabric(side).destroy_endpoint(endpoint);
        }
    }
}

//! Sleeping and being woken. A fabric without an event descriptor has nothing to prove here.

use super::rig::*;
use crate::*;
use std::sync::atomic::{AtomicBool, Ordering};

const ROUNDS: u32 = 300;
/// Looks in vain after which a fabric has looked at everything that it looks at now and then.
const IDLE_LOOKS: u32 = 10_000;

/// Serves and polls, and sleeps without a time limit of its own whenever the fabric allows it, until one immediate has come.
fn wait_asleep(fabric: &dyn Fabric, expected: u32) {
    let fd = fabric.event_fd().expect("checked by the caller");
    let mut out = [Completion::EMPTY; 8];
    loop {
        while fabric.serve(1 << 20) {}
        let n = fabric.poll(&mut out);
        for c in &out[..n] {
            assert_eq!(c.status, WcStatus::Success, "{c:?}");
            if let CompletionKind::RecvImm(imm) = c.kind {
                assert_eq!(imm, expected);
                fabric.disarm();
                return;
            }
        }
        if n == 0 && fabric.arm() {
            assert!(sleep_on(fd, PATIENCE), "nobody woke the sleeper that waits for message {expected}");
        }
    }
}

pub fn a_sleeping_service_thread_is_woken_by_every_message(rig: &Rig) {
    if rig.fabric(0).event_fd().is_none() || rig.fabric(1).event_fd().is_none() {
        return;
    }
    let endpoints = rig.pair();
    rig.stop_service();
    for side in [0, 1] {
        rig.recvs(side, endpoints[side], 0..16);
    }
    let targets = [0, 1].map(|side| rig.block(side, 64));
    let last_arrived = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for side in [0, 1] {
            let last_arrived = &last_arrived;
            scope.spawn(move || {
                let mut sender = Sender::new(rig, side, endpoints[side]);
                for round in 0..ROUNDS {
                    if round % 2 == side as u32 {
                        let bytes = round.to_le_bytes();
                        let ball = extra(ExtraOp::WriteImm(round), &bytes, &targets[1 - side], 0);
                        sender.post(&[], None, Some(ball), true);
                    } else {
                        wait_asleep(rig.fabric(side), round);
                        rig.recvs(side, endpoints[side], 0..1);
                    }
                }
                // Whoever posted last goes on serving until it has arrived.
                if ROUNDS % 2 == side as u32 {
                    last_arrived.store(true, Ordering::Release);
                }
                while !last_arrived.load(Ordering::Acquire) {
                    rig.fabric(side).serve(1 << 20);
                    std::thread::yield_now();
                }
            });
        }
    });
}

/// Until nothing is there, and the fabric lets its service thread sleep.
fn put_to_sleep(fabric: &dyn Fabric) {
    let give_up = std::time::Instant::now() + PATIENCE;
    while fabric.poll(&mut [Completion::EMPTY; 8]) > 0 || !fabric.arm() {
        fabric.serve(1 << 20);
        assert!(std::time::Instant::now() < give_up, "nothing is there, and it may not sleep");
    }
}

/// The host's thread looks while the service thread sleeps, and takes what woke it before it has run.
pub fn a_poller_does_not_take_the_sleepers_bell(rig: &Rig) {
    let Some(fd) = rig.fabric(1).event_fd() else { return };
    let [a, b] = rig.pair();
    rig.recvs(1, b, 0..2);
    let target = rig.block(1, 64);
    rig.stop_service();
    let mut sender = Sender::new(rig, 0, a);
    let mut out = [Completion::EMPTY; 8];
    let give_up = std::time::Instant::now() + PATIENCE;
    let in_time = |what: &str| assert!(std::time::Instant::now() < give_up, "{what}");
    put_to_sleep(rig.fabric(1));
    sender.post(&[], None, Some(extra(ExtraOp::WriteImm(1), &[7; 8], &target, 0)), true);
    let mut arrived = 0;
    let mut idle = 0;
    while arrived == 0 || idle < IDLE_LOOKS {
        rig.fabric(0).serve(1 << 20);
        let n = rig.fabric(1).poll(&mut out);
        arrived += out[..n].iter().filter(|c| c.kind == CompletionKind::RecvImm(1)).count();
        idle = if n == 0 { idle + 1 } else { 0 };
        in_time("the first message has not come");
    }
    // From here on nobody looks but who is woken.
    sender.post(&[], None, Some(extra(ExtraOp::WriteImm(2), &[8; 8], &target, 0)), true);
    while !sleep_on(fd, std::time::Duration::from_millis(1)) {
        rig.fabric(0).serve(1 << 20);
        in_time("the second message wakes nobody");
    }
    wait_asleep(rig.fabric(1), 2);
}

/// The host's thread takes a message whose completion nobody is in a hurry for, and never looks again.
pub fn what_a_poller_leaves_owing_is_not_forgotten(rig: &Rig) {
    let Some(fd) = rig.fabric(1).event_fd() else { return };
    let [a, b] = rig.pair();
    rig.recvs(1, b, 0..1);
    let target = rig.block(1, 64);
    rig.stop_service();
    let mut sender = Sender::new(rig, 0, a);
    let mut out = [Completion::EMPTY; 8];
    let give_up = std::time::Instant::now() + PATIENCE;
    let in_time = |what: &str| assert!(std::time::Instant::now() < give_up, "{what}");
    put_to_sleep(rig.fabric(1));
    let seq = sender.post_patiently(extra(ExtraOp::WriteImm(1), &[7; 8], &target, 0));
    while rig.fabric(1).poll(&mut out) == 0 {
        rig.fabric(0).serve(1 << 20);
        in_time("the message has not come");
    }
    assert_eq!(out[0].kind, CompletionKind::RecvImm(1));
    // From here on nobody looks there but who is woken.
    loop {
        rig.fabric(0).serve(1 << 20);
        if rig.fabric(0).poll(&mut out) > 0 {
            assert_eq!(
                (out[0].kind, out[0].status, out[0].seq),
                (CompletionKind::Send, WcStatus::Success, seq)
            );
            return;
        }
        if sleep_on(fd, std::time::Duration::from_millis(1)) {
            rig.fabric(1).serve(1 << 20);
        }
        in_time("nothing tells the sender that its message has come");
    }
}

pub fn what_nobody_waits_for_completes_all_the_same(rig: &Rig) {
    const AT_ONCE: u64 = 8;
    let [a, b] = rig.pair();
    let target = rig.block(1, 64);
    let mut sender = Sender::new(rig, 0, a);
    for round in 0..50u32 {
        rig.recvs(1, b, 0..AT_ONCE as u32);
        let last = (0..AT_ONCE)
            .map(|_| sender.post_patiently(extra(ExtraOp::WriteImm(round), &[round as u8; 8], &target, 0)))
            .last();
        sender.wait_done(last.expect("some"));
        assert_eq!(rig.bytes(&target)[..8], [round as u8; 8]);
    }
}

pub fn arm_refuses_to_sleep_on_waiting_completions(rig: &Rig) {
    let Some(fd) = rig.fabric(0).event_fd() else { return };
    let [a, _] = rig.pair();
    let source = rig.block(0, 64);
    let target = rig.block(1, 64);
    Sender::new(rig, 0, a).post(&[template(Op::Write, &source, 0, &target, 0, 64)], None, None, true);
    rig.stop_service();
    // Side 1 is served here, side 0 is only served, never polled, until its completion waits.
    let give_up = std::time::Instant::now() + PATIENCE;
    loop {
        rig.fabric(1).serve(1 << 20);
        rig.fabric(0).serve(1 << 20);
        if !rig.fabric(0).arm() {
            break;
        }
        assert!(std::time::Instant::now() < give_up, "arm never saw the waiting completion");
        sleep_on(fd, std::time::Duration::from_millis(1));
    }
    rig.fabric(0).disarm();
    rig.wait_sends(0, a, 1);
}

//! Sleeping and being woken. A fabric without an event descriptor has nothing to prove here.

use super::rig::*;
use crate::*;
use std::sync::atomic::{AtomicBool, Ordering};

const ROUNDS: u32 = 300;

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

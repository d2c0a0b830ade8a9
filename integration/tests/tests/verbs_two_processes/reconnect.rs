//! A hundred sessions with new processes: the kernel has as many queue pairs, queues and regions as before.

use std::collections::BTreeMap;
use std::process::Command;

use baton_host::Op;
use baton_tests::{Block, output_of, rig_fabric, rig_node, wait_for};
use serde_json::Value;

use crate::{agent, with_devices};

/// What the kernel counts for every device: `rdma resource`.
fn resources() -> BTreeMap<String, u64> {
    const KINDS: [&str; 4] = ["qp", "cq", "mr", "pd"];
    if rig_fabric() != "verbs" {
        return BTreeMap::new();
    }
    let listing = output_of(Command::new("rdma").args(["-j", "resource"]));
    let devices: Vec<Value> = serde_json::from_str(&listing).unwrap_or_else(|e| panic!("{e}: {listing}"));
    let mut counts = BTreeMap::new();
    for device in &devices {
        for kind in KINDS {
            let count = device[kind].as_u64().unwrap_or_default();
            counts.insert(format!("{} {kind}", device["ifname"].as_str().unwrap_or_default()), count);
        }
    }
    counts
}

with_devices! {
    fn a_hundred_reconnects_leave_no_queue_pair_queue_or_region_behind() {
        const ROUNDS: u64 = 100;
        let untouched = resources();
        {
            let a = rig_node("a");
            let here = Block::new(&a.engine, 64 << 10, 1).expect("register");
            let mut settled = None;
            let mut b = agent();
            for round in 0..ROUNDS {
                b.befriend(&a, "a");
                let there = b.block(64 << 10, 2);
                let remote = b.import_into(&a, &there);
                here.fill(round);
                let write = a.scattered(Op::Write, &here, &remote, 4 << 10).expect("create");
                a.run(&write, Some(b"one"));
                b.assert_holds(&there, round, Some(4 << 10), "at the target");
                match round % 4 {
                    // In turn the peer dies, leaves in good order, is forgotten with work under way, and forgets us.
                    0 => {
                        b.kill();
                        assert_eq!(a.next_failure().peer, "b");
                        b = agent();
                    }
                    1 => std::mem::replace(&mut b, agent()).end(),
                    2 => {
                        write.post(Some(b"two")).expect("post");
                        a.engine.disconnect("b").expect("disconnect");
                        drop(a.finish(&write));
                        b = agent();
                    }
                    _ => {
                        drop((write, remote));
                        b = agent();
                    }
                }
                // An agent that is dropped is killed: the session has ended when nothing of it is left.
                if settled.is_none() {
                    wait_for("the end of the first session", || alone_again(&a).then_some(()));
                    settled = Some(resources());
                }
            }
            drop(b);
            let settled = settled.expect("taken");
            wait_for("the kernel's counts of the first round", || {
                let now = resources();
                (alone_again(&a) && now.iter().all(|(name, count)| *count <= settled[name])).then_some(())
            });
        }
        wait_for("the kernel's counts of before", || (resources() == untouched).then_some(()));
    }
}

/// Whether the engine has no session.
fn alone_again(node: &baton_tests::Node) -> bool {
    let stats = node.stats();
    stats["peers"].as_array().is_none_or(|peers| peers.iter().all(|peer| !peer["session"].is_object()))
}

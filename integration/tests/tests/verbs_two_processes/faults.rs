//! What the network does: loss, delay, a link that goes down. In the guest only, whose network nobody else uses.

use std::process::Command;

use baton_host::Op;
use baton_tests::{in_guest, output_of, wait_for};

use crate::{Pair, transfers, with_devices};

/// A transfer that takes a while.
const LARGE: usize = 64 << 20;
const PIECE: usize = 1 << 20;

fn sh(line: &str) {
    assert!(in_guest(), "this breaks the machine's network: run it in the guest, cargo xtask vm");
    output_of(Command::new("sh").args(["-c", line]));
}

/// Something done to the network, undone when dropped.
struct Trouble(&'static str);

impl Trouble {
    /// What netem does to everything that leaves the second device.
    fn netem(what: &str) -> Trouble {
        sh(&format!("modprobe sch_netem && tc qdisc replace dev rdma1 root netem {what}"));
        Trouble("tc qdisc del dev rdma1 root")
    }

    fn link_down() -> Trouble {
        sh("ip link set rdma1 down");
        Trouble(
            "ip link set rdma1 up && ip route replace 10.77.0.1 dev rdma1 src 10.77.0.2 table 101 && \
                 ip route replace 10.77.0.2 dev rdma0 src 10.77.0.1 table 100",
        )
    }
}

impl Drop for Trouble {
    fn drop(&mut self) {
        sh(self.0);
    }
}

/// Large transfers meet trouble: one fails within the watchdog's patience, its memory is quiet from then on, and after
/// the trouble the same request succeeds.
fn fails_in(op: Op, trouble: fn() -> Trouble) {
    let mut pair = Pair::meet();
    let (here, there, remote) = pair.blocks(LARGE, (1, 2));
    let transfer = pair.a.scattered(op, &here, &remote, PIECE).expect("create");
    pair.a.run(&transfer, None);
    let coming = std::thread::spawn(trouble);
    // Until the trouble is there they go well.
    let mut rounds = 0u64;
    let error = wait_for("an error", || {
        rounds += 1;
        transfer.post(Some(format!("round {rounds}").as_bytes())).and_then(|_| pair.a.finish(&transfer)).err()
    });
    let trouble = coming.join().expect("the trouble");
    assert!(error.text.contains("b ("), "{error}");
    here.fill(3);
    drop(trouble);
    here.assert_holds(3, "after the error");
    // The same request, after whatever time the way back needs.
    wait_for("a transfer after the trouble", || {
        transfer.post(Some(b"whole")).and_then(|_| pair.a.finish(&transfer)).ok()
    });
    match op {
        Op::Write => pair.b.assert_holds(&there, 3, Some(PIECE), "after the repost"),
        Op::Read => here.assert_holds_reversed(2, PIECE, "after the repost"),
    }
    let mut heard = Vec::new();
    while !heard.contains(&serde_json::json!(["a", "whole"])) {
        heard
            .extend(pair.b.ask(serde_json::json!({ "do": "heard" })).as_array().cloned().unwrap_or_default());
    }
    pair.assert_works();
}

with_devices! {
    fn lost_packets_are_sent_again_and_every_byte_arrives() {
        let mut pair = Pair::meet();
        let _trouble = Trouble::netem("loss 2%");
        transfers::everything_once(&mut pair, 4 << 20, 64 << 10);
    }

    fn delayed_and_lost_packets_cost_time_only() {
        let mut pair = Pair::meet();
        let _trouble = Trouble::netem("loss 1% delay 2ms 1ms");
        transfers::everything_once(&mut pair, 1 << 20, 16 << 10);
    }

    fn a_write_into_a_network_that_loses_everything_fails_in_bounded_time() {
        fails_in(Op::Write, || Trouble::netem("loss 100%"));
    }

    fn a_write_whose_link_goes_down_fails_and_works_when_it_is_up_again() {
        fails_in(Op::Write, Trouble::link_down);
    }

    fn a_read_whose_link_goes_down_fails_and_works_when_it_is_up_again() {
        fails_in(Op::Read, Trouble::link_down);
    }
}

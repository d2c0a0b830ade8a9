//! A host that sleeps in poll(2) and calls nothing is woken by what arrives from another process.

use baton_host::Op;
use baton_tests::Block;
use serde_json::json;

use crate::{agent, node, on_each_fabric};

/// Sends to a sleeping agent by each way that notifies.
fn wakes_by(order: &str, fabric: &str) {
    let (a, mut b) = (node("a", fabric), agent("b", fabric));
    b.befriend(&a, "a");
    let (here, there) = (Block::new(&a.engine, 65536, 1).expect("register"), b.block(65536, 2));
    let remote = b.import_into(&a, &there);
    let write = a.scattered(Op::Write, &here, &remote, 4096).expect("create");
    let read = a.scattered(Op::Read, &here, &remote, 4096).expect("create");
    for round in 0..3 {
        for (transfer, message) in [(None, "alone"), (Some(&write), "written"), (Some(&read), "read")] {
            b.tell(json!({ "do": order }));
            assert_eq!(b.hear()["asleep"], true, "{round} {message}");
            match transfer {
                None => a.engine.notify("b", message.as_bytes()).expect("notify"),
                Some(transfer) => a.run(transfer, Some(message.as_bytes())),
            }
            assert_eq!(b.answer(), json!(["a", message]), "{round}");
        }
        b.assert_holds(&there, 1, Some(4096), "after WRITE and READ");
    }
    here.assert_holds(1, "after WRITE and READ");
}

on_each_fabric! {
    fn a_host_asleep_on_the_descriptor_is_woken(fabric) {
        wakes_by("sleep on the descriptor", fabric);
    }

    fn a_host_asleep_until_its_hook_runs_is_woken(fabric) {
        wakes_by("sleep until the hook", fabric);
    }
}

//! Transfers of more work requests than all send queues hold.

mod common;

use baton_driver::Driver;
use baton_fabric::Op;
use common::*;

const BLOCK: usize = 64;
const BLOCKS: usize = 30_000;
/// This thread may lose its processor between the two posts for as long as the large one takes: then the order shows nothing.
const ATTEMPTS: u32 = 20;

fn endpoints(engine: &Driver) -> Vec<serde_json::Value> {
    let stats: serde_json::Value = serde_json::from_str(&engine.stats()).expect("json");
    let list = stats["peers"][0]["session"]["protocol"]["endpoints"].as_array();
    list.expect("a session").clone()
}

/// Work requests of all lanes so far.
fn posted(engine: &Driver) -> u64 {
    endpoints(engine).iter().filter_map(|end| end["posted"].as_u64()).sum()
}

#[test]
fn a_transfer_larger_than_every_send_queue_arrives_whole_and_lets_a_small_one_pass() {
    for fabric in ["local", "local send", "tcp", "verbs", "verbs send", "verbs meagre", "verbs rails"] {
        let (a, b) = pair(&[fabric]);
        let (source, target) = (Buffer::new(&a, BLOCK * BLOCKS, 1), Buffer::new(&b, BLOCK * BLOCKS, 2));
        let (here, there) = (Buffer::new(&a, 64, 3), Buffer::new(&b, 64, 4));
        // In reverse order, so that nothing touches on both sides and every block is a work request.
        let large = scattered(&a, Op::Write, "b", &source, &target, import(&a, "b", &b, &target), BLOCK);
        let small = scattered(&a, Op::Write, "b", &here, &there, import(&a, "b", &b, &there), 64);
        assert!(a.connect("b", 10_000).expect("connect"));
        let depths: u64 = endpoints(&a).iter().filter_map(|end| end["sq_depth"].as_u64()).sum();
        assert!(BLOCKS as u64 > depths, "{fabric}: {depths} entries in all send queues");
        let mut shown = false;
        for _ in 0..ATTEMPTS {
            let before = posted(&a);
            a.post(&large, Some(b"large")).expect("post");
            a.post(&small, Some(b"small")).expect("post");
            shown = posted(&a) - before < BLOCKS as u64;
            [&small, &large].iter().for_each(|xfer| done(&a, xfer));
            let told = [notification(&b).message, notification(&b).message];
            if shown {
                let order = [&b"small"[..], b"large"];
                assert_eq!(told, order, "{fabric}: the small one had to wait for the large one");
                break;
            }
        }
        assert!(shown, "{fabric}: {ATTEMPTS} times the large one was posted whole before the small one");
        assert_eq!(target.read(), reversed(&source.read(), BLOCK), "{fabric}");
        assert_eq!(there.read(), here.read());
        target.assert_guards();
        there.assert_guards();
        // Everything posted has been retired, but for credit words that nobody waits for.
        let lanes = endpoints(&a);
        assert!(lanes[1..].iter().all(|lane| lane["posted"] == lane["retired"]), "{fabric}: {lanes:?}");
    }
}

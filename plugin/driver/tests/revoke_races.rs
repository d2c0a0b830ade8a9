//! Posts that race the withdrawal of their remote region by its owner.

mod common;

use baton_driver::{Code, Driver, Status, Xfer};
use baton_fabric::Op;
use common::*;
use serde_json::Value;
use std::sync::Arc;
use std::time::Instant;

/// Posts until the region is gone; how often it was done before.
fn post_until_withdrawn(engine: &Driver, xfer: &Arc<Xfer>) -> u64 {
    let deadline = Instant::now() + WATCHDOG;
    for landed in 0.. {
        assert!(Instant::now() < deadline, "never refused: {}", engine.stats());
        if let Err(e) = engine.post(xfer, Some(b"landed")) {
            assert_eq!(e.code, Code::NotFound, "{e}");
            return landed;
        }
        // What was taken is waited for: it ends in order, whatever its owner withdraws meanwhile.
        done(engine, xfer);
    }
    unreachable!("refused before that")
}

fn a_post_is_refused_or_the_withdrawal_waits_for_it(fabric: &str) {
    // Patient: a session that ends because the machine is busy would hide what is looked for.
    let (a, b) = (patient_engine("a", &[fabric]), patient_engine("b", &[fabric]));
    a.load_remote(Some("b"), b.conn_info()).expect("load b");
    b.load_remote(Some("a"), a.conn_info()).expect("load a");
    assert!(a.connect("b", 10_000).expect("connect"));
    for round in 0..28u8 {
        let sources = [0, 1, 2].map(|nth| Buffer::new(&a, 32 * 1024, 3 * round + nth));
        let mut target = Buffer::new(&b, 32 * 1024, 1);
        let imported = import(&a, "b", &b, &target);
        let xfers =
            sources.each_ref().map(|source| scattered(&a, Op::Write, "b", source, &target, imported, 4096));
        let (landed, heard) = std::thread::scope(|scope| {
            let posters = xfers.each_ref().map(|xfer| scope.spawn(|| post_until_withdrawn(&a, xfer)));
            // A little later in every round.
            for _ in 0..round {
                notification(&b);
            }
            b.deregister(target.region).expect("deregister");
            target.fill(0x5A);
            let landed: u64 = posters.map(|poster| poster.join().expect("a poster")).iter().sum();
            (landed, u64::from(round))
        });
        for _ in heard..landed {
            assert_eq!(notification(&b).message, b"landed");
        }
        assert!(target.read().iter().all(|byte| *byte == 0x5A), "round {round}: written after deregister");
        target.assert_guards();
        for xfer in &xfers {
            assert_eq!(a.post(xfer, None).expect_err("withdrawn").code, Code::NotFound);
            assert!(matches!(a.status(xfer), Status::Failed(_)));
        }
    }
    // A dead key on the wire would have cost the session.
    for engine in [&a, &b] {
        let stats: Value = serde_json::from_str(&engine.stats()).expect("JSON");
        assert_eq!(stats["counters"]["epochs_ended"], 0, "{stats}");
        assert_eq!(stats["counters"]["revokes_unanswered"], 0, "{stats}");
    }
}

macro_rules! on_each_fabric {
    ($($name:ident $fabric:literal),*) => {$(
        #[test]
        fn $name() {
            a_post_is_refused_or_the_withdrawal_waits_for_it($fabric);
        }
    )*};
}

on_each_fabric! {
    a_post_over_local_is_refused_or_the_withdrawal_waits_for_it "local",
    a_post_over_tcp_is_refused_or_the_withdrawal_waits_for_it "tcp",
    a_post_over_verbs_is_refused_or_the_withdrawal_waits_for_it "verbs",
    a_post_over_local_two_sided_is_refused_or_the_withdrawal_waits_for_it "local two-sided",
    a_post_over_tcp_two_sided_is_refused_or_the_withdrawal_waits_for_it "tcp two-sided",
    a_post_over_verbs_two_sided_is_refused_or_the_withdrawal_waits_for_it "verbs two-sided",
    a_post_over_verbs_by_send_is_refused_or_the_withdrawal_waits_for_it "verbs send"
}

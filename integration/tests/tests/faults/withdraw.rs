//! Memory and requests taken back while work is under way.

use baton_host::{Op, Transfer};
use baton_tests::{Block, Remote, wait_for};

use crate::leaks::Census;
use crate::{LARGE, PIECE, agent, assert_works, befriend, is_gone, node, on_each_fabric};

on_each_fabric! {
    fn memory_withdrawn_while_another_process_writes_keeps_what_its_owner_puts_there(fabric) {
        let (a, mut b) = (node("a", fabric), agent("b", fabric));
        b.befriend(&a, "a");
        let there = b.block(LARGE, 2);
        let mut here = Block::new(&a.engine, LARGE, 1).expect("register");
        for round in 0..6 {
            let seed = 10 + round;
            here.fill(seed);
            b.hammer("write", &there, "a", &here, PIECE);
            wait_for("its bytes", || here.touched(seed, PIECE).then_some(()));
            here.deregister().expect("deregister");
            here.fill(seed);
            let (code, text) = b.hammered();
            assert!(is_gone(code), "{code}: {text}");
            here.assert_holds(seed, "after deregister");
            here.register(&a.engine).expect("register again");
            here.assert_holds(seed, "after it was registered again");
        }
        assert_works(&a, "a", &mut b);
    }

    fn memory_withdrawn_while_another_process_reads_costs_only_the_read(fabric) {
        let (a, mut b) = (node("a", fabric), agent("b", fabric));
        b.befriend(&a, "a");
        let there = b.block(LARGE, 2);
        let mut here = Block::new(&a.engine, LARGE, 1).expect("register");
        for _ in 0..3 {
            b.hammer("read", &there, "a", &here, PIECE);
            here.deregister().expect("deregister");
            let (code, text) = b.hammered();
            assert!(is_gone(code), "{code}: {text}");
            here.register(&a.engine).expect("register again");
        }
        here.assert_holds(1, "at the source of all READs");
        assert_works(&a, "a", &mut b);
    }

    fn ten_thousand_requests_are_created_posted_and_released_some_cancelled_and_nothing_grows(fabric) {
        const ROUNDS: u64 = 10_000;
        const BYTES: usize = 256 << 10;
        const SMALL: usize = 16 << 10;
        let (a, b) = (node("a", fabric), node("b", fabric));
        befriend((&a, "a"), (&b, "b"));
        let here = Block::new(&a.engine, BYTES, 1).expect("register");
        let there = Block::new(&b.engine, BYTES, 2).expect("register");
        let blob = there.region().export().expect("export");
        let remote = Remote::import(&a, "b", &blob, there.region().addr()).expect("import");
        let mut busy: Vec<Transfer> = Vec::new();
        let mut before = None;
        let mut random = 1u64;
        let mut heard = 0;
        for round in 0..ROUNDS {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let op = if random >> 40 & 1 == 0 { Op::Read } else { Op::Write };
            let transfer = a.scattered(op, &here, &remote, SMALL).expect("create");
            let message: Option<&[u8]> = if random >> 41 & 1 == 0 { Some(b"some") } else { None };
            transfer.post(message).expect("post");
            match random >> 42 & 3 {
                0 => transfer.cancel().expect("cancel"),
                // The answer may be that it was cancelled elsewhere; that it ends is what matters.
                1 => drop(a.finish(&transfer)),
                _ => {}
            }
            busy.extend(transfer.release().err());
            busy = busy.into_iter().filter_map(|transfer| transfer.release().err()).collect();
            heard += b.engine.notifications().expect("notifications").len();
            if busy.len() > 64 {
                wait_for("the cancelled ones", || {
                    busy = std::mem::take(&mut busy).into_iter().filter_map(|t| t.release().err()).collect();
                    heard += b.engine.notifications().expect("notifications").len();
                    busy.is_empty().then_some(())
                });
            }
            if round == ROUNDS / 4 {
                before = Some(Census::take());
            }
        }
        wait_for("the last ones", || {
            busy = std::mem::take(&mut busy).into_iter().filter_map(|t| t.release().err()).collect();
            busy.is_empty().then_some(())
        });
        before.expect("taken").assert_flat("10,000 requests");
        assert!(heard > 0 && here.sentinels_stand() && there.sentinels_stand());
        let stats = a.stats();
        assert_eq!(stats["counters"]["sessions_opened"], 1, "{stats}");

        b.engine.notifications().expect("notifications");
        here.fill(3);
        let last = a.scattered(Op::Write, &here, &remote, SMALL).expect("create");
        a.run(&last, Some(b"the last"));
        wait_for("the last notification", || {
            let all = b.engine.notifications().expect("notifications");
            all.iter().any(|n| n.message == b"the last").then_some(())
        });
        there.assert_holds_reversed(3, SMALL, "after the last");
    }
}

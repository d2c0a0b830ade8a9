//! WRITE and READ, with and without notifications, of many and few, small and large blocks, from either process.

use baton_host::Op;
use baton_tests::Remote;
use serde_json::json;

use crate::{Pair, with_devices};

/// A WRITE and a READ from each side, each told to the other, with every byte compared.
pub fn everything_once(pair: &mut Pair, bytes: usize, piece: usize) {
    let (here, there, remote) = pair.blocks(bytes, (1, 2));
    let Pair { a, b } = pair;
    let read = a.scattered(Op::Read, &here, &remote, piece).expect("create");
    a.run(&read, Some(b"read by a"));
    here.assert_holds_reversed(2, piece, "after a READ");
    assert_eq!(b.ask(json!({ "do": "heard" })), json!([["a", "read by a"]]));

    here.fill(3);
    let write = a.scattered(Op::Write, &here, &remote, piece).expect("create");
    a.run(&write, Some(b"written by a"));
    assert_eq!(b.ask(json!({ "do": "heard" })), json!([["a", "written by a"]]));
    b.assert_holds(&there, 3, Some(piece), "after a WRITE");
    here.assert_holds(3, "at the source of a WRITE");

    b.ask(json!({ "do": "fill", "block": there.number, "seed": 4 }));
    let write = b.create("write", &there, "a", &here, piece);
    b.run(write, Some("written by b")).expect("the agent's WRITE");
    a.expect_notification("b", b"written by b");
    here.assert_holds_reversed(4, piece, "after the agent's WRITE");

    here.fill(5);
    let read = b.create("read", &there, "a", &here, piece);
    b.run(read, Some("read by b")).expect("the agent's READ");
    a.expect_notification("b", b"read by b");
    b.assert_holds(&there, 5, Some(piece), "after its READ");
    here.assert_holds(5, "at the source of a READ");
}

with_devices! {
    fn small_blocks_cross_both_ways_with_notifications() {
        let mut pair = Pair::meet();
        everything_once(&mut pair, 512 << 10, 4 << 10);
        pair.assert_works();
    }

    fn blocks_of_eight_bytes_cross_both_ways() {
        everything_once(&mut Pair::meet(), 4 << 10, 8);
    }

    fn blocks_larger_than_a_message_may_be_cross_both_ways() {
        everything_once(&mut Pair::meet(), 18 << 20, 9 << 20);
    }

    fn every_device_that_is_named_carries_lanes() {
        let mut pair = Pair::meet();
        everything_once(&mut pair, 4 << 20, 64 << 10);
        let session = pair.session();
        let lanes = session["rails"].as_array().cloned().unwrap_or_default();
        let named = baton_tests::rig_settings(0).into_iter().find(|(name, _)| name == "BATON_DEVICES");
        let named = named.map_or(1, |(_, devices)| devices.to_string_lossy().split(',').count());
        for (side, rail) in [0, 1].into_iter().flat_map(|side| (0..named).map(move |rail| (side, rail))) {
            assert!(lanes.iter().any(|lane| lane[side] == rail), "side {side}, rail {rail}: {session}");
        }
    }

    fn transfers_without_notification_tell_nobody() {
        let mut pair = Pair::meet();
        let (here, there, remote) = pair.blocks(1 << 20, (1, 2));
        let write = pair.a.scattered(Op::Write, &here, &remote, 64 << 10).expect("create");
        let read = pair.a.scattered(Op::Read, &here, &remote, 64 << 10).expect("create");
        pair.a.run(&write, None);
        pair.b.assert_holds(&there, 1, Some(64 << 10), "after a WRITE");
        pair.b.ask(json!({ "do": "fill", "block": there.number, "seed": 3 }));
        pair.a.run(&read, None);
        here.assert_holds_reversed(3, 64 << 10, "after a READ");
        // What the others told would come before this.
        pair.a.engine.notify("b", b"the only one").expect("notify");
        pair.assert_b_heard("the only one");
    }

    fn messages_of_every_length_come_with_their_transfer() {
        let mut pair = Pair::meet();
        let (here, there, remote) = pair.blocks(64 << 10, (1, 2));
        let write = pair.a.scattered(Op::Write, &here, &remote, 4 << 10).expect("create");
        for (round, length) in [0, 1, 63, 64, 65, 511, 512, 513, 4000, 8144, 8145, 100_000].into_iter().enumerate() {
            here.fill(10 + round as u64);
            let message: String = (0..length).map(|i| char::from(b'a' + (i % 26) as u8)).collect();
            pair.a.run(&write, Some(message.as_bytes()));
            pair.assert_b_heard(&message);
            pair.b.assert_holds(&there, 10 + round as u64, Some(4 << 10), "after a WRITE");
        }
    }

    fn notifications_alone_keep_their_order_both_ways() {
        const COUNT: usize = 200;
        let Pair { a, mut b } = Pair::meet();
        for i in 0..COUNT {
            a.engine.notify("b", format!("from a {i}").as_bytes()).expect("notify");
            b.tell(json!({ "do": "notify", "peer": "a", "message": format!("from b {i}") }));
        }
        (0..COUNT).for_each(|_| drop(b.answer()));
        let mut heard = Vec::new();
        while heard.len() < COUNT {
            heard.extend(a.notifications().into_iter().map(|n| String::from_utf8_lossy(&n.message).into_owned()));
        }
        let expected: Vec<String> = (0..COUNT).map(|i| format!("from b {i}")).collect();
        assert_eq!(heard, expected);
        let expected: Vec<_> = (0..COUNT).map(|i| json!(["a", format!("from a {i}")])).collect();
        assert_eq!(b.ask(json!({ "do": "heard", "count": COUNT })), json!(expected));
    }

    fn many_requests_of_both_processes_cross_at_once() {
        const REQUESTS: usize = 8;
        const BYTES: usize = 1 << 20;
        const PIECE: usize = 16 << 10;
        let mut pair = Pair::meet();
        let mine: Vec<_> = (0..REQUESTS as u64).map(|i| pair.blocks(BYTES, (100 + i, 200 + i))).collect();
        let theirs: Vec<_> = (0..REQUESTS as u64).map(|i| pair.blocks(BYTES, (300 + i, 400 + i))).collect();
        let Pair { a, b } = &mut pair;
        let writes: Vec<_> =
            theirs.iter().map(|(here, there, _)| b.create("write", there, "a", here, PIECE)).collect();
        let reads: Vec<_> = mine
            .iter()
            .map(|(here, _, remote): &(_, _, Remote)| a.scattered(Op::Read, here, remote, PIECE).expect("create"))
            .collect();
        for round in 0..3u64 {
            for (number, (write, read)) in writes.iter().zip(&reads).enumerate() {
                read.post(Some(b"read")).expect("post");
                b.post(*write, Some(&format!("{round}.{number}"))).expect("post");
            }
            reads.iter().for_each(|read| a.finish(read).expect("done"));
            writes.iter().for_each(|write| b.finish(*write).expect("done"));
            let mut heard = Vec::new();
            while heard.len() < REQUESTS {
                heard.extend(a.notifications().into_iter().map(|n| String::from_utf8_lossy(&n.message).into_owned()));
            }
            heard.sort();
            assert_eq!(heard, (0..REQUESTS).map(|i| format!("{round}.{i}")).collect::<Vec<_>>());
            let told = b.ask(json!({ "do": "heard", "count": REQUESTS }));
            assert_eq!(told, json!(vec![["a", "read"]; REQUESTS]));
            for (i, ((here, ..), (inbox, ..))) in mine.iter().zip(&theirs).enumerate() {
                here.assert_holds_reversed(200 + i as u64, PIECE, "after a READ");
                inbox.assert_holds_reversed(400 + i as u64, PIECE, "after the agent's WRITE");
                here.fill(500);
                inbox.fill(600);
            }
        }
    }
}

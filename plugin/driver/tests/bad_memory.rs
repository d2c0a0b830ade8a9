//! Transfers from memory that the host took away while it was registered: they fail, and with them nobody who did nothing wrong.

mod common;

use baton_driver::{Code, Desc, Driver, Status};
use baton_fabric::Op;
use common::pages::Pages;
use common::*;

const LEN: usize = 1 << 20;
const BLOCK: usize = 16 << 10;
/// Transfers that are under way at the same time.
const OTHERS: usize = 6;
const ROUNDS: u8 = 6;

/// Registered pages that are not there.
fn taken_away(engine: &Driver) -> Desc {
    let pages = Pages::new(LEN);
    let region = pages.register(engine);
    pages.take_away();
    pages.desc(region)
}

/// A round of transfers of which the middle one is from memory that is not there: how the others ended.
fn round(a: &Driver, b: &Driver, others: &[(Buffer, Buffer)]) -> Vec<Status> {
    let theirs = Buffer::new(b, LEN, 7);
    let gone = taken_away(a);
    let to = theirs.desc(0, LEN, import(a, "b", b, &theirs));
    let bad = a.create_xfer(Op::Write, "b", &[gone], &[to]).expect("create");
    let good: Vec<_> = others
        .iter()
        .map(|(here, there)| scattered(a, Op::Write, "b", here, there, import(a, "b", b, there), BLOCK))
        .collect();
    a.connect("b", 10_000).expect("connect");
    let (first, second) = good.split_at(OTHERS / 2);
    for xfer in first.iter().chain([&bad]).chain(second) {
        a.post(xfer, None).expect("post");
    }
    match wait(a, &bad) {
        Status::Failed(why) => assert_eq!(why.code, Code::Local, "{why}"),
        status => panic!("{status:?}"),
    }
    let statuses = good.iter().map(|xfer| wait(a, xfer)).collect();
    theirs.assert_guards();
    statuses
}

/// Engines that bear with a busy machine, and know each other.
fn patient_pair(fabric: &str) -> (Driver, Driver) {
    let (a, b) = (patient_engine("a", &[fabric]), patient_engine("b", &[fabric]));
    a.load_remote(Some("b"), b.conn_info()).expect("load b");
    b.load_remote(Some("a"), a.conn_info()).expect("load a");
    (a, b)
}

fn buffers(a: &Driver, b: &Driver, seed: u8) -> Vec<(Buffer, Buffer)> {
    (0..OTHERS as u8).map(|n| (Buffer::new(a, LEN, seed + n), Buffer::new(b, LEN, seed + n + 100))).collect()
}

fn expect_there((here, there): &(Buffer, Buffer)) {
    assert_eq!(there.read(), reversed(&here.read(), BLOCK));
    here.assert_guards();
    there.assert_guards();
}

#[test]
fn two_sided_only_the_transfer_whose_memory_is_gone_fails_and_the_others_go_on() {
    let (a, b) = patient_pair("tcp two-sided");
    for n in 0..ROUNDS {
        let others = buffers(&a, &b, n);
        for status in round(&a, &b, &others) {
            assert!(matches!(status, Status::Done), "round {n}: {status:?}");
        }
        others.iter().for_each(expect_there);
    }
}

#[test]
fn one_sided_only_the_transfer_whose_memory_is_gone_is_blamed_and_the_others_end_with_the_session() {
    let (a, b) = patient_pair("tcp");
    for n in 0..ROUNDS {
        let others = buffers(&a, &b, n);
        for (buffers, status) in others.iter().zip(round(&a, &b, &others)) {
            match status {
                Status::Done => expect_there(buffers),
                Status::Failed(why) => assert_eq!(why.code, Code::RemoteDisconnect, "round {n}: {why}"),
                status => panic!("{status:?}"),
            }
        }
    }
}

//! The two-sided backend on model RDMA devices that have a bad day: what was under way goes on when the session is back, nothing
//! lands twice, and what cannot go on fails with a reason.

mod common;

use baton_driver::{Backends, Code, Config, Driver, Status, Xfer};
use baton_fabric::Op;
use baton_verbs::fake::Fake;
use common::*;
use std::sync::Arc;
use std::time::Instant;

const BLOCK: usize = 16 << 10;
const BLOCKS: usize = 256;

struct Two {
    a: Driver,
    b: Driver,
    fake: &'static Fake,
    devices: [String; 2],
}

impl Two {
    fn new() -> Two {
        let ((to_a, fake, mut first), (to_b, _, mut second)) = (verbs::open("verbs"), verbs::open("verbs"));
        let backends = Backends { one_sided: false, two_sided: true };
        let engine = |name, fabric| Driver::create(Config { backends, ..config(name, 0) }, vec![fabric]);
        let (a, b) = (engine("a", to_a).expect("engine"), engine("b", to_b).expect("engine"));
        a.load_remote(Some("b"), b.conn_info()).expect("load b");
        b.load_remote(Some("a"), a.conn_info()).expect("load a");
        Two { a, b, fake, devices: [first.remove(0), second.remove(0)] }
    }

    fn xfer(&self, op: Op, here: &Buffer, there: &Buffer) -> Arc<Xfer> {
        let imported = import(&self.a, "b", &self.b, there);
        scattered(&self.a, op, "b", here, there, imported, BLOCK)
    }

    fn epochs_ended(&self) -> u64 {
        let stats: serde_json::Value = serde_json::from_str(&self.a.stats()).expect("JSON");
        stats["counters"]["epochs_ended"].as_u64().expect("a number")
    }
}

/// What befalls the device of one side, in words and as it happens.
type Fault = (&'static str, fn(&Two, usize));

/// In the middle of a transfer, each in its own way.
fn faults() -> [Fault; 2] {
    [
        ("a chain cut short", |two, side| {
            two.fake.device(&two.devices[side]).fail_post_after(0, libc::ENOMEM);
        }),
        ("a queue in error", |two, side| {
            let device = two.fake.device(&two.devices[side]);
            device.fail_polls(Some(-libc::EIO));
            let (before, deadline) = (two.epochs_ended(), Instant::now() + WATCHDOG);
            while two.epochs_ended() == before && Instant::now() < deadline {
                // Nobody sees it unless somebody polls.
                two.a.progress().expect("progress");
                two.b.progress().expect("progress");
            }
            device.fail_polls(None);
        }),
    ]
}

#[test]
fn a_transfer_survives_the_end_of_its_epoch_and_is_told_once() {
    let mut ended = 0;
    for (what, fault) in faults() {
        for op in [Op::Write, Op::Read] {
            for side in [0, 1] {
                let two = Two::new();
                let (here, there) =
                    (Buffer::new(&two.a, BLOCK * BLOCKS, 1), Buffer::new(&two.b, BLOCK * BLOCKS, 2));
                let expected = reversed(&if op == Op::Write { here.read() } else { there.read() }, BLOCK);
                let xfer = two.xfer(op, &here, &there);
                two.a.connect("b", 10_000).expect("connect");
                two.a.post(&xfer, Some(b"once")).expect("post");
                fault(&two, side);
                let status = wait(&two.a, &xfer);
                assert!(matches!(status, Status::Done), "{what}, {op:?}, side {side}: {status:?}");
                assert_eq!(if op == Op::Write { there.read() } else { here.read() }, expected);
                here.assert_guards();
                there.assert_guards();
                assert_eq!(notification(&two.b).message, b"once");
                two.a.notify("b", b"last").expect("notify");
                assert_eq!(notification(&two.b).message, b"last", "nothing was told twice");
                ended += two.epochs_ended();
            }
        }
    }
    assert!(ended >= 4, "{ended} epochs ended: the faults came too late");
    verbs::assert_rules();
}

#[test]
fn notifications_survive_the_end_of_their_epoch_in_order_and_once() {
    let two = Two::new();
    two.a.connect("b", 10_000).expect("connect");
    for n in 0..300u32 {
        if n % 100 == 50 {
            two.fake.device(&two.devices[(n / 100 % 2) as usize]).fail_post_after(0, libc::ENOMEM);
        }
        two.a.notify("b", &n.to_le_bytes()).expect("notify");
    }
    for n in 0..300u32 {
        assert_eq!(notification(&two.b).message, n.to_le_bytes());
    }
    verbs::assert_rules();
}

#[test]
fn a_peer_that_is_gone_fails_what_waited_for_it_with_the_reason() {
    let Two { a, b, .. } = Two::new();
    let (here, there) = (Buffer::new(&a, BLOCK * BLOCKS, 1), Buffer::new(&b, BLOCK * BLOCKS, 2));
    let imported = import(&a, "b", &b, &there);
    let xfer = scattered(&a, Op::Write, "b", &here, &there, imported, BLOCK);
    a.connect("b", 10_000).expect("connect");
    a.post(&xfer, None).expect("post");
    drop(b);
    match wait(&a, &xfer) {
        Status::Done => {}
        Status::Failed(why) => assert_eq!(why.code, Code::RemoteDisconnect, "{why}"),
        status => panic!("{status:?}"),
    }
    a.post(&xfer, None).expect("a post is taken while nobody knows");
    let Status::Failed(why) = wait(&a, &xfer) else { panic!("nobody is there") };
    assert_eq!(why.code, Code::RemoteDisconnect, "{why}");
    a.deregister(here.region).expect("the memory is free again");
}

#[test]
fn a_cancelled_transfer_touches_no_memory_after_it_was_reported() {
    let two = Two::new();
    let (mut here, there) = (Buffer::new(&two.a, BLOCK * BLOCKS, 1), Buffer::new(&two.b, BLOCK * BLOCKS, 2));
    let xfer = two.xfer(Op::Read, &here, &there);
    two.a.connect("b", 10_000).expect("connect");
    for _ in 0..20 {
        two.a.post(&xfer, Some(b"perhaps")).expect("post");
        two.a.cancel(&xfer).expect("cancel");
        match wait(&two.a, &xfer) {
            Status::Done => {}
            Status::Failed(why) => assert_eq!(why.code, Code::Canceled, "{why}"),
            status => panic!("{status:?}"),
        }
        here.fill(0x5A);
        two.a.notify("b", b"after").expect("notify");
        while notification(&two.b).message != b"after" {}
        assert!(here.read().iter().all(|byte| *byte == 0x5A), "a byte landed late");
    }
    verbs::assert_rules();
}

/// Engines that insist on their devices, but for notifications.
fn with_fallback(backends: Backends, fallback: bool) -> Two {
    let ((to_a, fake, mut first), (to_b, _, mut second)) = (verbs::open("verbs"), verbs::open("verbs"));
    let engine = |name, device| {
        let mut fabrics: Vec<Arc<dyn baton_fabric::Fabric>> = vec![device];
        if fallback {
            fabrics.push(fabric("tcp"));
        }
        let notify_only = fallback.then_some(1);
        Driver::create(Config { backends, notify_only, ..config(name, 0) }, fabrics).expect("engine")
    };
    let (a, b) = (engine("a", to_a), engine("b", to_b));
    a.load_remote(Some("b"), b.conn_info()).expect("load b");
    b.load_remote(Some("a"), a.conn_info()).expect("load a");
    Two { a, b, fake, devices: [first.remove(0), second.remove(0)] }
}

#[test]
fn notifications_go_out_of_band_once_where_that_is_permitted_and_transfers_wait_for_the_fabric() {
    for two_sided in [false, true] {
        let two = with_fallback(Backends { one_sided: !two_sided, two_sided }, true);
        let (here, there) = (Buffer::new(&two.a, BLOCK, 1), Buffer::new(&two.b, BLOCK, 2));
        let xfer = two.xfer(Op::Write, &here, &there);
        two.a.post(&xfer, Some(b"by the fabric")).expect("post");
        done(&two.a, &xfer);
        assert_eq!(notification(&two.b).message, b"by the fabric");
        two.fake.device(&two.devices[1]).set_port(1, false);
        for n in 0..100u32 {
            two.a.notify("b", &n.to_le_bytes()).expect("notify");
        }
        // Some were on their way when the port went down: they are sent again, and told once.
        for n in 0..100u32 {
            assert_eq!(notification(&two.b).message, n.to_le_bytes());
        }
        two.a.post(&xfer, Some(b"no way")).expect("taken over until it is known");
        let Status::Failed(why) = wait(&two.a, &xfer) else { panic!("nothing carries it") };
        assert!(why.text.contains("BATON_OOB_FALLBACK"), "{why}");
        two.fake.device(&two.devices[1]).set_port(1, true);
        let deadline = Instant::now() + WATCHDOG;
        while two.a.post(&xfer, Some(b"back")).is_err() || !matches!(wait(&two.a, &xfer), Status::Done) {
            assert!(Instant::now() < deadline, "the fabric is back: {}", two.a.stats());
        }
        while notification(&two.b).message != b"back" {}
        assert_eq!(there.read(), here.read());
    }
}

#[test]
fn without_permission_notifications_wait_for_the_fabric() {
    let two = with_fallback(Backends { one_sided: false, two_sided: true }, false);
    two.a.connect("b", 10_000).expect("connect");
    two.fake.device(&two.devices[1]).set_port(1, false);
    two.a.notify("b", b"later").expect("queued");
    let why = two.a.connect("b", 1000).err();
    assert!(two.b.take_notifications(usize::MAX).expect("take").is_empty(), "{why:?}");
    two.fake.device(&two.devices[1]).set_port(1, true);
    assert_eq!(notification(&two.b).message, b"later");
}

#[test]
fn transfers_fail_when_the_peer_stays_away_and_notifications_outlive_that_and_come_once() {
    let two = Two::new();
    let (here, there) = (Buffer::new(&two.a, BLOCK * BLOCKS, 1), Buffer::new(&two.b, BLOCK * BLOCKS, 2));
    let xfers = [two.xfer(Op::Write, &here, &there), two.xfer(Op::Read, &here, &there)];
    two.a.connect("b", 10_000).expect("connect");
    for round in 0..3u32 {
        two.a.notify("b", &round.to_le_bytes()).expect("notify");
        for xfer in &xfers {
            two.a.post(xfer, None).expect("post");
        }
        two.fake.device(&two.devices[1]).set_port(1, false);
        for xfer in &xfers {
            match wait(&two.a, xfer) {
                Status::Done => {}
                Status::Failed(why) => assert_eq!(why.code, Code::RemoteDisconnect, "{why}"),
                status => panic!("{status:?}"),
            }
        }
        two.a.notify("b", b"while nobody is there").expect("notify");
        two.fake.device(&two.devices[1]).set_port(1, true);
        assert_eq!(notification(&two.b).message, round.to_le_bytes());
        assert_eq!(notification(&two.b).message, b"while nobody is there");
        // The same requests work again, one at a time: together they would race.
        for (xfer, op) in xfers.iter().zip(["WRITE", "READ"]) {
            let deadline = Instant::now() + WATCHDOG;
            while two.a.post(xfer, None).is_err() || !matches!(wait(&two.a, xfer), Status::Done) {
                assert!(Instant::now() < deadline, "{op}: {}", two.a.stats());
            }
            assert_eq!(there.read(), reversed(&here.read(), BLOCK), "{op} of round {round}");
        }
        here.assert_guards();
        there.assert_guards();
    }
    verbs::assert_rules();
}

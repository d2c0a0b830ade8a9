//! Two engines on model RDMA devices that have a bad day: every transfer ends, no byte is wrong, and what can work again does.

mod common;

use baton_driver::{Code, Driver, Status, Xfer};
use baton_fabric::Op;
use baton_verbs::fake::{Fake, FakeGid};
use common::*;
use std::sync::Arc;
use std::time::Instant;

/// Two hosts that know each other, and the network with the names of their devices.
struct Two {
    a: Driver,
    b: Driver,
    fake: &'static Fake,
    devices: [String; 2],
}

impl Two {
    fn new() -> Two {
        Two::of("verbs")
    }

    fn of(kind: &str) -> Two {
        let ((to_a, fake, mut first), (to_b, _, mut second)) = (verbs::open(kind), verbs::open(kind));
        let a = Driver::create(config("a", 0), vec![to_a]).expect("engine");
        let b = Driver::create(config("b", 0), vec![to_b]).expect("engine");
        a.load_remote(Some("b"), b.conn_info()).expect("load b");
        b.load_remote(Some("a"), a.conn_info()).expect("load a");
        Two { a, b, fake, devices: [first.remove(0), second.remove(0)] }
    }

    fn write(&self, source: &Buffer, target: &Buffer, block: usize) -> Arc<Xfer> {
        let imported = import(&self.a, "b", &self.b, target);
        scattered(&self.a, Op::Write, "b", source, target, imported, block)
    }

    /// Posts until it succeeds: the epoch that failed may still be ending.
    fn works_again(&self, xfer: &Arc<Xfer>, source: &Buffer, target: &mut Buffer, block: usize) {
        const LAST: &[u8] = b"it works again";
        target.fill(0);
        let deadline = Instant::now() + WATCHDOG;
        while self.a.post(xfer, Some(LAST)).is_err() || !matches!(wait(&self.a, xfer), Status::Done) {
            assert!(Instant::now() < deadline, "it does not work again: {}", self.a.stats());
            std::thread::yield_now();
        }
        assert_eq!(target.read(), reversed(&source.read(), block));
        target.assert_guards();
        source.assert_guards();
        // Posts that failed may have notified as well.
        while notification(&self.b).message != LAST {}
    }
}

fn failure(engine: &Driver, xfer: &Xfer) -> String {
    match wait(engine, xfer) {
        Status::Failed(error) => error.to_string(),
        status => panic!("{status:?}"),
    }
}

const BLOCK: usize = 4096;

fn buffers(two: &Two) -> (Buffer, Buffer) {
    (Buffer::new(&two.a, 256 * BLOCK, 1), Buffer::new(&two.b, 256 * BLOCK, 2))
}

#[test]
fn devices_without_immediates_tell_of_transfers_by_sends_and_say_so() {
    let two = Two::of("verbs mute");
    let (source, target) = buffers(&two);
    let xfer = two.write(&source, &target, BLOCK);
    // More than there are RECVs, so that every slot is used again.
    for round in 0..300u32 {
        two.a.post(&xfer, Some(&round.to_le_bytes())).expect("post");
        done(&two.a, &xfer);
        assert_eq!(notification(&two.b).message, round.to_le_bytes());
    }
    assert_eq!(target.read(), reversed(&source.read(), BLOCK));
    for engine in [&two.a, &two.b] {
        let stats: serde_json::Value = serde_json::from_str(&engine.stats()).expect("json");
        assert_eq!(stats["peers"][0]["session"]["protocol"]["notify"], "send", "{stats}");
        assert_eq!(stats["counters"]["fallbacks"], 1, "{stats}");
    }
    verbs::assert_rules();
}

#[test]
fn a_chain_that_the_device_cuts_short_ends_the_epoch_and_the_next_post_connects_again() {
    let two = Two::new();
    let (source, mut target) = buffers(&two);
    let xfer = two.write(&source, &target, BLOCK);
    two.a.post(&xfer, Some(b"first")).expect("post");
    done(&two.a, &xfer);
    assert_eq!(notification(&two.b).message, b"first");
    for taken in [0, 1, 37, 255] {
        two.fake.device(&two.devices[0]).fail_post_after(taken, libc::ENOMEM);
        two.a.post(&xfer, Some(b"cut short")).expect("post");
        let why = failure(&two.a, &xfer);
        assert!(why.contains("work requests"), "{why}");
        two.works_again(&xfer, &source, &mut target, BLOCK);
    }
    verbs::assert_rules();
}

#[test]
fn a_completion_queue_in_error_fails_what_is_on_its_way_and_a_new_one_serves_the_next() {
    let two = Two::new();
    let (source, mut target) = buffers(&two);
    let xfer = two.write(&source, &target, BLOCK);
    two.a.post(&xfer, None).expect("post");
    done(&two.a, &xfer);
    two.fake.device(&two.devices[0]).fail_polls(Some(-libc::EIO));
    two.a.post(&xfer, Some(b"never heard of")).expect("post");
    failure(&two.a, &xfer);
    two.fake.device(&two.devices[0]).fail_polls(None);
    two.works_again(&xfer, &source, &mut target, BLOCK);
}

#[test]
fn a_port_down_in_the_middle_fails_the_transfer_and_back_up_it_serves_again() {
    for side in [0, 1] {
        let two = Two::new();
        let (source, mut target) = buffers(&two);
        let xfer = two.write(&source, &target, BLOCK);
        two.a.post(&xfer, None).expect("post");
        done(&two.a, &xfer);
        two.a.post(&xfer, Some(b"on a dead link")).expect("post");
        two.fake.device(&two.devices[side]).set_port(1, false);
        // It may have been through before.
        wait(&two.a, &xfer);
        two.fake.device(&two.devices[side]).set_port(1, true);
        two.works_again(&xfer, &source, &mut target, BLOCK);
    }
    verbs::assert_rules();
}

#[test]
fn a_lost_device_fails_everything_with_its_name_and_the_peer_is_not_blamed() {
    let two = Two::new();
    let (source, target) = buffers(&two);
    let xfer = two.write(&source, &target, BLOCK);
    two.a.post(&xfer, None).expect("post");
    done(&two.a, &xfer);
    two.fake.device(&two.devices[0]).fail();
    two.a.post(&xfer, Some(b"from a dead device")).expect("taken over");
    failure(&two.a, &xfer);
    // From here on connecting is refused, with the device and the reason.
    let deadline = Instant::now() + WATCHDOG;
    let why = loop {
        let why = match two.a.post(&xfer, Some(b"again")) {
            Ok(()) => failure(&two.a, &xfer),
            Err(e) => e.to_string(),
        };
        if why.contains("fatal") || Instant::now() > deadline {
            break why;
        }
    };
    assert!(why.contains(&two.devices[0]) && why.contains("fatal"), "{why}");
    let other = Buffer::new(&two.b, BLOCK, 3);
    two.b.deregister(other.region).expect("the peer goes on");
}

#[test]
fn a_changed_gid_ends_the_session_and_new_connection_information_brings_it_back() {
    let two = Two::new();
    let (source, mut target) = buffers(&two);
    let xfer = two.write(&source, &target, BLOCK);
    two.a.post(&xfer, None).expect("post");
    done(&two.a, &xfer);
    two.fake.device(&two.devices[1]).set_gid(1, 0, Some(FakeGid::ipv4([10, 78, 1, 1])));
    two.a.post(&xfer, None).expect("post");
    wait(&two.a, &xfer);
    two.a.load_remote(Some("b"), two.b.conn_info()).expect("load b again");
    two.works_again(&xfer, &source, &mut target, BLOCK);
    verbs::assert_rules();
}

#[test]
fn registration_past_the_lock_limit_says_so_and_costs_nothing() {
    let two = Two::new();
    let before = two.fake.device(&two.devices[0]).live().mrs;
    two.fake.device(&two.devices[0]).set_memlock(Some(64 * 1024));
    let bytes = vec![0u8; 1 << 20];
    let memory = baton_fabric::Memory {
        addr: bytes.as_ptr() as u64,
        len_bytes: bytes.len() as u64,
        kind: baton_fabric::MemoryKind::Dram,
        device: 0,
        remote_read: true,
        remote_write: true,
        ordered: false,
        mapped: false,
    };
    let why = two.a.register(&memory).expect_err("too much").to_string();
    assert!(
        why.contains("RLIMIT_MEMLOCK") && why.contains(&two.devices[0]) && why.contains("1048576"),
        "{why}"
    );
    assert_eq!(two.fake.device(&two.devices[0]).live().mrs, before);
    two.fake.device(&two.devices[0]).set_memlock(None);
    let region = two.a.register(&memory).expect("register");
    two.a.deregister(region).expect("deregister");
    assert_eq!(two.fake.device(&two.devices[0]).live().mrs, before);
}

#[test]
fn a_region_that_a_device_does_not_let_go_is_of_no_more_use_and_can_be_deregistered_again() {
    let two = Two::new();
    let (device, before) = (two.fake.device(&two.devices[0]), two.fake.device(&two.devices[0]).live().mrs);
    let (source, target) = buffers(&two);
    let imported = import(&two.a, "b", &two.b, &target);
    device.set_busy_deregistrations(1);
    let error = two.a.deregister(source.region).expect_err("the device refuses");
    assert!(error.text.contains("stay registered") && error.text.contains("resource busy"), "{error}");
    let (local, remote) = ([source.desc(0, 64, source.region)], [target.desc(0, 64, imported)]);
    for refused in
        [two.a.create_xfer(Op::Write, "b", &local, &remote).map(drop), two.a.export(source.region).map(drop)]
    {
        assert_eq!(refused.expect_err("withdrawn").code, Code::NotFound);
    }
    two.a.deregister(source.region).expect("the second time");
    assert_eq!(two.a.deregister(source.region).expect_err("it is gone").code, Code::NotFound);
    two.b.deregister(target.region).expect("deregister");
    assert_eq!(device.live().mrs, before, "nothing is left on the device");
    verbs::assert_rules();
}

#[test]
fn twenty_engines_that_came_and_went_leave_nothing_on_their_device() {
    let (_, fake, devices) = verbs::open("verbs");
    let live = || fake.device(&devices[0]).live();
    let before = live();
    for round in 0..20u8 {
        let two = Two::new();
        let (source, mut target) = buffers(&two);
        let xfer = two.write(&source, &target, BLOCK);
        if round % 2 == 0 {
            two.works_again(&xfer, &source, &mut target, BLOCK);
        } else {
            two.a.post(&xfer, Some(b"left behind")).expect("post");
        }
        let devices = two.devices.clone();
        drop((two, source, target, xfer));
        for device in &devices {
            let live = fake.device(device).live();
            assert_eq!(
                (live.qps, live.cqs, live.mrs, live.pds, live.contexts),
                (0, 0, 0, 0, 0),
                "round {round}"
            );
        }
    }
    assert_eq!(live(), before);
    verbs::assert_rules();
}

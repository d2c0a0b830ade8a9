//! Two engines of one process over each software fabric and over model RDMA devices, with immediates and with SENDs.

mod common;

use baton_driver::{Code, Status};
use baton_fabric::Op;
use common::*;
use std::time::Instant;

macro_rules! on_each_fabric {
    ($($(#[$attr:meta])* fn $name:ident($fabric:ident) $body:block)*) => {
        $($(#[$attr])* fn $name($fabric: &str) $body)*
        mod local { $(#[test] fn $name() { super::$name("local"); })* }
        mod verbs { $(#[test] fn $name() { super::$name("verbs"); super::common::verbs::assert_rules(); })* }
        mod verbs_by_send { $(#[test] fn $name() { super::$name("verbs send"); })* }
        mod verbs_on_two_rails { $(#[test] fn $name() { super::$name("verbs rails"); })* }
        mod verbs_meagre { $(#[test] fn $name() { super::$name("verbs meagre"); })* }
        mod verbs_meagre_by_send { $(#[test] fn $name() { super::$name("verbs meagre send"); })* }
        mod tcp { $(#[test] fn $name() { super::$name("tcp"); })* }
        mod local_by_send { $(#[test] fn $name() { super::$name("local send"); })* }
        mod tcp_auto { $(#[test] fn $name() { super::$name("tcp auto"); })* }
        mod local_two_sided { $(#[test] fn $name() { super::$name("local two-sided"); })* }
        mod tcp_two_sided { $(#[test] fn $name() { super::$name("tcp two-sided"); })* }
        mod verbs_two_sided { $(#[test] fn $name() { super::$name("verbs two-sided"); super::common::verbs::assert_rules(); })* }
        mod tcp_by_send { $(#[test] fn $name() { super::$name("tcp send"); })* }
    };
}

on_each_fabric! {
    fn a_written_block_list_arrives_whole_and_its_notification_after_it(fabric) {
        let (a, b) = pair(&[fabric]);
        let (source, target) = (Buffer::new(&a, 256 * 1024, 1), Buffer::new(&b, 256 * 1024, 2));
        let imported = import(&a, "b", &b, &target);
        let xfer = scattered(&a, Op::Write, "b", &source, &target, imported, 4096);
        a.post(&xfer, Some(b"landed")).expect("post");
        let n = notification(&b);
        assert_eq!((&*n.name, &n.message[..]), ("a", &b"landed"[..]));
        assert_eq!(target.read(), reversed(&source.read(), 4096));
        done(&a, &xfer);
        source.assert_guards();
        target.assert_guards();
    }

    fn a_read_fetches_every_byte_and_tells_the_owner(fabric) {
        let (a, b) = pair(&[fabric]);
        let (local, remote) = (Buffer::new(&a, 1 << 20, 3), Buffer::new(&b, 1 << 20, 4));
        let imported = import(&a, "b", &b, &remote);
        let xfer = scattered(&a, Op::Read, "b", &local, &remote, imported, 8192);
        a.post(&xfer, Some(b"free them")).expect("post");
        done(&a, &xfer);
        assert_eq!(local.read(), reversed(&remote.read(), 8192));
        assert_eq!(notification(&b).message, b"free them");
        local.assert_guards();
        remote.assert_guards();
    }

    fn who_is_told_that_memory_was_read_may_use_it_again_at_once(fabric) {
        let (a, b) = pair(&[fabric]);
        let (local, mut remote) = (Buffer::new(&a, 128 * 1024, 1), Buffer::new(&b, 128 * 1024, 2));
        let xfer = scattered(&a, Op::Read, "b", &local, &remote, import(&a, "b", &b, &remote), 16384);
        for round in 0..30u8 {
            remote.fill(round);
            a.post(&xfer, Some(&[round])).expect("post");
            std::thread::scope(|scope| {
                // The reader polls meanwhile, as far as it goes by itself.
                let reader = scope.spawn(|| done(&a, &xfer));
                assert_eq!(notification(&b).message, [round]);
                remote.fill(0xEE);
                reader.join().expect("the transfer is done");
            });
            assert!(local.read().iter().all(|byte| *byte == round), "round {round}: memory was read after its owner was told");
        }
        local.assert_guards();
    }

    fn a_target_that_calls_nothing_is_served(fabric) {
        let (a, b) = pair(&[fabric]);
        let (source, target) = (Buffer::new(&a, 64 << 20, 5), Buffer::new(&b, 64 << 20, 6));
        let imported = import(&a, "b", &b, &target);
        let write = scattered(&a, Op::Write, "b", &source, &target, imported, 1 << 20);
        a.post(&write, None).expect("post");
        done(&a, &write);
        assert_eq!(target.read(), reversed(&source.read(), 1 << 20));
        target.assert_guards();
    }

    fn a_transfer_is_posted_again_with_new_data_and_another_message(fabric) {
        let (a, b) = pair(&[fabric]);
        let (source, target) = (Buffer::new(&a, 65536, 7), Buffer::new(&b, 65536, 8));
        let imported = import(&a, "b", &b, &target);
        let xfer = scattered(&a, Op::Write, "b", &source, &target, imported, 512);
        for round in 0..200u32 {
            a.post(&xfer, Some(&round.to_le_bytes())).expect("post");
            done(&a, &xfer);
            assert_eq!(notification(&b).message, round.to_le_bytes());
        }
        assert_eq!(target.read(), reversed(&source.read(), 512));
    }

    fn posting_an_active_transfer_is_refused_and_harmless(fabric) {
        let (a, b) = pair(&[fabric]);
        let (source, target) = (Buffer::new(&a, 32 << 20, 9), Buffer::new(&b, 32 << 20, 10));
        let imported = import(&a, "b", &b, &target);
        let xfer = scattered(&a, Op::Write, "b", &source, &target, imported, 1 << 20);
        a.post(&xfer, None).expect("post");
        assert_eq!(a.post(&xfer, None).expect_err("active").code, Code::RepostActive);
        done(&a, &xfer);
        assert_eq!(target.read(), reversed(&source.read(), 1 << 20));
    }

    fn a_progress_thread_moves_work_for_hosts_that_do_not_poll_and_ends_with_its_engine(fabric) {
        for round in 0..20 {
            let (a, b) = (engine_that_spins("a", &[fabric], 50), engine_that_spins("b", &[fabric], 50));
            a.load_remote(Some("b"), b.conn_info()).expect("load b");
            let (source, target) = (Buffer::new(&a, 65536, round), Buffer::new(&b, 65536, 1));
            let xfer = scattered(&a, Op::Read, "b", &source, &target, import(&a, "b", &b, &target), 4096);
            a.post(&xfer, Some(b"read")).expect("post");
            let deadline = Instant::now() + WATCHDOG;
            while xfer.is_active() || b.inbox().is_empty() {
                assert!(Instant::now() < deadline, "{}", a.stats());
                std::thread::yield_now();
            }
            assert!(matches!(xfer.status(), Status::Done));
            assert_eq!(source.read(), reversed(&target.read(), 4096));
            a.destroy().expect("all threads end");
            b.destroy().expect("all threads end");
        }
    }

    fn both_sides_connect_at_once_and_end_with_one_session(fabric) {
        for round in 0..10 {
            let (a, b) = pair(&[fabric]);
            let (x, y) = (Buffer::new(&a, 4096, round), Buffer::new(&b, 4096, round + 1));
            let to_b = scattered(&a, Op::Write, "b", &x, &y, import(&a, "b", &b, &y), 4096);
            let to_a = scattered(&b, Op::Read, "a", &y, &x, import(&b, "a", &a, &x), 4096);
            a.post(&to_b, Some(b"ab")).expect("post");
            b.post(&to_a, Some(b"ba")).expect("post");
            done(&a, &to_b);
            done(&b, &to_a);
            assert_eq!(notification(&a).message, b"ba");
            assert_eq!(notification(&b).message, b"ab");
            assert_eq!(x.read(), y.read());
        }
    }

    fn standalone_notifications_keep_their_order(fabric) {
        let (a, b) = pair(&[fabric]);
        for i in 0..2000u32 {
            let deadline = Instant::now() + WATCHDOG;
            while let Err(e) = a.notify("b", &i.to_le_bytes()) {
                assert_eq!(e.code, Code::Limit, "{e}");
                assert!(Instant::now() < deadline, "{}", a.stats());
                a.progress().expect("progress");
            }
        }
        for i in 0..2000u32 {
            assert_eq!(notification(&b).message, i.to_le_bytes());
        }
    }

    fn an_empty_message_and_an_empty_transfer_are_delivered(fabric) {
        let (a, b) = pair(&[fabric]);
        let (source, target) = (Buffer::new(&a, 64, 1), Buffer::new(&b, 64, 2));
        let imported = import(&a, "b", &b, &target);
        let before = target.read();
        let nothing = a.create_xfer(Op::Write, "b", &[source.desc(0, 0, source.region)], &[target.desc(3, 0, imported)]).expect("create");
        a.post(&nothing, Some(b"")).expect("post");
        assert_eq!(notification(&b).message, b"");
        done(&a, &nothing);
        a.post(&nothing, None).expect("post");
        done(&a, &nothing);
        assert_eq!(target.read(), before);
    }

    fn messages_up_to_the_limit_arrive_whole_and_one_byte_more_is_refused_with_both_sizes(fabric) {
        const LIMIT: usize = 8 << 20;
        let (a, b) = pair(&[fabric]);
        let (source, target) = (Buffer::new(&a, 4096, 1), Buffer::new(&b, 4096, 2));
        let imported = import(&a, "b", &b, &target);
        let write = scattered(&a, Op::Write, "b", &source, &target, imported, 1024);
        let read = scattered(&a, Op::Read, "b", &source, &target, imported, 1024);
        let nothing = a.create_xfer(Op::Write, "b", &[source.desc(0, 0, source.region)], &[target.desc(3, 0, imported)]).expect("create");
        let text = |seed: usize, len: usize| -> Vec<u8> { (0..len).map(|i| (i * 7 + (i >> 8) + seed) as u8).collect() };
        // The first goes before there is a session. One record takes 8144.
        let lengths = [LIMIT, 8145, 2 * 8144, 100_000];
        for (round, len) in lengths.into_iter().enumerate() {
            let too_long = vec![7; LIMIT + 1];
            for error in [a.post(&write, Some(&too_long)).expect_err("too long"), a.notify("b", &too_long).expect_err("too long")] {
                assert_eq!(error.code, Code::Limit);
                assert!(error.text.contains("8388609") && error.text.contains("8388608"), "{error}");
            }
            for (kind, xfer) in [&write, &read, &nothing].into_iter().enumerate() {
                let message = text(10 * round + kind, len);
                a.post(xfer, Some(&message)).expect("post");
                done(&a, xfer);
                assert!(notification(&b).message == message, "round {round}, {kind}: {len} bytes");
            }
            let message = text(10 * round + 5, len);
            a.notify("b", &message).expect("notify");
            assert!(notification(&b).message == message, "round {round}, alone: {len} bytes");
        }
        assert_eq!(source.read(), reversed(&target.read(), 1024));
        target.assert_guards();
        source.assert_guards();
    }

    fn after_deregister_returns_no_byte_lands(fabric) {
        let (a, b) = pair(&[fabric]);
        let (source, mut target) = (Buffer::new(&a, 64 << 20, 11), Buffer::new(&b, 64 << 20, 12));
        let xfer = scattered(&a, Op::Write, "b", &source, &target, import(&a, "b", &b, &target), 1 << 20);
        a.post(&xfer, Some(b"never mind")).expect("post");
        // Once the first bytes are there, the rest is on its way.
        let untouched = target.read_first();
        let deadline = Instant::now() + WATCHDOG;
        while target.read_first() == untouched {
            a.progress().expect("progress");
            assert!(Instant::now() < deadline, "{}", a.stats());
        }
        b.deregister(target.region).expect("deregister");
        target.fill(0x5A);
        match wait(&a, &xfer) {
            Status::Done => {}
            Status::Failed(e) => assert_eq!(e.code, Code::RemoteDisconnect, "{e}"),
            other => panic!("{other:?}"),
        }
        assert!(target.read().iter().all(|byte| *byte == 0x5A), "bytes landed after deregister");
        target.assert_guards();
        match a.post(&xfer, None) {
            Err(error) => assert_eq!(error.code, Code::NotFound, "{error}"),
            // A peer too slow to acknowledge within a second has lost its session, and the news with it: then the owner refuses.
            Ok(()) => assert!(matches!(wait(&a, &xfer), Status::Failed(_)), "written after deregister"),
        }
        assert!(target.read().iter().all(|byte| *byte == 0x5A), "bytes landed after deregister");
    }

    fn withdrawing_one_region_lets_its_transfers_end_and_spares_all_others(fabric) {
        let (a, b) = pair(&[fabric]);
        // Without a session nobody could be told.
        assert!(a.connect("b", 10_000).expect("connect"));
        for round in 0..5 {
            let (source, doomed, other) = (Buffer::new(&a, 2 << 20, round), Buffer::new(&b, 2 << 20, 1), Buffer::new(&b, 2 << 20, 2));
            let to_doomed = scattered(&a, Op::Write, "b", &source, &doomed, import(&a, "b", &b, &doomed), 65536);
            let to_other = scattered(&a, Op::Write, "b", &source, &other, import(&a, "b", &b, &other), 65536);
            std::thread::scope(|scope| {
                let poller = scope.spawn(|| {
                    if let Err(e) = a.post(&to_doomed, Some(b"doomed")) {
                        assert_eq!(e.code, Code::NotFound, "withdrawn before it was posted: {e}");
                    }
                    a.post(&to_other, Some(b"other")).expect("post");
                    (wait(&a, &to_doomed), wait(&a, &to_other))
                });
                b.deregister(doomed.region).expect("deregister");
                let (first, second) = poller.join().expect("poller");
                match first {
                    Status::Done => {}
                    // Withdrawn before it was posted.
                    Status::Failed(e) => assert_eq!(e.code, Code::NotFound, "{e}"),
                    other => panic!("{other:?}"),
                }
                assert!(matches!(second, Status::Done), "{second:?}");
            });
            assert_eq!(other.read(), reversed(&source.read(), 65536));
            for _ in 0..2 {
                if notification(&b).message == b"other" {
                    break;
                }
            }
            other.assert_guards();
            doomed.assert_guards();
        }
    }

    fn an_engine_that_goes_away_fails_its_peers_transfers_and_another_of_its_name_works(fabric) {
        let (a, b) = pair(&[fabric]);
        let source = Buffer::new(&a, 4096, 13);
        {
            let target = Buffer::new(&b, 4096, 14);
            let xfer = scattered(&a, Op::Write, "b", &source, &target, import(&a, "b", &b, &target), 4096);
            a.post(&xfer, None).expect("post");
            done(&a, &xfer);
            drop(b);
            match a.post(&xfer, None) {
                Ok(()) => match wait(&a, &xfer) {
                    Status::Failed(e) => assert_eq!(e.code, Code::RemoteDisconnect, "{e}"),
                    other => panic!("{other:?}"),
                },
                Err(e) => assert_eq!(e.code, Code::RemoteDisconnect, "{e}"),
            }
        }
        let b = engine("b", &[fabric]);
        a.load_remote(Some("b"), b.conn_info()).expect("load the new b");
        let target = Buffer::new(&b, 4096, 15);
        let xfer = scattered(&a, Op::Write, "b", &source, &target, import(&a, "b", &b, &target), 4096);
        a.post(&xfer, Some(b"again")).expect("post");
        done(&a, &xfer);
        assert_eq!(notification(&b).message, b"again");
        assert_eq!(target.read(), source.read());
    }

    fn many_threads_post_to_one_peer_over_one_handshake(fabric) {
        let (a, b) = pair(&[fabric]);
        let buffers: Vec<_> = (0..16).map(|i| (Buffer::new(&a, 16384, i), Buffer::new(&b, 16384, 100 + i))).collect();
        std::thread::scope(|scope| {
            for (source, target) in &buffers {
                let (a, b) = (&a, &b);
                scope.spawn(move || {
                    let xfer = scattered(a, Op::Write, "b", source, target, import(a, "b", b, target), 1024);
                    for _ in 0..20 {
                        a.post(&xfer, Some(b"x")).expect("post");
                        done(a, &xfer);
                    }
                });
            }
        });
        for _ in 0..16 * 20 {
            assert_eq!(notification(&b).message, b"x");
        }
        for (source, target) in &buffers {
            assert_eq!(target.read(), reversed(&source.read(), 1024));
        }
        let stats: serde_json::Value = serde_json::from_str(&a.stats()).expect("json");
        assert_eq!(stats["counters"]["sessions_opened"], 1, "{stats}");
    }
}

#[test]
fn one_side_that_wants_sends_decides_for_both_and_the_other_says_so_once() {
    for (ours, theirs) in [("tcp send", "tcp"), ("tcp", "tcp send")] {
        let (a, b) = (engine("a", &[ours]), engine("b", &[theirs]));
        a.load_remote(Some("b"), b.conn_info()).expect("load b");
        b.load_remote(Some("a"), a.conn_info()).expect("load a");
        let (source, target) = (Buffer::new(&a, 64 * 1024, 1), Buffer::new(&b, 64 * 1024, 2));
        let xfer = scattered(&a, Op::Write, "b", &source, &target, import(&a, "b", &b, &target), 4096);
        // More than there are RECVs, so that every slot is used again.
        for round in 0..300u32 {
            a.post(&xfer, Some(&round.to_le_bytes())).expect("post");
            b.notify("a", &round.to_le_bytes()).expect("notify");
            done(&a, &xfer);
            assert_eq!(notification(&b).message, round.to_le_bytes());
            assert_eq!(notification(&a).message, round.to_le_bytes());
        }
        assert_eq!(target.read(), reversed(&source.read(), 4096));
        target.assert_guards();
        for engine in [&a, &b] {
            let stats: serde_json::Value = serde_json::from_str(&engine.stats()).expect("json");
            let session = &stats["peers"][0]["session"]["protocol"];
            assert_eq!(session["notify"], "send", "{stats}");
            assert_eq!(session["endpoints"][1]["ring_consumed"], 0, "{stats}");
            let fell_back = u64::from(stats["notify"] == "imm");
            assert_eq!(stats["counters"]["fallbacks"], fell_back, "{stats}");
        }
    }
}

#[test]
fn a_transfer_to_itself_needs_no_session() {
    let a = engine("a", &["tcp"]);
    let (source, target) = (Buffer::new(&a, 3 << 20, 1), Buffer::new(&a, 3 << 20, 2));
    let imported = import(&a, "a", &a, &target);
    let xfer = scattered(&a, Op::Write, "a", &source, &target, imported, 1 << 20);
    a.post(&xfer, Some(b"me")).expect("post");
    done(&a, &xfer);
    let n = notification(&a);
    assert_eq!((&*n.name, &n.message[..]), ("a", &b"me"[..]));
    assert_eq!(target.read(), reversed(&source.read(), 1 << 20));
    a.notify("a", b"alone").expect("notify");
    assert_eq!(notification(&a).message, b"alone");
}

#[test]
fn bad_descriptors_are_refused_by_index_and_the_engine_goes_on() {
    let (a, b) = pair(&["tcp"]);
    let (source, target) = (Buffer::new(&a, 4096, 1), Buffer::new(&b, 4096, 2));
    let imported = import(&a, "b", &b, &target);
    let (l, r) = (source.desc(0, 64, source.region), target.desc(0, 64, imported));
    let refused =
        |locals: &[_], remotes: &[_]| a.create_xfer(Op::Write, "b", locals, remotes).err().expect("refused");
    assert_eq!(refused(&[l], &[]).code, Code::InvalidParam);
    let out = refused(&[l, source.desc(4090, 64, source.region)], &[r, r]);
    assert!(out.text.contains("descriptor 1") && out.text.contains("local"), "{out}");
    let out = refused(&[l], &[target.desc(4096, 64, imported)]);
    assert!(out.text.contains("descriptor 0") && out.text.contains("remote"), "{out}");
    let mut over = l;
    (over.addr, over.len_bytes) = (u64::MAX - 10, 64);
    assert_eq!(refused(&[over], &[r]).code, Code::InvalidParam);
    assert_eq!(refused(&[source.desc(0, 32, source.region)], &[r]).code, Code::InvalidParam);
    assert_eq!(refused(&[source.desc(0, 64, 12345)], &[r]).code, Code::NotFound);
    assert_eq!(refused(&[l], &[target.desc(0, 64, 12345)]).code, Code::NotFound);
    assert_eq!(a.create_xfer(Op::Write, "nobody", &[l], &[r]).err().expect("refused").code, Code::NotFound);
    assert_eq!(a.load_remote(None, b"garbage").expect_err("refused").code, Code::InvalidParam);
    assert_eq!(a.import("b", b"garbage").expect_err("refused").code, Code::InvalidParam);
    let good = a.create_xfer(Op::Write, "b", &[l], &[r]).expect("create");
    a.post(&good, None).expect("post");
    done(&a, &good);
    assert_eq!(target.read()[..64], source.read()[..64]);
}

#[test]
fn a_poisoned_engine_refuses_everything_and_its_peers_are_told() {
    let (a, b) = pair(&["tcp"]);
    let (source, target) = (Buffer::new(&a, 4096, 1), Buffer::new(&b, 4096, 2));
    let xfer = scattered(&a, Op::Write, "b", &source, &target, import(&a, "b", &b, &target), 4096);
    a.post(&xfer, None).expect("post");
    done(&a, &xfer);
    b.poison();
    assert_eq!(b.notify("a", b"x").expect_err("poisoned").code, Code::Panic);
    assert_eq!(b.take_notifications(usize::MAX).err().expect("poisoned").code, Code::Panic);
    match a.post(&xfer, None) {
        Ok(()) => assert!(matches!(wait(&a, &xfer), Status::Failed(_)), "its queue pairs are in error"),
        Err(e) => assert_eq!(e.code, Code::RemoteDisconnect, "{e}"),
    }
    b.destroy().expect("a poisoned engine can be destroyed");
}

#[test]
fn a_transfer_to_itself_into_memory_that_is_not_writable_fails_and_harms_nothing() {
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
    const LEN: usize = 64 * 1024;
    // SAFETY: fresh pages that only this test knows.
    let page = unsafe { mmap_anonymous(std::ptr::null_mut(), LEN, ProtFlags::READ, MapFlags::PRIVATE) }
        .expect("mmap");
    let a = engine("a", &["tcp"]);
    let memory = baton_fabric::Memory {
        addr: page as u64,
        len_bytes: LEN as u64,
        kind: baton_fabric::MemoryKind::Dram,
        device: 0,
        remote_read: true,
        remote_write: true,
        ordered: false,
        mapped: false,
    };
    let region = a.register(&memory).expect("register");
    let imported = a.import("a", &a.export(region).expect("export")).expect("import");
    let source = Buffer::new(&a, LEN, 1);
    let remote =
        baton_driver::Desc { addr: page as u64, len_bytes: LEN as u64, region: imported, reserved: 0 };
    let xfer =
        a.create_xfer(Op::Write, "a", &[source.desc(0, LEN, source.region)], &[remote]).expect("create");
    a.post(&xfer, Some(b"never")).expect("post");
    match wait(&a, &xfer) {
        Status::Failed(e) => assert_eq!(e.code, Code::Local, "{e}"),
        other => panic!("{other:?}"),
    }
    assert!(a.take_notifications(usize::MAX).expect("take").is_empty());
    let target = Buffer::new(&a, LEN, 2);
    let good = scattered(&a, Op::Write, "a", &source, &target, import(&a, "a", &a, &target), 4096);
    a.post(&good, None).expect("post");
    done(&a, &good);
    assert_eq!(target.read(), reversed(&source.read(), 4096));
    a.deregister(region).expect("deregister");
    // SAFETY: the pages are ours and no longer registered.
    unsafe { munmap(page, LEN) }.expect("munmap");
}

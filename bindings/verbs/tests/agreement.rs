//! The fake and soft-RoCE do the same: each behaviour is tried on both, with one expectation. What only hardware does (the
//! specification's own statuses, events of refusals, strict limits) is not soft-RoCE's and stands in the fake's own tests.

pub use baton_verbs::*;

#[path = "../src/fake/tests/ends.rs"]
#[allow(dead_code)]
mod ends;

use baton_verbs::fake::{Fake, FakeConfig};
use ends::*;

/// Two devices that reach each other.
struct Bench {
    library: Library,
    devices: [String; 2],
    /// Before it the library's devices are closed.
    _fake: Option<Fake>,
}

impl Bench {
    fn model() -> Bench {
        let config = FakeConfig { soft_statuses: true, access_events: false, ..FakeConfig::default() };
        let fake = Fake::new(config);
        let devices = ["fake0", "fake1"].map(str::to_owned);
        Bench { library: fake.library(), devices, _fake: Some(fake) }
    }

    /// `BATON_TEST_DEVICES=first,second`, in the guest rxe0 and rxe1.
    fn real() -> Bench {
        let named = std::env::var("BATON_TEST_DEVICES").unwrap_or_else(|_| "rxe0,rxe1".to_owned());
        let (first, second) = named.split_once(',').expect("two devices");
        let library = Library::open().expect("libibverbs");
        Bench { library, devices: [first.to_owned(), second.to_owned()], _fake: None }
    }

    fn pair(&self, options: Options) -> (End, End) {
        pair_on(&self.library, [&self.devices[0], &self.devices[1]], options)
    }
}

/// Nothing fails for the time it takes under emulation.
fn patient() -> Options {
    Options { timeout: 18, retry_cnt: 6, rnr_retry: 6, ..Options::default() }
}

/// What fails fails soon.
fn brief() -> Options {
    Options { timeout: 10, retry_cnt: 2, rnr_retry: 2, ..Options::default() }
}

fn data_arrives_exactly(bench: &Bench) {
    let (mut a, mut b) = bench.pair(patient());
    for (round, len) in [0, 1, 7, 4096, 20_000].into_iter().enumerate() {
        for op in [Opcode::Write, Opcode::Read] {
            a.fill(round as u8);
            b.fill(100 + round as u8);
            let (mut expect_a, mut expect_b) = (a.bytes(0..30_000), b.bytes(0..30_000));
            a.send(|chain| chain.push(5, op, SIGNALED, a.local(64, len), b.remote(128))).unwrap();
            assert_eq!(ids(&a.completions(1)), [(5, Status::Success)]);
            if op == Opcode::Write {
                expect_b[128..128 + len].copy_from_slice(&expect_a[64..64 + len]);
            } else {
                expect_a[64..64 + len].copy_from_slice(&expect_b[128..128 + len]);
            }
            assert!(a.bytes(0..30_000) == expect_a && b.bytes(0..30_000) == expect_b, "{len} bytes, {op:?}");
        }
    }
}

fn immediates_and_sends_consume_recvs_in_order(bench: &Bench) {
    let (mut a, b) = bench.pair(patient());
    a.fill(1);
    for id in 0..4 {
        b.recv(40 + id, 1000 * id as usize, 100);
    }
    a.send(|chain| {
        chain.push(1, Opcode::WriteWithImm(0xabcd_1234), SILENT, a.local(0, 5000), b.remote(10_000));
        chain.push(2, Opcode::Send, SILENT, a.local(0, 100), (0, 0));
        chain.push(3, Opcode::WriteWithImm(9), SILENT, (0, 0, 0), (0, 0));
        chain.push(4, Opcode::Send, SIGNALED, (0, 0, 0), (0, 0));
    })
    .unwrap();
    let told: Vec<_> =
        b.completions(4).iter().map(|it| (it.wr_id, it.status, it.opcode, it.imm, it.byte_len)).collect();
    let (recv, imm) = (WcOpcode::Recv, WcOpcode::RecvWriteWithImm);
    let expected = [
        (40, imm, Some(0xabcd_1234), 5000),
        (41, recv, None, 100),
        (42, imm, Some(9), 0),
        (43, recv, None, 0),
    ];
    assert_eq!(told, expected.map(|(id, opcode, imm, len)| (id, Status::Success, opcode, imm, len)));
    assert!(b.bytes(10_000..15_000) == a.bytes(0..5000) && b.bytes(1000..1100) == a.bytes(0..100));
    assert_eq!(ids(&a.completions(1)), [(4, Status::Success)]);
}

fn inline_bytes_are_taken_at_the_post(bench: &Bench) {
    let (a, b) = bench.pair(patient());
    let mut bytes = [5u8; 64];
    // SAFETY: the bytes are valid until the post, and the queue pair got 64.
    a.send(|chain| unsafe { chain.push_inline(1, Opcode::Write, SIGNALED, &bytes, b.remote(10)) }).unwrap();
    bytes.fill(6);
    assert_eq!(ids(&a.completions(1)), [(1, Status::Success)]);
    assert!(b.bytes(10..74).iter().all(|byte| *byte == 5));
    let many = vec![0; a.qp.cap().max_inline_bytes as usize + 1];
    // SAFETY: as above; being too many is what is tried.
    let post = a.send(|chain| unsafe { chain.push_inline(1, Opcode::Write, SIGNALED, &many, b.remote(10)) });
    assert_eq!(post.unwrap_err(), PostFailed { taken: 0, errno: libc::EINVAL });
}

/// One work request fails, what is behind it is flushed, and posts to the queue in error are too.
fn fails(bench: &Bench, status: Status, push: impl FnOnce(&End, &End, &mut SendChain)) -> End {
    let (a, b) = bench.pair(patient());
    a.recv(50, 0, 64);
    b.recv(60, 0, 16);
    a.send(|chain| {
        push(&a, &b, chain);
        chain.push(3, Opcode::Write, SILENT, a.local(0, 8), b.remote(0));
        chain.push(4, Opcode::Write, SIGNALED, a.local(0, 8), b.remote(0));
    })
    .unwrap();
    let done = ids(&a.completions(4));
    let sends: Vec<_> = done.iter().filter(|(id, _)| *id < 50).copied().collect();
    assert_eq!(sends, [(2, status), (3, Status::Flushed), (4, Status::Flushed)]);
    assert!(done.contains(&(50, Status::Flushed)));
    assert_eq!(a.qp.state(), Ok(QpState::Error));
    a.send(|chain| chain.push(9, Opcode::Write, SILENT, a.local(0, 8), b.remote(0))).unwrap();
    assert_eq!(ids(&a.completions(1)), [(9, Status::Flushed)]);
    b
}

fn what_the_peer_refuses_ends_both_sides(bench: &Bench) {
    let refused = |at: i64, key: u32| {
        fails(bench, Status::RemoteAccess, |a, b, chain| {
            let target = (b.addr(0).wrapping_add_signed(at), b.mr.rkey() ^ key);
            chain.push(2, Opcode::Write, SILENT, a.local(0, 8), target);
        })
    };
    for b in [refused(0, 0x5a), refused((1 << 16) - 7, 0), refused(-1, 0)] {
        assert_eq!(ids(&b.completions(1)), [(60, Status::Flushed)]);
        assert_eq!(b.qp.state(), Ok(QpState::Error));
    }
}

fn what_is_wrong_here_is_not_told_there(bench: &Bench) {
    let wrong_key = fails(bench, Status::LocalQpOperation, |a, b, chain| {
        chain.push(2, Opcode::Write, SIGNALED, (a.addr(0), a.mr.lkey() ^ 0x5a5a_0000, 8), b.remote(0));
    });
    let outside = fails(bench, Status::LocalProtection, |a, b, chain| {
        chain.push(2, Opcode::Write, SIGNALED, a.local((1 << 16) - 4, 8), b.remote(0));
    });
    for b in [wrong_key, outside] {
        assert!(b.nothing_completes());
        assert_eq!(b.qp.state(), Ok(QpState::ReadyToSend));
    }
}

fn a_send_that_is_too_long_fails_on_both_sides(bench: &Bench) {
    let b = fails(bench, Status::RemoteOperation, |a, _, chain| {
        chain.push(2, Opcode::Send, SIGNALED, a.local(0, 17), (0, 0));
    });
    assert_eq!(ids(&b.completions(1)), [(60, Status::LocalQpOperation)]);
    assert_eq!(b.qp.state(), Ok(QpState::Error));
}

fn retries_end(bench: &Bench) {
    let (a, b) = bench.pair(brief());
    a.send(|chain| chain.push(1, Opcode::Send, SIGNALED, a.local(0, 1), (0, 0))).unwrap();
    assert_eq!(ids(&a.completions(1)), [(1, Status::RnrRetryExceeded)]);
    assert_eq!(b.qp.state(), Ok(QpState::ReadyToSend));

    let (a, b) = bench.pair(brief());
    let target = b.remote(0);
    drop(b);
    a.send(|chain| chain.push(1, Opcode::Write, SIGNALED, a.local(0, 1), target)).unwrap();
    assert_eq!(ids(&a.completions(1)), [(1, Status::RetryExceeded)]);

    // The peer in error says nothing either, and hears nothing.
    let (a, b) = bench.pair(brief());
    b.qp.to_error().unwrap();
    a.send(|chain| chain.push(1, Opcode::Write, SIGNALED, a.local(0, 1), b.remote(0))).unwrap();
    assert_eq!(ids(&a.completions(1)), [(1, Status::RetryExceeded)]);
}

fn an_error_by_order_flushes_in_order(bench: &Bench) {
    let (a, b) = bench.pair(patient());
    for id in 0..5 {
        a.recv(100 + id, 0, 8);
    }
    a.qp.to_error().unwrap();
    for id in 0..5 {
        a.send(|chain| chain.push(id, Opcode::Read, SILENT, a.local(0, 8), b.remote(0))).unwrap();
    }
    let done = ids(&a.completions(10));
    assert!(done.iter().all(|(_, status)| *status == Status::Flushed), "{done:?}");
    let of =
        |recv: bool| done.iter().map(|(id, _)| *id).filter(|id| (*id >= 100) == recv).collect::<Vec<_>>();
    assert_eq!((of(false), of(true)), ((0..5).collect(), (100..105).collect()));
}

fn completions_outlive_their_queue_pair_in_a_shared_queue(bench: &Bench) {
    let (mut a, b) = bench.pair(patient());
    a.cq.arm().unwrap();
    a.send(|chain| chain.push(1, Opcode::Write, SIGNALED, a.local(0, 8), b.remote(0))).unwrap();
    eventually("the completion is announced", || a.channel.next_event().unwrap().is_some());
    a.qp = End::make_qp(&a.pd, &a.cq, patient());
    assert_eq!(ids(&a.completions(1)), [(1, Status::Success)]);
}

fn a_queue_tells_once_for_what_comes_after_it_was_armed(bench: &Bench) {
    let (a, b) = bench.pair(patient());
    let write =
        |id| a.send(|chain| chain.push(id, Opcode::Write, SIGNALED, a.local(0, 8), b.remote(0))).unwrap();
    assert_eq!(a.channel.next_event(), Ok(None));
    write(1);
    a.completions(1);
    assert_eq!(a.channel.next_event(), Ok(None), "it was not armed");
    a.cq.arm().unwrap();
    write(2);
    eventually("an event", || a.channel.next_event().unwrap() == Some(7));
    a.completions(1);
    write(3);
    a.completions(1);
    assert_eq!(a.channel.next_event(), Ok(None), "it was armed for one");
}

fn states_are_passed_in_order(bench: &Bench) {
    let [a, b] = [0, 1].map(|side: usize| End::new(&bench.library, &bench.devices[side], patient()));
    let errno = |result: Result<(), VerbsError>| result.err().map(|e| e.errno);
    let to = a.connection(&b, patient());
    assert_eq!(errno(a.qp.connect(&to)), Some(libc::EINVAL), "RESET to RTR");
    a.qp.to_init(1, 0, true, true).unwrap();
    a.recv(1, 0, 8);
    let post = a.send(|chain| chain.push(1, Opcode::Write, SIGNALED, a.local(0, 8), b.remote(0)));
    assert_eq!(post.unwrap_err(), PostFailed { taken: 0, errno: libc::EINVAL }, "a WRITE in INIT");
    a.qp.connect(&to).unwrap();
    assert_eq!(errno(a.qp.connect(&to)), Some(libc::EINVAL), "RTS to RTR");
    a.qp.to_error().unwrap();
    assert_eq!(ids(&a.completions(1)), [(1, Status::Flushed)]);
}

fn read_depths_of_zero_never_work(bench: &Bench) {
    let (a, b) = bench.pair(Options { responder_reads: 0, ..brief() });
    a.send(|chain| chain.push(1, Opcode::Read, SIGNALED, a.local(0, 1), b.remote(0))).unwrap();
    assert_eq!(ids(&a.completions(1)), [(1, Status::RemoteInvalidRequest)]);

    let (a, b) = bench.pair(Options { initiator_reads: 0, ..patient() });
    a.send(|chain| chain.push(1, Opcode::Read, SIGNALED, a.local(0, 1), b.remote(0))).unwrap();
    let (c, d) = bench.pair(patient());
    c.send(|chain| chain.push(1, Opcode::Write, SIGNALED, c.local(0, 8), d.remote(0))).unwrap();
    c.completions(1);
    assert!(a.nothing_completes());
}

fn memory_is_checked_when_it_is_registered(bench: &Bench) {
    let a = End::new(&bench.library, &bench.devices[0], patient());
    let errno = |addr, len| Mr::register(&a.pd, addr, len, ALL).err().map(|e| e.errno);
    assert_eq!(errno(4096, 4096), Some(libc::EFAULT), "nothing is mapped there");
    assert_eq!(errno(a.addr(3), 5000), None);
    let relaxed = Access { relaxed_ordering: true, ..ALL };
    Mr::register(&a.pd, a.addr(0), 4096, relaxed).expect("optional flags");
}

fn devices_ports_and_gids_are_told(bench: &Bench) {
    for name in &bench.devices {
        let context = bench.library.open_device(name).unwrap();
        assert!(context.info().is_infiniband && !context.info().is_iwarp && context.has_immediate());
        let attr = context.query_device().unwrap();
        assert!(attr.ports == 1 && attr.max_qp > 0 && attr.max_cqe > 0 && attr.max_qp_wr > 0, "{attr:?}");
        let port = context.query_port(1).unwrap();
        assert_eq!((port.state, port.link_layer, port.lid), (PortState::Active, LinkLayer::Ethernet, 0));
        let gids: Vec<GidEntry> =
            (0..port.gid_table_len).filter_map(|index| context.query_gid(1, index).unwrap()).collect();
        assert!(gids.iter().all(|gid| gid.kind == GidType::RoceV2 && gid.ndev_ifindex > 0), "{gids:?}");
        assert_eq!(gids[0].gid[..2], [0xfe, 0x80], "link-local comes first");
        assert_eq!((gids[1].index, &gids[1].gid[10..15]), (1, &[0xff, 0xff, 10, 77, 0][..]));
        assert_eq!(context.query_pkey(1, 0), Ok(0xffff));
        assert_eq!(context.query_port(2).err().map(|e| e.errno), Some(libc::EINVAL));
        assert_eq!(context.next_event(), Ok(None));
    }
    assert_eq!(bench.library.open_device("none").err().map(|e| e.errno), Some(libc::ENODEV));
}

macro_rules! on_both {
    ($($name:ident),* $(,)?) => {
        mod model {
            $(#[test] fn $name() { super::$name(&super::Bench::model()); })*
        }
        mod real {
            $(#[test] #[ignore = "needs RDMA devices: cargo xtask test --only guest"] fn $name() { super::$name(&super::Bench::real()); })*
        }
    };
}

on_both! {
    data_arrives_exactly,
    immediates_and_sends_consume_recvs_in_order,
    inline_bytes_are_taken_at_the_post,
    what_the_peer_refuses_ends_both_sides,
    what_is_wrong_here_is_not_told_there,
    a_send_that_is_too_long_fails_on_both_sides,
    retries_end,
    an_error_by_order_flushes_in_order,
    completions_outlive_their_queue_pair_in_a_shared_queue,
    a_queue_tells_once_for_what_comes_after_it_was_armed,
    states_are_passed_in_order,
    read_depths_of_zero_never_work,
    memory_is_checked_when_it_is_registered,
    devices_ports_and_gids_are_told,
}

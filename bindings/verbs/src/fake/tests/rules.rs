//! What is refused at the call, and what a correct program never does.

use super::ends::*;
use crate::fake::{DeviceConfig, Fake, FakeConfig, FakeGid, Live, PortConfig};
use crate::*;

fn errno<T>(result: Result<T, VerbsError>) -> Option<i32> {
    result.err().map(|e| e.errno)
}

#[test]
fn the_states_of_a_queue_pair_are_passed_in_order() {
    let fake = fake();
    let library = fake.library();
    let options = Options::default();
    let (a, b) = (End::new(&library, "fake0", options), End::new(&library, "fake1", options));
    let to = a.connection(&b, options);
    assert_eq!(errno(a.qp.connect(&to)), Some(libc::EINVAL), "RESET is not INIT");
    let mut recvs = RecvChain::with_capacity(1);
    recvs.push(1, a.local(0, 8));
    // SAFETY: the memory outlives the queue pair's work.
    assert_eq!(unsafe { a.qp.post_recv(&mut recvs) }.unwrap_err().errno, libc::EINVAL, "a RECV in RESET");
    a.qp.to_init(1, 0, true, true).unwrap();
    a.recv(1, 0, 8);
    assert_eq!(errno(a.qp.to_init(1, 0, true, true)), Some(libc::EINVAL));
    let push = |chain: &mut SendChain| chain.push(1, Opcode::Write, SIGNALED, a.local(0, 8), b.remote(0));
    assert_eq!(a.send(push).unwrap_err(), PostFailed { taken: 0, errno: libc::EINVAL });
    a.qp.connect(&to).unwrap();
    assert_eq!(errno(a.qp.connect(&to)), Some(libc::EINVAL));
    assert_eq!(errno(a.qp.to_init(2, 0, true, true)), Some(libc::EINVAL));
}

#[test]
fn attributes_that_the_device_cannot_are_refused() {
    let fake = fake();
    let library = fake.library();
    let options = Options::default();
    let spoil: [fn(&mut Connection); 7] = [
        |to| to.sgid_index = 2,
        |to| to.global = false,
        |to| to.responder_reads = 17,
        |to| to.initiator_reads = 17,
        |to| to.rq_psn = 1 << 24,
        |to| to.dgid = [0; 16],
        |to| to.timeout = 32,
    ];
    for spoil in spoil {
        let (a, b) = (End::new(&library, "fake0", options), End::new(&library, "fake1", options));
        a.qp.to_init(1, 0, true, true).unwrap();
        let mut to = a.connection(&b, options);
        spoil(&mut to);
        assert_eq!(errno(a.qp.connect(&to)), Some(libc::EINVAL));
    }
    let a = End::new(&library, "fake0", options);
    assert_eq!(errno(a.qp.to_init(2, 0, true, true)), Some(libc::EINVAL), "a port that there is not");
    assert_eq!(errno(a.qp.to_init(1, 1, true, true)), Some(libc::EINVAL), "a pkey that there is not");
}

#[test]
fn queue_pairs_are_made_within_limits_and_say_what_they_got() {
    let mut config = FakeConfig::default();
    config.devices[0].round_send_queue = true;
    config.devices[0].max_qp_wr = 100;
    config.devices[0].max_qp = 3;
    config.devices[1].max_inline_bytes = 0;
    config.devices[1].refuse_inline = false;
    let fake = Fake::new(config);
    let (a, b) = pair(&fake, Options::default());
    assert_eq!((a.qp.cap().max_send_wr, a.qp.cap().max_inline_bytes), (63, 64));
    assert_eq!((b.qp.cap().max_send_wr, b.qp.cap().max_inline_bytes), (32, 0));
    let cap = a.qp.cap();
    let make = |cap| Qp::new(&a.pd, &QpConfig { send_cq: &a.cq, recv_cq: &a.cq, cap });
    assert_eq!(errno(make(QpCap { max_send_wr: 101, ..cap })), Some(libc::EINVAL));
    assert_eq!(errno(make(QpCap { max_send_sge: 17, ..cap })), Some(libc::EINVAL));
    assert_eq!(errno(make(QpCap { max_inline_bytes: 221, ..cap })), Some(libc::EINVAL));
    let _held = (make(cap).unwrap(), make(cap).unwrap());
    assert_eq!(errno(make(cap)), Some(libc::ENOMEM));
    assert_eq!(errno(Cq::new(&a.channel, 40_000, 0)), Some(libc::EINVAL));
}

#[test]
fn slots_come_free_when_their_completion_is_polled() {
    let fake = fake();
    let (a, b) = pair(&fake, Options { depth: 4, ..Options::default() });
    let push = |chain: &mut SendChain| {
        for id in 0..5 {
            let flags = if id == 3 { SIGNALED } else { SILENT };
            chain.push(id, Opcode::Write, flags, a.local(0, 8), b.remote(0));
        }
    };
    assert_eq!(a.send(push).unwrap_err(), PostFailed { taken: 4, errno: libc::ENOMEM });
    eventually("the four are executed", || {
        let mut buffer = WcBuffer::new(1);
        a.cq.poll(&mut buffer, 1).unwrap().len() == 1
    });
    assert_eq!(a.send(push).unwrap_err(), PostFailed { taken: 4, errno: libc::ENOMEM });
}

#[test]
fn posts_fail_where_ordered_and_name_the_culprit() {
    let fake = fake();
    let (a, b) = pair(&fake, Options::default());
    fake.device("fake0").fail_post_after(2, libc::EIO);
    let push = |chain: &mut SendChain| {
        for id in 0..4 {
            chain.push(id, Opcode::Write, SIGNALED, a.local(0, 8), b.remote(0));
        }
    };
    assert_eq!(a.send(push).unwrap_err(), PostFailed { taken: 2, errno: libc::EIO });
    assert_eq!(ids(&a.completions(2)), [(0, Status::Success), (1, Status::Success)]);
    a.send(push).unwrap();
    a.completions(4);
}

#[test]
fn polling_fails_where_ordered() {
    let fake = fake();
    let (a, _b) = pair(&fake, Options::default());
    fake.device("fake0").fail_polls(Some(-libc::EIO));
    assert_eq!(errno(a.cq.poll(&mut WcBuffer::new(1), 1).map(|_| ())), Some(libc::EIO));
    fake.device("fake0").fail_polls(None);
    assert!(a.nothing_completes());
}

#[test]
fn inline_past_the_limit_and_immediates_without_support_are_refused_at_the_post() {
    let mut config = FakeConfig::default();
    config.devices[0].immediate = false;
    let fake = Fake::new(config);
    let (a, b) = pair(&fake, Options::default());
    let bytes = [0; 65];
    // SAFETY: the bytes are valid until the post; being too many is what is tried.
    let post = a.send(|chain| unsafe { chain.push_inline(1, Opcode::Write, SIGNALED, &bytes, b.remote(0)) });
    assert_eq!(post.unwrap_err().errno, libc::EINVAL);
    let post = a.send(|chain| chain.push(1, Opcode::WriteWithImm(1), SIGNALED, (0, 0, 0), (0, 0)));
    assert_eq!(post.unwrap_err().errno, libc::EINVAL);
    assert!(!a.context.has_immediate() && b.context.has_immediate());
}

#[test]
fn registrations_are_checked_and_counted() {
    let mut config = FakeConfig::default();
    config.devices[0].max_mr_bytes = 1 << 20;
    let fake = Fake::new(config);
    let a = End::new(&fake.library(), "fake0", Options::default());
    let register = |addr, len, access| Mr::register(&a.pd, addr, len, access);
    assert_eq!(errno(register(a.addr(0), (1 << 20) + 1, ALL)), Some(libc::EINVAL));
    assert_eq!(errno(register(4096, 4096, ALL)), Some(libc::EFAULT), "nothing is mapped there");
    assert_eq!(errno(register(u64::MAX - 10, 4096, ALL)), Some(libc::EINVAL));
    let relaxed = Access { relaxed_ordering: true, ..ALL };
    register(a.addr(0), 4096, relaxed).unwrap();
    fake.device("fake0").set_memlock(Some(1 << 17));
    assert_eq!(errno(register(a.addr(0), 1 << 16, ALL)), Some(libc::ENOMEM));
    fake.device("fake0").set_memlock(None);
    let mrs = [register(a.addr(0), 10, ALL).unwrap(), register(a.addr(5), 10, ALL).unwrap()];
    assert_ne!(mrs[0].rkey(), mrs[1].rkey());
    assert_eq!(fake.device("fake0").live().mrs, 3);
    drop((mrs, a));
    assert_eq!(fake.device("fake0").live(), Live::default());
}

#[test]
fn old_libraries_and_old_contexts_answer_the_same() {
    let old = FakeConfig { extended_context: false, old_library: true, ..FakeConfig::default() };
    for config in [FakeConfig::default(), old] {
        let fake = Fake::new(config);
        let context = fake.library().open_device("fake1").unwrap();
        let port = context.query_port(1).unwrap();
        assert_eq!(
            (port.state, port.link_layer, port.active_mtu_bytes, port.max_msg_bytes, port.gid_table_len),
            (PortState::Active, LinkLayer::Ethernet, 4096, 1 << 30, 2)
        );
        assert_eq!(errno(context.query_port(2)), Some(libc::EINVAL));
        let gid = context.query_gid(1, 1).unwrap().unwrap();
        assert_eq!((gid.gid, gid.kind), (FakeGid::ipv4([10, 77, 0, 2]).gid, GidType::RoceV2));
        assert_eq!(context.query_pkey(1, 0), Ok(0xffff));
        let attr = context.query_device().unwrap();
        assert_eq!((attr.max_qp_wr, attr.max_qp_rd_atom, attr.ports), (16384, 16, 1));
    }
}

#[test]
fn gid_tables_have_types_holes_and_zeroes() {
    let gids =
        vec![FakeGid::link_local(1), FakeGid::zero(), FakeGid::ipv4([10, 0, 0, 1]).of_kind(GidType::RoceV1)];
    let mut port = PortConfig::roce(gids);
    port.gids.insert(1, None);
    let device = DeviceConfig { ports: vec![port], ..DeviceConfig::new("fake0", 1) };
    let fake = Fake::new(FakeConfig { devices: vec![device], ..FakeConfig::default() });
    let context = fake.library().open_device("fake0").unwrap();
    let kinds: Vec<Option<GidType>> =
        (0..4).map(|index| context.query_gid(1, index).unwrap().map(|entry| entry.kind)).collect();
    // An entry of zeroes is as empty as none.
    assert_eq!(kinds, [Some(GidType::RoceV2), None, None, Some(GidType::RoceV1)]);
    assert_eq!(errno(context.query_gid(1, 4)), Some(libc::EINVAL));
}

#[test]
fn elements_of_length_zero_are_a_violation() {
    let fake = fake();
    let (a, b) = pair(&fake, Options::default());
    let mut sge = sys::ibv_sge { addr: a.addr(0), length: 0, lkey: a.mr.lkey() };
    // SAFETY: all zero bytes are valid for a work request.
    let mut wr: sys::ibv_send_wr = unsafe { std::mem::zeroed() };
    (wr.wr_id, wr.num_sge, wr.sg_list) = (1, 1, &mut sge);
    (wr.opcode, wr.send_flags) = (sys::ibv_wr_opcode::IBV_WR_RDMA_WRITE, 2);
    let (remote_addr, rkey) = b.remote(0);
    wr.wr.rdma = sys::rdma_t { remote_addr, rkey };
    // SAFETY: a valid list of one work request on memory that outlives it.
    assert_eq!(unsafe { a.qp.post_raw(&mut wr) }, 0);
    assert_eq!(ids(&a.completions(1)), [(1, Status::LocalLength)]);
    let violations = fake.take_violations();
    assert!(violations.len() == 1 && violations[0].contains("length 0"), "{violations:?}");
}

#[test]
#[should_panic(expected = "objects alive")]
fn closing_a_device_with_objects_alive_fails_the_test() {
    let fake = fake();
    let context = fake.library().open_device("fake0").unwrap();
    std::mem::forget(Pd::new(&context).unwrap());
    // The domain's share of the context is forgotten with it.
    // SAFETY: the only share that is used.
    unsafe { std::sync::Arc::decrement_strong_count(std::sync::Arc::as_ptr(&context)) };
    drop(context);
    drop(fake);
}

//! What fails, how, and what happens to the rest.

use super::ends::*;
use crate::fake::{Fake, FakeConfig};
use crate::*;

/// One work request fails with `status`; the one before succeeds, the ones behind are flushed.
fn fails(status: Status, push: impl FnOnce(&End, &End, &mut SendChain)) -> (End, End, Fake) {
    let fake = fake();
    let (a, b) = pair(&fake, Options::default());
    a.recv(50, 0, 64);
    b.recv(60, 0, 16);
    a.send(|chain| {
        chain.push(1, Opcode::Read, SIGNALED, a.local(0, 64), b.remote(0));
        push(&a, &b, chain);
        chain.push(3, Opcode::Write, SILENT, a.local(0, 8), b.remote(0));
        chain.push(4, Opcode::Write, SIGNALED, a.local(0, 8), b.remote(0));
    })
    .unwrap();
    let done = ids(&a.completions(5));
    let sends: Vec<_> = done.iter().filter(|(id, _)| *id < 50).copied().collect();
    let flushed = Status::Flushed;
    assert_eq!(sends, [(1, Status::Success), (2, status), (3, flushed), (4, flushed)]);
    assert!(done.contains(&(50, flushed)));
    assert_eq!(a.qp.state(), Ok(QpState::Error));
    // Posts to a queue in error are taken and flushed.
    a.send(|chain| chain.push(9, Opcode::Write, SILENT, a.local(0, 8), b.remote(0))).unwrap();
    assert_eq!(ids(&a.completions(1)), [(9, Status::Flushed)]);
    (a, b, fake)
}

fn peer_is_in_error(b: &End, expected: Status) {
    assert_eq!(ids(&b.completions(1)), [(60, expected)]);
    assert_eq!(b.qp.state(), Ok(QpState::Error));
}

#[test]
fn a_wrong_remote_key_is_refused_and_ends_both_sides() {
    let (_a, b, _fake) = fails(Status::RemoteAccess, |a, b, chain| {
        chain.push(2, Opcode::Write, SILENT, a.local(0, 8), (b.addr(0), b.mr.rkey() ^ 0x5a5a));
    });
    peer_is_in_error(&b, Status::Flushed);
}

#[test]
fn remote_addresses_outside_the_region_are_refused() {
    for at in [(1 << 16) - 7, -1, i64::MAX] {
        let (_a, b, _fake) = fails(Status::RemoteAccess, |a, b, chain| {
            let addr = b.addr(0).wrapping_add_signed(at);
            chain.push(2, Opcode::Write, SIGNALED, a.local(0, 8), (addr, b.mr.rkey()));
        });
        peer_is_in_error(&b, Status::Flushed);
    }
}

#[test]
fn a_local_key_is_checked_and_the_peer_hears_nothing() {
    let (_a, b, _fake) = fails(Status::LocalProtection, |a, b, chain| {
        chain.push(2, Opcode::Write, SIGNALED, (a.addr(0), 1, 8), b.remote(0));
    });
    assert_eq!(b.qp.state(), Ok(QpState::ReadyToSend));
    assert!(b.nothing_completes());
    let (_a, _b, _fake) = fails(Status::LocalProtection, |a, b, chain| {
        chain.push(2, Opcode::Read, SIGNALED, a.local((1 << 16) - 4, 8), b.remote(0));
    });
}

#[test]
fn rights_of_regions_and_queue_pairs_are_checked() {
    let fake = fake();
    let rights = [
        (Access { remote_write: false, ..ALL }, Opcode::Write, Status::RemoteAccess),
        (Access { remote_read: false, ..ALL }, Opcode::Read, Status::RemoteAccess),
        (Access { remote_read: false, ..ALL }, Opcode::Write, Status::Success),
    ];
    for (access, op, status) in rights {
        let (a, b) = pair(&fake, Options::default());
        let mr = Mr::register(&b.pd, b.addr(0), 64, access).unwrap();
        a.send(|chain| chain.push(1, op, SIGNALED, a.local(0, 8), (b.addr(0), mr.rkey()))).unwrap();
        assert_eq!(ids(&a.completions(1)), [(1, status)], "{access:?} {op:?}");
    }
    // Of another domain.
    let (a, b) = pair(&fake, Options::default());
    let mr = Mr::register(&Pd::new(&b.context).unwrap(), b.addr(0), 64, ALL).unwrap();
    a.send(|chain| chain.push(1, Opcode::Write, SIGNALED, a.local(0, 8), (b.addr(0), mr.rkey()))).unwrap();
    assert_eq!(ids(&a.completions(1)), [(1, Status::RemoteAccess)]);
    // Of a region that was withdrawn.
    let (a, b) = pair(&fake, Options::default());
    let mr = Mr::register(&b.pd, b.addr(0), 64, ALL).unwrap();
    let key = mr.rkey();
    mr.deregister().map_err(|(_, e)| e).unwrap();
    a.send(|chain| chain.push(1, Opcode::Write, SIGNALED, a.local(0, 8), (b.addr(0), key))).unwrap();
    assert_eq!(ids(&a.completions(1)), [(1, Status::RemoteAccess)]);
}

#[test]
fn a_send_that_is_too_long_is_refused() {
    let (_a, b, _fake) = fails(Status::RemoteInvalidRequest, |a, _, chain| {
        chain.push(2, Opcode::Send, SIGNALED, a.local(0, 17), (0, 0));
    });
    peer_is_in_error(&b, Status::LocalLength);
}

#[test]
fn a_message_past_the_port_limit_is_a_local_error() {
    let mut config = FakeConfig::default();
    config.devices[0].ports[0].max_msg_bytes = 1 << 15;
    let fake = Fake::new(config);
    let (a, b) = pair(&fake, Options::default());
    a.send(|chain| {
        chain.push(1, Opcode::Write, SIGNALED, a.local(0, 1 << 15), b.remote(0));
        chain.push(2, Opcode::Write, SIGNALED, a.local(0, (1 << 15) + 1), b.remote(0));
    })
    .unwrap();
    assert_eq!(ids(&a.completions(2)), [(1, Status::Success), (2, Status::LocalLength)]);
}

#[test]
fn retries_end_where_nobody_has_a_recv_or_nobody_answers() {
    let fake = fake();
    let (a, b) = pair(&fake, Options::default());
    a.send(|chain| chain.push(1, Opcode::Send, SIGNALED, a.local(0, 1), (0, 0))).unwrap();
    assert_eq!(ids(&a.completions(1)), [(1, Status::RnrRetryExceeded)]);
    assert_eq!(b.qp.state(), Ok(QpState::ReadyToSend));

    let (a, b) = pair(&fake, Options { rnr_retry: 7, ..Options::default() });
    a.send(|chain| chain.push(1, Opcode::WriteWithImm(1), SIGNALED, a.local(0, 1), b.remote(0))).unwrap();
    b.recv(2, 0, 0);
    assert_eq!(ids(&a.completions(1)), [(1, Status::Success)]);

    let (a, b) = pair(&fake, Options::default());
    let target = b.remote(0);
    drop(b);
    a.send(|chain| chain.push(1, Opcode::Write, SIGNALED, a.local(0, 1), target)).unwrap();
    assert_eq!(ids(&a.completions(1)), [(1, Status::RetryExceeded)]);
}

#[test]
fn a_connection_whose_ends_disagree_is_silence() {
    let fake = fake();
    let library = fake.library();
    let options = Options { timeout: 1, ..Options::default() };
    let spoil: [fn(&mut Connection); 3] =
        [|to| to.sq_psn += 1, |to| to.dest_qp_num += 100, |to| to.dgid[15] += 1];
    for spoil in spoil {
        let (a, b) = (End::new(&library, "fake0", options), End::new(&library, "fake1", options));
        for end in [&a, &b] {
            end.qp.to_init(1, 0, true, true).unwrap();
        }
        let mut to = a.connection(&b, options);
        spoil(&mut to);
        a.qp.connect(&to).unwrap();
        b.qp.connect(&b.connection(&a, options)).unwrap();
        a.send(|chain| chain.push(1, Opcode::Write, SIGNALED, a.local(0, 1), b.remote(0))).unwrap();
        assert_eq!(ids(&a.completions(1)), [(1, Status::RetryExceeded)]);
    }
}

#[test]
fn an_error_by_order_flushes_both_queues_in_order() {
    let fake = fake();
    let (a, b) = pair(&fake, Options::default());
    fake.hold_reads(true);
    for id in 0..5 {
        a.recv(100 + id, 0, 8);
        a.send(|chain| chain.push(id, Opcode::Read, SILENT, a.local(0, 8), b.remote(0))).unwrap();
    }
    a.qp.to_error().unwrap();
    let done = ids(&a.completions(10));
    assert!(done.iter().all(|(_, status)| *status == Status::Flushed));
    let of =
        |recv: bool| done.iter().map(|(id, _)| *id).filter(|id| (*id >= 100) == recv).collect::<Vec<_>>();
    assert_eq!((of(false), of(true)), ((0..5).collect(), (100..105).collect()));
}

#[test]
fn completions_of_a_destroyed_queue_pair_stay_in_the_shared_queue() {
    let fake = fake();
    let (mut a, b) = pair(&fake, Options::default());
    a.cq.arm().unwrap();
    a.send(|chain| chain.push(1, Opcode::Write, SIGNALED, a.local(0, 8), b.remote(0))).unwrap();
    eventually("the completion is announced", || a.channel.next_event().unwrap().is_some());
    a.qp = End::make_qp(&a.pd, &a.cq, Options::default());
    assert_eq!(ids(&a.completions(1)), [(1, Status::Success)]);
}

#[test]
fn a_lost_read_depth_is_an_error_or_silence() {
    let fake = fake();
    let (a, b) = pair(&fake, Options { responder_reads: 0, ..Options::default() });
    a.send(|chain| chain.push(1, Opcode::Read, SIGNALED, a.local(0, 1), b.remote(0))).unwrap();
    assert_eq!(ids(&a.completions(1)), [(1, Status::RemoteInvalidRequest)]);

    // More outstanding READs than the peer answers at a time.
    let (a, b) = pair(&fake, Options { initiator_reads: 4, responder_reads: 2, ..Options::default() });
    fake.hold_reads(true);
    a.send(|chain| {
        for id in 1..4 {
            chain.push(id, Opcode::Read, SIGNALED, a.local(0, 1), b.remote(0));
        }
    })
    .unwrap();
    eventually("the third is refused", || b.qp.state() == Ok(QpState::Error));
    fake.hold_reads(false);
    let ok = Status::Success;
    assert_eq!(ids(&a.completions(3)), [(1, ok), (2, ok), (3, Status::RemoteInvalidRequest)]);

    let (a, b) = pair(&fake, Options { initiator_reads: 0, ..Options::default() });
    a.send(|chain| chain.push(1, Opcode::Read, SIGNALED, a.local(0, 1), b.remote(0))).unwrap();
    let (c, d) = pair(&fake, Options::default());
    c.send(|chain| chain.push(1, Opcode::Write, SIGNALED, c.local(0, 8), d.remote(0))).unwrap();
    c.completions(1);
    assert!(a.nothing_completes());
}

//! What is told through descriptors.

use super::ends::*;
use crate::fake::{FakeConfig, FakeGid};
use crate::*;
use std::os::fd::{AsRawFd, BorrowedFd};

fn wait_readable(fd: BorrowedFd<'_>) {
    let mut poll = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one valid element.
    let ready = unsafe { libc::poll(&mut poll, 1, PATIENCE.as_millis() as i32) };
    assert_eq!(ready, 1, "the descriptor became readable");
}

fn next_event(end: &End) -> AsyncEvent {
    wait_readable(end.context.async_fd());
    end.context.next_event().unwrap().expect("an event behind a readable descriptor")
}

#[test]
fn an_armed_queue_tells_its_channel_once() {
    let fake = fake();
    let (a, b) = pair(&fake, Options::default());
    assert_eq!(a.channel.next_event(), Ok(None));
    a.cq.arm().unwrap();
    a.send(|chain| {
        chain.push(1, Opcode::Write, SIGNALED, a.local(0, 8), b.remote(0));
        chain.push(2, Opcode::Write, SIGNALED, a.local(0, 8), b.remote(0));
    })
    .unwrap();
    wait_readable(a.channel.fd());
    assert_eq!(a.channel.next_event(), Ok(Some(7)));
    a.completions(2);
    assert_eq!(a.channel.next_event(), Ok(None));
    // Armed while something waits: no event for that, one for the next.
    a.send(|chain| chain.push(3, Opcode::Write, SIGNALED, a.local(0, 8), b.remote(0))).unwrap();
    a.completions(1);
    a.cq.arm().unwrap();
    assert_eq!(a.channel.next_event(), Ok(None));
}

#[test]
fn a_downed_port_is_told_and_ends_connections_after_retries() {
    let fake = fake();
    let (a, b) = pair(&fake, Options::default());
    fake.device("fake1").set_port(1, false);
    assert_eq!(next_event(&b), AsyncEvent::PortErr(1));
    assert_eq!(a.context.next_event(), Ok(None));
    assert_eq!(b.context.query_port(1).unwrap().state, PortState::Down);
    a.send(|chain| chain.push(1, Opcode::Write, SIGNALED, a.local(0, 8), b.remote(0))).unwrap();
    assert_eq!(ids(&a.completions(1)), [(1, Status::RetryExceeded)]);
    fake.device("fake1").set_port(1, true);
    assert_eq!(next_event(&b), AsyncEvent::PortActive(1));
}

#[test]
fn a_port_that_comes_back_in_time_is_not_noticed() {
    let fake = fake();
    let (a, b) = pair(&fake, Options { timeout: 14, retry_cnt: 7, ..Options::default() });
    fake.device("fake1").set_port(1, false);
    a.send(|chain| chain.push(1, Opcode::Write, SIGNALED, a.local(0, 8), b.remote(0))).unwrap();
    fake.device("fake1").set_port(1, true);
    assert_eq!(ids(&a.completions(1)), [(1, Status::Success)]);
}

#[test]
fn soft_devices_report_a_downed_link_at_once() {
    let fake = crate::fake::Fake::new(FakeConfig { soft_statuses: true, ..FakeConfig::default() });
    let (a, b) = pair(&fake, Options { timeout: 0, ..Options::default() });
    fake.device("fake0").set_port(1, false);
    a.send(|chain| chain.push(1, Opcode::Write, SIGNALED, a.local(0, 8), b.remote(0))).unwrap();
    assert_eq!(ids(&a.completions(1)), [(1, Status::LocalQpOperation)]);
}

#[test]
fn a_changed_gid_is_told_and_breaks_its_connections() {
    let fake = fake();
    let (a, b) = pair(&fake, Options::default());
    fake.device("fake0").set_gid(1, 1, Some(FakeGid::ipv4([10, 77, 0, 9])));
    assert_eq!(next_event(&a), AsyncEvent::GidChange(1));
    a.send(|chain| chain.push(1, Opcode::Write, SIGNALED, a.local(0, 8), b.remote(0))).unwrap();
    assert_eq!(ids(&a.completions(1)), [(1, Status::RetryExceeded)]);
}

#[test]
fn a_lost_device_flushes_tells_and_makes_nothing_new() {
    let fake = fake();
    let (a, b) = pair(&fake, Options::default());
    a.recv(5, 0, 8);
    fake.device("fake0").fail();
    assert_eq!(next_event(&a), AsyncEvent::DeviceFatal);
    assert_eq!(ids(&a.completions(1)), [(5, Status::Flushed)]);
    assert_eq!(Pd::new(&a.context).map(|_| ()).map_err(|e| e.errno), Err(libc::EIO));
    b.send(|chain| chain.push(1, Opcode::Write, SIGNALED, b.local(0, 8), a.remote(0))).unwrap();
    assert_eq!(ids(&b.completions(1)), [(1, Status::RetryExceeded)]);
    assert_eq!(fake.library().devices().unwrap().len(), 1);
}

#[test]
fn a_refusal_is_told_at_the_peer_that_refuses() {
    let fake = fake();
    let (a, b) = pair(&fake, Options::default());
    a.send(|chain| chain.push(1, Opcode::Write, SIGNALED, a.local(0, 8), (b.addr(0), 3))).unwrap();
    assert_eq!(next_event(&b), AsyncEvent::QpErr(b.qp.number()));
    assert_eq!(ids(&a.completions(1)), [(1, Status::RemoteAccess)]);
    // An event that nobody takes goes with its queue pair.
    let (a, b) = pair(&fake, Options::default());
    a.send(|chain| chain.push(1, Opcode::Write, SIGNALED, a.local(0, 8), (b.addr(0), 3))).unwrap();
    assert_eq!(ids(&a.completions(1)), [(1, Status::RemoteAccess)]);
    let End { qp, context, .. } = b;
    drop(qp);
    assert_eq!(context.next_event(), Ok(None));
}

#[test]
fn a_completion_queue_that_overruns_is_told() {
    let fake = fake();
    let (a, b) = pair(&fake, Options { cqe: 2, ..Options::default() });
    a.send(|chain| {
        for id in 0..4 {
            chain.push(id, Opcode::Write, SIGNALED, a.local(0, 8), b.remote(0));
        }
    })
    .unwrap();
    assert_eq!(next_event(&a), AsyncEvent::CqErr(7));
    assert_eq!(ids(&a.completions(2)), [(0, Status::Success), (1, Status::Success)]);
    // What comes later is lost, also when there is room again.
    a.send(|chain| chain.push(9, Opcode::Write, SIGNALED, a.local(0, 8), b.remote(8))).unwrap();
    b.recv(1, 0, 0);
    a.send(|chain| chain.push(10, Opcode::WriteWithImm(1), SIGNALED, (0, 0, 0), (0, 0))).unwrap();
    b.completions(1);
    assert!(a.nothing_completes());
}

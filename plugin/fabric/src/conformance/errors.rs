//! What is refused, by whom, and what it leaves alone.

use super::rig::*;
use crate::*;
use serde_json::json;
use std::time::{Duration, Instant};

const LEN: usize = 4096;

/// Posts a good write, one that `spoil` made bad, and more behind it. The good one lands, the bad one completes with `status`
/// although nobody asked for a completion, everything behind it is flushed in order, and no other byte changes.
fn refuse(rig: &Rig, op: Op, access: Access, status: WcStatus, spoil: impl Fn(&Rig, &Block, &mut Template)) {
    let [a, _] = rig.pair();
    let local = rig.block(0, LEN);
    let target = rig.block_for(1, LEN, access);
    let good_target = rig.block(1, 64);
    rig.fill(&local, 1);
    let mut bad = template(op, &local, 100, &target, 200, 300);
    spoil(rig, &target, &mut bad);
    let good = template(Op::Write, &local, 0, &good_target, 0, 64);
    let later = template(Op::Write, &local, 64, &good_target, 0, 64);
    let mut sender = Sender::new(rig, 0, a);
    // Never refused at post: only the owner of the memory can know. What is posted behind the error may be refused at once.
    sender.post(&[good, bad, later, later], None, None, false);
    let behind = (0..3).take_while(|_| sender.try_post(&[later], None, None, true).is_ok()).count();
    let posted = 4 + behind;
    let sends = rig.wait_sends(0, a, posted - 1);
    assert_eq!((sends[0].status, sends[0].seq), (status, 1), "{sends:?}");
    for (i, c) in sends.iter().enumerate().skip(1) {
        assert_eq!((c.status, c.seq), (WcStatus::Flushed, 1 + i as u64), "{sends:?}");
    }
    rig.settle();
    assert_eq!(rig.inbox().sends(0, a).len(), posted - 1);
    // A READ finds its local fault only when the answer comes; what was sent behind it may have been executed by then, and is
    // reported as flushed all the same.
    let source = pattern(1, LEN);
    let overtaken = op == Op::Read && status == LOCAL && rig.bytes(&good_target) == source[64..128];
    rig.expect(&good_target, if overtaken { &source[64..128] } else { &source[..64] });
    rig.expect(&target, &Rig::untouched(LEN));
    rig.expect(&local, &pattern(1, LEN));
}

const REMOTE: WcStatus = WcStatus::RemoteAccess;
const LOCAL: WcStatus = WcStatus::LocalAccess;

pub fn a_wrong_remote_key_is_refused(rig: &Rig) {
    for op in [Op::Write, Op::Read] {
        refuse(rig, op, Access::Both, REMOTE, |_, _, bad| bad.remote_key ^= 1 << 17);
        refuse(rig, op, Access::Both, REMOTE, |_, _, bad| bad.remote_key = 0);
    }
}

pub fn a_deregistered_remote_key_is_refused(rig: &Rig) {
    for op in [Op::Write, Op::Read] {
        refuse(rig, op, Access::Both, REMOTE, |rig, target, _| {
            rig.deregister(target);
            // A new registration of the same memory does not bring the old key back.
            rig.register(1, target.addr, target.len, Access::Both);
        });
    }
}

pub fn a_write_past_the_end_of_the_region_is_refused(rig: &Rig) {
    refuse(rig, Op::Write, Access::Both, REMOTE, |_, target, bad| {
        bad.remote_addr = target.addr + target.len as u64 - u64::from(bad.len_bytes) + 1;
    });
}

pub fn a_write_before_the_start_of_the_region_is_refused(rig: &Rig) {
    refuse(rig, Op::Write, Access::Both, REMOTE, |_, target, bad| bad.remote_addr = target.addr - 1);
}

pub fn a_read_past_the_end_of_the_region_is_refused(rig: &Rig) {
    refuse(rig, Op::Read, Access::Both, REMOTE, |_, target, bad| {
        bad.remote_addr = target.addr + target.len as u64 - u64::from(bad.len_bytes) + 1;
    });
}

pub fn an_address_that_overflows_is_refused(rig: &Rig) {
    for op in [Op::Write, Op::Read] {
        refuse(rig, op, Access::Both, REMOTE, |_, _, bad| bad.remote_addr = u64::MAX - 50);
        refuse(rig, op, Access::Both, LOCAL, |_, _, bad| bad.local_addr = u64::MAX - 50);
    }
}

pub fn a_region_that_peers_may_only_read_is_not_written(rig: &Rig) {
    refuse(rig, Op::Write, Access::ReadOnly, REMOTE, |_, _, _| {});
}

pub fn a_region_that_peers_may_only_write_is_not_read(rig: &Rig) {
    refuse(rig, Op::Read, Access::WriteOnly, REMOTE, |_, _, _| {});
}

pub fn a_region_for_local_use_is_not_touched_by_peers(rig: &Rig) {
    refuse(rig, Op::Write, Access::None, REMOTE, |_, _, _| {});
    refuse(rig, Op::Read, Access::None, REMOTE, |_, _, _| {});
}

pub fn a_wrong_local_key_is_a_local_error(rig: &Rig) {
    for op in [Op::Write, Op::Read] {
        refuse(rig, op, Access::Both, LOCAL, |_, _, bad| bad.local_key ^= 1 << 17);
    }
}

pub fn a_local_range_outside_its_region_is_a_local_error(rig: &Rig) {
    for op in [Op::Write, Op::Read] {
        refuse(rig, op, Access::Both, LOCAL, |_, _, bad| bad.local_addr += LEN as u64 - 100);
        refuse(rig, op, Access::Both, LOCAL, |_, _, bad| bad.local_addr -= 101);
    }
}

pub fn an_extra_write_with_a_wrong_key_is_refused(rig: &Rig) {
    for op in [ExtraOp::Write, ExtraOp::WriteImm(9)] {
        let [a, b] = rig.pair();
        rig.recvs(1, b, 0..4);
        let target = rig.block(1, 64);
        let mut sender = Sender::new(rig, 0, a);
        let bad = extra(op, &[1, 2, 3], &target, 0);
        sender.post(&[], None, Some(Extra { remote_key: target.keys.remote ^ (1 << 17), ..bad }), false);
        let sends = rig.wait_sends(0, a, 1);
        assert_eq!((sends[0].status, sends[0].seq), (REMOTE, 0), "{sends:?}");
        rig.settle();
        rig.expect(&target, &Rig::untouched(64));
        let delivered = rig.inbox().receives(1, b).into_iter().any(|c| c.status == WcStatus::Success);
        assert!(!delivered, "the immediate of a refused write was delivered");
    }
}

pub fn an_endpoint_in_error_leaves_others_alone(rig: &Rig) {
    let [good, peer] = rig.pair();
    let [bad, _] = rig.pair();
    rig.recvs(1, peer, 0..DEPTH);
    let source = rig.block(0, LEN);
    let target = rig.block(1, LEN);
    rig.fill(&source, 2);
    let mut sender = Sender::new(rig, 0, good);
    sender.post(&[template(Op::Write, &source, 0, &target, 0, 100)], Some(1), None, false);
    let mut spoiled = template(Op::Write, &source, 0, &target, 0, 100);
    spoiled.remote_key ^= 1;
    Sender::new(rig, 0, bad).post(&[spoiled], None, None, false);
    assert_eq!(rig.wait_sends(0, bad, 1)[0].status, REMOTE);
    let seq = sender.post(&[template(Op::Write, &source, 0, &target, 0, LEN)], Some(2), None, true);
    sender.wait_done(seq);
    let receives = rig.wait_receives(1, peer, 2);
    assert!(receives.iter().all(|c| c.status == WcStatus::Success), "{receives:?}");
    rig.expect(&target, &pattern(2, LEN));
}

pub fn connecting_to_nonsense_is_an_error_by_the_deadline(rig: &Rig) {
    let nonsense =
        [json!(null), json!({}), json!([]), json!("x"), json!({"qpn": -1, "endpoint": "?", "port": 1.5})];
    for (i, address) in nonsense.into_iter().enumerate() {
        let config = EndpointConfig {
            sq_depth: 8,
            rq_depth: 8,
            active: i % 2 == 0,
            control: false,
            max_sge: 1,
            exposed: true,
        };
        let (endpoint, _) = rig.fabric(0).create_endpoint(&config).expect("create");
        let deadline = Instant::now() + Duration::from_millis(300);
        let result = rig.fabric(0).connect_endpoint(endpoint, &address, deadline);
        assert!(result.is_err(), "connected to {address}");
        rig.fabric(0).fence(endpoint);
        rig.wait("quiet", |_| rig.fabric(0).is_quiet(endpoint).then_some(()));
        rig.fabric(0).destroy_endpoint(endpoint);
    }
    // And it did no harm.
    let [a, _] = rig.pair();
    let source = rig.block(0, 64);
    let target = rig.block(1, 64);
    rig.fill(&source, 3);
    Sender::new(rig, 0, a).run(&[template(Op::Write, &source, 0, &target, 0, 64)]);
    rig.expect(&target, &pattern(3, 64));
}

//! The end of a registration: after `deregister` the memory is the application's again.

use super::rig::*;
use crate::*;
use std::time::Instant;

const LEN: usize = 1 << 20;
const PIECES: usize = 32;

fn chain(op: Op, local: &Block, remote: &Block) -> Vec<Template> {
    let piece = LEN / PIECES;
    (0..PIECES).map(|i| template(op, local, i * piece, remote, i * piece, piece)).collect()
}

/// All of the chain succeeded, or it was refused somewhere and everything behind that flushed.
fn expect_end(sends: &[Completion]) -> bool {
    match sends.first().map(|c| c.status) {
        None => false,
        Some(WcStatus::Success) => true,
        // A target whose memory goes while it answers a READ may end without a word; the initiator then waits in vain.
        Some(WcStatus::RemoteAccess | WcStatus::PeerGone) => {
            let flushed = &sends[1..];
            assert!(flushed.iter().all(|c| c.status == WcStatus::Flushed), "{sends:?}");
            sends.last().is_some_and(|c| c.seq == PIECES as u64 - 1)
        }
        Some(_) => panic!("neither done nor refused: {sends:?}"),
    }
}

pub fn after_deregister_no_peers_write_lands(rig: &Rig) {
    // Each round lets the peer get a little further before the region goes.
    for head_start in 0..24 {
        let [a, _] = rig.pair();
        let source = rig.block(0, LEN);
        let target = rig.block(1, LEN);
        rig.fill(&source, 1);
        Sender::new(rig, 0, a).post(&chain(Op::Write, &source, &target), None, None, true);
        for _ in 0..head_start * 3 {
            rig.poll_once(&[0, 1]);
            rig.step();
        }
        rig.deregister(&target);
        rig.fill(&target, 2);
        rig.wait("the end of the chain", |inbox| expect_end(&inbox.sends(0, a)).then_some(()));
        rig.settle();
        rig.expect(&target, &pattern(2, LEN));
    }
}

pub fn after_deregister_no_peers_read_sees_new_bytes(rig: &Rig) {
    for head_start in 0..24 {
        let [a, _] = rig.pair();
        let local = rig.block(0, LEN);
        let target = rig.block(1, LEN);
        rig.store(&target, 0, &vec![0x11; LEN]);
        Sender::new(rig, 0, a).post(&chain(Op::Read, &local, &target), None, None, true);
        for _ in 0..head_start * 3 {
            rig.poll_once(&[0, 1]);
            rig.step();
        }
        rig.deregister(&target);
        rig.store(&target, 0, &vec![0x22; LEN]);
        let done = rig.wait("the end of the chain", |inbox| {
            let sends = inbox.sends(0, a);
            expect_end(&sends).then(|| sends[0].status == WcStatus::Success)
        });
        rig.settle();
        if done {
            rig.expect(&local, &vec![0x11; LEN]);
        }
        rig.expect_sentinels(&local);
    }
}

pub fn a_revoked_region_refuses_new_operations(rig: &Rig) {
    let [a, _] = rig.pair();
    let source = rig.block(0, 64);
    let target = rig.block(1, 64);
    rig.fill(&source, 3);
    rig.fabric(1).revoke(target.keys);
    Sender::new(rig, 0, a).post(&[template(Op::Write, &source, 0, &target, 0, 64)], None, None, true);
    assert_eq!(rig.wait_sends(0, a, 1)[0].status, WcStatus::RemoteAccess);
    rig.deregister(&target);
    rig.expect(&target, &Rig::untouched(64));
}

pub fn deregistering_one_region_leaves_traffic_to_another_alone(rig: &Rig) {
    let [a, _] = rig.pair();
    let source = rig.block(0, LEN);
    let target = rig.block(1, LEN);
    rig.fill(&source, 4);
    let mut sender = Sender::new(rig, 0, a);
    for _ in 0..8 {
        let other = rig.block(1, 4096);
        let seq = sender.post(&chain(Op::Write, &source, &target), None, None, true);
        rig.deregister(&other);
        sender.wait_done(seq);
    }
    rig.expect(&target, &pattern(4, LEN));
}

pub fn an_unknown_key_is_not_found_by_deregister(rig: &Rig) {
    let block = rig.block(0, 64);
    rig.deregister(&block);
    let again = rig.fabric(0).deregister(block.keys, Instant::now() + PATIENCE);
    assert!(matches!(again, Err(FabricError::NotFound(_))), "{again:?}");
    // Revoking what is gone is harmless.
    rig.fabric(0).revoke(block.keys);
}

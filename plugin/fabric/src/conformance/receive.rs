//! RECVs: immediates and messages.

use super::rig::*;
use crate::*;

fn receive(kind: CompletionKind, id: u64) -> impl Fn(&Completion) -> bool {
    move |c| c.kind == kind && c.status == WcStatus::Success && c.seq == id
}

pub fn an_immediate_comes_after_its_bytes_and_consumes_one_recv(rig: &Rig) {
    const LEN: usize = 512 * 1024;
    let [a, b] = rig.pair();
    rig.recvs(1, b, 100..164);
    let source = rig.block(0, LEN);
    let target = rig.block(1, LEN);
    let mut sender = Sender::new(rig, 0, a);
    for round in 0..16u32 {
        rig.fill(&source, u64::from(round));
        let work: Vec<Template> = (0..8)
            .map(|i| template(Op::Write, &source, i * LEN / 8, &target, i * LEN / 8, LEN / 8))
            .collect();
        let seq = sender.post(&work, Some(0xC0FF_EE00 + round), None, true);
        let receives = rig.wait_receives(1, b, round as usize + 1);
        // At the very moment of delivery, whatever the sender knows.
        rig.expect(&target, &pattern(u64::from(round), LEN));
        let last = receives.last().expect("one");
        assert!(
            receive(CompletionKind::RecvImm(0xC0FF_EE00 + round), 100 + u64::from(round))(last),
            "{last:?}"
        );
        sender.wait_done(seq);
    }
    rig.settle();
    assert_eq!(rig.inbox().receives(1, b).len(), 16);
}

pub fn the_last_template_of_a_chain_carries_the_immediate(rig: &Rig) {
    let [a, b] = rig.pair();
    rig.recvs(1, b, 0..4);
    let source = rig.block(0, 300);
    let target = rig.block(1, 300);
    rig.fill(&source, 1);
    let work: Vec<Template> =
        (0..3).map(|i| template(Op::Write, &source, i * 100, &target, i * 100, 100)).collect();
    let mut sender = Sender::new(rig, 0, a);
    // An extra behind it carries its own.
    let record = extra(ExtraOp::WriteImm(2), &[0x77; 10], &target, 0);
    let seq = sender.post(&work, Some(1), Some(record), true);
    sender.wait_done(seq);
    assert_eq!(seq, 3);
    let receives = rig.wait_receives(1, b, 2);
    assert!(receive(CompletionKind::RecvImm(1), 0)(&receives[0]), "{receives:?}");
    assert!(receive(CompletionKind::RecvImm(2), 1)(&receives[1]), "{receives:?}");
    let mut expected = pattern(1, 300);
    expected[..10].fill(0x77);
    rig.expect(&target, &expected);
}

pub fn an_extra_write_carries_an_immediate(rig: &Rig) {
    let [a, b] = rig.pair();
    rig.recvs(1, b, 0..2);
    let target = rig.block(1, 128);
    let mut sender = Sender::new(rig, 0, a);
    let seq = sender.post(&[], None, Some(extra(ExtraOp::WriteImm(u32::MAX), b"record", &target, 61)), true);
    let receives = rig.wait_receives(1, b, 1);
    assert!(receive(CompletionKind::RecvImm(u32::MAX), 0)(&receives[0]), "{receives:?}");
    let mut expected = Rig::untouched(128);
    expected[61..67].copy_from_slice(b"record");
    rig.expect(&target, &expected);
    sender.wait_done(seq);
}

pub fn a_zero_length_write_delivers_its_immediate(rig: &Rig) {
    let [a, b] = rig.pair();
    rig.recvs(1, b, 0..3);
    let target = rig.block(1, 64);
    let mut sender = Sender::new(rig, 0, a);
    for imm in [0, 1] {
        sender.post(&[], None, Some(extra(ExtraOp::WriteImm(imm), &[], &target, 0)), false);
    }
    // A zero-length write touches nothing, so it needs no key either.
    let bare = Extra { remote_addr: 0, remote_key: 0, ..extra(ExtraOp::WriteImm(2), &[], &target, 0) };
    let seq = sender.post(&[], None, Some(bare), true);
    sender.wait_done(seq);
    let receives = rig.wait_receives(1, b, 3);
    for (i, c) in receives.iter().enumerate() {
        assert!(receive(CompletionKind::RecvImm(i as u32), i as u64)(c), "{receives:?}");
    }
    rig.expect(&target, &Rig::untouched(64));
}

pub fn immediates_arrive_in_the_order_of_posting(rig: &Rig) {
    let [a, b] = rig.pair();
    rig.recvs(1, b, 0..60);
    let source = rig.block(0, 64 * 1024);
    let target = rig.block(1, 64 * 1024);
    let mut sender = Sender::new(rig, 0, a);
    for imm in 0..60u32 {
        let len = if imm % 5 == 0 { 64 * 1024 } else { 1 };
        sender.post(&[template(Op::Write, &source, 0, &target, 0, len)], Some(imm), None, imm == 59);
    }
    let receives = rig.wait_receives(1, b, 60);
    for (i, c) in receives.iter().enumerate() {
        assert!(receive(CompletionKind::RecvImm(i as u32), i as u64)(c), "{i}: {c:?}");
    }
    sender.wait_done(59);
}

pub fn sends_fill_the_slots_in_order_with_id_and_length(rig: &Rig) {
    const SLOT: usize = 256;
    let [a, b] = rig.pair();
    let room = rig.block_for(1, SLOT * 8, Access::None);
    let slots: Vec<RecvSlot> = (0..8)
        .map(|i| RecvSlot {
            addr: room.addr + (i * SLOT) as u64,
            local_key: room.keys.local,
            len_bytes: SLOT as u32,
            id: 1000 - i as u32,
        })
        .collect();
    rig.fabric(1).post_recv(b, &slots).expect("post RECVs");
    let inline = (rig.fabric(0).caps().inline_bytes as usize).min(SLOT);
    let mut sender = Sender::new(rig, 0, a);
    let mut expected = Rig::untouched(SLOT * 8);
    for i in 0..8 {
        let bytes = pattern(i as u64, inline * (i + 1) / 8);
        expected[i * SLOT..i * SLOT + bytes.len()].copy_from_slice(&bytes);
        sender.post(&[], None, Some(send(&bytes)), i == 7);
    }
    sender.wait_done(7);
    let receives = rig.wait_receives(1, b, 8);
    for (i, c) in receives.iter().enumerate() {
        assert!(receive(CompletionKind::RecvSend, 1000 - i as u64)(c), "{receives:?}");
        assert_eq!(c.len_bytes as usize, inline * (i + 1) / 8);
    }
    rig.expect(&room, &expected);
}

pub fn an_empty_send_fits_an_empty_slot(rig: &Rig) {
    let [a, b] = rig.pair();
    rig.recvs(1, b, 5..6);
    let mut sender = Sender::new(rig, 0, a);
    let seq = sender.post(&[], None, Some(send(&[])), true);
    sender.wait_done(seq);
    let receives = rig.wait_receives(1, b, 1);
    assert!(receive(CompletionKind::RecvSend, 5)(&receives[0]), "{receives:?}");
    assert_eq!(receives[0].len_bytes, 0);
}

pub fn a_staged_send_arrives_whole(rig: &Rig) {
    const LEN: usize = 8192;
    let [a, b] = rig.pair();
    let room = rig.block_for(1, LEN, Access::None);
    let staging = rig.block_for(0, LEN, Access::None);
    rig.fill(&staging, 8);
    let bytes = rig.bytes(&staging);
    let slot = RecvSlot { addr: room.addr, local_key: room.keys.local, len_bytes: LEN as u32, id: 3 };
    rig.fabric(1).post_recv(b, &[slot]).expect("post a RECV");
    let mut sender = Sender::new(rig, 0, a);
    let staged = Extra { staged: Some((staging.addr, staging.keys.local)), ..send(&bytes) };
    let seq = sender.post(&[], None, Some(staged), true);
    let receives = rig.wait_receives(1, b, 1);
    assert!(receive(CompletionKind::RecvSend, 3)(&receives[0]), "{receives:?}");
    assert_eq!(receives[0].len_bytes as usize, LEN);
    rig.expect(&room, &bytes);
    sender.wait_done(seq);
}

pub fn recvs_may_be_posted_before_connecting(rig: &Rig) {
    let [a, b] = rig.pair_with(DEPTH, false, |side, endpoint| rig.recvs(side, endpoint, 0..DEPTH));
    let target = rig.block(1, 64);
    let back = rig.block(0, 64);
    let mut there = Sender::new(rig, 0, a);
    let mut here = Sender::new(rig, 1, b);
    for imm in 0..DEPTH {
        there.post(&[], None, Some(extra(ExtraOp::WriteImm(imm), &[1], &target, 0)), imm == DEPTH - 1);
        here.post(&[], None, Some(extra(ExtraOp::WriteImm(imm), &[2], &back, 0)), imm == DEPTH - 1);
    }
    there.wait_done(u64::from(DEPTH) - 1);
    here.wait_done(u64::from(DEPTH) - 1);
    rig.wait_receives(1, b, DEPTH as usize);
    rig.wait_receives(0, a, DEPTH as usize);
}

/// The refusal comes first, then everything behind it flushed.
fn refused(rig: &Rig, endpoint: EndpointId, status: WcStatus, count: usize) {
    let sends = rig.wait_sends(0, endpoint, count);
    assert_eq!((sends[0].status, sends[0].seq), (status, 0), "{sends:?}");
    for (i, c) in sends.iter().enumerate().skip(1) {
        assert_eq!((c.status, c.seq), (WcStatus::Flushed, i as u64), "{sends:?}");
    }
}

pub fn a_send_longer_than_its_slot_is_refused(rig: &Rig) {
    let [a, b] = rig.pair();
    let room = rig.block_for(1, 64, Access::None);
    let slot = RecvSlot { addr: room.addr, local_key: room.keys.local, len_bytes: 32, id: 0 };
    rig.fabric(1).post_recv(b, &[slot, slot]).expect("post RECVs");
    let mut sender = Sender::new(rig, 0, a);
    sender.post(&[], None, Some(send(&[0x42; 33])), false);
    let _ = sender.try_post(&[], None, Some(send(&[0x42; 3])), false);
    refused(rig, a, WcStatus::RemoteLength, 1);
    rig.settle();
    assert_eq!(rig.bytes(&room)[32..], Rig::untouched(32)[..], "bytes behind the slot were written");
    rig.expect_sentinels(&room);
    let delivered = rig.inbox().receives(1, b).into_iter().any(|c| c.status == WcStatus::Success);
    assert!(!delivered, "a message that was refused was delivered");
}

pub fn an_immediate_without_a_recv_is_refused(rig: &Rig) {
    let [a, b] = rig.pair();
    rig.recvs(1, b, 0..1);
    let target = rig.block(1, 64);
    let mut sender = Sender::new(rig, 0, a);
    // The one RECV serves the first.
    let seq = sender.post(&[], None, Some(extra(ExtraOp::WriteImm(1), &[1], &target, 0)), true);
    sender.wait_done(seq);
    rig.wait_receives(1, b, 1);
    sender.post(&[], None, Some(extra(ExtraOp::WriteImm(2), &[], &target, 0)), false);
    let sends = rig.wait_sends(0, a, 2);
    assert_eq!((sends[1].status, sends[1].seq), (WcStatus::RnrExceeded, 1), "{sends:?}");
    assert_eq!(rig.inbox().receives(1, b).iter().filter(|c| c.status == WcStatus::Success).count(), 1);
}

pub fn a_send_without_a_recv_is_refused(rig: &Rig) {
    let [a, _] = rig.pair();
    let mut sender = Sender::new(rig, 0, a);
    sender.post(&[], None, Some(send(&[1, 2, 3])), false);
    refused(rig, a, WcStatus::RnrExceeded, 1);
}

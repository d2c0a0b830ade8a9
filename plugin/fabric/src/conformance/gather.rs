//! SENDs that are gathered from several pieces of registered memory.

use super::rig::*;
use crate::*;

/// Own memory in pieces: where each is, and what is in it.
struct Source {
    block: Block,
    bytes: Vec<u8>,
}

impl Source {
    fn new(rig: &Rig, len: usize, seed: u64) -> Source {
        let block = rig.block_for(0, len, Access::None);
        rig.fill(&block, seed);
        let bytes = rig.bytes(&block);
        Source { block, bytes }
    }

    fn sge(&self, at: usize, len: usize) -> Sge {
        Sge { addr: self.block.addr + at as u64, local_key: self.block.keys.local, len_bytes: len as u32 }
    }
}

fn gathered<'a>(prefix: Option<(&'a Source, usize)>, gather: &'a [Sge]) -> Extra<'a> {
    let bytes = prefix.map_or(&[][..], |(source, len)| &source.bytes[..len]);
    let staged = prefix.map(|(source, _)| (source.block.addr, source.block.keys.local));
    Extra { staged, gather, ..send(bytes) }
}

fn slot(room: &Block, at: usize, len: usize, id: u32) -> RecvSlot {
    RecvSlot { addr: room.addr + at as u64, local_key: room.keys.local, len_bytes: len as u32, id }
}

fn max_sge(rig: &Rig) -> usize {
    rig.fabric(0).caps().max_send_sge as usize
}

/// `false`: nothing can be gathered here.
fn can_gather(rig: &Rig) -> bool {
    max_sge(rig) > 1
}

pub fn a_gathered_send_arrives_in_the_order_of_its_pieces(rig: &Rig) {
    if !can_gather(rig) {
        return;
    }
    let [a, b] = rig.pair();
    let (pieces, prefix) = (max_sge(rig) - 1, Source::new(rig, 100, 1));
    // From a region each, odd lengths, last piece first.
    let sources: Vec<Source> = (0..pieces).map(|n| Source::new(rig, 4001 + 17 * n, 2 + n as u64)).collect();
    let list: Vec<Sge> =
        sources.iter().rev().enumerate().map(|(n, source)| source.sge(n, 3000 + 13 * n)).collect();
    let mut expected = prefix.bytes[..64].to_vec();
    for (n, source) in sources.iter().rev().enumerate() {
        expected.extend(&source.bytes[n..n + 3000 + 13 * n]);
    }
    let room = rig.block_for(1, expected.len() + 10, Access::None);
    rig.fabric(1).post_recv(b, &[slot(&room, 0, room.len, 7)]).expect("post a RECV");
    let mut sender = Sender::new(rig, 0, a);
    let seq = sender.post(&[], None, Some(gathered(Some((&prefix, 64)), &list)), true);
    let receives = rig.wait_receives(1, b, 1);
    let (kind, id, len) = (receives[0].kind, receives[0].seq, receives[0].len_bytes as usize);
    assert_eq!((kind, id, len), (CompletionKind::RecvSend, 7, expected.len()));
    sender.wait_done(seq);
    expected.extend(Rig::untouched(10));
    rig.expect(&room, &expected);
}

pub fn pieces_without_length_are_left_out(rig: &Rig) {
    if !can_gather(rig) {
        return;
    }
    let [a, b] = rig.pair();
    let source = Source::new(rig, 300, 1);
    let room = rig.block_for(1, 300, Access::None);
    rig.fabric(1).post_recv(b, &[slot(&room, 0, 300, 1), slot(&room, 0, 0, 2)]).expect("post RECVs");
    // More than fit into a list, but only two are anything; the key of nothing is not looked at.
    let nothing = Sge { addr: 1, local_key: 0xDEAD, len_bytes: 0 };
    let mut list = vec![nothing; max_sge(rig) * 2];
    list[1] = source.sge(200, 100);
    let last = list.len() - 1;
    list[last] = source.sge(5, 1);
    let mut sender = Sender::new(rig, 0, a);
    sender.post(&[], None, Some(gathered(None, &list)), false);
    let seq = sender.post(&[], None, Some(gathered(None, &[nothing])), true);
    let receives = rig.wait_receives(1, b, 2);
    assert_eq!((receives[0].seq, receives[0].len_bytes), (1, 101));
    assert_eq!((receives[1].seq, receives[1].len_bytes), (2, 0));
    sender.wait_done(seq);
    let mut expected = source.bytes[200..300].to_vec();
    expected.push(source.bytes[5]);
    expected.extend(Rig::untouched(199));
    rig.expect(&room, &expected);
}

pub fn gathered_sends_of_every_length_fill_their_slots_among_other_work(rig: &Rig) {
    const SLOT: usize = 4096;
    const ROUNDS: usize = 40;
    if !can_gather(rig) {
        return;
    }
    let [a, b] = rig.pair();
    let source = Source::new(rig, 8192, 1);
    let target = rig.block(1, ROUNDS);
    let room = rig.block_for(1, SLOT * ROUNDS, Access::None);
    let slots: Vec<RecvSlot> = (0..ROUNDS).map(|n| slot(&room, n * SLOT, SLOT, n as u32)).collect();
    rig.fabric(1).post_recv(b, &slots).expect("post RECVs");
    let mut expected = Rig::untouched(SLOT * ROUNDS);
    let mut lengths = Vec::new();
    let mut sender = Sender::new(rig, 0, a);
    let mut seq = 0;
    for n in 0..ROUNDS {
        let into = &mut expected[n * SLOT..][..SLOT];
        let write = template(Op::Write, &source.block, n, &target, n, 1);
        let extra_send;
        let list: Vec<Sge>;
        if n % 4 == 3 {
            // A plain one in between.
            into[..n].copy_from_slice(&source.bytes[..n]);
            lengths.push(n);
            extra_send = send(&source.bytes[..n]);
        } else {
            let count = 1 + n % (max_sge(rig) - 1);
            let spans: Vec<(usize, usize)> = (0..count).map(|k| (k * 97 + n, 1 + k * n % 90)).collect();
            list = spans.iter().map(|&(at, len)| source.sge(at, len)).collect();
            let mut whole = source.bytes[..n].to_vec();
            spans.iter().for_each(|&(at, len)| whole.extend(&source.bytes[at..at + len]));
            into[..whole.len()].copy_from_slice(&whole);
            lengths.push(whole.len());
            extra_send = gathered((n > 0).then_some((&source, n)), &list);
        }
        let work = if n % 2 == 0 { &[write][..] } else { &[] };
        seq = sender.post(work, None, Some(extra_send), n % 8 == 7);
        if n % 8 == 7 {
            sender.wait_done(seq);
        }
    }
    sender.wait_done(seq);
    let receives = rig.wait_receives(1, b, ROUNDS);
    for (n, c) in receives.iter().enumerate() {
        assert_eq!((c.kind, c.seq, c.len_bytes as usize), (CompletionKind::RecvSend, n as u64, lengths[n]));
    }
    rig.expect(&room, &expected);
    let written = |n: usize| if n.is_multiple_of(2) { source.bytes[n] } else { Rig::untouched(1)[0] };
    rig.expect(&target, &(0..ROUNDS).map(written).collect::<Vec<u8>>());
}

/// A good SEND, one that `spoil` made bad, one behind it: the first arrives, the second is the culprit, the rest is flushed.
fn refuse(rig: &Rig, spoil: impl Fn(&Source, &mut Sge)) {
    if !can_gather(rig) {
        return;
    }
    for culprit in [0, max_sge(rig).min(5) - 2] {
        let [a, b] = rig.pair();
        let source = Source::new(rig, 4096, 3);
        let room = rig.block_for(1, 3 * 4096, Access::None);
        let slots: Vec<RecvSlot> = (0..3).map(|n| slot(&room, n * 4096, 4096, n as u32)).collect();
        rig.fabric(1).post_recv(b, &slots).expect("post RECVs");
        let good: Vec<Sge> = (0..max_sge(rig).min(5) - 1).map(|n| source.sge(n * 100, 50)).collect();
        let mut bad = good.clone();
        spoil(&source, &mut bad[culprit]);
        let mut sender = Sender::new(rig, 0, a);
        sender.post(&[], None, Some(gathered(Some((&source, 10)), &good)), false);
        // Not refused at post: a key is looked at when its turn comes.
        sender.post(&[], None, Some(gathered(Some((&source, 10)), &bad)), false);
        let behind = usize::from(sender.try_post(&[], None, Some(gathered(None, &good)), true).is_ok());
        let sends = rig.wait_sends(0, a, 1 + behind);
        assert_eq!((sends[0].status, sends[0].seq), (WcStatus::LocalAccess, 1), "{sends:?}");
        assert!(sends[1..].iter().all(|c| c.status == WcStatus::Flushed), "{sends:?}");
        rig.wait_receives(1, b, 1);
        rig.settle();
        let received = rig.inbox().receives(1, b);
        let arrived = received.iter().filter(|c| c.status == WcStatus::Success);
        assert_eq!(arrived.map(|c| c.seq).collect::<Vec<_>>(), [0], "the good one alone is delivered");
        let mut expected = source.bytes[..10].to_vec();
        good.iter().enumerate().for_each(|(n, _)| expected.extend(&source.bytes[n * 100..n * 100 + 50]));
        assert_eq!(rig.bytes(&room)[..expected.len()], expected[..]);
        rig.expect_sentinels(&room);
    }
}

pub fn a_gathered_send_with_a_wrong_local_key_is_a_local_error(rig: &Rig) {
    refuse(rig, |_, bad| bad.local_key ^= 1 << 17);
    refuse(rig, |_, bad| bad.local_key = 0);
}

pub fn a_gathered_send_from_outside_a_region_is_a_local_error(rig: &Rig) {
    refuse(rig, |source, bad| bad.addr = source.block.addr + 4096 - 49);
    refuse(rig, |source, bad| bad.addr = source.block.addr - 1);
    refuse(rig, |_, bad| bad.addr = u64::MAX - 10);
}

pub fn a_gathered_send_longer_than_its_slot_is_refused(rig: &Rig) {
    if !can_gather(rig) {
        return;
    }
    let [a, b] = rig.pair();
    let source = Source::new(rig, 4096, 3);
    let room = rig.block_for(1, 100, Access::None);
    rig.fabric(1).post_recv(b, &[slot(&room, 0, 50, 0)]).expect("post a RECV");
    let mut sender = Sender::new(rig, 0, a);
    // No piece is too long by itself.
    sender.post(&[], None, Some(gathered(Some((&source, 30)), &[source.sge(40, 21)])), false);
    let sends = rig.wait_sends(0, a, 1);
    assert_eq!((sends[0].status, sends[0].seq), (WcStatus::RemoteLength, 0), "{sends:?}");
    rig.settle();
    assert_eq!(rig.bytes(&room)[50..], Rig::untouched(50)[..], "bytes behind the slot were written");
    rig.expect_sentinels(&room);
    let delivered = rig.inbox().receives(1, b).into_iter().any(|c| c.status == WcStatus::Success);
    assert!(!delivered, "a message that was refused was delivered");
}

pub fn gather_lists_that_no_endpoint_can_send_are_refused_at_post(rig: &Rig) {
    let [a, b] = rig.pair();
    let source = Source::new(rig, 4096, 1);
    let room = rig.block_for(1, 4096, Access::None);
    rig.fabric(1).post_recv(b, &[slot(&room, 0, 4096, 0)]).expect("post a RECV");
    let one = source.sge(0, 1);
    let many = vec![one; max_sge(rig)];
    let beyond = vec![one; max_sge(rig) + 1];
    let longest = rig.fabric(0).caps().max_message_bytes;
    let huge = [Sge { len_bytes: longest, ..one }, one];
    let unstaged = Extra { gather: &[one], ..send(&[1]) };
    let write = Extra { gather: &[one], op: ExtraOp::Write, ..send(&[]) };
    for (what, extra) in [
        ("too many pieces", gathered(None, &beyond)),
        ("a prefix is a piece as well", gathered(Some((&source, 1)), &many)),
        ("too long together", gathered(None, &huge)),
        ("a prefix that is not staged", unstaged),
        ("a WRITE", write),
    ] {
        let batch =
            Batch { work: &[], imm: None, extra: Some(extra), first_seq: 0, signaled: true, patient: false };
        let refused = rig.fabric(0).post(a, &batch).expect_err(what);
        assert_eq!(refused.taken, 0, "{what}");
        let named = matches!(refused.error, FabricError::Limit(_) | FabricError::Invalid(_));
        assert!(named, "{what}: {refused}");
    }
    // Nothing of it happened to the endpoint.
    let mut sender = Sender::new(rig, 0, a);
    let seq = sender.post(&[], None, Some(gathered(None, &many)), true);
    sender.wait_done(seq);
    assert_eq!(rig.wait_receives(1, b, 1)[0].len_bytes as usize, many.len());
}

pub fn more_gathered_pieces_than_the_queue_is_deep_go_out_in_turn(rig: &Rig) {
    const QUEUE: u32 = 8;
    if !can_gather(rig) {
        return;
    }
    let [a, b] = rig.pair_with(QUEUE, false, |_, _| {});
    let source = Source::new(rig, 64 * 1024, 5);
    let pieces = max_sge(rig);
    let room = rig.block_for(1, QUEUE as usize * pieces * 100, Access::None);
    let mut sender = Sender::new(rig, 0, a);
    for round in 0..6 {
        let slots: Vec<RecvSlot> =
            (0..QUEUE).map(|n| slot(&room, n as usize * pieces * 100, pieces * 100, n)).collect();
        rig.fabric(1).post_recv(b, &slots).expect("post RECVs");
        let mut expected = Vec::new();
        let mut seq = 0;
        for n in 0..QUEUE as usize {
            let at = |k: usize| (round * 7919 + n * 1009 + k * 211) % (64 * 1024 - 100);
            let list: Vec<Sge> = (0..pieces).map(|k| source.sge(at(k), 100)).collect();
            (0..pieces).for_each(|k| expected.extend(&source.bytes[at(k)..at(k) + 100]));
            seq = sender.post(&[], None, Some(gathered(None, &list)), n + 1 == QUEUE as usize);
        }
        sender.wait_done(seq);
        rig.wait_receives(1, b, QUEUE as usize * (round + 1));
        rig.expect(&room, &expected);
    }
}

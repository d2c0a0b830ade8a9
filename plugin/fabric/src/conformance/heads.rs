//! Messages that are received in two steps: the head in its slot, the rest where the receiver says. Where a fabric does not offer that,
//! the same messages arrive whole.

use super::rig::*;
use crate::*;

const HEAD: usize = 64;
const SLOT: usize = 128 * 1024;
/// No page is mapped there.
const NOWHERE: u64 = 4096;

/// Two endpoints, one of which receives heads; what is sent, and the slots.
struct Heads<'a> {
    rig: &'a Rig,
    sender: Sender<'a>,
    to: EndpointId,
    source: Block,
    bytes: Vec<u8>,
    room: Block,
    offered: bool,
}

impl<'a> Heads<'a> {
    /// `None`: nothing is gathered here.
    fn new(rig: &'a Rig, slots: usize) -> Option<Heads<'a>> {
        if rig.fabric(0).caps().max_send_sge < 2 {
            return None;
        }
        let [a, b] = rig.pair();
        let offered = rig.fabric(1).receive_heads(b);
        let source = rig.block_for(0, SLOT, Access::None);
        rig.fill(&source, 1);
        let bytes = rig.bytes(&source);
        let room = rig.block_for(1, SLOT * slots, Access::None);
        let recvs: Vec<RecvSlot> = (0..slots)
            .map(|n| RecvSlot {
                addr: room.addr + (n * SLOT) as u64,
                local_key: room.keys.local,
                len_bytes: SLOT as u32,
                id: n as u32,
            })
            .collect();
        rig.fabric(1).post_recv(b, &recvs).expect("post RECVs");
        Some(Heads { rig, sender: Sender::new(rig, 0, a), to: b, source, bytes, room, offered })
    }

    /// SENDs the first bytes as a head and others behind it.
    fn send(&mut self, from: usize, len: usize) -> u64 {
        let local_key = self.source.keys.local;
        let rest = Sge { addr: self.source.addr + from as u64, local_key, len_bytes: len as u32 };
        let message = Extra {
            op: ExtraOp::SendHead,
            staged: Some((self.source.addr, local_key)),
            gather: &[rest],
            ..send(&self.bytes[..HEAD])
        };
        self.sender.post(&[], None, Some(message), true)
    }

    fn send_plain(&mut self, len: usize) -> u64 {
        let message =
            Extra { staged: Some((self.source.addr, self.source.keys.local)), ..send(&self.bytes[..len]) };
        self.sender.post(&[], None, Some(message), true)
    }

    fn arrived(&self, count: usize) -> Completion {
        self.receives(count)[count - 1]
    }

    /// Waits for so many receives; there may be notes that more is here among what was polled.
    fn receives(&self, count: usize) -> Vec<Completion> {
        self.rig.wait(&format!("{count} receive completions"), |inbox| {
            let mut receives = inbox.receives(1, self.to);
            receives.retain(|c| c.kind != CompletionKind::RecvMore);
            (receives.len() >= count).then_some(receives)
        })
    }

    /// The n-th message has its head in its slot, and `len` bytes behind it are awaited; nothing else is written there.
    fn expect_head(&self, nth: usize, len: usize) {
        let done = self.arrived(nth + 1);
        let kind = CompletionKind::RecvHead { head_bytes: HEAD as u32 };
        assert_eq!((done.kind, done.status, done.seq), (kind, WcStatus::Success, nth as u64));
        assert_eq!(done.len_bytes as usize, HEAD + len);
        let found = &self.rig.bytes(&self.room)[nth * SLOT..][..SLOT];
        assert_eq!(found[..HEAD], self.bytes[..HEAD]);
        assert_eq!(found[HEAD..], Rig::untouched(SLOT - HEAD));
    }

    /// Takes the oldest rest, with all the time that it needs.
    fn take(&self, to: Option<u64>, len: usize) -> Option<Untaken> {
        let rest = Rest { to, len_bytes: len as u32 };
        self.rig.wait("a rest", |_| match self.rig.fabric(1).take(self.to, &[rest]) {
            (1, None) => Some(None),
            (0, None | Some(Untaken::Later)) => None,
            (0, why) => Some(why),
            other => panic!("{other:?} of one rest"),
        })
    }

    fn sent(&self) -> Vec<Completion> {
        self.rig.inbox().sends(0, self.sender.endpoint)
    }
}

pub fn a_message_with_a_head_goes_straight_to_its_place(rig: &Rig) {
    let Some(mut heads) = Heads::new(rig, 1) else { return };
    let len = 100_001;
    let seq = heads.send(777, len);
    if !heads.offered {
        let done = heads.arrived(1);
        assert_eq!((done.kind, done.len_bytes as usize), (CompletionKind::RecvSend, HEAD + len));
        heads.sender.wait_done(seq);
        let found = &rig.bytes(&heads.room)[..HEAD + len];
        assert!(found[..HEAD] == heads.bytes[..HEAD] && found[HEAD..] == heads.bytes[777..][..len]);
        return;
    }
    heads.expect_head(0, len);
    rig.settle();
    assert!(heads.sent().is_empty(), "it is not sent before it is placed");
    // Any memory of the process will do.
    let place = rig.block_for(1, len, Access::None);
    rig.deregister(&place);
    assert_eq!(heads.take(Some(place.addr), len), None);
    rig.expect(&place, &heads.bytes[777..][..len]);
    heads.expect_head(0, len);
    heads.sender.wait_done(seq);
}

pub fn what_is_behind_a_rest_waits_for_it_and_comes_in_order(rig: &Rig) {
    let lens = [1, 5000, 70_000, 64 * 1024, 3, 120_000];
    let Some(mut heads) = Heads::new(rig, 2 * lens.len()) else { return };
    if !heads.offered {
        return;
    }
    let mut seq = 0;
    for (n, len) in lens.into_iter().enumerate() {
        heads.send(n, len);
        seq = heads.send_plain(1000 + n);
    }
    for (n, len) in lens.into_iter().enumerate() {
        heads.expect_head(2 * n, len);
        let place = rig.block_for(1, len, Access::None);
        assert_eq!(heads.take(Some(place.addr), len), None);
        rig.expect(&place, &heads.bytes[n..][..len]);
        let plain = heads.arrived(2 * n + 2);
        assert_eq!((plain.kind, plain.seq), (CompletionKind::RecvSend, 2 * n as u64 + 1));
        assert_eq!(plain.len_bytes as usize, 1000 + n);
        let found = &rig.bytes(&heads.room)[(2 * n + 1) * SLOT..][..1000 + n];
        assert_eq!(found, &heads.bytes[..1000 + n]);
    }
    heads.sender.wait_done(seq);
    rig.expect_sentinels(&heads.room);
}

pub fn many_rests_are_taken_at_once_as_far_as_they_are_here(rig: &Rig) {
    const COUNT: usize = 32;
    let Some(mut heads) = Heads::new(rig, COUNT) else { return };
    if !heads.offered {
        return;
    }
    let len = |n: usize| 60_000 + 11 * n;
    let mut seq = 0;
    for n in 0..COUNT {
        seq = heads.send(n, len(n));
    }
    let places: Vec<Block> = (0..COUNT).map(|n| rig.block_for(1, len(n), Access::None)).collect();
    let mut taken = 0;
    while taken < COUNT {
        let here = heads.receives(taken + 1).len();
        let rest = |n: usize| Rest { to: Some(places[n].addr), len_bytes: len(n) as u32 };
        let rests: Vec<Rest> = (taken..here).map(rest).collect();
        let (whole, untaken) = rig.fabric(1).take(heads.to, &rests);
        assert!(whole <= rests.len() && matches!(untaken, None | Some(Untaken::Later)), "{untaken:?}");
        taken += whole;
        if untaken == Some(Untaken::Later) {
            // Time passes.
            rig.step();
        }
    }
    for (n, place) in places.iter().enumerate() {
        rig.expect(place, &heads.bytes[n..][..len(n)]);
    }
    heads.sender.wait_done(seq);
}

pub fn a_rest_that_is_not_wanted_goes_nowhere(rig: &Rig) {
    let Some(mut heads) = Heads::new(rig, 2) else { return };
    if !heads.offered {
        return;
    }
    heads.send(0, 90_000);
    let seq = heads.send(5, 80_000);
    heads.expect_head(0, 90_000);
    assert_eq!(heads.take(None, 90_000), None);
    heads.expect_head(1, 80_000);
    let place = rig.block_for(1, 80_000, Access::None);
    assert_eq!(heads.take(Some(place.addr), 80_000), None);
    rig.expect(&place, &heads.bytes[5..][..80_000]);
    heads.sender.wait_done(seq);
    heads.expect_head(0, 90_000);
    rig.expect_sentinels(&heads.room);
}

pub fn a_rest_without_memory_is_told_and_dropped_and_the_next_one_comes(rig: &Rig) {
    let Some(mut heads) = Heads::new(rig, 3) else { return };
    if !heads.offered {
        return;
    }
    heads.send(0, 90_000);
    heads.send(1, 90_000);
    let seq = heads.send(5, 80_000);
    for nth in 0..2 {
        heads.expect_head(nth, 90_000);
        assert_eq!(heads.take(Some(NOWHERE), 90_000), Some(Untaken::Unmapped));
    }
    heads.expect_head(2, 80_000);
    let place = rig.block_for(1, 80_000, Access::None);
    assert_eq!(heads.take(Some(place.addr), 80_000), None);
    rig.expect(&place, &heads.bytes[5..][..80_000]);
    heads.sender.wait_done(seq);
}

pub fn after_a_fence_no_rest_is_taken(rig: &Rig) {
    for fenced in [0, 1] {
        let Some(mut heads) = Heads::new(rig, 2) else { return };
        if !heads.offered {
            return;
        }
        heads.send(0, 90_000);
        heads.send(1, 90_000);
        heads.expect_head(0, 90_000);
        rig.fabric(fenced).fence([heads.sender.endpoint, heads.to][fenced]);
        let sent = rig.wait_sends(0, heads.sender.endpoint, 2);
        assert!(sent.iter().all(|c| c.status != WcStatus::Success), "{sent:?}");
        let place = rig.block_for(1, 90_000, Access::None);
        let untaken = heads.take(Some(place.addr), 90_000);
        // What had left its sender before that one was fenced may be there.
        assert!(untaken == Some(Untaken::Gone) || fenced == 0 && untaken.is_none(), "{untaken:?}");
        let expected =
            if untaken.is_none() { heads.bytes[..90_000].to_vec() } else { Rig::untouched(90_000) };
        rig.expect(&place, &expected);
        rig.fabric(1).fence(heads.to);
        rig.wait("a quiet endpoint", |_| rig.fabric(1).is_quiet(heads.to).then_some(()));
        // Of the second message at most the head was here.
        let receives = rig.inbox().receives(1, heads.to);
        assert!(receives.iter().all(|c| c.kind != CompletionKind::RecvSend), "{receives:?}");
    }
}

pub fn a_message_with_a_head_longer_than_its_slot_is_refused(rig: &Rig) {
    let Some(mut heads) = Heads::new(rig, 1) else { return };
    heads.send(0, SLOT - HEAD + 1);
    let sent = rig.wait_sends(0, heads.sender.endpoint, 1);
    assert_eq!(sent[0].status, WcStatus::RemoteLength);
    rig.settle();
    // A NIC finds out when the slot is full; who takes the head first knows before.
    if heads.offered {
        rig.expect(&heads.room, &Rig::untouched(SLOT));
    }
    rig.expect_sentinels(&heads.room);
    let delivered = rig.inbox().receives(1, heads.to).into_iter().any(|c| c.status == WcStatus::Success);
    assert!(!delivered, "a message that was refused was delivered");
}

//! A one-sided session against a peer that writes and sends anything: immediates, records in rings, SENDs, credit words, over several
//! epochs. The input is the peer's part, and what the own host does meanwhile.
//!
//! Never a panic; the end of an epoch is told once; what is held for the peer stays within its limits; a transfer is told of once.

use std::collections::BTreeSet;

use baton_core::notify::*;
use baton_core::peer::{EndReason, RingId, record_limit, slot_bytes};
use baton_core::sequence::{Imm, ImmKind};
use baton_core::{Epoch, LaneId, NotifySeq, XferSeq};
use baton_fabric::Op;

use crate::input::Input;
use crate::toy::{Config, World};

const LANES: u8 = 2;
const RINGS: usize = 1 + LANES as usize;
const DATA_BYTES: usize = 32 << 10;
/// Transfers and notifications of the own host at most, so that an input ends soon.
const MOST_OWN: u64 = 64;
const MOST_EPOCHS: u32 = 4;
const MOST_MESSAGE_BYTES: u32 = 8 << 10;

mod op {
    pub(super) const IMMEDIATE: u8 = 0;
    pub(super) const RECORD: u8 = 1;
    pub(super) const RAW_RECORD: u8 = 2;
    pub(super) const RAW_SEND: u8 = 3;
    pub(super) const CREDIT: u8 = 4;
    pub(super) const SUBMIT: u8 = 5;
    pub(super) const NOTIFY: u8 = 6;
    pub(super) const PASS: u8 = 7;
    pub(super) const STEP: u8 = 8;
    pub(super) const EPOCH: u8 = 9;
    pub(super) const CANCEL: u8 = 10;
    pub(super) const POP: u8 = 11;
    pub(super) const COUNT: u8 = 12;
}

struct Game {
    world: World,
    /// Where the peer's next record goes, had it kept the rules.
    rings: [Ring; RINGS],
    own: u64,
}

pub(crate) fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let Some(how) = input.u8() else { return };
    let mut game = Game::new(how);
    while !input.is_empty() && game.act(&mut input).is_some() {
        game.check();
    }
    game.end();
}

fn ring_of(index: usize) -> RingId {
    if index == 0 { RingId::Control } else { RingId::Lane(LaneId(index as u8 - 1)) }
}

impl Game {
    /// `how`: what tells, whether the host takes what is delivered, where numbers begin.
    fn new(how: u8) -> Game {
        let mut config = Config { lanes: LANES, data_bytes: DATA_BYTES, ..Config::default() };
        config.notify = if how & 1 == 0 { NotifyMode::Immediate } else { NotifyMode::Send };
        config.reads_behind_fence = how & 8 == 0;
        config.limits.unpopped_messages = 8;
        config.limits.unpopped_bytes = 2048;
        config.limits.max_message_bytes = MOST_MESSAGE_BYTES;
        config.limits.first_xfer_seq = if how & 4 == 0 { 0 } else { 0xFF_FFFE };
        let rings = [Ring::new(config.ring); RINGS];
        let mut world = World::new(config, how.into());
        world.hostile = true;
        world.nodes[0].popped_by_itself = how & 2 == 0;
        let mut game = Game { world, rings, own: 0 };
        game.silence();
        game
    }

    /// The peer's own session says nothing: the input speaks for it.
    fn silence(&mut self) {
        self.world.frozen = (0..RINGS).map(|index| (1, index)).collect();
    }

    /// `None`: the input ends, or nothing more is of use.
    fn act(&mut self, input: &mut Input<'_>) -> Option<()> {
        match input.u8()? % op::COUNT {
            op::IMMEDIATE => {
                let (index, imm) = (usize::from(input.u8()?) % RINGS, self.any_imm(input)?);
                self.tell(index, imm, &[]);
            }
            op::RECORD => self.record(input)?,
            op::RAW_RECORD => self.raw_record(input)?,
            op::RAW_SEND => self.raw_send(input)?,
            op::CREDIT => self.credit(input)?,
            op::SUBMIT => self.submit(input)?,
            op::NOTIFY => self.notify(input)?,
            op::PASS => self.pass(u64::from(input.u8()?) * 37),
            op::STEP => self.steps(input.u8()?.into()),
            op::EPOCH => self.next_epoch()?,
            op::CANCEL => {
                let _ = self.world.nodes[0].session.cancel(input.u8()?.into());
                self.world.pump(0);
            }
            _ => {
                let (messages, bytes) = (input.number()?, input.number()?);
                self.world.nodes[0].session.on_popped(messages, bytes);
                self.world.pump(0);
            }
        }
        Some(())
    }

    fn lowest(&self) -> u64 {
        self.world.config.limits.first_xfer_seq
    }

    /// Most of the time one that may be.
    fn any_imm(&self, input: &mut Input<'_>) -> Option<u32> {
        let (what, lanes) = (input.u8()?, input.u8()?);
        if what == 255 {
            return input.u32();
        }
        let kind = [ImmKind::Tail, ImmKind::Record, ImmKind::Empty][usize::from(what % 3)];
        let seq = self.lowest().wrapping_add(input.number()?) & 0xFFFF_FFFF;
        Some(Imm::of(kind, lanes % LANES + 1, XferSeq(seq)).encode())
    }

    /// A record that says anything, well made.
    fn record(&mut self, input: &mut Input<'_>) -> Option<()> {
        let (what, seq, index) = (input.u8()?, input.number()?, usize::from(input.u8()?) % RINGS);
        let lanes = input.u8()? % LANES + 1;
        let numbered = XferSeq(self.lowest().wrapping_add(seq));
        let scope = match (what & 3, index) {
            (0, 0) => RecordScope::Standalone { seq: NotifySeq(seq) },
            (1, _) => RecordScope::Part,
            (2, _) => RecordScope::Standalone { seq: NotifySeq(seq) },
            _ => RecordScope::Transfer { seq: numbered, lanes },
        };
        let fragment = if what & 4 == 0 {
            None
        } else {
            let (key, index, count) = (input.number()?, input.number32()?, input.number32()?);
            let total_len = u32::from(input.u16()?);
            Some(Fragment { key, index, count, total_len })
        };
        let (id, message) = ((what & 8 != 0).then_some(seq), input.bytes()?);
        let tell = Tell { message: (what & 16 == 0 || id.is_none()).then_some(message), id };
        let mut body = Vec::new();
        if fragment.is_some() {
            body.extend_from_slice(message)
        } else {
            tell.encode(&mut body)
        }
        body.truncate(record_limit(self.world.config.ring));
        let epoch = Epoch(if what & 128 == 0 { self.world.config.epoch } else { what.into() });
        let mut bytes = Vec::new();
        Record { epoch, scope, fragment, flags: tell.flags() }.encode(&body, &mut bytes);
        let imm = match scope {
            RecordScope::Transfer { seq, lanes } => Imm::of(ImmKind::Record, lanes, seq),
            _ => Imm::of(ImmKind::Record, 1, XferSeq(0)),
        };
        let word = if what & 64 == 0 { imm.encode() } else { self.any_imm(input)? };
        self.tell(index, word, &bytes);
        Some(())
    }

    /// A record of any bytes behind a header with the right beginning.
    fn raw_record(&mut self, input: &mut Input<'_>) -> Option<()> {
        let (what, index, imm) = (input.u8()?, usize::from(input.u8()?) % RINGS, self.any_imm(input)?);
        let mut bytes = input.bytes()?.to_vec();
        if what & 1 != 0
            && let Some(head) = bytes.first_chunk_mut::<RECORD_HEADER_BYTES>()
        {
            head[..5].copy_from_slice(b"BtnR\x01");
            head[8..12].copy_from_slice(&self.world.config.epoch.to_le_bytes());
        }
        self.tell(index, imm, &bytes);
        Some(())
    }

    /// A record and the word that tells of it, by the way of this session.
    fn tell(&mut self, index: usize, imm: u32, record: &[u8]) {
        match self.world.config.notify {
            NotifyMode::Immediate => {
                self.write_record(index, record);
                self.immediate(index, imm);
            }
            NotifyMode::Send => {
                let mut payload = Vec::new();
                SendHeader { imm, epoch: Epoch(self.world.config.epoch) }.encode(&mut payload);
                payload.extend_from_slice(record);
                self.send(index, &payload);
            }
        }
    }

    fn write_record(&mut self, index: usize, record: &[u8]) {
        let ring = &mut self.rings[index];
        let record = &record[..record.len().min(ring.max_record_bytes() as usize)];
        if !record.is_empty() {
            let placement = ring.place(record.len() as u32);
            self.world.nodes[0].mem.poke_ring(ring_of(index), placement.offset, record);
            ring.advance(placement);
        }
    }

    fn immediate(&mut self, index: usize, imm: u32) {
        if self.world.nodes[0].recvs(index) > 0 {
            self.world.forge(0, index, imm);
            self.turns();
        }
    }

    fn send(&mut self, index: usize, payload: &[u8]) {
        let most = slot_bytes(self.world.config.ring) as usize;
        let payload = &payload[..payload.len().min(most)];
        if self.world.nodes[0].recvs(index) > 0 {
            self.world.forge_send(0, index, payload, payload.len() as u32);
            self.turns();
        }
    }

    /// Any payload; also by the way that was not agreed on.
    fn raw_send(&mut self, input: &mut Input<'_>) -> Option<()> {
        let index = usize::from(input.u8()?) % RINGS;
        let payload = input.bytes()?;
        match self.world.config.notify {
            NotifyMode::Send => self.send(index, payload),
            NotifyMode::Immediate if payload.len() > 200 => self.send(index, payload),
            NotifyMode::Immediate => {
                let word = payload.first_chunk().map_or(0, |word| u32::from_le_bytes(*word));
                self.immediate(index, word);
            }
        }
        Some(())
    }

    /// A word of the own credit page, of this epoch or not.
    fn credit(&mut self, input: &mut Input<'_>) -> Option<()> {
        let (what, count) = (input.u8()?, input.number()?);
        let word = usize::from(what & 7) % (2 * RINGS);
        let tag = if what & 64 == 0 { u64::from(self.world.config.epoch) } else { u64::from(what) };
        let stats = self.world.nodes[0].session.stats();
        let of = &stats.endpoints[word / 2];
        let known = if word.is_multiple_of(2) { of.recv_known } else { of.ring_known };
        let count = if what & 128 == 0 { known + count % 1024 } else { count };
        let node = &mut self.world.nodes[0];
        node.mem.set_credit(word, tag << 48 | count & ((1 << 48) - 1));
        node.session.poll_credit(self.world.now, &node.mem);
        self.world.pump(0);
        Some(())
    }

    fn submit(&mut self, input: &mut Input<'_>) -> Option<()> {
        let (what, at, len) = (input.u8()?, input.u16()?, input.u16()?);
        let (at, len) = (usize::from(at) % DATA_BYTES, usize::from(len) % DATA_BYTES);
        // Now and then past the end: the peer's NIC refuses.
        let len = if what & 64 == 0 { len.min(DATA_BYTES - at) } else { len };
        let message = [7; 300].get(..usize::from(what >> 1 & 7) * 40).filter(|_| what & 16 == 0);
        if self.may_begin() && len > 0 {
            let op = if what & 1 == 0 { Op::Write } else { Op::Read };
            let work = self.world.prepare(op, &[(at, at, len)]);
            let node = &mut self.world.nodes[0];
            let _ = node.session.submit(self.world.now, self.own, work, message);
            self.world.pump(0);
            self.turns();
        }
        Some(())
    }

    fn notify(&mut self, input: &mut Input<'_>) -> Option<()> {
        let (what, message) = (input.u8()?, input.bytes()?);
        if self.may_begin() {
            let (now, deadline) = (self.world.now, self.world.now.plus_ms(u64::from(what) * 300));
            let _ = self.world.nodes[0].session.notify(now, message, deadline);
            self.world.pump(0);
            self.turns();
        }
        Some(())
    }

    fn may_begin(&mut self) -> bool {
        self.own += 1;
        self.own <= MOST_OWN && self.world.nodes[0].ended.is_none()
    }

    fn turns(&mut self) {
        self.steps(200);
    }

    fn steps(&mut self, most: u32) {
        (0..=most).take_while(|_| self.world.step()).for_each(drop);
    }

    fn pass(&mut self, ms: u64) {
        self.world.now = self.world.now.plus_ms(ms);
        for n in [0, 1] {
            let due = self.world.nodes[n].session.next_timeout().is_some_and(|at| at <= self.world.now);
            if due {
                self.world.nodes[n].session.on_timeout(self.world.now);
            }
            self.world.pump(n);
        }
        self.turns();
    }

    fn next_epoch(&mut self) -> Option<()> {
        if self.world.config.epoch == MOST_EPOCHS {
            return None;
        }
        let popped_by_itself = self.world.nodes[0].popped_by_itself;
        self.world.fence_and_drain();
        self.world.next_epoch();
        self.world.nodes[0].popped_by_itself = popped_by_itself;
        self.rings = [Ring::new(self.world.config.ring); RINGS];
        self.silence();
        Some(())
    }

    fn check(&self) {
        let node = &self.world.nodes[0];
        if let Some(EndReason::Violation(violation)) = &node.ended {
            assert!(!violation.to_string().is_empty());
        }
        let stats = node.session.stats();
        assert_eq!(stats.ended.is_some(), node.ended.is_some());
        // One message of each class may be unfinished.
        assert!(stats.reassembly_bytes <= 2 * u64::from(MAX_BODY_BYTES));
        let longest = u64::from(MAX_BODY_BYTES);
        let recvs = u64::from(self.world.config.rq) * RINGS as u64;
        assert!(
            stats.unpopped_messages
                <= self.world.config.limits.unpopped_messages + recvs * u64::from(MOST_EPOCHS),
            "{} messages are held",
            stats.unpopped_messages
        );
        assert!(stats.unpopped_bytes <= longest * (recvs + 8) * u64::from(MOST_EPOCHS));
    }

    /// Everything that was begun is told once at most.
    fn end(mut self) {
        self.world.fence_and_drain();
        let closed = self.world.next_epoch();
        let done = self.world.nodes[0].done.iter().map(|(token, _)| *token);
        let tokens: Vec<u64> = done.chain(closed[0].failed.iter().map(|(token, _)| *token)).collect();
        let different: BTreeSet<u64> = tokens.iter().copied().collect();
        assert_eq!(different.len(), tokens.len(), "told twice: {tokens:?}");
    }
}

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let imm = |index: u8, kind: u8, lanes: u8, seq: u8| vec![op::IMMEDIATE, index, kind, lanes - 1, seq];
    let transfer =
        |seq: u8, index: u8, lanes: u8| vec![op::RECORD, 3, seq, index, lanes - 1, 3, b'a', b'b', b'c'];
    let told = |seq: u8, what: u8| vec![op::RECORD, what, seq, 1, 0, 1, b'x'];
    let standalone = |seq: u8| vec![op::RECORD, 0, seq, 0, 0, 4, b'n', b'o', b't', b'e'];
    let part = |scope: u8, key: u8, index: u8, ring: u8| {
        vec![
            op::RECORD,
            scope | 4,
            if scope == 3 { 0 } else { key },
            ring,
            0,
            key,
            index,
            3,
            6,
            0,
            2,
            index,
            7,
        ]
    };
    let submit = |what: u8, len: u16| [&[op::SUBMIT, what, 0, 1][..], &len.to_le_bytes()].concat();
    let credit = |word: u8, more: u8| vec![op::CREDIT, word, more];
    let pass = |n: u8| vec![op::PASS, n];
    let stories: Vec<Vec<Vec<u8>>> = vec![
        vec![transfer(0, 1, 1), transfer(1, 2, 1), imm(1, 0, 2, 2), transfer(2, 2, 2), imm(2, 2, 1, 3)],
        vec![standalone(1), standalone(2), standalone(2), standalone(5)],
        vec![told(0, 3 | 8), told(1, 3 | 8 | 16), vec![op::POP, 1, 8]],
        vec![
            part(1, 9, 0, 1),
            part(1, 9, 1, 1),
            part(3, 9, 2, 1),
            part(0, 4, 0, 0),
            part(0, 4, 1, 0),
            part(0, 4, 2, 0),
        ],
        vec![submit(0, 1000), credit(2, 1), submit(3, 5000), credit(0, 1), credit(3, 64), submit(14, 2000)],
        vec![vec![op::NOTIFY, 9, 3, 1, 2, 3], vec![op::EPOCH], pass(200), vec![op::NOTIFY, 0, 0], pass(255)],
        vec![submit(0, 9000), vec![op::CANCEL, 1], vec![op::EPOCH], transfer(0, 1, 1), vec![op::STEP, 3]],
        vec![vec![op::RAW_RECORD, 1, 1, 1, 0, 0, 52], vec![0; 52], vec![op::RAW_SEND, 1, 4, 0, 0, 0, 64]],
    ];
    let mut seeds = Vec::new();
    for how in [0u8, 1, 2 | 4, 1 | 2 | 8] {
        seeds.extend(stories.iter().map(|story| [vec![how], story.concat()].concat()));
    }
    seeds
}

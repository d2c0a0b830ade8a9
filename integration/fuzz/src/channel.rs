//! A two-sided channel against a peer that says and writes anything: frames, data messages, credit words, in any order and over
//! several epochs of one session. The input is the peer's part, and what the own host does meanwhile.
//!
//! Never a panic; a violation is told once and ends the epoch; memory that was not offered stays as it was; the pool gets every slot
//! back.

use std::collections::BTreeSet;

use baton_core::two_sided::codec::*;
use baton_core::two_sided::notes::Resolve;
use baton_core::two_sided::report::{TwoEnd, TwoViolation};
use baton_core::two_sided::setup::TwoLimits;
use baton_core::{Epoch, LaneId, NotifySeq, RegionId};

use crate::input::Input;
use crate::two_toy::*;
use crate::{control, message};

/// Bytes of a region; what lies behind is not the peer's.
const REGION_BYTES: usize = 16 << 10;
const SENTINEL: u8 = 0x5A;
/// Transfers and notifications of the own host at most, so that an input ends soon.
const MOST_OWN: u64 = 64;
const MOST_EPOCHS: u32 = 4;
const INBOX_BYTES: usize = 64 << 10;

mod op {
    pub(super) const FRAME: u8 = 0;
    pub(super) const RAW_FRAME: u8 = 1;
    pub(super) const MESSAGE: u8 = 2;
    pub(super) const RAW_MESSAGE: u8 = 3;
    pub(super) const CREDIT: u8 = 4;
    pub(super) const SUBMIT: u8 = 5;
    pub(super) const NOTIFY: u8 = 6;
    pub(super) const PASS: u8 = 7;
    pub(super) const STEP: u8 = 8;
    pub(super) const EPOCH: u8 = 9;
    pub(super) const CANCEL: u8 = 10;
    pub(super) const HOST: u8 = 11;
    pub(super) const GENUINE: u8 = 12;
    pub(super) const COUNT: u8 = 13;
}

struct Game {
    world: World,
    /// The number of the peer's next frame, had it kept the rules.
    next_frame: u64,
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

impl Game {
    /// `how`: whether the peer was an honest one to begin with, whether data carries checksums, how small the pool is, whether messages
    /// are received in two steps.
    fn new(how: u8) -> Game {
        let mut config = Config { first_recvs: 4, data_bytes: 2 * REGION_BYTES, ..Config::default() };
        config.data_crc = how & 2 != 0;
        config.gather = how & 4 != 0;
        config.heads = how & 16 != 0;
        config.pool.peer_slots = if how & 8 != 0 { 6 } else { config.pool.peer_slots };
        config.limits = TwoLimits { inbox_bytes: INBOX_BYTES, unpopped_bytes: 16 << 10, ..config.limits };
        let mut world = World::new(config, how.into());
        world.hostile = true;
        for node in &world.nodes {
            node.mem.limit.set(REGION_BYTES as u64);
            node.mem.set_data(REGION_BYTES, &[SENTINEL; REGION_BYTES]);
        }
        let mut game = Game { world, next_frame: 1, own: 0 };
        if how & 1 == 0 {
            game.world.settle();
            game.next_frame = game.world.nodes[0].channel.counters().frames_received + 1;
        }
        game.silence();
        game
    }

    /// From now on the peer's own channel says nothing: the input speaks for it.
    fn silence(&mut self) {
        self.world.frozen = (0..3).map(|index| (1, index)).collect();
        self.world.no_copies.push(1);
    }

    /// `None`: the input ends, or nothing more is of use.
    fn act(&mut self, input: &mut Input<'_>) -> Option<()> {
        match input.u8()? % op::COUNT {
            op::FRAME => self.frame(input)?,
            op::RAW_FRAME => self.raw_frame(input)?,
            op::MESSAGE => self.message(input)?,
            op::RAW_MESSAGE => self.raw_message(input)?,
            op::CREDIT => self.credit(input)?,
            op::SUBMIT => self.submit(input)?,
            op::NOTIFY => self.notify(input)?,
            op::PASS => self.world.pass(u64::from(input.u8()?) * 37),
            op::STEP => steps(&mut self.world, input.u8()?),
            op::EPOCH => self.next_epoch()?,
            op::CANCEL => {
                let token = u64::from(input.u8()?);
                let _ = self.world.nodes[0].channel.cancel(token);
                self.world.pump(0);
            }
            op::HOST => self.host(input)?,
            _ => {
                // What the peer's own channel has to say after all.
                self.world.frozen.clear();
                steps(&mut self.world, 64);
                self.next_frame = self.world.nodes[0].channel.counters().frames_received + 1;
                self.silence();
            }
        }
        Some(())
    }

    fn header(&self) -> FrameHeader {
        let ack = self.world.nodes[0].channel.counters().frames_sent;
        FrameHeader { session: SESSION, epoch: Epoch(self.world.epoch), seq: self.next_frame, ack }
    }

    /// A frame whose header may be changed in one place.
    fn frame(&mut self, input: &mut Input<'_>) -> Option<()> {
        let mut header = self.header();
        match input.u8()? {
            255 => header.seq = header.seq.wrapping_add(input.number()?),
            254 => header.ack = input.number()?,
            253 => header.epoch = Epoch(input.number32()?),
            252 => header.session.0 = input.number()?,
            _ => self.next_frame += 1,
        }
        let mut bytes = Vec::new();
        let (mut acks, mut pieces) = (Vec::new(), Vec::new());
        let frame = any_frame(input, &mut acks, &mut pieces)?;
        if encode_frame(header, &frame, &mut bytes).is_ok() {
            self.inject(0, &bytes);
        }
        Some(())
    }

    /// A frame of any type with any payload, in the right place.
    fn raw_frame(&mut self, input: &mut Input<'_>) -> Option<()> {
        let mut bytes = Vec::new();
        let blank = Frame::NotifyAck { up_to: NotifySeq(0) };
        encode_frame(self.header(), &blank, &mut bytes).expect("a frame");
        bytes.truncate(CONTROL_HEADER_BYTES);
        bytes[5] = input.u8()?;
        bytes.extend_from_slice(input.bytes()?);
        control::mend(&mut bytes);
        bytes.truncate(CONTROL_SLOT_BYTES);
        self.next_frame += 1;
        self.inject(0, &bytes);
        Some(())
    }

    fn message(&mut self, input: &mut Input<'_>) -> Option<()> {
        let what = input.u8()?;
        let kind = DataKind::ALL[usize::from(what % 5)];
        let lane = usize::from(what >> 7);
        let lane_seq = self.lane_seq(lane).wrapping_add(if what & 64 != 0 { input.number32()? } else { 0 });
        let mut blocks = Vec::new();
        let mut block = Block::NONE;
        if kind.is_pack() {
            for _ in 0..input.u8()? % 4 {
                blocks.push(any_block(input)?);
            }
            let bytes = blocks.iter().map(|block| block.len).fold(0, u32::saturating_add);
            block = Block::of_pack(blocks.len() as u32, bytes.saturating_add(blocks.len() as u32 * 40));
        } else if kind != DataKind::Nop {
            block = any_block(input)?;
        }
        let (session, epoch) = (SESSION, Epoch(self.world.epoch));
        let data_crc = what & 32 != 0;
        let header = DataHeader { kind, data_crc, session, epoch, lane_seq, block };
        let mut bytes = Vec::new();
        if encode_message(&header, &blocks, self.world.config.slot, &mut bytes).is_ok() {
            let data = vec![0xBB; DATA_HEADER_BYTES + block.len as usize - bytes.len()];
            if data_crc {
                append_data_crc(&mut bytes, &data);
            }
            bytes.extend(data);
            let head = if what & 16 == 0 { None } else { Some(input.u8()?) };
            self.inject_in_two(lane + 1, &bytes, head);
        }
        Some(())
    }

    /// A message of any bytes, which may be mended.
    fn raw_message(&mut self, input: &mut Input<'_>) -> Option<()> {
        let what = input.u8()?;
        let mut bytes = input.bytes()?.to_vec();
        bytes.truncate(self.world.config.slot as usize);
        if what & 1 != 0
            && let Some(head) = bytes.first_chunk_mut::<DATA_HEADER_BYTES>()
        {
            head[8..16].copy_from_slice(&SESSION.0.to_le_bytes());
            head[16..20].copy_from_slice(&self.world.epoch.to_le_bytes());
            head[56..60].copy_from_slice(&self.lane_seq(usize::from(what >> 7)).to_le_bytes());
            message::mend(&mut bytes);
        }
        self.inject(usize::from(what >> 7) + 1, &bytes);
        Some(())
    }

    fn lane_seq(&self, lane: usize) -> u32 {
        self.world.nodes[0].channel.stats().lanes[lane].received as u32
    }

    /// Bytes into the next RECV, if there is one.
    fn inject(&mut self, index: usize, bytes: &[u8]) {
        self.inject_in_two(index, bytes, None);
    }

    /// The same, received in two steps, with so long a head.
    fn inject_in_two(&mut self, index: usize, bytes: &[u8], head: Option<u8>) {
        if self.world.nodes[0].recvs(index) > 0 {
            self.world.false_heads = head.map(usize::from);
            self.world.inject(1, index, bytes);
            self.world.false_heads = None;
            self.turns();
        }
    }

    fn turns(&mut self) {
        (0..200).take_while(|_| self.world.turn()).for_each(drop);
    }

    /// A word of the own credit page, of this epoch or not.
    fn credit(&mut self, input: &mut Input<'_>) -> Option<()> {
        let (what, count) = (input.u8()?, input.number()?);
        let word = usize::from(what & 3);
        let tag = if what & 64 == 0 { u64::from(self.world.epoch) } else { u64::from(what) };
        let stats = self.world.nodes[0].channel.stats();
        let known =
            [stats.control_known, stats.request_known, stats.lanes[0].known, stats.lanes[1].known][word];
        let count = if what & 128 == 0 { known + count % 32 } else { count };
        let bytes = (tag << 48 | count & ((1 << 48) - 1)).to_le_bytes();
        let node = &mut self.world.nodes[0];
        node.mem.set_credit(word, &bytes);
        node.channel.poll_credit(&node.mem);
        self.world.pump(0);
        Some(())
    }

    fn submit(&mut self, input: &mut Input<'_>) -> Option<()> {
        let (what, at, len) = (input.u8()?, input.u16()?, input.u16()?);
        let direction = if what & 1 == 0 { Direction::Write } else { Direction::Read };
        let (at, len) = (usize::from(at) % REGION_BYTES, usize::from(len) % REGION_BYTES);
        let len = len.min(REGION_BYTES - at);
        let message = if what & 2 == 0 { None } else { Some(&b"told"[..]) };
        let pieces = pieces(&[(at, at, len), (0, 64, usize::from(what >> 4))]);
        if self.may_begin() {
            let node = &mut self.world.nodes[0];
            // Too many, or the epoch has ended.
            let _ = node.channel.submit(self.world.now, self.own, direction, pieces, message);
            self.world.pump(0);
            self.turns();
        }
        Some(())
    }

    fn notify(&mut self, input: &mut Input<'_>) -> Option<()> {
        let (what, message) = (input.u8()?, input.bytes()?);
        let resolve = if what & 1 == 0 { Resolve::Taken } else { Resolve::Sent };
        if self.may_begin() {
            let deadline = self.world.now.plus_ms(u64::from(what) * 300);
            let _ = self.world.nodes[0].channel.notify(self.own, message, resolve, deadline);
            self.world.pump(0);
            self.turns();
        }
        Some(())
    }

    fn may_begin(&mut self) -> bool {
        self.own += 1;
        self.own <= MOST_OWN && self.world.nodes[0].ended.is_none()
    }

    /// What may happen at this side meanwhile.
    fn host(&mut self, input: &mut Input<'_>) -> Option<()> {
        let what = input.u8()?;
        match what % 6 {
            0 => self.world.nodes[0].mem.withdrawn.set(what & 64 != 0),
            1 => self.world.fail_copy = Some((0, Status::CopyFailed)),
            2 => self.world.nodes[0].popped_by_itself = what & 64 != 0,
            3 => self.world.frozen.push((0, usize::from(what >> 6) % 3)),
            4 => self.world.no_copies.push(0),
            _ => {
                self.world.frozen.retain(|(node, _)| *node == 1);
                self.world.no_copies.retain(|node| *node == 1);
                self.turns();
            }
        }
        Some(())
    }

    fn next_epoch(&mut self) -> Option<()> {
        if self.world.epoch == MOST_EPOCHS {
            return None;
        }
        self.world.fail_copy = None;
        self.world.next_epoch();
        self.next_frame = 1;
        self.silence();
        Some(())
    }

    fn check(&self) {
        let node = &self.world.nodes[0];
        let violated = matches!(node.ended, Some(TwoEnd::Violation(_)));
        let violations = node.channel.counters().violations;
        // What arrives after the end for another reason still counts.
        assert!(violations <= 1 && (violations == 1 || !violated), "{violations} of which the first is told");
        assert!(violations == 0 || node.ended.is_some(), "a violation ends the epoch");
        if let Some(TwoEnd::Violation(violation)) = &node.ended {
            assert!(!TwoViolation::to_string(violation).is_empty());
        }
        node.pool.audit();
        let stats = node.channel.stats();
        assert!(stats.inbox_bytes <= INBOX_BYTES as u64, "{} bytes of bookkeeping", stats.inbox_bytes);
        let pool = node.pool.stats();
        assert!(
            pool.lent - pool.sending <= self.world.config.pool.peer_slots,
            "more RECVs than the peer's share"
        );
        let behind = node.mem.data(REGION_BYTES, REGION_BYTES);
        assert!(behind == [SENTINEL; REGION_BYTES], "bytes behind the region were written");
    }

    /// Everything that was begun is told once at most, and every slot comes back.
    fn end(mut self) {
        self.world.fail_copy = None;
        self.world.next_epoch();
        let done = &self.world.nodes[0].done;
        let tokens: BTreeSet<u64> = done.iter().map(|(token, _)| *token).collect();
        assert_eq!(tokens.len(), done.len(), "told twice: {done:?}");
    }
}

fn steps(world: &mut World, most: u8) {
    (0..=most).take_while(|_| world.step()).for_each(drop);
}

fn any_region(input: &mut Input<'_>) -> Option<RegionId> {
    Some(match input.u8()? {
        0..=199 => REGION,
        200..=215 => READ_ONLY,
        216..=231 => WRITE_ONLY,
        232..=247 => WITHDRAWN,
        _ => RegionId(input.number()?),
    })
}

fn any_block(input: &mut Input<'_>) -> Option<Block> {
    let (transfer, region) = (input.number()?, any_region(input)?);
    let (offset, chunk, total) = (input.number()?, input.number32()?, input.number32()?);
    Some(Block { transfer, region, offset, chunk, total, len: input.number32()? })
}

fn any_direction(input: &mut Input<'_>) -> Option<Direction> {
    Some(if input.u8()? & 1 == 0 { Direction::Write } else { Direction::Read })
}

fn any_status(input: &mut Input<'_>) -> Option<Status> {
    Some(Status::ALL[usize::from(input.u8()?) % Status::ALL.len()])
}

/// A frame that the encoder may refuse; its lists go where the caller says.
fn any_frame<'a, 'i: 'a>(
    input: &mut Input<'i>,
    acks: &'a mut Vec<Ack>,
    pieces: &'a mut Vec<ReadPiece>,
) -> Option<Frame<'a>> {
    let kind = Kind::ALL[usize::from(input.u8()?) % Kind::ALL.len()];
    Some(match kind {
        Kind::CreditRequest => {
            let (lane, want) = (LaneId(input.u8()?), input.number32()?);
            Frame::CreditRequest { lane, want, waiting_bytes: input.number()?, oldest_wait_us: 0 }
        }
        Kind::DataAck => {
            let released_below = input.number()?;
            for _ in 0..input.u8()? % 5 {
                let (transfer, direction, status) =
                    (input.number()?, any_direction(input)?, any_status(input)?);
                acks.push(Ack { transfer, direction, status, chunks_done: input.number32()? });
            }
            Frame::DataAck { released_below, acks }
        }
        Kind::SessionOpen => any_opening(input)?,
        Kind::Notify => {
            let (seq, after_transfer) = (NotifySeq(input.number()?), input.number()?);
            let (total_len, offset) = (input.number32()?, input.number32()?);
            Frame::Notify { seq, after_transfer, total_len, offset, bytes: input.bytes()? }
        }
        Kind::NotifyAck => Frame::NotifyAck { up_to: NotifySeq(input.number()?) },
        Kind::ReadReq => {
            let (transfer, first, last) = (input.number()?, input.number32()?, input.u8()? & 1 == 0);
            for _ in 0..input.u8()? % 5 {
                let (region, offset) = (any_region(input)?, input.number()?);
                pieces.push(ReadPiece { region, offset, len: input.number()? });
            }
            Frame::ReadReq { transfer, first, last, pieces }
        }
        Kind::XferNack => {
            let (transfer, direction, status) = (input.number()?, any_direction(input)?, any_status(input)?);
            Frame::XferNack { transfer, direction, status, at: input.number32()? }
        }
        Kind::Abort => Frame::Abort { transfer: input.number()?, direction: any_direction(input)? },
        Kind::AbortAck => {
            let (transfer, direction, status) = (input.number()?, any_direction(input)?, any_status(input)?);
            Frame::AbortAck { transfer, direction, status, chunks: input.number32()? }
        }
        Kind::CreditReclaim => Frame::CreditReclaim { lane: LaneId(input.u8()?), count: input.number32()? },
    })
}

/// Most of the time what was agreed.
fn any_opening(input: &mut Input<'_>) -> Option<Frame<'static>> {
    let config = Config::default();
    let (what, released_below) = (input.u8()?, input.number()?);
    let other = if what == 0 { 0 } else { input.number32()? };
    let value = |nth, agreed| if what == nth { other } else { agreed };
    Some(Frame::SessionOpen {
        slot_bytes: value(1, config.slot),
        request_depth: value(2, config.limits.request_depth),
        notify_window: value(3, config.limits.notify_window),
        lanes: value(4, config.lanes.into()) as u8,
        released_below,
    })
}

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let write =
        |transfer: u8, chunk: u8, total: u8| vec![op::MESSAGE, 0, transfer, 0, 100, chunk, total, 200];
    let frame = |kind: Kind, rest: &[u8]| [&[op::FRAME, 0, kind as u8 - 1], rest].concat();
    let note = |seq: u8, after: u8| frame(Kind::Notify, &[seq, after, 5, 0, 5, b'h', b'e', b'l', b'l', b'o']);
    let read = frame(Kind::ReadReq, &[2, 0, 0, 2, 0, 10, 100, 0, 20, 100]);
    let submit = |what: u8| vec![op::SUBMIT, what, 0, 1, 0, 8];
    let open = frame(Kind::SessionOpen, &[0, 1]);
    let ack = |transfer: u8, direction: u8| frame(Kind::DataAck, &[1, 1, transfer, direction, 0, 3]);
    let credit = |word: u8| vec![op::CREDIT, word, 8];
    let pass = |n: u8| vec![op::PASS, n];
    let stories: Vec<Vec<Vec<u8>>> = vec![
        vec![write(1, 0, 2), write(1, 1, 2), note(1, 1), write(2, 0, 1), note(2, 3), write(3, 0, 1)],
        vec![
            vec![op::MESSAGE, 3, 2, 1, 0, 0, 0, 1, 10, 2, 0, 0, 0, 1, 10],
            read.clone(),
            pass(3),
            frame(Kind::Abort, &[2, 1]),
            frame(Kind::Abort, &[3, 0]),
        ],
        vec![submit(2), ack(1, 0), submit(1), credit(2), credit(0), vec![op::MESSAGE, 1, 2, 0, 0, 0, 1, 200]],
        vec![
            vec![op::NOTIFY, 0, 5, 1, 2, 3, 4, 5],
            frame(Kind::NotifyAck, &[1]),
            vec![op::NOTIFY, 3, 2, 1, 2],
            pass(200),
        ],
        vec![
            frame(Kind::CreditRequest, &[0, 9, 100]),
            frame(Kind::CreditReclaim, &[1, 2]),
            pass(100),
            frame(Kind::XferNack, &[1, 0, 3, 0]),
        ],
        vec![
            submit(0),
            vec![op::CANCEL, 1],
            frame(Kind::AbortAck, &[1, 0, 9, 2]),
            vec![op::EPOCH],
            open.clone(),
        ],
        vec![write(1, 0, 2), vec![op::EPOCH], open.clone(), write(1, 1, 2), ack(1, 0), vec![op::EPOCH], open],
        vec![vec![op::HOST, 4], write(1, 0, 1), vec![op::HOST, 1], vec![op::HOST, 5], vec![op::STEP, 9]],
        vec![vec![op::RAW_FRAME, 5, 8, 9, 0, 0, 0, 0, 0, 0, 0], vec![op::RAW_MESSAGE, 1, 70], vec![3; 70]],
        vec![vec![op::GENUINE], write(1, 0, 1)],
    ];
    let mut seeds = Vec::new();
    for how in [0u8, 2 | 4, 8, 16] {
        seeds.extend(stories.iter().map(|story| [vec![how], story.concat()].concat()));
    }
    let from_the_start = [vec![1], frame(Kind::SessionOpen, &[0, 1]), write(1, 0, 1), note(1, 0)].concat();
    seeds.push(from_the_start);
    seeds
}

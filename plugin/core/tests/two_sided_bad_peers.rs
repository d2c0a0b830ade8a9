//! What a bad peer sends is counted by its cause, answered, bounded in memory, and costs a well-behaved peer of the same engine no
//! step.

mod two_toy;

use baton_core::two_sided::codec::*;
use baton_core::two_sided::pool::{PeerKey, PoolConfig};
use baton_core::two_sided::report::*;
use baton_core::two_sided::setup::TwoLimits;
use baton_core::{Epoch, LaneId, RegionId, SessionId};
use two_toy::*;

/// The engine is node 1 of both worlds; node 0 of the second one is bad.
struct Beside {
    engine: Engine,
    /// Attacks so far.
    n: u64,
}

const LEN: usize = 150_000;
const INBOX_BYTES: usize = 4_000;
const PEER_SLOTS: u32 = 24;
/// What was refused is remembered by its status alone, at most 64 · the request depth of it.
const REMEMBERED_BYTES: usize = 64 * 16 * 64;

fn engine(peers: u32) -> Engine {
    let pool = PoolConfig { max_slabs: 16, peer_slots: PEER_SLOTS, ..Config::default().pool };
    let limits = TwoLimits { inbox_bytes: INBOX_BYTES, ..Config::default().limits };
    Engine::with_config(peers, Config { pool, limits, first_recvs: 4, peer: PeerKey(0), ..Config::default() })
}

/// Turns of the good peer's transfer; in between, what `others` does.
fn turns(engine: &mut Engine, mut others: impl FnMut(&mut Engine)) -> u64 {
    engine.with(0, |world| {
        world.nodes[0].mem.set_data(1000, &pattern(1, LEN));
        world.submit(0, 1, Direction::Write, &[(1000, 1000, LEN)], Some(b"good"));
    });
    while engine.worlds[0].result_of(0, 1).is_none() {
        engine.turn(0);
        others(engine);
        assert!(engine.steps[0] < 100_000, "{:#?}", engine.worlds[0].nodes[0].channel.stats());
    }
    assert_eq!(engine.worlds[0].result_of(0, 1), Some(&Ok(())));
    assert_eq!(engine.worlds[0].nodes[1].mem.data(1000, LEN), pattern(1, LEN));
    assert_eq!(engine.worlds[0].nodes[1].ended, None);
    engine.steps[0]
}

impl Beside {
    /// Runs the good peer's transfer while the bad peer attacks at every third turn, as long as it finds a RECV.
    fn run(index: usize, attack: impl Fn(&mut World, u64)) -> Beside {
        let alone = turns(&mut engine(1), |_| ());
        let mut beside = Beside { engine: engine(2), n: 0 };
        for _ in 0..200 {
            beside.engine.turn(1);
        }
        // Its own frames would break the numbering of those it makes up.
        let world = &mut beside.engine.worlds[1];
        world.hostile = true;
        world.frozen.push((0, 0));
        let n = &mut beside.n;
        let taken = turns(&mut beside.engine, |engine| {
            engine.turn(1);
            if engine.steps[1].is_multiple_of(3) && engine.worlds[1].nodes[1].recvs(index) > 0 {
                engine.with(1, |world| attack(world, *n));
                *n += 1;
            }
            let (bad, pool) = (&engine.worlds[1].nodes[1], engine.pool.stats());
            assert!(
                bad.channel.stats().inbox_bytes <= (INBOX_BYTES + REMEMBERED_BYTES) as u64,
                "{:#?}",
                bad.channel.stats()
            );
            assert!(pool.lent <= 2 * PEER_SLOTS + 8, "{pool:?}");
        });
        assert!(taken <= alone + alone / 4, "{taken} turns beside a bad peer, {alone} alone");
        assert!(beside.n > 0);
        beside.engine.pool.audit();
        beside
    }

    fn counters(&self) -> TwoCounters {
        *self.engine.worlds[1].nodes[1].channel.counters()
    }

    /// The bad peer's session ended by this violation, counted once.
    fn assert_violation(&self, text: &str) {
        let Some(TwoEnd::Violation(violation)) = &self.engine.worlds[1].nodes[1].ended else {
            panic!("{:?}", self.engine.worlds[1].nodes[1].ended);
        };
        let told = violation.to_string();
        assert!(told.contains(text), "{told:?} does not say {text:?}");
        assert_eq!(self.counters().violations, 1);
    }

    /// The session goes on: what was wrong was refused or dropped.
    fn assert_goes_on(&self) {
        assert_eq!(self.engine.worlds[1].nodes[1].ended, None);
        assert_eq!(self.counters().violations, 0);
        let data = self.engine.worlds[1].nodes[1].mem.data(0, 64);
        assert_eq!(data, [0; 64], "nothing was placed where nothing may be");
    }
}

/// Frame with the number that follows, the n-th of the bad peer's own making.
fn frame(world: &mut World, n: u64, frame: &Frame<'_>) {
    world.say(0, |header| header.seq += n, frame);
}

fn write(region: RegionId, transfer: u64, chunk: u32, total: u32, offset: u64) -> Block {
    Block { transfer, region, offset, chunk, total, len: 10 }
}

/// The n-th message of the bad peer's own making.
fn put(world: &mut World, n: u64, block: Block) {
    world.put(0, DataKind::Write, block, |header| header.lane_seq = n as u32);
}

/// Bytes changed, with a checksum that is right.
fn bent(mut bytes: Vec<u8>, data: bool, change: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    change(&mut bytes);
    let (at, end) = if data { (60, 64) } else { (44, bytes.len()) };
    bytes[at..at + 4].fill(0);
    let crc = crc32c::crc32c(&bytes[..end]);
    bytes[at..at + 4].copy_from_slice(&crc.to_le_bytes());
    bytes
}

fn bent_frame(world: &mut World, frame: &Frame<'_>, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = Vec::new();
    encode_frame(world.next_frame(0), frame, &mut bytes).unwrap();
    let bytes = bent(bytes, false, change);
    world.inject(0, 0, &bytes);
}

fn bent_message(world: &mut World, change: impl FnOnce(&mut Vec<u8>)) {
    let bytes = world.message(0, DataKind::Write, write(REGION, 1, 0, 1, 100_000), |_| ());
    let bytes = bent(bytes, true, change);
    world.inject(0, 1, &bytes);
}

#[test]
fn a_frame_field_out_of_range() {
    let reclaim = Frame::CreditReclaim { lane: LaneId(0), count: 1 };
    Beside::run(0, |world, _| bent_frame(world, &reclaim, |bytes| bytes[48] = 64))
        .assert_violation("control frame");
    let nack = Frame::XferNack { transfer: 1, direction: Direction::Write, status: Status::Range, at: 0 };
    Beside::run(0, |world, _| bent_frame(world, &nack, |bytes| bytes[57] = 11))
        .assert_violation("control frame");
}

#[test]
fn a_header_field_out_of_range() {
    let ack = Frame::DataAck { released_below: 1, acks: &[] };
    for at in [0, 4, 5, 6, 20, 40] {
        Beside::run(0, |world, _| bent_frame(world, &ack, |bytes| bytes[at] = 0xEE))
            .assert_violation("control frame");
    }
    for at in [0, 4, 5, 6, 52] {
        Beside::run(1, |world, _| bent_message(world, |bytes| bytes[at] = 0xEE))
            .assert_violation("data message");
    }
}

#[test]
fn a_foreign_session() {
    let ack = Frame::DataAck { released_below: 1, acks: &[] };
    let beside = Beside::run(0, |world, n| {
        world.say(0, |header| (header.session, header.seq) = (SessionId(3), header.seq + n), &ack)
    });
    beside.assert_goes_on();
    assert!(beside.counters().stale_session > 0);
    let beside = Beside::run(1, |world, _| {
        world.put(0, DataKind::Write, write(REGION, 1, 0, 1, 0), |header| header.session = SessionId(3));
    });
    beside.assert_goes_on();
    assert!(beside.counters().stale_session > 0);
}

#[test]
fn a_stale_epoch() {
    let abort = Frame::Abort { transfer: 1, direction: Direction::Write };
    let beside = Beside::run(0, |world, n| {
        world.say(0, |header| (header.epoch, header.seq) = (Epoch(7), header.seq + n), &abort)
    });
    beside.assert_goes_on();
    assert!(beside.counters().stale_epoch > 0);
    let beside = Beside::run(1, |world, _| {
        world.put(0, DataKind::Write, write(REGION, 1, 0, 1, 0), |header| header.epoch = Epoch(7));
    });
    beside.assert_goes_on();
    assert!(beside.counters().stale_epoch > 0);
}

#[test]
fn an_unknown_region() {
    let beside = Beside::run(1, |world, n| put(world, n, write(RegionId(99), n + 1, 0, 1, 0)));
    beside.assert_goes_on();
    let counters = beside.counters();
    assert!(counters.refused_chunks > 0 && counters.nacks_sent > 0, "{counters:?}");
}

#[test]
fn a_range_that_is_off_by_one() {
    let end = Config::default().data_bytes as u64;
    let beside = Beside::run(1, |world, n| put(world, n, write(REGION, n + 1, 0, 1, end - 9)));
    beside.assert_goes_on();
    let counters = beside.counters();
    assert!(counters.refused_chunks > 0 && counters.nacks_sent > 0, "{counters:?}");
    let data = beside.engine.worlds[1].nodes[1].mem.data(end as usize - 64, 64);
    assert_eq!(data, [0; 64], "not even the part that fits");
}

#[test]
fn a_duplicate_chunk() {
    let beside = Beside::run(1, |world, n| put(world, n, write(REGION, 1, 0, 2, 1000 + 100 * n)));
    beside.assert_goes_on();
    assert!(beside.counters().duplicate_chunks > 0);
    let data = beside.engine.worlds[1].nodes[1].mem.data(1100, 2000);
    assert_eq!(data, [0; 2000], "only the first one was placed");
}

#[test]
fn a_chunk_after_its_abort() {
    let abort = Frame::Abort { transfer: 1, direction: Direction::Write };
    let beside = Beside::run(1, |world, n| match n {
        0 => frame(world, 0, &abort),
        _ => put(world, n - 1, write(REGION, 1, 0, 2, 0)),
    });
    beside.assert_goes_on();
    let counters = beside.counters();
    assert!(counters.aborts_received == 1 && counters.ended_chunks > 0, "{counters:?}");
}

#[test]
fn one_chunk_more_than_a_transfer_may_have() {
    let too_many = (MAX_CHUNKS + 1).to_le_bytes();
    Beside::run(1, |world, _| bent_message(world, |bytes| bytes[48..52].copy_from_slice(&too_many)))
        .assert_violation("data message");
    // A READ that would take as many is refused, since its pieces may be of any length.
    let pieces = [ReadPiece { region: REGION, offset: 0, len: u64::MAX }];
    let beside = Beside::run(0, |world, n| {
        frame(world, n, &Frame::ReadReq { transfer: n + 1, first: 0, last: true, pieces: &pieces });
    });
    beside.assert_goes_on();
    assert!(beside.counters().nacks_sent > 0);
}

#[test]
fn reads_that_never_come_to_their_end() {
    let pieces = [ReadPiece { region: REGION, offset: 0, len: 1 << 20 }; MAX_READ_PIECES];
    let beside = Beside::run(0, |world, n| {
        frame(world, n, &Frame::ReadReq { transfer: n + 1, first: 0, last: false, pieces: &pieces });
    });
    let stats = beside.engine.worlds[1].nodes[1].channel.stats();
    assert!(stats.counters.nacks_sent > 0, "{stats:#?}");
}

#[test]
fn credit_that_goes_down() {
    let beside = Beside::run(1, |world, n| {
        let word = (1u64 << 48) | (n % 2);
        world.nodes[1].mem.set_credit(2, &word.to_le_bytes());
        let node = &mut world.nodes[1];
        node.channel.poll_credit(&node.mem);
    });
    beside.assert_goes_on();
    assert!(beside.counters().credit_words_lower > 0, "{:?}", beside.counters());
}

#[test]
fn credit_above_the_depth() {
    let beside = Beside::run(1, |world, _| {
        world.nodes[1].mem.set_credit(2, &((1u64 << 48) | 1000).to_le_bytes());
        let node = &mut world.nodes[1];
        node.channel.poll_credit(&node.mem);
        world.take_events(1);
    });
    beside.assert_violation("credit word 2");
}

#[test]
fn a_flood_of_credit_requests() {
    let request =
        Frame::CreditRequest { lane: LaneId(1), want: u32::MAX, waiting_bytes: u64::MAX, oldest_wait_us: 0 };
    let beside = Beside::run(0, |world, n| frame(world, n, &request));
    beside.assert_goes_on();
    assert!(beside.counters().credit_requests_ignored > 0);
    assert!(beside.engine.pool.stats().lent <= 2 * PEER_SLOTS);
}

#[test]
fn transfers_without_end_of_which_only_scattered_chunks_come() {
    let beside = Beside::run(1, |world, n| {
        let (transfer, chunk) = (1 + n % 16, MAX_CHUNKS - 1 - 64 * (n / 16) as u32);
        put(world, n, write(REGION, transfer, chunk, MAX_CHUNKS, 2000));
    });
    beside.assert_goes_on();
    let counters = beside.counters();
    assert!(counters.refused_chunks > 0 && counters.nacks_sent > 0, "{counters:?}");
}

#[test]
fn more_transfers_than_were_granted() {
    let depth = u64::from(Config::default().limits.request_depth);
    let beside = Beside::run(1, |world, n| put(world, n, write(REGION, n * depth + 1, 0, 2, 2000)));
    beside.assert_violation("granted are");
}

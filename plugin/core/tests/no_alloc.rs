//! After warm-up a repost allocates nothing, and costs little.

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_core::notify::{Carry, NotifyMode, Tell};
use baton_core::peer::*;
use baton_core::plan::{Pair, Plan, PlanLimits};
use baton_core::prepared::{KeyTable, LaneRails, LaneSplit, Prepared};
use baton_core::{Epoch, Instance, Nanos, SessionId};
use baton_counting_alloc::allocations;
use baton_fabric::*;

/// A peer that never returns credit: what it granted at the start lasts for the test.
struct Page;

impl SessionMemory for Page {
    fn read_record(&self, _: RingId, _: u32, _: &mut [u8]) {
        panic!("nothing is received here");
    }
    fn stage_record(&self, _: RingId, offset: u32, _: &[u8]) -> (u64, u64) {
        (u64::from(offset), 5)
    }
    fn read_slot(&self, _: RingId, _: u32, _: u32, _: &mut [u8]) {
        panic!("nothing is received here");
    }
    fn stage_credit(&self, slot: u32, _: &[u8]) -> (u64, u64) {
        (u64::from(slot), 6)
    }
    fn load_credit(&self, _: usize) -> u64 {
        0
    }
}

fn session(lanes: u32, notify: NotifyMode) -> Session {
    let lane = |slot| LaneSetup {
        endpoint: EndpointId { slot, generation: 1 },
        sq_depth: 1024,
        rq_depth: 256,
        peer_ring_addr: 0x1000,
        peer_ring_key: 3,
        ring_bytes: 32 * 1024,
    };
    let setup = SessionSetup {
        own: Instance([1; 16]),
        peer: Instance([2; 16]),
        session: SessionId(1),
        epoch: Epoch(1),
        control: lane(100),
        lanes: (0..lanes).map(lane).collect(),
        peer_credit_addr: 0x9000,
        peer_credit_key: 4,
        caps: Caps {
            max_sq_depth: 1024,
            max_rq_depth: 1024,
            max_message_bytes: 4 << 20,
            longest_read_bytes: 4 << 20,
            inline_bytes: 256,
            max_send_sge: 1,
            default_lanes: 1,
            lane_sq_depth: 1024,
            stripe_min_bytes: 1 << 20,
            immediate: true,
            owner_revokes: true,
            needs_service: false,
            vram: false,
            reads_behind_fence: true,
            headed_bytes: 0,
            pack_below_bytes: 0,
        },
        notify,
        limits: SessionLimits::default(),
        carry: Carry::default(),
    };
    Session::new(setup, Nanos(0))
}

fn prepared(op: Op, descriptors: u64, lanes: u8) -> Arc<Prepared> {
    let pairs = (0..descriptors)
        .map(|n| Pair {
            local_addr: 0x10000 + n * 8192,
            remote_addr: 0x90000 + n * 8192,
            len_bytes: 4096,
            local: 0,
            remote: 0,
        })
        .collect();
    let plan = Plan::build(op, pairs, PlanLimits::default()).unwrap();
    Arc::new(Prepared::new(&plan, &[KeyTable::whole(&1)], &[KeyTable::whole(&2)], &split(lanes)).unwrap())
}

fn split(lane_count: u8) -> LaneSplit<'static> {
    const LANES: [LaneRails; 64] = [LaneRails { own: 0, peer: 0 }; 64];
    LaneSplit {
        lanes: &LANES[..usize::from(lane_count)],
        max_message_bytes: 4 << 20,
        stripe_min_bytes: 1 << 16,
        first_lane: 0,
        lane_map_generation: 1,
    }
}

/// Submits, posts, completes; returns how many transfers ended.
fn round(session: &mut Session, page: &Page, work: &Arc<Prepared>, tell: Tell<'_>) -> u32 {
    let now = Nanos(1);
    session.submit_telling(now, 1, work.clone(), tell).unwrap();
    // A batch per lane and slice at most, twice over.
    let mut sent = [(EndpointId { slot: 0, generation: 0 }, 0u64); 64];
    let mut done = 0;
    loop {
        let mut batches = 0;
        while let Some(action) = session.next_action(now, page) {
            let Action::Post { endpoint, batch } = action else { panic!("no RECV here") };
            sent[batches] = (endpoint, batch.first_seq + batch.len() as u64 - 1);
            batches += 1;
        }
        if batches == 0 {
            return done;
        }
        for &(endpoint, seq) in &sent[..batches] {
            let completion = Completion {
                endpoint,
                kind: CompletionKind::Send,
                status: WcStatus::Success,
                seq,
                len_bytes: 0,
            };
            session.on_completion(now, &completion, page);
        }
        while let Some(event) = session.next_event() {
            assert_eq!(event, Event::XferDone { token: 1, result: Ok(()) });
            done += 1;
        }
    }
}

fn check(name: &str, work: &Arc<Prepared>, lanes: u32, message: Option<&[u8]>) {
    let tells = [Tell::message(message), Tell { message, id: Some(7) }];
    tells.into_iter().for_each(|tell| check_telling(name, work, lanes, tell));
}

fn check_telling(name: &str, work: &Arc<Prepared>, lanes: u32, tell: Tell<'_>) {
    check_in(NotifyMode::Immediate, name, work, lanes, tell);
    check_in(NotifyMode::Send, name, work, lanes, tell);
}

fn check_in(notify: NotifyMode, name: &str, work: &Arc<Prepared>, lanes: u32, tell: Tell<'_>) {
    let mut session = session(lanes, notify);
    for _ in 0..3 {
        assert_eq!(round(&mut session, &Page, work, tell), 1);
    }
    let rounds = 3;
    let allocations = allocations(|| {
        for _ in 0..rounds {
            assert_eq!(round(&mut session, &Page, work, tell), 1);
        }
    });
    assert_eq!(allocations, 0, "{name} with {notify:?}: allocations in {rounds} reposts");
}

#[test]
fn a_repost_allocates_nothing() {
    let long = vec![7u8; 3000];
    for (op, lanes, descriptors) in [
        (Op::Write, 1, 128),
        (Op::Read, 1, 128),
        (Op::Write, 4, 128),
        (Op::Read, 4, 128),
        (Op::Write, 2, 5000),
    ] {
        let work = prepared(op, descriptors, lanes);
        for message in [None, Some(&b"short"[..]), Some(&long)] {
            check(&format!("{op:?} of {descriptors} over {lanes} lanes"), &work, u32::from(lanes), message);
        }
    }
    let empty = prepared(Op::Write, 0, 1);
    check("a message without data", &empty, 1, Some(b"hello"));
    measure();
}

/// Prints, never asserts: `cargo test --release -p baton-core --test no_alloc -- --nocapture`.
fn measure() {
    let work = prepared(Op::Write, 128, 1);
    let mut session = session(1, NotifyMode::Immediate);
    let rounds = 200;
    let start = Instant::now();
    for _ in 0..rounds {
        round(&mut session, &Page, &work, Tell::message(Some(b"a message")));
    }
    let each = start.elapsed().as_nanos() / rounds;
    println!("submit + post + complete, 128 descriptors, notified: {each} ns");

    let pairs: Vec<Pair> = (0..120_000u64)
        .map(|n| {
            let at = (n * 7_919) % 120_000 * 8192;
            Pair { local_addr: at, remote_addr: at ^ 0x5A_0000, len_bytes: 4096, local: 0, remote: 0 }
        })
        .collect();
    for op in [Op::Write, Op::Read] {
        let once = || {
            let pairs = pairs.clone();
            let start = on_cpu();
            let plan = Plan::build(op, pairs, PlanLimits::default()).unwrap();
            let prepared =
                Prepared::new(&plan, &[KeyTable::whole(&1)], &[KeyTable::whole(&2)], &split(4)).unwrap();
            (on_cpu() - start, prepared.templates().len())
        };
        let (best, pieces) = (0..7).map(|_| once()).min().expect("seven runs");
        println!("plan + prepare of {pieces} {op:?} pieces in random order: {best:?} of CPU time");
    }
}

/// Processor time of this thread, so that a busy machine does not count.
fn on_cpu() -> Duration {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    Duration::from_nanos(stat.split(' ').next().and_then(|ns| ns.parse().ok()).unwrap_or(0))
}

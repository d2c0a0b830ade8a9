//! What the two-sided backend executes, on both sides: posts, arrivals, copies, notifications.

use std::cell::RefCell;
use std::sync::Arc;

use baton_core::Nanos;
use baton_core::two_sided::chunks::{ChunkMap, Piece};
use baton_core::two_sided::codec::Direction;
use baton_core::two_sided::notes::Resolve;
use baton_core::two_sided::report::TwoEvent;
use baton_driver::two_sided::Executor;
use baton_fabric::{Completion, Fabric};

use crate::steps::{WARM_UP, step};
use crate::two_pair::{Pair, REGION, Setting};
use crate::wire;

// Each has a panic of its own: functions that are alike become one, which callgrind finds under one name.
counted! {
    /// One block of 4 KiB, gathered: taken over, posted.
    fn counted_two_post_1(exec: &mut Executor, now: Nanos, map: ChunkMap) {
        exec.channel.submit_cut(now, 1, Direction::Write, map, None).expect("taken");
        exec.drive(now);
    }
    /// 128 blocks of 64 bytes, packed and gathered, 29 a message.
    fn counted_two_post_128(exec: &mut Executor, now: Nanos, map: ChunkMap) {
        exec.channel.submit_cut(now, 1, Direction::Write, map, None).expect("taken");
        exec.drive(now);
    }
    /// One block of 64 bytes that is copied into a slot.
    fn counted_two_copy_1(exec: &mut Executor, now: Nanos, map: ChunkMap) {
        exec.channel.submit_cut(now, 1, Direction::Write, map, None).expect("taken");
        exec.drive(now);
    }
    /// One block of 64 bytes arrives: checked, placed, its RECV posted again, the transfer acknowledged.
    fn counted_two_place_1(exec: &mut Executor, now: Nanos, arrived: &[Completion]) {
        exec.on_completions(now, arrived);
        assert!(exec.drive(now), "something to copy");
    }
    /// A message of 29 blocks of 64 bytes arrives.
    fn counted_two_place_29(exec: &mut Executor, now: Nanos, arrived: &[Completion]) {
        exec.on_completions(now, arrived);
        assert!(exec.drive(now), "something to copy");
    }
    /// The SEND of a transfer has completed, its acknowledgement is here.
    fn counted_two_done(exec: &mut Executor, now: Nanos, arrived: &[Completion]) -> TwoEvent {
        exec.on_completions(now, arrived);
        exec.drive(now);
        exec.channel.next_event().expect("something to tell")
    }
    /// A standalone notification: taken over, posted.
    fn counted_two_notify(exec: &mut Executor, now: Nanos, message: &[u8]) {
        exec.channel.notify(1, message, Resolve::Sent, Nanos(u64::MAX)).expect("taken");
        exec.drive(now);
    }
    /// It arrives.
    fn counted_two_noted(exec: &mut Executor, now: Nanos, arrived: &[Completion]) -> TwoEvent {
        exec.on_completions(now, arrived);
        exec.drive(now);
        exec.channel.next_event().expect("something to tell")
    }
}

/// A pair of channels over the wire, and what the steps are given.
struct Bench {
    pair: RefCell<Pair>,
}

impl Bench {
    fn new(registered: bool) -> Bench {
        let fabrics = wire::pair().map(|side| side as Arc<dyn Fabric>);
        Bench { pair: RefCell::new(Pair::new(Setting { fabrics, registered, copiers: None })) }
    }

    fn map(&self, blocks: u64, len: u64) -> ChunkMap {
        let pair = self.pair.borrow();
        let base = pair.sides[0].data.base;
        // With holes, so that each is a piece of its own.
        let piece = |n| Piece { local: base + n * 2 * len, region: REGION, offset: n * 2 * len, len };
        let pieces = (0..blocks).map(piece).collect();
        ChunkMap::cut(pieces, pair.sides[0].exec().channel.chunk_bytes()).expect("within the limits")
    }

    /// Runs until nothing is left to do on either side.
    fn settle(&self) {
        let pair = &mut *self.pair.borrow_mut();
        let mut quiet = 0;
        while quiet < 3 {
            let before = pair.sides.each_ref().map(|side| *side.exec().channel.counters());
            let now = pair.now();
            pair.sides.iter_mut().for_each(|side| side.turn(now));
            let after = pair.sides.each_ref().map(|side| *side.exec().channel.counters());
            let busy = pair.sides.iter().any(|side| side.exec().channel.has_outstanding());
            quiet = if before == after && !busy { quiet + 1 } else { 0 };
        }
        pair.sides.iter_mut().for_each(|side| {
            side.done.clear();
            side.notes.clear();
            side.delivered.clear();
        });
    }

    /// One of the two executors.
    fn with<R>(&self, side: usize, work: impl FnOnce(&mut Executor, Nanos) -> R) -> R {
        let pair = &mut *self.pair.borrow_mut();
        let now = pair.now();
        work(pair.sides[side].exec.as_mut().expect("an epoch is open"), now)
    }

    fn submit(&self, map: &ChunkMap) {
        self.with(0, |exec, now| post(exec, now, map.clone()));
    }

    /// What arrived at a side, at most `most`.
    fn arrived(&self, side: usize, most: usize) -> Vec<Completion> {
        let pair = &mut *self.pair.borrow_mut();
        let mut polled = vec![Completion::EMPTY; most];
        let n = pair.sides[side].fabric.poll(&mut polled);
        polled.truncate(n);
        polled
    }
}

fn post(exec: &mut Executor, now: Nanos, map: ChunkMap) {
    exec.channel.submit_cut(now, 1, Direction::Write, map, None).expect("taken");
    exec.drive(now);
}

/// All steps.
pub fn steps() {
    let (gathers, copies) = (Bench::new(true), Bench::new(false));
    let maps = [gathers.map(1, 4096), gathers.map(128, 64), gathers.map(1, 64), gathers.map(29, 64)];
    let [page, many, one, message] = &maps;
    for _ in 0..WARM_UP {
        for map in &maps {
            gathers.submit(map);
            gathers.settle();
        }
        copies.submit(one);
        copies.settle();
    }
    let posting = |name, bench: &Bench, map: &ChunkMap, run: fn(&mut Executor, Nanos, ChunkMap)| {
        step(
            name,
            1,
            || (bench.settle(), map.clone()).1,
            |map| bench.with(0, |exec, now| run(exec, now, map)),
        );
        bench.settle();
    };
    posting("two_post_1", &gathers, page, counted_two_post_1);
    posting("two_post_128", &gathers, many, counted_two_post_128);
    posting("two_copy_1", &copies, one, counted_two_copy_1);
    let sent = |map: &ChunkMap| {
        gathers.settle();
        gathers.submit(map);
        gathers.arrived(1, 1)
    };
    step(
        "two_place_1",
        1,
        || sent(one),
        |got| gathers.with(1, |exec, now| counted_two_place_1(exec, now, &got)),
    );
    step(
        "two_place_29",
        29,
        || sent(message),
        |got| gathers.with(1, |exec, now| counted_two_place_29(exec, now, &got)),
    );
    let acknowledged = || {
        let got = sent(one);
        gathers.with(1, |exec, now| {
            exec.on_completions(now, &got);
            exec.drive(now);
            exec.channel.flush();
            exec.drive(now);
        });
        gathers.arrived(0, 2)
    };
    step("two_done", 1, acknowledged, |got| gathers.with(0, |exec, now| counted_two_done(exec, now, &got)));
    notifications(&gathers);
}

fn notifications(bench: &Bench) {
    let message = [7u8; 64];
    let notify = |bench: &Bench| bench.with(0, |exec, now| counted_two_notify(exec, now, &message));
    step("two_notify", 1, || bench.settle(), |()| notify(bench));
    let told = || {
        bench.settle();
        bench.with(0, |exec, now| {
            exec.channel.notify(1, &message, Resolve::Sent, Nanos(u64::MAX)).expect("taken");
            exec.drive(now);
        });
        bench.arrived(1, 1)
    };
    step("two_noted", 1, told, |got| bench.with(1, |exec, now| counted_two_noted(exec, now, &got)));
    bench.settle();
}

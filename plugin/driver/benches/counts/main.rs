//! What an engine executes for a transfer, step by step, for `cargo xtask counts`: each `counted_*` function is one step, called
//! [`CALLS`] times behind a warm-up; callgrind counts it. Without callgrind the same steps are timed: `cargo bench -p baton-driver`.

#[macro_use]
mod steps;
mod hand_over;
#[path = "../../tests/two_pair/mod.rs"]
mod two_pair;
mod two_sided;
mod wire;

use baton_core::notify::NotifyMode;
use baton_core::plan::{Block, BlockTable, Pair, Plan, PlanLimits, Selection};
use baton_core::prepared::{KeyTable, LaneRails, LaneSplit, Prepared};
use baton_driver::{Config, Desc, Driver, Status, Xfer};
use baton_fabric::{Memory, MemoryKind, Op, Template};
use baton_verbs::{Opcode, SendChain, SendFlags};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hand_over::Host;
use steps::{WARM_UP, step};

/// Descriptors of a large transfer.
const MANY: u64 = 120_000;
const BLOCK: u64 = 4096;

counted! {
    fn counted_plan(op: Op, pairs: Vec<Pair>) -> Plan {
        Plan::build(op, pairs, PlanLimits::default()).expect("a plan")
    }
    fn counted_plan_random(op: Op, pairs: Vec<Pair>) -> Plan {
        Plan::build(op, pairs, PlanLimits::default()).expect("a plan")
    }
    fn counted_plan_random_read(op: Op, pairs: Vec<Pair>) -> Plan {
        Plan::build(op, pairs, PlanLimits::default()).expect("a plan")
    }
    fn counted_indices(local: Selection<'_>, remote: Selection<'_>) -> Plan {
        Plan::from_blocks(Op::Write, local, remote, PlanLimits::default()).expect("a plan").plan
    }
    fn counted_indices_random(local: Selection<'_>, remote: Selection<'_>) -> Plan {
        Plan::from_blocks(Op::Write, local, remote, PlanLimits::default()).expect("a plan").plan
    }
    fn counted_prepare(plan: &Plan) -> Prepared {
        Prepared::new(plan, &[KeyTable::whole(&1)], &[KeyTable::whole(&2)], &split()).expect("templates")
    }
    fn counted_create(engine: &Driver, local: &[Desc], remote: &[Desc]) -> Arc<Xfer> {
        engine.create_xfer(Op::Write, "b", local, remote).expect("a request")
    }
    fn counted_post_1(engine: &Driver, xfer: &Arc<Xfer>, message: Option<&[u8]>) {
        engine.post(xfer, message).expect("posted")
    }
    fn counted_post_128(engine: &Driver, xfer: &Arc<Xfer>, message: Option<&[u8]>) {
        engine.post(xfer, message).expect("posted")
    }
    /// A notification without a message is the immediate alone.
    fn counted_post_empty(engine: &Driver, xfer: &Arc<Xfer>, message: Option<&[u8]>) {
        engine.post(xfer, message).expect("posted")
    }
    fn counted_post_quiet(engine: &Driver, xfer: &Arc<Xfer>, message: Option<&[u8]>) {
        engine.post(xfer, message).expect("posted")
    }
    /// What the verbs fabric adds for each work request: the NIC's own form of it.
    fn counted_chain_128(chain: &mut SendChain, work: &[Template]) {
        chain.clear();
        for (seq, one) in work.iter().enumerate() {
            let local = (one.local_addr, one.local_key as u32, one.len_bytes);
            let target = (one.remote_addr, one.remote_key as u32);
            chain.push(seq as u64, Opcode::Write, SendFlags::default(), local, target);
        }
    }
    fn counted_completion(engine: &Driver, xfer: &Xfer) -> Status {
        engine.status(xfer)
    }
    fn counted_notify(engine: &Driver, host: &mut Host) -> u64 {
        engine.hand_over(host).expect("an engine")
    }
    fn counted_notify_empty(engine: &Driver, host: &mut Host) -> u64 {
        engine.hand_over(host).expect("an engine")
    }
}

fn split() -> LaneSplit<'static> {
    const LANES: [LaneRails; 4] = [LaneRails { own: 0, peer: 0 }; 4];
    LaneSplit {
        lanes: &LANES,
        max_message_bytes: 4 << 20,
        stripe_min_bytes: 1 << 20,
        first_lane: 0,
        lane_map_generation: 1,
    }
}

/// A permutation of `0 .. MANY`.
fn shuffled(factor: u64) -> impl Iterator<Item = u64> {
    (0..MANY).map(move |n| (n * factor + 17) % MANY)
}

fn pairs(local: impl Iterator<Item = u64>, remote: impl Iterator<Item = u64>) -> Vec<Pair> {
    // Every other block, so that nothing merges.
    let at = |n: u64| (1 << 40) + n * 2 * BLOCK;
    let pair = |(l, r)| Pair { local_addr: at(l), remote_addr: at(r), len_bytes: BLOCK, local: 0, remote: 0 };
    local.zip(remote).map(pair).collect()
}

fn planning() {
    let sorted = pairs(0..MANY, 0..MANY);
    let random = pairs(shuffled(7919), shuffled(104_729));
    step("plan", MANY, || sorted.clone(), |pairs| counted_plan(Op::Write, pairs));
    step("plan_random", MANY, || random.clone(), |pairs| counted_plan_random(Op::Write, pairs));
    step("plan_random_read", MANY, || random.clone(), |pairs| counted_plan_random_read(Op::Read, pairs));
    let few = Plan::build(Op::Write, sorted[..128].to_vec(), PlanLimits::default()).expect("a plan");
    let few =
        Prepared::new(&few, &[KeyTable::whole(&1)], &[KeyTable::whole(&2)], &split()).expect("templates");
    let mut chain = SendChain::with_capacity(128);
    step("chain_128", 128, || (), |()| counted_chain_128(&mut chain, few.templates()));
    let plan = Plan::build(Op::Write, random.clone(), PlanLimits::default()).expect("a plan");
    step("prepare", MANY, || (), |()| counted_prepare(&plan));
    let blocks = (0..MANY).map(|n| Block { addr: n * 2 * BLOCK, len_bytes: BLOCK, region: 0 });
    let table = BlockTable::new(blocks.collect());
    let number = |n: u64| n as u32;
    let [ascending, here, there]: [Vec<u32>; 3] = [
        (0..MANY).map(number).collect(),
        shuffled(7919).map(number).collect(),
        shuffled(104_729).map(number).collect(),
    ];
    let pick = |indices| Selection { table: &table, indices };
    step("indices", MANY, || (), |()| counted_indices(pick(&ascending), pick(&here)));
    step("indices_random", MANY, || (), |()| counted_indices_random(pick(&here), pick(&there)));
}

fn engine(name: &str, fabric: Arc<wire::Wire>) -> Driver {
    let config = Config {
        agent_name: name.to_owned(),
        backends: baton_driver::Backends { one_sided: true, two_sided: false },
        requested: "counts".to_owned(),
        notes: Vec::new(),
        listen: None,
        candidates: Vec::new(),
        progress_thread: false,
        spin_us: 0,
        notify: NotifyMode::Immediate,
        // Emulation is slow, and nothing is to end because of it.
        timeout_scale: 100,
        notify_only: None,
        copy_threads: 0,
        chunk_bytes: 4 << 20,
        thread_start: None,
    };
    Driver::create(config, vec![fabric]).expect("an engine")
}

/// Two engines that are connected, and memory that no byte of is ever touched.
struct Engines {
    a: Driver,
    b: Driver,
    local: u64,
    remote: u64,
}

const BASE: u64 = 1 << 40;

fn engines() -> Engines {
    let [x, y] = wire::pair();
    let (a, b) = (engine("a", x), engine("b", y));
    a.load_remote(Some("b"), b.conn_info()).expect("load b");
    b.load_remote(Some("a"), a.conn_info()).expect("load a");
    assert!(a.connect("b", 60_000).expect("a session"));
    let memory = Memory {
        addr: BASE,
        len_bytes: 2 * MANY * BLOCK,
        kind: MemoryKind::Dram,
        device: 0,
        remote_read: true,
        remote_write: true,
        ordered: false,
        mapped: false,
    };
    let local = a.register(&memory).expect("register");
    let region = b.register(&memory).expect("register");
    let remote = a.import("b", &b.export(region).expect("export")).expect("import");
    Engines { a, b, local, remote }
}

impl Engines {
    fn descs(&self, region: u64, blocks: impl Iterator<Item = u64>) -> Vec<Desc> {
        let desc = |n| Desc { addr: BASE + n * 2 * BLOCK, len_bytes: BLOCK, region, reserved: 0 };
        blocks.map(desc).collect()
    }

    fn xfer(&self, count: u64) -> Arc<Xfer> {
        let local = self.descs(self.local, 0..count);
        self.a.create_xfer(Op::Write, "b", &local, &self.descs(self.remote, 0..count)).expect("a request")
    }

    fn finish(&self, xfer: &Xfer) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !matches!(self.a.status(xfer), Status::Done) {
            assert!(Instant::now() < deadline, "{}", self.a.stats());
        }
        self.b.hand_over(&mut Host::default()).expect("an engine");
    }
}

fn main() {
    // Both are in the times of all other steps; of those that post or poll the latter.
    step("nothing", 1, || (), |()| ());
    let alone = std::cell::RefCell::new(wire::Alone::new());
    step("fabric", 1, || alone.borrow().post(), |()| alone.borrow_mut().poll());
    planning();
    let engines = engines();
    let Engines { a, b, local, remote } = &engines;
    let descs = (engines.descs(*local, shuffled(7919)), engines.descs(*remote, shuffled(104_729)));
    step("create", MANY, || (), |()| counted_create(a, &descs.0, &descs.1));
    let (one, many) = (engines.xfer(1), engines.xfer(128));
    let message = Some(&b"the key of a request, as long as they are: 0123456789abcdef"[..]);
    for xfer in [&one, &many] {
        for _ in 0..WARM_UP {
            a.post(xfer, message).expect("posted");
            engines.finish(xfer);
        }
    }
    step("post_1", 1, || engines.finish_all([&one]), |()| counted_post_1(a, &one, message));
    engines.finish(&one);
    step("post_128", 128, || engines.finish_all([&many]), |()| counted_post_128(a, &many, message));
    engines.finish(&many);
    step("post_empty", 1, || engines.finish_all([&one]), |()| counted_post_empty(a, &one, Some(&[])));
    engines.finish(&one);
    step("post_quiet", 1, || engines.finish_all([&one]), |()| counted_post_quiet(a, &one, None));
    engines.finish(&one);
    let posted = |message| {
        engines.finish_all([&one]);
        a.post(&one, message).expect("posted");
    };
    step("completion", 1, || posted(message), |()| counted_completion(a, &one));
    let mut host = Host::default();
    step("notify", 1, || posted(message), |()| counted_notify(b, &mut host));
    step("notify_empty", 1, || posted(Some(&[])), |()| counted_notify_empty(b, &mut host));
    assert_eq!(host.taken(), 2 * steps::CALLS, "one notification for one transfer");
    engines.finish(&one);
    two_sided::steps();
    if steps::is_timed() {
        hand_over::report(&engines, &one, message);
    }
}

impl Engines {
    /// So that the next step finds nothing left to do.
    fn finish_all<const N: usize>(&self, xfers: [&Arc<Xfer>; N]) {
        for xfer in xfers {
            if !matches!(xfer.status(), Status::NotPosted) {
                self.finish(xfer);
            }
        }
    }
}

//! What a run does: arms that take turns, cases, and how often each is done.

use baton_host::Op;

use crate::Outcome;
use crate::engine::Setup;
use crate::memory::Layout;
use crate::options::{Backend, Memory, Notify, OpWord, Options};

/// Something to compare with other ways to move the same blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arm {
    pub backend: Backend,
    pub notify: Notify,
    /// Requests are created once, not in each iteration.
    pub prepared: bool,
    /// One request for all blocks of an iteration, not one for each.
    pub batched: bool,
    /// Requests come from lists of blocks.
    pub session: bool,
    pub lanes: Option<u64>,
    pub mem: Memory,
    /// Its engine on either side.
    pub engine: usize,
}

impl Arm {
    /// One word for everything that an arm is.
    fn words(self) -> [String; 7] {
        [
            self.backend.word().to_owned(),
            self.notify.word().to_owned(),
            self.prepare().to_owned(),
            self.transfer().to_owned(),
            if self.session { "sess" } else { "no-sess" }.to_owned(),
            self.lanes.map(|lanes| format!("lanes={lanes}")).unwrap_or_default(),
            self.mem.word().to_owned(),
        ]
    }

    pub fn prepare(self) -> &'static str {
        if self.prepared { "once" } else { "each" }
    }

    pub fn transfer(self) -> &'static str {
        if self.batched { "batch" } else { "single" }
    }
}

/// What is moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Case {
    pub op: OpWord,
    pub size: u64,
    pub batch: u64,
}

/// How often.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loops {
    /// Requests of a thread.
    pub requests: u64,
    /// Iterations of a thread in a round that do not count, and those that do.
    pub warmup: u64,
    pub iters: u64,
    pub rounds: u64,
}

/// A run.
#[derive(Clone, Debug)]
pub struct Plan {
    pub arms: Vec<Arm>,
    pub cases: Vec<Case>,
    /// An engine on either side for each.
    pub setups: Vec<Setup>,
}

const DEFAULT_ROUNDS: u64 = 7;
const MAX_DEFAULT_ITERS: u64 = 20_000;
/// Small differences are looked for: many rounds, and long ones, since at the start of each the engines' threads have yet to find
/// that the hosts poll.
const SEED_ROUNDS: u64 = 15;
const MAX_SEED_ITERS: u64 = 3_000 * SEED_ROUNDS;
/// A thread's requests by default: as many as together are this large, so that blocks are as cold as that makes them.
const COLD_BYTES: u64 = 64 << 20;
const MAX_DEFAULT_REQUESTS: u64 = 16;

impl Plan {
    /// Checks the options and derives everything from them. `available`: memory that this machine can spare.
    pub fn new(options: &Options, available: u64) -> Outcome<Plan> {
        options.check()?;
        let cases = cases(options);
        let (arms, setups) = arms(options);
        let plan = Plan { arms, cases, setups };
        for case in &plan.cases {
            let loops = plan.loops(options, *case)?;
            let bytes = (case.layout(options, loops).bytes() as u64).saturating_mul(plan.pools());
            // Both sides are here, and the machine has other things to do.
            let limit = match (&options.target_command, options.rivals) {
                (Some(_), _) => available / 4 * 3,
                (None, false) => available / 8 * 3,
                // A third of it for what is copied within this process.
                (None, true) => available / 4,
            };
            if bytes > limit {
                let (size, batch, mib) = (case.size, case.batch, |bytes: u64| bytes >> 20);
                return Err(format!(
                    "--sizes {size} with --batch {batch}, --requests {} and --threads {}: {} MiB on each side, and {} \
                     MiB are the limit on this machine",
                    loops.requests,
                    options.threads,
                    mib(bytes),
                    mib(limit)
                ));
            }
        }
        Ok(plan)
    }

    /// What an arm is called: what tells it from the others.
    pub fn label(&self, arm: Arm) -> String {
        let all: Vec<_> = self.arms.iter().map(|arm| arm.words()).collect();
        let own = arm.words();
        let differs = |at: &usize| all.iter().any(|words| words[*at] != own[*at]);
        let mut words: Vec<&str> = (0..own.len()).filter(differs).map(|at| own[at].as_str()).collect();
        if words.is_empty() {
            words.push(&own[1]);
        }
        words.join(" ")
    }

    /// Memories of a side: one of its own for each engine that makes it, and one for all others.
    fn pools(&self) -> u64 {
        let managed = self.setups.iter().filter(|setup| setup.managed).count();
        (managed + usize::from(managed < self.setups.len())) as u64
    }

    /// The notifications of all arms.
    pub fn notifications(&self) -> Vec<Notify> {
        let mut all = Vec::new();
        for arm in &self.arms {
            if !all.contains(&arm.notify) {
                all.push(arm.notify);
            }
        }
        all
    }

    /// Whether the target takes notifications in every arm: polling for them costs something in those without, too.
    pub fn listens(&self) -> bool {
        self.arms.iter().any(|arm| arm.notify != Notify::Off)
    }

    /// How often a case is done, by each arm.
    pub fn loops(&self, options: &Options, case: Case) -> Outcome<Loops> {
        let threads = options.threads;
        let per_iteration = case.size * case.batch;
        let budget = (options.mib << 20).div_ceil(per_iteration);
        let most = if options.seed_table { MAX_SEED_ITERS } else { MAX_DEFAULT_ITERS };
        let wanted = options.iters.unwrap_or_else(|| budget.clamp(1, most));
        let rounds = match (options.rounds, options.iters) {
            (Some(rounds), Some(iters)) if iters < rounds * threads => {
                return Err(format!(
                    "--iters {iters}: at least {} are needed for --rounds {rounds} of --threads {threads}",
                    rounds * threads
                ));
            }
            (None, Some(iters)) if iters < threads => {
                return Err(format!(
                    "--iters {iters}: at least one for each of --threads {threads} is needed"
                ));
            }
            (Some(rounds), _) => rounds,
            (None, _) => {
                let rounds = if options.seed_table { SEED_ROUNDS } else { DEFAULT_ROUNDS };
                rounds.min((wanted / threads).max(1))
            }
        };
        let iters = wanted.div_ceil(rounds * threads);
        let warmup = options.warmup.unwrap_or(wanted / 10).div_ceil(rounds * threads);
        let cold = (COLD_BYTES / per_iteration).clamp(1, MAX_DEFAULT_REQUESTS);
        let requests = match options.requests {
            Some(requests) if requests < options.depth => {
                let depth = options.depth;
                return Err(format!("--requests {requests}: at least --depth {depth} are needed"));
            }
            Some(requests) => requests,
            None => cold.max(options.depth),
        };
        Ok(Loops { requests, warmup, iters, rounds })
    }
}

impl Case {
    /// Where its blocks are, all threads together.
    pub fn layout(self, options: &Options, loops: Loops) -> Layout {
        let requests = (loops.requests * options.threads) as usize;
        Layout { size: self.size as usize, blocks: self.batch as usize, requests }
    }

    pub fn op(self) -> Op {
        self.op.op()
    }
}

fn doubling(from: u64, to: u64) -> Vec<u64> {
    let mut all: Vec<u64> =
        std::iter::successors(Some(from), |n| Some(n * 2)).take_while(|n| *n <= to).collect();
    if all.last() != Some(&to) {
        all.push(to);
    }
    all
}

fn cases(options: &Options) -> Vec<Case> {
    const KIB: u64 = 1 << 10;
    let sizes = if options.all { doubling(8, KIB * KIB) } else { options.sizes.clone() };
    let batches = if options.all_batch { doubling(1, options.batch) } else { vec![options.batch] };
    let mut cases = Vec::new();
    for op in &options.op {
        for size in &sizes {
            cases.extend(batches.iter().map(|batch| Case { op: *op, size: *size, batch: *batch }));
        }
    }
    cases
}

/// All combinations, and the engines that they need. The first arm is what the others are compared with.
fn arms(options: &Options) -> (Vec<Arm>, Vec<Setup>) {
    let notify = match (options.seed_table, &options.notify[..]) {
        (true, _) => vec![Notify::Off, Notify::Send, Notify::Imm],
        (_, []) if options.enable_notification => vec![Notify::Imm],
        (_, []) => vec![Notify::Off],
        (_, some) => some.to_vec(),
    };
    let either = |one: bool, other: bool| match (one, other) {
        (true, true) => vec![true, false],
        (false, true) => vec![false],
        _ => vec![true],
    };
    let prepared = either(options.prepare_once, options.prepare_each);
    let batched = either(options.enable_batch_transfer, options.disable_batch_transfer);
    let sessions = match (options.enable_sess, options.disable_sess) {
        (true, true) => vec![false, true],
        (enabled, _) => vec![enabled],
    };
    let lanes: Vec<Option<u64>> = match &options.lanes[..] {
        [] => vec![None],
        some => some.iter().copied().map(Some).collect(),
    };
    let mut arms: Vec<Arm> = Vec::new();
    let lanes_and_mem: Vec<_> =
        lanes.iter().flat_map(|lanes| options.mem.iter().map(|mem| (*lanes, *mem))).collect();
    for &backend in &options.backend {
        for &(lanes, mem) in &lanes_and_mem {
            for &batched in &batched {
                for &session in &sessions {
                    for &prepared in &prepared {
                        arms.extend(notify.iter().map(|&notify| Arm {
                            backend,
                            notify,
                            prepared,
                            batched,
                            session,
                            lanes,
                            mem,
                            engine: 0,
                        }));
                    }
                }
            }
        }
    }
    let (mut once, mut setups): (Vec<Arm>, Vec<Setup>) = (Vec::new(), Vec::new());
    for mut arm in arms {
        let setup = setup(arm);
        arm.engine = setups.iter().position(|one| *one == setup).unwrap_or_else(|| {
            setups.push(setup);
            setups.len() - 1
        });
        if !once.contains(&arm) {
            once.push(arm);
        }
    }
    (once, setups)
}

fn setup(arm: Arm) -> Setup {
    let Arm { backend, notify, lanes, .. } = arm;
    // Without notifications it does not matter: one engine less.
    let word = if notify == Notify::Send { "send" } else { "imm" };
    let mut params =
        vec![("backend".to_owned(), backend.word().to_owned()), ("notify".to_owned(), word.to_owned())];
    params.extend(lanes.map(|lanes| ("lanes".to_owned(), lanes.to_string())));
    Setup { params, managed: arm.mem == Memory::Managed }
}

/// Memory that could be used now.
pub fn available_memory() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    kib.map_or(1 << 30, |kib| kib << 10)
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;

//! The active side: starts the target, lets the arms of every case take turns, reports.

use std::time::{Duration, Instant};

use baton_bench::{Columns, Round, Rounds, Row, Summary, ratios, rows_to_csv, table_of};
use baton_host::{Engine, ErrorCode, RemoteRegion, Status};
use indicatif::{ProgressBar, ProgressStyle};

use crate::bare::Words;
use crate::engine::{name, port, stats};
use crate::first;
use crate::loops::{Bench, Blocks, Laps, Lists, absorb};
use crate::memory::{Layout, Pool, Pools};
use crate::options::{ColumnsWord, Notify, OpWord, Options};
use crate::plan::{Arm, Case, Loops, Plan, available_memory};
use crate::queue_pair::{self, Address, End};
use crate::remote::Remote;
use crate::rivals::{Bout, Field, Kind, RIVALS};
use crate::target::{Answer, Order, SIDE, Spent};
use crate::{Outcome, cpu, output};

/// Seeds of both sides' memory.
const OWN: u64 = 1;
const THEIRS: u64 = 2;
/// Of what is copied to within this process.
const COPY: u64 = 3;

/// What a session turned out to be.
struct Session {
    fabric: String,
    lanes: u64,
}

/// What does not change from case to case.
struct Run<'a> {
    options: &'a Options,
    plan: Plan,
    engines: Vec<Engine>,
    sessions: Vec<Session>,
    message: Vec<u8>,
}

/// Memory of one case on both sides.
struct Held {
    pools: Pools,
    /// Where the target's starts, that which the first engine uses.
    base: u64,
    /// For each engine: the target's memory, and where each iteration's blocks are.
    _regions: Vec<RemoteRegion>,
    blocks: Vec<Vec<Blocks>>,
}

/// Somebody who takes turns with others in one case.
enum Contender<'a> {
    Engine(Bench<'a>),
    Rival(Bout<'a>),
    QueuePair(queue_pair::Bout<'a>),
}

/// A case of an arm with everything that was measured of it.
struct Measured {
    row: Row,
    rounds: Rounds,
}

fn said(error: baton_host::Error) -> String {
    error.to_string()
}

/// The target goes last: engines say goodbye to it.
fn open(options: &Options, plan: Plan) -> Outcome<(Remote, Run<'_>)> {
    let open = |(number, setup)| {
        options.settings.open(&name("initiator", number), options.devices.as_deref(), setup)
    };
    let engines = plan.setups.iter().enumerate().map(open).collect::<Outcome<Vec<_>>>()?;
    let (remote, infos) = Remote::start(&options.how(), &plan.setups)?;
    let mut sessions = Vec::new();
    for (number, (engine, info)) in engines.iter().zip(&infos).enumerate() {
        let peer = name(SIDE, number);
        engine.load_remote(&peer, info).map_err(said)?;
        let status = engine.connect(&peer, Duration::from_secs(options.patience)).map_err(said)?;
        if status != Status::Done {
            return Err(format!("no session with the target within {} s", options.patience));
        }
        sessions.push(session(engine)?);
    }
    let message = vec![b'm'; options.message_bytes as usize];
    Ok((remote, Run { options, plan, engines, sessions, message }))
}

fn session(engine: &Engine) -> Outcome<Session> {
    let stats = stats(engine)?;
    let session = &stats["peers"][0]["session"];
    let fabric = session["fabric"].as_str().ok_or_else(|| format!("no session in {stats}"))?;
    Ok(Session {
        fabric: fabric.to_owned(),
        lanes: session["lanes"]
            .as_u64()
            .or(session["two_sided"]["lanes"].as_array().map(|lanes| lanes.len() as u64))
            .unwrap_or_default(),
    })
}

/// Both sides' blocks as lists.
fn lists(engine: &Engine, arm: Arm, blocks: &[Blocks]) -> Outcome<Lists> {
    let flag = |error: baton_host::Error| match error.code {
        ErrorCode::Unsupported => format!("--enable-sess: {error}"),
        _ => error.to_string(),
    };
    let all = |side: fn(&Blocks) -> &Vec<_>| blocks.iter().flat_map(side).copied().collect::<Vec<_>>();
    let local = engine.create_block_list("", &all(|blocks| &blocks.local)).map_err(flag)?;
    let mut remote = all(|blocks| &blocks.remote);
    // A host lists what it registered as it lies; the order comes from the indices.
    remote.sort_unstable_by_key(|desc| desc.addr);
    let at = |desc: &baton_host::Desc| remote.partition_point(|one| one.addr < desc.addr) as u32;
    let (mut picks, mut first) = (Vec::new(), 0u32);
    for one in blocks {
        let next = first + one.local.len() as u32;
        picks.push(((first..next).collect(), one.remote.iter().map(at).collect()));
        first = next;
    }
    let remote = engine.create_block_list(&name(SIDE, arm.engine), &remote).map_err(flag)?;
    Ok(Lists { local, remote, picks })
}

impl Run<'_> {
    /// Memory on both sides.
    fn hold(&self, remote: &mut Remote, layout: Layout) -> Outcome<Held> {
        let Answer::Memory { blobs, addrs } = remote.ask(&Order::Hold(layout))? else {
            return Err("the target holds no memory".to_owned());
        };
        let managed: Vec<bool> = self.plan.setups.iter().map(|setup| setup.managed).collect();
        let pools = Pools::new(&self.engines, &managed, layout)?;
        let (order, mut regions, mut blocks) = (layout.order(), Vec::new(), Vec::new());
        let theirs = blobs.iter().zip(&addrs);
        for (number, (engine, (blob, addr))) in self.engines.iter().zip(theirs).enumerate() {
            let (pool, place_in_pool) = pools.of(number);
            let region = engine.import_region(&name(SIDE, number), blob).map_err(said)?;
            let there = |request: usize, place: &u32| {
                region.desc(addr + layout.offset(request, *place as usize) as u64, layout.size as u64)
            };
            let of = |request: usize| Blocks {
                local: pool.blocks(place_in_pool, request),
                remote: order.iter().map(|place| there(request, place)).collect(),
            };
            blocks.push((0..layout.requests).map(of).collect());
            regions.push(region);
        }
        let base = *addrs.first().ok_or("the target has no engine")?;
        Ok(Held { pools, base, _regions: regions, blocks })
    }

    /// Everything that an arm needs for a case; also how long preparing each iteration took.
    fn bench<'a>(&'a self, arm: Arm, case: Case, blocks: &'a [Blocks]) -> Outcome<(Bench<'a>, Vec<f64>)> {
        let engine = &self.engines[arm.engine];
        let mut bench = Bench {
            engine,
            arm,
            op: case.op(),
            blocks,
            lists: arm.session.then(|| lists(engine, arm, blocks)).transpose()?,
            ready: Vec::new(),
            begun: 0,
            depth: self.options.depth as usize,
            message: (arm.notify != Notify::Off).then_some(&self.message),
            look: Duration::from_micros(self.options.look_us),
            patience: Duration::from_secs(self.options.patience),
        };
        let mut prep_us = Vec::new();
        if arm.prepared {
            for number in 0..blocks.len() {
                let started = Instant::now();
                bench.ready.push(bench.create(number)?);
                prep_us.push(started.elapsed().as_secs_f64() * 1e6);
            }
        }
        Ok((bench, prep_us))
    }

    /// Iterations of one arm that do not count, then those that do; all their notifications must have come.
    fn round(&self, remote: &mut Remote, bench: &mut Bench<'_>, warmup: u64, iters: u64) -> Outcome<Rounds> {
        let threads = self.options.threads;
        let listens = self.plan.listens();
        if listens {
            remote.tell(&Order::Listen(bench.arm.engine))?;
        }
        if warmup > 0 {
            bench.run(threads as usize, warmup)?;
        }
        let times = self.measured(remote, None, iters * threads, |_| bench.run(threads as usize, iters))?;
        if listens {
            let each = if bench.arm.batched { 1 } else { bench.blocks[0].local.len() as u64 };
            let told = if bench.arm.notify == Notify::Off { 0 } else { each };
            remote.tell(&Order::Heard((warmup + iters) * threads * told))?;
        }
        Ok(times)
    }

    /// Fresh bytes on both sides.
    fn fill(&self, remote: &mut Remote, pools: &Pools) -> Outcome<()> {
        pools.fill(OWN);
        remote.tell(&Order::Fill(THEIRS))
    }

    /// Every byte where blocks land, and around: what is fast because it moves nothing is found out.
    fn compare(&self, remote: &mut Remote, pools: &Pools, engine: usize, op: OpWord) -> Outcome<()> {
        match op {
            OpWord::Write => remote.tell(&Order::Check(engine, THEIRS, OWN)),
            OpWord::Read => pools.of(engine).0.check(OWN, THEIRS, false),
        }
    }

    /// A bare queue pair to the target's memory, for engines over verbs.
    fn pair(&self, remote: &mut Remote, held: &Held) -> Outcome<(End, Address)> {
        let engine = self.engines.first().ok_or("no engine")?;
        let end = End::new(port(engine)?, held.pools.of(0).0)?;
        let Answer::QueuePair(peer) = remote.ask(&Order::QueuePair)? else {
            return Err("the target has no queue pair".to_owned());
        };
        end.connect(&peer)?;
        remote.tell(&Order::ConnectQueuePair(end.address()))?;
        Ok((end, peer))
    }

    /// One way to notify over the bare queue pair; whether it moves every byte is found out before.
    fn pair_bout<'a>(
        &self,
        remote: &mut Remote,
        pools: &Pools,
        pair: &'a (End, Address),
        notify: Notify,
        requests: u64,
    ) -> Outcome<queue_pair::Bout<'a>> {
        let patience = Duration::from_secs(self.options.patience);
        let mut bout = queue_pair::Bout { end: &pair.0, peer: &pair.1, notify, begun: 0, patience };
        if self.options.check {
            let label = bout.label();
            let wrong = |reason| format!("{label}: {reason}");
            self.fill(remote, pools)?;
            self.pair_round(remote, &mut bout, 0, requests).map_err(wrong)?;
            self.compare(remote, pools, 0, OpWord::Write).map_err(wrong)?;
        }
        Ok(bout)
    }

    fn pair_round(
        &self,
        remote: &mut Remote,
        bout: &mut queue_pair::Bout<'_>,
        warmup: u64,
        iters: u64,
    ) -> Outcome<Rounds> {
        bout.begin(remote)?;
        if warmup > 0 {
            bout.run(warmup)?;
        }
        let times = self.measured(remote, Some(bout.end), iters, |_| bout.run(iters))?;
        bout.end(remote, warmup + iters)?;
        Ok(times)
    }

    /// What moves blocks without an engine, in the order in which it stands before and after the arms.
    fn field<'a>(&self, case: Case, held: &'a Held) -> Outcome<Field<'a>> {
        Ok(Field {
            own: held.pools.of(0).0,
            copy: Pool::new(&[], held.pools.of(0).0.layout())?,
            words: Words::new()?,
            base: held.base,
            writes: case.op == OpWord::Write,
            patience: Duration::from_secs(self.options.patience),
        })
    }

    /// Whether a rival moves every byte.
    fn check_rival(
        &self,
        remote: &mut Remote,
        pools: &Pools,
        bout: &mut Bout<'_>,
        requests: u64,
        op: OpWord,
    ) -> Outcome<()> {
        let Field { copy, writes, .. } = bout.field;
        self.fill(remote, pools)?;
        copy.fill(COPY);
        self.rival_round(remote, bout, 0, requests)?;
        match bout.rival.kind {
            Kind::Memcpy => copy.check(COPY, OWN, *writes),
            Kind::Bare => self.compare(remote, pools, 0, op),
        }
    }

    /// One case: every arm prepares and is checked, then they take turns.
    fn case(&self, remote: &mut Remote, case: Case, progress: &ProgressBar) -> Outcome<Vec<Measured>> {
        let loops = self.plan.loops(self.options, case)?;
        let held = self.hold(remote, case.layout(self.options, loops))?;
        let over_verbs = self.sessions.iter().all(|session| session.fabric == "verbs");
        let rivals = self.options.rivals;
        let field = (rivals && !over_verbs).then(|| self.field(case, &held)).transpose()?;
        let pair = (rivals && over_verbs && case.op == OpWord::Write)
            .then(|| self.pair(remote, &held))
            .transpose()?;
        let mut arms = Vec::new();
        for arm in &self.plan.arms {
            let (mut bench, prep_us) = self.bench(*arm, case, &held.blocks[arm.engine])?;
            if self.options.check {
                self.fill(remote, &held.pools)?;
                self.round(remote, &mut bench, 0, loops.requests)?;
                let wrong = |reason| format!("{}: {reason}", self.plan.label(*arm));
                self.compare(remote, &held.pools, arm.engine, case.op).map_err(wrong)?;
            }
            arms.push((Contender::Engine(bench), Rounds { prep_us, ..Rounds::default() }));
        }
        for (number, rival) in field.iter().flat_map(|_| RIVALS).enumerate() {
            let Some(field) = &field else { break };
            let mut bout = Bout { rival, field, begun: 0 };
            if self.options.check {
                let wrong = |reason| format!("{}: {reason}", rival.label());
                self.check_rival(remote, &held.pools, &mut bout, loops.requests, case.op).map_err(wrong)?;
            }
            // The first one is what all others are compared with.
            let at = if number == 0 { 0 } else { arms.len() };
            arms.insert(at, (Contender::Rival(bout), Rounds::default()));
        }
        if let Some(pair) = &pair {
            for notify in self.plan.notifications() {
                let bout = self.pair_bout(remote, &held.pools, pair, notify, loops.requests)?;
                arms.push((Contender::QueuePair(bout), Rounds::default()));
            }
        }
        // Which rivals there are is known only now.
        progress.inc_length(loops.rounds * (arms.len() - self.plan.arms.len()) as u64);
        if self.options.check {
            self.fill(remote, &held.pools)?;
        }
        for round in 0..loops.rounds {
            // Not always the same one after the same other.
            let count = arms.len();
            for turn in 0..count {
                let (contender, measured) = &mut arms[(turn + round as usize) % count];
                let times = match contender {
                    Contender::Engine(bench) => self.round(remote, bench, loops.warmup, loops.iters)?,
                    Contender::Rival(bout) => self.rival_round(remote, bout, loops.warmup, loops.iters)?,
                    Contender::QueuePair(bout) => self.pair_round(remote, bout, loops.warmup, loops.iters)?,
                };
                absorb(measured, times);
                progress.inc(1);
            }
        }
        let all_blocks_moved = loops.rounds * (loops.warmup + loops.iters) >= loops.requests;
        if self.options.check && all_blocks_moved {
            for engine in held.pools.first_engines() {
                self.compare(remote, &held.pools, engine, case.op)?;
            }
        }
        for (contender, measured) in &mut arms {
            if let Contender::Engine(bench) = contender {
                for _ in 0..self.options.first.unwrap_or(0) {
                    measured.first_us.push(first::transfer(bench)?);
                }
            }
        }
        let mut rows: Vec<Measured> = Vec::new();
        for (contender, rounds) in arms {
            let first = rows.first().map(|first| &first.rounds);
            let row = match contender {
                Contender::Engine(bench) => self.describe(bench.arm, case),
                Contender::Rival(bout) => describe_rival(&bout, case),
                Contender::QueuePair(bout) => describe_pair(&bout, case),
            };
            rows.push(Measured { row: row.measured(rounds.clone(), first), rounds });
        }
        Ok(rows)
    }

    fn describe(&self, arm: Arm, case: Case) -> Row {
        let session = &self.sessions[arm.engine];
        Row {
            arm: if self.options.rivals {
                format!("baton {}", self.plan.label(arm))
            } else {
                self.plan.label(arm)
            },
            backend: arm.backend.word().to_owned(),
            fabric: session.fabric.clone(),
            op: case.op.word().to_owned(),
            notify: arm.notify.word().to_owned(),
            prepare: arm.prepare().to_owned(),
            transfer: arm.transfer().to_owned(),
            session: arm.session,
            lanes: session.lanes,
            threads: self.options.threads,
            depth: self.options.depth,
            size_bytes: case.size,
            batch: case.batch,
            ..Row::default()
        }
    }

    /// The iterations of one round that count, `iters` in all, with what they cost.
    fn measured(
        &self,
        remote: &mut Remote,
        pair: Option<&End>,
        iters: u64,
        run: impl FnOnce(&mut Remote) -> Outcome<Laps>,
    ) -> Outcome<Rounds> {
        let ours = || Spent::now(&self.engines, pair);
        let (before, machine) = ([ours()?, remote.spent()?], cpu::of_machine());
        let laps = run(remote)?;
        let machine_then = cpu::of_machine();
        let after = [ours()?, remote.spent()?];
        let cpu = |[own, target]: [Spent; 2]| own.cpu + target.cpu;
        let mut times = laps.times;
        times.rounds = vec![Round {
            iters,
            took_s: (laps.ended - laps.started).as_secs_f64(),
            cpu_s: cpu(after).saturating_sub(cpu(before)).as_secs_f64(),
            machine_cpu_s: machine_then.saturating_sub(machine).as_secs_f64(),
            p50_us: Summary::of(times.latency_us.clone()).p50,
            counts: [0, 1].map(|side| after[side].counts - before[side].counts),
        }];
        Ok(times)
    }

    /// The same as a round of an arm, without an engine.
    fn rival_round(
        &self,
        remote: &mut Remote,
        bout: &mut Bout<'_>,
        warmup: u64,
        iters: u64,
    ) -> Outcome<Rounds> {
        bout.begin(remote)?;
        let times = (|| {
            if warmup > 0 {
                bout.run(remote.pid(), 0, warmup)?;
            }
            self.measured(remote, None, iters, |remote| bout.run(remote.pid(), warmup, iters))
        })();
        // Where the target failed, it knows why.
        bout.end(remote)?;
        times
    }
}

fn describe_pair(bout: &queue_pair::Bout<'_>, case: Case) -> Row {
    Row {
        arm: bout.label(),
        backend: "queue pair".to_owned(),
        fabric: "verbs".to_owned(),
        op: case.op.word().to_owned(),
        notify: bout.notify.word().to_owned(),
        prepare: "once".to_owned(),
        transfer: "batch".to_owned(),
        lanes: 1,
        threads: 1,
        depth: 1,
        size_bytes: case.size,
        batch: case.batch,
        ..Row::default()
    }
}

fn describe_rival(bout: &Bout<'_>, case: Case) -> Row {
    let (fabric, notify) = match bout.rival.kind {
        Kind::Bare => ("process_vm_readv", "word"),
        Kind::Memcpy => ("memcpy", "off"),
    };
    Row {
        arm: bout.rival.label(),
        backend: "none".to_owned(),
        fabric: fabric.to_owned(),
        op: case.op.word().to_owned(),
        notify: notify.to_owned(),
        prepare: "once".to_owned(),
        transfer: "batch".to_owned(),
        threads: bout.rival.threads as u64,
        depth: 1,
        size_bytes: case.size,
        batch: case.batch,
        ..Row::default()
    }
}

/// Drawn on a terminal only.
fn progress(plan: &Plan, options: &Options) -> Outcome<ProgressBar> {
    let loops: Vec<Loops> =
        plan.cases.iter().map(|case| plan.loops(options, *case)).collect::<Outcome<_>>()?;
    let rounds: u64 = loops.iter().map(|loops| loops.rounds).sum();
    let bar = ProgressBar::new(rounds * plan.arms.len() as u64);
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {msg} ({eta} left)");
    Ok(bar.with_style(style.map_err(|error| error.to_string())?))
}

/// Runs every case and reports.
pub fn run(options: &Options) -> Outcome<()> {
    let plan = Plan::new(options, available_memory())?;
    let bar = progress(&plan, options)?;
    let (mut remote, run) = open(options, plan)?;
    let mut measured: Vec<Measured> = Vec::new();
    for case in &run.plan.cases {
        let what = format!("{} of {} x {}", case.op.word(), case.batch, case.size);
        bar.set_message(what.clone());
        measured.extend(run.case(&mut remote, *case, &bar).map_err(|reason| format!("{what}: {reason}"))?);
    }
    bar.finish_and_clear();
    report(options, &run, &measured)
}

fn report(options: &Options, run: &Run<'_>, measured: &[Measured]) -> Outcome<()> {
    let rows: Vec<Row> = measured.iter().map(|one| one.row.clone()).collect();
    let json = || serde_json::to_string_pretty(&rows).map(|text| text + "\n").map_err(|e| e.to_string());
    let mut said = false;
    if let Some(path) = &options.json {
        said |= output::write(path, &json()?)?;
    }
    if let Some(path) = &options.csv {
        said |= output::write(path, &rows_to_csv(&rows)?)?;
    }
    if said {
        return Ok(());
    }
    println!("{}", heading(options, run, &rows));
    for columns in &options.columns {
        let columns = match columns {
            ColumnsWord::Nixlbench => Columns::Nixlbench,
            ColumnsWord::BenchEngine => Columns::BenchEngine,
            ColumnsWord::Baton => Columns::Baton,
            ColumnsWord::Counts => Columns::Counts,
        };
        println!("\n{}", table_of(&rows, columns).trim_end());
    }
    let ratio = |own: &Row, base: &Row| {
        let rounds = |row: &Row| measured.iter().find(|one| one.row == *row).map(|one| &one.rounds);
        let (own, base) = (rounds(own), rounds(base));
        own.zip(base).map_or([None; 2], |(own, base)| [own.ratio_to(base), own.p50_ratio_to(base)])
    };
    let compared = ratios(&rows, ratio);
    if !compared.is_empty() {
        println!("\n{}", compared.trim_end());
    }
    Ok(())
}

fn heading(options: &Options, run: &Run<'_>, rows: &[Row]) -> String {
    let fabrics: Vec<&str> = run.sessions.iter().map(|session| session.fabric.as_str()).collect();
    let depth = match options.depth {
        1 => "stop and wait".to_owned(),
        depth => format!("pipelined, {depth} in flight"),
    };
    let rounds = rows.iter().map(|row| row.rounds).max().unwrap_or_default();
    let mut backends: Vec<&str> = Vec::new();
    for word in options.backend.iter().map(|backend| backend.word()) {
        if !backends.contains(&word) {
            backends.push(word);
        }
    }
    let checked = if options.check { "every byte compared" } else { "bytes not compared" };
    format!(
        "{} over {}: {depth}, {} thread(s), medians of {rounds} rounds in turn, {checked}",
        backends.join(" and "),
        fabrics.first().unwrap_or(&"?"),
        options.threads,
    )
}

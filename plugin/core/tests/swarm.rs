//! Random worlds: any depths, lanes, orders, cancels, poppers. The seed of a failure is in its message.

mod toy;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use baton_core::notify::NotifyMode;
use baton_core::peer::{CancelOutcome, SubmitError, XferFailure, record_limit};
use baton_fabric::Op;
use toy::{Config, Rng, World, pattern};

const SLOT: usize = 4096;
const TRANSFERS: u64 = 60;

#[derive(Debug)]
struct Job {
    token: u64,
    from: usize,
    op: Op,
    /// (local, remote, len)
    spans: Vec<(usize, usize, usize)>,
    message: Option<Vec<u8>>,
    cancel: Option<CancelOutcome>,
}

fn config(rng: &mut Rng) -> Config {
    let mut config = Config {
        lanes: 1 + rng.below(4) as u8,
        sq: rng.pick(&[4, 5, 8, 16, 64]),
        rq: rng.pick(&[1, 2, 3, 8, 32]),
        ring: rng.pick(&[512, 1024, 4096]),
        inline: rng.pick(&[0, 8, 24, 64, 256]),
        notify: rng.pick(&[NotifyMode::Immediate, NotifyMode::Send]),
        data_bytes: 2 * (TRANSFERS as usize + 1) * SLOT,
        max_chunk: rng.pick(&[64, 200, 1000]),
        stripe_min: rng.pick(&[1, 300, 100_000]),
        ..Config::default()
    };
    config.limits.unpopped_messages = rng.pick(&[0, 3, 1000]);
    config.limits.unpopped_bytes = rng.pick(&[100, 1 << 20]);
    config.limits.slice_bytes = rng.pick(&[300, 1 << 20]);
    config.limits.outstanding_bytes = rng.pick(&[500, 5000, 1 << 20]);
    config.limits.first_xfer_seq = (1 << 24) - rng.below(40);
    // Some worlds know no fragments, others know little else.
    config.limits.max_message_bytes = record_limit(config.ring) as u32 * rng.pick(&[1, 2, 6]);
    config
}

/// Every job has a slot of its own on both sides, so every byte of it can be checked at any time.
fn job(rng: &mut Rng, world: &World, token: u64) -> Job {
    let from = rng.below(2) as usize;
    let op = rng.pick(&[Op::Read, Op::Write]);
    let base = token as usize * SLOT + from * world.config.data_bytes / 2;
    let mut spans = Vec::new();
    let mut at = 64;
    let room = rng.pick(&[100, 700, SLOT - 200]);
    while at < room {
        let len = (rng.below(300) as usize).min(room - at);
        spans.push((base + at, base + at, len));
        at += len + rng.pick(&[0, 0, 17]);
    }
    if rng.below(10) == 0 {
        spans.clear();
    }
    let limit = world.nodes[0].session.message_limit() as u64;
    let message = (rng.below(3) > 0).then(|| {
        let mut message = token.to_le_bytes().to_vec();
        message.resize(8 + rng.below(limit - 7) as usize, token as u8);
        message
    });
    // In random order, so that sorting has work.
    for n in (1..spans.len()).rev() {
        spans.swap(n, rng.below(n as u64 + 1) as usize);
    }
    Job { token, from, op, spans, message, cancel: None }
}

fn fill_source(world: &World, job: &Job) {
    let source = if job.op == Op::Write { job.from } else { 1 - job.from };
    for &(local, remote, len) in &job.spans {
        let at = if job.op == Op::Write { local } else { remote };
        world.nodes[source].mem.set_data(at, &pattern(at as u64, len));
    }
}

fn assert_moved(world: &World, job: &Job) {
    let target = if job.op == Op::Write { 1 - job.from } else { job.from };
    for &(local, remote, len) in &job.spans {
        let (at, source) = if job.op == Op::Write { (remote, local) } else { (local, remote) };
        assert_eq!(world.nodes[target].mem.data(at, len), pattern(source as u64, len), "{job:?}");
    }
    let base = job.token as usize * SLOT + job.from * world.config.data_bytes / 2;
    assert_eq!(world.nodes[target].mem.data(base, 64), [0; 64], "sentinel before");
    assert_eq!(world.nodes[target].mem.data(base + SLOT - 64, 64), [0; 64], "sentinel behind");
}

/// Checks what was reported since the last look: no notification before its data, no completion before its bytes.
fn look(world: &World, jobs: &[Job], seen: &mut [(usize, usize); 2]) {
    for n in [0, 1] {
        for message in &world.nodes[n].delivered[seen[n].0..] {
            let token = u64::from_le_bytes(message[..8].try_into().unwrap());
            if token < TRANSFERS {
                let job = &jobs[token as usize];
                assert_eq!(job.from, 1 - n);
                assert_eq!(job.message.as_ref(), Some(message));
                assert_moved(world, job);
            }
        }
        for (token, result) in &world.nodes[n].done[seen[n].1..] {
            if result.is_ok() {
                assert_moved(world, &jobs[*token as usize]);
            }
        }
        seen[n] = (world.nodes[n].delivered.len(), world.nodes[n].done.len());
    }
}

fn pop_some(world: &mut World, popped: &mut [usize; 2]) {
    for n in [0, 1] {
        let new: Vec<u64> = world.nodes[n].delivered[popped[n]..].iter().map(|m| m.len() as u64).collect();
        world.nodes[n].session.on_popped(new.len() as u64, new.iter().sum());
        popped[n] += new.len();
        world.pump(n);
    }
}

fn run(seed: u64) {
    let mut rng = Rng::new(seed);
    let mut world = World::new(config(&mut rng), seed);
    let pops_late = rng.below(2) == 0;
    world.nodes.iter_mut().for_each(|node| node.popped_by_itself = !pops_late);
    let (mut jobs, mut notes, mut seen, mut popped) =
        (Vec::<Job>::new(), [Vec::new(), Vec::new()], [(0, 0); 2], [0; 2]);
    let steps_between = rng.pick(&[0, 3, 30]);
    for token in 0..TRANSFERS {
        let job = job(&mut rng, &world, token);
        fill_source(&world, &job);
        let work = world.prepare(job.op, &job.spans);
        let (now, from) = (world.now, job.from);
        world.nodes[from].session.submit(now, token, work, job.message.as_deref()).unwrap();
        jobs.push(job);
        world.pump(from);
        if rng.below(4) == 0 {
            let n = rng.below(2) as usize;
            let mut note = (1000 + notes[n].len() as u64).to_le_bytes().to_vec();
            let longest = rng.pick(&[60, world.nodes[0].session.message_limit() as u64 - 8]);
            note.resize(8 + rng.below(longest) as usize, 5);
            world.notify(n, &note);
            notes[n].push(note);
        }
        for _ in 0..steps_between {
            world.step();
            look(&world, &jobs, &mut seen);
        }
        if rng.below(8) == 0 {
            let victim = rng.below(token + 1);
            let job = &mut jobs[victim as usize];
            let outcome = world.nodes[job.from].session.cancel(victim);
            job.cancel = (outcome != CancelOutcome::NotFound).then_some(outcome).or(job.cancel);
            world.pump(jobs[victim as usize].from);
        }
        if pops_late && rng.below(5) == 0 {
            pop_some(&mut world, &mut popped);
        }
    }
    world.settle();
    while pops_late && popped != [0, 1].map(|n| world.nodes[n].delivered.len()) {
        pop_some(&mut world, &mut popped);
        world.settle();
    }
    look(&world, &jobs, &mut seen);
    verify(&mut world, &jobs, &notes);
}

fn verify(world: &mut World, jobs: &[Job], notes: &[Vec<Vec<u8>>; 2]) {
    for n in [0, 1] {
        assert_eq!(world.nodes[n].ended, None);
        let got: Vec<&Vec<u8>> = world.nodes[1 - n]
            .delivered
            .iter()
            .filter(|m| u64::from_le_bytes(m[..8].try_into().unwrap()) >= 1000)
            .collect();
        assert_eq!(got, notes[n].iter().collect::<Vec<_>>(), "notifications in order, once each");
    }
    for job in jobs {
        let result = world.result_of(job.from, job.token).expect("every transfer ends");
        match (result, job.cancel) {
            (Ok(()), None | Some(CancelOutcome::TooLate)) => {}
            (Err(XferFailure::Canceled), Some(CancelOutcome::Canceled | CancelOutcome::Draining)) => {}
            // Canceled twice: the second came too late for the first.
            (Err(XferFailure::Canceled), Some(CancelOutcome::TooLate)) => {}
            other => panic!("{other:?} of {job:?}"),
        }
        let told = job.token.to_le_bytes();
        let count = world.nodes[1 - job.from].delivered.iter().filter(|m| m[..8] == told).count();
        assert_eq!(count, usize::from(result.is_ok() && job.message.is_some()), "{job:?}");
    }
    world.audit();
}

#[test]
fn random_worlds_deliver_everything_exactly_once() {
    let seeds: Vec<u64> = match std::env::var("BATON_TEST_SEED") {
        Ok(seed) => vec![seed.parse().expect("BATON_TEST_SEED is a number")],
        Err(_) => (0..300).collect(),
    };
    for seed in seeds {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| run(seed))) {
            eprintln!("repeat with BATON_TEST_SEED={seed}");
            resume_unwind(panic);
        }
    }
}

#[test]
fn a_kill_at_any_moment_leaves_every_transfer_reported_once() {
    for seed in 0..200 {
        let mut rng = Rng::new(seed + 10_000);
        let mut world = World::new(config(&mut rng), seed);
        let mut jobs = Vec::new();
        let kill_at = rng.below(20);
        for token in 0..20 {
            let job = job(&mut rng, &world, token);
            fill_source(&world, &job);
            let work = world.prepare(job.op, &job.spans);
            let (now, from) = (world.now, job.from);
            match world.nodes[from].session.submit(now, token, work, job.message.as_deref()) {
                Ok(()) => jobs.push(job),
                Err(error) => assert_eq!(error, SubmitError::Ended),
            }
            world.pump(from);
            for _ in 0..rng.below(20) {
                world.step();
            }
            if token == kill_at {
                let index = rng.below(u64::from(world.config.lanes) + 1) as usize;
                world.fence(rng.below(2) as usize, index);
            }
        }
        world.fence_and_drain();
        let closed = world.next_epoch();
        for job in &jobs {
            let failed = closed[job.from].failed.iter().filter(|(token, _)| *token == job.token).count();
            let done = usize::from(world.result_of(job.from, job.token).is_some());
            assert_eq!(failed + done, 1, "seed {seed}: {job:?}");
            let told = job.token.to_le_bytes();
            let delivered = world.nodes[1 - job.from].delivered.iter().filter(|m| m[..8] == told).count();
            let done = done == 1 && job.message.is_some();
            assert!(delivered == usize::from(done) || failed == 1 && delivered <= 1, "seed {seed}: {job:?}");
        }
        world.settle();
        world.audit();
    }
}

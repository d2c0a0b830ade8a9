//! Many random worlds: every job of its own bytes, every byte and the sentinels around compared, credit audited at the end.
//! `BATON_TEST_SEED` repeats one, `BATON_TEST_SEEDS` runs more of them, `BATON_TEST_FIRST` others.

mod two_toy;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use baton_core::two_sided::codec::Direction;
use baton_core::two_sided::notes::Resolve;
use baton_core::two_sided::report::{TwoCancel, TwoSubmitError, XferFailure};
use two_toy::*;

const SLOT: usize = 8192;
const JOBS: u64 = 60;

#[derive(Debug)]
struct Job {
    token: u64,
    from: usize,
    direction: Direction,
    /// (here, there, len); both in the job's own slot.
    spans: Vec<(usize, usize, usize)>,
    message: Option<Vec<u8>>,
    canceled: bool,
}

fn config(rng: &mut Rng) -> Config {
    let mut config = Config {
        lanes: 1 + rng.below(4) as u8,
        sq: rng.pick(&[2, 3, 8, 16]),
        rq: rng.pick(&[1, 2, 5, 16, 64]),
        control_sq: rng.pick(&[8, 9, 16, 64]),
        control_rq: rng.pick(&[2, 3, 8, 64]),
        slot: rng.pick(&[192, 512, 1024, 4096]),
        send_slots: rng.pick(&[1, 2, 8]),
        max_sge: rng.pick(&[2, 4, 16]),
        gather: rng.below(2) == 0,
        data_crc: rng.below(2) == 0,
        heads: rng.below(2) == 0,
        data_bytes: 2 * (JOBS as usize + 1) * SLOT,
        ..Config::default()
    };
    config.first_recvs = rng.pick(&[0, 1, 2]).min(config.rq);
    config.pool.slot_bytes = config.slot;
    config.pool.base_slabs = rng.pick(&[1, 2]);
    config.pool.max_slabs = rng.pick(&[2, 4, 64]);
    config.pool.peer_slots = rng.pick(&[4, 12, 500]);
    config.limits.request_depth = rng.pick(&[1, 2, 7, 64]);
    config.limits.small_bytes = rng.pick(&[0, 2000, 100_000]);
    config.limits.pack_bytes = rng.pick(&[0, 100, 2000]);
    config.limits.notify_window = rng.pick(&[4160, 100_000]);
    config.limits.ring = rng.pick(&[1, 3, 16]);
    config
}

fn job(rng: &mut Rng, world: &World, token: u64) -> Job {
    let from = rng.below(2) as usize;
    let direction = rng.pick(&[Direction::Write, Direction::Write, Direction::Read]);
    let base = token as usize * SLOT + from * world.config.data_bytes / 2;
    let mut spans = Vec::new();
    let room = rng.pick(&[100, 1500, SLOT - 200]);
    let longest = rng.pick(&[40, 300, 9000]);
    let mut at = 64;
    while at < room {
        let len = (1 + rng.below(longest) as usize).min(room - at);
        spans.push((base + at, base + at, len));
        at += len + rng.pick(&[0, 0, 17]);
    }
    if rng.below(12) == 0 {
        spans.clear();
    }
    for n in (1..spans.len()).rev() {
        spans.swap(n, rng.below(n as u64 + 1) as usize);
    }
    let message = (rng.below(2) == 0).then(|| {
        let mut message = token.to_le_bytes().to_vec();
        let longest = rng.pick(&[1, 100, 4000]);
        message.resize(8 + rng.below(longest) as usize, token as u8);
        message
    });
    let source = if direction == Direction::Write { from } else { 1 - from };
    for &(here, there, len) in &spans {
        let at = if direction == Direction::Write { here } else { there };
        world.nodes[source].mem.set_data(at, &pattern(at as u64, len));
    }
    Job { token, from, direction, spans, message, canceled: false }
}

fn assert_moved(world: &World, job: &Job) {
    let target = if job.direction == Direction::Write { 1 - job.from } else { job.from };
    for &(here, there, len) in &job.spans {
        let (at, source) = if job.direction == Direction::Write { (there, here) } else { (here, there) };
        assert_eq!(world.nodes[target].mem.data(at, len), pattern(source as u64, len), "{job:?}");
    }
    assert_sentinels(world, job);
}

fn assert_sentinels(world: &World, job: &Job) {
    let base = job.token as usize * SLOT + job.from * world.config.data_bytes / 2;
    let mut clean = vec![true; SLOT];
    for &(here, _, len) in &job.spans {
        clean[here - base..here - base + len].fill(false);
    }
    for n in [0, 1] {
        let bytes = world.nodes[n].mem.data(base, SLOT);
        let touched = bytes.iter().zip(&clean).position(|(byte, clean)| *clean && *byte != 0);
        assert_eq!(touched, None, "a sentinel of {job:?}");
    }
}

/// No notification before its data, no completion before its bytes; a failed transfer's bytes do not change any more.
struct Look {
    seen: [(usize, usize); 2],
    quiet: Vec<(u64, Vec<u8>)>,
}

impl Look {
    fn new() -> Look {
        Look { seen: [(0, 0); 2], quiet: Vec::new() }
    }

    fn look(&mut self, world: &World, jobs: &[Job]) {
        for n in [0, 1] {
            for message in &world.nodes[n].delivered[self.seen[n].0..] {
                let token = u64::from_le_bytes(message[..8].try_into().unwrap());
                if token < JOBS {
                    let job = &jobs[token as usize];
                    assert_eq!((job.from, job.message.as_ref()), (1 - n, Some(message)));
                    assert_moved(world, job);
                }
            }
            for (token, result) in &world.nodes[n].done[self.seen[n].1..] {
                let job = &jobs[*token as usize];
                match result {
                    Ok(()) => assert_moved(world, job),
                    Err(_) => self.quiet.push((*token, target_bytes(world, job))),
                }
            }
            self.seen[n] = (world.nodes[n].delivered.len(), world.nodes[n].done.len());
        }
    }

    /// What was reported as failed was quiet from then on.
    fn verify(&self, world: &World, jobs: &[Job]) {
        for (token, bytes) in &self.quiet {
            let job = &jobs[*token as usize];
            assert_eq!(&target_bytes(world, job), bytes, "a late byte of {job:?}");
            assert_sentinels(world, job);
        }
    }
}

fn target_bytes(world: &World, job: &Job) -> Vec<u8> {
    let target = if job.direction == Direction::Write { 1 - job.from } else { job.from };
    let base = job.token as usize * SLOT + job.from * world.config.data_bytes / 2;
    world.nodes[target].mem.data(base, SLOT)
}

/// How many chunks and notifications came twice and were noticed.
fn run(seed: u64, kills: bool) -> u64 {
    let mut rng = Rng::new(seed);
    let mut world = World::new(config(&mut rng), seed);
    let (mut jobs, mut look, mut notes) = (Vec::<Job>::new(), Look::new(), [Vec::new(), Vec::new()]);
    let steps_between = rng.pick(&[0, 5, 60]);
    for token in 0..JOBS {
        let job = job(&mut rng, &world, token);
        let pieces = pieces(&job.spans);
        let (now, from) = (world.now, job.from);
        let submitted =
            world.nodes[from].channel.submit(now, token, job.direction, pieces, job.message.as_deref());
        jobs.push(job);
        if submitted == Err(TwoSubmitError::Ended) {
            // The epoch is over; the host tries again in the next.
            world.next_epoch();
            look.look(&world, &jobs);
            let job = &jobs[token as usize];
            world.submit(from, token, job.direction, &job.spans, job.message.as_deref());
        }
        world.pump(from);
        if rng.below(4) == 0 {
            let n = rng.below(2) as usize;
            let mut note = (1000 + notes[n].len() as u64).to_le_bytes().to_vec();
            let longest = rng.pick(&[1, 60, 4000]);
            note.resize(8 + rng.below(longest) as usize, 5);
            let (deadline, note_token) = (world.now.plus_ms(600_000), 1000 + notes[n].len() as u64);
            let resolve = rng.pick(&[Resolve::Sent, Resolve::Taken]);
            if world.nodes[n].channel.notify(note_token, &note, resolve, deadline).is_ok() {
                notes[n].push(note);
            }
            world.pump(n);
        }
        for _ in 0..rng.below(steps_between + 1) {
            world.step();
            look.look(&world, &jobs);
        }
        if rng.below(8) == 0 {
            let victim = rng.below(token + 1);
            let job = &mut jobs[victim as usize];
            let outcome = world.nodes[job.from].channel.cancel(victim);
            job.canceled |= matches!(outcome, TwoCancel::Canceled | TwoCancel::Draining);
            world.pump(jobs[victim as usize].from);
        }
        if rng.below(6) == 0 {
            world.pass(1);
        }
        if kills && rng.below(15) == 0 {
            let index = rng.below(u64::from(world.config.lanes) + 1) as usize;
            world.fence(rng.below(2) as usize, index);
            for _ in 0..rng.below(30) {
                world.step();
                look.look(&world, &jobs);
            }
            world.next_epoch();
            look.look(&world, &jobs);
        }
    }
    world.pass(200);
    if world.nodes.iter().any(|node| node.ended.is_some()) {
        world.next_epoch();
        world.pass(200);
    }
    look.look(&world, &jobs);
    verify(&mut world, &jobs, &notes);
    look.verify(&world, &jobs);
    let twice = world.nodes.iter().map(|node| {
        let stats = node.channel.stats();
        stats.counters.duplicate_chunks + stats.note_duplicates
    });
    twice.sum()
}

fn verify(world: &mut World, jobs: &[Job], notes: &[Vec<Vec<u8>>; 2]) {
    for n in [0, 1] {
        let standalone = |m: &&Vec<u8>| u64::from_le_bytes(m[..8].try_into().unwrap()) >= 1000;
        let got: Vec<&Vec<u8>> = world.nodes[1 - n].delivered.iter().filter(standalone).collect();
        assert_eq!(got, notes[n].iter().collect::<Vec<_>>(), "notifications in order, once each");
        let mut ended: Vec<u64> =
            world.nodes[n].notes.iter().map(|(token, sent)| token * u64::from(*sent)).collect();
        ended.sort_unstable();
        assert_eq!(ended, (1000..1000 + notes[n].len() as u64).collect::<Vec<_>>(), "each resolved once");
    }
    for job in jobs {
        let result = world.result_of(job.from, job.token);
        let Some(result) = result else {
            panic!("{:?} does not end: {:#?}", job.token, world.nodes[job.from].channel.stats())
        };
        match (result, job.canceled) {
            // An ABORT may come when all is there already.
            (Ok(()), _) | (Err(XferFailure::Canceled), true) => {}
            other => panic!("{other:?} of {job:?}"),
        }
        let told = job.token.to_le_bytes();
        let count = world.nodes[1 - job.from].delivered.iter().filter(|m| m[..8] == told).count();
        assert_eq!(count, usize::from(result.is_ok() && job.message.is_some()), "{job:?}");
    }
    world.audit();
}

fn seeds(count: u64) -> Vec<u64> {
    match std::env::var("BATON_TEST_SEED") {
        Ok(seed) => vec![seed.parse().expect("BATON_TEST_SEED is a number")],
        Err(_) => {
            let first = std::env::var("BATON_TEST_FIRST").map_or(0, |n| n.parse().expect("a number"));
            let count = std::env::var("BATON_TEST_SEEDS").map_or(count, |n| n.parse().expect("a number"));
            (first..first + count).collect()
        }
    }
}

fn each(count: u64, test: impl Fn(u64) -> u64) -> u64 {
    let mut sum = 0;
    for seed in seeds(count) {
        match catch_unwind(AssertUnwindSafe(|| test(seed))) {
            Ok(n) => sum += n,
            Err(panic) => {
                eprintln!("repeat with BATON_TEST_SEED={seed}");
                resume_unwind(panic);
            }
        }
    }
    sum
}

#[test]
fn random_worlds_move_every_byte_and_deliver_every_message_once() {
    assert_eq!(each(60, |seed| run(seed, false)), 0, "nothing comes twice without a reason");
}

#[test]
fn kills_at_any_moment_are_survived_by_sending_again_without_a_byte_or_message_twice() {
    let twice = each(60, |seed| run(seed + 100_000, true));
    assert!(twice > 0 || std::env::var("BATON_TEST_SEED").is_ok(), "something was sent again");
}

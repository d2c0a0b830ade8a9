//! The measured loop: iterations of one thread, posted and looked at until they are done.

use std::collections::VecDeque;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use baton_bench::Rounds;
use baton_host::{BlockList, Desc, Engine, Op, Transfer};

use crate::Outcome;
use crate::engine::name;
use crate::plan::Arm;
use crate::target::{SIDE, between_looks};

/// Where the blocks of one iteration are.
pub struct Blocks {
    pub local: Vec<Desc>,
    pub remote: Vec<Desc>,
}

/// Both sides' blocks of a case as lists, which iterations pick from by index.
pub struct Lists {
    pub local: BlockList,
    pub remote: BlockList,
    /// Indices of each iteration's blocks, here and there.
    pub picks: Vec<(Vec<u32>, Vec<u32>)>,
}

/// Everything that one arm needs to run a case.
pub struct Bench<'a> {
    pub engine: &'a Engine,
    pub arm: Arm,
    pub op: Op,
    pub blocks: &'a [Blocks],
    pub lists: Option<Lists>,
    /// Requests of each iteration, where they are prepared once.
    pub ready: Vec<Vec<Transfer>>,
    pub depth: usize,
    /// What every notification says; none without notifications.
    pub message: Option<&'a [u8]>,
    pub look: Duration,
    pub patience: Duration,
    /// Iterations of a thread so far: the next one goes on with the next request.
    pub begun: u64,
}

/// An iteration on its way.
struct Flight {
    number: usize,
    started: Instant,
    posted: Instant,
    /// Requests that are done, counted from the first.
    done: usize,
    /// Its own requests, where every iteration makes them.
    own: Vec<Transfer>,
}

/// When a thread was at work, and what it measured.
pub struct Laps {
    pub started: Instant,
    pub ended: Instant,
    pub times: Rounds,
}

/// Microseconds.
pub fn us(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

impl Bench<'_> {
    /// Creates the requests of iteration `number`.
    pub fn create(&self, number: usize) -> Outcome<Vec<Transfer>> {
        let peer = name(SIDE, self.arm.engine);
        let count = self.blocks[number].local.len();
        let each = if self.arm.batched { count } else { 1 };
        let make = |from: usize| {
            let part = from..from + each;
            let made = match &self.lists {
                Some(Lists { local, remote, picks }) => {
                    let (mine, theirs) = &picks[number];
                    let (mine, theirs) = ((local, &mine[part.clone()]), (remote, &theirs[part]));
                    self.engine.create_xfer_from_indices(self.op, &peer, mine, theirs)
                }
                None => {
                    let Blocks { local, remote } = &self.blocks[number];
                    self.engine.create_xfer(self.op, &peer, &local[part.clone()], &remote[part])
                }
            };
            made.map_err(|error| error.to_string())
        };
        (0..count).step_by(each).map(make).collect()
    }

    fn start(&self, number: usize, times: &mut Rounds) -> Outcome<Flight> {
        let started = Instant::now();
        let (own, created) = match self.arm.prepared {
            true => (Vec::new(), started),
            false => {
                let own = self.create(number)?;
                let created = Instant::now();
                times.prep_us.push(us(created - started));
                (own, created)
            }
        };
        let requests = if self.arm.prepared { &self.ready[number] } else { &own };
        for request in requests {
            request.post(self.message).map_err(|error| error.to_string())?;
        }
        let posted = Instant::now();
        times.post_us.push(us(posted - created));
        Ok(Flight { number, started, posted, done: 0, own })
    }

    /// Looks at an iteration; whether all its requests are done.
    fn look_at(&self, flight: &mut Flight) -> Outcome<bool> {
        let requests = if self.arm.prepared { &self.ready[flight.number] } else { &flight.own };
        while let Some(request) = requests.get(flight.done) {
            match request.status_raw() {
                code if code < 0 => return Err(request.error_text()),
                baton_host::abi::BATON_OK => flight.done += 1,
                _ => return Ok(false),
            }
        }
        Ok(true)
    }

    /// Does `count` iterations with the requests from `first` on, `requests` of them in turn.
    fn turn(&self, first: usize, requests: usize, count: u64) -> Outcome<Laps> {
        let mut times = Rounds::default();
        times.latency_us.reserve(count as usize);
        let mut flights: VecDeque<Flight> = VecDeque::with_capacity(self.depth);
        let started = Instant::now();
        let (mut begun, mut done, mut last, mut idle) = (0u64, 0u64, started, 0u32);
        while done < count {
            while begun < count && flights.len() < self.depth.min(requests) {
                let number = first + ((self.begun + begun) % requests as u64) as usize;
                // What is still under way there was begun a whole turn ago.
                if flights.iter().any(|flight| flight.number == number) {
                    break;
                }
                flights.push_back(self.start(number, &mut times)?);
                begun += 1;
            }
            let before = done;
            let mut at = 0;
            while at < flights.len() {
                if !self.look_at(&mut flights[at])? {
                    at += 1;
                    continue;
                }
                let now = Instant::now();
                if let Some(flight) = flights.remove(at) {
                    times.latency_us.push(us(now - flight.started));
                    times.tx_us.push(us(now - flight.posted));
                }
                (last, done) = (now, done + 1);
            }
            idle = if done == before { idle.wrapping_add(1) } else { 0 };
            if idle > 0 {
                self.wait(idle, last)?;
            }
        }
        Ok(Laps { started, ended: Instant::now(), times })
    }

    /// Between two looks in vain.
    pub fn wait(&self, idle: u32, last: Instant) -> Outcome<()> {
        if idle.is_multiple_of(256) && last.elapsed() > self.patience {
            let stats = self.engine.stats().unwrap_or_default();
            return Err(format!("nothing ended within {} s: {stats}", self.patience.as_secs()));
        }
        between_looks(self.look, idle);
        Ok(())
    }

    /// Does `count` iterations in each of `threads`; from the first one's start to the last one's end.
    pub fn run(&mut self, threads: usize, count: u64) -> Outcome<Laps> {
        let laps = self.all(threads, count)?;
        self.begun += count;
        Ok(laps)
    }

    fn all(&self, threads: usize, count: u64) -> Outcome<Laps> {
        let requests = self.blocks.len() / threads;
        if threads == 1 {
            return self.turn(0, requests, count);
        }
        let gate = Barrier::new(threads);
        let all = std::thread::scope(|scope| {
            let one = |thread: usize| {
                let gate = &gate;
                scope.spawn(move || {
                    gate.wait();
                    self.turn(thread * requests, requests, count)
                })
            };
            let running: Vec<_> = (0..threads).map(one).collect();
            let join = |handle: std::thread::ScopedJoinHandle<'_, Outcome<Laps>>| {
                handle.join().map_err(|_| "a posting thread panicked".to_owned())?
            };
            running.into_iter().map(join).collect::<Outcome<Vec<Laps>>>()
        })?;
        let mut all = all.into_iter();
        let mut sum = all.next().ok_or("no thread")?;
        for laps in all {
            (sum.started, sum.ended) = (sum.started.min(laps.started), sum.ended.max(laps.ended));
            absorb(&mut sum.times, laps.times);
        }
        Ok(sum)
    }
}

/// Adds the times of some to those of others.
pub fn absorb(all: &mut Rounds, more: Rounds) {
    all.rounds.extend(more.rounds);
    all.latency_us.extend(more.latency_us);
    all.prep_us.extend(more.prep_us);
    all.post_us.extend(more.post_us);
    all.tx_us.extend(more.tx_us);
    all.first_us.extend(more.first_us);
}

//! What an engine's local copies are measured by: the same blocks moved by a bare loop, or by memcpy in one process.

use std::sync::Barrier;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use baton_bench::Rounds;

use crate::Outcome;
use crate::bare::{FAILED, MAX_THREADS, Words, Work, moves, pulls, spin};
use crate::loops::{Laps, absorb, us};
use crate::memory::Pool;
use crate::remote::Remote;
use crate::target::Order;

/// A way to move blocks without an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// process_vm_readv by the owner of the memory that is written, and a word that says so.
    Bare,
    /// Within one process.
    Memcpy,
}

/// One of them, by one thread or by several that share each request's blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rival {
    pub kind: Kind,
    pub threads: usize,
}

/// All of them; the first is what engines are compared with.
pub const RIVALS: [Rival; 4] = [
    Rival { kind: Kind::Bare, threads: 1 },
    Rival { kind: Kind::Bare, threads: MAX_THREADS },
    Rival { kind: Kind::Memcpy, threads: 1 },
    Rival { kind: Kind::Memcpy, threads: MAX_THREADS },
];

impl Rival {
    pub fn label(self) -> String {
        let kind = match self.kind {
            Kind::Bare => "bare",
            Kind::Memcpy => "memcpy",
        };
        if self.threads == 1 { kind.to_owned() } else { format!("{kind} x{}", self.threads) }
    }
}

/// Memory and means of all rivals in one case.
pub struct Field<'a> {
    pub own: &'a Pool,
    /// A second pool of this process, for memcpy.
    pub copy: Pool,
    pub words: Words,
    /// Where the target's memory starts.
    pub base: u64,
    pub writes: bool,
    pub patience: Duration,
}

/// A rival that takes turns.
pub struct Bout<'a> {
    pub rival: Rival,
    pub field: &'a Field<'a>,
    /// Iterations so far: the next one goes on with the next request.
    pub begun: u64,
}

impl Bout<'_> {
    /// Readies the target for a round.
    pub fn begin(&self, remote: &mut Remote) -> Outcome<()> {
        if self.rival.kind == Kind::Memcpy {
            return Ok(());
        }
        self.field.words.reset();
        remote.tell(&Order::Answer(Work {
            page: self.field.words.path(),
            pid: std::process::id(),
            base: self.field.own.at(0).addr() as u64,
            writes: self.field.writes,
            threads: self.rival.threads,
            first: self.begun,
        }))
    }

    /// Ends what `begin` began.
    pub fn end(&self, remote: &mut Remote) -> Outcome<()> {
        if self.rival.kind == Kind::Memcpy {
            return Ok(());
        }
        self.field.words.end();
        remote.tell(&Order::Answered)
    }

    /// `count` iterations after `so_far` of this round; the target has heard of all of them in the end.
    pub fn run(&mut self, pid: u32, so_far: u64, count: u64) -> Outcome<Laps> {
        let gate = Barrier::new(self.rival.threads);
        let this = &*self;
        let all = std::thread::scope(|scope| {
            let one = |thread: usize| {
                let gate = &gate;
                scope.spawn(move || this.turn(thread, pid, so_far, count, gate))
            };
            let running: Vec<_> = (0..this.rival.threads).map(one).collect();
            let join = |handle: std::thread::ScopedJoinHandle<'_, Outcome<Laps>>| {
                handle.join().map_err(|_| "a copying thread panicked".to_owned())?
            };
            running.into_iter().map(join).collect::<Outcome<Vec<Laps>>>()
        })?;
        self.begun += count;
        let mut all = all.into_iter();
        let mut sum = all.next().ok_or("no thread")?;
        for laps in all {
            (sum.started, sum.ended) = (sum.started.min(laps.started), sum.ended.max(laps.ended));
            absorb(&mut sum.times, laps.times);
        }
        Ok(sum)
    }

    fn turn(&self, thread: usize, pid: u32, so_far: u64, count: u64, gate: &Barrier) -> Outcome<Laps> {
        let Field { own, copy, base, writes, .. } = self.field;
        let part = (thread, self.rival.threads);
        let (layout, order) = (own.layout(), own.layout().order());
        let copies: Vec<_> = match self.rival.kind {
            Kind::Memcpy => (0..layout.requests).map(|at| moves(layout, &order, at, *writes, part)).collect(),
            Kind::Bare => Vec::new(),
        };
        let pulls = match self.rival.kind {
            Kind::Bare if !writes => pulls(own, pid, *base, false, part),
            _ => Vec::new(),
        };
        let mut times = Rounds::default();
        times.latency_us.reserve(count as usize);
        gate.wait();
        let started = Instant::now();
        let mut before = started;
        for n in 1..=count {
            let request = ((self.begun + n - 1) % layout.requests as u64) as usize;
            match self.rival.kind {
                Kind::Memcpy => {
                    copies[request]
                        .iter()
                        .for_each(|(to, from)| copy.copy_from(own, *to, *from, layout.size));
                }
                Kind::Bare => {
                    if let Some(pull) = pulls.get(request) {
                        pull.go()?;
                    }
                    self.field.words.asked(thread).store(so_far + n, Ordering::Release);
                    // What was only heard of need not have been heard before the next.
                    if *writes || n == count {
                        self.wait(thread, so_far + n)?;
                    }
                }
            }
            let now = Instant::now();
            times.latency_us.push(us(now - before));
            before = now;
        }
        Ok(Laps { started, ended: before, times })
    }

    /// Until the target has done, or heard of, so many.
    fn wait(&self, thread: usize, count: u64) -> Outcome<()> {
        let (mut looks, started) = (0u32, Instant::now());
        loop {
            match self.field.words.done(thread).load(Ordering::Acquire) {
                FAILED => return Err("the target could not pull".to_owned()),
                done if done >= count => return Ok(()),
                _ => {}
            }
            looks = looks.wrapping_add(1);
            if looks.is_multiple_of(1024) && started.elapsed() > self.field.patience {
                return Err(format!("the target did nothing for {} s", self.field.patience.as_secs()));
            }
            spin(looks);
        }
    }
}

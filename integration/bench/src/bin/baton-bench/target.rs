//! The passive side: holds memory, and listens for notifications while it is told to.

use std::io::{BufRead, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use baton_bench::Counts;
use baton_host::Engine;
use clap::Args;
use serde::{Deserialize, Serialize};

use crate::bare::{Answering, Work};
use crate::engine::{Settings, Setup, counts, name, port};
use crate::memory::{Layout, Pools};
use crate::queue_pair::{Address, End};
use crate::{Outcome, cpu, messages};

/// What its agents' names begin with.
pub const SIDE: &str = "target";
/// What it waits for at most.
const PATIENCE: Duration = Duration::from_secs(120);

#[derive(Args)]
pub struct Options {
    #[command(flatten)]
    settings: Settings,
    /// Devices of this side.
    #[arg(long)]
    devices: Option<String>,
    /// Microseconds between two looks for notifications; 0: without a pause.
    #[arg(long, default_value_t = 0)]
    look_us: u64,
}

/// What it is told to do, a line each.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// Open engines.
    Open(Vec<Setup>),
    /// Make memory instead of what was there.
    Hold(Layout),
    /// Fill it.
    Fill(u64),
    /// Check that of an engine: filled with the first, written from a side filled with the second.
    Check(usize, u64, u64),
    /// Begin to take the notifications of one engine.
    Listen(usize),
    /// Wait until so many have come since then, and stop.
    Heard(u64),
    /// Take so many bare notifications of so many bytes from the first engine's peer.
    Hear(u64, usize),
    /// The same, each sent back to the peer with this name and connection information.
    Echo(u64, usize, String, Vec<u8>),
    /// Begin to do what a bare loop of the initiator asks for by words in a shared page.
    Answer(Work),
    /// Wait until its threads, which were told to end, have done so.
    Answered,
    /// Make a bare queue pair for its memory.
    QueuePair,
    /// Connect it.
    ConnectQueuePair(Address),
    /// Begin to take what tells of blocks over it.
    ListenToQueuePair,
    /// Tell what it has spent so far.
    Spent,
}

/// What it answers, a line each.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// Connection information of every engine.
    Open(Vec<Vec<u8>>),
    /// How to reach its memory.
    Memory {
        /// What a peer imports, for every engine.
        blobs: Vec<Vec<u8>>,
        /// Where that of every engine starts.
        addrs: Vec<u64>,
    },
    /// It is done.
    Done,
    /// Its bare queue pair.
    QueuePair(Address),
    /// What it has spent.
    Spent(Spent),
    /// Why it could not.
    Failed(String),
}

/// CPU time of a process, and what it did to devices.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Spent {
    pub cpu: Duration,
    pub counts: Counts,
}

impl Spent {
    /// So far.
    pub fn now(engines: &[Engine], pair: Option<&End>) -> Outcome<Spent> {
        let counts = counts(engines)? + pair.map(End::counts).unwrap_or_default();
        Ok(Spent { cpu: cpu::of_process(), counts })
    }
}

/// A thread that takes what tells of blocks.
struct Listener {
    heard: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Outcome<()>>,
}

struct Target<'a> {
    options: &'a Options,
    look: Duration,
    // Dropped before the engines.
    pair: Option<Arc<End>>,
    pools: Option<Pools>,
    answering: Option<Answering>,
    listener: Option<Listener>,
    engines: Vec<Engine>,
    /// For each engine, whether it makes its own memory.
    managed: Vec<bool>,
}

/// Between two looks in vain, of which this is the `vain`-th in a row: both sides wait alike, so that neither is late by its own habits.
pub fn between_looks(look: Duration, vain: u32) {
    // Spinning means spinning, but whoever does the work may need this core.
    match look.is_zero() && !vain.is_multiple_of(16) {
        true => std::hint::spin_loop(),
        false => pause(look),
    }
}

/// Pauses, or lets others run.
pub fn pause(look: Duration) {
    if look.is_zero() { std::thread::yield_now() } else { std::thread::sleep(look) }
}

impl Listener {
    /// `take` answers how many it took.
    fn start(look: Duration, mut take: impl FnMut() -> Outcome<u64> + Send + 'static) -> Listener {
        let (heard, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let (count, end) = (Arc::clone(&heard), Arc::clone(&stop));
        let thread = std::thread::spawn(move || {
            let mut vain = 0u32;
            while !end.load(Ordering::Relaxed) {
                let some = take()?;
                vain = if some == 0 { vain.wrapping_add(1) } else { 0 };
                if vain > 0 {
                    between_looks(look, vain);
                }
                count.fetch_add(some, Ordering::Release);
            }
            Ok(())
        });
        Listener { heard, stop, thread }
    }

    fn end(self, count: u64, look: Duration) -> Outcome<()> {
        let deadline = Instant::now() + PATIENCE;
        let heard = loop {
            let heard = self.heard.load(Ordering::Acquire);
            if heard >= count || self.thread.is_finished() || Instant::now() > deadline {
                break heard;
            }
            pause(look);
        };
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().map_err(|_| "the listening thread panicked")??;
        if heard == count { Ok(()) } else { Err(format!("{heard} notifications instead of {count}")) }
    }
}

impl Target<'_> {
    fn obey(&mut self, order: Order) -> Outcome<Answer> {
        let none = || "no memory yet".to_owned();
        match order {
            Order::Open(setups) => return self.open(&setups),
            Order::Hold(layout) => return self.hold(layout),
            Order::Fill(seed) => self.pools.as_ref().ok_or_else(none)?.fill(seed),
            Order::Check(engine, own, source) => {
                self.engines.get(engine).ok_or_else(|| format!("no engine {engine}"))?;
                self.pools.as_ref().ok_or_else(none)?.of(engine).0.check(own, source, true)?;
            }
            Order::Listen(engine) => {
                let engine = self.engines.get(engine).ok_or_else(|| format!("no engine {engine}"))?;
                let engine = engine.clone();
                let take = move || {
                    let some = engine.notifications().map_err(|error| error.to_string())?;
                    Ok(some.len() as u64)
                };
                self.listener = Some(Listener::start(self.look, take));
            }
            Order::Heard(count) => {
                let listener = self.listener.take().ok_or("it was not told to listen")?;
                listener.end(count, self.look)?;
            }
            Order::Hear(count, bytes) => {
                messages::hear(self.first()?, 0..count, bytes, self.look, PATIENCE)?;
            }
            Order::Echo(count, bytes, peer, info) => {
                let engine = self.first()?;
                engine.load_remote(&peer, &info).map_err(|error| error.to_string())?;
                for number in 0..count {
                    messages::hear(engine, number..number + 1, bytes, self.look, PATIENCE)?;
                    messages::send(engine, &peer, &messages::message(number, bytes), self.look, PATIENCE)?;
                }
            }
            Order::Answer(work) => {
                self.answering =
                    Some(Answering::start(self.pools.as_ref().ok_or_else(none)?.of(0).0, &work)?);
            }
            Order::Answered => self.answering.take().ok_or("it was not told to answer")?.end()?,
            Order::QueuePair => {
                let pool = self.pools.as_ref().ok_or_else(none)?.of(0).0;
                let end = self.pair.insert(Arc::new(End::new(port(self.first()?)?, pool)?));
                return Ok(Answer::QueuePair(end.address()));
            }
            Order::ConnectQueuePair(peer) => self.pair()?.connect(&peer)?,
            Order::ListenToQueuePair => {
                self.listener = Some(Listener::start(self.look, self.pair()?.taker()));
            }
            Order::Spent => return Ok(Answer::Spent(Spent::now(&self.engines, self.pair.as_deref())?)),
        }
        Ok(Answer::Done)
    }

    fn first(&self) -> Outcome<&Engine> {
        self.engines.first().ok_or_else(|| "no engine yet".to_owned())
    }

    fn pair(&self) -> Outcome<&Arc<End>> {
        self.pair.as_ref().ok_or_else(|| "no queue pair yet".to_owned())
    }

    fn open(&mut self, setups: &[Setup]) -> Outcome<Answer> {
        let Options { settings, devices, .. } = self.options;
        let one = |(number, setup)| settings.open(&name(SIDE, number), devices.as_deref(), setup);
        self.managed = setups.iter().map(|setup| setup.managed).collect();
        self.engines = setups.iter().enumerate().map(one).collect::<Outcome<_>>()?;
        let info = |engine: &Engine| engine.conn_info().map_err(|error| error.to_string());
        Ok(Answer::Open(self.engines.iter().map(info).collect::<Outcome<_>>()?))
    }

    fn hold(&mut self, layout: Layout) -> Outcome<Answer> {
        (self.pair, self.pools) = (None, None);
        let pools = self.pools.insert(Pools::new(&self.engines, &self.managed, layout)?);
        let all = || (0..self.engines.len()).map(|engine| pools.of(engine));
        let blobs = all().map(|(pool, place)| pool.export(place)).collect::<Outcome<_>>()?;
        Ok(Answer::Memory { blobs, addrs: all().map(|(pool, _)| pool.addr()).collect() })
    }
}

fn say(answer: &Answer) -> Outcome<()> {
    let line = serde_json::to_string(answer).map_err(|error| error.to_string())?;
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).map_err(|error| error.to_string())
}

/// Obeys until its input ends.
pub fn serve(options: &Options) -> Outcome<()> {
    let look = Duration::from_micros(options.look_us);
    let mut target = Target {
        options,
        look,
        pair: None,
        pools: None,
        answering: None,
        listener: None,
        engines: Vec::new(),
        managed: Vec::new(),
    };
    for line in std::io::stdin().lock().lines() {
        let line = line.map_err(|error| error.to_string())?;
        let order = serde_json::from_str(&line).map_err(|error| format!("{line}: {error}"))?;
        say(&target.obey(order).unwrap_or_else(Answer::Failed))?;
    }
    Ok(())
}

//! What the completion of a fused WRITE takes and the hand-over of its notification to the host, in time: many rounds of both, each
//! next to the same clock and the same call of the fabric without an engine.
//!
//! ```text
//!   gross      one call, from one look at the clock to the next
//!   baseline   one poll of the fabric that finds one completion, measured likewise, in the same round
//!   net        gross − baseline, of the medians; and of the means without the slowest hundredth, which holds what was interrupted
//!              and keeps the credit that goes back now and then
//! ```

use std::sync::Arc;

use baton_driver::{Status, Taker, Xfer};

use crate::steps::{WARM_UP, timed};
use crate::wire::{self, Alone, Calls};
use crate::{Engines, counted_completion, counted_notify};

const ROUNDS: usize = 20_000;
/// What both may take together, net.
const GOAL_NS: f64 = 300.0;

/// What the host does with a notification: it copies it, as over the ABI.
pub struct Host {
    buffer: Vec<u8>,
    taken: usize,
}

impl Default for Host {
    fn default() -> Host {
        Host { buffer: Vec::with_capacity(4096), taken: 0 }
    }
}

impl Host {
    pub fn taken(&self) -> usize {
        self.taken
    }
}

impl Taker for Host {
    fn admits(&mut self, name: &str, message: &[u8]) -> bool {
        name.len() + message.len() <= self.buffer.capacity()
    }

    fn take(&mut self, name: &str, message: &[u8]) {
        self.buffer.clear();
        self.buffer.extend_from_slice(name.as_bytes());
        self.buffer.extend_from_slice(message);
        self.taken += 1;
    }
}

/// Nanoseconds of all rounds.
struct Series(Vec<u64>);

impl Series {
    fn new() -> Series {
        Series(Vec::with_capacity(ROUNDS))
    }

    /// Median, and mean without the slowest hundredth.
    fn figures(mut self) -> [f64; 2] {
        self.0.sort_unstable();
        let kept = &self.0[..self.0.len() * 99 / 100];
        [self.0[self.0.len() / 2] as f64, kept.iter().sum::<u64>() as f64 / kept.len() as f64]
    }
}

/// Nanoseconds and calls of the fabric.
type Sample = (u64, Calls);

/// Poll without an engine, completion, hand-over. None where a thread of an engine, which may poll as well, was first.
fn round(
    engines: &Engines,
    alone: &mut Alone,
    host: &mut Host,
    xfer: &Arc<Xfer>,
    message: Option<&[u8]>,
) -> Option<[Sample; 3]> {
    let Engines { a, b, .. } = engines;
    a.post(xfer, message).expect("posted");
    alone.post();
    let (ns, found) = timed(|| alone.poll());
    assert_eq!(found, 1, "one completion for one post");
    let polled = (ns, wire::take_calls());
    let (ns, status) = timed(|| counted_completion(a, xfer));
    let completed = (ns, wire::take_calls());
    let (ns, taken) = timed(|| counted_notify(b, host));
    let notified = (ns, wire::take_calls());
    let alone_at_it = [completed, notified].iter().all(|(_, calls)| calls.found == 1);
    if !alone_at_it || taken == 0 || !matches!(status, Status::Done) {
        engines.finish(xfer);
        return None;
    }
    assert_eq!(host.buffer.strip_prefix(b"a"), message, "the message of the sender");
    Some([polled, completed, notified])
}

/// Times them and prints the table.
pub fn report(engines: &Engines, xfer: &Arc<Xfer>, message: Option<&[u8]>) {
    let (mut alone, mut host) = (Alone::new(), Host::default());
    let mut series = [Series::new(), Series::new(), Series::new()];
    let mut calls = [Calls::default(); 3];
    for nth in 0..WARM_UP + ROUNDS {
        let Some(samples) = round(engines, &mut alone, &mut host, xfer, message) else { continue };
        if nth < WARM_UP {
            continue;
        }
        for ((series, calls), (ns, made)) in series.iter_mut().zip(&mut calls).zip(samples) {
            series.0.push(ns);
            calls.add(made);
        }
    }
    let rounds = series[0].0.len();
    assert!(rounds > ROUNDS / 2, "only {rounds} of {ROUNDS} rounds were ours: the machine is too busy");
    println!(
        "\n{:<24} {:>8} {:>8} {:>8}   {:>8}   calls of the fabric a round",
        format!("median of {rounds}"),
        "gross",
        "baseline",
        "net",
        "net mean"
    );
    let [base, completion, notify] = series.map(Series::figures);
    let mut sum = [0.0; 4];
    for (name, gross, calls) in [("completion", completion, calls[1]), ("notify", notify, calls[2])] {
        let row = [gross[0], base[0], gross[0] - base[0], gross[1] - base[1]];
        sum.iter_mut().zip(row).for_each(|(sum, one)| *sum += one);
        line(name, row, &calls.per(rounds));
    }
    line("completion + notify", sum, &format!("goal: at most {GOAL_NS} ns net"));
}

fn line(name: &str, [gross, base, net, mean]: [f64; 4], more: &str) {
    println!("{name:<24} {gross:>5.0} ns {base:>5.0} ns {net:>5.0} ns   {mean:>5.0} ns   {more}");
}

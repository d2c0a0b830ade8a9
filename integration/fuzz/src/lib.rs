//! Fuzz targets for everything that parses a peer's bytes, and for the machines that act on what was parsed.
//!
//! A target takes any bytes and panics where something does not hold that always must. `cargo xtask fuzz` drives them with
//! libFuzzer, which looks for bytes that reach new code; here they are run on their seeds and on simple changes of them.
#![forbid(unsafe_code)]
// Both toy worlds have the same generator.
#![allow(clippy::duplicate_mod)]

mod channel;
mod control;
mod conversation;
mod handshake;
mod input;
mod message;
mod record;
mod samples;
mod session;
mod stream;
mod tcp;
mod texts;
mod words;

// The toy worlds of the core's own tests: two sessions joined by a fabric in memory that checks what hardware would punish.
#[allow(unused_imports)]
#[path = "../../../plugin/core/tests/toy/mod.rs"]
mod toy;
#[path = "../../../plugin/core/tests/two_toy/mod.rs"]
mod two_toy;

/// One thing that reads a peer's bytes.
pub struct Target {
    /// Its name on the command line.
    pub name: &'static str,
    /// Runs one input; panics where it finds a fault.
    pub run: fn(&[u8]),
    /// Inputs to begin with: what a well-behaved peer sends.
    pub seeds: fn() -> Vec<Vec<u8>>,
    /// Longest input that is of use.
    pub max_len: usize,
}

/// All targets.
pub const TARGETS: &[Target] = &[
    Target { name: "control-frame", run: control::run, seeds: control::seeds, max_len: 1100 },
    Target { name: "data-message", run: message::run, seeds: message::seeds, max_len: 1100 },
    Target { name: "record", run: record::run, seeds: record::seeds, max_len: 512 },
    Target { name: "words", run: words::run, seeds: words::seeds, max_len: 512 },
    Target { name: "frame-stream", run: stream::run, seeds: stream::seeds, max_len: 4096 },
    Target { name: "region-blob", run: texts::run_region, seeds: texts::region_seeds, max_len: 1024 },
    Target { name: "conn-info", run: texts::run_conn_info, seeds: texts::conn_info_seeds, max_len: 2048 },
    Target { name: "handshake-message", run: texts::run_message, seeds: texts::message_seeds, max_len: 8192 },
    Target { name: "lifeline-frame", run: texts::run_lifeline, seeds: texts::lifeline_seeds, max_len: 2048 },
    Target {
        name: "listener",
        run: handshake::run_listener,
        seeds: handshake::listener_seeds,
        max_len: 8192,
    },
    Target {
        name: "initiator",
        run: handshake::run_initiator,
        seeds: handshake::initiator_seeds,
        max_len: 8192,
    },
    Target { name: "tcp-frame", run: tcp::run, seeds: tcp::seeds, max_len: 1024 },
    Target { name: "two-sided-channel", run: channel::run, seeds: channel::seeds, max_len: 2048 },
    Target { name: "one-sided-session", run: session::run, seeds: session::seeds, max_len: 2048 },
];

/// Words that stand in the seeds, for the fuzzer to put where it likes: JSON's keys and texts, quotes included.
pub fn dictionary(seeds: &[Vec<u8>]) -> Vec<String> {
    let mut words = std::collections::BTreeSet::new();
    for text in seeds.iter().flat_map(|seed| seed.utf8_chunks()) {
        let quoted = text.valid().split('"').skip(1).step_by(2);
        let plain =
            |word: &&str| (1..=40).contains(&word.len()) && word.bytes().all(|b| b.is_ascii_graphic());
        words.extend(quoted.filter(plain).map(|word| format!("\"{word}\"")));
    }
    words.into_iter().collect()
}

#[cfg(test)]
mod tests;

//! How the simulated network behaves.

use std::ops::RangeInclusive;

/// A rule of reliable connections that the world breaks on purpose, to prove that checkers notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sabotage {
    /// The target hears an immediate before its bytes are placed; only one below 2^30, so that messages which are parsed at once stay whole.
    ImmediateBeforeData,
    /// A SEND overtakes the WRITE in front of it.
    SendBeforeData,
    /// A fenced extra does not wait for READs.
    FenceIgnored,
    /// One WRITE in 50 lands with a wrong byte.
    WrongByte,
    /// WRITEs are acknowledged when their first piece is placed.
    EarlyAck,
    /// One completion of a send queue in 100 is lost.
    LostCompletion,
    /// One immediate or SEND in 20 is heard twice.
    RepeatedImmediate,
}

/// The behaviour of a world. Times are virtual nanoseconds; each is drawn anew from its range.
#[derive(Clone, Debug)]
pub struct SimConfig {
    /// Nodes, each with a fabric and memory of its own.
    pub nodes: usize,
    /// One way over the network.
    pub latency_ns: RangeInclusive<u64>,
    /// Between the starts of two work requests of one endpoint.
    pub launch_gap_ns: RangeInclusive<u64>,
    /// Between the pieces in which one work request moves.
    pub piece_gap_ns: RangeInclusive<u64>,
    /// Pieces of one work request at most.
    pub max_pieces: u64,
    /// How long the target of a READ takes before it samples its memory.
    pub read_delay_ns: RangeInclusive<u64>,
    /// How long a fenced endpoint goes on.
    pub flush_delay_ns: RangeInclusive<u64>,
    /// One of so many messages is stuck for `stall_ns`; 0: none.
    pub stall_one_in: u64,
    /// How long.
    pub stall_ns: RangeInclusive<u64>,
    /// One of so many completions overtakes those of other endpoints; 0: none.
    pub reorder_one_in: u64,
    /// No answer for this long ends a work request with `PeerGone`.
    pub retry_timeout_ns: u64,
    /// How often an immediate or SEND that finds no RECV is tried again …
    pub rnr_retries: u32,
    /// … and after how long.
    pub rnr_delay_ns: u64,
    /// READs on their way per endpoint.
    pub max_reads: usize,
    /// [`baton_fabric::Caps::max_sq_depth`] and `max_rq_depth`.
    pub max_depth: u32,
    /// [`baton_fabric::Caps::max_message_bytes`].
    pub max_message_bytes: u32,
    /// [`baton_fabric::Caps::inline_bytes`].
    pub inline_bytes: u32,
    /// [`baton_fabric::Caps::max_send_sge`].
    pub max_send_sge: u32,
    /// [`baton_fabric::Caps::headed_bytes`]; 0: every message goes into its slot whole.
    pub headed_bytes: u32,
    /// [`baton_fabric::Caps::default_lanes`].
    pub default_lanes: u8,
    /// [`baton_fabric::Caps::stripe_min_bytes`].
    pub stripe_min_bytes: u64,
    /// Rails of each node, 1 to 16; every endpoint is on one of them, and a key serves one of them.
    pub rails: u8,
    /// Memory is registered in segments of this length at most.
    pub segment_bytes: u64,
    /// Only for tests of checkers.
    pub sabotage: Option<Sabotage>,
}

impl Default for SimConfig {
    fn default() -> Self {
        SimConfig {
            nodes: 2,
            latency_ns: 500..=20_000,
            launch_gap_ns: 0..=2_000,
            piece_gap_ns: 0..=3_000,
            max_pieces: 4,
            read_delay_ns: 0..=30_000,
            flush_delay_ns: 0..=40_000,
            stall_one_in: 200,
            stall_ns: 50_000..=2_000_000,
            reorder_one_in: 4,
            retry_timeout_ns: 140_000_000,
            rnr_retries: 0,
            rnr_delay_ns: 640_000,
            max_reads: 16,
            max_depth: 4096,
            max_message_bytes: 4 << 20,
            inline_bytes: 220,
            max_send_sge: 16,
            headed_bytes: 0,
            default_lanes: 2,
            stripe_min_bytes: 4096,
            rails: 1,
            segment_bytes: u64::MAX,
            sabotage: None,
        }
    }
}

//! How to run, and what came of it.

use baton_core::notify::NotifyMode;
use baton_core::peer::Counters;
use baton_fabric_sim::Sabotage;

/// How to run.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Random steps before everything is left to come to rest.
    pub steps: u32,
    /// What goes wrong on purpose.
    pub faults: Faults,
    /// How completion is told; chosen by the seed, link by link, if nothing is said.
    pub notify: Option<NotifyMode>,
    /// Inline limit of the NICs; chosen by the seed if nothing is said.
    pub inline_bytes: Option<u32>,
    /// A rule of the network to break, for tests of the checkers.
    pub sabotage: Option<Sabotage>,
    /// Something that the driver is to forget, for tests of the checkers; the two-sided backend's only.
    pub neglect: Option<Neglect>,
}

/// What goes wrong on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Faults {
    /// Nothing.
    None,
    /// Whole nodes die, nothing else happens.
    Deaths,
    /// Endpoints and nodes die, networks partition, keys are wrong.
    All,
}

/// What a driver may forget, most of it when a peer does not come back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Neglect {
    /// Its transfers are not failed.
    Transfers,
    /// They are failed twice.
    TransfersTwice,
    /// Its notifications are not given up.
    Notifications,
    /// A copy out of a bounce slot goes on after its transfer was reported.
    Copies,
    /// Memory of the epoch stays registered.
    Memory,
    /// Its successor is taken for the same session.
    Session,
    /// The rest of a message that was lost with its endpoint is told of as placed.
    RestsTold,
    /// The rest of a message that was lost, or not wanted any more, is put to its place all the same, later.
    RestsLate,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            steps: 1500,
            faults: Faults::All,
            notify: None,
            inline_bytes: None,
            sabotage: None,
            neglect: None,
        }
    }
}

/// What a good run did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Of the world: two runs with the same digest did the same.
    pub digest: u64,
    /// Virtual time at the end.
    pub at_ns: u64,
    /// Transfers done.
    pub done: u64,
    /// Transfers failed or canceled.
    pub failed: u64,
    /// Notifications delivered.
    pub delivered: u64,
    /// Bytes of transfers that are done.
    pub bytes: u64,
    /// Epochs opened.
    pub epochs: u64,
    /// What the sessions did, to see that a run reaches what it is meant to reach.
    pub reached: Reached,
}

/// How often each way of the protocol was taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Reached {
    pub whole_posts: u64,
    pub sliced_posts: u64,
    pub tails_waited: u64,
    pub credit_writes: u64,
    pub leftover_flushes: u64,
    pub receives_reposted: u64,
    pub notifications_resent: u64,
    pub duplicates_dropped: u64,
    pub transfers_canceled: u64,
    pub transfers_failed: u64,
    pub ids_received: u64,
    pub partial_messages_dropped: u64,
    pub fragments_sent: u64,
}

impl Reached {
    pub(crate) fn add(&mut self, counters: &Counters) {
        self.whole_posts += counters.whole_posts;
        self.sliced_posts += counters.sliced_posts;
        self.tails_waited += counters.tails_waited;
        self.credit_writes += counters.credit_writes;
        self.leftover_flushes += counters.leftover_flushes;
        self.receives_reposted += counters.receives_reposted;
        self.notifications_resent += counters.notifications_resent;
        self.duplicates_dropped += counters.duplicates_dropped;
        self.transfers_canceled += counters.transfers_canceled;
        self.transfers_failed += counters.transfers_failed;
        self.ids_received += counters.ids_received;
        self.partial_messages_dropped += counters.partial_messages_dropped;
        self.fragments_sent += counters.fragments_sent;
    }

    /// By name.
    pub fn named(&self) -> [(&'static str, u64); 13] {
        [
            ("whole posts", self.whole_posts),
            ("sliced posts", self.sliced_posts),
            ("tails that waited", self.tails_waited),
            ("credit writes", self.credit_writes),
            ("leftover flushes", self.leftover_flushes),
            ("RECVs reposted", self.receives_reposted),
            ("notifications resent", self.notifications_resent),
            ("duplicates dropped", self.duplicates_dropped),
            ("transfers canceled", self.transfers_canceled),
            ("transfers failed", self.transfers_failed),
            ("ids that landed", self.ids_received),
            ("unfinished messages given up", self.partial_messages_dropped),
            ("fragments sent", self.fragments_sent),
        ]
    }

    /// Both together.
    pub fn plus(&self, other: &Reached) -> Reached {
        Reached {
            whole_posts: self.whole_posts + other.whole_posts,
            sliced_posts: self.sliced_posts + other.sliced_posts,
            tails_waited: self.tails_waited + other.tails_waited,
            credit_writes: self.credit_writes + other.credit_writes,
            leftover_flushes: self.leftover_flushes + other.leftover_flushes,
            receives_reposted: self.receives_reposted + other.receives_reposted,
            notifications_resent: self.notifications_resent + other.notifications_resent,
            duplicates_dropped: self.duplicates_dropped + other.duplicates_dropped,
            transfers_canceled: self.transfers_canceled + other.transfers_canceled,
            transfers_failed: self.transfers_failed + other.transfers_failed,
            ids_received: self.ids_received + other.ids_received,
            partial_messages_dropped: self.partial_messages_dropped + other.partial_messages_dropped,
            fragments_sent: self.fragments_sent + other.fragments_sent,
        }
    }
}

/// What went wrong, and when.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The run.
    pub seed: u64,
    /// Step; those after the random ones belong to the rest.
    pub step: u32,
    /// Virtual time.
    pub at_ns: u64,
    /// What.
    pub what: String,
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "seed {} failed at step {} ({} ns): {}", self.seed, self.step, self.at_ns, self.what)
    }
}

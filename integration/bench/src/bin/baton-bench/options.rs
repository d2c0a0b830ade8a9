//! What `baton-bench run` is asked for, checked before anything is opened or posted.

use std::path::PathBuf;

use baton_host::Op;
use clap::{Args, ValueEnum, value_parser};

use crate::Outcome;
use crate::engine::Settings;
use crate::memory::WORD;
use crate::output;
use crate::remote::How;

/// The largest block.
const MAX_SIZE: u64 = 4 << 30;

#[derive(Args, Clone, Debug)]
pub struct Options {
    #[command(flatten)]
    pub settings: Settings,
    /// How blocks travel; several, separated by commas, are compared with each other.
    #[arg(long, value_enum, default_value = "one-sided", value_delimiter = ',')]
    pub backend: Vec<Backend>,
    /// Devices of the initiator.
    #[arg(long)]
    pub devices: Option<String>,
    /// Devices of the target.
    #[arg(long)]
    pub target_devices: Option<String>,
    /// What starts `baton-bench` for the target, e.g. `ssh other /path/to/baton-bench`; default: this program.
    #[arg(long, value_name = "COMMAND")]
    pub target_command: Option<String>,
    /// Directions, separated by commas.
    #[arg(
        long,
        alias = "ops",
        value_enum,
        default_value = "write,read",
        default_value_if("seed_table", "true", "write"),
        value_delimiter = ','
    )]
    pub op: Vec<OpWord>,
    /// Bytes of a block, separated by commas.
    #[arg(long, default_value = "4096,65536,1048576", value_delimiter = ',', value_parser = size,
          default_value_if("seed_table", "true", "1024,2048,4096,8192,16384,32768,65536,131072,262144,524288,1048576"))]
    pub sizes: Vec<u64>,
    /// Every size from 8 bytes to 1 MiB, doubling, instead of --sizes.
    #[arg(long, conflicts_with_all = ["sizes", "seed_table"])]
    pub all: bool,
    /// Blocks of an iteration; they land in random order and no two are adjacent.
    #[arg(long, alias = "blocks", default_value_t = 32, default_value_if("seed_table", "true", "1"), value_parser = value_parser!(u64).range(1..=1 << 20))]
    pub batch: u64,
    /// Every number of blocks from 1 to --batch, doubling.
    #[arg(long)]
    pub all_batch: bool,
    /// Every request carries a notification; the same as --notify imm.
    #[arg(long)]
    pub enable_notification: bool,
    /// Notifications by immediates, by SENDs, or none at all; several, separated by commas, are compared with each other.
    #[arg(long, value_enum, value_delimiter = ',')]
    pub notify: Vec<Notify>,
    /// Bytes of a notification's message; 0: nothing but that the blocks are there.
    #[arg(long, default_value_t = 16, default_value_if("seed_table", "true", "0"),
          value_parser = value_parser!(u64).range(0..=8 << 20))]
    pub message_bytes: u64,
    /// Requests are prepared once and posted many times (the default). With --prepare-each as well: both are compared.
    #[arg(long)]
    pub prepare_once: bool,
    /// Every iteration prepares its requests anew.
    #[arg(long)]
    pub prepare_each: bool,
    /// One request moves all blocks of an iteration (the default). With --disable-batch-transfer as well: both are compared.
    #[arg(long)]
    pub enable_batch_transfer: bool,
    /// Every block of an iteration is a request of its own.
    #[arg(long)]
    pub disable_batch_transfer: bool,
    /// Requests are picked by index from lists of blocks that are kept as long as the peer is.
    #[arg(long)]
    pub enable_sess: bool,
    /// Requests are made of descriptors (the default). With --enable-sess as well: both are compared.
    #[arg(long)]
    pub disable_sess: bool,
    /// Verbs: data queue pairs; several numbers are compared with each other.
    #[arg(long, value_delimiter = ',', value_parser = value_parser!(u64).range(1..=64))]
    pub lanes: Vec<u64>,
    /// Threads that post.
    #[arg(long, default_value_t = 1, value_parser = value_parser!(u64).range(1..=64))]
    pub threads: u64,
    /// Iterations that a thread has in flight. 1: stop and wait; more: pipelined.
    #[arg(long, default_value_t = 1, value_parser = value_parser!(u64).range(1..=1024))]
    pub depth: u64,
    /// Requests of a thread, each with blocks of its own, used in turn; default: 64 MiB of them, at most 16.
    #[arg(long, value_parser = value_parser!(u64).range(1..=65536))]
    pub requests: Option<u64>,
    /// Iterations of a case and arm, all rounds and threads together; default: what moves --mib, at most 20000.
    #[arg(long, value_parser = value_parser!(u64).range(1..=10_000_000))]
    pub iters: Option<u64>,
    /// Iterations before those that count; default: a tenth of them.
    #[arg(long, value_parser = value_parser!(u64).range(0..=10_000_000))]
    pub warmup: Option<u64>,
    /// How much a case and arm moves where --iters does not say how often.
    #[arg(long, default_value_t = 256, value_parser = value_parser!(u64).range(1..=1 << 20))]
    pub mib: u64,
    /// Rounds in which the arms of a case take turns; the tables show medians.
    #[arg(long, value_parser = value_parser!(u64).range(1..=1000))]
    pub rounds: Option<u64>,
    /// Memory that is moved: the host's own, or the engine's.
    #[arg(long, value_enum, default_value = "dram", value_delimiter = ',')]
    pub mem: Vec<Memory>,
    /// Also tells how long the first transfer of fresh memory takes, which the one-sided backend registers before and the two-sided takes as it
    /// is; so often per case and arm.
    #[arg(long, value_parser = value_parser!(u64).range(1..=10_000))]
    pub first: Option<u64>,
    /// Compares every byte, and those around: before the measured iterations and after them.
    #[arg(long, default_value_t = true, default_missing_value = "true", num_args = 0..=1, require_equals = true,
          action = clap::ArgAction::Set)]
    pub check: bool,
    /// Microseconds between two looks at requests and notifications; 0: spin.
    #[arg(long, default_value_t = 0, value_parser = value_parser!(u64).range(0..=1_000_000))]
    pub look_us: u64,
    /// Seconds for which a case may stand still.
    #[arg(long, default_value_t = 60, value_parser = value_parser!(u64).range(1..=86_400))]
    pub patience: u64,
    /// WRITEs of 1 KiB to 1 MiB without notification, with SEND and with immediates; by default one block at a time and without a message.
    #[arg(long, conflicts_with_all = ["all", "notify", "enable_notification"])]
    pub seed_table: bool,
    /// Also moves the same blocks without an engine. Over local: pulled by a bare loop of process_vm_readv in the process
    /// that is written to, and by memcpy within one process, each by one thread and by two; ratios are to the bare loop.
    /// Over verbs: written over one bare queue pair, with an immediate or a SEND of 8 bytes whatever --message-bytes says.
    #[arg(long)]
    pub rivals: bool,
    /// Which tables are printed, separated by commas.
    #[arg(long, value_enum, default_value = "nixlbench,bench-engine,baton", value_delimiter = ',')]
    pub columns: Vec<ColumnsWord>,
    /// Also writes the rows as a JSON list; `-`: to standard output, instead of tables.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Also writes the rows as CSV; `-`: to standard output, instead of tables.
    #[arg(long, value_name = "FILE")]
    pub csv: Option<PathBuf>,
}

/// How blocks travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Backend {
    OneSided,
    TwoSided,
    Auto,
}

impl Backend {
    pub fn word(self) -> &'static str {
        match self {
            Backend::OneSided => "one-sided",
            Backend::TwoSided => "two-sided",
            Backend::Auto => "auto",
        }
    }

    /// Whether it takes memory of this side that is not registered.
    pub fn takes_any_memory(self) -> bool {
        self != Backend::OneSided
    }

    /// Whether a request of it is made ready to be posted many times: work requests that are only copied. Others keep a list of
    /// blocks, which each post cuts into messages anew.
    fn prepares(self) -> bool {
        self != Backend::TwoSided
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OpWord {
    Write,
    Read,
}

impl OpWord {
    pub fn op(self) -> Op {
        match self {
            OpWord::Write => Op::Write,
            OpWord::Read => Op::Read,
        }
    }

    pub fn word(self) -> &'static str {
        match self {
            OpWord::Write => "WRITE",
            OpWord::Read => "READ",
        }
    }
}

/// What tells the target that its blocks have come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Notify {
    Off,
    Imm,
    Send,
}

impl Notify {
    pub fn word(self) -> &'static str {
        match self {
            Notify::Off => "off",
            Notify::Imm => "imm",
            Notify::Send => "send",
        }
    }
}

/// What is moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Memory {
    /// Memory of the host.
    Dram,
    /// Memory that the engine makes.
    Managed,
    /// Memory of an accelerator.
    Vram,
}

impl Memory {
    pub fn word(self) -> &'static str {
        match self {
            Memory::Dram => "dram",
            Memory::Managed => "managed",
            Memory::Vram => "vram",
        }
    }
}

/// Tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ColumnsWord {
    Nixlbench,
    BenchEngine,
    Baton,
    /// Work requests, doorbells, completions and packets of an iteration over verbs: the initiator's + the target's. Packets
    /// are those of all ports that a side uses, whoever sent them: --devices and --target-devices tell the sides apart.
    Counts,
}

/// Bytes of a block.
pub fn size(text: &str) -> Outcome<u64> {
    let wanted = || format!("a multiple of {WORD} from {WORD} to {MAX_SIZE} is wanted");
    let bytes: u64 = text.parse().map_err(|_| wanted())?;
    let good = bytes.is_multiple_of(WORD as u64) && (1..=MAX_SIZE).contains(&bytes);
    if good { Ok(bytes) } else { Err(wanted()) }
}

impl Options {
    /// How the target is started.
    pub fn how(&self) -> How<'_> {
        How {
            settings: &self.settings,
            devices: self.target_devices.as_deref(),
            command: self.target_command.as_deref(),
            look_us: self.look_us,
            patience: self.patience,
        }
    }

    /// Refuses what contradicts itself or does not exist.
    pub fn check(&self) -> Outcome<()> {
        if let Some(backend) = self.backend.iter().find(|backend| self.prepare_once && !backend.prepares()) {
            return Err(format!("--prepare-once: the backend {} prepares nothing", backend.word()));
        }
        if self.mem.contains(&Memory::Vram) {
            return Err(
                "--mem vram: this benchmark has no means to allocate it; dram and managed are possible"
                    .to_owned(),
            );
        }
        if self.enable_notification && self.notify.contains(&Notify::Off) {
            return Err("--enable-notification contradicts --notify off".to_owned());
        }
        match self.settings.fabric.as_deref() {
            None | Some("auto" | "verbs" | "local" | "tcp") => {}
            Some(other) => return Err(format!("--fabric {other}: auto, verbs, local and tcp are valid")),
        }
        if let (Some(fabric @ ("local" | "tcp")), [lanes, ..]) =
            (self.settings.fabric.as_deref(), &self.lanes[..])
        {
            return Err(format!("--lanes {lanes}: the fabric {fabric} has no such choice, only verbs does"));
        }
        for (name, flag) in
            [("backend", "--backend"), ("notify", "--notify"), ("lanes", "--lanes"), ("fabric", "--fabric")]
        {
            if self.settings.set.iter().any(|(one, _)| one == name) {
                return Err(format!("--set {name}=…: use {flag}"));
            }
        }
        if self.rivals {
            let both = [("--threads", self.threads), ("--depth", self.depth)];
            if let Some((flag, number)) = both.into_iter().find(|(_, number)| *number != 1) {
                return Err(format!("--rivals with {flag} {number}: they do one iteration after the other"));
            }
            if self.target_command.is_some() {
                return Err(
                    "--rivals with --target-command: they need both processes on this machine".to_owned()
                );
            }
            let reads = self.op.contains(&OpWord::Read);
            if self.settings.fabric.as_deref() == Some("verbs") && reads {
                return Err("--rivals over verbs with --op read: they only write; add --op write".to_owned());
            }
        }
        let two = self.json.as_deref().zip(self.csv.as_deref());
        if two.is_some_and(|(json, csv)| json == csv) {
            return Err("--json and --csv: they cannot be the same file".to_owned());
        }
        output::check("--json", self.json.as_deref())?;
        output::check("--csv", self.csv.as_deref())
    }
}

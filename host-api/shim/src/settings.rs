//! Every setting, in one table: names, values, defaults. The table in the README is generated from it.

use std::fmt;

/// What values a setting takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Values {
    /// One of these words.
    OneOf(&'static [&'static str]),
    /// A whole number from the first to the second.
    Number(u64, u64),
    /// The same, and why not one more.
    NumberNot(u64, u64, &'static str),
    /// Any text that is not empty; the words say which.
    Text(&'static str),
}

impl Values {
    /// Whether `value` is one of them.
    pub fn admit(&self, value: &str) -> bool {
        match self {
            Values::OneOf(words) => words.contains(&value),
            Values::Number(low, high) | Values::NumberNot(low, high, _) => {
                value.bytes().all(|b| b.is_ascii_digit())
                    && value.parse::<u64>().is_ok_and(|n| (*low..=*high).contains(&n))
            }
            Values::Text(_) => !value.is_empty() && !value.contains('\0'),
        }
    }
}

impl fmt::Display for Values {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Values::OneOf(words) => f.write_str(&words.join(", ")),
            Values::Number(low, high) => write!(f, "a whole number from {low} to {high}"),
            Values::NumberNot(low, high, why) => write!(f, "a whole number from {low} to {high} ({why})"),
            Values::Text(what) => f.write_str(what),
        }
    }
}

/// Who reads a setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reader {
    /// The host shim.
    Host,
    /// The engine: handed over by name at create.
    Engine,
}

/// One setting.
#[derive(Debug, PartialEq, Eq)]
pub struct Setting {
    /// Name as a parameter and in the file.
    pub name: &'static str,
    /// Name of the environment variable.
    pub variable: &'static str,
    /// What it takes.
    pub values: Values,
    /// Its value when nobody gives one; `None` if there is none and the reader decides.
    pub default: Option<&'static str>,
    /// What happens without a value, where `default` is `None`.
    pub otherwise: &'static str,
    /// Who reads it.
    pub reader: Reader,
    /// What it is for.
    pub what: &'static str,
}

/// All settings, in the order in which they are listed to people.
pub const SETTINGS: &[Setting] = &[
    Setting {
        name: "plugin",
        variable: "BATON_PLUGIN",
        values: Values::Text("path of an engine library, or of a directory that holds libbaton_engine.so"),
        default: None,
        otherwise: "libbaton_engine.so beside the library or program that loads it",
        reader: Reader::Host,
        what: "Which engine to load. If set, that one or an error.",
    },
    Setting {
        name: "backend",
        variable: "BATON_BACKEND",
        values: Values::OneOf(&["auto", "one-sided", "two-sided"]),
        default: Some("one-sided"),
        otherwise: "",
        reader: Reader::Engine,
        what: "How blocks travel: into the peer's memory, by SEND and RECV through bounce memory, or, with `auto` on both sides, the first but for memory that has no key.",
    },
    Setting {
        name: "fabric",
        variable: "BATON_FABRIC",
        values: Values::OneOf(&["auto", "verbs", "local", "tcp"]),
        default: Some("auto"),
        otherwise: "",
        reader: Reader::Engine,
        what: "What they travel over.",
    },
    Setting {
        name: "notify",
        variable: "BATON_NOTIFY",
        values: Values::OneOf(&["imm", "send"]),
        default: Some("imm"),
        otherwise: "",
        reader: Reader::Engine,
        what: "What tells a peer that its blocks have arrived: immediates, or SENDs behind the data. Without immediates on either side: SENDs.",
    },
    Setting {
        name: "listen",
        variable: "BATON_LISTEN",
        values: Values::Text("an address, or address:port, or address:port-port; IPv6 in brackets"),
        default: None,
        otherwise: "every address, any free port",
        reader: Reader::Engine,
        what: "Where to listen for peers.",
    },
    Setting {
        name: "advertise",
        variable: "BATON_ADVERTISE",
        values: Values::Text(
            "an address, or address:port where a port is mapped, or several separated by commas",
        ),
        default: None,
        otherwise: "the addresses of this host",
        reader: Reader::Engine,
        what: "Which addresses peers are told.",
    },
    Setting {
        name: "ptrace",
        variable: "BATON_PTRACE",
        values: Values::OneOf(&["off", "any"]),
        default: Some("off"),
        otherwise: "",
        reader: Reader::Engine,
        what: "Where Yama restricts it: `any` lets every process of the same user read this one's memory.",
    },
    Setting {
        name: "spin_us",
        variable: "BATON_SPIN_US",
        values: Values::Number(0, 1_000_000),
        default: None,
        otherwise: "30, with at most two CPUs 0",
        reader: Reader::Engine,
        what: "Microseconds for which a thread looks for work before it sleeps.",
    },
    Setting {
        name: "timeout_scale",
        variable: "BATON_TIMEOUT_SCALE",
        values: Values::Number(1, 1000),
        default: Some("1"),
        otherwise: "",
        reader: Reader::Engine,
        what: "Multiplies every deadline of the protocol.",
    },
    Setting {
        name: "chunk_bytes",
        variable: "BATON_CHUNK_BYTES",
        values: Values::Number(4096, 4 << 20),
        default: Some("4194304"),
        otherwise: "",
        reader: Reader::Engine,
        what: "Longest work request; longer blocks are cut, and shorter where that lets every lane have a share. READs over soft-RoCE are cut at 1048576 at most.",
    },
    Setting {
        name: "oob_fallback",
        variable: "BATON_OOB_FALLBACK",
        values: Values::OneOf(&["off", "on"]),
        default: Some("off"),
        otherwise: "",
        reader: Reader::Engine,
        what: "Whether notifications, and nothing else, may go over TCP where `BATON_FABRIC` is verbs or local and does not reach a peer; on both sides.",
    },
    Setting {
        name: "devices",
        variable: "BATON_DEVICES",
        values: Values::Text(
            "names of RDMA devices separated by commas, each with or without :port; or each with ^ before it",
        ),
        default: None,
        otherwise: "every usable device",
        reader: Reader::Engine,
        what: "Verbs: which devices to use, or which (^) to leave out.",
    },
    Setting {
        name: "lanes",
        variable: "BATON_LANES",
        values: Values::Number(1, 64),
        default: None,
        otherwise: "4 for each rail in use, at most 64",
        reader: Reader::Engine,
        what: "Verbs: data queue pairs of a session, all rails together.",
    },
    Setting {
        name: "ib_timeout",
        variable: "BATON_IB_TIMEOUT",
        values: Values::Number(1, 31),
        default: None,
        otherwise: "14",
        reader: Reader::Engine,
        what: "Verbs: an acknowledgement is awaited for 4.096 µs · 2^this.",
    },
    Setting {
        name: "ib_retry",
        variable: "BATON_IB_RETRY",
        values: Values::NumberNot(0, 6, "7 is endless on some devices"),
        default: None,
        otherwise: "6",
        reader: Reader::Engine,
        what: "Verbs: how often a NIC sends again what is not acknowledged.",
    },
    Setting {
        name: "gid_index",
        variable: "BATON_GID_INDEX",
        values: Values::Number(0, 255),
        default: None,
        otherwise: "RoCE v2, routable, at an address of `BATON_LISTEN` or `BATON_ADVERTISE` if there is one",
        reader: Reader::Engine,
        what: "Verbs: entry of each port's GID table.",
    },
    Setting {
        name: "ib_sl",
        variable: "BATON_IB_SL",
        values: Values::Number(0, 15),
        default: None,
        otherwise: "0",
        reader: Reader::Engine,
        what: "Verbs: service level.",
    },
    Setting {
        name: "ib_tc",
        variable: "BATON_IB_TC",
        values: Values::Number(0, 255),
        default: None,
        otherwise: "0",
        reader: Reader::Engine,
        what: "Verbs: traffic class.",
    },
    Setting {
        name: "mtu",
        variable: "BATON_MTU",
        values: Values::OneOf(&["256", "512", "1024", "2048", "4096"]),
        default: None,
        otherwise: "the smaller of both ports'",
        reader: Reader::Engine,
        what: "Verbs: upper limit of the path MTU.",
    },
    Setting {
        name: "ib_pkey",
        variable: "BATON_IB_PKEY",
        values: Values::Number(0, 65_535),
        default: None,
        otherwise: "0",
        reader: Reader::Engine,
        what: "Verbs: entry of each port's table of partition keys.",
    },
    Setting {
        name: "vram_flush",
        variable: "BATON_VRAM_FLUSH",
        values: Values::OneOf(&["always", "auto"]),
        default: None,
        otherwise: "`always`",
        reader: Reader::Engine,
        what: "Verbs: whether GPU memory is flushed before every notification, or only where the GPU does not keep the order itself.",
    },
    Setting {
        name: "config",
        variable: "BATON_CONFIG",
        values: Values::Text("path of a TOML file with settings by their lower-case names"),
        default: None,
        otherwise: "no file",
        reader: Reader::Host,
        what: "File with further settings.",
    },
    Setting {
        name: "log",
        variable: "BATON_LOG",
        values: Values::OneOf(&["off", "error", "warn", "info", "debug", "trace"]),
        default: Some("warn"),
        otherwise: "",
        reader: Reader::Host,
        what: "The most talkative level that is logged.",
    },
];

/// Variables that begin with `BATON_` and are no settings of a host: those of the project's own build.
pub const TOOL_VARIABLES: &[&str] = &["BATON_BUILD_VERSION"];

/// The setting of that name.
pub fn setting(name: &str) -> Option<&'static Setting> {
    SETTINGS.iter().find(|s| s.name == name)
}

/// The settings as a table in Markdown.
pub fn markdown() -> String {
    let mut out = String::from("| variable | parameter | values | default | |\n|---|---|---|---|---|\n");
    for s in SETTINGS {
        let values = match s.values {
            Values::OneOf(words) => words.iter().map(|w| format!("`{w}`")).collect::<Vec<_>>().join(", "),
            other => other.to_string(),
        };
        let default = s.default.map_or_else(|| s.otherwise.to_owned(), |d| format!("`{d}`"));
        let aliases = crate::aliases::listed(s);
        out.push_str(&format!(
            "| `{}` | `{}` | {values} | {default} | {}{aliases} |\n",
            s.variable, s.name, s.what
        ));
    }
    out
}

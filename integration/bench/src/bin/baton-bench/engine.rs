//! How both sides open their engines.

use std::fs::read_to_string;
use std::path::Path;

use baton_bench::Counts;
use baton_host::{Engine, EngineOptions};
use clap::Args;
use serde::{Deserialize, Serialize};

use crate::Outcome;

/// What is said about an engine; the environment may say more.
#[derive(Args, Clone, Debug)]
pub struct Settings {
    /// What blocks travel over: auto, verbs, local, tcp.
    #[arg(long)]
    pub fabric: Option<String>,
    /// Any other setting of the engine (repeatable).
    #[arg(long, value_name = "NAME=VALUE", value_parser = pair)]
    pub set: Vec<(String, String)>,
    /// Engines with a progress thread; without it the calling thread does the work.
    #[arg(long)]
    pub progress_thread: bool,
}

fn pair(text: &str) -> Outcome<(String, String)> {
    let (name, value) = text.split_once('=').ok_or("not of the form NAME=VALUE")?;
    Ok((name.to_owned(), value.to_owned()))
}

/// One engine on each side, for all arms that differ in nothing that an engine knows. Both sides have the n-th.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Setup {
    /// Settings besides those that all engines share.
    pub params: Vec<(String, String)>,
    /// The engine makes the memory that it moves.
    pub managed: bool,
}

/// The name of an engine, by side and number.
pub fn name(side: &str, number: usize) -> String {
    format!("{side}-{number}")
}

impl Settings {
    /// Opens an engine on some devices, or on those that it finds.
    pub fn open(&self, name: &str, devices: Option<&str>, setup: &Setup) -> Outcome<Engine> {
        let mut options = EngineOptions::new(name).progress_thread(self.progress_thread);
        if let Some(fabric) = &self.fabric {
            options = options.param("fabric", fabric);
        }
        if let Some(devices) = devices {
            options = options.param("devices", devices);
        }
        options = options.params(self.set.iter().cloned()).params(setup.params.iter().cloned());
        Engine::open(options).map_err(|error| error.to_string())
    }

    /// The same as arguments of a program.
    pub fn arguments(&self) -> Vec<String> {
        let mut words = Vec::new();
        words.extend(self.fabric.iter().flat_map(|fabric| ["--fabric".to_owned(), fabric.clone()]));
        let set = self.set.iter().flat_map(|(name, value)| ["--set".to_owned(), format!("{name}={value}")]);
        words.extend(set);
        words.extend(self.progress_thread.then(|| "--progress-thread".to_owned()));
        words
    }
}

/// A port of a device that an engine uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    pub device: String,
    pub number: u8,
    pub gid_index: u32,
    pub mtu_bytes: u32,
}

impl Port {
    /// Packets that it sent, where its driver tells.
    fn packets(&self) -> u64 {
        let port = Path::new("/sys/class/infiniband").join(&self.device).join("ports");
        let port = port.join(self.number.to_string());
        // Soft-RoCE's own, and everybody else's.
        ["hw_counters/sent_pkts", "counters/port_xmit_packets"]
            .iter()
            .find_map(|file| read_to_string(port.join(file)).ok()?.trim().parse().ok())
            .unwrap_or_default()
    }
}

/// Everything that an engine tells about itself.
pub fn stats(engine: &Engine) -> Outcome<serde_json::Value> {
    let text = engine.stats().map_err(|error| error.to_string())?;
    serde_json::from_str(&text).map_err(|error| error.to_string())
}

/// The ports that an engine uses; none over software fabrics.
fn ports(stats: &serde_json::Value) -> Vec<Port> {
    let one = |rail: &serde_json::Value| {
        Some(Port {
            device: rail["device"].as_str()?.to_owned(),
            number: u8::try_from(rail["port"].as_u64()?).ok()?,
            gid_index: u32::try_from(rail["gid_index"].as_u64()?).ok()?,
            mtu_bytes: u32::try_from(rail["mtu"].as_u64()?).ok()?,
        })
    };
    let rails = stats["fabrics"]["verbs"]["rails"].as_array();
    rails.into_iter().flatten().filter_map(one).collect()
}

/// The first port of an engine over verbs.
pub fn port(engine: &Engine) -> Outcome<Port> {
    ports(&stats(engine)?).into_iter().next().ok_or_else(|| "no port of a verbs device is in use".to_owned())
}

/// What engines of this process did so far; packets are those of their ports, whoever sent them.
pub fn counts(engines: &[Engine]) -> Outcome<Counts> {
    let (mut sum, mut all_ports): (Counts, Vec<Port>) = (Counts::default(), Vec::new());
    for engine in engines {
        let stats = stats(engine)?;
        let verbs = &stats["fabrics"]["verbs"];
        let count = |name: &str| verbs[name].as_u64().unwrap_or_default();
        sum = sum
            + Counts {
                sends: count("sends_posted"),
                receives: count("receives_posted"),
                doorbells: count("doorbells"),
                completions: count("completions"),
                packets: 0,
            };
        for port in ports(&stats) {
            if !all_ports.contains(&port) {
                all_ports.push(port);
            }
        }
    }
    sum.packets = all_ports.iter().map(Port::packets).sum();
    Ok(sum)
}

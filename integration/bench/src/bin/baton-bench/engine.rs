//! How both sides open their engines.

use baton_host::{Engine, EngineOptions};
use clap::Args;

use crate::Outcome;

/// What is said about an engine; the environment may say more.
#[derive(Args, Clone, Debug)]
pub struct Settings {
    /// What blocks travel over: auto, verbs, local, tcp.
    #[arg(long)]
    pub fabric: Option<String>,
    /// Any other setting of the engine (repeatable).
    #[arg(long, value_name = "NAME=VALUE")]
    pub set: Vec<String>,
    /// Engines with a progress thread; without it the calling thread does the work.
    #[arg(long)]
    pub progress_thread: bool,
}

impl Settings {
    /// Opens an engine on some devices, or on those that it finds.
    pub fn open(&self, name: &str, devices: Option<&str>) -> Outcome<Engine> {
        let mut options = EngineOptions::new(name).progress_thread(self.progress_thread);
        if let Some(fabric) = &self.fabric {
            options = options.param("fabric", fabric);
        }
        if let Some(devices) = devices {
            options = options.param("devices", devices);
        }
        for pair in &self.set {
            let (name, value) =
                pair.split_once('=').ok_or_else(|| format!("--set {pair}: not of the form NAME=VALUE"))?;
            options = options.param(name, value);
        }
        Engine::open(options).map_err(|error| error.to_string())
    }

    /// The same as arguments of a program.
    pub fn arguments(&self) -> Vec<String> {
        let mut words = Vec::new();
        words.extend(self.fabric.iter().flat_map(|fabric| ["--fabric".to_owned(), fabric.clone()]));
        words.extend(self.set.iter().flat_map(|pair| ["--set".to_owned(), pair.clone()]));
        words.extend(self.progress_thread.then(|| "--progress-thread".to_owned()));
        words
    }
}

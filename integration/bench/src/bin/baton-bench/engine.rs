//! How both sides open their engines.

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

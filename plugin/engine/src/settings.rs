//! Settings as the host shim hands them over → the driver's configuration and the list of fabrics.

use baton_abi::{BATON_CREATE_PROGRESS_THREAD, BatonCreateOptions, BatonSetting};
use baton_core::plan::MAX_CHUNK_BYTES;
use baton_driver::{Backends, Candidate, Config, Error, ListenSpec, NotifyMode, err};
use baton_fabric::Fabric;
use baton_fabric_soft::local::{LocalConfig, LocalFabric};
use baton_fabric_soft::tcp::net_addr::{NetAddr, PortRange, local_candidates};
use baton_fabric_soft::tcp::{TcpConfig, TcpFabric};
use std::net::IpAddr;
use std::sync::Arc;

const KEYS: &str = "backend, fabric, notify, listen, advertise, ptrace, spin_us, timeout_scale, devices, lanes, ib_timeout, \
    ib_retry, gid_index, ib_sl, ib_tc, mtu, ib_pkey, vram_flush, chunk_bytes, oob_fallback";
/// Largest factor for protocol deadlines.
const MAX_TIMEOUT_SCALE: u32 = 1000;
/// Shortest length at which blocks may be cut: below, a large one would be more work requests than a queue has room for.
const MIN_CHUNK_BYTES: u32 = 4096;
/// Longest spin before sleeping.
const MAX_SPIN_US: u32 = 1_000_000;

/// Settings, checked.
pub struct Settings {
    backend: &'static str,
    fabric: String,
    notify: NotifyMode,
    listen: Option<NetAddr>,
    advertise: Vec<NetAddr>,
    ptrace_any: bool,
    spin_us: Option<u32>,
    timeout_scale: u32,
    chunk_bytes: u32,
    /// Notifications may go over TCP where no fabric that was asked for reaches a peer.
    oob_fallback: bool,
    verbs: crate::verbs::Config,
}

/// The fabrics of an engine.
pub struct Fabrics {
    /// In order of preference.
    pub list: Vec<Arc<dyn Fabric>>,
    /// Why others are missing.
    pub notes: Vec<String>,
    /// The one that takes notifications and no transfers.
    pub notify_only: Option<usize>,
}

impl Fabrics {
    /// Adds a fabric if it is wanted. Where any may be used, one that cannot is a note; one that was asked for, an error.
    fn add(
        &mut self,
        name: &str,
        wanted: &str,
        asked_for: bool,
        open: impl FnOnce() -> Result<Arc<dyn Fabric>, Error>,
    ) -> Result<(), Error> {
        if wanted != "auto" && wanted != name {
            self.notes.push(format!("{name}: fabric is set to {wanted}"));
            return Ok(());
        }
        match open() {
            Ok(fabric) => self.list.push(fabric),
            // Without TCP there is no way to other hosts: whoever may use it must know at once.
            Err(e) if wanted == "auto" && name != "tcp" => {
                if asked_for {
                    tracing::warn!("fabric {name} is not used although settings are made for it: {}", e.text);
                }
                self.notes.push(format!("{name}: {}", e.text));
            }
            Err(e) if wanted == "auto" => return Err(e),
            Err(e) => return Err(Error::new(e.code, format!("fabric {name}: {}", e.text))),
        }
        Ok(())
    }
}

/// # Safety
/// `options.settings` must point to `settings_count` settings whose slices are readable.
pub unsafe fn read(options: &BatonCreateOptions) -> Result<Settings, Error> {
    let mut settings = Settings::default();
    if options.settings.is_null() && options.settings_count > 0 {
        return Err(err!(InvalidParam, "settings is null but settings_count is {}", options.settings_count));
    }
    for i in 0..options.settings_count as usize {
        // SAFETY: the caller's promise.
        let BatonSetting { key, value } = unsafe { *options.settings.add(i) };
        // SAFETY: the caller's promise.
        let (key, value) = unsafe {
            (crate::convert::text(key, "setting key")?, crate::convert::text(value, "setting value")?)
        };
        settings.set(key, value)?;
    }
    settings.verbs.be_reached_at(settings.wanted());
    Ok(settings)
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            backend: "one-sided",
            fabric: "auto".into(),
            notify: NotifyMode::Immediate,
            listen: None,
            advertise: Vec::new(),
            ptrace_any: false,
            spin_us: None,
            timeout_scale: 1,
            chunk_bytes: MAX_CHUNK_BYTES,
            oob_fallback: false,
            verbs: crate::verbs::Config::default(),
        }
    }
}

impl Settings {
    fn set(&mut self, key: &str, value: &str) -> Result<(), Error> {
        match key {
            "backend" => match value {
                "auto" => self.backend = "auto",
                "one-sided" => self.backend = "one-sided",
                "two-sided" => self.backend = "two-sided",
                _ => {
                    return Err(err!(
                        InvalidParam,
                        "backend {value:?}: valid are auto, one-sided, two-sided"
                    ));
                }
            },
            "fabric" => match value {
                "auto" | "verbs" | "local" | "tcp" => self.fabric = value.into(),
                _ => return Err(err!(InvalidParam, "fabric {value:?}: valid are auto, verbs, local, tcp")),
            },
            "notify" => match value {
                "imm" => self.notify = NotifyMode::Immediate,
                "send" => self.notify = NotifyMode::Send,
                _ => return Err(err!(InvalidParam, "notify {value:?}: valid are imm, send")),
            },
            "listen" if value.is_empty() => self.listen = None,
            "listen" => self.listen = Some(value.parse().map_err(|e| err!(InvalidParam, "listen: {e}"))?),
            "advertise" if value.is_empty() => self.advertise.clear(),
            "advertise" => {
                let address = |part: &str| match part.trim() {
                    "" => Err(err!(InvalidParam, "advertise {value:?}: an address between commas is empty")),
                    part => part.parse().map_err(|e| err!(InvalidParam, "advertise: {e}")),
                };
                self.advertise = value.split(',').map(address).collect::<Result<_, _>>()?;
            }
            "ptrace" => match value {
                "off" => self.ptrace_any = false,
                "any" => self.ptrace_any = true,
                _ => return Err(err!(InvalidParam, "ptrace {value:?}: valid are off, any")),
            },
            "spin_us" if value == "auto" || value.is_empty() => self.spin_us = None,
            "spin_us" => self.spin_us = Some(number(key, value, 0, MAX_SPIN_US)?),
            "timeout_scale" => self.timeout_scale = number(key, value, 1, MAX_TIMEOUT_SCALE)?,
            "oob_fallback" => match value {
                "off" => self.oob_fallback = false,
                "on" => self.oob_fallback = true,
                _ => return Err(err!(InvalidParam, "oob_fallback {value:?}: valid are off, on")),
            },
            "chunk_bytes" => self.chunk_bytes = number(key, value, MIN_CHUNK_BYTES, MAX_CHUNK_BYTES)?,
            _ if self.verbs.set(key, value)? => {}
            _ => return Err(err!(InvalidParam, "unknown setting {key:?}; this engine knows {KEYS}")),
        }
        Ok(())
    }

    /// What to offer to peers.
    fn backends(&self) -> Backends {
        Backends { one_sided: self.backend != "two-sided", two_sided: self.backend != "one-sided" }
    }

    /// The addresses at which this host shall be reached, as far as somebody said so.
    fn wanted(&self) -> Vec<IpAddr> {
        let listen = self.listen.iter().map(|addr| addr.ip).filter(|ip| !ip.is_unspecified());
        self.advertise.iter().map(|addr| addr.ip).chain(listen).collect()
    }

    /// The fabrics to run, in order of preference, and why others are missing.
    pub fn fabrics(&self) -> Result<Fabrics, Error> {
        let mut fabrics = Fabrics { list: Vec::new(), notes: Vec::new(), notify_only: None };
        fabrics.add("local", &self.fabric, false, || {
            let config = LocalConfig { ptrace_any: self.ptrace_any, ..LocalConfig::default() };
            Ok(LocalFabric::new(config)?)
        })?;
        fabrics.add("verbs", &self.fabric, self.verbs.is_configured(), || self.verbs.open())?;
        match self.fabric.as_str() {
            "verbs" | "local" if self.oob_fallback => {
                fabrics.add("tcp", "tcp", true, || self.open_tcp())?;
                fabrics.notify_only = Some(fabrics.list.len() - 1);
            }
            wanted => fabrics.add("tcp", wanted, false, || self.open_tcp())?,
        }
        Ok(fabrics)
    }

    fn open_tcp(&self) -> Result<Arc<dyn Fabric>, Error> {
        let advertise = self.advertise.iter().map(|addr| NetAddr { ports: None, ..addr.clone() });
        Ok(TcpFabric::new(TcpConfig {
            listen: self.listen.clone().map(data_ports),
            advertise: advertise.collect(),
            user_timeout: TcpConfig::default().user_timeout * self.timeout_scale,
            ..TcpConfig::default()
        })?)
    }

    /// The driver's configuration.
    pub fn config(&self, agent_name: &str, flags: u32, notes: Vec<String>) -> Config {
        let cpus = std::thread::available_parallelism().map_or(1, |n| n.get());
        let default_spin_us = if cpus <= 2 { 0 } else { 30 };
        Config {
            agent_name: agent_name.to_owned(),
            backends: self.backends(),
            notes,
            requested: format!("backend {}, fabric {}", self.backend, self.fabric),
            listen: self.listen.as_ref().map(|listen| {
                let ports = listen.ports.unwrap_or(PortRange::ANY);
                ListenSpec { addr: listen.ip, ports: ports.first..=ports.last }
            }),
            candidates: if self.advertise.is_empty() { local_candidates() } else { self.advertise.clone() }
                .into_iter()
                .map(|addr| Candidate {
                    ip: addr.ip,
                    scope: addr.scope,
                    port: addr.ports.map(|ports| ports.first),
                })
                .collect(),
            progress_thread: flags & BATON_CREATE_PROGRESS_THREAD != 0,
            spin_us: self.spin_us.unwrap_or(default_spin_us),
            notify: self.notify,
            notify_only: None,
            timeout_scale: self.timeout_scale,
            copy_threads: baton_driver::two_sided::copy_threads(),
            chunk_bytes: self.chunk_bytes,
            thread_start: None,
        }
    }
}

/// The TCP fabric has a listener of its own. It shares a range of ports with the handshake's; a single port is the handshake's
/// alone, and the kernel chooses the other.
fn data_ports(listen: NetAddr) -> NetAddr {
    let single = listen.ports.is_some_and(|ports| ports.first == ports.last);
    NetAddr { ports: if single { None } else { listen.ports }, ..listen }
}

fn number(key: &str, value: &str, min: u32, max: u32) -> Result<u32, Error> {
    match value.parse::<u32>() {
        Ok(n) if (min..=max).contains(&n) => Ok(n),
        _ => Err(err!(InvalidParam, "{key} {value:?}: a whole number from {min} to {max} is wanted")),
    }
}

/// What this machine offers: each fabric, or why it is missing.
pub fn probe() -> String {
    let local = match LocalFabric::new(LocalConfig::default()) {
        Ok(fabric) => match fabric
            .reach(&fabric.address(), std::time::Instant::now() + std::time::Duration::from_secs(1))
        {
            Ok(()) => serde_json::json!({ "available": true }),
            Err(why) => serde_json::json!({ "available": false, "reason": why }),
        },
        Err(e) => serde_json::json!({ "available": false, "reason": e.to_string() }),
    };
    let addresses: Vec<String> = local_candidates().iter().map(ToString::to_string).collect();
    serde_json::json!({
        "fabrics": {
            "verbs": crate::verbs::probe(),
            "local": local,
            "tcp": { "available": true, "addresses": addresses },
        }
    })
    .to_string()
}

#[cfg(test)]
#[path = "settings_tests.rs"]
mod tests;

//! Settings of the fabric, checked.

use std::fmt;
use std::net::IpAddr;

use crate::choose::Mtu;

/// Data lanes of a session on one rail; with several rails, of each.
pub const DEFAULT_LANES_PER_RAIL: u8 = 4;
/// Lanes are numbered with six bits on the wire.
pub const MAX_LANES: u8 = 64;
/// Retries past this one are endless on some devices: a dead peer would never become an error.
pub const MAX_RETRY: u8 = 6;

/// Which devices to use.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub enum DeviceFilter {
    /// Every usable one.
    #[default]
    All,
    /// These and no others; one that cannot be used is an error.
    Only(Vec<DevicePort>),
    /// Every usable one but these.
    Except(Vec<DevicePort>),
}

impl DeviceFilter {
    /// Why no port of a device is wanted, if so.
    pub fn rules_out(&self, device: &str) -> Option<&'static str> {
        let whole = |named: &&DevicePort| named.device == device && named.port.is_none();
        match self {
            DeviceFilter::Only(list) if !list.iter().any(|named| named.device == device) => {
                Some("not in BATON_DEVICES")
            }
            DeviceFilter::Except(list) if list.iter().find(whole).is_some() => {
                Some("left out by BATON_DEVICES")
            }
            _ => None,
        }
    }
}

/// A device, or one port of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DevicePort {
    /// Name of the device.
    pub device: String,
    /// The port; all of them if `None`.
    pub port: Option<u8>,
}

impl DevicePort {
    /// Whether this names that port.
    pub fn covers(&self, device: &str, port: u8) -> bool {
        self.device == device && self.port.is_none_or(|p| p == port)
    }
}

impl fmt::Display for DevicePort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.port {
            Some(port) => write!(f, "{}:{port}", self.device),
            None => f.write_str(&self.device),
        }
    }
}

/// Settings of the fabric.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerbsConfig {
    /// `BATON_DEVICES`: which devices.
    pub devices: DeviceFilter,
    /// `BATON_LANES`: data lanes of a session, 1 to [`MAX_LANES`]; [`DEFAULT_LANES_PER_RAIL`] per rail in use if `None`.
    pub lanes: Option<u8>,
    /// `BATON_IB_TIMEOUT`: an acknowledgement is awaited for 4.096 µs · 2^this, 1 to 31. (0 would be "for ever".)
    pub ib_timeout: u8,
    /// `BATON_IB_RETRY`: how often a work request is sent again, 0 to [`MAX_RETRY`].
    pub ib_retry: u8,
    /// `BATON_GID_INDEX`: entry of each port's GID table; chosen by rank if `None`.
    pub gid_index: Option<u8>,
    /// `BATON_IB_PKEY`: entry of each port's partition-key table.
    pub pkey_index: u16,
    /// `BATON_IB_SL`: service level, 0 to 15.
    pub sl: u8,
    /// `BATON_IB_TC`: traffic class.
    pub tc: u8,
    /// `BATON_MTU`: upper limit of the path MTU; the ports' alone if `None`.
    pub mtu: Option<Mtu>,
    /// Hop limit of what is routed.
    pub hop_limit: u8,
    /// Code of the time after which a receiver without RECV asks to be tried again.
    pub min_rnr: u8,
    /// Devices write with immediates, as all of InfiniBand's transport do. (For providers in tests that do not.)
    pub immediates: bool,
    /// How often; finite, because with credits a missing RECV is a fault and must show.
    pub rnr_retry: u8,
    /// `BATON_VRAM_FLUSH`: flush memory of accelerators before every notification, also where the device says that it orders writes by itself.
    pub always_flush: bool,
    /// Addresses of `BATON_LISTEN` and `BATON_ADVERTISE`, at which this host shall be reached: GIDs at them and in their
    /// networks are preferred. May be empty.
    pub wanted: Vec<IpAddr>,
}

impl Default for VerbsConfig {
    fn default() -> Self {
        VerbsConfig {
            devices: DeviceFilter::All,
            lanes: None,
            ib_timeout: 14,
            ib_retry: MAX_RETRY,
            gid_index: None,
            pkey_index: 0,
            sl: 0,
            tc: 0,
            mtu: None,
            hop_limit: 64,
            min_rnr: 12,
            rnr_retry: 3,
            immediates: true,
            always_flush: true,
            wanted: Vec::new(),
        }
    }
}

/// A value that a setting does not take.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{key} {value:?}: {wanted}")]
pub struct BadSetting {
    /// Which setting.
    pub key: &'static str,
    /// The value.
    pub value: String,
    /// What would be right.
    pub wanted: String,
}

impl VerbsConfig {
    /// Names of its settings.
    pub const KEYS: &'static [&'static str] = &[
        "devices",
        "lanes",
        "ib_timeout",
        "ib_retry",
        "gid_index",
        "ib_pkey",
        "ib_sl",
        "ib_tc",
        "mtu",
        "vram_flush",
    ];

    /// Sets one of [`VerbsConfig::KEYS`]; an empty value means its default. `Ok(false)`: not one of them.
    pub fn set(&mut self, key: &str, value: &str) -> Result<bool, BadSetting> {
        let Some(key) = Self::KEYS.iter().copied().find(|k| *k == key) else { return Ok(false) };
        let default = VerbsConfig::default();
        let given = !value.is_empty();
        let small = |low, high, note| number(key, value, low, high, note).map(|n| n as u8);
        match key {
            "devices" => self.devices = devices(value)?,
            "lanes" if given => self.lanes = Some(small(1, MAX_LANES.into(), "")?),
            "lanes" => self.lanes = None,
            "ib_timeout" if given => {
                self.ib_timeout = small(1, 31, "0 would wait for ever for a dead peer")?;
            }
            "ib_timeout" => self.ib_timeout = default.ib_timeout,
            "ib_retry" if given => {
                self.ib_retry = small(0, MAX_RETRY.into(), "7 is endless on some devices")?;
            }
            "ib_retry" => self.ib_retry = default.ib_retry,
            "gid_index" if given => self.gid_index = Some(small(0, 255, "")?),
            "gid_index" => self.gid_index = None,
            "ib_pkey" if given => {
                self.pkey_index = number(key, value, 0, u16::MAX.into(), "an index, not a key")? as u16;
            }
            "ib_pkey" => self.pkey_index = default.pkey_index,
            "ib_sl" => self.sl = if given { small(0, 15, "")? } else { default.sl },
            "ib_tc" => self.tc = if given { small(0, 255, "")? } else { default.tc },
            "mtu" => self.mtu = mtu(key, value)?,
            _ => {
                self.always_flush = match value {
                    "" | "always" => true,
                    "auto" => false,
                    _ => {
                        let wanted = "always, auto are valid".to_owned();
                        return Err(BadSetting { key, value: value.to_owned(), wanted });
                    }
                }
            }
        }
        Ok(true)
    }
}

fn number(key: &'static str, value: &str, low: u32, high: u32, note: &str) -> Result<u32, BadSetting> {
    let digits = value.bytes().all(|b| b.is_ascii_digit());
    match value.parse::<u32>() {
        Ok(n) if digits && (low..=high).contains(&n) => Ok(n),
        _ => {
            let mut wanted = format!("a whole number from {low} to {high} is wanted");
            if !note.is_empty() {
                wanted = format!("{wanted} ({note})");
            }
            Err(BadSetting { key, value: value.to_owned(), wanted })
        }
    }
}

fn mtu(key: &'static str, value: &str) -> Result<Option<Mtu>, BadSetting> {
    if value.is_empty() {
        return Ok(None);
    }
    Mtu::ALL.into_iter().find(|mtu| mtu.bytes().to_string() == value).map(Some).ok_or_else(|| BadSetting {
        key,
        value: value.to_owned(),
        wanted: format!("{} are valid", Mtu::LIST),
    })
}

fn devices(value: &str) -> Result<DeviceFilter, BadSetting> {
    let bad = |wanted: String| BadSetting { key: "devices", value: value.to_owned(), wanted };
    let mut only = Vec::new();
    let mut except = Vec::new();
    for part in value.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        let (list, name) = match part.strip_prefix('^') {
            Some(name) => (&mut except, name),
            None => (&mut only, part),
        };
        let (device, port) = match name.split_once(':') {
            None => (name, None),
            Some((device, port)) => {
                let digits = port.bytes().all(|b| b.is_ascii_digit());
                let port = port.parse::<u8>().ok().filter(|port| digits && *port > 0);
                (device, Some(port.ok_or_else(|| bad(format!("in {part:?} the port must be 1 to 255")))?))
            }
        };
        if device.is_empty() || !device.bytes().all(|b| b.is_ascii_graphic() && !b"^:=*/".contains(&b)) {
            return Err(bad(format!(
                "{part:?} is not a device's name; device, device:port or ^device is wanted"
            )));
        }
        let named = DevicePort { device: device.to_owned(), port };
        if !list.contains(&named) {
            list.push(named);
        }
    }
    match (only.is_empty(), except.is_empty()) {
        (true, true) => Ok(DeviceFilter::All),
        (false, true) => Ok(DeviceFilter::Only(only)),
        (true, false) => Ok(DeviceFilter::Except(except)),
        (false, false) => {
            Err(bad("devices to use and devices to leave out (^) cannot stand in one list".to_owned()))
        }
    }
}

#[cfg(test)]
#[path = "config_tests.rs"]
mod tests;

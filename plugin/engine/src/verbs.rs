//! The verbs fabric as the engine sees it, built in (feature `verbs`) or not.

use baton_driver::{Error, err};
use baton_fabric::Fabric;
use std::net::IpAddr;
use std::sync::Arc;

pub use imp::{Config, probe};

#[cfg(feature = "verbs")]
mod imp {
    use super::*;
    use baton_fabric_verbs::{VerbsConfig, VerbsFabric};

    /// Settings of the fabric.
    #[derive(Debug, Default, PartialEq)]
    pub struct Config(VerbsConfig);

    impl Config {
        /// Takes a setting; `false`: it is none of the fabric's.
        pub fn set(&mut self, key: &str, value: &str) -> Result<bool, Error> {
            self.0.set(key, value).map_err(|e| err!(InvalidParam, "{e}"))
        }

        /// Addresses at which this host shall be reached: their GIDs are preferred.
        pub fn be_reached_at(&mut self, addresses: Vec<IpAddr>) {
            self.0.wanted = addresses;
        }

        /// Whether somebody chose devices or GIDs, so that their absence is worth a warning.
        pub fn is_configured(&self) -> bool {
            let default = VerbsConfig::default();
            self.0.devices != default.devices || self.0.gid_index.is_some()
        }

        /// Opens the fabric on the devices of this host.
        pub fn open(&self) -> Result<Arc<dyn Fabric>, Error> {
            Ok(VerbsFabric::open(self.0.clone())?)
        }
    }

    /// What this host offers: `available`, and a `reason` if not.
    pub fn probe() -> serde_json::Value {
        match Config::default().open() {
            Ok(fabric) => serde_json::json!({ "available": true, "address": fabric.address() }),
            Err(e) => serde_json::json!({ "available": false, "reason": e.text }),
        }
    }
}

#[cfg(not(feature = "verbs"))]
mod imp {
    use super::*;

    const WHY: &str = "this engine was built without it (feature verbs)";
    /// Checked by the host; without the fabric nothing else looks at them.
    const KEYS: &[&str] = &[
        "devices",
        "lanes",
        "ib_timeout",
        "ib_retry",
        "gid_index",
        "ib_sl",
        "ib_tc",
        "mtu",
        "ib_pkey",
        "vram_flush",
    ];

    /// Nothing.
    #[derive(Default)]
    pub struct Config {}

    impl Config {
        /// Whether it would be a setting of the fabric.
        pub fn set(&mut self, key: &str, _: &str) -> Result<bool, Error> {
            Ok(KEYS.contains(&key))
        }

        /// Nothing.
        pub fn be_reached_at(&mut self, _: Vec<IpAddr>) {}

        /// Nothing can be.
        pub fn is_configured(&self) -> bool {
            false
        }

        /// Why not.
        pub fn open(&self) -> Result<Arc<dyn Fabric>, Error> {
            Err(err!(Unsupported, "{WHY}"))
        }
    }

    /// Why not.
    pub fn probe() -> serde_json::Value {
        serde_json::json!({ "available": false, "reason": WHY })
    }
}

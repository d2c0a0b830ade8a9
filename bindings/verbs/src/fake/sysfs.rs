//! A directory such as the kernel has for devices: where the types of GIDs are read with libraries that do not tell them.

use super::config::DeviceConfig;
use crate::device::GidType;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// Gone when dropped.
pub(super) struct Sysfs(PathBuf);

impl Sysfs {
    pub fn new(devices: &[DeviceConfig]) -> Sysfs {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let sysfs =
            Sysfs(std::env::temp_dir().join(format!("baton-fake-verbs-{}-{number}", std::process::id())));
        devices.iter().for_each(|device| sysfs.write(device));
        sysfs
    }

    pub fn of(&self, device: &str) -> PathBuf {
        self.0.join(device)
    }

    /// Writes the GID tables of a device as they are now.
    pub fn write(&self, device: &DeviceConfig) {
        for (port, number) in device.ports.iter().zip(1..) {
            let attrs = self.of(&device.name).join(format!("ports/{number}/gid_attrs"));
            for (index, gid) in port.gids.iter().enumerate() {
                let kind = gid.map(|gid| match gid.kind {
                    GidType::RoceV2 => "RoCE v2\n",
                    GidType::RoceV1 | GidType::Ib => "IB/RoCE v1\n",
                });
                let device = gid.filter(|gid| gid.kind != GidType::Ib).map(|_| "lo\n");
                put(&attrs.join("types"), index, kind);
                put(&attrs.join("ndevs"), index, device);
            }
        }
    }
}

/// The kernel has the files of empty entries too, and refuses to read them.
fn put(dir: &Path, index: usize, text: Option<&str>) {
    let written = std::fs::create_dir_all(dir)
        .and_then(|()| std::fs::write(dir.join(index.to_string()), text.unwrap_or_default()));
    written.unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
}

impl Drop for Sysfs {
    fn drop(&mut self) {
        // A directory that stays in the temporary one is no reason to fail.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

//! The release build of the plugin and its engine, and directories to load them from.

use std::path::{Path, PathBuf};

use crate::run::{Outcome, cargo, minutes, run, say, target_dir, work_dir};
use crate::setup;

/// The backend that NIXL loads.
pub const PLUGIN: &str = "libplugin_BATON.so";
/// The engine that the backend loads.
pub const ENGINE: &str = "libbaton_engine.so";

/// Builds both libraries in release.
pub fn build() -> Outcome<PathBuf> {
    setup::compiler()?;
    say("building the plugin in release");
    let mut command = cargo();
    command.args(["build", "--quiet", "--release", "--locked", "-p", "baton-nixl", "-p", "baton-engine"]);
    // Standard output belongs to the answer of `plugin-dir`.
    run(command.stdout(std::io::stderr()), minutes(20))?;
    Ok(target_dir().join("release"))
}

/// A directory with both libraries, for `NIXL_PLUGIN_DIR`.
pub fn plugin_dir() -> Outcome<PathBuf> {
    let release = build()?;
    let dir = work_dir("plugins")?;
    place(&release.join(PLUGIN), &dir.join(PLUGIN))?;
    place(&release.join(ENGINE), &dir.join(ENGINE))?;
    Ok(dir)
}

/// Copies a library, replacing an older one by rename: a process that has the old one mapped keeps it.
pub fn place(from: &Path, to: &Path) -> Outcome<()> {
    let fresh = to.with_extension("new");
    let told = |error: std::io::Error| format!("cannot copy {} to {}: {error}", from.display(), to.display());
    std::fs::copy(from, &fresh).map_err(told)?;
    std::fs::rename(&fresh, to).map_err(told)
}

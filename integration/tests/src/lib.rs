//! Cross-process tests of Baton: what they share.

mod agent;
mod block;
mod isolate;
mod node;
mod rig;
mod variants;

use std::ffi::OsStr;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;
use std::time::Duration;

pub use agent::{Agent, AgentBlock, from_hex, hex};
pub use block::{Block, pattern};
pub use isolate::{engine_directory, in_own_process};
pub use node::{Failed, Node, Remote, wait_for};
pub use rig::{
    assert_devices, in_guest, rig_agent, rig_agent_program, rig_fabric, rig_node, rig_options, rig_settings,
};
pub use variants::{Variant, build_variant};

/// What a test program does at most before it counts as hung.
pub const WATCHDOG: Duration = Duration::from_secs(120);
/// What a test waits for one thing at most; less than the watchdog, so that it can say what it waited for.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// What a build may take: another build may hold cargo's lock.
const BUILD_WATCHDOG: Duration = Duration::from_secs(1200);

/// The workspace.
pub fn workspace() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).expect("integration/tests is two levels down").to_owned()
}

/// Directory of the profile that this test was built with, e.g. `target/debug`.
pub fn profile_dir() -> PathBuf {
    let own = std::env::current_exe().expect("a test knows its program");
    own.ancestors().nth(2).expect("tests live in deps").to_owned()
}

/// The target directory of this build.
pub fn target_dir() -> PathBuf {
    profile_dir().parent().expect("a profile is in a target directory").to_owned()
}

/// Where scratch directories are.
fn scratch_root() -> PathBuf {
    let root = target_dir().join("tmp/baton-tests");
    std::fs::create_dir_all(&root).unwrap_or_else(|e| panic!("{}: {e}", root.display()));
    root
}

/// Held while this process builds what others build under the same name; they may be other processes.
pub(crate) fn building() -> File {
    let path = scratch_root().join("building");
    let file = File::create(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive).expect("a lock");
    file
}

/// A new, empty directory, whose name begins with `name`, until the next run of the tests. No two calls share one: tests of a
/// program run at the same time.
pub fn scratch(name: &str) -> PathBuf {
    static CALLS: AtomicU32 = AtomicU32::new(0);
    // What earlier processes left goes first.
    for entry in std::fs::read_dir(scratch_root()).expect("a directory").flatten() {
        let left = entry.file_name().to_string_lossy().rsplit_once('-').and_then(|(_, pid)| pid.parse().ok());
        if left.is_some_and(|pid: u32| !Path::new("/proc").join(pid.to_string()).exists()) {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
    let call = CALLS.fetch_add(1, Ordering::Relaxed);
    let directory = scratch_root().join(format!("{name}-{call}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&directory);
    std::fs::create_dir_all(&directory).expect("scratch directory");
    directory
}

/// `cargo build` with the profile and target directory of this test, in `workspace`.
pub(crate) fn cargo_build(workspace: &Path, package: &str, version: Option<&str>) {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(workspace).args(["build", "--quiet", "--package", package]);
    cargo.env("CARGO_TARGET_DIR", target_dir()).env_remove("BATON_BUILD_VERSION");
    if profile_dir().ends_with("release") {
        cargo.arg("--release");
    }
    if let Some(version) = version {
        cargo.env("BATON_BUILD_VERSION", version);
    }
    let output = run(cargo, BUILD_WATCHDOG);
    assert!(output.status.success(), "cargo build -p {package}: {}", text(&output.stderr));
}

/// Builds an engine, calling itself `version` if one is given, and puts it as `libbaton_engine.so` into a
/// directory of its own, which is returned.
pub fn build_engine(package: &str, version: Option<&str>) -> PathBuf {
    // One file name for all versions: build and copy belong together.
    let _building = building();
    cargo_build(&workspace(), package, version);
    let directory = scratch(&format!("{package}-{}", version.unwrap_or("own")));
    let library = profile_dir().join(format!("lib{}.so", package.replace('-', "_")));
    std::fs::copy(&library, directory.join(baton_host::ENGINE_FILE))
        .unwrap_or_else(|e| panic!("{}: {e}", library.display()));
    directory
}

/// Builds libbaton.so and libbaton.a; returns the directory they are in.
pub fn build_libbaton() -> PathBuf {
    cargo_build(&workspace(), "baton", None);
    profile_dir()
}

/// Runs a command to its end, or kills it when the watchdog bites.
pub fn run(mut command: Command, watchdog: Duration) -> Output {
    let name = format!("{command:?}");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().unwrap_or_else(|e| panic!("{name}: {e}"));
    let pid = child.id();
    let (done, finished) = mpsc::channel();
    let waiter = std::thread::spawn(move || done.send(child.wait_with_output()));
    match finished.recv_timeout(watchdog) {
        Ok(output) => {
            let _ = waiter.join();
            output.unwrap_or_else(|e| panic!("{name}: {e}"))
        }
        Err(_) => {
            let _ = Command::new("kill").args(["-KILL", &pid.to_string()]).status();
            panic!("{name} (process {pid}) did not end within {watchdog:?} and was killed");
        }
    }
}

/// What a short command prints.
///
/// # Panics
/// If it fails.
pub fn output_of(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    let said = text(&output.stdout);
    assert!(output.status.success(), "{command:?}: {}{said}{}", output.status, text(&output.stderr));
    said
}

/// A command with an environment that says nothing about Baton but `variables`.
pub fn command<K, V>(program: impl AsRef<OsStr>, variables: impl IntoIterator<Item = (K, V)>) -> Command
where
    K: AsRef<OsStr>,
    V: AsRef<OsStr>,
{
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("BATON_") {
            command.env_remove(name);
        }
    }
    command.envs(variables);
    command
}

/// Bytes of a program as text.
pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_of_one_name_do_not_disturb_each_other() {
        let first = scratch("twice");
        std::fs::write(first.join("kept"), "by the first test").expect("written");
        let second = scratch("twice");
        assert_ne!(first, second);
        assert_eq!(std::fs::read_dir(&second).expect("a directory").count(), 0);
        assert_eq!(std::fs::read_to_string(first.join("kept")).expect("still there"), "by the first test");
    }
}

//! Running other programs: one place that spawns, waits with a deadline and words the failure.

use std::ffi::OsStr;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

/// A result whose error is the sentence that the user reads.
pub type Outcome<T> = Result<T, String>;

/// The root of the work tree.
pub fn root() -> PathBuf {
    let manifest =
        std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    let here = PathBuf::from(manifest);
    here.ancestors().nth(2).map_or_else(|| here.clone(), Path::to_path_buf)
}

/// Where cargo builds, and where this program keeps what it downloads and prepares.
pub fn target_dir() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(dir) if Path::new(&dir).is_absolute() => PathBuf::from(dir),
        Some(dir) => root().join(dir),
        None => root().join("target"),
    }
}

/// A folder of ours under the target directory.
pub fn work_dir(name: &str) -> Outcome<PathBuf> {
    let dir = target_dir().join("xtask").join(name);
    std::fs::create_dir_all(&dir).map_err(|error| format!("cannot create {}: {error}", dir.display()))?;
    Ok(dir)
}

/// The cargo that runs us.
pub fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root());
    // What `cargo run` sets for this program would make cargo rebuild things that look at it.
    for name in ["CARGO_MANIFEST_DIR", "CARGO_MANIFEST_PATH"] {
        command.env_remove(name);
    }
    // For the bindings of libibverbs: a newer libclang that is found first would not do.
    if let (None, Some(dir)) = (std::env::var_os("LIBCLANG_PATH"), crate::setup::libclang()) {
        command.env("LIBCLANG_PATH", dir);
    }
    command
}

/// A line that tells the reader what is going on, on stderr: stdout belongs to results.
pub fn say(text: impl AsRef<str>) {
    eprintln!("[xtask] {}", text.as_ref());
}

/// The command as one would type it.
pub fn spell(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(OsStr::to_string_lossy).collect::<Vec<_>>().join(" ")
}

/// Waits for a child, at most `limit`; past it the child's whole process group is killed.
pub fn wait(mut child: Child, what: &str, limit: Duration) -> Outcome<ExitStatus> {
    let deadline = Instant::now() + limit;
    let group = child.id();
    RUNNING.store(group as i32, Ordering::Relaxed);
    let (sender, receiver) = std::sync::mpsc::channel();
    let waiter = std::thread::spawn(move || {
        // The receiver is gone only after a time-out, and then nobody wants the answer.
        let _ = sender.send(child.wait());
    });
    let answer = receiver.recv_timeout(deadline.saturating_duration_since(Instant::now()));
    let status = match answer {
        Ok(status) => status.map_err(|error| format!("{what}: {error}")),
        Err(_) => {
            kill_group(group);
            Err(format!("{what}: no end after {} s; killed", limit.as_secs()))
        }
    };
    RUNNING.store(0, Ordering::Relaxed);
    waiter.join().map_err(|_| format!("{what}: the waiting thread panicked"))?;
    status
}

/// The group that runs now, 0 for none: Ctrl-C reaches us only, since every child leads a group of its own.
static RUNNING: AtomicI32 = AtomicI32::new(0);

/// From now on Ctrl-C and a polite end take what we run with us.
pub fn end_children_with_us() {
    extern "C" fn on_signal(signal: libc::c_int) {
        let group = RUNNING.load(Ordering::Relaxed);
        // SAFETY: both are allowed in a signal handler; a group of 0 would be our own, so it is left out.
        unsafe {
            if group != 0 {
                libc::kill(-group, libc::SIGKILL);
            }
            libc::_exit(128 + signal);
        }
    }
    for signal in [libc::SIGINT, libc::SIGTERM] {
        // SAFETY: the handler does nothing but what a handler may do.
        unsafe { libc::signal(signal, on_signal as *const () as libc::sighandler_t) };
    }
}

fn kill_group(leader: u32) {
    // SAFETY: a plain system call; the leader is a child that is not yet reaped, so the number is still its own.
    unsafe { libc::kill(-(leader as libc::pid_t), libc::SIGKILL) };
}

/// Runs a command to its end in a process group of its own; its output goes where ours goes.
pub fn run(command: &mut Command, limit: Duration) -> Outcome<()> {
    let what = spell(command);
    let child = command.process_group(0).stdin(Stdio::null()).spawn();
    let child = child.map_err(|error| format!("cannot start `{what}`: {error}"))?;
    let status = wait(child, &format!("`{what}`"), limit)?;
    if status.success() { Ok(()) } else { Err(format!("`{what}` failed ({status})")) }
}

/// Runs a short command and returns what it printed; its errors go to our stderr.
pub fn output(command: &mut Command) -> Outcome<String> {
    let what = spell(command);
    let out = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output();
    let out = out.map_err(|error| format!("cannot start `{what}`: {error}"))?;
    if !out.status.success() {
        return Err(format!("`{what}` failed ({})", out.status));
    }
    String::from_utf8(out.stdout).map_err(|_| format!("`{what}` printed something that is not UTF-8"))
}

/// As [`output`], but quiet and without caring why it failed: for asking whether something is there.
pub fn probe(command: &mut Command) -> Option<String> {
    let out = command.stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
    out.status.success().then(|| String::from_utf8_lossy(&out.stdout).into_owned())
}

/// Minutes, for readable limits.
pub const fn minutes(count: u64) -> Duration {
    Duration::from_secs(count * 60)
}

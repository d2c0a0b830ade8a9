//! Tests that count what a process has, or may hang, run in a process of their own.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

use crate::{build_engine, command, run, text};

/// What such a test takes at most; single waits give up earlier and say what they waited for.
const WATCHDOG: Duration = Duration::from_secs(300);
/// Tells the second process which test it is for.
const BODY: &str = "BATON_TEST_BODY";
/// Tells it where the engine is.
const ENGINE: &str = "BATON_TEST_ENGINE";

/// Directory of the engine, built once for a test program and the processes that it starts.
pub fn engine_directory() -> &'static PathBuf {
    static DIRECTORY: OnceLock<PathBuf> = OnceLock::new();
    DIRECTORY.get_or_init(|| match std::env::var_os(ENGINE) {
        Some(given) => given.into(),
        None => build_engine("baton-engine", None),
    })
}

/// Runs `body`, the whole of the test called `test`, in another process of the test's program, and kills that when
/// it takes longer than the watchdog permits.
pub fn in_own_process(test: &str, body: impl FnOnce()) {
    if std::env::var_os(BODY).is_some_and(|given| given == test) {
        return body();
    }
    let program = std::env::current_exe().expect("a test knows its program");
    let variables = [(BODY, OsString::from(test)), (ENGINE, engine_directory().clone().into_os_string())];
    let mut again = command(program, variables);
    again.args(["--exact", test, "--nocapture", "--test-threads=1", "--include-ignored"]);
    let output = run(again, WATCHDOG);
    let said = format!("{}{}", text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{test}: {}\n{said}", output.status);
    // A name that the program does not know would succeed as well.
    assert!(said.contains("1 passed"), "{test} was not run:\n{said}");
}

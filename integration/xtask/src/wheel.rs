//! The scenarios of `integration/nixl/python` in the stock NIXL wheels, all with one build of the plugin.

use std::path::{Path, PathBuf};

use crate::run::{Outcome, minutes, root, run, say};
use crate::setup::{NIXL, NIXL_ALL, nixl_python, wheel_libraries};
use crate::wheel_abi;

/// Where the Python side of the integration lives.
pub fn scripts() -> PathBuf {
    root().join("integration/nixl/python")
}

/// Every scenario in the newest wheel, the core ones in the others.
pub fn scenarios(plugins: &Path, long: bool) -> Outcome<()> {
    let mut failed = Vec::new();
    for version in NIXL_ALL {
        say(format!("NIXL {version}"));
        if let Err(reason) =
            wheel_libraries(version).and_then(|libraries| wheel_abi::check(version, &libraries))
        {
            failed.push(reason);
        }
        let mut python = nixl_python(version, plugins)?;
        python.arg(scripts().join("scenarios.py"));
        match (version == NIXL, long) {
            (true, true) => drop(python.arg("--long")),
            (true, false) => {}
            (false, _) => drop(python.arg("--core")),
        }
        if let Err(reason) = run(&mut python, minutes(15)) {
            failed.push(format!("NIXL {version}: {reason}"));
        }
    }
    say(format!("NIXL {NIXL}, two-sided"));
    let mut python = nixl_python(NIXL, plugins)?;
    python.env("BATON_BACKEND", "two-sided").arg(scripts().join("scenarios.py"));
    if !long {
        python.arg("--core");
    }
    if let Err(reason) = run(&mut python, minutes(15)) {
        failed.push(format!("NIXL {NIXL}, two-sided: {reason}"));
    }
    if failed.is_empty() { Ok(()) } else { Err(failed.join("; ")) }
}

//! What the shipped libraries show and need, read with nm and readelf.

use std::path::Path;
use std::process::Command;

use crate::artifacts::{ENGINE, PLUGIN};
use crate::run::{Outcome, output};

/// What one library may show and need.
struct Expected {
    file: &'static str,
    /// Exactly these names are defined for others.
    exports: &'static [&'static str],
    /// Dynamic flags that must be there.
    flags: &'static [&'static str],
}

/// The C library, its loader and the unwinder: nothing of NIXL, no C++ library, no libibverbs.
const NEEDED: &[&str] = &["libc.so.6", "libm.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2"];

const EXPECTED: &[Expected] = &[
    Expected {
        file: PLUGIN,
        exports: &["nixl_plugin_fini", "nixl_plugin_init"],
        flags: &["NOW", "NODELETE"],
    },
    Expected { file: ENGINE, exports: ENGINE_EXPORTS, flags: &["NOW", "NODELETE"] },
];

/// Both doors of the engine: the C table, and the module that abi_stable looks for.
const ENGINE_EXPORTS: &[&str] = &["_1as_0lib_1header_0root_bmodule_bloader", "baton_engine_v1"];

/// Checks the libraries in a plugin directory.
pub fn check(plugins: &Path) -> Outcome<()> {
    for expected in EXPECTED {
        let path = plugins.join(expected.file);
        let told = |reason: String| format!("{}: {reason}", expected.file);
        exports(&path, expected.exports).map_err(told)?;
        dynamic(&path, expected.flags).map_err(told)?;
        println!("ok   {}: exports, needed libraries and flags", expected.file);
    }
    Ok(())
}

fn exports(path: &Path, expected: &[&str]) -> Outcome<()> {
    let listing = output(Command::new("nm").args(["-D", "--defined-only"]).arg(path))?;
    let mut names: Vec<&str> = listing.lines().filter_map(|line| line.split_whitespace().last()).collect();
    names.sort_unstable();
    if names == expected { Ok(()) } else { Err(format!("exports {names:?} instead of {expected:?}")) }
}

fn dynamic(path: &Path, flags: &[&str]) -> Outcome<()> {
    let listing = output(Command::new("readelf").args(["-d", "--wide"]).arg(path))?;
    let bracketed = |line: &str| {
        line.split_once('[').and_then(|(_, rest)| rest.split_once(']')).map(|(name, _)| name.to_owned())
    };
    for line in listing.lines().filter(|line| line.contains("(NEEDED)")) {
        let name = bracketed(line).unwrap_or_default();
        if !NEEDED.contains(&name.as_str()) {
            return Err(format!("needs {name}; only {} may be needed", NEEDED.join(", ")));
        }
    }
    if listing.contains("(RPATH)") || listing.contains("(RUNPATH)") {
        return Err("carries a run path".to_owned());
    }
    let shown: Vec<&str> = listing.lines().filter(|line| line.contains("(FLAGS")).collect();
    for flag in flags {
        let there =
            shown.iter().any(|line| line.split_whitespace().any(|word| word.trim_end_matches(',') == *flag));
        if !there {
            return Err(format!("lacks the dynamic flag {flag}; it has {shown:?}"));
        }
    }
    Ok(())
}

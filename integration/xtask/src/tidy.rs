//! `cargo xtask tidy`: the rules of the house that no compiler checks.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use serde::Deserialize;

use crate::run::{Outcome, cargo, output, root};

/// What stands at the top of the tree besides dot-files.
const TOP_LEVEL: &[&str] = &[
    "Cargo.lock",
    "Cargo.toml",
    "LICENSE-APACHE",
    "LICENSE-MIT",
    "README.md",
    "bindings",
    "deny.toml",
    "host-api",
    "integration",
    "plugin",
    "rustfmt.toml",
];

/// Which crates of ours each crate may name. A crate that is not in the list may not exist.
const MAY_NAME: &[(&str, &[&str])] = &[
    ("baton-abi", &[]),
    ("baton-host", &["baton-abi"]),
    ("baton", &["baton-host", "baton-abi"]),
    ("baton-core", &["baton-fabric"]),
    ("baton-fabric", &[]),
    ("baton-fabric-soft", &["baton-fabric"]),
    ("baton-fabric-sim", &["baton-fabric"]),
    ("baton-verbs", &[]),
    ("baton-fabric-verbs", &["baton-fabric", "baton-verbs"]),
    ("baton-driver", &["baton-core", "baton-fabric"]),
    (
        "baton-engine",
        &[
            "baton-abi",
            "baton-driver",
            "baton-core",
            "baton-fabric",
            "baton-fabric-soft",
            "baton-fabric-verbs",
        ],
    ),
    ("baton-nixl", &["baton-host", "baton-abi"]),
    ("baton-bench", &["baton-host", "baton-verbs"]),
    ("baton-sim", &["baton-core", "baton-fabric", "baton-fabric-sim"]),
    ("baton-tests", &["baton-host", "baton-abi", "baton-core"]),
    ("baton-fuzz", &["baton-core", "baton-fabric"]),
    ("baton-example-engine", &["baton-abi"]),
    ("baton-counting-alloc", &[]),
    ("xtask", &["baton-bench", "baton-host"]),
];

/// Crates that may also be named for tests.
const MAY_TEST_WITH: &[(&str, &[&str])] = &[
    (
        "baton-driver",
        &[
            "baton-fabric-soft",
            "baton-fabric-sim",
            "baton-fabric-verbs",
            "baton-verbs",
            "baton-counting-alloc",
        ],
    ),
    ("baton-engine", &["baton-host"]),
    ("baton-bench", &["baton-tests"]),
    ("baton-core", &["baton-fabric-sim", "baton-counting-alloc"]),
    ("baton-fabric-soft", &["baton-counting-alloc"]),
];

/// Folders whose Rust code may say `unsafe`; everywhere else it is an error.
const UNSAFE_ROOMS: &[&str] = &[
    "host-api/abi/",
    "host-api/shim/src/",
    "host-api/capi/src/",
    "plugin/fabric/src/conformance/",
    "plugin/fabric-soft/",
    "plugin/fabric-verbs/",
    "bindings/verbs/",
    "plugin/driver/",
    "plugin/engine/",
    "integration/bench/src/bin/",
    "integration/nixl/src/",
    "integration/tests/",
    "integration/xtask/src/",
];

/// The one folder whose Rust code may name what libibverbs calls its own.
const VERBS_ROOM: &str = "bindings/verbs/";
const VERBS_PREFIX: &str = "ibv_";

/// Crates whose build needs packages that a new machine does not have.
const NEEDS_HEADERS: &[&str] = &["rdma-sys", "clang-sys", "bindgen"];

/// A file past this is two files.
const MAX_LINES: usize = 700;
/// Generated or legal texts that may be longer.
const LONG_ALLOWED: &[&str] =
    &["Cargo.lock", "bindings/c/include/baton.h", "README.md", "plugin/PROTOCOL.md"];

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    dependencies: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    name: String,
    kind: Option<String>,
    path: Option<String>,
}

pub fn run() -> Outcome<()> {
    let files = tracked_files()?;
    let mut faults = top_level(&files);
    faults.extend(names()?);
    faults.extend(first_build()?);
    for file in &files {
        faults.extend(inspect(file)?);
    }
    if faults.is_empty() {
        println!("ok   tidy: {} files", files.len());
        return Ok(());
    }
    for fault in &faults {
        println!("FAIL {fault}");
    }
    Err(format!("tidy found {} faults", faults.len()))
}

/// Files of the tree that are not ignored, whether committed yet or not.
fn tracked_files() -> Outcome<Vec<String>> {
    let mut git = Command::new("git");
    git.current_dir(root()).args(["ls-files", "--cached", "--others", "--exclude-standard"]);
    Ok(output(&mut git)?.lines().filter(|name| root().join(name).exists()).map(str::to_owned).collect())
}

fn top_level(files: &[String]) -> Vec<String> {
    let tops: BTreeSet<&str> = files.iter().filter_map(|file| file.split('/').next()).collect();
    let stray = tops.into_iter().filter(|top| !top.starts_with('.') && !TOP_LEVEL.contains(top));
    stray.map(|top| format!("{top}: does not belong at the top of the tree")).collect()
}

fn names() -> Outcome<Vec<String>> {
    let listing = output(cargo().args(["metadata", "--format-version", "1", "--no-deps", "--locked"]))?;
    let metadata: Metadata =
        serde_json::from_str(&listing).map_err(|error| format!("cargo metadata: {error}"))?;
    let allowed: BTreeMap<&str, &[&str]> = MAY_NAME.iter().copied().collect();
    let for_tests: BTreeMap<&str, &[&str]> = MAY_TEST_WITH.iter().copied().collect();
    let mut faults = Vec::new();
    for package in &metadata.packages {
        let Some(may) = allowed.get(package.name.as_str()) else {
            faults.push(format!("{}: not in tidy's list of crates", package.name));
            continue;
        };
        let tests = for_tests.get(package.name.as_str()).copied().unwrap_or_default();
        for dependency in package.dependencies.iter().filter(|dependency| dependency.path.is_some()) {
            let name = dependency.name.as_str();
            let dev = dependency.kind.as_deref() == Some("dev");
            if name != package.name && !may.contains(&name) && !(dev && tests.contains(&name)) {
                faults.push(format!("{}: may not name {name}", package.name));
            }
        }
    }
    Ok(faults)
}

/// This program installs what everything else needs, so on a new machine it must build without.
fn first_build() -> Outcome<Vec<String>> {
    let mut tree = cargo();
    tree.args(["tree", "--locked", "-p", "xtask", "--edges", "normal,build", "--prefix", "none"]);
    let named = output(&mut tree)?;
    let names = named.lines().filter_map(|line| line.split(' ').next());
    let found: BTreeSet<&str> = names.filter(|name| NEEDS_HEADERS.contains(name)).collect();
    Ok(found.into_iter().map(|one| format!("xtask: builds {one}, which needs headers or libclang")).collect())
}

fn inspect(file: &str) -> Outcome<Vec<String>> {
    let Ok(text) = std::fs::read_to_string(root().join(file)) else { return Ok(Vec::new()) };
    let mut faults = Vec::new();
    let lines = text.lines().count();
    let legal = file.starts_with("LICENSE") || LONG_ALLOWED.contains(&file);
    if lines > MAX_LINES && !legal {
        faults.push(format!("{file}: {lines} lines, more than {MAX_LINES}"));
    }
    let is_rust = Path::new(file).extension().is_some_and(|extension| extension == "rs");
    if is_rust && !UNSAFE_ROOMS.iter().any(|room| file.starts_with(room)) {
        for (index, line) in text.lines().enumerate().filter(|(_, line)| says_unsafe(line)) {
            faults.push(format!("{file}:{}: unsafe outside its rooms: {}", index + 1, line.trim()));
        }
    }
    let names_verbs = |line: &str| line.contains(VERBS_PREFIX) && !line.contains("VERBS_PREFIX");
    if is_rust && !file.starts_with(VERBS_ROOM) {
        for (index, line) in text.lines().enumerate().filter(|(_, line)| names_verbs(line)) {
            faults.push(format!(
                "{file}:{}: verbs are named in {VERBS_ROOM} only: {}",
                index + 1,
                line.trim()
            ));
        }
    }
    Ok(faults)
}

/// Whether code (not a comment, text or a lint's name) of this line says `unsafe`.
fn says_unsafe(line: &str) -> bool {
    let code = line.split("//").next().unwrap_or_default();
    let outside_text: String = code.split('"').step_by(2).collect::<Vec<_>>().join(" ");
    let word = |c: char| !(c.is_alphanumeric() || c == '_');
    outside_text.split(word).any(|token| token == "unsafe")
}

#[cfg(test)]
mod tests {
    use super::says_unsafe;

    #[test]
    fn unsafe_is_seen_in_code_only() {
        assert!(says_unsafe("let a = unsafe { *p };"));
        assert!(says_unsafe("unsafe extern \"C\" fn f() {}"));
        assert!(!says_unsafe("// unsafe is not needed"));
        assert!(!says_unsafe("say(\"unsafe\");"));
        assert!(!says_unsafe("#![forbid(unsafe_code)]"));
        assert!(!says_unsafe("unsafe_op_in_unsafe_fn = 1"));
    }
}

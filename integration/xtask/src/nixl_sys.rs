//! NIXL's own test suite: that of its Rust bindings, run against our plugin under the name of the one it asks for.
//!
//! The bindings (the public crate `nixl-sys`) open NIXL's C library out of the wheel. Their tests name the backend `UCX`; NIXL
//! takes a backend's name from its file, so a copy of our plugin called `libplugin_UCX.so` is what they get.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Deserialize;

use crate::artifacts::{ENGINE, PLUGIN, place};
use crate::run::{Outcome, cargo, minutes, output, run, target_dir, work_dir};
use crate::setup::{NIXL, clang, wheel, wheel_libraries};

/// Tests that are not ours to pass, with the reason.
const EXCEPTIONS: &[(&str, &str)] = &[];

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    manifest_path: PathBuf,
}

/// Builds and runs the suite against the plugin in `plugins`.
pub fn conformance(plugins: &Path) -> Outcome<()> {
    let source = source()?;
    let folder = plugins_under_the_name_of_ucx(plugins)?;
    let libraries = [wheel_libraries(NIXL)?, wheel(NIXL)?.join("nixl_cu12.libs")];
    let search = std::env::join_paths(libraries).map_err(|error| error.to_string())?;
    for (test, reason) in EXCEPTIONS {
        println!("skip {test}: {reason}");
    }
    let mut test = cargo_in(&source);
    test.args([
        "test",
        "--quiet",
        "--locked",
        "--features",
        "stub-api",
        "--test",
        "tests",
        "--",
        "--test-threads=2",
    ]);
    test.args(EXCEPTIONS.iter().flat_map(|(name, _)| ["--skip", name]));
    test.env("LIBCLANG_PATH", clang()?);
    test.env("LD_LIBRARY_PATH", search).env("NIXL_PLUGIN_DIR", folder).env_remove("NIXL_CONFIG_FILE");
    run(&mut test, minutes(15))
}

/// Cargo in another project, whose settings are not ours; what it builds stays under our target directory.
fn cargo_in(project: &Path) -> Command {
    let mut command = cargo();
    command.current_dir(project).env("CARGO_TARGET_DIR", target_dir().join("xtask/nixl-sys-target"));
    command
}

/// The suite's source, as cargo fetched and verified it, copied to where it can be built.
fn source() -> Outcome<PathBuf> {
    let home = work_dir("nixl-sys")?;
    let copy = home.join(format!("source-{NIXL}"));
    if copy.exists() {
        return Ok(copy);
    }
    let asking = work_dir("nixl-sys/asking")?;
    std::fs::create_dir_all(asking.join("src")).map_err(|error| error.to_string())?;
    write(&asking.join("src/lib.rs"), "")?;
    write(
        &asking.join("Cargo.toml"),
        &format!(
            "[package]\nname = \"asking\"\nversion = \"0.0.0\"\nedition = \"2021\"\n\n[workspace]\n\n\
             [dependencies]\nnixl-sys = \"={NIXL}\"\n"
        ),
    )?;
    let listing = output(cargo_in(&asking).args(["metadata", "--quiet", "--format-version", "1"]))?;
    let metadata: Metadata =
        serde_json::from_str(&listing).map_err(|error| format!("cargo metadata: {error}"))?;
    let manifest = metadata.packages.into_iter().find(|package| package.name == "nixl-sys");
    let manifest = manifest.ok_or("cargo did not fetch nixl-sys")?.manifest_path;
    let fetched = manifest.parent().ok_or("nixl-sys has no directory")?;

    let fresh = home.join("source.new");
    if fresh.exists() {
        std::fs::remove_dir_all(&fresh).map_err(|error| error.to_string())?;
    }
    run(Command::new("cp").arg("-r").arg(fetched).arg(&fresh), minutes(1))?;
    // It pins a toolchain that cannot be expected on every machine; and it must not look for a workspace above it.
    let pin = fresh.join("rust-toolchain.toml");
    if pin.exists() {
        std::fs::remove_file(&pin).map_err(|error| format!("{}: {error}", pin.display()))?;
    }
    let manifest = fresh.join("Cargo.toml");
    let text =
        std::fs::read_to_string(&manifest).map_err(|error| format!("{}: {error}", manifest.display()))?;
    write(&manifest, &format!("{text}\n[workspace]\n"))?;
    std::fs::rename(&fresh, &copy).map_err(|error| error.to_string())?;
    Ok(copy)
}

fn plugins_under_the_name_of_ucx(plugins: &Path) -> Outcome<PathBuf> {
    let folder = work_dir("nixl-sys/plugins")?;
    place(&plugins.join(PLUGIN), &folder.join("libplugin_UCX.so"))?;
    place(&plugins.join(ENGINE), &folder.join(ENGINE))?;
    Ok(folder)
}

fn write(path: &Path, text: &str) -> Outcome<()> {
    std::fs::write(path, text).map_err(|error| format!("cannot write {}: {error}", path.display()))
}

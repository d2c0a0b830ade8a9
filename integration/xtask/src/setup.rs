//! What the other commands need on the machine: system packages, a Python environment of our own, the NIXL wheels.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::run::{Outcome, minutes, probe, run, say, work_dir};

/// The wheel that the demo, the benchmark and most tests use.
pub const NIXL: &str = "1.5.1";
/// Every wheel that one build of the plugin must load and transfer in, newest first.
pub const NIXL_ALL: [&str; 4] = [NIXL, "1.4.1", "1.3.2", "1.0.0"];

/// Something the system must offer, and the Debian package that brings it.
struct Need {
    package: &'static str,
    present: fn() -> bool,
}

const COMPILER: Need =
    Need { package: "g++", present: || probe(Command::new("g++").arg("--version")).is_some() };
const PYTHON: Need = Need { package: "python3-venv", present: || base_python().is_some() };
const CLANG: Need = Need { package: "libclang-14-dev", present: || libclang().is_some() };

/// What the bindings of libibverbs are built with; at run time the library alone does.
const VERBS: [Need; 4] = [
    CLANG,
    Need { package: "libibverbs-dev", present: || exists("/usr/include/infiniband/verbs.h") },
    Need { package: "librdmacm-dev", present: || exists("/usr/include/rdma/rdma_cma.h") },
    Need { package: "pkg-config", present: || on_path("pkg-config") },
];

/// What the guest with soft-RoCE devices runs on.
const GUEST: [Need; 6] = [
    Need { package: "qemu-system-x86", present: || on_path("qemu-system-x86_64") },
    Need { package: "busybox-static", present: || on_path("busybox") },
    Need { package: "kmod", present: || on_path("modprobe") },
    Need { package: "iproute2", present: || on_path("rdma") && on_path("tc") },
    Need { package: "xz-utils", present: || on_path("xz") },
    Need { package: "ibverbs-providers", present: || exists("/etc/libibverbs.d/rxe.driver") },
];

const PERFTEST: Need =
    Need { package: "perftest", present: || on_path("ib_write_bw") && on_path("ib_read_bw") };

const VALGRIND: Need = Need { package: "valgrind", present: || on_path("valgrind") };

/// Mooncake's wheel without CUDA, to compare with.
const MOONCAKE: &str = "mooncake-transfer-engine-non-cuda==0.3.13.post1";

/// What building the plugin needs.
pub fn compiler() -> Outcome<()> {
    ensure(&[COMPILER])?;
    verbs_if_possible();
    Ok(())
}

/// Without its headers everything but the RDMA fabric is built.
fn verbs_if_possible() {
    if let Err(reason) = ensure(&VERBS) {
        say(format!("building without RDMA: {reason}"));
    }
}

/// What the guest needs, and a build with RDMA to run in it.
pub fn guest() -> Outcome<()> {
    ensure(&GUEST)?;
    ensure(&VERBS)
}

/// What the commands that run NIXL need: a C++ compiler and a Python that can make environments.
pub fn nixl_base() -> Outcome<()> {
    ensure(&[COMPILER, PYTHON])?;
    verbs_if_possible();
    Ok(())
}

/// What building NIXL's Rust bindings needs besides; answers the directory for `LIBCLANG_PATH`.
pub fn clang() -> Outcome<PathBuf> {
    ensure(&[CLANG])?;
    libclang().ok_or_else(|| "libclang 14 or 15 was not found after its installation".to_owned())
}

fn ensure(needs: &[Need]) -> Outcome<()> {
    let missing: Vec<&str> = needs.iter().filter(|need| !(need.present)()).map(|need| need.package).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let install = format!("apt-get install -y --no-install-recommends {}", missing.join(" "));
    // SAFETY: a plain system call without arguments.
    if unsafe { libc::geteuid() } != 0 {
        return Err(format!("missing on this machine: {}. Run: sudo {install}", missing.join(", ")));
    }
    say(format!("installing {}", missing.join(", ")));
    let apt = |words: &[&str]| {
        let mut command = Command::new("apt-get");
        command.env("DEBIAN_FRONTEND", "noninteractive").args(["-q", "-y"]).args(words);
        run(&mut command, minutes(10))
    };
    apt(&["update"])?;
    apt(&[&["install", "--no-install-recommends"], missing.as_slice()].concat())
        .map_err(|error| format!("{error}. Run by hand: {install}"))?;
    match needs.iter().find(|need| !(need.present)()) {
        None => Ok(()),
        Some(need) => Err(format!("{} was installed, and still is not usable", need.package)),
    }
}

/// A directory with libclang 14 or 15: the bindings that need it fail with newer ones.
pub fn libclang() -> Option<PathBuf> {
    let given = std::env::var_os("LIBCLANG_PATH").map(PathBuf::from);
    let known = ["14", "15"].map(|version| PathBuf::from(format!("/usr/lib/llvm-{version}/lib")));
    let holds = |dir: &PathBuf| {
        ["libclang.so", "libclang.so.1", "libclang-14.so.1", "libclang-15.so.1"]
            .iter()
            .any(|name| dir.join(name).exists())
    };
    given.into_iter().chain(known).find(holds)
}

fn exists(path: &str) -> bool {
    Path::new(path).exists()
}

/// Whether a command is there; Debian keeps some where only root's `PATH` looks.
fn on_path(name: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let known = ["/usr/local/sbin", "/usr/sbin", "/sbin"].map(PathBuf::from);
    std::env::split_paths(&path).chain(known).any(|dir| dir.join(name).is_file())
}

/// A Python that the wheels exist for and that can make an environment with pip.
fn base_python() -> Option<PathBuf> {
    const ASK: &str =
        "import sys, ensurepip, venv; sys.exit(0 if (3, 10) <= sys.version_info[:2] <= (3, 13) else 1)";
    ["python3", "/usr/bin/python3", "python3.13", "python3.12", "python3.11", "python3.10"]
        .into_iter()
        .find(|name| probe(Command::new(name).args(["-c", ASK])).is_some())
        .map(PathBuf::from)
}

/// The interpreter of our environment, which is made on first use. It holds numpy; a wheel is added by `PYTHONPATH`.
fn python() -> Outcome<PathBuf> {
    nixl_base()?;
    let dir = work_dir("")?.join("python");
    let ready = dir.join("ready");
    let interpreter = dir.join("bin/python");
    if ready.exists() && probe(Command::new(&interpreter).args(["-c", "import numpy"])).is_some() {
        return Ok(interpreter);
    }
    let base = base_python().ok_or("no Python from 3.10 to 3.13 with ensurepip was found")?;
    say(format!("making a Python environment in {}", dir.display()));
    run(Command::new(base).args(["-m", "venv", "--clear"]).arg(&dir), minutes(5))?;
    pip(&interpreter, &["numpy>=1.26,<3"])?;
    write(&ready, "")?;
    Ok(interpreter)
}

fn pip(interpreter: &Path, words: &[&str]) -> Outcome<()> {
    let mut command = Command::new(interpreter);
    command.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]).args(words);
    run(&mut command, minutes(15))
}

/// The directory that holds one version of the stock wheel, which is installed on first use.
pub fn wheel(version: &str) -> Outcome<PathBuf> {
    let interpreter = python()?;
    let wheels = work_dir("wheels")?;
    let dir = wheels.join(version);
    if dir.exists() {
        return Ok(dir);
    }
    say(format!("installing the stock NIXL wheel {version} (without its dependencies)"));
    let fresh = wheels.join(format!("{version}.new"));
    if fresh.exists() {
        std::fs::remove_dir_all(&fresh)
            .map_err(|error| format!("cannot remove {}: {error}", fresh.display()))?;
    }
    let place = fresh.to_string_lossy();
    let (meta, cuda) = (format!("nixl=={version}"), format!("nixl-cu12=={version}"));
    pip(&interpreter, &["--no-deps", "--target", &place, &meta, &cuda])?;
    // Before 1.4.0 the Python layer imports torch, for the name of one class.
    if ["1.0.0", "1.3.2"].contains(&version) {
        let torch = fresh.join("torch");
        std::fs::create_dir_all(&torch).map_err(|error| format!("{}: {error}", torch.display()))?;
        write(&torch.join("__init__.py"), "class Tensor: ...\n")?;
        write(&torch.join("version.py"), "cuda = None\n")?;
    }
    std::fs::rename(&fresh, &dir).map_err(|error| format!("cannot rename to {}: {error}", dir.display()))?;
    Ok(dir)
}

/// What counts instructions.
pub fn valgrind() -> Outcome<()> {
    ensure(&[VALGRIND])
}

/// The benchmark to compare RDMA with.
pub fn perftest() -> Outcome<()> {
    ensure(&[PERFTEST])
}

/// An interpreter, and the directory that holds Mooncake's wheel, which is installed on first use.
pub fn mooncake() -> Outcome<(PathBuf, PathBuf)> {
    let interpreter = python()?;
    let dir = work_dir("wheels")?.join(MOONCAKE.replace("==", "-"));
    if !dir.exists() {
        say("installing Mooncake's wheel (without its dependencies)");
        let fresh = dir.with_extension("new");
        pip(&interpreter, &["--no-deps", "--upgrade", "--target", &fresh.to_string_lossy(), MOONCAKE])?;
        std::fs::rename(&fresh, &dir)
            .map_err(|error| format!("cannot rename to {}: {error}", dir.display()))?;
    }
    Ok((interpreter, dir))
}

/// The wheel's folder of shared libraries, for programs that open NIXL without Python.
pub fn wheel_libraries(version: &str) -> Outcome<PathBuf> {
    Ok(wheel(version)?.join(".nixl_cu12.mesonpy.libs"))
}

/// Python with one version of the wheel and the plugins of one directory.
pub fn nixl_python(version: &str, plugins: &Path) -> Outcome<Command> {
    let mut command = Command::new(python()?);
    command.env("PYTHONPATH", wheel(version)?).env("PYTHONUNBUFFERED", "1").env("NIXL_PLUGIN_DIR", plugins);
    // The user's own choices for NIXL and Baton stay; a configuration file of NIXL could name other plugins.
    command.env_remove("NIXL_CONFIG_FILE");
    // Debian's rdma-core and the wheel's copy do not get along: a process that opened UCX's efa crashes at exit.
    command.env("UCX_MODULES", "^efa");
    Ok(command)
}

fn write(path: &Path, text: &str) -> Outcome<()> {
    std::fs::write(path, text).map_err(|error| format!("cannot write {}: {error}", path.display()))
}

//! Finds an engine library, loads it for good and brings its table to the shape we know.

use std::collections::HashMap;
use std::ffi::{CStr, c_void};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use baton_abi::{BATON_ABI_MAJOR, BATON_ABI_MINOR, BATON_ENGINE_SYMBOL_V1, BatonEngineV1, BatonSlice};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::compare::{self, AbiVersion, Fitted, Mismatch};
use crate::elf::{self, ElfError};

/// File name of an engine, looked for in directories.
pub const ENGINE_FILE: &str = "libbaton_engine.so";

/// Through which of its two doors an engine is entered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Door {
    /// The data symbol `baton_engine_v1`, compared field by field.
    #[default]
    C,
    /// The root module of abi_stable, its layout compared type by type.
    #[cfg(feature = "rust-door")]
    Rust,
}

/// Why an engine cannot be used. One line each.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoadError {
    /// Something at that path, but no file.
    #[error("engine {path}: not a regular file ({origin})", path = .path.display())]
    NotAFile {
        /// What was named.
        path: PathBuf,
        /// Who named it.
        origin: String,
    },
    /// Nothing at that path.
    #[error("engine {path}: no such file ({origin})", path = .path.display())]
    NoSuchFile {
        /// Where it was looked for.
        path: PathBuf,
        /// Who named the place.
        origin: String,
    },
    /// The place beside our own code is unknown.
    #[error("engine {ENGINE_FILE}: the directory of this program is unknown ({0}); set BATON_PLUGIN")]
    NoOwnPlace(String),
    /// Not a library for this process.
    #[error("engine {path}: {cause}", path = .path.display())]
    NotLoadable {
        /// Which file.
        path: PathBuf,
        /// What is wrong.
        cause: ElfError,
    },
    /// It needs a library that is not there.
    #[error("engine {path}: a library it needs is missing: {cause}", path = .path.display())]
    MissingLibrary {
        /// Which file.
        path: PathBuf,
        /// What the loader says.
        cause: String,
    },
    /// The loader refuses it for another reason.
    #[error("engine {path}: {cause}", path = .path.display())]
    Loader {
        /// Which file.
        path: PathBuf,
        /// What the loader says.
        cause: String,
    },
    /// A library, but no engine.
    #[error("engine {path}: no symbol {symbol}: not an engine of this interface", path = .path.display())]
    NoSymbol {
        /// Which file.
        path: PathBuf,
        /// What was looked up.
        symbol: String,
    },
    /// An engine of another interface.
    #[error("engine {path}: interface {found} does not fit {BATON_ABI_MAJOR}.{BATON_ABI_MINOR} of this host: {cause}",
        path = .path.display(), found = .found.map_or("unknown".to_owned(), |v| v.to_string()))]
    Interface {
        /// Which file.
        path: PathBuf,
        /// Its version, if it could be read.
        found: Option<AbiVersion>,
        /// The first thing that differs.
        cause: Mismatch,
    },
    /// The other door's verdict.
    #[error("engine {path}: interface {found} does not fit {BATON_ABI_MAJOR}.{BATON_ABI_MINOR} of this host: {cause}",
        path = .path.display())]
    Layout {
        /// Which file.
        path: PathBuf,
        /// Its version in words.
        found: String,
        /// The first thing that differs.
        cause: String,
    },
}

/// A loaded engine library. It stays loaded until the process ends.
pub struct Plugin {
    table: BatonEngineV1,
    path: PathBuf,
    name: String,
    version: String,
    abi: AbiVersion,
    missing: Vec<String>,
    door: Door,
}

impl std::fmt::Debug for Plugin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Plugin")
            .field("path", &self.path)
            .field("version", &self.version)
            .finish_non_exhaustive()
    }
}

impl Plugin {
    /// The complete table; entries the library lacks answer UNSUPPORTED.
    pub fn table(&self) -> &BatonEngineV1 {
        &self.table
    }

    /// The file it came from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The engine's own name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The engine's own version.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Version of the interface it was built with.
    pub fn abi(&self) -> AbiVersion {
        self.abi
    }

    /// Entries of our interface that it lacks.
    pub fn missing(&self) -> &[String] {
        &self.missing
    }

    /// The door it was entered through.
    pub fn door(&self) -> Door {
        self.door
    }
}

/// Where an engine is looked for, and why there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The file.
    pub path: PathBuf,
    /// Why this one.
    pub reason: String,
    /// Places before it, with the reason each was passed over.
    pub passed_over: Vec<(String, String)>,
}

/// The one place where the engine must be: what the setting `plugin` names, else beside our own code.
pub fn find(plugin: Option<(&str, &str)>) -> Result<Place, LoadError> {
    let (path, reason, passed_over) = match plugin {
        Some((path, source)) => {
            let path = PathBuf::from(path);
            let reason = format!("named by the setting plugin, from {source}");
            (if path.is_dir() { path.join(ENGINE_FILE) } else { path }, reason, Vec::new())
        }
        None => {
            let own = own_file()?;
            let beside = own.parent().unwrap_or(Path::new("/")).join(ENGINE_FILE);
            let unset = ("BATON_PLUGIN".to_owned(), "not set".to_owned());
            (beside, format!("beside {}", own.display()), vec![unset])
        }
    };
    // The loader searches its own places for a name without a slash: it only ever gets a real path.
    match path.canonicalize() {
        Ok(path) if path.is_file() => Ok(Place { path, reason, passed_over }),
        Ok(path) => Err(LoadError::NotAFile { path, origin: reason }),
        _ => Err(LoadError::NoSuchFile { path, origin: reason }),
    }
}

/// The real path of the library or program that contains this code.
fn own_file() -> Result<PathBuf, LoadError> {
    let here = own_file as *const c_void;
    // SAFETY: all-zero is a valid Dl_info, and `here` is an address of this object.
    let name = unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        (libc::dladdr(here, &mut info) != 0 && !info.dli_fname.is_null())
            .then(|| CStr::from_ptr(info.dli_fname).to_string_lossy().into_owned())
    };
    // A program may have any name for itself, and a library may have been opened by a relative one.
    let path = match name {
        Some(name) if name.starts_with('/') => PathBuf::from(name),
        _ => mapped_file(here as usize)?,
    };
    path.canonicalize().map_err(|e| LoadError::NoOwnPlace(format!("{}: {e}", path.display())))
}

/// The file that is mapped at an address of this process.
fn mapped_file(address: usize) -> Result<PathBuf, LoadError> {
    let maps = std::fs::read_to_string("/proc/self/maps")
        .map_err(|e| LoadError::NoOwnPlace(format!("/proc/self/maps: {e}")))?;
    for line in maps.lines() {
        let Some((low, high)) = line.split_once(' ').and_then(|(range, _)| range.split_once('-')) else {
            continue;
        };
        let bounds = (usize::from_str_radix(low, 16), usize::from_str_radix(high, 16));
        if let ((Ok(low), Ok(high)), Some(at)) = (bounds, line.find('/'))
            && (low..high).contains(&address)
        {
            return Ok(PathBuf::from(&line[at..]));
        }
    }
    Err(LoadError::NoOwnPlace(format!("no file is mapped at {address:#x}")))
}

/// Loads the library at a real path, or finds it loaded already.
pub fn load(path: &Path, door: Door) -> Result<&'static Plugin, LoadError> {
    static LOADED: Mutex<Option<HashMap<(PathBuf, Door), &'static Plugin>>> = Mutex::new(None);
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    let loaded = loaded.get_or_insert_default();
    let key = (path.to_owned(), door);
    if let Some(plugin) = loaded.get(&key) {
        return Ok(plugin);
    }
    let plugin: &'static Plugin = Box::leak(Box::new(open(path, door)?));
    loaded.insert(key, plugin);
    Ok(plugin)
}

fn open(path: &Path, door: Door) -> Result<Plugin, LoadError> {
    elf::check(path).map_err(|cause| LoadError::NotLoadable { path: path.to_owned(), cause })?;
    // SAFETY: running the library's constructors is what the person who named the library asked for.
    let library =
        unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.map_err(|e| refused(path, &e))?;
    let (fitted, abi) = match door {
        Door::C => enter_c(path, &library)?,
        #[cfg(feature = "rust-door")]
        Door::Rust => crate::rust_door::enter(path)?,
    };
    // Its threads and tables may outlive every engine: it is never unloaded.
    std::mem::forget(library);
    let Fitted { table, missing } = fitted;
    let (name, version) = (owned(table.engine_name), owned(table.engine_version));
    Ok(Plugin { table, path: path.to_owned(), name, version, abi, missing, door })
}

fn enter_c(path: &Path, library: &Library) -> Result<(Fitted, AbiVersion), LoadError> {
    // SAFETY: the symbol is only ever used as the address of data.
    let symbol = unsafe { library.get::<*const BatonEngineV1>(BATON_ENGINE_SYMBOL_V1) };
    let table = symbol.map(|s| s.into_raw().cast::<BatonEngineV1>().cast_const()).unwrap_or_default();
    if table.is_null() {
        let symbol = String::from_utf8_lossy(BATON_ENGINE_SYMBOL_V1).trim_end_matches('\0').to_owned();
        return Err(LoadError::NoSymbol { path: path.to_owned(), symbol });
    }
    let misfit = |found, cause| LoadError::Interface { path: path.to_owned(), found, cause };
    // SAFETY: the symbol bears the name of an engine's table, which promises what both functions need.
    unsafe {
        let abi = compare::version(table).map_err(|cause| misfit(None, cause))?;
        let fitted = compare::fit(table).map_err(|cause| misfit(Some(abi), cause))?;
        Ok((fitted, abi))
    }
}

fn refused(path: &Path, error: &libloading::Error) -> LoadError {
    let cause = match error {
        libloading::Error::DlOpen { source } => source.to_string(),
        other => other.to_string(),
    };
    let path = path.to_owned();
    let own = path.to_string_lossy();
    if cause.contains("cannot open shared object file") && !cause.starts_with(&*own) {
        LoadError::MissingLibrary { cause, path }
    } else {
        // The loader begins with the path that our own text begins with.
        let cause =
            cause.strip_prefix(&*own).map_or(cause.as_str(), |rest| rest.trim_start_matches([':', ' ']));
        LoadError::Loader { cause: cause.to_owned(), path }
    }
}

fn owned(slice: BatonSlice) -> String {
    // SAFETY: name and version in a table are static strings of the library.
    String::from_utf8_lossy(unsafe { slice.bytes() }.unwrap_or_default()).into_owned()
}

#[cfg(test)]
#[path = "load_tests.rs"]
mod tests;

//! Opening libibverbs.

use crate::api::Api;
use crate::device::{Context, DeviceInfo};
use crate::error::VerbsError;
use rdma_sys::IBV_FORK_UNNEEDED;
use std::ffi::CStr;
use std::sync::Arc;

/// The name under which every rdma-core installs it.
const SONAME: &str = "libibverbs.so.1";

/// libibverbs is not usable.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LibraryError {
    /// It cannot be opened.
    #[error(
        "{SONAME} cannot be opened ({0}); install rdma-core's library (Debian: libibverbs1 and ibverbs-providers)"
    )]
    Open(String),
    /// It is too old or something else of that name.
    #[error("{SONAME} has no symbol {0}: it is older than rdma-core 28 or not libibverbs")]
    Symbol(&'static str),
}

/// What the dynamic linker says, which is in the error's source: a damaged library must not read like a missing one.
fn describe(e: &libloading::Error) -> String {
    match std::error::Error::source(e) {
        Some(source) => format!("{e}: {source}"),
        None => e.to_string(),
    }
}

pub(crate) struct Inner {
    pub api: Api,
    /// Keeps the code mapped; `None` when the functions are the program's own.
    _library: Option<libloading::Library>,
}

/// An open libibverbs.
#[derive(Clone)]
pub struct Library {
    inner: Arc<Inner>,
}

impl Library {
    /// Opens the system's library, local to this one: other copies in the process (a Python wheel may bring its own) stay apart.
    pub fn open() -> Result<Library, LibraryError> {
        use libloading::os::unix::{Library as UnixLibrary, RTLD_LOCAL, RTLD_NOW};
        // Providers that it opened stay mapped and lead back to it, so it stays too.
        const FLAGS: i32 = RTLD_NOW | RTLD_LOCAL | libc::RTLD_NODELETE;
        // SAFETY: libibverbs' initialisers only set the library itself up.
        let library = unsafe { UnixLibrary::open(Some(SONAME), FLAGS) };
        let library = libloading::Library::from(library.map_err(|e| LibraryError::Open(describe(&e)))?);
        // SAFETY: it is libibverbs by its soname, and it is kept open beside the table.
        let api = unsafe { Api::load(&library) }.map_err(LibraryError::Symbol)?;
        Ok(Library { inner: Arc::new(Inner { api, _library: Some(library) }) })
    }

    /// A library made of the program's own functions.
    ///
    /// # Safety
    /// They must behave as libibverbs does, and so must the contexts that they hand out.
    pub unsafe fn from_api(api: Api) -> Library {
        Library { inner: Arc::new(Inner { api, _library: None }) }
    }

    pub(crate) fn inner(&self) -> &Arc<Inner> {
        &self.inner
    }

    /// Makes registered memory safe against fork, where the kernel does not do so by itself (Linux 5.12); must come before the first
    /// registration of the process. It takes every page with registered memory away from children, so it is not done without need.
    pub fn fork_init(&self) -> Result<(), VerbsError> {
        // SAFETY: takes no arguments and may be called at any time.
        let is_safe =
            self.inner.api.is_fork_initialized.is_some_and(|ask| unsafe { ask() } == IBV_FORK_UNNEEDED);
        if is_safe {
            return Ok(());
        }
        // SAFETY: takes no arguments and may be called at any time.
        VerbsError::check("ibv_fork_init", unsafe { (self.inner.api.fork_init)() })
    }

    /// The devices of this machine; empty where there are none.
    pub fn devices(&self) -> Result<Vec<DeviceInfo>, VerbsError> {
        self.with_list(|devices| devices.iter().map(|device| self.describe(*device)).collect())
    }

    /// Opens a device by name.
    pub fn open_device(&self, name: &str) -> Result<Arc<Context>, VerbsError> {
        self.with_list(|devices| {
            let found = devices.iter().find(|device| self.describe(**device).name == name);
            let device = found.ok_or(VerbsError { call: "ibv_get_device_list", errno: libc::ENODEV })?;
            // SAFETY: an element of the list that is held.
            let context = unsafe { (self.inner.api.open_device)(*device) };
            let context =
                std::ptr::NonNull::new(context).ok_or_else(|| VerbsError::last("ibv_open_device"))?;
            Context::new(self.clone(), context, self.describe(*device)).map(Arc::new)
        })?
    }

    fn with_list<T>(&self, look: impl FnOnce(&[*mut rdma_sys::ibv_device]) -> T) -> Result<T, VerbsError> {
        let mut count = 0;
        // SAFETY: the list is valid until it is freed below.
        let list = unsafe { (self.inner.api.get_device_list)(&mut count) };
        if list.is_null() {
            // A kernel without RDMA answers ENOSYS: no devices.
            let error = VerbsError::last("ibv_get_device_list");
            return if error.errno == libc::ENOSYS { Ok(look(&[])) } else { Err(error) };
        }
        // SAFETY: as above; `count` elements, none null.
        let result = look(unsafe { std::slice::from_raw_parts(list, count.max(0) as usize) });
        // SAFETY: the list came from get_device_list and is not used any more. Opened devices outlive it.
        unsafe { (self.inner.api.free_device_list)(list) };
        Ok(result)
    }

    fn describe(&self, device: *mut rdma_sys::ibv_device) -> DeviceInfo {
        // SAFETY: an element of a list that the caller holds; the names are C strings inside it.
        let (name, path, transport) = unsafe {
            (
                CStr::from_ptr((self.inner.api.get_device_name)(device)),
                CStr::from_ptr((*device).ibdev_path.as_ptr()),
                (*device).transport_type,
            )
        };
        DeviceInfo {
            name: name.to_string_lossy().into_owned(),
            sysfs: path.to_string_lossy().into_owned().into(),
            is_iwarp: transport == rdma_sys::ibv_transport_type::IBV_TRANSPORT_IWARP,
            is_infiniband: transport == rdma_sys::ibv_transport_type::IBV_TRANSPORT_IB,
        }
    }
}

//! libcuda, opened at run time: the few of its functions that registering an accelerator's memory takes.
//!
//! Nothing links it, so an engine starts where no GPU is. `cuPointerGetAttribute` and what asks about devices need no current
//! context; `cuMemGetHandleForAddressRange` and `cuPointerSetAttribute` run with the context of the buffer (or, where the buffer has none, as
//! memory from a pool or mapped by address, with the primary context of its device) pushed on the calling thread, and popped again.

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::os::fd::{FromRawFd, OwnedFd};
use std::path::Path;

/// The name under which every driver installs it.
const SONAME: &str = "libcuda.so.1";

type Context = *mut c_void;

const SUCCESS: c_int = 0;
const DEVICE_ATTRIBUTE_WRITES_ORDERING: c_int = 118;
const DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED: c_int = 124;
/// The device itself sees remote writes in order.
const WRITES_ORDERED_FOR_OWNER: c_int = 100;
const POINTER_ATTRIBUTE_CONTEXT: c_int = 1;
const POINTER_ATTRIBUTE_MEMORY_TYPE: c_int = 2;
const POINTER_ATTRIBUTE_SYNC_MEMOPS: c_int = 6;
const POINTER_ATTRIBUTE_DEVICE_ORDINAL: c_int = 9;
const MEMORY_TYPE_DEVICE: c_uint = 2;
const RANGE_HANDLE_DMA_BUF_FD: c_int = 1;

macro_rules! api {
    (
        required { $($name:ident: $symbol:literal = fn($($arg:ident: $ty:ty),*);)* }
        optional { $($oname:ident: $osymbol:literal = fn($($oarg:ident: $oty:ty),*);)* }
    ) => {
        /// Functions of libcuda by their names without `cu`. All answer 0 or an error's number. A fake fills one of these with its own.
        #[derive(Clone, Copy)]
        #[allow(missing_docs)]
        pub struct CudaApi {
            $(pub $name: unsafe extern "C" fn($($arg: $ty),*) -> c_int,)*
            $(pub $oname: Option<unsafe extern "C" fn($($oarg: $oty),*) -> c_int>,)*
        }

        impl CudaApi {
            /// # Safety
            /// `library` must be a libcuda: symbols of these names must have these signatures.
            unsafe fn load(library: &libloading::Library) -> Result<CudaApi, &'static str> {
                Ok(CudaApi {
                    // SAFETY: the caller's promise.
                    $($name: *unsafe { library.get($symbol.as_bytes()) }.map_err(|_| $symbol)?,)*
                    // SAFETY: the caller's promise.
                    $($oname: unsafe { library.get($osymbol.as_bytes()) }.ok().map(|symbol| *symbol),)*
                })
            }
        }
    };
}

api! {
    required {
        init: "cuInit" = fn(flags: c_uint);
        device_get_count: "cuDeviceGetCount" = fn(count: *mut c_int);
        device_get: "cuDeviceGet" = fn(device: *mut c_int, ordinal: c_int);
        device_get_attribute: "cuDeviceGetAttribute" = fn(value: *mut c_int, attribute: c_int, device: c_int);
        device_primary_ctx_retain: "cuDevicePrimaryCtxRetain" = fn(context: *mut *mut c_void, device: c_int);
        device_primary_ctx_release: "cuDevicePrimaryCtxRelease_v2" = fn(device: c_int);
        ctx_push_current: "cuCtxPushCurrent_v2" = fn(context: *mut c_void);
        ctx_pop_current: "cuCtxPopCurrent_v2" = fn(context: *mut *mut c_void);
        pointer_get_attribute: "cuPointerGetAttribute" = fn(value: *mut c_void, attribute: c_int, addr: u64);
        pointer_set_attribute: "cuPointerSetAttribute" = fn(value: *const c_void, attribute: c_int, addr: u64);
        get_error_string: "cuGetErrorString" = fn(error: c_int, text: *mut *const c_char);
    }
    optional {
        // Since CUDA 11.7.
        mem_get_handle_for_address_range: "cuMemGetHandleForAddressRange" = fn(handle: *mut c_void, addr: u64, len: usize, kind: c_int, flags: c_ulonglong);
    }
}

/// libcuda or one of its calls failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// It cannot be opened.
    #[error("{name} cannot be opened ({why}): no driver of an NVIDIA GPU is installed here")]
    Open {
        /// Its name or path.
        name: String,
        /// The loader's words.
        why: String,
    },
    /// It is too old or something else of that name.
    #[error("{0} has no symbol {1}: it is older than CUDA 11 or not libcuda")]
    Symbol(String, &'static str),
    /// A call failed.
    #[error("{call}: {text} (error {code})")]
    Call {
        /// Name of the call.
        call: &'static str,
        /// Its answer.
        code: i32,
        /// The answer in words.
        text: String,
    },
}

/// An open libcuda.
pub struct Cuda {
    api: CudaApi,
    /// Keeps the code mapped; `None` when the functions are the program's own.
    _library: Option<libloading::Library>,
}

/// What libcuda knows of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pointer {
    pub addr: u64,
    /// Number of its device, as this process counts them.
    pub ordinal: i32,
}

impl Cuda {
    /// Opens the driver's library, local to this one.
    pub fn open() -> Result<Cuda, CudaError> {
        Cuda::open_at(Path::new(SONAME))
    }

    /// The same by another name or path.
    pub fn open_at(path: &Path) -> Result<Cuda, CudaError> {
        use libloading::os::unix::{Library as UnixLibrary, RTLD_LOCAL, RTLD_NOW};
        let name = path.display().to_string();
        // SAFETY: libcuda's initialisers only set the library itself up.
        let library = unsafe { UnixLibrary::open(Some(path), RTLD_NOW | RTLD_LOCAL) };
        let library = library.map_err(|e| CudaError::Open { name: name.clone(), why: e.to_string() })?;
        let library = libloading::Library::from(library);
        // SAFETY: it is libcuda by its name, and it is kept open beside the table.
        let api = unsafe { CudaApi::load(&library) }.map_err(|symbol| CudaError::Symbol(name, symbol))?;
        Ok(Cuda { api, _library: Some(library) })
    }

    /// A library made of the program's own functions.
    ///
    /// # Safety
    /// They must behave as libcuda's do.
    pub unsafe fn from_api(api: CudaApi) -> Cuda {
        Cuda { api, _library: None }
    }

    fn check(&self, call: &'static str, code: c_int) -> Result<(), CudaError> {
        if code == SUCCESS {
            return Ok(());
        }
        let mut text = std::ptr::null();
        // SAFETY: room for the answer, which is a static string or null.
        let known = unsafe { (self.api.get_error_string)(code, &mut text) } == SUCCESS && !text.is_null();
        // SAFETY: as above.
        let text = if known { unsafe { CStr::from_ptr(text) }.to_string_lossy() } else { "unknown".into() };
        Err(CudaError::Call { call, code, text: text.into_owned() })
    }

    /// Initialises the driver and counts its devices.
    pub(crate) fn devices(&self) -> Result<i32, CudaError> {
        // SAFETY: may be called at any time and repeatedly.
        self.check("cuInit", unsafe { (self.api.init)(0) })?;
        let mut count = 0;
        // SAFETY: room for the answer.
        self.check("cuDeviceGetCount", unsafe { (self.api.device_get_count)(&mut count) })?;
        Ok(count)
    }

    fn device(&self, ordinal: i32) -> Result<c_int, CudaError> {
        let mut device = 0;
        // SAFETY: room for the answer.
        self.check("cuDeviceGet", unsafe { (self.api.device_get)(&mut device, ordinal) })?;
        Ok(device)
    }

    /// 0 also for what the driver does not know.
    fn attribute(&self, ordinal: i32, attribute: c_int) -> Result<c_int, CudaError> {
        let device = self.device(ordinal)?;
        let mut value = 0;
        // SAFETY: room for the answer.
        let code = unsafe { (self.api.device_get_attribute)(&mut value, attribute, device) };
        Ok(if code == SUCCESS { value } else { 0 })
    }

    /// Whether memory of the device can be had as a dma-buf; the error says why not.
    pub(crate) fn exports_dmabuf(&self, ordinal: i32) -> Result<(), String> {
        if self.api.mem_get_handle_for_address_range.is_none() {
            return Err(
                "libcuda has no cuMemGetHandleForAddressRange (it is older than CUDA 11.7)".to_owned()
            );
        }
        match self.attribute(ordinal, DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED) {
            Ok(0) => Err(format!(
                "GPU {ordinal} does not export dma-bufs (its attribute DMA_BUF_SUPPORTED is 0: they take NVIDIA's open kernel modules)"
            )),
            Ok(_) => Ok(()),
            Err(e) => Err(e.to_string()),
        }
    }

    /// Whether the device guarantees that it sees a NIC's writes in order, so that nobody needs to flush them.
    pub(crate) fn orders_writes(&self, ordinal: i32) -> bool {
        self.attribute(ordinal, DEVICE_ATTRIBUTE_WRITES_ORDERING)
            .is_ok_and(|order| order >= WRITES_ORDERED_FOR_OWNER)
    }

    /// # Safety
    /// The attribute must be of type `T`.
    unsafe fn pointer_attribute<T>(&self, addr: u64, attribute: c_int, start: T) -> Result<T, CudaError> {
        let mut value = start;
        let room: *mut T = &mut value;
        // SAFETY: room for the answer, of the right type by the caller's promise; libcuda knows by itself which addresses are its own.
        let code = unsafe { (self.api.pointer_get_attribute)(room.cast(), attribute, addr) };
        self.check("cuPointerGetAttribute", code)?;
        Ok(value)
    }

    /// Looks an address up. It has to be a device's own memory.
    pub(crate) fn pointer(&self, addr: u64) -> Result<Pointer, String> {
        let unknown = |e: CudaError| format!("libcuda does not know it: {e}");
        // SAFETY: the type is an enumeration of 32 bits.
        let kind = unsafe { self.pointer_attribute(addr, POINTER_ATTRIBUTE_MEMORY_TYPE, 0 as c_uint) };
        let kind = kind.map_err(unknown)?;
        if kind != MEMORY_TYPE_DEVICE {
            return Err(format!(
                "libcuda says that it is no memory of a device (memory type {kind}); host memory is registered as DRAM"
            ));
        }
        // SAFETY: the ordinal is an int.
        let ordinal = unsafe { self.pointer_attribute(addr, POINTER_ATTRIBUTE_DEVICE_ORDINAL, -1 as c_int) };
        Ok(Pointer { addr, ordinal: ordinal.map_err(unknown)? })
    }

    /// Runs `body` with the right context current on this thread.
    fn in_context<T>(
        &self,
        pointer: Pointer,
        body: impl FnOnce() -> Result<T, CudaError>,
    ) -> Result<T, CudaError> {
        // SAFETY: the attribute is a context's handle.
        let own = unsafe {
            self.pointer_attribute::<Context>(pointer.addr, POINTER_ATTRIBUTE_CONTEXT, std::ptr::null_mut())
        };
        let retained = match own {
            Ok(context) if !context.is_null() => None,
            _ => Some(self.device(pointer.ordinal)?),
        };
        let mut context = own.unwrap_or(std::ptr::null_mut());
        if let Some(device) = retained {
            // SAFETY: room for the answer; given back below.
            let code = unsafe { (self.api.device_primary_ctx_retain)(&mut context, device) };
            self.check("cuDevicePrimaryCtxRetain", code)?;
        }
        // SAFETY: a context of the allocation, which the host keeps alive, or one that is retained.
        let pushed = self.check("cuCtxPushCurrent", unsafe { (self.api.ctx_push_current)(context) });
        let outcome = pushed.and_then(|()| {
            let outcome = body();
            let mut popped = std::ptr::null_mut();
            // SAFETY: pops what was pushed above: calls in between leave the stack as it is.
            if let Err(e) = self.check("cuCtxPopCurrent", unsafe { (self.api.ctx_pop_current)(&mut popped) })
            {
                tracing::warn!("GPU {}: {e}", pointer.ordinal);
            }
            outcome
        });
        if let Some(device) = retained {
            // SAFETY: retained above.
            let code = unsafe { (self.api.device_primary_ctx_release)(device) };
            if let Err(e) = self.check("cuDevicePrimaryCtxRelease", code) {
                tracing::warn!("GPU {}: {e}", pointer.ordinal);
            }
        }
        outcome
    }

    /// A dma-buf of a range that starts and ends at pages of the host.
    pub(crate) fn export(&self, pointer: Pointer, start: u64, len_bytes: u64) -> Result<OwnedFd, CudaError> {
        const CALL: &str = "cuMemGetHandleForAddressRange";
        let Some(export) = self.api.mem_get_handle_for_address_range else {
            return Err(CudaError::Symbol(SONAME.to_owned(), CALL));
        };
        let mut fd: c_int = -1;
        self.in_context(pointer, || {
            let room: *mut c_int = &mut fd;
            // SAFETY: room for a descriptor, which is what this kind of handle is.
            let code = unsafe { export(room.cast(), start, len_bytes as usize, RANGE_HANDLE_DMA_BUF_FD, 0) };
            self.check(CALL, code)
        })?;
        if fd < 0 {
            return Err(CudaError::Call { call: CALL, code: SUCCESS, text: format!("descriptor {fd}") });
        }
        // SAFETY: a new descriptor that nobody else owns.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// Copies of the host's that libcuda calls synchronous are so towards this memory too. Not all memory has the switch.
    pub(crate) fn synchronise_copies(&self, pointer: Pointer) {
        let on: c_uint = 1;
        let outcome = self.in_context(pointer, || {
            let value: *const c_uint = &on;
            // SAFETY: the attribute is an unsigned int.
            let code = unsafe {
                (self.api.pointer_set_attribute)(value.cast(), POINTER_ATTRIBUTE_SYNC_MEMOPS, pointer.addr)
            };
            self.check("cuPointerSetAttribute(SYNC_MEMOPS)", code)
        });
        if let Err(e) = outcome {
            tracing::debug!("memory at {:#x} of GPU {}: {e}", pointer.addr, pointer.ordinal);
        }
    }
}

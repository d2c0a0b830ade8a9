//! A libcuda that knows one GPU's allocations, made of this process' memory.
//!
//! It is strict about what real ones are strict about: ranges are exported as whole pages, inside an allocation, with a context current on the
//! calling thread.

#![allow(dead_code)]

use baton_fabric_verbs::{Accelerators, Cuda, CudaApi};
use std::cell::RefCell;
use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};
use std::os::fd::IntoRawFd;
use std::sync::Mutex;
use std::sync::atomic::{AtomicI32, Ordering};

const PAGE: u64 = 4096;
const INVALID_VALUE: c_int = 1;
const INVALID_CONTEXT: c_int = 201;
const NOT_SUPPORTED: c_int = 801;
const PRIMARY: *mut c_void = 0x100 as *mut c_void;
const OWN: *mut c_void = 0x200 as *mut c_void;

struct Allocation {
    addr: u64,
    len: u64,
    ordinal: i32,
    /// A pool's memory belongs to no context.
    pooled: bool,
}

static ALLOCATIONS: Mutex<Vec<Allocation>> = Mutex::new(Vec::new());
static RETAINED: AtomicI32 = AtomicI32::new(0);

thread_local! {
    static CONTEXTS: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// Memory of a GPU, on pages of its own.
pub struct Vram {
    pub addr: u64,
    pub len: usize,
}

impl Vram {
    pub fn new(len: usize, ordinal: i32, pooled: bool) -> Vram {
        let whole = len.next_multiple_of(PAGE as usize);
        let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a fresh private mapping that aliases nothing.
        let addr = unsafe { libc::mmap(std::ptr::null_mut(), whole, prot, flags, -1, 0) };
        assert_ne!(addr, libc::MAP_FAILED);
        let addr = addr as u64;
        ALLOCATIONS.lock().unwrap().push(Allocation { addr, len: whole as u64, ordinal, pooled });
        Vram { addr, len: whole }
    }

    /// What the GPU sees now.
    pub fn bytes(&self, offset: usize, len: usize) -> Vec<u8> {
        assert!(offset + len <= self.len);
        // SAFETY: inside the mapping; volatile because a device writes it.
        (offset..offset + len)
            .map(|at| unsafe { ((self.addr as *const u8).add(at)).read_volatile() })
            .collect()
    }

    pub fn fill(&self, byte: u8) {
        // SAFETY: inside the mapping; nothing writes it at the same time.
        (0..self.len).for_each(|at| unsafe { ((self.addr as *mut u8).add(at)).write_volatile(byte) });
    }
}

impl Drop for Vram {
    fn drop(&mut self) {
        ALLOCATIONS.lock().unwrap().retain(|allocation| allocation.addr != self.addr);
        // SAFETY: mapped by `new`, and registered nowhere any more.
        unsafe { libc::munmap(self.addr as *mut c_void, self.len) };
    }
}

fn find<T>(addr: u64, with: impl FnOnce(&Allocation) -> T) -> Option<T> {
    let allocations = ALLOCATIONS.lock().unwrap();
    allocations.iter().find(|a| (a.addr..a.addr + a.len).contains(&addr)).map(with)
}

unsafe extern "C" fn init(_: c_uint) -> c_int {
    0
}

unsafe extern "C" fn device_get_count(count: *mut c_int) -> c_int {
    // SAFETY: room for the answer.
    unsafe { *count = 2 };
    0
}

pub unsafe extern "C" fn no_device(count: *mut c_int) -> c_int {
    // SAFETY: room for the answer.
    unsafe { *count = 0 };
    0
}

pub unsafe extern "C" fn no_driver(_: c_uint) -> c_int {
    100
}

unsafe extern "C" fn device_get(device: *mut c_int, ordinal: c_int) -> c_int {
    // SAFETY: room for the answer.
    unsafe { *device = 40 + ordinal };
    0
}

unsafe extern "C" fn attributes(value: *mut c_int, attribute: c_int, device: c_int) -> c_int {
    assert!((40..42).contains(&device), "device handle {device}");
    // SAFETY: room for the answer.
    unsafe { *value = c_int::from(attribute == 124) };
    0
}

/// As a device with NVIDIA's closed modules.
pub unsafe extern "C" fn no_attributes(value: *mut c_int, _: c_int, _: c_int) -> c_int {
    // SAFETY: room for the answer.
    unsafe { *value = 0 };
    0
}

/// Exports dma-bufs and orders remote writes for itself.
pub unsafe extern "C" fn orders_writes(value: *mut c_int, attribute: c_int, _: c_int) -> c_int {
    // SAFETY: room for the answer.
    unsafe {
        *value = match attribute {
            118 => 100,
            124 => 1,
            _ => 0,
        }
    };
    0
}

unsafe extern "C" fn primary_retain(context: *mut *mut c_void, device: c_int) -> c_int {
    assert!((40..42).contains(&device));
    RETAINED.fetch_add(1, Ordering::SeqCst);
    // SAFETY: room for the answer.
    unsafe { *context = PRIMARY };
    0
}

unsafe extern "C" fn primary_release(_: c_int) -> c_int {
    assert!(RETAINED.fetch_sub(1, Ordering::SeqCst) > 0, "released more often than retained");
    0
}

unsafe extern "C" fn push(context: *mut c_void) -> c_int {
    CONTEXTS.with_borrow_mut(|contexts| contexts.push(context as usize));
    0
}

unsafe extern "C" fn pop(context: *mut *mut c_void) -> c_int {
    let Some(top) = CONTEXTS.with_borrow_mut(Vec::pop) else { return INVALID_CONTEXT };
    // SAFETY: room for the answer.
    unsafe { *context = top as *mut c_void };
    0
}

unsafe extern "C" fn pointer_get(value: *mut c_void, attribute: c_int, addr: u64) -> c_int {
    let found = find(addr, |a| (a.ordinal, a.pooled));
    let Some((ordinal, pooled)) = found else { return INVALID_VALUE };
    // SAFETY: room for an answer of the attribute's type.
    unsafe {
        match attribute {
            1 => *value.cast::<*mut c_void>() = if pooled { std::ptr::null_mut() } else { OWN },
            2 => *value.cast::<c_uint>() = 2,
            9 => *value.cast::<c_int>() = ordinal,
            _ => return INVALID_VALUE,
        }
    }
    0
}

unsafe extern "C" fn pointer_set(_: *const c_void, attribute: c_int, _: u64) -> c_int {
    if attribute == 6 && has_context() { 0 } else { INVALID_VALUE }
}

fn has_context() -> bool {
    CONTEXTS.with_borrow(|contexts| !contexts.is_empty())
}

unsafe extern "C" fn error_string(error: c_int, text: *mut *const c_char) -> c_int {
    let words = match error {
        INVALID_VALUE => c"invalid argument",
        INVALID_CONTEXT => c"invalid device context",
        NOT_SUPPORTED => c"operation not supported",
        100 => c"no CUDA-capable device is detected",
        _ => return INVALID_VALUE,
    };
    // SAFETY: room for the answer.
    unsafe { *text = words.as_ptr() };
    0
}

unsafe extern "C" fn export(
    handle: *mut c_void,
    addr: u64,
    len: usize,
    kind: c_int,
    flags: c_ulonglong,
) -> c_int {
    if !has_context() {
        return INVALID_CONTEXT;
    }
    let inside = find(addr, |a| addr + len as u64 <= a.addr + a.len) == Some(true);
    if !inside || !(addr | len as u64).is_multiple_of(PAGE) || kind != 1 || flags != 0 {
        return INVALID_VALUE;
    }
    let Ok(fd) = baton_verbs::fake::dmabuf(addr, len as u64) else { return INVALID_VALUE };
    // SAFETY: room for a descriptor.
    unsafe { *handle.cast::<c_int>() = fd.into_raw_fd() };
    0
}

pub unsafe extern "C" fn refuses_to_export(
    _: *mut c_void,
    _: u64,
    _: usize,
    _: c_int,
    _: c_ulonglong,
) -> c_int {
    NOT_SUPPORTED
}

/// All of it as it should be.
pub fn api() -> CudaApi {
    CudaApi {
        init,
        device_get_count,
        device_get,
        device_get_attribute: attributes,
        device_primary_ctx_retain: primary_retain,
        device_primary_ctx_release: primary_release,
        ctx_push_current: push,
        ctx_pop_current: pop,
        pointer_get_attribute: pointer_get,
        pointer_set_attribute: pointer_set,
        get_error_string: error_string,
        mem_get_handle_for_address_range: Some(export),
    }
}

/// A host with this libcuda and these modules loaded.
pub fn host(api: CudaApi, kernel_modules: &str) -> Accelerators {
    // SAFETY: they behave as libcuda's functions do.
    let cuda = Ok(unsafe { Cuda::from_api(api) });
    Accelerators { cuda, kernel_modules: kernel_modules.to_owned() }
}

/// Whether a descriptor of a range that begins here is open in this process.
pub fn is_exported(addr: u64) -> bool {
    let name = format!("fake-dmabuf-{:x}", addr - addr % PAGE);
    let open = std::fs::read_dir("/proc/self/fd").expect("procfs");
    open.flatten()
        .filter_map(|fd| std::fs::read_link(fd.path()).ok())
        .any(|link| link.to_string_lossy().contains(&name))
}

/// Contexts that this thread has left on its stack.
pub fn contexts_left() -> usize {
    CONTEXTS.with_borrow(Vec::len)
}

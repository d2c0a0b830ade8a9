//! Protection domains and memory regions.

use crate::device::Context;
use crate::error::VerbsError;
use rdma_sys::{ibv_access_flags, ibv_mr, ibv_pd};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;

/// What may be done with a region besides being read by own work requests. No atomics: the engine never uses them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Access {
    /// Own work requests and RECVs may write it.
    pub local_write: bool,
    /// Peers may read it.
    pub remote_read: bool,
    /// Peers may write it; implies `local_write` (the specification demands it).
    pub remote_write: bool,
    /// PCIe may reorder writes to it (optional: ignored where the device or kernel does not know it).
    pub relaxed_ordering: bool,
}

impl Access {
    fn required(self) -> u32 {
        let mut flags = 0;
        if self.local_write || self.remote_write {
            flags |= ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0;
        }
        if self.remote_write {
            flags |= ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0;
        }
        if self.remote_read {
            flags |= ibv_access_flags::IBV_ACCESS_REMOTE_READ.0;
        }
        flags
    }
}

/// A protection domain.
pub struct Pd {
    pd: NonNull<ibv_pd>,
    context: Arc<Context>,
}

// SAFETY: libibverbs' objects may be used from any thread; a domain has no thread-bound state.
unsafe impl Send for Pd {}
// SAFETY: as above.
unsafe impl Sync for Pd {}

impl Pd {
    /// Allocates one.
    pub fn new(context: &Arc<Context>) -> Result<Arc<Pd>, VerbsError> {
        // SAFETY: the context is open.
        let pd = unsafe { (context.api().alloc_pd)(context.as_ptr()) };
        let pd = NonNull::new(pd).ok_or_else(|| VerbsError::last("ibv_alloc_pd"))?;
        Ok(Arc::new(Pd { pd, context: Arc::clone(context) }))
    }

    pub(crate) fn as_ptr(&self) -> *mut ibv_pd {
        self.pd.as_ptr()
    }

    /// Its device.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Whether library, kernel and driver take dma-bufs at all, found out with a descriptor that is none: whoever does takes offence at
    /// that. The error is the refusal.
    pub fn takes_dmabuf(&self) -> Result<(), VerbsError> {
        const CALL: &str = "ibv_reg_dmabuf_mr";
        let unsupported = VerbsError { call: CALL, errno: libc::EOPNOTSUPP };
        let Some(reg_dmabuf_mr) = self.context.api().reg_dmabuf_mr else { return Err(unsupported) };
        let flags = ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0 as i32;
        // SAFETY: the domain is alive; the kernel checks the descriptor.
        let mr = unsafe { reg_dmabuf_mr(self.as_ptr(), 0, 1, 0, -1, flags) };
        if let Some(mr) = NonNull::new(mr) {
            // SAFETY: just registered, used by nobody.
            let answer = unsafe { (self.context.api().dereg_mr)(mr.as_ptr()) };
            return VerbsError::check("ibv_dereg_mr", answer);
        }
        let error = VerbsError::last(CALL);
        match error.errno {
            libc::EOPNOTSUPP | libc::EPROTONOSUPPORT | libc::ENOSYS | libc::ENOTTY => Err(error),
            _ => Ok(()),
        }
    }
}

impl Drop for Pd {
    fn drop(&mut self) {
        // SAFETY: nothing made in this domain is alive: it would hold the domain.
        let answer = unsafe { (self.context.api().dealloc_pd)(self.as_ptr()) };
        if let Err(e) = VerbsError::check("ibv_dealloc_pd", answer) {
            tracing::error!("{}: a protection domain stays allocated: {e}", self.context.info().name);
        }
    }
}

/// A registered region. While it lives the device may access the memory.
pub struct Mr {
    mr: NonNull<ibv_mr>,
    pd: Arc<Pd>,
}

// SAFETY: the keys are constants; deregistration happens once, by the owner.
unsafe impl Send for Mr {}
// SAFETY: as above.
unsafe impl Sync for Mr {}

impl Mr {
    /// Registers memory of this process. It need not be mapped or of this process' making: the kernel checks it.
    pub fn register(pd: &Arc<Pd>, addr: u64, len_bytes: u64, access: Access) -> Result<Mr, VerbsError> {
        let api = pd.context.api();
        let flags = access.required();
        let start = addr as *mut std::ffi::c_void;
        let mr = match (access.relaxed_ordering, api.reg_mr_iova2) {
            (true, Some(reg_mr_iova2)) => {
                let flags = flags | ibv_access_flags::IBV_ACCESS_RELAXED_ORDERING.0;
                // SAFETY: the kernel checks the range and pins what it finds; an invalid one is an error.
                unsafe { reg_mr_iova2(pd.as_ptr(), start, len_bytes as usize, addr, flags) }
            }
            // SAFETY: as above.
            _ => unsafe { (api.reg_mr)(pd.as_ptr(), start, len_bytes as usize, flags as i32) },
        };
        let mr = NonNull::new(mr).ok_or_else(|| VerbsError::last("ibv_reg_mr"))?;
        Ok(Mr { mr, pd: Arc::clone(pd) })
    }

    /// Registers a part of a dma-buf, addressed in work requests from `iova` on.
    pub fn register_dmabuf(
        pd: &Arc<Pd>,
        dmabuf: BorrowedFd<'_>,
        offset: u64,
        len_bytes: u64,
        iova: u64,
        access: Access,
    ) -> Result<Mr, VerbsError> {
        const CALL: &str = "ibv_reg_dmabuf_mr";
        let reg_dmabuf_mr =
            pd.context.api().reg_dmabuf_mr.ok_or(VerbsError { call: CALL, errno: libc::EOPNOTSUPP })?;
        let flags = access.required() as i32;
        // SAFETY: the descriptor is open; the kernel checks the range against the buffer.
        let mr = unsafe {
            reg_dmabuf_mr(pd.as_ptr(), offset, len_bytes as usize, iova, dmabuf.as_raw_fd(), flags)
        };
        let mr = NonNull::new(mr).ok_or_else(|| VerbsError::last(CALL))?;
        Ok(Mr { mr, pd: Arc::clone(pd) })
    }

    /// Key for own work requests.
    pub fn lkey(&self) -> u32 {
        // SAFETY: the region is registered.
        unsafe { (*self.mr.as_ptr()).lkey }
    }

    /// Key for peers' work requests.
    pub fn rkey(&self) -> u32 {
        // SAFETY: the region is registered.
        unsafe { (*self.mr.as_ptr()).rkey }
    }

    /// Withdraws it; afterwards the device does not touch the memory any more. On an error it stays registered.
    pub fn deregister(self) -> Result<(), (Mr, VerbsError)> {
        match self.dereg() {
            Ok(()) => {
                let mut this = std::mem::ManuallyDrop::new(self);
                // SAFETY: the value is not used or dropped again; only its share of the domain is left to give back.
                unsafe { std::ptr::drop_in_place(&mut this.pd) };
                Ok(())
            }
            Err(e) => Err((self, e)),
        }
    }

    fn dereg(&self) -> Result<(), VerbsError> {
        // SAFETY: registered, and by ownership this happens once (an error leaves it registered).
        let answer = unsafe { (self.pd.context.api().dereg_mr)(self.mr.as_ptr()) };
        VerbsError::check("ibv_dereg_mr", answer)
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        if let Err(e) = self.dereg() {
            tracing::error!("{}: a memory region stays registered: {e}", self.pd.context.info().name);
        }
    }
}

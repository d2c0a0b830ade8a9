//! Completion channels, completion queues and what they hold.

use crate::device::{Context, set_nonblocking};
use crate::error::VerbsError;
use rdma_sys::{ibv_comp_channel, ibv_cq, ibv_wc, ibv_wc_flags, ibv_wc_opcode, ibv_wc_status};
use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Where completion queues announce that they have something.
pub struct Channel {
    channel: NonNull<ibv_comp_channel>,
    context: Arc<Context>,
}

// SAFETY: reading events is a system call on a descriptor; libibverbs keeps no thread-bound state.
unsafe impl Send for Channel {}
// SAFETY: as above.
unsafe impl Sync for Channel {}

impl Channel {
    /// Creates one whose descriptor never blocks.
    pub fn new(context: &Arc<Context>) -> Result<Arc<Channel>, VerbsError> {
        // SAFETY: the context is open.
        let channel = unsafe { (context.api().create_comp_channel)(context.as_ptr()) };
        let channel = NonNull::new(channel).ok_or_else(|| VerbsError::last("ibv_create_comp_channel"))?;
        let channel = Channel { channel, context: Arc::clone(context) };
        set_nonblocking(channel.fd().as_raw_fd())?;
        Ok(Arc::new(channel))
    }

    /// Becomes readable when an armed queue got a completion.
    pub fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is the channel's and open as long as it.
        unsafe { BorrowedFd::borrow_raw((*self.channel.as_ptr()).fd) }
    }

    /// Takes the next event and acknowledges it: the token of the queue it is from. `None` when there is no more.
    pub fn next_event(&self) -> Result<Option<u64>, VerbsError> {
        let mut cq = std::ptr::null_mut::<ibv_cq>();
        let mut token = std::ptr::null_mut::<c_void>();
        let api = self.context.api();
        // SAFETY: room for both answers.
        if unsafe { (api.get_cq_event)(self.channel.as_ptr(), &mut cq, &mut token) } != 0 {
            let error = VerbsError::last("ibv_get_cq_event");
            return if error.errno == libc::EAGAIN { Ok(None) } else { Err(error) };
        }
        // SAFETY: destroying a queue waits until its events are acknowledged, so it is alive.
        unsafe { (api.ack_cq_events)(cq, 1) };
        Ok(Some(token as u64))
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: queues on the channel hold it, so there are none.
        let answer = unsafe { (self.context.api().destroy_comp_channel)(self.channel.as_ptr()) };
        if let Err(e) = VerbsError::check("ibv_destroy_comp_channel", answer) {
            tracing::error!("{}: a completion channel stays: {e}", self.context.info().name);
        }
    }
}

/// A completion queue.
pub struct Cq {
    cq: NonNull<ibv_cq>,
    channel: Arc<Channel>,
    entries: AtomicU32,
}

// SAFETY: providers lock their queues; the pointer is constant.
unsafe impl Send for Cq {}
// SAFETY: as above.
unsafe impl Sync for Cq {}

impl Cq {
    /// Creates one with room for at least `entries` completions; events carry `token`.
    pub fn new(channel: &Arc<Channel>, entries: u32, token: u64) -> Result<Arc<Cq>, VerbsError> {
        let context = &channel.context;
        let wanted = i32::try_from(entries).unwrap_or(i32::MAX);
        // SAFETY: context and channel are alive and held; the token is never dereferenced.
        let cq = unsafe {
            (context.api().create_cq)(
                context.as_ptr(),
                wanted,
                token as *mut c_void,
                channel.channel.as_ptr(),
                0,
            )
        };
        let cq = NonNull::new(cq).ok_or_else(|| VerbsError::last("ibv_create_cq"))?;
        // SAFETY: just created.
        let entries = unsafe { (*cq.as_ptr()).cqe };
        Ok(Arc::new(Cq { cq, channel: Arc::clone(channel), entries: AtomicU32::new(entries.max(0) as u32) }))
    }

    pub(crate) fn as_ptr(&self) -> *mut ibv_cq {
        self.cq.as_ptr()
    }

    /// Room for completions, as the device made it.
    pub fn entries(&self) -> u32 {
        self.entries.load(Ordering::Relaxed)
    }

    /// Takes completions; never blocks.
    ///
    /// # Errors
    /// The queue overran or its device is gone; this is no progress, and it stays so.
    pub fn poll<'a>(&self, buffer: &'a mut WcBuffer, most: usize) -> Result<&'a [Wc], VerbsError> {
        let most = most.min(buffer.entries.len());
        // SAFETY: the queue is alive; the buffer has room for `most` entries. The function is the provider's own, from the context's table.
        let n = unsafe {
            rdma_sys::ibv_poll_cq(self.as_ptr(), most as i32, buffer.entries.as_mut_ptr().cast::<ibv_wc>())
        };
        if n < 0 {
            let errno = if n == -1 { libc::EIO } else { -n };
            return Err(VerbsError { call: "ibv_poll_cq", errno });
        }
        // SAFETY: the provider wrote `n` entries, `n` at most what it was allowed; `Wc` has the layout of the C structure.
        Ok(unsafe {
            std::slice::from_raw_parts(buffer.entries.as_ptr().cast::<Wc>(), (n as usize).min(most))
        })
    }

    /// Asks for one event at the next completion. Completions that are there already may make none: poll once more afterwards.
    pub fn arm(&self) -> Result<(), VerbsError> {
        // SAFETY: the queue is alive; the function is the provider's own.
        VerbsError::check("ibv_req_notify_cq", unsafe { rdma_sys::ibv_req_notify_cq(self.as_ptr(), 0) })
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        let context = &self.channel.context;
        // SAFETY: queue pairs on it hold it, so there are none; taken events were acknowledged at once.
        let answer = unsafe { (context.api().destroy_cq)(self.as_ptr()) };
        if let Err(e) = VerbsError::check("ibv_destroy_cq", answer) {
            tracing::error!("{}: a completion queue stays: {e}", context.info().name);
        }
    }
}

/// Room for completions, used again and again.
pub struct WcBuffer {
    entries: Box<[MaybeUninit<ibv_wc>]>,
}

// SAFETY: plain memory.
unsafe impl Send for WcBuffer {}

impl WcBuffer {
    /// Room for `entries`.
    pub fn new(entries: usize) -> WcBuffer {
        WcBuffer { entries: (0..entries.max(1)).map(|_| MaybeUninit::uninit()).collect() }
    }
}

/// How a work request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Well.
    Success,
    /// Not executed: the queue pair is in error.
    Flushed,
    /// An SGE lies outside its region or has a wrong key; `LOC_PROT_ERR`.
    LocalProtection,
    /// The queue pair does not permit it; some devices report bad keys or a downed link so; `LOC_QP_OP_ERR`.
    LocalQpOperation,
    /// Message and buffers do not fit; `LOC_LEN_ERR`.
    LocalLength,
    /// The peer refuses key, bounds or permission; `REM_ACCESS_ERR`.
    RemoteAccess,
    /// The peer cannot take the message, such as one longer than its RECV; `REM_INV_REQ_ERR`.
    RemoteInvalidRequest,
    /// The peer failed at executing it; `REM_OP_ERR`.
    RemoteOperation,
    /// No answer after all retries.
    RetryExceeded,
    /// The peer had no RECV, after all retries.
    RnrRetryExceeded,
    /// Anything else, by the specification's number.
    Other(u32),
}

/// What a completion that succeeded is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WcOpcode {
    /// A SEND arrived in a RECV.
    Recv,
    /// A WRITE with immediate consumed a RECV.
    RecvWriteWithImm,
    /// An own work request.
    Send,
}

/// A completion.
#[repr(transparent)]
pub struct Wc(ibv_wc);

impl Wc {
    /// The work request's own number.
    pub fn wr_id(&self) -> u64 {
        self.0.wr_id
    }

    /// How it ended.
    pub fn status(&self) -> Status {
        match self.0.status {
            ibv_wc_status::IBV_WC_SUCCESS => Status::Success,
            ibv_wc_status::IBV_WC_WR_FLUSH_ERR => Status::Flushed,
            ibv_wc_status::IBV_WC_LOC_PROT_ERR => Status::LocalProtection,
            ibv_wc_status::IBV_WC_LOC_QP_OP_ERR => Status::LocalQpOperation,
            ibv_wc_status::IBV_WC_LOC_LEN_ERR => Status::LocalLength,
            ibv_wc_status::IBV_WC_REM_ACCESS_ERR => Status::RemoteAccess,
            ibv_wc_status::IBV_WC_REM_INV_REQ_ERR => Status::RemoteInvalidRequest,
            ibv_wc_status::IBV_WC_REM_OP_ERR => Status::RemoteOperation,
            ibv_wc_status::IBV_WC_RETRY_EXC_ERR => Status::RetryExceeded,
            ibv_wc_status::IBV_WC_RNR_RETRY_EXC_ERR => Status::RnrRetryExceeded,
            other => Status::Other(other),
        }
    }

    /// The device maker's own error number.
    pub fn vendor_err(&self) -> u32 {
        self.0.vendor_err
    }

    /// What it is of. Only a success says so.
    pub fn opcode(&self) -> WcOpcode {
        match self.0.opcode {
            ibv_wc_opcode::IBV_WC_RECV => WcOpcode::Recv,
            ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM => WcOpcode::RecvWriteWithImm,
            _ => WcOpcode::Send,
        }
    }

    /// Bytes received.
    pub fn byte_len(&self) -> u32 {
        self.0.byte_len
    }

    /// The immediate, in host order, where there is one.
    pub fn imm(&self) -> Option<u32> {
        let has = self.0.wc_flags & ibv_wc_flags::IBV_WC_WITH_IMM.0 != 0;
        // SAFETY: both fields of the union are 32-bit integers.
        has.then(|| u32::from_be(unsafe { self.0.imm_data_invalidated_rkey_union.imm_data }))
    }
}

//! The objects of libibverbs as the program holds them, each with what leads back to the fake behind it.

use super::model::{Id, State};
use rdma_sys::{ibv_comp_channel, ibv_context, ibv_cq, ibv_device, ibv_mr, ibv_pd, ibv_qp, verbs_context};
use std::mem::{MaybeUninit, offset_of};
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

/// A fake, shared by its handle, its worker and every open context.
pub(super) struct Shared {
    state: Mutex<State>,
    /// Program threads that want the state; the worker gives way to them.
    waiting: AtomicU32,
    /// Something changed that may give the worker something to do.
    pub work: Condvar,
    /// An event was acknowledged.
    pub acknowledged: Condvar,
}

impl Shared {
    pub fn new(state: State) -> Shared {
        Shared {
            state: Mutex::new(state),
            waiting: AtomicU32::new(0),
            work: Condvar::new(),
            acknowledged: Condvar::new(),
        }
    }

    /// For looking.
    pub fn look(&self) -> MutexGuard<'_, State> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let state = self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        state
    }

    /// For changing something; wakes the worker in the end.
    pub fn change(&self) -> Change<'_> {
        Change { state: self.look(), work: &self.work }
    }

    /// For the worker, which comes last.
    pub fn when_free(&self) -> MutexGuard<'_, State> {
        for _ in 0..4 {
            if self.waiting.load(Ordering::Relaxed) == 0 {
                break;
            }
            std::thread::yield_now();
        }
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// The state, locked for a change.
pub(super) struct Change<'a> {
    state: MutexGuard<'a, State>,
    work: &'a Condvar,
}

impl Deref for Change<'_> {
    type Target = State;
    fn deref(&self) -> &State {
        &self.state
    }
}

impl DerefMut for Change<'_> {
    fn deref_mut(&mut self) -> &mut State {
        &mut self.state
    }
}

impl Drop for Change<'_> {
    fn drop(&mut self) {
        self.work.notify_all();
    }
}

#[repr(C)]
pub(super) struct DeviceObject {
    pub ibv: ibv_device,
    pub shared: Arc<Shared>,
    pub index: usize,
}

#[repr(C)]
pub(super) struct ContextObject {
    pub verbs: verbs_context,
    pub device: Arc<DeviceObject>,
    pub id: Id,
}

#[repr(C)]
pub(super) struct ChannelObject {
    pub ibv: ibv_comp_channel,
    pub id: Id,
}

#[repr(C)]
pub(super) struct PdObject {
    pub ibv: ibv_pd,
    pub id: Id,
}

#[repr(C)]
pub(super) struct MrObject {
    pub ibv: ibv_mr,
    pub id: Id,
}

#[repr(C)]
pub(super) struct CqObject {
    pub ibv: ibv_cq,
    pub id: Id,
}

#[repr(C)]
pub(super) struct QpObject {
    pub ibv: ibv_qp,
    pub id: Id,
}

/// A C structure of which all bytes are zero.
pub(super) fn zeroed<T: CStruct>() -> T {
    // SAFETY: `CStruct` is implemented for structures of integers, nullable pointers and functions only.
    unsafe { MaybeUninit::<T>::zeroed().assume_init() }
}

/// Structures for which all zero bytes are valid.
pub(super) trait CStruct {}
impl CStruct for verbs_context {}
impl CStruct for ibv_device {}
impl CStruct for ibv_comp_channel {}
impl CStruct for ibv_pd {}
impl CStruct for ibv_mr {}
impl CStruct for ibv_cq {}
impl CStruct for ibv_qp {}

/// The fake's object around a context of the program.
///
/// # Safety
/// The context must be a fake's and open.
pub(super) unsafe fn context_of<'a>(context: *mut ibv_context) -> &'a ContextObject {
    // SAFETY: the program got the pointer to this field of the object; the caller says that it is open.
    unsafe { &*context.byte_sub(offset_of!(verbs_context, context)).cast::<ContextObject>() }
}

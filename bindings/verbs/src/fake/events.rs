//! Exported functions around completion queues and what is told by descriptors.

use super::model::{About, Errno, Id};
use super::objects::*;
use rdma_sys::*;
use std::ffi::{c_int, c_uint, c_void};
use std::time::Duration;

/// libibverbs waits without end until events are acknowledged; a test should not.
const ACKNOWLEDGE_WITHIN: Duration = Duration::from_secs(20);

pub(super) unsafe extern "C" fn create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel {
    // SAFETY: an open context, by the caller's promise.
    let object = unsafe { context_of(context) };
    match object.device.shared.change().create_channel(object.device.index) {
        Ok((id, fd)) => {
            let ibv = ibv_comp_channel { context, fd, ..zeroed() };
            Box::into_raw(Box::new(ChannelObject { ibv, id })).cast()
        }
        Err(errno) => refuse(errno),
    }
}

fn refuse<T>(errno: Errno) -> *mut T {
    // SAFETY: the calling thread's own variable.
    unsafe { *libc::__errno_location() = errno };
    std::ptr::null_mut()
}

pub(super) unsafe extern "C" fn destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    // SAFETY: a channel that is alive, by the caller's promise.
    let (id, context) = unsafe { ((*channel.cast::<ChannelObject>()).id, context_of((*channel).context)) };
    if let Err(errno) = context.device.shared.change().destroy_channel(id) {
        return errno;
    }
    // SAFETY: it was boxed by create_comp_channel.
    drop(unsafe { Box::from_raw(channel.cast::<ChannelObject>()) });
    0
}

pub(super) unsafe extern "C" fn create_cq(
    context: *mut ibv_context,
    entries: c_int,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    vector: c_int,
) -> *mut ibv_cq {
    // SAFETY: an open context, by the caller's promise.
    let object = unsafe { context_of(context) };
    if vector != 0 {
        return refuse(libc::EINVAL);
    }
    // SAFETY: a channel that is alive or none, by the caller's promise.
    let on = (!channel.is_null()).then(|| unsafe { (*channel.cast::<ChannelObject>()).id });
    let mut made = Box::new(CqObject { ibv: zeroed(), id: 0 });
    let ptr = &raw mut *made as usize;
    match object.device.shared.change().create_cq(object.id, entries, on, ptr) {
        Ok(id) => {
            made.id = id;
            made.ibv.context = context;
            made.ibv.channel = channel;
            made.ibv.cq_context = cq_context;
            made.ibv.cqe = entries;
            Box::into_raw(made).cast()
        }
        Err(errno) => refuse(errno),
    }
}

pub(super) unsafe extern "C" fn destroy_cq(cq: *mut ibv_cq) -> c_int {
    // SAFETY: a completion queue that is alive, by the caller's promise.
    let (id, context) = unsafe { ((*cq.cast::<CqObject>()).id, context_of((*cq).context)) };
    let shared = &context.device.shared;
    let mut state = shared.look();
    if let Err(errno) = state.destroy_cq(id) {
        return errno;
    }
    state.forget_events(About::Cq(id));
    drop(state);
    // SAFETY: the object lives until its events are acknowledged.
    await_acknowledged(shared, cq as usize, || unsafe {
        (*cq).comp_events_completed + (*cq).async_events_completed
    });
    // SAFETY: it was boxed by create_cq, and nobody has an event of it.
    drop(unsafe { Box::from_raw(cq.cast::<CqObject>()) });
    0
}

pub(super) unsafe extern "C" fn destroy_qp(qp: *mut ibv_qp) -> c_int {
    // SAFETY: a queue pair that is alive, by the caller's promise.
    let (id, context) = unsafe { ((*qp.cast::<QpObject>()).id, context_of((*qp).context)) };
    let shared = &context.device.shared;
    let mut state = shared.change();
    if let Err(errno) = state.destroy_qp(id) {
        return errno;
    }
    state.forget_events(About::Qp(id));
    drop(state);
    // SAFETY: the object lives until its events are acknowledged.
    await_acknowledged(shared, qp as usize, || unsafe { (*qp).events_completed });
    // SAFETY: it was boxed by create_qp, and nobody has an event of it.
    drop(unsafe { Box::from_raw(qp.cast::<QpObject>()) });
    0
}

/// Waits until as many events of an object were acknowledged as were taken; `acknowledged` is counted under the lock.
fn await_acknowledged(shared: &Shared, object: usize, acknowledged: impl Fn() -> u32) {
    let state = shared.look();
    let taken = |state: &super::model::State| state.taken_events.get(&object).copied().unwrap_or(0);
    let (mut state, ended) = shared
        .acknowledged
        .wait_timeout_while(state, ACKNOWLEDGE_WITHIN, |state| taken(state) != acknowledged())
        .unwrap_or_else(|poisoned| poisoned.into_inner());
    state.taken_events.remove(&object);
    if ended.timed_out() {
        panic!(
            "destroying an object waits for {ACKNOWLEDGE_WITHIN:?}: an event of it was never acknowledged"
        );
    }
}

/// Takes one count from a descriptor, waiting if it is one that waits.
fn take_signal(fd: c_int) -> Result<(), ()> {
    let mut count = 0u64;
    // SAFETY: room for the word that an eventfd answers with.
    let n = unsafe { libc::read(fd, (&raw mut count).cast(), size_of::<u64>()) };
    if n == size_of::<u64>() as isize { Ok(()) } else { Err(()) }
}

pub(super) unsafe extern "C" fn get_cq_event(
    channel: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    cq_context: *mut *mut c_void,
) -> c_int {
    // SAFETY: a channel that is alive, by the caller's promise.
    let (id, context, fd) =
        unsafe { ((*channel.cast::<ChannelObject>()).id, context_of((*channel).context), (*channel).fd) };
    while take_signal(fd).is_ok() {
        let mut state = context.device.shared.look();
        let next = state.channels.get_mut(&id).and_then(|channel| channel.events.pop_front());
        // An event whose queue is gone leaves its count behind.
        let Some(ptr) = next.and_then(|id: Id| state.cqs.get(&id).map(|cq| cq.ptr)) else { continue };
        *state.taken_events.entry(ptr).or_default() += 1;
        // SAFETY: the queue is alive, and there is room for both answers by the caller's promise.
        unsafe {
            *cq = ptr as *mut ibv_cq;
            *cq_context = (**cq).cq_context;
        }
        return 0;
    }
    -1
}

pub(super) unsafe extern "C" fn ack_cq_events(cq: *mut ibv_cq, n: c_uint) {
    // SAFETY: a queue of which an event was taken, so it is alive.
    let shared = unsafe { &context_of((*cq).context).device.shared };
    let state = shared.look();
    // SAFETY: as above; the count changes under the lock only.
    unsafe { (*cq).comp_events_completed += n };
    shared.acknowledged.notify_all();
    drop(state);
}

pub(super) unsafe extern "C" fn get_async_event(
    context: *mut ibv_context,
    to: *mut ibv_async_event,
) -> c_int {
    // SAFETY: an open context, by the caller's promise.
    let object = unsafe { context_of(context) };
    while take_signal(object.verbs.context.async_fd).is_ok() {
        let mut state = object.device.shared.look();
        let next = state.contexts.get_mut(&object.id).and_then(|context| context.events.pop_front());
        let Some(event) = next else { continue };
        let element = match event.about {
            About::Device => ibv_async_event_element_t { port_num: 0 },
            About::Port(port) => ibv_async_event_element_t { port_num: port.into() },
            About::Qp(id) => {
                let Some(ptr) = state.qps.get(&id).map(|qp| qp.ptr) else { continue };
                *state.taken_events.entry(ptr).or_default() += 1;
                ibv_async_event_element_t { qp: ptr as *mut ibv_qp }
            }
            About::Cq(id) => {
                let Some(ptr) = state.cqs.get(&id).map(|cq| cq.ptr) else { continue };
                *state.taken_events.entry(ptr).or_default() += 1;
                ibv_async_event_element_t { cq: ptr as *mut ibv_cq }
            }
        };
        // SAFETY: room for the answer, by the caller's promise.
        unsafe { to.write(ibv_async_event { element, event_type: event.kind }) };
        return 0;
    }
    -1
}

pub(super) unsafe extern "C" fn ack_async_event(event: *mut ibv_async_event) {
    use ibv_event_type::*;
    // SAFETY: an event that was taken: what it is about is alive until it is acknowledged, and its type says which field is set.
    unsafe {
        let element = &(*event).element;
        let shared = match (*event).event_type {
            IBV_EVENT_CQ_ERR => &context_of((*element.cq).context).device.shared,
            IBV_EVENT_QP_FATAL | IBV_EVENT_QP_REQ_ERR | IBV_EVENT_QP_ACCESS_ERR => {
                &context_of((*element.qp).context).device.shared
            }
            _ => return,
        };
        let state = shared.look();
        if (*event).event_type == IBV_EVENT_CQ_ERR {
            (*element.cq).async_events_completed += 1;
        } else {
            (*element.qp).events_completed += 1;
        }
        shared.acknowledged.notify_all();
        drop(state);
    }
}

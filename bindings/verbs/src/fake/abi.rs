//! The functions that libibverbs exports, as a fake has them.

use super::create::{NewQp, Registration};
use super::model::{Caps, Ctx, Errno, Id, Signal};
use super::objects::*;
use super::post;
use rdma_sys::*;
use std::collections::VecDeque;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::mem::offset_of;
use std::sync::Arc;

/// The mark of a context that is inside a `verbs_context`.
const EXTENDED: usize = usize::MAX;

fn set_errno(errno: Errno) {
    // SAFETY: the calling thread's own variable.
    unsafe { *libc::__errno_location() = errno };
}

/// Null with errno set.
pub(super) fn refuse<T>(errno: Errno) -> *mut T {
    set_errno(errno);
    std::ptr::null_mut()
}

/// Null with errno set, or the object.
fn hand_out<T>(object: Result<Box<T>, Errno>) -> *mut T {
    object.map_or_else(
        |errno| {
            set_errno(errno);
            std::ptr::null_mut()
        },
        Box::into_raw,
    )
}

fn answer(result: Result<(), Errno>) -> c_int {
    result.err().unwrap_or(0)
}

pub(super) unsafe extern "C" fn is_fork_initialized() -> c_uint {
    rdma_sys::IBV_FORK_UNNEEDED
}

pub(super) unsafe extern "C" fn fork_init() -> c_int {
    0
}

pub(super) unsafe extern "C" fn free_device_list(list: *mut *mut ibv_device) {
    let mut at = list;
    let mut count = 1;
    // SAFETY: the list came from get_device_list: pointers to counted objects, then a null, in one boxed slice.
    unsafe {
        while !(*at).is_null() {
            drop(Arc::from_raw((*at).cast::<DeviceObject>()));
            at = at.add(1);
            count += 1;
        }
        drop(Box::from_raw(std::ptr::slice_from_raw_parts_mut(list, count)));
    }
}

pub(super) unsafe extern "C" fn get_device_name(device: *mut ibv_device) -> *const c_char {
    // SAFETY: a device of a list that the program holds, or of an open context.
    unsafe { (*device).name.as_ptr() }
}

pub(super) unsafe extern "C" fn open_device(device: *mut ibv_device) -> *mut ibv_context {
    let object = device.cast::<DeviceObject>();
    // SAFETY: a device of a list that the program holds; the context shares it.
    let object = unsafe {
        Arc::increment_strong_count(object);
        Arc::from_raw(object)
    };
    let shared = Arc::clone(&object.shared);
    let mut state = shared.change();
    let opened = state.alive(object.index).and_then(|()| Signal::new());
    let signal = match opened {
        Ok(signal) => signal,
        Err(errno) => {
            set_errno(errno);
            return std::ptr::null_mut();
        }
    };
    let id = state.fresh_id();
    let mut verbs = zeroed::<verbs_context>();
    verbs.context.device = device;
    verbs.context.ops.post_send = Some(post::post_send);
    verbs.context.ops.post_recv = Some(post::post_recv);
    verbs.context.ops.poll_cq = Some(post::poll_cq);
    verbs.context.ops.req_notify_cq = Some(post::req_notify_cq);
    verbs.context.async_fd = signal.fd();
    verbs.context.cmd_fd = -1;
    verbs.context.num_comp_vectors = 1;
    if state.config.extended_context {
        verbs.context.abi_compat = EXTENDED as *mut c_void;
        verbs.sz = size_of::<verbs_context>();
        verbs.query_port = Some(query_port_extended);
    } else {
        // Whoever looks around an old context finds something that must not be called.
        verbs.sz = usize::MAX;
        verbs.query_port = Some(trap);
    }
    let index = object.index;
    state.contexts.insert(id, Ctx { device: index, events: VecDeque::new(), signal });
    drop(state);
    let context = Box::into_raw(Box::new(ContextObject { verbs, device: object, id }));
    // SAFETY: just made.
    unsafe { &raw mut (*context).verbs.context }
}

unsafe extern "C" fn trap(_: *mut ibv_context, _: u8, _: *mut ibv_port_attr, _: usize) -> c_int {
    panic!("a context that is not extended was taken for one that is")
}

pub(super) unsafe extern "C" fn close_device(context: *mut ibv_context) -> c_int {
    // SAFETY: an open context; it is the object's own from here on.
    let object = unsafe {
        Box::from_raw(context.byte_sub(offset_of!(verbs_context, context)).cast::<ContextObject>())
    };
    let mut state = object.device.shared.change();
    state.contexts.remove(&object.id);
    let index = object.device.index;
    if !state.contexts.values().any(|context| context.device == index) {
        let live = state.live(index);
        if live != Default::default() {
            let name = state.devices[index].config.name.clone();
            state.violation(format!("{name}: its last context was closed with objects alive: {live:?}"));
        }
    }
    0
}

pub(super) unsafe extern "C" fn query_device(context: *mut ibv_context, to: *mut ibv_device_attr) -> c_int {
    // SAFETY: an open context and room for the answer, by the caller's promise; all zero bytes are valid.
    let (context, to) = unsafe {
        to.write_bytes(0, 1);
        (context_of(context), &mut *to)
    };
    let state = context.device.shared.look();
    let config = &state.devices[context.device.index].config;
    to.max_mr_size = config.max_mr_bytes;
    to.page_size_cap = 4096;
    to.max_qp = config.max_qp as c_int;
    to.max_qp_wr = config.max_qp_wr as c_int;
    to.max_sge = config.max_sge as c_int;
    to.max_sge_rd = config.max_sge as c_int;
    to.max_cq = 65536;
    to.max_cqe = config.max_cqe as c_int;
    to.max_mr = config.max_mr as c_int;
    to.max_pd = 65536;
    to.max_qp_rd_atom = config.max_qp_rd_atom.into();
    to.max_qp_init_rd_atom = config.max_qp_init_rd_atom.into();
    to.max_pkeys = 128;
    to.phys_port_cnt = config.ports.len() as u8;
    to.vendor_id = config.vendor_id;
    answer(state.alive(context.device.index))
}

pub(super) unsafe extern "C" fn lacks_immediate(context: *mut ibv_context) -> c_int {
    // SAFETY: an open context, by the caller's promise.
    let context = unsafe { context_of(context) };
    (!context.device.shared.look().devices[context.device.index].config.immediate).into()
}

unsafe extern "C" fn query_port_extended(
    context: *mut ibv_context,
    port: u8,
    to: *mut ibv_port_attr,
    len: usize,
) -> c_int {
    // SAFETY: an open context, by the caller's promise.
    let context = unsafe { context_of(context) };
    let state = context.device.shared.look();
    let Some(config) = state.port_of(context.device.index, port) else { return libc::EINVAL };
    // SAFETY: a structure of integers.
    let mut attr: ibv_port_attr = unsafe { std::mem::zeroed() };
    attr.state = if config.up { ibv_port_state::IBV_PORT_ACTIVE } else { ibv_port_state::IBV_PORT_DOWN };
    attr.max_mtu = ibv_mtu::IBV_MTU_4096;
    attr.active_mtu = config.mtu_bytes.max(256).ilog2() - 7;
    attr.gid_tbl_len = config.gids.len() as c_int;
    attr.max_msg_sz = config.max_msg_bytes;
    attr.pkey_tbl_len = config.pkeys.len() as u16;
    attr.lid = config.lid;
    (attr.active_width, attr.active_speed) = (2, 32);
    attr.phys_state = if config.up { 5 } else { 3 };
    attr.link_layer = match config.link_layer {
        crate::device::LinkLayer::InfiniBand => 1,
        crate::device::LinkLayer::Ethernet => 2,
    };
    attr.port_cap_flags2 = 0xffff;
    let len = len.min(size_of::<ibv_port_attr>());
    // SAFETY: the caller says how much room there is.
    unsafe { std::ptr::copy_nonoverlapping((&raw const attr).cast::<u8>(), to.cast::<u8>(), len) };
    answer(state.alive(context.device.index))
}

/// The exported symbol knows the structure without its newest fields.
pub(super) unsafe extern "C" fn query_port(
    context: *mut ibv_context,
    port: u8,
    to: *mut _compat_ibv_port_attr,
) -> c_int {
    // SAFETY: the caller's promise, for the old length.
    unsafe { query_port_extended(context, port, to.cast(), offset_of!(ibv_port_attr, port_cap_flags2)) }
}

pub(super) unsafe extern "C" fn query_gid(
    context: *mut ibv_context,
    port: u8,
    index: c_int,
    to: *mut ibv_gid,
) -> c_int {
    // SAFETY: an open context, by the caller's promise.
    let context = unsafe { context_of(context) };
    let state = context.device.shared.look();
    let table = state.port_of(context.device.index, port).map(|port| &port.gids);
    let Some(entry) = table.and_then(|table| table.get(usize::try_from(index).ok()?)) else {
        set_errno(libc::EINVAL);
        return -1;
    };
    // SAFETY: room for the answer, by the caller's promise.
    unsafe { (*to).raw = entry.map_or([0; 16], |entry| entry.gid) };
    0
}

pub(super) unsafe extern "C" fn query_gid_ex(
    context: *mut ibv_context,
    port: u32,
    index: u32,
    to: *mut ibv_gid_entry,
    flags: u32,
    len: usize,
) -> c_int {
    // SAFETY: an open context, by the caller's promise.
    let context = unsafe { context_of(context) };
    let state = context.device.shared.look();
    let port = u8::try_from(port).ok().and_then(|port| state.port_of(context.device.index, port));
    let Some(entry) = port.and_then(|port| port.gids.get(index as usize)) else { return libc::EINVAL };
    if flags != 0 || len < size_of::<ibv_gid_entry>() {
        return libc::EOPNOTSUPP;
    }
    let Some(entry) = entry else { return libc::ENODATA };
    // SAFETY: room for the answer, by the caller's promise.
    let to = unsafe { &mut *to };
    to.gid.raw = entry.gid;
    (to.gid_index, to.port_num, to.ndev_ifindex) = (index, 1, entry.ndev_ifindex);
    to.gid_type = match entry.kind {
        crate::device::GidType::Ib => IBV_GID_TYPE_IB,
        crate::device::GidType::RoceV1 => IBV_GID_TYPE_ROCE_V1,
        crate::device::GidType::RoceV2 => IBV_GID_TYPE_ROCE_V2,
    };
    0
}

pub(super) unsafe extern "C" fn query_pkey(
    context: *mut ibv_context,
    port: u8,
    index: c_int,
    to: *mut u16,
) -> c_int {
    // SAFETY: an open context, by the caller's promise.
    let context = unsafe { context_of(context) };
    let state = context.device.shared.look();
    let table = state.port_of(context.device.index, port).map(|port| &port.pkeys);
    let Some(key) = table.and_then(|table| table.get(usize::try_from(index).ok()?)) else {
        set_errno(libc::EINVAL);
        return -1;
    };
    // SAFETY: room for the answer, by the caller's promise.
    unsafe { *to = key.to_be() };
    0
}

pub(super) unsafe extern "C" fn alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    // SAFETY: an open context, by the caller's promise.
    let object = unsafe { context_of(context) };
    let id = object.device.shared.change().alloc_pd(object.id);
    hand_out(id.map(|id| {
        let ibv = ibv_pd { context, ..zeroed() };
        Box::new(PdObject { ibv, id })
    }))
    .cast()
}

pub(super) unsafe extern "C" fn dealloc_pd(pd: *mut ibv_pd) -> c_int {
    // SAFETY: a domain that is alive, by the caller's promise.
    let (id, context) = unsafe { ((*pd.cast::<PdObject>()).id, context_of((*pd).context)) };
    let result = context.device.shared.change().dealloc_pd(id);
    if result.is_ok() {
        // SAFETY: it was boxed by alloc_pd.
        drop(unsafe { Box::from_raw(pd.cast::<PdObject>()) });
    }
    answer(result)
}

/// Whether the domain's device takes dma-bufs.
///
/// # Safety
/// The domain must be alive.
pub(super) unsafe fn takes_dmabuf(pd: *mut ibv_pd) -> bool {
    // SAFETY: the caller's promise; a domain's context is open.
    let device = unsafe { &context_of((*pd).context).device };
    device.shared.look().devices[device.index].config.dmabuf
}

/// A region of memory at `base` that work requests name by `iova`.
///
/// # Safety
/// The domain must be alive.
pub(super) unsafe fn register(
    pd: *mut ibv_pd,
    base: u64,
    len: u64,
    iova: u64,
    access: u32,
    vram: bool,
) -> *mut ibv_mr {
    // SAFETY: the caller's promise.
    let (id, context) = unsafe { ((*pd.cast::<PdObject>()).id, (*pd).context) };
    // SAFETY: a domain's context is open.
    let shared = unsafe { &context_of(context).device.shared };
    let made = shared.change().register(Registration { pd: id, iova, len, base, access, vram });
    hand_out(made.map(|(id, key)| {
        let ibv = ibv_mr {
            context,
            pd,
            addr: iova as *mut c_void,
            length: len as usize,
            lkey: key,
            rkey: key,
            ..zeroed()
        };
        Box::new(MrObject { ibv, id })
    }))
    .cast()
}

pub(super) unsafe extern "C" fn reg_mr(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    len: usize,
    access: c_int,
) -> *mut ibv_mr {
    if access as u32 & ibv_access_flags::IBV_ACCESS_RELAXED_ORDERING.0 != 0 {
        // The old function hands optional flags to kernels that may not know them.
        set_errno(libc::EINVAL);
        return std::ptr::null_mut();
    }
    // SAFETY: the caller's promise.
    unsafe { register(pd, addr as u64, len as u64, addr as u64, access as u32, false) }
}

pub(super) unsafe extern "C" fn reg_mr_iova2(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    len: usize,
    iova: u64,
    access: c_uint,
) -> *mut ibv_mr {
    // SAFETY: the caller's promise.
    unsafe { register(pd, addr as u64, len as u64, iova, access, false) }
}

pub(super) unsafe extern "C" fn dereg_mr(mr: *mut ibv_mr) -> c_int {
    // SAFETY: a region that is alive, by the caller's promise.
    let (id, context) = unsafe { ((*mr.cast::<MrObject>()).id, context_of((*mr).context)) };
    let result = context.device.shared.change().deregister(id);
    if result.is_ok() {
        // SAFETY: it was boxed by register.
        drop(unsafe { Box::from_raw(mr.cast::<MrObject>()) });
    }
    answer(result)
}

pub(super) unsafe extern "C" fn create_qp(pd: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    // SAFETY: a domain that is alive and a filled structure, by the caller's promise.
    let (pd_id, context, init) =
        unsafe { ((*pd.cast::<PdObject>()).id, context_of((*pd).context), &mut *init) };
    if init.qp_type != ibv_qp_type::IBV_QPT_RC || !init.srq.is_null() {
        set_errno(libc::EOPNOTSUPP);
        return std::ptr::null_mut();
    }
    let id_of = |cq: *mut ibv_cq| -> Id {
        // SAFETY: completion queues that are alive, by the caller's promise.
        if cq.is_null() { 0 } else { unsafe { (*cq.cast::<CqObject>()).id } }
    };
    let mut object = Box::new(QpObject { ibv: zeroed(), id: 0 });
    let made = context.device.shared.change().create_qp(NewQp {
        pd: pd_id,
        ptr: &raw mut *object as usize,
        send_cq: id_of(init.send_cq),
        recv_cq: id_of(init.recv_cq),
        cap: Caps {
            send_wr: init.cap.max_send_wr,
            recv_wr: init.cap.max_recv_wr,
            send_sge: init.cap.max_send_sge,
            recv_sge: init.cap.max_recv_sge,
            inline: init.cap.max_inline_data,
        },
        signal_all: init.sq_sig_all != 0,
    });
    hand_out(made.map(|(id, qpn, cap)| {
        object.id = id;
        object.ibv.pd = pd;
        // SAFETY: alive, as above.
        object.ibv.context = unsafe { (*pd).context };
        (object.ibv.send_cq, object.ibv.recv_cq) = (init.send_cq, init.recv_cq);
        (object.ibv.qp_num, object.ibv.qp_type) = (qpn, init.qp_type);
        object.ibv.qp_context = init.qp_context;
        init.cap.max_send_wr = cap.send_wr;
        init.cap.max_recv_wr = cap.recv_wr;
        init.cap.max_inline_data = cap.inline;
        object
    }))
    .cast()
}

pub(super) unsafe extern "C" fn modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int {
    // SAFETY: a queue pair that is alive and a filled structure, by the caller's promise.
    let (id, context, attr) = unsafe { ((*qp.cast::<QpObject>()).id, context_of((*qp).context), &*attr) };
    let result = context.device.shared.change().modify_qp(id, attr, mask as u32);
    if result.is_ok() && mask as u32 & ibv_qp_attr_mask::IBV_QP_STATE.0 != 0 {
        // SAFETY: as above; only this function writes the field.
        unsafe { (*qp).state = attr.qp_state };
    }
    answer(result)
}

pub(super) unsafe extern "C" fn query_qp(
    qp: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    _mask: c_int,
    init: *mut ibv_qp_init_attr,
) -> c_int {
    // SAFETY: a queue pair that is alive and room for both answers, by the caller's promise; all zero bytes are valid.
    let (id, context, attr, init) = unsafe {
        attr.write_bytes(0, 1);
        init.write_bytes(0, 1);
        ((*qp.cast::<QpObject>()).id, context_of((*qp).context), &mut *attr, &mut *init)
    };
    let state = context.device.shared.look();
    let Some(model) = state.qps.get(&id) else { return libc::EINVAL };
    attr.qp_state = model.state;
    attr.cur_qp_state = model.state;
    attr.dest_qp_num = model.path.dest_qpn;
    attr.qp_access_flags = model.path.access;
    (attr.rq_psn, attr.sq_psn) = (model.path.rq_psn, model.path.sq_psn);
    attr.max_rd_atomic = model.path.initiator_reads;
    attr.max_dest_rd_atomic = model.path.responder_reads;
    (attr.timeout, attr.retry_cnt, attr.rnr_retry) =
        (model.path.timeout, model.path.retry_cnt, model.path.rnr_retry);
    attr.min_rnr_timer = model.path.min_rnr_timer;
    (attr.port_num, attr.pkey_index) = (model.path.port, model.path.pkey_index);
    init.cap = ibv_qp_cap {
        max_send_wr: model.cap.send_wr,
        max_recv_wr: model.cap.recv_wr,
        max_send_sge: model.cap.send_sge,
        max_recv_sge: model.cap.recv_sge,
        max_inline_data: model.cap.inline,
    };
    attr.cap = init.cap;
    init.qp_type = ibv_qp_type::IBV_QPT_RC;
    0
}

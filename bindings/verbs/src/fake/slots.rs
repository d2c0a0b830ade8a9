//! Listing devices has no argument that leads to a fake: every library of a fake gets a function of its own to list with.

use super::abi;
use super::events;
use super::objects::{DeviceObject, Shared, zeroed};
use crate::api::Api;
use rdma_sys::{ibv_device, ibv_node_type, ibv_transport_type};
use std::ffi::{c_char, c_int};
use std::sync::{Arc, Mutex, PoisonError};

/// Libraries of fakes that can be there at a time in one process.
const SLOTS: usize = 256;

struct Listed {
    shared: Arc<Shared>,
    devices: Vec<usize>,
}

static LISTED: [Mutex<Option<Listed>>; SLOTS] = [const { Mutex::new(None) }; SLOTS];

/// A place in the table; dropping it makes its library list nothing.
pub(super) struct Slot(usize);

impl Drop for Slot {
    fn drop(&mut self) {
        *LISTED[self.0].lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

type List = unsafe extern "C" fn(*mut c_int) -> *mut *mut ibv_device;

macro_rules! sixteen {
    ($($high:literal)*) => {
        [$(
            list::<{ $high * 16 }>, list::<{ $high * 16 + 1 }>, list::<{ $high * 16 + 2 }>, list::<{ $high * 16 + 3 }>,
            list::<{ $high * 16 + 4 }>, list::<{ $high * 16 + 5 }>, list::<{ $high * 16 + 6 }>, list::<{ $high * 16 + 7 }>,
            list::<{ $high * 16 + 8 }>, list::<{ $high * 16 + 9 }>, list::<{ $high * 16 + 10 }>, list::<{ $high * 16 + 11 }>,
            list::<{ $high * 16 + 12 }>, list::<{ $high * 16 + 13 }>, list::<{ $high * 16 + 14 }>, list::<{ $high * 16 + 15 }>,
        )*]
    };
}

static LISTS: [List; SLOTS] = sixteen!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);

/// A place for a library that lists these devices, and its functions.
pub(super) fn take(shared: Arc<Shared>, devices: Vec<usize>) -> (Slot, Api) {
    let mut listed = Some(Listed { shared: Arc::clone(&shared), devices });
    let free = LISTED.iter().position(|place| {
        let mut place = place.lock().unwrap_or_else(PoisonError::into_inner);
        if place.is_none() {
            *place = listed.take();
        }
        listed.is_none()
    });
    let slot =
        free.unwrap_or_else(|| panic!("more than {SLOTS} libraries of fakes at a time in one process"));
    (Slot(slot), table(LISTS[slot], shared.look().config.old_library))
}

fn table(get_device_list: List, old: bool) -> Api {
    Api {
        fork_init: abi::fork_init,
        get_device_list,
        free_device_list: abi::free_device_list,
        get_device_name: abi::get_device_name,
        open_device: abi::open_device,
        close_device: abi::close_device,
        query_device: abi::query_device,
        query_port: abi::query_port,
        query_gid: abi::query_gid,
        query_pkey: abi::query_pkey,
        get_async_event: events::get_async_event,
        ack_async_event: events::ack_async_event,
        alloc_pd: abi::alloc_pd,
        dealloc_pd: abi::dealloc_pd,
        reg_mr: abi::reg_mr,
        dereg_mr: abi::dereg_mr,
        create_comp_channel: events::create_comp_channel,
        destroy_comp_channel: events::destroy_comp_channel,
        create_cq: events::create_cq,
        destroy_cq: events::destroy_cq,
        get_cq_event: events::get_cq_event,
        ack_cq_events: events::ack_cq_events,
        create_qp: abi::create_qp,
        modify_qp: abi::modify_qp,
        query_qp: abi::query_qp,
        destroy_qp: events::destroy_qp,
        reg_mr_iova2: (!old).then_some(abi::reg_mr_iova2),
        query_gid_ex: (!old).then_some(abi::query_gid_ex),
        is_fork_initialized: (!old).then_some(super::abi::is_fork_initialized),
        reg_dmabuf_mr: (!old).then_some(super::vram::reg_dmabuf_mr),
        lacks_immediate: Some(abi::lacks_immediate),
    }
}

unsafe extern "C" fn list<const SLOT: usize>(count: *mut c_int) -> *mut *mut ibv_device {
    let listed = LISTED[SLOT].lock().unwrap_or_else(PoisonError::into_inner);
    let mut devices = Vec::new();
    if let Some(Listed { shared, devices: indices }) = &*listed {
        let state = shared.look();
        for &index in indices.iter().filter(|index| !state.devices[**index].dead) {
            let config = &state.devices[index].config;
            let mut ibv = zeroed::<ibv_device>();
            ibv.node_type = ibv_node_type::IBV_NODE_CA;
            ibv.transport_type = if config.iwarp {
                ibv_transport_type::IBV_TRANSPORT_IWARP
            } else {
                ibv_transport_type::IBV_TRANSPORT_IB
            };
            let nowhere = || format!("/sys/class/infiniband/{}", config.name).into();
            let sysfs = state.sysfs.as_ref().map_or_else(nowhere, |sysfs| sysfs.of(&config.name));
            write_name(&mut ibv.name, &config.name);
            write_name(&mut ibv.ibdev_path, &sysfs.to_string_lossy());
            let object = DeviceObject { ibv, shared: Arc::clone(shared), index };
            devices.push(Arc::into_raw(Arc::new(object)).cast::<ibv_device>().cast_mut());
        }
    }
    if !count.is_null() {
        // SAFETY: room for the count, by the caller's promise.
        unsafe { *count = devices.len() as c_int };
    }
    devices.push(std::ptr::null_mut());
    Box::into_raw(devices.into_boxed_slice()).cast()
}

fn write_name(to: &mut [c_char], name: &str) {
    let room = to.len() - 1;
    for (to, byte) in to[..room].iter_mut().zip(name.bytes()) {
        *to = byte as c_char;
    }
}

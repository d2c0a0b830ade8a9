//! The functions that libibverbs exports and this crate uses.

use rdma_sys::*;
use std::ffi::{c_char, c_int, c_uint, c_void};

macro_rules! api {
    (
        required { $($name:ident: $symbol:literal = fn($($arg:ident: $ty:ty),*) $(-> $ret:ty)?;)* }
        optional { $($oname:ident: $osymbol:literal = fn($($oarg:ident: $oty:ty),*) $(-> $oret:ty)?;)* }
    ) => {
        /// Exported functions by their names without `ibv_`. A fake library fills one of these with its own.
        #[derive(Clone, Copy)]
        #[allow(missing_docs)]
        pub struct Api {
            $(pub $name: unsafe extern "C" fn($($arg: $ty),*) $(-> $ret)?,)*
            $(pub $oname: Option<unsafe extern "C" fn($($oarg: $oty),*) $(-> $oret)?>,)*
        }

        impl Api {
            /// Symbols with the types of their arguments and answers as they are written here, for comparing them with the headers.
            #[doc(hidden)]
            pub const SIGNATURES: &[(&str, &[&str], &str)] = &[
                $(($symbol, &[$(stringify!($ty)),*], concat!($(stringify!($ret))?)),)*
                $(($osymbol, &[$(stringify!($oty)),*], concat!($(stringify!($oret))?)),)*
            ];

            /// Looks every function up; the error names the first that is missing.
            ///
            /// # Safety
            /// `library` must be a libibverbs: symbols of these names must have these signatures. It must stay open as long as the table is used.
            pub unsafe fn load(library: &libloading::Library) -> Result<Api, &'static str> {
                Ok(Api {
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
        fork_init: "ibv_fork_init" = fn() -> c_int;
        get_device_list: "ibv_get_device_list" = fn(num_devices: *mut c_int) -> *mut *mut ibv_device;
        free_device_list: "ibv_free_device_list" = fn(list: *mut *mut ibv_device);
        get_device_name: "ibv_get_device_name" = fn(device: *mut ibv_device) -> *const c_char;
        open_device: "ibv_open_device" = fn(device: *mut ibv_device) -> *mut ibv_context;
        close_device: "ibv_close_device" = fn(context: *mut ibv_context) -> c_int;
        query_device: "ibv_query_device" = fn(context: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int;
        query_port: "ibv_query_port" = fn(context: *mut ibv_context, port: u8, attr: *mut _compat_ibv_port_attr) -> c_int;
        query_gid: "ibv_query_gid" = fn(context: *mut ibv_context, port: u8, index: c_int, gid: *mut ibv_gid) -> c_int;
        query_pkey: "ibv_query_pkey" = fn(context: *mut ibv_context, port: u8, index: c_int, pkey: *mut u16) -> c_int;
        get_async_event: "ibv_get_async_event" = fn(context: *mut ibv_context, event: *mut ibv_async_event) -> c_int;
        ack_async_event: "ibv_ack_async_event" = fn(event: *mut ibv_async_event);
        alloc_pd: "ibv_alloc_pd" = fn(context: *mut ibv_context) -> *mut ibv_pd;
        dealloc_pd: "ibv_dealloc_pd" = fn(pd: *mut ibv_pd) -> c_int;
        reg_mr: "ibv_reg_mr" = fn(pd: *mut ibv_pd, addr: *mut c_void, length: usize, access: c_int) -> *mut ibv_mr;
        dereg_mr: "ibv_dereg_mr" = fn(mr: *mut ibv_mr) -> c_int;
        create_comp_channel: "ibv_create_comp_channel" = fn(context: *mut ibv_context) -> *mut ibv_comp_channel;
        destroy_comp_channel: "ibv_destroy_comp_channel" = fn(channel: *mut ibv_comp_channel) -> c_int;
        create_cq: "ibv_create_cq" = fn(context: *mut ibv_context, cqe: c_int, cq_context: *mut c_void, channel: *mut ibv_comp_channel, comp_vector: c_int) -> *mut ibv_cq;
        destroy_cq: "ibv_destroy_cq" = fn(cq: *mut ibv_cq) -> c_int;
        get_cq_event: "ibv_get_cq_event" = fn(channel: *mut ibv_comp_channel, cq: *mut *mut ibv_cq, cq_context: *mut *mut c_void) -> c_int;
        ack_cq_events: "ibv_ack_cq_events" = fn(cq: *mut ibv_cq, nevents: c_uint);
        create_qp: "ibv_create_qp" = fn(pd: *mut ibv_pd, attr: *mut ibv_qp_init_attr) -> *mut ibv_qp;
        modify_qp: "ibv_modify_qp" = fn(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int;
        query_qp: "ibv_query_qp" = fn(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int, init_attr: *mut ibv_qp_init_attr) -> c_int;
        destroy_qp: "ibv_destroy_qp" = fn(qp: *mut ibv_qp) -> c_int;
    }
    optional {
        // Since IBVERBS_1.8 (rdma-core 28): registers with optional access flags, which older kernels may ignore.
        reg_mr_iova2: "ibv_reg_mr_iova2" = fn(pd: *mut ibv_pd, addr: *mut c_void, length: usize, iova: u64, access: c_uint) -> *mut ibv_mr;
        // Since IBVERBS_1.11 (rdma-core 32): a GID with its type and network device.
        query_gid_ex: "_ibv_query_gid_ex" = fn(context: *mut ibv_context, port: u32, index: u32, entry: *mut ibv_gid_entry, flags: u32, entry_size: usize) -> c_int;
        // Since IBVERBS_1.13 (rdma-core 35): whether fork is safe, by preparation or by the kernel.
        is_fork_initialized: "ibv_is_fork_initialized" = fn() -> c_uint;
        // Since IBVERBS_1.12 (rdma-core 34): memory of another device by its dma-buf.
        reg_dmabuf_mr: "ibv_reg_dmabuf_mr" = fn(pd: *mut ibv_pd, offset: u64, length: usize, iova: u64, fd: c_int, access: c_int) -> *mut ibv_mr;
        // In no library: fakes tell with it that a device has no WRITE_WITH_IMM. libibverbs has no such question, because InfiniBand's transport always has it.
        lacks_immediate: "baton_fake_lacks_immediate" = fn(context: *mut ibv_context) -> c_int;
    }
}

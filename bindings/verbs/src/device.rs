//! An open device, what it can do, and what happens to it.

use crate::api::Api;
use crate::error::VerbsError;
use crate::library::Library;
use rdma_sys::{
    _compat_ibv_port_attr, ibv_async_event, ibv_context, ibv_device_attr, ibv_event_type, ibv_gid,
    ibv_gid_entry, ibv_port_attr, ibv_port_state, verbs_context,
};
use std::mem::{MaybeUninit, offset_of, size_of};
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::path::PathBuf;
use std::ptr::NonNull;

/// A device as the library lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its name, such as `mlx5_0`.
    pub name: String,
    /// Its directory in sysfs.
    pub sysfs: PathBuf,
    /// It speaks iWARP.
    pub is_iwarp: bool,
    /// It speaks InfiniBand's transport, over InfiniBand or Ethernet.
    pub is_infiniband: bool,
}

/// Limits of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceAttr {
    /// Longest memory region in bytes.
    pub max_mr_bytes: u64,
    /// Queue pairs.
    pub max_qp: u32,
    /// Work requests of one queue.
    pub max_qp_wr: u32,
    /// Scatter/gather elements of a work request.
    pub max_sge: u32,
    /// Entries of a completion queue.
    pub max_cqe: u32,
    /// Memory regions.
    pub max_mr: u32,
    /// READs from a peer that a queue pair answers at a time.
    pub max_qp_rd_atom: u32,
    /// READs of its own that a queue pair has outstanding.
    pub max_qp_init_rd_atom: u32,
    /// Ports, numbered from 1.
    pub ports: u8,
    /// IEEE vendor number; [`SOFT_ROCE_VENDOR`] stands for Linux' soft-RoCE.
    pub vendor_id: u32,
}

/// What soft-RoCE (the rxe driver) gives for its vendor: no number of the IEEE.
pub const SOFT_ROCE_VENDOR: u32 = 0xff_ffff;

/// State of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortState {
    /// Ready.
    Active,
    /// Not connected.
    Down,
    /// Being configured, or another state by the specification's number.
    Other(u32),
}

/// What a port is attached to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkLayer {
    /// InfiniBand.
    InfiniBand,
    /// Ethernet: RoCE.
    Ethernet,
}

/// A port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortAttr {
    /// State.
    pub state: PortState,
    /// Link layer.
    pub link_layer: LinkLayer,
    /// Path MTU in bytes that the port uses now.
    pub active_mtu_bytes: u32,
    /// Longest message in bytes.
    pub max_msg_bytes: u32,
    /// Entries of the GID table.
    pub gid_table_len: u32,
    /// Entries of the partition table.
    pub pkey_table_len: u16,
    /// Local identifier; 0 on Ethernet.
    pub lid: u16,
    /// Speed in Mbit/s, 0 where unknown.
    pub speed_mbps: u32,
}

/// Type of a GID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GidType {
    /// InfiniBand.
    Ib,
    /// RoCE v1: Ethernet frames, not routable.
    RoceV1,
    /// RoCE v2: UDP, routable.
    RoceV2,
}

/// An entry of a GID table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GidEntry {
    /// Index.
    pub index: u32,
    /// The GID in network order.
    pub gid: [u8; 16],
    /// Type.
    pub kind: GidType,
    /// Index of the network device, 0 for none.
    pub ndev_ifindex: u32,
}

/// What happened to a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AsyncEvent {
    /// It is lost.
    DeviceFatal,
    /// A port works (again).
    PortActive(u8),
    /// A port does not work any more.
    PortErr(u8),
    /// The GID table of a port changed.
    GidChange(u8),
    /// LID, partition table or subnet manager of a port changed.
    PortChange(u8),
    /// A queue pair is in error, by its number.
    QpErr(u32),
    /// A completion queue overran, by its token: nothing comes out of it any more.
    CqErr(u64),
    /// Anything else, by the specification's number.
    Other(u32),
}

/// An open device.
pub struct Context {
    context: NonNull<ibv_context>,
    library: Library,
    info: DeviceInfo,
}

// SAFETY: a context may be used from any thread; libibverbs locks what needs it.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    pub(crate) fn new(
        library: Library,
        context: NonNull<ibv_context>,
        info: DeviceInfo,
    ) -> Result<Context, VerbsError> {
        let context = Context { context, library, info };
        set_nonblocking(context.async_fd().as_raw_fd())?;
        Ok(context)
    }

    pub(crate) fn api(&self) -> &Api {
        &self.library.inner().api
    }

    pub(crate) fn as_ptr(&self) -> *mut ibv_context {
        self.context.as_ptr()
    }

    /// Which device.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// Whether WRITEs with immediate work: where the transport is InfiniBand's they do, and iWARP has none.
    pub fn has_immediate(&self) -> bool {
        // SAFETY: an open context.
        let lacks = self.api().lacks_immediate.is_some_and(|ask| unsafe { ask(self.as_ptr()) } != 0);
        self.info.is_infiniband && !lacks
    }

    /// Becomes readable when something happened to the device.
    pub fn async_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is the context's and open as long as it.
        unsafe { BorrowedFd::borrow_raw((*self.as_ptr()).async_fd) }
    }

    /// Limits.
    pub fn query_device(&self) -> Result<DeviceAttr, VerbsError> {
        let mut attr = MaybeUninit::<ibv_device_attr>::zeroed();
        // SAFETY: an open context and room for the structure.
        let answer = unsafe { (self.api().query_device)(self.as_ptr(), attr.as_mut_ptr()) };
        VerbsError::check("ibv_query_device", answer)?;
        // SAFETY: filled; all zero bytes would be valid too.
        let attr = unsafe { attr.assume_init() };
        let count = |n: i32| u32::try_from(n).unwrap_or(0);
        Ok(DeviceAttr {
            max_mr_bytes: attr.max_mr_size,
            max_qp: count(attr.max_qp),
            max_qp_wr: count(attr.max_qp_wr),
            max_sge: count(attr.max_sge),
            max_cqe: count(attr.max_cqe),
            max_mr: count(attr.max_mr),
            max_qp_rd_atom: count(attr.max_qp_rd_atom),
            max_qp_init_rd_atom: count(attr.max_qp_init_rd_atom),
            ports: attr.phys_port_cnt,
            vendor_id: attr.vendor_id,
        })
    }

    /// A port, numbered from 1.
    pub fn query_port(&self, port: u8) -> Result<PortAttr, VerbsError> {
        let mut attr = MaybeUninit::<ibv_port_attr>::zeroed();
        let answer = match self.extended_query_port() {
            // SAFETY: an open context, the provider's own function and the size of the room it gets.
            Some(query) => unsafe {
                query(self.as_ptr(), port, attr.as_mut_ptr(), size_of::<ibv_port_attr>())
            },
            // SAFETY: the old function fills the front of the structure, which is zeroed.
            None => unsafe {
                (self.api().query_port)(
                    self.as_ptr(),
                    port,
                    attr.as_mut_ptr().cast::<_compat_ibv_port_attr>(),
                )
            },
        };
        VerbsError::check("ibv_query_port", answer)?;
        // SAFETY: filled; all zero bytes would be valid too.
        let attr = unsafe { attr.assume_init() };
        const IBV_LINK_LAYER_ETHERNET: u8 = 2;
        Ok(PortAttr {
            state: match attr.state {
                ibv_port_state::IBV_PORT_ACTIVE | ibv_port_state::IBV_PORT_ACTIVE_DEFER => PortState::Active,
                ibv_port_state::IBV_PORT_DOWN => PortState::Down,
                other => PortState::Other(other),
            },
            link_layer: match attr.link_layer {
                IBV_LINK_LAYER_ETHERNET => LinkLayer::Ethernet,
                _ => LinkLayer::InfiniBand,
            },
            active_mtu_bytes: 128 << attr.active_mtu.clamp(1, 5),
            max_msg_bytes: attr.max_msg_sz,
            gid_table_len: u32::try_from(attr.gid_tbl_len).unwrap_or(0),
            pkey_table_len: attr.pkey_tbl_len,
            lid: attr.lid,
            speed_mbps: speed_mbps(attr.active_width, attr.active_speed),
        })
    }

    /// The provider's newer query, where the context has one (`verbs_context` lies around the context and says so).
    #[allow(clippy::type_complexity)]
    fn extended_query_port(
        &self,
    ) -> Option<unsafe extern "C" fn(*mut ibv_context, u8, *mut ibv_port_attr, usize) -> i32> {
        let context = self.as_ptr();
        // SAFETY: an open context.
        if unsafe { (*context).abi_compat } as usize != usize::MAX {
            return None;
        }
        // SAFETY: the mark says that the context is the `context` field of a verbs_context, whose `sz` says how much of its front exists.
        let extended =
            unsafe { context.byte_sub(offset_of!(verbs_context, context)).cast::<verbs_context>() };
        let needed = size_of::<verbs_context>() - offset_of!(verbs_context, query_port);
        // SAFETY: as above; the field is read only where it exists.
        unsafe { if (*extended).sz < needed { None } else { (*extended).query_port } }
    }

    /// An entry of the GID table; `None` for an empty one, be it absent or all zero.
    pub fn query_gid(&self, port: u8, index: u32) -> Result<Option<GidEntry>, VerbsError> {
        if let Some(query) = self.api().query_gid_ex {
            let mut entry = MaybeUninit::<ibv_gid_entry>::zeroed();
            // SAFETY: an open context, room for the structure and its size.
            let answer = unsafe {
                query(
                    self.as_ptr(),
                    u32::from(port),
                    index,
                    entry.as_mut_ptr(),
                    0,
                    size_of::<ibv_gid_entry>(),
                )
            };
            if matches!(answer.abs(), libc::ENODATA) {
                return Ok(None);
            }
            VerbsError::check("ibv_query_gid_ex", answer)?;
            // SAFETY: filled; all zero bytes would be valid too. `gid` is a union of bytes with itself.
            let (entry, gid) = unsafe {
                let entry = entry.assume_init();
                let gid = entry.gid.raw;
                (entry, gid)
            };
            let kind = match entry.gid_type {
                rdma_sys::IBV_GID_TYPE_ROCE_V1 => GidType::RoceV1,
                rdma_sys::IBV_GID_TYPE_ROCE_V2 => GidType::RoceV2,
                _ => GidType::Ib,
            };
            let entry = GidEntry { index, gid, kind, ndev_ifindex: entry.ndev_ifindex };
            return Ok((gid != [0; 16]).then_some(entry));
        }
        let mut gid = ibv_gid { raw: [0; 16] };
        // SAFETY: an open context and room for the GID.
        let answer = unsafe { (self.api().query_gid)(self.as_ptr(), port, index as i32, &mut gid) };
        VerbsError::check("ibv_query_gid", answer)?;
        // SAFETY: both fields of the union are plain bytes.
        let gid = unsafe { gid.raw };
        Ok((gid != [0; 16]).then(|| self.describe_gid(port, index, gid)))
    }

    /// Type and network device as sysfs tells them, for libraries that do not.
    fn describe_gid(&self, port: u8, index: u32, gid: [u8; 16]) -> GidEntry {
        let read = |what: &str| {
            let path = self.info.sysfs.join(format!("ports/{port}/gid_attrs/{what}/{index}"));
            std::fs::read_to_string(path).map(|text| text.trim().to_owned()).unwrap_or_default()
        };
        let kind = match read("types").as_str() {
            "RoCE v2" => GidType::RoceV2,
            "IB/RoCE v1" if !read("ndevs").is_empty() => GidType::RoceV1,
            _ => GidType::Ib,
        };
        let ifindex = std::fs::read_to_string(format!("/sys/class/net/{}/ifindex", read("ndevs")));
        let ndev_ifindex = ifindex.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0);
        GidEntry { index, gid, kind, ndev_ifindex }
    }

    /// An entry of the partition table, in host order; 0 is empty.
    pub fn query_pkey(&self, port: u8, index: u16) -> Result<u16, VerbsError> {
        let mut pkey = 0;
        // SAFETY: an open context and room for the key.
        let answer = unsafe { (self.api().query_pkey)(self.as_ptr(), port, i32::from(index), &mut pkey) };
        VerbsError::check("ibv_query_pkey", answer)?;
        Ok(u16::from_be(pkey))
    }

    /// The next thing that happened; `None` when there is nothing more.
    pub fn next_event(&self) -> Result<Option<AsyncEvent>, VerbsError> {
        let mut event = MaybeUninit::<ibv_async_event>::zeroed();
        // SAFETY: an open context and room for the event.
        if unsafe { (self.api().get_async_event)(self.as_ptr(), event.as_mut_ptr()) } != 0 {
            let error = VerbsError::last("ibv_get_async_event");
            return if error.errno == libc::EAGAIN { Ok(None) } else { Err(error) };
        }
        // The type is read as a number: newer libraries know more of them than the enum does.
        // SAFETY: the field is filled; it is read as the integer that C stores.
        let kind =
            unsafe { event.as_ptr().byte_add(offset_of!(ibv_async_event, event_type)).cast::<u32>().read() };
        // SAFETY: which field of the union is set follows from the type; queues live until their events are acknowledged.
        let told = unsafe {
            let element = &raw const (*event.as_ptr()).element;
            let port = (*element).port_num as u8;
            describe_event(kind, port, || (*(*element).qp).qp_num, || (*(*element).cq).cq_context as u64)
        };
        // SAFETY: it came from get_async_event and is acknowledged once.
        unsafe { (self.api().ack_async_event)(event.as_mut_ptr()) };
        Ok(Some(told))
    }
}

fn describe_event(
    kind: u32,
    port: u8,
    qp_num: impl FnOnce() -> u32,
    cq_token: impl FnOnce() -> u64,
) -> AsyncEvent {
    const fn number(event: ibv_event_type) -> u32 {
        event as u32
    }
    const DEVICE_FATAL: u32 = number(ibv_event_type::IBV_EVENT_DEVICE_FATAL);
    const PORT_ACTIVE: u32 = number(ibv_event_type::IBV_EVENT_PORT_ACTIVE);
    const PORT_ERR: u32 = number(ibv_event_type::IBV_EVENT_PORT_ERR);
    const GID_CHANGE: u32 = number(ibv_event_type::IBV_EVENT_GID_CHANGE);
    const LID_CHANGE: u32 = number(ibv_event_type::IBV_EVENT_LID_CHANGE);
    const PKEY_CHANGE: u32 = number(ibv_event_type::IBV_EVENT_PKEY_CHANGE);
    const SM_CHANGE: u32 = number(ibv_event_type::IBV_EVENT_SM_CHANGE);
    const CQ_ERR: u32 = number(ibv_event_type::IBV_EVENT_CQ_ERR);
    const QP_FATAL: u32 = number(ibv_event_type::IBV_EVENT_QP_FATAL);
    const QP_REQ_ERR: u32 = number(ibv_event_type::IBV_EVENT_QP_REQ_ERR);
    const QP_ACCESS_ERR: u32 = number(ibv_event_type::IBV_EVENT_QP_ACCESS_ERR);
    match kind {
        DEVICE_FATAL => AsyncEvent::DeviceFatal,
        PORT_ACTIVE => AsyncEvent::PortActive(port),
        PORT_ERR => AsyncEvent::PortErr(port),
        GID_CHANGE => AsyncEvent::GidChange(port),
        LID_CHANGE | PKEY_CHANGE | SM_CHANGE => AsyncEvent::PortChange(port),
        QP_FATAL | QP_REQ_ERR | QP_ACCESS_ERR => AsyncEvent::QpErr(qp_num()),
        CQ_ERR => AsyncEvent::CqErr(cq_token()),
        other => AsyncEvent::Other(other),
    }
}

/// Lanes times rate per lane, by the specification's encodings (IBTA 14.2.5.6); 0 for what is not in them.
fn speed_mbps(width: u8, speed: u8) -> u32 {
    let lanes = match width {
        1 => 1,
        2 => 4,
        4 => 8,
        8 => 12,
        16 => 2,
        _ => 0,
    };
    let per_lane = match speed {
        1 => 2_500,
        2 => 5_000,
        4 | 8 => 10_000,
        16 => 14_000,
        32 => 25_000,
        64 => 50_000,
        128 => 100_000,
        _ => 0,
    };
    lanes * per_lane
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: everything made from the context holds it, so nothing of it is alive.
        let answer = unsafe { (self.api().close_device)(self.as_ptr()) };
        if let Err(e) = VerbsError::check("ibv_close_device", answer) {
            tracing::error!("device {} stays open: {e}", self.info.name);
        }
    }
}

/// Reading from it never waits, and children do not inherit it.
pub(crate) fn set_nonblocking(fd: RawFd) -> Result<(), VerbsError> {
    // SAFETY: plain fcntl on a descriptor that the caller owns.
    let set = unsafe {
        let flags = libc::fcntl(fd, libc::F_GETFL);
        flags >= 0
            && libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK) >= 0
            && libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) >= 0
    };
    if set { Ok(()) } else { Err(VerbsError::last("fcntl")) }
}

//! What a fake's devices are and can do.

use crate::device::{GidType, LinkLayer};

/// When the data of a READ moves: when it is taken from the peer's memory and placed in ours.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReadTiming {
    /// Before anything behind the READ is executed.
    Prompt,
    /// Any time that reliable connections permit, by the seed.
    #[default]
    Random,
    /// After everything behind the READ that no fence holds back, and milliseconds later: who acts on what overtook it spoils it.
    Late,
}

/// A network of devices.
#[derive(Clone, Debug)]
pub struct FakeConfig {
    /// Decides what the specification leaves open, such as which of two queue pairs goes first.
    pub seed: u64,
    /// The devices.
    pub devices: Vec<DeviceConfig>,
    /// Contexts have the newer `verbs_context` around them.
    pub extended_context: bool,
    /// The library lacks the optional functions, as one before rdma-core 28.
    pub old_library: bool,
    /// When READs happen.
    pub read_timing: ReadTiming,
    /// Statuses as soft-RoCE reports them: a wrong local key or a downed link as `LOC_QP_OP_ERR` (at once, without retries), a SEND
    /// that is too long as `REM_OP_ERR`, and `LOC_QP_OP_ERR` for its RECV.
    pub soft_statuses: bool,
    /// A `retry_cnt` of 7 retries without end, as soft-RoCE's does.
    pub retry_7_is_endless: bool,
    /// The peer that refuses an access hears an event of its queue pair. Soft-RoCE's does not.
    pub access_events: bool,
    /// What peers write into an accelerator's memory (registered by [`dmabuf`](super::dmabuf)) is visible only after the device that placed it has
    /// read from such memory.
    pub late_vram: bool,
    /// Bytes that move at a time; between two pieces anything may happen.
    pub piece_bytes: u32,
}

impl Default for FakeConfig {
    fn default() -> FakeConfig {
        FakeConfig {
            seed: 1,
            devices: vec![DeviceConfig::new("fake0", 1), DeviceConfig::new("fake1", 2)],
            extended_context: true,
            old_library: false,
            read_timing: ReadTiming::Random,
            soft_statuses: false,
            retry_7_is_endless: true,
            access_events: true,
            late_vram: true,
            piece_bytes: 1 << 20,
        }
    }
}

/// A device.
#[derive(Clone, Debug)]
pub struct DeviceConfig {
    /// Name.
    pub name: String,
    /// It is iWARP.
    pub iwarp: bool,
    /// It can do WRITE_WITH_IMM. One that cannot refuses it at post with EINVAL; [`Context::has_immediate`](crate::Context::has_immediate) tells.
    pub immediate: bool,
    /// Ports, numbered from 1.
    pub ports: Vec<PortConfig>,
    /// Queue pairs.
    pub max_qp: u32,
    /// Work requests of a queue; more is refused with EINVAL.
    pub max_qp_wr: u32,
    /// A send queue gets the next 2ⁿ − 1 entries, as soft-RoCE's; otherwise exactly what was asked.
    pub round_send_queue: bool,
    /// Scatter/gather elements of a work request.
    pub max_sge: u32,
    /// Entries of a completion queue.
    pub max_cqe: u32,
    /// Memory regions.
    pub max_mr: u32,
    /// Longest memory region.
    pub max_mr_bytes: u64,
    /// Bytes that a work request can carry itself.
    pub max_inline_bytes: u32,
    /// More inline bytes than there are make `create_qp` fail with EINVAL; otherwise the queue pair gets what there is.
    pub refuse_inline: bool,
    /// READs that a queue pair answers at a time.
    pub max_qp_rd_atom: u8,
    /// READs that a queue pair has outstanding.
    pub max_qp_init_rd_atom: u8,
    /// Bytes that may be registered before ENOMEM, as `RLIMIT_MEMLOCK` has it.
    pub memlock_bytes: Option<u64>,
    /// So many deregistrations fail with EBUSY.
    pub busy_deregistrations: u32,
    /// It takes dma-bufs; otherwise registering one fails with EOPNOTSUPP.
    pub dmabuf: bool,
    /// Number of the first queue pair. Devices with the same one hand out the same numbers.
    pub first_qpn: u32,
    /// First key of a memory region. Devices with the same one hand out the same keys.
    pub first_key: u32,
    /// IEEE vendor number.
    pub vendor_id: u32,
}

impl DeviceConfig {
    /// A device with one active RoCE port, a link-local GID at index 0 and 10.77.0.`host` at index 1.
    pub fn new(name: &str, host: u8) -> DeviceConfig {
        DeviceConfig {
            name: name.to_owned(),
            iwarp: false,
            immediate: true,
            ports: vec![PortConfig::roce(vec![FakeGid::link_local(host), FakeGid::ipv4([10, 77, 0, host])])],
            max_qp: 1024,
            max_qp_wr: 16384,
            round_send_queue: false,
            max_sge: 16,
            max_cqe: 32767,
            max_mr: 65536,
            max_mr_bytes: 1 << 40,
            max_inline_bytes: 220,
            refuse_inline: true,
            max_qp_rd_atom: 16,
            max_qp_init_rd_atom: 16,
            memlock_bytes: None,
            busy_deregistrations: 0,
            dmabuf: true,
            first_qpn: 17,
            first_key: 0x1000,
            vendor_id: 0x02_c903,
        }
    }
}

/// A port.
#[derive(Clone, Debug)]
pub struct PortConfig {
    /// It works.
    pub up: bool,
    /// Link layer.
    pub link_layer: LinkLayer,
    /// Path MTU in bytes.
    pub mtu_bytes: u32,
    /// Longest message; a longer one fails with `LOC_LEN_ERR`.
    pub max_msg_bytes: u32,
    /// GID table; `None` is an empty entry.
    pub gids: Vec<Option<FakeGid>>,
    /// Partition table.
    pub pkeys: Vec<u16>,
    /// Local identifier; 0 on Ethernet.
    pub lid: u16,
    /// Ports reach each other on the same network only.
    pub network: u32,
}

impl PortConfig {
    /// An active RoCE port.
    pub fn roce(gids: Vec<FakeGid>) -> PortConfig {
        PortConfig {
            up: true,
            link_layer: LinkLayer::Ethernet,
            mtu_bytes: 4096,
            max_msg_bytes: 1 << 30,
            gids: gids.into_iter().map(Some).collect(),
            pkeys: vec![0xffff],
            lid: 0,
            network: 0,
        }
    }
}

/// An entry of a GID table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FakeGid {
    /// In network order.
    pub gid: [u8; 16],
    /// Type.
    pub kind: GidType,
    /// Index of the network device.
    pub ndev_ifindex: u32,
}

impl FakeGid {
    /// RoCE v2, IPv4-mapped.
    pub fn ipv4(address: [u8; 4]) -> FakeGid {
        let mut gid = [0; 16];
        gid[10..12].fill(0xff);
        gid[12..].copy_from_slice(&address);
        FakeGid { gid, kind: GidType::RoceV2, ndev_ifindex: 1 }
    }

    /// RoCE v2, IPv6 link-local.
    pub fn link_local(host: u8) -> FakeGid {
        let mut gid = [0; 16];
        gid[..2].copy_from_slice(&[0xfe, 0x80]);
        gid[15] = host;
        FakeGid { gid, kind: GidType::RoceV2, ndev_ifindex: 1 }
    }

    /// An entry that is there and all zero.
    pub fn zero() -> FakeGid {
        FakeGid { gid: [0; 16], kind: GidType::RoceV2, ndev_ifindex: 1 }
    }

    /// With another type.
    pub fn of_kind(self, kind: GidType) -> FakeGid {
        FakeGid { kind, ..self }
    }

    pub(super) fn is_link_local(&self) -> bool {
        self.gid[0] == 0xfe && self.gid[1] & 0xc0 == 0x80
    }
}

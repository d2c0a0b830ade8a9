//! Devices in use and the ports of them that are rails.

use crate::choose::{
    self, DeviceFacts, Gid, GidEntry, GidType, LinkLayer, Mtu, PortFacts, PortState, Ports, Rail, Transport,
};
use crate::config::{DeviceFilter, VerbsConfig};
use crate::interfaces;
use baton_fabric::FabricError;
use baton_verbs::{Channel, Context, DeviceAttr, DeviceInfo, Library, Pd, QpCap};
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Instant;

/// A device in use.
pub(crate) struct Device {
    pub name: String,
    pub context: Arc<Context>,
    pub pd: Arc<Pd>,
    /// Where its completion queues announce themselves.
    pub channel: Arc<Channel>,
    pub attr: DeviceAttr,
    /// What a queue pair of it gets at most.
    pub cap: QpCap,
}

/// A port in use.
pub(crate) struct OpenRail {
    pub device: Arc<Device>,
    /// Index of the device among those of the fabric.
    pub device_index: usize,
    pub port: u8,
    pub max_message_bytes: u32,
    state: Mutex<State>,
}

struct State {
    facts: Rail,
    down: Option<Down>,
}

/// Why a rail is not used at present.
#[derive(Clone, Debug)]
pub(crate) struct Down {
    pub why: String,
    /// It does not come back.
    pub for_good: bool,
    /// Connections on it are given up then, unless it is back.
    pub grace_ends: Instant,
}

impl OpenRail {
    /// What is known of it now.
    pub fn facts(&self) -> Rail {
        self.state.lock().facts.clone()
    }

    pub fn down(&self) -> Option<Down> {
        self.state.lock().down.clone()
    }

    pub fn set_down(&self, down: Option<Down>) {
        let mut state = self.state.lock();
        if !state.down.as_ref().is_some_and(|down| down.for_good) {
            state.down = down;
        }
    }

    /// Whether its port works at this moment.
    pub fn is_active(&self) -> bool {
        let active = baton_verbs::PortState::Active;
        self.device.context.query_port(self.port).is_ok_and(|attr| attr.state == active)
    }

    /// Reads the port and its GID table anew: whether its GID is another one than before. An error says why the port cannot be used.
    pub fn refresh(&self, config: &VerbsConfig) -> Result<bool, String> {
        let port = port_facts(&self.device.context, self.port).map_err(|e| e.to_string())?;
        let facts = DeviceFacts {
            name: self.device.name.clone(),
            transport: Transport::InfiniBand,
            failure: None,
            ports: vec![port],
        };
        // It was chosen already; the others that the settings name are not looked at here.
        let config = VerbsConfig { devices: DeviceFilter::All, ..config.clone() };
        let ports = choose::ports::ports(&config, &[facts], &interfaces::addresses(), &[]);
        let new =
            ports.map_err(|e| e.to_string())?.rails.into_iter().next().ok_or("it is no rail any more")?;
        let mut state = self.state.lock();
        let changed = state.facts.gid != new.gid;
        if changed {
            tracing::warn!("{}: its GID is now {}, was {}", self.device.name, new.gid, state.facts.gid);
        }
        state.facts = Rail { named: state.facts.named, ..new };
        Ok(changed)
    }
}

impl std::fmt::Display for OpenRail {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.state.lock().facts.fmt(f)
    }
}

/// What is in use, and lines that say what was chosen and what was left out, and why.
pub(crate) struct Opened {
    pub devices: Vec<Arc<Device>>,
    pub rails: Vec<OpenRail>,
    pub notes: Vec<String>,
}

/// Opens the devices that are wanted.
pub(crate) fn open(library: &Library, config: &VerbsConfig) -> Result<Opened, FabricError> {
    let listed = library.devices().map_err(|e| FabricError::System(e.to_string()))?;
    if listed.is_empty() {
        let known = kernel_devices();
        if !known.is_empty() {
            return Err(FabricError::Unsupported(format!(
                "libibverbs finds no device although the kernel has {}: is the devices' provider installed (Debian: \
                 ibverbs-providers), and may this process see /dev/infiniband (a container needs it passed in)?",
                known.join(", ")
            )));
        }
    }
    let mut opened: Vec<Option<Arc<Context>>> = Vec::new();
    let mut facts = Vec::new();
    for info in &listed {
        let (one, context) = look_at(library, info, config);
        facts.push(one);
        opened.push(context);
    }
    let Ports { rails: chosen, skipped, mut notes } =
        choose::ports::ports(config, &facts, &interfaces::addresses(), &[])
            .map_err(|e| FabricError::Unsupported(e.to_string()))?;
    notes.extend(skipped.iter().map(ToString::to_string));
    let mut devices: Vec<Arc<Device>> = Vec::new();
    let mut rails = Vec::new();
    for rail in chosen {
        let known = devices.iter().position(|device| device.name == rail.device);
        let device_index = match known {
            Some(index) => index,
            None => {
                let at = listed.iter().position(|info| info.name == rail.device);
                let context = at.and_then(|at| opened[at].clone());
                let context =
                    context.ok_or_else(|| FabricError::System(format!("device {} vanished", rail.device)))?;
                devices.push(Arc::new(use_device(&context)?));
                devices.len() - 1
            }
        };
        let device = Arc::clone(&devices[device_index]);
        let attr = device.context.query_port(rail.port).map_err(|e| at_port(&rail.device, rail.port, &e))?;
        check_pkey(&device, rail.port, attr.pkey_table_len, config.pkey_index)?;
        rails.push(OpenRail {
            device,
            device_index,
            port: rail.port,
            max_message_bytes: attr.max_msg_bytes,
            state: Mutex::new(State { facts: rail, down: None }),
        });
    }
    Ok(Opened { devices, rails, notes })
}

/// Names of the RDMA devices that the kernel has.
fn kernel_devices() -> Vec<String> {
    let Ok(entries) = std::fs::read_dir("/sys/class/infiniband") else { return Vec::new() };
    let mut names: Vec<String> =
        entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// A queue pair whose partition key is not there would fail at every session.
fn check_pkey(device: &Device, port: u8, table_len: u16, index: u16) -> Result<(), FabricError> {
    let key = if index < table_len { device.context.query_pkey(port, index).ok() } else { None };
    match key {
        Some(key) if key != 0 => Ok(()),
        _ => Err(FabricError::Unsupported(format!(
            "device {} port {port}: partition key index {index} (BATON_IB_PKEY) is empty or past the table's {table_len} entries",
            device.name
        ))),
    }
}

fn at_port(device: &str, port: u8, e: &baton_verbs::VerbsError) -> FabricError {
    FabricError::System(format!("device {device} port {port}: {e}"))
}

/// What is known of a listed device, and the device itself where it can be opened.
fn look_at(
    library: &Library,
    info: &DeviceInfo,
    config: &VerbsConfig,
) -> (DeviceFacts, Option<Arc<Context>>) {
    let transport = match info {
        DeviceInfo { is_iwarp: true, .. } => Transport::Iwarp,
        DeviceInfo { is_infiniband: true, .. } => Transport::InfiniBand,
        _ => Transport::Other(-1),
    };
    let mut facts = DeviceFacts { name: info.name.clone(), transport, failure: None, ports: Vec::new() };
    if transport != Transport::InfiniBand {
        return (facts, None);
    }
    if let Some(why) = config.devices.rules_out(&info.name) {
        facts.failure = Some(why.to_owned());
        return (facts, None);
    }
    let looked = library.open_device(&info.name).and_then(|context| {
        let ports = context.query_device()?.ports;
        facts.ports = (1..=ports).map(|port| port_facts(&context, port)).collect::<Result<_, _>>()?;
        Ok(context)
    });
    match looked {
        Ok(context) => (facts, Some(context)),
        Err(e) => {
            let hint = if e.errno == libc::EACCES || e.errno == libc::EPERM {
                " (may this user open /dev/infiniband/uverbs*?)"
            } else {
                ""
            };
            facts.failure = Some(format!("{e}{hint}"));
            (facts, None)
        }
    }
}

fn port_facts(context: &Context, number: u8) -> Result<PortFacts, baton_verbs::VerbsError> {
    let attr = context.query_port(number)?;
    let link = match attr.link_layer {
        baton_verbs::LinkLayer::Ethernet => LinkLayer::Ethernet,
        baton_verbs::LinkLayer::InfiniBand => LinkLayer::InfiniBand,
    };
    let mut gids = Vec::new();
    // A queue pair names its GID with eight bits.
    for index in 0..attr.gid_table_len.min(256) {
        // An entry that cannot be read is as good as empty; what is missing in the end says so.
        let Ok(Some(entry)) = context.query_gid(number, index) else { continue };
        gids.push(GidEntry {
            index: index as u8,
            gid: Gid(entry.gid),
            kind: match entry.kind {
                baton_verbs::GidType::Ib => GidType::InfiniBand,
                baton_verbs::GidType::RoceV1 => GidType::RoceV1,
                baton_verbs::GidType::RoceV2 => GidType::RoceV2,
            },
            netdev: netdev(entry.ndev_ifindex),
        });
    }
    Ok(PortFacts {
        number,
        state: match attr.state {
            baton_verbs::PortState::Active => PortState::Active,
            baton_verbs::PortState::Down => PortState::Down,
            baton_verbs::PortState::Other(2) => PortState::Initializing,
            baton_verbs::PortState::Other(3) => PortState::Armed,
            baton_verbs::PortState::Other(n) => PortState::Other(n),
        },
        link,
        lid: attr.lid,
        mtu: Mtu::from_bytes(attr.active_mtu_bytes.into()).unwrap_or(Mtu::B1024),
        speed_mbps: attr.speed_mbps.into(),
        numa_node: numa_node(context.info()),
        gid_table_len: attr.gid_table_len,
        gids,
    })
}

fn netdev(ifindex: u32) -> Option<String> {
    let mut name = [0u8; libc::IF_NAMESIZE];
    // SAFETY: room for the longest name.
    if ifindex == 0 || unsafe { libc::if_indextoname(ifindex, name.as_mut_ptr().cast()) }.is_null() {
        return None;
    }
    let name = std::ffi::CStr::from_bytes_until_nul(&name).ok()?;
    Some(name.to_string_lossy().into_owned())
}

fn numa_node(info: &DeviceInfo) -> Option<u16> {
    let text = std::fs::read_to_string(info.sysfs.join("device/numa_node")).ok()?;
    text.trim().parse().ok()
}

fn use_device(context: &Arc<Context>) -> Result<Device, FabricError> {
    let name = context.info().name.clone();
    let failed = |e: baton_verbs::VerbsError| FabricError::System(format!("device {name}: {e}"));
    let attr = context.query_device().map_err(failed)?;
    let pd = Pd::new(context).map_err(failed)?;
    let channel = Channel::new(context).map_err(failed)?;
    let cap = crate::probe::queue_pair_cap(&pd, &channel, &attr).map_err(failed)?;
    Ok(Device { name, context: Arc::clone(context), pd, channel, attr, cap })
}

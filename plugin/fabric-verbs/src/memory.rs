//! Registrations: on every device in use, in segments where a device cannot take the whole, shared where the same memory is
//! registered again.

use crate::cuda::Pointer;
use crate::flush::Flusher;
use crate::rail::Device;
use crate::vram::{Offer, Source};
use baton_fabric::{FabricError, Keys, Memory, MemoryKind, RegionKeys};
use baton_verbs::{Access, Mr, Pd, VerbsError};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::Arc;

/// Segments end at multiples of this from the region's first byte, so that huge pages are not split.
const SEGMENT_ALIGN_BYTES: u64 = 2 << 20;
/// Segments of one region at most.
pub(crate) const MAX_SEGMENTS: u64 = 4096;

/// Registrations that are the same to a device share its memory regions.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Same {
    addr: u64,
    len_bytes: u64,
    vram_device: Option<u64>,
    access: Access,
}

/// Memory regions of one range: `mrs[device][segment]`.
struct Regions {
    same: Same,
    segment_bytes: u64,
    mrs: Vec<Vec<Mr>>,
    /// What the flusher reads, where it has to.
    flush: Option<FlushTarget>,
}

/// Taken from the flusher when it goes.
struct FlushTarget {
    id: u64,
    flusher: Arc<Flusher>,
}

impl Drop for FlushTarget {
    fn drop(&mut self) {
        self.flusher.remove(self.id);
    }
}

/// How memory of accelerators is registered.
pub(crate) struct Vram {
    /// Or what is missing.
    pub offer: Result<Offer, String>,
    pub flusher: Arc<Flusher>,
    /// Also where the device says that it orders writes by itself.
    pub always_flush: bool,
}

struct Registration {
    regions: Arc<Regions>,
    rail_devices: Arc<[usize]>,
}

#[derive(Default)]
struct State {
    /// By number; the number is the upper half of both keys, which tells repeated registrations apart.
    registrations: HashMap<u32, Registration>,
    /// Live ones that may be shared.
    shared: HashMap<Same, std::sync::Weak<Regions>>,
    next: u32,
}

/// All registrations of a fabric.
#[derive(Default)]
pub(crate) struct Registrations {
    state: Mutex<State>,
}

impl Registrations {
    /// Registers on all devices, or on none.
    pub fn register(
        &self,
        devices: &[Arc<Device>],
        rail_devices: &Arc<[usize]>,
        memory: &Memory,
        vram: &Vram,
    ) -> Result<Keys, FabricError> {
        if memory.len_bytes == 0 || memory.addr.checked_add(memory.len_bytes).is_none() {
            let text = format!(
                "{} bytes at {:#x} are empty or past the address space",
                memory.len_bytes, memory.addr
            );
            return Err(FabricError::Invalid(text));
        }
        let same = Same {
            addr: memory.addr,
            len_bytes: memory.len_bytes,
            vram_device: (memory.kind == MemoryKind::Vram).then_some(memory.device),
            access: access_of(memory),
        };
        // Pinning takes long, so not under the lock. Two at once register twice; either is right.
        let found = self.state.lock().shared.get(&same).and_then(std::sync::Weak::upgrade);
        let regions = match found {
            Some(regions) => regions,
            None => Arc::new(match memory.kind {
                MemoryKind::Dram => register_all(devices, same, &Source::Host)?,
                MemoryKind::Vram => vram.register(devices, same, memory.device)?,
            }),
        };
        let mut state = self.state.lock();
        state.shared.insert(same, Arc::downgrade(&regions));
        let number = loop {
            state.next = state.next.wrapping_add(1).max(1);
            if !state.registrations.contains_key(&state.next) {
                break state.next;
            }
        };
        let first = &regions.mrs[rail_devices[0]][0];
        let keys = Keys { local: tag(number, first.lkey()), remote: tag(number, first.rkey()) };
        state.registrations.insert(number, Registration { regions, rail_devices: Arc::clone(rail_devices) });
        Ok(keys)
    }

    /// Keys by rail and segment.
    pub fn keys(&self, keys: Keys) -> Option<RegionKeys> {
        let state = self.state.lock();
        let registration = state.registrations.get(&number_of(keys))?;
        let regions = &registration.regions;
        let of = |key: fn(&Mr) -> u32| {
            let rails = registration.rail_devices.iter();
            rails.flat_map(|device| &regions.mrs[*device]).map(|mr| u64::from(key(mr))).collect()
        };
        Some(RegionKeys {
            segment_bytes: regions.segment_bytes,
            rails: registration.rail_devices.len() as u8,
            local: of(Mr::lkey),
            remote: of(Mr::rkey),
        })
    }

    /// Takes a registration back. The memory regions go with the last registration that shares them.
    pub fn deregister(&self, keys: Keys) -> Result<(), FabricError> {
        let number = number_of(keys);
        let mut state = self.state.lock();
        let registration = state.registrations.remove(&number);
        let registration =
            registration.ok_or_else(|| FabricError::NotFound(format!("registration {number} (any more)")))?;
        let Registration { regions, rail_devices } = registration;
        let same = regions.same;
        let regions = match Arc::try_unwrap(regions) {
            Ok(regions) => regions,
            // Others go on using it.
            Err(_) => return Ok(()),
        };
        state.shared.remove(&same);
        drop(state);
        let Err((regions, e)) = withdraw(regions) else { return Ok(()) };
        let text = format!("{} bytes at {:#x} stay registered: {e}", same.len_bytes, same.addr);
        let registration = Registration { regions: Arc::new(regions), rail_devices };
        self.state.lock().registrations.insert(number, registration);
        Err(FabricError::System(text))
    }

    /// Ends all access through the registration unless others share its memory regions. The registration itself stays known.
    pub fn revoke(&self, keys: Keys) {
        let number = number_of(keys);
        let taken = {
            let mut state = self.state.lock();
            let Some(registration) = state.registrations.get_mut(&number) else { return };
            let same = registration.regions.same;
            let empty = Regions {
                same,
                segment_bytes: registration.regions.segment_bytes,
                mrs: registration.regions.mrs.iter().map(|_| Vec::new()).collect(),
                flush: None,
            };
            let regions = std::mem::replace(&mut registration.regions, Arc::new(empty));
            match Arc::try_unwrap(regions) {
                Ok(mut regions) => {
                    // Taking it from the flusher may wait, which is for `deregister` to do.
                    if let Some(placeholder) = Arc::get_mut(&mut registration.regions) {
                        placeholder.flush = regions.flush.take();
                    }
                    state.shared.remove(&same);
                    regions
                }
                Err(shared) => {
                    registration.regions = shared;
                    return;
                }
            }
        };
        if let Err((regions, e)) = withdraw(taken) {
            tracing::error!(
                "{} bytes at {:#x} stay registered: {e}",
                regions.same.len_bytes,
                regions.same.addr
            );
            if let Some(registration) = self.state.lock().registrations.get_mut(&number) {
                let placeholder = Arc::get_mut(&mut registration.regions);
                let flush = placeholder.and_then(|placeholder| placeholder.flush.take());
                registration.regions = Arc::new(Regions { flush, ..regions });
            }
        }
    }

    /// Registrations, and memory regions of devices.
    pub fn count(&self) -> (usize, usize) {
        let state = self.state.lock();
        let live = state.shared.values().filter_map(std::sync::Weak::upgrade);
        (state.registrations.len(), live.map(|regions| regions.mrs.iter().map(Vec::len).sum::<usize>()).sum())
    }
}

fn tag(number: u32, key: u32) -> u64 {
    u64::from(number) << 32 | u64::from(key)
}

fn number_of(keys: Keys) -> u32 {
    (keys.local >> 32) as u32
}

fn access_of(memory: &Memory) -> Access {
    Access {
        local_write: true,
        remote_read: memory.remote_read,
        remote_write: memory.remote_write,
        // A flush counts on the order of a READ behind WRITEs.
        relaxed_ordering: !memory.ordered && memory.kind == MemoryKind::Dram,
    }
}

/// The longest segment that every device takes; the whole where it fits.
fn segment_bytes(devices: &[Arc<Device>], len_bytes: u64) -> Result<u64, FabricError> {
    let most = devices.iter().map(|device| device.attr.max_mr_bytes).min().unwrap_or(u64::MAX);
    if len_bytes <= most {
        return Ok(u64::MAX);
    }
    let aligned = most - most % SEGMENT_ALIGN_BYTES;
    let segment = if aligned > 0 { aligned } else { most };
    if segment == 0 || len_bytes.div_ceil(segment) > MAX_SEGMENTS {
        return Err(FabricError::Limit(format!(
            "{len_bytes} bytes need more than {MAX_SEGMENTS} memory regions of at most {most} bytes, the device's limit"
        )));
    }
    Ok(segment)
}

fn register_all(devices: &[Arc<Device>], same: Same, source: &Source) -> Result<Regions, FabricError> {
    let segment = segment_bytes(devices, same.len_bytes)?;
    // What was registered when an error comes is withdrawn by its drop.
    let on_each = devices.iter().map(|device| register_on(device, same, segment, source));
    Ok(Regions { same, segment_bytes: segment, mrs: on_each.collect::<Result<_, _>>()?, flush: None })
}

fn register_on(
    device: &Device,
    same: Same,
    segment_bytes: u64,
    source: &Source,
) -> Result<Vec<Mr>, FabricError> {
    let mut mrs = Vec::new();
    let mut done = 0;
    while done < same.len_bytes {
        let len = segment_bytes.min(same.len_bytes - done);
        let addr = same.addr + done;
        mrs.push(register_one(device, &device.pd, source, addr, len, same.access)?);
        done += len;
    }
    Ok(mrs)
}

fn register_one(
    device: &Device,
    pd: &Arc<Pd>,
    source: &Source,
    addr: u64,
    len_bytes: u64,
    access: Access,
) -> Result<Mr, FabricError> {
    let made = match source {
        Source::Host => register_host(pd, addr, len_bytes, access),
        Source::Dmabuf { fd, start } => {
            Mr::register_dmabuf(pd, fd.as_fd(), addr - start, len_bytes, addr, access)
        }
        Source::Peer => Mr::register(pd, addr, len_bytes, access),
    };
    made.map_err(|e| explain(device, source, addr, len_bytes, &e))
}

fn register_host(pd: &Arc<Pd>, addr: u64, len_bytes: u64, access: Access) -> Result<Mr, VerbsError> {
    match Mr::register(pd, addr, len_bytes, access) {
        // Memory that this process may only read can still be a source.
        Err(e) if matches!(e.errno, libc::EFAULT | libc::EACCES | libc::EPERM) && !access.remote_write => {
            let read_only = Access { local_write: false, ..access };
            Mr::register(pd, addr, len_bytes, read_only).map_err(|_| e)
        }
        outcome => outcome,
    }
}

impl Vram {
    fn register(&self, devices: &[Arc<Device>], same: Same, gpu: u64) -> Result<Regions, FabricError> {
        let offer = self.offer.as_ref().map_err(|why| {
            FabricError::Unsupported(format!(
                "memory of accelerators cannot be registered here: {why} (NVIDIA's by libcuda are known, ROCm's are not)"
            ))
        })?;
        let pointer = offer.pointer(same.addr, gpu)?;
        offer.register(pointer, same.len_bytes, |source| {
            let mut regions = register_all(devices, same, source)?;
            if same.access.remote_write && (self.always_flush || !offer.orders_writes(pointer)) {
                regions.flush = Some(self.flush_target(same, pointer, source)?);
            }
            tracing::debug!(
                "{} bytes at {:#x} of GPU {}: {source}",
                same.len_bytes,
                same.addr,
                pointer.ordinal
            );
            Ok(regions)
        })
    }

    fn flush_target(
        &self,
        same: Same,
        pointer: Pointer,
        source: &Source,
    ) -> Result<FlushTarget, FabricError> {
        let access = Access { remote_read: true, ..Access::default() };
        let register = |device: &Device, pd: &Arc<Pd>| register_one(device, pd, source, same.addr, 1, access);
        let id = self.flusher.add(pointer.ordinal, same.addr, register)?;
        Ok(FlushTarget { id, flusher: Arc::clone(&self.flusher) })
    }
}

fn withdraw(regions: Regions) -> Result<(), (Regions, VerbsError)> {
    let Regions { same, segment_bytes, mrs, flush } = regions;
    let mut kept = Vec::new();
    let mut error = None;
    for device in mrs {
        let mut stay = Vec::new();
        for mr in device {
            if let Err((mr, e)) = mr.deregister() {
                stay.push(mr);
                error = Some(e);
            }
        }
        kept.push(stay);
    }
    match error {
        None => Ok(()),
        Some(e) => Err((Regions { same, segment_bytes, mrs: kept, flush }, e)),
    }
}

/// Says what is wrong with a registration, as far as this process can tell.
fn explain(device: &Device, source: &Source, addr: u64, len_bytes: u64, e: &VerbsError) -> FabricError {
    let what = format!("device {}: registering {len_bytes} bytes at {addr:#x}: {e}", device.name);
    let hint = match e.errno {
        libc::EOPNOTSUPP => "; library, kernel or driver do not take dma-bufs".to_owned(),
        libc::EFAULT if matches!(source, Source::Peer) => {
            "; the module for peer memory does not take these addresses".to_owned()
        }
        _ if !matches!(source, Source::Host) => String::new(),
        libc::ENOMEM => {
            let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
            match limit {
                Some(limit) => format!(
                    "; RLIMIT_MEMLOCK is {limit} bytes and registered memory is locked: raise it (ulimit -l unlimited, \
                     LimitMEMLOCK=infinity, or the container's setting)"
                ),
                None => format!(
                    "; RLIMIT_MEMLOCK is unlimited, so the device is out of memory regions (limit {}) or the host out of memory",
                    device.attr.max_mr
                ),
            }
        }
        libc::EFAULT => "; the range is not mapped, or not with the access that is asked for".to_owned(),
        libc::EINVAL => "; the device refuses this range (length, alignment or kind of memory)".to_owned(),
        _ => String::new(),
    };
    FabricError::System(format!("{what}{hint}"))
}

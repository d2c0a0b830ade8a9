//! Memory of accelerators: whether it can be registered here, and how.
//!
//! Two ways. *dma-buf*: the GPU's driver exports a range as a descriptor that the NIC's driver takes. *Peer memory*: a kernel module
//! makes ordinary registration accept addresses of a GPU. Written against a fake libcuda; no machine with a GPU has run it yet.

use crate::cuda::{Cuda, Pointer};
use crate::rail::Device;
use baton_fabric::FabricError;
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Modules with which ordinary registration takes a GPU's addresses.
const PEER_MODULES: [&str; 2] = ["nvidia_peermem", "nv_peer_mem"];

/// Where accelerators are looked for.
pub struct Accelerators {
    /// libcuda, or why there is none.
    pub cuda: Result<Cuda, String>,
    /// What `/proc/modules` says.
    pub kernel_modules: String,
}

impl Accelerators {
    /// Those of this host.
    pub fn of_host() -> Accelerators {
        Accelerators {
            cuda: Cuda::open().map_err(|e| e.to_string()),
            // Without it no module is known to be loaded.
            kernel_modules: std::fs::read_to_string("/proc/modules").unwrap_or_default(),
        }
    }

    /// None.
    pub fn none(why: &str) -> Accelerators {
        Accelerators { cuda: Err(why.to_owned()), kernel_modules: String::new() }
    }
}

/// A way of registering one range.
pub(crate) enum Source {
    /// Memory of this process.
    Host,
    /// A dma-buf that begins with the byte at `start`.
    Dmabuf {
        /// Closed after the registration; the memory regions keep what they need of it.
        fd: OwnedFd,
        start: u64,
    },
    /// Addresses of a GPU, by a kernel module.
    Peer,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Source::Host => "host memory",
            Source::Dmabuf { .. } => "dma-buf",
            Source::Peer => "peer memory",
        })
    }
}

/// That memory of accelerators can be registered with every device in use.
pub(crate) struct Offer {
    cuda: Cuda,
    gpus: i32,
    /// Why not, where not. One of the two is possible.
    dmabuf: Result<(), String>,
    peer: Result<(), String>,
}

impl Offer {
    /// Looks without any buffer of the host's: libcuda starts and has a GPU; and either every GPU exports dma-bufs and every
    /// RDMA device takes them, or a module for peer memory is loaded. The error says what is missing.
    pub fn probe(found: Accelerators, devices: &[Arc<Device>]) -> Result<Offer, String> {
        let cuda = found.cuda?;
        let gpus = cuda.devices().map_err(|e| e.to_string())?;
        if gpus <= 0 {
            return Err("libcuda has no device".to_owned());
        }
        let dmabuf = (0..gpus).try_for_each(|gpu| cuda.exports_dmabuf(gpu)).and_then(|()| {
            devices.iter().try_for_each(|device| {
                device.pd.takes_dmabuf().map_err(|e| {
                    format!(
                        "device {} takes no dma-bufs ({e}: rdma-core, kernel or driver are too old)",
                        device.name
                    )
                })
            })
        });
        let loaded = |module: &str| {
            found.kernel_modules.lines().any(|line| line.split_whitespace().next() == Some(module))
        };
        let peer = if PEER_MODULES.into_iter().any(loaded) {
            Ok(())
        } else {
            Err(format!("no {} in /proc/modules", PEER_MODULES.join(" or ")))
        };
        match (&dmabuf, &peer) {
            (Err(dmabuf), Err(peer)) => Err(format!("dma-buf: {dmabuf}; peer memory: {peer}")),
            _ => Ok(Offer { cuda, gpus, dmabuf, peer }),
        }
    }

    /// The GPU that an address belongs to.
    pub fn pointer(&self, addr: u64, device: u64) -> Result<Pointer, FabricError> {
        let pointer = self.cuda.pointer(addr).map_err(|why| {
            FabricError::Invalid(format!("{addr:#x} cannot be registered as memory of GPU {device}: {why}"))
        })?;
        if i64::from(pointer.ordinal) != device as i64 {
            tracing::debug!(
                "memory at {addr:#x} is said to be GPU {device}'s and is GPU {}'s",
                pointer.ordinal
            );
        }
        Ok(pointer)
    }

    /// Whether nobody needs to flush what a NIC wrote.
    pub fn orders_writes(&self, pointer: Pointer) -> bool {
        self.cuda.orders_writes(pointer.ordinal)
    }

    /// Registers with the first way that works.
    pub fn register<T>(
        &self,
        pointer: Pointer,
        len_bytes: u64,
        mut with: impl FnMut(&Source) -> Result<T, FabricError>,
    ) -> Result<T, FabricError> {
        let mut whys = Vec::new();
        let tried = self.dmabuf.clone().and_then(|()| {
            let source = self.dmabuf(pointer, len_bytes)?;
            with(&source).map_err(|e| e.to_string())
        });
        match tried {
            Ok(made) => {
                self.cuda.synchronise_copies(pointer);
                return Ok(made);
            }
            Err(why) => whys.push(format!("dma-buf: {why}")),
        }
        let tried = self.peer.clone().and_then(|()| with(&Source::Peer).map_err(|e| e.to_string()));
        match tried {
            Ok(made) => {
                self.cuda.synchronise_copies(pointer);
                return Ok(made);
            }
            Err(why) => whys.push(format!("peer memory: {why}")),
        }
        Err(FabricError::System(format!(
            "{len_bytes} bytes at {:#x} of GPU {} cannot be registered: {}",
            pointer.addr,
            pointer.ordinal,
            whys.join("; ")
        )))
    }

    /// The pages around a buffer as a dma-buf: the driver exports whole pages only.
    fn dmabuf(&self, pointer: Pointer, len_bytes: u64) -> Result<Source, String> {
        let page = rustix::param::page_size() as u64;
        let start = pointer.addr - pointer.addr % page;
        let end = (pointer.addr + len_bytes).checked_next_multiple_of(page);
        let end = end.ok_or_else(|| "it ends at the end of the address space".to_owned())?;
        let fd = self.cuda.export(pointer, start, end - start).map_err(|e| e.to_string())?;
        Ok(Source::Dmabuf { fd, start })
    }

    /// What is offered, for people.
    pub fn describe(&self) -> String {
        let way = |way: &Result<(), String>| match way {
            Ok(()) => "yes".to_owned(),
            Err(why) => format!("no ({why})"),
        };
        format!("{} GPUs; dma-buf {}; peer memory {}", self.gpus, way(&self.dmabuf), way(&self.peer))
    }
}

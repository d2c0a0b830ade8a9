//! Another process (or another fabric of this one): whether it can be reached, and what is shared with it.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use baton_fabric::FabricError;
use serde::{Deserialize, Serialize};

use super::door::Door;
use super::shared::Sources;
use super::sys;
use crate::regions::{Header, TABLE_MAGIC};

/// What `Fabric::address` carries.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FabricAddress {
    pub boot_id: String,
    pub pid_namespace: String,
    pub pid: i32,
    pub start_time: u64,
    pub uid: u32,
    /// Random instance of the region table, in hexadecimal.
    pub instance: String,
    /// Address of the region table, which begins with the instance.
    pub table: u64,
    pub door_fd: i32,
    pub event_fd: i32,
}

/// What `create_endpoint` returns for the peer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndpointAddress {
    pub fabric: FabricAddress,
    pub slot: u32,
    pub depth: u64,
    pub ring_fd: i32,
    /// Address of the endpoint's stamp: the instance, then `token` while the endpoint lives.
    pub stamp: u64,
    pub token: u64,
}

/// Lower-case hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

impl FabricAddress {
    fn instance(&self) -> Option<[u8; 16]> {
        let text = self.instance.as_bytes();
        if text.len() != 32 {
            return None;
        }
        let mut out = [0; 16];
        for (byte, pair) in out.iter_mut().zip(text.chunks(2)) {
            *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
        }
        Some(out)
    }
}

/// More than this to pull is worth another thread ([`super::send::load`]).
pub const HEAVY_LOAD: u64 = 1 << 20;

/// The load outstanding on several endpoints. Heavy from a megabyte on, and then until nothing is left.
#[derive(Default)]
pub struct Backlog {
    load: AtomicU64,
    heavy: AtomicBool,
}

impl Backlog {
    /// Adds `by`, modulo 2^64; `true` if that ended a heavy backlog.
    pub fn change(&self, by: u64) -> bool {
        if by == 0 {
            return false;
        }
        let now = self.load.fetch_add(by, Ordering::Relaxed).wrapping_add(by);
        if now > HEAVY_LOAD {
            self.heavy.store(true, Ordering::Relaxed);
        }
        now == 0 && self.heavy.swap(false, Ordering::Relaxed)
    }

    pub fn is_heavy(&self) -> bool {
        self.heavy.load(Ordering::Relaxed)
    }
}

/// A fabric on this host whose memory can be read from here.
pub struct Peer {
    pub pid: i32,
    pub instance: [u8; 16],
    /// Address of its region table.
    pub table: u64,
    pub door: Door,
    pub pidfd: OwnedFd,
    /// Tells this peer's pidfd in the event set.
    pub token: u64,
    /// READs outstanding towards it.
    pub reads: Backlog,
    /// Its managed regions that are mapped here.
    pub sources: Sources,
    dead: AtomicBool,
}

impl Peer {
    /// Probes a peer and maps its door. `own` is this fabric's address. The error is the reason for the log.
    pub fn open(own: &FabricAddress, peer: &FabricAddress, token: u64) -> Result<Peer, String> {
        let instance = probe_identity(own, peer)?;
        let pid = peer.pid;
        let pidfd = sys::pidfd_open(pid).map_err(|e| format!("no process {pid} here (pidfd_open: {e})"))?;
        let start = sys::start_time(pid).map_err(|e| format!("process {pid} cannot be looked at: {e}"))?;
        if start != peer.start_time || sys::has_ended(&pidfd) {
            return Err(format!("process {pid} is not the peer any more: the peer has ended"));
        }
        check_header(pid, peer.table, instance)?;
        let fetch = |what: &str, fd: i32| {
            sys::pidfd_getfd(pidfd.as_fd(), fd)
                .map_err(|e| format!("the {what} of process {pid} cannot be fetched (pidfd_getfd: {e})"))
        };
        let page = fetch("door", peer.door_fd)?;
        let event = fetch("doorbell", peer.event_fd)?;
        let door = Door::open(&page, event).map_err(|e| format!("the door of process {pid}: {e}"))?;
        let (reads, sources, dead) = (Backlog::default(), Sources::default(), AtomicBool::new(false));
        Ok(Peer { pid, instance, table: peer.table, door, pidfd, token, reads, sources, dead })
    }

    /// Fetches a descriptor of the peer's.
    pub fn fetch(&self, fd: i32) -> Result<OwnedFd, FabricError> {
        sys::pidfd_getfd(self.pidfd.as_fd(), fd)
            .map_err(|e| FabricError::Peer(format!("descriptor {fd} of process {}: {e}", self.pid)))
    }

    pub fn matches(&self, address: &FabricAddress) -> bool {
        self.pid == address.pid && Some(self.instance) == address.instance()
    }

    /// Found out earlier that the process has ended; costs nothing.
    pub fn is_known_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }

    /// Asks the kernel whether the process has ended.
    pub fn is_dead(&self) -> bool {
        if !self.is_known_dead() && sys::has_ended(&self.pidfd) {
            self.dead.store(true, Ordering::Release);
        }
        self.is_known_dead()
    }
}

fn probe_identity(own: &FabricAddress, peer: &FabricAddress) -> Result<[u8; 16], String> {
    if own.boot_id != peer.boot_id {
        return Err(format!("another host (boot id {}, here {})", peer.boot_id, own.boot_id));
    }
    if own.pid_namespace != peer.pid_namespace {
        return Err(format!(
            "another pid namespace (its {}, here {}): processes do not see each other",
            peer.pid_namespace, own.pid_namespace
        ));
    }
    if peer.pid <= 0 || peer.door_fd < 0 || peer.event_fd < 0 {
        return Err(format!("nonsense in the peer's address: {peer:?}"));
    }
    peer.instance().ok_or_else(|| format!("nonsense as instance in the peer's address: {}", peer.instance))
}

/// Reads the header of the peer's region table: proves both that memory can be read and whose it is.
fn check_header(pid: i32, table: u64, instance: [u8; 16]) -> Result<(), String> {
    const _: () = assert!(size_of::<Header>() == 24);
    let [magic, low, high] = sys::vm_read_words::<3>(pid, table).map_err(|errno| {
        let text = format!(
            "memory of process {pid} cannot be read (process_vm_readv: {})",
            sys::errno_text(errno)
        );
        let scope = sys::yama_scope();
        match errno {
            libc::EPERM if scope == 1 => format!(
                "{text}; kernel.yama.ptrace_scope is 1, so both processes need BATON_PTRACE=any for this fabric"
            ),
            libc::EPERM if scope > 1 => {
                format!("{text}; kernel.yama.ptrace_scope is {scope}: BATON_PTRACE=any helps only with 1")
            }
            libc::EPERM => format!("{text}; same user and same capabilities are needed"),
            _ => text,
        }
    })?;
    let mut found = [0; 16];
    found[..8].copy_from_slice(&low.to_ne_bytes());
    found[8..].copy_from_slice(&high.to_ne_bytes());
    if magic != TABLE_MAGIC || found != instance {
        return Err(format!(
            "process {pid} does not hold the instance {}: another one since",
            hex(&instance)
        ));
    }
    Ok(())
}

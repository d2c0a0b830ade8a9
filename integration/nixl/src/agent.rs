//! One NIXL backend engine: an engine of Baton and the requests that NIXL holds on it.

use std::collections::HashSet;
use std::ffi::c_void;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use baton_host::abi::{BATON_ACCESS_REMOTE_READ, BATON_ACCESS_REMOTE_WRITE, BATON_MEM_DRAM, BATON_MEM_VRAM};
use baton_host::{BatonMemory, Desc, Engine, EngineOptions, LogTo, MemoryKind, Op, Transfer};

use crate::status::Status;
use crate::{log, options};

pub(crate) use baton_host::Op as Operation;

/// One half of a pair of a transfer, as the glue hands it over.
pub(crate) type Piece = Desc;

/// How long `connect` waits: NIXL calls it under its own lock, and only hosts that want to know at once call it.
const CONNECT_WAIT: Duration = Duration::from_secs(5);

/// Why a call was refused: the status for NIXL, the sentence for people.
#[derive(Debug)]
pub(crate) struct Refused {
    pub(crate) status: Status,
    pub(crate) reason: String,
}

impl Refused {
    pub(crate) fn new(status: Status, reason: impl Into<String>) -> Refused {
        Refused { status, reason: reason.into() }
    }
}

impl From<baton_host::Error> for Refused {
    fn from(error: baton_host::Error) -> Refused {
        Refused { status: error.code.into(), reason: error.to_string() }
    }
}

/// A request on the heap; NIXL holds its address. Empty only while it is being released.
struct Request {
    transfer: Option<Transfer>,
}

/// Everything behind one backend engine of NIXL. All calls may come from several threads at once.
pub(crate) struct Agent {
    name: String,
    engine: Engine,
    /// Requests not yet released. A NIXL agent that goes away releases none of them, and each keeps its engine alive.
    live: Mutex<HashSet<usize>>,
}

impl Agent {
    pub(crate) fn create(
        name: &str,
        params: Vec<(String, String)>,
        progress_thread: bool,
    ) -> Result<Agent, Refused> {
        let agent_name = name.to_owned();
        let sink = move |level, target: &str, message: &str| log::record(&agent_name, level, target, message);
        // Hosts feed our own list of parameters back. What it says anyway keeps its true source; empty is how it shows
        // "no value".
        let listed = options::with_defaults();
        let fed_back = |(name, value): &(String, String)| listed.iter().any(|(n, v)| n == name && v == value);
        let options = EngineOptions::new(name)
            .params(params.into_iter().filter(|given| !given.1.is_empty() && !fed_back(given)))
            .progress_thread(progress_thread)
            .log(LogTo::Function(Box::new(sink)));
        let engine = Engine::open(options)
            .map_err(|error| Refused { status: error.code().into(), reason: error.to_string() })?;
        log::set_level(engine.choice().value("log").unwrap_or_default());
        Ok(Agent { name: name.to_owned(), engine, live: Mutex::default() })
    }

    /// Whether memory of accelerators can be registered.
    pub(crate) fn takes_vram(&self) -> bool {
        self.engine.takes(MemoryKind::Vram).unwrap_or(false)
    }

    pub(crate) fn register(
        &self,
        addr: u64,
        len: u64,
        device: u64,
        kind: MemoryKind,
    ) -> Result<u64, Refused> {
        let memory = BatonMemory {
            addr,
            len_bytes: len,
            device,
            kind: match kind {
                MemoryKind::Dram => BATON_MEM_DRAM,
                MemoryKind::Vram => BATON_MEM_VRAM,
            },
            access: BATON_ACCESS_REMOTE_READ | BATON_ACCESS_REMOTE_WRITE,
        };
        // SAFETY: NIXL's contract: registered memory stays mapped until deregisterMem.
        Ok(unsafe { self.engine.register_raw(&memory) }?)
    }

    pub(crate) fn deregister(&self, region: u64) -> Result<(), Refused> {
        Ok(self.engine.deregister_raw(region)?)
    }

    pub(crate) fn export(&self, region: u64) -> Result<Vec<u8>, Refused> {
        Ok(self.engine.export_raw(region)?)
    }

    pub(crate) fn import(&self, peer: &str, blob: &[u8]) -> Result<u64, Refused> {
        Ok(self.engine.import_raw(peer, blob)?)
    }

    /// Our own registration as the far side of a self transfer.
    pub(crate) fn import_own(&self, region: u64) -> Result<u64, Refused> {
        let blob = self.engine.export_raw(region)?;
        Ok(self.engine.import_raw(&self.name, &blob)?)
    }

    pub(crate) fn unload(&self, remote_region: u64) -> Result<(), Refused> {
        Ok(self.engine.release_remote_raw(remote_region)?)
    }

    pub(crate) fn conn_info(&self) -> Result<Vec<u8>, Refused> {
        Ok(self.engine.conn_info()?)
    }

    pub(crate) fn load_remote(&self, peer: &str, info: &[u8]) -> Result<(), Refused> {
        Ok(self.engine.load_remote(peer, info)?)
    }

    /// NIXL connects every engine to itself, which needs nothing. A peer that is still being connected to when the
    /// wait ends goes on connecting: the first post will use what comes of it.
    pub(crate) fn connect(&self, peer: &str) -> Result<(), Refused> {
        if peer != self.name {
            self.engine.connect(peer, CONNECT_WAIT)?;
        }
        Ok(())
    }

    pub(crate) fn disconnect(&self, peer: &str) -> Result<(), Refused> {
        if peer != self.name {
            self.engine.disconnect(peer)?;
        }
        Ok(())
    }

    pub(crate) fn prepare(
        &self,
        op: Op,
        peer: &str,
        local: &[Piece],
        remote: &[Piece],
    ) -> Result<*mut c_void, Refused> {
        let transfer = self.engine.create_xfer(op, peer, local, remote)?;
        let request = Box::into_raw(Box::new(Request { transfer: Some(transfer) }));
        self.live().insert(request.expose_provenance());
        Ok(request.cast())
    }

    /// # Safety
    /// `request` is from [`Agent::prepare`] of this agent and not released.
    pub(crate) unsafe fn post(
        &self,
        request: *mut c_void,
        message: Option<&[u8]>,
    ) -> Result<Status, Refused> {
        // SAFETY: promised by the caller.
        let transfer = unsafe { transfer(request) }?;
        Ok(transfer.post(message)?.into())
    }

    /// # Safety
    /// As [`Agent::post`].
    pub(crate) unsafe fn check(&self, request: *mut c_void) -> Result<Status, Refused> {
        // SAFETY: promised by the caller.
        let transfer = unsafe { transfer(request) }?;
        Ok(transfer.status()?.into())
    }

    /// Frees the request, or answers that its memory may still be touched; the attempt is then a cancel.
    ///
    /// # Safety
    /// As [`Agent::post`], and nobody else uses the request at the same time.
    pub(crate) unsafe fn release(&self, request: *mut c_void) -> Result<Status, Refused> {
        let request = request.cast::<Request>();
        // SAFETY: promised by the caller.
        let place = unsafe { &mut (*request).transfer };
        if let Some(Err(still)) = place.take().map(Transfer::release) {
            *place = Some(still);
            return Ok(Status::RepostActive);
        }
        self.live().remove(&request.addr());
        // SAFETY: made by `prepare`, and forgotten by NIXL from here on.
        drop(unsafe { Box::from_raw(request) });
        Ok(Status::Success)
    }

    pub(crate) fn send_notification(&self, peer: &str, message: &[u8]) -> Result<(), Refused> {
        Ok(self.engine.notify(peer, message)?)
    }

    /// Hands over what has come, oldest first per peer.
    pub(crate) fn take_notifications(
        &self,
        mut put: impl FnMut(&[u8], &[u8]) -> Result<(), Refused>,
    ) -> Result<(), Refused> {
        for notification in self.engine.notifications()? {
            put(notification.peer.as_bytes(), &notification.message)?;
        }
        Ok(())
    }

    fn live(&self) -> MutexGuard<'_, HashSet<usize>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        for address in std::mem::take(&mut *self.live()) {
            // SAFETY: made by `prepare`, not released; its NIXL agent is gone, so nobody uses it any more.
            drop(unsafe { Box::from_raw(std::ptr::with_exposed_provenance_mut::<Request>(address)) });
        }
    }
}

/// # Safety
/// `request` is from [`Agent::prepare`] and not released, and is not being released.
unsafe fn transfer<'call>(request: *mut c_void) -> Result<&'call Transfer, Refused> {
    // SAFETY: promised by the caller.
    let transfer = unsafe { &(*request.cast::<Request>()).transfer };
    transfer.as_ref().ok_or_else(|| Refused::new(Status::InvalidParam, "the request was released"))
}

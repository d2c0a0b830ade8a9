//! Transfers: what the host builds, posts and asks about.

use crate::engine::Driver;
use crate::err;
use crate::error::{Code, Error, Result};
use crate::peer::Peer;
use crate::region::Mr;
use crate::shared::Shared;
use crate::transfer::{RemoteSide, Status, Target, Told, Xfer};
use baton_core::notify::Tell;
use baton_core::peer::EndReason;
use baton_core::plan::{Pair, Plan, PlanError, PlanLimits, check_span};
use baton_core::registry::{RegionHandle, ResolveError, Resolved};
use baton_core::spare::Spare;
use baton_fabric::{Memory, MemoryKind, Op};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// One piece of a transfer, as in the ABI.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Desc {
    /// First byte.
    pub addr: u64,
    /// Length.
    pub len_bytes: u64,
    /// Handle of the region.
    pub region: u64,
    /// Must be zero.
    pub reserved: u64,
}

/// In place of a region's handle: memory that is not registered. Only the two-sided backend takes it.
pub const NO_REGION: u64 = 0;

/// In place of the index of a local region: memory that is not registered.
pub(crate) const UNREGISTERED: u32 = u32::MAX;

fn resolve_error(e: ResolveError) -> Error {
    let code = match &e {
        ResolveError::Stale { .. } => Code::Stale,
        _ => Code::NotFound,
    };
    Error::new(code, e.to_string())
}

pub(crate) fn plan_error(e: PlanError) -> Error {
    let code = match &e {
        PlanError::Overflow { .. } => Code::InvalidParam,
        PlanError::TooManyPieces { .. } => Code::Limit,
    };
    Error::new(code, e.to_string())
}

impl Driver {
    /// Builds a transfer.
    pub fn create_xfer(&self, op: Op, peer: &str, local: &[Desc], remote: &[Desc]) -> Result<Arc<Xfer>> {
        let shared = &self.shared;
        shared.usable()?;
        if local.len() != remote.len() {
            return Err(err!(
                InvalidParam,
                "{} local and {} remote descriptors: the lists must be equally long",
                local.len(),
                remote.len()
            ));
        }
        let target = shared.target(peer)?;
        let mut build =
            Build { shared, op, peer, locals: Side::new(), remotes: Side::new(), unregistered: None };
        let mut pairs = Spare::with_capacity(local.len());
        for (index, (l, r)) in local.iter().zip(remote).enumerate() {
            pairs.push(build.pair(index, l, r)?);
        }
        let plan = Plan::build_from(op, pairs, shared.plan_limits()).map_err(plan_error)?;
        let Build { locals, remotes, unregistered, .. } = build;
        shared.build_xfer(op, target, plan, locals.regions, remotes.regions, unregistered)
    }

    /// [`Driver::post_telling`] with a message, or with nothing to tell.
    pub fn post(&self, xfer: &Arc<Xfer>, message: Option<&[u8]>) -> Result<()> {
        self.post_telling(xfer, Tell::message(message))
    }

    /// Starts a transfer. Never blocks and never copies bulk data.
    pub fn post_telling(&self, xfer: &Arc<Xfer>, tell: Tell<'_>) -> Result<()> {
        let shared = &self.shared;
        shared.usable()?;
        self.check_own(xfer)?;
        xfer.begin()?;
        let posted = match &xfer.target {
            Target::Own => shared.admit_own(tell).map(|()| {
                *xfer.told.lock() = Some(Told::keep(tell));
                shared.self_copies.submit(Arc::clone(xfer));
            }),
            Target::Peer(peer) => shared.post_to(peer, xfer, tell),
        };
        if let Err(e) = &posted {
            xfer.finish(Err(e.clone()));
        }
        posted
    }

    /// State of the last post without moving anything on. A request of another engine is refused as a failed one.
    pub fn peek(&self, xfer: &Xfer) -> Status {
        self.check_own(xfer).map_or_else(Status::Failed, |()| xfer.status())
    }

    /// As [`Driver::peek`]; moves work on if it is not over.
    pub fn status(&self, xfer: &Xfer) -> Status {
        if !xfer.is_active() || self.check_own(xfer).is_err() {
            return self.peek(xfer);
        }
        if matches!(xfer.target, Target::Own) {
            self.shared.self_copies.help(&self.shared);
        }
        self.shared.caller_polls();
        xfer.status()
    }

    /// A request means something to the engine that made it alone.
    fn check_own(&self, xfer: &Xfer) -> Result<()> {
        if xfer.owner == self.shared.instance {
            return Ok(());
        }
        Err(err!(
            InvalidParam,
            "the request was made by another engine (instance {}), not by {:?}",
            xfer.owner,
            self.shared.own_name
        ))
    }

    /// Stops a transfer as soon as possible; its state tells when that has happened.
    pub fn cancel(&self, xfer: &Arc<Xfer>) -> Result<()> {
        self.check_own(xfer)?;
        if !xfer.is_active() {
            return Ok(());
        }
        match &xfer.target {
            Target::Own => self.shared.self_copies.cancel(xfer),
            Target::Peer(peer) => self.shared.cancel_at(peer, xfer),
        }
        Ok(())
    }

    /// Whether the transfer may be freed; if not it is cancelled and the answer is BUSY.
    pub fn release(&self, xfer: &Arc<Xfer>) -> Result<()> {
        self.check_own(xfer)?;
        if matches!(self.status(xfer), Status::InProgress) {
            self.cancel(xfer)?;
            self.shared.poll();
        }
        if xfer.is_active() {
            return Err(err!(
                Busy,
                "memory of the transfer may still be touched; it is being cancelled, release it again"
            ));
        }
        Ok(())
    }
}

impl Shared {
    fn post_to(self: &Arc<Self>, peer: &Arc<Peer>, xfer: &Arc<Xfer>, tell: Tell<'_>) -> Result<()> {
        let now = self.clock.now();
        let mut state = peer.state.lock();
        // Under the lock: who unbinds a peer says so first and then fails what waits, and nobody looks after one that is forgotten.
        if !peer.bound.load(Ordering::Acquire) {
            return Err(err!(
                NotFound,
                "{} ({}) was disconnected or replaced; build a new request from its current metadata",
                peer.name(),
                peer.instance
            ));
        }
        let by_the_way = state.outgoing().is_some_and(|channel| channel.refuses(xfer));
        if by_the_way {
            // The fabric that was there may be back: the session begins anew, with whatever reaches the peer now.
            let why = "a transfer needs a fabric that takes it".into();
            self.end_epoch(peer, &mut state, EndReason::PeerFenced(why));
        }
        if state.outgoing().is_some() {
            state.submit(now, xfer, tell)?;
            self.pump_at(now, peer, &mut state);
            drop(state);
            self.host_calls.post();
            self.spinner.kick();
            return Ok(());
        }
        state.admit_waiting(tell.message_len())?;
        *xfer.told.lock() = Some(Told::keep(tell));
        if state.waiting.is_empty() {
            state.waiting_until = self.connect_deadline();
        }
        state.waiting.push_back(Arc::clone(xfer));
        self.connect_if_wanted(peer, &mut state);
        Ok(())
    }

    fn cancel_at(self: &Arc<Self>, peer: &Arc<Peer>, xfer: &Arc<Xfer>) {
        let mut state = peer.state.lock();
        if let Some(at) = state.waiting.iter().position(|other| Arc::ptr_eq(other, xfer)) {
            state.waiting.remove(at);
            xfer.told.lock().take();
            return xfer.finish_cancelled();
        }
        let Some(token) = state.token_of(xfer) else { return };
        match state.conn.channel() {
            Some(channel) => channel.cancel(token as u64),
            None => state.rest.cancelled.push(token as u64),
        }
        self.pump(peer, &mut state);
    }
}

/// One side of a transfer or block list being built: its distinct regions, and the one used last.
pub(crate) struct Side<R> {
    pub(crate) regions: Vec<R>,
    by_handle: HashMap<u64, u32>,
    last: Option<(u64, u32)>,
}

impl<R> Side<R> {
    pub(crate) fn new() -> Side<R> {
        Side { regions: Vec::new(), by_handle: HashMap::new(), last: None }
    }

    /// Index of a region in the transfer's table. Lists mostly stay in one region for long runs.
    pub(crate) fn index(&mut self, handle: u64, find: impl FnOnce() -> Result<R>) -> Result<u32> {
        if let Some((last, index)) = self.last
            && last == handle
        {
            return Ok(index);
        }
        let index = match self.by_handle.get(&handle) {
            Some(index) => *index,
            None => {
                self.regions.push(find()?);
                let index = self.regions.len() as u32 - 1;
                self.by_handle.insert(handle, index);
                index
            }
        };
        self.last = Some((handle, index));
        Ok(index)
    }
}

struct Build<'a> {
    shared: &'a Arc<Shared>,
    op: Op,
    peer: &'a str,
    locals: Side<Arc<Mr>>,
    remotes: Side<RemoteSide>,
    unregistered: Option<(u64, u64)>,
}

impl Build<'_> {
    fn pair(&mut self, index: usize, local: &Desc, remote: &Desc) -> Result<Pair> {
        let at = |e: Error| Error::new(e.code, format!("descriptor {index}: {e}"));
        if local.len_bytes != remote.len_bytes {
            return Err(err!(
                InvalidParam,
                "descriptor {index}: {} local and {} remote bytes; both must be equal",
                local.len_bytes,
                remote.len_bytes
            ));
        }
        if local.reserved != 0 || remote.reserved != 0 {
            return Err(err!(InvalidParam, "descriptor {index}: reserved fields must be 0"));
        }
        let shared = self.shared;
        let l = match local.region {
            NO_REGION if shared.config.backends.two_sided => UNREGISTERED,
            _ => self.locals.index(local.region, || shared.own_region(local.region)).map_err(at)?,
        };
        let (op, peer) = (self.op, self.peer);
        let find = || {
            let side = shared.remote_side(peer, remote.region)?;
            side.check_permits(op).map(|()| side)
        };
        let r = self.remotes.index(remote.region, find).map_err(at)?;
        if l == UNREGISTERED {
            self.unregistered = Some((local.addr, local.len_bytes));
        } else {
            let memory = &self.locals.regions[l as usize].region.memory;
            check_span(local.addr, local.len_bytes, memory.addr, memory.len_bytes)
                .map_err(|e| err!(InvalidParam, "descriptor {index}, local: {e}"))?;
        }
        let (base, bytes) = self.remotes.regions[r as usize].span();
        check_span(remote.addr, remote.len_bytes, base, bytes)
            .map_err(|e| err!(InvalidParam, "descriptor {index}, remote: {e}"))?;
        Ok(Pair {
            local_addr: local.addr,
            remote_addr: remote.addr,
            len_bytes: local.len_bytes,
            local: l,
            remote: r,
        })
    }
}

impl Shared {
    pub(crate) fn own_region(&self, handle: u64) -> Result<Arc<Mr>> {
        let found = self.regions.read().get(&handle).cloned();
        let found =
            found.ok_or_else(|| err!(NotFound, "local region {handle:#x} is not registered (any more)"))?;
        found.check_registered().map(|()| found)
    }

    /// What a handle of a region of that agent names.
    pub(crate) fn remote_side(&self, peer: &str, handle: u64) -> Result<RemoteSide> {
        let resolved = self.registry.read().resolve(RegionHandle(handle)).map_err(resolve_error)?;
        let owner = match &resolved {
            Resolved::Remote(region) => Arc::clone(&region.name),
            Resolved::Own(_) => self.own_name(),
        };
        if *owner != *peer {
            return Err(err!(
                InvalidParam,
                "remote region {handle:#x} belongs to agent {owner:?}, not to {peer:?}"
            ));
        }
        match resolved {
            Resolved::Remote(region) => Ok(RemoteSide::Peer(region)),
            Resolved::Own(region) => self.own_region(region.handle.0).map(RemoteSide::Own),
        }
    }

    /// Where transfers to that agent go.
    pub(crate) fn target(&self, peer: &str) -> Result<Target> {
        Ok(if *peer == *self.own_name { Target::Own } else { Target::Peer(self.peer_named(peer)?) })
    }

    pub(crate) fn plan_limits(&self) -> PlanLimits {
        PlanLimits { max_chunk_bytes: self.config.chunk_bytes, ..PlanLimits::default() }
    }

    /// A transfer of a plan. With a session its templates are made at once, without holding up what is posted meanwhile.
    pub(crate) fn build_xfer(
        &self,
        op: Op,
        target: Target,
        plan: Plan,
        locals: Vec<Arc<Mr>>,
        remotes: Vec<RemoteSide>,
        unregistered: Option<(u64, u64)>,
    ) -> Result<Arc<Xfer>> {
        if matches!(target, Target::Own) {
            self.refuse_vram(&locals, &remotes)?;
        }
        let mut xfer = Xfer::new(self.instance, op, target, plan, locals, remotes);
        xfer.unregistered = unregistered;
        let xfer = Arc::new(xfer);
        if let Target::Peer(peer) = &xfer.target {
            let lanes = peer
                .state
                .lock()
                .outgoing()
                .and_then(|channel| channel.one_sided.as_ref().map(|one| Arc::clone(&one.lanes)));
            // A session over which it cannot go says so at its post; the next may be over another fabric.
            if let Some(Err(e)) = lanes.map(|lanes| lanes.prepare(&xfer)) {
                tracing::debug!("a transfer to {} is not prepared yet: {e}", peer.name());
            }
        }
        Ok(xfer)
    }

    /// Transfers within the engine are copied by the CPU, which cannot reach the memory of an accelerator.
    fn refuse_vram(&self, locals: &[Arc<Mr>], remotes: &[RemoteSide]) -> Result<()> {
        let remotes = remotes.iter().filter_map(|side| match side {
            RemoteSide::Own(mr) => Some(mr),
            RemoteSide::Peer(_) => None,
        });
        let vram = locals.iter().chain(remotes).find(|mr| mr.region.memory.kind == MemoryKind::Vram);
        let Some(mr) = vram else { return Ok(()) };
        let Memory { addr, len_bytes, device, .. } = mr.region.memory;
        Err(err!(
            Unsupported,
            "a transfer of {:?} to itself with region {:#x}, {len_bytes} bytes at {addr:#x} of accelerator {device}: \
             within an engine only host memory is copied; use the accelerator's own copy (cudaMemcpy)",
            self.own_name,
            mr.region.handle.0
        ))
    }
}

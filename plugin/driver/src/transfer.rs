//! A prepared transfer as the host holds it.

use crate::err;
use crate::error::{Code, Error, Result};
use crate::peer::Peer;
use crate::region::Mr;
use baton_core::notify::Tell;
use baton_core::plan::{Pair, Plan};
use baton_core::prepared::{KeyTable, Prepared};
use baton_core::registry::RemoteRegion;
use baton_core::two_sided::chunks::Piece;
use baton_core::wire::Access;
use baton_core::{Instance, RegionId};
use baton_fabric::{Memory, MemoryKind, Op};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};

/// What a host does about a transfer whose regions are gone.
const REBUILD: &str = "build a new request from current registrations";

const NOT_POSTED: u8 = 0;
const IN_PROGRESS: u8 = 1;
const DONE: u8 = 2;
const FAILED: u8 = 3;
/// Being posted or failed right now, by exactly one thread.
const CLAIMED: u8 = 4;

/// State of the last post.
#[derive(Clone, Debug)]
pub enum Status {
    /// Never posted.
    NotPosted,
    /// Under way.
    InProgress,
    /// Data placed and, if there was a message, it will be delivered.
    Done,
    /// Over; no memory is touched any more.
    Failed(Error),
}

/// Where the bytes go.
pub(crate) enum Target {
    /// Another instance.
    Peer(Arc<Peer>),
    /// This engine itself.
    Own,
}

/// A transfer, built once and posted any number of times. It owns all it needs, so it outlives
/// its peer's name, its remote regions' handles and its session.
pub struct Xfer {
    /// Of the engine that made it.
    pub(crate) owner: Instance,
    pub(crate) op: Op,
    pub(crate) target: Target,
    pub(crate) plan: Plan,
    pub(crate) locals: Vec<Arc<Mr>>,
    pub(crate) remotes: Vec<RemoteSide>,
    /// Address and length of a piece of local memory that is not registered.
    pub(crate) unregistered: Option<(u64, u64)>,
    /// Templates for the link whose generation they carry.
    pub(crate) prepared: Mutex<Option<Arc<Prepared>>>,
    /// What a post tells that waits for a connection, or a self transfer.
    pub(crate) told: Mutex<Option<Told>>,
    /// What the two-sided path makes of the plan.
    pieces: OnceLock<Arc<[Piece]>>,
    state: AtomicU8,
    error: Mutex<Option<Error>>,
}

/// A [`Tell`] that is kept.
#[derive(Default)]
pub(crate) struct Told {
    pub message: Option<Vec<u8>>,
    pub id: Option<u64>,
}

impl Told {
    pub fn keep(tell: Tell<'_>) -> Told {
        Told { message: tell.message.map(<[u8]>::to_vec), id: tell.id }
    }

    pub fn tell(&self) -> Tell<'_> {
        Tell { message: self.message.as_deref(), id: self.id }
    }
}

/// Owner's side of a transfer.
#[derive(Clone)]
pub(crate) enum RemoteSide {
    /// A region that a peer exported.
    Peer(Arc<RemoteRegion>),
    /// One of our own (self transfer).
    Own(Arc<Mr>),
}

impl Xfer {
    pub(crate) fn new(
        owner: Instance,
        op: Op,
        target: Target,
        plan: Plan,
        locals: Vec<Arc<Mr>>,
        remotes: Vec<RemoteSide>,
    ) -> Xfer {
        Xfer {
            owner,
            op,
            target,
            plan,
            locals,
            remotes,
            unregistered: None,
            prepared: Mutex::new(None),
            told: Mutex::new(None),
            pieces: OnceLock::new(),
            state: AtomicU8::new(NOT_POSTED),
            error: Mutex::new(None),
        }
    }

    /// The one-sided path needs keys, which memory that is not registered does not have.
    pub(crate) fn refuse_unregistered(&self) -> Result<()> {
        match self.unregistered {
            None => Ok(()),
            Some((addr, len_bytes)) => Err(err!(
                Unsupported,
                "{len_bytes} bytes at {addr:#x} are not registered, and the session with the peer is one-sided: register the \
                 memory, or use BATON_BACKEND=two-sided on both sides"
            )),
        }
    }

    /// The two-sided path copies with the CPU.
    pub(crate) fn refuse_vram(&self) -> Result<()> {
        let local = self.locals.iter().map(|mr| (mr.region.memory.kind, mr.region.handle.0, "local"));
        let remote = self.remotes.iter().filter_map(|side| match side {
            RemoteSide::Peer(region) => Some((region.blob.kind, region.blob.region.0, "remote")),
            RemoteSide::Own(_) => None,
        });
        match local.chain(remote).find(|(kind, ..)| *kind != MemoryKind::Dram) {
            None => Ok(()),
            Some((kind, region, side)) => Err(err!(
                Unsupported,
                "{side} region {region:#x} is {kind:?}: the two-sided backend copies with the CPU, which reaches host memory only; \
                 use BATON_BACKEND=one-sided"
            )),
        }
    }

    /// The plan for the two-sided path: own addresses, and places in the peer's regions.
    pub(crate) fn pieces(&self) -> Result<Arc<[Piece]>> {
        if let Some(pieces) = self.pieces.get() {
            return Ok(Arc::clone(pieces));
        }
        let regions: Vec<_> = self.remotes.iter().map(RemoteSide::place).collect::<Result<_>>()?;
        let piece = |pair: &Pair| {
            let (region, base) = regions[pair.remote as usize];
            Piece { local: pair.local_addr, region, offset: pair.remote_addr - base, len: pair.len_bytes }
        };
        let pieces = self.plan.disjoint_pieces().iter().map(piece).collect();
        Ok(Arc::clone(self.pieces.get_or_init(|| pieces)))
    }

    /// The state of the last post. Never blocks.
    pub fn status(&self) -> Status {
        match self.state.load(Ordering::Acquire) {
            NOT_POSTED => Status::NotPosted,
            DONE => Status::Done,
            FAILED => Status::Failed(
                self.error.lock().clone().unwrap_or_else(|| err!(Local, "error text was lost")),
            ),
            _ => Status::InProgress,
        }
    }

    /// Whether a post is under way.
    pub fn is_active(&self) -> bool {
        matches!(self.state.load(Ordering::Acquire), IN_PROGRESS | CLAIMED)
    }

    /// Starts a post: from now on the transfer is in progress and pins its local regions.
    pub(crate) fn begin(&self) -> Result<()> {
        let mut current = self.state.load(Ordering::Acquire);
        loop {
            if matches!(current, IN_PROGRESS | CLAIMED) {
                return Err(err!(
                    RepostActive,
                    "the transfer is still in progress; wait for it, or cancel it, before posting it again"
                ));
            }
            match self.state.compare_exchange_weak(current, CLAIMED, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => break,
                Err(now) => current = now,
            }
        }
        match self.pin() {
            Ok(()) => {
                self.state.store(IN_PROGRESS, Ordering::Release);
                Ok(())
            }
            Err(error) => {
                self.conclude(Err(error.clone()));
                Err(error)
            }
        }
    }

    /// Pins every region of this engine, or none.
    fn pin(&self) -> Result<()> {
        self.check_remotes()?;
        for (nth, mr) in self.own_regions().enumerate() {
            if !mr.pin() {
                self.own_regions().take(nth).for_each(|mr| mr.unpin());
                return Err(err!(
                    NotFound,
                    "cannot post the transfer: region {:#x} of it was deregistered; {REBUILD}",
                    mr.region.handle.0
                ));
            }
        }
        Ok(())
    }

    fn own_regions(&self) -> impl Iterator<Item = &Arc<Mr>> {
        self.locals.iter().chain(self.remotes.iter().filter_map(RemoteSide::own))
    }

    /// Whether no owner has withdrawn a region that it needs.
    pub(crate) fn check_remotes(&self) -> Result<()> {
        let withdrawn = |side: &RemoteSide| match side {
            RemoteSide::Peer(region) if region.is_revoked() => {
                Some((region.blob.region.0, region.name.clone()))
            }
            _ => None,
        };
        match self.remotes.iter().find_map(withdrawn) {
            None => Ok(()),
            Some((region, owner)) => Err(err!(
                NotFound,
                "cannot post the transfer: remote region {region:#x} of it was withdrawn by its owner {owner:?}; {REBUILD}"
            )),
        }
    }

    /// Ends a post that `begin` started: unpins and publishes the outcome.
    pub(crate) fn finish(&self, outcome: Result<()>) {
        self.own_regions().for_each(|mr| mr.unpin());
        self.conclude(outcome);
    }

    fn conclude(&self, outcome: Result<()>) {
        let state = match outcome {
            Ok(()) => DONE,
            Err(error) => {
                *self.error.lock() = Some(error);
                FAILED
            }
        };
        self.state.store(state, Ordering::Release);
    }

    /// Whether it moves bytes of one of these regions of its peer.
    pub(crate) fn uses(&self, regions: &[RegionId]) -> bool {
        self.remotes
            .iter()
            .any(|side| matches!(side, RemoteSide::Peer(region) if regions.contains(&region.blob.region)))
    }

    /// Takes the transfer out of a waiting list as cancelled.
    pub(crate) fn finish_cancelled(&self) {
        self.finish(Err(Error::new(Code::Canceled, "the transfer was cancelled before anything was posted")));
    }
}

impl RemoteSide {
    /// The keys with which a session on this fabric names the peer's region in its work requests.
    pub(crate) fn key_table(&self, fabric: &str) -> Result<KeyTable<'_>> {
        let RemoteSide::Peer(region) = self else {
            return Err(err!(Local, "a region of this engine itself has no key for a session"));
        };
        let blob = &region.blob;
        let keys = blob.on(fabric).ok_or_else(|| {
            let known: Vec<_> = blob.fabrics.iter().map(|keys| keys.fabric.as_str()).collect();
            err!(
                Unsupported,
                "remote region {:#x} of {} ({:?}, {} bytes at {:#x}) has no key on fabric {fabric}, which the session \
                 uses, only on: {}; its owner's log says why; let both engines use a fabric that has it (BATON_FABRIC)",
                blob.region.0,
                region.name,
                blob.kind,
                blob.len,
                blob.base,
                known.join(" ")
            )
        })?;
        Ok(KeyTable {
            base: blob.base,
            segment_bytes: keys.segment_bytes,
            rails: keys.rails,
            keys: &keys.keys,
        })
    }

    /// Number and first byte of a peer's region.
    fn place(&self) -> Result<(RegionId, u64)> {
        match self {
            RemoteSide::Peer(region) => Ok((region.blob.region, region.blob.base)),
            RemoteSide::Own(_) => Err(err!(Local, "a region of this engine itself is no peer's")),
        }
    }

    /// Where the region is: first byte and length.
    pub(crate) fn span(&self) -> (u64, u64) {
        match self {
            RemoteSide::Peer(region) => (region.blob.base, region.blob.len),
            RemoteSide::Own(mr) => (mr.region.memory.addr, mr.region.memory.len_bytes),
        }
    }

    /// Whether its owner still has it.
    pub(crate) fn check_usable(&self) -> Result<()> {
        match self {
            RemoteSide::Own(mr) => mr.check_registered(),
            RemoteSide::Peer(region) if !region.is_revoked() => Ok(()),
            RemoteSide::Peer(region) => Err(err!(
                NotFound,
                "remote region {:#x} was deregistered by its owner {:?}",
                region.blob.region.0,
                region.name
            )),
        }
    }

    /// Whether its owner lets peers do that.
    pub(crate) fn check_permits(&self, op: Op) -> Result<()> {
        let (access, id) = match self {
            RemoteSide::Peer(region) => (region.blob.access, region.blob.region),
            RemoteSide::Own(mr) => {
                let Memory { remote_read, remote_write, .. } = mr.region.memory;
                (Access { remote_read, remote_write }, mr.region.id())
            }
        };
        let permitted = match op {
            Op::Read => access.remote_read,
            Op::Write => access.remote_write,
        };
        if permitted {
            return Ok(());
        }
        Err(err!(InvalidParam, "remote region {:#x} does not permit {op:?} by peers", id.0))
    }

    fn own(&self) -> Option<&Arc<Mr>> {
        match self {
            RemoteSide::Own(mr) => Some(mr),
            RemoteSide::Peer(_) => None,
        }
    }
}

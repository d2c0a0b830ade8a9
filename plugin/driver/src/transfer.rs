//! A prepared transfer as the host holds it.

use crate::err;
use crate::error::{Code, Error, Result};
use crate::peer::Peer;
use crate::region::Mr;
use baton_core::RegionId;
use baton_core::notify::Tell;
use baton_core::plan::Plan;
use baton_core::prepared::{KeyTable, Prepared};
use baton_core::registry::RemoteRegion;
use baton_fabric::Op;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

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
    pub(crate) op: Op,
    pub(crate) target: Target,
    pub(crate) plan: Plan,
    pub(crate) locals: Vec<Arc<Mr>>,
    pub(crate) remotes: Vec<RemoteSide>,
    /// Templates for the link whose generation they carry.
    pub(crate) prepared: Mutex<Option<Arc<Prepared>>>,
    /// What a post tells that waits for a connection, or a self transfer.
    pub(crate) told: Mutex<Option<Told>>,
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
pub(crate) enum RemoteSide {
    /// A region that a peer exported.
    Peer(Arc<RemoteRegion>),
    /// One of our own (self transfer).
    Own(Arc<Mr>),
}

impl Xfer {
    pub(crate) fn new(
        op: Op,
        target: Target,
        plan: Plan,
        locals: Vec<Arc<Mr>>,
        remotes: Vec<RemoteSide>,
    ) -> Xfer {
        Xfer {
            op,
            target,
            plan,
            locals,
            remotes,
            prepared: Mutex::new(None),
            told: Mutex::new(None),
            state: AtomicU8::new(NOT_POSTED),
            error: Mutex::new(None),
        }
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
        let pinned = self.locals.iter().take_while(|mr| mr.pin()).count();
        let own = self.remotes.iter().filter_map(RemoteSide::own);
        let pinned_own =
            if pinned == self.locals.len() { own.clone().take_while(|mr| mr.pin()).count() } else { 0 };
        let withdrawn =
            self.remotes.iter().any(|side| matches!(side, RemoteSide::Peer(region) if region.is_revoked()));
        if pinned == self.locals.len() && pinned_own == own.clone().count() && !withdrawn {
            self.state.store(IN_PROGRESS, Ordering::Release);
            return Ok(());
        }
        self.locals[..pinned].iter().for_each(|mr| mr.unpin());
        own.take(pinned_own).for_each(|mr| mr.unpin());
        let whose = if withdrawn {
            "a remote region of it was withdrawn by its owner"
        } else {
            "a region of it was deregistered"
        };
        let error = err!(
            NotFound,
            "cannot post the transfer: {whose}; build a new request from current registrations"
        );
        self.conclude(Err(error.clone()));
        Err(error)
    }

    /// Ends a post that `begin` started: unpins and publishes the outcome.
    pub(crate) fn finish(&self, outcome: Result<()>) {
        self.locals.iter().for_each(|mr| mr.unpin());
        self.remotes.iter().filter_map(RemoteSide::own).for_each(|mr| mr.unpin());
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

    fn own(&self) -> Option<&Arc<Mr>> {
        match self {
            RemoteSide::Own(mr) => Some(mr),
            RemoteSide::Peer(_) => None,
        }
    }
}

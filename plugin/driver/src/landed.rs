//! Transfers that landed here and that the host has not asked for: those to which the sender's host gave an id.
//!
//! An id is on its peer's back-pressure account like a message until the host has read it.

use crate::channel::Path;
use crate::engine::Driver;
use crate::err;
use crate::error::Result;
use crate::peer::{Peer, check_message};
use crate::shared::Shared;
use baton_core::Instance;
use baton_core::notify::{ID_BYTES, Tell};
use baton_core::wire::check_name;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Ids of this engine's transfers to itself that may wait to be read; a post with an id above it is refused.
pub(crate) const MAX_OWN_UNREAD: u64 = 16_384;
/// Ids of all peers together that may wait to be read. Beyond it an id is dropped and counted; back-pressure holds each peer
/// far below it.
const MAX_UNREAD: u64 = 1 << 20;

/// Of one sender.
struct Unread {
    /// None for this engine itself.
    peer: Option<Arc<Peer>>,
    /// How often each id has landed and not been read, by path.
    ids: HashMap<(u64, Path), u32>,
    count: u64,
}

/// By sender. A leaf lock: nothing else is taken while it is held.
#[derive(Default)]
pub(crate) struct Landed {
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    senders: HashMap<Instance, Unread>,
    total: u64,
}

impl Landed {
    /// Notes one; `false`: there are too many, it is dropped.
    fn add(&self, sender: Instance, peer: Option<&Arc<Peer>>, path: Path, id: u64) -> bool {
        let mut table = self.table.lock();
        if table.total >= MAX_UNREAD {
            return false;
        }
        table.total += 1;
        let unread = table.senders.entry(sender).or_insert_with(|| Unread {
            peer: peer.cloned(),
            ids: HashMap::new(),
            count: 0,
        });
        *unread.ids.entry((id, path)).or_default() += 1;
        unread.count += 1;
        true
    }

    /// Reads one, which forgets it; the peer that gets its credit back.
    fn take(&self, sender: &Instance, id: u64) -> Option<(Option<Arc<Peer>>, Path)> {
        let mut table = self.table.lock();
        let unread = table.senders.get_mut(sender)?;
        let path = [Path::OneSided, Path::TwoSided]
            .into_iter()
            .find(|path| unread.ids.contains_key(&(id, *path)))?;
        let times = unread.ids.get_mut(&(id, path))?;
        *times -= 1;
        if *times == 0 {
            unread.ids.remove(&(id, path));
        }
        unread.count -= 1;
        let peer = unread.peer.clone();
        if unread.count == 0 {
            table.senders.remove(sender);
        }
        table.total -= 1;
        Some((peer, path))
    }

    /// Unread ids of one sender.
    fn of(&self, sender: &Instance) -> u64 {
        self.table.lock().senders.get(sender).map_or(0, |unread| unread.count)
    }

    /// Unread ids of all.
    pub fn total(&self) -> u64 {
        self.table.lock().total
    }

    /// Senders of that name with something to read, the one that connected last first.
    fn named(&self, name: &str) -> Vec<Instance> {
        let table = self.table.lock();
        let mut found: Vec<_> = table
            .senders
            .iter()
            .filter_map(|(sender, unread)| Some((unread.peer.as_ref()?, *sender)))
            .filter(|(peer, _)| *peer.name() == *name)
            .map(|(peer, sender)| (peer.opened_at.load(Ordering::Relaxed), sender))
            .collect();
        found.sort_unstable_by_key(|(opened_at, _)| std::cmp::Reverse(*opened_at));
        found.into_iter().map(|(_, sender)| sender).collect()
    }

    /// Forgets what fits; how many that were.
    fn forget(&self, stale: impl Fn(&Instance, Option<&Peer>) -> bool) -> u64 {
        let mut table = self.table.lock();
        let mut forgotten = 0;
        table.senders.retain(|sender, unread| {
            let goes = stale(sender, unread.peer.as_deref());
            forgotten += if goes { unread.count } else { 0 };
            !goes
        });
        table.total -= forgotten;
        forgotten
    }
}

impl Driver {
    /// Whether transfer `id` of a peer has landed here. Once `true` it is forgotten. A peer that nobody knows (yet) has sent nothing.
    pub fn inbound_status(&self, name: &str, id: u64) -> Result<bool> {
        let shared = &self.shared;
        shared.usable()?;
        check_name(name.as_bytes()).map_err(|e| err!(InvalidParam, "{e}"))?;
        if shared.take_landed(name, id) {
            return Ok(true);
        }
        shared.self_copies.help(shared);
        shared.caller_polls();
        Ok(shared.take_landed(name, id))
    }
}

impl Shared {
    fn take_landed(self: &Arc<Self>, name: &str, id: u64) -> bool {
        // The instance that the host means by a name; of peers that it has not loaded, those connected under it.
        let bound = match *name == *self.own_name() {
            true => Some(self.instance),
            false => self.registry.read().bound(name).map(|info| info.instance),
        };
        let senders = bound.map_or_else(|| self.landed.named(name), |instance| vec![instance]);
        let taken = senders.iter().find_map(|sender| self.landed.take(sender, id));
        let Some((peer, path)) = taken else { return false };
        if let Some(peer) = peer {
            let mut state = peer.state.lock();
            if state.popped(path, 1, ID_BYTES as u64) {
                self.pump(&peer, &mut state);
            }
        }
        true
    }

    /// A transfer of a peer, or of our own (none), landed with an id. `false`: it was dropped.
    pub(crate) fn land(&self, from: Option<(&Arc<Peer>, Path)>, id: u64) -> bool {
        let sender = from.map_or(self.instance, |(peer, _)| peer.instance);
        let path = from.map_or(Path::OneSided, |(_, path)| path);
        let kept = self.landed.add(sender, from.map(|(peer, _)| peer), path, id);
        if !kept && self.counters.ids_dropped.fetch_add(1, Ordering::Relaxed) == 0 {
            tracing::error!(
                "{MAX_UNREAD} ids of landed transfers were not read: further ones are dropped (said once)"
            );
        }
        kept
    }

    /// Whether a transfer of this engine to itself may tell that now.
    pub(crate) fn admit_own(&self, tell: Tell<'_>) -> Result<()> {
        check_message(tell.message_len())?;
        match self.landed.of(&self.instance) {
            unread if tell.id.is_some() && unread >= MAX_OWN_UNREAD => Err(err!(
                Limit,
                "{unread} ids of transfers of this engine to itself were not read; the limit is {MAX_OWN_UNREAD}: ask for their inbound status"
            )),
            _ => Ok(()),
        }
    }

    /// An instance that the host does not mean any more: what it sent and nobody read is forgotten.
    pub(crate) fn forget_ids_of(&self, instance: &Instance) {
        self.count_forgotten(self.landed.forget(|sender, _| sender == instance));
    }

    /// A session under `name` was opened: instances that had the name before and are gone have left nothing to read.
    pub(crate) fn forget_ids_before(&self, name: &str, opened_at: u64) {
        self.count_forgotten(self.landed.forget(|_, peer| {
            peer.is_some_and(|peer| {
                *peer.name() == *name
                    && !peer.bound.load(Ordering::Acquire)
                    && !peer.connected.load(Ordering::Acquire)
                    && peer.opened_at.load(Ordering::Relaxed) < opened_at
            })
        }));
    }

    /// A session ended: the same, if another instance has its name meanwhile. Under no peer's lock.
    pub(crate) fn forget_ids_after_end(&self, peer: &Peer) {
        let name = peer.name();
        let successors = self.peers.read();
        let opened = successors.values().filter(|other| *other.name() == *name);
        let newest = opened.map(|other| other.opened_at.load(Ordering::Relaxed)).max().unwrap_or(0);
        drop(successors);
        self.forget_ids_before(&name, newest);
    }

    fn count_forgotten(&self, forgotten: u64) {
        self.counters.ids_forgotten.fetch_add(forgotten, Ordering::Relaxed);
    }
}

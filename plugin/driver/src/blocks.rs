//! Lists of blocks that the host registers once and builds transfers of by index.

use crate::engine::Driver;
use crate::err;
use crate::error::{Code, Error, Result};
use crate::region::Mr;
use crate::shared::{Shared, random_u64};
use crate::transfer::{RemoteSide, Target, Xfer};
use crate::work::{Desc, Side, plan_error};
use baton_core::Instance;
use baton_core::plan::{Block, BlockTable, IndexError, Plan, Selection, check_span};
use baton_fabric::Op;
use parking_lot::RwLock;
use std::collections::HashMap;
use std::sync::Arc;

/// Lists of one engine.
const MAX_LISTS: usize = 16_384;
/// Blocks of one list.
const MAX_BLOCKS: usize = 1 << 24;

/// The lists of an engine by handle.
pub(crate) type BlockLists = RwLock<HashMap<u64, Arc<BlockList>>>;

/// An immutable list of blocks. It holds its regions as a request does: posting what was made of it fails once one of them is withdrawn.
pub(crate) struct BlockList {
    table: BlockTable,
    side: ListSide,
}

enum ListSide {
    /// Own memory for the local side.
    Local(Vec<Arc<Mr>>),
    /// An agent's exported memory.
    Remote { owner: String, instance: Instance, regions: Vec<RemoteSide> },
}

impl Driver {
    /// Keeps a list of blocks of own memory or, with a name, of that agent's.
    pub fn create_block_list(&self, owner: Option<&str>, blocks: &[Desc]) -> Result<u64> {
        let shared = &self.shared;
        shared.usable()?;
        if blocks.len() > MAX_BLOCKS {
            return Err(err!(
                Limit,
                "a block list of {} blocks: one has at most {MAX_BLOCKS}; make several",
                blocks.len()
            ));
        }
        let list = match owner {
            None => {
                let mut side = Side::new();
                let table = resolve(
                    blocks,
                    &mut side,
                    |handle| shared.own_region(handle),
                    |mr| (mr.region.memory.addr, mr.region.memory.len_bytes),
                )?;
                BlockList { table, side: ListSide::Local(side.regions) }
            }
            Some(owner) => {
                let instance = match *owner == *shared.own_name {
                    true => shared.instance,
                    false => shared.peer_named(owner)?.instance,
                };
                let mut side = Side::new();
                let find = |handle| shared.remote_side(owner, handle);
                let table = resolve(blocks, &mut side, find, RemoteSide::span)?;
                let regions = side.regions;
                BlockList { table, side: ListSide::Remote { owner: owner.to_owned(), instance, regions } }
            }
        };
        let mut lists = shared.block_lists.write();
        if lists.len() >= MAX_LISTS {
            return Err(err!(
                Limit,
                "{MAX_LISTS} block lists exist, which is the limit; release some before making another"
            ));
        }
        // Random, so that the handle of another engine or of a released list names none of ours.
        let handle = loop {
            let handle = random_u64();
            if handle != 0 && !lists.contains_key(&handle) {
                break handle;
            }
        };
        lists.insert(handle, Arc::new(list));
        Ok(handle)
    }

    /// Forgets a list. Transfers made of it keep what they need.
    pub fn release_block_list(&self, list: u64) -> Result<()> {
        self.shared.usable()?;
        let gone = self.shared.block_lists.write().remove(&list);
        gone.map(drop).ok_or_else(|| no_list(list))
    }

    /// Builds a transfer of blocks: each element is a list's handle and indices into it.
    pub fn create_xfer_from_indices(
        &self,
        op: Op,
        peer: &str,
        (local_handle, local_indices): (u64, &[u32]),
        (remote_handle, remote_indices): (u64, &[u32]),
    ) -> Result<Arc<Xfer>> {
        let shared = &self.shared;
        shared.usable()?;
        let (local, remote) = (shared.block_list(local_handle)?, shared.block_list(remote_handle)?);
        let ListSide::Local(local_regions) = &local.side else {
            return Err(err!(
                InvalidParam,
                "block list {local_handle:#x} is of an agent's memory; the local side needs one of this engine's own"
            ));
        };
        let ListSide::Remote { owner, instance, regions: remote_regions } = &remote.side else {
            return Err(err!(
                InvalidParam,
                "block list {remote_handle:#x} is of this engine's own memory; the remote side needs one of agent {peer:?}"
            ));
        };
        if owner != peer {
            return Err(err!(
                InvalidParam,
                "block list {remote_handle:#x} belongs to agent {owner:?}, not to {peer:?}"
            ));
        }
        let target = shared.target(peer)?;
        if let Target::Peer(peer) = &target
            && peer.instance != *instance
        {
            return Err(err!(
                Stale,
                "block list {remote_handle:#x} is of instance {instance} of agent {owner:?}, but instance {} is loaded; \
                 import its regions again and make the list anew",
                peer.instance
            ));
        }
        let local = Selection { table: &local.table, indices: local_indices };
        let remote = Selection { table: &remote.table, indices: remote_indices };
        let picked = Plan::from_blocks(op, local, remote, shared.plan_limits()).map_err(index_error)?;
        let locals = take(local_regions, &picked.locals);
        let remotes = take(remote_regions, &picked.remotes);
        let at = |list: u64| move |e: Error| Error::new(e.code, format!("block list {list:#x}: {}", e.text));
        locals.iter().try_for_each(|mr| mr.check_registered()).map_err(at(local_handle))?;
        for side in &remotes {
            side.check_usable().and_then(|()| side.check_permits(op)).map_err(at(remote_handle))?;
        }
        shared.build_xfer(op, target, picked.plan, locals, remotes, None)
    }
}

fn take<R: Clone>(regions: &[R], used: &[u32]) -> Vec<R> {
    used.iter().map(|region| regions[*region as usize].clone()).collect()
}

fn no_list(handle: u64) -> Error {
    err!(NotFound, "block list {handle:#x} does not exist in this engine (any more)")
}

fn index_error(e: IndexError) -> Error {
    match e {
        IndexError::Plan(e) => plan_error(e),
        other => Error::new(Code::InvalidParam, other.to_string()),
    }
}

/// Looks every block's region up, once, and checks that it lies in it.
fn resolve<R>(
    blocks: &[Desc],
    side: &mut Side<R>,
    find: impl Fn(u64) -> Result<R>,
    span: impl Fn(&R) -> (u64, u64),
) -> Result<BlockTable> {
    let mut out = Vec::with_capacity(blocks.len());
    for (index, block) in blocks.iter().enumerate() {
        let Desc { addr, len_bytes, region: handle, reserved } = *block;
        if reserved != 0 {
            return Err(err!(InvalidParam, "block {index}: the reserved field is {reserved}, it must be 0"));
        }
        let region = side
            .index(handle, || find(handle))
            .map_err(|e| Error::new(e.code, format!("block {index}: {}", e.text)))?;
        let (base, region_bytes) = span(&side.regions[region as usize]);
        check_span(addr, len_bytes, base, region_bytes)
            .map_err(|e| err!(InvalidParam, "block {index}: {e}"))?;
        out.push(Block { addr, len_bytes, region });
    }
    Ok(BlockTable::new(out))
}

impl Shared {
    fn block_list(&self, handle: u64) -> Result<Arc<BlockList>> {
        self.block_lists.read().get(&handle).cloned().ok_or_else(|| no_list(handle))
    }
}

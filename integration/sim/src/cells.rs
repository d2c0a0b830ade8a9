//! Application memory of a node: one registered arena, handed out in cells.
//!
//! A free cell holds a known filler, checked when it is handed out again: whatever landed late shows.

use baton_core::prepared::KeyTable;
use baton_fabric::{Fabric, Memory, MemoryKind, RegionKeys};
use baton_fabric_sim::{Rng, SimFabric, SimWorld};

/// Bytes of a cell.
pub(crate) const CELL: usize = 1024;
/// Cells of a node.
const CELLS: usize = 512;

/// Filler of cells that belong to nobody.
const FREE: u8 = 0xF7;

/// Some neighbouring cells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub node: usize,
    pub first: usize,
    pub count: usize,
}

/// The arena of a node.
pub(crate) struct Cells {
    world: SimWorld,
    pub node: usize,
    pub base: u64,
    keys: RegionKeys,
    busy: Vec<bool>,
    /// Its node is dead: nobody looks at it any more.
    pub gone: bool,
}

impl Cells {
    /// What is registered of it.
    pub const REGIONS: usize = 1;

    pub fn new(world: &SimWorld, fabric: &SimFabric) -> Result<Cells, String> {
        let node = fabric.node();
        let len = CELL * CELLS;
        let base = world.alloc(node, len);
        world.store(node, base, &vec![FREE; len]);
        let memory = Memory {
            addr: base,
            len_bytes: len as u64,
            kind: MemoryKind::Dram,
            device: 0,
            remote_read: true,
            remote_write: true,
            ordered: false,
            mapped: false,
        };
        let keys = fabric.register(&memory).map_err(|e| format!("register cells: {e}"))?;
        Ok(Cells {
            world: world.clone(),
            node,
            base,
            keys: fabric.region_keys(keys),
            busy: vec![false; CELLS],
            gone: false,
        })
    }

    pub fn addr(&self, run: Run) -> u64 {
        self.base + (run.first * CELL) as u64
    }

    /// Length of the arena.
    pub fn len_bytes(&self) -> u64 {
        (CELL * CELLS) as u64
    }

    /// For an own work request on the first rail.
    pub fn local_key(&self, addr: u64, len: usize) -> Option<u64> {
        self.keys.local_key(0, addr - self.base, len as u64)
    }

    /// For own work requests.
    pub fn local_keys(&self) -> KeyTable<'_> {
        self.key_table(&self.keys.local)
    }

    /// For a peer's.
    pub fn remote_keys(&self) -> KeyTable<'_> {
        self.key_table(&self.keys.remote)
    }

    /// With other keys, by rail and segment.
    pub fn key_table<'a>(&self, keys: &'a [u64]) -> KeyTable<'a> {
        KeyTable { base: self.base, segment_bytes: self.keys.segment_bytes, rails: self.keys.rails, keys }
    }

    /// Takes `count` neighbouring cells from somewhere; `None` when there are none.
    pub fn take(&mut self, rng: &mut Rng, count: usize) -> Result<Option<Run>, String> {
        let start = rng.below(CELLS as u64) as usize;
        let places = (start..CELLS).chain(0..start).filter(|first| first + count <= CELLS);
        let Some(first) = places.into_iter().find(|&first| !self.busy[first..first + count].contains(&true))
        else {
            return Ok(None);
        };
        let run = Run { node: self.node, first, count };
        self.expect_free(run)?;
        self.busy[first..first + count].fill(true);
        Ok(Some(run))
    }

    /// Gives cells back, their contents with them.
    pub fn give(&mut self, run: Run) {
        self.world.store(self.node, self.addr(run), &vec![FREE; run.count * CELL]);
        self.busy[run.first..run.first + run.count].fill(false);
    }

    pub fn store(&self, run: Run, bytes: &[u8]) {
        assert_eq!(bytes.len(), run.count * CELL);
        self.world.store(self.node, self.addr(run), bytes);
    }

    pub fn load(&self, run: Run) -> Vec<u8> {
        let mut bytes = vec![0; run.count * CELL];
        self.world.load(self.node, self.addr(run), &mut bytes);
        bytes
    }

    fn expect_free(&self, run: Run) -> Result<(), String> {
        if self.gone {
            return Ok(());
        }
        match self.load(run).iter().position(|byte| *byte != FREE) {
            None => Ok(()),
            Some(at) => {
                let (cell, offset) = (run.first + at / CELL, at % CELL);
                Err(format!(
                    "node {}: byte {offset} of cell {cell} was written although nobody owned it",
                    self.node
                ))
            }
        }
    }

    /// Every cell that nobody owns is untouched.
    pub fn expect_all_free(&self) -> Result<(), String> {
        let free = (0..CELLS).filter(|&cell| !self.busy[cell]);
        free.into_iter().try_for_each(|first| self.expect_free(Run { node: self.node, first, count: 1 }))
    }

    pub fn busy_count(&self) -> usize {
        self.busy.iter().filter(|busy| **busy).count()
    }
}

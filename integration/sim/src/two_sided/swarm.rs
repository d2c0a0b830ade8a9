//! One run: nodes, links, random steps, then rest.

use super::checker::{Checker, Piece, Way, Xfer, message};
use super::drive::Later;
use super::link::{Link, Shape, Side};
use super::memory::{Bounce, region};
use super::{TwoReached, TwoReport};
use crate::Check;
use crate::agenda::Agenda;
use crate::cells::{CELL, Cells, Run};
use crate::report::{Faults, Options};
use baton_core::two_sided::chunks::Piece as Span;
use baton_core::two_sided::codec::Direction;
use baton_core::two_sided::notes::Resolve;
use baton_core::two_sided::pool::{PeerKey, PoolConfig};
use baton_core::two_sided::report::{TwoCancel, TwoSubmitError};
use baton_core::{Nanos, RegionId};
use baton_fabric::EndpointId;
use baton_fabric_sim::{Rng, SimConfig, SimFabric, SimWorld};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::ops::RangeInclusive;
use std::sync::Arc;

/// A region that no node has.
const NOWHERE: RegionId = RegionId(0xDEAD);

/// How often a dead node may come back in a run.
const SPARES: usize = 2;
/// Of the kinds of faults, those that kill a node.
const DEATHS: RangeInclusive<u64> = 37..=38;

/// A run.
pub(super) struct Swarm {
    pub options: Options,
    pub world: SimWorld,
    retry_timeout_ns: u64,
    pub rng: Rng,
    /// One for each instance of a node, the dead ones with them.
    pub fabrics: Vec<Arc<SimFabric>>,
    pub cells: Vec<Cells>,
    pub bounces: Vec<Bounce>,
    /// Dead nodes may come back so often.
    pub spares: usize,
    /// Length of a bounce slot, on which all agree.
    slot_bytes: u32,
    pub links: Vec<Link>,
    pub routes: BTreeMap<(usize, EndpointId), Way>,
    pub checker: Checker,
    pub later: Agenda<Later>,
    pub step: u32,
    pub epochs: u64,
    /// Of closed epochs.
    pub reached: TwoReached,
    /// Something happened since this was last cleared.
    pub busy: bool,
}

impl Swarm {
    pub fn new(seed: u64, options: Options) -> Result<Swarm, String> {
        let mut rng = Rng::new(seed ^ 0x7A05_1DED_7A05_1DED);
        let nodes = rng.between(2, 4) as usize;
        let config = SimConfig {
            nodes: nodes + SPARES,
            max_pieces: rng.between(1, 5),
            stall_one_in: [0, 20, 200][rng.below(3) as usize],
            reorder_one_in: [0, 2, 5][rng.below(3) as usize],
            inline_bytes: options.inline_bytes.unwrap_or([0, 8, 64, 220][rng.below(4) as usize]),
            retry_timeout_ns: 20_000_000,
            max_message_bytes: 4224,
            headed_bytes: 4096,
            sabotage: options.sabotage,
            ..SimConfig::default()
        };
        let retry_timeout_ns = config.retry_timeout_ns;
        let world = SimWorld::new(seed, config);
        let slot_bytes = [256, 512, 1024, 4096][rng.below(4) as usize];
        let mut swarm = Swarm {
            options,
            world,
            retry_timeout_ns,
            rng,
            fabrics: Vec::new(),
            cells: Vec::new(),
            bounces: Vec::new(),
            spares: SPARES,
            slot_bytes,
            links: Vec::new(),
            routes: BTreeMap::new(),
            checker: Checker::default(),
            later: Agenda::default(),
            step: 0,
            epochs: 0,
            reached: TwoReached::default(),
            busy: false,
        };
        for _ in 0..nodes {
            swarm.add_node()?;
        }
        for a in 0..nodes {
            for b in a + 1..nodes {
                let shape = Shape::random(&mut swarm.rng);
                swarm.add_link([a, b], shape);
            }
        }
        Ok(swarm)
    }

    /// Another instance, with memory and a pool of its own; what it is called here.
    pub fn add_node(&mut self) -> Result<usize, String> {
        let node = self.fabrics.len();
        let fabric = self.world.fabric(node);
        self.cells.push(Cells::new(&self.world, &fabric)?);
        self.fabrics.push(fabric);
        let rng = &mut self.rng;
        let base_slabs = rng.between(1, 3) as u32;
        let config = PoolConfig {
            slot_bytes: self.slot_bytes,
            slab_slots: rng.between(2, 8) as u32,
            base_slabs,
            max_slabs: base_slabs + rng.below(16) as u32,
            peer_slots: rng.between(4, 60) as u32,
            send_reserve: rng.between(1, 4) as u32,
            idle_ms: rng.between(5, 200),
            retry_ms: rng.between(1, 5),
        };
        let now = self.now();
        self.bounces.push(Bounce::new(config, now));
        Ok(node)
    }

    pub fn add_link(&mut self, nodes: [usize; 2], shape: Shape) -> usize {
        let link = self.links.len();
        self.links.push(Link::new(nodes, PeerKey(link as u32), shape));
        link
    }

    pub fn report(&self) -> TwoReport {
        let mut reached = self.reached;
        let open = self.links.iter().flat_map(|link| &link.sides).filter_map(|side| side.open.as_ref());
        open.for_each(|open| reached.add(open.channel.counters()));
        for bounce in &self.bounces {
            let counters = bounce.pool.stats().counters;
            reached.pool_expanded += counters.expanded;
            reached.pool_shrunk += counters.shrunk;
            reached.pool_revived += counters.revived;
        }
        TwoReport {
            digest: self.world.digest(),
            at_ns: self.world.now_ns(),
            done: self.checker.done,
            failed: self.checker.failed,
            delivered: self.checker.delivered,
            epochs: self.epochs,
            reached,
        }
    }

    /// Where the pools and those who borrow from them stand: what a failure most often comes from.
    pub fn pools(&self) -> String {
        let mut text = String::new();
        for node in self.living() {
            let bounce = &self.bounces[node];
            let _ = writeln!(text, "node {node}: {:?}, {:?}", bounce.pool.config(), bounce.pool.stats());
        }
        for link in &self.links {
            for (side, open) in link.sides.iter().enumerate().filter_map(|(n, s)| Some((n, s.open.as_ref()?)))
            {
                let stats = open.channel.stats();
                let _ = writeln!(
                    text,
                    "{:?} side {side}: {:?}, waits: {:?}",
                    link.nodes, stats.lanes, stats.waiters
                );
            }
        }
        text
    }

    pub fn now(&self) -> Nanos {
        Nanos(self.world.now_ns())
    }

    pub fn ways(&self) -> Vec<Way> {
        (0..self.links.len()).flat_map(|link| [(link, 0), (link, 1)]).collect()
    }

    pub fn run(&mut self) -> Check {
        for node in 0..self.bounces.len() {
            self.serve_pool(node)?;
        }
        for link in 0..self.links.len() {
            self.open(link)?;
        }
        for step in 0..self.options.steps {
            self.step = step;
            self.random_step()?;
            if step % 32 == 0 {
                self.links.iter().try_for_each(|link| link.check_credit(false))?;
                self.living().for_each(|node| self.bounces[node].pool.audit());
            }
        }
        self.come_to_rest()?;
        self.checker.at_rest()?;
        for link in &self.links {
            link.check_credit(true)?;
        }
        for node in self.living() {
            self.expect_no_leak(node)?;
            let bounce = &self.bounces[node];
            bounce.pool.audit();
            let (stats, config) = (bounce.pool.stats(), bounce.pool.config());
            let least = (stats.lent * 2).div_ceil(config.slab_slots).max(config.base_slabs);
            if stats.slabs > least || stats.sending > 0 {
                return Err(format!("node {node}: the pool is not back at its base: {stats:?}, {config:?}"));
            }
        }
        for cells in self.cells.iter().filter(|cells| !cells.gone) {
            cells.expect_all_free()?;
            if cells.busy_count() > 0 {
                return Err(format!("node {}: {} cells belong to nobody", cells.node, cells.busy_count()));
            }
        }
        Ok(())
    }

    // ---- steps

    fn random_step(&mut self) -> Check {
        self.due()?;
        let way = self.random_way();
        match self.rng.below(100) {
            0..=39 => {
                for _ in 0..self.rng.between(1, 12) {
                    self.world.step();
                }
            }
            40..=61 => {
                let node = self.rng.below(self.fabrics.len() as u64) as usize;
                let most = self.rng.between(1, 32) as usize;
                self.poll(node, most)?;
            }
            62..=67 => self.copy_some(way)?,
            68..=71 => self.take_some(way)?,
            72..=81 => self.submit(way)?,
            82..=87 => self.notify(way)?,
            88..=90 => {
                let most = self.rng.between(1, 8) as usize;
                self.pop(way, most)?;
            }
            91..=92 => self.cancel(way)?,
            93..=95 => self.look(way, false)?,
            96..=97 => {
                let pause = [300_000, 3_000_000, 100_000_000][self.rng.below(3) as usize];
                let pause = self.rng.between(0, pause);
                self.world.advance_to_ns(self.world.now_ns() + pause);
            }
            _ if self.options.faults != Faults::None => self.fault(way)?,
            _ => {}
        }
        Ok(())
    }

    fn random_way(&mut self) -> Way {
        (self.rng.below(self.links.len() as u64) as usize, self.rng.below(2) as usize)
    }

    fn copy_some(&mut self, way: Way) -> Check {
        for _ in 0..self.rng.between(1, 6) {
            let waiting = self.links[way.0].sides[way.1].open.as_ref().map_or(0, |open| open.copies.len());
            if waiting == 0 {
                break;
            }
            let which = self.rng.below(waiting as u64) as usize;
            self.copy(way, which)?;
        }
        Ok(())
    }

    fn submit(&mut self, way @ (link, side): Way) -> Check {
        let [local, remote] = [self.links[link].nodes[side], self.links[link].nodes[1 - side]];
        let direction = if self.rng.chance(2, 3) { Direction::Write } else { Direction::Read };
        let count = match self.rng.below(10) {
            0 => 0,
            1..=6 => self.rng.between(1, 4),
            _ => self.rng.between(5, 24),
        };
        let small = self.rng.chance(1, 2);
        let mut pieces = Vec::new();
        while (pieces.len() as u64) < count {
            let Some(piece) = self.piece(direction, local, remote, small)? else { break };
            pieces.push(piece);
        }
        let poisoned = !pieces.is_empty() && self.rng.chance(1, 25);
        let target = if poisoned { NOWHERE } else { region(remote) };
        let spans: Vec<Span> = pieces
            .iter()
            .map(|piece| Span {
                local: self.cells[local].addr(piece.local) + piece.offset as u64,
                region: target,
                offset: (piece.remote.first * CELL + piece.offset) as u64,
                len: piece.bytes.len() as u64,
            })
            .collect();
        let id = self.checker.new_id();
        let told = self.rng.chance(1, 2);
        let len = self.message_len(link);
        let text = told.then(|| message(id, len));
        let now = self.now();
        let taken = match self.channel(way) {
            None => Err(TwoSubmitError::Ended),
            Some(channel) => channel.submit(now, id, direction, spans.into(), text.as_deref()),
        };
        match taken {
            Ok(()) => {
                let xfer = Xfer {
                    way,
                    direction,
                    pieces,
                    message: told,
                    poisoned,
                    canceled: false,
                    ended: None,
                    lost: false,
                    delivered: false,
                };
                self.checker.submitted(id, xfer);
                self.pump(way)
            }
            Err(TwoSubmitError::Ended | TwoSubmitError::TooMany { .. }) => {
                for piece in pieces {
                    self.cells[local].give(piece.local);
                    self.cells[remote].give(piece.remote);
                }
                Ok(())
            }
            Err(error) => Err(format!("{way:?}: transfer {id} was not accepted: {error}")),
        }
    }

    /// Cells at both ends with source bytes and filler in them.
    fn piece(
        &mut self,
        direction: Direction,
        local: usize,
        remote: usize,
        small: bool,
    ) -> Result<Option<Piece>, String> {
        let count = if small { 1 } else { self.rng.between(1, 6) as usize };
        let Some(here) = self.cells[local].take(&mut self.rng, count)? else { return Ok(None) };
        let Some(there) = self.cells[remote].take(&mut self.rng, count)? else {
            self.cells[local].give(here);
            return Ok(None);
        };
        let total = count * CELL;
        let len = self.rng.between(1, if small { 200 } else { total as u64 }) as usize;
        let offset = self.rng.below((total - len + 1) as u64) as usize;
        let source: Vec<u8> = (0..total / 8).flat_map(|_| self.rng.bits().to_le_bytes()).collect();
        let filler = self.rng.bits() as u8;
        let (from, to): (Run, Run) =
            if direction == Direction::Write { (here, there) } else { (there, here) };
        self.cells[from.node].store(from, &source);
        self.cells[to.node].store(to, &vec![filler; total]);
        let bytes = source[offset..offset + len].to_vec();
        Ok(Some(Piece { local: here, remote: there, offset, bytes, filler }))
    }

    fn message_len(&mut self, link: usize) -> usize {
        let limit = self.links[link].shape.limits.message_bytes as usize;
        match self.rng.below(6) {
            0 => limit,
            1 => 8,
            _ => self.rng.between(8, limit.min(300) as u64) as usize,
        }
    }

    fn notify(&mut self, way @ (link, _): Way) -> Check {
        let (len, id) = (self.message_len(link), self.checker.new_id());
        let resolve = if self.rng.chance(1, 2) { Resolve::Sent } else { Resolve::Taken };
        let expires = self.rng.chance(1, 8);
        let deadline = if expires { self.now().0 + self.rng.between(0, 20_000_000) } else { u64::MAX - 1 };
        let text = message(id, len);
        let taken = match self.channel(way) {
            None => Err(TwoSubmitError::Ended),
            Some(channel) => channel.notify(id, &text, resolve, Nanos(deadline)),
        };
        match taken {
            Ok(()) => {
                self.checker.notified(way, id, expires);
                self.pump(way)
            }
            Err(TwoSubmitError::Ended | TwoSubmitError::TooMany { .. }) => Ok(()),
            Err(error) => Err(format!("{way:?}: notification {id} was not accepted: {error}")),
        }
    }

    fn pop(&mut self, way @ (link, side): Way, most: usize) -> Check {
        let Side { open, durable, inbox, .. } = &mut self.links[link].sides[side];
        let n = most.min(inbox.len());
        let bytes: u64 = inbox.drain(..n).map(|len| len as u64).sum();
        if n == 0 {
            return Ok(());
        }
        self.busy = true;
        match (open, durable) {
            (Some(open), _) => open.channel.on_popped(n as u64, bytes),
            (None, Some(durable)) => durable.on_popped(n as u64, bytes),
            // The session is over: nobody is held back any more.
            (None, None) => {}
        }
        self.pump(way)
    }

    fn cancel(&mut self, way: Way) -> Check {
        let pending = self.checker.pending(way);
        if pending.is_empty() {
            return Ok(());
        }
        let id = pending[self.rng.below(pending.len() as u64) as usize];
        let Some(channel) = self.channel(way) else { return Ok(()) };
        match channel.cancel(id) {
            TwoCancel::NotFound => return Err(format!("{way:?}: transfer {id} is pending, but not found")),
            TwoCancel::Canceled | TwoCancel::Draining => self.checker.canceled(id),
            TwoCancel::TooLate => {}
        }
        self.pump(way)
    }

    /// What a driver does when nothing more arrives: credit in, credit out. A channel that waits for nothing looks at its credit when it likes.
    fn look(&mut self, way @ (link, side): Way, at_rest: bool) -> Check {
        let gather = self.links[link].shape.gather;
        let node = self.links[link].nodes[side];
        let Some(open) = &mut self.links[link].sides[side].open else { return Ok(()) };
        let (world, cells, slabs) = (&self.world, &self.cells[node], &self.bounces[node].slabs);
        let view = super::memory::View { world, node, memory: &open.memory, slabs, cells, gather };
        if open.channel.waits_for_credit() || at_rest || self.rng.chance(1, 2) {
            self.busy |= open.channel.poll_credit(&view);
        }
        open.channel.flush();
        self.pump(way)
    }

    fn fault(&mut self, (link, side): Way) -> Check {
        let [a, b] = self.links[link].nodes;
        let kind = self.rng.below(40);
        if DEATHS.contains(&kind) && self.step > self.options.steps / 2 {
            return self.kill(self.links[link].nodes[side]);
        }
        if self.options.faults == Faults::Deaths {
            return Ok(());
        }
        match kind {
            0..=9 => {
                let working = self.links[link].sides[side].open.as_ref().filter(|open| !open.ending);
                let Some(count) = working.map(|open| open.endpoints.len() as u64) else { return Ok(()) };
                let nth = self.rng.below(count) as usize;
                let Some(open) = &self.links[link].sides[side].open else { return Ok(()) };
                let endpoint = open.endpoints[nth];
                self.links[link].faulted = true;
                self.world.kill_endpoint(self.links[link].nodes[side], endpoint);
            }
            // Short enough to be survived.
            10..=19 => self.world.partition(a, b, self.rng.between(1_000, self.retry_timeout_ns / 4)),
            20..=22 => {
                let duration = self.rng.between(1, 3) * self.retry_timeout_ns;
                self.world.partition(a, b, duration);
                self.links[link].faulted = true;
                self.links[link].suspect_until = self.world.now_ns() + duration + 4 * self.retry_timeout_ns;
            }
            23..=32 => self.world.stall(a, self.rng.between(1_000, self.retry_timeout_ns / 4)),
            33..=36 => self.tell(link, side),
            _ => {}
        }
        Ok(())
    }

    // ---- rest

    /// No more work and no more faults: everything must come to its end, and then idle lanes and pools to theirs.
    fn come_to_rest(&mut self) -> Check {
        let mut quiet_since = None;
        // Virtual time is free, so the limit is on turns.
        for turn in 0..400_000u32 {
            self.step = self.options.steps + turn;
            self.busy = false;
            for _ in 0..16 {
                self.busy |= self.world.step();
            }
            self.due()?;
            for node in 0..self.fabrics.len() {
                self.poll(node, 64)?;
            }
            for way in self.ways() {
                self.pop(way, usize::MAX)?;
                self.copy_some(way)?;
                self.take_some(way)?;
                if self.world.next_event_ns().is_none() {
                    self.look(way, true)?;
                }
            }
            if self.world.next_event_ns().is_some() || self.busy {
                continue;
            }
            let now = self.world.now_ns();
            let settled = |link: usize| self.links[link].is_open() || self.is_over(link);
            let open = self.later.next_at().is_none() && (0..self.links.len()).all(settled);
            let idle = open && self.checker.at_rest().is_ok();
            let since = *quiet_since.get_or_insert(now);
            if !idle {
                quiet_since = None;
            } else if now > since + 3_000_000_000 {
                return Ok(());
            }
            let next = self.next_wake().unwrap_or(now + 1_000_000_000);
            self.world.advance_to_ns(next.max(now + 1));
        }
        let stuck: Vec<_> = self.links.iter().flat_map(|link| &link.sides).collect();
        let waiters: Vec<_> = stuck
            .iter()
            .filter_map(|side| side.open.as_ref())
            .map(|open| open.channel.stats().waiters)
            .filter(|waiters| !waiters.is_empty())
            .collect();
        let missing = self.checker.at_rest();
        Err(format!("it never comes to rest: {waiters:?}, {missing:?}"))
    }

    fn next_wake(&self) -> Option<u64> {
        let later = self.later.next_at();
        let open = self.links.iter().flat_map(|link| &link.sides).filter_map(|side| side.open.as_ref());
        let channels = open.filter_map(|open| open.channel.next_timeout()).map(|at| at.0);
        let pools = self.living().filter_map(|node| self.bounces[node].wake);
        later.into_iter().chain(channels).chain(pools.map(|at| at.0)).min()
    }
}

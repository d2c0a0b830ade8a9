//! Nodes that die, survivors that learn it, and names that come back as other instances.

use super::checker::Way;
use super::drive::Later;
use super::link::{Shape, Side};
use super::swarm::Swarm;
use crate::report::{Faults, Neglect};
use crate::{Check, cells::Cells};
use baton_core::two_sided::channel::{Abandoned, Durable};
use baton_core::two_sided::report::{TwoEnd, XferFailure};
use baton_core::two_sided::setup::Place;
use baton_fabric::Fabric;

/// As long as a driver waits for a session to be resumed before it fails its transfers.
pub(super) const RESUME_NS: u64 = 1_500_000_000;
/// And then before it gives the session up.
pub(super) const REST_NS: u64 = 30_000_000_000;

impl Swarm {
    pub(super) fn gone(&self, node: usize) -> bool {
        self.cells[node].gone
    }

    pub(super) fn living(&self) -> impl Iterator<Item = usize> {
        (0..self.cells.len()).filter(|node| !self.gone(*node))
    }

    pub(super) fn neglects(&self, what: Neglect) -> bool {
        self.options.neglect == Some(what)
    }

    /// One of its nodes is dead and the other has nothing left of the session.
    pub(super) fn is_over(&self, link: usize) -> bool {
        let link = &self.links[link];
        let ended = |side: &Side| side.open.is_none() && side.durable.is_none();
        let over = |(node, side): (&usize, &Side)| self.gone(*node) || ended(side);
        link.nodes.iter().any(|node| self.gone(*node)) && link.nodes.iter().zip(&link.sides).all(over)
    }

    /// A node dies: its channels vanish as they are, and nobody looks at its memory any more. One node always lives.
    pub(super) fn kill(&mut self, node: usize) -> Check {
        if self.gone(node) || self.living().count() < 2 {
            return Ok(());
        }
        self.world.kill_node(node);
        self.cells[node].gone = true;
        self.reached.nodes_killed += 1;
        for link in 0..self.links.len() {
            if let Some(side) = self.links[link].nodes.iter().position(|other| *other == node) {
                self.die(link, side)?;
            }
        }
        if self.spares > 0 && self.rng.chance(2, 3) {
            self.spares -= 1;
            let delay = self.random_delay();
            self.schedule(delay, Later::Restart { node });
        }
        Ok(())
    }

    fn die(&mut self, link: usize, side: usize) -> Check {
        self.routes.retain(|_, way| *way != (link, side));
        self.links[link].sides[side] = Side::default();
        self.links[link].faulted = true;
        let survivor = 1 - side;
        if self.gone(self.links[link].nodes[survivor]) {
            [0, 1].into_iter().for_each(|side| self.checker.forget_way((link, side)));
            return Ok(());
        }
        match &self.links[link].sides[survivor].open {
            Some(open) if open.ending => {}
            Some(_) => {
                let (delay, epoch) = (self.random_delay(), self.links[link].epoch);
                let why = "the lifeline has ended";
                self.schedule(delay, Later::Told { link, side: survivor, epoch, why });
            }
            None => return self.after_close((link, survivor)),
        }
        Ok(())
    }

    /// A process that dies is noticed at once, a host only when nothing is acknowledged any more.
    fn random_delay(&mut self) -> u64 {
        let most = [500_000, 50_000_000, 3_000_000_000][self.rng.below(3) as usize];
        self.rng.between(1_000, most)
    }

    /// A side has closed its epoch: there will be another, or its peer is dead.
    pub(super) fn after_close(&mut self, way @ (link, side): Way) -> Check {
        let state = &self.links[link];
        if self.gone(state.nodes[1 - side]) {
            self.checker.initiator_died((link, 1 - side), &mut self.cells)?;
            if state.sides[side].unbound {
                return self.give_up(way);
            }
            let fail = self.rng.between(0, RESUME_NS);
            self.schedule(fail, Later::GiveUp { link, side, session: false });
            let rest = fail + self.rng.between(0, REST_NS);
            self.schedule(rest, Later::GiveUp { link, side, session: true });
            return Ok(());
        }
        if state.sides.iter().any(|side| side.open.is_some()) {
            return Ok(());
        }
        let delay = self.rng.between(10_000, 2_000_000);
        if self.options.faults == Faults::All && self.rng.chance(1, 6) {
            // It comes so late that what waits for it is failed before.
            let side = self.rng.below(2) as usize;
            let fail = self.rng.between(0, delay);
            self.schedule(fail, Later::GiveUp { link, side, session: false });
        }
        self.schedule(delay, Later::Reopen { link });
        Ok(())
    }

    /// No session in time: its transfers have failed, but it may still be resumed.
    pub(super) fn fail_transfers(&mut self, way @ (link, side): Way) -> Check {
        let Some(durable) = &mut self.links[link].sides[side].durable else { return Ok(()) };
        let failed = durable.fail_transfers(&TwoEnd::Closed("no session in time".into()));
        if durable.transfers() > 0 {
            return Err(format!("{way:?}: {} transfers are left of all that failed", durable.transfers()));
        }
        self.lost(way, failed)
    }

    /// The session is over.
    pub(super) fn give_up(&mut self, way @ (link, side): Way) -> Check {
        let Some(durable) = self.links[link].sides[side].durable.take() else { return Ok(()) };
        let Abandoned { transfers, notes } = durable.abandon(&TwoEnd::Closed("the session is over".into()));
        self.lost(way, transfers)?;
        if !self.neglects(Neglect::Notifications) {
            for (id, bytes) in notes {
                self.reached.notes_orphaned += 1;
                self.checker.note_lost(way, id, &bytes)?;
            }
        }
        self.checker.session_over(way)
    }

    fn lost(&mut self, way @ (link, side): Way, failed: Vec<(u64, XferFailure)>) -> Check {
        let orphans = self.gone(self.links[link].nodes[1 - side]);
        let times = match self.options.neglect {
            Some(Neglect::Transfers) if orphans => 0,
            Some(Neglect::TransfersTwice) if orphans => 2,
            _ => 1,
        };
        for (id, why) in failed {
            self.busy = true;
            if orphans {
                self.reached.transfers_orphaned += 1;
            } else {
                self.reached.transfers_given_up += 1;
            }
            for _ in 0..times {
                self.checker.lost(way, id, &why, &mut self.cells)?;
            }
        }
        Ok(())
    }

    /// The host has another instance in its peer's place: what is left of the session is not resumed.
    pub(super) fn unbind(&mut self, way @ (link, side): Way) -> Check {
        if self.neglects(Neglect::Session) {
            return Ok(());
        }
        let state = &mut self.links[link].sides[side];
        state.unbound = true;
        match &state.open {
            Some(_) => self.end(way, TwoEnd::Closed("another instance has taken the peer's place".into())),
            None => {
                self.fail_transfers(way)?;
                self.give_up(way)
            }
        }
    }

    /// The name of a dead node comes back: an instance with sessions, memory and a pool of its own, to which everybody connects who
    /// lives. Some do so before they know that the old one is dead.
    pub(super) fn restart(&mut self, dead: usize) -> Check {
        let node = self.add_node()?;
        self.reached.nodes_restarted += 1;
        self.serve_pool(node)?;
        let others: Vec<usize> = self.living().filter(|other| *other != node).collect();
        for other in others {
            let old =
                self.links.iter().position(|link| link.nodes.contains(&dead) && link.nodes.contains(&other));
            // It is configured as it was.
            let shape = match old {
                Some(old) => self.links[old].shape,
                None => Shape::random(&mut self.rng),
            };
            let link = self.add_link([other, node], shape);
            self.links[link].replaces = old;
            if let Some(old) = old
                && self.rng.chance(1, 2)
            {
                let side = usize::from(self.links[old].nodes[1] == other);
                let delay = self.rng.between(0, 2_000_000);
                self.schedule(delay, Later::Unbind { link: old, side });
            }
            let delay = self.rng.between(10_000, 2_000_000);
            self.schedule(delay, Later::Reopen { link });
        }
        Ok(())
    }

    /// What a side goes on with that connects to a new instance: nothing, but for a driver that looks at the name alone.
    pub(super) fn take_for_old(&mut self, link: usize) {
        let Some(old) = self.links[link].replaces.filter(|_| self.neglects(Neglect::Session)) else { return };
        let survivor = self.links[link].nodes[0];
        let side = usize::from(self.links[old].nodes[1] == survivor);
        let rest: Option<Durable> = self.links[old].sides[side].durable.take();
        self.links[link].sides[0].durable = rest;
    }

    /// For tests of the checkers: the copy that is about to end will be made once more.
    pub(super) fn forget_copy(&mut self, (link, side): Way) {
        if !self.neglects(Neglect::Copies) {
            return;
        }
        let node = self.links[link].nodes[side];
        let Some(job) = self.links[link].sides[side].open.as_ref().and_then(|open| open.copies.first())
        else {
            return;
        };
        let (from, _) = self.bounces[node].slabs.place(job.slot, job.at as usize, job.len as usize);
        let mut bytes = vec![0; job.len as usize];
        self.world.load(node, from, &mut bytes);
        let addr = match job.to {
            Place::Local(addr) => addr,
            Place::Region(_, offset) => self.cells[node].base + offset,
        };
        self.schedule(RESUME_NS + REST_NS, Later::Stray { node, addr, bytes });
    }

    /// What a node has registered and created belongs to what is open.
    pub(super) fn expect_no_leak(&self, node: usize) -> Check {
        let open = self.links.iter().flat_map(|link| link.nodes.iter().zip(&link.sides));
        let open: Vec<_> =
            open.filter(|(of, _)| **of == node).filter_map(|(_, side)| side.open.as_ref()).collect();
        let endpoints: usize = open.iter().map(|open| open.endpoints.len()).sum();
        let regions = Cells::REGIONS + self.bounces[node].slabs.count() + 2 * open.len();
        let stats = self.fabrics[node].stats();
        let (has_endpoints, has_regions) = (&stats["endpoints"], &stats["regions"]);
        if *has_endpoints == endpoints && *has_regions == regions {
            return Ok(());
        }
        Err(format!(
            "node {node}: {has_endpoints} endpoints and {has_regions} registrations at rest, {endpoints} and {regions} belong to what is open"
        ))
    }
}

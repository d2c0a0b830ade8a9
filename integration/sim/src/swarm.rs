//! One run: nodes, links, random steps, then rest.

use crate::Check;
use crate::agenda::Agenda;
use crate::cells::Cells;
use crate::checker::{Checker, Way, Xfer, message};
use crate::drive::Later;
use crate::link::{Link, Open, Shape, Side};
use crate::report::{Failure, Faults, Options, Reached, Report};
use crate::workload::Recipe;
use baton_core::Nanos;
use baton_core::notify::{ID_BYTES, Tell};
use baton_core::peer::{CancelOutcome, EndReason, SubmitError};
use baton_fabric::EndpointId;
use baton_fabric_sim::{Rng, SimConfig, SimFabric, SimWorld};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Runs one seed. A panic in the protocol is a failure like any other.
pub fn run(seed: u64, options: Options) -> Result<Report, Failure> {
    caught(seed, |at| {
        let mut swarm = Swarm::new(seed, options)?;
        let result = swarm.run();
        *at = (swarm.step, swarm.world.now_ns());
        result.map(|()| swarm.report())
    })
}

/// Runs `work`, which says how far it came, and makes of an error or a panic a failure of that seed.
pub(crate) fn caught<T>(
    seed: u64,
    work: impl FnOnce(&mut (u32, u64)) -> Result<T, String>,
) -> Result<T, Failure> {
    let mut at = (0, 0);
    let outcome = catch_unwind(AssertUnwindSafe(|| work(&mut at)));
    let what = match outcome {
        Ok(Ok(report)) => return Ok(report),
        Ok(Err(what)) => what,
        Err(panic) => {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
            format!("panic: {}", text.unwrap_or_default())
        }
    };
    Err(Failure { seed, step: at.0, at_ns: at.1, what })
}

/// Of the kinds of faults, the one that kills a node.
const DEATH: u64 = 37;

/// A run.
pub(crate) struct Swarm {
    pub(crate) options: Options,
    pub(crate) world: SimWorld,
    pub(crate) retry_timeout_ns: u64,
    pub(crate) rng: Rng,
    pub(crate) fabrics: Vec<Arc<SimFabric>>,
    pub(crate) alive: Vec<bool>,
    pub(crate) cells: Vec<Cells>,
    pub(crate) links: Vec<Link>,
    pub(crate) routes: BTreeMap<(usize, EndpointId), Way>,
    pub(crate) checker: Checker,
    pub(crate) later: Agenda<Later>,
    pub(crate) step: u32,
    pub(crate) epochs: u64,
    /// Some hosts take no notification before the end: the peer must be held back.
    pub(crate) host_pops: bool,
    /// Of closed epochs.
    pub(crate) reached: Reached,
    /// Something happened since this was last cleared.
    pub(crate) busy: bool,
}

impl Swarm {
    fn new(seed: u64, options: Options) -> Result<Swarm, String> {
        let mut rng = Rng::new(seed ^ 0xBA70_4BA7_04BA_704B);
        let nodes = rng.between(2, 4) as usize;
        let config = SimConfig {
            nodes,
            max_pieces: rng.between(1, 5),
            stall_one_in: [0, 20, 200][rng.below(3) as usize],
            reorder_one_in: [0, 2, 5][rng.below(3) as usize],
            max_reads: rng.between(1, 16) as usize,
            inline_bytes: options.inline_bytes.unwrap_or([0, 8, 64, 220][rng.below(4) as usize]),
            retry_timeout_ns: 20_000_000,
            rails: if rng.chance(1, 2) { rng.between(2, 4) as u8 } else { 1 },
            // A session's rings and page fit the smallest.
            segment_bytes: [u64::MAX, 1 << 17, 100_003][rng.below(3) as usize],
            // The longest record of the longest ring fits, with what stands before it in a SEND.
            max_message_bytes: 4224,
            sabotage: options.sabotage,
            ..SimConfig::default()
        };
        let retry_timeout_ns = config.retry_timeout_ns;
        let world = SimWorld::new(seed, config);
        let fabrics: Vec<_> = (0..nodes).map(|node| world.fabric(node)).collect();
        let cells = fabrics.iter().map(|fabric| Cells::new(&world, fabric)).collect::<Result<_, _>>()?;
        let mut links = Vec::new();
        for a in 0..nodes {
            for b in a + 1..nodes {
                let mut shape = Shape::random(&mut rng);
                shape.notify = options.notify.unwrap_or(shape.notify);
                let sides = [Side::default(), Side::default()];
                links.push(Link { nodes: [a, b], shape, epoch: 0, sides, faulted: false, suspect_until: 0 });
            }
        }
        let host_pops = rng.chance(2, 3);
        Ok(Swarm {
            options,
            world,
            retry_timeout_ns,
            rng,
            fabrics,
            alive: vec![true; nodes],
            cells,
            links,
            routes: BTreeMap::new(),
            checker: Checker::default(),
            later: Agenda::default(),
            step: 0,
            epochs: 0,
            host_pops,
            reached: Reached::default(),
            busy: false,
        })
    }

    fn report(&self) -> Report {
        Report {
            digest: self.world.digest(),
            at_ns: self.world.now_ns(),
            done: self.checker.done,
            failed: self.checker.failed,
            delivered: self.checker.delivered,
            bytes: self.checker.bytes,
            epochs: self.epochs,
            reached: self.reached(),
        }
    }

    fn reached(&self) -> Reached {
        let mut reached = self.reached;
        let open = self.links.iter().flat_map(|link| &link.sides).filter_map(|side| side.open.as_ref());
        open.for_each(|open| reached.add(&open.session.stats().counters));
        reached
    }

    pub(crate) fn now(&self) -> Nanos {
        Nanos(self.world.now_ns())
    }

    fn run(&mut self) -> Check {
        for link in 0..self.links.len() {
            self.open(link)?;
        }
        for step in 0..self.options.steps {
            self.step = step;
            self.random_step()?;
            if step % 64 == 0 {
                self.links.iter().try_for_each(|link| link.check_credit(false))?;
            }
        }
        if !self.host_pops {
            self.flood()?;
        }
        self.come_to_rest()?;
        let alive = self.alive.clone();
        let nodes: Vec<[usize; 2]> = self.links.iter().map(|link| link.nodes).collect();
        self.checker.at_rest(|(link, _)| nodes[link].iter().all(|node| alive[*node]))?;
        for link in &self.links {
            link.check_credit(true)?;
        }
        for cells in self.cells.iter().filter(|cells| alive[cells.node]) {
            cells.expect_all_free()?;
            if cells.busy_count() > 0 && alive.iter().all(|alive| *alive) {
                return Err(format!(
                    "node {}: {} cells are owned by nobody known",
                    cells.node,
                    cells.busy_count()
                ));
            }
        }
        Ok(())
    }

    // ---- steps

    fn random_step(&mut self) -> Check {
        self.due()?;
        match self.rng.below(100) {
            0..=44 => {
                for _ in 0..self.rng.between(1, 12) {
                    self.world.step();
                }
            }
            45..=69 => {
                let node = self.rng.below(self.fabrics.len() as u64) as usize;
                let most = self.rng.between(1, 32) as usize;
                self.poll(node, most)?;
            }
            70..=81 => self.submit()?,
            82..=87 => {
                let way = self.random_way();
                self.notify(way)?;
            }
            88..=91 if self.host_pops => self.pop_some()?,
            92..=93 => self.cancel()?,
            94..=95 => self.look_around()?,
            96..=97 => {
                let pause = self.rng.between(0, 300_000);
                self.world.advance_to_ns(self.world.now_ns() + pause);
            }
            _ if self.options.faults != Faults::None => self.fault(),
            _ => {}
        }
        Ok(())
    }

    fn random_way(&mut self) -> Way {
        (self.rng.below(self.links.len() as u64) as usize, self.rng.below(2) as usize)
    }

    fn working(&mut self, (link, side): Way) -> Option<&mut Open> {
        self.links[link].sides[side]
            .open
            .as_mut()
            .filter(|open| !open.ending && open.session.end_reason().is_none())
    }

    fn submit(&mut self) -> Check {
        let way @ (link, side) = self.random_way();
        let now = self.now();
        let Some(limit) = self.working(way).map(|open| open.session.message_limit()) else { return Ok(()) };
        let [local, remote] = [self.links[link].nodes[side], self.links[link].nodes[1 - side]];
        let epoch = self.links[link].epoch;
        let Some(lanes) = self.links[link].sides[side].open.as_ref().map(|open| open.lanes.clone()) else {
            return Ok(());
        };
        let max_message_bytes = self.links[link].shape.max_message_bytes;
        let poisoned = self.options.faults == Faults::All && self.rng.chance(1, 150);
        let notified = self.rng.chance(2, 3);
        let recipe = Recipe {
            rng: &mut self.rng,
            cells: &mut self.cells,
            local,
            remote,
            lanes: &lanes,
            max_message_bytes,
            epoch,
            poisoned,
        };
        let Some(mut work) = recipe.work(notified)? else { return Ok(()) };
        let id = self.checker.new_id();
        let len = self.message_len(limit);
        work.xfer.with_id = notified && self.rng.chance(1, 3);
        work.xfer.silent = work.xfer.with_id && self.rng.chance(1, 2);
        let len = if work.xfer.with_id { len.saturating_sub(ID_BYTES).max(ID_BYTES) } else { len };
        let text = (notified && !work.xfer.silent).then(|| message(id, len));
        let tell = Tell { message: text.as_deref(), id: work.xfer.with_id.then_some(id) };
        let Some(open) = self.working(way) else { return Ok(()) };
        match open.session.submit_telling(now, id, Arc::new(work.prepared), tell) {
            Ok(()) => {
                self.links[link].faulted |= work.xfer.poisoned;
                self.checker.submitted(way, id, work.xfer);
                self.pump(way)
            }
            Err(
                SubmitError::TooManyTransfers { .. }
                | SubmitError::TooManyMessageBytes { .. }
                | SubmitError::TooManyNotifications { .. },
            ) => {
                self.discard(&work.xfer);
                Ok(())
            }
            Err(error) => Err(format!("{way:?}: transfer {id} was not accepted: {error}")),
        }
    }

    fn discard(&mut self, xfer: &Xfer) {
        for piece in &xfer.pieces {
            self.cells[piece.local.node].give(piece.local);
            self.cells[piece.remote.node].give(piece.remote);
        }
    }

    fn message_len(&mut self, limit: usize) -> usize {
        match self.rng.below(6) {
            0 => limit,
            1 => 8,
            _ => self.rng.between(8, limit.min(300) as u64) as usize,
        }
    }

    /// Many notifications to hosts that take none; [`Link::check_inbox`] says when that goes too far.
    fn flood(&mut self) -> Check {
        for _ in 0..100 {
            self.due()?;
            for way in (0..self.links.len()).flat_map(|link| [(link, 0), (link, 1)]) {
                self.notify(way)?;
                self.look(way, true)?;
            }
            for _ in 0..8 * self.links.len() {
                self.world.step();
            }
            for node in 0..self.fabrics.len() {
                self.poll(node, 64)?;
            }
        }
        Ok(())
    }

    fn notify(&mut self, way @ (link, side): Way) -> Check {
        let limit = self.links[link].shape.limits.max_message_bytes as usize;
        let (len, now, id) = (self.message_len(limit), self.now(), self.checker.new_id());
        let text = message(id, len);
        let forever = Nanos(u64::MAX - 1);
        if !self.links[link].nodes.iter().all(|node| self.alive[*node]) {
            return Ok(());
        }
        let result = match &mut self.links[link].sides[side] {
            Side { open: Some(open), .. } if open.ending || open.session.end_reason().is_some() => {
                return Ok(());
            }
            Side { open: Some(open), .. } => open.session.notify(now, &text, forever),
            Side { carry, .. } => carry.queue(&text, forever, limit),
        };
        match result {
            Ok(_) => {
                self.checker.notified(way, id);
                self.pump(way)
            }
            Err(SubmitError::TooManyNotifications { .. }) => Ok(()),
            Err(error) => Err(format!("{way:?}: notification {id} was not accepted: {error}")),
        }
    }

    fn pop_some(&mut self) -> Check {
        let way = self.random_way();
        let most = self.rng.between(1, 8);
        self.pop(way, most as usize)
    }

    fn pop(&mut self, way @ (link, side): Way, most: usize) -> Check {
        let Side { open, carry, inbox } = &mut self.links[link].sides[side];
        let n = most.min(inbox.len());
        let bytes: u64 = inbox.drain(..n).map(|len| len as u64).sum();
        if n == 0 {
            return Ok(());
        }
        self.busy = true;
        match open {
            Some(open) => {
                open.session.on_popped(n as u64, bytes);
            }
            None => carry.on_popped(n as u64, bytes),
        }
        self.pump(way)
    }

    fn cancel(&mut self) -> Check {
        let way = self.random_way();
        let pending = self.checker.pending(way);
        if pending.is_empty() {
            return Ok(());
        }
        let id = pending[self.rng.below(pending.len() as u64) as usize];
        let Some(open) = self.working(way) else { return Ok(()) };
        if open.session.cancel(id) == CancelOutcome::NotFound {
            return Err(format!("{way:?}: transfer {id} is pending, but not found by cancel"));
        }
        self.pump(way)
    }

    /// What a driver does now and then: credit in, deadlines. All credit that a peer may wait for is out without it.
    fn look_around(&mut self) -> Check {
        let way = self.random_way();
        let early = self.rng.chance(1, 2);
        self.look(way, early)
    }

    /// `early`: at the credit page as well, though nothing waits for it.
    fn look(&mut self, way: Way, early: bool) -> Check {
        let now = self.now();
        let Some(open) = self.working(way) else { return Ok(()) };
        if open.session.waits_for_credit() || early {
            open.session.poll_credit(now, &open.memory);
        }
        self.pump(way)
    }

    /// Once nothing waits: all credit comes back, so that what is missing was lost.
    fn account(&mut self, way: Way) -> Check {
        if let Some(open) = self.working(way) {
            open.session.announce_all();
        }
        self.look(way, false)
    }

    fn fault(&mut self) {
        let way @ (link, side) = self.random_way();
        let [a, b] = self.links[link].nodes;
        let kind = self.rng.below(40);
        if kind != DEATH && self.options.faults == Faults::Deaths {
            return;
        }
        match kind {
            0..=9 => {
                let Some(open) = self.working(way) else { return };
                let count = open.endpoints.len() as u64;
                let nth = self.rng.below(count) as usize;
                let Some(endpoint) = self.working(way).map(|open| open.endpoints[nth]) else { return };
                self.links[link].faulted = true;
                self.world.kill_endpoint(self.links[link].nodes[side], endpoint);
            }
            // Short enough to be survived.
            10..=19 => self.world.partition(a, b, self.rng.between(1_000, self.retry_timeout_ns / 4)),
            20..=22 => {
                let duration = self.rng.between(1, 3) * self.retry_timeout_ns;
                self.world.partition(a, b, duration);
                self.links[link].suspect_until = self.world.now_ns() + duration + 4 * self.retry_timeout_ns;
            }
            23..=32 => self.world.stall(a, self.rng.between(1_000, self.retry_timeout_ns / 4)),
            33..=36 => self.tell(link, side, EndReason::PeerFenced("by the test".into())),
            DEATH if self.step > self.options.steps / 2 => self.kill_node(a),
            _ => {}
        }
    }

    pub(crate) fn tell(&mut self, link: usize, side: usize, reason: EndReason) {
        self.links[link].faulted = true;
        let delay = self.rng.between(1_000, 500_000);
        let epoch = self.links[link].epoch;
        self.schedule(delay, Later::Told { link, side, epoch, reason });
    }

    fn kill_node(&mut self, node: usize) {
        if !std::mem::replace(&mut self.alive[node], false) {
            return;
        }
        self.world.kill_node(node);
        for link in 0..self.links.len() {
            let Some(side) = self.links[link].nodes.iter().position(|n| *n == node) else { continue };
            if self.links[link].sides[side].open.take().is_some() {
                self.routes.retain(|_, way| *way != (link, side));
            }
            self.tell(link, 1 - side, EndReason::PeerGone("lifeline ended".into()));
        }
    }

    // ---- rest

    /// No more work and no more faults: everything must come to its end.
    fn come_to_rest(&mut self) -> Check {
        // Virtual time is free, so the limit is on turns in which nothing happens.
        let mut idle_turns = 0;
        while idle_turns < 8 {
            self.step += 1;
            self.busy = false;
            for _ in 0..16 {
                self.busy |= self.world.step();
            }
            self.due()?;
            for node in 0..self.fabrics.len() {
                self.poll(node, 64)?;
            }
            for link in 0..self.links.len() {
                for side in [0, 1] {
                    self.pop((link, side), usize::MAX)?;
                    if self.world.next_event_ns().is_none() {
                        self.look((link, side), true)?;
                    }
                    if idle_turns > 4 {
                        self.account((link, side))?;
                    }
                }
            }
            if self.world.next_event_ns().is_none() && !self.busy {
                match self.later.next_at() {
                    Some(at) => self.world.advance_to_ns(at),
                    None => idle_turns += 1,
                }
            } else {
                idle_turns = 0;
            }
            if self.step > self.options.steps + 2_000_000 {
                return Err("it never comes to rest".into());
            }
        }
        self.expect_idle()
    }

    fn expect_idle(&self) -> Check {
        for link in &self.links {
            let alive = link.nodes.iter().all(|node| self.alive[*node]);
            if alive && !link.is_open() {
                return Err(format!("{:?}: at rest, but not open", link.nodes));
            }
            for side in link.sides.iter().filter_map(|side| side.open.as_ref()).filter(|_| alive) {
                if !side.session.is_idle() {
                    let stats = side.session.stats();
                    return Err(format!(
                        "{:?}: stuck: {:?} {:?}",
                        link.nodes, stats.waiters, stats.endpoints
                    ));
                }
            }
        }
        Ok(())
    }
}

//! What the driver of the real engine does with threads: epochs, lifelines, completions, copies, pools, deadlines.

use super::checker::Way;
use super::link::Open;
use super::memory::View;
use super::swarm::Swarm;
use crate::{Check, Neglect};
use baton_core::two_sided::channel::Channel;
use baton_core::two_sided::report::{TwoEnd, TwoEvent};
use baton_core::two_sided::setup::Place;
use baton_fabric::{Completion, CompletionKind, Fabric};
use std::sync::Arc;

/// Something for later.
#[derive(Debug)]
pub(super) enum Later {
    /// A lifeline tells this side that its peer has fenced.
    Told { link: usize, side: usize, epoch: u32, why: &'static str },
    /// Both sides are closed: the next epoch.
    Reopen { link: usize },
    /// A side has waited for a session long enough: its transfers are failed, or the session is given up.
    GiveUp { link: usize, side: usize, session: bool },
    /// A host learns that another instance has taken its peer's place.
    Unbind { link: usize, side: usize },
    /// A dead node's name comes back.
    Restart { node: usize },
    /// A copy that a driver forgot to wait for.
    Stray { node: usize, addr: u64, bytes: Vec<u8> },
}

impl Swarm {
    pub(super) fn schedule(&mut self, delay_ns: u64, what: Later) {
        self.later.add(self.world.now_ns() + delay_ns, what);
    }

    pub(super) fn open(&mut self, link: usize) -> Check {
        let [a, b] = self.links[link].nodes;
        if self.gone(a) || self.gone(b) {
            return Ok(());
        }
        self.take_for_old(link);
        self.links[link].open(&self.world, [&self.fabrics[a], &self.fabrics[b]], &mut self.bounces)?;
        self.epochs += 1;
        for side in [0, 1] {
            let node = self.links[link].nodes[side];
            let Some(open) = &self.links[link].sides[side].open else { continue };
            for endpoint in &open.endpoints {
                self.routes.insert((node, *endpoint), (link, side));
            }
        }
        (0..2).try_for_each(|side| self.pump((link, side)))
    }

    /// What is due now: lifelines, reopenings, deadlines, pools, ends that have become quiet.
    pub(super) fn due(&mut self) -> Check {
        let now = self.now();
        while let Some(what) = self.later.due(now.0) {
            self.busy = true;
            match what {
                Later::Reopen { link } => self.open(link)?,
                Later::Told { link, side, epoch, why } => {
                    if self.links[link].epoch == epoch {
                        self.end((link, side), TwoEnd::Closed(why.into()))?;
                    }
                }
                Later::GiveUp { link, side, session: false } => self.fail_transfers((link, side))?,
                Later::GiveUp { link, side, session: true } => self.give_up((link, side))?,
                Later::Unbind { link, side } => self.unbind((link, side))?,
                Later::Restart { node } => self.restart(node)?,
                Later::Stray { node, addr, bytes } => self.world.store(node, addr, &bytes),
            }
        }
        for way in self.ways() {
            let node = self.links[way.0].nodes[way.1];
            let Some(open) = &mut self.links[way.0].sides[way.1].open else { continue };
            if open.ending {
                self.finish_end(way)?;
            } else if open.channel.next_timeout().is_some_and(|at| at <= now) {
                open.channel.on_timeout(now, &self.bounces[node].pool);
                self.pump(way)?;
            }
        }
        self.free_sources();
        for node in 0..self.bounces.len() {
            if self.bounces[node].wake.is_some_and(|at| at <= now) {
                self.serve_pool(node)?;
            }
        }
        Ok(())
    }

    fn free_sources(&mut self) {
        let (links, cells) = (&self.links, &mut self.cells);
        self.checker.sources.retain(|((link, side), run)| {
            let sends = links[*link].sides[*side].open.as_ref().is_some_and(|o| o.channel.has_outstanding());
            if !sends {
                cells[run.node].give(*run);
            }
            sends
        });
    }

    /// Slabs come and go; whoever is concerned is told.
    pub(super) fn serve_pool(&mut self, node: usize) -> Check {
        if self.gone(node) {
            return Ok(());
        }
        let now = self.now();
        let fabric = Arc::clone(&self.fabrics[node]);
        self.busy |= self.bounces[node].serve(now, &self.world, &fabric, &mut self.rng)?;
        while let Some(peer) = self.bounces[node].pool.next_hungry() {
            let link = peer.0 as usize;
            let Some(side) = self.links[link].nodes.iter().position(|other| *other == node) else {
                return Err(format!("node {node}: {peer:?} is none of its peers"));
            };
            if let Some(open) = &mut self.links[link].sides[side].open {
                open.channel.on_pool_changed();
                self.carry_out((link, side))?;
            }
        }
        Ok(())
    }

    /// Takes up to `most` completions of a node.
    pub(super) fn poll(&mut self, node: usize, most: usize) -> Check {
        let mut out = vec![Completion::EMPTY; most];
        let n = self.fabrics[node].poll(&mut out);
        for completion in &out[..n] {
            self.busy = true;
            let Some(way) = self.routes.get(&(node, completion.endpoint)).copied() else {
                return Err(format!("node {node}: a completion of nobody's endpoint: {completion:?}"));
            };
            let now = self.now();
            let gather = self.links[way.0].shape.gather;
            if let Some(open) = &mut self.links[way.0].sides[way.1].open {
                let bounce = &mut self.bounces[node];
                let (world, cells) = (&self.world, &self.cells[node]);
                let view = View { world, node, memory: &open.memory, slabs: &bounce.slabs, cells, gather };
                open.channel.on_completion(now, completion, &view, &mut bounce.pool);
                if completion.kind == CompletionKind::RecvMore {
                    open.rests.more(completion.endpoint);
                }
            }
            self.pump(way)?;
        }
        Ok(())
    }

    /// Carries out what a channel wants, hears what it has to tell, and looks after the pool.
    pub(super) fn pump(&mut self, way: Way) -> Check {
        self.carry_out(way)?;
        self.serve_pool(self.links[way.0].nodes[way.1])
    }

    fn carry_out(&mut self, way @ (link, side): Way) -> Check {
        let now = self.now();
        let (node, shape) = (self.links[link].nodes[side], self.links[link].shape);
        let how = (shape.gather, shape.head_from);
        let page = self.links[link].sides[1 - side].open.as_ref().map_or((0, 0), |open| open.memory.page());
        if let Some(open) = &mut self.links[link].sides[side].open {
            let (fabric, cells) = (&self.fabrics[node], &self.cells[node]);
            self.busy |= open.act(now, &self.world, fabric, &mut self.bounces[node], cells, page, how)?;
        }
        let mut ended = None;
        while let Some(event) = self.channel(way).and_then(Channel::next_event) {
            self.busy = true;
            match event {
                TwoEvent::XferDone { token, result } => {
                    self.checker.ended(way, token, result, &mut self.cells)?;
                }
                TwoEvent::NoteDone { token, sent } => self.checker.note_done(way, token, sent)?,
                TwoEvent::Delivered { message } => {
                    self.checker.delivered((link, 1 - side), &message, &self.cells)?;
                    self.links[link].sides[side].inbox.push_back(message.len());
                }
                TwoEvent::EndEpoch { reason } => ended = Some(reason),
            }
        }
        match ended {
            Some(reason) => self.end(way, reason),
            None => Ok(()),
        }
    }

    pub(super) fn channel(&mut self, (link, side): Way) -> Option<&mut Channel> {
        self.links[link].sides[side].open.as_mut().map(|open| &mut open.channel)
    }

    /// One copy of a side ends.
    pub(super) fn copy(&mut self, way @ (link, side): Way, which: usize) -> Check {
        let now = self.now();
        let node = self.links[link].nodes[side];
        let Some(open) = &mut self.links[link].sides[side].open else { return Ok(()) };
        self.busy = true;
        let job = open.copies.swap_remove(which);
        let bounce = &mut self.bounces[node];
        let (from, _) = bounce.slabs.place(job.slot, job.at as usize, job.len as usize);
        let mut bytes = vec![0; job.len as usize];
        self.world.load(node, from, &mut bytes);
        let to = match job.to {
            Place::Local(addr) => addr,
            Place::Region(_, offset) => self.cells[node].base + offset,
        };
        self.world.store(node, to, &bytes);
        open.channel.on_placed(now, job.ticket, job.len, Ok(()), &mut bounce.pool);
        self.pump(way)
    }

    /// Steps 1 and 2 of the end of an epoch on one side, and FENCE to the other.
    pub(super) fn end(&mut self, (link, side): Way, reason: TwoEnd) -> Check {
        let now = self.world.now_ns();
        let state = &mut self.links[link];
        if !state.faulted && state.suspect_until <= now {
            return Err(format!("{:?}: the epoch ended without a fault: {reason}", (link, side)));
        }
        if !matches!(reason, TwoEnd::WorkFailed { .. } | TwoEnd::Closed(_)) {
            return Err(format!("{:?}: the protocol broke: {reason}", (link, side)));
        }
        let [node, peer] = [state.nodes[side], state.nodes[1 - side]];
        let Some(open) = state.sides[side].open.as_mut().filter(|open| !open.ending) else { return Ok(()) };
        if self.cells[peer].gone {
            match reason {
                TwoEnd::WorkFailed { .. } => self.reached.deaths_found += 1,
                _ => self.reached.deaths_told += 1,
            }
        }
        open.channel.shut(&reason.to_string());
        open.ending = true;
        if self.rng.chance(1, 2) {
            // What is here is taken.
            self.end_rests((link, side))?;
        }
        if let Some(open) = &mut self.links[link].sides[side].open {
            open.fence(&self.fabrics[node]);
        }
        self.tell(link, 1 - side);
        Ok(())
    }

    pub(super) fn tell(&mut self, link: usize, side: usize) {
        self.links[link].faulted = true;
        let delay = self.rng.between(1_000, 500_000);
        let (epoch, why) = (self.links[link].epoch, "the peer has fenced");
        self.schedule(delay, Later::Told { link, side, epoch, why });
    }

    /// Steps 3 to 6, once the endpoints are quiet.
    fn finish_end(&mut self, way @ (link, side): Way) -> Check {
        let node = self.links[link].nodes[side];
        let fabric = Arc::clone(&self.fabrics[node]);
        let quiet = self.links[link].sides[side].open.as_ref().is_some_and(|open| open.is_quiet(&fabric));
        if !quiet {
            return Ok(());
        }
        if self.rng.chance(1, 2) {
            // Another time: there is still something to do.
            self.busy = true;
            return Ok(());
        }
        while !fabric.arm() {
            self.poll(node, 64)?;
        }
        let works = |open: &Open| !open.copies.is_empty() || !open.rests.is_empty();
        while self.links[link].sides[side].open.as_ref().is_some_and(works) {
            if self.links[link].sides[side].open.as_ref().is_some_and(|open| !open.copies.is_empty()) {
                self.forget_copy(way);
                self.copy(way, 0)?;
            }
            self.end_rests(way)?;
        }
        self.carry_out(way)?;
        let Some(open) = self.links[link].sides[side].open.take() else { return Ok(()) };
        self.busy = true;
        self.routes.retain(|_, other| *other != way);
        let Open { channel, memory, endpoints, .. } = open;
        endpoints.iter().for_each(|endpoint| fabric.destroy_endpoint(*endpoint));
        let now = self.now();
        let pool = &mut self.bounces[node].pool;
        let closed = channel.close(now, pool);
        // All slots are back, or this stops the run.
        pool.leave(self.links[link].peer);
        if !(self.neglects(Neglect::Memory) && self.gone(self.links[link].nodes[1 - side])) {
            memory.free(&self.world, &fabric)?;
        }
        self.reached.add(&closed.counters);
        for (token, result) in closed.done {
            self.checker.ended(way, token, result, &mut self.cells)?;
        }
        self.links[link].sides[side].durable = Some(closed.durable);
        self.after_close(way)?;
        self.serve_pool(node)
    }
}

//! What the driver of the real engine does with threads: epochs, lifelines, completions, deadlines.

use crate::Check;
use crate::checker::Way;
use crate::link::Open;
use crate::swarm::Swarm;
use baton_core::notify::ID_BYTES;
use baton_core::peer::{EndReason, Event};
use baton_fabric::{Completion, Fabric};
use std::sync::Arc;

/// Something for later.
#[derive(Debug)]
pub(crate) enum Later {
    /// A lifeline tells this side that its peer has fenced, or is gone.
    Told { link: usize, side: usize, epoch: u32, reason: EndReason },
    /// Both sides are closed: the next epoch.
    Reopen { link: usize },
}

impl Swarm {
    pub(crate) fn schedule(&mut self, delay_ns: u64, what: Later) {
        self.later.add(self.world.now_ns() + delay_ns, what);
    }

    pub(crate) fn open(&mut self, link: usize) -> Check {
        let [a, b] = self.links[link].nodes;
        if !self.alive[a] || !self.alive[b] {
            return Ok(());
        }
        let fabrics = [&self.fabrics[a], &self.fabrics[b]];
        self.links[link].open(&self.world, fabrics)?;
        self.epochs += 1;
        for side in [0, 1] {
            let node = self.links[link].nodes[side];
            let Some(open) = &self.links[link].sides[side].open else { continue };
            for endpoint in &open.endpoints {
                self.routes.insert((node, *endpoint), (link, side));
            }
            self.pump((link, side))?;
        }
        Ok(())
    }

    /// What is due now: lifelines, reopenings, deadlines, ends that have become quiet.
    pub(crate) fn due(&mut self) -> Check {
        let now = self.now();
        while let Some(what) = self.later.due(now.0) {
            self.busy = true;
            match what {
                Later::Reopen { link } => self.open(link)?,
                Later::Told { link, side, epoch, reason } => {
                    if self.links[link].epoch == epoch {
                        self.end((link, side), reason)?;
                    }
                }
            }
        }
        for link in 0..self.links.len() {
            for side in [0, 1] {
                let Some(open) = &mut self.links[link].sides[side].open else { continue };
                if open.ending {
                    self.finish_end((link, side))?;
                } else if open.session.next_timeout().is_some_and(|at| at <= now) {
                    open.session.on_timeout(now);
                    self.pump((link, side))?;
                }
            }
        }
        Ok(())
    }

    /// Takes up to `most` completions of a node.
    pub(crate) fn poll(&mut self, node: usize, most: usize) -> Check {
        let mut out = vec![Completion::EMPTY; most];
        let n = self.fabrics[node].poll(&mut out);
        for completion in &out[..n] {
            self.busy = true;
            let Some(way) = self.routes.get(&(node, completion.endpoint)).copied() else {
                return Err(format!("node {node}: a completion of nobody's endpoint: {completion:?}"));
            };
            let now = self.now();
            if let Some(open) = &mut self.links[way.0].sides[way.1].open {
                open.session.on_completion(now, completion, &open.memory);
            }
            self.pump(way)?;
        }
        Ok(())
    }

    /// Carries out what a session wants, and hears what it has to tell.
    pub(crate) fn pump(&mut self, way @ (link, side): Way) -> Check {
        let now = self.now();
        let node = self.links[link].nodes[side];
        let mut ended = None;
        if let Some(open) = &mut self.links[link].sides[side].open {
            self.busy |= open.act(now, &self.fabrics[node])?;
        }
        while let Some(event) = self.links[link].sides[side].open.as_mut().and_then(Open::next_event) {
            self.busy = true;
            match event {
                Event::XferDone { token, result } => {
                    self.checker.ended(way, token, result, false, &mut self.cells)?
                }
                Event::Delivered { message } => {
                    self.checker.delivered((link, 1 - side), &message, &mut self.cells)?;
                    self.links[link].sides[side].inbox.push_back(message.len());
                    self.links[link].check_inbox(side)?;
                }
                Event::Landed { id } => {
                    self.checker.landed((link, 1 - side), id, &mut self.cells)?;
                    self.links[link].sides[side].inbox.push_back(ID_BYTES);
                    self.links[link].check_inbox(side)?;
                }
                Event::NotifyExpired { seq } => {
                    return Err(format!("{way:?}: {seq:?} expired, without a deadline"));
                }
                Event::EndEpoch { reason } => ended = Some(reason),
            }
        }
        match ended {
            Some(reason) => self.end(way, reason),
            None => Ok(()),
        }
    }

    /// Steps 1 and 2 of the end of an epoch on one side, and FENCE to the other.
    pub(crate) fn end(&mut self, (link, side): Way, reason: EndReason) -> Check {
        let state = &mut self.links[link];
        let explained = state.faulted || state.suspect_until > self.world.now_ns();
        if !explained {
            return Err(format!("{:?}: the epoch ended without a fault: {reason}", (link, side)));
        }
        let violation = matches!(
            reason,
            EndReason::Violation(_) | EndReason::BadCompletion { .. } | EndReason::Stalled { .. }
        );
        if violation {
            return Err(format!("{:?}: the protocol broke: {reason}", (link, side)));
        }
        let node = state.nodes[side];
        let Some(open) = state.sides[side].open.as_mut().filter(|open| !open.ending) else { return Ok(()) };
        open.fence(&self.fabrics[node]);
        self.tell(link, 1 - side, EndReason::PeerFenced(reason.to_string()));
        Ok(())
    }

    /// Steps 3 to 6, once the endpoints are quiet.
    pub(crate) fn finish_end(&mut self, way @ (link, side): Way) -> Check {
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
        let Some(open) = self.links[link].sides[side].open.take() else { return Ok(()) };
        self.busy = true;
        self.routes.retain(|_, other| *other != way);
        let closed = open.close(&fabric, EndReason::PeerFenced("told by the peer".into()))?;
        self.reached.add(&closed.counters);
        for (token, failure) in closed.failed {
            self.checker.ended(way, token, Err(failure), true, &mut self.cells)?;
        }
        self.links[link].sides[side].carry = closed.carry;
        let state = &self.links[link];
        if state.sides.iter().all(|side| side.open.is_none()) {
            let survivors = [0, 1].map(|side| self.alive[state.nodes[side]]);
            self.checker.epoch_closed(link, state.epoch, survivors, &mut self.cells)?;
            let delay = self.rng.between(10_000, 2_000_000);
            self.schedule(delay, Later::Reopen { link });
        }
        Ok(())
    }
}

//! How a world goes on: step by step until it rests, and from one deadline to the next.

use super::*;

impl World {
    /// One step or, where there is none, what a driver does before it sleeps: re-read credit, tell everything. `false`: at rest.
    pub fn turn(&mut self) -> bool {
        if self.step() {
            return true;
        }
        let mut moved = false;
        for n in [0, 1] {
            let node = &mut self.nodes[n];
            if node.channel.waits_for_credit() {
                moved |= node.channel.poll_credit(&node.mem);
            }
            self.nodes[n].channel.flush();
            moved |= self.pump(n);
        }
        moved
    }

    /// Runs until nothing moves any more.
    pub fn settle(&mut self) {
        for _ in 0..5_000_000u64 {
            if !self.turn() {
                return;
            }
        }
        panic!("the world does not come to rest: {:#?}", self.nodes[0].channel.stats());
    }

    /// Lets time pass, up to `ms`, from one deadline to the next.
    pub fn pass(&mut self, ms: u64) {
        let until = self.now.plus_ms(ms);
        let mut stuck = 0;
        loop {
            self.settle();
            let channels = self.nodes.iter().filter_map(|node| node.channel.next_timeout());
            let pools = self.nodes.iter().filter_map(|node| node.pool.next_timeout(self.now));
            let next = channels.chain(pools).min().unwrap_or(Nanos(u64::MAX));
            if next <= self.now {
                stuck += 1;
                assert!(
                    stuck < 1000,
                    "a deadline that has passed stays: {:#?}",
                    self.nodes[0].channel.stats()
                );
            } else {
                stuck = 0;
            }
            let next = next.max(Nanos(self.now.0 + 1));
            if next > until {
                self.now = until.max(self.now);
                return self.settle();
            }
            self.now = next;
            for n in [0, 1] {
                let node = &mut self.nodes[n];
                // A driver calls nobody who has not asked for it.
                if node.channel.next_timeout().is_some_and(|at| at <= self.now) {
                    node.channel.on_timeout(self.now, &node.pool);
                }
                self.pump(n);
            }
        }
    }
}

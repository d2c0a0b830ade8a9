//! Several peers of one engine share its bounce pool.

use super::*;

/// Worlds whose node 1 is the same engine: its pool goes to the world that is at work.
pub struct Engine {
    pub pool: Pool,
    pub worlds: Vec<World>,
    /// Turns of each.
    pub steps: Vec<u64>,
}

impl Engine {
    pub fn new(peers: u32, pool: PoolConfig) -> Engine {
        Engine::with_config(peers, Config { pool, ..Config::default() })
    }

    pub fn with_config(peers: u32, config: Config) -> Engine {
        let pool = config.pool;
        let mut engine = Engine { pool: Pool::new(pool, START), worlds: Vec::new(), steps: Vec::new() };
        let slabs = Slabs::default();
        for n in 0..peers {
            let config = Config { peer: PeerKey(n), ..config.clone() };
            let shared = std::mem::replace(&mut engine.pool, Pool::new(pool, START));
            let mut world = World::with_pool(config, n.into(), shared, slabs.clone());
            std::mem::swap(&mut world.nodes[1].pool, &mut engine.pool);
            engine.worlds.push(world);
            engine.steps.push(0);
        }
        engine
    }

    pub fn with<T>(&mut self, n: usize, work: impl FnOnce(&mut World) -> T) -> T {
        std::mem::swap(&mut self.worlds[n].nodes[1].pool, &mut self.pool);
        let result = work(&mut self.worlds[n]);
        std::mem::swap(&mut self.worlds[n].nodes[1].pool, &mut self.pool);
        // Whoever waits for slots is told by the engine, whichever session it is.
        while let Some(peer) = self.pool.next_hungry() {
            self.worlds[peer.0 as usize].nodes[1].channel.on_pool_changed();
        }
        result
    }

    pub fn turn(&mut self, n: usize) {
        self.steps[n] += 1;
        self.with(n, |world| world.turn());
    }
}

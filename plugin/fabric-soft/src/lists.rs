//! Gather lists of SENDs under way.

use baton_fabric::Sge;

/// [`baton_fabric::Caps::max_send_sge`] of the software fabrics: as many as current adapters have.
pub const MAX_SEND_SGE: u32 = 30;

/// Lists by number. As many as were ever under way at once stay allocated, so that a queue at work allocates nothing.
#[derive(Default)]
pub struct Lists {
    lists: Vec<Vec<Sge>>,
    free: Vec<u32>,
}

impl Lists {
    /// Keeps a list until [`Lists::give_back`]; `room` is the longest that will ever be kept here.
    pub fn keep(&mut self, pieces: impl Iterator<Item = Sge>, room: usize) -> u32 {
        let index = self.free.pop().unwrap_or_else(|| {
            self.lists.push(Vec::with_capacity(room));
            self.free.reserve(self.lists.len());
            self.lists.len() as u32 - 1
        });
        let list = &mut self.lists[index as usize];
        list.clear();
        list.extend(pieces);
        index
    }

    /// The pieces, in order.
    pub fn get(&self, index: u32) -> &[Sge] {
        &self.lists[index as usize]
    }

    /// It is needed no more.
    pub fn give_back(&mut self, index: u32) {
        self.free.push(index);
    }
}

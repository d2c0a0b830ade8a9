//! Slots that are reused under another generation, so that a stale handle never names a stranger.

#[derive(Debug)]
pub(super) struct Slab<T> {
    slots: Vec<Slot<T>>,
    /// Free indices; the one free for longest is reused first.
    free: std::collections::VecDeque<u32>,
    used: usize,
}

#[derive(Debug)]
struct Slot<T> {
    generation: u32,
    value: Option<T>,
}

impl<T> Slab<T> {
    pub(super) fn new() -> Self {
        Self { slots: Vec::new(), free: std::collections::VecDeque::new(), used: 0 }
    }

    /// Values in it.
    pub(super) fn used(&self) -> usize {
        self.used
    }

    /// Puts in what `make` yields for the slot's index and generation.
    pub(super) fn insert<E>(&mut self, make: impl FnOnce(u32, u32) -> Result<T, E>) -> Result<(), E> {
        let index = self.free.front().copied().unwrap_or(self.slots.len() as u32);
        let generation = self.slots.get(index as usize).map_or(0, |slot| slot.generation);
        let value = Some(make(index, generation)?);
        match self.free.pop_front() {
            Some(_) => self.slots[index as usize].value = value,
            None => self.slots.push(Slot { generation, value }),
        }
        self.used += 1;
        Ok(())
    }

    pub(super) fn find(&self, index: u32) -> Option<&T> {
        self.slots.get(index as usize)?.value.as_ref()
    }

    pub(super) fn find_mut(&mut self, index: u32) -> Option<&mut T> {
        self.slots.get_mut(index as usize)?.value.as_mut()
    }

    pub(super) fn remove(&mut self, index: u32) -> Option<T> {
        let slot = self.slots.get_mut(index as usize)?;
        let value = slot.value.take()?;
        slot.generation = slot.generation.wrapping_add(1);
        self.free.push_back(index);
        self.used -= 1;
        Some(value)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &T> {
        self.slots.iter().filter_map(|slot| slot.value.as_ref())
    }
}

//! Memory of large transfers that are gone, kept for the next ones.
//!
//! The kernel hands out fresh memory page by page and clears it first. For a request of 120,000 blocks, made anew for every
//! sequence, that takes as long as everything else that preparing it means.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use baton_fabric::Template;

use crate::plan::Pair;

/// Below so many bytes an allocator has memory at hand itself.
const MIN_BYTES: usize = 256 << 10;
/// Bytes of one kind of elements that are kept at most, in all engines of a process together.
const MAX_KEPT_BYTES: usize = 16 << 20;
/// How much too large a buffer may be.
const MAX_SURPLUS: usize = 4;

/// Whether anything was taken or kept since the last [`tend`].
static USED: AtomicBool = AtomicBool::new(false);

/// Buffers of one kind of elements.
pub struct Shelf<T> {
    kept: Mutex<Vec<Vec<T>>>,
}

fn bytes<T>(capacity: usize) -> usize {
    capacity.saturating_mul(size_of::<T>())
}

impl<T> Shelf<T> {
    const fn new() -> Shelf<T> {
        Shelf { kept: Mutex::new(Vec::new()) }
    }

    /// An empty buffer; the smallest of those kept that are large enough, or a new one. Never waits for another thread.
    fn take(&self, capacity: usize) -> Vec<T> {
        if bytes::<T>(capacity) < MIN_BYTES {
            return Vec::with_capacity(capacity);
        }
        USED.store(true, Ordering::Relaxed);
        let found = self.kept.try_lock().ok().and_then(|mut kept| {
            let fits =
                |one: &Vec<T>| (capacity..=capacity.saturating_mul(MAX_SURPLUS)).contains(&one.capacity());
            let best =
                kept.iter().enumerate().filter(|(_, one)| fits(one)).min_by_key(|(_, one)| one.capacity());
            best.map(|(at, _)| at).map(|at| kept.swap_remove(at))
        });
        found.unwrap_or_else(|| Vec::with_capacity(capacity))
    }

    fn keep(&self, mut buffer: Vec<T>) {
        if bytes::<T>(buffer.capacity()) < MIN_BYTES {
            return;
        }
        buffer.clear();
        if let Ok(mut kept) = self.kept.try_lock() {
            let so_far: usize = kept.iter().map(|one| bytes::<T>(one.capacity())).sum();
            if so_far + bytes::<T>(buffer.capacity()) <= MAX_KEPT_BYTES {
                USED.store(true, Ordering::Relaxed);
                kept.push(buffer);
            }
        }
    }

    fn clear(&self) {
        let kept = self.kept.try_lock().map(|mut kept| std::mem::take(&mut *kept));
        // Freed after the lock.
        drop(kept);
    }
}

/// Gives back what is kept, unless some of it was used since the last call.
pub fn tend() {
    if !USED.swap(false, Ordering::Relaxed) {
        PAIRS.clear();
        WORDS.clear();
        TEMPLATES.clear();
    }
}

static PAIRS: Shelf<Pair> = Shelf::new();
static WORDS: Shelf<u64> = Shelf::new();
static TEMPLATES: Shelf<Template> = Shelf::new();

/// Elements that have a shelf.
pub trait Shelved: Copy + 'static {
    /// Where their buffers are kept.
    fn shelf() -> &'static Shelf<Self>;
}

impl Shelved for Pair {
    fn shelf() -> &'static Shelf<Pair> {
        &PAIRS
    }
}

impl Shelved for u64 {
    fn shelf() -> &'static Shelf<u64> {
        &WORDS
    }
}

impl Shelved for Template {
    fn shelf() -> &'static Shelf<Template> {
        &TEMPLATES
    }
}

/// A `Vec` whose memory was another one's before and is kept for the next one, if it is large.
pub struct Spare<T: Shelved>(Vec<T>);

impl<T: Shelved> Spare<T> {
    /// An empty one with room for so many.
    pub fn with_capacity(capacity: usize) -> Spare<T> {
        Spare(T::shelf().take(capacity))
    }
}

impl<T: Shelved> Drop for Spare<T> {
    fn drop(&mut self) {
        T::shelf().keep(std::mem::take(&mut self.0));
    }
}

impl<T: Shelved> From<Vec<T>> for Spare<T> {
    fn from(all: Vec<T>) -> Spare<T> {
        Spare(all)
    }
}

impl<T: Shelved> Deref for Spare<T> {
    type Target = Vec<T>;

    fn deref(&self) -> &Vec<T> {
        &self.0
    }
}

impl<T: Shelved> DerefMut for Spare<T> {
    fn deref_mut(&mut self) -> &mut Vec<T> {
        &mut self.0
    }
}

impl<T: Shelved> Clone for Spare<T> {
    fn clone(&self) -> Spare<T> {
        let mut copy = Spare::with_capacity(self.len());
        copy.extend_from_slice(self);
        copy
    }
}

impl<T: Shelved + PartialEq> PartialEq for Spare<T> {
    fn eq(&self, other: &Spare<T>) -> bool {
        self.0 == other.0
    }
}

impl<T: Shelved + Eq> Eq for Spare<T> {}

impl<T: Shelved + fmt::Debug> fmt::Debug for Spare<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept<T>(shelf: &Shelf<T>) -> Vec<usize> {
        shelf.kept.lock().unwrap().iter().map(Vec::capacity).collect()
    }

    #[test]
    fn large_buffers_come_back_empty_and_small_ones_are_the_allocators() {
        let shelf: Shelf<u64> = Shelf::new();
        let mut large = shelf.take(100_000);
        large.extend(0..100_000);
        let (place, capacity) = (large.as_ptr(), large.capacity());
        shelf.keep(large);
        shelf.keep(vec![1; 10]);
        assert_eq!(kept(&shelf), [capacity]);
        let others = [10, capacity + 1, MIN_BYTES / 8 - 1].map(|wanted| shelf.take(wanted));
        assert!(others.iter().all(|other| other.as_ptr() != place), "it is too small, or they are");
        let again = shelf.take(90_000);
        assert_eq!((again.as_ptr(), again.len()), (place, 0));
        assert_eq!(kept(&shelf), [0; 0]);
    }

    #[test]
    fn what_is_kept_has_a_limit_and_none_is_much_too_large() {
        let shelf: Shelf<u64> = Shelf::new();
        for _ in 0..10 {
            shelf.keep(Vec::with_capacity(MAX_KEPT_BYTES / 8 / 3));
        }
        assert_eq!(kept(&shelf).len(), 3);
        assert!(shelf.take(MIN_BYTES / 8).capacity() < MAX_KEPT_BYTES / 8 / 3, "it would waste much");
        shelf.clear();
        assert!(kept(&shelf).is_empty());
    }

    #[test]
    fn whoever_holds_the_shelf_holds_nobody_up() {
        let shelf: Shelf<u64> = Shelf::new();
        let held = shelf.kept.lock().unwrap();
        let buffer = shelf.take(100_000);
        shelf.keep(buffer);
        shelf.clear();
        assert!(held.is_empty());
    }
}

//! Who has work, and who sleeps: a set of endpoint slots and a doorbell, in memory that peers share.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use super::shm::{Mapping, Plain};
use super::sys;

/// Endpoints of one fabric at most: one summary word of 64 words of 64 bits.
pub const MAX_SLOTS: usize = 4096;

/// Bytes of a door page.
pub const DOOR_BYTES: usize = 4096;
/// The first thing that two processes look at: it changes with the layout of doors and of rings, so that those of different versions pass
/// the fabric over before they make endpoints.
const DOOR_MAGIC: u64 = u64::from_le_bytes(*b"BATONDR3");

/// A set of slots that any thread or process adds to and takes from without a lock.
///
/// A bit of the summary says that its word may hold bits. Adding sets the bit first and the summary second, taking clears
/// the summary first: so a bit whose summary bit was just taken is either seen now or announced anew.
#[repr(C, align(64))]
pub struct SlotSet {
    summary: AtomicU64,
    _pad: [u64; 7],
    words: [AtomicU64; 64],
}

impl SlotSet {
    pub fn new() -> SlotSet {
        SlotSet { summary: AtomicU64::new(0), _pad: [0; 7], words: [const { AtomicU64::new(0) }; 64] }
    }

    pub fn is_empty(&self) -> bool {
        self.summary.load(Ordering::SeqCst) == 0
    }

    /// Adds a slot; whatever was stored before is seen by whoever takes it.
    pub fn add(&self, slot: u32) {
        let (word, bit) = (slot as usize / 64 % 64, 1 << (slot % 64));
        fence(Ordering::SeqCst);
        // Whoever clears the bit looks at the rings afterwards, so an announced slot need not be announced again.
        if self.words[word].load(Ordering::Relaxed) & bit == 0 {
            self.words[word].fetch_or(bit, Ordering::SeqCst);
        }
        if self.summary.load(Ordering::SeqCst) & (1 << word) == 0 {
            self.summary.fetch_or(1 << word, Ordering::SeqCst);
        }
    }

    /// Takes every slot.
    pub fn take(&self, mut each: impl FnMut(u32)) {
        if self.is_empty() {
            return;
        }
        let mut summary = self.summary.swap(0, Ordering::SeqCst);
        while summary != 0 {
            let word = summary.trailing_zeros();
            summary &= summary - 1;
            let mut bits = self.words[word as usize].swap(0, Ordering::SeqCst);
            while bits != 0 {
                each(word * 64 + bits.trailing_zeros());
                bits &= bits - 1;
            }
        }
    }

    /// Takes one slot, the first at or behind `from` in ring order.
    pub fn pop(&self, from: u32) -> Option<u32> {
        let first = from / 64 % 64;
        let summary = self.summary.load(Ordering::SeqCst);
        let pop = |word: u32, mask| Some(word * 64 + self.pop_bit(word as usize, mask)?);
        // The starting word is looked at twice: first its upper part, last its lower.
        let starts_here = summary & (1 << first) != 0;
        let upper = u64::MAX << (from % 64);
        if starts_here && let Some(slot) = pop(first, upper) {
            return Some(slot);
        }
        let mut others = (summary & !(1 << first)).rotate_right(first);
        while others != 0 {
            let word = (first + others.trailing_zeros()) % 64;
            others &= others - 1;
            if let Some(slot) = pop(word, u64::MAX) {
                return Some(slot);
            }
        }
        if starts_here { pop(first, !upper) } else { None }
    }

    fn pop_bit(&self, word: usize, mask: u64) -> Option<u32> {
        loop {
            let bits = self.words[word].load(Ordering::SeqCst);
            if bits & mask == 0 {
                self.tidy(word);
                return None;
            }
            let bit = (bits & mask).trailing_zeros();
            if self.words[word].fetch_and(!(1 << bit), Ordering::SeqCst) & (1 << bit) != 0 {
                self.tidy(word);
                return Some(bit);
            }
        }
    }

    /// Forgets a slot.
    pub fn remove(&self, slot: u32) {
        let word = slot as usize / 64 % 64;
        self.words[word].fetch_and(!(1 << (slot % 64)), Ordering::SeqCst);
        self.tidy(word);
    }

    /// Clears the summary bit of an empty word.
    fn tidy(&self, word: usize) {
        if self.words[word].load(Ordering::SeqCst) == 0 {
            self.summary.fetch_and(!(1 << word), Ordering::SeqCst);
            if self.words[word].load(Ordering::SeqCst) != 0 {
                self.summary.fetch_or(1 << word, Ordering::SeqCst);
            }
        }
    }
}

#[repr(C, align(64))]
struct Page {
    magic: AtomicU64,
    _pad: [u64; 7],
    /// 1 while the service thread sleeps on its event descriptor or is about to.
    sleeping: AtomicU32,
    _pad2: [u32; 15],
    /// 1 while a peer pulls megabytes out of the owner's memory: a hint.
    pulled: AtomicU32,
    /// 1 after a peer has withdrawn a managed region that the owner may have mapped.
    withdrawn: AtomicU32,
    _pad3: [u32; 14],
    slots: SlotSet,
}

// SAFETY: atomics and padding.
unsafe impl Plain for Page {}

const _: () = assert!(size_of::<Page>() <= DOOR_BYTES);

/// A fabric's door, its own or a mapped one of a peer: peers put slots in and wake the sleeper.
pub struct Door {
    page: Mapping,
    event: OwnedFd,
}

impl Door {
    /// A door of this fabric's own, and the descriptor of its page.
    pub fn create() -> io::Result<(OwnedFd, Door)> {
        let (fd, page) = Mapping::create("baton-door", DOOR_BYTES)?;
        let door = Door { page, event: sys::new_eventfd()? };
        door.page().magic.store(DOOR_MAGIC, Ordering::Release);
        Ok((fd, door))
    }

    /// A peer's door, by descriptors fetched from it.
    pub fn open(page: &OwnedFd, event: OwnedFd) -> io::Result<Door> {
        // Ringing must never block.
        if !rustix::fs::fcntl_getfl(&event)?.contains(rustix::fs::OFlags::NONBLOCK) {
            return Err(io::Error::other("a doorbell that may block"));
        }
        let door = Door { page: Mapping::open(page.as_fd(), DOOR_BYTES)?, event };
        match door.page().magic.load(Ordering::Acquire) {
            DOOR_MAGIC => Ok(door),
            other => Err(io::Error::other(format!("a door page with the magic {other:#x}"))),
        }
    }

    fn page(&self) -> &Page {
        self.page.at(0)
    }

    /// Slots for which somebody did something.
    pub fn slots(&self) -> &SlotSet {
        &self.page().slots
    }

    pub fn event(&self) -> &OwnedFd {
        &self.event
    }

    /// Announces a slot, and wakes the sleeper if `wake`. Returns whether a system call was needed.
    pub fn announce(&self, slot: u32, wake: bool) -> bool {
        self.slots().add(slot);
        wake && self.wake()
    }

    /// Wakes the sleeper, if there is one. Pairs with [`Door::sleep`]: either the sleeper sees what was announced before,
    /// or this sees it sleeping.
    pub fn wake(&self) -> bool {
        fence(Ordering::SeqCst);
        let sleeping = &self.page().sleeping;
        let asleep = sleeping.load(Ordering::Relaxed) != 0 && sleeping.swap(0, Ordering::SeqCst) != 0;
        if asleep {
            sys::ring(&self.event);
        }
        asleep
    }

    /// Says that the owner is about to sleep; it must look at everything once more afterwards.
    pub fn sleep(&self) {
        self.page().sleeping.store(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Says that megabytes are being pulled out of the owner's memory, or no more.
    pub fn set_pulled(&self, pulled: bool) {
        self.page().pulled.store(u32::from(pulled), Ordering::Relaxed);
    }

    /// Whether somebody pulls megabytes out of the owner's memory. A hint: a peer that was killed leaves it standing.
    pub fn is_pulled(&self) -> bool {
        self.page().pulled.load(Ordering::Relaxed) != 0
    }

    /// Tells the owner that a managed region of a peer is gone.
    pub fn set_withdrawn(&self) {
        self.page().withdrawn.store(1, Ordering::SeqCst);
    }

    /// Whether a peer has said so since the last call.
    pub fn take_withdrawn(&self) -> bool {
        let withdrawn = &self.page().withdrawn;
        withdrawn.load(Ordering::Relaxed) != 0 && withdrawn.swap(0, Ordering::SeqCst) != 0
    }

    /// Whether nobody has rung since [`Door::sleep`].
    pub fn is_asleep(&self) -> bool {
        self.page().sleeping.load(Ordering::SeqCst) != 0
    }

    /// Says that the owner is awake.
    pub fn awake(&self) {
        self.page().sleeping.store(0, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_gives_back_each_slot_once_in_ring_order() {
        let set = SlotSet::new();
        for slot in [5, 63, 64, 4095, 0, 5] {
            set.add(slot);
        }
        assert_eq!(set.pop(60), Some(63));
        assert_eq!(set.pop(64), Some(64));
        assert_eq!(set.pop(65), Some(4095));
        assert_eq!(set.pop(6), Some(0));
        assert_eq!(set.pop(6), Some(5));
        assert_eq!(set.pop(6), None);
        assert!(set.is_empty());
        set.add(7);
        set.add(4000);
        let mut all = Vec::new();
        set.take(|slot| all.push(slot));
        assert_eq!(all, [7, 4000]);
        assert!(set.is_empty());
    }

    #[test]
    fn no_slot_is_lost_between_threads() {
        let set = SlotSet::new();
        let counts: Vec<AtomicU32> = (0..256).map(|_| AtomicU32::new(0)).collect();
        let taken = AtomicU32::new(0);
        std::thread::scope(|scope| {
            for thread in 0..2u32 {
                let (set, counts) = (&set, &counts);
                scope.spawn(move || {
                    for round in 0..20_000u32 {
                        let slot = (round * 7 + thread) % 256;
                        counts[slot as usize].fetch_add(1, Ordering::SeqCst);
                        set.add(slot);
                    }
                });
            }
            let done = std::time::Instant::now() + std::time::Duration::from_secs(20);
            while taken.load(Ordering::Relaxed) < 40_000 {
                let mut see = |slot: u32| {
                    taken.fetch_add(counts[slot as usize].swap(0, Ordering::SeqCst), Ordering::Relaxed);
                };
                set.pop(3).map(&mut see);
                set.take(see);
                assert!(std::time::Instant::now() < done, "a slot was lost");
            }
        });
    }

    #[test]
    fn only_a_sleeper_is_rung() {
        let (_fd, door) = Door::create().unwrap();
        assert!(!door.announce(3, true));
        door.sleep();
        assert!(door.announce(3, true));
        assert!(!door.announce(3, true));
        door.sleep();
        door.awake();
        assert!(!door.wake());
    }
}

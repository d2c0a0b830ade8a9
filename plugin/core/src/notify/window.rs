//! Which standalone notifications of a sender were delivered.

use crate::ids::NotifySeq;

/// Numbers remembered below the highest.
const SPAN: u64 = 1024;
const WORDS: usize = (SPAN / 64) as usize;

/// De-duplication by notify_seq over epochs. Senders number upwards and post in order, so what lies below the window was
/// either delivered or given up by its sender: it counts as seen.
#[derive(Clone, Debug)]
pub struct NotifyWindow {
    highest: u64,
    /// Bit `n % SPAN`: number n (highest − SPAN < n ≤ highest) was seen.
    seen: [u64; WORDS],
}

impl Default for NotifyWindow {
    fn default() -> Self {
        NotifyWindow { highest: 0, seen: [0; WORDS] }
    }
}

impl NotifyWindow {
    /// Numbers remembered: more may not be on their way at once.
    pub const SPAN: u64 = SPAN;

    /// `true` the first time a number is seen.
    #[must_use]
    pub fn insert(&mut self, seq: NotifySeq) -> bool {
        let n = seq.0;
        if n > self.highest {
            self.forget(n);
            self.highest = n;
        } else if n == 0 || self.highest - n >= SPAN {
            return false;
        }
        let (word, bit) = Self::place(n);
        let first = self.seen[word] & bit == 0;
        self.seen[word] |= bit;
        first
    }

    /// Highest number seen.
    pub fn highest(&self) -> u64 {
        self.highest
    }

    /// Clears the bits that the numbers up to `n` take over.
    fn forget(&mut self, n: u64) {
        if n - self.highest >= SPAN {
            self.seen = [0; WORDS];
            return;
        }
        for k in self.highest + 1..=n {
            let (word, bit) = Self::place(k);
            self.seen[word] &= !bit;
        }
    }

    fn place(n: u64) -> (usize, u64) {
        let at = n % SPAN;
        ((at / 64) as usize, 1 << (at % 64))
    }
}

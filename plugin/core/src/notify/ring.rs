//! Cursors of a record ring: computed alike on both sides, from the lengths alone.
//!
//! ```text
//! | record | record | …            cursor → |  less than the largest record  |
//! 0                                          `- jumps to the next multiple of the ring's length; the gap is charged
//! ```
//! What was written and not credited back is `consumed − granted + length`; the credit is kept in [`crate::credit`].

/// Records begin at multiples of this.
pub const RECORD_ALIGN: u64 = 64;

/// A writer's or a reader's position in a ring; runs on over the ring's length and never back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ring {
    cursor: u64,
    /// The cursor modulo the size: below it.
    at: u32,
    size_bytes: u32,
}

/// Where a record lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    /// From the ring's beginning.
    pub offset: u32,
    /// Ring bytes it costs: the padded record and the gap jumped over.
    pub charge: u64,
}

impl Ring {
    /// At the start of a ring.
    pub fn new(size_bytes: u32) -> Ring {
        assert!(size_bytes >= 512 && size_bytes.is_multiple_of(256), "a ring of {size_bytes} bytes");
        Ring { cursor: 0, at: 0, size_bytes }
    }

    /// Longest record, header included: a quarter of the ring.
    pub fn max_record_bytes(&self) -> u32 {
        self.size_bytes / 4
    }

    /// Length.
    pub fn size_bytes(&self) -> u32 {
        self.size_bytes
    }

    /// Ring bytes passed so far.
    pub fn cursor(&self) -> u64 {
        self.cursor
    }

    /// Where the next record begins, whatever its length.
    pub fn next_offset(&self) -> u32 {
        if self.gap() > 0 { 0 } else { self.at }
    }

    /// Where a record of this length goes; nothing moves.
    pub fn place(&self, record_bytes: u32) -> Placement {
        assert!(record_bytes <= self.max_record_bytes(), "a record of {record_bytes} bytes");
        let charge = u64::from(self.gap()) + u64::from(record_bytes).next_multiple_of(RECORD_ALIGN);
        Placement { offset: self.next_offset(), charge }
    }

    /// Passes a placed record.
    pub fn advance(&mut self, placement: Placement) {
        self.cursor += placement.charge;
        // Less than the length: at most a jump over less than a quarter, and a record of a quarter.
        let at = u64::from(self.at) + placement.charge;
        let size = u64::from(self.size_bytes);
        self.at = (if at < size { at } else { at - size }) as u32;
    }

    /// Bytes that are jumped over in front of the next record.
    fn gap(&self) -> u32 {
        let left = self.size_bytes - self.at;
        if left < self.max_record_bytes() { left } else { 0 }
    }
}

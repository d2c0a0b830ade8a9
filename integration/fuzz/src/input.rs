//! Choices out of an input: while there are bytes, they decide.

/// A cursor over an input; at its end it says so.
pub(crate) struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Input<'a> {
        Input(bytes)
    }

    pub(crate) fn u8(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*first)
    }

    pub(crate) fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    /// A number that is small most of the time, and sometimes at an edge of what a u64 can be.
    pub(crate) fn number(&mut self) -> Option<u64> {
        Some(match self.u8()? {
            n @ 0..=199 => n.into(),
            n @ 200..=219 => u64::MAX - u64::from(n - 200),
            n @ 220..=229 => u64::from(u32::MAX) - u64::from(n - 220),
            230..=242 => self.u16()?.into(),
            243..=249 => self.u32()?.into(),
            _ => self.u64()?,
        })
    }

    pub(crate) fn number32(&mut self) -> Option<u32> {
        self.number().map(|n| n as u32)
    }

    /// A length and so many bytes; fewer where the input ends.
    pub(crate) fn bytes(&mut self) -> Option<&'a [u8]> {
        let len = match self.u8()? {
            255 => self.u16()?.into(),
            len => usize::from(len),
        };
        let (taken, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        Some(taken)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

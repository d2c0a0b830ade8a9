//! What the host wants told with a transfer, and how it lies in the body of a record.
//!
//! ```text
//!   0  id u64, with the flag ID   8 (0 without an id)  message, not with the flag SILENT
//! ```

/// Length of an id in front of a message.
pub const ID_BYTES: usize = 8;

const ID: u16 = 1;
const SILENT: u16 = 2;

/// What a body consists of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BodyFlags(u16);

impl Body {
    /// An empty message.
    pub const EMPTY: Body = Body { flags: BodyFlags::MESSAGE, bytes: Vec::new() };
}

impl BodyFlags {
    /// A message and nothing else.
    pub const MESSAGE: BodyFlags = BodyFlags(0);

    /// For the wire.
    pub fn bits(self) -> u16 {
        self.0
    }

    /// From the wire; `None` where they cannot be, or not with a body of that length.
    pub fn of_bits(bits: u16, body_len: u32) -> Option<BodyFlags> {
        let fits = match bits {
            0 => true,
            ID => body_len as usize >= ID_BYTES,
            // No message: the host hears of it only when it asks for the id.
            3 => body_len as usize == ID_BYTES,
            _ => false,
        };
        fits.then_some(BodyFlags(bits))
    }
}

/// What the peer's host is told once all data of a transfer is in place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tell<'a> {
    /// A notification; may be empty.
    pub message: Option<&'a [u8]>,
    /// The transfer's number in the host's own counting, for those who ask for it.
    pub id: Option<u64>,
}

impl<'a> Tell<'a> {
    /// A message, or nothing at all.
    pub fn message(message: Option<&'a [u8]>) -> Tell<'a> {
        Tell { message, id: None }
    }

    /// An immediate alone tells it.
    pub fn is_empty_message(&self) -> bool {
        self.id.is_none() && self.message.is_some_and(<[u8]>::is_empty)
    }

    /// Nothing is told.
    pub fn is_nothing(&self) -> bool {
        self.message.is_none() && self.id.is_none()
    }

    /// Length of the message.
    pub fn message_len(&self) -> usize {
        self.message.map_or(0, <[u8]>::len)
    }

    /// Length of the body.
    pub fn body_len(&self) -> usize {
        self.message_len() + self.id.map_or(0, |_| ID_BYTES)
    }

    /// What the body consists of.
    pub fn flags(&self) -> BodyFlags {
        match (self.id, self.message) {
            (None, _) => BodyFlags::MESSAGE,
            (Some(_), Some(_)) => BodyFlags(ID),
            (Some(_), None) => BodyFlags(ID | SILENT),
        }
    }

    /// Appends the body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        if let Some(id) = self.id {
            out.extend_from_slice(&id.to_le_bytes());
        }
        out.extend_from_slice(self.message.unwrap_or_default());
    }
}

/// A body that arrived.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Body {
    /// What it consists of.
    pub flags: BodyFlags,
    /// As it was sent, as long as the flags need.
    pub bytes: Vec<u8>,
}

impl Body {
    /// Id and message.
    pub fn open(mut self) -> (Option<u64>, Option<Vec<u8>>) {
        let id = (self.flags.0 & ID != 0).then(|| {
            let id = self.bytes.first_chunk().map(|id| u64::from_le_bytes(*id));
            self.bytes.drain(..ID_BYTES);
            id.expect("the flags were checked with the length")
        });
        (id, (self.flags.0 & SILENT == 0).then_some(self.bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told_survives_the_wire_and_nothing_else_passes() {
        for (message, id) in [
            (Some(&b"m"[..]), None),
            (Some(b""), None),
            (Some(b"m"), Some(7)),
            (Some(b""), Some(0)),
            (None, Some(u64::MAX)),
        ] {
            let tell = Tell { message, id };
            let mut bytes = Vec::new();
            tell.encode(&mut bytes);
            assert_eq!(bytes.len(), tell.body_len());
            let flags = BodyFlags::of_bits(tell.flags().bits(), bytes.len() as u32).expect("legal");
            assert_eq!(Body { flags, bytes }.open(), (id, message.map(<[u8]>::to_vec)));
        }
        assert!(Tell::message(None).is_nothing() && !Tell::message(Some(b"")).is_nothing());
        for (bits, len) in [(ID, 7), (3, 7), (3, 9), (SILENT, 8), (4, 8), (u16::MAX, 8)] {
            assert_eq!(BodyFlags::of_bits(bits, len), None, "{bits} {len}");
        }
    }
}

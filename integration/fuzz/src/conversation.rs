//! A peer of the handshake that holds the key and says what the input says: its messages are authentic, their content is anything.

use baton_core::wire::{Mac, encode_frame, mac};
use sha2::{Digest, Sha256};

use crate::samples;

/// No byte of UTF-8: it stands between the messages of an input.
pub(crate) const BETWEEN: u8 = 0xFF;

/// The transcript as the peer computes it.
#[derive(Clone, Default)]
pub(crate) struct Transcript(Sha256);

impl Transcript {
    fn hash(&self) -> [u8; 32] {
        self.0.clone().finalize().into()
    }

    /// A message of either side was said.
    pub(crate) fn absorb(&mut self, json: &[u8]) {
        self.0.update((json.len() as u32).to_le_bytes());
        self.0.update(json);
    }

    /// The body of the peer's next message.
    pub(crate) fn seal(&mut self, role: &[u8; 2], json: &[u8]) -> Vec<u8> {
        let tag = mac(samples::key().expose(), &[role, &self.hash(), json]);
        self.absorb(json);
        body(&tag, json)
    }

    /// The key of the lifeline.
    pub(crate) fn lifeline_key(&self) -> Mac {
        mac(samples::key().expose(), &[b"baton lifeline", &self.hash()])
    }
}

/// An authenticator and what it is for.
pub(crate) fn body(tag: &Mac, json: &[u8]) -> Vec<u8> {
    [tag, json].concat()
}

/// The JSON in a frame of the other side.
pub(crate) fn json_of(frame: &[u8]) -> &[u8] {
    let json = frame.get(4 + 32..).expect("length and authenticator");
    assert_eq!(encode_frame(&frame[4..]).as_deref(), Ok(frame), "what is sent is a frame");
    json
}

/// Messages of an input, in order.
pub(crate) fn messages(bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    bytes.split(|byte| *byte == BETWEEN)
}

/// An input with these messages.
pub(crate) fn input(messages: &[Vec<u8>]) -> Vec<u8> {
    messages.join(&BETWEEN)
}

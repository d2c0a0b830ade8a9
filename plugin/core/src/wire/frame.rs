//! Frames on a stream: `length u32 little-endian | body`, the body no longer than [`MAX_FRAME_BYTES`].
//!
//! A body is an authenticator of [`MAC_BYTES`] and a JSON object; [`crate::handshake`] makes and checks both.

use super::{MAC_BYTES, MAX_FRAME_BYTES};

const LENGTH_BYTES: usize = 4;

/// Why a stream is no stream of frames; it cannot be read any further.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// The length is over the limit (also what text of another protocol looks like).
    #[error("a frame of {0} bytes is longer than the limit of {MAX_FRAME_BYTES}: not a Baton peer?")]
    TooLong(u32),
    /// Too short for an authenticator and a message.
    #[error("a frame of {0} bytes is too short for an authenticator of {MAC_BYTES} bytes and a message")]
    TooShort(u32),
}

/// One frame with this body.
///
/// # Errors
/// The body is outside the limits that [`FrameReader`] checks.
pub fn encode_frame(body: &[u8]) -> Result<Vec<u8>, FrameError> {
    let len = check_len(u32::try_from(body.len()).unwrap_or(u32::MAX))?;
    let mut frame = Vec::with_capacity(LENGTH_BYTES + len);
    frame.extend_from_slice(&(len as u32).to_le_bytes());
    frame.extend_from_slice(body);
    Ok(frame)
}

fn check_len(len: u32) -> Result<usize, FrameError> {
    match len as usize {
        n if n > MAX_FRAME_BYTES => Err(FrameError::TooLong(len)),
        n if n <= MAC_BYTES => Err(FrameError::TooShort(len)),
        n => Ok(n),
    }
}

/// Cuts a stream into bodies. It holds at most what was fed, so feed it reads of bounded size and drain it in between.
#[derive(Debug, Default)]
pub struct FrameReader {
    buffer: Vec<u8>,
    /// Bytes of `buffer` already handed out.
    start: usize,
}

impl FrameReader {
    /// An empty reader.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds bytes from the stream.
    pub fn feed(&mut self, bytes: &[u8]) {
        self.buffer.drain(..self.start);
        self.start = 0;
        self.buffer.extend_from_slice(bytes);
    }

    /// The next whole body, or `None` if more bytes are needed. Call until `None` after each [`Self::feed`].
    ///
    /// # Errors
    /// The stream is not made of frames; every later call says so again.
    pub fn next_frame(&mut self) -> Result<Option<&[u8]>, FrameError> {
        let rest = &self.buffer[self.start..];
        let Some(head) = rest.first_chunk::<LENGTH_BYTES>() else { return Ok(None) };
        let len = check_len(u32::from_le_bytes(*head))?;
        if rest.len() < LENGTH_BYTES + len {
            return Ok(None);
        }
        let body = self.start + LENGTH_BYTES;
        self.start = body + len;
        Ok(Some(&self.buffer[body..self.start]))
    }

    /// Bytes fed and not handed out yet: not 0 at the end of a stream means that it was cut in mid-frame.
    pub fn pending_bytes(&self) -> usize {
        self.buffer.len() - self.start
    }
}

//! Notifications and events as they come out of the engine.

use std::ffi::c_void;

use baton_abi::{
    BATON_EVENT_NOTIFICATION, BATON_EVENT_PEER_FAILED, BatonEvent, BatonNotifHeader, BatonSlice,
};

/// A message of a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notification {
    /// The peer's agent name.
    pub peer: String,
    /// The message; any bytes, possibly none.
    pub message: Vec<u8>,
}

/// Takes one notification off the front of a buffer that `get_notifs` filled; `None` if the framing is broken.
pub(crate) fn decode(buffer: &[u8]) -> Option<(Notification, &[u8])> {
    const HEADER_BYTES: usize = size_of::<BatonNotifHeader>();
    let header = buffer.get(..HEADER_BYTES)?;
    let number = |at: usize| Some(u64::from_ne_bytes(header.get(at..at + 8)?.try_into().ok()?));
    let total = usize::try_from(number(0)?).ok()?;
    let message_len = usize::try_from(number(8)?).ok()?;
    let name_len = u32::from_ne_bytes(header.get(16..20)?.try_into().ok()?) as usize;
    let name_end = HEADER_BYTES.checked_add(name_len)?;
    let message_end = name_end.checked_add(message_len)?;
    if total < message_end || total % 8 != 0 {
        return None;
    }
    let rest = buffer.get(total..)?;
    let peer = std::str::from_utf8(buffer.get(HEADER_BYTES..name_end)?).ok()?.to_owned();
    let message = buffer.get(name_end..message_end)?.to_vec();
    Some((Notification { peer, message }, rest))
}

/// Something that happened, told to the event hook.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event<'a> {
    /// At least one notification waits.
    Notification {
        /// Whose.
        peer: &'a str,
    },
    /// A peer's session ended by failure.
    PeerFailed {
        /// Whose.
        peer: &'a str,
        /// Which instance of it.
        instance: &'a [u8],
        /// Numbers of inbound notified transfers that had begun to arrive and never will.
        partial_seqs: &'a [u64],
    },
    /// A kind this host does not know.
    Other(u32),
}

/// The host's hook. Called on an engine thread.
pub(crate) type Hook = Box<dyn Fn(Event<'_>) + Send + Sync>;

/// What the engine calls; `user` is a [`Hook`].
pub(crate) unsafe extern "C" fn on_event(user: *mut c_void, event: *const BatonEvent) {
    // A panic of the host's hook may not cross the interface.
    let outcome = std::panic::catch_unwind(|| {
        // SAFETY: the hook is dropped only after it has been unset, which waits for a running call; the event
        // and its slices are valid during the call.
        unsafe {
            let (hook, event) = (&*user.cast::<Hook>(), &*event);
            hook(decode_event(event));
        }
    });
    if outcome.is_err() {
        tracing::error!(target: "baton", "the host's event hook panicked");
    }
}

/// # Safety
/// The slices of the event must be valid.
unsafe fn decode_event(event: &BatonEvent) -> Event<'_> {
    // SAFETY: the caller's promise.
    let bytes = |slice: BatonSlice| unsafe { slice.bytes() }.unwrap_or_default();
    let peer = std::str::from_utf8(bytes(event.peer)).unwrap_or_default();
    match event.kind {
        BATON_EVENT_NOTIFICATION => Event::Notification { peer },
        BATON_EVENT_PEER_FAILED => {
            let partial_seqs = if event.partial_seqs.is_null() {
                &[]
            } else {
                // SAFETY: the caller's promise.
                unsafe { std::slice::from_raw_parts(event.partial_seqs, event.partial_count as usize) }
            };
            Event::PeerFailed { peer, instance: bytes(event.instance), partial_seqs }
        }
        other => Event::Other(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(name: &[u8], message: &[u8], total: u64, message_len: u64) -> Vec<u8> {
        let mut out = Vec::new();
        out.extend(total.to_ne_bytes());
        out.extend(message_len.to_ne_bytes());
        out.extend((name.len() as u32).to_ne_bytes());
        out.extend(0u32.to_ne_bytes());
        out.extend(name);
        out.extend(message);
        out.resize(total.min(4096) as usize, 0);
        out
    }

    #[test]
    fn notifications_come_off_the_front_one_by_one() {
        let mut buffer = frame(b"peer", b"hello", 40, 5);
        buffer.extend(frame(b"x", b"", 32, 0));
        let (first, rest) = decode(&buffer).expect("framed");
        assert_eq!(first, Notification { peer: "peer".into(), message: b"hello".to_vec() });
        let (second, rest) = decode(rest).expect("framed");
        assert_eq!(second, Notification { peer: "x".into(), message: Vec::new() });
        assert!(rest.is_empty() && decode(rest).is_none());
    }

    #[test]
    fn broken_framing_is_seen_and_nothing_is_read_past_the_end() {
        for (total, message_len) in
            [(32, 5), (33, 5), (0, 5), (40, u64::MAX), (u64::MAX - 7, 5), (40, 13), (4104, 5)]
        {
            assert!(decode(&frame(b"peer", b"hello", total, message_len)).is_none(), "{total} {message_len}");
        }
        assert!(decode(&frame(b"\xff\xfe", b"", 32, 0)).is_none());
    }
}

//! The stream of length-prefixed frames on the handshake's connection, in any pieces.

use baton_core::wire::{FrameError, FrameReader, LifelineFrame, MAC_BYTES, MAX_FRAME_BYTES, encode_frame};

/// The first bytes say how long the pieces are, in turn.
const LENGTHS: usize = 4;

pub(crate) fn run(bytes: &[u8]) {
    let (lengths, stream) = bytes.split_at(LENGTHS.min(bytes.len()));
    let whole = read(&[stream]);
    let mut pieces = Vec::new();
    let (mut rest, mut lengths) = (stream, lengths.iter().cycle());
    while let (false, Some(len)) = (rest.is_empty(), lengths.next()) {
        let (piece, behind) = rest.split_at((usize::from(*len) + 1).min(rest.len()));
        pieces.push(piece);
        rest = behind;
    }
    assert_eq!(read(&pieces), whole, "however the stream is cut");
    let (bodies, error, pending) = whole;
    let mut made: Vec<u8> = Vec::new();
    for body in &bodies {
        assert!((MAC_BYTES + 1..=MAX_FRAME_BYTES).contains(&body.len()));
        made.extend(encode_frame(body).expect("what was read can be made"));
    }
    assert_eq!(made, stream[..made.len()], "what was read is canonical");
    assert!(error.is_some() || made.len() + pending == stream.len(), "nothing is lost");
}

/// Bodies, the error at the end, and what is held of a frame that is not whole.
fn read(pieces: &[&[u8]]) -> (Vec<Vec<u8>>, Option<FrameError>, usize) {
    let (mut reader, mut bodies) = (FrameReader::new(), Vec::new());
    for piece in pieces {
        reader.feed(piece);
        loop {
            match reader.next_frame() {
                Ok(Some(body)) => bodies.push(body.to_vec()),
                Ok(None) => break,
                Err(error) => {
                    assert_eq!(reader.next_frame(), Err(error), "it says so again");
                    return (bodies, Some(error), 0);
                }
            }
        }
    }
    let pending = reader.pending_bytes();
    (bodies, None, pending)
}

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let body = |json: &[u8]| [&[7; MAC_BYTES][..], json].concat();
    let frame = |json: &[u8]| encode_frame(&body(json)).expect("a sample is within the limits");
    let ping = LifelineFrame::Ping { n: 1 }.encode().expect("a sample is within the limits");
    let stream = [frame(&ping), frame(b"{}"), frame(&[b' '; 300]), frame(&ping)].concat();
    [[255, 255, 255, 255], [0, 0, 0, 0], [2, 0, 30, 7]].map(|cut| [&cut[..], &stream].concat()).into()
}

//! The lifeline: the handshake's connection, kept for the session. Read by the service thread only, written by anybody.

use crate::peer::Peer;
use baton_core::handshake::LifelineCodec;
use baton_core::lifeline::{Lifeline as Watch, LifelineAction};
use baton_core::wire::{FrameReader, LifelineFrame};
use baton_core::{Epoch, Nanos};
use parking_lot::Mutex;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Output that a peer does not take; beyond it the lifeline counts as broken.
const MAX_UNSENT_BYTES: usize = 1024 * 1024;

pub(crate) type LifelineHandle = Arc<Lifeline>;

/// One lifeline.
pub(crate) struct Lifeline {
    /// Its token in the service thread's epoll.
    pub id: u64,
    pub peer: Arc<Peer>,
    pub epoch: Epoch,
    stream: TcpStream,
    output: Mutex<Output>,
    input: Mutex<Inputs>,
    closed: AtomicBool,
}

struct Output {
    codec: LifelineCodec,
    unsent: Vec<u8>,
}

struct Inputs {
    codec: LifelineCodec,
    reader: FrameReader,
    watch: Watch,
}

/// What reading brought.
pub(crate) enum Input {
    /// A message.
    Frame(LifelineFrame),
    /// The connection ended; nothing more will come.
    End(String),
    /// What came is not the peer's next message; nothing more is read.
    Broken(String),
    /// Nothing (more) for now.
    Nothing,
}

impl Lifeline {
    /// The rest of a handshake's connection; `reader` may hold bytes that came behind its last message.
    pub fn new(
        id: u64,
        peer: Arc<Peer>,
        epoch: Epoch,
        stream: TcpStream,
        reader: FrameReader,
        codec: LifelineCodec,
        watch: Watch,
    ) -> std::io::Result<Lifeline> {
        stream.set_nonblocking(true)?;
        let output = Output { codec: codec.clone(), unsent: Vec::new() };
        Ok(Lifeline {
            id,
            peer,
            epoch,
            stream,
            output: Mutex::new(output),
            input: Mutex::new(Inputs { codec, reader, watch }),
            closed: AtomicBool::new(false),
        })
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// Sends a message, or as much of it as the socket takes now; the rest follows when the service thread hears that there is room.
    pub fn send(&self, frame: &LifelineFrame) {
        let mut output = self.output.lock();
        let waiting = output.unsent.len();
        if waiting > MAX_UNSENT_BYTES {
            tracing::warn!("{waiting} bytes wait on the lifeline to {}; closing it", self.peer.name());
            drop(output);
            return self.close();
        }
        match output.codec.seal(frame) {
            Ok(bytes) => {
                output.unsent.extend_from_slice(&bytes);
                self.write_out(&mut output.unsent);
            }
            Err(e) => tracing::warn!("lifeline message {} was not sent: {e}", frame.name()),
        }
    }

    /// Sends what an earlier `send` could not.
    pub fn flush(&self) {
        self.write_out(&mut self.output.lock().unsent);
    }

    fn write_out(&self, unsent: &mut Vec<u8>) {
        let mut sent = 0;
        while sent < unsent.len() {
            match (&self.stream).write(&unsent[sent..]) {
                Ok(0) => break,
                Ok(n) => sent += n,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                // A broken connection shows in `receive`, which ends the session.
                Err(_) => sent = unsent.len(),
            }
        }
        unsent.drain(..sent);
    }

    /// Reads until one message, the end, or nothing more for now.
    pub fn receive(&self, now: Nanos) -> Input {
        if self.closed.load(Ordering::Acquire) {
            return Input::End("closed by this side".into());
        }
        let mut input = self.input.lock();
        let Inputs { codec, reader, watch } = &mut *input;
        loop {
            match reader.next_frame() {
                Err(e) => return Input::Broken(format!("malformed frame: {e}")),
                Ok(Some(body)) => {
                    return match codec.open(body) {
                        Ok(frame) => Input::Frame(frame),
                        Err(e) => Input::Broken(e.to_string()),
                    };
                }
                Ok(None) => {}
            }
            let mut buffer = [0u8; 4096];
            match (&self.stream).read(&mut buffer) {
                Ok(0) => {
                    return Input::End(
                        "the peer closed the connection (its process ended or it disconnected)".into(),
                    );
                }
                Ok(n) => {
                    watch.on_traffic(now);
                    reader.feed(&buffer[..n]);
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Input::Nothing,
                Err(e) => return Input::End(e.to_string()),
            }
        }
    }

    /// Lets the silence rule look at the clock. `Err` says that the peer is silent for too long.
    pub fn on_timer(&self, now: Nanos) -> Result<(), String> {
        let due = {
            let watch = &mut self.input.lock().watch;
            watch.on_traffic(Nanos(self.peer.last_received_ns.load(Ordering::Relaxed)));
            watch.on_timeout(now)
        };
        match due {
            Some(LifelineAction::SendPing(n)) => {
                self.send(&LifelineFrame::Ping { n });
                Ok(())
            }
            Some(LifelineAction::PeerSilent) => Err("it is silent and does not answer PING".into()),
            None => Ok(()),
        }
    }

    /// When `on_timer` wants to be called again.
    pub fn next_timeout(&self) -> Option<Nanos> {
        self.input.lock().watch.next_timeout()
    }

    /// Ends it; both sides see the end at once.
    pub fn close(&self) {
        if !self.closed.swap(true, Ordering::AcqRel) {
            self.flush();
            // The peer may be gone already, which is what a close wants anyway.
            let _already_gone = self.stream.shutdown(Shutdown::Both);
        }
    }
}

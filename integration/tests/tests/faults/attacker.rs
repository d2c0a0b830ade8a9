//! The attacker: the protocol's own words, said by somebody who means no good. It reaches its victim over TCP.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};

use baton_core::handshake::{Established, Initiator, LifelineCodec};
use baton_core::wire::{
    ConnInfo, EndpointOffer, FabricOffer, FrameReader, Hello, LifelineFrame, MemoryOffer, OneSidedOffer,
    Progress, ProtocolRange, SessionKey, parse_candidate,
};
use baton_core::{Epoch, Instance};
use baton_tests::{PATIENCE, hex};
use serde_json::{Value, json};

/// A session of an attacker.
pub struct Attacker {
    /// The lifeline.
    pub lifeline: TcpStream,
    reader: FrameReader,
    codec: LifelineCodec,
    /// Epoch of the session.
    pub epoch: Epoch,
    /// Connections of its endpoints, control first.
    pub data: Vec<TcpStream>,
    _listener: TcpListener,
}

/// Number of its data connections.
const DATA_EPOCH: u32 = 7;

/// Why there is no session.
pub type Refused = String;

fn dial(port: u16) -> TcpStream {
    let stream = TcpStream::connect(("127.0.0.1", port)).expect("the victim listens");
    stream.set_read_timeout(Some(PATIENCE)).expect("a time-out");
    stream
}

fn port_of(candidate: &str) -> u16 {
    parse_candidate(candidate).expect("a candidate").addr.port()
}

fn read_frame(stream: &mut TcpStream, reader: &mut FrameReader) -> Result<Vec<u8>, Refused> {
    let mut buffer = [0; 4096];
    loop {
        if let Some(body) = reader.next_frame().map_err(|e| e.to_string())? {
            return Ok(body.to_vec());
        }
        match stream.read(&mut buffer).map_err(|e| e.to_string())? {
            0 => return Err("the victim closed the connection".into()),
            n => reader.feed(&buffer[..n]),
        }
    }
}

/// The first bytes of a data connection: to which endpoint, from which.
fn data_hello(to: &[u8], from: &[u8; 16]) -> Vec<u8> {
    let mut hello = b"BATONTCP\x01\x00\x01\x00".to_vec();
    hello.extend_from_slice(&DATA_EPOCH.to_le_bytes());
    hello.extend_from_slice(to);
    hello.extend_from_slice(from);
    hello.resize(64, 0);
    hello
}

fn hello(
    victim: &ConnInfo,
    as_instance: Instance,
    name: &str,
    address: Value,
    token: &[u8; 16],
    immediate: bool,
) -> Hello {
    let mut with_token = address.clone();
    with_token["token"] = hex(token).into();
    let endpoint = EndpointOffer { address: with_token, sq_depth: 64, rq_depth: 64, rail: 0 };
    let memory = MemoryOffer { addr: 1 << 20, key: 1, bytes: 32768 };
    Hello {
        protocol: ProtocolRange::OURS,
        instance: as_instance,
        to_instance: victim.instance,
        name: name.to_owned(),
        attempt: 1,
        session: None,
        last_epoch: 0,
        progress: Progress::Thread,
        nonce: [9; 16],
        offers: vec![FabricOffer {
            fabric: "tcp".into(),
            address,
            max_message_bytes: 1 << 20,
            one_sided: Some(OneSidedOffer {
                immediate,
                control: endpoint.clone(),
                lanes: vec![endpoint],
                control_ring: memory,
                rings: vec![memory],
                credit_page: memory,
            }),
            two_sided: None,
        }],
        features: Vec::new(),
    }
}

impl Attacker {
    /// Opens a session with a victim whose connection information it has, claiming to be `instance`, called `name`.
    pub fn connect(victim: &[u8], instance: Instance, name: &str) -> Result<Attacker, Refused> {
        Attacker::connect_with(victim, instance, name, true)
    }

    /// The same, with a word on whether it has immediates.
    pub fn connect_with(
        victim: &[u8],
        instance: Instance,
        name: &str,
        immediate: bool,
    ) -> Result<Attacker, Refused> {
        let victim = ConnInfo::decode(victim).expect("connection information");
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
        let port = listener.local_addr().expect("bound").port();
        let address = json!({ "version": 1, "candidates": [format!("127.0.0.1:{port}")] });
        let token = *b"an attacker's.tk";
        let own = hello(&victim, instance, name, address, &token, immediate);

        let mut lifeline = dial(port_of(&victim.candidates[0]));
        let mut reader = FrameReader::new();
        let (await_reply, frame) = Initiator::start(victim.key.clone(), own).map_err(|e| e.to_string())?;
        lifeline.write_all(&frame).map_err(|e| e.to_string())?;
        let body = read_frame(&mut lifeline, &mut reader)?;
        let reply = await_reply.on_reply(&body).map_err(|failure| failure.cause.to_string())?;
        let theirs = reply.reply.offer.one_sided.as_ref().expect("what was offered");
        let endpoints = [&theirs.control].into_iter().chain(&theirs.lanes);
        let data = endpoints.map(|endpoint| data_connection(&endpoint.address, &token)).collect();
        let (await_accept, frame) =
            reply.ready(&SessionKey::new([5; 32]), None).map_err(|e| e.to_string())?;
        lifeline.write_all(&frame).map_err(|e| e.to_string())?;
        let body = read_frame(&mut lifeline, &mut reader)?;
        let Established { lifeline: codec, epoch, .. } =
            await_accept.on_accept(&body).map_err(|e| e.to_string())?;
        Ok(Attacker { lifeline, reader, codec, epoch, data, _listener: listener })
    }

    /// The bytes of its next lifeline message.
    pub fn seal(&mut self, message: &LifelineFrame) -> Vec<u8> {
        self.codec.seal(message).expect("within the limits")
    }

    /// A lifeline message as it should be.
    pub fn say(&mut self, message: &LifelineFrame) -> std::io::Result<()> {
        let frame = self.seal(message);
        self.lifeline.write_all(&frame)
    }

    /// The first work request on one of its endpoints: a WRITE of nothing with an immediate.
    pub fn immediate(&mut self, endpoint: usize, imm: u32) {
        let mut frame = frame(2);
        frame[32..36].copy_from_slice(&imm.to_le_bytes());
        self.first(endpoint, &frame);
    }

    /// The first work request on one of its endpoints: a SEND.
    pub fn send(&mut self, endpoint: usize, payload: &[u8]) {
        let mut frame = frame(5).to_vec();
        let len = (payload.len() as u32).to_le_bytes();
        frame[12..16].copy_from_slice(&len);
        frame[36..40].copy_from_slice(&len);
        frame.extend_from_slice(payload);
        self.first(endpoint, &frame);
    }

    /// Waits until the victim has refused a work request.
    pub fn expect_refusal(&mut self, endpoint: usize) {
        let mut frame = [0; 48];
        loop {
            self.data[endpoint].read_exact(&mut frame).expect("a frame");
            match frame[4] {
                6 => {}
                op => return assert_eq!(op, 7, "{frame:?}"),
            }
        }
    }

    fn first(&mut self, endpoint: usize, frame: &[u8]) {
        // The victim's welcome comes first on every connection.
        let mut welcome = [0; 32];
        self.data[endpoint].read_exact(&mut welcome).expect("a welcome");
        self.data[endpoint].write_all(frame).expect("a frame");
    }

    /// The victim's next lifeline message; `None` when it ends the connection.
    pub fn hear(&mut self) -> Option<LifelineFrame> {
        let body = read_frame(&mut self.lifeline, &mut self.reader).ok()?;
        Some(self.codec.open(&body).expect("the victim's own words"))
    }

    /// Reads what comes until the victim ends the connection.
    pub fn wait_for_the_end(&mut self) {
        let mut buffer = [0; 4096];
        loop {
            match self.lifeline.read(&mut buffer) {
                Ok(0) => return,
                Ok(_) => {}
                Err(e) if e.kind() == ErrorKind::ConnectionReset => return,
                Err(e) => panic!("the lifeline stays open: {e}"),
            }
        }
    }
}

/// Header of a data connection's first frame: a work request that ends in it.
fn frame(op: u8) -> [u8; 48] {
    let mut frame = [0; 48];
    frame[..4].copy_from_slice(b"BTF1");
    frame[4] = op;
    frame[8..12].copy_from_slice(&DATA_EPOCH.to_le_bytes());
    frame[40] = 1;
    frame
}

fn data_connection(address: &Value, token: &[u8; 16]) -> TcpStream {
    let candidate = address["candidates"][0].as_str().expect("a candidate");
    let to = baton_tests::from_hex(address["token"].as_str().expect("a token"));
    let mut stream = dial(port_of(candidate));
    stream.write_all(&data_hello(&to, token)).expect("a hello");
    stream
}

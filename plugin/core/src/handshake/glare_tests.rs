//! Two engines that connect to each other at once, with every order of messages that a seed can give.

use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;
use crate::ids::{Epoch, Instance, Nanos, SessionId};
use crate::wire::samples::{hello, reply};
use crate::wire::{FrameReader, Hello, Reply, ResumeToken, SessionKey};

/// One end of one TCP connection: what arrives here, and whether the other end has closed.
#[derive(Default)]
struct Pipe {
    bytes: VecDeque<Vec<u8>>,
    closed: bool,
}

enum Initiating {
    Reply(Box<AwaitReply>),
    Accept(Box<AwaitAccept>),
    Over,
}

enum Listening {
    Hello(Box<Listener>),
    Ready(Box<AwaitReady>),
    Open,
    Over,
}

struct Connection {
    from: usize,
    attempt: u64,
    resume: Option<ResumeToken>,
    initiator: Initiating,
    listener: Listening,
    to_listener: Pipe,
    to_initiator: Pipe,
    /// Cut the connection when that many messages have passed.
    lose_after: Option<u32>,
    passed: u32,
}

struct World {
    links: [Link; 2],
    connections: Vec<Connection>,
    /// Connection that carries each side's session.
    lifeline: [Option<usize>; 2],
    wants: [bool; 2],
    now: Nanos,
    drawn: u64,
}

fn instance(side: usize) -> Instance {
    Instance([side as u8 + 1; 16])
}

fn key(side: usize) -> SessionKey {
    SessionKey::new([side as u8 + 0x10; 32])
}

fn body(frame: &[u8]) -> Vec<u8> {
    let mut reader = FrameReader::new();
    reader.feed(frame);
    reader.next_frame().unwrap().unwrap().to_vec()
}

impl World {
    fn new() -> Self {
        let link = |own: usize| Link::new(instance(own), instance(1 - own), Default::default());
        Self {
            links: [link(0), link(1)],
            connections: vec![],
            lifeline: [None; 2],
            wants: [true; 2],
            now: Nanos(0),
            drawn: 0,
        }
    }

    fn draw(&mut self) -> u64 {
        self.drawn += 1;
        self.drawn
    }

    fn want(&mut self, side: usize, lose_after: Option<u32>) {
        let attempt = self.draw();
        let Begin::Start { last_epoch, session, resume_token } = self.links[side].begin(self.now, attempt)
        else {
            return;
        };
        let question = Hello { last_epoch, session, attempt, ..hello(instance(side), instance(1 - side)) };
        let (initiator, frame) = Initiator::start(key(1 - side), question).unwrap();
        let mut to_listener = Pipe::default();
        to_listener.bytes.push_back(body(&frame));
        self.connections.push(Connection {
            from: side,
            attempt,
            resume: resume_token,
            initiator: Initiating::Reply(Box::new(initiator)),
            listener: Listening::Hello(Box::new(Listener::new(key(1 - side), instance(1 - side)))),
            to_listener,
            to_initiator: Pipe::default(),
            lose_after,
            passed: 0,
        });
    }

    /// Something that can happen on a connection: a message or a close arrives at one of its ends.
    fn possible(&self) -> Vec<(usize, bool)> {
        let mut events = vec![];
        for (i, c) in self.connections.iter().enumerate() {
            let listening = !matches!(c.listener, Listening::Over);
            let initiating = !matches!(c.initiator, Initiating::Over) || self.lifeline[c.from] == Some(i);
            if listening && (c.to_listener.closed || !c.to_listener.bytes.is_empty()) {
                events.push((i, true));
            }
            if initiating && (c.to_initiator.closed || !c.to_initiator.bytes.is_empty()) {
                events.push((i, false));
            }
        }
        events
    }

    fn happen(&mut self, (i, at_listener): (usize, bool)) {
        let c = &mut self.connections[i];
        let pipe = if at_listener { &mut c.to_listener } else { &mut c.to_initiator };
        let message = pipe.bytes.pop_front();
        if message.is_some() {
            c.passed += 1;
            if c.lose_after.is_some_and(|n| c.passed >= n) {
                (c.to_listener, c.to_initiator) = (
                    Pipe { closed: true, ..Default::default() },
                    Pipe { closed: true, ..Default::default() },
                );
                return;
            }
        }
        match (at_listener, message) {
            (true, Some(message)) => self.listener_takes(i, &message),
            (false, Some(message)) => self.initiator_takes(i, &message),
            (true, None) => self.listener_closes(i),
            (false, None) => self.initiator_closes(i),
        }
    }

    fn listener_takes(&mut self, i: usize, message: &[u8]) {
        let (session, token) = (SessionId(self.draw()), self.draw() as u8);
        let c = &mut self.connections[i];
        let side = 1 - c.from;
        let link = &mut self.links[side];
        match std::mem::replace(&mut c.listener, Listening::Over) {
            Listening::Hello(listener) => {
                let received = listener.on_hello(message).unwrap();
                match link.on_hello(&received.hello) {
                    Decision::Proceed => {
                        let answer = link.answer(&received.hello, session).unwrap();
                        let Answer { session, last_epoch, epoch } = answer;
                        let answer = Reply { session, last_epoch, epoch, ..reply(&received.hello) };
                        let (next, frame) = received.reply(answer).unwrap();
                        c.to_initiator.bytes.push_back(body(&frame));
                        c.listener = Listening::Ready(Box::new(next));
                    }
                    Decision::Refuse(refusal) => {
                        c.to_initiator.bytes.push_back(body(&received.refuse(refusal).unwrap()));
                        c.to_initiator.closed = true;
                    }
                    other => panic!("{other:?} is no answer to HELLO"),
                }
            }
            Listening::Ready(listener) => {
                let ready = listener.on_ready(message).unwrap();
                let epoch = ready.ready.epoch;
                let proof =
                    if ready.identity.verify(&key(1 - side)) { Proof::Verified } else { Proof::Wrong };
                let mut decision = link.on_ready(&ready.hello, epoch, proof, |t| ready.proves_resume(t));
                if let Decision::DrainThenAccept(old) = decision {
                    self.end(side, old);
                    let link = &mut self.links[side];
                    decision = link.on_ready(&ready.hello, epoch, proof, |t| ready.proves_resume(t));
                }
                let c = &mut self.connections[i];
                match decision {
                    Decision::Accept | Decision::AcceptAndYield => {
                        let (established, frame) = ready.accept(ResumeToken::new([token; 16])).unwrap();
                        assert!(self.links[side].accepted(&established));
                        c.to_initiator.bytes.push_back(body(&frame));
                        c.listener = Listening::Open;
                        assert_eq!(self.lifeline[side].replace(i), None, "two sessions at side {side}");
                    }
                    Decision::Refuse(refusal) => {
                        c.to_initiator.bytes.push_back(body(&ready.refuse(refusal).unwrap()));
                        c.to_initiator.closed = true;
                    }
                    other => panic!("{other:?} after draining"),
                }
            }
            _ => panic!("a message for nobody"),
        }
    }

    fn initiator_takes(&mut self, i: usize, message: &[u8]) {
        let c = &mut self.connections[i];
        let side = c.from;
        let failed = match std::mem::replace(&mut c.initiator, Initiating::Over) {
            Initiating::Reply(initiator) => match initiator.on_reply(message) {
                Ok(received) => {
                    let (next, frame) = received.ready(&key(side), c.resume.as_ref()).unwrap();
                    c.to_listener.bytes.push_back(body(&frame));
                    c.initiator = Initiating::Accept(Box::new(next));
                    return;
                }
                Err(failure) => failure.cause,
            },
            Initiating::Accept(initiator) => match initiator.on_accept(message) {
                Ok(established) if self.links[side].connected(c.attempt, &established) => {
                    assert_eq!(self.lifeline[side].replace(i), None, "two sessions at side {side}");
                    return;
                }
                Ok(_) => {
                    c.to_listener.closed = true;
                    return;
                }
                Err(cause) => cause,
            },
            Initiating::Over => panic!("a message for nobody"),
        };
        assert!(matches!(failed, HandshakeError::Refused(_)), "{failed}");
        c.to_listener.closed = true;
        self.links[side].failed(self.now, c.attempt, &failed, self.drawn as u32);
    }

    fn listener_closes(&mut self, i: usize) {
        let c = &mut self.connections[i];
        let side = 1 - c.from;
        c.listener = Listening::Over;
        c.to_initiator.closed = true;
        self.lifeline_ends(side, i);
    }

    fn initiator_closes(&mut self, i: usize) {
        let c = &mut self.connections[i];
        let side = c.from;
        let waiting = !matches!(c.initiator, Initiating::Over);
        c.initiator = Initiating::Over;
        c.to_listener.closed = true;
        if waiting {
            let attempt = c.attempt;
            let cause = HandshakeError::BadAuthenticator("closed");
            self.links[side].failed(self.now, attempt, &cause, self.drawn as u32);
        }
        self.lifeline_ends(side, i);
    }

    fn lifeline_ends(&mut self, side: usize, i: usize) {
        if self.lifeline[side] == Some(i)
            && let LinkState::Open { epoch, .. } = self.links[side].state()
        {
            self.links[side].lifeline_ended(epoch);
            self.end(side, epoch);
        }
    }

    /// Ends a side's session: its lifeline closes.
    fn end(&mut self, side: usize, epoch: Epoch) {
        self.links[side].draining(epoch);
        self.links[side].ended(epoch);
        if let Some(i) = self.lifeline[side].take() {
            let c = &mut self.connections[i];
            let far = if c.from == side { &mut c.to_listener } else { &mut c.to_initiator };
            far.closed = true;
            if c.from != side {
                c.listener = Listening::Over;
            }
        }
    }

    fn settled(&self) -> bool {
        self.possible().is_empty()
            && self.lifeline[0].is_some()
            && self.lifeline[0] == self.lifeline[1]
            && self.links.iter().all(|link| matches!(link.state(), LinkState::Open { .. }))
    }

    /// Runs until both sides hold the same session; `choices` decides what happens next, `losses` what breaks.
    fn run(&mut self, choices: &[u16], losses: &mut Vec<u32>) {
        let mut choices =
            choices.iter().copied().chain((0..).map(|n: u32| (n.wrapping_mul(40_503) >> 3) as u16));
        for _ in 0..20_000 {
            if self.settled() {
                return;
            }
            let events = self.possible();
            let choice = usize::from(choices.next().unwrap());
            // Wanting is an event like the others; time passes when nothing else can happen.
            let callers: Vec<usize> =
                (0..2).filter(|s| self.wants[*s] && self.lifeline[*s].is_none()).collect();
            match choice % (events.len() + callers.len()).max(1) {
                n if n < events.len() => self.happen(events[n]),
                n if n - events.len() < callers.len() => {
                    let before = self.connections.len();
                    let loss = losses.pop().filter(|n| *n < 6);
                    self.want(callers[n - events.len()], loss);
                    if self.connections.len() == before && events.is_empty() {
                        self.now = self.now.plus_ms(u64::from(choice as u16 % 64));
                    }
                }
                _ => self.now = self.now.plus_ms(10),
            }
        }
        panic!("no common session: {:?} {:?}", self.links[0], self.links[1]);
    }
}

fn check(world: &World) {
    let (a, b) = (world.links[0].memory(), world.links[1].memory());
    assert_eq!((a.session, a.last_epoch), (b.session, b.last_epoch));
    assert!(a.resume_token == b.resume_token && a.resume_token.is_some());
    let alive = world.connections.iter().filter(|c| matches!(c.listener, Listening::Open)).count();
    assert_eq!(alive, 1, "exactly one session");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn simultaneous_opens_end_with_one_session(choices in prop::collection::vec(any::<u16>(), 0..120)) {
        let mut world = World::new();
        world.run(&choices, &mut vec![]);
        check(&world);
        prop_assert_eq!(world.links[0].memory().last_epoch, 1, "nothing had to be replaced");
    }

    #[test]
    fn lost_connections_end_with_one_session(
        choices in prop::collection::vec(any::<u16>(), 0..300),
        mut losses in prop::collection::vec(1..9u32, 0..8),
    ) {
        let mut world = World::new();
        world.run(&choices, &mut losses);
        check(&world);
    }

    #[test]
    fn one_side_that_lost_its_session_gets_a_new_one(
        choices in prop::collection::vec(any::<u16>(), 0..200),
        loser in 0..2usize,
    ) {
        let mut world = World::new();
        world.run(&[], &mut vec![]);
        let (session, epoch) = (world.links[0].memory().session, world.links[0].memory().last_epoch);
        // Its queue pairs died; the other side has not heard of it.
        world.links[loser].ended(Epoch(epoch));
        let i = world.lifeline[loser].take().unwrap();
        if world.connections[i].from != loser {
            world.connections[i].listener = Listening::Over;
        }
        world.wants = [loser == 0, loser == 1];
        world.run(&choices, &mut vec![]);
        check(&world);
        let memory = world.links[0].memory();
        prop_assert_eq!((memory.session, memory.last_epoch), (session, epoch + 1), "resumed");
    }

    #[test]
    fn a_side_that_cannot_get_through_leaves_the_way_to_the_other(
        choices in prop::collection::vec(any::<u16>(), 0..200),
        blocked in 0..2usize,
    ) {
        let mut world = World::new();
        // All attempts of one side break at their first message, as behind address translation.
        for round in 0.. {
            prop_assert!(round < 20_000, "no session");
            if world.settled() { break; }
            let events = world.possible();
            let choice = usize::from(choices.get(round).copied().unwrap_or((round * 7 % 65_536) as u16));
            match choice % (events.len() + 3) {
                n if n < events.len() => world.happen(events[n]),
                n if n - events.len() < 2 => {
                    let side = n - events.len();
                    world.want(side, (side == blocked).then_some(1));
                }
                _ => world.now = world.now.plus_ms(20),
            }
        }
        check(&world);
    }
}

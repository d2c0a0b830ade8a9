//! An agent in a process of its own, for tests that stop and kill it: takes orders on stdin, one JSON object a
//! line, and answers each with one on stdout. It ends with its input.

use std::io::{BufRead, Write};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

use baton_host::{Error, Event, Op, Status, Transfer};
use baton_tests::{Block, Node, PATIENCE, Remote, from_hex, hex};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::{Value, json};

type Answer = Result<Value, String>;

/// Waits for the end of the last post.
fn ended(transfer: &Transfer) -> Result<(), Error> {
    while transfer.status()? == Status::InProgress {
        std::thread::sleep(Duration::from_micros(100));
    }
    Ok(())
}

/// How a loop of posts ended.
type Ending = (u64, Error);

struct Agent {
    node: Node,
    blocks: Vec<Block>,
    remotes: Vec<Remote>,
    transfers: Vec<Arc<Transfer>>,
    hammering: Option<Receiver<Ending>>,
}

fn text<'a>(order: &'a Value, key: &str) -> Result<&'a str, String> {
    order[key].as_str().ok_or_else(|| format!("{key}: no text in {order}"))
}

fn number(order: &Value, key: &str) -> Result<usize, String> {
    order[key].as_u64().map(|n| n as usize).ok_or_else(|| format!("{key}: no number in {order}"))
}

fn message(order: &Value) -> Option<&[u8]> {
    order["message"].as_str().map(str::as_bytes)
}

fn said(error: Error) -> String {
    error.to_string()
}

fn describe(outcome: Result<(), Error>) -> Value {
    match outcome {
        Ok(()) => json!({ "code": 0 }),
        Err(error) => json!({ "code": error.code.raw(), "text": error.text }),
    }
}

impl Agent {
    fn obey(&mut self, order: &Value) -> Answer {
        match text(order, "do")? {
            "info" => Ok(hex(&self.node.engine.conn_info().map_err(said)?).into()),
            "load" => {
                let info = from_hex(text(order, "info")?);
                self.node.engine.load_remote(text(order, "name")?, &info).map_err(said)?;
                Ok(Value::Null)
            }
            "block" => self.block(order),
            "import" => {
                let (peer, blob) = (text(order, "peer")?, from_hex(text(order, "blob")?));
                let remote = Remote::import(&self.node, peer, &blob, number(order, "addr")? as u64);
                self.remotes.push(remote.map_err(said)?);
                Ok((self.remotes.len() - 1).into())
            }
            "create" => self.create(order),
            "post" => {
                let posted = self.transfers[number(order, "transfer")?].post(message(order));
                Ok(describe(posted.map(drop)))
            }
            "finish" => Ok(describe(self.node.finish(&self.transfers[number(order, "transfer")?]))),
            "run" => {
                let transfer = &self.transfers[number(order, "transfer")?];
                Ok(describe(transfer.post(message(order)).and_then(|_| self.node.finish(transfer))))
            }
            "fill" => {
                self.blocks[number(order, "block")?].fill(number(order, "seed")? as u64);
                Ok(Value::Null)
            }
            "check" => self.check(order),
            "hammer" => self.hammer(order),
            "hammered" => self.hammered(),
            "notify" => {
                let (peer, message) = (text(order, "peer")?, text(order, "message")?);
                self.node.engine.notify(peer, message.as_bytes()).map_err(said)?;
                Ok(Value::Null)
            }
            "heard" => {
                let mut all = self.node.notifications();
                while (all.len() as u64) < order["count"].as_u64().unwrap_or(1) {
                    all.extend(self.node.notifications());
                }
                let pairs = all.into_iter().map(|n| json!([n.peer, String::from_utf8_lossy(&n.message)]));
                Ok(pairs.collect())
            }
            "failure" => {
                let failed = self.node.next_failure();
                Ok(json!({ "peer": failed.peer, "instance": hex(&failed.instance) }))
            }
            "stats" => Ok(self.node.stats()),
            "sleep on the descriptor" => self.sleep_on_descriptor(),
            "sleep until the hook" => self.sleep_until_hook(),
            "fork" => fork_a_sleeper(),
            "meet" => self.meet(order),
            other => Err(format!("no order {other:?}")),
        }
    }

    fn block(&mut self, order: &Value) -> Answer {
        let bytes = number(order, "bytes")?;
        let block = Block::new(&self.node.engine, bytes, number(order, "seed")? as u64).map_err(said)?;
        let (blob, addr) = (block.region().export().map_err(said)?, block.region().addr());
        self.blocks.push(block);
        Ok(json!({ "block": self.blocks.len() - 1, "blob": hex(&blob), "addr": addr }))
    }

    fn create(&mut self, order: &Value) -> Answer {
        let op = if text(order, "op")? == "read" { Op::Read } else { Op::Write };
        let local = &self.blocks[number(order, "block")?];
        let remote = &self.remotes[number(order, "remote")?];
        let transfer = self.node.scattered(op, local, remote, number(order, "piece")?).map_err(said)?;
        self.transfers.push(Arc::new(transfer));
        Ok((self.transfers.len() - 1).into())
    }

    /// Whether a block holds a pattern, in order or with its pieces reversed.
    fn check(&self, order: &Value) -> Answer {
        let (block, seed) = (&self.blocks[number(order, "block")?], number(order, "seed")? as u64);
        let differs = match order["piece"].as_u64() {
            Some(piece) => block.differs_reversed(seed, piece as usize),
            None => block.part_differs(0, block.bytes(), seed),
        };
        Ok(json!({ "differs": differs, "sentinels": block.sentinels_stand() }))
    }

    /// Posts two transfers in turn, so that one is always under way, until one fails; ends when none is under way.
    fn hammer(&mut self, order: &Value) -> Answer {
        let pair = [number(order, "first")?, number(order, "second")?];
        let pair = pair.map(|number| Arc::clone(&self.transfers[number]));
        let (tell, ending) = mpsc::channel();
        std::thread::spawn(move || {
            let mut rounds = 0;
            let mut failed = pair.iter().find_map(|transfer| transfer.post(None).err());
            while failed.is_none() {
                let transfer = &pair[rounds as usize % 2];
                rounds += 1;
                failed = ended(transfer).and_then(|()| transfer.post(None)).err();
            }
            for transfer in &pair {
                // How the other one ends is no matter, if it ends.
                let _ = ended(transfer);
            }
            // The agent may have stopped listening.
            let _ = failed.map(|error| tell.send((rounds, error)));
        });
        self.hammering = Some(ending);
        Ok(Value::Null)
    }

    fn hammered(&mut self) -> Answer {
        let ending = self.hammering.take().ok_or("nothing was hammered")?;
        let (rounds, error) =
            ending.recv_timeout(PATIENCE).map_err(|e| format!("the transfer does not end: {e}"))?;
        Ok(json!({ "rounds": rounds, "code": error.code.raw(), "text": error.text }))
    }

    fn sleep_on_descriptor(&mut self) -> Answer {
        let fd = self.node.engine.notify_fd().map_err(said)?;
        // SAFETY: the engine owns the descriptor and lives as long as this agent.
        let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
        say(&json!({ "asleep": true }));
        sleep_on(&fd)?;
        let all = self.node.engine.notifications().map_err(said)?;
        let [one] = all.as_slice() else { return Err(format!("woken for {all:?}")) };
        Ok(json!([one.peer, String::from_utf8_lossy(&one.message)]))
    }

    fn sleep_until_hook(&mut self) -> Answer {
        let (end, wake) = rustix::pipe::pipe().map_err(|e| e.to_string())?;
        let hook = move |event: Event<'_>| {
            if matches!(event, Event::Notification { .. }) {
                // Nobody sleeps on it any more after the first.
                let _ = rustix::io::write(&wake, b"!");
            }
        };
        self.node.engine.set_event_hook(hook).map_err(said)?;
        say(&json!({ "asleep": true }));
        sleep_on(&end)?;
        self.node.engine.clear_event_hook().map_err(said)?;
        let all = self.node.engine.notifications().map_err(said)?;
        let [one] = all.as_slice() else { return Err(format!("woken for {all:?}")) };
        Ok(json!([one.peer, String::from_utf8_lossy(&one.message)]))
    }

    /// Writes the own pattern into the own place at every peer, all at once, and waits for the same from them.
    fn meet(&mut self, order: &Value) -> Answer {
        let (own, place) = (number(order, "own")?, number(order, "place")?);
        let inbox = &self.blocks[number(order, "inbox")?];
        let source = Block::new(&self.node.engine, place, own as u64).map_err(said)?;
        let mut running = Vec::new();
        let peers = order["peers"].as_array().ok_or("no peers")?;
        for peer in peers {
            let (name, blob) = (text(peer, "name")?, from_hex(text(peer, "blob")?));
            self.node.engine.load_remote(name, &from_hex(text(peer, "info")?)).map_err(said)?;
            let addr = (number(peer, "addr")? + own * place) as u64;
            let remote = Remote::import(&self.node, name, &blob, addr).map_err(said)?;
            let transfer = self.node.scattered(Op::Write, &source, &remote, place).map_err(said)?;
            transfer.post(Some(own.to_string().as_bytes())).map_err(said)?;
            running.push((transfer, remote));
        }
        for (transfer, remote) in &running {
            self.node.finish(transfer).map_err(|e| format!("{}: {e}", remote.peer))?;
        }
        let mut heard = Vec::new();
        while heard.len() < peers.len() {
            for n in self.node.notifications() {
                let from: usize =
                    String::from_utf8_lossy(&n.message).parse().map_err(|_| "a strange message")?;
                if let Some(byte) = inbox.part_differs(from * place, place, from as u64) {
                    return Err(format!("byte {byte} from {} is wrong", n.peer));
                }
                heard.push(n.peer);
            }
        }
        heard.sort_unstable();
        if !inbox.sentinels_stand() {
            return Err("a sentinel was overwritten".into());
        }
        Ok(json!({ "heard": heard, "sessions": self.node.counter("sessions_opened") }))
    }
}

fn sleep_on(fd: &impl std::os::fd::AsFd) -> Result<(), String> {
    let timeout = Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
    match poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&timeout)) {
        Ok(1) => Ok(()),
        other => Err(format!("poll: {other:?}")),
    }
}

/// A child that does nothing, but has all descriptors of this process.
fn fork_a_sleeper() -> Answer {
    // SAFETY: the child calls nothing but `pause`, which is safe after a fork.
    match unsafe { libc::fork() } {
        0 => loop {
            // SAFETY: no arguments.
            unsafe { libc::pause() };
        },
        -1 => Err(std::io::Error::last_os_error().to_string()),
        child => Ok(child.into()),
    }
}

fn say(answer: &Value) {
    let mut out = std::io::stdout().lock();
    // Without its test the agent has nothing to say to anybody; its input ends as well.
    let _ = writeln!(out, "{answer}").and_then(|()| out.flush());
}

fn main() {
    // A test that dies takes its agents along, also those that it stopped.
    if let Err(e) = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL)) {
        eprintln!("this agent may outlive its test: {e}");
    }
    let name = std::env::args().nth(1).expect("the agent's name");
    let node = match Node::open(&name) {
        Ok(node) => node,
        Err(error) => return say(&json!({ "error": error.to_string() })),
    };
    say(&json!({ "ok": "ready" }));
    let (blocks, remotes, transfers) = Default::default();
    let mut agent = Agent { node, blocks, remotes, transfers, hammering: None };
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        let order: Value = serde_json::from_str(&line).expect("orders are JSON");
        let answer = agent.obey(&order);
        say(&answer.map_or_else(|e| json!({ "error": e }), |ok| json!({ "ok": ok })));
    }
}

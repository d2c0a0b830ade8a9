//! The test's end of an agent in another process.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver};

use baton_host::ErrorCode;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::{Block, Node, PATIENCE, Remote};

/// An agent in a process of its own; killed when dropped.
pub struct Agent {
    name: String,
    child: Child,
    orders: Option<ChildStdin>,
    answers: Receiver<Value>,
}

/// A block of an agent.
#[derive(Clone, Debug)]
pub struct AgentBlock {
    /// Its number at the agent.
    pub number: u64,
    /// What a peer imports.
    pub blob: Vec<u8>,
    /// Where it starts.
    pub addr: u64,
}

/// Bytes as text.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Text as bytes.
///
/// # Panics
/// If it is not made by [`hex`].
pub fn from_hex(text: &str) -> Vec<u8> {
    let byte = |i| u8::from_str_radix(&text[i..i + 2], 16).expect("hex digits");
    (0..text.len()).step_by(2).map(byte).collect()
}

impl Agent {
    /// Starts one; `command` is the agent's program with its environment.
    pub fn start(mut command: Command, name: &str) -> Agent {
        let mut agent = Agent::start_without_waiting(&mut command, name);
        agent.ready();
        agent
    }

    /// As `start`, but the engine may still be opening.
    pub fn start_without_waiting(command: &mut Command, name: &str) -> Agent {
        command.arg(name).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap_or_else(|e| panic!("{command:?}: {e}"));
        let output = child.stdout.take().expect("piped");
        let (tell, answers) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                let answer = serde_json::from_str(&line)
                    .unwrap_or_else(|e| json!({ "error": format!("{e}: {line}") }));
                if tell.send(answer).is_err() {
                    return;
                }
            }
        });
        let orders = child.stdin.take();
        Agent { name: name.to_owned(), child, orders, answers }
    }

    /// Waits until the engine is there.
    pub fn ready(&mut self) {
        assert_eq!(self.answer(), "ready");
    }

    /// Its agent name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Gives an order without waiting for the answer.
    pub fn tell(&mut self, order: Value) {
        let orders = self.orders.as_mut().expect("the agent takes orders");
        writeln!(orders, "{order}")
            .and_then(|()| orders.flush())
            .unwrap_or_else(|e| panic!("{}: {order}: {e}", self.name));
    }

    /// The next line it says.
    pub fn hear(&mut self) -> Value {
        let line = self.answers.recv_timeout(PATIENCE);
        line.unwrap_or_else(|e| panic!("agent {} says nothing: {e}", self.name))
    }

    /// Its answer to an order.
    pub fn answer(&mut self) -> Value {
        let mut line = self.hear();
        assert!(line["error"].is_null(), "agent {}: {line}", self.name);
        line["ok"].take()
    }

    /// Gives an order and waits for the answer.
    pub fn ask(&mut self, order: Value) -> Value {
        self.tell(order);
        self.answer()
    }

    /// Its connection information.
    pub fn info(&mut self) -> Vec<u8> {
        from_hex(self.ask(json!({ "do": "info" })).as_str().expect("hex"))
    }

    /// Makes it and a node of the test known to each other.
    pub fn befriend(&mut self, node: &Node, name: &str) {
        let own = hex(&node.engine.conn_info().expect("info"));
        self.ask(json!({ "do": "load", "name": name, "info": own }));
        let info = self.info();
        node.load(&self.name, &info);
    }

    /// Makes it register a block.
    pub fn block(&mut self, bytes: usize, seed: u64) -> AgentBlock {
        let made = self.ask(json!({ "do": "block", "bytes": bytes, "seed": seed }));
        AgentBlock {
            number: made["block"].as_u64().expect("a number"),
            blob: from_hex(made["blob"].as_str().expect("hex")),
            addr: made["addr"].as_u64().expect("an address"),
        }
    }

    /// Imports a block of it.
    pub fn import_into(&self, node: &Node, block: &AgentBlock) -> Remote {
        Remote::import(node, &self.name, &block.blob, block.addr).expect("import")
    }

    /// Makes it prepare a transfer between a block of its own and one of the test; the transfer's number.
    pub fn create(&mut self, op: &str, own: &AgentBlock, peer: &str, block: &Block, piece: usize) -> u64 {
        let blob = hex(&block.region().export().expect("export"));
        let import = json!({ "do": "import", "peer": peer, "blob": blob, "addr": block.region().addr() });
        let remote = self.ask(import);
        let create =
            json!({ "do": "create", "op": op, "block": own.number, "remote": remote, "piece": piece });
        self.ask(create).as_u64().expect("a number")
    }

    /// Makes it prepare two transfers of that kind and post them in turn until one fails.
    pub fn hammer(&mut self, op: &str, own: &AgentBlock, peer: &str, block: &Block, piece: usize) {
        let (first, second) =
            (self.create(op, own, peer, block, piece), self.create(op, own, peer, block, piece));
        self.ask(json!({ "do": "hammer", "first": first, "second": second }));
    }

    /// Waits until nothing is posted any more; the error that ended it.
    pub fn hammered(&mut self) -> (ErrorCode, String) {
        let end = self.ask(json!({ "do": "hammered" }));
        let code = end["code"].as_i64().unwrap_or_else(|| panic!("no code in {end}"));
        (ErrorCode::from_raw(code as i32), end["text"].to_string())
    }

    /// Makes it post a transfer.
    pub fn post(&mut self, transfer: u64, message: Option<&str>) -> Result<(), (ErrorCode, String)> {
        self.outcome(json!({ "do": "post", "transfer": transfer, "message": message }))
    }

    /// Waits for the end of a transfer that it posted.
    pub fn finish(&mut self, transfer: u64) -> Result<(), (ErrorCode, String)> {
        self.outcome(json!({ "do": "finish", "transfer": transfer }))
    }

    /// Makes it post a transfer and wait for its end.
    pub fn run(&mut self, transfer: u64, message: Option<&str>) -> Result<(), (ErrorCode, String)> {
        self.outcome(json!({ "do": "run", "transfer": transfer, "message": message }))
    }

    fn outcome(&mut self, order: Value) -> Result<(), (ErrorCode, String)> {
        let end = self.ask(order);
        match end["code"].as_i64() {
            Some(0) => Ok(()),
            code => Err((ErrorCode::from_raw(code.unwrap_or_default() as i32), end["text"].to_string())),
        }
    }

    /// Panics unless a block of it holds a pattern, with reversed pieces if their size is given.
    pub fn assert_holds(&mut self, block: &AgentBlock, seed: u64, piece: Option<usize>, when: &str) {
        let check = json!({ "do": "check", "block": block.number, "seed": seed, "piece": piece });
        let found = self.ask(check);
        assert_eq!(found, json!({ "differs": null, "sentinels": true }), "agent {} {when}", self.name);
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// SIGSTOP.
    pub fn stop(&self) {
        kill_process(self.pid(), Signal::STOP).expect("our own child");
        // The signal is on its way; the process has stopped when the kernel says so.
        let stat = Path::new("/proc").join(self.child.id().to_string()).join("stat");
        crate::wait_for("the stop", || {
            let text = std::fs::read_to_string(&stat).expect("our own child");
            text.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('T')).then_some(())
        });
    }

    /// SIGCONT.
    pub fn resume(&self) {
        kill_process(self.pid(), Signal::CONT).expect("our own child");
    }

    /// SIGKILL; the process is gone when this returns.
    pub fn kill(&mut self) {
        // Before its input ends, which it would take as the order to end well. It may have ended by itself.
        let _ = self.child.kill();
        self.child.wait().expect("our own child");
    }

    /// Ends its input and waits until it has ended in good order.
    pub fn end(mut self) {
        self.orders.take();
        let status = crate::wait_for("the agent's end", || self.child.try_wait().expect("our own child"));
        assert!(status.success(), "agent {}: {status}", self.name);
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.kill();
    }
}

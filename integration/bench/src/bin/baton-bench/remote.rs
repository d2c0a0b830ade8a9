//! The target's process, as the initiator sees it.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver, TryRecvError};
use std::time::{Duration, Instant};

use crate::Outcome;
use crate::engine::{Settings, Setup};
use crate::target::{Answer, Order, Spent};

/// How to start it.
pub struct How<'a> {
    /// What is said about its engines.
    pub settings: &'a Settings,
    /// Its devices.
    pub devices: Option<&'a str>,
    /// What starts `baton-bench` for it, unless it is this program.
    pub command: Option<&'a str>,
    /// Microseconds between two of its looks.
    pub look_us: u64,
    /// Seconds for which it may be silent.
    pub patience: u64,
}

/// The target in its process; killed when dropped.
pub struct Remote {
    child: Child,
    orders: ChildStdin,
    answers: Receiver<String>,
    patience: Duration,
}

impl Remote {
    /// Starts it with engines, and answers their connection information.
    pub fn start(how: &How<'_>, setups: &[Setup]) -> Outcome<(Remote, Vec<Vec<u8>>)> {
        let mut command = match how.command {
            None => Command::new(std::env::current_exe().map_err(|error| error.to_string())?),
            Some(words) => {
                let mut words = words.split_whitespace();
                let mut command = Command::new(words.next().ok_or("--target-command is empty")?);
                command.args(words);
                command
            }
        };
        command.arg("target").args(how.settings.arguments());
        command.args(["--look-us", &how.look_us.to_string()]);
        if let Some(devices) = how.devices {
            command.args(["--devices", devices]);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(|error| format!("cannot start the target: {error}"))?;
        let (orders, lines) = (child.stdin.take().ok_or("no pipe")?, child.stdout.take().ok_or("no pipe")?);
        let (tell, answers) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(lines).lines().map_while(Result::ok) {
                if tell.send(line).is_err() {
                    return;
                }
            }
        });
        let patience = Duration::from_secs(how.patience);
        let mut remote = Remote { child, orders, answers, patience };
        match remote.ask(&Order::Open(setups.to_vec()))? {
            Answer::Open(infos) if infos.len() == setups.len() => Ok((remote, infos)),
            other => Err(format!("the target says {other:?}")),
        }
    }

    /// Gives an order and waits for the answer; a failure is an error.
    pub fn ask(&mut self, order: &Order) -> Outcome<Answer> {
        self.order(order)?;
        let line =
            self.answers.recv_timeout(self.patience).map_err(|error| format!("the target: {error}"))?;
        read(&line)
    }

    /// Gives an order and does something until it has been obeyed.
    pub fn tell_and(
        &mut self,
        order: &Order,
        act: impl FnOnce() -> Outcome<()>,
        wait: impl Fn() -> Outcome<()>,
    ) -> Outcome<()> {
        self.order(order)?;
        act()?;
        let deadline = Instant::now() + self.patience;
        loop {
            match self.answers.try_recv() {
                Ok(line) => return read(&line).map(drop),
                Err(TryRecvError::Empty) if Instant::now() < deadline => wait()?,
                Err(error) => return Err(format!("the target: {error}")),
            }
        }
    }

    fn order(&mut self, order: &Order) -> Outcome<()> {
        let line = serde_json::to_string(order).map_err(|error| error.to_string())?;
        writeln!(self.orders, "{line}")
            .and_then(|()| self.orders.flush())
            .map_err(|error| format!("the target takes no orders: {error}"))
    }

    /// The same where nothing but "done" is of interest.
    pub fn tell(&mut self, order: &Order) -> Outcome<()> {
        self.ask(order).map(drop)
    }

    /// Its process, where it was started on this machine.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it has spent so far.
    pub fn spent(&mut self) -> Outcome<Spent> {
        match self.ask(&Order::Spent)? {
            Answer::Spent(spent) => Ok(spent),
            other => Err(format!("the target says {other:?}")),
        }
    }
}

fn read(line: &str) -> Outcome<Answer> {
    match serde_json::from_str(line).map_err(|error| format!("the target says {line}: {error}"))? {
        Answer::Failed(reason) => Err(format!("the target: {reason}")),
        answer => Ok(answer),
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

//! A Rust host: two agents of one process move scattered blocks both ways and compare every byte. It knows no
//! engine; the environment says which one.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use baton_host::{Door, Engine, EngineOptions, Environment, Op, Region, RemoteRegion, Status, Transfer};

const BLOCK: usize = 4096;
const BLOCKS: usize = 64;
const DEADLINE: Duration = Duration::from_secs(60);
const SENTINEL: u8 = 0xee;

type Failure = Box<dyn std::error::Error>;

struct Agent {
    engine: Engine,
    region: Region,
    memory: Box<[u8]>,
}

impl Agent {
    fn open(name: &str, door: Door, fill: impl Fn(usize) -> u8) -> Result<Agent, Failure> {
        let engine = Engine::open(EngineOptions::new(name).environment(Environment::Process).door(door))?;
        let mut memory: Box<[u8]> = (0..BLOCK * BLOCKS).map(fill).collect();
        // SAFETY: the memory is a heap block that lives as long as the region beside it, and is only read or
        // written while no transfer runs.
        let region = unsafe { engine.register(memory.as_mut_ptr(), memory.len(), Default::default())? };
        Ok(Agent { engine, region, memory })
    }

    fn learn(&self, peer: &str, other: &Agent) -> Result<RemoteRegion, Failure> {
        self.engine.load_remote(peer, &other.engine.conn_info()?)?;
        Ok(self.engine.import_region(peer, &other.region.export()?)?)
    }
}

fn pattern(seed: usize) -> impl Fn(usize) -> u8 {
    move |i| (i.wrapping_mul(31) ^ (i >> 8) ^ seed) as u8
}

/// Every third block of the source goes to every third block of the destination, backwards.
fn pairs() -> impl Iterator<Item = (usize, usize)> {
    (0..BLOCKS / 3).map(|i| (3 * i, 3 * (BLOCKS / 3 - 1 - i) + 1))
}

fn wait(
    agents: [&Agent; 2],
    what: &str,
    mut done: impl FnMut() -> Result<bool, Failure>,
) -> Result<(), Failure> {
    let start = Instant::now();
    while !done()? {
        for agent in agents {
            // An engine without this entry moves by itself.
            let _ = agent.engine.progress();
        }
        if start.elapsed() > DEADLINE {
            return Err(format!("{what}: not within {DEADLINE:?}").into());
        }
        std::thread::yield_now();
    }
    Ok(())
}

fn wait_for_message(agents: [&Agent; 2], at: &Agent, from: &str, message: &[u8]) -> Result<(), Failure> {
    wait(agents, "a notification", || match at.engine.notifications()?.as_slice() {
        [] => Ok(false),
        [one] if one.peer == from && one.message == message => Ok(true),
        other => Err(format!("unexpected {other:?}").into()),
    })
}

fn finish(agents: [&Agent; 2], transfer: &Transfer) -> Result<(), Failure> {
    wait(agents, "a transfer", || Ok(transfer.status()? == Status::Done))
}

fn compare(memory: &[u8], source: impl Fn(usize) -> u8) -> Result<(), Failure> {
    let mut from_block = vec![None; BLOCKS];
    for (source, destination) in pairs() {
        from_block[destination] = Some(source);
    }
    for (at, byte) in memory.iter().enumerate() {
        let expected = match from_block[at / BLOCK] {
            Some(block) => source(block * BLOCK + at % BLOCK),
            None => SENTINEL,
        };
        if *byte != expected {
            return Err(format!("byte {at} is {byte:#x} instead of {expected:#x}").into());
        }
    }
    Ok(())
}

fn transfer(door: Door) -> Result<String, Failure> {
    let prefill = Agent::open("prefill", door, pattern(1))?;
    let mut decode = Agent::open("decode", door, |_| SENTINEL)?;
    let at_prefill = decode.learn("prefill", &prefill)?;
    let at_decode = prefill.learn("decode", &decode)?;

    let block = |region: &Region, i: usize| region.desc((i * BLOCK) as u64, BLOCK as u64);
    let there =
        |region: &RemoteRegion, addr: u64, i: usize| region.desc(addr + (i * BLOCK) as u64, BLOCK as u64);
    let local: Vec<_> = pairs().map(|(_, to)| block(&decode.region, to)).collect();
    let remote: Vec<_> = pairs().map(|(from, _)| there(&at_prefill, prefill.region.addr(), from)).collect();
    let read = decode.engine.create_xfer(Op::Read, "prefill", &local, &remote)?;
    read.post(Some(b"read"))?;
    finish([&prefill, &decode], &read)?;
    wait_for_message([&prefill, &decode], &prefill, "decode", b"read")?;
    compare(&decode.memory, pattern(1))?;

    decode.memory.fill(SENTINEL);
    let local: Vec<_> = pairs().map(|(from, _)| block(&prefill.region, from)).collect();
    let remote: Vec<_> = pairs().map(|(_, to)| there(&at_decode, decode.region.addr(), to)).collect();
    let write = prefill.engine.create_xfer(Op::Write, "decode", &local, &remote)?;
    write.post(Some(b""))?;
    wait_for_message([&prefill, &decode], &decode, "prefill", b"")?;
    compare(&decode.memory, pattern(1))?;
    finish([&prefill, &decode], &write)?;
    if let Some(at) = (0..prefill.memory.len()).find(|i| prefill.memory[*i] != pattern(1)(*i)) {
        return Err(format!("byte {at} of the source has changed").into());
    }

    decode.engine.notify("prefill", b"by itself")?;
    wait_for_message([&prefill, &decode], &prefill, "decode", b"by itself")?;
    if !decode.engine.stats()?.contains("\"choice\"") {
        return Err("stats does not say what was chosen".into());
    }
    let plugin = decode.engine.plugin();
    Ok(format!("{} blocks both ways with {} {}", pairs().count(), plugin.name(), plugin.version()))
}

fn main() -> ExitCode {
    let door = match std::env::args().nth(1).as_deref() {
        None | Some("c") => Door::C,
        #[cfg(feature = "rust-door")]
        Some("rust") => Door::Rust,
        Some(other) => {
            eprintln!("no door {other:?}");
            return ExitCode::FAILURE;
        }
    };
    match transfer(door) {
        Ok(line) => {
            println!("{line}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

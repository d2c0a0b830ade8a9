//! Two executors over the TCP fabric, in the guest also over RDMA: real memory, real slots, every byte compared.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::{Duration, Instant};

use baton_core::two_sided::channel::Durable;
use baton_core::two_sided::chunks::Piece;
use baton_core::two_sided::codec::{Direction, Status};
use baton_core::two_sided::notes::Resolve;
use baton_core::two_sided::pool::{Holder, PeerKey, PoolConfig, SlotId};
use baton_core::two_sided::report::{TwoEvent, XferFailure};
use baton_core::two_sided::setup::{Place, TwoLane, TwoLimits, TwoSetup};
use baton_core::{Epoch, LaneId, Nanos, RegionId, SessionId};
use baton_fabric::{Completion, EndpointConfig, EndpointId, Fabric, Memory, MemoryKind, RegionKeys};
use baton_fabric_soft::local::{LocalConfig, LocalFabric};
use baton_fabric_soft::tcp::{TcpConfig, TcpFabric};
use baton_fabric_verbs::{VerbsConfig, VerbsFabric};

use baton_driver::two_sided::*;

const PATIENCE: Duration = Duration::from_secs(60);
const REGION: RegionId = RegionId(0xDA7A);
const BYTES: usize = 24 << 20;
const CONTROL: (u32, u32) = (64, 64);
const LANES: usize = 2;
const DEPTH: u32 = 32;
const SLOT: u32 = 64 * 1024;
const SEND_SLOTS: u32 = 8;
const PEER: PeerKey = PeerKey(1);

/// Memory of a host, registered with the fabric or not.
struct Data {
    base: u64,
    withdrawn: AtomicBool,
    held: Arc<Holds>,
    keys: Option<RegionKeys>,
}

struct Holds(AtomicI64);

impl Keep for Holds {
    fn release(&self) {
        assert!(self.0.fetch_sub(1, Ordering::AcqRel) > 0, "released more often than held");
    }
}

impl Data {
    fn new(setting: &Setting, fabric: &Arc<dyn Fabric>) -> Arc<Data> {
        let bytes: &'static mut [u8] = vec![0u8; BYTES].leak();
        let base = bytes.as_mut_ptr().expose_provenance() as u64;
        let memory = Memory {
            addr: base,
            len_bytes: BYTES as u64,
            kind: MemoryKind::Dram,
            device: 0,
            remote_read: false,
            remote_write: false,
            ordered: false,
        };
        let keys = setting.registered.then(|| fabric.region_keys(fabric.register(&memory).unwrap()));
        Arc::new(Data {
            base,
            withdrawn: AtomicBool::new(false),
            held: Arc::new(Holds(AtomicI64::new(0))),
            keys,
        })
    }

    fn at(&self, at: usize, len: usize) -> &'static mut [u8] {
        assert!(at + len <= BYTES);
        // SAFETY: leaked memory in bounds; the test looks at ranges only while no transfer uses them.
        unsafe {
            std::slice::from_raw_parts_mut(
                std::ptr::with_exposed_provenance_mut(self.base as usize + at),
                len,
            )
        }
    }
}

impl Regions for Data {
    fn find(&self, region: RegionId, offset: u64, len: u64, _: Direction) -> Result<u64, Status> {
        if region != REGION {
            return Err(Status::NoRegion);
        }
        if self.withdrawn.load(Ordering::Acquire) {
            return Err(Status::StaleRegion);
        }
        match offset.checked_add(len) {
            Some(end) if end <= BYTES as u64 => Ok(self.base + offset),
            _ => Err(Status::Range),
        }
    }

    fn hold(&self, region: RegionId, offset: u64, len: u64, direction: Direction) -> Result<Held, Status> {
        let addr = self.find(region, offset, len, direction)?;
        self.held.0.fetch_add(1, Ordering::AcqRel);
        Ok(Held::new(addr, Arc::clone(&self.held) as Arc<dyn Keep>))
    }

    fn local_key(&self, from: Place, len: u32, rail: u8) -> Option<u64> {
        let offset = match from {
            Place::Local(addr) => addr - self.base,
            Place::Region(_, offset) => offset,
        };
        self.keys.as_ref()?.local_key(rail, offset, len.into())
    }
}

/// Two fabrics that reach each other, and whether the hosts' memory is registered with them.
struct Setting {
    fabrics: [Arc<dyn Fabric>; 2],
    registered: bool,
}

impl Setting {
    fn registered(self) -> Setting {
        Setting { registered: true, ..self }
    }
}

struct Side {
    fabric: Arc<dyn Fabric>,
    /// Always there but for the moment between two epochs.
    exec: Option<Executor>,
    bounce: SharedBounce,
    data: Arc<Data>,
    done: Vec<(u64, Result<(), XferFailure>)>,
    notes: Vec<u64>,
    delivered: Vec<Vec<u8>>,
    /// The epoch is over.
    ended: bool,
}

struct Pair {
    sides: [Side; 2],
    start: Instant,
    epoch: u32,
}

fn setting(fabrics: [Arc<dyn Fabric>; 2]) -> Setting {
    Setting { fabrics, registered: false }
}

fn tcp() -> Setting {
    setting([0, 1].map(|_| {
        let listen = Some("127.0.0.1".parse().unwrap());
        let config = TcpConfig { listen, user_timeout: PATIENCE, ..TcpConfig::default() };
        TcpFabric::new(config).unwrap() as Arc<dyn Fabric>
    }))
}

fn local() -> Setting {
    setting([0, 1].map(|_| LocalFabric::new(LocalConfig::default()).unwrap() as Arc<dyn Fabric>))
}

fn rdma() -> Setting {
    let named = std::env::var("BATON_TEST_DEVICES").unwrap_or("rxe0,rxe1".into());
    let (first, second) = named.split_once(',').expect("two devices");
    setting([first, second].map(|device| {
        let mut config = VerbsConfig::default();
        for (key, value) in [("devices", device), ("ib_timeout", "18")] {
            assert!(config.set(key, value).expect("a valid setting"), "setting {key} exists");
        }
        let fabric = VerbsFabric::open(config).unwrap_or_else(|e| panic!("device {device}: {e}"));
        fabric as Arc<dyn Fabric>
    }))
}

/// Endpoints of one side with their RECVs posted, and what the other side needs of it.
struct Prepared {
    fabric: Arc<dyn Fabric>,
    bounce: SharedBounce,
    area: ChannelArea,
    endpoints: Vec<(EndpointId, serde_json::Value)>,
    posted: Vec<Vec<SlotId>>,
}

fn prepare(fabric: Arc<dyn Fabric>, bounce: SharedBounce, active: bool) -> Prepared {
    let seam = Arc::clone(&fabric);
    let area = ChannelArea::new(&seam, CONTROL, (LANES, DEPTH)).unwrap();
    let config = |control, (sq_depth, rq_depth)| EndpointConfig {
        sq_depth,
        rq_depth,
        active,
        control,
        max_sge: seam.caps().max_send_sge,
    };
    let mut endpoints = vec![seam.create_endpoint(&config(true, CONTROL)).unwrap()];
    let recvs: Vec<_> = (0..u64::from(CONTROL.1)).map(|n| area.control_recv(0, n).unwrap()).collect();
    seam.post_recv(endpoints[0].0, &recvs).unwrap();
    let mut posted = Vec::new();
    for lane in 0..LANES {
        let made = seam.create_endpoint(&config(false, (DEPTH, DEPTH))).unwrap();
        let mut bounce = bounce.lock();
        let slot = bounce.pool.lend(Holder { peer: PEER, lane: LaneId(lane as u8) }).unwrap();
        seam.post_recv(made.0, &[bounce.recv(slot, 0, 0).unwrap()]).unwrap();
        posted.push(vec![slot]);
        endpoints.push(made);
    }
    Prepared { fabric, bounce, area, endpoints, posted }
}

/// Connects both sides; for each, the executor of that epoch.
fn open(sides: [(Prepared, Arc<Data>, Durable); 2], epoch: u32, now: Nanos) -> [Executor; 2] {
    let deadline = Instant::now() + PATIENCE;
    std::thread::scope(|scope| {
        for n in [0, 1] {
            let (own, other) = (&sides[n].0, &sides[1 - n].0);
            scope.spawn(move || {
                for (mine, theirs) in own.endpoints.iter().zip(&other.endpoints) {
                    own.fabric.connect_endpoint(mine.0, &theirs.1, deadline).unwrap();
                }
            });
        }
    });
    let pages = [0, 1].map(|n: usize| sides[n].0.area.credit_page(0).unwrap());
    let mut n = 0;
    sides.map(|(side, data, durable)| {
        n += 1;
        let lane = |nth: usize| TwoLane {
            endpoint: side.endpoints[nth + 1].0,
            sq_depth: DEPTH,
            rq_depth: DEPTH,
            posted: side.posted[nth].clone(),
            peer_posted: 1,
        };
        let setup = TwoSetup {
            peer: PEER,
            session: SessionId(5),
            epoch: Epoch(epoch),
            control: side.endpoints[0].0,
            control_sq_depth: CONTROL.0,
            control_rq_depth: CONTROL.1,
            lanes: (0..LANES).map(lane).collect(),
            slot_bytes: SLOT,
            peer_credit_addr: pages[2 - n].0,
            peer_credit_key: pages[2 - n].1,
            send_slots: SEND_SLOTS,
            max_sge: side.fabric.caps().max_send_sge,
            data_crc: n == 1,
            limits: TwoLimits::default(),
        };
        let seam = Arc::clone(&side.fabric);
        Executor::new(
            seam,
            Arc::clone(&side.bounce),
            side.area,
            data as Arc<dyn Regions>,
            setup,
            durable,
            now,
        )
    })
}

impl Pair {
    fn new(setting: Setting) -> Pair {
        let parts = setting.fabrics.clone().map(|fabric| {
            let pool = PoolConfig { slot_bytes: SLOT, ..PoolConfig::default() };
            let bounce = Bounce::new(Arc::clone(&fabric), pool, Nanos(0));
            bounce.lock().pool.join(PEER);
            let data = Data::new(&setting, &fabric);
            (fabric, bounce, data)
        });
        let mut n = 0;
        let sides = parts.clone().map(|(fabric, bounce, data)| {
            n += 1;
            (prepare(fabric, bounce, n == 1), data, Durable::new(TwoLimits::default()))
        });
        let mut execs = open(sides, 1, Nanos(0)).into_iter();
        let sides = parts.map(|(fabric, bounce, data)| Side {
            fabric,
            exec: execs.next(),
            bounce,
            data,
            done: Vec::new(),
            notes: Vec::new(),
            delivered: Vec::new(),
            ended: false,
        });
        Pair { sides, start: Instant::now(), epoch: 1 }
    }

    /// Ends the epoch on both sides, wherever it stands, and begins the next of the same session.
    fn reconnect(&mut self) {
        self.epoch += 1;
        let now = self.now();
        self.sides.iter_mut().for_each(|side| side.fence());
        let mut n = 0;
        let next = [0, 1].map(|n: usize| self.sides[n].end(now));
        let next = next.map(|(fabric, bounce, data, durable)| {
            n += 1;
            (prepare(fabric, bounce, n == 1), data, durable)
        });
        for (side, exec) in self.sides.iter_mut().zip(open(next, self.epoch, now)) {
            (side.exec, side.ended) = (Some(exec), false);
        }
    }

    fn now(&self) -> Nanos {
        Nanos(self.start.elapsed().as_nanos() as u64)
    }

    /// Works on both sides until the condition holds.
    fn until(&mut self, what: &str, holds: impl Fn(&[Side; 2]) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !holds(&self.sides) {
            assert!(Instant::now() < deadline, "{what}: {:#?}", self.sides[0].exec().channel.stats());
            let now = self.now();
            self.sides.iter_mut().for_each(|side| side.turn(now));
        }
    }

    fn submit(
        &mut self,
        n: usize,
        token: u64,
        direction: Direction,
        spans: &[(usize, usize, usize)],
        message: &[u8],
    ) {
        let (now, side) = (self.now(), &mut self.sides[n]);
        let base = side.data.base;
        let pieces: Vec<Piece> = spans
            .iter()
            .map(|&(here, there, len)| Piece {
                local: base + here as u64,
                region: REGION,
                offset: there as u64,
                len: len as u64,
            })
            .collect();
        side.exec
            .as_mut()
            .unwrap()
            .channel
            .submit(now, token, direction, pieces.into(), Some(message))
            .unwrap();
    }
}

impl Side {
    fn exec(&self) -> &Executor {
        self.exec.as_ref().expect("an epoch is open")
    }

    fn turn(&mut self, now: Nanos) {
        self.fabric.serve(1 << 20);
        let exec = self.exec.as_mut().expect("an epoch is open");
        let mut polled = [Completion::EMPTY; 32];
        let n = self.fabric.poll(&mut polled);
        polled[..n].iter().for_each(|done| exec.on_completion(now, done));
        if n == 0 {
            exec.poll_credit();
            exec.channel.flush();
        }
        exec.on_timeout(now);
        exec.drive(now);
        Bounce::serve(&self.bounce, now);
        if self.bounce.lock().pool.next_hungry().is_some() {
            exec.channel.on_pool_changed();
        }
        self.take_events();
    }

    fn take_events(&mut self) {
        let exec = self.exec.as_mut().expect("an epoch is open");
        while let Some(event) = exec.channel.next_event() {
            match event {
                TwoEvent::XferDone { token, result } => self.done.push((token, result)),
                TwoEvent::NoteDone { token, sent } => {
                    assert!(sent);
                    self.notes.push(token);
                }
                TwoEvent::Delivered { message } => {
                    exec.channel.on_popped(1, message.len() as u64);
                    self.delivered.push(message);
                }
                TwoEvent::EndEpoch { .. } => self.ended = true,
            }
        }
    }

    fn fence(&mut self) {
        let endpoints = self.exec().endpoints();
        endpoints.iter().for_each(|endpoint| self.fabric.fence(*endpoint));
    }

    /// What succeeded on the way counts; then the endpoints go, and only then the channel is closed.
    fn end(&mut self, now: Nanos) -> (Arc<dyn Fabric>, SharedBounce, Arc<Data>, Durable) {
        let endpoints = self.exec().endpoints();
        let deadline = Instant::now() + PATIENCE;
        while !endpoints.iter().all(|endpoint| self.fabric.is_quiet(*endpoint)) {
            assert!(Instant::now() < deadline, "the endpoints become quiet");
            self.turn(now);
        }
        self.turn(now);
        let mut exec = self.exec.take().expect("an epoch is open");
        exec.channel.shut("reconnect");
        exec.drive(now);
        self.exec = Some(exec);
        self.take_events();
        assert!(self.ended);
        endpoints.iter().for_each(|endpoint| self.fabric.destroy_endpoint(*endpoint));
        let closed = self.exec.take().expect("an epoch is open").close(now);
        self.done.extend(closed.done);
        assert_eq!(self.bounce.lock().pool.stats().lent, 0);
        (Arc::clone(&self.fabric), Arc::clone(&self.bounce), Arc::clone(&self.data), closed.durable)
    }
}

fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..len).map(next).collect()
}

fn writes_and_reads_arrive_byte_for_byte(setting: Setting) {
    let mut pair = Pair::new(setting);
    let (len, at) = (5 << 20, 4096);
    pair.sides[0].data.at(at, len).copy_from_slice(&pattern(1, len));
    pair.submit(0, 1, Direction::Write, &[(at, at + 64, len)], b"written");
    let blocks: Vec<(usize, usize, usize)> =
        (0..128).map(|n| ((6 << 20) + n * 4096, (8 << 20) + n * 8192, 4096)).collect();
    pair.sides[0].data.at(6 << 20, 128 * 4096).copy_from_slice(&pattern(2, 128 * 4096));
    pair.submit(0, 2, Direction::Write, &blocks, b"packed");
    pair.sides[1].data.at(12 << 20, len).copy_from_slice(&pattern(3, len));
    pair.submit(0, 3, Direction::Read, &[(12 << 20, 12 << 20, len)], b"read");
    pair.sides[1].data.at(18 << 20, len).copy_from_slice(&pattern(4, len));
    pair.submit(1, 4, Direction::Write, &[(18 << 20, 18 << 20, len)], b"and back");
    pair.until("all four end", |sides| sides[0].done.len() == 3 && sides[1].done.len() == 1);
    for side in &pair.sides {
        assert!(side.done.iter().all(|(_, result)| result.is_ok()), "{:?}", side.done);
    }
    pair.until("messages", |sides| sides[1].delivered.len() == 3 && sides[0].delivered.len() == 1);
    let [a, b] = &pair.sides;
    assert_eq!(b.data.at(at + 64, len), pattern(1, len));
    assert!(b.data.at(0, at + 64).iter().chain(b.data.at(at + 64 + len, 64).iter()).all(|byte| *byte == 0));
    let packed = pattern(2, 128 * 4096);
    for (n, &(_, there, len)) in blocks.iter().enumerate() {
        assert_eq!(b.data.at(there, len), &packed[n * 4096..][..len]);
        assert!(b.data.at(there + len, 4096).iter().all(|byte| *byte == 0), "between the blocks");
    }
    assert_eq!(a.data.at(12 << 20, len), pattern(3, len));
    assert_eq!(a.data.at(18 << 20, len), pattern(4, len));
    let counters = a.exec().channel.counters();
    assert!(counters.blocks_packed == 128 && counters.nops_sent == 0, "{counters:?}");
    for side in &pair.sides {
        let counters = side.exec().channel.counters();
        let gathered = if side.data.keys.is_some() { counters.messages_sent } else { 0 };
        assert_eq!(counters.messages_gathered, gathered, "{counters:?}");
        let pool = side.bounce.lock().pool.stats();
        assert_eq!(pool.counters.sends, counters.messages_sent - gathered, "a slot for each that was copied");
        assert_eq!(pool.sending, 0, "none afterwards");
        assert_eq!(side.data.held.0.load(Ordering::Acquire), 0, "nothing is held");
    }
}

fn a_region_that_is_withdrawn_while_it_is_read_is_refused_and_not_held_any_more(setting: Setting) {
    let mut pair = Pair::new(setting);
    pair.submit(0, 1, Direction::Read, &[(0, 0, 20 << 20)], b"read");
    pair.until("it is under way", |sides| sides[0].exec().channel.counters().bytes_placed > 1 << 20);
    pair.sides[1].data.withdrawn.store(true, Ordering::Release);
    pair.until("it is refused", |sides| sides[0].done.len() == 1);
    let refused =
        matches!(pair.sides[0].done[0].1, Err(XferFailure::Refused { status: Status::StaleRegion, .. }));
    assert!(refused, "{:?}", pair.sides[0].done);
    pair.until("its SENDs end", |sides| sides[1].data.held.0.load(Ordering::Acquire) == 0);
    assert!(!pair.sides[0].ended && !pair.sides[1].ended, "the session goes on");
    pair.sides[1].data.withdrawn.store(false, Ordering::Release);
    pair.submit(0, 2, Direction::Read, &[(0, 0, 1 << 20)], b"read");
    pair.until("the next one is done", |sides| sides[0].done.len() == 2);
    assert_eq!(pair.sides[0].done[1], (2, Ok(())));
}

fn notifications_of_any_length_arrive_in_order(setting: Setting) {
    let mut pair = Pair::new(setting);
    let messages: Vec<Vec<u8>> = (0..300).map(|n| pattern(n, (n as usize * 97) % 20_000)).collect();
    for (token, message) in (0..).zip(&messages) {
        let resolve = if token % 2 == 0 { Resolve::Sent } else { Resolve::Taken };
        pair.sides[0]
            .exec
            .as_mut()
            .unwrap()
            .channel
            .notify(token, message, resolve, Nanos(u64::MAX))
            .unwrap();
    }
    pair.until("all are resolved", |sides| sides[0].notes.len() == 300 && sides[1].delivered.len() == 300);
    assert_eq!(pair.sides[1].delivered, messages);
}

fn a_refusal_has_its_reason_and_the_pool_is_back_at_its_base_after_the_load(setting: Setting) {
    let mut pair = Pair::new(setting);
    pair.sides[1].data.withdrawn.store(true, Ordering::Release);
    pair.submit(0, 1, Direction::Write, &[(0, 0, 1 << 20)], b"no");
    pair.until("it is refused", |sides| sides[0].done.len() == 1);
    let refused = Err(XferFailure::Refused { status: Status::StaleRegion, chunk: 0 });
    assert_eq!(pair.sides[0].done[0], (1, refused));
    pair.sides[1].data.withdrawn.store(false, Ordering::Release);
    pair.submit(0, 2, Direction::Write, &[(0, 0, 16 << 20)], b"yes");
    pair.until("it is done", |sides| sides[0].done.len() == 2);
    assert_eq!(pair.sides[0].done[1], (2, Ok(())));
    assert!(pair.sides[1].bounce.lock().pool.stats().slabs > 1, "it grew");
    pair.until("it is back at its base", |sides| sides[1].bounce.lock().pool.stats().slabs == 1);
    assert_eq!(pair.sides[1].delivered, [b"yes".to_vec()]);
}

fn a_transfer_that_loses_its_connection_again_and_again_is_finished_byte_for_byte_and_told_once(
    setting: Setting,
) {
    let mut pair = Pair::new(setting);
    let (len, at) = (20 << 20, 4096);
    pair.sides[0].data.at(at, len).copy_from_slice(&pattern(1, len));
    pair.submit(0, 1, Direction::Write, &[(at, at, len)], b"written");
    for round in 1..5u64 {
        // Somewhere in the middle.
        let some = round * 1_000_000;
        pair.until("some bytes", |sides| sides[1].exec().channel.counters().bytes_placed >= some);
        pair.sides[0]
            .exec
            .as_mut()
            .unwrap()
            .channel
            .notify(round, &[round as u8], Resolve::Taken, Nanos(u64::MAX))
            .unwrap();
        pair.reconnect();
    }
    pair.until("the end", |sides| sides[0].done.len() == 1 && sides[0].notes.len() == 4);
    pair.until("messages", |sides| sides[1].delivered.len() == 5);
    assert_eq!(pair.sides[0].done, [(1, Ok(()))]);
    let mut delivered = pair.sides[1].delivered.clone();
    delivered.sort();
    assert_eq!(delivered, [vec![1], vec![2], vec![3], vec![4], b"written".to_vec()]);
    let [_, b] = &pair.sides;
    assert_eq!(b.data.at(at, len), pattern(1, len));
    assert!(b.data.at(0, at).iter().chain(b.data.at(at + len, 64).iter()).all(|byte| *byte == 0));
    assert!(b.exec().channel.counters().duplicate_chunks > 0, "what was there is noticed, not placed again");
}

macro_rules! over {
    ($module:ident, $setting:expr, $mark:meta: $($name:ident),+ $(,)?) => {
        mod $module {
            use super::*;
            $(#[test] #[$mark] fn $name() {
                super::$name($setting);
            })+
        }
    };
    ($($module:ident: $setting:expr, $mark:meta;)+) => {
        $(over!($module, $setting, $mark:
            writes_and_reads_arrive_byte_for_byte,
            notifications_of_any_length_arrive_in_order,
            a_refusal_has_its_reason_and_the_pool_is_back_at_its_base_after_the_load,
            a_region_that_is_withdrawn_while_it_is_read_is_refused_and_not_held_any_more,
            a_transfer_that_loses_its_connection_again_and_again_is_finished_byte_for_byte_and_told_once,
        );)+
    };
}

over! {
    over_tcp: tcp(), cfg(test);
    over_tcp_gathered: tcp().registered(), cfg(test);
    over_local: local(), cfg(test);
    over_local_gathered: local().registered(), cfg(test);
    over_rdma: rdma(), ignore = "needs RDMA devices: run it in the guest";
    over_rdma_gathered: rdma().registered(), ignore = "needs RDMA devices: run it in the guest";
}

//! Two executors joined by a fabric: real memory, real slots.

// Each test binary uses its part of this.
#![allow(dead_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::{Duration, Instant};

use baton_core::two_sided::channel::Durable;
use baton_core::two_sided::chunks::Piece;
use baton_core::two_sided::codec::{Direction, Status};
use baton_core::two_sided::pool::{Holder, PeerKey, PoolConfig, SlotId};
use baton_core::two_sided::report::{TwoEvent, XferFailure};
use baton_core::two_sided::setup::{Place, TwoLane, TwoLimits, TwoSetup};
use baton_core::{Epoch, LaneId, Nanos, RegionId, SessionId};
use baton_fabric::{Completion, EndpointConfig, EndpointId, Fabric, Memory, MemoryKind, RegionKeys};
use baton_fabric_soft::local::{LocalConfig, LocalFabric};
use baton_fabric_soft::tcp::{TcpConfig, TcpFabric};
use baton_fabric_verbs::{VerbsConfig, VerbsFabric};

use baton_driver::two_sided::*;

pub const PATIENCE: Duration = Duration::from_secs(60);
pub const REGION: RegionId = RegionId(0xDA7A);
pub const BYTES: usize = 24 << 20;
pub const CONTROL: (u32, u32) = (64, 64);
pub const LANES: usize = 2;
pub const DEPTH: u32 = 32;
pub const SLOT: u32 = 64 * 1024;
pub const SEND_SLOTS: u32 = 8;
pub const PEER: PeerKey = PeerKey(1);

/// Memory of a host, registered with the fabric or not.
pub struct Data {
    pub base: u64,
    pub withdrawn: AtomicBool,
    pub held: Arc<Holds>,
    pub keys: Option<RegionKeys>,
}

pub struct Holds(pub AtomicI64);

impl Keep for Holds {
    fn release(&self) {
        assert!(self.0.fetch_sub(1, Ordering::AcqRel) > 0, "released more often than held");
    }
}

impl Data {
    pub fn new(setting: &Setting, fabric: &Arc<dyn Fabric>) -> Arc<Data> {
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
            mapped: false,
        };
        let keys = setting.registered.then(|| fabric.region_keys(fabric.register(&memory).unwrap()));
        Arc::new(Data {
            base,
            withdrawn: AtomicBool::new(false),
            held: Arc::new(Holds(AtomicI64::new(0))),
            keys,
        })
    }

    pub fn at(&self, at: usize, len: usize) -> &'static mut [u8] {
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
pub struct Setting {
    pub fabrics: [Arc<dyn Fabric>; 2],
    pub registered: bool,
    /// Threads that copy.
    pub copiers: Option<Arc<Copiers>>,
}

impl Setting {
    pub fn registered(self) -> Setting {
        Setting { registered: true, ..self }
    }

    /// With threads that copy out of slots, until the pair is dropped.
    pub fn copied_by_threads(self) -> Setting {
        let copiers = Arc::new(Copiers::default());
        for _ in 0..2 {
            let copiers = Arc::clone(&copiers);
            std::thread::spawn(move || copiers.work());
        }
        Setting { copiers: Some(copiers), ..self }
    }
}

pub struct Side {
    pub fabric: Arc<dyn Fabric>,
    /// Always there but for the moment between two epochs.
    pub exec: Option<Executor>,
    pub bounce: SharedBounce,
    pub data: Arc<Data>,
    pub done: Vec<(u64, Result<(), XferFailure>)>,
    pub notes: Vec<u64>,
    pub delivered: Vec<Vec<u8>>,
    /// The epoch is over.
    pub ended: bool,
}

pub struct Pair {
    pub sides: [Side; 2],
    pub start: Instant,
    pub epoch: u32,
    pub copiers: Option<Arc<Copiers>>,
}

pub fn setting(fabrics: [Arc<dyn Fabric>; 2]) -> Setting {
    Setting { fabrics, registered: false, copiers: None }
}

pub fn tcp() -> Setting {
    setting([0, 1].map(|_| {
        let listen = Some("127.0.0.1".parse().unwrap());
        let config = TcpConfig { listen, user_timeout: PATIENCE, ..TcpConfig::default() };
        TcpFabric::new(config).unwrap() as Arc<dyn Fabric>
    }))
}

pub fn local() -> Setting {
    setting([0, 1].map(|_| LocalFabric::new(LocalConfig::default()).unwrap() as Arc<dyn Fabric>))
}

pub fn rdma() -> Setting {
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
pub struct Prepared {
    pub fabric: Arc<dyn Fabric>,
    pub bounce: SharedBounce,
    pub area: ChannelArea,
    pub endpoints: Vec<(EndpointId, serde_json::Value)>,
    pub posted: Vec<Vec<SlotId>>,
}

pub fn prepare(fabric: Arc<dyn Fabric>, bounce: SharedBounce, active: bool) -> Prepared {
    let seam = Arc::clone(&fabric);
    let area = ChannelArea::new(&seam, CONTROL, (LANES, DEPTH)).unwrap();
    assert!(area.len_bytes() <= 192 << 10, "a channel costs {} bytes", area.len_bytes());
    let config = |control, (sq_depth, rq_depth)| EndpointConfig {
        sq_depth,
        rq_depth,
        active,
        control,
        max_sge: seam.caps().max_send_sge,
        exposed: true,
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
pub fn open(
    sides: [(Prepared, Arc<Data>, Durable); 2],
    copiers: Option<&Arc<Copiers>>,
    epoch: u32,
    now: Nanos,
) -> [Executor; 2] {
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
        let mut exec = Executor::new(
            seam,
            Arc::clone(&side.bounce),
            side.area,
            data as Arc<dyn Regions>,
            setup,
            durable,
            now,
        );
        if let Some(copiers) = copiers {
            // The tests look again and again by themselves.
            exec.set_copiers(Arc::clone(copiers), Box::new(|| ()));
        }
        exec
    })
}

impl Drop for Pair {
    fn drop(&mut self) {
        self.copiers.iter().for_each(|copiers| copiers.stop());
    }
}

impl Pair {
    pub fn new(setting: Setting) -> Pair {
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
        let mut execs = open(sides, setting.copiers.as_ref(), 1, Nanos(0)).into_iter();
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
        Pair { sides, start: Instant::now(), epoch: 1, copiers: setting.copiers }
    }

    /// Ends the epoch on both sides, wherever it stands, and begins the next of the same session.
    pub fn reconnect(&mut self) {
        self.epoch += 1;
        let now = self.now();
        self.sides.iter_mut().for_each(|side| side.fence());
        let mut n = 0;
        let next = [0, 1].map(|n: usize| self.sides[n].end(now));
        let next = next.map(|(fabric, bounce, data, durable)| {
            n += 1;
            (prepare(fabric, bounce, n == 1), data, durable)
        });
        let next = open(next, self.copiers.as_ref(), self.epoch, now);
        for (side, exec) in self.sides.iter_mut().zip(next) {
            (side.exec, side.ended) = (Some(exec), false);
        }
    }

    pub fn now(&self) -> Nanos {
        Nanos(self.start.elapsed().as_nanos() as u64)
    }

    /// Works on both sides until the condition holds.
    pub fn until(&mut self, what: &str, holds: impl Fn(&[Side; 2]) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !holds(&self.sides) {
            assert!(Instant::now() < deadline, "{what}: {:#?}", self.sides[0].exec().channel.stats());
            let now = self.now();
            self.sides.iter_mut().for_each(|side| side.turn(now));
        }
    }

    pub fn submit(
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
    pub fn exec(&self) -> &Executor {
        self.exec.as_ref().expect("an epoch is open")
    }

    pub fn turn(&mut self, now: Nanos) {
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

    pub fn take_events(&mut self) {
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

    pub fn fence(&mut self) {
        let endpoints = self.exec().endpoints();
        endpoints.iter().for_each(|endpoint| self.fabric.fence(*endpoint));
    }

    /// What succeeded on the way counts; then the endpoints go, and only then the channel is closed.
    pub fn end(&mut self, now: Nanos) -> (Arc<dyn Fabric>, SharedBounce, Arc<Data>, Durable) {
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

pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..len).map(next).collect()
}

//! Values and strategies for tests.

use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::ids::{Epoch, Instance, RegionId, SessionId};

fn endpoint(n: usize) -> EndpointOffer {
    EndpointOffer { address: json!({ "slot": n }), sq_depth: 512, rq_depth: 256, rail: 0 }
}

/// An offer for the one-sided backend alone.
pub(crate) fn offer(fabric: &str, lanes: usize) -> FabricOffer {
    FabricOffer { two_sided: None, ..offer_of_both(fabric, lanes) }
}

/// An offer for both backends.
pub(crate) fn offer_of_both(fabric: &str, lanes: usize) -> FabricOffer {
    let ring = |n: u64| MemoryOffer { addr: 0x1000 * n, key: n, bytes: 32 * 1024 };
    let lane = |n: usize| TwoSidedLane { endpoint: endpoint(100 + n), posted: 2 };
    FabricOffer {
        fabric: fabric.into(),
        address: json!("here"),
        max_message_bytes: 4 << 20,
        one_sided: Some(OneSidedOffer {
            immediate: true,
            control: endpoint(0),
            lanes: (1..=lanes).map(endpoint).collect(),
            control_ring: ring(1),
            rings: (0..lanes as u64).map(|n| ring(2 + n)).collect(),
            credit_page: MemoryOffer { addr: 0x10, key: 9, bytes: 4096 },
        }),
        two_sided: Some(TwoSidedOffer {
            control: endpoint(100),
            lanes: (1..=lanes).map(lane).collect(),
            slot_bytes: 64 * 1024,
            request_depth: 256,
            notify_window: 1 << 20,
            message_bytes: 512 * 1024,
            credit_page: MemoryOffer { addr: 0x20, key: 10, bytes: 1024 },
        }),
    }
}

/// An offer for the two-sided backend alone.
pub(crate) fn two_sided_offer(fabric: &str, lanes: usize) -> FabricOffer {
    FabricOffer { one_sided: None, ..offer_of_both(fabric, lanes) }
}

pub(crate) fn hello(own: Instance, to: Instance) -> Hello {
    Hello {
        protocol: ProtocolRange::OURS,
        instance: own,
        to_instance: to,
        name: "decode".into(),
        attempt: 77,
        session: None,
        last_epoch: 0,
        progress: Progress::Thread,
        nonce: [1; 16],
        offers: vec![offer("local", 2), offer("tcp", 4)],
        features: vec!["imm".into()],
    }
}

pub(crate) fn reply(to: &Hello) -> Reply {
    Reply {
        protocol: 1,
        instance: to.to_instance,
        name: "prefill".into(),
        attempt: to.attempt,
        session: SessionId(99),
        last_epoch: 0,
        epoch: Epoch(to.last_epoch + 1),
        progress: Progress::Caller,
        nonce: [2; 16],
        offer: offer("tcp", 3),
        features: vec![],
    }
}

pub(crate) fn conn_info() -> ConnInfo {
    ConnInfo {
        instance: Instance([7; 16]),
        name: "prefill-0".into(),
        candidates: vec!["10.0.0.1:4711".into(), "[fe80::1%eth0]:4711".into()],
        key: SessionKey::new([0xab; 32]),
        host: HostId { boot_id: "0d1e".into(), pid_ns: 4_026_531_836 },
        fabrics: vec!["local".into(), "tcp".into()],
        addresses: [("tcp".to_owned(), json!({ "port": 4712 }))].into(),
        backends: vec!["one-sided".into()],
        protocol: ProtocolRange::OURS,
        features: vec![],
    }
}

pub(crate) fn region_blob() -> RegionBlob {
    RegionBlob {
        instance: Instance([3; 16]),
        region: RegionId(0x0102_0304_0506_0708),
        base: 0x7f00_0000_0000,
        len: 1 << 20,
        kind: baton_fabric::MemoryKind::Dram,
        device: 5,
        access: Access { remote_read: true, remote_write: false },
        fabrics: vec![one_key("local", 0x1122), one_key("tcp", u64::MAX)],
    }
}

pub(crate) fn one_key(fabric: &str, key: u64) -> FabricKeys {
    FabricKeys { fabric: fabric.into(), rails: 1, segment_bytes: u64::MAX, keys: [key].into() }
}

pub(crate) fn any_word() -> impl Strategy<Value = String> {
    "[a-z0-9_-]{1,32}"
}

pub(crate) fn any_name() -> impl Strategy<Value = String> {
    "[^\\x00]{1,60}"
}

pub(crate) fn any_instance() -> impl Strategy<Value = Instance> {
    any::<[u8; 16]>().prop_map(Instance)
}

fn any_session() -> impl Strategy<Value = SessionId> {
    (1..=u64::MAX).prop_map(SessionId)
}

fn any_epoch() -> impl Strategy<Value = Epoch> {
    (1..=u32::MAX).prop_map(Epoch)
}

fn any_endpoint(least: u32) -> impl Strategy<Value = EndpointOffer> {
    (any::<u64>(), least..=65_535u32, least..=4000u32, 0..baton_fabric::MAX_RAILS).prop_map(
        |(port, sq_depth, rq_depth, rail)| EndpointOffer {
            address: json!({ "port": port, "gid": "::1" }),
            sq_depth,
            rq_depth,
            rail,
        },
    )
}

fn any_memory(least: u64) -> impl Strategy<Value = MemoryOffer> {
    (0..=u64::MAX / 2, any::<u64>(), least..=1u64 << 30).prop_map(|(addr, key, bytes)| MemoryOffer {
        addr,
        key,
        bytes,
    })
}

/// Bytes of the credit page of sixteen lanes.
const ANY_PAGE: u64 = 272;

fn any_one_sided() -> impl Strategy<Value = OneSidedOffer> {
    let lanes = prop::collection::vec((any_endpoint(1), any_memory(64)), 1..=16);
    (any::<bool>(), any_endpoint(1), any_memory(64), any_memory(ANY_PAGE), lanes).prop_map(
        |(immediate, control, control_ring, credit_page, lanes)| {
            let (lanes, rings) = lanes.into_iter().unzip();
            OneSidedOffer { immediate, control, lanes, control_ring, rings, credit_page }
        },
    )
}

fn any_two_sided() -> impl Strategy<Value = TwoSidedOffer> {
    let lane = (any_endpoint(2), any::<u32>())
        .prop_map(|(endpoint, n)| TwoSidedLane { posted: n % (endpoint.rq_depth + 1), endpoint });
    let sizes = (128..=1u32 << 24, 1..=1u32 << 20, 0..1u32 << 29, 1..=8u32 << 20);
    (any_endpoint(8), prop::collection::vec(lane, 1..=16), sizes, any_memory(ANY_PAGE)).prop_map(
        |(control, lanes, (slot_bytes, request_depth, more, message_bytes), credit_page)| TwoSidedOffer {
            control,
            lanes,
            slot_bytes,
            request_depth,
            notify_window: message_bytes + 64 + more,
            message_bytes,
            credit_page,
        },
    )
}

pub(crate) fn any_offer() -> impl Strategy<Value = FabricOffer> {
    let parts = prop_oneof![
        any_one_sided().prop_map(|part| (Some(part), None)),
        any_two_sided().prop_map(|part| (None, Some(part))),
        (any_one_sided(), any_two_sided()).prop_map(|(one, two)| (Some(one), Some(two))),
    ];
    (any_word(), 4096..=1u64 << 32, parts).prop_map(|(fabric, max_message_bytes, (one_sided, two_sided))| {
        let address = json!({ "of": fabric, "list": [1, "two", null] });
        FabricOffer { fabric, address, max_message_bytes, one_sided, two_sided }
    })
}

fn any_progress() -> impl Strategy<Value = Progress> {
    prop_oneof![Just(Progress::Thread), Just(Progress::Caller)]
}

fn any_hello() -> impl Strategy<Value = Hello> {
    let who = (any_instance(), any_instance(), any_name(), any::<u64>());
    let what = (prop::option::of(any_session()), 0..u32::MAX, any_progress(), any::<[u8; 16]>());
    (who, what, any_offer(), prop::collection::vec(any_word(), 0..4)).prop_map(
        |(
            (instance, to_instance, name, attempt),
            (session, last_epoch, progress, nonce),
            offer,
            features,
        )| Hello {
            protocol: ProtocolRange { min: 1, max: 3 },
            instance,
            to_instance,
            name,
            attempt,
            session,
            last_epoch,
            progress,
            nonce,
            offers: vec![offer],
            features,
        },
    )
}

fn any_reply() -> impl Strategy<Value = Reply> {
    let who = (any_instance(), any_name(), any::<u64>(), any_session());
    let what = (0..u32::MAX, any_epoch(), any_progress(), any::<[u8; 16]>());
    (who, what, any_offer(), prop::collection::vec(any_word(), 0..4)).prop_map(
        |((instance, name, attempt, session), (last_epoch, epoch, progress, nonce), offer, features)| Reply {
            protocol: 2,
            instance,
            name,
            attempt,
            session,
            last_epoch,
            epoch,
            progress,
            nonce,
            offer,
            features,
        },
    )
}

pub(crate) fn any_message() -> impl Strategy<Value = Message> {
    let ready = (any::<u64>(), any_session(), any_epoch(), any::<[u8; 32]>(), any::<Option<[u8; 32]>>())
        .prop_map(|(attempt, session, epoch, identity, resume)| {
            Message::Ready(Ready { attempt, session, epoch, identity, resume })
        });
    let accept = (any::<u64>(), any_session(), any_epoch(), any::<[u8; 16]>()).prop_map(
        |(attempt, session, epoch, token)| {
            Message::Accept(Accept { attempt, session, epoch, resume_token: ResumeToken::new(token) })
        },
    );
    let error = ("\\PC{0,200}", prop::option::of(any_session()), prop::option::of(any_epoch())).prop_map(
        |(text, session, epoch)| {
            Message::Error(Refusal { code: ErrorCode::AlreadyOpen, text, session, epoch })
        },
    );
    prop_oneof![
        any_hello().prop_map(|hello| Message::Hello(Box::new(hello))),
        any_reply().prop_map(|reply| Message::Reply(Box::new(reply))),
        ready,
        accept,
        error,
    ]
}

pub(crate) fn any_lifeline_frame() -> impl Strategy<Value = LifelineFrame> {
    let text = || "\\PC{0,200}";
    let regions = prop::collection::vec(any::<u64>().prop_map(RegionId), 1..=64);
    prop_oneof![
        (any_epoch(), text()).prop_map(|(epoch, reason)| LifelineFrame::Fence { epoch, reason }),
        any_epoch().prop_map(|epoch| LifelineFrame::DrainAck { epoch }),
        text().prop_map(|reason| LifelineFrame::SessionClose { reason }),
        (any::<u64>(), regions).prop_map(|(id, regions)| LifelineFrame::Revoke { id, regions }),
        any::<u64>().prop_map(|id| LifelineFrame::RevokeAck { id }),
        text().prop_map(|text| LifelineFrame::Violation { text }),
        any::<u64>().prop_map(|n| LifelineFrame::Ping { n }),
        any::<u64>().prop_map(|n| LifelineFrame::Pong { n }),
    ]
}

pub(crate) fn any_conn_info() -> impl Strategy<Value = ConnInfo> {
    let words = || prop::collection::vec(any_word(), 0..4);
    let candidates = prop::collection::vec("[1-9]\\.2\\.3\\.4:[1-9][0-9]{0,3}", 1..=MAX_CANDIDATES);
    (
        any_instance(),
        any_name(),
        candidates,
        any::<[u8; 32]>(),
        ("\\PC{0,10}", any::<u64>()),
        words(),
        words(),
        prop::collection::btree_map(any_word(), any::<u64>(), 0..=MAX_FABRICS),
    )
        .prop_map(|(instance, name, candidates, key, (boot_id, pid_ns), fabrics, backends, ports)| {
            ConnInfo {
                instance,
                name,
                candidates,
                key: SessionKey::new(key),
                host: HostId { boot_id, pid_ns },
                fabrics,
                addresses: ports.into_iter().map(|(name, port)| (name, json!([port, "x"]))).collect(),
                backends,
                protocol: ProtocolRange { min: 1, max: 9 },
                features: vec![],
            }
        })
}

/// Rails and segments for a region of `len` bytes.
fn any_fabric_keys(len: u64) -> impl Strategy<Value = FabricKeys> {
    (any_word(), 1..=baton_fabric::MAX_RAILS, 1..=64u64, any::<u64>()).prop_map(
        move |(fabric, rails, wanted, first)| {
            let segment_bytes = len.div_ceil(wanted);
            let (segment_bytes, segments) = if segment_bytes >= len {
                (u64::MAX, 1)
            } else {
                (segment_bytes, len.div_ceil(segment_bytes))
            };
            let keys = (0..u64::from(rails) * segments).map(|n| first.wrapping_mul(n + 1)).collect();
            FabricKeys { fabric, rails, segment_bytes, keys }
        },
    )
}

pub(crate) fn any_region_blob() -> impl Strategy<Value = RegionBlob> {
    let kind = prop_oneof![Just(baton_fabric::MemoryKind::Dram), Just(baton_fabric::MemoryKind::Vram)];
    let len = prop_oneof![1..=4096u64, 1..=u64::MAX / 2];
    let with_keys = len.prop_flat_map(|len| {
        let by_name = prop::collection::vec(any_fabric_keys(len), 0..=MAX_FABRICS);
        (
            Just(len),
            by_name.prop_map(|mut keys: Vec<FabricKeys>| {
                keys.sort_by(|a, b| a.fabric.cmp(&b.fabric));
                keys.dedup_by(|a, b| a.fabric == b.fabric);
                keys
            }),
        )
    });
    (any_instance(), any::<[u64; 3]>(), kind, any::<[bool; 2]>(), with_keys).prop_map(
        |(instance, [region, base, device], kind, [remote_read, remote_write], (len, fabrics))| RegionBlob {
            instance,
            region: RegionId(region),
            base: base / 2,
            len,
            kind,
            device,
            access: Access { remote_read, remote_write },
            fabrics,
        },
    )
}

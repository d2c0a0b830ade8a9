//! What a well-behaved engine says, as values.

use baton_core::wire::*;
use baton_core::{Epoch, Instance, RegionId, SessionId};
use baton_fabric::MemoryKind;
use serde_json::json;

/// The engine that listens.
pub(crate) const LISTENER: Instance = Instance([0x11; 16]);
/// The engine that connects.
pub(crate) const INITIATOR: Instance = Instance([0x22; 16]);

/// The listener's session key: the fuzzer plays a peer that holds it.
pub(crate) fn key() -> SessionKey {
    SessionKey::new([0xab; 32])
}

fn endpoint(n: usize) -> EndpointOffer {
    EndpointOffer { address: json!({ "slot": n }), sq_depth: 512, rq_depth: 256, rail: 0 }
}

/// An offer for both backends.
pub(crate) fn offer(fabric: &str, lanes: usize) -> FabricOffer {
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

pub(crate) fn hello() -> Hello {
    Hello {
        protocol: ProtocolRange::OURS,
        instance: INITIATOR,
        to_instance: LISTENER,
        name: "decode".into(),
        attempt: 77,
        session: Some(SessionId(98)),
        last_epoch: 3,
        progress: Progress::Thread,
        nonce: [1; 16],
        offers: vec![offer("verbs", 2), FabricOffer { one_sided: None, ..offer("tcp", 1) }],
        features: vec!["imm".into()],
    }
}

pub(crate) fn reply() -> Reply {
    Reply {
        protocol: PROTOCOL_VERSION,
        instance: LISTENER,
        name: "prefill".into(),
        attempt: 77,
        session: SessionId(99),
        last_epoch: 2,
        epoch: Epoch(4),
        progress: Progress::Caller,
        nonce: [2; 16],
        offer: offer("verbs", 3),
        features: vec![],
    }
}

pub(crate) fn ready() -> Ready {
    Ready { attempt: 77, session: SessionId(99), epoch: Epoch(4), identity: [5; 32], resume: Some([6; 32]) }
}

pub(crate) fn accept() -> Accept {
    let resume_token = ResumeToken::new([8; 16]);
    Accept { attempt: 77, session: SessionId(99), epoch: Epoch(4), resume_token }
}

pub(crate) fn refusal() -> Refusal {
    let (session, epoch) = (Some(SessionId(99)), Some(Epoch(4)));
    Refusal { session, epoch, ..Refusal::new(ErrorCode::AlreadyOpen, "session 99 is open with epoch 4") }
}

pub(crate) fn messages() -> Vec<Message> {
    vec![
        Message::Hello(Box::new(hello())),
        Message::Reply(Box::new(reply())),
        Message::Ready(ready()),
        Message::Accept(accept()),
        Message::Error(refusal()),
    ]
}

pub(crate) fn lifeline_frames() -> Vec<LifelineFrame> {
    let reason = || "watchdog: no completion for 5 s".to_owned();
    vec![
        LifelineFrame::Fence { epoch: Epoch(4), reason: reason() },
        LifelineFrame::DrainAck { epoch: Epoch(4) },
        LifelineFrame::SessionClose { reason: reason() },
        LifelineFrame::Revoke { id: 7, regions: vec![RegionId(1), RegionId(u64::MAX)] },
        LifelineFrame::RevokeAck { id: 7 },
        LifelineFrame::Violation { text: reason() },
        LifelineFrame::Ping { n: 1 },
        LifelineFrame::Pong { n: u64::MAX },
    ]
}

pub(crate) fn conn_info() -> ConnInfo {
    ConnInfo {
        instance: LISTENER,
        name: "prefill-0".into(),
        candidates: vec!["10.0.0.1:4711".into(), "[fe80::1%eth0]:4711".into(), "[::1]:1".into()],
        key: key(),
        host: HostId { boot_id: "0d1e".into(), pid_ns: 4_026_531_836 },
        fabrics: vec!["local".into(), "tcp".into()],
        addresses: [("tcp".to_owned(), json!({ "port": 4712 }))].into(),
        backends: Backends { one_sided: true, two_sided: true }.words().map(str::to_owned).collect(),
        protocol: ProtocolRange::OURS,
        features: vec!["imm".into()],
    }
}

pub(crate) fn regions() -> Vec<RegionBlob> {
    let keys = |fabric: &str, rails, segment_bytes, n: u64| FabricKeys {
        fabric: fabric.into(),
        rails,
        segment_bytes,
        keys: (0..n).map(|key| key << 40 | 0x1122).collect(),
    };
    let blob = |kind, access, fabrics| RegionBlob {
        instance: LISTENER,
        region: RegionId(0x0102_0304_0506_0708),
        base: 0x7f00_0000_0000,
        len: 1 << 20,
        kind,
        device: 5,
        access,
        fabrics,
    };
    let read = Access { remote_read: true, remote_write: false };
    vec![
        blob(MemoryKind::Dram, read, vec![keys("local", 1, u64::MAX, 1), keys("tcp", 1, u64::MAX, 1)]),
        blob(MemoryKind::Vram, Access::default(), vec![keys("verbs", 2, 1 << 18, 8)]),
        blob(MemoryKind::Dram, read, vec![]),
    ]
}

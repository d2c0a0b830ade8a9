//! Posting and polling allocate nothing once everything is set up.

use std::time::{Duration, Instant};

use baton_counting_alloc::AllThreads;
use baton_fabric::*;
use baton_fabric_soft::local::{LocalConfig, LocalFabric};

#[test]
fn transfers_allocate_nothing_after_the_first() {
    let all = AllThreads::of_this_test();
    let deadline = Instant::now() + Duration::from_secs(60);
    let fabrics = [(); 2].map(|()| LocalFabric::new(LocalConfig::default()).expect("a local fabric"));
    let config = EndpointConfig {
        sq_depth: 256,
        rq_depth: 256,
        active: true,
        control: false,
        max_sge: 1,
        exposed: true,
    };
    let made = [0, 1].map(|i| fabrics[i].create_endpoint(&config).expect("an endpoint"));
    for i in [0, 1] {
        fabrics[i].connect_endpoint(made[i].0, &made[1 - i].1, deadline).expect("connect");
    }
    let blocks: [(u64, Keys); 2] = [0, 1].map(|i| {
        let bytes = vec![0u8; 1 << 20].leak();
        let memory = Memory {
            addr: bytes.as_ptr() as u64,
            len_bytes: bytes.len() as u64,
            kind: MemoryKind::Dram,
            device: 0,
            remote_read: true,
            remote_write: true,
            ordered: false,
            mapped: false,
        };
        (memory.addr, fabrics[i].register(&memory).expect("register"))
    });
    let work = |op: Op| -> Vec<Template> {
        (0..64)
            .map(|i| Template {
                local_addr: blocks[0].0 + i * 8192,
                remote_addr: blocks[1].0 + i * 12288,
                local_key: blocks[0].1.local,
                remote_key: blocks[1].1.remote,
                len_bytes: 4096,
                op,
                reserved: [0; 3],
            })
            .collect()
    };
    let kinds = [work(Op::Write), work(Op::Read)];
    fabrics[1].post_recv(made[1].0, &[RecvSlot::default(); 8]).expect("RECVs");
    let mut before = 0;
    let mut seq = 0;
    for round in 0..2000 {
        if round == 100 {
            before = all.allocations();
        }
        for work in &kinds {
            let extra = Extra {
                op: ExtraOp::WriteImm(round),
                bytes: &[7; 200],
                staged: None,
                gather: &[],
                remote_addr: blocks[1].0,
                remote_key: blocks[1].1.remote,
                fenced: true,
            };
            let batch =
                Batch { work, imm: None, extra: Some(extra), first_seq: seq, signaled: true, patient: false };
            seq += batch.len() as u64;
            fabrics[0].post(made[0].0, &batch).expect("post");
            let mut out = [Completion::EMPTY; 16];
            while fabrics[0].poll(&mut out) == 0 {
                assert!(Instant::now() < deadline, "round {round} never completes");
                fabrics[1].serve(1 << 20);
                let n = fabrics[1].poll(&mut out);
                for c in &out[..n] {
                    assert_eq!(c.kind, CompletionKind::RecvImm(round));
                    fabrics[1].post_recv(c.endpoint, &[RecvSlot::default()]).expect("a RECV");
                }
            }
            assert_eq!((out[0].status, out[0].seq), (WcStatus::Success, seq - 1));
        }
    }
    assert_eq!(all.allocations(), before, "allocations in 1900 rounds");
}

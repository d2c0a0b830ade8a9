//! What a caller that polls looks at, and when: nobody waits for ever behind where something came last.

#[allow(dead_code, reason = "the rig holds more than these tests need")]
mod tcp_support;

use baton_fabric::*;
use std::time::Instant;
use tcp_support::*;

/// Posts an immediate without bytes.
fn throw(node: &Node, endpoint: EndpointId, seq: u64) {
    let extra = Extra {
        op: ExtraOp::WriteImm(seq as u32),
        bytes: &[],
        staged: None,
        gather: &[],
        remote_addr: 0,
        remote_key: 0,
        fenced: false,
    };
    let batch =
        Batch { work: &[], imm: None, extra: Some(extra), first_seq: seq, signaled: true, patient: false };
    node.fabric.post(endpoint, &batch).unwrap();
}

fn catch(node: &Node, endpoint: EndpointId, seq: u64) {
    let caught = node.wait(1);
    assert_eq!((caught[0].endpoint, caught[0].kind), (endpoint, CompletionKind::RecvImm(seq as u32)));
}

#[test]
fn an_endpoint_that_was_read_last_hides_no_other() {
    guarded(|| {
        let a = Node::new().without_service();
        let b = Node::new().without_service();
        let pairs = [(); 3].map(|()| connect(&a, &b));
        for seq in 0..100 {
            // Of some many in a row, then one of each.
            for (nth, (x, y)) in pairs.iter().enumerate() {
                let same = if seq % 3 == nth as u64 { 4 } else { 1 };
                for again in 0..same {
                    b.fabric.post_recv(*y, &[RecvSlot::default()]).unwrap();
                    throw(&a, *x, 8 * seq + again);
                    catch(&b, *y, 8 * seq + again);
                    let done = a.wait_with(&b);
                    assert_eq!((done.endpoint, done.status), (*x, WcStatus::Success));
                }
            }
        }
    });
}

#[test]
fn an_endpoint_that_was_read_last_is_let_go_of_when_it_is_destroyed() {
    guarded(|| {
        let a = Node::new().without_service();
        let b = Node::new().without_service();
        let (x, y) = connect(&a, &b);
        a.fabric.post_recv(x, &[RecvSlot::default()]).unwrap();
        b.fabric.post_recv(y, &[RecvSlot::default()]).unwrap();
        throw(&a, x, 0);
        catch(&b, y, 0);
        b.fabric.destroy_endpoint(y);
        let ends = [a.wait_with(&b), a.wait_with(&b)];
        assert!(ends.iter().any(|c| c.kind == CompletionKind::RecvFlushed), "{ends:?}");
        let (x, y) = connect(&a, &b);
        b.fabric.post_recv(y, &[RecvSlot::default()]).unwrap();
        throw(&a, x, 0);
        catch(&b, y, 0);
    });
}

#[test]
fn a_fabric_without_endpoints_answers_whoever_probes_it_while_its_host_polls() {
    guarded(|| {
        let a = Node::new();
        let b = Node::new().without_service();
        std::thread::scope(|scope| {
            let reach = scope.spawn(|| a.fabric.reach(&b.fabric.address(), soon()));
            let give_up = soon();
            while !reach.is_finished() {
                assert_eq!(b.fabric.poll(&mut [Completion::EMPTY; 1]), 0);
                assert!(Instant::now() < give_up, "the probe was not answered");
                std::thread::yield_now();
            }
            assert_eq!(reach.join().unwrap(), Ok(()));
        });
    });
}

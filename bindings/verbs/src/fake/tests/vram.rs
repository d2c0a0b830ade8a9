//! Memory of accelerators.

use super::ends::*;
use crate::fake::{self, Fake, FakeConfig};
use crate::*;
use std::os::fd::AsFd;
use std::sync::Arc;

/// A second queue pair of an end's device, connected to itself.
fn loopback(end: &End) -> (Qp, Arc<Cq>) {
    let cq = Cq::new(&end.channel, 16, 8).expect("a completion queue");
    let qp = End::make_qp(&end.pd, &cq, Options::default());
    qp.to_init(1, 0, true, false).expect("to INIT");
    qp.connect(&end.connection_to(end.gid(1), qp.number(), Options::default())).expect("to itself");
    (qp, cq)
}

fn as_vram(end: &End, offset: u64, len: u64) -> Result<Mr, VerbsError> {
    let dmabuf = fake::dmabuf(end.addr(0) & !4095, 1 << 15).expect("a descriptor");
    let iova = (end.addr(0) & !4095) + offset;
    Mr::register_dmabuf(&end.pd, dmabuf.as_fd(), offset, len, iova, ALL)
}

#[test]
fn a_write_into_an_accelerators_memory_is_visible_after_the_device_has_read_there() {
    let fake = fake();
    let (mut a, b) = pair(&fake, Options::default());
    a.fill(5);
    let vram = as_vram(&b, 8192, 4096).expect("a region");
    let at = ((b.addr(0) & !4095) + 8192 - b.addr(0)) as usize;
    b.recv(1, 0, 0);
    a.send(|chain| {
        chain.push(1, Opcode::WriteWithImm(9), SIGNALED, a.local(0, 4096), (b.addr(at), vram.rkey()))
    })
    .unwrap();
    assert_eq!(b.completions(1)[0].imm, Some(9));
    assert_eq!(ids(&a.completions(1)), [(1, Status::Success)]);
    assert!(b.bytes(at..at + 4096).iter().all(|byte| *byte == 0), "it may not be visible yet");
    let (qp, cq) = loopback(&b);
    let mut chain = SendChain::with_capacity(1);
    chain.push(1, Opcode::Read, SIGNALED, b.local(0, 1), (b.addr(at), vram.rkey()));
    // SAFETY: memory of an end that outlives the queue pair.
    unsafe { qp.post_send(&mut chain) }.unwrap();
    let mut buffer = WcBuffer::new(1);
    eventually("the READ completes", || !cq.poll(&mut buffer, 1).expect("polling works").is_empty());
    assert!(b.bytes(at..at + 4096) == a.bytes(0..4096));
}

#[test]
fn a_device_tells_whether_it_takes_dma_bufs_and_takes_only_what_is_one() {
    let mut config = FakeConfig::default();
    config.devices[1].dmabuf = false;
    let fake = Fake::new(config);
    let (a, b) = pair(&fake, Options::default());
    assert_eq!(a.pd.takes_dmabuf(), Ok(()));
    assert_eq!(b.pd.takes_dmabuf().map_err(|e| e.errno), Err(libc::EOPNOTSUPP));
    let errno = |made: Result<Mr, VerbsError>| made.err().map(|e| e.errno);
    assert_eq!(errno(as_vram(&b, 0, 64)), Some(libc::EOPNOTSUPP));
    assert_eq!(errno(as_vram(&a, 0, (1 << 15) + 1)), Some(libc::EINVAL));
    let stranger = std::fs::File::open("/dev/null").expect("a file");
    let made = Mr::register_dmabuf(&a.pd, stranger.as_fd(), 0, 64, 0, ALL);
    assert_eq!(errno(made), Some(libc::EINVAL));
}

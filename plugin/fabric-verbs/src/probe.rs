//! What a queue pair of a device really gets. The device's attributes are upper bounds that hold one by one, not together: a larger
//! inline room may leave less work requests.

use baton_verbs::{Channel, Cq, DeviceAttr, Pd, Qp, QpCap, QpConfig, VerbsError};
use std::sync::Arc;

/// Work requests that a lane asks for at most, and one for the end of its epoch.
const WORK_REQUESTS: [u32; 5] = [4096, 2048, 1024, 256, 64];
/// Inline bytes to ask for: a record with a short message, its header alone, a few credit words, none.
const INLINE_BYTES: [u32; 4] = [256, 128, 64, 0];

/// Tries a queue pair out, from the most wanted sizes down.
pub(crate) fn queue_pair_cap(
    pd: &Arc<Pd>,
    channel: &Arc<Channel>,
    attr: &DeviceAttr,
) -> Result<QpCap, VerbsError> {
    let mut last = None;
    for max_inline_bytes in INLINE_BYTES {
        for wanted in WORK_REQUESTS {
            // Both queues of a queue pair must fit into one completion queue.
            let depth = wanted.min(attr.max_qp_wr).min(attr.max_cqe / 2);
            let cq = Cq::new(channel, 2 * depth, 0)?;
            let cap = QpCap {
                max_send_wr: depth,
                max_recv_wr: depth,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_bytes,
            };
            match Qp::new(pd, &QpConfig { send_cq: &cq, recv_cq: &cq, cap }) {
                // It may have rounded up; asking for that much would be rounded up again.
                Ok(qp) => {
                    let granted = qp.cap().max_inline_bytes.min(INLINE_BYTES[0]);
                    return Ok(QpCap { max_inline_bytes: granted, ..cap });
                }
                Err(e) => last = Some(e),
            }
        }
    }
    Err(last.expect("at least one size was tried"))
}

//! What work requests read is left alone until they complete.

use crate::endpoint::Qp;
use crate::world::Inner;
use std::hash::{DefaultHasher, Hash, Hasher};

impl Inner {
    /// What lies in memory where a work request reads.
    pub(crate) fn digest_of_source(&mut self, qp: Qp, index: usize) -> Option<u64> {
        let ep = self.endpoint(qp)?;
        let (rail, pieces) = (ep.rail, ep.sq.get(index)?.source()?.to_vec());
        let bytes = self.nodes[qp.0].memory.gather(rail, &pieces)?;
        let mut hasher = DefaultHasher::new();
        bytes.hash(&mut hasher);
        Some(hasher.finish())
    }

    /// Until it completes a work request may be read again, for a retransmission: its source must not have changed.
    pub(crate) fn check_source(&mut self, qp: Qp) {
        let Some(sent) = self.endpoint(qp).and_then(|ep| ep.sq.front()?.sent) else { return };
        let now = self.digest_of_source(qp, 0);
        assert!(
            now.is_none_or(|now| now == sent),
            "node {} endpoint {:?}: the source of a work request changed before it completed",
            qp.0,
            qp.1
        );
    }
}

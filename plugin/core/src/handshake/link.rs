//! The state of connecting with one peer instance: one attempt at a time, back-off, and who goes first.
//!
//! ```text
//!          begin            connected
//! Idle ───────────▶ Connecting ─────▶ Open ──draining──▶ Draining ──ended──▶ Idle
//!   ▲ until          │ failed    ▲ accepted (from any state but Open)
//!   └── Backoff ◀────┘           └───────
//! ```

use super::decide::{Decision, LocalState, Proof, decide_hello, decide_ready};
use super::{Established, HandshakeError};
use crate::epoch::{Tombstone, next_epoch};
use crate::ids::{Epoch, Instance, Nanos, SessionId};
use crate::wire::{ErrorCode, Hello, ResumeToken};

/// Shortest back-off.
const FIRST_BACKOFF_MS: u64 = 50;
/// Longest back-off before jitter.
const MAX_BACKOFF_MS: u64 = 2000;

/// Back-off after the n-th failure in a row (from 1): 50 ms · 2ⁿ⁻¹, at most 2 s, of which `jitter` (any number)
/// takes away up to a quarter.
#[must_use]
pub fn backoff_ms(failures: u32, jitter: u32) -> u64 {
    let full = FIRST_BACKOFF_MS.saturating_mul(1 << failures.saturating_sub(1).min(16)).min(MAX_BACKOFF_MS);
    full - full / 4 * u64::from(jitter % 256) / 255
}

/// Where a link stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkState {
    /// Nothing under way.
    Idle,
    /// Nothing under way, and no own attempt before that time. The peer's are accepted.
    Backoff {
        /// When the next own attempt may start.
        until: Nanos,
    },
    /// An own attempt.
    Connecting {
        /// Its number.
        attempt: u64,
    },
    /// A session in use.
    Open {
        /// Which.
        session: SessionId,
        /// Its generation.
        epoch: Epoch,
        /// Its lifeline has not ended.
        lifeline_up: bool,
    },
    /// Its epoch is being ended.
    Draining {
        /// Which.
        session: SessionId,
        /// Its generation.
        epoch: Epoch,
    },
}

/// What somebody who wants a session does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Begin {
    /// Connect, with these in HELLO and READY. Until [`Link::connected`] or [`Link::failed`] others attach.
    Start {
        /// For HELLO.
        last_epoch: u32,
        /// For HELLO.
        session: Option<SessionId>,
        /// For READY.
        resume_token: Option<ResumeToken>,
    },
    /// Wait for the attempt that is under way.
    Attach,
    /// Ask again then; an attempt of the peer may come first.
    WaitUntil(Nanos),
    /// Ask again when the old epoch has ended.
    WaitForDrain,
    /// There is a session.
    Open {
        /// Which.
        session: SessionId,
        /// Its generation.
        epoch: Epoch,
    },
}

/// What REPLY says about session and epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// For REPLY.
    pub session: SessionId,
    /// For REPLY.
    pub last_epoch: u32,
    /// For REPLY.
    pub epoch: Epoch,
}

/// Connecting with one peer instance.
#[derive(Debug)]
pub struct Link {
    own: Instance,
    peer: Instance,
    state: LinkState,
    memory: Tombstone,
    failures: u32,
    /// The peer was told to wait for an attempt of ours.
    peer_waits: bool,
}

impl Link {
    /// A link to an instance of which that is remembered.
    pub fn new(own: Instance, peer: Instance, memory: Tombstone) -> Self {
        Self { own, peer, state: LinkState::Idle, memory, failures: 0, peer_waits: false }
    }

    /// Where it stands.
    pub fn state(&self) -> LinkState {
        self.state
    }

    /// The peer.
    pub fn peer(&self) -> Instance {
        self.peer
    }

    /// What to remember of it ([`crate::epoch::EpochBook::record`]).
    pub fn memory(&self) -> &Tombstone {
        &self.memory
    }

    /// Somebody wants a session. `attempt` is random and used only with [`Begin::Start`].
    pub fn begin(&mut self, now: Nanos, attempt: u64) -> Begin {
        match self.state {
            LinkState::Connecting { .. } => return Begin::Attach,
            LinkState::Backoff { until } if now < until => return Begin::WaitUntil(until),
            LinkState::Open { session, epoch, lifeline_up: true } => return Begin::Open { session, epoch },
            LinkState::Open { .. } | LinkState::Draining { .. } => return Begin::WaitForDrain,
            LinkState::Idle | LinkState::Backoff { .. } => {}
        }
        self.state = LinkState::Connecting { attempt };
        self.peer_waits = false;
        Begin::Start {
            last_epoch: self.memory.last_epoch,
            session: self.memory.session,
            resume_token: self.memory.resume_token.clone(),
        }
    }

    /// HELLO of this peer at our listener.
    pub fn on_hello(&mut self, hello: &Hello) -> Decision {
        let decision = decide_hello(self.own, self.local(), hello);
        self.note(&decision);
        decision
    }

    /// What to put into REPLY; `fresh` is a random session number, used if there is nothing to resume.
    ///
    /// # Errors
    /// The epochs are used up.
    pub fn answer(&self, hello: &Hello, fresh: SessionId) -> Result<Answer, HandshakeError> {
        let last_epoch = self.memory.last_epoch;
        let epoch = next_epoch(last_epoch, hello.last_epoch)
            .ok_or(HandshakeError::EpochsUsedUp(last_epoch.max(hello.last_epoch)))?;
        let session = match hello.session {
            Some(theirs) if self.memory.session == Some(theirs) => theirs,
            _ => fresh,
        };
        Ok(Answer { session, last_epoch, epoch })
    }

    /// A genuine READY of this peer; ask again after [`Decision::DrainThenAccept`] has been done. `resume_proven` asks whether READY proves a token
    /// ([`super::ReadyReceived::proves_resume`]).
    pub fn on_ready(
        &mut self,
        hello: &Hello,
        agreed: Epoch,
        proof: Proof,
        resume_proven: impl FnOnce(&ResumeToken) -> bool,
    ) -> Decision {
        let proven = self.memory.resume_token.as_ref().is_some_and(resume_proven);
        let last = self.memory.last_epoch;
        let decision = decide_ready(self.own, self.local(), last, hello, agreed, proof, proven);
        self.note(&decision);
        decision
    }

    /// ACCEPT is about to be sent, in the same critical section as the decision to accept. An own attempt that is under
    /// way is void from now on. `false`: another session came first, close this connection instead.
    #[must_use]
    pub fn accepted(&mut self, established: &Established) -> bool {
        let taken = matches!(self.state, LinkState::Open { .. } | LinkState::Draining { .. });
        if taken || established.epoch.0 <= self.memory.last_epoch {
            return false;
        }
        self.open(established);
        true
    }

    /// ACCEPT came for an own attempt. `false`: the attempt is void, close that connection.
    #[must_use]
    pub fn connected(&mut self, attempt: u64, established: &Established) -> bool {
        if self.state != (LinkState::Connecting { attempt }) {
            return false;
        }
        if established.epoch.0 <= self.memory.last_epoch {
            self.state = LinkState::Idle;
            return false;
        }
        self.open(established);
        true
    }

    /// An own attempt failed. Void attempts change nothing. Returns when the next may start.
    pub fn failed(&mut self, now: Nanos, attempt: u64, cause: &HandshakeError, jitter: u32) -> Option<Nanos> {
        if let HandshakeError::Refused(refusal) = cause {
            let told = refusal.epoch.map_or(0, |epoch| epoch.0);
            // The last number is never taken over from a refusal: it would leave no epoch to open.
            if told < u32::MAX && !matches!(self.state, LinkState::Open { .. } | LinkState::Draining { .. }) {
                self.memory.last_epoch = self.memory.last_epoch.max(told);
            }
        }
        if self.state != (LinkState::Connecting { attempt }) {
            return None;
        }
        self.failures = self.failures.saturating_add(1);
        let glare = matches!(cause, HandshakeError::Refused(r) if r.code == ErrorCode::GlareWait);
        let ms = match (glare, self.peer_waits) {
            // The peer's attempt goes first; it is worth looking again soon.
            (true, _) => FIRST_BACKOFF_MS,
            // The peer's retry must find us idle, whenever its own back-off lets it come.
            (false, true) => MAX_BACKOFF_MS,
            (false, false) => backoff_ms(self.failures, jitter),
        };
        let until = now.plus_ms(ms);
        self.state = LinkState::Backoff { until };
        Some(until)
    }

    /// The lifeline of that epoch ended: the peer need not prove anything to replace it.
    pub fn lifeline_ended(&mut self, ended: Epoch) {
        if let LinkState::Open { epoch, lifeline_up, .. } = &mut self.state
            && *epoch == ended
        {
            *lifeline_up = false;
        }
    }

    /// The end of that epoch has begun.
    pub fn draining(&mut self, ending: Epoch) {
        if let LinkState::Open { session, epoch, .. } = self.state
            && epoch == ending
        {
            self.state = LinkState::Draining { session, epoch };
        }
    }

    /// The epoch has ended, nothing of it touches memory any more; HELLO or ACCEPT may follow.
    pub fn ended(&mut self, gone: Epoch) {
        match self.state {
            LinkState::Open { epoch, .. } | LinkState::Draining { epoch, .. } if epoch == gone => {
                self.state = LinkState::Idle;
            }
            _ => {}
        }
    }

    /// The message numbers kept for the time between two epochs were dropped: the session must not be resumed, and an
    /// own attempt that has already named it is void. A session that is open or draining has its numbers and stays.
    pub fn forget_session(&mut self) {
        match self.state {
            LinkState::Open { .. } | LinkState::Draining { .. } => return,
            LinkState::Connecting { .. } => self.state = LinkState::Idle,
            LinkState::Idle | LinkState::Backoff { .. } => {}
        }
        self.memory.session = None;
    }

    fn open(&mut self, established: &Established) {
        let (session, epoch) = (established.session, established.epoch);
        self.memory = Tombstone {
            last_epoch: epoch.0,
            session: Some(session),
            resume_token: Some(established.resume_token.clone()),
        };
        self.failures = 0;
        self.peer_waits = false;
        self.state = LinkState::Open { session, epoch, lifeline_up: true };
    }

    fn note(&mut self, decision: &Decision) {
        if matches!(decision, Decision::Refuse(refusal) if refusal.code == ErrorCode::GlareWait) {
            self.peer_waits = true;
        }
    }

    fn local(&self) -> LocalState {
        match self.state {
            LinkState::Idle | LinkState::Backoff { .. } => LocalState::Idle,
            LinkState::Connecting { .. } => LocalState::Connecting,
            LinkState::Open { session, epoch, lifeline_up } => {
                LocalState::Open { session, epoch, lifeline_up }
            }
            LinkState::Draining { session, epoch } => LocalState::Draining { session, epoch },
        }
    }
}

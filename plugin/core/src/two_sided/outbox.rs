//! Own transfers: what waits, in which order it goes, and what is known of it. It outlives epochs; what was under way is sent again.
//!
//! ```text
//!   small: FIFO, packed together       fresh: FIFO, nothing held       ring: begun, deficit round robin       reads: FIFO
//! ```
//! Whoever waits in `small`, `fresh` or `reads` without a number holds nothing. Small ones and the others share what goes out
//! byte for byte, the small ones first, so neither starves the other.

use std::collections::{BTreeMap, HashMap, VecDeque};

use super::chunks::{ChunkMap, ChunkSet};
use super::codec::Direction;
use super::report::XferFailure;
use crate::ids::Nanos;

/// What a data message belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flow {
    /// An own WRITE.
    Own(u32),
    /// A READ of the peer, by its number.
    Serve(u64),
}

/// How far giving up has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Abort {
    None,
    /// ABORT is to be sent.
    Due,
    Sent,
    /// The peer has answered, or has refused the transfer before.
    Over,
}

/// One transfer.
#[derive(Debug)]
pub(super) struct Out {
    pub(super) token: u64,
    pub(super) direction: Direction,
    pub(super) map: ChunkMap,
    /// It has a notification; its message until that is queued.
    pub(super) tells: bool,
    pub(super) message_bytes: u64,
    pub(super) message: Option<Vec<u8>>,
    /// 0: not begun.
    pub(super) id: u64,
    /// Next chunk to send, or next piece to ask for.
    pub(super) next: u32,
    /// Most chunks ever sent, in any epoch.
    pub(super) reached: u32,
    /// Messages that read its memory.
    pub(super) in_flight: u32,
    /// Copies into its memory.
    pub(super) copying: u32,
    /// READ: which chunks came, and how many of those are placed.
    pub(super) set: ChunkSet,
    pub(super) placed: u32,
    /// The peer has all of it (WRITE).
    pub(super) acked: bool,
    /// Its notification was queued.
    pub(super) noted: bool,
    pub(super) note_done: bool,
    /// It has a message that the peer will not hear.
    pub(super) silent: bool,
    pub(super) failure: Option<XferFailure>,
    /// The host was told its end before that came, and has its token back.
    pub(super) told: bool,
    pub(super) abort: Abort,
    /// Since when nothing happened to it.
    pub(super) since: Nanos,
    /// Goes with the small ones.
    pub(super) small: bool,
}

impl Out {
    pub(super) fn is_sent(&self) -> bool {
        match self.direction {
            Direction::Write => self.next == self.map.total(),
            Direction::Read => self.next as usize == self.map.pieces().len(),
        }
    }

    /// Its bytes have all moved.
    pub(super) fn is_moved(&self) -> bool {
        match self.direction {
            Direction::Write => self.acked,
            Direction::Read => self.placed == self.map.total(),
        }
    }

    /// Nothing here touches its memory, nothing there will, and all that belongs to it was told.
    pub(super) fn is_over(&self) -> bool {
        let quiet = self.in_flight == 0 && self.copying == 0;
        let told = match &self.failure {
            None => self.is_moved() && (!self.tells || self.note_done),
            Some(_) => self.id == 0 || self.abort == Abort::Over,
        };
        quiet && told
    }
}

#[derive(Debug)]
struct Turn {
    flow: Flow,
    deficit: u64,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Outbox {
    slots: Vec<Option<Out>>,
    free: Vec<u32>,
    by_token: HashMap<u64, u32>,
    by_id: BTreeMap<u64, u32>,
    next_id: u64,
    told_below: u64,
    small: VecDeque<u32>,
    fresh: VecDeque<u32>,
    ring: VecDeque<Turn>,
    pub(super) reads: VecDeque<u32>,
    pub(super) aborts: VecDeque<u32>,
    pub(super) read_acks: VecDeque<(u64, u32)>,
    /// Bytes that small ones may still go first with.
    small_first: i64,
    /// Of the messages of all.
    message_bytes: u64,
}

/// Bytes of a turn, and that small transfers go first with.
const QUANTUM: u64 = 256 * 1024;

/// What could go next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    Small,
    Ring(Flow),
    Fresh(u32),
}

impl Default for Outbox {
    fn default() -> Outbox {
        Outbox {
            slots: Vec::new(),
            free: Vec::new(),
            by_token: HashMap::new(),
            by_id: BTreeMap::new(),
            next_id: 1,
            told_below: 1,
            small: VecDeque::new(),
            fresh: VecDeque::new(),
            ring: VecDeque::new(),
            reads: VecDeque::new(),
            aborts: VecDeque::new(),
            read_acks: VecDeque::new(),
            small_first: QUANTUM as i64,
            message_bytes: 0,
        }
    }
}

impl Outbox {
    pub(super) fn len(&self) -> usize {
        self.by_token.len()
    }

    /// `None`: that token is in use.
    pub(super) fn insert(&mut self, out: Out) -> Option<u32> {
        let (token, direction, small, empty) = (out.token, out.direction, out.small, out.map.total() == 0);
        if self.by_token.contains_key(&token) {
            return None;
        }
        let at = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() as u32 - 1
        });
        self.message_bytes += out.message_bytes;
        self.slots[at as usize] = Some(out);
        self.by_token.insert(token, at);
        match (direction, small) {
            _ if empty => {}
            (Direction::Read, _) => self.reads.push_back(at),
            (Direction::Write, true) => self.small.push_back(at),
            (Direction::Write, false) => self.fresh.push_back(at),
        }
        Some(at)
    }

    /// Bytes of the messages of those that are not finished.
    pub(super) fn message_bytes(&self) -> u64 {
        self.message_bytes
    }

    pub(super) fn find(&self, token: u64) -> Option<u32> {
        self.by_token.get(&token).copied()
    }

    pub(super) fn of_id(&self, id: u64) -> Option<u32> {
        self.by_id.get(&id).copied()
    }

    pub(super) fn get(&self, at: u32) -> &Out {
        self.slots[at as usize].as_ref().expect("a live transfer")
    }

    pub(super) fn get_mut(&mut self, at: u32) -> &mut Out {
        self.slots[at as usize].as_mut().expect("a live transfer")
    }

    pub(super) fn live(&self) -> impl Iterator<Item = (u32, &Out)> {
        (0..).zip(&self.slots).filter_map(|(at, out)| out.as_ref().map(|out| (at, out)))
    }

    /// It begins: it gets its number, for which REQUEST credit was consumed.
    pub(super) fn begin(&mut self, at: u32) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        self.by_id.insert(id, at);
        self.get_mut(at).id = id;
        id
    }

    pub(super) fn next_id(&self) -> u64 {
        self.next_id
    }

    pub(super) fn remove(&mut self, at: u32) -> Out {
        self.unqueue(at);
        let out = self.slots[at as usize].take().expect("a live transfer");
        self.message_bytes -= out.message_bytes;
        if !out.told {
            self.by_token.remove(&out.token);
        }
        if out.id > 0 {
            self.by_id.remove(&out.id);
        }
        self.free.push(at);
        out
    }

    /// The host is told that it failed, now; answers its token. What has begun still has to be given up at the peer; `silenced`: its
    /// notification will not be sent, so nobody waits for it.
    pub(super) fn disown(&mut self, at: u32, why: &XferFailure, silenced: bool) -> (u64, XferFailure) {
        let (begun, moved) = (self.get(at).id > 0, self.get(at).is_moved());
        if begun && !moved && self.get(at).failure.is_none() {
            self.unqueue(at);
            self.get_mut(at).abort = Abort::Due;
            self.aborts.push_back(at);
        }
        let out = self.get_mut(at);
        let told = (out.token, out.failure.clone().unwrap_or_else(|| why.clone()));
        (out.told, out.silent) = (true, out.silent || out.message.is_some() && !out.noted);
        out.note_done |= silenced;
        if !moved {
            out.failure.get_or_insert_with(|| why.clone());
        }
        self.by_token.remove(&told.0);
        if self.get(at).is_over() {
            self.remove(at);
        }
        told
    }

    /// It sends nothing any more.
    pub(super) fn unqueue(&mut self, at: u32) {
        let out = self.slots[at as usize].as_ref().expect("a live transfer");
        let queued = !out.is_sent();
        if !queued {
            return;
        }
        match (out.direction, out.small) {
            (Direction::Read, _) => self.reads.retain(|&other| other != at),
            (Direction::Write, true) => self.small.retain(|&other| other != at),
            (Direction::Write, false) => {
                self.fresh.retain(|&other| other != at);
                self.ring.retain(|turn| turn.flow != Flow::Own(at));
            }
        }
    }

    /// A READ of the peer joins the round.
    pub(super) fn serve(&mut self, transfer: u64) {
        self.ring.push_back(Turn { flow: Flow::Serve(transfer), deficit: 0 });
    }

    /// All numbers below were released.
    pub(super) fn releasable(&self) -> u64 {
        self.by_id.first_key_value().map_or(self.next_id, |(id, _)| *id)
    }

    pub(super) fn untold_releases(&self) -> u64 {
        self.releasable() - self.told_below
    }

    pub(super) fn tell_release(&mut self) -> u64 {
        self.told_below = self.releasable();
        self.told_below
    }

    pub(super) fn small(&self) -> &VecDeque<u32> {
        &self.small
    }

    /// What waits: messages of so many bytes, and bytes; of the first few transfers, more is not worth telling.
    pub(super) fn demand(&self, chunk_bytes: u32) -> (u32, u64) {
        const LOOK: usize = 64;
        let ring = self.ring.iter().filter_map(|turn| match turn.flow {
            Flow::Own(at) => Some(at),
            Flow::Serve(_) => None,
        });
        let waiting = ring.chain(self.small.iter().copied()).chain(self.fresh.iter().copied());
        let bytes = waiting.take(LOOK).map(|at| {
            let out = self.get(at);
            out.map.bytes() / u64::from(out.map.total()) * u64::from(out.map.total() - out.next)
        });
        let bytes = bytes.sum::<u64>().max(1);
        (bytes.div_ceil(chunk_bytes.into()).min(u32::MAX.into()) as u32, bytes)
    }

    pub(super) fn has_data(&self) -> bool {
        !self.small.is_empty() || !self.fresh.is_empty() || !self.ring.is_empty()
    }

    /// Whose turn it is. `len_of`: bytes of a flow's next chunk, `None` if it has none any more (it then leaves the round).
    /// `may_begin`: there is REQUEST credit.
    pub(super) fn next(
        &mut self,
        may_begin: bool,
        max_ring: usize,
        mut len_of: impl FnMut(&Outbox, Flow) -> Option<u32>,
    ) -> Option<Next> {
        let small = self.small.front().is_some_and(|&at| may_begin || self.get(at).id > 0);
        if small && self.small_first > 0 {
            return Some(Next::Small);
        }
        // A newcomer goes first once; then it takes its turns.
        if may_begin
            && self.ring.len() < max_ring
            && let Some(&at) = self.fresh.front()
        {
            return Some(Next::Fresh(at));
        }
        while let Some(turn) = self.ring.front() {
            let Some(len) = len_of(self, turn.flow) else {
                self.ring.pop_front();
                continue;
            };
            if turn.deficit >= len.into() {
                return Some(Next::Ring(turn.flow));
            }
            self.ring.rotate_left(1);
            // Whoever comes to the front gets a turn's bytes: more than a chunk has, so this ends.
            let front = self.ring.front_mut().expect("not empty");
            front.deficit += QUANTUM;
        }
        small.then_some(Next::Small)
    }

    /// So many bytes of it went out.
    pub(super) fn spent(&mut self, next: Next, bytes: u64) {
        match next {
            Next::Small => {
                self.small_first -= bytes as i64;
                while self.small.front().is_some_and(|&at| self.get(at).is_sent()) {
                    self.small.pop_front();
                }
                if self.fresh.is_empty() && self.ring.is_empty() {
                    self.small_first = QUANTUM as i64;
                }
            }
            Next::Fresh(at) => {
                self.fresh.pop_front();
                if !self.get(at).is_sent() {
                    self.ring.push_back(Turn { flow: Flow::Own(at), deficit: 0 });
                }
                self.small_first = (self.small_first + bytes as i64).min(QUANTUM as i64);
            }
            Next::Ring(flow) => {
                let done = matches!(flow, Flow::Own(at) if self.get(at).is_sent());
                let turn = self.ring.front_mut().expect("it was its turn");
                turn.deficit = turn.deficit.saturating_sub(bytes);
                if done {
                    self.ring.pop_front();
                }
                self.small_first = (self.small_first + bytes as i64).min(QUANTUM as i64);
            }
        }
    }

    /// The epoch is over: everything begun and not over goes again from its first byte, before what was not begun.
    pub(super) fn restart(&mut self, now: Nanos) {
        self.ring.clear();
        self.aborts.clear();
        self.told_below = self.told_below.min(self.releasable());
        let begun: Vec<u32> = self.by_id.values().copied().collect();
        for at in begun.into_iter().rev() {
            let was_queued = !self.get(at).is_sent();
            if was_queued {
                self.unqueue(at);
            }
            let out = self.get_mut(at);
            assert_eq!((out.in_flight, out.copying), (0, 0), "work ends before its epoch is closed");
            out.since = now;
            if out.abort == Abort::Sent || out.abort == Abort::Due {
                out.abort = Abort::Due;
                self.aborts.push_front(at);
                continue;
            }
            if out.is_moved() || out.failure.is_some() {
                continue;
            }
            out.next = 0;
            let (direction, small) = (out.direction, out.small);
            match (direction, small) {
                (Direction::Read, _) => self.reads.push_front(at),
                (Direction::Write, true) => self.small.push_front(at),
                (Direction::Write, false) => self.ring.push_front(Turn { flow: Flow::Own(at), deficit: 0 }),
            }
        }
    }

    /// The session is over.
    pub(super) fn abandon(&mut self) -> Vec<Out> {
        let slots = std::mem::take(self).slots;
        slots.into_iter().flatten().collect()
    }
}

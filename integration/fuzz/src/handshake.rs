//! Both sides of the handshake, and the lifeline behind it, against a peer that holds the key and says anything.

use baton_core::handshake::*;
use baton_core::wire::*;
use baton_core::{Epoch, SessionId};

use crate::conversation::{Transcript, body, input, json_of, messages};
use crate::{samples, texts};

// ---- the side that listens ------------------------------------------------------------------------------------

pub(crate) fn run_listener(bytes: &[u8]) {
    // As it is: somebody without the key.
    let stranger = Listener::new(samples::key(), samples::LISTENER).on_hello(bytes);
    told(stranger.expect_err("nothing without an authenticator is taken").send);
    let mut said = messages(bytes);
    let mut transcript = Transcript::default();
    let Some(received) = take_hello(&mut said, &mut transcript) else { return };
    received.hello.offers.iter().for_each(texts::check_offer);
    let Some(awaiting) = answer(received, &mut transcript) else { return };
    let Some(ready) = said.next() else { return };
    let established = match awaiting.on_ready(&transcript.seal(b"c3", ready)) {
        Err(failure) => return told(failure.send),
        Ok(received) => {
            let _ = received.identity.verify(&samples::key());
            let _ = received.proves_resume(&ResumeToken::new([8; 16]));
            let (established, frame) = received.accept(ResumeToken::new([9; 16])).expect("ACCEPT is short");
            transcript.absorb(json_of(&frame));
            established
        }
    };
    lifeline(established, &transcript, b"c", said);
}

/// What a peer is told is a frame.
fn told(frame: Option<Vec<u8>>) {
    if let Some(frame) = frame {
        Message::decode(json_of(&frame)).expect("what is told can be read");
    }
}

fn take_hello<'a>(
    said: &mut impl Iterator<Item = &'a [u8]>,
    transcript: &mut Transcript,
) -> Option<HelloReceived> {
    let body = transcript.seal(b"c1", said.next()?);
    match Listener::new(samples::key(), samples::LISTENER).on_hello(&body) {
        Ok(received) => Some(received),
        Err(failure) => {
            told(failure.send);
            None
        }
    }
}

/// The listener chooses the first fabric that it has.
fn answer(received: HelloReceived, transcript: &mut Transcript) -> Option<AwaitReady> {
    let offered = received.hello.offers.first()?;
    let backends = offered.backends();
    let own = samples::offer(&offered.fabric, 3);
    let offer = FabricOffer {
        one_sided: own.one_sided.filter(|_| backends.one_sided),
        two_sided: own.two_sided.filter(|_| backends.two_sided),
        ..own
    };
    let attempt = received.hello.attempt;
    let reply = Reply { attempt, session: SessionId(99), epoch: Epoch(4), offer, ..samples::reply() };
    let (awaiting, frame) = received.reply(reply).expect("an offered fabric with offered backends");
    transcript.absorb(json_of(&frame));
    check_agreed(&awaiting.agreed);
    Some(awaiting)
}

/// What was agreed is within what both may have.
fn check_agreed(agreed: &Agreed) {
    let lanes = |lanes: &[Depths]| assert!((1..=MAX_LANES).contains(&lanes.len()));
    if let Some(one) = &agreed.one_sided {
        lanes(&one.lanes);
        assert_eq!(one.lanes.len(), one.ring_bytes.len());
    }
    if let Some(two) = &agreed.two_sided {
        lanes(&two.lanes);
        assert!(two.notify_window >= two.message_bytes, "the window takes the longest message");
    }
}

/// Authentic messages are taken in order until one is none; one that is not authentic never is.
fn lifeline<'a>(
    established: Established,
    transcript: &Transcript,
    side: &[u8],
    said: impl Iterator<Item = &'a [u8]>,
) {
    let (key, mut codec) = (transcript.lifeline_key(), established.lifeline);
    for (number, json) in (0u64..).zip(said) {
        assert!(codec.open(&body(&[0; 32], json)).is_err());
        let tag = mac(&key, &[side, &number.to_le_bytes(), json]);
        match codec.open(&body(&tag, json)) {
            Ok(frame) => assert_eq!(Ok(frame), LifelineFrame::decode(json)),
            Err(LifelineError::Message(_)) => return,
            Err(error) => panic!("an authentic message: {error}"),
        }
    }
}

pub(crate) fn listener_seeds() -> Vec<Vec<u8>> {
    let messages = samples::messages();
    let [hello, ready, error] = [0, 2, 4].map(|nth: usize| messages[nth].encode());
    let lifeline = texts::lifeline_seeds();
    let whole = [vec![hello.clone(), ready], lifeline].concat();
    vec![input(&whole), input(&[hello, error.clone()]), input(&[error])]
}

// ---- the side that connects -----------------------------------------------------------------------------------

pub(crate) fn run_initiator(bytes: &[u8]) {
    let mut said = messages(bytes);
    let mut transcript = Transcript::default();
    let start = || Initiator::start(samples::key(), samples::hello()).expect("a sample is within the limits");
    let stranger = start().0.on_reply(bytes);
    told(stranger.expect_err("nothing without an authenticator is taken").send);
    let (awaiting, frame) = start();
    transcript.absorb(json_of(&frame));
    let Some(reply) = said.next() else { return };
    let received = match awaiting.on_reply(&transcript.seal(b"s2", reply)) {
        Err(failure) => return told(failure.send),
        Ok(received) => received,
    };
    check_agreed(&received.agreed);
    if let (Some(two), Some(offer)) = (&received.agreed.two_sided, &received.reply.offer.two_sided) {
        for (lane, depths) in two.lanes.iter().enumerate() {
            assert!(offer.posted(lane, two) <= depths.rq_depth);
        }
    }
    let (awaiting, frame) = received.ready(&samples::key(), None).expect("READY is short");
    transcript.absorb(json_of(&frame));
    let Some(accept) = said.next() else { return };
    if let Ok(established) = awaiting.on_accept(&transcript.seal(b"s4", accept)) {
        lifeline(established, &transcript, b"s", said);
    }
}

pub(crate) fn initiator_seeds() -> Vec<Vec<u8>> {
    let messages = samples::messages();
    let [reply, accept, error] = [1, 3, 4].map(|nth: usize| messages[nth].encode());
    let whole = [vec![reply.clone(), accept], texts::lifeline_seeds()].concat();
    vec![input(&whole), input(&[reply, error.clone()]), input(&[error])]
}

use proptest::prelude::*;

use super::*;
use crate::ids::{Epoch, Instance, Nanos, SessionId};
use crate::wire::samples::{any_lifeline_frame, hello, offer, offer_of_both, reply, two_sided_offer};
use crate::wire::{
    Agreed, ErrorCode, FabricOffer, FrameReader, Hello, LifelineFrame, Message, OneSidedOffer, ProtocolRange,
    Refusal, Reply, ResumeToken, SessionKey, encode_frame,
};

const A: Instance = Instance([1; 16]);
const B: Instance = Instance([2; 16]);

fn key(byte: u8) -> SessionKey {
    SessionKey::new([byte; 32])
}

fn token(byte: u8) -> ResumeToken {
    ResumeToken::new([byte; 16])
}

/// The body of exactly one frame.
fn body(frame: &[u8]) -> Vec<u8> {
    let mut reader = FrameReader::new();
    reader.feed(frame);
    let body = reader.next_frame().unwrap().unwrap().to_vec();
    assert_eq!(reader.pending_bytes(), 0);
    body
}

fn one_sided(reply: &mut Reply) -> &mut OneSidedOffer {
    reply.offer.one_sided.as_mut().unwrap()
}

fn agreed_lanes(agreed: &Agreed) -> usize {
    agreed.one_sided.as_ref().unwrap().lanes.len()
}

/// A connects to B, whose key is 0xbb; A's own is 0xaa.
fn up_to_reply(edit: impl FnOnce(&mut Reply)) -> (AwaitReply, AwaitReady, Vec<u8>) {
    let (initiator, frame) = Initiator::start(key(0xbb), hello(A, B)).unwrap();
    let received = Listener::new(key(0xbb), B).on_hello(&body(&frame)).unwrap();
    let mut answer = reply(&received.hello);
    edit(&mut answer);
    let (listener, frame) = received.reply(answer).unwrap();
    (initiator, listener, body(&frame))
}

fn up_to_ready(resume: Option<&ResumeToken>) -> (AwaitAccept, ReadyReceived) {
    let (initiator, listener, frame) = up_to_reply(|_| {});
    let (initiator, frame) = initiator.on_reply(&frame).unwrap().ready(&key(0xaa), resume).unwrap();
    (initiator, listener.on_ready(&body(&frame)).unwrap())
}

fn established() -> (Established, Established) {
    let (initiator, listener) = up_to_ready(None);
    let (at_b, frame) = listener.accept(token(5)).unwrap();
    (initiator.on_accept(&body(&frame)).unwrap(), at_b)
}

/// What the other side reads in an ERROR frame at `step`.
fn refusal(failure: Failure, read: impl FnOnce(&[u8]) -> HandshakeError) -> Refusal {
    match read(&body(&failure.send.expect("an ERROR to send"))) {
        HandshakeError::Refused(refusal) | HandshakeError::RefusedUnverified(refusal) => refusal,
        other => panic!("{other}"),
    }
}

#[test]
fn four_messages_open_a_session_that_both_sides_describe_alike() {
    let (initiator, listener, frame) = up_to_reply(|_| {});
    let received = initiator.on_reply(&frame).unwrap();
    assert_eq!((received.chosen, listener.chosen), (1, 1));
    assert_eq!(received.agreed, listener.agreed);
    assert_eq!((received.agreed.fabric.as_str(), agreed_lanes(&received.agreed)), ("tcp", 3));
    let (at_a, at_b) = established();
    assert_eq!((at_a.peer, at_b.peer), (B, A));
    assert_eq!((at_a.peer_name.as_str(), at_b.peer_name.as_str()), ("prefill", "decode"));
    assert_eq!((at_a.session, at_a.epoch, at_a.resumed), (at_b.session, at_b.epoch, at_b.resumed));
    assert_eq!((at_a.epoch, at_a.resumed), (Epoch(1), false));
    assert!(at_a.resume_token == at_b.resume_token && at_a.resume_token == token(5));
}

#[test]
fn someone_without_the_key_is_refused_at_hello_and_told_so() {
    let (initiator, frame) = Initiator::start(key(0xcc), hello(A, B)).unwrap();
    let failure = Listener::new(key(0xbb), B).on_hello(&body(&frame)).unwrap_err();
    assert_eq!(failure.cause, HandshakeError::BadAuthenticator("HELLO"));
    let told = refusal(failure, |b| initiator.on_reply(b).unwrap_err().cause);
    assert_eq!(told.code, ErrorCode::BadAuthenticator);
    assert!(told.text.contains("session key"), "{told}");
}

#[test]
fn someone_who_means_an_earlier_instance_is_told_that_the_peer_was_restarted() {
    let earlier = Instance([9; 16]);
    let (initiator, frame) = Initiator::start(key(0xcc), hello(A, earlier)).unwrap();
    let failure = Listener::new(key(0xbb), B).on_hello(&body(&frame)).unwrap_err();
    assert_eq!(failure.cause, HandshakeError::WrongInstance { expected: B, got: earlier });
    let told = refusal(failure, |b| initiator.on_reply(b).unwrap_err().cause);
    assert_eq!(told.code, ErrorCode::PeerRestarted);
    assert!(told.text.contains("load the connection information"), "{told}");
}

#[test]
fn garbage_is_refused_without_a_panic_at_every_step() {
    let garbage = [b"".as_slice(), &[0; 33], &[b'{'; 40], &[0xff; 300]];
    for bytes in garbage {
        assert!(Listener::new(key(1), B).on_hello(bytes).is_err());
        let (initiator, listener, _) = up_to_reply(|_| {});
        assert!(initiator.on_reply(bytes).is_err());
        assert!(listener.on_ready(bytes).is_err());
        let (initiator, _) = up_to_ready(None);
        assert!(initiator.on_accept(bytes).is_err());
    }
}

#[test]
fn a_malformed_field_reaches_the_other_side_as_text_by_name() {
    let mut bad = hello(A, B);
    bad.offers[0].one_sided.as_mut().unwrap().lanes[1].rq_depth = 0;
    let (initiator, frame) = Initiator::start(key(0xbb), bad).unwrap();
    let failure = Listener::new(key(0xbb), B).on_hello(&body(&frame)).unwrap_err();
    let told = refusal(failure, |b| initiator.on_reply(b).unwrap_err().cause);
    assert_eq!(told.code, ErrorCode::Malformed);
    assert_eq!(told.text, "HELLO.offers[0].one_sided.lanes[1].rq_depth: 0 is outside 1..=65535");

    let (initiator, listener, frame) = up_to_reply(|r| one_sided(r).control.sq_depth = 70_000);
    let failure = initiator.on_reply(&frame).unwrap_err();
    assert_eq!(
        failure.cause.to_string(),
        "REPLY.offer.one_sided.control.sq_depth: 70000 is outside 1..=65535"
    );
    let told = refusal(failure, |b| listener.on_ready(b).unwrap_err().cause);
    assert_eq!(told.text, "REPLY.offer.one_sided.control.sq_depth: 70000 is outside 1..=65535");
}

#[test]
fn an_answer_that_does_not_fit_the_question_is_refused_by_name() {
    type Edit = fn(&mut Reply);
    let cases: [(Edit, &str); 5] = [
        (|r| r.instance = Instance([9; 16]), "instance 09"),
        (|r| r.epoch = Epoch(7), "REPLY.epoch: 7 instead of 1"),
        (|r| r.last_epoch = 4, "REPLY.epoch: 1 instead of 5"),
        (|r| r.protocol = 2, "REPLY.protocol: 2 instead of 1..=1"),
        (|r| one_sided(r).lanes[0].rq_depth = 1, ""),
    ];
    for (edit, expected) in cases {
        let (initiator, _, frame) = up_to_reply(edit);
        let text = initiator.on_reply(&frame).err().map(|e| e.to_string()).unwrap_or_default();
        assert!(text.contains(expected) && text.is_empty() == expected.is_empty(), "{text}");
    }
    let (_, frame) = Initiator::start(key(0xbb), hello(A, B)).unwrap();
    let received = Listener::new(key(0xbb), B).on_hello(&body(&frame)).unwrap();
    let unasked = Reply { offer: offer("verbs", 1), ..reply(&received.hello) };
    assert!(received.reply(unasked).unwrap_err().to_string().contains("verbs"));
}

/// HELLO with these offers, answered with that one.
fn answered_with(offers: Vec<FabricOffer>, answer: FabricOffer) -> Result<ReplyReceived, String> {
    let asked = Hello { offers, ..hello(A, B) };
    let (initiator, frame) = Initiator::start(key(0xbb), asked).unwrap();
    let received = Listener::new(key(0xbb), B).on_hello(&body(&frame)).unwrap();
    let answer = Reply { offer: answer, ..reply(&received.hello) };
    let (listener, frame) = received.reply(answer).map_err(|failure| failure.cause.to_string())?;
    let received = initiator.on_reply(&body(&frame)).map_err(|failure| failure.cause.to_string())?;
    assert_eq!(received.agreed, listener.agreed);
    Ok(received)
}

#[test]
fn a_listener_answers_with_the_backends_that_it_has_of_those_offered() {
    let both = || vec![offer_of_both("tcp", 2)];
    for (answer, agreed) in [
        (offer("tcp", 2), "one-sided"),
        (two_sided_offer("tcp", 1), "two-sided"),
        (offer_of_both("tcp", 2), "one-sided and two-sided"),
    ] {
        let received = answered_with(both(), answer).unwrap();
        assert_eq!(received.agreed.backends().to_string(), agreed);
    }
}

#[test]
fn an_answer_with_a_backend_that_was_not_offered_is_refused_by_both_sides() {
    for (offered, answer, field) in [
        (offer("tcp", 2), offer_of_both("tcp", 2), "REPLY.offer.two_sided"),
        (two_sided_offer("tcp", 2), offer_of_both("tcp", 2), "REPLY.offer.one_sided"),
        (offer("tcp", 2), two_sided_offer("tcp", 2), "REPLY.offer.two_sided"),
    ] {
        let expected = format!("{field}: an offer instead of nothing, as in HELLO");
        assert_eq!(answered_with(vec![offered.clone()], answer.clone()).unwrap_err(), expected);
        // The initiator looks at it with the same eyes.
        let asked = Hello { offers: vec![offered], ..hello(A, B) };
        let checked = super::initiator::choice(&asked, &answer).unwrap_err();
        assert_eq!(checked.to_string(), expected);
    }
}

#[test]
fn a_field_of_the_two_sided_part_reaches_the_other_side_as_text_by_name() {
    let mut bad = Hello { offers: vec![offer_of_both("tcp", 2)], ..hello(A, B) };
    bad.offers[0].two_sided.as_mut().unwrap().lanes[1].posted = 257;
    let (initiator, frame) = Initiator::start(key(0xbb), bad).unwrap();
    let failure = Listener::new(key(0xbb), B).on_hello(&body(&frame)).unwrap_err();
    let told = refusal(failure, |b| initiator.on_reply(b).unwrap_err().cause);
    assert_eq!(told.code, ErrorCode::Malformed);
    assert_eq!(told.text, "HELLO.offers[0].two_sided.lanes[1].posted: 257 is outside 0..=256");
}

#[test]
fn no_message_can_be_reflected_or_played_again() {
    let (initiator, frame) = Initiator::start(key(0xbb), hello(A, B)).unwrap();
    let reflected = initiator.on_reply(&body(&frame)).unwrap_err();
    assert_eq!(reflected.cause, HandshakeError::BadAuthenticator("REPLY"));

    // A READY of an earlier run, with the same HELLO but another nonce in REPLY.
    let (initiator, _, frame) = up_to_reply(|_| {});
    let (_, old_ready) = initiator.on_reply(&frame).unwrap().ready(&key(0xaa), None).unwrap();
    let (_, listener, _) = up_to_reply(|r| r.nonce = [3; 16]);
    let replayed = listener.on_ready(&body(&old_ready)).unwrap_err();
    assert_eq!(replayed.cause, HandshakeError::BadAuthenticator("READY"));
}

#[test]
fn every_changed_byte_of_any_message_is_noticed() {
    let (_, frame) = Initiator::start(key(0xbb), hello(A, B)).unwrap();
    let changed = |bytes: &[u8], i: usize| {
        let mut bytes = bytes.to_vec();
        bytes[i] ^= 0x20;
        bytes
    };
    let whole = body(&frame);
    for i in 0..whole.len() {
        assert!(Listener::new(key(0xbb), B).on_hello(&changed(&whole, i)).is_err(), "HELLO byte {i}");
    }
    let (_, _, whole) = up_to_reply(|_| {});
    for i in 0..whole.len() {
        let (initiator, _) = Initiator::start(key(0xbb), hello(A, B)).unwrap();
        assert!(initiator.on_reply(&changed(&whole, i)).is_err(), "REPLY byte {i}");
    }
    let (initiator, _, frame) = up_to_reply(|_| {});
    let (_, ready) = initiator.on_reply(&frame).unwrap().ready(&key(0xaa), None).unwrap();
    let whole = body(&ready);
    for i in 0..whole.len() {
        let (_, listener, _) = up_to_reply(|_| {});
        assert!(listener.on_ready(&changed(&whole, i)).is_err(), "READY byte {i}");
    }
    let (_, listener) = up_to_ready(None);
    let whole = body(&listener.accept(token(5)).unwrap().1);
    for i in 0..whole.len() {
        let (initiator, _) = up_to_ready(None);
        assert!(initiator.on_accept(&changed(&whole, i)).is_err(), "ACCEPT byte {i}");
    }
}

#[test]
fn identity_is_proven_later_with_the_key_that_load_remote_brings_and_by_no_other() {
    let (_, ready) = up_to_ready(None);
    let kept = ready.identity;
    assert!(kept.verify(&key(0xaa)));
    assert!(!kept.verify(&key(0xbb)), "the listener's own key proves nothing about the initiator");
    assert!(!kept.verify(&key(0xac)));
}

#[test]
fn replacing_an_epoch_needs_its_token() {
    let (_, ready) = up_to_ready(Some(&token(5)));
    assert!(ready.proves_resume(&token(5)));
    assert!(!ready.proves_resume(&token(6)));
    let (_, ready) = up_to_ready(None);
    assert!(!ready.proves_resume(&token(5)));
}

#[test]
fn a_refusal_at_each_step_reaches_the_other_side_verified() {
    let refusal = Refusal {
        session: Some(SessionId(3)),
        epoch: Some(Epoch(8)),
        ..Refusal::new(ErrorCode::AlreadyOpen, "open in epoch 8")
    };
    let (initiator, frame) = Initiator::start(key(0xbb), hello(A, B)).unwrap();
    let received = Listener::new(key(0xbb), B).on_hello(&body(&frame)).unwrap();
    let frame = received.refuse(refusal.clone()).unwrap();
    let failure = initiator.on_reply(&body(&frame)).unwrap_err();
    assert_eq!(failure, Failure { cause: HandshakeError::Refused(refusal.clone()), send: None });

    let (initiator, ready) = up_to_ready(None);
    let frame = ready.refuse(refusal.clone()).unwrap();
    assert_eq!(initiator.on_accept(&body(&frame)).unwrap_err(), HandshakeError::Refused(refusal));

    let (initiator, listener, frame) = up_to_reply(|_| {});
    let frame = initiator.on_reply(&frame).unwrap().refuse(ErrorCode::NoFabric, "no route").unwrap();
    let cause = listener.on_ready(&body(&frame)).unwrap_err().cause;
    assert_eq!(cause, HandshakeError::Refused(Refusal::new(ErrorCode::NoFabric, "no route")));
}

#[test]
fn a_message_out_of_place_is_named() {
    let genuine = |role: &[u8], message: &Message| {
        use sha2::Digest;
        let json = message.encode();
        let mut body =
            crate::wire::mac(key(0xbb).expose(), &[role, &sha2::Sha256::new().finalize(), &json]).to_vec();
        body.extend_from_slice(&json);
        body
    };
    let ready = genuine(b"c1", &Message::Reply(Box::new(reply(&hello(A, B)))));
    let failure = Listener::new(key(0xbb), B).on_hello(&ready).unwrap_err();
    assert_eq!(failure.cause.to_string(), "REPLY instead of HELLO");
}

#[test]
fn hello_longer_than_a_frame_is_refused_before_it_is_sent() {
    let mut long = hello(A, B);
    long.offers = vec![offer("local", 64), offer("tcp", 64), offer("verbs", 64)];
    long.offers[0]
        .one_sided
        .as_mut()
        .unwrap()
        .lanes
        .iter_mut()
        .for_each(|l| l.address = serde_json::json!("x".repeat(1000)));
    assert!(Initiator::start(key(1), long).unwrap_err().to_string().contains("65536"));
}

#[test]
fn secrets_are_never_shown() {
    let (at_a, _) = established();
    let shown = format!("{at_a:?} {:?} {:?}", key(0xaa), Listener::new(key(0xaa), B));
    assert!(shown.contains("ResumeToken(..)") && shown.contains("SessionKey(..)"));
    assert!(!shown.contains("170, 170") && !shown.contains("5, 5") && !shown.contains("aaaa"), "{shown}");
}

#[test]
fn lifeline_messages_cannot_be_repeated_dropped_reflected_or_taken_to_another_session() {
    let (mut a, mut b) = established();
    let (mut other, _) = {
        let (initiator, listener) = up_to_ready(None);
        let (at_b, frame) = listener.accept(token(6)).unwrap();
        (initiator.on_accept(&body(&frame)).unwrap(), at_b)
    };
    let frames: Vec<_> =
        (0..3).map(|n| body(&a.lifeline.seal(&LifelineFrame::Ping { n }).unwrap())).collect();
    assert_eq!(b.lifeline.open(&frames[0]).unwrap(), LifelineFrame::Ping { n: 0 });
    assert_eq!(b.lifeline.open(&frames[0]), Err(LifelineError::BadAuthenticator(1)));
    assert_eq!(b.lifeline.open(&frames[2]), Err(LifelineError::BadAuthenticator(1)));
    assert_eq!(b.lifeline.open(&frames[1]).unwrap(), LifelineFrame::Ping { n: 1 });
    assert_eq!(a.lifeline.open(&frames[0]), Err(LifelineError::BadAuthenticator(0)));
    assert_eq!(other.lifeline.open(&frames[0]), Err(LifelineError::BadAuthenticator(0)));
    let answer = b.lifeline.seal(&LifelineFrame::Pong { n: 1 }).unwrap();
    assert_eq!(a.lifeline.open(&body(&answer)).unwrap(), LifelineFrame::Pong { n: 1 });
}

// ---- who may connect when

fn open(epoch: u32) -> LocalState {
    LocalState::Open { session: SessionId(5), epoch: Epoch(epoch), lifeline_up: true }
}

fn code(decision: &Decision) -> Option<ErrorCode> {
    match decision {
        Decision::Refuse(refusal) => Some(refusal.code),
        _ => None,
    }
}

fn hello_of(from: Instance, to: Instance, last_epoch: u32) -> Hello {
    Hello { last_epoch, ..hello(from, to) }
}

#[test]
fn hello_is_answered_by_the_rules() {
    use ErrorCode::*;
    let draining = LocalState::Draining { session: SessionId(5), epoch: Epoch(3) };
    // (own, peer, state, the peer's last epoch, refusal or none)
    let table = [
        (A, B, LocalState::Idle, 0, None),
        (B, A, LocalState::Idle, 9, None),
        (A, B, LocalState::Connecting, 0, Some(GlareWait)),
        (B, A, LocalState::Connecting, 0, None),
        (A, B, open(3), 0, Some(AlreadyOpen)),
        (A, B, open(3), 2, Some(AlreadyOpen)),
        (A, B, open(3), 3, None),
        (A, B, open(3), 4, None),
        (A, B, draining, 0, None),
        (A, A, LocalState::Idle, 0, Some(Malformed)),
    ];
    for (own, peer, state, last_epoch, expected) in table {
        let decision = decide_hello(own, state, &hello_of(peer, own, last_epoch));
        assert_eq!(code(&decision), expected, "{own} {state:?} {last_epoch}");
        assert_eq!(decision == Decision::Proceed, expected.is_none());
    }
    let for_another = decide_hello(A, LocalState::Idle, &hello_of(B, Instance([7; 16]), 0));
    assert_eq!(code(&for_another), Some(PeerRestarted));
    let future = Hello { protocol: ProtocolRange { min: 8, max: 9 }, ..hello(B, A) };
    let Decision::Refuse(refusal) = decide_hello(A, LocalState::Idle, &future) else { panic!("accepted") };
    assert!(refusal.code == Protocol && refusal.text.contains("1..=1 here, 8..=9 there"));
}

#[test]
fn ready_is_answered_by_the_rules() {
    use ErrorCode::*;
    let dead = LocalState::Open { session: SessionId(5), epoch: Epoch(3), lifeline_up: false };
    let draining = LocalState::Draining { session: SessionId(5), epoch: Epoch(3) };
    let drain = Decision::DrainThenAccept(Epoch(3));
    let decide = |own, peer, state, last, hello_last, agreed, proof, resume| {
        decide_ready(own, state, last, &hello_of(peer, own, hello_last), Epoch(agreed), proof, resume)
    };
    for proof in [Proof::Unknown, Proof::Verified] {
        assert_eq!(decide(A, B, LocalState::Idle, 0, 0, 1, proof, false), Decision::Accept);
        assert_eq!(decide(B, A, LocalState::Connecting, 0, 0, 1, proof, false), Decision::AcceptAndYield);
        assert_eq!(decide(A, B, open(3), 3, 3, 4, proof, true), drain);
        assert_eq!(decide(A, B, dead, 3, 3, 4, proof, false), drain);
        assert_eq!(decide(A, B, draining, 3, 3, 4, proof, false), drain);
        assert_eq!(decide(A, B, draining, 3, 0, 4, proof, false), drain);
        let refused = [
            (decide(A, B, LocalState::Connecting, 0, 0, 1, proof, true), GlareWait),
            (decide(A, B, open(3), 3, 3, 4, proof, false), AlreadyOpen),
            (decide(A, B, open(3), 3, 2, 4, proof, true), AlreadyOpen),
            (decide(A, B, LocalState::Idle, 4, 3, 4, proof, true), Busy),
            (decide(B, A, LocalState::Connecting, 1, 0, 1, proof, true), Busy),
        ];
        for (decision, expected) in refused {
            assert_eq!(code(&decision), Some(expected), "{decision:?}");
        }
    }
    for state in [LocalState::Idle, LocalState::Connecting, open(3), dead] {
        assert_eq!(code(&decide(B, A, state, 3, 3, 4, Proof::Wrong, true)), Some(BadIdentity));
    }
    let Decision::Refuse(told) = decide(A, B, open(3), 3, 2, 4, Proof::Verified, true) else {
        panic!("accepted")
    };
    assert_eq!((told.session, told.epoch), (Some(SessionId(5)), Some(Epoch(3))));
}

#[test]
fn back_off_doubles_from_50_ms_to_2_s_and_jitter_only_shortens_it() {
    let full: Vec<u64> = (1..=8).map(|n| backoff_ms(n, 0)).collect();
    assert_eq!(full, [50, 100, 200, 400, 800, 1600, 2000, 2000]);
    for n in [1, 5, 40, u32::MAX] {
        for jitter in [1, 255, 256, u32::MAX] {
            assert!((backoff_ms(n, 0) * 3 / 4..=backoff_ms(n, 0)).contains(&backoff_ms(n, jitter)));
        }
    }
}

fn session_at(link: &Link, epoch: u32) -> Established {
    let (mut established, _) = established();
    (established.peer, established.epoch) = (link.peer(), Epoch(epoch));
    established
}

#[test]
fn the_first_caller_connects_the_others_attach_and_a_failure_leaves_back_off() {
    let mut link = Link::new(A, B, Default::default());
    let now = Nanos(1_000);
    assert!(matches!(link.begin(now, 1), Begin::Start { last_epoch: 0, session: None, resume_token: None }));
    assert_eq!(link.begin(now, 2), Begin::Attach);
    let refused = HandshakeError::BadAuthenticator("REPLY");
    let until = link.failed(now, 1, &refused, 0).unwrap();
    assert_eq!(until, now.plus_ms(50));
    assert_eq!(link.begin(now, 2), Begin::WaitUntil(until));
    assert_eq!(link.failed(now, 1, &refused, 0), None, "a void attempt changes nothing");
    assert!(matches!(link.begin(until, 3), Begin::Start { .. }));
    assert!(!link.connected(1, &session_at(&link, 1)), "the answer to a void attempt opens nothing");
    assert!(link.connected(3, &session_at(&link, 1)));
    assert!(matches!(link.begin(until, 4), Begin::Open { epoch: Epoch(1), .. }));
    link.draining(Epoch(1));
    assert_eq!(link.begin(until, 5), Begin::WaitForDrain);
    link.ended(Epoch(1));
    let Begin::Start { last_epoch: 1, session: Some(_), resume_token: Some(_) } = link.begin(until, 6) else {
        panic!("nothing remembered")
    };
}

#[test]
fn an_already_open_answer_raises_the_epoch_that_the_next_attempt_tells() {
    let mut link = Link::new(A, B, Default::default());
    link.begin(Nanos(0), 1);
    let told = |epoch| {
        HandshakeError::Refused(Refusal {
            epoch: Some(Epoch(epoch)),
            ..Refusal::new(ErrorCode::AlreadyOpen, "")
        })
    };
    let until = link.failed(Nanos(0), 1, &told(6), 0).unwrap();
    let Begin::Start { last_epoch: 6, .. } = link.begin(until, 2) else { panic!("epoch not taken over") };
    link.failed(until, 2, &told(u32::MAX), 0);
    assert_eq!(link.memory().last_epoch, 6, "the last number would leave no epoch to open");
}

#[test]
fn after_a_failure_the_side_that_made_the_other_wait_stays_idle_long_enough_for_it() {
    let mut link = Link::new(A, B, Default::default());
    link.begin(Nanos(0), 1);
    assert_eq!(code(&link.on_hello(&hello(B, A))), Some(ErrorCode::GlareWait));
    let until = link.failed(Nanos(0), 1, &HandshakeError::BadAuthenticator("x"), 9).unwrap();
    assert_eq!(until, Nanos(0).plus_ms(2000));
    assert_eq!(link.on_hello(&hello(B, A)), Decision::Proceed);
    let waiting = HandshakeError::Refused(Refusal::new(ErrorCode::GlareWait, ""));
    link.begin(until, 2);
    assert_eq!(link.failed(until, 2, &waiting, 9), Some(until.plus_ms(50)));
}

#[test]
fn an_own_attempt_is_void_once_the_peers_was_accepted() {
    let mut link = Link::new(B, A, Default::default());
    link.begin(Nanos(0), 1);
    let theirs = session_at(&link, 1);
    assert!(link.accepted(&theirs));
    assert!(!link.accepted(&session_at(&link, 2)), "one session at a time");
    assert!(!link.connected(1, &session_at(&link, 1)));
    assert_eq!(link.failed(Nanos(0), 1, &HandshakeError::BadAuthenticator("x"), 0), None);
    assert!(matches!(link.state(), LinkState::Open { epoch: Epoch(1), .. }));
    link.ended(Epoch(7));
    assert!(matches!(link.state(), LinkState::Open { .. }), "another epoch's end is not this one's");
}

#[test]
fn a_session_is_resumed_only_if_both_remember_the_same() {
    let mut link = Link::new(B, A, Default::default());
    let fresh = SessionId(1234);
    let asks = |session| Hello { session, last_epoch: 1, ..hello(A, B) };
    assert_eq!(link.answer(&asks(Some(SessionId(5))), fresh).unwrap().session, fresh);
    let first = session_at(&link, 1);
    assert!(link.accepted(&first));
    link.ended(Epoch(1));
    let answer = link.answer(&asks(Some(first.session)), fresh).unwrap();
    assert_eq!((answer.session, answer.last_epoch, answer.epoch), (first.session, 1, Epoch(2)));
    assert_eq!(link.answer(&asks(Some(SessionId(5))), fresh).unwrap().session, fresh);
    assert_eq!(link.answer(&asks(None), fresh).unwrap().session, fresh);
    let last = Hello { last_epoch: u32::MAX, ..hello(A, B) };
    assert_eq!(link.answer(&last, fresh), Err(HandshakeError::EpochsUsedUp(u32::MAX)));
}

#[test]
fn a_session_whose_message_numbers_are_gone_is_not_named_again() {
    let mut link = Link::new(B, A, Default::default());
    assert!(link.accepted(&session_at(&link, 1)));
    link.forget_session();
    assert!(link.memory().session.is_some(), "an open session has its numbers");
    link.ended(Epoch(1));
    assert!(matches!(link.begin(Nanos(0), 7), Begin::Start { session: Some(_), .. }));
    link.forget_session();
    assert!(!link.connected(7, &session_at(&link, 2)), "HELLO of that attempt named the session");
    assert!(matches!(link.begin(Nanos(0), 8), Begin::Start { session: None, last_epoch: 1, .. }));
}

proptest! {
    #[test]
    fn lifeline_frames_cross_in_order(frames in prop::collection::vec(any_lifeline_frame(), 1..6)) {
        let (mut a, mut b) = established();
        for frame in frames {
            let sealed = b.lifeline.seal(&frame).unwrap();
            prop_assert_eq!(&a.lifeline.open(&body(&sealed)).unwrap(), &frame);
        }
    }

    #[test]
    fn no_bytes_make_a_step_panic(bytes in prop::collection::vec(any::<u8>(), 33..200)) {
        let framed = encode_frame(&bytes).unwrap();
        prop_assert!(Listener::new(key(1), B).on_hello(&body(&framed)).is_err());
        let (mut a, _) = established();
        prop_assert!(a.lifeline.open(&bytes).is_err());
    }
}

#[test]
fn names_are_given_by_the_rules() {
    use ErrorCode::*;
    let refused = |code: ErrorCode| Err::<Option<Instance>, _>(code);
    // (name, what the host calls the claimant A, who has the name; granted over whom, or refused)
    let table = [
        ("p", None, None, Ok(None)),
        ("p", None, Some(A), Ok(None)),
        ("p", None, Some(B), refused(NameInUse)),
        ("p", Some("p"), None, Ok(None)),
        ("p", Some("p"), Some(A), Ok(None)),
        ("p", Some("p"), Some(B), Ok(Some(B))),
        ("p", Some("q"), None, refused(BadIdentity)),
        ("p", Some("q"), Some(B), refused(BadIdentity)),
        ("me", None, None, refused(BadIdentity)),
        ("me", Some("me"), None, refused(BadIdentity)),
    ];
    for (name, bound_as, holder, expected) in table {
        let claim = NameClaim { instance: A, name, bound_as, holder };
        let decided = match decide_name("me", &claim) {
            NameDecision::Granted => Ok(None),
            NameDecision::InPlaceOf(other) => Ok(Some(other)),
            NameDecision::Refuse(refusal) => {
                assert!(refusal.text.contains(name), "{refusal}");
                Err(refusal.code)
            }
        };
        assert_eq!(decided, expected, "{claim:?}");
    }
}

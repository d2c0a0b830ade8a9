//! A peer that holds the session key, completes the handshake as it should, and then does what it likes.

use std::io::Write;

use baton_core::notify::{BodyFlags, Fragment, Record, RecordScope};
use baton_core::wire::{ConnInfo, LifelineFrame, encode_frame};
use baton_core::{Epoch, Instance, NotifySeq, RegionId};
use baton_host::{Op, Transfer};
use baton_tests::{Block, Node, Remote, wait_for};

use crate::attacker::Attacker;
use crate::{alone, befriend, node};

const BYTES: usize = 1 << 20;
const SMALL: usize = 64 << 10;

/// A victim, and a peer of it that behaves and has a session with it.
struct Scene {
    victim: Node,
    healthy: Node,
    memory: Block,
    source: Block,
    write: Transfer,
    round: u64,
    _remote: Remote,
}

impl Scene {
    fn new() -> Scene {
        let (victim, healthy) = (node("victim", "tcp"), node("healthy", "tcp"));
        befriend((&victim, "victim"), (&healthy, "healthy"));
        let memory = Block::new(&victim.engine, BYTES, 1).expect("register");
        let source = Block::new(&healthy.engine, BYTES, 2).expect("register");
        let blob = memory.region().export().expect("export");
        let remote = Remote::import(&healthy, "victim", &blob, memory.region().addr()).expect("import");
        let write = healthy.scattered(Op::Write, &source, &remote, SMALL).expect("create");
        let mut scene = Scene { victim, healthy, memory, source, write, round: 0, _remote: remote };
        scene.assert_unharmed();
        scene
    }

    /// The session of the healthy peer goes on, without a call by the victim until the notification is there.
    fn assert_unharmed(&mut self) {
        self.round += 1;
        self.source.fill(self.round);
        let message = self.round.to_string();
        self.healthy.run(&self.write, Some(message.as_bytes()));
        self.victim.expect_notification("healthy", message.as_bytes());
        self.memory.assert_holds_reversed(self.round, SMALL, "at the victim");
        assert_eq!(
            self.victim.counter("sessions_opened") - self.attacks(),
            1,
            "the first session still lives"
        );
        assert_eq!(self.healthy.failure_so_far(), None);
    }

    /// Sessions that attackers had so far.
    fn attacks(&self) -> u64 {
        self.victim.counter("sessions_opened") - 1
    }

    fn attack(&self) -> Attacker {
        self.attack_with(true)
    }

    fn attack_with(&self, immediate: bool) -> Attacker {
        let mut instance = [7; 16];
        instance[..8].copy_from_slice(&self.victim.counter("sessions_opened").to_ne_bytes());
        let info = self.victim.engine.conn_info().expect("info");
        Attacker::connect_with(&info, Instance(instance), "attacker", immediate).expect("it holds the key")
    }

    /// The attacker's session has ended by failure and is counted; nothing else has happened.
    fn assert_ended(&mut self, mut attacker: Attacker) {
        attacker.wait_for_the_end();
        assert_eq!(self.victim.next_failure().peer, "attacker");
        wait_for("its count", || (self.victim.counter("epochs_ended") == self.attacks()).then_some(()));
        self.assert_unharmed();
    }
}

fn test(name: &str, body: impl FnOnce(&mut Scene)) {
    alone(&format!("{}::{name}", module_path!()), || body(&mut Scene::new()));
}

#[test]
fn garbage_on_the_lifeline_ends_that_session_only() {
    test("garbage_on_the_lifeline_ends_that_session_only", |scene| {
        let too_long = u32::MAX.to_le_bytes();
        let no_json = encode_frame(&[b'x'; 100]).expect("a frame");
        for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], &too_long, &no_json, &[0; 64]] {
            let mut attacker = scene.attack();
            attacker.lifeline.write_all(garbage).expect("write");
            scene.assert_ended(attacker);
        }
        assert_eq!(scene.victim.counter("lifelines_broken"), 4, "each has been counted");
    });
}

#[test]
fn a_lifeline_message_with_a_wrong_authenticator_ends_that_session_only() {
    test("a_lifeline_message_with_a_wrong_authenticator_ends_that_session_only", |scene| {
        let mut attacker = scene.attack();
        let mut frame = attacker.seal(&LifelineFrame::Ping { n: 1 });
        let last = frame.len() - 1;
        frame[last] ^= 1;
        attacker.lifeline.write_all(&frame).expect("write");
        scene.assert_ended(attacker);

        // A message that was said before, again.
        let mut attacker = scene.attack();
        let frame = attacker.seal(&LifelineFrame::Ping { n: 1 });
        attacker.lifeline.write_all(&frame).expect("write");
        assert_eq!(attacker.hear(), Some(LifelineFrame::Pong { n: 1 }));
        attacker.lifeline.write_all(&frame).expect("write");
        scene.assert_ended(attacker);
        assert_eq!(scene.victim.counter("lifelines_broken"), 2, "each has been counted");
    });
}

#[test]
fn a_fence_of_another_epoch_is_ignored_and_one_of_this_epoch_obeyed() {
    test("a_fence_of_another_epoch_is_ignored_and_one_of_this_epoch_obeyed", |scene| {
        let mut attacker = scene.attack();
        for epoch in [attacker.epoch.0 + 1, attacker.epoch.0 + 1000, u32::MAX] {
            let fence = LifelineFrame::Fence { epoch: Epoch(epoch), reason: "wrong".into() };
            attacker.say(&fence).expect("write");
        }
        attacker.say(&LifelineFrame::DrainAck { epoch: Epoch(77) }).expect("write");
        attacker.say(&LifelineFrame::Pong { n: 77 }).expect("write");
        attacker.say(&LifelineFrame::RevokeAck { id: 77 }).expect("write");
        attacker.say(&LifelineFrame::Ping { n: 5 }).expect("write");
        assert_eq!(attacker.hear(), Some(LifelineFrame::Pong { n: 5 }), "the session lives");
        scene.assert_unharmed();
        assert_eq!(scene.victim.counter("stale_fences"), 3);
        let fence = LifelineFrame::Fence { epoch: attacker.epoch, reason: "right".into() };
        attacker.say(&fence).expect("write");
        scene.assert_ended(attacker);
    });
}

#[test]
fn a_revoke_of_somebody_else_s_regions_does_nothing_to_them() {
    test("a_revoke_of_somebody_else_s_regions_does_nothing_to_them", |scene| {
        // The victim writes to the healthy peer, whose region the attacker claims to withdraw.
        let theirs = scene.source.region().export().expect("export");
        let region = baton_core::wire::RegionBlob::decode(&theirs).expect("a blob").region;
        let remote = Remote::import(&scene.victim, "healthy", &theirs, scene.source.region().addr());
        let remote = remote.expect("import");
        let mut attacker = scene.attack();
        let regions = vec![region, RegionId(1), RegionId(u64::MAX)];
        attacker.say(&LifelineFrame::Revoke { id: 9, regions }).expect("write");
        assert_eq!(attacker.hear(), Some(LifelineFrame::RevokeAck { id: 9 }));
        scene.memory.fill(50);
        let write = scene.victim.scattered(Op::Write, &scene.memory, &remote, SMALL).expect("not withdrawn");
        scene.victim.run(&write, None);
        scene.source.assert_holds_reversed(50, SMALL, "at the healthy peer");
        scene.assert_unharmed();
    });
}

#[test]
fn a_flood_of_pings_holds_nobody_else_up() {
    test("a_flood_of_pings_holds_nobody_else_up", |scene| {
        let attacker = scene.attack();
        let mut answers = attacker.lifeline.try_clone().expect("a second handle");
        // One half sends as fast as it can, the other takes the answers, so that the flood never ends by itself.
        let flood = std::thread::spawn(move || {
            let mut attacker = attacker;
            let mut n = 0u64;
            while attacker.say(&LifelineFrame::Ping { n }).is_ok() {
                n += 1;
            }
            (attacker, n)
        });
        let sink = std::thread::spawn(move || std::io::copy(&mut answers, &mut std::io::sink()));
        for _ in 0..20 {
            scene.assert_unharmed();
        }
        scene.victim.engine.disconnect("attacker").expect("disconnect");
        scene.assert_unharmed();
        // The attacker is known by no name here, so it is the end of the victim that ends it.
        let Scene { victim, memory, .. } = std::mem::replace(scene, Scene::new());
        drop((memory, victim));
        let (_attacker, sent) = flood.join().expect("the flood");
        assert!(sent > 0 && sink.join().is_ok());
    });
}

#[test]
fn pings_whose_answers_nobody_takes_end_that_session_only() {
    test("pings_whose_answers_nobody_takes_end_that_session_only", |scene| {
        let mut attacker = scene.attack();
        // Until the victim stops reading, which it does by ending the session.
        let mut n = 0;
        while attacker.say(&LifelineFrame::Ping { n }).is_ok() {
            n += 1;
        }
        scene.assert_unharmed();
        assert_eq!(scene.victim.next_failure().peer, "attacker");
        scene.assert_unharmed();
    });
}

#[test]
fn a_peer_that_goes_silent_is_found_out_by_ping() {
    test("a_peer_that_goes_silent_is_found_out_by_ping", |scene| {
        let attacker = scene.attack();
        scene.assert_ended(attacker);
    });
}

#[test]
fn garbage_on_a_data_connection_ends_that_session_only() {
    test("garbage_on_a_data_connection_ends_that_session_only", |scene| {
        for endpoint in 0..2 {
            let mut attacker = scene.attack();
            attacker.data[endpoint].write_all(&[0xff; 4096]).expect("write");
            scene.assert_ended(attacker);
        }
    });
}

#[test]
fn immediates_that_mean_nothing_are_violations_that_end_that_session_only() {
    test("immediates_that_mean_nothing_are_violations_that_end_that_session_only", |scene| {
        let (lane, control) = (1, 0);
        let an_unknown_kind = [(lane, 0xc000_0000), (control, 0xc000_0000)];
        let more_lanes_than_there_are = [(lane, 0x3f00_0000), (lane, 0xbf00_0000)];
        let a_number_out_of_every_window = [(lane, 0x0080_0000), (lane, 0x8080_0000)];
        let a_record_that_was_never_written = [(lane, 0x4000_0000), (control, 0x4000_0000)];
        let the_end_of_a_lane_on_control = [(control, 0), (control, 0x8000_0000)];
        let all = an_unknown_kind.into_iter().chain(more_lanes_than_there_are);
        let all = all.chain(a_number_out_of_every_window).chain(a_record_that_was_never_written);
        let all = all.chain(the_end_of_a_lane_on_control);
        let mut count = 0;
        for (endpoint, imm) in all {
            let mut attacker = scene.attack();
            attacker.immediate(endpoint, imm);
            let heard = attacker.hear();
            assert!(matches!(heard, Some(LifelineFrame::Violation { .. })), "{imm:#x}: {heard:?}");
            scene.assert_ended(attacker);
            count += 1;
            assert_eq!(scene.victim.counter("violations"), count, "{imm:#x}");
        }
        assert_eq!(scene.victim.engine.notifications().expect("notifications"), []);
    });
}

/// The second of three fragments.
fn stray_fragment(epoch: u32, scope: RecordScope) -> Vec<u8> {
    let fragment = Some(Fragment { key: 5, index: 1, count: 3, total_len: 9 });
    let mut bytes = Vec::new();
    Record { epoch: Epoch(epoch), scope, fragment, flags: BodyFlags::MESSAGE }.encode(b"abc", &mut bytes);
    bytes
}

#[test]
fn sends_that_mean_nothing_are_violations_that_end_that_session_only() {
    test("sends_that_mean_nothing_are_violations_that_end_that_session_only", |scene| {
        let (lane, control) = (1, 0);
        let (tail, record, empty) = (0u32, 0x4000_0000u32, 0x8000_0000u32);
        let say =
            |imm: u32, epoch: u32, more: &[u8]| [&imm.to_le_bytes()[..], &epoch.to_le_bytes(), more].concat();
        type Payload<'a> = Box<dyn Fn(u32) -> Vec<u8> + 'a>;
        let payloads: Vec<(usize, Payload<'_>)> = vec![
            (lane, Box::new(|_| Vec::new())),
            (lane, Box::new(|epoch| say(tail, epoch, b"")[..7].to_vec())),
            (lane, Box::new(|epoch| say(tail, epoch + 1, b""))),
            (lane, Box::new(|epoch| say(tail, epoch, b"more"))),
            (lane, Box::new(|epoch| say(empty, epoch, b"more"))),
            (control, Box::new(|epoch| say(empty, epoch, b""))),
            (lane, Box::new(|epoch| say(3 << 30, epoch, b""))),
            (control, Box::new(|epoch| say(3 << 30, epoch, b""))),
            (control, Box::new(|epoch| say(tail, epoch, b""))),
            (lane, Box::new(|epoch| say(record, epoch, b"BtnR"))),
            (lane, Box::new(|epoch| say(record, epoch, &[0; 8192]))),
            (control, Box::new(|epoch| say(record, epoch, &[0xff; 100]))),
            // Well made, but nothing has come before it.
            (lane, Box::new(|epoch| say(record, epoch, &stray_fragment(epoch, RecordScope::Part)))),
            (
                control,
                Box::new(|epoch| {
                    let scope = RecordScope::Standalone { seq: NotifySeq(5) };
                    say(record, epoch, &stray_fragment(epoch, scope))
                }),
            ),
        ];
        for (count, (endpoint, payload)) in (1..).zip(payloads) {
            let mut attacker = scene.attack_with(false);
            let payload = payload(attacker.epoch.0);
            attacker.send(endpoint, &payload);
            let heard = attacker.hear();
            assert!(matches!(heard, Some(LifelineFrame::Violation { .. })), "attack {count}: {heard:?}");
            scene.assert_ended(attacker);
            assert_eq!(scene.victim.counter("violations"), count);
        }
        assert_eq!(scene.victim.engine.notifications().expect("notifications"), []);
    });
}

#[test]
fn each_way_of_telling_is_a_violation_where_the_other_was_agreed_and_a_send_too_long_is_refused() {
    let name = "each_way_of_telling_is_a_violation_where_the_other_was_agreed_and_a_send_too_long_is_refused";
    test(name, |scene| {
        let mut attacker = scene.attack_with(true);
        attacker.send(1, b"");
        assert!(matches!(attacker.hear(), Some(LifelineFrame::Violation { .. })));
        scene.assert_ended(attacker);
        let mut attacker = scene.attack_with(false);
        attacker.immediate(1, 0);
        assert!(matches!(attacker.hear(), Some(LifelineFrame::Violation { .. })));
        scene.assert_ended(attacker);
        assert_eq!(scene.victim.counter("violations"), 2);
        // Each cause by itself, also when those peers are forgotten.
        let causes = scene.victim.stats()["counters"]["violations_by_cause"].clone();
        assert_eq!(causes, serde_json::json!({ "UnexpectedImmediate": 1, "UnexpectedSend": 1 }));
        let mut attacker = scene.attack_with(false);
        attacker.send(1, &[0; 8201]);
        attacker.expect_refusal(1);
        attacker.data.clear();
        scene.assert_ended(attacker);
        assert_eq!(scene.victim.counter("violations"), 2);
        assert_eq!(scene.victim.engine.notifications().expect("notifications"), []);
    });
}

#[test]
fn an_attacker_that_ends_its_data_connections_loses_its_session_and_nobody_else_does() {
    test("an_attacker_that_ends_its_data_connections_loses_its_session_and_nobody_else_does", |scene| {
        let mut attacker = scene.attack();
        attacker.data.clear();
        scene.assert_ended(attacker);
    });
}

#[test]
fn who_holds_only_the_listener_s_key_cannot_take_another_instance_s_place() {
    test("who_holds_only_the_listener_s_key_cannot_take_another_instance_s_place", |scene| {
        let healthy = scene.healthy.engine.conn_info().expect("info");
        let healthy = ConnInfo::decode(&healthy).expect("connection information").instance;
        let info = scene.victim.engine.conn_info().expect("info");
        for _ in 0..3 {
            let refused = Attacker::connect(&info, healthy, "healthy").err().expect("refused");
            assert!(!refused.is_empty());
            scene.assert_unharmed();
        }
        assert!(scene.victim.counter("handshakes_refused") >= 3);
        // Nor its name, nor the victim's.
        for (name, why, counter) in
            [("healthy", "NAME_IN_USE", "names_in_use"), ("victim", "BAD_IDENTITY", "names_refused")]
        {
            let refused = Attacker::connect(&info, Instance([1; 16]), name).err().expect("refused");
            assert!(refused.contains(why), "{refused}");
            assert_eq!(scene.victim.counter(counter), 1);
        }
        scene.victim.engine.notify("healthy", b"secret").expect("notify");
        scene.healthy.expect_notification("victim", b"secret");
        scene.assert_unharmed();
    });
}

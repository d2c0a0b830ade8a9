//! Offers of both backends: what is refused by name, and what two of them agree on.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::samples::*;
use super::*;
use crate::notify::NotifyMode;
use crate::two_sided::pool::{PeerKey, SlabId, SlotId};
use crate::two_sided::setup::{TwoLane, TwoLimits, TwoSetup};
use crate::{Epoch, SessionId};

/// An offer of both backends as JSON with one value replaced, decoded.
fn with(pointer: &str, value: Value) -> Result<FabricOffer, FieldError> {
    let mut json = serde_json::to_value(offer_of_both("tcp", 3)).unwrap();
    match json.pointer_mut(pointer) {
        Some(at) => *at = value,
        None => {
            let (parent, key) = pointer.rsplit_once('/').unwrap();
            json.pointer_mut(parent).unwrap()[key] = value;
        }
    }
    FabricOffer::decode(&json, "offer".into())
}

fn refusal(pointer: &str, value: Value) -> String {
    with(pointer, value.clone()).expect_err(&format!("{pointer} = {value}")).to_string()
}

fn one(offer: &mut FabricOffer) -> &mut OneSidedOffer {
    offer.one_sided.as_mut().unwrap()
}

fn two(offer: &mut FabricOffer) -> &mut TwoSidedOffer {
    offer.two_sided.as_mut().unwrap()
}

#[test]
fn an_offer_has_these_bytes() {
    let mut offer = offer_of_both("tcp", 1);
    two(&mut offer).lanes[0].endpoint.rail = 3;
    let expected = concat!(
        r#"{"fabric":"tcp","address":"here","max_message_bytes":4194304,"one_sided":{"immediate":true,"#,
        r#""control":{"address":{"slot":0},"sq_depth":512,"rq_depth":256},"#,
        r#""lanes":[{"address":{"slot":1},"sq_depth":512,"rq_depth":256}],"#,
        r#""control_ring":{"addr":4096,"key":1,"bytes":32768},"rings":[{"addr":8192,"key":2,"bytes":32768}],"#,
        r#""credit_page":{"addr":16,"key":9,"bytes":4096}},"two_sided":{"#,
        r#""control":{"address":{"slot":100},"sq_depth":512,"rq_depth":256},"#,
        r#""lanes":[{"address":{"slot":101},"sq_depth":512,"rq_depth":256,"rail":3,"posted":2}],"#,
        r#""slot_bytes":65536,"request_depth":256,"notify_window":1048576,"message_bytes":524288,"#,
        r#""credit_page":{"addr":32,"key":10,"bytes":1024}}}"#,
    );
    assert_eq!(serde_json::to_string(&offer).unwrap(), expected);
    let decoded = FabricOffer::decode(&serde_json::from_str(expected).unwrap(), "offer".into()).unwrap();
    assert_eq!(decoded, offer);
}

#[test]
fn a_part_that_is_absent_or_null_is_not_offered_and_one_of_the_two_must_be() {
    let only = |gone: &str| with(gone, json!(null)).unwrap();
    assert_eq!(only("/two_sided"), offer("tcp", 3));
    assert_eq!(only("/one_sided"), two_sided_offer("tcp", 3));
    let text = serde_json::to_string(&offer("tcp", 3)).unwrap();
    assert!(!text.contains("two_sided"), "{text}");
    let neither = json!({ "fabric": "tcp", "address": 1, "max_message_bytes": 4096, "one_sided": null });
    let text = FabricOffer::decode(&neither, "HELLO.offers[0]".into()).unwrap_err().to_string();
    assert_eq!(
        text,
        "HELLO.offers[0]: neither one_sided nor two_sided is there; an offer has at least one of them"
    );
    for wrong in [json!(1), json!([]), json!("yes"), json!(false)] {
        assert!(refusal("/two_sided", wrong.clone()).contains("offer.two_sided"), "{wrong}");
        assert!(refusal("/one_sided", wrong).contains("is not an object"));
    }
}

#[test]
fn what_a_two_sided_channel_cannot_work_with_is_refused_by_name_value_and_limit() {
    for (field, least, most) in [
        ("/two_sided/control/sq_depth", 8u64, 65_535u64),
        ("/two_sided/control/rq_depth", 2, 65_535),
        ("/two_sided/lanes/1/sq_depth", 2, 65_535),
        ("/two_sided/slot_bytes", 128, 1 << 24),
        ("/two_sided/request_depth", 1, 1 << 20),
        ("/two_sided/notify_window", 512 * 1024 + 64, 1 << 30),
        ("/two_sided/credit_page/bytes", 64, 1 << 30),
    ] {
        let path = field.replace("/lanes/1/", "/lanes[1]/").replace('/', ".");
        let range = format!("is outside {least}..={most}");
        for bad in [json!(least - 1), json!(most + 1), json!(0), json!(-1), json!(1u64 << 32)] {
            let text = refusal(field, bad.clone());
            assert!(text.starts_with(&format!("offer{path}: {bad} ")) && text.ends_with(&range), "{text}");
        }
        for bad in [json!(1.5), json!("64"), json!(null), json!(true), json!([]), json!({})] {
            let text = refusal(field, bad);
            let kind = format!("a whole number in {least}..={most}");
            assert!(text.starts_with(&format!("offer{path}: ")) && text.ends_with(&kind), "{text}");
        }
        for good in [least, most] {
            with(field, json!(good)).unwrap_or_else(|e| panic!("{field} = {good}: {e}"));
        }
    }
    let mut json = serde_json::to_value(offer_of_both("tcp", 3)).unwrap();
    json["two_sided"]["lanes"][2].as_object_mut().unwrap().remove("posted");
    let text = FabricOffer::decode(&json, "offer".into()).unwrap_err().to_string();
    assert_eq!(text, "offer.two_sided.lanes[2].posted is missing");
}

#[test]
fn messages_longer_than_the_window_or_the_protocol_takes_are_refused() {
    let text = refusal("/two_sided/message_bytes", json!((8 << 20) + 17));
    assert!(text.contains("two_sided.message_bytes: 8388625 is outside 1..=8388624"), "{text}");
    let text = refusal("/two_sided/message_bytes", json!(0));
    assert!(text.contains("two_sided.message_bytes: 0 is outside 1..=8388624"), "{text}");
    let text = refusal("/two_sided/message_bytes", json!(1 << 20));
    assert!(text.contains("two_sided.notify_window: 1048576 is outside 1048640..=1073741824"), "{text}");
}

#[test]
fn lanes_are_1_to_64_and_none_has_more_recvs_posted_than_its_depth() {
    let lanes = |count| serde_json::to_value(two(&mut offer_of_both("tcp", count)).lanes.clone()).unwrap();
    for (count, found) in [(0, "a list of 0"), (65, "a list of 65")] {
        let text = refusal("/two_sided/lanes", lanes(count));
        assert_eq!(text, format!("offer.two_sided.lanes: {found} is outside 1..=64"));
    }
    for (count, page) in [(1, 64), (64, 528)] {
        let mut offer = offer_of_both("tcp", count);
        let mut decode = |bytes| {
            two(&mut offer).credit_page.bytes = bytes;
            FabricOffer::decode(&serde_json::to_value(&offer).unwrap(), "offer".into())
        };
        decode(page).unwrap();
        let text = decode(page - 1).unwrap_err().to_string();
        let expected = format!("offer.two_sided.credit_page.bytes: {} is outside {page}..=", page - 1);
        assert!(text.starts_with(&expected), "{text}");
    }
    let text = refusal("/two_sided/lanes/1/posted", json!(257));
    assert_eq!(text, "offer.two_sided.lanes[1].posted: 257 is outside 0..=256");
    for good in [0, 256] {
        with("/two_sided/lanes/1/posted", json!(good)).unwrap();
    }
}

#[test]
fn recvs_of_both_parts_count_together() {
    let mut offer = offer_of_both("tcp", 8);
    one(&mut offer).lanes.iter_mut().for_each(|lane| lane.rq_depth = 65_535);
    two(&mut offer).lanes.iter_mut().for_each(|lane| lane.endpoint.rq_depth = 65_535);
    one(&mut offer).control.rq_depth = 8;
    two(&mut offer).control.rq_depth = 8;
    assert_eq!(offer.recvs(), MAX_SESSION_RECVS);
    let decode =
        |offer: &FabricOffer| FabricOffer::decode(&serde_json::to_value(offer).unwrap(), "offer".into());
    decode(&offer).unwrap();
    two(&mut offer).control.rq_depth = 9;
    let text = decode(&offer).unwrap_err().to_string();
    assert_eq!(text, "offer: a sum of rq_depth of 1048577 is outside 1..=1048576");
    offer.one_sided = None;
    decode(&offer).unwrap();
}

#[test]
fn negotiation_takes_the_minima_and_is_symmetric() {
    let (mut a, mut b) = (offer("tcp", 4), offer("tcp", 2));
    one(&mut a).lanes[0].rq_depth = 10;
    one(&mut b).lanes[1].sq_depth = 20;
    one(&mut b).rings[0].bytes = 1024;
    a.max_message_bytes = 8192;
    let agreed = negotiate(&a, &b).unwrap();
    let part = agreed.one_sided.as_ref().unwrap();
    assert_eq!(part.lanes, [Depths { sq_depth: 512, rq_depth: 10 }, Depths { sq_depth: 20, rq_depth: 256 }]);
    assert_eq!((part.ring_bytes.as_slice(), agreed.max_message_bytes), ([1024, 32 * 1024].as_slice(), 8192));
    assert_eq!((agreed.two_sided.is_none(), negotiate(&b, &a).unwrap()), (true, agreed));
    assert!(negotiate(&a, &offer("local", 2)).is_err());
}

#[test]
fn two_sided_parts_agree_on_minima_too_and_slots_fit_a_work_request() {
    let (mut a, mut b) = (offer_of_both("tcp", 3), two_sided_offer("tcp", 2));
    two(&mut a).lanes[1].endpoint.rq_depth = 7;
    two(&mut a).request_depth = 9;
    two(&mut b).control.sq_depth = 8;
    two(&mut b).message_bytes = 4096;
    two(&mut b).notify_window = 4096 + 64;
    let agreed = negotiate(&a, &b).unwrap();
    assert_eq!(
        (agreed.backends().to_string().as_str(), negotiate(&b, &a).unwrap()),
        ("two-sided", agreed.clone())
    );
    let expected = AgreedTwoSided {
        control: Depths { sq_depth: 8, rq_depth: 256 },
        lanes: vec![Depths { sq_depth: 512, rq_depth: 256 }, Depths { sq_depth: 512, rq_depth: 7 }],
        slot_bytes: 64 * 1024,
        request_depth: 9,
        notify_window: 4096 + 64,
        message_bytes: 4096,
    };
    assert_eq!(agreed.two_sided, Some(expected));
    a.max_message_bytes = 5000;
    assert_eq!(negotiate(&b, &a).unwrap().two_sided.unwrap().slot_bytes, 5000);
}

#[test]
fn recvs_that_were_told_are_posted_up_to_the_depth_agreed_on() {
    let (mut a, mut b) = (offer_of_both("tcp", 2), offer_of_both("tcp", 2));
    two(&mut a).lanes[0].posted = 200;
    two(&mut b).lanes[0].endpoint.rq_depth = 16;
    let agreed = negotiate(&a, &b).unwrap().two_sided.unwrap();
    let posted = |offer: &mut FabricOffer, lane| two(offer).posted(lane, &agreed);
    assert_eq!([posted(&mut a, 0), posted(&mut a, 1), posted(&mut b, 0), posted(&mut b, 1)], [16, 2, 2, 2]);
}

#[test]
fn offers_without_a_common_backend_are_refused_with_what_each_has_and_what_to_do() {
    let (one, two, both) = (offer("tcp", 1), two_sided_offer("tcp", 1), offer_of_both("tcp", 1));
    let text = |a, b| negotiate(a, b).unwrap_err().to_string();
    assert_eq!(
        text(&two, &one),
        "no common backend: here two-sided, there one-sided; set BATON_BACKEND alike on both"
    );
    assert_eq!(
        text(&one, &two),
        "no common backend: here one-sided, there two-sided; set BATON_BACKEND alike on both"
    );
    for (a, b, common) in [
        (&both, &both, "one-sided and two-sided"),
        (&both, &one, "one-sided"),
        (&two, &both, "two-sided"),
        (&one, &one, "one-sided"),
        (&two, &two, "two-sided"),
    ] {
        assert_eq!(negotiate(a, b).unwrap().backends().to_string(), common);
    }
}

#[test]
fn words_of_backends_that_are_not_known_do_not_count() {
    let of = |words: &[&str]| Backends::from_words(words);
    assert_eq!(of(&["two-sided", "one-sided"]).words().collect::<Vec<_>>(), [ONE_SIDED, TWO_SIDED]);
    assert_eq!(of(&["ONE-SIDED", "three-sided"]), Backends::default());
    let text = of(&["one-sided"]).common(of(&["three-sided"])).unwrap_err().to_string();
    assert!(text.contains("here one-sided, there none that is known"), "{text}");
}

#[test]
fn immediates_need_both_sides_and_send_mode_bounds_the_receives() {
    let (both, mut without) = (offer("tcp", 2), offer("tcp", 2));
    one(&mut without).immediate = false;
    let agree = |a, b| negotiate(a, b).unwrap().one_sided.unwrap();
    assert_eq!(agree(&both, &both).notify, NotifyMode::Immediate);
    for (a, b) in [(&both, &without), (&without, &both), (&without, &without)] {
        let agreed = agree(a, b);
        assert_eq!(agreed.notify, NotifyMode::Send);
        assert!(agreed.lanes.iter().chain([&agreed.control]).all(|depths| depths.rq_depth == 64));
        assert_eq!(agreed.control.sq_depth, 512);
    }
}

#[test]
fn an_offer_that_says_nothing_of_immediates_has_them_and_only_a_truth_value_says_otherwise() {
    let told = |value: Option<Value>| {
        let mut offer = serde_json::to_value(offer("tcp", 1)).unwrap();
        let map = offer["one_sided"].as_object_mut().unwrap();
        map.remove("immediate");
        map.extend(value.map(|value| ("immediate".to_owned(), value)));
        FabricOffer::decode(&offer, "offer".into())
    };
    assert!(told(None).unwrap().one_sided.unwrap().immediate);
    assert!(!told(Some(json!(false))).unwrap().one_sided.unwrap().immediate);
    for wrong in [json!(0), json!("true"), json!(null), json!([])] {
        let text = told(Some(wrong)).unwrap_err().to_string();
        assert!(text.contains("offer.one_sided.immediate") && text.contains("true or false"), "{text}");
    }
}

/// The channel that one side would make of what was agreed.
fn setup(own: &TwoSidedOffer, peer: &TwoSidedOffer, agreed: &AgreedTwoSided) -> TwoSetup {
    let lane = |(nth, depths): (usize, &Depths)| TwoLane {
        endpoint: baton_fabric::EndpointId { slot: nth as u32, generation: 1 },
        sq_depth: depths.sq_depth,
        rq_depth: depths.rq_depth,
        posted: (0..own.posted(nth, agreed)).map(|n| SlotId { slab: SlabId(n), index: 0 }).collect(),
        peer_posted: peer.posted(nth, agreed),
    };
    TwoSetup {
        peer: PeerKey(1),
        session: SessionId(1),
        epoch: Epoch(1),
        control: baton_fabric::EndpointId { slot: 99, generation: 1 },
        control_sq_depth: agreed.control.sq_depth,
        control_rq_depth: agreed.control.rq_depth,
        lanes: agreed.lanes.iter().enumerate().map(lane).collect(),
        slot_bytes: agreed.slot_bytes,
        peer_credit_addr: peer.credit_page.addr,
        peer_credit_key: peer.credit_page.key,
        send_slots: 1,
        max_sge: 1,
        data_crc: false,
        limits: TwoLimits {
            request_depth: agreed.request_depth,
            notify_window: agreed.notify_window,
            message_bytes: agreed.message_bytes,
            ..TwoLimits::default()
        },
    }
}

proptest! {
    /// Whatever two decodable offers say, both sides agree on the same, and a channel can be made of it.
    #[test]
    fn what_any_two_offers_agree_on_makes_a_channel_on_both_sides(a in any_offer(), b in any_offer()) {
        let b = FabricOffer { fabric: a.fabric.clone(), ..b };
        let agreed = match negotiate(&a, &b) {
            Ok(agreed) => agreed,
            Err(e) => {
                prop_assert!(e.to_string().contains("no common backend"), "{}", e);
                prop_assert!(a.backends().common(b.backends()).is_err());
                return Ok(());
            }
        };
        prop_assert_eq!(&negotiate(&b, &a).unwrap(), &agreed);
        if let Some(agreed) = &agreed.two_sided {
            let (a, b) = (a.two_sided.as_ref().unwrap(), b.two_sided.as_ref().unwrap());
            let sides = [setup(a, b, agreed), setup(b, a, agreed)];
            for side in &sides {
                prop_assert_eq!(side.check(), Ok(()));
            }
            for (ours, theirs) in sides[0].lanes.iter().zip(&sides[1].lanes) {
                prop_assert_eq!(ours.posted.len() as u32, theirs.peer_posted);
                prop_assert_eq!(theirs.posted.len() as u32, ours.peer_posted);
            }
        }
    }
}

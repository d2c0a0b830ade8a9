use baton_fabric::{Keys, RegionKeys};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::samples::*;
use super::*;
use crate::ids::{Epoch, Instance, RegionId};

/// HELLO as JSON with one value replaced.
fn hello_with(pointer: &str, value: Value) -> Vec<u8> {
    let hello = Message::Hello(Box::new(hello(Instance([1; 16]), Instance([2; 16]))));
    let mut object: Value = serde_json::from_slice(&hello.encode()).unwrap();
    *object.pointer_mut(pointer).unwrap() = value;
    object.to_string().into_bytes()
}

#[test]
fn a_depth_outside_of_1_to_65535_is_refused_by_name_value_and_limit() {
    for field in ["rq_depth", "sq_depth"] {
        let pointer = format!("/offers/1/one_sided/lanes/2/{field}");
        for (bad, shown) in [
            (json!(0), "0"),
            (json!(-1), "-1"),
            (json!(65_536), "65536"),
            (json!(1u64 << 32), "4294967296"),
            (json!(1.5), "1.5"),
            (json!("64"), "\"64\""),
            (json!(null), "null"),
            (json!(true), "true"),
            (json!([]), "[]"),
            (json!({}), "an object"),
            (json!([64]), "a list of 1"),
        ] {
            let text = Message::decode(&hello_with(&pointer, bad)).unwrap_err().to_string();
            assert!(
                text.starts_with(&format!("HELLO.offers[1].one_sided.lanes[2].{field}: {shown} ")),
                "{text}"
            );
            assert!(text.contains("1..=65535"), "{text}");
        }
        for good in [1, 64, 65_535] {
            Message::decode(&hello_with(&pointer, json!(good))).unwrap();
        }
    }
}

#[test]
fn every_required_field_of_hello_is_missed_by_name() {
    let message = Message::Hello(Box::new(hello(Instance([1; 16]), Instance([2; 16]))));
    let object: Value = serde_json::from_slice(&message.encode()).unwrap();
    let optional = ["session"];
    for key in object.as_object().unwrap().keys().filter(|k| !optional.contains(&k.as_str())) {
        let mut without = object.clone();
        without.as_object_mut().unwrap().remove(key);
        let text = Message::decode(without.to_string().as_bytes()).unwrap_err().to_string();
        assert!(text.contains(&format!("{key} is missing")), "{key}: {text}");
    }
}

#[test]
fn a_field_that_contradicts_its_rule_is_refused_by_name() {
    for (pointer, value, expected) in [
        ("/name", json!(""), "HELLO.name"),
        ("/name", json!("a\0b"), "NUL at byte 1"),
        ("/name", json!("x".repeat(256)), "a string of 256 bytes is outside 1..=255"),
        ("/instance", json!("01"), "HELLO.instance"),
        ("/nonce", json!("AA".repeat(16)), "lower-case hex"),
        ("/attempt", json!(-5), "HELLO.attempt: -5"),
        ("/session", json!(0), "HELLO.session: 0 is outside 1..="),
        ("/last_epoch", json!(u32::MAX), "HELLO.last_epoch: 4294967295 is outside 0..=4294967294"),
        ("/progress", json!("maybe"), "\"maybe\" is neither"),
        ("/protocol/min", json!(2), "2 is larger than max 1"),
        ("/offers", json!([]), "HELLO.offers: a list of 0 is outside 1..=8"),
        (
            "/offers/0/one_sided/lanes",
            json!([]),
            "HELLO.offers[0].one_sided.lanes: a list of 0 is outside 1..=64",
        ),
        ("/offers/0/one_sided/rings", json!([{"addr": 0, "key": 1, "bytes": 64}]), "1 rings for 2 lanes"),
        ("/offers/1/fabric", json!("local"), "offered twice"),
        (
            "/offers/1/one_sided/credit_page/bytes",
            json!(64),
            "one_sided.credit_page.bytes: 64 is outside 80..=",
        ),
        ("/offers/0/one_sided/credit_page/addr", json!(u64::MAX), "overflows"),
        ("/features", json!(["x".repeat(33)]), "HELLO.features[0]: a string of 33 bytes is outside 1..=32"),
        ("/type", json!("HOWDY"), "\"HOWDY\" is unknown"),
    ] {
        let text = Message::decode(&hello_with(pointer, value)).unwrap_err().to_string();
        assert!(text.contains(expected), "{pointer}: {text}");
    }
}

#[test]
fn the_sum_of_all_recvs_of_a_session_is_limited() {
    let mut message = hello(Instance([1; 16]), Instance([2; 16]));
    let mut big = offer("tcp", 16);
    let part = big.one_sided.as_mut().unwrap();
    part.lanes.iter_mut().for_each(|lane| lane.rq_depth = 65_535);
    part.control.rq_depth = 16;
    message.offers = vec![big];
    assert_eq!(message.offers[0].recvs(), MAX_SESSION_RECVS);
    let decode = |hello: &Hello| Message::decode(&Message::Hello(Box::new(hello.clone())).encode());
    decode(&message).unwrap();
    message.offers[0].one_sided.as_mut().unwrap().control.rq_depth = 17;
    let text = decode(&message).unwrap_err().to_string();
    assert!(text.contains("HELLO.offers[0]: a sum of rq_depth of 1048577 is outside 1..=1048576"), "{text}");
}

#[test]
fn unknown_keys_and_unknown_refusal_codes_do_not_matter() {
    let bytes = Message::Hello(Box::new(hello(Instance([1; 16]), Instance([2; 16])))).encode();
    let mut object: Value = serde_json::from_slice(&bytes).unwrap();
    object["new_in_version_9"] = json!({"deep": [1]});
    object["offers"][0]["one_sided"]["lanes"][0]["colour"] = json!("red");
    let decoded = Message::decode(object.to_string().as_bytes()).unwrap();
    assert_eq!(decoded.encode(), bytes);
    let error = br#"{"type":"ERROR","code":"TOO_TIRED","text":"later"}"#;
    let Message::Error(refusal) = Message::decode(error).unwrap() else { panic!("no ERROR") };
    assert_eq!((refusal.code, refusal.text.as_str()), (ErrorCode::Unknown, "later"));
}

#[test]
fn agent_names_are_utf8_of_1_to_255_bytes_without_nul() {
    assert_eq!(check_name(b""), Err(NameError::Empty));
    assert_eq!(check_name(&[b'x'; 255]).unwrap().len(), 255);
    assert_eq!(check_name(&[b'x'; 256]), Err(NameError::TooLong(256)));
    assert_eq!(check_name(b"ab\0"), Err(NameError::Nul(2)));
    assert_eq!(check_name(b"a\xff"), Err(NameError::NotUtf8(1)));
    assert_eq!(check_name("prefill-ü".as_bytes()), Ok("prefill-ü"));
}

#[test]
fn connection_information_never_shows_its_key() {
    let info = conn_info();
    let key = field::hex(info.key.expose());
    assert!(!format!("{info:?}").contains("abab"));
    assert!(!format!("{info:?}").contains("171, 171"));
    // Not even when the key is what is wrong.
    let payload = info.encode().unwrap()[18..].to_vec();
    let broken = String::from_utf8(payload).unwrap().replace(&key, &key.to_uppercase());
    let text = ConnInfo::decode(&sealed_conn_info(broken.as_bytes())).unwrap_err().to_string();
    assert!(text.contains("connection information.key") && !text.to_lowercase().contains("abab"), "{text}");
}

fn sealed_conn_info(payload: &[u8]) -> Vec<u8> {
    let mut bytes = b"BATONCI\0\x01\0".to_vec();
    bytes.extend_from_slice(&(payload.len() as u32).to_le_bytes());
    bytes.extend_from_slice(&crc32c::crc32c(payload).to_le_bytes());
    bytes.extend_from_slice(payload);
    bytes
}

#[test]
fn each_defect_of_connection_information_has_its_own_error() {
    let good = conn_info().encode().unwrap();
    let with = |edit: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = good.clone();
        edit(&mut bytes);
        ConnInfo::decode(&bytes).unwrap_err()
    };
    assert_eq!(with(&|b| b[0] = b'X'), ConnInfoError::Magic);
    assert_eq!(with(&|b| b[8] = 2), ConnInfoError::Version(2));
    assert_eq!(with(&|b| b.push(0)), ConnInfoError::Trailing(1));
    assert_eq!(with(&|b| *b.last_mut().unwrap() ^= 1), ConnInfoError::Checksum);
    assert_eq!(
        with(&|b| b.resize(MAX_CONN_INFO_BYTES + 1, 0)),
        ConnInfoError::TooLong(MAX_CONN_INFO_BYTES + 1)
    );
    assert!(matches!(ConnInfo::decode(b""), Err(ConnInfoError::Truncated { have: 0, .. })));
    assert!(matches!(ConnInfo::decode(b"BATON"), Err(ConnInfoError::Truncated { have: 5, .. })));
    assert!(matches!(ConnInfo::decode(&sealed_conn_info(b"[")), Err(ConnInfoError::Json(_))));
    assert!(matches!(ConnInfo::decode(&sealed_conn_info(b"[]")), Err(ConnInfoError::Field(_))));
    let mut bad = conn_info();
    bad.name = "a\0".into();
    assert_eq!(bad.encode(), Err(ConnInfoError::Name(NameError::Nul(1))));
    bad = conn_info();
    bad.name = "n".repeat(300);
    assert!(bad.encode().unwrap_err().to_string().contains("a string of 300 bytes is outside 1..=255"));
    bad = conn_info();
    bad.candidates = vec!["10.0.0.1:0".into()];
    assert_eq!(bad.encode(), Err(ConnInfoError::Candidate("10.0.0.1:0".into())));
    bad.candidates = vec![];
    assert!(bad.encode().unwrap_err().to_string().contains("candidates: a list of 0 is outside 1..=32"));
    bad = conn_info();
    bad.fabrics = vec!["f".repeat(32); 64];
    bad.backends = bad.fabrics.clone();
    bad.candidates = vec!["1.1.1.1:1".into(); 32];
    bad.encode().unwrap();
}

#[test]
fn addresses_of_fabrics_are_bounded_and_may_be_absent() {
    let mut object: Value = serde_json::from_slice(&conn_info().encode().unwrap()[18..]).unwrap();
    let mut decode = |addresses: Value| {
        object["addresses"] = addresses;
        ConnInfo::decode(&sealed_conn_info(object.to_string().as_bytes()))
    };
    assert!(decode(json!(null)).unwrap().addresses.is_empty());
    let odd = json!({ "tcp": 7, "unheard-of": { "deep": [1, null] } });
    assert_eq!(json!(decode(odd.clone()).unwrap().addresses), odd);
    let fits = json!({ "tcp": "x".repeat(MAX_FABRIC_ADDRESS_BYTES - 2) });
    decode(fits).unwrap();
    for (bad, shown) in [
        (json!(["tcp"]), "addresses: a list of 1 is not an object"),
        (
            json!({ "tcp": "x".repeat(MAX_FABRIC_ADDRESS_BYTES - 1) }),
            "[\"tcp\"]: an address of 4097 bytes is outside 1..=4096",
        ),
        (json!({ "": 1 }), "addresses: a name of 0 bytes is outside 1..=32"),
        (json!({ "n".repeat(33): 1 }), "addresses: a name of 33 bytes is outside 1..=32"),
        ((0..9).map(|n| (n.to_string(), json!(n))).collect(), "addresses: an object of 9 is outside 0..=8"),
    ] {
        let text = decode(bad).unwrap_err().to_string();
        assert!(text.contains(shown), "{text}");
    }
    object.as_object_mut().unwrap().remove("addresses");
    assert!(ConnInfo::decode(&sealed_conn_info(object.to_string().as_bytes())).unwrap().addresses.is_empty());
}

#[test]
fn a_rail_is_0_to_15_and_0_where_none_is_told() {
    let decode = |rail: Option<Value>| {
        let hello = Message::Hello(Box::new(hello(Instance([1; 16]), Instance([2; 16]))));
        let mut object: Value = serde_json::from_slice(&hello.encode()).unwrap();
        assert!(object["offers"][0]["one_sided"]["control"].get("rail").is_none());
        if let Some(rail) = rail {
            object["offers"][0]["one_sided"]["lanes"][1]["rail"] = rail;
        }
        Message::decode(object.to_string().as_bytes())
    };
    let rail = |message| match message {
        Message::Hello(hello) => hello.offers[0].one_sided.as_ref().unwrap().lanes[1].rail,
        other => panic!("{other:?}"),
    };
    assert_eq!(rail(decode(None).unwrap()), 0);
    assert_eq!(rail(decode(Some(json!(15))).unwrap()), 15);
    for bad in [json!(16), json!(-1), json!(256), json!("1"), json!(1.5)] {
        let text = decode(Some(bad)).unwrap_err().to_string();
        assert!(text.contains("HELLO.offers[0].one_sided.lanes[1].rail"), "{text}");
    }
}

#[test]
fn candidates_are_numeric_addresses_with_a_port() {
    for (text, scope) in [
        ("127.0.0.1:1", None),
        ("[::1]:65535", None),
        ("[fe80::1%eth0]:80", Some("eth0")),
        ("[fe80::1%3]:80", Some("3")),
    ] {
        assert_eq!(parse_candidate(text).unwrap().scope.as_deref(), scope, "{text}");
    }
    for text in [
        "",
        "host:1",
        "1.2.3.4",
        "1.2.3.4:0",
        "1.2.3.4:65536",
        "::1:80",
        "[::1]",
        "[::1%]:8",
        "[1.2.3.4]:8",
        "[::1]:+8",
    ] {
        assert_eq!(parse_candidate(text), None, "{text}");
    }
}

#[test]
fn an_exported_region_has_these_bytes() {
    let rails = FabricKeys {
        fabric: "verbs".into(),
        rails: 2,
        segment_bytes: 0xC0000,
        keys: [0x11, 0x12, 0x21, 0x22].into(),
    };
    let blob = RegionBlob { fabrics: vec![one_key("tcp", 0x0a0b), rails], ..region_blob() };
    let mut expected = b"BREG\x02\0\0\0".to_vec();
    expected.extend_from_slice(&[3; 16]);
    expected.extend_from_slice(&[8, 7, 6, 5, 4, 3, 2, 1]);
    expected.extend_from_slice(&[0, 0, 0, 0, 0, 0x7f, 0, 0]);
    expected.extend_from_slice(&[0, 0, 0x10, 0, 0, 0, 0, 0]);
    expected.extend_from_slice(&[5, 0, 0, 0, 0, 0, 0, 0]);
    expected.extend_from_slice(&[0, 1, 2, 0]);
    expected.extend_from_slice(b"\x03tcp\x01\xff\xff\xff\xff\xff\xff\xff\xff\x0b\x0a\0\0\0\0\0\0");
    expected.extend_from_slice(b"\x05verbs\x02\0\0\x0c\0\0\0\0\0");
    expected.extend_from_slice(b"\x11\0\0\0\0\0\0\0\x12\0\0\0\0\0\0\0\x21\0\0\0\0\0\0\0\x22\0\0\0\0\0\0\0");
    expected.extend_from_slice(&crc32c::crc32c(&expected).to_le_bytes());
    assert_eq!(blob.encode().unwrap(), expected);
    assert_eq!((blob.key("tcp", 0, 0xF_FFFF), blob.key("local", 0, 0)), (Some(0x0a0b), None));
    assert_eq!((blob.key("tcp", 1, 0), blob.key("tcp", 0, 0x10_0000)), (None, None));
    let verbs = |rail, offset| blob.key("verbs", rail, offset);
    assert_eq!([verbs(0, 0), verbs(0, 0xB_FFFF), verbs(0, 0xC_0000)], [Some(0x11), Some(0x11), Some(0x12)]);
    assert_eq!([verbs(1, 0), verbs(1, 0xF_FFFF), verbs(2, 0)], [Some(0x21), Some(0x22), None]);
}

#[test]
fn each_defect_of_an_exported_region_has_its_own_error() {
    let good = region_blob().encode().unwrap();
    let resealed = |edit: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = good[..good.len() - 4].to_vec();
        edit(&mut bytes);
        bytes.extend_from_slice(&crc32c::crc32c(&bytes).to_le_bytes());
        RegionBlob::decode(&bytes).unwrap_err()
    };
    assert_eq!(resealed(&|b| b[0] = 0), RegionBlobError::Magic);
    assert_eq!(resealed(&|b| b[4] = 9), RegionBlobError::Version(9));
    assert_eq!(resealed(&|b| b[6] = 1), RegionBlobError::Reserved);
    assert_eq!(resealed(&|b| b[56] = 2), RegionBlobError::Kind(2));
    assert_eq!(resealed(&|b| b[57] = 4), RegionBlobError::Access(4));
    assert_eq!(resealed(&|b| b[58] = 9), RegionBlobError::Fabrics(9));
    assert_eq!(resealed(&|b| b[59] = 1), RegionBlobError::Reserved);
    assert_eq!(resealed(&|b| b[61] = b' '), RegionBlobError::FabricName);
    assert!(matches!(resealed(&|b| b[32..40].fill(0xff)), RegionBlobError::Bounds { base: u64::MAX, .. }));
    assert!(matches!(resealed(&|b| b[40..48].fill(0)), RegionBlobError::Bounds { len: 0, .. }));
    let mut bytes = good.clone();
    bytes.push(0);
    assert_eq!(RegionBlob::decode(&bytes), Err(RegionBlobError::Trailing(1)));
    let twice = RegionBlob { fabrics: vec![one_key("tcp", 1), one_key("tcp", 2)], ..region_blob() };
    assert_eq!(twice.encode(), Err(RegionBlobError::FabricName));
    // The first entry is "local": its rails stand at 66, its segments' length at 67.
    assert_eq!(resealed(&|b| b[66] = 0), RegionBlobError::Rails(0));
    assert_eq!(resealed(&|b| b[66] = 17), RegionBlobError::Rails(17));
    let segments = |bytes: u64| resealed(&|b| b[67..75].copy_from_slice(&bytes.to_le_bytes()));
    for segment_bytes in [0, 1 << 20, u64::MAX - 1] {
        assert_eq!(segments(segment_bytes), RegionBlobError::SegmentBytes { segment_bytes, len: 1 << 20 });
    }
    assert_eq!(segments(255), RegionBlobError::TooManyKeys { rails: 1, segments: 4113 });
    // 4096 keys are permitted, but these bytes do not hold them.
    assert!(matches!(segments(256), RegionBlobError::Truncated(_)));
}

#[test]
fn an_exported_region_that_does_not_fit_its_own_numbers_is_not_encoded() {
    let encode = |keys: FabricKeys| RegionBlob { fabrics: vec![keys], ..region_blob() }.encode();
    let missing = FabricKeys { rails: 2, ..one_key("tcp", 1) };
    assert_eq!(encode(missing), Err(RegionBlobError::KeyCount { found: 1, count: 2 }));
    let unclear = FabricKeys { segment_bytes: 1 << 20, ..one_key("tcp", 1) };
    let len = 1 << 20;
    assert_eq!(encode(unclear), Err(RegionBlobError::SegmentBytes { segment_bytes: len, len }));
    // A fabric's own way of saying "one segment" becomes the blob's.
    let made =
        FabricKeys::new("tcp", len, &RegionKeys { segment_bytes: len, ..RegionKeys::whole(Keys::default()) });
    assert_eq!(made, one_key("tcp", 0));
}

#[test]
fn a_frame_longer_than_64_kib_is_refused_from_its_length_alone() {
    let mut reader = FrameReader::new();
    reader.feed(&65_537u32.to_le_bytes());
    assert_eq!(reader.next_frame(), Err(FrameError::TooLong(65_537)));
    assert_eq!(reader.next_frame(), Err(FrameError::TooLong(65_537)));
    let mut reader = FrameReader::new();
    reader.feed(b"GET / HTTP/1.1\r\n");
    assert!(reader.next_frame().unwrap_err().to_string().contains("not a Baton peer"));
    let mut reader = FrameReader::new();
    reader.feed(&32u32.to_le_bytes());
    assert_eq!(reader.next_frame(), Err(FrameError::TooShort(32)));
    assert_eq!(encode_frame(&[0; 65_537]), Err(FrameError::TooLong(65_537)));
    assert_eq!(encode_frame(&[0; 65_536]).unwrap().len(), 65_540);
}

#[test]
fn a_revoke_of_too_many_regions_is_refused_and_the_largest_fits_a_frame() {
    let revoke = |n| LifelineFrame::Revoke { id: 1, regions: vec![RegionId(u64::MAX); n] };
    assert!(revoke(MAX_REVOKE_REGIONS).encode().unwrap().len() + MAC_BYTES <= MAX_FRAME_BYTES);
    let error = revoke(MAX_REVOKE_REGIONS + 1).encode();
    assert_eq!(error, Err(LifelineFrameError::TooManyRegions(MAX_REVOKE_REGIONS + 1)));
}

#[test]
fn long_texts_are_cut_at_a_character() {
    let fence = LifelineFrame::Fence { epoch: Epoch(1), reason: "ü".repeat(600) + "x" };
    let LifelineFrame::Fence { reason, .. } = LifelineFrame::decode(&fence.encode().unwrap()).unwrap() else {
        panic!("no FENCE")
    };
    assert_eq!(reason, "ü".repeat(512));
}

proptest! {
    #[test]
    fn messages_survive_the_wire(message in any_message()) {
        prop_assert_eq!(Message::decode(&message.encode()).unwrap(), message);
    }

    #[test]
    fn a_truncated_message_is_an_error(message in any_message(), at in any::<prop::sample::Index>()) {
        let bytes = message.encode();
        prop_assert!(Message::decode(&bytes[..at.index(bytes.len())]).is_err());
    }

    #[test]
    fn lifeline_frames_survive_the_wire(frame in any_lifeline_frame(), at in any::<prop::sample::Index>()) {
        let bytes = frame.encode().unwrap();
        prop_assert_eq!(LifelineFrame::decode(&bytes).unwrap(), frame);
        prop_assert!(LifelineFrame::decode(&bytes[..at.index(bytes.len())]).is_err());
    }

    #[test]
    fn connection_information_survives_the_wire(info in any_conn_info(), at in any::<prop::sample::Index>()) {
        let bytes = info.encode().unwrap();
        prop_assert_eq!(ConnInfo::decode(&bytes).unwrap(), info);
        prop_assert!(ConnInfo::decode(&bytes[..at.index(bytes.len())]).is_err());
    }

    #[test]
    fn a_changed_bit_in_connection_information_is_an_error(
        info in any_conn_info(),
        at in any::<prop::sample::Index>(),
        bit in 0..8u8,
    ) {
        let mut bytes = info.encode().unwrap();
        let index = at.index(bytes.len());
        bytes[index] ^= 1 << bit;
        prop_assert!(ConnInfo::decode(&bytes).is_err());
    }

    #[test]
    fn exported_regions_survive_the_wire(
        blob in any_region_blob(),
        at in any::<prop::sample::Index>(),
        bit in 0..8u8,
    ) {
        let bytes = blob.encode().unwrap();
        prop_assert_eq!(&blob.encode().unwrap(), &bytes);
        prop_assert_eq!(RegionBlob::decode(&bytes).unwrap(), blob);
        let index = at.index(bytes.len());
        prop_assert!(RegionBlob::decode(&bytes[..index]).is_err());
        let mut flipped = bytes;
        flipped[index] ^= 1 << bit;
        prop_assert!(RegionBlob::decode(&flipped).is_err());
    }

    #[test]
    fn no_bytes_make_a_decoder_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let _ = Message::decode(&bytes);
        let _ = LifelineFrame::decode(&bytes);
        let _ = ConnInfo::decode(&bytes);
        let _ = RegionBlob::decode(&bytes);
        let _ = ConnInfo::decode(&sealed_conn_info(&bytes));
        let mut reader = FrameReader::new();
        reader.feed(&bytes);
        while let Ok(Some(_)) = reader.next_frame() {}
    }

    #[test]
    fn no_replaced_value_makes_a_decoder_panic(
        message in any_message(),
        which in any::<prop::sample::Index>(),
        value in prop_oneof![
            Just(json!(null)), Just(json!([])), Just(json!({})), Just(json!("")), any::<i64>().prop_map(|n| json!(n)),
            any::<u64>().prop_map(|n| json!(n)), any::<f64>().prop_map(|n| json!(n)), "\\PC{0,40}".prop_map(|s| json!(s)),
        ],
    ) {
        let mut object: Value = serde_json::from_slice(&message.encode()).unwrap();
        let keys: Vec<String> = object.as_object().unwrap().keys().cloned().collect();
        object[which.get(&keys)] = value;
        if let Ok(decoded) = Message::decode(object.to_string().as_bytes()) {
            prop_assert_eq!(Message::decode(&decoded.encode()).unwrap(), decoded);
        }
    }

    #[test]
    fn frames_come_out_whole_whatever_the_cuts(
        bodies in prop::collection::vec(prop::collection::vec(any::<u8>(), 33..200), 1..8),
        cuts in prop::collection::vec(1..97usize, 1..9),
    ) {
        let stream: Vec<u8> = bodies.iter().flat_map(|body| encode_frame(body).unwrap()).collect();
        let (mut reader, mut out, mut rest) = (FrameReader::new(), Vec::new(), stream.as_slice());
        for cut in cuts.iter().cycle() {
            if rest.is_empty() { break; }
            let (head, tail) = rest.split_at((*cut).min(rest.len()));
            reader.feed(head);
            while let Some(body) = reader.next_frame().unwrap() {
                out.push(body.to_vec());
            }
            rest = tail;
        }
        prop_assert_eq!(out, bodies);
        prop_assert_eq!(reader.pending_bytes(), 0);
    }
}

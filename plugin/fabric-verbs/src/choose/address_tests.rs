use proptest::prelude::*;
use serde_json::json;

use super::*;

fn any_rail() -> impl Strategy<Value = PeerRail> {
    let kind = prop_oneof![Just(GidType::InfiniBand), Just(GidType::RoceV1), Just(GidType::RoceV2)];
    let mtu = (0usize..5).prop_map(|i| Mtu::ALL[i]);
    let gid = prop_oneof![
        any::<[u8; 16]>().prop_map(Gid),
        any::<[u8; 4]>().prop_map(|ip| Gid::from(std::net::IpAddr::from(ip))),
    ];
    (0..MAX_RAILS as u8, gid, kind, 1u16..=0xbfff, mtu, proptest::option::of(0u8..=32))
        .prop_filter("a GID that names somebody", |(_, gid, ..)| gid.scope() != Scope::Nobody)
        .prop_map(|(index, gid, kind, lid, mtu, prefix_len)| PeerRail {
            index,
            gid,
            kind,
            lid,
            mtu,
            prefix_len,
        })
}

fn any_endpoint() -> impl Strategy<Value = EndpointAddress> {
    (1u32..1 << 24, 0u32..1 << 24, any_rail(), 1u32..=1 << 31, any::<u8>(), any::<u8>()).prop_map(
        |(qpn, psn, rail, max_message_bytes, read_responder, read_initiator)| EndpointAddress {
            qpn,
            psn,
            rail,
            max_message_bytes,
            read_responder,
            read_initiator,
        },
    )
}

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        ".{0,80}".prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 24, 6, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            proptest::collection::btree_map("(rails|rail|gid|qpn|x)", inner, 0..5)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

const FIELDS: [&str; 9] =
    ["qpn", "psn", "rail", "gid", "type", "mtu", "max_message_bytes", "read_responder", "read_initiator"];

proptest! {
    #[test]
    fn an_endpoint_comes_back_as_it_was_and_what_is_unknown_is_ignored(address in any_endpoint()) {
        let mut value = address.to_value();
        prop_assert_eq!(EndpointAddress::parse(&value), Ok(address.clone()));
        value["of a later version"] = json!([1, 2]);
        prop_assert_eq!(EndpointAddress::parse(&value), Ok(address));
    }

    #[test]
    fn a_fabric_comes_back_as_it_was(rails in proptest::collection::vec(any_rail(), 1..=MAX_RAILS)) {
        let rails = rails.into_iter().enumerate();
        let address = FabricAddress { rails: rails.map(|(i, rail)| PeerRail { index: i as u8, ..rail }).collect() };
        prop_assert_eq!(FabricAddress::parse(&address.to_value()), Ok(address));
    }

    /// Any value in any field is either within its limits and kept exactly, or refused under the field's name.
    #[test]
    fn a_field_is_kept_exactly_or_refused_by_name(address in any_endpoint(), field in 0usize..9, with in any_json()) {
        let field = FIELDS[field];
        let mut value = address.to_value();
        value[field] = with.clone();
        match EndpointAddress::parse(&value) {
            Ok(read) => prop_assert_eq!(&read.to_value()[field], &with),
            Err(error) => prop_assert_eq!(error.field, field),
        }
    }

    #[test]
    fn no_json_makes_the_parsers_panic_and_errors_stay_short(value in any_json()) {
        for error in [EndpointAddress::parse(&value).err(), FabricAddress::parse(&value).err()].into_iter().flatten() {
            prop_assert!(error.to_string().len() < 300, "{}", error);
        }
    }
}

fn endpoint() -> Value {
    json!({
        "qpn": 17, "psn": 9_000_000, "rail": 0, "gid": "00000000000000000000ffff0a4d0001", "type": "roce_v2",
        "lid": 0, "mtu": 1024, "prefix_len": 24, "max_message_bytes": 8_388_608, "read_responder": 128, "read_initiator": 16
    })
}

fn error(field: &str, with: Value) -> String {
    let mut value = endpoint();
    value[field] = with;
    EndpointAddress::parse(&value).expect_err(field).to_string()
}

#[test]
fn numbers_beyond_their_limits_or_of_another_type_are_refused_and_never_cast() {
    let limits = [
        ("qpn", 1, 16_777_215),
        ("psn", 0, 16_777_215),
        ("rail", 0, MAX_RAILS as u64 - 1),
        ("lid", 0, 49_151),
        ("prefix_len", 0, 32),
        ("max_message_bytes", 1, 2_147_483_648_u64),
        ("read_responder", 0, 255),
        ("read_initiator", 0, 255),
    ];
    EndpointAddress::parse(&endpoint()).expect("valid");
    for (field, low, high) in limits {
        for right in [low, high] {
            let mut value = endpoint();
            value[field] = right.into();
            EndpointAddress::parse(&value).expect(field);
        }
        let wrong = [
            json!(high + 1),
            json!(-1),
            json!(1.5),
            json!("64"),
            json!(true),
            json!([]),
            json!(null),
            json!({}),
        ];
        for wrong in wrong {
            assert_eq!(
                error(field, wrong.clone()),
                format!(
                    "endpoint address: {field} is {wrong}; a whole number from {low} to {high} is wanted"
                )
            );
        }
        if low > 0 {
            assert!(error(field, json!(0)).contains(&format!("{field} is 0; a whole number from {low}")));
        }
    }
}

#[test]
fn a_field_that_is_missing_is_named() {
    for field in [
        "qpn",
        "psn",
        "rail",
        "gid",
        "type",
        "lid",
        "mtu",
        "max_message_bytes",
        "read_responder",
        "read_initiator",
    ] {
        let mut value = endpoint();
        value.as_object_mut().expect("an object").remove(field);
        let text = EndpointAddress::parse(&value).expect_err(field).to_string();
        assert!(text.starts_with(&format!("endpoint address: {field} is missing; ")), "{text}");
    }
    let mut value = endpoint();
    value.as_object_mut().expect("an object").remove("prefix_len");
    assert_eq!(EndpointAddress::parse(&value).expect("optional").rail.prefix_len, None);
}

#[test]
fn gids_mtus_and_types_are_of_their_kind() {
    for wrong in ["", "fe80::1", "0000000000000000000000000000000", "+0000000000000000000ffff0a4d0001"] {
        assert!(error("gid", json!(wrong)).contains("32 hexadecimal digits"));
    }
    assert!(error("gid", json!("0".repeat(32))).contains("not one that names nobody"));
    assert!(error("gid", json!("00000000000000000000ffff7f000001")).contains("not one that names nobody"));
    for wrong in [json!(0), json!(5), json!(1500), json!("1024"), json!(1024.5)] {
        assert!(error("mtu", wrong).ends_with("one of 256, 512, 1024, 2048, 4096 is wanted"));
    }
    for wrong in [json!("iwarp"), json!(""), json!(2)] {
        assert!(error("type", wrong).ends_with("ib, roce_v1 or roce_v2 is wanted"));
    }
    // InfiniBand has no path without a LID.
    assert!(error("type", json!("ib")).contains("lid is 0; a whole number from 1 to 49151"));
}

#[test]
fn a_fabric_has_as_many_different_rails_as_the_limit_and_an_error_says_in_which_it_is() {
    let rail = |index: usize| {
        let mut value = endpoint();
        value["rail"] = index.into();
        value
    };
    let refused = |value: Value| FabricAddress::parse(&value).expect_err("refused").to_string();
    for wrong in [
        json!([]),
        json!({}),
        json!(null),
        Value::from((0..=MAX_RAILS).map(rail).collect::<Vec<_>>()),
        json!([rail(1), rail(1)]),
    ] {
        let text = refused(json!({ "rails": wrong }));
        assert!(
            text.contains("rails is ") && text.contains(&format!("a list of 1 to {MAX_RAILS} rails")),
            "{text}"
        );
    }
    let mut second = rail(1);
    second["mtu"] = json!(1500);
    assert!(
        refused(json!({ "rails": [rail(0), second] })).starts_with("fabric address: rails[1].mtu is 1500; ")
    );
    assert_eq!(
        refused(json!({ "rails": [rail(0), 5] })),
        "fabric address: rails[1] is 5; an object is wanted"
    );
    assert_eq!(refused(json!([])), "fabric address: it is []; an object is wanted");
}

#[test]
fn a_long_wrong_value_is_shown_in_part_at_a_letter() {
    let text = error("gid", json!("ä".repeat(500)));
    assert!(text.len() < 250 && text.contains('…'), "{text}");
}

use std::net::IpAddr;

use proptest::prelude::*;

use super::super::types::{GidEntry, Mtu};
use super::*;

fn rail(name: &str, address: &str) -> Rail {
    let (ip, bits) = address.split_once('/').map_or((address, None), |(ip, bits)| (ip, bits.parse().ok()));
    let gid = ip.parse::<IpAddr>().expect("an address").into();
    Rail {
        device: name.to_owned(),
        port: 1,
        gid: GidEntry { index: 3, gid, kind: GidType::RoceV2, netdev: None },
        prefix_len: bits,
        link: LinkLayer::Ethernet,
        lid: 0,
        mtu: Mtu::B4096,
        speed_mbps: 400_000,
        numa_node: None,
        named: false,
    }
}

fn infiniband(name: &str, gid: &str) -> Rail {
    let mut rail = rail(name, gid);
    rail.gid.kind = GidType::InfiniBand;
    rail.link = LinkLayer::InfiniBand;
    rail.lid = 7;
    rail
}

fn rails(addresses: &[&str]) -> Vec<Rail> {
    addresses.iter().enumerate().map(|(i, address)| rail(&format!("mlx5_{i}"), address)).collect()
}

fn seen(rails: &[Rail]) -> Vec<PeerRail> {
    rails.iter().enumerate().map(|(i, rail)| PeerRail::of(i as u8, rail)).collect()
}

fn pairs(pairing: &Pairing) -> Vec<(u8, Option<u8>, Option<Reach>)> {
    pairing.pairs.iter().map(|pair| (pair.own, pair.peer, pair.reach)).collect()
}

/// What both sides do about one session with `lanes` data lanes: (active's rail, passive's rail) for control and each lane.
fn session(a: &[Rail], b: &[Rail], lanes: Option<u8>) -> Vec<(u8, u8)> {
    let pairing = active(a, &seen(b)).expect("a path");
    let mut own = vec![pairing.control_rail()];
    own.extend((0..pairing.lanes(lanes)).map(|lane| pairing.lane_rail(lane)));
    let offered: Vec<PeerRail> = own.iter().map(|i| seen(a)[usize::from(*i)]).collect();
    let theirs = passive(b, &offered).expect("the same path from the other side");
    own.into_iter().zip(theirs).collect()
}

#[test]
fn two_rails_in_two_subnets_pair_by_subnet_whatever_their_numbers() {
    let a = rails(&["10.0.1.1/24", "10.0.2.1/24"]);
    let b = rails(&["10.0.2.2/24", "10.0.1.2/24"]);
    let pairing = active(&a, &seen(&b)).expect("a path");
    assert_eq!(
        pairs(&pairing),
        [(0, Some(1), Some(Reach::SameSubnet)), (1, Some(0), Some(Reach::SameSubnet))]
    );
    assert_eq!(pairing.lanes(None), 8);
    for (own, theirs) in session(&a, &b, None) {
        assert_eq!(own, 1 - theirs);
    }
    assert!(
        pairing.log.contains("mlx5_0 port 1 (10.0.1.1/24) to rail 1 (10.0.1.2/24) (same network)"),
        "{}",
        pairing.log
    );
}

#[test]
fn a_rail_without_a_peer_in_its_subnet_is_left_out_where_another_has_one() {
    let a = rails(&["10.0.1.1/24", "10.0.2.1/24"]);
    let b = rails(&["10.0.2.2/24"]);
    let pairing = active(&a, &seen(&b)).expect("a path");
    assert_eq!(pairs(&pairing), [(1, Some(0), Some(Reach::SameSubnet))]);
    assert_eq!(
        pairing.left_out,
        ["mlx5_0 port 1 (10.0.1.1/24) shares no network with the peer's, others do"]
    );
    assert_eq!(session(&a, &b, None), [(1, 0); 5]);
    // The other way round the one rail meets its neighbour.
    assert_eq!(session(&b, &a, None), [(0, 1); 5]);
}

#[test]
fn in_one_subnet_every_rail_gets_a_peer_of_its_own_and_lanes_spread_on_the_other_side() {
    let a = rails(&["10.0.0.1/16", "10.0.0.2/16"]);
    let b = rails(&["10.0.0.3/16", "10.0.0.4/16"]);
    assert_eq!(
        pairs(&active(&a, &seen(&b)).expect("a path")),
        [(0, Some(0), Some(Reach::SameSubnet)), (1, Some(1), Some(Reach::SameSubnet))]
    );
    let lanes = &session(&a, &b, None)[1..];
    for rail in 0..2 {
        assert_eq!(lanes.iter().filter(|(own, _)| *own == rail).count(), 4);
        assert_eq!(lanes.iter().filter(|(_, theirs)| *theirs == rail).count(), 4);
    }
    // One rail against two: its four lanes meet two on each.
    let lanes = &session(&a[..1], &b, None)[1..];
    assert_eq!(lanes.iter().map(|(_, theirs)| *theirs).collect::<Vec<_>>(), [0, 1, 0, 1]);
    // Two against one: both are used.
    let lanes = &session(&a, &b[..1], None)[1..];
    assert_eq!(lanes.iter().map(|(own, _)| *own).collect::<Vec<_>>(), [0, 1, 0, 1, 0, 1, 0, 1]);
}

#[test]
fn rails_of_different_networks_are_routed_where_no_network_is_shared() {
    let a = rails(&["10.0.1.1/31", "10.0.2.1/31"]);
    let b = rails(&["10.9.1.1/31", "10.9.2.1/31"]);
    assert_eq!(
        pairs(&active(&a, &seen(&b)).expect("a path")),
        [(0, Some(0), Some(Reach::Routed)), (1, Some(1), Some(Reach::Routed))]
    );
    // Without a known prefix nothing is said of IPv4 networks.
    let (a, b) = (rails(&["10.0.0.1"]), rails(&["10.0.0.2"]));
    assert_eq!(pairs(&active(&a, &seen(&b)).expect("a path"))[0].2, Some(Reach::Routed));
}

#[test]
fn ipv6_networks_have_64_bits_unless_known_otherwise() {
    let reached = |a: &str, b: &str| reach(&rail("a", a), &seen(&rails(&[b]))[0], true);
    assert_eq!(reached("2001:db8:1:1::1", "2001:db8:1:1:ffff::2"), Ok(Reach::SameSubnet));
    assert_eq!(reached("2001:db8:1:1::1", "2001:db8:1:2::1"), Ok(Reach::Routed));
    assert_eq!(reached("2001:db8:1:1::1/48", "2001:db8:1:2::1"), Ok(Reach::SameSubnet));
    assert_eq!(reached("fd00::1/127", "fd00::2/127"), Ok(Reach::Routed));
    assert_eq!(reached("fd00::1", "2001:db8::1"), Ok(Reach::Routed));
}

#[test]
fn the_same_device_reaches_itself() {
    let own = rails(&["10.0.0.1"]);
    assert_eq!(reach(&own[0], &seen(&own)[0], true), Ok(Reach::SameSubnet));
}

#[test]
fn link_local_rails_pair_only_where_each_side_has_one() {
    let one = rails(&["fe80::1"]);
    let other = rails(&["fe80::2"]);
    assert_eq!(
        pairs(&active(&one, &seen(&other)).expect("one link")),
        [(0, Some(0), Some(Reach::LinkLocal))]
    );
    assert_eq!(session(&one, &other, Some(2)), [(0, 0); 3]);
    let two = rails(&["fe80::2", "fe80::3"]);
    for (a, b) in [(&one, &two), (&two, &one)] {
        let error = active(a, &seen(b)).expect_err("which link?").to_string();
        assert!(error.contains("nothing tells which share a link"), "{error}");
    }
    // A routable one is taken before, and a link-local one never meets it.
    let mixed = rails(&["fe80::5", "10.0.0.5/24"]);
    let peer = rails(&["10.0.0.6/24", "fe80::6"]);
    assert_eq!(
        pairs(&active(&mixed, &seen(&peer)).expect("a path")),
        [(1, Some(0), Some(Reach::SameSubnet))]
    );
    assert!(active(&mixed[..1], &seen(&peer[..1])).is_err());
}

#[test]
fn infiniband_pairs_by_subnet_prefix_and_never_with_ethernet() {
    let a = [infiniband("ib0", "fec0:0:0:1::a"), infiniband("ib1", "fec0:0:0:2::a")];
    let b = [infiniband("ib0", "fec0:0:0:2::b"), infiniband("ib1", "fec0:0:0:1::b")];
    assert_eq!(
        pairs(&active(&a, &seen(&b)).expect("a path")),
        [(0, Some(1), Some(Reach::SameSubnet)), (1, Some(0), Some(Reach::SameSubnet))]
    );
    let error = active(&a[..1], &seen(&b[..1])).expect_err("two subnets").to_string();
    assert!(error.contains("InfiniBand subnets fec0000000000001 and fec0000000000002 differ"), "{error}");
    let error = active(&a, &seen(&rails(&["10.0.0.1/24"]))).expect_err("two link layers").to_string();
    assert!(error.contains("InfiniBand and RoCE v2 do not speak to each other"), "{error}");
}

#[test]
fn roce_v1_reaches_its_own_network_only() {
    let old = |address: &str| {
        let mut rail = rail("old0", address);
        rail.gid.kind = GidType::RoceV1;
        rail
    };
    let near = seen(&[old("10.0.0.2/24")]);
    let far = seen(&[old("10.0.1.2/24")]);
    assert_eq!(reach(&old("10.0.0.1/24"), &near[0], true), Ok(Reach::SameSubnet));
    assert!(reach(&old("10.0.0.1/24"), &far[0], true).expect_err("far").contains("RoCE v1 is not routed"));
    assert!(reach(&rail("new0", "10.0.0.1/24"), &near[0], true).is_err());
}

#[test]
fn without_a_common_network_the_error_names_both_sides() {
    let own = rails(&["10.0.0.1/24"]);
    let peer = rails(&["2001:db8::1/64"]);
    let error = active(&own, &seen(&peer)).expect_err("two families").to_string();
    assert_eq!(
        error,
        "no RDMA path to the peer: own rails are mlx5_0 port 1 (10.0.0.1/24); the peer's are rail 0 (2001:db8::1/64); \
         10.0.0.1 and 2001:db8::1 are of two families"
    );
    assert!(passive(&peer, &seen(&own)).is_err());
    assert!(active(&own, &[]).expect_err("no rails").to_string().contains("the peer's are none"));
}

#[test]
fn a_far_slower_rail_is_used_only_if_named() {
    let mut own = rails(&["10.0.0.1/16", "10.0.0.2/16", "10.0.0.3/16"]);
    own[0].speed_mbps = 10_000;
    let peer = rails(&["10.0.0.4/16"]);
    let pairing = active(&own, &seen(&peer)).expect("a path");
    assert_eq!(pairing.pairs.iter().map(|pair| pair.own).collect::<Vec<_>>(), [1, 2]);
    assert!(pairing.left_out[0].contains("10000 of 400000 Mbit/s"), "{:?}", pairing.left_out);
    assert_eq!(unpaired(&own).pairs.len(), 2);
    assert!(passive(&own, &[seen(&peer)[0]; 9]).expect("a path").iter().all(|rail| *rail > 0));
    own[0].named = true;
    let pairing = active(&own, &seen(&peer)).expect("a path");
    assert_eq!(pairing.pairs.iter().map(|pair| pair.own).collect::<Vec<_>>(), [1, 2, 0]);
    // Where only the slow one reaches the peer it is the fastest there is.
    own[0].named = false;
    own[1..]
        .iter_mut()
        .for_each(|rail| rail.gid.gid = "2001:db8::1".parse::<IpAddr>().expect("an address").into());
    assert_eq!(pairs(&active(&own, &seen(&peer)).expect("a path")).len(), 1);
}

#[test]
fn lanes_are_four_a_rail_or_as_configured_and_never_more_than_the_wire_counts() {
    let many: Vec<String> = (1..=20).map(|i| format!("10.0.0.{i}/24")).collect();
    let many = rails(&many.iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!(unpaired(&many[..1]).lanes(None), 4);
    assert_eq!(unpaired(&many[..3]).lanes(None), 12);
    assert_eq!(unpaired(&many).lanes(None), 64);
    let pairing = unpaired(&many[..3]);
    assert_eq!((pairing.lanes(Some(1)), pairing.lanes(Some(64))), (1, 64));
    assert_eq!((0..6).map(|lane| pairing.lane_rail(lane)).collect::<Vec<_>>(), [0, 1, 2, 0, 1, 2]);
}

fn any_rails() -> impl Strategy<Value = Vec<Rail>> {
    let address = prop_oneof![
        (0u8..3, 1u8..5).prop_map(|(net, host)| format!("10.0.{net}.{host}/24")),
        (0u8..3, 1u8..5).prop_map(|(net, host)| format!("2001:db8:0:{net}::{host}/64")),
        (1u8..5).prop_map(|host| format!("fe80::{host}")),
    ];
    let one = (address, prop_oneof![Just(0u64), Just(10_000), Just(400_000)]);
    proptest::collection::vec(one, 1..6).prop_map(|list| {
        let list = list.into_iter().enumerate();
        list.map(|(i, (address, speed_mbps))| Rail { speed_mbps, ..rail(&format!("d{i}"), &address) })
            .collect()
    })
}

proptest! {
    /// Whatever the active side offers, the passive side finds a rail for, and each pair reaches the other both ways.
    #[test]
    fn both_sides_agree_that_there_is_a_path(a in any_rails(), b in any_rails(), lanes in 1u8..=64) {
        let (from_a, from_b) = (active(&a, &seen(&b)), active(&b, &seen(&a)));
        prop_assert_eq!(from_a.is_ok(), from_b.is_ok());
        if let Ok(pairing) = from_a {
            prop_assert_eq!(active(&a, &seen(&b)), Ok(pairing.clone()));
            for (own, theirs) in session(&a, &b, Some(lanes)) {
                let (own, theirs) = (usize::from(own), usize::from(theirs));
                prop_assert!(reach(&a[own], &seen(&b)[theirs], true).is_ok());
                prop_assert!(reach(&b[theirs], &seen(&a)[own], true).is_ok());
            }
        }
    }
}

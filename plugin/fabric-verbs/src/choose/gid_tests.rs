use super::*;
use GidType::{InfiniBand, RoceV1, RoceV2};

fn entry(index: u8, ip: &str, kind: GidType) -> GidEntry {
    let gid = ip.parse::<std::net::IpAddr>().expect("an address").into();
    GidEntry { index, gid, kind, netdev: Some("eth0".to_owned()) }
}

fn subnet(text: &str) -> Subnet {
    let (ip, bits) = text.split_once('/').expect("a prefix");
    Subnet { ip: ip.parse().expect("an address"), prefix_len: bits.parse().expect("a length") }
}

fn query<'a>(entries: &'a [GidEntry], wanted: &'a [Subnet], explicit: Option<u8>) -> GidQuery<'a> {
    GidQuery {
        device: "mlx5_0",
        port: 1,
        link: LinkLayer::Ethernet,
        table_len: 16,
        entries,
        wanted,
        explicit,
    }
}

/// Tables as devices have them, and what is right.
struct Case {
    what: &'static str,
    table: &'static [(u8, &'static str, GidType)],
    wanted: &'static [&'static str],
    right: u8,
    because: &'static str,
}

const CASES: &[Case] = &[
    Case {
        what: "link-local first, as tables begin",
        table: &[
            (0, "fe80::1", RoceV1),
            (1, "fe80::1", RoceV2),
            (2, "::ffff:10.0.0.1", RoceV1),
            (3, "::ffff:10.0.0.1", RoceV2),
        ],
        wanted: &[],
        right: 3,
        because: "RoCE v2 at an IPv4 address",
    },
    Case {
        what: "soft-RoCE: two entries",
        table: &[(0, "fe80::5054:ff:fe12:3456", RoceV2), (1, "::ffff:10.77.0.1", RoceV2)],
        wanted: &[],
        right: 1,
        because: "IPv4",
    },
    Case {
        what: "unique local against link-local, no IPv4",
        table: &[(0, "fe80::690:81ff:fe3b:a7b0", RoceV2), (1, "fd93:16d3:59b6:12c::5", RoceV2)],
        wanted: &[],
        right: 1,
        because: "unique local",
    },
    Case {
        what: "global before unique local",
        table: &[(0, "fe80::1", RoceV2), (1, "fd00::1", RoceV2), (2, "2001:db8::1", RoceV2)],
        wanted: &[],
        right: 2,
        because: "global",
    },
    Case {
        what: "IPv4 before IPv6 when nothing is wanted",
        table: &[(0, "2001:db8::1", RoceV2), (1, "::ffff:192.168.1.1", RoceV2)],
        wanted: &[],
        right: 1,
        because: "IPv4",
    },
    Case {
        what: "a wanted IPv6 address before IPv4",
        table: &[(0, "2001:db8::1", RoceV2), (1, "::ffff:192.168.1.1", RoceV2)],
        wanted: &["2001:db8::1/128"],
        right: 0,
        because: "at a wanted address",
    },
    Case {
        what: "IPv4 of another network before, the wanted one behind",
        table: &[(0, "fe80::1", RoceV2), (1, "::ffff:172.17.0.1", RoceV2), (2, "::ffff:10.1.2.3", RoceV2)],
        wanted: &["10.1.2.3/32"],
        right: 2,
        because: "at a wanted address",
    },
    Case {
        what: "in the wanted network",
        table: &[(0, "::ffff:172.17.0.1", RoceV2), (1, "::ffff:10.1.2.3", RoceV2)],
        wanted: &["10.1.99.99/16"],
        right: 1,
        because: "in a wanted network",
    },
    Case {
        what: "a wanted address that no entry has changes nothing",
        table: &[(0, "fe80::1", RoceV2), (1, "::ffff:172.17.0.1", RoceV2), (2, "::ffff:10.1.2.3", RoceV2)],
        wanted: &["192.0.2.1/24"],
        right: 1,
        because: "IPv4",
    },
    Case {
        what: "every address is wanted: nothing is",
        table: &[(0, "2001:db8::1", RoceV2), (1, "::ffff:172.17.0.1", RoceV2)],
        wanted: &["0.0.0.0/0", "::/0"],
        right: 1,
        because: "IPv4",
    },
    Case {
        what: "indexes shifted after an address was removed and added: holes and zeros",
        table: &[
            (0, "fe80::1", RoceV1),
            (1, "fe80::1", RoceV2),
            (2, "::", RoceV1),
            (3, "::", RoceV2),
            (6, "::ffff:10.0.0.9", RoceV1),
            (7, "::ffff:10.0.0.9", RoceV2),
        ],
        wanted: &[],
        right: 7,
        because: "IPv4",
    },
    Case {
        what: "only link-local",
        table: &[(0, "fe80::1", RoceV1), (1, "fe80::1", RoceV2)],
        wanted: &[],
        right: 1,
        because: "link-local, as there is no routable one",
    },
    Case {
        what: "IPv4 link-local is no more than link-local",
        table: &[(0, "::ffff:169.254.3.4", RoceV2), (1, "fd00::7", RoceV2)],
        wanted: &["169.254.3.4/16"],
        right: 1,
        because: "unique local",
    },
    Case {
        what: "RoCE v1 last, even with a routable address",
        table: &[(0, "::ffff:10.0.0.1", RoceV1), (1, "fe80::1", RoceV2)],
        wanted: &["10.0.0.1/32"],
        right: 1,
        because: "link-local",
    },
    Case {
        what: "only RoCE v1",
        table: &[(0, "fe80::1", RoceV1), (1, "::ffff:10.0.0.1", RoceV1)],
        wanted: &[],
        right: 1,
        because: "RoCE v1",
    },
    Case {
        what: "loopback and multicast name nobody",
        table: &[
            (0, "::ffff:127.0.0.1", RoceV2),
            (1, "::1", RoceV2),
            (2, "ff02::1", RoceV2),
            (3, "fe80::1", RoceV2),
        ],
        wanted: &[],
        right: 3,
        because: "link-local",
    },
];

#[test]
fn the_entry_that_reaches_farthest_is_chosen_and_the_log_lists_all_candidates_with_the_reason() {
    for case in CASES {
        let entries: Vec<_> = case.table.iter().map(|(i, ip, kind)| entry(*i, ip, *kind)).collect();
        let wanted: Vec<_> = case.wanted.iter().map(|text| subnet(text)).collect();
        let choice = gid(&query(&entries, &wanted, None)).expect(case.what);
        assert_eq!(choice.entry.index, case.right, "{}: {}", case.what, choice.log);
        assert!(choice.log.starts_with("device mlx5_0 port 1: GID "), "{}", choice.log);
        assert!(choice.log.contains(case.because), "{}: {}", case.what, choice.log);
        for entry in entries.iter().filter(|entry| entry.gid.scope() != Scope::Nobody) {
            assert!(choice.log.contains(&entry.to_string()), "{}: {}", case.what, choice.log);
        }
        // The order of the list is no reason.
        let reversed: Vec<_> = entries.into_iter().rev().collect();
        assert_eq!(
            gid(&query(&reversed, &wanted, None)).expect(case.what).entry,
            choice.entry,
            "{}",
            case.what
        );
    }
}

#[test]
fn an_interface_in_sight_goes_before_one_of_another_namespace() {
    let far = GidEntry { netdev: None, ..entry(0, "::ffff:10.0.0.1", RoceV2) };
    let near = entry(1, "::ffff:10.0.0.2", RoceV2);
    assert_eq!(gid(&query(&[far.clone(), near], &[], None)).expect("valid").entry.index, 1);
    assert_eq!(gid(&query(&[far], &[], None)).expect("the only one").entry.index, 0);
}

#[test]
fn a_table_of_zeros_is_an_error_that_may_pass_and_names_device_and_port() {
    let zeros = [entry(0, "::", RoceV2), entry(1, "::", RoceV1)];
    for entries in [&zeros[..], &[]] {
        let error = gid(&query(entries, &[], None)).expect_err("no GID");
        assert!(error.is_transient());
        assert_eq!(
            error.to_string(),
            "device mlx5_0 port 1: none of the 16 entries of its GID table can be used (all are zero); \
             give its network interface an address"
        );
    }
}

#[test]
fn a_configured_index_is_taken_whatever_its_rank_and_the_log_warns() {
    let entries = [
        entry(0, "fe80::1", RoceV2),
        entry(1, "::ffff:10.0.0.1", RoceV2),
        entry(2, "::ffff:10.0.0.1", RoceV1),
    ];
    let chosen = |index| gid(&query(&entries, &[], Some(index))).expect("there");
    assert_eq!((chosen(0).entry.index, chosen(0).log.contains("link-local")), (0, true));
    assert_eq!((chosen(1).entry.index, chosen(1).log.contains("as configured;")), (1, true));
    assert_eq!((chosen(2).entry.index, chosen(2).log.contains("RoCE v1 is not routed")), (2, true));
}

#[test]
fn a_configured_index_that_is_past_the_table_or_empty_is_refused_with_the_usable_ones() {
    let entries = [entry(0, "fe80::1", RoceV2), entry(1, "::ffff:10.0.0.1", RoceV2), entry(2, "::", RoceV2)];
    let refused = |index| gid(&query(&entries, &[], Some(index))).expect_err("refused");
    let usable = "usable are 0 fe80::1 RoCE v2 on eth0, 1 ::ffff:10.0.0.1 RoCE v2 on eth0 (BATON_GID_INDEX)";
    let past = refused(16);
    assert!(!past.is_transient());
    assert_eq!(
        past.to_string(),
        format!("device mlx5_0 port 1: GID index 16 is not there, its table has 16 entries; {usable}")
    );
    for index in [2, 9] {
        let empty = refused(index);
        assert!(empty.is_transient());
        assert_eq!(
            empty.to_string(),
            format!("device mlx5_0 port 1: GID index {index} of 16 is empty; {usable}")
        );
    }
}

#[test]
fn infiniband_uses_its_first_entry_and_knows_no_ip_addresses() {
    let port = GidEntry { netdev: None, ..entry(0, "fe80::506b:4b03:c8:1234", InfiniBand) };
    let alias = GidEntry { netdev: None, ..entry(1, "fec0::506b:4b03:c8:1234", InfiniBand) };
    let entries = [alias, port];
    let infiniband =
        |explicit, entries| GidQuery { link: LinkLayer::InfiniBand, ..query(entries, &[], explicit) };
    assert_eq!(gid(&infiniband(None, &entries)).expect("there").entry.index, 0);
    let configured = gid(&infiniband(Some(1), &entries)).expect("there");
    assert_eq!(configured.entry.index, 1);
    assert!(!configured.log.contains("link-local"));
    assert!(gid(&infiniband(None, &entries[..1])).expect_err("index 0 is not there").is_transient());
}

use std::net::IpAddr;

use super::super::types::GidType;
use super::*;

fn entry(index: u8, ip: &str) -> GidEntry {
    let gid = ip.parse::<IpAddr>().expect("an address").into();
    GidEntry { index, gid, kind: GidType::RoceV2, netdev: Some("eth0".to_owned()) }
}

fn port(number: u8, ip: &str) -> PortFacts {
    PortFacts {
        number,
        state: PortState::Active,
        link: LinkLayer::Ethernet,
        lid: 0,
        mtu: Mtu::B4096,
        speed_mbps: 100_000,
        numa_node: Some(0),
        gid_table_len: 16,
        gids: vec![entry(0, "fe80::1"), entry(1, ip)],
    }
}

fn device(name: &str, ports: Vec<PortFacts>) -> DeviceFacts {
    DeviceFacts { name: name.to_owned(), transport: Transport::InfiniBand, failure: None, ports }
}

fn config(devices: &str) -> VerbsConfig {
    let mut config = VerbsConfig::default();
    config.set("devices", devices).expect("valid");
    config
}

fn choose(devices: &str, facts: &[DeviceFacts]) -> Result<Ports, PortsError> {
    let address = Subnet { ip: "10.0.1.1".parse().expect("an address"), prefix_len: 24 };
    ports(&config(devices), facts, &[address], &[])
}

fn names(ports: &Ports) -> Vec<String> {
    ports.rails.iter().map(|rail| format!("{}:{}", rail.device, rail.port)).collect()
}

fn host() -> Vec<DeviceFacts> {
    let down = PortFacts { state: PortState::Down, ..port(2, "10.0.3.1") };
    let phantom = PortFacts { gids: vec![entry(0, "::")], ..port(1, "::") };
    vec![
        device("mlx5_0", vec![port(1, "10.0.1.1"), down]),
        device("mlx5_1", vec![port(1, "10.0.2.1")]),
        device("ghost0", vec![phantom]),
        DeviceFacts { transport: Transport::Iwarp, ..device("siw0", vec![port(1, "10.0.4.1")]) },
    ]
}

#[test]
fn every_usable_port_is_a_rail_and_every_other_has_a_reason() {
    let chosen = choose("", &host()).expect("two rails");
    assert_eq!(names(&chosen), ["mlx5_0:1", "mlx5_1:1"]);
    assert_eq!(chosen.rails[0].to_string(), "mlx5_0 port 1 (10.0.1.1/24)");
    assert_eq!(chosen.rails[1].to_string(), "mlx5_1 port 1 (10.0.2.1)");
    assert!(chosen.rails.iter().all(|rail| !rail.named && rail.gid.index == 1));
    let reasons: Vec<String> = chosen.skipped.iter().map(ToString::to_string).collect();
    assert_eq!(reasons[0], "device mlx5_0 port 2: its state is DOWN, not ACTIVE");
    assert!(
        reasons[1].starts_with("device ghost0 port 1: none of the 16 entries of its GID table"),
        "{reasons:?}"
    );
    assert!(reasons[2].starts_with("device siw0: iWARP is not supported: "), "{reasons:?}");
    assert_eq!(chosen.skipped.iter().map(|s| s.transient).collect::<Vec<_>>(), [true, true, false]);
    assert_eq!(chosen.notes.len(), 2);
}

#[test]
fn only_what_is_named_is_used_and_the_rest_is_said_to_be_unnamed() {
    let chosen = choose("mlx5_1", &host()).expect("a rail");
    assert_eq!(names(&chosen), ["mlx5_1:1"]);
    assert!(chosen.rails[0].named);
    assert_eq!(chosen.skipped[0].to_string(), "device mlx5_0 port 1: not in BATON_DEVICES");
    // A device with one active port of two can be named as a whole.
    assert_eq!(names(&choose("mlx5_0,mlx5_1:1", &host()).expect("rails")), ["mlx5_0:1", "mlx5_1:1"]);
}

#[test]
fn what_is_left_out_is_not_used_and_a_name_that_is_not_there_is_only_noted() {
    let chosen = choose("^mlx5_0,^mlx5_9", &host()).expect("a rail");
    assert_eq!(names(&chosen), ["mlx5_1:1"]);
    assert!(chosen.skipped.iter().any(|s| s.reason == "device mlx5_0 port 1: left out by BATON_DEVICES"));
    assert!(
        chosen.notes[0].starts_with("BATON_DEVICES leaves out mlx5_9, which is not there"),
        "{:?}",
        chosen.notes
    );
    assert!(
        choose("^mlx5_0,^mlx5_1", &host())
            .expect_err("none left")
            .to_string()
            .contains("left out by BATON_DEVICES")
    );
}

#[test]
fn a_named_device_or_port_that_is_not_there_is_refused_with_those_that_are() {
    for wrong in ["mlx5_2", "mlx5_1:2", "mlx5_0,mlx5"] {
        let error = choose(wrong, &host()).expect_err("refused").to_string();
        assert!(error.ends_with("there are mlx5_0:1, mlx5_0:2, mlx5_1:1, ghost0:1, siw0:1"), "{error}");
    }
    let error = choose("mlx5_0", &[]).expect_err("refused").to_string();
    assert_eq!(error, "BATON_DEVICES names mlx5_0, which is not there; there are none");
}

#[test]
fn a_named_device_that_cannot_be_used_is_refused_with_port_and_state() {
    let refused = |name: &str| choose(name, &host()).expect_err("refused");
    assert_eq!(
        refused("mlx5_1,mlx5_0:2").to_string(),
        "BATON_DEVICES names mlx5_0:2, which cannot be used: device mlx5_0 port 2: its state is DOWN, not ACTIVE"
    );
    assert!(matches!(refused("mlx5_0:2"), PortsError::Unusable { transient: true, .. }));
    assert!(matches!(refused("ghost0"), PortsError::Unusable { transient: true, .. }));
    let iwarp = refused("siw0");
    assert!(iwarp.to_string().contains("iWARP is not supported: "), "{iwarp}");
    assert!(matches!(iwarp, PortsError::Unusable { transient: false, .. }));
}

#[test]
fn without_any_device_or_any_usable_one_the_error_says_which() {
    assert_eq!(choose("", &[]).expect_err("none").to_string(), "no RDMA device on this host");
    let denied = DeviceFacts {
        failure: Some("cannot be opened: Permission denied".to_owned()),
        ..device("mlx5_0", vec![])
    };
    let empty = device("odd0", vec![]);
    let initializing = PortFacts { state: PortState::Initializing, ..port(1, "10.0.0.1") };
    let nameless = PortFacts { link: LinkLayer::InfiniBand, ..port(1, "10.0.0.1") };
    let facts = [denied.clone(), empty, device("ib0", vec![initializing]), device("ib1", vec![nameless])];
    assert_eq!(
        choose("", &facts).expect_err("none").to_string(),
        "no usable RDMA device: device mlx5_0: cannot be opened: Permission denied; device odd0: it has no port; \
         device ib0 port 1: its state is INIT, not ACTIVE; device ib1 port 1: no subnet manager has given it an address (LID 0)"
    );
    let named = choose("mlx5_0:1", &[denied]).expect_err("refused").to_string();
    assert!(named.ends_with("device mlx5_0: cannot be opened: Permission denied"), "{named}");
}

#[test]
fn a_configured_gid_index_holds_for_every_port_and_one_without_it_is_skipped() {
    let with_third = PortFacts { gids: vec![entry(3, "10.0.5.1")], ..port(1, "10.0.5.1") };
    let facts = [device("a", vec![with_third]), device("b", vec![port(1, "10.0.6.1")])];
    let third = VerbsConfig { gid_index: Some(3), ..VerbsConfig::default() };
    let chosen = ports(&third, &facts, &[], &[]).expect("one has it");
    assert_eq!((names(&chosen), chosen.rails[0].gid.index), (vec!["a:1".to_owned()], 3));
    assert!(
        chosen.skipped[0].reason.starts_with("device b port 1: GID index 3 of 16 is empty; usable are 0 ")
    );
}

#[test]
fn rails_past_the_limit_are_skipped_by_name() {
    let facts: Vec<_> =
        (0..MAX_RAILS + 8).map(|i| device(&format!("d{i}"), vec![port(1, "10.0.0.1")])).collect();
    let chosen = choose("", &facts).expect("rails");
    assert_eq!((chosen.rails.len(), chosen.skipped.len()), (MAX_RAILS, 8));
    let told = format!("device d{MAX_RAILS} port 1: there are {MAX_RAILS} rails already, the limit");
    assert_eq!(chosen.skipped[0].reason, told);
}

#[test]
fn a_gid_at_a_wanted_address_or_in_its_network_is_preferred_where_the_host_knows_the_network() {
    let two = PortFacts { gids: vec![entry(1, "172.17.0.1"), entry(2, "10.0.1.7")], ..port(1, "10.0.1.7") };
    let facts = [device("a", vec![two])];
    let address = |text: &str| Subnet { ip: text.parse().expect("an address"), prefix_len: 24 };
    let chosen = |wanted: &str, addresses: &[Subnet]| {
        let config =
            VerbsConfig { wanted: vec![wanted.parse().expect("an address")], ..VerbsConfig::default() };
        ports(&config, &facts, addresses, &[]).expect("a rail").rails[0].gid.index
    };
    assert_eq!(chosen("10.0.1.7", &[]), 2);
    assert_eq!(chosen("10.0.1.1", &[address("10.0.1.1"), address("172.17.0.1")]), 2);
    assert_eq!(chosen("10.0.1.1", &[address("172.17.0.1")]), 1);
}

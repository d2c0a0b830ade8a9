use super::*;

fn with(pairs: &[(&str, &str)]) -> Result<VerbsConfig, BadSetting> {
    let mut config = VerbsConfig::default();
    for (key, value) in pairs {
        assert!(config.set(key, value)?, "{key} is one of the keys");
    }
    Ok(config)
}

fn refusal(key: &str, value: &str) -> String {
    with(&[(key, value)]).expect_err("refused").to_string()
}

fn named(device: &str, port: Option<u8>) -> DevicePort {
    DevicePort { device: device.to_owned(), port }
}

#[test]
fn every_number_is_taken_at_its_limits_and_refused_beyond_them_with_the_limits() {
    let limits: [(&str, u32, u32); 7] = [
        ("lanes", 1, 64),
        ("ib_timeout", 1, 31),
        ("ib_retry", 0, 6),
        ("gid_index", 0, 255),
        ("ib_pkey", 0, 65_535),
        ("ib_sl", 0, 15),
        ("ib_tc", 0, 255),
    ];
    for (key, low, high) in limits {
        with(&[(key, &low.to_string()), (key, &high.to_string())]).expect("within limits");
        let beyond = (high + 1).to_string();
        let below = i64::from(low) - 1;
        for wrong in
            [beyond.as_str(), &below.to_string(), "-1", "+1", "1.5", "0x1", " 1", "1 ", "true", "4294967297"]
        {
            let text = refusal(key, wrong);
            assert!(text.starts_with(&format!("{key} {wrong:?}: ")), "{text}");
            assert!(text.contains(&format!("from {low} to {high}")), "{text}");
        }
    }
}

#[test]
fn what_would_never_end_is_refused_with_the_reason() {
    assert_eq!(
        refusal("ib_retry", "7"),
        "ib_retry \"7\": a whole number from 0 to 6 is wanted (7 is endless on some devices)"
    );
    assert!(refusal("ib_timeout", "0").contains("for ever"));
}

#[test]
fn an_empty_value_is_the_default_again() {
    let mut config = with(&[
        ("devices", "a"),
        ("lanes", "2"),
        ("ib_timeout", "18"),
        ("ib_retry", "3"),
        ("gid_index", "1"),
        ("ib_pkey", "2"),
        ("ib_sl", "3"),
        ("ib_tc", "106"),
        ("mtu", "1024"),
        ("vram_flush", "auto"),
    ])
    .expect("valid");
    assert!(!config.always_flush);
    assert_eq!(refusal("vram_flush", "off"), "vram_flush \"off\": always, auto are valid");
    assert_eq!((config.lanes, config.mtu, config.gid_index), (Some(2), Some(Mtu::B1024), Some(1)));
    assert_eq!((config.ib_timeout, config.ib_retry, config.pkey_index), (18, 3, 2));
    assert_eq!((config.sl, config.tc), (3, 106));
    for key in VerbsConfig::KEYS {
        config.set(key, "").expect("empty is the default");
    }
    assert_eq!(config, VerbsConfig::default());
}

#[test]
fn the_mtu_is_one_of_five_sizes() {
    for mtu in Mtu::ALL {
        assert_eq!(with(&[("mtu", &mtu.to_string())]).expect("valid").mtu, Some(mtu));
    }
    for wrong in ["0", "1500", "9000", "01024", "4"] {
        assert_eq!(refusal("mtu", wrong), format!("mtu {wrong:?}: 256, 512, 1024, 2048, 4096 are valid"));
    }
}

#[test]
fn devices_are_named_with_or_without_port_or_left_out() {
    let only = |list: &str| with(&[("devices", list)]).expect("valid").devices;
    assert_eq!(only(""), DeviceFilter::All);
    assert_eq!(only(" , "), DeviceFilter::All);
    assert_eq!(
        only("mlx5_0, mlx5_1:2,mlx5_0"),
        DeviceFilter::Only(vec![named("mlx5_0", None), named("mlx5_1", Some(2))])
    );
    assert_eq!(
        only("^mlx5_bond_0,^irdma0:1"),
        DeviceFilter::Except(vec![named("mlx5_bond_0", None), named("irdma0", Some(1))])
    );
}

#[test]
fn a_list_of_devices_that_says_nothing_clear_is_refused() {
    for wrong in
        ["a:0", "a:256", "a:", "a:x", "a:1:2", ":1", "^", "^^a", "a,^b", "mlx5_*", "=a", "a b", "/dev/x"]
    {
        assert!(refusal("devices", wrong).starts_with(&format!("devices {wrong:?}: ")));
    }
}

#[test]
fn a_key_of_another_part_is_left_to_it() {
    let mut config = VerbsConfig::default();
    assert_eq!(config.set("spin_us", "5"), Ok(false));
    assert_eq!(config, VerbsConfig::default());
}

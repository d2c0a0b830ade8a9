use super::*;

fn with(pairs: &[(&str, &str)]) -> Result<Settings, Error> {
    let mut settings = Settings::default();
    for (key, value) in pairs {
        settings.set(key, value)?;
    }
    Ok(settings)
}

fn refusal(key: &str, value: &str) -> String {
    with(&[(key, value)]).err().expect("refused").text
}

/// An engine is never created here: a fabric that is tried stands for itself.
fn offered(wanted: &str, name: &str, answer: Result<(), &str>) -> Result<Fabrics, Error> {
    let mut fabrics = Fabrics { list: Vec::new(), notes: Vec::new(), notify_only: None };
    fabrics.add(name, wanted, false, || match answer {
        Ok(()) => Ok(TcpFabric::new(TcpConfig::default())?),
        Err(why) => Err(err!(Unsupported, "{why}")),
    })?;
    Ok(fabrics)
}

#[test]
fn the_settings_of_verbs_are_known_whether_it_is_built_in_or_not() {
    for (key, value) in [
        ("devices", "rxe0:1,rxe1"),
        ("lanes", "2"),
        ("ib_timeout", "18"),
        ("ib_retry", "3"),
        ("gid_index", "1"),
        ("ib_sl", "0"),
        ("ib_tc", "106"),
        ("mtu", "1024"),
        ("ib_pkey", "0"),
        ("vram_flush", "auto"),
        ("fabric", "verbs"),
    ] {
        with(&[(key, value)]).unwrap_or_else(|e| panic!("{key}: {}", e.text));
        assert!(KEYS.split(", ").any(|known| known == key), "{key} is not listed");
    }
    assert!(refusal("ib_timeouts", "1").contains("ib_timeout, ib_retry"));
}

#[test]
fn a_length_at_which_nothing_sensible_could_be_cut_is_refused_with_the_limits() {
    assert_eq!(with(&[("chunk_bytes", "65536")]).map(|settings| settings.chunk_bytes).ok(), Some(65_536));
    for value in ["0", "4095", "4194305", "64k", "-1", "", "99999999999999999999"] {
        let text = refusal("chunk_bytes", value);
        assert!(text.contains(value) && text.contains("from 4096 to 4194304"), "{text}");
    }
}

#[cfg(feature = "verbs")]
#[test]
fn a_value_that_verbs_does_not_take_is_refused_with_its_limits() {
    assert!(refusal("ib_retry", "7").contains("from 0 to 6 is wanted (7 is endless on some devices)"));
    assert!(refusal("ib_timeout", "0").contains("from 1 to 31"));
    assert!(refusal("devices", "a,^b").starts_with("devices \"a,^b\": "));
}

#[test]
fn of_auto_a_missing_fabric_is_a_note_and_of_its_own_name_an_error() {
    let fabrics = offered("auto", "verbs", Err("no RDMA device on this host")).expect("others may serve");
    assert_eq!(fabrics.notes, ["verbs: no RDMA device on this host"]);
    let error = offered("verbs", "verbs", Err("no RDMA device on this host")).err().expect("asked for");
    assert_eq!(error.text, "fabric verbs: no RDMA device on this host");
    let fabrics = offered("tcp", "verbs", Ok(())).expect("not tried");
    assert_eq!(
        (fabrics.list.len(), fabrics.notes.as_slice()),
        (0, &["verbs: fabric is set to tcp".to_owned()][..])
    );
    assert_eq!(offered("auto", "verbs", Ok(())).expect("there").list.len(), 1);
    assert!(offered("auto", "tcp", Err("no ports left")).is_err());
}

#[test]
fn addresses_that_were_said_are_wanted_and_every_address_is_none() {
    let wanted = |pairs: &[(&str, &str)]| with(pairs).expect("valid").wanted();
    let ip = |text: &str| text.parse::<IpAddr>().expect("an address");
    assert_eq!(wanted(&[]), Vec::<IpAddr>::new());
    assert_eq!(wanted(&[("listen", "0.0.0.0:7000")]), Vec::<IpAddr>::new());
    assert_eq!(
        wanted(&[("listen", "10.0.0.1:7000"), ("advertise", "192.0.2.1,[2001:db8::1]:5")]),
        [ip("192.0.2.1"), ip("2001:db8::1"), ip("10.0.0.1")]
    );
}

#[test]
fn no_address_of_several_may_be_empty_and_no_addresses_are_those_of_the_host() {
    for list in [",", " , ", "192.0.2.1,", ",192.0.2.1", "192.0.2.1,,192.0.2.2"] {
        let refused = with(&[("advertise", list)]).err().expect(list).text;
        assert_eq!(refused, format!("advertise {list:?}: an address between commas is empty"));
    }
    assert_eq!(with(&[("advertise", "")]).expect("as if unset").wanted(), Vec::<IpAddr>::new());
    assert_eq!(with(&[("advertise", "192.0.2.1 , 192.0.2.2")]).expect("two").wanted().len(), 2);
}

/// The host checks values before the engine does: both must take the same.
#[cfg(feature = "verbs")]
#[test]
fn the_host_and_the_engine_know_the_same_settings_limits_and_defaults() {
    use baton_host::settings::{Reader, SETTINGS, Values};
    for setting in SETTINGS.iter().filter(|s| s.reader == Reader::Engine) {
        assert!(KEYS.split(", ").any(|known| known == setting.name), "{} is not listed", setting.name);
        let taken = |value: &str| match with(&[(setting.name, value)]) {
            Err(e) => e.code == baton_driver::Code::Unsupported,
            Ok(_) => true,
        };
        match setting.values {
            Values::OneOf(words) => {
                assert!(words.iter().all(|word| taken(word)), "{}", setting.name);
                assert!(!taken("none of these"), "{}", setting.name);
            }
            Values::Number(low, high) | Values::NumberNot(low, high, _) => {
                assert!(taken(&low.to_string()) && taken(&high.to_string()), "{}", setting.name);
                assert!(!taken(&(high + 1).to_string()), "{}", setting.name);
                assert!(low == 0 || !taken(&(low - 1).to_string()), "{}", setting.name);
            }
            Values::Text(_) => {}
        }
        if setting.otherwise.parse::<u32>().is_ok() {
            let said = with(&[(setting.name, setting.otherwise)]).expect("the default is valid");
            assert_eq!(said.verbs, Settings::default().verbs, "{}", setting.name);
        }
    }
}

use super::*;

fn params(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect()
}

fn environment(pairs: &[(&str, &str)]) -> Vec<(OsString, OsString)> {
    pairs.iter().map(|(k, v)| (k.into(), v.into())).collect()
}

fn refusal(p: &[(&str, &str)], e: &[(&str, &str)], file: Option<&str>) -> String {
    let file = file.map(|text| (Path::new("/etc/baton.toml"), text));
    select(&params(p), &environment(e), file).expect_err("refused").to_string()
}

#[test]
fn with_nothing_said_the_defaults_of_the_table_hold() {
    let choice = select(&params(&[]), &environment(&[("PATH", "/bin")]), None).expect("valid");
    for (chosen, setting) in choice.settings().iter().zip(SETTINGS) {
        assert_eq!(chosen.value.as_deref(), setting.default);
        assert_eq!(chosen.source, Source::Default);
    }
}

#[test]
fn parameter_goes_before_environment_before_file_before_default_and_the_others_are_remembered() {
    let file = (Path::new("/etc/baton.toml"), "fabric = \"local\"\nspin_us = 7\n");
    let all = select(&params(&[("fabric", "tcp")]), &environment(&[("BATON_FABRIC", "auto")]), Some(file))
        .expect("valid");
    let fabric = all.chosen("fabric").expect("in the table");
    assert_eq!((fabric.value.as_deref(), &fabric.source), (Some("tcp"), &Source::Parameter));
    assert_eq!(
        fabric.passed_over,
        [
            (Source::Environment, "auto".to_owned()),
            (Source::File("/etc/baton.toml".into()), "local".to_owned())
        ]
    );
    let spin = all.chosen("spin_us").expect("in the table");
    assert_eq!((spin.value.as_deref(), &spin.source), (Some("7"), &Source::File("/etc/baton.toml".into())));

    let two = select(&params(&[]), &environment(&[("BATON_FABRIC", "tcp")]), Some(file)).expect("valid");
    assert_eq!(two.chosen("fabric").expect("in the table").source, Source::Environment);
}

#[test]
fn every_word_of_every_setting_is_taken_and_a_word_beside_it_is_not() {
    for setting in SETTINGS {
        let crate::settings::Values::OneOf(words) = setting.values else { continue };
        for word in words {
            let choice =
                select(&params(&[]), &environment(&[(setting.variable, word)]), None).expect("valid");
            assert_eq!(choice.value(setting.name), Some(*word));
        }
        for wrong in ["", "AUTO", "auto ", "1", "none-such"] {
            let text = refusal(&[], &[(setting.variable, wrong)], None);
            assert!(text.contains(setting.variable) && text.contains(&words.join(", ")), "{text}");
        }
    }
}

#[test]
fn numbers_outside_their_limits_or_not_numbers_are_refused_with_the_limits() {
    for wrong in ["", "-1", "1000001", "99999999999999999999", "1.5", "+3", "0x10", " 5", "true"] {
        let text = refusal(&[], &[("BATON_SPIN_US", wrong)], None);
        assert!(text.contains("a whole number from 0 to 1000000"), "{text}");
    }
    assert!(refusal(&[("timeout_scale", "0")], &[], None).contains("from 1 to 1000"));
}

#[test]
fn an_unknown_name_is_refused_from_every_source_with_the_list_and_the_near_one() {
    let text = refusal(&[], &[("BATON_FABRICS", "tcp")], None);
    assert_eq!(
        text,
        "environment: unknown setting \"BATON_FABRICS\" (did you mean BATON_FABRIC?); known are BATON_PLUGIN, \
         BATON_BACKEND, BATON_FABRIC, BATON_NOTIFY, BATON_LISTEN, BATON_ADVERTISE, BATON_PTRACE, BATON_SPIN_US, \
         BATON_TIMEOUT_SCALE, BATON_CHUNK_BYTES, BATON_OOB_FALLBACK, BATON_DEVICES, BATON_LANES, BATON_IB_TIMEOUT, BATON_IB_RETRY, \
         BATON_GID_INDEX, BATON_IB_SL, BATON_IB_TC, BATON_MTU, BATON_IB_PKEY, BATON_VRAM_FLUSH, BATON_CONFIG, BATON_LOG"
    );
    let text = refusal(&[("Fabric", "tcp")], &[], None);
    assert!(text.starts_with("parameter: unknown setting \"Fabric\" (did you mean fabric?)"), "{text}");
    let text = refusal(&[], &[], Some("fabrik = \"tcp\""));
    assert!(text.starts_with("file /etc/baton.toml: unknown setting \"fabrik\""), "{text}");
    assert!(refusal(&[], &[], Some("config = \"/x\"")).contains("unknown setting \"config\""));
    assert!(refusal(&[], &[], Some("[fabric]\nx = 1")).contains("it takes auto, verbs, local, tcp"));
}

#[test]
fn a_wrong_value_suggests_the_word_it_resembles() {
    assert_eq!(
        refusal(&[], &[("BATON_BACKEND", "one_sided")], None),
        "environment: BATON_BACKEND is \"one_sided\"; it takes auto, one-sided, two-sided (did you mean one-sided?)"
    );
}

#[test]
fn a_file_that_is_not_toml_is_refused_in_one_line() {
    let text = refusal(&[], &[], Some("fabric = tcp"));
    assert!(text.starts_with("file /etc/baton.toml: ") && !text.contains('\n'), "{text}");
}

#[cfg(unix)]
#[test]
fn a_value_that_is_not_utf_8_is_refused_and_one_of_another_program_is_ignored() {
    use std::os::unix::ffi::OsStringExt;
    let bad = || OsString::from_vec(vec![0xff]);
    let refused = select(&params(&[]), &[("BATON_LOG".into(), bad())], None).expect_err("refused");
    assert_eq!(refused, SelectError::NotText("BATON_LOG".into()));
    select(&params(&[]), &[("OTHER".into(), bad()), (bad(), bad())], None).expect("not ours");
}

#[test]
fn the_file_is_named_by_the_parameter_before_the_environment() {
    let e = environment(&[("BATON_CONFIG", "/e")]);
    assert_eq!(config_path(&params(&[]), &e), Ok(Some("/e".into())));
    assert_eq!(config_path(&params(&[("config", "/p")]), &e), Ok(Some("/p".into())));
    assert_eq!(config_path(&params(&[]), &[]), Ok(None));
}

#[test]
fn the_table_in_markdown_has_a_line_for_every_setting() {
    let table = crate::settings::markdown();
    assert_eq!(table.lines().count(), SETTINGS.len() + 2);
    assert!(table.contains("| `BATON_FABRIC` | `fabric` | `auto`, `verbs`, `local`, `tcp` | `auto` |"));
}

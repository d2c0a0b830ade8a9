use std::collections::BTreeMap;

use super::*;
use crate::select::{Choice, Source, select};
use crate::settings::SETTINGS;

fn choice(params: &[(&str, &str)], environment: &[(&str, &str)]) -> Choice {
    let params: BTreeMap<_, _> = params.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
    let environment: Vec<_> = environment.iter().map(|(k, v)| (k.into(), v.into())).collect();
    select(&params, &environment, None).expect("other projects' variables break nothing")
}

fn told(choice: &Choice) -> Vec<(bool, &str)> {
    choice.notes().iter().map(|note| (note.warning, note.text.as_str())).collect()
}

fn chosen(choice: &Choice, name: &str) -> (Option<String>, Source) {
    let chosen = choice.chosen(name).expect("a setting");
    (chosen.value.clone(), chosen.source.clone())
}

#[test]
fn every_alias_names_a_setting_of_the_engine_and_none_is_a_name_of_ours() {
    for alias in ALIASES {
        let ours = SETTINGS.iter().find(|s| s.name == alias.setting).expect(alias.variable);
        assert_eq!(ours.reader, crate::settings::Reader::Engine);
        assert!(!alias.variable.starts_with("BATON_"));
        if let Some((theirs, value, _)) = alias.replaced {
            assert!(!ours.values.admit(theirs) && ours.values.admit(value), "{}", alias.variable);
        }
        assert_eq!(ALIASES.iter().filter(|a| a.variable == alias.variable).count(), 1);
    }
}

#[test]
fn an_alias_is_read_where_the_setting_is_not_given_and_the_choice_says_so() {
    let choice = choice(&[], &[("NCCL_IB_GID_INDEX", "3"), ("MC_MTU", "1024"), ("NCCL_IB_TIMEOUT", " 20 ")]);
    assert_eq!(chosen(&choice, "gid_index"), (Some("3".into()), Source::Alias("NCCL_IB_GID_INDEX")));
    assert_eq!(chosen(&choice, "mtu"), (Some("1024".into()), Source::Alias("MC_MTU")));
    assert_eq!(chosen(&choice, "ib_timeout"), (Some("20".into()), Source::Alias("NCCL_IB_TIMEOUT")));
    assert_eq!(
        told(&choice),
        [
            (false, "ib_timeout 20 from NCCL_IB_TIMEOUT, as BATON_IB_TIMEOUT is not set"),
            (false, "gid_index 3 from NCCL_IB_GID_INDEX, as BATON_GID_INDEX is not set"),
            (false, "mtu 1024 from MC_MTU, as BATON_MTU is not set"),
        ]
    );
    assert_eq!(Source::Alias("MC_MTU").to_string(), "environment variable MC_MTU");
}

#[test]
fn our_own_name_from_any_source_goes_before_and_nothing_is_told_of_the_alias() {
    let aliases = ("MC_GID_INDEX", "5");
    for choice in [
        choice(&[], &[("BATON_GID_INDEX", "1"), aliases, ("NCCL_IB_GID_INDEX", "x")]),
        choice(&[("gid_index", "1")], &[aliases, ("NCCL_IB_GID_INDEX", "x")]),
    ] {
        assert_eq!(choice.value("gid_index"), Some("1"));
        assert_eq!(told(&choice), []);
        let passed_over = &choice.chosen("gid_index").expect("a setting").passed_over;
        assert_eq!(passed_over.as_slice(), [(Source::Alias("MC_GID_INDEX"), "5".to_owned())]);
    }
}

#[test]
fn of_two_aliases_the_first_of_the_table_wins_and_a_difference_is_a_warning_that_names_both() {
    let differ = choice(&[], &[("NCCL_IB_TC", "106"), ("MC_IB_TC", "96")]);
    assert_eq!(chosen(&differ, "ib_tc"), (Some("96".into()), Source::Alias("MC_IB_TC")));
    assert_eq!(
        told(&differ),
        [
            (false, "ib_tc 96 from MC_IB_TC, as BATON_IB_TC is not set"),
            (true, "MC_IB_TC says ib_tc 96 and NCCL_IB_TC says 106: the first is used; BATON_IB_TC decides"),
        ]
    );
    let agree = choice(&[], &[("NCCL_IB_TC", "96"), ("MC_IB_TC", "96")]);
    assert_eq!(told(&agree), [(false, "ib_tc 96 from MC_IB_TC, as BATON_IB_TC is not set")]);
}

#[test]
fn a_value_that_would_be_endless_is_replaced_and_the_note_says_why() {
    let choice = choice(&[], &[("NCCL_IB_RETRY_CNT", "7")]);
    assert_eq!(chosen(&choice, "ib_retry"), (Some("6".into()), Source::Alias("NCCL_IB_RETRY_CNT")));
    assert_eq!(
        told(&choice),
        [(
            false,
            "ib_retry 6 from NCCL_IB_RETRY_CNT, as BATON_IB_RETRY is not set; it says 7, but 7 is endless on some devices"
        )]
    );
}

#[test]
fn what_an_alias_must_not_say_is_ignored_with_a_warning_and_the_default_stays() {
    for (variable, name, value) in [
        ("NCCL_IB_TIMEOUT", "ib_timeout", "0"),
        ("NCCL_IB_RETRY_CNT", "ib_retry", "9"),
        ("MC_GID_INDEX", "gid_index", "-1"),
        ("MC_MTU", "mtu", "9000"),
        ("NCCL_IB_SL", "ib_sl", "0x3"),
        ("NCCL_IB_TC", "ib_tc", "256"),
        ("MC_PKEY_INDEX", "ib_pkey", "first"),
    ] {
        let choice = choice(&[], &[(variable, value)]);
        assert_eq!(chosen(&choice, name), (None, Source::Default));
        let [(true, text)] = told(&choice)[..] else { panic!("{variable}: {:?}", told(&choice)) };
        assert!(text.starts_with(&format!("{variable} is {value:?} and ignored; for {name} ")), "{text}");
    }
    // The next one of the table may still say something.
    let next = choice(&[], &[("MC_GID_INDEX", "x"), ("NCCL_IB_GID_INDEX", "1")]);
    assert_eq!(chosen(&next, "gid_index"), (Some("1".into()), Source::Alias("NCCL_IB_GID_INDEX")));
    assert_eq!(told(&next).len(), 2);
}

#[test]
fn a_negative_number_of_nccl_or_an_empty_value_is_as_if_not_set() {
    let choice =
        choice(&[], &[("NCCL_IB_GID_INDEX", "-1"), ("NCCL_IB_TC", "-2"), ("MC_MTU", ""), ("MC_IB_SL", " ")]);
    assert_eq!(told(&choice), []);
    for name in ["gid_index", "ib_tc", "mtu", "ib_sl"] {
        assert_eq!(chosen(&choice, name), (None, Source::Default));
    }
}

#[test]
fn what_only_looks_the_same_is_left_alone() {
    let others =
        ["NCCL_IB_HCA", "MC_TE_FILTERS", "MC_RETRY_CNT", "MC_NUM_QP_PER_EP", "NCCL_IB_QPS_PER_CONNECTION"];
    let choice = choice(&[], &others.map(|name| (name, "3")));
    assert_eq!(told(&choice), []);
    assert!(choice.settings().iter().all(|c| c.source == Source::Default));
}

#[cfg(unix)]
#[test]
fn an_alias_that_is_not_utf_8_is_ignored_with_a_warning() {
    use std::os::unix::ffi::OsStringExt;
    let environment = [("MC_GID_INDEX".into(), OsString::from_vec(vec![0xff]))];
    let choice = select(&BTreeMap::new(), &environment, None).expect("nothing of ours");
    let [note] = choice.notes() else { panic!("{:?}", choice.notes()) };
    assert!(note.warning && note.text.starts_with("MC_GID_INDEX is not UTF-8 and ignored"), "{}", note.text);
}

#[test]
fn the_table_of_settings_lists_the_aliases() {
    let table = crate::settings::markdown();
    assert!(
        table.contains("entry of each port's GID table. Else from `MC_GID_INDEX`, `NCCL_IB_GID_INDEX`. |"),
        "{table}"
    );
    assert!(table.contains("a whole number from 0 to 6 (7 is endless on some devices)"), "{table}");
}

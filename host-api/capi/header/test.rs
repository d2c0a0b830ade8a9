//! The committed header is the one that the sources make.

mod generate;

use baton_abi::{FIELD_NAMES, FIELDS};

#[test]
fn the_committed_header_is_fresh() {
    let committed = std::fs::read_to_string(generate::header_path()).expect("the header is committed");
    assert!(committed == generate::header(), "baton.h is stale: run cargo xtask header");
}

#[test]
fn every_entry_of_the_table_has_a_function() {
    let header = generate::header();
    for (field, name) in FIELDS.iter().zip(FIELD_NAMES) {
        let Some(entry) = name.strip_prefix("BatonEngineV1.") else { continue };
        let function = match entry {
            "create" => "baton_engine_open".to_owned(),
            "destroy" => "baton_engine_close".to_owned(),
            _ if field.offset_bytes < 72 => continue,
            other => format!("baton_{other}"),
        };
        assert!(header.contains(&format!("{function}(")), "{function}");
    }
}

use baton_abi::{BATON_ERR_UNSUPPORTED, BatonSlice};

use super::*;

fn table() -> BatonEngineV1 {
    UNSUPPORTED_TABLE
}

fn refusal(table: &BatonEngineV1) -> String {
    // SAFETY: a table of this process with a true list of fields.
    unsafe { fit(table) }.err().expect("refused").to_string()
}

fn with_fields(change: impl FnOnce(&mut Vec<BatonField>)) -> BatonEngineV1 {
    let mut fields = FIELDS.to_vec();
    change(&mut fields);
    let fields = fields.leak();
    BatonEngineV1 { fields: fields.as_ptr(), fields_count: fields.len() as u64, ..table() }
}

fn position(name: &str) -> usize {
    FIELDS
        .iter()
        // SAFETY: static strings.
        .position(|f| unsafe { f.name.bytes() } == Some(name.as_bytes()))
        .expect("known field")
}

#[test]
fn the_same_interface_fits_whole() {
    // SAFETY: a table of this process.
    assert!(unsafe { fit(&table()) }.is_ok_and(|f| f.missing.is_empty()));
}

#[test]
fn another_symbol_is_no_table() {
    let wrong = BatonEngineV1 { magic: 7, ..table() };
    assert!(refusal(&wrong).contains("begins with 0x0000000000000007"));
}

#[test]
fn another_major_is_refused_before_anything_else_is_read() {
    let wrong = BatonEngineV1 { abi_major: 2, fields: std::ptr::null(), size_bytes: 3, ..table() };
    assert_eq!(refusal(&wrong), "major version 2 against 1 here");
}

#[test]
fn a_damaged_head_is_refused() {
    assert!(refusal(&BatonEngineV1 { size_bytes: 64, ..table() }).contains("damaged: size 64"));
    assert!(refusal(&BatonEngineV1 { size_bytes: 100, ..table() }).contains("damaged: size 100"));
    assert!(refusal(&BatonEngineV1 { fields: std::ptr::null(), ..table() }).contains("damaged"));
    assert!(refusal(&BatonEngineV1 { fields_count: 1 << 40, ..table() }).contains("damaged"));
}

#[test]
fn a_changed_field_is_named_with_both_sides() {
    let at = position("BatonDesc.region");
    let changed = with_fields(|f| f[at].signature = BatonSlice::from_static("u32"));
    assert_eq!(
        refusal(&changed),
        "first difference: BatonDesc.region is \"region\" (u32, 8 bytes at 16) in the engine, \
         \"region\" (u64, 8 bytes at 16) here"
    );
    let moved = with_fields(|f| f[at].offset_bytes = 24);
    assert!(refusal(&moved).contains("BatonDesc.region is \"region\" (u64, 8 bytes at 24)"));
}

#[test]
fn a_field_taken_from_or_added_to_a_plain_structure_is_refused() {
    let at = position("BatonDesc.reserved");
    let taken = with_fields(|f| {
        f.remove(at);
    });
    assert!(refusal(&taken).contains("BatonDesc.reserved is missing in the engine"));
    let added = with_fields(|f| {
        let more = BatonField { name: BatonSlice::from_static("BatonDesc.more"), ..f[at] };
        f.insert(at + 1, more);
    });
    assert!(refusal(&added).contains("BatonDesc.more is \"more\""));
}

#[test]
fn a_structure_that_begins_with_its_size_and_the_table_may_be_longer() {
    let longer = with_fields(|f| {
        let last = *f.last().expect("not empty");
        f.push(BatonField { name: BatonSlice::from_static("BatonEngineV1.more"), offset_bytes: 344, ..last });
        let at = position("BatonEvent.partial_count");
        let more = BatonField { name: BatonSlice::from_static("BatonEvent.more"), ..f[at] };
        f.insert(at + 1, more);
    });
    // SAFETY: a table of this process.
    assert!(unsafe { fit(&longer) }.is_ok());
}

#[test]
fn entries_a_shorter_table_lacks_answer_unsupported() {
    unsafe extern "C" fn one(_: *mut baton_abi::BatonEngine) -> i32 {
        1
    }
    let size = std::mem::offset_of!(BatonEngineV1, stats);
    let keep = position("BatonEngineV1.stats");
    let older = BatonEngineV1 {
        size_bytes: size as u64,
        progress: one,
        set_log_level: {
            unsafe extern "C" fn past_the_end(_: *mut baton_abi::BatonEngine, _: u32) -> i32 {
                unreachable!("not part of the table")
            }
            past_the_end
        },
        ..with_fields(|f| f.truncate(keep))
    };
    // SAFETY: a table of this process.
    let Ok(fitted) = (unsafe { fit(&older) }) else { panic!("an older table fits") };
    assert_eq!(fitted.missing, ["stats", "set_log_level", "probe", "last_error", "post_xfer_req_with"]);
    // SAFETY: neither function reads its arguments.
    unsafe {
        assert_eq!((fitted.table.progress)(std::ptr::null_mut()), 1);
        assert_eq!((fitted.table.set_log_level)(std::ptr::null_mut(), 1), BATON_ERR_UNSUPPORTED);
    }
}

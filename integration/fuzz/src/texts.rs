//! What hosts and engines hand on: exported regions, connection information, messages of the handshake and the lifeline.

use baton_core::wire::*;
use serde_json::Value;

use crate::samples;

/// Numbers that are no whole ones: a decimal text is not exactly the same number in every parser's hands. They may stand only where a
/// fabric's address is any JSON.
fn has_fraction(value: &Value) -> bool {
    match value {
        Value::Number(number) => number.is_f64(),
        Value::Array(items) => items.iter().any(has_fraction),
        Value::Object(map) => map.values().any(has_fraction),
        _ => false,
    }
}

// ---- exported regions -----------------------------------------------------------------------------------------

pub(crate) fn run_region(bytes: &[u8]) {
    check_region(bytes);
    let mut mended = bytes.to_vec();
    mend_region(&mut mended);
    check_region(&mended);
}

fn check_region(bytes: &[u8]) {
    let Ok(blob) = RegionBlob::decode(bytes) else { return };
    assert_eq!(blob.encode().expect("what decodes can be encoded"), bytes, "what decodes is canonical");
    for on in &blob.fabrics {
        assert!(on.keys.len() * 8 <= bytes.len(), "no more is allocated than came");
        // Every byte has a key on every rail, and none behind the end has one.
        for rail in 0..on.rails {
            for offset in [0, blob.len / 2, blob.len - 1] {
                assert!(blob.key(&on.fabric, rail, offset).is_some(), "rail {rail}, offset {offset}");
            }
            assert_eq!(blob.key(&on.fabric, rail, blob.len), None);
        }
        assert_eq!(blob.key(&on.fabric, on.rails, 0), None);
    }
}

/// Magic, version and checksum as they should be.
fn mend_region(bytes: &mut [u8]) {
    let Some((covered, crc)) = bytes.split_last_chunk_mut::<4>() else { return };
    let head = b"BREG\x02\0\0\0";
    let begins = head.len().min(covered.len());
    covered[..begins].copy_from_slice(&head[..begins]);
    *crc = crc32c::crc32c(covered).to_le_bytes();
}

pub(crate) fn region_seeds() -> Vec<Vec<u8>> {
    samples::regions().iter().map(|blob| blob.encode().expect("a sample is within the limits")).collect()
}

// ---- connection information -----------------------------------------------------------------------------------

const CONN_INFO_HEAD: usize = 18;

pub(crate) fn run_conn_info(bytes: &[u8]) {
    check_conn_info(bytes);
    // As the payload of one that is right.
    let mut whole = b"BATONCI\0\x01\0".to_vec();
    whole.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
    whole.extend_from_slice(&crc32c::crc32c(bytes).to_le_bytes());
    whole.extend_from_slice(bytes);
    check_conn_info(&whole);
    if let Ok(text) = std::str::from_utf8(bytes) {
        check_candidate(text);
    }
}

fn check_conn_info(bytes: &[u8]) {
    let info = match ConnInfo::decode(bytes) {
        Ok(info) => info,
        Err(error) => return drop(error.to_string()),
    };
    info.candidates.iter().for_each(|text| assert!(parse_candidate(text).is_some()));
    assert!(format!("{info:?}").contains("key: SessionKey(..)"), "the key is not shown");
    match info.encode() {
        Ok(again) if info.addresses.values().any(has_fraction) => assert!(ConnInfo::decode(&again).is_ok()),
        Ok(again) => assert_eq!(ConnInfo::decode(&again), Ok(info)),
        // What the peer wrote shortly, `1e9` say, is written out.
        Err(ConnInfoError::TooLong(_)) => assert!(bytes.len() > MAX_CONN_INFO_BYTES / 8),
        Err(error) => panic!("what decodes can be encoded: {error}"),
    }
}

fn check_candidate(text: &str) {
    let Some(candidate) = parse_candidate(text) else { return };
    assert_ne!(candidate.addr.port(), 0);
    assert!(candidate.scope.is_none() || candidate.addr.is_ipv6());
}

pub(crate) fn conn_info_seeds() -> Vec<Vec<u8>> {
    let whole = samples::conn_info().encode().expect("a sample is within the limits");
    let payload = whole[CONN_INFO_HEAD..].to_vec();
    let candidates = samples::conn_info().candidates.into_iter().map(String::into_bytes);
    [whole, payload].into_iter().chain(candidates).collect()
}

// ---- handshake and lifeline -----------------------------------------------------------------------------------

pub(crate) fn run_message(json: &[u8]) {
    let message = match Message::decode(json) {
        Ok(message) => message,
        Err(error) => return drop(error.to_string()),
    };
    let offers = match &message {
        Message::Hello(hello) => &hello.offers[..],
        Message::Reply(reply) => std::slice::from_ref(&reply.offer),
        _ => &[],
    };
    offers.iter().for_each(check_offer);
    let again = Message::decode(&message.encode()).expect("what decodes can be encoded");
    let value: Value = serde_json::from_slice(json).expect("it was decoded");
    assert!(has_fraction(&value) || again == message);
}

/// What was decoded is within the limits that negotiation and set-up rely on.
pub(crate) fn check_offer(offer: &FabricOffer) {
    assert!(offer.recvs() <= MAX_SESSION_RECVS);
    let agreed = negotiate(offer, offer).expect("it has a backend");
    assert_eq!(agreed.backends(), offer.backends());
}

pub(crate) fn message_seeds() -> Vec<Vec<u8>> {
    samples::messages().iter().map(Message::encode).collect()
}

pub(crate) fn run_lifeline(json: &[u8]) {
    let frame = match LifelineFrame::decode(json) {
        Ok(frame) => frame,
        Err(error) => return drop(error.to_string()),
    };
    let again = frame.encode().expect("what decodes can be encoded");
    assert_eq!(LifelineFrame::decode(&again), Ok(frame));
    assert!(MAC_BYTES + again.len() <= MAX_FRAME_BYTES, "it fits a frame");
}

pub(crate) fn lifeline_seeds() -> Vec<Vec<u8>> {
    let encoded = |frame: &LifelineFrame| frame.encode().expect("a sample is within the limits");
    samples::lifeline_frames().iter().map(encoded).collect()
}

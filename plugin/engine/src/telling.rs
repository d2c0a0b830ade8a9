//! Entries about what a transfer tells its target besides its data.

use crate::convert::{bytes, name};
use crate::entries::status;
use crate::object::{self, with};
use baton_abi::*;
use baton_driver::{Error, Tell, err};

pub unsafe extern "C" fn post_xfer_req_with(
    engine: *mut BatonEngine,
    xfer: *mut BatonXfer,
    options: *const BatonPostOptions,
) -> BatonStatus {
    // SAFETY: the contract.
    unsafe {
        with(engine, |e| {
            let tell = tell(options)?;
            let xfer = &object::xfer(xfer)?.xfer;
            e.driver.post_telling(xfer, tell)?;
            status(xfer.status())
        })
    }
}

/// # Safety
/// `options` must be null or as long as it says, its message readable for the call.
unsafe fn tell<'a>(options: *const BatonPostOptions) -> Result<Tell<'a>, Error> {
    if options.is_null() {
        return Err(err!(InvalidParam, "options is null"));
    }
    // SAFETY: the caller's promise; nothing behind the size that it tells is read.
    let options = unsafe {
        let size = (&raw const (*options).size_bytes).read();
        if (size as usize) < size_of::<BatonPostOptions>() {
            return Err(err!(
                InvalidParam,
                "options.size_bytes is {size}; this engine needs at least {}",
                size_of::<BatonPostOptions>()
            ));
        }
        options.read()
    };
    let BatonPostOptions { flags, id, .. } = options;
    if flags & !(BATON_POST_NOTIFY | BATON_POST_ID) != 0 {
        return Err(err!(InvalidParam, "options.flags {flags:#x}: known are 1 (notify) and 2 (id)"));
    }
    if flags & BATON_POST_ID == 0 && id != 0 {
        return Err(err!(InvalidParam, "options.id is {id} without the flag 2 (id); it must be 0"));
    }
    // SAFETY: the caller's promise.
    let message = unsafe { message(options.message, flags, "options.message")? };
    Ok(Tell { message, id: (flags & BATON_POST_ID != 0).then_some(id) })
}

/// What is told with these flags; a message that they say nothing of is refused instead of lost.
///
/// # Safety
/// `message` must be readable for the call.
pub(crate) unsafe fn message<'a>(
    message: BatonSlice,
    flags: u32,
    called: &str,
) -> Result<Option<&'a [u8]>, Error> {
    // SAFETY: the caller's promise.
    let message = unsafe { bytes(message, "message")? };
    if flags & BATON_POST_NOTIFY == 0 && !message.is_empty() {
        let len = message.len();
        return Err(err!(
            InvalidParam,
            "{called} has {len} bytes without the flag 1 (notify); it must be empty"
        ));
    }
    Ok((flags & BATON_POST_NOTIFY != 0).then_some(message))
}

pub unsafe extern "C" fn inbound_status(engine: *mut BatonEngine, peer: BatonSlice, id: u64) -> BatonStatus {
    // SAFETY: the contract.
    unsafe {
        with(engine, |e| {
            let landed = e.driver.inbound_status(name(peer)?, id)?;
            Ok(if landed { BATON_OK } else { BATON_IN_PROGRESS })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: u32 = size_of::<BatonPostOptions>() as u32;

    fn told(
        size_bytes: u32,
        flags: u32,
        message: &[u8],
        id: u64,
    ) -> Result<(Option<Vec<u8>>, Option<u64>), String> {
        let options = BatonPostOptions { size_bytes, flags, message: BatonSlice::of(message), id };
        // SAFETY: options and message live through the call.
        let tell = unsafe { tell(&options) }.map_err(|e| e.text)?;
        Ok((tell.message.map(<[u8]>::to_vec), tell.id))
    }

    #[test]
    fn a_message_without_the_flag_is_refused_and_not_lost() {
        let told = |flags, bytes: &[u8]| {
            // SAFETY: the bytes live through the call.
            let told = unsafe { message(BatonSlice::of(bytes), flags, "message") };
            told.map(|told| told.map(<[u8]>::to_vec)).map_err(|e| e.text)
        };
        assert_eq!(told(0, b""), Ok(None));
        assert_eq!(told(BATON_POST_NOTIFY, b""), Ok(Some(vec![])));
        assert_eq!(told(BATON_POST_NOTIFY, b"m"), Ok(Some(b"m".to_vec())));
        assert_eq!(
            told(0, b"m"),
            Err("message has 1 bytes without the flag 1 (notify); it must be empty".into())
        );
    }

    #[test]
    fn options_say_what_is_told_and_what_contradicts_itself_is_refused_by_name() {
        assert_eq!(told(SIZE, 0, b"", 0), Ok((None, None)));
        assert_eq!(told(SIZE, BATON_POST_NOTIFY, b"", 0), Ok((Some(vec![]), None)));
        assert_eq!(told(SIZE, BATON_POST_ID, b"", 0), Ok((None, Some(0))));
        assert_eq!(
            told(SIZE + 8, BATON_POST_ID | BATON_POST_NOTIFY, b"m", 7),
            Ok((Some(b"m".to_vec()), Some(7)))
        );
        for (size, flags, message, id, words) in [
            (SIZE - 1, 0, &b""[..], 0, "options.size_bytes is 31; this engine needs at least 32"),
            (SIZE, 4, b"", 0, "options.flags 0x4"),
            (SIZE, 0, b"", 9, "options.id is 9 without the flag 2"),
            (SIZE, BATON_POST_ID, b"m", 9, "options.message has 1 bytes without the flag 1"),
        ] {
            let error = told(size, flags, message, id).expect_err("refused");
            assert!(error.contains(words), "{error}");
        }
        // SAFETY: null is looked at, not through.
        assert!(unsafe { tell(std::ptr::null()) }.is_err_and(|e| e.text.contains("options is null")));
    }
}

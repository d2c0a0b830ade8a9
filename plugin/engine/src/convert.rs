//! Raw arguments → checked values, values → the caller's buffers.

use baton_abi::{BATON_OK, BatonDesc, BatonSlice, BatonStatus};
use baton_driver::{Desc, Error, err};

/// # Safety
/// The slice must be readable for the call.
pub unsafe fn bytes<'a>(slice: BatonSlice, what: &str) -> Result<&'a [u8], Error> {
    // SAFETY: the caller's promise.
    unsafe { slice.bytes() }.ok_or_else(|| {
        err!(InvalidParam, "{what}: null pointer or impossible length with {} bytes", slice.len_bytes)
    })
}

/// # Safety
/// The slice must be readable for the call.
pub unsafe fn text<'a>(slice: BatonSlice, what: &str) -> Result<&'a str, Error> {
    // SAFETY: the caller's promise.
    std::str::from_utf8(unsafe { bytes(slice, what)? })
        .map_err(|e| err!(InvalidParam, "{what} is not UTF-8: {e}"))
}

/// A peer's or our own agent name.
///
/// # Safety
/// The slice must be readable for the call.
pub unsafe fn name<'a>(slice: BatonSlice) -> Result<&'a str, Error> {
    // SAFETY: the caller's promise.
    let bytes = unsafe { bytes(slice, "agent name")? };
    baton_core::wire::check_name(bytes).map_err(|e| err!(InvalidParam, "{e}"))
}

/// # Safety
/// `out` must be null or writable.
pub unsafe fn out<T>(out: *mut T, value: T, what: &str) -> Result<BatonStatus, Error> {
    if out.is_null() {
        return Err(err!(InvalidParam, "{what} is null"));
    }
    // SAFETY: not null, and writable by the caller's promise.
    unsafe { out.write(value) };
    Ok(BATON_OK)
}

/// Hands bytes to a caller's buffer by the rule of the table: the needed size always, the bytes if they fit.
///
/// # Safety
/// `buf` must be writable for `cap_bytes`, `needed_bytes` null or writable.
pub unsafe fn fill(
    bytes: &[u8],
    buf: *mut u8,
    cap_bytes: u64,
    needed_bytes: *mut u64,
) -> Result<BatonStatus, Error> {
    if !needed_bytes.is_null() {
        // SAFETY: the caller's promise.
        unsafe { needed_bytes.write(bytes.len() as u64) };
    }
    if (bytes.len() as u64) > cap_bytes || (buf.is_null() && !bytes.is_empty()) {
        return Err(err!(TooSmall, "the buffer has {cap_bytes} bytes, {} are needed", bytes.len()));
    }
    if !bytes.is_empty() {
        // SAFETY: `buf` is not null and writable for at least this many bytes; it cannot overlap our own bytes.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), buf, bytes.len()) };
    }
    Ok(BATON_OK)
}

/// # Safety
/// `list` must be readable for `count` elements.
pub unsafe fn descs<'a>(list: *const BatonDesc, count: u64, what: &str) -> Result<&'a [Desc], Error> {
    const { assert!(size_of::<Desc>() == size_of::<BatonDesc>() && align_of::<Desc>() == align_of::<BatonDesc>()) };
    // SAFETY: the caller's promise; `Desc` has the layout of `BatonDesc`, and every bit pattern is a value of it.
    unsafe { list_of(list.cast(), count, what) }
}

/// # Safety
/// `list` must be readable for `count` elements.
pub unsafe fn indices<'a>(list: *const u32, count: u64, what: &str) -> Result<&'a [u32], Error> {
    // SAFETY: the caller's promise; every bit pattern is a number.
    unsafe { list_of(list, count, what) }
}

/// # Safety
/// `list` must be readable for `count` elements, and whatever is there be a `T`.
unsafe fn list_of<'a, T>(list: *const T, count: u64, what: &str) -> Result<&'a [T], Error> {
    if count == 0 {
        return Ok(&[]);
    }
    if list.is_null() || !list.is_aligned() || count > isize::MAX as u64 / size_of::<T>() as u64 {
        return Err(err!(InvalidParam, "{what}: null or misaligned pointer, or impossible count {count}"));
    }
    // SAFETY: readable by the caller's promise, checked above.
    Ok(unsafe { std::slice::from_raw_parts(list, count as usize) })
}

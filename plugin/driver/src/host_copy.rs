//! Copies that touch the host's memory: by the kernel, which answers with an error where a plain copy would end the process, because the
//! host has unmapped or protected that memory.

use libc::c_void;

/// Copies within this process. Spans that overlap are copied as if by way of a third place.
///
/// # Safety
/// Nothing else uses the target meanwhile. Whether both spans are there is found out; only where the kernel refuses to copy at all
/// it is taken for granted.
pub(crate) unsafe fn copy(source: u64, target: u64, len: u64) -> std::io::Result<()> {
    if source.abs_diff(target) < len {
        // SAFETY: the caller's promise.
        unsafe { plain_copy(source, target, len) };
        return Ok(());
    }
    let mut done = 0;
    while done < len {
        let span = |base: u64| libc::iovec {
            iov_base: (base + done) as *mut c_void,
            iov_len: (len - done) as usize,
        };
        let (to, of) = (span(target), span(source));
        // SAFETY: plain integers for the kernel, which checks both spans.
        let n = unsafe { libc::process_vm_readv(libc::getpid(), &to, 1, &of, 1, 0) };
        match n {
            1.. => done += n as u64,
            0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            _ => match std::io::Error::last_os_error() {
                // The call is forbidden here.
                e if matches!(e.raw_os_error(), Some(libc::EPERM | libc::ENOSYS)) => {
                    // SAFETY: the caller's promise.
                    unsafe { plain_copy(source + done, target + done, len - done) };
                    return Ok(());
                }
                e => return Err(e),
            },
        }
    }
    Ok(())
}

unsafe fn plain_copy(source: u64, target: u64, len: u64) {
    // SAFETY: the caller's promise; `copy` allows overlap.
    unsafe { std::ptr::copy(source as *const u8, target as *mut u8, len as usize) };
}

//! The layout in numbers: a change that moves anything does not compile.

use core::mem::{align_of, offset_of, size_of};

use crate::*;

include!(concat!(env!("OUT_DIR"), "/fields.rs"));
include!(concat!(env!("OUT_DIR"), "/unsupported.rs"));

impl BatonSlice {
    /// No bytes.
    pub const EMPTY: BatonSlice = BatonSlice { ptr: core::ptr::null(), len_bytes: 0 };

    /// Bytes of a string that lives for ever.
    pub const fn from_static(text: &'static str) -> BatonSlice {
        BatonSlice { ptr: text.as_ptr(), len_bytes: text.len() as u64 }
    }

    /// Borrows bytes; the caller keeps them alive for the call the slice goes to.
    pub const fn of(bytes: &[u8]) -> BatonSlice {
        BatonSlice { ptr: bytes.as_ptr(), len_bytes: bytes.len() as u64 }
    }

    /// The bytes; `None` for a null pointer with a length, or a length beyond the address space.
    ///
    /// # Safety
    /// `ptr` must be readable for `len_bytes` bytes during `'a`, and nobody may write them meanwhile.
    pub const unsafe fn bytes<'a>(self) -> Option<&'a [u8]> {
        if self.len_bytes == 0 {
            return Some(&[]);
        }
        if self.ptr.is_null() || self.len_bytes > isize::MAX as u64 {
            return None;
        }
        // SAFETY: not null, within the address space, and readable by the caller's promise.
        Some(unsafe { core::slice::from_raw_parts(self.ptr, self.len_bytes as usize) })
    }
}

macro_rules! layout {
    ($ty:ident, $size:literal, $align:literal, { $($field:ident @ $offset:literal),* $(,)? }) => {
        const _: () = {
            assert!(size_of::<$ty>() == $size, concat!("size of ", stringify!($ty)));
            assert!(align_of::<$ty>() == $align, concat!("alignment of ", stringify!($ty)));
            $(assert!(offset_of!($ty, $field) == $offset, concat!(stringify!($ty), ".", stringify!($field)));)*
            // Every field is listed, or this does not compile.
            #[allow(dead_code)]
            fn complete(value: $ty) {
                let $ty { $($field: _),* } = value;
            }
        };
    };
}

layout!(BatonSlice, 16, 8, { ptr @ 0, len_bytes @ 8 });
layout!(BatonSetting, 32, 8, { key @ 0, value @ 16 });
layout!(BatonCreateOptions, 64, 8, {
    size_bytes @ 0, flags @ 4, agent_name @ 8, settings @ 24, settings_count @ 32, log @ 40, log_user @ 48,
    log_level @ 56, reserved @ 60,
});
layout!(BatonMemory, 32, 8, { addr @ 0, len_bytes @ 8, device @ 16, kind @ 24, access @ 28 });
layout!(BatonDesc, 32, 8, { addr @ 0, len_bytes @ 8, region @ 16, reserved @ 24 });
layout!(BatonXferSpec, 56, 8, {
    size_bytes @ 0, op @ 4, peer @ 8, local @ 24, local_count @ 32, remote @ 40, remote_count @ 48,
});
layout!(BatonIndexSpec, 64, 8, {
    size_bytes @ 0, op @ 4, peer @ 8, local_list @ 24, remote_list @ 32, local_indices @ 40,
    remote_indices @ 48, index_count @ 56,
});
layout!(BatonPostOptions, 32, 8, { size_bytes @ 0, flags @ 4, message @ 8, id @ 24 });
layout!(BatonEvent, 56, 8, {
    size_bytes @ 0, kind @ 4, peer @ 8, instance @ 24, partial_seqs @ 40, partial_count @ 48,
});
layout!(BatonNotifHeader, 24, 8, {
    total_bytes @ 0, message_len_bytes @ 8, name_len_bytes @ 16, reserved @ 20,
});
layout!(BatonField, 40, 8, { name @ 0, signature @ 16, offset_bytes @ 32, size_bytes @ 36 });
layout!(BatonEngineV1, 344, 8, {
    magic @ 0, abi_major @ 8, abi_minor @ 12, size_bytes @ 16, engine_name @ 24, engine_version @ 40,
    fields @ 56, fields_count @ 64, create @ 72, destroy @ 80, conn_info @ 88, load_remote @ 96,
    connect @ 104, disconnect @ 112, register @ 120, deregister @ 128, export_region @ 136,
    import_region @ 144, release_remote_region @ 152, create_xfer_req @ 160, create_block_list @ 168,
    release_block_list @ 176, create_xfer_from_indices @ 184, post_xfer_req @ 192, xfer_status @ 200,
    xfer_error @ 208, xfer_cancel @ 216, release_xfer_req @ 224, poll_many @ 232, gen_notif @ 240,
    get_notifs @ 248, inbound_status @ 256, set_event_hook @ 264, notify_fd @ 272, alloc_managed @ 280,
    free_managed @ 288, progress @ 296, stats @ 304, set_log_level @ 312, probe @ 320, last_error @ 328,
    post_xfer_req_with @ 336,
});

#[cfg(test)]
mod tests {
    use super::*;

    fn text(slice: BatonSlice) -> &'static str {
        // SAFETY: FIELDS holds static strings only.
        core::str::from_utf8(unsafe { slice.bytes() }.expect("static")).expect("UTF-8")
    }

    #[test]
    fn the_field_list_names_every_entry_once_and_writes_aliases_out() {
        let mut names: Vec<_> = FIELDS.iter().map(|f| text(f.name)).collect();
        let entries = names.iter().filter(|n| n.starts_with("BatonEngineV1.")).count();
        assert_eq!(entries, 8 + (size_of::<BatonEngineV1>() - 72) / 8);
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), FIELDS.len());
        for field in FIELDS {
            let signature = text(field.signature);
            assert!(!signature.contains(' '), "{signature}");
            assert!(!signature.contains("BatonStatus") && !signature.contains("BatonEventFn"), "{signature}");
        }
        let hook = FIELDS.iter().find(|f| text(f.name) == "BatonEngineV1.set_event_hook").expect("listed");
        assert_eq!(
            text(hook.signature),
            "unsafeextern\"C\"fn(*mutBatonEngine,u32,Option<unsafeextern\"C\"fn(*mutc_void,*constBatonEvent)>,*mutc_void)->i32"
        );
    }

    #[test]
    fn a_slice_with_a_null_pointer_and_a_length_is_no_bytes_at_all() {
        let bad = BatonSlice { ptr: core::ptr::null(), len_bytes: 1 };
        // SAFETY: nothing is read through a null pointer.
        assert!(unsafe { bad.bytes() }.is_none());
        // SAFETY: the length is zero.
        assert_eq!(unsafe { BatonSlice::EMPTY.bytes() }, Some(&[][..]));
    }
}

//! Plain data that crosses the interface. All of it is `#[repr(C)]` without padding.

/// Bytes borrowed for the length of a call (unless an entry says otherwise). `ptr` may be null when `len_bytes` is 0.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[cfg_attr(feature = "stable_abi", derive(abi_stable::StableAbi))]
pub struct BatonSlice {
    /// First byte.
    pub ptr: *const u8,
    /// Number of bytes.
    pub len_bytes: u64,
}

/// One setting, both halves UTF-8.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[cfg_attr(feature = "stable_abi", derive(abi_stable::StableAbi))]
pub struct BatonSetting {
    /// Lower-case name, e.g. `fabric`.
    pub key: BatonSlice,
    /// Its value in the spelling of the environment variable.
    pub value: BatonSlice,
}

/// Receives one log record; may be called on any engine thread, must not call back into the engine.
pub type BatonLogFn =
    unsafe extern "C" fn(user: *mut core::ffi::c_void, level: u32, target: BatonSlice, message: BatonSlice);

/// Receives one event on an engine thread that holds no lock; may call every entry but `destroy`.
pub type BatonEventFn = unsafe extern "C" fn(user: *mut core::ffi::c_void, event: *const BatonEvent);

/// How to create an engine.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[cfg_attr(feature = "stable_abi", derive(abi_stable::StableAbi))]
pub struct BatonCreateOptions {
    /// `size_of::<BatonCreateOptions>()` as the caller knows it.
    pub size_bytes: u32,
    /// `BATON_CREATE_*`.
    pub flags: u32,
    /// The agent's name: UTF-8, 1 to 255 bytes, no NUL.
    pub agent_name: BatonSlice,
    /// Settings chosen by the host shim; an unknown key or value is refused by name.
    pub settings: *const BatonSetting,
    /// Number of `settings`.
    pub settings_count: u64,
    /// Where log records go ([`BatonLogFn`]); none are made while it is absent.
    // Written out: the layout check of the Rust door reads function pointers only where they are spelled.
    pub log: Option<
        unsafe extern "C" fn(
            user: *mut core::ffi::c_void,
            level: u32,
            target: BatonSlice,
            message: BatonSlice,
        ),
    >,
    /// Handed to `log`.
    pub log_user: *mut core::ffi::c_void,
    /// `BATON_LOG_*`: the most talkative level wanted; 0 for none.
    pub log_level: u32,
    /// Must be zero.
    pub reserved: u32,
}

/// Memory to register.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[cfg_attr(feature = "stable_abi", derive(abi_stable::StableAbi))]
pub struct BatonMemory {
    /// First byte.
    pub addr: u64,
    /// Length; at least 1, `addr + len_bytes` must not overflow.
    pub len_bytes: u64,
    /// Device index as the host counts; kept and compared, for host memory without further meaning.
    pub device: u64,
    /// `BATON_MEM_*`.
    pub kind: u32,
    /// `BATON_ACCESS_*`, or-ed.
    pub access: u32,
}

/// One piece of memory of a transfer, inside one region.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "stable_abi", derive(abi_stable::StableAbi))]
pub struct BatonDesc {
    /// First byte.
    pub addr: u64,
    /// Length; 0 is legal and moves nothing.
    pub len_bytes: u64,
    /// On the local side a handle from `register`, on the remote side one from `import_region`. 0 on the local side: memory that is not
    /// registered, which sessions with the two-sided backend take.
    pub region: u64,
    /// Must be zero.
    pub reserved: u64,
}

/// What `create_xfer_req` builds.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[cfg_attr(feature = "stable_abi", derive(abi_stable::StableAbi))]
pub struct BatonXferSpec {
    /// `size_of::<BatonXferSpec>()` as the caller knows it.
    pub size_bytes: u32,
    /// `BATON_OP_*`.
    pub op: u32,
    /// The peer's agent name; our own name makes a self transfer.
    pub peer: BatonSlice,
    /// Local pieces; pair by pair as long as `remote`.
    pub local: *const BatonDesc,
    /// Number of `local`.
    pub local_count: u64,
    /// Remote pieces.
    pub remote: *const BatonDesc,
    /// Number of `remote`; must equal `local_count`.
    pub remote_count: u64,
}

/// What `create_xfer_from_indices` builds: pairs of elements of two block lists.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[cfg_attr(feature = "stable_abi", derive(abi_stable::StableAbi))]
pub struct BatonIndexSpec {
    /// `size_of::<BatonIndexSpec>()` as the caller knows it.
    pub size_bytes: u32,
    /// `BATON_OP_*`.
    pub op: u32,
    /// The peer's agent name.
    pub peer: BatonSlice,
    /// Handle of the local block list.
    pub local_list: u64,
    /// Handle of the remote block list.
    pub remote_list: u64,
    /// Indices into the local list.
    pub local_indices: *const u32,
    /// Indices into the remote list.
    pub remote_indices: *const u32,
    /// Number of each.
    pub index_count: u64,
}

/// What a post says besides starting the transfer.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[cfg_attr(feature = "stable_abi", derive(abi_stable::StableAbi))]
pub struct BatonPostOptions {
    /// `size_of::<BatonPostOptions>()` as the caller knows it.
    pub size_bytes: u32,
    /// `BATON_POST_*`.
    pub flags: u32,
    /// The message, with `BATON_POST_NOTIFY`; else empty.
    pub message: BatonSlice,
    /// The transfer's number in the host's own counting, with `BATON_POST_ID`; else 0. The peer's `inbound_status` takes it.
    pub id: u64,
}

/// Something that happened, as told to the event hook. Slices are valid during the call only.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[cfg_attr(feature = "stable_abi", derive(abi_stable::StableAbi))]
pub struct BatonEvent {
    /// `size_of::<BatonEvent>()` as the engine knows it.
    pub size_bytes: u32,
    /// One of `BATON_EVENT_*`.
    pub kind: u32,
    /// Agent name of the peer concerned.
    pub peer: BatonSlice,
    /// The peer's instance, 16 bytes; empty for a notification.
    pub instance: BatonSlice,
    /// PEER_FAILED: numbers of the inbound notified transfers that had begun to arrive and never will.
    pub partial_seqs: *const u64,
    /// Number of `partial_seqs`.
    pub partial_count: u64,
}

/// Header of one notification in the buffer that `get_notifs` fills: the header, then the peer's name, then the
/// message, then zero bytes up to the next multiple of 8.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "stable_abi", derive(abi_stable::StableAbi))]
pub struct BatonNotifHeader {
    /// Bytes of this notification with header and padding.
    pub total_bytes: u64,
    /// Bytes of the message.
    pub message_len_bytes: u64,
    /// Bytes of the peer's agent name.
    pub name_len_bytes: u32,
    /// Zero.
    pub reserved: u32,
}

/// An engine; only ever behind a pointer.
#[repr(C)]
#[cfg_attr(feature = "stable_abi", derive(abi_stable::StableAbi))]
pub struct BatonEngine {
    _opaque: [u8; 0],
}

/// A prepared transfer; only ever behind a pointer.
#[repr(C)]
#[cfg_attr(feature = "stable_abi", derive(abi_stable::StableAbi))]
pub struct BatonXfer {
    _opaque: [u8; 0],
}

/// One field of the interface, for the one-line reason when two versions do not fit.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[cfg_attr(feature = "stable_abi", derive(abi_stable::StableAbi))]
pub struct BatonField {
    /// `Struct.field`.
    pub name: BatonSlice,
    /// Its type as written in Rust, without spaces.
    pub signature: BatonSlice,
    /// Offset in the structure.
    pub offset_bytes: u32,
    /// Size of the field.
    pub size_bytes: u32,
}

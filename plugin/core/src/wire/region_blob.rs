//! An exported region: what a peer needs to address it.
//!
//! ```text
//! "BREG" | version u16 | zero u16 | instance 16 | region u64 | base u64 | length u64 | device u64
//!        | kind u8 | access u8 | fabrics u8 | zero u8
//!        | fabrics × { name length u8 | name | rails u8 | segment bytes u64 | rails × segments × key u64 }
//!        | crc32c u32 of all before
//! ```
//! How many segments there are follows from the length; one segment is written as 2⁶⁴−1 bytes.
//! Little-endian, without gaps: one registration has exactly one encoding.

use baton_fabric::{MAX_RAILS, MemoryKind, RegionKeys};

use super::cursor::Cursor;
use super::{MAX_FABRICS, MAX_REGION_KEYS, MAX_WORD_BYTES};
use crate::ids::{Instance, RegionId};

const MAGIC: [u8; 4] = *b"BREG";
const VERSION: u16 = 2;
const FIXED_BYTES: usize = 60;
const CRC_BYTES: usize = 4;
const KEY_BYTES: usize = 8;

/// What peers may do with a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Access {
    /// Read it.
    pub remote_read: bool,
    /// Write it.
    pub remote_write: bool,
}

/// A region as its owner describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionBlob {
    /// The owner.
    pub instance: Instance,
    /// The registration.
    pub region: RegionId,
    /// First byte, as an address of the owner.
    pub base: u64,
    /// Length, at least 1.
    pub len: u64,
    /// Kind of memory.
    pub kind: MemoryKind,
    /// Device index.
    pub device: u64,
    /// What peers may do.
    pub access: Access,
    /// Remote keys on each fabric; names differ.
    pub fabrics: Vec<FabricKeys>,
}

/// The remote keys of a region on one fabric.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FabricKeys {
    /// The fabric's name.
    pub fabric: String,
    /// Its rails, 1 to [`MAX_RAILS`].
    pub rails: u8,
    /// Length of every segment but the last; `u64::MAX` when there is one, otherwise less than the region's length.
    pub segment_bytes: u64,
    /// One key per rail and segment; index `rail * segments + segment`. At most [`MAX_REGION_KEYS`].
    pub keys: Box<[u64]>,
}

impl FabricKeys {
    /// What a region of `len` bytes tells peers of its keys on a fabric.
    pub fn new(fabric: &str, len: u64, keys: &RegionKeys) -> Self {
        let segment_bytes = if keys.segment_bytes >= len { u64::MAX } else { keys.segment_bytes };
        Self { fabric: fabric.to_owned(), rails: keys.rails, segment_bytes, keys: keys.remote.clone() }
    }

    fn check(&self, len: u64) -> Result<(), RegionBlobError> {
        match key_count(self.rails, self.segment_bytes, len)? {
            count if count == self.keys.len() => Ok(()),
            count => Err(RegionBlobError::KeyCount { found: self.keys.len(), count }),
        }
    }
}

/// Keys of a region on one fabric.
fn key_count(rails: u8, segment_bytes: u64, len: u64) -> Result<usize, RegionBlobError> {
    if !(1..=MAX_RAILS).contains(&rails) {
        return Err(RegionBlobError::Rails(rails));
    }
    let segments = match segment_bytes {
        u64::MAX => 1,
        _ if segment_bytes == 0 || segment_bytes >= len => {
            return Err(RegionBlobError::SegmentBytes { segment_bytes, len });
        }
        _ => len.div_ceil(segment_bytes),
    };
    let count = segments.saturating_mul(u64::from(rails));
    if count > MAX_REGION_KEYS as u64 {
        return Err(RegionBlobError::TooManyKeys { rails, segments });
    }
    Ok(count as usize)
}

/// Why bytes are no exported region, or a value cannot be encoded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegionBlobError {
    /// Ends early.
    #[error("exported region is truncated at {0} bytes")]
    Truncated(usize),
    /// Something else.
    #[error("this is no exported region of a Baton engine (wrong magic)")]
    Magic,
    /// Another format.
    #[error("exported region has version {0}; this engine reads version {VERSION}")]
    Version(u16),
    /// Damaged.
    #[error("exported region is damaged (checksum)")]
    Checksum,
    /// Bytes behind the end.
    #[error("exported region has {0} bytes too many at its end")]
    Trailing(usize),
    /// Reserved bytes are set.
    #[error("exported region: a reserved byte is not zero")]
    Reserved,
    /// Unknown kind.
    #[error("exported region: memory kind {0} is unknown; 0 (host) and 1 (device) exist")]
    Kind(u8),
    /// Unknown access.
    #[error("exported region: access {0:#x} has unknown bits; 1 (read) and 2 (write) exist")]
    Access(u8),
    /// Empty or beyond the address space.
    #[error("exported region: {len} bytes at {base:#x} are empty or overflow the address space")]
    Bounds {
        /// First byte.
        base: u64,
        /// Length.
        len: u64,
    },
    /// Too many fabrics.
    #[error("exported region: keys on {0} fabrics; at most {MAX_FABRICS} are allowed")]
    Fabrics(usize),
    /// A number of rails.
    #[error("exported region: {0} rails; 1 to {MAX_RAILS} are allowed")]
    Rails(u8),
    /// A length of segments.
    #[error(
        "exported region: segments of {segment_bytes} bytes in a region of {len} bytes; they must be shorter than it, or one of 2^64-1"
    )]
    SegmentBytes {
        /// Of a segment.
        segment_bytes: u64,
        /// Of the region.
        len: u64,
    },
    /// Too many keys.
    #[error(
        "exported region: {rails} rails of {segments} segments; at most {MAX_REGION_KEYS} keys per fabric are allowed: register smaller regions"
    )]
    TooManyKeys {
        /// Rails.
        rails: u8,
        /// Segments of each.
        segments: u64,
    },
    /// Not one key per rail and segment.
    #[error("exported region: {found} keys where its rails and segments need {count}")]
    KeyCount {
        /// Given.
        found: usize,
        /// Needed.
        count: usize,
    },
    /// A fabric's name.
    #[error(
        "exported region: a fabric's name must be 1 to {MAX_WORD_BYTES} printable ASCII bytes and occur once"
    )]
    FabricName,
}

impl RegionBlob {
    /// Its keys on a fabric.
    pub fn on(&self, fabric: &str) -> Option<&FabricKeys> {
        self.fabrics.iter().find(|keys| keys.fabric == fabric)
    }

    /// The key on a rail of a fabric of the segment with the byte at `offset`.
    pub fn key(&self, fabric: &str, rail: u8, offset: u64) -> Option<u64> {
        let keys = self.on(fabric).filter(|keys| rail < keys.rails && offset < self.len)?;
        let segments = keys.keys.len() / usize::from(keys.rails);
        let segment = usize::try_from(offset / keys.segment_bytes).ok()?;
        keys.keys.get(usize::from(rail) * segments + segment).copied()
    }

    /// The bytes; the same for the same value, always.
    ///
    /// # Errors
    /// A value that [`Self::decode`] would refuse.
    pub fn encode(&self) -> Result<Vec<u8>, RegionBlobError> {
        self.check()?;
        let keys_bytes: usize =
            self.fabrics.iter().map(|on| 10 + on.fabric.len() + on.keys.len() * KEY_BYTES).sum();
        let mut out = Vec::with_capacity(FIXED_BYTES + keys_bytes + CRC_BYTES);
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&VERSION.to_le_bytes());
        out.extend_from_slice(&[0; 2]);
        out.extend_from_slice(&self.instance.0);
        for word in [self.region.0, self.base, self.len, self.device] {
            out.extend_from_slice(&word.to_le_bytes());
        }
        let kind = match self.kind {
            MemoryKind::Dram => 0,
            MemoryKind::Vram => 1,
        };
        let access = u8::from(self.access.remote_read) | u8::from(self.access.remote_write) << 1;
        out.extend_from_slice(&[kind, access, self.fabrics.len() as u8, 0]);
        for on in &self.fabrics {
            out.push(on.fabric.len() as u8);
            out.extend_from_slice(on.fabric.as_bytes());
            out.push(on.rails);
            out.extend_from_slice(&on.segment_bytes.to_le_bytes());
            on.keys.iter().for_each(|key| out.extend_from_slice(&key.to_le_bytes()));
        }
        out.extend_from_slice(&crc32c::crc32c(&out).to_le_bytes());
        Ok(out)
    }

    /// Reads the bytes.
    ///
    /// # Errors
    /// One per cause.
    pub fn decode(bytes: &[u8]) -> Result<Self, RegionBlobError> {
        let truncated = || RegionBlobError::Truncated(bytes.len());
        let mut cursor = Cursor::new(bytes);
        match cursor.array() {
            Some(MAGIC) => {}
            None if MAGIC.starts_with(bytes) => return Err(truncated()),
            _ => return Err(RegionBlobError::Magic),
        }
        let version = cursor.u16().ok_or_else(truncated)?;
        if version != VERSION {
            return Err(RegionBlobError::Version(version));
        }
        let zero = cursor.u16().ok_or_else(truncated)?;
        let instance = Instance(cursor.array().ok_or_else(truncated)?);
        let region = RegionId(cursor.u64().ok_or_else(truncated)?);
        let base = cursor.u64().ok_or_else(truncated)?;
        let len = cursor.u64().ok_or_else(truncated)?;
        let device = cursor.u64().ok_or_else(truncated)?;
        let [kind, access, count, zero_too] = cursor.array().ok_or_else(truncated)?;
        let count = usize::from(count);
        if count > MAX_FABRICS {
            return Err(RegionBlobError::Fabrics(count));
        }
        let mut fabrics = Vec::with_capacity(count);
        for _ in 0..count {
            fabrics.push(decode_keys(&mut cursor, len, &truncated)?);
        }
        let covered = bytes.len() - cursor.rest().len();
        let crc = cursor.u32().ok_or_else(truncated)?;
        if !cursor.rest().is_empty() {
            return Err(RegionBlobError::Trailing(cursor.rest().len()));
        }
        if crc32c::crc32c(&bytes[..covered]) != crc {
            return Err(RegionBlobError::Checksum);
        }
        if zero != 0 || zero_too != 0 {
            return Err(RegionBlobError::Reserved);
        }
        let kind = match kind {
            0 => MemoryKind::Dram,
            1 => MemoryKind::Vram,
            other => return Err(RegionBlobError::Kind(other)),
        };
        if access > 3 {
            return Err(RegionBlobError::Access(access));
        }
        let access = Access { remote_read: access & 1 != 0, remote_write: access & 2 != 0 };
        let blob = Self { instance, region, base, len, kind, device, access, fabrics };
        blob.check().map(|()| blob)
    }

    fn check(&self) -> Result<(), RegionBlobError> {
        if self.len == 0 || self.base.checked_add(self.len).is_none() {
            return Err(RegionBlobError::Bounds { base: self.base, len: self.len });
        }
        if self.fabrics.len() > MAX_FABRICS {
            return Err(RegionBlobError::Fabrics(self.fabrics.len()));
        }
        let fits = |name: &str| {
            (1..=MAX_WORD_BYTES).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_graphic())
        };
        for (i, on) in self.fabrics.iter().enumerate() {
            if !fits(&on.fabric) || self.fabrics[..i].iter().any(|earlier| earlier.fabric == on.fabric) {
                return Err(RegionBlobError::FabricName);
            }
            on.check(self.len)?;
        }
        Ok(())
    }
}

/// The keys are counted before anything is allocated for them.
fn decode_keys(
    cursor: &mut Cursor<'_>,
    len: u64,
    truncated: &impl Fn() -> RegionBlobError,
) -> Result<FabricKeys, RegionBlobError> {
    let name_len = cursor.u8().ok_or_else(truncated)?;
    let name = cursor.take(usize::from(name_len)).ok_or_else(truncated)?;
    let fabric = std::str::from_utf8(name).map_err(|_| RegionBlobError::FabricName)?.to_owned();
    let rails = cursor.u8().ok_or_else(truncated)?;
    let segment_bytes = cursor.u64().ok_or_else(truncated)?;
    let count = key_count(rails, segment_bytes, len)?;
    let bytes = cursor.take(count * KEY_BYTES).ok_or_else(truncated)?;
    let (words, _) = bytes.as_chunks::<KEY_BYTES>();
    let keys = words.iter().map(|word| u64::from_le_bytes(*word)).collect();
    Ok(FabricKeys { fabric, rails, segment_bytes, keys })
}

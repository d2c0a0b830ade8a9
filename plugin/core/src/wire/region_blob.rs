//! An exported region: what a peer needs to address it.
//!
//! ```text
//! "BREG" | version u16 | zero u16 | instance 16 | region u64 | base u64 | length u64 | device u64
//!        | kind u8 | access u8 | keys u8 | zero u8 | keys × { name length u8 | name | key u64 } | crc32c u32 of all before
//! ```
//! Little-endian, without gaps: one registration has exactly one encoding.

use baton_fabric::MemoryKind;

use super::cursor::Cursor;
use super::{MAX_FABRICS, MAX_WORD_BYTES};
use crate::ids::{Instance, RegionId};

const MAGIC: [u8; 4] = *b"BREG";
const VERSION: u16 = 1;
const FIXED_BYTES: usize = 60;
const CRC_BYTES: usize = 4;

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
    /// Remote key on each fabric by name; names differ.
    pub keys: Vec<(String, u64)>,
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
    /// Too many keys.
    #[error("exported region: {0} keys; at most {MAX_FABRICS} are allowed")]
    Keys(usize),
    /// A fabric's name.
    #[error(
        "exported region: a fabric's name must be 1 to {MAX_WORD_BYTES} printable ASCII bytes and occur once"
    )]
    FabricName,
}

impl RegionBlob {
    /// The key on a fabric.
    pub fn key(&self, fabric: &str) -> Option<u64> {
        self.keys.iter().find(|(name, _)| name == fabric).map(|(_, key)| *key)
    }

    /// The bytes; the same for the same value, always.
    ///
    /// # Errors
    /// A value that [`Self::decode`] would refuse.
    pub fn encode(&self) -> Result<Vec<u8>, RegionBlobError> {
        self.check()?;
        let mut out = Vec::with_capacity(FIXED_BYTES + self.keys.len() * 16 + CRC_BYTES);
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
        out.extend_from_slice(&[kind, access, self.keys.len() as u8, 0]);
        for (name, key) in &self.keys {
            out.push(name.len() as u8);
            out.extend_from_slice(name.as_bytes());
            out.extend_from_slice(&key.to_le_bytes());
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
            return Err(RegionBlobError::Keys(count));
        }
        let mut keys = Vec::with_capacity(count);
        for _ in 0..count {
            let name_len = cursor.u8().ok_or_else(truncated)?;
            let name = cursor.take(usize::from(name_len)).ok_or_else(truncated)?;
            let key = cursor.u64().ok_or_else(truncated)?;
            keys.push((std::str::from_utf8(name).map_err(|_| RegionBlobError::FabricName)?.to_owned(), key));
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
        let blob = Self { instance, region, base, len, kind, device, access, keys };
        blob.check().map(|()| blob)
    }

    fn check(&self) -> Result<(), RegionBlobError> {
        if self.len == 0 || self.base.checked_add(self.len).is_none() {
            return Err(RegionBlobError::Bounds { base: self.base, len: self.len });
        }
        if self.keys.len() > MAX_FABRICS {
            return Err(RegionBlobError::Keys(self.keys.len()));
        }
        let fits = |name: &str| {
            (1..=MAX_WORD_BYTES).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_graphic())
        };
        let once = |i: usize, name: &str| self.keys[..i].iter().all(|(earlier, _)| earlier != name);
        match self.keys.iter().enumerate().all(|(i, (name, _))| fits(name) && once(i, name)) {
            true => Ok(()),
            false => Err(RegionBlobError::FabricName),
        }
    }
}

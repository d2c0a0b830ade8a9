//! The C door's comparison: the interface as the engine was built with it against ours, field by field.

use std::fmt;

use baton_abi::{BATON_ABI_MAJOR, BATON_TABLE_MAGIC, BatonEngineV1, BatonField, FIELDS, UNSUPPORTED_TABLE};

/// Bytes of the table that every engine of this major has: the head up to the entries.
const HEAD_BYTES: usize = std::mem::offset_of!(BatonEngineV1, create);
const TABLE: &str = "BatonEngineV1";
/// More fields than an interface will ever have: a larger count is garbage.
const MOST_FIELDS: u64 = 4096;

/// Why a table does not fit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Mismatch {
    /// Not a table at all.
    #[error(
        "the symbol is no table of an engine: it begins with {found:#018x} instead of {BATON_TABLE_MAGIC:#018x}"
    )]
    Magic {
        /// The first eight bytes.
        found: u64,
    },
    /// Another major version.
    #[error("major version {found} against {BATON_ABI_MAJOR} here")]
    Major {
        /// The engine's.
        found: u32,
    },
    /// A table that contradicts itself.
    #[error("the head of the table is damaged: {0}")]
    Damaged(String),
    /// Something is not the same on both sides.
    #[error("first difference: {field} is {theirs} in the engine, {ours} here")]
    Field {
        /// `Struct.field`.
        field: String,
        /// The engine's idea of it.
        theirs: String,
        /// Ours.
        ours: String,
    },
}

/// Version numbers of the interface in a table, readable as soon as the magic is right.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AbiVersion {
    /// Must be equal.
    pub major: u32,
    /// May differ.
    pub minor: u32,
}

impl fmt::Display for AbiVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// A table brought to the shape we know: what the engine lacks answers UNSUPPORTED.
pub struct Fitted {
    /// Complete; its head is the engine's.
    pub table: BatonEngineV1,
    /// Names of entries the engine lacks.
    pub missing: Vec<String>,
}

/// The version in a table, if it is one.
///
/// # Safety
/// `table` must point at the data symbol of an engine: at least eight readable bytes, and a whole table head
/// if those are the magic.
pub unsafe fn version(table: *const BatonEngineV1) -> Result<AbiVersion, Mismatch> {
    // SAFETY: eight bytes are readable by the caller's promise.
    let found = unsafe { table.cast::<u64>().read() };
    if found != BATON_TABLE_MAGIC {
        return Err(Mismatch::Magic { found });
    }
    // SAFETY: with the magic there is a head.
    let (major, minor) = unsafe { ((*table).abi_major, (*table).abi_minor) };
    Ok(AbiVersion { major, minor })
}

/// Compares a table with ours and completes it.
///
/// # Safety
/// As [`version`]; besides, the table must be as long as it says, and its list of fields must be one.
pub unsafe fn fit(table: *const BatonEngineV1) -> Result<Fitted, Mismatch> {
    // SAFETY: the caller's promise.
    let found = unsafe { version(table) }?;
    if found.major != BATON_ABI_MAJOR {
        return Err(Mismatch::Major { found: found.major });
    }
    // SAFETY: the head is there.
    let (size, fields, count) = unsafe { ((*table).size_bytes, (*table).fields, (*table).fields_count) };
    if size < HEAD_BYTES as u64 || size % 8 != 0 {
        return Err(Mismatch::Damaged(format!(
            "size {size}, at least {HEAD_BYTES} and a multiple of 8 expected"
        )));
    }
    if fields.is_null() || count == 0 || count > MOST_FIELDS {
        return Err(Mismatch::Damaged(format!("{count} fields at {fields:p}, 1 to {MOST_FIELDS} expected")));
    }
    // SAFETY: not null, and `count` long by the caller's promise.
    let theirs = unsafe { std::slice::from_raw_parts(fields, count as usize) };
    compare(FIELDS, theirs)?;

    let known = (size as usize).min(size_of::<BatonEngineV1>());
    let mut fitted = UNSUPPORTED_TABLE;
    // SAFETY: `known` bytes exist on both sides, and the comparison found every field in them the same.
    unsafe {
        std::ptr::copy_nonoverlapping(table.cast::<u8>(), (&raw mut fitted).cast::<u8>(), known);
    }
    let missing = FIELDS
        .iter()
        .map(Known::of)
        .filter(|f| f.owner == TABLE && f.offset as usize >= known)
        .map(|f| f.field.to_owned())
        .collect();
    Ok(Fitted { table: fitted, missing })
}

/// One field, decoded.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Known<'a> {
    owner: &'a str,
    field: &'a str,
    signature: &'a str,
    offset: u32,
    size: u32,
}

impl<'a> Known<'a> {
    fn of(field: &'a BatonField) -> Known<'a> {
        // SAFETY: both slices are static strings of a library that is never unloaded.
        let text = |slice: baton_abi::BatonSlice| unsafe { slice.bytes() }.unwrap_or_default();
        let name = std::str::from_utf8(text(field.name)).unwrap_or_default();
        let signature = std::str::from_utf8(text(field.signature)).unwrap_or_default();
        let (owner, field_name) = name.split_once('.').unwrap_or((name, ""));
        Known { owner, field: field_name, signature, offset: field.offset_bytes, size: field.size_bytes }
    }

    fn describe(&self) -> String {
        format!("{:?} ({}, {} bytes at {})", self.field, self.signature, self.size, self.offset)
    }
}

/// Structures both know must be the same. The table may be longer on one side, and so may a structure that
/// begins with its own size; a structure only one side knows is none of the other's business.
fn compare(ours: &[BatonField], theirs: &[BatonField]) -> Result<(), Mismatch> {
    let ours: Vec<_> = ours.iter().map(Known::of).collect();
    let theirs: Vec<_> = theirs.iter().map(Known::of).collect();
    // The plain structures first: a changed one is the reason, the entries that use it are not.
    for group in ours.chunk_by(|a, b| a.owner == b.owner) {
        let owner = group[0].owner;
        let other: Vec<_> = theirs.iter().filter(|f| f.owner == owner).collect();
        if other.is_empty() {
            continue;
        }
        let grows = owner == TABLE || group[0].field == "size_bytes";
        for at in 0..group.len().max(other.len()) {
            let (mine, their) = (group.get(at), other.get(at).copied());
            let same = match (mine, their) {
                (Some(mine), Some(their)) => mine == their,
                _ => grows,
            };
            if !same {
                let name = mine.or(their).expect("one side has it").field;
                let describe = |f: Option<&Known<'_>>| f.map_or("missing".to_owned(), Known::describe);
                return Err(Mismatch::Field {
                    field: format!("{owner}.{name}"),
                    theirs: describe(their),
                    ours: describe(mine),
                });
            }
        }
    }
    Ok(())
}

#[cfg(test)]
#[path = "compare_tests.rs"]
mod tests;

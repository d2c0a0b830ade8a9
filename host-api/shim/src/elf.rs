//! Enough of an ELF header to say why a file is no library for this machine, before the loader says less.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

const HEADER_BYTES: usize = 64;
const PROGRAM_HEADER_BYTES: usize = 56;
const TYPE_SHARED: u16 = 3;
const PT_LOAD: u32 = 1;

/// What is wrong with a file that should be a shared library.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ElfError {
    /// Cannot be read.
    #[error("cannot be read: {0}")]
    Unreadable(String),
    /// Not an ELF file.
    #[error("is not a shared library: it begins with {0:02x?} instead of an ELF header")]
    NotElf(Vec<u8>),
    /// For another machine.
    #[error("is for {found}, this process runs on {here}")]
    OtherMachine {
        /// What the file is for.
        found: String,
        /// What this process is.
        here: String,
    },
    /// An ELF file of another type.
    #[error("is not a shared library: its ELF type is {0}, a library has 3")]
    NotShared(u16),
    /// Shorter than its own header says.
    #[error("is cut off: it has {found_bytes} bytes, its header speaks of {needed_bytes}")]
    CutOff {
        /// Bytes there are.
        found_bytes: u64,
        /// Bytes there should be.
        needed_bytes: u64,
    },
}

/// Reads the header of a library and compares it with this process.
pub fn check(path: &Path) -> Result<(), ElfError> {
    let unreadable = |e: std::io::Error| ElfError::Unreadable(e.to_string());
    let mut file = File::open(path).map_err(unreadable)?;
    let found_bytes = file.metadata().map_err(unreadable)?.len();
    let mut header = Vec::with_capacity(HEADER_BYTES);
    file.by_ref().take(HEADER_BYTES as u64).read_to_end(&mut header).map_err(unreadable)?;
    if !header.starts_with(b"\x7fELF") {
        header.truncate(4);
        return Err(ElfError::NotElf(header));
    }
    if header.len() < HEADER_BYTES {
        return Err(ElfError::CutOff { found_bytes, needed_bytes: HEADER_BYTES as u64 });
    }
    let found = Machine::of(&header);
    let here = Machine::here();
    if found != here {
        return Err(ElfError::OtherMachine { found: found.to_string(), here: here.to_string() });
    }
    let kind = u16_at(&header, 16);
    if kind != TYPE_SHARED {
        return Err(ElfError::NotShared(kind));
    }
    let needed_bytes = extent(&mut file, &header).map_err(unreadable)?;
    // The loader maps what the header promises: touching a page past the end would be a SIGBUS.
    if needed_bytes > found_bytes {
        return Err(ElfError::CutOff { found_bytes, needed_bytes });
    }
    Ok(())
}

/// The end of the last byte that the program headers want loaded.
fn extent(file: &mut File, header: &[u8]) -> std::io::Result<u64> {
    let offset = u64_at(header, 32);
    let (entry_bytes, count) = (u64::from(u16_at(header, 54)), u64::from(u16_at(header, 56)));
    let mut end = offset.saturating_add(entry_bytes * count);
    if end > file.metadata()?.len() || entry_bytes < PROGRAM_HEADER_BYTES as u64 {
        return Ok(end);
    }
    file.seek(SeekFrom::Start(offset))?;
    let mut table = vec![0; (entry_bytes * count) as usize];
    file.read_exact(&mut table)?;
    for entry in table.chunks_exact(entry_bytes as usize) {
        if u32_at(entry, 0) == PT_LOAD {
            end = end.max(u64_at(entry, 8).saturating_add(u64_at(entry, 32)));
        }
    }
    Ok(end)
}

/// Word size, byte order and processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Machine {
    bits: u8,
    big_endian: bool,
    processor: u16,
}

impl Machine {
    fn of(header: &[u8]) -> Machine {
        let big_endian = header[5] == 2;
        let raw = u16_at(header, 18);
        let processor = if big_endian == cfg!(target_endian = "big") { raw } else { raw.swap_bytes() };
        Machine { bits: if header[4] == 1 { 32 } else { 64 }, big_endian, processor }
    }

    fn here() -> Machine {
        let processor = match std::env::consts::ARCH {
            "x86_64" => 62,
            "aarch64" => 183,
            "riscv64" => 243,
            "powerpc64" => 21,
            "s390x" => 22,
            "loongarch64" => 258,
            _ => 0,
        };
        Machine { bits: usize::BITS as u8, big_endian: cfg!(target_endian = "big"), processor }
    }
}

impl std::fmt::Display for Machine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let order = if self.big_endian { "big-endian" } else { "little-endian" };
        match self.processor {
            3 => f.write_str("x86")?,
            20 | 21 => f.write_str("PowerPC")?,
            22 => f.write_str("s390")?,
            40 => f.write_str("ARM")?,
            62 => f.write_str("x86-64")?,
            183 => f.write_str("AArch64")?,
            243 => f.write_str("RISC-V")?,
            258 => f.write_str("LoongArch")?,
            other => write!(f, "processor {other}")?,
        }
        write!(f, " ({} bit, {order})", self.bits)
    }
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_ne_bytes(bytes[at..at + 2].try_into().expect("two bytes"))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

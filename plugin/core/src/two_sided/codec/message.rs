//! Data messages: a header of 64 bytes, then bytes, in one slot.
//!
//! ```text
//!   0 magic u32   4 version u8   5 kind u8   6 flags u16   8 session u64   16 epoch u32   20 chunk u32   24 transfer u64
//!  32 region u64 40 offset u64  48 total u32 52 len u32   56 lane_seq u32 60 crc32c u32  64 bytes
//! ```
//! PACK and READ_PACK: transfer, region, offset and chunk are 0, total counts blocks, len counts all bytes behind the header:
//! `total × { transfer u64 · region u64 · offset u64 · chunk u32 · total u32 · len u32 · 0 u32 }`, then the blocks' bytes.
//! NOP: all 0 but session, epoch and lane_seq. The checksum covers the header (itself as 0) and a PACK's table; with the flag also
//! the bytes.

use super::MAX_CHUNKS;
use crate::ids::{Epoch, RegionId, SessionId};
use crate::wire::Cursor;

/// Length of the header.
pub const DATA_HEADER_BYTES: usize = 64;
/// Length of a block's entry in a PACK's table.
pub const PACK_BLOCK_BYTES: usize = 40;

const MAGIC: u32 = u32::from_le_bytes(*b"BtnD");
const VERSION: u8 = 1;
const CRC_AT: usize = 60;
/// The checksum covers the bytes too.
const FLAG_DATA_CRC: u16 = 1;

/// What a message carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum DataKind {
    /// A chunk for the receiver's region.
    Write = 1,
    /// A chunk of what the receiver asked for.
    ReadResp = 2,
    /// Nothing: it consumes a RECV.
    Nop = 3,
    /// Several small chunks for the receiver's regions.
    Pack = 4,
    /// Several small chunks of what the receiver asked for.
    ReadPack = 5,
}

impl DataKind {
    /// All of them.
    pub const ALL: [DataKind; 5] =
        [DataKind::Write, DataKind::ReadResp, DataKind::Nop, DataKind::Pack, DataKind::ReadPack];

    /// A table of blocks follows the header.
    pub fn is_pack(self) -> bool {
        matches!(self, DataKind::Pack | DataKind::ReadPack)
    }
}

/// Header of a message, without what is constant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataHeader {
    /// What it carries.
    pub kind: DataKind,
    /// The checksum covers the bytes.
    pub data_crc: bool,
    /// Session.
    pub session: SessionId,
    /// Generation of its queue pairs.
    pub epoch: Epoch,
    /// Low 32 bits of the message's number on its lane, from 0.
    pub lane_seq: u32,
    /// The chunk; for PACK and NOP see the module.
    pub block: Block,
}

/// A chunk's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Transfer, numbered from 1 by who began it.
    pub transfer: u64,
    /// Region of the side that did not begin it.
    pub region: RegionId,
    /// From the region's first byte.
    pub offset: u64,
    /// Number of the chunk.
    pub chunk: u32,
    /// Chunks of the transfer.
    pub total: u32,
    /// Bytes.
    pub len: u32,
}

impl Block {
    /// What a NOP has in place of one.
    pub const NONE: Block = Block { transfer: 0, region: RegionId(0), offset: 0, chunk: 0, total: 0, len: 0 };

    /// What a PACK has in place of one.
    pub fn of_pack(count: u32, len: u32) -> Block {
        Block { total: count, len, ..Block::NONE }
    }
}

/// Why bytes are no data message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MessageError {
    /// Shorter than a header or longer than a slot.
    #[error("{len} bytes, a data message has {DATA_HEADER_BYTES} to {slot_bytes}")]
    Size {
        /// Received.
        len: u32,
        /// Length of a slot.
        slot_bytes: u32,
    },
    /// Something else lies there.
    #[error("magic is {0:#010x}")]
    Magic(u32),
    /// A version that was not negotiated.
    #[error("version {0} is not spoken")]
    Version(u8),
    /// No such kind.
    #[error("kind {0} does not exist")]
    Kind(u8),
    /// Flags that do not exist.
    #[error("flags {0:#06x} do not exist")]
    Flags(u16),
    /// Only the head of it was received, which is not enough for this kind of message, or is not a header.
    #[error("a message of which the first {bytes} bytes tell where the rest goes")]
    Head {
        /// Received.
        bytes: u32,
    },
    /// Not as long as received.
    #[error("{told} bytes behind a header, {received} were received")]
    Length {
        /// Told.
        told: u32,
        /// Received.
        received: u32,
    },
    /// The checksum does not match.
    #[error("checksum is {got:#010x}, the bytes give {expected:#010x}")]
    Crc {
        /// Told.
        got: u32,
        /// Computed.
        expected: u32,
    },
    /// No transfer has number 0, and NOP and PACK belong to none.
    #[error("{kind:?} with transfer {transfer}")]
    Transfer {
        /// Kind.
        kind: DataKind,
        /// Told.
        transfer: u64,
    },
    /// More chunks than a transfer may have, or a chunk beyond them.
    #[error("chunk {chunk} of {total}, at most {MAX_CHUNKS}")]
    Chunk {
        /// Told.
        chunk: u32,
        /// Told.
        total: u32,
    },
    /// A chunk has bytes and ends before 2^64.
    #[error("a chunk of {len} bytes at offset {offset:#x}")]
    Span {
        /// Told.
        offset: u64,
        /// Told.
        len: u32,
    },
    /// A field that this kind does not use is not zero.
    #[error("{0:?} with a field that it does not use")]
    Unused(DataKind),
    /// No blocks, or more than fit.
    #[error("a PACK of {count} blocks in {len} bytes")]
    Blocks {
        /// Told.
        count: u32,
        /// Bytes behind the header.
        len: u32,
    },
    /// The blocks' bytes are not what lies behind the table.
    #[error("blocks of {told} bytes together, {received} lie behind the table")]
    BlockBytes {
        /// Sum.
        told: u64,
        /// There are.
        received: u64,
    },
}

/// Bytes in front of the data: the header and, for a PACK of `count` blocks, its table.
pub fn pack_prefix_bytes(count: u32) -> usize {
    DATA_HEADER_BYTES + count as usize * PACK_BLOCK_BYTES
}

fn check_block(kind: DataKind, block: &Block) -> Result<(), MessageError> {
    if block.transfer == 0 {
        return Err(MessageError::Transfer { kind, transfer: 0 });
    }
    if block.total > MAX_CHUNKS || block.chunk >= block.total {
        return Err(MessageError::Chunk { chunk: block.chunk, total: block.total });
    }
    if block.len == 0 || block.offset.checked_add(block.len.into()).is_none() {
        return Err(MessageError::Span { offset: block.offset, len: block.len });
    }
    Ok(())
}

fn check_fields(header: &DataHeader) -> Result<(), MessageError> {
    let (kind, block) = (header.kind, &header.block);
    match kind {
        DataKind::Write | DataKind::ReadResp => return check_block(kind, block),
        DataKind::Nop if *block == Block::NONE => {}
        DataKind::Pack | DataKind::ReadPack if Block::of_pack(block.total, block.len) == *block => {
            let table = u64::from(block.total) * PACK_BLOCK_BYTES as u64;
            // Every block has at least one byte.
            if block.total == 0 || table + u64::from(block.total) > block.len.into() {
                return Err(MessageError::Blocks { count: block.total, len: block.len });
            }
        }
        _ if block.transfer != 0 => {
            return Err(MessageError::Transfer { kind, transfer: block.transfer });
        }
        _ => return Err(MessageError::Unused(kind)),
    }
    Ok(())
}

/// Appends header and table (`blocks` of a PACK, else empty) to `out`; the data follows elsewhere. With
/// [`DataHeader::data_crc`] the data must be added by [`append_data_crc`].
///
/// # Errors
/// Outside the limits that the decoder checks, with `slot_bytes` the length of the receiver's slots; `out` is as before.
pub fn encode_message(
    header: &DataHeader,
    blocks: &[Block],
    slot_bytes: u32,
    out: &mut Vec<u8>,
) -> Result<(), MessageError> {
    check_fields(header)?;
    if header.block.len > slot_bytes.saturating_sub(DATA_HEADER_BYTES as u32) {
        let len = header.block.len.saturating_add(DATA_HEADER_BYTES as u32);
        return Err(MessageError::Size { len, slot_bytes });
    }
    if header.kind.is_pack() {
        check_blocks(&header.block, blocks)?;
    }
    let begin = out.len();
    let block = &header.block;
    out.extend_from_slice(&MAGIC.to_le_bytes());
    out.extend_from_slice(&[VERSION, header.kind as u8]);
    out.extend_from_slice(&if header.data_crc { FLAG_DATA_CRC } else { 0 }.to_le_bytes());
    out.extend_from_slice(&header.session.0.to_le_bytes());
    out.extend_from_slice(&header.epoch.0.to_le_bytes());
    out.extend_from_slice(&block.chunk.to_le_bytes());
    out.extend_from_slice(&block.transfer.to_le_bytes());
    out.extend_from_slice(&block.region.0.to_le_bytes());
    out.extend_from_slice(&block.offset.to_le_bytes());
    out.extend_from_slice(&block.total.to_le_bytes());
    out.extend_from_slice(&block.len.to_le_bytes());
    out.extend_from_slice(&header.lane_seq.to_le_bytes());
    out.extend_from_slice(&[0; 4]);
    debug_assert_eq!(out.len() - begin, DATA_HEADER_BYTES);
    for block in blocks {
        out.extend_from_slice(&block.transfer.to_le_bytes());
        out.extend_from_slice(&block.region.0.to_le_bytes());
        out.extend_from_slice(&block.offset.to_le_bytes());
        out.extend_from_slice(&block.chunk.to_le_bytes());
        out.extend_from_slice(&block.total.to_le_bytes());
        out.extend_from_slice(&block.len.to_le_bytes());
        out.extend_from_slice(&[0; 4]);
    }
    let crc = crc32c::crc32c(&out[begin..]);
    out[begin + CRC_AT..begin + CRC_AT + 4].copy_from_slice(&crc.to_le_bytes());
    Ok(())
}

/// Adds data, in order, to the checksum of an encoded message that was made with [`DataHeader::data_crc`].
pub fn append_data_crc(prefix: &mut [u8], data: &[u8]) {
    let crc = u32::from_le_bytes(prefix[CRC_AT..CRC_AT + 4].try_into().expect("four bytes"));
    let crc = extend_crc(crc, data);
    prefix[CRC_AT..CRC_AT + 4].copy_from_slice(&crc.to_le_bytes());
}

/// CRC-32C of more bytes, continued from `crc`.
pub fn extend_crc(crc: u32, bytes: &[u8]) -> u32 {
    crc32c::crc32c_append(crc, bytes)
}

impl DataHeader {
    /// Reads a header of a message of `received` bytes in a slot of `slot_bytes`. The checksum is [`check_crc`]'s.
    ///
    /// # Errors
    /// Whatever is wrong first.
    pub fn decode(
        bytes: &[u8; DATA_HEADER_BYTES],
        received: u32,
        slot_bytes: u32,
    ) -> Result<DataHeader, MessageError> {
        let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        if received < DATA_HEADER_BYTES as u32 || received > slot_bytes {
            return Err(MessageError::Size { len: received, slot_bytes });
        }
        if u32_at(0) != MAGIC {
            return Err(MessageError::Magic(u32_at(0)));
        }
        if bytes[4] != VERSION {
            return Err(MessageError::Version(bytes[4]));
        }
        let kind = DataKind::ALL.into_iter().find(|kind| *kind as u8 == bytes[5]);
        let kind = kind.ok_or(MessageError::Kind(bytes[5]))?;
        let flags = u16::from_le_bytes([bytes[6], bytes[7]]);
        if flags & !FLAG_DATA_CRC != 0 {
            return Err(MessageError::Flags(flags));
        }
        let block = Block {
            transfer: u64_at(24),
            region: RegionId(u64_at(32)),
            offset: u64_at(40),
            chunk: u32_at(20),
            total: u32_at(48),
            len: u32_at(52),
        };
        let behind = received - DATA_HEADER_BYTES as u32;
        if block.len != behind {
            return Err(MessageError::Length { told: block.len, received: behind });
        }
        let header = DataHeader {
            kind,
            data_crc: flags & FLAG_DATA_CRC != 0,
            session: SessionId(u64_at(8)),
            epoch: Epoch(u32_at(16)),
            lane_seq: u32_at(56),
            block,
        };
        check_fields(&header)?;
        Ok(header)
    }

    /// Bytes in front of the data.
    pub fn prefix_bytes(&self) -> usize {
        match self.kind {
            DataKind::Pack | DataKind::ReadPack => pack_prefix_bytes(self.block.total),
            DataKind::Write | DataKind::ReadResp | DataKind::Nop => DATA_HEADER_BYTES,
        }
    }
}

/// Compares the checksum; `prefix` is header and table. `data` gives the checksum of what lies behind them, continued from the one
/// it is handed; it is asked only if the message says that its data is covered.
///
/// # Errors
/// [`MessageError::Crc`].
pub fn check_crc(
    header: &DataHeader,
    prefix: &[u8],
    data: impl FnOnce(u32) -> u32,
) -> Result<(), MessageError> {
    let (head, table) =
        prefix.split_first_chunk::<DATA_HEADER_BYTES>().expect("a prefix begins with a header");
    let got = u32::from_le_bytes(head[CRC_AT..].try_into().expect("four bytes"));
    let mut zeroed = *head;
    zeroed[CRC_AT..].fill(0);
    let mut expected = crc32c::crc32c_append(crc32c::crc32c(&zeroed), table);
    if header.data_crc {
        expected = data(expected);
    }
    if expected == got { Ok(()) } else { Err(MessageError::Crc { got, expected }) }
}

/// Reads the table of a PACK into `blocks`, whose content is replaced, or left alone where the table is wrong.
///
/// # Errors
/// Whatever is wrong first.
pub fn decode_blocks(header: &DataHeader, table: &[u8], blocks: &mut Vec<Block>) -> Result<(), MessageError> {
    let count = header.block.total as usize;
    assert_eq!(table.len(), count * PACK_BLOCK_BYTES, "the caller hands exactly the table");
    let mut sum = 0u64;
    for entry in table.chunks_exact(PACK_BLOCK_BYTES) {
        let block = read_block(entry)?;
        sum += u64::from(block.len);
    }
    check_sum(&header.block, sum)?;
    blocks.clear();
    blocks.extend(table.chunks_exact(PACK_BLOCK_BYTES).map(|entry| read_block(entry).expect("just checked")));
    Ok(())
}

fn read_block(entry: &[u8]) -> Result<Block, MessageError> {
    let mut cursor = Cursor::new(entry);
    let mut u64_next = || cursor.u64().expect("an entry is 40 bytes long");
    let (transfer, region, offset) = (u64_next(), RegionId(u64_next()), u64_next());
    let mut u32_next = || cursor.u32().expect("an entry is 40 bytes long");
    let block = Block { transfer, region, offset, chunk: u32_next(), total: u32_next(), len: u32_next() };
    if u32_next() != 0 {
        return Err(MessageError::Unused(DataKind::Pack));
    }
    check_block(DataKind::Pack, &block)?;
    Ok(block)
}

fn check_blocks(pack: &Block, blocks: &[Block]) -> Result<(), MessageError> {
    if blocks.len() != pack.total as usize {
        return Err(MessageError::Blocks { count: pack.total, len: pack.len });
    }
    blocks.iter().try_for_each(|block| check_block(DataKind::Pack, block))?;
    check_sum(pack, blocks.iter().map(|block| u64::from(block.len)).sum())
}

fn check_sum(pack: &Block, told: u64) -> Result<(), MessageError> {
    let received = u64::from(pack.len) - u64::from(pack.total) * PACK_BLOCK_BYTES as u64;
    if told == received { Ok(()) } else { Err(MessageError::BlockBytes { told, received }) }
}

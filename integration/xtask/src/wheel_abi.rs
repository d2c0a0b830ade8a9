//! Whether a stock wheel still has the interface that `integration/nixl/cpp/interface.hpp` declares: the order of its
//! virtual functions, read out of the stock UCX plugin. A new release is checked by adding it to the list of wheels.

use std::path::Path;
use std::process::Command;

use crate::run::{Outcome, output};

/// NIXL's base class: two words of run-time type information before the slots.
const BASE: &str = "_ZTV17nixlBackendEngine";
/// A class below it that overrides nearly all of them, so that every slot shows a name.
const DERIVED: &str = "_ZTV13nixlUcxEngine";
const HEAD_WORDS: u64 = 2;
const WORD_BYTES: u64 = 8;

/// The functions from slot 2 on (0 and 1 are destructors); what follows a space must be among the argument types.
const SLOTS: &[&str] = &[
    "supportsRemote",
    "supportsLocal",
    "supportsNotif",
    "getSupportedMems",
    "registerMem",
    "deregisterMem",
    "connect",
    "disconnect",
    "unloadMD",
    "prepXfer",
    "postXfer",
    "checkXfer",
    "releaseReqH",
    "prepMemView nixlRemoteMetaDesc",
    "prepMemView nixlMetaDesc",
    "releaseMemView",
    "getPublicData",
    "getConnInfo",
    "loadRemoteConnInfo",
    "loadRemoteMD",
    "loadLocalMD",
    "getNotifs",
    "genNotif",
    "queryMem",
    "estimateXferCost",
];

/// Compares the virtual functions of the wheel whose libraries are in `libraries`.
pub fn check(version: &str, libraries: &Path) -> Outcome<()> {
    let plugin = libraries.join("plugins/libplugin_UCX.so");
    let symbols = output(Command::new("readelf").args(["--symbols", "--wide"]).arg(&plugin))?;
    let told = |reason: String| format!("NIXL {version}: {reason}");
    let (_, size) = symbol(&symbols, BASE).map_err(told)?;
    let expected = (HEAD_WORDS + 2 + SLOTS.len() as u64) * WORD_BYTES;
    if size != expected {
        return Err(told(format!("the base class's table has {size} bytes instead of {expected}")));
    }
    let (start, _) = symbol(&symbols, DERIVED).map_err(told)?;
    let relocations = output(Command::new("readelf").args(["--relocs", "--wide"]).arg(&plugin))?;
    for (slot, expected) in (2u64..).zip(SLOTS) {
        let found = function_at(&relocations, start + (HEAD_WORDS + slot) * WORD_BYTES).unwrap_or_default();
        if !is(&found, expected) {
            return Err(told(format!("slot {slot} holds {found:?} instead of {expected}")));
        }
    }
    println!("ok   NIXL {version}: the backend interface has its {} slots in order", SLOTS.len() + 2);
    Ok(())
}

/// Address and size of a symbol.
fn symbol(listing: &str, name: &str) -> Outcome<(u64, u64)> {
    let line = listing.lines().find(|line| line.split_whitespace().last() == Some(name));
    let words: Vec<&str> = line.ok_or_else(|| format!("no symbol {name}"))?.split_whitespace().collect();
    let number = |at: usize, radix| words.get(at).and_then(|word| u64::from_str_radix(word, radix).ok());
    number(1, 16).zip(number(2, 10)).ok_or_else(|| format!("symbol {name} is listed in an unknown way"))
}

/// The mangled name that the loader will write at an address.
fn function_at(listing: &str, address: u64) -> Option<String> {
    let line = listing.lines().find(|line| {
        let first = line.split_whitespace().next();
        first.and_then(|word| u64::from_str_radix(word, 16).ok()) == Some(address)
    });
    line?.split_whitespace().nth(4).map(str::to_owned)
}

/// Whether a mangled member function has that name, and that type among its arguments.
fn is(mangled: &str, expected: &str) -> bool {
    let (name, argument) = expected.split_once(' ').unwrap_or((expected, ""));
    let part = |word: &str| format!("Engine{}{word}E", word.len());
    mangled.starts_with("_ZN") && mangled.contains(&part(name)) && {
        argument.is_empty() || mangled.contains(&format!("I{}{argument}E", argument.len()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_told_apart_by_length_and_argument() {
        let view = "_ZNK13nixlUcxEngine11prepMemViewERK12nixlDescListI18nixlRemoteMetaDescERPv";
        assert!(is(view, "prepMemView nixlRemoteMetaDesc"));
        assert!(!is(view, "prepMemView nixlMetaDesc"));
        assert!(is("_ZN13nixlUcxEngine10disconnectERKNSt7", "disconnect"));
        assert!(!is("_ZN13nixlUcxEngine10disconnectERKNSt7", "connect"));
        assert!(!is("", "connect"));
    }

    #[test]
    fn symbols_and_relocations_are_read_from_readelf() {
        let symbols = "   643: 00000000000476a0   248 OBJECT  WEAK   DEFAULT   17 _ZTV13nixlUcxEngine\n";
        assert_eq!(symbol(symbols, DERIVED), Ok((0x476a0, 248)));
        assert!(symbol(symbols, BASE).is_err());
        let relocations = "00000000000476c0  000000f600000001 R_X86_64_64  00000000000187d0 _ZN1aE + 0\n";
        assert_eq!(function_at(relocations, 0x476c0).as_deref(), Some("_ZN1aE"));
        assert_eq!(function_at(relocations, 0x476c8), None);
    }
}

//! The Rust door: abi_stable's layout check, in both directions, and one line out of what it says.

use std::path::Path;

use baton_abi::rust_door::EngineRootV1Ref;
use baton_abi::rust_door::abi_stable::StableAbi;
use baton_abi::rust_door::abi_stable::abi_stability::abi_checking::{
    AbiInstability, AbiInstabilityErrors, ExpectedFound, check_layout_compatibility,
};
use baton_abi::rust_door::abi_stable::library::{LibraryError, lib_header_from_path};
use baton_abi::rust_door::abi_stable::type_layout::{TLFieldOrFunction, TypeLayout};

use crate::compare::{self, AbiVersion, Fitted};
use crate::load::LoadError;

/// Enters a library that is loaded already.
pub(crate) fn enter(path: &Path) -> Result<(Fitted, AbiVersion), LoadError> {
    let header = lib_header_from_path(path).map_err(|e| refused(path, &e))?;
    let strings = header.version_strings();
    let found = strings.version.as_str().to_owned();
    let differs = |cause: String| LoadError::Layout { path: path.to_owned(), found: found.clone(), cause };

    let theirs =
        header.layout().ok_or_else(|| differs("it carries no description of its layout".to_owned()))?;
    let ours: &'static TypeLayout = <EngineRootV1Ref as StableAbi>::LAYOUT;
    // The check admits a newer library. Asked the other way round it admits an older one.
    if let Err(reason) = check_layout_compatibility(ours, theirs)
        && check_layout_compatibility(theirs, ours).is_err()
    {
        return Err(differs(first_difference(&reason)));
    }
    // SAFETY: the layouts are the same as far as both go, and what lies beyond is not read: see `fit`.
    let root = unsafe { header.init_root_module_with_unchecked_layout::<EngineRootV1Ref>() }
        .map_err(|e| refused(path, &e))?;
    let table = root.table();
    // SAFETY: the root module is a table, field by field.
    unsafe {
        let abi = compare::version(table).map_err(|c| differs(c.to_string()))?;
        let fitted = compare::fit(table).map_err(|c| differs(c.to_string()))?;
        Ok((fitted, abi))
    }
}

fn refused(path: &Path, error: &LibraryError) -> LoadError {
    let path = path.to_owned();
    match error {
        LibraryError::GetSymbolError { .. } => {
            LoadError::NoSymbol { path, symbol: "of an abi_stable root module".to_owned() }
        }
        LibraryError::IncompatibleVersionNumber { expected_version, actual_version, .. } => {
            LoadError::Layout {
                path,
                found: actual_version.to_string(),
                cause: format!("major version differs from {expected_version}"),
            }
        }
        other => {
            let text = other.to_string();
            let line = text.lines().map(str::trim).find(|l| !l.is_empty()).unwrap_or("no reason given");
            LoadError::Loader { path, cause: line.to_owned() }
        }
    }
}

/// The first entry of the list that says where, as structure and field: the whole way there is a page.
fn first_difference(reason: &AbiInstabilityErrors) -> String {
    let Some(error) = reason.errors.iter().find(|e| !e.errs.is_empty()) else {
        return "unspecified".to_owned();
    };
    let mut steps = error.stack_trace.iter().rev().filter_map(|step| match &step.expected {
        TLFieldOrFunction::Field(field) => Some(*field),
        TLFieldOrFunction::Function(_) => None,
    });
    let place = match (steps.next(), steps.next()) {
        (Some(field), Some(owner)) => format!("{}.{}", owner.layout().name(), field.name()),
        (Some(root), None) => root.layout().name().to_owned(),
        (None, _) => "the root module".to_owned(),
    };
    let what = error.errs.first().map_or_else(String::new, describe);
    format!("first difference: {place}: {what}")
}

fn describe(error: &AbiInstability) -> String {
    fn both<T>(what: &str, pair: &ExpectedFound<T>, show: impl Fn(&T) -> String) -> String {
        format!("{what} is {} in the engine, {} here", show(&pair.found), show(&pair.expected))
    }
    match error {
        AbiInstability::Name(p) => both("type", p, |t| one_line(t)),
        AbiInstability::Size(p) => both("size", p, usize::to_string),
        AbiInstability::Alignment(p) => both("alignment", p, usize::to_string),
        AbiInstability::FieldCountMismatch(p) => both("number of fields", p, usize::to_string),
        AbiInstability::MismatchedPrimitive(p) => both("type", p, |t| format!("{t:?}")),
        AbiInstability::UnexpectedField(p) => both("field", p, |f| f.name().to_owned()),
        AbiInstability::PackageVersion(p) => both("version", p, |v| one_line(v)),
        other => {
            let text = format!("{other:?}");
            text.split(['(', '{']).next().unwrap_or_default().trim().to_owned() + " differs"
        }
    }
}

fn one_line(value: &dyn std::fmt::Display) -> String {
    value.to_string().split_whitespace().collect::<Vec<_>>().join(" ")
}

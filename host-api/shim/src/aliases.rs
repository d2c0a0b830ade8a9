//! Other projects' variables that mean the same as a setting of ours.
//!
//! They were set for somebody else, so they never break an engine: one is read only where nobody gave the setting
//! itself, what it must not say is replaced or ignored, and the choice tells.
//!
//! Not here, because they mean something else:
//! * `NCCL_IB_HCA` matches the beginning of names, so `mlx5_1` is also `mlx5_10`; `BATON_DEVICES` names devices.
//! * `MC_TE_FILTERS` tolerates names that do not exist; `BATON_DEVICES` refuses them.
//! * `MC_RETRY_CNT` counts how often Mooncake submits a slice again, not the NIC's retries.
//! * `MC_NUM_QP_PER_EP` and `NCCL_IB_QPS_PER_CONNECTION` count per pair of NICs, `BATON_LANES` per session.
//! * `MC_IB_PORT` is one port of every device; `BATON_DEVICES` takes a port with each name.

use std::collections::BTreeMap;
use std::ffi::OsString;

use crate::settings::{Setting, setting};

/// A variable of another project.
#[derive(Debug, PartialEq, Eq)]
pub struct Alias {
    /// Name of our setting.
    pub setting: &'static str,
    /// Its variable.
    pub variable: &'static str,
    /// Negative numbers mean "choose yourself" there: the same as if it were not set.
    pub negative_is_unset: bool,
    /// A value that is valid there and that we replace: value, ours, why.
    pub replaced: Option<(&'static str, &'static str, &'static str)>,
}

const fn alias(setting: &'static str, variable: &'static str) -> Alias {
    Alias { setting, variable, negative_is_unset: false, replaced: None }
}

const fn nccl(setting: &'static str, variable: &'static str) -> Alias {
    Alias { negative_is_unset: true, ..alias(setting, variable) }
}

/// All of them. Of several for one setting the first that says something wins.
pub const ALIASES: &[Alias] = &[
    alias("gid_index", "MC_GID_INDEX"),
    nccl("gid_index", "NCCL_IB_GID_INDEX"),
    nccl("ib_timeout", "NCCL_IB_TIMEOUT"),
    Alias {
        replaced: Some(("7", "6", "7 is endless on some devices")),
        ..nccl("ib_retry", "NCCL_IB_RETRY_CNT")
    },
    alias("ib_sl", "MC_IB_SL"),
    nccl("ib_sl", "NCCL_IB_SL"),
    alias("ib_tc", "MC_IB_TC"),
    nccl("ib_tc", "NCCL_IB_TC"),
    alias("mtu", "MC_MTU"),
    alias("ib_pkey", "MC_PKEY_INDEX"),
    nccl("ib_pkey", "NCCL_IB_PKEY"),
];

/// Something the choice has to tell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// It asks for attention.
    pub warning: bool,
    /// What.
    pub text: String,
}

/// What an alias says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Said {
    /// The variable.
    pub variable: &'static str,
    /// The value for our setting.
    pub value: String,
    /// What it literally said, and why that was replaced.
    replaced: Option<(String, &'static str)>,
}

impl Said {
    /// That it is used.
    pub(crate) fn note(&self, setting: &Setting) -> Note {
        let Said { variable, value, replaced } = self;
        let mut text =
            format!("{} {value} from {variable}, as {} is not set", setting.name, setting.variable);
        if let Some((literal, why)) = replaced {
            text = format!("{text}; it says {literal}, but {why}");
        }
        Note { warning: false, text }
    }
}

/// Everything the aliases say, per setting in the table's order, and what of it is ignored.
#[derive(Debug, Default)]
pub(crate) struct Aliases {
    said: BTreeMap<&'static str, Vec<Said>>,
    /// Values that are ignored.
    faults: BTreeMap<&'static str, Vec<Note>>,
}

impl Aliases {
    pub(crate) fn read(environment: &[(OsString, OsString)]) -> Aliases {
        let mut aliases = Aliases::default();
        for alias in ALIASES {
            let ours = setting(alias.setting).expect("the table of aliases names settings");
            let Some((_, value)) = environment.iter().rev().find(|(name, _)| name == alias.variable) else {
                continue;
            };
            match read_one(alias, ours, value.to_str()) {
                Ok(None) => {}
                Ok(Some(said)) => aliases.said.entry(alias.setting).or_default().push(said),
                Err(note) => aliases.faults.entry(alias.setting).or_default().push(note),
            }
        }
        aliases
    }

    /// What is said about a setting, the one that wins first.
    pub(crate) fn said(&self, name: &str) -> &[Said] {
        self.said.get(name).map_or(&[], Vec::as_slice)
    }

    /// What to tell if the setting is left to the aliases.
    pub(crate) fn notes(&self, ours: &Setting) -> Vec<Note> {
        let mut notes = self.faults.get(ours.name).cloned().unwrap_or_default();
        let Some((first, others)) = self.said(ours.name).split_first() else { return notes };
        notes.push(first.note(ours));
        notes.extend(others.iter().filter(|other| other.value != first.value).map(|other| Note {
            warning: true,
            text: format!(
                "{} says {} {} and {} says {}: the first is used; {} decides",
                first.variable, ours.name, first.value, other.variable, other.value, ours.variable
            ),
        }));
        notes
    }
}

fn read_one(alias: &Alias, ours: &Setting, value: Option<&str>) -> Result<Option<Said>, Note> {
    let ignored = |what: &str| Note {
        warning: true,
        text: format!(
            "{} is {what} and ignored; for {} it would be {}",
            alias.variable, ours.name, ours.values
        ),
    };
    let literal = value.ok_or_else(|| ignored("not UTF-8"))?.trim();
    let negative = literal.parse::<i64>().is_ok_and(|number| number < 0);
    if literal.is_empty() || (alias.negative_is_unset && negative) {
        return Ok(None);
    }
    let variable = alias.variable;
    if let Some((theirs, value, why)) = alias.replaced
        && literal == theirs
    {
        let replaced = Some((literal.to_owned(), why));
        return Ok(Some(Said { variable, value: value.to_owned(), replaced }));
    }
    if !ours.values.admit(literal) {
        return Err(ignored(&format!("{literal:?}")));
    }
    Ok(Some(Said { variable, value: literal.to_owned(), replaced: None }))
}

/// The aliases of a setting, for people; empty if it has none.
pub(crate) fn listed(ours: &Setting) -> String {
    let list: Vec<String> =
        ALIASES.iter().filter(|a| a.setting == ours.name).map(|a| format!("`{}`", a.variable)).collect();
    if list.is_empty() { String::new() } else { format!(" Else from {}.", list.join(", ")) }
}

#[cfg(test)]
#[path = "aliases_tests.rs"]
mod tests;

//! From parameters, environment and file to a [`Choice`], or to an error that names what is wrong and lists
//! what would be right. Pure: maps in, a value out.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};

use crate::aliases::{Aliases, Note};
use crate::settings::{SETTINGS, Setting, TOOL_VARIABLES, setting};

const PREFIX: &str = "BATON_";

/// Where a value comes from. The first that has one wins.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Source {
    /// A parameter given by the host.
    Parameter,
    /// The environment.
    Environment,
    /// The file.
    File(PathBuf),
    /// A variable of another project that means the same.
    Alias(&'static str),
    /// The table of defaults.
    Default,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Parameter => f.write_str("parameter"),
            Source::Environment => f.write_str("environment"),
            Source::File(path) => write!(f, "file {}", path.display()),
            Source::Alias(variable) => write!(f, "environment variable {variable}"),
            Source::Default => f.write_str("default"),
        }
    }
}

/// A setting with its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chosen {
    /// Which.
    pub setting: &'static Setting,
    /// Its value; `None` if nobody gave one and there is no default.
    pub value: Option<String>,
    /// Where the value comes from.
    pub source: Source,
    /// What others said, who were passed over because `source` comes before them.
    pub passed_over: Vec<(Source, String)>,
}

/// All settings with their values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    chosen: Vec<Chosen>,
    notes: Vec<Note>,
}

/// Why there is no choice.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SelectError {
    /// A name that is no setting.
    #[error("{origin}: unknown setting {name:?}{}; known are {known}", did_you_mean(.hint))]
    UnknownName {
        /// Who used it.
        origin: Source,
        /// The name.
        name: String,
        /// The known name it resembles.
        hint: Option<String>,
        /// All known names.
        known: String,
    },
    /// A value its setting does not take.
    #[error("{origin}: {name} is {value:?}; it takes {values}{}", did_you_mean(.hint))]
    BadValue {
        /// Who gave it.
        origin: Source,
        /// Name of the setting as that source spells it.
        name: String,
        /// The value.
        value: String,
        /// The word it resembles.
        hint: Option<String>,
        /// What would be valid.
        values: String,
    },
    /// A variable whose value is not UTF-8.
    #[error("environment: {0} is not UTF-8")]
    NotText(String),
    /// The file is not TOML.
    #[error("file {path}: {cause}", path = .path.display())]
    Malformed {
        /// Which file.
        path: PathBuf,
        /// What and where.
        cause: String,
    },
    /// The file cannot be read.
    #[error("file {path} (from BATON_CONFIG or the parameter config): {cause}", path = .path.display())]
    Unreadable {
        /// Which file.
        path: PathBuf,
        /// The system's answer.
        cause: String,
    },
}

fn did_you_mean(hint: &Option<String>) -> String {
    hint.as_ref().map_or_else(String::new, |h| format!(" (did you mean {h}?)"))
}

type Values = BTreeMap<&'static str, String>;

/// The path of the file with settings, if parameters or environment name one.
pub fn config_path(
    params: &BTreeMap<String, String>,
    environment: &[(OsString, OsString)],
) -> Result<Option<PathBuf>, SelectError> {
    let mut from_params = parameters(params)?;
    let mut from_environment = variables(environment)?;
    Ok(from_params.remove("config").or_else(|| from_environment.remove("config")).map(PathBuf::from))
}

/// Chooses. `file` is the path and the text of the file that [`config_path`] names.
pub fn select(
    params: &BTreeMap<String, String>,
    environment: &[(OsString, OsString)],
    file: Option<(&Path, &str)>,
) -> Result<Choice, SelectError> {
    let mut layers =
        vec![(Source::Parameter, parameters(params)?), (Source::Environment, variables(environment)?)];
    if let Some((path, text)) = file {
        layers.push((Source::File(path.to_owned()), entries(path, text)?));
    }
    let aliases = Aliases::read(environment);
    let chosen: Vec<Chosen> = SETTINGS.iter().map(|s| choose(s, &mut layers, &aliases)).collect();
    let left_to_aliases = chosen.iter().filter(|c| matches!(c.source, Source::Alias(_) | Source::Default));
    let notes = left_to_aliases.flat_map(|c| aliases.notes(c.setting)).collect();
    Ok(Choice { chosen, notes })
}

fn choose(setting: &'static Setting, layers: &mut [(Source, Values)], aliases: &Aliases) -> Chosen {
    let said = layers.iter_mut().filter_map(|(source, values)| {
        let value = values.remove(setting.name)?;
        Some((source.clone(), value))
    });
    let by_alias = aliases.said(setting.name).iter();
    let mut said = said.chain(by_alias.map(|said| (Source::Alias(said.variable), said.value.clone())));
    match said.next() {
        Some((source, value)) => Chosen { setting, value: Some(value), source, passed_over: said.collect() },
        None => Chosen {
            setting,
            value: setting.default.map(str::to_owned),
            source: Source::Default,
            passed_over: Vec::new(),
        },
    }
}

fn parameters(params: &BTreeMap<String, String>) -> Result<Values, SelectError> {
    let mut values = Values::new();
    for (name, value) in params {
        let known = setting(name).ok_or_else(|| unknown(Source::Parameter, name, |s| s.name))?;
        admit(known, known.name, value, Source::Parameter)?;
        values.insert(known.name, value.clone());
    }
    Ok(values)
}

fn variables(environment: &[(OsString, OsString)]) -> Result<Values, SelectError> {
    let mut values = Values::new();
    for (name, value) in environment {
        let Some(name) = name.to_str().filter(|n| n.starts_with(PREFIX)) else { continue };
        if TOOL_VARIABLES.contains(&name) {
            continue;
        }
        let known = SETTINGS
            .iter()
            .find(|s| s.variable == name)
            .ok_or_else(|| unknown(Source::Environment, name, |s| s.variable))?;
        let value = value.to_str().ok_or_else(|| SelectError::NotText(name.to_owned()))?;
        admit(known, known.variable, value, Source::Environment)?;
        values.insert(known.name, value.to_owned());
    }
    Ok(values)
}

fn entries(path: &Path, text: &str) -> Result<Values, SelectError> {
    let source = || Source::File(path.to_owned());
    let table: toml::Table = text.parse().map_err(|e: toml::de::Error| SelectError::Malformed {
        path: path.to_owned(),
        cause: one_line(&e),
    })?;
    let mut values = Values::new();
    for (name, value) in table {
        let known = setting(&name)
            .filter(|s| s.name != "config")
            .ok_or_else(|| unknown(source(), &name, |s| s.name))?;
        let value = match value {
            toml::Value::String(text) => text,
            toml::Value::Integer(number) => number.to_string(),
            other => return Err(bad_value(known, known.name, &other.to_string(), source())),
        };
        admit(known, known.name, &value, source())?;
        values.insert(known.name, value);
    }
    Ok(values)
}

fn one_line(error: &toml::de::Error) -> String {
    error.to_string().split_whitespace().collect::<Vec<_>>().join(" ")
}

fn admit(known: &'static Setting, name: &str, value: &str, origin: Source) -> Result<(), SelectError> {
    if known.values.admit(value) { Ok(()) } else { Err(bad_value(known, name, value, origin)) }
}

fn bad_value(known: &'static Setting, name: &str, value: &str, origin: Source) -> SelectError {
    let words: &[&str] = match known.values {
        crate::settings::Values::OneOf(words) => words,
        _ => &[],
    };
    SelectError::BadValue {
        origin,
        name: name.to_owned(),
        value: value.to_owned(),
        hint: nearest(value, words.iter().copied()),
        values: known.values.to_string(),
    }
}

fn unknown(origin: Source, name: &str, spelling: fn(&'static Setting) -> &'static str) -> SelectError {
    let in_file = matches!(origin, Source::File(_));
    let known: Vec<_> = SETTINGS.iter().map(spelling).filter(|n| !(in_file && *n == "config")).collect();
    SelectError::UnknownName {
        origin,
        name: name.to_owned(),
        hint: nearest(name, known.iter().copied()),
        known: known.join(", "),
    }
}

/// The candidate that differs in at most a third of its letters.
fn nearest<'a>(word: &str, candidates: impl Iterator<Item = &'a str>) -> Option<String> {
    let word = word.to_ascii_lowercase();
    let near = candidates.map(|c| (distance(&word, &c.to_ascii_lowercase()), c)).min()?;
    (near.0 <= near.1.len().div_ceil(3).min(3)).then(|| near.1.to_owned())
}

/// How many letters to insert, delete or replace.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, cb) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(ca != *cb);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

impl Choice {
    /// Every setting with its value, in the table's order.
    pub fn settings(&self) -> &[Chosen] {
        &self.chosen
    }

    /// What was taken from other projects' variables, and what of theirs was ignored.
    pub fn notes(&self) -> &[Note] {
        &self.notes
    }

    /// The value of a setting, if it has one.
    pub fn value(&self, name: &str) -> Option<&str> {
        self.chosen(name)?.value.as_deref()
    }

    /// A setting with its value and source.
    pub fn chosen(&self, name: &str) -> Option<&Chosen> {
        self.chosen.iter().find(|c| c.setting.name == name)
    }
}

#[cfg(test)]
#[path = "select_tests.rs"]
mod tests;

//! Typed, range-checked reading of JSON objects. An error names the field by its path, the value and what is allowed.

use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use super::{MAX_WORD_BYTES, MAX_WORDS, clip};

/// What is wrong with a field.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FieldError {
    /// A required key is absent.
    #[error("{path} is missing")]
    Missing {
        /// Where, e.g. `HELLO.offers[0].lanes[1].rq_depth`.
        path: String,
    },
    /// A value of another type.
    #[error("{path}: {found} is not {expected}")]
    Type {
        /// Where.
        path: String,
        /// The value, shortened.
        found: String,
        /// What is allowed.
        expected: String,
    },
    /// A number, length or count outside of what is allowed.
    #[error("{path}: {found} is outside {min}..={max}")]
    Range {
        /// Where.
        path: String,
        /// The value.
        found: String,
        /// Smallest allowed.
        min: u64,
        /// Largest allowed.
        max: u64,
    },
    /// A value that contradicts another.
    #[error("{path}: {reason}")]
    Invalid {
        /// Where.
        path: String,
        /// Why.
        reason: String,
    },
}

/// An object being read, and where it stands.
pub(crate) struct Fields<'a> {
    map: &'a Map<String, Value>,
    path: String,
}

impl<'a> Fields<'a> {
    pub(crate) fn new(value: &'a Value, path: impl Into<String>) -> Result<Self, FieldError> {
        let path = path.into();
        match value {
            Value::Object(map) => Ok(Self { map, path }),
            other => Err(type_error(path, other, "an object")),
        }
    }

    pub(crate) fn path(&self, key: &str) -> String {
        format!("{}.{key}", self.path)
    }

    pub(crate) fn raw(&self, key: &str) -> Result<&'a Value, FieldError> {
        self.map.get(key).ok_or_else(|| FieldError::Missing { path: self.path(key) })
    }

    /// Absent and null are the same.
    pub(crate) fn optional(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    pub(crate) fn object(&self, key: &str) -> Result<Fields<'a>, FieldError> {
        Fields::new(self.raw(key)?, self.path(key))
    }

    pub(crate) fn number(&self, key: &str, allowed: RangeInclusive<u64>) -> Result<u64, FieldError> {
        number(self.raw(key)?, || self.path(key), allowed)
    }

    pub(crate) fn number_u32(&self, key: &str, allowed: RangeInclusive<u32>) -> Result<u32, FieldError> {
        let wide = u64::from(*allowed.start())..=u64::from(*allowed.end());
        Ok(u32::try_from(self.number(key, wide)?).expect("within a u32 range"))
    }

    /// Absent: `otherwise`.
    pub(crate) fn flag_or(&self, key: &str, otherwise: bool) -> Result<bool, FieldError> {
        match self.map.get(key) {
            None => Ok(otherwise),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(other) => Err(type_error(self.path(key), other, "true or false")),
        }
    }

    pub(crate) fn text(&self, key: &str, len: RangeInclusive<usize>) -> Result<&'a str, FieldError> {
        text(self.raw(key)?, || self.path(key), len)
    }

    pub(crate) fn hex<const N: usize>(&self, key: &str) -> Result<[u8; N], FieldError> {
        hex_array(self.raw(key)?, || self.path(key))
    }

    pub(crate) fn optional_hex<const N: usize>(&self, key: &str) -> Result<Option<[u8; N]>, FieldError> {
        self.optional(key).map(|value| hex_array(value, || self.path(key))).transpose()
    }

    pub(crate) fn optional_number(
        &self,
        key: &str,
        allowed: RangeInclusive<u64>,
    ) -> Result<Option<u64>, FieldError> {
        self.optional(key).map(|value| number(value, || self.path(key), allowed)).transpose()
    }

    pub(crate) fn list(&self, key: &str, len: RangeInclusive<usize>) -> Result<&'a [Value], FieldError> {
        let Value::Array(items) = self.raw(key)? else {
            return Err(type_error(self.path(key), self.raw(key)?, "a list"));
        };
        if !len.contains(&items.len()) {
            return Err(range_error(self.path(key), format!("a list of {}", items.len()), len));
        }
        Ok(items)
    }

    pub(crate) fn each<T>(
        &self,
        key: &str,
        len: RangeInclusive<usize>,
        read: impl Fn(&'a Value, String) -> Result<T, FieldError>,
    ) -> Result<Vec<T>, FieldError> {
        let items = self.list(key, len)?;
        items.iter().enumerate().map(|(i, item)| read(item, format!("{}[{i}]", self.path(key)))).collect()
    }

    /// An object with at most `max` entries, each under a short name; absent and null are empty.
    pub(crate) fn entries(&self, key: &str, max: usize) -> Result<Vec<(&'a String, &'a Value)>, FieldError> {
        let Some(value) = self.optional(key) else { return Ok(Vec::new()) };
        let Value::Object(map) = value else { return Err(type_error(self.path(key), value, "an object")) };
        if map.len() > max {
            return Err(range_error(self.path(key), format!("an object of {}", map.len()), 0..=max));
        }
        if let Some(long) = map.keys().find(|name| !(1..=MAX_WORD_BYTES).contains(&name.len())) {
            let shown = format!("a name of {} bytes", long.len());
            return Err(range_error(self.path(key), shown, 1..=MAX_WORD_BYTES));
        }
        Ok(map.iter().collect())
    }

    /// A list of short names.
    pub(crate) fn words(&self, key: &str) -> Result<Vec<String>, FieldError> {
        self.each(key, 0..=MAX_WORDS, |item, path| {
            text(item, || path.clone(), 1..=MAX_WORD_BYTES).map(str::to_owned)
        })
    }

    pub(crate) fn invalid(&self, key: &str, reason: impl Into<String>) -> FieldError {
        FieldError::Invalid { path: self.path(key), reason: reason.into() }
    }
}

pub(crate) fn number(
    value: &Value,
    path: impl Fn() -> String,
    allowed: RangeInclusive<u64>,
) -> Result<u64, FieldError> {
    let (min, max) = (*allowed.start(), *allowed.end());
    match value.as_u64() {
        Some(n) if allowed.contains(&n) => Ok(n),
        None if !value.is_i64() => {
            Err(type_error(path(), value, &format!("a whole number in {min}..={max}")))
        }
        _ => Err(FieldError::Range { path: path(), found: value.to_string(), min, max }),
    }
}

fn text(value: &Value, path: impl Fn() -> String, len: RangeInclusive<usize>) -> Result<&str, FieldError> {
    let Value::String(text) = value else { return Err(type_error(path(), value, "a string")) };
    if !len.contains(&text.len()) {
        return Err(range_error(path(), format!("a string of {} bytes", text.len()), len));
    }
    Ok(text)
}

fn hex_array<const N: usize>(value: &Value, path: impl Fn() -> String) -> Result<[u8; N], FieldError> {
    let refuse = || type_error(path(), value, &format!("a string of {} lower-case hex digits", 2 * N));
    let Value::String(text) = value else { return Err(refuse()) };
    unhex(text).ok_or_else(refuse)
}

/// The value in an error: never more than a line.
fn type_error(path: String, found: &Value, expected: &str) -> FieldError {
    let shown = match found {
        Value::Array(items) if !items.is_empty() => format!("a list of {}", items.len()),
        Value::Object(_) => "an object".to_owned(),
        other => other.to_string(),
    };
    FieldError::Type { path, found: clip(&shown, 80).to_owned(), expected: expected.to_owned() }
}

fn range_error(path: String, found: String, len: RangeInclusive<usize>) -> FieldError {
    FieldError::Range { path, found, min: *len.start() as u64, max: *len.end() as u64 }
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    bytes
        .iter()
        .flat_map(|b| [DIGITS[usize::from(b >> 4)], DIGITS[usize::from(b & 15)]])
        .map(char::from)
        .collect()
}

pub(crate) fn unhex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let digits = text.as_bytes();
    if digits.len() != 2 * N {
        return None;
    }
    let value = |digit: u8| match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    };
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = value(pair[0])? << 4 | value(pair[1])?;
    }
    Some(bytes)
}

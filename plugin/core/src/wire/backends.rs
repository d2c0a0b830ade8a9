//! Which backends an engine or an offer has.

use std::fmt;

/// The word for the one-sided backend.
pub const ONE_SIDED: &str = "one-sided";
/// The word for the two-sided backend.
pub const TWO_SIDED: &str = "two-sided";

/// A set of backends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Backends {
    /// WRITE and READ into the peer's memory.
    pub one_sided: bool,
    /// SEND and RECV through bounce slots.
    pub two_sided: bool,
}

/// Two engines that have no backend in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no common backend: here {ours}, there {theirs}; set BATON_BACKEND alike on both")]
pub struct NoCommonBackend {
    /// Own.
    pub ours: Backends,
    /// The peer's.
    pub theirs: Backends,
}

impl Backends {
    /// From a list of words, such as connection information has; words that this version does not know do not count.
    pub fn from_words(words: &[impl AsRef<str>]) -> Self {
        let has = |word| words.iter().any(|theirs| theirs.as_ref() == word);
        Self { one_sided: has(ONE_SIDED), two_sided: has(TWO_SIDED) }
    }

    /// The words.
    pub fn words(self) -> impl Iterator<Item = &'static str> {
        let words = [(self.one_sided, ONE_SIDED), (self.two_sided, TWO_SIDED)];
        words.into_iter().filter_map(|(has, word)| has.then_some(word))
    }

    /// Those that the peer has as well.
    ///
    /// # Errors
    /// There are none.
    pub fn common(self, theirs: Backends) -> Result<Backends, NoCommonBackend> {
        let both = Backends {
            one_sided: self.one_sided && theirs.one_sided,
            two_sided: self.two_sided && theirs.two_sided,
        };
        if both == Backends::default() { Err(NoCommonBackend { ours: self, theirs }) } else { Ok(both) }
    }
}

impl fmt::Display for Backends {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words: Vec<_> = self.words().collect();
        f.write_str(if words.is_empty() { "none that is known" } else { "" })?;
        f.write_str(&words.join(" and "))
    }
}

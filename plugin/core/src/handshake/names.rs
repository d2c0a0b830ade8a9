//! Who may speak under which name, as a pure function. A name is no identity, but it is all that a host sees of a peer: at
//! any time one instance has it.

use crate::ids::Instance;
use crate::wire::{ErrorCode, Refusal};

/// An instance wants to open a session under a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NameClaim<'a> {
    /// Who.
    pub instance: Instance,
    /// What it calls itself.
    pub name: &'a str,
    /// What the host calls it: the name inside its connection information, if that is loaded.
    pub bound_as: Option<&'a str>,
    /// With whom a session under that name is open.
    pub holder: Option<Instance>,
}

/// Whether it may.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NameDecision {
    /// Nobody else has the name.
    Granted,
    /// The host says that the name is the claimant's, once it has proved who it is: the holder's session ends first.
    InPlaceOf(Instance),
    /// Send ERROR.
    Refuse(Refusal),
}

/// The answer to a claim at the engine called `own_name`.
///
/// Only [`ErrorCode::NameInUse`] may change by itself: whoever was killed and started again comes before its end is noticed.
pub fn decide_name(own_name: &str, claim: &NameClaim<'_>) -> NameDecision {
    let NameClaim { instance, name, bound_as, holder } = *claim;
    if name == own_name {
        let text = format!("the name {name:?} is that of the agent you connect to; you need another");
        return NameDecision::Refuse(Refusal::new(ErrorCode::BadIdentity, text));
    }
    if let Some(bound) = bound_as.filter(|bound| *bound != name) {
        let text =
            format!("instance {instance} calls itself {name:?}, its connection information says {bound:?}");
        return NameDecision::Refuse(Refusal::new(ErrorCode::BadIdentity, text));
    }
    match holder {
        None => NameDecision::Granted,
        Some(holder) if holder == instance => NameDecision::Granted,
        Some(holder) if bound_as.is_some() => NameDecision::InPlaceOf(holder),
        Some(holder) => {
            let text = format!(
                "the name {name:?} is in use by a connected agent (instance {holder}); it is free when that session ends"
            );
            NameDecision::Refuse(Refusal::new(ErrorCode::NameInUse, text))
        }
    }
}

//! Secrets, none of which a `Debug` or an error ever shows, and the one way to make authenticators from them.

use hmac::{Hmac, KeyInit, Mac as _};
use sha2::Sha256;

/// An HMAC-SHA256.
pub type Mac = [u8; 32];

/// The session key of a listener: whoever holds it may connect.
#[derive(Clone)]
pub struct SessionKey([u8; 32]);

/// Proof of having been a party of the session's last epoch.
#[derive(Clone)]
pub struct ResumeToken([u8; 16]);

macro_rules! secret {
    ($name:ident, $len:literal) => {
        impl $name {
            /// From random bytes.
            pub fn new(bytes: [u8; $len]) -> Self {
                Self(bytes)
            }
            /// The bytes, for encoders and authenticators only.
            pub fn expose(&self) -> &[u8; $len] {
                &self.0
            }
        }
        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(concat!(stringify!($name), "(..)"))
            }
        }
        impl PartialEq for $name {
            fn eq(&self, other: &Self) -> bool {
                same_bytes(&self.0, &other.0)
            }
        }
        impl Eq for $name {}
    };
}

secret!(SessionKey, 32);
secret!(ResumeToken, 16);

/// HMAC-SHA256 of the parts one after the other. Callers see to it that parts of variable length come last or hashed.
pub fn mac(key: &[u8], parts: &[&[u8]]) -> Mac {
    keyed(key, parts).finalize().into_bytes().into()
}

/// Whether `expected` is the authenticator of the parts, in time that does not depend on where they differ.
pub(crate) fn verify(key: &[u8], parts: &[&[u8]], expected: &[u8]) -> bool {
    keyed(key, parts).verify_slice(expected).is_ok()
}

fn keyed(key: &[u8], parts: &[&[u8]]) -> Hmac<Sha256> {
    let mut hmac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes keys of any length");
    parts.iter().for_each(|part| hmac.update(part));
    hmac
}

/// Compares without an early exit: every byte is looked at.
fn same_bytes(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0u8, |diff, (x, y)| diff | (x ^ y)) == 0
}

//! The knock: the first id of a connection (the destination connection id of a client's first
//! packet, RFC 9000, section 7.2), by which a node checks before anything else that the sender of a
//! packet has the secret.
//!
//! ```text
//! random (8)  the first 12 bytes of HMAC-SHA256 of them, with a key that follows from the secret
//! ```
//!
//! It contains no time, because the clocks of machines differ: an observer of a knock can replay
//! it, which takes one place among the handshakes in progress, and nothing else.

use std::fmt;

use quinn::ConnectionId;
use ring::hmac;

use super::error::NetError;
use super::secret::{Secret, random_bytes};

/// Bytes of a knock: the longest id that QUIC version 1 allows.
const KNOCK_BYTES: usize = 20;
const RANDOM_BYTES: usize = 8;

/// Key of the knocks of all nodes that know a secret.
pub(crate) struct Knock(hmac::Key);

impl fmt::Debug for Knock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Knock(..)")
    }
}

impl Knock {
    pub fn of(secret: &Secret) -> Self {
        let key = secret.derive(b"potluck/1 knock");
        Self(hmac::Key::new(hmac::HMAC_SHA256, &key[..]))
    }

    /// Returns the first id of another connection.
    ///
    /// # Errors
    /// Returns [`NetError::Identity`] if the operating system gives no random numbers.
    pub fn fresh(&self) -> Result<ConnectionId, NetError> {
        let random = random_bytes::<RANDOM_BYTES>().map_err(NetError::identity)?;
        let mut id = [0; KNOCK_BYTES];
        let (head, tag) = id.split_at_mut(RANDOM_BYTES);
        head.copy_from_slice(&random);
        tag.copy_from_slice(&hmac::sign(&self.0, &random).as_ref()[..tag.len()]);
        Ok(ConnectionId::new(&id))
    }

    /// Returns true for the first id of a connection whose sender knows the secret.
    pub fn opens(&self, id: &[u8]) -> bool {
        if id.len() != KNOCK_BYTES {
            return false;
        }
        let (random, tag) = id.split_at(RANDOM_BYTES);
        let right = hmac::sign(&self.0, random);
        // ring compares only whole tags in constant time, so the tags of both are compared.
        let of_right = hmac::sign(&self.0, &right.as_ref()[..tag.len()]);
        hmac::verify(&self.0, tag, of_right.as_ref()).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn knocks_of_the_secret_open_and_all_others_do_not() {
        let [own, other] = [(); 2].map(|()| Knock::of(&Secret::generate().unwrap()));
        let id = own.fresh().unwrap();
        assert!(own.opens(&id) && !other.opens(&id));
        assert_ne!(own.fresh().unwrap(), id);
        for bit in 0..8 * KNOCK_BYTES {
            let mut changed = *id.first_chunk::<KNOCK_BYTES>().unwrap();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert!(!own.opens(&changed), "bit {bit}");
        }
        for length in 0..KNOCK_BYTES {
            assert!(!own.opens(&id[..length]), "{length} bytes");
        }
        assert_eq!(format!("{own:?}"), "Knock(..)");
    }
}

//! Token for requests of the state of a run.

use std::path::Path;

use crate::secret::read_protected;
use crate::secret_error::SecretError;

/// Characters of a token.
const CHARACTERS: std::ops::RangeInclusive<usize> = 16..=128;

/// Token of a status server; only its hash is kept.
pub struct StatusToken(blake3::Hash);

impl StatusToken {
    /// Reads a file of one line that only its owner can read.
    ///
    /// # Errors
    /// Returns `SecretError` if the file cannot be read, if on Unix other users may read or write
    /// it, or if it has fewer than 16 or more than 128 characters, or characters other than visible
    /// ASCII.
    pub fn read_file(path: &Path) -> Result<Self, SecretError> {
        let text = read_protected(path)?;
        let token = text.trim_end_matches(['\r', '\n']);
        let is_visible = token.bytes().all(|byte| byte.is_ascii_graphic());
        if !is_visible || !CHARACTERS.contains(&token.len()) {
            let (min, max) = (*CHARACTERS.start(), *CHARACTERS.end());
            return Err(SecretError::Token { path: path.to_owned(), min, max });
        }
        Ok(Self(blake3::hash(token.as_bytes())))
    }

    /// Returns true if the value of an `Authorization` header has the token. The time that this
    /// takes depends on the value alone: hashes of blake3 are compared in constant time.
    pub(super) fn admits(&self, authorization: Option<&[u8]>) -> bool {
        let Some((scheme, token)) = authorization.and_then(|value| value.split_at_checked(7))
        else {
            return false;
        };
        scheme.eq_ignore_ascii_case(b"bearer ") && blake3::hash(token) == self.0
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn of_file(text: &str, mode: u32) -> Result<StatusToken, String> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("token");
        fs::write(&path, text).unwrap();
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        }
        StatusToken::read_file(&path).map_err(|error| error.to_string())
    }

    #[test]
    fn only_the_whole_token_is_admitted() {
        let token = of_file("0123456789abcdef\n", 0o600).unwrap();
        for right in ["Bearer 0123456789abcdef", "bearer 0123456789abcdef"] {
            assert!(token.admits(Some(right.as_bytes())), "{right}");
        }
        for wrong in [
            "",
            "Bearer",
            "Bearer ",
            "0123456789abcdef",
            "Basic 0123456789abcdef",
            "Bearer 0123456789abcde",
            "Bearer 0123456789abcdeF",
            "Bearer 0123456789abcdef0",
            "Bearer  0123456789abcdef",
        ] {
            assert!(!token.admits(Some(wrong.as_bytes())), "{wrong}");
        }
        assert!(!token.admits(None));
    }

    #[test]
    fn files_that_cannot_be_right_are_refused_without_what_they_hold() {
        for text in ["0123456789abcde", "0123456789 abcdef", "0123456789abcdéfg", ""] {
            let error = of_file(text, 0o600).err().unwrap();
            let expected = "expects a token of 16 to 128 visible characters";
            assert!(error.contains(expected), "{error}");
            assert!(text.is_empty() || !error.contains(text), "{error}");
        }
        assert!(of_file(&"x".repeat(129), 0o600).is_err());
        #[cfg(unix)]
        {
            let error = of_file("0123456789abcdef", 0o644).err().unwrap();
            assert!(error.contains("chmod 600 "), "{error}");
        }
    }
}

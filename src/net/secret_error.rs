//! Errors of the secret of a run.

use std::path::PathBuf;

use super::code_size::CODE_LETTERS;
use potluck_core::Setting;

/// Characters of a text from which a key is derived.
pub(crate) const TEXT_CHARACTERS: std::ops::RangeInclusive<usize> = 26..=128;

/// Failure to make or read a secret. No variant holds a part of it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SecretError {
    #[error(
        "character {position} of the code is not one of a code (digits and letters without I, L, \
         O and U): there is a typing error in the code"
    )]
    Character { position: usize },
    #[error("the code has {found} letters and digits, and codes have {CODE_LETTERS}")]
    Letters { found: usize },
    #[error(
        "the letters of the code do not match its last two: there is a typing error in the code"
    )]
    Check,
    #[error("{}: cannot read this file of a secret: {why}", path.display())]
    Read { path: PathBuf, why: String },
    #[error(
        "{0}: other users may read this file of a secret (mode {mode:03o}): run `chmod 600 {0}`{1}",
        path.display(), of_group(*mode)
    )]
    Mode { path: PathBuf, mode: u32 },
    #[error(
        "{}: the text has {found} characters, and {} to {} that nobody can guess are needed: \
         better use the code that `potluck secret` makes",
        path.display(), TEXT_CHARACTERS.start(), TEXT_CHARACTERS.end()
    )]
    Length { path: PathBuf, found: usize },
    #[error(
        "{}: expects a token of {min} to {max} visible characters of ASCII, in one line",
        path.display()
    )]
    Token { path: PathBuf, min: usize, max: usize },
    #[error("{}: {error}", path.display())]
    Code { path: PathBuf, error: Box<SecretError> },
    #[error("the operating system gave no random numbers for a code")]
    Random,
}

/// Advice for a file that, besides its owner, only its group may read.
fn of_group(mode: u32) -> String {
    if mode & 0o037 == 0 { format!(", or {}", Setting::SecretOfGroup) } else { String::new() }
}

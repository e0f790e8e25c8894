//! Sizes of a code: the bytes of its key, and its letters.

pub(crate) const KEY_BYTES: usize = 16;
pub(crate) const KEY_LETTERS: usize = 26;
pub(crate) const CODE_LETTERS: usize = KEY_LETTERS + 2;

//! The ways to compute one call on a GPU.

use super::Dispatch;

/// One of them. All variants of a call compute the same function; they may differ in rounding.
#[derive(Clone, Debug, PartialEq)]
pub struct Variant {
    /// Unique among the variants of a call, and the same for calls of other sizes.
    pub name: String,
    pub dispatches: Vec<Dispatch>,
}

impl Variant {
    pub fn new(name: impl Into<String>, dispatches: Vec<Dispatch>) -> Self {
        Self { name: name.into(), dispatches }
    }
}

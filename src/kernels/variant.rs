//! GPU kernel variants of an op call.

use super::Dispatch;
use super::dispatch::{scratch_bytes, workspace_bytes};

/// One GPU implementation of an op call. All variants of a call compute the same function; they
/// may differ in rounding.
#[derive(Clone, Debug, PartialEq)]
pub struct Variant {
    /// Name, unique among the variants of a call, and the same for calls of other sizes.
    pub name: String,
    pub dispatches: Vec<Dispatch>,
}

impl Variant {
    pub fn new(name: impl Into<String>, dispatches: Vec<Dispatch>) -> Self {
        Self { name: name.into(), dispatches }
    }

    /// Returns the bytes of workspace that the dispatches need.
    pub fn workspace_bytes(&self) -> usize {
        workspace_bytes(&self.dispatches)
    }

    pub(crate) fn scratch_bytes(&self) -> usize {
        scratch_bytes(&self.dispatches)
    }

    pub(crate) fn is_foreign(&self) -> bool {
        self.dispatches.iter().any(|dispatch| dispatch.shader.is_foreign)
    }
}

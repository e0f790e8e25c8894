//! Probes: small calls that run the shader of a large one, on which a kernel is certified. They
//! have the head width, the transposes and the epilogue of the call, odd sizes, so that tiles and
//! loops meet their edges, and random inputs of the right kind. The twins choose their sizes
//! ([`crate::Twin::probes`]).

use std::collections::HashMap;
use std::sync::Arc;

use crate::{OpCall, OwnedCall, twin};
use potluck_core::HostTensor;

/// Cache of the inputs and reference results of probes, because all variants of a call run the
/// same probes.
#[derive(Default)]
pub(crate) struct ReferenceCache {
    solved: HashMap<String, Arc<ReferenceResult>>,
}

/// Inputs of a probe and its outputs in f64.
pub(crate) struct ReferenceResult {
    pub inputs: Vec<HostTensor<f64>>,
    pub expected: Vec<Vec<f64>>,
}

impl ReferenceCache {
    /// Inputs and outputs of a probe, computed at first use.
    pub(crate) fn solve(&mut self, owned_call: &OwnedCall) -> Arc<ReferenceResult> {
        let solved = self.solved.entry(format!("{owned_call:?}")).or_insert_with(|| {
            let inputs = owned_call.values();
            let expected = owned_call.expected(&inputs);
            Arc::new(ReferenceResult { inputs, expected })
        });
        Arc::clone(solved)
    }

    /// Frees all cached results.
    pub fn clear(&mut self) {
        self.solved.clear();
    }
}

/// Returns the probes of a call, the cheapest first; each a second time with accumulation if the
/// op can accumulate. Not all of them run the call's shader: the caller must compare the shaders.
pub fn probes(call: &OpCall) -> Vec<OwnedCall> {
    let Some(twin) = twin(call.op) else { return Vec::new() };
    let mut probes = Vec::new();
    for (op, inputs) in (twin.probes)(call.op, &call.inputs) {
        let Some(probe) = OwnedCall::new(op, inputs, call.random) else { continue };
        let owned_call = OwnedCall { precision: call.precision, ..probe };
        let accumulate = owned_call.op.accumulates();
        if accumulate.any() {
            probes.push(owned_call.clone());
            probes.push(OwnedCall { accumulate, ..owned_call });
        } else {
            probes.push(owned_call);
        }
    }
    probes
}

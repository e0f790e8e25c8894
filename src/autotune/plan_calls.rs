//! The calls of a plan, their names, and which variant each of them runs.

use std::collections::{BTreeMap, BTreeSet};

use super::certify::variant_hash;
use super::probes::Problem;
use crate::base::TensorId;
use crate::base::rng::Key;
use crate::device::Gpu;
use crate::graph::Plan;
use crate::kernels::{Call, Random, Variant, twin};

/// The variant of each call that has several, by the call's [`signature`] at full capacity.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Choices(BTreeMap<String, String>);

impl Choices {
    pub fn get(&self, signature: &str) -> Option<&str> {
        self.0.get(signature).map(String::as_str)
    }

    pub fn insert(&mut self, signature: String, name: String) {
        self.0.insert(signature, name);
    }

    /// Signatures and names, sorted.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(signature, name)| (signature.as_str(), name.as_str()))
    }
}

impl FromIterator<(String, String)> for Choices {
    fn from_iter<I: IntoIterator<Item = (String, String)>>(choices: I) -> Self {
        Self(choices.into_iter().collect())
    }
}

/// A call as text, such as `matmul a b^T (768, 128) (384, 128)`.
pub fn signature(call: &Call) -> String {
    let mut text = call.op.to_string();
    for dims in &call.inputs {
        let dims: Vec<String> = dims.iter().map(usize::to_string).collect();
        text += &format!(" ({})", dims.join(", "));
    }
    if call.accumulate {
        text += " accumulating";
    }
    if call.op.is_random() && call.random.training {
        text += " training";
    }
    text
}

/// A call of a plan, which several nodes may make.
pub struct Use {
    pub problem: Problem,
    pub signature: String,
    pub variants: Vec<Variant>,
    /// FLOPs and bytes of all its nodes: those with more are timed first.
    pub weight: f64,
}

/// The different calls of a plan at full capacity.
pub fn uses(plan: &Plan) -> Vec<Use> {
    let random = Random { step_key: Key::new(1), training: plan.graph.is_trained() };
    let dims = |ids: &[TensorId]| -> Vec<Vec<usize>> {
        ids.iter().map(|id| plan.graph.tensor(*id).shape.resolve(plan.options.rows)).collect()
    };
    let mut uses: Vec<Use> = Vec::new();
    for node in &plan.graph.nodes {
        let Some(twin) = twin(&node.op) else { continue };
        let (inputs, outputs) = (dims(&node.inputs), dims(&node.outputs));
        let (op, accumulate) = (node.op.clone(), node.accumulate);
        let problem = Problem { op, inputs, outputs, accumulate, random };
        let call = problem.call();
        let (signature, cost) = (signature(&call), (twin.cost)(&call));
        let weight = cost.flops + cost.bytes;
        match uses.iter_mut().find(|used| used.signature == signature) {
            Some(used) => used.weight += weight,
            None => {
                let variants = (twin.variants)(&call);
                uses.push(Use { problem, signature, variants, weight });
            }
        }
    }
    uses
}

/// Names the set of variants that there is to choose from.
pub fn candidates(gpu: &Gpu, call: &Call, variants: &[Variant]) -> String {
    let hashes: BTreeSet<String> =
        variants.iter().map(|variant| variant_hash(gpu.checks, call, variant)).collect();
    let all: String = hashes.into_iter().collect();
    blake3::hash(all.as_bytes()).to_hex()[..32].to_string()
}

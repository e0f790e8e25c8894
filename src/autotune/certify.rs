//! Certification: is a kernel right on this device and driver? It runs on probes and is compared
//! with the reference in f64, with sentinels behind every output.

use super::probes::{Oracle, Problem, probes};
use super::update_probes;
use crate::device::{Checks, DeviceError, Gpu};
use crate::graph::{Update, UpdateRange};
use crate::kernels::harness::{self, NMSE_MAX, TrialError};
use crate::kernels::ops::{hash, norm};
use crate::kernels::{Call, Dispatch, Operand, Pipelines, Variant, source, twin};

/// The release of wgpu, which translates the shaders: another one may do so otherwise.
const WGPU: &str = "30.0.1";

/// Probes that a kernel runs on, of those that use its shader.
const PROBES: usize = 4;

/// What a planted error multiplies results by; see [`Subject::planted`].
const PLANTED: f32 = 1.01;

/// What the trials of a kernel said.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Finding {
    /// As the reference; the largest normalized mean squared error.
    Right { nmse: f64 },
    /// Not to be used on this driver, and why.
    Wrong { why: String },
}

impl Finding {
    pub fn is_right(&self) -> bool {
        matches!(self, Self::Right { .. })
    }

    fn of(nmse: f64) -> Self {
        match nmse <= NMSE_MAX {
            true => Self::Right { nmse },
            false => Self::Wrong { why: format!("its results are wrong, NMSE {nmse:.2e}") },
        }
    }

    /// The worse of two: what is wrong, or else the larger error.
    fn worst(self, other: Self) -> Self {
        match (&self, &other) {
            (Self::Wrong { .. }, _) => self,
            (Self::Right { nmse: a }, Self::Right { nmse: b }) if a >= b => self,
            _ => other,
        }
    }
}

/// Names what runs: BLAKE3 of the WGSL, the entry points, the access to each binding, the checks
/// and the release of wgpu. One shader may serve several ops by its parameters, so `op`, the first
/// word of the op's name, counts too.
pub fn kernel_hash(checks: Checks, op: &str, dispatches: &[Dispatch]) -> String {
    let mut hasher = blake3::Hasher::new();
    let mut part = |text: &str| {
        hasher.update(&(text.len() as u64).to_le_bytes());
        hasher.update(text.as_bytes());
    };
    part(&format!("wgpu {WGPU} {checks:?}"));
    part(op.split_whitespace().next().unwrap_or_default());
    let mut last = None;
    for Dispatch { shader, operands, .. } in dispatches {
        let access: String = operands.iter().map(access).collect();
        // The same kernel several times in a row, once per input, is one.
        if last.replace((shader, access.clone())) != Some((shader, access.clone())) {
            part(&access);
            part(shader.entry);
            part(&source::text(shader));
        }
    }
    hasher.finalize().to_hex()[..32].to_string()
}

fn access(operand: &Operand) -> char {
    match operand {
        Operand::Input(_) => 'r',
        Operand::Output(_) => 'w',
    }
}

/// The hash of a variant of a call.
pub fn variant_hash(checks: Checks, call: &Call, variant: &Variant) -> String {
    kernel_hash(checks, &call.op.to_string(), &variant.dispatches)
}

/// A device on which kernels are tried.
pub struct Subject<'a> {
    pub gpu: &'a Gpu,
    pub pipelines: &'a mut Pipelines,
    pub oracle: &'a mut Oracle,
    /// Names of kernels whose results are spoiled, for tests of what happens then.
    pub planted: &'a [String],
}

impl Subject<'_> {
    /// Tries a variant of a call on a few probes that run the same kernel; on the call
    /// itself if there is none.
    ///
    /// # Errors
    /// A device that fails (and not only a shader that does not compile).
    pub fn variant(&mut self, call: &Call, variant: &Variant) -> Result<Finding, DeviceError> {
        let twin = twin(call.op).expect("a call with variants has kernels");
        let hash = variant_hash(self.gpu.checks, call, variant);
        let (mut finding, mut tried) = (Finding::Right { nmse: 0.0 }, 0);
        for problem in probes(call) {
            let small = problem.call();
            let same = (twin.variants)(&small).into_iter().find(|small_variant| {
                small_variant.name == variant.name
                    && variant_hash(self.gpu.checks, &small, small_variant) == hash
            });
            let Some(same) = same else { continue };
            finding = finding.worst(self.problem(&problem, &same)?);
            tried += 1;
            if tried == PROBES || !finding.is_right() {
                break;
            }
        }
        if tried == 0 { self.problem(&Problem::of(call), variant) } else { Ok(finding) }
    }

    fn problem(&mut self, problem: &Problem, variant: &Variant) -> Result<Finding, DeviceError> {
        let start = if problem.accumulate { 0.25 } else { f32::NAN };
        let solved = self.oracle.solve(problem, f64::from(start));
        let given: Vec<_> = solved.inputs.iter().collect();
        let (call, dispatches) = (problem.call(), &variant.dispatches);
        let ran = harness::run_call(self.gpu, self.pipelines, &call, dispatches, &given, start);
        let outputs = match ran {
            Ok(outputs) => outputs,
            Err(error) => return finding_of(error),
        };
        let factor = f64::from(self.factor(&variant.name));
        let errors = outputs.iter().zip(&solved.expected).map(|(got, expected)| {
            let got = got.iter().map(|v| f64::from(*v) * factor);
            Finding::of(harness::nmse(got, expected))
        });
        Ok(errors.fold(Finding::Right { nmse: 0.0 }, Finding::worst))
    }

    fn factor(&self, name: &str) -> f32 {
        if self.planted.iter().any(|planted| planted == name) { PLANTED } else { 1.0 }
    }

    /// Tries the update rule that `update` is of, as a range like `like` runs it; see
    /// [`update_probes`].
    ///
    /// # Errors
    /// As [`Subject::variant`].
    pub fn update(&mut self, update: &Update, like: &UpdateRange) -> Result<Finding, DeviceError> {
        let probe = update_probes::Probe::new(update, like);
        let inputs = [bytemuck::cast_slice(&probe.gradients)];
        let dispatches = [probe.dispatch()];
        match harness::run(self.gpu, self.pipelines, &dispatches, &inputs, &probe.state) {
            Ok(state) => Ok(Finding::of(probe.error(&state, self.factor(probe.name())))),
            Err(error) => finding_of(error),
        }
    }

    /// Tries both stages of the norm of gradients of which some are not finite, as a bucket of
    /// `like` elements runs them.
    ///
    /// # Errors
    /// As [`Subject::variant`].
    pub fn norm(&mut self, like: usize) -> Result<Finding, DeviceError> {
        let probe = update_probes::NormProbe::new(like);
        let inputs = [bytemuck::cast_slice(&probe.gradients)];
        let dispatches = norm::dispatch(probe.gradients.len(), probe.parts(), 1);
        match harness::run(self.gpu, self.pipelines, &dispatches, &inputs, &probe.starts()) {
            Ok(state) => Ok(Finding::of(probe.error(&state[1], self.factor("norm")))),
            Err(error) => finding_of(error),
        }
    }

    /// Tries both stages of the hash, as a bucket of `like` words runs them.
    ///
    /// # Errors
    /// As [`Subject::variant`].
    pub fn hash(&mut self, like: usize) -> Result<Finding, DeviceError> {
        let probe = update_probes::HashProbe::new(like);
        let inputs = [bytemuck::cast_slice(&probe.words)];
        let dispatches = hash::dispatch(0..probe.words.len(), probe.parts());
        let error = u64::from(self.factor("hash") != 1.0);
        match harness::run(self.gpu, self.pipelines, &dispatches, &inputs, &probe.starts()) {
            Ok(state) => Ok(Finding::of(probe.error(&state[1], error))),
            Err(error) => finding_of(error),
        }
    }
}

/// What the failure of a trial says about the kernel: nothing, if the device failed.
fn finding_of(error: TrialError) -> Result<Finding, DeviceError> {
    match error {
        TrialError::Device(DeviceError::Refused { what, why, .. }) => {
            Ok(Finding::Wrong { why: format!("{what} was refused: {why}") })
        }
        TrialError::Device(error) => Err(error),
        error => Ok(Finding::Wrong { why: error.to_string() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::autotune::catalog::{COUNTS, problems, updates as rules};
    use crate::base::rng::Key;
    use crate::graph::Op;
    use crate::kernels::Random;
    use crate::kernels::testing::for_each_gpu;

    #[test]
    fn the_release_of_wgpu_is_the_one_in_use() {
        let lock = include_str!("../../Cargo.lock");
        assert!(lock.contains(&format!("name = \"wgpu\"\nversion = \"{WGPU}\"\n")));
    }

    #[test]
    fn every_variant_of_the_table_has_probes_and_is_right_on_every_adapter() {
        let mut oracle = Oracle::default();
        for_each_gpu(|gpu, pipelines| {
            let oracle = &mut oracle;
            let mut subject = Subject { gpu, pipelines, oracle, planted: &[] };
            let check = |what: &str, finding: Finding| {
                assert!(finding.is_right(), "{what} on {}: {finding:?}", gpu.name);
            };
            for problem in problems() {
                let call = problem.call();
                for variant in (twin(call.op).unwrap().variants)(&call) {
                    let what = format!("{} of {}", variant.name, call.op);
                    check(&what, subject.variant(&call, &variant).unwrap());
                }
            }
            for (rule, range) in rules() {
                check(&format!("{rule:?} {range:?}"), subject.update(&rule, &range).unwrap());
            }
            for count in COUNTS {
                check("norm", subject.norm(count).unwrap());
                check("hash", subject.hash(count).unwrap());
            }
        });
    }

    #[test]
    fn every_variant_of_the_table_is_tried_on_small_calls() {
        let mut without = Vec::new();
        for problem in problems() {
            let call = problem.call();
            let twin = twin(call.op).unwrap();
            for variant in (twin.variants)(&call) {
                let hash = variant_hash(Checks::Trusted, &call, &variant);
                let same = |small: &Problem| {
                    let call = small.call();
                    let variants = (twin.variants)(&call);
                    variants.iter().any(|v| variant_hash(Checks::Trusted, &call, v) == hash)
                };
                if !probes(&call).iter().any(same) {
                    without.push(format!("{} of {} {:?}", variant.name, call.op, call.inputs));
                }
            }
        }
        assert!(without.is_empty(), "no probe runs\n{}", without.join("\n"));
    }

    #[test]
    fn a_planted_error_is_found_in_every_kernel() {
        // The error is planted on this side of the device: one is enough.
        let (mut is_first, mut oracle) = (true, Oracle::default());
        for_each_gpu(|gpu, pipelines| {
            if !std::mem::take(&mut is_first) {
                return;
            }
            for problem in problems() {
                let call = problem.call();
                let variant = (twin(call.op).unwrap().variants)(&call).swap_remove(0);
                let planted = [variant.name.clone()];
                let oracle = &mut oracle;
                let mut subject = Subject { gpu, pipelines, oracle, planted: &planted };
                let finding = subject.variant(&call, &variant).unwrap();
                assert!(!finding.is_right(), "{} of {}", variant.name, call.op);
            }
            let planted = ["sgd", "adamw", "norm", "hash"].map(String::from);
            let oracle = &mut oracle;
            let mut subject = Subject { gpu, pipelines, oracle, planted: &planted };
            for (rule, range) in rules() {
                let finding = subject.update(&rule, &range).unwrap();
                assert!(!finding.is_right(), "{rule:?} {range:?}");
            }
            for count in COUNTS {
                assert!(!subject.norm(count).unwrap().is_right());
                assert!(!subject.hash(count).unwrap().is_right());
            }
        });
    }

    #[test]
    fn layer_norm_of_two_values_is_certified_all_the_same() {
        let random = Random { step_key: Key::new(1), training: true };
        let inputs = vec![vec![9, 2], vec![2], vec![9, 2], vec![9, 2]];
        let problem = Problem::new(Op::LayerNormGrad, inputs, random).unwrap();
        let call = problem.call();
        for_each_gpu(|gpu, pipelines| {
            let oracle = &mut Oracle::default();
            let mut subject = Subject { gpu, pipelines, oracle, planted: &[] };
            let plain = (twin(call.op).unwrap().variants)(&call).swap_remove(0);
            let finding = subject.variant(&call, &plain).unwrap();
            assert!(finding.is_right(), "{finding:?} on {}", gpu.name);
        });
    }

    /// A kernel that leaves the last value out, one that writes behind its output, and one that
    /// is no WGSL.
    #[test]
    fn wrong_kernels_are_refused_with_the_reason() {
        use crate::kernels::Shader;
        let problem = problems().into_iter().find(|p| p.op.to_string() == "relu").unwrap();
        let call = problem.call();
        let plain = (twin(call.op).unwrap().variants)(&call).swap_remove(0);
        let shader = plain.dispatches[0].shader.clone();
        let text = source::text(&shader);
        let finding = |from: &str, to: &str| {
            assert!(text.contains(from), "{from} in {text}");
            let mut wrong = plain.clone();
            let text = text.replace(from, to);
            wrong.dispatches[0].shader = Shader::emitted("wrong", shader.entry, text);
            let mut found = Vec::new();
            for_each_gpu(|gpu, pipelines| {
                let oracle = &mut Oracle::default();
                let mut subject = Subject { gpu, pipelines, oracle, planted: &[] };
                // No probe has this text, so the kernel runs on the call itself.
                match subject.variant(&call, &wrong).unwrap() {
                    Finding::Wrong { why } => found.push(why),
                    right => panic!("{right:?} on {}", gpu.name),
                }
            });
            found
        };
        let all = |found: Vec<String>, part: &str| {
            assert!(found.iter().all(|why| why.contains(part)), "{found:?}");
        };
        all(finding("y[i] = relu_of(x[i])", "y[i] = relu_of(x[i]) + 0.01"), "NMSE");
        all(finding("y[i] = relu_of(x[i])", "y[i + 1u] = relu_of(x[i])"), "out of bounds");
        all(finding("var<immediate>", "var<nothing>"), "refused");
    }
}

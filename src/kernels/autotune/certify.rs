//! Certification: tests that a kernel is right on this device and driver. The kernel runs on
//! probes and is compared with the reference in f64, with sentinels after every output.

use super::probes::{ReferenceCache, probes};
use crate::device::{DeviceError, Gpu, ShaderChecks};
use crate::harness::{self, Deviation, HarnessError, NMSE_MAX};
use crate::{
    BucketProbe, Caps, Dispatch, OpCall, Operand, OwnedCall, Pipelines, Variant, dispatch, source,
    twin,
};
use potluck_core::HostTensor;
use potluck_core::faults::{FaultyKernel, KernelFault};
use potluck_graph::{Op, Precision};

/// Release of wgpu, which translates the shaders: another release may translate them differently.
pub const WGPU: &str = "30.0.1";

/// The most probes on which a kernel runs in a plain grid, among the probes that use its shader.
const PROBES: usize = 4;

/// Factor that a seeded error multiplies results by; see [`Certifier::faulty_kernels`].
const FAULTY_FACTOR: f32 = 1.01;

/// NMSE of results with one element off by a seeded error: below the limit of refusal.
const FAULTY_NMSE: f64 = NMSE_MAX / 2.0;

/// Limits of a deviation within which a kernel agrees with the reference as its arithmetic does.
#[derive(Clone, Copy)]
struct StrictLimits {
    nmse: f64,
    element: f64,
}

/// Strict limits of kernels in f32 arithmetic, and of twins with larger errors by their nature,
/// with the reason.
///
/// The worst NMSE of all kernels on three adapters are 6.3e-14 for products, attention, norms and
/// losses, 1.8e-10 for sums of columns and 1.3e-11 for AdamW. The room above is for drivers whose
/// `exp`, `tanh` and division are off by as much as Vulkan allows. Operands rounded to half
/// precision give 1.6e-7.
const STRICT: StrictLimits = StrictLimits { nmse: 1e-10, element: 1e-3 };
const STRICT_OF: [(&str, StrictLimits, &str); 3] = [
    (
        "sum",
        StrictLimits { nmse: 1e-8, ..STRICT },
        "terms cancel, so that sums are small beside their rounding",
    ),
    (
        "adamw",
        StrictLimits { nmse: 1e-9, ..STRICT },
        "a step is the quotient of two moments, one under a root",
    ),
    (
        "update",
        StrictLimits { nmse: 1e-9, ..STRICT },
        "a step of Adam and RMSprop is such a quotient too",
    ),
];

/// The same in mixed precision, whose reference multiplies rounded operands too. An NVIDIA H100
/// gives up to 1.5e-9 for the loss with the head, and one of 24 kernels an element of 2.6e-3.
const STRICT_OF_MIXED: [(&str, StrictLimits, &str); 2] = [
    (
        "linear_cross_entropy",
        StrictLimits { nmse: 1e-7, element: 1e-2 },
        "the gradient of logits is rounded, and a little error may round it the other way",
    ),
    (
        "attention",
        StrictLimits { nmse: 1e-7, element: 1e-2 },
        "weights and slopes of scores are rounded, each kernel's at another scale",
    ),
];

/// Magnitudes, besides 1, of either operand on which kernels in mixed precision are certified: of
/// subnormals of f16, and near its largest number.
const MAGNITUDES: [(usize, f32); 4] = [(0, 1e-4), (1, 1e-4), (0, 1e4), (1, 1e4)];

/// Factor, besides 1, of the tensor of queries with which attention in mixed precision is
/// certified: scores are sharp, and a running maximum rises again and again. Smaller operands give
/// equal weights, and the slopes of scores vanish in f16 for any operand.
const SHARP: (usize, f32) = (0, 8.0);

/// An operand beyond the range of f16.
const TOO_LARGE: f64 = 7e4;

/// Returns the magnitudes of operands on which the kernels of an op in mixed precision are
/// certified.
fn magnitudes(op: &Op) -> &'static [(usize, f32)] {
    match op {
        Op::Attention(_) | Op::AttentionGrad(_) => &[SHARP],
        op if op.is_bilinear() => &MAGNITUDES,
        _ => &[],
    }
}

fn strict_limits(twin: &str, precision: Precision) -> StrictLimits {
    let own: &[_] = match precision {
        Precision::F32 => &STRICT_OF,
        Precision::Mixed => &STRICT_OF_MIXED,
    };
    match own.iter().find(|(name, ..)| *name == twin) {
        Some((_, limits, _)) => *limits,
        None => STRICT,
    }
}

/// Result of certifying a kernel.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CertificationResult {
    /// The kernel agrees with the reference as f32 arithmetic does.
    Pass(Deviation),
    /// The kernel is off by more than f32 arithmetic explains, but not by much: it runs only where
    /// no other fits.
    Unusual(Deviation),
    /// The kernel must not be used on this driver, for this reason.
    Fail { why: String },
}

impl CertificationResult {
    /// Result of a kernel that has not run yet.
    const UNTRIED: Self = Self::Pass(Deviation { nmse: 0.0, element: 0.0 });

    /// Returns true if the kernel agrees with the reference as f32 arithmetic does.
    #[cfg(test)]
    pub(crate) fn is_certified(&self) -> bool {
        matches!(self, Self::Pass(_))
    }

    pub(crate) fn is_usable(&self) -> bool {
        !matches!(self, Self::Fail { .. })
    }

    fn of(twin: &str, precision: Precision, deviation: Deviation) -> Self {
        let Deviation { nmse, element } = deviation;
        let strict = strict_limits(twin, precision);
        if nmse <= strict.nmse && element <= strict.element {
            Self::Pass(deviation)
        } else if nmse <= NMSE_MAX {
            Self::Unusual(deviation)
        } else {
            Self::Fail { why: format!("its results are wrong, NMSE {nmse:.2e}") }
        }
    }

    /// The worse of two results: a failure, or else the larger deviations.
    fn worst(self, other: Self) -> Self {
        match (self, other) {
            (Self::Fail { why }, _) | (_, Self::Fail { why }) => Self::Fail { why },
            (Self::Pass(a), Self::Pass(b)) => Self::Pass(a.worst(b)),
            (Self::Unusual(a) | Self::Pass(a), Self::Unusual(b) | Self::Pass(b)) => {
                Self::Unusual(a.worst(b))
            }
        }
    }
}

/// Returns the hash of a kernel: BLAKE3 of the WGSL, the entry points, the access to each binding,
/// the checks, the class of its arithmetic and the release of wgpu. One shader may serve several
/// ops by its parameters, so `op`, the first word of the op's name, counts too.
fn kernel_hash(
    checks: ShaderChecks,
    op: &str,
    precision: Precision,
    dispatches: &[Dispatch],
) -> String {
    let mut hasher = blake3::Hasher::new();
    // The class counts: a certificate never covers the kernel in another precision.
    hash_text(&mut hasher, &format!("wgpu {WGPU} {checks:?} {}", precision.name()));
    hash_text(&mut hasher, op.split_whitespace().next().unwrap_or_default());
    let mut known = Vec::new();
    for Dispatch { shader, operands, .. } in dispatches {
        let access: String = operands.iter().map(access).collect();
        // The same kernel several times, once per input or per chunk of rows, is one.
        if !known.contains(&(shader, access.clone())) {
            hash_text(&mut hasher, &access);
            hash_text(&mut hasher, shader.entry);
            hash_text(&mut hasher, &source::text(shader));
            known.push((shader, access));
        }
    }
    hasher.finalize().to_hex()[..32].to_string()
}

/// Adds the length of a text and the text to a hash.
pub(super) fn hash_text(hasher: &mut blake3::Hasher, text: &str) {
    hasher.update(&(text.len() as u64).to_le_bytes());
    hasher.update(text.as_bytes());
}

/// Returns the hash of the kernels of an update rule or another function on buckets, which multiply
/// no matrices.
pub(crate) fn bucket_hash(checks: ShaderChecks, name: &str, dispatches: &[Dispatch]) -> String {
    kernel_hash(checks, name, Precision::F32, dispatches)
}

fn access(operand: &Operand) -> char {
    if operand.is_writable() { 'w' } else { 'r' }
}

/// Hash of a variant of a call. The whole name of an op from outside the crate counts.
pub(crate) fn variant_hash(checks: ShaderChecks, call: &OpCall, variant: &Variant) -> String {
    let op = call.op.to_string();
    let op = if variant.is_foreign() { op.replace(char::is_whitespace, "_") } else { op };
    kernel_hash(checks, &op, call.precision, &variant.dispatches)
}

/// Variant of a probe that runs the kernel of `variant`, which has this hash.
fn same_kernel(
    checks: ShaderChecks,
    caps: &Caps,
    probe: &OwnedCall,
    variant: &Variant,
    hash: &str,
) -> Option<Variant> {
    let small = probe.call();
    twin::variants(&small, caps)
        .into_iter()
        .find(|one| one.name == variant.name && variant_hash(checks, &small, one) == hash)
}

/// Seeded error of the kernels of this name.
pub(crate) fn fault_of(faulty_kernels: &[FaultyKernel], name: &str) -> Option<KernelFault> {
    let faulty = faulty_kernels.iter().find(|kernel| kernel.name == name)?;
    Some(faulty.fault)
}

/// Certifier of the kernels of one device.
pub(crate) struct Certifier<'a> {
    pub gpu: &'a Gpu,
    pub pipelines: &'a mut Pipelines,
    pub(crate) reference_cache: &'a mut ReferenceCache,
    /// Kernels with a seeded error, for tests of certification.
    pub faulty_kernels: &'a [FaultyKernel],
}

impl Certifier<'_> {
    /// Certifies a variant of a call on a few probes that run the same kernel; on one of them also
    /// in a folded grid in parts, like calls that are too large for one row of workgroups or too
    /// long for one submission. Without such a probe, it is certified on the call itself.
    /// Parameters and grid of the call itself must be within the limits.
    ///
    /// # Errors
    /// Returns [`DeviceError`] if the device fails; a shader that does not compile is a result.
    pub fn variant(
        &mut self,
        call: &OpCall,
        variant: &Variant,
    ) -> Result<CertificationResult, DeviceError> {
        let limits = &self.gpu.limits;
        if let Some(why) = variant.dispatches.iter().find_map(|one| one.check(limits).err()) {
            return Ok(CertificationResult::Fail { why });
        }
        let hash = variant_hash(self.gpu.checks, call, variant);
        let caps = Caps::every_on(self.gpu);
        let mut result = CertificationResult::UNTRIED;
        let mut tried = 0;
        let mut is_folded = false;
        for probe in probes(call) {
            let found = same_kernel(self.gpu.checks, &caps, &probe, variant, &hash);
            let Some(same) = found else { continue };
            if tried == 0 && call.precision == Precision::Mixed {
                for scaled in magnitudes(call.op) {
                    let probe = OwnedCall { scaled: Some(*scaled), ..probe.clone() };
                    result = result.worst(self.check(&probe, &same)?);
                }
                if call.op.is_bilinear() {
                    result = result.worst(self.overflow(&probe, &same)?);
                }
            }
            if tried < PROBES {
                result = result.worst(self.check(&probe, &same)?);
                tried += 1;
            }
            if !is_folded
                && result.is_usable()
                && let Some(dispatches) = dispatch::folded(&same.dispatches)
            {
                result = result.worst(self.check(&probe, &Variant { dispatches, ..same })?);
                is_folded = true;
            }
            if (tried == PROBES && is_folded) || !result.is_usable() {
                break;
            }
        }
        if tried == 0 { self.check(&OwnedCall::of(call), variant) } else { Ok(result) }
    }

    fn check(
        &mut self,
        owned_call: &OwnedCall,
        variant: &Variant,
    ) -> Result<CertificationResult, DeviceError> {
        let solved = self.reference_cache.solve(owned_call);
        let fault = fault_of(self.faulty_kernels, &variant.name);
        let rounded: Vec<HostTensor<f64>>;
        let given: Vec<_> = if fault == Some(KernelFault::Half) {
            let bits = match owned_call.precision {
                Precision::F32 => F16_BITS,
                Precision::Mixed => BF16_BITS,
            };
            rounded = solved.inputs.iter().map(|input| in_fewer_bits(input, bits)).collect();
            rounded.iter().collect()
        } else {
            solved.inputs.iter().collect()
        };
        let call = owned_call.call();
        let dispatches = &variant.dispatches;
        let ran = harness::run_call(self.gpu, self.pipelines, &call, dispatches, &given, f32::NAN);
        let outputs = match ran {
            Ok(outputs) => outputs,
            Err(error) => return result_of(error),
        };
        let name = match twin(call.op) {
            Some(twin) => twin.name,
            None => "",
        };
        let mut result = CertificationResult::UNTRIED;
        for (index, (got, expected)) in outputs.iter().zip(&solved.expected).enumerate() {
            let mut got: Vec<f64> = got.iter().map(|value| f64::from(*value)).collect();
            corrupt(&mut got, expected, fault);
            let deviation = Deviation::of(got.iter().copied(), expected);
            let mut of_output = CertificationResult::of(name, call.precision, deviation);
            if let CertificationResult::Fail { why } = &mut of_output {
                *why += &largest_error(&call, index, &got, expected);
            }
            result = result.worst(of_output);
        }
        Ok(result)
    }

    /// Checks that operands beyond f16, too large or NaN, leave no finite result where the
    /// reference has none: a run notices an overflow by this.
    fn overflow(
        &mut self,
        owned_call: &OwnedCall,
        variant: &Variant,
    ) -> Result<CertificationResult, DeviceError> {
        let call = owned_call.call();
        for planted in [TOO_LARGE, f64::NAN] {
            let mut inputs = owned_call.values();
            for input in &mut inputs {
                let HostTensor::Float(values) = input else { continue };
                if let Some(last) = values.last_mut() {
                    *last = planted;
                }
            }
            let expected = owned_call.expected(&inputs);
            let given: Vec<_> = inputs.iter().collect();
            let ran = harness::run_call(
                self.gpu,
                self.pipelines,
                &call,
                &variant.dispatches,
                &given,
                f32::NAN,
            );
            let outputs = match ran {
                Ok(outputs) => outputs,
                Err(error) => return result_of(error),
            };
            for (got, expected) in outputs.iter().flatten().zip(expected.iter().flatten()) {
                if got.is_finite() && !expected.is_finite() {
                    let why = format!("an operand of {planted} gives {got}, not {expected}");
                    return Ok(CertificationResult::Fail { why });
                }
            }
        }
        Ok(CertificationResult::UNTRIED)
    }

    /// Certifies the kernels of a probe on a bucket.
    ///
    /// # Errors
    /// Returns the same errors as [`Certifier::variant`].
    pub fn bucket(&mut self, probe: &BucketProbe) -> Result<CertificationResult, DeviceError> {
        let result = self.bucket_with(probe, &probe.dispatches)?;
        match dispatch::folded(&probe.dispatches) {
            Some(folded) => Ok(result.worst(self.bucket_with(probe, &folded)?)),
            None => Ok(result),
        }
    }

    fn bucket_with(
        &mut self,
        probe: &BucketProbe,
        dispatches: &[Dispatch],
    ) -> Result<CertificationResult, DeviceError> {
        let inputs = [bytemuck::cast_slice(&probe.input)];
        match harness::run(self.gpu, self.pipelines, dispatches, &inputs, &probe.starts) {
            Ok(outputs) => {
                let fault = fault_of(self.faulty_kernels, probe.name);
                let is_scaled = fault == Some(KernelFault::Scaled);
                let factor = if is_scaled { FAULTY_FACTOR } else { 1.0 };
                let deviation = (probe.error)(&outputs, factor);
                Ok(CertificationResult::of(probe.name, Precision::F32, deviation))
            }
            Err(error) => result_of(error),
        }
    }
}

/// Plants the error of a fault in results.
fn corrupt(got: &mut [f64], expected: &[f64], fault: Option<KernelFault>) {
    match fault {
        Some(KernelFault::Scaled) => {
            for x in got {
                *x *= f64::from(FAULTY_FACTOR);
            }
        }
        Some(KernelFault::Element) => {
            let squares: f64 = expected.iter().map(|x| x * x).sum();
            if let Some(first) = got.first_mut() {
                *first += (FAULTY_NMSE * squares).sqrt();
            }
        }
        // These faults are planted in the inputs before, or at full size only.
        Some(KernelFault::Half | KernelFault::Kill | KernelFault::Shift) | None => {}
    }
}

/// Bits of the significand in f16 and in bf16: the precision of a kernel in f32, or in mixed
/// precision, that rounds too much.
const F16_BITS: f64 = 11.0;
const BF16_BITS: f64 = 8.0;

/// Returns a tensor with its floats rounded to this number of bits, without overflow.
fn in_fewer_bits(tensor: &HostTensor<f64>, bits: f64) -> HostTensor<f64> {
    match tensor {
        HostTensor::Float(values) => {
            let mut rounded = Vec::with_capacity(values.len());
            for x in values {
                let unit = (x.abs().log2().floor() - (bits - 1.0)).exp2();
                rounded.push(if *x == 0.0 { 0.0 } else { (x / unit).round_ties_even() * unit });
            }
            HostTensor::Float(rounded)
        }
        integers @ HostTensor::Int(_) => integers.clone(),
    }
}

/// Returns a clause on the last of the elements of an output with the largest error; NaN counts as
/// the largest.
fn largest_error(call: &OpCall, output: usize, got: &[f64], expected: &[f64]) -> String {
    let mut worst = None;
    let mut largest = 0.0;
    for (at, (got, expected)) in got.iter().zip(expected).enumerate() {
        let mut error = (got - expected).abs();
        if error.is_nan() {
            error = f64::INFINITY;
        }
        if error >= largest {
            largest = error;
            worst = Some(at);
        }
    }
    let Some(at) = worst else { return String::new() };
    format!(
        "; element {at} of output {output} {:?} of inputs {:?} is {}, and {} in the reference",
        call.outputs[output], call.inputs, got[at] as f32, expected[at] as f32
    )
}

/// Converts the error of a run to the result for the kernel; a failure of the device is no result,
/// and stays an error.
fn result_of(error: HarnessError) -> Result<CertificationResult, DeviceError> {
    match error {
        HarnessError::Device(DeviceError::Refused { what, why, .. }) => {
            // The text of a parsing error ends with empty lines.
            let why = format!("{what} was refused: {}", why.trim_end());
            Ok(CertificationResult::Fail { why })
        }
        HarnessError::Device(error) => Err(error),
        error => Ok(CertificationResult::Fail { why: error.to_string() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::autotune::catalog::{COUNTS, catalog_calls, names, updates as rules};
    use crate::autotune::plan_calls::{PlanCall, distinct_calls};
    use crate::ops::{hash, norm};
    use crate::testing::for_each_gpu;
    use crate::{DeviceClass, RandomContext};
    use potluck_core::rng::Key;
    use potluck_graph::model::gpt::{GptConfig, gpt};
    use potluck_graph::model::llama::{self, AttentionBias, LlamaConfig};
    use potluck_graph::{
        Op, Plan, PlanOptions, RotaryAngles, RotaryScaling, Unary, differentiate, fuse,
    };
    use std::collections::{BTreeSet, HashSet};

    /// A GPU and a driver that runs on a processor.
    const CLASSES: [Caps; 2] = [
        Caps { class: DeviceClass::Hardware, ..Caps::EVERY },
        Caps { class: DeviceClass::Software, ..Caps::EVERY },
    ];

    /// A kernel that several calls of the catalog run on the same probes is certified once.
    #[test]
    fn every_variant_of_the_table_has_probes_and_is_right_on_every_adapter() {
        let mut reference_cache = ReferenceCache::default();
        for_each_gpu(|gpu, pipelines| {
            let mut certified = HashSet::new();
            let reference_cache = &mut reference_cache;
            let mut certifier = Certifier { gpu, pipelines, reference_cache, faulty_kernels: &[] };
            let check = |what: &str, result: CertificationResult| {
                assert!(result.is_certified(), "{what} on {}: {result:?}", gpu.name);
            };
            for owned_call in catalog_calls() {
                let call = owned_call.call();
                let caps = Caps::of(gpu).with_all_that_run();
                let probes = format!("{:?}", probes(&call));
                for variant in (twin(call.op).unwrap().variants)(&call, &caps) {
                    if certified.insert((variant_hash(gpu.checks, &call, &variant), probes.clone()))
                    {
                        let what = format!("{} of {}", variant.name, call.op);
                        check(&what, certifier.variant(&call, &variant).unwrap());
                    }
                }
            }
            for (rule, range) in rules() {
                let probe = BucketProbe::of_update(&rule, &range);
                check(&format!("{rule:?} {range:?}"), certifier.bucket(&probe).unwrap());
            }
            for count in COUNTS {
                for caps in CLASSES {
                    check("norm", certifier.bucket(&norm::probe(count, &caps)).unwrap());
                }
                check("hash", certifier.bucket(&hash::probe(count)).unwrap());
            }
        });
    }

    #[test]
    fn every_variant_of_the_table_is_tried_on_small_calls() {
        let mut without = Vec::new();
        for owned_call in catalog_calls() {
            let call = owned_call.call();
            let twin = twin(call.op).unwrap();
            for variant in (twin.variants)(&call, &Caps::EVERY) {
                let hash = variant_hash(ShaderChecks::Disabled, &call, &variant);
                let runs = |small: &OwnedCall| {
                    same_kernel(ShaderChecks::Disabled, &Caps::EVERY, small, &variant, &hash)
                        .is_some()
                };
                if !probes(&call).iter().any(runs) {
                    without.push(format!("{} of {} {:?}", variant.name, call.op, call.inputs));
                }
            }
        }
        assert!(without.is_empty(), "no probe runs\n{}", without.join("\n"));
    }

    /// Kernels without a probe would be certified on the call itself, whose reference takes
    /// minutes.
    #[test]
    fn every_kernel_of_large_language_models_is_tried_on_small_calls() {
        let gpt2 = GptConfig {
            vocabulary: 50_257,
            context: 1024,
            positions: 1024,
            layers: 1,
            heads: 12,
            width: 768,
            bias: true,
            dropout: 0.1,
            tie: true,
            activation: Unary::GeluTanh,
        };
        let llama = LlamaConfig {
            vocabulary: 128_256,
            context: 1000,
            layers: 1,
            heads: 32,
            kv_heads: 8,
            head_width: 64,
            width: 2048,
            mlp_width: 8192,
            norm_eps: 1e-5,
            rotary: RotaryAngles { theta: 5e5, scaling: RotaryScaling::None },
            attention_bias: AttentionBias::None,
            qk_norm: true,
            no_rope_every: 0,
            tie: true,
        };
        let graphs = [gpt(&gpt2).unwrap(), llama::llama(&llama).unwrap()];
        let graphs = graphs.map(|graph| fuse(differentiate(graph).unwrap()));
        let mut without = BTreeSet::new();
        for (graph, rows) in graphs.iter().flat_map(|graph| [1, 5, 8].map(|rows| (graph, rows))) {
            let plan = Plan::new(graph.clone(), PlanOptions::new(rows));
            for (caps, binding_bytes) in CLASSES.into_iter().zip([(2 << 30) - 4, 128 << 20]) {
                let caps = Caps { binding_bytes, ..caps };
                for PlanCall { owned_call, call_key, variants, .. } in distinct_calls(&plan, caps) {
                    let call = owned_call.call();
                    let small = probes(&call);
                    for variant in variants {
                        let hash = variant_hash(ShaderChecks::Disabled, &call, &variant);
                        let runs = |small: &OwnedCall| {
                            same_kernel(
                                ShaderChecks::Disabled,
                                &Caps::EVERY,
                                small,
                                &variant,
                                &hash,
                            )
                            .is_some()
                        };
                        if !small.iter().any(runs) {
                            without.insert(format!("{} of {call_key}", variant.name));
                        }
                    }
                }
            }
        }
        let without: Vec<String> = without.into_iter().collect();
        assert!(without.is_empty(), "no probe runs\n{}", without.join("\n"));
    }

    /// Parts are in folded grids, and each kernel has a probe that folds (see the next test). A
    /// kernel that several calls of the catalog run on the same probes is compared once.
    #[test]
    fn every_kernel_has_the_same_bits_in_parts() {
        let (mut reference_cache, mut differ) = (ReferenceCache::default(), Vec::new());
        for_each_gpu(|gpu, pipelines| {
            if gpu.checks == ShaderChecks::Enabled {
                return;
            }
            let caps = Caps::of(gpu).with_all_that_run();
            let mut compared = HashSet::new();
            for owned_call in catalog_calls() {
                let call = owned_call.call();
                let on_probes = format!("{:?}", probes(&call));
                for variant in (twin(call.op).unwrap().variants)(&call, &caps) {
                    let hash = variant_hash(gpu.checks, &call, &variant);
                    if !compared.insert((hash.clone(), on_probes.clone())) {
                        continue;
                    }
                    let folds = |small: OwnedCall| {
                        let same =
                            same_kernel(gpu.checks, &Caps::every_on(gpu), &small, &variant, &hash)?;
                        Some((dispatch::folded(&same.dispatches)?, small, same.dispatches))
                    };
                    let Some((folded, small, whole)) = probes(&call).into_iter().find_map(folds)
                    else {
                        continue;
                    };
                    let solved = reference_cache.solve(&small);
                    let inputs: Vec<_> = solved.inputs.iter().collect();
                    let mut bits = |dispatches: &[Dispatch]| {
                        let (call, start) = (small.call(), 0.25);
                        let run = harness::run_call;
                        let outputs = run(gpu, pipelines, &call, dispatches, &inputs, start);
                        let bits = |out: Vec<f32>| out.into_iter().map(f32::to_bits).collect();
                        outputs.unwrap().into_iter().map(bits).collect::<Vec<Vec<u32>>>()
                    };
                    if bits(&whole) != bits(&folded) {
                        differ.push(format!("{} of {} on {}", variant.name, call.op, gpu.name));
                    }
                }
            }
        });
        assert!(differ.is_empty(), "other bits in parts:\n{}", differ.join("\n"));
    }

    /// A kernel that does not add the first workgroup of its part.
    #[test]
    fn a_kernel_that_cannot_run_in_parts_is_found() {
        use crate::Shader;
        let owned_call = catalog_calls().into_iter().find(|p| p.op.to_string() == "relu").unwrap();
        let probe = probes(&owned_call.call()).pop().unwrap();
        let call = probe.call();
        let plain = (twin(call.op).unwrap().variants)(&call, &Caps::EVERY).swap_remove(0);
        let mut dispatches = dispatch::folded(&plain.dispatches).unwrap();
        let text = source::text(&dispatches[0].shader);
        let wrong = text.replace("p.first_workgroup + ", "");
        assert!(wrong != text, "{text}");
        dispatches[0].shader = Shader::emitted("wrong", plain.dispatches[0].shader.entry, wrong);
        for_each_gpu(|gpu, pipelines| {
            let reference_cache = &mut ReferenceCache::default();
            let mut certifier = Certifier { gpu, pipelines, reference_cache, faulty_kernels: &[] };
            let variant = Variant::new("wrong", dispatches.clone());
            let result = certifier.check(&probe, &variant).unwrap();
            assert!(!result.is_certified(), "{result:?} on {}", gpu.name);
        });
    }

    #[test]
    fn every_kernel_is_certified_in_a_folded_grid() {
        let mut without = Vec::new();
        for owned_call in catalog_calls() {
            let call = owned_call.call();
            let twin = twin(call.op).unwrap();
            for variant in (twin.variants)(&call, &Caps::EVERY) {
                let hash = variant_hash(ShaderChecks::Disabled, &call, &variant);
                let folds = |small: &OwnedCall| {
                    same_kernel(ShaderChecks::Disabled, &Caps::EVERY, small, &variant, &hash)
                        .is_some_and(|same| dispatch::folded(&same.dispatches).is_some())
                };
                if !probes(&call).iter().any(folds) {
                    without.push(format!("{} of {} {:?}", variant.name, call.op, call.inputs));
                }
            }
        }
        assert!(without.is_empty(), "no probe folds\n{}", without.join("\n"));
        let on_ranges = rules().into_iter();
        let mut on_buckets: Vec<BucketProbe> =
            on_ranges.map(|(rule, range)| BucketProbe::of_update(&rule, &range)).collect();
        for (caps, count) in CLASSES.iter().flat_map(|caps| COUNTS.map(|count| (caps, count))) {
            on_buckets.extend([norm::probe(count, caps), hash::probe(count)]);
        }
        for probe in on_buckets {
            assert!(dispatch::folded(&probe.dispatches).is_some(), "{} does not fold", probe.name);
        }
    }

    #[test]
    fn a_planted_error_is_found_in_every_kernel() {
        // The error is seeded on the host, so one device is enough.
        let (mut is_first, mut reference_cache) = (true, ReferenceCache::default());
        for_each_gpu(|gpu, pipelines| {
            if !std::mem::take(&mut is_first) {
                return;
            }
            let faulty = |name| FaultyKernel { name, fault: KernelFault::Scaled };
            let faulty_kernels: &Vec<FaultyKernel> = &names().into_iter().map(faulty).collect();
            let reference_cache = &mut reference_cache;
            let mut certifier = Certifier { gpu, pipelines, reference_cache, faulty_kernels };
            for owned_call in catalog_calls() {
                let call = owned_call.call();
                let variant = (twin(call.op).unwrap().variants)(&call, &Caps::EVERY).swap_remove(0);
                let result = certifier.variant(&call, &variant).unwrap();
                assert!(!result.is_usable(), "{} of {}", variant.name, call.op);
            }
            for (rule, range) in rules() {
                let result = certifier.bucket(&BucketProbe::of_update(&rule, &range)).unwrap();
                assert!(!result.is_usable(), "{rule:?} {range:?}");
            }
            for count in COUNTS {
                let probe = norm::probe(count, &Caps::of(gpu));
                assert!(!certifier.bucket(&probe).unwrap().is_usable());
                assert!(!certifier.bucket(&hash::probe(count)).unwrap().is_usable());
            }
        });
    }

    #[test]
    fn layer_norm_of_two_values_is_certified_all_the_same() {
        let random = RandomContext { step_key: Key::new(1), training: true };
        let inputs = vec![vec![9, 2], vec![2], vec![9, 2], vec![9, 2]];
        let owned_call = OwnedCall::new(Op::LayerNormGrad, inputs, random).unwrap();
        let call = owned_call.call();
        for_each_gpu(|gpu, pipelines| {
            let reference_cache = &mut ReferenceCache::default();
            let mut certifier = Certifier { gpu, pipelines, reference_cache, faulty_kernels: &[] };
            let plain = (twin(call.op).unwrap().variants)(&call, &Caps::EVERY).swap_remove(0);
            let result = certifier.variant(&call, &plain).unwrap();
            assert!(result.is_certified(), "{result:?} on {}", gpu.name);
        });
    }

    /// Kernels with wrong values, with a write past the output, and with text that is no WGSL.
    #[test]
    fn wrong_kernels_are_refused_with_the_reason() {
        use crate::Shader;
        let owned_call = catalog_calls().into_iter().find(|p| p.op.to_string() == "relu").unwrap();
        let call = owned_call.call();
        let plain = (twin(call.op).unwrap().variants)(&call, &Caps::EVERY).swap_remove(0);
        let shader = plain.dispatches[0].shader.clone();
        let text = source::text(&shader);
        let result = |from: &str, to: &str| {
            assert!(text.contains(from), "{from} in {text}");
            let mut wrong = plain.clone();
            let text = text.replace(from, to);
            wrong.dispatches[0].shader = Shader::emitted("wrong", shader.entry, text);
            let mut found = Vec::new();
            for_each_gpu(|gpu, pipelines| {
                let reference_cache = &mut ReferenceCache::default();
                let mut certifier =
                    Certifier { gpu, pipelines, reference_cache, faulty_kernels: &[] };
                // No probe has this text, so the kernel runs on the call itself.
                match certifier.variant(&call, &wrong).unwrap() {
                    CertificationResult::Fail { why } => found.push(why),
                    right => panic!("{right:?} on {}", gpu.name),
                }
            });
            found
        };
        let all = |found: Vec<String>, part: &str| {
            assert!(found.iter().all(|why| why.contains(part)), "{found:?}");
        };
        all(result("y[i] = f(x[i])", "y[i] = f(x[i]) + 0.01"), "NMSE");
        all(result("y[i] = f(x[i])", "y[i + 1u] = f(x[i])"), "out of bounds");
        all(result("var<immediate>", "var<nothing>"), "refused");
    }
}

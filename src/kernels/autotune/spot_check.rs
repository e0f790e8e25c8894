//! Spot checks of kernels at the sizes at which they run. Certification uses small calls, which do
//! not show an error that occurs only with many workgroups or far into a tensor. Here the call of a
//! plan runs as it is, and some parts of its outputs are compared with the reference in f64, which
//! computes no more than these parts.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Mutex, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

use super::plan_calls::PlanCall;
use super::timing::{VariantTimer, patterns};
use crate::device::DeviceError;
use crate::device::host::cores;
use crate::harness::{ADDED_TO, Deviation, NMSE_MAX};
use crate::twin::IndependentAxis;
use crate::{OpCall, OwnedCall, Pipelines, Variant, twin};
use potluck_core::faults::KernelFault;
use potluck_core::rng::Key;
use potluck_core::{HostTensor, Site};

/// The least elements to compare, and the least parts along an axis, unless they cost the reference
/// too much.
const ELEMENTS: usize = 1000;
const PARTS: usize = 4;

/// FLOPs of the reference above which fewer parts are compared: a second on one thread.
const FLOPS: f64 = 1e9;

/// The most FLOPs of the reference of the fewest parts: ten seconds, as a sample of the gradient of
/// attention in GPT-2 takes.
const FLOPS_MAX: f64 = 8e9;

/// The most elements of all tensors of the reference: 2 GB of f64, as they are held twice, and
/// rounded operands a third time.
const REFERENCE_ELEMENTS_MAX: usize = 1 << 27;

/// Elements above which a reference is computed concurrently with small ones only.
const LARGE_ELEMENTS: usize = 1 << 24;

/// The most references that are computed concurrently.
pub(crate) const THREADS_MAX: usize = 8;

/// Time between two signs of life while references are computed.
const HEARTBEAT: Duration = Duration::from_secs(1);

/// Largest error of an element that is no defect. Rounding grows with the size of a call; the
/// exactness of a kernel is certified on small calls.
const ELEMENT_MAX: f64 = 1e-2;

/// Returns true if a kernel with this deviation is right at full size.
pub(crate) fn is_right(deviation: Deviation) -> bool {
    deviation.nmse <= NMSE_MAX && deviation.element <= ELEMENT_MAX
}

/// The most elements in one read from a device, and the largest gap between two ranges that are
/// read as one.
const READ_MAX: usize = 1 << 22;
const GAP_MAX: usize = 1024;

/// Parts of a call that are compared: some of the parts along each of its independent axes.
pub(crate) struct SpotCheck {
    /// Axes, each with the parts in ascending order.
    axes: Vec<(IndependentAxis, Vec<usize>)>,
    /// The call with only these parts.
    small: OwnedCall,
}

impl SpotCheck {
    /// Chooses the parts of a call; `None` if its reference takes too long or too much memory even
    /// for the fewest.
    pub fn of(call: &OpCall) -> Option<Self> {
        let twin = twin(call.op)?;
        let axes = (twin.independent_axes)(call);
        // Outputs that are sums over the parts are compared only as a whole.
        if axes.iter().any(|axis| axis.outputs.contains(&None)) {
            let whole = Self::with(call, Vec::new());
            if whole.costs_at_most(FLOPS) {
                return Some(whole);
            }
        }
        let mut per_axis = (ELEMENTS as f64).powf(1.0 / axes.len().max(1) as f64).ceil() as usize;
        loop {
            let mut chosen = Vec::with_capacity(axes.len());
            for (nth, axis) in axes.iter().enumerate() {
                let parts = chosen_parts(axis.parts, per_axis, Site(nth as u32));
                chosen.push((axis.clone(), parts));
            }
            let check = Self::with(call, chosen);
            if per_axis == 1 || axes.is_empty() {
                return if check.costs_at_most(FLOPS_MAX) { Some(check) } else { None };
            }
            let small = check.small.call();
            let compared: usize = check.outputs().map(|output| small.output_len(output)).sum();
            let is_few = per_axis <= PARTS || compared < 2 * ELEMENTS;
            if is_few && check.costs_at_most(FLOPS) {
                return Some(check);
            }
            per_axis = per_axis.div_ceil(2);
        }
    }

    /// Returns true if the reference of the parts takes no more FLOPs than these, and little
    /// memory.
    fn costs_at_most(&self, flops: f64) -> bool {
        self.flops() <= flops && self.elements() <= REFERENCE_ELEMENTS_MAX
    }

    fn flops(&self) -> f64 {
        let small = self.small.call();
        match twin(small.op) {
            Some(twin) => (twin.cost)(&small).flops,
            None => 0.0,
        }
    }

    /// Elements of all tensors of the reference.
    fn elements(&self) -> usize {
        let tensors = self.small.inputs.iter().chain(&self.small.outputs);
        tensors.map(|dims| dims.iter().product::<usize>()).sum()
    }

    /// Check of these parts of a call.
    fn with(call: &OpCall, axes: Vec<(IndependentAxis, Vec<usize>)>) -> Self {
        let mut small = OwnedCall::of(call);
        for (axis, parts) in &axes {
            let sides = [(&mut small.inputs, &axis.inputs), (&mut small.outputs, &axis.outputs)];
            for (tensors, of_tensors) in sides {
                for (dims, of_tensor) in tensors.iter_mut().zip(of_tensors) {
                    if let Some(at) = *of_tensor {
                        dims[at] = dims[at] / axis.parts * parts.len();
                    }
                }
            }
        }
        Self { axes, small }
    }

    /// Outputs that are compared: the ones that have all axes.
    fn outputs(&self) -> impl Iterator<Item = usize> {
        (0..self.small.outputs.len())
            .filter(|output| self.axes.iter().all(|(axis, _)| axis.outputs[*output].is_some()))
    }

    /// Returns true if an input has all axes.
    fn is_divided(&self, input: usize) -> bool {
        self.axes.iter().all(|(axis, _)| axis.inputs[input].is_some())
    }

    /// Returns the ranges of elements of a tensor of the call that are in the parts, in the order
    /// of the small tensor; `axis_of` returns its axis for an independent axis.
    fn ranges(
        &self,
        dims: &[usize],
        axis_of: impl Fn(&IndependentAxis) -> Option<usize>,
    ) -> Vec<Range<usize>> {
        // Indices in the parts along each dimension; `None`: all.
        let mut chosen: Vec<Option<Vec<usize>>> = vec![None; dims.len()];
        for (axis, parts) in &self.axes {
            if let Some(at) = axis_of(axis) {
                let length = dims[at] / axis.parts;
                let mut indices = Vec::with_capacity(parts.len() * length);
                for part in parts {
                    indices.extend(part * length..(part + 1) * length);
                }
                chosen[at] = Some(indices);
            }
        }
        let mut block: usize = dims.iter().product();
        let whole = 0..block;
        let mut ranges = vec![whole];
        for (dim, chosen) in dims.iter().zip(chosen) {
            block /= dim.max(&1);
            let Some(chosen) = chosen else { continue };
            let mut within = Vec::new();
            for range in ranges {
                // A range has whole entries of this dimension.
                for first in range.step_by(block * dim) {
                    for index in &chosen {
                        let start = first + index * block;
                        match within.last_mut() {
                            Some(Range { end, .. }) if *end == start => *end += block,
                            _ => within.push(start..start + block),
                        }
                    }
                }
            }
            ranges = within;
        }
        ranges
    }

    /// Computes the parts by the reference. Inputs that are outputs of the forward op are computed
    /// by it, as a gradient needs them, if all of these inputs have all axes of the check.
    pub fn expected(self, owned_call: &OwnedCall) -> ExpectedParts {
        let call = owned_call.call();
        let mut inputs = self.inputs(&call, &patterns(owned_call));
        let mut filled = Vec::new();
        if let Some(twin) = twin(call.op)
            && let Some(forward) = (twin.forward)(call.op)
            && forward.outputs.iter().all(|(_, input)| self.is_divided(*input))
        {
            for index in self.small.fill_in_forward(&mut inputs) {
                let HostTensor::Float(values) = &mut inputs[index] else { continue };
                let on_device: Vec<f32> = values.iter().map(|value| *value as f32).collect();
                // The rounding of a logarithm of a sum near 100 would count as an error of the
                // kernel.
                *values = on_device.iter().map(|value| f64::from(*value)).collect();
                filled.push((index, on_device));
            }
        }
        let mut outputs = self.small.expected(&inputs);
        let compared = Vec::from_iter(self.outputs());
        for (output, values) in outputs.iter_mut().enumerate() {
            if !compared.contains(&output) {
                *values = Vec::new();
            }
        }
        ExpectedParts { check: self, filled, outputs }
    }

    /// Parts of the inputs, which repeat these values.
    fn inputs(&self, call: &OpCall, patterns: &[HostTensor<f64>]) -> Vec<HostTensor<f64>> {
        let mut inputs = Vec::with_capacity(patterns.len());
        for (index, pattern) in patterns.iter().enumerate() {
            let ranges = self.ranges(&call.inputs[index], |axis| axis.inputs[index]);
            inputs.push(match pattern {
                HostTensor::Float(values) => HostTensor::Float(repeated(values, &ranges)),
                HostTensor::Int(values) => HostTensor::Int(repeated(values, &ranges)),
            });
        }
        inputs
    }
}

/// Elements in ranges of a tensor that repeats a pattern.
fn repeated<T: Copy>(pattern: &[T], ranges: &[Range<usize>]) -> Vec<T> {
    let mut elements = Vec::new();
    for range in ranges {
        elements.extend(range.clone().map(|at| pattern[at % pattern.len()]));
    }
    elements
}

/// Values of the parts of a call by the reference.
pub(crate) struct ExpectedParts {
    check: SpotCheck,
    /// Inputs that are outputs of the forward op, by index.
    filled: Vec<(usize, Vec<f32>)>,
    /// Outputs; empty if an output is not compared.
    outputs: Vec<Vec<f64>>,
}

impl ExpectedParts {
    /// Runs a variant of the call, and returns the deviation of the parts of its outputs.
    ///
    /// # Errors
    /// Returns [`DeviceError`] if there is too little memory, or if the device fails.
    pub fn run(
        &self,
        timer: &mut VariantTimer,
        pipelines: &mut Pipelines,
        owned_call: &OwnedCall,
        variant: &Variant,
        fault: Option<KernelFault>,
    ) -> Result<Deviation, DeviceError> {
        let call = owned_call.call();
        timer.begin(owned_call)?;
        for (index, values) in &self.filled {
            let ranges = self.check.ranges(&call.inputs[*index], |axis| axis.inputs[*index]);
            timer.write(*index, &ranges, values);
        }
        let mut starts = Vec::with_capacity(call.outputs.len());
        for output in 0..call.outputs.len() {
            let is_added_to = call.accumulate.has(output);
            starts.push(if is_added_to { ADDED_TO as f32 } else { f32::NAN });
        }
        timer.run(pipelines, variant, &starts)?;
        let mut worst = Deviation::default();
        for output in self.check.outputs() {
            let ranges = self.check.ranges(&call.outputs[output], |axis| axis.outputs[output]);
            let mut got = read(timer, output, &ranges)?;
            if fault == Some(KernelFault::Shift) {
                let row = self.check.small.outputs[output].last().copied().unwrap_or(1);
                let distance = if row < got.len() { row } else { 1 };
                got.rotate_left(distance);
            }
            let got = got.iter().map(|value| f64::from(*value));
            worst = Deviation::of(got, &self.outputs[output]).worst(worst);
        }
        Ok(worst)
    }
}

/// Expected values of calls, by the key of the call.
pub(crate) type Expectations = HashMap<String, ExpectedParts>;

/// Computes the references of checks on several threads, the longest first; calls `alive` at
/// least every second meanwhile.
pub(crate) fn expectations(
    mut checks: Vec<(&PlanCall, SpotCheck)>,
    mut alive: impl FnMut(),
) -> Expectations {
    checks.sort_by(|(_, one), (_, other)| one.flops().total_cmp(&other.flops()));
    let threads = cores().min(THREADS_MAX).min(checks.len());
    let waiting = Mutex::new(checks);
    let large = Mutex::new(());
    let (sender, receiver) = mpsc::channel();
    let mut all = Expectations::new();
    thread::scope(|scope| {
        for _ in 0..threads {
            let sender = sender.clone();
            scope.spawn(|| solve(&waiting, &large, sender));
        }
        drop(sender);
        loop {
            match receiver.recv_timeout(HEARTBEAT) {
                Ok((call_key, expected)) => {
                    all.insert(call_key, expected);
                    alive();
                }
                Err(mpsc::RecvTimeoutError::Timeout) => alive(),
                Err(mpsc::RecvTimeoutError::Disconnected) => break,
            }
        }
    });
    all
}

/// Computes references until none is waiting; holds `large` during a large one. A panic leaves the
/// content of the mutexes valid, so poisoning is ignored.
fn solve(
    waiting: &Mutex<Vec<(&PlanCall, SpotCheck)>>,
    large: &Mutex<()>,
    sender: mpsc::Sender<(String, ExpectedParts)>,
) {
    loop {
        let next = waiting.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let Some((planned, check)) = next else { return };
        let mut alone = None;
        if check.elements() > LARGE_ELEMENTS {
            alone = Some(large.lock().unwrap_or_else(PoisonError::into_inner));
        }
        let expected = check.expected(&planned.owned_call);
        drop(alone);
        if sender.send((planned.call_key.clone(), expected)).is_err() {
            return;
        }
    }
}

/// Returns `count` of the parts, or all if there are fewer, in ascending order: the last, the first
/// if there are two, and others at random.
fn chosen_parts(parts: usize, count: usize, site: Site) -> Vec<usize> {
    if parts <= count {
        return (0..parts).collect();
    }
    let key = Key::new(parts as u64).site(site);
    let mut chosen = std::collections::BTreeSet::from([parts - 1]);
    if count > 1 {
        chosen.insert(0);
    }
    let mut draw = 0;
    while chosen.len() < count {
        chosen.insert(key.words([draw, 0])[0] as usize % parts);
        draw += 1;
    }
    chosen.into_iter().collect()
}

/// Reads ascending ranges of an output, neighbours in one piece.
fn read(
    timer: &VariantTimer,
    output: usize,
    ranges: &[Range<usize>],
) -> Result<Vec<f32>, DeviceError> {
    let mut limited: Vec<Range<usize>> = Vec::new();
    for range in ranges {
        for start in range.clone().step_by(READ_MAX) {
            limited.push(start..range.end.min(start + READ_MAX));
        }
    }
    let mut values = Vec::new();
    let mut rest = &limited[..];
    while !rest.is_empty() {
        let mut pieces: Vec<Range<usize>> = Vec::new();
        let mut count = 0;
        let mut taken = 0;
        for range in rest {
            let near = pieces.last_mut().filter(|piece| range.start - piece.end <= GAP_MAX);
            let added = match &near {
                Some(piece) => range.end - piece.end,
                None => range.len(),
            };
            if taken > 0 && count + added > READ_MAX {
                break;
            }
            match near {
                Some(piece) => piece.end = range.end,
                None => pieces.push(range.clone()),
            }
            count += added;
            taken += 1;
        }
        let read = timer.read(output, &pieces)?;
        let mut offset = 0;
        let mut wanted = rest[..taken].iter().peekable();
        for piece in pieces {
            while let Some(range) = wanted.next_if(|range| range.end <= piece.end) {
                values.extend(&read[offset + range.start - piece.start..][..range.len()]);
            }
            offset += piece.len();
        }
        rest = &rest[taken..];
    }
    Ok(values)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::autotune::catalog::catalog_calls;
    use crate::autotune::probes::probes;
    use crate::autotune::timing::default_variant;
    use crate::testing::for_each_gpu;
    use crate::{Caps, twin};

    /// Ops whose calls have no independent parts.
    const WHOLE: [&str; 3] = ["cache_update", "group_norm_affine_grad", "conv2d_weight_grad"];

    #[test]
    fn the_reference_of_some_parts_is_these_parts_of_the_reference() {
        for large in catalog_calls() {
            let Some(owned_call) = probes(&large.call()).into_iter().next() else { continue };
            let call = owned_call.call();
            let axes = (twin(call.op).unwrap().independent_axes)(&call);
            let name = call.op.to_string();
            let is_whole = WHOLE.iter().any(|op| name.starts_with(op));
            assert!(!axes.is_empty() || is_whole, "{name} has no independent axis");
            let some = |axis: &IndependentAxis| chosen_parts(axis.parts, 2, Site(7));
            let axes: Vec<_> = axes.into_iter().map(|axis| (axis.clone(), some(&axis))).collect();
            let check = SpotCheck::with(&call, axes);
            let values = owned_call.values();
            let whole = owned_call.expected(&values);
            let parts = check.small.expected(&check.inputs(&call, &values));
            assert!(check.outputs().next().is_some(), "{name} compares nothing");
            for output in check.outputs() {
                let ranges = check.ranges(&call.outputs[output], |axis| axis.outputs[output]);
                let expected: Vec<f64> =
                    ranges.into_iter().flatten().map(|at| whole[output][at]).collect();
                let deviation = Deviation::of(parts[output].iter().copied(), &expected);
                assert_eq!(parts[output].len(), expected.len(), "{name} {:?}", call.inputs);
                assert!(deviation.nmse < 1e-24, "output {output} of {name}: {deviation}");
            }
        }
    }

    #[test]
    fn large_calls_are_cheap_to_check() {
        let calls = catalog_calls();
        let product = calls.iter().find(|one| one.op.to_string() == "matmul a b^T").unwrap();
        let mut large = product.clone();
        large.inputs = vec![vec![8192, 768], vec![50_257, 768]];
        large.outputs = vec![vec![8192, 50_257]];
        let check = SpotCheck::of(&large.call()).unwrap();
        assert_eq!(check.small.outputs, [[32, 32]]);
        let last: Vec<usize> = check.axes.iter().map(|(_, parts)| parts[31]).collect();
        assert_eq!(last, [8191, 50_256]);
        // Too much for the reference even in the smallest parts.
        large.inputs = vec![vec![2, 1 << 28], vec![2, 1 << 28]];
        large.outputs = vec![vec![2, 2]];
        assert!(SpotCheck::of(&large.call()).is_none());
    }

    /// A gradient would overflow if its logarithm of a sum were not computed from its logits.
    #[test]
    fn gradients_get_what_their_forward_op_outputs() {
        let calls = catalog_calls();
        let is_gradient =
            |one: &&OwnedCall| one.op.to_string().starts_with("linear_cross_entropy_grad");
        let mut large = calls.iter().find(is_gradient).unwrap().clone();
        let (rows, width, classes) = (70, 1024, large.inputs[1][0]);
        large.inputs = vec![vec![rows, width], vec![classes, width], vec![rows], vec![rows]];
        large = OwnedCall::new(large.op, large.inputs, large.random).unwrap();
        let call = large.call();
        let expected = SpotCheck::of(&call).unwrap().expected(&large);
        for_each_gpu(|gpu, pipelines| {
            let mut timer = VariantTimer::new(gpu).unwrap();
            let variants = (twin(call.op).unwrap().variants)(&call, &Caps::of(gpu));
            let variant = &variants[default_variant(&call, &variants, &Caps::of(gpu))];
            let found = expected.run(&mut timer, pipelines, &large, variant, None).unwrap();
            assert!(is_right(found), "{} on {}: {found}", call.op, gpu.name);
        });
    }

    #[test]
    fn kernels_pass_and_shifted_rows_do_not() {
        let names = ["matmul a b^T", "attention_grad", "embedding_grad", "layer_norm_affine_grad"];
        let calls = catalog_calls();
        for_each_gpu(|gpu, pipelines| {
            let mut timer = VariantTimer::new(gpu).unwrap();
            for name in names {
                let is_named = |one: &&OwnedCall| one.op.to_string().starts_with(name);
                let owned_call = calls.iter().find(is_named).unwrap();
                let call = owned_call.call();
                let variants = (twin(call.op).unwrap().variants)(&call, &Caps::of(gpu));
                let variant = &variants[default_variant(&call, &variants, &Caps::of(gpu))];
                let expected = SpotCheck::of(&call).unwrap().expected(owned_call);
                let mut with = |fault| {
                    expected.run(&mut timer, pipelines, owned_call, variant, fault).unwrap()
                };
                let right = with(None);
                assert!(is_right(right), "{name} on {}: {right}", gpu.name);
                let shifted = with(Some(KernelFault::Shift));
                assert!(!is_right(shifted), "{name} on {}: {shifted}", gpu.name);
            }
        });
    }
}

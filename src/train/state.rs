//! State of checkpoints: reads parameters, moments and averages by name from devices, and writes
//! them.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::error::TrainError;
use crate::checkpoint::{Checkpoint, CheckpointError, NamedTensor};
use crate::runtime::workers::WorkerGroup;
use potluck_core::{BucketId, Position, Rank};
use potluck_graph::{Parameter, ParameterKind, Plan};
use potluck_kernels::device::DeviceError;
use potluck_kernels::exec::{BucketTensor, Executor, bucket_words};
use potluck_kernels::ops::hash;

/// Reads a whole bucket, and verifies it by the hash that the device computes in its own memory.
///
/// # Errors
/// Returns `DeviceError` if the device fails, or if the values do not match the hash.
fn read_bucket(
    device: &mut dyn Executor,
    bucket_tensor: BucketTensor,
    bucket: BucketId,
) -> Result<Vec<f32>, DeviceError> {
    let values = device.read_bucket(bucket_tensor, bucket)?;
    let words = bucket_words(device.plan(), bucket_tensor, &values);
    if words.map(|words| hash::fast(&words, 0)) == Some(device.hash(bucket_tensor, bucket)?) {
        return Ok(values);
    }
    let what = match bucket_tensor {
        BucketTensor::Parameters => format!("bucket {} of the parameters", bucket.0),
        BucketTensor::Gradients => format!("bucket {} of the gradients", bucket.0),
        BucketTensor::Moment(moment) => format!("bucket {} of moment {moment}", bucket.0),
        BucketTensor::Average => format!("bucket {} of the averages of the parameters", bucket.0),
    };
    Err(DeviceError::ReadBack { adapter: device.name().to_string(), what })
}

/// Reads the parameters of a worker group, in the model's order: each bucket from its first rank,
/// since all have the same values. `plan` is any rank's. After the failure of a step these are the
/// parameters before the step, from the remaining devices.
///
/// # Errors
/// Returns `TrainError` if a device fails, if values do not match the hash of their device, if no
/// remaining device has the parameters before the failed step, or if slices of a tensor are
/// missing.
pub fn parameters(group: &WorkerGroup, plan: &Plan) -> Result<Vec<NamedTensor>, TrainError> {
    let readable = group.readable()?;
    let mut slices = Vec::new();
    for bucket in (0..plan.buckets.len() as u32).map(BucketId) {
        let holders = group.groups().of(bucket);
        let rank = match holders.iter().find(|(_, rank)| readable.contains(rank)) {
            Some((_, rank)) => rank,
            // The error of the first rank explains why no holder remains.
            None => holders.rank(Position(0)),
        };
        let values = group.read_on(rank, "reading the parameters", move |device| {
            read_bucket(device, BucketTensor::Parameters, bucket)
        })?;
        slices.extend(copied(plan, bucket, &values));
    }
    Ok(joined(slices)?)
}

/// Returns true if the optimizer updates a bucket, which then has moments.
fn is_trained(plan: &Plan, bucket: BucketId) -> bool {
    plan.buckets[bucket.index()].kind == ParameterKind::Trained
}

struct CopiedSlice<'a> {
    parameter: &'a Parameter,
    values: Vec<f32>,
}

fn copied<'a>(plan: &'a Plan, bucket: BucketId, values: &[f32]) -> Vec<CopiedSlice<'a>> {
    let mut slices = Vec::new();
    for &(id, start) in &plan.buckets[bucket.index()].parameters {
        let parameter = &plan.graph.parameters[id.index()];
        let values = values[start..start + parameter.slice.elements()].to_vec();
        slices.push(CopiedSlice { parameter, values });
    }
    slices
}

/// Joins slices into tensors, in the model's order.
///
/// # Errors
/// Returns `CheckpointError` if slices of a tensor are missing.
fn joined(slices: Vec<CopiedSlice<'_>>) -> Result<Vec<NamedTensor>, CheckpointError> {
    // By number: the tensor, and the number of its elements so far.
    let mut tensors: BTreeMap<u32, (NamedTensor, usize)> = BTreeMap::new();
    for CopiedSlice { parameter: Parameter { whole, slice, .. }, values } in slices {
        let shape = slice.whole_dims().to_vec();
        if slice.is_whole() {
            let count = values.len();
            let tensor = NamedTensor { name: whole.name.clone(), shape, values };
            tensors.insert(whole.number, (tensor, count));
            continue;
        }
        let (tensor, count) = tensors.entry(whole.number).or_insert_with(|| {
            let values = vec![0.0; shape.iter().product()];
            (NamedTensor { name: whole.name.clone(), shape, values }, 0)
        });
        slice.put(&values, &mut tensor.values);
        *count += values.len();
    }
    let complete = |(tensor, count): (NamedTensor, usize)| {
        if count == tensor.values.len() {
            return Ok(tensor);
        }
        let why = "the slices that were read are not all of it, once";
        Err(CheckpointError::Unsavable { name: tensor.name, why })
    };
    tensors.into_values().map(complete).collect()
}

/// Tensors of a worker group by name, between two steps.
#[derive(Clone, Copy, Debug, Default)]
pub struct StateTensors<'a> {
    pub parameters: &'a [NamedTensor],
    /// Moments of parameter `NAME`, as `NAME.0`, `NAME.1`; empty: zeros.
    pub moments: &'a [NamedTensor],
    /// Averages of parameters, except for those equal to the parameters.
    pub averages: &'a [NamedTensor],
    /// False before the first update, which starts the averages.
    pub is_updated: bool,
}

impl<'a> StateTensors<'a> {
    /// Returns the tensors of a checkpoint.
    pub fn of(checkpoint: &'a Checkpoint) -> Self {
        let Checkpoint { meta, parameters, moments, averages, .. } = checkpoint;
        Self { parameters, moments, averages, is_updated: meta.optimizer_step > 0 }
    }
}

/// Reads the averages of the parameters of a worker group with averages, by name, from the ranks
/// that own their parts. `plan` is any rank's.
///
/// # Errors
/// Returns `TrainError` if a device fails, if values do not match the hash of their device, or if
/// slices of a tensor are missing.
pub fn averages(group: &WorkerGroup, plan: &Plan) -> Result<Vec<NamedTensor>, TrainError> {
    owned_tensors(group, plan, BucketTensor::Average)
}

/// Reads the moments of a worker group, by name, from the ranks that own them, in sequence by
/// bucket, so that the host needs little more memory than the result takes. `plan` is any rank's.
///
/// # Errors
/// Returns the errors of [`averages`].
pub fn moments(
    group: &WorkerGroup,
    plan: &Plan,
    count: usize,
) -> Result<Vec<NamedTensor>, TrainError> {
    let mut all = Vec::new();
    for moment in 0..count {
        all.push(owned_tensors(group, plan, BucketTensor::Moment(moment))?);
    }
    Ok(join_moments(all))
}

/// Reads the sums of the gradients of a step by name, in the model's order, from the ranks that own
/// their parts. Covers the parameters that the optimizer updates. `plan` is any rank's.
///
/// # Errors
/// Returns `TrainError` if a device fails, or if values do not match the hash of their device.
pub fn gradient_sums(group: &WorkerGroup, plan: &Plan) -> Result<Vec<NamedTensor>, TrainError> {
    owned_tensors(group, plan, BucketTensor::Gradients)
}

/// Reads a bucket tensor from the ranks that own its parts, for the parameters that the optimizer
/// updates, in the model's order.
fn owned_tensors(
    group: &WorkerGroup,
    plan: &Plan,
    bucket_tensor: BucketTensor,
) -> Result<Vec<NamedTensor>, TrainError> {
    let mut slices = Vec::new();
    for bucket in (0..plan.buckets.len() as u32).map(BucketId) {
        if is_trained(plan, bucket) {
            let values = owned_parts(group, plan, bucket_tensor, bucket)?;
            slices.extend(copied(plan, bucket, &values));
        }
    }
    Ok(joined(slices)?)
}

fn owned_parts(
    group: &WorkerGroup,
    plan: &Plan,
    bucket_tensor: BucketTensor,
    bucket: BucketId,
) -> Result<Vec<f32>, TrainError> {
    let parts = group.run_on_all("reading what each device owns", move |_, device| {
        let owned = device.owned(bucket);
        if owned.is_empty() {
            return Ok((owned, Vec::new()));
        }
        let mut values = read_bucket(device, bucket_tensor, bucket)?;
        if bucket_tensor == BucketTensor::Gradients {
            // The device holds the whole bucket.
            values = values[owned.clone()].to_vec();
        }
        Ok((owned, values))
    })?;
    let mut whole = vec![0.0; plan.buckets[bucket.index()].length];
    for (range, values) in parts {
        whole[range].copy_from_slice(&values);
    }
    Ok(whole)
}

/// Returns true if a device with this plan has values of a bucket in a bucket tensor.
fn has_bucket(plan: &Plan, bucket_tensor: BucketTensor, bucket: BucketId) -> bool {
    let is_owned = matches!(bucket_tensor, BucketTensor::Moment(_) | BucketTensor::Average);
    plan.holds(bucket) && (!is_owned || is_trained(plan, bucket))
}

/// Tensors of a state to write to a bucket tensor of the devices.
#[derive(Clone, Copy, PartialEq)]
enum Written {
    Parameters,
    /// Averages of the trained parameters, or the parameters if there are no averages.
    Evaluated,
    Moment(usize),
    Averages,
}

impl Written {
    fn bucket_tensor(self) -> BucketTensor {
        match self {
            Self::Parameters | Self::Evaluated => BucketTensor::Parameters,
            Self::Moment(index) => BucketTensor::Moment(index),
            Self::Averages => BucketTensor::Average,
        }
    }

    fn is_for(self, plan: &Plan, bucket: BucketId) -> bool {
        let is_of_all = self != Self::Evaluated;
        has_bucket(plan, self.bucket_tensor(), bucket) && (is_of_all || is_trained(plan, bucket))
    }
}

impl StateTensors<'_> {
    /// Average of a parameter, if it has one.
    ///
    /// # Errors
    /// Returns `CheckpointError::Shape` if the average has another shape.
    fn average_of(
        &self,
        name: &str,
        shape: &[usize],
    ) -> Result<Option<&NamedTensor>, CheckpointError> {
        if self.averages.iter().all(|average| average.name != name) {
            return Ok(None);
        }
        NamedTensor::find(self.averages, name, shape).map(Some)
    }

    /// Values of a bucket: zeros for missing moments, and for averages before the first update;
    /// after it, the parameters replace missing averages.
    ///
    /// # Errors
    /// Returns `CheckpointError` if a tensor is missing or has another shape.
    fn values(
        &self,
        plan: &Plan,
        bucket: BucketId,
        written: Written,
    ) -> Result<Vec<f32>, CheckpointError> {
        let bucket = &plan.buckets[bucket.index()];
        let mut values = vec![0.0; bucket.length];
        let are_zeros = match written {
            Written::Moment(_) => self.moments.is_empty(),
            Written::Averages => !self.is_updated,
            Written::Parameters | Written::Evaluated => false,
        };
        if are_zeros {
            return Ok(values);
        }
        for &(id, start) in &bucket.parameters {
            let Parameter { whole, slice, .. } = &plan.graph.parameters[id.index()];
            let wanted = slice.whole_dims();
            let mut average = None;
            if matches!(written, Written::Averages | Written::Evaluated) {
                average = self.average_of(&whole.name, wanted)?;
            }
            let tensor = match (written, average) {
                (_, Some(average)) => average,
                (Written::Moment(index), _) => {
                    let name = name_of_moment(&whole.name, index);
                    NamedTensor::find(self.moments, &name, wanted)?
                }
                _ => NamedTensor::find(self.parameters, &whole.name, wanted)?,
            };
            let own = &mut values[start..start + slice.elements()];
            if slice.is_whole() {
                own.copy_from_slice(&tensor.values);
            } else {
                own.copy_from_slice(&slice.cut(&tensor.values));
            }
        }
        Ok(values)
    }
}

fn name_of_moment(parameter: &str, index: usize) -> String {
    format!("{parameter}.{index}")
}

/// Joins the moments of all parameters into one list with the names `NAME.0`, `NAME.1`.
fn join_moments(moments: Vec<Vec<NamedTensor>>) -> Vec<NamedTensor> {
    let mut joined = Vec::new();
    for (index, list) in moments.into_iter().enumerate() {
        for mut tensor in list {
            tensor.name = name_of_moment(&tensor.name, index);
            joined.push(tensor);
        }
    }
    joined
}

/// Number of moments to restore from a checkpoint: 0 if it has none because of its optimizer. The
/// moments of the run's optimizer are then zeros, as in a new run.
fn restored(moments: &[NamedTensor], kept: usize) -> usize {
    if moments.is_empty() { 0 } else { kept }
}

/// Checks that a checkpoint's tensors fit a plan whose optimizer has `kept` moments.
///
/// # Errors
/// Returns `CheckpointError` if a tensor is missing or has another shape, and
/// [`CheckpointError::NoMoments`] for a parameter that was frozen before and is trained now.
pub fn check(plan: &Plan, state: StateTensors<'_>, kept: usize) -> Result<(), CheckpointError> {
    let StateTensors { parameters, moments, .. } = state;
    for Parameter { whole, slice, kind, .. } in &plan.graph.parameters {
        let wanted = slice.whole_dims();
        NamedTensor::find(parameters, &whole.name, wanted)?;
        state.average_of(&whole.name, wanted)?;
        let kept = if *kind == ParameterKind::Trained { kept } else { 0 };
        let names: Vec<String> =
            (0..restored(moments, kept)).map(|index| name_of_moment(&whole.name, index)).collect();
        let is_missing = |name: &String| moments.iter().all(|tensor| tensor.name != *name);
        if !names.is_empty() && names.iter().all(is_missing) {
            return Err(CheckpointError::NoMoments { name: whole.name.clone() });
        }
        for name in names {
            NamedTensor::find(moments, &name, wanted)?;
        }
    }
    Ok(())
}

/// Writes a checkpoint's tensors to the devices of all ranks, with the plans `plans`: bucket by
/// bucket, each to all devices simultaneously, so that the host copies only one bucket regardless
/// of the number of devices. Missing moments are zeros. Missing averages start as the parameters,
/// or with the first update if there was none.
///
/// # Errors
/// Returns `TrainError` if a tensor is missing or has another shape, before anything is written, or
/// if a device fails.
pub fn restore(
    group: &WorkerGroup,
    plans: &[Arc<Plan>],
    state: StateTensors<'_>,
    kept: usize,
) -> Result<(), TrainError> {
    for plan in plans {
        check(plan, state, kept)?;
    }
    write(group, plans, state, Written::Parameters)?;
    for moment in 0..kept {
        write(group, plans, state, Written::Moment(moment))?;
    }
    if plans[0].options.averages {
        write(group, plans, state, Written::Averages)?;
    }
    Ok(())
}

/// Writes all parameters by name to the devices of all ranks, like [`restore`].
///
/// # Errors
/// Returns `TrainError` if a tensor is missing or has another shape, or if a device fails.
pub fn write_parameters(
    group: &WorkerGroup,
    plans: &[Arc<Plan>],
    parameters: &[NamedTensor],
) -> Result<(), TrainError> {
    let state = StateTensors { parameters, ..StateTensors::default() };
    write(group, plans, state, Written::Parameters)
}

/// Writes the averages of a state's trained parameters, or the parameters without averages, to the
/// devices of all ranks.
///
/// # Errors
/// Returns the errors of [`write_parameters`].
pub(crate) fn write_evaluated(
    group: &WorkerGroup,
    plans: &[Arc<Plan>],
    state: StateTensors<'_>,
) -> Result<(), TrainError> {
    write(group, plans, state, Written::Evaluated)
}

fn write(
    group: &WorkerGroup,
    plans: &[Arc<Plan>],
    state: StateTensors<'_>,
    written: Written,
) -> Result<(), TrainError> {
    let bucket_tensor = written.bucket_tensor();
    for bucket in (0..plans[0].buckets.len() as u32).map(BucketId) {
        // The ranks of a tensor group have different slices; ranks at the same place have equal
        // ones.
        let mut places: BTreeMap<Option<u32>, Vec<Rank>> = BTreeMap::new();
        for (rank, plan) in plans.iter().enumerate() {
            if written.is_for(plan, bucket) {
                places.entry(plan.graph.tensor_rank).or_default().push(Rank(rank as u32));
            }
        }
        for holders in places.into_values() {
            let values = Arc::new(state.values(&plans[holders[0].index()], bucket, written)?);
            group.run_on_all("restoring the state", move |rank, device| {
                if !holders.contains(&rank) {
                    return Ok(());
                }
                let held = match bucket_tensor {
                    BucketTensor::Moment(_) | BucketTensor::Average => device.owned(bucket),
                    BucketTensor::Parameters | BucketTensor::Gradients => 0..values.len(),
                };
                device.write_bucket(bucket_tensor, bucket, &values[held])
            })?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use super::*;
    use potluck_core::faults::InjectedFault;
    use potluck_core::{HostTensorView, TensorId};
    use potluck_graph::model::{MlpConfig, MlpLoss, mlp};
    use potluck_graph::{
        Builder, Init, MomentFormat, PlanOptions, Region, Unary, Update, UpdateRange,
        differentiate, shard,
    };
    use potluck_kernels::device::Heartbeat;
    use potluck_kernels::exec::{
        Cpu, KernelProfile, LossSums, PassContext, ProfileTarget, Readback, StepSums,
    };

    type Done = Result<(), DeviceError>;

    /// CPU device whose readback of a bucket flips a bit of the word `flips`.
    struct Flipping {
        cpu: Cpu<f32>,
        flips: Option<(BucketTensor, BucketId, usize)>,
        bit: u32,
    }

    impl Executor for Flipping {
        fn name(&self) -> &str {
            "a broken device"
        }
        fn plan(&self) -> &Plan {
            self.cpu.plan()
        }
        fn heartbeat(&self) -> Heartbeat {
            self.cpu.heartbeat()
        }
        fn inject_fault(&mut self, fault: InjectedFault) -> Result<(), DeviceError> {
            self.cpu.inject_fault(fault)
        }
        fn profile(
            &mut self,
            work: &ProfileTarget,
            pass: &PassContext,
        ) -> Result<Option<KernelProfile>, DeviceError> {
            self.cpu.profile(work, pass)
        }
        fn set_input(
            &mut self,
            id: TensorId,
            micro_batch: usize,
            from: HostTensorView,
        ) -> Result<(), DeviceError> {
            self.cpu.set_input(id, micro_batch, from)
        }
        fn begin_step(&mut self) -> Result<(), DeviceError> {
            self.cpu.begin_step()
        }
        fn run(&mut self, nodes: Range<usize>, pass: &PassContext) -> Result<(), DeviceError> {
            self.cpu.run(nodes, pass)
        }
        fn finish_step(&mut self, norms: &[BucketId]) -> Result<StepSums, DeviceError> {
            self.cpu.finish_step(norms)
        }
        fn loss(&mut self) -> Result<LossSums, DeviceError> {
            self.cpu.loss()
        }
        fn update(
            &mut self,
            bucket: BucketId,
            update: &Update,
            range: &UpdateRange,
        ) -> Result<(), DeviceError> {
            self.cpu.update(bucket, update, range)
        }
        fn average(&mut self, bucket: BucketId, elements: Range<usize>, weight: f32) -> Done {
            self.cpu.average(bucket, elements, weight)
        }
        fn read_parts(
            &mut self,
            tensor: TensorId,
            parts: &[Range<usize>],
            pass: &PassContext,
        ) -> Result<Vec<f32>, DeviceError> {
            self.cpu.read_parts(tensor, parts, pass)
        }
        fn read_bucket(
            &mut self,
            bucket_tensor: BucketTensor,
            bucket: BucketId,
        ) -> Result<Vec<f32>, DeviceError> {
            let mut values = self.cpu.read_bucket(bucket_tensor, bucket)?;
            if let Some((_, _, at)) =
                self.flips.filter(|flips| (flips.0, flips.1) == (bucket_tensor, bucket))
            {
                values[at] = f32::from_bits(values[at].to_bits() ^ (1 << self.bit));
            }
            Ok(values)
        }
        fn hash(
            &mut self,
            bucket_tensor: BucketTensor,
            bucket: BucketId,
        ) -> Result<u64, DeviceError> {
            self.cpu.hash(bucket_tensor, bucket)
        }
        fn write_bucket(
            &mut self,
            bucket_tensor: BucketTensor,
            bucket: BucketId,
            values: &[f32],
        ) -> Result<(), DeviceError> {
            self.cpu.write_bucket(bucket_tensor, bucket, values)
        }
        fn set_moments(
            &mut self,
            moments: potluck_kernels::exec::Moments,
        ) -> Result<(), DeviceError> {
            self.cpu.set_moments(moments)
        }
        fn owned(&self, bucket: BucketId) -> Range<usize> {
            self.cpu.owned(bucket)
        }
        fn start_readback(&mut self, place: Region) -> Done {
            self.cpu.start_readback(place)
        }
        fn next_readback(&mut self, wait: bool) -> Result<Option<Readback>, DeviceError> {
            self.cpu.next_readback(wait)
        }
        fn has_readbacks(&self) -> bool {
            self.cpu.has_readbacks()
        }
        fn readback_elements_max(&self) -> usize {
            self.cpu.readback_elements_max()
        }
        fn write_place(&mut self, place: &Region, from: &[f32]) -> Done {
            self.cpu.write_place(place, from)
        }
        fn add(&mut self, id: BucketId, start: usize, partial: &mut [f32]) -> Done {
            self.cpu.add(id, start, partial)
        }
        fn on_queue_done(&mut self, then: Box<dyn FnOnce() + Send>) -> Done {
            self.cpu.on_queue_done(then)
        }
    }

    #[test]
    fn a_bit_that_flips_on_the_way_back_is_an_error_that_names_the_bucket() {
        let mut b = Builder::new();
        b.parameter("w", &[20, 3], Init::Normal { std: 1.0 });
        let plan = Plan::new(b.finish(), PlanOptions::new(1));
        let mut device = Flipping { cpu: Cpu::fast(plan, 2), flips: None, bit: 0 };
        device.initialize(5).unwrap();
        let read =
            |device: &mut Flipping, bucket_tensor| read_bucket(device, bucket_tensor, BucketId(0));
        let sound = read(&mut device, BucketTensor::Parameters).unwrap();
        for at in [0, 31, 59] {
            device.flips = Some((BucketTensor::Parameters, BucketId(0), at));
            let error = read(&mut device, BucketTensor::Parameters).unwrap_err().to_string();
            assert!(error.contains("a broken device: what was read back"), "{error}");
            assert!(error.contains("bucket 0 of the parameters"), "{error}");
            assert!(read(&mut device, BucketTensor::Moment(1)).is_ok(), "another bucket tensor");
        }
        device.flips = Some((BucketTensor::Moment(1), BucketId(0), 7));
        let error = read(&mut device, BucketTensor::Moment(1)).unwrap_err().to_string();
        assert!(error.contains("bucket 0 of moment 1"), "{error}");
        let again = read(&mut device, BucketTensor::Parameters).unwrap();
        assert_eq!(again, sound);
    }

    /// Also a bit that bf16 does not have, which the hash of the device's words does not cover.
    #[test]
    fn a_bit_that_flips_in_a_moment_of_bf16_is_an_error() {
        for bit in [0, 15, 16, 31] {
            let mut b = Builder::new();
            b.parameter("w", &[20, 3], Init::Normal { std: 1.0 });
            let options = PlanOptions { moments: MomentFormat::Bf16, ..PlanOptions::new(1) };
            let plan = Plan::new(b.finish(), options);
            let length = plan.buckets[0].length;
            let mut device = Flipping { cpu: Cpu::fast(plan, 1), flips: None, bit };
            let bucket_tensor = BucketTensor::Moment(0);
            device.write_bucket(bucket_tensor, BucketId(0), &vec![1.5; length]).unwrap();
            let mut read = || read_bucket(&mut device, bucket_tensor, BucketId(0));
            assert_eq!(read().unwrap(), vec![1.5; length]);
            device.flips = Some((bucket_tensor, BucketId(0), 7));
            let error =
                read_bucket(&mut device, bucket_tensor, BucketId(0)).unwrap_err().to_string();
            assert!(error.contains("bucket 0 of moment 0"), "{bit}: {error}");
        }
    }

    fn tensor(name: &str, shape: &[usize]) -> NamedTensor {
        let values = vec![0.0; shape.iter().product()];
        NamedTensor { name: name.into(), shape: shape.into(), values }
    }

    #[test]
    fn what_does_not_fit_is_named_and_no_moments_start_as_zeros() {
        let mut b = Builder::new();
        b.parameter("w", &[2, 3], Init::Zeros);
        let plan = Plan::new(b.finish(), PlanOptions::new(1));
        let check = |parameters: &[NamedTensor], moments: &[NamedTensor]| {
            let state = StateTensors { parameters, moments, ..StateTensors::default() };
            check(&plan, state, 2).map_err(|error| error.to_string())
        };
        let w = [tensor("w", &[2, 3])];
        let moments = [tensor("w.0", &[2, 3]), tensor("w.1", &[2, 3])];
        assert_eq!(check(&w, &moments), Ok(()));
        assert_eq!(check(&w, &[]), Ok(()));
        assert!(check(&w, &moments[..1]).unwrap_err().contains("'w.1'"));
        assert!(check(&[tensor("w", &[3, 2])], &moments).unwrap_err().contains("[3, 2]"));
        assert!(check(&[], &moments).unwrap_err().contains("'w'"));
    }

    /// Slices of tensors that a device with a plan has.
    fn slices_of<'a>(plan: &'a Plan, tensors: &[NamedTensor]) -> Vec<CopiedSlice<'a>> {
        let mut slices = Vec::new();
        for bucket in (0..plan.buckets.len() as u32).map(BucketId) {
            if has_bucket(plan, BucketTensor::Parameters, bucket) {
                let state = StateTensors { parameters: tensors, ..StateTensors::default() };
                let values = state.values(plan, bucket, Written::Parameters).unwrap();
                slices.extend(copied(plan, bucket, &values));
            }
        }
        slices
    }

    /// The ranks of a tensor group read their slices from whole tensors, and their slices are
    /// joined into whole tensors again.
    #[test]
    fn slices_of_ranks_are_saved_as_whole_tensors_and_read_from_them() {
        let config = MlpConfig {
            widths: vec![3, 97, 5],
            activation: Unary::Relu,
            dropout: 0.0,
            loss: MlpLoss::CrossEntropy,
        };
        let graph = mlp(&config).unwrap();
        let tensor = |parameter: &Parameter| {
            let shape = parameter.slice.whole_dims().to_vec();
            let start = 1000.0 * parameter.whole.number as f32;
            let values = (0..shape.iter().product()).map(|i| start + i as f32).collect();
            NamedTensor { name: parameter.whole.name.clone(), shape, values }
        };
        let tensors: Vec<NamedTensor> = graph.parameters.iter().map(tensor).collect();
        let plan = |rank| {
            let part = shard(&graph, &[2.0, 1.0], rank).unwrap().graph;
            Plan::new(differentiate(part).unwrap(), PlanOptions::new(1))
        };
        let plans: Vec<Plan> = (0..2).map(plan).collect();
        let slices = plans.iter().flat_map(|plan| slices_of(plan, &tensors)).collect::<Vec<_>>();
        for plan in &plans {
            let parameters = &tensors;
            check(plan, StateTensors { parameters, ..StateTensors::default() }, 0).unwrap();
        }
        // The biases after the second layer are on both.
        assert_eq!(slices.len(), 2 * 3 + 2);
        assert_eq!(joined(slices).unwrap(), tensors);
        // Missing values of the second rank are not replaced by zeros.
        let error = joined(slices_of(&plans[0], &tensors)).unwrap_err().to_string();
        let expected = "'layers.0.weight' cannot be saved: the slices that were read are not all";
        assert!(error.contains(expected), "{error}");
        let state = StateTensors { parameters: &tensors[1..], ..StateTensors::default() };
        let missing = check(&plans[1], state, 0).unwrap_err().to_string();
        assert!(missing.contains("no tensor 'layers.0.weight'"), "{missing}");
    }
}

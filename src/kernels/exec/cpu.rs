//! Executor on the CPU. With the fast functions it is a device for training; with the references,
//! in f32 or f64, it is the oracle of the tests.

mod readbacks;

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use super::cpu::readbacks::ReadbackQueue;
use super::loss_count::LossCounter;
use super::shards::Shards;
use super::staging::host_staging_bytes;
use super::{
    AllocatedBytes, BucketTensor, Executor, KernelProfile, LossSums, Moments, PassContext,
    ProfileTarget, READBACK_ELEMENTS_MAX, Readback, StepSums, check_parts, check_rounding, copies,
    slot_of,
};
use crate::device::{DeviceError, Heartbeat, host, inject_on_host};
use crate::ops::{hash, host_bytes, norm};
use crate::simd::instruction_set;
use crate::{
    CpuKernel, Float, RandomContext, Twin, UpdateKernel, UpdateTwin, bf16_moments, bf16_words,
    twin, update_twin,
};
use potluck_core::faults::InjectedFault;
use potluck_core::format::counted;
use potluck_core::rng::Key;
use potluck_core::{BucketId, DType, HostTensorView, TensorId};
use potluck_graph::{
    DeviceState, MomentFormat, Plan, Region, Role, SlotKind, TensorLocation, Update, UpdateRange,
};

/// Returns the identity of a CPU device, which determines the bits of its results: they depend on
/// the instruction set, not on threads or caches.
pub fn cpu_identity() -> String {
    format!("cpu ({})", instruction_set())
}

/// Returns the name of a CPU device with this number of threads, which determines its speed but not
/// its results.
pub fn cpu_name(threads: usize) -> String {
    format!("cpu ({})", counted(threads, "thread", "threads"))
}

/// Returns the bytes that the CPU device takes for a plan besides the tensors of
/// [`potluck_graph::print::MemoryUsage`]: integer inputs, which it keeps apart, and the loss.
pub fn host_extra_bytes(plan: &Plan) -> usize {
    let mut words = 2usize;
    for index in 0..plan.graph.tensors.len() as u32 {
        let [copies, elements] = int_elements(plan, TensorId(index));
        words = words.saturating_add(copies.saturating_mul(elements));
    }
    words.saturating_mul(DType::U32.bytes())
}

/// Returns the most bytes that the CPU device takes at once for a plan within one call, and for the
/// slot that holds the memory of logits while none are computed.
pub fn workspace_bytes(plan: &Plan) -> usize {
    let random = RandomContext { step_key: Key::new(0), training: true };
    let rows = plan.options.rows;
    let pass = PassContext { micro_batch: 0, rows, loss_scale: 1.0, random };
    let mut most = 0;
    for node in plan.graph.nodes.iter().filter(|node| plan.holds_block(node.block)) {
        let has_logits = plan.graph.logits_bytes(node, rows).is_some();
        let slot = if has_logits { 0 } else { plan.logits_slot_bytes() };
        most = most.max(slot.saturating_add(host_bytes(&pass.call(&plan.graph, node))));
    }
    most
}

/// Returns the number of copies of an integer input, 0 if it has no place, and the elements of
/// each; zeros for other tensors.
fn int_elements(plan: &Plan, tensor: TensorId) -> [usize; 2] {
    let found = plan.graph.tensor(tensor);
    match (found.role, found.dtype) {
        (Role::Input, DType::U32) => {
            [copies(plan, tensor), found.shape.elements(plan.options.rows)]
        }
        _ => [0, 0],
    }
}

/// Implementations that a [`Cpu`] calls.
struct Functions<T> {
    host: fn(&'static Twin) -> CpuKernel<T>,
    update: fn(&'static UpdateTwin) -> UpdateKernel<T>,
    norm: fn(&[T]) -> (f64, u64),
}

/// Executor of a plan with all its tensors in host memory, computed in `T`.
pub struct Cpu<T> {
    name: String,
    /// Threads of its own pool; `None`: it computes in the caller's pool.
    threads: Option<usize>,
    /// Shared, so that a node can be borrowed while the tensors change.
    plan: Arc<Plan>,
    functions: Functions<T>,
    /// Per slot: the copies of its values.
    slots: Vec<Vec<Vec<T>>>,
    /// Integer inputs, per tensor and copy.
    ints: Vec<Vec<Vec<u32>>>,
    /// Per state of the graph: its values; empty if no node of the plan uses it.
    states: Vec<Vec<T>>,
    parameters: Vec<Vec<T>>,
    gradients: Vec<Vec<T>>,
    /// Per moment and bucket: values of the owned elements; empty if they are in bf16.
    moments: Vec<Vec<Vec<T>>>,
    /// Per bucket and moment: words of the owned elements, if they are in bf16.
    packed_moments: Vec<Vec<Vec<u32>>>,
    /// Per bucket: averages of the owned elements; empty unless the plan keeps them.
    averages: Vec<Vec<T>>,
    shards: Shards,
    readbacks: ReadbackQueue,
    readback_elements_max: usize,
    loss: Vec<T>,
    loss_counter: LossCounter,
    /// Ticks after every node.
    heartbeat: Heartbeat,
}

impl Cpu<f32> {
    /// Returns the CPU device for training, with vector instructions, on the caller's threads; see
    /// [`Cpu::with_threads`].
    pub fn fast(plan: Plan, moments: impl Into<Moments>) -> Self {
        let functions = Functions {
            host: |twin: &'static Twin| twin.fast,
            update: |twin: &'static UpdateTwin| twin.fast,
            norm: norm::fast,
        };
        Self::new(cpu_name(host::threads()), plan, moments, functions)
    }

    /// Returns an executor that runs the reference functions, plain loops, in f32.
    pub fn reference(plan: Plan, moments: impl Into<Moments>) -> Self {
        let functions = Functions {
            host: |twin: &'static Twin| twin.reference_f32,
            update: |twin: &'static UpdateTwin| twin.reference_f32,
            norm: norm::reference,
        };
        Self::new("reference".into(), plan, moments, functions)
    }
}

impl Cpu<f64> {
    /// Returns an executor that runs the reference functions in f64: the oracle with which all
    /// other executors are compared.
    pub fn oracle(plan: Plan, moments: impl Into<Moments>) -> Self {
        let functions = Functions {
            host: |twin: &'static Twin| twin.reference_f64,
            update: |twin: &'static UpdateTwin| twin.reference_f64,
            norm: |values| {
                let finite = values.iter().filter(|v| v.is_finite());
                let bad = values.iter().filter(|v| !v.is_finite()).count();
                (finite.map(|v| v * v).sum(), bad as u64)
            },
        };
        Self::new("oracle".into(), plan, moments, functions)
    }
}

impl<T: Float> Cpu<T> {
    fn new(name: String, plan: Plan, moments: impl Into<Moments>, functions: Functions<T>) -> Self {
        let mut slots = Vec::with_capacity(plan.slots.len());
        for slot in &plan.slots {
            slots.push(vec![vec![T::zero(); slot.bytes / DType::F32.bytes()]; slot.copies]);
        }
        let mut ints = Vec::with_capacity(plan.graph.tensors.len());
        for index in 0..plan.graph.tensors.len() as u32 {
            let [copies, elements] = int_elements(&plan, TensorId(index));
            ints.push(vec![vec![0; elements]; copies]);
        }
        let moments: Moments = moments.into();
        let shards = Shards::new(&plan, &moments);
        let mut device = Self {
            name,
            threads: None,
            functions,
            slots,
            ints,
            states: plan.graph.states.iter().map(|state| initial(&plan, state)).collect(),
            parameters: zeros(&shards, BucketTensor::Parameters),
            gradients: if plan.graph.is_trained() {
                zeros(&shards, BucketTensor::Gradients)
            } else {
                Vec::new()
            },
            moments: Vec::new(),
            packed_moments: Vec::new(),
            averages: Vec::new(),
            shards,
            readbacks: ReadbackQueue::new(host_staging_bytes(&plan)),
            readback_elements_max: READBACK_ELEMENTS_MAX,
            loss: vec![T::zero(); plan.graph.loss_length()],
            loss_counter: LossCounter::new(&plan),
            heartbeat: Heartbeat::default(),
            plan: Arc::new(plan),
        };
        device.allocate_moments(moments.count);
        device
    }

    /// Replaces the moments and averages by zeros of the owned elements of every bucket.
    fn allocate_moments(&mut self, count: usize) {
        // The old ones are freed before the new ones are allocated.
        self.moments.clear();
        self.packed_moments.clear();
        self.averages.clear();
        if self.plan.options.averages {
            self.averages = zeros(&self.shards, BucketTensor::Average);
        }
        match self.plan.options.moments {
            MomentFormat::F32 => {
                for moment in 0..count {
                    self.moments.push(zeros(&self.shards, BucketTensor::Moment(moment)));
                }
            }
            MomentFormat::Bf16 => {
                for length in self.shards.lengths(BucketTensor::Moment(0)) {
                    let words = MomentFormat::Bf16.words(length);
                    self.packed_moments.push(vec![vec![0; words]; count]);
                }
            }
        }
    }

    /// Words of a bucket of a bucket tensor, if it is in bf16.
    fn packed(&mut self, bucket_tensor: BucketTensor, bucket: BucketId) -> Option<&mut Vec<u32>> {
        match (self.plan.options.moments, bucket_tensor) {
            (MomentFormat::Bf16, BucketTensor::Moment(moment)) => {
                Some(&mut self.packed_moments[bucket.index()][moment])
            }
            _ => None,
        }
    }

    fn arg(&self, tensor: TensorId, pass: &PassContext) -> HostTensorView<'_, T> {
        let count = self.plan.graph.tensor(tensor).shape.elements(pass.rows);
        let root = self.plan.graph.root(tensor);
        if self.plan.graph.tensor(root).dtype == DType::U32 {
            let copies = &self.ints[root.index()];
            return HostTensorView::Int(&copies[pass.micro_batch % copies.len()][..count]);
        }
        match self.plan.place(tensor) {
            TensorLocation::Slot(slot) => {
                let copies = &self.slots[slot.index()];
                HostTensorView::Float(&copies[pass.micro_batch % copies.len()][..count])
            }
            TensorLocation::Parameter { bucket, start } => {
                HostTensorView::Float(&self.parameters[bucket.index()][start..start + count])
            }
            TensorLocation::Gradient { bucket, start } => {
                HostTensorView::Float(&self.gradients[bucket.index()][start..start + count])
            }
            TensorLocation::State(state) => {
                HostTensorView::Float(&self.states[state.index()][..count])
            }
            TensorLocation::Loss => HostTensorView::Float(&self.loss),
            TensorLocation::Unallocated => HostTensorView::Float(&[]),
        }
    }

    /// Buffer that holds an output, and the tensor's first element in it.
    fn home(&mut self, tensor: TensorId, pass: &PassContext) -> (&mut Vec<T>, usize) {
        match self.plan.place(tensor) {
            TensorLocation::Slot(slot) => {
                (copy_of(&mut self.slots[slot.index()], pass.micro_batch), 0)
            }
            TensorLocation::Gradient { bucket, start } => {
                (&mut self.gradients[bucket.index()], start)
            }
            TensorLocation::State(state) => (&mut self.states[state.index()], 0),
            TensorLocation::Loss => (&mut self.loss, 0),
            other => panic!("no node writes to {other:?}"),
        }
    }

    fn run_node(&mut self, index: usize, pass: &PassContext) {
        let plan = Arc::clone(&self.plan);
        let node = &plan.graph.nodes[index];
        let Some(twin) = twin(&node.op) else { return };
        let call = pass.call(&plan.graph, node);
        // Buffers of outputs are taken out of the executor while inputs are borrowed from it; the
        // plan never puts an output in the buffer of an input. Gradients of a node may be in one
        // bucket.
        let mut taken: Vec<TakenHome<T>> = Vec::with_capacity(node.outputs.len());
        for (index, &output) in node.outputs.iter().enumerate() {
            let known = taken.iter().position(|home| is_same_bucket(&plan, home.tensor, output));
            let (home, start) = self.home(output, pass);
            let range = start..start + call.output_len(index);
            match known {
                Some(known) => taken[known].parts.push((index, range)),
                None => {
                    let values = std::mem::take(home);
                    taken.push(TakenHome { tensor: output, values, parts: vec![(index, range)] });
                }
            }
        }
        let needs_logits = plan.graph.logits_bytes(node, pass.rows).is_some();
        if needs_logits {
            self.take_logits_slot();
        }
        let args: Vec<HostTensorView<T>> =
            node.inputs.iter().map(|id| self.arg(*id, pass)).collect();
        let mut parts: Vec<(usize, &mut [T])> =
            taken.iter_mut().flat_map(TakenHome::split).collect();
        parts.sort_unstable_by_key(|(index, _)| *index);
        let mut outputs: Vec<&mut [T]> = parts.into_iter().map(|(_, part)| part).collect();
        (self.functions.host)(twin)(&call, &args, &mut outputs);
        for home in taken {
            *self.home(home.tensor, pass).0 = home.values;
        }
        if needs_logits {
            self.allocate_logits_slot();
        }
    }

    /// Frees the slot whose memory is used for logits while a node computes them.
    fn take_logits_slot(&mut self) {
        for (slot, copies) in self.plan.slots.iter().zip(&mut self.slots) {
            if slot.kind == SlotKind::Logits {
                copies.fill(Vec::new());
            }
        }
    }

    fn allocate_logits_slot(&mut self) {
        for (slot, copies) in self.plan.slots.iter().zip(&mut self.slots) {
            if slot.kind == SlotKind::Logits {
                copies.fill(vec![T::zero(); slot.bytes / DType::F32.bytes()]);
            }
        }
    }

    fn bucket_tensor(&mut self, bucket_tensor: BucketTensor, bucket: BucketId) -> &mut Vec<T> {
        check_parts(&self.plan, bucket_tensor);
        match bucket_tensor {
            BucketTensor::Parameters => &mut self.parameters[bucket.index()],
            BucketTensor::Gradients => &mut self.gradients[bucket.index()],
            BucketTensor::Moment(moment) => &mut self.moments[moment][bucket.index()],
            BucketTensor::Average => &mut self.averages[bucket.index()],
        }
    }

    fn values(&mut self, place: &Region) -> &mut [T] {
        match place {
            Region::Bucket { bucket_tensor, bucket, range } => {
                let at = self.shards.place(*bucket_tensor, *bucket, range);
                &mut self.bucket_tensor(*bucket_tensor, *bucket)[at]
            }
            Region::Tensor { tensor, micro_batch, range } => {
                let slot = slot_of(&self.plan, *tensor, range);
                &mut copy_of(&mut self.slots[slot.index()], *micro_batch)[range.clone()]
            }
        }
    }

    /// Returns a whole bucket in the precision of the device.
    pub fn bucket_values(&mut self, bucket_tensor: BucketTensor, bucket: BucketId) -> &[T] {
        self.bucket_tensor(bucket_tensor, bucket)
    }

    /// Returns the device with a pool of this number of threads; see [`Executor::thread_pool`].
    pub fn with_threads(self, threads: usize) -> Self {
        Self { threads: Some(threads), ..self }
    }

    /// Returns the device with another display name.
    pub fn named(self, name: &str) -> Self {
        Self { name: name.into(), ..self }
    }

    /// Sets [`Executor::readback_elements_max`].
    pub fn set_readback_elements_max(&mut self, elements: usize) {
        self.readback_elements_max = elements;
    }

    /// Changes one element of a bucket, for finite differences.
    pub fn set_element(
        &mut self,
        bucket_tensor: BucketTensor,
        bucket: BucketId,
        index: usize,
        value: T,
    ) {
        self.bucket_tensor(bucket_tensor, bucket)[index] = value;
    }
}

/// Returns zeros for the elements of every bucket that a bucket tensor holds.
fn zeros<T: Float>(shards: &Shards, bucket_tensor: BucketTensor) -> Vec<Vec<T>> {
    shards.lengths(bucket_tensor).map(|length| vec![T::zero(); length]).collect()
}

/// Initial values of a state; none if no node of the plan uses it.
fn initial<T: Float>(plan: &Plan, state: &DeviceState) -> Vec<T> {
    if !plan.is_placed(state.tensor) {
        return Vec::new();
    }
    let values = state.init.values(plan.graph.tensor(state.tensor).shape.dims());
    values.into_iter().map(T::from_f64).collect()
}

/// Buffer of one or more outputs of a node, taken out of the executor.
struct TakenHome<T> {
    /// The first output in the buffer.
    tensor: TensorId,
    values: Vec<T>,
    /// Index and range of each output in the buffer.
    parts: Vec<(usize, Range<usize>)>,
}

impl<T> TakenHome<T> {
    /// Outputs, each with its index.
    fn split(&mut self) -> Vec<(usize, &mut [T])> {
        self.parts.sort_unstable_by_key(|(_, range)| range.start);
        let mut rest = self.values.as_mut_slice();
        let mut at = 0;
        let mut parts = Vec::with_capacity(self.parts.len());
        for (index, range) in &self.parts {
            let (_, behind) = rest.split_at_mut(range.start - at);
            let (part, behind) = behind.split_at_mut(range.len());
            parts.push((*index, part));
            rest = behind;
            at = range.end;
        }
        parts
    }
}

/// Returns true if two tensors are gradients in one bucket.
fn is_same_bucket(plan: &Plan, one: TensorId, other: TensorId) -> bool {
    match (plan.place(one), plan.place(other)) {
        (
            TensorLocation::Gradient { bucket: one, .. },
            TensorLocation::Gradient { bucket: other, .. },
        ) => one == other,
        _ => false,
    }
}

fn copy_of<T>(copies: &mut [Vec<T>], micro_batch: usize) -> &mut Vec<T> {
    let count = copies.len();
    &mut copies[micro_batch % count]
}

fn narrow<T: Float>(values: &[T]) -> Vec<f32> {
    values.iter().map(|v| v.as_f32()).collect()
}

fn widen<T: Float>(to: &mut [T], from: &[f32]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = T::from_f32(*from);
    }
}

/// Elements for which vectors have allocated memory.
fn capacity<V>(vectors: &[Vec<V>]) -> usize {
    vectors.iter().map(Vec::capacity).sum()
}

impl<T: Float> Executor for Cpu<T> {
    fn name(&self) -> &str {
        &self.name
    }

    fn plan(&self) -> &Plan {
        &self.plan
    }

    fn thread_pool(&self) -> io::Result<Option<rayon::ThreadPool>> {
        let Some(threads) = self.threads else { return Ok(None) };
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|index| format!("cpu worker {index}"));
        Ok(Some(pool.build().map_err(io::Error::other)?))
    }

    fn heartbeat(&self) -> Heartbeat {
        self.heartbeat.clone()
    }

    fn inject_fault(&mut self, fault: InjectedFault) -> Result<(), DeviceError> {
        inject_on_host(fault, &self.name)
    }

    fn allocated(&self) -> Option<AllocatedBytes> {
        let mut floats = self.loss.capacity()
            + capacity(&self.averages)
            + capacity(&self.parameters)
            + capacity(&self.gradients);
        for vectors in self.slots.iter().chain(&self.moments) {
            floats += capacity(vectors);
        }
        let mut ints = 0;
        for vectors in self.ints.iter().chain(&self.packed_moments) {
            ints += capacity(vectors);
        }
        let tensors = floats * size_of::<T>() + ints * size_of::<u32>();
        Some(AllocatedBytes { tensors, staging_peak: self.readbacks.bytes_peak() })
    }

    fn set_input(
        &mut self,
        tensor: TensorId,
        micro_batch: usize,
        values: HostTensorView,
    ) -> Result<(), DeviceError> {
        self.loss_counter.set_input(tensor, micro_batch, values);
        // An input in no slot is read by no node.
        if let TensorLocation::Slot(slot) = self.plan.place(tensor) {
            match values {
                HostTensorView::Int(values) => {
                    let copy = copy_of(&mut self.ints[tensor.index()], micro_batch);
                    copy[..values.len()].copy_from_slice(values);
                }
                HostTensorView::Float(values) => {
                    widen(copy_of(&mut self.slots[slot.index()], micro_batch), values);
                }
            }
        }
        Ok(())
    }

    fn begin_step(&mut self) -> Result<(), DeviceError> {
        for bucket in &mut self.gradients {
            bucket.fill(T::zero());
        }
        self.loss.fill(T::zero());
        self.loss_counter.begin_step();
        Ok(())
    }

    fn run(&mut self, nodes: Range<usize>, pass: &PassContext) -> Result<(), DeviceError> {
        self.loss_counter.run(&nodes, pass);
        for index in nodes {
            if self.plan.graph.nodes[index].when.includes(pass.random.training) {
                self.run_node(index, pass);
                self.heartbeat.tick();
            }
        }
        Ok(())
    }

    fn finish_step(&mut self, norms: &[BucketId]) -> Result<StepSums, DeviceError> {
        let loss = self.loss()?;
        let mut gradients = Vec::with_capacity(norms.len());
        for bucket in norms {
            assert!(self.plan.holds(*bucket), "the device does not hold {bucket}");
            gradients.push((self.functions.norm)(&self.gradients[bucket.index()]));
        }
        Ok(StepSums { loss, gradients, busy: None })
    }

    fn loss(&mut self) -> Result<LossSums, DeviceError> {
        let count = self.loss_counter.count().unwrap_or(self.loss[1].as_f64());
        let terms = self.loss[2..].iter().map(|term| term.as_f64()).collect();
        Ok(LossSums { loss: self.loss[0].as_f64(), count, terms })
    }

    fn update(
        &mut self,
        bucket: BucketId,
        update: &Update,
        range: &UpdateRange,
    ) -> Result<(), DeviceError> {
        check_rounding(&self.plan, update, range);
        let function = (self.functions.update)(update_twin(update));
        let owned = self.shards.owned(bucket);
        let range = self.shards.update(bucket, range);
        let bucket = bucket.index();
        let parameters = &mut self.parameters[bucket][owned.clone()];
        let gradients = &self.gradients[bucket][owned];
        if range.rounding.is_some() {
            let moments = &mut self.packed_moments[bucket];
            bf16_moments::update(function, update, &range, parameters, gradients, moments);
            return Ok(());
        }
        let mut moments: Vec<&mut [T]> = self
            .moments
            .iter_mut()
            .map(|bucket_tensor| bucket_tensor[bucket].as_mut_slice())
            .collect();
        function(update, &range, parameters, gradients, &mut moments);
        Ok(())
    }

    fn average(
        &mut self,
        bucket: BucketId,
        elements: Range<usize>,
        weight: f32,
    ) -> Result<(), DeviceError> {
        let update = Update::of_average(weight);
        let function = (self.functions.update)(update_twin(&update));
        let owned = self.shards.owned(bucket);
        let range = self.shards.update(bucket, &UpdateRange::of_average(elements));
        let averages = &mut self.averages[bucket.index()];
        let parameters = &self.parameters[bucket.index()][owned];
        function(&update, &range, averages, parameters, &mut []);
        Ok(())
    }

    fn read_parts(
        &mut self,
        tensor: TensorId,
        parts: &[Range<usize>],
        pass: &PassContext,
    ) -> Result<Vec<f32>, DeviceError> {
        let arg = self.arg(tensor, pass);
        let values = arg.floats();
        let mut read = Vec::new();
        for part in parts {
            read.extend(narrow(&values[part.clone()]));
        }
        Ok(read)
    }

    fn read_bucket(
        &mut self,
        bucket_tensor: BucketTensor,
        bucket: BucketId,
    ) -> Result<Vec<f32>, DeviceError> {
        let length = self.shards.held(bucket_tensor, bucket).len();
        if let Some(words) = self.packed(bucket_tensor, bucket) {
            return Ok(bf16_words::values(words, length));
        }
        Ok(narrow(self.bucket_tensor(bucket_tensor, bucket)))
    }

    fn hash(&mut self, bucket_tensor: BucketTensor, bucket: BucketId) -> Result<u64, DeviceError> {
        if let Some(words) = self.packed(bucket_tensor, bucket) {
            return Ok(hash::fast(words, 0));
        }
        let values = narrow(self.bucket_tensor(bucket_tensor, bucket));
        Ok(hash::fast(bytemuck::cast_slice(&values), 0))
    }

    fn write_bucket(
        &mut self,
        bucket_tensor: BucketTensor,
        bucket: BucketId,
        values: &[f32],
    ) -> Result<(), DeviceError> {
        let length = self.shards.held(bucket_tensor, bucket).len();
        assert_eq!(length, values.len(), "a bucket tensor is written whole");
        if let Some(words) = self.packed(bucket_tensor, bucket) {
            *words = bf16_words::to_nearest(values);
        } else {
            widen(self.bucket_tensor(bucket_tensor, bucket), values);
        }
        Ok(())
    }

    fn set_moments(&mut self, moments: Moments) -> Result<(), DeviceError> {
        self.shards = Shards::new(&self.plan, &moments);
        self.allocate_moments(moments.count);
        Ok(())
    }

    fn owned(&self, bucket: BucketId) -> Range<usize> {
        self.shards.owned(bucket)
    }

    fn start_readback(&mut self, place: Region) -> Result<(), DeviceError> {
        let length = place.length();
        assert!(length <= self.readback_elements_max, "{place} is longer than a piece");
        let mut copy = self.readbacks.buffer(length);
        copy.extend(self.values(&place).iter().map(|v| v.as_f32()));
        self.readbacks.begin(place, copy);
        Ok(())
    }

    fn next_readback(&mut self, _wait: bool) -> Result<Option<Readback>, DeviceError> {
        Ok(self.readbacks.take())
    }

    fn has_readbacks(&self) -> bool {
        self.readbacks.has_readbacks()
    }

    fn readback_elements_max(&self) -> usize {
        self.readback_elements_max
    }

    fn write_place(&mut self, place: &Region, values: &[f32]) -> Result<(), DeviceError> {
        assert_eq!(place.length(), values.len(), "{place} is written whole");
        widen(self.values(place), values);
        Ok(())
    }

    fn add(
        &mut self,
        bucket: BucketId,
        start: usize,
        partial: &mut [f32],
    ) -> Result<(), DeviceError> {
        let gradients = &self.gradients[bucket.index()][start..start + partial.len()];
        for (sum, gradient) in partial.iter_mut().zip(gradients) {
            *sum = (T::from_f64(f64::from(*sum)) + *gradient).as_f64() as f32;
        }
        Ok(())
    }

    fn on_queue_done(&mut self, then: Box<dyn FnOnce() + Send>) -> Result<(), DeviceError> {
        then();
        Ok(())
    }

    fn profile(
        &mut self,
        work: &ProfileTarget,
        pass: &PassContext,
    ) -> Result<Option<KernelProfile>, DeviceError> {
        let Some(mut timing) = KernelProfile::of(&self.plan, work, pass) else { return Ok(None) };
        timing.variant = "host".into();
        let started = Instant::now();
        match work {
            ProfileTarget::Node(index) => self.run_node(*index, pass),
            ProfileTarget::Norm(bucket) => {
                (self.functions.norm)(&self.gradients[bucket.index()]);
            }
            ProfileTarget::Update(bucket, update, range) => self.update(*bucket, update, range)?,
        }
        timing.seconds = started.elapsed().as_secs_f64();
        Ok(Some(timing))
    }
}

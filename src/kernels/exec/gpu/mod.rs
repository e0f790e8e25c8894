//! Executor on a GPU: a plan on an opened adapter, with one buffer per slot copy and per bucket,
//! bind groups and pipelines made once, and a command stream that is submitted in batches of
//! bounded duration.

mod add;
mod bucket_tensors;
mod limits;
#[cfg(test)]
mod pace_tests;
mod pass_count;
#[cfg(test)]
mod place_tests;
mod prepare;
#[cfg(test)]
mod readback_tests;
mod readbacks;
mod stream;
#[cfg(test)]
mod tests;
mod workspace;

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use crate::autotune::KernelSelector;
use crate::bf16_words;
use crate::bind::CallBuffers;
use crate::device::{DeviceError, Gpu, Heartbeat};
use crate::exec::loss_count::LossCounter;
use crate::exec::staging::ReadbackBudget;
use crate::exec::timing::{KernelProfile, ProfileTarget, norm_cost, update_cost};
use crate::exec::{
    BucketTensor, Executor, LossSums, Moments, PassContext, READBACK_ELEMENTS_MAX, Readback,
    StepSums, check_parts, check_rounding, copies, slot_of,
};
use crate::ops::hash;
use crate::ops::norm::NormSlots;
use crate::{BindGroups, Binding, Caps, Operand, Variant, twin};
use add::PartialSumAdder;
pub use add::adder_bytes;
use bucket_tensors::BucketTensors;
pub use limits::tensor_bytes_max;
use potluck_core::arithmetic::gcd;
use potluck_core::faults::InjectedFault;
use potluck_core::{BucketId, DType, HostTensorView, TensorId};
use potluck_graph::{
    DeviceState, MomentFormat, Node, Plan, Region, SlotKind, TensorLocation, Update, UpdateRange,
};
use prepare::PreparedKernel;
use readbacks::{ReadbackQueue, ReadbackRequest};
use stream::{CommandStream, ReadRange};
pub use workspace::CallMemory;

/// Key of a prepared node: its index, the copies of slots that it uses (the micro-batch modulo the
/// node's period), the rows, and true if the node draws random numbers in this pass.
type NodeKey = (usize, usize, usize, bool);

/// Numbers of rows for which prepared nodes are kept. Training uses one or two, an evaluation one
/// more.
const ROWS_KEPT: usize = 8;

/// Key of a prepared update: the updated bucket tensor and bucket, the start of its range, and the
/// entry point of its shader.
type UpdateKey = (BucketTensor, BucketId, usize, &'static str);

/// Executor of a plan with all its tensors on a GPU. See [`Executor`].
pub struct GpuExecutor {
    gpu: Arc<Gpu>,
    /// Shared, so that a node can be borrowed while kernels are prepared.
    plan: Arc<Plan>,
    kernels: KernelSelector,
    stream: CommandStream,
    /// Per slot: one buffer per copy.
    slots: Vec<Vec<wgpu::Buffer>>,
    /// Per state of the graph; `None` if no node of the plan uses it.
    states: Vec<Option<wgpu::Buffer>>,
    bucket_tensors: BucketTensors,
    loss: wgpu::Buffer,
    loss_counter: LossCounter,
    /// Partial sums of the first stage of the norms of all buckets: pairs of a sum of squares and a
    /// number of values that are not finite.
    norm_parts: wgpu::Buffer,
    /// One such pair per bucket.
    norms: wgpu::Buffer,
    /// Two words of the last hash of a bucket; its partial sums are in `norm_parts`.
    hashed: wgpu::Buffer,
    /// Buffers for intermediate results between the dispatches of all calls, of the sizes of
    /// [`CallMemory`].
    between: CallBuffers,
    /// Per node: the number of micro-batches after which it uses the same copies of slots again.
    periods: Vec<usize>,
    /// Bind groups by node and by micro-batch modulo the node's period, one per pipeline of the
    /// node, because they do not depend on the rows of a pass.
    bind_groups: HashMap<(usize, usize), BindGroups>,
    /// Nodes prepared so far, for the numbers of rows in `recent_rows`, the most recent one at the
    /// end.
    prepared: HashMap<NodeKey, PreparedKernel>,
    recent_rows: VecDeque<usize>,
    /// Loss scale of the nodes prepared so far.
    loss_scale: f32,
    /// Updates prepared so far.
    updates: HashMap<UpdateKey, PreparedKernel>,
    /// Prepared first stage of the norm of each bucket; `None` if the plan does not hold the
    /// bucket.
    norm_tasks: Vec<Option<PreparedKernel>>,
    /// Prepared second stage of all norms; `None` if the plan holds no bucket.
    norm_total: Option<PreparedKernel>,
    /// Kernel that adds gradients to the partial sums of other ranks; `None` until it is first
    /// needed.
    adder: Option<PartialSumAdder>,
}

impl GpuExecutor {
    /// Allocates all buffers of the plan. Nodes run the variants that `kernels` certifies and
    /// selects.
    ///
    /// # Errors
    /// Returns [`DeviceError`] if a tensor or bucket exceeds the device's limits, if there is too
    /// little memory (everything allocated is freed then), or if a kernel fails certification on
    /// this driver.
    pub fn new(
        gpu: Gpu,
        plan: Plan,
        moments: impl Into<Moments>,
        mut kernels: KernelSelector,
    ) -> Result<Self, DeviceError> {
        let moments: Moments = moments.into();
        limits::check(&gpu, &plan)?;
        let gpu = Arc::new(gpu);
        let CallMemory { workspace, scratch } = CallMemory::of(&plan, &Caps::of(&gpu));
        let between = CallBuffers::new(&gpu, workspace, scratch)?;
        let mut slots = Vec::with_capacity(plan.slots.len());
        for slot in &plan.slots {
            let mut copies = Vec::with_capacity(slot.copies);
            for _ in 0..slot.copies {
                copies.push(match slot.kind {
                    SlotKind::Logits => between.scratch.clone(),
                    SlotKind::Scratch | SlotKind::Stash => {
                        gpu.storage("slot", slot.bytes as u64)?
                    }
                });
            }
            slots.push(copies);
        }
        let bucket_tensors = BucketTensors::new(&gpu, &plan, &moments)?;
        let norm_slots = NormSlots::new(bucket_tensors.shards.lengths(BucketTensor::Gradients));
        let norms_bytes = (2 * plan.buckets.len() * DType::F32.bytes()) as u64;
        let mut states = Vec::with_capacity(plan.graph.states.len());
        for state in &plan.graph.states {
            states.push(state_buffer(&gpu, &plan, state)?);
        }
        let mut executor = Self {
            slots,
            states,
            bucket_tensors,
            loss: gpu.storage("loss", (plan.graph.loss_length() * DType::F32.bytes()) as u64)?,
            loss_counter: LossCounter::new(&plan),
            norm_parts: gpu
                .storage("norm parts", (norm_slots.words() * DType::F32.bytes()) as u64)?,
            norms: gpu.storage("norms", norms_bytes)?,
            hashed: gpu.storage("hash", 8)?,
            between,
            periods: plan.graph.nodes.iter().map(|node| period(&plan, node)).collect(),
            bind_groups: HashMap::new(),
            prepared: HashMap::new(),
            recent_rows: VecDeque::new(),
            loss_scale: 1.0,
            updates: HashMap::new(),
            norm_tasks: Vec::new(),
            norm_total: None,
            adder: None,
            stream: CommandStream::new(
                gpu.clone(),
                &mut kernels.pipelines,
                readback_queue(&plan, READBACK_ELEMENTS_MAX),
            )?,
            kernels,
            gpu,
            plan: Arc::new(plan),
        };
        executor.kernels.set_workspace_bytes(workspace);
        executor.prepare_norms(norm_slots)?;
        executor.kernels.save_pipelines();
        if moments.owned.is_some() {
            executor.stream.readback_queue.make(&executor.gpu)?;
        }
        Ok(executor)
    }

    /// Returns the bytes of device memory that wgpu has allocated for the device, including
    /// staging; `None` on a backend that does not count them.
    pub fn allocated_by_wgpu(&self) -> Option<u64> {
        let report = self.gpu.device.generate_allocator_report()?;
        Some(report.total_allocated_bytes)
    }

    /// Sets [`Executor::readback_elements_max`] and allocates the readback slots again. Must be
    /// called before the first readback is started.
    ///
    /// # Errors
    /// Returns [`DeviceError`] if there is too little memory.
    pub fn set_readback_elements_max(&mut self, elements: usize) -> Result<(), DeviceError> {
        self.stream.readback_queue = readback_queue(&self.plan, elements);
        self.adder = None;
        self.stream.readback_queue.make(&self.gpu)
    }

    fn prepare_norms(&mut self, norm_slots: NormSlots) -> Result<(), DeviceError> {
        for (index, gradients) in self.bucket_tensors.gradients.iter().enumerate() {
            let Some(gradients) = gradients else {
                self.norm_tasks.push(None);
                continue;
            };
            let length = self.plan.buckets[index].length;
            let outputs = [&self.norm_parts, &self.norms];
            let binding = |operand| stage_binding(operand, gradients, outputs);
            let [first, total] = self.kernels.norm(&self.gpu, length, norm_slots, index)?;
            let cost = norm_cost(length);
            let pipelines = &mut self.kernels.pipelines;
            let task = PreparedKernel::new(&self.gpu, pipelines, &[first], &binding, cost)?;
            self.norm_tasks.push(Some(task));
            if self.norm_total.is_none() {
                let cost = norm_cost(norm_slots.words());
                let task = PreparedKernel::new(&self.gpu, pipelines, &[total], &binding, cost)?;
                self.norm_total = Some(task);
            }
        }
        Ok(())
    }

    /// Returns the binding of a tensor with the bytes that it takes at the plan's capacity,
    /// independent of the rows of a pass, because kernels stop at the number of rows in their
    /// parameters.
    fn binding(&self, tensor: TensorId, micro_batch: usize) -> Binding {
        let (buffer, start) = match self.plan.place(tensor) {
            TensorLocation::Slot(slot) => {
                let copies = &self.slots[slot.index()];
                (&copies[micro_batch % copies.len()], 0)
            }
            TensorLocation::Parameter { bucket, start } => {
                (self.bucket_tensors.buffer(BucketTensor::Parameters, bucket), start)
            }
            TensorLocation::Gradient { bucket, start } => {
                (self.bucket_tensors.buffer(BucketTensor::Gradients, bucket), start)
            }
            TensorLocation::State(state) => match &self.states[state.index()] {
                Some(buffer) => (buffer, 0),
                None => panic!("no node uses {state}"),
            },
            TensorLocation::Loss => (&self.loss, 0),
            TensorLocation::Unallocated => panic!("no node touches a tensor without a place"),
        };
        let found = self.plan.graph.tensor(tensor);
        Binding {
            buffer: buffer.clone(),
            offset: (start * found.dtype.bytes()) as u64,
            bytes: found.bytes(self.plan.options.rows).max(found.dtype.bytes()) as u64,
        }
    }

    fn bindings(&self, tensors: &[TensorId], micro_batch: usize) -> Vec<Binding> {
        tensors.iter().map(|tensor| self.binding(*tensor, micro_batch)).collect()
    }

    /// Notes the number of rows of a pass; if too many numbers are known, forgets the nodes
    /// prepared for the least recently used one.
    fn note_rows(&mut self, rows: usize) {
        self.recent_rows.retain(|known| *known != rows);
        self.recent_rows.push_back(rows);
        if self.recent_rows.len() > ROWS_KEPT {
            let oldest = self.recent_rows.pop_front();
            self.prepared.retain(|(_, _, rows, _), _| Some(*rows) != oldest);
        }
    }

    /// Notes the loss scale of a pass of training; if it has changed, which is rare, forgets the
    /// nodes that were prepared for the previous one.
    fn note_loss_scale(&mut self, pass: &PassContext) {
        if !pass.random.training || pass.loss_scale == self.loss_scale {
            return;
        }
        self.loss_scale = pass.loss_scale;
        let nodes = &self.plan.graph.nodes;
        self.prepared.retain(|(index, ..), _| !nodes[*index].is_loss_gradient);
    }

    fn key(&self, index: usize, pass: &PassContext) -> NodeKey {
        let op = &self.plan.graph.nodes[index].op;
        let training = op.depends_on_training() && pass.random.training;
        (index, self.copies_used(index, pass), pass.rows, training)
    }

    /// Returns a number that is equal for passes in which a node uses the same copies of slots.
    fn copies_used(&self, index: usize, pass: &PassContext) -> usize {
        pass.micro_batch % self.periods[index]
    }

    /// Prepares a node at first use, and refreshes the parameters of a random one.
    fn prepare_node(&mut self, index: usize, pass: &PassContext) -> Result<(), DeviceError> {
        let plan = Arc::clone(&self.plan);
        let node = &plan.graph.nodes[index];
        let Some(twin) = twin(&node.op) else { return Ok(()) };
        let key = self.key(index, pass);
        let known = self.prepared.contains_key(&key);
        if known && !node.op.is_random() {
            return Ok(());
        }
        let call = pass.call(&plan.graph, node);
        let full = PassContext { rows: plan.options.rows, ..*pass }.call(&plan.graph, node);
        let Variant { name, dispatches } = self.kernels.variant(&self.gpu, &call, &full)?;
        if let Some(task) = self.prepared.get_mut(&key) {
            task.refresh(dispatches);
            return Ok(());
        }
        let inputs = self.bindings(&node.inputs, pass.micro_batch);
        let outputs = self.bindings(&node.outputs, pass.micro_batch);
        let mut task = PreparedKernel::sharing(
            &self.gpu,
            &mut self.kernels.pipelines,
            self.bind_groups.entry((index, key.1)).or_default(),
            &dispatches,
            &|operand| self.between.binding(operand, &inputs, &outputs),
            (twin.cost)(&call),
        )?;
        task.variant = name;
        self.prepared.insert(key, task);
        Ok(())
    }

    /// Prepares an update of owned elements of `target`, which is the parameters or their average,
    /// at first use, and sets its parameters; returns its key in `updates`.
    fn prepare_update(
        &mut self,
        target: BucketTensor,
        bucket: BucketId,
        update: &Update,
        range: &UpdateRange,
    ) -> Result<UpdateKey, DeviceError> {
        check_rounding(&self.plan, update, range);
        let range = self.bucket_tensors.shards.update(bucket, range);
        let dispatch = self.kernels.update(&self.gpu, update, &range)?;
        let key = (target, bucket, range.start, dispatch.shader.entry);
        if let Some(task) = self.updates.get_mut(&key) {
            task.refresh(vec![dispatch]);
        } else {
            let task = PreparedKernel::new(
                &self.gpu,
                &mut self.kernels.pipelines,
                &[dispatch],
                &|operand| self.bucket_tensors.update_operand(operand, target, bucket),
                update_cost(update, &range),
            )?;
            self.updates.insert(key, task);
        }
        Ok(key)
    }

    /// Converts the values of the loss's accumulator to sums.
    fn loss_sums(&self, values: &[f32]) -> LossSums {
        LossSums {
            loss: f64::from(values[0]),
            count: self.loss_counter.count().unwrap_or(f64::from(values[1])),
            terms: values[2..].iter().map(|term| f64::from(*term)).collect(),
        }
    }

    /// Records the copies of pending readbacks of gradients and of activations that `nodes` are
    /// about to change.
    fn keep_outputs(
        &mut self,
        nodes: &Range<usize>,
        pass: &PassContext,
    ) -> Result<(), DeviceError> {
        if !self.stream.readback_queue.is_waiting() {
            return Ok(());
        }
        let plan = Arc::clone(&self.plan);
        for node in &plan.graph.nodes[nodes.clone()] {
            // Nodes without a twin are aliases, which write nothing.
            if twin(&node.op).is_none() {
                continue;
            }
            for output in &node.outputs {
                let changed = self.binding(*output, pass.micro_batch);
                self.stream.preserve_readbacks(&changed.buffer, changed.range())?;
            }
        }
        Ok(())
    }

    /// Returns the buffer that holds the elements of a place, and their byte offset in it.
    ///
    /// # Panics
    /// If the device does not hold all of them.
    fn buffer_of(&self, place: &Region) -> (wgpu::Buffer, u64) {
        match place {
            Region::Bucket { bucket_tensor, bucket, range } => {
                check_parts(&self.plan, *bucket_tensor);
                let (buffer, bytes) = self.bucket_tensors.place(*bucket_tensor, *bucket, range);
                (buffer, bytes.start)
            }
            Region::Tensor { tensor, micro_batch, range } => {
                let copies = &self.slots[slot_of(&self.plan, *tensor, range).index()];
                let dtype = self.plan.graph.tensor(*tensor).dtype;
                let offset = (range.start * dtype.bytes()) as u64;
                (copies[micro_batch % copies.len()].clone(), offset)
            }
        }
    }

    fn read_range(
        &mut self,
        buffer: &wgpu::Buffer,
        offset: u64,
        count: usize,
    ) -> Result<Vec<f32>, DeviceError> {
        let mut values = vec![0.0; count];
        let range = (buffer, offset, (count * DType::F32.bytes()) as u64);
        self.stream.read(&[range], bytemuck::cast_slice_mut(&mut values))?;
        Ok(values)
    }
}

/// Allocates a state and writes its initial values; `None` if no node of the plan uses it.
fn state_buffer(
    gpu: &Gpu,
    plan: &Plan,
    state: &DeviceState,
) -> Result<Option<wgpu::Buffer>, DeviceError> {
    if !plan.is_placed(state.tensor) {
        return Ok(None);
    }
    let tensor = plan.graph.tensor(state.tensor);
    let values = state.init.values(tensor.shape.dims());
    let values: Vec<f32> = values.into_iter().map(|value| value as f32).collect();
    let buffer = gpu.storage(&state.name, tensor.bytes(0) as u64)?;
    gpu.upload(&buffer, 0, bytemuck::cast_slice(&values));
    Ok(Some(buffer))
}

/// Returns the number of micro-batches after which a node uses the same copies of slots again: the
/// least common multiple of the slots' numbers of copies.
fn period(plan: &Plan, node: &Node) -> usize {
    let mut period = 1;
    for tensor in node.inputs.iter().chain(&node.outputs) {
        let count = copies(plan, *tensor).max(1);
        period = period / gcd(period, count) * count;
    }
    period
}

/// Returns the binding of an operand of a kernel that reduces one buffer in two stages: partial
/// results are output 0, results output 1.
fn stage_binding(operand: Operand, input: &wgpu::Buffer, outputs: [&wgpu::Buffer; 2]) -> Binding {
    match operand {
        Operand::Input(_) => Binding::whole(input),
        Operand::Output(i) => Binding::whole(outputs[i]),
        other => unreachable!("only ops have {other:?}"),
    }
}

fn readback_queue(plan: &Plan, elements: usize) -> ReadbackQueue {
    ReadbackQueue::new(elements, ReadbackBudget::of(plan, elements))
}

/// The device's adder, made for about `elements` elements at first use.
fn adder<'a>(
    adder: &'a mut Option<PartialSumAdder>,
    gpu: &Arc<Gpu>,
    kernels: &mut KernelSelector,
    elements: usize,
) -> Result<&'a mut PartialSumAdder, DeviceError> {
    match adder {
        Some(adder) => Ok(adder),
        none => Ok(none.insert(PartialSumAdder::new(gpu, kernels, elements)?)),
    }
}

impl Executor for GpuExecutor {
    fn name(&self) -> &str {
        &self.gpu.name
    }

    fn plan(&self) -> &Plan {
        &self.plan
    }

    fn heartbeat(&self) -> Heartbeat {
        self.gpu.heartbeat.clone()
    }

    fn longest_submission(&self) -> Option<f64> {
        let seconds = self.stream.traffic.longest_submission_s;
        if seconds > 0.0 { Some(seconds) } else { None }
    }

    fn inject_fault(&mut self, fault: InjectedFault) -> Result<(), DeviceError> {
        super::fault::inject(fault, &self.gpu, &mut self.kernels.pipelines)
    }

    fn set_input(
        &mut self,
        tensor: TensorId,
        micro_batch: usize,
        values: HostTensorView,
    ) -> Result<(), DeviceError> {
        self.loss_counter.set_input(tensor, micro_batch, values);
        if let TensorLocation::Slot(slot) = self.plan.place(tensor) {
            let copies = &self.slots[slot.index()];
            let copy = &copies[micro_batch % copies.len()];
            let bytes = values.bytes();
            self.stream.preserve_readbacks(copy, 0..bytes.len() as u64)?;
            self.stream.upload(copy, 0, bytes)?;
        }
        Ok(())
    }

    fn begin_step(&mut self) -> Result<(), DeviceError> {
        self.stream.begin_step()?;
        self.loss_counter.begin_step();
        for buffer in self.bucket_tensors.gradients.iter().flatten().chain([&self.loss]) {
            self.stream.preserve_readbacks(buffer, 0..buffer.size())?;
            self.stream.clear(buffer);
        }
        Ok(())
    }

    fn run(&mut self, nodes: Range<usize>, pass: &PassContext) -> Result<(), DeviceError> {
        self.stream.submit_readbacks()?;
        self.keep_outputs(&nodes, pass)?;
        self.loss_counter.run(&nodes, pass);
        self.note_rows(pass.rows);
        self.note_loss_scale(pass);
        for index in nodes {
            if !self.plan.graph.nodes[index].when.includes(pass.random.training) {
                continue;
            }
            self.prepare_node(index, pass)?;
            if let Some(task) = self.prepared.get(&self.key(index, pass)) {
                self.stream.run(task)?;
            }
        }
        self.stream.submit_if_large()
    }

    fn finish_step(&mut self, norms: &[BucketId]) -> Result<StepSums, DeviceError> {
        for bucket in norms {
            let Some(task) = &self.norm_tasks[bucket.index()] else {
                panic!("the device does not hold {bucket}")
            };
            self.stream.run(task)?;
        }
        if !norms.is_empty()
            && let Some(total) = &self.norm_total
        {
            self.stream.run(total)?;
        }

        let loss_length = self.plan.graph.loss_length();
        let mut values = vec![0f32; loss_length + 2 * norms.len()];
        let mut ranges: Vec<ReadRange> =
            vec![(&self.loss, 0, (loss_length * DType::F32.bytes()) as u64)];
        let norm_bytes = 2 * DType::F32.bytes();
        // Consecutive buckets share a copy.
        for run in norms.chunk_by(|a, b| a.0 + 1 == b.0) {
            let offset = run[0].index() * norm_bytes;
            ranges.push((&self.norms, offset as u64, (run.len() * norm_bytes) as u64));
        }
        let busy = self.stream.report(&ranges, bytemuck::cast_slice_mut(&mut values))?;

        let (of_loss, of_norms) = values.split_at(loss_length);
        let mut gradients = Vec::with_capacity(norms.len());
        for pair in of_norms.chunks_exact(2) {
            gradients.push((f64::from(pair[0]), pair[1] as u64));
        }
        Ok(StepSums { loss: self.loss_sums(of_loss), gradients, busy })
    }

    fn loss(&mut self) -> Result<LossSums, DeviceError> {
        let values = self.read_range(&self.loss.clone(), 0, self.plan.graph.loss_length())?;
        Ok(self.loss_sums(&values))
    }

    fn update(
        &mut self,
        bucket: BucketId,
        update: &Update,
        range: &UpdateRange,
    ) -> Result<(), DeviceError> {
        if range.length == 0 {
            return Ok(());
        }
        let key = self.prepare_update(BucketTensor::Parameters, bucket, update, range)?;
        let Some(task) = self.updates.get(&key) else { return Ok(()) };
        let changed = range.start..range.start + range.length;
        let moments = (0..update.moments()).map(BucketTensor::Moment);
        for bucket_tensor in [BucketTensor::Parameters].into_iter().chain(moments) {
            let (buffer, bytes) = self.bucket_tensors.place(bucket_tensor, bucket, &changed);
            self.stream.preserve_readbacks(&buffer, bytes)?;
        }
        self.stream.run(task)
    }

    fn average(
        &mut self,
        bucket: BucketId,
        elements: Range<usize>,
        weight: f32,
    ) -> Result<(), DeviceError> {
        if elements.is_empty() {
            return Ok(());
        }
        let (buffer, bytes) = self.bucket_tensors.place(BucketTensor::Average, bucket, &elements);
        self.stream.preserve_readbacks(&buffer, bytes)?;
        let update = Update::of_average(weight);
        let range = UpdateRange::of_average(elements);
        let key = self.prepare_update(BucketTensor::Average, bucket, &update, &range)?;
        let Some(task) = self.updates.get(&key) else { return Ok(()) };
        self.stream.run(task)
    }

    fn flush(&mut self) -> Result<(), DeviceError> {
        self.stream.submit()?;
        Ok(())
    }

    fn read_parts(
        &mut self,
        tensor: TensorId,
        parts: &[Range<usize>],
        pass: &PassContext,
    ) -> Result<Vec<f32>, DeviceError> {
        let at = self.binding(tensor, pass.micro_batch);
        let elements = self.plan.graph.tensor(tensor).shape.elements(pass.rows);
        assert!(parts.iter().all(|part| part.end <= elements), "{tensor} has {elements} elements");
        let mut count = 0;
        let mut ranges: Vec<ReadRange> = Vec::with_capacity(parts.len());
        for part in parts {
            let offset = at.offset + (part.start * DType::F32.bytes()) as u64;
            ranges.push((&at.buffer, offset, (part.len() * DType::F32.bytes()) as u64));
            count += part.len();
        }
        let mut values = vec![0.0; count];
        self.stream.read(&ranges, bytemuck::cast_slice_mut(&mut values))?;
        Ok(values)
    }

    fn read_bucket(
        &mut self,
        bucket_tensor: BucketTensor,
        bucket: BucketId,
    ) -> Result<Vec<f32>, DeviceError> {
        let length = self.bucket_tensors.shards.held(bucket_tensor, bucket).len();
        if length == 0 {
            return Ok(Vec::new());
        }
        let buffer = self.bucket_tensors.buffer(bucket_tensor, bucket).clone();
        match self.plan.options.moments.of_bucket_tensor(bucket_tensor) {
            MomentFormat::F32 => self.read_range(&buffer, 0, length),
            MomentFormat::Bf16 => {
                let mut words = vec![0u32; MomentFormat::Bf16.words(length)];
                let range = (&buffer, 0, size_of_val(&words[..]) as u64);
                self.stream.read(&[range], bytemuck::cast_slice_mut(&mut words))?;
                Ok(bf16_words::values(&words, length))
            }
        }
    }

    fn hash(&mut self, bucket_tensor: BucketTensor, bucket: BucketId) -> Result<u64, DeviceError> {
        let format = self.plan.options.moments.of_bucket_tensor(bucket_tensor);
        let length = format.words(self.bucket_tensors.shards.held(bucket_tensor, bucket).len());
        if length == 0 {
            return Ok(hash::fast(&[], 0));
        }
        let words = self.bucket_tensors.buffer(bucket_tensor, bucket).clone();
        let parts = self.norm_parts.size() as usize / (2 * DType::F32.bytes());
        let dispatches = self.kernels.hash(&self.gpu, length, parts)?;
        let task = PreparedKernel::new(
            &self.gpu,
            &mut self.kernels.pipelines,
            &dispatches,
            &|operand| stage_binding(operand, &words, [&self.norm_parts, &self.hashed]),
            norm_cost(length),
        )?;
        self.stream.run(&task)?;
        let mut lanes = [0u32; 2];
        self.stream.read(&[(&self.hashed, 0, 8)], bytemuck::cast_slice_mut(&mut lanes))?;
        Ok(hash::join(lanes))
    }

    fn write_bucket(
        &mut self,
        bucket_tensor: BucketTensor,
        bucket: BucketId,
        values: &[f32],
    ) -> Result<(), DeviceError> {
        let held = self.bucket_tensors.shards.held(bucket_tensor, bucket);
        assert_eq!(held.len(), values.len(), "a bucket tensor is written whole");
        if !held.is_empty() {
            match self.plan.options.moments.of_bucket_tensor(bucket_tensor) {
                MomentFormat::F32 => {
                    self.write_place(&Region::bucket(bucket_tensor, bucket, held), values)?;
                }
                MomentFormat::Bf16 => {
                    let words = bf16_words::to_nearest(values);
                    let buffer = self.bucket_tensors.buffer(bucket_tensor, bucket).clone();
                    self.stream.upload(&buffer, 0, bytemuck::cast_slice(&words))?;
                }
            }
        }
        self.gpu.check()
    }

    fn set_moments(&mut self, moments: Moments) -> Result<(), DeviceError> {
        // Prepared updates bind the old moments and averages.
        self.updates.clear();
        self.bucket_tensors.set_moments(&self.gpu, &self.plan, &moments)?;
        if moments.owned.is_some() {
            self.stream.readback_queue.make(&self.gpu)?;
        }
        Ok(())
    }

    fn owned(&self, bucket: BucketId) -> Range<usize> {
        self.bucket_tensors.shards.owned(bucket)
    }

    fn start_readback(&mut self, place: Region) -> Result<(), DeviceError> {
        assert!(place.length() <= self.readback_elements_max(), "{place} is longer than a piece");
        let (source, offset) = self.buffer_of(&place);
        self.stream.start_readback(ReadbackRequest { place, source, offset })
    }

    fn next_readback(&mut self, wait: bool) -> Result<Option<Readback>, DeviceError> {
        self.stream.next_readback(wait)
    }

    fn has_readbacks(&self) -> bool {
        self.stream.readback_queue.has_readbacks()
    }

    fn readback_elements_max(&self) -> usize {
        self.stream.readback_queue.elements()
    }

    fn write_place(&mut self, place: &Region, values: &[f32]) -> Result<(), DeviceError> {
        assert_eq!(place.length(), values.len(), "{place} is written whole");
        let (target, offset) = self.buffer_of(place);
        self.stream.preserve_readbacks(&target, offset..offset + size_of_val(values) as u64)?;
        self.stream.upload(&target, offset, bytemuck::cast_slice(values))
    }

    fn prepare_add(&mut self, lengths: &[usize]) -> Result<(), DeviceError> {
        let Some(longest) = lengths.iter().copied().max() else { return Ok(()) };
        let adder = adder(&mut self.adder, &self.gpu, &mut self.kernels, longest)?;
        adder.prepare(&mut self.kernels, lengths)
    }

    fn add(
        &mut self,
        bucket: BucketId,
        start: usize,
        partial: &mut [f32],
    ) -> Result<(), DeviceError> {
        let range = start..start + partial.len();
        let (source, bytes) = self.bucket_tensors.place(BucketTensor::Gradients, bucket, &range);
        let elements = self.stream.readback_queue.elements();
        let adder = adder(&mut self.adder, &self.gpu, &mut self.kernels, elements)?;
        adder.add(&mut self.stream, &mut self.kernels, &source, bytes.start, partial)
    }

    fn on_queue_done(&mut self, then: Box<dyn FnOnce() + Send>) -> Result<(), DeviceError> {
        self.stream.submit()?;
        self.gpu.queue.on_submitted_work_done(then);
        Ok(())
    }

    fn profile(
        &mut self,
        work: &ProfileTarget,
        pass: &PassContext,
    ) -> Result<Option<KernelProfile>, DeviceError> {
        let Some(mut timing) = KernelProfile::of(&self.plan, work, pass) else { return Ok(None) };
        let task = match work {
            ProfileTarget::Node(index) => {
                self.note_rows(pass.rows);
                self.prepare_node(*index, pass)?;
                self.prepared.get(&self.key(*index, pass))
            }
            ProfileTarget::Norm(bucket) => {
                self.norm_tasks.get(bucket.index()).and_then(Option::as_ref)
            }
            ProfileTarget::Update(bucket, update, range) => {
                let target = BucketTensor::Parameters;
                let key = self.prepare_update(target, *bucket, update, range)?;
                self.updates.get(&key)
            }
        };
        let Some(task) = task else { return Ok(None) };
        timing.seconds = self.stream.time(task)?;
        timing.variant.clone_from(&task.variant);
        Ok(Some(timing))
    }
}

//! A plan on an opened adapter: one buffer per slot copy and per bucket, one compute pass and one
//! submission per range of nodes, bind groups and pipelines made once.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use super::{Bank, Executor, Input, Pass, StepSums};
use crate::base::shape::ELEMENT_BYTES;
use crate::base::{BucketId, TensorId};
use crate::device::{DeviceError, Gpu, Limits};
use crate::graph::{Place, Plan, SlotKind, Update, UpdateRange};
use crate::kernels::pipeline::Pipeline;
use crate::kernels::{Dispatch, Operand, Pipelines, adamw, norm, sgd, twin};

/// Shaders index elements by 32-bit integers, and the last workgroups reach beyond the end: with
/// this many elements at most, no index wraps around.
const ELEMENTS_MAX: u64 = 1 << 31;

/// Submissions that may wait for the device. Without a bound, a step of many micro-batches would
/// queue up as a whole, and the wait at its end would pass the deadline on a slow device.
const QUEUED_MAX: usize = 8;

/// A dispatch ready to record: everything but the parameters of random ops, which change.
struct Prepared {
    pipeline: Arc<Pipeline>,
    group: wgpu::BindGroup,
    params: Vec<u32>,
    groups: [u32; 3],
}

/// What a prepared node depends on: its index, the copy of the stash, the rows, and whether it
/// draws random numbers now.
type NodeKey = (usize, usize, usize, bool);

/// A buffer range to bind: offset and size in bytes.
#[derive(Clone)]
struct Binding {
    buffer: wgpu::Buffer,
    offset: u64,
    bytes: u64,
}

/// A plan and all its tensors on a GPU. See [`Executor`].
pub struct GpuExecutor {
    gpu: Gpu,
    /// Shared, so that a node can be read while others are prepared.
    plan: Arc<Plan>,
    pipelines: Pipelines,
    /// Submissions that nobody has waited for, oldest first.
    queued: VecDeque<wgpu::SubmissionIndex>,
    /// Per slot: its copies.
    slots: Vec<Vec<wgpu::Buffer>>,
    parameters: Vec<wgpu::Buffer>,
    gradients: Vec<wgpu::Buffer>,
    moments: Vec<Vec<wgpu::Buffer>>,
    loss: wgpu::Buffer,
    /// (sum of squares, number not finite) of first-stage parts, and per bucket.
    norm_parts: wgpu::Buffer,
    norms: wgpu::Buffer,
    /// For the loss and the norms, read back after every step.
    report: wgpu::Buffer,
    /// Nodes prepared so far.
    prepared: HashMap<NodeKey, Vec<Prepared>>,
    /// First and second stage of the norm of each bucket.
    norm_passes: Vec<Prepared>,
}

impl GpuExecutor {
    /// Allocates everything that the plan needs.
    ///
    /// # Errors
    /// A tensor or bucket over the device's limits, or too little memory; nothing is kept then.
    pub fn new(gpu: Gpu, plan: Plan, moments: usize) -> Result<Self, DeviceError> {
        check_limits(&gpu, &plan)?;
        let banks = |label: &str| -> Result<Vec<wgpu::Buffer>, DeviceError> {
            let bytes = |length: usize| (length * ELEMENT_BYTES) as u64;
            plan.buckets.iter().map(|b| gpu.storage(label, bytes(b.length))).collect()
        };
        let slots = plan
            .slots
            .iter()
            .map(|slot| {
                let copies = if slot.kind == SlotKind::Stash { plan.options.in_flight } else { 1 };
                (0..copies).map(|_| gpu.storage("slot", slot.bytes as u64)).collect()
            })
            .collect::<Result<Vec<Vec<wgpu::Buffer>>, DeviceError>>()?;
        let parts = plan.buckets.iter().map(|b| norm::partials(b.length)).max().unwrap_or(1);
        let norms_bytes = (2 * plan.buckets.len() * ELEMENT_BYTES) as u64;
        let mut executor = Self {
            slots,
            parameters: banks("parameters")?,
            gradients: if plan.graph.is_trained() { banks("gradients")? } else { Vec::new() },
            moments: (0..moments).map(|_| banks("moments")).collect::<Result<_, _>>()?,
            loss: gpu.storage("loss", 8)?,
            norm_parts: gpu.storage("norm parts", (2 * parts * ELEMENT_BYTES) as u64)?,
            norms: gpu.storage("norms", norms_bytes)?,
            report: gpu.readback(8 + norms_bytes)?,
            prepared: HashMap::new(),
            norm_passes: Vec::new(),
            pipelines: Pipelines::default(),
            queued: VecDeque::new(),
            gpu,
            plan: Arc::new(plan),
        };
        executor.prepare_norms(parts)?;
        Ok(executor)
    }

    fn prepare_norms(&mut self, parts: usize) -> Result<(), DeviceError> {
        for index in 0..self.gradients.len() {
            let inputs = [whole(&self.gradients[index])];
            let outputs = [whole(&self.norm_parts), whole(&self.norms)];
            for dispatch in norm::dispatch(self.plan.buckets[index].length, parts, index) {
                let ready =
                    prepare(&self.gpu, &mut self.pipelines, &dispatch, &|operand| match operand {
                        Operand::Input(i) => inputs[i].clone(),
                        Operand::Output(i) => outputs[i].clone(),
                    })?;
                self.norm_passes.push(ready);
            }
        }
        Ok(())
    }

    /// Where a tensor is bound: as many bytes as it takes at the plan's capacity, so that one
    /// bind group serves any number of rows.
    fn binding(&self, tensor: TensorId, copy: usize) -> Binding {
        let count = self.plan.graph.tensor(tensor).shape.elements(self.plan.options.rows);
        let bytes = (count.max(1) * ELEMENT_BYTES) as u64;
        let at = |buffer: &wgpu::Buffer, start: usize| Binding {
            buffer: buffer.clone(),
            offset: (start * ELEMENT_BYTES) as u64,
            bytes,
        };
        match self.plan.place(tensor) {
            Place::Slot(slot) => {
                let copies = &self.slots[slot.index()];
                at(&copies[copy % copies.len()], 0)
            }
            Place::Parameter { bucket, start } => at(&self.parameters[bucket.index()], start),
            Place::Gradient { bucket, start } => at(&self.gradients[bucket.index()], start),
            Place::Loss => at(&self.loss, 0),
            Place::Nowhere => panic!("no node touches a tensor without a place"),
        }
    }

    fn key(&self, index: usize, pass: &Pass) -> NodeKey {
        let random = self.plan.graph.nodes[index].op.is_random() && pass.random.training;
        (index, pass.copy, pass.rows, random)
    }

    /// Prepares a node at first use, and refreshes the parameters of a random one.
    fn prepare_node(&mut self, index: usize, pass: &Pass) -> Result<(), DeviceError> {
        let plan = Arc::clone(&self.plan);
        let node = &plan.graph.nodes[index];
        let Some(twin) = twin(&node.op) else { return Ok(()) };
        let key = self.key(index, pass);
        let known = self.prepared.contains_key(&key);
        if known && !node.op.is_random() {
            return Ok(());
        }
        let dispatches = (twin.dispatch)(&pass.call(&plan.graph, node));
        if let Some(prepared) = self.prepared.get_mut(&key) {
            for (ready, dispatch) in prepared.iter_mut().zip(dispatches) {
                ready.params = dispatch.params;
            }
            return Ok(());
        }
        let bind = |ids: &[TensorId]| -> Vec<Binding> {
            ids.iter().map(|id| self.binding(*id, pass.copy)).collect()
        };
        let (inputs, outputs) = (bind(&node.inputs), bind(&node.outputs));
        let mut prepared = Vec::with_capacity(dispatches.len());
        for dispatch in &dispatches {
            prepared.push(prepare(
                &self.gpu,
                &mut self.pipelines,
                dispatch,
                &|operand| match operand {
                    Operand::Input(i) => inputs[i].clone(),
                    Operand::Output(i) => outputs[i].clone(),
                },
            )?);
        }
        self.prepared.insert(key, prepared);
        Ok(())
    }

    fn encoder(&self) -> wgpu::CommandEncoder {
        self.gpu.device.create_command_encoder(&Default::default())
    }

    /// Submits what was encoded, and waits for an earlier submission if too many are queued.
    fn submit(&mut self, encoder: wgpu::CommandEncoder) -> Result<(), DeviceError> {
        self.queued.push_back(self.gpu.queue.submit([encoder.finish()]));
        if self.queued.len() > QUEUED_MAX {
            let oldest = self.queued.pop_front();
            self.gpu.wait("a submission", oldest)?;
        }
        self.gpu.check()
    }

    fn bank(&self, bank: Bank, bucket: BucketId) -> &wgpu::Buffer {
        match bank {
            Bank::Parameters => &self.parameters[bucket.index()],
            Bank::Gradients => &self.gradients[bucket.index()],
            Bank::Moment(moment) => &self.moments[moment][bucket.index()],
        }
    }

    fn read_range(
        &self,
        buffer: &wgpu::Buffer,
        offset: u64,
        count: usize,
    ) -> Result<Vec<f32>, DeviceError> {
        let bytes = (count * ELEMENT_BYTES) as u64;
        let staging = self.gpu.readback(bytes)?;
        let read = self.gpu.read(&staging, &[(buffer, offset, bytes)])?;
        Ok(bytemuck::pod_collect_to_vec(&read))
    }
}

/// Refuses a plan that the device cannot bind, before anything is allocated.
fn check_limits(gpu: &Gpu, plan: &Plan) -> Result<(), DeviceError> {
    let largest_bucket = plan.buckets.iter().map(|b| b.length * ELEMENT_BYTES).max().unwrap_or(0);
    let bytes = plan.tensor_bytes_max().max(largest_bucket) as u64;
    let limit = tensor_bytes_max(&gpu.limits);
    if bytes > limit {
        return Err(DeviceError::TooLarge { adapter: gpu.name.clone(), bytes, limit });
    }
    Ok(())
}

/// The most bytes of a tensor or a bucket that the device binds and that shaders can index.
fn tensor_bytes_max(limits: &Limits) -> u64 {
    limits.binding_bytes.min(ELEMENTS_MAX * ELEMENT_BYTES as u64)
}

fn whole(buffer: &wgpu::Buffer) -> Binding {
    Binding { buffer: buffer.clone(), offset: 0, bytes: buffer.size() }
}

fn prepare(
    gpu: &Gpu,
    pipelines: &mut Pipelines,
    dispatch: &Dispatch,
    binding: &dyn Fn(Operand) -> Binding,
) -> Result<Prepared, DeviceError> {
    let pipeline = pipelines.get(gpu, dispatch)?;
    let bound: Vec<Binding> = dispatch.operands.iter().map(|operand| binding(*operand)).collect();
    let entries: Vec<wgpu::BindGroupEntry> = bound
        .iter()
        .enumerate()
        .map(|(index, bound)| wgpu::BindGroupEntry {
            binding: index as u32,
            resource: wgpu::BindingResource::Buffer(wgpu::BufferBinding {
                buffer: &bound.buffer,
                offset: bound.offset,
                size: std::num::NonZeroU64::new(bound.bytes),
            }),
        })
        .collect();
    let group = gpu.device.create_bind_group(&wgpu::BindGroupDescriptor {
        label: None,
        layout: &pipeline.bindings,
        entries: &entries,
    });
    let params = dispatch.params.clone();
    Ok(Prepared { pipeline, group, params, groups: dispatch.groups })
}

fn record(pass: &mut wgpu::ComputePass, ready: &Prepared) {
    pass.set_pipeline(&ready.pipeline.pipeline);
    pass.set_bind_group(0, &ready.group, &[]);
    pass.set_immediates(0, bytemuck::cast_slice(&ready.params));
    let [x, y, z] = ready.groups;
    pass.dispatch_workgroups(x, y, z);
}

impl Executor for GpuExecutor {
    fn name(&self) -> &str {
        &self.gpu.name
    }

    fn plan(&self) -> &Plan {
        &self.plan
    }

    fn set_input(
        &mut self,
        tensor: TensorId,
        copy: usize,
        values: Input,
    ) -> Result<(), DeviceError> {
        if let Place::Slot(slot) = self.plan.place(tensor) {
            let bytes = match values {
                Input::Float(values) => bytemuck::cast_slice(values),
                Input::Int(values) => bytemuck::cast_slice(values),
            };
            self.gpu.upload(&self.slots[slot.index()][copy], 0, bytes);
        }
        Ok(())
    }

    fn begin_step(&mut self) -> Result<(), DeviceError> {
        let mut encoder = self.encoder();
        for buffer in self.gradients.iter().chain([&self.loss]) {
            encoder.clear_buffer(buffer, 0, None);
        }
        self.submit(encoder)
    }

    fn run(&mut self, nodes: Range<usize>, pass: &Pass) -> Result<(), DeviceError> {
        for index in nodes.clone() {
            self.prepare_node(index, pass)?;
        }
        let mut encoder = self.encoder();
        {
            let mut compute = encoder.begin_compute_pass(&Default::default());
            for index in nodes {
                let ready = self.prepared.get(&self.key(index, pass));
                ready.into_iter().flatten().for_each(|ready| record(&mut compute, ready));
            }
        }
        self.submit(encoder)
    }

    fn finish_step(&mut self) -> Result<StepSums, DeviceError> {
        let mut encoder = self.encoder();
        {
            let mut compute = encoder.begin_compute_pass(&Default::default());
            self.norm_passes.iter().for_each(|ready| record(&mut compute, ready));
        }
        self.submit(encoder)?;
        let norms_bytes = (2 * self.plan.buckets.len() * ELEMENT_BYTES) as u64;
        let ranges = [(&self.loss, 0, 8), (&self.norms, 0, norms_bytes)];
        let read = self.gpu.read(&self.report, &ranges)?;
        let values: Vec<f32> = bytemuck::pod_collect_to_vec(&read);
        let gradients =
            values[2..].chunks_exact(2).map(|pair| (f64::from(pair[0]), pair[1] as u64));
        Ok(StepSums {
            loss: f64::from(values[0]),
            count: f64::from(values[1]),
            gradients: gradients.collect(),
        })
    }

    fn loss(&mut self) -> Result<(f64, f64), DeviceError> {
        let read = self.gpu.read(&self.report, &[(&self.loss, 0, 8)])?;
        let values: Vec<f32> = bytemuck::pod_collect_to_vec(&read);
        Ok((f64::from(values[0]), f64::from(values[1])))
    }

    fn update(
        &mut self,
        bucket: BucketId,
        update: &Update,
        range: &UpdateRange,
    ) -> Result<(), DeviceError> {
        let dispatch = match update {
            Update::Sgd { .. } => sgd::dispatch(update, range),
            Update::AdamW { .. } => adamw::dispatch(update, range),
        };
        let index = bucket.index();
        let ready = prepare(&self.gpu, &mut self.pipelines, &dispatch, &|operand| match operand {
            Operand::Input(_) => whole(&self.gradients[index]),
            Operand::Output(0) => whole(&self.parameters[index]),
            Operand::Output(moment) => whole(&self.moments[moment - 1][index]),
        })?;
        let mut encoder = self.encoder();
        record(&mut encoder.begin_compute_pass(&Default::default()), &ready);
        self.submit(encoder)
    }

    fn read(&mut self, tensor: TensorId, pass: &Pass) -> Result<Vec<f32>, DeviceError> {
        let at = self.binding(tensor, pass.copy);
        let count = self.plan.graph.tensor(tensor).shape.elements(pass.rows);
        self.read_range(&at.buffer, at.offset, count)
    }

    fn read_bank(&mut self, bank: Bank, bucket: BucketId) -> Result<Vec<f32>, DeviceError> {
        let length = self.plan.buckets[bucket.index()].length;
        self.read_range(self.bank(bank, bucket), 0, length)
    }

    fn write_bank(
        &mut self,
        bank: Bank,
        bucket: BucketId,
        values: &[f32],
    ) -> Result<(), DeviceError> {
        assert_eq!(self.plan.buckets[bucket.index()].length, values.len(), "written whole");
        self.gpu.upload(self.bank(bank, bucket), 0, bytemuck::cast_slice(values));
        self.gpu.check()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_stay_within_what_32_bits_index() {
        let limits = |binding_bytes| Limits {
            binding_bytes,
            buffer_bytes: u64::MAX,
            workgroups: 65_535,
            storage_buffers: 8,
        };
        assert_eq!(tensor_bytes_max(&limits(128 << 20)), 128 << 20);
        assert_eq!(tensor_bytes_max(&limits(64 << 30)), 8 << 30);
    }
}

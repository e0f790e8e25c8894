//! A plan on an opened adapter: one buffer per slot copy and per bucket, bind groups and pipelines
//! made once, and a stream of commands that is submitted in stretches of bounded length.

mod clock;
mod prepare;
mod stream;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use super::timing::{Timing, Work, norm_cost, update_cost};
use super::{Bank, Executor, Input, Pass, StepSums};
use crate::base::rng::Key;
use crate::base::shape::ELEMENT_BYTES;
use crate::base::{BucketId, TensorId};
use crate::device::{DeviceError, Gpu, Injected, Limits, Pulse};
use crate::graph::{Place, Plan, SlotKind, Update, UpdateRange};
use crate::kernels::{Call, Kernels, Operand, Random, Variant, hash, norm, twin};
use prepare::{Binding, Task};
use stream::{ReadRange, Stream};

/// Shaders index elements by 32-bit integers, and the last workgroups reach beyond the end: with
/// this many elements at most, no index wraps around.
const ELEMENTS_MAX: u64 = 1 << 31;

/// What a prepared node depends on: its index, the copy of the stash, the rows, and whether it
/// draws random numbers now.
type NodeKey = (usize, usize, usize, bool);

/// What a prepared update depends on: its bucket and the entry point of its shader.
type UpdateKey = (usize, &'static str);

/// A plan and all its tensors on a GPU. See [`Executor`].
pub struct GpuExecutor {
    gpu: Arc<Gpu>,
    /// Shared, so that a node can be read while others are prepared.
    plan: Arc<Plan>,
    kernels: Kernels,
    stream: Stream,
    /// Per slot: its copies.
    slots: Vec<Vec<wgpu::Buffer>>,
    parameters: Vec<wgpu::Buffer>,
    gradients: Vec<wgpu::Buffer>,
    moments: Vec<Vec<wgpu::Buffer>>,
    loss: wgpu::Buffer,
    /// (sum of squares, number not finite) of first-stage parts, and per bucket.
    norm_parts: wgpu::Buffer,
    norms: wgpu::Buffer,
    /// The two words of the last hash of a bucket, whose parts stand where those of norms do.
    hashed: wgpu::Buffer,
    /// Nodes and updates prepared so far.
    prepared: HashMap<NodeKey, Task>,
    updates: HashMap<UpdateKey, Task>,
    /// The norm of each bucket.
    norm_tasks: Vec<Task>,
}

impl GpuExecutor {
    /// Allocates everything that the plan needs. Runs what `kernels` certify and choose.
    ///
    /// # Errors
    /// A tensor or bucket over the device's limits, or too little memory; nothing is kept then. A
    /// kernel that is wrong on this driver.
    pub fn new(
        gpu: Gpu,
        plan: Plan,
        moments: usize,
        kernels: Kernels,
    ) -> Result<Self, DeviceError> {
        check_limits(&gpu, &plan)?;
        let gpu = Arc::new(gpu);
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
            hashed: gpu.storage("hash", 8)?,
            prepared: HashMap::new(),
            updates: HashMap::new(),
            norm_tasks: Vec::new(),
            stream: Stream::new(gpu.clone())?,
            kernels,
            gpu,
            plan: Arc::new(plan),
        };
        executor.prepare_norms(parts)?;
        Ok(executor)
    }

    fn prepare_norms(&mut self, parts: usize) -> Result<(), DeviceError> {
        for (index, gradients) in self.gradients.iter().enumerate() {
            let length = self.plan.buckets[index].length;
            let outputs = [&self.norm_parts, &self.norms];
            let binding = |operand| match operand {
                Operand::Input(_) => Binding::whole(gradients),
                Operand::Output(i) => Binding::whole(outputs[i]),
            };
            let dispatches = self.kernels.norm(&self.gpu, length, parts, index)?;
            let cost = norm_cost(length);
            let pipelines = &mut self.kernels.pipelines;
            let task = Task::new(&self.gpu, pipelines, &dispatches, &binding, cost)?;
            self.norm_tasks.push(task);
        }
        Ok(())
    }

    /// Where a tensor is bound: as many bytes as it takes at the plan's capacity, whatever
    /// the rows of a pass: kernels stop at the rows they are told.
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
        let call = pass.call(&plan.graph, node);
        let full = Pass { rows: plan.options.rows, ..*pass }.call(&plan.graph, node);
        let Variant { name, dispatches } = self.kernels.variant(&self.gpu, &call, &full)?;
        if let Some(task) = self.prepared.get_mut(&key) {
            task.refresh(dispatches);
            return Ok(());
        }
        let bind = |ids: &[TensorId]| -> Vec<Binding> {
            ids.iter().map(|id| self.binding(*id, pass.copy)).collect()
        };
        let (inputs, outputs) = (bind(&node.inputs), bind(&node.outputs));
        let binding = |operand| match operand {
            Operand::Input(i) => inputs[i].clone(),
            Operand::Output(i) => outputs[i].clone(),
        };
        let cost = (twin.cost)(&call);
        let pipelines = &mut self.kernels.pipelines;
        let mut task = Task::new(&self.gpu, pipelines, &dispatches, &binding, cost)?;
        task.variant = name;
        self.prepared.insert(key, task);
        Ok(())
    }

    /// Prepares an update at first use, and sets its numbers; where it is then.
    fn prepare_update(
        &mut self,
        bucket: BucketId,
        update: &Update,
        range: &UpdateRange,
    ) -> Result<UpdateKey, DeviceError> {
        let dispatch = self.kernels.update(&self.gpu, update, range)?;
        let index = bucket.index();
        let key = (index, dispatch.shader.entry);
        if let Some(task) = self.updates.get_mut(&key) {
            task.refresh(vec![dispatch]);
        } else {
            let binding = |operand| match operand {
                Operand::Input(_) => Binding::whole(&self.gradients[index]),
                Operand::Output(0) => Binding::whole(&self.parameters[index]),
                Operand::Output(moment) => Binding::whole(&self.moments[moment - 1][index]),
            };
            let (dispatches, cost) = ([dispatch], update_cost(update, range));
            let task =
                Task::new(&self.gpu, &mut self.kernels.pipelines, &dispatches, &binding, cost)?;
            self.updates.insert(key, task);
        }
        Ok(key)
    }

    fn bank(&self, bank: Bank, bucket: BucketId) -> &wgpu::Buffer {
        match bank {
            Bank::Parameters => &self.parameters[bucket.index()],
            Bank::Gradients => &self.gradients[bucket.index()],
            Bank::Moment(moment) => &self.moments[moment][bucket.index()],
        }
    }

    fn read_range(
        &mut self,
        buffer: &wgpu::Buffer,
        offset: u64,
        count: usize,
    ) -> Result<Vec<f32>, DeviceError> {
        let mut values = vec![0.0; count];
        let range = (buffer, offset, (count * ELEMENT_BYTES) as u64);
        self.stream.read(&[range], bytemuck::cast_slice_mut(&mut values))?;
        Ok(values)
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
    match gpu.loop_iterations_max() {
        Some(limit) => check_loops(gpu, plan, limit),
        None => Ok(()),
    }
}

/// Refuses a plan of which an invocation would make more iterations than the driver lets it.
fn check_loops(gpu: &Gpu, plan: &Plan, limit: usize) -> Result<(), DeviceError> {
    let random = Random { step_key: Key::new(0), training: true };
    let full = Pass { copy: 0, rows: plan.options.rows, random };
    let calls = plan.graph.nodes.iter().map(|node| full.call(&plan.graph, node));
    let longest = calls.max_by_key(Call::iterations);
    let Some(call) = longest.filter(|call| call.iterations() > limit) else { return Ok(()) };
    let (adapter, what) = (gpu.name.clone(), call.op.to_string());
    Err(DeviceError::LoopTooLong { adapter, what, iterations: call.iterations(), limit })
}

/// The most bytes of a tensor or a bucket that the device binds and that shaders can index.
fn tensor_bytes_max(limits: &Limits) -> u64 {
    limits.binding_bytes.min(ELEMENTS_MAX * ELEMENT_BYTES as u64)
}

impl Executor for GpuExecutor {
    fn name(&self) -> &str {
        &self.gpu.name
    }

    fn plan(&self) -> &Plan {
        &self.plan
    }

    fn pulse(&self) -> Pulse {
        self.gpu.pulse.clone()
    }

    fn fault(&mut self, fault: Injected) -> Result<(), DeviceError> {
        super::fault::have(fault, &self.gpu, &mut self.kernels.pipelines)
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
            self.stream.upload(&self.slots[slot.index()][copy], 0, bytes)?;
        }
        Ok(())
    }

    fn begin_step(&mut self) -> Result<(), DeviceError> {
        self.stream.begin_step()?;
        self.gradients.iter().chain([&self.loss]).for_each(|buffer| self.stream.clear(buffer));
        Ok(())
    }

    fn run(&mut self, nodes: Range<usize>, pass: &Pass) -> Result<(), DeviceError> {
        for index in nodes {
            self.prepare_node(index, pass)?;
            if let Some(task) = self.prepared.get(&self.key(index, pass)) {
                self.stream.run(task)?;
            }
        }
        self.stream.breathe()
    }

    fn finish_step(&mut self) -> Result<StepSums, DeviceError> {
        for task in &self.norm_tasks {
            self.stream.run(task)?;
        }
        let norms = 2 * self.norm_tasks.len();
        let mut values = vec![0f32; 2 + norms];
        let ranges: [ReadRange; 2] =
            [(&self.loss, 0, 8), (&self.norms, 0, (norms * ELEMENT_BYTES) as u64)];
        let busy = self.stream.report(&ranges, bytemuck::cast_slice_mut(&mut values))?;
        let gradients =
            values[2..].chunks_exact(2).map(|pair| (f64::from(pair[0]), pair[1] as u64));
        Ok(StepSums {
            loss: f64::from(values[0]),
            count: f64::from(values[1]),
            gradients: gradients.collect(),
            busy,
        })
    }

    fn loss(&mut self) -> Result<(f64, f64), DeviceError> {
        let values = self.read_range(&self.loss.clone(), 0, 2)?;
        Ok((f64::from(values[0]), f64::from(values[1])))
    }

    fn update(
        &mut self,
        bucket: BucketId,
        update: &Update,
        range: &UpdateRange,
    ) -> Result<(), DeviceError> {
        let key = self.prepare_update(bucket, update, range)?;
        self.updates.get(&key).map_or(Ok(()), |task| self.stream.run(task))
    }

    fn flush(&mut self) -> Result<(), DeviceError> {
        self.stream.submit().map(|_| ())
    }

    fn read(&mut self, tensor: TensorId, pass: &Pass) -> Result<Vec<f32>, DeviceError> {
        let at = self.binding(tensor, pass.copy);
        let count = self.plan.graph.tensor(tensor).shape.elements(pass.rows);
        self.read_range(&at.buffer, at.offset, count)
    }

    fn read_bank(&mut self, bank: Bank, bucket: BucketId) -> Result<Vec<f32>, DeviceError> {
        let length = self.plan.buckets[bucket.index()].length;
        self.read_range(&self.bank(bank, bucket).clone(), 0, length)
    }

    fn hash(&mut self, bank: Bank, bucket: BucketId) -> Result<u64, DeviceError> {
        let length = self.plan.buckets[bucket.index()].length;
        let words = self.bank(bank, bucket).clone();
        let outputs = [&self.norm_parts, &self.hashed];
        let binding = |operand| match operand {
            Operand::Input(_) => Binding::whole(&words),
            Operand::Output(i) => Binding::whole(outputs[i]),
        };
        let parts = self.norm_parts.size() as usize / (2 * ELEMENT_BYTES);
        let dispatches = self.kernels.hash(&self.gpu, length, parts)?;
        let (pipelines, cost) = (&mut self.kernels.pipelines, norm_cost(length));
        let task = Task::new(&self.gpu, pipelines, &dispatches, &binding, cost)?;
        self.stream.run(&task)?;
        let mut lanes = [0u32; 2];
        self.stream.read(&[(&self.hashed, 0, 8)], bytemuck::cast_slice_mut(&mut lanes))?;
        Ok(hash::join(lanes))
    }

    fn write_bank(
        &mut self,
        bank: Bank,
        bucket: BucketId,
        values: &[f32],
    ) -> Result<(), DeviceError> {
        assert_eq!(self.plan.buckets[bucket.index()].length, values.len(), "written whole");
        let buffer = self.bank(bank, bucket).clone();
        self.stream.upload(&buffer, 0, bytemuck::cast_slice(values))?;
        self.gpu.check()
    }

    fn time(&mut self, work: &Work, pass: &Pass) -> Result<Option<Timing>, DeviceError> {
        let Some(mut timing) = Timing::of(&self.plan, work, pass) else { return Ok(None) };
        let task = match work {
            Work::Node(index) => {
                self.prepare_node(*index, pass)?;
                self.prepared.get(&self.key(*index, pass))
            }
            Work::Norm(bucket) => self.norm_tasks.get(bucket.index()),
            Work::Update(bucket, update, range) => {
                let key = self.prepare_update(*bucket, update, range)?;
                self.updates.get(&key)
            }
        };
        let Some(task) = task else { return Ok(None) };
        timing.seconds = self.stream.time(task)?;
        timing.variant.clone_from(&task.variant);
        Ok(Some(timing))
    }
}

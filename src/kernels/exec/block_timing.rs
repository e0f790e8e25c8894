//! Timing of the blocks of a model on a device that holds some or all of them: their passes, and
//! the transfers of the tensors that they receive from blocks of other devices.

use std::time::Instant;

use super::{Executor, PassContext, load};
use crate::RandomContext;
use crate::device::DeviceError;
use potluck_core::rng::Key;
use potluck_core::{DType, HostTensor, SegmentId, TensorId};
use potluck_graph::{PassKind, Plan, Region, Role, Segment};

/// Timed waits for an idle device; the fastest counts.
const IDLE_REPEATS: usize = 3;

/// Standard deviation of the values that stand in for the tensors of other blocks: neither zeros
/// nor numbers so small that a processor computes with them slowly.
const DEVIATION: f64 = 0.1;

/// Different values in such a tensor; they repeat.
const VALUES: usize = 1 << 12;

/// Measured seconds of a block: for its passes of one micro-batch, and per element to read back or
/// to write a tensor of a block that the device does not hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct BlockTiming {
    pub forward_s: f64,
    pub backward_input_s: f64,
    pub backward_weight_s: f64,
    pub read_s: f64,
    pub write_s: f64,
}

impl BlockTiming {
    /// Returns the timing of a block that a device cannot run.
    pub fn impossible() -> Self {
        Self {
            forward_s: f64::INFINITY,
            backward_input_s: f64::INFINITY,
            backward_weight_s: f64::INFINITY,
            read_s: 0.0,
            write_s: 0.0,
        }
    }

    /// The lesser of the two values of each time.
    pub fn fastest(self, other: Self) -> Self {
        Self {
            forward_s: self.forward_s.min(other.forward_s),
            backward_input_s: self.backward_input_s.min(other.backward_input_s),
            backward_weight_s: self.backward_weight_s.min(other.backward_weight_s),
            read_s: self.read_s.min(other.read_s),
            write_s: self.write_s.min(other.write_s),
        }
    }
}

/// Returns the segments that a device with a part of a plan runs, in order, each with the tensors
/// of other blocks that it is the first to read.
fn arrivals(plan: &Plan) -> Vec<(SegmentId, Vec<TensorId>)> {
    let mut known = vec![false; plan.graph.tensors.len()];
    let mut arrivals = Vec::new();
    let all = (0..plan.segments.len() as u32).map(SegmentId);
    for id in all.filter(|id| plan.holds_segment(*id)) {
        let mut arriving = Vec::new();
        for node in &plan.graph.nodes[plan.segments[id.index()].nodes.clone()] {
            for input in &node.inputs {
                let root = plan.graph.root(*input);
                let tensor = plan.graph.tensor(root);
                let is_float = tensor.role == Role::Activation && tensor.dtype == DType::F32;
                if is_float && !known[root.index()] {
                    known[root.index()] = true;
                    arriving.push(root);
                }
            }
            for output in &node.outputs {
                known[plan.graph.root(*output).index()] = true;
            }
        }
        arrivals.push((id, arriving));
    }
    arrivals
}

/// Times the passes of each block that a device holds for a micro-batch of `rows` samples, and the
/// transfers of the tensors from blocks that it does not hold: the fastest of `repeats` repetitions
/// after one warm-up. The duration of a wait for an idle device is subtracted. Returns an entry per
/// block of the model; those of blocks that the device does not hold are zero.
///
/// # Errors
/// Returns `DeviceError` if the device fails.
pub(super) fn time_blocks<E: Executor + ?Sized>(
    device: &mut E,
    inputs: &[(TensorId, HostTensor)],
    rows: usize,
    repeats: u32,
) -> Result<Vec<BlockTiming>, DeviceError> {
    let arrivals = arrivals(device.plan());
    let filling = Filling::new(rows);
    load(device, inputs, 0)?;
    repetition(device, &arrivals, &filling, 0.0)?;
    let mut idle_s = f64::INFINITY;
    for _ in 0..IDLE_REPEATS {
        idle_s = idle_s.min(seconds(device, |_| Ok(()))?);
    }
    let mut best = repetition(device, &arrivals, &filling, idle_s)?;
    for _ in 1..repeats {
        let again = repetition(device, &arrivals, &filling, idle_s)?;
        for (best, again) in best.iter_mut().zip(again) {
            *best = best.fastest(again);
        }
    }
    Ok(best)
}

/// Values that stand in for the tensors of other blocks.
struct Filling {
    rows: usize,
    values: Vec<f32>,
}

impl Filling {
    fn new(rows: usize) -> Self {
        let key = Key::new(1);
        let mut values = Vec::with_capacity(VALUES);
        for index in 0..VALUES {
            values.push((DEVIATION * key.normal(index as u64)) as f32);
        }
        Self { rows, values }
    }

    /// Places of tensors, with values for them.
    fn values(&self, plan: &Plan, tensors: &[TensorId]) -> Vec<(Region, Vec<f32>)> {
        let mut filled = Vec::with_capacity(tensors.len());
        for tensor in tensors {
            let place = self.place(plan, *tensor);
            let values = self.values.iter().copied().cycle().take(place.length()).collect();
            filled.push((place, values));
        }
        filled
    }

    fn place(&self, plan: &Plan, tensor: TensorId) -> Region {
        let range = 0..plan.graph.tensor(tensor).shape.elements(self.rows);
        Region::Tensor { tensor, micro_batch: 0, range }
    }
}

/// Runs the segments of the device once, and returns the times of each block.
fn repetition<E: Executor + ?Sized>(
    device: &mut E,
    arrivals: &[(SegmentId, Vec<TensorId>)],
    filling: &Filling,
    idle_s: f64,
) -> Result<Vec<BlockTiming>, DeviceError> {
    let random = RandomContext { step_key: Key::new(0), training: true };
    let pass = PassContext { micro_batch: 0, rows: filling.rows, loss_scale: 1.0, random };
    let blocks = device.plan().graph.blocks.len().max(1);
    let mut timings = vec![BlockTiming::default(); blocks];
    let mut elements = vec![0; blocks];
    seconds(device, |device| device.begin_step())?;
    for (id, arriving) in arrivals {
        let Segment { phase, block, nodes, .. } = device.plan().segments[id.index()].clone();
        let timing = &mut timings[block as usize];
        let values = filling.values(device.plan(), arriving);
        if !values.is_empty() {
            let written = seconds(device, |device| {
                for (place, values) in &values {
                    device.write_place(place, values)?;
                }
                Ok(())
            })?;
            timing.write_s += (written - idle_s).max(0.0);
            elements[block as usize] += values.iter().map(|(_, one)| one.len()).sum::<usize>();
        }
        let run_s = (seconds(device, |device| device.run(nodes, &pass))? - idle_s).max(0.0);
        match phase {
            PassKind::Forward => timing.forward_s += run_s,
            PassKind::BackwardInput => timing.backward_input_s += run_s,
            PassKind::BackwardWeight => timing.backward_weight_s += run_s,
        }
    }
    for (id, arriving) in arrivals {
        let block = device.plan().segments[id.index()].block as usize;
        timings[block].read_s += read_seconds(device, arriving, filling)?;
    }
    for (timing, elements) in timings.iter_mut().zip(elements) {
        timing.read_s /= elements.max(1) as f64;
        timing.write_s /= elements.max(1) as f64;
    }
    Ok(timings)
}

/// Seconds to read back tensors with their current values.
fn read_seconds<E: Executor + ?Sized>(
    device: &mut E,
    tensors: &[TensorId],
    filling: &Filling,
) -> Result<f64, DeviceError> {
    if tensors.is_empty() {
        return Ok(0.0);
    }
    let piece = device.readback_elements_max();
    let started = Instant::now();
    for tensor in tensors {
        let length = filling.place(device.plan(), *tensor).length();
        for start in (0..length).step_by(piece) {
            let range = start..(start + piece).min(length);
            device.start_readback(Region::Tensor { tensor: *tensor, micro_batch: 0, range })?;
        }
    }
    while device.next_readback(true)?.is_some() {}
    Ok(started.elapsed().as_secs_f64())
}

/// Seconds of some work, including the wait for its end.
fn seconds<E: Executor + ?Sized>(
    device: &mut E,
    work: impl FnOnce(&mut E) -> Result<(), DeviceError>,
) -> Result<f64, DeviceError> {
    let started = Instant::now();
    work(device)?;
    device.finish_step(&[])?;
    Ok(started.elapsed().as_secs_f64())
}

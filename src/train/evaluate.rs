//! The loss on held-out data: forward passes over windows that do not overlap.

use crate::base::rng::Key;
use crate::device::DeviceError;
use crate::exec::{Executor, Pass};
use crate::graph::Phase;
use crate::kernels::Random;

use super::step::{Inputs, load};

/// The most micro-batches of one evaluation, whose losses the device adds up in f32; the host
/// adds up evaluations in f64.
pub const BATCHES_PER_JOB: usize = 16;

/// The summed loss of `batches`, which are (rows, inputs), and how many targets it counts.
pub fn evaluate(
    device: &mut dyn Executor,
    batches: impl Iterator<Item = (usize, Inputs)>,
) -> Result<(f64, f64), DeviceError> {
    device.begin_step()?;
    for (rows, inputs) in batches {
        load(device, &inputs, 0)?;
        forward(device, rows)?;
    }
    device.loss()
}

/// The forward pass without dropout, on inputs that are loaded. Outputs can be read with the
/// returned pass until something else runs.
pub fn forward(device: &mut dyn Executor, rows: usize) -> Result<Pass, DeviceError> {
    let random = Random { step_key: Key::new(0), training: false };
    let pass = Pass { copy: 0, rows, random };
    let segments: Vec<_> = device.plan().phase(Phase::F).collect();
    for segment in segments {
        let nodes = device.plan().segments[segment.index()].nodes.clone();
        device.run(nodes, &pass)?;
    }
    Ok(pass)
}

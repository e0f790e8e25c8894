//! One step on one device: the interpreter's actions performed on an executor.

use std::sync::Arc;

use crate::base::rng::Key;
use crate::base::{BucketId, Rank, TensorId};
use crate::device::DeviceError;
use crate::exec::{Bank, Executor, Input, Pass, StepSums};
use crate::graph::{Update, UpdateRange};
use crate::kernels::Random;
use crate::parallel::{Action, Event, Interpreter, Outcome, Program, Verdict, Vote};

use super::fault::{Fault, Faults, Point};

/// An input of a micro-batch, with the values of its rows.
#[derive(Clone, Debug, PartialEq)]
pub enum Values {
    Float(Vec<f32>),
    Int(Vec<u32>),
}

/// The elements in the order of the dimensions, whatever the array's memory layout.
impl<D: ndarray::Dimension> From<ndarray::Array<f32, D>> for Values {
    fn from(array: ndarray::Array<f32, D>) -> Self {
        Self::Float(array.iter().copied().collect())
    }
}

/// The elements in the order of the dimensions, whatever the array's memory layout.
impl<D: ndarray::Dimension> From<ndarray::Array<u32, D>> for Values {
    fn from(array: ndarray::Array<u32, D>) -> Self {
        Self::Int(array.iter().copied().collect())
    }
}

/// What one micro-batch is made of.
pub type Inputs = Vec<(TensorId, Values)>;

/// Everything that a step needs.
#[derive(Clone, Debug)]
pub struct StepInput {
    pub step: u64,
    pub program: Arc<Program>,
    /// Per micro-batch of the program.
    pub micro_batches: Vec<Inputs>,
    /// The key of the run; the step's is derived from it.
    pub run_key: Key,
    /// The update, if the step is committed.
    pub update: Update,
    /// 0: no clipping.
    pub clip: f64,
    /// For tests.
    pub faults: Faults,
}

/// How a step went.
#[derive(Clone, Debug, PartialEq)]
pub struct StepReport {
    pub verdict: Verdict,
    pub updated: bool,
    /// As in [`StepSums::busy`].
    pub busy: Option<f64>,
}

/// Runs one step: forward and backward of every micro-batch, the verdict, the update.
pub fn run_step(device: &mut dyn Executor, input: &StepInput) -> Result<StepReport, DeviceError> {
    let random = Random { step_key: input.run_key.step(input.step), training: true };
    let mut interpreter = Interpreter::new(&input.program);
    let (mut verdict, mut busy) = (None, None);
    fault(device, input, Point::Forward)?;
    device.begin_step()?;
    while let Some(action) = interpreter.poll_action() {
        match action {
            Action::Load { micro_batch } => load(device, &input.micro_batches[micro_batch], 0)?,
            Action::Run { segment, micro_batch } => {
                let nodes = device.plan().segments[segment.index()].nodes.clone();
                let rows = input.program.micro_batches[micro_batch].rows as usize;
                device.run(nodes, &Pass { copy: 0, rows, random })?;
            }
            Action::Vote => {
                fault(device, input, Point::Backward)?;
                let sums = device.finish_step()?;
                let decided = Verdict::from_votes(&[vote(Rank(0), &sums)]);
                busy = sums.busy;
                fault(device, input, Point::Verdict)?;
                interpreter.handle(Event::Verdict(decided.clone()));
                verdict = Some(decided);
            }
            Action::Update { bucket } => {
                // A program updates after its verdict only.
                let Some(verdict) = &verdict else { continue };
                let totals = verdict.totals();
                let clip = crate::optim::clip_factor(totals.gradient_norm, input.clip);
                let layout = &device.plan().buckets[bucket.index()];
                let range = UpdateRange {
                    start: 0,
                    length: layout.length,
                    decay_end: layout.decay_end,
                    gradient_scale: (clip / totals.count) as f32,
                };
                device.update(bucket, &input.update, &range)?;
                fault(device, input, Point::Update)?;
            }
            Action::Finish(outcome) => {
                device.flush()?;
                let updated = outcome == Outcome::Updated;
                let verdict = verdict.take().unwrap_or_else(|| Verdict::from_votes(&[]));
                return Ok(StepReport { verdict, updated, busy });
            }
        }
    }
    unreachable!("a program ends with Finish, and only a vote waits for an event")
}

/// Puts the inputs of a micro-batch into a copy of the stash.
pub fn load(device: &mut dyn Executor, inputs: &Inputs, copy: usize) -> Result<(), DeviceError> {
    for (tensor, values) in inputs {
        let values = match values {
            Values::Float(values) => Input::Float(values),
            Values::Int(values) => Input::Int(values),
        };
        device.set_input(*tensor, copy, values)?;
    }
    Ok(())
}

fn vote(rank: Rank, sums: &StepSums) -> Vote {
    Vote {
        rank,
        loss: sums.loss,
        count: sums.count,
        sum_squares: sums.gradients.iter().map(|(squares, _)| squares).sum(),
        not_finite: sums.gradients.iter().map(|(_, bad)| bad).sum(),
    }
}

/// Makes what is planned for a point of the step happen on the device.
fn fault(device: &mut dyn Executor, input: &StepInput, point: Point) -> Result<(), DeviceError> {
    match input.faults.at(point, input.step) {
        Some(Fault::Nan) if point == Point::Forward => poison(device, Bank::Parameters),
        Some(Fault::Nan) => poison(device, Bank::Gradients),
        Some(other) => other.of_device().map_or(Ok(()), |injected| device.fault(injected)),
        None => Ok(()),
    }
}

/// Puts a NaN into the first bucket of a bank: a fault for tests.
fn poison(device: &mut dyn Executor, bank: Bank) -> Result<(), DeviceError> {
    let mut values = device.read_bank(bank, BucketId(0))?;
    values[0] = f32::NAN;
    device.write_bank(bank, BucketId(0), &values)
}

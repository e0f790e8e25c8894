//! Inputs of the ranks of a node with a copy of the data: read there, one step ahead, instead of
//! sent by the first node.

use std::collections::BTreeMap;
use std::sync::{Arc, mpsc};
use std::thread;

use crate::runtime::step::Inputs;
use potluck_core::{Rank, TensorId};
use potluck_parallel::{MicroBatch, Program};

/// Data of a node for the inputs of its ranks.
pub trait InputSource: Send + Sync {
    /// Returns the inputs `wanted` of a micro-batch of a step.
    ///
    /// # Errors
    /// Returns a sentence on the sample that cannot be read.
    fn micro_batch(
        &self,
        step: u64,
        micro_batch: &MicroBatch,
        wanted: &[TensorId],
    ) -> Result<Inputs, String>;
}

/// Inputs of a rank for one step, per micro-batch of its program.
type StepInputs = Result<Vec<Inputs>, String>;

/// Reader of the inputs of a node's ranks.
pub(crate) struct OwnInputs {
    orders: mpsc::Sender<Order>,
    /// By rank: the inputs of its next step, used if that has the same micro-batches.
    ahead: BTreeMap<Rank, Ahead>,
}

/// Inputs to read, and their receiver.
struct Order {
    step: u64,
    program: Arc<Program>,
    wanted: Arc<[TensorId]>,
    inputs: mpsc::Sender<StepInputs>,
}

struct Ahead {
    step: u64,
    program: Arc<Program>,
    inputs: mpsc::Receiver<StepInputs>,
}

impl OwnInputs {
    /// Starts the reading thread, which ends when this is dropped.
    ///
    /// # Errors
    /// Returns the error of the system if it cannot start the thread.
    pub fn start(source: Arc<dyn InputSource>) -> std::io::Result<Self> {
        let (orders, queue) = mpsc::channel::<Order>();
        thread::Builder::new().name("loader".into()).spawn(move || {
            for Order { step, program, wanted, inputs } in queue {
                let read: StepInputs = program
                    .micro_batches
                    .iter()
                    .map(|part| source.micro_batch(step, part, &wanted))
                    .collect();
                // Fails if the rank has ended.
                let _ = inputs.send(read);
            }
        })?;
        Ok(Self { orders, ahead: BTreeMap::new() })
    }

    /// Returns the inputs `wanted` of a rank for a step, and begins to read the next step's.
    ///
    /// # Errors
    /// Returns a sentence on the sample that cannot be read.
    pub(crate) fn of_step(
        &mut self,
        rank: Rank,
        step: u64,
        program: &Arc<Program>,
        wanted: &Arc<[TensorId]>,
    ) -> StepInputs {
        let ahead = self
            .ahead
            .remove(&rank)
            .filter(|one| one.step == step && one.program.micro_batches == program.micro_batches);
        let here = match ahead {
            Some(ahead) => ahead.inputs,
            None => self.order(step, program, wanted),
        };
        let program_ahead = Arc::clone(program);
        let inputs = self.order(step + 1, program, wanted);
        self.ahead.insert(rank, Ahead { step: step + 1, program: program_ahead, inputs });
        here.recv().unwrap_or_else(|_| Err("the thread that reads samples has ended".into()))
    }

    fn order(
        &self,
        step: u64,
        program: &Arc<Program>,
        wanted: &Arc<[TensorId]>,
    ) -> mpsc::Receiver<StepInputs> {
        let (inputs, read) = mpsc::channel();
        let program = Arc::clone(program);
        let wanted = Arc::clone(wanted);
        // If the thread has ended, the receiver reports it.
        let _ = self.orders.send(Order { step, program, wanted, inputs });
        read
    }
}

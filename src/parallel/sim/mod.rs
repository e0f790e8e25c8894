//! Simulation of distributed training with virtual ranks: the decision code of a real run, under a
//! virtual clock, with given speeds and links and injected faults. A run is a function of its
//! [`Scenario`], so every result can be replayed.
//!
//! ```text
//! coordinator thread: Coordinator -- receives votes, failures, ends; checks deadlines; sends
//!           |                        verdicts, aborts, next rounds, in order per rank
//! rank:  device thread: Interpreter, PeerTransfers -- Mailbox --> ring thread: RingWorker
//!           | commands, readbacks     <-------------- Mailbox --- (ExchangeDriver, Exchange)
//!        device                                                      | messages to peers
//! ```
//!
//! The types named above, with the mailboxes and their bounds, are the same in `runtime`. The
//! simulator supplies the device, the links and the clock, and the loops around these types, which
//! in a real run block a thread.
//!
//! Modelled: a device performs the commands of its device thread in order, while the thread runs
//! on; the thread waits for its device as a real one does (the sums of a step, an addition on the
//! device, a readback), and for messages otherwise. A ring thread processes one message at a time,
//! adds and forwards. Readback, upload and each link between two ranks carry one message at a time,
//! inputs that come with the order of a step among them, and the number of readback slots may be
//! limited ([`Scenario::slots_max`]). Everything takes the time given by [`Costs`] and
//! [`LinkModel`]s plus a random part that depends on the seed; the seed also orders simultaneous
//! events. Messages between rings may overtake each other. Ranks die, between any two events, and
//! hang ([`SimulatedFault`]); the coordinator detects hung ranks and deadlocks by the activity of
//! the threads, as in a real run. Values are real: gradients are a
//! function of a rank's samples and its parameters, and they are sent and added as in a real run,
//! so that results can be compared to the bit with [`reference()`], which has no timing of ranks
//! and no messages. A device records the tensor and the micro-batch in each copy of each slot of
//! its plan; reading another one is a violation, as is the arrival of wrong values of a piece.
//!
//! Not modelled: transfers that slow down each other or the device's work; the sizes of memories;
//! a link that loses or changes a message, or partitions (a process has none, and between machines
//! the transport closes a connection before that); a coordinator thread that dies (its process
//! ends with it); nodes, durable votes, and a step that runs again after it was discarded.

pub mod check;
mod coordinator_thread;
pub(crate) mod cost_model;
mod device;
mod driver;
mod edges;
mod memory;
mod model_part;
pub mod queue;
pub mod reference;
pub mod report;
mod ring;
pub mod scenario;
pub mod timeline;
pub mod values;
pub mod world;

pub use check::check;
pub use cost_model::{MachineModel, one_step, step_seconds};
pub use model_part::ModelPart;
pub use reference::reference;
pub use report::{End, RankReport, SimulationReport};
pub use scenario::{
    Costs, Detection, FaultTime, InputPath, InputTransfer, LinkModel, Scenario, SeededBug,
    SegmentCost, SimulatedFault,
};
pub use timeline::{Timeline, VirtualSpan, VirtualTrack};
pub use values::hash;
pub use world::run;

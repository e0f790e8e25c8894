//! Simulation of distributed training with virtual ranks: the interpreter, programs, exchanges
//! and coordinator of a real run under a virtual clock, with given speeds and links and injected
//! faults. A run is a function of its [`Scenario`], so every result can be replayed.
//!
//! ```text
//! coordinator thread: Coordinator -- receives votes, failures, reports; sends verdicts, next steps
//!           |  control messages, in order per rank
//! rank:  device thread: Interpreter -- readback --> ring thread: Exchange -- messages --> peers
//!        (runs segments, updates) <-- upload, done --
//! ```
//!
//! Modelled: each rank has a device thread, which does one thing at a time and reads its messages
//! in between, and a ring thread, which processes one item at a time, adds and forwards.
//! Readback, upload and each link between two ranks carry one chunk at a time, and the number of
//! readback slots may be limited ([`Scenario::places_max`]). Everything takes the time given by
//! [`Costs`] and [`LinkModel`]s plus a random part that depends on the seed; the seed also orders
//! simultaneous events. Messages between rings may overtake each other. Ranks die, between any
//! two events, and hang ([`SimulatedFault`]). Values are real: gradients are a function of a rank's
//! samples and its parameters, and they are sent and added as in a real run, so that results can
//! be compared to the bit with [`reference()`], which has no timing of ranks and no messages.
//!
//! Not modelled: a device thread that records work ahead of its device; transfers that slow down
//! each other or the device's work; memory; a link that loses or changes a message, or partitions
//! (a process has none, and between machines the transport closes a connection before that); a
//! coordinator thread that dies (its process ends with it); nodes, generations and durable votes.

pub mod check;
pub mod cost_model;
mod driver;
pub mod main_thread;
pub mod queue;
pub mod reference;
pub mod report;
pub mod ring;
pub mod scenario;
pub mod timeline;
mod transfers;
pub mod values;
pub mod world;

pub use check::check;
pub use cost_model::{MachineModel, one_step, step_seconds};
pub use reference::reference;
pub use report::{End, RankReport, SimulationReport};
pub use scenario::{
    Costs, Detection, FaultTime, LinkModel, Scenario, SeededBug, SegmentCost, SimulatedFault,
};
pub use timeline::{Timeline, VirtualSpan, VirtualTrack};
pub use values::hash;
pub use world::run;

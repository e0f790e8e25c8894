//! Virtual ranks: the interpreter, its programs, the exchanges and the coordinator of a real run
//! under a virtual clock, with speeds and links that are given and faults that are planned. A run
//! is a function of its [`Scenario`], so whatever it shows can be replayed.
//!
//! ```text
//!          main: Coordinator -- votes, failures, reports in; announcements, next steps out
//!            |  control messages, in order per rank
//! rank:   driver: Interpreter -- read-back --> ring: Exchange -- messages --> rings of the others
//!         (runs segments, updates)  <-- upload, done --
//! ```
//!
//! What is modelled. Each rank has a driver, which does one thing at a time and looks into its
//! mail in between, and a ring, which takes one item at a time, adds and forwards. Read-back,
//! upload and each link between two ranks carry one chunk at a time, and there may be few places
//! to read back to ([`Scenario::places_max`]). Everything takes the time
//! that [`Costs`] and [`LinkModel`]s say, and a random part by seed; what happens at the same time
//! happens in an order by seed. Messages between rings may overtake each other. Ranks die, between
//! any two events, and hang ([`Fault`]). Values are real: gradients are a function of a rank's
//! samples and its parameters, and they travel and are added as in a real run, so that results can
//! be compared to the bit with [`reference()`], which knows no ranks' timing and no messages.
//!
//! What is not. A driver that records work ahead of its device; transfers that slow each other or
//! the device's work down; memory; a link that loses or changes a message, or partitions (within a
//! process there is none, and between machines the transport closes a connection before that); a
//! main thread that dies (its process ends with it); nodes, generations and durable votes.

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
pub use report::{End, RankReport, Report};
pub use scenario::{
    Costs, Detection, Fault, FaultTime, LinkModel, Scenario, SeededBug, SegmentCost,
};
pub use timeline::{Lane, Span, Timeline};
pub use values::hash;
pub use world::run;

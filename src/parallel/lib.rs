//! Schedules of a step: instructions and programs, the interpreter that turns a program into
//! actions, the transfers between a device and its ring thread, the coordinator of the verdict, and
//! the placement of a run. Pure and sans-IO: `runtime` performs the actions on real devices.

mod answers;
pub mod collective;
pub mod comm;
pub mod coordinator;
mod edge;
mod edge_transfers;
mod error;
pub mod interpreter;
pub mod mesh;
mod options;
pub mod pipeline;
pub mod placement;
pub mod planner;
pub mod program;
mod reduce_site;
pub mod schedule;
pub mod sim;
mod token;
pub mod transfers;
pub mod verdict;

pub use answers::{DeviceLoss, MismatchAction};
pub use coordinator::{Announcement, Coordinator, Decision, Expiry};
pub use edge::{Edge, GroupReduction};
pub use edge_transfers::EdgeLayout;
pub use error::StepError;
pub use interpreter::{Action, Event, Interpreter, Outcome};
pub use mesh::{Axis, Coordinates, Mesh};
pub use options::{
    ExcludedDivisions, ParallelOptions, PipelineOptions, ShareChange, ShareChangeError, Shares,
    TENSOR_SHARE_MAX, TensorOptions,
};
pub use pipeline::{PipelinePrograms, PipelineRanks, PipelineRequest};
pub use placement::{PlacedCluster, PlacedNode, Placement, PlacementChange, RankPlacement};
pub use program::{
    Instruction, MicroBatch, Program, Share, SpreadPrograms, contiguous_shares, data_parallel,
    gradient_all_reduce, single_rank,
};
pub use reduce_site::ReduceSite;
pub use schedule::{PipelineSchedule, PipelineShape};
pub(crate) use schedule::{StagePass, StageWork};
pub use token::{Operation, Token};
pub use verdict::{GradientSquares, SkipReason, Verdict, Vote};

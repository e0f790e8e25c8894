//! Who computes what, when: instructions, the programs made of them, and the interpreter that
//! turns a program into actions. Pure and sans-IO: `train` performs the actions on real devices.

pub mod coordinator;
pub mod interpreter;
pub mod program;
pub mod verdict;

pub use coordinator::{Announcement, Coordinator};
pub use interpreter::{Action, Event, Interpreter, Outcome};
pub use program::{
    Collective, Instruction, MicroBatch, Program, Share, all_reduce, consecutive, data_parallel,
    one_rank,
};
pub use verdict::{Verdict, Vote};

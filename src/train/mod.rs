//! Training: the loop, the device's thread, data loading, evaluation, checkpoints, resume.
//!
//! [`run::train`] is the loop of `potluck train`; [`Trainer`] trains any graph from code.

pub mod diagnose;
pub mod driver;
pub mod error;
pub mod evaluate;
pub mod generate;
pub mod loader;
pub mod memory;
pub mod open;
pub mod profile;
pub mod progress;
pub mod ranks;
pub mod run;
pub mod runtime_error;
pub mod setup;
pub mod signals;
pub mod state;
pub mod step;
pub mod team;
pub mod text;
pub mod trainer;

pub use error::TrainError;
pub use step::Values;
pub use trainer::{Step, Trainer, TrainerOptions};

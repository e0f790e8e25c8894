//! Training: the loop, the device's thread, data loading, evaluation, checkpoints, resume.
//!
//! [`run::train`] is the loop of `potluck train`; [`Trainer`] trains any graph from code.

pub mod diagnose;
pub mod error;
pub mod evaluate;
pub mod generate;
pub mod loader;
pub mod profile;
pub mod progress;
pub mod ranks;
pub mod run;
pub mod setup;
pub mod signals;
pub mod state;
pub mod text;
pub mod trainer;

pub use crate::runtime::step::Values;
pub use error::TrainError;
pub use trainer::{Step, Trainer, TrainerOptions};

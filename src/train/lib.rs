//! Training: the loop, data loading, evaluation, checkpoints, resume, text generation.
//!
//! [`run::train`] is the loop of `potluck train`; [`Trainer`] trains any graph from code. Both use
//! a [`session::Session`].

mod best;
pub mod carried;
pub mod checkpoint;
pub mod config;
pub mod continuation;
mod cost_advice;
mod cost_meter;
pub mod error;
pub mod evaluate;
mod evaluated_part;
pub mod families;
pub mod generate;
pub mod gguf;
mod given_inputs;
pub mod given_parameters;
pub mod hugging_face;
pub mod keys;
pub mod language_model;
mod left_devices;
mod load_data;
pub mod loader;
mod loss_scale;
pub mod nodes;
mod nonfinite;
pub mod outputs;
mod predict;
mod predictor;
pub mod resolved;
pub mod run;
pub mod run_data;
pub mod runtime;
pub mod sampling;
pub mod session;
pub mod signals;
pub mod spec;
pub mod state;
pub mod task;
pub mod trainer;

pub use error::TrainError;
pub use potluck_parallel::{
    DeviceLoss, ExcludedDivisions, MismatchAction, PipelineOptions, PipelineSchedule, ShareChange,
    Shares, TensorOptions,
};
pub use predictor::{Predictor, PredictorOptions};
pub use trainer::{FitEnd, FitLength, FitOptions, FitReport, Step, Trainer, TrainerOptions};

//! State of a run for monitoring: snapshots that the run publishes, and an HTTP server that shows
//! them as a health check, as metrics of Prometheus, and as JSON.
//!
//! The run writes to a [`StatusBoard`] and never waits for a reader: each change is a new immutable
//! [`RunStatus`], which replaces the previous one.

mod board;
mod exposition;
mod health;
mod json;
mod run_status;
mod server;
mod token;

pub use board::{StatusBoard, StatusSink, StatusView};
pub use health::Health;
pub use run_status::{Patience, RunAbout, RunPhase, RunStatus, StatusNode, StatusNodes};
pub use server::{StatusError, StatusServer};
pub use token::StatusToken;

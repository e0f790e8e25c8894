//! Models: functions that build a graph; one file each, read from top to bottom.

pub mod gpt;
pub mod init;
pub mod mlp;

pub use gpt::{GptConfig, gpt};
pub use mlp::{MlpConfig, MlpLoss, mlp};

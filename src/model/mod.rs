//! Model definitions: functions that build a graph; one file each, read from top to bottom.

pub mod gpt;
pub mod init;
pub mod language;
pub mod mlp;
pub mod rnn;

pub use gpt::{GptConfig, gpt};
pub use language::LanguageModel;
pub use mlp::{MlpConfig, MlpLoss, mlp};
pub use rnn::{RnnConfig, rnn};

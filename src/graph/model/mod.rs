//! Model definitions: functions that build a graph; one file each, read from top to bottom.

pub mod cnn;
pub mod gpt;
pub(crate) mod language;
pub mod llama;
#[cfg(test)]
mod memory_tests;
pub mod mlp;
pub mod names;
mod pictures;
#[cfg(test)]
mod recompute_tests;
pub mod resnet;
pub mod rnn;
#[cfg(test)]
mod shard_tests;

pub use cnn::{CnnConfig, cnn};
pub use gpt::{GptConfig, NAMES as GPT_NAMES, gpt};
pub use language::{CacheInputs, LanguageModel};
pub use llama::{AttentionBias, LlamaConfig, NAMES as LLAMA_NAMES, llama};
pub use mlp::{MlpConfig, MlpLoss, mlp};
pub use pictures::PictureSizes;
pub use resnet::{PictureNorm, ResnetConfig, resnet};
pub use rnn::{RnnConfig, rnn};

//! Training and validation data: data sets (samples by index), texts, tokenizers, the built-in
//! corpus, and the sampler that assigns a sample to each slot of each step.

pub mod dataset;
pub mod error;
pub mod sampler;
pub mod text;
pub mod tokenizer;
pub mod world;

pub use dataset::{Dataset, DatasetInput, NamedInputs, TextWindows};
pub use error::DataError;
pub use sampler::{SampleIndex, Sampler};
pub use text::{Split, TextData, TokenizerChoice};
pub use tokenizer::{Decoder, Tokenizer, TokenizerKind};

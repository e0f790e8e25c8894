//! Training and validation data: data sets (samples by index), texts, tokenizers, readers of
//! samples and tokens on disk, the built-in corpus, and the sampler that assigns a sample to each
//! slot of each step.

pub mod augmentation;
pub mod builtin;
mod chat_template;
mod class_counts;
pub mod dataset;
mod description;
pub mod error;
pub mod formats;
pub mod normalization;
pub mod prepare;
mod sample_set;
pub mod sampler;
pub mod samples;
mod split;
pub mod text;
pub mod tokenizer;
pub mod tokens;

pub use augmentation::Augmentation;
pub use chat_template::{ChatMessage, ChatTemplate};
pub use dataset::{Dataset, DatasetInput, NamedInputs, StridedWindows, TextWindows};
pub use description::{DataDescription, SampleDescription, TargetNames, has_channels_last};
pub use error::DataError;
pub use formats::{KnownSamples, ReadOptions, SampleFormat, TargetKind};
pub use normalization::{MeanStd, Normalization};
pub use prepare::{PrepareError, PrepareOptions, PrepareProgress, Prepared, prepare};
pub use sample_set::{SampleOptions, SampleSet};
pub use sampler::{SampleIndex, Sampler};
pub use samples::{DataFile, Features, FileRole, LazyFeatures, LoadedSamples, Samples, Targets};
pub use split::{HELD_OUT_MAX, Split};
pub use text::{TextData, TokenizerChoice, is_json_lines};
pub use tokenizer::{Decoder, Tokenizer, TokenizerFile, TokenizerKind};
pub use tokens::{TokenFile, TokenWindows, is_described, is_token_file};

//! Models of text, and of tokens without a tokenizer.

mod sentences;

use super::{EvalContext, FinalMeasure, Task};
use crate::error::TrainError;
use crate::generate::{Ends, Generation, default_prompt, generate};
use crate::sampling::{Sampling, TextMemory};
use potluck_core::format::thousands;
use potluck_core::metrics::Unit;
use potluck_data::Tokenizer;
use potluck_graph::model::LanguageModel;

use sentences::{SentenceRequest, measure_sentences};

pub(super) use sentences::NAME as MEASURE;

/// Prediction of the next token of a text.
#[derive(Clone, Debug)]
pub struct TextTask {
    pub tokenizer: Tokenizer,
    pub model: LanguageModel,
    /// True if the text is the built-in corpus, whose sentences can be judged right or wrong.
    pub is_builtin: bool,
}

impl Task for TextTask {
    fn unit(&self) -> Unit {
        Unit::Tokens
    }

    fn summary(&self) -> String {
        format!("vocabulary {}", self.tokenizer.vocabulary())
    }

    fn measure(&self, ending: &EvalContext) -> Result<Option<FinalMeasure>, TrainError> {
        if !self.is_builtin {
            return Ok(None);
        }
        let EvalContext { units, rows, step, seed, stop } = *ending;
        let tokenizer = &self.tokenizer;
        let request = SentenceRequest { units, tokenizer, model: self.model, rows, step, seed };
        match measure_sentences(&request, stop)? {
            Some(sampled) => Ok(Some(sampled.into_measure())),
            None => Ok(None),
        }
    }

    /// Generates text that starts at a line break.
    fn sample(&self, ending: &EvalContext, tokens: u64) -> Result<String, TrainError> {
        let tokenizer = &self.tokenizer;
        let vocabulary = tokenizer.vocabulary();
        let sampling = Sampling { temperature: 0.8, ..Sampling::new(vocabulary, ending.seed) };
        let prompt = tokenizer.encode(default_prompt(tokenizer))?;
        let generation = Generation {
            units: ending.units,
            tokenizer,
            model: self.model,
            prompts: &[prompt],
            sampling,
            ends: &Ends::default(),
            count: tokens,
            turn: 0,
        };
        let texts = generate(&generation, &mut TextMemory::default(), |_, _| !(ending.stop)())?;
        Ok(texts.concat())
    }
}

/// Prediction of the next token, for tokens without a known tokenizer.
#[derive(Clone, Copy, Debug)]
pub struct TokenTask {
    pub vocabulary: usize,
}

impl Task for TokenTask {
    fn unit(&self) -> Unit {
        Unit::Tokens
    }

    fn summary(&self) -> String {
        format!("vocabulary {}", thousands(self.vocabulary as f64))
    }
}

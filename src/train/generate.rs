//! Text generation: continues a prompt token by token, with streaming output.

use super::error::TrainError;
use super::sampling::{Continuation, Sampling, next_tokens_of};
use crate::base::Site;
use crate::base::rng::Key;
use crate::data::Tokenizer;
use crate::data::tokenizer::Decoder;
use crate::model::LanguageModel;
use crate::runtime::pipelines::ForwardUnits;
use crate::runtime::step::NextStates;

/// Returns the default prompt: a line break, or the first token if the vocabulary has none.
pub fn default_prompt(tokenizer: &Tokenizer) -> String {
    let line_break = "\n";
    match tokenizer.encode(line_break) {
        Ok(_) => line_break.into(),
        Err(_) => tokenizer.decode(&[0]),
    }
}

/// Continues `prompt` by `count` tokens on the first of the units, and returns the text. Calls
/// `piece` with each part of the text as soon as its characters are complete; `piece` may return
/// `false` to stop there.
///
/// # Errors
/// Returns `TrainError` if the prompt is empty or has a character outside the vocabulary, or if
/// the device fails.
pub fn generate(
    units: ForwardUnits,
    tokenizer: &Tokenizer,
    model: LanguageModel,
    prompt: &str,
    sampling: &Sampling,
    count: u64,
    mut piece: impl FnMut(&str) -> bool,
) -> Result<String, TrainError> {
    let mut tokens = tokenizer.encode(prompt)?;
    if tokens.is_empty() {
        return Err(TrainError::InvalidRequest(
            "the prompt is empty; give at least one token".into(),
        ));
    }
    let sampling = *sampling;
    let mut decoder = Decoder::new(tokenizer);
    let mut text = String::new();
    let key = Key::new(sampling.seed).site(Site(u32::MAX));
    let mut states = NextStates::new();
    let mut next_of = |tokens: &[u32], uniform: f64| {
        if !model.goes_by_token {
            states.clear();
        }
        let row = [Continuation::new(tokens, model.context, uniform)];
        Ok::<u32, TrainError>(next_tokens_of(units, 0, &model, (&row, &mut states), &sampling)?[0])
    };
    if model.goes_by_token {
        for end in 1..tokens.len() {
            next_of(&tokens[..end], 0.0)?;
        }
    }
    for index in 0..count {
        let next = next_of(&tokens, key.uniform(index))?;
        tokens.push(next);
        let new = decoder.push(next);
        text += &new;
        if !piece(&new) {
            return Ok(text);
        }
    }
    let rest = decoder.finish();
    piece(&rest);
    Ok(text + &rest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::TokenizerKind;

    #[test]
    fn text_without_line_breaks_has_an_opening_too() {
        let prompt_of =
            |text: &str| default_prompt(&Tokenizer::derive(TokenizerKind::Char, text).unwrap());
        assert_eq!(prompt_of("ab\n"), "\n");
        assert_eq!(prompt_of("ba"), "a");
    }
}

//! Text generation: continues a prompt token by token, with streaming output.

use super::error::TrainError;
use super::sampling::{Continuation, Sampling, next_tokens_of};
use crate::runtime::pipelines::ForwardUnits;
use crate::runtime::step::NextStates;
use potluck_core::Site;
use potluck_core::rng::Key;
use potluck_data::Tokenizer;
use potluck_data::tokenizer::Decoder;
use potluck_graph::model::LanguageModel;

/// Returns the default prompt: a line break, or the first token if the vocabulary has none for
/// that.
pub fn default_prompt(tokenizer: &Tokenizer) -> String {
    let line_break = "\n";
    match tokenizer.encode(line_break) {
        Ok(tokens) if !tokens.is_empty() => line_break.into(),
        _ => tokenizer.decode(&[0]),
    }
}

/// Text that is to be generated.
#[derive(Clone, Copy)]
pub struct Generation<'a> {
    /// Units of devices, of which the first generates.
    pub units: ForwardUnits<'a>,
    pub tokenizer: &'a Tokenizer,
    pub model: LanguageModel,
    pub prompt: &'a str,
    pub sampling: Sampling,
    /// Number of tokens by which the prompt is continued.
    pub count: u64,
}

impl Generation<'_> {
    /// Returns the token that follows others. A model that goes by token begins with `states`,
    /// which are then those behind the last of the tokens.
    fn next_token(
        &self,
        tokens: &[u32],
        uniform: f64,
        states: &mut NextStates,
    ) -> Result<u32, TrainError> {
        if !self.model.goes_by_token {
            states.clear();
        }
        let row = [Continuation::new(tokens, self.model.context, uniform)];
        Ok(next_tokens_of(self.units, 0, &self.model, &row, states, &self.sampling)?[0])
    }
}

/// Continues a prompt, and returns the text. Calls `piece` with each part of the text as soon as
/// its characters are complete; `piece` may return `false` to stop there.
///
/// # Errors
/// Returns `TrainError` if the prompt is empty or has a character outside the vocabulary, or if
/// the device fails.
pub fn generate(
    generation: &Generation,
    mut piece: impl FnMut(&str) -> bool,
) -> Result<String, TrainError> {
    let Generation { tokenizer, model, prompt, sampling, count, .. } = *generation;
    let mut tokens = tokenizer.encode(prompt)?;
    if tokens.is_empty() {
        return Err(TrainError::InvalidRequest(
            "the prompt is empty; give at least one token".into(),
        ));
    }
    let mut decoder = Decoder::after(tokenizer, &tokens);
    let mut text = String::new();
    let key = Key::new(sampling.seed).site(Site(u32::MAX));
    let mut states = NextStates::new();
    if model.goes_by_token {
        for end in 1..tokens.len() {
            generation.next_token(&tokens[..end], 0.0, &mut states)?;
        }
    }
    for index in 0..count {
        let next = generation.next_token(&tokens, key.uniform(index), &mut states)?;
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
    use potluck_data::TokenizerKind;

    #[test]
    fn text_without_line_breaks_has_an_opening_too() {
        let prompt_of =
            |text: &str| default_prompt(&Tokenizer::derive(TokenizerKind::Char, text).unwrap());
        assert_eq!(prompt_of("ab\n"), "\n");
        assert_eq!(prompt_of("ba"), "a");
    }
}

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

/// Ends of a text before its number of tokens.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Ends {
    /// Tokens that are no part of the text.
    pub tokens: Vec<u32>,
    /// Texts behind which nothing follows, and which are left out themselves.
    pub texts: Vec<String>,
}

impl Ends {
    /// Returns the byte at which a text ends, by one of the texts; `None` if none is in it. The
    /// first `searched` bytes were looked through before.
    fn found(&self, text: &str, searched: usize) -> Option<usize> {
        let longest = self.texts.iter().map(String::len).max().unwrap_or(0);
        let mut start = searched.saturating_sub(longest);
        while !text.is_char_boundary(start) {
            start -= 1;
        }
        self.texts.iter().filter_map(|end| text[start..].find(&**end)).min().map(|at| start + at)
    }

    /// Returns the bytes of a text behind which no end can have begun.
    fn settled(&self, text: &str) -> usize {
        let begins = |at: &usize| {
            let rest = &text[*at..];
            self.texts.iter().any(|end| end.starts_with(rest))
        };
        text.char_indices().map(|(at, _)| at).find(begins).unwrap_or(text.len())
    }
}

/// Text that is to be generated.
#[derive(Clone, Copy)]
pub struct Generation<'a> {
    /// Units of devices, of which the first generates.
    pub units: ForwardUnits<'a>,
    pub tokenizer: &'a Tokenizer,
    pub model: LanguageModel,
    /// Tokens that are continued, one at least.
    pub prompt: &'a [u32],
    pub sampling: Sampling,
    pub ends: &'a Ends,
    /// Number of tokens by which the prompt is continued, at most.
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
        let row = Continuation::new(tokens, self.model.context, uniform);
        let is_penalized = self.sampling.repetition_penalty != 1.0;
        let row = [if is_penalized { row.penalizing(tokens) } else { row }];
        Ok(next_tokens_of(self.units, 0, &self.model, &row, states, &self.sampling)?[0])
    }
}

/// Continues a prompt, and returns the text. Calls `piece` with each part of the text as soon as
/// its characters are complete, and cannot be those of an end; `piece` may return `false` to stop
/// there.
///
/// # Errors
/// Returns `TrainError` if the prompt is empty, or if the device fails.
pub fn generate(
    generation: &Generation,
    mut piece: impl FnMut(&str) -> bool,
) -> Result<String, TrainError> {
    let Generation { tokenizer, model, prompt, sampling, ends, count, .. } = *generation;
    let mut tokens = prompt.to_vec();
    if tokens.is_empty() {
        return Err(TrainError::InvalidRequest(
            "the prompt is empty; give at least one token".into(),
        ));
    }
    let mut decoder = Decoder::after(tokenizer, &tokens);
    // The first `given` bytes of it were handed to `piece`.
    let (mut text, mut given) = (String::new(), 0);
    let key = Key::new(sampling.seed).site(Site(u32::MAX));
    let mut states = NextStates::new();
    if model.goes_by_token {
        for end in 1..tokens.len() {
            generation.next_token(&tokens[..end], 0.0, &mut states)?;
        }
    }
    for index in 0..count {
        let next = generation.next_token(&tokens, key.uniform(index), &mut states)?;
        if ends.tokens.contains(&next) {
            break;
        }
        tokens.push(next);
        let searched = text.len();
        text += &decoder.push(next);
        if let Some(end) = ends.found(&text, searched) {
            text.truncate(end);
            piece(&text[given..]);
            return Ok(text);
        }
        let settled = given + ends.settled(&text[given..]);
        if !piece(&text[given..settled]) {
            return Ok(text);
        }
        given = settled;
    }
    text += &decoder.finish();
    if let Some(end) = ends.found(&text, given) {
        text.truncate(end);
    }
    piece(&text[given..]);
    Ok(text)
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

    #[test]
    fn an_end_is_found_and_what_may_begin_one_is_held_back() {
        let ends = Ends { tokens: Vec::new(), texts: vec!["\n\n".into(), "User:".into()] };
        assert_eq!(ends.settled("a\n"), 1);
        assert_eq!(ends.settled("ab Us"), 3);
        assert_eq!(ends.settled("ab Usé"), "ab Usé".len());
        assert_eq!(Ends::default().settled("ab"), 2);
        assert_eq!(ends.found("a\nUser: b\n\n", 0), Some(2));
        assert_eq!(ends.found("é\n\n", "é\n".len()), Some(2));
        assert_eq!(ends.found("a User", 2), None);
        assert_eq!(Ends::default().found("é", 1), None);
    }
}

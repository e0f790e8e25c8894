//! Text generation: continues prompts token by token, with streaming output.

use super::error::TrainError;
use super::sampling::{Continuation, Sampling, TextMemory, next_tokens_of};
use crate::runtime::pipelines::ForwardUnits;
use potluck_core::Site;
use potluck_core::rng::Key;
use potluck_data::Tokenizer;
use potluck_data::tokenizer::Decoder;
use potluck_graph::model::LanguageModel;

/// Returns the default prompt: a line break, or the first token if the vocabulary has no line
/// break.
pub fn default_prompt(tokenizer: &Tokenizer) -> String {
    let line_break = "\n";
    match tokenizer.encode(line_break) {
        Ok(tokens) if !tokens.is_empty() => line_break.into(),
        _ => tokenizer.decode(&[0]),
    }
}

/// Conditions that end a text before its maximum number of tokens.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Ends {
    /// Tokens that end a text and are not part of it.
    pub tokens: Vec<u32>,
    /// Strings that end a text and are not part of it.
    pub texts: Vec<String>,
}

impl Ends {
    /// Byte offset at which one of the strings ends a text; `None` if the text contains none. The
    /// first `searched` bytes were searched before.
    fn found(&self, text: &str, searched: usize) -> Option<usize> {
        let longest = self.texts.iter().map(String::len).max().unwrap_or(0);
        let mut start = searched.saturating_sub(longest);
        while !text.is_char_boundary(start) {
            start -= 1;
        }
        self.texts.iter().filter_map(|end| text[start..].find(&**end)).min().map(|at| start + at)
    }

    /// Number of leading bytes of a text that cannot belong to an incomplete end string.
    fn settled(&self, text: &str) -> usize {
        let begins = |at: &usize| {
            let rest = &text[*at..];
            self.texts.iter().any(|end| end.starts_with(rest))
        };
        text.char_indices().map(|(at, _)| at).find(begins).unwrap_or(text.len())
    }
}

/// Texts to generate.
#[derive(Clone, Copy)]
pub struct Generation<'a> {
    /// Units of devices; the first one generates.
    pub units: ForwardUnits<'a>,
    pub tokenizer: &'a Tokenizer,
    pub model: LanguageModel,
    /// Texts to continue, each of at least one token.
    pub prompts: &'a [Vec<u32>],
    pub sampling: Sampling,
    pub ends: &'a Ends,
    /// Largest number of tokens by which each prompt is continued.
    pub count: u64,
    /// Number of earlier calls with this seed, whose random numbers are others.
    pub turn: u64,
}

impl Generation<'_> {
    /// Number of texts continued simultaneously.
    fn sequences(&self) -> usize {
        self.model.cache.map_or(1, |cache| cache.sequences)
    }

    /// Continues texts simultaneously; returns `false` if `piece` did.
    fn continue_texts(
        &self,
        texts: &mut [Continued],
        memory: &mut TextMemory,
        piece: &mut impl FnMut(usize, &str) -> bool,
    ) -> Result<bool, TrainError> {
        if let [text] = &texts[..] {
            self.carry_states(&text.tokens, memory)?;
        }
        for index in 0..self.count {
            let mut going: Vec<(usize, &mut Continued)> = texts.iter_mut().enumerate().collect();
            going.retain(|(_, text)| !text.is_complete);
            let mut rows = Vec::with_capacity(going.len());
            for (sequence, text) in &going {
                let uniform = text.key.uniform(index);
                let row = Continuation::new(&text.tokens, self.model.context, uniform);
                let row = row.of_sequence(*sequence);
                let is_penalized = self.sampling.repetition_penalty != 1.0;
                rows.push(if is_penalized { row.penalizing(&text.tokens) } else { row });
            }
            let next = next_tokens_of(self.units, 0, &self.model, &rows, memory, &self.sampling)?;
            for ((_, text), token) in going.into_iter().zip(next) {
                if !piece(text.number, text.push(token, self.ends)) {
                    return Ok(false);
                }
            }
        }
        for text in texts.iter_mut().filter(|text| !text.is_complete) {
            if !piece(text.number, text.finish(self.ends)) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Runs a model that carries states from token to token over all but the last token of a
    /// prompt.
    fn carry_states(&self, prompt: &[u32], memory: &mut TextMemory) -> Result<(), TrainError> {
        memory.states.clear();
        if self.model.goes_by_token {
            for end in 1..prompt.len() {
                let row = [Continuation::new(&prompt[..end], self.model.context, 0.0)];
                next_tokens_of(self.units, 0, &self.model, &row, memory, &self.sampling)?;
            }
        }
        Ok(())
    }
}

struct Continued<'a> {
    /// Index among the texts.
    number: usize,
    tokens: Vec<u32>,
    /// Key of the text's random numbers.
    key: Key,
    decoder: Decoder<'a>,
    /// Text after the prompt.
    text: String,
    /// Bytes of it that were handed out.
    given: usize,
    is_complete: bool,
}

impl<'a> Continued<'a> {
    fn new(number: usize, prompt: &[u32], generation: &Generation<'a>) -> Self {
        let site = Site(u32::MAX - number as u32);
        let first = Key::new(generation.sampling.seed).site(site);
        let key = if generation.turn == 0 { first } else { first.step(generation.turn) };
        Self {
            number,
            tokens: prompt.to_vec(),
            key,
            decoder: Decoder::after(generation.tokenizer, prompt),
            text: String::new(),
            given: 0,
            is_complete: false,
        }
    }

    /// Adds a token; returns the part of the text that can then be handed out.
    fn push(&mut self, token: u32, ends: &Ends) -> &str {
        if ends.tokens.contains(&token) {
            return self.finish(ends);
        }
        self.tokens.push(token);
        let searched = self.text.len();
        self.text += &self.decoder.push(token);
        let end = match ends.found(&self.text, searched) {
            Some(end) => {
                self.text.truncate(end);
                self.is_complete = true;
                end
            }
            None => self.given + ends.settled(&self.text[self.given..]),
        };
        self.hand_out(end)
    }

    /// Ends the text; returns the part that was not handed out.
    fn finish(&mut self, ends: &Ends) -> &str {
        self.is_complete = true;
        self.text += &self.decoder.finish();
        if let Some(end) = ends.found(&self.text, self.given) {
            self.text.truncate(end);
        }
        self.hand_out(self.text.len())
    }

    fn hand_out(&mut self, end: usize) -> &str {
        let start = std::mem::replace(&mut self.given, end);
        &self.text[start..end]
    }
}

/// Continues prompts, and returns the texts. Continues as many simultaneously as the device caches
/// keys and values for, or one after the other without a cache. `memory` is the units' memory; a
/// text that begins like an earlier one can reuse its cache. Calls `piece` with the number of the
/// text and each part of it, as soon as its characters are complete and cannot belong to an end
/// string. `piece` may return `false` to stop.
///
/// # Errors
/// Returns `TrainError` if a prompt is empty, or if the device fails.
pub fn generate(
    generation: &Generation,
    memory: &mut TextMemory,
    mut piece: impl FnMut(usize, &str) -> bool,
) -> Result<Vec<String>, TrainError> {
    generation.prompts.iter().try_for_each(|prompt| require_tokens(prompt))?;
    let mut texts = Vec::with_capacity(generation.prompts.len());
    for (number, prompt) in generation.prompts.iter().enumerate() {
        texts.push(Continued::new(number, prompt, generation));
    }
    for together in texts.chunks_mut(generation.sequences()) {
        if !generation.continue_texts(together, memory, &mut piece)? {
            break;
        }
    }
    Ok(texts.into_iter().map(|text| text.text).collect())
}

/// Refuses a prompt without tokens, which cannot be continued.
///
/// # Errors
/// Returns `TrainError::InvalidRequest`.
pub fn require_tokens(prompt: &[u32]) -> Result<(), TrainError> {
    if prompt.is_empty() {
        let why = "the prompt is empty; give at least one token";
        return Err(TrainError::InvalidRequest(why.into()));
    }
    Ok(())
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

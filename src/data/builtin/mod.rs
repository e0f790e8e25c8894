//! Built-in corpus: a small world of generated sentences and sums that can be checked. A
//! line is a sentence about animals, people, places and the weather, in which number and tense
//! agree, or a sum of two numbers in words. It is the same text on every machine.

mod check;
mod generate;
mod grammar;
mod words;

pub use check::{check, is_sum};
pub use grammar::Sentence;

use potluck_core::Site;
use potluck_core::rng::Key;
use words::NUMBERS;

/// Name of the corpus with the version of its text, which must change with the text.
pub const NAME: &str = "the built-in corpus (world 1)";

/// Number of characters of the longest sentence, with its full stop.
pub const LONGEST_SENTENCE: usize = 104;

/// Number of sentences in the corpus, about 2 MB of text.
const SENTENCES: u64 = 67_000;

/// The summands of sums are less than this number.
const ADDENDS: usize = 10;

/// Seed of the corpus.
const SEED: u64 = 1;
/// Site of the random numbers of sentences.
const SENTENCE_SITE: Site = Site(0);
/// Site of the random numbers that select held-out pairs.
const HELD_OUT_SITE: Site = Site(1);

/// First mistake in a line that is not a sentence of the corpus's grammar.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Mistake {
    #[error("it has no full stop")]
    NoFullStop,
    #[error("it ends too early")]
    Incomplete,
    #[error("{word:?} cannot be word {position}")]
    Word { word: String, position: usize },
    #[error("the sum is not {found}")]
    Sum { found: &'static str },
}

/// Generates the corpus: one sentence per line.
pub fn corpus() -> String {
    let mut text = String::with_capacity(2_200_000);
    for index in 0..SENTENCES {
        generate::append_sentence(Key::new(SEED).site(SENTENCE_SITE).step(index), &mut text);
        text.push('\n');
    }
    text
}

/// Returns the beginnings, up to "is", of the sums that are held out of the corpus: about one in
/// ten of all pairs of summands. A pair in the other order may be in the corpus.
pub fn held_out_sums() -> Vec<String> {
    let mut beginnings = Vec::new();
    for (a, first) in NUMBERS[..ADDENDS].iter().enumerate() {
        for (b, second) in NUMBERS[..ADDENDS].iter().enumerate() {
            if is_held_out(a, b) {
                let (initial, rest) = first.split_at(1);
                let initial = initial.to_ascii_uppercase();
                beginnings.push(format!("{initial}{rest} plus {second} is"));
            }
        }
    }
    beginnings
}

/// Returns true if the corpus does not contain the sum of this pair.
fn is_held_out(a: usize, b: usize) -> bool {
    let [word, _] = Key::new(SEED).site(HELD_OUT_SITE).words([a as u32, b as u32]);
    word.is_multiple_of(10)
}

#[cfg(test)]
mod tests;

//! Generation of sentences: every choice of the grammar is drawn at random.

use super::grammar::{Starts, WordSource, sentence};
use super::words::NUMBERS;
use super::{ADDENDS, Mistake, is_held_out};
use potluck_core::rng::Key;

/// Words drawn at random, as a pure function of a key.
struct Draw<'a> {
    key: Key,
    /// Number of draws made.
    drawn: u32,
    text: &'a mut String,
    /// Length of the text before the sentence.
    start: usize,
}

/// Appends a sentence with its full stop, drawn by `key`.
pub(super) fn append_sentence(key: Key, text: &mut String) {
    let start = text.len();
    // Drawn words are words of the grammar, so this cannot fail.
    let drawn = sentence(&mut Draw { key, drawn: 0, text, start });
    debug_assert!(drawn.is_ok());
    text.push('.');
}

impl Draw<'_> {
    /// Returns a number uniform in `0..count`; the bias of about `count / 2^32` does not matter.
    fn below(&mut self, count: usize) -> usize {
        let [word, _] = self.key.words([self.drawn, 0]);
        self.drawn += 1;
        ((u64::from(word) * count as u64) >> 32) as usize
    }

    fn append(&mut self, word: &str) {
        if self.text.len() > self.start {
            self.text.push(' ');
            self.text.push_str(word);
        } else {
            self.text.extend(word[..1].chars().map(|first| first.to_ascii_uppercase()));
            self.text.push_str(&word[1..]);
        }
    }
}

impl WordSource for Draw<'_> {
    fn word(&mut self, list: &[&'static str]) -> Result<usize, Mistake> {
        let index = self.below(list.len());
        self.append(list[index]);
        Ok(index)
    }

    fn select(&mut self, alternatives: &[(u32, Starts)]) -> Result<usize, Mistake> {
        let total: u32 = alternatives.iter().map(|(weight, _)| weight).sum();
        let mut left = self.below(total as usize) as u32;
        for (index, (weight, _)) in alternatives.iter().enumerate() {
            if left < *weight {
                return Ok(index);
            }
            left -= weight;
        }
        Ok(alternatives.len() - 1)
    }

    fn option(&mut self, percent: u32, _: Starts) -> bool {
        self.below(100) < percent as usize
    }

    fn summands(&mut self) -> Result<(usize, usize), Mistake> {
        let (a, b) = loop {
            let pair = self.below(ADDENDS * ADDENDS);
            let (a, b) = (pair / ADDENDS, pair % ADDENDS);
            if !is_held_out(a, b) {
                break (a, b);
            }
        };
        for word in [NUMBERS[a], "plus", NUMBERS[b]] {
            self.append(word);
        }
        Ok((a, b))
    }

    fn sum(&mut self, sum: usize) -> Result<(), Mistake> {
        self.append(NUMBERS[sum]);
        Ok(())
    }
}

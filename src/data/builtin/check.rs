//! Checking of sentences: every choice of the grammar is made by the next word of a text.

use super::grammar::{Sentence, Starts, WordSource, sentence};
use super::words::NUMBERS;
use super::{ADDENDS, Mistake};

/// Checks a line: a sentence of the grammar with its full stop, and if it is a sum, with the right
/// result. Returns the kind of the sentence.
///
/// # Errors
/// Returns the first `Mistake`.
pub fn check(line: &str) -> Result<Sentence, Mistake> {
    let text = line.strip_suffix('.').ok_or(Mistake::NoFullStop)?;
    let mut words = Text { words: text.split(' ').collect(), next: 0 };
    let kind = sentence(&mut words)?;
    match words.peek() {
        None => Ok(kind),
        Some(_) => Err(words.unexpected()),
    }
}

/// Returns true if a line reads as a sum, right or wrong: its second word is "plus".
pub fn is_sum(line: &str) -> bool {
    line.split(' ').nth(1) == Some("plus")
}

/// Words of a text, in order.
struct Text<'a> {
    words: Vec<&'a str>,
    /// Index of the next word to take.
    next: usize,
}

impl Text<'_> {
    fn peek(&self) -> Option<&str> {
        self.words.get(self.next).copied()
    }

    /// Index of the next word in a list; the first word of a sentence has a capital.
    fn find(&self, list: &[&'static str]) -> Option<usize> {
        let found = self.peek()?;
        list.iter().position(|word| match self.next {
            0 => is_capitalized(word, found),
            _ => *word == found,
        })
    }

    fn starts(&self, starts: Starts) -> bool {
        starts.iter().any(|list| self.find(list).is_some())
    }

    fn unexpected(&self) -> Mistake {
        match self.peek() {
            Some(word) => Mistake::Word { word: word.into(), position: self.next + 1 },
            None => Mistake::Incomplete,
        }
    }
}

fn is_capitalized(word: &str, found: &str) -> bool {
    let mut word = word.chars();
    let mut found = found.chars();
    word.next().map(|first| first.to_ascii_uppercase()) == found.next() && word.eq(found)
}

impl WordSource for Text<'_> {
    fn word(&mut self, list: &[&'static str]) -> Result<usize, Mistake> {
        let index = self.find(list).ok_or_else(|| self.unexpected())?;
        self.next += 1;
        Ok(index)
    }

    fn select(&mut self, alternatives: &[(u32, Starts)]) -> Result<usize, Mistake> {
        let found = alternatives.iter().position(|(_, starts)| self.starts(starts));
        found.ok_or_else(|| self.unexpected())
    }

    fn option(&mut self, _: u32, starts: Starts) -> bool {
        self.starts(starts)
    }

    fn summands(&mut self) -> Result<(usize, usize), Mistake> {
        let a = self.word(&NUMBERS[..ADDENDS])?;
        self.word(&["plus"])?;
        Ok((a, self.word(&NUMBERS[..ADDENDS])?))
    }

    fn sum(&mut self, sum: usize) -> Result<(), Mistake> {
        let found = self.word(&NUMBERS)?;
        if found == sum { Ok(()) } else { Err(Mistake::Sum { found: NUMBERS[found] }) }
    }
}

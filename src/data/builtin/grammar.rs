//! Grammar of the built-in corpus. One description serves both directions: the functions below
//! take word after word from a [`WordSource`], which either draws them at random, to generate a
//! sentence, or finds them in a text, to check it. The next word always decides between
//! alternatives (the grammar is LL(1)), so that checking needs no backtracking.

use super::words::{
    ADJECTIVES, DETERMINERS, NAMES, NOUNS, NUMBERS, Number, PLACES, PLURAL_DETERMINERS,
    PREPOSITIONS, SINGULAR_DETERMINERS, TENSES, TIMES, Tense, VERB_KINDS, VerbKind, WEATHER, verbs,
    weather_verbs,
};
use super::{Mistake, is_held_out};

/// Lists of words with which an alternative can begin.
pub(super) type Starts<'a> = &'a [&'a [&'static str]];

/// Source of the words of a sentence.
pub(super) trait WordSource {
    /// Takes a word of the list and returns its index.
    fn word(&mut self, list: &[&'static str]) -> Result<usize, Mistake>;

    /// Selects one of the alternatives, each given as its weight and the words with which it
    /// begins, and returns its index; takes no word.
    fn select(&mut self, alternatives: &[(u32, Starts)]) -> Result<usize, Mistake>;

    /// Decides about an optional part, which is present with a probability of `percent`; takes no
    /// word.
    fn option(&mut self, percent: u32, starts: Starts) -> bool;

    /// Takes the two summands of a sum.
    fn summands(&mut self) -> Result<(usize, usize), Mistake>;

    /// Takes the result of a sum, which must be `sum`.
    fn sum(&mut self, sum: usize) -> Result<(), Mistake>;
}

/// Kind of a sentence, as the checker reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sentence {
    /// About animals, people, places and the weather.
    Story,
    /// A sum; `is_held_out` if the corpus keeps this pair of summands out.
    Sum { is_held_out: bool },
}

/// Takes a sentence, without its full stop.
pub(super) fn sentence(words: &mut impl WordSource) -> Result<Sentence, Mistake> {
    let addends = &NUMBERS[..10];
    let alternatives: [(u32, Starts); 4] =
        [(30, &[&TIMES]), (30, &[&DETERMINERS, &NAMES]), (10, &[&["it"]]), (30, &[addends])];
    match words.select(&alternatives)? {
        0 => {
            let tense = TENSES[words.word(&TIMES)?];
            match words.select(&[(75, &[&DETERMINERS, &NAMES]), (25, &[&["it"]])])? {
                0 => clause(words, Some(tense))?,
                _ => weather(words, Some(tense))?,
            };
        }
        1 => {
            let tense = clause(words, None)?;
            time(words, tense)?;
        }
        2 => {
            let tense = weather(words, None)?;
            time(words, tense)?;
        }
        _ => return sum(words),
    }
    Ok(Sentence::Story)
}

/// Takes an optional adverb of time at the end, which agrees with the tense.
fn time(words: &mut impl WordSource, tense: Tense) -> Result<(), Mistake> {
    if words.option(40, &[&TIMES]) {
        words.word(&TIMES[tense as usize..=tense as usize])?;
    }
    Ok(())
}

/// Takes a clause of a subject and a verb with its complements, and returns its tense.
fn clause(words: &mut impl WordSource, tense: Option<Tense>) -> Result<Tense, Mistake> {
    let number = noun_phrase(words)?;
    let tense = match tense {
        Some(tense) => tense,
        None => select_tense(words, |tense| VERB_KINDS.map(|kind| verbs(kind, tense, number)))?,
    };
    will(words, tense)?;
    let forms = VERB_KINDS.map(|kind| verbs(kind, tense, number));
    let kind = words.select(&[(45, &[forms[0]]), (35, &[forms[1]]), (20, &[forms[2]])])?;
    words.word(forms[kind])?;
    match VERB_KINDS[kind] {
        VerbKind::Be => match words.select(&[(50, &[&ADJECTIVES]), (50, &[&PREPOSITIONS])])? {
            0 => {
                words.word(&ADJECTIVES)?;
            }
            _ => place(words)?,
        },
        VerbKind::Transitive => {
            noun_phrase(words)?;
            if words.option(15, &[&PREPOSITIONS]) {
                place(words)?;
            }
        }
        VerbKind::Intransitive => {
            if words.option(70, &[&PREPOSITIONS]) {
                place(words)?;
            }
        }
    }
    Ok(tense)
}

/// Takes a name, or a noun with a determiner and an optional adjective, and returns its number.
fn noun_phrase(words: &mut impl WordSource) -> Result<Number, Mistake> {
    let alternatives: [(u32, Starts); 4] = [
        (25, &[&NAMES]),
        (35, &[&DETERMINERS[..1]]),
        (20, &[&SINGULAR_DETERMINERS]),
        (20, &[&PLURAL_DETERMINERS]),
    ];
    let (singular, plural) = NOUNS.split_at(NOUNS.len() / 2);
    let (determiners, nouns): (&[_], &[_]) = match words.select(&alternatives)? {
        0 => {
            words.word(&NAMES)?;
            return Ok(Number::Singular);
        }
        1 => (&DETERMINERS[..1], &NOUNS),
        2 => (&SINGULAR_DETERMINERS, singular),
        _ => (&PLURAL_DETERMINERS, plural),
    };
    words.word(determiners)?;
    if words.option(35, &[&ADJECTIVES]) {
        words.word(&ADJECTIVES)?;
    }
    let noun = nouns[words.word(nouns)?];
    Ok(if plural.contains(&noun) { Number::Plural } else { Number::Singular })
}

fn place(words: &mut impl WordSource) -> Result<(), Mistake> {
    words.word(&PREPOSITIONS)?;
    words.word(&["the"])?;
    words.word(&PLACES)?;
    Ok(())
}

/// Takes a clause about the weather, with an optional clause in the same tense; returns the tense.
fn weather(words: &mut impl WordSource, tense: Option<Tense>) -> Result<Tense, Mistake> {
    words.word(&["it"])?;
    let be = |tense| verbs(VerbKind::Be, tense, Number::Singular);
    let tense = match tense {
        Some(tense) => tense,
        None => select_tense(words, |tense| [be(tense), weather_verbs(tense), &[]])?,
    };
    will(words, tense)?;
    match words.select(&[(50, &[be(tense)]), (50, &[weather_verbs(tense)])])? {
        0 => {
            words.word(be(tense))?;
            words.word(&WEATHER)?;
        }
        _ => {
            words.word(weather_verbs(tense))?;
        }
    }
    if words.option(30, &[&["and"]]) {
        words.word(&["and"])?;
        clause(words, Some(tense))?;
    }
    Ok(tense)
}

/// Selects a tense by the verb that follows; `forms` are the verbs of a tense.
fn select_tense(
    words: &mut impl WordSource,
    forms: impl Fn(Tense) -> [&'static [&'static str]; 3],
) -> Result<Tense, Mistake> {
    let past = forms(Tense::Past);
    let present = forms(Tense::Present);
    Ok(TENSES[words.select(&[(1, &past), (1, &present), (1, &[&["will"]])])?])
}

fn will(words: &mut impl WordSource, tense: Tense) -> Result<(), Mistake> {
    if tense == Tense::Future {
        words.word(&["will"])?;
    }
    Ok(())
}

fn sum(words: &mut impl WordSource) -> Result<Sentence, Mistake> {
    let (a, b) = words.summands()?;
    words.word(&["is"])?;
    words.sum(a + b)?;
    Ok(Sentence::Sum { is_held_out: is_held_out(a, b) })
}

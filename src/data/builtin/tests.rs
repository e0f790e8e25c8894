//! Tests of the corpus and of its checker.

use std::collections::{BTreeSet, HashSet};

use super::*;

fn mistake(line: &str) -> Mistake {
    check(line).expect_err(line)
}

fn word(word: &str, position: usize) -> Mistake {
    Mistake::Word { word: word.into(), position }
}

#[test]
fn the_text_is_pinned_to_its_version() {
    let corpus = corpus();
    let hash = blake3::hash(corpus.as_bytes()).to_hex();
    let pinned = "a329a2a37242c3347eb25fdfe7ecc633cab5061f966404a562be85744426a47f";
    assert_eq!((NAME, &*hash, corpus.len()), ("the built-in corpus (world 1)", pinned, 2_071_443));
}

#[test]
fn every_line_of_the_corpus_is_a_sentence_and_none_is_a_held_out_sum() {
    let corpus = corpus();
    let (mut sums, mut longest, mut words) = (HashSet::new(), 0, BTreeSet::new());
    for line in corpus.lines() {
        match check(line) {
            Ok(Sentence::Story) => assert!(!is_sum(line), "{line}"),
            Ok(Sentence::Sum { is_held_out }) => {
                assert!(is_sum(line) && !is_held_out, "{line}");
                sums.insert(line);
            }
            Err(mistake) => panic!("{line} {mistake}"),
        }
        longest = longest.max(line.len());
        words.extend(line.trim_end_matches('.').split(' ').map(str::to_lowercase));
    }
    assert_eq!(sums.len(), 90, "all pairs but those held out");
    assert!((60..=120).contains(&words.len()), "{}", words.len());
    assert!(longest <= LONGEST_SENTENCE, "{longest}");
}

#[test]
fn one_pair_of_summands_in_ten_is_held_out() {
    let beginnings = held_out_sums();
    assert_eq!(beginnings.len(), 10);
    let corpus = corpus();
    for beginning in beginnings {
        assert!(!corpus.contains(&beginning), "{beginning}");
        let right = NUMBERS.iter().filter_map(|n| check(&format!("{beginning} {n}.")).ok());
        assert_eq!(right.collect::<Vec<_>>(), [Sentence::Sum { is_held_out: true }]);
    }
}

#[test]
fn sentences_of_each_form_are_right() {
    let longest = "Tomorrow it will be windy and these hungry children will follow these hungry \
                   children behind the forest.";
    assert_eq!(longest.len(), LONGEST_SENTENCE);
    for line in [
        longest,
        "Ben sleeps.",
        "The cats run.",
        "The cat runs today.",
        "A small dog saw the birds near the house yesterday.",
        "Yesterday the children were tired.",
        "These horses will be in the garden tomorrow.",
        "It rains and many birds sing.",
        "It was cold yesterday.",
    ] {
        assert_eq!(check(line), Ok(Sentence::Story), "{line}");
    }
    assert_eq!(check("Nine plus nine is eighteen."), Ok(Sentence::Sum { is_held_out: false }));
}

#[test]
fn mistakes_in_number_are_found() {
    assert_eq!(mistake("The cat sleep."), word("sleep", 3));
    assert_eq!(mistake("The cats sleeps today."), word("sleeps", 3));
    assert_eq!(mistake("Many bird sing."), word("bird", 2));
    assert_eq!(mistake("Anna finds this dogs."), word("dogs", 4));
    assert_eq!(mistake("Yesterday the children was tired."), word("was", 4));
    assert_eq!(mistake("It rains and the boy are happy."), word("are", 6));
}

#[test]
fn mistakes_in_tense_are_found() {
    assert_eq!(mistake("Yesterday the cat sleeps."), word("sleeps", 4));
    assert_eq!(mistake("Tomorrow the cat slept."), word("slept", 4));
    assert_eq!(mistake("The cat slept tomorrow."), word("tomorrow", 4));
    assert_eq!(mistake("Tom will plays."), word("plays", 3));
    assert_eq!(mistake("It rained and the cats sleep."), word("sleep", 6));
}

#[test]
fn other_mistakes_are_found() {
    assert_eq!(mistake("The cow sleeps."), word("cow", 2));
    assert_eq!(mistake("the cat sleeps."), word("the", 1));
    assert_eq!(mistake("The Cat sleeps."), word("Cat", 2));
    assert_eq!(mistake("The  cat sleeps."), word("", 2));
    assert_eq!(mistake("Anna sees."), Mistake::Incomplete);
    assert_eq!(mistake("Anna sleeps Ben."), word("Ben", 3));
    assert_eq!(mistake("Anna sleeps"), Mistake::NoFullStop);
    assert_eq!(mistake("Anna sleeps. "), Mistake::NoFullStop);
    assert_eq!(mistake("Anna sleeps.."), word("sleeps.", 2));
    assert_eq!(mistake(""), Mistake::NoFullStop);
    assert_eq!(mistake("."), word("", 1));
}

#[test]
fn wrong_sums_are_found() {
    assert_eq!(mistake("Two plus two is five."), Mistake::Sum { found: "five" });
    assert_eq!(mistake("Two plus two are four."), word("are", 4));
    assert_eq!(mistake("Ten plus two is twelve."), word("Ten", 1));
    assert_eq!(mistake("Two plus two is."), Mistake::Incomplete);
    assert!(is_sum("Two plus two is") && !is_sum("The cat sleeps."));
}

//! Vocabulary of the built-in corpus, in lists from which the grammar takes words.

/// Grammatical number of a subject, with which its verb agrees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Number {
    Singular,
    Plural,
}

/// Tense of a sentence, with which its adverb of time agrees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tense {
    Past,
    Present,
    Future,
}

/// Group of verbs with the same complements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum VerbKind {
    Intransitive,
    Transitive,
    /// Forms of "to be".
    Be,
}

pub(super) const TENSES: [Tense; 3] = [Tense::Past, Tense::Present, Tense::Future];
pub(super) const VERB_KINDS: [VerbKind; 3] =
    [VerbKind::Intransitive, VerbKind::Transitive, VerbKind::Be];

/// Adverbs of time, in the order of [`TENSES`].
pub(super) const TIMES: [&str; 3] = ["yesterday", "today", "tomorrow"];

pub(super) const NAMES: [&str; 4] = ["Anna", "Ben", "Clara", "Tom"];

/// Determiners: the first goes with both numbers.
pub(super) const DETERMINERS: [&str; 6] = ["the", "a", "this", "these", "many", "some"];
/// Determiners of singular nouns.
pub(super) const SINGULAR_DETERMINERS: [&str; 2] = ["a", "this"];
/// Determiners of plural nouns.
pub(super) const PLURAL_DETERMINERS: [&str; 3] = ["these", "many", "some"];

/// Adjectives; none begins with a vowel, so that the article is always "a".
pub(super) const ADJECTIVES: [&str; 7] =
    ["small", "big", "young", "happy", "hungry", "tired", "black"];

/// Nouns in the singular, followed by the same nouns in the plural.
pub(super) const NOUNS: [&str; 16] = [
    "cat", "dog", "bird", "horse", "girl", "boy", "farmer", "child", //
    "cats", "dogs", "birds", "horses", "girls", "boys", "farmers", "children",
];

pub(super) const PREPOSITIONS: [&str; 3] = ["in", "near", "behind"];
pub(super) const PLACES: [&str; 5] = ["garden", "house", "forest", "school", "market"];

/// Adjectives that describe the weather.
pub(super) const WEATHER: [&str; 4] = ["cold", "warm", "dark", "windy"];

/// Numbers from 0, up to the largest sum.
pub(super) const NUMBERS: [&str; 19] = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
];

/// Forms of the verbs of a kind; forms of the future follow "will".
pub(super) fn verbs(kind: VerbKind, tense: Tense, number: Number) -> &'static [&'static str] {
    use {Number::*, Tense::*, VerbKind::*};
    match (kind, tense, number) {
        (Intransitive, Past, _) => &["slept", "ran", "sang", "played", "waited"],
        (Intransitive, Present, Singular) => &["sleeps", "runs", "sings", "plays", "waits"],
        (Intransitive, _, _) => &["sleep", "run", "sing", "play", "wait"],
        (Transitive, Past, _) => &["saw", "found", "followed", "loved"],
        (Transitive, Present, Singular) => &["sees", "finds", "follows", "loves"],
        (Transitive, _, _) => &["see", "find", "follow", "love"],
        (Be, Past, Singular) => &["was"],
        (Be, Past, Plural) => &["were"],
        (Be, Present, Singular) => &["is"],
        (Be, Present, Plural) => &["are"],
        (Be, Future, _) => &["be"],
    }
}

/// Forms of the verbs of the weather, whose subject is "it".
pub(super) fn weather_verbs(tense: Tense) -> &'static [&'static str] {
    match tense {
        Tense::Past => &["rained", "snowed"],
        Tense::Present => &["rains", "snows"],
        Tense::Future => &["rain", "snow"],
    }
}

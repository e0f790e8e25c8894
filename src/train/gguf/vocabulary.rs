//! Keys of a tokenizer in a GGUF file, from a `tokenizer.json` of byte pair encoding: with bytes as
//! symbols, as in GPT-2, Llama 3 and Qwen, or with SentencePiece's symbols, as in Llama 2.

use std::collections::{BTreeMap, HashMap};

use serde_json::Value as Json;

use super::file::GgufValue;

/// Tokens with a special meaning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    /// Token at the beginning of a text.
    pub begin: Option<u32>,
    /// Token at the end of a text.
    pub end: Option<u32>,
}

/// Token types in the format.
const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;
const BYTE: i32 = 6;

/// Patterns that split texts before pairs are merged, with llama.cpp's names for them.
const PATTERNS: [(&str, &str); 2] = [
    (
        concat!(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|",
            r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
        "llama-bpe",
    ),
    (
        concat!(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|",
            r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
        "qwen2",
    ),
];

/// Symbol of a space in SentencePiece's tokens.
const SPACE: &str = "\u{2581}";

#[derive(serde::Deserialize)]
struct TokenizerJson {
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
    #[serde(default)]
    normalizer: Json,
    #[serde(default)]
    pre_tokenizer: Json,
    #[serde(default)]
    post_processor: Json,
    model: ModelJson,
}

#[derive(serde::Deserialize)]
struct AddedToken {
    id: u32,
    content: String,
    special: bool,
}

#[derive(serde::Deserialize)]
struct ModelJson {
    #[serde(default, rename = "type")]
    kind: Option<String>,
    #[serde(default)]
    vocab: Json,
    #[serde(default)]
    merges: Vec<Merge>,
    #[serde(default)]
    byte_fallback: bool,
    #[serde(default)]
    unk_token: Option<String>,
}

/// Pair of symbols that is merged, in the older or the newer form.
#[derive(serde::Deserialize)]
#[serde(untagged)]
enum Merge {
    Text(String),
    Pair(String, String),
}

impl Merge {
    fn pair(&self) -> (&str, &str) {
        match self {
            Self::Text(text) => text.split_once(' ').unwrap_or((text, "")),
            Self::Pair(first, second) => (first, second),
        }
    }
}

/// Returns the keys of a tokenizer for a model with `vocabulary` tokens.
///
/// # Errors
/// Returns the reason if the format does not support the tokenizer.
pub fn keys(
    json: &[u8],
    vocabulary: usize,
    special: SpecialTokens,
) -> Result<Vec<(String, GgufValue)>, String> {
    let read: TokenizerJson =
        serde_json::from_slice(json).map_err(|why| format!("it is not understood: {why}"))?;
    let is_pairs = read.model.kind.as_deref().is_none_or(|kind| kind == "BPE");
    let of_bytes = pieces(&read.pre_tokenizer).iter().any(|piece| kind_of(piece) == "ByteLevel");
    if !is_pairs || !(of_bytes || read.model.byte_fallback) {
        return Err("it is none of byte pair encoding, with bytes or with SentencePiece".into());
    }
    let (tokens, mut types) = tokens(&read, vocabulary)?;
    let mut keys: Vec<(&str, GgufValue)> = Vec::new();
    if of_bytes {
        let changing = pieces(&read.normalizer).into_iter().find(|piece| kind_of(piece) != "NFC");
        if let Some(other) = changing {
            return Err(format!(
                "it changes texts by {}, which llama.cpp does not",
                kind_of(other)
            ));
        }
        let pattern = pattern(&read.pre_tokenizer)?;
        let merges = read.model.merges.iter().map(Merge::pair);
        let merges = merges.map(|(first, second)| format!("{first} {second}")).collect();
        keys.push(("model", GgufValue::Text("gpt2".into())));
        keys.push(("pre", GgufValue::Text(pattern.into())));
        keys.push(("merges", GgufValue::Texts(merges)));
    } else {
        for (token, kind) in tokens.iter().zip(&mut types) {
            let is_byte = token.starts_with("<0x") && token.len() == 6 && token.ends_with('>');
            if is_byte && *kind == NORMAL {
                *kind = BYTE;
            }
            if read.model.unk_token.as_ref() == Some(token) {
                *kind = UNKNOWN;
            }
        }
        keys.push(("model", GgufValue::Text("llama".into())));
        keys.push(("pre", GgufValue::Text("default".into())));
        keys.push(("scores", GgufValue::Reals(scores(&read.model.merges, &tokens))));
        let has_prefix = has_space_prefix(&read)?;
        keys.push(("add_space_prefix", GgufValue::Flag(has_prefix)));
    }
    let unknown = read.model.unk_token.as_ref();
    let unknown = unknown.and_then(|text| tokens.iter().position(|token| token == text));
    let first = first_of_template(&read.post_processor);
    let of_template = first.and_then(|text| tokens.iter().position(|token| *token == text));
    let begin = special.begin.or(of_template.map(|id| id as u32));
    keys.push(("tokens", GgufValue::Texts(tokens)));
    keys.push(("token_type", GgufValue::Wholes(types)));
    let ids = [
        ("bos_token_id", begin),
        ("eos_token_id", special.end),
        ("unknown_token_id", unknown.map(|id| id as u32)),
    ];
    for (name, id) in ids {
        keys.extend(id.map(|id| (name, GgufValue::Whole(id))));
    }
    keys.push(("add_bos_token", GgufValue::Flag(of_template.is_some())));
    let named = |(name, value)| (format!("tokenizer.ggml.{name}"), value);
    Ok(keys.into_iter().map(named).collect())
}

/// All tokens by id, and their types. Tokens that the model knows but the tokenizer lacks are
/// unused.
fn tokens(read: &TokenizerJson, vocabulary: usize) -> Result<(Vec<String>, Vec<i32>), String> {
    let of_model: BTreeMap<String, u32> = serde_json::from_value(read.model.vocab.clone())
        .map_err(|why| format!("its vocabulary is not understood: {why}"))?;
    let mut tokens: Vec<String> = (0..vocabulary).map(|id| format!("[PAD{id}]")).collect();
    let mut types = vec![UNUSED; vocabulary];
    let added = read.added_tokens.iter().map(|token| {
        // As in llama.cpp's converter: tokens that look special are special.
        let looks_special = token.content.starts_with("<|") && token.content.ends_with("|>");
        let kind = if token.special || looks_special { CONTROL } else { USER_DEFINED };
        (&token.content, token.id, kind)
    });
    let of_model = of_model.iter().map(|(token, id)| (token, *id, NORMAL));
    for (token, id, kind) in of_model.chain(added) {
        let index = id as usize;
        if index >= vocabulary {
            return Err(format!("it has the token {id}, and the model {vocabulary} tokens"));
        }
        tokens[index].clone_from(token);
        types[index] = kind;
    }
    Ok((tokens, types))
}

/// Score of each token, by which SentencePiece chooses the next pair to merge: the earlier a pair
/// is in the list, the higher.
fn scores(merges: &[Merge], tokens: &[String]) -> Vec<f32> {
    let mut ranks: HashMap<String, usize> = HashMap::new();
    for (rank, merge) in merges.iter().enumerate() {
        let (first, second) = merge.pair();
        ranks.entry(format!("{first}{second}")).or_insert(rank);
    }
    let score = |token: &String| ranks.get(token).map_or(0.0, |rank| -(*rank as f32));
    tokens.iter().map(score).collect()
}

/// Parts of a step of a tokenizer, which may be a sequence.
fn pieces(step: &Json) -> Vec<&Json> {
    let lists = ["pretokenizers", "normalizers", "processors"];
    match lists.iter().find_map(|list| step.get(*list)?.as_array()) {
        Some(list) => list.iter().collect(),
        None if step.is_object() => vec![step],
        None => Vec::new(),
    }
}

fn kind_of(piece: &Json) -> &str {
    piece["type"].as_str().unwrap_or_default()
}

/// llama.cpp's name for the way in which a text is split.
fn pattern(pre_tokenizer: &Json) -> Result<&'static str, String> {
    let (of_bytes, others): (Vec<&Json>, Vec<&Json>) =
        pieces(pre_tokenizer).into_iter().partition(|piece| kind_of(piece) == "ByteLevel");
    // Both settings default to true in the format.
    let is_set = |key: &str| of_bytes.iter().any(|piece| piece[key].as_bool() != Some(false));
    if is_set("add_prefix_space") {
        return Err("it puts a space in front of every text, which llama.cpp does not".into());
    }
    let found = match (&others[..], is_set("use_regex")) {
        ([], true) => Some("gpt-2"),
        ([digits], true) if digits["individual_digits"] == true && kind_of(digits) == "Digits" => {
            Some("smollm")
        }
        ([split], false) if kind_of(split) == "Split" && split["behavior"] == "Isolated" => {
            let regex = split["pattern"]["Regex"].as_str().filter(|_| split["invert"] != true);
            PATTERNS.iter().find(|(known, _)| Some(*known) == regex).map(|(_, name)| *name)
        }
        _ => None,
    };
    found.ok_or_else(|| {
        "it divides texts by a pattern that is none of GPT-2's, Llama 3's, Qwen2's and SmolLM's"
            .into()
    })
}

/// Returns true if a tokenizer of SentencePiece's kind puts a space in front of a text: with a
/// normalizer in older files, and in newer ones with the step that splits the text into words.
fn has_space_prefix(read: &TokenizerJson) -> Result<bool, String> {
    let mut has_prefix = false;
    for piece in pieces(&read.normalizer).into_iter().chain(pieces(&read.pre_tokenizer)) {
        match kind_of(piece) {
            "Prepend" if piece["prepend"] == SPACE => has_prefix = true,
            "Replace" if piece["pattern"]["String"] == " " && piece["content"] == SPACE => {}
            "Metaspace" if piece["split"] != true && piece["replacement"] == SPACE => {
                let scheme = piece["prepend_scheme"].as_str();
                has_prefix |= match scheme {
                    Some(scheme) => scheme != "never",
                    None => piece["add_prefix_space"] != false,
                };
            }
            other => {
                return Err(format!(
                    "it changes or divides texts by {other}, which is not written"
                ));
            }
        }
    }
    Ok(has_prefix)
}

/// Token that a template puts in front of every text, if any.
fn first_of_template(post_processor: &Json) -> Option<String> {
    let all = pieces(post_processor);
    let template = all.iter().find(|piece| kind_of(piece) == "TemplateProcessing")?;
    let token = template["single"].get(0)?["SpecialToken"]["id"].as_str()?;
    Some(token.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key<'a>(keys: &'a [(String, GgufValue)], name: &str) -> Option<&'a GgufValue> {
        let name = format!("tokenizer.ggml.{name}");
        keys.iter().find(|(known, _)| *known == name).map(|(_, value)| value)
    }

    fn bytes_json(pre_tokenizer: &str) -> String {
        format!(
            r#"{{"added_tokens": [{{"id": 3, "content": "<|end|>", "special": true}}],
                "pre_tokenizer": {pre_tokenizer},
                "model": {{"type": "BPE", "vocab": {{"a": 0, "b": 1, "ab": 2}},
                    "merges": [["a", "b"]]}}}}"#
        )
    }

    #[test]
    fn a_tokenizer_of_bytes_has_merges_and_a_pattern() {
        let split = |pattern: &str| {
            let pattern = serde_json::to_string(pattern).unwrap();
            format!(
                r#"{{"type": "Sequence", "pretokenizers": [
                    {{"type": "Split", "pattern": {{"Regex": {pattern}}}, "behavior": "Isolated"}},
                    {{"type": "ByteLevel", "use_regex": false, "add_prefix_space": false}}]}}"#
            )
        };
        let digits = r#"{"type": "Sequence", "pretokenizers": [
            {"type": "Digits", "individual_digits": true},
            {"type": "ByteLevel", "add_prefix_space": false}]}"#;
        for (pre_tokenizer, name) in [
            (r#"{"type": "ByteLevel", "add_prefix_space": false}"#.to_string(), Some("gpt-2")),
            (split(PATTERNS[0].0), Some("llama-bpe")),
            (split(PATTERNS[1].0), Some("qwen2")),
            (digits.into(), Some("smollm")),
            (split(r"\s+"), None),
        ] {
            let special = SpecialTokens { begin: None, end: Some(3) };
            let found = keys(bytes_json(&pre_tokenizer).as_bytes(), 5, special);
            let Some(name) = name else {
                assert!(found.unwrap_err().contains("none of GPT-2's"));
                continue;
            };
            let found = found.unwrap();
            assert_eq!(key(&found, "pre"), Some(&GgufValue::Text(name.into())));
            assert_eq!(key(&found, "merges"), Some(&GgufValue::Texts(vec!["a b".into()])));
            let tokens = ["a", "b", "ab", "<|end|>", "[PAD4]"].map(String::from).to_vec();
            assert_eq!(key(&found, "tokens"), Some(&GgufValue::Texts(tokens)));
            let types = vec![NORMAL, NORMAL, NORMAL, CONTROL, UNUSED];
            assert_eq!(key(&found, "token_type"), Some(&GgufValue::Wholes(types)));
            assert_eq!(key(&found, "eos_token_id"), Some(&GgufValue::Whole(3)));
        }
    }

    #[test]
    fn a_tokenizer_of_sentencepiece_has_scores() {
        let json = r#"{"normalizer": {"type": "Sequence", "normalizers": [
                {"type": "Prepend", "prepend": "\u2581"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]},
            "post_processor": {"type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}]},
            "model": {"type": "BPE", "byte_fallback": true, "unk_token": "<unk>",
                "vocab": {"<unk>": 0, "<s>": 1, "<0x00>": 2, "a": 3, "b": 4, "ab": 5, "aab": 6},
                "merges": ["a b", "a ab"]}}"#;
        let found = keys(json.as_bytes(), 7, SpecialTokens::default()).unwrap();
        assert_eq!(key(&found, "model"), Some(&GgufValue::Text("llama".into())));
        let scores = vec![0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0];
        assert_eq!(key(&found, "scores"), Some(&GgufValue::Reals(scores)));
        let types = vec![UNKNOWN, NORMAL, BYTE, NORMAL, NORMAL, NORMAL, NORMAL];
        assert_eq!(key(&found, "token_type"), Some(&GgufValue::Wholes(types)));
        assert_eq!(key(&found, "bos_token_id"), Some(&GgufValue::Whole(1)));
        assert_eq!(key(&found, "add_bos_token"), Some(&GgufValue::Flag(true)));
        assert_eq!(key(&found, "add_space_prefix"), Some(&GgufValue::Flag(true)));
        // Newer files have it elsewhere, or not at all.
        for (scheme, expected) in [("first", true), ("always", true), ("never", false)] {
            let start = json.find("post_processor").unwrap();
            let newer = format!(
                r#"{{"pre_tokenizer": {{"type": "Metaspace", "replacement": "\u2581",
                    "prepend_scheme": "{scheme}", "split": false}}, "{}"#,
                &json[start..]
            );
            let found = keys(newer.as_bytes(), 7, SpecialTokens::default()).unwrap();
            assert_eq!(key(&found, "add_space_prefix"), Some(&GgufValue::Flag(expected)));
        }
        let lower = json.replace("Prepend", "Lowercase");
        let error = keys(lower.as_bytes(), 7, SpecialTokens::default()).unwrap_err();
        assert!(error.contains("by Lowercase, which is not written"), "{error}");
        let error = keys(json.as_bytes(), 6, SpecialTokens::default()).unwrap_err();
        assert!(error.contains("the token 6, and the model 6 tokens"), "{error}");
    }
}

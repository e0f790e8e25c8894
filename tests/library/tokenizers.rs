//! Tokenizers of files: the ids of Python's tokenizers on lines made to be hard, and the text
//! again.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;

use flate2::read::GzDecoder;
use potluck_data::{Decoder, Tokenizer, TokenizerFile};
use serde::Deserialize;

/// The file that `tests/golden/make_tokenizers.py` wrote.
#[derive(Deserialize)]
struct Golden {
    lines: Vec<String>,
    files: BTreeMap<String, GoldenFile>,
}

#[derive(Deserialize)]
struct GoldenFile {
    json: String,
    /// Of each line.
    ids: Vec<Vec<u32>>,
}

fn golden() -> Golden {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/tokenizers.json.gz");
    serde_json::from_reader(GzDecoder::new(File::open(path).unwrap())).unwrap()
}

#[test]
fn ids_are_those_of_python() {
    let Golden { lines, files } = golden();
    assert_eq!((lines.len(), files.len()), (1000, 4));
    for (name, GoldenFile { json, ids }) in files {
        let tokenizer =
            Tokenizer::File(TokenizerFile::from_json(&name, json.into_bytes()).unwrap());
        for (line, ids) in lines.iter().zip(&ids) {
            assert_eq!(&tokenizer.encode(line).unwrap(), ids, "{name}: {line:?}");
            let text = tokenizer.decode(ids);
            // Qwen2's composes characters, and Llama 2's has lost what it has no bytes for.
            if name == "gpt2" || name == "llama3" {
                assert_eq!(&text, line, "{name}");
            }
            // As it is printed, token by token.
            let mut decoder = Decoder::new(&tokenizer);
            let mut printed: String = ids.iter().map(|id| decoder.push(*id)).collect();
            printed.push_str(&decoder.finish());
            assert_eq!(printed, text, "{name}: {line:?}");
        }
        let largest = ids.iter().flatten().max().unwrap();
        assert!((*largest as usize) < tokenizer.vocabulary(), "{name}");
    }
}

#[test]
fn characters_shown_when_complete() {
    let Golden { mut files, .. } = golden();
    let json = files.remove("gpt2").unwrap().json;
    let tokenizer = Tokenizer::File(TokenizerFile::from_json("gpt2", json.into_bytes()).unwrap());
    let ids = tokenizer.encode("a\u{1fae0}b").unwrap();
    let mut decoder = Decoder::new(&tokenizer);
    let shown: Vec<String> = ids.iter().map(|id| decoder.push(*id)).collect();
    assert_eq!(shown.concat(), "a\u{1fae0}b");
    assert!(shown.iter().all(|text| !text.contains('\u{fffd}')), "{shown:?}");
    assert!(shown.contains(&"\u{1fae0}".to_string()), "{shown:?}");
    // Runs of bytes, of which a tokenizer with spaces makes characters together.
    let json = files.remove("llama2").unwrap().json;
    let of_bytes = TokenizerFile::from_json("llama2", json.into_bytes()).unwrap();
    let of_bytes = Tokenizer::File(of_bytes);
    for text in ["한국어는 말이다 한국어는", "漢字漢字漢字ab 漢字", "the 👩‍👩‍👧‍👦 quick"]
    {
        let ids = of_bytes.encode(text).unwrap();
        let mut decoder = Decoder::new(&of_bytes);
        let mut shown: String = ids.iter().map(|id| decoder.push(*id)).collect();
        shown.push_str(&decoder.finish());
        assert_eq!(shown, text);
    }
    // Behind a prompt a word has its space, and at the beginning none.
    let [prompt, both] = ["the", "the quick"].map(|text| of_bytes.encode(text).unwrap());
    let mut decoder = Decoder::after(&of_bytes, &prompt);
    let shown: String = both[prompt.len()..].iter().map(|id| decoder.push(*id)).collect();
    assert_eq!(shown, " quick");
    // Ids that are none have no text, however many there are.
    let mut decoder = Decoder::new(&of_bytes);
    assert!((0..100).all(|_| decoder.push(100_000).is_empty()));
    // What never becomes a character is not waited for.
    let lone = ids[1];
    let mut decoder = Decoder::new(&tokenizer);
    let shown: String = (0..40).map(|_| decoder.push(lone)).collect();
    assert!(shown.contains('\u{fffd}'), "{shown:?}");
    assert_eq!(Decoder::new(&tokenizer).push(100_000), "");
}

#[test]
fn files_no_tokenizer_are_refused() {
    let refused = |json: &str| {
        let error = TokenizerFile::from_json("f.json", json.as_bytes().to_vec()).unwrap_err();
        error.to_string()
    };
    for json in ["", "{}", "[1, 2]", "{\"model\": {\"type\": \"None\"}}", "\u{fffd}"] {
        let error = refused(json);
        assert!(error.starts_with("f.json: is no tokenizer.json ("), "{json}: {error}");
        assert_eq!(error.lines().count(), 1, "{error}");
    }
    let empty = r#"{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
        "normalizer": null, "pre_tokenizer": null, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": {}, "unk_token": "?"}}"#;
    assert_eq!(refused(empty), "f.json: has no tokens");
    let json = golden().files["gpt2"].json.replacen("\"dropout\":null", "\"dropout\":0.1", 1);
    assert!(refused(&json).contains("leaves merges out at random"), "{}", refused(&json));
    let directory = tempfile::tempdir().unwrap();
    let error = TokenizerFile::load(directory.path()).unwrap_err().to_string();
    assert!(error.contains("is a directory; give its tokenizer.json"), "{error}");
    let error = TokenizerFile::load(&directory.path().join("no")).unwrap_err().to_string();
    assert!(error.contains("cannot be read"), "{error}");
}

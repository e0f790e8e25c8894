//! Tests of the preparation of token files.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use flate2::Compression;
use flate2::write::GzEncoder;
use tempfile::TempDir;

use super::*;
use crate::text::BYTE_ORDER_MARK;
use crate::{Split, TokenFile};

#[derive(serde::Deserialize)]
struct Golden {
    lines: Vec<String>,
    files: HashMap<String, GoldenFile>,
}

#[derive(serde::Deserialize)]
struct GoldenFile {
    json: String,
}

/// Kept tokenizer of a name, and lines that are hard to make tokens of.
fn golden(name: &str) -> (TokenizerFile, Vec<String>) {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/tokenizers.json.gz");
    let file = flate2::read::GzDecoder::new(File::open(path).unwrap());
    let Golden { lines, files } = serde_json::from_reader(file).unwrap();
    let json = files[name].json.clone().into_bytes();
    (TokenizerFile::from_json(name, json).unwrap(), lines)
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// Small, so that a few kilobytes are many pieces, and saved behind every batch.
const SMALL: Granularity =
    Granularity { piece_bytes: 500, pieces: 2, save_interval: Duration::ZERO };

fn options(inputs: &[&Path], tokenizer: &TokenizerFile, out: &Path) -> PrepareOptions {
    PrepareOptions {
        inputs: inputs.iter().map(PathBuf::from).collect(),
        tokenizer: tokenizer.clone(),
        end_token: tokenizer.end_token(Path::new("nowhere")).unwrap(),
        key: "text".into(),
        allow_special: false,
        plain: false,
        out: out.into(),
        wait: false,
    }
}

fn marked(text: &str) -> Vec<u8> {
    [BYTE_ORDER_MARK, text.as_bytes()].concat()
}

/// A directory of a text, of JSON Lines, and of both packed, some of them with a byte order mark,
/// with its documents in order.
fn corpus(lines: &[String]) -> (TempDir, Vec<String>) {
    let directory = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| {
        let path = directory.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    };
    let json = |documents: &[String]| {
        let line = |text: &String| serde_json::json!({"id": 1, "text": text}).to_string() + "\n";
        documents.iter().map(line).collect::<String>()
    };
    let (text, long) = (lines.join("\n"), lines[..300].join("\n"));
    let of_lines = [&lines[..200], &[String::new(), long], &lines[200..250]].concat();
    write("a/b.txt", &marked(&text));
    write("a/c.jsonl", (json(&of_lines) + "\n  \n").as_bytes());
    write("a/picture.png", b"no text");
    write("a/.hidden.txt", b"hidden");
    write("b.jsonl.gz", &gzip(&marked(&json(&lines[250..400]))));
    write("c.txt.gz", &gzip(text.as_bytes()));
    write("empty.txt", b"");
    let mut documents = vec![text.clone()];
    documents.extend(of_lines);
    documents.extend(lines[250..400].to_vec());
    documents.push(text);
    documents.retain(|document| !document.is_empty());
    (directory, documents)
}

fn content(out: &Path) -> [Vec<u8>; 3] {
    [TOKENS, "tokens.json", TOKENIZER].map(|name| fs::read(out.join(name)).unwrap())
}

#[test]
fn documents_are_the_ids_of_each_with_the_end_token_behind() {
    for name in ["gpt2", "llama3", "llama2"] {
        let (tokenizer, lines) = golden(name);
        let (directory, documents) = corpus(&lines);
        let out = tempfile::tempdir().unwrap();
        let options = options(&[directory.path()], &tokenizer, out.path());
        let end = options.end_token.unwrap();
        let mut last = None;
        let prepared = prepare_by(SMALL, &options, &mut |progress| last = Some(progress)).unwrap();
        let mut expected = Vec::new();
        let mut starts = Vec::new();
        for document in &documents {
            starts.push(expected.len() as u64);
            expected.extend(tokenizer.encode(name, document).unwrap());
            expected.push(end);
        }
        let file = TokenFile::open(out.path(), 0.0, 4).unwrap();
        assert!(file.tokens(Split::Train, 0..file.len(Split::Train)) == expected, "{name}");
        let text = fs::read(out.path().join("tokens.json")).unwrap();
        let info = TokenFileInfo::parse("tokens.json", &text).unwrap();
        assert!(info.documents.unwrap() == starts && info.version == 2, "{name}");
        assert_eq!(info.end_token, Some(end));
        let known = file.with_end_token(file.tokenizer().unwrap().unwrap());
        assert_eq!((&known, known.named_end_token()), (&tokenizer, Some(end)));
        assert_eq!(
            (prepared.tokens, prepared.documents),
            (expected.len() as u64, starts.len() as u64)
        );
        assert_eq!((prepared.left_out, prepared.before), (1, 0));
        let last = last.unwrap();
        assert_eq!((last.bytes, last.tokens), (last.total, prepared.tokens));
        let names: Vec<_> =
            fs::read_dir(out.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(names.len(), 3, "{names:?}");
    }
}

#[test]
fn what_was_stopped_goes_on_to_the_same_bytes() {
    let (tokenizer, lines) = golden("gpt2");
    let (directory, _) = corpus(&lines);
    let whole = tempfile::tempdir().unwrap();
    let mut reports = 0;
    let in_one = options(&[directory.path()], &tokenizer, whole.path());
    let all = prepare_by(SMALL, &in_one, &mut |_| reports += 1).unwrap().tokens;
    assert!(reports > 20, "{reports}");
    let parts = tempfile::tempdir().unwrap();
    let options = options(&[directory.path()], &tokenizer, parts.path());
    // Each start gets further than the one before: a line of JSON is read as a whole.
    let mut starts = 0;
    let prepared = loop {
        starts += 1;
        let mut batches = 0;
        let ended = catch_unwind(AssertUnwindSafe(|| {
            prepare_by(SMALL, &options, &mut |_| {
                batches += 1;
                assert!(batches < 2 + starts / 2, "stopped");
            })
        }));
        // What was written behind the last save does not count.
        if let Ok(ended) = ended {
            break ended.unwrap();
        }
        for name in [PART, DOCUMENTS] {
            let mut part = File::options().append(true).open(parts.path().join(name)).unwrap();
            part.write_all(b"more").unwrap();
        }
    };
    assert!(starts > 5 && prepared.before > 0, "{starts} starts, {prepared:?}");
    assert!(content(whole.path()) == content(parts.path()));
    let again = prepare_by(SMALL, &options, &mut |_| panic!("nothing is left")).unwrap();
    assert_eq!((again.tokens, again.before), (all, all));
}

#[test]
fn special_tokens_in_a_text_are_text_unless_they_are_allowed() {
    let (tokenizer, _) = golden("gpt2");
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.txt");
    fs::write(&path, "a<|endoftext|>b").unwrap();
    let ids = |allow_special| {
        let out = tempfile::tempdir().unwrap();
        let options = options(&[&path], &tokenizer, out.path());
        let options = PrepareOptions { allow_special, end_token: None, ..options };
        prepare(&options, &mut |_| {}).unwrap();
        let file = TokenFile::open(out.path(), 0.0, 1).unwrap();
        file.tokens(Split::Train, 0..file.len(Split::Train))
    };
    let end = tokenizer.id_of("<|endoftext|>").unwrap();
    assert!(ids(false).len() > 5 && !ids(false).contains(&end));
    assert_eq!(ids(true).len(), 3);
    assert_eq!(ids(true)[1], end);
}

#[test]
fn the_end_token_is_that_of_the_configuration_beside_the_tokenizer() {
    let (tokenizer, _) = golden("gpt2");
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("tokenizer_config.json");
    let of = |text: &str| {
        fs::write(&path, text).unwrap();
        tokenizer.end_token(directory.path()).map_err(|why| why.to_string())
    };
    let the = tokenizer.id_of("the");
    assert!(the.is_some());
    assert_eq!(of(r#"{"eos_token": "the"}"#), Ok(the));
    assert_eq!(of(r#"{"eos_token": {"content": "the", "lstrip": false}}"#), Ok(the));
    assert_eq!(of(r#"{"eos_token": null}"#), Ok(tokenizer.id_of("<|endoftext|>")));
    assert!(of(r#"{"eos_token": "never"}"#).unwrap_err().contains("\"never\", which is no token"));
    assert!(of("[").unwrap_err().contains("is no configuration of a tokenizer"));
}

#[test]
fn inputs_that_are_not_what_they_say_are_refused_with_the_place() {
    let (tokenizer, _) = golden("gpt2");
    let refused = |name: &str, bytes: &[u8]| {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(name);
        fs::write(&path, bytes).unwrap();
        let options = options(&[&path], &tokenizer, &directory.path().join("out"));
        let why = prepare_by(SMALL, &options, &mut |_| {}).unwrap_err().to_string();
        let prefix = format!("{}{}", directory.path().display(), std::path::MAIN_SEPARATOR);
        why.replace(&prefix, "")
    };
    let broken = refused("a.jsonl", b"{\"text\": \"a\"}\n\n{\"text\": \n{\"text\": \"b\"}\n");
    assert!(broken.starts_with("a.jsonl: line 3: is no JSON ("), "{broken}");
    let cut = refused("a.jsonl.gz", &gzip(&b"{\"text\": \"abc\"}\n".repeat(9999))[..300]);
    assert!(cut.starts_with("a.jsonl.gz: cannot be read ("), "{cut}");
    let mut latin = "fine\n".repeat(400).into_bytes();
    latin.extend(b"caf\xe9 noir");
    let latin = refused("a.txt", &latin);
    assert!(latin.starts_with("a.txt: is not UTF-8 at byte 2003 (line 401);"), "{latin}");
    let parquet = refused("a.parquet", b"PAR1");
    assert!(parquet.contains("read_parquet('a.parquet').to_json('a.jsonl'"), "{parquet}");
    assert!(refused("a.json", b"[]").contains("jq -c '.[]' 'a.json' > 'a.jsonl'"));
    assert!(refused("a.txt.zst", b"").contains("unpack it"));
    assert_eq!(
        refused("a.txt", b""),
        "a.txt: is empty; give a file with data in it as --data or data.path"
    );
    let nothing = tempfile::tempdir().unwrap();
    fs::write(nothing.path().join("a.png"), b"").unwrap();
    let why = InputFiles::find(&[nothing.path().into()], false).unwrap_err().to_string();
    assert!(why.contains("has no text (.txt"), "{why}");
    // A data set of tables is not the text beside them.
    fs::write(nothing.path().join("about.txt"), "about").unwrap();
    fs::write(nothing.path().join("b.parquet"), b"").unwrap();
    let why = InputFiles::find(&[nothing.path().into()], false).unwrap_err().to_string();
    assert!(why.contains("b.parquet: is Parquet"), "{why}");
}

#[test]
fn other_tokens_in_a_directory_are_kept() {
    let (tokenizer, lines) = golden("gpt2");
    let directory = tempfile::tempdir().unwrap();
    let (a, out) = (directory.path().join("a.txt"), directory.path().join("out"));
    fs::write(&a, lines[..99].join("\n")).unwrap();
    let options = options(&[&a], &tokenizer, &out);
    prepare(&options, &mut |_| {}).unwrap();
    let before = content(&out);
    let other = PrepareOptions { end_token: None, ..options.clone() };
    let why = prepare(&other, &mut |_| {}).unwrap_err().to_string();
    assert!(why.contains("has other tokens, or the inputs changed since"), "{why}");
    fs::write(&a, lines[..98].join("\n")).unwrap();
    assert!(prepare(&options, &mut |_| {}).is_err());
    assert!(content(&out) == before);
    fs::remove_file(out.join("tokens.json")).unwrap();
    let why = prepare(&options, &mut |_| {}).unwrap_err().to_string();
    assert!(why.contains("tokens that are not of a preparation"), "{why}");
    let held = File::create(out.join(LOCK)).unwrap();
    held.lock().unwrap();
    let why = prepare(&options, &mut |_| {}).unwrap_err().to_string();
    assert!(why.contains("another process prepares"), "{why}");
}

#[test]
fn a_process_may_end_between_any_two_files() {
    let (tokenizer, lines) = golden("gpt2");
    let (directory, _) = corpus(&lines);
    let out = tempfile::tempdir().unwrap();
    let options = options(&[directory.path()], &tokenizer, out.path());
    let mut state = None;
    let kept = |name: &str| fs::read(out.path().join(name)).ok();
    prepare_by(SMALL, &options, &mut |_| state = [STATE, DOCUMENTS].map(kept).into()).unwrap();
    let whole = content(out.path());
    // The last report comes before the last save: all of the files are read again from there.
    let [Some(state), Some(starts)] = state.unwrap() else { panic!("no state was saved") };
    let restore = || {
        fs::write(out.path().join(STATE), &state).unwrap();
        fs::write(out.path().join(DOCUMENTS), &starts).unwrap();
    };
    // Interrupted before the description: the tokens are not taken for ids of 16 bits.
    restore();
    fs::remove_file(out.path().join("tokens.json")).unwrap();
    let why = TokenFile::open(out.path(), 0.0, 1).err().unwrap().to_string();
    assert!(why.contains("is of a preparation that has not ended"), "{why}");
    prepare_by(SMALL, &options, &mut |_| {}).unwrap();
    assert!(content(out.path()) == whole);
    // Behind it, before the rest was removed.
    restore();
    let again = prepare_by(SMALL, &options, &mut |_| {}).unwrap();
    assert_eq!(again.before, again.tokens);
    assert!(!out.path().join(STATE).exists() && !out.path().join(DOCUMENTS).exists());
    // Tokens that are gone, or were cut off, are made again.
    for bytes in [None, Some(&whole[0][..99])] {
        let path = out.path().join(TOKENS);
        match bytes {
            Some(bytes) => fs::write(path, bytes).unwrap(),
            None => fs::remove_file(path).unwrap(),
        }
        prepare_by(SMALL, &options, &mut |_| {}).unwrap();
        assert!(content(out.path()) == whole);
    }
}

#[test]
fn a_document_without_ids_is_none() {
    let (tokenizer, _) = golden("gpt2");
    let directory = tempfile::tempdir().unwrap();
    let out = directory.path().join("out");
    let mut output = TokenOutput::open(
        &PrepareOptions { end_token: None, ..options(&[], &tokenizer, directory.path()) },
        begun(&out, "").unwrap(),
        Duration::ZERO,
    )
    .unwrap();
    let piece = |begins, ends| Piece { text: String::new(), begins, ends, place: None };
    output.write(&piece(true, true), &[]).unwrap();
    output.write(&piece(true, false), &[]).unwrap();
    output.write(&piece(false, true), &[5, 6]).unwrap();
    output.write(&piece(true, true), &[]).unwrap();
    output.write(&piece(true, true), &[7]).unwrap();
    assert_eq!((output.tokens, output.documents), (3, 2));
}

#[test]
fn the_tokenizer_of_something_else_is_kept() {
    let (tokenizer, lines) = golden("gpt2");
    let directory = tempfile::tempdir().unwrap();
    let (a, model) = (directory.path().join("a.txt"), directory.path().join("model"));
    fs::write(&a, &lines[5]).unwrap();
    fs::create_dir(&model).unwrap();
    fs::write(model.join(TOKENIZER), "{}").unwrap();
    let why = prepare(&options(&[&a], &tokenizer, &model), &mut |_| {}).unwrap_err().to_string();
    assert!(why.contains("has another tokenizer.json"), "{why}");
    assert_eq!(fs::read(model.join(TOKENIZER)).unwrap(), b"{}");
}

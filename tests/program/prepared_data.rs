//! `potluck data prepare`, and runs on what it made.

use std::fs::{self, File};

use crate::process::Desk;
use flate2::read::GzDecoder;
use serde_json::Value;

/// Kept tokenizers, and lines that are hard to make tokens of.
fn golden() -> Value {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/tokenizers.json.gz");
    serde_json::from_reader(GzDecoder::new(File::open(path).unwrap())).unwrap()
}

/// Returns a desk with tokenizers in `gpt2` and `llama3`, and documents in `texts`.
fn desk() -> Desk {
    let (desk, golden) = (Desk::new(), golden());
    for name in ["gpt2", "llama3"] {
        fs::create_dir(desk.path(name)).unwrap();
        let json = golden["files"][name]["json"].as_str().unwrap();
        desk.write(&format!("{name}/tokenizer.json"), json);
    }
    fs::create_dir(desk.path("texts")).unwrap();
    let lines: Vec<&str> =
        golden["lines"].as_array().unwrap().iter().map(|line| line.as_str().unwrap()).collect();
    desk.write("texts/a.txt", lines.join("\n"));
    let document = |line: &&str| serde_json::json!({"body": line, "url": 1}).to_string() + "\n";
    desk.write("b.jsonl", lines.iter().map(document).collect::<String>());
    desk
}

const MODEL: &str = "--set model.bias=true --set model.activation=gelu_tanh --set model.width=16 \
                     --set model.heads=2 --set model.layers=1 --set model.context=16 --batch 4 \
                     --devices cpu --quiet";

#[test]
fn texts_prepared_are_trained_on() {
    let desk = desk();
    let line = "data prepare texts b.jsonl --key body --tokenizer gpt2 --out tokens";
    let refused = desk.run("data prepare b.jsonl --tokenizer gpt2 --out tokens").ended(78);
    assert!(refused.line("error:").contains("b.jsonl: line 1: has no \"text\""), "{}", refused.err);
    // Nothing was written yet, so that another line may follow.
    let prepared = desk.run(line).ok();
    assert!(prepared.out.contains("tokens of 1,000 documents, vocabulary 420"), "{}", prepared.out);
    assert!(prepared.out.contains("potluck train --data tokens\n"), "{}", prepared.out);
    assert!(prepared.out.contains("documents end with the token <|endoftext|> ("));
    let info: Value =
        serde_json::from_slice(&fs::read(desk.path("tokens/tokens.json")).unwrap()).unwrap();
    assert_eq!((&info["version"], info["documents"].as_array().unwrap().len()), (&2.into(), 1000));
    assert!(desk.run(line).ok().err.contains("were already prepared"));

    // JSON that is not prepared is trained on as it is, which is told.
    let raw = "--data b.jsonl --set model.context=16 --devices cpu --steps 1";
    let told = desk.run(&format!("train tiny.toml {raw} --out raw")).ok();
    let note = told.line("note: ");
    assert!(note.contains("b.jsonl has documents as lines of JSON"), "{note}");

    desk.run(&format!("train --data tokens {MODEL} --steps 3 --out run")).ok();
    let tokenizer = &desk.manifest("run", 3)["meta"]["tokenizer"];
    assert_eq!(tokenizer["blake3"], info["tokenizer"]);
    let generated = desk.run("generate run --prompt hello --tokens 8").ok();
    assert!(generated.out.starts_with("hello"), "{}", generated.out);
    // The same text, and the tokens of it, have the same loss but for the end of the document.
    let plain = desk.run("data prepare texts --tokenizer gpt2 --end-token none --out plain").ok();
    assert!(plain.out.contains("no token ends documents"), "{}", plain.out);
    let loss = |data: &str| {
        let evaluated = desk.run(&format!("eval run --data {data} --json")).ok();
        let evaluated: Value = serde_json::from_str(&evaluated.out).unwrap();
        evaluated["loss"].as_f64().unwrap()
    };
    assert_eq!(loss("plain"), loss("texts/a.txt"));
    // The token that ended the documents ends texts, also in exports, whatever its name.
    let comma = desk.run("data prepare texts --tokenizer gpt2 --end-token , --out commas").ok();
    assert!(comma.out.contains("documents end with the token , ("), "{}", comma.out);
    desk.run(&format!("train --data commas {MODEL} --steps 1 --out ended")).ok();
    desk.run("export ended --out exported").ok();
    let json = |path: &str| -> Value {
        serde_json::from_slice(&fs::read(desk.path(path)).unwrap()).unwrap()
    };
    let end = &json("commas/tokens.json")["end_token"];
    assert!(end.is_u64() && json("exported/config.json")["eos_token_id"] == *end, "{end}");
    // Also if the run started from a model whose configuration names another.
    desk.run("export run --out first").ok();
    desk.write("first/tokenizer_config.json", r#"{"eos_token": "a"}"#);
    let line = "train --init first --data commas --set model.context=16 --steps 1 --out fine";
    desk.run(&format!("{line} --devices cpu --quiet")).ok();
    desk.run("export fine --out ends-with-comma").ok();
    let ends = &json("ends-with-comma/config.json")["eos_token_id"];
    assert_eq!(if ends.is_array() { &ends[0] } else { ends }, end);
    // From here on, the run has its own tokenizer; ids of another one are refused.
    desk.run("data prepare texts --tokenizer llama3/tokenizer.json --out other").ok();
    let refused = desk.run("eval run --data other").ended(78);
    assert!(refused.line("error:").contains("ids of another tokenizer"), "{}", refused.err);
    desk.run("train --resume run --steps 4 --devices cpu --quiet").ok();

    // A model that has a tokenizer takes no ids of another one.
    desk.run("export run --out model").ok();
    let start = "train --init model --devices cpu --quiet --steps 1 --set model.context=16";
    let refused = desk.run(&format!("{start} --data other --out no")).ended(78);
    let told = refused.line("error:");
    assert!(told.contains("other: has ids of another tokenizer"), "{told}");
    desk.run(&format!("{start} --data tokens --out on")).ok();

    // Of a tokenizer with more tokens, both numbers are told.
    let mut larger: Value =
        serde_json::from_slice(&fs::read(desk.path("gpt2/tokenizer.json")).unwrap()).unwrap();
    larger["model"]["vocab"]["<more>"] = 420.into();
    desk.write("larger.json", larger.to_string());
    desk.run("data prepare texts --tokenizer larger.json --out more").ok();
    let refused = desk.run(&format!("{start} --data more --out no")).ended(78);
    let told = refused.line("error:");
    assert!(told.contains("more: has ids of a vocabulary of 421, and "), "{told}");
    assert!(told.ends_with("tokenizer.json has 420"), "{told}");
}

/// Ids are prepared without the tokens that a tokenizer puts around texts, and so are exports,
/// which take the same ids.
#[test]
fn tokenizer_with_template_exported_takes_its_ids() {
    let desk = desk();
    let path = desk.path("llama3/tokenizer.json");
    let mut tokenizer: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let begin = serde_json::json!({"SpecialToken": {"id": "<s>", "type_id": 0}});
    let text = |id: &str, kind: u32| serde_json::json!({"Sequence": {"id": id, "type_id": kind}});
    tokenizer["post_processor"] = serde_json::json!({
        "type": "TemplateProcessing",
        "single": [begin, text("A", 0)],
        "pair": [begin, text("A", 0), text("B", 1)],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [2], "tokens": ["<s>"]}},
    });
    fs::write(&path, tokenizer.to_string()).unwrap();
    desk.run("data prepare texts --tokenizer llama3 --out tokens").ok();
    desk.run(&format!("train --data tokens {MODEL} --steps 1 --out run")).ok();
    desk.run("export run --out model").ok();
    let bare: Value =
        serde_json::from_slice(&fs::read(desk.path("model/tokenizer.json")).unwrap()).unwrap();
    assert!(bare["post_processor"].is_null(), "{}", bare["post_processor"]);
    desk.run("eval model --data tokens --devices cpu").ok();
    let start = "train --init model --data tokens --set model.context=16 --devices cpu --quiet";
    desk.run(&format!("{start} --steps 1 --out further")).ok();
    desk.run("train --resume further --steps 2 --devices cpu --quiet").ok();
}

#[test]
fn ids_without_description_are_read() {
    let desk = desk();
    let ids: Vec<u8> = (0..400u16).flat_map(|n| (n % 97).to_le_bytes()).collect();
    desk.write("train.bin", &ids);
    desk.run(&format!("train --data train.bin {MODEL} --steps 2 --out bare")).ok();
    assert_eq!(desk.manifest("bare", 2)["meta"]["description"]["tokens"]["vocabulary"], 97);
    // Ids of other files fit the model if they are below its vocabulary.
    let below: Vec<u8> = (0..400u16).flat_map(|n| (n % 90).to_le_bytes()).collect();
    desk.write("val.bin", below);
    desk.run("eval bare --data val.bin --devices cpu").ok();
    desk.write("val.bin", (0..400u16).flat_map(|n| (n % 99).to_le_bytes()).collect::<Vec<u8>>());
    let refused = desk.run("eval bare --data val.bin --devices cpu").ended(78);
    let told = refused.line("error:");
    assert!(told.contains("a vocabulary of 99, and the model has 97"), "{told}");
    // A model with further tokens takes them.
    let padded = "--set model.vocabulary=104 --steps 1 --out padded";
    desk.run(&format!("train --data train.bin {MODEL} {padded}")).ok();
    desk.run("eval padded --data val.bin --devices cpu").ok();
    desk.run("train --resume padded --data val.bin --steps 2 --devices cpu --quiet").ok();
    let refused = desk.run("generate bare").ended(78);
    assert!(refused.line("error:").contains("token ids without a tokenizer"), "{}", refused.err);
    // With the tokenizer, they are a text.
    let named = "--set data.tokenizer=gpt2/tokenizer.json";
    desk.run(&format!("train --data train.bin {MODEL} {named} --steps 2 --out known")).ok();
    assert_eq!(desk.manifest("known", 2)["meta"]["tokenizer"]["vocabulary"], 420);
    desk.run("generate known --tokens 4").ok();
    desk.write("train.bin", [0xff, 0xff].repeat(400));
    let refused = desk.run(&format!("train --data train.bin {MODEL} {named} --out no")).ended(78);
    let told = refused.line("error:");
    assert!(told.contains("a vocabulary of 65536, and") && told.contains("has 420"), "{told}");
}

#[test]
fn text_with_tokenizer_prepared_once() {
    let desk = desk();
    let named = "--set data.tokenizer=gpt2/tokenizer.json";
    let train = |out: &str| {
        desk.run(&format!("train --data texts/a.txt {MODEL} {named} --steps 2 --out {out}")).ok();
        desk.losses(out)
    };
    let first = train("first");
    let of_cache = || -> Vec<_> {
        let found = fs::read_dir(desk.cache().join("tokens")).unwrap();
        found.map(|entry| entry.unwrap().path().join("tokens.bin")).collect()
    };
    let [tokens] = &of_cache()[..] else { panic!("{:?}", of_cache()) };
    let changed = || fs::metadata(tokens).unwrap().modified().unwrap();
    let before = changed();
    assert_eq!(train("second"), first);
    assert_eq!(changed(), before);
    // A text that changed is another one.
    let text = fs::read_to_string(desk.path("texts/a.txt")).unwrap();
    desk.write("texts/a.txt", format!("{text}\nmore"));
    train("third");
    assert_eq!(of_cache().len(), 2);
}

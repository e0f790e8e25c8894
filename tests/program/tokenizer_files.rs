//! Runs on a text that a `tokenizer.json` makes tokens of: the file travels with them.

use std::fs::{self, File};

use crate::process::Desk;
use flate2::read::GzDecoder;
use serde_json::Value;

/// Byte-level BPE with GPT-2's pattern and 420 tokens.
fn gpt2() -> String {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/tokenizers.json.gz");
    let golden: Value = serde_json::from_reader(GzDecoder::new(File::open(path).unwrap())).unwrap();
    golden["files"]["gpt2"]["json"].as_str().unwrap().to_string()
}

const GPT2: &str = "--set model.bias=true --set model.activation=gelu_tanh";

#[test]
fn tokenizer_travels_with_run_and_export() {
    let desk = Desk::new();
    fs::create_dir(desk.path("words")).unwrap();
    desk.write("words/tokenizer.json", gpt2());
    let line = format!("{GPT2} --set data.tokenizer=words/tokenizer.json --quiet");
    desk.train(&format!("{line} --steps 6 --set train.checkpoint_every=3 --out run")).ok();
    // The path as it was typed before.
    let again = "train --resume run --steps 7 --set data.tokenizer=words/tokenizer.json";
    desk.run(&format!("{again} --devices cpu --quiet")).ok();
    // From here on, the run has its own.
    fs::remove_dir_all(desk.path("words")).unwrap();
    let manifest = desk.manifest("run", 6);
    assert_eq!(manifest["needs"][0], "tokenizer-file");
    assert_eq!(manifest["meta"]["tokenizer"]["vocabulary"], 420);
    assert!(desk.checkpoint("run", 6, "tokenizer.json") == gpt2().into_bytes());
    let generated = desk.run("generate run --prompt hello --tokens 12 --seed 3").ok();
    assert!(generated.out.starts_with("hello"), "{}", generated.out);
    desk.run("eval run").ok();
    desk.resume("run", "--steps 8 --quiet").ok();
    let refused =
        desk.run("train --resume run --steps 9 --set data.tokenizer=byte --devices cpu").ended(78);
    assert!(refused.line("error:").contains("data.tokenizer does not fit"), "{}", refused.err);

    // An export has it, and a run from that takes it by itself.
    desk.run("export run --out model").ok();
    assert!(fs::read(desk.path("model/tokenizer.json")).unwrap() == gpt2().into_bytes());
    let class = fs::read_to_string(desk.path("model/tokenizer_config.json")).unwrap();
    assert!(class.contains("PreTrainedTokenizerFast"), "{class}");
    desk.run("train --init model --data text.txt --devices cpu --steps 0 --out on --quiet").ok();
    assert_eq!(desk.manifest("on", 0)["meta"]["tokenizer"], manifest["meta"]["tokenizer"]);
    // Unless another is named; its model has room for more tokens than the bytes.
    let line = "train --init model --data text.txt --devices cpu --steps 0 --quiet";
    desk.run(&format!("{line} --set data.tokenizer=byte --out bytes")).ok();
    assert_eq!(desk.manifest("bytes", 0)["meta"]["tokenizer"]["kind"], "byte");

    // A checkpoint with another file than its own, and one without.
    let path = desk.path("run").join("checkpoints/step-00000008/tokenizer.json");
    fs::write(&path, gpt2().replace("\"the\"", "\"eht\"")).unwrap();
    let refused = desk.run("eval run").ended(78);
    assert!(refused.line("error:").contains("tokenizer.json"), "{}", refused.err);
    fs::remove_file(&path).unwrap();
    let refused = desk.run("generate run").ended(78);
    assert!(refused.line("error:").contains("tokenizer.json"), "{}", refused.err);
    #[cfg(unix)]
    {
        desk.write("elsewhere.json", gpt2());
        std::os::unix::fs::symlink(desk.path("elsewhere.json"), &path).unwrap();
        let refused = desk.run("generate run").ended(78);
        assert!(refused.line("error:").contains("it is not a regular file"), "{}", refused.err);
    }
}

#[test]
fn tokenizers_unfit_are_refused() {
    let desk = Desk::new();
    let refused = |line: &str, why: &str| {
        let ended = desk.train(line).ended(78);
        assert!(ended.line("error:").contains(why), "{}", ended.err);
    };
    refused("--set data.tokenizer=Char", "is char, byte, or the path of a tokenizer.json");
    refused("--set data.tokenizer=nowhere.json", "nowhere.json: cannot be read (");
    desk.write("not.json", "{\"model\": 7}");
    refused("--set data.tokenizer=not.json", "not.json: is no tokenizer.json");
    desk.write("tokenizer.json", gpt2());
    let small = "--set data.tokenizer=tokenizer.json --set model.vocabulary=300";
    refused(small, "model.vocabulary expects at least the 420 tokens of the data, got 300");
    let bad = "train tiny.toml --data bad.txt --set data.tokenizer=tokenizer.json --devices cpu";
    fs::write(desk.path("bad.txt"), b"one\ntwo \xff three").unwrap();
    let ended = desk.run(bad).ended(78);
    assert!(ended.line("error:").contains("is not UTF-8 at byte 8 (line 2)"), "{}", ended.err);
}

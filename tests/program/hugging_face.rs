//! Runs that start from models in Hugging Face's files, and exports.

use std::fs;

use crate::process::{Desk, finish};
use serde_json::Value;

/// A GPT as GPT-2 has it.
const GPT2: &str = "--set model.bias=true --set model.activation=gelu_tanh";

#[test]
fn a_run_starts_from_an_export_with_its_bits_however_it_is_divided() {
    let desk = Desk::new();
    desk.train(&format!("{GPT2} --steps 3 --out run --quiet")).ok();
    let told = desk.run("export run --out model").ok();
    assert!(told.err.contains("the model of step 3 is in model"), "{}", told.err);
    assert!(told.err.contains("the tokenizer is one of potluck"), "{}", told.err);
    let config: Value =
        serde_json::from_str(&fs::read_to_string(desk.path("model/config.json")).unwrap()).unwrap();
    assert_eq!(config["model_type"], "gpt2");
    let weights = |of: &str| fs::read(desk.path(&format!("{of}/model.safetensors"))).unwrap();
    for (index, layout) in
        ["--devices cpu", "--devices cpu*2 --pipeline 2", "--devices cpu*2 --tensor 2"]
            .iter()
            .enumerate()
    {
        let (run, out) = (format!("run{index}"), format!("model{index}"));
        let line = format!("train --init model --data text.txt {layout} --steps 0 --out {run}");
        let started = desk.run(&line).ok();
        assert!(started.err.contains("starting from model: optim.lr = "), "{}", started.err);
        desk.run(&format!("export {run} --out {out}")).ok();
        assert!(weights(&out) == weights("model"), "{layout}");
    }
    // By name, from the cache.
    let snapshot = "hub/models--org--model/snapshots/0123abc";
    fs::create_dir_all(desk.path(&format!("{snapshot}/x"))).unwrap();
    fs::create_dir_all(desk.path("hub/models--org--model/refs")).unwrap();
    desk.write("hub/models--org--model/refs/main", "0123abc\n");
    for file in ["config.json", "model.safetensors"] {
        fs::copy(desk.path(&format!("model/{file}")), desk.path(&format!("{snapshot}/{file}")))
            .unwrap();
    }
    let line = "train --init org/model --data text.txt --devices cpu --steps 0 --out cached";
    let mut command = desk.command(line);
    command.env("HF_HUB_CACHE", desk.path("hub"));
    finish(command.spawn().unwrap(), line).ok();
    desk.run("export cached --out from-cache/").ok();
    assert!(weights("from-cache") == weights("model"));
    // A key of the model itself, or one that contradicts it.
    let line = "train --init model --data text.txt --devices cpu --explain memory";
    desk.run(&format!("{line} --set model.context=4")).ok();
    let refused = desk.run(&format!("{line} --set model.kind=llama")).ended(78);
    assert!(refused.err.contains("is that of the model from which"), "{}", refused.err);
    // A run goes on as any other.
    desk.resume("run0", "--steps 2 --quiet").ok();
    let kept = fs::read_to_string(desk.path("run0/run.toml")).unwrap();
    assert!(!kept.contains("\nwarmup = 0\n"), "{kept}");
    // The loss goes on where it was, at a tenth of the learning rate.
    let line = "train --init model --data text.txt --devices cpu --batch 8 --steps 40 --out on";
    desk.run(&format!("{line} --quiet")).ok();
    let kept = fs::read_to_string(desk.path("on/run.toml")).unwrap();
    assert!(kept.contains("warmup = 2\n") && kept.contains("layers = "), "{kept}");
    let half = desk.run("export on --out half --dtype bf16").ok();
    assert!(half.err.contains("step 40"), "{}", half.err);
    assert!(weights("half").len() * 10 < weights("model").len() * 6);
}

#[test]
fn models_that_cannot_be_read_or_written_are_refused() {
    let desk = Desk::new();
    let refused = |line: &str, why: &str| {
        let ended = desk.run(line).ended(78);
        assert!(ended.line("error:").contains(why), "{}", ended.err);
    };
    let from = |name: &str| format!("train --init {name} --data text.txt --devices cpu --out r");
    refused(&from("a/b/nowhere"), "a/b/nowhere: there is no such directory");
    refused(&from("nowhere"), "download it with: hf download nowhere");
    refused(&from("org/nowhere"), "download it with: hf download org/nowhere");
    fs::create_dir(desk.path("model")).unwrap();
    refused(&from("model"), "config.json: cannot be read");
    desk.write("model/config.json", r#"{"model_type": "mamba"}"#);
    refused(&from("model"), "model_type = \"mamba\" is none of gpt2, llama");
    desk.write(
        "model/config.json",
        r#"{"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16,
            "vocab_size": 5}"#,
    );
    refused(&from("model"), "model.vocabulary");
    assert!(!desk.path("r").exists());
    desk.run("train --init model --resume latest").ended(2);
    desk.train("--steps 0 --out run --quiet").ok();
    refused("export run --out there", "GPT-2 has biases");
    fs::create_dir(desk.path("there")).unwrap();
    refused("export run --out there", "there: is there already; name another with --out");
    desk.run("export run --out other --dtype f64").ended(2);
    assert!(!desk.path("other").exists());
    let left: Vec<String> = desk.files().into_iter().filter(|file| file.contains(".tmp")).collect();
    assert!(left.is_empty(), "{left:?}");
}

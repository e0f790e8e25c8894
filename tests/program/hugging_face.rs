//! Runs that start from models in Hugging Face's files, and exports.

use std::fs;

use crate::process::{Desk, finish};
use serde_json::{Value, json};

/// A GPT as GPT-2 has it.
const GPT2: &str = "--set model.bias=true --set model.activation=gelu_tanh";

#[test]
fn init_export_any_layout_same_bits() {
    let desk = Desk::new();
    desk.train(&format!("{GPT2} --steps 3 --out run --quiet")).ok();
    let told = desk.run("export run --out model").ok();
    assert!(told.err.contains("the model of step 3 is in model"), "{}", told.err);
    // Its characters are in it, as a tokenizer.json.
    let generated = |of: &str| desk.run(&format!("generate {of} --tokens 30 --seed 3")).ok().out;
    assert_eq!(generated("run"), generated("model"));
    let evaluated = |of: &str| desk.run(&format!("eval {of} --data text.txt")).ok().out;
    assert_eq!(evaluated("run"), format!("step 3  {}", evaluated("model")));
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
    desk.run(&format!("{line} --set model.kind=gpt")).ok();
    let refused = desk.run(&format!("{line} --set model.kind=llama")).ended(78);
    assert!(refused.err.contains("is \"gpt\" in the model from which"), "{}", refused.err);
    // A run goes on as any other.
    desk.resume("run0", "--steps 2 --quiet").ok();
    let kept = fs::read_to_string(desk.path("run0/run.toml")).unwrap();
    assert!(!kept.contains("\nwarmup = 0\n"), "{kept}");
    let origin = format!("# Started from {:?}, by --init\n", desk.path("model"));
    assert!(kept.starts_with(&origin), "{kept}");
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
fn models_unreadable_are_refused() {
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
    refused(&from("model"), "model: has no model; give a run, a checkpoint, or a directory");
    for name in ["x.safetensors", "model/model.safetensors", "x.pt", "x.txt"] {
        desk.write(name, "");
    }
    let starting = "train --data text.txt --init";
    for command in [starting, "eval", "generate", "predict --data text.txt"] {
        let bare = if command == starting {
            "model.safetensors: is cut off in its header"
        } else {
            "model: has weights but no configuration; give a run"
        };
        for (name, why) in [
            ("model", bare),
            ("x.pt", "x.pt: is a Python pickle, which can run code"),
            ("x.txt", "x.txt: has no model; give a run, a checkpoint, or a directory"),
        ] {
            refused(&format!("{command} {name} --devices cpu"), why);
        }
    }
    fs::remove_file(desk.path("model/model.safetensors")).unwrap();
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
    desk.train("--steps 0 --out silu --quiet --set model.activation=silu").ok();
    refused("export silu --out there", "is none of GPT-2's; write --format safetensors");
    desk.train("--steps 0 --out run --quiet").ok();
    fs::create_dir(desk.path("there")).unwrap();
    refused("export run --out there", "there: is there already; name another with --out");
    desk.run("export run --out other --dtype f64").ended(2);
    assert!(!desk.path("other").exists());
    let left: Vec<String> = desk.files().into_iter().filter(|file| file.contains(".tmp")).collect();
    assert!(left.is_empty(), "{left:?}");
}

/// Each damage of files ends with one sentence that names the file, or the tensor.
#[test]
fn files_damaged_are_refused() {
    let desk = Desk::new();
    desk.write("tokenizer.json", tokenizer());
    let line = format!("{GPT2} --set data.tokenizer=tokenizer.json --steps 0 --out run --quiet");
    desk.train(&line).ok();
    desk.run("export run --out whole").ok();
    desk.run("export run --out shards --shard-size 10KB").ok();
    let damaged = |of: &str, file: &str, damage: &dyn Fn(Vec<u8>) -> Option<Vec<u8>>, why: &str| {
        let (model, path) = (desk.path("damaged"), desk.path("damaged").join(file));
        fs::create_dir(&model).unwrap();
        for found in fs::read_dir(desk.path(of)).unwrap().map(Result::unwrap) {
            fs::copy(found.path(), model.join(found.file_name())).unwrap();
        }
        match damage(fs::read(&path).unwrap()) {
            Some(bytes) => fs::write(&path, bytes).unwrap(),
            None => fs::remove_file(&path).unwrap(),
        }
        for line in [
            "train --init damaged --data text.txt --devices cpu --steps 1 --out r --quiet",
            "eval damaged --data text.txt --devices cpu",
        ] {
            let ended = desk.run(line).ended(78);
            let errors = ended.err.lines().filter(|line| line.starts_with("error:")).count();
            assert!(ended.line("error:").contains(why) && errors == 1, "{file}: {}", ended.err);
        }
        fs::remove_dir_all(&model).unwrap();
    };
    let replaced = |from: &'static str, to: &'static str| {
        move |bytes| Some(String::from_utf8(bytes).unwrap().replace(from, to).into_bytes())
    };
    const WEIGHTS: &str = "model.safetensors";
    damaged("whole", WEIGHTS, &|bytes| Some(bytes[..bytes.len() - 9].into()), WEIGHTS);
    let larger = replaced("\"n_embd\": 16", "\"n_embd\": 32");
    damaged("whole", "config.json", &larger, "is [420, 16], and the model's is [420, 32]");
    let none = replaced("\"model\"", "\"none\"");
    damaged("whole", "tokenizer.json", &none, "is no tokenizer.json");
    let mut shards: Vec<String> = Vec::new();
    for found in fs::read_dir(desk.path("shards")).unwrap().map(Result::unwrap) {
        shards.push(found.file_name().into_string().unwrap());
    }
    let shard = shards.iter().find(|name| name.starts_with("model-00002")).unwrap();
    damaged("shards", shard, &|_| None, "cannot be read");
    let refused = |line: &str, why: &[&str]| {
        let ended = desk.run(line).ended(78);
        assert!(why.iter().all(|why| ended.line("error:").contains(why)), "{}", ended.err);
    };
    let prepare = "data prepare --tokenizer tokenizer.json --out ids";
    desk.write("corpus.jsonl", "{\"text\": \"one\"}\n{\"text\": \"tw\n");
    refused(&format!("{prepare} corpus.jsonl"), &["corpus.jsonl", "line 2"]);
    desk.write("corpus.parquet", "PAR1");
    refused(&format!("{prepare} corpus.parquet"), &["corpus.parquet", "to_json"]);
}

/// A model in files is evaluated, continued and written again as the run is that it came from.
#[test]
fn commands_take_models_in_files() {
    let desk = Desk::new();
    fs::create_dir(desk.path("words")).unwrap();
    desk.write("words/tokenizer.json", tokenizer());
    let line = "--set model.bias=true --set model.activation=gelu_tanh --quiet";
    desk.train(&format!("{line} --set data.tokenizer=words/tokenizer.json --steps 3 --out run"))
        .ok();
    desk.run("export run --out model").ok();
    let json = |line: &str| -> serde_json::Value {
        serde_json::from_str(&desk.run(line).ok().out).unwrap()
    };
    let of_run = json("eval run --data text.txt --json --micro-batch 4");
    let of_files = json("eval model --data text.txt --json --devices cpu --micro-batch 4");
    assert_eq!((&of_files["loss"], &of_files["step"]), (&of_run["loss"], &serde_json::Value::Null));
    assert_eq!(of_files["perplexity"], of_run["perplexity"]);
    let told = desk.run("eval model --data text.txt --devices cpu*2").ok();
    assert!(told.out.starts_with("loss "), "{}", told.out);
    let text = |model: &str| {
        desk.run(&format!("generate {model} --prompt hello --tokens 20 --seed 5")).ok().out
    };
    assert_eq!(text("model"), text("run"));
    desk.run("generate model --tokens 3 --devices cpu*2 --pipeline 2").ok();
    // Of nearly one probability, only the most likely token is left, as with temperature 0.
    let with = |words: &str| {
        desk.run(&format!("generate model --prompt hello --tokens 12 --seed 7 {words}")).ok().out
    };
    let greedy = with("--temperature 0");
    for words in ["--top-p 0.0", "--min-p 1", "--top-k 1"] {
        assert_eq!(with(words), greedy, "{words}");
    }
    assert_ne!(with("--temperature 0 --repetition-penalty 9"), greedy);
    let end = &greedy["hello".len()..][2..4];
    let stopped = with(&format!("--temperature 0 --stop never --stop {end}"));
    assert!(greedy.starts_with(stopped.trim_end_matches('\n')), "{stopped:?} of {greedy:?}");
    assert!(!stopped["hello".len()..].contains(end), "{stopped:?} has {end:?}");
    // The model's files say which tokens end a text.
    let path = desk.path("model/generation_config.json");
    let before = fs::read(&path).unwrap();
    let all: Vec<u32> = (0..420).collect();
    fs::write(&path, serde_json::json!({"eos_token_id": all}).to_string()).unwrap();
    assert_eq!(with(""), "hello\n");
    assert_eq!(with("--temperature 0 --ignore-end"), greedy);
    fs::write(&path, before).unwrap();
    let told = desk.run("export model --out again").ok();
    assert!(told.err.contains("the model is in again"), "{}", told.err);
    for name in ["model.safetensors", "config.json", "tokenizer.json"] {
        let read = |directory: &str| fs::read(desk.path(directory).join(name)).unwrap();
        assert!(read("again") == read("model"), "{name}");
    }

    // A longer context than a run would take by itself, but no more than the model has positions.
    let evaluated = desk.run("eval model --data text.txt --set model.context=5").ok();
    assert!(evaluated.out.contains("targets in"), "{}", evaluated.out);
    let refused = |line: &str, expected: &str| {
        let ran = desk.run(line).ended(78);
        assert!(ran.line("error:").contains(expected), "{line}: {}", ran.err);
    };
    refused("eval model --set model.context=999 --data text.txt", "model.context");
    refused("eval model", "no data of its own; pass --data");
    refused("eval model --best --data text.txt", "is no run, whose best checkpoint");
    refused("predict model --data text.txt", "potluck generate --help");
    refused("eval nothing/here --data text.txt", "nothing/here");
    // Without its tokenizer there are ids only.
    fs::remove_file(desk.path("model/tokenizer.json")).unwrap();
    refused("generate model", "token ids without a tokenizer");
    refused("eval model --data text.txt", "the model has no tokenizer.json");
    let ids: Vec<u8> = (0..300u16).flat_map(|n| (n % 97).to_le_bytes()).collect();
    desk.write("ids.bin", ids);
    desk.run("eval model --data ids.bin").ok();
    // One with more tokens than the model has rows.
    let mut more: Value = serde_json::from_str(&tokenizer()).unwrap();
    let mut token = more["added_tokens"][0].clone();
    (token["id"], token["content"]) = (420.into(), "<more>".into());
    more["added_tokens"].as_array_mut().unwrap().push(token);
    desk.write("again/tokenizer.json", more.to_string());
    refused("generate again", "has 421 tokens, and the model beside it 420");
}

/// Returns a kept tokenizer of 420 tokens.
fn tokenizer() -> String {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/tokenizers.json.gz");
    let file = flate2::read::GzDecoder::new(fs::File::open(path).unwrap());
    let golden: serde_json::Value = serde_json::from_reader(file).unwrap();
    golden["files"]["gpt2"]["json"].as_str().unwrap().to_string()
}

/// Tokens that a tokenizer has and its model has not are added with the mean of the others' rows,
/// to models in files and to runs.
#[test]
fn add_tokens_grows_tables_by_mean() {
    let desk = Desk::new();
    desk.write("tokenizer.json", tokenizer());
    let untied = "--set model.tie=false";
    for (form, kind) in [("gpt", GPT2), ("llama", "--set model.kind=llama")] {
        for (ties, tie) in [("", ""), ("-untied", untied)] {
            let run = format!("{form}{ties}");
            let line = format!("{kind} {tie} --set data.tokenizer=tokenizer.json --steps 1");
            desk.train(&format!("{line} --out {run} --quiet")).ok();
            desk.run(&format!("export {run} --out {run}-model")).ok();
        }
    }
    let mut more: Value = serde_json::from_str(&tokenizer()).unwrap();
    let mut token = more["added_tokens"][0].clone();
    for id in 420..423 {
        (token["id"], token["content"]) = (id.into(), format!("<more {id}>").into());
        more["added_tokens"].as_array_mut().unwrap().push(token.clone());
    }
    desk.write("more.json", more.to_string());
    let start = "train --data text.txt --devices cpu --set data.tokenizer=more.json --steps 0";
    for from in ["gpt-model", "llama-model", "llama-untied-model", "gpt-untied-model", "gpt"] {
        let line = format!("{start} --init {from}");
        let told = desk.run(&format!("{line} --out none")).ended(78);
        assert!(told.line("error:").contains("--add-tokens"), "{}", told.err);
        let (out, exported) = (format!("{from}-more"), format!("{from}-exported"));
        let told = desk.run(&format!("{line} --add-tokens --out {out}")).ok();
        assert!(told.err.contains("3 tokens are added to the 420 of"), "{}", told.err);
        desk.run(&format!("export {out} --out {exported}")).ok();
        let before = if from == "gpt" { "gpt-model" } else { from };
        let [before, after] = [before, &exported]
            .map(|model| fs::read(desk.path(&format!("{model}/model.safetensors"))).unwrap());
        let [before, after] =
            [&before, &after].map(|bytes| safetensors::SafeTensors::deserialize(bytes).unwrap());
        let mut tables = 0;
        for (name, tensor) in before.tensors() {
            let grown = after.tensor(&name).unwrap();
            let (old, new) = (tensor.data(), grown.data());
            assert_eq!(&new[..old.len()], old, "{from}: {name}");
            if tensor.shape()[0] != 420 {
                assert_eq!(new.len(), old.len(), "{from}: {name}");
                continue;
            }
            tables += 1;
            let columns = tensor.shape()[1];
            assert_eq!(grown.shape(), [423, columns]);
            let old: Vec<f32> = bytemuck::pod_collect_to_vec(old);
            let new: Vec<f32> = bytemuck::pod_collect_to_vec(new);
            for (at, value) in new[old.len()..].iter().enumerate() {
                let column = old.iter().skip(at % columns).step_by(columns);
                let mean = column.map(|value| f64::from(*value)).sum::<f64>() / 420.0;
                assert!((f64::from(*value) - mean).abs() < 1e-7, "{from}: {name} {at}");
            }
        }
        assert_eq!(tables, if from.contains("untied") { 2 } else { 1 });
        // Its own run goes on as any other, and knows the new tokens.
        desk.run(&format!("train --resume {out} --steps 1 --quiet")).ok();
        desk.run(&format!("generate {out} --prompt \"<more421>\" --tokens 3")).ok();
        let config = fs::read_to_string(desk.path(&format!("{out}/run.toml"))).unwrap();
        assert!(config.contains("vocabulary = 423"), "{config}");
    }
    assert!(desk.path("gpt-model-more/model_files/generation_config.json").is_file());
    // Token ids with a tokenizer beside them, which no key names.
    desk.run("data prepare text.txt --tokenizer more.json --out ids").ok();
    let line = "train --init gpt-model --data ids --devices cpu --steps 0 --add-tokens";
    let told = desk.run(&format!("{line} --out of-ids")).ok();
    assert!(told.err.contains("3 tokens are added to the 420 of"), "{}", told.err);
    let told = desk.run(&format!("{line} --out wider --set model.vocabulary=512")).ok();
    assert!(told.err.contains("92 tokens are added to the 420 of"), "{}", told.err);
    // None that is missing, and a model of characters.
    let line = "train --data text.txt --devices cpu --steps 0 --add-tokens";
    let told = desk.run(&format!("{line} --init gpt-model --out none")).ok();
    assert!(told.err.contains("no tokens are added"), "{}", told.err);
    fs::remove_dir_all(desk.path("none")).unwrap();
    desk.train("--steps 0 --out letters --quiet").ok();
    let line = format!("{start} --init letters --add-tokens --out none");
    let told = desk.run(&line).ended(78);
    assert!(told.line("error:").contains("has characters or bytes"), "{}", told.err);
    // A tokenizer with other ids.
    let vocabulary = more["model"]["vocab"].as_object_mut().unwrap();
    let ids = ["!", "?"].map(|token| vocabulary[token].clone());
    for (token, id) in ["?", "!"].into_iter().zip(ids) {
        vocabulary.insert(token.into(), id);
    }
    desk.write("other.json", more.to_string());
    let line = start.replace("more.json", "other.json");
    let told = desk.run(&format!("{line} --init gpt-model --add-tokens --out none")).ended(78);
    assert!(told.line("error:").contains("has other ids than the model's"), "{}", told.err);
    more["added_tokens"].as_array_mut().unwrap().truncate(1);
    desk.write("swapped.json", more.to_string());
    let line = start.replace("more.json", "swapped.json");
    let told = desk.run(&format!("{line} --init gpt-model --out swapped")).ok();
    assert!(told.line("warning:").contains("has other ids than the model's"), "{}", told.err);
    let line = "train --data text.txt --devices cpu --add-tokens --out none";
    let told = desk.run(line).ended(2);
    assert!(told.err.contains("--init"), "{}", told.err);
}

/// A run starts from another one with new data: the parameters, the tokenizer and the keys of the
/// model are those of that, and the schedule is its own.
#[test]
fn init_run_or_checkpoint_same_bits() {
    let desk = Desk::new();
    desk.train("--steps 4 --set train.checkpoint_every=2 --out run --quiet").ok();
    let text = fs::read_to_string(desk.path("text.txt")).unwrap();
    desk.write("more.txt", text.chars().rev().collect::<String>());
    let start = "train --data more.txt --devices cpu";
    let parameters = |run: &str, step| desk.checkpoint(run, step, "parameters.safetensors");
    for (from, step, out, layout) in [
        ("run", 4, "on", ""),
        ("run/checkpoints/step-00000002", 2, "older", ""),
        ("run", 4, "divided", "--devices cpu*2 --pipeline 2"),
    ] {
        let told = desk.run(&format!("{start} --init {from} --steps 0 --out {out} {layout}")).ok();
        assert!(parameters(out, 0) == parameters("run", step), "{out}");
        assert!(told.err.contains("starting from run/checkpoints/step-0000000"), "{}", told.err);
        assert!(!told.err.contains("training on the built-in text"), "{}", told.err);
        let of_run = &desk.manifest("run", step)["meta"];
        let begun = desk.manifest(out, 0);
        assert_eq!(begun["meta"]["tokenizer"], of_run["tokenizer"]);
        assert_eq!((&begun["meta"]["step"], &begun["meta"]["samples"]), (&0.into(), &0.into()));
    }
    let without_data = desk.run("train --devices cpu --init run --steps 0 --out own");
    assert!(without_data.err.contains("training on the built-in text"));
    // A tenth of the rate of a new model of this width, and 3 % of the steps.
    let new = desk.run("train --explain config --data more.txt --init run").ok();
    let lr = |text: &str| -> f64 {
        let mut lines = text.lines().map(|line| line.trim_start_matches("# "));
        let line = lines.find_map(|line| line.strip_prefix("lr = ")).unwrap();
        line.split_whitespace().next().unwrap().parse().unwrap()
    };
    let plain = desk.run("train --explain config --data more.txt --set model.width=16").ok();
    assert!((lr(&new.out) / lr(&plain.out) - 0.1).abs() < 1e-9, "{}", new.out);
    desk.run(&format!("{start} --init run --steps 3 --out tuned --quiet")).ok();
    assert_eq!(desk.losses("tuned").len(), 3);

    let refused = |line: &str, expected: &str| {
        let ran = desk.run(&format!("{start} --init run --steps 1 --out no {line}")).ended(78);
        assert!(ran.line("error:").contains(expected), "{line}: {}", ran.err);
        assert!(!desk.path("no").exists(), "{line}");
    };
    refused("--set model.layers=9", "h.");
    refused("--set data.tokenizer=byte", "wte.weight");
    desk.write("more.txt", format!("{text}\u{1F600}").repeat(9));
    refused("", "is not in the vocabulary of");
}

/// GPT-2's files have biases: those of a model without them are zeros, which change nothing.
#[test]
fn export_gpt_without_biases_has_zeros() {
    let desk = Desk::new();
    desk.train("--steps 3 --out run --quiet").ok();
    let told = desk.run("export run --out model").ok();
    assert!(told.err.contains("GPT-2 has biases, which are zeros here"), "{}", told.err);
    let evaluated = |of: &str| desk.run(&format!("eval {of} --data text.txt")).ok().out;
    assert_eq!(evaluated("run"), format!("step 3  {}", evaluated("model")));
    let line = "train --init model --data text.txt --devices cpu --steps 0 --out on";
    desk.run(line).ok();
    assert_eq!(evaluated("on"), format!("step 0  {}", evaluated("model")));
    // Characters that are not the model's have other ids.
    desk.write("few.txt", "ab".repeat(400));
    fs::create_dir(desk.path("bare")).unwrap();
    for name in ["config.json", "model.safetensors"] {
        fs::copy(desk.path(&format!("model/{name}")), desk.path(&format!("bare/{name}"))).unwrap();
    }
    let ran = desk.run("train --init bare --data few.txt --devices cpu --steps 1 --out few").ok();
    let why = "the text has 2 different characters, and bare has 20 tokens: if it was trained";
    assert!(ran.line("warning:").contains(why), "{}", ran.err);
    let line = "train --init bare --data text.txt --devices cpu --steps 0 --out same";
    assert!(!desk.run(line).ok().err.contains("different characters"));
    let file = "train --init bare/model.safetensors --data text.txt --devices cpu --out no";
    let ran = desk.run(file).ended(78);
    assert!(ran.line("error:").contains("is a part of a model; give its directory: bare"));
}

/// A run starts from weights alone, which are those of the configured model.
#[test]
fn init_weights_alone_same_bits() {
    let desk = Desk::new();
    desk.train("--steps 3 --out run --quiet").ok();
    desk.run("export run --format safetensors --out weights.safetensors").ok();
    let start = "train tiny.toml --data text.txt --devices cpu --init weights.safetensors";
    let told = desk.run(&format!("{start} --steps 0 --out on")).ok();
    assert!(told.err.contains("starting from weights.safetensors: optim.lr = "), "{}", told.err);
    let parameters = |run: &str, step| desk.checkpoint(run, step, "parameters.safetensors");
    assert!(parameters("on", 0) == parameters("run", 3));
    desk.run(&format!("{start} --steps 2 --out tuned --quiet")).ok();
    desk.run("train --resume tuned --steps 4 --quiet --devices cpu").ok();
    assert_eq!(desk.losses("tuned").len(), 4);
    for (more, why) in [
        ("--set model.width=8", "wte.weight' is "),
        ("--set model.layers=3", "'h.1.ln_1.weight' is missing"),
        (
            "--set model.kind=llama",
            "weights without a config.json are those of the configured model",
        ),
    ] {
        let ran = desk.run(&format!("{start} --steps 1 --out no {more}")).ended(78);
        assert!(ran.line("error:").contains(why), "{more}: {}", ran.err);
        assert!(!desk.path("no").exists(), "{more}");
    }
    // Where the model is described, its description is asked for.
    let inside = "run/checkpoints/step-00000003/parameters.safetensors";
    let line = format!("train --data text.txt --devices cpu --init {inside} --out no");
    let ran = desk.run(&line).ended(78);
    assert!(ran.line("error:").contains("is a part of a run; give the run: run"), "{}", ran.err);
}

/// Strings of a list of a GGUF file, behind its key.
fn gguf_texts(bytes: &[u8], key: &str) -> Vec<String> {
    let at = bytes.windows(key.len()).position(|part| part == key.as_bytes()).unwrap();
    let length = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
    // Behind the codes of a list and of its entries.
    let mut at = at + key.len() + 8;
    let count = length(at);
    at += 8;
    let mut texts = Vec::new();
    for _ in 0..count {
        let end = at + 8 + length(at);
        texts.push(String::from_utf8(bytes[at + 8..end].to_vec()).unwrap());
        at = end;
    }
    texts
}

/// A model and its files, in all forms that an export has.
#[test]
fn export_forms_have_model_and_files() {
    let desk = Desk::new();
    fs::create_dir(desk.path("words")).unwrap();
    desk.write("words/tokenizer.json", tokenizer());
    let line = "--set data.tokenizer=words/tokenizer.json --set model.bias=true --set \
                model.activation=gelu_tanh --steps 2 --quiet";
    desk.train(&format!("{line} --out run")).ok();
    desk.run("export run --out model --shard-size 5KB").ok();
    let index: Value = serde_json::from_str(
        &fs::read_to_string(desk.path("model/model.safetensors.index.json")).unwrap(),
    )
    .unwrap();
    let map = index["weight_map"].as_object().unwrap();
    assert!(
        map.contains_key("transformer.wte.weight")
            && !desk.path("model/model.safetensors").exists()
    );
    let total: u64 = index["metadata"]["total_size"].as_u64().unwrap();
    let shards: Vec<String> =
        desk.files().into_iter().filter(|file| file.starts_with("model/model-")).collect();
    assert!(shards.len() > 3, "{shards:?}");
    let bytes: u64 = shards.iter().map(|file| fs::metadata(desk.path(file)).unwrap().len()).sum();
    assert!(bytes > total && bytes < total + 10_000 * shards.len() as u64);
    // The files of a model stay with it: in the run that starts from it, and in its exports.
    desk.write("model/chat_template.jinja", "{{ messages[0].content }}");
    desk.write("model/generation_config.json", r#"{"eos_token_id": [3, 4], "bos_token_id": 5}"#);
    desk.run("train --init model --data text.txt --devices cpu --steps 1 --out tuned --quiet").ok();
    desk.run("train --init tuned --data text.txt --devices cpu --steps 0 --out again --quiet").ok();
    desk.run("export again --out exported").ok();
    for name in ["chat_template.jinja", "generation_config.json"] {
        let read = |of: &str| fs::read_to_string(desk.path(&format!("{of}/{name}"))).unwrap();
        assert_eq!(read("exported"), read("model"), "{name}");
    }
    let config: Value =
        serde_json::from_str(&fs::read_to_string(desk.path("exported/config.json")).unwrap())
            .unwrap();
    assert_eq!((&config["eos_token_id"], &config["bos_token_id"]), (&json!([3, 4]), &json!(5)));
    desk.run("export model --out whole --format safetensors --dtype f16").ok();
    let whole = fs::read(desk.path("whole")).unwrap();
    let whole = safetensors::SafeTensors::deserialize(&whole).unwrap();
    assert_eq!(whole.tensor("wte.weight").unwrap().dtype(), safetensors::Dtype::F16);
    desk.run("export again --out tuned.gguf --format gguf --dtype q8_0").ok();
    let bytes = fs::read(desk.path("tuned.gguf")).unwrap();
    assert!(bytes.starts_with(b"GGUF\x03\0\0\0"));
    let has = |text: &str| bytes.windows(text.len()).any(|part| part == text.as_bytes());
    assert!(has("general.architecture") && has("{{ messages[0].content }}"));
    assert!(has("blk.0.attn_qkv.weight") && has("tokenizer.ggml.bos_token_id"));
    let tokens = gguf_texts(&bytes, "tokenizer.ggml.tokens");
    assert_eq!(tokens.len() as u64, config["vocab_size"].as_u64().unwrap());
    assert!(tokens.contains(&"<|endoftext|>".to_string()), "{:?}", &tokens[..9]);
    assert!(!gguf_texts(&bytes, "tokenizer.ggml.merges").is_empty());
    // What has no such form is refused, and leaves nothing.
    let refused = |line: &str, why: &str| {
        let ended = desk.run(line).ended(78);
        assert!(ended.line("error:").contains(why), "{}", ended.err);
    };
    refused("export again --out tuned.gguf --format gguf", "tuned.gguf: is there already");
    refused("export again --out no --dtype q8_0", "q8_0 is a type of GGUF files");
    desk.train("--steps 0 --out letters --quiet --set model.bias=true").ok();
    refused("export letters --out no --format gguf", "this model has none");
    let rnn = "--set model.kind=rnn --set model.width=16 --steps 0 --out rnn --quiet";
    desk.run(&format!("train --data text.txt --devices cpu {rnn}")).ok();
    for form in ["huggingface", "gguf"] {
        let why = "model.kind = \"rnn\" is neither gpt nor llama; --format safetensors writes";
        refused(&format!("export rnn --out no --format {form}"), why);
    }
    desk.run("export letters --out letters.safetensors --format safetensors").ok();
    assert!(!desk.path("no").exists());
    let left: Vec<String> = desk.files().into_iter().filter(|file| file.contains(".tmp")).collect();
    assert!(left.is_empty(), "{left:?}");
}

/// Windows that overlap count each target once, behind more tokens.
#[test]
fn eval_stride_counts_targets_once() {
    let desk = Desk::new();
    desk.train("--steps 30 --out run --quiet").ok();
    let evaluated = |line: &str| -> Value {
        serde_json::from_str(&desk.run(&format!("eval run --json {line}")).ok().out).unwrap()
    };
    let (beside, overlapping) = (evaluated(""), evaluated("--stride 2"));
    let number = |of: &Value, key: &str| of[key].as_f64().unwrap();
    assert!(number(&overlapping, "targets") >= number(&beside, "targets"));
    assert!(number(&overlapping, "samples") > 2.0 * number(&beside, "samples"));
    assert!(number(&overlapping, "loss") < number(&beside, "loss"));
    let told = desk.run("eval run --stride 100000").ended(78);
    assert!(told.err.contains("stride: is from 1 to the"), "{}", told.err);
}

//! Generation of text by models in Hugging Face's files, against transformers.

use crate::language_models::{assert_continued, golden_texts, write_model};
use crate::process::Desk;

#[test]
fn greedy_any_layout_is_transformers() {
    let desk = Desk::new();
    let golden = golden_texts();
    assert_eq!(golden.len(), 8);
    for (name, texts) in &golden {
        write_model(&desk, name);
        for options in ["--devices cpu", "--devices cpu --no-cache", "--devices cpu*2 --pipeline 2"]
        {
            assert_continued(&desk, name, texts, options);
        }
    }
    let few = &golden["hf_llama"];
    assert_continued(&desk, "hf_llama", few, "--devices cpu*2 --pipeline 2 --no-cache");
}

/// The models above are too narrow for tensor groups.
#[test]
fn tensor_group_has_text_of_one_device() {
    let desk = Desk::new();
    for kind in ["gpt", "llama"] {
        let options = "--set model.heads=4 --set model.width=128 --set model.context=32";
        desk.train(&format!("{options} --set model.kind={kind} --steps 20 --out {kind} --quiet"))
            .ok();
        let text = |way: &str| {
            let line = format!(
                "generate {kind} {way} --tokens 60 --seed 5 --prompt th --prompt a --prompt ll"
            );
            desk.run(&line).ok().out
        };
        let alone = text("--devices cpu");
        assert!(alone.lines().count() >= 5, "{alone}");
        for way in [
            "--devices cpu*2 --tensor 2",
            "--devices cpu*4 --tensor 2 --pipeline 2",
            "--devices cpu --no-cache",
            "--devices cpu*2 --tensor 2 --no-cache",
        ] {
            assert_eq!(text(way), alone, "{kind} {way}");
        }
    }
}

/// A model whose context is full goes on with the last half of what it sees, with a cache and
/// without one.
#[test]
fn text_beyond_context_same_without_cache() {
    let desk = Desk::new();
    write_model(&desk, "hf_gpt2");
    write_model(&desk, "hf_qwen3");
    for name in ["hf_gpt2", "hf_qwen3"] {
        let text = |options: &str| {
            let line = format!(
                "generate {name} {options} --devices cpu --tokens 70 --seed 3 --prompt t1 \
                 --set model.context=13 --repetition-penalty 1.1 --ignore-end"
            );
            desk.run(&line).ok().out
        };
        let with_cache = text("");
        assert_eq!(with_cache, text("--no-cache"));
        assert_eq!(with_cache.split_whitespace().count(), 71);
        // Several at a time have the text of each.
        let both = desk.run(&format!(
            "generate {name} --devices cpu --tokens 20 --seed 3 --prompt t1 --prompt t5 --set \
             model.context=13 --temperature 0 --ignore-end"
        ));
        let both = both.ok().out;
        for (part, prompt) in both.split("-----\n").zip(["t1", "t5"]) {
            let line = format!(
                "generate {name} --devices cpu --tokens 20 --prompt {prompt} --set \
                 model.context=13 --temperature 0 --ignore-end"
            );
            assert_eq!(part, desk.run(&line).ok().out);
        }
    }
}

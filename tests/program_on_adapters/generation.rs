//! Generation of text on adapters, and on unlike devices together, against transformers.

use crate::language_models::{assert_continued, golden_texts, write_model};
use crate::process::{Desk, adapter_selectors};

#[test]
fn greedy_texts_are_those_of_transformers_on_every_adapter() {
    let desk = Desk::new();
    let golden = golden_texts();
    for name in ["hf_gpt2", "hf_qwen3", "hf_smollm3"] {
        write_model(&desk, name);
    }
    for selector in adapter_selectors() {
        let alone = format!("--devices {selector}");
        assert_continued(&desk, "hf_gpt2", &golden["hf_gpt2"], &alone);
        assert_continued(&desk, "hf_qwen3", &golden["hf_qwen3"], &alone);
        let unlike = format!("--devices cpu,{selector} --pipeline 2");
        assert_continued(&desk, "hf_smollm3", &golden["hf_smollm3"], &unlike);
    }
}

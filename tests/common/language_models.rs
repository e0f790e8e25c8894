//! Models in Hugging Face's files with the golden texts of `tests/golden/make_greedy.py`.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::process::Desk;
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};

/// Positions of the models, and the factor of their last norms: see the script.
const POSITIONS: usize = 96;
const SHARPER: f32 = 8.0;

/// Prompt, and the most likely tokens behind it.
#[derive(serde::Deserialize)]
pub struct GoldenText {
    pub prompt: Vec<u32>,
    pub text: Vec<u32>,
}

/// Returns the texts of all models, by name.
pub fn golden_texts() -> BTreeMap<String, Vec<GoldenText>> {
    let file = fs::File::open(golden("greedy.json.gz")).unwrap();
    serde_json::from_reader(flate2::read::GzDecoder::new(file)).unwrap()
}

fn golden(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

/// Writes a model to a directory of its name, with a tokenizer whose token `n` is the word `tn`.
pub fn write_model(desk: &Desk, name: &str) {
    let bytes = fs::read(golden(&format!("{name}.safetensors"))).unwrap();
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    let config = &header.metadata().as_ref().unwrap()["config"];
    let mut config: Value = serde_json::from_str(config).unwrap();
    let is_gpt2 = config["model_type"] == "gpt2";
    let positions = if is_gpt2 { "n_positions" } else { "max_position_embeddings" };
    config[positions] = config[positions].as_u64().unwrap().max(POSITIONS as u64).into();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors: Vec<(String, Vec<usize>, Vec<u8>)> = Vec::new();
    for (name, tensor) in file.iter() {
        let Some(name) = name.strip_prefix("init/") else { continue };
        let mut shape = tensor.shape().to_vec();
        let mut values: Vec<f32> = bytemuck::pod_collect_to_vec(tensor.data());
        if name.starts_with("transformer.ln_f.") || name == "model.norm.weight" {
            for value in &mut values {
                *value *= SHARPER;
            }
        }
        if name == "transformer.wpe.weight" {
            let (rows, table) = (shape[0], values.clone());
            let columns = values.len() / rows;
            values.clear();
            for row in 0..POSITIONS {
                let factor = 1.0 + (row / rows) as f32 / 4.0;
                let of_row = &table[row % rows * columns..][..columns];
                values.extend(of_row.iter().map(|value| value * factor));
            }
            shape[0] = POSITIONS;
        }
        tensors.push((name.into(), shape, bytemuck::cast_slice(&values).to_vec()));
    }
    let views = tensors.iter().map(|(name, shape, bytes)| {
        let dtype = safetensors::Dtype::F32;
        (name.as_str(), TensorView::new(dtype, shape.clone(), bytes).unwrap())
    });
    fs::create_dir(desk.path(name)).unwrap();
    let bytes = safetensors::serialize(views, None).unwrap();
    desk.write(&format!("{name}/model.safetensors"), bytes);
    desk.write(&format!("{name}/config.json"), config.to_string());
    let count = config["vocab_size"].as_u64().unwrap();
    let words: BTreeMap<String, u64> = (0..count).map(|id| (format!("t{id}"), id)).collect();
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
        "normalizer": null, "pre_tokenizer": { "type": "Whitespace" }, "post_processor": null,
        "decoder": null,
        "model": { "type": "WordLevel", "vocab": words, "unk_token": "t0" },
    });
    desk.write(&format!("{name}/tokenizer.json"), tokenizer.to_string());
}

fn words(ids: &[u32]) -> String {
    ids.iter().map(|id| format!("t{id}")).collect::<Vec<_>>().join(" ")
}

/// Continues the prompts of texts at the same time, and asserts that the texts follow.
pub fn assert_continued(desk: &Desk, name: &str, texts: &[GoldenText], options: &str) {
    let line = format!(
        "generate {name} {options} --tokens 60 --temperature 0 --ignore-end --set \
         model.context={POSITIONS}"
    );
    let mut command = desk.command(&line);
    let mut expected = Vec::new();
    for GoldenText { prompt, text } in texts {
        command.args(["--prompt", &words(prompt)]);
        expected.push(format!("{} {}\n", words(prompt), words(text)));
    }
    let ran = crate::process::finish(command.spawn().unwrap(), &line).ok();
    assert_eq!(ran.out, expected.join("-----\n"), "{line}");
}

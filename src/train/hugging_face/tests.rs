//! Tests of models in Hugging Face's files.

use std::fs;
use std::path::Path;

use super::config::{exported, settings};
use super::*;
use crate::checkpoint::NamedTensor;
use crate::families::{DataShape, family};
use crate::keys::Value;
use potluck_core::ParamId;
use potluck_graph::init;

/// Model without a tokenizer and without files beside its parameters.
fn plain<'a>(
    family: &'a dyn ModelFamily,
    parameters: &'a [NamedTensor],
    kind: FileType,
) -> ExportedModel<'a> {
    ExportedModel {
        family,
        parameters,
        tokenizer: None,
        begin: None,
        ends: &[],
        files: const { &ModelFiles::NONE },
        kind,
        shard_bytes: u64::MAX,
    }
}

fn model(settings: &[(&'static str, Value)]) -> Box<dyn ModelFamily> {
    let Some((_, Value::Text(kind))) = settings.first() else { panic!("the kind is first") };
    let mut model = (family(kind).unwrap().new)();
    for (name, value) in &settings[1..] {
        model.set(name.strip_prefix("model.").unwrap(), value.clone());
    }
    model
}

fn read(json: &str) -> Result<ModelSettings, String> {
    settings(Path::new("config.json"), json).map_err(|error| error.to_string())
}

fn value<'a>(settings: &'a ModelSettings, name: &str) -> Option<&'a Value> {
    settings.iter().find(|(known, _)| *known == name).map(|(_, value)| value)
}

const GPT2: &str = r#"{"model_type": "gpt2", "n_embd": 8, "n_layer": 2, "n_head": 2,
    "n_positions": 16, "vocab_size": 11, "attn_pdrop": 0.1, "task_specific_params": {}}"#;

/// Configurations as written by transformers 4 and 5, with the special features of each.
const LLAMAS: [(&str, &str, Value); 14] = [
    ("\"llama\", \"attention_bias\": true", "model.attention_bias", Value::Flag(true)),
    (
        "\"llama\", \"rope_scaling\": {\"type\": \"linear\", \"factor\": 2}",
        "model.rope_factor",
        Value::Real(2.0),
    ),
    ("\"llama\", \"rope_theta\": 5e5", "model.rope_theta", Value::Real(5e5)),
    (
        "\"llama\", \"rope_parameters\": {\"rope_type\": \"default\", \"rope_theta\": 7e4}",
        "model.rope_theta",
        Value::Real(7e4),
    ),
    ("\"mistral\", \"sliding_window\": null", "model.sliding_window", Value::Whole(0)),
    ("\"mistral\"", "model.sliding_window", Value::Whole(4096)),
    ("\"qwen2\"", "model.sliding_window", Value::Whole(0)),
    (
        "\"qwen2\", \"use_sliding_window\": true, \"partial_rotary_factor\": 1",
        "model.sliding_window",
        Value::Whole(4096),
    ),
    (
        "\"qwen2\", \"use_sliding_window\": true, \"max_window_layers\": 6",
        "model.sliding_window",
        Value::Whole(0),
    ),
    (
        "\"qwen2\", \"use_sliding_window\": true, \"layer_types\": [\"full_attention\"]",
        "model.sliding_window",
        Value::Whole(0),
    ),
    // The older key wins if both are present.
    (
        "\"llama\", \"rope_parameters\": {\"rope_type\": \"default\"}, \"rope_scaling\": \
         {\"type\": \"linear\", \"factor\": 4}",
        "model.rope_factor",
        Value::Real(4.0),
    ),
    ("\"qwen2\", \"layer_types\": [\"full_attention\"]", "model.kv_heads", Value::Whole(1)),
    ("\"qwen3\", \"head_dim\": 6", "model.head_width", Value::Whole(6)),
    ("\"smollm3\", \"no_rope_layers\": [1, 1, 0, 1, 1, 0]", "model.no_rope_every", Value::Whole(3)),
];

fn llama(of: &str) -> String {
    format!(
        r#"{{"model_type": {of}, "hidden_size": 8, "intermediate_size": 24,
            "num_hidden_layers": 6, "num_attention_heads": 2, "num_key_value_heads": 1,
            "max_position_embeddings": 64, "vocab_size": 11}}"#
    )
}

#[test]
fn configurations_are_keys_of_a_model() {
    let gpt2 = read(GPT2).unwrap();
    assert_eq!(value(&gpt2, "model.activation"), Some(&"gelu_tanh".into()));
    assert_eq!(value(&gpt2, "model.positions"), Some(&Value::Whole(16)));
    for (of, name, expected) in LLAMAS {
        let settings = read(&llama(of)).unwrap();
        let expected = if name == "model.attention_bias" { "all".into() } else { expected };
        assert_eq!(value(&settings, name), Some(&expected), "{of}");
        assert!(model(&settings).check().is_ok(), "{of}");
    }
    let qkv = read(&llama("\"qwen2\"")).unwrap();
    assert_eq!(value(&qkv, "model.attention_bias"), Some(&"qkv".into()));
    assert_eq!(value(&qkv, "model.norm_eps"), Some(&Value::Real(1e-6)));
}

#[test]
fn what_a_model_cannot_have_is_refused_by_its_key() {
    let gpt2 = |key: &str| read(&GPT2.replacen('{', &format!("{{{key}, "), 1));
    for (json, why) in [
        (gpt2("\"n_inner\": 31"), "n_inner = 31 is not supported, only 32"),
        (gpt2("\"layer_norm_epsilon\": 1e-6"), "layer_norm_epsilon = 0.000001"),
        (gpt2("\"scale_attn_by_inverse_layer_idx\": true"), "scale_attn_by_inverse_layer_idx"),
        (gpt2("\"activation_function\": \"silu\""), "activation_function = \"silu\""),
        (gpt2("\"quantization_config\": {}"), "quantized"),
        (read("[]"), "no JSON object"),
        (read("{"), "is no JSON"),
        (read("{}"), "has no model_type"),
        (read("{\"model_type\": \"gpt2\"}"), "has no n_embd"),
        (read("{\"model_type\": \"mamba\"}"), "\"mamba\" is none of gpt2, llama, mistral"),
        (read(&llama("\"llama\", \"hidden_act\": \"gelu\"")), "hidden_act = \"gelu\""),
        (read(&llama("\"llama\", \"mlp_bias\": true")), "mlp_bias = true"),
        (
            read(&llama("\"llama\", \"rope_scaling\": {\"rope_type\": \"yarn\"}")),
            "rope_type = \"yarn\" is not supported, only default, linear and llama3",
        ),
        (
            read(&llama(
                "\"llama\", \"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": 8.0}",
            )),
            "llama3 has no low_freq_factor",
        ),
        (read(&llama("\"smollm3\", \"no_rope_layers\": [0, 1, 0, 1, 1, 1]")), "no_rope_layers"),
        (read(&llama("\"llama\", \"rms_norm_eps\": \"small\"")), "is no number"),
        (gpt2("\"resid_pdrop\": \"half\""), "resid_pdrop = \"half\" is no number"),
        (
            read(&llama("\"llama\", \"rope_parameters\": {\"full_attention\": {}}")),
            "full_attention of rotary positions is not supported",
        ),
        (
            read(&llama("\"llama\", \"rope_parameters\": {\"partial_rotary_factor\": 0.5}")),
            "partial_rotary_factor = 0.5",
        ),
        (read(&llama("\"qwen2\", \"layer_types\": [\"sliding_attention\"]")), "layer_types"),
        (read(&llama("\"smollm3\", \"no_rope_layers\": [1, 2]")), "no_rope_layers"),
    ] {
        let told = json.unwrap_err();
        assert!(told.starts_with("config.json: ") && told.contains(why), "{told}");
    }
}

fn parameters(model: &dyn ModelFamily) -> (Graph, Vec<NamedTensor>) {
    let graph = model.graph(&DataShape::Tokens { vocabulary: 11 }).unwrap();
    let of = |(index, parameter): (usize, &potluck_graph::Parameter)| NamedTensor {
        name: parameter.name.clone(),
        shape: graph.tensor(parameter.tensor).shape.dims().to_vec(),
        values: init::values(&graph, ParamId(index as u32), 3),
    };
    let tensors = graph.parameters.iter().enumerate().map(of).collect();
    (graph, tensors)
}

#[test]
fn what_is_exported_is_read_back() {
    let place = tempfile::tempdir().unwrap();
    let mut sources = vec![GPT2.to_string()];
    sources.extend(LLAMAS.map(|(of, ..)| llama(of)));
    for (index, source) in sources.iter().enumerate() {
        let mut own = read(source).unwrap();
        own.push(("model.context", 16usize.into()));
        let family = model(&own);
        let (graph, tensors) = parameters(&*family);
        for (name, kind) in FileType::NAMES.into_iter().take(3) {
            let out = place.path().join(format!("{index}-{name}"));
            export(&out, &plain(&*family, &tensors, kind)).unwrap();
            let again = ModelDirectory::open(out.to_str().unwrap()).unwrap();
            let mut settings = again.settings().clone();
            settings.retain(|(name, _)| *name != "model.context");
            settings.push(("model.context", 16usize.into()));
            let read_back = model(&settings);
            assert_eq!(exported(&*read_back, 11), exported(&*family, 11), "{source}");
            let found = again.tensors(&graph, &*read_back, None).unwrap().read().unwrap();
            let tolerance = match kind {
                FileType::F32 => 0.0,
                FileType::F16 => 1e-3,
                FileType::Bf16 => 1e-2,
                FileType::Q8_0 => panic!("no type of these files"),
            };
            for (found, tensor) in found.iter().zip(&tensors) {
                assert_eq!((&found.name, &found.shape), (&tensor.name, &tensor.shape));
                for (found, value) in found.values.iter().zip(&tensor.values) {
                    // Half of the spacing of the smallest numbers of f16.
                    let error = (found - value).abs();
                    assert!(error <= tolerance * value.abs() + tolerance * 1e-4, "{found} {value}");
                }
            }
        }
        let exists = export(
            &place.path().join(format!("{index}-f32")),
            &plain(&*family, &tensors, FileType::F32),
        );
        assert!(exists.unwrap_err().to_string().contains("is there already"));
    }
}

/// Files in shards, with the additional contents of old files; and damaged files.
#[test]
fn shards_are_read_and_bad_files_are_refused() {
    let place = tempfile::tempdir().unwrap();
    let mut own = read(GPT2).unwrap();
    own.push(("model.context", 16usize.into()));
    let family = model(&own);
    let (graph, tensors) = parameters(&*family);
    let out = place.path().join("model");
    export(&out, &plain(&*family, &tensors, FileType::F32)).unwrap();
    let open = || {
        let directory = ModelDirectory::open(out.to_str().unwrap()).map_err(|e| e.to_string())?;
        let tensors = directory.tensors(&graph, &*family, None).map_err(|e| e.to_string())?;
        tensors.read().map_err(|error| error.to_string())
    };
    let permissions = |name: &str| fs::metadata(out.join(name)).unwrap().permissions();
    assert_eq!(permissions("model.safetensors"), permissions("config.json"));
    let whole = fs::read(out.join("model.safetensors")).unwrap();
    let names: Vec<String> = {
        let file = safetensors::SafeTensors::deserialize(&whole).unwrap();
        file.names().into_iter().map(str::to_string).collect()
    };
    // One file under the name of a shard, and an index that names it.
    fs::rename(out.join("model.safetensors"), out.join("model-00001-of-00001.safetensors"))
        .unwrap();
    let index = |shard: &str, more: &[&str]| {
        let mut map = serde_json::Map::new();
        for name in names.iter().map(String::as_str).chain(more.iter().copied()) {
            map.insert(name.into(), shard.into());
        }
        let json = serde_json::json!({ "metadata": {}, "weight_map": map });
        fs::write(out.join("model.safetensors.index.json"), json.to_string()).unwrap();
    };
    index("model-00001-of-00001.safetensors", &[]);
    assert_eq!(open().unwrap().len(), tensors.len());
    index("../model-00001-of-00001.safetensors", &[]);
    assert!(open().unwrap_err().contains("is no name of a file beside it"));
    index("model-00001-of-00001.safetensors", &["transformer.h.9.ln_1.bias"]);
    assert!(open().unwrap_err().contains("has no tensor 'transformer.h.9.ln_1.bias'"));
    index("other.safetensors", &[]);
    assert!(open().unwrap_err().contains("other.safetensors: cannot be read"));
    fs::remove_file(out.join("model.safetensors.index.json")).unwrap();
    assert!(open().unwrap_err().contains("has no model.safetensors"));
    fs::write(out.join("pytorch_model.bin"), "").unwrap();
    assert!(open().unwrap_err().contains("save_pretrained"));

    let single = out.join("model.safetensors");
    for (bytes, why) in [
        (whole[..whole.len() - 1].to_vec(), "and its header is of"),
        (whole[..4].to_vec(), "cut off in its header"),
        ([&u64::MAX.to_le_bytes()[..], &whole[8..]].concat(), "is no safetensors file"),
        ([&whole[..8], b"[", &whole[9..]].concat(), "has a header that"),
    ] {
        fs::write(&single, bytes).unwrap();
        let told = open().unwrap_err();
        assert!(told.contains(why), "{told}");
    }
    let mut bad = whole.clone();
    let end = bad.len();
    bad[end - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(&single, bad).unwrap();
    assert!(open().unwrap_err().contains("has values that are not finite"));
    fs::write(&single, &whole).unwrap();
    let wide = GPT2.replace("\"n_embd\": 8", "\"n_embd\": 16");
    let other = model(&[read(&wide).unwrap(), vec![("model.context", 16usize.into())]].concat());
    let (graph, _) = parameters(&*other);
    let directory = ModelDirectory::open(out.to_str().unwrap()).unwrap();
    let told = directory.tensors(&graph, &*other, None).err().unwrap().to_string();
    assert!(
        told.contains("'transformer.wte.weight' is [11, 8], and the model's is [11, 16]"),
        "{told}"
    );
}

/// A head stored beside the embedding must equal it, or else the model is a different one.
#[test]
fn a_tied_head_may_be_stored_and_must_be_the_embedding() {
    let place = tempfile::tempdir().unwrap();
    let context = ("model.context", 16usize.into());
    let tied = model(&[read(GPT2).unwrap(), vec![context.clone()]].concat());
    let untied = GPT2.replacen('{', "{\"tie_word_embeddings\": false, ", 1);
    let untied = model(&[read(&untied).unwrap(), vec![context]].concat());
    let (graph, _) = parameters(&*tied);
    let (_, mut tensors) = parameters(&*untied);
    let out = place.path().join("model");
    let read_tied = |tensors: &[NamedTensor]| {
        let _ = fs::remove_dir_all(&out);
        export(&out, &plain(&*untied, tensors, FileType::F32)).unwrap();
        let directory = ModelDirectory::open(out.to_str().unwrap()).unwrap();
        directory.tensors(&graph, &*tied, None).unwrap().read().map_err(|error| error.to_string())
    };
    assert!(
        read_tied(&tensors).unwrap_err().contains("'lm_head.weight' differs from the embedding")
    );
    let head = tensors.iter().position(|tensor| tensor.name == "lm_head.weight").unwrap();
    tensors[head].values = tensors[0].values.clone();
    assert_eq!(read_tied(&tensors).unwrap().len(), tensors.len() - 1);
    // A value that no 16-bit type can represent.
    tensors[1].values[0] = 3.4e38;
    for kind in [FileType::F16, FileType::Bf16] {
        let told =
            export(&place.path().join("half"), &plain(&*untied, &tensors, kind)).unwrap_err();
        assert!(told.to_string().contains("3.4e38, too large for"), "{told}");
    }
}

/// Writes tensors, each under another name, as `save_file(model.state_dict(), path)` does.
fn write_weights(path: &Path, tensors: &[NamedTensor], name: impl Fn(&str) -> String) {
    let mut views = Vec::new();
    for tensor in tensors {
        let bytes = bytemuck::cast_slice(&tensor.values);
        let view = safetensors::tensor::TensorView::new(
            safetensors::Dtype::F32,
            tensor.shape.clone(),
            bytes,
        );
        views.push((name(&tensor.name), view.unwrap()));
    }
    safetensors::serialize_to_file(views, None, path).unwrap();
}

#[test]
fn weights_alone_have_names_of_graph_or_of_transformers() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("weights.safetensors");
    let found = |graph: &Graph, family: &dyn ModelFamily| {
        let weights = BareWeights::at(&path).unwrap();
        let found = weights.tensors(graph, family, None).and_then(|tensors| tensors.read());
        found.map_err(|error| error.to_string())
    };
    let context = ("model.context", 16usize.into());
    for (index, source) in [GPT2.to_string(), llama("\"llama\"")].iter().enumerate() {
        let family = model(&[read(source).unwrap(), vec![context.clone()]].concat());
        let (graph, tensors) = parameters(&*family);
        // As torch.nn.DataParallel, torch.compile and nanoGPT name them.
        for prefix in ["", "module.", "_orig_mod.module.", "module._orig_mod.", "transformer."] {
            write_weights(&path, &tensors, |ours| format!("{prefix}{ours}"));
            assert_eq!(BareWeights::at(&path).unwrap().tokens(&*family), Some(11), "{prefix}");
            let found = found(&graph, &*family).unwrap();
            for (found, tensor) in found.iter().zip(&tensors) {
                assert_eq!((&found.name, &found.values), (&tensor.name, &tensor.values));
            }
        }
        let out = place.path().join(index.to_string());
        export(&out, &plain(&*family, &tensors, FileType::F32)).unwrap();
        fs::copy(out.join("model.safetensors"), &path).unwrap();
        for (found, tensor) in found(&graph, &*family).unwrap().iter().zip(&tensors) {
            assert_eq!((&found.name, &found.values), (&tensor.name, &tensor.values));
        }
        write_weights(&path, &tensors[1..], str::to_owned);
        let told = found(&graph, &*family).unwrap_err();
        assert!(told.contains("is missing; weights without a config.json are those of"), "{told}");
    }
    // A later one that is missing, as in a model of fewer layers.
    let family = model(&[read(GPT2).unwrap(), vec![context.clone()]].concat());
    let (graph, mut tensors) = parameters(&*family);
    tensors.retain(|tensor| !tensor.name.starts_with("h.1."));
    write_weights(&path, &tensors, |ours| format!("transformer.{ours}"));
    let told = found(&graph, &*family).unwrap_err();
    assert!(told.contains("the tensor 'h.1.ln_1.weight' is missing; weights"), "{told}");
    write_weights(&path, &tensors, |ours| format!("model.net.{ours}"));
    let told = found(&graph, &*family).unwrap_err();
    assert!(told.contains("'wte.weight' is missing; there is 'model.net.wte.weight'"), "{told}");
    // The shapes of another width, under either names.
    let family = model(&[read(GPT2).unwrap(), vec![context.clone()]].concat());
    let (_, tensors) = parameters(&*family);
    let wide = GPT2.replace("\"n_embd\": 8", "\"n_embd\": 16");
    let wide = model(&[read(&wide).unwrap(), vec![context]].concat());
    let (graph, _) = parameters(&*wide);
    for prefix in ["", "transformer."] {
        write_weights(&path, &tensors, |ours| format!("{prefix}{ours}"));
        let told = found(&graph, &*wide).unwrap_err();
        assert!(told.contains("wte.weight' is [11, 8], and the model's is [11, 16]"), "{told}");
    }
}

#[test]
fn names_lead_to_directories_or_say_what_to_do() {
    let told = |name: &str| ModelDirectory::open(name).err().unwrap().to_string();
    assert!(told("no such directory").contains("there is no such directory"));
    assert!(told("gpt9").contains("hf download gpt9"));
    assert!(told("../a/b").contains("there is no such directory"));
    assert!(told("org/no-such-model").contains("hf download org/no-such-model"));
}

#[test]
fn what_is_no_model_is_refused_with_what_to_give() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    for path in ["runs/0001/checkpoints/step-1", "runs/0002/checkpoints", "runs/notes"] {
        fs::create_dir_all(root.join(path)).unwrap();
    }
    for path in
        ["runs/0001/run.toml", "runs/0002/run.toml", "m.gguf", "m.pt", "runs/0001/m.safetensors"]
    {
        fs::write(root.join(path), "").unwrap();
    }
    let said = |name: &str| {
        let said = require_model(&root.join(name)).unwrap_err().to_string();
        said.replace(&format!("{}{}", root.display(), std::path::MAIN_SEPARATOR), "")
    };
    let gguf = "m.gguf: GGUF files are written, not read; give a run, a checkpoint, or ";
    assert!(said("m.gguf").starts_with(gguf), "{}", said("m.gguf"));
    assert_eq!(
        said("runs").replace('\\', "/"),
        "runs: has runs; give one of them, such as runs/0002"
    );
    for name in ["runs/0001/checkpoints", "runs/0001/run.toml", "runs/0001/m.safetensors"] {
        let expected = format!("{name}: is a part of a run; give the run: runs/0001");
        assert_eq!(said(name).replace('\\', "/"), expected);
    }
    assert!(said("runs/notes").contains("has no model"));
    let pickled = "m.pt: is a Python pickle, which can run code, so it is not read; where you ";
    assert!(said("m.pt").starts_with(pickled), "{}", said("m.pt"));
}

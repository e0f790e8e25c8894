//! Parity with Hugging Face's models: from the parameters of tiny models in their files' form, the
//! logits, the gradients of the first step, and the losses of 20 steps of AdamW, on the CPU device
//! and on every adapter. The data and the script that made them are in `tests/golden/`.

use crate::golden::{Golden, Limits};
use potluck_core::HostTensorView;
use potluck_graph::model::names::{FileName, their_name};
use potluck_graph::model::{AttentionBias, GptConfig, LlamaConfig, gpt, llama};
use potluck_graph::{
    Graph, Plan, PlanOptions, RotaryAngles, RotaryScaling, Unary, differentiate, fuse,
};
use potluck_kernels::exec::Executor;
use serde_json::Value;

/// An epsilon of 1e-6 for 1e-5 moves the logits by an NMSE of 4e-9, the other GELU by 2e-8;
/// transformers' own f32 is within 3e-13.
const LOGITS_NMSE: f64 = 1e-10;
/// The same on the CPU device.
const LOGITS_NMSE_CPU: f64 = 1e-12;

const LIMITS: Limits = Limits { gradient_nmse: 1e-9, parameter_nmse: 1e-9, loss_error: 1e-5 };

/// Model that a configuration of transformers describes, for samples of so many tokens.
fn graph(config: &Value, tokens: usize) -> (Graph, &'static [FileName]) {
    let number = |key: &str| config[key].as_u64().map(|number| number as usize);
    let flag = |key: &str| config[key].as_bool().unwrap_or(false);
    let family = config["model_type"].as_str().unwrap();
    if family == "gpt2" {
        let config = GptConfig {
            vocabulary: number("vocab_size").unwrap(),
            context: tokens,
            positions: number("n_positions").unwrap(),
            layers: number("n_layer").unwrap(),
            heads: number("n_head").unwrap(),
            width: number("n_embd").unwrap(),
            bias: true,
            dropout: 0.0,
            tie: flag("tie_word_embeddings"),
            activation: Unary::GeluTanh,
        };
        return (gpt(&config).unwrap(), gpt::NAMES);
    }
    let (heads, width) = (number("num_attention_heads").unwrap(), number("hidden_size").unwrap());
    let rope = &config["rope_parameters"];
    let real = |key: &str| rope[key].as_f64().unwrap();
    let scaling = match rope["rope_type"].as_str().unwrap() {
        "default" => RotaryScaling::None,
        "linear" => RotaryScaling::Linear { factor: real("factor") },
        "llama3" => RotaryScaling::Llama3 {
            factor: real("factor"),
            low: real("low_freq_factor"),
            high: real("high_freq_factor"),
            context: real("original_max_position_embeddings"),
        },
        other => panic!("rope_type {other}"),
    };
    let attention_bias = match family {
        "qwen2" => AttentionBias::Qkv,
        _ if flag("attention_bias") => AttentionBias::All,
        _ => AttentionBias::None,
    };
    let config = LlamaConfig {
        vocabulary: number("vocab_size").unwrap(),
        context: tokens,
        layers: number("num_hidden_layers").unwrap(),
        heads,
        kv_heads: number("num_key_value_heads").unwrap(),
        head_width: number("head_dim").unwrap_or(width / heads),
        width,
        mlp_width: number("intermediate_size").unwrap(),
        norm_eps: config["rms_norm_eps"].as_f64().unwrap() as f32,
        rotary: RotaryAngles { theta: real("rope_theta"), scaling },
        attention_bias,
        qk_norm: family == "qwen3",
        no_rope_every: number("no_rope_layer_interval").unwrap_or(0),
        tie: flag("tie_word_embeddings"),
    };
    (llama(&config).unwrap(), llama::NAMES)
}

/// Gives the data our names and shapes in the place of theirs.
fn renamed(mut golden: Golden, graph: &Graph, names: &[FileName]) -> Golden {
    for parameter in &graph.parameters {
        let (theirs, is_transposed) = their_name(names, &parameter.name).unwrap();
        for kind in ["init", "grad"] {
            let mut values = golden.floats.remove(&format!("{kind}/{theirs}")).unwrap();
            if is_transposed {
                let dims = graph.tensor(parameter.tensor).shape.dims();
                values = transposed(&values, dims[0]);
            }
            golden.floats.insert(format!("{kind}/{}", parameter.name), values);
        }
    }
    golden
}

/// Returns the transpose of a matrix of so many columns.
fn transposed(values: &[f32], columns: usize) -> Vec<f32> {
    let mut result = Vec::with_capacity(values.len());
    for column in 0..columns {
        result.extend(values.iter().skip(column).step_by(columns));
    }
    result
}

fn check(case: &str) {
    let golden = Golden::read(case);
    let config: Value = serde_json::from_str(&golden.settings["config"]).unwrap();
    let (graph, names) = graph(&config, golden.number("tokens"));
    let golden = renamed(golden, &graph, names);
    check_logits(case, &golden, &graph);
    let plan =
        Plan::new(fuse(differentiate(graph).unwrap()), PlanOptions::new(golden.number("batch")));
    for mut device in crate::common::devices(&plan, 2) {
        let who = format!("{case} on {}", device.name());
        golden.check_gradients(&who, device.as_mut(), plan.options.rows, LIMITS);
        let losses = golden.check_losses(&who, device.as_mut(), plan.options.rows, LIMITS);
        // Steps 0 and 16 are on the same batch.
        assert!(losses[16] < losses[0], "{who}: the loss does not fall");
    }
}

/// Compares the logits of the first batch, and the wrong ones, which must be told apart.
fn check_logits(case: &str, golden: &Golden, graph: &Graph) {
    let rows = golden.number("batch");
    let plan = Plan::new(fuse(graph.clone()), PlanOptions::new(rows));
    for mut device in crate::common::devices(&plan, 0) {
        let who = format!("{case} on {}", device.name());
        golden.load(device.as_mut());
        let got = logits(golden, device.as_mut());
        let nmse = crate::common::nmse(&got, &golden.floats["logits"]);
        let is_cpu = device.name().starts_with("cpu");
        let limit = if is_cpu { LOGITS_NMSE_CPU } else { LOGITS_NMSE };
        assert!(nmse <= limit, "{who}: logits, NMSE {nmse:.1e}");
        let wrong = crate::common::nmse(&got, &golden.floats["wrong/logits"]);
        assert!(wrong > 1e-3, "{who}: the wrong logits are within {wrong:.1e}");
    }
}

/// Returns the logits (b, t, v) of the first batch, position by position.
fn logits(golden: &Golden, device: &mut dyn Executor) -> Vec<f32> {
    let (rows, tokens) = (golden.number("batch"), golden.number("tokens"));
    let graph = device.plan().graph.clone();
    let output = graph.output("logits").unwrap();
    let v = graph.tensor(output).shape.last();
    let pass = crate::common::evaluation(0, rows);
    let mut all = vec![0.0; rows * tokens * v];
    for position in 0..tokens {
        for name in ["tokens", "targets"] {
            let values = &golden.ints[&format!("batch/0/{name}")];
            let input = graph.input(name).unwrap();
            device.set_input(input, 0, HostTensorView::Int(values)).unwrap();
        }
        let mut selected = vec![0.0; rows * tokens];
        selected.iter_mut().skip(position).step_by(tokens).for_each(|value| *value = 1.0);
        let input = graph.input("position").unwrap();
        device.set_input(input, 0, HostTensorView::Float(&selected)).unwrap();
        crate::common::run_phase(device, true, &pass);
        let got = device.read(output, &pass).unwrap();
        for (row, values) in got.chunks_exact(v).enumerate() {
            all[(row * tokens + position) * v..][..v].copy_from_slice(values);
        }
    }
    all
}

#[test]
fn gpt2() {
    check("hf_gpt2");
}

#[test]
fn llama_with_shared_keys() {
    check("hf_llama");
}

#[test]
fn llama_with_scaled_positions_and_a_tied_head() {
    check("hf_llama3");
    check("hf_llama_linear");
}

#[test]
fn qwen2_with_biases() {
    check("hf_qwen2");
}

#[test]
fn qwen3_with_norms_of_queries_and_keys() {
    check("hf_qwen3");
}

#[test]
fn mistral() {
    check("hf_mistral");
}

#[test]
fn smollm3_with_layers_without_positions() {
    check("hf_smollm3");
}

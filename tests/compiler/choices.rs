//! Kernels that a device takes without measuring: those of the calls of the catalog, and those of
//! training steps of models of every kind, whose calls are large enough for the large tiles.

use potluck_graph::model::{
    AttentionBias, GptConfig, LlamaConfig, MlpLoss, PictureNorm, PictureSizes, ResnetConfig,
    RnnConfig, gpt, llama, resnet, rnn,
};
use potluck_graph::{Cell, Graph, Plan, RotaryAngles, RotaryScaling, Unary};
use potluck_kernels::Caps;
use potluck_kernels::autotune::catalog::catalog_calls;

use super::roofline::{chosen, modules as modules_of_step, plan_of, shaders, title};

/// Returns the shaders that are chosen for these capabilities. The last word of a name is the entry
/// point that runs.
pub fn modules(caps: &Caps) -> Vec<(String, String)> {
    let mut modules = Vec::new();
    for plan in plans() {
        modules.extend(modules_of_step(&plan, caps));
    }
    for owned in catalog_calls() {
        let call = owned.call();
        let variant = chosen(&call, caps);
        for (text, entry) in shaders(&variant.dispatches) {
            modules.push((format!("{} {entry}", title(call.op, &variant)), text));
        }
    }
    modules
}

/// Returns training steps: transformers with narrow and wide heads, with and without dropout,
/// residual networks with both norms, and recurrent networks of both cells.
fn plans() -> Vec<Plan> {
    let mut plans = vec![plan_of(wide_gpt(), 8), plan_of(small_llama(), 8)];
    for norm in [PictureNorm::Batch, PictureNorm::Group] {
        plans.push(plan_of(residual_network(norm), 128));
    }
    for cell in [Cell::Lstm, Cell::Gru] {
        plans.push(plan_of(recurrent_network(cell), 64));
    }
    plans
}

fn wide_gpt() -> Graph {
    let config = GptConfig {
        vocabulary: 1000,
        context: 1024,
        positions: 1024,
        layers: 1,
        heads: 8,
        width: 1024,
        bias: true,
        dropout: 0.1,
        tie: false,
        activation: Unary::Gelu,
    };
    gpt(&config).unwrap()
}

fn small_llama() -> Graph {
    let config = LlamaConfig {
        vocabulary: 4096,
        context: 512,
        layers: 1,
        heads: 9,
        kv_heads: 3,
        head_width: 32,
        width: 288,
        mlp_width: 768,
        norm_eps: 1e-5,
        rotary: RotaryAngles { theta: 10_000.0, scaling: RotaryScaling::None },
        attention_bias: AttentionBias::None,
        qk_norm: true,
        no_rope_every: 0,
        tie: true,
    };
    llama(&config).unwrap()
}

fn residual_network(norm: PictureNorm) -> Graph {
    let sizes = PictureSizes { picture: [3, 32, 32], outputs: 10, loss: MlpLoss::CrossEntropy };
    resnet(&ResnetConfig { sizes, blocks: 1, width: 64, norm }).unwrap()
}

fn recurrent_network(cell: Cell) -> Graph {
    let config = RnnConfig {
        vocabulary: 1000,
        context: 64,
        layers: 1,
        width: 512,
        cell,
        dropout: 0.0,
        stateful: false,
    };
    rnn(&config).unwrap()
}

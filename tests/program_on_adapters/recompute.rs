//! Trainers that compute again what others keep: after 20 steps they have the same bits, on the CPU
//! device and on every adapter.

use crate::process::adapter_selectors;
use crate::small_gpt::{self, CONTEXT, VOCABULARY};
use potluck_core::HostTensor;
use potluck_graph::model::{AttentionBias, GptConfig, LlamaConfig, gpt, llama};
use potluck_graph::optim::Optimizer;
use potluck_graph::{Graph, Recompute, RotaryAngles, RotaryScaling};
use potluck_train::{Trainer, TrainerOptions};

const STEPS: usize = 20;
const BATCH: usize = 5;

/// With dropout everywhere, and a head that is tied to the embedding.
fn tiny_gpt() -> Graph {
    gpt(&GptConfig { dropout: 0.2, ..small_gpt::config(16) }).unwrap()
}

fn tiny_llama() -> Graph {
    let config = LlamaConfig {
        vocabulary: VOCABULARY,
        context: CONTEXT,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        head_width: 4,
        width: 16,
        mlp_width: 40,
        norm_eps: 1e-5,
        rotary: RotaryAngles { theta: 100.0, scaling: RotaryScaling::Linear { factor: 2.0 } },
        attention_bias: AttentionBias::Qkv,
        qk_norm: true,
        no_rope_every: 0,
        tie: true,
    };
    llama(&config).unwrap()
}

/// Returns the bits of the losses and norms of all steps, and of the parameters after them.
fn bits(forward: Graph, device: &str, recompute: Recompute) -> (Vec<u64>, Vec<u32>) {
    let optimizer = Optimizer::AdamW { beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1 };
    let options = TrainerOptions {
        micro_batch_size: 2,
        clip: 1.0,
        tune_s: 0.0,
        seed: 3,
        recompute,
        ..TrainerOptions::new(device, optimizer, BATCH)
    };
    let mut trainer = Trainer::new(forward, &options).unwrap();
    let mut figures = Vec::new();
    for step in 0..STEPS {
        let id = |at: usize| ((7 * at + 11 * step) % VOCABULARY) as u32;
        let ids =
            |first: usize| HostTensor::Int((first..first + BATCH * CONTEXT).map(id).collect());
        let step = trainer.step(&[("tokens", ids(0)), ("targets", ids(1))], 0.01).unwrap();
        figures.extend([step.loss.to_bits(), step.gradient_norm.to_bits()]);
    }
    let tensors = trainer.parameters().unwrap();
    let values = tensors.iter().flat_map(|tensor| &tensor.values);
    (figures, values.map(|value| value.to_bits()).collect())
}

#[test]
fn what_is_computed_again_has_the_bits_of_what_is_kept() {
    let _turn = crate::common::turn();
    let mut devices = adapter_selectors();
    devices.push("cpu".into());
    for device in devices {
        assert_same_bits(tiny_gpt, &device, &[Recompute::Blocks, Recompute::Selective]);
        assert_same_bits(tiny_llama, &device, &[Recompute::Blocks]);
    }
    assert_same_bits(tiny_llama, "cpu", &[Recompute::Selective]);
}

fn assert_same_bits(model: fn() -> Graph, device: &str, choices: &[Recompute]) {
    let kept = bits(model(), device, Recompute::None);
    for recompute in choices {
        let again = bits(model(), device, *recompute);
        assert!(again == kept, "{device}, {recompute:?}");
    }
}

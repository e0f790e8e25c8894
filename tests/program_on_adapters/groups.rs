//! Parameter groups of a language model on every adapter, on unlike devices and in tensor groups.

use crate::process::adapter_selectors;
use crate::several_devices::unlike;
use potluck_core::HostTensor;
use potluck_graph::model::{GptConfig, gpt};
use potluck_graph::optim::Optimizer;
use potluck_graph::{Graph, Unary};
use potluck_train::checkpoint::NamedTensor;
use potluck_train::{PipelineOptions, Shares, TensorOptions, Trainer, TrainerOptions};

const CONTEXT: usize = 8;
const BATCH: usize = 4;
const VOCABULARY: usize = 70;

/// A GPT of two layers whose head is the embedding.
fn model() -> Graph {
    let config = GptConfig {
        vocabulary: VOCABULARY,
        context: CONTEXT,
        positions: CONTEXT,
        layers: 2,
        heads: 4,
        width: 32,
        bias: true,
        dropout: 0.0,
        tie: true,
        activation: Unary::GeluTanh,
    };
    gpt(&config).unwrap()
}

/// Returns the parameters after some steps.
fn trained(
    devices: &str,
    [stages, ranks]: [u32; 2],
    frozen: &str,
    steps: usize,
) -> Vec<NamedTensor> {
    let optimizer = Optimizer::AdamW { beta1: 0.9, beta2: 0.99, eps: 1e-6, weight_decay: 0.01 };
    let groups = [&format!("{frozen} frozen"), "*.bias lr_scale=2 weight_decay=0"];
    let options = TrainerOptions {
        shares: Shares::Even,
        micro_batch_size: 2,
        tune_s: 0.0,
        seed: 5,
        clip: 1.0,
        hash_every: 1,
        groups: groups.map(|text| text.parse().unwrap()).into(),
        pipeline: PipelineOptions { stages, ..PipelineOptions::default() },
        tensor: TensorOptions { ranks, ..TensorOptions::default() },
        ..TrainerOptions::new(devices, optimizer, BATCH)
    };
    let mut trainer = Trainer::new(model(), &options).unwrap();
    for step in 0..steps {
        let tokens = |shift: usize| {
            let ids =
                (0..BATCH * CONTEXT).map(|i| ((i + shift + 7 * step) * 11 % VOCABULARY) as u32);
            HostTensor::Int(ids.collect())
        };
        let batch = [("tokens", tokens(0)), ("targets", tokens(1))];
        assert!(trainer.step(&batch, 0.003).unwrap().updated);
    }
    trainer.parameters().unwrap()
}

/// Frozen tensors keep their bits, and the others are those of the CPU device.
fn assert_like(found: &[NamedTensor], expected: &[NamedTensor], is_frozen: &dyn Fn(&str) -> bool) {
    for (found, expected) in found.iter().zip(expected) {
        let error = found.values.iter().zip(&expected.values).map(|(a, b)| (a - b).abs());
        let error = error.fold(0.0, f32::max);
        assert!(error < 2e-4, "{}: {error}", found.name);
        assert!(!is_frozen(&found.name) || found.values == expected.values, "{}", found.name);
    }
}

#[test]
fn frozen_parameters_keep_their_bits_on_every_device_and_in_every_layout() {
    let _turn = crate::common::turn();
    for (pattern, part) in [("wte.*", "wte."), ("*.mlp.*", ".mlp.")] {
        let is_frozen = |name: &str| name.contains(part);
        let initial = trained("cpu", [1, 1], pattern, 0);
        let expected = trained("cpu", [1, 1], pattern, 2);
        for (before, after) in initial.iter().zip(&expected) {
            assert_eq!(before.values == after.values, is_frozen(&before.name), "{}", before.name);
        }
        let mut layouts = vec![(unlike(), [1, 1]), ("cpu*2".to_string(), [1, 2])];
        if part == "wte." {
            // A stage without gradients in front.
            layouts.push((unlike(), [3, 1]));
        }
        for name in adapter_selectors() {
            layouts.push((name, [1, 1]));
        }
        for (devices, layout) in layouts {
            assert_like(&trained(&devices, layout, pattern, 2), &expected, &is_frozen);
        }
    }
}

//! Layouts of a language model over CPU devices: data, pipeline and tensor parallelism and their
//! mixtures, with and without fusion and recomputation, have the loss and the gradients of one
//! device that keeps all it computes, whatever the model's family and options. In mixed precision,
//! and with activations in bf16, they are near those of f32.

use std::env;

use crate::common::{gradient_nmse, squares};
use potluck_core::HostTensor;
use potluck_graph::model::{AttentionBias, GptConfig, LlamaConfig, gpt, llama};
use potluck_graph::optim::Optimizer;
use potluck_graph::{
    ActivationFormat, Graph, Precision, Recompute, RotaryAngles, RotaryScaling, Unary,
};
use potluck_train::{PipelineOptions, PipelineSchedule, Shares, TensorOptions};
use potluck_train::{Trainer, TrainerOptions};
use proptest::prelude::*;

/// Error of a gradient against that of one device, whose layouts sum in another order.
const NMSE_MAX: f64 = 1e-9;

/// The same in mixed precision, and with activations in bf16: cosines of 0.9999 and 0.999.
const MIXED_NMSE_MAX: f64 = 2e-4;
const BF16_NMSE_MAX: f64 = 2e-3;

/// Learning rate with which a step of plain gradient descent leaves little but the gradient.
const LR: f32 = 1e4;

/// Devices of a run.
#[derive(Clone, Debug)]
struct Layout {
    pipelines: usize,
    stages: u32,
    /// Shares of the ranks of a tensor group; of one, none.
    tensor: Vec<u32>,
    schedule: PipelineSchedule,
}

impl Layout {
    /// Model chunks of each stage.
    fn chunks(&self) -> u32 {
        if self.schedule == PipelineSchedule::Interleaved { 2 } else { 1 }
    }
}

/// Model of one of the families.
#[derive(Clone, Debug)]
enum Model {
    Gpt(GptConfig),
    Llama(LlamaConfig),
}

impl Model {
    fn graph(&self) -> Graph {
        let graph = match self {
            Self::Gpt(config) => gpt(config),
            Self::Llama(config) => llama(config),
        };
        graph.unwrap()
    }
}

#[derive(Clone, Debug)]
struct Case {
    model: Model,
    context: usize,
    vocabulary: usize,
    /// Rows of logits that are computed at a time for the loss.
    loss_rows: usize,
    layout: Layout,
    batch: usize,
    micro_batch: usize,
    fuse: bool,
    formats: Formats,
}

/// Options of what is computed and kept in which format.
#[derive(Clone, Copy, Debug, Default)]
struct Formats {
    recompute: Recompute,
    precision: Precision,
    activations: ActivationFormat,
}

impl Formats {
    /// Largest error of a gradient, of the loss and of the norm of the gradients.
    fn errors_max(self) -> [f64; 3] {
        let is_mixed = self.precision == Precision::Mixed;
        let is_exact = !is_mixed && self.activations == ActivationFormat::F32;
        let nmse = match self.activations {
            ActivationFormat::Bf16 => BF16_NMSE_MAX,
            ActivationFormat::F32 if is_mixed => MIXED_NMSE_MAX,
            ActivationFormat::F32 => NMSE_MAX,
        };
        let [of_loss, of_norm] = if is_exact { [1e-5, 1e-4] } else { [1e-3, 1e-2] };
        [nmse, of_loss, of_norm]
    }
}

/// One device, two with the whole model, pipelines of 2 and 3, tensor groups of 1 to 4 with any
/// shares, and meshes of up to 2 x 2 x 2.
fn layouts() -> impl Strategy<Value = Layout> {
    let sizes = prop_oneof![
        (1usize..3, Just(1u32), Just(1usize)),
        (Just(1), 2u32..4, Just(1)),
        (Just(1), Just(1), 2usize..5),
        (1usize..3, 1u32..3, 1usize..3),
    ];
    let schedules = prop::sample::select(vec![
        PipelineSchedule::GPipe,
        PipelineSchedule::OneFOneB,
        PipelineSchedule::ZeroBubble,
        PipelineSchedule::Interleaved,
    ]);
    let shares = prop::collection::vec(1u32..4, 4);
    (sizes, schedules, shares).prop_map(|((pipelines, stages, ranks), schedule, shares)| {
        let tensor = if ranks == 1 { Vec::new() } else { shares[..ranks].to_vec() };
        let schedule = if stages == 1 { PipelineSchedule::default() } else { schedule };
        Layout { pipelines, stages, tensor, schedule }
    })
}

fn cases() -> impl Strategy<Value = Case> {
    let sizes = (4usize..6, 8usize..11, 9usize..80, 1usize..7, 1usize..4);
    let batch = (2usize..8, 1usize..4);
    let recompute =
        prop::sample::select(vec![Recompute::None, Recompute::Blocks, Recompute::Selective]);
    let (exact, packed) = (ActivationFormat::F32, ActivationFormat::Bf16);
    // Three quarters are exact.
    let formats = prop_oneof![
        9 => Just((Precision::F32, exact)),
        1 => Just((Precision::Mixed, exact)),
        1 => Just((Precision::F32, packed)),
        1 => Just((Precision::Mixed, packed)),
    ];
    let options = (any::<[bool; 5]>(), 0usize..3, 1usize..3, recompute, formats);
    (sizes, options, layouts(), batch).prop_map(
        |(sizes, (flags, choice, group, recompute, formats), layout, of_batch)| {
            let [bias, tie, drops, fuse, is_llama] = flags;
            let (precision, activations) = formats;
            let (heads, columns, vocabulary, context, mut layers) = sizes;
            let (mut batch, mut micro_batch) = of_batch;
            if layout.schedule == PipelineSchedule::Interleaved {
                // Enough blocks, and whole rounds of micro-batches for each pipeline.
                layers = layers.max(4);
                batch = 2 * layout.pipelines * layout.stages as usize;
                micro_batch = 1;
            }
            let is_exact = (precision, activations) == (Precision::F32, ActivationFormat::F32);
            let gpt = GptConfig {
                vocabulary,
                context,
                positions: context,
                layers,
                heads,
                width: heads * columns,
                bias,
                dropout: if drops { 0.3 } else { 0.0 },
                tie,
                // Rounded, a value near the bend of a ReLU changes the gradient of a whole row.
                activation: match choice {
                    0 => Unary::Gelu,
                    2 if is_exact => Unary::Relu,
                    _ => Unary::GeluTanh,
                },
            };
            let scaling = RotaryScaling::Linear { factor: 2.0 };
            let biases = [AttentionBias::None, AttentionBias::Qkv, AttentionBias::All];
            let llama = LlamaConfig {
                vocabulary,
                context,
                layers,
                heads: heads * group,
                kv_heads: heads,
                head_width: 2 * group + 2,
                width: 3 * columns,
                // Enough columns for each rank of the largest group.
                mlp_width: 130 + columns,
                norm_eps: 1e-5,
                rotary: RotaryAngles { theta: 100.0, scaling },
                attention_bias: biases[choice],
                qk_norm: bias,
                no_rope_every: if drops { 2 } else { 0 },
                tie,
            };
            let model = if is_llama { Model::Llama(llama) } else { Model::Gpt(gpt) };
            let loss_rows = if tie { 3 } else { 1024 };
            Case {
                model,
                context,
                vocabulary,
                loss_rows,
                layout,
                batch,
                micro_batch,
                fuse,
                formats: Formats { recompute, precision, activations },
            }
        },
    )
}

/// Returns the ids of a batch, with some targets that are ignored.
fn batch(case: &Case) -> (Vec<u32>, Vec<u32>) {
    let count = case.batch * case.context;
    let vocabulary = case.vocabulary as u32;
    let id = |at: usize| (7 * at as u32 + 3) % vocabulary;
    let target = |at: usize| if at % 5 == 4 { potluck_graph::IGNORE_INDEX } else { id(at + 1) };
    ((0..count).map(id).collect(), (0..count).map(target).collect())
}

/// Returns the loss of a step, its norm, and the gradient of each parameter.
fn gradients(
    case: &Case,
    layout: &Layout,
    formats: Formats,
) -> (f64, f64, Vec<(String, Vec<f64>)>) {
    let ranks = layout.tensor.len().max(1) * layout.stages as usize * layout.pipelines;
    let devices = if ranks == 1 { "cpu".into() } else { format!("cpu*{ranks}") };
    let optimizer = Optimizer::Sgd { momentum: 0.0, weight_decay: 0.0 };
    let options = TrainerOptions {
        micro_batch_size: case.micro_batch,
        shares: Shares::Even,
        pipeline: PipelineOptions {
            stages: layout.stages,
            schedule: layout.schedule,
            virtual_stages: layout.chunks(),
            ..PipelineOptions::default()
        },
        tensor: TensorOptions {
            ranks: layout.tensor.len().max(1) as u32,
            shares: layout.tensor.clone(),
        },
        fuse: case.fuse,
        recompute: formats.recompute,
        precision: formats.precision,
        activations: formats.activations,
        tune_s: 0.0,
        hash_every: 1,
        seed: 5,
        ..TrainerOptions::new(&devices, optimizer, case.batch)
    };
    // One device computes all logits at once.
    let loss_rows = if ranks == 1 { 1024 } else { case.loss_rows };
    let smoothing = if case.fuse { 0.125 } else { 0.0 };
    let graph = case.model.graph().with_loss_rows(loss_rows);
    let graph = graph.with_label_smoothing(smoothing).unwrap();
    let mut trainer = Trainer::new(graph, &options).unwrap();
    let (tokens, targets) = batch(case);
    let inputs = [("tokens", HostTensor::Int(tokens)), ("targets", HostTensor::Int(targets))];
    let before = trainer.parameters().unwrap();
    let step = trainer.step(&inputs, f64::from(LR)).unwrap();
    let after = trainer.parameters().unwrap();
    let mut gradients = Vec::new();
    for (before, after) in before.iter().zip(&after) {
        let pairs = before.values.iter().zip(&after.values);
        let of = |(before, after): (&f32, &f32)| {
            (f64::from(*before) - f64::from(*after)) / f64::from(LR)
        };
        gradients.push((before.name.clone(), pairs.map(of).collect()));
    }
    (step.loss, step.gradient_norm, gradients)
}

/// The squared error of a tensor's gradient over the squared expectation, or over `typical`, the
/// mean of all tensors, if that is larger: where terms cancel, such as in a bias of keys, the
/// errors of rounded terms do not.
fn rounded_nmse(found: &[f64], expected: &[f64], typical: f64) -> f64 {
    let errors: Vec<f64> = found.iter().zip(expected).map(|(a, b)| a - b).collect();
    squares(&errors) / squares(expected).max(typical)
}

fn check(case: &Case) {
    let one = Layout {
        pipelines: 1,
        stages: 1,
        tensor: Vec::new(),
        schedule: PipelineSchedule::default(),
    };
    let [nmse_max, of_loss, of_norm] = case.formats.errors_max();
    let (loss, norm, expected) = gradients(case, &one, Formats::default());
    let (found_loss, found_norm, found) = gradients(case, &case.layout, case.formats);
    assert!((found_loss - loss).abs() <= of_loss * loss, "{found_loss} {loss}");
    assert!((found_norm - norm).abs() <= of_norm * norm, "{found_norm} {norm}");
    let model: f64 = expected.iter().map(|(_, values)| squares(values)).sum();
    let typical = model / expected.len() as f64;
    assert_eq!(found.len(), expected.len());
    for ((name, found), (same, expected)) in found.iter().zip(&expected) {
        assert_eq!(name, same);
        let nmse = if nmse_max == NMSE_MAX {
            gradient_nmse(found, expected, model)
        } else {
            rounded_nmse(found, expected, typical)
        };
        assert!(nmse <= nmse_max, "{name}: {nmse:e}");
    }
}

/// As many cases as every change waits for, or those of `POTLUCK_LAYOUT_CASES`.
fn generated() -> ProptestConfig {
    let cases = env::var("POTLUCK_LAYOUT_CASES").ok().and_then(|cases| cases.parse().ok());
    ProptestConfig {
        cases: cases.unwrap_or(80),
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(generated())]

    #[test]
    fn layouts_have_gradients_of_one_device(case in cases()) {
        check(&case);
    }
}

//! Benchmark of the memory of a training step on the CPU device, by an allocator that counts: GPT-2
//! 124M with logits of all rows or in chunks, with parts of the forward pass computed again, and
//! with what is kept in bf16.
//!
//!     cargo bench --bench activations -- [--rounds N] [--context N] [--rows N]
//!
//! `told` is what `--explain memory` says of activations, logits and workspace, `taken` the highest
//! number of bytes allocated at a time, without parameters, gradients and moments. `step` is the
//! forward and backward pass of a micro-batch, the fastest of some rounds.

#[path = "allocator/mod.rs"]
mod allocator;

use potluck_bench::step::gpt2;
use potluck_core::format::size_text;
use potluck_core::{DType, HostTensor, TensorId};
use potluck_graph::model::{GptConfig, gpt};
use potluck_graph::print::MemoryUsage;
use potluck_graph::{ActivationFormat, Graph, ModelGraph, Plan, PlanOptions, Recompute};
use potluck_kernels::exec::cpu::{host_extra_bytes, workspace_bytes};
use potluck_kernels::exec::{Cpu, Executor};

/// Moments of AdamW.
const MOMENTS: usize = 2;

/// Way of computing a step.
struct Way {
    name: &'static str,
    /// Logits of all rows at once, and not in chunks.
    whole_logits: bool,
    recompute: Recompute,
    activations: ActivationFormat,
}

/// Logits in chunks, and all activations kept in f32.
const PLAIN: Way = Way {
    name: "chunks",
    whole_logits: false,
    recompute: Recompute::None,
    activations: ActivationFormat::F32,
};

const WAYS: [Way; 6] = [
    Way { name: "whole logits", whole_logits: true, ..PLAIN },
    PLAIN,
    Way { name: "bf16", activations: ActivationFormat::Bf16, ..PLAIN },
    Way { name: "selective", recompute: Recompute::Selective, ..PLAIN },
    Way {
        name: "selective bf16",
        recompute: Recompute::Selective,
        activations: ActivationFormat::Bf16,
        ..PLAIN
    },
    Way { name: "blocks", recompute: Recompute::Blocks, ..PLAIN },
];

fn main() {
    let (context, rows) = (number("--context", 1024), number("--rows", 4));
    let rounds = number("--rounds", 3);
    let config = GptConfig { context, positions: context.max(1024), ..gpt2() };
    println!("{:16}{:>12}{:>12}{:>8}{:>10}{:>8}", "", "told", "taken", "part", "step", "ratio");
    let mut whole = None;
    let mut unrepeated = None;
    for way in WAYS {
        let forward = gpt(&config).unwrap_or_else(|error| panic!("the model is right: {error}"));
        let forward =
            if way.whole_logits { forward.with_loss_rows(rows * context) } else { forward };
        let model = ModelGraph::training(forward, true);
        let model = model.unwrap_or_else(|error| panic!("the model is trained: {error}"));
        let model = model.with_recompute(way.recompute).with_activations(way.activations);
        let graph = model.with_merged_backward().whole().clone();
        let Measured { told, taken, seconds } = measured(graph, rows, rounds as u32);
        let part = taken as f64 / *whole.get_or_insert(taken) as f64;
        // The ratio of times is to the step that computes nothing again, with the same logits.
        if !way.whole_logits {
            unrepeated.get_or_insert(seconds);
        }
        let ratio = seconds / unrepeated.unwrap_or(seconds);
        let [told, taken] = [told, taken].map(size_text);
        println!("{:16}{told:>12}{taken:>12}{part:8.3}{seconds:9.2}s{ratio:8.2}", way.name);
    }
}

struct Measured {
    /// Bytes of activations, logits and workspace by the plan.
    told: usize,
    /// By the allocator.
    taken: usize,
    seconds: f64,
}

/// Runs forward and backward passes of a graph, and returns their memory and time.
fn measured(graph: Graph, rows: usize, rounds: u32) -> Measured {
    let plan = Plan::new(graph, PlanOptions::new(rows));
    let usage = MemoryUsage::of(&plan, MOMENTS);
    let bucket_tensors = usage.parameters + usage.gradients + usage.moments;
    let told = usage.peak() - bucket_tensors + workspace_bytes(&plan) + host_extra_bytes(&plan);
    let inputs = inputs(&plan.graph, rows);
    let before = allocator::allocated();
    let mut device = Cpu::fast(plan, MOMENTS);
    let failed = |error| -> ! { panic!("the CPU device does not fail: {error}") };
    device.initialize(1).unwrap_or_else(|error| failed(error));
    // Without the initial values, of which there was a copy.
    allocator::forget_peak();
    let seconds = device.time_micro_batch(&inputs, rows as u32, rounds);
    let seconds = seconds.unwrap_or_else(|error| failed(error));
    Measured { told, taken: allocator::peak() - before - bucket_tensors, seconds }
}

/// Returns the inputs of a micro-batch: tokens in some order.
fn inputs(graph: &Graph, rows: usize) -> Vec<(TensorId, HostTensor)> {
    let mut inputs = Vec::new();
    for (_, id) in graph.inputs_of_samples() {
        let tensor = graph.tensor(*id);
        assert_eq!(tensor.dtype, DType::U32, "inputs of a language model are integers");
        let count = tensor.shape.elements(rows);
        let values = (0..count).map(|i| (i * 7919 % gpt2().vocabulary) as u32).collect();
        inputs.push((*id, HostTensor::Int(values)));
    }
    inputs
}

/// Returns the number behind a flag.
fn number(flag: &str, default: usize) -> usize {
    let mut arguments = std::env::args().skip_while(|argument| argument != flag).skip(1);
    arguments.next().map_or(default, |text| text.parse().unwrap_or(default))
}

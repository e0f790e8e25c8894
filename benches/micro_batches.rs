//! Benchmark of `train.micro_batch_size = "auto"`: on each device and for some limits of its
//! memory, the samples at a time that a run chooses, beside the most whose memory, as it was
//! measured, stays below the limit.
//!
//!     cargo bench --bench micro_batches -- [DEVICES]
//!
//! Of the CPU device the memory is the highest number of bytes allocated at a time, of an adapter
//! what wgpu has allocated after forward and backward pass of a micro-batch.

#[path = "allocator/mod.rs"]
mod allocator;

use std::error::Error;

use potluck_core::format::size_text;
use potluck_core::{HostTensor, TensorId};
use potluck_graph::model::{GptConfig, gpt};
use potluck_graph::optim::Optimizer;
use potluck_graph::{Graph, ModelGraph, Plan, Precision, Unary};
use potluck_kernels::autotune::{KernelCache, KernelSelector};
use potluck_kernels::device::{Gpu, Selection, ShaderChecks, list_adapters, select_all};
use potluck_kernels::exec::{Cpu, Executor, GpuExecutor};
use potluck_train::runtime::memory::needed;
use potluck_train::{Trainer, TrainerOptions};

/// Samples of a step: the most that run at a time.
const BATCH: usize = 32;

/// Numbers of samples whose memory is measured: those that a run may choose.
const SIZES: [usize; 6] = [1, 2, 4, 8, 16, 32];

/// Limits, by the memory of which of the sizes, and as a multiple of it.
const LIMITS: [(usize, f64); 3] = [(0, 1.3), (2, 1.05), (4, 1.5)];

const OPTIMIZER: Optimizer =
    Optimizer::AdamW { beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1 };

fn main() -> Result<(), Box<dyn Error>> {
    // Cargo adds `--bench`.
    let mut arguments = std::env::args().skip(1).filter(|argument| !argument.starts_with('-'));
    let selector = arguments.next().unwrap_or_else(|| "all".into());
    println!(
        "{:40}{:>12}{:>6}{:>12}{:>12}{:>12}",
        "", "limit", "auto", "told", "measured", "most below"
    );
    for selection in select_all(&selector, &list_adapters())? {
        let (name, device) = match &selection {
            Selection::Adapter(adapter) => {
                let name = format!("{}:{}", adapter.api, adapter.name);
                (name.clone(), name)
            }
            Selection::Cpu { .. } | Selection::Offered(_) => ("cpu".into(), "cpu".into()),
        };
        let mut peaks = Vec::new();
        for rows in SIZES {
            peaks.extend(peak(&selection, rows)?);
        }
        if peaks.len() < SIZES.len() {
            println!("{name:40}{:>12}", "not counted");
            continue;
        }
        for (size, factor) in LIMITS {
            let mebibytes = (peaks[size] as f64 * factor).div_euclid(1024.0 * 1024.0) as u64 + 1;
            let chosen = chosen(&device, mebibytes)?;
            let limit = (mebibytes << 20) as usize;
            let below = SIZES.iter().zip(&peaks).rev().find(|(_, bytes)| **bytes < limit);
            let most = below.map_or(0, |(size, _)| *size);
            let at = SIZES.iter().position(|size| *size == chosen).ok_or("a size between")?;
            let [told, measured] = [told(&selection, chosen)?, peaks[at]].map(size_text);
            let limit = size_text(limit);
            println!("{name:40}{limit:>12}{chosen:6}{told:>12}{measured:>12}{most:12}");
        }
    }
    Ok(())
}

fn model() -> Result<Graph, Box<dyn Error>> {
    let config = GptConfig {
        vocabulary: 8000,
        context: 256,
        positions: 256,
        layers: 4,
        heads: 4,
        width: 192,
        bias: true,
        dropout: 0.0,
        tie: true,
        activation: Unary::GeluTanh,
    };
    Ok(gpt(&config)?)
}

/// Returns the samples at a time that a run chooses on a device with so much memory.
fn chosen(device: &str, mebibytes: u64) -> Result<usize, Box<dyn Error>> {
    let options = TrainerOptions {
        device_memory_mib: mebibytes,
        tune_s: 0.0,
        ..TrainerOptions::new(device, OPTIMIZER, BATCH)
    };
    let trainer = Trainer::new(model()?, &options)?;
    Ok(trainer.placement().ranks[0].micro_batch as usize)
}

/// Returns the bytes that a run takes by its plan, with so many samples at a time.
fn told(selection: &Selection, rows: usize) -> Result<usize, Box<dyn Error>> {
    Ok(needed(selection, &planned(rows)?, &OPTIMIZER.moments().into()))
}

fn planned(rows: usize) -> Result<Plan, Box<dyn Error>> {
    let model = ModelGraph::training(model()?, true)?.with_merged_backward();
    Ok(Plan::new(model.whole().clone(), model.plan_options(rows)))
}

/// Returns the memory of a device that runs so many samples at a time; `None` if it is not counted.
fn peak(selection: &Selection, rows: usize) -> Result<Option<usize>, Box<dyn Error>> {
    let plan = planned(rows)?;
    let inputs = inputs(&plan.graph, rows);
    let moments = OPTIMIZER.moments();
    let Selection::Adapter(adapter) = selection else {
        let before = allocator::allocated();
        let mut device = Cpu::fast(plan, moments);
        device.initialize(1)?;
        allocator::forget_peak();
        device.time_micro_batch(&inputs, rows as u32, 1)?;
        return Ok(Some(allocator::peak() - before));
    };
    let gpu = Gpu::open(adapter, ShaderChecks::Disabled, Precision::F32)?;
    let kernels = KernelSelector::new(KernelCache::in_memory());
    let mut device = GpuExecutor::new(gpu, plan, moments, kernels)?;
    device.initialize(1)?;
    device.time_micro_batch(&inputs, rows as u32, 1)?;
    Ok(device.allocated_by_wgpu().map(|bytes| bytes as usize))
}

/// Returns the inputs of a micro-batch: tokens in some order.
fn inputs(graph: &Graph, rows: usize) -> Vec<(TensorId, HostTensor)> {
    let mut inputs = Vec::new();
    for (_, id) in graph.inputs_of_samples() {
        let count = graph.tensor(*id).shape.elements(rows);
        let values = (0..count).map(|i| (i * 7919 % 8000) as u32).collect();
        inputs.push((*id, HostTensor::Int(values)));
    }
    inputs
}

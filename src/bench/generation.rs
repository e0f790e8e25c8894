//! Benchmark of text generation: passes over prompts and single tokens of models with random
//! parameters, whose keys and values are on the device.

use std::time::Instant;

use super::report::{Direction, Figure, FigureKind, FigureRecorder, GBS};
use super::sample::SamplingPlan;
use super::step::{gpt2, small};
use super::target::{Target, TargetDevice};
use potluck_core::DType;
use potluck_graph::model::gpt::cached_gpt;
use potluck_graph::model::{CacheInputs, GptConfig, LanguageModel};
use potluck_graph::{ModelGraph, Plan, PlanOptions};
use potluck_kernels::device::DeviceError;
use potluck_kernels::exec::{Executor, load};
use potluck_train::TrainError;
use potluck_train::runtime::open::{OpenOptions, open};
use potluck_train::runtime::step::forward_without;
use potluck_train::runtime::workers::WorkerGroup;
use potluck_train::sampling::{CachedToken, PROMPT_ROWS};

/// Sequences that are continued at the same time; a single one is measured too.
const SEQUENCES: usize = 8;

/// Passes before the measured ones.
const WARM_UP: usize = 3;

/// Measures generation by the small GPT and, with `full` and not on software adapters, by GPT-2.
pub fn measure(
    target: &Target,
    sampling_plan: &SamplingPlan,
    full: bool,
    recorder: &mut FigureRecorder,
) -> Result<(), TrainError> {
    measure_model("gpt_small", &small(), target, sampling_plan, recorder)?;
    if !full {
        return Ok(());
    }
    if matches!(target.place, TargetDevice::Adapter(_)) && !target.is_hardware() {
        recorder.skip("generation.gpt2", "it is for the CPU device and hardware GPUs");
        return Ok(());
    }
    measure_model("gpt2", &gpt2(), target, sampling_plan, recorder)
}

fn measure_model(
    name: &str,
    config: &GptConfig,
    target: &Target,
    sampling_plan: &SamplingPlan,
    recorder: &mut FigureRecorder,
) -> Result<(), TrainError> {
    recorder.progress(&format!("generation by {name}"));
    let graph = ModelGraph::forward(cached_gpt(config, SEQUENCES)?, true).whole().clone();
    let Some((model, cache)) = LanguageModel::of(&graph).and_then(|of| Some((of, of.cache?)))
    else {
        return Err(TrainError::Defect("a cached graph without a cache".into()));
    };
    let weights = graph.parameter_count() * DType::F32.bytes();
    let plan = Plan::new(graph, PlanOptions::new(PROMPT_ROWS));
    let opened = open(&target.selector, plan, 0, &OpenOptions::default())?;
    let group = WorkerGroup::single(opened.driver)?;
    group.run_on_all("initialization", |_, device| device.initialize(1))?;
    let length = config.context / 2;
    // Bytes of the keys and values of `length` positions, which a token reads.
    let cached = 2 * config.layers * config.width * length * DType::F32.bytes();
    for (what, sequences, tokens) in
        [("prompt", 1, PROMPT_ROWS.min(config.context)), ("1", 1, 1), ("8", SEQUENCES, 1)]
    {
        let pass = MeasuredPass { model, cache, sequences, tokens, last: length };
        let samples = sampling_plan.steps;
        let measured = group.run_on_all("a benchmark of generation", move |_, device| {
            pass.seconds(device, samples)
        })?;
        let seconds = measured.concat();
        let count = (sequences * tokens) as f64;
        let rates: Vec<f64> = seconds.iter().map(|seconds| count / seconds).collect();
        let figure = Figure::new(
            FigureKind::Generation,
            &format!("generation.{name}_{what}_tokens"),
            "tokens/s",
            Direction::Higher,
            &rates,
        );
        let on = match tokens {
            1 => format!("{sequences} x 1 token behind {length}"),
            _ => format!("a prompt of {tokens} tokens"),
        };
        recorder.add(figure.on(&on));
        if tokens == 1 {
            let bytes = (weights + sequences * cached) as f64;
            let what = format!("generation.{name}_{what}_bandwidth");
            let figure = Figure::rate(FigureKind::Generation, &what, GBS, bytes, &seconds);
            recorder.add(figure.on("weights, keys and values read once per token"));
        }
    }
    Ok(())
}

/// Pass over the next tokens of some sequences.
#[derive(Clone, Copy)]
struct MeasuredPass {
    model: LanguageModel,
    cache: CacheInputs,
    sequences: usize,
    /// Tokens of each sequence; if there are several, a prompt, no logits are computed.
    tokens: usize,
    /// Position of a single token.
    last: usize,
}

impl MeasuredPass {
    /// Seconds of each of `samples` passes.
    fn seconds(self, device: &mut dyn Executor, samples: usize) -> Result<Vec<f64>, DeviceError> {
        let Self { model, cache, sequences, tokens, last } = self;
        let first = if tokens == 1 { last } else { 0 };
        let mut rows = Vec::with_capacity(sequences * tokens);
        for sequence in 0..sequences {
            for position in first..first + tokens {
                let token = (31 * position + sequence) as u32 % model.vocabulary as u32;
                rows.push(CachedToken { token, sequence, position });
            }
        }
        let inputs = CachedToken::inputs(&model, &cache, &rows);
        let mut head = None;
        if tokens > 1 {
            head = device.plan().graph.block_of(model.logits);
        }
        let mut seconds = Vec::with_capacity(samples);
        for nth in 0..WARM_UP + samples {
            let begun = Instant::now();
            load(device, &inputs, 0)?;
            let pass = forward_without(device, sequences * tokens, head)?;
            // After a prompt, this only waits for the device: there are no logits.
            let read = if tokens == 1 { sequences * model.vocabulary } else { 1 };
            device.read_parts(model.logits, std::slice::from_ref(&(0..read)), &pass)?;
            if nth >= WARM_UP {
                seconds.push(begun.elapsed().as_secs_f64());
            }
        }
        Ok(seconds)
    }
}

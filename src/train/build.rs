//! Construction of a run's parts from its configuration: model, plan, device options, data.

use std::sync::Arc;
use std::time::Duration;

use super::error::TrainError;
use crate::config::RunConfig;
use crate::config::schema::{Balance, DataKind, OptimKind};
use crate::data::corpus::CORPUS;
use crate::data::{Sampler, Split, TextData, Tokenizer, TokenizerChoice};
use crate::graph::passes::fuse::{Fusion, fuse_listed};
use crate::graph::{Graph, Plan, PlanOptions, differentiate, fuse};
use crate::model::{GptConfig, gpt};
use crate::optim::{Optimizer, Schedule};
use crate::runtime::open::OpenOptions;
use crate::runtime::placement::types::ParallelOptions;

/// Loads the configured text, with the tokenizer of a checkpoint if given, or else its own.
pub fn data(config: &RunConfig, tokenizer: Option<Tokenizer>) -> Result<TextData, TrainError> {
    let tokenizer = match tokenizer {
        Some(tokenizer) => TokenizerChoice::Given(tokenizer),
        None => TokenizerChoice::Derived(config.data.tokenizer),
    };
    let (held_out, context) = (config.data.held_out, config.model.context);
    Ok(match (config.data.kind, &config.data.path) {
        (DataKind::Text, Some(path)) => TextData::load(path, tokenizer, held_out, context)?,
        _ => {
            let name = "the built-in corpus";
            TextData::from_bytes(name, CORPUS.as_bytes(), tokenizer, held_out, context)?
        }
    })
}

/// Builds the forward graph of the configured model, with its loss.
pub fn graph(config: &RunConfig, vocabulary: usize) -> Result<Graph, TrainError> {
    let model = &config.model;
    Ok(gpt(&GptConfig {
        vocabulary,
        context: model.context,
        layers: model.layers,
        heads: model.heads,
        width: model.width,
        bias: model.bias,
        dropout: model.dropout as f32,
        tie: model.tie,
        activation: model.activation,
    })?)
}

/// Builds the training plan for micro-batches of the configured size.
pub fn plan(config: &RunConfig, vocabulary: usize) -> Result<Plan, TrainError> {
    let training = training(config, vocabulary)?;
    Ok(Plan::new(training, PlanOptions::new(config.train.micro_batch)))
}

/// Builds the training graph, fused if that is configured.
pub fn training(config: &RunConfig, vocabulary: usize) -> Result<Graph, TrainError> {
    Ok(fused(config, differentiate(graph(config, vocabulary)?)?))
}

/// Returns the fusions in the training plan.
pub fn fusions(config: &RunConfig, vocabulary: usize) -> Result<Vec<Fusion>, TrainError> {
    let training = differentiate(graph(config, vocabulary)?)?;
    Ok(if config.train.fuse { fuse_listed(training).1 } else { Vec::new() })
}

fn fused(config: &RunConfig, graph: Graph) -> Graph {
    if config.train.fuse { fuse(graph) } else { graph }
}

/// Builds the plan of the forward pass only, for up to `rows` samples at a time.
pub fn forward_plan(
    config: &RunConfig,
    vocabulary: usize,
    rows: usize,
) -> Result<Plan, TrainError> {
    let forward = fused(config, graph(config, vocabulary)?);
    Ok(Plan::new(forward, PlanOptions::new(rows)))
}

/// Returns the configured update rule.
pub fn optimizer(config: &RunConfig) -> Optimizer {
    let optim = &config.optim;
    let weight_decay = optim.weight_decay as f32;
    match optim.kind {
        OptimKind::AdamW => Optimizer::AdamW {
            beta1: optim.beta1 as f32,
            beta2: optim.beta2 as f32,
            eps: optim.eps as f32,
            weight_decay,
        },
        OptimKind::Sgd => Optimizer::Sgd { momentum: optim.momentum as f32, weight_decay },
    }
}

/// Returns the configured learning-rate schedule.
pub fn schedule(config: &RunConfig) -> Schedule {
    Schedule {
        decay: config.schedule.kind,
        lr: config.optim.lr,
        min_lr: config.schedule.min_lr,
        warmup: config.schedule.warmup,
        decay_steps: config.schedule.decay_steps,
    }
}

/// Creates the sampler that draws a window for each slot of each step, after `done` (steps,
/// samples).
pub fn sampler(config: &RunConfig, data: &Arc<TextData>, done: (u64, u64)) -> Sampler {
    let population = data.window_count(Split::Train, config.model.context);
    let (steps, samples) = done;
    Sampler::new(config.train.seed, population, config.train.batch as u32).after(steps, samples)
}

/// Returns the configured options for opening devices.
pub fn open_options(config: &RunConfig) -> OpenOptions {
    let train = &config.train;
    OpenOptions {
        deadline: Duration::from_secs_f64(train.device_timeout_s),
        device_memory_mib: train.device_memory_mib,
        tune_s: train.tune_s,
    }
}

/// Returns the configured options for sharing the work among devices.
pub fn parallel_options(config: &RunConfig) -> ParallelOptions {
    let parallel = &config.parallel;
    ParallelOptions {
        shares: (parallel.balance == Balance::Fixed).then(|| parallel.shares.clone()),
        topology: parallel.collective,
        overlap: parallel.overlap,
        reduce_site: parallel.reduce_site,
        chunk_bytes: parallel.chunk_kib << 10,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::error::EXIT_CONFIGURATION;
    use crate::runtime::{memory, open};
    use crate::train::loader;

    #[test]
    fn defaults_of_the_library_are_those_of_the_configuration() {
        let config = RunConfig::default();
        assert_eq!(open_options(&config), OpenOptions::default());
        assert_eq!(parallel_options(&config), ParallelOptions::default());
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_model_that_no_host_holds_is_refused_before_it_is_allocated() {
        let mut config = RunConfig::default();
        (config.model.width, config.model.layers) = (65_536, 1024);
        config.check().unwrap();
        let plan = plan(&config, 65).unwrap();
        let Err(error) = open::open("cpu", plan, 2, &OpenOptions::default()) else {
            panic!("no host has this")
        };
        let text = error.to_string();
        assert!(text.contains("GiB") && text.contains("model.width"), "{text}");
        assert_eq!(error.exit_code(), EXIT_CONFIGURATION);
    }

    #[test]
    fn the_largest_run_that_can_be_configured_is_counted_without_wrapping() {
        let plan = plan(&RunConfig::default(), 65).unwrap();
        let all = memory::run_bytes(&plan, 1 << 20, 1, loader::bytes(1 << 20, 65_536));
        assert!(all > (1 << 36) && all < usize::MAX, "{all}");
    }
}

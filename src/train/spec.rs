//! `RunSpec`: the meaning of a configuration in the types of the layers below. Built once; no other
//! code of the trainer reads a key.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::continuation::ResumeCommand;
use super::error::TrainError;
use super::left_devices::LeftDevices;
use super::loader::{BatchSource, sampler_of};
use super::run_data::{RunData, SavedData};
use super::task::Task;
use super::trainer::fit::EpochSize;
use super::trainer::{FitLength, FitOptions, SavedRun, TrainerOptions};
use crate::config::RunConfig;
use crate::config::read::{ConfigError, Override, Resolved, read_complete};
use crate::config::schema::{
    Balance, DataKind, DecayKind, LossKind, MicroBatchSize, OptimKind, Parallel,
    Schedule as ScheduleSection, TokenizerSource, TypedKeys, is_of_placement,
};
use crate::families::{DataShape, ModelFamily};
use crate::keys::Value;
use crate::runtime::memory;
use crate::runtime::open::OpenOptions;
use crate::runtime::placement::names::is_auto;
use potluck_core::DType;
use potluck_core::faults::Faults;
use potluck_core::format::{counted, shell_word};
use potluck_core::metrics::Unit;
use potluck_data::{ReadOptions, SampleFormat, Sampler};
use potluck_graph::optim::{Decay, OneCycle, Optimizer, ParameterGroup, Schedule};
use potluck_graph::{
    ActivationFormat, CrossEntropyOptions, Graph, ModelGraph, MomentFormat, Precision, Recompute,
    ValueLoss,
};
use potluck_parallel::planner::plans::Plans;
use potluck_parallel::{
    DeviceLoss, ExcludedDivisions, MismatchAction, ParallelOptions, PipelineOptions, Placement,
    Shares, TensorOptions,
};

/// Keys of the numbers of stages and of ranks.
const STAGES: &str = "parallel.pipeline_stages";
const TENSOR_RANKS: &str = "parallel.tensor_ranks";

/// Specification of a run: all decisions of its configuration.
#[derive(Clone)]
pub struct RunSpec {
    pub model: Box<dyn ModelFamily>,
    pub data: DataSpec,
    pub seed: u64,
    /// Samples per step, over all devices.
    pub batch: u32,
    /// Largest number of samples that a device runs in one pass.
    pub micro_batch: u32,
    /// True to run smaller micro-batches on devices with too little memory.
    pub fits_micro_batch: bool,
    /// Step after which the run ends; with `epochs`, the step that contains their last sample.
    pub steps: u64,
    /// Passes through the training split after which the run ends; 0: ends after `steps`.
    pub epochs: u64,
    /// True to fuse neighbouring operations into one kernel.
    pub fuse: bool,
    /// Parts of the forward pass that are recomputed for the backward pass.
    pub recompute: Recompute,
    /// Number format of activations between blocks and of those kept for the backward pass.
    pub activations: ActivationFormat,
    pub moments: MomentFormat,
    pub precision: Precision,
    pub loss: LossKind,
    /// Difference up to which the Huber loss is a squared error.
    pub huber_delta: f32,
    /// Weights of the classes; empty: 1 each.
    pub class_weights: Vec<f32>,
    /// Part of each target's probability that all classes share; 0: none.
    pub label_smoothing: f32,
    pub optimizer: Optimizer,
    /// Decay of the exponential average of the parameters; 0: no average.
    pub ema: f64,
    /// Groups of parameters with rates of their own, or frozen.
    pub groups: Vec<ParameterGroup>,
    pub schedule: Schedule,
    /// Gradient norm above which gradients are scaled down to it; 0: off.
    pub clip: f64,
    pub every: Intervals,
    /// Evaluations without an improvement after which the run ends; 0: any number.
    pub patience: u64,
    /// Samples per evaluation; 0: all of the validation split.
    pub eval_samples: u64,
    /// Minutes between checkpoints; 0: not by time.
    checkpoint_minutes: f64,
    pub(crate) checkpoints_kept: usize,
    /// Consecutive skipped steps after which the run ends.
    pub skipped_steps_max: u64,
    /// Reaction to parameters that differ between devices.
    pub on_mismatch: MismatchAction,
    /// Reaction to the loss of a device if others are left.
    pub on_loss: DeviceLoss,
    /// Longest silence of another node.
    pub node_timeout: Duration,
    /// Tokens of the sample text at the end.
    pub sample_tokens: u64,
    /// True to write event files for TensorBoard.
    pub tensorboard: bool,
    /// Device selector, as `--devices` takes it.
    pub devices: String,
    pub parallel: ParallelOptions,
    pub opening: OpenOptions,
    /// The configuration as TOML, for `run.toml`: derived defaults are comments.
    pub run_toml: String,
    /// Part of the configuration that a checkpoint saves, without the keys covered by the
    /// placement.
    pub(crate) saved_toml: String,
    /// True if a resume sets a key of the placement, so that it is decided anew.
    pub(crate) decides_placement: bool,
    pub(crate) model_toml: String,
    /// Configuration from which this is derived, with the keys that the user has set.
    resolved: Resolved,
}

/// Data of a run.
#[derive(Clone, Debug)]
pub struct DataSpec {
    pub source: DataSource,
    pub tokenizer: TokenizerSource,
    /// Fraction for the validation split: the end of a text, or any samples.
    pub held_out: f64,
    pub reading: ReadOptions,
    /// True to normalize features and target values.
    pub normalize: bool,
    /// Pixels of padding around pictures that are cropped at random; 0: none.
    pub crop: usize,
    /// True to mirror half of the pictures.
    pub flip: bool,
}

impl DataSpec {
    /// Returns the path of the configured `tokenizer.json`; `None` if the unit of tokens is
    /// configured instead.
    pub fn tokenizer_file(&self) -> Option<&Path> {
        match &self.tokenizer {
            TokenizerSource::File(path) => Some(path),
            TokenizerSource::Kind(_) => None,
        }
    }
}

/// Source of the data of a run.
#[derive(Clone, Debug, PartialEq)]
pub enum DataSource {
    /// The built-in corpus, which is generated.
    Builtin,
    Text(PathBuf),
    /// A file of token ids.
    Tokens(PathBuf),
    Samples {
        format: SampleFormat,
        path: PathBuf,
        /// Samples of the validation split, if they are separate.
        val_path: Option<PathBuf>,
    },
}

impl DataSource {
    /// Returns the paths of the data.
    pub fn paths_mut(&mut self) -> Vec<&mut PathBuf> {
        match self {
            Self::Builtin => Vec::new(),
            Self::Text(path) | Self::Tokens(path) => vec![path],
            Self::Samples { path, val_path, .. } => {
                let mut paths = vec![path];
                paths.extend(val_path);
                paths
            }
        }
    }
}

/// Key of the minutes between checkpoints, and their default in runs over nodes.
const CHECKPOINT_MINUTES: &str = "train.checkpoint_minutes";
const CHECKPOINT_MINUTES_OVER_NODES: f64 = 2.0;

/// Intervals in steps; 0: never, except where a run always performs the action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Intervals {
    pub evaluation: u64,
    pub checkpoint: u64,
    /// Comparison of the parameters of all devices.
    pub(crate) replica_check: u64,
    /// Progress line in plain-text output.
    pub progress: u64,
}

impl RunSpec {
    /// Derives the specification from a configuration and the keys that were set.
    pub fn resolved(resolved: &Resolved) -> Self {
        let config = &resolved.config;
        let train = &config.train;
        let parallel = &config.parallel;
        let faults = &config.faults;
        Self {
            model: config.model.family.clone(),
            data: data(config),
            seed: train.seed,
            batch: train.batch as u32,
            micro_batch: train.micro_batch_size.of_batch(train.batch) as u32,
            fits_micro_batch: train.micro_batch_size == MicroBatchSize::Auto,
            steps: train.steps,
            epochs: train.epochs,
            patience: train.patience,
            fuse: train.fuse,
            recompute: train.recompute,
            activations: train.activations,
            moments: config.optim.moments,
            precision: train.precision,
            loss: train.loss,
            huber_delta: train.huber_delta as f32,
            class_weights: train.class_weights.iter().map(|weight| *weight as f32).collect(),
            label_smoothing: config.optim.label_smoothing as f32,
            optimizer: optimizer(config),
            ema: config.optim.ema,
            // Invalid groups are refused when a configuration is checked.
            groups: config.optim.parameter_groups().unwrap_or_default(),
            schedule: schedule(config),
            clip: config.optim.clip,
            every: Intervals {
                evaluation: train.eval_every,
                checkpoint: train.checkpoint_every,
                replica_check: faults.hash_every,
                progress: train.log_every,
            },
            eval_samples: train.eval_samples,
            checkpoint_minutes: train.checkpoint_minutes,
            checkpoints_kept: train.checkpoint_keep,
            skipped_steps_max: train.skipped_steps_max,
            on_mismatch: faults.on_mismatch,
            on_loss: faults.on_loss,
            node_timeout: Duration::from_secs_f64(faults.node_timeout_s),
            sample_tokens: train.sample_tokens as u64,
            tensorboard: config.metrics.tensorboard,
            devices: parallel.devices.clone(),
            parallel: ParallelOptions {
                excluded: excluded_divisions(resolved),
                ..parallel_options(parallel)
            },
            opening: OpenOptions {
                deadline: Duration::from_secs_f64(faults.device_timeout_s),
                device_memory_mib: train.device_memory_mib,
                submission_ms: train.submission_ms,
                tune_s: train.tune_s,
            },
            run_toml: config.to_run_toml(&resolved.typed.all()),
            saved_toml: config.to_saved_toml(),
            decides_placement: resolved.other_placement.is_some(),
            model_toml: config.section_toml("model"),
            resolved: resolved.clone(),
        }
    }

    /// Derives the specification from a checked configuration, as if no key had been set.
    pub fn new(config: &RunConfig) -> Self {
        let typed = TypedKeys::default();
        Self::resolved(&Resolved { config: config.clone(), typed, other_placement: None })
    }

    /// Number of tokens in a sample; 1 for models of samples.
    pub(super) fn context(&self) -> usize {
        self.model.context().unwrap_or(1)
    }

    /// Size of an epoch, which trains on as many samples or tokens as the data have, from the
    /// sampler of the data and the unit of the task.
    pub(super) fn epoch(&self, sampler: &Sampler, unit: Unit) -> EpochSize {
        let samples = sampler.epoch_samples();
        let per_sample = self.context() as u64;
        match unit {
            Unit::Samples => EpochSize { units: samples, per_sample: 1 },
            Unit::Tokens if sampler.is_of_streams() => {
                EpochSize { units: samples * per_sample, per_sample }
            }
            // A sample starts at every token but the last ones.
            Unit::Tokens => EpochSize { units: samples + per_sample, per_sample },
        }
    }

    /// Specification with the steps of its epochs, if it is given in epochs, and the resulting
    /// schedule. `steps` and `samples` are the run's so far.
    ///
    /// # Errors
    /// Returns `TrainError::InvalidRequest` if epochs that were set now end before the steps
    /// already done, or have more steps than a run can have.
    pub(super) fn with_epochs(
        self,
        epoch: EpochSize,
        steps: u64,
        samples: u64,
    ) -> Result<Self, TrainError> {
        if self.epochs == 0 {
            return Ok(self);
        }
        let typed = &self.resolved.typed;
        let batch = u64::from(self.batch);
        let last = epoch.last_step(self.epochs, steps, samples, batch);
        let whole = self.epochs.saturating_mul(epoch.units);
        let done = samples.saturating_mul(epoch.per_sample);
        // The last step may go beyond the end.
        let is_over = whole.saturating_add(batch * epoch.per_sample) <= done;
        if typed.now.contains("train.epochs") && is_over {
            return Err(TrainError::InvalidRequest(format!(
                "train.epochs = {} ends before the {} of the checkpoint, which are {:.2} epochs; \
                 set more epochs, or resume from an earlier checkpoint",
                self.epochs,
                counted(steps as usize, "step", "steps"),
                done as f64 / epoch.units as f64
            )));
        }
        let mut resolved = self.resolved.clone();
        resolved.config.set_steps_of_epochs(last, typed);
        resolved
            .config
            .check()
            .map_err(|invalid| TrainError::InvalidRequest(invalid.to_string()))?;
        Ok(Self::resolved(&resolved))
    }

    /// Returns the specification with the steps of its epochs; loads the data for that if it has
    /// epochs. `saved` is the description of the data in a checkpoint, and `done` the steps and
    /// samples of the run so far.
    ///
    /// # Errors
    /// Returns `TrainError` if the data cannot be read or do not suit the model, and the errors of
    /// the number of epochs.
    pub fn on_data(self, saved: &SavedData, done: (u64, u64)) -> Result<Self, TrainError> {
        if self.epochs == 0 {
            return Ok(self);
        }
        let (steps, samples) = done;
        let data = self.load_data(saved)?;
        let training = self.training_graph(&data.shape)?;
        let graph = training.whole();
        let source = self.batch_source(graph, &data, steps, samples)?;
        let epoch = self.epoch(&source.sampler, data.task(graph)?.unit());
        self.with_epochs(epoch, steps, samples)
    }

    /// Complete configuration as TOML, for other nodes.
    pub(crate) fn whole_toml(&self) -> String {
        self.resolved.config.to_toml()
    }

    /// Derives the specification of a node from the resolved configuration of the run that it
    /// joins, overridden by the node's own keys.
    ///
    /// # Errors
    /// Returns [`ConfigError`] if the configuration cannot be read, or does not accept these
    /// values.
    pub fn of_node(config: &str, overrides: &[Override]) -> Result<Self, ConfigError> {
        let place = Path::new("the configuration of the first node");
        Ok(Self::resolved(&read_complete(place, config, overrides)?))
    }

    /// Tokens that the model has by its own configuration; `None` if it has those of its data.
    pub(crate) fn model_vocabulary(&self) -> Option<usize> {
        match self.resolved.config.value("model.vocabulary") {
            Some(Value::Whole(tokens)) => usize::try_from(tokens).ok(),
            _ => None,
        }
    }

    /// Names of the keys that the user has set, among those that a checkpoint saves.
    pub(crate) fn saved_keys(&self) -> Vec<String> {
        let ExcludedDivisions { pipelines, tensor_groups } = self.parallel.excluded;
        let mut keys = self.resolved.typed.all();
        keys.retain(|key| !is_of_placement(key));
        // What they exclude is not in the placement.
        keys.extend(pipelines.then_some(STAGES));
        keys.extend(tensor_groups.then_some(TENSOR_RANKS));
        keys.into_iter().map(String::from).collect()
    }

    /// Devices without the one at a position, and the pipelines that they form; `None` if no other
    /// device is left.
    pub(crate) fn left_without(&self, position: usize) -> Option<LeftDevices> {
        let ParallelOptions { pipeline, tensor, .. } = &self.parallel;
        LeftDevices::without(&self.devices, position, pipeline, tensor)
    }

    /// Devices of a selector with which the run continues, and the pipelines that they form.
    pub(crate) fn left_on(&self, devices: String) -> LeftDevices {
        LeftDevices::of(devices, &self.parallel.pipeline, &self.parallel.tensor)
    }

    /// Returns any devices instead of the run's: as few as `auto` may select.
    pub fn left_on_any(&self) -> LeftDevices {
        LeftDevices {
            devices: "auto".into(),
            stages: self.parallel.pipeline.has_stages().then_some(1),
            tensor: self.parallel.tensor.has_groups().then_some(1),
            spare: 0,
            are_as_typed: false,
        }
    }

    /// Specification of the run on the devices that are left, with the pipelines that they form if
    /// these differ. Shares and cuts for other devices are measured anew.
    ///
    /// # Errors
    /// Returns `TrainError::InvalidRequest` if the configuration does not accept these values.
    pub(crate) fn on_devices(&self, left: &LeftDevices) -> Result<Self, TrainError> {
        let mut resolved = self.resolved.clone();
        resolved.other_placement = None;
        let parallel = &mut resolved.config.parallel;
        parallel.devices.clone_from(&left.devices);
        parallel.share_changes.clear();
        if !parallel.shares.is_empty() {
            parallel.shares.clear();
            parallel.balance = Balance::Measured;
        }
        let stages = left.stages.unwrap_or(parallel.pipeline_stages);
        if !left.are_as_typed || stages != parallel.pipeline_stages {
            parallel.blocks_per_stage.clear();
        }
        if stages == 1 {
            let default = Parallel::default();
            parallel.schedule = default.schedule;
            parallel.virtual_stages = default.virtual_stages;
        }
        // Fewer parts than were asked for exclude none.
        if stages != parallel.pipeline_stages {
            resolved.typed.forget(STAGES);
        }
        parallel.pipeline_stages = stages;
        let ranks = left.tensor.unwrap_or(parallel.tensor_ranks);
        if !left.are_as_typed || ranks != parallel.tensor_ranks {
            parallel.tensor_shares.clear();
        }
        if ranks != parallel.tensor_ranks {
            resolved.typed.forget(TENSOR_RANKS);
        }
        parallel.tensor_ranks = ranks;
        resolved
            .config
            .check()
            .map_err(|invalid| TrainError::InvalidRequest(invalid.to_string()))?;
        Ok(Self::resolved(&resolved))
    }

    /// Returns a command that continues the run on the devices that are left, with the same keys of
    /// the placement as if the run itself continued ([`RunSpec::on_devices`]).
    pub fn resume_on(&self, left: LeftDevices, mut command: ResumeCommand) -> ResumeCommand {
        command.settings.retain(|(key, _)| !is_of_placement(key));
        // Devices selected automatically are not known yet, and are measured anew.
        if !is_auto(&left.devices)
            && let Ok(spec) = self.on_devices(&left)
        {
            command.settings.extend(placement_settings(&spec));
            // A named pipeline sets its own micro-batch for a run that set none.
            if spec.parallel.pipeline.has_stages() && left.stages.is_some() {
                command.settings.retain(|(key, _)| *key != "train.micro_batch_size");
                command.settings.push(("train.micro_batch_size", spec.micro_batch.to_string()));
            }
        }
        let LeftDevices { devices, mut stages, mut tensor, .. } = left;
        // Other devices decide the placement anew. A single stage or rank that is given would
        // exclude pipelines or tensor groups, which a plan may need.
        if devices != self.devices {
            stages = stages.filter(|stages| *stages > 1);
            tensor = tensor.filter(|ranks| *ranks > 1);
        }
        ResumeCommand { devices: Some(devices), pipeline: stages, tensor, ..command }
    }

    /// Command that continues a run over several nodes on the devices of this one: the devices
    /// named by the run, with other shares if it specifies shares, or fewer devices if its
    /// pipelines do not fit.
    pub(super) fn resume_on_own(&self, mut command: ResumeCommand) -> ResumeCommand {
        let left = self.left_on(self.devices.clone());
        if left.devices != self.devices || left.stages.is_some() || left.tensor.is_some() {
            return self.resume_on(left, command);
        }
        let has_changes = !self.parallel.share_changes.is_empty();
        if has_changes || matches!(self.parallel.shares, Shares::Fixed(_)) {
            command.settings.retain(|(key, _)| !is_of_placement(key));
            command.settings.push(("parallel.balance", "measured".into()));
            let own = LeftDevices { are_as_typed: true, ..left };
            if let Ok(spec) = self.on_devices(&own) {
                command.settings.extend(placement_settings(&spec));
            }
        }
        command
    }

    /// Returns true if the user chose between values and classes as targets: by their kind, or by a
    /// loss.
    pub fn chooses_targets(&self) -> bool {
        self.data.reading.kind.is_some() || self.loss != LossKind::Auto
    }

    /// Returns the options of the run's trainer, without a trace and faults.
    pub fn trainer_options(&self) -> TrainerOptions {
        TrainerOptions {
            devices: self.devices.clone(),
            shares: self.parallel.shares.clone(),
            follows_speed: true,
            share_changes: self.parallel.share_changes.clone(),
            pipeline: self.parallel.pipeline.clone(),
            tensor: self.parallel.tensor.clone(),
            excluded: self.parallel.excluded,
            optimizer: self.optimizer,
            ema: self.ema,
            groups: self.groups.clone(),
            batch: self.batch as usize,
            micro_batch_size: self.micro_batch as usize,
            fits_micro_batch: self.fits_micro_batch,
            clip: self.clip,
            seed: self.seed,
            fuse: self.fuse,
            recompute: self.recompute,
            activations: self.activations,
            moments: self.moments,
            precision: self.precision,
            tune_s: self.opening.tune_s,
            retune: false,
            device_timeout: self.opening.deadline,
            device_memory_mib: self.opening.device_memory_mib,
            submission_ms: self.opening.submission_ms,
            topology: self.parallel.topology,
            overlap: self.parallel.overlap,
            reduce_site: self.parallel.reduce_site,
            trace: None,
            hash_every: self.every.replica_check,
            on_mismatch: self.on_mismatch,
            on_loss: self.on_loss,
            snapshot_every: 0,
            faults: Faults::none(),
            message_bytes: self.parallel.chunk_bytes,
            measures_pipelines: true,
        }
    }

    pub(super) fn saved_run(&self, data: &RunData) -> SavedRun {
        SavedRun {
            model: self.model_toml.clone(),
            config: self.saved_toml.clone(),
            typed: self.saved_keys(),
            tokenizer: data.saved().tokenizer,
            unknown: BTreeMap::new(),
        }
    }

    /// Longest time between checkpoints of a run on this number of nodes, if any: a node is lost
    /// more easily than a device.
    fn save_interval(&self, nodes: usize) -> Option<Duration> {
        let minutes = if nodes > 1 && !self.resolved.typed.all().contains(CHECKPOINT_MINUTES) {
            CHECKPOINT_MINUTES_OVER_NODES
        } else {
            self.checkpoint_minutes
        };
        (minutes > 0.0).then(|| Duration::from_secs_f64(60.0 * minutes))
    }

    /// Options of the steps of the run with this task on this number of nodes, in its directory.
    pub(crate) fn fit_options(
        &self,
        task: Arc<dyn Task>,
        directory: &Path,
        nodes: usize,
    ) -> FitOptions {
        FitOptions {
            eval_every: self.every.evaluation,
            eval_samples: self.eval_samples,
            task,
            directory: Some(directory.into()),
            save_every: self.every.checkpoint,
            save_interval: self.save_interval(nodes),
            saves_kept: self.checkpoints_kept,
            skipped_steps_max: self.skipped_steps_max,
            patience: self.patience,
            ..FitOptions::new(FitLength::Steps(self.steps), self.schedule)
        }
    }

    /// Builds the training graph.
    ///
    /// # Errors
    /// Returns `TrainError::Model` if the sizes of the model contradict each other, and
    /// `TrainError::Groups` if it has no parameters for one of the groups.
    pub fn training_graph(&self, data: &DataShape) -> Result<ModelGraph, TrainError> {
        self.trainer_options().training_graph(self.forward_graph(data)?)
    }

    /// Builds the forward graph of the model with its loss.
    ///
    /// # Errors
    /// Returns `TrainError::Runtime` before anything is built if the host has too little memory for
    /// the parameters, and `TrainError::Model` if the sizes of the model contradict each other.
    fn forward_graph(&self, data: &DataShape) -> Result<Graph, TrainError> {
        let bytes = self.model.parameters_at_least().saturating_mul(DType::F32.bytes() as u64);
        memory::require(usize::try_from(bytes).unwrap_or(usize::MAX))?;
        self.with_loss(self.model.graph(data)?, data)
    }

    fn with_loss(&self, graph: Graph, data: &DataShape) -> Result<Graph, TrainError> {
        let refused = |why: String| Err(TrainError::InvalidRequest(why));
        let smoothing = self.label_smoothing;
        let has_weights = !self.class_weights.is_empty();
        let is_of_samples = matches!(data, DataShape::Samples { .. });
        if !is_of_samples && (has_weights || self.loss != LossKind::Auto) {
            return refused(
                "train.loss and train.class_weights are for models of tables, arrays and \
                 pictures; leave them out"
                    .into(),
            );
        }
        let value_loss = match self.loss {
            LossKind::L1 => Some(ValueLoss::Absolute),
            LossKind::Huber => Some(ValueLoss::Huber { delta: self.huber_delta }),
            LossKind::Mse => Some(ValueLoss::Squared),
            LossKind::Auto | LossKind::CrossEntropy => None,
        };
        let is_of_values = graph.is_loss_of_values();
        if self.loss == LossKind::CrossEntropy && is_of_values {
            return refused(
                "train.loss = \"cross_entropy\" needs targets that are classes; set \
                 data.task = \"classification\", or leave it out"
                    .into(),
            );
        }
        if value_loss.is_some() && !is_of_values {
            return refused(
                "train.loss is one of values, and the targets are classes; set data.task = \
                 \"regression\", or leave it out"
                    .into(),
            );
        }
        if has_weights && is_of_values {
            return refused(
                "train.class_weights needs targets that are classes; leave it out".into(),
            );
        }
        if smoothing > 0.0 && is_of_values {
            return refused(format!(
                "optim.label_smoothing = {smoothing} needs targets that are classes; leave it out"
            ));
        }
        if let Some(loss) = value_loss {
            return Ok(graph.with_value_loss(loss)?);
        }
        if has_weights {
            let weights = self.class_weights.clone();
            let options = CrossEntropyOptions { weights, smoothing, ignored: None };
            return Ok(graph.with_class_weights(&options)?);
        }
        if smoothing == 0.0 {
            return Ok(graph);
        }
        graph.with_label_smoothing(smoothing).ok_or_else(|| {
            TrainError::Defect("a loss that is neither of classes nor of values".into())
        })
    }

    /// Returns the plans of the forward pass only.
    ///
    /// # Errors
    /// Returns `TrainError::Model` if the sizes of the model contradict each other.
    pub fn forward_plans(&self, data: &DataShape) -> Result<Plans, TrainError> {
        Ok(Plans::new(ModelGraph::forward(self.forward_graph(data)?, self.fuse)))
    }

    /// Returns the plans for generating text, with a cache on the device for the keys and values of
    /// this number of sequences, if the model has keys and values.
    ///
    /// # Errors
    /// Returns `TrainError::InvalidRequest` if the model does not generate text, and
    /// `TrainError::Model` if its sizes contradict each other.
    pub fn generation_plans(
        &self,
        data: &DataShape,
        cached_sequences: Option<usize>,
    ) -> Result<Plans, TrainError> {
        let Some(graph) = self.model.next_token_graph(data, cached_sequences)? else {
            return Err(TrainError::InvalidRequest("the model generates no text".into()));
        };
        Ok(Plans::new(ModelGraph::forward(graph, self.fuse)))
    }

    /// Creates the source of the inputs of a graph, which draws a sample for each slot of each
    /// step. `steps` and `samples` are the run's so far.
    ///
    /// # Errors
    /// Returns `TrainError::InvalidRequest` if the graph does not belong to a model of the data.
    pub fn batch_source(
        &self,
        graph: &Graph,
        data: &RunData,
        steps: u64,
        samples: u64,
    ) -> Result<BatchSource, TrainError> {
        let sampler = sampler_of(graph, &*data.dataset, self.seed, self.batch)?;
        let sampler = sampler.after(steps, samples);
        let mut source = BatchSource::new(graph, data.dataset.clone(), sampler)?;
        source.augmentation = data.augmentation.clone().map(|changes| (changes, self.seed));
        Ok(source)
    }
}

fn data(config: &RunConfig) -> DataSpec {
    let data = &config.data;
    let path = data.path.clone().unwrap_or_default();
    let source = if let Some(format) = data.kind.sample_format() {
        DataSource::Samples { format, path, val_path: data.val_path.clone() }
    } else {
        match data.kind {
            DataKind::Text => DataSource::Text(path),
            DataKind::Tokens => DataSource::Tokens(path),
            _ => DataSource::Builtin,
        }
    };
    let mut target = Vec::new();
    for column in data.target.as_deref().unwrap_or_default().split(',') {
        let name = column.trim();
        if !name.is_empty() {
            target.push(name.to_string());
        }
    }
    let image_size = match data.image_size[..] {
        [height, width] => Some((height as usize, width as usize)),
        _ => None,
    };
    let reading = ReadOptions { target, kind: data.task, image_size, known: None };
    DataSpec {
        source,
        tokenizer: data.tokenizer.clone(),
        held_out: data.held_out,
        reading,
        normalize: data.normalize,
        crop: data.crop,
        flip: data.flip,
    }
}

fn optimizer(config: &RunConfig) -> Optimizer {
    let optim = &config.optim;
    let weight_decay = optim.weight_decay as f32;
    match optim.kind {
        OptimKind::AdamW => Optimizer::AdamW {
            beta1: optim.beta1 as f32,
            beta2: optim.beta2 as f32,
            eps: optim.eps as f32,
            weight_decay,
        },
        OptimKind::Adam => Optimizer::Adam {
            beta1: optim.beta1 as f32,
            beta2: optim.beta2 as f32,
            eps: optim.eps as f32,
            weight_decay,
        },
        OptimKind::Sgd => {
            let momentum = optim.momentum as f32;
            if optim.nesterov {
                Optimizer::Nesterov { momentum, weight_decay }
            } else {
                Optimizer::Sgd { momentum, weight_decay }
            }
        }
        OptimKind::RmsProp => Optimizer::RmsProp {
            alpha: optim.alpha as f32,
            eps: optim.eps as f32,
            momentum: optim.momentum as f32,
            weight_decay,
        },
        OptimKind::Lion => {
            Optimizer::Lion { beta1: optim.beta1 as f32, beta2: optim.beta2 as f32, weight_decay }
        }
    }
}

fn parallel_options(parallel: &Parallel) -> ParallelOptions {
    let shares = match parallel.balance {
        Balance::Measured => Shares::Measured,
        Balance::Fixed if parallel.shares.is_empty() => Shares::Even,
        Balance::Fixed => {
            Shares::Fixed(parallel.shares.iter().map(|share| *share as usize).collect())
        }
    };
    ParallelOptions {
        shares,
        // Invalid changes are refused when a configuration is checked.
        share_changes: parallel.later_shares().unwrap_or_default(),
        topology: parallel.collective,
        overlap: parallel.overlap,
        reduce_site: parallel.reduce_site,
        chunk_bytes: parallel.message_kib << 10,
        pipeline: PipelineOptions {
            stages: parallel.pipeline_stages as u32,
            schedule: parallel.schedule,
            virtual_stages: parallel.virtual_stages as u32,
            blocks_per_stage: parallel.blocks_per_stage.iter().map(|n| *n as u32).collect(),
        },
        tensor: TensorOptions {
            ranks: parallel.tensor_ranks as u32,
            shares: parallel.tensor_shares.iter().map(|share| *share as u32).collect(),
        },
        excluded: ExcludedDivisions::default(),
    }
}

/// Divisions that a plan must not add: those of which a single part is set, now or by an earlier
/// start whose placement stays.
fn excluded_divisions(resolved: &Resolved) -> ExcludedDivisions {
    let Resolved { typed, other_placement, config } = resolved;
    let is_set = |key| match other_placement {
        Some(_) => typed.now.contains(key),
        None => typed.contains(key),
    };
    ExcludedDivisions {
        pipelines: config.parallel.pipeline_stages == 1 && is_set(STAGES),
        tensor_groups: config.parallel.tensor_ranks == 1 && is_set(TENSOR_RANKS),
    }
}

/// Keys of the placement, except for devices and stages, whose values differ from the defaults of a
/// new run, with their values in TOML.
fn placement_settings(spec: &RunSpec) -> Vec<(&'static str, String)> {
    let default = RunConfig::default();
    let mut settings = Vec::new();
    for name in Parallel::KEYS.iter().map(|key| key.full_name) {
        let is_flag = matches!(name, "parallel.devices" | STAGES | TENSOR_RANKS);
        let value = spec.resolved.config.value(name);
        if is_of_placement(name)
            && !is_flag
            && value != default.value(name)
            && let Some(value) = value
        {
            let written = match value {
                // Without quotes, which not every shell leaves within a word.
                Value::Text(word) if shell_word(&word) == word => word,
                other => other.to_string(),
            };
            settings.push((name, written));
        }
    }
    settings
}

/// Returns the section `[parallel]` that was requested when a placement was decided: the inverse of
/// the options of a section. `overlap` is the run's.
pub fn section_asked(placement: &Placement, overlap: bool) -> Parallel {
    let ParallelOptions { shares, topology, reduce_site, chunk_bytes, pipeline, tensor, .. } =
        &placement.options;
    let (balance, shares) = match shares {
        Shares::Measured => (Balance::Measured, Vec::new()),
        Shares::Even => (Balance::Fixed, Vec::new()),
        Shares::Fixed(given) => (Balance::Fixed, given.iter().map(|share| *share as u64).collect()),
    };
    Parallel {
        devices: placement.devices_asked.clone(),
        balance,
        shares,
        share_changes: placement.options.share_changes.iter().map(ToString::to_string).collect(),
        pipeline_stages: pipeline.stages as usize,
        schedule: pipeline.schedule,
        virtual_stages: pipeline.virtual_stages as usize,
        blocks_per_stage: pipeline.blocks_per_stage.iter().map(|n| u64::from(*n)).collect(),
        tensor_ranks: tensor.ranks as usize,
        tensor_shares: tensor.shares.iter().map(|share| u64::from(*share)).collect(),
        collective: *topology,
        overlap,
        reduce_site: *reduce_site,
        message_kib: chunk_bytes >> 10,
    }
}

/// Returns the section `[parallel]` of a run that continues without its other nodes on this number
/// of its own devices: without shares and cuts that were for other devices, and without pipelines
/// that do not fit.
pub fn section_on(placement: &Placement, overlap: bool, devices: usize) -> Parallel {
    let asked = section_asked(placement, overlap);
    if devices == placement.candidates.len() {
        return asked;
    }
    let mut own = Parallel {
        share_changes: Vec::new(),
        blocks_per_stage: Vec::new(),
        tensor_shares: Vec::new(),
        ..asked
    };
    if !own.shares.is_empty() {
        own.shares.clear();
        own.balance = Balance::Measured;
    }
    if !devices.is_multiple_of(own.tensor_ranks) {
        own.tensor_ranks = 1;
    }
    if !devices.is_multiple_of(own.pipeline_stages * own.tensor_ranks) {
        let default = Parallel::default();
        own.pipeline_stages = default.pipeline_stages;
        own.schedule = default.schedule;
        own.virtual_stages = default.virtual_stages;
    }
    own
}

fn decay(schedule: &ScheduleSection) -> Decay {
    let gamma = schedule.gamma;
    match schedule.kind {
        DecayKind::Constant => Decay::Constant,
        DecayKind::Cosine => Decay::Cosine,
        DecayKind::Linear => Decay::Linear,
        DecayKind::Wsd => Decay::Wsd,
        DecayKind::Step => Decay::Step { step_size: schedule.step_size, gamma },
        DecayKind::Exponential => Decay::Exponential { gamma },
        DecayKind::OneCycle => Decay::OneCycle(OneCycle {
            pct_start: schedule.pct_start,
            div_factor: schedule.div_factor,
            final_div_factor: schedule.final_div_factor,
        }),
    }
}

fn schedule(config: &RunConfig) -> Schedule {
    let schedule = &config.schedule;
    Schedule {
        decay: decay(schedule),
        lr: config.optim.lr,
        min_lr: schedule.min_lr,
        warmup: schedule.warmup,
        decay_steps: schedule.decay_steps,
        cooldown_steps: schedule.cooldown_steps,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::read::read;
    use crate::loader;
    use crate::runtime::error::EXIT_CONFIGURATION;
    use potluck_graph::{Plan, PlanOptions};
    use potluck_parallel::ReduceSite;
    use potluck_parallel::collective::Topology;

    fn plan(config: &RunConfig) -> Plan {
        let spec = RunSpec::new(config);
        let training = spec.training_graph(&DataShape::Tokens { vocabulary: 65 }).unwrap();
        Plan::new(training.whole().clone(), PlanOptions::new(spec.micro_batch as usize))
    }

    #[test]
    fn divisions_are_excluded_by_a_single_part_until_the_placement_is_another() {
        let excluded = |resolved: &Resolved| {
            let ExcludedDivisions { pipelines, tensor_groups } =
                RunSpec::resolved(resolved).parallel.excluded;
            (pipelines, tensor_groups)
        };
        let set = |text: &str| Override::set(text).unwrap();
        let start = |sets: &[&str]| {
            let sets: Vec<Override> = sets.iter().map(|text| set(text)).collect();
            read(None, None, &sets).unwrap()
        };
        assert_eq!(excluded(&start(&[])), (false, false));
        assert_eq!(excluded(&start(&["pipeline_stages=2", "tensor_ranks=1"])), (false, true));
        let one = start(&["pipeline_stages=1", "parallel.devices=cpu*2"]);
        assert_eq!(excluded(&one), (true, false));
        let spec = RunSpec::resolved(&one);
        let mut saved = Resolved::saved(&one.config.to_saved_toml(), &spec.saved_keys()).unwrap();
        saved.config.parallel = one.config.parallel.clone();
        let resumed = |sets: &[Override]| excluded(&read(Some(&saved), None, sets).unwrap());
        assert_eq!(resumed(&[]), (true, false));
        assert_eq!(resumed(&[set("train.steps=9")]), (true, false));
        assert_eq!(resumed(&[set("parallel.devices=cpu*3")]), (false, false));

        // A pipeline of a run that lost devices is one of one stage, which excludes none.
        let two = RunSpec::resolved(&start(&["pipeline_stages=2", "parallel.devices=cpu*2"]));
        let left = two.left_on("cpu".into());
        assert_eq!(left.stages, Some(1));
        assert_eq!(two.on_devices(&left).unwrap().parallel.excluded, ExcludedDivisions::default());
    }

    #[test]
    fn defaults_of_the_library_are_those_of_the_configuration() {
        let spec = RunSpec::new(&RunConfig::default());
        assert_eq!(spec.opening, OpenOptions::default());
        assert_eq!(spec.parallel, ParallelOptions::default());
    }

    #[test]
    fn runs_over_nodes_have_checkpoints_by_time_unless_the_user_says_otherwise() {
        let interval = |text: &str, nodes: usize| {
            let file = Some((Path::new("run.toml"), text));
            RunSpec::resolved(&read(None, file, &[]).unwrap()).save_interval(nodes)
        };
        assert_eq!(interval("", 1), None);
        assert_eq!(interval("", 2), Some(Duration::from_secs(120)));
        let half = "train.checkpoint_minutes = 0.5";
        assert_eq!(interval(half, 1), Some(Duration::from_secs(30)));
        assert_eq!(interval(half, 2), Some(Duration::from_secs(30)));
        assert_eq!(interval("train.checkpoint_minutes = 0.0", 2), None);
    }

    #[test]
    fn a_trainer_shares_its_work_as_the_run_does() {
        let mut spec = RunSpec::new(&RunConfig::default());
        for shares in [Shares::Measured, Shares::Even, Shares::Fixed(vec![3, 1])] {
            for stages in [1, 2] {
                spec.parallel.shares = shares.clone();
                spec.parallel.chunk_bytes = 7 << 10;
                spec.parallel.pipeline.stages = stages;
                assert_eq!(spec.trainer_options().parallel(), spec.parallel);
            }
        }
    }

    #[test]
    fn a_pipeline_is_that_of_the_configuration() {
        use potluck_parallel::PipelineSchedule::Interleaved;
        let mut config = RunConfig::default();
        let parallel = &mut config.parallel;
        (parallel.pipeline_stages, parallel.schedule, parallel.virtual_stages) =
            (2, Interleaved, 3);
        parallel.blocks_per_stage = vec![1, 2, 3, 4, 5, 6];
        let expected = PipelineOptions {
            stages: 2,
            schedule: Interleaved,
            virtual_stages: 3,
            blocks_per_stage: vec![1, 2, 3, 4, 5, 6],
        };
        assert_eq!(RunSpec::new(&config).parallel.pipeline, expected);
    }

    #[test]
    fn a_placement_gives_the_section_back_that_was_asked_for() {
        use potluck_parallel::PipelineSchedule::Interleaved;
        let section = Parallel {
            devices: "cpu*4".into(),
            balance: Balance::Fixed,
            shares: vec![5, 7],
            share_changes: vec!["9: 6 6".into(), "34: 7 5".into()],
            pipeline_stages: 2,
            schedule: Interleaved,
            virtual_stages: 2,
            blocks_per_stage: vec![1, 2, 2, 1],
            tensor_ranks: 2,
            tensor_shares: vec![3, 1],
            collective: Topology::Star,
            overlap: false,
            reduce_site: Some(ReduceSite::Host),
            message_kib: 4,
        };
        for section in [section, Parallel::default()] {
            let placement = Placement {
                devices_asked: section.devices.clone(),
                options: parallel_options(&section),
                ..Placement::default()
            };
            let json = serde_json::to_string(&placement).unwrap();
            let placement: Placement = serde_json::from_str(&json).unwrap();
            assert_eq!(section_asked(&placement, section.overlap), section);
        }
    }

    #[test]
    fn the_command_for_other_devices_keeps_the_choices_that_do_not_depend_on_them() {
        let mut config = RunConfig::default();
        config.parallel.balance = Balance::Fixed;
        config.parallel.shares = vec![3, 1];
        config.parallel.reduce_site = Some(ReduceSite::Host);
        config.parallel.blocks_per_stage = vec![1, 3];
        config.parallel.pipeline_stages = 2;
        let settings = vec![
            ("train.steps", "9".to_string()),
            ("parallel.shares", "[3, 1]".to_string()),
            ("parallel.blocks_per_stage", "[1, 3]".to_string()),
        ];
        let run = ResumeCommand { settings, ..ResumeCommand::of_run(Path::new("run")) };
        let left = |stages| LeftDevices {
            devices: "cpu*3".into(),
            stages: Some(stages),
            tensor: None,
            spare: 0,
            are_as_typed: false,
        };
        let command = RunSpec::new(&config).resume_on(left(3), run.clone());
        let expected = "potluck train --resume run --devices 'cpu*3' --pipeline 3 --set \
                        train.steps=9 --set parallel.reduce_site=host --set \
                        train.micro_batch_size=12";
        assert_eq!(command.to_string(), expected);
        config.parallel.shares.clear();
        let command = RunSpec::new(&config).resume_on(left(1), run);
        let expected = "potluck train --resume run --devices 'cpu*3' --set \
                        train.steps=9 --set parallel.balance=fixed --set \
                        parallel.reduce_site=host";
        assert_eq!(command.to_string(), expected);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_model_that_no_host_holds_is_refused_before_it_is_allocated() {
        let mut config = RunConfig::default();
        config.set("model.width", 65_536.into());
        config.set("model.layers", 1024.into());
        config.check().unwrap();
        let started = std::time::Instant::now();
        let spec = RunSpec::new(&config);
        let Err(error) = spec.training_graph(&DataShape::Tokens { vocabulary: 65 }) else {
            panic!("no host has this")
        };
        assert!(started.elapsed() < Duration::from_secs(1), "nothing is built");
        let text = error.to_string();
        assert!(text.contains("GiB") && text.contains("model.width"), "{text}");
        assert_eq!(error.exit_code(), EXIT_CONFIGURATION);
    }

    #[test]
    fn the_largest_run_that_can_be_configured_is_counted_without_wrapping() {
        let plan = plan(&RunConfig::default());
        let all = memory::run_bytes(&plan, 1 << 20, 1, loader::bytes(1 << 20, 2 * 65_536 * 4));
        assert!(all > (1 << 36) && all < usize::MAX, "{all}");
    }
}

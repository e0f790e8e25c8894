//! Options of a [`Trainer`](super::Trainer).

use std::path::PathBuf;
use std::time::Duration;

use crate::error::TrainError;
use crate::left_devices::LeftDevices;
use crate::runtime::open::OpenOptions;
use crate::runtime::placement::types::PlacementRequest;
use crate::runtime::remote::NO_NODES;
use potluck_core::faults::Faults;
use potluck_graph::optim::{Optimizer, ParameterGroup, assign_groups};
use potluck_graph::{ActivationFormat, Graph, ModelGraph, MomentFormat, Precision, Recompute};
use potluck_kernels::autotune::TuneOptions;
use potluck_parallel::collective::Topology;
use potluck_parallel::planner::plans::Plans;
use potluck_parallel::{
    DeviceLoss, ExcludedDivisions, MismatchAction, ParallelOptions, PipelineOptions, ReduceSite,
    ShareChange, Shares, TENSOR_SHARE_MAX, TensorOptions,
};

/// Options of a [`Trainer`](super::Trainer).
#[derive(Clone, Debug)]
pub struct TrainerOptions {
    /// Device selector, as for `potluck train --devices`.
    pub devices: String,
    /// Samples of each device per step.
    pub shares: Shares,
    /// True if measured shares follow the speed of the devices in
    /// [`Trainer::fit`](super::Trainer::fit), as in a run of the program. When they change depends
    /// on timings, and with it the last bits of results;
    /// [`Placement::share_history`](potluck_parallel::Placement::share_history) has the changes.
    pub follows_speed: bool,
    /// Later shares of devices with the whole model, in the order of their steps. With them and the
    /// first ones as [`Shares::Fixed`], a trainer repeats the changes of measured shares
    /// ([`Placement::share_history`](potluck_parallel::Placement::share_history)).
    pub share_changes: Vec<ShareChange>,
    /// Pipelines: the stages of each (1: none), their schedule, and the blocks of each model chunk
    /// (empty: nearly equal numbers of blocks).
    pub pipeline: PipelineOptions,
    /// Tensor groups: the ranks of each (1: none), and their shares (empty: equal ones).
    pub tensor: TensorOptions,
    /// Divisions of the model that are not added where devices are measured.
    pub excluded: ExcludedDivisions,
    pub optimizer: Optimizer,
    /// Decay of an exponential average of the trained parameters, used instead of them in
    /// evaluations and predictions; 0: none. At least 0, and below 1. The average is a copy of the
    /// parameters after the first update, and moves by `1 - ema` of the distance to them in each
    /// later one, as PyTorch's `AveragedModel` with `get_ema_multi_avg_fn(ema)`. It needs 4 bytes
    /// per parameter, divided among the devices. Running averages of batch normalization stay as in
    /// training.
    pub ema: f64,
    /// Groups of parameters with other rates, or frozen; the first matching group applies.
    pub groups: Vec<ParameterGroup>,
    /// Samples per step, over all devices.
    pub batch: usize,
    /// Maximum number of samples in a micro-batch of a device.
    pub micro_batch_size: usize,
    /// True for smaller micro-batches on devices with too little memory: the largest power of two
    /// or divisor of the device's samples that fits nine tenths of its memory. False to refuse such
    /// a device.
    pub fits_micro_batch: bool,
    /// Gradient norm above which gradients are scaled down to it; 0: off. Finite, not negative.
    pub clip: f64,
    /// Seed of initial values, dropout, and the order of a data set's samples.
    pub seed: u64,
    /// True to fuse neighbouring operations into one kernel.
    pub fuse: bool,
    /// Parts of the forward pass that are computed again for the backward pass, with less memory
    /// and the same bits; with activations in bf16, of rounded values.
    pub recompute: Recompute,
    /// Number format of activations between blocks and of those kept for the backward pass: bf16
    /// needs half of the memory of f32, and of what stages and tensor groups send each other. The
    /// block with the loss keeps f32, which is all of a graph without blocks.
    pub activations: ActivationFormat,
    /// Number format of the optimizer's moments: bf16 needs half of the memory of f32, and rounds
    /// at random.
    pub moments: MomentFormat,
    /// Arithmetic of matrix products.
    pub precision: Precision,
    /// Time budget in seconds for autotuning kernels without cached timings on this machine; 0:
    /// only cached timings are used. The selected kernels can change the last bits of results.
    pub tune_s: f64,
    /// True to measure shares and kernels again, ignoring the records of a save and the cache; with
    /// a `tune_s` of 0, the cached timings of kernels are kept.
    pub retune: bool,
    /// Longest time without a sign of life of a device before it counts as hung.
    pub device_timeout: Duration,
    /// Memory of each device in MiB; 0: the reported amount.
    pub device_memory_mib: u64,
    /// Longest duration of a submission to a device in milliseconds, after which it can draw the
    /// screen; 0: 200, or 20 if it may have a screen.
    pub submission_ms: u64,
    /// Route of the gradients between devices.
    pub topology: Topology,
    /// True to reduce gradients while the backward pass still runs.
    pub overlap: bool,
    /// Site at which gradients of several devices are added; `None`: the faster one of each.
    pub reduce_site: Option<ReduceSite>,
    /// File of a trace of all threads and devices, for Chrome and Perfetto, if one is requested.
    pub trace: Option<PathBuf>,
    /// Steps between comparisons of the parameters of all devices; 0: only before a save.
    pub hash_every: u64,
    /// Answer to parameters that differ between devices.
    pub on_mismatch: MismatchAction,
    /// Answer of [`Trainer::fit`](super::Trainer::fit) to the loss of one of several devices.
    pub on_loss: DeviceLoss,
    /// Steps between copies of the state to host memory for
    /// [`Trainer::recover`](super::Trainer::recover); 0: none. A copy needs the memory of the
    /// parameters and the moments. A trainer on a single device makes none, because no other device
    /// would remain after its loss.
    pub snapshot_every: u64,
    /// Faults to inject, for tests.
    #[doc(hidden)]
    pub faults: Faults,
    /// Maximum bytes of a message between devices.
    #[doc(hidden)]
    pub message_bytes: usize,
    /// True to measure also the shares and the cuts of pipelines if they are not given, as in a run
    /// of the program.
    #[doc(hidden)]
    pub measures_pipelines: bool,
}

impl TrainerOptions {
    /// Returns options with whole batches, measured shares, no clipping, seed 0, fusion, no
    /// recomputation, up to 5 seconds of autotuning, a timeout of 300 seconds for devices, and
    /// errors for devices that fail or differ.
    pub fn new(devices: &str, optimizer: Optimizer, batch: usize) -> Self {
        let opening = OpenOptions::default();
        let parallel = ParallelOptions::default();
        Self {
            devices: devices.to_string(),
            shares: Shares::default(),
            follows_speed: false,
            share_changes: Vec::new(),
            pipeline: PipelineOptions::default(),
            tensor: TensorOptions::default(),
            excluded: ExcludedDivisions::default(),
            optimizer,
            ema: 0.0,
            groups: Vec::new(),
            batch,
            micro_batch_size: batch,
            fits_micro_batch: true,
            clip: 0.0,
            seed: 0,
            fuse: true,
            recompute: Recompute::default(),
            activations: ActivationFormat::default(),
            moments: MomentFormat::default(),
            precision: Precision::default(),
            tune_s: opening.tune_s,
            retune: false,
            device_timeout: opening.deadline,
            device_memory_mib: opening.device_memory_mib,
            submission_ms: opening.submission_ms,
            topology: parallel.topology,
            overlap: parallel.overlap,
            reduce_site: parallel.reduce_site,
            trace: None,
            hash_every: 0,
            on_mismatch: MismatchAction::default(),
            on_loss: DeviceLoss::default(),
            snapshot_every: 0,
            faults: Faults::none(),
            message_bytes: parallel.chunk_bytes,
            measures_pipelines: false,
        }
    }

    /// Checks that a forward graph can be trained with these options.
    pub(super) fn check(&self, forward: &Graph) -> Result<(), TrainError> {
        if forward.loss.is_none() {
            return refused("the graph has no loss; end it with one of the builder's losses");
        }
        for samples in [self.batch, self.micro_batch_size] {
            if samples == 0 || u32::try_from(samples).is_err() {
                return refused("batch and micro_batch_size must be at least 1, and below 2^32");
            }
        }
        if matches!(&self.shares, Shares::Fixed(shares) if shares.contains(&0)) {
            return refused("shares must each be at least 1: name only the devices that take part");
        }
        self.check_share_changes()?;
        let TensorOptions { ranks, shares } = &self.tensor;
        let has_all = shares.is_empty() || shares.len() == *ranks as usize;
        let sizes = 1..=TENSOR_SHARE_MAX;
        if *ranks == 0 || !has_all || !shares.iter().all(|share| sizes.contains(share)) {
            let why = format!(
                "a tensor group has at least one rank, and none of them or all have a share, from \
                 1 to {TENSOR_SHARE_MAX}"
            );
            return refused(&why);
        }
        if !(self.clip.is_finite() && self.clip >= 0.0) {
            let why = format!("clip must be 0 (off) or a positive number, and is {}", self.clip);
            return refused(&why);
        }
        if let Some(why) = self.optimizer.flaw() {
            return refused(&why);
        }
        if !(0.0..1.0).contains(&self.ema) {
            let why = format!("ema must be at least 0 (off) and below 1, and is {}", self.ema);
            return refused(&why);
        }
        if self.device_timeout.is_zero() {
            return refused("device_timeout must be longer than 0");
        }
        if !(self.tune_s.is_finite() && self.tune_s >= 0.0) {
            return refused("tune_s must be a number of seconds, and not negative");
        }
        Ok(())
    }

    fn check_share_changes(&self) -> Result<(), TrainError> {
        let Some(first) = self.share_changes.first() else { return Ok(()) };
        let batch = self.batch as u64;
        let are_right = self.share_changes.iter().all(|change| {
            let sum: u64 = change.shares.iter().map(|share| u64::from(*share)).sum();
            sum == batch && !change.shares.contains(&0)
        });
        let are_in_order = self.share_changes.is_sorted_by(|one, next| one.step < next.step);
        let is_divided = self.pipeline.has_stages() || self.tensor.has_groups();
        if self.shares.are_measured() || is_divided {
            return refused("share_changes need shares that are not measured, of whole models");
        }
        if !are_right || !are_in_order || first.step < 2 {
            return refused(
                "share_changes must be in the order of their steps, from 2 on, and have shares of \
                 at least 1 each with the sum of the batch",
            );
        }
        Ok(())
    }

    pub(crate) fn training_graph(&self, forward: Graph) -> Result<ModelGraph, TrainError> {
        let forward = assign_groups(forward, &self.groups)?;
        let training = ModelGraph::training(forward, self.fuse)?;
        let training = training.with_recompute(self.recompute).with_activations(self.activations);
        let training = training.with_moments(self.moments);
        let training = training.with_averages(self.ema > 0.0).with_precision(self.precision);
        // The stages of a pipeline send the gradients of their inputs before pass W.
        Ok(if self.pipeline.has_stages() { training } else { training.with_merged_backward() })
    }

    fn is_measured(&self) -> bool {
        let is_divided = self.pipeline.has_stages() || self.tensor.has_groups();
        self.shares.are_measured() && (!is_divided || self.measures_pipelines)
    }

    /// Returns true if devices are timed for shares or cuts that are not given.
    pub(super) fn times_devices(&self) -> bool {
        self.is_measured() || self.measures_pipelines
    }

    /// Returns the options of parallel work.
    #[doc(hidden)]
    pub fn parallel(&self) -> ParallelOptions {
        let shares = match &self.shares {
            Shares::Measured if !self.is_measured() => Shares::Even,
            Shares::Fixed(given) if given.is_empty() => Shares::Even,
            asked => asked.clone(),
        };
        ParallelOptions {
            shares,
            share_changes: self.share_changes.clone(),
            topology: self.topology,
            overlap: self.overlap,
            reduce_site: self.reduce_site,
            chunk_bytes: self.message_bytes,
            pipeline: self.pipeline.clone(),
            tensor: self.tensor.clone(),
            excluded: self.excluded,
        }
    }

    /// Returns the request for the devices of a new trainer, without inputs for their timing;
    /// `parallel` is from [`TrainerOptions::parallel`].
    #[doc(hidden)]
    pub fn placement_request<'a>(
        &'a self,
        parallel: &'a ParallelOptions,
        plans: &'a Plans,
        tuning: &'a TuneOptions,
    ) -> PlacementRequest<'a> {
        PlacementRequest {
            nodes: &NO_NODES,
            selector: &self.devices,
            parallel,
            batch: self.batch as u32,
            micro_batch: self.micro_batch_size as u32,
            fits_micro_batch: self.fits_micro_batch,
            optimizer: &self.optimizer,
            plans,
            steps: None,
            probe: None,
            seed: self.seed,
            opening: OpenOptions {
                deadline: self.device_timeout,
                device_memory_mib: self.device_memory_mib,
                submission_ms: self.submission_ms,
                tune_s: self.tune_s,
            },
            tuning,
            saved: None,
            retune: self.retune,
            notify: &|_| {},
            trace: self.trace.clone(),
            faults: self.faults.clone(),
        }
    }

    /// Returns the devices without the one at a position, and their pipelines; `None` if there is
    /// no other device.
    pub(super) fn left_without(&self, position: usize) -> Option<LeftDevices> {
        LeftDevices::without(&self.devices, position, &self.pipeline, &self.tensor)
    }

    /// Returns the options for the remaining devices after one has failed: given shares and blocks
    /// no longer apply.
    pub(super) fn on(&self, left: &LeftDevices) -> Self {
        let mut options = Self { devices: left.devices.clone(), ..self.clone() };
        options.share_changes.clear();
        if let Shares::Fixed(_) = options.shares {
            options.shares = Shares::Measured;
        }
        if let Some(stages) = left.stages {
            options.pipeline =
                PipelineOptions { blocks_per_stage: Vec::new(), ..self.pipeline.clone() };
            options.pipeline.stages = stages as u32;
        }
        if let Some(ranks) = left.tensor {
            options.tensor = TensorOptions { ranks: ranks as u32, shares: Vec::new() };
        }
        if !options.pipeline.has_stages() {
            options.pipeline = PipelineOptions::default();
        }
        options
    }
}

/// Refuses a request.
pub(super) fn refused(why: &str) -> Result<(), TrainError> {
    Err(TrainError::InvalidRequest(why.into()))
}

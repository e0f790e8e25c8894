//! Schema of a run's configuration: checked, resolved, printable as TOML and readable again. `read`
//! builds a [`RunConfig`] from file and flags. A key is one entry of its section, here or in a
//! family of models in `families`.

use std::collections::BTreeSet;
use std::ops::Bound::{Excluded, Included};
use std::path::{Path, PathBuf};

use crate::families::{KIND, ModelSection, OF_SAMPLES, OF_TOKENS, keys_of_all};
use crate::keys::{
    ConfigEnum, ConfigValue, Constraint, ConstraintError, FRACTION, Key, Section, Value,
    config_enum, refused, section,
};
use potluck_data::{HELD_OUT_MAX, SampleFormat, TargetKind, TokenizerKind, formats, tokens};
use potluck_graph::optim::{ParameterGroup, ParameterGroupError};
use potluck_graph::{ActivationFormat, MomentFormat, Precision, Recompute};
use potluck_parallel::collective::Topology;
use potluck_parallel::{
    DeviceLoss, MismatchAction, PipelineSchedule, ReduceSite, ShareChange, ShareChangeError,
};

/// Source of the samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataKind {
    /// A text file, `data.path`.
    Text,
    /// The built-in corpus, which is generated.
    Builtin,
    /// A file of token ids.
    Tokens,
    /// Images and labels in the format of MNIST.
    Idx,
    /// CIFAR-10 in its binary version.
    Cifar10,
    /// A table.
    Csv,
    /// NumPy arrays.
    Npy,
    /// Directories of pictures, one per class.
    Images,
}

impl DataKind {
    /// Format of the samples; `None` for texts and tokens.
    pub(crate) fn sample_format(self) -> Option<SampleFormat> {
        match self {
            Self::Text | Self::Builtin | Self::Tokens => None,
            Self::Idx => Some(SampleFormat::Idx),
            Self::Cifar10 => Some(SampleFormat::Cifar10),
            Self::Csv => Some(SampleFormat::Csv),
            Self::Npy => Some(SampleFormat::Npy),
            Self::Images => Some(SampleFormat::Pictures),
        }
    }

    /// Returns the kind of the data at a path: text, unless the path looks like another kind.
    pub fn of(path: &Path) -> Self {
        if tokens::is_described(path) {
            return Self::Tokens;
        }
        match formats::detect(path) {
            Some(SampleFormat::Idx) => Self::Idx,
            Some(SampleFormat::Cifar10) => Self::Cifar10,
            Some(SampleFormat::Csv) => Self::Csv,
            Some(SampleFormat::Npy) => Self::Npy,
            Some(SampleFormat::Pictures) => Self::Images,
            None if tokens::is_token_file(path) => Self::Tokens,
            None => Self::Text,
        }
    }
}

/// Loss of a model of samples, named as in PyTorch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LossKind {
    /// Cross-entropy for classes, mean squared error for values.
    Auto,
    /// Cross-entropy of classes.
    CrossEntropy,
    /// Mean squared error of values.
    Mse,
    /// Mean absolute error of values.
    L1,
    /// Squared error of small differences, absolute error of large ones.
    Huber,
}

/// Update rule of the optimizer; its hyperparameters are keys of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OptimKind {
    /// Adam with decoupled weight decay.
    AdamW,
    /// Stochastic gradient descent with momentum.
    Sgd,
    /// Adam with weight decay in the gradient.
    Adam,
    RmsProp,
    Lion,
}

/// Decay of the learning rate; its numbers are keys of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecayKind {
    Constant,
    Cosine,
    Linear,
    Wsd,
    Step,
    Exponential,
    OneCycle,
}

/// Split of the global batch over the devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Balance {
    /// By the measured throughput of each device.
    Measured,
    /// By `parallel.shares`, or evenly if that is empty.
    Fixed,
}

/// Tokenizer of a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenizerSource {
    /// Derived from the text.
    Kind(TokenizerKind),
    /// Described by a `tokenizer.json`.
    File(PathBuf),
}

impl ConfigValue for TokenizerSource {
    fn value(&self) -> Option<Value> {
        Some(Value::Text(match self {
            Self::Kind(kind) => kind.to_string(),
            // A configuration contains only Unicode, and so does a value read from one.
            Self::File(path) => path.to_string_lossy().into_owned(),
        }))
    }

    fn replace(&mut self, value: Value) {
        let Value::Text(text) = value else { panic!("{value} was not admitted for this key") };
        let named = [TokenizerKind::Char, TokenizerKind::Byte].into_iter();
        let kind = named.clone().find(|kind| kind.to_string() == text);
        *self = kind.map_or_else(|| Self::File(text.into()), Self::Kind);
    }
}

/// Value of `train.micro_batch_size` for the largest that fits the memory of each device.
const AUTO: &str = "auto";

/// Largest number of samples that a device runs in one pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MicroBatchSize {
    /// As many samples as fit a device's memory.
    Auto,
    Samples(usize),
}

impl MicroBatchSize {
    /// Returns the largest number of samples in a pass, for this batch size.
    pub fn of_batch(self, batch: usize) -> usize {
        match self {
            Self::Auto => batch,
            Self::Samples(samples) => samples,
        }
    }
}

impl ConfigValue for MicroBatchSize {
    fn value(&self) -> Option<Value> {
        Some(match self {
            Self::Auto => Value::Text(AUTO.into()),
            Self::Samples(samples) => Value::from(*samples),
        })
    }

    fn replace(&mut self, value: Value) {
        *self = match value {
            Value::Text(_) => Self::Auto,
            Value::Whole(samples) => Self::Samples(samples as usize),
            other => panic!("{other} was not admitted for this key"),
        };
    }
}

config_enum! {
    DataKind {
        DataKind::Text => "text",
        DataKind::Builtin => "builtin",
        DataKind::Tokens => "tokens",
        DataKind::Idx => "idx",
        DataKind::Cifar10 => "cifar10",
        DataKind::Csv => "csv",
        DataKind::Npy => "npy",
        DataKind::Images => "images",
    }
    // `None`: follows the targets.
    Option<TargetKind> {
        None => "auto",
        Some(TargetKind::Classes) => "classification",
        Some(TargetKind::Values) => "regression",
    }
    LossKind {
        LossKind::Auto => "auto",
        LossKind::CrossEntropy => "cross_entropy",
        LossKind::Mse => "mse",
        LossKind::L1 => "l1",
        LossKind::Huber => "huber",
    }
    OptimKind { OptimKind::AdamW => "adamw", OptimKind::Sgd => "sgd", OptimKind::Adam => "adam",
        OptimKind::RmsProp => "rmsprop", OptimKind::Lion => "lion", }
    ActivationFormat { ActivationFormat::F32 => ActivationFormat::F32.name(),
        ActivationFormat::Bf16 => ActivationFormat::Bf16.name(), }
    MomentFormat { MomentFormat::F32 => "f32", MomentFormat::Bf16 => "bf16", }
    Precision { Precision::F32 => Precision::F32.name(),
        Precision::Mixed => Precision::Mixed.name(), }
    DecayKind {
        DecayKind::Constant => "constant",
        DecayKind::Cosine => "cosine",
        DecayKind::Linear => "linear",
        DecayKind::Wsd => "wsd",
        DecayKind::Step => "step",
        DecayKind::Exponential => "exponential",
        DecayKind::OneCycle => "one-cycle",
    }
    Balance { Balance::Measured => "measured", Balance::Fixed => "fixed", }
    Topology { Topology::Ring => Topology::Ring.name(), Topology::Star => Topology::Star.name(), }
    // `None`: the faster site, by measurement.
    Option<ReduceSite> {
        None => "measured",
        Some(ReduceSite::Host) => ReduceSite::Host.name(),
        Some(ReduceSite::Device) => ReduceSite::Device.name(),
    }
    PipelineSchedule {
        PipelineSchedule::OneFOneB => PipelineSchedule::OneFOneB.name(),
        PipelineSchedule::GPipe => PipelineSchedule::GPipe.name(),
        PipelineSchedule::Interleaved => PipelineSchedule::Interleaved.name(),
        PipelineSchedule::ZeroBubble => PipelineSchedule::ZeroBubble.name(),
    }
    MismatchAction {
        MismatchAction::Stop => "stop",
        MismatchAction::Repair => "repair",
    }
    Recompute {
        Recompute::None => Recompute::None.name(),
        Recompute::Blocks => Recompute::Blocks.name(),
        Recompute::Selective => Recompute::Selective.name(),
    }
    DeviceLoss { DeviceLoss::Stop => "stop", DeviceLoss::Continue => "continue", }
}

/// Default limit of the samples, and of the tokens, of an evaluation.
const EVAL_SAMPLES: u64 = 1024;
const EVAL_TOKENS: u64 = 65_536;
/// Largest number of steps: a billion steps take years on any device.
const STEPS: i64 = 1_000_000_000;
const BATCH_MAX: i64 = 1 << 20;
/// Largest number of blocks in a model chunk: far above real models, and small enough that sums do
/// not overflow.
const BLOCKS_MAX: u64 = 65_536;
/// Largest accepted learning rate: useful ones are far smaller, so a larger one is a typing error.
const LR_MAX: f64 = 1000.0;

/// Keys on whose values the effect of other keys depends, and such values.
const MODEL_KIND: &str = KIND.full_name;
const DATA_KIND: &str = "data.kind";
const TRAIN_LOSS: &str = "train.loss";
const HUBER: &[&str] = &["huber"];
const TEXTS: &[&str] = &["text", "builtin", "tokens"];
const SAMPLES: &[&str] = &["idx", "cifar10", "csv", "npy", "images"];
const PICTURES: &[&str] = &["idx", "cifar10", "npy", "images"];
const OPTIM_KIND: &str = "optim.kind";
const ADAM_OR_LION: &[&str] = &["adamw", "adam", "lion"];
const SCHEDULE_KIND: &str = "schedule.kind";

/// Generates the sections other than `[model]`, and [`RunConfig`], which has all sections.
macro_rules! sections {
    ($(
        $(#[doc = $section_doc:literal])*
        $section:ident: $Section:ident { $($keys:tt)* }
    )*) => {
        $(section! {
            $(#[doc = $section_doc])*
            $section: $Section { $($keys)* }
        })*

        /// Complete configuration of a run. Equal configurations on the same devices give the
        /// same bits.
        #[derive(Clone, Debug, Default, PartialEq)]
        pub struct RunConfig {
            /// Architecture of the model.
            pub model: ModelSection,
            $($(#[doc = $section_doc])* pub $section: $Section,)*
        }

        /// Sections, each with a sentence of help, in printing order.
        pub const SECTIONS: &[(&str, &str)] = &[
            ("model", "Architecture of the model."),
            $((stringify!($section), concat!($($section_doc),*)),)*
        ];

        /// Keys of the sections other than `[model]`, in printing order.
        pub(super) const FIXED_KEYS: &[&[Key]] = &[$($Section::KEYS,)*];

        impl RunConfig {
            fn section(&self, name: &str) -> Option<&dyn Section> {
                match name {
                    "model" => Some(&self.model),
                    $(stringify!($section) => Some(&self.$section),)*
                    _ => None,
                }
            }

            fn section_mut(&mut self, name: &str) -> Option<&mut dyn Section> {
                match name {
                    "model" => Some(&mut self.model),
                    $(stringify!($section) => Some(&mut self.$section),)*
                    _ => None,
                }
            }
        }
    };
}

sections! {
    /// Data for training and validation.
    data: Data {
        /// Source of the samples; with a data.path as what is there, unless set.
        kind: DataKind = DataKind::Builtin, Constraint::OneOf(DataKind::WORDS);
        /// Path of the file or directory; runs save it as an absolute path.
        path: Option<PathBuf> = None, Constraint::Text;
        /// Path of held-out samples of their own, in the same format.
        val_path: Option<PathBuf> = None, Constraint::Text, if DATA_KIND = SAMPLES;
        /// Unit of tokenization, char or byte, or the path of a tokenizer.json.
        tokenizer: TokenizerSource = TokenizerSource::Kind(TokenizerKind::Char), Constraint::Text,
            if DATA_KIND = TEXTS;
        /// Share for the validation split; 0 = none. Of a text the end, of samples any.
        held_out: f64 = 0.1, Constraint::Real(Included(0.0), Included(HELD_OUT_MAX));
        /// Column of a table that is the target, or several, separated by commas.
        target: Option<String> = None, Constraint::Text, "the last column",
            if DATA_KIND = &["csv"];
        /// Classes or values as targets, where targets can be either.
        task: Option<TargetKind> = None, Constraint::OneOf(<Option<TargetKind>>::WORDS),
            if DATA_KIND = &["csv", "npy"];
        /// Normalization of features and target values to mean 0 and standard deviation 1.
        normalize: bool = true, Constraint::Flag, if DATA_KIND = SAMPLES;
        /// Height and width to which pictures are resized.
        image_size: Vec<u64> = Vec::new(), Constraint::IntList, "as they are",
            if DATA_KIND = &["images"];
        /// Augmentation: pixels of padding around pictures for a random crop; 0 = none.
        crop: usize = 0, Constraint::Whole(0, 1024), if DATA_KIND = PICTURES;
        /// Augmentation: half of the pictures are mirrored left to right.
        flip: bool = false, Constraint::Flag, if DATA_KIND = PICTURES;
    }
    /// The training run.
    train: Train {
        /// Samples per step.
        batch: usize = 12, Constraint::Whole(1, BATCH_MAX), "12, or as model.kind has it";
        /// Micro-batch size: the most samples that a device runs in one pass.
        micro_batch_size: MicroBatchSize = MicroBatchSize::Auto,
            Constraint::WholeOr(1, BATCH_MAX, AUTO), "\"auto\", what fits; 1/4K of it in K stages";
        /// Operator fusion: neighbouring operations become one kernel.
        fuse: bool = true, Constraint::Flag;
        /// Recomputation in the backward pass: of blocks, or of all but their products.
        recompute: Recompute = Recompute::None, Constraint::OneOf(Recompute::WORDS);
        /// Number format of activations between blocks, and of those that are kept.
        activations: ActivationFormat = ActivationFormat::F32,
            Constraint::OneOf(ActivationFormat::WORDS);
        /// Arithmetic of matrix products: "mixed" rounds what is multiplied to f16.
        precision: Precision = Precision::F32, Constraint::OneOf(Precision::WORDS);
        /// Loss of models of samples; "auto": cross-entropy of classes, mse of values.
        loss: LossKind = LossKind::Auto, Constraint::OneOf(LossKind::WORDS);
        /// Difference, in normalized values, up to which "huber" is a squared error.
        huber_delta: f64 = 1.0, Constraint::Real(Excluded(0.0), Included(1e6)),
            if TRAIN_LOSS = HUBER;
        /// Weight of each class in the loss, in the order of the classes; empty = 1 each.
        class_weights: Vec<f64> = Vec::new(), Constraint::RealList, "1 each";
        /// Step after which the run ends; 0 writes the initial checkpoint only.
        steps: u64 = 3500, Constraint::Whole(0, STEPS), "3500, or as train.epochs";
        /// Passes through the data after which the run ends; 0 = after train.steps.
        epochs: u64 = 0, Constraint::Whole(0, STEPS);
        /// Seed of all random numbers.
        seed: u64 = 1337, Constraint::Whole(0, i64::MAX);
        /// Steps between evaluations on the validation split, and one at the end; 0 = none.
        eval_every: u64 = 500, Constraint::Whole(0, STEPS);
        /// Samples of the validation split per evaluation, spread evenly over it; 0 = all.
        eval_samples: u64 = EVAL_SAMPLES, Constraint::Whole(0, STEPS),
            "the fewer of 1,024 samples and 65,536 tokens";
        /// Evaluations without a better one after which the run ends; 0 = any number.
        patience: u64 = 0, Constraint::Whole(0, STEPS);
        /// Steps between checkpoints; 0 = only at the start, at the end and at a new best.
        checkpoint_every: u64 = 500, Constraint::Whole(0, STEPS);
        /// Minutes after which there is a checkpoint, at most 5 % of the time; 0 = none.
        checkpoint_minutes: f64 = 0.0, Constraint::Real(Included(0.0), Included(1e6)),
            "0, or 2 over nodes";
        /// Number of newest checkpoints to keep; the best one is kept as well.
        checkpoint_keep: usize = 2, Constraint::Whole(2, 1_000_000);
        /// Seconds for timing kernels of a GPU before the first step; 0 = earlier timings.
        tune_s: f64 = 5.0, Constraint::Real(Included(0.0), Included(3600.0));
        /// Consecutive steps skipped for non-finite values after which the run stops.
        skipped_steps_max: u64 = 10, Constraint::Whole(1, STEPS);
        /// Memory limit of each device in MiB; 0 = what its driver says is free.
        device_memory_mib: u64 = 0, Constraint::Whole(0, 1 << 30);
        /// Longest time in ms that a device cannot draw the screen; 0 = by its kind.
        submission_ms: u64 = 0, Constraint::Whole(0, 1000),
            "200, or 20 where it may draw the screen";
        /// Steps between progress lines if stderr is not a terminal.
        log_every: u64 = 10, Constraint::Whole(1, STEPS);
        /// Tokens of the sample text generated at the end; 0 = no sample, no measure.
        sample_tokens: usize = 200, Constraint::Whole(0, 1_000_000), if MODEL_KIND = OF_TOKENS;
    }
    /// Data, pipeline and tensor parallelism over several devices.
    parallel: Parallel {
        /// Devices of the run: auto, all, or a list as --devices takes it.
        devices: String = "auto".to_string(), Constraint::Text;
        /// Split of the batch: by measured speed, also while it trains, or fixed by shares.
        balance: Balance = Balance::Measured, Constraint::OneOf(Balance::WORDS);
        /// Samples per device, or per pipeline, in device order; for balance = "fixed".
        shares: Vec<u64> = Vec::new(), Constraint::IntList, "evenly";
        /// Later shares, "STEP: SAMPLES .." each, as a run with measured shares has told.
        share_changes: Vec<String> = Vec::new(), Constraint::TextList, "none";
        /// Pipeline stages: devices over which a model is cut; 1 = none.
        pipeline_stages: usize = 1, Constraint::Whole(1, 64), "planned";
        /// Schedule of a pipeline: order of the passes of its micro-batches.
        schedule: PipelineSchedule = PipelineSchedule::OneFOneB,
            Constraint::OneOf(PipelineSchedule::WORDS);
        /// Virtual stages: model chunks per device; for schedule = "interleaved".
        virtual_stages: usize = 1, Constraint::Whole(1, 16), "2 for interleaved, or else 1";
        /// Blocks of each model chunk of a pipeline, in forward order.
        blocks_per_stage: Vec<u64> = Vec::new(), Constraint::IntList, "by measurement";
        /// Ranks of a tensor group: devices that divide the tensors of a stage; 1 = none.
        tensor_ranks: usize = 1, Constraint::Whole(1, 64), "planned";
        /// Shares of heads, columns and vocabulary by rank of a tensor group.
        tensor_shares: Vec<u64> = Vec::new(), Constraint::IntList, "by measurement";
        /// Topology of the collectives: a ring, or a star over the first device.
        collective: Topology = Topology::Ring, Constraint::OneOf(Topology::WORDS);
        /// Overlap of gradient communication with the backward pass.
        overlap: bool = true, Constraint::Flag;
        /// Site at which the gradients of several devices are summed.
        reduce_site: Option<ReduceSite> = None,
            Constraint::OneOf(<Option<ReduceSite>>::WORDS);
        /// Message size: KiB per message between devices.
        message_kib: usize = 1024, Constraint::Whole(1, 1024);
    }
    /// Policy on faults: what a run does when something fails, and when it counts as failed.
    faults: FaultPolicy {
        /// Steps between comparisons of all devices' parameters; 0 = with checkpoints only.
        hash_every: u64 = 100, Constraint::Whole(0, STEPS);
        /// Reaction to devices whose parameters differ.
        on_mismatch: MismatchAction = MismatchAction::Stop,
            Constraint::OneOf(MismatchAction::WORDS);
        /// Reaction to a device that fails: stop, or continue on those that are left.
        on_loss: DeviceLoss = DeviceLoss::Stop, Constraint::OneOf(DeviceLoss::WORDS);
        /// Seconds of silence after which a node of a run over several machines is lost.
        node_timeout_s: f64 = 30.0, Constraint::Real(Included(0.1), Included(3600.0));
        /// Device timeout: seconds without a heartbeat after which a device counts as hung.
        device_timeout_s: f64 = 300.0, Constraint::Real(Excluded(0.0), Included(86_400.0));
    }
    /// The optimizer.
    optim: Optim {
        /// Update rule.
        kind: OptimKind = OptimKind::AdamW, Constraint::OneOf(OptimKind::WORDS);
        /// Learning rate after the warm-up.
        lr: f64 = 4e-3, Constraint::Real(Excluded(0.0), Included(LR_MAX)),
            "as model.kind has it, which may follow model.width";
        /// Decay of the first moment of Adam and Lion, the mean of gradients.
        beta1: f64 = 0.9, FRACTION, if OPTIM_KIND = ADAM_OR_LION;
        /// Decay of Adam's second moment, of squared gradients, and of what Lion keeps.
        beta2: f64 = 0.99, FRACTION, if OPTIM_KIND = ADAM_OR_LION;
        /// Epsilon of Adam and RMSprop, which prevents a division by zero.
        eps: f64 = 1e-8, Constraint::Real(Included(1e-20), Included(1.0)),
            if OPTIM_KIND = &["adamw", "adam", "rmsprop"];
        /// Decay of RMSprop's mean of squared gradients.
        alpha: f64 = 0.99, FRACTION, if OPTIM_KIND = &["rmsprop"];
        /// Momentum of SGD and RMSprop: decay of their running sum of gradients.
        momentum: f64 = 0.9, FRACTION, "0 with optim.kind = \"rmsprop\"",
            if OPTIM_KIND = &["sgd", "rmsprop"];
        /// SGD with Nesterov momentum.
        nesterov: bool = false, Constraint::Flag, if OPTIM_KIND = &["sgd"];
        /// Number format of the moments; bf16 takes half of the memory.
        moments: MomentFormat = MomentFormat::F32, Constraint::OneOf(MomentFormat::WORDS);
        /// Decay of the average of the weights that is evaluated and exported; 0 = off.
        ema: f64 = 0.0, FRACTION;
        /// Weight decay of parameters with 2 or more dimensions.
        weight_decay: f64 = 0.1, Constraint::Real(Included(0.0), Included(1000.0));
        /// Parameter groups: "NAMES lr_scale=X weight_decay=Y" or "NAMES frozen" each.
        groups: Vec<String> = Vec::new(), Constraint::TextList, "none";
        /// Gradient clipping: norm to which larger gradients are scaled down; 0 = off.
        clip: f64 = 1.0, Constraint::Real(Included(0.0), Included(1e9));
        /// Label smoothing: part of each target's probability that all classes share.
        label_smoothing: f64 = 0.0, FRACTION;
    }
    /// Learning-rate schedule.
    schedule: Schedule {
        /// Decay of the learning rate after the warm-up.
        kind: DecayKind = DecayKind::Cosine, Constraint::OneOf(DecayKind::WORDS);
        /// Warm-up: steps in which the learning rate rises linearly from 0.
        warmup: u64 = 100, Constraint::Whole(0, STEPS),
            "train.steps / 10, at most 100; 0 with \"one-cycle\"";
        /// Learning rate at the end of "cosine", "linear" and "wsd".
        min_lr: f64 = 4e-4, Constraint::Real(Included(0.0), Included(LR_MAX)),
            "a tenth of optim.lr", if SCHEDULE_KIND = &["cosine", "linear", "wsd"];
        /// Steps of the decay of "wsd", the last before decay_steps.
        cooldown_steps: u64 = 350, Constraint::Whole(0, STEPS), "schedule.decay_steps / 10",
            if SCHEDULE_KIND = &["wsd"];
        /// Step at which the decay ends, if it has an end; 0 = train.steps.
        decay_steps: u64 = 3500, Constraint::Whole(0, STEPS), "as train.steps";
        /// Steps from one factor gamma of the learning rate of "step" to the next.
        step_size: u64 = 1000, Constraint::Whole(1, STEPS), if SCHEDULE_KIND = &["step"];
        /// Factor of the learning rate; of "exponential" that of every step.
        gamma: f64 = 0.1, Constraint::Real(Excluded(0.0), Included(1.0)),
            "0.999 with schedule.kind = \"exponential\"",
            if SCHEDULE_KIND = &["step", "exponential"];
        /// Part of decay_steps in which "one-cycle" rises; it has no other warm-up.
        pct_start: f64 = 0.3, FRACTION, if SCHEDULE_KIND = &["one-cycle"];
        /// "one-cycle" begins at optim.lr / div_factor.
        div_factor: f64 = 25.0, Constraint::Real(Included(1.0), Included(1e9)),
            if SCHEDULE_KIND = &["one-cycle"];
        /// "one-cycle" ends at optim.lr / div_factor / final_div_factor.
        final_div_factor: f64 = 1e4, Constraint::Real(Included(1.0), Included(1e9)),
            if SCHEDULE_KIND = &["one-cycle"];
    }
    /// Metrics of the run besides its record.
    metrics: Metrics {
        /// Event files for TensorBoard in the run's directory.
        tensorboard: bool = false, Constraint::Flag;
    }
}

/// Keys whose default is derived from another key; [`RunConfig::to_run_toml`] leaves them to be
/// derived again, like the values of a preset.
const DERIVED: [&str; 12] = [
    "train.eval_samples",
    "optim.lr",
    "optim.momentum",
    "train.micro_batch_size",
    "parallel.pipeline_stages",
    "parallel.tensor_ranks",
    "parallel.virtual_stages",
    "schedule.warmup",
    "schedule.min_lr",
    "schedule.cooldown_steps",
    "schedule.decay_steps",
    "schedule.gamma",
];

/// Keys whose result is the placement of a run. A checkpoint saves the placement instead; setting
/// one of them to another value at a resume decides all of them anew.
const DECIDED_BY_PLACEMENT: [&str; 7] = [
    "parallel.devices",
    "parallel.balance",
    "parallel.shares",
    "parallel.share_changes",
    "parallel.collective",
    "parallel.reduce_site",
    "parallel.message_kib",
];

/// Keys of pipelines and tensor groups, whose result is also part of the placement of a run.
const OF_PARTS: [&str; 6] = [
    "parallel.pipeline_stages",
    "parallel.blocks_per_stage",
    "parallel.virtual_stages",
    "parallel.schedule",
    "parallel.tensor_ranks",
    "parallel.tensor_shares",
];

/// Former names of keys, each with its current name. No key may have a name in this list.
pub(crate) const RENAMED: [(&str, &str); 10] = [
    ("train.micro_batch", "train.micro_batch_size"),
    ("train.device_timeout_s", "faults.device_timeout_s"),
    ("parallel.pipeline", "parallel.pipeline_stages"),
    ("parallel.stages", "parallel.blocks_per_stage"),
    ("parallel.chunks", "parallel.virtual_stages"),
    ("parallel.chunk_kib", "parallel.message_kib"),
    ("parallel.hash_every", "faults.hash_every"),
    ("parallel.on_mismatch", "faults.on_mismatch"),
    ("parallel.on_loss", "faults.on_loss"),
    ("parallel.node_timeout_s", "faults.node_timeout_s"),
];

/// Returns true for a key whose result is the placement of a run.
pub fn is_of_placement(key: &str) -> bool {
    DECIDED_BY_PLACEMENT.contains(&key) || is_of_parts(key)
}

pub(crate) fn is_of_parts(key: &str) -> bool {
    OF_PARTS.contains(&key)
}

impl Optim {
    /// Returns the parameter groups.
    ///
    /// # Errors
    /// Returns [`ParameterGroupError`] for the first text that does not describe a group.
    pub fn parameter_groups(&self) -> Result<Vec<ParameterGroup>, ParameterGroupError> {
        self.groups.iter().map(|text| text.parse()).collect()
    }
}

impl Parallel {
    /// Returns the later shares.
    ///
    /// # Errors
    /// Returns [`ShareChangeError`] for the first text that does not describe any.
    pub fn later_shares(&self) -> Result<Vec<ShareChange>, ShareChangeError> {
        self.share_changes.iter().map(|text| text.parse()).collect()
    }

    /// Returns the devices for messages, with pipeline stages and tensor ranks if there are any:
    /// `cpu*2 with parallel.pipeline_stages = 2`.
    pub fn devices_text(&self) -> String {
        let stages = format!("parallel.pipeline_stages = {}", self.pipeline_stages);
        let ranks = format!("parallel.tensor_ranks = {}", self.tensor_ranks);
        match (self.pipeline_stages, self.tensor_ranks) {
            (1, 1) => self.devices.clone(),
            (_, 1) => format!("{} with {stages}", self.devices),
            (1, _) => format!("{} with {ranks}", self.devices),
            _ => format!("{} with {stages} and {ranks}", self.devices),
        }
    }
}

/// Keys that the user has set, as opposed to keys with their defaults.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TypedKeys {
    /// Keys set by the file and the flags of this start.
    pub now: BTreeSet<&'static str>,
    /// Keys set by earlier starts of a resumed run; `None` for a new run.
    pub before: Option<BTreeSet<&'static str>>,
}

impl TypedKeys {
    /// Returns true if the key was set now or before.
    pub fn contains(&self, key: &str) -> bool {
        self.now.contains(key) || self.before.as_ref().is_some_and(|keys| keys.contains(key))
    }

    /// Returns true if the default of `key` is derived from `other` at this start: in a new run, or
    /// because `other` is set now.
    fn follows(&self, key: &str, other: &str) -> bool {
        !self.contains(key) && (self.before.is_none() || self.now.contains(other))
    }

    /// Counts a key as one that was not set.
    pub(crate) fn forget(&mut self, key: &str) {
        self.now.remove(key);
        if let Some(before) = &mut self.before {
            before.remove(key);
        }
    }

    /// Returns the keys set now or before, in alphabetical order.
    pub fn all(&self) -> BTreeSet<&'static str> {
        let mut all = self.now.clone();
        if let Some(before) = &self.before {
            all.extend(before);
        }
        all
    }
}

impl RunConfig {
    /// Returns the keys of this configuration, in printing order: first of its family of models,
    /// then of all other sections.
    pub fn keys(&self) -> Vec<&'static Key> {
        let mut keys = self.model.keys();
        keys.extend(FIXED_KEYS.iter().copied().flatten());
        keys
    }

    /// Returns the value of the key with this full name; `None` if it is unset or is not a key of
    /// this configuration.
    pub fn value(&self, name: &str) -> Option<Value> {
        let (section, key) = name.split_once('.')?;
        self.section(section)?.value(key)
    }

    /// Sets the key with this full name to a value that it accepts.
    ///
    /// # Panics
    /// Panics if it is not a key of this configuration, or if the value has another type than the
    /// key.
    pub fn set(&mut self, name: &str, value: Value) {
        let (section, key) = name.split_once('.').unwrap_or((name, ""));
        match self.section_mut(section) {
            Some(section) => section.set(key, value),
            None => panic!("there is no section [{section}]"),
        }
    }

    /// Sets the keys whose default follows another key, unless they are set. In a resumed run they
    /// follow only keys that are set now; the warm-up and the end of the decay keep their values.
    pub(crate) fn apply_derived_defaults(&mut self, typed: &TypedKeys) {
        let is_new = typed.before.is_none();
        let now = &typed.now;
        if is_new {
            self.apply_model_defaults(now);
        }
        let has_shares =
            ["parallel.shares", "parallel.share_changes"].iter().any(|key| now.contains(key));
        if has_shares && !now.contains("parallel.balance") {
            self.parallel.balance = Balance::Fixed;
        }
        if typed.follows("parallel.virtual_stages", "parallel.schedule") {
            let is_interleaved = self.parallel.schedule == PipelineSchedule::Interleaved;
            self.parallel.virtual_stages = if is_interleaved { 2 } else { 1 };
        }
        // A run that becomes a pipeline would otherwise have few micro-batches and idle stages.
        let becomes_pipeline = self.parallel.pipeline_stages > 1
            && ["parallel.pipeline_stages", "parallel.schedule"]
                .iter()
                .any(|key| typed.follows("train.micro_batch_size", key));
        if becomes_pipeline || typed.follows("train.micro_batch_size", "train.batch") {
            self.train.micro_batch_size = self.default_micro_batch();
        } else if !now.contains("train.micro_batch_size")
            && let MicroBatchSize::Samples(samples) = &mut self.train.micro_batch_size
        {
            *samples = (*samples).min(self.train.batch);
        }
        // For a pipeline, enough micro-batches to keep its stages busy.
        if self.train.micro_batch_size == MicroBatchSize::Auto {
            self.train.micro_batch_size = self.default_micro_batch();
        }
        if is_new
            && !now.contains("train.eval_samples")
            && let Some(context) = self.model.context()
        {
            let samples = EVAL_TOKENS / context.max(1) as u64;
            self.train.eval_samples = samples.clamp(1, EVAL_SAMPLES);
        }
        if typed.follows("optim.momentum", OPTIM_KIND) {
            self.optim.momentum = if self.optim.kind == OptimKind::RmsProp { 0.0 } else { 0.9 };
        }
        if typed.follows("schedule.gamma", SCHEDULE_KIND) {
            let is_of_steps = self.schedule.kind == DecayKind::Exponential;
            self.schedule.gamma = if is_of_steps { 0.999 } else { 0.1 };
        }
        let min_lr = "schedule.min_lr";
        if typed.follows(min_lr, "optim.lr") || typed.follows(min_lr, SCHEDULE_KIND) {
            self.schedule.min_lr = self.optim.lr / 10.0;
        }
        if now.contains("train.steps") && !now.contains("train.epochs") {
            self.train.epochs = 0;
        }
        // The steps of a run in epochs are known once the data are.
        if !now.contains("train.epochs") || self.train.epochs == 0 {
            self.derive_schedule(typed);
        }
        self.reset_ineffective(typed);
    }

    /// Sets the number of steps of a run given in epochs, and the keys derived from it.
    pub(crate) fn set_steps_of_epochs(&mut self, steps: u64, typed: &TypedKeys) {
        self.train.steps = steps;
        self.derive_schedule(typed);
        self.reset_ineffective(typed);
    }

    /// Resets keys that lost their effect through other keys to their defaults, so that equal runs
    /// have equal configurations. Keys that are set now stay, to be refused.
    pub(super) fn reset_ineffective(&mut self, typed: &TypedKeys) {
        let default = Self { model: self.model.of_defaults(), ..Self::default() };
        for key in self.keys() {
            if !self.has_effect(key)
                && !typed.now.contains(key.full_name)
                && let Some(value) = default.value(key.full_name)
            {
                self.set(key.full_name, value);
            }
        }
        if self.schedule.kind == DecayKind::OneCycle && !typed.now.contains("schedule.warmup") {
            self.schedule.warmup = 0;
        }
    }

    fn derive_schedule(&mut self, typed: &TypedKeys) {
        let is_new = typed.before.is_none();
        // A run of 0 steps only writes a checkpoint for another run to start from. Nothing is
        // derived from it: its schedule stays open, and so does a warm-up that was not set.
        let is_open = is_new || self.schedule.decay_steps == 0;
        if is_open && !typed.contains("schedule.warmup") && self.train.steps > 0 {
            self.schedule.warmup = (self.train.steps / 10).min(100);
        }
        let is_free = is_new && !typed.contains("schedule.decay_steps");
        if is_free || self.schedule.decay_steps == 0 {
            self.schedule.decay_steps = self.train.steps;
        }
        if !typed.contains("schedule.cooldown_steps") {
            self.schedule.cooldown_steps = self.schedule.decay_steps / 10;
        }
    }

    /// Derives the kind of the data from their path, and in a new run the kind of the model from
    /// its preset or the data, unless they are set. All other keys of the model depend on its kind.
    pub(crate) fn select_kinds(&mut self, typed: &TypedKeys) {
        if let Some(path) = &self.data.path
            && typed.now.contains("data.path")
            && !typed.contains(DATA_KIND)
        {
            self.data.kind = DataKind::of(path);
        }
        if typed.before.is_some() || typed.now.contains(MODEL_KIND) {
            return;
        }
        if let Some(kind) = self.model.kind_of_preset() {
            self.set(MODEL_KIND, kind.into());
        } else if self.data.kind.sample_format().is_some() {
            self.set(MODEL_KIND, OF_SAMPLES.into());
        }
    }

    /// Gives unset keys the defaults of the model: first the values of its preset, then keys of
    /// other sections that follow from its sizes.
    fn apply_model_defaults(&mut self, now: &BTreeSet<&'static str>) {
        self.set_unless(now, self.model.preset_values());
        self.set_unless(now, self.model.defaults());
    }

    /// Sets keys, except those already set and those without an effect.
    fn set_unless(&mut self, now: &BTreeSet<&'static str>, values: Vec<(&'static str, Value)>) {
        for (name, value) in values {
            let key = self.keys().into_iter().find(|key| key.full_name == name);
            if !now.contains(name) && key.is_none_or(|key| self.has_effect(key)) {
                self.set(name, value);
            }
        }
    }

    /// Default micro-batch of a run: the batch, or in a pipeline of K stages the largest with which
    /// one pipeline runs 4K micro-batches, so that its bubble is small. Prefers whole rounds of an
    /// interleaved schedule if possible. Never below the minimum of the model.
    fn default_micro_batch(&self) -> MicroBatchSize {
        let batch = self.train.batch;
        let stages = self.parallel.pipeline_stages;
        if stages <= 1 {
            return MicroBatchSize::Auto;
        }
        let least = self.model.micro_batch_min();
        let most = (batch / (4 * stages)).max(least).min(batch);
        let round = match self.parallel.schedule {
            PipelineSchedule::Interleaved => stages,
            _ => 1,
        };
        for rows in (least..=most).rev() {
            if batch.div_ceil(rows).is_multiple_of(round) {
                return MicroBatchSize::Samples(rows);
            }
        }
        MicroBatchSize::Samples(most)
    }

    /// Returns the first key of the placement that is set now to another value than in `saved`.
    pub fn other_placement(&self, saved: &Self, typed: &TypedKeys) -> Option<&'static str> {
        for name in Parallel::KEYS.iter().map(|key| key.full_name) {
            let is_other = if name == "parallel.devices" {
                normalized(&self.parallel.devices) != normalized(&saved.parallel.devices)
            } else {
                self.value(name) != saved.value(name)
            };
            if is_other && is_of_placement(name) && typed.now.contains(name) {
                return Some(name);
            }
        }
        None
    }

    /// Resets the keys of the placement that are not set now to the defaults of a new run, except
    /// for the devices.
    pub(crate) fn forget_placement(&mut self, typed: &TypedKeys) {
        let Parallel { devices, overlap, .. } = self.parallel.clone();
        let before = std::mem::replace(
            &mut self.parallel,
            Parallel { devices, overlap, ..Parallel::default() },
        );
        for key in Parallel::KEYS.iter().filter(|key| is_of_placement(key.full_name)) {
            if typed.now.contains(key.full_name)
                && let Some(value) = before.value(key.name)
            {
                self.parallel.set(key.name, value);
            }
        }
    }

    /// Formats every key with its value as TOML; reading it yields this configuration again.
    pub fn to_toml(&self) -> String {
        self.sections_toml(&|_| KeyLine::Value)
    }

    /// Formats the part of the configuration that a checkpoint saves: all keys except those whose
    /// result is in the placement, which is saved instead.
    pub(crate) fn to_saved_toml(&self) -> String {
        self.sections_toml(&|key| {
            if is_of_placement(key.full_name) { KeyLine::None } else { KeyLine::Value }
        })
    }

    /// Formats the configuration as TOML to be read and edited as the configuration of a new run.
    /// Derived defaults are comments, so that they follow their keys again. Reading it yields this
    /// configuration again.
    pub(crate) fn to_run_toml(&self, typed: &BTreeSet<&'static str>) -> String {
        let of_preset: BTreeSet<_> =
            self.model.preset_values().into_iter().map(|(name, _)| name).collect();
        let mut derived = BTreeSet::new();
        for key in self.keys() {
            let is_open = match key.full_name {
                "train.steps" => self.train.epochs > 0,
                name => {
                    let is_derived = DERIVED.contains(&name) || of_preset.contains(name);
                    is_derived && !typed.contains(name)
                }
            };
            if is_open {
                derived.insert(key.full_name);
            }
        }
        // A value derived from a key that is not itself derived depends on that key's value only.
        loop {
            let fresh = self.derived_again(&derived);
            let before = derived.len();
            for key in self.keys() {
                if self.value(key.full_name) != fresh.value(key.full_name) {
                    derived.remove(key.full_name);
                }
            }
            if derived.len() == before {
                break;
            }
        }
        self.sections_toml(&|key| match key.follows {
            _ if !derived.contains(key.full_name) => KeyLine::Value,
            _ if of_preset.contains(key.full_name) => KeyLine::Comment("as model.preset"),
            Some(follows) => KeyLine::Comment(follows),
            None => KeyLine::Value,
        })
    }

    /// This configuration after reading it without some of its keys.
    fn derived_again(&self, without: &BTreeSet<&'static str>) -> Self {
        let defaults = Self { model: self.model.of_defaults(), ..Self::default() };
        let mut fresh = self.clone();
        let mut now = BTreeSet::new();
        for key in self.keys() {
            if without.contains(key.full_name) {
                if let Some(default) = defaults.value(key.full_name) {
                    fresh.set(key.full_name, default);
                }
            } else if self.value(key.full_name).is_some() {
                now.insert(key.full_name);
            }
        }
        let typed = TypedKeys { now, before: None };
        fresh.apply_derived_defaults(&typed);
        if self.train.epochs > 0 {
            fresh.set_steps_of_epochs(self.train.steps, &typed);
        }
        fresh
    }

    fn sections_toml(&self, line_of: &dyn Fn(&Key) -> KeyLine) -> String {
        let sections: Vec<String> =
            SECTIONS.iter().map(|(section, _)| self.section_lines(section, line_of)).collect();
        sections.join("\n")
    }

    /// Formats one section as in [`RunConfig::to_toml`].
    pub(crate) fn section_toml(&self, section: &str) -> String {
        self.section_lines(section, &|_| KeyLine::Value)
    }

    fn section_lines(&self, section: &str, line_of: &dyn Fn(&Key) -> KeyLine) -> String {
        let mut text = format!("[{section}]\n");
        for key in self.keys().into_iter().filter(|key| key.section == section) {
            let Some(value) = self.value(key.full_name).filter(|_| self.has_effect(key)) else {
                continue;
            };
            match line_of(key) {
                KeyLine::None => {}
                KeyLine::Comment(follows) => {
                    text.push_str(&format!("# {} = {value}  # {follows}\n", key.name));
                }
                KeyLine::Value => text.push_str(&format!("{} = {value}\n", key.name)),
            }
        }
        text
    }
}

/// Device selector in normalized spelling, for comparisons.
fn normalized(selector: &str) -> String {
    selector.replace(' ', "").to_lowercase()
}

enum KeyLine {
    Value,
    /// Comment that ends with the key that the default follows.
    Comment(&'static str),
    None,
}

/// Keys of all configurations, with any family of models; several families may have a key of the
/// same name.
pub(super) fn known_keys() -> Vec<&'static Key> {
    let mut keys = keys_of_all();
    keys.extend(FIXED_KEYS.iter().copied().flatten());
    keys
}

pub(super) fn known_key(name: &str) -> Option<&'static Key> {
    known_keys().into_iter().find(|key| key.full_name == name)
}

mod checks;
#[cfg(test)]
mod tests;

//! The configuration of a run: checked, resolved, printable as TOML and readable again. What was
//! typed becomes a [`RunConfig`] in `read`; every key is one entry of [`KEYS`].

use std::collections::BTreeSet;
use std::ops::Bound::{Excluded, Included};
use std::path::PathBuf;

use super::key::{ConfigValue, Constraint, Key, config_enum};

config_enum! {
    /// What is trained.
    ModelKind {
        /// A decoder-only transformer.
        Gpt = "gpt",
    }
    /// The function between the two matrices of a block's MLP.
    ActivationKind {
        Gelu = "gelu",
        GeluTanh = "gelu_tanh",
        Relu = "relu",
    }
    /// Where the samples come from.
    DataKind {
        /// A text file, `data.path`.
        Text = "text",
        /// The corpus inside the program: its own sources and documents.
        Builtin = "builtin",
    }
    /// What a token is.
    TokenizerName {
        /// Each character that occurs in the text.
        Char = "char",
        /// Each of the 256 bytes.
        Byte = "byte",
    }
    /// The update rule.
    OptimKind {
        /// Adam with decoupled weight decay.
        AdamW = "adamw",
        /// Stochastic gradient descent with momentum.
        Sgd = "sgd",
    }
    /// How the learning rate goes on after the warm-up.
    ScheduleKind {
        Constant = "constant",
        /// Along half a cosine from `optim.lr` to `schedule.min_lr`.
        Cosine = "cosine",
        /// Along a line from `optim.lr` to `schedule.min_lr`.
        Linear = "linear",
    }
}

config_enum! {
    /// How the global batch is shared out.
    Balance {
        /// By the measured speed of each device.
        Measured = "measured",
        /// As parallel.shares says, or evenly.
        Fixed = "fixed",
    }
    /// Along which way gradients and parameters travel.
    CollectiveTopology {
        /// From device to device; each updates an equal part.
        Ring = "ring",
        /// To and from the first device, which updates everything.
        Star = "star",
    }
    /// Where gradients of devices are added.
    ReduceSiteChoice {
        /// Where it is faster.
        Measured = "measured",
        /// On the host.
        Host = "host",
        /// On the devices.
        Device = "device",
    }
    /// What happens when devices do not hold the same parameters.
    OnMismatch {
        /// The run ends.
        Stop = "stop",
        /// They are replaced by those of the device that updates them.
        Repair = "repair",
    }
}

/// Counts of steps: a billion is years on any device.
const STEPS: i64 = 1_000_000_000;
/// Samples of a batch.
const SAMPLES: i64 = 1 << 20;
/// From 0, as decaying averages need it, to below 1.
const FRACTION: Constraint = Constraint::Real(Included(0.0), Excluded(1.0));
/// Learning rates are far below; beyond it a typing error is certain.
const LR_MAX: f64 = 1000.0;

/// Makes the structs of the sections, their defaults, [`RunConfig`], and the table of keys, out
/// of one entry per key: doc, name, type, default, what is accepted, where the default follows
/// another key.
macro_rules! sections {
    ($(
        $(#[doc = $section_doc:literal])*
        $section:ident: $Section:ident {
            $(
                $(#[doc = $doc:literal])*
                $key:ident: $ty:ty = $default:expr, $accepts:expr $(, $follows:literal)?;
            )*
        }
    )*) => {
        $(
            $(#[doc = $section_doc])*
            #[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
            #[serde(default, deny_unknown_fields)]
            pub struct $Section {
                $($(#[doc = $doc])* pub $key: $ty,)*
            }

            impl Default for $Section {
                fn default() -> Self {
                    Self { $($key: $default,)* }
                }
            }
        )*

        /// Everything that a run is told. Equal configurations on the same devices give the
        /// same bits.
        #[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct RunConfig {
            $($(#[doc = $section_doc])* pub $section: $Section,)*
        }

        /// The sections with a sentence each, in the order in which they are printed.
        pub const SECTIONS: &[(&str, &str)] =
            &[$((stringify!($section), concat!($($section_doc),*)),)*];

        /// Every key, in the order in which they are printed.
        pub const KEYS: &[Key<RunConfig>] = &[$($(Key {
            full_name: concat!(stringify!($section), ".", stringify!($key)),
            section: stringify!($section),
            name: stringify!($key),
            doc: concat!($($doc),*),
            accepts: $accepts,
            follows: [$(Some($follows),)? None][0],
            get: |config| ConfigValue::value(&config.$section.$key),
            set: |config, value| ConfigValue::replace(&mut config.$section.$key, value),
        },)*)*];
    };
}

sections! {
    /// The network.
    model: Model {
        /// What is trained.
        kind: ModelKind = ModelKind::Gpt, Constraint::OneOf(ModelKind::WORDS);
        /// Blocks of attention and MLP.
        layers: usize = 4, Constraint::Whole(1, 1024);
        /// Heads of attention; they divide the width.
        heads: usize = 4, Constraint::Whole(1, 1024);
        /// Values per token between the blocks.
        width: usize = 128, Constraint::Whole(1, 65_536);
        /// Tokens of a sample.
        context: usize = 64, Constraint::Whole(1, 65_536);
        /// Whether linear layers and norms have biases.
        bias: bool = false, Constraint::Flag;
        /// The share of activations that training sets to zero.
        dropout: f64 = 0.0, FRACTION;
        /// Whether the output head shares the token embedding.
        tie: bool = true, Constraint::Flag;
        /// The function inside the MLP.
        activation: ActivationKind = ActivationKind::Gelu, Constraint::OneOf(ActivationKind::WORDS);
    }
    /// What the network learns from.
    data: Data {
        /// Where the samples come from.
        kind: DataKind = DataKind::Builtin, Constraint::OneOf(DataKind::WORDS),
            "\"builtin\", or \"text\" with a data.path";
        /// The text file, from the working directory.
        path: Option<PathBuf> = None, Constraint::Text;
        /// What a token is.
        tokenizer: TokenizerName = TokenizerName::Char, Constraint::OneOf(TokenizerName::WORDS);
        /// The share at the end of the text that only evaluation sees; 0 = none.
        held_out: f64 = 0.1, Constraint::Real(Included(0.0), Included(0.5));
    }
    /// The run.
    train: Train {
        /// Samples per step, over all devices.
        batch: usize = 12, Constraint::Whole(1, SAMPLES);
        /// Samples that a device runs at a time; the last ones of a batch may be fewer.
        micro_batch: usize = 12, Constraint::Whole(1, SAMPLES), "as train.batch";
        /// Whether neighbouring operations become one kernel.
        fuse: bool = true, Constraint::Flag;
        /// The step after which the run ends; 0 writes the initial checkpoint only.
        steps: u64 = 500, Constraint::Whole(0, STEPS);
        /// What all random numbers are drawn from.
        seed: u64 = 1337, Constraint::Whole(0, i64::MAX);
        /// Steps between evaluations on the held-out text; 0 = at the end only.
        eval_every: u64 = 250, Constraint::Whole(0, STEPS);
        /// Steps between checkpoints; 0 = at the start and at the end only.
        checkpoint_every: u64 = 250, Constraint::Whole(0, STEPS);
        /// Checkpoints that are kept; older ones are deleted.
        checkpoint_keep: usize = 2, Constraint::Whole(2, 1_000_000);
        /// Seconds for timing the kernels of a GPU before the first step; 0 = none.
        tune_s: f64 = 5.0, Constraint::Real(Included(0.0), Included(3600.0));
        /// Steps in a row skipped as not finite after which the run stops.
        skipped_steps_max: u64 = 10, Constraint::Whole(1, STEPS);
        /// Seconds without a sign of life after which a device counts as hung.
        device_timeout_s: f64 = 300.0, Constraint::Real(Excluded(0.0), Included(86_400.0));
        /// MiB of the device's memory that a run may take; 0 = what it tells.
        device_memory_mib: u64 = 0, Constraint::Whole(0, 1 << 30);
        /// Steps between lines of progress where there is no terminal.
        log_every: u64 = 10, Constraint::Whole(1, STEPS);
        /// Tokens of the text that is printed at the end; 0 = none.
        sample_tokens: usize = 200, Constraint::Whole(0, 1_000_000);
    }
    /// Several devices in one run.
    parallel: Parallel {
        /// How the batch is shared out: by measured speed, or as parallel.shares says.
        balance: Balance = Balance::Measured, Constraint::OneOf(Balance::WORDS);
        /// Samples of the batch for each device, in their order; for balance = "fixed".
        shares: Vec<u64> = Vec::new(), Constraint::IntList, "evenly";
        /// How gradients and parameters travel: around, or over the first device.
        collective: CollectiveTopology = CollectiveTopology::Ring, Constraint::OneOf(CollectiveTopology::WORDS);
        /// Whether gradients travel while the backward pass still computes others.
        overlap: bool = true, Constraint::Flag;
        /// Where gradients of several devices are added.
        reduce_site: ReduceSiteChoice = ReduceSiteChoice::Measured, Constraint::OneOf(ReduceSiteChoice::WORDS);
        /// KiB that travel in one message.
        chunk_kib: usize = 1024, Constraint::Whole(1, 1024);
        /// Steps between comparisons of all devices' parameters; 0 = with checkpoints only.
        hash_every: u64 = 100, Constraint::Whole(0, STEPS);
        /// What happens when devices do not hold the same parameters.
        on_mismatch: OnMismatch = OnMismatch::Stop, Constraint::OneOf(OnMismatch::WORDS);
    }
    /// The optimizer.
    optim: Optim {
        /// The update rule.
        kind: OptimKind = OptimKind::AdamW, Constraint::OneOf(OptimKind::WORDS);
        /// The learning rate after the warm-up.
        lr: f64 = 1e-3, Constraint::Real(Excluded(0.0), Included(LR_MAX));
        /// The decay of AdamW's mean of gradients.
        beta1: f64 = 0.9, FRACTION;
        /// The decay of AdamW's mean of squared gradients.
        beta2: f64 = 0.99, FRACTION;
        /// What keeps AdamW from dividing by zero.
        eps: f64 = 1e-8, Constraint::Real(Included(1e-20), Included(1.0));
        /// The decay of SGD's mean of gradients.
        momentum: f64 = 0.9, FRACTION;
        /// The decay of matrices per step, times the learning rate.
        weight_decay: f64 = 0.1, Constraint::Real(Included(0.0), Included(1000.0));
        /// The norm to which longer gradients are scaled down; 0 = off.
        clip: f64 = 1.0, Constraint::Real(Included(0.0), Included(1e9));
    }
    /// The learning rate over the steps.
    schedule: Schedule {
        /// How it goes on after the warm-up.
        kind: ScheduleKind = ScheduleKind::Cosine, Constraint::OneOf(ScheduleKind::WORDS);
        /// Steps in which it rises from 0, along a line.
        warmup: u64 = 50, Constraint::Whole(0, STEPS), "train.steps / 10, at most 100";
        /// Where it ends.
        min_lr: f64 = 1e-4, Constraint::Real(Included(0.0), Included(LR_MAX)), "a tenth of optim.lr";
        /// The step from which it stays at its end; 0 = train.steps.
        decay_steps: u64 = 500, Constraint::Whole(0, STEPS), "as train.steps";
    }
}

/// Why a configuration is impossible.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{} {why}", keys[0])]
pub struct ConstraintError {
    /// The keys that are at odds, the one that the message is about first.
    pub keys: Vec<&'static str>,
    /// What goes behind the first key's name, with what would be accepted.
    pub why: String,
}

impl RunConfig {
    /// Gives the keys whose default follows another key their value. `typed` are the keys that
    /// were set by hand; `saved` says that the others come from a checkpoint, where they keep
    /// their value as far as it fits.
    pub fn apply_derived_defaults(&mut self, typed: &BTreeSet<&'static str>, saved: bool) {
        let free = |key| !saved && !typed.contains(key);
        if typed.contains("data.path") && !typed.contains("data.kind") {
            self.data.kind = DataKind::Text;
        }
        if typed.contains("parallel.shares") && !typed.contains("parallel.balance") {
            self.parallel.balance = Balance::Fixed;
        } else if self.parallel.balance == Balance::Measured && !typed.contains("parallel.shares") {
            // Those of a checkpoint, which whoever typed the balance does not want.
            self.parallel.shares.clear();
        }
        if free("train.micro_batch") {
            self.train.micro_batch = self.train.batch;
        } else if !typed.contains("train.micro_batch") {
            self.train.micro_batch = self.train.micro_batch.min(self.train.batch);
        }
        // A run of 0 steps only writes where another one starts, so nothing follows from it: its
        // schedule is open (decay_steps = 0), and a warm-up that nobody chose is, too.
        let is_open = self.schedule.decay_steps == 0
            && self.schedule.warmup == Schedule::default().warmup
            && !typed.contains("schedule.warmup");
        if (free("schedule.warmup") || is_open) && self.train.steps > 0 {
            self.schedule.warmup = (self.train.steps / 10).min(100);
        }
        if free("schedule.min_lr") {
            self.schedule.min_lr = self.optim.lr / 10.0;
        }
        if free("schedule.decay_steps") || self.schedule.decay_steps == 0 {
            self.schedule.decay_steps = self.train.steps;
        }
    }

    /// Checks every key by itself, then those that must fit each other.
    pub fn check(&self) -> Result<(), ConstraintError> {
        for key in KEYS {
            let Some(value) = (key.get)(self) else { continue };
            if key.accepts.check(value.clone()).is_none() {
                let why = format!("expects {}, got {value}", key.accepts);
                return Err(ConstraintError { keys: vec![key.full_name], why });
            }
        }
        self.check_pairs()
    }

    fn check_pairs(&self) -> Result<(), ConstraintError> {
        let fail = |keys: &[&'static str], why| Err(ConstraintError { keys: keys.to_vec(), why });
        let (model, train) = (&self.model, &self.train);
        if !model.width.is_multiple_of(model.heads) {
            let why = format!(
                "expects a number that divides model.width = {}, got {}",
                model.width, model.heads
            );
            return fail(&["model.heads", "model.width"], why);
        }
        if train.micro_batch > train.batch {
            let why =
                format!("expects at most train.batch = {}, got {}", train.batch, train.micro_batch);
            return fail(&["train.micro_batch", "train.batch"], why);
        }
        self.check_shares()?;
        let (lr, min_lr) = (self.optim.lr, self.schedule.min_lr);
        if self.schedule.kind != ScheduleKind::Constant && min_lr > lr {
            let why = format!("expects at most optim.lr = {lr:?}, got {min_lr:?}");
            return fail(&["schedule.min_lr", "optim.lr"], why);
        }
        match (self.data.kind, &self.data.path) {
            (DataKind::Text, None) => {
                fail(&["data.kind"], "= \"text\" expects a data.path; give --data PATH".into())
            }
            (DataKind::Builtin, Some(_)) => {
                let why = "has no use with data.kind = \"builtin\"; leave one of them out";
                fail(&["data.path", "data.kind"], why.into())
            }
            (_, Some(path)) if path.to_str().is_none() => {
                fail(&["data.path"], "expects a path in Unicode; rename the file".into())
            }
            _ => Ok(()),
        }
    }

    fn check_shares(&self) -> Result<(), ConstraintError> {
        let (shares, batch) = (&self.parallel.shares, self.train.batch);
        let fail = |other, why| Err(ConstraintError { keys: vec!["parallel.shares", other], why });
        if shares.is_empty() {
            return Ok(());
        }
        if self.parallel.balance == Balance::Measured {
            let why = "has no use with parallel.balance = \"measured\"; leave one of them out";
            return fail("parallel.balance", why.into());
        }
        // Of numbers that nobody checked, the sum may be larger than any of them can be.
        let sum: u128 = shares.iter().map(|share| u128::from(*share)).sum();
        if sum != batch as u128 {
            let why = format!(
                "expects numbers with the sum train.batch = {batch}, got {shares:?}, whose sum is \
                 {sum}"
            );
            return fail("train.batch", why);
        }
        Ok(())
    }

    /// Every key with its value, as a TOML file that gives this configuration again.
    pub fn to_toml(&self) -> String {
        let sections: Vec<String> =
            SECTIONS.iter().map(|(section, _)| self.section_toml(section)).collect();
        sections.join("\n")
    }

    /// One section of [`RunConfig::to_toml`].
    pub fn section_toml(&self, section: &str) -> String {
        let mut text = format!("[{section}]\n");
        for key in KEYS.iter().filter(|key| key.section == section) {
            if let Some(value) = (key.get)(self) {
                text.push_str(&format!("{} = {value}\n", key.name));
            }
        }
        text
    }
}

/// The key of this name, `section.leaf`.
pub fn key(name: &str) -> Option<&'static Key<RunConfig>> {
    KEYS.iter().find(|key| key.full_name == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_is_sound_and_follows_itself() {
        let mut config = RunConfig::default();
        config.apply_derived_defaults(&BTreeSet::new(), false);
        assert_eq!(config, RunConfig::default());
        assert_eq!(config.check(), Ok(()));
    }

    #[test]
    fn serde_reads_what_is_printed_and_what_it_writes() {
        let config = RunConfig::default();
        assert_eq!(toml::from_str::<RunConfig>(&config.to_toml()).unwrap(), config);
        let text = toml::to_string(&config).unwrap();
        assert_eq!(toml::from_str::<RunConfig>(&text).unwrap(), config);
        assert!(toml::from_str::<RunConfig>("[train]\nspets = 5").is_err());
    }

    #[test]
    fn every_key_is_documented_and_its_default_is_accepted() {
        let config = RunConfig::default();
        for key in KEYS {
            assert!(key.doc.trim().ends_with('.'), "{} has no sentence", key.full_name);
            assert_eq!(key.full_name, format!("{}.{}", key.section, key.name));
            if let Some(value) = (key.get)(&config) {
                assert_eq!(key.accepts.check(value.clone()), Some(value), "{}", key.full_name);
            }
        }
    }

    /// Changes the default by `edit` and checks it.
    fn check(edit: impl Fn(&mut RunConfig)) -> String {
        let mut config = RunConfig::default();
        edit(&mut config);
        config.check().map_or_else(|invalid| invalid.to_string(), |()| "fine".into())
    }

    #[test]
    fn impossible_values_name_the_key_and_what_is_accepted() {
        let heads = "model.heads expects a number that divides model.width = 128, got 3";
        assert_eq!(check(|c| c.model.heads = 3), heads);
        let shares = |c: &mut RunConfig, shares: &[u64]| {
            (c.parallel.shares, c.parallel.balance) = (shares.to_vec(), Balance::Fixed);
        };
        let sum = "parallel.shares expects numbers with the sum train.batch = 12, got [4, 4], \
                   whose sum is 8";
        assert_eq!(check(|c| shares(c, &[4, 4])), sum);
        assert!(check(|c| shares(c, &[u64::MAX, 13])).contains("18446744073709551628"));
        assert!(check(|c| shares(c, &[12, 0])).contains("whole numbers from 1 on"));
        assert_eq!(check(|c| shares(c, &[4, 8])), "fine");
        let measured = check(|c| c.parallel.shares = vec![12]);
        assert!(measured.contains("has no use with parallel.balance"), "{measured}");
        let layers = "model.layers expects a whole number from 1 to 1024, got 1000000000000";
        assert_eq!(check(|c| c.model.layers = 1_000_000_000_000), layers);
        assert!(check(|c| c.train.seed = u64::MAX).ends_with("got 18446744073709551615"));
        let micro = "train.micro_batch expects at most train.batch = 12, got 13";
        assert_eq!(check(|c| c.train.micro_batch = 13), micro);
        assert_eq!(check(|c| c.train.micro_batch = 5), "fine");
        let lr = "optim.lr expects a number above 0, at most 1000, got NaN";
        assert_eq!(check(|c| c.optim.lr = f64::NAN), lr);
        let min_lr = "schedule.min_lr expects at most optim.lr = 0.001, got 0.01";
        assert_eq!(check(|c| c.schedule.min_lr = 0.01), min_lr);
        let constant = |c: &mut RunConfig| {
            c.schedule.min_lr = 0.01;
            c.schedule.kind = ScheduleKind::Constant;
        };
        assert_eq!(check(constant), "fine");
        let kind = "data.kind = \"text\" expects a data.path; give --data PATH";
        assert_eq!(check(|c| c.data.kind = DataKind::Text), kind);
        let path = "data.path has no use with data.kind = \"builtin\"; leave one of them out";
        assert_eq!(check(|c| c.data.path = Some("x".into())), path);
    }
}

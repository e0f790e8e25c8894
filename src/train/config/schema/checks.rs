//! Checks of a configuration: of single keys, and between keys.

use super::*;
use crate::families::{FAMILIES, TrainedOn};
use crate::keys::one_of;
use potluck_parallel::TENSOR_SHARE_MAX;

impl RunConfig {
    /// Checks each key by itself, then the constraints between keys.
    pub fn check(&self) -> Result<(), ConstraintError> {
        for key in self.keys() {
            let Some(value) = self.value(key.full_name) else { continue };
            if key.accepts.check(value.clone()).is_none() {
                let why = format!("expects {}, got {value}", key.accepts);
                return refused(&[key.full_name], why);
            }
        }
        self.model.check_preset()?;
        self.check_scopes()?;
        self.check_trained_on()?;
        self.model.check()?;
        self.check_pairs()
    }

    /// Returns true if a key has an effect with these kinds of model and data.
    pub(in crate::config) fn has_effect(&self, of: &Key) -> bool {
        let Some((other, words)) = of.only else { return true };
        matches!(self.value(other), Some(Value::Text(word)) if words.contains(&&*word))
    }

    /// Checks that keys without an effect have their defaults.
    fn check_scopes(&self) -> Result<(), ConstraintError> {
        let default = Self { model: self.model.of_defaults(), ..Self::default() };
        for key in self.keys() {
            let Some((other, words)) = key.only else { continue };
            if self.value(key.full_name) != default.value(key.full_name) && !self.has_effect(key) {
                return Err(self.without_effect(key.full_name, other, words));
            }
        }
        Ok(())
    }

    /// Error on a key that has an effect only with some values of another key.
    pub(in crate::config) fn without_effect(
        &self,
        key: &'static str,
        other: &'static str,
        words: &[&str],
    ) -> ConstraintError {
        let now = match self.value(other) {
            Some(now) => now.to_string(),
            None => String::new(),
        };
        let words = one_of(words);
        let why = format!("has no effect with {other} = {now}, only with {words}; leave it out");
        ConstraintError { keys: vec![key, other], why }
    }

    fn check_trained_on(&self) -> Result<(), ConstraintError> {
        let (kinds, of): (&[TrainedOn], _) = match self.data.kind {
            kind if kind.sample_format().is_none() => (&[TrainedOn::Tokens], "texts and tokens"),
            DataKind::Csv => (&[TrainedOn::Samples], "tables"),
            _ => (&[TrainedOn::Samples, TrainedOn::Pictures], "samples"),
        };
        if kinds.contains(&self.model.family().trained_on) {
            return Ok(());
        }
        let mut wanted = Vec::new();
        for family in FAMILIES.iter().filter(|family| kinds.contains(&family.trained_on)) {
            wanted.push(family.name);
        }
        let data = self.data.kind.word().unwrap_or_default();
        let why = format!("expects {} for {of} (data.kind = \"{data}\")", one_of(&wanted));
        refused(&[MODEL_KIND, DATA_KIND], why)
    }

    fn check_pairs(&self) -> Result<(), ConstraintError> {
        let train = &self.train;
        let micro_batch = train.micro_batch_size.of_batch(train.batch);
        if micro_batch > train.batch {
            let why = format!("expects at most train.batch = {}, got {micro_batch}", train.batch);
            return refused(&["train.micro_batch_size", "train.batch"], why);
        }
        if train.patience > 0 && train.eval_every == 0 {
            let why = format!(
                "= {} counts evaluations, and train.eval_every = 0 has none; set train.eval_every \
                 to 1 or more, or leave it out",
                train.patience
            );
            return refused(&["train.patience", "train.eval_every"], why);
        }
        self.check_shares()?;
        self.check_share_changes()?;
        self.check_pipeline()?;
        self.check_stages()?;
        self.check_tensor()?;
        let lr = self.optim.lr;
        let min_lr = self.schedule.min_lr;
        let falls_to_min =
            matches!(self.schedule.kind, DecayKind::Linear | DecayKind::Cosine | DecayKind::Wsd);
        if falls_to_min && min_lr > lr {
            let why = format!("expects at most optim.lr = {lr:?}, got {min_lr:?}");
            return refused(&["schedule.min_lr", "optim.lr"], why);
        }
        if self.schedule.kind == DecayKind::OneCycle && self.schedule.warmup > 0 {
            let why = format!(
                "= {} has no effect with schedule.kind = \"one-cycle\", whose rise is \
                 schedule.pct_start of the steps; leave it out, or set it to 0",
                self.schedule.warmup
            );
            return refused(&["schedule.warmup", SCHEDULE_KIND], why);
        }
        if self.optim.nesterov && self.optim.momentum == 0.0 {
            let why = "expects an optim.momentum above 0; set one, or leave it out";
            return refused(&["optim.nesterov", "optim.momentum"], why.into());
        }
        if let Err(error) = self.optim.parameter_groups() {
            return refused(&["optim.groups"], format!("is wrong: {error}"));
        }
        if !matches!(self.data.image_size.len(), 0 | 2) {
            let why = format!("expects [height, width], got {:?}", self.data.image_size);
            return refused(&["data.image_size"], why);
        }
        match (self.data.kind, &self.data.path) {
            (kind, None) if kind != DataKind::Builtin => {
                let word = kind.word().unwrap_or_default();
                let why = format!("= \"{word}\" expects a data.path; give --data PATH");
                refused(&["data.kind"], why)
            }
            (DataKind::Builtin, Some(_)) => {
                let why = "conflicts with data.kind = \"builtin\"; leave one of them out";
                refused(&["data.path", "data.kind"], why.into())
            }
            (_, Some(path)) if path.to_str().is_none() => {
                refused(&["data.path"], "expects a path in Unicode; rename the file".into())
            }
            _ => Ok(()),
        }
    }

    fn check_shares(&self) -> Result<(), ConstraintError> {
        let shares = &self.parallel.shares;
        let batch = self.train.batch;
        if shares.is_empty() {
            return Ok(());
        }
        if self.parallel.balance == Balance::Measured {
            let why = "conflicts with parallel.balance = \"measured\"; leave one of them out";
            return refused(&["parallel.shares", "parallel.balance"], why.into());
        }
        // Summed in u128: the sum of unchecked shares may overflow u64.
        let sum: u128 = shares.iter().map(|share| u128::from(*share)).sum();
        if sum != batch as u128 {
            let why = format!(
                "expects numbers with the sum train.batch = {batch}, got {shares:?}, whose sum is \
                 {sum}"
            );
            return refused(&["parallel.shares", "train.batch"], why);
        }
        Ok(())
    }

    fn check_share_changes(&self) -> Result<(), ConstraintError> {
        let parallel = &self.parallel;
        let changes = match parallel.later_shares() {
            Ok(changes) => changes,
            Err(error) => {
                return refused(&["parallel.share_changes"], format!("is wrong: {error}"));
            }
        };
        let Some(first) = changes.first() else { return Ok(()) };
        if parallel.balance == Balance::Measured {
            let why = "conflicts with parallel.balance = \"measured\"; leave one of them out";
            return refused(&["parallel.share_changes", "parallel.balance"], why.into());
        }
        for key in ["parallel.pipeline_stages", "parallel.tensor_ranks"] {
            if self.value(key) != Some(Value::Whole(1)) {
                let why = format!("is for devices with the whole model; leave it or {key} out");
                return refused(&["parallel.share_changes", key], why);
            }
        }
        if first.step < 2 || !changes.is_sorted_by(|one, next| one.step < next.step) {
            let why = "expects changes in the order of their steps, from step 2 on";
            return refused(&["parallel.share_changes"], why.into());
        }
        let batch = self.train.batch;
        for change in &changes {
            let sum: u64 = change.shares.iter().map(|share| u64::from(*share)).sum();
            if change.shares.contains(&0) || sum != batch as u64 {
                let why = format!(
                    "expects at least 1 sample for each device, with the sum train.batch = \
                     {batch}, got '{change}'"
                );
                return refused(&["parallel.share_changes", "train.batch"], why);
            }
        }
        Ok(())
    }

    fn check_pipeline(&self) -> Result<(), ConstraintError> {
        let Parallel { pipeline_stages, schedule, virtual_stages, blocks_per_stage, .. } =
            &self.parallel;
        let interleaved = *schedule == PipelineSchedule::Interleaved;
        if *pipeline_stages == 1 {
            let default = Parallel::default();
            let (key, given) = if *schedule != default.schedule {
                ("parallel.schedule", format!("\"{schedule}\""))
            } else if *virtual_stages != default.virtual_stages {
                ("parallel.virtual_stages", virtual_stages.to_string())
            } else if *blocks_per_stage != default.blocks_per_stage {
                ("parallel.blocks_per_stage", format!("{blocks_per_stage:?}"))
            } else {
                return Ok(());
            };
            let why = format!(
                "= {given} has no effect without a pipeline; set parallel.pipeline_stages to 2 or \
                 more, or leave it out"
            );
            return refused(&[key, "parallel.pipeline_stages"], why);
        }
        if interleaved && *virtual_stages < 2 {
            let why = format!(
                "= \"{schedule}\" needs several model chunks per device, got \
                 parallel.virtual_stages = {virtual_stages}; set parallel.virtual_stages to 2 or \
                 more, or leave it out"
            );
            return refused(&["parallel.schedule", "parallel.virtual_stages"], why);
        }
        if !interleaved && *virtual_stages > 1 {
            let why = format!(
                "expects 1 with parallel.schedule = \"{schedule}\", got {virtual_stages}; set \
                 parallel.schedule to \"{}\", or leave it out",
                PipelineSchedule::Interleaved
            );
            return refused(&["parallel.virtual_stages", "parallel.schedule"], why);
        }
        Ok(())
    }

    fn check_tensor(&self) -> Result<(), ConstraintError> {
        let Parallel { tensor_ranks, tensor_shares, .. } = &self.parallel;
        let keys = ["parallel.tensor_shares", "parallel.tensor_ranks"];
        let why = if tensor_shares.is_empty() {
            return Ok(());
        } else if *tensor_ranks == 1 {
            format!(
                "= {tensor_shares:?} has no effect without tensor groups; set \
                 parallel.tensor_ranks to {}, or leave it out",
                tensor_shares.len().max(2)
            )
        } else if tensor_shares.len() != *tensor_ranks {
            format!(
                "expects {tensor_ranks} shares, one for each rank of parallel.tensor_ranks = \
                 {tensor_ranks}, got {tensor_shares:?}"
            )
        } else if let Some(share) =
            tensor_shares.iter().find(|share| **share > u64::from(TENSOR_SHARE_MAX))
        {
            format!("expects shares from 1 to {TENSOR_SHARE_MAX}, got {share}")
        } else {
            return Ok(());
        };
        refused(&keys, why)
    }

    /// Checks that a cut has one entry per model chunk. Their sum is compared with the blocks of
    /// the model elsewhere.
    fn check_stages(&self) -> Result<(), ConstraintError> {
        let Parallel { pipeline_stages, virtual_stages, blocks_per_stage, .. } = &self.parallel;
        let count = pipeline_stages * virtual_stages;
        let why = if blocks_per_stage.is_empty() {
            return Ok(());
        } else if let Some(blocks) = blocks_per_stage.iter().find(|blocks| **blocks > BLOCKS_MAX) {
            format!("expects numbers of blocks from 1 to {BLOCKS_MAX}, got {blocks}")
        } else if blocks_per_stage.len() == count {
            return Ok(());
        } else if *virtual_stages == 1 {
            format!(
                "expects {count} numbers of blocks, one for each stage of \
                 parallel.pipeline_stages = {pipeline_stages}, got {blocks_per_stage:?}"
            )
        } else {
            format!(
                "expects {count} numbers of blocks, one for each model chunk of \
                 parallel.pipeline_stages = {pipeline_stages} and parallel.virtual_stages = \
                 {virtual_stages}, got {blocks_per_stage:?}"
            )
        };
        let keys =
            ["parallel.blocks_per_stage", "parallel.pipeline_stages", "parallel.virtual_stages"];
        refused(&keys, why)
    }
}

//! Checks of a configuration: of each key by itself, and between keys.

use super::*;
use potluck_parallel::TENSOR_SHARE_MAX;

impl RunConfig {
    /// Checks each key by itself, then the constraints between keys.
    pub fn check(&self) -> Result<(), ConstraintError> {
        for key in KEYS {
            let Some(value) = (key.get)(self) else { continue };
            if key.accepts.check(value.clone()).is_none() {
                let why = format!("expects {}, got {value}", key.accepts);
                return refused(&[key.full_name], why);
            }
        }
        self.check_scopes()?;
        self.check_pairs()
    }

    /// Returns true if a key has an effect with the kinds of the model and the data.
    pub(super) fn has_effect(&self, of: &Key<Self>) -> bool {
        let Some((other, words)) = of.only else { return true };
        matches!(self.value_of(other), Some(Value::Text(word)) if words.contains(&&*word))
    }

    /// Returns the value of the key of this name, if it has one.
    fn value_of(&self, name: &str) -> Option<Value> {
        (key(name)?.get)(self)
    }

    /// Checks that keys without an effect have their defaults, and that the model is one for the
    /// data.
    fn check_scopes(&self) -> Result<(), ConstraintError> {
        let default = Self::default();
        for key in KEYS {
            let Some((other, words)) = key.only else { continue };
            if (key.get)(self) == (key.get)(&default) || self.has_effect(key) {
                continue;
            }
            let now = match self.value_of(other) {
                Some(now) => now.to_string(),
                None => String::new(),
            };
            let why = format!(
                "has no effect with {other} = {now}, only with {}; leave it out",
                Constraint::OneOf(words)
            );
            return refused(&[key.full_name, other], why);
        }
        let is_of_samples = self.data.kind.sample_format().is_some();
        let (wanted, of) = match self.model.kind {
            ModelKind::Gpt | ModelKind::Rnn if self.data.kind == DataKind::Csv => {
                ("\"mlp\"", "tables")
            }
            ModelKind::Gpt | ModelKind::Rnn if is_of_samples => {
                ("\"mlp\", \"cnn\" or \"resnet\"", "samples")
            }
            ModelKind::Mlp | ModelKind::Cnn | ModelKind::Resnet if !is_of_samples => {
                ("\"gpt\" or \"rnn\"", "texts and tokens")
            }
            ModelKind::Cnn | ModelKind::Resnet if self.data.kind == DataKind::Csv => {
                ("\"mlp\"", "tables")
            }
            _ => return Ok(()),
        };
        let data = self.data.kind.word().unwrap_or_default();
        let why = format!("expects {wanted} for {of} (data.kind = \"{data}\")");
        refused(&[MODEL_KIND, DATA_KIND], why)
    }

    fn check_pairs(&self) -> Result<(), ConstraintError> {
        let model = &self.model;
        let train = &self.train;
        if model.kind == ModelKind::Gpt && !model.width.is_multiple_of(model.heads) {
            let why = format!(
                "expects a number that divides model.width = {}, got {}",
                model.width, model.heads
            );
            return refused(&["model.heads", "model.width"], why);
        }
        if train.micro_batch_size > train.batch {
            let why = format!(
                "expects at most train.batch = {}, got {}",
                train.batch, train.micro_batch_size
            );
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
        self.check_pipeline()?;
        self.check_stages()?;
        self.check_tensor()?;
        let lr = self.optim.lr;
        let min_lr = self.schedule.min_lr;
        if self.schedule.kind != Decay::Constant && min_lr > lr {
            let why = format!("expects at most optim.lr = {lr:?}, got {min_lr:?}");
            return refused(&["schedule.min_lr", "optim.lr"], why);
        }
        for (key, widths) in [("model.hidden", &model.hidden), ("model.channels", &model.channels)]
        {
            if let Some(width) = widths.iter().find(|width| !(1..=WIDTH_MAX).contains(*width)) {
                let why = format!("expects widths from 1 to {WIDTH_MAX}, got {width}");
                return refused(&[key], why);
            }
            if widths.len() > HIDDEN_MAX {
                let why = format!("expects at most {HIDDEN_MAX} layers, got {}", widths.len());
                return refused(&[key], why);
            }
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
        // Summed in u128: the sum of unchecked shares may exceed u64.
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

    /// Checks that tensor groups have a share for each of their ranks.
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

    /// Checks that a cut names as many model chunks as there are. Their sum is compared with the
    /// blocks of the model elsewhere.
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

fn refused(keys: &[&'static str], why: String) -> Result<(), ConstraintError> {
    Err(ConstraintError { keys: keys.to_vec(), why })
}

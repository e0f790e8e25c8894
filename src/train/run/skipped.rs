//! Skipped steps: a non-finite step updates nothing, and many consecutive ones end the run.

use std::sync::Arc;

use super::RunHost;
use crate::error::TrainError;
use crate::loader::BatchSource;
use crate::nonfinite::{NotFinite, OVERFLOW_CAUSE, bad_output, bad_state, first_not_finite};
use crate::runtime::pipelines::{ModelPipelines, PipelineWalk};
use crate::runtime::step::StepInput;
use crate::session::Session;
use crate::trainer::Trainer;
use crate::trainer::steps::SkippedStep;
use potluck_core::Rank;
use potluck_graph::PassKind;
use potluck_kernels::RandomContext;
use potluck_kernels::exec::PassContext;

impl RunHost {
    /// Reports a skipped step, for the first of consecutive ones with the tensor in which the
    /// non-finite value arose, and ends the run after too many of them.
    pub(super) fn handle_skipped(
        &mut self,
        trainer: &Trainer,
        source: &BatchSource,
        skipped: SkippedStep,
    ) -> Result<(), TrainError> {
        let SkippedStep { inputs, reason, count, limit } = skipped;
        let step = trainer.steps();
        let mut text = format!(
            "step {step} was skipped ({count} in a row, the run ends at {limit}): {reason}"
        );
        if count == 1 {
            self.note(format!(
                "step {step} is not finite: rerunning it operation by operation to find the first \
                 such tensor; this may take a while"
            ))?;
            self.began = Diagnosis { session: &trainer.session, source }.diagnose(inputs)?;
            text += &format!("; it began at {}", self.began);
        }
        self.warn(text)?;
        if count < limit {
            return Ok(());
        }
        let checkpoint = trainer.last_save_in(&self.options.out);
        Err(TrainError::Diverged { count, reason, began: self.began.clone(), checkpoint })
    }
}

/// First in the order of a step among the tensors found by ranks, with its rank: the lowest one if
/// several found the same.
fn first_of_ranks(found: Vec<Option<NotFinite>>) -> Option<(NotFinite, Rank)> {
    let mut first: Option<(NotFinite, Rank)> = None;
    for (rank, what) in found.into_iter().enumerate() {
        let Some(what) = what else { continue };
        if first.as_ref().is_none_or(|(earlier, _)| what < *earlier) {
            first = Some((what, Rank(rank as u32)));
        }
    }
    first
}

struct Diagnosis<'a> {
    session: &'a Session,
    source: &'a BatchSource,
}

impl Diagnosis<'_> {
    /// Repeats a skipped step on all devices. Returns the first non-finite tensor in the order of a
    /// step, and of equal ones the lowest rank's; names the device if there are several.
    fn diagnose(&self, inputs: &[Arc<StepInput>]) -> Result<String, TrainError> {
        let inputs = self.with_inputs(inputs)?;
        if self.session.placement.mesh.is_divided() {
            return self.diagnose_pipelines(&self.session.pipelines, &inputs);
        }
        let began = self.session.group.run_on_all("a diagnosis", move |rank, device| {
            first_not_finite(device, &inputs[rank.index()])
        })?;
        let ranks = &self.session.placement.ranks;
        Ok(match first_of_ranks(began) {
            Some((what, _)) if ranks.len() == 1 => what.to_string(),
            Some((what, rank)) => {
                let index = rank.index();
                format!("{what} on rank {index}, {}", ranks[index].name)
            }
            None => OVERFLOW_CAUSE.into(),
        })
    }

    /// Inputs of all ranks, including those whose nodes have read their own: a diagnosis sends
    /// inputs to all devices from here.
    fn with_inputs(&self, inputs: &[Arc<StepInput>]) -> Result<Vec<Arc<StepInput>>, TrainError> {
        let mut all = Vec::with_capacity(inputs.len());
        for input in inputs {
            let parts = &input.program.micro_batches;
            if input.micro_batches.len() == parts.len() {
                all.push(Arc::clone(input));
                continue;
            }
            let mut micro_batches = Vec::with_capacity(parts.len());
            for part in parts {
                micro_batches.push(self.source.micro_batch(input.round.step, part)?);
            }
            all.push(Arc::new(StepInput { micro_batches, ..(**input).clone() }));
        }
        Ok(all)
    }

    /// Repeats a skipped step on pipelines, micro-batch by micro-batch through the stages.
    fn diagnose_pipelines(
        &self,
        pipelines: &ModelPipelines,
        inputs: &[Arc<StepInput>],
    ) -> Result<String, TrainError> {
        let of_rank = inputs.to_vec();
        let states = self.session.group.run_on_all("a diagnosis", move |rank, device| {
            let state = bad_state(device, &of_rank[rank.index()].program)?;
            device.begin_step()?;
            Ok(state)
        })?;
        let state = first_of_ranks(states);
        let found = match state {
            Some((NotFinite::Parameter(_), _)) => state,
            _ => self.bad_pass(pipelines, inputs)?.or(state),
        };
        Ok(match found {
            Some((what, rank)) => {
                let placement = &self.session.placement;
                let stage = placement.mesh.coordinates(rank).pipeline;
                let name = &placement.ranks[rank.index()].name;
                format!("{what} on stage {stage} ({rank}, {name})")
            }
            None => OVERFLOW_CAUSE.into(),
        })
    }

    /// First non-finite activation, with the rank that computes it.
    fn bad_pass(
        &self,
        pipelines: &ModelPipelines,
        inputs: &[Arc<StepInput>],
    ) -> Result<Option<(NotFinite, Rank)>, TrainError> {
        for (pipeline, stages) in pipelines.stages.iter().enumerate() {
            let first = &inputs[stages.groups[0][0].index()];
            let step_key = first.run_key.step(first.round.step);
            let random = RandomContext { step_key, training: true };
            for (micro_batch, of_batch) in first.program.micro_batches.iter().enumerate() {
                let loaded = |rank: Rank| inputs[rank.index()].inputs_of(micro_batch);
                let pass = PassContext {
                    micro_batch,
                    rows: of_batch.rows as usize,
                    loss_scale: first.loss_scale,
                    random,
                };
                let passes =
                    &[PassKind::Forward, PassKind::BackwardInput, PassKind::BackwardWeight];
                let walk = PipelineWalk { pipeline, passes, inputs: &loaded, pass, left_out: None };
                let found = pipelines.walk(&self.session.group, walk, bad_output)?;
                if let Some((rank, what)) = found {
                    return Ok(Some((NotFinite::Activation(what), rank)));
                }
            }
        }
        Ok(None)
    }
}

//! Messages of a run about itself and its devices.

use super::Run;
use crate::data::Split;
use crate::metrics::RankRecord;
use crate::optim::Decay;
use crate::parallel::RankPlacement;
use crate::runtime::step::StepReport;
use crate::ui::ranks::RankDisplay;

impl Run {
    /// Prints the model, the data, the devices and the directory of the run.
    pub fn print_summary(&self) {
        let data = &self.source.data;
        let micro_batches = match self.programs[0].micro_batches.len() {
            count if count > 1 && self.placement.ranks.len() == 1 => {
                format!(" in {count} micro-batches")
            }
            _ => String::new(),
        };
        self.progress.note(&format!(
            "{}; {} training tokens, vocabulary {}; \
             batch {}{micro_batches}; on {}; in {}",
            self.spec.model.summary,
            data.tokens(Split::Train).len(),
            data.tokenizer().vocabulary(),
            self.spec.batch,
            self.placement.devices(),
            self.options.out.display()
        ));
        if self.placement.ranks.len() > 1 {
            self.progress.note(&self.shares_line());
        }
        self.print_end_notes();
    }

    /// Returns a line with each device's samples per step.
    fn shares_line(&self) -> String {
        let share = |placed: &RankPlacement| format!("{} {}", placed.name, placed.share);
        let shares: Vec<String> = self.placement.ranks.iter().map(share).collect();
        format!("samples per step: {}", shares.join(", "))
    }

    /// Prints notes for a user who resumes with another number of steps: that no step is left to
    /// do, or that the learning rate falls no further.
    fn print_end_notes(&self) {
        let (steps, decay_steps) = (self.spec.steps, self.spec.schedule.decay_steps);
        if self.step > 0 && self.step >= steps {
            let step = self.step;
            self.progress.note(&format!(
                "step {step} of {steps} is done already: nothing is left to train; to continue, \
                 give --steps a larger number"
            ));
        } else if self.step > 0
            && steps > decay_steps
            && self.spec.schedule.decay != Decay::Constant
        {
            let lr = self.spec.schedule.min_lr;
            self.progress.note(&format!(
                "the learning rate stays at {lr} from step {decay_steps} on, where its schedule \
                 ends; to stretch it, add --set schedule.decay_steps={steps}"
            ));
        }
    }

    /// Returns the metrics of each rank; empty for a single rank.
    pub(super) fn ranks(&self, reports: &[StepReport]) -> Vec<RankRecord> {
        let record = |(placed, report): (&RankPlacement, &StepReport)| RankRecord {
            share: u64::from(placed.share),
            work_ms: 1e3 * (report.time - report.waited).as_secs_f64(),
            wait_ms: 1e3 * report.waited.as_secs_f64(),
        };
        let several = self.placement.ranks.len() > 1;
        self.placement.ranks.iter().zip(reports).filter(|_| several).map(record).collect()
    }

    /// Returns the display of each rank; empty for a single rank.
    pub(super) fn shown_ranks(&self, reports: &[StepReport]) -> Vec<RankDisplay> {
        let shown = |(placed, report): (&RankPlacement, &StepReport)| {
            let (whole, waited) = (report.time.as_secs_f64(), report.waited.as_secs_f64());
            RankDisplay {
                name: placed.name.clone(),
                share: u64::from(placed.share),
                samples_per_s: f64::from(placed.share) / (whole - waited),
                wait: waited / whole,
            }
        };
        let several = self.placement.ranks.len() > 1;
        self.placement.ranks.iter().zip(reports).filter(|_| several).map(shown).collect()
    }
}

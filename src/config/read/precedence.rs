//! Keys of lower precedence that a later key supersedes.

use super::{ConfigReader, Origin, Resolved, RunConfig, key};
use crate::config::schema::{Balance, DataKind};
use crate::parallel::PipelineSchedule;

impl ConfigReader {
    /// Drops what later keys supersede; `saved` is the configuration of a run that is resumed.
    pub(super) fn drop_superseded(&mut self, saved: Option<&Resolved>) {
        self.drop_path_of_builtin();
        self.drop_shares_of_measured();
        self.drop_keys_of_other_schedule();
        self.drop_shares_of_other_devices(saved);
        // A cut is one of so many chunks.
        let typed = self.typed();
        self.config.derive_chunks(&typed);
        self.drop_stages_of_other_devices(saved);
    }

    /// Returns true if `key` was set by a flag after `other`, or with a higher precedence. In one
    /// file no key is the later one.
    fn overrules(&self, key: &str, other: &str) -> bool {
        let (origin, other) = (self.origin(key), self.origin(other));
        let one_file = matches!((&origin, &other), (Origin::File(..), Origin::File(..)));
        origin > other && !one_file
    }

    /// Drops a `data.path` of lower precedence (in the file or in the checkpoint) if the built-in
    /// corpus was selected later. Both in one file, or the path later, is a contradiction.
    fn drop_path_of_builtin(&mut self) {
        let is_builtin = self.config.data.kind == DataKind::Builtin;
        if is_builtin && self.overrules("data.kind", "data.path") {
            self.config.data.path = None;
            self.forget("data.path");
        }
    }

    /// Drops the `parallel.shares` set before a flag that selects measured shares.
    fn drop_shares_of_measured(&mut self) {
        let (balance, shares) = (self.origin("parallel.balance"), self.origin("parallel.shares"));
        let by_flag = matches!(balance, Origin::Flag(..)) && balance > shares;
        if self.config.parallel.balance == Balance::Measured && by_flag {
            self.reset("parallel.shares");
        }
    }

    /// Drops the keys of a pipeline that were set before one that leaves them without effect:
    /// `parallel.pipeline_stages = 1`, or a schedule with one model chunk per device.
    fn drop_keys_of_other_schedule(&mut self) {
        if self.config.parallel.pipeline_stages == 1 {
            for key in ["parallel.schedule", "parallel.virtual_stages", "parallel.blocks_per_stage"]
            {
                if self.overrules("parallel.pipeline_stages", key) {
                    self.reset(key);
                }
            }
        }
        let is_interleaved = self.config.parallel.schedule == PipelineSchedule::Interleaved;
        if !is_interleaved && self.overrules("parallel.schedule", "parallel.virtual_stages") {
            self.reset("parallel.virtual_stages");
        }
    }

    /// Drops the saved `parallel.shares`, which are those of the saved devices or pipelines, if
    /// others are set now.
    fn drop_shares_of_other_devices(&mut self, saved: Option<&Resolved>) {
        let is_other = |saved: &Resolved| {
            normalized_devices(&saved.config) != normalized_devices(&self.config)
                || saved.config.parallel.pipeline_stages != self.config.parallel.pipeline_stages
        };
        let is_set = ["parallel.shares", "parallel.balance"]
            .iter()
            .any(|key| self.origins.contains_key(key));
        let is_empty = self.config.parallel.shares.is_empty();
        if saved.is_some_and(is_other) && !is_set && !is_empty {
            self.reset("parallel.shares");
            self.reset("parallel.balance");
        }
    }

    /// Drops the saved `parallel.blocks_per_stage`, which are those of the saved devices and model chunks,
    /// if others are set now.
    fn drop_stages_of_other_devices(&mut self, saved: Option<&Resolved>) {
        let chunks =
            |config: &RunConfig| (config.parallel.pipeline_stages, config.parallel.virtual_stages);
        let is_other = |saved: &Resolved| {
            normalized_devices(&saved.config) != normalized_devices(&self.config)
                || chunks(&saved.config) != chunks(&self.config)
        };
        if saved.is_some_and(is_other) && !self.origins.contains_key("parallel.blocks_per_stage") {
            self.reset("parallel.blocks_per_stage");
        }
    }

    /// Gives a key its default, as if it had never been set.
    fn reset(&mut self, name: &str) {
        if let Some(key) = key(name)
            && let Some(default) = (key.get)(&RunConfig::default())
        {
            (key.set)(&mut self.config, default);
        }
        self.forget(name);
    }

    /// Takes a key from those that were set, now or before.
    fn forget(&mut self, key: &str) {
        self.origins.remove(key);
        if let Some(before) = &mut self.before {
            before.remove(key);
        }
    }
}

/// Returns the device selector in the spelling in which equal ones are compared.
fn normalized_devices(config: &RunConfig) -> String {
    config.parallel.devices.replace(' ', "").to_lowercase()
}

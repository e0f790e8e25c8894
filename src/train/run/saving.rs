//! Files of a run besides its checkpoints and its record.

use std::fs;
use std::path;

use super::Run;
use crate::error::TrainError;
use crate::resolved::resolved_toml;
use potluck_core::files;

/// Version of potluck, for resolved.toml.
const VERSION: &str = env!("CARGO_PKG_VERSION");

const RUN_TOML: &str = "run.toml";
const RESOLVED_TOML: &str = "resolved.toml";

/// Names of the files that a run writes into its directory at its start, in place of others.
pub const OWN_FILES: [&str; 2] = [RUN_TOML, RESOLVED_TOML];

/// Start of the line of `run.toml` that names the initial model.
const STARTED_FROM: &str = "# Started from ";

impl Run {
    /// Writes `run.toml` (the configuration) and `resolved.toml` (the decisions).
    pub(super) fn write_files(&self) -> Result<(), TrainError> {
        let decided = resolved_toml(
            &self.trainer.session.placement,
            &self.trainer.data,
            &self.trainer.files,
            VERSION,
        );
        let configuration = self.origin() + &self.spec.run_toml;
        let files = [(RUN_TOML, configuration), (RESOLVED_TOML, decided)];
        for (name, text) in files {
            let path = self.host.options.out.join(name);
            files::replace(&path, text.as_bytes()).map_err(|why| TrainError::Io { path, why })?;
        }
        Ok(())
    }

    /// Line that names the initial model, also of a run that continues in its directory; empty if
    /// there is no initial model.
    fn origin(&self) -> String {
        if let Some(model) = &self.host.options.init {
            let named = model.path();
            let path = path::absolute(named).unwrap_or_else(|_| named.to_path_buf());
            return format!("{STARTED_FROM}{path:?}, by --init\n");
        }
        if self.host.options.continued.is_none() {
            return String::new();
        }
        // Only a comment is lost: an unreadable file is treated as having none.
        let before = fs::read_to_string(self.host.options.out.join(RUN_TOML)).unwrap_or_default();
        match before.split_inclusive('\n').next() {
            Some(line) if line.starts_with(STARTED_FROM) => line.to_string(),
            _ => String::new(),
        }
    }
}

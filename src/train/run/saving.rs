//! Files of a run besides its checkpoints and its record.

use super::Run;
use crate::error::TrainError;
use crate::resolved::resolved_toml;
use potluck_core::files;

/// Version of potluck, as resolved.toml records it.
const VERSION: &str = env!("CARGO_PKG_VERSION");

impl Run {
    /// Writes `run.toml` (the configuration) and `resolved.toml` (the decisions).
    pub(super) fn write_files(&self) -> Result<(), TrainError> {
        let decided = resolved_toml(
            &self.trainer.session.placement,
            &self.trainer.data,
            &self.trainer.files,
            VERSION,
        );
        let files = [("run.toml", self.spec.run_toml.clone()), ("resolved.toml", decided)];
        for (name, text) in files {
            let path = self.host.options.out.join(name);
            files::replace(&path, text.as_bytes()).map_err(|why| TrainError::Io { path, why })?;
        }
        Ok(())
    }
}

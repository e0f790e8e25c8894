//! Signals to `potluck train` while the run itself does not look at them: before its first step,
//! and when it does not end soon enough after SIGTERM.

use std::fs;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::InterruptedError;
use crate::ui::terminal::{print_error, print_line};
use potluck_train::error::TrainError;
use potluck_train::nodes::{RunFailure, RunNodes};
use potluck_train::run::RunSignals;
use potluck_train::runtime::error::EXIT_RESTART;
use potluck_train::signals::{Interruption, TermDeadline, leave};

/// Run whose signals are watched.
pub struct WatchedRun {
    pub signals: RunSignals,
    pub nodes: Option<Arc<RunNodes>>,
    /// Directories that were made for the run.
    pub created: Vec<PathBuf>,
    /// Longest time between SIGTERM and the end of the run.
    pub term_timeout: Duration,
}

impl WatchedRun {
    /// Starts to watch, until the process ends.
    ///
    /// # Errors
    /// Returns `TrainError::System` if there are no more threads.
    pub fn watch(self) -> Result<(), TrainError> {
        let mut deadline = TermDeadline::new(self.term_timeout);
        self.signals.flags.clone().watch(move |signals| {
            let has_begun = self.signals.has_begun.load(Ordering::SeqCst);
            if let Some(signal) = signals.pending()
                && !has_begun
            {
                self.leave_before_start(signal);
            }
            if deadline.is_over(signals) {
                let why = deadline.message();
                print_error(&why);
                self.end_nodes(why, EXIT_RESTART);
                leave(EXIT_RESTART);
            }
            ControlFlow::Continue(())
        })?;
        Ok(())
    }

    /// Ends the nodes and this process while devices are opened and measured.
    fn leave_before_start(&self, signal: Interruption) -> ! {
        let why = InterruptedError(signal).to_string();
        print_line(&why);
        self.end_nodes(why, signal.exit_code());
        for directory in &self.created {
            // Fails if there is something in it.
            let _ = fs::remove_dir(directory);
        }
        leave(signal.exit_code());
    }

    fn end_nodes(&self, why: String, exit_code: i32) {
        if let Some(nodes) = &self.nodes {
            nodes.end(&Err(RunFailure { why, exit_code }));
        }
    }
}

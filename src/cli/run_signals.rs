//! Signals to `potluck train` that the run itself does not handle: before its first step, and if it
//! does not end in time after SIGTERM.

use std::fs;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use super::InterruptedError;
use crate::ui::terminal::{print_error, print_line};
use potluck_core::Lock;
use potluck_train::error::TrainError;
use potluck_train::nodes::{RunFailure, RunNodes};
use potluck_train::run::RunSignals;
use potluck_train::runtime::error::EXIT_RESTART;
use potluck_train::signals::{Interruption, SignalFlags, TermDeadline, leave};

/// Watch over the signals of a command that trains or plans, until the process ends.
#[derive(Clone)]
pub struct SignalWatch(Arc<Lock<WatchedRun>>);

struct WatchedRun {
    signals: RunSignals,
    /// True during the wait for other nodes, which handles signals.
    is_meeting: bool,
    nodes: Option<Arc<RunNodes>>,
    /// Directories created for the run.
    created: Vec<PathBuf>,
}

impl SignalWatch {
    /// Starts to watch. The run must end within `term_timeout` after SIGTERM.
    ///
    /// # Errors
    /// Returns `TrainError::System` if there are no more threads.
    pub fn start(flags: SignalFlags, term_timeout: Duration) -> Result<Self, TrainError> {
        let signals = RunSignals { flags: flags.clone(), ..RunSignals::default() };
        let run = WatchedRun { signals, is_meeting: false, nodes: None, created: Vec::new() };
        let watch = Self(Arc::new(Lock::new(run)));
        let watched = watch.clone();
        let mut deadline = TermDeadline::new(term_timeout);
        // The run's flags have those of other nodes later, which have deadlines of their own.
        let own = flags.clone();
        flags.watch(move |_| {
            let run = watched.0.lock();
            if let Some(signal) = run.ends_before_start() {
                run.leave_before_start(signal);
            }
            if deadline.is_over(&own) {
                let why = deadline.message();
                print_error(&why);
                run.end_nodes(why, EXIT_RESTART);
                leave(EXIT_RESTART);
            }
            ControlFlow::Continue(())
        })?;
        Ok(watch)
    }

    /// Records the directories created for the run, and the start of the wait for other nodes,
    /// which must handle the returned signals.
    pub fn meet(&self, created: &[PathBuf]) -> SignalFlags {
        let mut run = self.0.lock();
        run.created = created.to_vec();
        run.is_meeting = true;
        run.signals.flags.clone()
    }

    /// Records the end of the wait with the other nodes, if there are any; returns the signals of
    /// all nodes.
    pub fn met(&self, nodes: Option<&Arc<RunNodes>>) -> RunSignals {
        let mut run = self.0.lock();
        run.is_meeting = false;
        if let Some(nodes) = nodes {
            let flags = run.signals.flags.clone();
            run.signals.flags = flags.with(nodes.signals());
            run.nodes = Some(nodes.clone());
        }
        run.signals.clone()
    }

    /// Waits for the end of the process if a signal is about to end it: an error of the run is then
    /// a result of the end of the other nodes.
    pub fn settle(&self) {
        while self.0.lock().ends_before_start().is_some() {
            thread::park();
        }
    }
}

impl WatchedRun {
    /// Pending signal if neither the wait for nodes nor the run handles it.
    fn ends_before_start(&self) -> Option<Interruption> {
        if self.is_meeting || self.signals.has_begun.load(Ordering::SeqCst) {
            return None;
        }
        self.signals.flags.pending()
    }

    /// Ends the nodes and this process, which may be reading files or opening devices.
    fn leave_before_start(&self, signal: Interruption) -> ! {
        let why = InterruptedError(signal).to_string();
        print_line(&why);
        self.end_nodes(why, signal.exit_code());
        for directory in &self.created {
            // Fails if it is not empty.
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

//! Signals to `potluck train` while the run itself does not look at them: before its first step,
//! and when it does not end soon enough after SIGTERM.

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

/// Watch over the signals of a command that trains, until the process ends.
#[derive(Clone)]
pub struct SignalWatch(Arc<Lock<WatchedRun>>);

struct WatchedRun {
    signals: RunSignals,
    /// True while others are awaited, who are told of a signal in order.
    is_meeting: bool,
    nodes: Option<Arc<RunNodes>>,
    /// Directories that were made for the run.
    created: Vec<PathBuf>,
}

impl SignalWatch {
    /// Starts to watch. Within `term_timeout` after SIGTERM the run has to end.
    ///
    /// # Errors
    /// Returns `TrainError::System` if there are no more threads.
    pub fn start(flags: SignalFlags, term_timeout: Duration) -> Result<Self, TrainError> {
        let signals = RunSignals { flags: flags.clone(), ..RunSignals::default() };
        let run = WatchedRun { signals, is_meeting: false, nodes: None, created: Vec::new() };
        let watch = Self(Arc::new(Lock::new(run)));
        let watched = watch.clone();
        let mut deadline = TermDeadline::new(term_timeout);
        flags.watch(move |_| {
            let run = watched.0.lock();
            if let Some(signal) = run.ends_before_start() {
                run.leave_before_start(signal);
            }
            if deadline.is_over(&run.signals.flags) {
                let why = deadline.message();
                print_error(&why);
                run.end_nodes(why, EXIT_RESTART);
                leave(EXIT_RESTART);
            }
            ControlFlow::Continue(())
        })?;
        Ok(watch)
    }

    /// Takes note of the directories that were made for the run, and that others are awaited: who
    /// awaits them looks at the signals, which are returned.
    pub fn meet(&self, created: &[PathBuf]) -> SignalFlags {
        let mut run = self.0.lock();
        run.created = created.to_vec();
        run.is_meeting = true;
        run.signals.flags.clone()
    }

    /// Takes note of the other nodes, if there are any; returns the signals of all.
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

    /// Waits for the end of the process if a signal is about to end it: what failed meanwhile fails
    /// because the other nodes are ended.
    pub fn settle(&self) {
        while self.0.lock().ends_before_start().is_some() {
            thread::park();
        }
    }
}

impl WatchedRun {
    /// Returns the signal that ends a run to which nobody else looks yet.
    fn ends_before_start(&self) -> Option<Interruption> {
        if self.is_meeting || self.signals.has_begun.load(Ordering::SeqCst) {
            return None;
        }
        self.signals.flags.pending()
    }

    /// Ends the nodes and this process while files are read, or devices opened and measured.
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

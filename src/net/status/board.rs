//! Board with the state of a run: the newest snapshot, which is replaced as a whole.

use std::sync::Arc;
use std::time::Instant;

use arc_swap::{ArcSwap, ArcSwapOption};

use super::run_status::RunStatus;
use crate::nodes::{LinkBoard, LinksStatus};
use potluck_core::Lock;
use potluck_core::metrics::{Event, MetricsError, Sink};

/// State of a run, written by the run and read by monitoring. Readers take snapshots by atomic
/// operations: no writer waits for them.
pub struct StatusBoard {
    /// Taken by the threads of the run only.
    writing: Lock<RunStatus>,
    shown: ArcSwap<RunStatus>,
    links: ArcSwapOption<ArcSwap<LinksStatus>>,
}

/// Snapshot of the whole state.
#[derive(Clone, Debug)]
pub struct StatusView {
    pub run: Arc<RunStatus>,
    /// `None` if there are no other nodes.
    pub links: Option<Arc<LinksStatus>>,
    /// Time of the snapshot.
    pub now: Instant,
}

impl StatusBoard {
    pub fn new(status: RunStatus) -> Self {
        let shown = ArcSwap::from_pointee(status.clone());
        Self { writing: Lock::new(status), shown, links: ArcSwapOption::empty() }
    }

    /// Changes the state.
    pub fn update(&self, change: impl FnOnce(&mut RunStatus)) {
        let mut status = self.writing.lock();
        change(&mut status);
        self.shown.store(Arc::new(status.clone()));
    }

    /// Shows the links to other nodes too.
    pub fn set_links(&self, links: LinkBoard) {
        self.links.store(Some(links));
    }

    /// Returns the newest state.
    pub fn view(&self) -> StatusView {
        StatusView {
            run: self.shown.load_full(),
            links: self.links.load().as_ref().map(|links| links.load_full()),
            now: Instant::now(),
        }
    }
}

/// Sink that records events on a board before it hands them on.
pub struct StatusSink {
    pub board: Arc<StatusBoard>,
    pub shown: Box<dyn Sink>,
}

impl Sink for StatusSink {
    fn event(&mut self, event: &Event) -> Result<(), MetricsError> {
        self.board.update(|status| status.take(event, Instant::now()));
        self.shown.event(event)
    }

    fn forget_evaluations(&mut self, step: u64) {
        self.shown.forget_evaluations(step);
    }
}

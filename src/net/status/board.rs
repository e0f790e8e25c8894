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

    /// Shows no links, until there are others.
    pub fn clear_links(&self) {
        self.links.store(None);
    }

    /// Returns the newest state.
    pub fn view(&self) -> StatusView {
        let mut run = self.shown.load_full();
        let links = self.links.load().as_ref().map(|links| links.load_full());
        if links.as_ref().is_some_and(|links| links.is_over) {
            let mut alone = RunStatus::clone(&run);
            alone.nodes = Arc::new(run.nodes.alone());
            run = Arc::new(alone);
        }
        StatusView { run, links, now: Instant::now() }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::run_status::tests::status;
    use crate::status::{StatusNode, StatusNodes};
    use potluck_core::NodeRank;

    #[test]
    fn lost_nodes_are_not_shown_when_the_first_one_goes_on_alone() {
        let board = StatusBoard::new(status());
        let nodes = [0, 1].map(|node| StatusNode {
            node: NodeRank(node),
            host: "desk".into(),
            devices: vec!["cpu".into()],
        });
        let nodes = Arc::new(StatusNodes {
            you: Some(NodeRank(0)),
            nodes: nodes.to_vec(),
            ..StatusNodes::default()
        });
        board.update(|status| status.nodes = nodes);
        let links = LinkBoard::default();
        board.set_links(links.clone());
        assert_eq!(board.view().run.nodes.nodes.len(), 2);
        links.store(Arc::new(LinksStatus { is_over: true, ..LinksStatus::default() }));
        let view = board.view();
        assert_eq!(view.run.nodes.nodes.len(), 1);
        assert!(view.links.unwrap().links.is_empty());
    }
}

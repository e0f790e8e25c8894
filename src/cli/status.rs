//! State of a run over HTTP: `--status`.

use std::sync::Arc;
use std::time::Duration;

use super::UsageError;
use super::args::WatchedArgs;
use crate::ui::terminal::print_line;
use potluck_core::metrics::Sink;
use potluck_core::{Generation, NodeRank};
use potluck_net::cluster::Roster;
use potluck_net::nodes::{LinkBoard, host_name};
use potluck_net::status::{
    Patience, RunAbout, RunPhase, RunStatus, StatusBoard, StatusNode, StatusNodes, StatusServer,
    StatusSink, StatusToken,
};
use potluck_train::spec::RunSpec;

/// Longest silences of a joining node until it has the configuration of the run.
const PATIENCE_AT_FIRST: Patience =
    Patience { node: Duration::from_secs(30), device: Duration::from_secs(300) };

/// State of the run, with the server that publishes it.
pub struct ShownStatus {
    board: Arc<StatusBoard>,
    /// Ends with the process's last run.
    _server: StatusServer,
}

impl ShownStatus {
    /// Starts to publish the state of a run if `--status` is given. A joining node has no
    /// specification yet.
    ///
    /// # Errors
    /// Returns `UsageError` for an unusable address, one that needs a token, and an unusable file
    /// of a token.
    pub fn start(
        args: &WatchedArgs,
        about: RunAbout,
        spec: Option<&RunSpec>,
        quiet: bool,
    ) -> Result<Option<Self>, UsageError> {
        let Some(address) = args.status else { return Ok(None) };
        let mut token = None;
        if let Some(file) = &args.status_token_file {
            let read = StatusToken::read_file(file)
                .map_err(|error| UsageError(format!("--status-token-file {error}")))?;
            token = Some(read);
        }
        let patience = spec.map_or(PATIENCE_AT_FIRST, patience);
        let board = Arc::new(StatusBoard::new(RunStatus::new(about, patience, spec.is_some())));
        let server = StatusServer::start(address, token, board.clone())
            .map_err(|error| UsageError(format!("--status: {error}")))?;
        // A port chosen by the system must be shown even with --quiet.
        if !quiet || address.port() == 0 {
            print_line(&format!("the state of the run is at http://{}/status", server.address()));
        }
        Ok(Some(Self { board, _server: server }))
    }

    /// Records that a joining node waits for its next run.
    pub fn waits(&self) {
        self.board.clear_links();
        self.board.update(|status| status.wait_for_next(PATIENCE_AT_FIRST));
    }

    /// Records that a run of one node opens its devices.
    pub fn opens(&self, devices: Vec<String>) {
        let node = StatusNode { node: NodeRank(0), host: host_name(), devices };
        self.open(NodeRank(0), Generation::default(), vec![node]);
    }

    /// Records that all nodes are connected and open their devices; this one is `you`.
    pub fn meets(&self, you: NodeRank, roster: &Roster, links: LinkBoard) {
        let mut nodes = Vec::new();
        for node in &roster.nodes {
            let devices = node.devices.iter().map(|device| device.name.clone()).collect();
            nodes.push(StatusNode { node: node.node, host: node.host.clone(), devices });
        }
        self.board.set_links(links);
        self.open(you, roster.generation, nodes);
    }

    fn open(&self, you: NodeRank, generation: Generation, nodes: Vec<StatusNode>) {
        let nodes = Arc::new(StatusNodes { you: Some(you), generation, nodes });
        self.board.update(|status| {
            status.nodes = nodes;
            status.phase = RunPhase::Opening;
        });
    }

    /// Returns a function that sets the longest silences by the specification of the run.
    pub fn specify(&self) -> impl Fn(&RunSpec) + use<> {
        let board = self.board.clone();
        move |spec| board.update(|status| status.patience = patience(spec))
    }

    /// Returns a sink that records events in this state and passes them to another sink.
    pub fn sink(&self, shown: Box<dyn Sink>) -> Box<dyn Sink> {
        Box::new(StatusSink { board: self.board.clone(), shown })
    }
}

fn patience(spec: &RunSpec) -> Patience {
    Patience { node: spec.node_timeout, device: spec.opening.deadline }
}

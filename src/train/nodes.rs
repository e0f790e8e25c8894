//! Runs over several machines: messages of the first node to the others about a run, and the
//! participation of another node.

use std::borrow::Cow;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use std::{fmt, thread};

use serde::{Deserialize, Serialize};

use super::error::TrainError;
use super::loader::BatchSource;
use super::run::RunOutcome;
use super::run_data::{RunData, SavedData};
use super::signals::{Interruption, SignalFlags, TermDeadline, leave};
use super::spec::RunSpec;
use crate::families::DataShape;
use crate::runtime::RuntimeError;
use crate::runtime::error::EXIT_RESTART;
use crate::runtime::placement::candidates::selections;
use crate::runtime::remote::RemoteNodes;
use crate::runtime::remote::first::RemoteNode;
use crate::runtime::remote::node::{NodeEnd, NodeHost, NodeInput, NodeOffer, NodeServer};
use crate::runtime::remote::own_inputs::InputSource;
use crate::runtime::remote::waiting::{ANSWER_TIMEOUT_MIN, NodeLiveness};
use crate::runtime::remote::wire::ToFirst;
use crate::runtime::step::Inputs;
use potluck_core::faults::Faults;
use potluck_core::metrics::{EvalRecord, Event, MetricsError, Sink, StepRecord};
use potluck_core::{Lock, NodeRank, TensorId, decode};
use potluck_graph::Graph;
use potluck_net::cluster::{ClusterEnd, Loss, Roster, SENTENCE_BYTES_MAX, shown_text};
use potluck_net::nodes::{ClusterEvent, ClusterHandle, FrameReceiver, NodeConnection, NodeLink};
use potluck_parallel::MicroBatch;
use potluck_parallel::comm::Mailbox;

const INBOX_MAX: usize = 1 << 16;
/// Longest time a node may work after the end of its cluster: its devices close within 6 seconds.
const ENDING_MAX: Duration = Duration::from_secs(20);
const ENDING_INTERVAL: Duration = Duration::from_millis(50);

#[derive(Debug, Serialize, Deserialize)]
struct RunDescription {
    /// Resolved configuration, as TOML.
    config: String,
    shape: DataShape,
    data: RunDataDescription,
}

/// Data of a run, for nodes with their own copy.
#[derive(Debug, Serialize, Deserialize)]
struct RunDataDescription {
    fingerprint: String,
    /// [`SavedData`] with which the first node has prepared the data, as JSON.
    saved: String,
    /// Steps and samples of the run before this start.
    done: (u64, u64),
}

/// Failure of a run, for the users of other nodes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunFailure {
    pub why: String,
    pub exit_code: i32,
}

/// Result of the common work of nodes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum NodesResult {
    Run(RunOutcome),
    /// The run was only planned.
    Plan,
}

/// End of the common work, for the users of other nodes.
pub type NodeOutcome = Result<NodesResult, RunFailure>;

fn decode_outcome(bytes: &[u8]) -> Result<NodeOutcome, TrainError> {
    let outcome: NodeOutcome = decode(bytes)
        .map_err(|why| TrainError::Defect(format!("the run ended with no outcome: {why}")))?;
    Ok(outcome.map_err(|failure| RunFailure { why: shown(&failure.why), ..failure }))
}

// ---- The first node ----

/// Other nodes of a run, as seen by its first node.
pub struct RunNodes {
    nodes: Vec<Arc<RemoteNode>>,
    remote: Lock<RemoteNodes>,
    /// Set by signals on other nodes.
    signals: SignalFlags,
    cluster: Lock<ClusterHandle>,
}

impl fmt::Debug for RunNodes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} other nodes", self.nodes.len())
    }
}

/// Cluster of a started run, at its first node.
pub struct ClusterLinks<'a> {
    pub roster: &'a Roster,
    /// Name of the run.
    pub run: String,
    /// Links to all other nodes.
    pub links: Vec<(NodeRank, Arc<NodeLink>)>,
}

impl RunNodes {
    /// Takes over the links of a started cluster, at its first node. A node that neither answers
    /// nor shows progress for `node_timeout` is lost. `show` receives notes for the user.
    ///
    /// # Errors
    /// Returns `RuntimeError` if a thread cannot be started.
    pub fn start(
        cluster: ClusterHandle,
        frames: &FrameReceiver,
        links: ClusterLinks,
        node_timeout: Duration,
        show: fn(&str),
    ) -> Result<Arc<Self>, RuntimeError> {
        let ClusterLinks { roster, run, links } = links;
        let (signals, raise) = SignalFlags::raised();
        let give_up = Arc::new(cluster.giving_up());
        let answer_timeout = node_timeout.max(ANSWER_TIMEOUT_MIN);
        let mut nodes = Vec::new();
        for (number, link) in links {
            let host = roster.node(number).map(|node| node.host.clone()).unwrap_or_default();
            let connection: Arc<dyn NodeConnection> = link.clone();
            let raise = raise.clone();
            let give_up = give_up.clone();
            let watch = NodeLiveness {
                answer_timeout,
                on_signal: Box::new(move |signal| raise(signal)),
                give_up: Box::new(move |why| give_up(number, why)),
            };
            let node = RemoteNode::new(number.0, &host, connection, frames.clone(), watch);
            let node = Arc::new(node);
            let receiving = Arc::downgrade(&node);
            link.receive_with(Arc::new(move |message: Vec<u8>| match receiving.upgrade() {
                Some(node) => node.receive(&message),
                None => Ok(()),
            }));
            nodes.push(node);
        }
        let news = cluster.news.clone();
        let watched = nodes.clone();
        thread::Builder::new()
            .name("news of nodes".into())
            .spawn(move || watch(&news, &watched, show))
            .map_err(|why| RuntimeError::InvalidRequest(format!("no more threads: {why}")))?;
        let hosts = roster.nodes.iter().map(|node| node.host.clone()).collect();
        let remote = RemoteNodes { nodes: nodes.clone(), devices: Vec::new(), run, hosts };
        let remote = Lock::new(remote);
        Ok(Arc::new(Self { nodes, remote, signals, cluster: Lock::new(cluster) }))
    }

    /// Sends the description of the run to all nodes, and requests their devices. `done` are the
    /// steps and samples of the run so far.
    ///
    /// # Errors
    /// Returns `TrainError` if a node cannot take part or is lost.
    pub fn begin(
        &self,
        spec: &RunSpec,
        data: &RunData,
        done: (u64, u64),
    ) -> Result<(), TrainError> {
        // Descriptions are plain data, whose encoding cannot fail.
        let saved = serde_json::to_string(&data.saved()).unwrap_or_default();
        let fingerprint = data.dataset.fingerprint();
        let bytes = encode(&RunDescription {
            config: spec.whole_toml(),
            shape: data.shape.clone(),
            data: RunDataDescription { fingerprint, saved, done },
        });
        let mut answers = Vec::new();
        for node in &self.nodes {
            answers.push((node, node.begin(bytes.clone())?));
        }
        let mut devices = Vec::new();
        for (node, answer) in answers {
            devices.extend(node.offered(&answer)?);
        }
        self.remote.lock().devices = devices;
        Ok(())
    }

    /// Returns the nodes with the devices that they offer.
    pub fn remote(&self) -> RemoteNodes {
        self.remote.lock().clone()
    }

    /// Returns the number of nodes, including the first one.
    pub fn count(&self) -> usize {
        1 + self.nodes.len()
    }

    /// Returns the number of devices that the nodes offer.
    pub fn offered(&self) -> usize {
        self.remote.lock().devices.len()
    }

    /// Excludes one of the devices that the nodes offer.
    pub(crate) fn leave_out(&self, index: usize) {
        let mut remote = self.remote.lock();
        if index < remote.devices.len() {
            remote.devices.remove(index);
        }
    }

    pub(crate) fn leave_all_out(&self) {
        self.remote.lock().devices.clear();
    }

    /// Returns the signals that arrived on other nodes.
    pub fn signals(&self) -> SignalFlags {
        self.signals.clone()
    }

    /// Waits until all nodes have sent the rest of their traces.
    pub(crate) fn flush_traces(&self) {
        for node in &self.nodes {
            node.flush_trace();
        }
    }

    /// Ends all nodes with the outcome of the run.
    pub fn end(&self, outcome: &NodeOutcome) {
        for node in &self.nodes {
            node.end(encode(outcome));
        }
        self.cluster.lock().leave("the run is over");
    }

    fn show(&self, event: &Event) {
        let bytes = encode(event);
        for node in &self.nodes {
            node.show(bytes.clone());
        }
    }
}

fn encode<T: Serialize>(value: &T) -> Vec<u8> {
    // Encoding to memory fails only for types that postcard does not support.
    postcard::to_allocvec(value).unwrap_or_default()
}

/// Marks nodes as lost when the cluster does, until it ends, and shows nodes that move.
fn watch(news: &Mailbox<ClusterEvent>, nodes: &[Arc<RemoteNode>], show: fn(&str)) {
    while let Ok(news) = news.recv(None) {
        match news {
            ClusterEvent::Moved(moved) => show(&moved.to_string()),
            ClusterEvent::Paused(pause) => show(&pause.to_string()),
            ClusterEvent::Left { node, why } => {
                for one in nodes {
                    if one.number == node.0 {
                        one.lose(&format!("{node} ({}) left: {why}", one.host));
                    }
                }
            }
            ClusterEvent::Ended(end) => {
                let why = end.to_string();
                // The node that is to blame comes first, because the first failure becomes the
                // run's error.
                if let ClusterEnd::Lost { loss: Loss::Node { node: lost, .. }, .. } = &end {
                    for node in nodes {
                        if node.number == lost.0 {
                            node.lose(&why);
                        }
                    }
                }
                for node in nodes {
                    node.lose(&why);
                }
                return;
            }
            _ => {}
        }
    }
    // The cluster's thread has ended without a reason.
    for node in nodes {
        node.lose("the connection to the other nodes ended");
    }
}

/// Sink that forwards events to the users of other nodes, in addition to the wrapped sink.
pub struct NodesSink {
    pub nodes: Arc<RunNodes>,
    pub shown: Box<dyn Sink>,
}

impl Sink for NodesSink {
    fn event(&mut self, event: &Event) -> Result<(), MetricsError> {
        if let Some(told) = told(event.clone()) {
            self.nodes.show(&told);
        }
        self.shown.event(event)
    }

    fn forget_evaluations(&mut self, step: u64) {
        self.shown.forget_evaluations(step);
    }
}

/// Form of an event for users of other nodes, with harmless texts; `None` if they are not shown the
/// event. Events of devices are shown only at the first node.
fn told(event: Event) -> Option<Event> {
    Some(match event {
        Event::Note(text) => Event::Note(shown(&text)),
        Event::Shares(record) => Event::Note(shown(&record.sentence())),
        Event::Warning(text) => Event::Warning(shown(&text)),
        Event::Started { done, steps, device } => {
            Event::Started { done, steps, device: shown(&device) }
        }
        Event::Step(record) => {
            let skipped = record.skipped.as_deref().map(shown);
            let terms = shown_terms(record.terms);
            Event::Step(StepRecord { busy: None, ranks: Vec::new(), skipped, terms, ..record })
        }
        Event::Evaluation(record) => {
            let terms = shown_terms(record.terms);
            Event::Evaluation(EvalRecord { metrics: Vec::new(), terms, ..record })
        }
        Event::Evaluating { .. }
        | Event::Saving { .. }
        | Event::Checkpoint { .. }
        | Event::Measuring
        | Event::Ended => event,
        // A node opens its devices at a time of its own.
        Event::Opening | Event::Tuning { .. } | Event::Measure(_) | Event::Cost(_) => return None,
    })
}

/// Terms of a loss from another node, with names that are safe to show.
fn shown_terms(terms: Vec<(Cow<'static, str>, f64)>) -> Vec<(Cow<'static, str>, f64)> {
    terms.into_iter().map(|(name, mean)| (Cow::Owned(shown(&name)), mean)).collect()
}

/// Text from another node, made safe to show.
fn shown(text: &str) -> String {
    shown_text(text, SENTENCE_BYTES_MAX)
}

// ---- The other nodes ----

/// Function that returns the specification of a run from its configuration in TOML.
pub(crate) type Configure = Box<dyn Fn(&str) -> Result<RunSpec, String>>;

/// Node that takes part in a run started on another node.
pub struct JoinedNode {
    /// Device selector, as `--devices` takes it.
    pub devices: String,
    /// Applies the keys of this node to the configuration of the run.
    pub configure: Configure,
    /// This node's copy of the run's data; `configure` sets it as the path of the data.
    pub data: Option<PathBuf>,
    pub faults: Faults,
    /// Signals to this process, which are forwarded to the first node.
    pub signals: SignalFlags,
    /// Longest time after SIGTERM in which the run may end by itself.
    pub term_timeout: Duration,
    /// Shows events of the run.
    pub sink: Box<dyn Sink>,
    /// Shows notes about the other nodes.
    pub show: fn(&str),
    /// Shows the error of a process that cannot end in the regular way.
    pub show_error: fn(&str),
}

impl NodeHost for JoinedNode {
    fn begin(&mut self, run: &[u8]) -> Result<NodeOffer, String> {
        let RunDescription { config, shape, data } =
            decode(run).map_err(|error| error.to_string())?;
        let spec = (self.configure)(&config)?;
        let model = spec.training_graph(&shape).map_err(|error| error.to_string())?;
        let selections = selections(&self.devices).map_err(|error| error.to_string())?;
        let mut own_data: Option<Arc<dyn InputSource>> = None;
        if let Some(path) = &self.data {
            own_data = Some(Arc::new(OwnData::open(path, &spec, model.whole(), &data)?));
            let note = format!("samples are read from {}, the data of the run", path.display());
            // Output to a terminal never fails.
            let _ = self.sink.event(&Event::Note(note));
        }
        Ok(NodeOffer {
            model,
            selections,
            opening: spec.opening,
            node_timeout: spec.node_timeout,
            data: own_data,
            faults: self.faults.clone(),
        })
    }

    fn opens(&mut self) {
        // Output to a terminal never fails.
        let _ = self.sink.event(&Event::Opening);
    }

    fn show(&mut self, news: &[u8]) {
        // Filtered here too, because the first node may send anything.
        if let Some(event) = decode(news).ok().and_then(told) {
            // Output to a terminal never fails.
            let _ = self.sink.event(&event);
        }
    }
}

struct OwnData(BatchSource);

impl OwnData {
    /// Opens the copy named by a specification in the same way as the first node has opened the
    /// run's data, and compares them by their hashes.
    fn open(
        path: &Path,
        spec: &RunSpec,
        graph: &Graph,
        of_run: &RunDataDescription,
    ) -> Result<Self, String> {
        let saved: SavedData = serde_json::from_str(&of_run.saved).map_err(|e| e.to_string())?;
        let data = spec.load_data(&saved).map_err(|error| error.to_string())?;
        if data.dataset.fingerprint() != of_run.fingerprint {
            return Err(format!(
                "{} is not the data of the run, by the hash of names and contents; give a copy of \
                 what the first node has, or leave --data out, and the samples are sent",
                path.display()
            ));
        }
        let (steps, samples) = of_run.done;
        match spec.batch_source(graph, &data, steps, samples) {
            Ok(source) => Ok(Self(source)),
            Err(error) => Err(error.to_string()),
        }
    }
}

impl InputSource for OwnData {
    fn micro_batch(
        &self,
        step: u64,
        micro_batch: &MicroBatch,
        wanted: &[TensorId],
    ) -> Result<Inputs, String> {
        let mut inputs = self.0.micro_batch(step, micro_batch).map_err(|why| why.to_string())?;
        inputs.retain(|(tensor, _)| wanted.contains(tensor));
        Ok(inputs)
    }
}

/// Ends the process if the server does not end soon after the cluster: it may certify kernels for
/// minutes, or wait for a lost file system.
fn leave_late(why: &str, is_over: &AtomicBool, show_error: fn(&str)) {
    let ended = Instant::now();
    while !is_over.load(Ordering::Relaxed) {
        if ended.elapsed() > ENDING_MAX {
            let error = TrainError::NodesLost { why: why.into() };
            show_error(&error.to_string());
            leave(error.exit_code());
        }
        thread::sleep(ENDING_INTERVAL);
    }
}

fn tell_signal(first: &dyn NodeConnection, signal: Interruption) {
    // A lost first node need not know.
    let _ = first.send(encode(&ToFirst::Signal(signal.number())));
}

/// Takes part in a run whose cluster has started, until the run ends. Signals are forwarded to the
/// first node.
///
/// # Errors
/// Returns `TrainError` if the first node is lost or violates the protocol, or if the cluster ends.
pub fn serve(
    mut cluster: ClusterHandle,
    frames: FrameReceiver,
    you: NodeRank,
    links: Vec<(NodeRank, Arc<NodeLink>)>,
    node: &mut JoinedNode,
) -> Result<NodeOutcome, TrainError> {
    let inbox = Mailbox::new(INBOX_MAX);
    let mut connections: Vec<(NodeRank, Arc<dyn NodeConnection>)> = Vec::new();
    for (number, link) in &links {
        if *number == NodeRank(0) {
            let inbox = inbox.clone();
            link.receive_with(Arc::new(move |message| {
                inbox.send(NodeInput::Message(message)).map_err(|why| why.to_string())
            }));
        }
        connections.push((*number, link.clone()));
    }
    let Some((_, first)) = connections.iter().find(|(number, _)| *number == NodeRank(0)) else {
        return Err(TrainError::Defect("the cluster started without its first node".into()));
    };
    let first = first.clone();
    // The own entry is never used; it is filled with the connection to the first node.
    connections.push((you, first.clone()));
    connections.sort_by_key(|(number, _)| *number);
    let connections = connections.into_iter().map(|(_, connection)| connection).collect();
    let is_over = Arc::new(AtomicBool::new(false));
    let news = cluster.news.clone();
    let closing = inbox.clone();
    let served = is_over.clone();
    let (show, show_error) = (node.show, node.show_error);
    let started = thread::Builder::new().name("news of nodes".into()).spawn(move || {
        let end = loop {
            match news.recv(None) {
                Ok(ClusterEvent::Ended(end)) => break end.to_string(),
                Ok(ClusterEvent::Moved(moved)) => show(&moved.to_string()),
                Ok(ClusterEvent::Paused(pause)) => show(&pause.to_string()),
                Ok(_) => {}
                Err(_) => break "the cluster is over".into(),
            }
        };
        // If its mailbox is closed, the server has ended.
        let _ = closing.send(NodeInput::Ended(end.clone()));
        leave_late(&end, &served, show_error);
    });
    started.map_err(|why| TrainError::System { what: "a thread", why })?;
    let over = is_over.clone();
    let mut deadline = TermDeadline::new(node.term_timeout);
    // Discards a request that was made during an earlier run, or before any run.
    let _ = node.signals.take_save_request();
    let mut told = None;
    let watching = node.signals.clone().watch(move |signals| {
        if over.load(Ordering::Relaxed) {
            return ControlFlow::Break(());
        }
        if signals.take_save_request() {
            tell_signal(&*first, Interruption::TimeLimit);
        }
        let pending = signals.pending();
        if let Some(signal) = pending
            && told != pending
        {
            tell_signal(&*first, signal);
            told = pending;
        }
        if deadline.is_over(signals) {
            show_error(&deadline.message());
            leave(EXIT_RESTART);
        }
        ControlFlow::Continue(())
    });
    let watching = watching.inspect_err(|_| is_over.store(true, Ordering::Relaxed))?;
    let ended = NodeServer::new(you.0, node, connections, frames).run(&inbox);
    is_over.store(true, Ordering::Relaxed);
    let _ = watching.join();
    cluster.leave("the node has ended");
    match ended {
        Ok(NodeEnd::Over(outcome)) => decode_outcome(&outcome),
        Ok(NodeEnd::Lost(why)) => Err(TrainError::NodesLost { why }),
        Err(why) => Err(TrainError::NodesLost { why: format!("the first node sent {why}") }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use potluck_core::metrics::{RankRecord, Unit};

    #[test]
    fn texts_of_the_first_node_are_shown_without_control_characters() {
        let bad = || String::from("\u{1b}[2Jno\n") + &"x".repeat(2 * SENTENCE_BYTES_MAX);
        let events = [
            Event::Note(bad()),
            Event::Warning(bad()),
            Event::Started { done: 0, steps: 1, device: bad() },
        ];
        for event in events {
            let event = told(event).unwrap();
            let (Event::Note(text) | Event::Warning(text) | Event::Started { device: text, .. }) =
                &event
            else {
                panic!("{event:?}");
            };
            assert!(text.starts_with(" [2Jno x"), "{text}");
            assert_eq!(text.len(), SENTENCE_BYTES_MAX);
        }
        let failed: NodeOutcome = Err(RunFailure { why: bad(), exit_code: 75 });
        let Ok(Err(RunFailure { why, .. })) = decode_outcome(&encode(&failed)) else {
            panic!("it failed");
        };
        assert!(why.starts_with(" [2Jno x") && why.len() == SENTENCE_BYTES_MAX, "{why}");
    }

    /// Sink that stores its events.
    struct Kept(Arc<Lock<Vec<Event>>>);

    impl Sink for Kept {
        fn event(&mut self, event: &Event) -> Result<(), MetricsError> {
            self.0.lock().push(event.clone());
            Ok(())
        }
    }

    #[test]
    fn events_of_the_first_node_are_shown_to_the_bit_without_what_its_devices_do() {
        let shown = Arc::new(Lock::new(Vec::new()));
        let mut node = JoinedNode {
            devices: "cpu".into(),
            configure: Box::new(|_| Err("there is no run".into())),
            data: None,
            faults: Faults::none(),
            signals: SignalFlags::default(),
            term_timeout: Duration::ZERO,
            sink: Box::new(Kept(shown.clone())),
            show: |_| {},
            show_error: |_| {},
        };
        let nan = f64::from_bits(0x7ff8_0000_dead_beef);
        let rank = RankRecord {
            name: "\u{1b}[2J".into(),
            share: 1,
            time: Duration::from_secs(2),
            waited: Duration::ZERO,
            idle: 0.5,
            stage: None,
        };
        let step = StepRecord {
            step: 7,
            loss: nan,
            terms: vec![("\u{1b}[2J".into(), 0.5)],
            lr: -0.0,
            grad_norm: f64::INFINITY,
            loss_scale: Some(0.5),
            unit: Unit::Samples,
            count: u64::MAX,
            ms: f64::MIN_POSITIVE / 2.0,
            per_s: 0.1,
            busy: Some(0.5),
            ranks: vec![rank],
            skipped: Some("\u{1b}[2J".into()),
        };
        let evaluation = EvalRecord {
            step: 7,
            val_loss: nan,
            metrics: vec![("\u{1b}[2J".into(), 0.5)],
            terms: vec![("\u{1b}[2Jkl".into(), 0.5)],
            samples: 3,
            targets: 4,
            is_best: true,
        };
        let (device, elapsed) = ("cpu".into(), Duration::from_secs(1));
        for event in [
            Event::Step(step.clone()),
            Event::Evaluation(evaluation.clone()),
            Event::Evaluating { done: 1, total: 0, elapsed },
            Event::Saving { step: 7 },
            Event::Checkpoint { step: 7 },
            Event::Measuring,
            Event::Ended,
            Event::Tuning { device, done: 1, total: 0, elapsed },
        ] {
            node.show(&encode(&event));
        }
        let bytes = encode(&Event::Ended);
        node.show(&[&bytes[..], &[0]].concat());
        let shown = shown.lock();
        let [Event::Step(one), Event::Evaluation(other), rest @ ..] = &shown[..] else {
            panic!("{shown:?}")
        };
        let expected = [
            Event::Evaluating { done: 1, total: 0, elapsed },
            Event::Saving { step: 7 },
            Event::Checkpoint { step: 7 },
            Event::Measuring,
            Event::Ended,
        ];
        assert_eq!(rest, expected);
        let skipped = Some(" [2J".into());
        let terms = vec![(" [2J".into(), 0.5)];
        let expected = StepRecord { busy: None, ranks: Vec::new(), skipped, terms, ..step };
        // Compared as bytes, because NaN is not equal to itself.
        assert_eq!(encode(one), encode(&expected));
        let terms = vec![(" [2Jkl".into(), 0.5)];
        let expected = EvalRecord { metrics: Vec::new(), terms, ..evaluation };
        assert_eq!(encode(other), encode(&expected));
        assert_eq!(one.loss.to_bits(), nan.to_bits());
        assert_eq!(other.val_loss.to_bits(), nan.to_bits());
    }
}

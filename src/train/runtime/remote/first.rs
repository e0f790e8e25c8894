//! First node's side of another node: sends orders and calls, and forwards their results.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use super::LINK_MEASUREMENT;
use super::calls::{CallReply, DeviceCall};
use super::open_events::{OpenEvent, OpenReceiver, OpenSender, open_events};
use super::waiting::{NodeLiveness, RpcError, wait_for};
use super::wire::{
    NodeDevices, OpenFailure, OpenOrder, Opened, RankGroupSpec, RemoteDeviceSpec, SlotActivity,
    StepOrder, ToFirst, ToNode,
};
use crate::runtime::RuntimeError;
use crate::runtime::addresses::ArrivingFrames;
use crate::runtime::messages::CoordinatorMsg;
use crate::runtime::remote_endpoint::RemoteEndpoint;
use crate::runtime::step::StepInput;
use potluck_core::format::seconds;
use potluck_core::metrics::Trace;
use potluck_core::{Lock, Rank, Round};
use potluck_kernels::autotune::TuneProgress;
use potluck_kernels::device::{DeviceError, Heartbeat, RemoteDeviceInfo};
use potluck_net::cluster::{DEVICE_BYTES_MAX, WHY_BYTES_MAX, shown_text};
use potluck_net::nodes::{FrameReceiver, NodeConnection};
use potluck_parallel::comm::{Carrier, Closed, Mailbox, nanos};
use potluck_parallel::coordinator::RankActivity;
use potluck_parallel::planner::links::LinkRate;
use potluck_parallel::{Program, Verdict, Vote};

/// Number of readings of a clock; that with the shortest round trip is used.
const CLOCK_ROUNDS: usize = 8;
/// Longest wait for the rest of a trace.
const FLUSH_MAX: Duration = Duration::from_secs(5);

/// Most bytes of messages that a node may be sending, beside replies of its devices and states of
/// its ranks.
pub(super) const MESSAGES_MAX: usize = 64 << 20;

/// Reason of an error without an answer.
const GONE: &str = "its connection ended";

/// Another node, on the first one.
pub struct RemoteNode {
    /// Number of the node, from 1.
    pub number: u32,
    /// Name of its host.
    pub host: String,
    connection: Arc<dyn NodeConnection>,
    /// Receiver of the frames for the ranks of this process, from all nodes.
    frames: FrameReceiver,
    next_slot: AtomicU64,
    next_call: AtomicU64,
    /// True if the node reads the inputs of its ranks from its own copy of the data.
    has_data: AtomicBool,
    watch: NodeLiveness,
    /// Number of messages that show progress of the node.
    progress: AtomicU64,
    state: Lock<NodeState>,
}

#[derive(Default)]
struct NodeState {
    lost: Option<String>,
    /// Callers waiting for a reply.
    replies: HashMap<u64, mpsc::Sender<Result<CallReply, DeviceError>>>,
    opening: HashMap<u32, OpenSender>,
    assembling: Option<mpsc::Sender<Result<(), String>>>,
    beginning: Option<mpsc::Sender<BeginAnswer>>,
    measuring: Option<mpsc::Sender<Option<LinkRate>>>,
    arrivals: Option<mpsc::Sender<Option<f64>>>,
    clock: Option<mpsc::Sender<u64>>,
    flushing: Option<mpsc::Sender<()>>,
    trace: Option<Trace>,
    slots: HashMap<u32, Arc<SlotState>>,
    /// Most bytes of the states in the report of a rank's step.
    reported_states: BTreeMap<Rank, usize>,
    group: Option<NodeRanks>,
}

/// Ranks of the node in the current group, and the mailbox of its coordinator.
struct NodeRanks {
    generation: u64,
    ranks: BTreeMap<Rank, VoteState>,
    coordinator: Mailbox<CoordinatorMsg>,
}

/// Expected vote of a rank.
#[derive(Default)]
struct VoteState {
    /// Round of the last ordered step of the rank.
    round: Option<Round>,
    has_voted: bool,
    /// True after the report of its end; further reports are dropped, so that they fill no mailbox.
    has_ended: bool,
}

/// Question to a node, whose answer can be awaited after questions to other nodes.
pub struct Asked<T> {
    /// Subject of the error if the node is lost.
    adapter: &'static str,
    /// Name of the question, for the error without an answer.
    what: &'static str,
    answer: mpsc::Receiver<T>,
}

/// Answer of a node to the description of the run: its offer, or the reason that it has none.
pub type BeginAnswer = Result<NodeDevices, String>;

/// Ordered opening of another node's device. Dropped before the answer, it closes the device.
pub struct OrderedOpening {
    slot: RemoteSlot,
    name: String,
    opening: OpenReceiver,
    /// True after the answer.
    is_answered: bool,
}

impl Drop for OrderedOpening {
    fn drop(&mut self) {
        if !self.is_answered {
            self.slot.close();
        }
    }
}

impl OrderedOpening {
    /// Waits until the device is open. `report` receives the progress of autotuning.
    ///
    /// # Errors
    /// Returns the error of the opening, or of the lost node.
    pub fn opened(
        mut self,
        report: &mut dyn FnMut(TuneProgress),
    ) -> Result<(RemoteSlot, Opened), RuntimeError> {
        let asked = format!("the order to open {}", self.name);
        let ended = loop {
            match self.slot.node.answer(&self.name, &asked, &self.opening.events)? {
                OpenEvent::Progress => {
                    if let Some(progress) = self.opening.progress() {
                        report(progress);
                    }
                }
                OpenEvent::Ended(ended) => break ended,
            }
        };
        self.is_answered = true;
        match ended {
            Ok(opened) => Ok((self.slot.clone(), opened)),
            Err(failure) => {
                // A device that was not opened sends nothing.
                self.slot.node.state.lock().slots.remove(&self.slot.slot);
                Err(failure.into_error())
            }
        }
    }
}

/// Signs of life of a device.
#[derive(Default)]
pub struct SlotState {
    pub heartbeat: Heartbeat,
    is_waiting: AtomicBool,
    received: AtomicU64,
    /// Heartbeats in the last report of the device.
    reported: AtomicU64,
    /// Most bytes of its replies at the same time.
    reply_bytes: usize,
}

/// Device of another node, with the number of its opening.
#[derive(Clone)]
pub struct RemoteSlot {
    pub node: Arc<RemoteNode>,
    pub slot: u32,
}

impl RemoteNode {
    /// Creates the first node's side of a connection.
    pub fn new(
        number: u32,
        host: &str,
        connection: Arc<dyn NodeConnection>,
        frames: FrameReceiver,
        watch: NodeLiveness,
    ) -> Self {
        Self {
            number,
            host: host.into(),
            connection,
            frames,
            next_slot: AtomicU64::new(0),
            next_call: AtomicU64::new(0),
            has_data: AtomicBool::new(false),
            watch,
            progress: AtomicU64::new(0),
            state: Lock::default(),
        }
    }

    /// Returns true if the node reads the inputs of its ranks from its own copy of the data.
    pub(crate) fn has_data(&self) -> bool {
        self.has_data.load(Ordering::Relaxed)
    }

    /// Returns the connection for values of ranks.
    pub fn carrier(&self) -> Arc<dyn Carrier> {
        self.connection.carrier()
    }

    /// Returns the error of a device of this node: with the reason of the node's loss, if it is
    /// known, or else with `why`.
    fn lost_error(&self, adapter: &str, why: &str) -> DeviceError {
        let known = self.state.lock().lost.clone();
        let why = known.unwrap_or_else(|| format!("node {} ({}): {why}", self.number, self.host));
        DeviceError::NodeLost { adapter: adapter.into(), why }
    }

    /// Registers a receiver of an answer, unless the node is lost: then nothing would wake it.
    fn register(
        &self,
        adapter: &str,
        register: impl FnOnce(&mut NodeState),
    ) -> Result<(), DeviceError> {
        let mut state = self.state.lock();
        if state.lost.is_some() {
            drop(state);
            return Err(self.lost_error(adapter, GONE));
        }
        register(&mut state);
        Ok(())
    }

    fn send(&self, adapter: &str, message: &ToNode) -> Result<(), DeviceError> {
        let bytes = postcard::to_allocvec(message).map_err(|why| DeviceError::Refused {
            adapter: adapter.into(),
            what: "a message".into(),
            why: why.to_string(),
        })?;
        self.connection.send(bytes).map_err(|Closed(why)| self.lost_error(adapter, &why))
    }

    /// Sends a question to the node; `register` registers the sender of the answer.
    fn ask<T>(
        &self,
        adapter: &'static str,
        what: &'static str,
        message: &ToNode,
        register: impl FnOnce(&mut NodeState, mpsc::Sender<T>),
    ) -> Result<Asked<T>, DeviceError> {
        let (sender, answer) = mpsc::channel();
        self.register(adapter, |state| register(state, sender))?;
        self.send(adapter, message)?;
        Ok(Asked { adapter, what, answer })
    }

    /// Waits for the answer to a question.
    ///
    /// # Errors
    /// Returns `DeviceError` if the node is lost.
    pub fn answered<T>(&self, asked: &Asked<T>) -> Result<T, DeviceError> {
        self.answer(asked.adapter, asked.what, &asked.answer)
    }

    /// Waits for the answer to a question of a device. A node without progress for the timeout is
    /// abandoned.
    fn answer<T>(
        &self,
        adapter: &str,
        asked: &str,
        answer: &mpsc::Receiver<T>,
    ) -> Result<T, DeviceError> {
        let waited = wait_for(answer, self.watch.answer_timeout, || {
            self.progress.load(Ordering::Relaxed).wrapping_add(self.connection.arrived())
        });
        match waited {
            Ok(answer) => return Ok(answer),
            Err(RpcError::Gone) => {}
            Err(RpcError::Silent) => {
                let seconds = seconds(nanos(self.watch.answer_timeout));
                self.give_up(&format!(
                    "it is connected, but it has neither answered {asked} nor shown any progress \
                     for {seconds}"
                ));
            }
        }
        Err(self.lost_error(adapter, GONE))
    }

    /// Abandons the node, also for all other nodes. In messages, `why` follows its name.
    pub fn give_up(&self, why: &str) {
        let why = shown_text(why, WHY_BYTES_MAX);
        self.lose(&format!("node {} ({}) is lost: {why}", self.number, self.host));
        (self.watch.give_up)(&why);
    }

    /// Sends the description of the run; [`RemoteNode::offered`] waits for the answer.
    ///
    /// # Errors
    /// Returns `RuntimeError` if the node is lost.
    pub fn begin(&self, run: Vec<u8>) -> Result<Asked<BeginAnswer>, RuntimeError> {
        let what = "the description of the run";
        let asked = self.ask("its devices", what, &ToNode::Begin(run), |state, sender| {
            state.beginning = Some(sender);
        });
        Ok(asked?)
    }

    /// Waits for the devices that the node offers.
    ///
    /// # Errors
    /// Returns `RuntimeError` if the node cannot take part or is lost.
    pub fn offered(
        &self,
        asked: &Asked<BeginAnswer>,
    ) -> Result<Vec<RemoteDeviceInfo>, RuntimeError> {
        let NodeDevices { devices: offered, has_data } = self.answered(asked)?.map_err(|why| {
            RuntimeError::InvalidRequest(format!(
                "node {} ({}) cannot take part: {why}",
                self.number, self.host
            ))
        })?;
        self.has_data.store(has_data, Ordering::Relaxed);
        let mut devices = Vec::with_capacity(offered.len());
        for (index, device) in offered.into_iter().enumerate() {
            let RemoteDeviceSpec {
                name,
                identity,
                is_cpu,
                is_on_host,
                binding_bytes,
                memory,
                host_memory,
                adapter,
            } = device;
            devices.push(RemoteDeviceInfo {
                node: self.number,
                index: index as u32,
                name: format!("{} {}", self.host, shown_text(&name, DEVICE_BYTES_MAX)),
                identity,
                is_cpu,
                is_on_host,
                binding_bytes,
                memory,
                host_memory,
                adapter,
            });
        }
        Ok(devices)
    }

    /// Sends news of the run, unless the node is lost.
    pub fn show(&self, news: Vec<u8>) {
        let _ = self.send("its user", &ToNode::Show(news));
    }

    /// Ends the node, because the run is over.
    pub fn end(&self, why: Vec<u8>) {
        let _ = self.send("its user", &ToNode::End(why));
    }

    /// Orders the node to open one of its devices, without waiting for it. Replies of the device
    /// have at most `reply_bytes` at the same time.
    ///
    /// # Errors
    /// Returns `RuntimeError` if the node is lost.
    pub fn order_opening(
        self: &Arc<Self>,
        order: OpenOrder,
        reply_bytes: usize,
    ) -> Result<OrderedOpening, RuntimeError> {
        let slot = self.next_slot.fetch_add(1, Ordering::Relaxed) as u32;
        let (sender, opening) = open_events();
        let name = order.name.clone();
        self.register(&name, |state| {
            state.opening.insert(slot, sender);
            let opened = SlotState { reply_bytes, ..SlotState::default() };
            state.slots.insert(slot, Arc::new(opened));
        })?;
        self.allow_messages();
        self.send(&name, &ToNode::Open { slot, order })?;
        let slot = RemoteSlot { node: Arc::clone(self), slot };
        Ok(OrderedOpening { slot, name, opening, is_answered: false })
    }

    /// Allows what the node may send now. Without the lock of the state: the network delivers
    /// messages while it holds the lock of the connection, and then takes that of the state.
    fn allow_messages(&self) {
        let bytes = self.state.lock().messages_max();
        self.connection.allow_messages(bytes);
    }

    /// Orders the node to seat some of its devices as ranks of a group; [`RemoteNode::assembled`]
    /// waits for the answer.
    ///
    /// # Errors
    /// Returns `RuntimeError` if the node is lost.
    pub fn order_assembly(
        &self,
        assembly: RankGroupSpec,
        coordinator: Mailbox<CoordinatorMsg>,
    ) -> Result<Asked<Result<(), String>>, RuntimeError> {
        let generation = assembly.generation;
        let mut ranks = BTreeMap::new();
        for (rank, _) in &assembly.endpoints {
            ranks.insert(*rank, VoteState::default());
        }
        let order = ToNode::Assemble(Box::new(assembly));
        let what = "the order to seat its ranks";
        let asked = self.ask("its devices", what, &order, |state, sender| {
            state.assembling = Some(sender);
            state.group = Some(NodeRanks { generation, ranks, coordinator });
        });
        Ok(asked?)
    }

    /// Waits until the node has seated its ranks.
    ///
    /// # Errors
    /// Returns `RuntimeError` if the node refuses them or is lost.
    pub fn assembled(&self, asked: &Asked<Result<(), String>>) -> Result<(), RuntimeError> {
        self.answered(asked)?.map_err(RuntimeError::InvalidRequest)
    }

    /// Orders the node to measure its link to the next one; [`RemoteNode::answered`] waits for the
    /// rate.
    ///
    /// # Errors
    /// Returns `RuntimeError` if the node is lost.
    pub fn order_link_rate(&self) -> Result<Asked<Option<LinkRate>>, RuntimeError> {
        let what = "the order to measure its link";
        let asked = self.ask("its link", what, &ToNode::MeasureLink, |state, sender| {
            state.measuring = Some(sender);
        });
        Ok(asked?)
    }

    /// Measures the link to this node.
    pub fn measure_link(&self) -> Option<LinkRate> {
        self.connection.measure(LINK_MEASUREMENT)
    }

    /// Asks the node how fast the values of the previous node have arrived, whose measurement is
    /// over; [`RemoteNode::answered`] waits for the bytes per second.
    ///
    /// # Errors
    /// Returns `RuntimeError` if the node is lost.
    pub fn ask_arrival_rate(&self) -> Result<Asked<Option<f64>>, RuntimeError> {
        let what = "the question for the rate of its link";
        let asked = self.ask("its link", what, &ToNode::ArrivalRate, |state, sender| {
            state.arrivals = Some(sender);
        });
        Ok(asked?)
    }

    /// Returns the bytes per second at which this node's values have arrived here.
    pub fn take_arrival_rate(&self) -> Option<f64> {
        self.connection.take_arrival_rate()
    }

    /// Returns the start of a trace by the node's clock, in nanoseconds since its server was
    /// created, and half of the shortest round trip, which bounds the error. From then on, the
    /// node's events are added to the trace.
    ///
    /// # Errors
    /// Returns `RuntimeError` if the node is lost.
    pub fn align(&self, trace: &Trace) -> Result<(i64, Duration), RuntimeError> {
        let mut best: Option<(i64, Duration)> = None;
        for _ in 0..CLOCK_ROUNDS {
            let sent = Instant::now();
            let what = "the question for its time";
            let asked = self.ask("its clock", what, &ToNode::Clock, |state, sender| {
                state.clock = Some(sender);
            });
            let there = self.answered(&asked?)?;
            let round_trip = sent.elapsed();
            let here = nanos(sent.duration_since(trace.epoch()) + round_trip / 2);
            // The node may send any number.
            let there = i64::try_from(there).unwrap_or(i64::MAX);
            let begun = there.saturating_sub_unsigned(here);
            if best.is_none_or(|(_, error)| round_trip / 2 < error) {
                best = Some((begun, round_trip / 2));
            }
        }
        self.state.lock().trace = Some(trace.clone());
        Ok(best.unwrap_or_default())
    }

    /// Waits for the rest of the node's trace, for a bounded time.
    pub(crate) fn flush_trace(&self) {
        let (sender, flushed) = mpsc::channel::<()>();
        let mut state = self.state.lock();
        // Its last owner waits for the disk, which must not be a thread of the network.
        let Some(trace) = state.trace.clone() else { return };
        let is_lost = state.lost.is_some();
        if !is_lost {
            state.flushing = Some(sender);
        }
        drop(state);
        if !is_lost && self.send("its trace", &ToNode::FlushTrace).is_ok() {
            // The sender is dropped when the rest has arrived, or the node is lost.
            let _ = flushed.recv_timeout(FLUSH_MAX);
        }
        self.state.lock().trace = None;
        drop(trace);
    }

    /// Sets the receiver of frames for the ranks of this process.
    pub(crate) fn receive_frames(&self, frames: Arc<ArrivingFrames>) {
        *self.frames.lock() = Some(frames);
    }

    /// Processes a message of the node. After an unexpected one, the node is abandoned.
    ///
    /// # Errors
    /// Returns a description of an invalid message; the caller must then close the connection.
    pub fn receive(&self, message: &[u8]) -> Result<(), String> {
        self.process(message).inspect_err(|what| self.give_up(&format!("it sent {what}")))
    }

    fn process(&self, message: &[u8]) -> Result<(), String> {
        let message = ToFirst::decode(message)?;
        if !matches!(message, ToFirst::Signal(_) | ToFirst::Activity(_)) {
            self.progress.fetch_add(1, Ordering::Relaxed);
        }
        let mut state = self.state.lock();
        match message {
            ToFirst::Offer(offered) => {
                let waiting = state.beginning.take().ok_or("an offer that was not asked for")?;
                let _ = waiting.send(offered);
            }
            ToFirst::Signal(signal) => (self.watch.on_signal)(signal),
            ToFirst::Opened { slot, opened } => {
                let waiting = state.opening.remove(&slot);
                let waiting = waiting.ok_or("a device that was not to be opened")?;
                waiting.ended(opened);
            }
            ToFirst::Tuning { slot, done, total, elapsed_ms, compiling } => {
                let elapsed = Duration::from_millis(elapsed_ms);
                if let Some(waiting) = state.opening.get(&slot) {
                    waiting.progress(TuneProgress { done, total, elapsed, compiling });
                }
            }
            ToFirst::Reply { id, reply } => {
                let waiting = state.replies.remove(&id).ok_or("a reply to no call")?;
                let _ = waiting.send(reply);
            }
            ToFirst::Assembled(answer) => {
                let waiting = state.assembling.take().ok_or("an answer to no assembly")?;
                let _ = waiting.send(answer);
            }
            ToFirst::LinkRate(rate) => {
                let waiting = state.measuring.take().ok_or("a rate that was not asked for")?;
                let _ = waiting.send(rate.and_then(LinkRate::checked));
            }
            ToFirst::ArrivalRate(rate) => {
                let waiting = state.arrivals.take().ok_or("arrivals that were not asked for")?;
                let _ = waiting.send(rate);
            }
            ToFirst::Vote(vote) => {
                if let Some(coordinator) = state.coordinator_of_vote(&vote)? {
                    let _ = coordinator.send(CoordinatorMsg::Vote(vote));
                }
            }
            ToFirst::Finished { rank, group, result } => {
                if let Some(coordinator) = state.coordinator_of(rank, group)?.cloned()
                    && state.is_first_end(rank)
                {
                    let _ = coordinator.send(CoordinatorMsg::Finished(rank, result));
                }
            }
            ToFirst::Clock(time) => {
                let waiting = state.clock.take().ok_or("a time that was not asked for")?;
                let _ = waiting.send(time);
            }
            ToFirst::Trace(lines) => {
                let trace = state.trace.clone();
                drop(state);
                let lines = String::from_utf8(lines).map_err(|_| "a trace that is no text")?;
                if let Some(trace) = trace {
                    trace.append_lines(&lines);
                }
            }
            ToFirst::Flushed => drop(state.flushing.take()),
            ToFirst::Activity(slots) => {
                let mut worked = 0;
                for activity in &slots {
                    if state.observe(activity) {
                        worked += 1;
                    }
                }
                self.progress.fetch_add(worked, Ordering::Relaxed);
            }
            // Counts as progress only.
            ToFirst::Working => {}
        }
        Ok(())
    }

    /// Marks the node as lost and wakes all waiting callers; `why` is a sentence with its name.
    pub fn lose(&self, why: &str) {
        let mut state = self.state.lock();
        state.lost.get_or_insert_with(|| why.into());
        // The drop of the senders wakes the receivers.
        state.replies.clear();
        state.opening.clear();
        state.assembling = None;
        state.beginning = None;
        state.measuring = None;
        state.arrivals = None;
        state.clock = None;
        state.flushing = None;
        let group = state.group.take();
        drop(state);
        let Some(NodeRanks { ranks, coordinator, .. }) = group else { return };
        for rank in ranks.into_keys() {
            let lost = Err(self.lost_error(&format!("{rank}"), why));
            let _ = coordinator.send(CoordinatorMsg::Finished(rank, lost));
        }
    }
}

impl NodeState {
    /// Most bytes of messages that the node may be sending. Memory that is not known counts as
    /// without a bound.
    fn messages_max(&self) -> usize {
        let replies = self.slots.values().map(|slot| slot.reply_bytes);
        let states = self.reported_states.values().copied();
        replies.chain(states).fold(MESSAGES_MAX, usize::saturating_add)
    }

    fn is_first_end(&mut self, rank: Rank) -> bool {
        let Some(group) = &mut self.group else { return false };
        let Some(state) = group.ranks.get_mut(&rank) else { return false };
        !std::mem::replace(&mut state.has_ended, true)
    }

    /// Mailbox of the coordinator of a rank; `None` for a report of an earlier group.
    fn coordinator_of(
        &self,
        rank: Rank,
        generation: u64,
    ) -> Result<Option<&Mailbox<CoordinatorMsg>>, String> {
        let group = self.group.as_ref().ok_or("a report of a rank without a group")?;
        if generation < group.generation {
            return Ok(None);
        }
        if !group.ranks.contains_key(&rank) {
            return Err(format!("a report of {rank}, which is not its own"));
        }
        Ok(Some(&group.coordinator))
    }

    /// Returns the mailbox for a vote; a rank votes once per step. `None` for a vote of an earlier
    /// group.
    fn coordinator_of_vote(
        &mut self,
        vote: &Vote,
    ) -> Result<Option<&Mailbox<CoordinatorMsg>>, String> {
        let rank = vote.rank;
        let round = vote.round;
        if self.coordinator_of(rank, round.generation)?.is_none() {
            return Ok(None);
        }
        let Some(group) = self.group.as_mut() else { return Ok(None) };
        let due = group.ranks.entry(rank).or_default();
        match due.round {
            None => return Err(format!("a vote of {rank} before its first step")),
            Some(of) if of != round => {
                return Err(format!("a vote of another round: {rank} voted for {round} in {of}"));
            }
            Some(_) if due.has_voted => return Err(format!("two votes of {rank} for {round}")),
            Some(_) => due.has_voted = true,
        }
        Ok(Some(&group.coordinator))
    }

    /// Records the signs of life of a device; returns true if it has worked since the last ones.
    fn observe(&self, activity: &SlotActivity) -> bool {
        let Some(slot) = self.slots.get(&activity.slot) else { return false };
        slot.is_waiting.store(activity.is_waiting, Ordering::Relaxed);
        slot.received.store(activity.received, Ordering::Relaxed);
        let before = slot.reported.swap(activity.heartbeats, Ordering::Relaxed);
        if before != activity.heartbeats {
            slot.heartbeat.tick();
        }
        before != activity.heartbeats
    }
}

impl OpenFailure {
    fn into_error(self) -> RuntimeError {
        match self {
            Self::Device(error) => error.into(),
            Self::NoRoom { adapter, what, needed } => {
                RuntimeError::NoRoom { adapter, what, needed }
            }
            Self::Other(why) => RuntimeError::InvalidRequest(why),
        }
    }
}

impl From<RuntimeError> for OpenFailure {
    fn from(error: RuntimeError) -> Self {
        match error {
            RuntimeError::Device(error) | RuntimeError::Rank { error, .. } => Self::Device(error),
            RuntimeError::NoRoom { adapter, what, needed } => {
                Self::NoRoom { adapter, what, needed }
            }
            RuntimeError::DeviceMemory { adapter, needed, has, .. } => {
                Self::NoRoom { adapter, what: format!("the run, having {has}"), needed }
            }
            RuntimeError::Memory { needed, available } => Self::NoRoom {
                adapter: "its host".into(),
                what: format!("the run, having {available}"),
                needed,
            },
            other => Self::Other(other.to_string()),
        }
    }
}

impl RemoteSlot {
    /// Returns the signs of life of the device.
    pub fn state(&self) -> Arc<SlotState> {
        self.node.state.lock().slots.get(&self.slot).cloned().unwrap_or_default()
    }

    /// Sends a call without waiting for its end.
    ///
    /// # Errors
    /// Returns `DeviceError` if the node is lost.
    pub fn post(&self, adapter: &str, call: DeviceCall) -> Result<(), DeviceError> {
        self.node.send(adapter, &ToNode::Call { slot: self.slot, id: None, call })
    }

    /// Closes the device.
    pub fn close(&self) {
        self.node.state.lock().slots.remove(&self.slot);
        // A lost node has closed its devices.
        let _ = self.node.send("a device", &ToNode::Close { slot: self.slot });
    }

    /// Performs a call and waits for its reply.
    ///
    /// # Errors
    /// Returns the error of the device, which may stem from an earlier call without a reply, or of
    /// the lost node.
    pub fn call(&self, adapter: &str, call: DeviceCall) -> Result<CallReply, DeviceError> {
        let id = self.node.next_call.fetch_add(1, Ordering::Relaxed);
        let asked = format!("a call of {adapter} ({})", call.name());
        let (sender, reply) = mpsc::channel();
        self.node.register(adapter, |state| drop(state.replies.insert(id, sender)))?;
        self.node.send(adapter, &ToNode::Call { slot: self.slot, id: Some(id), call })?;
        self.node.answer(adapter, &asked, &reply)?
    }
}

/// Rank on another node.
pub(crate) struct NodeEndpoint {
    pub slot: RemoteSlot,
    pub rank: Rank,
    pub device: String,
    pub(crate) signs: Arc<SlotState>,
    /// Program of the last step, which was sent to the node.
    pub sent: Lock<Option<Arc<Program>>>,
}

impl RemoteEndpoint for NodeEndpoint {
    fn submit(&self, input: &StepInput) -> Result<(), DeviceError> {
        let mut sent = self.sent.lock();
        let program = match &*sent {
            Some(sent) if Arc::ptr_eq(sent, &input.program) => None,
            _ => Some(Program::clone(&input.program)),
        };
        let order = StepOrder {
            round: input.round,
            program,
            micro_batches: input.micro_batches.clone(),
            states: input.states.clone(),
            run_key: input.run_key,
            is_training: input.is_training,
            samples: input.samples,
            update: input.update,
            average_weight: input.average_weight,
            clip: input.clip,
            loss_scale: input.loss_scale,
        };
        // The report has the states behind all micro-batches. Those before are in the order, in an
        // evaluation among the inputs.
        let mut states = 0;
        for (_, tensor) in input.states.iter().chain(&input.micro_batches).flatten() {
            states += tensor.as_view().bytes().len();
        }
        // Before the order is sent, because the vote may arrive immediately.
        let mut state = self.slot.node.state.lock();
        if let Some(group) = &mut state.group {
            let due = VoteState { round: Some(input.round), has_voted: false, has_ended: false };
            group.ranks.insert(self.rank, due);
        }
        let is_new = state.reported_states.insert(self.rank, states) < Some(states);
        drop(state);
        if is_new {
            self.slot.node.allow_messages();
        }
        self.slot.node.send(&self.device, &ToNode::Step { rank: self.rank, order })?;
        *sent = Some(Arc::clone(&input.program));
        Ok(())
    }

    fn decide(&self, round: Round, verdict: &Verdict) {
        let decided = ToNode::Decided { rank: self.rank, round, verdict: verdict.clone() };
        // A lost node has ended the steps of its ranks.
        let _ = self.slot.node.send(&self.device, &decided);
    }

    fn abort(&self, why: &str) {
        let abort = ToNode::Abort { rank: self.rank, why: why.into() };
        let _ = self.slot.node.send(&self.device, &abort);
    }

    fn activity(&self, heartbeats: u64) -> RankActivity {
        RankActivity {
            heartbeats,
            received: self.signs.received.load(Ordering::Relaxed),
            is_waiting: self.signs.is_waiting.load(Ordering::Relaxed),
        }
    }
}

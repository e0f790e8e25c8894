//! Node other than the first one: opens its devices, performs calls on them and runs the steps of
//! their ranks, by order of the first node.

use std::collections::BTreeMap;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use super::LINK_MEASUREMENT;
use super::calls::{CallReply, DeviceCall};
use super::in_flight::{InFlightRequests, RequestGuard};
use super::own_inputs::{InputSource, OwnInputs};
use super::perform::{perform_call, plan_hash as hash_of};
use super::wire::{
    NodeDevices, OpenFailure, OpenOrder, Opened, RankGroupSpec, RemoteDeviceSpec, SlotActivity,
    StepOrder, ToFirst, ToNode,
};
use crate::runtime::addresses::{ArrivingFrames, RankAddress, RankAddresses};
use crate::runtime::device_thread::DeviceThread;
use crate::runtime::group_layout::{GroupLayout, WorkerGroupOptions};
use crate::runtime::messages::CoordinatorMsg;
use crate::runtime::open::{DeviceToOpen, OpenDevice, OpenOptions, open_selected};
use crate::runtime::placement::candidates::{identity, is_on_host};
use crate::runtime::placement::device_limits::binding_bytes;
use crate::runtime::placement::names::display_names;
use crate::runtime::step::{Inputs, StepInput};
use crate::runtime::workers::endpoint::LocalEndpoint;
use crate::runtime::{RuntimeError, memory};
use potluck_core::faults::Faults;
use potluck_core::format::no_thread;
use potluck_core::metrics::Trace;
use potluck_core::{Lock, Rank, TensorId, decode};
use potluck_graph::ModelGraph;
use potluck_kernels::autotune::TuneOptions;
use potluck_kernels::device::host::available_memory;
use potluck_kernels::device::{DeviceError, Selection};
use potluck_net::nodes::{FrameReceiver, NodeConnection};
use potluck_parallel::Program;
use potluck_parallel::comm::{Mailbox, RecvError, arriving_bytes_max, nanos, ring_pool_bytes_max};
use potluck_parallel::coordinator::RankActivity;
use potluck_parallel::pipeline::used_inputs;

/// Longest wait for a device to close.
const CLOSING_DEADLINE: Duration = Duration::from_secs(6);

/// Capacity of a device's queue of calls: more than the first node sends without waiting.
const CALLS_MAX: usize = 256;

/// Time between two reports of signs of life.
const ACTIVITY_INTERVAL: Duration = Duration::from_millis(100);

/// Offer of a node to a run: its devices, and the model for them.
pub struct NodeOffer {
    /// Model of the run.
    pub model: ModelGraph,
    pub selections: Vec<Selection>,
    pub opening: OpenOptions,
    /// Longest silence of a node.
    pub node_timeout: Duration,
    /// The node's copy of the run's data; without it, the first node sends the inputs of steps.
    pub data: Option<Arc<dyn InputSource>>,
    /// Faults to inject, for tests.
    pub faults: Faults,
}

/// Layer above the server of a node.
pub trait NodeHost {
    /// Prepares the node for a run by the first node's description.
    ///
    /// # Errors
    /// Returns a sentence with the reason that the node cannot take part.
    fn begin(&mut self, run: &[u8]) -> Result<NodeOffer, String>;

    /// A device is opened: at the beginning, or again after the loss of one.
    fn opens(&mut self);

    /// Shows news of the run.
    fn show(&mut self, news: &[u8]);
}

/// Input of a node's server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeInput {
    /// Message of the first node.
    Message(Vec<u8>),
    /// The cluster has ended; earlier messages are processed first.
    Ended(String),
}

/// End of the service of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeEnd {
    /// The first node ended the run, with this message for the layer above.
    Over(Vec<u8>),
    /// The cluster has ended, for this reason.
    Lost(String),
}

/// Node that serves the first one.
pub struct NodeServer<'h> {
    number: u32,
    host: &'h mut dyn NodeHost,
    offer: Option<NodeOffer>,
    own_inputs: Option<OwnInputs>,
    first: Arc<dyn NodeConnection>,
    /// Connections to all nodes, by number; that to this node is never used.
    nodes: Vec<Arc<dyn NodeConnection>>,
    frames: FrameReceiver,
    slots: BTreeMap<u32, OpenSlot>,
    /// Reported slots, with their ranks.
    watched: Watched,
    in_flight: Arc<InFlightRequests>,
    group: Option<Group>,
    /// Origin of the node's time.
    started: Instant,
    trace: Option<Trace>,
}

/// Open device.
struct OpenSlot {
    driver: Arc<DeviceThread>,
    /// Input tensors that its plan uses.
    inputs: Arc<[TensorId]>,
    calls: mpsc::SyncSender<(Option<u64>, DeviceCall)>,
    /// Disconnects when the device is closed.
    closed: mpsc::Receiver<()>,
}

/// Ranks of this node in a group.
struct Group {
    coordinator: Mailbox<CoordinatorMsg>,
    endpoints: BTreeMap<Rank, HostedRank>,
}

struct HostedRank {
    slot: u32,
    endpoint: Arc<LocalEndpoint>,
    driver: Arc<DeviceThread>,
    inputs: Arc<[TensorId]>,
    program: Option<Arc<Program>>,
}

/// Devices by slot, with the seats of ranks.
type Watched = Arc<Lock<BTreeMap<u32, (Arc<DeviceThread>, Option<Arc<LocalEndpoint>>)>>>;

impl NodeOffer {
    fn devices(&self) -> Vec<RemoteDeviceSpec> {
        let mut devices = Vec::with_capacity(self.selections.len());
        let host = available_memory();
        for (selection, name) in self.selections.iter().zip(display_names(&self.selections)) {
            let limit = memory::limit(selection, self.opening.device_memory_mib);
            // The number of an adapter is that of its first device.
            let adapter = self.selections.iter().position(|other| other.shares_adapter(selection));
            devices.push(RemoteDeviceSpec {
                name,
                identity: identity(selection),
                is_cpu: matches!(selection, Selection::Cpu { .. }),
                is_on_host: is_on_host(selection),
                binding_bytes: binding_bytes(selection),
                memory: limit.map(|(bytes, _)| bytes),
                host_memory: memory::host_memory(selection, host),
                adapter: adapter.map(|number| number as u32),
            });
        }
        devices
    }
}

impl<'h> NodeServer<'h> {
    /// Creates the server of the node with this number. `nodes` are the connections to all nodes,
    /// the first one's first; frames for the ranks of this node arrive in `frames`.
    pub fn new(
        number: u32,
        host: &'h mut dyn NodeHost,
        nodes: Vec<Arc<dyn NodeConnection>>,
        frames: FrameReceiver,
    ) -> Self {
        Self {
            number,
            host,
            offer: None,
            own_inputs: None,
            first: nodes[0].clone(),
            nodes,
            frames,
            slots: BTreeMap::new(),
            watched: Watched::default(),
            in_flight: InFlightRequests::new(),
            group: None,
            started: Instant::now(),
            trace: None,
        }
    }

    /// Processes the messages of the first node until the end of the run or of the cluster.
    ///
    /// # Errors
    /// Returns a description of an invalid message.
    pub fn run(&mut self, inbox: &Mailbox<NodeInput>) -> Result<NodeEnd, String> {
        let stop = Mailbox::<()>::new(1);
        let first = self.first.clone();
        let watched = self.watched.clone();
        let in_flight = self.in_flight.clone();
        let stopped = stop.clone();
        let watching = thread::Builder::new()
            .name("signs of life".into())
            .spawn(move || report_activity(&*first, &watched, &in_flight, &stopped))
            .map_err(no_thread)?;
        let ended = loop {
            match inbox.recv(None) {
                Ok(NodeInput::Ended(why)) => break Ok(NodeEnd::Lost(why)),
                Ok(NodeInput::Message(message)) => {
                    let request_guard = self.in_flight.begin(self.stuck_after());
                    match self.receive(&message, &request_guard) {
                        Ok(None) => {}
                        Ok(Some(why)) => break Ok(NodeEnd::Over(why)),
                        Err(why) => break Err(why),
                    }
                }
                Err(RecvError::Closed(closed)) => break Ok(NodeEnd::Lost(closed.0)),
                Err(RecvError::TimedOut) => {}
            }
        };
        self.disband("the run is over");
        let slots: Vec<u32> = self.slots.keys().copied().collect();
        let mut closing = Vec::with_capacity(slots.len());
        for slot in slots {
            closing.extend(self.begin_close(slot));
        }
        let deadline = Instant::now() + CLOSING_DEADLINE;
        for closed in closing {
            let _ = closed.recv_timeout(deadline.saturating_duration_since(Instant::now()));
        }
        stop.close("the run is over");
        // The thread waits only at its mailbox.
        let _ = watching.join();
        ended
    }

    /// Returns the time without progress after which work counts as stuck, which is that for a call
    /// of a driver.
    fn stuck_after(&self) -> Duration {
        // Without a limit before the offer: the node reads its copy of the data.
        self.offer.as_ref().map_or(Duration::MAX, |offer| offer.opening.deadline)
    }

    /// Processes a message; returns the reason if the run is over.
    fn receive(
        &mut self,
        message: &[u8],
        request_guard: &RequestGuard,
    ) -> Result<Option<Vec<u8>>, String> {
        match decode(message).map_err(|why| format!("bytes that are no message: {why}"))? {
            ToNode::Begin(run) => {
                let offering = self.begin(&run);
                self.reply(&ToFirst::Offer(offering));
            }
            ToNode::Show(news) => self.host.show(&news),
            ToNode::End(why) => return Ok(Some(why)),
            ToNode::Open { slot, order } => {
                self.host.opens();
                let opened = self.open(slot, order, request_guard).map_err(OpenFailure::from);
                self.reply(&ToFirst::Opened { slot, opened });
            }
            ToNode::Close { slot } => self.close(slot),
            ToNode::Call { slot, id, call } => {
                let found = self.slots.get(&slot).ok_or(format!("there is no device {slot}"))?;
                let sent = found.calls.try_send((id, call));
                sent.map_err(|_| format!("device {slot} has too many calls"))?;
            }
            ToNode::Assemble(assembly) => {
                let answer = self.assemble(*assembly).map_err(|error| error.to_string());
                self.reply(&ToFirst::Assembled(answer));
            }
            ToNode::MeasureLink => {
                let next = (self.number as usize + 1) % self.nodes.len();
                let rate = self.nodes[next].measure(LINK_MEASUREMENT);
                self.reply(&ToFirst::LinkRate(rate));
            }
            ToNode::ArrivalRate => {
                let count = self.nodes.len();
                let previous = (self.number as usize + count - 1) % count;
                let rate = self.nodes[previous].take_arrival_rate();
                self.reply(&ToFirst::ArrivalRate(rate));
            }
            ToNode::Clock => {
                let since = nanos(self.started.elapsed());
                self.reply(&ToFirst::Clock(since));
            }
            ToNode::FlushTrace => {
                if let Some(trace) = &self.trace {
                    trace.flush();
                }
                self.reply(&ToFirst::Flushed);
            }
            ToNode::Step { rank, order } => self.step(rank, order)?,
            ToNode::Decided { rank, round, verdict } => {
                self.endpoint(rank)?.endpoint.decide(round, &verdict);
            }
            ToNode::Abort { rank, why } => {
                if let Ok(found) = self.endpoint(rank) {
                    found.endpoint.close(&why);
                }
            }
        }
        Ok(None)
    }

    /// Sends a message to the first node. If that is lost, its mailbox is closed as well.
    fn reply(&self, message: &ToFirst) {
        send(&*self.first, message);
    }

    fn endpoint(&mut self, rank: Rank) -> Result<&mut HostedRank, String> {
        let group = self.group.as_mut().ok_or("there is no group of ranks")?;
        group.endpoints.get_mut(&rank).ok_or(format!("{rank} is not on node {}", self.number))
    }

    fn begin(&mut self, run: &[u8]) -> Result<NodeDevices, String> {
        let offer = self.host.begin(run)?;
        self.in_flight.set_node_timeout(offer.node_timeout);
        self.own_inputs = match &offer.data {
            Some(data) => {
                let started = OwnInputs::start(data.clone());
                Some(started.map_err(no_thread)?)
            }
            None => None,
        };
        let has_data = self.own_inputs.is_some();
        Ok(NodeDevices { devices: self.offer.insert(offer).devices(), has_data })
    }

    // ---- Devices ----

    fn open(
        &mut self,
        slot: u32,
        order: OpenOrder,
        request_guard: &RequestGuard,
    ) -> Result<Opened, RuntimeError> {
        let (one, inputs) = self.open_device(slot, order, request_guard)?;
        let OpenDevice { driver, notes, identity, is_cpu, choices, untimed, .. } = one;
        let readback_elements_max =
            driver.run("its limits", |device| Ok(device.readback_elements_max()))?;
        let driver = Arc::new(driver);
        let (calls, queue) = mpsc::sync_channel(CALLS_MAX);
        let (closing, closed) = mpsc::sync_channel(1);
        let first = self.first.clone();
        let device = Arc::clone(&driver);
        let in_flight = self.in_flight.clone();
        thread::Builder::new()
            .name(format!("calls of device {slot}"))
            .spawn(move || {
                perform_all(&device, &queue, &in_flight, &*first);
                drop(device);
                drop(closing);
            })
            .map_err(RuntimeError::no_thread)?;
        self.watched.lock().insert(slot, (Arc::clone(&driver), None));
        self.slots.insert(slot, OpenSlot { driver, inputs, calls, closed });
        Ok(Opened { notes, identity, is_cpu, choices, untimed, readback_elements_max })
    }

    /// Ends the rank of a device, if it has one, and closes the device. Waits for a bounded time,
    /// so that its memory is free for the next device.
    fn close(&mut self, slot: u32) {
        if let Some(closed) = self.begin_close(slot) {
            // The expected result is a disconnect; a hung device is abandoned.
            let _ = closed.recv_timeout(CLOSING_DEADLINE);
        }
    }

    /// Begins to close a device; returns the channel that ends when it is closed.
    fn begin_close(&mut self, slot: u32) -> Option<mpsc::Receiver<()>> {
        self.watched.lock().remove(&slot);
        if let Some(group) = &mut self.group {
            group.endpoints.retain(|_, here| {
                if here.slot == slot {
                    here.endpoint.close("its device is closed");
                }
                here.slot != slot
            });
        }
        // The driver and the queue of calls end with the slot.
        self.slots.remove(&slot).map(|slot| slot.closed)
    }

    /// Opens a device; returns it with the input tensors that its plan uses.
    fn open_device(
        &self,
        slot: u32,
        order: OpenOrder,
        request_guard: &RequestGuard,
    ) -> Result<(OpenDevice, Arc<[TensorId]>), RuntimeError> {
        let OpenOrder { device, name, recipe, plan_hash, moments, tuning, kept_identity } = order;
        let Some(offer) = &self.offer else {
            return Err(RuntimeError::InvalidRequest("the run has not begun".into()));
        };
        let Some(selection) = offer.selections.get(device as usize) else {
            let why = format!("this node has no device {device}");
            return Err(RuntimeError::InvalidRequest(why));
        };
        let selection = selection.clone();
        let plan = recipe.plan(&offer.model).map_err(RuntimeError::InvalidRequest)?;
        if hash_of(&plan) != plan_hash {
            let why = "the model of this node is not that of the first one; start both with the \
                       same potluck";
            return Err(RuntimeError::InvalidRequest(why.into()));
        }
        memory::require_of_host(&selection, &plan, &moments)?;
        let inputs = used_inputs(&plan).into();
        let options = &offer.opening;
        let opened = open_selected(
            DeviceToOpen { selection, name: &name, plan, moments, options },
            |identity| {
                if kept_identity.as_deref() == Some(identity) {
                    return tuning;
                }
                TuneOptions { saved: Default::default(), ..tuning }
            },
            &mut |_, progress| {
                request_guard.progress();
                let tuning = ToFirst::Tuning {
                    slot,
                    done: progress.done,
                    total: progress.total,
                    elapsed_ms: progress.elapsed.as_millis() as u64,
                    compiling: progress.compiling,
                };
                send(&*self.first, &tuning);
            },
        )?;
        Ok((opened, inputs))
    }

    // ---- Ranks ----

    fn assemble(&mut self, assembly: RankGroupSpec) -> Result<(), RuntimeError> {
        self.disband("another group begins");
        let world = assembly.nodes.len();
        if !assembly.edges.is_sound(world) {
            let why = "the edges of the group are not those of its ranks";
            return Err(RuntimeError::InvalidRequest(why.into()));
        }
        if !assembly.groups.is_sound(world) || !assembly.layout.is_sound(&assembly.groups) {
            let why = "the chunks of the group are not those of its buckets";
            return Err(RuntimeError::InvalidRequest(why.into()));
        }
        let is_own = |rank: &Rank| assembly.nodes.get(rank.index()) == Some(&self.number);
        if !assembly.endpoints.iter().all(|(rank, _)| is_own(rank)) {
            let why = "the ranks of the devices are not those of this node";
            return Err(RuntimeError::InvalidRequest(why.into()));
        }
        let mut own = Vec::new();
        let mut pools: usize = 0;
        for (rank, _) in &assembly.endpoints {
            let positions = assembly.groups.positions(*rank);
            let pool = ring_pool_bytes_max(&assembly.layout, positions.clone(), true);
            pools = pools.saturating_add(pool);
            own.push(positions);
        }
        memory::require(pools.saturating_add(arriving_bytes_max(&assembly.layout, &own)))?;
        self.trace = assembly.trace_epoch.and_then(|epoch| self.trace_from(epoch));
        let options = WorkerGroupOptions {
            reduce_site: assembly.reduce_site,
            all_reduces: assembly.all_reduces,
            edges: assembly.edges,
            trace: self.trace.clone(),
            labels: assembly.labels,
        };
        let generation = assembly.generation;
        let layout = GroupLayout {
            shards: Arc::new(assembly.layout),
            groups: assembly.groups,
            options,
            generation,
        };
        let mut addresses = Vec::with_capacity(assembly.nodes.len());
        for (rank, node) in assembly.nodes.iter().enumerate() {
            if *node == self.number {
                addresses.push(layout.mailboxes(Rank(rank as u32)));
                continue;
            }
            let Some(connection) = self.nodes.get(*node as usize) else {
                return Err(RuntimeError::InvalidRequest(format!("there is no node {node}")));
            };
            addresses.push(RankAddress::Remote(connection.carrier()));
        }
        let addresses = RankAddresses::from(addresses);
        let endpoints = assembly.endpoints;
        let arriving = ArrivingFrames::new(&layout, addresses.clone());
        let coordinator = Mailbox::new(2 * endpoints.len() + 2);
        let mut group = Group { coordinator: coordinator.clone(), endpoints: BTreeMap::new() };
        for (rank, slot) in endpoints {
            let Some(OpenSlot { driver, inputs, .. }) = self.slots.get(&slot) else {
                return Err(RuntimeError::InvalidRequest(format!("there is no device {slot}")));
            };
            let driver = Arc::clone(driver);
            let inputs = Arc::clone(inputs);
            let name = driver.name().to_string();
            let endpoint = LocalEndpoint::start(rank, &name, &layout, &addresses, &coordinator)?;
            let endpoint = Arc::new(endpoint);
            group
                .endpoints
                .insert(rank, HostedRank { slot, endpoint, driver, inputs, program: None });
        }
        let first = self.first.clone();
        thread::Builder::new()
            .name("votes and ends".into())
            .spawn(move || forward_reports(&coordinator, generation, &*first))
            .map_err(RuntimeError::no_thread)?;
        // Only after all errors, so that the seats of a failed group have no other owner and end.
        for HostedRank { slot, endpoint, driver, .. } in group.endpoints.values() {
            let watched = (Arc::clone(driver), Some(Arc::clone(endpoint)));
            self.watched.lock().insert(*slot, watched);
        }
        *self.frames.lock() = Some(Arc::new(arriving));
        self.group = Some(group);
        Ok(())
    }

    /// Returns a trace that is sent to the first node; it begins `epoch` nanoseconds after this
    /// node's start. `None` if the clock cannot represent that time.
    fn trace_from(&self, epoch: i64) -> Option<Trace> {
        let distance = Duration::from_nanos(epoch.unsigned_abs());
        let epoch = if epoch < 0 {
            self.started.checked_sub(distance)?
        } else {
            self.started.checked_add(distance)?
        };
        let first = self.first.clone();
        Some(Trace::sent(epoch, move |lines| send(&*first, &ToFirst::Trace(lines))))
    }

    fn step(&mut self, rank: Rank, order: StepOrder) -> Result<(), String> {
        let faults = self.offer.as_ref().map(|offer| offer.faults.clone()).unwrap_or_default();
        let group = self.group.as_mut().ok_or("there is no group of ranks")?;
        let here = group.endpoints.get_mut(&rank).ok_or(format!("{rank} is on another node"))?;
        if let Some(program) = order.program {
            here.program = Some(Arc::new(program));
        }
        let program = here.program.clone().ok_or("a step without a program")?;
        let states = order.states.len();
        if states > 0 && states != program.micro_batches.len() {
            let needs = program.micro_batches.len();
            return Err(format!("states of {states} of {needs} micro-batches"));
        }
        let round = order.round;
        let given = order.micro_batches;
        let micro_batches: Result<Vec<Inputs>, String> = match &mut self.own_inputs {
            Some(own) if given.is_empty() && !program.micro_batches.is_empty() => {
                own.of_step(rank, round.step, &program, &here.inputs)
            }
            _ => Ok(given),
        };
        let submitted = match micro_batches {
            Ok(inputs) if inputs.len() != program.micro_batches.len() => {
                let has = inputs.len();
                let needs = program.micro_batches.len();
                return Err(format!("{has} inputs for a step of {needs} micro-batches"));
            }
            Ok(micro_batches) => {
                let StepOrder { states, run_key, is_training, samples, update, .. } = order;
                let input = Arc::new(StepInput {
                    states,
                    run_key,
                    is_training,
                    samples,
                    update,
                    average_weight: order.average_weight,
                    clip: order.clip,
                    loss_scale: order.loss_scale,
                    faults,
                    ..StepInput::new(round, rank, program, micro_batches)
                });
                here.endpoint.restart(round);
                here.endpoint.submit(&here.driver, &input, &group.coordinator)
            }
            Err(why) => {
                let adapter = here.driver.name().into();
                Err(DeviceError::Input { adapter, step: round.step, why })
            }
        };
        if let Err(error) = submitted {
            let group = round.generation;
            self.reply(&ToFirst::Finished { rank, group, result: Err(error) });
        }
        Ok(())
    }

    /// Ends the ranks of this node; their devices remain open.
    fn disband(&mut self, why: &str) {
        *self.frames.lock() = None;
        for (_, endpoint) in self.watched.lock().values_mut() {
            *endpoint = None;
        }
        let Some(Group { coordinator, endpoints }) = self.group.take() else { return };
        for HostedRank { endpoint, .. } in endpoints.values() {
            endpoint.close(why);
        }
        coordinator.close(why);
    }
}

fn send(first: &dyn NodeConnection, message: &ToFirst) {
    // Encoding fails only for types that postcard does not support. A closed connection also closes
    // the mailbox of the server.
    if let Ok(bytes) = postcard::to_allocvec(message) {
        let _ = first.send(bytes);
    }
}

/// Performs the calls of a device, in order. The error of a call without a reply is returned by the
/// next one.
fn perform_all(
    driver: &DeviceThread,
    calls: &mpsc::Receiver<(Option<u64>, DeviceCall)>,
    in_flight: &Arc<InFlightRequests>,
    first: &dyn NodeConnection,
) {
    let mut failed: Option<DeviceError> = None;
    for (id, call) in calls {
        // The device's watchdog ends a stuck call.
        let _duty = in_flight.begin(Duration::MAX);
        let performed: Result<CallReply, DeviceError> = match failed.take() {
            Some(error) => Err(error),
            None => driver.run("a call", move |device| perform_call(device, call)),
        };
        match (id, performed) {
            (Some(id), reply) => send(first, &ToFirst::Reply { id, reply }),
            (None, Err(error)) => failed = Some(error),
            (None, Ok(_)) => {}
        }
    }
}

/// Sends the votes and the ends of steps to the first node until the group ends.
fn forward_reports(coordinator: &Mailbox<CoordinatorMsg>, group: u64, first: &dyn NodeConnection) {
    while let Ok(message) = coordinator.recv(None) {
        let message = match message {
            CoordinatorMsg::Vote(vote) => ToFirst::Vote(vote),
            CoordinatorMsg::Finished(rank, result) => ToFirst::Finished { rank, group, result },
        };
        send(first, &message);
    }
}

/// Reports the signs of life of all devices and of the node until the mailbox is closed.
fn report_activity(
    first: &dyn NodeConnection,
    watched: &Watched,
    in_flight: &InFlightRequests,
    stop: &Mailbox<()>,
) {
    let mut reported = Vec::new();
    while let Err(RecvError::TimedOut) = stop.recv(Some(Instant::now() + ACTIVITY_INTERVAL)) {
        let mut slots = Vec::new();
        for (slot, (driver, endpoint)) in watched.lock().iter() {
            let of_rank = match endpoint {
                Some(endpoint) => endpoint.activity(driver.heartbeats()),
                None => RankActivity::default(),
            };
            slots.push(SlotActivity {
                slot: *slot,
                heartbeats: driver.heartbeats(),
                is_waiting: of_rank.is_waiting,
                received: of_rank.received,
            });
        }
        // Repeated reports would fill a queue while the network is interrupted.
        if slots != reported {
            send(first, &ToFirst::Activity(slots.clone()));
            reported = slots;
        }
        if in_flight.is_to_be_told(first.arrived()) {
            send(first, &ToFirst::Working);
        }
    }
}

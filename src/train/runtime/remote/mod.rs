//! Devices of other nodes. The first node of a run has one [`executor::RemoteExecutor`] per device
//! of another node, which sends all calls; the other nodes perform them ([`node::NodeServer`]). A
//! step is an order to the node, whose ranks exchange values directly with the ranks of all nodes.

pub mod calls;
pub(crate) mod executor;
pub mod first;
mod in_flight;
pub mod node;
mod open_events;
pub(crate) mod own_inputs;
mod perform;
mod texts;
pub(crate) mod waiting;
pub mod wire;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::RuntimeError;
use super::addresses::{ArrivingFrames, RankAddresses};
use super::device_thread::DeviceThread;
use super::group_layout::GroupLayout;
use super::messages::CoordinatorMsg;
use super::open::{OpenDevice, tuning_of};
use super::remote_endpoint::RemoteEndpoint;
use executor::RemoteExecutor;
use first::{NodeEndpoint, OrderedOpening, RemoteNode};
use perform::plan_hash;
use potluck_core::Rank;
use potluck_graph::Plan;
use potluck_graph::print::MemoryUsage;
use potluck_kernels::autotune::{TuneOptions, TuneProgress};
use potluck_kernels::device::{RemoteDeviceInfo, Selection};
use potluck_kernels::exec::Moments;
use potluck_parallel::comm::Mailbox;
use potluck_parallel::planner::links::RingLinks;
use potluck_parallel::{PlacedCluster, PlacedNode, RankPlacement};
use wire::{OpenOrder, Opened, PlanRecipe, RankGroupSpec};

/// Rounds of one group of ranks: many more than in a run.
const ROUNDS_OF_GROUP: u64 = 1 << 32;

pub(crate) fn next_generation() -> u64 {
    static GROUPS: AtomicU64 = AtomicU64::new(1);
    GROUPS.fetch_add(1, Ordering::Relaxed) * ROUNDS_OF_GROUP
}

pub(crate) const FIRST_NODE: u32 = 0;

pub(crate) const LINK_MEASUREMENT: Duration = Duration::from_millis(300);

/// Other nodes of a run, by number from 1 on; none in a run of one node.
#[derive(Clone, Default)]
pub struct RemoteNodes {
    pub nodes: Vec<Arc<RemoteNode>>,
    /// Offered devices, in the order of nodes.
    pub devices: Vec<RemoteDeviceInfo>,
    /// Name of the run, and the hosts of all nodes, the first one first.
    pub run: String,
    pub hosts: Vec<String>,
}

impl RemoteNodes {
    /// Returns by node, the first one first, whether the first node sends it the inputs of steps.
    pub(crate) fn receive_inputs(&self) -> Vec<bool> {
        let mut receive = vec![false];
        receive.extend(self.nodes.iter().map(|node| !node.has_data()));
        receive
    }
}

/// No other nodes: for a run of one node.
pub static NO_NODES: RemoteNodes =
    RemoteNodes { nodes: Vec::new(), devices: Vec::new(), run: String::new(), hosts: Vec::new() };

/// Opening of another node's device.
pub struct OpeningOnNode {
    ordered: OrderedOpening,
    name: String,
    plan: Plan,
    moments: Moments,
    /// Longest time without a sign of life of the device, once it is open.
    deadline: Duration,
}

impl OpeningOnNode {
    /// Waits until the device is open. `report` receives the device's name and the progress of
    /// autotuning.
    ///
    /// # Errors
    /// Returns `RuntimeError` if the device cannot be opened, or if its node is lost.
    pub fn opened(
        self,
        report: &mut dyn FnMut(&str, TuneProgress),
    ) -> Result<OpenDevice, RuntimeError> {
        let Self { ordered, name, plan, moments, deadline } = self;
        let (slot, opened) = ordered.opened(&mut |progress| report(&name, progress))?;
        let Opened { notes, identity, is_cpu, choices, untimed, readback_elements_max } = opened;
        let rows = plan.options.rows as u32;
        let executor =
            RemoteExecutor::new(slot.clone(), &name, plan, &moments, readback_elements_max);
        let driver = DeviceThread::start_remote(executor, slot, deadline)
            .map_err(RuntimeError::no_thread)?;
        Ok(OpenDevice { driver, notes, identity, is_cpu, position: 0, rows, choices, untimed })
    }
}

/// Options for opening a device of another node.
pub struct RemoteOpening<'a> {
    /// Display name.
    pub name: &'a str,
    pub tuning: &'a TuneOptions,
    /// Record of the device in the resumed run, with its kernel variants.
    pub kept: Option<&'a RankPlacement>,
    /// Shares of the ranks of the device's tensor group, if it is in one.
    pub tensor_shares: &'a [u32],
    /// Longest time without a sign of life of the device, once it is open.
    pub deadline: Duration,
}

impl RemoteNodes {
    /// Returns the devices of the nodes as selections.
    pub fn offered(&self) -> impl Iterator<Item = Selection> + '_ {
        self.devices.iter().cloned().map(Selection::Offered)
    }

    /// Returns the nodes of `candidates` devices for the record; `None` without other nodes.
    pub fn placed(&self, candidates: usize) -> Option<PlacedCluster> {
        if self.devices.is_empty() {
            return None;
        }
        let mut nodes = Vec::with_capacity(self.hosts.len());
        for (number, host) in (0..).zip(&self.hosts) {
            let devices = if number == FIRST_NODE {
                candidates.saturating_sub(self.devices.len())
            } else {
                self.devices.iter().filter(|device| device.node == number).count()
            };
            nodes.push(PlacedNode { host: host.clone(), devices });
        }
        Some(PlacedCluster { run: self.run.clone(), nodes })
    }

    /// Measures the links of the ring of nodes, all at the same time, by the arrivals at their
    /// receivers if these are known.
    ///
    /// # Errors
    /// Returns `RuntimeError` if a node is lost: of its first device among `count` ones, whose
    /// position is in `first_of_nodes`.
    pub(crate) fn measure_links(
        &self,
        first_of_nodes: &BTreeMap<u32, usize>,
        count: usize,
    ) -> Result<RingLinks, RuntimeError> {
        let at = |node: &RemoteNode, error: RuntimeError| match first_of_nodes.get(&node.number) {
            Some(position) => error.of_position(*position, count),
            None => error,
        };
        let mut answers = Vec::new();
        for node in &self.nodes {
            let asked = node.order_link_rate().map_err(|error| at(node, error))?;
            answers.push((node, asked));
        }
        let own = self.nodes.first().and_then(|next| next.measure_link());
        let mut rates = vec![own];
        for (node, answer) in answers {
            rates.push(node.answered(&answer).map_err(|error| at(node, error.into()))?);
        }
        let mut answers = Vec::new();
        for node in &self.nodes {
            let asked = node.ask_arrival_rate().map_err(|error| at(node, error))?;
            answers.push((node, asked));
        }
        let mut arrivals = Vec::new();
        for (node, answer) in answers {
            arrivals.push(node.answered(&answer).map_err(|error| at(node, error.into()))?);
        }
        // The last node's values arrive here.
        arrivals.push(self.nodes.last().and_then(|last| last.take_arrival_rate()));
        for (rate, arrived) in rates.iter_mut().zip(arrivals) {
            *rate = rate.map(|rate| rate.with_arrivals(arrived));
        }
        Ok(RingLinks(rates))
    }

    /// Begins to open a device on its node, with `plan` and `moments`.
    ///
    /// # Errors
    /// Returns `RuntimeError` if its node is lost.
    pub fn open(
        &self,
        device: &RemoteDeviceInfo,
        plan: Plan,
        moments: Moments,
        opening: RemoteOpening,
    ) -> Result<OpeningOnNode, RuntimeError> {
        let RemoteOpening { name, tuning, kept, tensor_shares, deadline } = opening;
        let Some(node) = self.nodes.iter().find(|node| node.number == device.node) else {
            return Err(RuntimeError::Defect(format!("there is no node {}", device.node)));
        };
        let order = OpenOrder {
            device: device.index,
            name: name.into(),
            recipe: PlanRecipe::of(&plan, tensor_shares),
            plan_hash: plan_hash(&plan),
            moments: moments.clone(),
            tuning: tuning_of(tuning, kept),
            kept_identity: kept.map(|kept| kept.identity.clone()),
        };
        // A reply has a part of what the device holds: a bucket or tensors.
        let held = MemoryUsage::of(&plan, moments.count).peak();
        let ordered = node.order_opening(order, held)?;
        Ok(OpeningOnNode { ordered, name: name.into(), plan, moments, deadline })
    }
}

/// Seats the devices of other nodes as ranks of a group; returns their seats by rank, and `None`
/// for devices of this process.
///
/// # Errors
/// Returns `RuntimeError` if a node refuses or is lost.
pub fn assemble(
    drivers: &[DeviceThread],
    layout: &GroupLayout,
    addresses: &RankAddresses,
    coordinator: &Mailbox<CoordinatorMsg>,
) -> Result<Vec<Option<Arc<dyn RemoteEndpoint>>>, RuntimeError> {
    let mut nodes: Vec<u32> = Vec::with_capacity(drivers.len());
    for driver in drivers {
        nodes.push(driver.remote().map_or(FIRST_NODE, |slot| slot.node.number));
    }
    let mut assembled: Vec<u32> = Vec::new();
    let mut answers = Vec::new();
    for slot in drivers.iter().filter_map(DeviceThread::remote) {
        let number = slot.node.number;
        if assembled.contains(&number) {
            continue;
        }
        assembled.push(number);
        slot.node.receive_frames(Arc::new(ArrivingFrames::new(layout, addresses.clone())));
        let mut own = Vec::new();
        for (rank, driver) in drivers.iter().enumerate() {
            if let Some(slot) = driver.remote()
                && slot.node.number == number
            {
                own.push((Rank(rank as u32), slot.slot));
            }
        }
        let mut trace_epoch = None;
        if let Some(trace) = &layout.options.trace {
            let (epoch, error) = slot.node.align(trace)?;
            let label = format!("clock of node {number} within {} us", error.as_micros());
            for (rank, _) in &own {
                trace.label(rank.0, &label);
            }
            trace_epoch = Some(epoch);
        }
        let assembly = RankGroupSpec {
            layout: layout.shards.as_ref().clone(),
            groups: layout.groups.clone(),
            edges: layout.options.edges.clone(),
            reduce_site: layout.options.reduce_site.clone(),
            all_reduces: layout.options.all_reduces,
            generation: layout.generation,
            nodes: nodes.clone(),
            endpoints: own,
            trace_epoch,
            labels: layout.options.labels.clone(),
        };
        answers.push((&slot.node, slot.node.order_assembly(assembly, coordinator.clone())?));
    }
    for (node, answer) in answers {
        node.assembled(&answer)?;
    }
    let mut endpoints: Vec<Option<Arc<dyn RemoteEndpoint>>> = Vec::with_capacity(drivers.len());
    for (rank, driver) in drivers.iter().enumerate() {
        let Some(slot) = driver.remote() else {
            endpoints.push(None);
            continue;
        };
        endpoints.push(Some(Arc::new(NodeEndpoint {
            slot: slot.clone(),
            rank: Rank(rank as u32),
            device: driver.name().to_string(),
            signs: slot.state(),
            sent: Default::default(),
        })));
    }
    Ok(endpoints)
}

//! Tests of devices of other nodes, which are threads of this process: connections hand bytes over.

#[cfg(test)]
mod mutations;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::calls::{CallReply, DeviceCall};
use super::first::{MESSAGES_MAX, RemoteNode};
use super::node::{NodeEnd, NodeHost, NodeInput, NodeOffer, NodeServer};
use super::own_inputs::InputSource;
use super::waiting::NodeLiveness;
use super::wire::{ToFirst, ToNode};
use super::{NO_NODES, RemoteNodes};
use crate::runtime::RuntimeError;
use crate::runtime::open::OpenOptions;
use crate::runtime::placement::assemble::assemble;
use crate::runtime::placement::types::{PlacedWorkers, PlacementRequest};
use crate::runtime::replica_check::compare;
use crate::runtime::step::{Inputs, StepInput, StepReport};
use crate::runtime::timing::Probe;
use potluck_core::faults::Faults;
use potluck_core::rng::Key;
use potluck_core::{BucketId, DType, HostTensor, Rank, Round, TensorId, decode};
use potluck_graph::model::gpt::{GptConfig, gpt};
use potluck_graph::optim::Optimizer;
use potluck_graph::{Graph, ModelGraph, MomentFormat, Region, Unary};
use potluck_kernels::autotune::TuneOptions;
use potluck_kernels::device::{DeviceError, Selection};
use potluck_kernels::exec::{BucketTensor, Executor};
use potluck_net::nodes::{FrameReceiver, NodeConnection};
use potluck_parallel::collective::CollectiveKind;
use potluck_parallel::comm::{Carrier, Closed, FrameContent, FrameHeader, FrameValues, Mailbox};
use potluck_parallel::planner::links::{LinkRate, RingLinks};
use potluck_parallel::planner::plans::Plans;
use potluck_parallel::{
    MicroBatch, ParallelOptions, PipelineOptions, Program, Shares, SpreadPrograms,
};

const BATCH: u32 = 12;
/// Longest time for which a node may show no progress.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(1500);
const ADAMW: Optimizer = Optimizer::AdamW { beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.0 };

/// Layer above the server of a node.
struct TestHost {
    model: ModelGraph,
    selections: Vec<Selection>,
    faults: Faults,
    data: Option<Arc<dyn InputSource>>,
}

impl NodeHost for TestHost {
    fn begin(&mut self, run: &[u8]) -> Result<NodeOffer, String> {
        match run {
            b"the run" => {}
            b"a long one" => thread::sleep(2 * ANSWER_TIMEOUT),
            other => panic!("{other:?}"),
        }
        Ok(NodeOffer {
            data: self.data.clone(),
            model: self.model.clone(),
            selections: self.selections.clone(),
            opening: OpenOptions::default(),
            node_timeout: Duration::from_secs(1),
            faults: self.faults.clone(),
        })
    }

    fn opens(&mut self) {}

    fn show(&mut self, _: &[u8]) {}
}

/// Returns true for messages that a node never sees.
type Deafness = fn(&ToNode) -> bool;

#[derive(Default)]
struct TestNode {
    number: usize,
    frames: FrameReceiver,
    /// Of a node that is not the first.
    inbox: OnceLock<Mailbox<NodeInput>>,
    is_cut: AtomicBool,
    /// True if the final values that it sends are lost.
    loses_values: AtomicBool,
    /// True if the last value of each of its replies is lost.
    shortens_replies: AtomicBool,
    /// Messages to this node that it never sees.
    is_deaf_to: Mutex<Option<Deafness>>,
    /// Reasons for which this node was given up.
    given_up: Mutex<Vec<String>>,
    /// True if a network is between it and other nodes, as [`confirmed`] and [`arrived`] tell.
    is_measured: AtomicBool,
    /// Most bytes of long messages that the first node takes from this one.
    messages_max: AtomicUsize,
    /// First messages that came, without long ones.
    heard: Mutex<Vec<Vec<u8>>>,
}

/// Most messages that a node keeps, and most bytes of one.
const HEARD_MAX: usize = 2000;

/// Connection from one node to another.
struct Wire {
    from: Arc<TestNode>,
    to: Arc<TestNode>,
    /// The first node's side of the other end, if one of the two is the first node.
    first: Arc<OnceLock<Arc<RemoteNode>>>,
}

impl Wire {
    fn is_cut(&self) -> bool {
        [&self.from, &self.to].iter().any(|end| end.is_cut.load(Ordering::SeqCst))
    }
}

/// Drops the last value that a message to the first node has read from a device.
fn shorten_reply(message: &mut Vec<u8>) {
    let Ok(ToFirst::Reply { id, reply: Ok(mut reply) }) = decode(message) else { return };
    if let CallReply::Read(values)
    | CallReply::ReadBank(values)
    | CallReply::ReadPlace(values)
    | CallReply::Add(values) = &mut reply
    {
        values.pop();
        *message = postcard::to_allocvec(&ToFirst::Reply { id, reply: Ok(reply) }).unwrap();
    }
}

impl NodeConnection for Wire {
    fn send(&self, mut message: Vec<u8>) -> Result<(), Closed> {
        if self.is_cut() {
            return Err(Closed("the wire is cut".into()));
        }
        if self.from.shortens_replies.load(Ordering::SeqCst) {
            shorten_reply(&mut message);
        }
        let mut heard = self.to.heard.lock().unwrap();
        if heard.len() < HEARD_MAX && message.len() < HEARD_MAX {
            heard.push(message.clone());
        }
        drop(heard);
        let is_deaf = |is_deaf: Deafness| self.to.number > 0 && is_deaf(&decode(&message).unwrap());
        if self.to.is_deaf_to.lock().unwrap().is_some_and(is_deaf) {
            return Ok(());
        }
        match self.to.number {
            0 => self.first.get().unwrap().receive(&message).map_err(Closed),
            _ => Ok(self.to.inbox.get().unwrap().send(NodeInput::Message(message))?),
        }
    }

    fn carrier(&self) -> Arc<dyn Carrier> {
        let Self { from, to, first } = self;
        Arc::new(Self { from: from.clone(), to: to.clone(), first: first.clone() })
    }

    fn arrived(&self) -> u64 {
        0
    }

    fn measure(&self, _: Duration) -> Option<LinkRate> {
        let is_measured = self.from.is_measured.load(Ordering::SeqCst);
        is_measured.then(|| confirmed(self.from.number, self.to.number))
    }

    fn take_arrival_rate(&self) -> Option<f64> {
        let is_measured = self.from.is_measured.load(Ordering::SeqCst);
        is_measured.then(|| arrived(self.to.number, self.from.number).bytes_per_s)
    }

    fn allow_messages(&self, bytes: usize) {
        self.to.messages_max.fetch_max(bytes, Ordering::SeqCst);
    }
}

/// Made-up rate of a link by its confirmations.
fn confirmed(from: usize, to: usize) -> LinkRate {
    let bytes_per_s = 1e6 * (10 * from + to) as f64;
    LinkRate { bytes_per_s, round_trip_s: 1e-3, processor_s_per_byte: 0.0 }
}

/// The same by the arrivals.
fn arrived(from: usize, to: usize) -> LinkRate {
    LinkRate { bytes_per_s: 1e9 + 1e6 * (10 * from + to) as f64, ..confirmed(from, to) }
}

impl Carrier for Wire {
    fn send(&self, header: FrameHeader, values: FrameValues) -> Result<(), Closed> {
        if self.is_cut() {
            return Err(Closed("the wire is cut".into()));
        }
        let header = FrameHeader::decode(&header.encode()).unwrap();
        let FrameContent::Chunk { kind, .. } = header.content else {
            return self.deliver(header, values);
        };
        if kind == CollectiveKind::AllGather && self.from.loses_values.load(Ordering::SeqCst) {
            return Ok(());
        }
        self.deliver(header, values)
    }
}

impl Wire {
    fn deliver(&self, header: FrameHeader, values: FrameValues) -> Result<(), Closed> {
        let bytes: &[u8] = values.as_ref();
        let frames = self.to.frames.lock().clone().expect("frames are expected");
        let mut buffer = frames.buffer(&header, bytes.len()).map_err(Closed)?;
        bytemuck::cast_slice_mut(&mut buffer).copy_from_slice(bytes);
        frames.deliver(header, buffer);
        Ok(())
    }
}

/// Nodes besides the first one, each with some CPU devices.
struct Nodes {
    remote: RemoteNodes,
    ends: Vec<Arc<TestNode>>,
    servers: Vec<JoinHandle<Result<NodeEnd, String>>>,
}

impl Nodes {
    fn start(graph: &ModelGraph, devices: &[usize], faults: &str) -> Self {
        Self::start_with(graph, devices, faults, None)
    }

    /// Starts nodes that have a copy of the data.
    fn start_with(
        graph: &ModelGraph,
        devices: &[usize],
        faults: &str,
        data: Option<Arc<dyn InputSource>>,
    ) -> Self {
        let end = |number| {
            let frames = FrameReceiver::default();
            let end = TestNode { number, frames, ..TestNode::default() };
            end.inbox.set(Mailbox::new(1 << 16)).unwrap();
            Arc::new(end)
        };
        let ends: Vec<_> = (0..=devices.len()).map(end).collect();
        let firsts: Vec<Arc<OnceLock<Arc<RemoteNode>>>> =
            ends.iter().map(|_| Arc::default()).collect();
        let wire = |from: usize, to: usize| -> Arc<dyn NodeConnection> {
            let first = firsts[from.max(to)].clone();
            Arc::new(Wire { from: ends[from].clone(), to: ends[to].clone(), first })
        };
        let (mut remote, mut servers) = (RemoteNodes::default(), Vec::new());
        for (number, &count) in (1..).zip(devices) {
            let to = wire(0, number);
            let frames = ends[0].frames.clone();
            let end = ends[number].clone();
            let watch = NodeLiveness {
                answer_timeout: ANSWER_TIMEOUT,
                on_signal: Box::new(|_| {}),
                give_up: Box::new(move |why| end.given_up.lock().unwrap().push(why.into())),
            };
            let node = RemoteNode::new(number as u32, "b", to, frames, watch);
            let node = Arc::new(node);
            firsts[number].set(node.clone()).ok().unwrap();
            remote.nodes.push(node);
            let mut host = TestHost {
                model: graph.clone(),
                selections: vec![Selection::cpu(count); count],
                faults: faults.parse().unwrap(),
                data: data.clone(),
            };
            let others: Vec<_> = (0..ends.len()).map(|to| wire(number, to)).collect();
            let frames = ends[number].frames.clone();
            let inbox = ends[number].inbox.get().unwrap().clone();
            servers.push(thread::spawn(move || {
                NodeServer::new(number as u32, &mut host, others, frames).run(&inbox)
            }));
        }
        for node in &remote.nodes {
            let answer = node.begin(b"the run".into()).unwrap();
            remote.devices.extend(node.offered(&answer).unwrap());
        }
        Self { remote, ends, servers }
    }

    /// Cuts all connections of a node.
    fn cut(&self, number: usize) {
        self.ends[number].is_cut.store(true, Ordering::SeqCst);
        self.remote.nodes[number - 1].lose("node 2 (b) is lost: the wire is cut");
    }

    fn end(self) {
        let over = NodeInput::Ended("the test is over".into());
        self.ends.iter().for_each(|end| end.inbox.get().unwrap().send(over.clone()).unwrap());
        for server in self.servers {
            let end = NodeEnd::Lost("the test is over".into());
            assert_eq!(server.join().unwrap(), Ok(end));
        }
    }
}

fn graph(tie: bool) -> ModelGraph {
    let config = GptConfig {
        vocabulary: 11,
        context: 8,
        positions: 8,
        layers: 2,
        heads: 2,
        width: 16,
        bias: false,
        dropout: 0.1,
        tie,
        activation: Unary::Gelu,
    };
    ModelGraph::training(gpt(&config).unwrap(), true).unwrap().with_averages(true)
}

fn inputs(graph: &Graph, first: u32, rows: usize) -> Inputs {
    let values = |(name, id): &(String, TensorId)| {
        let tensor = graph.tensor(*id);
        let count = tensor.shape.elements(rows);
        assert_eq!(tensor.dtype, DType::U32);
        let value = |at: usize| match name.as_str() {
            "samples" => first + at as u32,
            _ => (7 * first + 3 * at as u32) % 11,
        };
        (*id, HostTensor::Int((0..count).map(value).collect()))
    };
    graph.inputs_of_samples().map(values).collect()
}

/// Calls `test` with a request for the selected devices and the devices of other nodes.
fn with_request<R>(
    graph: &ModelGraph,
    (selector, nodes): (&str, &RemoteNodes),
    parallel: &ParallelOptions,
    test: impl FnOnce(&PlacementRequest) -> R,
) -> R {
    let (plans, probed) = (Plans::new(graph.clone()), graph.whole().clone());
    let probe: Probe = Arc::new(move |rows| inputs(&probed, 0, rows));
    test(&PlacementRequest {
        selector,
        nodes,
        parallel,
        batch: BATCH,
        micro_batch: 3,
        fits_micro_batch: true,
        optimizer: &ADAMW,
        plans: &plans,
        steps: None,
        probe: Some(probe),
        seed: 1,
        opening: OpenOptions::default(),
        tuning: &TuneOptions::default(),
        saved: None,
        retune: false,
        notify: &|_| {},
        trace: None,
        faults: Faults::none(),
    })
}

fn step(placed: &mut PlacedWorkers, step: u64) -> Result<Vec<StepReport>, RuntimeError> {
    let (round, programs) = (placed.group.round().next(step), placed.programs.clone());
    run_round(placed, round, &programs)
}

/// Runs a round of these programs, by rank.
fn run_round(
    placed: &mut PlacedWorkers,
    round: Round,
    programs: &[Arc<Program>],
) -> Result<Vec<StepReport>, RuntimeError> {
    let step = round.step;
    let graph = placed.plan.graph.clone();
    let input = |(rank, program): (u32, &Arc<Program>)| {
        let of = |part: &potluck_parallel::MicroBatch| {
            inputs(&graph, part.first + 100 * step as u32, part.rows as usize)
        };
        let micro_batches = if placed.group.reads_inputs(Rank(rank)) {
            Vec::new()
        } else {
            program.micro_batches.iter().map(of).collect()
        };
        Arc::new(StepInput {
            run_key: Key::new(1),
            samples: 6,
            update: ADAMW.update(0.01, step),
            average_weight: Some(0.25),
            clip: 1.0,
            ..StepInput::new(round, Rank(rank), program.clone(), micro_batches)
        })
    };
    let inputs: Vec<_> = (0..).zip(programs).map(input).collect();
    placed.group.step(&inputs)
}

/// Losses of 6 steps, the parameters at their end and then their averages, and the names of the
/// devices.
type Trained = (Vec<f64>, Vec<Vec<u32>>, Vec<String>);

fn train(request: &PlacementRequest) -> Trained {
    train_by(request, &mut |placed, number| step(placed, number).unwrap())
}

/// Trains by steps that `take` takes.
fn train_by(
    request: &PlacementRequest,
    take: &mut dyn FnMut(&mut PlacedWorkers, u64) -> Vec<StepReport>,
) -> Trained {
    let mut placed = assemble(request, &mut |_, _| {}).unwrap();
    let initialize = |_: Rank, device: &mut dyn Executor| device.initialize(5);
    placed.group.run_on_all("initialization", initialize).unwrap();
    let mut losses = Vec::new();
    for number in 1..=6 {
        losses.push(take(&mut placed, number)[0].verdict.totals().loss);
    }
    assert_eq!(compare(&placed.group, &placed.plan, false).unwrap(), []);
    let buckets = (0..placed.plan.buckets.len() as u32).map(BucketId);
    let read = |bucket: BucketId| {
        let rank = placed.group.groups().of(bucket).iter().last().unwrap().1;
        let read =
            move |device: &mut dyn Executor| device.read_bucket(BucketTensor::Parameters, bucket);
        let values = placed.group.run_on(rank, "reading", read).unwrap();
        values.into_iter().map(f32::to_bits).collect()
    };
    let mut bits: Vec<Vec<u32>> = buckets.map(read).collect();
    let averages = placed.group.run_on_all("reading", |_, device| {
        let mut values = Vec::new();
        for bucket in (0..device.plan().buckets.len() as u32).map(BucketId) {
            if !device.owned(bucket).is_empty() {
                values.extend(device.read_bucket(BucketTensor::Average, bucket)?);
            }
        }
        Ok(values)
    });
    for values in averages.unwrap() {
        bits.push(values.into_iter().map(f32::to_bits).collect());
    }
    let name = |rank| placed.group.name(Rank(rank)).to_string();
    (losses, bits, (0..placed.group.world() as u32).map(name).collect())
}

fn fixed(shares: &[usize]) -> ParallelOptions {
    ParallelOptions {
        shares: Shares::Fixed(shares.into()),
        chunk_bytes: 1024,
        ..Default::default()
    }
}

#[test]
fn ranks_on_several_nodes_have_the_bits_of_one_process() {
    let shares = fixed(&[4, 2, 3, 3]);
    let [exact, rounded] =
        [MomentFormat::F32, MomentFormat::Bf16].map(|format| graph(true).with_moments(format));
    let one = |graph| with_request(graph, ("cpu*4", &NO_NODES), &shares, train);
    let (expected, of_rounded) = (one(&exact), one(&rounded));
    assert_ne!(expected.1, of_rounded.1);
    for (graph, expected, selector, devices) in [
        (&exact, &expected, "cpu*2", &[2][..]),
        (&rounded, &of_rounded, "cpu", &[3]),
        (&exact, &expected, "cpu", &[1, 1, 1]),
    ] {
        let nodes = Nodes::start(graph, devices, "");
        let (losses, bits, names) = with_request(graph, (selector, &nodes.remote), &shares, train);
        assert_eq!((&losses, &bits), (&expected.0, &expected.1), "{selector} {devices:?}");
        assert!(names[3].starts_with("b cpu"), "{names:?}");
        nodes.end();
    }
}

/// Takes a step that leaves its all-gathers, which are done in the next one, or behind the third
/// and the last one.
fn spread_step(placed: &mut PlacedWorkers, number: u64) -> Vec<StepReport> {
    let spread = placed.spread.clone().expect("the ranks are on several nodes");
    let of = |program: fn(&SpreadPrograms) -> &Arc<Program>| {
        spread.iter().map(|rank| program(rank).clone()).collect::<Vec<_>>()
    };
    let is_unsettled = placed.group.is_unsettled();
    assert_eq!(is_unsettled, ![1, 4].contains(&number));
    let programs = if is_unsettled { of(|rank| &rank.next) } else { of(|rank| &rank.first) };
    let round = placed.group.round().next(number);
    let reports = run_round(placed, round, &programs).unwrap();
    let read = |placed: &PlacedWorkers| {
        placed.group.run_on_all("reading", |_, device| {
            device.read_bucket(BucketTensor::Parameters, BucketId(0))
        })
    };
    let refused = read(placed).unwrap_err().to_string();
    assert!(refused.contains("are not gathered yet"), "{refused}");
    if number.is_multiple_of(3) {
        run_round(placed, round.settling(), &of(|rank| &rank.settle)).unwrap();
        let parameters = read(placed).unwrap();
        assert!(parameters.iter().all(|one| *one == parameters[0]));
    }
    reports
}

#[test]
fn replies_of_a_node_are_bounded_by_what_its_devices_hold() {
    let graph = graph(true);
    // Devices of the node have 3 samples each, which count as states.
    let held = |devices: usize, shares: &[usize]| {
        let nodes = Nodes::start(&graph, &[devices], "");
        let messages_max = || nodes.ends[1].messages_max.load(Ordering::SeqCst);
        assert_eq!(messages_max(), 0);
        with_request(&graph, ("cpu", &nodes.remote), &fixed(shares), train);
        let held = messages_max() - MESSAGES_MAX;
        nodes.end();
        held
    };
    let of_one = held(1, &[9, 3]);
    let parameters: usize = graph.whole().parameters.iter().map(|p| p.slice.elements()).sum();
    // Parameters, gradients, two moments, averages, and activations.
    assert!((5 * 4 * parameters..(1 << 20)).contains(&of_one), "{of_one} of {parameters}");
    assert_eq!(held(3, &[3, 3, 3, 3]), 3 * of_one);
}

#[test]
fn steps_whose_all_gathers_travel_in_the_next_one_have_the_same_bits() {
    // One rank has no sample.
    for shares in [[4, 2, 3, 3], [6, 0, 3, 3]] {
        let shares = fixed(&shares);
        let graph = graph(true);
        let expected = with_request(&graph, ("cpu*4", &NO_NODES), &shares, |request| {
            assert!(assemble(request, &mut |_, _| {}).unwrap().spread.is_none());
            train(request)
        });
        let nodes = Nodes::start(&graph, &[2], "");
        let (losses, bits, _) =
            with_request(&graph, ("cpu*2", &nodes.remote), &shares, |request| {
                train_by(request, &mut spread_step)
            });
        assert_eq!((losses, bits), (expected.0, expected.1));
        nodes.end();
    }
}

#[test]
fn a_node_that_is_lost_while_gathers_travel_leaves_parameters_of_two_steps() {
    let graph = graph(true);
    let nodes = Nodes::start(&graph, &[2], "lost@forward:2/3");
    with_request(&graph, ("cpu*2", &nodes.remote), &fixed(&[4, 2, 3, 3]), |request| {
        let mut placed = assemble(request, &mut |_, _| {}).unwrap();
        let initialize = |_: Rank, device: &mut dyn Executor| device.initialize(5);
        placed.group.run_on_all("initialization", initialize).unwrap();
        spread_step(&mut placed, 1);
        let next: Vec<_> = placed.spread.iter().flatten().map(|rank| rank.next.clone()).collect();
        let round = placed.group.round().next(2);
        run_round(&mut placed, round, &next).unwrap_err();
        let readable = placed.group.readable();
        assert!(matches!(readable, Err(RuntimeError::HalfUpdated { .. })), "{readable:?}");
    });
    nodes.end();
}

#[test]
fn pipelines_over_nodes_have_the_bits_of_one_process() {
    for (tie, stages, shares) in [(false, 4, &[12][..]), (true, 2, &[5, 7])] {
        let graph = graph(tie);
        let blocks = if stages == 4 { vec![1; 4] } else { vec![1, 3] };
        let pipeline =
            PipelineOptions { stages, blocks_per_stage: blocks, ..PipelineOptions::default() };
        let parallel = ParallelOptions { pipeline, ..fixed(shares) };
        let expected = with_request(&graph, ("cpu*4", &NO_NODES), &parallel, train);
        for (selector, devices) in [("cpu*2", &[2][..]), ("cpu", &[1, 2])] {
            let nodes = Nodes::start(&graph, devices, "");
            let found = with_request(&graph, (selector, &nodes.remote), &parallel, train);
            assert_eq!((&found.0, &found.1), (&expected.0, &expected.1), "{stages} {devices:?}");
            nodes.end();
        }
    }
}

/// Copy of the data that a node has, to a step at which a sample cannot be read.
struct Copy {
    graph: Graph,
    last: u64,
    read: Mutex<Vec<(u64, usize)>>,
}

impl InputSource for Copy {
    fn micro_batch(
        &self,
        step: u64,
        part: &MicroBatch,
        wanted: &[TensorId],
    ) -> Result<Inputs, String> {
        if step > self.last {
            return Err(format!("sample {step} is gone"));
        }
        self.read.lock().unwrap().push((step, wanted.len()));
        let mut all = inputs(&self.graph, part.first + 100 * step as u32, part.rows as usize);
        all.retain(|(tensor, _)| wanted.contains(tensor));
        Ok(all)
    }
}

impl Copy {
    fn new(graph: &ModelGraph, last: u64) -> Arc<Self> {
        Arc::new(Self { graph: graph.whole().clone(), last, read: Mutex::default() })
    }
}

#[test]
fn nodes_with_the_data_read_their_inputs_and_have_the_same_bits() {
    let (graph, shares) = (graph(true), fixed(&[4, 2, 3, 3]));
    let expected = with_request(&graph, ("cpu*4", &NO_NODES), &shares, train);
    let copy = Copy::new(&graph, 7);
    let nodes = Nodes::start_with(&graph, &[2], "", Some(copy.clone()));
    let found = with_request(&graph, ("cpu*2", &nodes.remote), &shares, train);
    assert_eq!((&found.0, &found.1), (&expected.0, &expected.1));
    nodes.end();
    // Two ranks, each with one micro-batch in each of 6 steps, and inputs read ahead for the next
    // step.
    let read = copy.read.lock().unwrap();
    assert_eq!(read.iter().filter(|(step, inputs)| *step <= 6 && *inputs == 3).count(), 12);
}

#[test]
fn stages_read_only_the_inputs_that_they_use() {
    let graph = graph(false);
    let pipeline =
        PipelineOptions { stages: 2, blocks_per_stage: vec![2, 2], ..PipelineOptions::default() };
    let parallel = ParallelOptions { pipeline, ..fixed(&[12]) };
    let expected = with_request(&graph, ("cpu*2", &NO_NODES), &parallel, train);
    let copy = Copy::new(&graph, 7);
    let nodes = Nodes::start_with(&graph, &[1], "", Some(copy.clone()));
    let found = with_request(&graph, ("cpu", &nodes.remote), &parallel, train);
    assert_eq!((&found.0, &found.1), (&expected.0, &expected.1));
    nodes.end();
    // The second stage has no embedding: targets, and the samples' ids for dropout.
    let read = copy.read.lock().unwrap();
    assert!(read.iter().all(|(_, inputs)| *inputs == 2), "{read:?}");
}

#[test]
fn a_sample_that_a_node_cannot_read_ends_the_step_and_is_named() {
    let (graph, shares) = (graph(true), fixed(&[6, 6]));
    let nodes = Nodes::start_with(&graph, &[1], "", Some(Copy::new(&graph, 1)));
    with_request(&graph, ("cpu", &nodes.remote), &shares, |request| {
        let mut placed = assemble(request, &mut |_, _| {}).unwrap();
        step(&mut placed, 1).unwrap();
        let error = step(&mut placed, 2).unwrap_err();
        let text = error.to_string();
        let expected = "the samples of step 2 cannot be read on its node: sample 2 is gone";
        assert!(text.starts_with("rank 1: b cpu") && text.ends_with(expected), "{text}");
        assert!(!error.can_go_on(), "the file will not come back");
    });
    nodes.end();
}

#[test]
fn devices_of_other_nodes_are_measured_there() {
    let graph = graph(false);
    for stages in [1, 2] {
        let pipeline = PipelineOptions { stages, ..PipelineOptions::default() };
        let parallel = ParallelOptions { pipeline, ..ParallelOptions::default() };
        let nodes = Nodes::start(&graph, &[1], "");
        let (losses, ..) = with_request(&graph, ("cpu", &nodes.remote), &parallel, train);
        assert!(losses.iter().all(|loss| loss.is_finite()), "{losses:?}");
        nodes.end();
    }
}

#[test]
fn work_of_many_calls_is_one_call_of_a_device_on_another_node() {
    let (graph, shares) = (graph(true), fixed(&[6, 6]));
    let nodes = Nodes::start(&graph, &[1], "");
    let seconds = with_request(&graph, ("cpu", &nodes.remote), &shares, |request| {
        let placed = assemble(request, &mut |_, _| {}).unwrap();
        nodes.ends[1].heard.lock().unwrap().clear();
        let values = inputs(graph.whole(), 0, 3);
        let update = request.optimizer.update(0.0, 1);
        let timing = move |device: &mut dyn Executor| {
            device.initialize(5)?;
            let (host_s, device_s) = device.time_addition(BucketId(0), 0..64)?;
            let block = device.time_blocks(&values, 3, 1)?[0];
            let micro_batch_s = device.time_micro_batch(&values, 3, 2)?;
            let (read_s, write_s) = device.time_exchange()?;
            let update_s = device.time_update(&update)?;
            let of_block = block.forward_s;
            Ok([host_s, device_s, of_block, micro_batch_s, read_s, write_s, update_s])
        };
        let seconds = placed.group.run_on(Rank(1), "timing", timing).unwrap();
        let name = |message: &Vec<u8>| match decode(message).unwrap() {
            ToNode::Call { call, .. } => Some(call.name()),
            _ => None,
        };
        // A copy: what fails below closes the device, which is heard too.
        let heard = nodes.ends[1].heard.lock().unwrap().clone();
        let called: Vec<&str> = heard.iter().filter_map(name).collect();
        let expected = [
            "initialize",
            "time the addition of gradients",
            "time blocks",
            "time a micro-batch",
            "time an exchange",
            "time an update",
        ];
        assert_eq!(called, expected);
        seconds
    });
    assert!(seconds.iter().all(|seconds| seconds.is_finite() && *seconds >= 0.0), "{seconds:?}");
    nodes.end();
}

#[test]
fn a_fault_on_another_node_ends_the_step_for_all_and_names_the_device() {
    let (graph, shares) = (graph(true), fixed(&[4, 4, 4]));
    for point in ["forward", "reduce", "verdict", "gather"] {
        let nodes = Nodes::start(&graph, &[1, 1], &format!("lost@{point}:2/2"));
        with_request(&graph, ("cpu", &nodes.remote), &shares, |request| {
            let mut placed = assemble(request, &mut |_, _| {}).unwrap();
            step(&mut placed, 1).unwrap();
            let error = step(&mut placed, 2).unwrap_err().to_string();
            assert!(error.starts_with("rank 2: b cpu 2"), "{point}: {error}");
            assert!(error.contains("the device was lost"), "{point}: {error}");
        });
        nodes.end();
    }
}

/// Groups follow each other on the same nodes: what was on its way in the one before is not taken
/// for values of the next, although steps have the same numbers.
#[test]
fn another_group_has_other_rounds_and_opens_the_devices_again() {
    let (graph, shares) = (graph(true), fixed(&[4, 4, 4]));
    let nodes = Nodes::start(&graph, &[2], "");
    let mut ended = Vec::new();
    for _ in 0..2 {
        let (found, before) = with_request(&graph, ("cpu", &nodes.remote), &shares, |request| {
            let mut placed = assemble(request, &mut |_, _| {}).unwrap();
            let before = placed.group.round();
            step(&mut placed, 1).unwrap();
            (placed.group.round(), before)
        });
        assert_eq!((found.step, before.step), (1, 0));
        ended.push(found);
    }
    assert!(ended[0].generation < ended[1].generation, "{ended:?}");
    let frames = nodes.ends[1].frames.lock().clone().unwrap();
    let late = |round| {
        let content = potluck_parallel::comm::FrameContent::Piece {
            edge: potluck_core::EdgeId(0),
            micro_batch: 0,
            start: 0,
        };
        frames.is_late(&FrameHeader { to: Rank(1), round, content })
    };
    assert!(late(ended[0]) && !late(ended[1]));
    nodes.end();
}

#[test]
fn a_node_that_is_lost_ends_the_step_and_every_call() {
    let (graph, shares) = (graph(true), fixed(&[4, 4, 4]));
    let nodes = Nodes::start(&graph, &[1, 1], "");
    with_request(&graph, ("cpu", &nodes.remote), &shares, |request| {
        let mut placed = assemble(request, &mut |_, _| {}).unwrap();
        step(&mut placed, 1).unwrap();
        nodes.cut(2);
        let error = step(&mut placed, 2).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("node 2 (b) is lost: the wire is cut"), "{text}");
        assert_eq!(error.exit_code(), 75);
        let left = placed.group.readable().unwrap();
        assert_eq!(left, [Rank(0), Rank(1)]);
        let read = |device: &mut dyn Executor| device.loss();
        assert!(placed.group.read_on(Rank(1), "reading", read).is_ok());
        assert!(placed.group.read_on(Rank(2), "reading", read).is_err());
    });
    nodes.end();
}

/// The rank on the other node has ended the step, and the values that it sent have not arrived when
/// its node is lost.
#[test]
fn a_node_that_is_lost_after_the_end_of_its_rank_ends_the_step_for_the_others() {
    let (graph, shares) = (graph(true), fixed(&[4, 8]));
    let nodes = Nodes::start(&graph, &[1], "");
    with_request(&graph, ("cpu", &nodes.remote), &shares, |request| {
        let mut placed = assemble(request, &mut |_, _| {}).unwrap();
        step(&mut placed, 1).unwrap();
        nodes.ends[1].loses_values.store(true, Ordering::SeqCst);
        let node = nodes.remote.nodes[0].clone();
        let losing = thread::spawn(move || {
            thread::sleep(Duration::from_millis(300));
            node.lose("node 1 (b) is lost: the wire is cut");
        });
        let error = step(&mut placed, 2).unwrap_err();
        assert_eq!(error.exit_code(), 75, "{error}");
        let text = error.to_string();
        assert!(text.contains("rank 1: node 1 (b) is lost: the wire is cut"), "{text}");
        losing.join().unwrap();
    });
    nodes.end();
}

/// The node is connected, and its cluster has no reason to lose it.
#[test]
fn a_node_that_does_not_answer_is_lost_and_what_it_did_not_answer_is_named() {
    let (graph, shares) = (graph(true), fixed(&[4, 8]));
    let cases: [(&str, Deafness); 4] = [
        ("the order to open b cpu", |of| matches!(of, ToNode::Open { .. })),
        ("the order to seat its ranks", |of| matches!(of, ToNode::Assemble(_))),
        ("the question for its time", |of| matches!(of, ToNode::Clock)),
        ("a call of b cpu", |of| matches!(of, ToNode::Call { call: DeviceCall::Loss { .. }, .. })),
    ];
    let check = |(what, deaf): &(&str, Deafness)| {
        let directory = tempfile::tempdir().unwrap();
        let nodes = Nodes::start(&graph, &[1], "");
        *nodes.ends[1].is_deaf_to.lock().unwrap() = Some(*deaf);
        let error = with_request(&graph, ("cpu", &nodes.remote), &shares, |request| {
            let trace = Some(directory.path().join("trace"));
            let request = PlacementRequest { trace, ..request.clone() };
            let placed = assemble(&request, &mut |_, _| {})?;
            placed.group.run_on(Rank(1), "reading", |device| device.loss())
        });
        let error = error.unwrap_err();
        let text = error.to_string();
        assert!(text.contains("node 1 (b) is lost: it is connected, but"), "{text}");
        assert!(text.contains(&format!("neither answered {what}")), "{text}");
        assert!(text.ends_with("for 1.5 seconds"), "{text}");
        assert_eq!(error.exit_code(), 75);
        assert_eq!(nodes.ends[1].given_up.lock().unwrap().len(), 1);
        nodes.end();
    };
    thread::scope(|scope| cases.iter().for_each(|case| drop(scope.spawn(|| check(case)))));
    let deafness: Deafness = |of| matches!(of, ToNode::MeasureLink | ToNode::ArrivalRate);
    for asks_for_arrivals in [false, true] {
        let nodes = Nodes::start(&graph, &[1], "");
        *nodes.ends[1].is_deaf_to.lock().unwrap() = Some(deafness);
        let node = &nodes.remote.nodes[0];
        let error = if asks_for_arrivals {
            node.answered(&node.ask_arrival_rate().unwrap()).unwrap_err()
        } else {
            node.answered(&node.order_link_rate().unwrap()).unwrap_err()
        };
        let what =
            if asks_for_arrivals { "the question for the rate" } else { "the order to measure" };
        assert!(error.to_string().contains(&format!("neither answered {what}")), "{error}");
        nodes.end();
    }
    let nodes = Nodes::start(&graph, &[1], "");
    *nodes.ends[1].is_deaf_to.lock().unwrap() = Some(|of| matches!(of, ToNode::Begin(_)));
    let node = &nodes.remote.nodes[0];
    let answer = node.begin(b"the run".into()).unwrap();
    let text = node.offered(&answer).unwrap_err().to_string();
    assert!(text.contains("neither answered the description of the run nor"), "{text}");
    nodes.end();
}

#[test]
fn replies_with_another_number_of_values_are_refused() {
    let (graph, shares) = (graph(true), fixed(&[4, 8]));
    let nodes = Nodes::start(&graph, &[1], "");
    let read = |call: fn(&mut dyn Executor) -> Result<usize, DeviceError>| {
        with_request(&graph, ("cpu", &nodes.remote), &shares, |request| {
            let placed = assemble(request, &mut |_, _| {})?;
            placed.group.run_on(Rank(1), "reading", call)
        })
    };
    let bank: fn(&mut dyn Executor) -> Result<usize, DeviceError> =
        |device| Ok(device.read_bucket(BucketTensor::Parameters, BucketId(0))?.len());
    let place: fn(&mut dyn Executor) -> Result<usize, DeviceError> = |device| {
        device.start_readback(Region::bucket(BucketTensor::Parameters, BucketId(0), 1..6))?;
        Ok(device.next_readback(true)?.map_or(0, |read| read.values().len()))
    };
    assert_eq!(read(place).unwrap(), 5);
    let length = read(bank).unwrap();
    nodes.ends[1].shortens_replies.store(true, Ordering::SeqCst);
    for (call, expected) in [(bank, length), (place, 5)] {
        let text = read(call).unwrap_err().to_string();
        let wrong = format!("replied with {} values instead of {expected}", expected - 1);
        assert!(text.contains(&wrong), "{text}");
    }
    nodes.end();
}

#[test]
fn links_have_the_rates_of_arrivals_at_their_receivers_where_these_are_known() {
    let nodes = Nodes::start(&graph(true), &[1, 1], "");
    let measured = || nodes.remote.measure_links(&BTreeMap::new(), 0).unwrap();
    assert_eq!(measured(), RingLinks(vec![None; 3]));
    for end in &nodes.ends[..2] {
        end.is_measured.store(true, Ordering::SeqCst);
    }
    // Node 2 knows neither its link to node 0 nor the arrivals from node 1.
    let rates = RingLinks(vec![Some(arrived(0, 1)), Some(confirmed(1, 2)), None]);
    assert_eq!(measured(), rates);
    nodes.ends[2].is_measured.store(true, Ordering::SeqCst);
    let all = [(0, 1), (1, 2), (2, 0)].map(|(from, to)| Some(arrived(from, to)));
    assert_eq!(measured(), RingLinks(all.into()));
    nodes.end();
}

#[test]
fn a_node_that_works_for_long_is_waited_for() {
    let nodes = Nodes::start(&graph(true), &[1], "");
    let node = &nodes.remote.nodes[0];
    let answer = node.begin(b"a long one".into()).unwrap();
    assert_eq!(node.offered(&answer).unwrap().len(), 1);
    nodes.end();
}

/// The first of them never answers, and the second one still gets the request: a slow node does not
/// keep the others waiting.
#[test]
fn all_nodes_open_and_seat_their_devices_at_the_same_time() {
    let graph = graph(true);
    let orders: [Deafness; 2] =
        [|of| matches!(of, ToNode::Open { .. }), |of| matches!(of, ToNode::Assemble(_))];
    for shares in [fixed(&[4, 4, 4]), ParallelOptions::default()] {
        for order in orders {
            let nodes = Nodes::start(&graph, &[1, 1], "");
            *nodes.ends[1].is_deaf_to.lock().unwrap() = Some(order);
            let ended = with_request(&graph, ("cpu", &nodes.remote), &shares, |request| {
                assemble(request, &mut |_, _| {}).map(drop)
            });
            assert!(ended.unwrap_err().to_string().contains("node 1 (b) is lost"));
            let heard = nodes.ends[2].heard.lock().unwrap();
            assert!(heard.iter().any(|message| order(&decode(message).unwrap())));
            drop(heard);
            nodes.end();
        }
    }
}

//! Stages of a pipeline on executors: programs with several micro-batches in flight, on the tensors
//! that the CPU device's stages send, and the memory that a stage takes.

use std::collections::HashMap;
use std::sync::Arc;

use crate::common::{adapters, checks, fill_inputs, fill_parameters, nmse, pass, turn};
use potluck_core::{BucketId, EdgeId, Rank};
use potluck_graph::model::{GptConfig, gpt};
use potluck_graph::print::MemoryUsage;
use potluck_graph::{
    ModelGraph, Plan, PlanOptions, PlanPart, Precision, Region, SlotKind, Unary, differentiate,
    fuse,
};
use potluck_kernels::autotune::cache::device_key;
use potluck_kernels::autotune::{KernelCache, KernelSelector};
use potluck_kernels::device::{Adapter, Gpu};
use potluck_kernels::exec::{
    BucketTensor, Cpu, Executor, GpuExecutor, Moments, PassContext, staging_bytes,
};
use potluck_parallel::{
    Edge, Instruction, PipelinePrograms, PipelineRanks, PipelineRequest, PipelineSchedule, Share,
};

const ROWS: usize = 3;
/// Four micro-batches, of which the last one has fewer rows.
const BATCH: u32 = 11;
const STAGES: u32 = 3;
const PIECE: usize = 100;

/// A model with so many layers for each stage besides the embedding and the head.
fn model(width: usize, context: usize, layers: usize, rows: usize) -> Plan {
    let graph = gpt(&config(width, context, layers)).unwrap();
    Plan::new(fuse(differentiate(graph).unwrap()), PlanOptions::new(rows))
}

fn config(width: usize, context: usize, layers: usize) -> GptConfig {
    GptConfig {
        vocabulary: 11,
        context,
        positions: context,
        layers,
        heads: 2,
        width,
        bias: true,
        dropout: 0.2,
        tie: false,
        activation: Unary::Gelu,
    }
}

/// Programs of stages that hold two blocks each.
fn pipeline(plan: &Plan, schedule: PipelineSchedule, piece_max: usize) -> PipelinePrograms {
    let chunks = (0..STAGES).map(|stage| 2 * stage..2 * stage + 2).collect();
    let stages = PipelineRanks::of_stages((0..STAGES).map(Rank).collect(), chunks);
    let share = Share { first: 0, count: BATCH, micro_batch: plan.options.rows as u32 };
    PipelinePrograms::training(&PipelineRequest {
        plans: &[Arc::new(plan.clone())],
        pipelines: &[stages],
        shares: &[share],
        schedule,
        overlap: true,
        piece_max,
        in_flight_min: 1,
    })
}

/// Values of edges by micro-batch, as they were sent.
type Sent = HashMap<(EdgeId, usize), Vec<f32>>;

/// One stage on a device.
struct Stage<'a> {
    programs: &'a PipelinePrograms,
    rank: usize,
    /// Index of the next instruction.
    next: usize,
    /// Sends whose readbacks were not taken yet, in order.
    pending: Vec<(EdgeId, usize)>,
}

impl<'a> Stage<'a> {
    fn new(programs: &'a PipelinePrograms, rank: usize) -> Self {
        Self { programs, rank, next: 0, pending: Vec::new() }
    }

    fn pass(&self, micro_batch: usize) -> PassContext {
        let rows = self.programs.programs[self.rank].micro_batches[micro_batch].rows;
        pass(micro_batch, rows as usize)
    }

    /// Places of the pieces of an edge's tensor.
    fn places(&self, edge: EdgeId, micro_batch: usize) -> Vec<Region> {
        let Edge { tensor, .. } = self.programs.edges.edges[edge.index()];
        let pieces = self.programs.edges.edges[edge.index()]
            .pieces(self.pass(micro_batch).rows, self.programs.edges.piece_max);
        pieces.map(|range| Region::Tensor { tensor, micro_batch, range }).collect()
    }

    /// Goes on until a tensor is missing or the passes are over; true at their end.
    fn advance(&mut self, device: &mut dyn Executor, sent: &Sent) -> bool {
        let programs = self.programs;
        while let Some(instruction) = programs.programs[self.rank].instructions.get(self.next) {
            match *instruction {
                Instruction::ZeroGradients => device.begin_step().unwrap(),
                Instruction::Load { micro_batch } => {
                    let rows = self.pass(micro_batch).rows;
                    fill_inputs(device, micro_batch, rows, micro_batch as u64, 11);
                }
                Instruction::Run { segment, micro_batch } => {
                    let nodes = device.plan().segments[segment.index()].nodes.clone();
                    device.run(nodes, &self.pass(micro_batch)).unwrap();
                }
                Instruction::Send { edge, micro_batch } => {
                    let places = self.places(edge, micro_batch).into_iter();
                    places.for_each(|place| device.start_readback(place).unwrap());
                    self.pending.push((edge, micro_batch));
                }
                Instruction::Recv { edge, micro_batch } => {
                    let Some(values) = sent.get(&(edge, micro_batch)) else { return false };
                    for place in self.places(edge, micro_batch) {
                        let Region::Tensor { range, .. } = &place else { unreachable!() };
                        device.write_place(&place, &values[range.clone()]).unwrap();
                    }
                }
                Instruction::Verdict => return true,
                ref other => panic!("{other:?} before the end of the passes"),
            }
            self.next += 1;
        }
        panic!("a program without a verdict")
    }

    /// Takes the readbacks of everything that was sent.
    fn take(&mut self, device: &mut dyn Executor, sent: &mut Sent) {
        for (edge, micro_batch) in std::mem::take(&mut self.pending) {
            let mut values = Vec::new();
            for place in self.places(edge, micro_batch) {
                let piece = device.next_readback(true).unwrap().unwrap();
                assert_eq!(piece.place, place);
                values.extend_from_slice(piece.values());
            }
            assert!(sent.insert((edge, micro_batch), values).is_none(), "sent twice");
        }
    }
}

/// Results of a stage: loss and gradients by bucket.
type Results = (f64, Vec<(BucketId, Vec<f32>)>);

fn results(device: &mut dyn Executor) -> Results {
    let buckets = (0..device.plan().buckets.len() as u32).map(BucketId);
    let held: Vec<BucketId> = buckets.filter(|bucket| device.plan().holds(*bucket)).collect();
    let read = |bucket| (bucket, device.read_bucket(BucketTensor::Gradients, bucket).unwrap());
    let gradients = held.into_iter().map(read).collect();
    (device.loss().unwrap().loss, gradients)
}

/// Sets the parameters that a stage holds, which have the names and values of the whole model.
fn fill(device: &mut dyn Executor, whole: &Plan) {
    let mut all = Cpu::fast(whole.clone(), 0);
    fill_parameters(&mut all, 0.3);
    for bucket in (0..whole.buckets.len() as u32).map(BucketId) {
        if device.plan().holds(bucket) {
            let values = all.read_bucket(BucketTensor::Parameters, bucket).unwrap();
            device.write_bucket(BucketTensor::Parameters, bucket, &values).unwrap();
        }
    }
}

/// Opens stages one after the other, and certifies the kernels of an adapter once for all of them.
struct Opener(tempfile::TempDir);

impl Opener {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn open(
        &self,
        adapter: &Adapter,
        gpu: Gpu,
        plan: &Plan,
        moments: impl Into<Moments>,
    ) -> GpuExecutor {
        let cache = KernelCache::open(self.0.path(), &device_key(adapter));
        GpuExecutor::new(gpu, plan.clone(), moments, KernelSelector::new(cache)).unwrap()
    }

    /// The CPU device and the adapters, by name and API.
    fn all(&self, plan: &Plan) -> impl Iterator<Item = (String, Box<dyn Executor>)> {
        let mut cpu = Cpu::fast(plan.clone(), 0);
        cpu.set_readback_elements_max(PIECE);
        let cpu: Box<dyn Executor> = Box::new(cpu);
        let others = adapters().into_iter().map(|adapter| {
            let gpu = Gpu::open(&adapter, checks(&adapter), Precision::F32).unwrap();
            let mut device = self.open(&adapter, gpu, plan, 0);
            device.set_readback_elements_max(PIECE).unwrap();
            let device: Box<dyn Executor> = Box::new(device);
            (format!("{}:{}", adapter.api, adapter.name), device)
        });
        [("cpu".to_string(), cpu)].into_iter().chain(others)
    }
}

/// Runs all stages on CPU devices in turns; what was sent, and the results of each stage.
fn on_the_cpu(programs: &PipelinePrograms, whole: &Plan) -> (Sent, Vec<Results>) {
    let mut sent = Sent::new();
    let mut stages: Vec<_> = (0..STAGES as usize)
        .map(|rank| {
            let mut device = Cpu::fast((*programs.plans[rank]).clone(), 0);
            device.set_readback_elements_max(programs.edges.piece_max);
            fill(&mut device, whole);
            (Stage::new(programs, rank), device)
        })
        .collect();
    for _turn in 0..1000 {
        let done = stages.iter_mut().filter_map(|(stage, device)| {
            let done = stage.advance(device, &sent);
            stage.take(device, &mut sent);
            done.then_some(())
        });
        if done.count() == STAGES as usize {
            let results = stages.iter_mut().map(|(_, device)| results(device)).collect();
            return (sent, results);
        }
    }
    panic!("stages wait for each other")
}

fn largest_nmse(got: &Sent, wanted: &Sent) -> f64 {
    got.iter().map(|(key, values)| nmse(values, &wanted[key])).fold(0.0, f64::max)
}

/// Runs one stage alone on a device, with everything it receives at hand, and takes what it sends
/// when all is over.
fn alone(device: &mut dyn Executor, stage: &mut Stage, received: &Sent) -> (Sent, Results) {
    assert!(stage.advance(device, received), "a tensor that the stage receives is missing");
    let mut sent = Sent::new();
    stage.take(device, &mut sent);
    (sent, results(device))
}

const SCHEDULES: [PipelineSchedule; 2] = [PipelineSchedule::OneFOneB, PipelineSchedule::ZeroBubble];

#[test]
fn stages_compute_what_the_cpu_device_computes_in_every_schedule() {
    let (_turn, opener) = (turn(), Opener::new());
    let whole = model(12, 6, 4, ROWS);
    let mut of_schedules: HashMap<(String, usize), Vec<(Sent, Results)>> = HashMap::new();
    for schedule in SCHEDULES {
        let programs = pipeline(&whole, schedule, PIECE);
        let (sent, expected) = on_the_cpu(&programs, &whole);
        for (rank, expected) in expected.iter().enumerate() {
            let plan = &programs.plans[rank];
            if rank == 0 {
                let stash = plan.slots.iter().filter(|slot| slot.kind == SlotKind::Stash);
                assert!(stash.map(|slot| slot.copies).max() > Some(1), "nothing is in flight");
            }
            for (name, mut device) in opener.all(plan) {
                let device = device.as_mut();
                fill(device, &whole);
                let got = alone(device, &mut Stage::new(&programs, rank), &sent);
                let what = format!("{name}, {schedule}, stage {rank}");
                let error = largest_nmse(&got.0, &sent);
                assert!(error <= 1e-6, "{what} sends other values: {error}");
                let (loss, gradients) = &got.1;
                assert!((loss - expected.0).abs() <= 1e-5 * expected.0.abs(), "{what}: {loss}");
                for ((bucket, got), (_, wanted)) in gradients.iter().zip(&expected.1) {
                    let error = nmse(got, wanted);
                    assert!(error <= 1e-6, "{what}, gradients of {bucket}: {error}");
                }
                of_schedules.entry((name, rank)).or_default().push(got);
            }
        }
    }
    for ((name, rank), all) in &of_schedules {
        assert!(all.windows(2).all(|pair| pair[0] == pair[1]), "{name}, stage {rank}: other bits");
    }
}

/// The test above can fail: a tensor of another micro-batch, or a copy too few, is noticed.
#[test]
fn a_stage_that_gets_a_wrong_tensor_or_a_copy_too_few_is_told_apart() {
    let (_turn, opener) = (turn(), Opener::new());
    let whole = model(12, 6, 4, ROWS);
    let programs = pipeline(&whole, PipelineSchedule::OneFOneB, PIECE);
    let (sent, expected) = on_the_cpu(&programs, &whole);
    let errors = |programs: &PipelinePrograms, received: &Sent| -> Vec<f64> {
        let rank = 1;
        opener
            .all(&programs.plans[rank])
            .map(|(_, mut device)| {
                let device = device.as_mut();
                fill(device, &whole);
                let (_, got) = alone(device, &mut Stage::new(programs, rank), received);
                let pairs = got.1.iter().zip(&expected[rank].1);
                pairs.map(|((_, got), (_, wanted))| nmse(got, wanted)).fold(0.0, f64::max)
            })
            .collect()
    };
    let edges = programs.edges.edges.iter();
    let edge = EdgeId(edges.clone().position(|edge| edge.leads_to(Rank(1))).unwrap() as u32);
    let mut swapped = sent.clone();
    let (a, b) = (sent[&(edge, 0)].clone(), sent[&(edge, 1)].clone());
    swapped.insert((edge, 0), b);
    swapped.insert((edge, 1), a);
    assert!(errors(&programs, &swapped).iter().all(|error| *error > 1e-3));

    let mut fewer = programs.clone();
    let mut plan = (*programs.plans[1]).clone();
    plan.slots.iter_mut().for_each(|slot| slot.copies = 1);
    fewer.plans[1] = plan.into();
    assert!(errors(&fewer, &sent).iter().all(|error| *error > 1e-3));
}

/// Bytes that wgpu's allocator has handed out; `None` on GL, which does not use it.
fn allocated(device: &wgpu::Device) -> Option<u64> {
    device.generate_allocator_report().map(|report| report.total_allocated_bytes)
}

/// Moments of everything that a plan holds.
fn whole_moments(plan: &Plan) -> Moments {
    let held = plan.buckets.iter().zip(&plan.held);
    let owned = held.map(|(bucket, held)| 0..if *held { bucket.length } else { 0 });
    Moments { count: 2, owned: Some(owned.collect()) }
}

/// The figures that `--explain memory` prints and admission compares are what wgpu's allocator has
/// handed out, from the opening of the stage to the end of a step.
#[test]
fn a_stage_takes_the_memory_of_what_it_holds() {
    let (_turn, opener) = (turn(), Opener::new());
    let whole = model(128, 64, 4, 4);
    let programs = pipeline(&whole, PipelineSchedule::OneFOneB, 1 << 18);
    let (sent, _) = on_the_cpu(&programs, &whole);
    let plan = &programs.plans[1];
    let needed = MemoryUsage::of(plan, 2).peak();
    assert!(needed > 4 << 20, "{needed} bytes are too few to compare");
    for adapter in adapters() {
        let gpu = Gpu::open(&adapter, checks(&adapter), Precision::F32).unwrap();
        let device = gpu.device.clone();
        let Some(before) = allocated(&device) else {
            assert_eq!(adapter.api, "gl", "only GL has no allocator of wgpu's");
            continue;
        };
        let compare = |when: &str| {
            let all = allocated(&device).unwrap() - before;
            let tensors = all as f64 - staging_bytes(plan) as f64;
            let error = (tensors / needed as f64 - 1.0).abs();
            let what = format!("{}, {when}", adapter.name);
            assert!(error <= 0.05, "{what}: {all} bytes, {tensors} of tensors, not {needed}");
        };
        let mut stage = opener.open(&adapter, gpu, plan, whole_moments(plan));
        compare("opened");
        fill(&mut stage, &whole);
        alone(&mut stage, &mut Stage::new(&programs, 1), &sent);
        compare("after a step");
    }
}

/// The same of the ranks of a tensor group, which all hold every block.
#[test]
fn a_rank_of_a_tensor_group_takes_the_memory_of_its_slices() {
    let (_turn, opener) = (turn(), Opener::new());
    let model = ModelGraph::training(gpt(&config(128, 64, 4)).unwrap(), true).unwrap();
    let whole = Plan::new(model.whole().clone(), PlanOptions::new(4));
    for position in 0..2 {
        let graph = model.of_rank(&[1, 1], position).unwrap().graph;
        let blocks = vec![true; graph.blocks.len()];
        let part = PlanPart { blocks: &blocks, runs: &[] };
        let plan = Plan::part(graph, PlanOptions::new(4), &part);
        let needed = MemoryUsage::of(&plan, 2).peak();
        assert!(10 * needed < 7 * MemoryUsage::of(&whole, 2).peak(), "{needed}");
        for adapter in adapters() {
            let gpu = Gpu::open(&adapter, checks(&adapter), Precision::F32).unwrap();
            let device = gpu.device.clone();
            let Some(before) = allocated(&device) else { continue };
            let _rank = opener.open(&adapter, gpu, &plan, whole_moments(&plan));
            let all = allocated(&device).unwrap() - before;
            let tensors = all as f64 - staging_bytes(&plan) as f64;
            let error = (tensors / needed as f64 - 1.0).abs();
            println!("{}, rank {position}: {tensors} bytes of {needed}", adapter.name);
            assert!(error <= 0.1, "{}: {all} bytes, {tensors} of tensors", adapter.name);
        }
    }
}

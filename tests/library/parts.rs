//! Parts of a GPT's plan, cut at random and run in the orders of all schedules: every tensor is
//! there when it is read, with the fewest copies of each slot, and stages touch nothing else.

use std::collections::BTreeSet;

use potluck_core::{SegmentId, TensorId};
use potluck_graph::model::{GptConfig, MlpConfig, MlpLoss, gpt, mlp};
use potluck_graph::print::MemoryUsage;
use potluck_graph::{
    Graph, PassKind, Plan, PlanOptions, PlanPart, Role, SlotKind, TensorLocation, Unary, crossings,
    differentiate, fuse, replay,
};
use proptest::prelude::*;

const LAYERS: usize = 4;
const BLOCKS: usize = LAYERS + 2;

fn gpt_of(tie: bool, dropout: f32, fused: bool) -> Graph {
    let config = GptConfig {
        vocabulary: 11,
        context: 6,
        positions: 6,
        layers: LAYERS,
        heads: 2,
        width: 8,
        bias: true,
        dropout,
        tie,
        activation: Unary::Gelu,
    };
    let graph = differentiate(gpt(&config).unwrap()).unwrap();
    if fused { fuse(graph) } else { graph }
}

fn options() -> PlanOptions {
    PlanOptions::new(3)
}

type Runs = Vec<(SegmentId, usize)>;

/// One task of a stage: a pass over a chunk of its blocks.
#[derive(Clone, Copy, Debug)]
enum Task {
    Forward,
    /// B and W per block.
    Backward,
    BackwardInput,
    BackwardWeight,
}

/// Segments of a task, as a rank's program runs them.
fn segments(plan: &Plan, task: Task, blocks: &[usize]) -> Vec<SegmentId> {
    let runs = |phase| match task {
        Task::Forward => phase == PassKind::Forward,
        Task::Backward => phase != PassKind::Forward,
        Task::BackwardInput => phase == PassKind::BackwardInput,
        Task::BackwardWeight => phase == PassKind::BackwardWeight,
    };
    let ids = (0..plan.segments.len() as u32).map(SegmentId);
    let segment = |id: &SegmentId| &plan.segments[id.index()];
    ids.filter(|id| runs(segment(id).phase) && blocks.contains(&(segment(id).block as usize)))
        .collect()
}

/// Order in which a stage runs its tasks.
#[derive(Clone, Copy, Debug)]
struct Order {
    micro_batches: usize,
    /// Micro-batches that a chunk runs in a row.
    group: usize,
    /// Forward tasks before the first backward task; all of them is GPipe.
    ahead: usize,
    /// Tasks BackwardInput between one and its BackwardWeight; none is Backward as a whole.
    delay: Option<usize>,
}

impl Order {
    fn gpipe(micro_batches: usize) -> Self {
        Self { micro_batches, group: 1, ahead: usize::MAX, delay: None }
    }

    /// 1F1B of a stage with so many stages after it.
    fn one_by_one(micro_batches: usize, after: usize) -> Self {
        Self { micro_batches, group: 1, ahead: after + 1, delay: None }
    }

    fn tasks(self, chunks: usize) -> Vec<(Task, usize, usize)> {
        let in_groups = |reverse: bool| -> Vec<(usize, usize)> {
            let starts = (0..self.micro_batches).step_by(self.group);
            let mut list = Vec::new();
            for start in starts {
                for chunk in 0..chunks {
                    let chunk = if reverse { chunks - 1 - chunk } else { chunk };
                    let end = (start + self.group).min(self.micro_batches);
                    list.extend((start..end).map(|micro_batch| (chunk, micro_batch)));
                }
            }
            list
        };
        let (forward, backward) = (in_groups(false), in_groups(true));
        let (mut done, mut tasks) = (0, Vec::new());
        for (nth, &(chunk, micro_batch)) in backward.iter().enumerate() {
            let needed = |&(_, m): &(usize, usize)| m == micro_batch;
            let last = forward.iter().rposition(needed).unwrap() + 1;
            let wanted = self.ahead.saturating_add(nth).min(forward.len()).max(last);
            for &(chunk, micro_batch) in &forward[done.min(wanted)..wanted] {
                tasks.push((Task::Forward, chunk, micro_batch));
            }
            done = done.max(wanted);
            let Some(delay) = self.delay else {
                tasks.push((Task::Backward, chunk, micro_batch));
                continue;
            };
            tasks.push((Task::BackwardInput, chunk, micro_batch));
            if let Some(&(chunk, micro_batch)) = nth.checked_sub(delay).map(|n| &backward[n]) {
                tasks.push((Task::BackwardWeight, chunk, micro_batch));
            }
        }
        if let Some(delay) = self.delay {
            let rest = &backward[backward.len().saturating_sub(delay)..];
            tasks.extend(rest.iter().map(|&(chunk, m)| (Task::BackwardWeight, chunk, m)));
        }
        tasks
    }

    fn runs(self, whole: &Plan, chunks: &[Vec<usize>]) -> Runs {
        let tasks = self.tasks(chunks.len()).into_iter();
        tasks
            .flat_map(|(task, chunk, micro_batch)| {
                let ids = segments(whole, task, &chunks[chunk]);
                ids.into_iter().map(move |id| (id, micro_batch))
            })
            .collect()
    }
}

/// Cuts the blocks at these places into contiguous chunks, of which stage s has s, s + stages, ..
fn cut(places: &BTreeSet<usize>, stages: usize) -> Vec<Vec<Vec<usize>>> {
    let mut bounds = vec![0];
    bounds.extend(places.iter().copied().chain([BLOCKS]));
    let chunks: Vec<Vec<usize>> = bounds.windows(2).map(|b| (b[0]..b[1]).collect()).collect();
    let of = |stage: usize| chunks.iter().skip(stage).step_by(stages).cloned().collect();
    (0..stages).map(of).collect()
}

fn held(chunks: &[Vec<usize>]) -> Vec<bool> {
    (0..BLOCKS).map(|block| chunks.iter().flatten().any(|b| *b == block)).collect()
}

fn part_of(graph: &Graph, chunks: &[Vec<usize>], runs: &Runs) -> Plan {
    Plan::part(graph.clone(), options(), &PlanPart { blocks: &held(chunks), runs })
}

/// Checks that no slot has a copy too many: with one less, the replay fails.
fn assert_fewest_copies(plan: &Plan, runs: &Runs) {
    for (index, slot) in plan.slots.iter().enumerate().filter(|(_, slot)| slot.copies > 1) {
        let mut less = plan.clone();
        less.slots[index].copies -= 1;
        let error = replay(&less, runs).expect_err(&format!("slot {index} with a copy less"));
        assert!(error.contains(&format!("but slot {index}, copy")), "{error}");
        assert_eq!(slot.kind, SlotKind::Stash);
    }
}

/// Checks that a stage holds memory for what its nodes touch, and that what it reads and does not
/// compute is what the other stages send it.
fn assert_touches(plan: &Plan, stage: u32, stage_of: &[u32]) {
    let graph = &plan.graph;
    let own = graph.nodes.iter().filter(|node| stage_of[node.block as usize] == stage);
    let (mut read, mut written) = (BTreeSet::new(), BTreeSet::new());
    for node in own {
        read.extend(node.inputs.iter().map(|t| graph.root(*t)));
        // An alias writes nothing.
        written.extend(node.outputs.iter().filter(|t| graph.root(**t) == **t));
    }
    let is_activation = |t: &&TensorId| graph.tensor(**t).role == Role::Activation;
    let received: BTreeSet<TensorId> =
        read.difference(&written).filter(is_activation).copied().collect();
    let crossings = crossings(graph, stage_of);
    let arrives = crossings.iter().filter(|c| c.to == stage).map(|c| c.tensor);
    assert_eq!(received, arrives.collect());
    let travels = crossings.iter().filter(|c| c.to == stage || c.from == stage);
    for tensor in travels.map(|c| c.tensor) {
        let TensorLocation::Slot(slot) = plan.place(tensor) else { panic!("{tensor} has no slot") };
        assert_eq!(plan.slots[slot.index()].kind, SlotKind::Stash);
    }
    for tensor in (0..graph.tensors.len() as u32).map(TensorId) {
        let role = graph.tensor(graph.root(tensor)).role;
        if matches!(role, Role::Activation | Role::Input | Role::Loss) {
            let root = graph.root(tensor);
            let touched = read.contains(&root) || written.contains(&root);
            assert_eq!(plan.is_placed(tensor), touched, "{}", graph.tensor(tensor).name);
        }
    }
}

/// Checks each stage of a cut, whose programs `order` decides, given the number of later stages.
fn check(graph: &Graph, cut: &[Vec<Vec<usize>>], order: impl Fn(usize) -> Order) {
    let whole = Plan::new(graph.clone(), options());
    let mut stage_of = [0; BLOCKS];
    for (stage, chunks) in cut.iter().enumerate() {
        chunks.iter().flatten().for_each(|block| stage_of[*block] = stage as u32);
    }
    let mut held_by = vec![0; whole.buckets.len()];
    for (stage, chunks) in cut.iter().enumerate() {
        let runs = order(cut.len() - 1 - stage).runs(&whole, chunks);
        let plan = part_of(graph, chunks, &runs);
        replay(&plan, &runs).unwrap();
        assert_fewest_copies(&plan, &runs);
        assert_touches(&plan, stage as u32, &stage_of);
        assert_eq!(plan.buckets, whole.buckets);
        for (index, held_by) in held_by.iter_mut().enumerate() {
            let completing = plan.segments.iter().flat_map(|s| &s.completes);
            let completed = completing.filter(|bucket| bucket.index() == index).count();
            assert_eq!(completed, usize::from(plan.held[index]));
            *held_by += completed;
        }
    }
    assert!(held_by.iter().all(|count| *count == 1 || *count == 2), "{held_by:?}");
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(40)
    })]

    #[test]
    fn programs_any_cut_find_their_inputs(
        places in prop::collection::btree_set(1..BLOCKS, 0..BLOCKS),
        (tie, fused) in (any::<bool>(), any::<bool>()),
        micro_batches in 1..6usize,
        schedule in 0..4usize,
        (ahead, delay) in (0..4usize, 0..3usize),
    ) {
        let graph = gpt_of(tie, 0.1, fused);
        let stages = places.len() + 1;
        check(&graph, &cut(&places, stages), |after| match schedule {
            0 => Order::gpipe(micro_batches),
            1 => Order::one_by_one(micro_batches, after),
            2 => Order { delay: Some(delay), ..Order::one_by_one(micro_batches, after) },
            _ => Order { micro_batches, group: 1, ahead, delay: Some(delay) },
        });
    }

    /// Two chunks per stage, whole groups of micro-batches.
    #[test]
    fn programs_interleaved_find_inputs(
        (stages, spare) in (1..=3usize, 0..=2usize),
        (groups, group) in (1..3usize, 1..4usize),
        ahead in 0..8usize,
        delay in prop::option::of(0..4usize),
    ) {
        let places: BTreeSet<usize> =
            (1..2 * stages).map(|n| (n + spare).min(BLOCKS - 2 * stages + n)).collect();
        let order = Order { micro_batches: groups * group, group, ahead, delay };
        check(&gpt_of(true, 0.0, false), &cut(&places, stages), |_| order);
    }
}

#[test]
fn part_of_everything_is_the_whole() {
    let widths = vec![5, 16, 16, 4];
    let config =
        MlpConfig { widths, activation: Unary::Relu, dropout: 0.0, loss: MlpLoss::SquaredError };
    let graphs = [
        gpt_of(true, 0.1, false),
        gpt_of(false, 0.0, true),
        differentiate(mlp(&config).unwrap()).unwrap(),
        mlp(&config).unwrap(),
    ];
    for graph in graphs {
        let whole = Plan::new(graph.clone(), options());
        let ids = || (0..whole.segments.len() as u32).map(SegmentId);
        let runs: Runs = (0..3).flat_map(|m| ids().map(move |id| (id, m))).collect();
        let blocks = vec![true; graph.blocks.len()];
        let part = Plan::part(graph, options(), &PlanPart { blocks: &blocks, runs: &runs });
        assert_eq!(part.part.as_ref().unwrap().runs, runs);
        assert!(Plan { part: None, ..part } == whole);
        replay(&whole, &runs).unwrap();
    }
}

/// Micro-batches in flight: all of them in GPipe, as many as there are stages from this one on in
/// 1F1B (Narayanan et al. 2021, section 2.2).
#[test]
fn schedules_have_copies_of_papers() {
    let graph = gpt_of(false, 0.0, false);
    let whole = Plan::new(graph.clone(), options());
    let cut = cut(&BTreeSet::from([2, 4]), 3);
    let copies = |order: &dyn Fn(usize) -> Order| -> Vec<usize> {
        let stages = cut.iter().enumerate();
        let plan = |(stage, chunks): (usize, &Vec<Vec<usize>>)| {
            part_of(&graph, chunks, &order(2 - stage).runs(&whole, chunks)).options.in_flight
        };
        stages.map(plan).collect()
    };
    assert_eq!(copies(&|_| Order::gpipe(5)), [5, 5, 5]);
    assert_eq!(copies(&|after| Order::one_by_one(5, after)), [3, 2, 1]);
    assert_eq!(copies(&|after| Order::one_by_one(2, after)), [2, 2, 1]);
    // What arrives for a task and is read in it needs one copy in every schedule.
    let runs = Order::gpipe(5).runs(&whole, &cut[1]);
    let plan = part_of(&graph, &cut[1], &runs);
    assert!(plan.slots.iter().any(|s| s.kind == SlotKind::Stash && s.copies == 1));
}

#[test]
fn stage_takes_less_than_the_whole() {
    let graph = gpt_of(false, 0.1, true);
    let whole = Plan::new(graph.clone(), options());
    for places in [BTreeSet::from([3]), BTreeSet::from([1, 2, 4]), BTreeSet::from([1, 2, 3, 4, 5])]
    {
        let cut = cut(&places, places.len() + 1);
        let of_stage = |chunks: &Vec<Vec<usize>>| {
            let runs = Order::gpipe(1).runs(&whole, chunks);
            MemoryUsage::of(&part_of(&graph, chunks, &runs), 2)
        };
        let stages: Vec<MemoryUsage> = cut.iter().map(of_stage).collect();
        let of_whole = MemoryUsage::of(&whole, 2);
        for stage in &stages {
            assert!(stage.peak() < of_whole.peak());
            assert!(stage.stash + stage.scratch < of_whole.stash + of_whole.scratch);
        }
        assert_eq!(stages.iter().map(|s| s.parameters).sum::<usize>(), of_whole.parameters);
    }
}

/// A plan for B and W per block keeps nothing for a W that comes after the next B.
#[test]
fn weights_delayed_overwrite_usual_order() {
    let graph = gpt_of(true, 0.0, false);
    let whole = Plan::new(graph.clone(), options());
    let chunks = [vec![4, 5]];
    let usual = Order::gpipe(1).runs(&whole, &chunks);
    let delayed = Order { delay: Some(0), ..Order::gpipe(1) }.runs(&whole, &chunks);
    assert_ne!(usual, delayed);
    let plan = part_of(&graph, &chunks, &usual);
    replay(&plan, &usual).unwrap();
    let error = replay(&plan, &delayed).unwrap_err();
    assert!(error.contains("of micro-batch 0, but slot"), "{error}");
    replay(&part_of(&graph, &chunks, &delayed), &delayed).unwrap();
}

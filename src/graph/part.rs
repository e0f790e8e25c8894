//! Plans of a part of a graph: some of its blocks, run in the order of a rank's program. All ids
//! are ids of the whole graph, so that initial values, dropout, buckets and checkpoints do not
//! depend on the cut.

use std::collections::{BTreeMap, HashMap};

use super::memory_layout::{Segment, TensorLocation};
use super::plan::{self, Bucket, Plan, PlanOptions};
use super::planned_part::PlannedPart;
use super::slots::{Liveness, NodeOrder, SegmentSpan, assign};
use super::{Graph, Node, PassKind, Role};
use potluck_core::{BucketId, SegmentId};

/// Blocks that a rank holds, and the order in which it runs them.
#[derive(Clone, Copy, Debug)]
pub struct PlanPart<'a> {
    /// True for each block that the rank holds.
    pub blocks: &'a [bool],
    /// The rank's program: its segments, each with its micro-batch, in the order in which they
    /// run. Every micro-batch must run the same segments in the same order. If nothing runs, the
    /// part is placed for one micro-batch in canonical order.
    pub runs: &'a [(SegmentId, usize)],
}

impl Plan {
    /// Plans a part of a forward or a training graph: the same segments, buckets and ids as
    /// [`Plan::new`], and places only for tensors that the held blocks use.
    ///
    /// Slots are placed for the order in which the program runs the segments of a micro-batch, and
    /// have as many copies as the program needs, which replace `options.in_flight`: in the plan,
    /// that is the largest number of copies.
    ///
    /// # Panics
    /// If the part names another number of blocks than the graph has, if the program runs a
    /// segment of a block that is not held, or if its micro-batches run different segments or in
    /// different orders.
    pub fn part(graph: Graph, options: PlanOptions, part: &PlanPart) -> Self {
        assert!(options.rows > 0, "a plan has rows");
        assert_eq!(part.blocks.len(), graph.blocks.len(), "a part names every block");
        let mut segments = plan::segments(&graph);
        let (buckets, _) = plan::buckets(&graph, &segments, &options);
        let repetition = Repetition::of(part, &segments);
        let users = bucket_users(&graph, &buckets);
        let mut held = vec![false; buckets.len()];
        for (index, bucket) in buckets.iter().enumerate() {
            let users = &users[index];
            let is_used = users.iter().zip(part.blocks).any(|(uses, holds)| *uses && *holds);
            held[index] = is_used && bucket.is_of(graph.tensor_rank);
            if held[index]
                && bucket.is_updated()
                && let Some(last) = completed_by(&repetition.order, &segments, users)
            {
                segments[last.index()].completes.push(BucketId(index as u32));
            }
        }
        let mut places = vec![TensorLocation::Unallocated; graph.tensors.len()];
        plan::place_parameters(&graph, &buckets, &held, &mut places);
        place_loss(&graph, part.blocks, &mut places);
        plan::place_states(&graph, part.blocks, &mut places);
        let is_read = read_by(&graph, part.blocks);
        let order = NodeOrder::new(&segments, &repetition.order);
        let lives = order.lifetimes(&graph, part.blocks, |input| is_read[input.index()]);
        let logits = order.logits(&graph, options.rows);
        let liveness = Liveness { graph: &graph, lives, logits, rows: options.rows };
        let mut known = HashMap::new();
        let slots = assign(&liveness, &mut places, |span| {
            *known.entry(span).or_insert_with(|| repetition.copies(span))
        });
        let in_flight = slots.iter().map(|slot| slot.copies).max().unwrap_or(1);
        let options = PlanOptions { in_flight, ..options };
        let held_blocks = part.blocks.to_vec();
        let part = Some(PlannedPart { blocks: held_blocks.clone(), runs: part.runs.to_vec() });
        Self { graph, options, segments, slots, places, buckets, held, held_blocks, part }
    }
}

impl Plan {
    /// Returns the blocks whose nodes use a parameter of a bucket, ascending: devices that hold one
    /// of them hold the bucket.
    pub fn blocks_with(&self, bucket: BucketId) -> Vec<u32> {
        let users = bucket_users(&self.graph, &self.buckets);
        let mut blocks = Vec::new();
        for (block, uses) in (0..).zip(&users[bucket.index()]) {
            if *uses {
                blocks.push(block);
            }
        }
        blocks
    }
}

fn held_nodes<'a>(graph: &'a Graph, blocks: &'a [bool]) -> impl Iterator<Item = &'a Node> {
    graph.nodes.iter().filter(|node| blocks[node.block as usize])
}

fn place_loss(graph: &Graph, blocks: &[bool], places: &mut [TensorLocation]) {
    for output in held_nodes(graph, blocks).flat_map(|node| &node.outputs) {
        if graph.tensor(*output).role == Role::Loss {
            places[output.index()] = TensorLocation::Loss;
        }
    }
}

/// Returns, for each tensor, true if a node of the held blocks reads it.
fn read_by(graph: &Graph, blocks: &[bool]) -> Vec<bool> {
    let mut is_read = vec![false; graph.tensors.len()];
    for input in held_nodes(graph, blocks).flat_map(|node| &node.inputs) {
        is_read[graph.root(*input).index()] = true;
    }
    is_read
}

/// Segments that a program runs for each micro-batch.
struct Repetition {
    /// The segments of one micro-batch, in the order in which they run.
    order: Vec<SegmentId>,
    /// Position in the program of each segment of `order`, by micro-batch.
    positions: BTreeMap<usize, Vec<usize>>,
}

impl Repetition {
    fn of(part: &PlanPart, segments: &[Segment]) -> Self {
        let held = |id: &SegmentId| part.blocks[segments[id.index()].block as usize];
        let mut runs: BTreeMap<usize, (Vec<SegmentId>, Vec<usize>)> = BTreeMap::new();
        for (position, (segment, micro_batch)) in part.runs.iter().enumerate() {
            assert!(held(segment), "a program runs {segment}, which its rank does not hold");
            let (order, positions) = runs.entry(*micro_batch).or_default();
            order.push(*segment);
            positions.push(position);
        }
        let order = match runs.values().next() {
            Some((first, _)) => {
                let same = runs.values().all(|(order, _)| order == first);
                assert!(same, "micro-batches run different segments or in different orders");
                first.clone()
            }
            None => (0..segments.len() as u32).map(SegmentId).filter(held).collect(),
        };
        let positions = runs.into_iter().map(|(id, (_, positions))| (id, positions)).collect();
        Self { order, positions }
    }

    /// Returns the fewest copies of a slot kept over these segments of a micro-batch with which no
    /// micro-batch begins to use a copy that another one still uses.
    fn copies(&self, span: SegmentSpan) -> usize {
        let mut ranges = Vec::with_capacity(self.positions.len());
        for (micro_batch, positions) in &self.positions {
            ranges.push((positions[span.first], positions[span.last], *micro_batch));
        }
        ranges.sort_unstable();
        let mut copies = 1;
        while !is_enough(&ranges, copies) {
            copies += 1;
        }
        copies
    }
}

/// Returns true if ranges (first, last, micro-batch), sorted, never overlap in a copy. With more
/// copies than the largest micro-batch, each has a copy of its own.
fn is_enough(ranges: &[(usize, usize, usize)], copies: usize) -> bool {
    let mut ends: HashMap<usize, usize> = HashMap::new();
    for &(first, last, micro_batch) in ranges {
        if let Some(end) = ends.insert(micro_batch % copies, last)
            && end >= first
        {
            return false;
        }
    }
    true
}

/// Returns, for each bucket and each block, true if a node of the block uses a parameter of the
/// bucket. As in [`plan::buckets`], a parameter without uses belongs to the first block.
fn bucket_users(graph: &Graph, buckets: &[Bucket]) -> Vec<Vec<bool>> {
    let mut bucket_of = vec![0; graph.parameters.len()];
    for (index, bucket) in buckets.iter().enumerate() {
        for (id, _) in &bucket.parameters {
            bucket_of[id.index()] = index;
        }
    }
    let mut users = vec![vec![false; graph.blocks.len()]; buckets.len()];
    for node in &graph.nodes {
        for &tensor in node.inputs.iter().chain(&node.outputs) {
            let (Role::Parameter(id) | Role::Gradient(id)) = graph.tensor(graph.root(tensor)).role
            else {
                continue;
            };
            for beside in graph.slices_beside(id) {
                users[bucket_of[beside.index()]][node.block as usize] = true;
            }
        }
    }
    for users in &mut users {
        if let Some(first) = users.first().copied() {
            users[0] = first || !users.contains(&true);
        }
    }
    users
}

/// Returns the segment that completes the gradients of a bucket on a rank: the last of the backward
/// pass in a block that uses it, or for a bucket without users, the last of the backward pass.
fn completed_by(order: &[SegmentId], segments: &[Segment], users: &[bool]) -> Option<SegmentId> {
    let mut last = None;
    for id in order.iter().rev() {
        let segment = &segments[id.index()];
        if segment.phase == PassKind::Forward {
            continue;
        }
        if users[segment.block as usize] {
            return Some(*id);
        }
        last = last.or(Some(*id));
    }
    last
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::{Builder, Init, SlotKind, Unary, differentiate};
    use potluck_core::TensorId;

    /// Four blocks: the first and the last share a parameter, and the third reads what the first
    /// computes.
    pub fn chain() -> Graph {
        let mut b = Builder::new();
        let shared = b.parameter("shared", &[8, 8], Init::Zeros);
        b.block("b0");
        let x = b.input("x", &[1, 8]);
        let target = b.input("target", &[1, 8]);
        let w = b.parameter("w0", &[8, 8], Init::Zeros);
        let y = b.linear(x, w, None).unwrap();
        let skip = b.unary(y, Unary::Gelu).unwrap();
        let y = b.linear(skip, shared, None).unwrap();
        b.block("b1");
        let w = b.parameter("w1", &[8, 8], Init::Zeros);
        let bias = b.parameter("bias", &[8], Init::Zeros);
        let y = b.linear(y, w, Some(bias)).unwrap();
        let y = b.unary(y, Unary::Relu).unwrap();
        b.block("b2");
        let w = b.parameter("w2", &[8, 8], Init::Zeros);
        let y = b.linear(y, w, None).unwrap();
        let y = b.add(y, skip).unwrap();
        b.block("b3");
        let w = b.parameter("w3", &[8, 8], Init::Zeros);
        let y = b.linear(y, w, None).unwrap();
        let y = b.linear(y, shared, None).unwrap();
        b.output("y", y);
        b.squared_error_loss(y, target).unwrap();
        differentiate(b.finish()).unwrap()
    }

    /// Segments by pass and block: `F0 B3 W3`.
    pub fn order(plan: &Plan, text: &str) -> Vec<SegmentId> {
        let find = |name: &str| {
            let same = |s: &Segment| format!("{}{}", s.phase, s.block) == name;
            SegmentId(plan.segments.iter().position(same).unwrap() as u32)
        };
        text.split(' ').map(find).collect()
    }

    fn part(blocks: [bool; 4], text: &str, micro_batches: usize) -> Plan {
        let whole = Plan::new(chain(), PlanOptions::new(4));
        let order = order(&whole, text);
        let runs: Vec<(SegmentId, usize)> =
            (0..micro_batches).flat_map(|m| order.iter().map(move |id| (*id, m))).collect();
        Plan::part(chain(), PlanOptions::new(4), &PlanPart { blocks: &blocks, runs: &runs })
    }

    fn completes(plan: &Plan) -> Vec<(String, Vec<u32>)> {
        let name = |s: &Segment| format!("{}{}", s.phase, s.block);
        let ids = |s: &Segment| s.completes.iter().map(|bucket| bucket.0).collect();
        let some = plan.segments.iter().filter(|s| !s.completes.is_empty());
        some.map(|s| (name(s), ids(s))).collect()
    }

    #[test]
    fn a_part_of_everything_is_the_whole() {
        let canonical = "F0 F1 F2 F3 B3 W3 B2 W2 B1 W1 B0 W0";
        let whole = Plan::new(chain(), PlanOptions::new(4));
        let nothing_runs = PlanPart { blocks: &[true; 4], runs: &[] };
        for plan in [
            part([true; 4], canonical, 3),
            part([true; 4], canonical, 1),
            Plan::part(chain(), PlanOptions::new(4), &nothing_runs),
        ] {
            assert_eq!(plan.part.as_ref().unwrap().blocks, [true; 4]);
            assert_eq!(Plan { part: None, ..plan }, whole);
        }
    }

    /// Buckets: w3, w2, w1 and bias, w0, shared.
    #[test]
    fn buckets_belong_to_the_blocks_that_use_them_and_complete_there() {
        let whole = Plan::new(chain(), PlanOptions::new(4));
        let first = part([true, false, false, false], "F0 B0 W0", 1);
        let last = part([false, false, true, true], "F2 F3 B3 W3 B2 W2", 1);
        let delayed = part([false, false, true, true], "F2 F3 B3 B2 W2 W3", 1);
        for part in [&first, &last, &delayed] {
            assert_eq!((&part.buckets, &part.graph), (&whole.buckets, &whole.graph));
            let shapes = |plan: &Plan| -> Vec<_> {
                plan.segments.iter().map(|s| (s.phase, s.block, s.nodes.clone())).collect()
            };
            assert_eq!(shapes(part), shapes(&whole));
        }
        assert_eq!(first.held, [false, false, false, true, true]);
        assert_eq!(last.held, [true, true, false, false, true]);
        assert_eq!(completes(&first), [("W0".to_string(), vec![3, 4])]);
        let expected = [("W3".to_string(), vec![0, 4]), ("W2".to_string(), vec![1])];
        assert_eq!(completes(&last), expected);
        assert_eq!(completes(&delayed), expected);
        assert!(last.holds_segment(order(&last, "B2")[0]) && !last.holds_segment(SegmentId(0)));
    }

    #[test]
    fn only_what_the_part_touches_has_a_place() {
        let plan = part([false, true, false, false], "F1 B1 W1", 1);
        let graph = &plan.graph;
        let of_block = |node: &&Node| node.block == 1;
        let touched: Vec<TensorId> = (graph.nodes.iter().filter(of_block))
            .flat_map(|node| node.inputs.iter().chain(&node.outputs))
            .map(|tensor| graph.root(*tensor))
            .collect();
        for tensor in (0..graph.tensors.len() as u32).map(TensorId) {
            let expected = touched.contains(&graph.root(tensor));
            assert_eq!(plan.is_placed(tensor), expected, "{}", graph.tensor(tensor).name);
        }
        assert!(graph.inputs.iter().all(|(_, input)| !plan.is_placed(*input)));
        assert!(!plan.is_placed(graph.loss.unwrap()));
        let last = part([false, false, false, true], "F3 B3 W3", 1);
        assert_eq!(last.place(graph.loss.unwrap()), TensorLocation::Loss);
        assert!(last.is_placed(graph.input("target").unwrap()));
        assert!(!last.is_placed(graph.input("x").unwrap()));
    }

    /// A forward pass of all micro-batches, then the backward passes: tensors of the forward pass
    /// that the backward pass reads have a copy for each micro-batch, and the others one.
    #[test]
    fn slots_have_as_many_copies_as_the_program_needs() {
        let whole = Plan::new(chain(), PlanOptions::new(4));
        let of = |text: &str, m: usize| order(&whole, text).into_iter().map(move |id| (id, m));
        let forward = (0..3).flat_map(|m| of("F1", m));
        let runs: Vec<_> = forward.chain((0..3).flat_map(|m| of("B1 W1", m))).collect();
        let blocks = [false, true, false, false];
        let plan =
            Plan::part(chain(), PlanOptions::new(4), &PlanPart { blocks: &blocks, runs: &runs });
        let slot = |tensor: TensorId| match plan.place(tensor) {
            TensorLocation::Slot(slot) => plan.slots[slot.index()],
            other => panic!("{tensor} is in {other:?}"),
        };
        let crossing = crate::crossings(&plan.graph, &[0, 1, 2, 3]);
        let copies = |from, to| {
            let found = crossing.iter().find(|c| (c.from, c.to) == (from, to)).unwrap();
            let slot = slot(found.tensor);
            assert_eq!(slot.kind, SlotKind::Stash);
            slot.copies
        };
        // The input of the block is read again by W1. The gradients of its output and of its input
        // come and go with B1.
        assert_eq!((copies(0, 1), copies(2, 1), copies(1, 0)), (3, 1, 1));
        assert_eq!(plan.options.in_flight, 3);
        crate::replay(&plan, &runs).unwrap();
    }

    #[test]
    #[should_panic(expected = "micro-batches run different segments or in different orders")]
    fn micro_batches_in_different_orders_are_refused() {
        let whole = Plan::new(chain(), PlanOptions::new(4));
        let first = order(&whole, "F3 B3 W3").into_iter().map(|id| (id, 0));
        let second = order(&whole, "F3 W3 B3").into_iter().map(|id| (id, 1));
        let runs: Vec<_> = first.chain(second).collect();
        let part = PlanPart { blocks: &[false, false, false, true], runs: &runs };
        let _ = Plan::part(chain(), PlanOptions::new(4), &part);
    }

    #[test]
    #[should_panic(expected = "which its rank does not hold")]
    fn a_program_of_other_blocks_is_refused() {
        let part = PlanPart { blocks: &[false; 4], runs: &[(SegmentId(0), 0)] };
        let _ = Plan::part(chain(), PlanOptions::new(4), &part);
    }
}

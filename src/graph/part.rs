//! Plans of a part of a graph: some of its blocks, run in the order of a rank's program. All ids
//! are those of the whole graph, so that initial values, dropout, buckets and checkpoints do not
//! depend on the cut.

use std::collections::{BTreeMap, HashMap};

use super::plan::{self, Bucket, Plan, PlanOptions, Segment, TensorLocation};
use super::slots::{NodeOrder, Placement, Span, assign};
use super::{Graph, Node, PassKind, Role};
use crate::base::{BucketId, SegmentId};

/// Blocks that a rank holds, and the order in which it runs them.
#[derive(Clone, Copy, Debug)]
pub struct PlanPart<'a> {
    /// By block: true if the rank holds it.
    pub blocks: &'a [bool],
    /// The rank's program: its segments, each with its micro-batch, in the order in which they
    /// run. Every micro-batch must run the same segments in the same order. If nothing runs, the
    /// part is placed for one micro-batch in canonical order.
    pub runs: &'a [(SegmentId, usize)],
}

impl Plan {
    /// Plans a part of a forward or a training graph: the same segments, buckets and ids as
    /// [`Plan::new`], and places only for what the held blocks touch.
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
        let (buckets, _) = plan::buckets(&graph, &segments, options.bucket_bytes_max);
        let repetition = Repetition::of(part, &segments);
        let users = bucket_users(&graph, &buckets);
        let is_held = |users: &Vec<bool>| users.iter().zip(part.blocks).any(|(a, b)| *a && *b);
        let held: Vec<bool> = users.iter().map(is_held).collect();
        for bucket in (0..buckets.len()).filter(|bucket| held[*bucket]) {
            if let Some(last) = completed_by(&repetition.order, &segments, &users[bucket]) {
                segments[last.index()].completes.push(BucketId(bucket as u32));
            }
        }
        let mut places = vec![TensorLocation::Unallocated; graph.tensors.len()];
        plan::place_parameters(&graph, &buckets, &held, &mut places);
        let runs = |node: &&Node| part.blocks[node.block as usize];
        for output in graph.nodes.iter().filter(runs).flat_map(|node| &node.outputs) {
            if graph.tensor(*output).role == Role::Loss {
                places[output.index()] = TensorLocation::Loss;
            }
        }
        let mut is_read = vec![false; graph.tensors.len()];
        for input in graph.nodes.iter().filter(runs).flat_map(|node| &node.inputs) {
            is_read[graph.root(*input).index()] = true;
        }
        let order = NodeOrder::new(&segments, &repetition.order);
        let lives = order.lifetimes(&graph, part.blocks, |input| is_read[input.index()]);
        let mut known = HashMap::new();
        let copies = |span| *known.entry(span).or_insert_with(|| repetition.copies(span));
        let placement = Placement { graph: &graph, lives, rows: options.rows };
        let slots = assign(&placement, &mut places, copies);
        let in_flight = slots.iter().map(|slot| slot.copies).max().unwrap_or(1);
        let options = PlanOptions { in_flight, ..options };
        let held_blocks = part.blocks.to_vec();
        Self { graph, options, segments, slots, places, buckets, held, held_blocks }
    }
}

impl Plan {
    /// Returns the blocks whose nodes use a parameter of a bucket, ascending: devices that hold one
    /// of them hold the bucket.
    pub fn blocks_with(&self, bucket: BucketId) -> Vec<u32> {
        let users = bucket_users(&self.graph, &self.buckets);
        (0..)
            .zip(&users[bucket.index()])
            .filter(|(_, uses)| **uses)
            .map(|(block, _)| block)
            .collect()
    }
}

/// Segments that a program runs for each micro-batch.
struct Repetition {
    /// The segments of one micro-batch, in the order in which they run.
    order: Vec<SegmentId>,
    /// By micro-batch: the position in the program of each segment of `order`.
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
        let mut orders = runs.values().map(|(order, _)| order);
        let order = match orders.next() {
            Some(first) => {
                let same = orders.all(|order| order == first);
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
    fn copies(&self, span: Span) -> usize {
        let range = |(id, positions): (&usize, &Vec<usize>)| {
            (positions[span.first], positions[span.last], *id)
        };
        let mut ranges: Vec<(usize, usize, usize)> = self.positions.iter().map(range).collect();
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
    ranges.iter().all(|&(first, last, micro_batch)| {
        let end = ends.insert(micro_batch % copies, last);
        end.is_none_or(|end| end < first)
    })
}

/// Returns by bucket, then by block, if a node of the block uses a parameter of the bucket. As in
/// [`plan::buckets`], a parameter without uses belongs to the first block.
fn bucket_users(graph: &Graph, buckets: &[Bucket]) -> Vec<Vec<bool>> {
    let mut bucket_of = vec![0; graph.parameters.len()];
    for (index, bucket) in buckets.iter().enumerate() {
        bucket.parameters.iter().for_each(|(id, _)| bucket_of[id.index()] = index);
    }
    let mut users = vec![vec![false; graph.blocks.len()]; buckets.len()];
    for node in &graph.nodes {
        for &tensor in node.inputs.iter().chain(&node.outputs) {
            let (Role::Parameter(id) | Role::Gradient(id)) = graph.tensor(graph.root(tensor)).role
            else {
                continue;
            };
            users[bucket_of[id.index()]][node.block as usize] = true;
        }
    }
    for users in &mut users {
        if let Some(first) = users.first().copied() {
            users[0] = first || !users.contains(&true);
        }
    }
    users
}

/// Returns the segment with which the gradients of a bucket are complete on a rank: the last that
/// computes gradients of parameters in a block that uses it, and for a bucket to whose gradients
/// nothing is added, the last of all.
fn completed_by(order: &[SegmentId], segments: &[Segment], users: &[bool]) -> Option<SegmentId> {
    let segment = |id: &SegmentId| &segments[id.index()];
    let mut weights = order.iter().rev().filter(|id| segment(id).phase == PassKind::BackwardWeight);
    let last = weights.clone().next();
    weights.find(|id| users[segment(id).block as usize]).or(last).copied()
}

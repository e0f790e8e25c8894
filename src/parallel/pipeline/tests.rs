//! Tests of the programs of pipelines: they end, their slots suffice, their buckets have groups.

use super::*;
use crate::Mesh;
use crate::program::contiguous_shares;
use potluck_graph::model::{GptConfig, gpt};
use potluck_graph::print::MemoryUsage;
use potluck_graph::{
    ActivationFormat, Builder, Init, ModelGraph, ParameterKind, PlanOptions, Recompute, Unary,
    differentiate, replay,
};

/// Blocks in a row with a parameter each; the last block uses the first block's if `is_tied`.
fn plan(blocks: u32, is_tied: bool) -> Arc<Plan> {
    plan_of(blocks, |block| (is_tied && block + 1 == blocks).then_some(0))
}

/// Blocks in a row with a parameter each, or the parameter of the earlier block that `shared`
/// returns.
fn plan_of(blocks: u32, shared: impl Fn(u32) -> Option<u32>) -> Arc<Plan> {
    let mut b = Builder::new();
    let mut parameters = Vec::new();
    let mut x = None;
    for block in 0..blocks {
        b.block(&format!("block {block}"));
        let input = x.unwrap_or_else(|| b.input("x", &[1, 8]));
        let shared = shared(block).and_then(|of| parameters.get(of as usize).copied());
        let w = shared.unwrap_or_else(|| b.parameter(&format!("w{block}"), &[8, 8], Init::Zeros));
        parameters.push(w);
        x = Some(b.linear(input, w, None).unwrap());
    }
    let target = b.input("target", &[1, 8]);
    b.squared_error_loss(x.unwrap(), target).unwrap();
    Arc::new(Plan::new(differentiate(b.finish()).unwrap(), PlanOptions::new(4)))
}

fn even(stages: u32, chunks: u32, blocks: u32) -> Vec<Range<u32>> {
    let parts = stages * chunks;
    (0..parts).map(|part| part * blocks / parts..(part + 1) * blocks / parts).collect()
}

fn pipelines(count: u32, stages: u32, chunks: u32, blocks: u32) -> Vec<PipelineRanks> {
    let mesh = Mesh::of_pipelines(count as usize, stages as usize);
    let of = |groups| PipelineRanks { groups, chunks: even(stages, chunks, blocks) };
    mesh.pipelines().map(of).collect()
}

fn request<'a>(
    plan: &'a Arc<Plan>,
    pipelines: &'a [PipelineRanks],
    shares: &'a [Share],
    schedule: PipelineSchedule,
) -> PipelineRequest<'a> {
    let (overlap, piece_max, in_flight_min) = (true, 16, 1);
    let plans = std::slice::from_ref(plan);
    PipelineRequest { plans, pipelines, shares, schedule, overlap, piece_max, in_flight_min }
}

/// Performs the programs of all ranks in turns, instruction by instruction, as far as receives
/// allow; returns the maximum number of tensors in flight of each edge, or the ranks that wait for
/// ever.
fn perform(programs: &[Program], edges: &EdgeLayout) -> Result<Vec<usize>, Vec<usize>> {
    let mut next = vec![0; programs.len()];
    // By edge and reader.
    let mut sent: HashMap<(EdgeId, Rank), Vec<usize>> = HashMap::new();
    let mut most = vec![0; edges.edges.len()];
    loop {
        let before = next.clone();
        for (rank, program) in programs.iter().enumerate() {
            while let Some(instruction) = program.instructions.get(next[rank]) {
                match *instruction {
                    Instruction::Send { edge, micro_batch } => {
                        for to in &edges.edge(edge).to {
                            let sent = sent.entry((edge, *to)).or_default();
                            sent.push(micro_batch);
                            most[edge.index()] = most[edge.index()].max(sent.len());
                        }
                    }
                    Instruction::Recv { edge, micro_batch } => {
                        let reader = Rank(rank as u32);
                        if !take(&mut sent, &[(edge, reader)], micro_batch) {
                            break;
                        }
                    }
                    Instruction::AllReduce { reduction, micro_batch } => {
                        let reader = Rank(rank as u32);
                        let parts = edges.reduction(reduction).edges();
                        let parts: Vec<_> = parts.map(|edge| (edge, reader)).collect();
                        if !take(&mut sent, &parts, micro_batch) {
                            break;
                        }
                    }
                    _ => {}
                }
                next[rank] += 1;
            }
        }
        if next == before {
            let stuck = |rank: &usize| next[*rank] < programs[*rank].instructions.len();
            let waiting: Vec<usize> = (0..programs.len()).filter(stuck).collect();
            let is_received = sent.values().all(Vec::is_empty);
            return if waiting.is_empty() && is_received { Ok(most) } else { Err(waiting) };
        }
    }
}

/// Takes a micro-batch from each of these, if it is in all.
fn take(
    sent: &mut HashMap<(EdgeId, Rank), Vec<usize>>,
    from: &[(EdgeId, Rank)],
    micro_batch: usize,
) -> bool {
    let has = |of: &(EdgeId, Rank)| sent.get(of).is_some_and(|sent| sent.contains(&micro_batch));
    if !from.iter().all(has) {
        return false;
    }
    for of in from {
        let sent = sent.get_mut(of).unwrap();
        let at = sent.iter().position(|one| *one == micro_batch).unwrap();
        sent.remove(at);
    }
    true
}

/// Plans of the ranks of a tensor group with these shares of a GPT of three layers.
fn group_plans(shares: &[u32], tie: bool) -> Vec<Arc<Plan>> {
    recomputing_plans(shares, tie, Recompute::None)
}

fn group_config(tie: bool) -> GptConfig {
    GptConfig {
        vocabulary: 70,
        context: 4,
        positions: 4,
        layers: 3,
        heads: 4,
        width: 32,
        bias: true,
        dropout: 0.1,
        tie,
        activation: Unary::Gelu,
    }
}

fn recomputing_plans(shares: &[u32], tie: bool, recompute: Recompute) -> Vec<Arc<Plan>> {
    let model = ModelGraph::training(gpt(&group_config(tie)).unwrap(), true).unwrap();
    plans_of(&model.with_recompute(recompute), shares)
}

/// Plans of the ranks of a tensor group with these shares of a model.
fn plans_of(model: &ModelGraph, shares: &[u32]) -> Vec<Arc<Plan>> {
    let mut plans = Vec::new();
    for position in 0..shares.len() {
        let graph = model.of_rank(shares, position).unwrap().graph;
        plans.push(Arc::new(Plan::new(graph, PlanOptions::new(4))));
    }
    plans
}

/// Programs of one pipeline with these numbers of stages and of model chunks per stage, whose
/// stages are tensor groups with these plans of a graph of 5 blocks.
fn one_pipeline(
    plans: &[Arc<Plan>],
    [stages, chunks]: [usize; 2],
    samples: u32,
    schedule: PipelineSchedule,
) -> PipelinePrograms {
    let mesh = Mesh { data: 1, pipeline: stages, tensor: plans.len() };
    let chunks = even(stages as u32, chunks as u32, 5);
    let of = |groups| PipelineRanks { groups, chunks: chunks.clone() };
    let pipelines: Vec<PipelineRanks> = mesh.pipelines().map(of).collect();
    let samples = contiguous_shares(&[samples], &[4]);
    let request = request(&plans[0], &pipelines, &samples, schedule);
    PipelinePrograms::training(&PipelineRequest { plans, ..request })
}

/// A stage without gradients runs ahead as far as it can, and its edges say so.
#[test]
fn programs_with_frozen_stages_end_and_their_edges_hold_what_is_on_its_way() {
    let mut forward = gpt(&group_config(true)).unwrap();
    for parameter in &mut forward.parameters {
        if ["w", "h.0.", "h.1."].iter().any(|start| parameter.name.starts_with(start)) {
            parameter.kind = ParameterKind::Frozen;
        }
    }
    let model = ModelGraph::training(forward, true).unwrap();
    for (shares, stages) in [(vec![1], 2), (vec![1], 4), (vec![2, 1], 2)] {
        for schedule in PipelineSchedule::ALL {
            if schedule == PipelineSchedule::Interleaved {
                continue;
            }
            // More micro-batches than any schedule has in flight.
            let plans = plans_of(&model, &shares);
            let written = one_pipeline(&plans, [stages, 1], 40 * stages as u32, schedule);
            assert_ends(&written, schedule);
            // The first stage waits for no other.
            let first = written.programs[0].instructions.iter();
            let receives = first.filter(|of| matches!(of, Instruction::Recv { .. })).count();
            assert_eq!(receives, 0, "{schedule}");
            let count = written.programs[0].micro_batches.len();
            let mut edges = written.edges.edges.iter().filter(|edge| edge.reduction.is_none());
            assert!(
                edges.any(|edge| edge.from == Rank(0) && edge.in_flight == count),
                "{schedule}"
            );
        }
    }
}

/// Every schedule, with and without tensor groups: programs end, slots suffice, and what is
/// computed again is kept by no micro-batch that waits for its backward pass, and what is kept in
/// bf16 in less memory.
#[test]
fn programs_that_compute_again_end_on_fewer_slots() {
    for (shares, stages) in [(vec![1], 2), (vec![1], 4), (vec![2, 1], 2), (vec![1, 1], 1)] {
        for schedule in PipelineSchedule::ALL {
            let chunks = if schedule == PipelineSchedule::Interleaved { 2 } else { 1 };
            if stages * chunks > 5 || stages < 2 && schedule != PipelineSchedule::OneFOneB {
                continue;
            }
            let mut stashes = Vec::new();
            for recompute in [Recompute::None, Recompute::Selective, Recompute::Blocks] {
                let plans = recomputing_plans(&shares, true, recompute);
                let written = one_pipeline(&plans, [stages, chunks], 16 * stages as u32, schedule);
                assert_ends(&written, schedule);
                let stash = |plan: &Arc<Plan>| MemoryUsage::of(plan, 0).stash;
                stashes.push(written.plans.iter().map(stash).sum::<usize>());
            }
            let model = ModelGraph::training(gpt(&group_config(true)).unwrap(), true).unwrap();
            let packed = plans_of(&model.with_activations(ActivationFormat::Bf16), &shares);
            let written = one_pipeline(&packed, [stages, chunks], 16 * stages as u32, schedule);
            assert_ends(&written, schedule);
            let stash = |plan: &Arc<Plan>| MemoryUsage::of(plan, 0).stash;
            let packed: usize = written.plans.iter().map(stash).sum();
            assert!(packed < stashes[0], "{schedule} on {stages} stages: {packed} {stashes:?}");
            let is_less = stashes.is_sorted_by(|a, b| a > b);
            assert!(is_less, "{schedule} on {stages} stages: {stashes:?}");
        }
    }
}

/// What stages and ranks of tensor groups send each other, but for the parts of the loss.
#[test]
fn edges_of_words_have_half_of_the_bytes() {
    let model = ModelGraph::training(gpt(&group_config(true)).unwrap(), true).unwrap();
    let formats = [ActivationFormat::F32, ActivationFormat::Bf16];
    for (shares, stages) in [(vec![1], 3), (vec![2, 1], 2), (vec![1, 1], 1)] {
        let [exact, packed] = formats.map(|format| {
            let plans = plans_of(&model.clone().with_activations(format), &shares);
            let written = one_pipeline(&plans, [stages, 1], 16, PipelineSchedule::OneFOneB);
            let EdgeLayout { edges, reductions, .. } = written.edges;
            let is_sent = |edge: &&Edge| match edge.reduction {
                Some(id) => reductions[id.index()].kind.tensors() == 1,
                None => true,
            };
            edges.iter().filter(is_sent).map(|edge| edge.bytes(4)).collect::<Vec<usize>>()
        });
        assert!(!packed.is_empty());
        let doubled: Vec<usize> = packed.iter().map(|bytes| 2 * bytes).collect();
        assert_eq!(doubled, exact, "{stages} stages of {shares:?}");
    }
}

/// Cuts into 1, 2 and 3 stages, in 1 or 2 pipelines, each with its tensor groups.
#[test]
fn tensor_groups_end_on_their_slots_and_within_the_bounds_of_their_edges() {
    let mut cases = 0;
    for shares in [vec![1, 1], vec![2, 1, 1], vec![1; 4]] {
        for (count, stages, tie) in [(1, 1, true), (2, 1, false), (1, 2, true), (2, 3, true)] {
            let plans = group_plans(&shares, tie);
            let mesh = Mesh { data: count, pipeline: stages, tensor: shares.len() };
            let chunks = even(stages as u32, 1, plans[0].graph.blocks.len() as u32);
            let of = |groups| PipelineRanks { groups, chunks: chunks.clone() };
            let pipelines: Vec<PipelineRanks> = mesh.pipelines().map(of).collect();
            let samples = vec![4 * stages as u32 + 4; count];
            let of_pipelines = contiguous_shares(&samples, &vec![4; count]);
            for schedule in [PipelineSchedule::GPipe, PipelineSchedule::OneFOneB] {
                let request = PipelineRequest {
                    plans: &plans,
                    ..request(&plans[0], &pipelines, &of_pipelines, schedule)
                };
                let written = PipelinePrograms::training(&request);
                assert_ends(&written, schedule);
                assert_groups(&written, mesh);
                cases += 1;
            }
        }
    }
    assert_eq!(cases, 24);
}

/// Checks that programs end, on their slots and within the bounds of their edges; returns the
/// maximum number of tensors in flight of each edge.
fn assert_ends(written: &PipelinePrograms, schedule: PipelineSchedule) -> Vec<usize> {
    for (program, plan) in written.programs.iter().zip(&written.plans) {
        assert_eq!(replay(plan, &runs(&program.instructions)), Ok(()), "{schedule}");
    }
    let most = perform(&written.programs, &written.edges).unwrap();
    for (edge, most) in written.edges.edges.iter().zip(&most) {
        assert!(*most <= edge.in_flight, "{schedule}: {most} of {edge:?}");
    }
    most
}

/// Checks that slices are reduced between the ranks in one place of the tensor groups, and all else
/// between all that hold it, late; each rank all-reduces as often as the others of its group.
fn assert_groups(written: &PipelinePrograms, mesh: Mesh) {
    let buckets = &written.plans[0].buckets;
    for (bucket, id) in buckets.iter().zip((0..).map(BucketId)) {
        let group = written.groups.of(id);
        let places: Vec<usize> =
            group.iter().map(|(_, rank)| mesh.coordinates(rank).tensor).collect();
        match bucket.rank {
            Some(rank) => assert!(places.iter().all(|place| *place == rank as usize)),
            None => assert!((0..mesh.tensor).all(|place| places.contains(&place))),
        }
        for program in &written.programs {
            let start = Instruction::Start(Collective::reduce_scatter(id));
            let mut starts = program.instructions.iter();
            if let Some(at) = starts.position(|one| *one == start).filter(|_| bucket.rank.is_none())
            {
                let is_sum = |one: &Instruction| matches!(one, Instruction::AllReduce { .. });
                assert!(!program.instructions[at..].iter().any(is_sum), "{id} starts too early");
            }
        }
    }
    let sums = |rank: &Rank| {
        let instructions = written.programs[rank.index()].instructions.iter();
        instructions.filter(|one| matches!(one, Instruction::AllReduce { .. })).count()
    };
    for rank in mesh.ranks() {
        let group = mesh.group(crate::Axis::Tensor, rank);
        assert!(sums(&rank) > 0 && group.iter().all(|other| sums(other) == sums(&rank)));
    }
}

#[test]
fn every_schedule_ends_on_its_slots_and_within_the_bounds_of_its_edges() {
    let mut cases = 0;
    for (count, stages, blocks) in [(1, 2, 4), (1, 3, 7), (2, 2, 5), (1, 4, 8), (3, 2, 4)] {
        for schedule in PipelineSchedule::ALL {
            for is_tied in [false, true] {
                let chunks = if schedule == PipelineSchedule::Interleaved { 2 } else { 1 };
                if stages * chunks > blocks {
                    continue;
                }
                let plan = plan(blocks, is_tied);
                let pipelines = pipelines(count, stages, chunks, blocks);
                let samples = 4 * stages * 2;
                let shares =
                    contiguous_shares(&vec![samples; count as usize], &vec![4; count as usize]);
                let request = request(&plan, &pipelines, &shares, schedule);
                let written = PipelinePrograms::training(&request);
                let most = assert_ends(&written, schedule);
                for (edge, most) in written.edges.edges.iter().zip(most) {
                    assert_no_more_than_due(&request, edge, most);
                }
                cases += 1;
            }
        }
    }
    assert!(cases > 30, "{cases}");
}

/// Checks that an edge has no more room than its schedule fills: a stage of 1F1B runs ahead by as
/// many micro-batches as there are stages from it on, and `perform` lets the earlier stage run as
/// far ahead as it can. Gradients never wait for so long.
fn assert_no_more_than_due(request: &PipelineRequest, edge: &Edge, most: usize) {
    let stages = request.pipelines[0].stages();
    let mesh = Mesh::of_pipelines(request.pipelines.len(), stages);
    let [from, to] = [edge.from, edge.to[0]].map(|rank| mesh.coordinates(rank).pipeline);
    let micro_batches = micro_batch_counts(request.shares)[mesh.coordinates(edge.from).data];
    let ahead = match request.schedule {
        PipelineSchedule::GPipe => micro_batches,
        PipelineSchedule::OneFOneB => micro_batches.min(stages - from.min(to)),
        PipelineSchedule::Interleaved | PipelineSchedule::ZeroBubble => return,
    };
    assert_eq!(edge.in_flight, ahead, "{}: {edge:?}", request.schedule);
    assert!(from > to || most == ahead, "{}: {most} of {edge:?}", request.schedule);
}

#[test]
fn a_program_that_does_not_send_leaves_its_neighbours_waiting() {
    let plan = plan(4, false);
    let pipelines = pipelines(1, 2, 1, 4);
    let shares = contiguous_shares(&[8], &[4]);
    let request = request(&plan, &pipelines, &shares, PipelineSchedule::OneFOneB);
    let mut written = PipelinePrograms::training(&request);
    let is_send = |instruction: &Instruction| matches!(instruction, Instruction::Send { .. });
    let at = written.programs[0].instructions.iter().position(is_send).unwrap();
    written.programs[0].instructions.remove(at);
    assert_eq!(perform(&written.programs, &written.edges), Err(vec![0, 1]));
}

#[test]
fn buckets_are_reduced_between_the_ranks_that_hold_them() {
    let plan = plan(4, true);
    let tied = BucketId(plan.buckets.len() as u32 - 1);
    let names: Vec<&str> = plan.buckets[tied.index()]
        .parameters
        .iter()
        .map(|(id, _)| &*plan.graph.parameters[id.index()].name)
        .collect();
    assert_eq!(names, ["w0"]);
    let (alone, beside) = (pipelines(1, 2, 1, 4), pipelines(2, 2, 1, 4));
    let groups = |pipelines: &[PipelineRanks]| {
        let count = pipelines.len();
        let shares = contiguous_shares(&vec![8; count], &vec![4; count]);
        let request = request(&plan, pipelines, &shares, PipelineSchedule::GPipe);
        let written = PipelinePrograms::training(&request);
        let shown: Vec<String> = (0..plan.buckets.len() as u32)
            .map(|bucket| written.groups.of(BucketId(bucket)).to_string())
            .collect();
        (shown, written)
    };
    let (shown, written) = groups(&alone);
    assert_eq!(shown[tied.index()], "{0, 1}", "the first stage owns it");
    assert_eq!(written.programs[0].unreduced(&written.plans[0]), [BucketId(1)]);
    assert!(shown.iter().filter(|group| **group == "{0}").count() > 0);
    let start = Instruction::Start(Collective::reduce_scatter(tied));
    let position = |program: &Program, wanted: Instruction| {
        program.instructions.iter().position(|instruction| *instruction == wanted).unwrap()
    };
    let last_run = |program: &Program| {
        let is_run = |instruction: &Instruction| matches!(instruction, Instruction::Run { .. });
        program.instructions.iter().rposition(is_run).unwrap()
    };
    let of_last_stage = &written.programs[1];
    assert!(position(of_last_stage, start) < last_run(of_last_stage), "it travels early");
    let (shown, written) = groups(&beside);
    assert_eq!(shown[tied.index()], "{0, 1, 2, 3}");
    assert!(shown.contains(&"{1, 3}".to_string()) && shown.contains(&"{0, 2}".to_string()));
    let of_last_stage = &written.programs[3];
    assert!(position(of_last_stage, start) > last_run(of_last_stage), "behind all sends");
}

/// A tied weight is complete first on the last stage and last on the first one.
#[test]
fn late_reductions_are_in_one_order_on_all_ranks() {
    let plan = plan(4, true);
    let pipelines = pipelines(2, 2, 1, 4);
    let shares = contiguous_shares(&[8, 8], &[4, 4]);
    for overlap in [false, true] {
        let request = PipelineRequest {
            overlap,
            ..request(&plan, &pipelines, &shares, PipelineSchedule::OneFOneB)
        };
        let written = PipelinePrograms::training(&request);
        for program in &written.programs {
            let started = |bucket: &BucketId| {
                let start = Instruction::Start(Collective::reduce_scatter(*bucket));
                program.instructions.iter().position(|instruction| *instruction == start)
            };
            let buckets = (0..plan.buckets.len() as u32).map(BucketId);
            let starts: Vec<usize> = buckets.filter_map(|bucket| started(&bucket)).collect();
            assert!(starts.len() > 1 && starts.is_sorted(), "{overlap}: {starts:?}");
        }
    }
}

/// A weight that two blocks in a row use is on one stage of one pipeline and on two of the other.
#[test]
fn reductions_start_in_one_order_whatever_the_cuts() {
    let plan = plan_of(4, |block| (block == 2).then_some(1));
    let mut pipelines = pipelines(2, 2, 1, 4);
    pipelines[1].chunks = vec![0..3, 3..4];
    let shares = contiguous_shares(&[8, 8], &[4, 4]);
    for (schedule, overlap) in
        [(PipelineSchedule::GPipe, true), (PipelineSchedule::OneFOneB, false)]
    {
        let request = PipelineRequest { overlap, ..request(&plan, &pipelines, &shares, schedule) };
        let written = PipelinePrograms::training(&request);
        let started = |program: &Program| -> Vec<BucketId> {
            let buckets = (0..plan.buckets.len() as u32).map(BucketId);
            let starts = buckets.map(|bucket| (Collective::reduce_scatter(bucket), bucket));
            let position = |(start, bucket): (Collective, BucketId)| {
                let is_start = |one: &Instruction| *one == Instruction::Start(start);
                Some((program.instructions.iter().position(is_start)?, bucket))
            };
            let mut starts: Vec<(usize, BucketId)> = starts.filter_map(position).collect();
            starts.sort_unstable();
            starts.into_iter().map(|(_, bucket)| bucket).collect()
        };
        let orders: Vec<Vec<BucketId>> = written.programs.iter().map(started).collect();
        for (one, other) in orders.iter().flat_map(|one| orders.iter().map(move |o| (one, o))) {
            let common = |of: &[BucketId], others: &[BucketId]| -> Vec<BucketId> {
                of.iter().copied().filter(|bucket| others.contains(bucket)).collect()
            };
            assert_eq!(common(one, other), common(other, one), "overlap {overlap}: {orders:?}");
        }
    }
}

#[test]
fn the_forward_pass_of_several_chunks_ends_too() {
    for (stages, chunks, blocks) in [(2, 2, 4), (3, 2, 6), (2, 1, 2), (3, 3, 9)] {
        let plan = plan(blocks, false);
        let pipelines = pipelines(1, stages, chunks, blocks);
        let shares = contiguous_shares(&[4 * stages], &[4]);
        let request = PipelineRequest {
            in_flight_min: 7,
            ..request(&plan, &pipelines, &shares, PipelineSchedule::GPipe)
        };
        let edges = edge_layout(&request);
        let batches = micro_batches(0, 27, 4);
        let programs = PipelinePrograms::forward(&request, &edges, &[batches]);
        let most = perform(&programs, &edges).unwrap();
        assert!(edges.edges.iter().zip(most).all(|(edge, most)| most <= edge.in_flight));
        for (program, plan) in programs.iter().zip(PipelinePrograms::forward_plans(&request)) {
            let runs = runs(&program.instructions);
            assert_eq!(plan.graph.blocks.len(), blocks as usize);
            assert!(!runs.is_empty());
            assert_eq!(replay(&plan, &runs), Ok(()), "{stages} stages of {chunks}");
        }
    }
}

/// Evaluations during training run on its plans. A plan for a single micro-batch in flight would
/// not suffice.
#[test]
fn forward_passes_fit_the_plans_of_training() {
    use PipelineSchedule::{GPipe, Interleaved, OneFOneB, ZeroBubble};
    for (schedule, chunks) in [(GPipe, 1), (OneFOneB, 1), (ZeroBubble, 1), (Interleaved, 2)] {
        for (stages, micro_batches_trained) in [(2, 2), (2, 6), (3, 3), (3, 6)] {
            let plan = plan(stages * chunks, true);
            let pipelines = pipelines(1, stages, chunks, stages * chunks);
            let shares = contiguous_shares(&[4 * micro_batches_trained], &[4]);
            let request = request(&plan, &pipelines, &shares, schedule);
            let trained = PipelinePrograms::training(&request);
            let batches = micro_batches(0, 29, 4);
            let programs = PipelinePrograms::forward(&request, &trained.edges, &[batches]);
            for (program, part) in programs.iter().zip(&trained.plans) {
                let runs = runs(&program.instructions);
                assert_eq!(replay(part, &runs), Ok(()), "{schedule} on {stages} stages");
            }
            // The last stage reads its targets in the last of its chunks.
            let last = stages as usize - 1;
            let (runs, blocks) = (runs(&programs[last].instructions), pipelines[0].blocks_of(last));
            let part = PlanPart { blocks: &blocks, runs: &[] };
            let alone = Plan::part(plan.graph.clone(), plan.options, &part);
            assert_eq!(replay(&alone, &runs).is_ok(), chunks == 1, "{schedule}");
        }
    }
}

//! Instructions of the programs of a placement, with the names of blocks, tensors and ranks.

use super::placement::ExplainedPlacement;
use potluck_core::format::{counted, listed};
use potluck_core::{BucketId, EdgeId, Rank, ReductionId, SegmentId};
use potluck_graph::Plan;
use potluck_parallel::collective::Collective;
use potluck_parallel::planner::laid_out::LaidOut;
use potluck_parallel::{Coordinates, Edge, Instruction, Operation, PipelinePrograms, Program};
use potluck_train::runtime::trace_labels::edge_source;

/// Returns the programs of the ranks, each below the rank and its samples if there are several.
pub fn program(placement: &ExplainedPlacement) -> String {
    let LaidOut { written, group, .. } = &placement.laid_out;
    if let [program] = &written.programs[..] {
        return InstructionNames { plan: &group.plans[0], written }.program(program);
    }
    let mut texts = Vec::new();
    for (rank, program) in written.programs.iter().enumerate() {
        let title = placement.title(rank);
        let Coordinates { data, tensor, .. } = placement.coordinates(rank);
        let samples = placement.planned.shares[data].count;
        let names = InstructionNames { plan: &group.plans[tensor], written };
        let program = names.program(program);
        let samples = counted(samples as usize, "sample", "samples");
        texts.push(format!("rank {rank}: {title}, {samples}\n{program}"));
    }
    texts.join("\n")
}

/// Names of the operands of a program's instructions.
struct InstructionNames<'a> {
    /// Plan of all stages for the rank's position in a tensor group.
    plan: &'a Plan,
    /// Plans of all ranks, and edges of pipelines and tensor groups.
    written: &'a PipelinePrograms,
}

impl InstructionNames<'_> {
    /// Formats a program with the names of its operands.
    fn program(&self, program: &Program) -> String {
        program.text_of(|instruction| self.instruction(instruction))
    }

    fn instruction(&self, instruction: &Instruction) -> String {
        match *instruction {
            Instruction::Run { segment, micro_batch } => {
                format!("run {segment} ({}) on micro-batch {micro_batch}", self.segment(segment))
            }
            Instruction::Send { edge, micro_batch } => {
                format!("send {edge}{} of micro-batch {micro_batch}", self.sent(edge))
            }
            Instruction::Recv { edge, micro_batch } => {
                format!("receive {edge}{} of micro-batch {micro_batch}", self.received(edge))
            }
            Instruction::AllReduce { reduction, micro_batch } => {
                format!("{reduction}{} of micro-batch {micro_batch}", self.reduced(reduction))
            }
            Instruction::Start(Collective { bucket, .. }) | Instruction::Update { bucket } => {
                format!("{instruction} ({})", self.bucket(bucket))
            }
            Instruction::Wait(token) => match token.operation {
                Operation::Collective(Collective { bucket, .. }) => {
                    format!("{instruction} ({})", self.bucket(bucket))
                }
                Operation::Receive(edge) => format!("{instruction}{}", self.received(edge)),
                Operation::AllReduce(reduction) => {
                    format!("{instruction}{}", self.reduced(reduction))
                }
            },
            Instruction::ZeroGradients | Instruction::Load { .. } | Instruction::Verdict => {
                instruction.to_string()
            }
        }
    }

    /// Pass and block of a segment: `B h.1`.
    fn segment(&self, segment: SegmentId) -> String {
        let segment = &self.plan.segments[segment.index()];
        format!("{} {}", segment.phase, self.plan.graph.blocks[segment.block as usize])
    }

    fn sent(&self, edge: EdgeId) -> String {
        match self.written.edges.edges.get(edge.index()) {
            Some(edge) if edge.reduction.is_some() => {
                format!(" ({} -> {})", self.tensor(edge), ranks_text(&edge.to))
            }
            Some(edge) => format!(" ({} -> {})", self.tensor(edge), edge.to[0]),
            None => String::new(),
        }
    }

    fn received(&self, edge: EdgeId) -> String {
        match self.written.edges.edges.get(edge.index()) {
            Some(edge) => format!(" ({} of {})", self.tensor(edge), edge.from),
            None => String::new(),
        }
    }

    /// Tensor of an all-reduce and its ranks: ` (h.1 of ranks 0 and 1)`.
    fn reduced(&self, reduction: ReductionId) -> String {
        let Some(reduction) = self.written.edges.reductions.get(reduction.index()) else {
            return String::new();
        };
        let mut edges = reduction.edges().map(|edge| self.written.edges.edge(edge));
        let Some(first) = edges.next() else { return String::new() };
        format!(" ({} of {})", self.tensor(first), ranks_text(&first.to))
    }

    fn tensor(&self, edge: &Edge) -> String {
        edge_source(&self.written.plans, edge)
    }

    /// Name of the only tensor of a bucket, or the number of them and their block.
    fn bucket(&self, bucket: BucketId) -> String {
        let graph = &self.plan.graph;
        let parameters = &self.plan.buckets[bucket.index()].parameters;
        if let [(id, _)] = parameters[..] {
            return graph.tensor(graph.parameters[id.index()].tensor).name.clone();
        }
        let mut text = format!("{} tensors", parameters.len());
        let completes = self.plan.segments.iter().find(|one| one.completes.contains(&bucket));
        if let Some(segment) = completes {
            text += &format!(" of {}", graph.blocks[segment.block as usize]);
        }
        text
    }
}

/// Formats the ranks of a tensor group: `ranks 0, 1`.
fn ranks_text(ranks: &[Rank]) -> String {
    format!("ranks {}", listed(ranks.iter().map(|rank| rank.index())))
}

//! Work of the blocks of a model, which divides a measured time: among passes that were not timed
//! apart, and among the ranks of tensor groups.

use potluck_core::rng::Key;
use potluck_graph::{Graph, PassKind};
use potluck_kernels::RandomContext;
use potluck_kernels::exec::PassContext;
use potluck_parallel::planner::plans::Plans;

/// Floating-point operations in the time of a byte of memory traffic. 10 of a processor, 12 to 40
/// of graphics cards; the parts of a block hardly depend on it.
const FLOPS_PER_BYTE: f64 = 10.0;

/// Floating-point operations of the passes of a block for one sample.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct BlockFlops {
    pub forward: f64,
    pub backward_input: f64,
    pub backward_weight: f64,
}

/// Returns the operations of each block of a graph.
pub(crate) fn block_flops(graph: &Graph) -> Vec<BlockFlops> {
    let pass = pass_of(1);
    let mut blocks = vec![BlockFlops::default(); graph.blocks.len().max(1)];
    for node in &graph.nodes {
        let Some(cost) = pass.cost(graph, node) else { continue };
        let block = &mut blocks[node.block as usize];
        match node.phase {
            PassKind::Forward => block.forward += cost.flops,
            PassKind::BackwardInput => block.backward_input += cost.flops,
            PassKind::BackwardWeight => block.backward_weight += cost.flops,
        }
    }
    blocks
}

/// Returns, by block, the part of its work that each of two equal ranks of a tensor group has for
/// micro-batches of `rows` samples; empty for a model that cannot be divided so. What is not
/// divided, both compute: norms, sums with residuals, dropout.
pub fn half_parts(plans: &Plans, rows: u32) -> Vec<f64> {
    let Ok(group) = plans.of_group(&[1, 1], rows) else { return Vec::new() };
    let whole = block_work(&plans.of_rows(rows).graph, rows);
    // With an odd number of units, one of the ranks has more.
    let [one, other] = [0, 1].map(|rank: usize| block_work(&group.plans[rank].graph, rows));
    let mut parts = Vec::with_capacity(whole.len());
    for (block, whole) in whole.into_iter().enumerate() {
        let half = (one[block] + other[block]) / 2.0;
        parts.push(if whole > 0.0 { (half / whole).clamp(0.5, 1.0) } else { 1.0 });
    }
    parts
}

/// By block: floating-point operations of the kernels of a micro-batch, or as many as take the time
/// of their memory traffic, if that is more.
fn block_work(graph: &Graph, rows: u32) -> Vec<f64> {
    let pass = pass_of(rows as usize);
    let mut work = vec![0.0; graph.blocks.len().max(1)];
    for node in &graph.nodes {
        if let Some(cost) = pass.cost(graph, node) {
            work[node.block as usize] += cost.flops.max(FLOPS_PER_BYTE * cost.bytes);
        }
    }
    work
}

fn pass_of(rows: usize) -> PassContext {
    let random = RandomContext { step_key: Key::new(0), training: true };
    PassContext { micro_batch: 0, rows, loss_scale: 1.0, random }
}

#[cfg(test)]
mod tests {
    use super::*;
    use potluck_graph::model::{GptConfig, gpt};
    use potluck_graph::{ModelGraph, Unary};

    fn plans(width: usize, heads: usize) -> Plans {
        let config = GptConfig {
            vocabulary: 65,
            context: 64,
            positions: 64,
            layers: 2,
            heads,
            width,
            bias: true,
            dropout: 0.0,
            tie: true,
            activation: Unary::Gelu,
        };
        Plans::new(ModelGraph::training(gpt(&config).unwrap(), true).unwrap())
    }

    #[test]
    fn ranks_of_a_tensor_group_have_more_than_their_part_the_more_the_narrower_the_model() {
        let layer = |width: usize| half_parts(&plans(width, 4), 12)[1];
        let [narrow, wide] = [64, 512].map(layer);
        assert!((0.55..0.7).contains(&narrow), "{narrow}");
        assert!((0.5..0.53).contains(&wide), "{wide}");
        // The odd head of one rank is not work of both.
        let [five, four] = [5, 4].map(|heads| half_parts(&plans(40 * heads, heads), 12)[1]);
        assert!((five - four).abs() < 0.03, "{five} {four}");
    }

    #[test]
    fn a_model_that_two_ranks_cannot_share_has_no_parts() {
        assert!(half_parts(&plans(16, 1), 12).is_empty());
    }
}

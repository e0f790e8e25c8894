//! Floating-point operations of the blocks of a model, which divide a measured time among passes
//! that were not timed apart.

use potluck_core::rng::Key;
use potluck_graph::{Graph, PassKind};
use potluck_kernels::RandomContext;
use potluck_kernels::exec::PassContext;

/// Floating-point operations of the passes of a block for one sample.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct BlockFlops {
    pub forward: f64,
    pub backward_input: f64,
    pub backward_weight: f64,
}

/// Returns the operations of each block of a graph.
pub(crate) fn block_flops(graph: &Graph) -> Vec<BlockFlops> {
    let random = RandomContext { step_key: Key::new(0), training: true };
    let pass = PassContext { micro_batch: 0, rows: 1, loss_scale: 1.0, random };
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

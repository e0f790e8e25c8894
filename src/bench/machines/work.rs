//! Work of a model's passes, from the analytic costs of its kernels.

use potluck_core::DType;
use potluck_core::rng::Key;
use potluck_graph::{Graph, Node, Plan, Precision};
use potluck_kernels::RandomContext;
use potluck_kernels::exec::PassContext;
use potluck_parallel::planner::plans::Plans;
use potluck_parallel::planner::rates::{BlockWork, KernelWork, ModelWork, WorkKind};

/// Elements over which the bytes of a moment are averaged: formats may share words.
const MOMENTS: usize = 64;

/// Returns the work of a model in micro-batches of one sample and of `micro_batch`, with an
/// optimizer that keeps `moments` numbers per parameter.
pub(super) fn model_work(plans: &Plans, micro_batch: u32, moments: usize) -> ModelWork {
    let plan = plans.of_rows(1);
    let mut input_bytes = 0;
    for (_, input) in &plan.graph.inputs {
        input_bytes += plan.graph.tensor(*input).bytes(1);
    }
    // The parameter is read and written, as are its moments, and its gradient is read twice: for
    // the norm of all gradients, and for the update.
    let value = DType::F32.bytes() as f64;
    let moment = plan.options.moments.bytes(MOMENTS) as f64 / MOMENTS as f64;
    let average = plan.options.average_bytes(1) as f64;
    let update_bytes = 4.0 * value + 2.0 * (moments as f64 * moment + average);
    let rows = [1, micro_batch.max(1)];
    ModelWork {
        rows,
        blocks: rows.map(|rows| blocks(&plan, rows as usize)),
        input_bytes: input_bytes as f64,
        update_bytes,
    }
}

fn blocks(plan: &Plan, rows: usize) -> Vec<BlockWork> {
    let graph = &plan.graph;
    let random = RandomContext { step_key: Key::new(0), training: true };
    let pass = PassContext { micro_batch: 0, rows, loss_scale: 1.0, random };
    let mut blocks = vec![BlockWork::default(); graph.blocks.len()];
    for node in &graph.nodes {
        if let Some(work) = kernel_work(graph, node, &pass) {
            blocks[node.block as usize].pass_mut(node.phase).push(work);
        }
    }
    blocks
}

/// Work of a node; `None` if it moves nothing.
fn kernel_work(graph: &Graph, node: &Node, pass: &PassContext) -> Option<KernelWork> {
    let cost = pass.cost(graph, node)?;
    if cost.flops == 0.0 && cost.bytes == 0.0 {
        return None;
    }
    let is_attention = node.op.to_string().starts_with("attention");
    let kind = match (node.op.is_product(), is_attention) {
        (true, true) => WorkKind::Attention,
        (true, false) => WorkKind::Product,
        _ => WorkKind::Other,
    };
    let is_mixed = node.precision == Precision::Mixed;
    Some(KernelWork { kind, is_mixed, flops: cost.flops, bytes: cost.bytes })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::step::gpt2;
    use potluck_graph::ModelGraph;
    use potluck_graph::model::{GptConfig, gpt};
    use potluck_parallel::planner::cards::card_named;
    use potluck_parallel::planner::rates::DeviceRates;

    /// Products of a training step are six times the parameters and tokens, and attention and the
    /// head come on top.
    #[test]
    fn work_of_gpt_is_that_of_its_parameters() {
        let config = GptConfig { layers: 2, ..gpt2() };
        let forward = gpt(&config).unwrap();
        let plans = Plans::new(ModelGraph::training(forward, true).unwrap());
        let work = model_work(&plans, 4, 2);
        let parameters = plans.of_rows(1).graph.parameter_count() as f64;
        let positions = (config.context * config.width) as f64;
        let tokens = 4.0 * config.context as f64;
        let mut flops = 0.0;
        let mut products = 0.0;
        for block in &work.blocks[1] {
            for pass in [&block.forward, &block.backward_input, &block.backward_weight] {
                for kernel in pass {
                    flops += kernel.flops;
                    if kernel.kind == WorkKind::Product {
                        products += kernel.flops;
                    }
                }
            }
        }
        let ratio = products / (6.0 * (parameters - positions) * tokens);
        assert!((0.95..1.45).contains(&ratio) && flops > products, "{ratio}");
        assert_eq!((work.rows, work.update_bytes), ([1, 4], 32.0));
        // Four samples take almost four times as long as one.
        let rates = DeviceRates::of_card(card_named("RTX 4090").unwrap(), 64.0);
        let profile = rates.profile(&work, 0, 0);
        let seconds = |rows| profile.blocks.iter().map(|one| one.at(rows).sum_s()).sum::<f64>();
        let ratio = seconds(4) / seconds(1);
        assert!((3.0..=4.0).contains(&ratio), "{ratio}");
    }
}

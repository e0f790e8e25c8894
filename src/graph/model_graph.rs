//! Graph of a model as devices run it: the whole graph, and the shard of each rank of a tensor
//! group.

use std::ops::Range;

use super::passes::fuse::{Fusion, fuse_listed};
use super::passes::merge_backward::merge_backward;
use super::passes::store_activations::store_activations;
use super::{
    ActivationFormat, Graph, MomentFormat, PlanOptions, Precision, Recomputation, Recompute,
    ShapeError, Shard, ShardError, cut_large_parameters, differentiate, reported_once, shard,
};

/// Graph of a model as devices run it: trained or forward only, fused or not, with or without
/// recomputation, with the moments of the optimizer and the activations between blocks and passes
/// in f32 or bf16, and in f32 or mixed precision.
/// It is rebuilt from the forward graph for each rank of a tensor group.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelGraph {
    forward: Graph,
    is_trained: bool,
    is_fused: bool,
    recompute: Recompute,
    is_merged: bool,
    moments: MomentFormat,
    averages: bool,
    precision: Precision,
    activations: ActivationFormat,
    parameter_bytes_max: Option<usize>,
    /// The whole graph without recomputation and with passes B and W apart.
    plain: Graph,
    whole: Graph,
    fusions: Vec<Fusion>,
}

/// Graph that one rank of a tensor group runs.
#[derive(Clone, Debug, PartialEq)]
pub struct RankGraph {
    pub graph: Graph,
    /// The ranges of the last dimension that the rank computes, by output of the graph.
    pub outputs: Vec<Vec<Range<usize>>>,
}

impl ModelGraph {
    /// Creates the training graph of a forward graph.
    ///
    /// # Errors
    /// Returns the errors of [`differentiate`].
    pub fn training(forward: Graph, is_fused: bool) -> Result<Self, ShapeError> {
        let (whole, fusions) = fused(differentiate(forward.clone())?, is_fused);
        Ok(Self { is_trained: true, ..Self::new(forward, is_fused, whole, fusions) })
    }

    /// Creates the graph of forward passes only.
    pub fn forward(forward: Graph, is_fused: bool) -> Self {
        let (whole, fusions) = fused(forward.clone(), is_fused);
        Self::new(forward, is_fused, whole, fusions)
    }

    fn new(forward: Graph, is_fused: bool, whole: Graph, fusions: Vec<Fusion>) -> Self {
        Self {
            forward,
            is_trained: false,
            is_fused,
            recompute: Recompute::default(),
            is_merged: false,
            moments: MomentFormat::default(),
            averages: false,
            precision: Precision::default(),
            activations: ActivationFormat::default(),
            parameter_bytes_max: None,
            plain: whole.clone(),
            whole,
            fusions,
        }
    }

    /// Returns the training graph with activations recomputed in the backward pass instead of kept.
    /// A graph without a backward pass is returned unchanged.
    pub fn with_recompute(self, recompute: Recompute) -> Self {
        Self { recompute, ..self }.rebuilt()
    }

    /// Returns what is recomputed in the backward pass.
    pub fn recompute(&self) -> Recompute {
        self.recompute
    }

    /// Returns the training graph with the gradients of parameters moved to pass B where that takes
    /// less memory; see [`merge_backward`].
    pub fn with_merged_backward(self) -> Self {
        Self { is_merged: true, ..self }.rebuilt()
    }

    /// Returns the training graph with passes B and W apart, as stages of pipelines need them.
    pub fn with_separate_backward(self) -> Self {
        Self { is_merged: false, ..self }.rebuilt()
    }

    /// Rebuilds the whole graph with the current options.
    fn rebuilt(self) -> Self {
        let recomputation = Recomputation::of(&self.plain, self.recompute);
        let whole = self.laid_out(recomputation.apply(self.plain.clone()), &recomputation);
        Self { whole, ..self }
    }

    fn laid_out(&self, graph: Graph, recomputation: &Recomputation) -> Graph {
        let graph = if self.is_merged { merge_backward(graph) } else { graph };
        let graph = match self.activations {
            ActivationFormat::F32 => graph,
            ActivationFormat::Bf16 => store_activations(graph, recomputation.loss_block()),
        };
        graph.with_precision(self.precision)
    }

    /// Returns the graph for devices that keep the optimizer's moments in this format.
    pub fn with_moments(self, moments: MomentFormat) -> Self {
        Self { moments, ..self }
    }

    /// Returns the graph for devices that keep an exponential average of the parameters, or none.
    pub fn with_averages(self, averages: bool) -> Self {
        Self { averages, ..self }
    }

    /// Returns the arithmetic of matrix products.
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// Returns the graph with this arithmetic of matrix products.
    pub fn with_precision(self, precision: Precision) -> Self {
        Self { precision, ..self }.rebuilt()
    }

    /// Returns the number format of the activations between blocks, and of those kept for the
    /// backward pass.
    pub fn activations(&self) -> ActivationFormat {
        self.activations
    }

    /// Returns the graph with the activations between blocks, and those kept for the backward pass,
    /// in this format.
    pub fn with_activations(self, activations: ActivationFormat) -> Self {
        Self { activations, ..self }.rebuilt()
    }

    /// Returns the graph for devices whose bindings are limited to a number of bytes, with larger
    /// parameters cut by rows where that is possible: see [`cut_large_parameters`]. `None` is the
    /// graph without cuts. All inputs, outputs and blocks keep their numbers.
    ///
    /// # Errors
    /// Returns the errors of [`differentiate`].
    pub fn with_parameter_bytes_max(self, bytes: Option<usize>) -> Result<Self, ShapeError> {
        if bytes == self.parameter_bytes_max {
            return Ok(self);
        }
        let limited = Self { parameter_bytes_max: bytes, ..self };
        let graph = limited.differentiated(limited.cut(limited.forward.clone()))?;
        let (plain, fusions) = fused(graph, limited.is_fused);
        Ok(Self { plain, fusions, ..limited }.rebuilt())
    }

    /// Cuts the parameters of a forward graph that are too large to bind.
    fn cut(&self, graph: Graph) -> Graph {
        match self.parameter_bytes_max {
            Some(bytes) => cut_large_parameters(graph, bytes),
            None => graph,
        }
    }

    fn differentiated(&self, graph: Graph) -> Result<Graph, ShapeError> {
        if self.is_trained { differentiate(graph) } else { Ok(graph) }
    }

    /// Returns the bytes of the largest parameter of the whole model.
    pub fn parameter_bytes(&self) -> usize {
        let mut largest = 0;
        for parameter in &self.whole.parameters {
            largest = largest.max(self.whole.tensor(parameter.tensor).bytes(1));
        }
        largest
    }

    /// Returns the options of a plan of the graph for up to `rows` rows.
    pub fn plan_options(&self, rows: usize) -> PlanOptions {
        let parameter_bytes_max = self.parameter_bytes_max;
        PlanOptions {
            moments: self.moments,
            averages: self.averages,
            parameter_bytes_max,
            ..PlanOptions::new(rows)
        }
    }

    /// Returns the graph of a device that holds the whole model.
    pub fn whole(&self) -> &Graph {
        &self.whole
    }

    /// Returns the fusions in the graph of the whole model.
    pub fn fusions(&self) -> &[Fusion] {
        &self.fusions
    }

    /// Returns the graph of the rank at `position` of a tensor group whose ranks have these shares
    /// of the model, each at least 1; for a group of one, the whole graph. The first rank reports
    /// the loss and the gradients of replicated parameters.
    ///
    /// # Errors
    /// Returns the errors of [`shard`].
    ///
    /// # Panics
    /// If `position` is not less than the number of shares, or a share is 0.
    pub fn of_rank(&self, shares: &[u32], position: usize) -> Result<RankGraph, ShardError> {
        let shares: Vec<f64> = shares.iter().map(|share| f64::from(*share)).collect();
        let Shard { graph, outputs } = shard(&self.forward, &shares, position)?;
        let graph = self.differentiated(self.cut(graph))?;
        let recomputation = Recomputation::of(&graph, self.recompute);
        let (graph, _) = fused(reported_once(graph), self.is_fused);
        let graph = self.laid_out(recomputation.apply(graph), &recomputation);
        Ok(RankGraph { graph, outputs })
    }
}

fn fused(graph: Graph, is_fused: bool) -> (Graph, Vec<Fusion>) {
    if is_fused { fuse_listed(graph) } else { (graph, Vec::new()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Builder, Init, Node, ParameterSplit, PassKind, Plan, SplitUnit, Unary, fuse};

    fn forward() -> Graph {
        let mut b = Builder::new();
        b.block("layers");
        let x = b.input("x", &[1, 8]);
        let targets = b.input_ids("targets", &[1]);
        let first = b.parameter("first", &[64, 8], Init::Ones);
        let second = b.parameter("second", &[5, 64], Init::Ones);
        let y = b.linear(x, first, None).unwrap();
        let y = b.unary(y, Unary::Relu).unwrap();
        let y = b.linear(y, second, None).unwrap();
        b.output("y", y);
        b.cross_entropy_loss(y, targets).unwrap();
        let columns = |dimension| Some(ParameterSplit::new(dimension, SplitUnit::Columns));
        b.split_parameters(|name| if name == "first" { columns(0) } else { columns(1) });
        b.finish()
    }

    #[test]
    fn a_group_of_one_runs_the_whole() {
        let model = ModelGraph::training(forward(), true).unwrap();
        assert_eq!(*model.whole(), fuse(differentiate(forward()).unwrap()));
        assert!(!model.fusions().is_empty());
        assert_eq!(model.of_rank(&[3], 0).unwrap().graph, *model.whole());
        let again = model.clone().with_recompute(Recompute::Blocks);
        assert_eq!(again.of_rank(&[3], 0).unwrap().graph, *again.whole());
        let unfused = ModelGraph::training(forward(), false).unwrap();
        assert_eq!(*unfused.whole(), differentiate(forward()).unwrap());
        let passes = ModelGraph::forward(forward(), true);
        assert!(passes.whole().nodes.iter().all(|node| node.phase == PassKind::Forward));
        assert_eq!(passes.of_rank(&[1], 0).unwrap().graph, *passes.whole());
    }

    #[test]
    fn a_limit_cuts_parameters_of_the_whole_and_of_ranks() {
        let model = ModelGraph::training(forward(), true).unwrap();
        let limited = model.clone().with_parameter_bytes_max(Some(512)).unwrap();
        assert_eq!((model.parameter_bytes(), limited.parameter_bytes()), (2048, 512));
        assert_eq!(limited.plan_options(3).parameter_bytes_max, Some(512));
        let rank = limited.of_rank(&[3, 1], 0).unwrap().graph;
        let names: Vec<&str> = rank.parameters.iter().map(|p| &*p.name).collect();
        assert!(names.contains(&"first/0[0..16]"), "{names:?}");
        let plan = Plan::new(limited.whole().clone(), limited.plan_options(3));
        assert!(plan.buckets.iter().all(|bucket| bucket.length <= 128));
        assert_eq!(limited.with_parameter_bytes_max(None).unwrap(), model);
    }

    #[test]
    fn ranks_of_a_group_have_their_shares_and_one_reports_the_loss() {
        let model = ModelGraph::training(forward(), true).unwrap();
        let ranks = [0, 1].map(|rank| model.of_rank(&[1, 1], rank).unwrap());
        let writes_loss = |rank: &RankGraph| {
            let mut outputs = rank.graph.nodes.iter().flat_map(|node| &node.outputs);
            outputs.any(|output| Some(*output) == rank.graph.loss)
        };
        assert_eq!(ranks.each_ref().map(writes_loss), [true, false]);
        assert!(ranks.iter().all(|rank| rank.graph.tensor_rank.is_some()));
        assert_eq!(ranks[0].graph.parameters, ranks[1].graph.parameters);
        assert!(model.of_rank(&[1; 9], 0).is_err());
    }

    /// In whatever order a graph gets its options.
    #[test]
    fn all_products_and_nothing_else_are_in_mixed_precision() {
        let model = || ModelGraph::training(forward(), true).unwrap();
        let mixed = Precision::Mixed;
        let bytes = Some(64 * 4);
        let models = [
            model().with_precision(mixed),
            model().with_precision(mixed).with_recompute(Recompute::Blocks),
            model().with_recompute(Recompute::Selective).with_precision(mixed),
            model().with_precision(mixed).with_merged_backward(),
            model().with_precision(mixed).with_parameter_bytes_max(bytes).unwrap(),
            model().with_parameter_bytes_max(bytes).unwrap().with_precision(mixed),
            ModelGraph::training(forward(), false).unwrap().with_precision(mixed),
            ModelGraph::forward(forward(), true).with_precision(mixed),
        ];
        for model in models {
            let rank = model.of_rank(&[1, 1], 1).unwrap().graph;
            for graph in [model.whole(), &rank] {
                let is_right = |node: &Node| (node.precision == mixed) == node.op.is_product();
                assert!(graph.nodes.iter().all(is_right));
                assert_eq!(graph.precision(), mixed);
            }
            let exact = model.with_precision(Precision::F32);
            assert_eq!(exact.whole().precision(), Precision::F32);
        }
    }
}

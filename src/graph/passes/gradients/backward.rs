//! Traversal from the loss to the parameters: the gradients so far, and the methods with which the
//! rules of the ops add to them.

use crate::elements::{Binary, BinarySide, Slope, Unary};
use crate::op::{EpilogueOp, Op};
use crate::shapes::ShapeError;
use crate::{Accumulation, Graph, Node, ParameterKind, PassKind, Role};
use potluck_core::format::listed;
use potluck_core::{DType, NodeId, Shape, TensorId};

/// State of the traversal.
pub struct Backward {
    pub graph: Graph,
    /// Gradient of each tensor so far: the sum of the contributions of its users.
    pub adjoint: Vec<Option<TensorId>>,
    /// True for each tensor that is a trained parameter, or is computed from one.
    pub requires_grad: Vec<bool>,
    /// Tensor `(n, 2)` that the loss sums.
    pub loss_parts: Option<TensorId>,
}

impl Backward {
    pub fn new(mut graph: Graph) -> Self {
        let mut requires_grad = vec![false; graph.tensors.len()];
        for parameter in &graph.parameters {
            let is_trained = parameter.kind != ParameterKind::Frozen && !parameter.kind.is_state();
            requires_grad[parameter.tensor.index()] = is_trained;
        }
        for node in &graph.nodes {
            let mut inputs = node.inputs.iter().enumerate();
            if inputs.any(|(at, input)| requires_grad[input.index()] && has_slope(&node.op, at)) {
                for output in &node.outputs {
                    requires_grad[output.index()] = true;
                }
            }
        }
        let adjoint = vec![None; graph.tensors.len()];
        for index in 0..graph.parameters.len() {
            let parameter = &graph.parameters[index];
            if parameter.kind == ParameterKind::Frozen {
                continue;
            }
            let Role::Parameter(id) = graph.tensor(parameter.tensor).role else {
                unreachable!("parameters are made with their role");
            };
            let typed = (graph.tensor(parameter.tensor).shape.clone(), DType::F32);
            let name = format!("gradient of {}", parameter.name);
            let gradient = graph.add_tensor(name, typed, Role::Gradient(id));
            graph.parameters[index].gradient = Some(gradient);
            requires_grad.push(false);
        }
        let mut loss_parts = None;
        if let Some(loss) = graph.loss
            && let Some(sum) = graph.nodes.iter().find(|node| node.outputs.contains(&loss))
        {
            loss_parts = Some(sum.inputs[0]);
        }
        Self { graph, adjoint, requires_grad, loss_parts }
    }

    pub fn refused(&self, node: &Node, why: String) -> ShapeError {
        let shapes = node.inputs.iter().map(|input| self.graph.tensor(*input).shape.to_string());
        ShapeError { op: node.op.to_string(), inputs: listed(shapes), why }
    }

    /// Returns the error of an op that computes a gradient, and so has none.
    pub fn without_gradient(&self, id: NodeId, node: &Node) -> ShapeError {
        let name = &self.graph.tensor(node.outputs[0]).name;
        let why = format!(
            "node {} ({name}) has no gradient, being one itself, and the loss depends on a \
             parameter by it; compute the same of the builder's other ops",
            id.index()
        );
        self.refused(node, why)
    }

    pub fn gradient_of(&self, tensor: TensorId) -> Option<TensorId> {
        self.adjoint.get(tensor.index()).copied().flatten()
    }

    pub fn parameter_gradient(&self, target: TensorId) -> Option<TensorId> {
        match self.graph.tensor(target).role {
            Role::Parameter(id) => self.graph.parameters[id.index()].gradient,
            _ => None,
        }
    }

    /// Returns the gradients of two trained parameters; `None` if one is not a parameter, or both
    /// are the same.
    pub fn both_gradients(&self, targets: [TensorId; 2]) -> Option<[TensorId; 2]> {
        if targets.iter().any(|target| !self.requires_grad[target.index()]) {
            return None;
        }
        let first = self.parameter_gradient(targets[0])?;
        let second = self.parameter_gradient(targets[1])?;
        if targets[0] == targets[1] { None } else { Some([first, second]) }
    }

    /// Returns the pass of a gradient: W for parameters, B for all other tensors.
    pub fn phase_towards(&self, target: TensorId) -> PassKind {
        match self.graph.tensor(target).role {
            Role::Parameter(_) => PassKind::BackwardWeight,
            _ => PassKind::BackwardInput,
        }
    }

    /// Returns the first pass of the gradients of those targets that have one; `None` without any.
    pub fn first_phase_towards(&self, targets: &[TensorId]) -> Option<PassKind> {
        let wanted = targets.iter().filter(|target| self.requires_grad[target.index()]);
        wanted.map(|target| self.phase_towards(*target)).min()
    }

    fn rank(&self, tensor: TensorId) -> usize {
        self.graph.tensor(tensor).shape.rank()
    }

    pub fn apply(
        &mut self,
        op: Op,
        inputs: &[TensorId],
        phase: PassKind,
    ) -> Result<TensorId, ShapeError> {
        Ok(self.apply_all(op, inputs, phase)?[0])
    }

    /// Adds an op and returns all its outputs.
    pub fn apply_all(
        &mut self,
        op: Op,
        inputs: &[TensorId],
        phase: PassKind,
    ) -> Result<Vec<TensorId>, ShapeError> {
        let scope = self.scope_of(inputs[0]);
        let outputs = self.graph.apply(op, inputs, phase, &scope)?;
        self.requires_grad.resize(self.graph.tensors.len(), false);
        Ok(outputs)
    }

    /// Returns the part of a tensor's name before the last dot; empty without one.
    pub fn scope_of(&self, tensor: TensorId) -> String {
        match self.graph.tensor(tensor).name.rsplit_once('.') {
            Some((scope, _)) => scope.to_string(),
            None => String::new(),
        }
    }

    pub fn alias(&mut self, tensor: TensorId, shape: Shape, phase: PassKind) -> TensorId {
        let alias = self.graph.add_reshape(tensor, shape, phase);
        self.requires_grad.push(false);
        alias
    }

    /// Adds the result of `op` to the gradient of `target`: in place if `target` is a parameter
    /// and the op can accumulate, otherwise by a separate tensor.
    pub fn accumulate_op(
        &mut self,
        target: TensorId,
        op: Op,
        inputs: &[TensorId],
    ) -> Result<(), ShapeError> {
        if !self.requires_grad[target.index()] {
            return Ok(());
        }
        let gradient = self.parameter_gradient(target);
        match gradient {
            Some(gradient) if op.accumulates().any() => {
                let accumulate = Accumulation::all(1);
                self.graph.push_node(
                    op,
                    inputs,
                    vec![gradient],
                    accumulate,
                    PassKind::BackwardWeight,
                );
            }
            _ => {
                let phase = self.phase_towards(target);
                let contribution = self.apply(op, inputs, phase)?;
                self.accumulate_tensor(target, contribution);
            }
        }
        Ok(())
    }

    /// Adds the two results of an op to the gradients of two tensors: in place if both are
    /// parameters, otherwise by separate tensors.
    pub fn accumulate_pair(
        &mut self,
        targets: [TensorId; 2],
        op: Op,
        inputs: &[TensorId],
    ) -> Result<(), ShapeError> {
        if let Some(gradients) = self.both_gradients(targets) {
            self.graph.push_node(
                op,
                inputs,
                gradients.to_vec(),
                Accumulation::all(2),
                PassKind::BackwardWeight,
            );
            return Ok(());
        }
        let Some(phase) = self.first_phase_towards(&targets) else { return Ok(()) };
        let contributions = self.apply_all(op, inputs, phase)?;
        for (target, contribution) in targets.into_iter().zip(contributions) {
            self.accumulate_tensor(target, contribution);
        }
        Ok(())
    }

    /// Adds an existing tensor to the gradient of `target`.
    pub fn accumulate_tensor(&mut self, target: TensorId, contribution: TensorId) {
        if !self.requires_grad[target.index()] {
            return;
        }
        if let Some(gradient) = self.parameter_gradient(target) {
            let copy = Op::Unary(Unary::Scale(1.0));
            self.graph.push_node(
                copy,
                &[contribution],
                vec![gradient],
                Accumulation::all(1),
                PassKind::BackwardWeight,
            );
            return;
        }
        let sum = match self.adjoint[target.index()] {
            None => contribution,
            Some(so_far) => {
                let add = Op::Binary(Binary::Add);
                let sum = self.apply(add, &[so_far, contribution], PassKind::BackwardInput);
                // Both have the shape of `target`.
                sum.unwrap_or_else(|error| panic!("contributions differ in shape: {error}"))
            }
        };
        self.adjoint[target.index()] = Some(sum);
    }

    /// Adds to the gradient of a tensor that was broadcast over leading axes the sum of `dy` over
    /// these axes.
    pub fn accumulate_reduced(&mut self, target: TensorId, dy: TensorId) -> Result<(), ShapeError> {
        let axes = self.rank(dy) - self.rank(target);
        if axes == 0 {
            self.accumulate_tensor(target, dy);
            return Ok(());
        }
        self.accumulate_op(target, Op::Sum { first: 0, last: axes - 1 }, &[dy])
    }

    /// Subtracts from the gradient of a tensor that was broadcast over leading axes the sum of `dy`
    /// over these axes.
    pub fn accumulate_negated(&mut self, target: TensorId, dy: TensorId) -> Result<(), ShapeError> {
        if !self.requires_grad[target.index()] {
            return Ok(());
        }
        let sum = self.reduced(target, dy, self.phase_towards(target))?;
        self.accumulate_op(target, Op::Unary(Unary::Scale(-1.0)), &[sum])
    }

    /// Returns the sum of `dy` over the leading axes over which `target` was broadcast.
    pub fn reduced(
        &mut self,
        target: TensorId,
        dy: TensorId,
        phase: PassKind,
    ) -> Result<TensorId, ShapeError> {
        let axes = self.rank(dy) - self.rank(target);
        if axes == 0 {
            return Ok(dy);
        }
        self.apply(Op::Sum { first: 0, last: axes - 1 }, &[dy], phase)
    }
}

/// Returns true if a gradient flows through the op to an input.
fn has_slope(op: &Op, input: usize) -> bool {
    match op {
        Op::Unary(function) => function.slope() == Slope::Sloped,
        Op::Binary(function) => {
            let by = if input == 0 { BinarySide::First } else { BinarySide::Second };
            function.slope(by) == Slope::Sloped
        }
        Op::Gather { .. } => input == 0,
        Op::ScatterAdd { .. } => input == 1,
        _ => true,
    }
}

/// Returns true if a small difference of an input may change the results of a node altogether: an
/// argument of a function with steps, a condition, an index.
pub(crate) fn jumps(node: &Node, input: usize) -> bool {
    let of_op = |op: &Op, input| !has_slope(op, input) && *op != Op::Unary(Unary::Detach);
    let Op::Fused { root, epilogue } = &node.op else { return of_op(&node.op, input) };
    let steps: Vec<&EpilogueOp> = epilogue.iter().filter(|step| step.has_operand()).collect();
    let of_root = node.inputs.len() - steps.len();
    if input < of_root {
        return of_op(root, input);
    }
    // The operand of a step is the second side of its function.
    match steps[input - of_root] {
        EpilogueOp::Binary(function) => of_op(&Op::Binary(*function), 1),
        _ => false,
    }
}

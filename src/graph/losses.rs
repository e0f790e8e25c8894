//! Losses of each element or row, with the definitions of PyTorch's `torch.nn.functional` for
//! `reduction="none"`: for the terms of [`Builder::loss`], or any other use. Also the cross-entropy
//! with class weights as the loss of a graph.

use super::builder::BuildResult;
use super::elements::{Binary, Unary};
use super::loss_terms::LossTerm;
use super::op::{LossClasses, Op};
use super::shapes::ShapeError;
use super::{Builder, Graph, Node, PassKind, Role};
use potluck_core::TensorId;

/// Options of a cross-entropy.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CrossEntropyOptions {
    /// Factor of the loss of a row, by the class of its target; empty: 1.
    pub weights: Vec<f32>,
    /// Label smoothing, from 0 to 1 (Szegedy et al. 2016): the part of the probability of a target
    /// that is divided evenly among all classes.
    pub smoothing: f32,
    /// Class whose rows are ignored: padding. Rows of
    /// [`IGNORE_INDEX`](super::op::IGNORE_INDEX) always are.
    pub ignored: Option<u32>,
}

struct ClassWeights {
    of_class: Vec<f32>,
    /// Weight of a row, by its target: 0 for the ignored class.
    of_row: Vec<f32>,
    /// 1 for a row that counts, by its target, and 0 for the ignored class.
    counted: Vec<f32>,
}

/// Parts of a cross-entropy by row.
struct RowLosses {
    /// Weighted losses `(n)`.
    losses: TensorId,
    /// Weights of the rows `(n)`; 0 where the target is ignored.
    weights: TensorId,
}

impl Builder {
    /// Computes the cross-entropy of each row of `logits (.., v)` and its integer target
    /// `(..)`: PyTorch's `cross_entropy(weight=, label_smoothing=, ignore_index=,
    /// reduction="none")`, in the shape of the targets, and 0 where the target is ignored. A mean
    /// of it, as by [`LossTerm::mean`](super::LossTerm::mean), is over all rows, whereas the mean
    /// of [`Builder::cross_entropy_loss_with`] is weighted and leaves ignored rows out. Classes are
    /// the last axis.
    ///
    /// # Errors
    /// Returns [`ShapeError`] if there is not one target per row, or not one weight per class.
    pub fn cross_entropy(
        &mut self,
        logits: TensorId,
        targets: TensorId,
        options: &CrossEntropyOptions,
    ) -> BuildResult {
        let dims = self.shape(targets).dims().to_vec();
        let RowLosses { losses, .. } =
            self.row_losses("cross_entropy", logits, targets, options)?;
        self.reshape(losses, &dims)
    }

    /// Makes a cross-entropy the loss of the graph: the sum of the losses of the rows, weighted by
    /// class, divided by the sum of the weights, without ignored rows, as PyTorch's
    /// `cross_entropy(weight=, ..)`.
    ///
    /// # Errors
    /// Returns [`ShapeError`] if the graph has a loss already, and the errors of
    /// [`Builder::cross_entropy`].
    pub fn cross_entropy_loss_with(
        &mut self,
        logits: TensorId,
        targets: TensorId,
        options: &CrossEntropyOptions,
    ) -> BuildResult {
        let name = "cross_entropy_loss_with";
        self.require_no_loss(name, [logits, targets])?;
        self.require_targets_of_samples(name, [logits, targets])?;
        if options.weights.is_empty() && options.ignored.is_none() {
            return self.smoothed_cross_entropy_loss(logits, targets, options.smoothing);
        }
        let RowLosses { losses, weights } = self.row_losses(name, logits, targets, options)?;
        let rows = self.shape(losses).dims()[0];
        let [losses, weights] =
            [self.reshape(losses, &[rows, 1])?, self.reshape(weights, &[rows, 1])?];
        let parts = self.concat(&[losses, weights], 1)?;
        Ok(self.add_loss(parts))
    }

    /// Computes the negative log likelihood `-x[target]` of each row of logarithms of probabilities
    /// `x (.., v)`, by the weight of its class: PyTorch's `nll_loss(weight=, ignore_index=,
    /// reduction="none")`, in the shape of the targets, with classes last. The label smoothing of
    /// the options has no effect, and only targets of the ignored class are ignored.
    ///
    /// # Errors
    /// Returns the errors of [`Builder::cross_entropy`].
    pub fn negative_log_likelihood(
        &mut self,
        x: TensorId,
        targets: TensorId,
        options: &CrossEntropyOptions,
    ) -> BuildResult {
        let op = "negative_log_likelihood";
        let dims = self.shape(targets).dims().to_vec();
        let [x, targets] = self.rows_of_classes(op, x, targets)?;
        let of_class = self.class_weights(op, [x, targets], options)?;
        let rows = self.shape(targets).dims()[0];
        let places = self.reshape(targets, &[rows, 1])?;
        let found = self.gather(x, 1, places)?;
        let found = self.reshape(found, &[rows])?;
        let weights = self.by_target("weights", targets, of_class.of_row)?;
        let weighted = self.mul(found, weights)?;
        let mut losses = self.scale(weighted, -1.0)?;
        if options.ignored.is_some() {
            losses = self.counted_alone(losses, targets, of_class.counted)?;
        }
        self.reshape(losses, &dims)
    }

    /// Checks the options of a loss of rows `(n, v)` and targets `(n)`, and returns the weights.
    fn class_weights(
        &self,
        op: &str,
        [logits, targets]: [TensorId; 2],
        options: &CrossEntropyOptions,
    ) -> Result<ClassWeights, ShapeError> {
        let CrossEntropyOptions { weights, smoothing, ignored } = options;
        let classes = self.shape(logits).last();
        let are_valid = weights.iter().all(|weight| weight.is_finite() && *weight >= 0.0);
        if !weights.is_empty() && (weights.len() != classes || !are_valid) {
            let why = format!(
                "wants a weight of 0 or more for each of the {classes} classes, and {} are given",
                weights.len()
            );
            return Err(self.refused(op, &[logits, targets], why));
        }
        if !(0.0..=1.0).contains(smoothing) {
            let why = format!("the label smoothing must be from 0 to 1, and is {smoothing}");
            return Err(self.refused(op, &[logits, targets], why));
        }
        if ignored.is_some_and(|class| class as usize >= classes) {
            let why = format!("the ignored class must be one of {classes}; leave it out for none");
            return Err(self.refused(op, &[logits, targets], why));
        }
        let of_class = if weights.is_empty() { vec![1.0; classes] } else { weights.clone() };
        let (mut of_row, mut counted) = (of_class.clone(), vec![1.0; classes]);
        if let Some(class) = ignored {
            of_row[*class as usize] = 0.0;
            counted[*class as usize] = 0.0;
        }
        Ok(ClassWeights { of_class, of_row, counted })
    }

    /// Computes the weighted loss of each row of logits.
    fn row_losses(
        &mut self,
        op: &str,
        logits: TensorId,
        targets: TensorId,
        options: &CrossEntropyOptions,
    ) -> Result<RowLosses, ShapeError> {
        let CrossEntropyOptions { weights, smoothing, ignored } = options;
        let [logits, targets] = self.rows_of_classes(op, logits, targets)?;
        let ClassWeights { of_class, of_row, counted } =
            self.class_weights(op, [logits, targets], options)?;
        let [rows, classes] = *self.shape(logits).dims() else {
            return Err(self.refused(op, &[logits], "wants logits (.., v)".into()));
        };
        let is_even = weights.is_empty();
        let of_rows = self.by_target("weights", targets, of_row)?;
        // With weights, the smoothed part is weighted by class, and added below.
        let hard = if is_even { *smoothing } else { 0.0 };
        let op = Op::CrossEntropy(LossClasses { smoothing: hard, ..LossClasses::whole(classes) });
        let parts = self.apply(op, &[logits, targets])?;
        let column = self.slice(parts, 1, 0, 1)?;
        let column = self.reshape(column, &[rows])?;
        let mut losses = self.mul(column, of_rows)?;
        let is_smoothed_by_class = !is_even && *smoothing > 0.0;
        if is_smoothed_by_class {
            let name = self.free_state_name("cross_entropy.classes");
            let of_class = self.constant(&name, &[classes], of_class)?;
            let logarithms = self.log_softmax(logits)?;
            let weighted = self.mul(logarithms, of_class)?;
            let weighted = self.sum(weighted, &[1])?;
            let even = self.scale(weighted, -smoothing / classes as f32)?;
            let kept = self.scale(losses, 1.0 - smoothing)?;
            losses = self.add(kept, even)?;
        }
        // The smoothed part knows no targets, so not those that are no class either.
        if is_smoothed_by_class || ignored.is_some() {
            losses = self.counted_alone(losses, targets, counted)?;
        }
        Ok(RowLosses { losses, weights: of_rows })
    }

    /// Returns the losses `(n)` with 0 where the target does not count, whatever the loss is: an
    /// infinite one times a weight of 0 would be NaN.
    fn counted_alone(
        &mut self,
        losses: TensorId,
        targets: TensorId,
        counted: Vec<f32>,
    ) -> BuildResult {
        let counted = self.by_target("counted", targets, counted)?;
        self.binary(Binary::Keep, losses, counted)
    }

    /// Returns a value for each target `(n)`, by its class; 0 for a target that is not a class.
    fn by_target(&mut self, what: &str, targets: TensorId, values: Vec<f32>) -> BuildResult {
        let name = self.free_state_name(&format!("cross_entropy.{what}"));
        let classes = values.len();
        let table = self.constant(&name, &[classes, 1], values)?;
        let rows = self.shape(targets).dims().to_vec();
        let found = self.embedding(targets, table)?;
        self.reshape(found, &rows)
    }

    /// Returns an unused name for a state, with `wanted` as its prefix.
    fn free_state_name(&self, wanted: &str) -> String {
        let mut name = wanted.to_string();
        let mut number = 1;
        while self.state_of(&name).is_some() {
            number += 1;
            name = format!("{wanted}.{number}");
        }
        name
    }

    /// Computes `(x - target)^2`, elementwise: PyTorch's `mse_loss`.
    ///
    /// # Errors
    /// Returns [`ShapeError`] if the shapes have unlike axes.
    pub fn squared_error(&mut self, x: TensorId, target: TensorId) -> BuildResult {
        let apart = self.sub(x, target)?;
        self.unary(apart, Unary::Square)
    }

    /// Computes `|x - target|`, elementwise: PyTorch's `l1_loss`.
    ///
    /// # Errors
    /// Returns [`ShapeError`] if the shapes have unlike axes.
    pub fn absolute_error(&mut self, x: TensorId, target: TensorId) -> BuildResult {
        let apart = self.sub(x, target)?;
        self.unary(apart, Unary::Abs)
    }

    /// Computes `d^2 / 2` of the difference `d = x - target` where `|d| < delta`, else
    /// `delta (|d| - delta / 2)`, elementwise (Huber 1964): PyTorch's `huber_loss`. Divided by
    /// `delta`, it is PyTorch's `smooth_l1_loss(beta=delta)`.
    ///
    /// # Errors
    /// Returns [`ShapeError`] if the shapes have unlike axes, or `delta` is not positive.
    pub fn huber(&mut self, x: TensorId, target: TensorId, delta: f32) -> BuildResult {
        if !(delta.is_finite() && delta > 0.0) {
            let why = format!("delta must be a positive number, and is {delta}");
            return Err(self.refused("huber", &[x, target], why));
        }
        let apart = self.sub(x, target)?;
        // With c the difference, clamped: c (d - c / 2).
        let clamped = self.unary(apart, Unary::Clamp(-delta, delta))?;
        let half = self.scale(clamped, 0.5)?;
        let rest = self.sub(apart, half)?;
        self.mul(clamped, rest)
    }

    /// Computes the binary cross-entropy `softplus(x) - x target` of logits `x` and probabilities
    /// `target`, elementwise: PyTorch's `binary_cross_entropy_with_logits`.
    ///
    /// # Errors
    /// Returns [`ShapeError`] if the shapes have unlike axes.
    pub fn binary_cross_entropy(&mut self, x: TensorId, target: TensorId) -> BuildResult {
        let total = self.unary(x, Unary::Softplus)?;
        let agreed = self.mul(x, target)?;
        self.sub(total, agreed)
    }

    /// Computes `p (ln p - x)`, elementwise, of logarithms of probabilities `x` and probabilities
    /// `target` = p; 0 where p is 0 and `x` finite: PyTorch's `kl_div`, whose sum over an axis is
    /// the divergence of Kullback and Leibler (1951).
    ///
    /// # Errors
    /// Returns [`ShapeError`] if the shapes have unlike axes.
    pub fn kl_divergence(&mut self, x: TensorId, target: TensorId) -> BuildResult {
        // 0 ln 0 is 0 here; without the clamp it would be NaN.
        let kept = self.unary(target, Unary::Clamp(f32::MIN_POSITIVE, f32::MAX))?;
        let logarithm = self.log(kept)?;
        let apart = self.sub(logarithm, x)?;
        self.mul(target, apart)
    }

    /// Computes `ln(softmax(x))` over the last dimension: PyTorch's `log_softmax`.
    ///
    /// # Errors
    /// Returns [`ShapeError`] if `x` has no dimension, or only the batch.
    pub fn log_softmax(&mut self, x: TensorId) -> BuildResult {
        let last = self.shape(x).rank().saturating_sub(1);
        let total = self.logsumexp(x, &[last])?;
        let kept = self.unsqueeze(total, &[last])?;
        self.binary(Binary::Sub, x, kept)
    }
}

/// Loss that replaces the mean squared error.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ValueLoss {
    /// Mean of [`Builder::squared_error`].
    Squared,
    /// Mean of [`Builder::absolute_error`].
    Absolute,
    /// Mean of [`Builder::huber`].
    Huber {
        /// Largest difference with a squared error.
        delta: f32,
    },
}

impl Graph {
    /// Returns true if the loss is the squared error of values.
    pub fn is_loss_of_values(&self) -> bool {
        self.loss_parts().is_some_and(|at| self.nodes[at].op == Op::SquaredError)
    }

    /// Returns a forward graph, whose loss is the squared error, with another loss of values.
    ///
    /// # Errors
    /// Returns [`ShapeError`] if the loss is not the squared error.
    pub fn with_value_loss(self, loss: ValueLoss) -> Result<Self, ShapeError> {
        if loss == ValueLoss::Squared && self.is_loss_of_values() {
            return Ok(self);
        }
        let (mut b, parts) = self.without_loss(|op| *op == Op::SquaredError)?;
        let x = parts.inputs[0];
        let target = parts.inputs[1];
        let errors = match loss {
            ValueLoss::Squared => b.squared_error(x, target)?,
            ValueLoss::Absolute => b.absolute_error(x, target)?,
            ValueLoss::Huber { delta } => b.huber(x, target, delta)?,
        };
        b.loss(&[LossTerm::mean("loss", errors)])?;
        Ok(b.finish())
    }

    /// Returns a forward graph, whose loss is a cross-entropy of logits, with weights of the
    /// classes.
    ///
    /// # Errors
    /// Returns [`ShapeError`] if the graph has a different loss, or if there is not one weight per
    /// class.
    pub fn with_class_weights(self, options: &CrossEntropyOptions) -> Result<Self, ShapeError> {
        let (mut b, parts) = self.without_loss(|op| matches!(op, Op::CrossEntropy(_)))?;
        b.cross_entropy_loss_with(parts.inputs[0], parts.inputs[1], options)?;
        Ok(b.finish())
    }

    /// Returns a builder with the graph without its loss, and the node that computed the parts of
    /// the loss.
    fn without_loss(
        mut self,
        is_known: impl Fn(&Op) -> bool,
    ) -> Result<(Builder, Node), ShapeError> {
        let parts = self.loss_parts().filter(|at| is_known(&self.nodes[*at].op));
        let (Some(parts), Some(loss)) = (parts, self.loss) else {
            let inputs = format!("a graph of {} nodes", self.nodes.len());
            let why = "its loss is another one".into();
            return Err(ShapeError { op: "a loss in place of the graph's".into(), inputs, why });
        };
        let parts = self.nodes.remove(parts);
        self.nodes.retain(|node| !node.outputs.contains(&loss));
        self.tensors[loss.index()].role = Role::Activation;
        self.loss = None;
        Ok((Builder::resume(self, PassKind::Forward, ""), parts))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_batch_is_no_axis_of_classes() {
        let mut b = Builder::new();
        let (logits, targets) = (b.input("logits", &[1]), b.input_ids("targets", &[1]));
        let weight = b.parameter("weight", &[3, 1], crate::Init::Zeros);
        let options = CrossEntropyOptions::default();
        for error in [
            b.cross_entropy_loss(logits, targets).unwrap_err(),
            b.cross_entropy(logits, targets, &options).unwrap_err(),
            b.linear_cross_entropy_loss(logits, weight, targets, 4).unwrap_err(),
        ] {
            assert!(error.to_string().contains("an axis of its own, besides the batch"), "{error}");
        }
    }

    #[test]
    fn options_that_do_not_fit_the_classes_are_refused() {
        let mut b = Builder::new();
        let (logits, targets) = (b.input("logits", &[1, 3]), b.input_ids("targets", &[1]));
        let mut refused = |options: CrossEntropyOptions| {
            b.cross_entropy(logits, targets, &options).unwrap_err().to_string()
        };
        let weights = |weights: &[f32]| CrossEntropyOptions {
            weights: weights.to_vec(),
            ..CrossEntropyOptions::default()
        };
        let error = refused(weights(&[1.0, 2.0]));
        assert!(error.contains("for each of the 3 classes, and 2 are given"), "{error}");
        assert!(refused(weights(&[1.0, -2.0, 1.0])).contains("of 0 or more"));
        let ignored = CrossEntropyOptions { ignored: Some(3), ..CrossEntropyOptions::default() };
        assert!(refused(ignored).contains("must be one of 3"));
        let smoothing = CrossEntropyOptions { smoothing: -0.1, ..weights(&[1.0; 3]) };
        assert!(refused(smoothing).contains("must be from 0 to 1, and is -0.1"));
        let error = b.huber(logits, logits, 0.0).unwrap_err().to_string();
        assert!(error.contains("delta must be a positive number, and is 0"), "{error}");
    }
}

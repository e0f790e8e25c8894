//! Losses of one's own: any tensor of the batch, and sums of several.

use super::Builder;
use super::builder::BuildResult;
use super::op::Op;
use potluck_core::TensorId;

/// Reduction of the elements of a sample, before the mean over the samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LossReduction {
    /// Their mean: that over all elements, as PyTorch's `reduction="mean"`.
    Mean,
    /// Their sum, as PyTorch's `reduction="batchmean"` of the divergence of Kullback and Leibler.
    Sum,
}

/// Term of a loss of one's own.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossTerm {
    /// Batched tensor of any shape, such as the squares of errors.
    pub value: TensorId,
    pub reduction: LossReduction,
    /// Factor of the term.
    pub weight: f32,
}

impl LossTerm {
    /// Creates the term of a mean over all elements, with weight 1.
    pub fn mean(value: TensorId) -> Self {
        Self { value, reduction: LossReduction::Mean, weight: 1.0 }
    }

    /// Creates the term of a sum over the elements of a sample, with weight 1.
    pub fn sum(value: TensorId) -> Self {
        Self { value, reduction: LossReduction::Sum, weight: 1.0 }
    }

    /// Returns the term with this weight.
    pub fn weighted(self, weight: f32) -> Self {
        Self { weight, ..self }
    }
}

impl Builder {
    /// Makes the sum of terms the loss of the graph: its mean over the samples. It is counted in
    /// samples, so that micro-batches and uneven shares add up exactly. Returns the loss of each
    /// sample, `(b)`.
    ///
    /// # Errors
    /// Returns [`super::ShapeError`] if there is no term, if the graph has a loss already, or if a
    /// term is not batched.
    pub fn own_loss(&mut self, terms: &[LossTerm]) -> BuildResult {
        let Some(first) = terms.first() else {
            return Err(self.refused("own_loss", &[], "needs a term".into()));
        };
        self.require_no_loss("own_loss", [first.value; 2])?;
        let mut losses = self.loss_of_samples(first)?;
        for term in &terms[1..] {
            let more = self.loss_of_samples(term)?;
            losses = self.add(losses, more)?;
        }
        let one = self.shared_constant("loss.one", &[1], vec![1.0]);
        let ones = self.apply(Op::Broadcast { first: 0, dims: vec![1], batched: true }, &[one])?;
        let column = self.reshape(losses, &[1, 1])?;
        let parts = self.concat(&[column, ones], 1)?;
        self.add_loss(parts);
        Ok(losses)
    }

    /// Returns the loss `(b)` of each sample.
    fn loss_of_samples(&mut self, term: &LossTerm) -> BuildResult {
        let shape = self.shape(term.value).clone();
        if !shape.is_batched() {
            let why = "a loss has elements for each sample; give a batched tensor".into();
            return Err(self.refused("own_loss", &[term.value], why));
        }
        let elements = shape.per_row();
        let rows = self.reshape(term.value, &[1, elements])?;
        let sums = self.sum(rows, &[1])?;
        let factor = match term.reduction {
            LossReduction::Mean => term.weight / elements as f32,
            LossReduction::Sum => term.weight,
        };
        self.scale(sums, factor)
    }
}

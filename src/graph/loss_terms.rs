//! Losses made of terms: any tensors of the batch, which add up and are reported by name.

use super::builder::BuildResult;
use super::op::Op;
use super::{Builder, Graph};
use potluck_core::TensorId;

/// Largest number of terms of a loss.
const TERMS_MAX: usize = 7;

/// Reduction of the elements of a sample, before the mean over the samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LossReduction {
    /// Their mean: that over all elements, as PyTorch's `reduction="mean"`.
    Mean,
    /// Their sum, as PyTorch's `reduction="batchmean"` of the divergence of Kullback and Leibler.
    Sum,
}

/// Term of a loss.
#[derive(Clone, Debug, PartialEq)]
pub struct LossTerm {
    /// Name under which the term is reported beside the loss, if that has several.
    pub name: String,
    /// Batched tensor of any shape, such as the squares of errors.
    pub value: TensorId,
    pub reduction: LossReduction,
    /// Factor of the term in the loss; the term is reported without it.
    pub weight: f32,
}

impl LossTerm {
    /// Creates the term of a mean over all elements, with weight 1.
    pub fn mean(name: impl Into<String>, value: TensorId) -> Self {
        Self { name: name.into(), value, reduction: LossReduction::Mean, weight: 1.0 }
    }

    /// Creates the term of a sum over the elements of a sample, with weight 1.
    pub fn sum(name: impl Into<String>, value: TensorId) -> Self {
        Self { reduction: LossReduction::Sum, ..Self::mean(name, value) }
    }

    /// Returns the term with this weight.
    #[must_use]
    pub fn weighted(self, weight: f32) -> Self {
        Self { weight, ..self }
    }
}

impl Builder {
    /// Makes the weighted sum of terms the loss of the graph: its mean over the samples. It is
    /// counted in samples, so that micro-batches and uneven shares add up exactly. Of several
    /// terms, each is reported by its name. Returns the loss of each sample, `(b)`.
    ///
    /// # Errors
    /// Returns [`super::ShapeError`] if there is no term, if there are more than 7 or two of one
    /// name, if the graph has a loss already, or if a term is not batched.
    pub fn loss(&mut self, terms: &[LossTerm]) -> BuildResult {
        let Some(first) = terms.first() else {
            return Err(self.refused("loss", &[], "needs a term".into()));
        };
        self.require_no_loss("loss", [first.value; 2])?;
        let names: Vec<String> = terms.iter().map(|term| term.name.clone()).collect();
        let is_named = names.iter().all(|name| !name.is_empty());
        let is_unique = names.iter().enumerate().all(|(at, name)| !names[..at].contains(name));
        if terms.len() > TERMS_MAX || !is_named || !is_unique {
            let why = format!(
                "a loss has at most {TERMS_MAX} terms with names of their own, and these are {}",
                names.join(", ")
            );
            return Err(self.refused("loss", &[first.value], why));
        }
        let mut of_terms = Vec::with_capacity(terms.len());
        for term in terms {
            of_terms.push(self.loss_of_samples(term)?);
        }
        let mut losses = self.scale_by(of_terms[0], first.weight)?;
        for (value, term) in of_terms[1..].iter().zip(&terms[1..]) {
            let weighted = self.scale_by(*value, term.weight)?;
            losses = self.add(losses, weighted)?;
        }
        let one = self.shared_constant("loss.one", &[1], vec![1.0]);
        let ones = self.apply(Op::Broadcast { first: 0, dims: vec![1], batched: true }, &[one])?;
        let mut columns = vec![self.reshape(losses, &[1, 1])?, ones];
        if terms.len() > 1 {
            let mut reported = Vec::with_capacity(terms.len());
            for value in of_terms {
                let value = self.stop_gradient(value)?;
                reported.push(self.reshape(value, &[1, 1])?);
            }
            columns.push(self.concat(&reported, 1)?);
            self.name_loss_terms(names);
        }
        let parts = self.concat(&columns, 1)?;
        self.add_loss(parts);
        Ok(losses)
    }

    fn scale_by(&mut self, x: TensorId, factor: f32) -> BuildResult {
        if factor == 1.0 { Ok(x) } else { self.scale(x, factor) }
    }

    /// Value `(b)` of a term for each sample, without its weight.
    fn loss_of_samples(&mut self, term: &LossTerm) -> BuildResult {
        let shape = self.shape(term.value).clone();
        if !shape.is_batched() {
            let why = format!(
                "the term {} has no elements of its own for each sample; give a batched tensor",
                term.name
            );
            return Err(self.refused("loss", &[term.value], why));
        }
        // One sample may have several rows of the leading dimension.
        let elements = shape.per_row();
        let rows = self.reshape(term.value, &[1, elements])?;
        let sums = self.sum(rows, &[1])?;
        let factor = match term.reduction {
            LossReduction::Mean => 1.0 / elements as f32,
            LossReduction::Sum => 1.0,
        };
        self.scale_by(sums, factor)
    }
}

impl Graph {
    /// Returns the number of values of the loss's accumulator: its sum, its count, and one value
    /// per term.
    pub fn loss_length(&self) -> usize {
        2 + self.loss_terms.len()
    }

    /// Number of the first node that writes a tensor.
    fn writer(&self, id: TensorId) -> Option<usize> {
        self.nodes.iter().position(|node| node.outputs.contains(&id))
    }

    /// Number of the node whose parts the loss sums up.
    pub(super) fn loss_parts(&self) -> Option<usize> {
        let sum = self.writer(self.loss?)?;
        self.writer(self.nodes[sum].inputs[0])
    }

    /// Returns the losses of the samples, if the loss is their sum and counts samples.
    pub fn losses_of_samples(&self) -> Option<TensorId> {
        let parts = &self.nodes[self.loss_parts()?];
        let Op::Concat { .. } = parts.op else { return None };
        let [losses, ones, ..] = parts.inputs[..] else { return None };
        // The counts of samples are a repeated one.
        match self.nodes[self.writer(ones)?].op {
            Op::Broadcast { .. } => Some(losses),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terms_without_names_of_their_own_are_refused() {
        let mut b = Builder::new();
        let x = b.input("x", &[1, 3]);
        let fixed = b.constant("fixed", &[3], vec![1.0; 3]).unwrap();
        let mut refused = |terms: &[LossTerm]| b.loss(terms).unwrap_err().to_string();
        assert!(refused(&[]).contains("needs a term"));
        let twice = refused(&[LossTerm::mean("a", x), LossTerm::sum("a", x)]);
        assert!(twice.contains("names of their own, and these are a, a"), "{twice}");
        let error = refused(&[LossTerm::mean("a", fixed)]);
        assert!(error.contains("the term a has no elements of its own for each sample"), "{error}");
        b.loss(&[LossTerm::mean("a", x), LossTerm::sum("b", x).weighted(0.5)]).unwrap();
        let again = b.loss(&[LossTerm::mean("a", x)]).unwrap_err().to_string();
        assert!(again.contains("has a loss already"), "{again}");
        assert_eq!(b.finish().loss_terms, ["a", "b"]);
    }
}

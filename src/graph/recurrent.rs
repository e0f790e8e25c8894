//! The builder's recurrent layers whose time steps are separate nodes, unlike
//! [`Builder::recurrent`], and bidirectional layers.

use super::Builder;
use super::builder::BuildResult;
use super::elements::Unary;
use super::shapes::ShapeError;
use potluck_core::TensorId;

/// Gates of a GRU: reset, update and new.
const GRU_GATES: usize = 3;

/// Sizes and parameters of a layer over sequences `(b, t, in)` whose steps are nodes.
struct UnrolledLayer {
    b: usize,
    t: usize,
    h: usize,
    weight_hh: TensorId,
    bias_hh: TensorId,
}

impl Builder {
    /// Computes a recurrent layer over `x (b, t, in)` with the parameters of PyTorch's `RNN`:
    /// `weight_ih (h, in)`, `weight_hh (h, h)`, and the biases `bias_ih` and `bias_hh (h)`. The
    /// state is `h0 (b, h)`, or zeros without one, and the function `Unary::Tanh` or `Unary::Relu`,
    /// or any other. Returns the hidden values `y (b, t, h)`; [`Builder::last_step`] returns the
    /// last one. Each time step is several nodes: it suits sequences of up to some hundreds of
    /// steps.
    ///
    /// # Errors
    /// Returns [`ShapeError`] if the shapes do not fit.
    pub fn rnn(
        &mut self,
        x: TensorId,
        parameters: [TensorId; 4],
        h0: Option<TensorId>,
        function: Unary,
    ) -> BuildResult {
        let (layer, gates) = self.unrolled("rnn", x, parameters, 1)?;
        let mut hidden = h0;
        let mut steps = Vec::new();
        for step in 0..layer.t {
            let own = self.step_of(&layer, gates, step)?;
            let product = self.hidden_product(&layer, hidden)?;
            let sum = self.add(own, product)?;
            let y = self.unary(sum, function)?;
            hidden = Some(y);
            steps.push(self.reshape(y, &[layer.b, 1, layer.h])?);
        }
        self.concat_all(steps, 1)
    }

    /// Computes a GRU as [`Builder::recurrent`], but with the reset gate before the product: `n =
    /// tanh(W_in x + b_in + W_hn (r h) + b_hn)`, as in Cho et al. 2014 and Keras'
    /// `reset_after=False`. The parameters and their order are PyTorch's, the state is `h0 (b, h)`,
    /// or zeros without one. Returns the hidden values `y (b, t, h)`. Each time step is several
    /// nodes, as in [`Builder::rnn`].
    ///
    /// # Errors
    /// Returns [`ShapeError`] if the shapes do not fit.
    pub fn gru_reset_before(
        &mut self,
        x: TensorId,
        parameters: [TensorId; 4],
        h0: Option<TensorId>,
    ) -> BuildResult {
        let (layer, gates) = self.unrolled("gru_reset_before", x, parameters, GRU_GATES)?;
        let h = layer.h;
        // Rows of the reset and update gates, and of the new values.
        let mut parts = Vec::new();
        for [start, length] in [[0, 2 * h], [2 * h, h]] {
            parts.push(UnrolledLayer {
                weight_hh: self.slice(layer.weight_hh, 0, start, length)?,
                bias_hh: self.slice(layer.bias_hh, 0, start, length)?,
                ..layer
            });
        }
        let mut hidden = h0;
        let mut steps = Vec::new();
        for step in 0..layer.t {
            let own = self.step_of(&layer, gates, step)?;
            let open = self.slice(own, 1, 0, 2 * h)?;
            let product = self.hidden_product(&parts[0], hidden)?;
            let open = self.add(open, product)?;
            let open = self.sigmoid(open)?;
            let [reset, update] = [self.slice(open, 1, 0, h)?, self.slice(open, 1, h, h)?];
            let kept = match hidden {
                Some(hidden) => Some(self.mul(reset, hidden)?),
                None => None,
            };
            let new = self.slice(own, 1, 2 * h, h)?;
            let product = self.hidden_product(&parts[1], kept)?;
            let new = self.add(new, product)?;
            let new = self.tanh(new)?;
            // (1 - z) n + z h
            let apart = match hidden {
                Some(hidden) => self.sub(hidden, new)?,
                None => self.scale(new, -1.0)?,
            };
            let change = self.mul(update, apart)?;
            let y = self.add(new, change)?;
            hidden = Some(y);
            steps.push(self.reshape(y, &[layer.b, 1, h])?);
        }
        self.concat_all(steps, 1)
    }

    /// Computes a layer in both directions over `x (b, t, in)`: of `layer` on the sequences, and on
    /// them from the last step to the first, the hidden values side by side `(b, t, 2h)`, each at
    /// its step, as PyTorch's `bidirectional=True`. The last argument of `layer` is true for the
    /// reversed sequences; each direction has separate parameters.
    ///
    /// # Errors
    /// Returns [`ShapeError`] if `x` has another number of dimensions, and the error of the layer.
    pub fn bidirectional(
        &mut self,
        x: TensorId,
        mut layer: impl FnMut(&mut Self, TensorId, bool) -> BuildResult,
    ) -> BuildResult {
        if self.shape(x).rank() != 3 {
            let why = "sequences are (b, t, in)".into();
            return Err(self.refused("bidirectional", &[x], why));
        }
        let forward = layer(self, x, false)?;
        let reversed = self.flip(x, &[1])?;
        let backward = layer(self, reversed, true)?;
        let backward = self.flip(backward, &[1])?;
        self.concat(&[forward, backward], 2)
    }

    /// Returns a layer with a number of gates, and the product of its inputs for all steps.
    fn unrolled(
        &mut self,
        op: &str,
        x: TensorId,
        parameters: [TensorId; 4],
        gates: usize,
    ) -> Result<(UnrolledLayer, TensorId), ShapeError> {
        let [weight_ih, weight_hh, bias_ih, bias_hh] = parameters;
        let ([b, t, _], [rows, h]) = (self.shape(x).dims(), self.shape(weight_hh).dims()) else {
            let why = "sequences are (b, t, in), and weight_hh (gates h, h)".into();
            return Err(self.refused(op, &[x, weight_hh], why));
        };
        let [b, t, rows, h] = [*b, *t, *rows, *h];
        if rows != gates * h {
            let why = format!("weight_hh of {gates} gates is ({}, {h})", gates * h);
            return Err(self.refused(op, &[x, weight_hh], why));
        }
        let own = self.linear(x, weight_ih, Some(bias_ih))?;
        Ok((UnrolledLayer { b, t, h, weight_hh, bias_hh }, own))
    }

    /// Product of the inputs of a step `(b, gates h)`.
    fn step_of(&mut self, layer: &UnrolledLayer, gates: TensorId, step: usize) -> BuildResult {
        let columns = self.shape(gates).last();
        let own = self.slice(gates, 1, step, 1)?;
        self.reshape(own, &[layer.b, columns])
    }

    /// Product of the hidden values with their weight, plus the bias; `None` are zeros.
    fn hidden_product(&mut self, layer: &UnrolledLayer, hidden: Option<TensorId>) -> BuildResult {
        match hidden {
            Some(hidden) => self.linear(hidden, layer.weight_hh, Some(layer.bias_hh)),
            None => Ok(layer.bias_hh),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Init;

    #[test]
    fn what_does_not_fit_is_said_in_terms_of_the_layer() {
        let mut b = Builder::new();
        let x = b.input("x", &[1, 5, 2]);
        let mut add = |name: &str, dims: &[usize]| b.parameter(name, dims, Init::Zeros);
        let (ih, hh) = (add("ih", &[4, 2]), add("hh", &[4, 4]));
        let parameters = [ih, hh, add("bias_ih", &[4]), add("bias_hh", &[4])];
        let y = b.rnn(x, parameters, None, Unary::Tanh).unwrap();
        assert_eq!(b.shape(y).to_string(), "(b, 5, 4)");
        let error = b.gru_reset_before(x, parameters, None).unwrap_err().to_string();
        assert!(error.ends_with("weight_hh of 3 gates is (12, 4)"), "{error}");
        let flat = b.input("flat", &[1, 2]);
        let error = b.rnn(flat, parameters, None, Unary::Relu).unwrap_err().to_string();
        assert!(error.contains("sequences are (b, t, in)"), "{error}");
        let error = b.bidirectional(flat, |_, x, _| Ok(x)).unwrap_err().to_string();
        assert_eq!(error, "bidirectional of (b, 2): sequences are (b, t, in)");
    }
}

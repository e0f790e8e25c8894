//! The builder's functions of tensors of unlike shapes, by NumPy's rules of broadcasting, and its
//! reductions over any axes, composed of other ops.

use std::sync::Arc;

use super::builder::BuildResult;
use super::elements::{Binary, Unary};
use super::op::Op;
use super::pictures::{PICTURE_SIDE_MAX, Pool2dOptions};
use super::shapes::ShapeError;
use super::{Builder, StateInit};
use potluck_core::{Shape, TensorId};

/// Largest axis of [`Builder::cumsum`], which multiplies by a square matrix of that size.
const CUMULATED_MAX: usize = 4096;

impl Builder {
    /// Computes a function of two tensors, elementwise. Their shapes are broadcast as in NumPy:
    /// aligned at the last axis, and repeated along axes that are missing or have one entry. The
    /// batch is the first axis of the result and is aligned with no other axis.
    ///
    /// # Errors
    /// Returns [`ShapeError`] if the shapes have unlike axes.
    pub fn binary(&mut self, function: Binary, a: TensorId, b: TensorId) -> BuildResult {
        let [first, second] = [a, b].map(|x| self.shape(x).clone());
        if second.is_suffix_of(&first) {
            return self.apply(Op::Binary(function), &[a, b]);
        }
        let joint = joint_shape(&first, &second)
            .map_err(|why| self.refused(function.name(), &[a, b], why))?;
        if function.commutes() && joint == second {
            let row = self.without_leading_ones(a)?;
            if self.shape(row).is_suffix_of(&second) {
                return self.apply(Op::Binary(function), &[b, row]);
            }
        }
        let a = self.repeated(a, &joint)?;
        let mut b = self.without_leading_ones(b)?;
        if !self.shape(b).is_suffix_of(&joint) {
            b = self.repeated(b, &joint)?;
        }
        self.apply(Op::Binary(function), &[a, b])
    }

    /// Repeats `x` until it has these dimensions, by the rules of [`Builder::binary`]; batched if
    /// it is.
    ///
    /// # Errors
    /// Returns [`ShapeError`] if an axis of `x` has neither the wanted size nor one entry.
    pub fn broadcast_to(&mut self, x: TensorId, dims: &[usize]) -> BuildResult {
        let shape = self.shape(x).clone();
        let wanted = shape.with_dims(dims);
        match joint_shape(&shape, &wanted) {
            Ok(joint) if joint == wanted => self.repeated(x, &wanted),
            _ => {
                let why = format!("cannot be repeated to {wanted}");
                Err(self.refused("broadcast_to", &[x], why))
            }
        }
    }

    /// Repeats a tensor to a shape to which its own can be broadcast.
    pub(super) fn repeated(&mut self, x: TensorId, wanted: &Shape) -> BuildResult {
        let shape = self.shape(x).clone();
        if shape == *wanted {
            return Ok(x);
        }
        let absent = wanted.rank() - shape.rank();
        let gains_batch = wanted.is_batched() && !shape.is_batched();
        let mut is_new = vec![false; wanted.rank()];
        let mut own = Vec::new();
        for (axis, &dim) in wanted.dims().iter().enumerate() {
            is_new[axis] =
                axis < absent || shape.dims()[axis - absent] != dim || (axis == 0 && gains_batch);
            if !is_new[axis] {
                own.push(dim);
            }
        }

        let mut y = if own == shape.dims() { x } else { self.reshape(x, &own)? };
        let mut first = 0;
        while first < wanted.rank() {
            let mut after = first;
            while after < wanted.rank() && is_new[after] {
                after += 1;
            }
            if after > first {
                let dims = wanted.dims()[first..after].to_vec();
                let batched = first == 0 && gains_batch;
                y = self.apply(Op::Broadcast { first, dims, batched }, &[y])?;
            }
            first = after + 1;
        }
        Ok(y)
    }

    fn without_leading_ones(&mut self, x: TensorId) -> BuildResult {
        let shape = self.shape(x).clone();
        let ones = shape.dims().iter().take_while(|dim| **dim == 1).count();
        if shape.is_batched() || ones == 0 {
            return Ok(x);
        }
        self.reshape(x, &shape.dims()[ones..])
    }

    /// Returns `a` where `condition` is not 0, and `b` elsewhere, broadcast as by
    /// [`Builder::binary`]. Values that are not selected have no influence, even if they are NaN.
    ///
    /// # Errors
    /// Returns [`ShapeError`] if the shapes have unlike axes.
    pub fn select(&mut self, condition: TensorId, a: TensorId, b: TensorId) -> BuildResult {
        let kept = self.binary(Binary::Keep, a, condition)?;
        let others = self.binary(Binary::Drop, b, condition)?;
        self.add(kept, others)
    }

    /// Computes the smaller of `a` and `b`, elementwise; where they are equal, each has half of the
    /// gradient.
    ///
    /// # Errors
    /// Returns [`ShapeError`] if the shapes have unlike axes.
    pub fn minimum(&mut self, a: TensorId, b: TensorId) -> BuildResult {
        self.binary(Binary::Minimum, a, b)
    }

    /// Computes `a^b`, elementwise: NaN of a negative `a`, unless `b` is a whole number.
    ///
    /// # Errors
    /// Returns [`ShapeError`] if the shapes have unlike axes.
    pub fn pow(&mut self, a: TensorId, b: TensorId) -> BuildResult {
        self.binary(Binary::Pow, a, b)
    }

    /// Returns 1 where `a` and `b` are equal, NaN where one is, and 0 elsewhere, without gradient.
    ///
    /// # Errors
    /// Returns [`ShapeError`] if the shapes have unlike axes.
    pub fn equal(&mut self, a: TensorId, b: TensorId) -> BuildResult {
        self.binary(Binary::Equal, a, b)
    }

    /// Returns 1 where `a < b`, NaN where one is, and 0 elsewhere, without gradient.
    ///
    /// # Errors
    /// Returns [`ShapeError`] if the shapes have unlike axes.
    pub fn less(&mut self, a: TensorId, b: TensorId) -> BuildResult {
        self.binary(Binary::Less, a, b)
    }

    /// Returns 1 where `a <= b`, NaN where one is, and 0 elsewhere, without gradient.
    ///
    /// # Errors
    /// Returns [`ShapeError`] if the shapes have unlike axes.
    pub fn less_equal(&mut self, a: TensorId, b: TensorId) -> BuildResult {
        self.binary(Binary::LessEqual, a, b)
    }

    /// Computes `x + offset`.
    ///
    /// # Errors
    /// Returns [`ShapeError`] if `x` is not of floats.
    pub fn offset(&mut self, x: TensorId, offset: f32) -> BuildResult {
        self.unary(x, Unary::Offset(offset))
    }

    /// Returns the values of `x` without a gradient: PyTorch's `detach`, JAX's
    /// `stop_gradient`.
    ///
    /// # Errors
    /// Returns [`ShapeError`] if `x` is not of floats.
    pub fn stop_gradient(&mut self, x: TensorId) -> BuildResult {
        self.unary(x, Unary::Detach)
    }

    /// Adds a tensor of given values, row by row, that is neither trained nor saved in checkpoints:
    /// a mask, a table. The name is unique among the states.
    ///
    /// # Errors
    /// Returns [`ShapeError`] if there are not as many values as the dimensions have elements.
    ///
    /// # Panics
    /// If another state has the name.
    pub fn constant(&mut self, name: &str, dims: &[usize], values: Vec<f32>) -> BuildResult {
        let elements: usize = dims.iter().product();
        if values.len() != elements || elements == 0 {
            return Err(ShapeError {
                op: format!("constant {name}"),
                inputs: Shape::fixed(dims).to_string(),
                why: format!("has {elements} elements, and {} values are given", values.len()),
            });
        }
        Ok(self.device_state(name, dims, StateInit::Values(Arc::from(values))))
    }

    /// Adds axes of one entry: `axes` are their numbers in the result, as PyTorch's `unsqueeze`.
    /// The result of a reduction over `axes` has them again, as by `keepdim`.
    ///
    /// # Errors
    /// Returns [`ShapeError`] if the result has no such axis, or it is the batch's.
    pub fn unsqueeze(&mut self, x: TensorId, axes: &[usize]) -> BuildResult {
        let shape = self.shape(x).clone();
        let mut dims = shape.dims().to_vec();
        for axis in in_order(axes) {
            if axis > dims.len() || (axis == 0 && shape.is_batched()) {
                let why = format!("the result has no place for an axis {axis}");
                return Err(self.refused("unsqueeze", &[x], why));
            }
            dims.insert(axis, 1);
        }
        self.reshape(x, &dims)
    }

    /// Computes the largest value over any set of axes, which are removed; NaN if any value is NaN.
    /// The gradient goes to the first of equal values.
    ///
    /// # Errors
    /// Returns [`ShapeError`] if there is no such axis, or it is the batch's.
    pub fn max(&mut self, x: TensorId, axes: &[usize]) -> BuildResult {
        let axes = self.reduced_axes("max", x, axes)?;
        let mut y = x;
        for [first, last] in runs_from_the_back(&axes) {
            y = self.largest(y, first, last)?[0];
        }
        Ok(y)
    }

    /// Computes the smallest value over any set of axes, as [`Builder::max`].
    ///
    /// # Errors
    /// Returns [`ShapeError`] if there is no such axis, or it is the batch's.
    pub fn min(&mut self, x: TensorId, axes: &[usize]) -> BuildResult {
        let negated = self.scale(x, -1.0)?;
        let largest = self.max(negated, axes)?;
        self.scale(largest, -1.0)
    }

    /// Returns the index of the largest value along an axis, which is removed: the first of equal
    /// values, as a float, and without gradient.
    ///
    /// # Errors
    /// Returns [`ShapeError`] if there is no such axis, or it is the batch's.
    pub fn argmax(&mut self, x: TensorId, axis: usize) -> BuildResult {
        self.reduced_axes("argmax", x, &[axis])?;
        let place = self.largest(x, axis, axis)?[1];
        self.stop_gradient(place)
    }

    /// Computes `ln(sum(e^x))` over any set of axes, which are removed, without overflow.
    ///
    /// # Errors
    /// Returns [`ShapeError`] if there is no such axis, or it is the batch's.
    pub fn logsumexp(&mut self, x: TensorId, axes: &[usize]) -> BuildResult {
        let largest = self.max(x, axes)?;
        // The result does not depend on the subtrahend.
        let largest = self.stop_gradient(largest)?;
        // Infinity minus infinity would be NaN.
        let largest = self.unary(largest, Unary::Clamp(-f32::MAX, f32::MAX))?;
        let kept = self.unsqueeze(largest, axes)?;
        let below = self.sub(x, kept)?;
        let powers = self.exp(below)?;
        let sum = self.sum(powers, axes)?;
        let logarithm = self.log(sum)?;
        self.add(logarithm, largest)
    }

    /// Computes the variance over any set of axes, which are removed, divided by their elements
    /// less `correction`: 1 for the unbiased one.
    ///
    /// # Errors
    /// Returns [`ShapeError`] if there is no such axis, if it is the batch's, or if it has no more
    /// elements than `correction`.
    pub fn variance(&mut self, x: TensorId, axes: &[usize], correction: usize) -> BuildResult {
        let mean = self.mean(x, axes)?;
        let count = self.shape(x).per_row() / self.shape(mean).per_row();
        if count <= correction {
            let why = format!("{count} elements have no variance with the correction {correction}");
            return Err(self.refused("variance", &[x], why));
        }
        let kept = self.unsqueeze(mean, axes)?;
        let apart = self.sub(x, kept)?;
        let squares = self.unary(apart, Unary::Square)?;
        let sum = self.sum(squares, axes)?;
        self.scale(sum, 1.0 / (count - correction) as f32)
    }

    /// Computes the sums of the entries up to each along an axis, by a product with a matrix of
    /// ones: in mixed precision the entries are rounded like operands of products, and an entry
    /// that is not finite makes all sums along its axis NaN.
    ///
    /// # Errors
    /// Returns [`ShapeError`] if there is no such axis, if it is the batch's, or has more than
    /// 4,096 entries.
    ///
    /// # Panics
    /// If a state has the name of the matrix of ones, `cumsum.N`, and other values.
    pub fn cumsum(&mut self, x: TensorId, axis: usize) -> BuildResult {
        self.reduced_axes("cumsum", x, &[axis])?;
        let length = self.shape(x).dims()[axis];
        if length > CUMULATED_MAX {
            let why = format!("has {length} entries, and at most {CUMULATED_MAX} are summed up");
            return Err(self.refused("cumsum", &[x], why));
        }
        let ones = self.ones_above_diagonal(length);
        self.product_along(x, axis, ones)
    }

    /// Computes the product of the entries along an axis, as rows, with a matrix `(n, m)`; the axis
    /// then has `m` entries.
    pub(super) fn product_along(
        &mut self,
        x: TensorId,
        axis: usize,
        matrix: TensorId,
    ) -> BuildResult {
        let shape = self.shape(x).clone();
        let last = shape.rank() - 1;
        let mut order: Vec<usize> = (0..shape.rank()).collect();
        order.swap(axis, last);
        let moved = if axis == last { x } else { self.permute(x, &order)? };
        let product = if shape.rank() == 1 {
            let row = self.reshape(moved, &[1, shape.last()])?;
            let product = self.matmul(row, matrix, false, false)?;
            self.reshape(product, &[self.shape(product).last()])?
        } else {
            self.matmul(moved, matrix, false, false)?
        };
        if axis == last { Ok(product) } else { self.permute(product, &order) }
    }

    /// Matrix `(n, n)` of ones on the diagonal and above it.
    fn ones_above_diagonal(&mut self, n: usize) -> TensorId {
        let name = format!("cumsum.{n}");
        let values = (0..n * n).map(|at| if at / n <= at % n { 1.0 } else { 0.0 }).collect();
        self.shared_constant(&name, &[n, n], values)
    }

    /// Returns the constant of this name, and creates it if it does not exist.
    ///
    /// # Panics
    /// If a state of this name has other values.
    pub(super) fn shared_constant(
        &mut self,
        name: &str,
        dims: &[usize],
        values: Vec<f32>,
    ) -> TensorId {
        let init = StateInit::Values(Arc::from(values));
        let Some(known) = self.state_of(name) else {
            return self.device_state(name, dims, init);
        };
        let tensor = known.tensor;
        let is_same = known.init == init && self.shape(tensor).dims() == dims;
        assert!(is_same, "a state is called {name}, the name of a constant of the builder's own");
        tensor
    }

    /// The axes in order, each once.
    pub(super) fn reduced_axes(
        &self,
        op: &str,
        x: TensorId,
        axes: &[usize],
    ) -> Result<Vec<usize>, ShapeError> {
        let shape = self.shape(x);
        let axes = in_order(axes);
        let why = if axes.iter().any(|axis| *axis >= shape.rank()) {
            "has no such axis"
        } else if shape.is_batched() && axes.contains(&0) {
            "the batch has no fixed size"
        } else {
            return Ok(axes);
        };
        Err(self.refused(op, &[x], why.into()))
    }

    /// The largest value over the axes `first ..= last`, and its index.
    fn largest(
        &mut self,
        x: TensorId,
        first: usize,
        last: usize,
    ) -> Result<[TensorId; 2], ShapeError> {
        let shape = self.shape(x).clone();
        let dims = shape.dims();
        let before: usize = dims[..first].iter().product();
        let over: usize = dims[first..=last].iter().product();
        let after: usize = dims[last + 1..].iter().product();
        // As few rows as possible: a kernel has a loop over rows, and one over columns in each.
        let rows = 1.max(over.div_ceil(PICTURE_SIDE_MAX));
        let Some(rows) =
            (rows..=PICTURE_SIDE_MAX.min(over)).find(|rows| over.is_multiple_of(*rows))
        else {
            let why = format!(
                "{over} entries cannot be cut into equal rows of at most {PICTURE_SIDE_MAX}; pad \
                 the axis"
            );
            return Err(self.refused("the largest value of an axis", &[x], why));
        };
        let sides = [rows, over / rows];
        let rows = self.reshape(x, &[before, sides[0], sides[1], after])?;
        let window = Pool2dOptions { kernel: sides, stride: sides, ..Pool2dOptions::new(1) };
        let outputs = self.apply_all(Op::MaxPool2d(window), &[rows])?;
        let left = [&dims[..first], &dims[last + 1..]].concat();
        Ok([self.reshape(outputs[0], &left)?, self.reshape(outputs[1], &left)?])
    }
}

/// The axes in order, each once.
fn in_order(axes: &[usize]) -> Vec<usize> {
    let mut axes = axes.to_vec();
    axes.sort_unstable();
    axes.dedup();
    axes
}

/// Returns the first and the last axis of each run of adjacent axes, the last run first: the
/// numbers of the others stay valid when the axes of one are removed.
pub(super) fn runs_from_the_back(axes: &[usize]) -> Vec<[usize; 2]> {
    let mut runs: Vec<[usize; 2]> = Vec::new();
    for axis in in_order(axes).into_iter().rev() {
        match runs.last_mut() {
            Some([first, _]) if axis + 1 == *first => *first = axis,
            _ => runs.push([axis, axis]),
        }
    }
    runs
}

/// Shape to which both can be repeated, or the reason why they cannot.
fn joint_shape(a: &Shape, b: &Shape) -> Result<Shape, String> {
    let rank = a.rank().max(b.rank());
    if [a, b].iter().any(|shape| shape.is_batched() && shape.rank() < rank) {
        return Err("the batch of one would meet another axis; give both as many axes".into());
    }
    let mut dims = vec![1; rank];
    for shape in [a, b] {
        let absent = rank - shape.rank();
        for (axis, dim) in shape.dims().iter().enumerate() {
            let joint = &mut dims[absent + axis];
            if *joint != 1 && *dim != 1 && *joint != *dim {
                return Err(format!(
                    "axis {} has {joint} entries of one and {dim} of the other",
                    absent + axis
                ));
            }
            *joint = (*joint).max(*dim);
        }
    }
    let Some(batched) = [a, b].into_iter().find(|shape| shape.is_batched()) else {
        return Ok(Shape::fixed(&dims));
    };
    let batch = batched.dims()[0];
    for shape in [a, b] {
        let first = if shape.rank() == rank { shape.dims()[0] } else { 1 };
        let wanted = if shape.is_batched() { batch } else { 1 };
        if first != wanted {
            return Err("only the batch has entries along the first axis".into());
        }
    }
    dims[0] = batch;
    Ok(Shape::batched(&dims))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unlike_shapes_are_refused_with_the_axis() {
        let mut b = Builder::new();
        let x = b.input("x", &[1, 3, 4]);
        let y = b.constant("y", &[2, 4], vec![1.0; 8]).unwrap();
        let error = b.add(x, y).unwrap_err().to_string();
        assert!(error.contains("axis 1 has 3 entries of one and 2 of the other"), "{error}");
        // A batch may be as large as any axis, and is none of them.
        let rows = b.constant("rows", &[2, 1, 4], vec![1.0; 8]).unwrap();
        let error = b.mul(x, rows).unwrap_err().to_string();
        assert!(error.contains("only the batch has entries along the first axis"), "{error}");
        let sample = b.input("sample", &[1, 4]);
        let error = b.mul(x, sample).unwrap_err().to_string();
        assert!(error.contains("the batch of one would meet another axis"), "{error}");
    }

    #[test]
    fn axes_of_the_batch_are_not_reduced() {
        let mut b = Builder::new();
        let x = b.input("x", &[1, 3]);
        for error in [b.max(x, &[0]), b.argmax(x, 0), b.cumsum(x, 0), b.unsqueeze(x, &[0])] {
            assert!(error.is_err());
        }
        let error = b.max(x, &[2]).unwrap_err().to_string();
        assert!(error.contains("has no such axis"), "{error}");
        let error = b.constant("c", &[2], vec![1.0]).unwrap_err().to_string();
        assert!(error.contains("has 2 elements, and 1 values are given"), "{error}");
        let error = b.variance(x, &[1], 3).unwrap_err().to_string();
        assert!(error.contains("3 elements have no variance"), "{error}");
    }

    #[test]
    fn axes_of_a_vocabulary_are_searched() {
        let mut b = Builder::new();
        for classes in [50_257, 128_256, 151_936] {
            let logits = b.input(&classes.to_string(), &[1, 2, classes]);
            let place = b.argmax(logits, 2).unwrap();
            assert_eq!(b.shape(place).dims(), [1, 2]);
            b.top_k(logits, 2).unwrap();
        }
        let prime = b.input("prime", &[1, 65_537]);
        let error = b.max(prime, &[1]).unwrap_err().to_string();
        assert!(error.contains("65537 entries cannot be cut into equal rows"), "{error}");
    }

    #[test]
    fn suffixes_are_not_copied() {
        let mut b = Builder::new();
        let x = b.input("x", &[1, 3, 4]);
        let row = b.constant("row", &[1, 4], vec![1.0; 4]).unwrap();
        b.sub(x, row).unwrap();
        b.add(row, x).unwrap();
        let graph = b.finish();
        let is_copy = |node: &crate::Node| matches!(node.op, Op::Broadcast { .. });
        assert!(!graph.nodes.iter().any(is_copy));
    }
}

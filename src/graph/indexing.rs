//! The builder's functions of indices along axes: gathering, scattering, reversal, and the largest
//! entries. Indices are whole numbers in floats, like the results of [`Builder::argmax`];
//! [`Builder::floats_of`] converts an integer input.

use super::Builder;
use super::builder::BuildResult;
use super::elements::Unary;
use super::op::Op;
use super::pictures::PLACES_MAX;
use super::shapes::{CONCAT_INPUTS_MAX, ShapeError};
use potluck_core::{DType, TensorId};

/// Largest `k` of [`Builder::top_k`], which computes a separate maximum for each value.
const TOP_MAX: usize = 128;

impl Builder {
    /// Returns the entries of `x (.., n, ..)` along an axis that `index` names: `(.., m, ..)`. The
    /// index is `(m)`, the same for all (PyTorch's `index_select`); `(.., m)`, with the axes of `x`
    /// before this one; or has an index for each element of the result (`gather` and
    /// `take_along_dim`). It is of integers or floats, and has no gradient; an index out of range
    /// selects zeros. The rows of a table `(n, c)` may be selected by a batch `(b*m)`.
    ///
    /// # Errors
    /// Returns [`ShapeError`] if there is no such axis, it is the batch's, or the index has other
    /// axes.
    pub fn gather(&mut self, x: TensorId, axis: usize, index: TensorId) -> BuildResult {
        let places = self.places_along(x, axis, index)?;
        self.apply(Op::Gather { axis }, &[x, places])
    }

    /// Returns `x (.., n, ..)` with the entries of `y (.., m, ..)` added at the places along an
    /// axis that `index` names, which has the forms of [`Builder::gather`]: PyTorch's `scatter_add`
    /// and `index_add`. Entries whose index is out of range are left out.
    ///
    /// # Errors
    /// Returns [`ShapeError`] as [`Builder::gather`], if `y` is not of the shape of its result, and
    /// for sums over the batch, which differ from one micro-batch to another.
    pub fn scatter_add(
        &mut self,
        x: TensorId,
        axis: usize,
        index: TensorId,
        y: TensorId,
    ) -> BuildResult {
        let places = self.places_along(x, axis, index)?;
        if axis == 0 && [index, y].iter().any(|of| self.shape(*of).is_batched()) {
            let why = "the batch has no fixed size".into();
            return Err(self.refused("scatter_add", &[x, index, y], why));
        }
        let length = self.shape(x).dims().get(axis).copied().unwrap_or(0);
        let sums = self.apply(Op::ScatterAdd { axis, length }, &[places, y])?;
        self.add(x, sums)
    }

    /// Returns the entries of `x` along an axis at given places, in their order: NumPy's `take`.
    ///
    /// # Errors
    /// Returns [`ShapeError`] if there is no such axis, it is the batch's, or it has no such place.
    pub fn take(&mut self, x: TensorId, axis: usize, places: &[usize]) -> BuildResult {
        let length = self.shape(x).dims().get(axis).copied().unwrap_or(0);
        if let Some(place) = places.iter().find(|place| **place >= length.min(PLACES_MAX)) {
            let why = format!("axis {axis} has {length} entries, and none at {place}");
            return Err(self.refused("take", &[x], why));
        }
        if places.is_empty() {
            return Err(self.refused("take", &[x], "no places are given".into()));
        }
        // FNV-1a: the same places have the same constant.
        let mut hash = 0xcbf2_9ce4_8422_2325_u64;
        for place in places {
            hash = (hash ^ *place as u64).wrapping_mul(0x0100_0000_01b3);
        }
        let name = format!("places.{}.{hash:016x}", places.len());
        let values = places.iter().map(|place| *place as f32).collect();
        let index = self.shared_constant(&name, &[places.len()], values);
        self.apply(Op::Gather { axis }, &[x, index])
    }

    /// Returns `x` with its entries along these axes in the reverse order.
    ///
    /// # Errors
    /// Returns [`ShapeError`] if there is no such axis, or it is the batch's.
    pub fn flip(&mut self, x: TensorId, axes: &[usize]) -> BuildResult {
        let mut y = x;
        for axis in axes {
            let length = self.shape(x).dims().get(*axis).copied().unwrap_or(0);
            if length == 0 {
                return Err(self.refused("flip", &[x], format!("has no axis {axis}")));
            }
            let places: Vec<usize> = (0..length).rev().collect();
            y = self.take(y, *axis, &places)?;
        }
        Ok(y)
    }

    /// Returns the constant `(n)` of the whole numbers below `n`.
    ///
    /// # Errors
    /// Returns [`ShapeError`] for 0, and for more than 2^24 numbers, which are not exact in f32.
    pub fn arange(&mut self, n: usize) -> BuildResult {
        if !(1..=PLACES_MAX).contains(&n) {
            let why = format!("{n} numbers are not from 1 to 2^24");
            return Err(self.refused("arange", &[], why));
        }
        let values = (0..n).map(|at| at as f32).collect();
        Ok(self.shared_constant(&format!("arange.{n}"), &[n], values))
    }

    /// Returns integers as floats; -1 for indices that are not less than `count`.
    ///
    /// # Errors
    /// Returns [`ShapeError`] if `ids` are no integers, or by [`Builder::arange`] of the count.
    pub fn floats_of(&mut self, ids: TensorId, count: usize) -> BuildResult {
        let dims = self.shape(ids).dims().to_vec();
        let numbers = self.arange(count)?;
        // An id beyond the table selects 0.
        let from_one = self.offset(numbers, 1.0)?;
        let table = self.reshape(from_one, &[count, 1])?;
        let floats = self.embedding(ids, table)?;
        let floats = self.offset(floats, -1.0)?;
        self.reshape(floats, &dims)
    }

    /// Returns for each place, of integers or floats, a row of `classes` floats: 1 at the place, 0
    /// elsewhere. PyTorch's `one_hot`.
    ///
    /// # Errors
    /// Returns [`ShapeError`] by [`Builder::arange`] of the classes.
    pub fn one_hot(&mut self, ids: TensorId, classes: usize) -> BuildResult {
        let floats = self.as_places(ids, classes)?;
        let numbers = self.arange(classes)?;
        let column = self.unsqueeze(floats, &[self.shape(ids).rank()])?;
        self.equal(column, numbers)
    }

    /// Returns the `k` largest values along the last axis, the largest first, and their indices,
    /// which have no gradient, both `(.., k)`: PyTorch's `topk`. A NaN is larger than all numbers,
    /// and the first of equal values is taken.
    ///
    /// # Errors
    /// Returns [`ShapeError`] if `x` has no axis but the batch's, or fewer than `k` entries along
    /// it, and for more than 128 values.
    pub fn top_k(&mut self, x: TensorId, k: usize) -> Result<[TensorId; 2], ShapeError> {
        let shape = self.shape(x).clone();
        let axis = shape.rank().saturating_sub(1);
        if shape.rank() == 0 || (axis == 0 && shape.is_batched()) {
            let why = "the last axis must be there, and not the batch's".into();
            return Err(self.refused("top_k", &[x], why));
        }
        let n = shape.last();
        if !(1..=n.min(TOP_MAX)).contains(&k) {
            let why = format!("{k} values are not from 1 to the {n} along the last axis");
            let bound = format!(", of which at most {TOP_MAX} are found");
            return Err(self.refused("top_k", &[x], why + &bound));
        }
        let numbers = self.arange(n)?;
        let nothing = f32::NEG_INFINITY;
        let taken = self.shared_constant("top_k.taken", &[], vec![nothing]);
        let values = self.stop_gradient(x)?;
        // Values taken so far are set to minus infinity, below all others.
        let mut left = self.unary(values, Unary::AtLeast(f32::MIN))?;
        let mut found = Vec::new();
        for _ in 0..k {
            let place = self.argmax(left, axis)?;
            let place = self.unsqueeze(place, &[axis])?;
            found.push(place);
            if found.len() < k {
                let is_taken = self.equal(numbers, place)?;
                left = self.select(is_taken, taken, left)?;
            }
        }
        let places = self.concat_all(found, axis)?;
        Ok([self.apply(Op::Gather { axis }, &[x, places])?, places])
    }

    /// Joins any number of tensors along an axis, at least one.
    pub(super) fn concat_all(&mut self, parts: Vec<TensorId>, axis: usize) -> BuildResult {
        let mut parts = parts;
        while parts.len() > 1 {
            let mut joined = Vec::new();
            for group in parts.chunks(CONCAT_INPUTS_MAX) {
                joined.push(if let [one] = group { *one } else { self.concat(group, axis)? });
            }
            parts = joined;
        }
        Ok(parts[0])
    }

    fn places_along(&mut self, x: TensorId, axis: usize, index: TensorId) -> BuildResult {
        let length = self.shape(x).dims().get(axis).copied().unwrap_or(1);
        self.as_places(index, length)
    }

    /// Returns indices below `count`, integers or floats, as floats.
    fn as_places(&mut self, index: TensorId, count: usize) -> BuildResult {
        if self.dtype(index) == DType::F32 { Ok(index) } else { self.floats_of(index, count) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_there_is_said() {
        let mut b = Builder::new();
        let x = b.input("x", &[1, 4, 6]);
        let error = b.take(x, 1, &[3, 4]).unwrap_err().to_string();
        assert_eq!(error, "take of (b, 4, 6): axis 1 has 4 entries, and none at 4");
        assert!(b.take(x, 1, &[]).is_err());
        let error = b.flip(x, &[0]).unwrap_err().to_string();
        assert!(error.contains("the batch axis cannot be cut"), "{error}");
        assert!(b.flip(x, &[3]).is_err());
        let error = b.top_k(x, 7).unwrap_err().to_string();
        assert!(error.contains("7 values are not from 1 to the 6"), "{error}");
        let wide = b.input("wide", &[1, 1000]);
        let error = b.top_k(wide, 129).unwrap_err().to_string();
        assert!(error.contains("of which at most 128 are found"), "{error}");
        let (fixed, ids) = (b.arange(5).unwrap(), b.input_ids("ids", &[1]));
        let y = b.input("y", &[1]);
        let error = b.scatter_add(fixed, 0, ids, y).unwrap_err().to_string();
        assert!(error.ends_with("the batch has no fixed size"), "{error}");
        let places = b.input("places", &[1, 3, 6]);
        let error = b.gather(x, 2, places).unwrap_err().to_string();
        assert!(error.contains("places along axis 2 are (m)"), "{error}");
        assert!(b.arange(0).is_err());
    }

    #[test]
    fn places_have_three_forms() {
        let mut b = Builder::new();
        let x = b.input("x", &[1, 4, 6]);
        let shared = b.arange(3).unwrap();
        let outer = b.input_ids("outer", &[1, 5]);
        let each = b.input("each", &[1, 2, 6]);
        for (index, wanted) in [(shared, "(b, 3, 6)"), (outer, "(b, 5, 6)"), (each, "(b, 2, 6)")] {
            let y = b.gather(x, 1, index).unwrap();
            assert_eq!(b.shape(y).to_string(), wanted);
        }
        let table = b.arange(9).unwrap();
        let table = b.reshape(table, &[9, 1]).unwrap();
        let rows = b.input("rows", &[7]);
        let y = b.gather(table, 0, rows).unwrap();
        assert_eq!(b.shape(y).to_string(), "(b*7, 1)");
        let hot = b.one_hot(outer, 8).unwrap();
        assert_eq!(b.shape(hot).to_string(), "(b, 5, 8)");
        let [values, places] = b.top_k(x, 6).unwrap();
        assert_eq!(b.shape(values), b.shape(places));
        assert_eq!(b.shape(values).to_string(), "(b, 4, 6)");
    }
}

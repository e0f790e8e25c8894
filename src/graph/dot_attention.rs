//! Attention over queries, keys and values in separate tensors: by the attention kernel if it
//! supports the options, otherwise composed of products and a softmax.

use super::builder::BuildResult;
use super::shapes::ShapeError;
use super::{AttentionOptions, Builder};
use potluck_core::TensorId;

/// Score of a key that a query does not see: its exponential is 0 beside any other. A query that
/// sees none has the mean of all values, and not NaN.
const UNSEEN: f32 = -1e30;

/// Options of [`Builder::scaled_dot_product_attention`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DotAttentionOptions {
    /// Heads of queries.
    pub heads: usize,
    /// Number of heads of keys and values, a divisor of the number of query heads (Ainslie et al.
    /// 2023).
    pub kv_heads: usize,
    /// True if query `i` sees the keys up to `i` only.
    pub causal: bool,
    /// Factor of the scores; `None`: one over the root of a head's width.
    pub scale: Option<f32>,
    /// Addend of the scores, whose shape can be broadcast to `(b, heads, queries, keys)`: 0 and
    /// -1e30 stand for the boolean masks that PyTorch also accepts. It applies in addition to
    /// `causal`.
    pub mask: Option<TensorId>,
    /// Number of keys of each sample, `(b)` of floats: later keys are padding and are masked.
    pub key_lengths: Option<TensorId>,
    /// Probability with which probabilities are dropped in training.
    pub dropout: f32,
}

impl DotAttentionOptions {
    /// Returns the options of attention in which every query sees all keys, with as many heads of
    /// keys and values as of queries.
    pub fn new(heads: usize) -> Self {
        Self {
            heads,
            kv_heads: heads,
            causal: false,
            scale: None,
            mask: None,
            key_lengths: None,
            dropout: 0.0,
        }
    }
}

#[derive(Clone, Copy)]
struct DotAttentionSizes {
    queries: usize,
    keys: usize,
    /// Columns of a head of queries and of keys.
    width: usize,
    /// Columns of a head of values.
    value_width: usize,
}

impl Builder {
    /// Computes `softmax(q k^T scale + mask) v` by head, of queries `(b, queries, heads d)`, keys
    /// `(b, keys, kv_heads d)` and values `(b, keys, kv_heads e)`: `(b, queries, heads e)`. It is
    /// PyTorch's `scaled_dot_product_attention`, with heads side by side in the columns. The
    /// numbers of queries and keys may differ: cross attention.
    ///
    /// It is one kernel that stores no scores if there are as many queries as keys, `d = e`, and
    /// neither a mask nor lengths; otherwise it is products and a softmax, with scores in memory.
    ///
    /// # Errors
    /// Returns [`ShapeError`] if the shapes do not fit, if the heads do not divide the columns, or
    /// if the mask cannot be broadcast to the scores.
    pub fn scaled_dot_product_attention(
        &mut self,
        [q, k, v]: [TensorId; 3],
        options: &DotAttentionOptions,
    ) -> BuildResult {
        let sizes = self.attention_sizes([q, k, v], options)?;
        let DotAttentionOptions { heads, kv_heads, causal, scale, dropout, .. } = *options;
        let root = (sizes.width as f32).sqrt().recip();
        let is_tiled = options.mask.is_none()
            && options.key_lengths.is_none()
            && sizes.queries == sizes.keys
            && sizes.width == sizes.value_width;
        if is_tiled {
            // The kernel's own scale is one over the root.
            let q = match scale {
                Some(scale) => self.scale(q, scale / root)?,
                None => q,
            };
            // The kernel takes columns of a tensor as queries, keys or values, not as two of them.
            let keys = if k == q { self.scale(k, 1.0)? } else { k };
            let values = if v == q || v == k { self.scale(v, 1.0)? } else { v };
            let separate = AttentionOptions::separate(heads, kv_heads, sizes.width);
            let options = AttentionOptions { causal, dropout, ..separate };
            return self.attention_over([(q, 0), (keys, 0), (values, 0)], options);
        }
        let q = self.scale(q, scale.unwrap_or(root))?;
        let q = self.rows_of_heads(q, heads, 1)?;
        let k = self.rows_of_heads(k, kv_heads, heads / kv_heads)?;
        let v = self.rows_of_heads(v, kv_heads, heads / kv_heads)?;
        let DotAttentionSizes { queries, keys, value_width, .. } = sizes;
        let scores = self.matmul(q, k, false, true)?;
        let mut scores = self.reshape(scores, &[1, heads, queries, keys])?;
        if let Some(mask) = options.mask {
            scores = self.add_mask(scores, mask)?;
        }
        if causal {
            let mask = self.causal_mask(queries, keys);
            scores = self.add(scores, mask)?;
        }
        if let Some(lengths) = options.key_lengths {
            let is_padding = self.padding(lengths, keys)?;
            let unseen = self.shared_constant("attention.unseen", &[1], vec![UNSEEN]);
            scores = self.select(is_padding, unseen, scores)?;
        }
        let probabilities = self.softmax(scores)?;
        let probabilities = self.dropout(probabilities, dropout)?;
        let probabilities = self.reshape(probabilities, &[heads, queries, keys])?;
        let y = self.matmul(probabilities, v, false, false)?;
        let y = self.reshape(y, &[1, heads, queries, value_width])?;
        let y = self.permute(y, &[0, 2, 1, 3])?;
        self.reshape(y, &[1, queries, heads * value_width])
    }

    fn attention_sizes(
        &self,
        inputs: [TensorId; 3],
        options: &DotAttentionOptions,
    ) -> Result<DotAttentionSizes, ShapeError> {
        let DotAttentionOptions { heads, kv_heads, .. } = *options;
        let refused = |why: String| Err(self.refused("scaled_dot_product_attention", &inputs, why));
        if heads == 0 || kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            return refused(format!("{heads} heads cannot share {kv_heads} heads of keys evenly"));
        }
        let shapes = inputs.map(|input| self.shape(input));
        let is_sequence = shapes.iter().all(|shape| shape.rank() == 3 && shape.is_batched());
        if !is_sequence {
            return refused("wants queries, keys and values (b, t, heads d)".into());
        }
        let [q, k, v] = shapes.map(|shape| shape.dims());
        if [q, k, v].iter().any(|dims| dims[0] != 1) {
            return refused("wants one sequence per sample".into());
        }
        if !q[2].is_multiple_of(heads)
            || !k[2].is_multiple_of(kv_heads)
            || !v[2].is_multiple_of(kv_heads)
        {
            return refused(format!(
                "{heads} heads of queries and {kv_heads} of keys and values do not divide the \
                 columns"
            ));
        }
        let sizes = DotAttentionSizes {
            queries: q[1],
            keys: k[1],
            width: q[2] / heads,
            value_width: v[2] / kv_heads,
        };
        if k[2] / kv_heads != sizes.width {
            let width = k[2] / kv_heads;
            return refused(format!(
                "a head has {} columns of queries and {width} of keys",
                sizes.width
            ));
        }
        if v[1] != sizes.keys {
            return refused(format!("there are {} keys and {} values", sizes.keys, v[1]));
        }
        Ok(sizes)
    }

    /// Returns `x (b, t, heads d)` as `(b heads repeats, t, d)`: each head `repeats` times in a
    /// row.
    fn rows_of_heads(&mut self, x: TensorId, heads: usize, repeats: usize) -> BuildResult {
        let [_, t, columns] = *self.shape(x).dims() else { return Ok(x) };
        let width = columns / heads;
        let x = self.reshape(x, &[1, t, heads, width])?;
        let x = self.permute(x, &[0, 2, 1, 3])?;
        if repeats == 1 {
            return self.reshape(x, &[heads, t, width]);
        }
        let x = self.reshape(x, &[1, heads, 1, t, width])?;
        let x = self.broadcast_to(x, &[1, heads, repeats, t, width])?;
        self.reshape(x, &[heads * repeats, t, width])
    }

    /// Adds a mask to scores `(b, heads, queries, keys)`.
    fn add_mask(&mut self, scores: TensorId, mask: TensorId) -> BuildResult {
        let wanted = self.shape(scores).clone();
        let masked = self.add(scores, mask)?;
        if *self.shape(masked) != wanted {
            let why = "the mask has more axes or entries than the scores (b, heads, queries, keys)";
            let op = "scaled_dot_product_attention";
            return Err(self.refused(op, &[scores, mask], why.into()));
        }
        Ok(masked)
    }

    /// Mask `(queries, keys)` of keys behind each query.
    fn causal_mask(&mut self, queries: usize, keys: usize) -> TensorId {
        let mut values = Vec::with_capacity(queries * keys);
        for query in 0..queries {
            values.extend((0..keys).map(|key| if key > query { UNSEEN } else { 0.0 }));
        }
        let name = format!("attention.causal.{queries}x{keys}");
        self.shared_constant(&name, &[queries, keys], values)
    }

    /// Returns 1 for the keys from a sample's length on, else 0: `(b, 1, 1, keys)`.
    fn padding(&mut self, lengths: TensorId, keys: usize) -> BuildResult {
        let shape = self.shape(lengths);
        if !shape.is_batched() || shape.dims() != [1] {
            let why = "wants the lengths of keys as (b) floats, one per sample".into();
            return Err(self.refused("scaled_dot_product_attention", &[lengths], why));
        }
        let places = self.arange(keys)?;
        let lengths = self.reshape(lengths, &[1, 1])?;
        let is_padding = self.less_equal(lengths, places)?;
        self.reshape(is_padding, &[1, 1, 1, keys])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::Op;

    #[test]
    fn attention_without_a_mask_is_one_kernel() {
        let mut b = Builder::new();
        let [q, k, v] = ["q", "k", "v"].map(|name| b.input(name, &[1, 5, 8]));
        let options =
            DotAttentionOptions { causal: true, scale: Some(0.3), ..DotAttentionOptions::new(2) };
        b.scaled_dot_product_attention([q, k, v], &options).unwrap();
        let graph = b.finish();
        assert!(matches!(graph.nodes[1].op, Op::Attention(_)), "{}", graph.nodes[1].op);
        assert_eq!(graph.nodes.len(), 2);
    }

    #[test]
    fn shapes_that_do_not_fit_are_named() {
        let mut b = Builder::new();
        let q = b.input("q", &[1, 5, 8]);
        let k = b.input("k", &[1, 7, 8]);
        let v = b.input("v", &[1, 6, 8]);
        let wide = b.input("wide", &[1, 7, 12]);
        let lengths = b.input("lengths", &[1, 2]);
        let mask = b.constant("mask", &[5, 6], vec![0.0; 30]).unwrap();
        let options = DotAttentionOptions::new(2);
        let mut refused = |inputs, options: DotAttentionOptions| {
            b.scaled_dot_product_attention(inputs, &options).unwrap_err().to_string()
        };
        let error = refused([q, k, v], options);
        assert!(error.ends_with("there are 7 keys and 6 values"), "{error}");
        let error = refused([q, wide, k], options);
        assert!(error.ends_with("a head has 4 columns of queries and 6 of keys"), "{error}");
        let error = refused([q, k, k], DotAttentionOptions { heads: 3, kv_heads: 3, ..options });
        assert!(error.contains("do not divide the columns"), "{error}");
        let error = refused([q, k, k], DotAttentionOptions { kv_heads: 0, ..options });
        assert!(error.contains("cannot share 0 heads of keys"), "{error}");
        let error = refused([q, k, k], DotAttentionOptions { mask: Some(mask), ..options });
        assert!(error.contains("axis 3 has 7 entries of one and 6 of the other"), "{error}");
        let error =
            refused([q, k, k], DotAttentionOptions { key_lengths: Some(lengths), ..options });
        assert!(error.contains("lengths of keys as (b) floats"), "{error}");
    }
}

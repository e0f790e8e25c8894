//! Options of attention: its heads, and the columns of its inputs in which it finds queries, keys
//! and values.

use std::fmt;

use super::op::from;
use potluck_core::Site;

/// Columns of an input that hold the queries, keys or values of all heads, side by side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionPlace {
    /// Number of the input.
    pub input: usize,
    /// First column in it.
    pub first: usize,
}

impl AttentionPlace {
    /// Returns the place that begins at a column of an input.
    pub fn new(input: usize, first: usize) -> Self {
        Self { input, first }
    }
}

/// Options of attention, of the op and its gradient.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionOptions {
    /// Heads of queries that the node computes.
    pub heads: usize,
    /// Number of heads of keys and values, a divisor of the number of query heads: query head `h`
    /// reads head `h / (heads / kv_heads)` (Ainslie et al. 2023).
    pub kv_heads: usize,
    /// Columns of a head.
    pub head_width: usize,
    /// Places of queries, keys and values. Each column of their inputs belongs to one of them.
    pub places: [AttentionPlace; 3],
    /// Number of the first query head in the model, by which dropout is keyed: 0 where the node
    /// computes all.
    pub first_head: usize,
    /// True if a query sees the keys up to its own position, else all.
    pub causal: bool,
    /// Probability with which probabilities are dropped in training.
    pub dropout: f32,
    pub site: Site,
}

impl AttentionOptions {
    /// Returns the options of causal attention without dropout over queries, keys and values that
    /// are packed in one input, in this order.
    pub fn packed(heads: usize, head_width: usize) -> Self {
        let columns = heads.saturating_mul(head_width);
        let places =
            [0, 1, 2].map(|nth: usize| AttentionPlace::new(0, columns.saturating_mul(nth)));
        Self { places, ..Self::separate(heads, heads, head_width) }
    }

    /// Returns the options of causal attention without dropout over queries, keys and values that
    /// are inputs of their own.
    pub fn separate(heads: usize, kv_heads: usize, head_width: usize) -> Self {
        let places = [0, 1, 2].map(|input| AttentionPlace::new(input, 0));
        Self {
            heads,
            kv_heads,
            head_width,
            places,
            first_head: 0,
            causal: true,
            dropout: 0.0,
            site: Site(0),
        }
    }

    /// Returns the number of inputs that hold queries, keys and values.
    pub fn tensors(&self) -> usize {
        self.places.iter().map(|place| place.input + 1).max().unwrap_or(0)
    }

    /// Returns the columns of queries (0), keys (1) and values (2).
    pub fn columns(&self) -> [usize; 3] {
        [self.heads, self.kv_heads, self.kv_heads]
            .map(|heads| heads.saturating_mul(self.head_width))
    }

    /// Returns the query heads that share a head of keys and values; 0 without any.
    pub fn group(&self) -> usize {
        self.heads.checked_div(self.kv_heads).unwrap_or(0)
    }

    /// Returns the number of columns of an input.
    pub fn input_columns(&self, input: usize) -> usize {
        let mut sum = 0_usize;
        for (place, columns) in self.places.iter().zip(self.columns()) {
            if place.input == input {
                sum = sum.saturating_add(columns);
            }
        }
        sum
    }
}

/// Columns of tensors whose keys and values are written to a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheUpdateOptions {
    /// Places of keys and values; their inputs may have other columns beside them.
    pub places: [AttentionPlace; 2],
    pub kv_heads: usize,
    pub head_width: usize,
    /// Sequences that have keys and values in the cache.
    pub sequences: usize,
    /// Positions of a sequence: t.
    pub context: usize,
}

impl CacheUpdateOptions {
    /// Returns the number of inputs that hold keys and values.
    pub fn tensors(&self) -> usize {
        self.places.iter().map(|place| place.input + 1).max().unwrap_or(0)
    }

    /// Returns the columns of the keys, and of the values.
    pub fn columns(&self) -> usize {
        self.kv_heads.saturating_mul(self.head_width)
    }

    /// Returns the dimensions of the cache: `(sequences, 2 kv_heads, t, d)`, the heads of keys
    /// before the heads of values.
    pub fn cache(&self) -> [usize; 4] {
        [self.sequences, 2 * self.kv_heads, self.context, self.head_width]
    }
}

impl fmt::Display for CacheUpdateOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { places, kv_heads, sequences, context, .. } = self;
        let [k, v] = places.map(|place| format!("{}:{}", place.input, place.first));
        write!(f, "{sequences} x {context}, {kv_heads} heads at {k} {v}")
    }
}

/// Options of attention over a cache of keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CachedAttentionOptions {
    /// Heads of queries that the node computes; see [`AttentionOptions`].
    pub heads: usize,
    /// First column of the queries in their tensor.
    pub first: usize,
}

impl fmt::Display for CachedAttentionOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} heads", self.heads)?;
        if self.first > 0 { write!(f, " at {}", self.first) } else { Ok(()) }
    }
}

impl fmt::Display for AttentionOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} heads", self.heads)?;
        if self.kv_heads != self.heads {
            write!(f, " and {} of keys", self.kv_heads)?;
        }
        f.write_str(&from(self.first_head))?;
        if self.places != Self::packed(self.heads, self.head_width).places {
            let [q, k, v] = self.places.map(|place| format!("{}:{}", place.input, place.first));
            write!(f, " at {q} {k} {v}")?;
        }
        if self.causal { Ok(()) } else { f.write_str(", not causal") }
    }
}

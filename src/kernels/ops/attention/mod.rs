//! Attention over queries, keys and values in columns of one to three tensors, and its gradient.
//! Twin of `shaders/attention.wgsl`, which has the formulas. Faster variants on GPUs: [`tiles`].

mod coop;
mod host;
mod probes;
mod reference;
mod shaders;
pub mod tiles;

use crate::dispatch::grid;
use crate::twin::leading_axis;
use crate::{Caps, Cost, Dispatch, Float, OpCall, Twin, Variant, operand_bytes};
use potluck_core::rng::{Key, drop_threshold, kept_factor};
use potluck_core::{DType, HostTensorView};
use potluck_graph::{Op, Precision};

/// Twin of [`Op::Attention`] and its gradient.
pub static TWIN: Twin = Twin {
    name: "attention",
    reference_f32: reference::reference::<f32>,
    reference_f64: reference::reference::<f64>,
    fast: host::fast,
    dispatch,
    variants,
    cost,
    counts_as_model_flops: true,
    iterations,
    inputs: probes::inputs,
    forward: probes::forward,
    independent_axes: leading_axis,
    probes: probes::probes,
    catalog: probes::catalog,
};

/// Columns of a head per invocation of the shader: its `SLAB` of 16 vectors.
const SLAB_COLUMNS: usize = 64;

/// Dimensions and parameters of a call, taken from its shapes and its op.
#[derive(Clone, Copy)]
struct AttentionSizes {
    b: usize,
    t: usize,
    heads: usize,
    /// Query heads per head of keys and values.
    group: usize,
    /// Columns per head.
    d: usize,
    /// Inputs that hold queries, keys and values.
    tensors: usize,
    /// Places of queries, keys and values.
    places: [ColumnPlace; 3],
    scale: f64,
    /// True if a query sees no key after its own position.
    causal: bool,
    /// Dropout of the probabilities; `None` if it is inactive in this pass.
    drop: Option<Dropout>,
    precision: Precision,
}

/// Columns with queries, keys or values, in an input.
#[derive(Clone, Copy)]
struct ColumnPlace {
    input: usize,
    first: usize,
    /// Columns of the input.
    width: usize,
}

/// Parameters of the dropout of probabilities.
#[derive(Clone, Copy)]
struct Dropout {
    /// Key of head 0 of the call.
    key: Key,
    threshold: u32,
    /// Factor of the kept probabilities.
    factor: f64,
}

impl AttentionSizes {
    fn of(call: &OpCall) -> Self {
        let (Op::Attention(options) | Op::AttentionGrad(options)) = call.op else {
            panic!("{} is not an attention", call.op);
        };
        let [b, t, _] = call.inputs[0][..] else {
            panic!("{}: queries are (b, t, ..)", call.op);
        };
        let mut drop = None;
        if call.random.training && options.dropout > 0.0 {
            drop = Some(Dropout {
                key: head_key(call.random.step_key.site(options.site), options.first_head),
                threshold: drop_threshold(options.dropout),
                factor: kept_factor(options.dropout),
            });
        }
        let places = options.places.map(|place| ColumnPlace {
            input: place.input,
            first: place.first,
            width: options.input_columns(place.input),
        });
        let d = options.head_width;
        Self {
            b,
            t,
            heads: options.heads,
            group: options.group(),
            d,
            tensors: options.tensors(),
            places,
            scale: 1.0 / (d as f64).sqrt(),
            causal: options.causal,
            drop,
            precision: call.precision,
        }
    }

    /// Columns of `y`.
    fn c(&self) -> usize {
        self.heads * self.d
    }

    fn kv_heads(&self) -> usize {
        self.heads / self.group
    }

    /// Number of keys, from the first on, that query `i` sees.
    fn keys(&self, i: usize) -> usize {
        if self.causal { i + 1 } else { self.t }
    }

    fn params(&self) -> Vec<u32> {
        let drop = self.drop.unwrap_or(Dropout { key: Key([0; 2]), threshold: 0, factor: 1.0 });
        let Key([key_0, key_1]) = drop.key;
        let mut words = vec![
            self.b as u32,
            self.heads as u32,
            self.t as u32,
            (self.scale as f32).to_bits(),
            drop.threshold,
            (drop.factor as f32).to_bits(),
            key_0,
            key_1,
            self.d.div_ceil(4) as u32,
            self.group as u32,
        ];
        words.extend(self.places.map(|place| place.width as u32));
        words.extend(self.places.map(|place| place.first as u32));
        words
    }

    /// Id of a sample, which is in the last input; 0 without dropout.
    fn sample_id<T: Float>(&self, inputs: &[HostTensorView<'_, T>], sample: usize) -> u32 {
        match self.drop {
            Some(_) => inputs[inputs.len() - 1].ints()[sample],
            None => 0,
        }
    }

    /// Returns the number of a pair of positions of a head, part of the counter of its random
    /// number.
    fn pair(&self, i: usize, j: usize) -> u32 {
        (i as u32).wrapping_mul(self.t as u32).wrapping_add(j as u32)
    }
}

/// Returns the key of a head, given the key of head 0. Pairs are numbered per head, so that the
/// heads' masks differ at any number of tokens.
fn head_key(key: Key, h: usize) -> Key {
    let [first, second] = key.0;
    Key([first.wrapping_add(h as u32), second])
}

/// Returns the static choice: on GPUs cooperative matrices or else tiles, and elsewhere the plain
/// kernel.
pub fn dispatch(call: &OpCall, caps: &Caps) -> Vec<Dispatch> {
    let sizes = AttentionSizes::of(call);
    if caps.wants_gpu_variants()
        && let Some(matrix) = caps.cooperative
        && let Some(tile) = coop::chosen(call, &sizes, caps)
    {
        return coop::dispatches(call, &sizes, matrix, tile);
    }
    match tiles::chosen(&sizes, caps) {
        Some(tile) => tiles::dispatches(call, &sizes, tile),
        None => plain(call),
    }
}

/// Returns the dispatch of the forward pass, or the three of the gradient, which must run in
/// this order (see the shader). An invocation processes 4 positions and up to 64 columns of a
/// head.
fn plain(call: &OpCall) -> Vec<Dispatch> {
    let sizes = AttentionSizes::of(call);
    let invocations_per_head = sizes.t.div_ceil(4) * sizes.d.div_ceil(SLAB_COLUMNS);
    let mut dispatches = Vec::new();
    for kernel in shaders::kernels(call, &sizes) {
        dispatches.push(Dispatch {
            shader: kernel.shader("attention", &sizes),
            params: sizes.params(),
            groups: grid(sizes.b * kernel.heads(&sizes) * invocations_per_head, 32),
            operands: kernel.operands(),
        });
    }
    dispatches
}

/// Bytes of the rounded operands of a call on the host, and of the results of its heads, which are
/// joined when they are complete; 0 for another op.
pub(crate) fn host_bytes(call: &OpCall) -> usize {
    let (Op::Attention(options) | Op::AttentionGrad(options)) = call.op else { return 0 };
    let results: usize = (0..call.outputs.len()).map(|output| call.output_len(output)).sum();
    let tensors = options.tensors();
    let mut values: usize = (0..tensors).map(|input| call.input_len(input)).sum();
    if matches!(call.op, Op::AttentionGrad(_)) {
        // The gradient of y.
        values += call.input_len(tensors + 2);
    }
    operand_bytes(call, values) + results * DType::F32.bytes()
}

/// Returns the cost: all pairs of positions count, or half of them if it is causal. The forward
/// pass has 2 products of `d` columns for each pair, the gradient 5; an exponential counts as 10
/// FLOPs.
pub fn cost(call: &OpCall) -> Cost {
    let AttentionSizes { b, t, heads, d, causal, .. } = AttentionSizes::of(call);
    let of_head = if causal { t * (t + 1) / 2 } else { t * t };
    let pairs = (b * heads * of_head) as f64;
    let products = if matches!(call.op, Op::Attention(_)) { 2.0 } else { 5.0 };
    Cost { flops: pairs * (2.0 * products * d as f64 + 10.0), bytes: Cost::moved(call) }
}

/// See [`Twin::iterations`]: keys or queries by fours, with two passes over the parts of a head in
/// each, and one over the four rows of a dropout mask. The tiles take fewer, except for the
/// narrowest heads.
fn iterations(call: &OpCall) -> usize {
    let AttentionSizes { t, d, group, .. } = AttentionSizes::of(call);
    let parts = d.div_ceil(4);
    // In the gradient, a key is paired with the queries of all heads that share it.
    let heads = if matches!(call.op, Op::Attention(_)) { 1 } else { group };
    let of_dropout = if call.op.is_random() { 4 } else { 0 };
    heads * t.div_ceil(4) * ((2 * parts + 1).max(4) + of_dropout) + 4 * (parts + 1)
}

/// Returns the GPU kernel variants of the call: the plain one, and on GPUs the tiles that fit.
/// If only kernels for GPUs are wanted, the smallest tile replaces the plain one, whose sums need
/// hundreds of registers: compilers of GPU drivers take seconds for its three entry points.
fn variants(call: &OpCall, caps: &Caps) -> Vec<Variant> {
    let sizes = AttentionSizes::of(call);
    let mut variants = Vec::new();
    for tile in tiles::TILES {
        if tile.fits(&sizes, caps) {
            variants.push(Variant::new(tile.name, tiles::dispatches(call, &sizes, tile)));
        }
    }
    if let Some(matrix) = caps.cooperative {
        for tile in coop::candidates(call, &sizes, caps) {
            let dispatches = coop::dispatches(call, &sizes, matrix, tile);
            variants.push(Variant::new(tile.name, dispatches));
        }
    }
    if caps.wants_cpu_driver_variants() || variants.is_empty() {
        variants.insert(0, Variant::new("attention", plain(call)));
    }
    variants
}

#[cfg(test)]
mod tests;

//! Matrix products, single or batched. Twin of `shaders/matmul.wgsl`, which has the formula.
//! Faster variants: the register tiles that [`tile`] generates, the tiles in workgroup memory of
//! [`shared`], whose sums [`split_k`] splits between workgroups if sums are long and tiles few, and
//! [`vector`] for few rows or columns.

pub(crate) mod probes;
pub mod shared;
pub mod sizes;
pub mod split_k;
mod thin;
pub mod tile;
pub(crate) mod vector;

use gemm::Parallelism;
use rayon::prelude::*;

use crate::dispatch::grid;
use crate::ops::epilogue::{self, Epilogue};
use crate::ops::host_product::{HostProduct, Matrix};
use crate::twin::{IndependentAxis, no_forward, normal_inputs};
use crate::{Caps, Cost, Dispatch, Float, OpCall, Shader, Twin, Variant, operand_bytes, operands};
use potluck_core::{DType, HostTensorView};
use potluck_graph::Op;
pub(crate) use probes::probes_with_columns;
use probes::{catalog, probes};
use shared::WorkgroupTile;
use sizes::{OPERANDS, Sizes};
use split_k::SplitK;
use tile::{RegisterTile, TILES, WORKGROUP};

/// Twin of [`Op::MatMul`].
pub static TWIN: Twin = Twin {
    name: "matmul",
    reference_f32: reference::<f32>,
    reference_f64: reference::<f64>,
    fast,
    dispatch,
    variants,
    cost,
    counts_as_model_flops: true,
    iterations,
    inputs: normal_inputs,
    forward: no_forward,
    independent_axes,
    probes,
    catalog,
};

/// Minimum number of invocations for the static choice of a tile: with fewer, a device would
/// idle.
const INVOCATIONS: usize = 128;

/// The most sums of an invocation in the registers of a GPU, beside its operands.
const REGISTER_SUMS_MAX: usize = 64;

/// Tiles that keep a large GPU busy: about a workgroup for each of its cores.
const WORKGROUPS_MIN: usize = 64;

impl Sizes {
    /// Number of tiles down and across one product.
    fn tiles(&self, tile: RegisterTile) -> (usize, usize) {
        (self.m.div_ceil(tile.m), self.n.div_ceil(tile.n))
    }

    fn tile_count(&self, tile: RegisterTile) -> usize {
        let (down, across) = self.tiles(tile);
        self.batch * down * across
    }

    fn fits(&self, tile: RegisterTile) -> bool {
        self.m >= tile.m && self.n >= tile.n
    }

    /// Returns the register tiles that are candidates for these sizes. The large ones have more
    /// sums per invocation than a GPU has registers.
    fn register_tiles(&self, caps: &Caps) -> impl Iterator<Item = RegisterTile> {
        let narrow = self.m.min(self.n) < tile::NARROW_MAX;
        let tiles: &[RegisterTile] = if narrow { &tile::NARROW } else { &TILES };
        let sums_max =
            if caps.wants_cpu_driver_variants() { usize::MAX } else { REGISTER_SUMS_MAX };
        tiles.iter().copied().filter(move |tile| self.fits(*tile) && tile.m * tile.n <= sums_max)
    }
}

/// Reference: `c[z, i, j] = sum over q of a[z, i, q] b[z, q, j]`, three plain loops.
pub fn reference<T: Float>(
    call: &OpCall,
    inputs: &[HostTensorView<'_, T>],
    outputs: &mut [&mut [T]],
) {
    let sizes = Sizes::of(call);
    let Sizes { m, n, k, .. } = sizes;
    let a = operands(call, inputs[0].floats());
    let b = operands(call, inputs[1].floats());
    let (a_row, a_step) = sizes.a_strides();
    let (b_step, b_column) = sizes.b_strides();
    for (index, c) in outputs[0].iter_mut().enumerate() {
        let z = index / (m * n);
        let i = index / n % m;
        let j = index % n;
        let mut total = T::zero();
        for q in 0..k {
            let a = a[z * m * k + i * a_row + q * a_step];
            total += a * b[z * k * n + q * b_step + j * b_column];
        }
        *c = if call.accumulates() { *c + total } else { total };
    }
}

/// CPU kernel: the `gemm` crate on all threads, or one thread per product for large batches. It
/// does not split sums between threads, so results do not depend on their number.
///
/// Compared with `matrixmultiply`, which `ndarray` calls, it was faster on every shape of a small
/// GPT by 1.13 to 1.25 times with AVX2, in one run on an AMD EPYC. Its AVX-512 kernels speed 512
/// cubed up from 240 to 470 GFLOP/s on two cores.
pub fn fast(call: &OpCall, inputs: &[HostTensorView<'_, f32>], outputs: &mut [&mut [f32]]) {
    let sizes = Sizes::of(call);
    let Sizes { batch, m, n, k, .. } = sizes;
    let c = &mut *outputs[0];
    if c.is_empty() {
        return;
    }
    let a = &*operands(call, inputs[0].floats());
    let b = &*operands(call, inputs[1].floats());
    if thin::suits(&sizes) {
        return thin::product(&sizes, call.accumulates(), a, b, c);
    }
    let compute = |z: usize, c: &mut [f32], parallelism| {
        let a = &a[z * m * k..(z + 1) * m * k];
        let b = &b[z * k * n..(z + 1) * k * n];
        product(sizes, call.accumulates(), a, b, c, parallelism);
    };
    if batch < rayon::current_num_threads() {
        for (z, c) in c.chunks_mut(m * n).enumerate() {
            compute(z, c, Parallelism::Rayon(0));
        }
        return;
    }
    c.par_chunks_mut(m * n).enumerate().for_each(|(z, c)| compute(z, c, Parallelism::None));
}

/// The most terms of a sum for which `gemm` packs operands in one pass, by its default.
const PACKED_TERMS: usize = 512;

/// The most bytes of the packed first operand. `gemm` packs as much as fits the last cache; this is
/// at least the size of the last cache of most processors.
const PACKED_BYTES_MAX: usize = 32 << 20;

/// Returns the bytes of the rounded operands of [`fast`] and of the packed first operand of a
/// product, which is the larger one of the two that `gemm` packs; 0 for another op.
pub(crate) fn host_bytes(call: &OpCall) -> usize {
    let Op::MatMul { .. } = call.op else { return 0 };
    product_bytes(call)
}

/// The same bytes for any call that is computed as a product.
pub(super) fn product_bytes(call: &OpCall) -> usize {
    let Sizes { m, k, .. } = Sizes::of(call);
    let row = k.min(PACKED_TERMS) * DType::F32.bytes();
    let packed = row.saturating_mul(m).min(PACKED_BYTES_MAX);
    packed + operand_bytes(call, call.input_len(0) + call.input_len(1))
}

fn product(
    sizes: Sizes,
    accumulate: bool,
    a: &[f32],
    b: &[f32],
    c: &mut [f32],
    parallelism: Parallelism,
) {
    let Sizes { m, n, k, .. } = sizes;
    let a = Matrix::strided(a, sizes.a_strides().into());
    let b = Matrix::strided(b, sizes.b_strides().into());
    let of_sizes = HostProduct::new([m, n, k]);
    HostProduct { add: accumulate, parallelism, ..of_sizes }.run(a, b, c, n);
}

/// Static choice: on adapters that run on a processor the largest register tile with enough
/// invocations, with long sums split, or else one invocation per output; for GPUs see
/// `on_hardware`.
///
/// GFLOP/s in trusted modules on two cores of an AMD EPYC, llvmpipe / SwiftShader:
///
/// | (m, k) (k, n)                | naive     | 4x4       | 8x8        | 16x8       | 16x16      |
/// |------------------------------|-----------|-----------|------------|------------|------------|
/// | (768, 128) (384, 128)^T      | 1.8 / 1.2 | 10 / 3.5  | 15.9 / 4.9 | 18.7 / 6.4 | 25.7 / 4.6 |
/// | (768, 128) (512, 128)^T      | 1.8 / 1.2 | 9.7 / 3.4 | 15.9 / 4.9 | 18.7 / 6.4 | 25.8 / 4.7 |
/// | (768, 512) (128, 512)^T      | 1.9 / 1.3 | 9.0 / 3.7 | 15.4 / 5.1 | 19.1 / 6.9 | 26.6 / 5.4 |
/// | (768, 128) (65, 128)^T       | 1.8 / 1.2 | 8.8 / 3.4 | 13.7 / 4.4 | 15.8 / 5.6 | 19.7 / 3.8 |
/// | (768, 384) (384, 128)        | 1.9 / 1.3 | 9.9 / 3.7 | 16.3 / 5.3 | 18.2 / 7.0 | 25.5 / 5.4 |
/// | (768, 65) (65, 128)          | 1.8 / 1.2 | 8.4 / 3.5 | 12.5 / 4.8 | 15.1 / 6.0 | 16.3 / 4.5 |
/// | (768, 512)^T (768, 128)      | 1.7 / 1.3 | 9.3 / 4.3 | 16.0 / 5.5 | 20.4 / 5.8 | 27.4 / 5.6 |
/// | (768, 65)^T (768, 128)       | 1.8 / 1.3 | 8.7 / 3.9 | 13.3 / 4.4 | 13.7 / 4.0 | 14.1 / 2.8 |
/// | (512, 512) (512, 512)        | 1.9 / 1.3 | 9.3 / 3.7 | 15.9 / 5.3 | 17.3 / 7.0 | 25.0 / 5.5 |
pub fn dispatch(call: &OpCall, caps: &Caps) -> Vec<Dispatch> {
    let sizes = Sizes::of(call);
    if caps.wants_gpu_variants() {
        return on_hardware(call, sizes, caps);
    }
    if let Some(split) = SplitK::of_registers(&sizes) {
        return split.dispatches(call, &sizes);
    }
    for tile in TILES {
        if sizes.fits(tile) && sizes.tile_count(tile) >= INVOCATIONS {
            return vec![tiled(call, sizes, tile)];
        }
    }
    vec![naive(call, sizes)]
}

/// Static choice on GPUs. For few rows or columns the kernel that reads the other matrix once; or
/// else, of the tiles in workgroup memory for which the device has enough registers:
/// - the largest one with long sums split, if it has too few tiles to fill the device;
/// - or else the largest one with enough tiles to keep the device busy;
/// - or else the smallest one.
///
/// If none fits, the smallest register tile that does, or else the plain kernel.
fn on_hardware(call: &OpCall, sizes: Sizes, caps: &Caps) -> Vec<Dispatch> {
    if vector::fits(&sizes) {
        return vec![vector::dispatch(call, &sizes, vector::static_choice(&sizes))];
    }
    let suits = |tile: &WorkgroupTile| tile.suits(caps) && tile.fits(&sizes);
    let of_matrices = shared::cooperative_tiles(call, caps);
    let all = if of_matrices.iter().any(suits) { of_matrices } else { shared::TILES.to_vec() };
    for split in SplitK::of(&sizes, &all) {
        if split.suits(caps) && split.workgroups(&sizes) >= WORKGROUPS_MIN {
            return split.dispatches(call, &sizes);
        }
    }

    let tiles: Vec<_> = all.into_iter().filter(suits).collect();
    let busy = tiles.iter().find(|tile| tile.count(&sizes) >= WORKGROUPS_MIN);
    // The last tile is the smallest; if sums are few and long, it is the one with split sums.
    if let Some(tile) = busy.or(tiles.last()) {
        return vec![shared::dispatch(call, &sizes, *tile)];
    }

    match TILES.into_iter().rev().find(|tile| sizes.fits(*tile)) {
        Some(tile) => vec![tiled(call, sizes, tile)],
        None => vec![naive(call, sizes)],
    }
}

/// Returns the GPU kernel variants of the call.
pub fn variants(call: &OpCall, caps: &Caps) -> Vec<Variant> {
    let sizes = Sizes::of(call);
    let mut every = vec![Variant::new("matmul_naive", vec![naive(call, sizes)])];
    for kernel in vector::kernels(&sizes, caps) {
        every.push(Variant::new(kernel.name, vec![vector::dispatch(call, &sizes, kernel)]));
    }
    for tile in sizes.register_tiles(caps) {
        every.push(Variant::new(tile.name, vec![tiled(call, sizes, tile)]));
    }
    if caps.wants_cpu_driver_variants()
        && let Some(split) = SplitK::of_registers(&sizes)
    {
        every.push(Variant::new(split.name, split.dispatches(call, &sizes)));
    }
    if caps.wants_gpu_variants() {
        every.extend(in_workgroup_memory(call, &sizes, &shared::TILES));
    }
    every.extend(in_workgroup_memory(call, &sizes, &shared::cooperative_tiles(call, caps)));
    every
}

/// Variants of some tiles in workgroup memory, and the variants that split long sums.
fn in_workgroup_memory(call: &OpCall, sizes: &Sizes, tiles: &[WorkgroupTile]) -> Vec<Variant> {
    let mut variants = Vec::new();
    for tile in tiles {
        if tile.fits(sizes) {
            variants.push(Variant::new(tile.name, vec![shared::dispatch(call, sizes, *tile)]));
        }
    }
    for split in SplitK::of(sizes, tiles) {
        variants.push(Variant::new(split.name, split.dispatches(call, sizes)));
    }
    variants
}

fn naive(call: &OpCall, sizes: Sizes) -> Dispatch {
    let count = call.output_len(0);
    let (a_row, a_step) = sizes.a_strides();
    let (b_step, b_column) = sizes.b_strides();
    let Sizes { m, n, k, .. } = sizes;
    let accumulate = usize::from(call.accumulates());
    let params = [count, m, n, k, a_row, a_step, b_step, b_column, accumulate];
    let Epilogue { text: store, operands } = epilogue::of(call, OPERANDS.len());
    Dispatch {
        shader: Shader::new("matmul", "naive").with_operands(sizes.precision).with_text(&store),
        operands: [&OPERANDS[..], &operands].concat(),
        params: params.map(|word| word as u32).to_vec(),
        groups: grid(count, 64),
    }
}

fn tiled(call: &OpCall, sizes: Sizes, tile: RegisterTile) -> Dispatch {
    tiled_in_parts(call, sizes, tile, [1, sizes.k])
}

/// Returns the dispatch that writes the products of `parts` parts of the sum, of `terms` terms
/// each: (parts, batch, m, n).
fn tiled_in_parts(
    call: &OpCall,
    sizes: Sizes,
    tile: RegisterTile,
    [parts, terms]: [usize; 2],
) -> Dispatch {
    let (down, across) = sizes.tiles(tile);
    let Sizes { batch, m, n, k, transpose_a, transpose_b, .. } = sizes;
    let tiles = parts * batch * down * across;
    let Epilogue { text: store, operands } = epilogue::of(call, OPERANDS.len());
    let text = tile::text(tile, transpose_a, transpose_b, &store);
    let accumulate = usize::from(call.accumulates());
    let params = [tiles, down * across, across, m, n, k, accumulate, batch, terms];
    Dispatch {
        shader: Shader::emitted(tile.name, "tile", text).with_operands(sizes.precision),
        operands: [&OPERANDS[..], &operands].concat(),
        params: params.map(|word| word as u32).to_vec(),
        groups: grid(tiles, WORKGROUP),
    }
}

/// Returns the cost: a multiplication and an addition per term of each sum.
pub fn cost(call: &OpCall) -> Cost {
    let Sizes { batch, m, n, k, .. } = Sizes::of(call);
    Cost { flops: 2.0 * batch as f64 * m as f64 * n as f64 * k as f64, bytes: Cost::moved(call) }
}

/// See [`Twin::iterations`]: one per term of a sum, and one per row of the largest tile. The
/// outputs may have any shape.
pub(crate) fn iterations(call: &OpCall) -> usize {
    let x = &call.inputs[0];
    let is_transposed = Sizes::of(call).transpose_a;
    x[x.len() - if is_transposed { 2 } else { 1 }] + 16
}

/// See [`Twin::independent_axes`]: rows of `a`, and columns of `b`.
fn independent_axes(call: &OpCall) -> Vec<IndependentAxis> {
    let &Op::MatMul { transpose_a, transpose_b } = call.op else { return Vec::new() };
    let batch = call.inputs[0].len() - 2;
    let rows = Some(batch + usize::from(transpose_a));
    let columns = Some(batch + usize::from(!transpose_b));
    let rows = IndependentAxis::of(call, vec![rows, None], vec![Some(batch)]);
    let columns = IndependentAxis::of(call, vec![None, columns], vec![Some(batch + 1)]);
    rows.into_iter().chain(columns).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{Gpu, ShaderChecks};
    use crate::dispatch::workspace_bytes;
    use crate::harness::{InputFill, generate};
    use crate::testing::{
        adapters, check, check_mixed, compare, for_each_gpu, on_gpu, reference as expected,
    };
    use crate::{DeviceClass, OwnedCall, Pipelines, RandomContext};
    use potluck_core::rng::Key;
    use potluck_core::{DType, HostTensor, Shape};
    use potluck_graph::{Accumulation, Precision, shapes};

    const TRANSPOSES: [(bool, bool); 4] =
        [(false, false), (false, true), (true, false), (true, true)];

    fn op((transpose_a, transpose_b): (bool, bool)) -> Op {
        Op::MatMul { transpose_a, transpose_b }
    }

    fn pair(first: usize, second: usize, swapped: bool) -> [usize; 2] {
        if swapped { [second, first] } else { [first, second] }
    }

    /// Dimensions of both operands, with `batch` in front unless it is 0.
    fn operands(batch: usize, m: usize, k: usize, n: usize, t: (bool, bool)) -> [Vec<usize>; 2] {
        let front: &[usize] = if batch > 0 { &[batch] } else { &[] };
        [pair(m, k, t.0), pair(k, n, t.1)].map(|matrix| [front, &matrix].concat())
    }

    fn call<'a>(op: &'a Op, dims: &[Vec<usize>; 2], accumulate: bool) -> OpCall<'a> {
        let typed = dims.clone().map(|dims| (Shape::fixed(&dims), DType::F32));
        let outputs = shapes::outputs(op, &typed).unwrap();
        OpCall {
            op,
            inputs: dims.to_vec(),
            outputs: outputs.iter().map(|(shape, _)| shape.dims().to_vec()).collect(),
            accumulate: if accumulate { Accumulation::all(1) } else { Accumulation::NONE },
            precision: Precision::F32,
            loss_scale: 1.0,
            random: RandomContext { step_key: Key::new(0), training: true },
        }
    }

    /// Checks every variant whose name contains `part` on every adapter, not only the static
    /// choice, for products `(batch, m, k, n)`. Of tiles that differ only in their loop over a
    /// stage, it checks one, because texts take long to compile.
    fn check_variants(part: &str, product: [usize; 4], transposes: (bool, bool)) {
        let has_own_loop = |name: &str| name.contains("_by_terms") || name.contains("_in_blocks");
        let is_named = |name: &str| name.contains(part) && !has_own_loop(name);
        for accumulate in [false, true] {
            check_named(&is_named, product, transposes, accumulate);
        }
    }

    /// Checks the variants of these names on every adapter. Variants that are no candidates there
    /// are compiled only without checks, because that takes long.
    fn check_named(
        is_named: &dyn Fn(&str) -> bool,
        product: [usize; 4],
        transposes: (bool, bool),
        accumulate: bool,
    ) {
        let [batch, m, k, n] = product;
        let op = op(transposes);
        let dims = operands(batch, m, k, n, transposes);
        let fill = |i: usize| generate(InputFill::Normal, dims[i].iter().product(), i);
        let inputs: [(Shape, HostTensor<f64>); 2] =
            [0, 1].map(|i| (Shape::fixed(&dims[i]), fill(i)));
        let product = expected(&op, &inputs, 1);
        let call = call(&op, &dims, accumulate);
        let start = if accumulate { 0.25 } else { f32::NAN };
        let add = |c: &f64| if accumulate { c + 0.25 } else { *c };
        let sum: Vec<Vec<f64>> = product.iter().map(|c| c.iter().map(add).collect()).collect();
        for_each_gpu(|gpu, pipelines| {
            let is_unchecked = gpu.checks == ShaderChecks::Disabled;
            let own = Caps::of(gpu);
            let caps = if is_unchecked { own.with_all_that_run() } else { own };
            let every = variants(&call, &caps).into_iter().filter(|one| is_named(&one.name));
            for Variant { name, dispatches } in every {
                let got = on_gpu(gpu, pipelines, &call, &dispatches, &inputs, start);
                let wide = got.iter().map(|c| c.iter().map(|c| f64::from(*c)).collect());
                let what = format!("{name} of {dims:?} {transposes:?} on {}", gpu.name);
                compare(&what, &wide.collect::<Vec<_>>(), &sum);
            }
        });
    }

    #[test]
    fn every_variant_is_right_at_every_edge() {
        let matrices = [[16, 3, 16], [17, 5, 31], [33, 1, 18], [4, 9, 67], [65, 8, 7]];
        for transposes in TRANSPOSES {
            for [m, k, n] in matrices {
                check_variants("matmul", [0, m, k, n], transposes);
            }
            check_variants("matmul", [3, 19, 6, 21], transposes);
        }
    }

    /// Every tile with every order of its operands, and with sizes of every kind: less than a tile
    /// and several, which overlap at the edges; vectors, scalars and one of each; sums that end
    /// with a stage or within it. Tiles differ in the kinds that meet an order, because each text
    /// takes long to compile.
    #[test]
    fn tiles_in_workgroup_memory_are_right_at_every_edge() {
        for (index, tile) in shared::TILES.into_iter().enumerate() {
            let (m, n, k) = (tile.m as usize, tile.n as usize, 4 * tile.k as usize);
            let sizes = [
                [0, 2 * m, k, 2 * n],
                [0, m + 4, k + 20, n + 36],
                [0, m + 1, k + 3, 2 * n + 5],
                [0, m / 2 + 1, k, n - 1],
                [0, m / 2 + 4, k + 4, 3 * n],
                [3, m + 2, k, n + 4],
                [2, m, k + 5, n / 2 + 3],
                [3, m - 8, k + 16, n + 1],
            ];
            // A fault of another loop over a stage shows in any order.
            let orders = if tile.by_terms || tile.in_blocks { 1 } else { TRANSPOSES.len() };
            for (order, transposes) in TRANSPOSES.into_iter().take(orders).enumerate() {
                for at in 0..2 {
                    let product = sizes[(2 * (order + index) + at) % sizes.len()];
                    let accumulate = (order + at) % 2 == 1;
                    check_named(&|name| name == tile.name, product, transposes, accumulate);
                }
            }
        }
    }

    #[test]
    fn few_rows_or_columns_are_right_with_either_neighbours() {
        let matrices = [[1, 1, 1], [1, 37, 300], [8, 129, 97], [65, 70, 3], [2, 5, 2]];
        for transposes in TRANSPOSES {
            for [m, k, n] in matrices {
                check_variants("matmul", [0, m, k, n], transposes);
            }
            check_variants("matmul", [3, 2, 40, 11], transposes);
            check_variants("matmul", [2, 45, 9, 1], transposes);
        }
    }

    /// Parts of equal and of unequal lengths, with whole tiles and with tiles that overlap, with
    /// vectors and with scalars.
    #[test]
    fn partials_of_long_sums_are_added_at_every_edge() {
        let products = [
            [0, 64, 1024, 128],
            [2, 129, 1100, 131],
            [0, 132, 1028, 68],
            [0, 66, 1537, 140],
            [0, 256, 1040, 129],
            [0, 128, 1600, 136],
            [0, 17, 2048, 16],
            [2, 19, 2060, 33],
        ];
        for (index, product) in products.into_iter().enumerate() {
            let is_split = |name: &str| name.ends_with("_split_k");
            check_named(&is_split, product, TRANSPOSES[index % 4], index % 2 == 1);
        }
    }

    /// The workspace is bounded, parts are long enough to be worth their traffic, and there are no
    /// more parts than fill a device.
    #[test]
    fn sums_are_split_where_tiles_are_few() {
        let split = |m: usize, k: usize, n: usize| {
            let (transpose_a, transpose_b) = (true, false);
            let sizes = Sizes {
                batch: 1,
                m,
                n,
                k,
                transpose_a,
                transpose_b,
                row_sums: false,
                precision: Precision::F32,
            };
            let op = op((true, false));
            let call = call(&op, &operands(0, m, k, n, (true, false)), false);
            let each = |split: SplitK| {
                let bytes = workspace_bytes(&split.dispatches(&call, &sizes));
                (split.name.trim_end_matches("_split_k"), split.workgroups(&sizes), bytes)
            };
            SplitK::of(&sizes, &shared::TILES).into_iter().map(each).collect::<Vec<_>>()
        };
        let mib = 1 << 20;
        assert_eq!(
            split(768, 8192, 768),
            [
                ("matmul_shared_128x128", 36 * 8, 8 * 9 * mib / 4),
                ("matmul_shared_128x128_by_terms", 36 * 8, 8 * 9 * mib / 4),
                ("matmul_shared_64x64", 144 * 3, 3 * 9 * mib / 4),
            ]
        );
        assert_eq!(
            split(512, 2048, 512),
            [
                ("matmul_shared_128x128", 16 * 4, 4 * mib),
                ("matmul_shared_128x128_by_terms", 16 * 4, 4 * mib),
                ("matmul_shared_64x64", 64 * 4, 4 * mib),
            ]
        );
        assert_eq!(split(768, 1023, 768), []);
        assert_eq!(split(8192, 8192, 768), []);
        assert_eq!(split(63, 8192, 768), []);
    }

    /// On GPUs no call runs a kernel that was shaped by drivers on a processor, timed or not.
    #[test]
    fn static_choices_on_gpus_use_workgroup_memory() {
        let class = DeviceClass::Hardware;
        let gpu = Caps { class, workgroup_bytes: 16 << 10, subgroups: false, ..Caps::EVERY };
        let intel = Caps { registers: 128, ..gpu };
        let op = op((false, true));
        let named_on = |gpu: &Caps, m: usize, k: usize, n: usize| {
            let inputs = vec![vec![m, k], vec![n, k]];
            let random = RandomContext { step_key: Key::new(1), training: true };
            let owned = OwnedCall::new(op.clone(), inputs, random).unwrap();
            let call = owned.call();
            let chosen = dispatch(&call, gpu);
            let variants = variants(&call, gpu);
            let spills = |name: &str| name.contains("16x16") || name.contains("16x8");
            assert!(variants.iter().all(|variant| !spills(&variant.name)), "{m} {k} {n}");
            variants.into_iter().find(|variant| variant.dispatches == chosen).unwrap().name
        };
        let named = |m: usize, k: usize, n: usize| named_on(&gpu, m, k, n);
        // The products of a GPT-2 step, and of one token.
        assert_eq!(named(8192, 768, 2304), "matmul_shared_128x128");
        assert_eq!(named(8192, 768, 50257), "matmul_shared_128x128");
        assert_eq!(named(768, 8192, 768), "matmul_shared_128x128_split_k");
        assert_eq!(named(768, 1000, 768), "matmul_shared_128x64");
        assert_eq!(named(1, 768, 2304), "matmul_vector_64");
        assert_eq!(named(1, 3072, 768), "matmul_vector_128");
        assert_eq!(named(1, 768, 50257), "matmul_vector");
        // Too few tiles of any size, and long sums.
        assert_eq!(named(64, 4096, 64), "matmul_shared_32x32_split");
        assert_eq!(named(12, 3, 12), "matmul_tile_4x4");
        // On a device with few registers, tiles whose terms are a loop.
        assert_eq!(named_on(&intel, 8192, 768, 2304), "matmul_shared_128x128_by_terms");
        let split = "matmul_shared_128x128_by_terms_split_k";
        assert_eq!(named_on(&intel, 768, 8192, 768), split);
        assert_eq!(named_on(&intel, 768, 1000, 768), "matmul_shared_128x64");
    }

    #[test]
    fn variants_are_those_that_may_win() {
        let op = op((false, false));
        let names = |m, k, n| {
            let call = call(&op, &operands(0, m, k, n, (false, false)), false);
            variants(&call, &Caps::EVERY)
                .into_iter()
                .map(|variant| variant.name)
                .collect::<Vec<_>>()
        };
        assert_eq!(names(16, 3, 16).len(), 1 + TILES.len());
        assert_eq!(names(15, 3, 9), ["matmul_naive", "matmul_tile_8x8", "matmul_tile_4x4"]);
        let vectors = ["matmul_naive", "matmul_vector", "matmul_vector_64", "matmul_vector_128"];
        assert_eq!(names(16, 3, 7), [&vectors[..], &["matmul_tile_4x4"]].concat());
        assert_eq!(names(3, 3, 7), vectors[..2]);
        assert_eq!(names(3, 3, 100), ["matmul_naive", "matmul_vector", "matmul_tile_1x8"]);
        assert_eq!(names(100, 3, 1), [&vectors[..], &["matmul_tile_8x1"]].concat());
        assert_eq!(names(65, 255, 65).len(), TILES.len() + shared::TILES.len());
        let mut all = names(65, 256, 65);
        assert_eq!(all.len(), 1 + TILES.len() + shared::TILES.len());
        assert_eq!(names(32 * 32, 256, 32 * 32).len(), all.len() - 1);
        all.sort();
        all.dedup();
        assert_eq!(all.len(), 1 + TILES.len() + shared::TILES.len());
    }

    #[test]
    fn small_and_odd_products() {
        for transposes in TRANSPOSES {
            for (m, k, n) in [(1, 1, 1), (1, 37, 5), (7, 1, 1), (3, 64, 2), (5, 129, 97)] {
                let [a, b] = operands(0, m, k, n, transposes).map(|dims| Shape::fixed(&dims));
                check(op(transposes), &[(a, InputFill::Normal), (b, InputFill::Normal)], 1);
            }
        }
    }

    #[test]
    fn the_batch_may_be_rows_or_summed_over() {
        for rows in 1..=7 {
            let x = (Shape::batched(&[9, 33]), InputFill::Normal);
            let w = |dims: &[usize]| (Shape::fixed(dims), InputFill::Normal);
            check(op((false, false)), &[x.clone(), w(&[33, 20])], rows);
            check(op((false, true)), &[x.clone(), w(&[20, 33])], rows);
            check(op((true, false)), &[x, (Shape::batched(&[9, 17]), InputFill::Normal)], rows);
        }
    }

    #[test]
    fn batches_of_products() {
        for rows in [1, 2, 7] {
            for transposes in TRANSPOSES {
                let shapes = operands(3, 13, 10, 11, transposes).map(|dims| Shape::batched(&dims));
                check(op(transposes), &shapes.map(|shape| (shape, InputFill::Normal)), rows);
            }
        }
    }

    #[test]
    fn products_of_a_small_gpt() {
        let rows = 12;
        let x = |c: usize| (Shape::batched(&[64, c]), InputFill::Normal);
        let w = |n: usize, c: usize| (Shape::fixed(&[n, c]), InputFill::Normal);
        check(op((false, true)), &[x(128), w(384, 128)], rows);
        check(op((false, true)), &[x(128), w(65, 128)], rows);
        check(op((false, false)), &[x(65), w(65, 128)], rows);
        check(op((true, false)), &[x(65), x(128)], rows);
        check(op((true, false)), &[x(128), x(384)], rows);
    }

    #[test]
    fn fast_products_are_the_same_for_any_number_of_threads() {
        let op = op((true, false));
        let dims = operands(0, 130, 301, 70, (true, false));
        let call = call(&op, &dims, false);
        let x: Vec<f32> = (0..301 * 200).map(|i| (i as f32).sin()).collect();
        let (a, b) = x.split_at(301 * 130);
        let run = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let mut c = vec![0.0f32; 130 * 70];
            pool.install(|| {
                fast(&call, &[HostTensorView::Float(a), HostTensorView::Float(b)], &mut [&mut c])
            });
            c
        };
        let one = run(1);
        assert!(one.iter().any(|c| *c != 0.0));
        assert!(one == run(2) && one == run(3));
    }

    #[test]
    fn cost_counts_every_term_twice() {
        let op = op((false, false));
        let call = call(&op, &operands(2, 3, 5, 7, (false, false)), false);
        assert_eq!(cost(&call).flops, 2.0 * 2.0 * 3.0 * 5.0 * 7.0);
        assert_eq!(cost(&call).bytes, 4.0 * 2.0 * (15.0 + 35.0 + 21.0));
    }

    /// Operands of both orders in every kernel, smaller than a tile and of several tiles of each
    /// kind, with vectors and without, and sums that end within a stage or are split.
    #[test]
    fn products_in_mixed_precision_multiply_rounded_operands() {
        let products = [[5, 7, 3], [37, 33, 29], [132, 100, 140], [130, 1057, 68]];
        for (index, [m, k, n]) in products.into_iter().enumerate() {
            let transposes = TRANSPOSES[index % TRANSPOSES.len()];
            let [a, b] = operands(0, m, k, n, transposes);
            let input = |dims: Vec<usize>| (Shape::fixed(&dims), InputFill::Normal);
            check_mixed(op(transposes), &[input(a), input(b)], 1);
        }
    }

    /// Tiles of cooperative matrices that need more memory or invocations than the portable limits,
    /// with which the other tests open devices.
    #[test]
    fn cooperative_matrices_agree_at_every_edge() {
        let products = [[132, 100, 140], [130, 67, 268], [256, 1057, 64], [129, 2048, 132]];
        for adapter in adapters() {
            let gpu = Gpu::open(&adapter, ShaderChecks::Disabled, Precision::Mixed)
                .unwrap_or_else(|error| panic!("{error}"));
            if gpu.cooperative.is_none() {
                continue;
            }
            let mut pipelines = Pipelines::default();
            for (product, transposes) in products.into_iter().zip(TRANSPOSES) {
                cooperative_variants_agree(&gpu, &mut pipelines, product, transposes);
            }
        }
    }

    fn cooperative_variants_agree(
        gpu: &Gpu,
        pipelines: &mut Pipelines,
        [m, k, n]: [usize; 3],
        transposes: (bool, bool),
    ) {
        let (op, dims) = (op(transposes), operands(0, m, k, n, transposes));
        let call = OpCall { precision: Precision::Mixed, ..call(&op, &dims, false) };
        let inputs = dims.clone().map(|dims| {
            let values = generate(InputFill::Normal, dims.iter().product(), dims[0]);
            (Shape::fixed(&dims), values)
        });
        let views = [&inputs[0].1, &inputs[1].1];
        let right = crate::harness::host(&call, &views, 0.0, reference::<f64>);
        let every = variants(&call, &Caps::of(gpu)).into_iter();
        let cooperative = Vec::from_iter(every.filter(|one| one.name.contains("_coop")));
        assert!(!cooperative.is_empty());
        for Variant { name, dispatches } in cooperative {
            let got = on_gpu(gpu, pipelines, &call, &dispatches, &inputs, f32::NAN);
            let got = got[0].iter().map(|value| f64::from(*value));
            let nmse = crate::harness::nmse(got, &right[0]);
            assert!(nmse < 1e-9, "{name} of {dims:?} on {}: NMSE {nmse:.2e}", gpu.name);
        }
    }
}

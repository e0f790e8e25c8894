//! Matrix products through workgroup memory: the available tiles, and the WGSL that is prepended
//! to `shaders/matmul_shared.wgsl` for each.
//!
//! With the register tiles of [`super::tile`], every invocation reads its operands from memory;
//! here a whole workgroup reads them once. A GPU with hundreds of gigabytes per second and tens
//! of TFLOP/s needs this. On software adapters, where a barrier is costly and all memory is cache,
//! register tiles are faster, so these tiles are candidates on hardware only.
//!
//! Conditions that are known when the text is generated are constants in it: whether the call
//! accumulates, whether a matrix is smaller than a tile, whether the sum ends within a stage, and
//! whether rows can be read and stored as vectors. With AMD's compiler for RDNA 3 and whole tiles
//! of vectors, these constants reduce 128x128 from 2,399 instructions and 132 registers to 1,720
//! and 108, and 64x64 from 1,502 and 96 to 1,042 and 72.
//!
//! Rows that are no whole vectors, such as logits of GPT-2's 50,257 tokens, are read and stored by
//! elements: per invocation and stage 16 loads instead of 4, outside the hot loop, which is the
//! same. AMD's compiler estimates the arithmetic of a head's products at 0.99 to 1.03 times the
//! arithmetic with a vocabulary that is padded to whole stages (128x128;
//! `tests/compiler/heads.rs`), so logits are not padded.
//!
//! A stage has one place in workgroup memory, and two barriers. With two places and one barrier the
//! hot loop differs by two instructions in 1,135, but 32 KiB per workgroup leave 8 waves per SIMD
//! of RDNA 3 instead of 14 (64x64: 8 instead of 16), which hide more latency than a barrier costs.
//!
//! The kernel is a file and not generated text: its sums are matrices of 4 x 4, so that a step of
//! 8 x 8 per invocation takes four lines and needs no driver to unroll it. Sums in arrays and
//! loops over them run at a quarter of that speed on SwiftShader and at 0.6 of it on llvmpipe;
//! sixteen named vectors, to which drivers lower the matrices, run at the same speed.

use super::sizes::{OPERANDS, Sizes};
use crate::device::CooperativeSquare;
use crate::ops::epilogue::{self, Epilogue, EpilogueStep};
use crate::ops::fused_vectors;
use crate::{Caps, Dispatch, OpCall, Operand, Shader, dispatch, source};
use potluck_graph::{Accumulation, Precision};

/// Tile of the output that one workgroup computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkgroupTile {
    /// Name of the kernel variant, also used in labels.
    pub name: &'static str,
    /// Rows of the tile.
    pub m: u32,
    /// Columns of the tile.
    pub n: u32,
    /// Terms of the sum per stage, or per step of a stage of cooperative matrices.
    pub k: u32,
    /// Rows per invocation, 4 or 8.
    pub rows: u32,
    /// Columns per invocation, 4 or 8.
    pub columns: u32,
    /// Invocations that share each output; each of them sums one slice of the staged terms.
    pub split: u32,
    /// True if the terms of a stage are a loop that no compiler unrolls.
    pub by_terms: bool,
    /// True if neighbouring invocations multiply blocks of 4 by 8 quads, false for whole rows.
    pub in_blocks: bool,
    /// Registers of 32 bits that an invocation needs without spilling, as counted by Intel's
    /// compiler.
    pub registers: u32,
    /// Cooperative matrices that multiply instead of single invocations.
    pub(crate) cooperative: Option<CooperativeTile>,
}

/// Division of a tile over subgroups; each multiplies 2 x 4 cooperative matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CooperativeTile {
    matrix: CooperativeSquare,
    units: u32,
    /// Steps of a stage; each reads [`WorkgroupTile::k`] terms.
    steps: u32,
}

/// Available tiles, the largest first.
///
/// 8 x 8 sums per invocation, the terms of a stage written out and the values of the next stage
/// take 180 registers of Intel's GPUs, which have 128: its open driver spills and fills 178 times.
/// By terms they take 117, and nothing is spilled; other compilers then lose 9 to 16 points of the
/// share of multiply-adds.
pub const TILES: [WorkgroupTile; 7] = [
    tile("matmul_shared_128x128", [128, 128, 16], [8, 8]).with_registers(180),
    tile("matmul_shared_128x128_by_terms", [128, 128, 16], [8, 8]).by_terms(),
    tile("matmul_shared_128x128_in_blocks", [128, 128, 16], [8, 8]).with_registers(180).in_blocks(),
    tile("matmul_shared_128x64", [128, 64, 16], [8, 4]),
    tile("matmul_shared_64x64", [64, 64, 16], [8, 4]),
    tile("matmul_shared_32x32", [32, 32, 16], [4, 4]),
    tile("matmul_shared_32x32_split", [32, 32, 64], [4, 4]).split(4),
];

/// Maximum number of tiles of a product with split sums: with more, a device is busy without
/// splitting.
const SPLIT_TILES_MAX: usize = 512;
/// Minimum number of stages (`WorkgroupTile::k` terms each) of a split sum.
const SPLIT_STAGES_MIN: usize = 4;

/// Returns a tile of m by n with stages of k terms; `each` are the rows and columns per invocation.
pub const fn tile(name: &'static str, [m, n, k]: [u32; 3], each: [u32; 2]) -> WorkgroupTile {
    let [rows, columns] = each;
    WorkgroupTile {
        name,
        m,
        n,
        k,
        rows,
        columns,
        split: 1,
        by_terms: false,
        in_blocks: false,
        registers: 128,
        cooperative: None,
    }
}

/// Tiles of cooperative matrices, the largest first: the name, the units down and across, the most
/// terms per read, and the reads per stage.
///
/// For (8192, 768) (3072, 768)^T on an NVIDIA H200, stages of 64 terms reach 1.2 times the rate of
/// stages of 32.
const COOPERATIVE_TILES: [(&str, [u32; 2], u32, u32); 3] = [
    ("matmul_coop_large_deep", [4, 2], 32, 2),
    ("matmul_coop_large", [4, 2], 32, 1),
    ("matmul_coop_small", [2, 1], 32, 2),
];

/// Returns the tiles of cooperative matrices that a device can run for a call: none in f32.
pub fn cooperative_tiles(call: &OpCall, caps: &Caps) -> Vec<WorkgroupTile> {
    let mut tiles = Vec::new();
    if let Some(matrix) = caps.cooperative
        && call.precision == Precision::Mixed
    {
        for (name, units, terms, steps) in COOPERATIVE_TILES {
            let tile = WorkgroupTile::cooperative(name, matrix, units, [terms, steps]);
            if tile.can_run(caps) {
                tiles.push(tile);
            }
        }
    }
    tiles
}

/// Memory layout of an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Layout {
    transposed: bool,
    /// True if its rows, as stored, are multiples of four elements, so that it can be read as
    /// vectors.
    vectors: bool,
}

impl WorkgroupTile {
    /// Returns the tile of these units down and across, in stages of `steps` times `terms` terms,
    /// or fewer if a workgroup has fewer invocations than blocks to copy.
    fn cooperative(
        name: &'static str,
        matrix: CooperativeSquare,
        [down, across]: [u32; 2],
        [terms, steps]: [u32; 2],
    ) -> Self {
        let units = down * across;
        let [m, n] = [2 * down * matrix.size, 4 * across * matrix.size];
        let copied = 4 * (4 * units * matrix.subgroups[1] / m.max(n));
        let tile = tile(name, [m, n, terms.min(copied)], [4, 4]);
        Self { cooperative: Some(CooperativeTile { matrix, units, steps }), ..tile }
    }

    fn workgroup_bytes(self) -> u32 {
        let Self { m, n, k, .. } = self;
        match self.cooperative {
            None => 4 * k * (m + n),
            Some(CooperativeTile { matrix, units, steps }) => {
                let [least, most] = matrix.subgroups;
                let patch = matrix.size * matrix.size;
                let patches = (units * most / least * patch).max(m * k / 4);
                2 * (steps * k + 8) * (m + n) + 4 * patches
            }
        }
    }

    /// Returns true if a device has memory and invocations for the tile, and if a stage is whole
    /// matrices.
    fn can_run(self, caps: &Caps) -> bool {
        let Some(CooperativeTile { matrix, units, steps }) = self.cooperative else { return true };
        let is_whole = self.k >= 4 && (steps * self.k).is_multiple_of(matrix.size);
        let invocations = units * matrix.subgroups[1];
        is_whole
            && invocations <= caps.invocations
            && self.workgroup_bytes() <= caps.workgroup_bytes
    }

    /// Entry point of this tile in a file whose entry point of plain tiles is `entry`.
    fn entry(self, entry: &'static str) -> &'static str {
        if self.cooperative.is_some() { "cooperative_tile" } else { entry }
    }

    /// Returns the shader of a file with the entry point `entry` that computes such tiles, with the
    /// constants of its snippets, for products of this precision.
    pub fn shader(self, file: &'static str, entry: &'static str, precision: Precision) -> Shader {
        let shader = self.constants(Shader::new(file, self.entry(entry)));
        if self.cooperative.is_some() {
            with_snippets(shader.with_cooperative_enables(), "product_coop")
        } else {
            with_snippets(shader.with_operands(precision), "product_tile")
        }
    }

    /// Tile with sums that are split between `split` invocations.
    const fn split(self, split: u32) -> Self {
        Self { split, ..self }
    }

    /// Returns the tile with the terms of a stage in a loop.
    pub const fn by_terms(self) -> Self {
        Self { by_terms: true, ..self }
    }

    const fn in_blocks(self) -> Self {
        Self { in_blocks: true, ..self }
    }

    /// Returns the tile with this number of registers.
    pub const fn with_registers(self, registers: u32) -> Self {
        Self { registers, ..self }
    }

    /// Returns true if a device has enough registers for the tile, so that it may be chosen without
    /// measuring.
    pub fn suits(self, caps: &Caps) -> bool {
        self.registers <= caps.registers
    }

    /// Returns true if the tile is a candidate: products that fill at most half of it, down or
    /// across, leave most invocations without work.
    pub fn fits(self, sizes: &Sizes) -> bool {
        let few = self.count(sizes) <= SPLIT_TILES_MAX;
        let long = sizes.k >= SPLIT_STAGES_MIN * self.k as usize;
        let filled = 2 * sizes.m > self.m as usize && 2 * sizes.n > self.n as usize;
        filled && (self.split == 1 || (few && long))
    }

    /// Returns the shader with the constants of `shaders/lib/product_tile.wgsl` or
    /// `product_coop.wgsl`.
    fn constants(self, shader: Shader) -> Shader {
        let shader =
            shader.with_const("BM", self.m).with_const("BN", self.n).with_const("BK", self.k);
        if let Some(CooperativeTile { matrix, units, steps }) = self.cooperative {
            return shader
                .with_const("STEPS", steps)
                .with_const("MATRIX", matrix.size)
                .with_const("UNITS", units)
                .with_const("SUBGROUP_MIN", matrix.subgroups[0])
                .with_const("SUBGROUP_MAX", matrix.subgroups[1])
                .with_text(&matrix_types(matrix.size));
        }
        shader
            .with_const("ROWS", self.rows)
            .with_const("COLUMNS", self.columns)
            .with_const("SPLIT", self.split)
            .with_const("BY_TERMS", u32::from(self.by_terms))
            .with_const("IN_BLOCKS", u32::from(self.in_blocks))
    }

    /// Returns the number of tiles of all products.
    pub fn count(self, sizes: &Sizes) -> usize {
        let (down, across) = self.tiles(sizes);
        sizes.batch * down * across
    }

    /// Number of tiles down and across one product.
    fn tiles(self, sizes: &Sizes) -> (usize, usize) {
        (sizes.m.div_ceil(self.m as usize), sizes.n.div_ceil(self.n as usize))
    }
}

/// Returns the WGSL of the types of cooperative matrices of this size: MatrixA, MatrixB and
/// MatrixC.
pub(crate) fn matrix_types(size: u32) -> String {
    let types = [("A", "f16"), ("B", "f16"), ("C", "f32")].map(|(role, scalar)| {
        format!("alias Matrix{role} = coop_mat{size}x{size}<{scalar}, {role}>;\n")
    });
    types.concat()
}

fn with_snippets(shader: Shader, tile: &str) -> Shader {
    shader.with_text(source::snippet("tile_blocks")).with_text(source::snippet(tile))
}

/// Returns the shader of a tile for a product of these sizes, with constants for the conditions
/// that are known here.
fn shader(tile: WorkgroupTile, sizes: &Sizes, output: &Output, is_split: bool) -> Shader {
    let WorkgroupTile { m, n, k, .. } = tile;
    let [a, b] = layouts(sizes);
    let is_smaller = sizes.m < m as usize || sizes.n < n as usize;
    let put_row_sums = if !sizes.row_sums {
        put_row_sums(None)
    } else if is_split {
        "fn put_row_sums(at: u32, totals: vec4f) { c[at / 4u] = totals; }\n".into()
    } else {
        put_row_sums(Some((OPERANDS.len(), output.accumulates)))
    };
    let text = [
        operand("a", 0, a.vectors),
        operand("b", 1, b.vectors),
        output.text.clone(),
        store_some(output.vectors),
        put_row_sums,
    ];
    tile.shader("matmul_shared", "shared_tile", sizes.precision)
        .with_const("TRANSPOSE_A", u32::from(a.transposed))
        .with_const("TRANSPOSE_B", u32::from(b.transposed))
        .with_const("EDGES", u32::from(is_smaller))
        .with_const("EDGE_K", u32::from(!sizes.k.is_multiple_of(k as usize)))
        .with_const("SPLIT_K", u32::from(is_split))
        .with_const("ROW_SUMS", u32::from(sizes.row_sums))
        .with_text(&text.concat())
}

/// Returns the WGSL of a function that stores four neighbouring sums over rows at `at`. `binding`
/// is the number of their binding, and true if the function adds to its values; without a binding,
/// the function stores nothing.
pub(crate) fn put_row_sums(binding: Option<(usize, bool)>) -> String {
    let Some((binding, accumulates)) = binding else {
        return "fn put_row_sums(at: u32, totals: vec4f) {}\n".into();
    };
    let assign = if accumulates { "+=" } else { "=" };
    format!(
        "@group(0) @binding({binding}) var<storage, read_write> row_sums: array<vec4f>;\n\
         fn put_row_sums(at: u32, totals: vec4f) {{ row_sums[at / 4u] {assign} totals; }}\n"
    )
}

/// Returns the layouts of both operands. Stored rows are contiguous, and so are the matrices of a
/// batch: if rows are multiples of four, every group of four elements starts at a multiple of
/// four.
fn layouts(sizes: &Sizes) -> [Layout; 2] {
    let &Sizes { m, n, k, transpose_a, transpose_b, .. } = sizes;
    let a_row = if transpose_a { m } else { k };
    let b_row = if transpose_b { k } else { n };
    [
        Layout { transposed: transpose_a, vectors: a_row.is_multiple_of(4) },
        Layout { transposed: transpose_b, vectors: b_row.is_multiple_of(4) },
    ]
}

/// Returns the WGSL of the binding of an operand, and of the functions that read four adjacent
/// elements of it: all, or the first `count`, and zeros instead of the others.
pub fn operand(name: &str, binding: usize, vectors: bool) -> String {
    let element = if vectors { "vec4f" } else { "f32" };
    let declaration =
        format!("@group(0) @binding({binding}) var<storage, read> {name}: array<{element}>;\n");
    if vectors {
        return format!(
            "{declaration}\
             fn {name}_four(at: u32) -> vec4f {{ return {name}[at / 4u]; }}\n\
             fn {name}_some(at: u32, count: u32) -> vec4f {{\n    \
                 let has = count > 0u;\n    \
                 return select(vec4f(), {name}[select(0u, at / 4u, has)], has);\n\
             }}\n"
        );
    }
    let four = [0, 1, 2, 3].map(|i| format!("{name}[at + {i}u]")).join(", ");
    let some = [0, 1, 2, 3].map(|i| format!("{name}_one(at + {i}u, count > {i}u)")).join(", ");
    format!(
        "{declaration}\
         fn {name}_four(at: u32) -> vec4f {{\n    return vec4f({four});\n}}\n\
         fn {name}_one(at: u32, has: bool) -> f32 {{\n    \
             return select(0.0, {name}[select(0u, at, has)], has);\n\
         }}\n\
         fn {name}_some(at: u32, count: u32) -> vec4f {{\n    return vec4f({some});\n}}\n"
    )
}

/// Output of a kernel, to which it stores finished values.
pub struct Output {
    /// WGSL of the bindings of `c` and of the steps, and of `store4` or `store`.
    pub text: String,
    /// Operands of the bindings of the steps.
    pub operands: Vec<Operand>,
    /// True if values are stored as vectors: if rows are multiples of four, and if the operands of
    /// the steps can be read as vectors.
    pub(crate) vectors: bool,
    /// True if values are added to the contents of the output.
    accumulates: bool,
}

impl Output {
    /// Returns the output of a call through these steps, `c` as the binding before `first` and the
    /// operands of the steps from there on.
    pub fn of(call: &OpCall, steps: &[EpilogueStep], n: usize, first: usize) -> Self {
        let mut of_vectors = None;
        if n.is_multiple_of(4) {
            of_vectors = fused_vectors::of_steps(call, steps, first);
        }
        let (Epilogue { text, operands }, element) = match of_vectors {
            Some(epilogue) => (epilogue, "vec4f"),
            None => (epilogue::of_steps(call, steps, first), "f32"),
        };
        Self {
            text: epilogue::output_binding(first - 1, element) + &text,
            operands,
            vectors: element == "vec4f",
            accumulates: call.accumulates(),
        }
    }
}

/// Returns the WGSL of the function that stores some of four adjacent values: all or none if they
/// are vectors.
pub(crate) fn store_some(vectors: bool) -> String {
    let mut body = String::new();
    if vectors {
        body += "    if (begin == 0u && end == 4u) { store4(at / 4u, totals); }\n";
    } else {
        for (i, field) in ["x", "y", "z", "w"].into_iter().enumerate() {
            body += &format!(
                "    if (begin <= {i}u && end > {i}u) {{ store(at + {i}u, totals.{field}); }}\n"
            );
        }
    }
    format!("fn store_some(at: u32, begin: u32, end: u32, totals: vec4f) {{\n{body}}}\n")
}

/// Returns the dispatch of a call with a tile of any size.
pub fn dispatch(call: &OpCall, sizes: &Sizes, tile: WorkgroupTile) -> Dispatch {
    let output = Output::of(call, &epilogue::steps(call), sizes.n, OPERANDS.len());
    let row_sums: &[Operand] = if sizes.row_sums { &[Operand::Output(1)] } else { &[] };
    Dispatch {
        shader: shader(tile, sizes, &output, false),
        operands: [&OPERANDS[..], &output.operands, row_sums].concat(),
        params: params(tile, sizes, 1, sizes.k),
        groups: dispatch::grid(tile.count(sizes), 1),
    }
}

/// Returns the dispatch that writes the products of `parts` parts of the sum, of `terms` terms
/// each, to `partials`: (parts, batch, m, n), and behind them the sums over rows of each part. The
/// terms must be a multiple of the tile's.
pub(crate) fn dispatch_split_k(
    call: &OpCall,
    sizes: &Sizes,
    tile: WorkgroupTile,
    [parts, terms]: [usize; 2],
    partials: Operand,
) -> Dispatch {
    let partial_call = OpCall { accumulate: Accumulation::NONE, ..call.clone() };
    let output = Output::of(&partial_call, &[], sizes.n, OPERANDS.len());
    let [a, b, _] = OPERANDS;
    Dispatch {
        shader: shader(tile, sizes, &output, true),
        operands: vec![a, b, partials],
        params: params(tile, sizes, parts, terms),
        groups: dispatch::grid(parts * tile.count(sizes), 1),
    }
}

fn params(tile: WorkgroupTile, sizes: &Sizes, parts: usize, terms: usize) -> Vec<u32> {
    let (down, across) = tile.tiles(sizes);
    let &Sizes { batch, m, n, k, .. } = sizes;
    let tiles = parts * tile.count(sizes);
    let params = [tiles, down * across, down, across, m, n, k, batch, terms];
    params.map(|word| word as u32).to_vec()
}

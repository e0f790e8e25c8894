//! Attention in mixed precision by cooperative matrices: the available sizes of workgroups, and the
//! entry points that are appended to the functions of `shaders/attention_coop.wgsl`.
//!
//! The text of an entry point is generated because its matrices have names: the matrices of own
//! rows, as many as the columns of a head take, and the matrices of the sums stay in registers over
//! the whole loop, where not every driver keeps arrays. Devices differ only in the numbers of these
//! matrices and in the size of a matrix.

use super::AttentionSizes;
use super::shaders::{AttentionKernel, kernels};
use super::tiles;
use crate::device::CooperativeSquare;
use crate::dispatch::grid;
use crate::ops::matmul::shared::matrix_types;
use crate::{Caps, Dispatch, OpCall};
use potluck_graph::{Op, Precision};

/// Size of the workgroups of attention by cooperative matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CooperativeAttention {
    /// Name of the kernel variant: the own rows of a workgroup, of matrices of 16 x 16.
    pub name: &'static str,
    /// Matrices of own rows.
    down: u32,
    /// Matrices of the streamed rows of a block, at least; one for each unit across.
    streamed: u32,
}

/// Available sizes, the smallest first. Large ones read less; small ones give short sequences more
/// workgroups, and more of them fit on a multiprocessor of a GPU.
const TILES: [CooperativeAttention; 3] = [
    CooperativeAttention { name: "attention_coop_32", down: 2, streamed: 2 },
    CooperativeAttention { name: "attention_coop_64", down: 4, streamed: 2 },
    CooperativeAttention { name: "attention_coop_128", down: 8, streamed: 1 },
];

/// The most columns of a head.
const COLUMNS_MAX: usize = 128;

/// The most matrices of each sum that a unit has.
const EACH_MAX: usize = 4;

/// Workgroups that keep a large GPU busy.
const WORKGROUPS_MIN: usize = 128;

/// Division of a workgroup over subgroups for heads of some width, the constants of the shader.
#[derive(Clone, Copy)]
struct UnitArrangement {
    matrix: CooperativeSquare,
    down: u32,
    across: u32,
    /// Matrices of the streamed rows of a unit.
    scores: u32,
    /// Matrices of the columns of a unit.
    each: u32,
    /// Matrices of the columns of a head.
    steps: u32,
}

/// Sources and sums of an entry point.
struct Pass {
    entry: &'static str,
    /// Sources of own rows.
    own: &'static [&'static str],
    /// Sources of streamed rows.
    streamed: [&'static str; 2],
    /// Sums of products with streamed rows.
    sums: &'static [Sum],
}

/// Sums of streamed rows times weights or slopes.
struct Sum {
    /// Number of the streamed source.
    streamed: usize,
    /// Source whose gradient they are, and their factor; `None` for the sums of y.
    gradient: Option<(&'static str, &'static str)>,
}

const PASSES: [Pass; 3] = [
    Pass {
        entry: "forward",
        own: &["Q"],
        streamed: ["K", "V"],
        sums: &[Sum { streamed: 1, gradient: None }],
    },
    Pass {
        entry: "grad_kv",
        own: &["K", "V"],
        streamed: ["Q", "DY"],
        sums: &[
            Sum { streamed: 0, gradient: Some(("K", "p.scale")) },
            Sum { streamed: 1, gradient: Some(("V", "p.factor")) },
        ],
    },
    Pass {
        entry: "grad_q",
        own: &["Q", "DY"],
        streamed: ["K", "V"],
        sums: &[Sum { streamed: 0, gradient: Some(("Q", "p.scale")) }],
    },
];

impl CooperativeAttention {
    fn arrangement(self, matrix: CooperativeSquare, d: usize) -> UnitArrangement {
        let steps = d.div_ceil(matrix.size as usize);
        let across = steps.div_ceil(EACH_MAX);
        UnitArrangement {
            matrix,
            down: self.down,
            across: across as u32,
            scores: self.streamed.div_ceil(across as u32),
            each: steps.div_ceil(across) as u32,
            steps: steps as u32,
        }
    }
}

impl UnitArrangement {
    /// The own rows of a workgroup.
    fn rows(&self) -> u32 {
        self.down * self.matrix.size
    }

    fn invocations(&self) -> u32 {
        self.down * self.across * self.matrix.subgroups[1]
    }

    /// Streamed rows of a block.
    fn block(&self) -> u32 {
        self.across * self.scores * self.matrix.size
    }

    /// Columns of a head, filled up to whole matrices of all units.
    fn width(&self) -> u32 {
        self.across * self.each * self.matrix.size
    }

    fn workgroup_bytes(&self, pass: &Pass) -> u32 {
        let rows = self.rows();
        let block = self.block();
        let operands = rows.max(2 * block) * (self.width() + 8);
        let pairs = pass.sums.len() as u32 * block * (rows + 8);
        let scores = pass.own.len() as u32 * block * (rows + 4);
        let lanes = (self.invocations() / rows).min(block / 4);
        let of_rows = if pass.entry == "forward" { (2 + lanes) * rows + 1 } else { 2 * block };
        2 * (operands + pairs) + 4 * (scores + of_rows)
    }

    /// Number of workgroups for this number of heads of each sample.
    fn workgroups(&self, sizes: &AttentionSizes, heads: usize) -> usize {
        sizes.b * heads * sizes.t.div_ceil(self.rows() as usize)
    }

    fn can_run(&self, passes: &[&Pass], caps: &Caps) -> bool {
        let bytes = passes.iter().map(|pass| self.workgroup_bytes(pass)).max().unwrap_or(0);
        let has_lanes = self.invocations() >= self.rows().max(self.block());
        has_lanes && bytes <= caps.workgroup_bytes && self.invocations() <= caps.invocations
    }
}

/// Returns the sizes that a device can run for a call: none in f32, or for heads of more than
/// [`COLUMNS_MAX`] columns.
pub(super) fn candidates(
    call: &OpCall,
    sizes: &AttentionSizes,
    caps: &Caps,
) -> Vec<CooperativeAttention> {
    let Some(matrix) = caps.cooperative else { return Vec::new() };
    if sizes.precision != Precision::Mixed || sizes.d > COLUMNS_MAX {
        return Vec::new();
    }
    let is_forward = matches!(call.op, Op::Attention(_));
    let passes: Vec<&Pass> =
        PASSES.iter().filter(|pass| (pass.entry == "forward") == is_forward).collect();
    let mut candidates = Vec::new();
    for tile in TILES {
        let arrangement = tile.arrangement(matrix, sizes.d);
        let is_filled = tile == TILES[0] || 2 * sizes.t >= arrangement.rows() as usize;
        if is_filled && arrangement.can_run(&passes, caps) {
            candidates.push(tile);
        }
    }
    candidates
}

/// Returns the size that is chosen without measuring: 64 queries if these are enough workgroups
/// for a large GPU, or else the smallest size; `None` if there is no candidate.
pub(super) fn chosen(
    call: &OpCall,
    sizes: &AttentionSizes,
    caps: &Caps,
) -> Option<CooperativeAttention> {
    let matrix = caps.cooperative?;
    let candidates = candidates(call, sizes, caps);
    for tile in &candidates {
        let workgroups = tile.arrangement(matrix, sizes.d).workgroups(sizes, sizes.heads);
        if tile.down == 4 && workgroups >= WORKGROUPS_MIN {
            return Some(*tile);
        }
    }
    candidates.first().copied()
}

/// Returns the dispatches of a call with a tile of any size. The statistics of the gradient are
/// computed by the kernel of [`tiles`].
pub(super) fn dispatches(
    call: &OpCall,
    sizes: &AttentionSizes,
    matrix: CooperativeSquare,
    tile: CooperativeAttention,
) -> Vec<Dispatch> {
    let arrangement = tile.arrangement(matrix, sizes.d);
    let mut dispatches = Vec::new();
    for kernel in kernels(call, sizes) {
        dispatches.push(match PASSES.iter().find(|pass| pass.entry == kernel.entry) {
            Some(pass) => dispatch(sizes, &arrangement, pass, kernel),
            None => tiles::dispatch(sizes, tiles::TILES[0], kernel),
        });
    }
    dispatches
}

/// Dispatch of a pass, which is the entry point of the kernel.
fn dispatch(
    sizes: &AttentionSizes,
    arrangement: &UnitArrangement,
    pass: &Pass,
    kernel: AttentionKernel,
) -> Dispatch {
    let matrix = arrangement.matrix;
    // Rows are not rounded as they are read, because they are converted to f16 afterwards.
    let exact = AttentionSizes { precision: Precision::F32, ..*sizes };
    let shader = kernel
        .shader("attention_coop", &exact)
        .with_cooperative_enables()
        .with_const("DOWN", arrangement.down)
        .with_const("ACROSS", arrangement.across)
        .with_const("SCORES", arrangement.scores)
        .with_const("EACH", arrangement.each)
        .with_const("SOURCES", pass.own.len() as u32)
        .with_const("PRODUCTS", pass.sums.len() as u32)
        .with_const("MATRIX", matrix.size)
        .with_const("SUBGROUP_MAX", matrix.subgroups[1])
        .with_text(&matrix_types(matrix.size))
        .with_text(&entry(pass, arrangement));
    Dispatch {
        shader,
        params: sizes.params(),
        groups: grid(arrangement.workgroups(sizes, kernel.heads(sizes)), 1),
        operands: kernel.operands(),
    }
}

/// Names of the matrices of own rows, scores and sums, by source or sum, and of copied vectors.
const OWN: [&str; 2] = ["own", "own_more"];
const SCORES: [&str; 2] = ["score", "score_more"];
const SUMS: [&str; 2] = ["sum", "sum_more"];
const COPIES: [&str; 2] = ["copy", "copy_more"];

/// Returns the WGSL of the entry point of a pass and of the function that it calls. They are
/// apart because naga asks for uniform control flow around cooperative matrices within a function.
fn entry(pass: &Pass, arrangement: &UnitArrangement) -> String {
    let is_forward = pass.entry == "forward";
    let by_key = pass.entry == "grad_kv";
    let heads = if by_key { "p.heads / p.group" } else { "p.heads" };
    let (count, before_loop, weigh) = match pass.entry {
        "forward" => (
            "key_blocks(block.first)",
            "    var query = Query(LOWEST, 0.0, 0u);\n",
            "weigh(&query, block, first, n > 0u, local)",
        ),
        "grad_q" => (
            "key_blocks(block.first)",
            "    let own_stats = load_stats(start_of_stats(block.sample, head),\n        \
                 block.first + local % R);\n",
            "slope_by_query(own_stats, block, first, local)",
        ),
        _ => (
            "p.group * query_blocks(block.first)",
            "    var stats_copy = load_stats(start_of_stats(block.sample, head), \
             streamed_first(block, 0u) + local);\n",
            "slope_by_key(block, streamed_head(block, n), first, local)",
        ),
    };
    let places = if by_key {
        "fn streamed_head(block: Block, n: u32) -> u32 {\n    \
             return block.head * p.group + n / query_blocks(block.first);\n}\n\
         fn streamed_first(block: Block, n: u32) -> u32 {\n    \
             return first_query(block.first) + n % query_blocks(block.first) * BLOCK;\n}\n"
    } else {
        "fn streamed_head(block: Block, n: u32) -> u32 { return block.head; }\n\
         fn streamed_first(block: Block, n: u32) -> u32 { return n * BLOCK; }\n"
    };
    let head = if by_key { "block.head * p.group" } else { "block.head" };
    let put_stats = match pass.entry {
        "forward" => "        if (local == 0u) { is_raised = 0u; }\n",
        "grad_q" => "",
        _ => "        if (local < BLOCK) { streamed_stats[local] = stats_copy; }\n",
    };
    let next_stats = if by_key {
        "        stats_copy = load_stats(start_of_stats(block.sample, next_head), \
         next_first + local);\n"
    } else {
        ""
    };
    let load_own = each(pass.own, |nth, source| own_rows(nth, source, arrangement));
    let scores = each(pass.own, |nth, _| products(nth, arrangement));
    let puts = each(&pass.streamed, |nth, _| puts(nth, arrangement));
    let sums = each(pass.sums, |nth, sum| add_products(nth, sum, arrangement));
    let declared = each(pass.sums, |nth, _| {
        lines(arrangement.each, |n| format!("    var {}_{n}: MatrixC;", SUMS[nth]))
    });
    let copies = each(&pass.streamed, |nth, source| {
        loads(nth, source, arrangement, ["    var ", "head", "streamed_first(block, 0u)"])
    });
    let next = each(&pass.streamed, |nth, source| {
        loads(nth, source, arrangement, ["        ", "next_head", "next_first"])
    });
    let raise = if is_forward { raise(arrangement) } else { String::new() };
    let finish = if is_forward { "    finish(query, block, local);\n" } else { "" };
    let stores = each(pass.sums, |nth, sum| stores(nth, sum, arrangement));
    let entry = pass.entry;
    format!(
        "{places}
fn attend(index: u32, unit: u32, local: u32) {{
    let block = block_of(index, {heads}, {of_queries});
    let head = {head};
    let own_at = unit / ACROSS * MATRIX;
    let streamed_at = unit % ACROSS * SCORES * MATRIX;
    let columns_at = unit % ACROSS * EACH * MATRIX;
    let patch_at = unit % ACROSS * MATRIX * COLUMN + own_at;
{load_own}    var zero: MatrixC;
{declared}{copies}{before_loop}    let count = {count};
    for (var n = 0u; n < count; n++) {{
        let first = streamed_first(block, n);
{puts}{put_stats}        workgroupBarrier();
{scores}        workgroupBarrier();
        {weigh};
        workgroupBarrier();
        let next_head = streamed_head(block, min(n + 1u, count - 1u));
        let next_first = streamed_first(block, min(n + 1u, count - 1u));
{next}{next_stats}{raise}{sums}        workgroupBarrier();
    }}
{finish}{stores}}}

@compute @workgroup_size(SIZE)
fn {entry}(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
    @builtin(subgroup_id) subgroup: u32,
) {{
    let index = workgroup_of(group, groups);
    if (index >= block_count({heads})) {{ return; }}
    attend(index, subgroup % UNITS, local);
}}
",
        of_queries = !by_key,
    )
}

/// Concatenated texts of all items, from their number and the item.
fn each<T>(items: &[T], text: impl Fn(usize, &T) -> String) -> String {
    items.iter().enumerate().map(|(nth, item)| text(nth, item)).collect()
}

/// Returns a line of text for each number below `count`.
fn lines(count: u32, line: impl Fn(u32) -> String) -> String {
    (0..count).map(|n| line(n) + "\n").collect()
}

/// WGSL that reads the own rows of a source into matrices.
fn own_rows(nth: usize, source: &str, arrangement: &UnitArrangement) -> String {
    let name = OWN[nth];
    let matrices = lines(arrangement.steps, |k| {
        format!(
            "    let {name}_{k} = \
             coopLoadT<MatrixA>(&rows[own_at * ROW + {k}u * MATRIX], ROW);"
        )
    });
    format!(
        "    put_own({source}, start_of({source}, block.sample, head), block.first, local);\n    \
         workgroupBarrier();\n{matrices}    workgroupBarrier();\n"
    )
}

/// Number of vectors of a block of a source that an invocation copies.
fn copied(arrangement: &UnitArrangement) -> u32 {
    let quads = arrangement.block() * arrangement.width() / 4;
    quads.div_ceil(arrangement.invocations())
}

/// Returns the WGSL that reads rows of a source, with the text before a variable's name, the head,
/// and the first row.
fn loads(
    nth: usize,
    source: &str,
    arrangement: &UnitArrangement,
    [before, head, first]: [&str; 3],
) -> String {
    let name = COPIES[nth];
    lines(copied(arrangement), |n| {
        format!(
            "{before}{name}_{n} = load({source}, start_of({source}, block.sample, {head}), \
             {first}, {n}u, local);"
        )
    })
}

/// WGSL that writes the rows read by [`loads`] to workgroup memory.
fn puts(nth: usize, arrangement: &UnitArrangement) -> String {
    let name = COPIES[nth];
    lines(copied(arrangement), |n| {
        format!("        put({nth}u * BLOCK, BLOCK, {n}u, local, {name}_{n});")
    })
}

/// WGSL that multiplies own rows of a source by streamed ones.
fn products(nth: usize, arrangement: &UnitArrangement) -> String {
    let own = OWN[nth];
    let score = SCORES[nth];
    let mut text = String::new();
    for k in 0..arrangement.steps {
        text += &lines(arrangement.scores, |n| {
            let (declared, before) = match k {
                0 => ("var ", "zero".to_string()),
                _ => ("", format!("{score}_{n}")),
            };
            format!(
                "        {declared}{score}_{n} = coopMultiplyAdd({own}_{k}, coopLoad<MatrixB>(\
                 &rows[({nth}u * BLOCK + streamed_at + {n}u * MATRIX) * ROW + {k}u * MATRIX], \
                 ROW), {before});"
            )
        });
    }
    // Every argument of a store is a named value, because naga requires it.
    text + &lines(arrangement.scores, |n| {
        format!(
            "        let {score}_{n}_at = \
             ({nth}u * BLOCK + streamed_at + {n}u * MATRIX) * COLUMN + own_at;\n        \
             let {score}_{n}_stored = {score}_{n};\n        \
             coopStore({score}_{n}_stored, &scores[{score}_{n}_at], COLUMN);"
        )
    })
}

/// WGSL that adds streamed rows times their weights or slopes.
fn add_products(nth: usize, sum: &Sum, arrangement: &UnitArrangement) -> String {
    let name = SUMS[nth];
    let streamed = sum.streamed;
    let adds = lines(arrangement.each, |n| {
        format!(
            "            {name}_{n} = coopMultiplyAdd(pair, coopLoadT<MatrixB>(\
             &rows[({streamed}u * BLOCK + j) * ROW + columns_at + {n}u * MATRIX], ROW), \
             {name}_{n});"
        )
    });
    format!(
        "        for (var j = 0u; j < BLOCK; j += MATRIX) {{\n            \
             let pair = coopLoad<MatrixA>(&pairs[({nth}u * BLOCK + j) * PAIRS + own_at], PAIRS);\n\
         {adds}        }}\n"
    )
}

/// WGSL that stores a matrix of sums to its patch of workgroup memory.
fn store_patch(name: &str, indent: &str) -> String {
    format!(
        "{indent}let {name}_stored = {name};\n\
         {indent}coopStore({name}_stored, &scores[patch_at], COLUMN);\n\
         {indent}workgroupBarrier();\n"
    )
}

/// WGSL that multiplies all sums by the factors of their rows.
fn raise(arrangement: &UnitArrangement) -> String {
    let indent = "            ";
    let matrices = lines(arrangement.each, |n| {
        let name = format!("{}_{n}", SUMS[0]);
        store_patch(&name, indent)
            + &format!(
                "{indent}raise(local);\n{indent}workgroupBarrier();\n\
                 {indent}{name} = coopLoad<MatrixC>(&scores[patch_at], COLUMN);\n\
                 {indent}workgroupBarrier();"
            )
    });
    format!("        if (is_raised != 0u) {{\n{matrices}        }}\n")
}

fn stores(nth: usize, sum: &Sum, arrangement: &UnitArrangement) -> String {
    lines(arrangement.each, |n| {
        let name = format!("{}_{n}", SUMS[nth]);
        let put = match sum.gradient {
            None => format!("put_weighted({n}u, block, local)"),
            Some((source, factor)) => format!(
                "put_sums({source}, start_of({source}, block.sample, head), {n}u, {factor}, \
                 block, local)"
            ),
        };
        store_patch(&name, "    ") + &format!("    {put};\n    workgroupBarrier();")
    })
}

//! Products of a few rows or columns and a matrix. Twin of `shaders/matmul_vector.wgsl`, which
//! has the formula.
//!
//! Such a product reads every element of the matrix once, so it is bound by memory bandwidth:
//! adjacent invocations must read adjacent vectors, and there must be enough of them. Each has four
//! loads of vectors of the matrix in flight.

use super::shared::operand;
use super::sizes::Sizes;
use crate::ops::epilogue::{self, Epilogue};
use crate::{Caps, Dispatch, OpCall, Operand, Shader, dispatch};

/// Maximum number of rows or columns that count as few.
pub(crate) const FEW: usize = 8;

/// Partition of a workgroup: quads of columns, and invocations that share each of them.
#[derive(Clone, Copy, Debug)]
struct Lanes {
    quads: usize,
    slices: usize,
}

/// Partition if adjacent elements of the matrix are columns: one pass reads 64 bytes of each of 128
/// rows, because a matrix may have too few columns for enough workgroups.
const ALONG_COLUMNS: Lanes = Lanes { quads: 4, slices: 32 };

/// Name of a kernel variant, and its partition if adjacent elements of the matrix are terms of the
/// sum.
#[derive(Clone, Copy, Debug)]
pub struct VectorKernel {
    pub name: &'static str,
    along_terms: Lanes,
}

/// Reads 512 bytes of a row per pass.
const NARROW: VectorKernel =
    VectorKernel { name: "matmul_vector", along_terms: Lanes { quads: 2, slices: 32 } };

/// Read 1,024 and 2,048 bytes per pass, for GPUs: invocations wait for memory most of the time, so
/// a large device needs more of them than [`NARROW`] has for a matrix of few columns. On an NVIDIA
/// H200, products of a row and (2304, 768)^T run at 1.19 times its speed, and with (768, 3072)^T at
/// 1.53 and 1.96.
const WIDER: [VectorKernel; 2] = [
    VectorKernel { name: "matmul_vector_64", along_terms: Lanes { quads: 1, slices: 64 } },
    VectorKernel { name: "matmul_vector_128", along_terms: Lanes { quads: 1, slices: 128 } },
];

/// The fewest terms for which [`static_choice`] returns the widest kernel.
const WIDEST_TERMS_MIN: usize = 2048;

/// Columns that are enough workgroups for [`NARROW`]: 8 rows and GPT-2's 50,257 columns run at 1.46
/// times the speed of a wider kernel on an NVIDIA H200, a single row at the same.
const MANY_COLUMNS: usize = 8192;

/// Returns the kernels that are candidates.
pub fn kernels(sizes: &Sizes, caps: &Caps) -> Vec<VectorKernel> {
    if !fits(sizes) {
        return Vec::new();
    }
    let mut kernels = vec![NARROW];
    if caps.wants_gpu_variants() && Roles::of(sizes).terms_are_neighbours {
        kernels.extend(WIDER);
    }
    kernels
}

/// Returns the kernel that runs on GPUs if none is measured.
pub fn static_choice(sizes: &Sizes) -> VectorKernel {
    let [wide, widest] = WIDER;
    match sizes.k {
        _ if sizes.batch * Roles::of(sizes).columns >= MANY_COLUMNS => NARROW,
        WIDEST_TERMS_MIN.. => widest,
        _ => wide,
    }
}

/// Returns true if the output has at most `FEW` rows or columns.
pub fn fits(sizes: &Sizes) -> bool {
    sizes.m.min(sizes.n) <= FEW
}

/// The few rows and the matrix of a product: its operands, or if b has fewer columns than a has
/// rows, their transposes in exchanged order.
#[derive(Clone, Copy, Debug)]
struct Roles {
    exchanged: bool,
    rows: usize,
    columns: usize,
    /// Elements to the next row of the few, and to the next term.
    few: [usize; 2],
    terms_are_neighbours: bool,
    /// Elements to the next row of the output, and to the next column.
    c: [usize; 2],
}

impl Roles {
    fn of(sizes: &Sizes) -> Self {
        let Sizes { m, n, .. } = *sizes;
        let (a_row, a_step) = sizes.a_strides();
        let (b_step, b_column) = sizes.b_strides();
        if n < m {
            Self {
                exchanged: true,
                rows: n,
                columns: m,
                few: [b_column, b_step],
                terms_are_neighbours: a_step == 1,
                c: [1, n],
            }
        } else {
            Self {
                exchanged: false,
                rows: m,
                columns: n,
                few: [a_row, a_step],
                terms_are_neighbours: b_step == 1,
                c: [n, 1],
            }
        }
    }

    fn lanes(&self, kernel: VectorKernel) -> Lanes {
        if self.terms_are_neighbours { kernel.along_terms } else { ALONG_COLUMNS }
    }

    /// Shader; `store` is the epilogue of the call.
    fn shader(&self, lanes: Lanes, sizes: &Sizes, store: &str) -> Shader {
        let k = sizes.k;
        let few_vectors = self.few[1] == 1 && k.is_multiple_of(4);
        let line = if self.terms_are_neighbours { k } else { self.columns };
        Shader::new("matmul_vector", "vector")
            .with_operands(sizes.precision)
            .with_const("ROWS", self.rows.next_power_of_two() as u32)
            .with_const("QUADS", lanes.quads as u32)
            .with_const("SLICES", lanes.slices as u32)
            .with_const("TERMS_ARE_NEIGHBOURS", u32::from(self.terms_are_neighbours))
            .with_text(&few(few_vectors))
            .with_text(&operand("many", 1, line.is_multiple_of(4)))
            .with_text(store)
    }
}

/// WGSL of the few rows, and of the function that reads four terms of one of them.
fn few(vectors: bool) -> String {
    let terms = if vectors {
        "few_some(at, count)".to_string()
    } else {
        let elements =
            [0, 1, 2, 3].map(|i| format!("few_one(at + {i}u * p.few_step, count > {i}u)"));
        format!("vec4f({})", elements.join(", "))
    };
    let function =
        format!("fn few_terms(at: u32, count: u32) -> vec4f {{\n    return {terms};\n}}\n");
    operand("few", 0, vectors) + &function
}

/// Returns the dispatch of a call.
pub fn dispatch(call: &OpCall, sizes: &Sizes, kernel: VectorKernel) -> Dispatch {
    let roles = Roles::of(sizes);
    let lanes = roles.lanes(kernel);
    let Roles { exchanged, rows, columns, few, c, .. } = roles;
    let across = columns.div_ceil(4 * lanes.quads);
    let workgroups = sizes.batch * across;
    let params = [&[workgroups, across, rows, columns, sizes.k][..], &few, &c].concat();
    let inputs = if exchanged { [1, 0] } else { [0, 1] };
    let own = [Operand::Input(inputs[0]), Operand::Input(inputs[1]), Operand::Output(0)];
    let Epilogue { text, operands } = epilogue::of_steps(call, &epilogue::steps(call), own.len());
    let store = epilogue::output_binding(own.len() - 1, "f32") + &text;
    Dispatch {
        shader: roles.shader(lanes, sizes, &store),
        operands: [&own[..], &operands].concat(),
        params: params.into_iter().map(|word| word as u32).collect(),
        groups: dispatch::grid(workgroups, 1),
    }
}

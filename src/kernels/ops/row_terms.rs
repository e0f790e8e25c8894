//! Terms of sums over rows, as the kernels of these take them.

use crate::Operand;

/// Terms of sums over rows, viewed as (outer, middle, inner), where middle is reduced.
pub(crate) struct RowTerms {
    pub outer: usize,
    pub middle: usize,
    pub inner: usize,
    pub operands: Vec<Operand>,
    /// Number of sums of a column, 1 or 2: the outputs of the call.
    pub sums: usize,
    /// True if 4 neighbouring columns may be taken as a vector, where `inner` is a multiple of 4.
    pub(crate) vectors: bool,
    /// Parameters `word0`, `word1` and `word2` of the terms.
    pub words: [usize; 3],
    /// WGSL of the bindings of the operands and of `fn term(row: u32, at: u32) -> Sums`, the terms
    /// at index `at` of all in Values, which is in row `row`.
    pub text: String,
}

impl RowTerms {
    /// Returns true if columns are taken as vectors of 4.
    pub(crate) fn has_vectors(&self) -> bool {
        self.vectors && self.inner.is_multiple_of(4)
    }

    /// Returns WGSL of the types of a value in memory, of `lanes` floats, and of its sums.
    pub fn types(&self, lanes: usize) -> String {
        let (value, sums) = match (lanes, self.sums) {
            (1, 1) => ("f32", "f32"),
            (1, _) => ("f32", "vec2f"),
            (_, 1) => ("vec4f", "vec4f"),
            (..) => ("vec4f", "mat2x4f"),
        };
        format!("alias Value = {value};\nalias Sums = {sums};\nconst FLOATS: u32 = {lanes}u;\n")
    }

    /// Returns WGSL of `fn put(at: u32, sums: Sums)` and of the outputs, from this binding on.
    pub fn put(&self, first: usize) -> String {
        let outputs = (0..self.sums).map(|output| {
            let binding = first + output;
            format!(
                "@group(0) @binding({binding}) var<storage, read_write> y{output}: array<Value>;\n"
            )
        });
        let (before, after) = match self.sums {
            1 => ("y0[at]", "    y0[at] = total;\n"),
            _ => ("Sums(y0[at], y1[at])", "    y0[at] = total[0];\n    y1[at] = total[1];\n"),
        };
        outputs.collect::<String>()
            + "fn put(at: u32, sums: Sums) {\n    var total = sums;\n    if (p.accumulate != 0u) { \
               total += "
            + before
            + "; }\n"
            + after
            + "}\n"
    }

    /// Returns the operands of the outputs.
    pub fn outputs(&self) -> Vec<Operand> {
        (0..self.sums).map(Operand::Output).collect()
    }
}

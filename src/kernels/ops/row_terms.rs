//! Terms of sums over rows, the input of [`super::row_sums`] and [`super::row_blocks`].

use crate::Operand;

/// Terms of sums over rows, viewed as (outer, middle, inner); the sums are over middle.
pub(crate) struct RowTerms {
    pub outer: usize,
    pub middle: usize,
    pub inner: usize,
    pub operands: Vec<Operand>,
    /// Number of sums of a column, 1 or 2: the outputs of the call.
    pub sums: usize,
    /// True if 4 adjacent columns may form a vector where `inner` is a multiple of 4.
    pub(crate) vectors: bool,
    /// Parameters `word0`, `word1` and `word2` of the terms.
    pub words: [usize; 3],
    /// WGSL of the bindings of the operands and of `fn term(row: u32, at: u32) -> Sums`, the terms
    /// of the value at index `at`, which is in row `row`.
    pub text: String,
}

impl RowTerms {
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
        let mut text = String::new();
        for output in 0..self.sums {
            let binding = first + output;
            text += &format!(
                "@group(0) @binding({binding}) var<storage, read_write> y{output}: array<Value>;\n"
            );
        }
        let (before, after) = match self.sums {
            1 => ("y0[at]", "    y0[at] = total;\n"),
            _ => ("Sums(y0[at], y1[at])", "    y0[at] = total[0];\n    y1[at] = total[1];\n"),
        };
        text += "fn put(at: u32, sums: Sums) {\n    var total = sums;\n";
        text += &format!("    if (p.accumulate != 0u) {{ total += {before}; }}\n{after}}}\n");
        text
    }

    /// Returns the operands of the outputs.
    pub fn outputs(&self) -> Vec<Operand> {
        (0..self.sums).map(Operand::Output).collect()
    }
}

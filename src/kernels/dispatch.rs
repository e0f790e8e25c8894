//! How a call runs on a GPU, still without one: shader, operands, parameters and grid as data.

/// A shader: a file of `shaders/`, an entry point in it, and constants put in front of it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Shader {
    /// The file's stem, or the name of emitted text (see [`Shader::emitted`]).
    pub file: &'static str,
    pub entry: &'static str,
    /// WGSL put in front of the file: `const` declarations, an epilogue.
    pub header: String,
    /// The whole text, for the one family of kernels that is emitted.
    pub text: Option<String>,
}

impl Shader {
    /// An entry point of a file.
    pub fn new(file: &'static str, entry: &'static str) -> Self {
        Self { file, entry, header: String::new(), text: None }
    }

    /// The same with a constant in front, e.g. `("D", "u32", 32)`.
    pub fn with_const(mut self, name: &str, value: u32) -> Self {
        self.header += &format!("const {name}: u32 = {value}u;\n");
        self
    }

    /// The same with WGSL in front that the file counts on, such as an epilogue.
    pub fn with_text(mut self, text: &str) -> Self {
        self.header += text;
        self
    }

    /// A shader whose text was emitted; `name` is for people.
    pub fn emitted(name: &'static str, entry: &'static str, text: String) -> Self {
        Self { file: name, entry, header: String::new(), text: Some(text) }
    }
}

/// Which tensor of the call is bound. Inputs are bound read-only, outputs read-write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operand {
    Input(usize),
    Output(usize),
}

/// One dispatch.
#[derive(Clone, Debug, PartialEq)]
pub struct Dispatch {
    pub shader: Shader,
    /// In the order of `@binding`, all in group 0.
    pub operands: Vec<Operand>,
    /// The words of the shader's `Params`, which it reads as immediates; at most 32.
    pub params: Vec<u32>,
    pub groups: [u32; 3],
}

/// The most workgroups in x before a grid is folded into y; every device allows 65,535.
const GROUPS_X: u32 = 32_768;

/// The grid for `invocations` in workgroups of `size`, folded into y where x would be too long.
/// Shaders find their index as `id.x + id.y * (groups.x * size)` and stop at the count.
pub fn grid(invocations: usize, size: u32) -> [u32; 3] {
    let groups = invocations.div_ceil(size as usize).max(1) as u32;
    if groups <= GROUPS_X {
        return [groups, 1, 1];
    }
    [GROUPS_X, groups.div_ceil(GROUPS_X), 1]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_grids_fold_into_y_and_cover_all() {
        assert_eq!(grid(0, 64), [1, 1, 1]);
        assert_eq!(grid(65, 64), [2, 1, 1]);
        let [x, y, _] = grid(64 * 100_000 + 1, 64);
        assert!(x <= 65_535 && u64::from(x) * u64::from(y) * 64 > 6_400_000);
    }
}

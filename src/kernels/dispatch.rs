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

/// The most iterations that the loops of one invocation may make in all. llvmpipe silently ends
/// every loop of an invocation after 65,535 of them, so that longer sums need a workgroup each.
pub const ITERATIONS_MAX: usize = 60_000;

/// How a run of elements is dealt out, 8 to an invocation, a `step` apart so that neighbours touch
/// neighbours, and close together so that a software adapter walks through memory in order too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Runs {
    /// Invocations per run.
    pub across: usize,
    pub step: usize,
}

impl Runs {
    /// Elements of an invocation.
    const EACH: usize = 8;

    /// Deals out runs of `length`. Invocation `a` of a run has the 8 elements from
    /// `a / step * 8 * step + a % step` on that lie within the run.
    pub fn new(length: usize) -> Self {
        let step = length.div_ceil(Self::EACH).clamp(1, 64);
        Self { across: length.div_ceil(Self::EACH * step) * step, step }
    }
}

/// How the first stage of a sum over a bucket is dealt out: to each workgroup of 64 a strip of
/// neighbouring elements, so that a software adapter walks through memory in order too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Strips {
    /// Partial sums, one per invocation: fewer than 64, or a multiple of 64.
    pub parts: usize,
    /// Elements of a strip.
    pub strip: usize,
    /// Invocations of a workgroup that have a partial sum.
    pub lanes: usize,
}

impl Strips {
    /// Cuts `count` elements for at most `parts` partial sums, of which there is room for one.
    pub fn new(count: usize, parts: usize) -> Self {
        let lanes = parts.clamp(1, 64);
        let workgroups = (parts / lanes).max(1);
        Self { parts: workgroups * lanes, strip: count.div_ceil(workgroups), lanes }
    }
}

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
    fn runs_have_every_element_once() {
        for length in [0, 1, 7, 8, 9, 63, 64, 65, 511, 512, 513, 5003] {
            let Runs { across, step } = Runs::new(length);
            let of = |a: usize| (0..8).map(move |i| a / step * 8 * step + a % step + i * step);
            let mut all: Vec<usize> = (0..across).flat_map(of).filter(|i| *i < length).collect();
            all.sort_unstable();
            assert_eq!(all, (0..length).collect::<Vec<_>>(), "{length}");
        }
    }

    #[test]
    fn strips_cover_all_and_have_room() {
        for (count, parts) in [(0, 1), (5, 7), (1000, 64), (1000, 100), (1_000_003, 32_768)] {
            let cut = Strips::new(count, parts);
            assert!(cut.parts <= parts && cut.parts.div_ceil(64) * cut.strip >= count, "{cut:?}");
            assert!(
                cut.lanes == cut.parts || cut.lanes == 64 && cut.parts.is_multiple_of(64),
                "{cut:?}"
            );
        }
    }

    #[test]
    fn long_grids_fold_into_y_and_cover_all() {
        assert_eq!(grid(0, 64), [1, 1, 1]);
        assert_eq!(grid(65, 64), [2, 1, 1]);
        let [x, y, _] = grid(64 * 100_000 + 1, 64);
        assert!(x <= 65_535 && u64::from(x) * u64::from(y) * 64 > 6_400_000);
    }
}

//! GPU dispatch of a call as plain data, independent of wgpu: shader, operands, parameters and
//! grid.

use std::borrow::Cow;
use std::ops::Range;

use crate::device::Limits;
use crate::operand_snippet;
use potluck_core::DType;
use potluck_graph::Precision;
use potluck_graph::plan::WORKSPACE_BYTES_MAX;

/// A shader: a file of `shaders/`, an entry point in it, and the WGSL prepended to it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Shader {
    /// Stem of the file, or the name of generated WGSL (see [`Shader::emitted`]).
    pub file: Cow<'static, str>,
    pub entry: &'static str,
    /// WGSL extensions that are enabled, such as `f16`.
    pub(crate) enables: Vec<&'static str>,
    /// WGSL prepended to the file: `const` declarations, an epilogue.
    pub header: String,
    /// WGSL after the header, for generated kernels; `None` for a file.
    pub text: Option<String>,
    /// True if the text comes from outside the crate. It is always compiled with all checks, and
    /// its certificates are not kept on disk.
    pub(crate) is_foreign: bool,
}

impl Shader {
    /// Creates the shader of an entry point of a file, with nothing prepended.
    pub fn new(file: &'static str, entry: &'static str) -> Self {
        Self {
            file: file.into(),
            entry,
            enables: Vec::new(),
            header: String::new(),
            text: None,
            is_foreign: false,
        }
    }

    /// Returns this shader with a `u32` constant prepended, e.g. `("D", 32)`.
    pub fn with_const(mut self, name: &str, value: u32) -> Self {
        self.header += &format!("const {name}: u32 = {value}u;\n");
        self
    }

    /// Returns this shader with WGSL prepended that the file depends on, such as an epilogue.
    pub fn with_text(mut self, text: &str) -> Self {
        self.header += text;
        self
    }

    /// Returns this shader with the functions prepended that round operands.
    pub(crate) fn with_operands(self, precision: Precision) -> Self {
        self.with_text(operand_snippet(precision))
    }

    /// Returns this shader with the extensions that cooperative matrices need.
    pub(crate) fn with_cooperative_enables(mut self) -> Self {
        self.enables.extend(["f16", "wgpu_cooperative_matrix"]);
        self
    }

    /// Creates a shader from generated WGSL; `name` is a display name.
    pub fn emitted(name: &'static str, entry: &'static str, text: String) -> Self {
        Self { text: Some(text), ..Self::new(name, entry) }
    }

    /// Creates a shader from WGSL of the library's user; `name` is a display name.
    pub fn foreign(name: String, entry: &'static str, text: String) -> Self {
        Self { file: name.into(), text: Some(text), is_foreign: true, ..Self::new("", entry) }
    }
}

/// Memory that is bound: a tensor of the call, or workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operand {
    /// Input tensor, bound read-only.
    Input(usize),
    /// Output tensor, bound read-write.
    Output(usize),
    /// A range of an input tensor, bound read-only.
    InputPart(TensorPart),
    /// A range of an output tensor, bound read-write.
    OutputPart(TensorPart),
    /// A range of an output tensor that an earlier dispatch of the call wrote, bound read-only.
    WrittenPart(TensorPart),
    /// Memory for results between the dispatches of a call, bound read-write. All calls of a device
    /// share it, so a call must write it before it reads it.
    Workspace { bytes: usize },
    /// Memory for a whole tensor between the dispatches of a call, separate from the workspace, so
    /// that one may be read while the other is written.
    Scratch { bytes: usize, is_writable: bool },
}

/// Range of the bytes of a tensor of a call. A range that reaches beyond the tensor is cut off at
/// its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TensorPart {
    /// Number of the input or output.
    pub tensor: usize,
    /// First byte, a multiple of 256.
    pub first: usize,
    pub bytes: usize,
}

impl Operand {
    /// Returns a workspace of this many f32 values.
    pub(crate) fn workspace(values: usize) -> Self {
        Self::Workspace { bytes: DType::F32.bytes() * values }
    }

    /// Returns true if kernels may write to the memory.
    pub(crate) fn is_writable(&self) -> bool {
        match self {
            Self::Input(_) | Self::InputPart(_) | Self::WrittenPart(_) => false,
            Self::Output(_) | Self::OutputPart(_) | Self::Workspace { .. } => true,
            Self::Scratch { is_writable, .. } => *is_writable,
        }
    }

    /// Operand without sizes: operands that are then equal have the same binding.
    pub(crate) fn unsized_operand(self) -> Self {
        match self {
            Self::Workspace { .. } => Self::Workspace { bytes: 0 },
            Self::Scratch { is_writable, .. } => Self::Scratch { bytes: 0, is_writable },
            tensor => tensor,
        }
    }
}

/// Most f32 values in the workspace of a dispatch.
pub(crate) const WORKSPACE_VALUES_MAX: usize = WORKSPACE_BYTES_MAX / DType::F32.bytes();

/// Returns the bytes of workspace that the dispatches of a call need.
pub fn workspace_bytes(dispatches: &[Dispatch]) -> usize {
    let mut most = 0;
    for dispatch in dispatches {
        for operand in &dispatch.operands {
            if let Operand::Workspace { bytes } = operand {
                most = most.max(*bytes);
            }
        }
    }
    most
}

/// Bytes of scratch that the dispatches of a call need.
pub(crate) fn scratch_bytes(dispatches: &[Dispatch]) -> usize {
    let mut most = 0;
    for dispatch in dispatches {
        for operand in &dispatch.operands {
            if let Operand::Scratch { bytes, .. } = operand {
                most = most.max(*bytes);
            }
        }
    }
    most
}

/// One compute dispatch: shader, bound tensors, parameters and grid.
#[derive(Clone, Debug, PartialEq)]
pub struct Dispatch {
    pub shader: Shader,
    /// Bound tensors in the order of `@binding`, all in group 0.
    pub operands: Vec<Operand>,
    /// Words of the shader's `Params`, which the shader reads as immediates; at most 31, or 32 in
    /// shaders from outside the crate.
    pub params: Vec<u32>,
    pub groups: [u32; 3],
}

impl Dispatch {
    /// Checks the parameters and the grid against the limits of a device.
    ///
    /// # Errors
    /// Returns a description of the first excess.
    pub fn check(&self, limits: &Limits) -> Result<(), String> {
        let words_max = limits.immediate_bytes as usize / 4 - self.own_words();
        if self.params.len() > words_max {
            let words = self.params.len();
            return Err(format!("it has {words} words of parameters, and may have {words_max}"));
        }
        let most = limits.workgroups;
        match self.groups.iter().find(|groups| !(1..=most).contains(*groups)) {
            Some(_) => Err(format!(
                "its grid {:?} is not of 1 to {most} workgroups in each dimension; \
                 kernels::dispatch::grid folds a longer one",
                self.groups
            )),
            None => Ok(()),
        }
    }

    /// Returns true if the dispatch can be recorded in parts, because the shader reads the first
    /// workgroup of a part from its parameters; shaders from outside the crate do not.
    pub(crate) fn can_split(&self) -> bool {
        if self.shader.is_foreign {
            return false;
        }
        match &self.shader.text {
            Some(text) => text.contains("struct Params {"),
            None => true,
        }
    }

    /// Number of words that follow `params`: the first workgroup of the part.
    fn own_words(&self) -> usize {
        usize::from(self.can_split())
    }

    /// Returns the bytes of the immediates: whole vectors of four words, because the size of a
    /// struct is a multiple of the size of its vectors.
    pub fn immediate_bytes(&self) -> u32 {
        let words = (self.params.len() + self.own_words()) as u32;
        4 * if self.can_split() { words.next_multiple_of(4) } else { words }
    }

    /// Returns the same dispatch with its workgroups in rows of at most `width`, as very large
    /// calls have rows of [`GROUPS_MAX`]: a small call then tests that a kernel computes its
    /// position in a folded grid. `None` for a single workgroup, which cannot be folded, and for
    /// shaders from outside the crate, whose grids may have another meaning.
    pub(crate) fn folded(&self, width: u32) -> Option<Self> {
        let groups: u32 = self.groups.iter().product();
        if groups <= 1 || self.shader.is_foreign {
            return None;
        }
        Some(Self { groups: fold(groups, width.min(groups - 1)), ..self.clone() })
    }
}

/// Workgroups per row of the folded grids of tests and of certification.
const FOLDED_WIDTH: u32 = 2;

/// Dispatches with grids folded into short rows; `None` if none of them can be folded.
pub(crate) fn folded(dispatches: &[Dispatch]) -> Option<Vec<Dispatch>> {
    let mut all = dispatches.to_vec();
    let mut is_folded = false;
    for dispatch in &mut all {
        if let Some(folded) = dispatch.folded(FOLDED_WIDTH) {
            *dispatch = folded;
            is_folded = true;
        }
    }
    if is_folded { Some(all) } else { None }
}

/// Returns the end of the part of a grid that begins at workgroup `first` and has at most `most`
/// workgroups, at least one. It has whole rows, or less than one, so that it is itself a grid.
pub(crate) fn part_end(groups: [u32; 3], first: u32, most: u32) -> u32 {
    let left = workgroups(groups).saturating_sub(first);
    let count = most.clamp(1, left.max(1));
    let row = groups[0];
    first + if count > row { count - count % row } else { count }
}

/// Grid of a part that ends at [`part_end`].
pub(crate) fn part_grid(groups: [u32; 3], part: &Range<u32>) -> [u32; 3] {
    fold(part.end - part.start, groups[0])
}

/// Returns the number of workgroups of a grid; saturates.
pub fn workgroups([x, y, z]: [u32; 3]) -> u32 {
    x.saturating_mul(y).saturating_mul(z)
}

/// Maximum number of workgroups per dimension, which every device allows. Longer grids are folded
/// from x into y.
pub const GROUPS_MAX: u32 = 65_535;

/// Maximum number of iterations of all loops of one invocation. llvmpipe silently ends every loop
/// of an invocation after 65,535 iterations, so a longer sum needs a whole workgroup.
pub(crate) const ITERATIONS_MAX: usize = 60_000;

/// Partition of a run of elements between invocations, 8 elements each. The elements of an
/// invocation are `step` apart, so that adjacent invocations access adjacent elements, and close
/// together, so that a software adapter accesses memory in order too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Runs {
    /// Invocations per run.
    pub(crate) across: usize,
    pub step: usize,
}

impl Runs {
    /// Elements per invocation.
    const EACH: usize = 8;

    /// Partitions runs of `length` elements. Invocation `a` of a run processes up to 8 elements:
    /// element `a / step * 8 * step + a % step` and the next 7 at distances of `step`, as far as
    /// they lie within the run.
    pub fn new(length: usize) -> Self {
        let step = length.div_ceil(Self::EACH).clamp(1, 64);
        Self { across: length.div_ceil(Self::EACH * step) * step, step }
    }
}

/// Partition of a bucket between the invocations of the first stage of a sum: each workgroup of
/// 64 sums a strip of contiguous elements, so that a software adapter accesses memory in order
/// too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Strips {
    /// Partial sums, one per invocation: fewer than 64, or a multiple of 64.
    pub parts: usize,
    /// Elements per strip.
    pub(crate) strip: usize,
    /// Invocations per workgroup that compute a partial sum.
    pub(crate) lanes: usize,
}

impl Strips {
    /// Partitions `count` elements for at most `parts` partial sums; `parts` must be at least 1.
    pub fn new(count: usize, parts: usize) -> Self {
        let lanes = parts.clamp(1, 64);
        let workgroups = (parts / lanes).max(1);
        Self { parts: workgroups * lanes, strip: count.div_ceil(workgroups), lanes }
    }
}

/// Returns the grid for `invocations` in workgroups of `size`, folded into y if x would be too
/// long. Shaders compute their index by `shaders/lib/grid.wgsl` and return if it is not below the
/// count.
pub fn grid(invocations: usize, size: u32) -> [u32; 3] {
    let groups = invocations.div_ceil(size as usize).max(1) as u32;
    fold(groups, GROUPS_MAX)
}

/// Grid of `groups` workgroups in rows of at most `width`.
fn fold(groups: u32, width: u32) -> [u32; 3] {
    if groups <= width { [groups, 1, 1] } else { [width, groups.div_ceil(width), 1] }
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
        for invocations in [64 * 100_000 + 1, 64 * 65_536, (1 << 31) - 1] {
            let [x, y, z] = grid(invocations, 1);
            assert!(x <= GROUPS_MAX && y <= GROUPS_MAX && z == 1, "{invocations}");
            assert!(u64::from(x) * u64::from(y) >= invocations as u64, "{invocations}");
        }
    }

    #[test]
    fn parts_have_every_workgroup_once() {
        for groups in [[1, 1, 1], [7, 1, 1], [4, 5, 1], [GROUPS_MAX, 3, 1], [3, 2, 2]] {
            for most in [1, 2, 3, 4, 9, 70_000, u32::MAX] {
                let (mut first, mut parts) = (0, 0);
                while first < workgroups(groups) {
                    let part = first..part_end(groups, first, most);
                    let grid = part_grid(groups, &part);
                    let count = part.end - part.start;
                    assert!(count > 0 && count <= most, "{groups:?} {part:?}");
                    assert!(grid[0] <= GROUPS_MAX && workgroups(grid) == count, "{grid:?}");
                    (first, parts) = (part.end, parts + 1);
                }
                assert_eq!(first, workgroups(groups));
                assert!(most < u32::MAX || parts == 1, "{groups:?} in {parts}");
            }
            if groups[0] == GROUPS_MAX {
                assert_eq!(part_end(groups, 5, GROUPS_MAX + 1), GROUPS_MAX + 5);
            }
        }
    }

    #[test]
    fn folded_dispatches_keep_their_workgroups() {
        let dispatch = |groups| Dispatch {
            shader: Shader::new("sum", "columns"),
            operands: Vec::new(),
            params: Vec::new(),
            groups,
        };
        let folded = |groups| dispatch(groups).folded(FOLDED_WIDTH).map(|folded| folded.groups);
        assert_eq!(folded([1, 1, 1]), None);
        assert_eq!(folded([2, 1, 1]), Some([1, 2, 1]));
        assert_eq!(folded([5, 1, 1]), Some([2, 3, 1]));
        assert_eq!(folded([3, 2, 1]), Some([2, 3, 1]));
    }
}

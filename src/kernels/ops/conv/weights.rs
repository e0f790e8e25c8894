//! The weight in the order in which products read it, in the workspace. Twin of
//! `shaders/conv_weights.wgsl`.

use super::channels::Channels;
use super::geometry::{ConvKind, Geometry};
use crate::dispatch::{WORKSPACE_VALUES_MAX, grid};
use crate::{Dispatch, Operand, Shader};

/// Memory layout of the weights of a product: (groups, taps, rows, columns), with zeros behind the
/// channels of a group that are read and written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WeightLayout {
    pub rows: usize,
    pub columns: usize,
    count: usize,
}

impl WeightLayout {
    /// Returns the layout with rows and columns filled up to multiples of these; `None` if it takes
    /// too much memory.
    pub fn new(geometry: &Geometry, [rows, columns]: [usize; 2]) -> Option<Self> {
        let Channels { group_read, group_written, .. } = Channels::of(geometry);
        let rows = group_read.next_multiple_of(rows);
        let columns = group_written.next_multiple_of(columns);
        let count = geometry.groups() * geometry.taps() * rows * columns;
        (count <= WORKSPACE_VALUES_MAX).then_some(Self { rows, columns, count })
    }

    /// Returns the workspace with the weights.
    pub fn workspace(&self) -> Operand {
        Operand::workspace(self.count)
    }

    /// Returns the dispatch that writes them.
    pub fn dispatch(&self, geometry: &Geometry) -> Dispatch {
        let Channels { group_read, group_written, .. } = Channels::of(geometry);
        let (taps, of_o) = (geometry.taps(), geometry.group_c() * geometry.taps());
        let [by_read, by_written] = match geometry.kind {
            ConvKind::InputGrad => [of_o, taps],
            ConvKind::Forward | ConvKind::WeightGrad => [taps, of_o],
        };
        let by_group = geometry.group_o() * of_o;
        let sizes = [self.count, group_read, group_written, self.rows, self.columns, taps];
        let params = [&sizes[..], &[by_read, by_written, by_group]].concat();
        Dispatch {
            shader: Shader::new("conv_weights", "permute"),
            operands: vec![Operand::Input(1), self.workspace()],
            params: params.into_iter().map(|word| word as u32).collect(),
            groups: grid(self.count, 64),
        }
    }
}

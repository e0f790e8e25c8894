//! The weight in the order in which products read it, in the workspace. Twin of
//! `shaders/conv_weights.wgsl`.

use super::channels::Channels;
use super::geometry::{ConvKind, Geometry};
use super::words;
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
        if count > WORKSPACE_VALUES_MAX {
            return None;
        }
        Some(Self { rows, columns, count })
    }

    pub fn workspace(&self) -> Operand {
        Operand::workspace(self.count)
    }

    /// Returns the dispatch that writes the weights to the workspace.
    pub fn dispatch(&self, geometry: &Geometry) -> Dispatch {
        let Channels { group_read, group_written, .. } = Channels::of(geometry);
        let taps = geometry.taps();
        // Weights of an output channel.
        let of_o = geometry.group_c() * taps;
        let [by_read, by_written] = match geometry.kind {
            ConvKind::InputGrad => [of_o, taps],
            ConvKind::Forward | ConvKind::WeightGrad => [taps, of_o],
        };
        let params = [
            self.count,
            group_read,
            group_written,
            self.rows,
            self.columns,
            taps,
            by_read,
            by_written,
            geometry.group_o() * of_o,
        ];
        Dispatch {
            shader: Shader::new("conv_weights", "permute"),
            operands: vec![Operand::Input(1), self.workspace()],
            params: words(&params),
            groups: grid(self.count, 64),
        }
    }
}

//! The gradient by the weight in parts, which a second dispatch adds. Twin of
//! `shaders/conv_parts.wgsl`.

use super::geometry::Geometry;
use super::words;
use crate::dispatch::grid;
use crate::{Dispatch, OpCall, Operand, Shader};

/// Memory layout of the parts: elements from a part, an output channel, an input channel and a tap
/// to the next.
#[derive(Clone, Copy, Debug)]
pub struct PartLayout {
    pub part: usize,
    pub o: usize,
    pub c: usize,
    pub(crate) tap: usize,
}

impl PartLayout {
    /// Layout of parts that have the layout of the weight.
    pub(crate) fn of_weight(geometry: &Geometry) -> Self {
        let taps = geometry.taps();
        Self { part: geometry.weights(), o: geometry.group_c() * taps, c: taps, tap: 1 }
    }
}

/// Returns the dispatch that adds `parts` parts.
pub fn add(call: &OpCall, parts: usize, layout: &PartLayout, workspace: Operand) -> Dispatch {
    let geometry = Geometry::of(call);
    let params = [
        geometry.weights(),
        parts,
        usize::from(call.accumulates()),
        geometry.group_c(),
        geometry.taps(),
        layout.part,
        layout.o,
        layout.c,
        layout.tap,
    ];
    Dispatch {
        shader: Shader::new("conv_parts", "add_parts"),
        operands: vec![workspace, Operand::Output(0)],
        params: words(&params),
        groups: grid(geometry.weights(), 64),
    }
}

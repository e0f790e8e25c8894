//! Channels of the products of a convolution.

use super::geometry::{ConvKind, Geometry};

/// Channels that a product reads and writes, of all groups and of one group.
#[derive(Clone, Copy)]
pub(crate) struct Channels {
    pub read: usize,
    pub written: usize,
    pub(crate) group_read: usize,
    pub(crate) group_written: usize,
}

impl Channels {
    pub fn of(geometry: &Geometry) -> Self {
        match geometry.kind {
            ConvKind::InputGrad => Self {
                read: geometry.o,
                written: geometry.c,
                group_read: geometry.group_o(),
                group_written: geometry.group_c(),
            },
            ConvKind::Forward | ConvKind::WeightGrad => Self {
                read: geometry.c,
                written: geometry.o,
                group_read: geometry.group_c(),
                group_written: geometry.group_o(),
            },
        }
    }
}

//! Channels of the products of a convolution.

use super::geometry::{ConvKind, Geometry};

/// Channels of a product: those that are read and those that are written, of all groups and of one.
#[derive(Clone, Copy)]
pub(crate) struct Channels {
    pub read: usize,
    pub written: usize,
    pub(crate) group_read: usize,
    pub(crate) group_written: usize,
}

impl Channels {
    pub fn of(geometry: &Geometry) -> Self {
        let (c, o) = ([geometry.c, geometry.group_c()], [geometry.o, geometry.group_o()]);
        let (read, written) = if geometry.kind == ConvKind::InputGrad { (o, c) } else { (c, o) };
        let ([read, group_read], [written, group_written]) = (read, written);
        Self { read, written, group_read, group_written }
    }
}

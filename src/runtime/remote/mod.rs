//! Devices of other nodes.

pub mod values;

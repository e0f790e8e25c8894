//! Kernels that train nothing: a device to time dispatches on, loads that reach a device's peaks,
//! and one that keeps it busy for a test.

pub mod device;
pub mod peak;
pub mod spin;
